"""Saving between two steps, whole or not at all, for any number of ranks, stage and tier.

Every rank writes the elements that it updates into one safetensors file, chunk by chunk: memory does
not grow with the model. A save may go on in the background: an update that comes to a chunk which is
not written yet copies it where there is room, or waits.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import os
import shutil
import threading
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zk.addon import Addon
from zk.checkpoint import contents, files
from zk.checkpoint.contents import Piece
from zk.checkpoint.files import Entry, undone, write_durably, write_file
from zk.config import is_count
from zk.logs import rank_log, require
from zk.memory import host_memory
from zk.optimizer import ZeroOptimizer
from zk.parallel.comm import Comm, new_group
from zk.store import UnitStore

PIECE_NUMEL = 1 << 21  # elements that are widened at once
DRIVE_ROOM = 1 << 30  # for copies, where there is a drive as host memory is short


def save_checkpoint(
    optimizer: ZeroOptimizer,
    directory: str | os.PathLike[str],
    *,
    scheduler: Any = None,
    extra: Any = None,
    keep: int | None = None,
    async_save: bool = False,
) -> Path:
    """Save a checkpoint to ``directory/step-NNNNNNNN`` and return that folder. Call it on all ranks.

    Parameters, optimizer states, groups, loss scale, counters and random states are in it; gradients
    are not. The folder has its name once it is whole and on the drive.

    Args:
        directory: on a file system that all ranks see; made if need be.
        scheduler: its state_dict() is saved too.
        extra: what else training needs (its position in the data, say), of what JSON can hold.
        keep: remove all but the newest so many checkpoints, afterwards.
        async_save: return at once, and write in the background the state as it is now.
            ``synchronize()``, ``close()`` and the next save wait for the end.

    Raises:
        OSError: if the drive refuses or has no room, on all ranks; with ``async_save`` in a later step,
            before it changes anything. Earlier checkpoints stay whole.
    """
    words = f"keep must be a number of checkpoints, at least 1, or None; got {keep!r}"
    require(keep is None or is_count(keep), words)
    saver, comm = saver_of(optimizer), optimizer._layout.comm
    saver.synchronized()
    optimizer._settle()
    with comm.together(f"saving into {os.fspath(directory)}"):
        final = Path(directory, f"step-{optimizer.num_steps:08d}")
        save = Save(optimizer, final, contents.of_optimizer(optimizer, scheduler, extra), keep)
    if async_save:
        saver.start(save)
    else:
        save.run(saver, comm)
    return final


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """This rank's share of one chunk of a unit, as it is written."""

    store: UnitStore
    number: int
    pieces: list[Piece]

    @property
    def entries(self) -> list[Entry]:
        dtype_of = self.store.dtype_of
        return [Entry(p.key, dtype_of(p.kind), (p.stop - p.start,)) for p in self.pieces]

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.entries)

    def values(self) -> Iterator[Tensor]:
        """Each piece; may be a view of the chunk."""
        store, first = self.store, self.store.start + self.store.bounds[self.number].start
        with store.open(self.number, changed=False) as fields:
            for piece in self.pieces:
                here = slice(piece.start - first, piece.stop - first)
                part = {name: field[here] for name, field in fields.items()}
                is_param = piece.kind == "param"  # of which codecs may take some dtypes for codes
                value = part["param"] if is_param else store.codec.read(part, piece.kind)
                yield value.to(store.dtype_of(piece.kind))


def parts_of(optimizer: ZeroOptimizer) -> Iterator[Part]:
    """All that this rank writes."""
    comm = optimizer._layout.comm
    for unit, store in enumerate(optimizer._runtime.stores):
        share = store.unit.numel // comm.size  # also where each rank has all of it
        for number, bound in enumerate(store.bounds):
            start = max(comm.rank * share, store.start + bound.start)
            stop = min(comm.rank * share + share, store.start + bound.stop)
            pieces = [
                Piece(unit, kind, at, min(at + PIECE_NUMEL, stop), f"{kind}/{unit}/{at}")
                for at in range(start, stop, PIECE_NUMEL)
                for kind in contents.kinds_of(store)
            ]
            yield from [Part(store, number, pieces)] * bool(pieces)


class Save:
    """One checkpoint of the optimizer as it is now. All ranks make one and run it."""

    def __init__(
        self, optimizer: ZeroOptimizer, final: Path, head: dict[str, Any], keep: int | None
    ):
        self.final, self.head, self.keep = final, head, keep
        self.random = contents.random_state(optimizer._layout.device)
        self.parts = list(parts_of(optimizer))
        is_first = optimizer._layout.comm.rank == 0
        self.buffers = dict(contents.buffers_of(optimizer)) if is_first else {}
        self.beside = Beside(self.parts)

    def run(self, saver: Saver, comm: Comm) -> None:
        """Write it; raises, on all ranks, if that fails on one of them, and leaves nothing of it."""
        what, beside, final = f"saving {self.final}", self.final, self.final
        with comm.together(what):
            if comm.rank == 0:
                beside, saver.lock = files.begin(final)
        beside = final.with_name(comm.words(what, beside.name)[0])
        # the first rank alone, as it may be publishing what another one, that has lost it, gives up
        undo = functools.partial(shutil.rmtree, beside, ignore_errors=True)
        with undone(bool if comm.rank else undo):
            with comm.together(what):
                self.write(beside, *files.rank_files(Comm(comm.group).rank, comm.size))
            with comm.together(what):
                if comm.rank == 0:
                    files.publish(beside, final, self.head, comm.size, self.keep)

    def write(self, folder: Path, tensors: str, words: str) -> None:
        """Write this rank's tensors, and what it says of them."""
        entries = [entry for part in self.parts for entry in part.entries]
        entries += [Entry(f"buffer/{k}", v.dtype, tuple(v.shape)) for k, v in self.buffers.items()]
        with contextlib.closing(self.values()) as values:
            written = write_file(folder / tensors, entries, values, {"format": "pt"})
        said = {
            "file": tensors,
            "written": dataclasses.asdict(written),
            "pieces": [piece for part in self.parts for piece in part.pieces],
            "buffers": sorted(self.buffers),
            "random": self.random,
        }
        write_durably(folder / words, json.dumps(said, separators=(",", ":")).encode())

    def values(self) -> Generator[Tensor]:
        """All that is saved, from where it is or from its copy."""
        for part, following in itertools.zip_longest(self.parts, self.parts[1:]):
            if following is not None:
                following.store.param.fetch()
                following.store.states[following.number].fetch()
            with self.beside.taken(part) as copies:
                yield from part.values() if copies is None else copies
        yield from self.buffers.values()


