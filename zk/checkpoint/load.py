"""Loading of a checkpoint of any world size, stage, tier and dtype; nothing is changed if anything in it is wrong.

Every rank reads the elements that it holds, by ranges, and puts them into its chunks one after the other: memory does not grow with the model.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from zk.checkpoint import base, folders, save
from zk.checkpoint.files import CheckpointError, Reader, check_file
from zk.checkpoint.manifest import (
    Manifest,
    Saved,
    Source,
    Weight,
    check_random_state,
    gap,
    kinds_of,
    names_of_groups,
    revived,
    seal_of,
    set_random_state,
    sources_of,
)
from zk.checks import check_options, check_scale_and_counters
from zk.memory import overwrite
from zk.tiled_linear import Piece as TilePlace
from zk.tiled_linear import pieces_of
from zk.units import shaped_of

if TYPE_CHECKING:
    from zk.checkpoint.manifest import Training
    from zk.store import UnitStore

Sources = dict[tuple[str, str], list[Source]]  # (parameter's name, kind) -> where its elements are


def find(path: Path) -> Path:
    """The checkpoint that ``path`` means: itself, or the latest one in it."""
    if (path / "manifest.json").exists():
        return path
    found = folders.latest(path)
    if found is None:
        weights = path.is_dir() and any(path.glob("*.safetensors*"))
        hint = f"; zk.load_pretrained(model, {str(path)!r}) reads the weights that are there" if weights else ""
        raise CheckpointError(f"{path} has no checkpoint: neither manifest.json nor a folder step-* with one{hint}")
    return found


def load(optimizer: Training, path: Path, scheduler: Any) -> Any:
    """Take over everything from the checkpoint; returns what was saved as ``extra``. All ranks call it."""
    with _checking(optimizer, path) as folder:
        opened = _opened(optimizer, folder)
        manifest, steps = opened.manifest, _check(optimizer, opened)
        _check_scheduler(manifest, scheduler)
        random = manifest.ranks[optimizer.comm.rank]["random"] if optimizer.comm.rank < len(manifest.ranks) else None  # an import has none
        if random is not None:
            check_random_state(random)
    _check_base(optimizer, opened)
    here = [(param, *optimizer.units[param]) for param in optimizer.frozen if param in optimizer.units]
    frozen = [param for param, held, index in here if steps[held.unit.names[index]]]
    if frozen:
        optimizer.unfreeze(frozen)  # as they had been when it was saved
        with save.together(optimizer.comm, f"checking {manifest.folder}"):
            steps = _check(optimizer, opened)
    with optimizer.replacing(f"load_checkpoint({str(manifest.folder)!r})"):
        _fill_all(optimizer, opened)
        for held in optimizer.held:
            for index, name in enumerate(held.unit.names):
                held.steps.pop(index, None)
                if steps[name] and held.shard is not None:
                    held.steps[index] = steps[name]
        for group, saved in zip(optimizer.param_groups, manifest.head["groups"], strict=True):
            group.update(_options(saved))
        optimizer.scaler.load_state_dict(manifest.head["loss_scale"])
        optimizer.counters.update(manifest.head["counters"])
        if scheduler is not None:
            scheduler.load_state_dict(revived(manifest.head["scheduler"]))
        if random is not None:
            set_random_state(random, optimizer.device)
    return revived(manifest.head["extra"])


def load_model(optimizer: Training, path: Path) -> None:
    """Take over parameters and buffers alone, whatever the groups are, into an optimizer that keeps no state. All ranks call it."""
    assert not any(held.shard.names for held in optimizer.held if held.shard is not None)
    with _checking(optimizer, path) as folder:
        opened = _opened(optimizer, folder)
        _check_model(optimizer, opened)
    _check_base(optimizer, opened)
    with optimizer.replacing(f"loading {opened.manifest.folder}"):
        _fill_all(optimizer, opened)


def _options(saved: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a group, as they were."""
    return {key: tuple(value) if key == "betas" else revived(value) for key, value in saved.items() if key != "params"}


