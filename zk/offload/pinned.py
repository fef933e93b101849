"""Page-locked host memory, one arena for each optimizer, whose blocks come and go behind the copies that use them.

Locking pages is slow, as each must exist, so all of it happens once, at the first acquire. torch's and cupy's pinned pools round each block
up to a power of two; this one takes whole pages, and joins neighbours as soon as they are free. Blocks that last are laid from the low end,
blocks that come and go from the high end, so that between two steps the free memory is one piece, and what fitted once fits again. What was
released belongs to its gap at once, though copies of it still run, and only the ends of gaps are given away: a block put between two such
copies would cut the gap, and what fits would be a matter of timing.

A block is a ``Record``. It is released when the last copy has been asked for, with the event after which its memory may be used again::

    record = arena.acquire(numel, torch.bfloat16)
    ...
    record.release(after=link.upload(target, record.tensor, [link.mark()]))

Blocks are page-aligned, so the same memory serves O_DIRECT (nvme.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import resource
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from zk.core.events import COMPLETED, Event
from zk.core.logs import rank_log
from zk.core.memory import staging
from zk.offload.nvme import round_up
from zk.offload.streams import Link

Gap = tuple[int, int]  # start, stop: bytes from the region's beginning, whole pages


def _joined(gaps: list[Gap]) -> list[Gap]:
    """The same bytes in order, neighbours as one."""
    joined: list[Gap] = []
    for start, stop in sorted(gaps):
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            assert not joined or joined[-1][1] < start, "memory is free twice"
            joined.append((start, stop))
    return joined


@dataclasses.dataclass(slots=True, eq=False)
class _Region:
    """One mapping and one registration."""

    memory: Tensor  # (nbytes,) uint8
    gaps: list[Gap]  # what nobody has, in order, none touching the next; copies may still be in flight in some of it
    pinned: bool = False


@dataclasses.dataclass(slots=True, eq=False)
class _Block:
    """Pages of a region, and what must be over before they are used again."""

    region: _Region
    start: int
    stop: int
    after: Event = COMPLETED

    def overlaps(self, other: _Block) -> bool:
        return self.region is other.region and self.start < other.stop and other.start < self.stop


@dataclasses.dataclass(slots=True, eq=False)
class Record:
    """Memory that somebody has, until ``release``."""

    tensor: Tensor  # (numel,) page-aligned, host; a storage of its own, as what is a copy's business is that block and no other
    _arena: Arena
    _block: _Block | None  # None: no elements, or released
    _released: bool = False

    def release(self, after: Event = COMPLETED) -> None:
        """The memory may be handed out again once ``after`` is done. Its content must not be touched from here on."""
        arena, block = self._arena, self._block
        with arena._lock:
            assert not self._released, "a record is released twice"
            self._block, self._released = None, True
            if block is not None and not arena._closed:
                block.region.gaps = _joined([*block.region.gaps, (block.start, block.stop)])
                block.after = after
                arena._pending.append(block)


class Arena:
    """Page-locked host memory for the copies of one optimizer. All methods may be called from any thread.

    Args:
        link: which device to register the memory for.
        nbytes: how much will be needed at once, each block in whole pages of 4096 bytes.

    Where the system refuses to lock pages, there is one warning and the memory is pageable: copies are slower, and the same otherwise.
    """

    def __init__(self, link: Link, nbytes: int) -> None:
        assert not link.joined, "device and host memory are the same here: nothing is copied, and nothing needs page-locked memory"
        self.link = link
        self.is_pinned = True  # False once the system has refused
        self._lock, self._closed = threading.Lock(), False
        self._regions: list[_Region] = []
        self._pending: list[_Block] = []  # released, oldest first, and not yet known to be over
        # pages must not be unmapped while they are registered, so this comes first, at the end of the arena or of the process
        self._unlock = weakref.finalize(self, _unlock, link, self._regions, self._pending, os.getpid())
        self._map(round_up(nbytes))

    @property
    def nbytes(self) -> int:
        """Of all regions."""
        return sum(region.memory.nbytes for region in self._regions)

    def acquire(self, numel: int, dtype: torch.dtype, lasting: bool = False) -> Record:
        """A record with a tensor (numel,), content undefined. ``lasting``: it will not be released before the arena is closed.

        Waits, for the oldest first, while copies from released blocks are all that is in the way, and grows where there is no room.
        """
        assert numel >= 0, numel
        nbytes = round_up(numel * dtype.itemsize)
        while True:
            with self._lock:
                assert not self._closed, "acquire from an arena that was closed"
                if not nbytes:
                    return Record(torch.empty(0, dtype=dtype), self, None)
                self._pin()
                self._pending[:] = [block for block in self._pending if not block.after.done]
                places = self._places(nbytes, lasting)
                if not places:
                    self._map(nbytes)
                    self._pin()
                    places = self._places(nbytes, lasting)
                block = next((place for place in places if not any(place.overlaps(other) for other in self._pending)), None)
                if block is not None:
                    self._cut(block)
                    memory = block.region.memory.numpy().data
                    return Record(torch.frombuffer(memory, dtype=dtype, count=numel, offset=block.start), self, block)
                oldest = self._pending[0].after
            oldest.wait()

    @contextlib.contextmanager
    def unlocked(self) -> Iterator[None]:
        """Context: no page is locked, so that they can be given back. Nothing is in flight, and nothing is acquired meanwhile."""
        with self._lock:
            for region in self._regions:
                if region.pinned:
                    self.link.unpin(region.memory)
                    region.pinned = False
        try:
            yield
        finally:
            with self._lock:
                self._pin()

    def spans(self, free: bool) -> list[tuple[int, int]]:
        """Addresses that nobody has (``free``), or of pages that are locked."""
        with self._lock:
            starts = [(region.memory.data_ptr(), region) for region in self._regions]
            if free:
                return [(first + start, first + stop) for first, region in starts for start, stop in region.gaps]
            return [(first, first + region.memory.nbytes) for first, region in starts if region.pinned]

    def close(self) -> None:
        """Wait until nothing released is in flight and unlock the pages. Tensors that are still out stay readable."""
        with self._lock:
            self._closed = True
        self._unlock()

    # ---- blocks (with the lock held) -----------------------------------------------------------------------------------------

    def _places(self, nbytes: int, lasting: bool) -> list[_Block]:
        """Places where a block may lie, the best one first."""
        fitting = [(region, start, stop) for region in self._regions for start, stop in region.gaps if stop - start >= nbytes]
        if lasting:  # it will be there for good, so only the one place is right
            return [_Block(region, start, start + nbytes) for region, start, _ in fitting[:1]]
        fitting.sort(key=lambda gap: (gap[2] - gap[1], -gap[2]))
        return [place for region, start, stop in fitting for place in (_Block(region, stop - nbytes, stop), _Block(region, start, start + nbytes))]

    def _cut(self, block: _Block) -> None:
        """Take ``block`` from the end of the gap that it lies at."""
        gaps = block.region.gaps
        index = next(index for index, (start, stop) in enumerate(gaps) if start <= block.start and block.stop <= stop)
        start, stop = gaps[index]
        gaps[index : index + 1] = [gap for gap in ((start, block.start), (block.stop, stop)) if gap[0] < gap[1]]

    # ---- regions (with the lock held) ----------------------------------------------------------------------------------------

    def _map(self, nbytes: int) -> None:
        """One more region. Its pages exist once they are pinned, or written."""
        if nbytes:
            self._regions.append(_Region(staging(nbytes), [(0, nbytes)]))

    def _pin(self) -> None:
        """Register what is not yet. After one refusal nothing more is tried: what refuses is a limit on all of it together.

        Others wait meanwhile, as they do for an allocation: this happens once.
        """
        for region in self._regions:
            if region.pinned or not self.is_pinned:
                continue
            try:
                self.link.pin(region.memory)
                region.pinned = True
            except OSError as error:
                self.is_pinned = False
                rank_log.warning("%s", _refusal(region.memory.nbytes, error))


def _unlock(link: Link, regions: list[_Region], pending: list[_Block], pid: int) -> None:
    """End an arena: what it held, without the arena. Of several errors the first is raised: after some, CUDA refuses every call."""
    if os.getpid() != pid:
        return  # a forked child: the registration, and what is in flight, are its parent's
    first: BaseException | None = None
    try:
        for block in pending:
            block.after.wait()
    except BaseException as error:
        first = error
    pending.clear()
    for region in regions:
        if region.pinned:
            region.pinned = False
            try:
                link.unpin(region.memory)
            except OSError as error:
                first = first or error
    regions.clear()
    if first is not None:
        raise first


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.3f} MiB"  # three decimals: a page shows


def _refusal(nbytes: int, error: OSError) -> str:
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    unlimited = limit == resource.RLIM_INFINITY
    if in_wsl():
        remedy = "WSL locks only part of its memory: give it more with memory= under [wsl2] in .wslconfig"
    elif unlimited:
        remedy = "free host memory, or use fewer or smaller units"
    else:
        remedy = "run 'ulimit -l unlimited' first, or start the container with docker run --ulimit memlock=-1"
    return (
        f"the system does not page-lock {_mib(nbytes)} of host memory ({error}), so copies are slower and do not run beside the host; "
        f"RLIMIT_MEMLOCK is {'unlimited' if unlimited else _mib(limit)}; {remedy}"
    )


def in_wsl() -> bool:
    """Tell if this is Linux in Windows."""
    try:
        return "microsoft" in Path("/proc/version").read_text().lower()
    except OSError:  # no /proc
        return False
