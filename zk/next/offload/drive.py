"""The drive tier: chunks in a file, with a part of host memory as their cache."""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
import threading
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor

from zk.core.memory import aligned
from zk.next.offload.tiers import Chunk, Dtypes, Fields, Then
from zk.offload.nvme import File, Request, round_up


class FileChunk(Chunk):
    """Fields that rest in a file, one after the other, each on a page of its own."""

    def __init__(self, tier: Drive, file: File, offset: int, dtypes: Dtypes, numel: int) -> None:
        self.tier, self.file, self.offset, self.numel = tier, file, offset, numel
        self.dtypes, self.device = dict(dtypes), torch.device("cpu")
        self.nbytes = nbytes_of(dtypes, numel)
        self.buffer: Tensor | None = None  # (nbytes,) uint8
        self.request: Request | None = None  # a read or a write of the buffer, in flight
        self.opened, self.is_dirty = 0, False

    def fetch(self) -> None:
        with self.tier.lock:
            if self.buffer is None:
                self.buffer = self.tier.acquire(self.nbytes)
                self.request = self.file.read_async(self.buffer, self.offset)
            self.tier.cached[self] = None
            self.tier.cached.move_to_end(self)

    def open(self) -> Fields:
        with self.tier.lock:
            self.fetch()
            self.opened += 1
        self.wait()
        return self.views()

    def views(self) -> Fields:
        """The fields as slices of the buffer."""
        views, start = {}, 0
        for name, dtype in self.dtypes.items():
            nbytes = self.numel * dtype.itemsize
            views[name] = self.buffer[start : start + nbytes].view(dtype)
            start += round_up(nbytes)
        return views

    def wait(self) -> None:
        request = self.request
        if request is not None:
            request.wait()
            self.request = None

    def close(self, changed: bool) -> None:
        with self.tier.lock:
            self.opened -= 1
            self.is_dirty |= changed
            if self.is_dirty and not self.opened and not self.tier.holds_all:
                self.evict()

    def evict(self) -> None:
        """Start to write what has changed."""
        if self.is_dirty:
            self.request = self.file.write_async(self.buffer, self.offset)
            self.is_dirty = False

    def put(self, name: str, values: Tensor) -> None:
        """Copy ``values`` (numel,) to the field, which takes their dtype (at most the one it had)."""
        with self.tier.lock:
            if self.buffer is None:
                self.buffer = self.tier.acquire(self.nbytes)
            self.opened += 1
        self.wait()
        self.dtypes[name] = values.dtype
        self.views()[name].copy_(values)
        self.fetch()  # in the cache it is the newest one now
        self.close(changed=True)

    def load(self, name: str, device: torch.device, then: Then) -> Any:
        values = self.open()[name].to(device, copy=True)  # the buffer will be another chunk's
        self.close(changed=False)
        return then(values)

    def drop(self) -> None:
        self.is_dirty = False  # the next put writes all of it


class Drive:
    """The tier of a folder, private to this process, with ``budget`` bytes of host memory as cache."""

    def __init__(self, path: str, budget: int | None) -> None:
        os.makedirs(path, exist_ok=True)
        self.folder, self.budget = tempfile.mkdtemp(prefix="zk-", dir=path), budget or 0
        self.files: list[File] = []
        self.numbers = itertools.count()
        # chunks with a buffer; the one used longest ago is first
        self.cached: OrderedDict[FileChunk, None] = OrderedDict()
        self.free: dict[int, list[Tensor]] = {}
        self.total_nbytes = self.used_nbytes = self.largest_nbytes = 0
        self.lock = threading.RLock()

    @property
    def holds_all(self) -> bool:
        """Nothing needs to be written, as all of it fits in the budget."""
        return self.total_nbytes <= self.budget

    def chunks(self, dtypes: Dtypes, sizes: list[int]) -> list[Chunk]:
        """Chunks of a new file, filled with zeros."""
        nbytes = [nbytes_of(dtypes, size) for size in sizes]
        file = File(os.path.join(self.folder, f"{next(self.numbers)}.bin"), sum(nbytes))
        self.files.append(file)
        self.total_nbytes += sum(nbytes)
        self.largest_nbytes = max(self.largest_nbytes, *nbytes)
        starts = itertools.accumulate(nbytes, initial=0)
        places = zip(starts, sizes, strict=False)
        return [FileChunk(self, file, start, dtypes, size) for start, size in places]

    def acquire(self, nbytes: int) -> Tensor:
        """A buffer (nbytes,) uint8.

        Chunks used longest ago give theirs up once the budget, at least of a few chunks, is used.
        """
        room = max(self.budget, 8 * self.largest_nbytes)
        for chunk in list(self.cached):
            if self.used_nbytes + nbytes <= room or self.free.get(nbytes):
                break
            if not chunk.opened:
                self.reclaim(chunk)
        if self.free.get(nbytes):
            return self.free[nbytes].pop()
        while self.free and self.used_nbytes + nbytes > room:  # of other sizes
            size, buffers = self.free.popitem()
            self.used_nbytes -= size * len(buffers)
        self.used_nbytes += nbytes
        return aligned(nbytes)

    def reclaim(self, chunk: FileChunk) -> None:
        """Take a chunk's buffer, once the drive has what is in it."""
        chunk.evict()
        chunk.wait()
        self.free.setdefault(chunk.nbytes, []).append(chunk.buffer)
        chunk.buffer = None
        del self.cached[chunk]

    def close(self) -> None:
        for file in self.files:
            file.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def nbytes_of(dtypes: Dtypes, numel: int) -> int:
    return sum(round_up(numel * dtype.itemsize) for dtype in dtypes.values())
