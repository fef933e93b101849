"""Refusal, before anything is changed, of a model that cannot fit in the memory that is free, with the smallest change that does."""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import itertools
import json
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zk.config import ZeroConfig
from zk.core.checks import check_state_dtype
from zk.core.memory import free_addresses, free_swap, host_memory
from zk.core.placement import places_of
from zk.core.units import Unit
from zk.core.words import some
from zk.offload.rules import Rule
from zk.offload.scratch import sweep
from zk.offload.tiers import free_nbytes, readable
from zk.parallel.comm import MEMORY, Comm
from zk.tools.doctor import in_memory
from zk.tools.plan.footprint import Footprint, footprint_of

MEMORIES = {"device": "device", "host": "host", "nvme": "drive"}  # and their names
_DEPTH = ("device", "host", "nvme")
# how often a budget is made smaller, and the most ranks that are tried
_TRIES = 8
_MOST_RANKS = 1 << 12
# for how many changes ranks are counted: each is asked about a dozen times
_ASKED = 4

Nbytes = dict[str, int]  # memory -> bytes


def refuse_what_cannot_fit(case: Case, config: ZeroConfig, comm: Comm) -> None:
    """Raise MemoryError, on all ranks, if the optimizer is about to take more than there is on any of them. Nothing is changed."""
    paths = [os.fspath(path) for path in config.nvme_path or ()]  # type: ignore[union-attr, arg-type]
    needed, free = case.needed(config, at_least=True), free_memory(case.device, case.joined, paths)
    everywhere = torch.zeros(comm.world, 2, len(MEMORIES), dtype=torch.int64)
    everywhere[comm.rank] = torch.tensor([[found.get(memory, -1) for memory in MEMORIES] for found in (needed, free)])
    comm.all_reduce(everywhere, MEMORY)
    rows = [[{memory: n for memory, n in zip(MEMORIES, found, strict=True) if n >= 0} for found in row] for row in everywhere.tolist()]
    short = [rank for rank, row in enumerate(rows) if lacking(*row)]
    if short:
        raise MemoryError("\n".join(_refusal(case, config, rows, short)))


def lacking(needed: Nbytes, free: Nbytes) -> Nbytes:
    """Memory -> bytes that there are too few of. A memory that is not known to be limited is not lacking."""
    return {memory: needed[memory] - nbytes for memory, nbytes in free.items() if needed.get(memory, 0) > nbytes}