# ---- what is checked first -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _checking(optimizer: Training, path: Path) -> Iterator[Path]:
    """The folder of the checkpoint that all ranks read, to be checked inside. What is wrong on one rank is a CheckpointError on all of them."""
    comm, what = optimizer.comm, f"checking {path}"
    with save.together(comm, what):
        found = find(path) if comm.rank == 0 else path
    name = comm.exchange(found.name if comm.rank == 0 and found != path else "", what)[0]  # the first rank's choice, as each rank sees it
    folder = path / name if name and not (path / "manifest.json").exists() else path
    with save.together(comm, what):
        mine = seal_of(folder)
    seals = comm.exchange(mine, what)
    if len(set(seals)) > 1:
        odd = next(rank for rank, seal in enumerate(seals) if seal != seals[0])
        raise CheckpointError(f"{folder} is another checkpoint on rank {odd} than on rank 0; all ranks load the same one, from the same folder")
    with save.together(comm, what):
        try:
            yield folder
        except (CheckpointError, torch.OutOfMemoryError):
            raise
        except ValueError as error:
            raise CheckpointError(str(error)) from error
        except (LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError) as error:  # what is there is of another kind
            raise CheckpointError(f"{folder / 'manifest.json'} is damaged, or was written by something else: {error!r}") from error


def _check_scheduler(manifest: Manifest, scheduler: Any) -> None:
    """Check that a scheduler is given where there was one, and of the same kind."""
    where, saved = manifest.folder / "manifest.json", manifest.head["scheduler"]
    if (scheduler is None) != (saved is None):
        has, gets = ("a", "none was") if scheduler is None else ("no", "one was")
        raise CheckpointError(f"{where} has {has} scheduler, and {gets} given; give the same as when it was saved")
    kind = manifest.head.get("scheduler_type")  # what older checkpoints do not say
    if scheduler is not None and kind not in (None, type(scheduler).__name__):
        raise CheckpointError(f"{where} has the state of a {kind}, another kind of scheduler than {type(scheduler).__name__}; give the same kind")


@dataclasses.dataclass(frozen=True, slots=True)
class _Opened:
    """A checkpoint, and how it and this model are cut."""

    manifest: Manifest
    sources: Sources
    tiles: Mapping[str, TilePlace]  # of this model
    weights: Mapping[str, Weight]  # of the checkpoint

    def whole(self, name: str) -> str:
        """The name of the weight that a parameter is, or is a tile of."""
        return self.tiles[name].whole if name in self.tiles else name

    def place(self, name: str) -> tuple[slice, ...] | None:
        """Rows and columns of a tile."""
        return self.tiles[name].place if name in self.tiles else None

    def alike(self, held: UnitStore, index: int) -> Saved | None:
        """The part of a weight that was cut and laid out as a parameter is here."""
        name, order = held.unit.names[index], held.unit.orders.get(index)
        parts = self.weights[self.whole(name)].parts
        return next((part for part in parts if part.place == self.place(name) and part.order == order), None)

    def origin(self, held: UnitStore, index: int) -> list[Saved]:
        """The parts that a parameter is read from: the one that is cut alike, or all of its weight."""
        alike = self.alike(held, index)
        return [alike] if alike is not None else self.weights[self.whole(held.unit.names[index])].parts


def _opened(optimizer: Training, folder: Path) -> _Opened:
    """The content of a checkpoint, after this rank's share of its files was checked."""
    manifest = Manifest.read(folder)
    for written in manifest.files[optimizer.comm.rank :: optimizer.comm.world]:
        check_file(manifest.folder, written)
    tiles = pieces_of(optimizer.model)
    return _Opened(manifest, sources_of(manifest), tiles, manifest.weights(tiles))


def names_without_tiles(optimizer: Training) -> dict[str, str]:
    """The name of each parameter -> the name of the weight that it is, or is a tile of."""
    tiles = pieces_of(optimizer.model)
    return {name: tiles[name].whole if name in tiles else name for held in optimizer.held for name in held.unit.names}


def _fill_all(optimizer: Training, opened: _Opened) -> None:
    """Put this rank's elements of all units, and the buffers, in their place, and publish them."""
    manifest = opened.manifest
    with readers_of(manifest) as readers:
        with save.together(optimizer.comm, f"reading {manifest.folder}"):  # all of it, before ranks exchange anything
            for held in optimizer.held:
                _fill(held, opened, Stored(opened.sources, readers))
        for held in optimizer.held:
            held.republish()
            if held.shard is not None:
                held.rewritten()
        buffers = dict(save.buffers_of(optimizer))
        for name in manifest.ranks[0]["buffers"]:
            value = readers[manifest.ranks[0]["file"]].read(f"buffer/{name}")
            overwrite(buffers[name], value.view(buffers[name].shape))
    for tier in optimizer.tiers.values():
        tier.flush()