class Beside:
    """What a save has not read yet, and copies of what an update had to change before."""

    def __init__(self, parts: Sequence[Part] = ()):
        self.unread = {(part.store, part.number): part for part in parts}
        self.versions = {part.store: versions_of(part.store) for part in parts}
        self.copied: dict[Part, list[Tensor]] = {}
        self.room, self.changes = 0, threading.Condition()  # bytes that copies may take
        self.reading: Part | None = None
        self.spoiled = ""  # the unit that users have written to

    def before_change(self, store: UnitStore, number: int) -> None:
        """Copy a chunk that is about to change, or wait until it has been read."""
        self.check(store)
        with self.changes:
            part = self.unread.get((store, number))
            if part is not None and part is not self.reading and part.nbytes <= self.room:
                self.room -= part.nbytes
                values = part.values()
                self.copied[part] = [torch.empty(v.shape, dtype=v.dtype).copy_(v) for v in values]
                del self.unread[store, number]
            self.changes.wait_for(lambda: (store, number) not in self.unread)

    @contextlib.contextmanager
    def taken(self, part: Part) -> Iterator[list[Tensor] | None]:
        """A chunk while it is written: its copy, or None: it stays as it is inside."""
        with self.changes:
            copies, self.reading = self.copied.pop(part, None), part
        yield copies
        self.check(part.store)
        with self.changes:
            self.unread.pop((part.store, part.number), None)
            self.room += part.nbytes if copies is not None else 0
            self.changes.notify_all()
        if self.spoiled:
            raise RuntimeError(
                f"parameters of {self.spoiled!r} were written from outside while a checkpoint was "
                "saved in the background; call synchronize() before, or save without async_save"
            )

    def check(self, store: UnitStore) -> None:
        """See that users have not written to a unit that no update has changed."""
        known, now = self.versions.get(store), versions_of(store)
        if known and known[0] == now[0] and known != now:
            self.spoiled = store.unit.name


def versions_of(store: UnitStore) -> tuple[int, list[int]]:
    """Updates of a unit, and torch's counts of writes to its parameters."""
    return store.version, [param._version for param in store.unit.params]


class Saver(Addon):
    """Saves of one optimizer, one at a time."""

    def __init__(self, optimizer: ZeroOptimizer):
        self.layout = optimizer._layout
        self.own: Comm | None = None  # collectives of saves in the background
        self.future: Future[None] | None = None  # of the save in the background
        self.beside = Beside()
        self.lock: Any = None  # of the folder that they go to
        self.begun = False  # and not all ranks are known to be done; the same on all of them

    def start(self, save: Save) -> None:
        """Write ``save`` from now on."""
        comm = self.layout.comm
        if comm.size > 1 and self.own is None:
            ranks = dist.get_process_group_ranks(group := comm.group or dist.group.WORLD)
            self.own = Comm(new_group(group, ranks, backend="gloo"))
        save.buffers = {name: value.clone() for name, value in save.buffers.items()}
        if self.layout.device.type != "cpu":  # the thread follows no stream of training
            torch.accelerator.synchronize(self.layout.device)
        room = host_memory()[1] // 4
        save.beside.room = min(room, DRIVE_ROOM) if "nvme" in self.layout.tiers else room
        self.begun, self.beside = True, save.beside
        pool = ThreadPoolExecutor(1, "zk-save")  # a program that ends waits for it
        self.future = pool.submit(self.run, save)
        pool.shutdown(wait=False)

    @torch.no_grad()
    def run(self, save: Save) -> None:
        try:
            save.run(self, self.own or self.layout.comm)
        except BaseException as error:
            # the program may end before anybody waits
            rank_log.warning("a checkpoint was not saved: %s", error)
            raise
        finally:
            with save.beside.changes:  # nobody waits any more
                save.beside.unread.clear()
                save.beside.changes.notify_all()

    def changing(self, store: UnitStore, number: int) -> None:
        self.beside.before_change(store, number)

    def around_update(self, run: Any) -> Any:
        """Raise what went wrong, on all ranks at the same step."""
        comm, is_done = self.layout.comm, self.future is None or self.future.done()
        if self.begun and all(map(any, comm.rows("saves that are done", [float(is_done)]))):
            self.begun = False
            self.synchronized()
        return run

    def synchronized(self) -> None:
        """Wait for the save in progress. Raises what went wrong in it."""
        error = self.future.exception() if self.future is not None else None
        self.future, self.beside = None, Beside()
        if error is not None:
            raise error

    def closed(self) -> None:
        self.lock = None


def saver_of(optimizer: ZeroOptimizer) -> Saver:
    """The one of this optimizer, made with its first save."""
    found = [addon for addon in optimizer._seams.addons if isinstance(addon, Saver)]
    if not found:
        found = [Saver(optimizer)]
        optimizer._seams.add(*found)
    return found[0]
