"""Pieces of one rank's file in a bounded number of host buffers while they are worked on: fetch -> evict.

A piece is asked for ahead (``fetch``), opened when it is needed (``open`` waits for what is missing), and put back: dropped, written behind
(``evict``), or kept for the next use (``keep``). Buffers are page-aligned, so that transfers bypass the page cache.

Frozen parameters may lie in files of the user's instead, which are read and never written. A piece of them is fetched as all others are, and dropped
after its use; the first write of something else gives it room in a file of zk's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from zk.core.events import COMPLETED, Event, Ticket
from zk.core.memory import staging, widen_
from zk.core.timeline import phase
from zk.offload.cpu_adam import sum_of_squares
from zk.offload.nvme import ALIGN, Excerpts, File, Request, round_up
from zk.offload.packing import PACKED, Packing
from zk.offload.transfer import Arrival, Transfer, evenly
from zk.offload.worker import Worker


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive bytes of the file, or of what lies in files of the user's."""

    offset: int  # a multiple of a page, but for parameters of one byte
    nbytes: int


class State(enum.IntEnum):
    """The use of a buffer; what comes first is given up first, where another piece needs room."""

    CACHED = 0  # nobody works on it, and the file has the same: it stays until its buffer is needed
    EVICTING = 1  # a write, or a copy to the device, is emptying it
    FETCHING = 2  # a read is filling it
    KEPT = 3  # changed, nobody works on it, and the file does not have it yet
    OPEN = 4  # somebody works on it


@dataclasses.dataclass(slots=True)
class _Slot:
    piece: Piece
    buffer: Tensor  # (at least piece.nbytes,) uint8
    state: State = State.OPEN
    users: int = 0  # who work on it, while it is open: one who changes it, or some who read, and those that Ctrl-C has ended
    request: Event = COMPLETED  # the transfer in flight
    dirty: bool = False  # the file does not have what is here, as far as is known

    def become(self, state: State) -> None:
        """Note a state without a transfer in flight."""
        self.state, self.request = state, COMPLETED


