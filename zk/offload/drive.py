"""The drive tier: chunks in a file, which pass through a few buffers of host memory.

Fetch reads ahead, close writes behind. What a budget of host memory holds is not here: it rests in
host memory, and is never written (zk.placement).
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from zk.memory import empty, round_up, trim
from zk.offload.file import File, Request
from zk.offload.tiers import ALL, CPU, Arrival, Chunk, Dtypes, Event, Fields, Then, link_to, overlap

Kind = tuple[str, ...]  # the names of fields
SPARE = 4  # buffers of each kind: one is in use, two are read ahead, one is written behind


class FileChunk(Chunk):
    """Fields that rest in a file, one after the other, each on a page of its own."""

    stays, is_away = False, True

    def __init__(self, tier: Drive, offset: int, dtypes: Dtypes, numel: int) -> None:
        self.tier, self.file, self.offset, self.numel = tier, tier.file, offset, numel
        self.dtypes, self.device, self.link = dict(dtypes), CPU, tier.link
        self.kind = tuple(dtypes)
        self.capacity = capacity_of(self.nbytes)  # a field's first dtype is its widest
        self.buffer: Any = None  # (capacity,) uint8
        self.reading: Request | None = None
        self.writing: list[tuple[slice, Request]] = []  # parts
        self.arriving: Event | None = None  # the last copies between the buffer and the device
        self.leaving: Event | None = None
        self.opened, self.is_ahead = 0, False  # fetched, and not used yet

    @property
    def nbytes(self) -> int:
        """Of the fields, as they are now."""
        return nbytes_of(self.dtypes, self.numel)

    def fetch(self) -> None:
        with self.tier.lock:
            self.is_ahead = self.read(must=False)

    def read(self, must: bool) -> bool:
        """Start to read, if need be; False where that ``must`` not be and there is no buffer."""
        if self.tier.acquire(self, must):
            self.reading = self.file.read_async(self.buffer[: self.nbytes], self.offset)
        return self.buffer is not None

    def spans(self, part: slice) -> dict[str, tuple[int, int]]:
        """First and last byte of a part of each field, in the buffer."""
        first, last, _ = part.indices(self.numel)
        found, start = {}, 0
        for name, dtype in self.dtypes.items():
            found[name] = start + first * dtype.itemsize, start + last * dtype.itemsize
            start += round_up(self.numel * dtype.itemsize)
        return found

    def open(self, part: slice = ALL) -> Fields:
        with self.tier.lock:
            self.read(must=True)
            self.opened, self.is_ahead = self.opened + 1, False
        self.wait(part)
        spans = self.spans(part).items()
        return {name: self.buffer[i:j].view(self.dtypes[name]) for name, (i, j) in spans}

    def wait(self, part: slice = ALL) -> None:
        """Wait until nothing is in flight from or to a part of the buffer."""
        if self.reading is not None:
            self.reading.wait()
        self.wait_for_writes(part)
        self.wait_for_copies()

    def wait_for_writes(self, part: slice) -> None:
        for written, request in self.writing:
            if overlap(written, part, self.numel):
                request.wait()

    def wait_for_copies(self) -> None:
        for event in filter(None, (self.arriving, self.leaving)):
            event.wait()

    def close(self, changed: bool, part: slice = ALL) -> None:
        """Start to write a part that has changed: it begins with a page, and so does each field."""
        with self.tier.lock:
            self.opened -= 1
            spans = [(0, self.nbytes)] if part == ALL else self.spans(part).values()
            if changed:
                self.wait_for_writes(part)
                self.writing = [pair for pair in self.writing if not pair[1].done]
            for start, stop in spans if changed else ():
                pages, place = self.buffer[start : round_up(stop)], self.offset + start
                self.writing.append((part, self.file.write_async(pages, place, [e for e in [self.arriving] if e])))

    def put(self, name: str, values: Tensor) -> None:
        """Copy ``values`` (numel,) to the field, which takes their dtype."""
        with self.tier.lock:
            self.wait()
            self.dtypes[name], self.reading = values.dtype, None
            self.tier.acquire(self)
            self.opened, self.is_ahead = self.opened + 1, False
        start, stop = self.spans(ALL)[name]
        field = self.buffer[start:stop].view(values.dtype)
        if self.link is None or values.device == CPU:
            field.copy_(values)
        else:
            self.arriving = self.link.offload(field, values)
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
        """``values`` for whoever keeps them: of the buffer, which is given away, or a copy."""
        with self.tier.lock:
            self.close(changed=False)
            if self.opened:
                return empty(self.numel, values.dtype, CPU).copy_(values)
            self.tier.release(self)
        return values

    def drop(self) -> None:
        with self.tier.lock:
            if self.buffer is not None and not self.opened:
                self.wait()
                self.tier.release(self)


class Drive:
    """The tier of folders, striped over them: all is written and read once in each use.

    What the drive refuses raises in ``open``, ``put`` and ``load``, again and again: the run has lost
    what it could not write.
    """

    chunk_numel = 1 << 20  # so that several fit in the buffers

    def __init__(self, folders: Sequence[str], near: torch.device) -> None:
        self.file, self.link = File(folders), link_to(near)
        # chunks with a buffer; the one used longest ago is first
        self.cached: OrderedDict[FileChunk, None] = OrderedDict()
        self.used: Counter[Kind] = Counter()  # bytes of their buffers
        self.room: Counter[Kind] = Counter()  # that these may have
        self.lock = threading.RLock()

    def chunks(self, dtypes: Dtypes, sizes: list[int]) -> list[Chunk]:
        """Chunks of a new file, filled with zeros."""
        nbytes, kind = [nbytes_of(dtypes, size) for size in sizes], tuple(dtypes)
        starts = itertools.accumulate(nbytes, initial=self.file.extend(sum(nbytes)))
        most = SPARE * max(map(capacity_of, nbytes), default=0)
        self.room[kind] = max(self.room[kind], most)
        places = zip(starts, sizes, strict=False)
        return [FileChunk(self, start, dtypes, size) for start, size in places]

    def acquire(self, chunk: FileChunk, must: bool = True) -> bool:
        """Give ``chunk`` a buffer, for which others of its kind make room; True if it had none.

        What was read ahead and not used yet does so only for one that ``must`` be had.
        """
        if chunk.buffer is not None:
            self.cached.move_to_end(chunk)
            return False
        size, kind = chunk.capacity, chunk.kind
        while self.used[kind] + size > self.room[kind]:
            closed = [other for other in self.cached if other.kind == kind and not other.opened]
            idle = [other for other in closed if not other.is_ahead] or closed * must
            if not idle and not must:
                return False
            if not idle:
                break  # all are in use
            idle[0].wait()  # until the drive has what is in it
            self.release(idle[0])
        chunk.buffer = empty(size, torch.uint8, CPU, self.link)
        self.cached[chunk] = None
        self.used[kind] += size
        return True

    def release(self, chunk: FileChunk) -> None:
        """Leave a chunk's buffer to whoever has a view of it; its memory is used again after that."""
        self.used[chunk.kind] -= chunk.buffer.nbytes
        del self.cached[chunk]
        chunk.buffer = None

    def close(self) -> None:
        self.file.close()
        for chunk in self.cached:
            chunk.wait_for_copies()
            chunk.buffer = None
        self.cached.clear()
        trim()


def nbytes_of(dtypes: Dtypes, numel: int) -> int:
    return sum(round_up(numel * dtype.itemsize) for dtype in dtypes.values())


def capacity_of(nbytes: int) -> int:
    """The size of a buffer for ``nbytes``: four to each power of two, so that chunks share them."""
    return round_up(nbytes, max(1 << max(nbytes.bit_length() - 3, 0), 4096))
