"""The cross entropy of rows of logits, and their gradient in place, over all of the vocabulary or tile by tile of it.

    z = softcap(logits + bias)        lse = log(sum(exp(z)))        p = exp(z - lse)
    loss = lse - (1 - smoothing) * z[target] - smoothing * mean(z) + z_loss * lse^2
    dloss/dz = p * (1 + 2 * z_loss * lse) - (1 - smoothing) * onehot(target) - smoothing / vocab

One pass measures: the largest z, the sum of exponentials relative to it (rescaled where a larger one comes), z[target], and the sum of z.
They are a row's state, so the vocabulary may come in tiles, each of which goes on where the last one has ended. The second pass needs lse, and
writes the gradient over the logits, or in 16 bits elsewhere. Where all of the vocabulary is there, one program does both for a row, and
the second pass reads what the cache still has. Bytes per logit, fp32: 4 read and 4 written, and 4 more where the cache is too small.
Source: online softmax, arXiv 1805.02867; gradients in place, Liger Kernel, arXiv 2410.10989, section 3.2; z loss, PaLM, arXiv 2204.02311, section 5.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zk.kernels import reference
from zk.kernels.launch import INTERPRETED, check_floats, grid, op
from zk.kernels.numerics import jit, libdevice, rounded, tl

# columns of a row that a program has at once. The steps of the sum, and so its bits, go by it: tiles of the vocabulary are multiples of it
BLOCK = 4096
_INTERPRETED = tl.constexpr(INTERPRETED) if tl else INTERPRETED


@jit
def _tanh(x):
    return 2 * tl.sigmoid(2 * x) - 1 if _INTERPRETED else libdevice.tanh(x)


@jit
def _read(logits, bias, at, columns, softcap, BIAS: tl.constexpr, CAP: tl.constexpr):
    """The z of a block of one row, -inf beyond its end."""
    z = tl.load(logits + at, mask=at < columns, other=float("-inf"))
    if BIAS:
        z += tl.load(bias + at, mask=at < columns, other=0)
    if CAP:
        z = tl.where(at < columns, softcap * _tanh(z / softcap), z)
    return z


@jit
def _cross_entropy_kernel(
    logits,  # (rows, columns) fp32
    targets,  # (rows,) int64
    state,  # (4, rows) fp32: largest, sum of exponentials, z[target], sum of z
    grad,  # (rows, columns) fp32, bf16 or fp16; may be logits
    bias,  # (columns,) fp32, or None
    scale,  # (rows,) fp32, or None: 1
    columns,
    logits_stride,
    grad_stride,
    state_stride,
    first,  # number of the first column in the vocabulary
    ignored,
    softcap,
    confidence,  # 1 - smoothing
    spread,  # smoothing / vocab
    z_loss,
    MEASURE: tl.constexpr,
    GRADIENT: tl.constexpr,
    CARRY: tl.constexpr,
    SPREAD: tl.constexpr,
    CAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits, state, grad = logits + row * logits_stride, state + row, grad + row * grad_stride
    target = tl.load(targets + row)
    place = target - first
    if MEASURE:
        largest, zero = tl.full((), float("-inf"), tl.float32), tl.full((), 0.0, tl.float32)
        total, picked, summed = zero, zero, zero
        if CARRY:
            largest, total = tl.load(state), tl.load(state + state_stride)
            picked, summed = tl.load(state + 2 * state_stride), tl.load(state + 3 * state_stride)
        for start in range(0, columns, BLOCK):
            at = start + tl.arange(0, BLOCK)
            z = _read(logits, bias, at, columns, softcap, bias is not None, CAP)
            highest = tl.maximum(largest, tl.max(z, 0))
            origin = tl.where(highest == float("-inf"), 0.0, highest)
            total = total * tl.exp(largest - origin) + tl.sum(tl.exp(z - origin), 0)
            largest = highest
            picked += tl.sum(tl.where(at == place, z, 0.0), 0)
            if SPREAD:
                summed += tl.sum(tl.where(at < columns, z, 0.0), 0)
        tl.store(state, largest)
        tl.store(state + state_stride, total)
        tl.store(state + 2 * state_stride, picked)
        tl.store(state + 3 * state_stride, summed)
    else:
        largest, total = tl.load(state), tl.load(state + state_stride)
    if GRADIENT:
        lse = largest + tl.log(total)
        by = 1.0 if scale is None else tl.load(scale + row)
        for start in range(0, columns, BLOCK):
            at = start + tl.arange(0, BLOCK)
            z = _read(logits, bias, at, columns, softcap, bias is not None, CAP)
            d = tl.exp(z - lse) * (1 + 2 * z_loss * lse) - spread - tl.where(at == place, confidence, 0.0)
            if CAP:
                d *= 1 - (z / softcap) * (z / softcap)
            d = tl.where(target == ignored, 0.0, d * by)
            tl.store(grad + at, rounded(d, grad.dtype.element_ty), mask=at < columns)


def launch(
    logits: Tensor,
    targets: Tensor,
    state: Tensor,
    grad: Tensor | None,
    bias: Tensor | None,
    scale: Tensor | None,
    first: int,
    vocab: int,
    ignored: int,
    smoothing: float,
    softcap: float,
    z_loss: float,
    measure: bool,
    gradient: bool,
) -> None:
    """Launch the kernel, unchecked."""
    rows, columns = logits.shape
    if not rows:
        return
    into = logits if grad is None else grad
    grid(_cross_entropy_kernel, rows)(
        logits, targets, state, into, bias, scale, columns, logits.stride(0), into.stride(0), state.stride(0), first, ignored,
        float(softcap), 1.0 - smoothing, smoothing / vocab, float(z_loss),
        MEASURE=measure, GRADIENT=gradient, CARRY=first > 0, SPREAD=smoothing != 0, CAP=softcap != 0, BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip


_op = op("cross_entropy_", reference.cross_entropy, mutates=("logits", "state", "grad"))(launch)


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    state: Tensor,
    *,
    grad: Tensor | None = None,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
    first: int = 0,
    vocab: int | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float = 0.0,
    z_loss: float = 0.0,
    measure: bool = True,
    gradient: bool = True,
) -> None:
    """Measure rows of logits, and turn them into the gradient of each row's loss.

    Args:
        logits: (rows, columns) fp32, each row contiguous: a tile of the vocabulary. With ``gradient`` and without ``grad`` they become the gradient.
        targets: (rows,) int64, numbers in the vocabulary, or ``ignore_index``, whose rows get zeros.
        state: (4, rows) fp32: of each row the largest z, the sum of exp(z - largest), z[target], and with ``label_smoothing`` the sum of z. A tile
            with ``first`` > 0 goes on from it.
        grad: (rows, columns) fp32, bf16 or fp16, for the gradient.
        bias: (columns,) fp32, added to the logits.
        scale: (rows,) fp32, gradient of each row's loss.
        first: number of the first column in the vocabulary, a multiple of ``BLOCK``: then bits do not depend on the tiles.
        vocab: columns of all tiles; by default those here.
        ignore_index: target of rows that do not count.
        label_smoothing: between 0 and 1, as in torch.nn.functional.cross_entropy.
        softcap: z = softcap * tanh((logits + bias) / softcap); 0 for none.
        z_loss: factor of the square of log(sum(exp(z))).
        measure: write ``state``.
        gradient: write the gradient, by all of ``state``: with ``measure`` too, ``logits`` must end the vocabulary.

    Raises:
        ValueError: for shapes or devices that do not fit together.
        TypeError: for other precisions.
    """
    rows, columns = logits.shape
    check_floats(logits=logits, **({} if grad is None else {"grad": grad}))
    for name, tensor, shape, dtype in (
        ("logits", logits, (rows, columns), torch.float32),
        ("targets", targets, (rows,), torch.int64),
        ("state", state, (4, rows), torch.float32),
        ("grad", grad, (rows, columns), None),
        ("bias", bias, (columns,), torch.float32),
        ("scale", scale, (rows,), torch.float32),
    ):
        if tensor is None:
            continue
        gaps = tensor.numel() > 0 and tensor.shape[-1] > 1 and tensor.stride(-1) != 1
        if tensor.shape != shape or tensor.device != logits.device or dtype not in (None, tensor.dtype) or gaps:
            raise ValueError(
                f"{name} must be {shape}{'' if dtype is None else f' {dtype}'} on {logits.device}, with rows that are contiguous; got "
                f"{tuple(tensor.shape)} {tensor.dtype} on {tensor.device}, strides {tensor.stride()}"
            )
    _op(
        logits, targets, state, grad, bias, scale, first, columns if vocab is None else vocab, ignore_index, label_smoothing, softcap, z_loss,
        measure, gradient,
    )  # fmt: skip
