"""Loading of safetensors files into a model: now, or, where it has no memory yet, when its units are made.

Of a frozen unit whose parameters lie in the files as they are kept, nothing is loaded on the nvme tier. ZeroOptimizer asks where they lie
(``place``), and reads them from there in every step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from zk.checkpoint.files import DTYPE_OF
from zk.checkpoint.folders import find
from zk.core.owners import inner_tensors, owner_of
from zk.core.store import UnitStore
from zk.nn.deferred import compute_device, promise
from zk.nn.tiles import Piece, pieces_of
from zk.offload.nvme import Excerpt, Identity, identity_of
from zk.parallel.comm import together
from zk.parallel.model_parallel import pieces_of_dtensors
from zk.tools.monitor.words import some

if TYPE_CHECKING:
    from zk.optimizer import ZeroOptimizer


@dataclasses.dataclass(frozen=True, slots=True)
class _Entry:
    """A tensor of a safetensors file."""

    path: Path
    seen: Identity  # of the file
    shape: tuple[int, ...]
    dtype: torch.dtype | None  # None for one that is not known here
    offset: int  # of its first byte, in the file


@dataclasses.dataclass(frozen=True, slots=True)
class _FromFile:
    """Values that lie in a safetensors file."""

    entry: _Entry
    key: str
    device: torch.device  # where the model will compute
    in_place: bool  # they may be read from there whenever they are needed
    piece: tuple[slice, ...] | None = None  # the place in what is in the file; None for all of it
    version: int = 0  # of the tensor that waits for the values

    def place(self, dtype: torch.dtype) -> Excerpt | None:
        """The bytes of the values in the file, if they lie there in ``dtype``, one after the other.

        Whole rows of a weight do, as a tile has them. Columns do not.
        """
        entry, shape = self.entry, (1, *self.entry.shape) if self.piece is None else self.entry.shape
        rows, *others = self.piece or [slice(0, size) for size in shape]
        if not self.in_place or entry.dtype != dtype or others != [slice(0, size) for size in shape[1:]]:
            return None
        whole = Excerpt(str(entry.path), entry.seen, entry.offset, math.prod(shape) * dtype.itemsize)
        return whole.part(rows, 0, math.prod(shape[1:]) * dtype.itemsize)

    def make(self, tensor: Tensor) -> Tensor:
        from safetensors import safe_open

        with safe_open(self.entry.path, framework="pt") as file:
            value: Tensor = file.get_tensor(self.key) if self.piece is None else file.get_slice(self.key)[self.piece]
            return value.clone(memory_format=torch.contiguous_format)  # not a view of the mapped file

    def saw(self, tensor: Tensor) -> bool:
        return tensor._version == self.version


def _files(path: Path) -> dict[str, _Entry]:
    """The tensors, by name, of a safetensors file, of those of an index, or of a folder with either."""
    from safetensors import SafetensorError, safe_open

    path = path.absolute()
    if path.is_dir():
        candidates = [path / "model.safetensors.index.json", path / "model.safetensors"]
        found = next((candidate for candidate in candidates if candidate.exists()), None)
        if found is None:
            hint = "; it has a checkpoint, which optimizer.load_checkpoint reads, and python -m zk export makes weights of" if find(path) else ""
            raise FileNotFoundError(f"{path} has neither model.safetensors.index.json nor model.safetensors{hint}")
        path = found
    if not path.exists():
        raise FileNotFoundError(f"no such file: {path}")
    files = [path]
    if path.suffix == ".json":
        try:
            files = sorted({path.parent / name for name in json.loads(path.read_text())["weight_map"].values()})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is no index of safetensors files (it needs a 'weight_map' of names to files): {error!r}") from None
    entries = {}
    for file in files:
        if not file.exists():
            raise FileNotFoundError(f"{path} names {file.name}, which is not there")
        try:
            with safe_open(file, framework="pt"), file.open("rb") as opened:  # the first checks it, and does not say where tensors lie
                nbytes = int.from_bytes(opened.read(8), "little")
                table, seen = json.loads(opened.read(nbytes)), identity_of(os.fstat(opened.fileno()))
        except SafetensorError as error:
            raise ValueError(f"{file} is not a whole safetensors file: {error}") from None
        table.pop("__metadata__", None)
        for key, found in table.items():
            shape, dtype = tuple(found["shape"]), DTYPE_OF.get(found["dtype"])
            entries[key] = _Entry(file, seen, shape, dtype, 8 + nbytes + found["data_offsets"][0])
    return entries


def load_pretrained(model: nn.Module, path: str | Path, *, strict: bool = True, in_place: bool = True) -> None:
    """Take the parameters and buffers of ``model`` from safetensors, with at most one unit of it in memory at once.

    Args:
        model: one from ``deferred_init`` (values are read when ZeroOptimizer makes its units), one that a ZeroOptimizer holds (on all
            ranks; fp32 values become the masters), or any other.
        path: a ``.safetensors`` file, a ``.safetensors.index.json``, or a folder with either.
        strict: False leaves what the files do not have as it is, and ignores what the model does not have.
        in_place: read frozen units that rest on the nvme tier from these files in every step, and write no copy of them to ``nvme_path``. That
            goes for a model from ``deferred_init``, and for units of which every parameter lies in the files as it is kept (``dtype``, rows, memory
            format); others are copied. The files are opened for reading only, must stay as they are until the optimizer is closed, and should be
            on a drive that is as fast. False copies all of them.

    What is written to such a unit, or unfrozen, moves to ``nvme_path`` first: the files are never changed.

    Raises:
        ValueError: before anything is changed, with the names that are missing, unexpected or of another shape, and for
            weights in 4 bits, in the files or in the model.
        FileNotFoundError: if a file is not there.
    """
    owner = next(filter(None, map(owner_of, model.parameters())), None)
    with together(owner.comm, f"checking {path}") if owner is not None else contextlib.nullcontext():
        sources = _sources(model, path, strict, in_place)
    _load(sources, path)


def _sources(model: nn.Module, path: str | Path, strict: bool, in_place: bool) -> dict[Tensor, _FromFile]:
    """The places of the values of parameters and buffers, after checking that they fit."""
    entries = _files(Path(path))
    pieces = {**pieces_of_dtensors(model), **pieces_of(model)}
    names: dict[Tensor, list[str]] = {}  # in the files
    parts: dict[Tensor, Piece] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        for label, tensor in inner_tensors(param, name):
            names.setdefault(tensor, []).append(pieces[name].whole if name in pieces else label)
            if name in pieces:
                parts[tensor] = pieces[name]
    for module_path, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                names.setdefault(buffer, []).append(f"{module_path}.{name}" if module_path else name)
    chosen = {tensor: next((name for name in aliases if name in entries), None) for tensor, aliases in names.items()}
    known = {name for aliases in names.values() for name in aliases}
    coded = [name for name in entries if ".quant_state." in name]
    coded += [key for tensor, key in chosen.items() if key and hasattr(tensor, "quant_state")]
    if coded:
        raise ValueError(
            f"load_pretrained reads no weights in 4 bits, and {path} or the model has some: {some(coded, 3)}. "
            "Load this model with from_pretrained of transformers, then make the optimizer"
        )
    missing = list(dict.fromkeys(names[tensor][0] for tensor, key in chosen.items() if key is None))
    shapes = {tensor: parts[tensor].shape if tensor in parts else tuple(tensor.shape) for tensor in names}
    unexpected = sorted(set(entries) - known)
    wrong = {
        f"{key} is {entries[key].shape}, the model's {shapes[tensor]}": None  # once for each
        for tensor, key in chosen.items()
        if key is not None and entries[key].shape != shapes[tensor]
    }
    unlike = {"other shapes:": list(wrong)}
    unlike |= {"missing:": missing, "unexpected:": unexpected} if strict else {}
    if problems := [f"{what} {some(those, 5)}" for what, those in unlike.items() if those]:
        hint = "" if wrong else " (strict=False ignores these)"
        if any(".base_layer." in name for name in missing):
            hint = "; load a base before PEFT wraps it"
        raise ValueError(f"{path} does not fit the model; {'; '.join(problems)}{hint}")
    device = compute_device(model)
    return {
        tensor: _FromFile(entries[key], key, device, in_place, parts[tensor].place if tensor in parts else None)
        for tensor, key in chosen.items()
        if key is not None
    }


@torch.no_grad()
def _load(sources: dict[Tensor, _FromFile], path: str | Path) -> None:
    units: dict[int, tuple[ZeroOptimizer, UnitStore, dict[int, _FromFile]]] = {}
    of_nobody: dict[Tensor, _FromFile] = {}
    for tensor, source in sources.items():
        owner = owner_of(tensor)
        if owner is not None:
            held, index = owner.units[tensor]  # type: ignore[index]
            units.setdefault(id(held), (owner, held, {}))[2][index] = source
        elif tensor.is_meta:
            promise(tensor, dataclasses.replace(source, version=tensor._version))
        else:
            of_nobody[tensor] = source
    with contextlib.ExitStack() as replacing:
        for owner in dict.fromkeys(owner for owner, *_ in units.values()):
            owner.saver.finish()
            replacing.enter_context(owner.integrity.replacing(f"load_pretrained({str(path)!r})", ("parameters",)))
        for owner, held, of_unit in units.values():
            with together(owner.comm, f"reading {path}"):  # of one unit at a time; before ranks exchange anything
                values = {index: source.make(held.unit.params[index]) for index, source in of_unit.items()}
            held.overwrite({index: functools.partial(values.pop, index) for index in list(values)})
        for tensor, source in of_nobody.items():
            tensor.copy_(source.make(tensor))
