"""Bytes and places of an optimizer's training state on this rank."""

from __future__ import annotations

from collections import Counter
from typing import Any

from zk.core.placement import Place


def nbytes_of(optimizer: Any) -> Counter[tuple[str, str]]:
    """Bytes of this rank's training state now, by tier and kind."""
    found = Counter[tuple[str, str]]()
    for held in optimizer.held:
        for kind, nbytes in held.nbytes.items():
            found["device" if kind == "gathered" else held.param_tier, kind] += nbytes
        for tier, kind, nbytes in held.shard.nbytes if held.shard is not None else ():
            found[tier, kind] += nbytes
    on_cpu = optimizer.held[0].unit.device.type == "cpu"
    found["host" if on_cpu and optimizer.config.optimizer_tier != "device" else "device", "grad"] += optimizer.grads.nbytes
    if optimizer.assembly.stream is not None:
        found["device", "buffer"] += optimizer.assembly.stream.nbytes
    if "nvme" in optimizer.tiers:
        found["host", "buffer"] += optimizer.tiers["nvme"].spill.buffer_nbytes
    return found


def placed_of(optimizer: Any) -> list[Place]:
    """The place of each unit, as it was chosen."""
    placed = []
    for held in optimizer.held:
        sections = held.shard.sections if held.shard else ()
        parts = tuple((section.tier, section.numel) for section in sections if section.state.chunks)
        placed.append(Place(held.param_tier, parts, any(section.stream is not None for section in sections)))
    return placed
