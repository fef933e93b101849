"""Advice for a run that waits for its drive: the host memory that is free, as a ``host_budget``, and the seconds that this would save."""

from __future__ import annotations

import dataclasses
from typing import Any

from zk.memory import host_memory, ranks_here
from zk.monitor.rates import Rates
from zk.monitor.summary import nbytes_of, placed_of, rows_of, sizes_of, traffic_of
from zk.placement import Placement

_LEAST = 0.05  # of the time, to be worth a word
_USABLE = 0.8  # of the memory that is free


def advice_of(optimizer: Any, rates: Rates) -> dict[str, float] | None:
    """A larger ``host_budget``, the ``nbytes`` that it would keep off the drive, and the seconds of the drive that a step would save (``drive_s``).

    The planner places all units anew with that budget; what then need not move, at the rates that were measured, are the seconds. None if the run
    does not wait for its drive, or no more fits.
    """
    config, ranks = optimizer.config, ranks_here(optimizer.everyone.world)
    is_fixed = "auto" not in (config.param_tier, config.optimizer_tier) or None not in (config.device_budget, config.host_budget)
    if rates.last.get("wait_drive_share", 0.0) < _LEAST or rates.drive is None or not is_fixed:
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
    return {"host_budget": budget, "nbytes": kept[0] - kept[1], "drive_s": saved} if saved > 0 else None
