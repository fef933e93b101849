"""The product of two matrices added to what other tiles have summed; from the last, the output.

    out = round(plus + a @ b + bias)        products and sums in fp32, one rounding

``plus`` may be ``out`` itself, so a tile adds to an fp32 sum in place; any of the matrices may be a
slice or a transpose of a larger one. One tile of a linear layer, x (m, k), weight (n, k), gradient
of the output dy (m, n), is three of these:
    y += x @ weight^T        dx += dy @ weight        dweight = dy^T @ x
Flops: 2 m n k. Bytes, at least: those of a, b and out, and 4 per element of plus.
Source: memory-centric tiling, ZeRO-Infinity, arXiv 2104.07857, section 5.1.3.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from zk.kernels.numerics import INTERPRETED, grid, readable, rounded

# (BLOCK_M, BLOCK_N, BLOCK_K, num_warps, num_stages), for outputs of FULL elements, whose large tiles
# keep a GPU busy, and for smaller ones. No split over K: all sum in the same order, and have the
# same results. 128 x 256 would spill registers. Interpreted, small matrices have several blocks.
FULL = 100 * 128 * 128
_ON_GPU = (128, 128, 64, 8, 3), (64, 64, 64, 8, 3)
CONFIGS = ((16, 32, 16, 4, 1),) * 2 if INTERPRETED else _ON_GPU


@triton.jit
def _matmul_kernel(
    a,  # (M, K)
    b,  # (K, N)
    out,  # (M, N)
    plus,  # (M, N) fp32, or None
    bias,  # (N,), or None
    M, N, K,
    stride_am, stride_ak, stride_bk, stride_bn, stride_om, stride_on, stride_pm, stride_pn,
    PRECISION: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    # programs that share rows of a and columns of b run close to each other in time
    program = tl.program_id(0)
    rows, columns = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    group, at = program // (GROUP_M * columns), program % (GROUP_M * columns)
    in_group = tl.minimum(rows - group * GROUP_M, GROUP_M)
    m = (group * GROUP_M + at % in_group) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = at // in_group * BLOCK_N + tl.arange(0, BLOCK_N)
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

    m_out, n_out = m.to(tl.int64)[:, None], n.to(tl.int64)[None, :]
    inside = (m < M)[:, None] & (n < N)[None, :]
    if plus is not None:
        total += tl.load(plus + m_out * stride_pm + n_out * stride_pn, mask=inside, other=0)
    if bias is not None:
        total += tl.load(bias + n_out, mask=n_out < N, other=0).to(tl.float32)
    y = rounded(total, out.dtype.element_ty)
    tl.store(out + m_out * stride_om + n_out * stride_on, y, mask=inside)


def launch(a: Tensor, b: Tensor, out: Tensor, plus: Tensor | None, bias: Tensor | None) -> None:
    """``tiled_matmul`` by the kernel, without checks. Only the shape decides how."""
    (m, k), n = a.shape, b.shape[1]
    rows, columns, depth, warps, stages = CONFIGS[m * n < FULL]
    if not m * n:
        return
    precision = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
    given = a, b, out, a if plus is None else plus
    strides = [stride for matrix in given for stride in matrix.stride()]
    blocks = {"BLOCK_M": rows, "BLOCK_N": columns, "BLOCK_K": depth, "GROUP_M": 8}
    options = {"EVEN_K": k % depth == 0, "num_warps": warps, "num_stages": stages}
    run = grid(_matmul_kernel, triton.cdiv(m, rows) * triton.cdiv(n, columns))
    run(a, b, out, plus, bias, m, n, k, *strides, PRECISION=precision, **blocks, **options)
