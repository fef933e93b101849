"""Loading of a checkpoint of any number of ranks, stage, tier and dtype.

Nothing is changed if anything in it is wrong. Each rank reads what it holds, chunk by chunk.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zk.checkpoint import contents, files, save
from zk.checkpoint.contents import Checkpoint, Cut, Saved, revived
from zk.checkpoint.files import CheckpointError
from zk.logs import require
from zk.optimizer import ZeroOptimizer
from zk.parallel.comm import Comm
from zk.store import UnitStore

HOW = "; weights of a similar model come by zk export, then zk.load_pretrained(strict=False)"


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
    with checked(optimizer, Path(directory), scheduler) as (checkpoint, targets):
        head, rank = checkpoint.head, Comm(optimizer._layout.comm.group).rank
        with replacing(optimizer, f"load_checkpoint({str(checkpoint.folder)!r})"):
            # all of it, before ranks exchange anything
            with optimizer._layout.comm.together(f"reading {checkpoint.path}"):
                for store, of_unit in itertools.groupby(targets, lambda target: target.store):
                    fill(store, list(of_unit), checkpoint)
                for name, buffer in contents.buffers_of(optimizer):
                    buffer.copy_(checkpoint.buffer(name))
            for store in optimizer._runtime.stores:
                store.is_updated, store.version = True, store.version + 1
                store.publish()
            for group, saved in zip(optimizer.param_groups, head["groups"], strict=True):
                group |= revived(saved, group) | {"params": group["params"]}
            for target in targets:
                target.count()
            optimizer._scaler.load_state_dict(head["loss_scale"])
            optimizer.num_steps = head["counters"]["steps"]
            optimizer.skipped_steps = head["counters"]["skipped_steps"]
            if scheduler is not None:
                scheduler.load_state_dict(revived(head["scheduler"], scheduler.state_dict()))
            for said in checkpoint.ranks[rank : rank + 1]:  # ranks that it lacks stay as they are
                contents.restore_random(said["random"], optimizer._layout.device)
    return revived(head["extra"])


@contextlib.contextmanager
def replacing(optimizer: ZeroOptimizer, what: str) -> Iterator[None]:
    """States are a mixture from here to the end, and refused if it does not come to that."""
    optimizer._begin_anew()
    try:
        yield
    except BaseException as error:
        optimizer._torn = optimizer._runtime.broken = (
            f"{what} was interrupted ({type(error).__name__}: {error}), so states are a mixture: "
            "load_checkpoint() makes all of it whole again"
        )
        raise
    optimizer._torn = optimizer._runtime.broken = ""


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


@contextlib.contextmanager
def checked(
    optimizer: ZeroOptimizer, path: Path, scheduler: Any
) -> Iterator[tuple[Checkpoint, list[Target]]]:
    """The checkpoint that all ranks read, after each has checked a share of its files.

    A CheckpointError on one rank is one on all.
    """
    comm, what = optimizer._layout.comm, f"the checkpoint {path}"
    try:
        with comm.together(what):
            found = files.find(path) if comm.rank == 0 else path
        name = comm.words(what, os.path.relpath(found, path))[0]
        with comm.together(what):  # the first rank's choice, as each rank sees it
            checkpoint = Checkpoint(path / name)
            for written in checkpoint.files[comm.rank :: comm.size]:
                written.check(checkpoint.folder)
            targets = check(optimizer, checkpoint, scheduler)
        crcs = dict.fromkeys(comm.words(what, checkpoint.crc))
        require(len(crcs) == 1, f"its checksum is {' and '.join(crcs)}")
    except (CheckpointError, OSError, dist.DistError):
        raise
    except Exception as error:
        why = "is damaged, another program's, or not alike on all ranks"
        raise CheckpointError(f"{path} {why}: {error}") from error
    with checkpoint:
        yield checkpoint, targets


def check(optimizer: ZeroOptimizer, checkpoint: Checkpoint, scheduler: Any) -> list[Target]:
    """The checkpoint has all that this optimizer holds; returns its parameters."""
    need, cuts, targets = checkpoint.need, contents.cuts_of(optimizer.model), list[Target]()
    for store in optimizer._runtime.stores:
        for index, name in enumerate(store.unit.names):
            cut = cuts[name]
            parts = checkpoint.weights.get(cut.whole, [])
            saved = parts[0].cut.shape if parts else "nothing"
            need(saved == cut.shape, f"has {cut.whole!r} as {saved}, this model {cut.shape}{HOW}")
            about = cut, contents.order_of(store, index)
            alike = [part for part in parts if (part.cut, part.order) == about][:1]
            targets.append(Target(store, index, cut, alike or parts, bool(alike)))
            check_states(optimizer, checkpoint, targets[-1])
    more = [*(checkpoint.weights.keys() - {target.cut.whole for target in targets})]
    need(not more, f"has the parameters {more}, which are not in this model{HOW}")
    check_groups(optimizer, checkpoint, cuts)
    buffers = ((name, checkpoint.buffer(name)) for name in checkpoint.buffers)
    there, here = (
        {name: (v.is_floating_point(), v.shape) for name, v in pairs}
        for pairs in (buffers, contents.buffers_of(optimizer))
    )
    wrong = [name for name in there | here if there.get(name) != here.get(name)]
    need(not wrong, f"has other buffers than this model, or of other shapes: {wrong}")
    was, given = checkpoint.head["scheduler_type"], scheduler and type(scheduler).__name__
    words = f"was saved with scheduler={was}, and scheduler={given} was given; give the same kind"
    need(was == given, words)
    return targets


def check_states(optimizer: ZeroOptimizer, checkpoint: Checkpoint, target: Target) -> None:
    """The states of a parameter are of the optimizer's kind."""
    kinds, is_trained = contents.kinds_of(target.store), target.store.unit.is_trained
    for part in target.parts:
        is_known = {*kinds} == {*part.pieces} or "param" in (*kinds, *part.pieces)
        is_begun = is_trained and part.steps > 0
        checkpoint.need(
            is_known and not (is_begun and target.numbers is None),
            f"has {[*part.pieces]} of {part.name!r}, and this optimizer keeps {kinds}: "
            "make the same kind with the same options, or take the weights alone (zk export)",
        )


