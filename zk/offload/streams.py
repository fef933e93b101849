"""Copies between device and host memory, each after the events that it names, while compute goes on.

A ``Link`` joins the memory of one device with the host's. It has a stream for each direction, beside the one that torch computes on.
Three rules keep it right, and the software GPU of the tests finds where one is broken:

1. Device memory is allocated, used and freed in the order of the compute stream.
2. A copy comes after ``mark()``: what compute had been asked to do when the copy was asked for.
3. What is done with either end of a copy comes after its event: compute ``follow``s it, the host ``wait``s for it.

Copies are raw: contiguous tensors of one size and dtype. The link keeps the memory of both ends alive until the copy is done, and that of the
device end no longer than until compute follows the copy: the host may be many layers ahead of the device. On a machine without an accelerator
the device's memory is the host's: its link is a plain ``Link``, and nothing is ever copied.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from zk.core.events import COMPLETED, Awaited, Event


class Link:
    """Between the memory of one device and the host's; this one where both are the same. All methods may be called from any thread."""

    joined = True  # both are the same memory

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def mark(self) -> Event:
        """Record an event on compute, the calling thread's current stream."""
        return COMPLETED

    def follow(self, event: Awaited) -> None:
        """Make compute wait for ``event``."""
        event.wait()

    def offload(self, host: Tensor, source: Tensor, after: Sequence[Event]) -> Event:
        """Copy ``source`` (device) to ``host``, after ``after`` and earlier offloads."""
        raise AssertionError("device and host memory are the same here: there is nothing to offload")

    def upload(self, target: Tensor, host: Tensor, after: Sequence[Event]) -> Event:
        """Copy ``host`` to ``target`` (device), after ``after`` and earlier uploads."""
        raise AssertionError("device and host memory are the same here: there is nothing to upload")

    def beside(self, after: Sequence[Event]) -> AbstractContextManager[Callable[[], Event]]:
        """Start device work, such as a collective, after ``after`` and earlier uploads, and not after compute.

        What it yields returns, while inside, the event of what has been started.
        """
        for event in after:
            event.wait()
        return contextlib.nullcontext(lambda: COMPLETED)

    def pin(self, memory: Tensor) -> None:
        """Register host memory, so that copies of it run beside the host. OSError, with the reason, if the system refuses."""

    def unpin(self, memory: Tensor) -> None:
        """Undo ``pin``, after the copies in flight. OSError, with the reason, if the device refuses."""

    def twin(self) -> Link:
        """Other streams between the same memories, one pair for each link: copies there do not queue behind those of this link."""
        raise AssertionError("device and host memory are the same here: there is nothing to copy")


def check_copy(target: Tensor, source: Tensor) -> None:
    """Both ends of a copy are contiguous, and alike."""
    assert target.is_contiguous() and source.is_contiguous(), "a copy takes contiguous tensors"
    assert target.shape == source.shape and target.dtype == source.dtype, f"{target.dtype} {target.shape} from {source.dtype} {source.shape}"


class CudaEvent:
    """A cupy event. Waiting sleeps, so that the core is free for the CPU update, and lets go of copies that are over."""

    def __init__(self, event: Any, link: CudaLink) -> None:
        self.event, self.link = event, link
        self.near: Tensor | None = None  # the device end of a copy, until compute follows it

    @property
    def done(self) -> bool:
        return bool(self.event.done)

    def wait(self) -> None:
        self.event.synchronize()
        self.link.drop_done()


_TO_DEVICE, _TO_HOST = 1, 2  # cudaMemcpyKind


