"""Contents of a checkpoint: weights by name, where every element of them is, and all that is no tensor.

The format is that of 0.1.0 (version 4).
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import functools
import json
import math
import random
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from zk.checkpoint.files import MANIFEST, CheckpointError, Tensors, Written, crc_of, regular
from zk.logs import require
from zk.optimizer import ZeroOptimizer
from zk.store import UnitStore

FORMAT = {"format": "zk checkpoint", "version": 4, "model_parallel": 1}


class Piece(NamedTuple):
    """Consecutive elements of one unit's flat buffer, of one kind, as a tensor of a file."""

    unit: int
    kind: str  # "master", a state of the optimizer, or "param" of a frozen unit
    start: int
    stop: int
    key: str


@dataclasses.dataclass(frozen=True)
class Cut:
    """The place of a parameter in the weight that the model has without tiles: mostly all of it."""

    whole: str
    shape: tuple[int, ...]
    place: tuple[slice, ...]

    @classmethod
    def all_of(cls, name: str, shape: Sequence[int]) -> Cut:
        return cls(name, tuple(shape), tuple(slice(0, size) for size in shape))


@dataclasses.dataclass(frozen=True)
class Saved:
    """A parameter of a checkpoint: a weight, or a tile of one."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype  # in which it computed
    cut: Cut
    order: tuple[int, ...]  # of its dimensions in memory
    pieces: dict[str, list[tuple[Piece, str]]]  # kind -> those of its unit, in order; their files
    offset: int  # of its first element in its unit
    steps: int
    scalars: dict[str, Any]

    @classmethod
    def read(cls, said: dict[str, Any], pieces: dict[str, list[tuple[Piece, str]]]) -> Saved:
        """Read what a manifest says of a parameter; 0.1.0 says some of it where it is unusual."""
        name, shape = said["name"], tuple(said["shape"])
        cut, order = Cut.all_of(name, shape), tuple(said.get("order") or range(len(shape)))
        if whole := said.get("whole"):
            place = tuple(slice(*part) for part in whole["place"])
            cut = Cut(whole["name"], tuple(whole["shape"]), place)
        rest = said["offset"], said["steps"], said.get("scalars") or {}
        return cls(name, shape, getattr(torch, said["dtype"]), cut, order, pieces, *rest)

    def as_kind(self, kind: str) -> str:
        """The kind that has the values of ``kind``: what is frozen on one side has the master's."""
        if "param" in (kind, *self.pieces) and kind in ("param", "master"):
            return next(iter(self.pieces))
        return kind


class Checkpoint(contextlib.ExitStack):
    """A whole checkpoint; files are opened as they are needed, until it exits.

    CheckpointError, with the file's name, if its manifest is missing or not ours.
    """

    def __init__(self, folder: Path):
        super().__init__()
        self.path, self.folder = folder / MANIFEST, folder
        try:
            self.head = json.loads(regular(self.path).read_bytes())
        except ValueError as error:
            raise CheckpointError(f"{self.path} cannot be read: {error}") from error
        self.crc = self.head.pop("crc32", None)
        self.need(self.crc == crc_of(self.head), "is not what was written: damaged, or edited")
        said = {name: self.head.get(name) for name in FORMAT}
        self.need(said == FORMAT, f"is of {said}; this zk reads {FORMAT}")
        self.ranks = []  # what each said of itself
        for part in self.head["parts"]:
            self.ranks.append(json.loads(Written(**part).check(folder).read_bytes()))
        self.files = [Written(**file) for file in self.head["files"]]
        self.buffers = dict.fromkeys(self.ranks[0]["buffers"], self.ranks[0]["file"])
        self.file = functools.cache(self.open)

    def need(self, holds: bool, what: str) -> None:
        """CheckpointError that says ``what`` of it unless it ``holds``."""
        require(holds, f"{self.path} {what}", CheckpointError)

    def open(self, name: str) -> Tensors:
        return Tensors(self.enter_context(regular(self.folder / name).open("rb")))

    @functools.cached_property
    def weights(self) -> dict[str, list[Saved]]:
        """The parts of all weights, by the name that they have in the model without tiles."""
        units, found = self.head["units"], dict[str, list[Saved]]()
        placed = [(Piece(*at), said["file"]) for said in self.ranks for at in said["pieces"]]
        pieces: list[dict[str, Any]] = [{kind: [] for kind in unit["kinds"]} for unit in units]
        for piece, file in sorted(placed, key=lambda one: one[0].start):
            pieces[piece.unit].setdefault(piece.kind, []).append((piece, file))
        for unit, own in zip(units, pieces, strict=True):
            for param in unit["params"]:
                if "sha256" not in param:  # as 0.1.0 could leave frozen parameters out
                    saved = Saved.read(param, own)
                    found.setdefault(saved.cut.whole, []).append(saved)
        return found

    def buffer(self, name: str) -> Tensor:
        file, key = self.file(self.buffers[name]), f"buffer/{name}"
        entry = file.entry(key)
        return file.elements(key, 0, entry.numel).view(entry.shape)

    def elements(self, part: Saved, kind: str, start: int, stop: int) -> Tensor:
        """Elements of a parameter, in the order in which it was saved: (n,). Zeros of no kind."""
        runs, at, end = [], part.offset + start, part.offset + stop
        for piece, file in part.pieces.get(part.as_kind(kind), ()):
            if at < min(end, piece.stop):
                upto, first = min(end, piece.stop), piece.start
                runs.append(self.file(file).elements(piece.key, at - first, upto - first))
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
            found = found.to(torch.promote_types(found.dtype, values.dtype))
            found[part.cut.place] = values
        return found  # type: ignore[no-any-return]


