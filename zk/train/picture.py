"""In: the record of a run. Out: a picture of its loss and of where the bytes were during one step."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zk.train.run import Record

_COLORS = {
    "param": "#4477aa",
    "gathered": "#66ccee",
    "grad": "#ee6677",
    "master": "#228833",
    "moments": "#ccbb44",
    "param copy": "#aa3377",
    "buffer": "#999933",
}


def draw(record: Record, path: Path) -> Path | None:
    """Write a PNG; None where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    figure = Figure(figsize=(11, 4), layout="constrained")
    loss_axes, bytes_axes = figure.subplots(1, 2)

    steps = range(1, len(record.losses) + 1)
    loss_axes.plot(steps, record.losses, color="#4477aa", linewidth=1, label="training")
    if record.check_losses:
        loss_axes.plot(steps, record.check_losses, color="#ee6677", linewidth=1, linestyle="--", label="plain PyTorch")
    loss_axes.plot(list(record.valid), list(record.valid.values()), "o", color="#222222", label="validation")
    for step, value in record.valid.items():
        loss_axes.annotate(f"{value:.2f}", (step, value), textcoords="offset points", xytext=(0, -16), ha="center")
    loss_axes.set(xlabel="step", ylabel="loss, nats per byte", title="Loss", ylim=(0, None))
    loss_axes.legend(frameon=False)

    kinds = list(dict.fromkeys(kind for _, sizes in record.timeline for kind in sizes if any(s.get(kind) for _, s in record.timeline)))
    points = range(len(record.timeline))
    stacks = [[sizes.get(kind, 0) / 2**20 for _, sizes in record.timeline] for kind in kinds]
    colors = [_COLORS.get(kind.split(" ", 1)[1], "#bbbbbb") for kind in kinds]
    bytes_axes.stackplot(points, stacks, labels=kinds, colors=colors, step="post")
    previous = None
    for point, (phase, _) in enumerate(record.timeline):
        if phase != previous and phase != "start":
            bytes_axes.axvline(point, color="#222222", linewidth=0.6, linestyle=":")
            bytes_axes.text(point + 0.1, bytes_axes.get_ylim()[1], phase, va="top", fontsize=8)
        previous = phase
    bytes_axes.set(xlabel="one step, block by block", ylabel="MiB on this rank", title="Training state by tier")
    bytes_axes.set_xlim(0, max(1, len(record.timeline) - 1))
    bytes_axes.set_xticks([])
    handles, labels = bytes_axes.get_legend_handles_labels()
    bytes_axes.legend(handles[::-1], labels[::-1], loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, fontsize=8)
    for axes in (loss_axes, bytes_axes):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
    return path
