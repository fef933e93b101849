"""ZeroConfig: frozen options, each checked on construction. No I/O, no process groups."""

from __future__ import annotations

import dataclasses
import difflib
import html
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from zk.core.options import DTYPES, is_count, parse_device, parse_dtype, parse_modules, parse_nbytes, parse_paths
from zk.core.precision import DynamicLossScale

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

Tier = Literal["device", "host", "nvme", "auto"]

# other words for a tier
_CALLED = {"cpu": "host", "ram": "host", "gpu": "device", "cuda": "device", "none": "device", "disk": "nvme", "ssd": "nvme"}
_PARSERS: dict[str, Callable[[Any, str], object]] = {
    "dtype": parse_dtype, "compute_dtype": parse_dtype, "device_budget": parse_nbytes, "host_budget": parse_nbytes,
    "units": parse_modules, "keep_dtype": parse_modules,
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ZeroConfig:
    """Options of a ZeroOptimizer. Immutable; every field is checked on construction.

    Raises:
        ValueError: for a value that has no meaning, and for a setting that would have no effect, with the remedy.
        TypeError: for a value of another type.
    """

    stage: int = 2
    """0: nothing is partitioned (data parallel); 1: optimizer state; 2: and gradients; 3: and parameters."""
    dtype: str | torch.dtype | None = None
    """Parameters are cast to it ("bf16", "fp16", "fp32"); None: they keep their own. Buffers keep their own, and with them the parameters of
    BatchNorm and its kind; so does what the model names in ``_keep_in_fp32_modules``, and what is not fp64, fp32, bf16 or fp16."""
    compute_dtype: str | torch.dtype | None = None
    """With "fp32", at stage 3: parameters rest in ``dtype``, of 16 bits, and are fp32 for as long as they are gathered, so modules compute in fp32.
    That is for CPUs that are slow in 16 bits. Bytes on tiers and between ranks, and checkpoints, are those of ``dtype``; a gradient is rounded
    to it as it leaves backward. None: modules compute in ``dtype``."""
    cast_buffers: bool = False
    """With ``dtype``: cast floating point buffers too, as ``model.to(dtype)`` does (to ``compute_dtype``, if there is one). Rotary frequencies and
    running statistics lose by it."""
    keep_dtype: Sequence[str | type[nn.Module]] | None = None
    """With ``dtype``: what keeps its own: module classes, and names of modules, parameters and buffers, or whole parts of them ("router" is in
    "layers.0.router.weight")."""
    device: str | torch.device | None = None
    """The device that computes ("cuda", "cuda:1"); None: where the parameters are. For a model in host memory that is larger than the device's:
    it goes from there to its tiers, unit by unit."""
    param_tier: Tier = "device"
    """The tier on which parameters rest between uses; anything but "device" needs stage 3."""
    optimizer_tier: Tier = "device"
    """The tier of gradients and optimizer state, and so of the update."""
    nvme_path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None
    """Folder (or several, to stripe over) for the "nvme" tier; what is put there is private, and removed in the end."""
    nvme_checksum: bool = True
    """A checksum for everything written there, checked when it is read: a drive that returns something else is an OSError."""
    device_budget: int | str | None = None
    """Bytes (or "24GiB") of device memory that training state may take on a rank; with "auto" tiers the device is filled first. None: with
    "auto" half of what is free on a GPU, otherwise no limit."""
    host_budget: int | str | None = None
    """Bytes (or "24GiB") of host memory that training state may take on a rank. With an "nvme" tier, what fits in it stays in host memory. None:
    with "auto" nine tenths of this rank's share of what is free; with "nvme" nothing stays; otherwise no limit."""
    clip_grad_norm: float | None = None
    """Gradients are scaled down to this global 2-norm before the update; None: no clipping."""
    loss_scale: str | float | DynamicLossScale | None = "auto"
    """With "auto" dynamic for fp16, none otherwise; "dynamic" or DynamicLossScale(...); a number: static; None: none."""
    state_dtype: str | torch.dtype = "fp32"
    """Dtype of Adam's moments; "bf16" halves them, and changes results. "8bit": moments in 8 bits each, and of the masters of bf16 parameters 8 bits
    beside them: 3 bytes where there are 10. Changes results: rounding is up or down by chance, drawn from the gradients."""
    grad_accum_dtype: str | torch.dtype = "fp32"
    """Dtype of the sum of several gradients of a parameter before a step. "bf16" (or "fp16"), the ``dtype`` of training, rounds after each addition,
    as ``param.grad`` of plain torch does: half of the memory, or of the bytes on the drive, and other numbers than with "fp32"."""
    elementwise: bool = False
    """For an optimizer that zk does not know: what its ``step()`` makes of an element depends on no other element. It then runs over slices. That is
    tried on a small tensor, whole, in halves and in another order: a TypeError says what differs."""
    parameterwise: bool = False
    """For an optimizer that zk does not know: what its ``step()`` makes of a parameter depends on no other parameter. It then runs over whole
    parameters, of which each rank has some, and keeps tensors of any shape: statistics of rows, codes in 8 bits. That is tried on small parameters,
    together and one by one: a TypeError says what differs."""
    overlap: bool = True
    """Reduce, offload, upload and gather while compute goes on; False: each copy and collective is waited for at once."""
    exact_reduce: bool = True
    """Gradients of several ranks are summed in fp32 in the order of ranks, and rounded once. False: NCCL's own reduce-scatter, in their 16 bits: each
    addition rounds, and fp16 may overflow. No other backend has it."""
    overlap_step: bool | str = False
    """With True ``step()`` returns at once: units are updated in the background, in the order of forward, which waits for each one's own update.
    "backward" updates them in the background of backward too: out of place, as if nothing were clipped, and again if something was. That takes
    host memory, for as many units as ``host_budget`` leaves room (without one, half of what is free), room on the drive for what rests there, and of
    a GPU what ``device_budget`` leaves. "auto": "backward" where state rests in other memory than the device's, else False."""
    keep_gradients: bool = True
    """With False what rests on a drive is updated in backward from gradients in memory, which are not written to the drive: for one backward, or one
    ``accumulate``, before each step, without clipping, and with ``overlap_step="backward"``. Reading, changing, clipping and adding to gradients is
    refused then; what else needs them, too. The bits are the same."""
    delay_update: int | None = None
    """Steps before updates are delayed by one step, which changes numbers: from then on ``step()`` applies the gradients of the step before, whose
    update has gone on beside forward and backward, and takes those that are there (``param.grad`` is None after it). ``synchronize()``, ``close()``
    and whatever looks at states or saves them apply what is pending. Takes memory as ``overlap_step="backward"`` does. None: never."""
    update_on: str | float = "host"
    """The side that updates optimizer state which is not in the device's memory. "host": its threads. "device": state streams through the device in
    blocks, and parameters that rest there need no copy in host memory. A number from 0 to 1: the share of elements that the device updates. "auto":
    the share that makes the update shortest, by rates that are measured once a month. For Adam and AdamW, with the same bits."""
    prefetch: int = 1
    """Stage 3: how many units are gathered ahead of the one in use."""
    num_threads: int | None = None
    """Threads of the CPU update; None: cores / ranks on this machine."""
    process_group: ProcessGroup | DeviceMesh | None = None
    """Ranks that train together; None: the default group, or one process where there is none. Of a mesh of two dimensions the second partitions
    states, and gathers parameters; along the first they are replicated, and gradients alone are sent (hybrid sharding)."""
    model_parallel_group: ProcessGroup | DeviceMesh | None = None
    """Ranks with other parts of the model for the same data (tensor or pipeline parallel); None: each rank has all of it. The norm of gradients,
    overflow and checkpoints are then of the whole model, and ``process_group`` is the ranks with this one's part."""
    replicated_params: Sequence[str] | None = None
    """With ``model_parallel_group``: names of parameters, or whole parts of names, that its ranks have alike, and that count once. None: those
    without ``param.tensor_model_parallel``."""
    check_memory: bool = True
    """Refuse, before anything is moved, what cannot fit in the memory that is free; False where more will be free than it seems: parameters
    that never get a gradient, or other programs that are about to end."""
    units: Sequence[str | type[nn.Module]] | None = None
    """Modules that travel as one unit, by name or class, each without those in it that are named too; None: the blocks of the model's
    ModuleLists. Of 16 blocks and more that are smaller than 512 KiB, neighbours travel together up to that size."""

    def __new__(cls, **fields: Any) -> ZeroConfig:
        known = cls.__dataclass_fields__
        for name in sorted(fields.keys() - known.keys()):
            close = difflib.get_close_matches(name, known, 1, 0.5)
            hint = f"the closest one is {close[0]!r}" if close else f"there are {', '.join(known)}"
            raise TypeError(f"ZeroOptimizer and ZeroConfig have no option {name!r}; {hint}")
        return object.__new__(cls)

    def __post_init__(self) -> None:
        def normalize(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        if isinstance(self.stage, bool) or self.stage not in (0, 1, 2, 3):
            raise ValueError(f"stage must be 0, 1, 2 or 3; got {self.stage!r}")
        for name, parse in _PARSERS.items():
            if getattr(self, name) is not None:
                normalize(name, parse(getattr(self, name), name))
        if self.compute_dtype:
            self._check_computes()
        if self.device is not None:
            normalize("device", parse_device(self.device))
        asked = self.state_dtype
        if isinstance(asked, str):
            normalize("state_dtype", {**DTYPES, "8bit": torch.uint8}.get(asked.lower().removeprefix("torch.")))
        if self.state_dtype not in (torch.float32, torch.bfloat16, torch.uint8):
            raise ValueError(f"state_dtype must be 'fp32', 'bf16' or '8bit' (fp16 cannot hold second moments); got {asked!r}")
        normalize("grad_accum_dtype", parse_dtype(self.grad_accum_dtype, "grad_accum_dtype"))
        if self.grad_accum_dtype not in (torch.float32, self.dtype):
            raise ValueError(
                f"grad_accum_dtype must be 'fp32', or what gradients come in, which is the dtype of training, dtype={self.dtype}; "
                f"got {self.grad_accum_dtype!r}"
            )
        self._check_tiers()
        if self.overlap_step not in (False, True, "backward", "auto") or not isinstance(self.overlap_step, (bool, str)):
            raise ValueError(f"overlap_step must be True, False, 'backward' or 'auto'; got {self.overlap_step!r}")
        is_share = isinstance(self.update_on, (int, float)) and not isinstance(self.update_on, bool) and 0 <= self.update_on <= 1
        if self.update_on not in ("host", "device", "auto") and not is_share:
            raise ValueError(f"update_on must be 'host', 'device', 'auto' or a number from 0 to 1; got {self.update_on!r}")
        if self.update_on != "host" and self.optimizer_tier == "device":
            raise ValueError(
                f"update_on={self.update_on!r} has no effect: all optimizer state is in the device's memory, and updated there; remove it, or set "
                "optimizer_tier='host'"
            )
        if self.delay_update is not None:
            if not is_count(self.delay_update, 0):
                raise ValueError(f"delay_update must be a number of steps, 0 or more, or None; got {self.delay_update!r}")
            if self.overlap_step in ("backward", "auto"):
                raise ValueError(
                    f"delay_update={self.delay_update} and overlap_step={self.overlap_step!r} both use the time of backward; a delayed update has "
                    "all of it, and changes numbers: remove one of them"
                )
        if self.keep_gradients is False:
            self._check_handed_over()
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type == "bool" and not isinstance(value, bool):
                raise TypeError(f"{field.name} must be True or False; got {value!r}")
        if self.elementwise and self.parameterwise:
            raise ValueError(
                "elementwise=True and parameterwise=True exclude each other; an elementwise optimizer is a parameterwise one too, so for both in a "
                "list leave elementwise out"
            )
        if not isinstance(self.clip_grad_norm, (int, float, type(None))):
            raise TypeError(f"clip_grad_norm must be a number or None; got {self.clip_grad_norm!r}")
        if self.clip_grad_norm is not None and not self.clip_grad_norm > 0:
            raise ValueError(f"clip_grad_norm must be more than 0, or None for no clipping; got {self.clip_grad_norm!r}")
        if self.loss_scale == "dynamic":
            normalize("loss_scale", DynamicLossScale())
        elif isinstance(self.loss_scale, (int, float)) and not isinstance(self.loss_scale, bool):
            if not 0 < self.loss_scale < float("inf"):
                raise ValueError(f"a static loss_scale must be a finite number above 0; got {self.loss_scale!r}")
            normalize("loss_scale", float(self.loss_scale))
        elif not (self.loss_scale is None or self.loss_scale == "auto" or isinstance(self.loss_scale, DynamicLossScale)):
            raise ValueError(f"loss_scale must be 'auto', 'dynamic', a number, a DynamicLossScale or None; got {self.loss_scale!r}")
        if not is_count(self.prefetch, 0):
            raise ValueError(f"prefetch must be a number of units, 0 or more; got {self.prefetch!r}")
        if self.prefetch != type(self).__dataclass_fields__["prefetch"].default and self.stage != 3:
            raise ValueError(f"prefetch={self.prefetch} has no effect at stage {self.stage}, where parameters are never gathered; remove it")
        if self.num_threads is not None and not is_count(self.num_threads):
            raise ValueError(f"num_threads must be at least 1, or None for cores / local ranks; got {self.num_threads!r}")
        if self.replicated_params is not None:
            names = self.replicated_params
            if isinstance(names, str) or not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
                raise TypeError(f"replicated_params must be a sequence of names of parameters, or whole parts of names; got {names!r}")
            if self.model_parallel_group is None:
                raise ValueError(f"replicated_params={list(names)} has no effect without model_parallel_group=; remove it")
        for name in ("cast_buffers", "keep_dtype"):
            if getattr(self, name) and self.dtype is None:
                raise ValueError(f"{name} has no effect without dtype=, as nothing is cast; give a dtype, or remove it")

    def _check_computes(self) -> None:
        if self.compute_dtype != torch.float32:
            raise ValueError(
                f"compute_dtype must be 'fp32' or None; got {self.compute_dtype!r}: modules compute in dtype= where it is None, so that one is enough"
            )
        if self.dtype not in (torch.bfloat16, torch.float16):
            raise ValueError(
                f"compute_dtype='fp32' needs dtype='bf16' or 'fp16', in which parameters rest; got dtype={self.dtype!r}, in which modules compute: "
                "remove compute_dtype, or set dtype='bf16'"
            )
        if self.stage != 3:
            raise ValueError(
                f"compute_dtype='fp32' needs stage=3, where parameters are cast as they are gathered; got stage={self.stage}, where they stay as "
                "they are computed with: use stage=3 (with one rank, too), or dtype='fp32'"
            )

    @property
    def computes(self) -> torch.dtype | None:
        """The dtype of what ``dtype`` casts, while modules compute; None where nothing is cast."""
        return self.compute_dtype or self.dtype  # type: ignore[return-value]

    def _check_handed_over(self) -> None:
        if self.optimizer_tier not in ("nvme", "auto"):
            raise ValueError(
                f"keep_gradients=False has no effect with optimizer_tier={self.optimizer_tier!r}: it spares gradients the way to a drive and back; "
                "remove it"
            )
        if self.overlap_step not in ("backward", "auto"):
            raise ValueError(
                f"keep_gradients=False needs overlap_step='backward', as updates begin there; got overlap_step={self.overlap_step!r}, which needs "
                "the gradients in step()"
            )
        if self.clip_grad_norm is not None:
            raise ValueError(
                f"keep_gradients=False and clip_grad_norm={self.clip_grad_norm!r}: the norm is known when backward has ended, and gradients are used "
                "before; remove one of them"
            )

    @property
    def streamed_share(self) -> float:
        """The share of ``update_on`` that the device updates, once "auto" has been replaced by it."""
        return {"host": 0.0, "device": 1.0, "auto": 0.0}.get(self.update_on, self.update_on)  # type: ignore[arg-type, return-value]

    @classmethod
    def from_deepspeed(
        cls, config: str | os.PathLike[str] | Mapping[str, Any], *, auto: Mapping[str, Any] | None = None, **overrides: Any
    ) -> ZeroConfig:
        """The same settings from DeepSpeed's JSON.

        Args:
            config: a path, or a dict.
            auto: values for what the config says is "auto", by dotted key: ``{"bf16.enabled": True}``.
            overrides: fields that win over the config.

        Optimizer, scheduler and batch sizes are for ``zk.initialize``. One warning names the keys
        that are not used.

        Raises:
            ValueError: for unknown keys, for what zk does not do, and for what is not JSON.
        """
        from zk.integrations.deepspeed import from_deepspeed

        return from_deepspeed(config, auto or {}, overrides)

    def _repr_html_(self) -> str:
        """The fields that differ from their defaults, as a table for notebooks."""
        fields = ((field.name, getattr(self, field.name)) for field in dataclasses.fields(self) if getattr(self, field.name) != field.default)
        rows = "".join(f"<tr><td style='text-align:left'>{name}</td><td>{html.escape(str(value))}</td></tr>" for name, value in fields)
        return f"<b>zk.ZeroConfig</b><table>{rows or '<tr><td>all defaults</td></tr>'}</table>"

    def _check_tiers(self) -> None:
        for name in ("param_tier", "optimizer_tier"):
            tier = getattr(self, name)
            if isinstance(tier, str):
                object.__setattr__(self, name, tier := tier.lower())
            if tier not in ("device", "host", "nvme", "auto"):
                meant = f"; what others call {tier!r} is {_CALLED[str(tier)]!r} here" if str(tier) in _CALLED else ""
                raise ValueError(f"{name} must be 'device', 'host', 'nvme' or 'auto'; got {tier!r}{meant}")
        tiers = (self.param_tier, self.optimizer_tier)
        if "nvme" in tiers and not self.nvme_path:
            raise ValueError("a tier is 'nvme' and nvme_path is not set; give nvme_path=, a folder on the drive (or several, to stripe over)")
        if self.nvme_path is not None:
            paths = parse_paths(self.nvme_path, "nvme_path")
            object.__setattr__(self, "nvme_path", paths)
            if "nvme" not in tiers and "auto" not in tiers:
                raise ValueError(f"nvme_path={paths!r} has no effect: no tier is 'nvme' or 'auto'; remove it, or set optimizer_tier='nvme'")
        elif not self.nvme_checksum:
            raise ValueError("nvme_checksum=False has no effect without nvme_path; remove it")
        if self.param_tier == "nvme" and self.optimizer_tier == "device":
            raise ValueError("param_tier='nvme' needs optimizer_tier='host', 'nvme' or 'auto': its parameters are updated in host memory")
        if self.param_tier in ("host", "nvme") and self.stage != 3:
            raise ValueError(
                f"param_tier={self.param_tier!r} needs stage=3: at stage {self.stage} parameters stay on the device; use stage=3 or "
                "param_tier='device'"
            )
        if self.host_budget is not None and set(tiers) == {"device"}:
            raise ValueError("host_budget has no effect: no tier is 'host', 'nvme' or 'auto'; set optimizer_tier='host' or remove it")
        if self.device_budget is not None and not {"device", "auto"} & set(tiers):
            raise ValueError("device_budget has no effect: no tier is 'device' or 'auto'; set optimizer_tier='auto' or remove it")


def changes(config: ZeroConfig, before: ZeroConfig) -> dict[str, Any]:
    """The fields of ``config`` that differ, as they may be written in Python or JSON."""
    names = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.uint8: "8bit"}
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if value == getattr(before, field.name) or field.name in ("process_group", "units"):
            continue
        if field.name.endswith("_budget") and value is not None:
            sizes = ((30, "GiB"), (20, "MiB"), (10, "KiB"))
            whole = (f"{value >> power}{unit}" for power, unit in sizes if value % (1 << power) == 0)
            value = next(whole, value)
        elif field.name == "nvme_path" and value is not None:
            value = value[0] if len(value) == 1 else list(value)
        fields[field.name] = names[value] if isinstance(value, torch.dtype) else value
    return fields


def pasted(config: ZeroConfig, before: ZeroConfig) -> str:
    """The fields of ``config`` that differ, as arguments of a call."""
    items = changes(config, before).items()
    return ", ".join(f"{name}={json.dumps(v) if isinstance(v, str) else repr(v)}" for name, v in items)
