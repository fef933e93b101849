"""In: a model's units, a ZeroConfig and ranks. Out: nothing, or a MemoryError: what is needed and free, and the smallest change that fits.

What is refused could not have run: needed is what cannot be done without, by the arithmetic of `zk plan`, beyond what the model holds
already. It is the larger of two: the fullest moment of construction, where units go from the model's memory to their tiers one by one, and the
fullest of a step, when all gradients are there. Activations are not known, and not counted. Host memory is free up to a container's limit, with
pages of files that the kernel would drop, and with swap, as what swaps does run. Memory that is only mapped is not needed.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zk.config import ZeroConfig
from zk.memory import free_swap, host_memory
from zk.offload.rules import Rule, rule_for
from zk.offload.scratch import sweep
from zk.offload.tiers import free_nbytes, readable
from zk.parallel.comm import MEMORY, Group, Solo
from zk.parallel.layout import Layout
from zk.plan.memory import Footprint, Kind, footprint_of
from zk.units import Unit

_MEMORIES = {"device": "device", "host": "host", "nvme": "drive"}  # and what they are called
_UNKNOWN = -1
_DEPTH = ("device", "host", "nvme")
# how often a budget is made smaller, and ranks are doubled, before that is given up
_TRIES = 8
_MOST_RANKS = 1 << 12


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
                peak[memory] = max(
                    peak[memory], ranks[memory] * before, most + (ranks[memory] - 1) * min(before, after, most)
                )
                net[memory] = after
        late = self.freed_late(config)
        for memory in ranks:
            settled = sum(n for rests in found.settled for tier, n in rests.items() if (tier if tier != "device" else here) == memory)
            peak[memory] = max(peak[memory], ranks[memory] * (net[memory] + found.on(memory) - settled - late[memory]))
        return {**peak, "nvme": self.local * found.on("nvme")}


def lacking(needed: dict[str, int], free: dict[str, int]) -> dict[str, int]:
    """Memory -> bytes that there are too few of; what is not known to be limited is not."""
    return {memory: needed[memory] - nbytes for memory, nbytes in free.items() if needed.get(memory, 0) > nbytes}


def refuse_what_cannot_fit(
    model: nn.Module,
    inner: torch.optim.Optimizer,
    units: Sequence[Unit],
    layouts: Sequence[Layout],
    config: ZeroConfig,
    comm: Solo | Group,
    device: torch.device,
    joined: bool,
) -> None:
    """Raise MemoryError, on all ranks, if what the optimizer is about to take is more than there is on any of them. Nothing is changed."""
    local = min(comm.world, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    case = Case(model, units, layouts, rule_for(inner), inner, device, joined, comm.world, local)
    paths = [os.fspath(path) for path in config.nvme_path or ()]  # type: ignore[union-attr, arg-type]
    needed, free = case.needed(config, at_least=True), free_memory(device, joined, paths)
    everywhere = torch.zeros(comm.world, 2, len(_MEMORIES), dtype=torch.int64)
    everywhere[comm.rank, 0] = torch.tensor([needed.get(memory, 0) for memory in _MEMORIES])
    everywhere[comm.rank, 1] = torch.tensor([free.get(memory, _UNKNOWN) for memory in _MEMORIES])
    comm.all_reduce(everywhere, MEMORY)
    rows = [(dict(zip(_MEMORIES, n, strict=True)), _known(f)) for n, f in everywhere.tolist()]
    short = [rank for rank, row in enumerate(rows) if lacking(*row)]
    if short:
        raise MemoryError(_refusal(case, config, rows, short))


def _known(free: Sequence[int]) -> dict[str, int]:
    return {memory: nbytes for memory, nbytes in zip(_MEMORIES, free, strict=True) if nbytes != _UNKNOWN}


# ---- what to say -------------------------------------------------------------------------------------------------------------------------


def _refusal(case: Case, config: ZeroConfig, rows: Sequence[tuple[dict[str, int], dict[str, int]]], short: Sequence[int]) -> str:
    needed, free = rows[short[0]]
    who = ""
    if case.world > 1:
        named = ", ".join(map(str, short[:8])) + (f" and {len(short) - 8} more" if len(short) > 8 else "")
        who = f" on rank{'s' * (len(short) > 1)} {named} of {case.world}"
    together = f"host and drive: for the {case.local} ranks of a machine; " if case.local > 1 else ""
    lines = [f"there is not enough memory{who} for this model with {_pasted(config, ZeroConfig()) or 'the defaults'}. Nothing has been changed."]
    lines.append(f"{'':8}{'still needed':>14}{'free':>14}")
    few = lacking(needed, free)
    for memory, name in _MEMORIES.items():
        if memory in free:
            over = f"   {readable(few[memory])} too few" if memory in few else ""
            lines.append(f"{name:8}{readable(max(0, needed[memory])):>14}{readable(free[memory]):>14}{over}")
    lines.append(
        f"({together}beyond what the model holds now, at the fullest moment; activations are not known, and come on top. check_memory=False goes "
        "on regardless)"
    )
    # what is free on all ranks
    least = {memory: min(f[memory] for _, f in rows if memory in f) for memory in _MEMORIES if any(memory in f for _, f in rows)}
    return "\n".join([*lines, *_remedies(case, config, least)])


def _remedies(case: Case, config: ZeroConfig, free: dict[str, int]) -> Iterator[str]:
    """Lines that name what would fit, the smallest change first."""
    folder, room = (config.nvme_path, free.get("nvme", 0)) if config.nvme_path else _folder(case)
    free = {**free, "nvme": room}
    tried = list(_changed(case, config, folder, free))
    chosen = next((one for one in tried if _fits(case, one, free, at_least=False)), None)
    if chosen is not None:
        yield f"The smallest change that fits: {_pasted(chosen, config)}"
    else:
        chosen = next((one for one in tried if _fits(case, one, free, at_least=True)), None)
        if chosen is not None:
            yield f"The smallest change that may fit, with nothing to spare: {_pasted(chosen, config)}"
    has_moments = config.state_dtype == torch.float32 and any(case.rule.state_names(group) for group in case.inner.param_groups)
    halved = [dataclasses.replace(one, state_dtype="bf16") for one in (config, *tried)] if has_moments else []
    smaller = next((one for one in (halved[:1] if chosen else halved) if _fits(case, one, free, at_least=False)), None)
    if smaller is not None:
        yield f"What changes results, and fits: {_pasted(smaller, config)}"
    if chosen is None and smaller is None:
        yield _nothing(case, [config, *tried], config, free)
    for one in (config, *(one for one in tried if one.stage == 3)) if chosen is None else (config,):
        ranks = _ranks(case, one, free)
        if ranks:
            change = _pasted(one, config)
            yield f"More ranks: {change or 'this'} fits from {ranks} ranks on, {case.local} to a machine with as much memory as this one"
            break


def _fits(case: Case, config: ZeroConfig, free: dict[str, int], at_least: bool, world: int | None = None) -> bool:
    try:
        return not lacking(case.needed(config, at_least, world), free)
    except ValueError:  # a budget
        return False


def _changed(case: Case, config: ZeroConfig, folder: Any, free: dict[str, int]) -> Iterator[ZeroConfig]:
    """What keeps the results: higher stages, cheaper tiers, smaller budgets, nothing asked ahead; the fewest changes first."""
    yield from _other_budgets(case, config, free)
    found: list[ZeroConfig] = []
    tiers_of = {tier: dict.fromkeys((tier, *_DEPTH)) for tier in (config.param_tier, config.optimizer_tier)}
    for stage, param_tier, optimizer_tier, prefetch in itertools.product(
        range(config.stage, 4), tiers_of[config.param_tier], tiers_of[config.optimizer_tier], {config.prefetch, 0}
    ):
        drive = config.nvme_path or (folder if {"nvme", "auto"} & {param_tier, optimizer_tier} else None)
        tiers = {"stage": stage, "param_tier": param_tier, "optimizer_tier": optimizer_tier, "prefetch": prefetch, "nvme_path": drive}
        for budgets in ({}, {"device_budget": None}, {"device_budget": None, "host_budget": None}):
            try:
                found.append(dataclasses.replace(config, **tiers, **budgets))  # type: ignore[arg-type]
                break
            except ValueError:  # these do not go together
                continue

    def size_of(one: ZeroConfig) -> tuple[int, int, int, int]:
        """Of the change: the fewest settings, and of these the fastest memory."""
        changes = _shown(one, config).keys() - {"nvme_path"}
        depth = sum(_DEPTH.index(tier) for tier in (one.param_tier, one.optimizer_tier) if tier in _DEPTH)
        return int(one.prefetch != config.prefetch), len(changes), depth, one.stage

    yield from sorted((one for one in found if one != config), key=size_of)


def _other_budgets(case: Case, config: ZeroConfig, free: dict[str, int]) -> Iterator[ZeroConfig]:
    """Budgets that are more than there is, made smaller; of what is too much for the drive, as much as there is room for in the host's memory."""
    one = config
    if "nvme" in (config.param_tier, config.optimizer_tier) and config.host_budget is None and free["host"] // case.local > 10:
        one = dataclasses.replace(config, host_budget=_rounded(free["host"] // case.local * 9 // 10))
        yield one
    for _ in range(_TRIES):
        try:
            few, found = lacking(case.needed(one, at_least=False), free), case.footprint(one, False, case.world)[1]
        except ValueError:
            break
        budgets = {"device": one.device_budget, "host": one.host_budget}
        smaller = {}
        for memory, over in few.items():
            budget, share = budgets.get(memory), case.local if memory == "host" else 1
            if isinstance(budget, int):
                smaller[f"{memory}_budget"] = _rounded(min(budget, found.on(memory)) - over // share * 9 // 8)
        if not smaller or min(smaller.values()) <= 0:
            break
        one = dataclasses.replace(one, **smaller)  # type: ignore[arg-type]
        yield one
    if "nvme" in (config.param_tier, config.optimizer_tier) and config.host_budget is not None:
        yield dataclasses.replace(config, host_budget=None)


def _rounded(nbytes: int) -> int:
    """Down, to what can be read."""
    unit = next((size for size in (1 << 30, 1 << 20, 1 << 10) if nbytes >= 10 * size), 1)
    return nbytes // unit * unit


def _ranks(case: Case, config: ZeroConfig, free: dict[str, int]) -> int:
    """The fewest ranks, more than there are, with which it fits; 0 if no number does."""
    if config.stage == 0:
        return 0
    low, high = case.world, 2 * case.world
    while not _fits(case, config, free, at_least=False, world=high):
        low, high = high, 2 * high
        if high > _MOST_RANKS:
            return 0
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _fits(case, config, free, at_least=False, world=middle) else (middle, high)
    return high


def _nothing(case: Case, tried: Sequence[ZeroConfig], config: ZeroConfig, free: dict[str, int]) -> str:
    """By how little the nearest choice fails."""
    nearest: tuple[int, ZeroConfig, dict[str, int]] | None = None
    for one in tried:
        try:
            needed = case.needed(one, at_least=True)
        except ValueError:
            continue
        over = sum(lacking(needed, free).values())
        if nearest is None or over < nearest[0]:
            nearest = over, one, needed
    assert nearest is not None, "what was refused has been asked for"
    _, one, needed = nearest
    few = lacking(needed, free)
    said = ", and ".join(f"{readable(needed[m])} of {_MEMORIES[m]}{' memory' * (m != 'nvme')} where {readable(free[m])} are free" for m in few)
    return f"Nothing that zk can do on this machine fits: the nearest, {_pasted(one, config) or 'this'}, needs at least {said}"


def _folder(case: Case) -> tuple[str, int]:
    """A folder on a drive to name in a suggestion, that with the most room, and the room."""
    from zk.doctor import filesystem  # with all that it looks at

    folders = [str(Path.cwd()), tempfile.gettempdir()]
    usable = [one for one in folders if os.access(one, os.W_OK) and filesystem(Path(one)) not in ("tmpfs", "ramfs")]
    rooms = [(free_memory(case.device, case.joined, [one])["nvme"], one) for one in usable]
    room, folder = max(rooms, key=lambda found: found[0], default=(0, folders[0]))
    return folder, room


def _shown(config: ZeroConfig, before: ZeroConfig) -> dict[str, Any]:
    """The fields that differ, as they may be written."""
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if value == getattr(before, field.name) or field.name in ("process_group", "units"):
            continue
        if isinstance(value, torch.dtype):
            value = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[value]
        elif field.name.endswith("_budget") and value is not None:
            value = next((f"{value // size}{unit}" for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20)) if value % size == 0), value)
        elif field.name == "nvme_path" and value is not None:
            value = value[0] if len(value) == 1 else list(value)
        fields[field.name] = value
    return fields


def _pasted(config: ZeroConfig, before: ZeroConfig) -> str:
    """The fields that differ, as arguments."""
    shown = _shown(config, before).items()
    return ", ".join(f"{name}={json.dumps(value) if isinstance(value, str) else repr(value)}" for name, value in shown)