class Spill:
    """One rank's bytes on the NVMe tier. Space is handed out once, from the first byte on.

    Args:
        open_file: opens a file of so many bytes, of which pieces are read that begin at the offsets given; called in ``create``, for all
            space that was asked for since the last time.
    """

    def __init__(self, open_file: Callable[[int, Iterable[int]], File]) -> None:
        self.open_file = open_file
        self.lock = threading.RLock()  # of all buffers: training and the update beside it both move pieces
        self.files: list[tuple[int, File]] = []  # each with the offset of its first byte, in order
        self.nbytes = self.created = 0  # handed out, and in files
        self.starts: set[int] = set()  # of pieces that are in no file yet
        self.fetches = self.hits = 0  # pieces that were opened, and of them: there when it was needed
        self.stall_ms = 0.0  # time in which nothing else happened, waiting for the drive
        self.writes: dict[tuple[int, int], Request] = {}  # by begin and end: the write in flight there, or the last one, which failed
        self.buffers: list[Buffers] = []

    def reserve(self, nbytes: int, starts: Iterable[int] = (0,)) -> int:
        """The offset of ``nbytes`` bytes, whole pages, which exist after the next ``create``. ``starts``: of pieces that are read, in these."""
        offset, self.nbytes = self.nbytes, self.nbytes + round_up(max(1, nbytes))  # pieces are told apart by their offsets, empty ones too
        self.starts |= {offset + start for start in starts}
        return offset

    def borrow(self, file: Excerpts) -> int:
        """The offset of the bytes of ``file``, which are the user's.

        They take a range of offsets at once, so this comes before anything is reserved that is in no file yet.
        """
        offset = self.created
        assert self.nbytes == offset
        self.files.append((offset, file))
        self.nbytes = self.created = offset + round_up(file.nbytes)
        return offset

    def create(self) -> None:
        """Create a file with room for all that was reserved since the last one; OSError if the drive has not so much."""
        nbytes, starts = self.nbytes - self.created, {start - self.created for start in self.starts}
        self.nbytes, self.starts = self.created, set()
        if nbytes or not self.files:
            self.files.append((self.created, self.open_file(nbytes, starts)))
            self.nbytes = self.created = self.created + nbytes

    def _place(self, offset: int) -> tuple[File, int]:
        """The file that has the byte at ``offset``, and where."""
        first, file = next(entry for entry in reversed(self.files) if entry[0] <= offset)
        return file, offset - first

    def read(self, buffer: Tensor, offset: int) -> Event:
        """Start to fill ``buffer``, after any write in flight to the same bytes; from memory, if they are there."""
        self._after_writes(offset, buffer.nbytes)
        if any(others.copy_cached(buffer, offset) for others in self.buffers):
            return COMPLETED
        file, start = self._place(offset)
        return file.read_async(buffer, start)

    def write(self, buffer: Tensor, offset: int, by: Buffers) -> Request:
        """Start to write ``buffer``, after any write in flight to the same bytes. What other buffers have of these is out of date."""
        for others in self.buffers:
            if others is not by:
                others.drop(offset, offset + buffer.nbytes)
        self._after_writes(offset, buffer.nbytes, by_write=True)
        file, start = self._place(offset)
        request = file.write_async(buffer, start)
        self.writes[offset, offset + buffer.nbytes] = request
        return request

    def _after_writes(self, offset: int, nbytes: int, by_write: bool = False) -> None:
        """Wait for writes to these bytes. One that failed raises for every reader of bytes that have not been written again."""
        end = offset + nbytes
        for (start, stop), request in list(self.writes.items()):
            touches = start < end and offset < stop
            if not touches and not request.done:
                continue
            has_failed = request.error is not None if request.done else not self.succeeds(request)
            if has_failed and touches:
                if not by_write:
                    request.wait()  # raises what went wrong
                self.writes |= {part: request for part in ((start, offset), (end, stop)) if part[0] < part[1]}
            if touches or not has_failed:
                del self.writes[start, stop]

    def flush(self) -> None:
        """Return when no write is in flight; raises what went wrong in those that were, unless somebody has heard of it."""
        with self.lock:
            for request in list(self.writes.values()):
                if not request.reported and not self.succeeds(request):
                    request.wait()

    def succeeds(self, request: Event) -> bool:
        """Wait for a transfer. Raises only where the drive says nothing any more: it may still use the memory."""
        try:
            self.stall(request)
        except OSError:
            if not request.done:
                raise
            return False
        return True

    def stall(self, request: Event) -> None:
        """Wait, and count the time."""
        start = time.perf_counter()
        try:
            with phase("wait", "drive"):
                request.wait()
        finally:
            self.stall_ms += (time.perf_counter() - start) * 1e3

    @property
    def buffer_nbytes(self) -> int:
        """Host memory that the buffers take."""
        return sum((len(buffers.slots) + len(buffers.free)) * buffers.largest for buffers in self.buffers)

    def close(self) -> None:
        """Wait for what is in flight and close the files."""
        with contextlib.ExitStack() as closing:
            for _, file in self.files:
                closing.callback(file.close)


