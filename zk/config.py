"""ZeroConfig: frozen options, each checked on construction. No I/O, no process groups."""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

from zk import options as read
from zk.addon import METHODS, OPTIONS, Addon, found
from zk.precision import DynamicLossScale

PARSERS: dict[str, Callable[[Any, str], Any]] = {
    "param_tier": read.parse_tier,
    "optimizer_tier": read.parse_tier,
    "loss_scale": lambda value, _: DynamicLossScale() if value == "dynamic" else value,
    "dtype": read.parse_dtype,
    "device": read.parse_device,
    "device_budget": read.parse_nbytes,
    "host_budget": read.parse_nbytes,
    "units": read.parse_modules,
    "keep_dtype": read.parse_modules,
    "nvme_path": read.parse_paths,
}
RULES: dict[str, tuple[type[Exception], Callable[[Any], object], str]] = {
    "stage": (ValueError, lambda v: read.is_count(v, 0) and v < 4, "0, 1, 2 or 3"),
    "clip_grad_norm": (
        ValueError,
        lambda v: v is None or read.is_positive(v),
        "more than 0, or None",
    ),
    "loss_scale": (
        ValueError,
        lambda v: v in (None, "auto") or isinstance(v, DynamicLossScale) or read.is_finite(v),
        "'auto', 'dynamic', a DynamicLossScale, None or a finite number above 0",
    ),
    "prefetch": (ValueError, lambda v: read.is_count(v, 0), "a number of units, 0 or more"),
    "num_threads": (ValueError, lambda v: v is None or read.is_count(v), "1 or more, or None"),
    "process_group": (
        TypeError,
        lambda v: v is None or isinstance(v, ProcessGroup),
        "a ProcessGroup that this rank is a member of (of a DeviceMesh: mesh.get_group()), or None",
    ),
    "addons": (
        TypeError,
        lambda v: isinstance(v, (list, tuple)) and all(isinstance(one, Addon) for one in v),
        "a list of zk.Addon objects",
    ),
}
SIZES = (30, "GiB"), (20, "MiB"), (10, "KiB")
GONE = {  # options of 0.1.0, and what to use instead
    "cast_buffers": "cast the model's buffers yourself: buffer.data = buffer.to(torch.bfloat16)",
    "check_memory": "what cannot fit is always refused; freeze parameters that get no gradient",
    "compute_dtype": "use dtype='fp32'",
    "delay_update": "use overlap_step=True, which hides the update and changes no numbers",
    "elementwise": "use an optimizer of torch.optim, such as AdamW",
    "exact_reduce": "gradients are always summed in fp32, in the order of ranks; remove it",
    "grad_accum_dtype": "gradients are always summed in fp32; remove it",
    "keep_gradients": "gradients are always kept until step(); remove it",
    "long_context": "use Liger's patches of the model, and zk.offload_activations",
    "model_parallel_group": "give each rank all of the model",
    "nvme_checksum": "what is on the drive is always checked; remove it",
    "overlap": "copies and collectives always run beside computing; remove it",
    "parameterwise": "use an optimizer of torch.optim, such as AdamW",
    "replicated_params": "give each rank all of the model",
    "sequence_tiles": "use the sequence parallelism of your framework, and zk.offload_activations",
    "update_on": "use optimizer_tier='auto' and device_budget=: the device updates what it has",
}


