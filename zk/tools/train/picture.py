"""A picture of the timeline of one step, where matplotlib is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from zk.core.timeline import LABELS, Intervals, Timeline

ROWS = {
    "compute": "#4477aa",
    "update": "#228833",
    "collective": "#aa3377",
    "upload": "#66ccee",
    "offload": "#33a0bb",
    "read": "#ccbb44",
    "write": "#ee8844",
    "wait": "#bb3344",
}
"""Rows and their colors."""
_NAMES: dict[Any, str] = {**LABELS, "compute": "compute"}  # as in traces, but for compute that no device tells
_DESCRIBED = {"compute": "forward, backward", "update": "Adam and cast", "wait": "training stands still"}
_PASSES = {"forward": "#4477aa", "backward": "#88aacc"}  # of compute, without a device that tells
_SHADES = {"forward": "#eef3f9", "backward": "#e2eaf3", "step": "#f3f3ee"}
_GREY, _PALE = "#555555", "#777777"


def draw_timeline(timeline: Timeline, path: Path, step: int) -> Path | None:
    """Write a PNG, a row for each resource; None where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    cells = {row.resource: (f"{row.busy_ms:,.0f} ms", f"{row.share:.0%}" if row.resource != "compute" else "") for row in timeline.overlap()}
    waits = timeline.busy("wait")
    if waits:
        cells["wait"] = (f"{sum(stop - start for start, stop in waits) / 1e6:,.0f} ms", "")
    figure = Figure(figsize=(12, 1.7 + 0.5 * len(cells)), layout="constrained")
    axes, whole_ms = figure.subplots(), (timeline.stop_ns - timeline.start_ns) / 1e6
    beside = axes.get_yaxis_transform()  # x: of the axes' width; y: row

    def bars(intervals: Intervals) -> list[tuple[float, float]]:
        return [((start - timeline.start_ns) / 1e6, (stop - start) / 1e6) for start, stop in intervals]

    def text(x: float, y: float, said: str, **style: Any) -> None:
        axes.text(x, y, said, **{"ha": "center", "va": "center"} | style)

    for phase, shade in _SHADES.items():
        phases = bars([(span.start_ns, span.stop_ns) for span in timeline.spans if span.resource == phase and timeline.trains(span.thread)])
        for start, width in phases:
            axes.axvspan(start, start + width, color=shade, linewidth=0, zorder=0)
        start, width = max(phases, key=lambda bar: bar[1], default=(0.0, 0.0))
        if width > 0.05 * whole_ms:
            text(start + width / 2, -0.72, phase, fontsize=10, color=_GREY)

    trained = [piece for piece in timeline.pieces() if timeline.trains(piece.thread)]
    for place, (name, (busy_text, hidden_text)) in enumerate(cells.items()):
        color, described, where = ROWS[name], _DESCRIBED.get(name, ""), (place - 0.31, 0.62)
        if name == "compute" and not any(span.resource == "compute" for span in timeline.spans):
            for part, shade in _PASSES.items():
                pieces = [(piece.start_ns, piece.stop_ns) for piece in trained if piece.resource == part]
                axes.broken_barh(bars(pieces), where, facecolors=shade, edgecolor="white", linewidth=0.3)
        else:
            exposed = timeline.busy(name)  # type: ignore[arg-type]
            hidden = exposed if name == "wait" else timeline.busy(name, hidden=True)  # type: ignore[arg-type]
            axes.broken_barh(bars(exposed), where, facecolors=color, alpha=0.4, linewidth=0)
            axes.broken_barh(bars(hidden), where, facecolors=color, linewidth=0)
        text(1.085, place, busy_text, transform=beside, ha="right")
        text(1.145, place, hidden_text, transform=beside, ha="right")
        text(-0.008, place - 0.13 * bool(described), _NAMES[name], transform=beside, ha="right")
        text(-0.008, place + 0.2, described, transform=beside, ha="right", fontsize=8, color=_PALE)
    for piece in trained:
        kind, [(start, width)] = piece.name.partition(":")[0], bars([(piece.start_ns, piece.stop_ns)])
        if piece.resource == "wait" and width > 0.012 * (len(kind) + 1) * whole_ms:  # the word fits
            text(start + width / 2, len(cells) - 1, kind, fontsize=8, color="white")

    text(1.085, -0.72, "busy", transform=beside, ha="right", color=_GREY)
    text(1.145, -0.72, "hidden", transform=beside, ha="right", color=_GREY)
    axes.set(xlim=(0, whole_ms), ylim=(len(cells) - 0.45, -1.0), xlabel="ms since the step began", yticks=[])
    axes.set_title(f"Step {step}: {whole_ms:,.0f} ms", loc="left", fontsize=12)
    axes.spines[["top", "right", "left"]].set_visible(False)
    if len(cells) - bool(waits) > 1:
        from matplotlib.patches import Patch

        key = [Patch(facecolor=_PALE, label="hidden behind compute"), Patch(facecolor=_PALE, alpha=0.4, label="exposed")]
        figure.legend(handles=key, loc="upper right", ncols=2, frameon=False, fontsize=9)
    figure.savefig(path, dpi=130)
    return path
