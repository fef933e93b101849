"""``zk.initialize``: what ``deepspeed.initialize`` gives a script, an engine with DeepSpeed's calls around a model and its ZeroOptimizer."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from zk.checkpoint import folders
from zk.checkpoint.files import write_durably
from zk.config import ZeroConfig
from zk.core.logs import log
from zk.core.options import parse_device
from zk.integrations.deepspeed_config import BatchSizes, Config, Settings, batch_sizes, make_optimizer, make_scheduler, zero_config
from zk.integrations.deepspeed_monitor import Monitor
from zk.optimizer import ZeroOptimizer
from zk.parallel.comm import together, world_to_join

# names of DeepSpeed's engine that have no counterpart -> what to write instead
_OF_DEEPSPEED = {
    "timers": "with zk.core.timeline.Recorder() as recorder: shows what a step spends its time on",
    "dump_state": "print(engine.optimizer.summary())",
    "module_state_dict": "engine.optimizer.consolidated_state_dict() has the whole model",
    "allreduce_gradients": "gradients are reduced as backward makes them, or in step()",
    "set_gradient_accumulation_boundary": "zk.ZeroOptimizer, where each step() is the boundary",
    "set_train_batch_size": "batch sizes are those of the config; make another engine",
    "flops_profiler": "the section of the config counts operations",
}


class Engine(nn.Module):
    """The model, with DeepSpeed's training calls: ``engine(x)``, ``engine.backward(loss)``, ``engine.step()``.

    ``module`` is the model, ``optimizer`` its ZeroOptimizer. What an engine does not have is looked for in the model.
    """

    def __init__(self, model: nn.Module, optimizer: ZeroOptimizer, scheduler: Any, sizes: BatchSizes, monitor: Monitor) -> None:
        super().__init__()
        self.monitor = monitor
        self.module, self.optimizer, self.lr_scheduler, self._sizes = model, optimizer, scheduler, sizes
        self.device, self.local_rank = optimizer.device, _local_rank(None)
        self.micro_steps, self._was_applied = 0, False
        self._parked = contextlib.ExitStack()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = super().__getattr__("module")
            if name in _OF_DEEPSPEED and not hasattr(module, name):
                raise AttributeError(f"zk's engine has no {name!r}; {_OF_DEEPSPEED[name]}") from None
            return getattr(module, name)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        with self.monitor.timed("forward"), self.monitor.counted("forward"):
            return self.module(*inputs, **kwargs)

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Gradients of ``loss`` / gradient_accumulation_steps, times the loss scale; returns the loss that was divided."""
        if scale_wrt_gas:
            loss = loss / self._sizes.accumulation
        is_local = self.optimizer.config.stage < 2 and not self.is_gradient_accumulation_boundary()  # summed on each rank, reduced once
        with self.monitor.timed("backward"), self.monitor.counted("backward"), self.optimizer.no_sync() if is_local else contextlib.nullcontext():
            self.optimizer.backward(loss, retain_graph=retain_graph)
        self.monitor.add_loss(loss)
        return loss

    def accumulate(self, batches: Iterable[Any], loss_fn: Callable[[nn.Module, Any], Tensor], **options: Any) -> list[Tensor]:
        """Forward and backward of all micro batches of a step, block by block, as ``ZeroOptimizer.accumulate``; then call ``step()`` once.

        Args:
            batches: as many as gradient_accumulation_steps.
            loss_fn: of the engine and one batch; its loss is divided by their number.
            options: of ``ZeroOptimizer.accumulate``.

        Returns:
            The losses, divided and detached.
        """
        batches, count = list(batches), self._sizes.accumulation
        if len(batches) != count or self.micro_steps % count:
            raise ValueError(
                f"accumulate() takes all micro batches of a step, {count} by gradient_accumulation_steps; got {len(batches)}, after "
                f"{self.micro_steps % count} of this step"
            )
        if self.monitor.flops is not None:
            log.warning("flops_profiler counts a micro batch from its forward to its backward, and accumulate() goes block by block: it is not used")
            self.monitor.flops = None
        with self.monitor.timed("backward"):
            losses: list[Tensor] = self.optimizer.accumulate(batches, lambda _, batch: loss_fn(self, batch) / count, **options)
        for loss in losses:
            self.monitor.add_loss(loss)
        self.micro_steps += count - 1
        return losses

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """Count a micro batch; at the last one of a step, update, and step the scheduler if the update was not skipped."""
        if self.is_gradient_accumulation_boundary():
            skipped = self.skipped_steps
            with self.monitor.timed("step"):
                self.optimizer.step()
                self.optimizer.zero_grad()
            self._was_applied = self.skipped_steps == skipped
            if self.lr_scheduler is not None and self._was_applied:
                self.lr_scheduler.step(**(lr_kwargs or {}))
            self.monitor.step(self)
        self.micro_steps += 1

    def is_gradient_accumulation_boundary(self) -> bool:
        """True at the last micro batch of a step."""
        return (self.micro_steps + 1) % self._sizes.accumulation == 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    @property
    def global_steps(self) -> int:
        """Steps, taken or skipped."""
        return self.optimizer.counters["steps"] + self.skipped_steps

    @property
    def skipped_steps(self) -> int:
        return self.optimizer.counters["skipped_steps"]

    @property
    def global_samples(self) -> int:
        return self.global_steps * self._sizes.train

    def train_batch_size(self) -> int:
        return self._sizes.train

    def train_micro_batch_size_per_gpu(self) -> int:
        return self._sizes.micro

    def gradient_accumulation_steps(self) -> int:
        return self._sizes.accumulation

    def get_global_grad_norm(self) -> float | None:
        """The norm of the last step's gradients over all ranks, before clipping; None before the first step."""
        return None if self.global_steps == 0 and math.isnan(self.optimizer.factors.norm) else self.optimizer.factors.norm

    def get_lr(self) -> list[float]:
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of all groups."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def get_mom(self) -> list[Any]:
        """The momentum, or the betas, of each group."""
        return [group.get("betas", group.get("momentum")) for group in self.optimizer.param_groups]

    def was_step_applied(self) -> bool:
        """True if the last step updated the model: it was no micro batch in between, and not skipped."""
        return self._was_applied and self.micro_steps % self._sizes.accumulation == 0

    @property
    def global_rank(self) -> int:
        return self.optimizer.everyone.rank

    @property
    def world_size(self) -> int:
        return self.optimizer.everyone.world

    @property
    def dp_world_size(self) -> int:
        return self.optimizer.comm.world

    @property
    def cur_scale(self) -> float:
        """The loss scale, 1 without one."""
        return self.optimizer.scaler.scale

    def loss_scale(self) -> float:
        """The loss scale, 1 without one."""
        return self.cur_scale

    def zero_optimization(self) -> bool:
        return self.optimizer.config.stage > 0

    def zero_optimization_stage(self) -> int:
        return self.optimizer.config.stage

    def zero_optimization_partition_weights(self) -> bool:
        return self.optimizer.config.stage == 3

    def fp16_enabled(self) -> bool:
        return self.optimizer.config.dtype == torch.float16

    def bfloat16_enabled(self) -> bool:
        return self.optimizer.config.dtype == torch.bfloat16

    def gradient_clipping(self) -> float:
        """The norm that gradients are clipped to; 0 without clipping."""
        return self.optimizer.config.clip_grad_norm or 0.0

    def steps_per_print(self) -> int:
        return self.monitor.prints

    def wall_clock_breakdown(self) -> bool:
        return self.monitor.times is not None

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Context: gradients stay on their rank. ValueError at stages 2 and 3, which keep no whole gradients, as in DeepSpeed."""
        if self.optimizer.config.stage > 1:
            raise ValueError(f"no_sync() needs whole gradients, and stage {self.optimizer.config.stage} keeps shards of them; leave it out")
        return self.optimizer.no_sync()

    def offload_states(self, include: Any = None, device: Any = "cpu", pin_memory: bool = True, non_blocking: bool = False) -> None:
        """Give the memory of training state back until ``reload_states``: ``ZeroOptimizer.parked``, which refuses training meanwhile.

        Args:
            include: None, which is all states.
            device: "cpu": the device's memory goes to the host; "nvme": the host's too, to ``nvme_path``.
            pin_memory: taken for compatibility.
            non_blocking: the same.
        """
        if include is not None:
            raise ValueError(f"offload_states(include={include!r}) is not supported: all states give their memory back; leave include out")
        paths: dict[str, Any] = {"cpu": None}
        if self.optimizer.config.nvme_path:
            paths["nvme"] = self.optimizer.config.nvme_path
        name = getattr(device, "value", device)  # of DeepSpeed's enum, too
        if name not in paths:
            raise ValueError(f"offload_states(device=) must be 'cpu', or 'nvme' where the config has an nvme_path; got {device!r}")
        if paths[name] is None and self.optimizer.transfer.joined:
            return  # all is in host memory as it is
        self._parked.enter_context(self.optimizer.parked(paths[name]))

    def reload_states(self, non_blocking: bool = False) -> None:
        """Take the memory again that ``offload_states`` gave back, with the same bits."""
        self._parked.close()

    def empty_partition_cache(self) -> None:
        """Release parameters that are gathered."""
        self.optimizer.synchronize()

    def save_16bit_model(
        self, save_dir: str | os.PathLike[str], save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """Write the whole model, as it is trained, for ``torch.load``; the first rank does, with memory for all of it. On all ranks."""
        state = self.optimizer.consolidated_state_dict(rank0_only=True)
        frozen = [name for name, param in self.module.named_parameters(remove_duplicate=False) if not param.requires_grad]
        with together(self.optimizer.everyone, "save_16bit_model()"):  # nobody reads it before it is there
            if self.global_rank == 0:
                Path(save_dir).mkdir(parents=True, exist_ok=True)
                left_out = set(frozen) if exclude_frozen_parameters else set()
                torch.save({name: value for name, value in state.items() if name not in left_out}, Path(save_dir, save_filename))
        return True

    save_fp16_model = save_16bit_model

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: Any = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """``ZeroOptimizer.save_checkpoint``, with the scheduler; ``client_state`` is what JSON can hold. On all ranks.

        Without ``tag`` into ``save_dir/step-NNNNNNNN``, with it into a folder like that in ``save_dir/tag``.
        """
        if exclude_frozen_parameters:
            raise ValueError("exclude_frozen_parameters=True is not supported: a checkpoint is whole; leave it out")
        if str(tag).startswith("step-"):
            raise ValueError(f"tag must not begin with 'step-', as zk's own folders do; got {tag!r}: choose another, or leave it out")
        root = Path(save_dir)
        folder = root if tag is None else root / str(tag)
        self.optimizer.save_checkpoint(folder, scheduler=self.lr_scheduler, extra={"client_state": dict(client_state or {})})
        if tag is not None and save_latest:
            with together(self.optimizer.everyone, "save_checkpoint()"):  # nobody looks for it before it is there
                if self.global_rank == 0:
                    write_durably(root / folders.LATEST, str(tag).encode())
        return True

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: Any = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Go on from the checkpoint of ``tag``, or the latest one; returns its folder and the ``client_state``. On all ranks.

        (None, None), and a warning, where there is none and no tag was given.
        """
        if not (load_module_strict and load_optimizer_states and load_lr_scheduler_states) or load_module_only or custom_load_fn is not None:
            raise ValueError(
                "engine.load_checkpoint goes on with all that was saved; to take weights alone, use python -m zk export and load_state_dict, "
                "and leave the load_* options out"
            )
        with together(self.optimizer.everyone, "load_checkpoint()"):
            folder = _folder_of(Path(load_dir), tag)
        seen = self.optimizer.everyone.exchange("nothing" if folder is None else folder.name, "load_checkpoint()")
        if len(set(seen)) > 1:
            found = ", ".join(f"rank {rank}: {name}" for rank, name in enumerate(seen))
            raise RuntimeError(f"ranks see different checkpoints in {load_dir} ({found}); it must be one folder that all of them see")
        if folder is None:
            log.warning("%s has no checkpoint; nothing was loaded", load_dir)
            return None, None
        extra = self.optimizer.load_checkpoint(folder, scheduler=self.lr_scheduler) or {}
        self.micro_steps = self.global_steps * self._sizes.accumulation
        return str(folder), extra.get("client_state", {})

    def destroy(self) -> None:
        """Let go of the model; parameters that are whole stay usable."""
        self.optimizer.close()


