"""In: one step of training. Out: its timeline, block by block; a table and a picture of what was hidden behind compute."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from zk.timeline import Intervals, Recorder, Resource, Timeline, intersection, length, note, now_ns, union

_DESCRIBED = {  # row of the table and the picture -> what a reader is told it is
    "compute": "forward, backward",
    "update": "Adam and cast",
    "collective": "between ranks",
    "upload": "host to device",
    "offload": "device to host",
    "read": "from the drive",
    "write": "to the drive",
    "wait": "training stands still",
}


_SPENT = ("forward", "backward", "update")  # of the training thread's time, what comes first


@contextmanager
def recorded(blocks: dict[str, nn.Module], device: torch.device) -> Iterator[Recorder]:
    """Record what goes on inside, with a span for each block's forward and backward."""
    began: dict[tuple[str, Resource], int] = {}

    def begin(name: str, resource: Resource) -> Callable[..., None]:
        def hook(*_: object) -> None:
            began[name, resource] = now_ns()

        return hook

    def end(name: str, resource: Resource) -> Callable[..., None]:
        def hook(*_: object) -> None:
            start_ns = began.pop((name, resource), None)
            if start_ns is not None:
                note(resource, name, start_ns, now_ns(), holds=True)

        return hook

    handles: list[Any] = []
    for name, block in blocks.items():
        handles.append(block.register_forward_pre_hook(begin(name, "forward")))
        handles.append(block.register_forward_hook(end(name, "forward")))
        handles.append(block.register_full_backward_pre_hook(begin(name, "backward")))
        handles.append(block.register_full_backward_hook(end(name, "backward")))
    try:
        with Recorder(device) as recorder:
            yield recorder
    finally:
        for handle in handles:
            handle.remove()