def free_memory(device: torch.device, joined: bool, paths: Sequence[str]) -> Nbytes:
    """Bytes that can still be had of each memory: "device" if it is not the host's (``joined``), "host", "nvme" if there are ``paths``.

    Host memory is free up to a container's limit, with pages of files that the kernel would drop, and with swap. Remains of runs that have
    ended are removed from the paths first, as this run would do.
    """
    free = {"host": min(host_memory()[1] + free_swap(), free_addresses())}
    if not joined:
        free["device"] = free_nbytes(device)
    if paths and all(os.path.isdir(path) for path in paths):
        rooms = []
        for path in paths:
            sweep(path)
            found = os.statvfs(path)
            blocks = found.f_bavail if os.geteuid() else found.f_bfree  # what is reserved is root's
            rooms.append(blocks * found.f_frsize)
        drives = [os.stat(path).st_dev for path in paths]  # stripes on one drive share its room
        free["nvme"] = len(paths) * min(room // drives.count(drive) for room, drive in zip(rooms, drives, strict=True))
    return free


@dataclasses.dataclass(slots=True)
class Case:
    """A model that is about to be taken over.

    Args:
        model, stored, units: as for ZeroOptimizer.
        groups, rules: of the user's optimizers, and the rule of each group.
        states: what these optimizers have already, by parameter.
        device, joined: where the model computes, and whether that memory is the host's.
        world: ranks that partition the states.
        local: how many share this machine's host memory and drive.
        ranks: in all.
    """

    model: nn.Module
    stored: Mapping[Tensor, torch.dtype]
    units: Sequence[Unit]
    groups: Sequence[Mapping[str, Any]]
    rules: Sequence[Rule]
    states: Sequence[Mapping[Any, Mapping[str, Any]]]
    device: torch.device
    joined: bool
    world: int
    local: int
    ranks: int
    freed: list[Counter[str]] = dataclasses.field(init=False)
    kinds: list[Unit] = dataclasses.field(init=False)  # for each unit, the first one like it

    def __post_init__(self) -> None:
        self.freed = self._freed()
        group_of = {param: number for number, group in enumerate(self.groups) for param in group["params"]}
        firsts: dict[Any, Unit] = {}
        self.kinds = []
        for unit, freed in zip(self.units, self.freed, strict=False):
            params = tuple((param.shape, group_of.get(user)) for param, user in zip(unit.params, unit.users, strict=True))
            alike = params, unit.widest, unit.dtype, unit.is_widened, unit.trained, unit.anchors[0] is self.model, tuple(sorted(freed.items()))
            self.kinds.append(firsts.setdefault((*alike, places_of(unit) is None), unit))

    def _freed(self) -> list[Counter[str]]:
        """Memory -> bytes given back with each unit: parameters, and gradients of another precision. The last entry is what goes with a step.

        A storage goes with the last that uses it. Gradients that have their precision already, and old optimizer state, go with a step.
        """
        last: dict[int, tuple[int, str, int]] = {}

        def use(tensor: Any, number: int) -> None:
            if not isinstance(tensor, Tensor) or tensor.is_meta:
                return
            parts = [tensor._indices(), tensor._values()] if tensor.layout is torch.sparse_coo else [tensor]
            for storage in (part.untyped_storage() for part in parts if part.layout is torch.strided):
                memory = "device" if not self.joined and tensor.device.type == self.device.type else "host"
                last[storage._cdata] = max(last.get(storage._cdata, (0, "", 0)), (number, memory, storage.nbytes()))

        for number, unit in enumerate(self.units):
            for param in unit.params:
                use(param, number)
                if param.grad is not None:
                    use(param.grad, number if param.grad.dtype != unit.dtype else len(self.units))
        for value in itertools.chain.from_iterable(entry.values() for state in self.states for entry in state.values()):
            use(value, len(self.units))
        for buffer in self.model.buffers():
            if self.stored[buffer] != buffer.dtype:
                use(buffer, len(self.units))
        freed: list[Counter[str]] = [Counter() for _ in range(len(self.units) + 1)]
        for number, memory, nbytes in last.values():
            freed[number][memory] += nbytes
        return freed

    def footprint(self, config: ZeroConfig, at_least: bool, world: int | None = None) -> Footprint:
        """Bytes of one rank of ``world``."""
        rules, groups = self.rules, self.groups
        return footprint_of(self.model, self.kinds, config, world or self.world, self.joined, rules, groups, self.device, at_least)

    def needed(self, config: ZeroConfig, at_least: bool, world: int | None = None) -> Nbytes:
        """Memory -> bytes beyond what is held now: of the device for one rank, of host and drive for all ranks on this machine.

        That is the fullest moment of construction, where units go from the model's memory to their tiers one by one, or of a step, when all
        gradients are there. Activations are not counted.

        Args:
            at_least: the bytes that cannot be done without; else all, with all buffers.
            world: another number of ranks, as many on each machine.

        Raises ValueError where budgets do not do, as ZeroOptimizer does.
        """
        found = self.footprint(config, at_least, world)
        here = "host" if self.joined else "device"
        ranks = {"host": self.local, "device": 1}
        net, peak = Counter[str](), Counter[str]()
        for buffer in self.model.buffers():
            if buffer.is_meta:  # made before any unit, then cast
                peak[here] = max(peak[here], ranks[here] * net[here] + buffer.nbytes)
                net[here] += buffer.numel() * self.stored[buffer].itemsize
        each = zip(self.kinds, found.units, self.freed, strict=False)
        for _, run in itertools.groupby(each, key=lambda one: id(one[1])):  # neighbours that are alike
            (unit, rests, freed), *others = run
            widest = unit.widest.itemsize  # initial values come so
            initial = rests.numel * widest
            stay = widest == unit.dtype.itemsize and not rests.gathered  # in the buffer of initial values
            made = initial if rests.gathered or stay else initial + rests.numel * unit.dtype.itemsize
            for memory, count in ranks.items():
                grows = rests.nbytes.get(memory, 0) - freed[memory]
                for held in (net[memory], net[memory] + len(others) * grows):  # the first or the last of them is the fullest moment
                    before, after = held + made * (memory == here), held + grows
                    most = after + initial * (memory == here and not stay)
                    # when one rank is at its fullest, others may be there, or just before or after
                    peak[memory] = max(peak[memory], count * before, most + (count - 1) * min(before, after, most))
                net[memory] = after
        for memory, count in ranks.items():
            gradients = found.on(memory) - sum(rests.nbytes.get(memory, 0) for rests in found.units)
            peak[memory] = max(peak[memory], count * (net[memory] + gradients - self.freed[-1][memory]))
        return {**peak, "nvme": self.local * found.on("nvme")}

    def fits(self, config: ZeroConfig, free: Nbytes, at_least: bool = False, world: int | None = None) -> bool:
        """Tell if ``free`` is enough."""
        try:
            return not lacking(self.needed(config, at_least, world), free)
        except ValueError:  # a budget
            return False


# ---- the refusal in words ----------------------------------------------------------------------------------------------------------------


def _refusal(case: Case, config: ZeroConfig, rows: Sequence[Sequence[Nbytes]], short: Sequence[int]) -> Iterator[str]:
    """Lines of the error. ``rows``: needed and free by rank; ``short``: the ranks that have too little."""
    needed, free = rows[short[0]]
    who = ""
    if case.ranks > 1:
        who = f" on rank{'s' * (len(short) > 1)} {some(short, 8)} of {case.ranks}"
    yield f"there is not enough memory{who} for this model with {_pasted(config, ZeroConfig()) or 'the defaults'}. Nothing has been changed."
    yield f"{'':8}{'still needed':>14}{'free':>14}"
    few = lacking(needed, free)
    for memory, nbytes in free.items():
        over = f"   {readable(few[memory])} too few" if memory in few else ""
        yield f"{MEMORIES[memory]:8}{readable(needed.get(memory, 0)):>14}{readable(nbytes):>14}{over}"
    yield (
        f"({f'host and drive: for the {case.local} ranks of a machine; ' if case.local > 1 else ''}beyond what the model holds now, at the fullest "
        "moment; activations are not known, and come on top. check_memory=False goes on regardless)"
    )
    least = {memory: min(there[memory] for _, there in rows if memory in there) for memory in free}  # on all ranks
    yield from _remedies(case, config, least)


def _remedies(case: Case, config: ZeroConfig, free: Nbytes) -> Iterator[str]:
    """Lines that name what would fit, the smallest change first."""
    folder, room = (config.nvme_path, free.get("nvme", 0)) if config.nvme_path else _folder(case)
    free = {**free, "nvme": room}
    tried = [*_budgets(case, config, free), *_changed(config, folder)]
    for at_least, words in ((False, "fits"), (True, "may fit, with nothing to spare")):
        chosen = next((one for one in tried if case.fits(one, free, at_least)), None)
        if chosen is not None:
            yield f"The smallest change that {words}: {_pasted(chosen, config)}"
            break
    dtypes = list(_smaller_states(case, config))
    others = (dataclasses.replace(one, state_dtype=dtype) for dtype in dtypes for one in (config, *tried[: 0 if chosen else None]))
    smaller = next((one for one in others if case.fits(one, free)), None)
    if smaller is not None:
        yield f"What changes results, and fits: {_pasted(smaller, config)}"
    elif chosen is None:
        yield _nothing(case, config, tried, free)
    for one in (config, *[one for one in tried if one.stage == 3][: 0 if chosen else _ASKED]):
        ranks = first(lambda world, one=one: case.fits(one, free, world=world), case.world, _MOST_RANKS) if one.stage else None  # type: ignore[misc]
        if ranks is not None:
            change = _pasted(one, config) or "this"
            ranks *= case.ranks // case.world
            yield f"More ranks: {change} fits from {ranks} ranks on, {case.local} to a machine with as much memory as this one"
            break


def _smaller_states(case: Case, config: ZeroConfig) -> Iterator[torch.dtype]:
    """Dtypes of optimizer state that take less, and that the optimizers can have."""
    assert isinstance(config.state_dtype, torch.dtype)
    for dtype in (torch.bfloat16, torch.uint8):
        with contextlib.suppress(ValueError):
            check_state_dtype(dtype, case.rules, case.groups, case.stored)
            if dtype.itemsize < config.state_dtype.itemsize:
                yield dtype


def _nothing(case: Case, config: ZeroConfig, tried: Sequence[ZeroConfig], free: Nbytes) -> str:
    """The choice that fails by the least."""
    found = []
    for one in (config, *tried):
        if case.fits(one, {}, at_least=True):  # its budgets do
            needed = case.needed(one, at_least=True)
            found.append((sum(lacking(needed, free).values()), one, needed))
    _, one, needed = min(found, key=lambda choice: choice[0])
    said = ", and ".join(
        f"{readable(needed[memory])} of {MEMORIES[memory]}{' memory' * (memory != 'nvme')} where {readable(free[memory])} are free"
        for memory in lacking(needed, free)
    )
    return f"Nothing that zk can do on this machine fits: the nearest, {_pasted(one, config) or 'this'}, needs at least {said}"


def _budgets(case: Case, config: ZeroConfig, free: Nbytes) -> Iterator[ZeroConfig]:
    """Smaller budgets, by what there is too few of. What is too much for the drive stays in the host's memory, as far as there is room."""
    one, on_drive = config, "nvme" in (config.param_tier, config.optimizer_tier)
    if on_drive and config.host_budget is None and free["host"] // case.local > 10:
        one = dataclasses.replace(config, host_budget=_rounded(free["host"] // case.local * 9 // 10))
        yield one
    for _ in range(_TRIES):
        try:
            few, found = lacking(case.needed(one, at_least=False), free), case.footprint(one, at_least=False)
        except ValueError:  # a budget
            break
        smaller: dict[str, Any] = {}
        for memory, ranks in (("device", 1), ("host", case.local)):
            budget = getattr(one, f"{memory}_budget")
            if budget is not None and memory in few:
                smaller[f"{memory}_budget"] = _rounded(min(budget, found.on(memory)) - few[memory] // ranks * 9 // 8)
        if not smaller or min(smaller.values()) <= 0:
            break
        one = dataclasses.replace(one, **smaller)
        yield one
    if on_drive and config.host_budget is not None:
        yield dataclasses.replace(config, host_budget=None)


def _rounded(nbytes: int) -> int:
    """Down, to what can be read."""
    unit = next((size for size, least in ((1 << 30, 10 << 30), (1 << 20, 1 << 20)) if nbytes >= least), 1 << 10)
    return nbytes // unit * unit


def _changed(config: ZeroConfig, folder: Any) -> list[ZeroConfig]:
    """Changes that keep the results: higher stages, cheaper tiers, nothing gathered ahead; the fewest settings first, then the fastest memory."""
    found: dict[tuple[Any, ...], ZeroConfig] = {}
    tiers_of = [dict.fromkeys((tier, *_DEPTH)) for tier in (config.param_tier, config.optimizer_tier)]
    for stage, *tiers, prefetch in itertools.product(range(config.stage, 4), *tiers_of, {config.prefetch, 0}):
        drive = config.nvme_path or (folder if {"nvme", "auto"} & {*tiers} else None)
        fields: dict[str, Any] = {"stage": stage, "param_tier": tiers[0], "optimizer_tier": tiers[1], "nvme_path": drive, "prefetch": prefetch}
        for dropped in ((), ("device_budget",), ("device_budget", "host_budget")):
            try:
                one = dataclasses.replace(config, **fields | dict.fromkeys(dropped))
            except ValueError:  # these do not go together
                continue
            depth = sum(_DEPTH.index(tier) for tier in tiers if tier in _DEPTH)
            found[prefetch != config.prefetch, len(changes(one, config).keys() - {"nvme_path"}), depth, stage, *tiers] = one
            break
    return [found[size] for size in sorted(found) if found[size] != config]


def _folder(case: Case) -> tuple[str, int]:
    """A folder on a drive to name in a suggestion, the one with the most room, and the room."""
    folders = [str(Path.cwd()), tempfile.gettempdir()]
    usable = [one for one in folders if os.access(one, os.W_OK) and not in_memory(Path(one))]
    rooms = {one: free_memory(case.device, case.joined, [one])["nvme"] for one in usable} or {folders[0]: 0}
    return max(rooms.items(), key=lambda found: found[1])


def changes(config: ZeroConfig, before: ZeroConfig) -> dict[str, Any]:
    """The fields that differ, as they may be written."""
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if value == getattr(before, field.name) or field.name in ("process_group", "units"):
            continue
        if isinstance(value, torch.dtype):
            value = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.uint8: "8bit"}[value]
        elif field.name.endswith("_budget") and value is not None:
            sizes = {"GiB": 1 << 30, "MiB": 1 << 20, "KiB": 1 << 10}
            value = next((f"{value // size}{unit}" for unit, size in sizes.items() if value % size == 0), value)
        elif field.name == "nvme_path" and value is not None:
            value = value[0] if len(value) == 1 else list(value)
        fields[field.name] = value
    return fields


def _pasted(config: ZeroConfig, before: ZeroConfig) -> str:
    """The fields that differ, as arguments."""
    fields = changes(config, before).items()
    return ", ".join(f"{name}={json.dumps(value) if isinstance(value, str) else repr(value)}" for name, value in fields)


def first(holds: Callable[[int], bool], after: int, most: int) -> int | None:
    """The smallest number above ``after`` from which on something holds, found by doubling and halving; None beyond about ``most``."""
    step = 1
    while not holds(after + step):
        step *= 2
        if step > most:
            return None
    return bisect.bisect_left(range(after + step), True, lo=after + step // 2 + 1, key=holds)
