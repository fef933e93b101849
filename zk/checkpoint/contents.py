"""Contents of a checkpoint: weights by name, and where every element of them is.

The format is that of 0.1.0 (version 4).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zk.checkpoint.files import MANIFEST, CheckpointError, Tensors, Written, regular

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

    def __init__(self, folder: Path) -> None:
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
        if not holds:
            raise CheckpointError(f"{self.path} {what}")

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
        return file.elements(key).view(file.entry(key).shape)

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
            found[part.cut.place] = values
        return found  # type: ignore[no-any-return]


def crc_of(head: Mapping[str, Any]) -> str:
    """The CRC-32 of a manifest."""
    return f"{zlib.crc32(json.dumps(head, sort_keys=True, separators=(',', ':')).encode()):08x}"
