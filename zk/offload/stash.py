"""Room for bytes that are to come back: page-locked host buffers, recycled by size, and private files that grow as needed.

What the tiers of activations.py are made of: other than the arena of training state (pinned.py), nobody knows beforehand how much it will be.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
import weakref
from collections import deque
from collections.abc import Sequence

from torch import Tensor

from zk.core.events import COMPLETED, Awaited, Event
from zk.core.logs import rank_log
from zk.core.memory import staging
from zk.offload.nvme import File, round_up
from zk.offload.scratch import Scratch
from zk.offload.streams import Link

_AGE = 8  # contexts for which an idle host buffer is kept
_SEGMENT_NBYTES = 64 << 20, 4 << 30  # files grow from, to


# ---- host memory -------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(eq=False, slots=True)
class HostBuffer:
    """A buffer of host memory (nbytes,) uint8, and what may still be in flight with it."""

    memory: Tensor
    pinned: bool
    busy: tuple[Awaited, ...] = ()

    def settle(self) -> None:
        for awaited in self.busy:
            with contextlib.suppress(OSError):  # it was told to whoever needed it
                awaited.wait()
        self.busy = ()


@functools.cache
def _warn_pageable(reason: str) -> None:
    rank_log.warning("host memory for activations is not pinned (%s): copies will hold up compute", reason)


class HostPool:
    """Host buffers of one link, recycled by size: pinning takes longer than the copies."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.idle: dict[int, deque[HostBuffer]] = {}
        self.spare: dict[int, int] = {}  # size -> buffers that have been idle since the last ``age`` that freed some
        self.ages = 0

    def take(self, link: Link, nbytes: int) -> HostBuffer:
        step = 1 << max((nbytes - 1).bit_length() - 3, 12)  # eighths of powers of two, in pages
        nbytes = -(-nbytes // step) * step
        with self.lock:
            idle = self.idle.get(nbytes)
            host = idle.popleft() if idle else None
            self.spare[nbytes] = min(self.spare.get(nbytes, 0), len(idle or ()))
        if host is not None:
            host.settle()
            return host
        memory = staging(nbytes)
        try:
            link.pin(memory)
        except OSError as error:
            _warn_pageable(str(error))
            return HostBuffer(memory, pinned=False)
        return HostBuffer(memory, pinned=True)

    def give(self, host: HostBuffer, *busy: Awaited) -> None:
        host.busy = busy
        with self.lock:
            self.idle.setdefault(host.memory.nbytes, deque()).append(host)

    def trim(self, link: Link, nbytes: int) -> None:
        """Free idle buffers until they have no more than ``nbytes`` in all."""
        with self.lock:
            total = sum(size * len(idle) for size, idle in self.idle.items())
            freed = []
            for size, idle in self.idle.items():
                while idle and total > nbytes:
                    freed.append(idle.popleft())
                    total -= size
        self._free(link, freed)

    def age(self, link: Link) -> None:
        """A context begins. What has been idle for some of them is freed."""
        with self.lock:
            self.ages += 1
            if self.ages % _AGE:
                return
            freed = [self.idle[size].popleft() for size, spare in self.spare.items() for _ in range(min(spare, len(self.idle[size])))]
            self.spare = {size: len(idle) for size, idle in self.idle.items() if idle}
        self._free(link, freed)

    def _free(self, link: Link, hosts: list[HostBuffer]) -> None:
        for host in hosts:
            if host.pinned:
                link.unpin(host.memory)  # which waits for copies; a file's transfers hold what they need


# for each link, as contexts come and go with every step
POOLS: weakref.WeakKeyDictionary[Link, HostPool] = weakref.WeakKeyDictionary()


# ---- files -------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(eq=False, slots=True)
class Slot:
    """A place in a file, and what was last started there. Memory is given up once it is written, so what is read has been written."""

    file: File
    offset: int
    nbytes: int
    request: Event = COMPLETED

    def write(self, memory: Tensor) -> Event:
        self.request = self.file.write_async(memory, self.offset)
        return self.request

    def read(self, memory: Tensor) -> Event:
        self.request = self.file.read_async(memory, self.offset)
        return self.request


class Files:
    """Places in private files: by size, and from the start again when all are free."""

    def __init__(self, paths: Sequence[str], rank: int) -> None:
        self.scratch = Scratch(paths, rank)
        self.files: list[File] = []
        self.free: dict[int, list[Slot]] = {}
        self.current = self.end = self.in_use = self.nbytes = 0  # ``end``: in the file number ``current``

    def take(self, nbytes: int) -> Slot:
        nbytes = round_up(nbytes)
        free = self.free.get(nbytes)
        if free:
            slot = free.pop()
            with contextlib.suppress(OSError):
                slot.request.wait()
        else:
            while self.current < len(self.files) and self.end + nbytes > self.files[self.current].nbytes:
                self.current, self.end = self.current + 1, 0
            if self.current == len(self.files):
                smallest, largest = _SEGMENT_NBYTES
                size = max(nbytes, min(max(smallest, self.nbytes), largest))
                self.files.append(File(self.scratch.paths(f"activations{len(self.files)}"), nbytes=size))
                self.nbytes += size
            slot = Slot(self.files[self.current], self.end, nbytes)
            self.end += nbytes
        self.in_use += 1
        return slot

    def give(self, slot: Slot) -> None:
        self.free.setdefault(slot.nbytes, []).append(slot)
        self.in_use -= 1
        if not self.in_use and all(slot.request.done for slots in self.free.values() for slot in slots):
            self.free.clear()  # other sizes may come
            self.current = self.end = 0
