"""ZeroTrainer: the Trainer of transformers over ZeroOptimizer, at any stage and tier."""

from __future__ import annotations

import dataclasses
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from accelerate.utils import broadcast_object_list
from torch import nn

from zk.integrations.accelerate import FOLDER, ZeroAccelerator, unwrapped
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
REFUSED = {  # TrainingArguments -> what to do instead
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

    Checkpoints hold full weights, and the optimizer in ``zk``; logs hold rates under ``zk/``.
    All ranks call ``save_model``, ``evaluate``, ``predict``.
    """

    zero: Any = None  # the ZeroOptimizer, once there is one
    optimizer: Any
    _rates: Rates | None = None
    _resume_from: Path | None = None  # the newest checkpoint
    _whole: dict[str, Any] | None = None  # weights that are being saved

    def __init__(self, *args: Any, zero: Any = None, **kwargs: Any):
        self._zero_given = zero
        super().__init__(*args, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        said, given = getattr(self.args, "zero", None), self._zero_given
        both = "ZeroTrainingArguments(deepspeed=) and zero= are both given; keep one"
        require(None in (said, given), both)
        for name, remedy in REFUSED.items():
            is_free = not getattr(self.args, name, False)
            require(is_free, f"TrainingArguments({name}=True) is not for zk; {remedy}")
        gpus = self.args.n_gpu
        require(gpus < 2, f"one process sees {gpus} GPUs; use torchrun --nproc_per_node {gpus}")
        self.accelerator.__class__ = ZeroAccelerator  # which the Trainer made from its arguments
        # the Trainer clips, not by DeepSpeed's JSON
        self.accelerator.adopt(said or given, clip_grad_norm=None)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """At stage 3 the optimizer moves parameters to their tier, and never all to the device."""
        if self.accelerator.zero.stage != 3 and not any(
            param.is_meta for param in model.parameters()
        ):
            super()._move_model_to_device(model, device)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(unwrapped(self.optimizer), ZeroOptimizer):
            if self.zero is not None:
                self.zero.close()  # of an earlier model: the Trainer has a new one
            inner = super().create_optimizer(*args, **kwargs)
            self.optimizer = ZeroOptimizer(self.model, inner, self.accelerator.zero)
        self.zero = unwrapped(self.optimizer)
        self._rates = Rates(self.zero)
        return self.optimizer

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """The Trainer's. Ctrl-C ends the program with one line: the checkpoint to resume from."""
        try:
            return super().train(*args, **kwargs)
        except KeyboardInterrupt as error:
            if self.zero is not None:
                tell(error, self.zero, self._resume_from)
            raise

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """The Trainer's; a line about training holds the rates since the last one."""
        if self._rates and "loss" in logs:
            logs.update(loggable(self.zero, self._rates))
        super().log(logs, *args, **kwargs)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        pauses = self.control.should_evaluate or self.control.should_save
        super()._maybe_log_save_evaluate(*args, **kwargs)
        if pauses and self._rates:
            self._rates.restart()

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        if (
            self.accelerator.zero.stage == 3 and self.zero is None
        ):  # it moves parameters to their tier
            self.create_optimizer()
        return super().evaluation_loop(*args, **kwargs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write full weights for ``from_pretrained`` on the first rank; all ranks call it."""
        folder, zero = Path(output_dir or self.args.output_dir), self.zero
        if _internal_call:
            if self.args.process_index == 0:  # of an earlier run; it would win over these weights
                shutil.rmtree(folder / FOLDER, ignore_errors=True)
            self.accelerator.wait_for_everyone()  # before anybody writes there
        if zero is not None and zero._runtime.stores and zero.config.stage == 3:
            names = self._names_to_save()
            nbytes = 2 * sum(param.nbytes for param in self.model.parameters())  # and in files
            fits = broadcast_object_list([nbytes < host_memory()[1]])[0]
            if names is None and not fits:
                place = folder / FOLDER
                log.warning("no room for all weights: 'zk export %s OUT' writes them", place)
                if not _internal_call or self.args.save_only_model:
                    zero.save_checkpoint(place)
                return
            self._whole = zero.consolidated_state_dict(rank0_only=True, names=names)
        super().save_model(output_dir, _internal_call)
        self._whole = None

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        super()._save(output_dir, state_dict or self._whole)

    def _names_to_save(self) -> set[str] | None:
        """The parameters of adapters, as PEFT chooses them by name; None: all, without adapters."""
        if PeftModel is None or not isinstance(self.model, PeftModel):
            return None
        params = self.model.named_parameters(remove_duplicate=False)
        named = {name: torch.empty_like(param, device="meta") for name, param in params}
        kept = set[int]()
        for adapter in self.model.peft_config:
            state = get_peft_model_state_dict(self.model, dict(named), adapter_name=adapter)
            kept.update(map(id, state.values()))
        found = {name for name, tensor in named.items() if id(tensor) in kept}
        return found if len(kept) == len(found) else None  # a tuner that computes what it writes

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        self._resume_from = Path(output_dir)
        self.zero.save_checkpoint(self._resume_from / FOLDER)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), self._resume_from / SCHEDULER)

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
        if checkpoint is None:
            return
        folder = Path(checkpoint)
        if (folder / FOLDER).is_dir():
            self.zero.load_checkpoint(folder / FOLDER)
            self._resume_from = folder
            self.lr_scheduler.load_state_dict(torch.load(folder / SCHEDULER, weights_only=True))
        elif (folder / OPTIMIZER).is_file():
            super()._load_optimizer_and_scheduler(checkpoint)
        else:
            log.warning("%s has weights only: optimizer and schedule begin anew", folder)


class ZeroTrainer(ZeroTrainerMixin, tf.Trainer):
    """``transformers.Trainer`` over ZeroOptimizer; ``zero=`` takes its options."""


class ZeroSeq2SeqTrainer(ZeroTrainerMixin, tf.Seq2SeqTrainer):
    """``transformers.Seq2SeqTrainer`` over ZeroOptimizer; ``zero=`` takes its options."""


def tell(error: BaseException, optimizer: ZeroOptimizer, resume_from: Any = None) -> None:
    """After Ctrl-C, print where to resume instead of the traceback of ``error``, if it ends the program."""
    before, steps = sys.excepthook, optimizer.num_steps + optimizer.skipped_steps
    where = f"resume from {resume_from}" if resume_from else "there is no checkpoint to resume from"

    def hook(kind: Any, raised: BaseException, trace: Any) -> None:
        if raised is not error:
            before(kind, raised, trace)
        elif optimizer._layout.comm.rank == 0:
            print(f"\nzk: stopped after step {steps}; {where}", file=sys.stderr)

    sys.excepthook = hook
