"""Loading of safetensors files into a model: now, or, without memory yet, when its units are made.

Of a frozen unit on the nvme tier whose parameters lie in the files as they are kept, nothing is
loaded: ZeroOptimizer asks where they lie (``place``), and reads them from there in every step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import itertools
import math
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from zk.core.logs import log
from zk.core.owners import inner_tensors, owner_of
from zk.core.store import UnitStore
from zk.core.words import some
from zk.nn.conversion import Entry, Group, converted, offered, read_tables
from zk.nn.deferred import compute_device, promise
from zk.nn.tiles import Piece, pieces_of
from zk.offload.nvme import Excerpt
from zk.parallel.comm import together
from zk.parallel.model_parallel import pieces_of_dtensors

if TYPE_CHECKING:
    from zk.optimizer import ZeroOptimizer


@dataclasses.dataclass(frozen=True, slots=True)
class _FromFile:
    """Values that lie in safetensors files."""

    group: Group
    name: str  # in what the group becomes
    device: torch.device  # where the model will compute
    in_place: bool  # they may be read from there whenever they are needed
    piece: tuple[slice, ...] | None = None  # the place in the whole tensor; None for all of it
    version: int = 0  # of the tensor that waits for the values

    def place(self, dtype: torch.dtype) -> Excerpt | None:
        """The bytes of the values in the file, if they lie there in ``dtype``, one after the other.

        Whole rows of a weight do, as a tile has them. Columns do not, nor does what is converted.
        """
        entry, kept = self.group.entries[0][1], self.in_place and self.group.converter is None
        shape = (1, *entry.shape) if self.piece is None else entry.shape
        rows, *others = self.piece or [slice(0, size) for size in shape]
        if not kept or entry.dtype != dtype or others != [slice(0, size) for size in shape[1:]]:
            return None
        whole = Excerpt(
            str(entry.path), entry.seen, entry.offset, math.prod(shape) * dtype.itemsize
        )
        return whole.part(rows, 0, math.prod(shape[1:]) * dtype.itemsize)

    def make(self, _tensor: Tensor | None = None) -> Tensor:
        """The values: memory of their own, not a view of the mapped file."""
        if self.group.converter is None:
            value = self.group.entries[0][1].read(self.piece)
        else:
            value = self.group.convert(Entry.read)[self.name][self.piece or ...]
        return value.clone(memory_format=torch.contiguous_format)

    def saw(self, tensor: Tensor) -> bool:
        return tensor._version == self.version


def load_pretrained(
    model: nn.Module, path: str | Path, *, strict: bool = True, in_place: bool = True
) -> None:
    """Take parameters and buffers of ``model`` from safetensors, with one unit in memory at once.

    A model of transformers (5.0 or later) is read as its ``from_pretrained`` reads it. Names and
    shapes are converted (experts in one tensor, vision-language models), and the prefix of the base
    model is added or removed.

    Args:
        model: one from ``deferred_init`` (values are read when ZeroOptimizer makes its units), one
            that a ZeroOptimizer holds (on all ranks; fp32 values become the masters), or any other.
        path: a ``.safetensors`` file, a ``.safetensors.index.json``, or a folder with either.
        strict: False leaves what the files lack as it is, and ignores what the model lacks. A
            warning names the trained parameters that keep the values of their constructor.
        in_place: read frozen units on the nvme tier from these files in every step, and write no
            copy of them to ``nvme_path``. This holds for a model from ``deferred_init``, and for
            units of which every parameter lies in the files as it is kept: same ``dtype``, whole
            rows, not converted. Other units are copied. The files are opened for reading only, must
            stay as they are until the optimizer is closed, and should be on a drive as fast. False
            copies all units.

    A unit that is written to, or unfrozen, moves to ``nvme_path`` first: the files never change.

    Raises:
        ValueError: before anything is changed, with the names that are missing, unexpected, of
            another shape, or tied in the model and different in the files; for pickles, and for
            weights in 4 bits.
        FileNotFoundError: if a file is not there.
    """
    owner = next(filter(None, map(owner_of, model.parameters())), None)
    alone = contextlib.nullcontext()
    with together(owner.comm, f"checking {path}") if owner is not None else alone:
        sources = _sources(model, path, strict, in_place)
    _load(sources, path)


def _names(model: nn.Module) -> tuple[dict[Tensor, list[str]], dict[Tensor, Piece]]:
    """The names of all that the model saves, several for tied ones, and the wholes of parts."""
    pieces = {**pieces_of_dtensors(model), **pieces_of(model)}
    names: dict[Tensor, list[str]] = {}
    parts: dict[Tensor, Piece] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        for label, tensor in inner_tensors(param, name):
            names.setdefault(tensor, []).append(pieces[name].whole if name in pieces else label)
            if name in pieces:
                parts[tensor] = pieces[name]
    for path, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                names.setdefault(buffer, []).append(f"{path}.{name}" if path else name)
    return names, parts


def _asked(model: nn.Module, what: str, names: Mapping[str, str]) -> list[str]:
    """The keys of ``names``, missing or unexpected, without those that transformers passes over."""
    patterns = [*(getattr(model, f"_keys_to_ignore_on_load_{what}", None) or ())]
    if what == "unexpected":  # buffers that are saved no more
        moved = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$")
        buffers = [name for name, _ in model.named_buffers()]
        patterns += [old for old in moved if any(re.search(old, name) for name in buffers)]
    ignored = re.compile("|".join(f"(?:{pattern})" for pattern in patterns) or r"(?!)")
    return [key for key, name in names.items() if not ignored.search(name)]


def _with_closest(names: list[str], among: list[str]) -> str:
    """A few of ``names``, each with the closest of others."""
    close = [difflib.get_close_matches(name, among, 1, 0.8) for name in names[:5]]
    pairs = zip(names, close, strict=False)
    said = [" (closest: ".join([name, *match]) + ")" * len(match) for name, match in pairs]
    return some(said + names[5:], 5)


def _refuse_codes(path: str | Path, files: Iterable[str], known: Mapping[str, Tensor]) -> None:
    """ValueError for weights in 4 bits."""
    coded = [name for name in files if ".quant_state." in name]
    coded += [name for name, tensor in known.items() if hasattr(tensor, "quant_state")]
    if coded:
        raise ValueError(
            f"load_pretrained reads no weights in 4 bits, and {path} or the model has some: "
            f"{some(coded, 3)}. Load this model with from_pretrained of transformers, then make "
            "the optimizer"
        )


def _misfit(path: str | Path, wrong: list[str], missing: list[str], extra: list[str]) -> str:
    """Name the entries that do not fit, and the remedy."""
    hint = "; build the model from the config.json of these files, and see that none is missing"
    if not wrong:
        hint = " (strict=False ignores these, and warns of trained parameters that are missing)"
    if any(".base_layer." in name for name in missing):
        hint = "; load a base before PEFT wraps it"
    problems = {"other shapes": some(wrong, 5), "missing": _with_closest(missing, extra)}
    problems["unexpected"] = _with_closest(extra, missing)
    said = "; ".join(f"{what}: {those}" for what, those in problems.items() if those)
    return f"{path} does not fit the model; {said}{hint}"


def _differ(offers: Mapping[str, Group], names: list[str]) -> bool:
    """Tell if a tensor of the model with several ``names`` in the files has several values."""
    values = (offers[name].convert(Entry.read)[name] for name in names * (len(names) > 1))
    return any(
        first.dtype != other.dtype or not torch.equal(first, other)
        for first, other in itertools.pairwise(values)
    )


def _sources(
    model: nn.Module, path: str | Path, strict: bool, in_place: bool
) -> dict[Tensor, _FromFile]:
    """The places of the values of parameters and buffers, after checking that they fit."""
    names, parts = _names(model)
    known = {name: tensor for tensor, aliases in names.items() for name in aliases}
    entries, hint, used = read_tables(Path(path)), "", None
    _refuse_codes(path, entries, known)
    groups = [Group(key, [(None, entry)]) for key, entry in entries.items() if key in known]
    unexpected = {key: key for key in sorted(entries.keys() - known.keys())}
    if isinstance(model, getattr(sys.modules.get("transformers"), "PreTrainedModel", ())):
        try:
            groups, unexpected, used = converted(model, entries, known)
        except ImportError as error:
            hint = f"; names were compared as they are: transformers >= 5.0 converts them ({error})"
    shapes = {name: tuple(parts.get(tensor, tensor).shape) for name, tensor in known.items()}
    offers, wrong = offered(groups, shapes)
    found = {tensor: [name for name in those if name in offers] for tensor, those in names.items()}
    absent = {names[tensor][0]: tensor for tensor, those in found.items() if not those}
    missing = _asked(model, "missing", {name: name for name in absent}) * strict
    extra = _asked(model, "unexpected", unexpected) * strict
    if wrong or missing or extra:
        raise ValueError(_misfit(path, wrong, missing, extra) + hint)
    if tied := [" and ".join(those) for those in found.values() if _differ(offers, those)]:
        raise ValueError(
            f"the model has one tensor where {path} has several that differ: {some(tied, 3)}. "
            "Build the model with these untied (config.tie_word_embeddings=False)"
        )
    trained = (param for param in model.parameters() if param.requires_grad)
    inner = {tensor for param in trained for _, tensor in inner_tensors(param)}
    if left := [name for name, tensor in absent.items() if tensor in inner]:
        those = ", ".join(left)
        log.warning("trained parameters keep the values they have; %s lacks them: %s", path, those)
    if used is not None:
        model._weight_conversions = used  # type: ignore[assignment]  # save_pretrained reverts it
    device = compute_device(model)
    places = {tensor: part.place for tensor, part in parts.items()}
    return {
        tensor: _FromFile(offers[those[0]], those[0], device, in_place, places.get(tensor))
        for tensor, those in found.items()
        if those
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
            replacing.enter_context(
                owner.integrity.replacing(f"load_pretrained({str(path)!r})", ("parameters",))
            )
        for owner, held, of_unit in units.values():
            # of one unit at a time; before ranks exchange anything
            with together(owner.comm, f"reading {path}"):
                values = {index: source.make() for index, source in of_unit.items()}
            held.overwrite({index: functools.partial(values.pop, index) for index in list(values)})
        for tensor, source in of_nobody.items():
            tensor.copy_(source.make())
