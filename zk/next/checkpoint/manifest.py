"""The manifest of a checkpoint: parameters by name, where their elements are, and what is no tensor.

The format is that of 0.1.0 (version 4): each reads what the other has written.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import itertools
import json
import math
import random
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from zk.next.checkpoint.files import MANIFEST, CheckpointError, File, Written, check_regular
from zk.next.checkpoint.folders import crc_of
from zk.next.offload.rules import Rule

if TYPE_CHECKING:
    from zk.next.optimizer import ZeroOptimizer
    from zk.next.store import UnitStore

FORMAT, VERSION = "zk checkpoint", 4
Place = tuple[slice, ...]


# ---- what is said of an optimizer ------------------------------------------------------------------


def of_optimizer(optimizer: ZeroOptimizer, scheduler: Any, extra: Any) -> dict[str, Any]:
    """What a manifest says, the same on all ranks."""
    config = getattr(getattr(optimizer.model, "config", None), "to_json_string", None)  # of HF
    tiles, groups = tiles_of(optimizer.model), []
    for number, group in enumerate(optimizer.param_groups):
        options = {key: value for key, value in group.items() if key != "params"}
        names = names_of(optimizer, group)
        groups.append({**plain(options, f"param_groups[{number}]"), "params": names})
    state = plain(scheduler.state_dict(), "scheduler.state_dict()") if scheduler else None
    return {
        "format": FORMAT,
        "version": VERSION,
        "optimizer": kinds_of_optimizer(optimizer),
        "world": optimizer._layout.comm.size,
        "model_parallel": 1,
        "stage": optimizer.config.stage,
        "counters": {"steps": optimizer.num_steps, "skipped_steps": optimizer.skipped_steps},
        "loss_scale": optimizer._scaler.state_dict(),
        "groups": groups,
        "units": [of_unit(store, tiles) for store in optimizer._runtime.stores],
        "tied": dict(tied_names(optimizer)),
        "model_config": str(config()) if callable(config) else None,
        "scheduler": state,
        "scheduler_type": type(scheduler).__name__ if scheduler else None,
        "extra": plain(extra, "extra"),
        "entries": {},
    }


def of_unit(store: UnitStore, tiles: Mapping[str, Any]) -> dict[str, Any]:
    """What a manifest says of a unit, without its elements."""
    unit, params = store.unit, []
    dtype = str(unit.dtype).removeprefix("torch.")
    for index, name in enumerate(unit.names):
        param = {"name": name, "shape": list(unit.shapes[index]), "dtype": dtype}
        param |= {"offset": unit.offsets[index], "steps": store.steps[index]}
        # of Adam they follow from the steps
        if store.steps[index] and type(store.rule).numbers is not Rule.numbers:
            numbers = store.rule.numbers(store.groups[index], store.steps[index])
            param |= {"scalars": plain(numbers, f"the state of {name!r}")} if numbers else {}
        if (order := order_of(store, index)) is not None:
            param["order"] = list(order)
        if name in tiles:
            tile = tiles[name]
            place = [[cut.start, cut.stop] for cut in tile.place]
            param["whole"] = {"name": tile.whole, "shape": list(tile.shape), "place": place}
        params.append(param)
    kinds = kinds_of(store)
    return {"name": unit.name, "trained": unit.is_trained, "kinds": kinds, "params": params}


def kinds_of(store: UnitStore) -> list[str]:
    """The kinds of values that are saved of each element."""
    return ["master", *store.rule.names] if store.unit.is_trained else ["param"]


def order_of(store: UnitStore, index: int) -> tuple[int, ...] | None:
    """A parameter's dimensions from the slowest to the fastest in memory; None: row by row."""
    shape, strides = store.unit.shapes[index], store.unit.strides[index]
    dims = range(len(shape))
    order = tuple(sorted(dims, key=strides.__getitem__, reverse=True))
    return order if order != tuple(dims) and math.prod(shape) else None


def tiles_of(model: nn.Module) -> dict[str, Any]:
    """What parameters are cut from, by name: of modules that say so in ``pieces()``."""
    found = {}
    for path, module in model.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        for name, piece in module.pieces().items() if hasattr(module, "pieces") else ():
            found[prefix + name] = dataclasses.replace(piece, whole=prefix + piece.whole)
    return found


def names_of(optimizer: ZeroOptimizer, group: Mapping[str, Any]) -> list[str]:
    """The parameters of a group."""
    names = {param: name for name, param in optimizer.model.named_parameters()}
    return [names[param] for param in group["params"]]


def kinds_of_optimizer(optimizer: ZeroOptimizer) -> str:
    """The classes of the user's optimizers."""
    inners = dict.fromkeys(optimizer._layout.inner_of.values())
    return " and ".join(type(inner).__name__ for inner in inners)


def tied_names(optimizer: ZeroOptimizer) -> Iterator[tuple[str, str]]:
    """Other names of tied parameters, each with the name that its unit has."""
    own = {param: name for name, param in optimizer.model.named_parameters()}
    for name, param in optimizer.model.named_parameters(remove_duplicate=False):
        if own[param] != name and param in optimizer._runtime.store_of:
            yield name, own[param]


