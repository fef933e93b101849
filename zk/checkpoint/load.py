"""Loading of a checkpoint of any number of ranks, stage, tier and dtype.

Nothing is changed if anything in it is wrong. Every rank reads the elements that it holds, by ranges,
into its chunks, one after the other: memory does not grow with the model.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from zk.checkpoint import folders, save
from zk.checkpoint.files import CheckpointError, Tensors, opened
from zk.checkpoint.manifest import (
    Manifest,
    Place,
    Saved,
    buffers_of,
    crc_of,
    kind_of,
    kinds_of,
    names_of,
    order_of,
    restore_random,
    revived,
    tiles_of,
)

if TYPE_CHECKING:
    from zk.optimizer import ZeroOptimizer
    from zk.store import UnitStore


@torch.no_grad()
def load_checkpoint(
    optimizer: ZeroOptimizer, directory: str | os.PathLike[str], *, scheduler: Any = None
) -> Any:
    """Resume from a checkpoint of any number of ranks, stage, tier and dtype. Call it on all ranks.

    Args:
        directory: what ``save_checkpoint`` was given (the newest one is taken), or the folder of one
            step.
        scheduler: to be given if and only if it was when saving.

    Returns:
        ``extra`` as it was saved (tuples as lists).

    Raises:
        CheckpointError: a ValueError, naming the file, if something is missing, altered or not of
            this model and optimizer: then nothing has been changed.
    """
    save.saver_of(optimizer).synchronized()
    if not optimizer._torn:
        optimizer._settle()
    rank, device, state = optimizer._layout.comm.rank, save.device_of(optimizer), None
    with checking(optimizer, Path(directory)) as manifest:
        targets = check(optimizer, manifest, scheduler)
        if rank < len(manifest.ranks):
            state = manifest.ranks[rank]["random"]
            generators = random.Random(), np.random.RandomState(), torch.Generator()
            restore_random(state, torch.device("cpu"), *generators)  # those that nobody uses
    head = manifest.head
    with replacing(optimizer, f"load_checkpoint({str(manifest.path.parent)!r})"):
        fill_all(optimizer, manifest, targets)
        for group, saved in zip(optimizer.param_groups, head["groups"], strict=True):
            group |= revived(saved, group) | {"params": group["params"]}
        for target in targets:
            target.count()
        optimizer._scaler.load_state_dict(head["loss_scale"])
        optimizer.num_steps = head["counters"]["steps"]
        optimizer.skipped_steps = head["counters"]["skipped_steps"]
        if scheduler is not None:
            scheduler.load_state_dict(revived(head["scheduler"], scheduler.state_dict()))
        if state is not None:
            restore_random(state, device, random, np.random, torch.default_generator)
    return revived(head["extra"])


@contextlib.contextmanager
def replacing(optimizer: ZeroOptimizer, what: str) -> Iterator[None]:
    """States are a mixture from here to the end, and refused if it does not come to that."""
    for store in optimizer._runtime.stores:
        with contextlib.suppress(Exception) if optimizer._torn else contextlib.nullcontext():
            store.wait()
        store.updating = None  # an update that failed is forgotten
    optimizer.zero_grad()
    try:
        yield
    except BaseException as error:
        optimizer._torn = optimizer._runtime.broken = (
            f"{what} was interrupted ({type(error).__name__}: {error}), so states are a mixture: "
            "load_checkpoint() makes all of it whole again"
        )
        raise
    optimizer._torn = optimizer._runtime.broken = ""


# ---- what is checked first -------------------------------------------------------------------------


@contextlib.contextmanager
def checking(optimizer: ZeroOptimizer, path: Path) -> Iterator[Manifest]:
    """The checkpoint that all ranks read, after each has checked a share of its files.

    A CheckpointError on one rank, inside too, is one on all.
    """
    comm, what = optimizer._layout.comm, f"checking {path}"
    try:
        with comm.together(what):
            found = folders.find(path) if comm.rank == 0 else path
        name = comm.words(what, os.path.relpath(found, path))[0]
        with comm.together(what):  # the first rank's choice, as each rank sees it
            manifest = Manifest.read(path if name == "." else path / name)
            manifest.check_files(comm.rank, comm.size)
            yield manifest
    except CheckpointError:
        raise
    except (LookupError, TypeError, AttributeError, ArithmeticError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged, or another program's: {error}") from error
    heads = comm.words(what, crc_of(manifest.head))
    odd = [rank for rank, head in enumerate(heads) if head != heads[0]]
    if odd:
        raise CheckpointError(
            f"{manifest.path} is another one on rank {odd[0]} than on rank 0; give all ranks the same"
        )


@dataclasses.dataclass(frozen=True)
class Target:
    """A parameter of this model, and the parts of the checkpoint that it is read from."""

    store: UnitStore
    index: int
    place: Place
    """In the whole weight."""
    parts: list[Saved]
    """The one that is cut and laid out alike; all of the weight where none is."""
    is_alike: bool

    @functools.cached_property
    def latest(self) -> Saved:
        """The part with the most updates, which are the parameter's."""
        return max(self.parts, key=lambda part: part.steps)

    @functools.cached_property
    def numbers(self) -> dict[str, Any] | None:
        """What the rule keeps once for the parameter; None where it is of another kind."""
        like = self.store.rule.numbers(self.store.groups[self.index], 1)
        saved = self.latest.scalars or {}
        if not saved and "step" in like:
            saved = {"step": float(self.latest.steps)}
        return revived(saved, like) if like.keys() == saved.keys() else None

    def count(self) -> None:
        """Take the number of updates, and what the rule keeps beside its fields."""
        store, steps = self.store, self.latest.steps
        if store.unit.is_trained:
            store.steps[self.index] = steps
            if steps:
                store.rule.know(store.groups[self.index], steps, self.numbers or {})