def cuts_of(model: nn.Module) -> dict[str, Cut]:
    """All parameters by name; modules say in ``pieces()`` what theirs are cut from."""
    named = model.named_parameters(remove_duplicate=False)
    found = {name: Cut.all_of(name, param.shape) for name, param in named}
    for path, module in model.named_modules(remove_duplicate=False):
        prefix = f"{path}." * bool(path)
        for name, piece in getattr(module, "pieces", dict)().items():
            found[prefix + name] = Cut(prefix + piece.whole, piece.shape, piece.place)
    return found


def of_optimizer(optimizer: ZeroOptimizer, scheduler: Any, extra: Any) -> dict[str, Any]:
    """Contents of a manifest, the same on all ranks."""
    model, cuts = optimizer.model, cuts_of(optimizer.model)
    names = {param: name for name, param in model.named_parameters()}
    groups = [g | {"params": [names[p] for p in g["params"]]} for g in optimizer.param_groups]
    everywhere = model.named_parameters(remove_duplicate=False)
    held = [(name, names[p]) for name, p in everywhere if p in optimizer._runtime.store_of]
    config = getattr(getattr(model, "config", None), "to_json_string", None)  # of Hugging Face
    return {
        **FORMAT,
        "optimizer": " and ".join(type(inner).__name__ for inner in optimizer._inners),
        "world": optimizer._layout.comm.size,
        "counters": {"steps": optimizer.num_steps, "skipped_steps": optimizer.skipped_steps},
        "loss_scale": optimizer._scaler.state_dict(),
        "groups": plain(groups, "param_groups"),
        "units": [of_unit(store, cuts) for store in optimizer._runtime.stores],
        "tied": {name: kept for name, kept in held if name != kept},
        "model_config": str(config()) if callable(config) else None,
        "scheduler": scheduler and plain(scheduler.state_dict(), "scheduler.state_dict()"),
        "scheduler_type": scheduler and type(scheduler).__name__,
        "extra": plain(extra, "extra"),
    }


def of_unit(store: UnitStore, cuts: Mapping[str, Cut]) -> dict[str, Any]:
    """Entry of a unit in a manifest, without its elements."""
    unit, params = store.unit, []
    for index, (name, steps) in enumerate(zip(unit.names, store.steps, strict=True)):
        numbers = store.rule.numbers(store.groups[index], steps) if steps else {}
        cut = cuts[name]
        place = [[part.start, part.stop] for part in cut.place]
        param = {
            "name": name,
            "shape": unit.shapes[index],
            "dtype": str(unit.dtype).removeprefix("torch."),
            "offset": unit.offsets[index],
            "steps": steps,
            "scalars": plain(numbers, f"the state of {name!r}"),
            "order": order_of(store, index),
            "whole": {"name": cut.whole, "shape": cut.shape, "place": place},
        }
        params.append(param)
    return {"name": unit.name, "kinds": kinds_of(store), "params": params}


