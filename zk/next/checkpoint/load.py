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
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from zk.next.checkpoint import folders, save
from zk.next.checkpoint.files import (
    MANIFEST,
    CheckpointError,
    Entry,
    File,
    Tensors,
    together,
)
from zk.next.checkpoint.manifest import (
    Manifest,
    Place,
    Saved,
    Weight,
    as_here,
    buffers_of,
    check_random,
    kinds_of,
    kinds_of_optimizer,
    names_of,
    order_of,
    restore_random,
    revived,
    tiles_of,
)

if TYPE_CHECKING:
    from zk.next.optimizer import ZeroOptimizer
    from zk.next.store import UnitStore


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
    save.saver_of(optimizer).finish()
    if not optimizer._torn:
        save.settle(optimizer)
    rank, random = optimizer._layout.comm.rank, None
    with checking(optimizer, Path(directory)) as manifest:
        targets = check(optimizer, manifest, scheduler)
        if rank < len(manifest.ranks):
            random = manifest.ranks[rank]["random"]
            check_random(random)
    head = manifest.head
    with replacing(optimizer, manifest.folder):
        fill_all(optimizer, manifest, targets)
        for group, saved in zip(optimizer.param_groups, head["groups"], strict=True):
            options = {key: value for key, value in saved.items() if key != "params"}
            group.update(as_here(revived(options), {**group}))
        for target in targets:
            target.count()
        optimizer._scaler.load_state_dict(head["loss_scale"])
        optimizer.num_steps = head["counters"]["steps"]
        optimizer.skipped_steps = head["counters"]["skipped_steps"]
        if scheduler is not None:
            scheduler.load_state_dict(as_here(revived(head["scheduler"]), scheduler.state_dict()))
        if random is not None:
            restore_random(random, save.device_of(optimizer))
    return revived(head["extra"])


@contextlib.contextmanager
def replacing(optimizer: ZeroOptimizer, folder: Path) -> Iterator[None]:
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
            f"load_checkpoint({str(folder)!r}) was interrupted ({type(error).__name__}: {error}), so "
            "states are a mixture: load_checkpoint() makes all of it whole again"
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
    with together(comm, what):
        found = folders.find(path) if comm.rank == 0 else path
    name = comm.words(what, os.path.relpath(found, path))[0]
    folder = path if name == "." else path / name  # the first rank's choice, as each rank sees it
    with together(comm, what):
        try:
            manifest = Manifest.read(folder)
            for written in list(manifest.files.values())[comm.rank :: comm.size]:
                with contextlib.closing(File(folder, written)) as file:
                    file.check()
            yield manifest
        except CheckpointError:
            raise
        except (LookupError, TypeError, AttributeError, ArithmeticError, ValueError) as error:
            why = f"{folder / MANIFEST} is damaged, or another program's: {error!r}"
            raise CheckpointError(why) from error
    heads = comm.words(what, folders.crc_of(manifest.head))
    odd = [rank for rank, head in enumerate(heads) if head != heads[0]]
    if odd:
        raise CheckpointError(
            f"{folder} is another checkpoint on rank {odd[0]} than on rank 0; give all ranks the same"
        )


@dataclasses.dataclass(frozen=True)
class Target:
    """A parameter of this model, and the part of the checkpoint that it is read from."""

    store: UnitStore
    index: int
    weight: Weight
    """That it is, or is a tile of."""
    place: Place | None
    """Of a tile: its rows and columns."""
    parts: list[Saved]
    """The one that is cut and laid out alike; all of the weight where none is."""
    is_alike: bool

    @property
    def name(self) -> str:
        return self.store.unit.names[self.index]

    @functools.cached_property
    def latest(self) -> Saved:
        """The part with the most updates, which are the parameter's."""
        return max(self.parts, key=lambda part: part.steps)

    @functools.cached_property
    def numbers(self) -> dict[str, Any] | None:
        """What the rule keeps once for the parameter; None where it is of another kind."""
        like = self.store.rule.numbers(self.store.groups[self.index], 1)
        steps = {"step": float(self.latest.steps)}
        saved = self.latest.scalars
        saved = {key: steps[key] for key in steps.keys() & like} if saved is None else saved
        return as_here(revived(saved), like) if saved.keys() == like.keys() else None

    def count(self) -> None:
        """Take the number of updates, and what the rule keeps beside its fields."""
        store, steps = self.store, self.latest.steps
        if store.unit.is_trained:
            store.steps[self.index] = steps
            if steps:
                store.rule.know(store.groups[self.index], steps, self.numbers)


