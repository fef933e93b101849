"""In: DeepSpeed's JSON. Out: a ZeroConfig, batch sizes, an optimizer and a scheduler, or an error that says which key zk will not take, and why.

What becomes of each key is in ``deepspeed_table.py``; nothing is passed over in silence.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import os
from collections.abc import Callable, Container, Iterator, Mapping
from typing import Any

import torch

from zk.config import DynamicLossScale, ZeroConfig, parse_dtype
from zk.integrations.deepspeed_schedules import SCHEDULES, Schedule, WarmupCosineLR
from zk.integrations.deepspeed_table import ALIASES, KEYS, SECTIONS, Kind
from zk.integrations.json_file import read_object
from zk.logs import log

Config = str | os.PathLike[str] | Mapping[str, Any]

_ADAM_PARAMS = {"lr", "betas", "eps", "weight_decay", "amsgrad", "adam_w_mode", "torch_adam"}
_SGD_PARAMS = {"lr", "momentum", "dampening", "weight_decay", "nesterov"}
_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
# what a ZeroConfig says nothing about
LOOP_KEYS = {*_BATCH, "optimizer", "scheduler", "dataloader_drop_last"}
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
        if isinstance(given.get("zero_optimization"), bool):  # as it was written once
            given["zero_optimization"] = {"stage": int(given["zero_optimization"])}
        self.values = {name: value for name, value in self._flatten(given, "", "") if value is not None}
        self.auto = dict(auto or {})
        for name in self.auto:
            if name not in KEYS:
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
                raise ValueError(f"{self.source}: {_unknown(spelled, above, [*KEYS, *SECTIONS, *ALIASES])}")

    def _judge(self, unused: Mapping[str, str]) -> None:
        """Refuse what is refused, and name once what is not used."""
        without, elsewhere = [], {}
        for name, value in self.values.items():
            key = KEYS[name]
            reason = unused.get(name) or unused.get(name.split(".")[0])
            if reason is not None:
                elsewhere[name if name in unused else name.split(".")[0]] = reason
            elif value == "auto" or key.is_off(value) or self._within_off(name):
                continue
            elif key.kind is Kind.REFUSED:
                raise ValueError(f"{self.source}: {name!r} is {value!r}, which zk does not do: {key.why}. Instead: {key.becomes}")
            elif key.kind is Kind.ACCEPTED:
                without.append(name)
        parts = [f"{name} ({reason})" for name, reason in elsewhere.items()]
        if without:
            parts.append(f"{', '.join(without)} (no counterpart in zk; results are the same without: see docs/deepspeed_config.md)")
        if parts:
            log.warning("%s: not used: %s", self.source, "; ".join(parts))

    def _within_off(self, name: str) -> bool:
        """Whether the key is in a section that is not enabled."""
        switch = f"{name.rpartition('.')[0]}.enabled"
        return switch in KEYS and switch != name and self.values.get(switch) not in (True, "auto")

    def has(self, name: str) -> bool:
        """Whether the config says anything but "auto"."""
        return name in self.auto or self.values.get(name, "auto") != "auto"

    def get(self, name: str, default: Any = _REQUIRED) -> Any:
        """The value; for "auto", what ``auto`` gives. ValueError if it gives nothing, or if there is neither value nor default."""
        assert name in KEYS
        value = self.values.get(name, default)
        if isinstance(value, str) and value == "auto":
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

    def suggest(self, values: Mapping[str, Any]) -> None:
        """What "auto" is where the caller of zk gave nothing."""
        self.auto = {**values, **self.auto}


def _unknown(name: str, above: str, known: Container[str]) -> str:
    """What to say of a key that is not in the table."""
    last = name.rpartition(".")[2]
    candidates = [other for other in (*KEYS, *SECTIONS, *ALIASES) if other in known]
    beside = [other for other in candidates if other.startswith(above) and "." not in other[len(above) :]]
    close = _closest(last, beside) or _closest(last, candidates)
    hint = f"the closest one is {close[0]!r}" if close else "see docs/deepspeed_config.md for all of them"
    return f"{name!r} is no key of DeepSpeed's config that zk knows; {hint}"


def _closest(last: str, candidates: list[str]) -> list[str]:
    """The key whose own name, without its section's, is closest; none if none is close."""
    by_last = {other.rpartition(".")[2]: other for other in reversed(candidates)}
    return [by_last[match] for match in difflib.get_close_matches(last, by_last, 1, 0.7)]


