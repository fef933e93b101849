"""Eight-bit codes of Adam's moments, and masters of 24 bits: 3 bytes of state beside a bf16
parameter, where fp32 moments take 10.

Every element stands for itself, without scales of blocks: what it becomes depends on neither
chunks, threads, tiers nor ranks. The second moment v is a float of 6 bits of exponent and 2 of
mantissa, above ``SMALLEST`` = 2**-52, which is added first so that codes begin at zero; from 2**4
on whole powers of two, up to 2**35. The first moment m is a sign and a float of 3 and 4 bits of
|m| / unit + 1/16, where the unit is the power of two just below the root of the code of v: as |m|
is at most a few times that root, no range is wasted. So m is read after v. A 24-bit master is its
parameter (bf16, to nearest, a tie away from zero) and the 8 bits below, from which it can be told
how that was rounded.

Running means move by less than a code in a step, and would stand still if each result went to its
nearest code. So an update rounds up as often as the value is close to the code above, by bits mixed
from the gradient, the element and the number of the step: on average nothing is lost, and the same
inputs give the same bits on any engine. What is loaded goes to the nearest code, which gives each
code itself again. Rounding of this kind: arXiv 1502.02551; state beside a parameter in 24 bits and
8-bit moments: arXiv 2602.23349.
"""

from __future__ import annotations

import torch
from torch import Tensor

CODES = torch.uint8  # the dtype of moments, and of the lower bits of a master
# second moments: what is added, and the largest; first ones: what is added, and the largest sum
FLOATS = SMALLEST, V_MOST, M_ADDED, M_MOST = 2.0**-52, 2.0**35, 2.0**-4, 15.5
# second moments: bits of fp32 below a code, the exponent of the first code, the first code that is
# a whole power of two, and such a code less its exponent
V_WORDS = V_SHIFT, V_FIRST, V_WHOLE, V_OFF = 21, 127 - 52, 224, 168
# first moments: bits below a code, the exponent of the first one, and of the unit of the first
# second moment
M_WORDS = M_SHIFT, M_FIRST, M_UNIT = 19, 127 - 4, 127 - 26
# what is multiplied with the number of a step, and the multipliers of MurmurHash3's last steps
HASH = GOLDEN, FIRST, SECOND = 0x9E3779B9, 0x85EBCA6B, 0xC2B2AE35


def _signed(word: int) -> int:
    """A word of 32 bits as torch.int32 has it."""
    return (word & 0xFFFFFFFF) - ((word & 0x80000000) << 1)


def _shifted(words: Tensor, by: int) -> Tensor:
    """Int32 words shifted right, zeros from the left."""
    return (words >> by) & ((1 << (32 - by)) - 1)


def _part(mix: Tensor | None, bits: int, times: int = 1) -> Tensor | int:
    """What is added before ``bits`` bits are cut off: upper ones of ``times`` mix, or a half."""
    return 1 << (bits - 1) if mix is None else _shifted(mix * _signed(times), 32 - bits)


def mixed(grad: Tensor, master: Tensor, step: int) -> Tensor:
    """Bits (n,) int32 for the rounding of an update of fp32 ``master`` (n,) by ``grad`` (n,)."""
    bits = ((grad + 0.0).view(torch.int32) + _signed(step * GOLDEN)) ^ master.view(torch.int32)
    bits = (bits ^ _shifted(bits, 16)) * _signed(FIRST)
    bits = (bits ^ _shifted(bits, 13)) * _signed(SECOND)
    return bits ^ _shifted(bits, 16)


def _exponent(codes: Tensor) -> Tensor:
    return torch.where(codes < V_WHOLE, codes >> 2, codes - V_OFF)


def second_moment(codes: Tensor) -> Tensor:
    """The second moments (n,) fp32 of codes (n,)."""
    codes = codes.to(torch.int32)
    mantissa = torch.where(codes < V_WHOLE, (codes & 3) << V_SHIFT, 0)
    bits = ((_exponent(codes) + V_FIRST) << 23) | mantissa
    return bits.view(torch.float32) - SMALLEST


def _unit(codes: Tensor, sign: int) -> Tensor:
    """The power of two by which first moments are multiplied, or, with ``sign`` -1, divided."""
    exponent = (_exponent(codes.to(torch.int32)) >> 1) + M_UNIT - 127
    return ((127 + sign * exponent) << 23).view(torch.float32)


def first_moment(codes: Tensor, second_codes: Tensor) -> Tensor:
    """The first moments (n,) fp32 of codes (n,), beside the codes of second moments."""
    wide = codes.to(torch.int32)
    size = (((wide & 127) << M_SHIFT) + (M_FIRST << 23)).view(torch.float32) - M_ADDED
    return torch.where(wide > 127, -size, size) * _unit(second_codes, 1)


def encode_(
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    first_codes: Tensor,
    second_codes: Tensor,
    mix: Tensor | None = None,
) -> None:
    """Write the codes of moments (n,) fp32; ``mix`` as from ``mixed``, None for the nearest."""
    bits = (exp_avg_sq + SMALLEST).clamp_(max=V_MOST).view(torch.int32)
    fine = ((bits + _part(mix, V_SHIFT)) >> V_SHIFT) - (V_FIRST << 2)
    whole = ((bits + _part(mix, 23)) >> 23) - (V_FIRST - V_OFF)
    second_codes.copy_(torch.where(fine < V_WHOLE, fine, whole.clamp_(max=255)))
    size = (exp_avg * _unit(second_codes, -1)).abs_() + M_ADDED
    bits = size.clamp_(max=M_MOST).view(torch.int32)
    own = ((bits + _part(mix, M_SHIFT, 1 << (32 - M_SHIFT))) >> M_SHIFT) - (M_FIRST << 4)
    first_codes.copy_(own.clamp_(max=127) | (torch.signbit(exp_avg).to(torch.int32) << 7))


def joined(param: Tensor, rounded_up: Tensor, below: Tensor) -> Tensor:
    """The fp32 master (n,) of bf16 ``param``, 1 where it was rounded up, and the bits ``below``."""
    upper = param.view(torch.int16).to(torch.int32)
    is_written = (rounded_up != 0) & ((upper & 0x7FFF) == 0)  # no master is rounded up to zero
    bits = torch.where(is_written, upper << 16, ((upper - rounded_up) << 16) | below)
    return bits.view(torch.float32)


def join24(param: Tensor, low: Tensor) -> Tensor:
    """The master (n,) fp32 of ``param`` (n,) bf16 and the 8 bits that it lacks."""
    lower = low.to(torch.int32)
    return joined(param, lower >> 7, lower << 8)


def split24_(master: Tensor, param: Tensor, low: Tensor, mix: Tensor | None = None) -> None:
    """Write fp32 ``master`` (n,) into ``param`` and ``low``, rounded as ``encode_`` does."""
    bits = master.view(torch.int32) + _part(mix, 8, GOLDEN)
    bits = torch.where(master == master, bits, 0x7FC00000)
    low.copy_((bits >> 8) & 0xFF)
    param.view(torch.int16).copy_(((bits & ~0xFF) + 0x8000) >> 16)


def cast24_(master: Tensor, param: Tensor, low: Tensor) -> None:
    """After a split, make ``param`` torch's cast: at a tie that goes down, the master is below."""
    low -= (param != master.to(param.dtype)).to(low.dtype)
    param.copy_(master)
