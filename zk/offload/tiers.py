"""Tiers: where a unit's states rest. A chunk is a set of flat fields that move together.

    Chunk       device memory, or the host's where both are one: it is always there
    HostChunk   host memory beside a device: put and load copy, while device and host compute
    FileChunk   a file: fetch starts to read it, open waits for it, close writes it behind

A field is (numel,), named by what it holds: "param", "grad", "master", "exp_avg", ...
Copies are known in here alone: who puts, opens and awaits what it loaded has what it needs. They run
on streams of their own. Three rules keep it right; the software GPU finds where one is broken:

1. Device memory is allocated, used and freed in the order of the compute stream.
2. A copy comes after what compute had been asked to do when the copy was asked for.
3. What is done with either end comes after the copy's event: compute follows it, the host waits.

Copies are raw: contiguous tensors of one size and dtype. The link keeps both ends alive meanwhile.
"""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from zk.logs import rank_log
from zk.memory import empty, trim, zeros

Dtypes = Mapping[str, torch.dtype]
Fields = dict[str, Tensor]
Then = Callable[[Tensor], Any]
ALL = slice(None)
CPU = torch.device("cpu")
TO_DEVICE, TO_HOST = 1, 2  # cudaMemcpyKind
BEHIND_NBYTES = 1 << 30  # of device memory that may wait for copies to the host


class Chunk:
    """Fields that rest in memory. Every tier's chunks have these six methods."""

    stays = True
    """What ``load`` brings is the field itself, where it always is."""

    def __init__(self, dtypes: Dtypes, numel: int, device: torch.device):
        self.numel, self.device = numel, device
        self.fields = {name: zeros(numel, dtype, device) for name, dtype in dtypes.items()}

    def fetch(self) -> None:
        """Start to bring the fields to memory."""

    def open(self, part: slice = ALL) -> Fields:
        """The elements ``part`` of the fields, to be read and changed until ``close``."""
        return {name: field[part] for name, field in self.fields.items()}

    def close(self, changed: bool, part: slice = ALL) -> None:
        """End what ``open`` of the same part began."""

    def put(self, name: str, values: Tensor) -> None:
        """Take ``values`` (numel,) as its only field; without a copy where they are on this tier."""
        self.fields = {name: values.to(self.device)}

    def load(self, name: str, device: torch.device, then: Then) -> Arrival:
        """Start to bring a field to ``device``; ``wait()`` returns what ``then`` has made of it."""
        return Arrival(then(self.fields[name].to(device)))

    def drop(self) -> None:
        """Free the fields: their values are not needed any more."""
        self.fields = {}


class HostChunk(Chunk):
    """Fields in host memory that come from a device, and go there."""

    stays = False

    def __init__(self, dtypes: Dtypes, numel: int, near: torch.device):
        super().__init__(dtypes, numel, CPU)
        self.link: Any = link_to(near)
        self.lock = threading.RLock()
        self.in_flight: list[Any] = []  # parts, and the Events and Requests that move them

    def note(self, event: Any, part: slice = ALL) -> None:
        """Something moves a part from now on."""
        with self.lock:
            self.in_flight = [p for p in self.in_flight if not p[1].done] + [(part, event)]

    def moving(self, part: slice = ALL) -> list[Any]:
        """What moves some of a part."""
        return [e for p, e in self.in_flight if not e.done and overlap(p, part, self.numel)]

    def wait(self, part: slice = ALL) -> None:
        """Wait until nothing moves any of a part."""
        for event in self.moving(part):
            event.wait()

    def open(self, part: slice = ALL) -> Fields:
        self.wait(part)
        return super().open(part)

    def put(self, name: str, values: Tensor) -> None:
        """Start to copy ``values`` to page-locked memory that is used again."""
        self.fields = {name: empty(self.numel, values.dtype, CPU, self.link)}
        self.in_flight = [(ALL, self.link.offload(self.fields[name], values))]

    def load(self, name: str, device: torch.device, then: Then) -> Arrival:
        target = torch.empty(self.numel, dtype=self.fields[name].dtype, device=device)
        event = self.upload(target, name)
        return self.link.beside(target, then, event)  # type: ignore[no-any-return]

    def upload(self, target: Tensor, name: str, part: slice = ALL) -> Event:
        """Start to copy a part of a field to ``target`` on the device, after what moves it."""
        event = self.link.upload(target, self.fields[name][part], self.moving(part))
        self.note(event, part)
        return event  # type: ignore[no-any-return]


