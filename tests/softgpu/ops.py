"""Every op on device tensors: one function, the fallback of torch's dispatch key CUDA.

Views run as they do for CPU tensors. Everything else runs on host tensors over the same memory, on the current stream of the device that its
tensors are on; what it reads and writes is compared with what other streams do there.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.softgpu import native
from tests.softgpu.copies import Copy, use_host
from tests.softgpu.memory import NUM_DEVICES, block_of, current_queue, host_view, is_pinned, place_on, plainly, span
from tests.softgpu.streams import LOCK, find_queue, host_learns, join, stats

_CPU = torch.device("cpu")
_CPU_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_HOST_TOO = frozenset(f"aten::{name}" for name in ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"))
_BARE = frozenset(("aten::set_", "aten::is_set_to"))  # no values are touched
_WAITS = frozenset(
    f"aten::{name}" for name in ("_local_scalar_dense", "nonzero", "equal", "masked_select", "_unique2", "unique_consecutive", "unique_dim")
)
_EMPTY = frozenset(f"aten::{name}" for name in ("empty", "empty_strided", "new_empty", "empty_like"))
_PRODUCTS = frozenset(f"aten::{name}" for name in ("mm", "bmm", "addmm", "baddbmm", "addmv", "mv", "dot", "_addmm_activation"))
_HALVES = (torch.bfloat16, torch.float16)
generators = [torch.Generator().manual_seed(0) for _ in range(NUM_DEVICES)]  # of each device: a CPU's


class _Plan:
    """What there is to know of one op."""

    def __init__(self, op: Any) -> None:
        schema = op._schema
        self.name: str = schema.name
        names = [argument.name for argument in schema.arguments]
        kinds = [str(argument.type) for argument in schema.arguments]
        writes = [bool(argument.alias_info is not None and argument.alias_info.is_write) for argument in schema.arguments]
        self.tensors = [(at, *each) for at, each in enumerate(zip(names, writes, strict=True)) if "Tensor" in kinds[at]]
        self.numbers = [at for at, kind in enumerate(kinds) if kind == "Tensor"]  # where the schema has tensors, they arrive as numbers
        self.is_view = self.name in _BARE or any(ret.alias_info is not None and not ret.alias_info.is_write for ret in schema.returns)
        self.random = torch.Tag.nondeterministic_seeded in op.tags
        self.product = self.name in _PRODUCTS
        self.waits, self.is_empty, self.takes_host = self.name in _WAITS, self.name in _EMPTY, self.name in _HOST_TOO


_plans: dict[Any, _Plan] = {}


def tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [item for item in value if isinstance(item, Tensor)]
    return []


def mapped(value: Any, change: Callable[[Tensor], Any]) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)([mapped(item, change) for item in value])
    return change(value) if isinstance(value, Tensor) else value


def fallback(op: Any, *args: Any, **kwargs: Any) -> Any:
    """What CUDA does with ``op``."""
    if threading.gettrace() and not sys.gettrace():  # coverage, in autograd's thread of a device: what C++ starts does not ask for it
        sys.settrace(threading.gettrace())
    plan = _plans.get(op)
    if plan is None:
        plan = _plans[op] = _Plan(op)
    with plainly():
        if plan.is_view:
            return op.redispatch(_CPU_KEYS, *args, **kwargs)
        with LOCK:
            return _compute(op, plan, args, kwargs)


def _apart(plan: _Plan, index: int, other: Any) -> RuntimeError:
    text = "Expected all tensors to be on the same device, but found at least two devices, "
    return RuntimeError(f"{text}cuda:{index} and {other}! ({plan.name})")


def _compute(op: Any, plan: _Plan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    near: dict[int, tuple[Tensor, bool]] = {}
    device, num_args = -1, len(args)
    for at, name, writes in plan.tensors:
        for tensor in tensors_in(args[at] if at < num_args else kwargs.get(name)):
            if tensor.is_cuda:
                if device not in (-1, tensor.get_device()):
                    raise _apart(plan, device, tensor.device)
                device = tensor.get_device()
                near[id(tensor)] = tensor, writes or (id(tensor) in near and near[id(tensor)][1])
            elif not plan.takes_host and tensor.dim():
                raise _apart(plan, max(device, 0), tensor.device)
    if device < 0:
        where = kwargs.get("device")
        device = native.current_device() if where is None or where.index is None else where.index
        if device >= NUM_DEVICES:
            raise RuntimeError("CUDA error: invalid device ordinal")
    queue = current_queue(device)
    queue.issue()
    stats["kernels"] += 1
    views: dict[int, Tensor] = {}
    starts = set()
    for key, (tensor, writes) in near.items():
        block = block_of(tensor)
        starts.add(block.host._cdata)
        views[key] = host_view(tensor)
        if tensor.numel():
            for write in (False, True) if writes else (False,):
                block.use(queue, *span(tensor), write, plan.name)

    def near_to_far(tensor: Tensor) -> Tensor:
        return views.get(id(tensor), tensor)

    host_args, host_kwargs = list(args), dict(kwargs)
    for at, name, _ in plan.tensors:
        if at < num_args:
            host_args[at] = mapped(args[at], near_to_far)
        elif name in kwargs:
            host_kwargs[name] = mapped(kwargs[name], near_to_far)
    for at in plan.numbers:
        if at < num_args and isinstance(value := host_args[at], (bool, int, float, complex)):
            given = [tensor for tensor, _ in near.values()]
            if given and all(not tensor.dim() for tensor in given):  # a tensor of no dimensions counts as much, a number does not
                host_args[at] = torch.tensor(value, dtype=functools.reduce(torch.promote_types, (torch.result_type(one, value) for one in given)))
            else:
                wide = isinstance(value, float) and any(tensor.is_floating_point() for tensor in given)
                host_args[at] = torch.tensor(value, dtype=torch.float64 if wide else None)
    if "device" in host_kwargs:
        host_kwargs["device"] = _CPU
        if "pin_memory" in host_kwargs:
            host_kwargs["pin_memory"] = False
    result = _run(op, plan, device, host_args, host_kwargs)
    if plan.is_empty and result.nbytes:
        ctypes.memset(result.untyped_storage().data_ptr(), 0xFF, result.untyped_storage().nbytes())
    for key, (tensor, writes) in near.items():
        if writes and views[key].shape != tensor.shape:  # out= of another size
            torch.ops.aten.set_.source_Tensor.redispatch(_CPU_KEYS, tensor, place_on(views[key].clone(), queue))
    if plan.waits:
        host_learns(queue.clock)
    back = {id(view): near[key][0] for key, view in views.items()}

    def finish(tensor: Tensor) -> Tensor:
        known = back.get(id(tensor))
        if known is not None:
            return known
        made = place_on(tensor.clone() if tensor.untyped_storage()._cdata in starts else tensor, queue)
        if made.numel():
            block = block_of(made)
            block.use(queue, 0, block.nbytes, True, plan.name)
        return made

    return mapped(result, finish)


def _run(op: Any, plan: _Plan, device: int, args: list[Any], kwargs: dict[str, Any]) -> Any:
    if plan.product and any(isinstance(value, Tensor) and value.dtype in _HALVES for value in args):
        return _product(op, args, kwargs)
    if not plan.random:
        return op(*args, **kwargs)
    if kwargs.get("generator") is not None:
        raise RuntimeError("the software GPU draws from the generators of its devices alone")
    mine, kept = generators[device], torch.get_rng_state()
    torch.set_rng_state(mine.get_state())
    try:
        return op(*args, **kwargs)
    finally:
        mine.set_state(torch.get_rng_state())
        torch.set_rng_state(kept)


def _product(op: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """A product of 16-bit matrices: summed in fp32 and rounded once, as by cuBLAS. CPUs do it in fp32 faster than in bf16, most of them."""
    if args and isinstance(args[-1], torch.dtype):  # mm(..., out_dtype=...)
        *args, dtype = args
    else:
        dtype = next(value.dtype for value in args if isinstance(value, Tensor))
    wide = [value.float() if isinstance(value, Tensor) else value for value in args]
    out = kwargs.pop("out", None)
    result = getattr(torch.ops.aten, op._schema.name.split("::")[1]).default(*wide, **kwargs).to(dtype)
    return result if out is None else out.copy_(result)


# ---- ops that are more than their arithmetic --------------------------------------------------------------------------------------
def copy_(self: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """aten::copy_ with a device tensor at one end or both."""
    with plainly(), LOCK, torch.no_grad():
        if self.is_cuda and source.is_cuda:
            _copy_on_devices(self, source)
        else:
            _copy_over_link(self, source, non_blocking)
    return self


def _copy_on_devices(self: Tensor, source: Tensor) -> None:
    near, far = current_queue(source.get_device()), current_queue(self.get_device())
    join(near.clock, far.clock)  # torch lets the source's stream wait for the target's, and the other way round afterwards
    near.issue()
    for tensor, write in ((source, False), (self, True)) if self.numel() else ():
        block_of(tensor).use(near, *span(tensor), write, "aten::copy_")
    host_view(self).copy_(host_view(source))
    join(far.clock, near.clock)


def _copy_over_link(self: Tensor, source: Tensor, non_blocking: bool) -> None:
    to_device = self.is_cuda
    near, far = (self, source) if to_device else (source, self)
    queue = current_queue(near.get_device())
    same = self.dtype == source.dtype and self.shape == source.shape and self.is_contiguous() and source.is_contiguous()
    if non_blocking and same and self.numel() and is_pinned(far.data_ptr(), far.nbytes):
        Copy(queue, self.data_ptr(), source.data_ptr(), self.nbytes, to_device, "a copy by torch", far)
        return
    queue.issue()
    if near.numel():
        block_of(near).use(queue, *span(near), to_device, "aten::copy_")
    stats["pageable_copies"] += 1
    start, stop = span(far) if far.numel() else (0, 0)
    base = far.untyped_storage().data_ptr()
    use_host(queue, base + start, base + stop, not to_device, "a copy by torch")
    view = host_view(near)
    self_view, source_view = (view, source) if to_device else (self, view)
    self_view.copy_(source_view)
    if not (to_device and non_blocking):  # a pageable target is there when the call returns
        host_learns(queue.clock)


def to_copy(self: Tensor, *, non_blocking: bool = False, **how: Any) -> Tensor:
    """aten::_to_copy of a device tensor. (To the host without blocking it would be into page-locked memory of torch's own; here it blocks.)"""
    where = how.get("device")
    with plainly():
        non_blocking = non_blocking and (where is None or where.type == "cuda")
        return torch.ops.aten._to_copy.default.redispatch(_CPU_KEYS, self, non_blocking=non_blocking, **how)  # type: ignore[no-any-return]


def record_stream(self: Tensor, stream: torch.Stream) -> None:
    """aten::record_stream."""
    with LOCK:
        block_of(self).recorded.add(find_queue(stream.device_index, stream.stream_id).serial)


def install() -> list[Any]:
    """Register everything here. Returns what must live as long as the process."""
    every = torch.library.Library("_", "IMPL")
    every.fallback(fallback, "CUDA")
    aten = torch.library.Library("aten", "IMPL")
    for name, function in (("copy_", copy_), ("_to_copy", to_copy), ("record_stream", record_stream)):
        aten.impl(name, function, "CUDA")
    for name in torch._C._dispatch_get_registrations_for_dispatch_key("CompositeExplicitAutogradNonFunctional"):
        if "_." not in name and not name.endswith("_"):  # torch would make room first and then call what writes there: two ops for one
            name, _, overload = name.removeprefix("aten::").partition(".")
            op = getattr(getattr(torch.ops.aten, name), overload or "default")
            aten.impl(op, functools.partial(fallback, op), "CUDA")
    aten.impl("_pin_memory", lambda self, device=None: self.clone(), "CPU")  # what torch itself page-locks is as other memory here
    aten.impl("_fused_sdp_choice", lambda *args, **kwargs: 0, "CUDA")  # the formula itself
    return [every, aten]
