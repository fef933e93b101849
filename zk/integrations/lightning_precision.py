"""In: the precision plugin that Lightning chose. Out: one that leaves weights, loss scale and clipping to the ZeroOptimizer.

What Lightning does around forward stays: autocast where it is "mixed", the default dtype and 16-bit inputs where it is "true". What it
would do to weights and gradients is zk's: 16-bit parameters with an fp32 master, and for fp16 one loss scale.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn

from zk.optimizer import ZeroOptimizer

# Lightning's name -> what parameters are cast to; None: they keep their own
DTYPES: dict[str, torch.dtype | None] = {
    "32-true": None,
    "bf16-true": torch.bfloat16,
    "bf16-mixed": torch.bfloat16,
    "16-true": torch.float16,
    "16-mixed": torch.float16,
}
_KNOWN = ("Precision", "HalfPrecision", "MixedPrecision")  # the plugins of these names
_BASE: Any = object  # Lightning's own class is put beside the mixins below when its package is known


class Delegated(_BASE):  # type: ignore[misc]
    """What Trainer and Fabric have in common.

    Args:
        around: Lightning's plugin for what is around forward.
    """

    def __init__(self, around: Any) -> None:
        super().__init__()
        if type(around).__name__ not in _KNOWN or around.precision not in DTYPES:
            raise ValueError(
                f"precision={around.precision!r} ({type(around).__name__}) is not for zk, which trains fp32, bf16 and fp16 parameters; "
                f"choose one of {', '.join(map(repr, DTYPES))}"
            )
        self.around, self.precision = around, around.precision

    @property
    def dtype(self) -> torch.dtype | None:
        """What parameters are cast to; None: they keep their own."""
        return DTYPES[self.precision]

    @property
    def mixed(self) -> bool:
        """Whether the model outside of training is an fp32 one."""
        return str(self.precision).endswith("mixed")

    def forward_context(self) -> Any:
        return self.around.forward_context()

    def convert_input(self, data: Any) -> Any:
        return self.around.convert_input(data)

    def convert_output(self, data: Any) -> Any:
        return self.around.convert_output(data)


class TrainerPrecision(Delegated):
    """For a Trainer. ``optimizer`` is the one that trains at the moment."""

    optimizer: ZeroOptimizer | None = None

    def backward(self, tensor: Tensor, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        scaled = self.optimizer.scaled(tensor) if self.optimizer is not None else contextlib.nullcontext(tensor)
        with scaled as loss:
            model.backward(loss, *args, **kwargs)

    def clip_grad_by_norm(self, optimizer: ZeroOptimizer, clip_val: float) -> None:
        optimizer.clip_grad_norm_(clip_val)

    def clip_grad_by_value(self, optimizer: ZeroOptimizer, clip_val: float) -> None:
        torch.nn.utils.clip_grad_value_((param for group in optimizer.param_groups for param in group["params"]), clip_val)


class FabricPrecision(Delegated):
    """For Fabric: its strategy scales and clips."""


class LightningZeroOptimizer(ZeroOptimizer):
    """A ZeroOptimizer as Lightning handles optimizers.

    Lightning wraps it in objects that take over its class and look up in it what they do not have: what methods called on these set must
    reach the optimizer itself. And a step for which no rank has a gradient (``training_step`` returned None) changes nothing.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        inside = self.__dict__.get("_optimizer")
        if inside is not None and name not in self.__dict__:
            setattr(inside, name, value)
        else:
            super().__setattr__(name, value)

    def _without_gradient(self) -> None:
        return


def through_forward(module: nn.Module, method: str, args: Any, kwargs: Any) -> Any:
    """``module.method(*args, **kwargs)``, from within a forward of the module, where zk's hooks see it.

    The arguments do not pass the hooks: which of them are cast is the precision plugin's to say.
    """
    own = module.__dict__.get("forward")

    def restore() -> None:
        module.__dict__.pop("forward", None)
        if own is not None:
            module.__dict__["forward"] = own

    def once() -> Any:
        restore()
        return getattr(module, method)(*args, **kwargs)

    module.__dict__["forward"] = once
    try:
        return module()
    finally:
        restore()