# ---- ZeroConfig --------------------------------------------------------------------------------------------------------------


def zero_config(settings: Settings, overrides: Mapping[str, Any]) -> ZeroConfig:
    """The ZeroConfig of a config; ``overrides`` are fields that win."""
    fields: dict[str, Any] = {"stage": settings.get("zero_optimization.stage", 0), **_tiers(settings), **_precision(settings)}
    fields["overlap"] = settings.flag("zero_optimization.overlap_comm", True)
    if fields["stage"] == 3 and settings.has("zero_optimization.stage3_prefetch_bucket_size"):
        fields["prefetch"] = min(1, settings.number("zero_optimization.stage3_prefetch_bucket_size"))
    if "gradient_clipping" not in settings.values and "clip_grad_norm" not in overrides:
        log.warning(
            "%s: 'gradient_clipping' is not set. DeepSpeed 0.19 then clips to %g (older versions did not), and so does zk; set it, to 0 for none",
            settings.source,
            _CLIP_OF_DEEPSPEED,
        )
    fields["clip_grad_norm"] = settings.number("gradient_clipping", _CLIP_OF_DEEPSPEED) or None
    try:
        config = ZeroConfig(**{**fields, **overrides})
    except ValueError as error:
        raise ValueError(f"{settings.source}: {error}") from error
    travels = settings.get("communication_data_type", None)
    if travels is not None and parse_dtype(travels, "communication_data_type") != (config.dtype or torch.float32):
        raise ValueError(
            f"{settings.source}: 'communication_data_type' is {travels!r}, and training is in {config.dtype or torch.float32}: gradients travel in "
            "that, and are summed in fp32; remove it"
        )
    return config


def _tiers(settings: Settings) -> dict[str, Any]:
    names = {"none": "device", "cpu": "host", "nvme": "nvme"}
    fields: dict[str, Any] = {}
    paths: list[str] = []
    for field, section, old in (
        ("param_tier", "zero_optimization.offload_param", "zero_optimization.cpu_offload_param"),
        ("optimizer_tier", "zero_optimization.offload_optimizer", "zero_optimization.cpu_offload"),
    ):
        device = settings.get(f"{section}.device", "cpu" if settings.flag(old, False) else "none")
        if device not in names:
            raise ValueError(f"{settings.source}: '{section}.device' must be 'none', 'cpu' or 'nvme'; got {device!r}")
        fields[field] = names[device]
        path = settings.get(f"{section}.nvme_path", None)
        if device == "nvme" and path is not None and str(path) not in paths:
            paths.append(str(path))
    return {**fields, "nvme_path": paths} if paths else fields


def _precision(settings: Settings) -> dict[str, Any]:
    bf16, fp16 = settings.flag("bf16.enabled", False), settings.flag("fp16.enabled", False)
    if bf16 and fp16:
        raise ValueError(f"{settings.source}: 'bf16' and 'fp16' are both enabled; enable one of them")
    if not fp16:
        return {"dtype": "bf16", **_keeps(settings, torch.bfloat16)} if bf16 else {}
    fields = {"dtype": "fp16", **_keeps(settings, torch.float16)}
    constant = settings.number("fp16.loss_scale", 0)
    if constant:
        return {**fields, "loss_scale": constant}
    scale = DynamicLossScale(
        init=2.0 ** settings.number("fp16.initial_scale_power", 16),
        window=settings.count("fp16.loss_scale_window", 1000),
        hysteresis=settings.count("fp16.hysteresis", 2),
        minimum=float(settings.number("fp16.min_loss_scale", 1)),
    )
    return {**fields, "loss_scale": scale}


