"""Classes that stand in for a parameter's own, while its memory was given back (stage 3), or its gradient has left.

A released parameter keeps its shape but has no memory, and torch would read through a null pointer. While released, a parameter's
class is one of these: metadata (shape, dtype, hooks ...) reads as always, and any operation that needs values goes to the
``on_use`` of the unit that owns it, which gathers inside a forward and raises outside.
From backward to zero_grad() a parameter's class has a ``grad`` that asks the optimizer for the gradient, which is somewhere else. Where what
is done to a parameter's ``data`` would be lost, its class has a ``data`` that says so.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from zk.core.owners import HOLDERS, Gradients, Holder, hold, holder_of

if TYPE_CHECKING:
    from zk.core.events import Ticket

_VALUES = frozenset(("data", "T", "H", "mT", "mH", "real", "imag"))  # properties that show values; all others of torch's own are metadata
_METHODS = frozenset((
    "size", "numel", "dim", "nelement", "stride", "storage_offset", "is_contiguous", "is_floating_point", "is_complex", "element_size",
    "get_device", "requires_grad_", "register_hook", "register_post_accumulate_grad_hook", "__hash__", "__len__", "untyped_storage",
    "ndimension", "is_pinned", "is_inference", "_is_view", "is_shared", "has_names", "_has_compatible_shallow_copy_type",
    # what makes a tensor of the same shape, and reads no value
    "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like", "new_empty", "new_empty_strided",
    "new_zeros", "new_ones", "new_full", "new_tensor",
))  # fmt: skip


def _is_metadata(function: Any) -> bool:
    name = getattr(function, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        shown = getattr(function, "__self__", None)
        return isinstance(shown, types.GetSetDescriptorType) and shown.__name__ not in _VALUES
    return name in _METHODS


# what takes parameters as the places where gradients go
_ENGINE = (torch.autograd.grad, torch.autograd.backward)
# torch's own places of data and gradient
_DATA: Any = Tensor.data
_GRAD: Any = Tensor.grad

# what converts or moves a tensor, and gives back the tensor itself where it is that already
_CONVERT = (Tensor.to, Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16, Tensor.cpu, Tensor.cuda, Tensor.contiguous)


def _stays(func: Callable[..., Tensor], param: Tensor, args: Any, kwargs: Any) -> bool:
    """Check that ``func(param, *args, **kwargs)`` gives back ``param`` itself."""
    with torch._C.DisableTorchFunctionSubclass():
        like = torch.empty(0, dtype=param.dtype, device=param.device)
        return func(like, *args, **kwargs) is like


def _keeper_of(param: nn.Parameter) -> Gradients | None:
    """Keeper of the gradient of ``param``, once that has left."""
    holder = holder_of(param)
    return holder.gradients() if holder is not None and holder.gradients is not None else None


def _gradients_of(param: nn.Parameter) -> Gradients | None:
    """Keeper of the gradient of ``param``; None where that is in its own place."""
    gradients = _keeper_of(param)
    return gradients if gradients is not None and gradients.is_asked(param) else None


def _elsewhere(param: nn.Parameter) -> Gradients | None:
    """Keeper of the gradient, unless all of it is in its own place."""
    gradients = _gradients_of(param)
    return None if gradients is None or (own_grad(param) is not None and not gradients.has_left(param)) else gradients


def _watches_data(param: nn.Parameter) -> bool:
    holder = holder_of(param)
    return holder is not None and holder.watches_data


class _StandIn:
    """Mixin: the gradient may be somewhere else. Copied, pickled and shown as what it stands in for."""

    own_class: type[nn.Parameter] = nn.Parameter

    @property
    def grad(self: Any) -> Tensor | None:
        gradients = _elsewhere(self)
        return own_grad(self) if gradients is None else gradients.read(self)

    @grad.setter
    def grad(self: Any, value: Tensor | None) -> None:
        gradients = _elsewhere(self)
        if gradients is None:
            _GRAD.__set__(self, value)
        else:
            gradients.write(self, value)

    @grad.deleter
    def grad(self: Any) -> None:
        self.grad = None

    def __repr__(self: Any, **kwargs: Any) -> str:
        if is_released(self):
            return f"Parameter(released by stage 3, shape={tuple(self.shape)}, dtype={self.dtype}; zk.gather makes it readable)"
        with _as_itself(self):
            return repr(self)

    def __deepcopy__(self: Any, memo: dict[int, Any]) -> Any:
        with _as_itself(self):
            return copy.deepcopy(self, memo)

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        with _as_itself(self):
            return self.__reduce_ex__(protocol)


class Watched(_StandIn, nn.Parameter):  # type: ignore[misc]
    """A full parameter. What is done to its ``data`` leaves no trace, so it counts as written."""

    @property
    def data(self) -> Tensor:
        _data_taken(self)
        return _DATA.__get__(self)  # type: ignore[no-any-return]

    @data.setter
    def data(self, value: Tensor) -> None:
        _data_taken(self)
        _DATA.__set__(self, value)


@contextlib.contextmanager
def _as_itself(param: nn.Parameter) -> Iterator[None]:
    """Context: the parameter can be used, and is of its own class."""
    if isinstance(param, Released):
        _use(param)
    role = type(param)
    stand_in([param], None)
    try:
        yield
    finally:
        param.__class__ = role  # type: ignore[assignment]


class Released(_StandIn, nn.Parameter):  # type: ignore[misc]
    """A parameter without memory. Never constructed: the class of existing parameters is set to a subclass of it."""

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], kinds: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func in _CONVERT and isinstance(args[0], Released) and _stays(func, args[0], args[1:], kwargs):
            return args[0]  # model.to(where it is): nothing to do
        is_data = getattr(func, "__self__", None) is _DATA
        if is_data and len(args) == 2 and args[1] is args[0]:
            return None
        if not _is_metadata(func) and func not in _ENGINE:
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, Released):
                    _use(leaf)
            if is_data and len(args) == 1:
                _data_taken(args[0])
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)


class Updating(Released):
    """A parameter whose update goes on in the background: any use of its values waits for that."""


@functools.cache
def _class_for(kind: type[nn.Parameter], role: type[nn.Parameter]) -> type[nn.Parameter]:
    if kind is nn.Parameter:
        return role
    return type(kind.__name__, (role, kind), {"own_class": kind})  # under its own name, as libraries tell "Params4bit" by that


def stand_in(params: Sequence[nn.Parameter], role: type[nn.Parameter] | None) -> None:
    """Give parameters the class for ``role``: Released, as they have no memory, or Watched, as they are full; None: their own."""
    for param in params:
        own = param.own_class if isinstance(param, _StandIn) else type(param)
        param.__class__ = own if role is None else _class_for(own, role)  # type: ignore[assignment]


def mark(param: nn.Parameter, holder: Holder, update: Ticket | None = None) -> None:
    """Let every use of the parameter's values go to its holder: it waits for the ``update`` and calls ``unmark``, or raises."""
    hold(param, holder, update)
    stand_in([param], Updating)


