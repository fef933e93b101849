"""Values of the chunks that a save still has to read, as they were when it began, while training goes on.

The save reads chunks in the order in which the next update will change them. An update that catches up with it copies a chunk it is about to
change, if there is room for the copy, and else waits until the save has read it.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from torch import Tensor

from zk.core.timeline import phase

Values = Sequence[Tensor]


class Snapshot:
    """One save in progress.

    Args:
        room_nbytes: host memory for copies.
    """

    def __init__(self, room_nbytes: int) -> None:
        self.room = room_nbytes
        self.changed = threading.Condition()
        self.over = False  # nothing is read any more
        self.stall_s = 0.0  # time that updates have waited, or copied
        self.copied_nbytes = 0

    def end(self) -> None:
        """Nobody waits for the save any more."""
        with self.changed:
            self.over = True
            self.changed.notify_all()


class Unread:
    """The chunks of one shard that are to be read.

    Args:
        snapshot: the save.
        nbytes: number of the chunk -> bytes of a copy of it.
        copy: makes the copy of an open chunk: its number and fields -> what is saved of it.
    """

    def __init__(self, snapshot: Snapshot, nbytes: Mapping[int, int], copy: Callable[[int, Mapping[str, Tensor]], Values]) -> None:
        self.snapshot, self.nbytes, self.copy = snapshot, nbytes, copy
        self.left = set(nbytes)
        self.reading: int | None = None
        self.promised: set[int] = set()  # claimed by an update that has not copied them yet
        self.copies: dict[int, Values | BaseException] = {}  # what kept a copy from coming about

    # ---- the update ----------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def before_change(self, number: int) -> Iterator[Callable[[Mapping[str, Tensor]], None]]:
        """Around changing a chunk. What is given must be called with its fields, before the first change."""
        try:
            yield functools.partial(self._hand, number) if self._claim(number) else lambda fields: None
        except BaseException as error:  # Ctrl-C too, wherever it comes
            if number in self.promised:
                self._put(number, error)
            raise

    def _hand(self, number: int, fields: Mapping[str, Tensor]) -> None:
        """Copy a chunk that was claimed for the save."""
        start = time.perf_counter()
        with phase("wait", "save: a copy"):
            values = self.copy(number, fields)
        self._put(number, values)
        self.snapshot.stall_s += time.perf_counter() - start

    def _claim(self, number: int) -> bool:
        """Wait until the chunk may be changed; True if it has to be copied first."""
        snapshot = self.snapshot
        with snapshot.changed:
            start = time.perf_counter()
            try:
                while number in self.left and not snapshot.over:
                    if self.reading != number and self.nbytes[number] <= snapshot.room:
                        self.promised.add(number)
                        self.left.remove(number)
                        snapshot.room -= self.nbytes[number]
                        snapshot.copied_nbytes += self.nbytes[number]
                        return True
                    with phase("wait", "save"):
                        snapshot.changed.wait()
                return False
            finally:
                snapshot.stall_s += time.perf_counter() - start

    def _put(self, number: int, values: Values | BaseException) -> None:
        with self.snapshot.changed:
            self.copies[number] = values
            self.promised.discard(number)
            self.snapshot.changed.notify_all()

    # ---- the save ------------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def taken(self, number: int) -> Iterator[Values | None]:
        """Around reading a chunk: its copy, or None if it is to be read where it is. Nobody changes it meanwhile."""
        changed = self.snapshot.changed
        with changed:
            if number in self.left:
                self.reading, values = number, None
            else:
                while number not in self.copies:
                    changed.wait()
                copied = self.copies.pop(number)
                if isinstance(copied, BaseException):
                    why = f"{type(copied).__name__}: {copied}"
                    raise RuntimeError(f"an update failed while a checkpoint was saved, which is given up: {why}") from copied
                values = copied
        try:
            yield values
        finally:
            with changed:
                if values is not None:
                    self.snapshot.room += self.nbytes[number]
                self.reading = None
                self.left.discard(number)
                changed.notify_all()
