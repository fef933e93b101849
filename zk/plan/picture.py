"""In: a Plan. Out: pictures of the largest model by tier, memory by stage, and efficiency against bandwidth."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from zk.plan import papers
from zk.plan.choose import Plan
from zk.plan.memory import Machine
from zk.plan.report import count, size

_COLORS = {
    "param": "#4477aa",
    "gathered": "#66ccee",
    "grad": "#ee6677",
    "bucket": "#f4a6b0",
    "fresh": "#f9d0d6",
    "master": "#228833",
    "moments": "#ccbb44",
    "param_copy": "#aa3377",
    "buffer": "#999933",
    "staging": "#c9c98a",
    "spare": "#dddddd",
    "activations": "#bbbbbb",
}
_MEMORIES = {"device": "GPU", "host": "host", "nvme": "drive"}


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
    tiers = list(plan.largest)
    values = [plan.largest[tier][0].num_params / 1e9 for tier in tiers]
    words = {"device": "GPU alone", "host": "and host memory", "nvme": "and the drive"}
    bars = axes.barh([words[tier] for tier in tiers], values, color=["#4477aa", "#228833", "#ccbb44"][: len(tiers)], height=0.6)
    axes.bar_label(bars, [f" {count(plan.largest[tier][0].num_params)}" for tier in tiers], fontsize=11)
    given = plan.shape.num_params / 1e9
    axes.axvline(given, color="#222222", linestyle=":", linewidth=1)
    axes.text(given, 1.01, plan.shape.name, transform=axes.get_xaxis_transform(), fontsize=9, ha="center", va="bottom", color="#222222")
    axes.invert_yaxis()
    axes.set(xscale="log", xlabel="billions of parameters", xlim=(min([*values, given]) / 3, max([*values, given]) * 3))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_title(f"Largest model of this shape, {_ranks(plan.machine)}", pad=20)


def _memory(figure: Any, plan: Plan) -> None:
    options = [option for option in plan.options if "auto" not in (option.config.param_tier, option.config.optimizer_tier)]
    figure.set_size_inches(13, 1.6 + 0.36 * len(options))
    every = figure.subplots(1, 3, sharey=True)
    labels = [f"{o.config.stage}  params {o.config.param_tier}, optimizer {o.config.optimizer_tier}" for o in options]
    handles: dict[str, Any] = {}
    for axes, (memory, words) in zip(every, _MEMORIES.items(), strict=True):
        left = [0.0] * len(options)
        for kind, color in _COLORS.items():
            sizes = [
                sum(nbytes for (tier, what), nbytes in o.found.sizes.items() if what == kind and _lies(tier, plan.machine) == memory) / 2**30
                for o in options
            ]
            if any(sizes):
                handles[kind] = axes.barh(labels, sizes, left=left, color=color, height=0.7)
                left = [a + b for a, b in zip(left, sizes, strict=True)]
        capacity = plan.machine.capacity(memory)
        if capacity:
            axes.axvline(capacity / 2**30, color="#bb3344", linewidth=1.5)
            axes.set_title(f"{words}: {size(capacity)} to use", fontsize=11)
        else:
            axes.set_title(f"{words}: none", fontsize=11)
        room, most = capacity / 2**30, max(left)
        end = min(most, 2.5 * room) if room else most  # what is much too large is cut off, with its size beside it
        axes.set_xlim(0, 1.12 * max(end, room if room < 2 * most else 0, 1e-3))
        for row, total in enumerate(left):
            if total > end:
                box = {"facecolor": "white", "linewidth": 0, "pad": 1}
                axes.text(1.1 * end, row, f"{total:,.0f}", ha="right", va="center", fontsize=8, bbox=box)
        axes.set_xlabel("GiB on each rank")
    every[0].invert_yaxis()
    every[0].set_ylabel("stage")
    names = {"param_copy": "param copy", "activations": "activations (estimate)"}
    figure.legend(handles.values(), [names.get(kind, kind) for kind in handles], loc="outside lower center", ncols=6, frameon=False, fontsize=9)
    figure.suptitle(f"{plan.shape.name}, {count(plan.shape.num_params)} parameters, {_ranks(plan.machine)}; the red line is what there is")


def _lies(tier: str, machine: Machine) -> str:
    return "host" if tier == "device" and machine.joined else tier


def _efficiency(figure: Any, plan: Plan) -> None:
    """ZeRO-Infinity's figure 3, for this machine's compute and these tokens."""
    figure.set_size_inches(8, 4.5)
    axes = figure.subplots()
    peak = 1e12 * plan.machine.tflops
    rates = [10 ** (power / 20) for power in range(-20, 81)]  # GB/s
    lines = {
        "parameters and gradients": (papers.params_intensity(plan.tokens, 1), "#4477aa"),
        "optimizer states": (papers.optimizer_intensity(plan.tokens, 1), "#ccbb44"),
        "activation checkpoints": (papers.checkpoints_intensity(plan.shape.width), "#228833"),
    }
    for name, (intensity, color) in lines.items():
        if intensity:
            axes.plot(rates, [100 * papers.efficiency(intensity, 1e9 * rate, peak) for rate in rates], color=color, linewidth=2, label=name)
    for name, rate in (("drive", plan.machine.disk_gbps / plan.machine.per_machine), ("link", plan.machine.link_gbps)):
        axes.axvline(rate, color="#777777", linestyle=":", linewidth=1)
        axes.text(rate, 102, name, ha="center", fontsize=9, color="#555555")
    axes.set(xscale="log", xlim=(rates[0], rates[-1]), ylim=(0, 101), xlabel="GB/s for each rank", ylabel="% of compute, nothing hidden")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_title(f"Efficiency against bandwidth: {plan.tokens:,} tokens a step, {plan.machine.tflops:g} TFLOP/s", pad=18)
    axes.legend(frameon=False, loc="lower right")


def _ranks(machine: Machine) -> str:
    return f"{machine.world} ranks" if machine.world > 1 else "one rank"
