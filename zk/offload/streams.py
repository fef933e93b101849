"""In: copies between device and host memory. Out: the same copies, each after the events it names, while compute goes on.

A ``Link`` joins the memory of one device with the host's. It has a stream for each direction, beside the one that torch computes on.
Three rules keep it right, and the adversarial twin (twins.py) finds where one is broken, without a GPU:

1. Device memory is allocated, used and freed in the order of the compute stream.
2. A copy comes after ``mark()``: what compute had been asked to do when the copy was asked for.
3. What is done with either end of a copy comes after its event: compute ``follow``s it, the host ``wait``s for it.

Copies are raw: contiguous tensors of one size and dtype, whose memory the link keeps alive until they are done. On a machine without an
accelerator the device's memory is the host's: its link is ``Joined``, and nothing is ever copied.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor


class Awaited(Protocol):
    """Something that can be waited for."""

    def wait(self) -> None:
        """The calling thread waits for it."""


class Event(Awaited, Protocol):
    """A point in the work of a stream."""

    @property
    def done(self) -> bool:
        """Whether all work up to it has ended."""


class _Past:
    """Something that is over."""

    done = True

    def wait(self) -> None:
        return


PAST: Event = _Past()


class Link(Protocol):
    """Between the memory of one device and the host's. All methods may be called from any thread."""

    device: torch.device
    joined: bool  # both are the same memory

    def mark(self) -> Event:
        """What compute (the calling thread's current stream) has been asked to do so far."""

    def follow(self, event: Awaited) -> None:
        """What compute is asked to do from here on comes after ``event``."""

    def offload(self, host: Tensor, source: Tensor, after: Sequence[Event]) -> Event:
        """Copy ``source`` (device) to ``host``, after ``after`` and earlier offloads."""

    def upload(self, target: Tensor, host: Tensor, after: Sequence[Event]) -> Event:
        """Copy ``host`` to ``target`` (device), after ``after`` and earlier uploads."""

    def beside(self) -> AbstractContextManager[Callable[[], Event]]:
        """Device work started inside, such as a collective, comes after the uploads so far, and not after compute.

        What it yields returns, while inside, the event of what has been started.
        """

    def pin(self, memory: Tensor) -> None:
        """Register host memory, so that copies of it run beside the host. OSError, with the reason, if the system refuses."""

    def unpin(self, memory: Tensor) -> None:
        """Undo ``pin``, when nothing is under way with it."""


class Joined:
    """The device is the host."""

    joined = True

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def mark(self) -> Event:
        return PAST

    def follow(self, event: Awaited) -> None:
        event.wait()

    def offload(self, host: Tensor, source: Tensor, after: Sequence[Event]) -> Event:
        raise AssertionError("device and host memory are the same here: there is nothing to offload")

    def upload(self, target: Tensor, host: Tensor, after: Sequence[Event]) -> Event:
        raise AssertionError("device and host memory are the same here: there is nothing to upload")

    def beside(self) -> AbstractContextManager[Callable[[], Event]]:
        return contextlib.nullcontext(lambda: PAST)

    def pin(self, memory: Tensor) -> None:
        return

    def unpin(self, memory: Tensor) -> None:
        return


def check_copy(target: Tensor, source: Tensor) -> None:
    """Both ends of a copy are contiguous, and alike."""
    assert target.is_contiguous() and source.is_contiguous(), "a copy takes contiguous tensors"
    assert target.shape == source.shape and target.dtype == source.dtype, f"{target.dtype} {target.shape} from {source.dtype} {source.shape}"


class CudaEvent:
    """A cupy event. Waiting sleeps, so that the core is free for the CPU update."""

    def __init__(self, event: Any) -> None:
        self.event = event

    @property
    def done(self) -> bool:
        return bool(self.event.done)

    def wait(self) -> None:
        self.event.synchronize()


_TO_DEVICE, _TO_HOST = 1, 2  # cudaMemcpyKind


class CudaLink:
    """A CUDA device: streams, events, copies and page locking through cupy.

    Raises ImportError, with the remedy, where cupy is not installed.
    """

    joined = False

    def __init__(self, device: torch.device) -> None:
        try:
            import cupy
        except ImportError as error:
            version = (torch.version.cuda or "13").split(".")[0]
            raise ImportError(
                f"copies between {device} and the host go through cupy, which is not installed; pip install 'zk-offload[cuda{version}]'"
            ) from error
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)
        self.cupy, self.on_device = cupy, cupy.cuda.Device(index)
        torch.cuda.current_stream(self.device)  # torch's context first
        with self.on_device:
            self.down, self.up = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)
        self.up_torch = torch.cuda.ExternalStream(self.up.ptr, device=self.device)  # self.up must live as long
        self.lock = threading.Lock()
        self.in_flight: dict[int, deque[tuple[Any, Tensor, Tensor]]] = {_TO_DEVICE: deque(), _TO_HOST: deque()}

    def _compute(self) -> int:
        return int(torch.cuda.current_stream(self.device).cuda_stream)

    def _record(self, stream: int) -> CudaEvent:
        with self.on_device:
            event = self.cupy.cuda.Event(block=True, disable_timing=True)
            self.cupy.cuda.runtime.eventRecord(event.ptr, stream)
        return CudaEvent(event)

    def mark(self) -> Event:
        return self._record(self._compute())

    def follow(self, event: Awaited) -> None:
        self._wait(self._compute(), event)

    def _wait(self, stream: int, event: Awaited) -> None:
        if isinstance(event, CudaEvent):
            with self.on_device:
                self.cupy.cuda.runtime.streamWaitEvent(stream, event.event.ptr)
        else:
            event.wait()

    def _copy(self, stream: int, kind: int, target: Tensor, source: Tensor, after: Sequence[Event]) -> Event:
        check_copy(target, source)
        with self.lock:
            for event in after:
                self._wait(stream, event)
            with self.on_device:
                self.cupy.cuda.runtime.memcpyAsync(target.data_ptr(), source.data_ptr(), source.nbytes, kind, stream)
            copied = self._record(stream)
            in_flight = self.in_flight[kind]
            in_flight.append((copied, target, source))
            while in_flight[0][0].done and len(in_flight) > 1:
                in_flight.popleft()
        return copied

    def offload(self, host: Tensor, source: Tensor, after: Sequence[Event]) -> Event:
        return self._copy(self.down.ptr, _TO_HOST, host, source, after)

    def upload(self, target: Tensor, host: Tensor, after: Sequence[Event]) -> Event:
        return self._copy(self.up.ptr, _TO_DEVICE, target, host, after)

    @contextlib.contextmanager
    def beside(self) -> Iterator[Callable[[], Event]]:
        with torch.cuda.stream(self.up_torch):
            yield lambda: self._record(self.up.ptr)

    def pin(self, memory: Tensor) -> None:
        try:
            with self.on_device:
                self.cupy.cuda.runtime.hostRegister(memory.data_ptr(), memory.nbytes, 1)  # portable: for all devices
        except self.cupy.cuda.runtime.CUDARuntimeError as error:
            raise OSError(str(error)) from error

    def unpin(self, memory: Tensor) -> None:
        with self.on_device:
            self.cupy.cuda.runtime.hostUnregister(memory.data_ptr())


# links are made once for each device, so that all who use one share its streams; tests put twins here
LINKS: dict[torch.device, Link] = {}
_making = threading.Lock()


def link_to(device: torch.device) -> Link:
    """The link to ``device``."""
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    with _making:
        if device not in LINKS:
            LINKS[device] = CudaLink(device) if device.type == "cuda" else Joined(device)
        return LINKS[device]
