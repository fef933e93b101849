"""ZeroTrainer: the Trainer of transformers over ZeroOptimizer, at any stage and tier."""

from __future__ import annotations

import dataclasses
import functools
import shutil
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from accelerate.utils import broadcast_object_list
from torch import nn

from zk.checkpoint import interrupted
from zk.checkpoint.export import export
from zk.integrations.accelerate import FOLDER, ZeroAccelerator, config_of, unwrapped
from zk.logs import log, require
from zk.memory import host_memory
from zk.nn.pretrained import load_pretrained
from zk.optimizer import ZeroOptimizer
from zk.tools.metrics import Rates, loggable

try:
    from peft import PeftModel, get_peft_model_state_dict
except ImportError:
    PeftModel = None

SCHEDULER, OPTIMIZER = "scheduler.pt", "optimizer.pt"  # the Trainer's names
ON_CONSOLE = ("zk/step_s", "zk/tokens_per_s", "zk/wait_share")
REFUSED = {  # TrainingArguments -> what to do instead
    "deepspeed": "give the file as zero=, or use ZeroTrainingArguments, which read it",
    "fsdp": "remove it: stage=3 does what it does",
    "torch_compile": "compile the blocks of the model instead (block.compile())",
    **dict.fromkeys(("bf16_full_eval", "fp16_full_eval"), "remove it: parameters are that already"),
}


@dataclasses.dataclass
class ZeroTrainingArguments(tf.TrainingArguments):
    """TrainingArguments for scripts with ``--deepspeed ds.json``, which a ZeroTrainer reads."""

    def __post_init__(self) -> None:
        self.zero, self.deepspeed = self.deepspeed, None  # type: ignore[has-type]
        super().__post_init__()