class MirroredChunk(HostChunk):
    """Parameters in host memory that are kept alike on the device: what is put is also a target."""

    stays = True
    near: Tensor  # (numel,)

    def put(self, name: str, values: Tensor) -> None:
        super().put(name, values)
        self.near = values
        for event in self.moving():
            self.link.follow(event)  # compute may change what it still has

    def close(self, changed: bool, part: slice = ALL) -> None:
        """Start to bring what has changed to the device."""
        if changed:
            self.upload(self.near[part], "param", part)

    def load(self, name: str, device: torch.device, then: Then) -> Arrival:
        return self.link.beside(self.near, then, self.link.mark())  # type: ignore[no-any-return]


def overlap(one: slice, other: slice, numel: int) -> bool:
    """Tell if two parts of ``numel`` elements have some in common."""
    (start, stop, _), (first, last, _) = one.indices(numel), other.indices(numel)
    return max(start, first) < min(stop, last)


class Tier:
    """A place where chunks rest; this one is memory: a device's, or the host's beside it."""

    chunk_numel = 1 << 25
    """The most elements of optimizer states that one of its chunks should have."""

    def __init__(self, device: torch.device, kind: type[Chunk]):
        self.device, self.kind, self.made = device, kind, list[Chunk]()

    def chunks(self, dtypes: Dtypes, sizes: list[int]) -> list[Chunk]:
        """A chunk of zeros for each of ``sizes`` (elements)."""
        made = [self.kind(dtypes, size, self.device) for size in sizes]
        self.made += made
        return made

    def close(self) -> None:
        """Give back what the tier holds, once nothing is in flight."""
        for chunk in self.made:
            chunk.open()
            chunk.drop()
        self.made.clear()
        trim()


def memory_tiers(device: torch.device) -> dict[str, Tier]:
    """The tiers of memory. "mirrored": the host's, with a copy on the device."""
    kinds = (Chunk, HostChunk, MirroredChunk) if device.type == "cuda" else (Chunk,) * 3
    pairs = zip(("device", "host", "mirrored"), kinds, strict=True)
    return {name: Tier(device, kind) for name, kind in pairs}


# ---- the link to a device ----------------------------------------------------------------------


class Event:
    """A point in a stream, such as the end of a copy."""

    def __init__(self, event: torch.cuda.Event, link: CudaLink):
        self.event, self.link = event, link
        self.near: Tensor | None = None  # the device end of a copy, until compute follows it

    @property
    def done(self) -> bool:
        return bool(self.event.query())

    def wait(self) -> None:
        """Return when it is over: the host may touch either end. The core is free meanwhile."""
        self.event.synchronize()
        self.link.drop_done()


class Arrival:
    """A value that is there once work in flight has ended."""

    def __init__(self, value: Any, event: Event | None = None):
        self.value, self.event = value, event

    def wait(self) -> Any:
        """The value, for what this thread asks its device to compute next."""
        if self.event is not None:
            stream = self.event.link.follow(self.event)
            for part in tree_leaves(self.value):  # freed in compute's order, not uploads'
                if isinstance(part, Tensor):
                    part.record_stream(stream)
        return self.value


