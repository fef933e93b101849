"""Bytes of one rank by tier and kind, by the optimizer's own arithmetic."""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from zk.config import ZeroConfig
from zk.core.placement import Place, Placement
from zk.core.units import Unit
from zk.offload.nvme import round_up
from zk.offload.rules import Rule
from zk.offload.tiers import CHUNKS_IN_MEMORY, GRADIENTS_IN_MEMORY

CPU = torch.device("cpu")


@dataclasses.dataclass(frozen=True, slots=True)
class Settled:
    """One unit between steps, without its gradient."""

    numel: int  # elements of the whole unit, with padding
    nbytes: dict[str, int]  # memory -> bytes
    gathered: bool  # full only while in use


@dataclasses.dataclass(slots=True)
class Footprint:
    """Bytes of one rank at the fullest point of a step."""

    joined: bool  # the device's memory is the host's
    # (tier, kind) -> bytes, with the names of ZeroOptimizer.metrics(), and beyond them: "bucket" (gradients before they are reduced), "fresh"
    # (gradients as autograd makes them: of one unit, in host memory of one parameter), "staging" (gradients between device and drive), "spare"
    # (room on the drive for sums of gradients), "sums" (what several gradients take beyond one), "activations" (an estimate)
    sizes: Counter[tuple[str, str]] = dataclasses.field(default_factory=Counter)
    units: list[Settled] = dataclasses.field(default_factory=list)

    def on(self, memory: str, kind: str | None = None) -> int:
        """Bytes of a kind, or of all, in one memory; without an accelerator the device's are the host's."""
        tiers = [memory] if not self.joined else ["host", "device"] if memory == "host" else [memory] * (memory == "nvme")
        return sum(nbytes for (tier, name), nbytes in self.sizes.items() if tier in tiers and kind in (None, name))