class ZeroTrainerMixin:
    """Lets a Trainer train with ZeroOptimizer: ``class ZSFT(ZeroTrainerMixin, SFTTrainer)``.

    Args:
        zero: a ZeroConfig, its fields as a dict, or DeepSpeed's JSON as a path or a dict, whose
            "auto" is the value of ``TrainingArguments``; None: all defaults. Without ``dtype``,
            ``bf16=True`` means bf16 parameters with fp32 masters, ``fp16=True`` fp16 ones with
            zk's loss scale. ``dtype="fp32"`` with ``bf16=True`` means the Trainer's autocast.
        args, kwargs: the Trainer's.

    Checkpoints hold full weights, and the optimizer in ``zk``; logs hold rates under ``zk/``, or
    all metrics with ``ZK_METRICS=all``. All ranks call ``save_model``, ``evaluate``, ``predict``.
    """

    zero: Any = None  # the ZeroOptimizer, once there is one
    optimizer: Any
    _rates: Rates | None = None  # since the first step of a run
    _resume_from: Path | None = None  # the newest checkpoint
    _state_is_saved = False  # in the checkpoint that is being written

    def __init__(self, *args: Any, zero: Any = None, **kwargs: Any) -> None:
        arguments = kwargs.get("args", args[1] if len(args) > 1 else None)
        said = getattr(arguments, "zero", None)
        both = "ZeroTrainingArguments(deepspeed=) and zero= are both given; keep one"
        require(said is None or zero is None, both)
        auto = {f"{name}.enabled": getattr(arguments, name, False) for name in ("bf16", "fp16")}
        given = next((given for given in (said, zero) if given is not None), None)
        self._zero_config = config_of(given, auto, clip_grad_norm=None)  # the Trainer clips
        super().__init__(*args, **kwargs)
        for name, remedy in REFUSED.items():
            value = getattr(self.args, name, None)
            require(not value, f"TrainingArguments({name}={value!r}) is not for zk; {remedy}")
        clipped, norm = self._zero_config.clip_grad_norm, self.args.max_grad_norm
        require(
            not norm or clipped is None,
            f"clip_grad_norm={clipped} has no effect: the Trainer clips by max_grad_norm={norm} of "
            "its TrainingArguments; set that, and leave this out",
        )
        gpus = self.args.n_gpu
        require(gpus < 2, f"one process sees {gpus} GPUs; use torchrun --nproc_per_node {gpus}")
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, (tf.PrinterCallback, tf.ProgressCallback)):
                callback.on_log = functools.partial(_short, callback.on_log)

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.accelerator.__class__ = ZeroAccelerator  # which the Trainer made from its arguments
        self.accelerator.adopt(self._zero_config)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """At stage 3 the optimizer moves parameters to their tier, and never all to the device."""
        if self._zero_config.stage != 3 and not any(param.is_meta for param in model.parameters()):
            super()._move_model_to_device(model, device)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(unwrapped(self.optimizer), ZeroOptimizer):
            if self.zero is not None:
                self.zero.close()  # of an earlier model: the Trainer has a new one
            inner = super().create_optimizer(*args, **kwargs)
            self.optimizer = ZeroOptimizer(self.model, inner, self.accelerator.zero_here())
        self.zero, self._rates = unwrapped(self.optimizer), None
        return self.optimizer

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """The Trainer's. Ctrl-C ends the program with one line: the checkpoint to resume from."""
        try:
            return super().train(*args, **kwargs)
        except KeyboardInterrupt as error:
            if self.zero is not None:
                interrupted.tell(error, self.zero, self._resume_from)
            raise

    def training_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if self._rates is None:  # loading, and skipping batches, is not training
            self._rates = Rates(self.zero)
        if isinstance(inputs, Mapping) and isinstance(inputs.get("input_ids"), torch.Tensor):
            self._rates.tokens += inputs["input_ids"].numel() * self.args.world_size
        return super().training_step(model, inputs, *args, **kwargs)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """The Trainer's; a line about training holds the rates since the last one."""
        if self._rates is not None and "loss" in logs:
            logs.update(loggable(self.zero, self._rates))
        super().log(logs, *args, **kwargs)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        pauses = self.control.should_evaluate or self.control.should_save
        super()._maybe_log_save_evaluate(*args, **kwargs)
        if pauses and self._rates is not None:
            self._rates.restart()

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        if self._zero_config.stage == 3 and self.zero is None:  # it moves parameters to their tier
            self.create_optimizer()
        return super().evaluation_loop(*args, **kwargs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write full weights for ``from_pretrained`` on the first rank; all ranks call it."""
        folder = Path(self.args.output_dir if output_dir is None else output_dir)
        if _internal_call:
            if self.args.process_index == 0 and (folder / FOLDER).exists():
                shutil.rmtree(folder / FOLDER)  # of an earlier run; it would win over these weights
            self.accelerator.wait_for_everyone()  # before anybody writes there
        zero, self._state_is_saved = self.zero, False
        if zero is None or not zero._runtime.stores or zero.config.stage != 3:
            super().save_model(output_dir, _internal_call)
            return
        names = self._names_to_save()
        nbytes = 2 * sum(param.nbytes for param in self.model.parameters())  # whole, and in files
        fits = bool(broadcast_object_list([nbytes < host_memory()[1]])[0])
        in_memory = names is not None or fits
        state = zero.consolidated_state_dict(rank0_only=True, names=names) if in_memory else {}
        if self.args.should_save:
            self._save(str(folder), state_dict=state)
        if not in_memory:
            self._state_is_saved = _internal_call and not self.args.save_only_model
            place = folder / (FOLDER if self._state_is_saved else f"{FOLDER}-weights")
            zero.save_checkpoint(place)
            if self.args.should_save:
                _export(place, folder)
                if not self._state_is_saved:
                    shutil.rmtree(place)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _names_to_save(self) -> set[str] | None:
        """The parameters of adapters, as PEFT chooses them by name; None: all, without adapters."""
        if PeftModel is None or not isinstance(self.model, PeftModel):
            return None
        params = self.model.named_parameters(remove_duplicate=False)
        named = {n: torch.empty(p.shape, dtype=p.dtype, device="meta") for n, p in params}
        kept = set[int]()
        for adapter in self.model.peft_config:
            state = get_peft_model_state_dict(self.model, dict(named), adapter_name=adapter)
            kept.update(map(id, state.values()))
        found = {name for name, tensor in named.items() if id(tensor) in kept}
        return found if len(kept) == len(found) else None  # a tuner that computes what it writes

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        folder = Path(output_dir)
        if not self._state_is_saved:
            self.zero.save_checkpoint(folder / FOLDER)
        self._resume_from = folder
        if self.args.should_save:
            with warnings.catch_warnings(action="ignore", category=UserWarning):  # on the optimizer
                torch.save(self.lr_scheduler.state_dict(), folder / SCHEDULER)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, *model: nn.Module) -> None:
        """Weights come with the optimizer's state, unless the plain Trainer wrote them."""
        folder = Path(resume_from_checkpoint)
        if (folder / FOLDER).is_dir():
            both = f"{FOLDER}/, of a ZeroTrainer, and {OPTIMIZER}, of the plain Trainer"
            rule = f"{folder} has {both}; remove the one that is not meant"
            require(not (folder / OPTIMIZER).is_file(), rule)
        elif any(param.is_meta for param in self.model.parameters()):
            load_pretrained(self.model, folder)
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, *model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        folder = None if checkpoint is None else Path(checkpoint)
        if folder is None or not (folder / FOLDER).is_dir():
            if folder is not None and not (folder / OPTIMIZER).is_file():
                log.warning("%s has weights only: optimizer and schedule begin anew", folder)
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        self.zero.load_checkpoint(folder / FOLDER)
        self._resume_from = folder
        state = torch.load(folder / SCHEDULER, weights_only=True)
        with warnings.catch_warnings(action="ignore", category=UserWarning):
            self.lr_scheduler.load_state_dict(state)


def _short(on_log: Callable[..., Any], *args: Any, logs: dict[str, Any], **kwargs: Any) -> Any:
    """``on_log`` of a callback that prints: it gets time, tokens, and waits from 0.5% on."""
    hidden = {name for name in logs if name.startswith("zk/") and name not in ON_CONSOLE}
    if logs.get("zk/wait_share", 0) < 0.005:
        hidden.add("zk/wait_share")
    return on_log(*args, logs={name: logs[name] for name in logs if name not in hidden}, **kwargs)


def _export(checkpoint: Path, output_dir: Path) -> None:
    """Write a checkpoint's weights piece by piece, in place of those of ``save_pretrained``."""
    passing = output_dir / f"{FOLDER}-export"
    files = export(checkpoint, passing).files
    for empty in output_dir.glob("*.safetensors"):
        empty.unlink()
    for file in (*files, *passing.glob("*.index.json")):
        file.rename(output_dir / file.name)
    shutil.rmtree(passing)


class ZeroTrainer(ZeroTrainerMixin, tf.Trainer):
    """``transformers.Trainer`` over ZeroOptimizer; ``zero=`` takes its options."""


class ZeroSeq2SeqTrainer(ZeroTrainerMixin, tf.Seq2SeqTrainer):
    """``transformers.Seq2SeqTrainer`` over ZeroOptimizer; ``zero=`` takes its options."""