def _check_pieces(manifest: Manifest, readers: Mapping[str, Reader]) -> None:
    """Check that the pieces which the manifest names are in the files, as it says."""
    numels = [sum(math.prod(param["shape"]) for param in unit["params"]) for unit in manifest.head["units"]]
    for piece in manifest.pieces:
        entry = readers[piece.file].entries.get(piece.key) if piece.file in readers else None
        is_there = entry is not None and math.prod(entry.shape) == piece.stop - piece.start
        is_number = piece.kind == "param" or (entry is not None and entry.dtype.is_floating_point)  # frozen weights are of any kind
        if not is_there or not is_number or not 0 <= piece.start <= piece.stop or not 0 <= piece.unit < len(numels):
            has = "nothing of that name" if entry is None else f"{entry.dtype} {entry.shape}"
            wanted = f"{piece.key!r}, elements {piece.start} to {piece.stop} of unit {piece.unit}"
            raise CheckpointError(f"{manifest.folder / piece.file} has {has} where the manifest has {wanted}")


def _check_options(optimizer: Training, manifest: Manifest) -> None:
    """Check that groups, loss scale and counters are of the kind that is here: a step would fail on them, or go another way."""
    where = manifest.folder / "manifest.json"
    for number, (group, saved) in enumerate(zip(optimizer.param_groups, manifest.head["groups"], strict=True)):
        options = _options(saved)
        check_options(number, group, options, str(where))
        asked, kept = (set(optimizer.rule.state_names(given)) for given in ({**group, **options}, group))
        if asked != kept:
            raise CheckpointError(
                f"{where}: the options of param_groups[{number}] keep {', '.join(sorted(asked)) or 'no state'}, those of this optimizer "
                f"{', '.join(sorted(kept)) or 'none'}; make it with the same amsgrad and momentum"
            )
    check_scale_and_counters(manifest.head, str(where))


def _check(optimizer: Training, opened: _Opened) -> dict[str, int]:
    """Check that the checkpoint has all that this optimizer holds; return the step count of every parameter."""
    _check_model(optimizer, opened)
    manifest, whole = opened.manifest, opened.whole
    saved_as = {part.name: weight.name for weight in opened.weights.values() for part in weight.parts}
    # which group a parameter is in decides what it becomes; its place there does not, nor do parameters that are not trained here
    trained = {whole(name) for held in optimizer.held if held.shard is not None for name in held.unit.names}
    saved_groups = [trained.intersection(saved_as.get(name, name) for name in group["params"]) for group in manifest.head["groups"]]
    if saved_groups != [trained.intersection(map(whole, names)) for names in names_of_groups(optimizer)]:
        raise CheckpointError(
            f"{manifest.folder / 'manifest.json'} has other parameter groups than this optimizer; build the same groups in the same order first"
        )
    _check_options(optimizer, manifest)
    steps = {}
    for held in optimizer.held:
        for index, name in enumerate(held.unit.names):
            origin = opened.origin(held, index)
            saved = origin[0].kinds[1:]
            if held.shard is not None and saved and not set(saved) & set(held.shard.names):
                raise CheckpointError(
                    f"{manifest.folder / 'manifest.json'} has {', '.join(saved)}, the state of another kind of optimizer than "
                    f"{type(optimizer.inner).__name__}; make the same kind, or take the weights alone (python -m zk export)"
                )
            steps[name] = max(part.steps for part in origin)
    return steps


