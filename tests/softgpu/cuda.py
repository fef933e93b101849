"""``torch.cuda`` on the pretended devices: what its Python asks of C++, and its streams and events."""

from __future__ import annotations

import time
import types
from collections.abc import Sequence
from typing import Any

import torch

from tests.softgpu import native, ops
from tests.softgpu.memory import NBYTES, NUM_DEVICES, Account, accounts, collect
from tests.softgpu.streams import LOCK, Point, Queue, find_queue, make_queue, synchronize

_CUDA = 1


def index_of(device: Any, optional: bool = True) -> int:
    """The number of a device; None is the current one."""
    if device is None and optional:
        return native.current_device()
    if isinstance(device, str):
        device = torch.device(device)
    if isinstance(device, torch.device):
        if device.type != "cuda":
            raise ValueError(f"Expected a cuda device, but got: {device}")
        device = native.current_device() if device.index is None else device.index
    if device < 0 and optional:
        return native.current_device()
    if not 0 <= device < NUM_DEVICES:
        raise torch.AcceleratorError("CUDA error: invalid device ordinal\n") if hasattr(torch, "AcceleratorError") else RuntimeError("invalid device")
    return int(device)


class Event(torch.Event):
    """torch.cuda.Event."""

    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, external: bool = False) -> Event:
        made = super().__new__(cls, "cuda")
        made.point, made.at, made.timed = Point(), 0.0, enable_timing  # type: ignore[attr-defined]
        return made

    def record(self, stream: Any = None) -> None:
        self.point.record(queue_of(stream))  # type: ignore[attr-defined]
        self.at = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        self.point.block(queue_of(stream))  # type: ignore[attr-defined]

    def query(self) -> bool:
        return bool(self.point.done())  # type: ignore[attr-defined]

    def synchronize(self) -> None:
        self.point.wait()  # type: ignore[attr-defined]

    def elapsed_time(self, other: Event) -> float:  # type: ignore[override]
        if not self.timed or not other.timed:  # type: ignore[attr-defined]
            raise RuntimeError("Both events must be created with argument 'enable_timing=True'.")
        if not (self.query() and other.query()):
            raise RuntimeError("CUDA error: device not ready")
        return max(1e-3, 1e3 * (other.at - self.at))


class Stream(torch.Stream):
    """torch.cuda.Stream."""

    def __new__(
        cls,
        device: Any = None,
        priority: int = 0,
        *,
        stream_id: int | None = None,
        device_index: int | None = None,
        device_type: int | None = None,
        stream_ptr: int | None = None,
    ) -> Stream:
        handle = stream_id if stream_ptr is None else stream_ptr
        if handle is None:
            queue = make_queue(index_of(device))
        else:
            queue = find_queue(index_of(device if device_index is None else device_index), handle)
        return super().__new__(cls, stream_id=queue.handle, device_index=queue.device, device_type=_CUDA)

    @property
    def cuda_stream(self) -> int:
        return int(self.stream_id)

    _as_parameter_ = native_handle = cuda_stream
    priority = 0

    def wait_event(self, event: Any) -> None:
        event.wait(self)

    def wait_stream(self, other: Any) -> None:
        self.wait_event(Event_of(other))

    def record_event(self, event: Any = None) -> Any:  # type: ignore[override]
        event = Event() if event is None else event
        event.record(self)
        return event

    def query(self) -> bool:
        return bool(self.record_event().query())

    def synchronize(self) -> None:
        self.record_event().synchronize()

    def __enter__(self) -> Stream:
        self._context = StreamContext(self)
        self._context.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._context.__exit__(*error)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, torch.Stream) and (other.device, other.stream_id) == (self.device, self.stream_id)

    def __hash__(self) -> int:
        return hash((self.device_index, self.stream_id))


class ExternalStream(Stream):
    """torch.cuda.ExternalStream: one that cupy has made."""

    def __new__(cls, stream_ptr: int, device: Any = None, **_: Any) -> ExternalStream:
        return super().__new__(cls, device, stream_ptr=stream_ptr)  # type: ignore[return-value]


def Event_of(stream: Any) -> Event:
    event = Event()
    event.record(stream)
    return event


def queue_of(stream: Any) -> Queue:
    """What is behind a stream of torch; None is the current one."""
    if stream is None:
        device = native.current_device()
        return find_queue(device, native.current_stream_handle(device))
    return find_queue(stream.device_index, stream.stream_id)


class StreamContext:
    """torch.cuda.StreamContext: inside, a stream and its device are the current ones of the thread."""

    cur_stream: Any = None

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        if self.stream is None:
            return
        device = self.stream.device_index
        self.before = native.current_device(), device, native.current_stream_handle(device)
        native.set_device(device)
        native.set_stream(device, self.stream.stream_id)

    def __exit__(self, *error: object) -> None:
        if self.stream is not None:
            current, device, handle = self.before
            native.set_stream(device, handle)
            native.set_device(current)


def current_stream(device: Any = None) -> Stream:
    index = index_of(device)
    return Stream(stream_id=native.current_stream_handle(index), device_index=index)


def set_stream(stream: Any) -> None:
    if stream is not None:
        native.set_device(stream.device_index)
        native.set_stream(stream.device_index, stream.stream_id)


def set_device(device: Any) -> None:
    index = device if isinstance(device, int) and device < 0 else index_of(device)
    if index >= 0:
        native.set_device(index)


def exchange_device(device: int) -> int:
    before = native.current_device()
    if device >= 0:
        native.set_device(index_of(device))
    return before


def maybe_exchange_device(device: int) -> int:
    return exchange_device(device)  # a function of its own: torch.compile has a handler for each


def _account(device: Any = None) -> Account:
    with LOCK:
        collect()
        return accounts[index_of(device)]


def _memory_stats(device: Any = None) -> dict[str, Any]:
    account = _account(device)
    kinds, values = ("allocated_bytes", "reserved_bytes", "active_bytes", "requested_bytes"), {"current": account.taken, "peak": account.peak}
    return {"num_ooms": account.num_ooms, "num_alloc_retries": 0} | {f"{kind}.all.{name}": value for kind in kinds for name, value in values.items()}


def _reset_peak(device: Any = None) -> None:
    account = _account(device)
    account.peak = account.taken


def _set_fraction(fraction: float, device: Any = None) -> None:
    if not 0 <= fraction <= 1:
        raise ValueError(f"Invalid fraction value: {fraction}. Allowed range: 0~1")
    _account(device).fraction = fraction


def _mem_get_info(device: Any = None) -> tuple[int, int]:
    return NBYTES - _account(device).taken, NBYTES


def _properties(device: Any = None) -> Any:
    index = index_of(device)
    return types.SimpleNamespace(
        name=f"software GPU {index}",
        major=9,
        minor=0,
        total_memory=NBYTES,
        multi_processor_count=2,
        warp_size=32,
        max_threads_per_multi_processor=2048,
        is_integrated=False,
        uuid=f"softgpu-{index}",
        pci_domain_id=0,
        pci_bus_id=index + 1,
        pci_device_id=0,
        shared_memory_per_block=49152,
        shared_memory_per_block_optin=232448,
        L2_cache_size=50 << 20,
    )


def _manual_seed(seed: int) -> None:
    ops.generators[native.current_device()].manual_seed(int(seed))


def _manual_seed_all(seed: int) -> None:
    for generator in ops.generators:
        generator.manual_seed(int(seed))


def _get_rng_state(device: Any = "cuda") -> torch.Tensor:
    return ops.generators[index_of(device)].get_state()


def _set_rng_state(state: torch.Tensor, device: Any = "cuda") -> None:
    ops.generators[index_of(device)].set_state(state)


def _seed() -> None:
    ops.generators[native.current_device()].seed()


def _set_rng_state_all(states: Sequence[torch.Tensor]) -> None:
    for generator, state in zip(ops.generators, states, strict=True):
        generator.set_state(state)


def _sleep(cycles: int) -> None:
    with LOCK:
        queue_of(None).issue()


REPLACED: dict[str, Any] = {
    "is_available": lambda: True,
    "is_initialized": lambda: True,
    "_is_compiled": lambda: True,
    "_lazy_init": lambda: None,
    "init": lambda: None,
    "_lazy_call": lambda function, **_: function(),
    "_is_in_bad_fork": lambda: False,
    "device_count": lambda: NUM_DEVICES,
    "current_device": native.current_device,
    "set_device": set_device,
    "_exchange_device": exchange_device,
    "_maybe_exchange_device": maybe_exchange_device,
    "Stream": Stream,
    "ExternalStream": ExternalStream,
    "Event": Event,
    "StreamContext": StreamContext,
    "stream": StreamContext,
    "current_stream": current_stream,
    "set_stream": set_stream,
    "default_stream": lambda device=None: Stream(stream_id=0, device_index=index_of(device)),
    "get_stream_from_external": ExternalStream,
    "synchronize": lambda device=None: synchronize(index_of(device)),
    "_sleep": _sleep,
    "ipc_collect": lambda: None,
    "can_device_access_peer": lambda device, peer: False,
    "is_current_stream_capturing": lambda: False,
    "get_device_properties": _properties,
    "get_device_name": lambda device=None: _properties(device).name,
    "get_device_capability": lambda device=None: (9, 0),
    "get_arch_list": lambda: ["sm_90"],
    "is_bf16_supported": lambda including_emulation=True: True,
    "mem_get_info": _mem_get_info,
    "memory_allocated": lambda device=None: _account(device).taken,
    "memory_reserved": lambda device=None: _account(device).taken,
    "max_memory_allocated": lambda device=None: _account(device).peak,
    "max_memory_reserved": lambda device=None: _account(device).peak,
    "reset_peak_memory_stats": _reset_peak,
    "reset_accumulated_memory_stats": lambda device=None: None,
    "memory_stats": _memory_stats,
    "set_per_process_memory_fraction": _set_fraction,
    "empty_cache": lambda: None,
    "get_rng_state": _get_rng_state,
    "set_rng_state": _set_rng_state,
    "get_rng_state_all": lambda: [generator.get_state() for generator in ops.generators],
    "set_rng_state_all": _set_rng_state_all,
    "manual_seed": _manual_seed,
    "manual_seed_all": _manual_seed_all,
    "seed": _seed,
    "initial_seed": lambda: ops.generators[native.current_device()].initial_seed(),
}


def install() -> None:
    """Put them into torch.cuda, and into the modules of it that have names of their own."""
    for name, value in REPLACED.items():
        setattr(torch.cuda, name, value)
        for module in (torch.cuda.random, torch.cuda.memory, torch.cuda.streams, torch.cuda.graphs):
            if hasattr(module, name):
                setattr(module, name, value)
    torch._C._cuda_getCurrentRawStream = lambda device: native.current_stream_handle(device)  # type: ignore[attr-defined]
    torch.cuda.default_generators = tuple(ops.generators)  # type: ignore[assignment]
    torch.Generator = ops.Generator  # type: ignore[misc,assignment]
    torch.version.cuda = "13.0"
