"""In: a tensor in fp32, bf16 or fp16. Out: ``scale`` times it in another of these precisions, and the size of what was cast: one pass.

    out = round(fp32(source) * scale)      stats += (sum of (fp32(source) * scale)^2, number of values that are not finite)

Bytes per element: those of source and out; 6 from fp32 to 16 bits, and none for the statistics.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zk.kernels import reference
from zk.kernels.launch import BLOCK, add_partials, cdiv, check_floats, grid, new_partials, op, overlap
from zk.kernels.numerics import jit, product, rounded, store_partials, tl, widened


@jit
def _cast_kernel(
    source,  # (numel,)
    out,  # (numel,)
    partials,  # (programs, 2) fp64, or None
    scale,
    numel,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    start = program.to(tl.int64) * BLOCK
    if start + BLOCK <= numel:  # no mask: 16 bytes at a time
        _cast_block(source + start, out + start, partials, program, scale, BLOCK, None)
    else:
        _cast_block(source + start, out + start, partials, program, scale, BLOCK, (numel - start).to(tl.int32))


@jit
def _cast_block(source, out, partials, program, scale, BLOCK: tl.constexpr, count):
    at = tl.arange(0, BLOCK)
    mask = None if count is None else at < count
    x = product(widened(tl.load(source + at, mask=mask, other=None if count is None else 0)), scale)
    tl.store(out + at, rounded(x, out.dtype.element_ty), mask=mask)
    if partials is not None:
        store_partials(partials, program, x)


def _launch(source: Tensor, out: Tensor, partials: Tensor | None, scale: float) -> None:
    if source.numel():
        grid(_cast_kernel, cdiv(source.numel(), BLOCK))(source, out, partials, scale, source.numel(), BLOCK=BLOCK, num_warps=4)


_op = op("cast_", reference.cast, mutates=("out", "partials"))(_launch)


def cast(source: Tensor, out: Tensor | None = None, *, dtype: torch.dtype | None = None, scale: float = 1.0, stats: Tensor | None = None) -> Tensor:
    """``source * scale``, computed in fp32 and rounded once.

    Args:
        source: any shape, fp32, bf16 or fp16; dense, in any order of dimensions.
        out: same shape and order, fp32, bf16 or fp16. ``source`` itself scales in place. None makes one of ``dtype``.
        dtype: of the result, where ``out`` is None; give one of the two.
        scale: a factor.
        stats: (2,) fp64 on the same device, to which the sum of squares and the number of non-finite values of the result, before
            rounding, are added.

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
    partials = new_partials(stats, cdiv(source.numel(), BLOCK), source.device)
    _op(flat_source, flat_out, partials, scale)
    add_partials(stats, partials)
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
