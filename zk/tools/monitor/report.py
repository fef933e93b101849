"""A run as one HTML file that needs no network: loss, memory by tier, where the time went, the plan against what was measured, configuration."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from zk.core.cache import folder_for, replace_text
from zk.tools.monitor.advice import sentence
from zk.tools.monitor.rates import USES
from zk.tools.monitor.runfile import COLUMNS, find, read, state_of
from zk.tools.monitor.summary import COLORS, on_tier
from zk.tools.monitor.words import duration, seconds, size

FILE = "report.html"
_USES = dict(zip(USES, ("#4c78a8", "#54a24b", "#e45756", "#f58518", "#b279a2", "#eeca3b", "#9d755d", "#bab0ac"), strict=True))
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _BELOW = 860, 220, 64, 16, 24  # of a chart, and of what is beside its axes
_FAR = 4  # a limit that many times above all else is written, not drawn
_STYLE = """body{font:14px/1.45 system-ui,sans-serif;max-width:900px;margin:2em auto;padding:0 1em;color:#222}h2{margin:1.6em 0 .3em}
svg{width:100%;height:auto}svg text{font-size:11px;fill:#555}td,th{padding:.15em 1.2em .15em 0;text-align:left;vertical-align:top}
.key span{margin-right:1.2em;white-space:nowrap}"""

Points = list[tuple[float, float]]


def _ticks(base: float, top: float) -> list[float]:
    """About five round numbers from ``base`` to ``top``."""
    step = 10 ** math.floor(math.log10((top - base) / 5))
    step *= next(factor for factor in (1, 2, 5, 10) if (top - base) / (factor * step) <= 6)
    return [step * number for number in range(math.ceil(base / step), int(top / step) + 1)]


def chart(
    label: str,
    layers: Mapping[str, tuple[str, Points]],
    lines: Mapping[str, tuple[str, Points]],
    limits: Mapping[str, float],
    until: float,
) -> str:
    """SVG of layers, which are stacked, lines over them, and limits across, over the steps from 0 to ``until``; with a key. Lines alone begin where
    the lowest one is, as nothing is seen of a loss from 0 on.
    """
    tops = [sum(point[1] for point in column if point) for column in itertools.zip_longest(*(points for _, points in layers.values()))]
    most = max([*tops, *(y for _, points in lines.values() for _, y in points)], default=0.0) or 1.0
    drawn = {name: y for name, y in limits.items() if y <= _FAR * most}
    base = 0.0 if layers else min((y for _, points in lines.values() for _, y in points), default=0.0)
    top, beyond = max(most, *drawn.values(), 0.0), [name for name in limits if name not in drawn]
    top += 0.08 * (top - base or 1.0)

    def x(step: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * step / until

    def y(value: float) -> float:
        return _HEIGHT - _BELOW - (_HEIGHT - _BELOW - 8) * (value - base) / (top - base)

    def path(points: Iterable[tuple[float, float]]) -> str:
        return " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in points)

    parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(label)}">']
    for tick in _ticks(base, top):
        parts.append(f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(tick):.1f}" y2="{y(tick):.1f}" stroke="#e5e5e5"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:.6g}</text>')
    for tick in _ticks(0.0, until):
        parts.append(f'<text x="{x(tick):.1f}" y="{_HEIGHT - 6}" text-anchor="middle">{tick:.6g}</text>')
    below = [0.0] * len(tops)
    for name, (color, points) in layers.items():
        above = [low + value for low, (_, value) in zip(below, points, strict=True)]
        steps = [step for step, _ in points]
        outline = [*zip(steps, above, strict=True), *reversed(list(zip(steps, below, strict=True)))]
        parts.append(f'<polygon points="{path(outline)}" fill="{color}" data-series="{escape(name)}"><title>{escape(name)}</title></polygon>')
        below = above
    for name, (color, points) in lines.items():
        parts.append(
            f'<polyline points="{path(points)}" fill="none" stroke="{color}" stroke-width="1.5" data-series="{escape(name)}">'
            f"<title>{escape(name)}</title></polyline>"
        )
    for name, value in drawn.items():
        parts.append(f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}" stroke="#c00" stroke-dasharray="6 4"/>')
        parts.append(f'<text x="{_WIDTH - _RIGHT - 4}" y="{y(value) - 4:.1f}" text-anchor="end" data-limit="{escape(name)}">{escape(name)}</text>')
    for number, name in enumerate(beyond):
        text = f"{escape(name)}: above the chart"
        parts.append(f'<text x="{_WIDTH - _RIGHT - 4}" y="{18 + 14 * number}" text-anchor="end" data-limit="{escape(name)}">{text}</text>')
    key = "".join(f'<span><b style="color:{color}">&#9632;</b> {escape(name)}</span>' for name, (color, _) in {**layers, **lines}.items())
    return f'<h2>{escape(label)}</h2>{"".join(parts)}</svg><div class="key">{key}</div>'


def _stepped(starts: Sequence[float], values: Sequence[float], end: float) -> Points:
    """Each value from its start to the next one's."""
    stops = [*starts, end][1:]
    return [(edge, value) for start, stop, value in zip(starts, stops, values, strict=True) for edge in (start, stop)]


def _table(rows: Iterable[Sequence[str]], *headings: str) -> str:
    head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    return f"<table><tr>{head}</tr>" + "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows) + "</table>"


def _memory(run: Mapping[str, Any], until: float) -> Iterable[str]:
    """A chart for each tier: what is held there by kind, and its limits."""
    readings = run["memory"]
    starts = [float(reading[0]) for reading in readings]
    for tier, (label, whole) in run["capacity"].items():
        kinds = [kind for kind in COLORS if any(reading[1].get(kind, {}).get(tier) for reading in readings)]
        all_of_it = [reading[2] if tier == "host" else reading[3].get(tier) for reading in readings] if tier in ("host", "device") else []
        most = max([*(on_tier(reading[1], tier) for reading in readings), *filter(None, all_of_it)], default=0)
        unit, scale = ("GiB", 2**30) if most >= 2**30 else ("MiB", 2**20)
        layers = {
            kind: (COLORS[kind], _stepped(starts, [reading[1].get(kind, {}).get(tier, 0) / scale for reading in readings], until)) for kind in kinds
        }
        name = "all of the process" if tier == "host" else "most of torch so far"
        lines = {name: ("#222", _stepped(starts, [(nbytes or 0) / scale for nbytes in all_of_it], until))} if any(all_of_it) else {}
        limits = {f"{label}, this rank's {size(whole)}" if size(whole) not in label else label: whole / scale} if whole else {}
        limits |= {f"budget {size(nbytes)}": nbytes / scale for where, nbytes in run["budgets"].items() if where == tier}
        yield chart(f"Memory, {unit} of this rank: {label}", layers, lines, limits, until)


def _against_plan(run: Mapping[str, Any], totals: Mapping[str, float]) -> Iterable[tuple[str, str, str]]:
    """Rows of the table: what, as planned, as measured."""
    for tier, (label, _) in run["capacity"].items():
        planned, held = on_tier(run["planned"], tier), max((on_tier(reading[1], tier) for reading in run["memory"]), default=0)
        yield f"training state, {label}", f"{size(planned) or '-'} at the fullest point of a step", f"{size(held) or '-'} at most between steps"
    moved = sum(run["traffic"].values())
    if moved:
        measured = size(totals["moved_nbytes"] / totals["steps"]) if totals["steps"] else "-"
        yield "the drive in a step", f"{size(moved)} for one micro-batch", measured
    if totals["steps"]:
        floor = f"{seconds(totals['floor_s'] / totals['steps'])}, if all waits were hidden" if totals["floor_s"] else "not known"
        yield "a step", floor, seconds(totals["seconds"] / totals["steps"])


def html(run: Mapping[str, Any], state: str, name: str) -> str:
    """The report of a run, the content of its file."""
    rows = [dict(zip(COLUMNS, row, strict=True)) for row in run["rows"]]
    until = float(max(run["done"], 1))
    totals = {column: sum(row[column] or 0 for row in rows) for column in COLUMNS[1:]}
    starts = [row["step"] - row["steps"] for row in rows]
    used = [use for use in USES if totals[use] > 0.005 * totals["seconds"]]
    uses = {USES[use]: (_USES[use], _stepped(starts, [row[use] / row["steps"] for row in rows], until)) for use in used}
    floors = [row["floor_s"] / row["steps"] for row in rows if row["floor_s"] is not None]
    floor = {"floor": ("#222", _stepped(starts, floors, until))} if len(floors) == len(rows) else {}
    given = [(row["step"], row["loss"]) for row in rows if row["loss"] is not None]
    losses = [point for point in given if math.isfinite(point[1])]
    shares = ", ".join(f"{USES[use]} {totals[use] / totals['seconds']:.0%}" for use in used)
    of = f" of {run['total']}" if run["total"] else ""
    facts = {"state": f"{state}, after step {run['done']}{of}", "time": duration(totals["seconds"])}
    if totals["steps"]:
        facts |= {"a step": f"{seconds(totals['seconds'] / totals['steps'])} on average: {shares}"}
    if totals["tokens"]:
        facts |= {"rate": f"{totals['tokens'] / totals['seconds']:,.0f} tokens/s"}
    if len(losses) < len(given):
        step, loss = next(point for point in given if not math.isfinite(point[1]))
        facts |= {"loss": f"{loss} after step {step}; {len(given) - len(losses)} of {len(given)} are not finite, and not in the chart"}
    said = sentence(run["advice"], run["rates"])
    facts |= {"advice": said} if said else {}
    parts = [
        f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>{escape(name)}</title><style>{_STYLE}</style></head><body>',
        f"<h1>{escape(name)}</h1><p>{escape(run['heading'])}</p>",
        _table((*facts.items(), *run["results"].items())),
        chart("Loss, by step", {}, {"training": ("#4c78a8", losses)}, {}, until) if losses else "",
        chart("Seconds of a step, and what for", uses, floor, {}, until) if rows else "",
        *_memory(run, until),
        "<h2>Plan and measurement</h2>" + _table(_against_plan(run, totals), "", "planned", "measured"),
        "<h2>Configuration</h2>" + _table((key, str(value)) for key, value in {**run["zero"], **run["about"]}.items()),
    ]
    return "\n".join(filter(None, parts)) + "</body></html>\n"


def write(run: str | Path, out: str | Path | None = None) -> Path:
    """Write the report of a run, given its file or folder, to a file or into a folder; returns its path. Raises as ``find`` and ``read`` do."""
    path = find(run)
    content, target = read(path), path.parent if out is None else Path(out)
    if target.is_dir() or not target.suffix:
        target /= FILE
    folder_for(target)
    replace_text(target, html(content, state_of(content), path.parent.resolve().name))
    return target
