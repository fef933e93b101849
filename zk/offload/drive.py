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
from zk.offload.file import File
from zk.offload.tiers import ALL, CPU, Arrival, Chunk, Dtypes, Fields, HostChunk, Then, Tier, link_to

Kind = tuple[str, ...]  # the names of fields
SPARE = 4  # buffers of each kind: one is in use, two are read ahead, one is written behind


class FileChunk(HostChunk):
    """Fields that rest in a file, one after the other, each on a page of its own."""

    def __init__(self, tier: Drive, offset: int, dtypes: Dtypes, numel: int):
        super().__init__({}, numel, tier.near)
        self.tier, self.lock, self.offset = tier, tier.lock, offset
        self.dtypes, self.kind = dtypes, tuple(dtypes)
        self.capacity = capacity_of(nbytes_of(dtypes, numel))  # a field's first dtype is its widest
        self.buffer: Any = None  # (capacity,) uint8
        self.opened, self.is_ahead = 0, False  # fetched, and not used yet

    def spans(self, part: slice) -> list[tuple[int, int]]:
        """First and last byte of a part of each field, in the buffer."""
        first, last, _ = part.indices(self.numel)
        found, start = [], 0
        for dtype in self.dtypes.values():
            found.append((start + first * dtype.itemsize, start + last * dtype.itemsize))
            start += round_up(self.numel * dtype.itemsize)
        return found

    def lay_out(self) -> None:
        """Make fields of the buffer."""
        self.nbytes = nbytes_of(self.dtypes, self.numel)
        pairs = zip(self.dtypes.items(), self.spans(ALL), strict=True)
        self.fields = {name: self.buffer[i:j].view(dtype) for (name, dtype), (i, j) in pairs}

    def fetch(self) -> None:
        with self.lock:
            self.is_ahead = self.read(must=False)

    def read(self, must: bool) -> bool:
        """Start to read, if need be; False where that ``must`` not be and there is no buffer."""
        if self.tier.acquire(self, must):
            try:
                self.lay_out()
                self.note(self.tier.file.read_async(self.buffer[: self.nbytes], self.offset))
            except BaseException:  # else what is in it would pass for what was read
                self.tier.release(self)
                raise
        return self.buffer is not None

    def open(self, part: slice = ALL) -> Fields:
        with self.lock:
            self.read(must=True)
            self.opened, self.is_ahead = self.opened + 1, False
        return super().open(part)

    def close(self, changed: bool, part: slice = ALL) -> None:
        """Start to write a part that has changed: it begins with a page, and so does each field."""
        with self.lock:
            self.opened -= 1
            if not changed:
                return
            after = self.moving(part)
            for start, stop in [(0, self.nbytes)] if part == ALL else self.spans(part):
                pages, place = self.buffer[start : round_up(stop)], self.offset + start
                self.note(self.tier.file.write_async(pages, place, after), part)

    def put(self, name: str, values: Tensor) -> None:
        with self.lock:
            self.wait()
            self.dtypes = {name: values.dtype}
            self.tier.acquire(self)
            self.lay_out()
            self.opened, self.is_ahead = self.opened + 1, False
        if values.device == CPU:
            self.fields[name].copy_(values)
        else:
            self.note(self.link.offload(self.fields[name], values))
        self.close(changed=True)

    def load(self, name: str, device: torch.device, then: Then) -> Arrival:
        values = self.open()[name]
        if device != CPU:
            arrival = super().load(name, device, then)
            self.close(changed=False)
            return arrival
        with self.lock:
            self.close(changed=False)
            if self.opened:
                values = empty(self.numel, values.dtype, CPU).copy_(values)
            else:  # the buffer is given away
                self.tier.release(self)
        return Arrival(then(values))

    def drop(self) -> None:
        with self.lock:
            if self.buffer is not None and not self.opened:
                self.tier.release(self)


class Drive(Tier):
    """The tier of folders, striped over them: all is written and read once in each use.

    What the drive refuses raises in ``open``, ``put`` and ``load``, again and again: the run has lost
    what it could not write.
    """

    chunk_numel = 1 << 20  # so that several fit in the buffers

    def __init__(self, folders: Sequence[str], near: torch.device):
        self.file, self.near, self.link = File(folders), near, link_to(near)
        # chunks with a buffer; the one used longest ago is first
        self.cached: OrderedDict[FileChunk, None] = OrderedDict()
        self.used: Counter[Kind] = Counter()  # bytes of their buffers
        self.room: Counter[Kind] = Counter()  # that these may have
        self.lock = threading.RLock()

    def chunks(self, dtypes: Dtypes, sizes: list[int]) -> list[Chunk]:
        """Chunks of a new file, filled with zeros."""
        nbytes, kind = [nbytes_of(dtypes, size) for size in sizes], tuple(dtypes)
        starts = itertools.accumulate(nbytes, initial=self.file.extend(sum(nbytes)))
        self.room[kind] = max(self.room[kind], SPARE * max(map(capacity_of, nbytes), default=0))
        pairs = zip(starts, sizes, strict=False)
        return [FileChunk(self, start, dtypes, size) for start, size in pairs]

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
            if not idle and must:
                break  # all are in use
            if not idle:
                return False
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
        chunk.buffer, chunk.fields = None, {}

    def close(self) -> None:
        self.file.close()
        for chunk in list(self.cached):
            self.release(chunk)
        trim()


def nbytes_of(dtypes: Dtypes, numel: int) -> int:
    return sum(round_up(numel * dtype.itemsize) for dtype in dtypes.values())


def capacity_of(nbytes: int) -> int:
    """The size of a buffer for ``nbytes``: four to each power of two, so that chunks share them."""
    return round_up(nbytes, max(1 << max(nbytes.bit_length() - 3, 0), 4096))
