"""The kernels as functions: arguments are checked, then a GPU runs the kernel, a CPU the reference.

Tensors are fp32, bf16 or fp16 where nothing else is said, else it is a TypeError; a ValueError says
which shapes, devices or layouts do not fit. ``flatten``, ``reduce`` and ``tiled_matmul`` are ops
(``torch.ops.zk``), which torch.compile and fake tensors take as they are.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from zk.kernels import reference
from zk.kernels.eight_bit import CODES
from zk.kernels.reference import AdamStep, Master

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def _op(name: str, written: str) -> Any:
    """The op ``zk::name_``, which writes the argument ``written``; as its reference is called."""

    def run(*args: Any) -> None:
        reference.unchecked(name, args[1].device)(*args)

    schema = torch.library.infer_schema(getattr(reference, name), mutates_args=(written,))
    return torch.library.custom_op(f"zk::{name}_", run, mutates_args=(written,), schema=schema)


_flatten, _reduce = _op("flatten", "flat"), _op("reduce", "out")
_tiled_matmul = _op("tiled_matmul", "out")


def _check(**tensors: Tensor | None) -> None:
    """TypeError for a dtype that kernels do not know; ValueError for tensors on several devices."""
    given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    for name, tensor in given.items():
        if tensor.dtype not in FLOATS:
            raise TypeError(f"{name} must be fp32, bf16 or fp16; got {tensor.dtype}")
    places = {str(tensor.device): name for name, tensor in given.items()}
    _need(len(places) < 2, "tensors must be on one device; of each there is {}", places)


def _need(holds: bool, text: str, *shown: object) -> None:
    if not holds:
        raise ValueError(text.format(*shown))


def _span(tensor: Tensor) -> tuple[Any, Any]:
    """The first byte of a tensor in its storage, and the one after the last."""
    last = sum((size - 1) * by for size, by in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.storage_offset()
    return start * tensor.itemsize, (start + last + 1) * tensor.itemsize


def _overlap(one: Tensor, other: Tensor | None) -> bool:
    """Tell if two tensors may share memory. Not asked while a graph is traced."""
    if other is None or torch.compiler.is_compiling() or not one.numel() * other.numel():
        return False
    (start, stop), (begin, end) = _span(one), _span(other)
    is_one: bool = one.untyped_storage()._cdata == other.untyped_storage()._cdata
    return is_one and bool(start < end and begin < stop)


def flatten(tensors: Sequence[Tensor], flat: Tensor, offsets: Sequence[int]) -> None:
    """Copy ``tensors`` into ``flat``, cast.

    Args:
        tensors: any shapes, of one precision. What is not contiguous is copied first.
        flat: (numel,), contiguous. All of it is written: what no tensor covers, with zeros.
        offsets: the first element of each, ascending.
    """
    _check(**{f"tensor {index}": tensor for index, tensor in enumerate(tensors)}, flat=flat)
    is_flat, kinds = flat.ndim == 1 and flat.is_contiguous(), {tensor.dtype for tensor in tensors}
    _need(is_flat, "flat must be flat and contiguous; got {}, {}", flat.shape, flat.stride())
    _need(len(kinds) < 2, "tensors must have one precision; got {}", kinds)
    counts = len(tensors), len(offsets)
    _need(counts[0] == counts[1], "every tensor needs an offset; got {} and {} offsets", *counts)
    stops = [*offsets[1:], flat.numel()][: len(offsets)]
    regions = list(zip(offsets, stops, strict=True))
    says = "offsets must ascend and leave room: tensor {} has {} elements, between {} and {}"
    for index, (tensor, (start, stop)) in enumerate(zip(tensors, regions, strict=True)):
        fits = 0 <= start <= stop - tensor.numel()
        _need(fits, says, index, tensor.numel(), start, stop)
    flat[: offsets[0] if offsets else None].zero_()
    if tensors:
        sources = [tensor.detach().contiguous() for tensor in tensors]
        _flatten(sources, flat, [bound for region in regions for bound in region])


def reduce(rows: Tensor, out: Tensor) -> None:
    """Write the mean of ``rows``: summed in fp32 in their order, rounded once.

    The reduction of ZeRO over ranks; of one row it is a cast.

    Args:
        rows: (n, numel), contiguous.
        out: (numel,), contiguous. It shares no memory with ``rows``.
    """
    _check(rows=rows, out=out)
    fits = rows.ndim == 2 and len(rows) > 0 and rows.shape[1:] == out.shape
    fits = fits and rows.is_contiguous() and out.is_contiguous()
    says = "reduce needs rows (n, numel) and out (numel,), contiguous; got {}, {} and {}, {}"
    _need(fits, says, rows.shape, rows.stride(), out.shape, out.stride())
    _need(not _overlap(rows, out), "rows and out must share no memory")
    _reduce(rows, out)


def adam(
    param: Tensor, grad: Tensor, master: Master, exp_avg: Tensor, exp_avg_sq: Tensor, step: AdamStep
) -> None:
    """One Adam or AdamW update, in place.

    Args:
        param: (n,), contiguous. fp32 if and only if ``master`` is None.
        grad: (n,).
        master: None, (n,) fp32, or with a bf16 parameter (n,) int16 (split master, see codec.py)
            or uint8 (24 bits).
        exp_avg: (n,) fp32 or bf16, or uint8 codes (eight_bit.py).
        exp_avg_sq: (n,), as exp_avg. With a split master its sign carries a bit.
        step: the scalars.

    In host memory this is the reference; ``zk.offload.cpu_adam.adam_`` is the fast one there.
    """
    check_adam(param, grad, master, exp_avg, exp_avg_sq, step)
    reference.unchecked("adam", param.device)(param, grad, master, exp_avg, exp_avg_sq, step)


# dtypes of param, master and moments that go together
_MOMENTS = torch.float32, torch.bfloat16
_LAYOUTS = {
    *((torch.float32, None, moments) for moments in (*_MOMENTS, CODES)),
    *((dtype, torch.float32, moments) for dtype in FLOATS[1:] for moments in _MOMENTS),
    *((torch.bfloat16, torch.int16, moments) for moments in _MOMENTS),
    (torch.bfloat16, CODES, CODES),
}


def check_adam(
    param: Tensor, grad: Tensor, master: Master, exp_avg: Tensor, exp_avg_sq: Tensor, step: AdamStep
) -> None:
    """Raise ValueError or TypeError for what ``adam`` does not take."""
    _check(param=param, grad=grad)
    shape, device, kept = param.shape, param.device, {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    is_flat = param.ndim == 1 and param.is_contiguous()
    _need(is_flat, "param must be flat and contiguous; got {}, {}", shape, param.stride())
    kept |= {} if master is None else {"master": master}
    says = "{} must be flat, contiguous and as param {} on {}; got {}, {} on {}"
    for name, tensor in {"grad": grad, **kept}.items():
        fits = tensor.shape == shape and tensor.device == device and tensor.is_contiguous()
        _need(fits, says, name, shape, device, tensor.shape, tensor.stride(), tensor.device)
    dtypes = {name: tensor.dtype for name, tensor in kept.items()}
    is_known = (param.dtype, dtypes.get("master"), exp_avg.dtype) in _LAYOUTS
    _need(
        is_known and exp_avg_sq.dtype == exp_avg.dtype,
        "an fp32 parameter has no master; others have it in fp32; a bf16 one may have it split "
        "in int16, or beside uint8 moments in uint8; moments have one dtype: fp32, bf16 or uint8; "
        "got param {} with {}",
        *(param.dtype, dtypes),
    )
    if exp_avg.dtype == CODES:
        step.check_coded()


def _blas_can_read(matrix: Tensor) -> bool:
    """Rows or columns lie one after the other without a stride between their elements."""
    (rows, columns), (down, across) = matrix.shape, matrix.stride()
    by_rows, by_columns = (across, down, columns), (down, across, rows)
    return any(step == 1 and by >= max(1, size) for step, by, size in (by_rows, by_columns))


def policy(
    a: Tensor, b: Tensor, out: Tensor, plus: Tensor | None = None, bias: Tensor | None = None
) -> str:
    """What multiplies: "reference" in host memory, "cublas" for all it can express, or "triton".

    cuBLAS knows each GPU better than a few configurations can, but it cannot add a bias to an fp32
    sum and round to 16 bits in one go, nor read two strides: there the kernel saves passes over the
    output. The environment variable ZK_MATMUL ("cublas" or "triton") decides instead where both
    can. The rule looks at shapes and strides only, so all ranks, and all runs, decide alike.
    """
    if a.device.type == "cpu":
        return "reference"
    wanted = os.environ.get("ZK_MATMUL", "cublas")
    says = "the environment variable ZK_MATMUL must be 'cublas' or 'triton'; got {!r}"
    _need(wanted in ("cublas", "triton"), says, wanted)
    # it adds one of the two, in the dtype of what it writes; that is as it reads, or fp32
    added = [tensor for tensor in (plus, bias) if tensor is not None]
    can = all(map(_blas_can_read, (a, b, out))) and out.dtype in (a.dtype, torch.float32)
    can = can and len(added) < 2 and all(tensor.dtype == out.dtype for tensor in added)
    can = can and (plus is None or plus is out) and (bias is None or out.dtype == a.dtype)
    return wanted if can else "triton"


def tiled_matmul(
    a: Tensor, b: Tensor, out: Tensor, *, plus: Tensor | None = None, bias: Tensor | None = None
) -> None:
    """``out = plus + a @ b + bias``, computed in fp32 and rounded once.

    Args:
        a: (m, k), any strides.
        b: (k, n) of the same precision, any strides.
        out: (m, n), any strides.
        plus: (m, n) fp32, maybe ``out`` itself; what other tiles have summed.
        bias: (n,), contiguous.

    fp32 matrices are multiplied in tf32 only if torch.backends.cuda.matmul.allow_tf32 says so.
    ``policy`` tells who does it.
    """
    _check(a=a, b=b, plus=plus, bias=bias, out=out)
    fits = a.ndim == b.ndim == out.ndim == 2 and a.shape[1] == b.shape[0]
    fits = fits and out.shape == (a.shape[0], b.shape[1])
    says = "a (m, k) @ b (k, n) goes into out (m, n); got {}, {} and {}"
    _need(fits, says, a.shape, b.shape, out.shape)
    _need(a.dtype == b.dtype, "a and b must have one precision; got {} and {}", a.dtype, b.dtype)
    fits = plus is None or (plus.shape == out.shape and plus.dtype == torch.float32)
    _need(fits, "plus must be fp32 and as large as out {}; got {}", out.shape, plus)
    fits = bias is None or (bias.shape == b.shape[1:] and bias.is_contiguous())
    _need(fits, "bias must be contiguous and {}", b.shape[1:])
    says = "{} shares memory with out, which is written before all is read; plus may be out itself"
    for name, tensor in {"a": a, "b": b, "plus": None if plus is out else plus}.items():
        _need(not _overlap(out, tensor), says, name)
    if policy(a, b, out, plus, bias) != "cublas":
        _tiled_matmul(a, b, out, plus, bias)
        return
    wider: dict[str, Any] = {} if out.dtype == a.dtype else {"out_dtype": out.dtype}
    added = plus if bias is None else bias
    if added is None:
        torch.mm(a, b, out=out, **wider)
    else:
        torch.addmm(added, a, b, out=out, **wider)
