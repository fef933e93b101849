"""Adam on the device: gradients, parameters and state in one pass over memory.

    g = grad * grad_scale                       (+ weight_decay * x, for Adam)
    x = x * (1 - lr * weight_decay)             (AdamW)
    m = fma(1 - beta1, g - m, m)
    v = fma((1 - beta2) * g, g, beta2 * v)
    x = x - (lr / bc1) * m / (sqrt(v) / sqrt(bc2) + eps)

The same operations in the same order, each with one correct rounding, as the CPU kernel
(zk.offload.cpu_adam_numba): which of the two updates an element does not change a bit of it. Bytes
per element, bf16 gradient and parameter: 28 with an fp32 master (2 grad, 4 + 4 master, 8 + 8
moments, 2 param), 26 with a split master, 18 with bf16 moments too, 12 in 8 bits (eight_bit.py).
Source: Adam, arXiv 1412.6980; decoupled weight decay, arXiv 1711.05101.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from zk.kernels import eight_bit
from zk.kernels.numerics import (
    BLOCK,
    bf16_of,
    bits_of,
    constants,
    float_of,
    grid,
    product,
    rounded,
    rounded_bits,
    widened,
)
from zk.kernels.reference import AdamStep, Master

# numbers of eight_bit.py, as kernels take them
SMALLEST, V_MOST, M_ADDED, M_MOST = constants(eight_bit.FLOATS)
V_SHIFT, V_FIRST, V_WHOLE, V_OFF = constants(eight_bit.V_WORDS)
M_SHIFT, M_FIRST, M_UNIT = constants(eight_bit.M_WORDS)
GOLDEN, FIRST, SECOND = constants(eight_bit.HASH)


@triton.jit
def _mixed(g, x, step):
    bits = (bits_of(g + 0.0) + tl.cast(step, tl.uint32) * GOLDEN) ^ bits_of(x)
    bits = (bits ^ (bits >> 16)) * FIRST
    bits = (bits ^ (bits >> 13)) * SECOND
    return bits ^ (bits >> 16)


@triton.jit
def _exponent(code):
    return tl.where(code < V_WHOLE, code >> 2, code - V_OFF)


@triton.jit
def _second_moment(code):
    mantissa = tl.where(code < V_WHOLE, (code & 3) << V_SHIFT, 0)
    return float_of(((_exponent(code) + V_FIRST) << 23) | mantissa) - SMALLEST


@triton.jit
def _first_moment(own, code):
    size = float_of(((own & 127) << M_SHIFT) + (M_FIRST << 23)) - M_ADDED
    unit = float_of((M_UNIT + (_exponent(code) >> 1)) << 23)
    return float_of(bits_of(product(size, unit)) | ((own >> 7) << 31))


@triton.jit
def _second_code(v, mix):
    bits = bits_of(tl.minimum(v + SMALLEST, V_MOST))
    fine = ((bits + (mix >> (32 - V_SHIFT))) >> V_SHIFT) - (V_FIRST << 2)
    whole = ((bits + (mix >> 9)) >> 23) + (V_OFF - V_FIRST)
    return tl.where(fine < V_WHOLE, fine, tl.minimum(whole, 255))


@triton.jit
def _first_code(m, code, mix):
    sign = (bits_of(m) >> 31) << 7
    unit = float_of((254 - M_UNIT - (_exponent(code) >> 1)) << 23)
    size = bits_of(tl.minimum(product(tl.abs(m), unit) + M_ADDED, M_MOST))
    own = ((size + (mix & ((1 << M_SHIFT) - 1))) >> M_SHIFT) - (M_FIRST << 4)
    return tl.minimum(own, 127) | sign


@triton.jit
def _adam_kernel(
    param,  # (numel,) fp32, bf16 or fp16
    grad,  # (numel,) fp32, bf16 or fp16
    master,  # (numel,) fp32, int16 (split: the lower half), uint8 (24 bits), or None (fp32 param)
    exp_avg,  # (numel,) fp32 or bf16, or uint8 codes
    exp_avg_sq,  # (numel,) likewise; its sign carries a bit of a split master
    scale, l2, decay, lerp, beta2, one_minus_beta2, bc2_sqrt, eps, step_size,  # AdamStep.scalars()
    step,  # the number of the update, as a float: no kernel is compiled for its value
    numel,
    FROM_GRAD: tl.constexpr, L2: tl.constexpr, SPLIT: tl.constexpr, CODED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    start, at = tl.program_id(0).to(tl.int64) * BLOCK, tl.arange(0, BLOCK)
    param, grad = param + start + at, grad + start + at
    exp_avg, exp_avg_sq = exp_avg + start + at, exp_avg_sq + start + at
    master = None if master is None else master + start + at
    fields = param, grad, exp_avg, exp_avg_sq
    scalars = scale, l2, decay, lerp, beta2, one_minus_beta2, bc2_sqrt, eps, step_size, step
    if start + BLOCK <= numel:  # no mask: 16 bytes at a time
        _adam_block(fields, master, scalars, None, FROM_GRAD, L2, SPLIT, CODED)
    else:
        mask = at < (numel - start).to(tl.int32)
        _adam_block(fields, master, scalars, mask, FROM_GRAD, L2, SPLIT, CODED)


@triton.jit
def _joined(upper, rounded_up, below):
    """The master of a bf16 parameter: ``upper``, to which it was rounded up or not; the rest."""
    upper = upper.to(tl.uint16, bitcast=True).to(tl.uint32)
    is_written = (rounded_up != 0) & (upper & 0x7FFF == 0)  # no master is rounded up to zero
    return float_of(tl.where(is_written, upper << 16, ((upper - rounded_up) << 16) | below))


@triton.jit
def _adam_block(
    fields, master, scalars, mask,
    FROM_GRAD: tl.constexpr, L2: tl.constexpr, SPLIT: tl.constexpr, CODED: tl.constexpr,
):  # fmt: skip
    param, grad, exp_avg, exp_avg_sq = fields
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
    mix = _mixed(g, x, step) if CODED else None
    if L2:
        g = tl.fma(l2, x, g)
    x = product(x, decay)
    m = tl.fma(lerp, g - m, g if FROM_GRAD else m)
    v = tl.fma(product(g, one_minus_beta2), g, product(v, beta2))
    x = x + tl.div_rn(product(m, step_size), tl.div_rn(tl.sqrt_rn(v), bc2_sqrt) + eps)
    _store(fields, master, x, m, v, mix, mask, SPLIT, CODED)


@triton.jit
def _store(fields, master, x, m, v, mix, mask, SPLIT: tl.constexpr, CODED: tl.constexpr):
    param, _, exp_avg, exp_avg_sq = fields
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


def launch(
    param: Tensor, grad: Tensor, master: Master, exp_avg: Tensor, exp_avg_sq: Tensor, step: AdamStep
) -> None:
    """``adam`` on a GPU, without its checks."""
    if not param.numel():
        return
    scale, l2, decay, lerp, from_grad, *rest, _ = step.scalars()
    numbers = map(float, (scale, l2, decay, lerp, *rest, step.step))
    grid(_adam_kernel, triton.cdiv(param.numel(), BLOCK))(
        *(param, grad, master, exp_avg, exp_avg_sq, *numbers, param.numel()),
        FROM_GRAD=bool(from_grad), L2=bool(l2 != 0), CODED=exp_avg.dtype == eight_bit.CODES,
        SPLIT=master is not None and master.dtype == torch.int16, BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip
