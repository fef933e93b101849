"""``torch.cuda`` on the pretended devices: what its Python asks of C++, and its streams and events."""

from __future__ import annotations

import types
from typing import Any

import torch

from tests.softgpu import native, ops
from tests.softgpu.memory import NBYTES, NUM_DEVICES, Account, accounts, collect, current_queue
from tests.softgpu.streams import LOCK, Point, Queue, find_queue, make_queue, synchronize

_CUDA = 1


def index_of(device: Any) -> int:
    """The number of a device; None is the current one."""
    if isinstance(device, (str, torch.device)):
        device = torch.device(device).index
    if device is None or device < 0:
        return native.current_device()
    if device >= NUM_DEVICES:
        raise torch.AcceleratorError("CUDA error: invalid device ordinal\n")
    return int(device)


class Event(torch.Event):
    """torch.cuda.Event."""

    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> Event:
        made = super().__new__(cls, "cuda")
        made.point = Point()  # type: ignore[attr-defined]
        return made

    def record(self, stream: Any = None) -> None:
        self.point.record(queue_of(stream))  # type: ignore[attr-defined]

    def wait(self, stream: Any = None) -> None:
        self.point.block(queue_of(stream))  # type: ignore[attr-defined]

    def query(self) -> bool:
        return bool(self.point.done())  # type: ignore[attr-defined]

    def synchronize(self) -> None:
        self.point.wait()  # type: ignore[attr-defined]


class Stream(torch.Stream):
    """torch.cuda.Stream."""

    def __new__(
        cls, device: Any = None, priority: int = 0, *, stream_id: int | None = None, device_index: int | None = None, device_type: int = _CUDA
    ) -> Stream:
        index = index_of(device if device_index is None else device_index)
        queue = make_queue(index) if stream_id is None else find_queue(index, stream_id)
        return super().__new__(cls, stream_id=queue.handle, device_index=queue.device, device_type=_CUDA)

    @property
    def cuda_stream(self) -> int:
        return int(self.stream_id)

    def wait_event(self, event: Any) -> None:
        event.wait(self)

    def record_event(self, event: Any = None) -> Any:  # type: ignore[override]
        event = Event() if event is None else event
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.record_event().synchronize()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, torch.Stream) and (other.device, other.stream_id) == (self.device, self.stream_id)

    def __hash__(self) -> int:
        return hash((self.device_index, self.stream_id))


def queue_of(stream: Any) -> Queue:
    """What is behind a stream of torch; None is the current one."""
    return current_queue(native.current_device()) if stream is None else find_queue(stream.device_index, stream.stream_id)


class StreamContext:
    """torch.cuda.StreamContext: inside, a stream and its device are the current ones of the thread."""

    cur_stream: Any = None

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        device = self.stream.device_index
        self.before = native.current_device(), device, native.current_stream_handle(device)
        native.set_device(device)
        native.set_stream(device, self.stream.stream_id)

    def __exit__(self, *error: object) -> None:
        current, device, handle = self.before
        native.set_stream(device, handle)
        native.set_device(current)


def current_stream(device: Any = None) -> Stream:
    index = index_of(device)
    return Stream(stream_id=native.current_stream_handle(index), device_index=index)


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


def _properties(device: Any = None) -> Any:
    index = index_of(device)
    size = {"total_memory": NBYTES, "multi_processor_count": 2}
    return types.SimpleNamespace(name=f"software GPU {index}", major=9, minor=0, uuid=f"softgpu-{index}", **size)


def _reset_peak(device: Any = None) -> None:
    account = _account(device)
    account.peak = account.taken


def _of(device: Any) -> torch.Generator:
    return ops.generators[index_of(device)]


REPLACED: dict[str, Any] = {
    **dict.fromkeys(("is_available", "is_initialized", "_is_compiled", "is_bf16_supported"), lambda including_emulation=True: True),
    **dict.fromkeys(("_is_in_bad_fork", "is_current_stream_capturing"), lambda: False),
    **dict.fromkeys(("_lazy_init", "init", "ipc_collect", "empty_cache"), lambda: None),
    **dict.fromkeys(("memory_allocated", "memory_reserved"), lambda device=None: _account(device).taken),
    **dict.fromkeys(("max_memory_allocated", "max_memory_reserved"), lambda device=None: _account(device).peak),
    **dict.fromkeys(("StreamContext", "stream"), StreamContext),
    "_lazy_call": lambda function, **_: function(),
    "device_count": lambda: NUM_DEVICES,
    "current_device": native.current_device,
    "set_device": lambda device: native.set_device(index_of(device)),
    "_exchange_device": exchange_device,
    "_maybe_exchange_device": maybe_exchange_device,
    "Stream": Stream,
    "Event": Event,
    "current_stream": current_stream,
    "default_stream": lambda device=None: Stream(stream_id=0, device_index=index_of(device)),
    "synchronize": lambda device=None: synchronize(index_of(device)),
    "get_device_properties": _properties,
    "get_device_name": lambda device=None: _properties(device).name,
    "get_device_capability": lambda device=None: (9, 0),
    "mem_get_info": lambda device=None: (NBYTES - _account(device).taken, NBYTES),
    "reset_peak_memory_stats": _reset_peak,
    "get_rng_state": lambda device="cuda": _of(device).get_state(),
    "set_rng_state": lambda state, device="cuda": _of(device).set_state(state),
    "get_rng_state_all": lambda: [generator.get_state() for generator in ops.generators],
    "set_rng_state_all": lambda states: [generator.set_state(state) for generator, state in zip(ops.generators, states, strict=True)],
    "manual_seed": lambda seed: _of("cuda").manual_seed(int(seed)),
    "manual_seed_all": lambda seed: [generator.manual_seed(int(seed)) for generator in ops.generators],
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
    torch.version.cuda = "13.0"