def kinds_of(store: UnitStore) -> list[str]:
    """The kinds of values that are saved of each element."""
    return ["master", *store.rule.names] if store.unit.is_trained else ["param"]


def order_of(store: UnitStore, index: int) -> tuple[int, ...]:
    """A parameter's dimensions from the slowest to the fastest in memory; of no elements: none."""
    strides = store.unit.strides[index] * bool(store.unit.sizes[index])
    return tuple(sorted(range(len(strides)), key=strides.__getitem__, reverse=True))


def buffers_of(optimizer: ZeroOptimizer, all_names: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Buffers that state_dict() has, and parameters that came later, such as averages.

    By name: once each, or under ``all_names`` of their modules.
    """
    known = optimizer._runtime.store_of
    for prefix, module in optimizer.model.named_modules(remove_duplicate=not all_names):
        for name, tensor in {**module._parameters, **module._buffers}.items():
            is_saved = tensor is not None and tensor not in known
            if is_saved and name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}".removeprefix("."), tensor.detach()


def plain(value: Any, what: str) -> Any:
    """``value`` as JSON can hold it. TypeError, saying where, for what it cannot."""
    if isinstance(value, (str, bool, int, float, type(None))):
        return value
    if isinstance(value, np.generic) or (isinstance(value, Tensor) and value.numel() == 1):
        return value.item()
    if isinstance(value, (list, tuple)):
        return [plain(item, f"{what}[{index}]") for index, item in enumerate(value)]
    if not isinstance(value, Mapping) or not all(isinstance(key, (str, int)) for key in value):
        raise TypeError(
            f"{what} is a {type(value).__name__}; a checkpoint keeps what JSON can hold: numbers, "
            "strings, lists, and dicts by strings or numbers"
        )
    items = {key: plain(item, f"{what}[{key!r}]") for key, item in value.items()}
    # JSON would make strings of numbers
    is_by_number = "__items__" in value or any(isinstance(key, int) for key in value)
    return {"__items__": [*map(list, items.items())]} if is_by_number else items


def revived(value: Any, here: Any = None) -> Any:
    """Undo ``plain``, in the types of what is in its place ``here``: tuples, tensors, Counters."""
    if isinstance(value, list):
        like = [*here] if isinstance(here, (list, tuple)) else []
        found = [revived(*pair) for pair in zip(value, like + [None] * len(value), strict=False)]
        return tuple(found) if isinstance(here, tuple) else found
    if isinstance(value, dict):
        old = here if isinstance(here, dict) else {}
        made = old.copy()  # of its class: a Counter, say
        made.clear()
        pairs = value.get("__items__", value.items())
        made.update({key: revived(item, old.get(key)) for key, item in pairs})
        return made
    is_tensor = isinstance(here, Tensor) and isinstance(value, (int, float))
    return torch.full_like(here, value) if is_tensor else value


def random_state(device: torch.device) -> dict[str, Any]:
    """The generators of this process, and of the GPU that its model computes on."""
    states: dict[str, Any] = {"python": random.getstate(), "numpy": np.random.get_state()}
    for name, (kind, keys, *rest) in states.items():
        states[name] = [kind, packed(np.array(keys, np.uint32)), *rest]
    cuda = packed(torch.cuda.get_rng_state(device)) if device.type == "cuda" else None
    return states | {"torch": packed(torch.get_rng_state()), "cuda": cuda}


def restore_random(state: Mapping[str, Any], device: torch.device) -> None:
    """Give the generators their states again."""
    for name, put in {"python": random.setstate, "numpy": np.random.set_state}.items():
        kind, keys, *rest = state[name]
        put((kind, tuple(unpacked(keys).view(np.uint32).tolist()), *rest))
    torch.set_rng_state(torch.from_numpy(unpacked(state["torch"])))
    if state["cuda"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(torch.from_numpy(unpacked(state["cuda"])), device)


def packed(numbers: Any) -> str:
    """Numbers, of which there are many, as text."""
    return base64.b64encode(zlib.compress(np.asarray(numbers).tobytes())).decode()


def unpacked(text: str) -> np.ndarray:
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), np.uint8).copy()