class Buffers:
    """A bounded number of buffers for pieces. May be used from several threads.

    Args:
        spill: whose pieces.
        nbytes: of each buffer; its pages exist once they are used.
        count: how many. ``open`` never needs more than one beyond those in use.
        memory: where buffers come from: bytes -> page-aligned tensor.
        caches: what was read stays, and need not be read again, until its buffer is needed.
    """

    def __init__(self, spill: Spill, nbytes: int, count: int, memory: Callable[[int], Tensor] = staging, caches: bool = False) -> None:
        self.spill, self.nbytes, self.count, self.memory, self.caches = spill, round_up(nbytes), count, memory, caches
        self.slots = OrderedDict[int, _Slot]()  # by offset, oldest use first
        self.free: list[Tensor] = []
        self.largest = 0  # bytes of a buffer that are in use
        spill.buffers.append(self)

    def fit(self, nbytes: int) -> None:
        """Make buffers large enough for pieces of ``nbytes``; those that are too small go once they are free."""
        with self.spill.lock:
            if nbytes > self.nbytes:
                self.nbytes = round_up(nbytes)
                self.free.clear()

    # ---- buffers -------------------------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Free the buffers of writes that are done. One that failed, and was heard of, is to be written another time."""
        for offset, slot in list(self.slots.items()):
            if slot.state is not State.EVICTING or not slot.request.done:
                continue
            if isinstance(slot.request, Request) and slot.request.error is not None and slot.request.reported:
                slot.become(State.KEPT)
            else:
                self._end(offset)
                self._rest(offset)

    def _end(self, offset: int) -> None:
        """Wait for the transfer of a buffer. What could not be written stays, to be written another time; what could not be read goes."""
        slot = self.slots[offset]
        try:
            self.spill.stall(slot.request)
        except BaseException:
            if slot.request.done and slot.dirty:
                slot.become(State.KEPT)
            elif slot.request.done:
                self._free(offset)
            raise

    def _free(self, offset: int) -> None:
        buffer = self.slots.pop(offset).buffer
        if len(buffer) == self.nbytes:
            self.free.append(buffer)

    def _rest(self, offset: int) -> None:
        """Leave what was read in its buffer until that is needed."""
        slot = self.slots[offset]
        if self.caches and not slot.dirty:
            slot.become(State.CACHED)
        else:
            self._free(offset)

    def _take(self) -> Tensor | None:
        """A buffer that can be had without waiting; None where there is none."""
        self._settle()
        return self._buffer() if self.free or len(self.slots) < self.count or self._give_up(State.CACHED) else None

    def _buffer(self) -> Tensor:
        """One more buffer, for which there is room."""
        return self.free.pop() if self.free else self.memory(self.nbytes)

    def _give_up(self, *states: State) -> bool:
        """Free the buffer that can be had soonest of those in one of ``states``, oldest first, once its transfer is over. False: there is none."""
        able = [slot for slot in self.slots.values() if slot.state in states]
        if not able:
            return False
        slot = min(able, key=lambda slot: slot.state)
        if slot.state is State.KEPT:
            self.evict(slot.piece, changed=True)
        if slot.state is not State.CACHED:
            self._end(slot.piece.offset)
        self._free(slot.piece.offset)
        return True

    def _begin(self, piece: Piece, buffer: Tensor, read: bool) -> _Slot:
        """Give ``piece`` a buffer, and start to ``read`` it."""
        slot = _Slot(piece, buffer)
        if read:
            try:
                slot.request, slot.state = self.spill.read(buffer[: piece.nbytes], piece.offset), State.FETCHING
            except Exception:  # and not Ctrl-C: the drive may be filling it
                self.free.append(buffer)
                raise
        self.slots[piece.offset] = slot
        self.largest = max(self.largest, piece.nbytes)
        return slot

    # ---- the life of a piece -------------------------------------------------------------------------------------------------

    def fetch(self, piece: Piece) -> bool:
        """Ask for a piece. False if no buffer is free to read it into; then ask again later, or just open it."""
        with self.spill.lock:
            slot = self.slots.get(piece.offset)
            if slot is None:
                buffer = self._take()
                if buffer is None:
                    return False
                self._begin(piece, buffer, read=True)
            elif slot.state is State.CACHED:  # not to be given up before its use
                self.slots.move_to_end(piece.offset)
            return True

    def open(self, piece: Piece, read: bool = True) -> Tensor:
        """The bytes of a piece (nbytes,) uint8, to work on until it is put back. ``read=False`` if all of it is to be overwritten.

        Training may read a piece while a save reads it.
        """
        with self.spill.lock:
            slot = self.slots.get(piece.offset)
            if slot is not None and slot.state is State.OPEN and read:
                slot.users += 1
                return slot.buffer[: piece.nbytes]
            if slot is not None and slot.state is State.EVICTING:
                # what is in the buffer is what is in the file, but a write is reading it; if that failed, it is here alone
                slot.dirty = not self.spill.succeeds(slot.request) and slot.dirty
            if read:
                self.spill.fetches += 1
                self.spill.hits += slot is not None and slot.request.done
            if slot is None:
                buffer = self._take()
                if buffer is None:
                    is_given_up = self._give_up(State.EVICTING, State.FETCHING, State.KEPT)
                    assert is_given_up, f"all {self.count} buffers of {self.nbytes} bytes are in use"
                    buffer = self._buffer()
                slot = self._begin(piece, buffer, read)
            if slot.state is State.FETCHING:
                self._end(piece.offset)
            slot.become(State.OPEN)
            slot.piece, slot.users = piece, 1  # a gradient that is added to becomes longer
            self.slots.move_to_end(piece.offset)
            return slot.buffer[: piece.nbytes]

    def evict(self, piece: Piece, changed: bool, after: Event = COMPLETED) -> None:
        """Put an open or kept piece back: write it behind if it was ``changed`` since it was read, else drop it, once ``after`` is past."""
        with self.spill.lock:
            slot = self.slots.get(piece.offset)
            if slot is None or slot.state not in (State.OPEN, State.KEPT):  # Ctrl-C came before it was open, or after it was put back
                return
            if slot.users > 1 and not changed:
                assert after.done, f"{piece} is copied while somebody else reads it"
                slot.users -= 1
            elif changed or slot.dirty:
                slot.state, slot.dirty = State.KEPT, True  # where Ctrl-C ends the call that starts to write it
                slot.request = self.spill.write(slot.buffer[: piece.nbytes], piece.offset, self)
                slot.state = State.EVICTING
            elif after.done:
                self._rest(piece.offset)
            else:
                slot.request, slot.state = after, State.EVICTING

    def drop(self, start: int, stop: int) -> None:
        """Give up what is here of these bytes and nobody works on: the file changes under it.

        What could not be written before has a part in ``writes`` for as long as it is not written.
        """
        with self.spill.lock:
            for offset, slot in list(self.slots.items()):
                if offset < stop and start < offset + slot.piece.nbytes:
                    assert slot.state < State.OPEN, f"bytes {start} to {stop} are written while {slot.piece} is in use"
                    self.spill.succeeds(slot.request)
                    self._free(offset)

    def copy_cached(self, buffer: Tensor, offset: int) -> bool:
        """Fill ``buffer`` with what is at ``offset`` in the file, if all of that rests here."""
        with self.spill.lock:
            for slot in self.slots.values():
                start = offset - slot.piece.offset
                is_readable = slot.state <= State.EVICTING and not slot.dirty  # a copy of it goes on
                if is_readable and 0 <= start <= slot.piece.nbytes - buffer.nbytes:
                    buffer.copy_(slot.buffer[start : start + buffer.nbytes])
                    return True
            return False

    def keep(self, piece: Piece) -> None:
        """Put a changed piece back, to be used again soon: it is not written before its buffer is needed."""
        with self.spill.lock:
            slot = self.slots[piece.offset]
            slot.state, slot.dirty = State.KEPT, True