def _check_model(optimizer: Training, opened: _Opened) -> None:
    """Check that every element that this optimizer holds is there, of a model with the same weights and buffers."""
    manifest, where = opened.manifest, opened.manifest.folder / "manifest.json"
    shapes = {name: weight.shape for name, weight in opened.weights.items()}
    mine: dict[str, tuple[int, ...]] = {}
    for held in optimizer.held:
        for name, param in zip(held.unit.names, held.unit.params, strict=True):
            mine[opened.whole(name)] = opened.tiles[name].shape if name in opened.tiles else tuple(param.shape)
    for name in [*mine, *shapes]:
        if mine.get(name) != shapes.get(name):
            raise CheckpointError(f"{where}: parameter {name!r} is {shapes.get(name, 'not there')}, and {mine.get(name, 'not there')} in this model")
    for weight in opened.weights.values():
        if sum(math.prod(part.shape) for part in weight.parts) != math.prod(weight.shape):
            raise CheckpointError(f"{where}: the tiles of {weight.name!r} are not all there, or lie over each other")
    # each part once, however many tiles are read from it
    needed = {
        (part.name, saved): math.prod(part.shape)
        for held in optimizer.held
        for index in range(len(held.unit.names))
        for kind in kinds_of(held)
        for part in opened.origin(held, index)
        if (saved := part.as_kind(kind)) is not None
    }
    trained = {name: held.shard is not None for held in optimizer.held for name in held.unit.names}
    for weight in opened.weights.values():
        for part in weight.parts:
            if part.sha256 and trained.get(part.name, True):
                raise CheckpointError(
                    f"{where}: parameter {part.name!r} was frozen and is left out (save_checkpoint(frozen=False)); here it is "
                    f"{'trained' if part.name in trained else 'cut otherwise'}: freeze it until the checkpoint is loaded"
                )
    for (name, kind), numel in needed.items():
        lacking = gap(opened.sources.get((name, kind), ()), numel)
        if lacking is not None:
            raise CheckpointError(f"{where}: {kind!r} of parameter {name!r} is not there (elements {lacking[0]} to {lacking[1]})")
    buffers = dict(save.buffers_of(optimizer))
    if sorted(buffers) != manifest.ranks[0]["buffers"]:
        raise CheckpointError(f"{where} has the buffers {manifest.ranks[0]['buffers']}, and this model {sorted(buffers)}")
    with contextlib.ExitStack() as opened_files:  # headers only, of files that have just been checked
        readers = {written.name: opened_files.enter_context(Reader(manifest.folder / written.name)) for written in manifest.files}
        _check_pieces(manifest, readers)
        entries = readers[manifest.ranks[0]["file"]].entries
        for name, buffer in buffers.items():
            entry = entries.get(f"buffer/{name}")
            if entry is None or entry.shape != tuple(buffer.shape) or entry.dtype.is_floating_point != buffer.is_floating_point():
                saved = "not there" if entry is None else f"{entry.dtype} {entry.shape}"
                raise CheckpointError(f"{where}: buffer {name!r} is {saved}, and {buffer.dtype} {tuple(buffer.shape)} in this model")


def _check_base(optimizer: Training, opened: _Opened) -> None:
    """Check that what was left out of a checkpoint, as it was frozen, is the same here. On all ranks."""
    left_out = {part.name: part.sha256 for weight in opened.weights.values() for part in weight.parts if part.sha256}
    here = base.digests(optimizer) if left_out else {}
    others = [name for name, sha256 in left_out.items() if here[name] != sha256]
    if others:
        raise CheckpointError(
            f"{opened.manifest.folder} was saved without its frozen parameters, over another base: {others[0]!r} and {len(others) - 1} more of "
            f"{len(left_out)} had other values, or another precision; load the base that it was trained over first (zk.load_pretrained)"
        )


@contextlib.contextmanager
def readers_of(manifest: Manifest) -> Iterator[Mapping[str, Reader]]:
    """Files with tensors, by name, opened as they are needed. What is read is checked once more: a drive may give other bytes the second time."""
    blocks = functools.lru_cache(maxsize=3)(Reader.block)  # of all of them: memory does not grow with their number
    files = {written.name: written for written in manifest.files}
    with contextlib.ExitStack() as opened:

        class Readers(dict[str, Reader]):
            def __missing__(self, name: str) -> Reader:
                self[name] = opened.enter_context(Reader(manifest.folder / name, files[name], blocks))
                return self[name]

        yield Readers()