def check(optimizer: ZeroOptimizer, manifest: Manifest, scheduler: Any) -> list[Target]:
    """The checkpoint has all that this optimizer holds; returns its parameters."""
    where, tiles, weights, targets = (
        manifest.path,
        tiles_of(optimizer.model),
        manifest.weights(),
        [],
    )
    own: dict[str, str] = {}
    for store in optimizer._runtime.stores:
        for index, name in enumerate(store.unit.names):
            tile, shape = tiles.get(name), tuple(store.unit.shapes[index])
            place = tuple(slice(0, size) for size in shape)
            whole, shape, place = (
                (tile.whole, tile.shape, tile.place) if tile else (name, shape, place)
            )
            parts, own[name] = weights.get(whole, []), whole
            saved = parts[0].whole_shape if parts else "not there"
            if saved != shape:
                raise CheckpointError(
                    f"{where}: parameter {whole!r} is {saved}, and {shape} in this model"
                )
            about = place, order_of(store, index)
            alike = [part for part in parts if (part.place, part.order) == about][:1]
            targets.append(Target(store, index, place, alike or parts, bool(alike)))
            check_states(optimizer, where, targets[-1])
    for name in weights.keys() - own.values():
        raise CheckpointError(f"{where}: parameter {name!r} is not there in this model")
    check_groups(optimizer, manifest, own)
    with Contents(manifest) as contents:
        check_buffers(contents, dict(buffers_of(optimizer)))
    kinds = manifest.head["scheduler_type"], scheduler and type(scheduler).__name__
    if kinds[0] != kinds[1]:
        raise CheckpointError(
            f"{where} was saved with scheduler={kinds[0]}, and scheduler={kinds[1]} was given; give the "
            "same kind, or none"
        )
    return targets


def check_states(optimizer: ZeroOptimizer, where: Path, target: Target) -> None:
    """The states of a parameter are of the optimizer's kind."""
    kinds, is_trained = kinds_of(target.store), target.store.unit.is_trained
    for part in target.parts:
        is_other = {*kinds} != {*part.pieces} and "param" not in (*kinds, *part.pieces)
        if is_other or (is_trained and part.steps and target.numbers is None):
            saved, here = ([*names][1:] or "no state" for names in (part.pieces, kinds))
            raise CheckpointError(
                f"{where} has {saved} of {part.name!r}, and this {kind_of(optimizer)} keeps {here}: "
                "make the same kind with the same options, or take the weights alone (zk export)"
            )


def check_groups(optimizer: ZeroOptimizer, manifest: Manifest, own: Mapping[str, str]) -> None:
    """Groups have the same parameters, in any order. ``own``: name here -> name without tiles."""
    parts = (part for parts in manifest.weights().values() for part in parts)
    saved_as = {part.name: part.whole for part in parts}
    here = [
        (n, own[name])
        for n, g in enumerate(optimizer.param_groups)
        for name in names_of(optimizer, g)
    ]
    saved = [
        (n, saved_as.get(name))
        for n, g in enumerate(manifest.head["groups"])
        for name in g["params"]
    ]
    trained = {own[n] for s in optimizer._trained for n in s.unit.names}
    if {place for place in here if place[1] in trained} != {p for p in saved if p[1] in trained}:
        raise CheckpointError(
            f"{manifest.path} has other parameter groups than this optimizer; build the same groups in "
            "the same order first"
        )


def check_buffers(contents: Contents, buffers: Mapping[str, Tensor]) -> None:
    """The model has the buffers that were saved."""
    where, names = contents.manifest.path, sorted(contents.buffers)
    if names != sorted(buffers):
        raise CheckpointError(f"{where} has the buffers {names}, and this model {sorted(buffers)}")
    for name, buffer in buffers.items():
        saved, own = ((v.dtype, tuple(v.shape)) for v in (contents.buffer(name), buffer))
        if saved[1] != own[1] or saved[0].is_floating_point != own[0].is_floating_point:
            raise CheckpointError(f"{where}: buffer {name!r} is {saved}, and {own} in this model")


# ---- what is read ----------------------------------------------------------------------------------