class CudaLink(Link):
    """A CUDA device: streams, events, copies and page locking through cupy.

    ``torch.cuda.device`` makes the device current, one for each use. cupy's own guard sets the device that was current before, and CUDA 12
    makes a context there for every thread that starts with device 0.

    Raises ImportError, with the remedy, where cupy is not installed.
    """

    joined = False

    def __init__(self, device: torch.device) -> None:
        try:
            import cupy
        except ImportError as error:
            version = (torch.version.cuda or "13").split(".")[0]
            raise ImportError(
                f"copies between {device} and the host go through cupy, which is not installed; pip install cupy-cuda{version}x"
            ) from error
        super().__init__(device)
        self.cupy = cupy
        torch.cuda.current_stream(self.device)  # torch's context first
        with torch.cuda.device(self.device):
            self.down, self.up = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)
        self.up_torch = torch.cuda.ExternalStream(self.up.ptr, device=self.device)  # self.up must live as long
        self.lock = threading.Lock()
        self.other: CudaLink | None = None  # its twin, once there is one
        self.in_flight: dict[int, deque[tuple[CudaEvent, Tensor]]] = {_TO_DEVICE: deque(), _TO_HOST: deque()}  # with the host's end

    def _compute(self) -> int:
        return int(torch.cuda.current_stream(self.device).cuda_stream)

    def _record(self, stream: int) -> CudaEvent:
        with torch.cuda.device(self.device):
            event = self.cupy.cuda.Event(block=True, disable_timing=True)
            self.cupy.cuda.runtime.eventRecord(event.ptr, stream)
        return CudaEvent(event, self)

    def mark(self) -> Event:
        self.drop_done()
        return self._record(self._compute())

    def follow(self, event: Awaited) -> None:
        """Make the current stream wait for ``event``. The memory of a copy's device end may then be freed in the order of this stream."""
        self.drop_done()
        self._wait(self._compute(), event)
        if isinstance(event, CudaEvent):
            near, event.near = event.near, None
            if near is not None:
                near.record_stream(torch.cuda.current_stream(self.device))  # it may be another stream's

    def _wait(self, stream: int, event: Awaited) -> None:
        if isinstance(event, CudaEvent):
            with torch.cuda.device(self.device):
                self.cupy.cuda.runtime.streamWaitEvent(stream, event.event.ptr)
        else:
            event.wait()

    def _copy(self, stream: int, kind: int, target: Tensor, source: Tensor, after: Sequence[Event]) -> Event:
        check_copy(target, source)
        self.drop_done()
        with self.lock:
            for event in after:
                self._wait(stream, event)
            with torch.cuda.device(self.device):
                self.cupy.cuda.runtime.memcpyAsync(target.data_ptr(), source.data_ptr(), source.nbytes, kind, stream)
            copied = self._record(stream)
            copied.near, host = (target, source) if kind == _TO_DEVICE else (source, target)
            self.in_flight[kind].append((copied, host))
        return copied

    def drop_done(self) -> None:
        """Let go of both ends of copies that are over: a piece keeps all of its buffer.

        Never waits for the lock, as Python may drop what calls this (a saved activation) at any point of ``_copy``; the next call will do.
        """
        if self.lock.acquire(blocking=False):
            try:
                for in_flight in self.in_flight.values():
                    while in_flight and in_flight[0][0].done:
                        in_flight.popleft()[0].near = None
            finally:
                self.lock.release()

    def offload(self, host: Tensor, source: Tensor, after: Sequence[Event]) -> Event:
        return self._copy(self.down.ptr, _TO_HOST, host, source, after)

    def upload(self, target: Tensor, host: Tensor, after: Sequence[Event]) -> Event:
        return self._copy(self.up.ptr, _TO_DEVICE, target, host, after)

    @contextlib.contextmanager
    def beside(self, after: Sequence[Event]) -> Iterator[Callable[[], Event]]:
        with self.lock:
            for event in after:
                self._wait(self.up.ptr, event)
        with torch.cuda.stream(self.up_torch):
            yield lambda: self._record(self.up.ptr)

    @contextlib.contextmanager
    def _refusals(self) -> Iterator[None]:
        """The device is current inside; what CUDA refuses there is an OSError."""
        try:
            with torch.cuda.device(self.device):
                yield
        except self.cupy.cuda.runtime.CUDARuntimeError as error:
            raise OSError(str(error)) from error

    def pin(self, memory: Tensor) -> None:
        with self._refusals():
            self.cupy.cuda.runtime.hostRegister(memory.data_ptr(), memory.nbytes, 1)  # portable: for all devices

    def unpin(self, memory: Tensor) -> None:
        with self._refusals():
            for link in (self, self.other):  # an optimizer that is dropped has waited for nothing
                for stream in () if link is None else (link.down, link.up):
                    stream.synchronize()
            self.cupy.cuda.runtime.hostUnregister(memory.data_ptr())

    def twin(self) -> Link:
        with self.lock:
            self.other = self.other or CudaLink(self.device)
        return self.other


# links are made once for each device, so that all who use one share its streams; tests put twins here
LINKS: dict[torch.device, Link] = {}
_making = threading.Lock()


def link_to(device: torch.device) -> Link:
    """The link to ``device``."""
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    with _making:
        if device not in LINKS:
            LINKS[device] = CudaLink(device) if device.type == "cuda" else Link(device)
        return LINKS[device]