def footprint_of(
    model: nn.Module,
    units: Sequence[Unit],
    config: ZeroConfig,
    world: int,
    joined: bool,
    rules: Sequence[Rule],
    groups: Sequence[Mapping[str, Any]],
    device: torch.device = CPU,
    at_least: bool = False,
    placed: Sequence[Place] | None = None,
    wide: int = 1,
) -> Footprint:
    """Bytes of training units on each rank.

    Args:
        model: what is used by its own forward is outside of blocks.
        units: in the model's order. Alike ones may be one, many times.
        joined: the device's memory is the host's.
        rules, groups: the optimizer's groups, and the rule of each.
        device: what "auto" tiers without budgets ask for free memory.
        at_least: only what a step that uses all parameters cannot do without at once, where the number of buffers depends on timing.
        placed: the tiers of each unit, as Placement.tiers_of gives them; None asks that.
        wide: 1, or bytes of the sum of several gradients for each byte of one; they come one after the other or block by block, whichever takes more.
    """
    placement = Placement(config, world, rules, groups, joined)
    each = {id(unit): unit for unit in units}
    are_alone = not any((config.device_budget, config.host_budget, config.streamed_share))  # a tier is the same however many there are
    if placed is None and are_alone and "auto" not in (config.param_tier, config.optimizer_tier):
        tiers = dict(zip(each, placement.tiers_of([*each.values()], device), strict=True))
        placed = [tiers[id(unit)] for unit in units]
    placed = placed or placement.tiers_of(units, device)
    found = Footprint(joined)
    alike = list(zip(map(id, units), placed, strict=True))
    settled: dict[Any, Settled] = {}
    drive: Counter[tuple[int, bool, int]] = Counter()  # unit, optimizer state (or else parameters), elements
    buffers, trained = 0, Counter[int]()
    for one, count in (counts := Counter(alike)).items():
        key, (param_tier, parts, streams) = one
        unit = each[key]
        sizes = _unit_sizes(placement, unit, param_tier, parts, streams, at_least)
        buffers = max(buffers, placement.stream_nbytes(unit, parts) * streams)
        rests: Counter[str] = Counter()
        for (tier, kind), nbytes in sizes.items():
            found.sizes[tier, kind] += count * nbytes
            found.sizes[tier, "sums"] += (wide - 1) * count * nbytes * (kind == "grad")
            rests["host" if joined and tier == "device" else tier] += nbytes * (kind not in ("grad", "shadow"))
        settled[one] = Settled(placement.layout(unit).numel, rests, placement.partitions(unit, param_tier))
        trained[wide * settled[one].numel * unit.dtype.itemsize] += count * unit.trained
        if param_tier == "nvme":
            drive[key, False, placement.slice_numel(unit, 1)] += count
        for tier, numel in parts if unit.trained else ():
            drive[key, True, numel] += count * (tier == "nvme")
    found.units = [settled[one] for one in alike]
    away = any(kind == "grad" and (tier == "nvme" or placement.memory_of(tier) != placement.on_device) for tier, kind in found.sizes)
    full = {key: placement.layout(unit).numel * unit.computes.itemsize for key, unit in each.items()}
    gathered = [(each[key], full[key], count) for (key, its), count in counts.items() if settled[key, its].gathered]
    if gathered and at_least:  # when the last gradient has been made, one unit at least is there; the largest is, at some time
        found.sizes["device", "gathered"] = (max if away else min)(nbytes for _, nbytes, _ in gathered)
    elif gathered:  # what is outside of blocks, the block in use, an expert of it, and units that were asked for
        rest = sum(nbytes * count for unit, nbytes, count in gathered if unit.anchors[0] is model)
        by_module, others, in_use = defaultdict[nn.Module, Counter[int]](Counter), Counter[int](), 0  # bytes of each unit; units
        for unit, nbytes, count in gathered:
            if unit.anchors[0] is not model:
                by_module[unit.anchors[0]][id(unit)] = nbytes
                others[id(unit)] += count
        experts = {inner for module in by_module for inner in module.modules() if inner is not module}
        for modules in (by_module.keys() - experts, by_module.keys() & experts):
            most = max((by_module[module] for module in modules), key=Counter.total, default=Counter[int]())
            others.subtract(dict.fromkeys(most, 1))
            in_use += most.total()
        asked = sorted((full[key] for key in others.elements()), reverse=True)[: config.prefetch]
        found.sizes["device", "gathered"] = rest + in_use + sum(asked)
    found.sizes["device", "bucket"] = _bucket_nbytes(config, world, joined, +trained, at_least, away, wide)
    if not at_least:
        fresh = list[tuple[int, int, Unit]]()
        for unit in (unit for unit in each.values() if unit.trained):
            layout, size = placement.layout(unit), unit.dtype.itemsize
            largest = max(layout.numels) * unit.computes.itemsize
            fresh.append((largest, layout.numel * size + largest * unit.is_widened, unit))
        # (outside of blocks the last one comes when activations have gone)
        found.sizes["device", "fresh"] = max((one if joined or unit.anchors[0] is model else block for one, block, unit in fresh), default=0)
    found.sizes["device", "buffer"] = buffers
    if +drive:
        _add_drive(found, placement, +drive, each, wide, at_least)
    found.sizes = +found.sizes  # without zeros
    return found


def _has_shadows(config: ZeroConfig) -> bool:
    """Check that updates go to other memory than the states first."""
    return config.overlap_step == "backward" or config.delay_update is not None


