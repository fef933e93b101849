"""The drive tier: chunks in a file, with a part of host memory as their cache.

What fits in the budget stays in memory, parameters first, and is never written. The rest passes
through a few buffers: fetch reads ahead, close writes behind.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from zk.memory import empty, round_up, trim
from zk.offload.file import File, Request
from zk.offload.link import Arrival, CudaLink, Event, link_to
from zk.offload.tiers import ALL, CPU, Chunk, Dtypes, Fields, Then, overlap

SPARE = 4  # buffers of a size: one is in use, two are read ahead, one is written behind


class FileChunk(Chunk):
    """Fields that rest in a file, one after the other, each on a page of its own."""

    def __init__(self, tier: Drive, offset: int, dtypes: Dtypes, numel: int) -> None:
        self.tier, self.file, self.offset, self.numel = tier, tier.file, offset, numel
        self.dtypes, self.device, self.link = dict(dtypes), CPU, tier.link
        self.buffer: Tensor | None = None  # (capacity,) uint8
        self.reading: Request | None = None
        self.writing: list[tuple[slice, Request]] = []  # parts
        self.dirty: list[slice] = []  # parts that the file has not
        self.arriving: Event | None = None  # the last copies between the buffer and the device
        self.leaving: Event | None = None
        self.opened, self.is_ahead = 0, False  # fetched, and not used yet
        self.is_kept, self.is_shown = False, False

    @property
    def stays(self) -> bool:  # type: ignore[override]
        return self.is_kept and self.link is None

    @property
    def nbytes(self) -> int:
        """Of the fields, as they are now."""
        return nbytes_of(self.dtypes, self.numel)

    def fetch(self) -> None:
        with self.tier.lock:
            self.is_ahead |= self.read(must=False)

    def read(self, must: bool) -> bool:
        """Start to read, if need be; False where that ``must`` not be and there is no buffer."""
        if self.buffer is None:
            self.buffer = self.tier.acquire(self, must)
            if self.buffer is not None:
                self.reading = self.file.read_async(self.buffer[: self.nbytes], self.offset)
        if self.buffer is not None:
            self.tier.touch(self)
        return self.buffer is not None

    def open(self, part: slice = ALL) -> Fields:
        with self.tier.lock:
            self.read(must=True)
            self.opened, self.is_ahead = self.opened + 1, False
        self.wait(part)
        return {name: field[part] for name, field in self.views().items()}

    def views(self) -> Fields:
        """The fields as slices of the buffer."""
        assert self.buffer is not None
        views, start = {}, 0
        for name, dtype in self.dtypes.items():
            nbytes = self.numel * dtype.itemsize
            views[name] = self.buffer[start : start + nbytes].view(dtype)
            start += round_up(nbytes)
        return views

    def wait(self, part: slice = ALL) -> None:
        """Wait until nothing is in flight from or to a part of the buffer."""
        if self.reading is not None:
            self.reading.wait()
        for written, request in self.writing:
            if overlap(written, part, self.numel):
                request.wait()
        self.wait_for_copies()

    def wait_for_copies(self) -> None:
        for event in (self.arriving, self.leaving):
            if event is not None:
                event.wait()

    def close(self, changed: bool, part: slice = ALL) -> None:
        with self.tier.lock:
            self.opened -= 1
            if changed:
                self.dirty = [ALL] if self.is_kept else [*self.dirty, part]
            if not self.opened and not self.is_kept:
                self.evict()

    def evict(self) -> None:
        """Start to write what has changed."""
        self.writing = [pair for pair in self.writing if not pair[1].done or pair[1].error]
        assert self.buffer is not None
        for part in [ALL] if ALL in self.dirty else self.dirty:
            for field in self.views().values() if part != ALL else [self.buffer[: self.nbytes]]:
                place = self.offset + field[part].data_ptr() - self.buffer.data_ptr()
                request = self.file.write_async(field[part], place, self.arriving)
                self.writing.append((part, request))
        self.dirty = []

    def put(self, name: str, values: Tensor) -> None:
        """Copy ``values`` (numel,) to the field, which takes their dtype."""
        with self.tier.lock:
            if self.buffer is not None:
                self.wait()
            self.dtypes[name] = values.dtype
            if self.buffer is not None and self.buffer.numel() < self.nbytes:
                self.tier.release(self)
            if self.buffer is None:
                self.buffer, self.reading = self.tier.acquire(self), None
            self.tier.touch(self)
            self.opened, self.is_ahead = self.opened + 1, False
        field = self.views()[name]
        if values.device != CPU:
            assert self.link is not None
            self.arriving = self.link.offload(field, values)
        elif field.data_ptr() != values.data_ptr():
            field.copy_(values)
        self.close(changed=True)

    def load(self, name: str, device: torch.device, then: Then) -> Arrival:
        values = self.open()[name]
        if device == CPU or self.link is None:
            return Arrival(then(self.taken(values)))
        target = torch.empty(self.numel, dtype=values.dtype, device=device)
        self.leaving = self.link.upload(target, values)
        self.close(changed=False)
        return self.link.beside(target, then)

    def taken(self, values: Tensor) -> Tensor:
        """``values`` for whoever keeps them: what stays, or the buffer, which is given away."""
        with self.tier.lock:
            self.close(changed=False)
            if self.is_kept:
                self.is_shown = True
            elif self.opened:
                values = empty(self.numel, values.dtype, CPU).copy_(values)
            else:
                self.tier.give_away(self)
        return values

    def drop(self) -> None:
        with self.tier.lock:
            self.dirty = []  # the next put writes all of it
            if self.buffer is not None and not self.opened:
                self.wait()
                self.tier.release(self)


class Drive:
    """The tier of folders, striped over them, with ``budget`` bytes of host memory as cache.

    Without a budget, everything is written and read once in each use. What the drive refuses raises
    in ``open``, ``put`` and ``load``, again and again: the run has lost what it could not write.
    """

    chunk_numel = 1 << 20  # so that several fit in the buffers

    def __init__(self, folders: Sequence[str], budget: int | None, near: torch.device) -> None:
        self.file, self.budget, self.near = File(folders), budget or 0, near
        self.link: CudaLink | None = None
        self.all: list[FileChunk] = []
        # chunks with a buffer; the one used longest ago is first
        self.cached: OrderedDict[FileChunk, None] = OrderedDict()
        self.free: defaultdict[int, list[Tensor]] = defaultdict(list)  # by their size
        self.made: Counter[int] = Counter()  # buffers of each size
        self.used_nbytes = 0
        self.largest: dict[tuple[str, ...], int] = {}  # chunk of each kind
        self.lock = threading.RLock()

    def chunks(self, dtypes: Dtypes, sizes: list[int]) -> list[Chunk]:
        """Chunks of a new file, filled with zeros."""
        self.link = link_to(self.near)
        nbytes = [nbytes_of(dtypes, size) for size in sizes]
        starts = itertools.accumulate(nbytes, initial=self.file.extend(sum(nbytes)))
        places = zip(starts, sizes, strict=False)
        made = [FileChunk(self, start, dtypes, size) for start, size in places]
        kind = tuple(dtypes)
        with self.lock:
            self.all += made
            self.largest[kind] = max(self.largest.get(kind, 0), *map(capacity_of, nbytes))
            if self.budget:
                self.plan()
        return list(made)

    # ---- buffers (with the lock held) ------------------------------------------------------------

    @property
    def passing_nbytes(self) -> int:
        """Of the buffers that chunks pass through which do not stay."""
        # parameters that were read are given away: one is read ahead less
        return sum((SPARE - ("param" in kind)) * most for kind, most in self.largest.items())

    def plan(self) -> None:
        """Decide what stays: all, or parameters first, which are used most often."""
        room = self.budget
        if sum(chunk.nbytes for chunk in self.all) > room:
            room -= self.passing_nbytes

        def order(chunk: FileChunk) -> tuple[bool, bool]:
            return not chunk.is_shown, "param" not in chunk.dtypes

        for chunk in sorted(self.all, key=order):
            chunk.is_kept = chunk.is_shown or chunk.nbytes <= room
            room -= chunk.nbytes if chunk.is_kept else 0

    def touch(self, chunk: FileChunk) -> None:
        self.cached[chunk] = None
        self.cached.move_to_end(chunk)

    def acquire(self, chunk: FileChunk, must: bool = True) -> Tensor | None:
        """A buffer for ``chunk``; others that do not stay give theirs up for it.

        What was read ahead and not used yet does so only for one that ``must`` be had.
        """
        size = round_up(chunk.nbytes) if chunk.is_kept else capacity_of(chunk.nbytes)
        room = max(self.budget, self.passing_nbytes)
        while not self.free[size] and self.used_nbytes + size > room:
            idle = [other for other in self.cached if not other.opened and not other.is_kept]
            idle = [other for other in idle if not other.is_ahead] or idle * must
            alike = [
                other for other in idle if other.buffer is not None and other.buffer.numel() == size
            ]
            if alike and self.made[size] >= SPARE:
                self.reclaim(alike[0])
            elif not self.discard(size):
                if not idle and not must:
                    return None
                if not idle:
                    break  # all are in use
                self.reclaim(idle[0])
        if self.free[size]:
            return self.free[size].pop()
        self.used_nbytes += size
        self.made[size] += 1
        return empty(size, torch.uint8, CPU, self.link)

    def reclaim(self, chunk: FileChunk) -> None:
        """Take a chunk's buffer, once the drive has what is in it."""
        chunk.evict()
        chunk.wait()
        self.release(chunk)

    def discard(self, size: int) -> bool:
        """Give back a buffer of another size that is free."""
        for other, buffers in self.free.items():
            if buffers and other != size:
                buffers.pop()
                self.forget(other)
                return True
        return False

    def release(self, chunk: FileChunk) -> None:
        """Take a chunk's buffer, with which nothing is in flight."""
        buffer = self.take(chunk)
        self.free[buffer.numel()].append(buffer)

    def give_away(self, chunk: FileChunk) -> None:
        """Leave a chunk's buffer to whoever has a view of it."""
        self.forget(self.take(chunk).numel())

    def take(self, chunk: FileChunk) -> Tensor:
        buffer, chunk.buffer = chunk.buffer, None
        assert buffer is not None
        del self.cached[chunk]
        return buffer

    def forget(self, size: int) -> None:
        self.used_nbytes -= size
        self.made[size] -= 1

    def close(self) -> None:
        self.file.close()
        for chunk in self.all:
            chunk.wait_for_copies()
            chunk.buffer = None
        self.cached.clear()
        self.free.clear()
        trim()


def nbytes_of(dtypes: Dtypes, numel: int) -> int:
    return sum(round_up(numel * dtype.itemsize) for dtype in dtypes.values())


def capacity_of(nbytes: int) -> int:
    """The size of a buffer for ``nbytes``: four to each power of two, so that chunks share them."""
    return round_up(nbytes, max(1 << max(nbytes.bit_length() - 3, 0), 4096))
