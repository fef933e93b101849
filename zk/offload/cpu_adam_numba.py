"""Adam in host memory, compiled by numba: gradients, parameters and state in one pass.

Formulas and bytes are those of the device's kernel (zk/kernels/adam_kernel.py), and of
torch.optim.AdamW, operation for operation, with fused multiply-adds where torch's CPU kernels use
them. The only difference from torch is the square root: this one is rounded correctly, MKL's not.

Arrays carry their dtype by numpy type: float32 is fp32, uint16 the bits of bf16, int16 the bits of
fp16, uint8 codes (eight_bit.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import prange, types
from numba.extending import intrinsic, overload
from torch import Tensor

from zk.kernels import eight_bit
from zk.kernels.reference import AdamStep

F32, U8, U16, U32 = np.float32, np.uint8, np.uint16, np.uint32
_FLOAT, _HALF, _WORD = ir.FloatType(), ir.HalfType(), ir.IntType(32)
# elements handled by one thread at a time: enough to amortize the hand-over, few enough to balance
BLOCK = 1 << 14
# bytes between what is read and what is asked for; without asking, one thread reads bf16 from
# memory at a third of its rate
AHEAD = 1 << 11
SMALLEST, V_MOST, M_ADDED, M_MOST = map(F32, eight_bit.FLOATS)
V_SHIFT, V_FIRST, V_WHOLE, V_OFF = map(U32, eight_bit.V_WORDS)
M_SHIFT, M_FIRST, M_UNIT = map(U32, eight_bit.M_WORDS)
GOLDEN, FIRST, SECOND = map(U32, eight_bit.HASH)


@intrinsic
def _fma(typingctx, a, b, c):
    """a * b + c with one rounding."""

    def generate(context, builder, signature, args):
        kind = ir.FunctionType(_FLOAT, [_FLOAT] * 3)
        return builder.call(builder.module.declare_intrinsic("llvm.fma", [_FLOAT], kind), args)

    return types.float32(types.float32, types.float32, types.float32), generate


def _cast(source, target, build):
    """A function of one value: the instructions that ``build(builder, value)`` makes."""

    def cast(typingctx, value):
        return target(source), lambda context, builder, signature, args: build(builder, args[0])

    return intrinsic(cast)


_F32, _I16 = types.float32, types.int16
_as_float = _cast(types.uint32, _F32, lambda on, bits: on.bitcast(bits, _FLOAT))
_as_bits = _cast(_F32, types.uint32, lambda on, x: on.bitcast(x, _WORD))
_half_to_float = _cast(_I16, _F32, lambda on, bits: on.fpext(on.bitcast(bits, _HALF), _FLOAT))
_float_to_half = _cast(_F32, _I16, lambda on, x: on.bitcast(on.fptrunc(x, _HALF), ir.IntType(16)))


@intrinsic
def _prefetch(typingctx, array, i):
    """Bring the line of ``array[i]`` into the cache; behind the end nothing is read."""

    def generate(context, builder, signature, args):
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        byte = ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [byte, _WORD, _WORD, _WORD])
        prefetch = builder.module.declare_intrinsic("llvm.prefetch", [byte], kind)
        line = builder.bitcast(builder.gep(data, [args[1]]), byte)
        builder.call(prefetch, [line, *map(_WORD, (0, 3, 1))])  # to read, into all caches, no code
        return context.get_dummy_value()

    return types.void(array, i), generate


@numba.njit(inline="always")
def _round_to_bf16(x):
    """The bits of x as bf16, to nearest even, as uint32; NaN stays NaN."""
    bits = _as_bits(x)
    rounded = (bits + U32(0x7FFF) + ((bits >> U32(16)) & U32(1))) >> U32(16)
    return rounded if x == x else U32(0x7FC0)


def _by_types(choose):
    """Decorator: compiled calls run what the function returns for the types of their arguments."""
    return overload(choose, inline="always")(choose)


def _kind(array):
    """The type of an array's elements; None where there is no array."""
    return getattr(array, "dtype", None)


