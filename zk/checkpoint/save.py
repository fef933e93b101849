"""Saving of an optimizer between two steps, into a folder that any world size, stage and tier loads, whole or not there.

Every rank writes the elements it updates into one safetensors file, chunk by chunk, so that memory does not grow with the model. All goes into
a folder beside the final one, whose name it gets when every rank's bytes are on the drive; ``latest`` names it after that. A save may go on
in the background: then what the next update is about to change is read, or copied, before (zk/offload/snapshot.py).
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import errno
import functools
import itertools
import json
import os
import shutil
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from zk.checkpoint import folders, manifest
from zk.checkpoint.base import digests, digests_of_entries
from zk.checkpoint.files import Entry, Writer, undone, write_durably
from zk.core.events import COMPLETED, Event, Ticket
from zk.core.logs import rank_log
from zk.core.options import is_count
from zk.core.owners import inner_tensors, is_wrapper
from zk.core.timeline import phase
from zk.core.units import overlap
from zk.kernels.codec import dtype_of, read
from zk.offload.nvme import default_engine
from zk.offload.packing import part_of
from zk.offload.section import opened
from zk.offload.snapshot import Snapshot, Unread
from zk.offload.tiers import free_nbytes
from zk.offload.worker import Worker
from zk.parallel.comm import Comm, together
from zk.parallel.presence import Board

if TYPE_CHECKING:
    from zk.checkpoint.manifest import Training
    from zk.core.store import UnitStore
    from zk.offload.pipeline import Task

PIECE_NUMEL = 1 << 21  # elements that are widened at once
_NVME_ROOM = 1 << 30  # for copies, where the user has a drive because host memory is short


# ---- what is written ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """One tensor of a rank's file."""

    unit: int
    kind: str
    elements: slice  # of the unit's flat buffer
    dtype: torch.dtype
    kept: tuple[int, str] | None = None  # number and name of what is kept of a whole parameter, whose elements these are

    @property
    def entry(self) -> Entry:
        """The tensor's description in the file."""
        return Entry(f"{self.kind}/{self.unit}/{self.elements.start}", self.dtype, (self.elements.stop - self.elements.start,))


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """This rank's share of one chunk of a unit, as it is written."""

    held: UnitStore
    chunk: int
    first: int  # the chunk's first element in the unit's flat buffer
    pieces: Sequence[Piece]

    def values(self, fields: Mapping[str, Tensor]) -> Iterator[Tensor]:
        """Of each piece, from the open chunk; may be views."""
        shard = self.held.shard
        for piece in self.pieces:
            here = slice(piece.elements.start - self.first, piece.elements.stop - self.first)
            if shard is None:
                yield fields["param"][here]
            elif piece.kept is not None:
                yield self.held.kept_in(*piece.kept, fields, shard.chunks[self.chunk])
            else:
                yield read(part_of(fields, here), piece.kind).to(piece.dtype)

    def opened(self) -> contextlib.AbstractContextManager[Mapping[str, Tensor]]:
        """The fields of the chunk."""
        if self.held.shard is not None:
            return self.held.shard.opened(self.chunk)
        return opened(self.held.home, None, self.held.home.chunks[self.chunk], changes=False)


def parts_of(optimizer: Training, first_unit: int) -> list[Part]:
    """All that this rank writes, in the order in which the next update changes it; ``first_unit``: the number of its first one in the manifest."""
    order, backwards = optimizer.updates.order()
    parts: list[Part] = []
    for held in dict.fromkeys((*order, *optimizer.held)):
        if optimizer.comm.replica or not held.unit.is_counted:
            continue
        number = first_unit + held.index
        dtypes = {kind: held.unit.dtype if held.shard is None else dtype_of(held.shard.dtypes, kind) for kind in manifest.kinds_of(held)}
        for index, chunk in enumerate(held.home.chunks if held.shard is None else held.shard.chunks):
            first = held.held.start + chunk.start
            mine, _ = overlap(slice(first, held.held.start + chunk.stop), held.layout.shard(held.comm.shard_rank))
            pieces = [
                Piece(number, kind, slice(first + begin, first + min(begin + PIECE_NUMEL, mine.stop)), dtype)
                for begin in range(mine.start, mine.stop, PIECE_NUMEL)
                for kind, dtype in dtypes.items()
            ]
            pieces += _packed(held, number, chunk)
            if pieces:
                parts.append(Part(held, index, first, pieces))
    return parts[::-1] if backwards else parts


