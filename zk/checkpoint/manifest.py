"""The manifest of a checkpoint: parameters by name and shape, where their elements are, and all that is not a tensor."""

from __future__ import annotations

import base64
import dataclasses
import itertools
import json
import math
import random
import zlib
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from zk.checkpoint.files import CheckpointError, Written, check_file, check_name, check_regular
from zk.checkpoint.folders import MANIFEST, crc_of
from zk.nn.tiles import Piece as TilePlace

if TYPE_CHECKING:
    from torch import nn

    from zk.checkpoint.folders import Claim
    from zk.config import ZeroConfig
    from zk.core.precision import LossScaler
    from zk.core.store import UnitStore
    from zk.offload.rules import Rule
    from zk.offload.tiers import Tier
    from zk.offload.transfer import Transfer
    from zk.parallel.comm import Comm
    from zk.parallel.model_parallel import Parts
    from zk.parallel.partitioned import Partition

FORMAT = "zk checkpoint"
VERSION = 4  # of 0.1.0; no release wrote another
_KEPT = "@"  # between the name of a state of a whole parameter and its offset


class Training(Protocol):
    """A ZeroOptimizer, as far as checkpoints are made of it."""

    model: nn.Module
    inners: list[torch.optim.Optimizer]
    param_groups: list[dict[str, Any]]
    config: ZeroConfig
    device: torch.device
    comm: Comm
    everyone: Comm
    parts: Parts
    held: list[UnitStore]
    units: dict[nn.Parameter, tuple[UnitStore, int]]
    tiers: dict[str, Tier]
    transfer: Transfer
    scaler: LossScaler
    counters: dict[str, int]
    frozen: list[nn.Parameter]
    partition: Partition
    claim: Claim
    integrity: Any
    updates: Any

    @property
    def rules(self) -> list[Rule]: ...
    def metrics(self) -> dict[str, float]: ...
    def _settle_state(self) -> None: ...
    def unfreeze(self, params: Collection[nn.Parameter]) -> None: ...


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive elements of one unit's flat buffer, of one kind, as a tensor of a file."""

    unit: int
    kind: str  # "master", a state of the optimizer, or "param" where there is no optimizer state
    start: int
    stop: int
    key: str
    file: str

    @property
    def is_any_number(self) -> bool:
        """Tell if values may be of any dtype: frozen weights, and what is kept of whole parameters. Others are of floating point."""
        return self.kind == "param" or _KEPT in self.kind


def of_unit(held: UnitStore, tiles: Mapping[str, TilePlace], digests: Mapping[str, str] | None) -> dict[str, Any]:
    """Describe a unit without its elements; for its ``tiles``, name the weight that each is a piece of.

    ``digests``: of frozen parameters, which are left out then.
    """
    left_out = digests if held.shard is None else None
    params: list[dict[str, Any]] = []
    kinds = kinds_of(held) if left_out is None and held.unit.is_counted else []
    lie = zip(held.unit.names, held.unit.params, held.layout.offsets, strict=True)
    for index, (name, param, offset) in enumerate(lie) if held.unit.is_counted else ():  # else others save it
        dtype, steps = str(held.unit.dtype).removeprefix("torch."), held.steps.get(index, 0)
        entry = {"name": name, "shape": list(param.shape), "dtype": dtype, "offset": offset, "steps": steps}
        if index in held.scalars:
            entry["scalars"] = dict(held.scalars[index])
        if kept := held.kept_of(index):
            entry["kept"] = {key: [list(one.shape), str(one.dtype).removeprefix("torch.")] for key, one in kept.items()}
        if index in held.unit.orders:
            entry["order"] = list(held.unit.orders[index])
        if name in tiles:
            tile = tiles[name]
            entry["whole"] = {"name": tile.whole, "shape": list(tile.shape), "place": [[cut.start, cut.stop] for cut in tile.place]}
        if left_out is not None:
            entry["sha256"] = left_out[name]
        params.append(entry)
    return {"name": held.unit.name, "trained": held.shard is not None, "kinds": kinds, "params": params}


def kinds_of(held: UnitStore) -> list[str]:
    """The kinds of values that are kept for each element."""
    return ["param"] if held.shard is None else ["master", *held.shard.names]


def kind_of_kept(name: str, offset: int) -> str:
    """The kind of a state of the whole parameter that begins at ``offset``."""
    return f"{name}{_KEPT}{offset}"