@_by_types
def _widened(kept):
    """An element as a float."""
    return {
        types.float32: lambda kept: kept,
        types.uint16: lambda kept: _as_float(U32(kept) << U32(16)),
        types.int16: lambda kept: _half_to_float(kept),
    }[kept]


@_by_types
def _rounded(array, x):
    """x as an element of ``array``."""
    return {
        types.float32: lambda array, x: x,
        types.uint16: lambda array, x: U16(_round_to_bf16(x)),
        types.int16: lambda array, x: _float_to_half(x),
    }[array.dtype]


@numba.njit(inline="always")
def _exponent(code):
    return U32(code >> U32(2)) if code < V_WHOLE else U32(code - V_OFF)


@_by_types
def _load_second(kept):
    """The second moment, and the bit that its sign carries (see codec.py) or its code."""

    def load(kept):
        bits = _as_bits(_widened(kept))
        return _as_float(bits & U32(0x7FFFFFFF)), bits >> U32(31)

    def load_code(kept):
        code = U32(kept)
        mantissa = U32(U32(code & U32(3)) << V_SHIFT if code < V_WHOLE else U32(0))
        bits = U32(U32(U32(_exponent(code) + V_FIRST) << U32(23)) | mantissa)
        return _as_float(bits) - SMALLEST, code

    return load_code if kept == types.uint8 else load


@_by_types
def _mixed(array, g, x, seed):
    """The bits that rounding to codes goes by; zero where ``array`` holds none."""

    def mix(array, g, x, seed):
        bits = U32(U32(_as_bits(g + F32(0)) + seed) ^ _as_bits(x))
        bits = U32(U32(bits ^ (bits >> U32(16))) * FIRST)
        bits = U32(U32(bits ^ (bits >> U32(13))) * SECOND)
        return U32(bits ^ (bits >> U32(16)))

    return mix if array.dtype == types.uint8 else lambda array, g, x, seed: U32(0)


@_by_types
def _load_first(kept, code):
    """The first moment, beside the code of the second one."""

    def load_code(kept, code):
        own = U32(kept)
        size = _as_float(U32(U32((own & U32(127)) << M_SHIFT) + U32(M_FIRST << U32(23)))) - M_ADDED
        unit = _as_float(U32((M_UNIT + U32(_exponent(code) >> U32(1))) << U32(23)))
        return _as_float(U32(_as_bits(size * unit) | U32((own >> U32(7)) << U32(31))))

    return load_code if kept == types.uint8 else lambda kept, code: _widened(kept)


@_by_types
def _store_first(array, i, m, code, mix):
    def store(array, i, m, code, mix):
        array[i] = _rounded(array, m)

    def store_code(array, i, m, code, mix):
        unit = _as_float(U32((U32(254) - M_UNIT - U32(_exponent(code) >> U32(1))) << U32(23)))
        size = _as_float(U32(_as_bits(m) & U32(0x7FFFFFFF))) * unit + M_ADDED
        size = size if size < M_MOST else M_MOST
        added = U32(mix & U32((U32(1) << M_SHIFT) - U32(1)))
        own = U32(U32(U32(_as_bits(size) + added) >> M_SHIFT) - U32(M_FIRST << U32(4)))
        sign = U32((_as_bits(m) >> U32(31)) << U32(7))
        array[i] = U8(U32(own if own < U32(127) else U32(127)) | sign)

    return store_code if array.dtype == types.uint8 else store


