"""Copies between device and host memory, on streams of their own, while both compute.

Three rules keep it right; the software GPU of the tests finds where one is broken:

1. Device memory is allocated, used and freed in the order of the compute stream.
2. A copy comes after what compute had been asked to do when the copy was asked for.
3. What is done with either end comes after the copy's event: compute follows it, the host waits.

Copies are raw: contiguous tensors of one size and dtype. The link keeps both ends alive meanwhile.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from zk.logs import rank_log

TO_DEVICE, TO_HOST = 1, 2  # cudaMemcpyKind
BEHIND_NBYTES = 1 << 30  # of device memory that may wait for copies to the host

Then = Callable[[Tensor], Any]


class Event:
    """A point in a stream, such as the end of a copy."""

    def __init__(self, event: Any, link: CudaLink) -> None:
        self.event, self.link = event, link  # cupy's
        self.near: Tensor | None = None  # the device end of a copy, until compute follows it

    @property
    def done(self) -> bool:
        return bool(self.event.done)

    def wait(self) -> None:
        """Return when it is over: the host may touch either end. The core is free meanwhile."""
        self.event.synchronize()
        self.link.drop_done()


class Arrival:
    """A value that is there once work in flight has ended."""

    def __init__(self, value: Any, event: Event | None = None) -> None:
        self.value, self.event = value, event

    def wait(self) -> Any:
        """The value, for what this thread asks its device to compute next."""
        if self.event is not None:
            stream = self.event.link.follow(self.event)
            parts = self.value if isinstance(self.value, tuple) else (self.value,)
            for part in parts:  # made on the stream of uploads, it is freed in compute's order
                if isinstance(part, Tensor):
                    part.record_stream(stream)
        return self.value


class CudaLink:
    """The link to a CUDA device, through cupy. Any thread may use it.

    ``torch.cuda.device`` makes the device current: cupy's own guard makes a context on device 0 for
    every thread. Raises ImportError, with the remedy, where cupy is not installed.
    """

    def __init__(self, device: torch.device) -> None:
        try:
            import cupy
        except ImportError as error:
            version = (torch.version.cuda or "13").split(".")[0]
            raise ImportError(
                f"copies between {device} and the host go through cupy, which is not installed; "
                f"pip install cupy-cuda{version}x"
            ) from error
        self.device, self.runtime, self.new_event = device, cupy.cuda.runtime, cupy.cuda.Event
        torch.cuda.current_stream(device)  # torch's context first
        with torch.cuda.device(device):
            self.down = cupy.cuda.Stream(non_blocking=True)
            self.up = cupy.cuda.Stream(non_blocking=True)
        # which self.up must outlive
        self.up_torch = torch.cuda.ExternalStream(self.up.ptr, device=device)
        self.lock = threading.Lock()
        # copies with their host ends, by kind; offloads whose device ends compute has not followed
        self.in_flight = {TO_DEVICE: deque[InFlight](), TO_HOST: deque[InFlight]()}
        self.behind, self.behind_nbytes = deque[tuple[Event, int]](), 0
        self.pinned, self.refuses = set[int](), False

    def offload(self, host: Tensor, source: Tensor) -> Event:
        """Start to copy ``source`` (device) to ``host``, after what compute was asked to do."""
        event = self.copy(self.down.ptr, TO_HOST, host, source, [self.mark()])
        self.behind.append((event, source.nbytes))
        self.behind_nbytes += source.nbytes
        while self.behind_nbytes > BEHIND_NBYTES and len(self.behind) > 1:
            oldest, nbytes = self.behind.popleft()
            self.behind_nbytes -= nbytes
            self.follow(oldest)  # its memory is compute's again, however far the host is ahead
        return event

    def upload(self, target: Tensor, host: Tensor, after: Iterable[Event] = ()) -> Event:
        """Start to copy ``host`` to ``target`` (device), after that, ``after``, earlier uploads."""
        return self.copy(self.up.ptr, TO_DEVICE, target, host, [self.mark(), *after])

    def beside(self, values: Tensor, then: Then) -> Arrival:
        """Start ``then(values)`` on the device after earlier uploads; compute does not wait."""
        self.order(self.up.ptr, self.mark())
        with torch.cuda.stream(self.up_torch):
            value = then(values)
            event = self.record(self.up.ptr)
        event.near = values
        return Arrival(value, event)

    def follow(self, event: Event) -> torch.cuda.Stream:
        """Make compute, the current stream of this thread, wait for ``event``."""
        stream = torch.cuda.current_stream(self.device)
        self.order(stream.cuda_stream, event)
        near, event.near = event.near, None
        if near is not None:
            near.record_stream(stream)  # it may be another stream's
        return stream

    # ---- streams and events ----------------------------------------------------------------------

    def mark(self) -> Event:
        """What compute, the current stream of this thread, has been asked to do."""
        self.drop_done()
        return self.record(torch.cuda.current_stream(self.device).cuda_stream)

    def record(self, stream: int) -> Event:
        with torch.cuda.device(self.device):
            event = self.new_event(block=True, disable_timing=True)
            self.runtime.eventRecord(event.ptr, stream)
        return Event(event, self)

    def order(self, stream: int, event: Event) -> None:
        """Make a stream wait for ``event``."""
        with torch.cuda.device(self.device):
            self.runtime.streamWaitEvent(stream, event.event.ptr)

    def copy(
        self, stream: int, kind: int, target: Tensor, source: Tensor, after: Iterable[Event]
    ) -> Event:
        assert target.is_contiguous() and source.is_contiguous(), "a copy takes contiguous tensors"
        assert (target.shape, target.dtype) == (source.shape, source.dtype), "ends are not alike"
        with self.lock:
            for event in after:
                self.order(stream, event)
            with torch.cuda.device(self.device):
                self.runtime.memcpyAsync(
                    target.data_ptr(), source.data_ptr(), source.nbytes, kind, stream
                )
            copied = self.record(stream)
            copied.near, host = (target, source) if kind == TO_DEVICE else (source, target)
            self.in_flight[kind].append((copied, host))
        return copied

    def drop_done(self) -> None:
        """Let go of both ends of copies that are over.

        It never waits for the lock, as a finalizer may call it within ``copy``; the next call does.
        """
        if self.lock.acquire(blocking=False):
            try:
                for in_flight in self.in_flight.values():
                    while in_flight and in_flight[0][0].done:
                        in_flight.popleft()[0].near = None
            finally:
                self.lock.release()

    # ---- page-locked memory ----------------------------------------------------------------------

    def pin(self, memory: Tensor) -> None:
        """Lock host memory, so that copies of it run beside the host.

        One warning where the system refuses: copies are slower then, and the same otherwise.
        """
        if self.refuses:
            return
        try:
            with torch.cuda.device(self.device):  # 1: for all devices
                self.runtime.hostRegister(memory.data_ptr(), memory.nbytes, 1)
            self.pinned.add(memory.data_ptr())
        except self.runtime.CUDARuntimeError as error:
            self.refuses = True
            rank_log.warning(
                "the system does not page-lock %d more bytes of host memory (%s), so copies are "
                "slower and hold up the host; free host memory, raise the limit of the container or "
                "of WSL, or run 'ulimit -l unlimited' before",
                memory.nbytes,
                error,
            )

    def unpin(self, memory: Tensor) -> None:
        """Undo ``pin``, after the copies in flight."""
        if memory.data_ptr() in self.pinned:
            self.down.synchronize()
            self.up.synchronize()
            with torch.cuda.device(self.device):
                self.runtime.hostUnregister(memory.data_ptr())
            self.pinned.discard(memory.data_ptr())


InFlight = tuple[Event, Tensor]
# one for each device, so that all who use it share its streams; tests put twins here
LINKS: dict[torch.device, CudaLink] = {}
_making = threading.Lock()


def link_to(device: torch.device) -> CudaLink | None:
    """The link to ``device``; None where its memory is the host's, and nothing is copied."""
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    with _making:
        if device not in LINKS and device.type == "cuda":
            LINKS[device] = CudaLink(device)
        return LINKS.get(device)
