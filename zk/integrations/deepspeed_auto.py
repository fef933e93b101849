"""DeepSpeed's JSON under the Trainer and accelerate: "auto" is what their own arguments say, and what contradicts these is refused."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from typing import Any

from zk.config import ZeroConfig
from zk.core.logs import log
from zk.integrations.deepspeed_config import LOOP_KEYS, MONITORS, Config, Settings, zero_config

# DeepSpeed's schedulers -> the Trainer's
_SCHEDULES = {"WarmupLR": "constant_with_warmup", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
_ENABLED, _TAKEN = "ACCELERATE_USE_DEEPSPEED", "ZK_ACCELERATE_USE_DEEPSPEED"


def is_deepspeed(zero: Any) -> bool:
    """Tell DeepSpeed's JSON (a path, or a dict with its sections) from a ZeroConfig and its fields."""
    return isinstance(zero, (str, os.PathLike)) or (isinstance(zero, Mapping) and "zero_optimization" in zero)


def for_trainer(config: Config, args: Any) -> ZeroConfig:
    """The ZeroConfig of DeepSpeed's JSON for a Trainer with these TrainingArguments.

    "auto" is taken from them, as transformers does. ValueError if a value is another one than theirs, by which the Trainer trains: batch sizes,
    learning rate, betas, eps, weight decay, clipping, precision, the kind of schedule.
    """
    accumulation, micro = args.gradient_accumulation_steps, args.per_device_train_batch_size
    expected = {
        "bf16.enabled": (args.bf16, "bf16"),
        "fp16.enabled": (args.fp16, "fp16"),
        "gradient_clipping": (args.max_grad_norm, "max_grad_norm"),
        "gradient_accumulation_steps": (accumulation, "gradient_accumulation_steps"),
        "train_micro_batch_size_per_gpu": (micro, "per_device_train_batch_size"),
        "train_batch_size": (micro * accumulation * args.world_size, "per_device_train_batch_size, times accumulation and ranks,"),
        "optimizer.params.lr": (args.learning_rate, "learning_rate"),
        "optimizer.params.betas": ([args.adam_beta1, args.adam_beta2], "adam_beta1 and adam_beta2"),
        "optimizer.params.eps": (args.adam_epsilon, "adam_epsilon"),
        "optimizer.params.weight_decay": (args.weight_decay, "weight_decay"),
    }
    kind = getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)
    unused = dict.fromkeys(LOOP_KEYS - MONITORS, "TrainingArguments say the same")
    unused |= dict.fromkeys(MONITORS, "report_to= and logging_steps= of TrainingArguments")
    unused["scheduler"] = f"the Trainer's own, lr_scheduler_type={kind!r}, whose warmup is linear"
    settings = Settings(config, {name: value for name, (value, _) in expected.items()}, unused)
    for name, (value, argument) in expected.items():
        found = settings.values.get(name, "auto")
        if found != "auto" and (list(found) if isinstance(found, (list, tuple)) else found) != value:
            raise ValueError(
                f'{settings.source}: {name!r} is {found!r}, and {argument} of TrainingArguments {value!r}; make them the same, or write "auto"'
            )
    optimizer, schedule = settings.values.get("optimizer.type", "AdamW"), settings.values.get("scheduler.type")
    if str(optimizer).lower() not in ("adam", "adamw"):
        raise ValueError(f"{settings.source}: 'optimizer.type' is {optimizer!r}, and the Trainer makes its own: use optim=, and remove it")
    if schedule is not None and _SCHEDULES.get(schedule) != kind:
        meant = f"lr_scheduler_type={_SCHEDULES[schedule]!r}" if schedule in _SCHEDULES else "one of the Trainer's own, by lr_scheduler_type="
        raise ValueError(f"{settings.source}: 'scheduler.type' is {schedule!r}, and lr_scheduler_type {kind!r}; write {meant}, or remove the section")
    return zero_config(ZeroConfig, settings, {"clip_grad_norm": None})  # by which the Trainer clips


def for_accelerate(config: Config, options: MutableMapping[str, Any]) -> ZeroConfig:
    """The ZeroConfig of DeepSpeed's JSON for accelerate. ``options``, of its Accelerator, get the number of micro batches that it says."""
    precision = options.get("mixed_precision") or os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    auto = {"bf16.enabled": precision == "bf16", "fp16.enabled": precision == "fp16", "gradient_clipping": 0.0}
    unused = dict.fromkeys(LOOP_KEYS - {"gradient_accumulation_steps"}, "what is given to prepare() decides")
    unused |= dict.fromkeys(MONITORS, "log_with= of the Accelerator")
    settings = Settings(config, auto, unused)
    settings.values.setdefault("gradient_clipping", 0.0)  # clip_grad_norm_ of the loop does it
    if settings.has("gradient_accumulation_steps"):
        count = settings.count("gradient_accumulation_steps")
        os.environ.pop("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", None)  # the launcher's own, which accelerate prefers: the file has one
        if options.setdefault("gradient_accumulation_steps", count) != count:
            raise ValueError(
                f"{settings.source}: 'gradient_accumulation_steps' is {count}, and the Accelerator was given "
                f"{options['gradient_accumulation_steps']}; give it once"
            )
    return zero_config(ZeroConfig, settings, {})


def of_launcher(options: MutableMapping[str, Any], is_given: bool) -> ZeroConfig | None:
    """The ZeroConfig of what ``accelerate launch`` says of DeepSpeed, or of ``deepspeed_plugin=``; None without either, or where ``is_given``.

    Both are taken away from accelerate, which would look for DeepSpeed; a second Accelerator hears of the launcher, too.
    """
    plugin, environ = options.pop("deepspeed_plugin", None), os.environ
    if _ENABLED in environ:
        environ[_TAKEN] = environ.pop(_ENABLED).lower()
    if plugin is None and environ.get(_TAKEN) != "true":
        return None
    if is_given:
        log.warning("DeepSpeed's settings of accelerate are not used, as zero= is given")
        return None
    if plugin is not None:
        return for_accelerate(plugin.deepspeed_config, options)

    def said(name: str) -> str | None:
        value = environ.get(f"ACCELERATE_{name}", "none")
        return None if value.lower() == "none" else value

    if (file := said("DEEPSPEED_CONFIG_FILE")) is not None:
        return for_accelerate(file, options)
    zero: dict[str, Any] = {"stage": int(said("DEEPSPEED_ZERO_STAGE") or 2)}
    for section in ("offload_optimizer", "offload_param"):
        if (device := said(f"DEEPSPEED_{section.upper()}_DEVICE")) is not None:
            zero[section] = {"device": device, "nvme_path": said(f"DEEPSPEED_{section.upper()}_NVME_PATH")}
    return for_accelerate({"zero_optimization": zero, "gradient_clipping": float(said("GRADIENT_CLIPPING") or 0)}, options)
