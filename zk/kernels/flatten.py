"""In: many tensors. Out: one flat buffer, in one launch, cast and scaled on the way; and back.

    flat[start_i : start_i + numel_i] = round(fp32(tensor_i) * scale)      zeros up to start_(i+1)
    stats += (sum of squares, number of values that are not finite)

Bytes per element: those of both sides. Where a tensor lies is told to the kernel as its distance from one of them, in elements, so
one base pointer and a table are all it needs; the table has 40 bytes for each 2,048 elements, or part of it, of a tensor.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from zk.kernels import reference
from zk.kernels.launch import BLOCK, add_partials, cdiv, check_floats, grid, new_partials
from zk.kernels.numerics import jit, product, rounded, store_partials, tl, widened

_VECTOR = 16  # bytes of the widest load


@jit
def _move_kernel(
    base,  # one of the tensors
    flat,  # (numel,)
    table,  # (programs, 5) int64: element of base, element of flat, values to move, elements to write, whether both are aligned
    partials,  # (programs, 2) fp64, or None
    scale,
    INTO_FLAT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    row = table + program.to(tl.int64) * 5
    tensor, place, count, fill = tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)
    if (tl.load(row + 4) != 0) & (count == BLOCK):  # no mask: 16 bytes at a time
        tensor = tl.multiple_of(tensor, 16 * 8 // base.dtype.element_ty.primitive_bitwidth)
        place = tl.multiple_of(place, 16 * 8 // flat.dtype.element_ty.primitive_bitwidth)
        _move_block(base + tensor, flat + place, partials, program, scale, None, None, INTO_FLAT, BLOCK)
    else:
        _move_block(base + tensor, flat + place, partials, program, scale, count, fill, INTO_FLAT, BLOCK)


@jit
def _move_block(tensor, flat, partials, program, scale, count, fill, INTO_FLAT: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    loaded = None if count is None else at < count
    stored = None if fill is None else at < fill
    if INTO_FLAT:
        source, out = tensor, flat
    else:
        source, out = flat, tensor
    x = product(widened(tl.load(source + at, mask=loaded, other=None if count is None else 0)), scale)
    tl.store(out + at, rounded(x, out.dtype.element_ty), mask=stored)
    if partials is not None:
        store_partials(partials, program, x)


def _table(tensors: Sequence[Tensor], flat: Tensor, regions: Tensor, fill: bool) -> tuple[Tensor, Tensor]:
    """The base tensor, and the kernel's table: a row for each BLOCK, or part of it, of a region."""
    bounds = regions.numpy()
    count = len(tensors)
    pointers = np.zeros(len(bounds), np.int64)
    pointers[:count] = [tensor.data_ptr() for tensor in tensors]
    numels = np.zeros(len(bounds), np.int64)
    numels[:count] = [tensor.numel() for tensor in tensors]
    size = tensors[0].element_size()
    # a base that is aligned lets the kernel conclude from offsets to addresses
    base = next((index for index in range(count) if pointers[index] % _VECTOR == 0), 0)
    lengths = bounds[:, 1] - bounds[:, 0] if fill else numels
    rows = -(-lengths // BLOCK)
    which = np.repeat(np.arange(len(bounds)), rows)
    first = np.cumsum(rows) - rows
    done = (np.arange(len(which)) - first[which]) * BLOCK
    table = np.empty((len(which), 5), np.int64)
    offsets = np.where(np.arange(len(bounds)) < count, (pointers - pointers[base]) // size, 0)
    table[:, 0] = offsets[which] + done
    table[:, 1] = bounds[which, 0] + done
    table[:, 2] = np.clip(numels[which] - done, 0, BLOCK)
    table[:, 3] = np.clip(lengths[which] - done, 0, BLOCK)
    aligned = (pointers % _VECTOR == 0) & ((flat.data_ptr() + bounds[:, 0] * flat.element_size()) % _VECTOR == 0)
    table[:, 4] = (aligned & (pointers[base] % _VECTOR == 0) & (flat.data_ptr() % _VECTOR == 0))[which]
    return tensors[base], torch.from_numpy(table).to(flat.device, non_blocking=True)


def _launch(tensors: Sequence[Tensor], flat: Tensor, regions: Tensor, partials: Tensor | None, scale: float, into_flat: bool) -> None:
    if not tensors:
        for start, stop in regions.tolist() if into_flat else ():
            flat[start:stop].zero_()
        return
    base, table = _table(tensors, flat, regions, fill=into_flat)
    if len(table):
        grid(_move_kernel, len(table))(base, flat, table, partials, scale, INTO_FLAT=into_flat, BLOCK=BLOCK, num_warps=4)


def _launch_flatten(tensors: list[Tensor], flat: Tensor, regions: Tensor, partials: Tensor | None, scale: float) -> None:
    _launch(tensors, flat, regions, partials, scale, into_flat=True)


def _launch_unflatten(flat: Tensor, tensors: list[Tensor], regions: Tensor, partials: Tensor | None, scale: float) -> None:
    _launch(tensors, flat, regions, partials, scale, into_flat=False)


# opaque to torch.compile, as the table is made of addresses
_flatten_op = torch.library.custom_op("zk::flatten_", _launch_flatten, mutates_args=("flat", "partials"))
_unflatten_op = torch.library.custom_op("zk::unflatten_", _launch_unflatten, mutates_args=("tensors", "partials"))
_flatten_op.register_kernel("cpu")(reference.flatten)
_unflatten_op.register_kernel("cpu")(reference.unflatten)


def _check(tensors: Sequence[Tensor | None], flat: Tensor, offsets: Sequence[int]) -> list[tuple[int, int]]:
    """(start, stop) of each tensor's region."""
    check_floats(flat=flat, **{f"tensor {index}": tensor for index, tensor in enumerate(tensors) if tensor is not None})
    if flat.ndim != 1 or not flat.is_contiguous():
        raise ValueError(f"flat must be flat and contiguous; got {tuple(flat.shape)}, strides {flat.stride()}")
    if len(offsets) != len(tensors):
        raise ValueError(f"every tensor needs an offset; got {len(tensors)} tensors and {len(offsets)} offsets")
    stops = [*offsets[1:], flat.numel()] if tensors else []
    for index, (tensor, start, stop) in enumerate(zip(tensors, offsets, stops, strict=True)):
        numel = 0 if tensor is None else tensor.numel()
        if start < 0 or start + numel > stop:
            raise ValueError(
                f"offsets must ascend and leave room: tensor {index} has {numel} elements from {start} on, and the next region, or the "
                f"end, is at {stop}"
            )
        if tensor is not None and tensor.device != flat.device:
            raise ValueError(f"tensor {index} is on {tensor.device}, the flat buffer on {flat.device}")
    return list(zip(offsets, stops, strict=True))


Region = tuple[int, int]


def _by_dtype(tensors: Sequence[Tensor | None], regions: list[Region], rest: list[Region]) -> list[tuple[list[Tensor], list[Region]]]:
    """Tensors of one precision, with their regions; what has no tensor goes with the first."""
    rest = rest + [region for tensor, region in zip(tensors, regions, strict=True) if tensor is None]
    kinds: dict[torch.dtype, tuple[list[Tensor], list[Region]]] = {}
    for tensor, region in zip(tensors, regions, strict=True):
        if tensor is not None:
            found, places = kinds.setdefault(tensor.dtype, ([], []))
            found.append(tensor)
            places.append(region)
    groups = list(kinds.values()) or [([], [])]
    groups[0][1].extend(region for region in rest if region[1] > region[0])
    return groups


def flatten(tensors: Sequence[Tensor | None], flat: Tensor, offsets: Sequence[int], *, scale: float = 1.0, stats: Tensor | None = None) -> None:
    """Copy ``tensors`` into ``flat``, cast and scaled; one launch for each precision among them.

    Args:
        tensors: any shapes, fp32, bf16 or fp16; None is all zeros. What is not contiguous is copied first.
        flat: (numel,) fp32, bf16 or fp16, contiguous. All of it is written: what no tensor covers, with zeros.
        offsets: the first element of each, ascending.
        scale: a factor.
        stats: (2,) fp64 on the same device, to which the sum of squares and the number of non-finite values are added.

    Raises:
        TypeError: for other precisions.
        ValueError: for other devices, regions that overlap or do not fit, or a ``flat`` that is not flat and contiguous.
    """
    regions = _check(tensors, flat, offsets)
    sources = [None if tensor is None else tensor.detach().contiguous() for tensor in tensors]
    before = regions[0][0] if regions else flat.numel()
    for found, places in _by_dtype(sources, regions, [(0, before)]):
        partials = new_partials(stats, sum(cdiv(stop - start, BLOCK) for start, stop in places), flat.device)
        _flatten_op(found, flat, torch.tensor(places, dtype=torch.int64).view(-1, 2), partials, scale)
        add_partials(stats, partials)


def unflatten(flat: Tensor, tensors: Sequence[Tensor], offsets: Sequence[int], *, scale: float = 1.0, stats: Tensor | None = None) -> None:
    """Copy regions of ``flat`` into ``tensors``, cast and scaled: the inverse of ``flatten``.

    Args:
        flat: (numel,) fp32, bf16 or fp16, contiguous.
        tensors: any shapes, fp32, bf16 or fp16, contiguous; none may share memory with another.
        offsets: in ``flat``, the first element of each, ascending.
        scale: a factor.
        stats: (2,) fp64 on the same device, to which the sum of squares and the number of non-finite values are added.

    Raises:
        TypeError: for other precisions.
        ValueError: for other devices, regions that overlap or do not fit, or a tensor that is not contiguous.
    """
    regions = _check(tensors, flat, offsets)
    for index, tensor in enumerate(tensors):
        if tensor is None or not tensor.is_contiguous():
            raise ValueError(f"tensor {index} is to be written and must be contiguous; got {tensor if tensor is None else tensor.stride()}")
    for found, places in _by_dtype([tensor.detach() for tensor in tensors], regions, []):
        partials = new_partials(stats, sum(cdiv(tensor.numel(), BLOCK) for tensor in found), flat.device)
        if found:
            _unflatten_op(flat, found, torch.tensor(places, dtype=torch.int64).view(-1, 2), partials, scale)
        add_partials(stats, partials)
