"""The number that gradients are multiplied by: loss scale, norm, clip. The precisions that a CPU is slow in."""

from __future__ import annotations

import functools
import logging
import math
from typing import Any

import torch

from zk.config import DynamicLossScale

log = logging.getLogger("zk")
# torch gives these products to oneDNN where that has kernels for the CPU, and else to a plain loop
_SUPPORTED = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}


def has_fast_products(dtype: torch.dtype) -> bool:
    """Check that the CPU multiplies matrices in ``dtype`` about as fast as in fp32. True where torch does not say."""
    if dtype not in _SUPPORTED or not torch.backends.mkldnn.is_available():
        return True
    return bool(getattr(torch.ops.mkldnn, _SUPPORTED[dtype])())


@functools.cache
def warn_of_slow_products(dtype: torch.dtype) -> None:
    """Warn, once per process, of a model that computes in ``dtype`` on a CPU that is slow in it."""
    if not has_fast_products(dtype):
        log.warning(
            "the model computes in %s, for which torch has no fast kernels on this CPU: matrix products take 10 to 100 times as long as in "
            "fp32; use dtype='fp32'",
            dtype,
        )


class LossScaler:
    """The loss scale: constant, or halved on overflow and doubled after a window without one.

    Args:
        rule: DynamicLossScale, a number, or None for no scaling.
    """

    def __init__(self, rule: DynamicLossScale | float | None) -> None:
        self.rule = rule if isinstance(rule, DynamicLossScale) else None
        self.scale = rule.init if isinstance(rule, DynamicLossScale) else 1.0 if rule is None else float(rule)
        self.active = rule is not None
        self.clean_steps = 0  # since the last overflow or growth
        self.patience = rule.hysteresis if isinstance(rule, DynamicLossScale) else 0

    def update(self, overflow: bool) -> None:
        """Account for one step."""
        rule = self.rule
        if rule is None:
            return
        if overflow:
            self.clean_steps = 0
            if self.patience > 1:
                self.patience -= 1
            else:
                self.scale = max(self.scale / rule.factor, rule.minimum)
            return
        self.clean_steps += 1
        if self.clean_steps >= rule.window:  # more where a state of a longer window was loaded
            self.clean_steps, self.patience = 0, rule.hysteresis
            self.scale *= rule.factor

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale, "clean_steps": self.clean_steps, "patience": self.patience, "active": self.active}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with the scale of a run that had one; that of bf16 or fp32 says nothing about fp16."""
        if self.rule is not None and state.get("active", True):
            self.scale, self.clean_steps, self.patience = float(state["scale"]), int(state["clean_steps"]), int(state["patience"])


def default_loss_scale(dtypes: set[torch.dtype]) -> DynamicLossScale | None:
    """What loss_scale="auto" means: dynamic if any trained parameter is fp16, whose gradients underflow; none otherwise."""
    return DynamicLossScale() if torch.float16 in dtypes else None


def clip_coefficient(norm: float, max_norm: float | None) -> float:
    """What gradients of 2-norm ``norm`` are multiplied by, as in torch.nn.utils.clip_grad_norm_."""
    return 1.0 if max_norm is None else min(1.0, max_norm / (norm + 1e-6))


def norm_of(sum_of_squares: float, scale: float) -> float:
    """The 2-norm of gradients that were scaled by ``scale``; not finite if any of them is not."""
    return math.sqrt(sum_of_squares) / scale if sum_of_squares >= 0 else math.nan
