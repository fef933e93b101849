"""Rounding inside of kernels as the CPU rounds. Shared by all kernels; called from kernels only.

What decides bits is spelled out: products that must not be fused into the addition that follows, division and square root with correct
rounding. So a kernel's result does not depend on the compiler, and equals that of the CPU kernels bit for bit.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from zk.kernels.launch import HAVE_TRITON, INTERPRETED

tl: Any = importlib.import_module("triton.language") if HAVE_TRITON else None

libdevice: Any = importlib.import_module("triton.language.extra.libdevice") if tl else None
_INTERPRETED = tl.constexpr(INTERPRETED) if tl else INTERPRETED


def constants(values: Iterable[float]) -> Iterator[Any]:
    """Numbers of a module, as kernels take them."""
    return (tl.constexpr(value) if HAVE_TRITON and not INTERPRETED else value for value in values)


def jit(function: Callable[..., Any]) -> Any:
    """``triton.jit`` where there is triton."""
    return importlib.import_module("triton").jit(function) if HAVE_TRITON else function


@jit
def product(a, b):
    """a * b in fp32, rounded once: never the first half of a fused multiply-add."""
    return a * b if _INTERPRETED else libdevice.mul_rn(a, b)


@jit
def bits_of(x):
    """The bits of fp32 ``x``, as uint32."""
    return x.to(tl.uint32, bitcast=True)


@jit
def float_of(bits):
    """The fp32 of these bits."""
    return bits.to(tl.float32, bitcast=True)


@jit
def bf16_of(bits):
    """The bf16 of the lower half of these bits."""
    return bits.to(tl.uint16).to(tl.bfloat16, bitcast=True)


@jit
def rounded_bits(x):
    """The bits of fp32 ``x`` as bf16, to nearest even, in the lower half of a uint32; NaN stays NaN."""
    bits = bits_of(x)
    return tl.where(x == x, (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16, 0x7FC0)


@jit
def rounded(x, dtype: tl.constexpr):
    """fp32 ``x`` in ``dtype``, to nearest even. (The interpreter's own conversion to bf16 cuts off.)"""
    return bf16_of(rounded_bits(x)) if _INTERPRETED and dtype == tl.bfloat16 else x.to(dtype)


@jit
def widened(x):
    """``x`` in fp32, exactly. (The interpreter's own conversion from bf16 loses subnormal numbers.)"""
    if _INTERPRETED and x.dtype == tl.bfloat16:
        result = float_of(x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16)
    else:
        result = x.to(tl.float32)
    return result


@jit
def readable(x):
    """``x`` as tl.dot takes it. (The interpreter's takes the bits of bf16 for integers.)"""
    return widened(x) if _INTERPRETED else x


@jit
def store_partials(partials, program, x):
    """Write a program's sum of squares (fp64) and its count of values that are not finite."""
    wide = x.to(tl.float64)
    tl.store(partials + 2 * program, tl.sum(wide * wide, 0))
    tl.store(partials + 2 * program + 1, tl.sum((x - x != 0).to(tl.int32), 0).to(tl.float64))