def buffers_of(optimizer: ZeroOptimizer, all_names: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Buffers that state_dict() has, and parameters that came later, such as averages.

    By name: once each, or under ``all_names`` of their modules.
    """
    known = optimizer._runtime.store_of
    for prefix, module in optimizer.model.named_modules(remove_duplicate=not all_names):
        own = {name: param for name, param in module._parameters.items() if param not in known}
        own |= module._buffers
        for name, tensor in own.items():
            if tensor is not None and name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, tensor.detach()


# ---- values as JSON --------------------------------------------------------------------------------


def plain(value: Any, what: str) -> Any:
    """``value`` as JSON can hold it. TypeError, saying where, for what it cannot."""
    if isinstance(value, (str, bool, int, float, type(None))):
        return value
    if isinstance(value, np.generic) or (isinstance(value, Tensor) and value.numel() == 1):
        return value.item()
    if isinstance(value, (list, tuple)):
        return [plain(item, f"{what}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, Mapping):
        items = {key: plain(item, f"{what}[{key!r}]") for key, item in value.items()}
        if not all(isinstance(key, (str, int)) for key in value):
            raise TypeError(f"{what} has keys that are neither strings nor numbers")
        # JSON would make strings of numbers
        is_by_number = "__items__" in value or any(isinstance(key, int) for key in value)
        return {"__items__": [*map(list, items.items())]} if is_by_number else items
    kind = type(value).__name__
    raise TypeError(
        f"{what} is a {kind}; a checkpoint keeps what JSON can hold: numbers, strings, lists, dicts"
    )


def revived(value: Any) -> Any:
    """Undo ``plain``, but for tuples, which are lists now."""
    if isinstance(value, list):
        return [revived(item) for item in value]
    if isinstance(value, dict):
        items = value["__items__"] if set(value) == {"__items__"} else value.items()
        return {key: revived(item) for key, item in items}
    return value


def as_here(value: Any, here: Any) -> Any:
    """``value`` in the types of what is in its place: JSON has lists for tuples, and no tensors."""
    if isinstance(here, Tensor) and isinstance(value, (int, float)):
        return torch.full_like(here, value)
    if isinstance(value, list) and isinstance(here, (list, tuple)):
        pairs = itertools.zip_longest(value, here[: len(value)])
        items = [as_here(item, there) for item, there in pairs]
        return tuple(items) if isinstance(here, tuple) else items
    if isinstance(value, dict) and isinstance(here, dict):
        made = here.copy()  # of its class: a Counter, say
        made.clear()
        made.update({key: as_here(item, here.get(key)) for key, item in value.items()})
        return made
    return value


# ---- random numbers --------------------------------------------------------------------------------


def random_state(device: torch.device) -> dict[str, Any]:
    """The generators of this process, and of the GPU that its model computes on."""
    version, state, gauss = random.getstate()
    kind, keys, *rest = np.random.get_state()
    is_cuda = device.type == "cuda"
    return {
        "python": [version, packed(state, np.uint32), gauss],
        "numpy": [kind, packed(keys, np.uint32), *rest],
        "torch": packed(torch.get_rng_state(), np.uint8),
        "cuda": packed(torch.cuda.get_rng_state(device), np.uint8) if is_cuda else None,
    }


def restore_random(
    state: Mapping[str, Any],
    device: torch.device | None,
    generators: tuple[Any, Any, Any] = (random, np.random, torch.default_generator),
) -> None:
    """Give generators of python, numpy, torch and a GPU their states."""
    python, numpy, host = generators
    version, numbers, gauss = state["python"]
    kind, keys, *rest = state["numpy"]
    python.setstate((version, tuple(unpacked(numbers, np.uint32).tolist()), gauss))
    numpy.set_state((kind, unpacked(keys, np.uint32), *rest))
    host.set_state(torch.from_numpy(unpacked(state["torch"], np.uint8)))
    gpu = None if state["cuda"] is None else torch.from_numpy(unpacked(state["cuda"], np.uint8))
    if gpu is not None and device is not None and device.type == "cuda":
        torch.cuda.set_rng_state(gpu, device)


def check_random(state: Mapping[str, Any]) -> None:
    """Raise for what ``restore_random`` could not take, without touching a generator in use."""
    restore_random(state, None, (random.Random(), np.random.RandomState(), torch.Generator()))


def packed(numbers: Any, dtype: type[np.generic]) -> str:
    """Numbers, of which there are many, as text."""
    return base64.b64encode(zlib.compress(np.asarray(numbers, dtype=dtype).tobytes())).decode()


def unpacked(text: str, dtype: type[np.generic]) -> np.ndarray:
    try:
        return np.frombuffer(zlib.decompress(base64.b64decode(text)), dtype).copy()
    except zlib.error as error:
        raise ValueError(f"a random state cannot be read: {error}") from error


# ---- what is read of a checkpoint ------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Piece:
    """Consecutive elements of one unit's flat buffer, of one kind, as a tensor of a file."""

    unit: int
    kind: str
    """"master", a state of the optimizer, or "param" where there is no optimizer state."""
    start: int
    stop: int
    key: str
    file: str


@dataclasses.dataclass(frozen=True)
class Saved:
    """A parameter of a checkpoint: a weight, or a tile of one."""

    name: str
    shape: tuple[int, ...]
    order: tuple[int, ...] | None
    """Of its dimensions in memory; None is row by row."""
    place: Place | None
    """Of a tile in its weight."""
    pieces: dict[str, list[Piece]]
    """Kind -> where its elements are, in order, counted from its first one."""
    steps: int
    scalars: dict[str, Any] | None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def as_kind(self, kind: str) -> str | None:
        """The kind that has the values of ``kind``: what is frozen on one side has the master's.

        None: there are none.
        """
        if kind == "param":
            return next(iter(self.pieces))
        if "param" in self.pieces:
            return "param" if kind == "master" else None
        return kind

    def gap(self, kind: str) -> tuple[int, int] | None:
        """The first elements that are nowhere."""
        position = 0
        for piece in self.pieces.get(kind, ()):
            if piece.start > position:
                return position, piece.start
            position = max(position, piece.stop)
        return (position, self.numel) if position < self.numel else None


@dataclasses.dataclass(frozen=True)
class Weight:
    """A weight of a checkpoint, in one part or in tiles."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    """In which it computed."""
    parts: list[Saved]


@dataclasses.dataclass(frozen=True)
class Manifest:
    """A checkpoint's manifest, and where every element of it is."""

    folder: Path
    head: dict[str, Any]
    files: dict[str, Written]
    pieces: list[Piece]
    ranks: list[dict[str, Any]]
    """What each rank said of itself."""

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """CheckpointError, with the file's name, if it is missing or not ours."""
        path = folder / MANIFEST
        head = read_json(path)
        if head.get("format") != FORMAT or head.get("version") != VERSION:
            said = f"{head.get('format')!r}, version {head.get('version')!r}"
            raise CheckpointError(f"{path} is {said}; this zk reads {FORMAT!r}, version {VERSION}")
        if head.pop("crc32", None) != crc_of(head):
            raise CheckpointError(
                f"{path} is not what was written: its CRC-32 is {crc_of(head)}; it was damaged, or "
                "edited"
            )
        if head["model_parallel"] != 1:
            raise CheckpointError(
                f"{path} is of a model in {head['model_parallel']} parts (tensor or pipeline "
                "parallelism); export its weights with the zk that wrote it (zk export)"
            )
        parts = [Written(**entry) for entry in head["parts"]]
        for part in parts:
            with contextlib.closing(File(folder, part)) as file:
                file.check()
        ranks = [read_json(folder / part.name) for part in parts]
        pieces = [Piece(*place, rank["file"]) for rank in ranks for place in rank["pieces"]]
        files = {entry["name"]: Written(**entry) for entry in head["files"]}
        return cls(folder, head, files, pieces, ranks)

    @property
    def path(self) -> Path:
        return self.folder / MANIFEST

    def weights(self) -> dict[str, Weight]:
        """All weights by the name that they have in the model without tiles."""
        pieces: dict[tuple[int, str], list[Piece]] = {}
        for piece in sorted(self.pieces, key=lambda piece: piece.start):
            pieces.setdefault((piece.unit, piece.kind), []).append(piece)
        found: dict[str, Weight] = {}
        for number, unit in enumerate(self.head["units"]):
            of_unit = {kind: pieces.get((number, kind), []) for kind in unit["kinds"]}
            for param in unit["params"]:
                if "sha256" not in param:  # as 0.1.0 could leave frozen parameters out
                    add_param(found, param, of_unit)
        return found


def add_param(
    found: dict[str, Weight], param: Mapping[str, Any], pieces: Mapping[str, list[Piece]]
) -> None:
    """Add a parameter that a manifest describes to the weights that it is (a tile) of."""
    name, shape, offset = param["name"], tuple(param["shape"]), param["offset"]
    order = tuple(param["order"]) if "order" in param else None
    whole = param.get("whole", {"name": name, "shape": shape})
    place = tuple(slice(*cut) for cut in whole["place"]) if "place" in whole else None
    dtype = getattr(torch, param["dtype"])
    weight = Weight(whole["name"], tuple(whole["shape"]), dtype, [])
    own = {kind: list(moved(those, offset, math.prod(shape))) for kind, those in pieces.items()}
    part = Saved(name, shape, order, place, own, param["steps"], param.get("scalars"))
    found.setdefault(weight.name, weight).parts.append(part)


def moved(pieces: Iterable[Piece], offset: int, numel: int) -> Iterator[Piece]:
    """Those of a unit's pieces that have some of ``numel`` elements, counted from ``offset``."""
    for piece in pieces:
        if piece.start < offset + numel and piece.stop > offset:
            start, stop = piece.start - offset, piece.stop - offset
            yield dataclasses.replace(piece, start=start, stop=stop)


def read_json(path: Path) -> dict[str, Any]:
    try:
        check_regular(path)
        value = json.loads(path.read_bytes())
        if not isinstance(value, dict):
            raise ValueError("it holds no object")
        return value
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} is missing: this is no checkpoint, or no whole one"
        ) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
