"""Weights from safetensors files: read now, or, without memory yet, as each unit is placed.

transformers 5 converts names and shapes as it loads: the experts of a layer are many tensors on
disk, and one in memory. Its own mapping is used here, one tensor of the model at a time.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zk.addons.promised import device_for, promise
from zk.checkpoint.contents import Cut, cuts_of
from zk.logs import log
from zk.nn.deferred import default_device
from zk.parallel.comm import Comm
from zk.parallel.gather import place_of

FILES = "model.safetensors.index.json", "model.safetensors"
TIED = "one tensor there, different here (config.tie_word_embeddings=False makes it several)"
# buffers of transformers that are saved no more
MOVED = r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$"


def load_pretrained(model: nn.Module, path: str | Path, *, strict: bool = True) -> None:
    """Take parameters and buffers of ``model`` from safetensors, with one unit in memory at once.

    A model of transformers (5.0 or later) is read as its ``from_pretrained`` reads it: names and
    shapes are converted, and the prefix of the base model is added or removed.

    Args:
        model: one from ``deferred_init`` or on the meta device (values are read when ZeroOptimizer
            makes its units), one that a ZeroOptimizer holds (on all ranks, which raise an error of
            any; fp32 values become the masters), or any other.
        path: a ``.safetensors`` file, a ``.safetensors.index.json``, or a folder with either.
        strict: False leaves what the files lack as it is, and ignores what the model lacks. A
            warning names the trained parameters that keep the values of their constructor.

    Raises:
        ValueError: before anything is changed, with the names that are missing, unexpected, of
            another shape, or tied in the model and different in the files; and for pickles.
        FileNotFoundError: if a file is not there.
    """
    stores = dict.fromkeys(place[0] for place in map(place_of, model.parameters()) if place)
    comm = next((store.layout.comm for store in stores), Comm(alone=True))
    with comm.together(f"load_pretrained of {path}"), torch.no_grad():
        for tensor, source in sources_of(model, Path(path), strict).items():
            take(tensor, source)
    for store in stores:
        store.publish()


def take(tensor: Any, source: Source) -> None:
    """Overwrite a tensor; one that an optimizer holds by its master."""
    if place := place_of(tensor):
        store, index = place
        unit = store.unit
        kind, dtype = ("master", torch.float32) if unit.is_trained else ("param", unit.dtype)
        store.absorb()  # what users wrote to others of its unit
        store.write(kind, index, source.make().to(unit.device, dtype))
    elif tensor.is_meta:
        # in a storage of its own, as a promise is for all that is in one
        tensor.data = torch.empty_like(tensor.data)
        promise(tensor, dataclasses.replace(source, version=tensor._version))
    else:
        tensor.copy_(source.make())


# ---- files ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """A tensor of a safetensors file."""

    path: Path
    key: str
    shape: tuple[int, ...]

    def read(self) -> Tensor:
        """A view of the mapped file."""
        from safetensors import safe_open

        with safe_open(self.path, framework="pt") as file:
            return file.get_tensor(self.key)  # type: ignore[no-any-return]


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
    """Tensors of the files that become one or more of the model's. Promises the values of one."""

    first: str
    """The name of the first one."""
    entries: list[tuple[Any, Entry]]
    """Each with the pattern of the converter that its name matched."""
    converter: Any = None
    """A WeightConverter of transformers; None: the first entry as it is."""
    model: Any = None
    name: str = ""
    """Of the promised one."""
    place: Any = ...
    """Of the promised values in it."""
    device: Any = None
    version: int = 0
    """Of the tensor that waits for the values."""

    def convert(self, value_of: Callable[[Entry], Tensor]) -> dict[str, Tensor]:
        """The model's tensors, by name, of the values of the files'."""
        if self.converter is None:
            return {self.first: value_of(self.entries[0][1])}
        converter = copy.deepcopy(self.converter)
        for pattern, entry in self.entries:
            converter.add_tensor(self.first, entry.key, pattern, value_of(entry))
        found = converter.convert(self.first, model=self.model, config=self.model.config)
        made = found[0] if isinstance(found, tuple) else found  # with errors in transformers 5.0
        return {name: v[0] if isinstance(v, list) else v for name, v in made.items()}

    def make(self, *_: Tensor) -> Tensor:
        return self.convert(Entry.read)[self.name][self.place]

    def saw(self, tensor: Tensor) -> bool:
        return tensor._version == self.version


def entries_in(path: Path) -> dict[str, Entry]:
    """The tensors, by name, of a safetensors file, an index of several, or a folder with either."""
    from safetensors import SafetensorError, safe_open

    files = [*(path / name for name in FILES), *sorted(path.glob("*.bin")), path]
    file = next(file for file in files if file.is_file() or file == path).absolute()
    if file.suffix in (".bin", ".pt", ".pth"):
        raise ValueError(
            f"load_pretrained reads safetensors files, and {file} is a pickle; convert it once, "
            "with transformers: AutoModel.from_pretrained(path).save_pretrained(new_folder) with "
            "the class of your model in place of AutoModel"
        )
    if not file.is_file():
        raise FileNotFoundError(
            f"{path} is no safetensors file, and no folder with {' or '.join(FILES)}; for a model "
            "on the hub: path = huggingface_hub.snapshot_download(name); optimizer.load_checkpoint "
            "reads a checkpoint of zk"
        )
    files, entries = [file], {}
    try:
        if file.suffix == ".json":
            names = json.loads(file.read_text())["weight_map"].values()
            files = sorted({file.parent / name for name in names})
        for file in files:
            with safe_open(file, framework="pt") as opened:
                for key in opened.keys():  # noqa: SIM118 - it has no __iter__
                    entries[key] = Entry(file, key, tuple(opened.get_slice(key).get_shape()))
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{file} is not a whole safetensors file, or an index (with a 'weight_map' of names to "
            f"files); download it again: {error!r}"
        ) from None
    return entries


