"""The settings of one Adam update as the scalars that kernels take."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from zk.kernels.eight_bit import GOLDEN


@dataclasses.dataclass(frozen=True, slots=True)
class AdamStep:
    """The scalars of one update."""

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

    def __post_init__(self) -> None:
        if self.step < 1:
            raise ValueError(f"step counts from 1; got {self.step}")

    @classmethod
    def of(
        cls, group: Mapping[str, Any], decoupled: bool, number: int, grad_scale: float = 1.0
    ) -> AdamStep:
        """The scalars of an update, by a param_group; ``decoupled`` where this does not say it."""
        given = group["lr"], *group["betas"], group["eps"], group["weight_decay"]
        lr, beta1, beta2, eps, decay = map(float, given)
        flags = (("decoupled_weight_decay", decoupled), ("maximize", False))
        decoupled, maximize = (bool(group.get(*option)) for option in flags)
        return cls(lr, beta1, beta2, eps, decay, decoupled, number, grad_scale, maximize)

    @property
    def bias_corrections(self) -> tuple[float, float]:
        return 1 - self.beta1**self.step, 1 - self.beta2**self.step

    @property
    def step_size(self) -> float:
        return (self.lr / self.bias_corrections[0]) * -1

    @property
    def signed_scale(self) -> float:
        return -self.grad_scale if self.maximize else self.grad_scale

    @functools.lru_cache(maxsize=64)  # noqa: B019
    def scalars(self) -> tuple[Any, ...]:
        """The scalars of the one-pass kernels, as fp32: scale, l2, decay, lerp, from_grad, beta2,
        one_minus_beta2, bc2_sqrt, eps, step_size; and what rounding to 8-bit codes mixes in.

        With a beta1 of at most 0.5, torch interpolates from the gradient's side:
        m = fma(-beta1, g - m, g).
        """
        weight = 1 - self.beta1
        numbers: tuple[Any, ...] = (
            self.signed_scale,
            self.weight_decay * (not self.decoupled),
            1 - self.lr * self.weight_decay * self.decoupled,
            np.float32(weight) - np.float32(weight >= 0.5),
            *(self.beta2, 1 - self.beta2, math.sqrt(self.bias_corrections[1])),
            *(self.eps, self.step_size),
        )
        scale, l2, decay, lerp, *others = map(np.float32, numbers)
        seed = np.uint32(self.step * GOLDEN & 0xFFFFFFFF)
        return scale, l2, decay, lerp, weight >= 0.5, *others, seed

    def check_coded(self) -> None:
        """Raise ValueError if moments in 8 bits cannot be held for these options."""
        if not self.eps >= 0.99e-8:
            raise ValueError(
                "8-bit moments need an eps of at least 1e-8, as smaller second moments are not "
                f"told apart; got {self.eps}"
            )
        carried = 1 - self.beta1**2 / max(self.beta2, 1e-300)
        most = self.beta1 * (1 - self.beta1) / math.sqrt(max((1 - self.beta2) * carried, 1e-300))
        if not most <= 15:
            raise ValueError(
                "8-bit first moments hold up to 15 times the root of the second one, and betas "
                f"({self.beta1}, {self.beta2}) may make it {most:.3g} times that; lower the second "
                "one, raise the first, or keep moments in fp32 or bf16"
            )
