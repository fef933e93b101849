"""Loading of a checkpoint of any world size, stage, tier and dtype; nothing is changed if anything in it is wrong.

Every rank reads the elements that it holds, by ranges, and puts them into its chunks one after the other: memory does not grow with the model.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from zk.checkpoint import base, folders, save
from zk.checkpoint.files import CheckpointError, Entry, Reader, check_file
from zk.checkpoint.manifest import (
    Manifest,
    Saved,
    Weight,
    check_random_state,
    kinds_of,
    names_of_groups,
    names_of_kinds,
    revived,
    seal_of,
    set_random_state,
)
from zk.core.checks import check_options, check_scale_and_counters
from zk.core.memory import overwrite
from zk.core.units import overlap, shaped_of
from zk.kernels import codec
from zk.offload.packing import PACKED, part_of
from zk.parallel.comm import together

if TYPE_CHECKING:
    from zk.checkpoint.manifest import Training
    from zk.core.store import UnitStore
    from zk.parallel.model_parallel import Parts


def find(path: Path) -> Path:
    """The same as ``folders.find``; CheckpointError where there is none."""
    found = folders.find(path)
    if found is None:
        hint = ""
        if any(path.glob("rank-*.safetensors")):
            hint = "; its manifest.json is gone: copy the checkpoint once more, or load an earlier one"
        elif any(path.glob("*.safetensors*")):
            hint = f"; zk.load_pretrained(model, {str(path)!r}) reads the weights that are there"
        named = folders.named(path)
        where = f"{path / named}, which {path / folders.LATEST} names," if named else str(path)
        if any((path / named).glob("*_states.pt")):
            hint = "; DeepSpeed wrote it: make weights of it with its zero_to_fp32.py, then zk.load_pretrained(model, folder)"
        raise CheckpointError(f"{where} has no checkpoint: neither manifest.json nor a folder step-* with one{hint}")
    return found


def load(optimizer: Training, path: Path, scheduler: Any) -> Any:
    """Take over everything from the checkpoint; returns what was saved as ``extra``. All ranks call it."""
    with _checking(optimizer, path) as manifest:
        targets = _check(optimizer, manifest)
        _check_scheduler(manifest, scheduler)
        rank, random = optimizer.everyone.rank, None
        # model parallel ranks draw alike, or not, as they did then
        if rank < len(manifest.ranks) and manifest.head["model_parallel"] == optimizer.parts.count:
            random = manifest.ranks[rank]["random"]
            check_random_state(random)
    _check_base(optimizer, manifest, targets)
    optimizer.updates.forget()
    updated = {target.param for target in targets if target.latest.steps}
    frozen = [param for param in optimizer.frozen if param in updated]
    if frozen:
        optimizer.unfreeze(frozen)  # as they had been when it was saved
        with together(optimizer.everyone, f"checking {manifest.folder}"):
            targets = _check(optimizer, manifest)
    with optimizer.integrity.replacing(f"load_checkpoint({str(manifest.folder)!r})"):
        _fill_all(optimizer, manifest, targets)
        for target in targets:
            held, index, latest = target.held, target.index, target.latest
            for kept in (held.steps, held.scalars, held.shown_state):
                kept.pop(index, None)
            if latest.steps and held.shard is not None:
                held.steps[index] = latest.steps
                if latest.scalars is not None:
                    held.scalars[index] = latest.scalars
        for group, saved in zip(optimizer.param_groups, manifest.head["groups"], strict=True):
            group.update(_options(saved, group))
        optimizer.scaler.load_state_dict(manifest.head["loss_scale"])
        optimizer.counters.update(manifest.head["counters"])
        if scheduler is not None:
            scheduler.load_state_dict(_as_here(revived(manifest.head["scheduler"]), scheduler.state_dict()))
        if random is not None:
            set_random_state(random, optimizer.device)
    return revived(manifest.head["extra"])


def load_model(optimizer: Training, path: Path) -> None:
    """Take over parameters and buffers alone, whatever the groups are, into an optimizer that keeps no state. All ranks call it."""
    assert not any(held.shard.names for held in optimizer.held if held.shard is not None)
    with _checking(optimizer, path) as manifest:
        targets = _check_model(optimizer, manifest)
    _check_base(optimizer, manifest, targets)
    with optimizer.integrity.replacing(f"loading {manifest.folder}"):
        _fill_all(optimizer, manifest, targets)


def _options(saved: Mapping[str, Any], group: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a group, as they were."""
    return {key: _as_here(revived(value), group.get(key)) for key, value in saved.items() if key != "params"}


