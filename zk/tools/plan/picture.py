"""Pictures of a plan: the largest model by tier, memory by choice, and efficiency against bandwidth."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from zk.core.words import count, size
from zk.tools.plan.choose import Plan
from zk.tools.plan.report import TIERS

_COLORS = {
    "param": "#4477aa",
    "gathered": "#66ccee",
    "grad": "#ee6677",
    "sums": "#f08492",
    "bucket": "#f4a6b0",
    "fresh": "#f9d0d6",
    "replicas": "#e0a3c8",
    "master": "#228833",
    "moments": "#ccbb44",
    "param_copy": "#aa3377",
    "shadow": "#d4b0e0",
    "buffer": "#999933",
    "staging": "#c9c98a",
    "spare": "#dddddd",
    "activations": "#bbbbbb",
}


def draw(plan: Plan, folder: Path) -> list[Path]:
    """Write three PNGs; none where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return []
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, draw_one in (("largest", _largest), ("memory", _memory), ("efficiency", _efficiency)):
        figure = Figure(layout="constrained")
        draw_one(figure, plan)
        for axes in figure.axes:
            axes.spines[["top", "right"]].set_visible(False)
        written.append(folder / f"{name}.png")
        figure.savefig(written[-1], dpi=130)
    return written


def _largest(figure: Any, plan: Plan) -> None:
    figure.set_size_inches(8, 3)
    axes = figure.subplots()
    words = {"device": "GPU alone", "host": "and host memory", "nvme": "and the drive"}
    sizes = [shape.num_params for shape, _ in plan.largest.values()]
    bars = axes.barh([words[tier] for tier in plan.largest], [numel / 1e9 for numel in sizes], color=_COLORS["param"], height=0.6)
    axes.bar_label(bars, [f" {count(numel)}" for numel in sizes], fontsize=11)
    given = plan.shape.num_params / 1e9
    axes.axvline(given, color="#222222", linestyle=":", linewidth=1)
    axes.text(given, 1.01, plan.shape.name, transform=axes.get_xaxis_transform(), fontsize=9, ha="center", va="bottom")
    axes.invert_yaxis()
    axes.set(xscale="log", xlabel="billions of parameters")
    axes.margins(x=0.2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_title(f"Largest model of this shape, {_ranks(plan)}", pad=20)


def _memory(figure: Any, plan: Plan) -> None:
    options = [option for option in plan.options if "auto" not in (option.config.param_tier, option.config.optimizer_tier)]
    labels = [f"{o.config.stage}  params {o.config.param_tier}, optimizer {o.config.optimizer_tier}" for o in options]
    figure.set_size_inches(13, 1.6 + 0.36 * len(options))
    every = figure.subplots(1, 3, sharey=True)
    handles: dict[str, Any] = {}
    for axes, (memory, words) in zip(every, TIERS.items(), strict=True):
        left = [0.0] * len(options)
        for kind, color in _COLORS.items():
            sizes = [option.found.on(memory, kind) / 2**30 for option in options]
            if any(sizes):
                handles[kind] = axes.barh(labels, sizes, left=left, color=color, height=0.7)
                left = [a + b for a, b in zip(left, sizes, strict=True)]
        capacity = plan.machine.capacity(memory)
        room, most = capacity / 2**30, max(left)
        axes.set_title(f"{words}: {f'{size(capacity)} to use' if capacity else 'none'}", fontsize=11)
        if capacity:
            axes.axvline(room, color="#bb3344", linewidth=1.5)
        end = min(most, 2.5 * room) if room else most  # what is much too large is cut off, with its size beside it
        axes.set_xlim(0, 1.12 * max(end, room if room < 2 * most else 0, 1e-3))
        for row, total in enumerate(left):
            if total > end:
                box = {"facecolor": "white", "linewidth": 0, "pad": 1}
                axes.text(1.1 * end, row, f"{total:,.0f}", ha="right", va="center", fontsize=8, bbox=box)
        axes.set_xlabel("GiB on each rank")
    every[0].invert_yaxis()
    every[0].set_ylabel("stage")
    names = {"param_copy": "param copy", "shadow": "updates in backward", "activations": "activations (estimate)"}
    figure.legend(handles.values(), [names.get(kind, kind) for kind in handles], loc="outside lower center", ncols=6, frameon=False, fontsize=9)
    figure.suptitle(f"{plan.shape.name}, {count(plan.shape.num_params)} parameters, {_ranks(plan)}; the red line is what there is")


def _efficiency(figure: Any, plan: Plan) -> None:
    """ZeRO-Infinity's figure 3, for this machine's compute and these tokens. Operations for each byte are its equations 9 to 11."""
    figure.set_size_inches(8, 4.5)
    axes = figure.subplots()
    rates = [10 ** (power / 20) for power in range(-20, 81)]  # GB/s
    lines = {
        "parameters and gradients": (plan.tokens, _COLORS["param"]),
        "optimizer states": (plan.tokens / 4, _COLORS["moments"]),
        "activation checkpoints": (24 * plan.shape.width, _COLORS["master"]),
    }
    for name, (intensity, color) in lines.items():
        if intensity:
            reached = [intensity * 1e9 * rate for rate in rates]  # operations/s, if nothing is hidden: equation 6
            shares = [100 * operations / (operations + 1e12 * plan.machine.tflops) for operations in reached]
            axes.plot(rates, shares, color=color, linewidth=2, label=name)
    for name, rate in (("drive", plan.machine.disk_gbps / plan.machine.per_machine), ("link", plan.machine.link_gbps)):
        axes.axvline(rate, color="#777777", linestyle=":", linewidth=1)
        axes.text(rate, 102, name, ha="center", fontsize=9, color="#555555")
    axes.set(xscale="log", xlim=(rates[0], rates[-1]), ylim=(0, 101), xlabel="GB/s for each rank", ylabel="% of compute, nothing hidden")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_title(f"Efficiency against bandwidth: {plan.tokens:,} tokens a step, {plan.machine.tflops:g} TFLOP/s", pad=18)
    axes.legend(frameon=False, loc="lower right")


def _ranks(plan: Plan) -> str:
    return f"{plan.machine.world} ranks" if plan.machine.world > 1 else "one rank"
