"""Reduce rows to their mean, rounded once: the reduction of ZeRO over ranks. One row is a cast.

    out = round((fp32(row_0) + fp32(row_1) + ...) / rows)

Bytes per element: those of all rows and out.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from zk.kernels.numerics import BLOCK, grid, rounded, widened


@triton.jit
def _reduce_kernel(
    rows,  # (ROWS, numel)
    out,  # (numel,)
    numel,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    start, at = tl.program_id(0).to(tl.int64) * BLOCK, tl.arange(0, BLOCK)
    rows, out = rows + start + at, out + start + at
    if start + BLOCK <= numel:  # no mask: 16 bytes at a time
        _reduce_block(rows, out, numel, None, None, ROWS)
    else:
        _reduce_block(rows, out, numel, at < (numel - start).to(tl.int32), 0, ROWS)


@triton.jit
def _reduce_block(rows, out, numel, mask, other, ROWS: tl.constexpr):
    x = widened(tl.load(rows, mask, other))
    for _ in range(1, ROWS):
        rows += numel
        x += widened(tl.load(rows, mask, other))
    if ROWS > 1:
        x = tl.div_rn(x, ROWS * 1.0)
    tl.store(out, rounded(x, out.dtype.element_ty), mask)


def launch(rows: Tensor, out: Tensor) -> None:
    """``reduce`` on a GPU, without its checks."""
    if programs := triton.cdiv(out.numel(), BLOCK):
        kernel = grid(_reduce_kernel, programs)
        kernel(rows, out, out.numel(), ROWS=len(rows), BLOCK=BLOCK, num_warps=4)
