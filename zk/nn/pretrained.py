"""Weights from safetensors files: read now, or, without memory yet, as each unit is placed.

transformers 5 converts names and shapes as it loads: the experts of a layer are many tensors on disk,
and one in memory. Its own mapping is used here, one tensor of the model at a time.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import logging
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zk.nn.deferred import default_device
from zk.parallel.gather import place_of
from zk.promised import device_for, promise
from zk.store import UnitStore

log = logging.getLogger("zk")
FILES = "model.safetensors.index.json", "model.safetensors"
MOVED = r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$"  # buffers that are saved no more


def load_pretrained(model: nn.Module, path: str | Path, *, strict: bool = True) -> None:
    """Take parameters and buffers of ``model`` from safetensors, with one unit in memory at once.

    A model of transformers (5.0 or later) is read as its ``from_pretrained`` reads it: names and
    shapes are converted, and the prefix of the base model is added or removed.

    Args:
        model: one from ``deferred_init`` or on the meta device (values are read when ZeroOptimizer
            makes its units), one that a ZeroOptimizer holds (on all ranks; fp32 values become the
            masters), or any other.
        path: a ``.safetensors`` file, a ``.safetensors.index.json``, or a folder with either.
        strict: False leaves what the files lack as it is, and ignores what the model lacks. A
            warning names the trained parameters that keep the values of their constructor.

    Raises:
        ValueError: before anything is changed, with the names that are missing, unexpected, of
            another shape, or tied in the model and different in the files; and for pickles.
        FileNotFoundError: if a file is not there.
    """
    written = dict[UnitStore, None]()
    for tensor, source in sources_of(model, Path(path), strict).items():
        place: Any = place_of(tensor)  # type: ignore[arg-type]
        if place is not None:
            store, index = place
            write(store, index, source.make())
            written[store] = None
        elif tensor.is_meta:
            # in a storage of its own, as a promise is for all that is in one
            tensor.data = torch.empty_like(tensor.data)
            promise(tensor, dataclasses.replace(source, version=tensor._version))
        else:
            with torch.no_grad():
                tensor.copy_(source.make())
    for store in written:
        store.publish()


def write(store: UnitStore, index: int, value: Tensor) -> None:
    """Overwrite a parameter that an optimizer holds, its master in fp32."""
    store.absorb()  # what users wrote to others of its unit
    kind = "master" if store.unit.is_trained else "param"
    value = value.to(store.unit.device)
    store.write(kind, index, value.float() if store.unit.is_trained else value)


# ---- files -------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """A tensor of a safetensors file."""

    path: Path
    key: str
    shape: tuple[int, ...]

    def read(self, piece: tuple[slice, ...] | None = None) -> Tensor:
        """The tensor, or a piece of it: a view of the mapped file."""
        from safetensors import safe_open

        with safe_open(self.path, framework="pt") as file:
            if piece is None:
                return file.get_tensor(self.key)  # type: ignore[no-any-return]
            return file.get_slice(self.key)[piece]  # type: ignore[no-any-return]

    def shaped(self) -> Tensor:
        return torch.empty(self.shape, device="meta")


@dataclasses.dataclass(frozen=True, slots=True)
class Group:
    """Tensors of the files that become one or more of the model's."""

    name: str
    """Of the model's, or of the first of them."""
    entries: list[tuple[Any, Entry]]
    """Each with the pattern of the converter that its name matched."""
    converter: Any = None
    """A WeightConverter of transformers; None: the first entry as it is."""
    model: Any = None

    def convert(self, value_of: Callable[[Entry], Tensor]) -> dict[str, Tensor]:
        """The model's tensors, by name, of the values of the files'."""
        if self.converter is None:
            return {self.name: value_of(self.entries[0][1])}
        converter = copy.deepcopy(self.converter)
        for pattern, entry in self.entries:
            converter.add_tensor(self.name, entry.key, pattern, value_of(entry))
        found = converter.convert(self.name, model=self.model, config=self.model.config)
        made = found[0] if isinstance(found, tuple) else found  # with errors in transformers 5.0
        return {name: v[0] if isinstance(v, list) else v for name, v in made.items()}


@dataclasses.dataclass(frozen=True, slots=True)
class FromFile:
    """Promises values that lie in files."""

    group: Group
    name: str
    """In what the group becomes."""
    device: torch.device
    piece: tuple[slice, ...] | None
    """The place in the whole tensor; None for all of it."""
    version: int = 0
    """Of the tensor that waits for the values."""

    def make(self, _tensor: Tensor | None = None) -> Tensor:
        if self.group.converter is None:
            return self.group.entries[0][1].read(self.piece)
        return self.group.convert(Entry.read)[self.name][self.piece or ...]

    def saw(self, tensor: Tensor) -> bool:
        return tensor._version == self.version