def check_groups(optimizer: ZeroOptimizer, checkpoint: Checkpoint, cuts: Mapping[str, Cut]) -> None:
    """Groups have the same parameters, in any order and tiles."""
    saved_as = {part.name: part.cut for parts in checkpoint.weights.values() for part in parts}
    trained = {cuts[name].whole for store in optimizer._trained for name in store.unit.names}
    groups = checkpoint.head["groups"]
    names = {param: name for name, param in optimizer.model.named_parameters()}
    here = [{cuts[names[p]].whole for p in group["params"]} for group in optimizer.param_groups]
    saved = [{saved_as[n].whole for n in g["params"] if n in saved_as} for g in groups]
    checkpoint.need(
        [trained & group for group in here] == [trained & group for group in saved],
        "has other parameter groups than this optimizer; build the same groups in the same order "
        "first",
    )


def fill(store: UnitStore, targets: list[Target], checkpoint: Checkpoint) -> None:
    """Put this rank's elements of one unit in their place."""
    unit = store.unit

    @functools.lru_cache(maxsize=1)  # the next elements are mostly of the same parameter
    def cut_anew(index: int, kind: str) -> Tensor:
        """A parameter that was saved in other tiles, or in another order, as it lies here."""
        target = targets[index]
        return unit.flat(index, checkpoint.whole(target.parts, kind)[target.cut.place])

    def values(kind: str, start: int, stop: int) -> Tensor:
        """Elements of this rank's shard."""
        flat = torch.zeros(stop - start, dtype=store.dtype_of(kind))
        for index, here, wanted in unit.within(store.start + start, store.start + stop):
            target = targets[index]
            if target.is_alike:
                flat[here] = checkpoint.elements(target.parts[0], kind, wanted.start, wanted.stop)
            else:
                flat[here] = cut_anew(index, kind)[wanted]
        return flat

    for number, bound in enumerate(store.bounds):
        with store.open(number) as fields:
            for start in range(bound.start, bound.stop, save.PIECE_NUMEL):
                stop = min(start + save.PIECE_NUMEL, bound.stop)
                part = {n: f[start - bound.start : stop - bound.start] for n, f in fields.items()}
                exact = {kind: values(kind, start, stop) for kind in contents.kinds_of(store)}
                if unit.is_trained:
                    store.codec.write(part, exact)
                else:  # codecs take some dtypes for codes of theirs
                    part["param"].copy_(exact["param"])