# elements of one chunk of the update: big enough that one transfer runs at the drive's full speed, small enough that a few fit anywhere
CHUNK_NUMEL = 1 << 21


def chunks_of(start: int, stop: int, uncut: Sequence[slice] = ()) -> list[slice]:
    """Elements ``start`` to ``stop`` in even chunks of at most about CHUNK_NUMEL, each whole pages in 16 bits."""
    return evenly(start, stop, CHUNK_NUMEL, ALIGN // 2, uncut)


class FileFields:
    """Flat fields of consecutive elements of a shard, in the file; one chunk of all fields is one piece, moved at once.

    Args:
        buffers: for its chunks.
        chunks: slices of the shard, in order and without gaps.
        dtypes: of each field.
        packing: of what is kept of whole parameters, behind the elements of each chunk.
    """

    resident = False

    def __init__(self, buffers: Buffers, chunks: Sequence[slice], dtypes: Mapping[str, torch.dtype], packing: Packing | None = None) -> None:
        self.buffers, self.chunks, self.dtypes, self.packing = buffers, chunks, dtypes, packing
        self.numel: int = chunks[-1].stop - chunks[0].start
        self.pieces = self._reserve()  # by the start of the chunk
        buffers.fit(max(piece.nbytes for piece in self.pieces.values()))

    def _reserve(self) -> dict[int, Piece]:
        """Take room for each chunk in the file, in whole pages."""
        element, pieces = sum(dtype.itemsize for dtype in self.dtypes.values()), {}
        for chunk in self.chunks:
            nbytes = round_up((chunk.stop - chunk.start) * element + self._packed_nbytes(chunk))
            pieces[chunk.start] = Piece(self.buffers.spill.reserve(nbytes), nbytes)
        return pieces

    def _packed_nbytes(self, chunk: slice) -> int:
        packed = slice(0, 0) if self.packing is None else self.packing.bytes_of(chunk)
        return packed.stop - packed.start

    def fetch(self, chunk: slice) -> bool:
        """Ask for a chunk; False if there is no buffer for it now."""
        return self.buffers.fetch(self.pieces[chunk.start])

    def open(self, chunk: slice, read: bool = True) -> dict[str, Tensor]:
        """The fields of a chunk: name -> (its elements,), to work on in place."""
        data = self.buffers.open(self.pieces[chunk.start], read)
        numel, start, views = chunk.stop - chunk.start, 0, {}
        for name, dtype in self.dtypes.items():
            stop = start + numel * dtype.itemsize
            views[name] = data[start:stop].view(dtype)
            start = stop
        if self.packing is not None:
            views[PACKED] = data[start : start + self._packed_nbytes(chunk)]
        return views

    def close(self, chunk: slice, changed: bool, keep: bool = False) -> None:
        """Put a chunk back; ``keep`` it in memory, unwritten, if it is among the first to be used next time."""
        if changed and keep:
            self.buffers.keep(self.pieces[chunk.start])
        else:
            self.buffers.evict(self.pieces[chunk.start], changed)

    def exchange(self, other: FileFields) -> None:
        """Exchange room in the file with ``other``, of the same chunks and fields."""
        self.pieces, other.pieces = other.pieces, self.pieces

    def nbytes(self, name: str) -> int:
        """Bytes of a field."""
        if name == PACKED:
            return self.packing.nbytes if self.packing is not None else 0
        return self.numel * self.dtypes[name].itemsize


class FileParams(FileFields):
    """A rank's slice of a unit's parameters (numel,), in the file: read whole for every gather, updated chunk by chunk.

    ``borrowed``: the offset of frozen ones that are read in place, from files of the user's. Other values than those get room of their own.
    """

    memory = "host"

    def __init__(
        self, buffers: Buffers, whole_buffers: Buffers, chunks: Sequence[slice], dtype: torch.dtype, borrowed: int | None = None
    ) -> None:
        self.whole_buffers, self.dtype, self.borrowed = whole_buffers, dtype, borrowed
        super().__init__(buffers, chunks, {"param": dtype})
        whole_buffers.fit(self.piece.nbytes)

    @property
    def piece(self) -> Piece:
        """All of the slice."""
        return Piece(self.pieces[0].offset, round_up(self.nbytes("param")))

    def _reserve(self) -> dict[int, Piece]:
        """Take room for the slice, of which chunks are pieces, unless it is there."""
        bounds = [chunk.start * self.dtype.itemsize for chunk in self.chunks]
        offset = self.borrowed
        if offset is None:
            offset = self.buffers.spill.reserve(self.nbytes("param"), bounds)  # written whole, read by chunk
        ends = [*bounds[1:], round_up(self.nbytes("param"))]
        return {chunk.start: Piece(offset + start, end - start) for chunk, start, end in zip(self.chunks, bounds, ends, strict=True)}

    def prefetch(self) -> bool:
        """Ask for the slice; False if there is no buffer for it now."""
        return self.whole_buffers.fetch(self.piece)

    def whole(self, read: bool = True) -> Tensor:
        """The slice (numel,), readable until ``release``; ``read=False`` if all of it is to be overwritten."""
        return self.whole_buffers.open(self.piece, read)[: self.nbytes("param")].view(self.dtype)

    def release(self, after: Event = COMPLETED) -> None:
        """Done with what ``whole`` gave, once ``after`` is past."""
        self.whole_buffers.evict(self.piece, changed=False, after=after)

    def write(self, values: Tensor) -> None:
        """Replace the slice by ``values`` (numel,)."""
        if self.borrowed is not None:
            if self._has(values):
                return
            self._leave()
        self.whole(read=False).copy_(values)
        self.whole_buffers.evict(self.piece, changed=True)

    def _has(self, values: Tensor) -> bool:
        """Check that ``values`` are what is there, bit for bit.

        A base that is loaded once more, or comes with a checkpoint, then stays where it is.
        """
        try:
            here = self.whole()
        except OSError:  # it has been changed: what comes is right
            return False
        same = torch.equal(here.view(torch.uint8), values.to("cpu", here.dtype).contiguous().view(torch.uint8))
        self.release()
        return same

    def _leave(self) -> None:
        """Take room on the drive, for values that are not those in files of the user's."""
        with self.buffers.spill.lock:
            before, self.borrowed = self.borrowed, None
            try:
                pieces = self._reserve()
                self.buffers.spill.create()
            except BaseException:
                self.borrowed = before
                raise
            self.pieces = pieces


class FileGrads:
    """The reduced gradient of a shard (numel,), in the file between backward and update; in its own precision, in ``sum_dtype`` once accumulated.

    The sum of squares is taken while the gradient passes through memory. From a device it is offloaded first, and goes on from there
    in the background. One that is handed over stays in its buffer, unwritten, until ``discard``.
    """

    def __init__(
        self, whole: Buffers, parts: Buffers, chunks: Sequence[slice], transfer: Transfer, worker: Worker, num_threads: int, sum_dtype: torch.dtype
    ) -> None:
        self.whole, self.parts, self.transfer, self.worker, self.num_threads, self.sum_dtype = whole, parts, transfer, worker, num_threads, sum_dtype
        self.start, self.numel = chunks[0].start, chunks[-1].stop - chunks[0].start
        starts = ((chunk.start - self.start) * nbytes for chunk in chunks for nbytes in (2, sum_dtype.itemsize))
        self.offset = whole.spill.reserve(self.numel * sum_dtype.itemsize, starts)  # written whole, read by chunk
        whole.fit(self.numel * sum_dtype.itemsize)
        parts.fit(max(chunk.stop - chunk.start for chunk in chunks) * sum_dtype.itemsize)
        self.dtype: torch.dtype | None = None
        self.sum = 0.0
        self.added = COMPLETED  # the last addition
        self.hands_over = self.is_handed_over = False  # the next gradient is, or this one, to an update before any other comes
        self.here: Tensor | None = None  # (numel,) one that is handed over, and not used yet

    def add(self, grad: Tensor, is_measured: bool = False) -> Event | None:
        """Write (numel,) ``grad`` to the file, or its sum with what is there. The caller may use its memory again after the event."""
        self.is_handed_over = self.hands_over
        if self.transfer.joined:
            self._add(grad)
            return COMPLETED
        arrival = self.transfer.offload(grad, [slice(0, self.numel)])
        self.added = self.worker.submit(functools.partial(self._arrive, arrival, self.added))
        return arrival.events[-1]

    def _arrive(self, arrival: Arrival, before: Ticket) -> None:
        try:
            before.wait()  # where that failed, so does what is added to it
            self._add(arrival.whole())
        finally:
            arrival.drop()

    def _add(self, grad: Tensor) -> None:
        before, dtype = self.dtype, grad.dtype
        if before is not None:
            dtype = self.sum_dtype
            self.whole.open(self._piece(before))
        piece = self._piece(dtype)
        here = self.whole.open(piece, read=False)[: self.numel * dtype.itemsize].view(dtype)  # the same memory
        if before is None:
            here.copy_(grad)
        else:
            if before != dtype:
                widen_(here, before)
            here.add_(grad)
        self.sum = float(sum_of_squares(here, self.num_threads))
        self.dtype = dtype
        if self.is_handed_over:
            self.here = here
        else:
            self.whole.evict(piece, changed=True)

    def discard(self) -> None:
        """Give back the buffer of a gradient that was handed over, and has been used."""
        if self.here is not None:
            assert self.dtype is not None
            self.here = None
            self.whole.evict(self._piece(self.dtype), changed=False)

    def _piece(self, dtype: torch.dtype, chunk: slice | None = None) -> Piece:
        """A chunk of it, or all of it."""
        chunk = chunk or slice(self.start, self.start + self.numel)
        return Piece(self.offset + (chunk.start - self.start) * dtype.itemsize, round_up((chunk.stop - chunk.start) * dtype.itemsize))

    @property
    def is_here(self) -> bool:
        """Check that all of it is in the file, or on its way from host memory to it."""
        return self.added.done

    def sum_of_squares(self) -> float:
        """Of the gradient, in float64; 0 without one."""
        self.added.wait()
        return self.sum

    def _part(self, chunk: slice) -> Piece:
        self.added.wait()
        assert self.dtype is not None
        return self._piece(self.dtype, chunk)

    def fetch(self, chunk: slice) -> bool:
        """Ask for a chunk; False if there is no buffer for it now."""
        return self.is_handed_over or self.parts.fetch(self._part(chunk))

    def open(self, chunk: slice) -> Tensor:
        """Give a chunk (its elements,), to be read until ``close``."""
        piece, dtype = self._part(chunk), self.dtype
        if self.is_handed_over:
            assert self.here is not None, "a gradient is used that was discarded"
            return self.here[chunk.start - self.start : chunk.stop - self.start]
        assert dtype is not None
        return self.parts.open(piece)[: (chunk.stop - chunk.start) * dtype.itemsize].view(dtype)

    def close(self, chunk: slice) -> None:
        """Done with a chunk."""
        if not self.is_handed_over:
            self.parts.evict(self._part(chunk), changed=False)

    def clear(self) -> None:
        """Forget the gradient, also one that could not be written."""
        self.added.join()
        self.discard()
        self.added, self.dtype, self.sum, self.is_handed_over = COMPLETED, None, 0.0, False

    @property
    def nbytes(self) -> int:
        return 0 if self.dtype is None or self.is_handed_over else self.numel * self.dtype.itemsize