def file_of(path: Path) -> Path:
    """The safetensors file or index that ``path`` is, or that a folder has."""
    files = [path / name for name in FILES] if path.is_dir() else [path]
    found = next((file for file in files if file.exists()), None)
    others = sorted(path.glob("*.bin")) if found is None else [found]
    if others and others[0].suffix in (".bin", ".pt", ".pth"):
        raise ValueError(
            f"load_pretrained reads safetensors files, and {others[0]} is a pickle; convert it "
            "once, with transformers: AutoModel.from_pretrained(path).save_pretrained(new_folder) "
            "with the class of your model in place of AutoModel"
        )
    if found is None:
        raise FileNotFoundError(
            f"{path} is no safetensors file, and no folder with {' or '.join(FILES)}; for a model on "
            "the hub: path = huggingface_hub.snapshot_download(name); a checkpoint of zk is read by "
            "optimizer.load_checkpoint"
        )
    return found


def entries_in(path: Path) -> dict[str, Entry]:
    """The tensors, by name, of a safetensors file, an index of several, or a folder with either."""
    from safetensors import SafetensorError, safe_open

    path = file_of(path.absolute())
    files, entries = [path], {}
    if path.suffix == ".json":
        try:
            names = json.loads(path.read_text())["weight_map"].values()
            files = sorted({path.parent / name for name in names})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{path} is no index of safetensors files (it needs a 'weight_map' of names to "
                f"files): {error!r}"
            ) from None
    for file in files:
        if not file.exists():
            raise FileNotFoundError(
                f"{path} names {file.name}, which is not there; download the folder again"
            )
        try:
            with safe_open(file, framework="pt") as opened:
                for key in opened.keys():  # noqa: SIM118 - it has no __iter__
                    entries[key] = Entry(file, key, tuple(opened.get_slice(key).get_shape()))
        except SafetensorError as error:
            raise ValueError(f"{file} is not a whole safetensors file: {error}") from None
    return entries


# ---- what goes where -----------------------------------------------------------------------------------


def sources_of(model: nn.Module, path: Path, strict: bool) -> dict[Tensor, FromFile]:
    """The places of the values of parameters and buffers, after checking that they fit."""
    names, pieces = names_of(model)
    known = {name: tensor for tensor, aliases in names.items() for name in aliases}
    entries, hint = entries_in(path), ""
    groups = [Group(key, [(None, entry)]) for key, entry in entries.items() if key in known]
    unexpected = {key: key for key in sorted(entries.keys() - known.keys())}
    if isinstance(model, getattr(sys.modules.get("transformers"), "PreTrainedModel", ())):
        try:
            groups, unexpected = converted(model, entries, known)
        except ImportError as error:
            hint = f"; names were compared as they are: transformers >= 5.0 converts them ({error})"
    wholes = {tensor: piece.shape for tensor, piece in pieces.items()}
    shapes = {name: tuple(wholes.get(tensor, tensor.shape)) for name, tensor in known.items()}
    offers, wrong = offered(groups, shapes)
    found = {tensor: [name for name in those if name in offers] for tensor, those in names.items()}
    absent = {those[0]: tensor for tensor, those in names.items() if not found[tensor]}
    missing = asked(model, "missing", {name: name for name in absent}) * strict
    extra = asked(model, "unexpected", unexpected) * strict
    if wrong or missing or extra:
        raise ValueError(misfit(path, wrong, missing, extra) + hint)
    if tied := [" and ".join(those) for those in found.values() if differ(offers, those)]:
        raise ValueError(
            f"the model has one tensor where {path} has several that differ: {some(tied)}. Build the "
            "model with these untied (config.tie_word_embeddings=False)"
        )
    if left := [name for name, tensor in absent.items() if tensor.requires_grad]:
        those = ", ".join(left)
        log.warning("trained parameters keep the values they have; %s lacks them: %s", path, those)
    device = device_for(model) or next(model.parameters()).device
    device = default_device() if device.type == "meta" else device
    places = {tensor: piece.place for tensor, piece in pieces.items()}
    return {
        tensor: FromFile(offers[those[0]], those[0], device, places.get(tensor))
        for tensor, those in found.items()
        if those
    }


