"""DeepSpeed's JSON as a ZeroConfig, batch sizes, an optimizer and a scheduler, or as an error: which key zk will not take, and why.

What becomes of each key is in ``deepspeed_table.py``; nothing is passed over in silence.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from zk.core.logs import log
from zk.core.options import parse_dtype
from zk.core.precision import DynamicLossScale
from zk.integrations.deepspeed_schedules import SCHEDULES, Schedule
from zk.integrations.deepspeed_table import ALIASES, KEYS, SECTIONS, Kind

Config = str | os.PathLike[str] | Mapping[str, Any]
Made = TypeVar("Made")  # a ZeroConfig

_ZERO = "zero_optimization"
_ADAM_PARAMS = {"lr", "betas", "eps", "weight_decay", "amsgrad", "adam_w_mode", "torch_adam"}
_SGD_PARAMS = {"lr", "momentum", "dampening", "weight_decay", "nesterov"}
_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
# what a ZeroConfig says nothing about
MONITORS = {"steps_per_print", "wall_clock_breakdown", "tensorboard", "wandb", "csv_monitor", "flops_profiler"}
LOOP_KEYS = {*_BATCH, *MONITORS, "optimizer", "scheduler", "dataloader_drop_last"}
_CLIP_OF_DEEPSPEED = 1.0
_REQUIRED: Any = object()


class Settings:
    """A config whose keys are all known and none refused.

    Args:
        config: path or dict.
        auto: values for what the config says is "auto", by dotted key.
        unused: sections and keys that something else decides here, with what that is; they are named in a warning.
    """

    def __init__(self, config: Config, auto: Mapping[str, Any] | None = None, unused: Mapping[str, str] | None = None) -> None:
        given, self.source = read_object(config)
        if isinstance(given.get(_ZERO), bool):  # as it was written once
            given[_ZERO] = {"stage": int(given[_ZERO])}
        self.values = {name: value for name, value in self._flatten(given, "", "") if value is not None}
        self.auto = dict(auto or {})
        for name in self.auto.keys() - KEYS.keys():
            raise ValueError(f"auto={{{name!r}: ...}}: {_unknown(name, '', KEYS)}")
        self._judge(unused or {})

    def _flatten(self, section: Mapping[str, Any], above: str, shown: str) -> Iterator[tuple[str, Any]]:
        """Dotted keys and their values. ``above`` is the section's name in the table, ``shown`` the one in the config."""
        seen: dict[str, str] = {}
        for key, value in section.items():
            spelled = f"{shown}{key}"
            name = ALIASES.get(f"{above}{key}", f"{above}{key}")
            if name in seen:
                raise ValueError(f"{self.source}: {spelled!r} and {seen[name]!r} are two spellings of one key; keep one of them")
            seen[name] = spelled
            if name in SECTIONS:
                if not isinstance(value, Mapping | None):
                    raise ValueError(f"{self.source}: {spelled!r} must be an object, {{...}}; got {value!r}")
                yield from self._flatten(value or {}, f"{name}.", f"{spelled}.")
            elif name in KEYS:
                yield name, value
            else:
                raise ValueError(f"{self.source}: {_unknown(spelled, above[:-1], (*KEYS, *SECTIONS, *ALIASES))}")

    def _judge(self, unused: Mapping[str, str]) -> None:
        """Refuse what is refused, and name once what is not used."""
        without, elsewhere = [], {}
        for name, value in self.values.items():
            key, section = KEYS[name], name.partition(".")[0]
            if key.is_off(value) and section in MONITORS:
                continue
            switch = f"{name.rpartition('.')[0]}.enabled"
            is_off = switch in KEYS and switch != name and self.values.get(switch) not in (True, "auto")  # its section is not enabled
            by = name if name in unused else section
            if by in unused:
                elsewhere[by] = f"{by} ({unused[by]})"
            elif value == "auto" or key.is_off(value) or is_off:
                continue
            elif key.kind is Kind.REFUSED:
                raise ValueError(f"{self.source}: {name!r} is {value!r}, which zk does not do: {key.why}. Instead: {key.becomes}")
            elif key.kind is Kind.ACCEPTED:
                without.append(name)
        parts = list(elsewhere.values())
        if without:
            parts.append(f"{', '.join(without)} (no counterpart in zk; results are the same without: see docs/deepspeed_config.md)")
        if parts:
            log.warning("%s: not used: %s", self.source, "; ".join(parts))

    def has(self, name: str) -> bool:
        """True if there is a value, in the config or in ``auto``."""
        return name in self.auto or self.values.get(name, "auto") != "auto"

    def get(self, name: str, default: Any = _REQUIRED) -> Any:
        """The value; for "auto", what ``auto`` gives. ValueError if it gives nothing, or if there is neither value nor default."""
        assert name in KEYS
        value = self.values.get(name, default)
        if value == "auto":
            if name not in self.auto:
                raise ValueError(
                    f'{self.source}: {name!r} is "auto", and there is nothing to take it from; write the value, or pass auto={{{name!r}: ...}}'
                )
            return self.auto[name]
        if value is _REQUIRED:
            raise ValueError(f"{self.source}: {name!r} is missing; add it")
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise ValueError(f"{self.source}: {name!r} must be true or false; got {value!r}")
        return value

    def number(self, name: str, default: Any = _REQUIRED, *, least: float = 0) -> Any:
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value < float("inf"):
            raise ValueError(f"{self.source}: {name!r} must be a number, {least:g} or more; got {value!r}")
        return value

    def count(self, name: str, default: Any = _REQUIRED, *, least: int = 1) -> int:
        value = self.number(name, default, least=least)
        if value != int(value):
            raise ValueError(f"{self.source}: {name!r} must be a whole number; got {value!r}")
        return int(value)

    def options(self, section: str) -> dict[str, Any]:
        """The values of a section, by names without its own, and without those that are only accepted or refused."""
        names = [name for name in self.values if name.rpartition(".")[0] == section]
        return {name.rpartition(".")[2]: self.get(name) for name in names if KEYS[name].kind in (Kind.HONOURED, Kind.TRANSLATED)}

    def suggest(self, values: Mapping[str, Any]) -> None:
        """Take these for "auto" where the caller of zk gave nothing."""
        self.auto = {**values, **self.auto}


