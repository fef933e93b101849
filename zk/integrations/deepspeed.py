"""DeepSpeed's JSON as a ZeroConfig, and ``zk.initialize``: an engine with DeepSpeed's calls."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zk.checkpoint.files import write_durably
from zk.config import ZeroConfig
from zk.core.logs import log
from zk.core.options import parse_device
from zk.core.precision import DynamicLossScale
from zk.optimizer import ZeroOptimizer
from zk.parallel.comm import together, world_to_join

Config = str | os.PathLike[str] | Mapping[str, Any]
_BATCH = ["train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"]
_SCALE = {"loss_scale_window": "window", "hysteresis": "hysteresis", "min_loss_scale": "minimum"}
_TIERS = {None: "device", "none": "device", "cpu": "host", "nvme": "nvme"}
_USED = {  # section: its keys that zk uses
    "": [*_BATCH, "gradient_clipping"],
    "bf16": ["enabled"],
    "fp16": ["enabled", "loss_scale", "initial_scale_power", *_SCALE],
    "zero_optimization": ["stage"],
    "zero_optimization.offload_param": ["device", "nvme_path"],
    "zero_optimization.offload_optimizer": ["device", "nvme_path"],
    "optimizer": ["type"],
    "optimizer.params": [
        "lr",
        "betas",
        "eps",
        "weight_decay",
        "amsgrad",
        "adam_w_mode",
        "momentum",
    ],
}
_NEEDLESS = """activation_checkpointing aio allgather_bucket_size allgather_partitions auto_cast
    buffer_count buffer_size check_grad_overflow checkpoint comms_logger contiguous_gradients
    csv_monitor dump_state elastic_checkpoint fast_init flops_profiler
    gather_16bit_weights_on_model_save ignore_unused_parameters max_in_cpu max_live_parameters
    max_reuse_distance memory_breakdown model_persistence_threshold overlap_comm
    param_persistence_threshold pin_memory pipeline_read pipeline_write prefetch_bucket_size
    prescale_gradients ratio reduce_bucket_size reduce_scatter round_robin_gradients
    steps_per_print sub_group_size tensorboard wall_clock_breakdown wandb
    zero_allow_untested_optimizer zero_force_ds_cpu_optimizer zero_hpz_partition_size"""
_OF_ENGINE = {  # names of DeepSpeed's engine: what to write instead
    "accumulate": "call zk.ZeroOptimizer.accumulate in a loop of your own",
    "destroy": "engine.optimizer.close() ends training",
    "offload_states": "with engine.optimizer.parked(): gives the memory back",
    "save_16bit_model": "save what engine.optimizer.consolidated_state_dict() returns",
    "skipped_steps": 'engine.optimizer.counters["skipped_steps"] has them',
    "timers": "zk.profile shows what a step spends its time on",
}


def _flat(section: Any, above: str = "") -> Iterator[tuple[str, str, Any]]:
    """The section, key and value of each key."""
    if not isinstance(section, Mapping):
        raise ValueError(f"{above or 'the config'} must be an object, {{...}}; got {section!r}")
    for key, value in section.items():
        key = "bf16" if key == "bfloat16" else key.removeprefix("stage3_")
        if (name := f"{above}.{key}".lstrip(".")) in _USED:
            yield from _flat(value or {}, name)
        elif value is not None:
            yield above, key, value


def _refusal(section: str, key: str, value: Any) -> ValueError:
    known = [*_USED[section], *_NEEDLESS.split(), *(name.rpartition(".")[2] for name in _USED)]
    close = difflib.get_close_matches(key, known, 1, 0.7)
    instead = f"write {close[0]!r}, or remove it" if close else "remove it"
    if key == "scheduler":
        instead = "pass lr_scheduler=, of torch.optim.lr_scheduler or transformers"
    name = f"{section}.{key}".lstrip(".")
    return ValueError(f"there is no setting {name!r}; got {value!r}: {instead}")


def _read(config: Config, auto: Mapping[str, Any], unused: Mapping[str, str]) -> dict[str, Any]:
    """Return the values that zk uses, by dotted key, and name the other keys in one warning.

    ``auto`` has what "auto" stands for; ``unused``, what else sets a key or a section, and where.
    Raises ValueError for what is not JSON, an unknown key, and "auto" that stands for nothing.
    """
    if not isinstance(config, Mapping):
        try:
            config = json.loads(Path(config).read_text(encoding="utf-8-sig"))
        except json.JSONDecodeError as error:
            raise ValueError(f"{config} must be JSON: {error}") from error
    values, others = dict[str, Any](), set[tuple[str, str, str]]()
    for section, key, value in _flat(config):
        name = f"{section}.{key}".lstrip(".")
        place = name.partition(".")[0]
        if key in _USED[section] and place not in unused:
            values[name] = auto.get(name, value) if value == "auto" else value
            if values[name] == "auto" and name not in _BATCH:
                raise ValueError(f'{name} is "auto", and nothing says what that is; write a value')
        elif value in (False, {}, {"enabled": False}, "auto"):
            continue  # it asks for nothing
        elif place in unused:
            others.add((f"set by {unused[place]}", "", place))
        elif key in _NEEDLESS.split():
            others.add(("no effect on results", section, key))
        else:
            raise _refusal(section, key, value)
    lines, last = list[str](), ("", "")
    for head, section, key in sorted(others):
        lines += [f"  {head}:"] * (head != last[0])
        lines += [f"    {section}."] * (section != "" and (head, section) != last)
        lines.append(f"    {'  ' * (section != '')}{key}")
        last = head, section
    if lines:
        log.warning("DeepSpeed's config has settings that are not used:\n%s", "\n".join(lines))
    return {name: value for name, value in values.items() if value != "auto"}


def _zero_config(values: Mapping[str, Any], overrides: Mapping[str, Any]) -> ZeroConfig:
    """The ZeroConfig of what ``_read`` returns; ``overrides`` are fields that win."""
    fields: dict[str, Any] = {"stage": values.get("zero_optimization.stage", 0)}
    for field in ("param", "optimizer"):
        section = f"zero_optimization.offload_{field}"
        device, path = (values.get(f"{section}.{key}") for key in ("device", "nvme_path"))
        if device not in _TIERS:
            raise ValueError(f"{section}.device must be 'none', 'cpu' or 'nvme'; got {device!r}")
        fields[f"{field}_tier"] = _TIERS[device]
        if device == "nvme" and path:
            fields["nvme_path"] = list(dict.fromkeys([*fields.get("nvme_path", []), path]))
    asked = [values.get(f"{name}.enabled", False) for name in ("bf16", "fp16")]
    if asked not in ([False, False], [True, False], [False, True]):
        raise ValueError(f"bf16 and fp16 must be true or false, and one of them; got {asked}")
    if any(asked):
        fields["dtype"] = "bf16" if asked[0] else "fp16"
    if asked[1]:
        scale = {_SCALE[key]: value for key in _SCALE if (value := values.get(f"fp16.{key}"))}
        scale["init"] = 2.0 ** values.get("fp16.initial_scale_power", 16)
        fields["loss_scale"] = values.get("fp16.loss_scale") or DynamicLossScale(**scale)
    if "gradient_clipping" not in values and "clip_grad_norm" not in overrides:
        log.warning("gradient_clipping is not set: zk clips to 1.0, as DeepSpeed 0.19 does")
    fields["clip_grad_norm"] = values.get("gradient_clipping", 1.0) or None
    return ZeroConfig(**{**fields, **overrides})


def from_deepspeed(config: Config, auto: Any, overrides: Mapping[str, Any]) -> ZeroConfig:
    """See ``ZeroConfig.from_deepspeed``."""
    unused = dict.fromkeys([*_BATCH, "optimizer", "scheduler"], "your loop, or zk.initialize")
    return _zero_config(_read(config, auto, unused), overrides)


def for_trainer(config: Config, args: Any) -> ZeroConfig:
    """The ZeroConfig of a JSON for a Trainer, whose TrainingArguments say all the rest."""
    unused = [*_BATCH, "gradient_clipping", "optimizer", "scheduler"]
    auto = {"bf16.enabled": args.bf16, "fp16.enabled": args.fp16}
    values = _read(config, auto, dict.fromkeys(unused, "TrainingArguments"))
    return _zero_config(values, {"clip_grad_norm": None})  # the Trainer clips


def is_deepspeed(zero: Any) -> bool:
    """Return whether this is DeepSpeed's JSON, a path or a dict, and no field of ZeroConfig."""
    sections = zero if isinstance(zero, Mapping) else ()
    return isinstance(zero, (str, os.PathLike)) or "zero_optimization" in sections


