"""In: names of tiers and budgets. Out: where training state lives: device or host memory, and what it takes there.

A tier hands out flat buffers. Buffers of the memory tiers are tensors, used in place: on a machine without an accelerator the device
is the host, so offload and upload find source and destination to be the same memory and do nothing.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

import psutil
import torch
from torch import Tensor


class Tier(Protocol):
    """A place where flat buffers rest between uses."""

    @property
    def name(self) -> str: ...

    @property
    def device(self) -> torch.device:
        """Where the buffers can be computed on."""

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A zeroed flat buffer (numel,)."""


@dataclasses.dataclass(frozen=True, slots=True)
class MemoryTier:
    """Device or host memory."""

    name: str
    device: torch.device

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(numel, dtype=dtype, device=self.device)


def move(source: Tensor, destination: Tensor) -> None:
    """Offload or upload: copy (n,) to (n,) across tiers; nothing where both are the same memory."""
    if source.device != destination.device or source.data_ptr() != destination.data_ptr():
        destination.copy_(source)


@dataclasses.dataclass(frozen=True, slots=True)
class Needs:
    """Bytes of training state of one rank, by kind."""

    param_nbytes: int  # parameters between uses
    optimizer_nbytes: int  # gradients, masters and moments


def free_nbytes(device: torch.device) -> int:
    """Bytes that can still be allocated on ``device``."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)


def choose(
    param_tier: str, optimizer_tier: str, needs: Needs, stage: int, device: torch.device, device_budget: int | None, host_budget: int | None
) -> tuple[Tier, Tier]:
    """The tiers of parameters and of optimizer state. "auto" takes the device as far as its budget goes, then the host.

    Raises ValueError if the state does not fit in the budgets, with what it needs and the remedy.
    """
    host = MemoryTier("host", torch.device("cpu"))
    on_device = MemoryTier("device", device)
    room = device_budget if device_budget is not None else int(0.9 * free_nbytes(device))
    # parameters claim the device first: they are used twice in every step, optimizer state once
    left = room
    chosen: list[MemoryTier] = []
    for wanted, nbytes, may_leave in ((param_tier, needs.param_nbytes, stage == 3), (optimizer_tier, needs.optimizer_nbytes, True)):
        if wanted == "auto":
            wanted = "device" if nbytes <= left or not may_leave else "host"
        tier = on_device if wanted == "device" else host
        if tier.name == "device":
            left -= nbytes
        chosen.append(tier)
    for name, budget in (("device", device_budget), ("host", host_budget)):
        used = sum(n for tier, n in zip(chosen, (needs.param_nbytes, needs.optimizer_nbytes), strict=True) if tier.name == name)
        if budget is not None and used > budget:
            remedy = "optimizer_tier='host', or stage=3 with param_tier='host', moves it off the device" if name == "device" else "more ranks"
            raise ValueError(
                f"this rank's training state needs {used / 2**30:.3f} GiB on the {name} tier, and {name}_budget is {budget / 2**30:.3f} GiB; "
                f"raise the budget, or choose a higher stage ({remedy})"
            )
    return chosen[0], chosen[1]