def _as_here(value: Any, here: Any) -> Any:
    """``value`` in the types of what is in its place now; JSON has made lists of tuples, dicts of Counters, and numbers of tensors."""
    if isinstance(here, Tensor) and isinstance(value, (int, float)):  # a learning rate: its own step() computes with it in its precision
        return torch.full_like(here, value)
    if isinstance(value, list) and isinstance(here, (list, tuple)):
        items = [_as_here(item, there) for item, there in itertools.zip_longest(value, here[: len(value)])]
        return tuple(items) if isinstance(here, tuple) else items
    if isinstance(value, dict) and isinstance(here, dict):
        made = here.copy()
        made.clear()
        made.update({key: _as_here(item, here.get(key)) for key, item in value.items()})
        return made
    return value


# ---- what is checked first -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _checking(optimizer: Training, path: Path) -> Iterator[Manifest]:
    """The checkpoint that all ranks read, after each has checked a share of its files. A CheckpointError on one rank, inside too, is one on all."""
    comm, what = optimizer.everyone, f"checking {path}"
    with together(comm, what):
        found = find(path) if comm.rank == 0 else path
    name = comm.exchange("" if found == path else str(found.relative_to(path)), what)[0]
    folder = path if (path / "manifest.json").exists() else path / name  # the first rank's choice, as each rank sees it
    with together(comm, what):
        mine = seal_of(folder)
    seals = comm.exchange(mine, what)
    if len(set(seals)) > 1:
        odd = next(rank for rank, seal in enumerate(seals) if seal != seals[0])
        raise CheckpointError(f"{folder} is another checkpoint on rank {odd} than on rank 0; all ranks load the same one, from the same folder")
    with together(comm, what):
        try:
            manifest = Manifest.read(folder)
            for written in manifest.files[comm.rank :: comm.world]:
                check_file(folder, written)
            yield manifest
        except (CheckpointError, torch.OutOfMemoryError):
            raise
        except ValueError as error:
            raise CheckpointError(str(error)) from error
        except (LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError) as error:  # what is there is of another kind
            raise CheckpointError(f"{folder / 'manifest.json'} is damaged, or was written by something else: {error!r}") from error


def _check_scheduler(manifest: Manifest, scheduler: Any) -> None:
    """Check that a scheduler is given where there was one, and of the same kind."""
    where, saved = manifest.path, manifest.head["scheduler"]
    if (scheduler is None) != (saved is None):
        has, gets = ("a", "none was") if scheduler is None else ("no", "one was")
        raise CheckpointError(f"{where} has {has} scheduler, and {gets} given; give the same as when it was saved")
    kind = manifest.head["scheduler_type"]
    if scheduler is not None and kind != type(scheduler).__name__:
        raise CheckpointError(f"{where} has the state of a {kind}, another kind of scheduler than {type(scheduler).__name__}; give the same kind")


@dataclasses.dataclass(frozen=True, slots=True)
class _Target:
    """A parameter of this model, and the part of the checkpoint that it is read from."""

    held: UnitStore
    index: int
    weight: Weight  # that it is, or is a tile of
    place: tuple[slice, ...] | None  # of a tile: its rows and columns
    parts: list[Saved]  # the one that is cut and laid out alike; all of the weight where none is
    is_alike: bool

    @property
    def name(self) -> str:
        return self.held.unit.names[self.index]

    @property
    def param(self) -> nn.Parameter:
        return self.held.unit.user(self.index)

    @property
    def latest(self) -> Saved:
        """The part with the most updates, which are the parameter's; so are the numbers that its optimizer's own step() kept beyond that."""
        return max(self.parts, key=lambda part: part.steps)


