"""Reduce rows to their mean, rounded once; cast one row. The size of what is written is measured on the way.

    out = round((fp32(row_0) + fp32(row_1) + ...) / rows * scale)
    stats += (sum of squares of out, number of values of out that are not finite)

Bytes per element: those of all rows and out; none for the statistics.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zk.kernels import reference
from zk.kernels.launch import BLOCK, add_partials, cdiv, check_floats, check_stats, grid, op, overlap, partials_of
from zk.kernels.numerics import jit, product, rounded, store_partials, tl, widened


@jit
def _reduce_kernel(
    rows,  # (ROWS, numel)
    out,  # (numel,)
    partials,  # (programs, 2) fp64, or None
    scale,
    numel,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    start, at = program.to(tl.int64) * BLOCK, tl.arange(0, BLOCK)
    rows, out = rows + start + at, out + start + at
    if start + BLOCK <= numel:  # no mask: 16 bytes at a time
        _reduce_block(rows, out, partials, program, scale, numel, None, None, ROWS)
    else:
        _reduce_block(rows, out, partials, program, scale, numel, at < (numel - start).to(tl.int32), 0, ROWS)


@jit
def _reduce_block(rows, out, partials, program, scale, numel, mask, other, ROWS: tl.constexpr):
    x = widened(tl.load(rows, mask, other))
    for _ in range(1, ROWS):
        rows += numel
        x += widened(tl.load(rows, mask, other))
    if ROWS > 1:
        x = tl.div_rn(x, ROWS * 1.0)
    y = rounded(product(x, scale), out.dtype.element_ty)
    tl.store(out, y, mask)
    if partials is not None:
        store_partials(partials, program, widened(y))


def launch(rows: Tensor, out: Tensor, stats: Tensor | None = None, scale: float = 1.0, wrap: bool = False) -> None:
    """``reduce`` on a GPU, without its checks; ``wrap`` in the body of an op."""
    programs = cdiv(out.numel(), BLOCK)
    partials = partials_of(stats, programs)
    if programs:
        grid(_reduce_kernel, programs, wrap)(rows, out, partials, scale, out.numel(), ROWS=len(rows), BLOCK=BLOCK, num_warps=4)
    add_partials(stats, partials)


def _body(rows: Tensor, out: Tensor, stats: Tensor | None, scale: float) -> None:
    launch(rows, out, stats, scale, wrap=True)


_op = op("reduce_", reference.reduce, mutates=("out", "stats"))(_body)


def reduce(rows: Tensor, out: Tensor, *, scale: float = 1.0, stats: Tensor | None = None) -> None:
    """Write the mean of ``rows`` times ``scale``: summed in fp32 in the order of rows, rounded once. The reduction of ZeRO over ranks.

    Args:
        rows: (n, numel) fp32, bf16 or fp16, contiguous.
        out: (numel,) fp32, bf16 or fp16, contiguous. It shares no memory with ``rows``.
        scale: a factor.
        stats: (2,) fp64 on the same device, to which the sum of squares and the number of non-finite values of ``out`` are added.

    Raises:
        TypeError: for other precisions.
        ValueError: for other shapes or devices.
    """
    check_floats(rows=rows, out=out)
    if rows.ndim != 2 or not len(rows) or rows.shape[1:] != out.shape or not (rows.is_contiguous() and out.is_contiguous()):
        raise ValueError(f"reduce needs rows (n, numel) and out (numel,), both contiguous; got {tuple(rows.shape)} and {tuple(out.shape)}")
    if rows.device != out.device or overlap(rows, out):
        raise ValueError(f"rows and out must be on one device and share no memory; got {rows.device} and {out.device}")
    check_stats(stats, out.device)
    _op(rows, out, stats, scale)


def cast(source: Tensor, out: Tensor | None = None, *, dtype: torch.dtype | None = None, scale: float = 1.0, stats: Tensor | None = None) -> Tensor:
    """``source * scale``, computed in fp32 and rounded once: ``reduce`` of one row.

    Args:
        source: any shape, fp32, bf16 or fp16; dense, in any order of dimensions.
        out: same shape and order, fp32, bf16 or fp16. ``source`` itself scales in place. None makes one of ``dtype``.
        dtype: of the result, where ``out`` is None; give one of the two.
        scale: a factor.
        stats: (2,) fp64 on the same device, to which the sum of squares and the number of non-finite values of the result are added.

    Returns:
        ``out``.

    Raises:
        TypeError: for other precisions.
        ValueError: for other shapes, strides or devices, or an ``out`` that overlaps ``source`` in part.
    """
    if (out is None) == (dtype is None):
        raise ValueError("cast needs either out or dtype")
    if out is None:
        out = torch.empty_like(source, dtype=dtype)
    check_floats(source=source, out=out)
    if source.shape != out.shape or source.device != out.device:
        raise ValueError(f"source and out must match; got {tuple(source.shape)} on {source.device} and {tuple(out.shape)} on {out.device}")
    flat_source, flat_out = _in_memory_order(source, "source"), _in_memory_order(out, "out")
    if source.stride() != out.stride() and not (source.is_contiguous() and out.is_contiguous()):
        raise ValueError(f"source and out must have the same strides; got {source.stride()} and {out.stride()}; make both contiguous")
    if overlap(source, out) and (source.storage_offset(), source.itemsize) != (out.storage_offset(), out.itemsize):
        raise ValueError("out overlaps source in part, and would be written before all is read; cast in place only to the same width")
    check_stats(stats, out.device)
    _op(flat_source[None], flat_out, stats, scale)
    return out


def _in_memory_order(tensor: Tensor, name: str) -> Tensor:
    """(numel,) view of a dense tensor, whatever the order of its dimensions."""
    if tensor.is_contiguous():
        return tensor.detach().view(-1)
    order = sorted(range(tensor.ndim), key=lambda dim: (-tensor.stride()[dim], dim))
    dense = tensor.detach().permute(order)
    if not dense.is_contiguous():
        raise ValueError(f"{name} must be dense in memory; got shape {tuple(tensor.shape)}, strides {tensor.stride()}; use .contiguous()")
    return dense.view(-1)