def initialize(
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    lr_scheduler: Any = None,
    *,
    args: Any = None,
    config: Config | None = None,
    deepspeed_config: Config | None = None,
    config_params: Config | None = None,
    training_data: Dataset[Any] | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    dist_init_required: bool | None = None,
    mpu: Any = None,
    auto: Mapping[str, Any] | None = None,
    **overrides: Any,
) -> tuple[Engine, ZeroOptimizer, DataLoader[Any] | None, Any]:
    """Do what ``deepspeed.initialize`` does, by zk: the engine, its optimizer, a loader of ``training_data``, and the scheduler.

    Args:
        model: moved to this rank's GPU, if there is one.
        optimizer: torch's Adam, AdamW or SGD, or a callable that makes one of the parameters; None: as the config says.
        model_parameters: tensors or groups to train, for an optimizer that is made here; None: all that require gradients.
        lr_scheduler: a scheduler, or a callable that makes one of the optimizer; None: as the config says, if it does.
        args: what has ``deepspeed_config``, and perhaps ``local_rank``.
        config: DeepSpeed's JSON, a path or a dict.
        deepspeed_config: another name of ``config``; give one of them, or ``args``.
        config_params: a third one.
        training_data: a dataset; each rank reads its own part, in micro batches.
        collate_fn: makes a batch of samples, for the loader of ``training_data``.
        dist_init_required: taken for compatibility: the default process group is joined, or made, in any case.
        mpu: Megatron's, which has the groups of data parallel and model parallel ranks. As overrides: ``process_group``, ``model_parallel_group``.
        auto: values for what the config says is "auto", by dotted key: ``{"optimizer.params.lr": 3e-4}``.
        overrides: ZeroConfig fields that win over the config.

    What becomes of each key of the config: docs/deepspeed_config.md.

    Returns:
        The engine, its ZeroOptimizer, a loader (None without ``training_data``), and the scheduler (None without one).

    Raises:
        ValueError: for what zk does not do, with the reason and what to do instead, for unknown keys, and for what is not JSON.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module; got {type(model).__name__}. zk.initialize takes args= by name")
    if mpu is not None:
        overrides = {"process_group": mpu.get_data_parallel_group(), "model_parallel_group": mpu.get_model_parallel_group(), **overrides}
    given = [found for found in (config, deepspeed_config, config_params, getattr(args, "deepspeed_config", None)) if found is not None]
    if len(given) != 1:
        raise ValueError(f"give the config once: config=, a path or a dict, or args.deepspeed_config; got {len(given)} of them")
    unused = {"optimizer": "one was given"} if optimizer is not None else {}
    unused |= {"scheduler": "one was given"} if lr_scheduler is not None else {}
    settings = Settings(given[0], auto, unused)
    left_open = [name for name in ("bf16.enabled", "fp16.enabled") if settings.values.get(name) == "auto" and not settings.has(name)]
    dtypes = {param.dtype for param in model.parameters()}
    settings.suggest({"bf16.enabled": dtypes == {torch.bfloat16}, "fp16.enabled": dtypes == {torch.float16}})
    zero = zero_config(ZeroConfig, settings, overrides)
    if left_open and zero.dtype is None:
        log.warning(
            '%s: %s: "auto": training is in %s, as the model is; auto={%r: True} changes that',
            settings.source,
            " and ".join(left_open),
            ", ".join(sorted(map(str, dtypes))),
            left_open[0],
        )
    sizes = batch_sizes(settings, world_to_join(zero.process_group))
    local_rank = _local_rank(args)
    if torch.cuda.is_available():
        device = torch.device(zero.device or parse_device(f"cuda:{local_rank}"))
        if device.type == "cuda":
            torch.cuda.set_device(device)
        if any(param.is_meta for param in model.parameters()):  # deferred_init took the device that was current then
            zero = dataclasses.replace(zero, device=device)
        else:
            model.to(device)
    params = list(model_parameters) if model_parameters is not None else [param for param in model.parameters() if param.requires_grad]
    if optimizer is None:
        optimizer = make_optimizer(settings, params)
    elif not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = optimizer(params)
    wrapped = ZeroOptimizer(model, optimizer, zero)
    loader: DataLoader[Any] | None = None
    try:
        if lr_scheduler is None:
            lr_scheduler = make_scheduler(settings, wrapped)
        elif callable(lr_scheduler):
            lr_scheduler = lr_scheduler(wrapped)
        engine = Engine(model, wrapped, lr_scheduler, sizes, Monitor(settings, wrapped))
        if training_data is not None:  # this rank's part of it, shuffled, in micro batches
            comm, drop_last = wrapped.comm, settings.flag("dataloader_drop_last", False)
            sampler: Any = None if isinstance(training_data, IterableDataset) else DistributedSampler(training_data, comm.world, comm.rank)
            is_pinned = engine.device.type == "cuda"
            loader = DataLoader(training_data, sizes.micro, sampler=sampler, collate_fn=collate_fn, drop_last=drop_last, pin_memory=is_pinned)
    except BaseException:
        wrapped.close(gather=True)
        raise
    engine.local_rank = local_rank
    return engine, wrapped, loader, lr_scheduler


def _local_rank(args: Any) -> int:
    """This rank's number on its machine: the launcher's, or else that of the device which the program has chosen."""
    given = os.environ.get("LOCAL_RANK", getattr(args, "local_rank", None))
    if given is not None and int(given) >= 0:
        return int(given)
    return torch.cuda.current_device() if torch.cuda.is_available() else 0


def _folder_of(root: Path, tag: Any) -> Path | None:
    """The folder that zk saved under ``tag``, or last; None if nothing is there and no tag was given."""
    if tag is None and (root / folders.LATEST).exists():
        named = (root / folders.LATEST).read_text().strip()
        tag = None if named.startswith("step-") else named or None
    folder = root if tag is None else root / str(tag)
    if any(folder.glob("*_states.pt")):
        raise ValueError(
            f"{folder} was written by DeepSpeed, and zk does not read its checkpoints; make weights of it with zero_to_fp32.py of DeepSpeed, "
            "then load them with zk.load_pretrained(model, folder)"
        )
    return None if tag is None and folders.find(root) is None else folder