class CudaLink:
    """The link to a CUDA device, through cupy. Any thread may use it.

    ``torch.cuda.device`` makes the device current: cupy's own guard makes a context on device 0 for
    every thread. Raises ImportError, with the remedy, where cupy is not installed.
    """

    def __init__(self, device: torch.device):
        try:
            import cupy
        except ImportError as error:
            version = (torch.version.cuda or "13").split(".")[0]
            raise ImportError(
                f"copies between {device} and the host go through cupy, which is not installed; "
                f"pip install cupy-cuda{version}x"
            ) from error
        self.device, self.runtime = device, cupy.cuda.runtime
        self.down, self.up = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self.lock = threading.Lock()
        # copies with their host ends, by kind; offloads whose device ends compute has not followed
        self.in_flight = {TO_DEVICE: deque[InFlight](), TO_HOST: deque[InFlight]()}
        self.behind, self.behind_nbytes = deque[tuple[Event, int]](), 0
        self.pinned, self.refuses = set[int](), False

    def offload(self, host: Tensor, source: Tensor) -> Event:
        """Start to copy ``source`` (device) to ``host``, after what compute was asked to do."""
        event = self.copy(TO_HOST, host, source, [self.mark()])
        self.behind.append((event, source.nbytes))
        self.behind_nbytes += source.nbytes
        while self.behind_nbytes > BEHIND_NBYTES and len(self.behind) > 1:
            oldest, nbytes = self.behind.popleft()
            self.behind_nbytes -= nbytes
            self.follow(oldest)  # its memory is compute's again, however far the host is ahead
        return event

    def upload(self, target: Tensor, host: Tensor, after: Iterable[Event] = ()) -> Event:
        """Start to copy ``host`` to ``target`` (device), after that, ``after``, earlier uploads."""
        return self.copy(TO_DEVICE, target, host, [self.mark(), *after])

    def beside(self, values: Tensor, then: Then, event: Event) -> Arrival:
        """Start ``then(values)`` on the device after ``event``; compute does not wait.

        The event moves to its end. Once compute follows it, nobody keeps what a copy has brought: the
        host may run ahead through a whole model, and its units use the same memory.
        """
        self.up.wait_event(event.event)
        with torch.cuda.stream(self.up):
            value = then(values)
            event.event = self.record(self.up).event
        event.near = values
        return Arrival(value, event)

    def follow(self, event: Event) -> torch.cuda.Stream:
        """Make compute, the current stream of this thread, wait for ``event``."""
        stream = torch.cuda.current_stream(self.device)
        stream.wait_event(event.event)
        near, event.near = event.near, None
        if near is not None:
            near.record_stream(stream)  # it may be another stream's
        return stream

    # ---- streams and events ----------------------------------------------------------------------

    def mark(self) -> Event:
        """What compute, the current stream of this thread, has been asked to do."""
        self.drop_done()
        return self.record(torch.cuda.current_stream(self.device))

    def record(self, stream: torch.cuda.Stream) -> Event:
        return Event(stream.record_event(torch.cuda.Event(blocking=True)), self)

    def copy(self, kind: int, target: Tensor, source: Tensor, after: Iterable[Event]) -> Event:
        stream = self.up if kind == TO_DEVICE else self.down
        assert target.is_contiguous() and source.is_contiguous(), "a copy takes contiguous tensors"
        assert (target.shape, target.dtype) == (source.shape, source.dtype), "ends are not alike"
        with self.lock:
            for event in after:
                stream.wait_event(event.event)
            ends = target.data_ptr(), source.data_ptr()
            with torch.cuda.device(self.device):
                self.runtime.memcpyAsync(*ends, source.nbytes, kind, stream.cuda_stream)
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
                "the system does not page-lock %d more bytes of host memory (%s), so copies are slow: "
                "free host memory, or raise its limit (WSL, container, 'ulimit -l unlimited')",
                memory.nbytes,
                error,
            )

    def wait(self) -> None:
        """Return when no copy is in flight."""
        self.down.synchronize()
        self.up.synchronize()
        self.drop_done()

    def unpin(self, memory: Tensor) -> None:
        """Undo ``pin``, after the copies in flight."""
        if memory.data_ptr() in self.pinned:
            self.wait()
            with torch.cuda.device(self.device):
                self.runtime.hostUnregister(memory.data_ptr())
            self.pinned.discard(memory.data_ptr())


InFlight = tuple[Event, Tensor]
one_link = functools.cache(CudaLink)  # of a device, so that all who use it share its streams


def link_to(device: torch.device) -> CudaLink | None:
    """The link to ``device``, with its index; None where its memory is the host's."""
    return one_link(device) if device.type == "cuda" else None