def _targets(optimizer: Training, manifest: Manifest) -> list[_Target]:
    """Every parameter that this rank has, unit by unit. CheckpointError unless the checkpoint is of the same weights."""
    tiles, weights, targets = optimizer.parts.pieces_of(optimizer.model), manifest.weights(), []
    for held in optimizer.held:
        for index, (name, param) in enumerate(zip(held.unit.names, held.unit.params, strict=True)):
            tile = tiles.get(name)
            whole, shape, place = (name, tuple(param.shape), None) if tile is None else (tile.whole, tile.shape, tile.place)
            weight = weights.get(whole)
            if weight is None or weight.shape != shape:
                saved = "not there" if weight is None else weight.shape
                raise CheckpointError(f"{manifest.path}: parameter {whole!r} is {saved}, and {shape} in this model")
            alike = [part for part in weight.parts if part.place == place and part.order == held.unit.orders.get(index)]
            targets.append(_Target(held, index, weight, place, alike[:1] or weight.parts, bool(alike)))
    known = {target.weight.name for target in targets}
    if optimizer.parts.count > 1:
        said = optimizer.everyone.exchange(json.dumps(sorted(known)), "comparing the parts of the model")
        known = set(itertools.chain.from_iterable(map(json.loads, said)))
    for name in weights:
        if name not in known:
            raise CheckpointError(f"{manifest.path}: parameter {name!r} is {weights[name].shape}, and not there in this model")
    return targets


def _fill_all(optimizer: Training, manifest: Manifest, targets: Sequence[_Target]) -> None:
    """Put this rank's elements of all units, and the buffers, in their place, and publish them."""
    with Contents(manifest, optimizer.parts) as contents:
        with together(optimizer.everyone, f"reading {manifest.folder}"):  # all of it, before ranks exchange anything
            filled = [held for held, of_unit in itertools.groupby(targets, lambda target: target.held) if _fill(held, list(of_unit), contents)]
        for held in filled:
            held.republish()
            if held.shard is not None:
                held.rewritten()
        buffers = dict(save.buffers_of(optimizer))
        for name in contents.buffers:
            overwrite(buffers[name], contents.buffer(name).view(buffers[name].shape))
    for tier in optimizer.tiers.values():
        tier.flush()


def _check_pieces(contents: Contents) -> None:
    """Check that the pieces which the manifest names are in the files, as it says."""
    manifest, num_units = contents.manifest, len(contents.manifest.head["units"])
    for piece in manifest.pieces:
        entry = contents.reader(piece.file).entries.get(piece.key) if piece.file in contents.files else None
        is_there = entry is not None and math.prod(entry.shape) == piece.stop - piece.start
        is_number = piece.is_any_number or (entry is not None and entry.dtype.is_floating_point)
        if not is_there or not is_number or not 0 <= piece.start <= piece.stop or not 0 <= piece.unit < num_units:
            has = "nothing of that name" if entry is None else f"{entry.dtype} {entry.shape}"
            wanted = f"{piece.key!r}, elements {piece.start} to {piece.stop} of unit {piece.unit}"
            raise CheckpointError(f"{manifest.folder / piece.file} has {has} where the manifest has {wanted}")


def _check_options(optimizer: Training, manifest: Manifest) -> None:
    """Check that groups, loss scale and counters are of the kind that is here: a step would fail on them, or go another way."""
    for number, (group, saved, rule) in enumerate(zip(optimizer.param_groups, manifest.head["groups"], optimizer.rules, strict=True)):
        options = _options(saved, group)
        check_options(number, group, options, str(manifest.path))
        asked, kept = (set(rule.state_names(given)) for given in ({**group, **options}, group))
        if asked != kept:
            raise CheckpointError(
                f"{manifest.path}: the options of param_groups[{number}] keep {', '.join(sorted(asked)) or 'no state'}, those of this optimizer "
                f"{', '.join(sorted(kept)) or 'none'}; make it with the same amsgrad and momentum"
            )
    check_scale_and_counters(manifest.head, str(manifest.path))


