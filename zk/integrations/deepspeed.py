"""DeepSpeed's JSON as a ZeroConfig, and ``zk.initialize``: an engine with DeepSpeed's calls."""

from __future__ import annotations

import contextlib
import difflib
import functools
import json
import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zk.checkpoint import files
from zk.checkpoint.files import write_durably
from zk.config import ZeroConfig
from zk.logs import log, require
from zk.optimizer import ZeroOptimizer
from zk.parallel.comm import Comm, connect
from zk.precision import DynamicLossScale

Config = str | os.PathLike[str] | Mapping[str, Any]
_ZERO = "zero_optimization"
_USED = """train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps
    gradient_clipping bf16.enabled fp16.enabled fp16.loss_scale fp16.initial_scale_power
    fp16.loss_scale_window fp16.hysteresis fp16.min_loss_scale optimizer.type optimizer.params.lr
    optimizer.params.betas optimizer.params.eps optimizer.params.weight_decay
    optimizer.params.momentum optimizer.params.adam_w_mode zero_optimization.stage
    zero_optimization.offload_param.device zero_optimization.offload_param.nvme_path
    zero_optimization.offload_optimizer.device zero_optimization.offload_optimizer.nvme_path
    """
_BATCH = _USED.split()[:3]
_INSTEAD = {"cpu_offload": f"{_ZERO}.offload_optimizer", "scheduler": "lr_scheduler="}
_NEEDLESS = """activation_checkpointing aio allgather_bucket_size allgather_partitions buffer_count
    buffer_size checkpoint comms_logger contiguous_gradients csv_monitor flops_profiler
    gather_16bit_weights_on_model_save ignore_unused_parameters max_in_cpu max_live_parameters
    max_reuse_distance model_persistence_threshold overlap_comm param_persistence_threshold
    pin_memory pipeline_read pipeline_write prefetch_bucket_size reduce_bucket_size reduce_scatter
    round_robin_gradients steps_per_print sub_group_size tensorboard wall_clock_breakdown wandb
    zero_allow_untested_optimizer zero_force_ds_cpu_optimizer"""


def _flat(section: Any, above: str = "") -> Iterator[tuple[str, Any]]:  # dotted name, value
    for key, value in section.items():
        name = f"{above}{key.removeprefix('stage3_')}".replace("bfloat16", "bf16")
        if isinstance(value, Mapping):
            yield from _flat(value, f"{name}.")
        elif value is not None:
            yield name, value


def _read(config: Config, auto: Mapping[str, Any], unused: Collection[str]) -> dict[str, Any]:
    """The values that zk uses, by dotted name; ``unused`` has what the caller sets by itself."""
    if not isinstance(config, Mapping):
        try:
            config = json.loads(Path(config).read_text(encoding="utf-8-sig"))
        except (OSError, ValueError) as error:
            raise ValueError(f"the config must be a dict or a JSON file; got {error}") from error
    require(isinstance(config, Mapping), f"the config must be an object, {{...}}; got {config!r}")
    values, ignored, used = dict[str, Any](), set[str](), _USED.split()
    for name, value in _flat(config):
        parts = {*name.split(".")}
        needless = parts & {*unused, *_NEEDLESS.split()}
        if name in used and not needless:
            values[name] = auto.get(name, value) if value == "auto" else value
            rule = f'{name} is "auto", which nothing fills in: write a value'
            require(values[name] != "auto", rule)
        elif value not in (False, "auto"):  # those ask for nothing
            known = [_INSTEAD[part] for part in parts & _INSTEAD.keys()]
            known += difflib.get_close_matches(name, used, 1, 0)
            rule = f"write {known[0]!r}, or remove it"
            require(needless, f"zk has no setting {name!r}; got {value!r}: {rule}")
            ignored |= needless
    if ignored:
        names = ", ".join(sorted(ignored))
        log.warning("these settings of the JSON are not used: %s", names)
    return values