def plain(value: Any, what: str) -> Any:
    """``value`` as JSON can hold it: numbers, strings, lists, and dicts by string. TypeError, saying where, for anything else."""
    if isinstance(value, (str, bool, int, float, type(None))):
        return value
    if isinstance(value, np.generic) or (isinstance(value, Tensor) and value.numel() == 1):
        return value.item()
    if isinstance(value, (list, tuple)):
        return [plain(item, f"{what}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, Mapping):
        if not all(isinstance(key, (str, int)) for key in value):
            raise TypeError(f"{what} has keys that are neither strings nor numbers; a checkpoint keeps what JSON can hold")
        items = {key: plain(item, f"{what}[{key!r}]") for key, item in value.items()}
        is_by_number = "__items__" in value or any(isinstance(key, int) for key in value)  # JSON would make strings of them
        return {"__items__": [*map(list, items.items())]} if is_by_number else items
    raise TypeError(f"{what} is a {type(value).__name__}; a checkpoint keeps what JSON can hold: numbers, strings, lists, dicts")


def revived(value: Any) -> Any:
    """Undo ``plain``, but for tuples, which are lists now."""
    if isinstance(value, list):
        return [revived(item) for item in value]
    if isinstance(value, dict):
        if set(value) == {"__items__"}:
            return {key: revived(item) for key, item in value["__items__"]}
        return {key: revived(item) for key, item in value.items()}
    return value


def names_of_groups(optimizer: Training) -> list[list[str]]:
    """The parameters of each group."""
    names = {param: name for name, param in optimizer.model.named_parameters()}
    return [[names[param] for param in group["params"]] for group in optimizer.param_groups]


def names_of_kinds(optimizer: Training) -> str:
    """The classes of the user's optimizers."""
    return " and ".join(type(inner).__name__ for inner in optimizer.inners)


def tied_names(optimizer: Training) -> dict[str, str]:
    """Other names of tied parameters: name -> the name that its unit has."""
    own = {param: held.unit.names[index] for param, (held, index) in optimizer.units.items()}
    everywhere = optimizer.model.named_parameters(remove_duplicate=False)
    return {name: own[param] for name, param in everywhere if param in own and own[param] != name}


def of_optimizer(optimizer: Training, scheduler: Any, extra: Any, digests: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The part of a manifest that is the same on all ranks; ``digests`` as for ``of_unit``."""
    groups = []
    for number, (group, names) in enumerate(zip(optimizer.param_groups, names_of_groups(optimizer), strict=True)):
        options = {key: plain(value, f"param_groups[{number}][{key!r}]") for key, value in group.items() if key != "params"}
        groups.append({**options, "params": names})
    tiles = optimizer.parts.pieces_of(optimizer.model)
    config = getattr(getattr(optimizer.model, "config", None), "to_json_string", None)  # of models of Hugging Face
    return {
        "format": FORMAT,
        "version": VERSION,
        "optimizer": names_of_kinds(optimizer),
        "world": optimizer.everyone.world,
        "model_parallel": optimizer.parts.count,
        "stage": optimizer.config.stage,
        "counters": dict(optimizer.counters),
        "loss_scale": optimizer.scaler.state_dict(),
        "groups": groups,
        "units": [of_unit(held, tiles, digests) for held in optimizer.held],
        "tied": tied_names(optimizer),
        "model_config": str(config()) if callable(config) else None,
        "scheduler": plain(scheduler.state_dict(), "scheduler.state_dict()") if scheduler is not None else None,
        "scheduler_type": type(scheduler).__name__ if scheduler is not None else None,
        "extra": plain(extra, "extra"),
    }


def of_all_parts(parts: Parts, is_first: bool, head: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """Put together the heads of all parts of the model; return that of the whole, and the number of this part's first unit. On all ranks.

    Args:
        is_first: this rank speaks for its part.
        head: of this part.
    """
    if parts.count == 1:
        return head, 0
    for name, why in parts.unclear.items():
        raise ValueError(
            f"parameter {name!r} cannot be saved, as its place in the whole model is not known: {why}. Give modules the names that they have in the "
            "whole model, set param.partition_dim of what is cut, or name it in replicated_params"
        )
    said = parts.everyone.exchange(json.dumps(head) if is_first else "", "saving the parts of the model")
    heads = [json.loads(said[leader]) for leader in parts.leaders]
    whole = heads[0]
    firsts = list(itertools.accumulate((len(other["units"]) for other in heads), initial=0))
    for other in heads[1:]:
        if [{**group, "params": ()} for group in other["groups"]] != [{**group, "params": ()} for group in whole["groups"]]:
            raise ValueError("the parts of the model have other param_groups each, and a checkpoint has those of the whole; build the same ones")
        whole["units"] += other["units"]
        for group, others in zip(whole["groups"], other["groups"], strict=True):
            group["params"] = list(dict.fromkeys((*group["params"], *others["params"])))
        whole["tied"] |= other["tied"]
        whole["entries"] |= other["entries"]
    return whole, firsts[parts.part]


def random_state(device: torch.device) -> dict[str, Any]:
    """The generators of this process, and of the GPU that its model computes on."""
    version, state, gauss = random.getstate()
    kind, keys, *rest = np.random.get_state()
    return {
        "python": [version, _packed(state, np.uint32), gauss],
        "numpy": [kind, _packed(keys, np.uint32), *rest],
        "torch": _packed(torch.get_rng_state(), np.uint8),
        "cuda": _packed(torch.cuda.get_rng_state(device), np.uint8) if device.type == "cuda" else None,
    }


def _packed(numbers: Any, dtype: type[np.generic]) -> str:
    """A list of numbers, of which there are many, as text."""
    return base64.b64encode(zlib.compress(np.asarray(numbers, dtype=dtype).tobytes())).decode()


def _unpacked(text: str, dtype: type[np.generic]) -> Any:
    """Undo ``_packed``."""
    try:
        return np.frombuffer(zlib.decompress(base64.b64decode(text)), dtype).tolist()
    except zlib.error as error:
        raise ValueError(f"a random state cannot be read: {error}") from error


def _bytes(packed: Any) -> Tensor:
    return torch.tensor(_unpacked(packed, np.uint8), dtype=torch.uint8)


def _restore(state: Mapping[str, Any], python: Any, numpy: Any, host: Any) -> Tensor | None:
    """Give generators of python, numpy and torch their states from ``random_state``; return that of a GPU's."""
    version, numbers, gauss = state["python"]
    kind, keys, *rest = state["numpy"]
    python.setstate((version, tuple(_unpacked(numbers, np.uint32)), gauss))
    numpy.set_state((kind, np.array(_unpacked(keys, np.uint32), dtype=np.uint32), *rest))
    host.set_state(_bytes(state["torch"]))
    return None if state["cuda"] is None else _bytes(state["cuda"])


def set_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Undo what has been drawn since ``random_state``."""
    gpu = _restore(state, random, np.random, torch.default_generator)
    if gpu is not None and device.type == "cuda":
        torch.cuda.set_rng_state(gpu, device)


def check_random_state(state: Mapping[str, Any]) -> None:
    """Raise for what ``set_random_state`` could not take, without touching any generator in use."""
    _restore(state, random.Random(), np.random.RandomState(), torch.Generator())


@dataclasses.dataclass(frozen=True, slots=True)
class Saved:
    """A parameter of a checkpoint: a weight, or a tile of one."""

    name: str
    shape: tuple[int, ...]
    order: tuple[int, ...] | None  # of its dimensions in memory; None is row by row
    place: tuple[slice, ...] | None  # of a tile: in the weight
    pieces: dict[str, list[Piece]]  # kind -> where its elements are, in order; counted from the first one of the parameter
    steps: int
    sha256: str  # of one that was left out, as it was frozen; else empty
    scalars: dict[str, float] | None  # as of UnitStore
    kept: dict[str, tuple[tuple[int, ...], str]]  # shape and dtype of its states as a whole parameter, by name

    def described(self, name: str) -> tuple[tuple[int, ...], str]:
        """The shape and dtype of a state: what is kept for each element has the parameter's."""
        return self.kept.get(name, (self.shape, "float32"))

    @property
    def kinds(self) -> list[str]:
        """The kinds of values that were kept: the exact ones first, then the state of an optimizer."""
        return list(self.pieces)

    def as_kind(self, kind: str) -> str | None:
        """The kind that has the values of ``kind``, where one of both sides has it frozen: its values are the master. None: there are none."""
        if self.sha256:
            return None
        if kind == "param":
            return self.kinds[0]
        if self.kinds == ["param"]:
            return "param" if kind == "master" else None
        return kind

    def gap(self, kind: str) -> tuple[int, int] | None:
        """The first elements that are nowhere: (first, behind the last)."""
        position, numel = 0, math.prod(self.described(kind)[0])
        for piece in self.pieces.get(kind, ()):
            if piece.start > position:
                return position, piece.start
            position = max(position, piece.stop)
        return (position, numel) if position < numel else None


@dataclasses.dataclass(frozen=True, slots=True)
class Weight:
    """A weight of a checkpoint, in one part or in tiles."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype  # in which it computed
    parts: list[Saved]


@dataclasses.dataclass(frozen=True, slots=True)
class Manifest:
    """A checkpoint's manifest, and where every element of it is."""

    folder: Path
    head: dict[str, Any]
    files: list[Written]
    pieces: list[Piece]
    ranks: list[dict[str, Any]]  # what each rank said of itself

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """CheckpointError, with the file's name, if it is missing or not ours."""
        head = _json(folder / MANIFEST)
        if head.get("format") != FORMAT:
            raise CheckpointError(f"{folder / MANIFEST} is not a manifest of a zk checkpoint")
        if head.get("version") != VERSION:
            raise CheckpointError(f"{folder / MANIFEST} has version {head.get('version')!r}; this zk reads version {VERSION}")
        if head.pop("crc32", None) != crc_of(head):
            raise CheckpointError(f"{folder / MANIFEST} is not what was written: its CRC-32 is {crc_of(head)}; it was damaged, or edited")
        try:
            files, parts = ([Written.of_json(entry) for entry in head[kind]] for kind in ("files", "parts"))
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{folder / MANIFEST} is damaged: {error!r}") from error
        pieces, ranks = [], []
        for part in parts:
            check_file(folder, part)
            said = _json(folder / part.name)
            ranks.append(said)
            check_name(folder, said["file"])
            pieces += [Piece(unit, kind, start, stop, key, said["file"]) for unit, kind, start, stop, key in said["pieces"]]
        return cls(folder, head, files, pieces, ranks)

    @property
    def path(self) -> Path:
        """The manifest's own file."""
        return self.folder / MANIFEST

    def buffers(self, part: int = 0, count: int = 1) -> dict[str, list[str]]:
        """The model's buffers: name -> the files that have it, of which one will do if they are not of as many parts of the model as now.

        Each part has saved its own.
        """
        saved = {said["part"]: said for said in self.ranks if "part" in said} or {0: self.ranks[0]}  # checkpoints of one part do not say so
        found: dict[str, list[str]] = {}
        for said in [saved[part]] if len(saved) == count else saved.values():
            for name in said["buffers"]:
                found.setdefault(name, []).append(said["file"])
        return found

    def weights(self) -> dict[str, Weight]:
        """All weights by the name that they have in the model without tiles."""
        pieces: dict[tuple[int, str], list[Piece]] = {}
        for piece in sorted(self.pieces, key=lambda piece: piece.start):
            pieces.setdefault((piece.unit, piece.kind), []).append(piece)
        found: dict[str, Weight] = {}
        for number, unit in enumerate(self.head["units"]):
            for param in unit["params"]:
                name, shape, offset = param["name"], tuple(param["shape"]), param["offset"]
                order, tile = tuple(param["order"]) if "order" in param else None, param.get("whole")
                whole, whole_shape, place = name, shape, None
                if tile is not None:
                    whole, whole_shape = tile["name"], tuple(tile["shape"])
                    place = tuple(slice(*cut) for cut in tile["place"])
                weight = found.setdefault(whole, Weight(whole, whole_shape, getattr(torch, param["dtype"]), []))
                kept = {key: (tuple(size), dtype) for key, (size, dtype) in param.get("kept", {}).items()}
                own = {kind: _moved(pieces.get((number, kind), ()), offset, math.prod(shape)) for kind in unit["kinds"]}
                own |= {key: pieces.get((number, kind_of_kept(key, offset)), []) for key in kept}
                rest = param["steps"], param.get("sha256", ""), param.get("scalars"), kept
                weight.parts.append(Saved(name, shape, order, place, own, *rest))
        return found


def _moved(pieces: Iterable[Piece], offset: int, numel: int) -> list[Piece]:
    """Those of a unit's ``pieces`` that have some of ``numel`` elements from ``offset`` on, counted from there."""
    own = (piece for piece in pieces if piece.start < offset + numel and piece.stop > offset)
    return [dataclasses.replace(piece, start=piece.start - offset, stop=piece.stop - offset) for piece in own]


def seal_of(folder: Path) -> str:
    """The CRC-32 that a checkpoint's manifest has: what tells it from others."""
    return str(_json(folder / MANIFEST).get("crc32"))


def _json(path: Path) -> dict[str, Any]:
    try:
        check_regular(path)
        value = json.loads(path.read_bytes())
        if not isinstance(value, dict):
            raise ValueError("it holds no object")
        return value
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing: this is no checkpoint, or not a whole one") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