def _batch_sizes(values: Mapping[str, Any], world: int) -> tuple[int, int, int]:
    """The three of ``_BATCH``: what is missing is computed as DeepSpeed does."""
    train, micro, count = (values.get(name) for name in _BATCH)
    count = count or (train // (micro * world) if train and micro else 1)
    micro = micro or (train or 0) // (count * world)
    train = train or micro * count * world
    if not train == micro * count * world > 0:
        raise ValueError(
            f"{_BATCH[0]} must be {_BATCH[1]} x {_BATCH[2]} x ranks, and {train} is not {micro} x "
            f"{count} x {world}; write two of them"
        )
    return train, micro, count


def _optimizer(values: Mapping[str, Any], params: Any) -> torch.optim.Optimizer:
    """The optimizer of the config, with DeepSpeed's defaults."""
    given = {name.rpartition(".")[2]: value for name, value in values.items() if ".params." in name}
    adam = torch.optim.AdamW if given.pop("adam_w_mode", True) else torch.optim.Adam
    kinds: dict[str, Any] = {"adam": adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
    if (kind := str(values.get("optimizer.type")).lower()) not in kinds:
        raise ValueError(f"optimizer.type must be Adam, AdamW or SGD; got {kind}: pass optimizer=")
    made: torch.optim.Optimizer = kinds[kind](params, **{"lr": 1e-3, "weight_decay": 0.0, **given})
    return made


class Engine(nn.Module):
    """The model, with DeepSpeed's calls: ``engine(x)``, ``engine.backward(loss)``, ``step()``.

    ``module`` is the model, ``optimizer`` its ZeroOptimizer. ``train_batch_size()``,
    ``train_micro_batch_size_per_gpu()`` and ``gradient_accumulation_steps()`` are the config's.
    """

    def __init__(self, model: nn.Module, optimizer: ZeroOptimizer, scheduler: Any, sizes: Any):
        super().__init__()
        self.module, self.optimizer, self.lr_scheduler = model, optimizer, scheduler
        self.device, self.micro_steps = optimizer.device, 0
        self.global_rank, self.world_size = optimizer.everyone.rank, optimizer.everyone.world
        for name, size in zip(_BATCH, sizes, strict=True):
            setattr(self, name, lambda size=size: size)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = super().__getattr__("module")
            if name in _OF_ENGINE and not hasattr(module, name):
                raise AttributeError(f"zk's engine has no {name!r}; {_OF_ENGINE[name]}") from None
            return getattr(module, name)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        return self.module(*inputs, **kwargs)

    def backward(self, loss: Tensor, **kwargs: Any) -> Tensor:
        """Gradients of ``loss`` / gradient_accumulation_steps, which is returned."""
        loss = loss / self.gradient_accumulation_steps()
        # at stages 0 and 1 each rank sums its own gradients, and they are reduced once
        is_local = self.optimizer.config.stage < 2 and not self.is_gradient_accumulation_boundary()
        with self.optimizer.no_sync() if is_local else contextlib.nullcontext():
            self.optimizer.backward(loss, **kwargs)
        return loss

    def step(self) -> None:
        """At the last micro-batch of a step: update; step the scheduler unless it is skipped."""
        if self.is_gradient_accumulation_boundary():
            before = self.optimizer.counters["steps"]
            self.optimizer.step()
            self.optimizer.zero_grad()
            if self.lr_scheduler is not None and self.optimizer.counters["steps"] > before:
                self.lr_scheduler.step()
        self.micro_steps += 1

    def is_gradient_accumulation_boundary(self) -> bool:
        return bool((self.micro_steps + 1) % self.gradient_accumulation_steps() == 0)

    @property
    def global_steps(self) -> int:
        """Steps, taken or skipped."""
        return sum(self.optimizer.counters[name] for name in ("steps", "skipped_steps"))

    def get_global_grad_norm(self) -> float:
        """The norm of the last step's gradients, before clipping."""
        return self.optimizer.factors.norm

    def get_lr(self) -> list[float]:
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def save_checkpoint(self, save_dir: Any, tag: Any = None, client_state: Any = None) -> None:
        """Save all that training needs into ``save_dir/tag``, or ``global_stepN``; on all ranks.

        ``save_dir/latest`` names it. ``client_state`` is a dict of what JSON can hold.
        """
        root, tag = Path(save_dir), str(tag or f"global_step{self.global_steps}")
        extra = {"client_state": dict(client_state or {})}
        self.optimizer.save_checkpoint(root / tag, scheduler=self.lr_scheduler, extra=extra)
        with together(self.optimizer.everyone, "save_checkpoint()"):  # no rank reads it before
            if self.global_rank == 0:
                write_durably(root / "latest", tag.encode())

    def load_checkpoint(self, load_dir: Any, tag: Any = None) -> tuple[str | None, Any]:
        """Resume from ``tag``, or the latest; returns the folder and client_state. On all ranks.

        (None, None), with a warning, if there is no checkpoint.
        """
        latest = Path(load_dir, "latest")
        tag = latest.read_text().strip() if tag is None and latest.exists() else tag
        if len({*self.optimizer.everyone.exchange(str(tag), "load_checkpoint()")}) > 1:
            raise RuntimeError(
                f"ranks see different checkpoints in {load_dir}; use a shared folder"
            )
        if tag is None:
            log.warning("%s has no checkpoint; nothing was loaded", load_dir)
            return None, None
        folder = Path(load_dir, str(tag))
        extra = self.optimizer.load_checkpoint(folder, scheduler=self.lr_scheduler) or {}
        self.micro_steps = self.global_steps * self.gradient_accumulation_steps()
        return str(folder), extra.get("client_state", {})


def initialize(
    model: nn.Module, optimizer: Any = None, model_parameters: Any = None, lr_scheduler: Any = None,
    *, args: Any = None, config: Config | None = None, auto: Any = None, **overrides: Any,
) -> tuple[Engine, ZeroOptimizer, None, Any]:  # fmt: skip
    """Do what ``deepspeed.initialize`` does, with a ZeroOptimizer on this rank's GPU, or the CPU.

    Args:
        optimizer: one of torch's, or a callable that makes one; None: that of the config.
        model_parameters: tensors or groups, for an optimizer that is made here; None: all.
        lr_scheduler: a scheduler, or a callable that makes one of the optimizer.
        args: has ``deepspeed_config``, the path that counts if there is no ``config``.
        config: DeepSpeed's JSON, a path or a dict.
        auto: values for "auto", by dotted key: ``{"optimizer.params.lr": 3e-4}``.
        overrides: fields of ZeroConfig that win over the config.

    Returns the engine, its optimizer, None in place of DeepSpeed's loader, and the scheduler.
    """
    config = config or getattr(args, "deepspeed_config", None)
    if config is None or not isinstance(model, nn.Module):
        raise TypeError(f"model must be a module, config= a path or dict; got {model}, {config}")
    dtypes = {param.dtype for param in model.parameters()}
    named = {"bf16": torch.bfloat16, "fp16": torch.float16}
    auto = {**{f"{key}.enabled": dtypes == {named[key]} for key in named}, **(auto or {})}
    values = _read(config, auto, {"optimizer": "optimizer="} if optimizer else {})
    zero = _zero_config(values, overrides)
    sizes = _batch_sizes(values, world_to_join(zero.process_group))
    params = list(model.parameters() if model_parameters is None else model_parameters)
    if not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = optimizer(params) if optimizer else _optimizer(values, params)
    if zero.device is None and torch.cuda.is_available():
        rank = os.environ.get("LOCAL_RANK", torch.cuda.current_device())
        zero = dataclasses.replace(zero, device=parse_device(f"cuda:{rank}"))
        torch.cuda.set_device(zero.device)
    wrapped = ZeroOptimizer(model, optimizer, zero)
    scheduler = lr_scheduler(wrapped) if callable(lr_scheduler) else lr_scheduler
    return Engine(model, wrapped, scheduler, sizes), wrapped, None, scheduler


def add_config_arguments(parser: Any) -> Any:
    """Add ``--deepspeed`` and ``--deepspeed_config`` to an argparse parser, as DeepSpeed does."""
    parser.add_argument("--deepspeed", action="store_true", help="use DeepSpeed's calls, as ever")
    parser.add_argument("--deepspeed_config", help="DeepSpeed's JSON, for zk.initialize(args=)")
    return parser


def init_distributed(dist_backend: str | None = None, **options: Any) -> None:
    """Make torch's default process group unless there is one; without a launcher, of one process.

    ``options`` are those of ``torch.distributed.init_process_group``; the backend is NCCL or gloo.
    """
    if not dist.is_initialized():
        if "RANK" not in os.environ:
            store = dist.HashStore()  # type: ignore[attr-defined]
            options = {"store": store, "rank": 0, "world_size": 1, **options}
        default = "nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(dist_backend or default, **options)
