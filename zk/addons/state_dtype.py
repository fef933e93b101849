"""``state_dtype="bf16"`` or ``"8bit"``: Adam's moments in fewer bits; results change.

With "8bit" the masters of bf16 parameters have 24 bits: 3 bytes of state where there are 10.
Uses of the core: the seams ``rules`` and ``codec``.
"""

from typing import Any

import torch

from zk.addon import Addon
from zk.kernels import codec
from zk.kernels.eight_bit import CODES
from zk.kernels.reference import AdamStep
from zk.logs import require
from zk.offload.rules import AdamRule, Codec, Rules, is_plain_adam

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "8bit": CODES}


class StateDtype(Addon):
    """It stands before all other rules, and refuses optimizers that are not Adam."""

    def __init__(self, value: Any):
        self.dtype = DTYPES.get(value, value)
        words = f"state_dtype must be 'fp32', 'bf16' or '8bit'; got {value!r}"
        require(self.dtype in DTYPES.values(), words)

    def rules(self, given: Rules) -> Rules:
        return [(self.is_for, AdamRule)]

    def is_for(self, unit: Any, inner: torch.optim.Optimizer) -> bool:
        """True; ValueError for what is not plain Adam, and what 8 bits cannot hold."""
        require(
            is_plain_adam(unit, inner),
            f"state_dtype= is for Adam and AdamW without amsgrad; {type(inner).__name__} keeps what its "
            "own step() makes: remove it",
        )
        if self.dtype == CODES:
            words = "state_dtype='8bit' is for bf16 and fp32: fp16 has no 24-bit master"
            require(unit.dtype != torch.float16, words)
            for group in inner.param_groups:
                AdamStep.of(group, True, 1).check_coded()
        return True

    def codec(self, unit: Any, given: Codec) -> Codec:
        if not given.fields:
            return given
        return Codec(codec.state_fields(unit.dtype, AdamRule.names, self.dtype, True))