def _zero_config(values: Mapping[str, Any], overrides: Mapping[str, Any]) -> ZeroConfig:
    fields: dict[str, Any] = {"stage": values.get(f"{_ZERO}.stage", 0)}
    for field in ("param", "optimizer"):
        section = f"{_ZERO}.offload_{field}"
        device = values.get(f"{section}.device", "none")
        fields[f"{field}_tier"] = {"none": "device", "cpu": "host"}.get(device, device)
        if device == "nvme":
            fields["nvme_path"] = values.get(f"{section}.nvme_path")
    asked = values.get("bf16.enabled", False), values.get("fp16.enabled", False)
    dtypes = {(False, False): None, (True, False): "bf16", (False, True): "fp16"}
    rule = f"bf16 and fp16 must be true or false, and one of them false; got {asked}"
    require(asked in dtypes, rule)
    fields["dtype"] = dtypes[asked]
    if asked[1]:
        fields["loss_scale"] = values.get("fp16.loss_scale") or DynamicLossScale(
            init=2.0 ** values.get("fp16.initial_scale_power", 16),
            window=values.get("fp16.loss_scale_window", 1000),
            hysteresis=values.get("fp16.hysteresis", 2),
            minimum=values.get("fp16.min_loss_scale", 1.0),
        )
    fields["clip_grad_norm"] = values.get("gradient_clipping", 1.0) or None
    return ZeroConfig(**{**fields, **overrides})


def from_deepspeed(config: Config, auto: Any, overrides: Mapping[str, Any]) -> ZeroConfig:
    """Implement ``ZeroConfig.from_deepspeed``."""
    clip = ["gradient_clipping"] * ("clip_grad_norm" in overrides)
    return _zero_config(_read(config, auto, [*_BATCH, "optimizer", "scheduler", *clip]), overrides)


def is_deepspeed(zero: Any) -> bool:
    """Return whether this is DeepSpeed's JSON, a path or a dict, and no field of ZeroConfig."""
    return isinstance(zero, (str, os.PathLike)) or (isinstance(zero, Mapping) and _ZERO in zero)