@dataclasses.dataclass(frozen=True, init=False)
class ZeroConfig:
    """Options of a ZeroOptimizer. Every field is checked on construction.

    An option that is no field here belongs to an add-on, which its name makes.

    Raises:
        ValueError: for a value that has no meaning, with the remedy.
        TypeError: for a value of another type, and for an unknown option.
    """

    stage: int = 2
    """0: nothing is partitioned; 1: optimizer states; 2: gradients too; 3: parameters too."""
    dtype: str | torch.dtype | None = None
    """Parameters are cast to "bf16", "fp16" or "fp32", and so are inputs of the model's own call;
    None: they keep their own. Buffers keep theirs, and so do the parameters of BatchNorm, and what
    the model names in ``_keep_in_fp32_modules``."""
    keep_dtype: Sequence[str | type[nn.Module]] | None = None
    """What keeps its dtype: module classes; names of modules and parameters, or parts of names."""
    device: str | torch.device | None = None
    """The device that computes, for a model that is in host memory: it moves there unit by unit.
    None: where parameters are."""
    param_tier: str = "device"
    """Where parameters rest between uses at stage 3: "device", "host", "nvme" or "auto"."""
    optimizer_tier: str = "device"
    """Where gradients and optimizer states rest, and are updated."""
    nvme_path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None
    """The folder of the "nvme" tier, or several to stripe over. What is put there is private, and
    gone in the end."""
    device_budget: int | str | None = None
    """Bytes ("24GiB") of device memory for training state on a rank; "auto" fills it first. None:
    with "auto" half of what is free on a GPU, otherwise no limit."""
    host_budget: int | str | None = None
    """Bytes ("24GiB") of host memory for training state on a rank; with "nvme", whole
    units that fit stay there, parameters first. None: with "auto" nine tenths of this rank's share of
    what is free; with "nvme", none do; otherwise no limit."""
    clip_grad_norm: float | None = None
    """The largest 2-norm of all gradients: larger ones are scaled down in the update."""
    loss_scale: str | float | DynamicLossScale | None = "auto"
    """A number, "dynamic", DynamicLossScale(...), None, or "auto": dynamic for fp16, else none."""
    prefetch: int = 1
    """How many units are gathered ahead of the one in use, at stage 3."""
    num_threads: int | None = None
    """Threads of the CPU update; None: cores divided by ranks on this machine."""
    process_group: ProcessGroup | None = None
    """The ranks that train together; None: the default group, or one process without one."""
    units: Sequence[str | type[nn.Module]] | None = None
    """Modules that travel as one unit, by name or class; None: entries of ModuleLists."""
    addons: Sequence[Addon] = ()
    """Add-ons of your own (docs/guides/addons.md)."""
    options: dict[str, Any] = dataclasses.field(default_factory=dict, hash=False)
    """Options of registered add-ons; give them by name, as any other."""

    def __init__(self, **given: Any) -> None:
        given = {**given.pop("options", {}), **given}
        fields = {field.name: field.default for field in dataclasses.fields(self)}
        refuse_unknown(given.keys() - fields.keys() - OPTIONS.keys(), [*fields, *OPTIONS])
        fields["options"] = {name: value for name, value in given.items() if name in OPTIONS}
        for name, default in fields.items():
            value = given.get(name, default)
            if name in PARSERS and (value is not None or name.endswith("_tier")):
                value = PARSERS[name](value, name)
            object.__setattr__(self, name, value)
        for name, (error, holds, words) in RULES.items():
            value = getattr(self, name)
            read.require(holds(value), f"{name} must be {words}; got {value!r}", error)
        self._check_together()

    @classmethod
    def from_deepspeed(
        cls, config: Any, *, auto: Mapping[str, Any] | None = None, **overrides: Any
    ) -> ZeroConfig:
        """The config of DeepSpeed's JSON, a path or a dict; ``overrides`` are fields of this class.

        Args:
            auto: values by the JSON's names, for what it leaves to be filled in ("auto").
        """
        made: ZeroConfig = found("from_deepspeed", METHODS, TypeError)(config, auto or {}, overrides)
        return made

    def _check_together(self) -> None:
        """ValueError for values that exclude each other."""
        stage, param_tier = self.stage, self.param_tier
        tiers = param_tier, self.optimizer_tier
        for is_wrong, message in (
            (
                stage < 3 and param_tier in ("host", "nvme"),
                f"param_tier={param_tier!r} needs stage=3: at stage {stage} parameters stay on the "
                "device; use stage=3 or param_tier='device'",
            ),
            (
                "nvme" in tiers and not self.nvme_path,
                "a tier is 'nvme' and nvme_path is not set; give nvme_path=, folders on the drive",
            ),
            (
                bool(self.nvme_path) and not {"nvme", "auto"} & {*tiers},
                "nvme_path has no effect while no tier is 'nvme' or 'auto'; choose one, or remove it",
            ),
            (
                self.host_budget is not None and {*tiers} == {"device"},
                "host_budget has no effect while all tiers are 'device'; choose another, or remove it",
            ),
            (
                tiers == ("nvme", "device"),
                "param_tier='nvme' needs optimizer_tier='host', 'nvme' or 'auto': its parameters are "
                "updated in host memory",
            ),
            (
                self.keep_dtype is not None and self.dtype is None,
                "keep_dtype has no effect without dtype=, as nothing is cast; give dtype= or remove it",
            ),
        ):
            read.require(not is_wrong, message)


def refuse_unknown(names: set[str], known: list[str]) -> None:
    """TypeError for the first of ``names``, with what to use instead or the closest one."""
    for name in sorted(names):
        close = difflib.get_close_matches(name, known, 1, 0.5)
        hint = f"the closest one is {close[0]!r}" if close else f"there are {', '.join(known)}"
        hint = f"zk 0.1.0 had it: {GONE[name]}" if name in GONE else hint
        raise TypeError(f"ZeroOptimizer and ZeroConfig have no option {name!r}; {hint}")


def size(nbytes: int) -> int | str:
    whole = (f"{nbytes >> n}{unit}" for n, unit in SIZES if not nbytes % (1 << n))
    return next(whole, nbytes)


WRITERS: dict[str, Callable[[Any], Any]] = {  # for values that are not None
    "device_budget": size,
    "host_budget": size,
    "nvme_path": lambda paths: [*paths] if len(paths) > 1 else paths[0],
    "device": str,
    "dtype": read.NAMES.get,
}
UNWRITTEN = "process_group", "units", "keep_dtype", "addons", "options"


def changes(config: ZeroConfig, before: ZeroConfig) -> dict[str, Any]:
    """The options of ``config`` that differ, as they may be written in Python or JSON."""
    known = before.options.items()
    found = {name: value for name, value in config.options.items() if (name, value) not in known}
    for name in [f.name for f in dataclasses.fields(config) if f.name not in UNWRITTEN]:
        value = getattr(config, name)
        if value != getattr(before, name):
            found[name] = value if value is None else WRITERS.get(name, lambda v: v)(value)
    return found


def pasted(config: ZeroConfig, before: ZeroConfig) -> str:
    """The options that differ, as arguments of a call."""
    items = changes(config, before).items()
    quoted = {name: json.dumps(v) if isinstance(v, str) else repr(v) for name, v in items}
    return ", ".join(f"{name}={value}" for name, value in quoted.items())
