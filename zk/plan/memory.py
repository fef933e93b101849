"""In: a model's shape, a ZeroConfig and a machine. Out: Footprint, the bytes of one rank by tier and kind. The optimizer's own arithmetic."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from zk.assemble import Assembly
from zk.config import ZeroConfig
from zk.offload.rules import AdamRule, Rule
from zk.offload.spill import FileGrads, FileHome, FileStore, Spill, chunks_of
from zk.offload.streams import Joined
from zk.offload.tiers import CHUNKS_IN_MEMORY, place
from zk.offload.transfer import Transfer
from zk.offload.worker import Worker
from zk.parallel.comm import Solo
from zk.parallel.layout import Layout
from zk.plan.shape import Shape, Units
from zk.units import Unit

CPU = torch.device("cpu")
# of each kind of memory, what training may take; the rest is for the system, the context and libraries of a GPU, and fragmentation
USABLE = {"device": 0.92, "host": 0.9, "nvme": 1.0}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Memory, ranks and rates. Rates of the CPU and the drive are a machine's, shared by its ranks; the others a rank's own."""

    gpu_nbytes: int | None  # of each rank; None: no accelerator, so that the device's memory is the host's
    ram_nbytes: int
    nvme_nbytes: int
    world: int = 1
    per_machine: int = 1  # ranks
    tflops: float = 100.0  # 1e12 operations/s that the model's matrix products reach
    link_gbps: float = 20.0  # 1e9 bytes/s between host and device, each way
    cpu_adam: float = 2.5  # 1e9 parameters/s; what two cores do (README)
    disk_gbps: float = 3.0  # 1e9 bytes/s, reads and writes together
    fabric_gbps: float = 20.0  # 1e9 bytes/s between ranks

    @property
    def joined(self) -> bool:
        return self.gpu_nbytes is None

    def capacity(self, tier: str) -> int:
        """Bytes of a rank that training may take; without an accelerator "host" is also the device's."""
        nbytes = {"device": self.gpu_nbytes or 0, "host": self.ram_nbytes // self.per_machine, "nvme": self.nvme_nbytes // self.per_machine}
        return int(USABLE[tier] * nbytes[tier])


@dataclasses.dataclass(slots=True)
class Footprint:
    """Bytes of one rank at the fullest point of a step."""

    config: ZeroConfig
    joined: bool
    # (tier, kind) -> bytes, with the names of ZeroOptimizer.metrics(), and beyond them: "bucket" (gradients before they are reduced), "fresh"
    # (gradients of one unit, as autograd makes them), "staging" (gradients between device and drive), "spare" (room on the drive for
    # gradients in fp32), "activations" (an estimate)
    sizes: Counter[tuple[str, str]] = dataclasses.field(default_factory=Counter)
    updated: Counter[str] = dataclasses.field(default_factory=Counter)  # tier -> elements whose optimizer state is there
    resting: Counter[str] = dataclasses.field(default_factory=Counter)  # tier -> bytes of parameters
    partitioned: bool = False  # parameters are full only while in use
    # for each unit, in order: tier -> bytes that stay there between steps, without gradients; and whether it is full only while in use
    settled: list[Counter[str]] = dataclasses.field(default_factory=list)
    gathers: list[bool] = dataclasses.field(default_factory=list)

    def on(self, tier: str) -> int:
        """Bytes of all kinds in one memory; without an accelerator the device's are the host's."""
        memory = {"device": "host"} if self.joined else {}
        return sum(nbytes for (name, _), nbytes in self.sizes.items() if memory.get(name, name) == tier)

    def missing(self, machine: Machine) -> dict[str, int]:
        """Memory -> bytes that it has too few; empty if all fits."""
        over = {tier: self.on(tier) - machine.capacity(tier) for tier in ("device", "host", "nvme")}
        return {tier: nbytes for tier, nbytes in over.items() if nbytes > 0}


class _Rank(Solo):
    """One of many, of which nobody is there."""

    def __init__(self, world: int) -> None:
        self.world = world


class _Apart(Joined):
    """A device that is not there, with memory of its own."""

    joined = False


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Kind:
    """Units that are alike, of which one is there."""

    unit: Unit
    layout: Layout
    count: int
    rest: bool  # outside of blocks


_Piece = tuple[Kind, bool, int]  # optimizer state (or else parameters) of so many elements
_Placed = tuple[Kind, str, tuple[tuple[str, int], ...]]  # the tier of parameters, and tiers of so many elements of optimizer state each


def _unit(units: Units, dtype: torch.dtype) -> Unit:
    """A unit of these sizes, without memory."""
    params = [nn.Parameter(torch.empty(numel, device="meta"), requires_grad=units.trained) for numel in units.numels]
    return Unit("", [], params, [], units.trained, dtype, CPU)


def footprint(shape: Shape, config: ZeroConfig, machine: Machine, tokens: int = 0) -> Footprint:
    """Bytes of training ``shape`` with AdamW on each rank, for ``tokens`` tokens of activations (none: 0).

    With "auto" tiers the config must have both budgets, as what is free on this machine is not asked. Raises ValueError where the budgets
    do not do, as ZeroOptimizer does.
    """
    if "auto" in (config.param_tier, config.optimizer_tier) and None in (config.device_budget, config.host_budget):
        raise ValueError("a plan of 'auto' tiers needs device_budget and host_budget; got " + repr((config.device_budget, config.host_budget)))
    if not isinstance(config.dtype, torch.dtype):
        raise ValueError("a plan needs to know the precision of parameters, and dtype is None; give dtype='bf16'")
    kinds = [Kind(_unit(units, config.dtype), Layout.of(units.numels, machine.world), units.count, units.rest) for units in shape.units]
    group = {"params": [param for kind in kinds for param in kind.unit.params]}
    found = footprint_of(kinds, config, machine.world, machine.joined, AdamRule(decoupled=True), [group])
    if tokens:
        found.sizes["device", "activations"] = activations_nbytes(shape, tokens, config.dtype.itemsize)
    return found


def footprint_of(
    kinds: Sequence[Kind],
    config: ZeroConfig,
    world: int,
    joined: bool,
    rule: Rule,
    groups: Sequence[Mapping[str, Any]],
    device: torch.device = CPU,
    at_least: bool = False,
    order: Sequence[int] | None = None,
) -> Footprint:
    """Bytes of training units on each rank.

    Args:
        kinds: the units; layouts are for ``world`` ranks.
        joined: the device's memory is the host's.
        rule, groups: the optimizer's.
        device: what "auto" tiers without budgets ask for free memory.
        at_least: only what a step that uses all parameters cannot do without at once, where the number of buffers depends on timing.
        order: the number of each unit's kind, in the model's order; without it they come kind after kind.
    """
    transfer = Transfer((Joined if joined else _Apart)(CPU), None, config.overlap)
    assembly = Assembly(config, _Rank(world), rule, 1, groups, CPU, transfer, Worker("zk plan"))
    found = Footprint(config, joined)
    expanded = [kind for kind in kinds for _ in range(kind.count)] if order is None else [kinds[number] for number in order]
    buffers = assembly.buffer_nbytes([kind.unit for kind in kinds], [kind.layout for kind in kinds]) if config.nvme_path else None
    needs = {kind: assembly.needs(kind.unit, kind.layout) for kind in kinds}
    placed = place(
        config.param_tier,
        config.optimizer_tier,
        [needs[kind] for kind in expanded],
        config.stage,
        device,
        config.device_budget,  # type: ignore[arg-type]
        config.host_budget,  # type: ignore[arg-type]
        buffers,
    )

    drive: Counter[_Piece] = Counter()
    gathered: list[Kind] = []
    leaves = False  # some gradient rests elsewhere than where it is made
    # what is alike and goes to the same tiers is counted at once
    alike = [(kind, param_tier, tuple(parts)) for kind, (param_tier, parts) in zip(expanded, placed, strict=True)]
    rests_of: dict[_Placed, Counter[str]] = {}
    in_use: set[_Placed] = set()  # what is full only then
    for one, count in Counter(alike).items():
        kind, param_tier, parts = one
        fields, size = assembly.state_fields(kind.unit)[1], kind.unit.dtype.itemsize
        memory, rests = _memory(param_tier, joined), Counter[str]()
        found.sizes[param_tier, "param"] += count * needs[kind].param_nbytes
        found.resting[param_tier] += count * needs[kind].param_nbytes
        rests[param_tier] += needs[kind].param_nbytes
        if config.stage == 3 and (world > 1 or param_tier == "nvme" or memory != _memory("device", joined)):
            gathered += [kind] * count
            in_use.add(one)
        if param_tier == "nvme":
            drive[kind, False, assembly.slice_numel(kind.layout, 1)] += count
        for tier, elements in parts if kind.unit.trained else ():
            found.updated[tier] += count * elements
            master = fields["master"].itemsize if "master" in fields else 0
            moments = sum(field.itemsize for field in fields.values()) - master
            found.sizes[tier, "master"] += count * elements * master
            found.sizes[tier, "moments"] += count * elements * moments
            found.sizes[tier, "grad"] += count * elements * size
            rests[tier] += elements * (master + moments)
            leaves |= tier == "nvme" or _memory(tier, joined) != _memory("device", joined)
            if param_tier != "nvme" and memory != _memory(tier, joined):
                found.sizes[_memory(tier, joined), "param_copy"] += count * elements * size
                rests[_memory(tier, joined)] += elements * size
            if tier == "nvme":
                drive[kind, True, elements] += count
        rests_of[one] = rests
    found.settled = [rests_of[one] for one in alike]
    found.partitioned = bool(gathered)
    found.gathers = [one in in_use for one in alike]
    if gathered:
        found.sizes["device", "gathered"] = _gathered(gathered, config.prefetch, at_least, leaves)
    found.sizes.update(_buckets(config, world, joined, kinds, at_least, leaves))
    if not at_least:
        # (outside of blocks the last one comes when activations have gone)
        found.sizes["device", "fresh"] = max(
            (max(kind.layout.numels) * kind.unit.dtype.itemsize if kind.rest else _flat(kind) for kind in kinds if kind.unit.trained), default=0
        )
    if drive:
        found.sizes["host", "buffer"] = _buffers(drive, assembly, at_least)
        found.sizes["nvme", "spare"] = _file_nbytes(drive, assembly) - sum(nbytes for (tier, _), nbytes in found.sizes.items() if tier == "nvme")
        if not joined and not at_least:
            found.sizes["host", "staging"] = 2 * max((numel * kind.unit.dtype.itemsize for kind, is_state, numel in drive if is_state), default=0)
    found.sizes += Counter()  # without zeros
    return found


def _flat(kind: Kind) -> int:
    """Bytes of a whole unit."""
    return kind.layout.numel * kind.unit.dtype.itemsize


def _gathered(kinds: list[Kind], prefetch: int, at_least: bool, leaves: bool) -> int:
    """Parameters that are full at once: the blocks in use and asked for, and what is outside of blocks."""
    sizes = sorted((_flat(kind) for kind in kinds if not kind.rest), reverse=True)
    if at_least:  # when the last gradient has been made, one unit at least is there; the largest is, at some time
        return max(map(_flat, kinds)) if leaves else min(map(_flat, kinds))
    return sum(_flat(kind) for kind in kinds if kind.rest) + sum(sizes[: prefetch + 1])


def _buffers(drive: Counter[_Piece], assembly: Assembly, at_least: bool) -> int:
    """Of the nvme tier, as NVMeTier makes them: as many as it may use, or one of each sort, which is what it cannot do without."""
    state = part = param = whole = written = 0
    for kind, is_state, numel in drive:
        size = kind.unit.dtype.itemsize
        chunk = max((one.stop - one.start for one in chunks_of(numel)), default=0)
        if is_state:
            state = max(state, chunk * sum(dtype.itemsize for dtype in assembly.state_fields(kind.unit)[1].values()))
            part, written = max(part, chunk * size), max(written, numel * size)
        else:
            param, whole = max(param, chunk * size), max(whole, numel * size)
    if at_least:
        return state + whole + written
    return CHUNKS_IN_MEMORY * (state + part + param) + assembly.reads_ahead * whole + 2 * written


def _file_nbytes(drive: Counter[_Piece], assembly: Assembly) -> int:
    """Of a rank's file on the drive: the reservations of the nvme tier, one of each kind."""
    spill = Spill(_unopened)
    nbytes = 0
    for (kind, is_state, numel), count in drive.items():
        chunks, before = chunks_of(numel), spill.nbytes
        if is_state:
            FileStore(spill, chunks, assembly.state_fields(kind.unit)[1])
            FileGrads(spill, chunks, assembly.transfer, assembly.worker, 1)
        else:
            FileHome(spill, chunks, kind.unit.dtype)
        nbytes += count * (spill.nbytes - before)
    return nbytes


def _unopened(nbytes: int, starts: Iterable[int]) -> Any:
    raise AssertionError("a plan opens no file")


def _memory(tier: str, joined: bool) -> str:
    """Where what is on a tier is worked on."""
    return "device" if tier == "device" and not joined else "host"


def _buckets(config: ZeroConfig, world: int, joined: bool, kinds: Sequence[Kind], at_least: bool, leaves: bool) -> dict[tuple[str, str], int]:
    """Gradients on their way from backward to where they rest, of whole units."""
    trained = [kind for kind in kinds if kind.unit.trained]
    if not trained or (world == 1 and not leaves):
        return {}  # the bucket is where the gradient rests
    if world > 1 and config.stage == 1:
        nbytes = sum(kind.count * _flat(kind) for kind in trained)  # full until the step
        if at_least and (joined or not leaves):
            nbytes -= nbytes // world  # the slices come after, one by one
        return {("device", "bucket"): nbytes}
    if at_least:
        return {} if joined or not leaves else {("device", "bucket"): max(map(_flat, trained))}
    # filled, and leaving; over ranks one more, and where nothing is left behind compute, one is enough
    in_flight = 3 if world > 1 else 1 if joined else 2
    return {("device", "bucket"): sum(min(kind.count, in_flight) * _flat(kind) for kind in trained)}


def activations_nbytes(shape: Shape, tokens: int, size: int = 2) -> int:
    """Estimate activations: inputs of all blocks (checkpointing), one block that is computed again, and the logits.

    Inside a block: two norms, queries, keys, values, their mix and the output. Of its MLP, the tensors that backward needs and the gradients
    of its product or activation, three times what is inside. Attention keeps no matrix of scores. Of the logits: themselves, and their
    log-softmax and two gradients in fp32.
    """
    block = 8 * shape.width + 3 * shape.ffn
    return tokens * (size * (shape.width * shape.layers + block) + (size + 12) * shape.vocab)
