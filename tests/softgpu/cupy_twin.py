"""The part of cupy that makes streams and events, copies, and locks pages; ``install()`` makes it importable as ``cupy``."""

from __future__ import annotations

import importlib.machinery
import sys
import threading
import types
from typing import Any

from tests.softgpu import native
from tests.softgpu.copies import TO_DEVICE, TO_HOST, Copy
from tests.softgpu.cuda import index_of
from tests.softgpu.memory import CudaError, register, unregister
from tests.softgpu.streams import LOCK, Point, Queue, find_queue, make_queue, queue_of_handle, race, synchronize


class Device:
    """cupy.cuda.Device: inside, the calling thread's current one."""

    def __init__(self, device: int | None = None) -> None:
        self.id = native.current_device() if device is None else device
        self.before = threading.local()

    def __enter__(self) -> Device:
        self.before.stack = [*getattr(self.before, "stack", ()), native.current_device()]
        self.use()
        return self

    def __exit__(self, *error: object) -> None:
        native.set_device(self.before.stack.pop())

    def use(self) -> None:
        native.set_device(index_of(self.id))

    def synchronize(self) -> None:
        synchronize(self.id)


def _queue(handle: int) -> Queue:
    """The stream of a handle; 0 is the default stream of the current device."""
    queue = find_queue(native.current_device(), 0) if handle == 0 else queue_of_handle(handle)
    if queue is None:
        raise CudaError(400, f"cudaErrorInvalidResourceHandle: no stream {handle:#x}")
    return queue


class Stream:
    """cupy.cuda.Stream, on the current device."""

    def __init__(self, null: bool = False, non_blocking: bool = False, ptds: bool = False, priority: int | None = None) -> None:
        assert non_blocking and not null, "streams that wait for the default stream are not made here"
        self.ptr = make_queue(native.current_device()).handle

    def synchronize(self) -> None:
        point = Point()
        point.record(_queue(self.ptr))
        point.wait()


class Event:
    """cupy.cuda.Event, of the current device."""

    def __init__(self, block: bool = False, disable_timing: bool = False, interprocess: bool = False) -> None:
        self.point, self.device = Point(), native.current_device()
        self.ptr = id(self.point)
        _events[self.ptr] = self.point, self.device

    def __del__(self) -> None:
        _events.pop(self.ptr, None)

    @property
    def done(self) -> bool:
        return self.point.done()

    def record(self, stream: Any = None) -> None:
        _event_record(self.ptr, 0 if stream is None else stream.ptr)

    def synchronize(self) -> None:
        self.point.wait()


_events: dict[int, tuple[Point, int]] = {}


def _event(pointer: int) -> tuple[Point, int]:
    if pointer not in _events:
        race("an event is used that was destroyed")
        raise CudaError(400, "cudaErrorInvalidResourceHandle: no such event")
    return _events[pointer]


def _event_record(pointer: int, stream: int) -> None:
    point, device = _event(pointer)
    queue = _queue(stream)
    if queue.device != device:
        race(f"an event of cuda:{device} is recorded on a stream of cuda:{queue.device}")
        raise CudaError(400, "cudaErrorInvalidResourceHandle: event and stream are of different devices")
    point.record(queue)


def _stream_wait_event(stream: int, pointer: int, flags: int = 0) -> None:
    _event(pointer)[0].block(_queue(stream))


def _memcpy_async(dst: int, src: int, size: int, kind: int, stream: int) -> None:
    if kind not in (TO_DEVICE, TO_HOST):
        raise CudaError(21, "cudaErrorInvalidMemcpyDirection")
    with LOCK:
        if size:
            Copy(_queue(stream), dst, src, size, kind == TO_DEVICE, "an upload" if kind == TO_DEVICE else "an offload")


def install() -> None:
    """Make ``import cupy`` find this."""
    cupy, cuda, runtime = types.ModuleType("cupy"), types.ModuleType("cupy.cuda"), types.ModuleType("cupy.cuda.runtime")
    runtime.__dict__.update(
        CUDARuntimeError=CudaError,
        memcpyAsync=_memcpy_async,
        hostRegister=lambda ptr, size, flags: register(ptr, size, "cudaHostRegister"),
        hostUnregister=unregister,
        eventRecord=_event_record,
        streamWaitEvent=_stream_wait_event,
        runtimeGetVersion=lambda: 13000,
        driverGetVersion=lambda: 13000,
        getDevice=native.current_device,
        setDevice=lambda index: native.set_device(index_of(index)),
        getDeviceCount=lambda: 2,
    )
    cuda.__dict__.update(Device=Device, Stream=Stream, Event=Event, runtime=runtime, is_available=lambda: True)
    cupy.__dict__.update(cuda=cuda, __version__="14.2.0", __path__=[])
    for module in (cupy, cuda, runtime):
        module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None)
        sys.modules[module.__name__] = module