def _use(param: nn.Parameter) -> None:
    """Make the values of a released parameter usable, or raise."""
    holder = holder_of(param)
    if holder is not None:
        holder.use()
        return
    entry = HOLDERS.get(id(param))
    if entry is None or entry[2] is None:
        raise RuntimeError("this parameter was partitioned by a ZeroOptimizer that is gone, and its values too; keep the optimizer with its model")
    entry[2].wait()  # the optimizer is gone; what went wrong in its last update is not
    unmark(param)


def unmark(param: nn.Parameter) -> None:
    """Make the parameter usable."""
    if isinstance(param, Released):
        _dress_full(param)


def _dress_full(param: nn.Parameter) -> None:
    """Give the parameter the class that it has while it is full."""
    stand_in([param], Watched if _watches_data(param) or _gradients_of(param) is not None else None)


def is_released(param: Tensor) -> bool:
    """Tell if ``param`` has no memory at the moment."""
    return isinstance(param, Released) and not isinstance(param, Updating)


def redress(param: nn.Parameter) -> None:
    """Give a full parameter the class that its holder asks for now."""
    if not isinstance(param, Released):
        _dress_full(param)


def _data_taken(param: nn.Parameter) -> None:
    if _watches_data(param):
        holder_of(param).take_data(param)


def own_grad(param: nn.Parameter) -> Tensor | None:
    """The gradient in torch's own place."""
    with torch._C.DisableTorchFunctionSubclass():
        return _GRAD.__get__(param)  # type: ignore[no-any-return]


def grad_left(param: nn.Parameter) -> None:
    """Note that the gradient is somewhere else, or may be, and clear torch's own place of it."""
    _GRAD.__set__(param, None)
    if not isinstance(param, _StandIn) and _keeper_of(param) is not None:
        stand_in([param], Watched)


def grad_is_away(param: nn.Parameter) -> bool:
    """Check that the parameter has a gradient, and that it is somewhere else."""
    gradients = _gradients_of(param)
    return gradients is not None and gradients.has_left(param)


def compute_as_itself(param: nn.Parameter, whether: bool) -> None:
    """Give the parameter its own class for a forward, as code from torch.compile goes by the class; ``False``: the forward has ended."""
    if not whether:
        redress(param)
    elif isinstance(param, Watched):
        stand_in([param], None)


def grad_gone(param: nn.Parameter) -> None:
    """Note that there is no gradient any more."""
    if isinstance(param, Watched):
        _dress_full(param)
