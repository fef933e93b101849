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

from zk.checkpoint import folders, save
from zk.checkpoint.files import CheckpointError, Tensors, opened
from zk.checkpoint.manifest import (
    Cut,
    Manifest,
    Saved,
    buffers_of,
    crc_of,
    cuts_of,
    kind_of,
    kinds_of,
    names_of,
    order_of,
    restore_random,
    revived,
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
    with checking(optimizer, Path(directory)) as manifest:
        targets = check(optimizer, manifest, scheduler)
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
        rank = optimizer._layout.comm.rank
        for said in manifest.ranks[rank : rank + 1]:  # more ranks than saved go on as they are
            restore_random(said["random"], save.device_of(optimizer))
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
    comm, what = optimizer._layout.comm, f"the checkpoint {path}"
    try:
        with comm.together(what):
            found = folders.find(path) if comm.rank == 0 else path
        name = comm.words(what, os.path.relpath(found, path))[0]
        with comm.together(what):  # the first rank's choice, as each rank sees it
            manifest = Manifest.read(path / name)
            manifest.check_files(comm.rank, comm.size)
            yield manifest
        comm.agree(what, {"its checksum": crc_of(manifest.head)})
    except CheckpointError:
        raise
    except (LookupError, TypeError, AttributeError, ArithmeticError, ValueError) as error:
        raise CheckpointError(
            f"{path} is damaged, another program's, or not alike on all ranks: {error}"
        ) from error


@dataclasses.dataclass(frozen=True)
class Target:
    """A parameter of this model, and the parts of the checkpoint that it is read from."""

    store: UnitStore
    index: int
    cut: Cut
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
        saved = self.latest.scalars
        if not saved and "step" in like:  # of Adam 0.1.0 does not say it
            saved = {"step": float(self.latest.steps)}
        return revived(saved, like) if like.keys() == saved.keys() else None

    def count(self) -> None:
        """Take the number of updates, and what the rule keeps beside its fields."""
        store, steps = self.store, self.latest.steps
        store.steps[self.index] = steps * store.unit.is_trained
        if store.steps[self.index]:
            store.rule.know(store.groups[self.index], steps, self.numbers or {})


def check(optimizer: ZeroOptimizer, manifest: Manifest, scheduler: Any) -> list[Target]:
    """The checkpoint has all that this optimizer holds; returns its parameters."""
    where, cuts, weights = manifest.path, cuts_of(optimizer.model), manifest.weights()
    targets = []
    for store in optimizer._runtime.stores:
        for index, name in enumerate(store.unit.names):
            cut = cuts[name]
            parts = weights.get(cut.whole, [])
            saved = parts[0].cut.shape if parts else "not there"
            if saved != cut.shape:
                raise CheckpointError(
                    f"{where}: parameter {cut.whole!r} is {saved}, and {cut.shape} in this model"
                )
            about = cut, order_of(store, index)
            alike = [part for part in parts if (part.cut, part.order) == about][:1]
            targets.append(Target(store, index, cut, alike or parts, bool(alike)))
            check_states(optimizer, where, targets[-1])
    for name in weights.keys() - {target.cut.whole for target in targets}:
        raise CheckpointError(f"{where}: parameter {name!r} is not there in this model")
    check_groups(optimizer, manifest, cuts)
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


def check_groups(optimizer: ZeroOptimizer, manifest: Manifest, cuts: Mapping[str, Cut]) -> None:
    """Groups have the same parameters, in any order and tiles."""
    parts = itertools.chain.from_iterable(manifest.weights().values())
    saved_as, names = {part.name: part.cut.whole for part in parts}, names_of(optimizer.model)
    here = [[cuts[names[p]].whole for p in group["params"]] for group in optimizer.param_groups]
    saved = [[saved_as.get(n) for n in group["params"]] for group in manifest.head["groups"]]
    trained = {cuts[name].whole for store in optimizer._trained for name in store.unit.names}
    one, other = ([trained & {*group} for group in groups] for groups in (here, saved))
    if one != other:
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
        self.file = functools.cache(self.open)

    def open(self, name: str) -> Tensors:
        folder, written = self.manifest.path.parent, self.manifest.files[name]
        return Tensors(self.enter_context(opened(folder, written)))

    def buffer(self, name: str) -> Tensor:
        file, key = self.file(self.buffers[name]), f"buffer/{name}"
        return file.elements(key).view(file.entry(key).shape)

    def elements(self, part: Saved, kind: str, start: int, stop: int) -> Tensor:
        """Elements of a parameter, in the order in which it was saved: (n,). Zeros of no kind."""
        runs, at, end = [], part.offset + start, part.offset + stop
        for piece in part.pieces.get(part.as_kind(kind), ()):
            if at < min(end, piece.stop):
                upto, first = min(end, piece.stop), piece.start
                runs.append(self.file(piece.file).elements(piece.key, at - first, upto - first))
                at = upto
        return torch.cat(runs) if runs else torch.zeros(stop - start)

    def whole(self, parts: Sequence[Saved], kind: str) -> Tensor:
        """A weight, from the parts that it was saved in."""
        found: Any = None
        for part in parts:
            flat = self.elements(part, kind, 0, math.prod(part.shape))
            inverse = [part.order.index(dim) for dim in range(len(part.shape))]
            values = flat.view([part.shape[dim] for dim in part.order]).permute(inverse)
            found = values.new_zeros(part.cut.shape) if found is None else found
            found[part.cut.place] = values
        return found  # type: ignore[no-any-return]


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
        target = targets[index]
        return unit.flat(index, contents.whole(target.parts, kind)[target.cut.place])

    def values(kind: str, start: int, stop: int) -> Tensor:
        """Elements of this rank's shard."""
        flat = torch.zeros(stop - start, dtype=store.dtype_of(kind))
        for index, here, wanted in unit.within(store.start + start, store.start + stop):
            target = targets[index]
            if target.is_alike:
                flat[here] = contents.elements(target.parts[0], kind, wanted.start, wanted.stop)
            else:
                flat[here] = cut_anew(index, kind)[wanted]
        return flat

    for number, bound in enumerate(store.bounds):
        with save.fields_of(store, number, changed=True) as fields:
            for start in range(bound.start, bound.stop, save.PIECE_NUMEL):
                stop = min(start + save.PIECE_NUMEL, bound.stop)
                part = {n: f[start - bound.start : stop - bound.start] for n, f in fields.items()}
                exact = {kind: values(kind, start, stop) for kind in kinds_of(store)}
                if unit.is_trained:
                    store.codec.write(part, exact)
                else:  # codecs take some dtypes for codes of theirs
                    part["param"].copy_(exact["param"])