@dataclasses.dataclass(frozen=True, slots=True)
class Stored:
    """The elements of a checkpoint, in its open files."""

    sources: Sources
    readers: Mapping[str, Reader]

    def elements(self, name: str, kind: str, start: int, stop: int) -> Iterator[tuple[int, Tensor]]:
        """Elements ``start`` to ``stop`` of a parameter, in the order in which it was saved, in runs: (position of the first, values)."""
        for source in self.sources[name, kind]:
            begin, end = max(source.start, start), min(source.stop, stop)
            if begin < end:
                first = source.offset + begin - source.start
                yield begin, self.readers[source.piece.file].read(source.piece.key, first, first + end - begin)

    def whole(self, part: Saved, kind: str) -> Tensor:
        """All of one parameter, in its shape."""
        numel = math.prod(part.shape)
        flat = torch.cat([values for _, values in self.elements(part.name, kind, 0, numel)]) if numel else torch.zeros(0)
        return shaped_of(flat, part.shape, part.order)

    def region(self, weight: Weight, kind: str | None, rows: slice, columns: slice) -> Tensor:
        """Rows and columns of a matrix, from the tiles that it was saved in. Only these rows are read. None: what is exact of each tile."""
        found: Tensor | None = None
        for part in weight.parts:
            top, left = part.place or (slice(0, weight.shape[0]), slice(0, weight.shape[1]))
            first, last = max(rows.start, top.start), min(rows.stop, top.stop)
            begin, end = max(columns.start, left.start), min(columns.stop, left.stop)
            if first >= last or begin >= end:
                continue
            wanted = part.kinds[0] if kind is None else kind
            if part.order is None:
                width = left.stop - left.start
                runs = self.elements(part.name, wanted, (first - top.start) * width, (last - top.start) * width)
                values = torch.cat([run for _, run in runs]).view(-1, width)
            else:
                values = self.whole(part, wanted)[first - top.start : last - top.start]
            if found is None:
                found = values.new_empty(rows.stop - rows.start, columns.stop - columns.start)
            found = found.to(torch.promote_types(found.dtype, values.dtype))  # a frozen tile is in the precision that it computes in
            into = found[first - rows.start : last - rows.start, begin - columns.start : end - columns.start]
            into.copy_(values[:, begin - left.start : end - left.start])
        return torch.zeros(rows.stop - rows.start, columns.stop - columns.start) if found is None else found


def _fill(held: UnitStore, opened: _Opened, stored: Stored) -> None:
    """Put this rank's elements of one unit in their place."""
    begins = held.held.start

    @functools.lru_cache(maxsize=1)  # the next elements are mostly of the same parameter
    def cut_anew(index: int, kind: str) -> Tensor:
        """A parameter that was saved in other tiles, or in another order, as it lies here: (numel,)."""
        name = held.unit.names[index]
        weight, place = opened.weights[opened.whole(name)], opened.place(name)
        if place is None and weight.parts[0].place is None:
            return held.unit.flat(index, stored.whole(weight.parts[0], kind))
        return held.unit.flat(index, stored.region(weight, kind, *(place or map(functools.partial(slice, 0), weight.shape))))

    def runs(index: int, kind: str, start: int, stop: int) -> Iterator[tuple[int, Tensor]]:
        """Elements ``start`` to ``stop`` of a parameter, as ``Stored.elements``."""
        alike = opened.alike(held, index)
        if alike is not None:
            yield from stored.elements(alike.name, kind, start, stop)
        else:
            yield start, cut_anew(index, kind)[start:stop]

    def values(kind: str, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """Elements of the flat buffer."""
        flat = torch.zeros(stop - start, dtype=dtype)
        for index in range(len(held.unit.params)):
            whole = held.layout.whole(index)
            begin, end = max(start, whole.start), min(stop, whole.stop)
            saved = opened.origin(held, index)[0].as_kind(kind)
            if begin < end and saved is not None:
                for position, found in runs(index, saved, begin - whole.start, end - whole.start):
                    at = whole.start + position - start
                    flat[at : at + found.numel()] = found
        return flat

    if held.shard is None:
        stays = [index for index in range(len(held.unit.params)) if opened.origin(held, index)[0].sha256]
        if len(stays) == len(held.unit.params):
            return
        mine = values("param", begins, held.held.stop, held.unit.dtype)
        held.settle()
        if stays:
            before = held.home.whole()
            for index in stays:
                mine[held.mine(index)] = before[held.mine(index)].cpu()
            held.home.release()
        held.home.write(mine)
        return
    held.settle()
    for number, chunk in enumerate(held.shard.chunks):
        with held.shard.opened(number, changes=True, read=False) as fields:
            for start in range(chunk.start, chunk.stop, save.PIECE_NUMEL):
                stop = min(start + save.PIECE_NUMEL, chunk.stop)
                here = slice(start - chunk.start, stop - chunk.start)
                exact = {kind: values(kind, begins + start, begins + stop, torch.float32) for kind in kinds_of(held)}
                held.shard.put(fields, here, exact)
    held.shard.upload()
