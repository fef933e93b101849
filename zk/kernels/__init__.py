"""Triton kernels, usable alone: flattening, reduction over ranks, Adam, tiled matrix products.

    ops             the functions: what they take, checked; in host memory the reference runs
    reference       each in plain PyTorch
    *_kernel        each in Triton, which is imported with the first launch
    codec           the layouts of an update's fields;  eight_bit: codes of moments
    step            the settings of an Adam update
    numerics        rounding, and how a kernel is launched
"""

from zk.kernels.ops import adam, flatten, reduce, tiled_matmul
from zk.kernels.reference import AdamStep

__all__ = ["AdamStep", "adam", "flatten", "reduce", "tiled_matmul"]