def _batch_sizes(values: Mapping[str, Any], world: int) -> tuple[int, int, int]:
    """The three of ``_BATCH``: what is missing is computed as DeepSpeed does."""
    train, micro, count = (values.get(name) for name in _BATCH)
    count = count or (train and micro and train // (micro * world)) or 1
    micro = micro or (train or 0) // (count * world)
    train = train or micro * count * world
    require(
        train == micro * count * world > 0,
        f"{_BATCH[0]} must be {_BATCH[1]} x {_BATCH[2]} x ranks; got {train}, {micro}, {count} and "
        f"{world}: write two of them",
    )
    return train, micro, count


class Engine(nn.Module):
    """The model, as ``module``, with DeepSpeed's calls and the attributes of the model."""

    def __init__(self, model: nn.Module, optimizer: ZeroOptimizer, scheduler: Any, sizes: Any):
        super().__init__()
        self.module, self.optimizer, self.lr_scheduler = model, optimizer, scheduler
        self.micro_steps = 0
        self.device, self.global_rank = optimizer._layout.device, optimizer._layout.comm.rank
        vars(self).update({name: lambda n=n: n for name, n in zip(_BATCH, sizes, strict=True)})

    def __getattr__(self, name: str) -> Any:
        if name == "module":
            return super().__getattr__(name)
        ours = "param_groups, metrics(), config, no_sync() and consolidated_state_dict()"
        rule = f"the engine has no {name!r}; engine.optimizer has {ours}"
        require(hasattr(self.module, name), rule, AttributeError)
        return getattr(self.module, name)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        return self.module(*inputs, **kwargs)

    def backward(self, loss: Tensor) -> Tensor:
        """Gradients of ``loss`` / gradient_accumulation_steps, which is returned."""
        loss = loss / self.gradient_accumulation_steps()
        is_sum = self.optimizer.config.stage < 2 and not self.is_gradient_accumulation_boundary()
        with self.optimizer.no_sync() if is_sum else contextlib.nullcontext():  # reduced later
            self.optimizer.backward(loss)
        return loss

    def step(self) -> None:
        """At the last micro-batch of a step: update; step the scheduler unless it is skipped."""
        if self.is_gradient_accumulation_boundary():
            before = self.optimizer.num_steps
            self.optimizer.step()
            self.optimizer.zero_grad()
            if self.lr_scheduler is not None and self.optimizer.num_steps > before:
                self.lr_scheduler.step()
        self.micro_steps += 1

    def is_gradient_accumulation_boundary(self) -> bool:
        return bool((self.micro_steps + 1) % self.gradient_accumulation_steps() == 0)

    @property
    def global_steps(self) -> int:
        return int(self.optimizer.num_steps + self.optimizer.skipped_steps)

    def save_checkpoint(self, save_dir: Any, tag: Any = None, client_state: Any = None) -> None:
        """Save into ``save_dir/tag``, or ``global_stepN``, which ``latest`` names. On all ranks."""
        root, tag = Path(save_dir), str(tag or f"global_step{self.global_steps}")
        extra = {"client_state": client_state or {}}
        self.optimizer.save_checkpoint(root / tag, scheduler=self.lr_scheduler, extra=extra)
        with self.optimizer._layout.comm.together("save_checkpoint()"):  # no rank reads it before
            if self.global_rank == 0:
                write_durably(root / "latest", tag.encode())

    def load_checkpoint(self, load_dir: Any, tag: Any = None) -> tuple[str | None, Any]:
        """Resume from ``tag``, or the latest; the folder and client_state, or (None, None)."""
        tag = str(tag or files.named(Path(load_dir)))
        tag = self.optimizer._layout.comm.words("load_checkpoint()", tag)[0]
        if not tag:
            log.warning("%s has no checkpoint; nothing was loaded", load_dir)
            return None, None
        folder = Path(load_dir, tag)
        extra = self.optimizer.load_checkpoint(folder, scheduler=self.lr_scheduler) or {}
        self.micro_steps = self.global_steps * self.gradient_accumulation_steps()
        return str(folder), extra.get("client_state", {})


def initialize(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None, model_parameters: Any = None,
    lr_scheduler: Any = None, *, args: Any = None, config: Config | None = None, **overrides: Any,
) -> tuple[Engine, ZeroOptimizer, None, Any]:  # fmt: skip
    """Do what ``deepspeed.initialize`` does, on this rank's GPU or, without one, on the CPU.

    ``config`` is DeepSpeed's JSON, a path or a dict; None: ``args.deepspeed_config``. It has the
    optimizer unless you pass one. ``lr_scheduler`` may be a callable that takes the optimizer;
    ``overrides`` are fields of ZeroConfig. Returns the engine, its ZeroOptimizer, None and the
    scheduler. ValueError: for settings that zk does not have.
    """
    config = config or getattr(args, "deepspeed_config", None)
    rule = f"model must be a module, config= a path or dict; got {model}, {config}"
    require(config is not None and isinstance(model, nn.Module), rule, TypeError)
    assert config is not None
    if torch.cuda.is_available():
        rank = os.environ.get("LOCAL_RANK", torch.cuda.current_device())
        torch.cuda.set_device(int(rank))
        overrides = {"device": f"cuda:{rank}", **overrides}
    values = _read(config, {}, ["optimizer"] if optimizer else [])
    zero = _zero_config(values, overrides)
    connect()
    sizes = _batch_sizes(values, Comm(zero.process_group).size)
    if optimizer is None and any(param.requires_grad for param in model.parameters()):
        named = {name.rpartition(".")[2]: values[name] for name in values if ".params." in name}
        is_adamw = named.pop("adam_w_mode", True)
        adam = functools.partial(torch.optim.Adam, decoupled_weight_decay=is_adamw)
        kinds: dict[str, Any] = {"adam": adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
        kind = str(values.get("optimizer.type")).lower()
        require(kind in kinds, "optimizer.type must be Adam, AdamW or SGD; or pass optimizer=")
        named = {"lr": 1e-3, "weight_decay": 0.0, **named}  # with DeepSpeed's defaults
        optimizer = kinds[kind](model_parameters or model.parameters(), **named)
    wrapped = ZeroOptimizer(model, optimizer, zero)
    scheduler = lr_scheduler(wrapped) if callable(lr_scheduler) else lr_scheduler
    return Engine(model, wrapped, scheduler, sizes), wrapped, None, scheduler


def add_config_arguments(parser: Any) -> Any:
    """Add ``--deepspeed`` and ``--deepspeed_config`` to an argparse parser, as DeepSpeed does."""
    parser.add_argument("--deepspeed", action="store_true", help="use DeepSpeed's calls, as ever")
    parser.add_argument("--deepspeed_config", help="DeepSpeed's JSON, for zk.initialize(args=)")
    return parser


def init_distributed(dist_backend: str | None = None, **options: Any) -> None:
    """Make torch's default process group, if there is none; without a launcher, of one process."""
    needless = "auto_mpi_discovery distributed_port verbose dist_init_required config"
    options = {name: options[name] for name in options.keys() - {*needless.split()}}
    if not dist.is_initialized():
        if "RANK" not in os.environ:
            store = dist.HashStore()  # type: ignore[attr-defined]
            options = {"store": store, "rank": 0, "world_size": 1, **options}
        dist.init_process_group(dist_backend, **options)