def _check(optimizer: Training, manifest: Manifest) -> list[_Target]:
    """Check that the checkpoint has all that this optimizer holds; return its parameters."""
    targets = _check_model(optimizer, manifest)
    # which group a parameter is in decides what it becomes; its place there does not, nor do parameters that are not trained here
    trained = {target.weight.name for target in targets if target.held.shard is not None}
    saved_as = {part.name: target.weight.name for target in targets for part in target.weight.parts}
    own = {target.name: target.weight.name for target in targets}
    saved_groups = [trained.intersection(saved_as.get(name, name) for name in group["params"]) for group in manifest.head["groups"]]
    if saved_groups != [trained.intersection(own.get(name, name) for name in names) for names in names_of_groups(optimizer)]:
        raise CheckpointError(f"{manifest.path} has other parameter groups than this optimizer; build the same groups in the same order first")
    _check_options(optimizer, manifest)
    for target in targets:
        shard, saved, kept = target.held.shard, target.parts[0].kinds[1:], target.held.kept_of(target.index)
        names = set(target.held.state_names(target.index))
        numbers = None if shard is None or shard.rule.templates is None else set(shard.rule.templates)
        latest = target.latest
        is_other = bool(latest.steps) and numbers != (None if latest.scalars is None else set(latest.scalars))
        here = {name: (one.shape, str(one.dtype).removeprefix("torch.")) for name, one in kept.items()}
        is_other |= bool(saved and kept) and (set(saved) != names or any(target.parts[0].described(name) != one for name, one in here.items()))
        if shard is not None and ((saved and not set(saved) & names) or is_other):
            raise CheckpointError(
                f"{manifest.path} has {', '.join(saved)}, the state of another kind of optimizer than {names_of_kinds(optimizer)}; make the "
                "same kind, or take the weights alone (zk export)"
            )
    return targets


def _check_model(optimizer: Training, manifest: Manifest) -> list[_Target]:
    """Check that every element of parameters and buffers of this model is there."""
    where, targets = manifest.path, _targets(optimizer, manifest)
    trained = {target.name: target.held.shard is not None for target in targets}
    needed: dict[tuple[str, str | None], Saved] = {}  # each part once, however many tiles are read from it
    for target in targets:
        if sum(math.prod(part.shape) for part in target.weight.parts) != math.prod(target.weight.shape):
            raise CheckpointError(f"{where}: the tiles of {target.weight.name!r} are not all there, or lie over each other")
        for part in target.weight.parts:
            if part.sha256 and trained.get(part.name, True):
                raise CheckpointError(
                    f"{where}: parameter {part.name!r} was frozen and is left out (save_checkpoint(frozen=False)); here it is "
                    f"{'trained' if part.name in trained else 'cut otherwise'}: freeze it until the checkpoint is loaded"
                )
        kinds = (*kinds_of(target.held), *target.held.kept_of(target.index))
        needed |= {(part.name, part.as_kind(kind)): part for part in target.parts for kind in kinds}
    for (name, kind), part in needed.items():
        gap = part.gap(kind) if kind is not None else None
        if gap is not None:
            raise CheckpointError(f"{where}: {kind!r} of parameter {name!r} is not there (elements {gap[0]} to {gap[1]})")
    buffers = dict(save.buffers_of(optimizer))
    with Contents(manifest, optimizer.parts, is_checked=False) as contents:  # of files that have just been checked
        missing, others = set(buffers).difference(contents.buffers), set(contents.buffers).difference(buffers)
        if missing or (others and optimizer.parts.count == 1):
            raise CheckpointError(f"{where} has the buffers {sorted(contents.buffers)}, and this model {sorted(buffers)}")
        _check_pieces(contents)
        for name, buffer in buffers.items():
            entry = contents.buffer_entry(name)
            if entry is None or entry.shape != tuple(buffer.shape) or entry.dtype.is_floating_point != buffer.is_floating_point():
                saved = "not there" if entry is None else f"{entry.dtype} {entry.shape}"
                raise CheckpointError(f"{where}: buffer {name!r} is {saved}, and {buffer.dtype} {tuple(buffer.shape)} in this model")
    return targets


