"""Presence of ranks, in the store that they have met over: who is at a place, who has given up and why, who shows no sign of life.

The store belongs to a process that may stand still, or wait for another one with a lock on its connection. So everything here goes over a
connection of its own, in a thread of its own: whoever asks waits for the answer as long as it wants, and hears Ctrl-C.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")
BEAT_S = 1.0
PATIENCE_S = 4.0  # without a beat, a rank shows no sign of life; it may be busy all the same
STORE_GONE = "the store over which the ranks have met is gone, and with it the process that keeps it (rank 0, or torchrun). "
STORE_SILENT = "the store over which the ranks have met does not answer: the process that keeps it (rank 0, or torchrun) stands still. "


class Presence:
    """This rank's beat, once a second, and those of the others.

    Args:
        store: of the default process group.
        rank: in that group.
    """

    def __init__(self, store: Any, rank: int) -> None:
        self.rank = rank
        try:
            self.store = store.clone()
        except (RuntimeError, AttributeError):  # a kind of store that has one connection
            self.store = store
        self.beats = 0
        self.tasks: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=_go_on, args=(weakref.ref(self), self.tasks), name="zk presence", daemon=True)
        self.thread.start()
        weakref.finalize(self, self.tasks.put, None).atexit = False
        _ALL.add(self)

    def _beat(self) -> None:
        self.beats += 1
        self.store.set(f"zk/beat/{self.rank}", f"{_process()} {self.beats}")

    def ask(self, task: Callable[[], T], timeout_s: float = PATIENCE_S) -> T:
        """Do something with the store. RuntimeError, saying so, where it is gone or does not answer."""
        answer: Future[T] = Future()
        self.tasks.put((task, answer))
        try:
            return answer.result(timeout_s)
        except TimeoutError as error:
            raise RuntimeError(STORE_SILENT) from error
        except RuntimeError as error:
            raise RuntimeError(f"{STORE_GONE}({error}) ") from error

    def _read(self, ranks: Sequence[int]) -> dict[int, str]:
        self.store.check([f"zk/beat/{self.rank}"])  # that it answers, also where nobody is asked for
        there = [rank for rank in ranks if rank != self.rank and self.store.check([f"zk/beat/{rank}"])]
        return {rank: self.store.get(f"zk/beat/{rank}").decode() for rank in there}

    def ended(self, ranks: Sequence[int]) -> list[int]:
        """Those of ``ranks`` that have ended for sure: processes on this machine that are there no more. Empty where the store does not answer."""
        try:
            return _ended(self.ask(lambda: self._read(ranks)))
        except RuntimeError:
            return []

    def who_is_gone(self, ranks: Sequence[int]) -> str:
        """Name those of a group's ``ranks``, in a sentence. Empty where all show signs of life: then only the error says what is wrong."""
        try:
            first = self.ask(lambda: self._read(ranks))
            gone, until = list(first), time.monotonic() + PATIENCE_S
            while gone and not _ended(first) and time.monotonic() < until:
                time.sleep(BEAT_S / 4)
                last = self.ask(lambda: self._read(ranks))
                gone = [rank for rank in gone if last.get(rank) == first[rank]]
        except RuntimeError as error:
            return str(error)
        named = [str(ranks.index(rank)) for rank in _ended(first) or gone]
        return f"rank{'s' * (len(named) > 1)} {', '.join(named)} ended, or stands still: no sign of life any more. " if named else ""

    def meet(self, place: str, ranks: Sequence[int], timeout_s: float, words: str) -> dict[int, str]:
        """Return each one's words once all of ``ranks`` have come to ``place``. RuntimeError, naming who is missing and why, if that cannot be.

        Each of these ends it: a rank that gives up there, one that has ended, ``timeout_s`` seconds, Ctrl-C.
        """
        begun = time.monotonic()
        missing = [rank for rank in ranks if rank != self.rank]

        def come() -> None:
            self._beat()
            self.store.set(f"zk/at/{place}/{self.rank}", words)

        def hear() -> dict[int, str]:
            return {rank: self.store.get(f"zk/at/{place}/{rank}").decode() for rank in ranks}

        def look() -> list[int]:
            return [rank for rank in missing if not self.store.check([f"zk/at/{place}/{rank}"])]

        try:
            self.ask(come, timeout_s)
            while missing := self.ask(look, timeout_s):
                late = time.monotonic() - begun
                failure = self.failure(place)
                ended = self.ended(missing) if late > BEAT_S else []
                # once more, as ranks that met meanwhile may have gone on, and one of them been refused what it asks for
                if (failure or ended or late > timeout_s) and (missing := self.ask(look, timeout_s)):
                    who = f"rank{'s' * (len(missing) > 1)} {', '.join(str(ranks.index(rank)) for rank in missing)}"
                    reason = failure or ("it has ended" if ended else f"not there after {late:.0f} s")
                    raise RuntimeError(f"{who} did not come to where a ZeroOptimizer is made: {reason}")
                time.sleep(min(0.1, 0.001 + late / 10))
            return self.ask(hear, timeout_s)
        except BaseException as error:
            self.fail(place, why(ranks.index(self.rank), error))
            raise

    def fail(self, place: str, why: str) -> None:
        """Tell those who are at ``place``, or come there, that this rank gives up."""
        with contextlib.suppress(RuntimeError):
            self.ask(lambda: fail(self.store, place, why))

    def failure(self, place: str) -> str:
        """The reason why a rank gave up at ``place``; empty if none did, or nobody answers."""
        try:
            key = f"zk/failed/{place}"
            return self.ask(lambda: str(self.store.get(key).decode()) if self.store.check([key]) else "", BEAT_S)
        except RuntimeError:
            return ""

    def close(self) -> None:
        """No more beats; returns when the thread has ended, or is seen to wait for a store that does not answer."""
        self.tasks.put(None)
        self.thread.join(PATIENCE_S)


