"""Every op on device tensors: one function, the fallback of torch's dispatch key CUDA.

Views run as they do for CPU tensors. Everything else runs on host tensors over the same memory, on the current stream of the device that its
tensors are on; what it reads and writes is compared with what other streams do there.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from tests.softgpu import native
from tests.softgpu.copies import Copy, use_host
from tests.softgpu.memory import NUM_DEVICES, Block, block_of, current_queue, host_view, is_pinned, pinned_like, place_on, plainly, span
from tests.softgpu.streams import LOCK, find_queue, host_learns, join, stats

_CPU_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_HOST_TOO = frozenset(f"aten::{name}" for name in ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"))
_BARE = frozenset(("aten::set_", "aten::is_set_to"))  # no values are touched
_WAITS = frozenset(
    f"aten::{name}" for name in ("_local_scalar_dense", "nonzero", "equal", "masked_select", "_unique2", "unique_consecutive", "unique_dim")
)
_EMPTY = frozenset(f"aten::{name}" for name in ("empty", "empty_strided", "new_empty", "empty_like"))
_PRODUCTS = frozenset(f"aten::{name}" for name in ("mm", "bmm", "addmm", "baddbmm", "addmv", "mv", "dot", "_addmm_activation"))
_HALVES = (torch.bfloat16, torch.float16)


class _Plan:
    """What there is to know of one op."""

    def __init__(self, op: Any) -> None:
        schema = op._schema
        self.name: str = schema.name
        self.writes = tuple(bool(argument.alias_info is not None and argument.alias_info.is_write) for argument in schema.arguments)
        self.names = tuple(argument.name for argument in schema.arguments)
        self.tensor_like = tuple("Tensor" in str(argument.type) for argument in schema.arguments)
        self.plain_tensor = tuple(str(argument.type) == "Tensor" for argument in schema.arguments)
        self.is_view = self.name in _BARE or any(ret.alias_info is not None and not ret.alias_info.is_write for ret in schema.returns)
        self.generator = "generator" in self.names
        self.random = torch.Tag.nondeterministic_seeded in op.tags
        self.product = self.name in _PRODUCTS


_plans: dict[Any, _Plan] = {}


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [item for item in value if isinstance(item, Tensor)]
    return []


def _mapped(value: Any, change: Callable[[Tensor], Any]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, (list, tuple)):
        return type(value)([_mapped(item, change) for item in value])
    return value


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


def _device(plan: _Plan, near: list[Tensor], kwargs: dict[str, Any]) -> int:
    """The one device of an op."""
    if near:
        index = near[0].get_device()
        for tensor in near:
            if tensor.get_device() != index:
                raise RuntimeError(
                    f"Expected all tensors to be on the same device, but found at least two devices, cuda:{index} and {tensor.device}! ({plan.name})"
                )
        return index
    device = kwargs.get("device")
    index = device.index if device is not None and device.index is not None else native.current_device()
    if index >= NUM_DEVICES:
        raise RuntimeError("CUDA error: invalid device ordinal")
    return int(index)


def _compute(op: Any, plan: _Plan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    near: list[Tensor] = []
    written: list[Tensor] = []
    num_args = len(args)
    for index, name in enumerate(plan.names):
        if not plan.tensor_like[index]:
            continue
        for tensor in _tensors(args[index] if index < num_args else kwargs.get(name)):
            if tensor.is_cuda:
                near.append(tensor)
                if plan.writes[index]:
                    written.append(tensor)
            elif tensor.dim() and plan.name not in _HOST_TOO:
                raise RuntimeError(
                    "Expected all tensors to be on the same device, but found at least two devices, "
                    f"cuda and {tensor.device}! (argument {name} of {plan.name})"
                )
    device = _device(plan, near, kwargs)
    queue = current_queue(device)
    queue.issue()
    stats["kernels"] += 1
    views: dict[int, Tensor] = {}
    blocks: list[Block] = []
    for tensor in near:
        if id(tensor) in views:
            continue
        block = block_of(tensor)
        blocks.append(block)
        views[id(tensor)] = host_view(tensor, block)
        if tensor.numel():
            block.use(queue, *span(tensor), False, plan.name)
    for tensor in written:
        if tensor.numel():
            block_of(tensor).use(queue, *span(tensor), True, plan.name)

    def near_to_far(tensor: Tensor) -> Tensor:
        return views.get(id(tensor), tensor)

    host_args = [_mapped(value, near_to_far) if plan.tensor_like[i] else value for i, value in enumerate(args)]
    host_kwargs = {name: _mapped(value, near_to_far) for name, value in kwargs.items()}
    for i, value in enumerate(host_args):  # numbers where the schema has tensors arrive as numbers
        if plan.plain_tensor[i] and isinstance(value, (bool, int, float, complex)):
            if near and all(not tensor.dim() for tensor in near):  # a tensor of no dimensions counts as much, a number does not
                host_args[i] = torch.tensor(value, dtype=functools.reduce(torch.promote_types, (torch.result_type(tensor, value) for tensor in near)))
                continue
            wide = isinstance(value, float) and any(tensor.is_floating_point() for tensor in near)
            host_args[i] = torch.tensor(value, dtype=torch.float64 if wide else None)
    if "device" in host_kwargs:
        host_kwargs["device"] = torch.device("cpu")
        if "pin_memory" in host_kwargs:
            host_kwargs["pin_memory"] = False
    result = _run(op, plan, device, host_args, host_kwargs)
    if plan.name in _EMPTY and result.nbytes:
        ctypes.memset(result.untyped_storage().data_ptr(), 0xFF, result.untyped_storage().nbytes())
    back: dict[int, Tensor] = {id(views[id(tensor)]): tensor for tensor in [*near, *written]}
    for tensor in written:  # out= of another size
        view = views[id(tensor)]
        if view.shape != tensor.shape:
            block_of(tensor).views.clear()
            torch.ops.aten.set_.source_Tensor.redispatch(_CPU_KEYS, tensor, place_on(view.clone(), queue))
    if plan.name in _WAITS:
        host_learns(queue.clock)
    starts = {block.host._cdata for block in blocks}

    def finish(tensor: Tensor) -> Tensor:
        known = back.get(id(tensor))
        if known is not None:
            return known
        made = place_on(tensor.clone() if tensor.untyped_storage()._cdata in starts else tensor, queue)
        if made.numel():
            block = block_of(made)
            block.use(queue, 0, block.nbytes, True, plan.name)
        return made

    return _mapped(result, finish)


def _run(op: Any, plan: _Plan, device: int, args: list[Any], kwargs: dict[str, Any]) -> Any:
    if plan.product and any(isinstance(value, Tensor) and value.dtype in _HALVES for value in args):
        return _product(op, args, kwargs)
    if not plan.random:
        return op(*args, **kwargs)
    generator = generators[device]
    if plan.generator:
        index = plan.names.index("generator")
        given = args[index] if index < len(args) else kwargs.get("generator")
        if given is not None and native.generator_address(given) not in _devices_of_generators:
            raise RuntimeError(f"Expected a 'cuda' device type for generator but found '{given.device.type}'")
        if index < len(args):
            args[index] = given or generator
        else:
            kwargs["generator"] = given or generator
        return op(*args, **kwargs)
    with drawing_from(generator):
        return op(*args, **kwargs)


def _product(op: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """A product of 16-bit matrices: summed in fp32 and rounded once, as by cuBLAS. CPUs do it in fp32 faster than in bf16, most of them."""
    if args and isinstance(args[-1], torch.dtype):  # mm(..., out_dtype=...)
        *args, dtype = args
    else:
        dtype = next(value.dtype for value in args if isinstance(value, Tensor))
    out = kwargs.pop("out", None)
    wide = [value.float() if isinstance(value, Tensor) else value for value in args]
    plain = getattr(torch.ops.aten, op._schema.name.split("::")[1]).default
    result = plain(*wide, **kwargs).to(dtype)
    if out is None:
        return result
    if out.shape != result.shape:
        out.resize_(result.shape)
    return out.copy_(result)


# ---- random numbers ---------------------------------------------------------------------------------------------------------------


class Generator(torch._C.Generator):
    """torch.Generator that may be a device's: a CPU's generator under another name."""

    _index: int | None = None

    def __new__(cls, device: Any = "cpu") -> Generator:
        where = torch.device(device)
        made = super().__new__(cls) if where.type == "cuda" else super().__new__(cls, where)
        if where.type == "cuda":
            made._index = native.current_device() if where.index is None else where.index
            address = native.generator_address(made)
            _devices_of_generators[address] = made._index
            weakref.finalize(made, _devices_of_generators.pop, address, None)
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cpu") if self._index is None else torch.device("cuda", self._index)


_devices_of_generators: dict[int, int] = {}  # address in C++ -> device
generators: list[Generator] = []  # of each device, made by install()


@contextlib.contextmanager
def drawing_from(generator: torch.Generator) -> Iterator[None]:
    """Context: ops that take no generator draw from this one."""
    kept = torch.default_generator.get_state()
    torch.default_generator.set_state(generator.get_state())
    try:
        yield
    finally:
        generator.set_state(torch.default_generator.get_state())
        torch.default_generator.set_state(kept)


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
    if source.numel():
        block_of(source).use(near, *span(source), False, "aten::copy_")
    if self.numel():
        block_of(self).use(near, *span(self), True, "aten::copy_")
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
    block = block_of(near)
    if near.numel():
        block.use(queue, *span(near), to_device, "aten::copy_")
    stats["pageable_copies"] += 1
    start, stop = span(far) if far.numel() else (0, 0)
    base = far.untyped_storage().data_ptr()
    use_host(queue, base + start, base + stop, not to_device, "a copy by torch")
    view = host_view(near, block)
    self_view, source_view = (view, source) if to_device else (self, view)
    self_view.copy_(source_view)
    if not (to_device and non_blocking):  # a pageable target is there when the call returns
        host_learns(queue.clock)


def to_copy(
    self: Tensor,
    *,
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    non_blocking: bool = False,
    memory_format: torch.memory_format | None = None,
) -> Tensor:
    """aten::_to_copy of a device tensor. What goes to the host without blocking lies in page-locked memory there."""
    with plainly(), torch.no_grad():
        where = device or self.device
        dtype = dtype or self.dtype
        pinned = non_blocking and self.is_cuda and where.type == "cpu" and dtype == self.dtype
        if memory_format in (None, torch.preserve_format):
            like = torch.empty_like(self, dtype=dtype, device="meta")
            made = torch.empty_strided(like.shape, like.stride(), dtype=dtype, device=where) if not pinned else None
        else:
            made = torch.empty(self.shape, dtype=dtype, device=where, memory_format=memory_format) if not pinned else None
        if made is None:
            made = pinned_like(self)
        return torch.ops.aten.copy_.default(made, self, non_blocking)  # type: ignore[no-any-return]


def pin_memory(self: Tensor, device: Any = None) -> Tensor:
    """aten::_pin_memory of a host tensor."""
    return pinned_like(self).copy_(self)


def resize_(self: Tensor, size: Any, *, memory_format: Any = None) -> Tensor:
    """aten::resize_ of a device tensor."""
    with plainly(), LOCK:
        wanted = torch.empty(size, dtype=self.dtype, device="cpu")
        block = block_of(self)
        if self.storage_offset() * self.itemsize + wanted.nbytes <= block.nbytes:
            return torch.ops.aten.resize_.default.redispatch(_CPU_KEYS, self, size)  # type: ignore[no-any-return]
        ctypes.memset(wanted.data_ptr(), 0xFF, wanted.nbytes)
        if self.numel():
            wanted.flatten()[: self.numel()] = host_view(self).flatten()
        torch.ops.aten.set_.source_Tensor.redispatch(_CPU_KEYS, self, place_on(wanted, current_queue(self.get_device())))
        return self


def record_stream(self: Tensor, stream: torch.Stream) -> None:
    """aten::record_stream."""
    with LOCK:
        block_of(self).recorded.add(find_queue(stream.device_index, stream.stream_id).serial)


def install() -> list[Any]:
    """Register everything here. Returns what must live as long as the process."""
    every = torch.library.Library("_", "IMPL")
    every.fallback(fallback, "CUDA")
    aten = torch.library.Library("aten", "IMPL")
    for name, function in (("copy_", copy_), ("_to_copy", to_copy), ("resize_", resize_), ("record_stream", record_stream)):
        aten.impl(name, function, "CUDA")
    for name in torch._C._dispatch_get_registrations_for_dispatch_key("CompositeExplicitAutogradNonFunctional"):
        if "_." not in name and not name.endswith("_"):  # torch would make room first and then call what writes there: two ops for one
            name, _, overload = name.removeprefix("aten::").partition(".")
            op = getattr(getattr(torch.ops.aten, name), overload or "default")
            aten.impl(op, functools.partial(fallback, op), "CUDA")
    aten.impl("_pin_memory", pin_memory, "CPU")
    aten.impl("_fused_sdp_choice", lambda *args, **kwargs: 0, "CUDA")  # the formula itself
    generators.extend(Generator(torch.device("cuda", index)) for index in range(NUM_DEVICES))
    for generator in generators:
        generator.manual_seed(0)
    return [every, aten]