@_by_types
def _store_second(array, i, v, flag, mix):
    def store_float(array, i, v, flag, mix):
        array[i] = _as_float(_as_bits(v) | (flag << U32(31)))
        return flag

    def store_bf16(array, i, v, flag, mix):
        array[i] = U16(_round_to_bf16(v) | (flag << U32(15)))
        return flag

    def store_code(array, i, v, flag, mix):
        v = v + SMALLEST
        bits = _as_bits(v if v < V_MOST else V_MOST)
        added = U32(mix >> U32(U32(32) - V_SHIFT))
        fine = U32(U32(U32(bits + added) >> V_SHIFT) - U32(V_FIRST << U32(2)))
        whole = U32(U32(U32(bits + U32(mix >> U32(9))) >> U32(23)) + U32(V_OFF - V_FIRST))
        whole = whole if whole < U32(255) else U32(255)
        code = fine if fine < V_WHOLE else whole
        array[i] = U8(code)
        return code

    return {types.float32: store_float, types.uint16: store_bf16}.get(array.dtype, store_code)


@numba.njit(inline="always")
def _joined(upper, rounded_up, below):
    """The master of a bf16 parameter: ``upper``, to which it was rounded up or not; the rest."""
    written = rounded_up & U32(upper & U32(0x7FFF) == 0)  # no master is rounded up to zero
    high = (upper - (rounded_up ^ written)) << U32(16)
    return _as_float(U32(high | (below & (written - U32(1)))))


@_by_types
def _load_master(param, master, i, flag):
    def load_split(param, master, i, flag):
        lower = U32(master[i])
        return _joined(U32(param[i]), (lower >> U32(15)) & (U32(1) ^ flag), lower)

    def load_24(param, master, i, flag):
        lower = U32(master[i])
        return _joined(U32(param[i]), lower >> U32(7), lower << U32(8))

    def load_separate(param, master, i, flag):
        # a parameter that is not its master rounded was written from outside: the master follows
        x, p = master[i], _widened(param[i])
        return x if _widened(_rounded(param, x)) == p else p

    kinds = {types.float32: load_separate, types.uint8: load_24, types.uint16: load_split}
    return kinds.get(_kind(master), lambda param, master, i, flag: param[i])


@_by_types
def _store_master(param, master, i, x, mix):
    """Writes master and parameter; returns the bit for the sign of the second moment."""

    def store_param(param, master, i, x, mix):
        param[i] = x
        return U32(0)

    def store_both(param, master, i, x, mix):
        master[i] = x
        param[i] = _rounded(param, x)
        return U32(0)

    def store_24(param, master, i, x, mix):
        bits = U32(_as_bits(x) + (U32(mix * GOLDEN) >> U32(24))) if x == x else U32(0x7FC00000)
        param[i] = U16(U32((bits & U32(0xFFFFFF00)) + U32(0x8000)) >> U32(16))
        master[i] = U8((bits >> U32(8)) & U32(0xFF))
        return U32(0)

    def store_split(param, master, i, x, mix):
        bits = _as_bits(x)
        rounded = _round_to_bf16(x)
        param[i] = U16(rounded)
        master[i] = U16(bits & U32(0xFFFF))
        return ((bits >> U32(15)) & U32(1)) & U32(rounded == (bits >> U32(16)))

    kinds = {types.float32: store_both, types.uint8: store_24, types.uint16: store_split}
    return kinds.get(_kind(master), store_param)


def _jit(**options):
    """numba.njit, with a cache on disk where there is a place for one."""
    make = functools.partial(numba.njit, nogil=True, error_model="numpy", **options)

    def decorate(function):
        try:
            return make(cache=True)(function)
        except RuntimeError:  # neither the package nor the user has a writable cache directory
            return make()(function)

    return decorate


@_jit()
def _adam_block(param, grad, master, m, v, scalars):
    scale, l2, decay, lerp, from_grad, beta2, beta2_rest, bc2_sqrt, eps, step_size, seed = scalars
    for i in range(param.size):
        v_i, flag = _load_second(v[i])
        x = _load_master(param, master, i, flag)
        g = _widened(grad[i]) * scale
        mix = _mixed(v, g, x, seed)
        if l2 != F32(0):
            g = _fma(l2, x, g)
        x = x * decay
        m_i = _load_first(m[i], flag)
        m_i = _fma(lerp, g - m_i, g if from_grad else m_i)
        v_i = _fma(beta2_rest * g, g, v_i * beta2)
        x = x + (step_size * m_i) / (np.sqrt(v_i) / bc2_sqrt + eps)
        flag = _store_master(param, master, i, x, mix)
        code = _store_second(v, i, v_i, flag, mix)
        _store_first(m, i, m_i, code, mix)


