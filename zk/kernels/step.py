"""The settings of one Adam update as the scalars that kernels take, and the check that tensors fit together. Without triton."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from zk.kernels.eight_bit import CODES, GOLDEN
from zk.kernels.launch import check_floats


@dataclasses.dataclass(frozen=True, slots=True)
class AdamStep:
    """The scalars of one update. ``step`` counts from 1; ``grad_scale`` multiplies the gradient (clipping, loss scale)."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool
    """True for AdamW, False for Adam."""
    step: int
    """Of this update, from 1."""
    grad_scale: float = 1.0
    """The factor of the gradient: clipping, and one over the loss scale."""
    maximize: bool = False
    amsgrad: bool = False
    """For ``zk.offload.cpu_adam.adam_`` only."""

    def __post_init__(self) -> None:
        if self.step < 1:
            raise ValueError(f"step counts from 1; got {self.step}")

    @classmethod
    def of(cls, group: Mapping[str, Any], decoupled: bool, number: int, grad_scale: float = 1.0) -> AdamStep:
        """The scalars of update ``number``, by the options of a param_group; ``decoupled`` where these do not say it."""
        lr, beta1, beta2, eps, decay = map(float, (group["lr"], *group["betas"], group["eps"], group["weight_decay"]))
        decoupled, *flags = (bool(group.get(*option)) for option in (("decoupled_weight_decay", decoupled), ("maximize",), ("amsgrad",)))
        return cls(lr, beta1, beta2, eps, decay, decoupled, number, grad_scale, *flags)

    @property
    def bias_corrections(self) -> tuple[float, float]:
        return 1 - self.beta1**self.step, 1 - self.beta2**self.step

    @property
    def step_size(self) -> float:
        return (self.lr / self.bias_corrections[0]) * -1

    @property
    def signed_scale(self) -> float:
        return -self.grad_scale if self.maximize else self.grad_scale

    def scalars(self) -> tuple[Any, ...]:
        """The scalars of the one-pass kernels, as fp32: scale, l2, decay, lerp, from_grad, beta2, one_minus_beta2, bc2_sqrt, eps, step_size;
        and what rounding to 8-bit codes mixes in.

        With a beta1 of at most 0.5, torch interpolates from the gradient's side: m = fma(-beta1, g - m, g).
        """
        return _scalars(self)

    def check_coded(self) -> None:
        """Raise ValueError if moments in 8 bits cannot be held for these options."""
        if self.amsgrad:
            raise ValueError("8-bit moments have no amsgrad: remove it, or keep moments in fp32 or bf16")
        if not self.eps >= 0.99e-8:
            raise ValueError(f"8-bit moments need an eps of at least 1e-8, as smaller second moments are not told apart; got {self.eps}")
        carried = self.beta1**2 / self.beta2 if self.beta2 else 1.0
        most = math.inf if carried >= 1 else self.beta1 * (1 - self.beta1) / math.sqrt((1 - self.beta2) * (1 - carried))
        if not most <= 15:
            raise ValueError(
                f"8-bit first moments hold up to 15 times the root of the second one, and betas ({self.beta1}, {self.beta2}) may make it {most:.3g} "
                "times that; lower the second one, raise the first, or keep moments in fp32 or bf16"
            )


@functools.lru_cache(maxsize=64)
def _scalars(step: AdamStep) -> tuple[Any, ...]:
    weight = 1 - step.beta1
    return (
        np.float32(step.signed_scale),
        np.float32(0 if step.decoupled else step.weight_decay),
        np.float32(1 - step.lr * step.weight_decay if step.decoupled else 1),
        np.float32(weight) if weight < 0.5 else np.float32(weight) - np.float32(1),
        weight >= 0.5,
        np.float32(step.beta2),
        np.float32(1 - step.beta2),
        np.float32(math.sqrt(step.bias_corrections[1])),
        np.float32(step.eps),
        np.float32(step.step_size),
        np.uint32(step.step * GOLDEN & 0xFFFFFFFF),
    )


def check_adam(param: Tensor, grad: Tensor, master: Tensor | None, exp_avg: Tensor, exp_avg_sq: Tensor) -> None:
    """Raise ValueError or TypeError for sizes and precisions that do not fit together."""
    if param.ndim != 1 or not param.is_contiguous():
        raise ValueError(f"param must be flat and contiguous; got {tuple(param.shape)}, strides {param.stride()}")
    for name, tensor in (("grad", grad), ("master", master), ("exp_avg", exp_avg), ("exp_avg_sq", exp_avg_sq)):
        if tensor is not None and (tensor.shape != param.shape or not tensor.is_contiguous()):
            raise ValueError(f"{name} must be flat, contiguous and as long as param {tuple(param.shape)}; got {tuple(tensor.shape)}")
        if tensor is not None and tensor.device != param.device:
            raise ValueError(f"{name} is on {tensor.device}, param on {param.device}")
    check_floats(param=param, grad=grad)
    if master is not None and master.dtype not in (torch.float32, torch.int16, CODES):
        raise ValueError(f"master must be fp32, int16 (split), or uint8 (24 bits); got {master.dtype}")
    if (master is None) != (param.dtype == torch.float32):
        raise ValueError(f"a master goes with a 16-bit parameter, and only with one; got param {param.dtype}, master {master is not None}")
    if master is not None and (master.dtype == CODES) != (exp_avg.dtype == CODES):
        raise ValueError(f"a master of 24 bits goes with moments in 8 bits, and only with them; got {master.dtype} and {exp_avg.dtype}")
    if master is not None and master.dtype != torch.float32 and param.dtype != torch.bfloat16:
        raise ValueError(f"a split master needs a bf16 parameter; got {param.dtype}")
    if exp_avg.dtype != exp_avg_sq.dtype or exp_avg.dtype not in (torch.float32, torch.bfloat16, CODES):
        raise ValueError(f"moments must both be fp32, bf16 or uint8 (codes); got {exp_avg.dtype} and {exp_avg_sq.dtype}")