# ---- what goes where -----------------------------------------------------------------------------


def sources_of(model: nn.Module, path: Path, strict: bool) -> dict[Tensor, Source]:
    """The places of the values of parameters and buffers, after checking that they fit."""
    entries, wanted = entries_in(path), wanted_by(model)
    shapes = {cut.whole: cut.shape for cuts in wanted.values() for cut in cuts}
    groups = [Source(key, [(None, entry)]) for key, entry in entries.items() if key in shapes]
    unexpected = sorted(entries.keys() - shapes.keys())
    if isinstance(model, getattr(sys.modules.get("transformers"), "PreTrainedModel", ())):
        groups, unexpected = converted(model, entries, shapes)
    offers, wrong = offered(groups, shapes)
    found = {tensor: [c for c in cuts if c.whole in offers] for tensor, cuts in wanted.items()}
    absent = {cuts[0].whole: tensor for tensor, cuts in wanted.items() if not found[tensor]}
    missing = asked(model, "missing", absent) * strict
    extra = asked(model, "unexpected", unexpected, *MOVED) * strict
    several = [[offers[cut.whole] for cut in cuts] for cuts in found.values()]
    tied = [" and ".join(source.name for source in those) for those in several if differ(those)]
    check_fit(path, {"shapes": wrong, TIED: tied, "missing": missing, "unexpected": extra})
    if left := ", ".join(name for name, tensor in absent.items() if tensor.requires_grad):
        log.warning("trained parameters keep the values they have; %s lacks them: %s", path, left)
    device = device_for(model) or default_device()
    return {
        tensor: dataclasses.replace(offers[cuts[0].whole], place=cuts[0].place, device=device)
        for tensor, cuts in found.items()
        if cuts
    }


def wanted_by(model: nn.Module) -> dict[Tensor, list[Cut]]:
    """All that the model saves, by its names: several for what is tied."""
    wanted: dict[Tensor, list[Cut]] = {}
    params = cuts_of(model)
    for path, module in model.named_modules(remove_duplicate=False):
        for key, tensor in {**module._parameters, **module._buffers}.items():
            if tensor is not None and key not in module._non_persistent_buffers_set:
                name = f"{path}.{key}".removeprefix(".")
                cut = params.get(name) or Cut.all_of(name, tensor.shape)
                wanted.setdefault(tensor, []).append(cut)
    return wanted


def converted(
    model: Any, entries: Mapping[str, Entry], known: Mapping[str, Any]
) -> tuple[list[Source], list[str]]:
    """Tensors of the files as a model of transformers has them, and the names of the others.

    The order is that of transformers.core_model_loading.convert_and_load_state_dict_in_model.
    ImportError if transformers is older than 5.0.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import dot_natural_key, rename_source_key

    changes, prefix = get_model_conversion_mapping(model), model.base_model_prefix
    converters = [change for change in changes if hasattr(change, "operations")]
    renamings = [change for change in changes if change not in converters]
    by_pattern = {pattern: change for change in converters for pattern in change.source_patterns}
    groups, unexpected = dict[str, Source](), list[str]()
    for key in sorted(entries, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, known)
        if name not in known and key in known:
            name, pattern = rename_source_key(key, [], [], prefix, known)
        if name in known:
            group = groups.setdefault(name, Source(name, [], by_pattern.get(pattern), model))
            group.entries.append((pattern, entries[key]))
        else:
            unexpected.append(name)
    if model.base_model is model and any(key.startswith(f"{prefix}.") for key in entries):
        # files of this model with a head
        unexpected = [name for name in unexpected if name.startswith(f"{prefix}.")]
    # save_pretrained reverts what was used
    model._weight_conversions = [c for c in changes if getattr(c, "was_used", lambda: True)()]
    return list(groups.values()), unexpected


def offered(
    groups: list[Source], shapes: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, Source], list[str]]:
    """What makes each tensor of the model, and what has another shape. Nothing is read."""
    offers, wrong = dict[str, Source](), list[str]()
    for group in groups:
        try:
            made = group.convert(lambda entry: torch.empty(entry.shape, device="meta"))
        except Exception as error:  # of any kind: another operation raises each
            wrong.append(f"{group.entries[0][1].key} cannot be converted ({error})")
            continue
        for name in made.keys() & shapes.keys():
            offers[name], shape = dataclasses.replace(group, name=name), tuple(made[name].shape)
            wrong += [f"{name} is {shape}, the model's {shapes[name]}"] * (shape != shapes[name])
    return offers, wrong


def asked(model: nn.Module, what: str, names: Iterable[str], *more: str) -> list[str]:
    """The names, missing or unexpected, without those that transformers passes over."""
    ignored = [*more, *(getattr(model, f"_keys_to_ignore_on_load_{what}", None) or ())]
    return [name for name in names if not any(re.search(pattern, name) for pattern in ignored)]


def differ(sources: list[Source]) -> bool:
    """Tell if a tensor of the model that the files have several times has several values."""
    pairs = itertools.pairwise(source.make() for source in sources if len(sources) > 1)
    return any(one.dtype != other.dtype or not torch.equal(one, other) for one, other in pairs)


def check_fit(path: Path, problems: Mapping[str, list[str]]) -> None:
    """ValueError with some of the entries that do not fit, and the remedy."""
    few = {what: names[:5] + ["..."] * (len(names) > 5) for what, names in problems.items()}
    if said := "; ".join(f"{what}: {', '.join(names)}" for what, names in few.items() if names):
        raise ValueError(
            f"{path} does not fit the model; {said}; build it from the config.json of these files, "
            "and see that none is missing (strict=False ignores what is missing or unexpected)"
        )
