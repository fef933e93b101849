"""ZeroTrainer: the Trainer of transformers over ZeroOptimizer, at any stage and tier."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from torch import nn
from transformers import Seq2SeqTrainer, Trainer, TrainingArguments

from zk.accumulation.schedule import is_vertical
from zk.checkpoint import interrupted
from zk.checkpoint.export import export
from zk.config import ZeroConfig
from zk.core.logs import log
from zk.core.memory import host_memory
from zk.core.options import check_order
from zk.integrations.accelerate import FOLDER, ZeroAccelerator, unwrapped
from zk.integrations.deepspeed import for_trainer, is_deepspeed
from zk.nn.pretrained import load_pretrained
from zk.optimizer import ZeroOptimizer
from zk.tools.metrics import Rates, loggable

try:
    from peft import PeftModel, get_peft_model_state_dict
except ImportError:
    PeftModel = None

SCHEDULER, OPTIMIZER = "scheduler.pt", "optimizer.pt"  # as the Trainer calls them
_REFUSED = {  # TrainingArguments -> what to do instead
    "deepspeed": "give the file as zero=, or use ZeroTrainingArguments, which read it",
    "fsdp": "remove it: stage=3 does what it does",
    "torch_compile": "compile the blocks of the model instead (block.compile())",
    "bf16_full_eval": "remove it: with bf16=True the parameters are bf16 already",
    "fp16_full_eval": "remove it: with fp16=True the parameters are fp16 already",
}


@dataclasses.dataclass
class ZeroTrainingArguments(TrainingArguments):  # type: ignore[misc]
    """TrainingArguments whose ``deepspeed``, the path or dict of DeepSpeed's JSON, is read by a ZeroTrainer: for scripts that take
    ``--deepspeed ds.json`` (``HfArgumentParser(ZeroTrainingArguments)``). transformers' own look for DeepSpeed as soon as they are made.
    """

    def __post_init__(self) -> None:
        self.zero, self.deepspeed = self.deepspeed, None  # type: ignore[has-type]
        super().__post_init__()


class ZeroTrainerMixin:
    """Lets a Trainer train with ZeroOptimizer: ``class MyTrainer(ZeroTrainerMixin, Trainer)``.

    Args:
        zero: a ZeroConfig, its fields as a dict, or DeepSpeed's JSON, as a path or a dict, whose "auto" is what ``TrainingArguments`` say; None:
            what ``ZeroTrainingArguments(deepspeed=)`` has, or all defaults.
            Without ``dtype`` it follows ``TrainingArguments``: ``bf16=True`` means bf16 parameters with fp32 masters, without autocast;
            ``fp16=True`` the same in fp16 with zk's dynamic loss scale. ``dtype="fp32"`` beside ``bf16=True`` keeps autocast over fp32
            parameters.
        accumulation: in which order the micro-batches of ``gradient_accumulation_steps`` go through the model: "horizontal", one after the
            other; "vertical", all of them block by block, which moves each parameter and gradient once for all (``ZeroOptimizer.accumulate``:
            blocks are computed again in backward, and random numbers are each micro-batch's own); "auto", vertical where parameters or
            gradients rest away from where they are computed.
        args, kwargs: the Trainer's.

    Everything else stays: ``max_grad_norm``, accumulation, schedulers, evaluation, generation, ``optim`` (the AdamW kinds of torch, or SGD).
    Checkpoints have full weights, as the Trainer's do, for ``from_pretrained``; where the host has no room for these, they are written
    piece by piece. The optimizer is in their folder ``zk``, for any number of ranks, stage and tier, and a checkpoint of the plain Trainer
    is gone on from, too. Rates are part of the logs, under ``zk/``; with ``ZK_METRICS=all`` all of ``optimizer.metrics()``. All ranks call
    ``save_model``, ``evaluate`` and ``predict``.
    """

    zero: ZeroOptimizer | None = None
    _rates: Rates | None = None
    _export_next = False
    args: Any
    model: Any
    optimizer: Any
    lr_scheduler: Any
    accelerator: Any
    control: Any

    def __init__(
        self,
        *args: Any,
        zero: ZeroConfig | Mapping[str, Any] | str | os.PathLike[str] | None = None,
        accumulation: str = "horizontal",
        **kwargs: Any,
    ) -> None:
        self.accumulation = check_order(accumulation, "accumulation")
        self._samples: list[Any] = []  # of the step, for all micro-batches at once
        self._losses: list[Any] = []  # theirs, not handed out yet
        arguments = kwargs.get("args", args[1] if len(args) > 1 else None)
        if (said := getattr(arguments, "zero", None)) is not None:
            if zero is not None:
                raise ValueError(f"ZeroTrainingArguments(deepspeed={said!r}) and zero= are both given; keep one of them")
            zero = said
        if is_deepspeed(zero):
            zero = for_trainer(zero, TrainingArguments("tmp_trainer") if arguments is None else arguments)  # type: ignore[arg-type]
        assert not isinstance(zero, (str, os.PathLike))
        config = self._zero_config = zero if isinstance(zero, ZeroConfig) else ZeroConfig(**(zero or {}))
        super().__init__(*args, **kwargs)
        for name, remedy in _REFUSED.items():
            if value := getattr(self.args, name, None):
                raise ValueError(f"{type(self).__name__} does not take TrainingArguments({name}={value!r}); {remedy}")
        if self.args.max_grad_norm and config.clip_grad_norm is not None:
            raise ValueError(
                f"clip_grad_norm={config.clip_grad_norm} has no effect beside TrainingArguments(max_grad_norm={self.args.max_grad_norm}), by "
                "which the Trainer clips; leave it out, and set max_grad_norm"
            )
        if self.args.n_gpu > 1:
            raise ValueError(f"one process sees {self.args.n_gpu} GPUs; start one for each, with torchrun --nproc_per_node {self.args.n_gpu}")

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        self.accelerator.__class__ = ZeroAccelerator  # the Trainer makes its own, with what its arguments say
        self.accelerator.adopt(self._zero_config)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """At stage 3 parameters go to where they rest, when the optimizer is made, and never all to the device."""
        if self._zero_config.stage != 3 and not any(param.is_meta for param in model.parameters()):
            super()._move_model_to_device(model, device)  # type: ignore[misc]

    # ---- training ------------------------------------------------------------------------------------------------------------

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """The optimizer that the Trainer's arguments ask for, or that it was given, wrapped."""
        if not isinstance(unwrapped(self.optimizer), ZeroOptimizer):
            if self.zero is not None:
                self.zero.close()  # of an earlier model: the Trainer has a new one
            self.optimizer = super().create_optimizer(*args, **kwargs)  # type: ignore[misc]
            if not isinstance(self.optimizer, ZeroOptimizer):
                self.optimizer = ZeroOptimizer(self.model, self.optimizer, self.accelerator.zero_here())
        self.zero = unwrapped(self.optimizer)
        self._rates = Rates(self.zero)
        return self.optimizer

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """The Trainer's. Ctrl-C that ends the program prints one line with the checkpoint to resume from, and no traceback."""
        try:
            return super().train(*args, **kwargs)  # type: ignore[misc]
        except KeyboardInterrupt as error:
            if self.zero is not None:
                interrupted.tell(error, self.zero)
            raise

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        samples, count = super().get_batch_samples(*args, **kwargs)  # type: ignore[misc]
        self._samples, self._losses = list(samples), []
        return samples, count

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Any:
        """The Trainer's. In vertical accumulation the first one of a step computes all of them."""
        if self._rates is not None and isinstance(inputs, Mapping) and isinstance(inputs.get("input_ids"), torch.Tensor):
            self._rates.tokens += inputs["input_ids"].numel() * self.args.world_size
        if not self._losses:
            if self.zero is None or not is_vertical(self.zero, self.accumulation, len(self._samples)):
                return super().training_step(model, inputs, num_items_in_batch)  # type: ignore[misc]
            one = super().training_step  # type: ignore[misc]
            samples, self._samples = self._samples, []
            with _without_cache(self.model):
                self._losses = self.zero.accumulate(samples, lambda _, batch: one(model, batch, num_items_in_batch))
        return self._losses.pop(0)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """The Trainer's, and with each line about training the rates since the last one (``zk/step_s``, ``zk/wait_share``, ...)."""
        if self._rates is not None and "loss" in logs:
            logs.update(loggable(self.zero, self._rates))
        super().log(logs, *args, **kwargs)  # type: ignore[misc]

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        pauses = self.control.should_evaluate or self.control.should_save
        super()._maybe_log_save_evaluate(*args, **kwargs)  # type: ignore[misc]
        if pauses and self._rates is not None:
            self._rates.restart()

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """At stage 3 parameters are moved into place first, and all ranks generate for as long as any does, since they gather together."""
        if self._zero_config.stage == 3 and self.zero is None:
            self.create_optimizer()
        if self._is_partitioned and self.args.world_size > 1 and hasattr(self, "_gen_kwargs"):
            self._gen_kwargs.setdefault("synced_gpus", True)
        return super().evaluation_loop(*args, **kwargs)  # type: ignore[misc]

    @property
    def _is_partitioned(self) -> bool:
        return self.zero is not None and not self.zero.closed and self.zero.config.stage == 3

    # ---- saving and going on -------------------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Full weights, as ``from_pretrained`` reads them, written by the first rank. At stage 3 on all ranks."""
        if _internal_call:
            stale = Path(str(output_dir), FOLDER)  # of an earlier run; it would win over these weights
            if self.args.process_index == 0 and stale.exists():
                shutil.rmtree(stale)
            self.accelerator.wait_for_everyone()  # before anybody writes there
        if not self._is_partitioned:
            super().save_model(output_dir, _internal_call)  # type: ignore[misc]
            return
        assert self.zero is not None
        output_dir = self.args.output_dir if output_dir is None else output_dir
        self._export_next = False
        names = self._names_to_save()
        if names is not None or self._fits_in_memory():
            state = self.zero.consolidated_state_dict(rank0_only=True, names=names)
            if self.args.should_save:
                self._save(output_dir, state_dict=state)  # type: ignore[attr-defined]
        else:
            if self.args.should_save:
                self._save(output_dir, state_dict={})  # type: ignore[attr-defined]
            self._export_next = _internal_call and not self.args.save_only_model  # from the checkpoint that comes next
            if not self._export_next:
                passing = Path(output_dir, f"{FOLDER}-weights")
                self.zero.save_checkpoint(passing)
                if self.args.should_save:
                    _export(passing, Path(output_dir))
                    shutil.rmtree(passing)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)  # type: ignore[attr-defined]

    def _names_to_save(self) -> set[str] | None:
        """Of the parameters that PEFT writes: those of every adapter, and what goes with them. None: all, where there are no adapters."""
        if PeftModel is None or not isinstance(self.model, PeftModel):
            return None
        # PEFT chooses by name, so tensors without memory do; it renames what it gives back
        named = {
            name: torch.empty(param.shape, dtype=param.dtype, device="meta") for name, param in self.model.named_parameters(remove_duplicate=False)
        }
        chosen = [get_peft_model_state_dict(self.model, state_dict=dict(named), adapter_name=name) for name in self.model.peft_config]
        kept = {id(tensor) for state in chosen for tensor in state.values()}
        found = {name for name, tensor in named.items() if id(tensor) in kept}
        return found if len(kept) == len(found) else None  # a tuner that computes what it writes gets all

    def _fits_in_memory(self) -> bool:
        """True if the first rank can put the model together, and write it as transformers does: in copies of a file each."""
        return bool(broadcast_object_list([2 * sum(param.numel() * param.element_size() for param in self.model.parameters()) < host_memory()[1]])[0])

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        assert self.zero is not None
        is_adapter = self._names_to_save() is not None  # whose base stays as it is, where it came from
        self.zero.save_checkpoint(Path(output_dir, FOLDER), frozen=not is_adapter)
        self.zero.resume_from = Path(output_dir)
        if self.args.should_save:
            if self._export_next:
                _export(Path(output_dir, FOLDER), Path(output_dir))
            with warnings.catch_warnings(action="ignore", category=UserWarning):  # torch's, to save the optimizer as well
                torch.save(self.lr_scheduler.state_dict(), Path(output_dir, SCHEDULER))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Weights come with the optimizer's state, exactly, unless the plain Trainer wrote the checkpoint."""
        folder = Path(resume_from_checkpoint)
        if (folder / FOLDER).is_dir():
            if (folder / OPTIMIZER).is_file():
                raise ValueError(
                    f"{folder} has {FOLDER}/, of a ZeroTrainer, and {OPTIMIZER}, of the plain Trainer, which wrote to the same folder; remove the "
                    "one that is not meant"
                )
        elif any(param.is_meta for param in self.model.parameters()):
            load_pretrained(self.model, folder)
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, *([model] if model is not None else []))  # type: ignore[misc]

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not Path(checkpoint, FOLDER).is_dir():
            if checkpoint is not None and not Path(checkpoint, OPTIMIZER).is_file():
                log.warning("%s has weights only (save_only_model=True?): the optimizer and its schedule begin anew", checkpoint)
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
            return
        assert self.zero is not None
        self.zero.load_checkpoint(Path(checkpoint, FOLDER))
        self.zero.resume_from = Path(checkpoint)
        with warnings.catch_warnings(action="ignore", category=UserWarning):
            self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint, SCHEDULER), weights_only=True))


