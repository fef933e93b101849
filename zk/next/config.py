"""ZeroConfig: frozen options, each checked on construction. No I/O, no process groups."""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

from zk.core.options import (
    is_count,
    parse_device,
    parse_dtype,
    parse_modules,
    parse_nbytes,
    parse_paths,
)
from zk.next.addon import OPTIONS, Addon
from zk.next.precision import DynamicLossScale

TIERS = "device", "host", "nvme", "auto"
CALLED = {  # other words for a tier
    **dict.fromkeys(("cpu", "ram"), "host"),
    **dict.fromkeys(("gpu", "cuda", "none"), "device"),
    **dict.fromkeys(("disk", "ssd"), "nvme"),
}
PARSERS = {
    "dtype": parse_dtype,
    "device_budget": parse_nbytes,
    "host_budget": parse_nbytes,
    "units": parse_modules,
    "keep_dtype": parse_modules,
    "nvme_path": parse_paths,
    "device": lambda value, name: parse_device(value),
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
    """Parameters are cast to "bf16", "fp16" or "fp32"; None: they keep their own. Buffers keep
    theirs, and so do the parameters of BatchNorm, and what the model names in
    ``_keep_in_fp32_modules``."""
    keep_dtype: Sequence[str | type[nn.Module]] | None = None
    """What keeps its dtype: module classes; names of modules and parameters, or parts of names."""
    device: str | torch.device | None = None
    """The device that computes, for a model that is in host memory; None: where parameters are."""
    param_tier: str = "device"
    """Where parameters rest between uses at stage 3: "device", "host", "nvme" or "auto"."""
    optimizer_tier: str = "device"
    """Where gradients and optimizer states rest, and are updated."""
    nvme_path: Any = None
    """The folder of the "nvme" tier. What is put there is private, and gone in the end."""
    device_budget: int | str | None = None
    """Bytes ("24GiB") of device memory for training state on a rank, with "auto" tiers."""
    host_budget: int | str | None = None
    """Bytes ("24GiB") of host memory for training state on a rank; with "nvme" a cache."""
    clip_grad_norm: float | None = None
    """The largest 2-norm of all gradients: larger ones are scaled down in the update."""
    loss_scale: str | float | DynamicLossScale | None = "auto"
    """A number, "dynamic", DynamicLossScale(...), None, or "auto": dynamic for fp16, else none."""
    prefetch: int = 1
    """How many units are gathered ahead of the one in use, at stage 3."""
    num_threads: int | None = None
    """Threads of the CPU update; None: cores divided by ranks on this machine."""
    process_group: ProcessGroup | None = None
    """The ranks that train together; None: the default group."""
    units: Sequence[str | type[nn.Module]] | None = None
    """Modules that travel as one unit, by name or class; None: entries of ModuleLists."""
    addons: Sequence[Addon] = ()
    """Add-ons of your own (docs/guides/addons.md)."""
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Options of registered add-ons; give them by name, as any other."""

    def __init__(self, **given: Any) -> None:
        fields = {field.name: field for field in dataclasses.fields(self)}
        refuse_unknown(given.keys() - fields.keys() - OPTIONS.keys(), [*fields, *OPTIONS])
        options = {name: value for name, value in given.items() if name in OPTIONS}
        own = {name: value for name, value in given.items() if name in fields}
        defaults = {name: field.default for name, field in fields.items() if name != "options"}
        for name, value in {**defaults, "options": options, **own}.items():
            if value is not None and name in PARSERS:
                value = PARSERS[name](value, name)
            object.__setattr__(self, name, value)
        self._check()

    def _check(self) -> None:
        """ValueError or TypeError for the first rule that does not hold."""
        tiers = {self.param_tier, self.optimizer_tier}
        for name in ("param_tier", "optimizer_tier"):
            tier = getattr(self, name)
            meant = (
                f"; what others call {tier!r} is {CALLED[tier]!r} here" if tier in CALLED else ""
            )
            require(tier in TIERS, f"{name} must be one of {', '.join(TIERS)}; got {tier!r}{meant}")
        stage, clip, scale = self.stage, self.clip_grad_norm, self.loss_scale
        is_number = isinstance(scale, (int, float)) and not isinstance(scale, bool) and scale > 0
        known = (
            scale in (None, "auto", "dynamic") or isinstance(scale, DynamicLossScale) or is_number
        )
        rules = (
            (
                stage in (0, 1, 2, 3) and not isinstance(stage, bool),
                f"stage must be 0, 1, 2 or 3; got {stage!r}",
            ),
            (
                stage == 3 or self.param_tier in ("device", "auto"),
                f"param_tier={self.param_tier!r} needs stage=3: at stage {stage} parameters stay on "
                "the device; use stage=3 or param_tier='device'",
            ),
            (
                "nvme" not in tiers or self.nvme_path,
                "a tier is 'nvme' and nvme_path is not set; give nvme_path=, a folder on the drive",
            ),
            (
                self.param_tier != "nvme" or self.optimizer_tier != "device",
                "param_tier='nvme' needs optimizer_tier='host', 'nvme' or 'auto': its parameters are "
                "updated in host memory",
            ),
            (
                clip is None or (isinstance(clip, (int, float)) and clip > 0),
                f"clip_grad_norm must be a number above 0, or None; got {clip!r}",
            ),
            (
                known,
                f"loss_scale must be 'auto', 'dynamic', a number above 0, a DynamicLossScale or None; "
                f"got {scale!r}",
            ),
            (
                is_count(self.prefetch, 0),
                f"prefetch must be a number of units, 0 or more; got {self.prefetch!r}",
            ),
            (
                self.num_threads is None or is_count(self.num_threads),
                f"num_threads must be 1 or more, or None; got {self.num_threads!r}",
            ),
            (
                self.keep_dtype is None or self.dtype is not None,
                "keep_dtype has no effect without dtype=, as nothing is cast; give dtype= or remove it",
            ),
        )
        for holds, message in rules:
            require(holds, message)


def require(holds: object, message: str) -> None:
    if not holds:
        raise ValueError(message)


def refuse_unknown(names: set[str], known: list[str]) -> None:
    """TypeError for the first of ``names``, with the closest that is known."""
    for name in sorted(names):
        close = difflib.get_close_matches(name, known, 1, 0.5)
        hint = f"the closest one is {close[0]!r}" if close else f"there are {', '.join(known)}"
        raise TypeError(f"ZeroOptimizer and ZeroConfig have no option {name!r}; {hint}")


def folder_of(config: ZeroConfig) -> str:
    """The folder of the drive tier."""
    return os.fspath(config.nvme_path[0])
