"""A run while it trains, for ``python -m zk watch``: memory by tier, where the time of a step goes, rates, and advice."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zk.tools.monitor.advice import sentence
from zk.tools.monitor.progress import rates_line
from zk.tools.monitor.rates import USES, spent
from zk.tools.monitor.runfile import find, read, state_of
from zk.tools.monitor.words import bar, duration, short, size

if TYPE_CHECKING:
    from rich.console import RenderableType

Lines = list[tuple[str, str]]  # what a line is about, and what it says; "" for a heading


def lines(run: Mapping[str, Any], state: str, name: str) -> Lines:
    """A run, line by line."""
    rows, rates, done, total = run["rows"], run["rates"], run["done"], run["total"]
    steps = (f"step {done}/{total}" if total else f"step {done}") + (f" ({run['skipped']} skipped)" if run["skipped"] else "")
    parts = [f"zk watch | {short(name)}", steps, state, duration(sum(row[2] for row in rows))]
    if state.startswith("running") and total and rates:
        parts.append(f"eta {duration(statistics.median(row[2] / row[1] for row in rows[-10:]) * (total - done))}")
    found = [("", " | ".join(parts)), ("", run["heading"])]
    _, by_kind, process, peak = run["memory"][-1]
    for tier, (label, whole) in run["capacity"].items():
        kinds = {kind: row[tier] for kind, row in by_kind.items() if row.get(tier)}
        used = max(sum(kinds.values()), peak.get(tier, 0) if tier == "device" else process if tier == "host" else 0)
        others = f", all of the process {size(process)}" if tier == "host" else f", at most {size(peak[tier])}" if tier in peak else ""
        budget = f" (budget {size(run['budgets'][tier])})" if tier in run["budgets"] else ""
        text = ", ".join(f"{kind} {size(nbytes)}" for kind, nbytes in kinds.items()) or "nothing"
        found.append((label, f"{bar(used / max(1, whole), 20)} {text}{others}{budget}"))
    if rates:
        uses = sorted(spent(rates).items(), key=lambda item: -item[1])
        found.append(("a step", ", ".join(f"{USES[use]} {share:.0%}" for use, share in uses if share >= 0.005)))
        found.append(("rates", rates_line(rates, 1, run["capacity"]["host"][1])))
        if "floor_share" in rates:
            share = rates["floor_share"]
            found.append(("of what is possible", f"{bar(share, 20)} {share:.0%}" + ": the rest is waiting" * (share < 0.995)))
        last = next((row[6] for row in reversed(rows) if row[6] is not None), None)
        found += [("loss", f"{last:.4g}")] if last is not None else []
    if said := sentence(run["advice"], rates):
        found.append(("advice", said))
    return found


def text(found: Lines) -> str:
    """Lines as text, however wide."""
    width = max(len(about) for about, _ in found)
    return "\n".join(f"{about:{width}}  {said}" if about else said for about, said in found)


def on_terminal(found: Lines) -> RenderableType:
    """Lines that wrap within their column."""
    from rich.console import Group
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    table.add_column(max_width=len("of what is possible"))
    for about, said in found:
        if about:
            table.add_row(about, said)
    return Group(*(said for about, said in found if not about), table)


def frames(run: str | Path, every_s: float = 1.0) -> Iterable[Lines]:
    """The run's lines every second, until it has ended. Raises as ``find`` and ``read`` do."""
    path = find(run)
    while True:
        content = read(path)
        state = state_of(content)
        yield lines(content, state, str(path.parent))
        if not state.startswith("running"):
            return
        time.sleep(every_s)