def print_table(console: Console, timeline: Timeline, step: int) -> None:
    """Busy and hidden time of each resource, and where the training thread's time went."""
    rows = timeline.overlap()
    whole_ms = (timeline.stop_ns - timeline.start_ns) / 1e6
    title = f"overlap in step {step}, {whole_ms:,.1f} ms"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("resource", no_wrap=True)
    for heading in ("busy ms", "behind compute", "behind update", "in the open"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("hidden", no_wrap=True)
    for row in rows:
        if row.resource == "compute":
            table.add_row(row.resource, f"{row.busy_ms:,.1f}")
            continue
        beside = "" if row.resource == "update" else f"{row.update_ms:,.1f}"
        times = (f"{row.busy_ms:,.1f}", f"{row.hidden_ms:,.1f}", beside, f"{row.exposed_ms - row.update_ms:,.1f}")
        table.add_row(row.resource, *times, f"{_bar(row.share)} {row.share:4.0%}")
    console.print()
    console.print(table)
    unused = [resource for resource in _DESCRIBED if resource not in (*(row.resource for row in rows), "wait")]
    if unused:
        console.print(f"not seen during this step: {', '.join(unused)}", style="dim")
    console.print(f"training thread  {_spent(timeline, whole_ms)}", soft_wrap=True)


def _bar(share: float, cells: int = 10) -> str:
    full = round(share * cells)
    return "█" * full + "░" * (cells - full)


def _spent(timeline: Timeline, whole_ms: float) -> str:
    """ "forward 20%, backward 40%, update 30%, waiting for the drive 8%, other 2%"."""
    spent = timeline.training_thread()
    spent["other"] += spent.pop("step", 0.0)
    order = [*_SPENT, *sorted(what for what in spent if what not in (*_SPENT, "other")), "other"]
    spent = {what: spent.get(what, 0.0) for what in order}
    parts = [f"{what.replace('wait: ', 'waiting for ')} {spent[what] / whole_ms:.0%}" for what in order if spent[what] / whole_ms >= 0.005]
    return ", ".join(parts)


def _longest_waits(timeline: Timeline) -> Iterator[tuple[str, tuple[float, float]]]:
    """Waits of the training thread without a gap between them, (start, width) in ns: for what the most of each was."""
    waits = [(span.name.partition(":")[0], start, stop) for span, start, stop in timeline.pieces() if span.resource == "wait"]
    for first, last in timeline.busy("wait"):
        spent: dict[str, int] = {}
        for kind, start, stop in waits:
            if first <= start and stop <= last:
                spent[kind] = spent.get(kind, 0) + stop - start
        yield max(spent, key=lambda kind: spent[kind]), (first, last - first)


_COLORS = {
    "forward": "#4477aa",
    "backward": "#88aacc",
    "compute": "#4477aa",
    "update": "#228833",
    "collective": "#aa3377",
    "upload": "#66ccee",
    "offload": "#33a0bb",
    "read": "#ccbb44",
    "write": "#ee8844",
    "wait": "#bb3344",
}
_SHADES = {"forward": "#eef3f9", "backward": "#e2eaf3", "step": "#f3f3ee"}


def draw(timeline: Timeline, path: Path, step: int) -> Path | None:
    """Write a PNG, a row for each resource; None where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError:
        return None
    rows = timeline.overlap()
    names: list[str] = [row.resource for row in rows]
    waits = timeline.busy("wait")
    if waits:
        names.append("wait")
    figure = Figure(figsize=(12, 1.7 + 0.5 * len(names)), layout="constrained")
    axes = figure.subplots()
    whole_ms = (timeline.stop_ns - timeline.start_ns) / 1e6

    def bars(where: Intervals) -> list[tuple[float, float]]:
        return [((start - timeline.start_ns) / 1e6, (stop - start) / 1e6) for start, stop in where]

    for phase, shade in _SHADES.items():
        spans = [(span.start_ns, span.stop_ns) for span in timeline.spans if span.resource == phase and timeline.trains(span.thread)]
        periods = bars(union(spans))
        for start, width in periods:
            axes.axvspan(start, start + width, color=shade, linewidth=0, zorder=0)
        labelled = [(width, start) for start, width in periods if width > 0.05 * whole_ms]
        if labelled:
            width, start = max(labelled)
            axes.text(start + width / 2, -0.72, phase, ha="center", va="center", fontsize=10, color="#555555")

    compute, height = timeline.compute(), 0.62
    for place, name in enumerate(names):
        color = _COLORS[name]
        bottom = place - height / 2
        if name == "compute" and not any(span.resource == "compute" for span in timeline.spans):
            for part in ("forward", "backward"):
                pieces = [(start, stop) for span, start, stop in timeline.pieces() if span.resource == part and timeline.trains(span.thread)]
                axes.broken_barh(bars(pieces), (bottom, height), facecolors=_COLORS[part], edgecolor="white", linewidth=0.3)
        elif name == "compute":
            axes.broken_barh(bars(compute), (bottom, height), facecolors=color, linewidth=0)
        elif name == "wait":
            axes.broken_barh(bars(waits), (bottom, height), facecolors=color, linewidth=0)
            for kind, (start, width) in _longest_waits(timeline):
                if width / 1e6 > 0.012 * (len(kind) + 1) * whole_ms:  # the word fits
                    axes.text((start + width / 2 - timeline.start_ns) / 1e6, place, kind, ha="center", va="center", fontsize=8, color="white")
        else:
            busy = timeline.busy(name)  # type: ignore[arg-type]
            axes.broken_barh(bars(busy), (bottom, height), facecolors=color, alpha=0.4, linewidth=0)
            axes.broken_barh(bars(intersection(busy, compute)), (bottom, height), facecolors=color, linewidth=0)

    cells = {row.resource: (f"{row.busy_ms:,.0f} ms", f"{row.share:.0%}" if row.resource != "compute" else "") for row in rows}
    cells["wait"] = (f"{length(waits) / 1e6:,.0f} ms", "")
    beside = axes.get_yaxis_transform()  # x: of the axes' width; y: row
    for column, x in enumerate((1.085, 1.145)):
        axes.text(x, -0.72, ("busy", "hidden")[column], transform=beside, ha="right", va="center", color="#555555")
        for place, name in enumerate(names):
            axes.text(x, place, cells[name][column], transform=beside, ha="right", va="center")
    for place, name in enumerate(names):
        axes.text(-0.008, place - 0.13, name, transform=beside, ha="right", va="center")
        axes.text(-0.008, place + 0.2, _DESCRIBED[name], transform=beside, ha="right", va="center", fontsize=8, color="#777777")
    axes.set_yticks([])
    axes.set(xlim=(0, whole_ms), ylim=(len(names) - 0.45, -1.0), xlabel="ms since the step began")
    axes.set_title(f"Step {step}: {whole_ms:,.0f} ms", loc="left", fontsize=12)
    axes.spines[["top", "right", "left"]].set_visible(False)
    key = [Patch(facecolor="#777777", label="hidden behind compute"), Patch(facecolor="#777777", alpha=0.4, label="exposed")]
    if len(rows) > 1:
        figure.legend(handles=key, loc="upper right", ncols=2, frameon=False, fontsize=9)
    figure.savefig(path, dpi=130)
    return path
