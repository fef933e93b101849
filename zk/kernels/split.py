"""Splitting of an fp32 master into a bf16 parameter and the 16 bits that it lacks, and back, without loss.

The parameter is the master rounded to nearest even, as every cast in torch does it; ``low`` holds the master's lower 16 bits. The
parameter is then the master's upper half, or that plus one when the lower half was rounded up, which is when its highest bit is
set: but not at a tie (lower half exactly 0x8000) that went down to the even neighbour. That one bit rides in the sign of Adam's
second moment, which is never negative. Parameter and low together take the master's 4 bytes, where a separate master takes 6.
Where the user writes the parameter, the master is what was written, to within the parameter's precision. No master is rounded up to zero, so
a zero for which this seems so was written.
"""

from __future__ import annotations

import torch
from torch import Tensor


def join(param: Tensor, low: Tensor, exp_avg_sq: Tensor) -> Tensor:
    """The fp32 master (n,) of ``param`` (n,) bf16, ``low`` (n,) int16 and the signs of ``exp_avg_sq`` (n,) fp32 or bf16."""
    upper = param.view(torch.int16).to(torch.int32)
    lower = low.to(torch.int32) & 0xFFFF
    rounded_up = (lower >> 15) & ~torch.signbit(exp_avg_sq).to(torch.int32)
    is_written = (rounded_up != 0) & ((upper & 0x7FFF) == 0)
    return torch.where(is_written, upper << 16, ((upper - rounded_up) << 16) | lower).view(torch.float32)


def split_(master: Tensor, param: Tensor, low: Tensor, exp_avg_sq: Tensor) -> None:
    """Write ``master`` (n,) fp32 into ``param``, ``low`` and the signs of ``exp_avg_sq``, whose magnitudes stay."""
    bits = master.view(torch.int32)
    param.copy_(master)
    low.copy_(bits.to(torch.int16))
    tie_down = ((bits & 0x8000) != 0) & (param.view(torch.int16) == (bits >> 16).to(torch.int16))
    magnitude = exp_avg_sq.abs()
    exp_avg_sq.copy_(torch.where(tie_down, -magnitude, magnitude))
