"""In: a model's units, a ZeroConfig and ranks. Out: the bytes of each memory that it is about to need, and those that are free.

Needed is beyond what the model holds already, by the arithmetic of `zk plan`. It is the larger of two: the fullest moment of construction, where
units go from the model's memory to their tiers one by one, and the fullest of a step, when all gradients are there. Activations are not known, and
not counted. Host memory is free up to a container's limit, with pages of files that the kernel would drop, and with swap, as what swaps does run.
Memory that is only mapped is not needed.
"""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from zk.config import ZeroConfig
from zk.memory import free_swap, host_memory
from zk.offload.rules import Rule
from zk.offload.scratch import sweep
from zk.offload.tiers import free_nbytes
from zk.parallel.layout import Layout
from zk.plan.memory import Footprint, Kind, footprint_of
from zk.units import Unit

MEMORIES = {"device": "device", "host": "host", "nvme": "drive"}  # and what they are called


def free_memory(device: torch.device, joined: bool, paths: Sequence[str]) -> dict[str, int]:
    """Bytes that could still be had of each memory: "device" if it is not the host's (``joined``), "host", "nvme" if there are ``paths``.

    What runs that have ended left on the paths is removed first, as it would be by this one.
    """
    free = {"host": host_memory()[1] + free_swap()}
    if not joined:
        free["device"] = free_nbytes(device)
    if paths and all(os.path.isdir(path) for path in paths):
        on_drive: dict[int, list[int]] = {}
        for path in paths:
            sweep(path)
            found = os.statvfs(path)
            blocks = found.f_bavail if os.geteuid() else found.f_bfree  # what is reserved is root's
            on_drive.setdefault(os.stat(path).st_dev, []).append(blocks * found.f_frsize)
        free["nvme"] = len(paths) * min(min(room) // len(room) for room in on_drive.values())
    return free


@dataclasses.dataclass(slots=True)
class Case:
    """A model that is about to be taken over.

    Args:
        model, units, layouts, rule: what ZeroOptimizer makes of the user's.
        inner: the user's optimizer.
        device, joined: where the model computes, and whether that memory is the host's.
        world, local: ranks, and those of them that share this machine's host memory and drive.
    """

    model: nn.Module
    units: Sequence[Unit]
    layouts: Sequence[Layout]
    rule: Rule
    inner: torch.optim.Optimizer
    device: torch.device
    joined: bool
    world: int
    local: int

    def _memory_of(self, tensor: Tensor) -> str:
        """Where it is; a device may be one that is pretended, whose tensors are a CPU's."""
        return "device" if not self.joined and tensor.device.type == self.device.type else "host"

    def freed(self) -> list[Counter[str]]:
        """For each unit: memory -> bytes of its parameters, given back when it has been taken over. A storage goes with its last unit."""
        last: dict[int, tuple[int, str, int]] = {}
        for number, unit in enumerate(self.units):
            for param in unit.params:
                if not param.is_meta:
                    storage = param.untyped_storage()
                    last[storage._cdata] = number, self._memory_of(param), storage.nbytes()
        freed: list[Counter[str]] = [Counter() for _ in self.units]
        for number, memory, nbytes in last.values():
            freed[number][memory] += nbytes
        return freed

    def freed_late(self, config: ZeroConfig) -> Counter[str]:
        """Memory -> bytes of what else the model and its optimizer may give back: old state and gradients, buffers that are cast."""
        freed: Counter[str] = Counter()
        for entry in self.inner.state.values():
            for value in entry.values():
                if isinstance(value, Tensor):
                    freed[self._memory_of(value)] += value.nbytes
        tensors = [param.grad for unit in self.units for param in unit.params if param.grad is not None]
        tensors += [buffer for buffer in self.model.buffers() if config.dtype is not None and not buffer.is_meta]
        for tensor in tensors:
            freed[self._memory_of(tensor)] += tensor.nbytes
        return freed

    def footprint(self, config: ZeroConfig, at_least: bool, world: int) -> tuple[list[Kind], Footprint]:
        """Of one rank of ``world``, with the model's units in their order."""
        same = world == self.world
        layouts = self.layouts if same else [Layout.of(layout.numels, world) for layout in self.layouts]
        kinds = [Kind(unit, layout, 1, unit.anchors[0] is self.model) for unit, layout in zip(self.units, layouts, strict=True)]
        return kinds, footprint_of(kinds, config, world, self.joined, self.rule, self.inner.param_groups, self.device, at_least)

    def needed(self, config: ZeroConfig, at_least: bool, world: int | None = None) -> dict[str, int]:
        """Memory -> bytes beyond what is held now: of the device for one rank, of host and drive for all ranks on this machine.

        Args:
            at_least: what it cannot do without; else what it takes, with all buffers.
            world: another number of ranks, as many on each machine.

        Raises ValueError where budgets do not do, as ZeroOptimizer does.
        """
        kinds, found = self.footprint(config, at_least, world or self.world)
        here = "host" if self.joined else "device"
        ranks = {"host": self.local, "device": 1}
        net, peak = Counter[str](), Counter[str]()
        for kind, rests, gathers, old in zip(kinds, found.settled, found.gathers, self.freed(), strict=True):
            unit, numel = kind.unit, kind.layout.numel
            widest = max((param.dtype for param in unit.params), key=lambda dtype: dtype.itemsize)
            becomes = widest == unit.dtype and not gathers  # the buffer of initial values is what they stay in
            initial = numel * widest.itemsize
            for memory in ranks:
                first = initial + (0 if gathers or becomes else numel * unit.dtype.itemsize) if memory == here else 0
                stays = sum(nbytes for tier, nbytes in rests.items() if (tier if tier != "device" else here) == memory)
                before, after = net[memory] + first, net[memory] - old[memory] + stays
                most = after + (initial if memory == here and not becomes else 0)
                # when one rank is at its fullest, others may be there, or just before or after
                peak[memory] = max(peak[memory], ranks[memory] * before, most + (ranks[memory] - 1) * min(before, after, most))
                net[memory] = after
        late = self.freed_late(config)
        for memory in ranks:
            settled = sum(n for rests in found.settled for tier, n in rests.items() if (tier if tier != "device" else here) == memory)
            peak[memory] = max(peak[memory], ranks[memory] * (net[memory] + found.on(memory) - settled - late[memory]))
        return {**peak, "nvme": self.local * found.on("nvme")}


def lacking(needed: dict[str, int], free: dict[str, int]) -> dict[str, int]:
    """Memory -> bytes that there are too few of; what is not known to be limited is not."""
    return {memory: needed[memory] - nbytes for memory, nbytes in free.items() if needed.get(memory, 0) > nbytes}
