"""The unit, and the optimizer, that hold a parameter; and the tensors that hold its bytes, where it is a wrapper around others.

A wrapper subclass (torchao's quantized tensors, a DTensor) has no memory of its own. The tensors inside of it are what units lay out and move;
the wrapper stays the user's object, as its parts get other memory without its noticing. A DTensor has one inside, this rank's part of it, and is
trained like any other parameter. Other wrappers are frozen.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

if TYPE_CHECKING:
    from zk.core.events import Ticket


def is_wrapper(tensor: Tensor) -> bool:
    """Check that other tensors hold the bytes of this one."""
    kind = type(tensor)
    if kind is Tensor or kind is nn.Parameter:
        return False
    return is_traceable_wrapper_subclass(tensor) and (is_dtensor(tensor) or not kind.__module__.startswith("torch.distributed."))


def is_dtensor(tensor: Tensor) -> bool:
    """Check that this is a DTensor, around this rank's part of a tensor."""
    return hasattr(tensor, "_local_tensor")  # without importing all of DTensor


def is_coded(tensor: Tensor) -> bool:
    """Check that this is a wrapper around codes and scales, which only its own code can read."""
    return is_wrapper(tensor) and not is_dtensor(tensor)


def has_codes(param: Tensor) -> bool:
    """Check that only the parameter's own code can read it; bitsandbytes may keep codes as bf16."""
    return is_coded(param) or hasattr(param, "quant_state")


def inner_tensors(tensor: Tensor, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors that hold the bytes, by name: itself, or what it is a wrapper around, such as "weight.qdata"; a DTensor's has its name."""
    if not is_coded(tensor):
        yield name, getattr(tensor, "_local_tensor", tensor)
        return
    for part in tensor.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
        yield from inner_tensors(getattr(tensor, part), f"{name}.{part}")


def tie_inner(model: nn.Module) -> None:
    """Give wrappers around the same memory, such as one table of scales, the same tensor for it: nn.Parameter makes another for each."""
    known: dict[Any, Tensor] = {}

    def tie(wrapper: Any) -> None:
        for name in wrapper.__tensor_flatten__()[0]:
            part: Tensor = getattr(wrapper, name)
            if is_coded(part):
                tie(part)
            elif not part.is_meta and part.numel():
                place = part.device, part.data_ptr(), part.dtype, part.shape, part.stride()
                if known.setdefault(place, part) is not part:
                    setattr(wrapper, name, known[place])

    for param in filter(is_coded, model.parameters()):
        if owner_of(param) is None:
            tie(param)


def rebuilt(tensor: Tensor, make: Callable[[Tensor], Tensor]) -> Tensor:
    """A tensor like this one, around what ``make`` gives for each that holds its bytes."""
    if is_dtensor(tensor):
        from torch.distributed.tensor import DTensor

        place: dict[str, Any] = {"device_mesh": tensor.device_mesh, "placements": tensor.placements}  # type: ignore[attr-defined]
        local = make(tensor._local_tensor)  # type: ignore[attr-defined]
        # torch copies and pickles a DTensor whose own address is 0, and would count from there to where a view begins in its storage
        made = DTensor.from_local(local.new_empty(0), **place, run_check=False, shape=tensor.shape, stride=tensor.stride())
        made._local_tensor = local
        return made
    if not is_wrapper(tensor):
        return make(tensor)
    names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    inner = {name: rebuilt(getattr(tensor, name), make) for name in names}
    return type(tensor).__tensor_unflatten__(inner, context, tensor.size(), tensor.stride())  # type: ignore[attr-defined, no-any-return]


def local_of(value: Tensor, param: Tensor) -> Tensor:
    """The part of ``value`` that this rank has, cut as ``param`` is: ``value`` itself, unless it is a DTensor.

    A collective of the ranks that ``param`` is cut over, where they have it otherwise (the sum over ranks has not been taken, say).
    """
    if not is_dtensor(value):
        return value
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    if value.placements != param.placements:  # type: ignore[attr-defined]
        value = value.redistribute(param.device_mesh, param.placements)  # type: ignore[attr-defined]
    local: Tensor = value._local_tensor  # type: ignore[attr-defined]
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


def fit(param: Tensor) -> None:
    """Give a DTensor the dtype and the device of the tensor inside, which has got other ones. It stays the same object."""
    local: Tensor = param._local_tensor  # type: ignore[attr-defined]
    if (param.dtype, param.device) != (local.dtype, local.device):
        fresh: Any = rebuilt(param, Tensor.detach).requires_grad_(param.requires_grad)
        torch._C._swap_tensor_impl(param, fresh)
        param._spec = fresh._spec  # type: ignore[attr-defined]


class Gradients(Protocol):
    """Keeper of gradients that have left."""

    def has_left(self, param: nn.Parameter) -> bool:
        """Check that the parameter has a gradient, and that it is somewhere else."""

    def is_asked(self, param: nn.Parameter) -> bool:
        """Check that it has one there, or may have one on another rank."""

    def read(self, param: nn.Parameter) -> Tensor | None:
        """Return the gradient."""

    def write(self, param: nn.Parameter, value: Tensor | None) -> None:
        """Set ``param.grad``."""


class Holder(Protocol):
    """A unit's store, as its parameters see it."""

    owner: weakref.ref[Any] | None  # the ZeroOptimizer, until that is closed
    gradients: weakref.ref[Gradients] | None
    watches_data: bool  # wants to hear of ``data`` that are used

    def use(self) -> None:
        """Make released parameters usable, or raise."""

    def take_data(self, param: nn.Parameter) -> None:
        """Note that the ``data`` of a full parameter are used."""


# by the id of a parameter, as long as that lives: what ends the entry with it, who holds it, and the update of it that is in flight
HOLDERS: dict[int, tuple[weakref.ref[Tensor], weakref.ref[Holder], Ticket | None]] = {}


def hold(param: Tensor, holder: Holder, update: Ticket | None = None) -> None:
    """Note who holds ``param``, without keeping that alive."""
    key = id(param)
    HOLDERS[key] = weakref.ref(param, lambda _: HOLDERS.pop(key, None)), weakref.ref(holder), update


def holder_of(param: Tensor) -> Any:
    """The UnitStore that holds ``param``, or None."""
    entry = HOLDERS.get(id(param))
    return entry[1]() if entry is not None else None


def owner_of(param: Tensor) -> Any:
    """The ZeroOptimizer that holds ``param``, or None."""
    holder = holder_of(next(inner_tensors(param))[1])
    return holder.owner() if holder is not None and holder.owner is not None else None


def held_params() -> list[Tensor]:
    """All parameters that an optimizer holds."""
    found = [reference() for reference, *_ in list(HOLDERS.values())]
    return [param for param in found if param is not None and owner_of(param) is not None]