@_jit(parallel=True)
def _adam_parallel(param, grad, master, m, v, scalars):
    for block in prange((param.size + BLOCK - 1) // BLOCK):
        a = block * BLOCK
        b = a + BLOCK  # (the last one is cut)
        _adam_block(param[a:b], grad[a:b], _cut(master, a, b), m[a:b], v[a:b], scalars)


@_by_types
def _cut(array, a, b):
    return (lambda array, a, b: array[a:b]) if _kind(array) else lambda array, a, b: None


@_jit()
def _sum_of_squares_block(grad):
    # 64 running sums: vectors of any width add them in the same order
    sums = np.zeros(64)
    whole = grad.size - grad.size % 64
    for i in range(0, whole, 64):
        row = grad[i : i + 64]
        for j in range(0, 64, 64 // grad.itemsize):
            _prefetch(grad, i + AHEAD // grad.itemsize + j)
        for j in range(64):
            sums[j] += np.float64(_widened(row[j])) ** 2
    for i in range(whole, grad.size):
        sums[0] += np.float64(_widened(grad[i])) ** 2
    return sums.sum()


@_jit(parallel=True)
def _sum_of_squares_parallel(grad, partial):
    for block in prange(partial.size):
        partial[block] = _sum_of_squares_block(grad[block * BLOCK : (block + 1) * BLOCK])


def _launch(
    alone: Callable[..., None], parallel: Callable[..., None], num_threads: int, *arrays: Any
) -> None:
    """Call one of two functions over (n,) arrays: on one thread for a few elements.

    numba's first launch calls omp_set_num_threads, maybe that of the OpenMP library inside torch:
    torch would then use another number of threads than the user set, and sum in another order.
    """
    if num_threads == 1 or arrays[0].size <= 2 * BLOCK:  # starting threads would take longer
        alone(*arrays)
        return
    before = torch.get_num_threads()
    most: int = numba.config.NUMBA_NUM_THREADS  # type: ignore[attr-defined]
    numba.set_num_threads(min(num_threads, most))
    try:
        parallel(*arrays)
    finally:
        if torch.get_num_threads() != before:
            torch.set_num_threads(before)


def _array(tensor: Tensor | None) -> Any:
    """The same memory as numpy: fp32 as float32, codes as uint8, the bits of bf16 (and of a split
    master) as uint16, of fp16 as int16."""
    if tensor is None:
        return None
    if tensor.dtype in (torch.float32, torch.uint8):
        return tensor.numpy()
    bits = tensor.view(torch.int16).numpy()
    return bits if tensor.dtype == torch.float16 else bits.view(U16)


def adam(fields: Iterable[Tensor | None], step: AdamStep, num_threads: int) -> None:
    """Update in place. Fields: param, grad, master, exp_avg, exp_avg_sq (n,), contiguous."""
    arrays = map(_array, fields)
    _launch(_adam_block, _adam_parallel, num_threads, *arrays, step.scalars())


def sum_of_squares(grad: Tensor, num_threads: int) -> float:
    """The sum of squares of ``grad`` (n,) in float64, the same for any number of threads."""
    array, blocks = _array(grad), -(-grad.numel() // BLOCK)
    if blocks < 2:
        return float(_sum_of_squares_block(array))
    parallel, partial = _sum_of_squares_parallel, np.zeros(blocks)
    _launch(parallel.py_func, parallel, num_threads, array, partial)
    return float(partial.sum())
