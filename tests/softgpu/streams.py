"""Streams and events of the pretended devices: what is ordered after what, and a line for everything that is not.

Each stream counts its operations, and keeps a vector clock: for every stream, how many operations are known to have ended before its next
one begins. An event is a copy of such a clock. The host has a clock too; all its threads share it. Kernels run when they are launched.
Copies (copies.py) run when somebody who comes after them is about to look: on the device a later kernel or copy, in host memory the host that waits.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

Clock = dict[int, int]  # serial number of a stream -> operations of it that are known to have ended

LOCK = threading.RLock()  # held by whoever looks at or changes what this package keeps
HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
races: list[str] = []
stats = {"kernels": 0, "copies": 0, "pageable_copies": 0, "syncs": 0}
BEFORE: list[Callable[[], None]] = []  # what is to be done before anybody learns more
launched: Counter[str] = Counter()  # kernels of Triton, by name


def join(clock: Clock, other: Clock) -> None:
    """Raise ``clock`` to what ``other`` knows as well."""
    for serial, count in other.items():
        if clock.get(serial, 0) < count:
            clock[serial] = count


def place() -> str:
    """The lines of this project that led here, the innermost first; without them, the thread."""
    lines, frame = list[str](), sys._getframe(1)
    while frame is not None and len(lines) < 12:
        file = frame.f_code.co_filename
        if file.startswith(ROOT) and "/.venv/" not in file and (not file.startswith(HERE) or "/test_" in file):
            line = f"{os.path.relpath(file, ROOT)}:{frame.f_lineno}"
            lines += [line] * (lines[-1:] != [line])
        frame = frame.f_back  # type: ignore[assignment]
    return " < ".join(lines) or f"thread {threading.current_thread().name}"


def race(what: str) -> None:
    """Note a race, and the lines it was found at."""
    races.append(f"{what} [{place()}]")


class Queue:
    """One stream of one device. Handle 0 is the default stream, of which each device has one."""

    def __init__(self, device: int, handle: int) -> None:
        self.serial, self.device, self.handle = len(QUEUES), device, handle
        self.count = 0
        self.clock: Clock = {}
        self.late: deque[Any] = deque()  # copies that the device has not yet done
        self.in_flight: deque[Any] = deque()  # those that the host does not know to be over
        self.made_at = place() if handle else ""
        self._host_version = -1
        QUEUES.append(self)

    def __str__(self) -> str:
        return f"the stream of cuda:{self.device} made at {self.made_at}" if self.handle else f"the default stream of cuda:{self.device}"

    def issue(self) -> int:
        """Begin one more operation, after all that the stream waits for and all that the host knows. Returns its number."""
        before()
        if self._host_version != _version:
            self._host_version = _version
            join(self.clock, HOST)
        self.count += 1
        self.clock[self.serial] = self.count
        complete(self.clock)
        return self.count


def before() -> None:
    """Somebody is about to learn more than was known until now."""
    for function in BEFORE:
        function()


QUEUES: list[Queue] = []  # by serial number
_by_handle: dict[tuple[int, int], Queue] = {}
HOST: Clock = {}  # what the host knows, of which there have been so many versions
_version = 0
_num_late = 0


def make_queue(device: int, default: bool = False) -> Queue:
    """A new stream of ``device``."""
    with LOCK:
        queue = Queue(device, 0 if default else 0x1000 + 16 * len(QUEUES))
        _by_handle[device, queue.handle] = queue
        return queue


def find_queue(device: int, handle: int) -> Queue:
    """The stream of ``device`` with that handle; KeyError where there is none."""
    return _by_handle[device, handle]


def put_off(queue: Queue, operation: Any) -> None:
    """``operation`` of ``queue`` happens when it must have."""
    global _num_late
    _num_late += 1
    queue.late.append(operation)
    queue.in_flight.append(operation)


def in_flight() -> list[Any]:
    """All operations that the host does not know to be over."""
    return [operation for queue in QUEUES for operation in queue.in_flight if not operation.landed]


def complete(clock: Clock) -> None:
    """Do on the device all operations that ``clock`` counts, if they have not been done."""
    global _num_late
    if not _num_late:
        return
    for queue in list(QUEUES):
        while queue.late and queue.late[0].number <= clock.get(queue.serial, 0):
            operation = queue.late.popleft()
            _num_late -= 1
            complete(operation.clock)
            operation.run()


def host_learns(clock: Clock) -> None:
    """The host has waited for all that ``clock`` counts."""
    global _version
    with LOCK:
        before()
        complete(clock)
        for queue in list(QUEUES):
            while queue.in_flight and queue.in_flight[0].number <= clock.get(queue.serial, 0):
                queue.in_flight.popleft().land()
        join(HOST, clock)
        _version += 1


class Point:
    """What an event has recorded; nothing at first."""

    def __init__(self) -> None:
        self.clock: Clock = {}

    def record(self, queue: Queue) -> None:
        with LOCK:
            self.clock = dict(queue.clock)

    def block(self, queue: Queue) -> None:
        with LOCK:
            before()
            join(queue.clock, self.clock)

    def done(self) -> bool:
        with LOCK:
            return all(HOST.get(serial, 0) >= count for serial, count in self.clock.items())

    def wait(self) -> None:
        stats["syncs"] += 1
        host_learns(self.clock)


def synchronize(device: int | None = None) -> None:
    """The host waits for a device, or for all."""
    with LOCK:
        stats["syncs"] += 1
        host_learns({queue.serial: queue.count for queue in QUEUES if device is None or queue.device == device})
