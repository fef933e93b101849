"""The product of two matrices added to what other tiles have summed so far; from the last tile, the layer's output.

    out = round(activation(plus + a @ b + bias))        products and sums in fp32, one rounding

``plus`` may be ``out`` itself, so a tile adds to an fp32 sum in place; any of the matrices may be a slice or a transpose of a larger one.
One tile of a linear layer, x (m, k), weight (n, k), gradient of the output dy (m, n), is three of these:
    y += x @ weight^T        dx += dy @ weight        dweight = dy^T @ x
Flops: 2 m n k. Bytes, at least: those of a, b and out, and 4 per element of plus.
Source: memory-centric tiling, ZeRO-Infinity, arXiv 2104.07857, section 5.1.3.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import torch
from torch import Tensor

from zk.kernels import reference
from zk.kernels.launch import INTERPRETED, cdiv, check_floats, grid, op, overlap
from zk.kernels.numerics import jit, readable, rounded, tl

# (BLOCK_M, BLOCK_N, BLOCK_K, num_warps, num_stages). No split over K: every configuration sums in the same order, so which one is the
# fastest on a machine does not change its results. One for large tiles (128 x 256 spills registers once plus is read), one for few
# rows, one for small ones. Interpreted, small matrices are to have several blocks.
CONFIGS = ((16, 32, 16, 4, 1),) if INTERPRETED else ((128, 128, 64, 8, 3), (64, 128, 64, 4, 4), (64, 64, 64, 8, 3))


@jit
def _matmul_kernel(
    a,  # (M, K)
    b,  # (K, N)
    out,  # (M, N)
    plus,  # (M, N) fp32, or None
    bias,  # (N,), or None
    M,
    N,
    K,
    stride_am,
    stride_ak,
    stride_bk,
    stride_bn,
    stride_om,
    stride_on,
    stride_pm,
    stride_pn,
    ACTIVATION: tl.constexpr,
    PRECISION: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    # programs that share rows of a and columns of b run close to each other in time
    program = tl.program_id(0)
    rows, columns = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    group = program // (GROUP_M * columns)
    in_group = tl.minimum(rows - group * GROUP_M, GROUP_M)
    row = group * GROUP_M + (program % (GROUP_M * columns)) % in_group
    column = (program % (GROUP_M * columns)) // in_group

    m = row * BLOCK_M + tl.arange(0, BLOCK_M)
    n = column * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    # rows beyond the end read those of the beginning: no mask in the loop, and they are not stored
    m_read = tl.max_contiguous(tl.multiple_of(m % M, BLOCK_M), BLOCK_M).to(tl.int64)
    n_read = tl.max_contiguous(tl.multiple_of(n % N, BLOCK_N), BLOCK_N).to(tl.int64)
    a_at = a + m_read[:, None] * stride_am + k[None, :].to(tl.int64) * stride_ak
    b_at = b + k[:, None].to(tl.int64) * stride_bk + n_read[None, :] * stride_bn
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        if EVEN_K:
            a_tile, b_tile = tl.load(a_at), tl.load(b_at)
        else:
            a_tile = tl.load(a_at, mask=k[None, :] < K - start, other=0)
            b_tile = tl.load(b_at, mask=k[:, None] < K - start, other=0)
        total = tl.dot(readable(a_tile), readable(b_tile), total, input_precision=PRECISION)
        a_at += BLOCK_K * stride_ak
        b_at += BLOCK_K * stride_bk

    m_out, n_out = m.to(tl.int64), n.to(tl.int64)
    inside = (m < M)[:, None] & (n < N)[None, :]
    if plus is not None:
        total += tl.load(plus + m_out[:, None] * stride_pm + n_out[None, :] * stride_pn, mask=inside, other=0)
    if bias is not None:
        total += tl.load(bias + n_out, mask=n < N, other=0).to(tl.float32)[None, :]
    if ACTIVATION == "relu":
        total = tl.maximum(total, 0, propagate_nan=tl.PropagateNan.ALL)
    elif ACTIVATION == "silu":
        total = total * tl.sigmoid(total)
    elif ACTIVATION == "gelu":
        total = 0.5 * total * (1 + tl.erf(total * 0.7071067811865476))
    tl.store(out + m_out[:, None] * stride_om + n_out[None, :] * stride_on, rounded(total, out.dtype.element_ty), mask=inside)


@functools.cache
def _tuned() -> Any:
    """The kernel with its configurations; each shape takes the fastest, found the first time."""
    import triton

    configs = [
        triton.Config({"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "GROUP_M": 8}, num_warps=warps, num_stages=stages)
        for m, n, k, warps, stages in CONFIGS
    ]
    heuristics = triton.heuristics({"EVEN_K": lambda args: args["K"] % args["BLOCK_K"] == 0})
    # trial runs write to out: what it holds is put back where it is also an input
    return triton.autotune(configs, key=["M", "N", "K"], restore_value=["out"])(heuristics(_matmul_kernel))


def _launch(a: Tensor, b: Tensor, out: Tensor, plus: Tensor | None, bias: Tensor | None, activation: str, accumulate: bool = False) -> None:
    (m, k), n = a.shape, b.shape[1]
    if not m * n:
        return
    if not k:
        reference.tiled_matmul(a, b, out, plus, bias, activation, accumulate)
        return
    plus = out if accumulate else plus
    precision = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
    strides = (*a.stride(), *b.stride(), *out.stride(), *(plus.stride() if plus is not None else (0, 0)))
    launcher = grid(_tuned(), lambda meta: (cdiv(m, meta["BLOCK_M"]) * cdiv(n, meta["BLOCK_N"]),))
    launcher(a, b, out, plus, bias, m, n, k, *strides, ACTIVATION=activation, PRECISION=precision)


_op = op("tiled_matmul_", reference.tiled_matmul, mutates=("out",))(_launch)


def _blas_can_read(matrix: Tensor) -> bool:
    """Rows or columns lie one after the other without a stride between their elements."""
    (rows, columns), (down, across) = matrix.shape, matrix.stride()
    return (across == 1 and down >= max(1, columns)) or (down == 1 and across >= max(1, rows))


def policy(a: Tensor, b: Tensor, out: Tensor, plus: Tensor | None = None, bias: Tensor | None = None, activation: str = "") -> str:
    """The name of what multiplies: "reference" in host memory; on a GPU "cublas" for all it can express, else "triton".

    cuBLAS knows each GPU better than a few configurations can, but it cannot add a bias to an fp32 sum, apply an activation, and round
    to 16 bits in one go, nor read two strides: there the kernel saves passes over the output. The environment variable ZK_MATMUL
    ("cublas" or "triton") decides instead where both can. The rule looks at shapes and strides only, so all ranks, and all runs, decide alike.
    """
    if a.device.type == "cpu":
        return "reference"
    wanted = os.environ.get("ZK_MATMUL", "cublas")
    if wanted not in ("cublas", "triton"):
        raise ValueError(f"the environment variable ZK_MATMUL must be 'cublas' or 'triton'; got {wanted!r}")
    plain = not activation and a.dtype == b.dtype and all(map(_blas_can_read, (a, b, out)))
    same = plain and out.dtype == a.dtype and (plus is None or a.dtype == torch.float32)
    wider = plain and out.dtype == torch.float32
    in_place = plus is None or plus is out
    can = (same or wider) and in_place and (bias is None or (same and plus is None and bias.dtype == a.dtype))
    return "cublas" if can and wanted == "cublas" else "triton"


def _by_cublas(a: Tensor, b: Tensor, out: Tensor, plus: Tensor | None, bias: Tensor | None) -> None:
    wider: dict[str, Any] = {} if out.dtype == a.dtype else {"out_dtype": out.dtype}
    added = plus if bias is None else bias  # never both
    if added is None:
        torch.mm(a, b, out=out, **wider)
    else:
        torch.addmm(added, a, b, out=out, **wider)


def tiled_matmul(a: Tensor, b: Tensor, out: Tensor, *, plus: Tensor | None = None, bias: Tensor | None = None, activation: str = "") -> None:
    """``out = activation(plus + a @ b + bias)``, computed in fp32 and rounded once.

    Args:
        a: (m, k) fp32, bf16 or fp16, any strides.
        b: (k, n) of the same precision, any strides.
        out: (m, n) fp32, bf16 or fp16, any strides.
        plus: (m, n) fp32, maybe ``out`` itself; what other tiles have summed.
        bias: (n,) fp32, bf16 or fp16, contiguous.
        activation: "", "relu", "silu" or "gelu" (exact).

    fp32 matrices are multiplied in tf32 only if torch.backends.cuda.matmul.allow_tf32 says so. ``policy`` tells who does it.

    Raises:
        ValueError: for shapes or devices that do not fit together, an unknown activation, or inputs that share memory with ``out``.
        TypeError: for other precisions, or different ones of ``a`` and ``b``.
    """
    check_floats(a=a, b=b, out=out, **({} if bias is None else {"bias": bias}))
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0] or out.shape != (a.shape[0], b.shape[1]):
        raise ValueError(f"a (m, k) @ b (k, n) goes into out (m, n); got {tuple(a.shape)}, {tuple(b.shape)} and {tuple(out.shape)}")
    if a.dtype != b.dtype:
        raise TypeError(f"a and b must have one precision; got {a.dtype} and {b.dtype}")
    if plus is not None and (plus.shape != out.shape or plus.dtype != torch.float32):
        raise ValueError(f"plus must be fp32 and as large as out {tuple(out.shape)}; got {plus.dtype} {tuple(plus.shape)}")
    if bias is not None and (bias.shape != (b.shape[1],) or not bias.is_contiguous()):
        raise ValueError(f"bias must be ({b.shape[1]},) and contiguous; got {tuple(bias.shape)}")
    if activation and activation not in reference.ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(map(repr, ('', *reference.ACTIVATIONS)))}; got {activation!r}")
    for name, tensor in (("b", b), ("out", out), ("plus", plus), ("bias", bias)):
        if tensor is not None and tensor.device != a.device:
            raise ValueError(f"{name} is on {tensor.device}, a on {a.device}")
    for name, tensor in (("a", a), ("b", b), ("plus", None if plus is out else plus)):
        if tensor is not None and overlap(tensor, out):
            raise ValueError(f"{name} shares memory with out, which is written before all is read; only plus may be out itself")
    if policy(a, b, out, plus, bias, activation) == "cublas":
        _by_cublas(a, b, out, plus, bias)
    else:
        _op(a, b, out, None if plus is out else plus, bias, activation, plus is out)
