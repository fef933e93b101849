"""In: a Footprint and the rates of a machine. Out: the time of a step, phase by phase, and what it waits for."""

from __future__ import annotations

import dataclasses

import torch

from zk.plan.memory import Footprint, Machine
from zk.plan.shape import Shape

# of one training step, for each parameter and token: forward 2, backward 4, and forward again within backward (checkpointing) 2
_FORWARD, _BACKWARD = 2, 6

Times = dict[str, float]  # resource -> seconds it is busy


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """Expected seconds of a step, and the resource that most of them are spent on: compute, link, cpu, disk or ranks."""

    seconds: float
    bound: str
    busy: Times  # all phases together
    phases: dict[str, float]  # forward, backward, update
    overlap_step: bool


def length(times: Times, units: int) -> float:
    """Of a phase whose resources work beside one another: the longest, and a tail of one unit of each of the others."""
    longest = max(times.values())
    return longest + (sum(times.values()) - longest) / units


def step_of(shape: Shape, found: Footprint, machine: Machine, tokens: int, overlap_step: bool = False) -> Step:
    """The model of docs/guides/overlap.md: in each phase the slowest resource decides. Not counted: the device's own update,
    attention beyond its matrix products, and whatever waits for a cold cache.

    Args:
        tokens: that a rank computes in a step.
        overlap_step: the update runs beside the next forward; with an accelerator, as on a CPU both are the same cores.
    """
    config = found.config
    assert isinstance(config.dtype, torch.dtype)
    size, world, local = config.dtype.itemsize, machine.world, machine.per_machine
    full = size * shape.num_params
    state = sum(nbytes for (tier, kind), nbytes in found.sizes.items() if tier == "nvme" and kind in ("master", "moments"))
    on_drive = found.updated["nvme"] * size  # gradients, or parameters, of what is updated from the drive
    away = 0 if machine.joined else (found.updated["host"] + found.updated["nvme"]) * size
    # parameters that come over the link for each use; those of the drive come through host memory
    uploaded = 0 if machine.joined or not found.partitioned else found.resting["host"] + found.resting["nvme"]
    # after the update: what rests on the device
    returned = 0 if machine.joined else sum(nbytes for (tier, kind), nbytes in found.sizes.items() if (tier, kind) == ("host", "param_copy"))
    share = (world - 1) / world
    gather = full * share  # all parameters to a rank, or all gradients from it

    link, disk, fabric = 1e9 * machine.link_gbps, 1e9 * machine.disk_gbps / local, 1e9 * machine.fabric_gbps
    flops = shape.num_params * tokens / (1e12 * machine.tflops)
    early = config.stage != 1
    forward = {
        "compute": _FORWARD * flops,
        "link": uploaded / link,
        "disk": found.resting["nvme"] / disk,
        "ranks": gather * (config.stage == 3) / fabric,
    }
    backward = {
        "compute": _BACKWARD * flops,
        "link": max(uploaded, away * early) / link,
        "disk": (found.resting["nvme"] + on_drive * early) / disk,
        "ranks": gather * ((config.stage == 3) + early + (config.stage == 0)) / fabric,
    }
    updated_here = found.updated["host"] + found.updated["nvme"] + (found.updated["device"] if machine.joined else 0)
    update = {
        "link": max(returned, away * (not early)) / link,
        "cpu": updated_here * local / (1e9 * machine.cpu_adam),
        "disk": (on_drive * (1 + (not early)) + 2 * found.resting["nvme"] + 2 * state) / disk,
        "ranks": gather * ((not early) + (config.stage in (1, 2))) / fabric,
    }
    units = sum(units.count for units in shape.units)
    if overlap_step:
        both = {name: forward.get(name, 0.0) + update.get(name, 0.0) for name in {**forward, **update}}
        parts = {"backward": backward, "update and forward": both}
    else:
        parts = {"forward": forward, "backward": backward, "update": update}
    phases = {name: length(times, units) for name, times in parts.items()}
    blame: Times = {}
    for name, times in parts.items():
        worst = max(times, key=lambda resource: times[resource])
        blame[worst] = blame.get(worst, 0.0) + phases[name]
    busy = {name: sum(times.get(name, 0.0) for times in parts.values()) for name in ("compute", "link", "cpu", "disk", "ranks")}
    return Step(sum(phases.values()), max(blame, key=lambda resource: blame[resource]), busy, phases, overlap_step)
