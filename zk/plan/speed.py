"""A machine, and the time of a step there, phase by phase."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping

import torch

from zk.config import ZeroConfig
from zk.plan.footprint import Footprint
from zk.plan.shape import Shape

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

    def lacks(self, found: Footprint) -> dict[str, int]:
        """Memory -> bytes that there are too few of; empty if all fits."""
        over = {tier: found.on(tier) - self.capacity(tier) for tier in USABLE}
        return {tier: nbytes for tier, nbytes in over.items() if nbytes > 0}


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """Expected seconds of a step, and the resource that most of them are spent on: compute, link, cpu, disk or ranks."""

    seconds: float
    bound: str
    busy: dict[str, float]  # resource -> seconds, in all phases together
    phases: dict[str, float]  # forward, backward, update


def length(times: Mapping[str, float], units: int) -> float:
    """Seconds of a phase whose resources work at once: the longest of ``times``, and a tail of one unit of each of the others."""
    longest = max(times.values())
    return longest + (sum(times.values()) - longest) / units


def step_of(shape: Shape, found: Footprint, config: ZeroConfig, machine: Machine, tokens: int, overlap_step: bool = False) -> Step:
    """The model of docs/guides/overlap.md: in each phase the slowest resource decides.

    The device's own update, attention beyond its matrix products, and waits for a cold cache are not counted.

    Args:
        tokens: that a rank computes in a step.
        overlap_step: the update runs in the background of the next forward; with an accelerator, as on a CPU both are the same cores.
    """
    assert isinstance(config.dtype, torch.dtype)
    size, stage, drive = config.dtype.itemsize, config.stage, found.sizes["nvme", "param"]
    early = stage != 1  # gradients leave in backward
    grads = found.sizes["host", "grad"] + found.sizes["nvme", "grad"]
    written = found.sizes["nvme", "grad"]
    state = found.sizes["nvme", "master"] + found.sizes["nvme", "moments"]
    away, uploaded, returned = 0, 0, 0
    if not machine.joined:
        away, returned = grads, found.sizes["host", "param_copy"]  # returned: after the update, what rests on the device
        # what comes over the link for each use; parameters of the drive come through host memory
        uploaded = found.sizes["host", "param"] + drive if found.sizes["device", "gathered"] else 0
    updated = (grads + machine.joined * found.sizes["device", "grad"]) // size
    stored, changed = (sum(units.stored_nbytes(size) for units in shape.units if units.trained or not only) for only in (False, True))
    gather, reduced = (nbytes * (machine.world - 1) // machine.world for nbytes in (stored, changed))  # to a rank, and all gradients from it
    operations = shape.num_active * tokens
    # operations of forward: 2 for each parameter and token. Of backward: 2, 2 for each that is trained, and forward again (checkpointing)
    forward = Counter(compute=2 * operations, link=uploaded, disk=drive, ranks=gather * (stage == 3))
    backward = Counter(
        compute=4 * operations + 2 * operations * shape.num_trained // shape.num_params,
        link=max(uploaded, away * early),
        disk=drive + written * early,
        ranks=gather * (stage == 3) + reduced * (early + (stage == 0)),
    )
    update = Counter(
        link=max(returned, away * (not early)),
        cpu=updated,
        disk=written * (1 + (not early)) + 2 * drive * changed // stored + 2 * state,
        ranks=reduced * ((not early) + (stage in (1, 2))),
    )
    work = {"forward": forward, "backward": backward, "update": update}
    if overlap_step:
        work = {"backward": backward, "update and forward": forward + update}
    rates = {
        "compute": 1e12 * machine.tflops,
        "link": 1e9 * machine.link_gbps,
        "cpu": 1e9 * machine.cpu_adam / machine.per_machine,
        "disk": 1e9 * machine.disk_gbps / machine.per_machine,
        "ranks": 1e9 * machine.fabric_gbps,
    }
    phases: dict[str, float] = {}
    blame = dict.fromkeys(rates, 0.0)
    busy = dict.fromkeys(rates, 0.0)
    for phase, amounts in work.items():
        times = {resource: amounts[resource] / rate for resource, rate in rates.items()}
        phases[phase] = length(times, sum(units.count for units in shape.units))
        blame[max(times, key=lambda resource: times[resource])] += phases[phase]
        busy = {resource: seconds + times[resource] for resource, seconds in busy.items()}
    return Step(sum(phases.values()), max(blame, key=lambda resource: blame[resource]), busy, phases)
