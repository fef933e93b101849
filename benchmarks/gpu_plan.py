"""Plans of the jobs of `make gpu`: bytes by ``zk plan``."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from gpu_common import GIB
from gpu_model import SIZES, Model, Size, tiny, working_nbytes
from gpu_step import CLIP, Job

from zk.config import ZeroConfig
from zk.tools.plan import USABLE, Machine, Plan
from zk.tools.summary import changes

Row = dict[str, Any]
TIERS: dict[str, dict[str, Any]] = {
    "zk_stage2": {"stage": 2, "optimizer_tier": "host"},
    "zk_stage3": {"stage": 3, "param_tier": "host", "optimizer_tier": "host"},
    "zk_auto": {"stage": 3, "param_tier": "auto", "optimizer_tier": "auto"},
    "zk_nvme": {"stage": 3, "param_tier": "nvme", "optimizer_tier": "nvme"},
}


@dataclasses.dataclass(slots=True)
class Planned:
    """What a job is expected to need."""

    numel: int
    device_nbytes: int
    host_nbytes: int
    missing: dict[str, int]  # memory -> bytes that it has too few, of the share that training may take
    zero: dict[str, Any] = dataclasses.field(default_factory=dict)
    note: str = ""
    refused: str = ""  # why it is not tried


def of(rows: Sequence[Row], kind: str, **values: Any) -> list[Row]:
    """Rows of a kind with these values."""
    return [row for row in rows if row["kind"] == kind and all(row.get(name) == value for name, value in values.items())]


def size_of(job: Job, dry: bool) -> Size:
    """Sizes of a job's model."""
    return tiny(SIZES[job.model]) if dry else SIZES[job.model]


def model_of(size: Size) -> Model:
    """A model without memory."""
    with torch.device("meta"):
        return Model(size)


def numels_of(size: Size) -> list[int]:
    """Elements of each parameter."""
    return [param.numel() for param in model_of(size).parameters()]


def machine_of(rows: Sequence[Row], nvme: Path, host_nbytes: int | None = None) -> Machine:
    """The machine's memory."""
    drive = next(folder for folder in (nvme, *nvme.parents) if folder.is_dir())
    here = of(rows, "machine")[-1]
    return Machine(gpu_nbytes=here["device_nbytes"], ram_nbytes=host_nbytes or here["host_nbytes"], nvme_nbytes=shutil.disk_usage(drive).free)


def _power_of_two(nbytes: int) -> int:
    return 1 << (nbytes - 1).bit_length()


def _of_torch(job: Job, size: Size) -> Planned:
    """All on the device: parameters, gradients and both moments in bf16."""
    numel = sum(numels_of(size))
    device = 8 * numel + working_nbytes(size, max(job.tokens))
    note = f"bf16 moments, no fp32 master (with it and fp32 moments, state alone would take {16 * numel / GIB:.0f} GiB of device memory)"
    return Planned(numel, device, 0, {}, note=note)


def _of_fsdp2(job: Job, size: Size) -> Planned:
    """Parameters and gradients in pinned host memory, each rounded up to a power of two by torch's allocator; moments in ordinary memory."""
    numels = numels_of(size)
    numel, block = sum(numels), sum(param.numel() for param in model_of(size).blocks[0].parameters())
    pinned, wide = (2 * sum(_power_of_two(width * count) for count in numels) for width in (2, 4))
    device = 2 * 2 * (2 * block + numel - size.layers * block) + working_nbytes(size, max(job.tokens))
    note = f"bf16 parameters and moments, no fp32 master (with fp32 ones host memory would need {(wide + 8 * numel) / GIB:.0f} GiB)"
    return Planned(numel, device, pinned + 4 * numel, {}, note=note)


def _of_zk(job: Job, size: Size, machine: Machine, nvme: Path) -> Planned:
    """A ZeroConfig and its bytes. "auto" gets budgets that leave room for activations, and bf16 moments where fp32 ones find no room."""
    working = working_nbytes(size, max(job.tokens), job.keep_last)
    inputs = working_nbytes(size, max(job.tokens)) - working  # in host memory
    gpu, ram = machine.gpu_nbytes, machine.ram_nbytes
    assert gpu is not None
    room = dataclasses.replace(machine, gpu_nbytes=gpu - int(working / USABLE["device"]), ram_nbytes=ram - int(inputs / USABLE["host"]))
    plan = Plan(name=job.model, model=model_of(size), machine=room, tokens=0)
    given = {"dtype": "bf16", "clip_grad_norm": CLIP, **TIERS[job.system], **job.zero}
    given |= {"nvme_path": str(nvme)} if "nvme" in given.values() else {}
    is_auto = job.system == "zk_auto"
    given |= {"overlap_step": True} if is_auto else {}
    row = None
    for state_dtype in ("fp32", "bf16") if is_auto else (given.pop("state_dtype", "fp32"),):
        named = {"state_dtype": state_dtype} if state_dtype != "fp32" else {}
        with contextlib.suppress(ValueError):  # "auto" finds no room for it
            row = dataclasses.replace(plan, state_dtype=state_dtype).row(ZeroConfig(**given, **named))
        if row is not None and not row.missing:
            break
    numel = sum(numels_of(size))
    if row is None:
        return Planned(numel, 0, 0, {}, refused="zk plan finds no room for it")
    zero = changes(row.config, ZeroConfig())
    words = [f"{name}={value}" for name, value in zero.items() if name.endswith("budget")]
    words += ["overlap_step"] * ("overlap_step" in zero) + ["bf16 moments"] * ("state_dtype" in zero)
    words += ["blocks' inputs on the host"] * (job.keep_last is not None)
    return Planned(numel, row.used["device"] + working, row.used["host"] + inputs, row.missing, {"stage": row.config.stage, **zero}, ", ".join(words))


def plan_job(job: Job, rows: Sequence[Row], dry: bool, nvme: Path, host_nbytes: int | None = None) -> Planned:
    """Plan a job on the machine that ``rows`` describe."""
    machine, size = machine_of(rows, nvme, host_nbytes), size_of(job, dry)
    assert machine.gpu_nbytes is not None
    here = dataclasses.replace(machine, gpu_nbytes=min(job.cap or machine.gpu_nbytes, machine.gpu_nbytes))
    plans = {"torch": _of_torch, "fsdp2": _of_fsdp2}
    found = plans[job.system](job, size) if job.system in plans else _of_zk(job, size, here, nvme)
    if job.system in plans:
        needed = {"device": found.device_nbytes, "host": found.host_nbytes}
        found.missing = {tier: nbytes - here.capacity(tier) for tier, nbytes in needed.items() if nbytes > here.capacity(tier)}
    if found.host_nbytes > machine.ram_nbytes:
        found.refused = f"it needs {found.host_nbytes / GIB:.1f} GiB of host memory, and there are {machine.ram_nbytes / GIB:.1f}"
    if dry and job.system == "fsdp2" and torch.cuda.is_available() and not torch.backends.cuda.is_built():  # the GPU is pretended
        found.refused = "FSDP2 on a GPU needs NCCL, and this torch is built without CUDA"
    return found
