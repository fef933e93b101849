"""A machine, and the time of a step there, phase by phase."""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Mapping

import torch

from zk.config import ZeroConfig
from zk.offload.streamed import update_seconds
from zk.tools.plan.footprint import Footprint
from zk.tools.plan.shape import Shape

# of each kind of memory, what training may take; the rest is for the system, the context and libraries of a GPU, and fragmentation
USABLE = {"device": 0.92, "host": 0.9, "nvme": 1.0}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Memory, ranks and rates. Rates of the CPU, of host memory and of the drive are a machine's, shared by its ranks; the others a rank's own."""

    gpu_nbytes: int | None  # of each rank; None: no accelerator, so that the device's memory is the host's
    ram_nbytes: int
    nvme_nbytes: int
    world: int = 1
    per_machine: int = 1  # ranks
    tflops: float = 100.0  # 1e12 operations/s that the model's matrix products reach
    link_gbps: float = 20.0  # 1e9 bytes/s between host and device, each way
    cpu_adam: float = 2.5  # 1e9 parameters/s; what two cores do (README)
    memory_gbps: float | None = None  # 1e9 bytes/s of the host's memory, reads and writes together; None: what the CPU update takes of it
    disk_gbps: float = 3.0  # 1e9 bytes/s, reads and writes together
    fabric_gbps: float = 20.0  # 1e9 bytes/s between ranks
    network_gbps: float | None = None  # of them, between ranks of different machines; None: as fabric_gbps
    tensor: int = 1  # ranks that divide each block; neighbours
    replicas: int = 1  # times that the states are there; furthest from each other

    @property
    def joined(self) -> bool:
        return self.gpu_nbytes is None

    @property
    def shards(self) -> int:
        """Ranks that partition the states."""
        return self.world // (self.tensor * self.replicas)

    @property
    def update_rates(self) -> dict[str, float]:
        """Of a rank, as ``zk.offload.streamed.best_share`` takes them."""
        host = {"cpu": 1e9 * self.cpu_adam / self.per_machine, "memory": 1e9 * (self.memory_gbps or 0) / self.per_machine}
        return host | dict.fromkeys(("up", "down"), 1e9 * self.link_gbps)

    def crossing(self, nbytes: int, ranks: int, stride: int) -> tuple[int, int]:
        """Bytes that come to a rank from its machine, and from other machines, where it has one of ``ranks`` parts and gets the others'.

        ``stride``: how far these ranks are from each other.
        """
        here = min(ranks, max(1, self.per_machine // stride))
        return nbytes * (here - 1) // ranks, nbytes * (ranks - here) // ranks

    def capacity(self, tier: str) -> int:
        """Bytes of a rank that training may take; without an accelerator "host" is also the device's."""
        nbytes = {"device": self.gpu_nbytes or 0, "host": self.ram_nbytes // self.per_machine, "nvme": self.nvme_nbytes // self.per_machine}
        return int(USABLE[tier] * nbytes[tier])

    def lacks(self, found: Footprint) -> dict[str, int]:
        """Memory -> bytes that there are too few of; empty if all fits."""
        return +Counter({tier: found.on(tier) - self.capacity(tier) for tier in USABLE})


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """Expected seconds of a step, and the resource that most of them are spent on: compute, link, cpu, disk, ranks or tensor."""

    seconds: float
    bound: str
    busy: dict[str, float]  # resource -> seconds, in all phases together
    phases: dict[str, float]  # forward, backward, update
    sent: dict[str, int]  # bytes that come to a rank from others: "within" its machine, and "between" machines
    moved: dict[str, int]  # bytes over the link, the busier way, and read from and written to the drive: "link", "disk"

    @property
    def of_no_offload(self) -> float:
        """The speed, as a share of that of a device which has room for everything, and only computes, at the same rate."""
        return self.busy["compute"] / self.seconds


def length(times: Mapping[str, float], units: int) -> float:
    """Seconds of a phase whose resources work at once: the longest of ``times``, and a tail of one unit of each of the others."""
    longest = max(times.values())
    return longest + (sum(times.values()) - longest) / units


def longest(amounts: Mapping[str, int], rates: Mapping[str, float]) -> float:
    """Seconds of the resource that takes most."""
    return max((amount / rates[resource] for resource, amount in amounts.items()), default=0.0)


def _beside(busy: Mapping[str, int], other: Mapping[str, int], rates: Mapping[str, float]) -> float:
    """The part of ``other`` that can be done in the time that ``busy`` takes, by what it leaves of each resource."""
    seconds = longest(busy, rates)
    return min(((seconds * rates[resource] - busy[resource]) / amount for resource, amount in other.items() if amount), default=1.0)


def step_of(
    shape: Shape,
    found: Footprint,
    config: ZeroConfig,
    machine: Machine,
    tokens: int,
    overlap_step: bool | str = False,
    micro_batches: int = 1,
    vertical: bool = False,
    shadows: float = 1.0,
) -> Step:
    """The model of docs/guides/overlap.md: in each phase the slowest resource decides.

    The device's own arithmetic in the update, attention beyond its matrix products, and waits for
    a cold cache are not counted. Compute waits for each sum over tensor parallel ranks: two of a block's activations in forward, two in
    backward, two where forward is computed again, and one at either end.

    Args:
        tokens: that a rank computes in a step, its part of the model if ranks are tensor parallel.
        overlap_step: the update runs in the background of the next forward; with "backward" from backward on, as much of it as has ended when
            backward does, without clipping. With an accelerator: on a CPU both are the same cores.
        micro_batches: that the tokens come in.
        vertical: all of them pass a block before any passes the next (``accumulate``); else one after the other.
        shadows: the part of the update that there is memory for beside the states, with "backward".
    """
    assert isinstance(config.dtype, torch.dtype) and isinstance(config.grad_accum_dtype, torch.dtype) and config.computes is not None
    shape = shape.part(machine.tensor)
    size, activation, stage, drive = config.dtype.itemsize, config.computes.itemsize, config.stage, found.sizes["nvme", "param"]
    early = stage != 1  # gradients leave in backward
    passes, wide = 1 if vertical else micro_batches, config.grad_accum_dtype.itemsize // size if micro_batches > 1 else 1
    grads = found.sizes["host", "grad"] + found.sizes["nvme", "grad"]
    written = wide * found.sizes["nvme", "grad"]
    state = found.sizes["nvme", "master"] + found.sizes["nvme", "moments"]
    away, uploaded, returned = 0, 0, 0
    if not machine.joined:
        away, returned = grads, found.sizes["host", "param_copy"]  # returned: after the update, what rests on the device
        # what comes over the link for each use; parameters of the drive come through host memory
        uploaded = found.sizes["host", "param"] + drive if found.sizes["device", "gathered"] else 0
    updated = (grads + machine.joined * found.sizes["device", "grad"]) // size
    share, speed = config.streamed_share * (not machine.joined), machine.update_rates
    kept = (found.sizes["host", "master"] + found.sizes["host", "moments"] + state) // max(1, updated)
    back = kept + size * bool(found.sizes["host", "param"] + drive)
    by_host, up, down = update_seconds(share, speed, back, kept, size, returned / max(1, updated), wide)
    stored, changed = (sum(units.stored_nbytes(size) for units in shape.units if units.trained or not only) for only in (False, True))

    def exchanged(gathers: int, reductions: int, is_averaged: bool, sums: int) -> dict[str, int]:
        """Bytes of collectives, those between machines as many as take as long within one.

        They are of all parameters or gradients, of the gradients' mean over replicas, and of activations.
        """
        rows = gathers * stored + reductions * changed
        shard = changed // size // machine.shards
        zero = [machine.crossing(rows, machine.shards, machine.tensor)]
        # fp32 to those who sum, and sums in the gradients' precision back
        zero += [machine.crossing(is_averaged * (4 + size) * shard, machine.replicas, machine.tensor * machine.shards)]
        tensor = machine.crossing(2 * sums * tokens * shape.width * activation, machine.tensor, 1)
        for within, between in (*zero, tensor):
            sent["within"] += within
            sent["between"] += between
        slower = machine.fabric_gbps / (machine.network_gbps or machine.fabric_gbps)
        *of_zero, of_tensor = (within + round(slower * between) for within, between in (*zero, tensor))
        return {"ranks": sum(of_zero), "tensor": of_tensor}

    sent = {"within": 0, "between": 0}
    operations = shape.num_active * tokens
    # operations of forward: 2 for each parameter and token. Of backward: 2, 2 for each that is trained, and forward again (checkpointing)
    forward = Counter(
        compute=2 * operations,
        up=passes * uploaded,
        disk=passes * drive,
        **exchanged(passes * (stage == 3), 0, False, 2 * shape.layers + 1),
    )
    backward = Counter(
        compute=4 * operations + 2 * operations * shape.num_trained // shape.num_params,
        up=passes * uploaded,
        down=away * early * (wide if vertical else passes),
        disk=passes * drive + written * early * (2 * passes - 1),  # what is added to is read before
        **exchanged(passes * (stage == 3), (early + (stage == 0)) * (wide if vertical else passes), early, 4 * shape.layers + 1),
    )
    update = Counter(
        up=round(updated * up * speed["up"]),
        down=max(round(updated * down * speed["down"]), away * (not early)),
        cpu=round(updated * by_host * speed["cpu"]),
        disk=written * (1 + (not early)) + 2 * drive * changed // stored + 2 * state,
        **exchanged(False, (not early) + (stage in (1, 2)), not early, 0),
    )
    rates = {
        "compute": 1e12 * machine.tflops,
        "up": speed["up"],
        "down": speed["down"],
        "cpu": speed["cpu"],
        "disk": 1e9 * machine.disk_gbps / machine.per_machine,
        "ranks": 1e9 * machine.fabric_gbps,
        "tensor": 1e9 * machine.fabric_gbps,
    }
    work, at_least = {"forward": forward, "backward": backward, "update": update}, 0.0
    if overlap_step:
        work = {"backward": backward, "update and forward": forward + update}
    if overlap_step == "backward" and early:
        # what is published, or goes up to where it rests, waits for the norm
        alone = Counter(cpu=update["cpu"], up=update["up"] - returned, down=update["down"], disk=update["disk"])
        part = min(shadows, _beside(backward, alone, rates))
        begun = Counter({resource: int(part * amount) for resource, amount in alone.items()})
        after = update - begun
        if config.device_budget is None and not uploaded:  # no room on the device: what it has updated comes back when it counts
            after["up"] += round(part * share * updated * size)
        work = {
            "backward": backward + begun,
            "update and forward": forward + after,
        }
        # forward begins with the units that are left, and comes to the others after their updates
        at_least = longest(alone - begun, rates) + part * longest(forward, rates)
    phases: dict[str, float] = {}
    blame, busy = defaultdict[str, float](float), defaultdict[str, float](float)
    for phase, amounts in work.items():
        times = {resource: amounts[resource] / rate for resource, rate in rates.items()}
        times["link"] = max(times.pop("up"), times.pop("down"))  # which is busy both ways at once
        together = {**times, "compute": times["compute"] + times["tensor"], "tensor": 0.0}
        phases[phase] = max(length(together, sum(units.count for units in shape.units)), at_least * (phase == "update and forward"))
        slowest = max(together, key=lambda resource: together[resource])
        blame["tensor" if slowest == "compute" and times["tensor"] > times["compute"] else slowest] += phases[phase]
        for resource, taken in times.items():
            busy[resource] += taken
    total = sum(work.values(), Counter[str]())
    moved = {"link": max(total["up"], total["down"]), "disk": total["disk"]}
    return Step(sum(phases.values()), max(blame, key=lambda resource: blame[resource]), busy, phases, sent, moved)