@contextlib.contextmanager
def _without_cache(model: nn.Module) -> Iterator[None]:
    """Context: blocks fill no cache, twice as they are computed again. The Trainer says so to the model's configuration, and not to its parts'."""
    found: list[Any] = [getattr(module, "config", None) for module in model.modules()]
    configs = {id(config): config for config in found if getattr(config, "use_cache", False)}
    for config in configs.values():
        config.use_cache = False
    try:
        yield
    finally:
        for config in configs.values():
            config.use_cache = True


def _export(checkpoint: Path, output_dir: Path) -> None:
    """The model's weights from a checkpoint of ours, piece by piece, to where ``save_pretrained`` has left all but these."""
    passing = output_dir / f"{FOLDER}-export"
    files = export(checkpoint, passing).files
    for empty in output_dir.glob("*.safetensors"):
        empty.unlink()
    for file in (*files, *passing.glob("*.index.json")):
        file.rename(output_dir / file.name)
    shutil.rmtree(passing)


class ZeroTrainer(ZeroTrainerMixin, Trainer):
    """``transformers.Trainer`` over ZeroOptimizer; ``zero=`` takes its options."""


class ZeroSeq2SeqTrainer(ZeroTrainerMixin, Seq2SeqTrainer):
    """``transformers.Seq2SeqTrainer`` over ZeroOptimizer; ``zero=`` takes its options."""


