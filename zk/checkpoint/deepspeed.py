"""Import of a folder that DeepSpeed's ``engine.save_checkpoint`` wrote, of ZeRO stage 1, 2 or 3, as a zk checkpoint.

DeepSpeed keeps the fp32 weights of a param group (at stage 3, of a sub group) in one flat buffer, one parameter after the other, and Adam's moments
in buffers like it. Stages 1 and 2 cut the buffer into one part for each rank. Stage 3 cuts every parameter; what a rank has of them, padded to
the same size on all ranks, lies one after the other. Layout: deepspeed/utils/zero_to_fp32.py and runtime/zero of DeepSpeed 0.19.

The files are pickles. They are read as data alone: of DeepSpeed's classes there are stand-ins that can do nothing, and anything else is refused.
Tensors are mapped, not read, and copied out in pieces: what grows with the model is the system's file cache. DeepSpeed need not be installed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import os
import pickle
import re
import reprlib
import shutil
import zipfile
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from zk.checkpoint import folders, manifest, save
from zk.checkpoint.files import CheckpointError, undone
from zk.core.logs import rank_log
from zk.offload.rules import AdamRule

_OURS = re.compile(r"(bf16_)?zero_pp_rank_\d+_mp_rank_00_(optim|model)_states\.pt|mp_rank_00_model_states\.pt")
# options of a param group that say how the update is run, or that zk counts elsewhere
_NOT_KEPT = {"params", "step", "bias_correction", "foreach", "fused", "capturable", "differentiable"}
_ALIGN = 2  # elements of each rank: the end of a flat buffer is padded to a multiple


class _StandIn:
    """The attributes of an object of DeepSpeed's, and nothing that acts."""