def _unit_sizes(
    placement: Placement, unit: Unit, param_tier: str, parts: Sequence[tuple[str, int]], streams: bool, at_least: bool
) -> Counter[tuple[str, str]]:
    """Tier and kind -> bytes of one unit between uses."""
    fields, size = {name: dtype.itemsize for name, dtype in placement.state_fields(unit)[1].items()}, unit.dtype.itemsize
    master = fields.pop("master", 0)
    rests = (param_tier, "param") if placement.in_place(unit, param_tier) is None else ("files", "in_place")  # of the user's
    sizes = Counter({rests: placement.slice_numel(unit, 3) * size})
    packed = placement.packed_nbytes(unit)  # (of a unit that is on one tier)
    for tier, numel in parts if unit.trained else ():
        memory = placement.memory_of(tier)
        sizes[tier, "master"] += numel * master
        sizes[tier, "moments"] += numel * sum(fields.values()) + packed
        sizes[tier, "grad"] += numel * size * (1 + (placement.config.delay_update is not None and not at_least))
        if param_tier != "nvme" and memory != placement.memory_of(param_tier) and not streams:
            sizes[memory, "param_copy"] += numel * size
        if _has_shadows(placement.config) and memory == "host":  # of as many as memory is left for; on the drive of all
            shadows = {tier: numel * (master + sum(fields.values())) + packed}
            rest = "nvme" if param_tier == "nvme" else "host"
            shadows[rest] = shadows.get(rest, 0) + numel * size
            for place, nbytes in shadows.items():
                sizes[place, "shadow"] += nbytes * (place == "nvme" or not at_least)
    return sizes


def _bucket_nbytes(config: ZeroConfig, world: int, joined: bool, trained: Counter[int], at_least: bool, away: bool, wide: int) -> int:
    """Gradients of whole units on their way from backward to where they rest. ``trained``: bytes of a unit -> how many there are."""
    if not trained or (world == 1 and not away):
        return 0  # the bucket is where the gradient rests
    if world > 1 and config.stage == 1:
        nbytes = sum(nbytes * count for nbytes, count in trained.items())  # full until the step
        return nbytes - nbytes // world if at_least and (joined or not away) else nbytes  # the slices come after, one by one
    if at_least:
        return 0 if joined or not away else max(trained)
    # filled, and leaving; over ranks one more, and where nothing is left behind compute, one is enough, unless all micro-batches pass a block
    in_flight = 3 if world > 1 else 1 if joined and wide == 1 else 2
    return sum(nbytes * min(count, in_flight) for nbytes, count in trained.items())


def _add_drive(
    found: Footprint, placement: Placement, drive: Counter[tuple[int, bool, int]], units: Mapping[int, Unit], wide: int, at_least: bool
) -> None:
    """Add the rest of a rank's file, and the buffers of the nvme tier: as many as it may use, or one of each sort."""
    most: Counter[str] = Counter()
    file_nbytes = 0
    for (key, is_state, numel), count in drive.items():
        size = units[key].dtype.itemsize
        ranks = placement.chunks(units[key], numel)
        largest = max((chunk for chunks in ranks for chunk, _ in chunks), default=0)
        if is_state:
            element = placement.state_nbytes(units[key])
            state = round_up(placement.largest_chunk(units[key], numel, element))
            most |= Counter(state=state, grad=round_up(wide * largest * size), written=round_up(wide * numel * size))
        else:
            element = size
            # (chunks are for the update)
            most |= Counter(param=round_up(largest * size) * units[key].trained, whole=round_up(numel * size))
        grad_nbytes = round_up(numel * placement.sum_dtype(units[key]).itemsize) if is_state else 0
        if is_state or placement.in_place(units[key], "nvme") is None:
            shadows, gradients = _has_shadows(placement.config) and units[key].trained, 1 + (placement.config.delay_update is not None)
            taken = max(sum(round_up(chunk * element + packed * is_state) for chunk, packed in chunks) for chunks in ranks)
            file_nbytes += count * ((1 + shadows) * taken + gradients * grad_nbytes)
    chunks_here, reads, writes = (1, 1, 1) if at_least else (CHUNKS_IN_MEMORY, placement.reads_ahead, GRADIENTS_IN_MEMORY + placement.handed_over)
    of_chunks = most["state"] + most["grad"] + most["param"]
    found.sizes["host", "buffer"] = chunks_here * of_chunks + reads * most["whole"] + writes * most["written"]
    found.sizes["nvme", "spare"] = file_nbytes - found.on("nvme")
    if not found.joined and not at_least:
        found.sizes["host", "staging"] = 2 * most["written"]