def _check_base(optimizer: Training, manifest: Manifest, targets: Sequence[_Target]) -> None:
    """Check that what was left out of a checkpoint, as it was frozen or is a module's own, is the same here. On all ranks."""
    left_out = {part.name: part.sha256 for target in targets for part in target.parts if part.sha256}
    here = base.digests(optimizer) if left_out else {}
    others = [name for name, sha256 in left_out.items() if here[name] != sha256]
    if others:
        raise CheckpointError(
            f"{manifest.folder} was saved without its frozen parameters, over another base: {len(others)} of {len(left_out)} parameters, "
            f"{others[0]!r} first, had other values, or another precision; load the base that it was trained over first (zk.load_pretrained)"
        )
    saved = manifest.head["entries"]
    if not isinstance(saved, Mapping):
        raise CheckpointError(f"{manifest.folder / 'manifest.json'} is damaged: its entries are {saved!r}")
    entries = base.digests_of_entries(optimizer) if saved else {}
    scales = [name for name, sha256 in saved.items() if entries.get(name, sha256) != sha256]
    if scales:
        raise CheckpointError(
            f"{manifest.folder} was saved over another base: {scales[0]!r} and {len(scales) - 1} more, which belong to its weights and are "
            "not in the checkpoint, had other values; load the base that it was trained over first"
        )


# ---- what is read --------------------------------------------------------------------------------------------------------------


class Contents(contextlib.ExitStack):
    """The tensors of a checkpoint, as a context: files are opened as they are needed.

    Args:
        parts: of the model now; None: one.
        is_checked: what is read is checked once more, as a drive may give other bytes the second time.
    """

    def __init__(self, manifest: Manifest, parts: Parts | None = None, is_checked: bool = True) -> None:
        super().__init__()
        self.manifest = manifest
        self.buffers = manifest.buffers(parts.part, parts.count) if parts is not None else manifest.buffers()
        self.files = {written.name: written if is_checked else None for written in manifest.files}
        self.opened: dict[str, Reader] = {}
        self.blocks = functools.lru_cache(maxsize=3)(Reader.block)  # of all files: memory does not grow with their number

    def reader(self, name: str) -> Reader:
        """The file ``name``."""
        if name not in self.opened:
            self.opened[name] = self.enter_context(Reader(self.manifest.folder / name, self.files[name], self.blocks))
        return self.opened[name]

    def buffer_entry(self, name: str) -> Entry | None:
        """The description of a buffer of the model; CheckpointError where parts of the model had different ones."""
        key, files = f"buffer/{name}", self.buffers[name]
        if len(files) > 1 and not all(torch.equal(self.reader(file).read(key), self.buffer(name)) for file in files[1:]):
            raise CheckpointError(
                f"{self.manifest.path}: the model parallel ranks had different values of buffer {name!r} each, and are another number now; load it "
                f"with {len(files)} of them"
            )
        return self.reader(files[0]).entries.get(key)

    def buffer(self, name: str) -> Tensor:
        """The values of a buffer of the model."""
        return self.reader(self.buffers[name][0]).read(f"buffer/{name}")

    def elements(self, part: Saved, kind: str, wanted: slice) -> Tensor:
        """Some elements of a parameter, in the order in which it was saved: (n,). Zeros of a kind that it has not."""
        runs = []
        for piece in part.pieces[saved] if (saved := part.as_kind(kind)) is not None else ():
            there, _ = overlap(slice(piece.start, piece.stop), wanted)
            if there.start < there.stop:
                runs.append(self.reader(piece.file).read(piece.key, there.start, there.stop))
                wanted = slice(piece.start + there.stop, wanted.stop)
        return torch.cat(runs) if runs else torch.zeros(wanted.stop - wanted.start)

    def kept(self, weight: Weight, part: Saved, name: str, like: Tensor) -> Tensor:
        """A state of a whole parameter, shaped as ``like``. Zeros of one that it has not."""
        if like.shape == weight.shape:
            return self.cut(weight, name, None)
        return self.elements(part, name, slice(0, like.numel())).view(like.shape)

    def whole(self, part: Saved, kind: str) -> Tensor:
        """All of one parameter, in its shape."""
        return shaped_of(self.elements(part, kind, slice(0, math.prod(part.shape))), part.shape, part.order)

    def cut(self, weight: Weight, kind: str, place: Sequence[slice] | None) -> Tensor:
        """A weight, or a box of it, from the parts that it was saved in. Of a tile only these rows are read."""
        if place is None and weight.parts[0].place is None:
            return self.whole(weight.parts[0], kind)
        everything = [slice(0, size) for size in weight.shape]
        box = everything if place is None else place
        shape = [cut.stop - cut.start for cut in box]
        found: Tensor | None = None
        for part in weight.parts:
            pairs = [overlap(cut, own) for cut, own in zip(box, part.place or everything, strict=True)]
            into, inner = zip(*pairs, strict=True)
            if any(cut.start >= cut.stop for cut in inner):
                continue
            if part.order is None:
                size = math.prod(part.shape[1:])
                values = self.elements(part, kind, slice(inner[0].start * size, inner[0].stop * size)).view(-1, *part.shape[1:])
            else:
                values = self.whole(part, kind)[inner[0]]
            if found is None:
                found = values.new_empty(shape)
            found = found.to(torch.promote_types(found.dtype, values.dtype))  # a frozen tile is in the precision that it computes in
            found[into] = values[(slice(None), *inner[1:])]
        return torch.zeros(shape) if found is None else found


