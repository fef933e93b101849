"""Safetensors files, and what transformers makes of the tensors in them.

transformers 5 converts names and shapes as it loads: the experts of a layer are many tensors on
disk, and one in memory. Its own mapping is used here, one tensor of the model at a time.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zk.checkpoint.files import DTYPE_OF
from zk.checkpoint.folders import find
from zk.offload.nvme import Identity, identity_of


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """A tensor of a safetensors file."""

    path: Path
    key: str
    seen: Identity  # of the file
    shape: tuple[int, ...]
    dtype: torch.dtype | None  # None for one that is not known here
    offset: int  # of its first byte, in the file

    def read(self, piece: tuple[slice, ...] | None = None) -> Tensor:
        """The tensor, or a piece of it: a view of the mapped file."""
        from safetensors import safe_open

        with safe_open(self.path, framework="pt") as file:
            if piece is None:
                return file.get_tensor(self.key)  # type: ignore[no-any-return]
            return file.get_slice(self.key)[piece]  # type: ignore[no-any-return]

    def shaped(self) -> Tensor:
        """A tensor of this shape, without memory."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")


@dataclasses.dataclass(frozen=True, slots=True)
class Group:
    """Tensors of the files that become one or more of the model's."""

    name: str  # of the model's, or of the first of them
    entries: list[tuple[Any, Entry]]  # each with the pattern of the converter that its name matched
    converter: Any = None  # a WeightConverter of transformers; None: the first entry as it is
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
        return {
            name: value[0] if isinstance(value, list) else value for name, value in made.items()
        }


def _file_of(path: Path) -> Path:
    """The safetensors file or index that ``path`` is, or that a folder has."""
    names = ("model.safetensors.index.json", "model.safetensors")
    files = [path / name for name in names] if path.is_dir() else [path]
    found = next((file for file in files if file.exists()), None)
    others = sorted(path.glob("*.bin")) if found is None else [found]
    if others and others[0].suffix in (".bin", ".pt", ".pth"):
        raise ValueError(
            f"load_pretrained reads safetensors files, and {others[0]} is a pickle; convert it "
            "once, with transformers: AutoModel.from_pretrained(path).save_pretrained(new_folder) "
            "with the class of your model in place of AutoModel"
        )
    if found is not None:
        return found
    if not path.is_dir():
        raise FileNotFoundError(
            f"no such file: {path}; path must be a folder or a file here. For a model on the hub: "
            "path = huggingface_hub.snapshot_download(name)"
        )
    hint = "it has a checkpoint, which optimizer.load_checkpoint reads and zk export converts"
    raise FileNotFoundError(
        f"{path} has neither {' nor '.join(names)}" + f"; {hint}" * bool(find(path))
    )


def read_tables(path: Path) -> dict[str, Entry]:
    """The tensors, by name, of a safetensors file, an index of several, or a folder with either."""
    from safetensors import SafetensorError, safe_open

    path = _file_of(path.absolute())
    files = [path]
    if path.suffix == ".json":
        try:
            names = json.loads(path.read_text())["weight_map"].values()
            files = sorted({path.parent / name for name in names})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{path} is no index of safetensors files (it needs a 'weight_map' of names to "
                f"files): {error!r}"
            ) from None
    entries = {}
    for file in files:
        if not file.exists():
            raise FileNotFoundError(
                f"{path} names {file.name}, which is not there; download the folder again"
            )
        try:
            with safe_open(file, framework="pt"), file.open("rb") as opened:  # the first checks it
                nbytes = int.from_bytes(opened.read(8), "little")
                table = json.loads(opened.read(nbytes))
                seen = identity_of(os.fstat(opened.fileno()))
        except SafetensorError as error:
            raise ValueError(f"{file} is not a whole safetensors file: {error}") from None
        table.pop("__metadata__", None)
        for key, found in table.items():
            shape, dtype = tuple(found["shape"]), DTYPE_OF.get(found["dtype"])
            offset = 8 + nbytes + found["data_offsets"][0]
            entries[key] = Entry(file, key, seen, shape, dtype, offset)
    return entries


def converted(
    model: Any, entries: Mapping[str, Entry], known: Mapping[str, Tensor]
) -> tuple[list[Group], dict[str, str], list[Any]]:
    """Tensors of the files as a model of transformers has them, the others, and the changes used.

    The others are a dict of names, as they are in the files -> as they would be in the model.
    The same as transformers.core_model_loading.convert_and_load_state_dict_in_model, in its order.

    Raises:
        ImportError: if transformers is older than 5.0.
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
    if model.base_model is model and any(
        key.startswith(f"{prefix}.") for key in entries
    ):  # of this with a head
        unexpected = {
            key: name for key, name in unexpected.items() if name.startswith(f"{prefix}.")
        }
    used = [change for change in changes if not hasattr(change, "was_used") or change.was_used()]
    return list(groups.values()), unexpected, used


def offered(
    groups: list[Group], names: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, Group], list[str]]:
    """The group that makes each of ``names``, and what has another shape. Nothing is read."""
    offers, wrong = dict[str, Group](), list[str]()
    for group in groups:
        try:
            made = group.convert(Entry.shaped)
        except Exception as error:  # of any kind: another operation raises each
            wrong.append(f"{group.entries[0][1].key} cannot be converted ({error})")
            continue
        for name in made.keys() & names.keys():
            offers[name], shape = group, tuple(made[name].shape)
            wrong += [f"{name} is {shape}, the model's {names[name]}"] * (shape != names[name])
    return offers, wrong
