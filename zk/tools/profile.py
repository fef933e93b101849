"""``zk.profile``: torch.profiler in which zk's phases are named ranges, and a picture of the last step."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from zk.core.hooks import Hook
from zk.core.timeline import OF_UNITS, _profiled, phase, profiles
from zk.logs import say

_DEVICE = {"kernel .*nccl": "gather", "kernel .*adam": "update", "kernel": "compute", "gpu_memcpy .*htod": "upload", "gpu_memcpy .*dtoh": "offload"}
_ROWS = {"compute": ("compute", "#4477aa"), "update": ("optimizer update", "#228833")}  # name, color
_ROWS |= {"gather": ("gather, reduce", "#aa3377"), "upload": ("copies to the GPU", "#66ccee")}
_ROWS |= {"offload": ("copies from the GPU", "#33a0bb"), "read": ("drive reads", "#ccbb44")}
_ROWS |= {"write": ("drive writes", "#ee8844"), "wait": ("training waits", "#bb3344")}
_PASSES, _BINS = {"forward": "#eef3f9", "backward": "#e2eaf3", "step": "#f3f3ee"}, 20_000


class profile(contextlib.ExitStack):  # a verb, as contextlib's are
    """Record steps: ``trace.json`` for https://ui.perfetto.dev, ``timeline.png`` of the last one.

    ``with zk.profile(optimizer, "profile"):`` records all steps inside, ``steps=3`` the next three.

    Args:
        optimizer: a ZeroOptimizer, or what has one as ``.optimizer``.
        folder: is made if missing. Rank 1 writes ``trace-rank1.json`` and ``timeline-rank1.png``.
        steps: to record, at least 1; None records until the context ends.
        skip: steps to let pass first, in which caches fill and kernels are compiled.
    """

    def __init__(self, optimizer: Any, folder: str | Path, *, steps: int | None = None, skip: int = 0) -> None:
        if (steps is not None and steps < 1) or skip < 0:
            raise ValueError(f"steps must be at least 1, or None, and skip at least 0; got steps={steps!r}, skip={skip!r}")
        super().__init__()
        while not hasattr(optimizer, "held"):
            if not hasattr(optimizer, "optimizer"):
                raise TypeError(f"zk.profile needs a ZeroOptimizer; got {type(optimizer).__name__}")
            optimizer = optimizer.optimizer
        self.folder, self.optimizer, self.steps, self.skip, self.taken, alive = Path(folder), optimizer, steps, skip, -1, [self]
        self.folder.mkdir(parents=True, exist_ok=True)
        self.forwards, self.backward, self.units = list[phase](), contextlib.ExitStack(), list[Any]()  # units in backward, the last at work
        self.callback(alive.clear)  # the hook stays, as torch iterates over them when a profile ends
        optimizer.register_step_post_hook(lambda *_: list(map(profile._advance, alive)))
        self._advance()

    def _advance(self) -> None:
        self.taken += 1
        if self.taken == self.skip:
            if profiles or _profiled():
                raise RuntimeError("there can be one profile at a time: close the first, or torch's")
            names = {self.optimizer.model: "model"} | {module: held.unit.name for held in self.optimizer.held for module in held.unit.anchors}
            for module, name in names.items():
                begin, end = (Hook(functools.partial(self._pass, name, begins)) for begins in (True, False))
                self.callback(module.register_forward_pre_hook(begin, with_kwargs=True).remove)
                self.callback(module.register_forward_hook(end, always_call=True).remove)
            self.callback(self._write)
            threads = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
            self.torch = self.enter_context(torch.profiler.profile(experimental_config=threads))
            profiles.add(self)
        elif self.steps is not None and self.taken == self.skip + self.steps:
            self.close()

    def _pass(self, name: str, begins: bool, *given: Any) -> None:
        if begins:
            self.forwards.append(phase("forward", name))
            self.forwards[-1].__enter__()
        elif self.forwards:
            self.forwards.pop().__exit__()
        for value in tree_leaves(given[1:] if begins else given[-1]) if torch.is_grad_enabled() else ():
            if isinstance(value, torch.Tensor) and value.requires_grad:
                value.register_hook(lambda _: self._backward(name, not begins))

    def _backward(self, name: str | None = None, begins: bool = False) -> None:
        """Backward of a unit begins with the gradient of its output, and ends with that of its input, or with backward itself."""
        if begins and not self.units:
            torch.autograd.Variable._execution_engine.queue_callback(self._backward)
        units = self.units + [name] * (name not in self.units) if begins else [unit for unit in self.units if name not in (unit, None)]
        if units[-1:] != self.units[-1:]:
            self.backward.close()
            if units:
                self.backward.enter_context(phase("backward", units[-1]))
        self.units = units

    def _write(self) -> None:
        profiles.discard(self)
        self.torch.export_chrome_trace(str(trace := self.folder / f"trace-rank{self.optimizer.everyone.rank}.json".replace("-rank0.", ".")))
        picture = draw(trace) if importlib.util.find_spec("matplotlib") else "no picture, as matplotlib is not installed"
        if self.optimizer.everyone.rank == 0:
            say(f"zk: wrote {trace}, for https://ui.perfetto.dev; {picture}")


def _kind(event: dict[str, Any]) -> str:
    words = event["name"].split()
    if words[:1] == ["zk:"] and event["cat"] == "user_annotation":
        return "gather" if words[-1] == "reduce" else str(words[-1] if words[-1] in OF_UNITS else words[1])
    return next((kind for pattern, kind in _DEVICE.items() if re.match(pattern, f"{event['cat']} {event['name']}".lower())), "")


def draw(trace: Path) -> Path:
    """Draw the last whole step of a trace beside it, a row for each resource."""
    from matplotlib.figure import Figure

    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event.get("ph") == "X" and _kind(event)]
    spans = [(_kind(event), event["tid"], event["ts"], event["ts"] + event["dur"], event["cat"] == "user_annotation") for event in events]
    steps = [min((span[2] for span in spans), default=0.0), *sorted(span[3] for span in spans if span[0] == "step")]
    start, whole = steps[-2:][0], max(steps[-1] - steps[-2:][0], 1)
    training, told = {span[1] for span in spans if span[0] in _PASSES}, {span[0] for span in spans if not span[4]}  # told by the GPU itself
    busy, own = (defaultdict[str, Any](lambda: np.zeros(_BINS, bool)) for _ in range(2))  # elsewhere, and on a thread that trains
    for kind, tid, begin, stop, by_host in spans:
        part = slice(max(0, int((begin - start) / whole * _BINS)), max(0, int((stop - start) / whole * _BINS) + 1))
        if by_host and tid in training:
            own[kind][part] = True
        elif (kind in told) != by_host and kind != "wait":
            busy[kind][part] = True
    own["compute"] = (own["forward"] | own["backward"]) & ~np.any([own[kind] for kind in {"step", *own} - {"forward", "backward"}], axis=0)
    for kind in _ROWS.keys() - told:
        busy[kind] |= own[kind] & ~(own["wait"] & (kind != "wait"))
    rows = [kind for kind in _ROWS if busy[kind].any()]
    axes, width = (figure := Figure(figsize=(12, 1.7 + 0.5 * len(rows)), layout="constrained")).subplots(), whole / 1e3  # ms

    def bars(bins: Any) -> list[tuple[float, float]]:
        edges = np.flatnonzero(np.diff(bins, prepend=False, append=False)) * width / _BINS
        return list(zip(edges[::2], edges[1::2] - edges[::2], strict=True))

    for kind, shade in _PASSES.items():
        axes.broken_barh(bars(own[kind]), (-1, len(rows) + 1), facecolors=shade, linewidth=0, zorder=0)
        left, long = max(bars(own[kind]), key=lambda bar: bar[1], default=(0.0, 0.0))
        axes.text(left + long / 2, -0.72, kind if long > 0.05 * width else "", ha="center", va="center", color="#555555")
    for row, kind in enumerate(rows):
        hidden = busy[kind] & (busy["compute"] if kind != "wait" else True)
        for bins, alpha in ((busy[kind], 0.4), (hidden & ~(own["backward"] & (kind == "compute")), 1.0)):
            axes.broken_barh(bars(bins), (row - 0.31, 0.62), facecolors=_ROWS[kind][1], alpha=alpha, linewidth=0)
        share = f", {hidden.sum() / busy[kind].sum():.0%} hidden" if kind not in ("compute", "wait") else ""
        axes.text(1.01, row, f"{busy[kind].mean() * width:,.0f} ms{share}", transform=axes.get_yaxis_transform(), va="center")
    axes.set(xlim=(0, width), ylim=(len(rows) - 0.45, -1), yticks=range(len(rows)), yticklabels=[_ROWS[kind][0] for kind in rows])
    axes.set(title=f"The last step: {width:,.0f} ms", xlabel="ms since the step began; pale: not hidden behind compute")
    axes.spines[["top", "right", "left"]].set_visible(False)
    figure.savefig(picture := trace.with_name(trace.name.replace("trace", "timeline")).with_suffix(".png"), dpi=130)
    return picture