class Contents(contextlib.ExitStack):
    """The tensors of a checkpoint, as a context: files are opened as they are needed."""

    def __init__(self, manifest: Manifest) -> None:
        super().__init__()
        self.manifest, first = manifest, manifest.ranks[0]
        self.buffers = dict.fromkeys(first["buffers"], first["file"])
        self.opened: dict[str, Tensors] = {}
        self.last: Tensors | None = None

    def file(self, name: str) -> Tensors:
        """The file ``name``. Memory does not grow with their number."""
        if name not in self.opened:
            written = self.manifest.files[name]
            self.opened[name] = self.enter_context(opened(self.manifest.path.parent, written))
        if self.last is not None and self.last is not self.opened[name]:
            self.last.block.cache_clear()
        self.last = self.opened[name]
        return self.last

    def buffer(self, name: str) -> Tensor:
        file, key = self.file(self.buffers[name]), f"buffer/{name}"
        return file.elements(key).view(file.entries[key].shape)

    def elements(self, part: Saved, kind: str, start: int, stop: int) -> Tensor:
        """Elements of a parameter, in the order in which it was saved: (n,). Zeros of no kind."""
        runs, at, end = [], part.offset + start, part.offset + stop
        for piece in part.pieces.get(part.as_kind(kind), ()):
            if at < min(end, piece.stop):
                upto, first = min(end, piece.stop), piece.start
                runs.append(self.file(piece.file).elements(piece.key, at - first, upto - first))
                at = upto
        return torch.cat(runs) if runs else torch.zeros(stop - start)

    def cut(self, parts: Sequence[Saved], kind: str, box: Place) -> Tensor:
        """A box of a weight, from the parts that it was saved in."""
        found: Tensor | None = None
        for part in parts:
            order = part.order or tuple(range(len(part.shape)))
            flat = self.elements(part, kind, 0, math.prod(part.shape))
            inverse = [order.index(dim) for dim in range(len(order))]
            values = flat.view([part.shape[dim] for dim in order]).permute(inverse)
            pairs = [common(*pair) for pair in zip(box, part.place, strict=True)]
            if found is None:
                found = values.new_zeros([cut.stop - cut.start for cut in box])
            if all(into.start < into.stop for into, _ in pairs):
                found[tuple(p[0] for p in pairs)] = values[tuple(p[1] for p in pairs)]
        assert found is not None
        return found


def common(one: slice, other: slice) -> tuple[slice, slice]:
    """What two ranges share, counted from the start of each."""
    start, stop = max(one.start, other.start), min(one.stop, other.stop)
    return slice(start - one.start, stop - one.start), slice(
        start - other.start, stop - other.start
    )


# ---- what is filled --------------------------------------------------------------------------------


def fill_all(optimizer: ZeroOptimizer, manifest: Manifest, targets: Sequence[Target]) -> None:
    """Put this rank's elements of all units, and the buffers, in their place, and publish them."""
    with Contents(manifest) as contents:
        # all of it, before ranks exchange anything
        with optimizer._layout.comm.together(f"reading {manifest.path}"):
            for store, of_unit in itertools.groupby(targets, lambda target: target.store):
                fill(store, list(of_unit), contents)
            buffers = dict(buffers_of(optimizer))
            for name in contents.buffers:
                buffers[name].copy_(contents.buffer(name))
        for store in optimizer._runtime.stores:
            store.is_updated, store.version = True, store.version + 1
            store.publish()


def fill(store: UnitStore, targets: Sequence[Target], contents: Contents) -> None:
    """Put this rank's elements of one unit in their place."""
    unit = store.unit

    @functools.lru_cache(maxsize=1)  # the next elements are mostly of the same parameter
    def cut_anew(index: int, kind: str) -> Tensor:
        """A parameter that was saved in other tiles, or in another order, as it lies here."""
        return unit.flat(index, contents.cut(targets[index].parts, kind, targets[index].place))

    def values(kind: str, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """Elements of this rank's shard."""
        flat = torch.zeros(stop - start, dtype=dtype)
        for index, here, wanted in unit.within(store.start + start, store.start + stop):
            target = targets[index]
            if target.is_alike:
                flat[here] = contents.elements(target.parts[0], kind, wanted.start, wanted.stop)
            else:
                flat[here] = cut_anew(index, kind)[wanted]
        return flat

    for number, bound in enumerate(store.bounds):
        if not unit.is_trained:
            param = store.param.open(bound)["param"]
            param.copy_(values("param", bound.start, bound.stop, unit.dtype))
            store.param.close(True, bound)
            continue
        with store.open(number) as fields:
            for start in range(bound.start, bound.stop, save.PIECE_NUMEL):
                stop = min(start + save.PIECE_NUMEL, bound.stop)
                part = slice(start - bound.start, stop - bound.start)
                exact = {kind: values(kind, start, stop, torch.float32) for kind in kinds_of(store)}
                store.codec.write({name: field[part] for name, field in fields.items()}, exact)
