"""In: the store that ranks have met over. Out: which of them are still there, once a collective has failed."""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
import weakref
from typing import Any

BEAT_S = 1.0
PATIENCE_S = 4.0  # without a beat, a rank is taken to be gone


class Presence:
    """This rank's beat, once a second, and those of the others.

    Args:
        store: of the default process group.
        rank, world: in that group.
    """

    def __init__(self, store: Any, rank: int, world: int) -> None:
        self.store, self.rank, self.world = store, rank, world
        self.beats, self.stopped = 0, threading.Event()
        self._beat()
        self.thread = threading.Thread(target=_go_on, args=(weakref.ref(self), self.stopped), name="zk presence", daemon=True)
        self.thread.start()
        _ALL.add(self)

    def _beat(self) -> None:
        self.beats += 1
        self.store.set(f"zk/beat/{self.rank}", str(self.beats))

    def _read(self) -> dict[int, bytes]:
        others = [rank for rank in range(self.world) if rank != self.rank and self.store.check([f"zk/beat/{rank}"])]
        return {rank: self.store.get(f"zk/beat/{rank}") for rank in others}

    def gone(self) -> list[int] | None:
        """Ranks that show no sign of life for PATIENCE_S; None where the store is gone itself. Takes that long."""
        try:
            first = last = self._read()
            until = time.monotonic() + PATIENCE_S
            while any(first[rank] == last[rank] for rank in first) and time.monotonic() < until:
                self.stopped.wait(BEAT_S / 4)
                last = self._read()
            return [rank for rank in first if first[rank] == last[rank]]
        except (RuntimeError, OSError):
            return None

    def close(self) -> None:
        """No more beats; returns when the thread has ended."""
        self.stopped.set()
        self.thread.join()


def _go_on(reference: weakref.ref[Presence], stopped: threading.Event) -> None:
    while not stopped.wait(BEAT_S):
        presence = reference()
        if presence is None:
            return
        try:
            presence._beat()
        except (RuntimeError, OSError):
            return  # the store is gone, and with it everybody who could read this
        del presence


_ALL: weakref.WeakSet[Presence] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    """A thread that comes back into a finalized interpreter ends the process with SIGABRT."""
    for presence in list(_ALL):
        with contextlib.suppress(RuntimeError):
            presence.close()
