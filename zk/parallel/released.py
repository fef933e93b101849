"""In: parameters whose memory was given back (stage 3). Out: a class that stands in for theirs and turns every use into a gather or an error.

A released parameter keeps its shape but has no memory, and torch would read through a null pointer. While released, a parameter's
class is one of these: metadata (shape, dtype, grad, hooks ...) reads as always, and any operation that needs values goes to the
``on_use`` of the unit that owns it, which gathers inside a forward and raises outside.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

_PROPERTIES = frozenset(
    (
        "shape",
        "dtype",
        "device",
        "requires_grad",
        "grad",
        "is_leaf",
        "ndim",
        "layout",
        "is_cuda",
        "is_cpu",
        "is_sparse",
        "is_quantized",
        "is_meta",
        "is_nested",
        "itemsize",
        "nbytes",
        "names",
        "grad_fn",
        "_version",
        "retains_grad",
        "_backward_hooks",
        "output_nr",
        "is_mps",
        "is_xpu",
        "is_sparse_csr",
        "is_mkldnn",
    )
)
_METHODS = frozenset(
    (
        "size",
        "numel",
        "dim",
        "nelement",
        "stride",
        "storage_offset",
        "is_contiguous",
        "is_floating_point",
        "is_complex",
        "element_size",
        "get_device",
        "requires_grad_",
        "register_hook",
        "register_post_accumulate_grad_hook",
        "__hash__",
        "__len__",
        "untyped_storage",
        "ndimension",
        "is_pinned",
        "is_inference",
        "_is_view",
        "is_shared",
        "has_names",
        "zero_grad",
        "_has_compatible_shallow_copy_type",
    )
)
# what makes a tensor of the same shape, and reads no value
_LIKE = frozenset(
    (
        "empty_like",
        "zeros_like",
        "ones_like",
        "full_like",
        "rand_like",
        "randn_like",
        "randint_like",
        "new_empty",
        "new_empty_strided",
        "new_zeros",
        "new_ones",
        "new_full",
        "new_tensor",
    )
)
# released parameter -> what to call with its name when values are needed
_on_use: WeakIdKeyDictionary = WeakIdKeyDictionary()
_own_class: WeakIdKeyDictionary = WeakIdKeyDictionary()


def _is_metadata(function: Any) -> bool:
    name = getattr(function, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        return getattr(getattr(function, "__self__", None), "__name__", "") in _PROPERTIES
    return name in _METHODS or name in _LIKE


# what takes parameters as the places where gradients go
_ENGINE = (torch.autograd.grad, torch.autograd.backward)
_DATA = Tensor.data


# what converts or moves a tensor, and gives back the tensor itself where it is that already
_CONVERT = (Tensor.to, Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16, Tensor.cpu, Tensor.cuda, Tensor.contiguous)


def _stays(func: Callable[..., Tensor], param: Tensor, args: Any, kwargs: Any) -> bool:
    """Check that ``func(param, *args, **kwargs)`` gives back ``param`` itself."""
    with torch._C.DisableTorchFunctionSubclass():
        like = torch.empty(0, dtype=param.dtype, device=param.device)
        return func(like, *args, **kwargs) is like


class Released(nn.Parameter):
    """A parameter without memory. Never constructed: the class of existing parameters is set to a subclass of it."""

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func in _CONVERT and isinstance(args[0], Released) and _stays(func, args[0], args[1:], kwargs):
            return args[0]  # model.to(where it is): nothing to do
        if getattr(func, "__self__", None) is _DATA and len(args) == 2 and args[1] is args[0]:
            return None
        if not _is_metadata(func) and func not in _ENGINE:
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, Released):
                    _on_use[leaf]()
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        return f"Parameter(released by stage 3, shape={tuple(self.shape)}, dtype={self.dtype}; zk.gather makes it readable)"


class Updating(Released):
    """A parameter whose update goes on beside training: any use of its values waits for that."""

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        _on_use[self]()
        return repr(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        _on_use[self]()
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        _on_use[self]()
        return self.__reduce_ex__(protocol)


@functools.cache
def _stand_in(kind: type[nn.Parameter], role: type[Released]) -> type[nn.Parameter]:
    return role if kind is nn.Parameter else type(f"{role.__name__}{kind.__name__}", (role, kind), {})


def mark(param: nn.Parameter, on_use: Callable[[], None], role: type[Released] = Released) -> None:
    """Put the stand-in in place; ``on_use`` makes the parameter usable (and calls ``unmark``) or raises."""
    if not isinstance(param, Released):
        _on_use[param], _own_class[param] = on_use, type(param)
        param.__class__ = _stand_in(type(param), role)  # type: ignore[assignment]


def unmark(param: nn.Parameter) -> None:
    """Give the parameter its own class back."""
    if isinstance(param, Released):
        param.__class__ = _own_class.pop(param)


def is_released(param: Tensor) -> bool:
    """Whether ``param`` has no memory at the moment."""
    return isinstance(param, Released) and not isinstance(param, Updating)