class ZeroAdamW:
    """AdamW with ZeroOptimizer around it, for the plain Trainer in one process.

    ``Trainer(..., optimizer_cls_and_kwargs=(ZeroAdamW, {"lr": 1e-4, "optimizer_tier": "host"}))``: the Trainer makes one and calls it with
    the model and the options, which are AdamW's and ZeroConfig's by name. As in the Trainer, biases and norms do not decay.

    For several ranks, fp16, and models larger than memory take ZeroTrainer. Needs a Trainer that takes factories: 5.17 does, 5.0 does not.
    """

    def __init__(self, *given: Any, **options: Any) -> None:
        if given or options:
            raise TypeError("this Trainer takes optimizer classes only, which are not given the model; use ZeroTrainer, or a newer transformers")

    def __call__(self, model: nn.Module, **options: Any) -> ZeroOptimizer:
        if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
            raise ValueError("the plain Trainer would put DistributedDataParallel around the model; for several ranks take ZeroTrainer, from here")
        fields = {field.name for field in dataclasses.fields(ZeroConfig)}
        config = ZeroConfig(**{name: value for name, value in options.items() if name in fields})
        decay = options.get("weight_decay", 0.0)
        decaying = set(Trainer.get_decay_parameter_names(None, model))
        trained = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
        groups = [
            {"params": [param for name, param in trained if name in decaying], "weight_decay": decay},
            {"params": [param for name, param in trained if name not in decaying], "weight_decay": 0.0},
        ]
        inner = torch.optim.AdamW(groups, **{name: value for name, value in options.items() if name not in fields | {"weight_decay"}})
        return ZeroOptimizer(model, inner, config)