def _unknown(name: str, above: str, known: Iterable[str]) -> str:
    """The error about a key that is not in the table, with the one whose own name, without its section's, is closest."""
    known = list(known)
    for others in ([other for other in known if other.rpartition(".")[0] == above], known):
        by_last = {other.rpartition(".")[2]: other for other in reversed(others)}
        for match in difflib.get_close_matches(name.rpartition(".")[2], by_last, 1, 0.7):
            return f"{name!r} is no key of DeepSpeed's config that zk knows; the closest one is {by_last[match]!r}"
    return f"{name!r} is no key of DeepSpeed's config that zk knows; see docs/deepspeed_config.md for all of them"


# ---- ZeroConfig --------------------------------------------------------------------------------------------------------------


def zero_config(kind: type[Made], settings: Settings, overrides: Mapping[str, Any]) -> Made:
    """The ``kind`` of ZeroConfig that a config describes; ``overrides`` are fields that win."""
    fields: dict[str, Any] = {"stage": settings.get(f"{_ZERO}.stage", 0), **_tiers(settings), **_precision(settings)}
    fields["overlap"] = settings.flag(f"{_ZERO}.overlap_comm", True)
    if (sums := settings.get("data_types.grad_accum_dtype", None)) is not None:
        fields["grad_accum_dtype"] = sums
    if fields["stage"] == 3 and settings.has(f"{_ZERO}.stage3_prefetch_bucket_size"):
        fields["prefetch"] = min(1, settings.number(f"{_ZERO}.stage3_prefetch_bucket_size"))
    if "gradient_clipping" not in settings.values and "clip_grad_norm" not in overrides:
        log.warning(
            "%s: 'gradient_clipping' is not set. DeepSpeed 0.19 then clips to %g (older versions did not), and so does zk; set it, to 0 for none",
            settings.source,
            _CLIP_OF_DEEPSPEED,
        )
    fields["clip_grad_norm"] = settings.number("gradient_clipping", _CLIP_OF_DEEPSPEED) or None
    fields |= overrides
    try:
        config = kind(**fields)
    except ValueError as error:
        raise ValueError(f"{settings.source}: {error}") from error
    travels = settings.get("communication_data_type", None)
    dtype = parse_dtype(fields.get("dtype") or torch.float32, "dtype")
    if travels is not None and parse_dtype(travels, "communication_data_type") != dtype:
        raise ValueError(
            f"{settings.source}: 'communication_data_type' is {travels!r}, and training is in {dtype}: gradients travel in that, and are summed in "
            "fp32; remove it"
        )
    return config


def _tiers(settings: Settings) -> dict[str, Any]:
    names = {"none": "device", "cpu": "host", "nvme": "nvme"}
    fields: dict[str, Any] = {}
    for field, section, old in (("param_tier", "offload_param", "cpu_offload_param"), ("optimizer_tier", "offload_optimizer", "cpu_offload")):
        device = settings.get(f"{_ZERO}.{section}.device", "cpu" if settings.flag(f"{_ZERO}.{old}", False) else "none")
        if device not in names:
            raise ValueError(f"{settings.source}: '{_ZERO}.{section}.device' must be 'none', 'cpu' or 'nvme'; got {device!r}")
        fields[field] = names[device]
        path = settings.get(f"{_ZERO}.{section}.nvme_path", None)
        if device == "nvme" and path is not None and str(path) not in fields.setdefault("nvme_path", []):
            fields["nvme_path"].append(str(path))
    return fields


