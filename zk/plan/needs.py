"""In: a model's units, a ZeroConfig and ranks. Out: the bytes of each memory that it is about to need, and those that are free.

Needed is beyond what the model holds already, by the arithmetic of `zk plan`. It is the larger of two: the fullest moment of construction, where
units go from the model's memory to their tiers one by one, and the fullest of a step, when all gradients are there. Activations are not known, and
not counted. Host memory is free up to a container's limit, with pages of files that the kernel would drop, and with swap, as what swaps does run.
Memory that is only mapped is not needed.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zk.config import ZeroConfig
from zk.memory import free_addresses, free_swap, host_memory
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
    free = {"host": min(host_memory()[1] + free_swap(), free_addresses())}
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
        model, stored, units, layouts, rule: what ZeroOptimizer makes of the user's.
        inner: the user's optimizer.
        device, joined: where the model computes, and whether that memory is the host's.
        world, local: ranks, and those of them that share this machine's host memory and drive.
    """

    model: nn.Module
    stored: Mapping[Tensor, torch.dtype]
    units: Sequence[Unit]
    layouts: Sequence[Layout]
    rule: Rule
    inner: torch.optim.Optimizer
    device: torch.device
    joined: bool
    world: int
    local: int
    _found: tuple[list[int], list[int], list[Counter[str]]] | None = dataclasses.field(default=None, init=False)

    def _memory_of(self, tensor: Tensor) -> str:
        """Where it is; a device may be one that is pretended, whose tensors are a CPU's."""
        return "device" if not self.joined and tensor.device.type == self.device.type else "host"

    def freed(self) -> list[Counter[str]]:
        """For each unit: memory -> bytes given back when it has been taken over: its parameters, and gradients of another precision than theirs
        will be. A storage goes with its last unit, or late if it has something that stays.
        """
        last: dict[int, tuple[int, str, int]] = {}
        for number, unit in enumerate(self.units):
            for param in unit.params:
                leaves = [param] if param.grad is None or param.grad.dtype == unit.dtype else [param, param.grad]
                for key, memory, nbytes in itertools.chain.from_iterable(map(self._storages, leaves)):
                    last[key] = number, memory, nbytes
        for key, _, _ in self._late():
            last.pop(key, None)
        freed: list[Counter[str]] = [Counter() for _ in self.units]
        for number, memory, nbytes in last.values():
            freed[number][memory] += nbytes
        return freed

    def _storages(self, tensor: Tensor) -> Iterator[tuple[int, str, int]]:
        """What holds it, memory and bytes, of each storage."""
        if tensor.layout is torch.sparse_coo:
            parts = [tensor._indices(), tensor._values()]
        else:
            parts = [tensor] if tensor.layout is torch.strided and not tensor.is_meta else []
        for part in parts:
            storage = part.untyped_storage()
            yield storage._cdata, self._memory_of(part), storage.nbytes()

    def _late(self) -> set[tuple[int, str, int]]:
        """Storages of the optimizer's old state, and of gradients that stay until a step takes them: those that have their precision already."""
        state = [value for entry in self.inner.state.values() for value in entry.values() if isinstance(value, Tensor)]
        pairs = ((param.grad, unit.dtype) for unit in self.units for param in unit.params)
        kept = [grad for grad, dtype in pairs if grad is not None and grad.dtype == dtype]
        return {one for tensor in (*state, *kept) for one in self._storages(tensor)}

    def freed_late(self) -> Counter[str]:
        """Memory -> bytes of what else the model and its optimizer may give back: old state and gradients, buffers that are cast."""
        freed: Counter[str] = Counter()
        for _, memory, nbytes in self._late():
            freed[memory] += nbytes
        for buffer in self.model.buffers():
            if not buffer.is_meta and self.stored[buffer] != buffer.dtype:
                freed[self._memory_of(buffer)] += buffer.nbytes
        return freed

    def _kinds(self) -> tuple[list[int], list[int], list[Counter[str]]]:
        """Numbers of the first unit of each kind, each unit's kind, and what each unit frees. Found once: what is tried changes neither."""
        if self._found is None:
            group_of = {param: number for number, group in enumerate(self.inner.param_groups) for param in group["params"]}
            numbers: dict[Any, int] = {}
            firsts, order = [], []
            for index, (unit, layout) in enumerate(zip(self.units, self.layouts, strict=True)):
                groups = frozenset(group_of.get(param) for param in unit.params)
                alike = layout.numels, unit.dtype, _widest(unit), unit.trained, unit.anchors[0] is self.model, groups
                if alike not in numbers:
                    numbers[alike] = len(numbers)
                    firsts.append(index)
                order.append(numbers[alike])
            self._found = firsts, order, self.freed()
        return self._found

    def footprint(self, config: ZeroConfig, at_least: bool, world: int) -> tuple[list[Kind], Footprint]:
        """Of one rank of ``world``: each unit's kind, in the model's order, and the bytes."""
        firsts, order, _ = self._kinds()
        counts, kinds = Counter(order), []
        for number, first in enumerate(firsts):
            unit, layout = self.units[first], self.layouts[first]
            layout = layout if world == self.world else Layout.of(layout.numels, world)
            kinds.append(Kind(unit, layout, counts[number], unit.anchors[0] is self.model))
        groups = self.inner.param_groups
        found = footprint_of(kinds, config, world, self.joined, self.rule, groups, self.device, at_least, order)
        return [kinds[number] for number in order], found

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
        for buffer in self.model.buffers():
            if buffer.is_meta:  # made before any unit, then cast
                stays = buffer.numel() * self.stored[buffer].itemsize
                net[here] += stays
                made = buffer.numel() * buffer.dtype.itemsize
                peak[here] = max(peak[here], ranks[here] * (net[here] - stays) + made)
        units = zip(kinds, found.settled, found.gathers, self._kinds()[2], strict=True)
        for (kind, rests, gathers, old), count in _runs(units):
            unit, numel = kind.unit, kind.layout.numel
            widest = _widest(unit)
            becomes = widest == unit.dtype and not gathers  # the buffer of initial values is what they stay in
            initial = numel * widest.itemsize
            for memory in ranks:
                first = initial + (0 if gathers or becomes else numel * unit.dtype.itemsize) if memory == here else 0
                stays = sum(nbytes for tier, nbytes in rests.items() if (tier if tier != "device" else here) == memory)
                grows = stays - old[memory]
                for passed in {0, count - 1}:  # of units that are alike, the first or the last is the fullest moment
                    held = net[memory] + passed * grows
                    before, after = held + first, held + grows
                    most = after + (initial if memory == here and not becomes else 0)
                    # when one rank is at its fullest, others may be there, or just before or after
                    peak[memory] = max(peak[memory], ranks[memory] * before, most + (ranks[memory] - 1) * min(before, after, most))
                net[memory] += count * grows
        late = self.freed_late()
        for memory in ranks:
            settled = sum(n for rests in found.settled for tier, n in rests.items() if (tier if tier != "device" else here) == memory)
            peak[memory] = max(peak[memory], ranks[memory] * (net[memory] + found.on(memory) - settled - late[memory]))
        return {**peak, "nvme": self.local * found.on("nvme")}


_Step = tuple[Kind, Counter[str], bool, Counter[str]]  # one unit: its kind, what rests where, whether it is gathered, what it gives back


def _runs(units: Iterable[_Step]) -> Iterator[tuple[_Step, int]]:
    """Neighbours that are alike, and how many they are."""
    run: _Step | None = None
    count = 0
    for one in units:
        if run is not None and one[0] is run[0] and one[2] == run[2] and (one[1] is run[1] or one[1] == run[1]) and one[3] == run[3]:
            count += 1
            continue
        if run is not None:
            yield run, count
        run, count = one, 1
    if run is not None:
        yield run, count


def _widest(unit: Unit) -> torch.dtype:
    """The precision that initial values come in."""
    return max((param.dtype for param in unit.params), key=lambda dtype: dtype.itemsize)


def lacking(needed: dict[str, int], free: dict[str, int]) -> dict[str, int]:
    """Memory -> bytes that there are too few of; what is not known to be limited is not."""
    return {memory: needed[memory] - nbytes for memory, nbytes in free.items() if needed.get(memory, 0) > nbytes}
