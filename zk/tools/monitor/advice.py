"""Advice for a run that waits: a ``host_budget`` of what is free, for the drive; ``overlap_step``, for updates; and the seconds that it would save.

Waits for other ranks get none: what is counted does not tell a slow connection from a rank that has more to do.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from zk.core.memory import host_memory
from zk.core.placement import Placement
from zk.tools.monitor.rates import Rates, spent
from zk.tools.monitor.summary import nbytes_of, placed_of, rows_of, sizes_of, traffic_of
from zk.tools.monitor.words import seconds, size
from zk.tools.plan.speed import length

_LEAST = 0.05  # of the time, to be worth a word
_USABLE = 0.8  # of the memory that is free
_FORWARD = 1 / 4  # of compute, as zk.tools.plan counts it: backward computes forward again

Advice = dict[str, Any]  # change: what to write; effect: what it would do; uses: of the time, that it shortens; seconds: of a step, at most


def advice_of(optimizer: Any, rates: Rates) -> Advice | None:
    """The change that would save most of a step; None if none is known that would save a twentieth."""
    found = [one for one in (_larger_budget(optimizer, rates), _background(optimizer, rates)) if one is not None]
    return max(found, key=lambda one: _saved(one, rates.last), default=None)


def sentence(found: Advice | None, rates: Mapping[str, float]) -> str:
    """Advice in words, with what it would save of a step with these rates; empty where that is not worth a word."""
    if found is None or _saved(found, rates) <= _LEAST * rates.get("step_s", 0.0):
        return ""
    return f"{found['change']} {found['effect']}, and save up to {seconds(_saved(found, rates))} of a step"


def _saved(found: Advice, rates: Mapping[str, float]) -> float:
    """Seconds of a step; no more than now go into what it shortens."""
    shares = spent(rates)
    return min(float(found["seconds"]), rates.get("step_s", 0.0) * sum(shares[use] for use in found["uses"]))


def _background(optimizer: Any, rates: Rates) -> Advice | None:
    """Updates in the background of forward, or of backward too; the planner's seconds of both at once. None where compute uses the same cores."""
    config, shares, step_s = optimizer.config, spent(rates.last), rates.last.get("step_s", 0.0)
    if optimizer.transfer.joined or config.optimizer_tier == "device" or config.overlap_step == "backward" or config.delay_update is not None:
        return None
    uses = ["wait_update"] if config.overlap_step else ["update", "wait_link"]
    exposed, compute = (step_s * share for share in (sum(shares[use] for use in uses), shares["compute"]))
    is_long = bool(config.overlap_step) or exposed > _FORWARD * compute
    beside = {"update": exposed, "compute": compute if is_long else _FORWARD * compute}
    change = 'overlap_step="backward"' if is_long else "overlap_step=True"
    effect = f"would update behind {'backward and ' * is_long}the next forward"
    saved = sum(beside.values()) - length(beside, len(optimizer.held))
    return {"change": change, "effect": effect, "uses": uses, "seconds": saved}


def _larger_budget(optimizer: Any, rates: Rates) -> Advice | None:
    """A larger ``host_budget``. The planner places all units anew with it; what then need not move, at the rates of the drive, are the seconds."""
    config, ranks = optimizer.config, rates.ranks
    is_fixed = "auto" not in (config.param_tier, config.optimizer_tier) or None not in (config.device_budget, config.host_budget)
    if rates.last.get("wait_drive_share", 0.0) < _LEAST or not {"read", "write"} <= rates.drive.keys() or not is_fixed:
        return None
    (whole, free), placed = host_memory(), placed_of(optimizer)
    sizes = sizes_of(optimizer, placed)
    used = sum(row.get("host", 0) for row in rows_of(optimizer, nbytes_of(optimizer)).values())
    needed = sum(nbytes for (tier, kind), nbytes in sizes.items() if tier in ("host", "nvme") and kind not in ("buffer", "spare"))
    unit = 1 << 30 if whole >= 8 << 30 else 64 << 20
    budget = min(int(used + _USABLE * free / ranks) // unit, needed // unit + 1) * unit
    if budget <= (config.host_budget or 0):
        return None
    larger, groups = dataclasses.replace(config, host_budget=budget), optimizer.param_groups
    placement = Placement(larger, optimizer.comm.shards, optimizer.rules, groups, optimizer.transfer.joined)
    try:
        moved = placement.tiers_of([held.unit for held in optimizer.held], optimizer.device)
    except ValueError:  # too little even for the buffers
        return None
    each = [(placed, sizes), (moved, sizes_of(optimizer, moved))]
    now, then = (traffic_of(optimizer, *one) for one in each)
    kept = [sum(nbytes for (tier, kind), nbytes in sizes.items() if tier == "nvme" and kind != "spare") for _, sizes in each]
    saved = ranks * ((now.read - then.read) / rates.drive["read"] + (now.written - then.written) / rates.drive["write"])
    written = f"{budget >> 30}GiB" if budget % (1 << 30) == 0 else f"{budget >> 20}MiB"
    effect = f"would keep {size(kept[0] - kept[1])} more off the drive"
    return {"change": f'host_budget="{written}"', "effect": effect, "uses": ["wait_drive"], "seconds": saved} if saved > 0 else None