def _precision(settings: Settings) -> dict[str, Any]:
    bf16, fp16 = settings.flag("bf16.enabled", False), settings.flag("fp16.enabled", False)
    if bf16 and fp16:
        raise ValueError(f"{settings.source}: 'bf16' and 'fp16' are both enabled; enable one of them")
    if not bf16 and not fp16:
        return {}
    fields: dict[str, Any] = {"dtype": torch.bfloat16 if bf16 else torch.float16}
    buffers = settings.get("data_types.buffer_dtype", None)
    if buffers is not None:
        asked = parse_dtype(buffers, "data_types.buffer_dtype")
        if asked not in (fields["dtype"], torch.float32):
            raise ValueError(f"{settings.source}: 'data_types.buffer_dtype' must be that of training, or fp32, which keeps them; got {buffers!r}")
        fields["cast_buffers"] = asked != torch.float32
    if names := settings.get("data_types.keep_in_fp32_modules", None):
        fields["keep_dtype"] = names
    if fp16:
        fields["loss_scale"] = settings.number("fp16.loss_scale", 0) or DynamicLossScale(
            init=2.0 ** settings.number("fp16.initial_scale_power", 16),
            window=settings.count("fp16.loss_scale_window", 1000),
            hysteresis=settings.count("fp16.hysteresis", 2),
            minimum=float(settings.number("fp16.min_loss_scale", 1)),
        )
    return fields


def from_deepspeed(kind: type[Made], config: Config, auto: Mapping[str, Any] | None, overrides: Mapping[str, Any]) -> Made:
    """See ``ZeroConfig.from_deepspeed``."""
    return zero_config(kind, Settings(config, auto, dict.fromkeys(LOOP_KEYS, "for zk.initialize")), overrides)


# ---- what the training loop needs --------------------------------------------------------------------------------------------


class BatchSizes(NamedTuple):
    """Samples of one step, of one forward on one rank, and forwards of one step."""

    train: int
    micro: int
    accumulation: int


def batch_sizes(settings: Settings, world: int) -> BatchSizes:
    """The three of them, the missing ones computed as DeepSpeed does; ValueError if they contradict each other, or are too few."""
    train, micro, accumulation = (settings.count(name) if settings.has(name) else None for name in _BATCH)
    if accumulation is None:
        accumulation = train // (micro * world) if train is not None and micro is not None else 1
    if micro is None:
        if train is None:
            raise ValueError(
                f"{settings.source}: neither 'train_batch_size' nor 'train_micro_batch_size_per_gpu' says a number; write one of them, or pass "
                "auto={'train_micro_batch_size_per_gpu': ...}"
            )
        micro = train // (accumulation * world)
    train = micro * accumulation * world if train is None else train
    if not train == micro * accumulation * world > 0:
        raise ValueError(
            f"{settings.source}: 'train_batch_size' must be 'train_micro_batch_size_per_gpu' x 'gradient_accumulation_steps' x ranks, and "
            f"{train} is not {micro} x {accumulation} x {world}; change one of them, or leave one out"
        )
    return BatchSizes(train, micro, accumulation)


def make_optimizer(settings: Settings, params: Any) -> torch.optim.Optimizer:
    """The optimizer that the config asks for, with DeepSpeed's defaults."""
    if "optimizer.type" not in settings.values:
        raise ValueError(f"{settings.source}: there is no 'optimizer', and none was given; pass optimizer= to zk.initialize, or add the section")
    kind = settings.get("optimizer.type")
    lowered = str(kind).lower()
    if lowered not in ("adam", "adamw", "sgd"):
        raise ValueError(
            f"{settings.source}: 'optimizer.type' is {kind!r}; zk partitions the arithmetic of 'Adam', 'AdamW' and 'SGD', as a rank holds slices of "
            "flat buffers: use one of these"
        )
    allowed = _SGD_PARAMS if lowered == "sgd" else _ADAM_PARAMS
    options = {"lr": 1e-3, **settings.options("optimizer.params")}
    for name in sorted(options.keys() - allowed):
        raise ValueError(f"{settings.source}: 'optimizer.params.{name}' is no option of {kind}; it has {', '.join(sorted(allowed))}")
    if "betas" in options:
        options["betas"] = tuple(options["betas"])
    if lowered == "sgd":
        return torch.optim.SGD(params, **options)
    decoupled = options.pop("adam_w_mode", True) or lowered == "adamw"
    decay = 0.01 if options.pop("torch_adam", False) and decoupled else 0.0
    return (torch.optim.AdamW if decoupled else torch.optim.Adam)(params, **{"weight_decay": decay, **options})


