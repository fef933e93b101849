"""Flatten many tensors into one flat buffer, in one launch, cast and scaled on the way; and the inverse.

    flat[start_i : start_i + numel_i] = round(fp32(tensor_i) * scale)      zeros up to start_(i+1)
    stats += (sum of squares of what is written, number of values of it that are not finite)

Bytes per element: those of both sides. The table of regions and blocks depends on the layout alone and stays on the device: 8 bytes for
each 2,048 elements. A call brings 16 bytes for each tensor: its distance from one of them, in elements, and its size.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from zk.kernels import reference
from zk.kernels.launch import BLOCK, add_partials, check_floats, check_stats, grid, partials_of
from zk.kernels.numerics import jit, product, rounded, store_partials, tl, widened

_VECTOR = 16  # bytes of the widest load


@jit
def _move_kernel(
    base,  # one of the tensors
    flat,  # (numel,)
    tensors,  # (tensors, 2) int64: first element, from base on; number of elements
    regions,  # (tensors, 2) int64: first element in flat, and the one after the last
    blocks,  # (programs, 2) int32: number of the region, number of the block in it
    partials,  # (programs, 2) fp64, or None
    scale,
    INTO_FLAT: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program, at = tl.program_id(0), tl.arange(0, BLOCK)
    index = tl.load(blocks + 2 * program)
    done = tl.load(blocks + 2 * program + 1).to(tl.int64) * BLOCK
    tensor, place = tl.load(tensors + 2 * index) + done, tl.load(regions + 2 * index) + done
    count = tl.minimum(tl.maximum(tl.load(tensors + 2 * index + 1) - done, 0), BLOCK)
    tensor_width: tl.constexpr = 16 * 8 // base.dtype.element_ty.primitive_bitwidth
    flat_width: tl.constexpr = 16 * 8 // flat.dtype.element_ty.primitive_bitwidth
    if ALIGNED & (count == BLOCK) & (tensor % tensor_width == 0) & (place % flat_width == 0):  # no mask: 16 bytes at a time
        tensor, place = tl.multiple_of(tensor, tensor_width), tl.multiple_of(place, flat_width)
        _move_block(base + tensor + at, flat + place + at, partials, program, scale, None, None, None, INTO_FLAT)
    else:
        fill = tl.minimum(tl.load(regions + 2 * index + 1) - place, BLOCK) if INTO_FLAT else count
        _move_block(base + tensor + at, flat + place + at, partials, program, scale, at < count, 0, at < fill, INTO_FLAT)


@jit
def _move_block(tensor, flat, partials, program, scale, loaded, other, stored, INTO_FLAT: tl.constexpr):
    source, out = (tensor, flat) if INTO_FLAT else (flat, tensor)
    y = rounded(product(widened(tl.load(source, loaded, other)), scale), out.dtype.element_ty)
    tl.store(out, y, stored)
    if partials is not None:
        store_partials(partials, program, widened(y))


@functools.lru_cache(maxsize=1024)
def table(bounds: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """``regions`` and ``blocks`` of the kernel, for regions (start, stop) one after the other in ``bounds``."""
    regions = np.array(bounds, np.int64).reshape(-1, 2)
    counts = -(-(regions[:, 1] - regions[:, 0]) // BLOCK)
    index = np.repeat(np.arange(len(regions)), counts)
    block = np.arange(len(index)) - np.repeat(np.cumsum(counts) - counts, counts)
    blocks = np.stack([index, block], 1).astype(np.int32)
    return torch.from_numpy(regions).to(device), torch.from_numpy(blocks).to(device)


def _launch(tensors: Sequence[Tensor], flat: Tensor, bounds: Sequence[int], stats: Tensor | None, scale: float, into_flat: bool) -> None:
    regions, blocks = table(tuple(bounds), flat.device)
    if tensors and len(blocks):
        pointers = [tensor.data_ptr() for tensor in tensors]
        # from a base that is aligned, offsets tell which addresses are
        base = next((index for index, pointer in enumerate(pointers) if pointer % _VECTOR == 0), 0)
        here = np.zeros((len(regions), 2), np.int64)
        here[: len(tensors), 0] = (np.array(pointers) - pointers[base]) // tensors[0].element_size()
        here[: len(tensors), 1] = [tensor.numel() for tensor in tensors]
        aligned = pointers[base] % _VECTOR == 0 and flat.data_ptr() % _VECTOR == 0
        partials = partials_of(stats, len(blocks))
        grid(_move_kernel, len(blocks), wrap=False)(
            tensors[base], flat, torch.from_numpy(here).to(flat.device, non_blocking=True), regions, blocks, partials, scale,
            INTO_FLAT=into_flat, ALIGNED=aligned, BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip
        add_partials(stats, partials)


def launch(tensors: Sequence[Tensor], flat: Tensor, bounds: Sequence[int], stats: Tensor | None = None, scale: float = 1.0) -> None:
    """Flatten on a GPU, without checks: contiguous tensors of one precision into regions from one of ``bounds`` to the next, all else zeros."""
    _launch(tensors, flat, bounds, stats, scale, into_flat=True)


def _launch_unflatten(flat: Tensor, tensors: Sequence[Tensor], bounds: Sequence[int], stats: Tensor | None, scale: float) -> None:
    _launch(tensors, flat, bounds, stats, scale, into_flat=False)


# opaque to torch.compile, as the table is made of addresses
_flatten_op = torch.library.custom_op("zk::flatten_", launch, mutates_args=("flat", "stats"))
_unflatten_op = torch.library.custom_op("zk::unflatten_", _launch_unflatten, mutates_args=("tensors", "stats"))
_flatten_op.register_kernel("cpu")(reference.flatten)
_unflatten_op.register_kernel("cpu")(reference.unflatten)


def _check(tensors: Sequence[Tensor | None], flat: Tensor, offsets: Sequence[int], stats: Tensor | None) -> list[tuple[int, int]]:
    """(start, stop) of each tensor's region."""
    check_stats(stats, flat.device)
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


