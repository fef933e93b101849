"""Tensors without memory: whoever promises their values makes them once a unit is placed.

A tensor on the meta device has a promise on its storage, so that all views and aliases have it too.
Values are made one unit at a time; several ranks get those of the first one. Every optimizer has it.
"""

from typing import Any

import torch
from torch import Tensor, nn

from zk.addon import Addon
from zk.logs import require

NAME = "_zk_promise"


def promise(tensor: Tensor, by: Any) -> None:
    """From now on ``by`` makes the values of a tensor without memory; others belong to its device.

    by.device           where the model will compute
    by.make(tensor)     returns the values, of the tensor's shape, on any device
    by.saw(tensor)      tells if nothing was written to the tensor since
    """
    setattr(tensor.untyped_storage(), NAME, by)


def promise_of(tensor: Tensor) -> Any:
    """Who makes the values of a tensor; None if it has memory, or nobody does."""
    return getattr(tensor.untyped_storage(), NAME, None) if tensor.is_meta else None


def device_for(model: nn.Module) -> torch.device | None:
    """The device of the first promise for a parameter of the model, which all of it goes to."""
    return next((by.device for p in model.parameters() if (by := promise_of(p))), None)


@torch.no_grad()
def give_memory(tensor: Tensor, values: Tensor) -> None:
    """Make a tensor without memory hold ``values``; it stays the same object everywhere."""
    # with a count of writes of its own: values are a view of what updates write to
    fresh = values.data.requires_grad_(tensor.requires_grad)
    # torch.utils.swap_tensors without its refusal of weak references: what they refer to stays
    torch._C._swap_tensor_impl(tensor, fresh)


class Promised(Addon):
    def device(self, model: nn.Module, device: Any) -> Any:
        return device or device_for(model)

    def check(self, model: nn.Module, *_: object) -> None:
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            by = promise_of(tensor)
            require(
                by or not tensor.is_meta,
                f"{name!r} is on the meta device and nothing says what its values are; build the model "
                "within zk.deferred_init(), or call zk.load_pretrained(model, path) first; convert it "
                "by dtype= and device= alone",
            )
            require(
                not by or by.saw(tensor),
                f"{name!r} was written or converted after deferred_init or load_pretrained, where it had "
                "no memory; initialize inside the context, and convert with ZeroOptimizer(dtype=...)",
                RuntimeError,
            )

    def fill(self, unit: Any, views: list[Tensor], is_first: bool) -> None:
        for param, view in zip(unit.params, views, strict=True):
            if by := promise_of(param):
                if is_first:
                    view.copy_(by.make(param))
                give_memory(param, view)

    def attach(self, optimizer: Any) -> None:
        for buffer in optimizer.model.buffers():
            if by := promise_of(buffer):
                give_memory(buffer, by.make(buffer).to(by.device, buffer.dtype))
