"""In: nothing but a CPU. Out: links to a device that is pretended, for tests and for models of time: its memory is host memory under another name.

``AdversarialLink`` is the worst device there can be. Each copy happens as late as its event allows; until then its target is filled with NaN,
and the side that has not waited for it goes on seeing NaN after the other has. It keeps count of who knows of what (vector clocks for the
host, compute, and each direction), so these are found: a source that is changed before its owner knows that it was read, a target that is
written or freed before its owner knows that the copy is over, a copy that was not told to come after compute, or after less than what
compute wrote, and host memory unlocked under a copy. All threads of the host know what one of them knows: what one has to wait for because
of another is not found here. ``ThrottledLink`` moves a given number of bytes per second, each direction beside the other.

    with pretend(AdversarialLink()) as link:
        ...train...
    assert not link.races
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TypeVar
from unittest import mock

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from zk.offload.streams import LINKS, Awaited, Event, Link, check_copy
from zk.timeline import Resource, phase

CPU = torch.device("cpu")
AnyLink = TypeVar("AnyLink", bound=Link)
Clock = dict[str, int]  # queue -> how many of its operations are known to have ended
Place = tuple[int, int, int]  # storage, its first byte, bytes


@contextlib.contextmanager
def pretend(link: AnyLink) -> Iterator[AnyLink]:
    """Inside, the CPU is a device of its own, reached over ``link``."""
    with mock.patch.dict(LINKS, {CPU: link}):
        yield link


def _join(clock: Clock, other: Clock) -> None:
    for queue, count in other.items():
        clock[queue] = max(clock.get(queue, 0), count)


class _Point:
    """An event of the adversary: what has ended once it has."""

    def __init__(self, link: AdversarialLink, clock: Clock, sums: Mapping[Place, int] | None = None) -> None:
        self.link, self.clock = link, clock
        self.sums = sums or {}  # of what was in device memory

    @property
    def done(self) -> bool:
        with self.link.lock:
            return all(self.link.known["host"].get(queue, 0) >= count for queue, count in self.clock.items())

    def wait(self) -> None:
        self.link.learn("host", self.clock)


@dataclasses.dataclass(slots=True)
class _Copy:
    queue: str  # "down" or "up"
    number: int
    target: Tensor
    source: Tensor
    content: Tensor  # of the source, when the copy was asked for
    spoiled: bool  # it may not have read that
    shown: bool = False  # the target holds it, though its owner does not know
    read: bool = False  # the source's owner knows that it was read
    arrived: bool = False  # the target's owner knows that it was written


def _place(tensor: Tensor) -> Place:
    return tensor.untyped_storage()._cdata, int(tensor.storage_offset()) * tensor.itemsize, tensor.nbytes


def _overlap(one: Tensor, other: Tensor) -> bool:
    return one.data_ptr() < other.data_ptr() + other.nbytes and other.data_ptr() < one.data_ptr() + one.nbytes


def _poison(tensor: Tensor) -> None:
    tensor.view(torch.uint8).fill_(0xFF)  # NaN in fp32, bf16 and fp16


_READER, _WRITER = {"down": "compute", "up": "host"}, {"down": "host", "up": "compute"}  # who owns the source, the target


class AdversarialLink:
    """Runs copies as late as their events allow, and finds races. ``races`` holds a line for each that was found."""

    device, joined = CPU, False

    def __init__(self, refuses_to_pin: str = "") -> None:
        self.lock = threading.RLock()
        self.known: dict[str, Clock] = {name: {} for name in ("host", "compute", "down", "up")}
        self.count = {"compute": 0, "down": 0, "up": 0}
        self.copies: list[_Copy] = []  # not yet known to both sides
        self.seen: dict[Place, int] = {}  # device memory -> compute's count when it last got hold of it
        self.sources: dict[int, tuple[StorageWeakRef, set[Place]]] = {}  # device memory that was offloaded
        self.races: list[str] = []
        self.refuses_to_pin = refuses_to_pin
        self.pinned: dict[int, int] = {}
        self.moved = {"down": 0, "up": 0}

    # ---- who knows what ------------------------------------------------------------------------------------------------------

    def learn(self, who: str, clock: Clock) -> None:
        """``who`` comes after all that ``clock`` counts: what it waited for happens now."""
        if who == "host" and threading.current_thread() is threading.main_thread():
            self.learn("compute", clock)  # what training asks for once it has waited comes later
        with self.lock:
            _join(self.known[who], clock)
            for copy in list(self.copies):
                ended = self.known[who].get(copy.queue, 0) >= copy.number
                if ended and _READER[copy.queue] == who and not copy.read:
                    self._check_source(copy)
                    copy.read = True
                elif ended and _WRITER[copy.queue] == who and not copy.arrived:
                    copy.arrived = True
                    self._arrive(copy)
                else:
                    continue
                if who == "compute":
                    device_end = copy.source if copy.queue == "down" else copy.target
                    self.seen[_place(device_end)] = self.count["compute"]
                if copy.read and copy.arrived:
                    self.copies.remove(copy)

    def _check_source(self, copy: _Copy) -> None:
        if not torch.equal(copy.source.view(torch.uint8), copy.content.view(torch.uint8)):
            self.races.append(f"the source of a copy {copy.queue} (number {copy.number}, {copy.source.nbytes} bytes) was changed before it was read")

    def _arrive(self, copy: _Copy) -> None:
        if not copy.shown and not bool((copy.target.view(torch.uint8) == 0xFF).all()):
            self.races.append(f"the target of a copy {copy.queue} (number {copy.number}, {copy.target.nbytes} bytes) was written under it")
        later = any(other is not copy and not other.arrived and _overlap(other.target, copy.target) for other in self.copies)
        if not later and not copy.spoiled:  # else it stays NaN
            copy.target.copy_(copy.content)

    def _sums(self) -> dict[Place, int]:
        """A checksum of everything that was offloaded before and still is there, as it is now."""
        sums = {}
        for cdata, (reference, places) in list(self.sources.items()):
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)  # type: ignore[attr-defined]
            if storage is None:
                del self.sources[cdata]
                continue
            for place in places:
                content = torch.empty(0, dtype=torch.uint8).set_(storage, place[1], (place[2],), (1,))
                sums[place] = zlib.crc32(content.numpy().data)
        return sums

    def finish(self) -> None:
        """Everything under way ends; for the end of a test."""
        for who in ("host", "compute"):
            self.learn(who, dict(self.count))

    # ---- Link ----------------------------------------------------------------------------------------------------------------

    def mark(self) -> Event:
        with self.lock:
            self.count["compute"] += 1
            clock = {**self.known["compute"], "compute": self.count["compute"]}
            return _Point(self, clock, self._sums())

    def follow(self, event: Awaited) -> None:
        if isinstance(event, _Point):
            self.learn("compute", event.clock)
        else:
            event.wait()

    def _copy(self, queue: str, target: Tensor, source: Tensor, after: Sequence[Event]) -> Event:
        check_copy(target, source)
        with self.lock:
            known, asked = self.known[queue], Clock()
            for event in after:
                if isinstance(event, _Point):
                    _join(asked, event.clock)
                else:
                    event.wait()
            _join(known, asked)
            device_end = source if queue == "down" else target
            content, spoiled = source.clone(), False
            for other in self.copies:  # what another copy is still to write, and this one comes after, is there by then
                if (
                    not other.arrived
                    and other.target.untyped_storage()._cdata == source.untyped_storage()._cdata
                    and (known.get(other.queue, 0) >= other.number)
                ):
                    self.races.append(f"a copy {queue} is asked for from memory that a copy {other.queue} writes: its owner must wait first")
            storage, start, nbytes = _place(device_end)
            counts = [count for (other, at, size), count in self.seen.items() if other == storage and start < at + size and at < start + nbytes]
            if asked.get("compute", 0) <= max(counts, default=0):
                self.races.append(f"a copy {queue} of {source.nbytes} bytes does not come after what compute does with the device's memory")
                spoiled = True
            if queue == "down":
                spoiled |= self._changed(source, after)
            _poison(target)
            self.count[queue] += 1
            known[queue] = self.count[queue]
            self.moved[queue] += source.nbytes
            self.copies.append(_Copy(queue, self.count[queue], target, source, content, spoiled))
            return _Point(self, dict(known))

    def _changed(self, source: Tensor, after: Sequence[Event]) -> bool:
        """Whether compute wrote ``source`` (device) after the last of the marks that a copy of it comes after."""
        place = _place(source)
        marks = [event for event in after if isinstance(event, _Point) and place in event.sums]
        last = max(marks, key=lambda mark: mark.clock.get("compute", 0), default=None)
        self.sources.setdefault(place[0], (StorageWeakRef(source.untyped_storage()), set()))[1].add(place)
        if last is None or last.sums[place] == self._sums()[place]:
            return False
        self.races.append(f"a copy down of {source.nbytes} bytes comes after an older mark than what compute wrote there")
        return True

    def offload(self, host: Tensor, source: Tensor, after: Sequence[Event]) -> Event:
        return self._copy("down", host, source, after)

    def upload(self, target: Tensor, host: Tensor, after: Sequence[Event]) -> Event:
        return self._copy("up", target, host, after)

    @contextlib.contextmanager
    def beside(self) -> Iterator[Callable[[], Event]]:
        """Collectives of a CPU run at once, so what they come after does too; compute still knows nothing of it.

        Who asks for the event has waited for them: from there on, until compute follows it, what was uploaded is NaN again.
        """
        with self.lock:
            shown = [copy for copy in self.copies if copy.queue == "up" and not copy.arrived]
            for copy in shown:
                copy.shown = True
                copy.target.copy_(copy.content)

        def reached() -> Event:
            with self.lock:
                for copy in shown:
                    if not copy.arrived:
                        copy.shown = False
                        _poison(copy.target)
                return _Point(self, dict(self.known["up"]))

        yield reached

    def pin(self, memory: Tensor) -> None:
        if self.refuses_to_pin:
            raise OSError(self.refuses_to_pin)
        self.pinned[memory.data_ptr()] = memory.nbytes

    def unpin(self, memory: Tensor) -> None:
        with self.lock:
            for copy in self.copies:
                host_end = copy.target if copy.queue == "down" else copy.source
                if _overlap(host_end, memory) and self.known["host"].get(copy.queue, 0) < copy.number:
                    self.races.append(f"the host memory of a copy {copy.queue} (number {copy.number}) was unlocked under it")
        del self.pinned[memory.data_ptr()]


class _Flag:
    def __init__(self) -> None:
        self.event = threading.Event()

    @property
    def done(self) -> bool:
        return self.event.is_set()

    def wait(self) -> None:
        if not self.event.is_set():
            with phase("wait", "link"):
                self.event.wait()


class _Lane(threading.Thread):
    """One direction: copies one after the other, each as long as its bytes take."""

    def __init__(self, nbytes_per_s: float, resource: Resource) -> None:
        super().__init__(daemon=True, name=f"zk-twin-{resource}")
        self.nbytes_per_s, self.resource, self.busy_s = nbytes_per_s, resource, 0.0
        self.condition = threading.Condition()
        self.queue: list[tuple[Tensor, Tensor, tuple[Event, ...], _Flag]] = []
        self.start()

    def submit(self, target: Tensor, source: Tensor, after: Sequence[Event]) -> Event:
        check_copy(target, source)
        flag = _Flag()
        with self.condition:
            self.queue.append((target, source, tuple(after), flag))
            self.condition.notify()
        return flag

    def run(self) -> None:
        while True:
            with self.condition:
                while not self.queue:
                    self.condition.wait()
                target, source, after, flag = self.queue.pop(0)
            for event in after:
                event.wait()
            start = time.perf_counter()
            with phase(self.resource, f"{source.nbytes >> 10} KiB"):
                target.copy_(source)
                time.sleep(max(0.0, start + source.nbytes / self.nbytes_per_s - time.perf_counter()))
            self.busy_s += time.perf_counter() - start
            flag.event.set()


class ThrottledLink:
    """Moves ``nbytes_per_s`` bytes per second in each direction, both at once."""

    device, joined = CPU, False

    def __init__(self, nbytes_per_s: float) -> None:
        self.down, self.up = _Lane(nbytes_per_s, "offload"), _Lane(nbytes_per_s, "upload")

    def mark(self) -> Event:
        flag = _Flag()  # a CPU has done what it was asked to
        flag.event.set()
        return flag

    def follow(self, event: Awaited) -> None:
        event.wait()

    def offload(self, host: Tensor, source: Tensor, after: Sequence[Event]) -> Event:
        return self.down.submit(host, source, after)

    def upload(self, target: Tensor, host: Tensor, after: Sequence[Event]) -> Event:
        return self.up.submit(target, host, after)

    def beside(self) -> AbstractContextManager[Callable[[], Event]]:
        raise NotImplementedError("collectives beside a throttled link; train in one process")

    def pin(self, memory: Tensor) -> None:
        return

    def unpin(self, memory: Tensor) -> None:
        return
