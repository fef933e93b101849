"""Bytes that training takes of each memory, and the refusal of what cannot fit."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zk.config import ZeroConfig, pasted
from zk.core.checks import check_state_dtype
from zk.core.memory import free_addresses, free_swap, host_memory, in_memory
from zk.core.placement import Place, Placement
from zk.core.units import Unit
from zk.offload.rules import Rule
from zk.offload.scratch import sweep
from zk.offload.tiers import free_nbytes, readable
from zk.parallel.comm import MEMORY

MEMORIES = {"device": "device", "host": "host", "nvme": "drive"}  # and their names in messages
CPU = torch.device("cpu")
Nbytes = dict[str, int]  # memory -> bytes


@dataclasses.dataclass(slots=True)
class Footprint:
    """Bytes of one rank at the fullest point of a step, without activations.

    ``sizes`` has the kinds of ``metrics()``, and "bucket" (gradients on their way), "fresh" (those
    that autograd makes) and "spare" (room on the drive for sums of gradients in fp32).
    """

    joined: bool  # the device's memory is the host's
    sizes: Counter[tuple[str, str]]  # by tier and kind

    def on(self, memory: str, kind: str | None = None) -> int:
        """Bytes of a kind, or of all, in "device", "host" or "nvme" memory."""
        names = {"device": "host"} if self.joined else {}
        kinds = ((names.get(tier, tier), name, n) for (tier, name), n in self.sizes.items())
        return sum(n for tier, name, n in kinds if tier == memory and kind in (None, name))


def footprint_of(
    model: nn.Module, units: Sequence[Unit], config: ZeroConfig, world: int, joined: bool,
    rules: Sequence[Rule], groups: Sequence[Mapping[str, Any]], device: torch.device = CPU,
    at_least: bool = False, placed: Sequence[Place] | None = None,
) -> Footprint:  # fmt: skip
    """Bytes of training ``units`` of ``model`` (meta or real) on one of ``world`` ranks.

    ``rules`` are those of the optimizer's ``groups``. Alike units may be one object, many times.
    "auto" tiers without budgets ask ``device`` for free memory. ``at_least`` counts only what no
    step can do without. ``placed`` has the place of each unit; None computes them.

    Raises ValueError for budgets that are too small, as ZeroOptimizer does.
    """
    placement = Placement(config, world, rules, groups, joined)
    placed = placed or placement.tiers_of(units, device)
    sizes, trained, blocks, outside, fresh = Counter[Any](), Counter[int](), Counter[int](), 0, 0
    counts = Counter(zip(units, placed, strict=True))
    for (unit, place), count in counts.items():
        for where, nbytes in _unit_sizes(placement, unit, place, at_least).items():
            sizes[where] += count * nbytes
        layout, grad = placement.layout(unit), unit.computes.itemsize
        if placement.partitions(unit, place.param_tier):
            full, in_block = layout.numel * grad, unit.anchors[0] is not model
            blocks[full] += count * in_block
            outside += count * full * (not in_block)
        if unit.trained:
            trained[layout.numel * unit.dtype.itemsize] += count
            fresh = max(fresh, (max(layout.numels) if joined else layout.numel) * grad)
            stream = placement.stream_nbytes(unit, place.parts) * place.streams
            sizes["device", "buffer"] = max(sizes["device", "buffer"], stream)
    rests = {tier for (tier, kind), nbytes in sizes.items() if kind == "grad" and nbytes}
    away = any(tier == "nvme" or placement.memory_of(tier) != placement.on_device for tier in rests)
    sizes["device", "bucket"] = _bucket(placement, trained, at_least, away)
    if at_least:
        sizes["device", "gathered"] = (max if away else min)(+blocks, default=0)
    else:  # the block in use, and those that are gathered ahead
        ahead = sorted(blocks.elements(), reverse=True)[: 1 + config.prefetch]
        sizes["device", "gathered"], sizes["device", "fresh"] = outside + sum(ahead), fresh
        on_drive = {unit for unit, place in counts if "nvme" in (place[0], *dict(place.parts))}
        sizes["host", "buffer"] += placement.buffer_nbytes(on_drive)
    return Footprint(joined, +sizes)


def _unit_sizes(placement: Placement, unit: Unit, place: Place, at_least: bool) -> Counter[Any]:
    """Bytes of one unit between uses, by tier and kind."""
    fields = {name: kind.itemsize for name, kind in placement.state_fields(unit)[1].items()}
    master, size, config = fields.pop("master", 0), unit.dtype.itemsize, placement.config
    is_delayed, param_tier = config.delay_update is not None, place.param_tier
    is_copied = placement.in_place(unit, param_tier) is None  # not read from the user's files
    where = (param_tier, "param") if is_copied else ("files", "in_place")
    sizes = Counter({where: placement.slice_numel(unit, 3) * size})
    for tier, numel in place.parts if unit.trained else ():
        memory, grads = placement.memory_of(tier), numel * (1 + (is_delayed and not at_least))
        moments = numel * sum(fields.values()) + placement.packed_nbytes(unit)
        sizes[tier, "master"] += numel * master
        sizes[tier, "moments"] += moments
        sizes[tier, "grad"] += grads * size
        sizes["nvme", "spare"] += (
            grads * (placement.sum_dtype(unit).itemsize - size) * (tier == "nvme")
        )
        is_apart = param_tier != "nvme" and memory != placement.memory_of(param_tier)
        sizes[memory, "param_copy"] += numel * size * (is_apart and not place.streams)
        if memory == "host" and (is_delayed or config.overlap_step == "backward"):
            param_at = "nvme" if param_tier == "nvme" else "host"
            for rest, nbytes in ((tier, numel * master + moments), (param_at, numel * size)):
                sizes[rest, "shadow"] += nbytes * (rest == "nvme" or not at_least)
    return sizes


def _bucket(placement: Placement, trained: Counter[int], at_least: bool, away: bool) -> int:
    """Bytes of gradients of whole units on their way. ``trained``: bytes of a unit -> units."""
    world = placement.world
    if world == 1 and not away:
        return 0  # the bucket is where the gradient rests
    if world > 1 and placement.config.stage == 1:  # full until the step
        nbytes = sum(nbytes * count for nbytes, count in trained.items())
        return nbytes - nbytes // world * at_least  # the slices come after, one by one
    in_flight = 0 if at_least else 3 if world > 1 else 1 if placement.joined else 2
    return sum(nbytes * min(count, in_flight) for nbytes, count in trained.items())


def refuse_what_cannot_fit(optimizer: Any, units: Sequence[Unit], local: int) -> None:
    """Raise MemoryError, on all ranks, if ``units`` take more than is free. Changes nothing.

    ``local`` ranks share the memory and the drive of this machine.
    """
    config, comm, ranks = optimizer.config, optimizer.comm, optimizer.everyone.world
    paths = [os.fspath(path) for path in config.nvme_path or ()]
    free = free_memory(optimizer.device, optimizer.transfer.joined, paths)
    found = needed(optimizer, units, local, config, at_least=True), free
    everywhere = torch.zeros(comm.world, 2, len(MEMORIES), dtype=torch.int64)
    everywhere[comm.rank] = torch.tensor([[n.get(name, -1) for name in MEMORIES] for n in found])
    comm.all_reduce(everywhere, MEMORY)
    rows = [[dict(zip(MEMORIES, n, strict=True)) for n in row] for row in everywhere.tolist()]
    short = [rank for rank, row in enumerate(rows) if lacking(*row)]
    if not short:
        return
    total, free = rows[short[0]]
    who = f" on rank{'s' * (len(short) > 1)} {', '.join(map(str, short))} of {ranks}" * (ranks > 1)
    options = pasted(config, ZeroConfig()) or "the defaults"
    lines = [
        f"there is not enough memory{who} for this model with {options}. Nothing has been changed.",
        f"{'':8}{'still needed':>14}{'free':>14}",
    ]
    for name in (name for name, nbytes in free.items() if nbytes >= 0):
        over, size = lacking(total, free).get(name, 0), readable(max(0, total[name]))
        said = f"   {readable(over)} too few" * (over > 0)
        lines.append(f"{MEMORIES[name]:8}{size:>14}{readable(free[name]):>14}{said}")
    shared = f"host and drive: for the {local} ranks of a machine; " * (local > 1)
    lines.append(
        f"({shared}beyond what the model holds now; activations come on top. "
        "check_memory=False skips this check)"
    )
    free = {name: min(there[name] for _, there in rows) for name in free}
    raise MemoryError("\n".join([*lines, *_remedies(optimizer, units, local, free)]))


def lacking(total: Nbytes, free: Nbytes) -> Nbytes:
    """Bytes too few, by memory. Free bytes of -1 are not limited."""
    return {name: total[name] - n for name, n in free.items() if 0 <= n < total.get(name, 0)}


def free_memory(device: torch.device, joined: bool, paths: Sequence[str]) -> Nbytes:
    """Bytes that can still be had of the host, the device if it has its own, and of ``paths``.

    Swap and a container's limit count. What dead runs left in the paths is removed first.
    """
    free = {"host": min(host_memory()[1] + free_swap(), free_addresses())}
    if not joined:
        free["device"] = free_nbytes(device)
    if paths and all(map(os.path.isdir, paths)):
        rooms, drives = [], [os.stat(path).st_dev for path in paths]
        for path, drive in zip(paths, drives, strict=True):
            sweep(path)
            found = os.statvfs(path)
            blocks = found.f_bavail if os.geteuid() else found.f_bfree  # the rest is root's
            rooms.append(blocks * found.f_frsize // drives.count(drive))
        free["nvme"] = len(paths) * min(rooms)
    return free


def needed(
    optimizer: Any, units: Sequence[Unit], local: int, config: ZeroConfig, at_least: bool = False
) -> Nbytes:
    """Bytes beyond what is held now, by memory: of the device for one rank, else for ``local``.

    They are those of a step, or of a unit whose initial values are being made.
    """
    model, joined = optimizer.model, optimizer.transfer.joined
    where = config, optimizer.comm.shards, joined, optimizer.rules, optimizer.param_groups
    found = footprint_of(model, units, *where, optimizer.device, at_least)
    here, most, held = "host" if joined else "device", 0, 0
    for unit in units:
        most = max(most, held + unit.numel * unit.widest.itemsize)
        held -= sum(param.nbytes for param in unit.params if not param.is_meta)
    states = (its for inner in optimizer.inners for its in inner.state.values())
    tensors: list[Any] = [value for its in states for value in its.values()]
    tensors += [one for unit in units for param in unit.params for one in (param, param.grad)]
    tensors += [one for one in model.buffers() if optimizer.stored[one] != one.dtype]
    kept = (one for one in tensors if isinstance(one, Tensor) and one.layout is torch.strided)
    freed = Counter[str]()
    for one in {one.untyped_storage()._cdata: one for one in kept if not one.is_meta}.values():
        apart = not joined and one.device.type == optimizer.device.type
        freed["device" if apart else "host"] += one.untyped_storage().nbytes()
    for one in model.buffers():  # those without memory are yet to be made
        freed[here] -= one.numel() * optimizer.stored[one].itemsize * one.is_meta
    host, device = found.on("host") - freed["host"], found.on("device") - freed["device"]
    total = {"host": local * host, "device": device, "nvme": local * found.on("nvme")}
    return {**total, here: max(total[here], most)}


def _remedies(optimizer: Any, units: Sequence[Unit], local: int, free: Nbytes) -> Iterator[str]:
    """Lines that name the standard changes which fit: tiers, 8-bit state, then budgets."""
    config, folders = optimizer.config, (os.getcwd(), tempfile.gettempdir())
    if not (path := config.nvme_path):
        usable = (one for one in folders if os.access(one, os.W_OK) and not in_memory(Path(one)))
        path = next(usable, folders[0])
        drives = free_memory(optimizer.device, optimizer.transfer.joined, [path])
        free = {**free, "nvme": drives["nvme"]}
    drive: dict[str, Any] = {"optimizer_tier": "nvme", "nvme_path": path}
    host = {"optimizer_tier": "host", "nvme_path": path if config.param_tier == "nvme" else None}
    whole = {"stage": 3, "param_tier": "host"}
    tiers = [host, {**host, **whole, "nvme_path": None}, drive, drive | whole]
    tiers.append({**drive, **whole, "param_tier": "nvme"})
    few = lacking(needed(optimizer, units, local, config), free)
    budgets = {name: getattr(config, f"{name}_budget", None) or 0 for name in few}
    rooms = {name: n - few[name] * 9 // 8 for name, n in budgets.items() if n}
    if "nvme" in few:  # what is too much for the drive may stay in host memory
        rooms["host"] = free["host"] // local * 9 // 10
    steps = {name: 1 << max(10, n.bit_length() - 6) for name, n in rooms.items()}  # to be read
    budget = {f"{name}_budget": n // steps[name] * steps[name] for name, n in rooms.items()}

    def fitting(changed: Sequence[dict[str, Any]], **more: str) -> Iterator[str]:
        for change in changed:
            with contextlib.suppress(ValueError):  # of options that do not go together
                one = dataclasses.replace(config, **change, **more)  # type: ignore[arg-type]
                if more:
                    rules = optimizer.rules, optimizer.param_groups, optimizer.stored
                    check_state_dtype(one.state_dtype, *rules)
                if one != config and not lacking(needed(optimizer, units, local, one), free):
                    yield f"    {pasted(one, config)}{' (changes results)' * bool(more)}"

    coded = itertools.islice(fitting([{}, *tiers], state_dtype="8bit"), 1)
    found = [*itertools.islice(fitting(tiers), 2), *coded, *fitting([budget])]
    yield (
        "What fits instead:"
        if found
        else "No other tier, state or budget fits: use more memory or ranks"
    )
    yield from found
