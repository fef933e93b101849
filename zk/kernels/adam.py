"""Adam on the device: gradients, parameters and state in one pass over memory.

    g = grad * grad_scale                       (+ weight_decay * x, for Adam)
    x = x * (1 - lr * weight_decay)             (AdamW)
    m = fma(1 - beta1, g - m, m)
    v = fma((1 - beta2) * g, g, beta2 * v)
    x = x - (lr / bc1) * m / (sqrt(v) / sqrt(bc2) + eps)

The same operations in the same order, each with one correct rounding, as the CPU kernel (zk.offload.cpu_adam_numba): which of the two
updates an element does not change a bit of it. Bytes per element, bf16 gradient and parameter: 28 with an fp32 master (2 grad, 4 + 4
master, 8 + 8 moments, 2 param), 26 with a split master, 18 with bf16 moments too, 12 in 8 bits (eight_bit.py).
Source: Adam, arXiv 1412.6980; decoupled weight decay, arXiv 1711.05101.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zk.kernels import eight_bit, reference
from zk.kernels.launch import BLOCK, cdiv, grid, op
from zk.kernels.numerics import bf16_of, bits_of, constants, float_of, jit, product, rounded, rounded_bits, tl, widened
from zk.kernels.step import AdamStep, check_adam

# numbers of eight_bit.py, as kernels take them
SMALLEST, V_MOST, M_ADDED, M_MOST = constants(eight_bit.FLOATS)
V_SHIFT, V_FIRST, V_WHOLE, V_OFF, M_SHIFT, M_FIRST, M_UNIT, GOLDEN, FIRST, SECOND = constants(eight_bit.WORDS)


@jit
def _mixed(g, x, step):
    bits = (bits_of(g + 0.0) + tl.cast(step, tl.uint32) * GOLDEN) ^ bits_of(x)
    bits = (bits ^ (bits >> 16)) * FIRST
    bits = (bits ^ (bits >> 13)) * SECOND
    return bits ^ (bits >> 16)


@jit
def _exponent(code):
    return tl.where(code < V_WHOLE, code >> 2, code - V_OFF)


@jit
def _second_moment(code):
    return float_of(((_exponent(code) + V_FIRST) << 23) | tl.where(code < V_WHOLE, (code & 3) << V_SHIFT, 0)) - SMALLEST


@jit
def _first_moment(own, code):
    size = float_of(((own & 127) << M_SHIFT) + (M_FIRST << 23)) - M_ADDED
    unit = float_of((M_UNIT + (_exponent(code) >> 1)) << 23)
    return float_of(bits_of(product(size, unit)) | ((own >> 7) << 31))


@jit
def _second_code(v, mix):
    bits = bits_of(tl.minimum(v + SMALLEST, V_MOST))
    fine = ((bits + (mix >> (32 - V_SHIFT))) >> V_SHIFT) - (V_FIRST << 2)
    whole = ((bits + (mix >> 9)) >> 23) + (V_OFF - V_FIRST)
    return tl.where(fine < V_WHOLE, fine, tl.minimum(whole, 255))


@jit
def _first_code(m, code, mix):
    sign = (bits_of(m) >> 31) << 7
    unit = float_of((254 - M_UNIT - (_exponent(code) >> 1)) << 23)
    size = bits_of(tl.minimum(product(tl.abs(m), unit) + M_ADDED, M_MOST))
    return tl.minimum(((size + (mix & ((1 << M_SHIFT) - 1))) >> M_SHIFT) - (M_FIRST << 4), 127) | sign


@jit
def _adam_kernel(
    param,  # (numel,) fp32, bf16 or fp16
    grad,  # (numel,) fp32, bf16 or fp16
    master,  # (numel,) fp32, or int16 (split: the lower half), or uint8 (24 bits), or None (param is fp32)
    exp_avg,  # (numel,) fp32 or bf16, or uint8 codes
    exp_avg_sq,  # (numel,) likewise; its sign carries a bit of a split master
    scale,
    l2,
    decay,
    lerp,
    beta2,
    one_minus_beta2,
    bc2_sqrt,
    eps,
    step_size,
    step,  # the number of the update, as a float: no kernel is compiled for its value
    numel,
    FROM_GRAD: tl.constexpr,
    L2: tl.constexpr,
    SPLIT: tl.constexpr,
    CODED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    start, at = tl.program_id(0).to(tl.int64) * BLOCK, tl.arange(0, BLOCK)
    param, grad, exp_avg, exp_avg_sq = param + start + at, grad + start + at, exp_avg + start + at, exp_avg_sq + start + at
    master = None if master is None else master + start + at
    scalars = scale, l2, decay, lerp, beta2, one_minus_beta2, bc2_sqrt, eps, step_size, step
    if start + BLOCK <= numel:  # no mask: 16 bytes at a time
        _adam_block(param, grad, master, exp_avg, exp_avg_sq, scalars, None, FROM_GRAD, L2, SPLIT, CODED)
    else:
        mask = at < (numel - start).to(tl.int32)
        _adam_block(param, grad, master, exp_avg, exp_avg_sq, scalars, mask, FROM_GRAD, L2, SPLIT, CODED)


@jit
def _joined(upper, rounded_up, below):
    """The master of a bf16 parameter: ``upper``, which it was rounded up to or not, and the bits below."""
    upper = upper.to(tl.uint16, bitcast=True).to(tl.uint32)
    is_written = (rounded_up != 0) & (upper & 0x7FFF == 0)  # no master is rounded up to zero
    return float_of(tl.where(is_written, upper << 16, ((upper - rounded_up) << 16) | below))


@jit
def _adam_block(
    param, grad, master, exp_avg, exp_avg_sq, scalars, mask, FROM_GRAD: tl.constexpr, L2: tl.constexpr, SPLIT: tl.constexpr, CODED: tl.constexpr
):
    scale, l2, decay, lerp, beta2, one_minus_beta2, bc2_sqrt, eps, step_size, step = scalars
    p = tl.load(param, mask)
    if CODED:
        code = tl.load(exp_avg_sq, mask).to(tl.uint32)
        v = _second_moment(code)
        m = _first_moment(tl.load(exp_avg, mask).to(tl.uint32), code)
    else:
        m, v = widened(tl.load(exp_avg, mask)), widened(tl.load(exp_avg_sq, mask))
    g = product(widened(tl.load(grad, mask)), scale)
    if SPLIT:
        v_bits = bits_of(v)
        v = float_of(v_bits & 0x7FFFFFFF)
        lower = tl.load(master, mask).to(tl.uint32) & 0xFFFF
        x = _joined(p, (lower >> 15) & (1 ^ (v_bits >> 31)), lower)
    elif CODED and master is not None:
        lower = tl.load(master, mask).to(tl.uint32)
        x = _joined(p, lower >> 7, lower << 8)
    elif master is not None:
        # a parameter that is not its master rounded was written from outside: the master follows
        x = tl.load(master, mask)
        x = tl.where(widened(rounded(x, p.dtype)) == widened(p), x, widened(p))
    else:
        x = p
    if CODED:
        mix = _mixed(g, x, step)
    if L2:
        g = tl.fma(l2, x, g)
    x = product(x, decay)
    m = tl.fma(lerp, g - m, g if FROM_GRAD else m)
    v = tl.fma(product(g, one_minus_beta2), g, product(v, beta2))
    x = x + tl.div_rn(product(m, step_size), tl.div_rn(tl.sqrt_rn(v), bc2_sqrt) + eps)
    if CODED:
        code = _second_code(v, mix)
        tl.store(exp_avg_sq, code.to(tl.uint8), mask)
        tl.store(exp_avg, _first_code(m, code, mix).to(tl.uint8), mask)
        if master is None:
            tl.store(param, x, mask)
        else:
            bits = tl.where(x == x, bits_of(x) + ((mix * GOLDEN) >> 24), 0x7FC00000)
            tl.store(param, bf16_of(((bits & 0xFFFFFF00) + 0x8000) >> 16), mask)
            tl.store(master, ((bits >> 8) & 0xFF).to(tl.uint8), mask)
    else:
        tl.store(exp_avg, rounded(m, exp_avg.dtype.element_ty), mask)
    if SPLIT:
        bits, upper = bits_of(x), rounded_bits(x)
        tl.store(param, bf16_of(upper), mask)
        tl.store(master, (bits & 0xFFFF).to(tl.uint16).to(tl.int16, bitcast=True), mask)
        tie_down = ((bits >> 15) & 1) & (upper == (bits >> 16)).to(tl.uint32)
        if exp_avg_sq.dtype.element_ty == tl.float32:
            tl.store(exp_avg_sq, float_of(bits_of(v) | (tie_down << 31)), mask)
        else:
            tl.store(exp_avg_sq, bf16_of(rounded_bits(v) | (tie_down << 15)), mask)
    elif not CODED:
        if master is not None:
            tl.store(master, x, mask)
        tl.store(param, rounded(x, param.dtype.element_ty), mask)
        tl.store(exp_avg_sq, rounded(v, exp_avg_sq.dtype.element_ty), mask)


def _launch(
    param: Tensor,
    grad: Tensor,
    master: Tensor | None,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled: bool,
    step: int,
    grad_scale: float,
    maximize: bool,
) -> None:
    if not param.numel():
        return
    scale, l2, decay, lerp, from_grad, *rest, _ = AdamStep(lr, beta1, beta2, eps, weight_decay, decoupled, step, grad_scale, maximize).scalars()
    grid(_adam_kernel, cdiv(param.numel(), BLOCK))(
        param, grad, master, exp_avg, exp_avg_sq, *map(float, (scale, l2, decay, lerp, *rest, step)), param.numel(),
        FROM_GRAD=bool(from_grad), L2=bool(l2 != 0), SPLIT=master is not None and master.dtype == torch.int16,
        CODED=exp_avg.dtype == eight_bit.CODES, BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip


def _reference(param: Tensor, grad: Tensor, master: Tensor | None, exp_avg: Tensor, exp_avg_sq: Tensor, *scalars: Any) -> None:
    reference.adam(param, grad, master, exp_avg, exp_avg_sq, AdamStep(*scalars))


_op = op("adam_", _reference, mutates=("param", "master", "exp_avg", "exp_avg_sq"))(_launch)


def adam(param: Tensor, grad: Tensor, master: Tensor | None, exp_avg: Tensor, exp_avg_sq: Tensor, step: AdamStep) -> None:
    """One Adam or AdamW update, in place.

    Args:
        param: (n,) fp32, bf16 or fp16, contiguous. fp32 if and only if ``master`` is None.
        grad: (n,) fp32, bf16 or fp16.
        master: None, (n,) fp32, or (n,) int16 (split master, with a bf16 parameter: see codec.py).
        exp_avg: (n,) fp32 or bf16.
        exp_avg_sq: (n,), as exp_avg. With a split master its sign carries a bit.
        step: the scalars; without amsgrad.

    In host memory this is the reference; ``zk.offload.cpu_adam.adam_`` is the fast one there.

    Raises:
        ValueError: for sizes, devices or precisions that do not fit together, and for amsgrad.
        TypeError: for other precisions.
    """
    check_adam(param, grad, master, exp_avg, exp_avg_sq)
    if step.amsgrad:
        raise ValueError("this kernel has no amsgrad; zk.offload.cpu_adam.adam_ does, on any device")
    _op(param, grad, master, exp_avg, exp_avg_sq, *(getattr(step, name) for name in AdamStep.__slots__[:-1]))  # what there is but for amsgrad
