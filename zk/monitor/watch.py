"""A run while it trains, for ``python -m zk watch``: memory by tier, where the time of a step goes, rates, and advice."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from zk.monitor.progress import rates_line
from zk.monitor.runfile import SPENT, find, read, state_of
from zk.monitor.words import bar, duration, seconds, size

USES = {
    "compute": "compute",
    "update": "update",
    "wait_drive": "waiting for the drive",
    "wait_link": "waiting for the link",
    "wait_ranks": "waiting for ranks",
    "wait_update": "waiting for the update",
    "wait_save": "waiting for a save",
    "wait_other": "other waits",
}
"""Uses of the time of a step, as people call them."""


def spent(rates: Mapping[str, float]) -> dict[str, float]:
    """The share of the time for each use of it, of an interval's rates."""
    found = {name: rates.get(f"{name}_share", 0.0) for name in SPENT[1:]}
    return {"compute": max(0.0, 1 - sum(found.values())), **found}


def advice(run: Mapping[str, Any]) -> str:
    """One sentence: what would make a step shorter, and by how much at most; empty if nothing is known that would."""
    found, rates = run["advice"], run["rates"]
    if not found or "step_s" not in rates:
        return ""
    budget, waited = found["host_budget"], rates.get("wait_drive_share", 0.0) * rates["step_s"]
    written = f"{budget >> 30}GiB" if budget % (1 << 30) == 0 else f"{budget >> 20}MiB"
    saved = min(waited, found["drive_s"])
    return f'host_budget="{written}" would keep {size(found["nbytes"])} more off the drive, and save up to {seconds(saved)} of a step'


def lines(run: Mapping[str, Any], state: str, name: str) -> list[str]:
    """A run as lines of text."""
    rows, rates, done, total = run["rows"], run["rates"], run["done"], run["total"]
    passed = sum(row[2] for row in rows)
    parts = [f"zk watch | {name}", f"step {done}/{total}" if total else f"step {done}", state, duration(passed)]
    if state.startswith("running") and total and rates:
        parts.append(f"eta {duration(rates['step_s'] * (total - done))}")
    found = [" | ".join(parts), run["heading"]]
    _, by_kind, process, peak = run["memory"][-1]
    width = max([len("of what is possible"), *(len(label) for label, _ in run["capacity"].values())])
    named: list[tuple[str, str]] = []
    for tier, (label, whole) in run["capacity"].items():
        kinds = {kind: row[tier] for kind, row in by_kind.items() if row.get(tier)}
        used = max(sum(kinds.values()), peak.get(tier, 0) if tier == "device" else process if tier == "host" else 0)
        others = f", all of the process {size(process)}" if tier == "host" else f", at most {size(peak[tier])}" if tier in peak else ""
        budget = f" (budget {size(run['budgets'][tier])})" if tier in run["budgets"] else ""
        text = ", ".join(f"{kind} {size(nbytes)}" for kind, nbytes in kinds.items()) or "nothing"
        named.append((label, f"{bar(used / max(1, whole), 20)} {text}{others}{budget}"))
    if rates:
        uses = sorted(spent(rates).items(), key=lambda item: -item[1])
        named.append(("a step", ", ".join(f"{USES[use]} {share:.0%}" for use, share in uses if share >= 0.005)))
        named.append(("rates", rates_line(rates)))
        if "floor_share" in rates:
            share = rates["floor_share"]
            named.append(("of what is possible", f"{bar(share, 20)} {share:.0%}: the rest is waiting that could be hidden"))
        last = next((row[6] for row in reversed(rows) if row[6] is not None), None)
        named += [("loss", f"{last:.4g}")] if last is not None else []
    if said := advice(run):
        named.append(("advice", said))
    return [*found, *(f"{name:{width}}  {text}" for name, text in named)]


def frames(run: str | Path, every_s: float = 1.0) -> Iterable[str]:
    """The run's text every second, until it has ended. Raises as ``find`` and ``read`` do."""
    path = find(run)
    while True:
        content = read(path)
        state = state_of(content)
        yield "\n".join(lines(content, state, str(path.parent)))
        if not state.startswith("running"):
            return
        time.sleep(every_s)