def targets_of(optimizer: ZeroOptimizer, manifest: Manifest) -> list[Target]:
    """Every parameter, unit by unit. CheckpointError unless the checkpoint is of the same weights."""
    where, tiles, weights, targets = (
        manifest.path,
        tiles_of(optimizer.model),
        manifest.weights(),
        [],
    )
    for store in optimizer._runtime.stores:
        for index, name in enumerate(store.unit.names):
            tile = tiles.get(name)
            whole, shape = (tile.whole, tile.shape) if tile else (name, store.unit.shapes[index])
            weight, place = weights.get(whole), tile.place if tile else None
            if weight is None or weight.shape != tuple(shape):
                saved = "not there" if weight is None else weight.shape
                raise CheckpointError(
                    f"{where}: parameter {whole!r} is {saved}, and {tuple(shape)} in this model"
                )
            order = order_of(store, index)
            alike = [part for part in weight.parts if part.place == place and part.order == order]
            parts = alike[:1] or weight.parts
            targets.append(Target(store, index, weight, place, parts, bool(alike)))
    for name in weights.keys() - {target.weight.name for target in targets}:
        raise CheckpointError(f"{where}: parameter {name!r} is not there in this model")
    return targets


def check(optimizer: ZeroOptimizer, manifest: Manifest, scheduler: Any) -> list[Target]:
    """The checkpoint has all that this optimizer holds; returns its parameters."""
    targets = targets_of(optimizer, manifest)
    check_groups(optimizer, manifest, targets)
    for target in targets:
        check_states(optimizer, manifest, target)
    with Contents(manifest) as contents:
        check_buffers(contents, dict(buffers_of(optimizer)))
    saved, here = manifest.head["scheduler_type"], type(scheduler).__name__
    if saved != (here if scheduler is not None else None):
        kind = f"the state of a {saved}" if saved else "no scheduler"
        given = f"a {here} was given" if scheduler is not None else "none was given"
        raise CheckpointError(
            f"{manifest.path} has {kind}, and {given}; give the same as when it was saved"
        )
    return targets


def check_groups(optimizer: ZeroOptimizer, manifest: Manifest, targets: Sequence[Target]) -> None:
    """Groups have the same parameters, in any order, and options that keep the same states."""
    trained = {target.weight.name for target in targets if target.store.unit.is_trained}
    whole = {part.name: target.weight.name for target in targets for part in target.weight.parts}
    whole |= {target.name: target.weight.name for target in targets}
    saved = [group["params"] for group in manifest.head["groups"]]
    here = [names_of(optimizer, group) for group in optimizer.param_groups]
    sets = [[trained & {whole.get(n, n) for n in names} for names in own] for own in (saved, here)]
    if sets[0] != sets[1]:
        raise CheckpointError(
            f"{manifest.path} has other parameter groups than this optimizer; build the same groups in "
            "the same order first"
        )
    for group, options in zip(optimizer.param_groups, manifest.head["groups"], strict=True):
        for name in ("amsgrad", "momentum"):
            if bool(options.get(name)) != bool(group.get(name)):
                raise CheckpointError(
                    f"{manifest.path}: {name!r} is {options.get(name)!r}, and {group.get(name)!r} in "
                    "this optimizer: they keep other states; make it with the same one"
                )


def check_states(optimizer: ZeroOptimizer, manifest: Manifest, target: Target) -> None:
    """All elements of a parameter and of its states are there, and of the optimizer's kind."""
    kinds = kinds_of(target.store)
    for part in target.parts:
        saved, here = list(part.pieces), kinds_of_optimizer(optimizer)
        is_other = {*kinds} != {*saved} and "param" not in (*kinds, *saved)
        if is_other or (target.store.unit.is_trained and part.steps and target.numbers is None):
            raise CheckpointError(
                f"{manifest.path} has {', '.join(saved[1:]) or 'no state'}, the state of another kind "
                f"of optimizer than {here}; make the same kind, or take the weights alone (zk export)"
            )
        for kind in filter(None, map(part.as_kind, kinds)):
            if gap := part.gap(kind):
                raise CheckpointError(
                    f"{manifest.path}: {kind!r} of parameter {part.name!r} is not there (elements "
                    f"{gap[0]} to {gap[1]})"
                )