def names_of(model: nn.Module) -> tuple[dict[Tensor, list[str]], dict[Tensor, Any]]:
    """The names of all that the model saves, several for tied ones; the pieces of wholes."""
    names: dict[Tensor, list[str]] = {}
    pieces: dict[Tensor, Any] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        tiles = module.pieces() if hasattr(module, "pieces") else {}
        for name, piece in tiles.items():
            param = module.get_parameter(name)
            pieces[param] = piece
            names.setdefault(param, []).append(prefix + piece.whole)
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            is_saved = tensor is not None and name not in module._non_persistent_buffers_set
            if is_saved and tensor not in pieces:
                names.setdefault(tensor, []).append(prefix + name)  # type: ignore[arg-type]
    return names, pieces


def converted(
    model: Any, entries: Mapping[str, Entry], known: Mapping[str, Tensor]
) -> tuple[list[Group], dict[str, str]]:
    """Tensors of the files as a model of transformers has them, and the others.

    The others are a dict of names, as they are in the files -> as they would be in the model. The
    order is that of transformers.core_model_loading.convert_and_load_state_dict_in_model.
    ImportError if transformers is older than 5.0.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import dot_natural_key, rename_source_key

    changes, prefix = get_model_conversion_mapping(model), model.base_model_prefix
    converters = [change for change in changes if hasattr(change, "operations")]
    renamings = [change for change in changes if not hasattr(change, "operations")]
    by_pattern = {pattern: change for change in converters for pattern in change.source_patterns}
    groups, unexpected = dict[str, Group](), dict[str, str]()
    for key in sorted(entries, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, known)
        if name not in known and key in known:
            name, pattern = rename_source_key(key, [], [], prefix, known)
        if name in known:
            group = groups.setdefault(name, Group(name, [], by_pattern.get(pattern), model))
            group.entries.append((pattern, entries[key]))
        else:
            unexpected[key] = name
    if model.base_model is model and any(key.startswith(f"{prefix}.") for key in entries):
        # files of this model with a head
        unexpected = {key: n for key, n in unexpected.items() if n.startswith(f"{prefix}.")}
    # save_pretrained reverts what was used
    model._weight_conversions = [c for c in changes if getattr(c, "was_used", lambda: True)()]
    return list(groups.values()), unexpected


def offered(
    groups: list[Group], shapes: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, Group], list[str]]:
    """The group that makes each name, and what has another shape. Nothing is read."""
    offers, wrong = dict[str, Group](), list[str]()
    for group in groups:
        try:
            made = group.convert(Entry.shaped)
        except Exception as error:  # of any kind: another operation raises each
            wrong.append(f"{group.entries[0][1].key} cannot be converted ({error})")
            continue
        for name in made.keys() & shapes.keys():
            offers[name], shape = group, tuple(made[name].shape)
            wrong += [f"{name} is {shape}, the model's {shapes[name]}"] * (shape != shapes[name])
    return offers, wrong


def asked(model: nn.Module, what: str, names: Mapping[str, str]) -> list[str]:
    """The keys of ``names``, missing or unexpected, without those that transformers passes over."""
    patterns = [*(getattr(model, f"_keys_to_ignore_on_load_{what}", None) or ())]
    if what == "unexpected":
        buffers = [name for name, _ in model.named_buffers()]
        patterns += [old for old in MOVED if any(re.search(old, name) for name in buffers)]
    return [key for key, name in names.items() if not any(re.search(p, name) for p in patterns)]


def differ(offers: Mapping[str, Group], names: list[str]) -> bool:
    """Tell if a tensor of the model with several ``names`` in the files has several values."""
    values = [offers[name].convert(Entry.read)[name] for name in names if len(names) > 1]
    pairs = itertools.pairwise(values)
    return any(one.dtype != other.dtype or not torch.equal(one, other) for one, other in pairs)


def misfit(path: Path, wrong: list[str], missing: list[str], extra: list[str]) -> str:
    """Name the entries that do not fit, and the remedy."""
    hint = "; build the model from the config.json of these files, and see that none is missing"
    if not wrong:
        hint = " (strict=False ignores these, and warns of trained parameters that are missing)"
    problems = {"other shapes": some(wrong), "missing": some(missing), "unexpected": some(extra)}
    said = "; ".join(f"{what}: {those}" for what, those in problems.items() if those)
    return f"{path} does not fit the model; {said}{hint}"


def some(names: list[str]) -> str:
    """A few of ``names``."""
    return ", ".join(names[:5]) + ", ..." * (len(names) > 5)