def _fill(held: UnitStore, targets: Sequence[_Target], contents: Contents) -> bool:
    """Put this rank's elements of one unit in their place; False if the checkpoint leaves all of it out."""

    @functools.lru_cache(maxsize=1)  # the next elements are mostly of the same parameter
    def cut_anew(index: int, kind: str) -> Tensor:
        """A parameter that was saved in other tiles, or in another order, as it lies here: (numel,)."""
        return held.unit.flat(index, contents.cut(targets[index].weight, kind, targets[index].place))

    def values(kind: str, begin: int, end: int, dtype: torch.dtype) -> Tensor:
        """Elements of this rank's slice of the flat buffer."""
        flat = torch.zeros(end - begin, dtype=dtype)
        for index, target in enumerate(targets):
            here, wanted = held.layout.part(index, slice(held.held.start + begin, held.held.start + end))
            if wanted.start < wanted.stop:
                flat[here] = contents.elements(target.parts[0], kind, wanted) if target.is_alike else cut_anew(index, kind)[wanted]
        return flat

    if held.shard is None:
        stays = [index for index, target in enumerate(targets) if target.parts[0].sha256]
        if len(stays) == len(targets):
            return False
        mine = values("param", 0, held.held_numel, held.unit.dtype)
        held.settle()
        if stays:
            before = held.home.whole()
            for index in stays:
                mine[held.mine(index)] = before[held.mine(index)].cpu()
            held.home.release()
        held.home.write(mine)
        return True
    held.settle()
    for number, chunk in enumerate(held.shard.chunks):
        with held.shard.opened(number, changes=True, read=False) as fields:
            for start in range(chunk.start, chunk.stop, save.PIECE_NUMEL):
                stop = min(start + save.PIECE_NUMEL, chunk.stop)
                exact = {kind: values(kind, start, stop, torch.float32) for kind in kinds_of(held)}
                codec.write(part_of(fields, slice(start - chunk.start, stop - chunk.start)), exact)
            if (packing := held.shard.packing) is not None:
                for index in packing.inside(chunk):
                    for name, view in packing.views(index, fields[PACKED], chunk).items():
                        view.copy_(contents.kept(targets[index].weight, targets[index].parts[0], name, view))
    held.shard.upload()
    return True