def _by_dtype(tensors: Sequence[Tensor | None], regions: list[tuple[int, int]]) -> Iterable[tuple[list[Tensor], list[int]]]:
    """Tensors of one precision, with the bounds of their regions."""
    kinds: dict[torch.dtype, tuple[list[Tensor], list[int]]] = {}
    for tensor, region in zip(tensors, regions, strict=True):
        if tensor is not None:
            found, bounds = kinds.setdefault(tensor.dtype, ([], []))
            found.append(tensor)
            bounds.extend(region)
    return kinds.values()


def flatten(tensors: Sequence[Tensor | None], flat: Tensor, offsets: Sequence[int], *, scale: float = 1.0, stats: Tensor | None = None) -> None:
    """Copy ``tensors`` into ``flat``, cast and scaled; one launch for each precision among them.

    Args:
        tensors: any shapes, fp32, bf16 or fp16; None is all zeros. What is not contiguous is copied first.
        flat: (numel,) fp32, bf16 or fp16, contiguous. All of it is written: what no tensor covers, with zeros.
        offsets: the first element of each, ascending.
        scale: a factor.
        stats: (2,) fp64 on the same device, to which the sum of squares and the number of non-finite values of what is written are added.

    Raises:
        TypeError: for other precisions.
        ValueError: for other devices, regions that overlap or do not fit, or a ``flat`` that is not flat and contiguous.
    """
    regions = _check(tensors, flat, offsets, stats)
    sources = [None if tensor is None else tensor.detach().contiguous() for tensor in tensors]
    flat[: regions[0][0] if regions else None].zero_()
    for (start, stop), source in zip(regions, sources, strict=True):
        if source is None:
            flat[start:stop].zero_()
    for found, bounds in _by_dtype(sources, regions):
        _flatten_op(found, flat, bounds, stats, scale)


def unflatten(flat: Tensor, tensors: Sequence[Tensor], offsets: Sequence[int], *, scale: float = 1.0, stats: Tensor | None = None) -> None:
    """Copy regions of ``flat`` into ``tensors``, cast and scaled: the inverse of ``flatten``.

    Args:
        flat: (numel,) fp32, bf16 or fp16, contiguous.
        tensors: any shapes, fp32, bf16 or fp16, contiguous; none may share memory with another.
        offsets: in ``flat``, the first element of each, ascending.
        scale: a factor.
        stats: (2,) fp64 on the same device, to which the sum of squares and the number of non-finite values of what is written are added.

    Raises:
        TypeError: for other precisions.
        ValueError: for other devices, regions that overlap or do not fit, or a tensor that is not contiguous.
    """
    regions = _check(tensors, flat, offsets, stats)
    for index, tensor in enumerate(tensors):
        if tensor is None or not tensor.is_contiguous():
            raise ValueError(f"tensor {index} is to be written and must be contiguous; got {tensor if tensor is None else tensor.stride()}")
    for found, bounds in _by_dtype([tensor.detach() for tensor in tensors], regions):
        _unflatten_op(flat, found, bounds, stats, scale)
