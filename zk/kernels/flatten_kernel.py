"""Flatten many tensors into one flat buffer, in one launch, cast on the way.

    flat[start_i : start_i + numel_i] = round(tensor_i)      zeros up to stop_i

Bytes per element: those of both sides. The table of regions and blocks depends on the layout alone
and stays on the device: 8 bytes for each 2,048 elements. A call brings 16 bytes for each tensor:
its distance from one of them, in elements, and its size.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from zk.kernels.numerics import BLOCK, grid, rounded, widened


@triton.jit
def _move_kernel(
    base,  # one of the tensors
    flat,  # (numel,)
    tensors,  # (tensors, 2) int64: first element, from base on; number of elements
    regions,  # (tensors, 2) int64: first element in flat, and the one after the last
    blocks,  # (programs, 2) int32: number of the region, number of the block in it
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program, at = tl.program_id(0), tl.arange(0, BLOCK)
    index = tl.load(blocks + 2 * program)
    done = tl.load(blocks + 2 * program + 1).to(tl.int64) * BLOCK
    source, place = tl.load(tensors + 2 * index) + done, tl.load(regions + 2 * index) + done
    count = tl.minimum(tl.maximum(tl.load(tensors + 2 * index + 1) - done, 0), BLOCK)
    width: tl.constexpr = 16 * 8 // base.dtype.element_ty.primitive_bitwidth
    flat_width: tl.constexpr = 16 * 8 // flat.dtype.element_ty.primitive_bitwidth
    if ALIGNED & (count == BLOCK) & (source % width == 0) & (place % flat_width == 0):
        # no mask: 16 bytes at a time
        source, place = tl.multiple_of(source, width), tl.multiple_of(place, flat_width)
        x = widened(tl.load(base + source + at))
        tl.store(flat + place + at, rounded(x, flat.dtype.element_ty))
    else:
        fill = tl.minimum(tl.load(regions + 2 * index + 1) - place, BLOCK)
        x = widened(tl.load(base + source + at, at < count, 0))
        tl.store(flat + place + at, rounded(x, flat.dtype.element_ty), at < fill)


@functools.lru_cache(maxsize=1024)
def table(bounds: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """``regions`` and ``blocks`` of the kernel, for regions (start, stop) one after the other."""
    regions = np.array(bounds, np.int64).reshape(-1, 2)
    counts = -(-(regions[:, 1] - regions[:, 0]) // BLOCK)
    index = np.repeat(np.arange(len(regions)), counts)
    block = np.arange(len(index)) - np.repeat(np.cumsum(counts) - counts, counts)
    blocks = np.stack([index, block], 1).astype(np.int32)
    return torch.from_numpy(regions).to(device), torch.from_numpy(blocks).to(device)


def launch(tensors: Sequence[Tensor], flat: Tensor, bounds: Sequence[int]) -> None:
    """Flatten on a GPU, without checks: contiguous tensors of one precision, as the reference."""
    regions, blocks = table(tuple(bounds), flat.device)
    if not (tensors and len(blocks)):
        return
    pointers = [tensor.data_ptr() for tensor in tensors]
    # from a base that is aligned to the widest load, offsets tell which addresses are
    base = next((i for i, pointer in enumerate(pointers) if pointer % 16 == 0), 0)
    here = np.zeros((len(regions), 2), np.int64)
    distances = np.array(pointers) - pointers[base]
    here[: len(tensors), 0] = distances // tensors[0].element_size()
    here[: len(tensors), 1] = [tensor.numel() for tensor in tensors]
    there = torch.from_numpy(here).to(flat.device, non_blocking=True)
    aligned = pointers[base] % 16 == 0 and flat.data_ptr() % 16 == 0
    run = grid(_move_kernel, len(blocks))
    run(tensors[base], flat, there, regions, blocks, ALIGNED=aligned, BLOCK=BLOCK, num_warps=4)
