"""Tensors without memory: whoever promises their values makes them once a unit is placed.

A tensor on the meta device has a promise on its storage, so that all views and aliases have it too.
Values are made one unit at a time; several ranks get those that the first one makes. It is there for
every optimizer, without an option: zk.deferred_init and zk.load_pretrained promise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from zk.addon import Addon

if TYPE_CHECKING:
    from zk.config import ZeroConfig
    from zk.optimizer import ZeroOptimizer
    from zk.unit import Unit

NAME = "_zk_promise"


class Promise(Protocol):
    """What makes the values of tensors without memory."""

    @property
    def device(self) -> torch.device:
        """Where the model will compute."""

    def make(self, tensor: Tensor) -> Tensor:
        """The values: of the tensor's shape, on any device."""

    def saw(self, tensor: Tensor) -> bool:
        """Tell if nothing was written to the tensor since."""


def promise(tensor: Tensor, by: Promise) -> None:
    """From now on ``by`` makes the values of a tensor without memory; others belong to its device."""
    setattr(tensor.untyped_storage(), NAME, by)


def promise_of(tensor: Tensor) -> Promise | None:
    """Who makes the values of a tensor; None if it has memory, or nobody does."""
    return getattr(tensor.untyped_storage(), NAME, None) if tensor.is_meta else None


def device_for(model: nn.Module) -> torch.device | None:
    """The device of the first promise for a parameter of the model, which all of it goes to."""
    plain = (param for param in model.parameters() if type(param) is nn.Parameter)
    dense = (param for param in plain if param.layout is torch.strided)
    found = (getattr(param.untyped_storage(), NAME, None) for param in dense)
    return next((by.device for by in found if by is not None), None)


def check_promised(name: str, tensor: Tensor) -> None:
    """ValueError for a tensor that has no values, RuntimeError for one whose promise is outdated."""
    by = promise_of(tensor)
    if tensor.is_meta and by is None:
        raise ValueError(
            f"{name!r} is on the meta device and nothing says what its values are; build the model "
            "within zk.deferred_init(), or call zk.load_pretrained(model, path) first; convert it by "
            "dtype= and device= alone"
        )
    if by is not None and not by.saw(tensor):
        raise RuntimeError(
            f"{name!r} was written or converted after deferred_init or load_pretrained, where it had "
            "no memory; initialize inside the context, and convert with ZeroOptimizer(dtype=...)"
        )


@torch.no_grad()
def give_memory(tensor: Tensor, values: Tensor) -> None:
    """Make a tensor without memory hold ``values``; it stays the same object everywhere."""
    # with a count of writes of its own: values are a view of what updates write to
    fresh = values.data.requires_grad_(tensor.requires_grad)
    # torch.utils.swap_tensors without its refusal of weak references: what they refer to stays
    torch._C._swap_tensor_impl(tensor, fresh)


class Promised(Addon):
    def device(self, model: nn.Module, device: torch.device | None) -> torch.device | None:
        return device or device_for(model)

    def check(self, model: nn.Module, optimizers: object, config: ZeroConfig) -> None:
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            check_promised(name, tensor)

    def fill(self, unit: Unit, views: list[Tensor], is_first: bool) -> None:
        for param, view in zip(unit.params, views, strict=True):
            by = promise_of(param)
            if by is not None and is_first:
                view.copy_(by.make(param))
            if by is not None:
                give_memory(param, view)

    def attach(self, optimizer: ZeroOptimizer) -> None:
        for buffer in optimizer.model.buffers():
            by: Any = promise_of(buffer)
            if by is not None:
                give_memory(buffer, by.make(buffer).to(by.device, buffer.dtype))