def _keeps(settings: Settings, dtype: torch.dtype) -> dict[str, Any]:
    """Options that say which buffers are cast with the parameters, and what keeps its dtype."""
    fields: dict[str, Any] = {}
    buffers = settings.get("data_types.buffer_dtype", None)
    if buffers is not None:
        asked = parse_dtype(buffers, "data_types.buffer_dtype")
        if asked not in (dtype, torch.float32):
            raise ValueError(f"{settings.source}: 'data_types.buffer_dtype' must be that of training, or fp32, which keeps them; got {buffers!r}")
        fields["cast_buffers"] = asked == dtype
    names = settings.get("data_types.keep_in_fp32_modules", None)
    return {**fields, "keep_dtype": names} if names else fields


def from_deepspeed(config: Config, auto: Mapping[str, Any] | None, overrides: Mapping[str, Any]) -> ZeroConfig:
    """What ``ZeroConfig.from_deepspeed`` does."""
    return zero_config(Settings(config, auto, dict.fromkeys(LOOP_KEYS, "for zk.initialize")), overrides)


# ---- what the training loop needs --------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class BatchSizes:
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
    if train is None:
        train = micro * accumulation * world
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
    options = {
        name: settings.get(f"optimizer.params.{name}") for name in (*_ADAM_PARAMS, *_SGD_PARAMS) if f"optimizer.params.{name}" in settings.values
    }
    lowered = kind.lower() if isinstance(kind, str) else None
    if lowered not in ("adam", "adamw", "sgd"):
        raise ValueError(
            f"{settings.source}: 'optimizer.type' is {kind!r}; zk partitions the arithmetic of 'Adam', 'AdamW' and 'SGD', as a rank holds slices of "
            "flat buffers: use one of these"
        )
    allowed = _SGD_PARAMS if lowered == "sgd" else _ADAM_PARAMS
    for name in options:
        if name not in allowed:
            raise ValueError(f"{settings.source}: 'optimizer.params.{name}' is no option of {kind}; it has {', '.join(sorted(allowed))}")
    if "betas" in options:
        options["betas"] = tuple(options["betas"])
    options.setdefault("lr", 1e-3)
    if lowered == "sgd":
        return torch.optim.SGD(params, **options)
    decoupled = options.pop("adam_w_mode", True) or lowered == "adamw"
    options.setdefault("weight_decay", 0.01 if options.pop("torch_adam", False) and decoupled else 0.0)
    options.pop("torch_adam", None)
    return torch.optim.AdamW(params, **options) if decoupled else torch.optim.Adam(params, **options)


def make_scheduler(settings: Settings, optimizer: torch.optim.Optimizer) -> Schedule | None:
    """The scheduler that the config asks for, if any. "auto" ends warmup at the optimizer's own learning rate, and begins at 0."""
    kind = settings.get("scheduler.type", None)
    if kind is None:
        return None
    if kind not in SCHEDULES:
        raise ValueError(f"{settings.source}: 'scheduler.type' is {kind!r}; zk has {', '.join(SCHEDULES)}: use one, or pass lr_scheduler=")
    settings.suggest(
        {"scheduler.params.warmup_min_lr": 0.0, "scheduler.params.warmup_max_lr": [float(group["lr"]) for group in optimizer.param_groups]}
    )
    prefix = "scheduler.params."
    make: Callable[..., Schedule] = SCHEDULES[kind]
    allowed = list(inspect.signature(make).parameters)[1:]
    options = {name[len(prefix) :]: settings.get(name) for name in settings.values if name.startswith(prefix)}
    options.pop("last_batch_iteration", None)
    for name in options:
        if name not in allowed:
            hint = "; it ends warmup at the optimizer's own lr" if make is WarmupCosineLR and name == "warmup_max_lr" else ""
            raise ValueError(f"{settings.source}: '{prefix}{name}' is no parameter of {kind}{hint}; it has {', '.join(allowed)}")
    try:
        return make(optimizer, **options)
    except TypeError as error:
        raise ValueError(f"{settings.source}: 'scheduler.params' of {kind}: {error}") from error
    except ValueError as error:
        raise ValueError(f"{settings.source}: 'scheduler.params.{error}") from error
