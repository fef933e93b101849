"""Rounding inside of kernels as the CPU rounds, and how a kernel is launched.

What decides bits is spelled out: products that must not be fused into the addition that follows,
division and square root with correct rounding. So a kernel's result does not depend on the
compiler, and equals that of the CPU kernels bit for bit.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

# kernels run as Python, on host memory: for tests of kernels
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
_INTERPRETED = tl.constexpr(INTERPRETED)
# elements of an elementwise program: 4 warps x 32 lanes x two 16-byte vectors of 16 bits
BLOCK = 2048


def grid(kernel: Any, programs: int) -> Callable[..., None]:
    """The launcher of ``kernel`` over ``programs``, on the device of its first argument."""

    def launch(first: Tensor, *args: Any, **options: Any) -> None:
        with torch.cuda.device(first.device) if first.is_cuda else contextlib.nullcontext():
            kernel[(programs,)](first, *args, **options)

    return launch


def constants(values: Iterable[float]) -> Iterator[Any]:
    """Numbers of a module, as kernels take them."""
    return (value if INTERPRETED else tl.constexpr(value) for value in values)


@triton.jit
def product(a, b):
    """a * b in fp32, rounded once: never the first half of a fused multiply-add."""
    return a * b if _INTERPRETED else libdevice.mul_rn(a, b)


@triton.jit
def bits_of(x):
    """The bits of fp32 ``x``, as uint32."""
    return x.to(tl.uint32, bitcast=True)


@triton.jit
def float_of(bits):
    """The fp32 of these bits."""
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def bf16_of(bits):
    """The bf16 of the lower half of these bits."""
    return bits.to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def rounded_bits(x):
    """The bits of fp32 ``x`` as bf16, to nearest even, in the lower half of a uint32; NaN stays."""
    bits = bits_of(x)
    return tl.where(x == x, (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16, 0x7FC0)


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """fp32 ``x`` in ``dtype``, to nearest even. (The interpreter's own cast to bf16 cuts off.)"""
    return bf16_of(rounded_bits(x)) if _INTERPRETED and dtype == tl.bfloat16 else x.to(dtype)


@triton.jit
def widened(x):
    """``x`` in fp32, exactly. (The interpreter's own cast loses subnormal numbers of bf16.)"""
    if _INTERPRETED and x.dtype == tl.bfloat16:
        result = float_of(x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16)
    else:
        result = x.to(tl.float32)
    return result


@triton.jit
def readable(x):
    """``x`` as tl.dot takes it. (The interpreter's takes the bits of bf16 for integers.)"""
    return widened(x) if _INTERPRETED else x
