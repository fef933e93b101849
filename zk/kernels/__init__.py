"""Triton kernels, usable alone: casts, flattening, Adam and tiled matrix products. In host memory each runs its plain PyTorch reference."""

from zk.kernels.adam import AdamStep, adam
from zk.kernels.cast import cast
from zk.kernels.flatten import flatten, unflatten
from zk.kernels.tiled_matmul import tiled_matmul

__all__ = ["AdamStep", "adam", "cast", "flatten", "tiled_matmul", "unflatten"]