def _packed(held: UnitStore, number: int, chunk: slice) -> Iterator[Piece]:
    """The pieces of what is kept of the whole parameters in a chunk; of those that this rank writes, as all have them at stage 0."""
    packing, layout = held.shard.packing if held.shard is not None else None, held.layout
    mine = layout.shard(held.comm.shard_rank)
    for index in packing.inside(chunk) if packing is not None else ():
        if mine.start <= layout.offsets[index] < mine.stop:
            for name, one in held.kept_of(index).items():
                kind = manifest.kind_of_kept(name, layout.offsets[index])
                yield Piece(number, kind, slice(0, one.numel), one.dtype, (index, name))


def buffers_of(optimizer: Training, all_names: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Buffers that state_dict() has, by name, once each, or under ``all_names`` of their modules; and parameters that came later, such as averages.

    Another object over a parameter's own memory is no other parameter (PEFT's DoRA makes such of bitsandbytes' codes).
    """
    known = {held.full.untyped_storage()._cdata for held in optimizer.held}
    for prefix, module in optimizer.model.named_modules(remove_duplicate=not all_names):
        for name, param in module._parameters.items():
            if param is None or any(tensor in optimizer.units for _, tensor in inner_tensors(param)):
                continue
            if param.is_meta or is_wrapper(param) or param.untyped_storage()._cdata not in known:
                yield f"{prefix}.{name}" if prefix else name, param.detach()
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer


# ---- one save ----------------------------------------------------------------------------------------------------------------


def write_rank(
    folder: Path, rank: int, world: int, pieces: Sequence[Piece], values: Generator[Tensor], buffers: Mapping[str, Tensor], said: Mapping[str, Any]
) -> None:
    """Write a rank's tensors, and what it says of them.

    Args:
        values: the elements of ``pieces``, one after the other.
        said: what else it says.
    """
    entries = [piece.entry for piece in pieces]
    entries += [Entry(f"buffer/{key}", value.dtype, tuple(value.shape)) for key, value in buffers.items()]
    tensors, words = folders.rank_files(rank, world)
    writer = Writer(folder / tensors, entries, {"format": "pt"})
    with undone(writer.abort), contextlib.closing(values):
        for value in itertools.chain(values, buffers.values()):
            writer.add(value)
        written = writer.finish()
    places = [[piece.unit, piece.kind, piece.elements.start, piece.elements.stop, piece.entry.key] for piece in pieces]
    of_file = {"rank": rank, "file": tensors, "written": written.as_json(), "pieces": places, "buffers": sorted(buffers), **said}
    write_durably(folder / words, json.dumps(of_file, separators=(",", ":")).encode())


class Save:
    """One checkpoint, as the optimizer is now. ``run`` writes it; all ranks make one and run it.

    Args:
        root: the folder of all checkpoints.
        scheduler, extra, keep: as for ZeroOptimizer.save_checkpoint.
        digests: of frozen parameters, which are left out then.
    """

    def __init__(
        self, optimizer: Training, root: Path, scheduler: Any, extra: Any, keep: int | None, digests: Mapping[str, str] | None
    ) -> None:
        self.keep, self.rank, self.world = keep, optimizer.everyone.rank, optimizer.everyone.world
        self.final = folders.place_of(root, int(optimizer.counters["steps"]))
        self.claim = optimizer.claim
        head = manifest.of_optimizer(optimizer, scheduler, extra, digests)
        head["entries"] = digests_of_entries(optimizer)
        self.head, first_unit = manifest.of_all_parts(optimizer.parts, optimizer.comm.rank == 0, head)
        self.said: dict[str, Any] = {"random": manifest.random_state(optimizer.device)}
        if optimizer.parts.count > 1 and optimizer.comm.rank == 0:  # has the buffers of one of several parts of the model
            self.said["part"] = optimizer.parts.part
        self.parts = [part for part in parts_of(optimizer, first_unit) if part.held.shard is not None or digests is None]
        self.buffers = dict(buffers_of(optimizer)) if optimizer.comm.rank == 0 else {}
        self.before: dict[UnitStore, Task] = {}  # the update that is part of what is saved, and still goes on
        self.unread: dict[UnitStore, Unread] = {}
        self.written: set[UnitStore] = set()  # units whose parameters were written from outside before they were copied
        self.snapshot = Snapshot(0)
        self.transfer = optimizer.transfer
        self.mark: Event = COMPLETED
        # of parameters that are not trained: when they were written last
        self.still = {held: held.unit.versions for held in optimizer.held if held.shard is None}

    def go_on_beside(self, room_nbytes: int) -> None:
        """Training will go on before ``run`` has read all: from now on, who changes something sees to it that it can be read as it was."""
        self.snapshot = Snapshot(room_nbytes)
        self.buffers = {name: buffer.clone() for name, buffer in self.buffers.items()}
        self.mark = self.transfer.mark()
        for held, of_unit in itertools.groupby(self.parts, lambda part: part.held):
            parts = {part.chunk: part for part in of_unit}
            if held.shard is None:
                continue
            if held.underway is not None:
                self.before[held] = held.underway
            nbytes = {chunk: sum(piece.entry.nbytes for piece in part.pieces) for chunk, part in parts.items()}
            held.shard.unread = self.unread[held] = Unread(self.snapshot, nbytes, functools.partial(self._copies, parts))

    def run(self, comm: Comm | Board) -> None:
        """Write it; raises, on all ranks, if that fails on one of them, and nothing of it is left then. Earlier checkpoints stay whole."""
        what = f"saving {self.final}"
        try:
            with together(comm, what):
                name = folders.begin(self.final, self.claim).name if self.rank == 0 else ""
            beside = self.final.with_name(comm.exchange(name, what)[0])
            with undone(shutil.rmtree, beside, ignore_errors=True) if self.rank == 0 else contextlib.nullcontext():
                with together(comm, what), phase("write", "checkpoint"):
                    self._write(beside)
                with together(comm, what):
                    if self.rank == 0:
                        folders.publish(beside, self.final, self.head, self.world)
                        for old in folders.whole(self.final.parent)[: -self.keep] if self.keep is not None else ():
                            if old != self.final:
                                shutil.rmtree(old, ignore_errors=True)
        finally:
            self._release()

    def _release(self) -> None:
        self.snapshot.end()
        for held, unread in self.unread.items():
            if held.shard is not None and held.shard.unread is unread:
                held.shard.unread = None
        self.parts, self.buffers = [], {}

    def _write(self, beside: Path) -> None:
        """Write this rank's part."""
        pieces = [piece for part in self.parts for piece in part.pieces]
        try:
            write_rank(beside, self.rank, self.world, pieces, self._values(), self.buffers, self.said)
        except FileNotFoundError as error:
            if beside.exists():
                raise
            raise OSError(errno.ENOENT, "the first rank has given this save up meanwhile, and removed", str(beside)) from error

    def _values(self) -> Generator[Tensor]:
        """All that is saved, from where it is, or from its copy."""
        self.transfer.follow(self.mark)  # another thread has another stream than training's
        for part, following in itertools.zip_longest(self.parts, self.parts[1:]):
            if part.held in self.before:
                self.before.pop(part.held).done.wait()
            unread = self.unread.get(part.held)
            with unread.taken(part.chunk) if unread is not None else contextlib.nullcontext() as copies:
                yield from copies if copies is not None else self._read(part, following)
            if part.held in self.written:
                raise RuntimeError(
                    f"parameters of {part.held.unit.name!r} were written from outside while a checkpoint was saved in the background; call "
                    "synchronize() before writing parameters, or save without async_save"
                )

    def _read(self, part: Part, following: Part | None) -> Iterator[Tensor]:
        """Take a chunk from where it is, and ask for the next."""
        with part.opened() as fields:
            if following is not None and following.held.shard is not None and following.held not in self.before:
                following.held.shard.fetch_state(following.chunk)
            yield from part.values(fields)
        if part.held.written_since(self.still.get(part.held)):
            self.written.add(part.held)

    def _copies(self, parts: Mapping[int, Part], chunk: int, fields: Mapping[str, Tensor]) -> list[Tensor]:
        """Copies of what is saved of a chunk, in host memory of its own."""
        held = parts[chunk].held
        if held.written_since(None):
            self.written.add(held)
        return [torch.empty(value.shape, dtype=value.dtype).copy_(value) for value in parts[chunk].values(fields)]


# ---- in the background ---------------------------------------------------------------------------------------------------------


class Saver:
    """Saves in the background, one at a time.

    Args:
        comm: of training; each save has a board of its own, as one rank may give up earlier than others.
    """

    def __init__(self, comm: Comm) -> None:
        self.comm, self.worker = comm, Worker("zk save")
        self.ticket: Ticket | None = None
        self.begun = False  # and not all ranks have been found to be done; the same on all of them
        self.snapshot = Snapshot(0)  # of the save in progress
        self.quiet = False
        self.stall_s = 0.0  # of training, by saves that are over

    def start(self, save: Save, room_nbytes: int, quiet: bool) -> None:
        """Write ``save`` from now on. ``quiet``: what the drive refuses is logged, and not raised."""
        assert self.ticket is None, "one save at a time"
        _register()
        with undone(save._release):
            save.go_on_beside(room_nbytes)
        self.snapshot, self.quiet, self.begun = save.snapshot, quiet, True
        _UNDER_WAY.add(self)
        self.ticket = self.worker.submit(functools.partial(self._run, save, self.comm.board()))

    def _run(self, save: Save, board: Comm | Board) -> None:
        save.run(board)
        _UNDER_WAY.discard(self)  # what goes wrong stays there, as somebody should hear of it

    def check(self) -> None:
        """Raise what went wrong in a save that has ``begun``, if it is over; on all ranks at the same step."""
        if self.comm.ranks_with([self.ticket is None or self.ticket.done]) == [self.comm.world]:
            self.begun = False
            self.finish()

    def finish(self) -> None:
        """Wait for the save in progress, if there is one. Raises what went wrong in it, unless it was to be logged only."""
        if self.ticket is None:
            return
        start = time.perf_counter()
        with phase("wait", "save"):
            self.ticket.join()
        ticket, self.ticket = self.ticket, None
        _UNDER_WAY.discard(self)
        self.stall_s += self.snapshot.stall_s + time.perf_counter() - start
        self.snapshot = Snapshot(0)
        if ticket.error is not None:
            refuse(ticket.error, self.quiet)

    @property
    def stall_ms(self) -> float:
        """Milliseconds that training has waited for saves, or copied for them."""
        return (self.stall_s + self.snapshot.stall_s) * 1e3

    def close(self) -> None:
        """End the thread, after the save in progress."""
        try:
            self.finish()
        finally:
            self.worker.close()


def refuse(error: BaseException, quiet: bool) -> None:
    """Raise ``error``, or log it if it is the drive's, and ``quiet``."""
    if not (quiet and isinstance(error, OSError)):
        raise error
    rank_log.warning("a checkpoint was not saved, and training goes on: %s", error)


def room_for_copies(optimizer: Training) -> int:
    """Bytes of host memory that copies may take for one save."""
    room = free_nbytes(torch.device("cpu")) // 4
    if "nvme" in optimizer.tiers:
        room = min(room, _NVME_ROOM)
    if optimizer.config.host_budget is not None:
        used = sum(int(value) for key, value in optimizer.metrics().items() if key.startswith("host_") and key.endswith("_nbytes"))
        room = min(room, int(optimizer.config.host_budget) - used)
    return max(0, room)


# also where nobody holds their optimizer any more
_UNDER_WAY: set[Saver] = set()
os.register_at_fork(after_in_child=_UNDER_WAY.clear)  # a forked process has no thread that saves


@functools.cache
def _register() -> None:
    """Register the end of saves once ranks are connected: what is registered last runs first, and connections and I/O threads must last."""
    default_engine()
    atexit.register(_finish_all)


def _finish_all() -> None:
    """The program ends: what is being saved is saved first."""
    for saver in list(_UNDER_WAY):
        ticket = saver.ticket
        if ticket is not None:
            ticket.join()
            if ticket.error is not None:
                rank_log.error("a checkpoint was not saved: %s", ticket.error)


def start(
    optimizer: Any, directory: Path, scheduler: Any, extra: Any, keep: int | None, async_save: bool, on_save_error: str, frozen: bool
) -> Path | None:
    """See ``ZeroOptimizer.save_checkpoint``."""
    optimizer._check_open()
    optimizer.integrity.check("save_checkpoint()")
    if keep is not None and not is_count(keep):
        raise ValueError(f"keep must be a number of checkpoints, at least 1, or None for all; got {keep!r}")
    if on_save_error not in ("raise", "warn"):
        raise ValueError(f"on_save_error must be 'raise' or 'warn'; got {on_save_error!r}")
    optimizer.saver.finish()
    optimizer._keep_state()
    optimizer.updates.apply_delayed()
    for held in optimizer.held:
        if not async_save or held.taken or held.written_since(None):
            held.arrive()
        if held.underway is None:
            held.adopt_writes()  # what the user wrote since the last step
    optimizer.partition.reset()
    quiet, optimizer.saved_to, optimizer.resume_from = on_save_error == "warn", directory, None
    of_frozen = None if frozen else digests(optimizer)
    with together(optimizer.everyone, f"saving into {directory}"):
        begun = Save(optimizer, directory, scheduler, extra, keep, of_frozen)
    if async_save:
        optimizer.saver.start(begun, room_for_copies(optimizer), quiet)
        return begun.final
    try:
        begun.run(optimizer.everyone)
    except OSError as error:
        refuse(error, quiet)
        return None
    return begun.final