_STAND_INS: list[Any] = [
    (int, "deepspeed.runtime.zero.config.ZeroStageEnum"),
    (_StandIn, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (_StandIn, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
    (_StandIn, "deepspeed.utils.tensor_fragment.fragment_address"),
]


@dataclasses.dataclass(frozen=True, slots=True)
class _Rank:
    """The content of one rank's optimizer file."""

    path: Path = dataclasses.field(compare=False)
    flats: list[dict[str, Tensor]] = dataclasses.field(compare=False)  # flat buffers: "master", or a state of Adam's -> (numel,)
    version: str
    stage: int
    world: int
    steps: list[int]  # of each flat buffer
    groups: list[dict[str, Any]]  # options of each param group
    members: list[list[int]]  # of each param group: its flat buffers
    paddings: list[list[int]] | None  # behind each parameter of each flat buffer
    loss_scale: dict[str, Any]

    def common(self) -> dict[str, Any]:
        """The settings that all ranks say alike."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.compare}


@dataclasses.dataclass(frozen=True, slots=True)
class _Param:
    """One parameter, and where its elements lie."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype  # in the model
    steps: int
    kinds: dict[str, list[Tensor]]  # kind -> its elements, in order, as they lie in the ranks' files


def import_deepspeed(directory: str | os.PathLike[str], out: str | os.PathLike[str]) -> Path:
    """Write the zk checkpoint of a DeepSpeed one; returns its folder, ``out/step-XXXXXXXX``, which ``load_checkpoint(out)`` finds.

    Args:
        directory: what ``engine.save_checkpoint`` was given (``latest`` in it says which tag), or the folder of one tag.
        out: folder for the zk checkpoint; made if it is not there.

    Weights and Adam's moments in fp32, steps, options of the groups, loss scale and buffers are taken over. The optimizer that loads them has the
    same groups, in any order within each. What DeepSpeed kept of the learning rate scheduler is in what ``load_checkpoint`` returns, as
    ``["deepspeed"]["lr_scheduler"]``; so is the user's ``["client_state"]``, as far as JSON can hold it. Random numbers are not in
    DeepSpeed's checkpoints. Model, pipeline and expert parallel ones are refused.

    Raises CheckpointError, with the file's name, if any of it is missing, damaged, of another checkpoint or no plain data; OSError if there is
    no room. Nothing is left in ``out`` then.
    """
    folder, root = _find(Path(directory)), Path(out)
    with contextlib.suppress(FileNotFoundError):
        named = (where := root / folders.LATEST).read_text().strip()
        if not named.startswith("step-"):
            raise ValueError(f"{where} names {named!r}, which zk did not save; give another folder, where nothing of others is replaced")
    ranks, model_files = _files(folder)
    models = [_load(path) for path in model_files]
    for path, model in zip(model_files, models, strict=True):
        with _named(path):
            _agree(path, model_files[0], _counts(model), _counts(models[0]))
    model, first = models[0], ranks[0]
    with _named(model_files[0]):
        shapes = [{name: tuple(shape) for name, shape in group.items()} for group in model["param_shapes"]]
        params, groups = _trained(ranks, shapes, model["module"], model_files[0])
        params += _frozen(first.stage, models, model_files, {param.name for param in params})
        buffers = {name: model["module"][name] for name in model.get("buffer_names", ())}
        if not all(isinstance(value, Tensor) for value in buffers.values()):
            raise TypeError("a buffer is no tensor")
        tied = {str(name): str(kept) for name, kept in (model.get("shared_params") or {}).items()}
        client = dict[str, Any]()
        for key in list(itertools.dropwhile(lambda key: key != "ds_version", model))[1:]:  # what DeepSpeed puts behind its own
            try:
                client[key] = manifest.plain(model[key], f"client_state[{key!r}]")
            except TypeError as error:
                rank_log.warning("%s: left out, as %s", model_files[0], error)
        taken, skipped = int(model["global_steps"]), int(model["skipped_steps"])
        scheduler = manifest.plain(model.get("lr_scheduler"), "lr_scheduler")
        kept = {"version": first.version, "stage": first.stage, "world": first.world, "global_steps": taken, "lr_scheduler": scheduler}
    head = {
        "format": manifest.FORMAT,
        "version": manifest.VERSION,
        "optimizer": "AdamW" if all(group.get("decoupled_weight_decay", True) for group in groups) else "Adam",
        "world": 1,
        "stage": first.stage,
        "counters": {"steps": taken - skipped, "skipped_steps": skipped},
        "loss_scale": first.loss_scale,
        "groups": groups,
        "units": [_unit(param) for param in params],
        "scheduler": None,
        "extra": {"client_state": client, "deepspeed": kept},
        "tied": tied,
        "model_config": None,
    }
    return _write(root, head, params, buffers)


# ---- reading -----------------------------------------------------------------------------------------------------------------


def _find(directory: Path) -> Path:
    """The folder of the tag that is meant."""
    latest = directory / "latest"
    if not latest.exists():
        return directory
    with _named(latest):
        tag = latest.read_text().strip()
    if not tag or not (directory / tag).is_dir():
        raise CheckpointError(f"{latest} names {tag!r}, which is no folder in {directory}; give the folder of a tag that is there")
    return directory / tag


def _files(folder: Path) -> tuple[list[_Rank], list[Path]]:
    """Every rank's optimizer file, read, and the files of the model: exactly those that such a checkpoint has."""
    present = sorted(folder.glob("*_states.pt"))
    for path in present:
        if not _OURS.fullmatch(path.name):
            raise CheckpointError(f"{path} is of a model, pipeline or expert parallel run; only data parallel checkpoints can be imported")
    optims = [path for path in present if path.name.endswith("optim_states.pt")]
    if not optims:
        raise CheckpointError(f"{folder} has no *_optim_states.pt: it is no checkpoint of DeepSpeed's ZeRO stages 1 to 3, or not a whole one")
    one = _read_rank(optims[0])
    prefix = "bf16_" if optims[0].name.startswith("bf16_") else ""
    optim, model = f"{prefix}zero_pp_rank_{{}}_mp_rank_00_optim_states.pt", "zero_pp_rank_{}_mp_rank_00_model_states.pt"
    models = [folder / model.format(rank) for rank in range(one.world)] if one.stage == 3 else [folder / "mp_rank_00_model_states.pt"]
    wanted = [*(folder / optim.format(rank) for rank in range(one.world)), *models]
    saved_by = f"{one.world} ranks saved this checkpoint, at stage {one.stage}"
    for path in sorted({*wanted} - {*present}):
        raise CheckpointError(f"{path} is missing: {saved_by}")
    for path in sorted({*present} - {*wanted}):
        raise CheckpointError(f"{path} does not belong there: {saved_by}; remove what is of another one")
    ranks = [one if path == one.path else _read_rank(path) for path in wanted[: one.world]]
    for rank in ranks:
        _agree(rank.path, one.path, rank.common(), one.common())
    return ranks, models


def _load(path: Path) -> dict[str, Any]:
    """A file that torch.save wrote, with its tensors mapped. CheckpointError unless the file is whole, and nothing but data."""
    try:
        with zipfile.ZipFile(path) as archive:
            for record in archive.infolist():
                if record.CRC:  # without one: torch.serialization.set_crc32_options(False)
                    with archive.open(record) as data:  # raises at its end if the CRC-32 is another
                        while data.read(1 << 20):
                            pass
        with safe_globals(_STAND_INS):
            found = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError as error:
        with safe_globals(_STAND_INS):
            unknown = get_unsafe_globals_in_checkpoint(path)
        what = f"uses {', '.join(sorted(unknown))}" if unknown else f"is no plain data ({str(error).splitlines()[0]})"
        raise CheckpointError(f"{path} {what}: only tensors, numbers, strings, lists, dicts and DeepSpeed's own few classes are read") from None
    except Exception as error:  # bytes of others can break a parser in any way
        raise CheckpointError(f"{path} is not a whole file of torch.save: {error!r}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} holds a {type(found).__name__}, and DeepSpeed saves a dict")
    return found


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Make what is not where DeepSpeed puts it an error that names the file."""
    try:
        yield
    except CheckpointError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} is not as DeepSpeed saves it: {error!r}") from error


def _agree(path: Path, other: Path, mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    for key, value in mine.items():
        if value != theirs[key]:
            one, two = reprlib.repr(value), reprlib.repr(theirs[key])
            raise CheckpointError(f"{path} and {other} are of different checkpoints: {key} is {one} in one and {two} in the other")


def _read_rank(path: Path) -> _Rank:
    saved = _load(path)
    with _named(path):
        zero, config = saved["optimizer_state_dict"], saved.get("ds_config")
        stage = int(zero.get("zero_stage", 1))  # BF16_Optimizer, which is for stage 1, does not say
        if stage not in (1, 2, 3):
            raise CheckpointError(f"{path} is of ZeRO stage {stage}; 1, 2 and 3 can be imported")
        counts = zero["partition_count"] if isinstance(zero["partition_count"], list) else [zero["partition_count"]]
        if len(set(counts)) != 1:
            raise CheckpointError(f"{path} is partitioned over {counts} ranks: expert parallel checkpoints cannot be imported")
        base = zero["optimizer_state_dict" if stage == 3 else "base_optimizer_state"]
        if isinstance(base, list):
            raise CheckpointError(f"{path} was saved with elastic_checkpoint, without the options of param groups; save again without it")
        masters = list(zero["fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"])
        members = [list(group["params"]) for group in base["param_groups"]]
        if [number for group in members for number in group] != list(range(len(masters))):
            raise ValueError(f"its param groups have the flat buffers {members}, of {len(masters)}")
        flats, steps = [], []
        for group, numbers in zip(base["param_groups"], members, strict=True):
            kinds = AdamRule(decoupled=True).state_names(group)
            for number in numbers:
                state = base["state"].get(number, {})
                tensors = {key: value for key, value in state.items() if isinstance(value, Tensor) and value.dim()}
                if set(tensors) != set(kinds) or "step" not in {*state, *group}:
                    raise CheckpointError(
                        f"{path} has {sorted(state)} for flat buffer {number}, and not step, {', '.join(kinds)}: only Adam and AdamW that have "
                        "taken a step can be imported, with their state in the file and not on NVMe"
                    )
                flats.append({"master": masters[number], **{kind: tensors[kind] for kind in kinds}})
                steps.append(int(state.get("step", group.get("step"))))
        if not all(tensor.dim() == 1 and tensor.is_floating_point() for flat in flats for tensor in flat.values()):
            raise TypeError("a flat buffer is not one row of floating point numbers")
        paddings = zero.get("param_alignment_paddings")
        groups = [_options(group, config or {}, path) for group in base["param_groups"]]
        scale = _scale_of(zero.get("loss_scaler"))
        return _Rank(path, flats, str(saved.get("ds_version")), stage, int(counts[0]), steps, groups, members, paddings, scale)


def _options(group: Mapping[str, Any], config: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """A param group's options as torch names them."""
    if not group.get("bias_correction", True):
        raise CheckpointError(f"{path}: a param group has bias_correction=False, which torch's Adam and AdamW cannot do")
    options = {key: manifest.plain(value, f"param_groups[...][{key!r}]") for key, value in group.items() if key not in _NOT_KEPT}
    asked = config.get("optimizer")
    if "decoupled_weight_decay" not in options and asked is not None and asked["type"].lower() in ("adam", "adamw"):
        # DeepSpeed's own Adam decouples unless it is told not to
        options["decoupled_weight_decay"] = asked["type"].lower() == "adamw" or bool(asked.get("params", {}).get("adam_w_mode", True))
    return options


def _scale_of(scaler: Any) -> dict[str, Any]:
    """A loss scaler of DeepSpeed's as zk.core.precision.LossScaler keeps it."""
    said = {} if scaler is None else vars(scaler)
    scale = float(said.get("cur_scale", 1.0))
    state = {"scale": scale, "clean_steps": 0, "patience": 0, "active": bool(said.get("dynamic")) or scale != 1.0}
    if said.get("dynamic"):
        # the scale grows when this is a multiple of the window, but 0, before a step: so after an overflow it takes one step more
        since = said["cur_iter"] - said["last_overflow_iter"] - 1
        state |= {"clean_steps": (since - 1) % said["scale_window"] if since else -1, "patience": int(said["cur_hysteresis"])}
    return state


def _counts(model: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that all files of a model say alike."""
    return {key: model.get(key) for key in ("ds_version", "global_steps", "skipped_steps", "param_shapes", "frozen_param_shapes")}


# ---- parameters --------------------------------------------------------------------------------------------------------------


def _trained(
    ranks: Sequence[_Rank], shapes: Sequence[Mapping[str, tuple[int, ...]]], module: Mapping[str, Any], model_file: Path
) -> tuple[list[_Param], list[dict[str, Any]]]:
    """Parameters with optimizer state, and the groups they are in."""
    first, world = ranks[0], len(ranks)
    take = _gathered if first.stage == 3 else _across
    if len(shapes) != len(first.flats):
        raise CheckpointError(f"{model_file} has parameters of {len(shapes)} flat buffers, and {first.path} has {len(first.flats)}")
    params = []
    for number, names in enumerate(shapes):
        numels = [math.prod(shape) for shape in names.values()]
        paddings = first.paddings[number] if first.paddings is not None else [0] * len(numels)
        if first.stage == 3:
            numels = [-(-numel // world) for numel in numels]  # on each rank
        wanted = sum(numels) + sum(paddings)
        parts = _parts(ranks, number, wanted)
        offset = 0
        for (name, shape), numel, padding in zip(names.items(), numels, paddings, strict=True):
            kinds = {kind: take(tensors, offset, numel, math.prod(shape)) for kind, tensors in parts.items()}
            params.append(_Param(name, shape, getattr(module.get(name), "dtype", torch.float32), first.steps[number], kinds))
            offset += numel + padding
    members = [[name for number in numbers for name in shapes[number]] for numbers in first.members]
    return params, [{**group, "params": names} for group, names in zip(first.groups, members, strict=True)]


def _parts(ranks: Sequence[_Rank], number: int, wanted: int) -> dict[str, list[Tensor]]:
    """The share of each rank in flat buffer ``number``, by kind, without the padding at its end. ``wanted``: elements of all parameters in it."""
    world, stage = len(ranks), ranks[0].stage
    if stage == 3:
        size, own = wanted, [wanted] * world
    else:
        size = -(-wanted // (_ALIGN * world)) * _ALIGN
        own = [min(max(wanted - rank * size, 0), size) for rank in range(world)]
    parts: dict[str, list[Tensor]] = {}
    for rank, count in zip(ranks, own, strict=True):
        for kind, tensor in rank.flats[number].items():
            if tensor.numel() not in (count, size):  # weights are saved without the padding, states with it
                raise CheckpointError(
                    f"{rank.path} has {tensor.numel()} elements of {kind!r} in flat buffer {number}, and its parameters on {world} ranks make "
                    f"{' or '.join(map(str, sorted({count, size})))}: it is of another checkpoint, of another rank, or state on NVMe is not in it"
                )
            parts.setdefault(kind, []).append(tensor[:count])
    return parts


def _across(tensors: Sequence[Tensor], start: int, _: int, numel: int) -> list[Tensor]:
    """A parameter of ``numel`` elements from ``start`` on, in the ranks' parts, which lie one after the other."""
    found, stop = [], start + numel
    for tensor in tensors:
        found.append(tensor[max(start, 0) : max(stop, 0)])
        start, stop = start - tensor.numel(), stop - tensor.numel()
    return found


def _gathered(tensors: Sequence[Tensor], start: int, each: int, numel: int) -> list[Tensor]:
    """A parameter of ``numel`` elements, of which every rank has the next ``each`` from ``start`` on, padded at the end."""
    counts = [min(each, max(0, numel - rank * each)) for rank in range(len(tensors))]
    return [tensor[start : start + count] for tensor, count in zip(tensors, counts, strict=True)]


def _frozen(stage: int, models: Sequence[Mapping[str, Any]], files: Sequence[Path], trained: set[str]) -> list[_Param]:
    """Parameters without optimizer state: not trained, or without elements."""
    head = models[0]
    shapes = {name: tuple(shape) for name, shape in (head.get("frozen_param_shapes") or {}).items()}
    params = []
    if stage == 3:
        for name, shape in shapes.items():
            numel, each = math.prod(shape), -(-math.prod(shape) // len(models))
            pieces: list[Tensor] = []
            for path, model in zip(files, models, strict=True):
                with _named(path):
                    pieces.append(model["frozen_param_fragments"][name].reshape(-1))
                    if pieces[-1].numel() != each or pieces[-1].dtype != pieces[0].dtype:
                        raise ValueError(f"its part of {name!r} is {tuple(pieces[-1].shape)} {pieces[-1].dtype}")
            params.append(_Param(name, shape, pieces[0].dtype, 0, {"param": _gathered(pieces, 0, each, numel)}))
        return params
    # stage 1 does not list them, but the model's state has all values
    others = {*trained, *head.get("buffer_names", ()), *(head.get("shared_params") or ())}
    for name in dict.fromkeys([*shapes, *(key for key in head["module"] if key not in others and not key.endswith("_extra_state"))]):
        value = head["module"][name] if name in head["module"] else head["frozen_param_fragments"][name]
        params.append(_Param(name, tuple(value.shape), value.dtype, 0, {"param": [value.reshape(-1)]}))
    return params


# ---- writing -----------------------------------------------------------------------------------------------------------------


def _unit(param: _Param) -> dict[str, Any]:
    """A unit of one parameter, as ``manifest.of_unit`` has it."""
    dtype = str(param.dtype).removeprefix("torch.")
    entry = {"name": param.name, "shape": list(param.shape), "dtype": dtype, "offset": 0, "steps": param.steps}
    return {"name": param.name, "trained": "master" in param.kinds, "kinds": list(param.kinds), "params": [entry]}


def _write(root: Path, head: dict[str, Any], params: Sequence[_Param], buffers: Mapping[str, Tensor]) -> Path:
    """The checkpoint of one rank that holds everything."""
    claim: folders.Claim = {}
    final = folders.place_of(root, head["counters"]["steps"])
    pieces = [
        save.Piece(number, kind, slice(0, math.prod(param.shape)), param.dtype if kind == "param" else torch.float32)
        for number, param in enumerate(params)
        for kind in param.kinds
    ]
    try:
        beside = folders.begin(final, claim)
        with undone(shutil.rmtree, beside, ignore_errors=True):
            save.write_rank(beside, 0, 1, pieces, _values(params), buffers, {"random": None})
            folders.publish(beside, final, head, 1)
    finally:
        claim.clear()
    return final


def _values(params: Iterable[_Param]) -> Generator[Tensor]:
    """All elements, in pieces."""
    for param in params:
        for kind, parts in param.kinds.items():
            for part in parts:
                for piece in part.split(save.PIECE_NUMEL):
                    yield piece if kind == "param" else piece.float()