def check_buffers(contents: Contents, buffers: Mapping[str, Tensor]) -> None:
    """The model has the buffers that were saved."""
    where = contents.manifest.path
    if contents.buffers.keys() != buffers.keys():
        raise CheckpointError(
            f"{where} has the buffers {sorted(contents.buffers)}, and this model {sorted(buffers)}"
        )
    for name, buffer in buffers.items():
        entry = contents.buffer_entry(name)
        is_float = entry.dtype.is_floating_point
        if entry.shape != buffer.shape or is_float != buffer.is_floating_point():
            raise CheckpointError(
                f"{where}: buffer {name!r} is {entry.dtype} {entry.shape}, and {buffer.dtype} "
                f"{tuple(buffer.shape)} in this model"
            )


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
            self.opened[name] = Tensors(self.manifest.folder, self.manifest.files[name])
            self.callback(self.opened[name].close)
        found = self.opened[name]
        if self.last is not None and self.last is not found:
            self.last.block.cache_clear()
        self.last = found
        return found

    def buffer_entry(self, name: str) -> Entry:
        return self.file(self.buffers[name]).entries[f"buffer/{name}"]

    def buffer(self, name: str) -> Tensor:
        return self.file(self.buffers[name]).elements(f"buffer/{name}")

    def elements(self, part: Saved, kind: str, start: int, stop: int) -> Tensor:
        """Elements of a parameter, in the order in which it was saved: (n,). Zeros of no kind."""
        runs, saved = [], part.as_kind(kind)
        for piece in part.pieces[saved] if saved is not None else ():
            low, high = max(start, piece.start), min(stop, piece.stop)
            if low < high:
                file, start = self.file(piece.file), high
                runs.append(file.elements(piece.key, low - piece.start, high - piece.start))
        return torch.cat(runs) if runs else torch.zeros(stop - start)

    def whole(self, part: Saved, kind: str) -> Tensor:
        """All of one parameter, in its shape."""
        flat, order = self.elements(part, kind, 0, part.numel), part.order or range(len(part.shape))
        inverse = [order.index(dim) for dim in range(len(order))]
        return flat.view([part.shape[dim] for dim in order]).permute(inverse)

    def cut(self, weight: Weight, kind: str, place: Place | None) -> Tensor:
        """A weight, or a box of it, from the parts that it was saved in."""
        everything = tuple(slice(0, size) for size in weight.shape)
        box = everything if place is None else place
        found = torch.zeros([cut.stop - cut.start for cut in box], dtype=torch.float64)
        for number, part in enumerate(weight.parts):
            pairs = [
                common(one, own) for one, own in zip(box, part.place or everything, strict=True)
            ]
            into, inner = tuple(pair[0] for pair in pairs), [pair[1] for pair in pairs]
            if any(cut.start >= cut.stop for cut in inner):
                continue
            if part.order is None and part.shape:  # of a tile only these rows are read
                row = math.prod(part.shape[1:])
                rows = self.elements(part, kind, inner[0].start * row, inner[0].stop * row)
                values = rows.view(-1, *part.shape[1:])[(slice(None), *inner[1:])]
            else:
                values = self.whole(part, kind)[tuple(inner)]
            if not number:
                found = found.to(values.dtype)
            found[into] = values
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
        with together(optimizer._layout.comm, f"reading {manifest.folder}"):
            for store, of_unit in itertools.groupby(targets, lambda target: target.store):
                fill(store, list(of_unit), contents)
            buffers = dict(buffers_of(optimizer))
            for name in contents.buffers:
                buffers[name].copy_(contents.buffer(name).view(buffers[name].shape))
        for store in optimizer._runtime.stores:
            store.is_updated, store.version = True, store.version + 1
            store.publish()


def fill(store: UnitStore, targets: Sequence[Target], contents: Contents) -> None:
    """Put this rank's elements of one unit in their place."""
    unit = store.unit

    @functools.lru_cache(maxsize=1)  # the next elements are mostly of the same parameter
    def cut_anew(index: int, kind: str) -> Tensor:
        """A parameter that was saved in other tiles, or in another order, as it lies here."""
        return unit.flat(index, contents.cut(targets[index].weight, kind, targets[index].place))

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