def why(rank: int, error: BaseException) -> str:
    """The reason that a rank gives up for."""
    return f"rank {rank} gave up: {type(error).__name__}: {error}"


def fail(store: Any, place: str, why: str) -> None:
    """Tell those who are at ``place``, or come there, that a rank gives up. The first one's reason counts."""
    with contextlib.suppress(RuntimeError):  # the store is gone, and with it everybody who could read this
        store.compare_set(f"zk/failed/{place}", "", why)


class Board:
    """A place where ranks leave words for each other, in the store: for threads in the background, which need no speed and no connections.

    Args:
        name: the same on all ranks, and of no other board.
        ranks: in the default group.
        timeout_s: how many seconds to wait for the others.
    """

    def __init__(self, presence: Presence, name: str, ranks: Sequence[int], timeout_s: float) -> None:
        self.presence, self.store, self.name, self.ranks = presence, presence.store, name, list(ranks)
        self.rank, self.world, self.timeout_s, self.count = self.ranks.index(presence.rank), len(ranks), timeout_s, 0

    def exchange(self, text: str, what: str, is_error: bool = False) -> list[str]:
        """The words of each rank, by rank. RuntimeError where one of them does not come."""
        self.count += 1
        here = f"zk/board/{self.name}/{self.count}"
        begun = time.monotonic()

        def come() -> None:
            self.store.set(f"{here}/{self.rank}", text)
            if text:
                self.store.add(f"{here}/said", 1)
            self.store.add(f"{here}/here", 1)

        def read() -> list[str]:
            said = self.store.add(f"{here}/said", 0)
            found = [self.store.get(f"{here}/{rank}").decode() if said else "" for rank in range(self.world)]
            self.store.add(f"{here}/read", 1)
            return found

        def clear() -> None:
            for key in (*map(str, range(self.world)), "said", "here", "read"):
                self.store.delete_key(f"{here}/{key}")

        def wait_for_all(key: str) -> None:
            look = begun + BEAT_S
            while self.presence.ask(lambda: int(self.store.add(f"{here}/{key}", 0)), self.timeout_s) < self.world:
                now = time.monotonic()
                if now > look:
                    look = now + BEAT_S
                    ended = [str(self.ranks.index(rank)) for rank in self.presence.ended(self.ranks)]
                    if ended or now - begun > self.timeout_s:
                        raise RuntimeError(f"rank {', '.join(ended)} has ended" if ended else f"other ranks did not come for {now - begun:.0f} s")
                time.sleep(min(0.05, 0.001 + (now - begun) / 10))

        self.presence.ask(come, self.timeout_s)
        wait_for_all("here")
        found = self.presence.ask(read, self.timeout_s)
        if self.rank == 0:  # its process may keep the store, and end after this
            wait_for_all("read")
            self.presence.ask(clear, self.timeout_s)
        return found


def _process() -> str:
    """This process, for others on the same machine to look whether it is there: namespace of ids, id, and when it began."""
    try:
        return f"{os.readlink('/proc/self/ns/pid')}/{os.getpid()}/{_begun(os.getpid())}"
    except OSError:  # no /proc
        return "elsewhere"


def _begun(process: int) -> str:
    """The time at which a process began, in the system's ticks; empty where it has ended, whether its parent has heard of that or not."""
    try:
        with open(f"/proc/{process}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        return "" if fields[0] in "ZX" else fields[19]
    except FileNotFoundError:
        return ""


def _has_ended(process: str) -> bool:
    """Check that a process which another rank has named is there no more; False for processes that cannot be seen from here."""
    try:
        space, number, begun = process.split("/")
        return space == os.readlink("/proc/self/ns/pid") and _begun(int(number)) != begun
    except (OSError, ValueError):
        return False


def _ended(beats: dict[int, str]) -> list[int]:
    """The ranks whose processes have ended for sure."""
    return [rank for rank, beat in beats.items() if _has_ended(beat.split()[0])]


def _go_on(reference: weakref.ref[Presence], tasks: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]) -> None:
    beat = time.monotonic() + BEAT_S
    while True:
        with contextlib.suppress(queue.Empty):
            task = tasks.get(timeout=max(0.0, beat - time.monotonic()))
            if task is None:
                return
            try:
                task[1].set_result(task[0]())
            except BaseException as error:
                task[1].set_exception(error)
            del task
        if time.monotonic() >= beat:
            beat = time.monotonic() + BEAT_S
            presence = reference()
            if presence is None:
                return
            with contextlib.suppress(RuntimeError, OSError):  # the store is gone: whoever asks hears of it
                presence._beat()
            del presence


_ALL: weakref.WeakSet[Presence] = weakref.WeakSet()
os.register_at_fork(after_in_child=_ALL.clear)  # a forked process has none of these threads


@atexit.register
def _end_all() -> None:
    """A thread that comes back into a finalized interpreter ends the process with SIGABRT."""
    for presence in list(_ALL):
        with contextlib.suppress(RuntimeError):
            presence.close()
