"""One op for a kernel and its reference: CPUs run the reference, GPUs the kernel. Block sizes, and checks of arguments.

Where triton is not installed, kernels are plain functions that are never called, and every op runs its reference.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

HAVE_TRITON = importlib.util.find_spec("triton") is not None
# TRITON_INTERPRET=1: kernels run as Python, on host memory. For tests of kernels; ops never choose it by themselves.
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
# elements of one program of the elementwise kernels: 4 warps x 32 lanes x two 16-byte vectors of 16 bits
BLOCK = 2048


def grid(kernel: Any, programs: int | Callable[[Any], tuple[int, ...]], wrap: bool = True) -> Callable[..., None]:
    """The launcher of ``kernel`` over ``programs``, or over what a function of its configuration says.

    ``wrap``: torch.compile sees through it. For the body of an op only: elsewhere torch keeps a kilobyte of each launch for good, and takes
    five times as long for it.

    Triton launches on the current device and its stream, wherever the arguments are: so the device of the first one is made current.
    """
    if not HAVE_TRITON:
        raise RuntimeError("this kernel needs triton, which is not installed (it comes with torch on Linux); tensors in host memory need no kernel")
    launcher = (torch.library.wrap_triton(kernel) if wrap and not INTERPRETED else kernel)[programs if callable(programs) else (programs,)]

    def launch(first: Tensor, *args: Any, **options: Any) -> None:
        # (fake tensors may be on a GPU that is not there)
        on_gpu = first.is_cuda and torch.cuda.is_available()
        with torch.cuda.device(first.device) if on_gpu else contextlib.nullcontext():
            launcher(first, *args, **options)

    return launch


def op(name: str, reference: Callable[..., None], mutates: tuple[str, ...]) -> Callable[[Callable[..., None]], Any]:
    """Decorator: makes a launcher the op ``zk::name`` that fake tensors and torch.compile see through; in host memory the reference runs.

    (A kernel registered for CPUs would not do: torch.compile takes an op's own body apart, whatever the device.)
    """

    def decorate(launch: Callable[..., None]) -> Any:
        @functools.wraps(launch)
        def either(*args: Any) -> None:
            (reference if args[0].device.type == "cpu" else launch)(*args)

        return torch.library.triton_op(f"zk::{name}", either, mutates_args=mutates)

    return decorate


def cdiv(numel: int, size: int) -> int:
    """How many pieces of ``size`` cover ``numel``."""
    return -(-numel // size)


def check_stats(stats: Tensor | None, device: torch.device) -> None:
    """Raise ValueError for statistics that kernels cannot add to."""
    if stats is not None and (stats.shape != (2,) or stats.dtype != torch.float64 or stats.device != device):
        raise ValueError(
            f"stats must be 2 fp64 values on {device} (sum of squares, non-finite values); got {tuple(stats.shape)} {stats.dtype} on {stats.device}"
        )


def partials_of(stats: Tensor | None, programs: int) -> Tensor | None:
    """(programs, 2) fp64: room for each program's sum of squares and count of non-finite values; None where nobody asks."""
    return None if stats is None else stats.new_empty(programs, 2)


def add_partials(stats: Tensor | None, partials: Tensor | None) -> None:
    """Add what the programs found; in a fixed order, so that a repetition gives the same bits."""
    if stats is not None and partials is not None:
        stats += partials.sum(0)


def overlap(one: Tensor, other: Tensor) -> bool:
    """Tell if two tensors may share memory: the spans from their first to their last byte meet. Not asked while a graph is traced."""
    if torch.compiler.is_compiling() or not one.numel() or not other.numel():
        return False
    if one.untyped_storage()._cdata != other.untyped_storage()._cdata:
        return False

    def span(tensor: Tensor) -> tuple[int, int]:
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        start = tensor.storage_offset() * tensor.itemsize
        return int(start), int(start + (last + 1) * tensor.itemsize)

    (start, stop), (begin, end) = span(one), span(other)
    return start < end and begin < stop


FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def check_floats(**tensors: Tensor) -> None:
    """Raise TypeError for a dtype that kernels do not know."""
    for name, tensor in tensors.items():
        if tensor.dtype not in FLOATS:
            raise TypeError(f"{name} must be fp32, bf16 or fp16; got {tensor.dtype}")