def make_scheduler(settings: Settings, optimizer: torch.optim.Optimizer) -> Schedule | None:
    """The scheduler that the config asks for, if any. "auto" ends warmup at the optimizer's own learning rate, and begins at 0."""
    kind = settings.get("scheduler.type", None)
    if kind is None:
        return None
    if kind not in SCHEDULES:
        raise ValueError(f"{settings.source}: 'scheduler.type' is {kind!r}; zk has {', '.join(SCHEDULES)}: use one, or pass lr_scheduler=")
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    settings.suggest({"scheduler.params.warmup_min_lr": 0.0, "scheduler.params.warmup_max_lr": rates})
    allowed = [field.name for field in dataclasses.fields(SCHEDULES[kind])][1:]
    options = settings.options("scheduler.params")
    for name in sorted(options.keys() - set(allowed)):
        hint = "; it ends warmup at the optimizer's own lr" if (kind, name) == ("WarmupCosineLR", "warmup_max_lr") else ""
        raise ValueError(f"{settings.source}: 'scheduler.params.{name}' is no parameter of {kind}{hint}; it has {', '.join(allowed)}")
    try:
        return SCHEDULES[kind](optimizer, **options)
    except TypeError as error:
        raise ValueError(f"{settings.source}: 'scheduler.params' of {kind}: {error}") from error
    except ValueError as error:
        raise ValueError(f"{settings.source}: 'scheduler.params.{error}") from error


def read_object(config: Config) -> tuple[dict[str, Any], str]:
    """The config as a dict, and what to call it in messages.

    Raises ValueError for what is not JSON (file, line, column, the line with a caret; where a comma is missing or too many, also the line
    without that fault) or not an object, for keys that are there twice; OSError if the file cannot be read.
    """
    if isinstance(config, Mapping):
        return dict(config), "the config"
    if not isinstance(config, (str, os.PathLike)):
        raise TypeError(f"a config is a path to a JSON file, or a dict; got {config!r}")
    path = Path(config)

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"{path}: the key {name!r} is there {names.count(name)} times in one object; keep one of them")
        return dict(pairs)

    text = path.read_text(encoding="utf-8-sig")
    _check_text(text, str(path))
    found = json.loads(text, object_pairs_hook=unique)
    if not isinstance(found, dict):
        raise ValueError(f"{path} must hold a JSON object, {{...}}; it holds a {type(found).__name__}")
    return found, str(path)


def _check_text(text: str, path: str) -> None:
    """ValueError with all faults up to the first that is no comma."""
    reports: list[str] = []
    while (error := _error(text)) is not None:
        fault, mended = _comma(text, error)
        line = text.split("\n")[fault.lineno - 1].rstrip("\r")
        caret = re.sub(r"[^\t]", " ", line[: fault.colno - 1]) + "^"
        reports.append(f"{path}, line {fault.lineno}, column {fault.colno}: {fault.msg}\n    {line}\n    {caret}")
        if mended is None:
            break
        reports.append(f"write line {fault.lineno} as\n    {mended.split(chr(10))[fault.lineno - 1].rstrip()}")
        text = mended
    if reports:
        raise ValueError("\n".join(reports))


def _error(text: str) -> json.JSONDecodeError | None:
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        return error
    return None


def _comma(text: str, error: json.JSONDecodeError) -> tuple[json.JSONDecodeError, str | None]:
    """The error as one about a comma, with the text without it, if a comma more or less gets the parser further."""
    # the last character before the error (some versions of Python point at the comma that is too many itself)
    last = error.pos if text[error.pos : error.pos + 1] == "," else len(text[: error.pos].rstrip()) - 1
    before, after = text[: last + 1], text[last + 1 :]
    faults = []
    if re.match(r",\s*[]}]", text[max(0, last) :]):
        faults.append((last, "a comma before the closing bracket", before[:-1] + after))
    if "',' delimiter" in error.msg:
        faults.append((last + 1, "a comma is missing", f"{before},{after}"))
    for position, message, mended in faults:
        stopped = _error(mended)
        if stopped is None or stopped.pos > len(mended) - len(after.lstrip()):
            return json.JSONDecodeError(message, text, position), mended
    if text.startswith(("//", "/*", "#"), error.pos):
        error.msg = "a comment, which JSON does not have: remove it"
    return error, None
