"""``zk.profile``: torch.profiler with zk's phases as named ranges, and a picture of the last step."""

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

from zk.logs import say
from zk.offload.file import File
from zk.parallel.gradient import Gradient
from zk.parallel.runtime import Hook, Runtime
from zk.store import UnitStore
from zk.tools.phases import WAITS, wrap

Bins = Any  # (_BINS,) bool: when something is at work
# what an event of the trace is: the first pattern that its category and name match
_KINDS = {
    "user_annotation zk: wait": "wait",
    "user_annotation zk: read": "read",
    "user_annotation zk: write": "write",
    r"user_annotation zk: .* (gather|reduce)$": "gather",
    r"user_annotation zk: .* update$": "update",
    r"user_annotation zk: .* forward$": "forward",
    r"user_annotation zk: .* backward$": "backward",
    r"user_annotation optimizer\.step#zerooptimizer": "step",
    "kernel .*nccl": "gather",
    "kernel .*adam": "update",
    "kernel": "compute",
    "gpu_memcpy .*htod": "upload",
    "gpu_memcpy .*dtoh": "offload",
}
_ROWS = {  # kind -> name, color
    "compute": ("compute", "#4477aa"),
    "update": ("optimizer update", "#228833"),
    "gather": ("gather, reduce", "#aa3377"),
    "upload": ("copies to the GPU", "#66ccee"),
    "offload": ("copies from the GPU", "#33a0bb"),
    "read": ("drive reads", "#ccbb44"),
    "write": ("drive writes", "#ee8844"),
    "wait": ("training waits", "#bb3344"),
}
_PASSES, _BINS = {"forward": "#eef3f9", "backward": "#e2eaf3", "step": "#f3f3ee"}, 20_000


def _named(words: str) -> Any:
    return torch.profiler.record_function(f"zk: {words}")


_PHASES: tuple[tuple[type, str, Any], ...] = (  # methods of the core, and the range of each
    (UnitStore, "begin_gather", lambda store: _named(f"{store.unit.name} gather")),
    (UnitStore, "update", lambda store, *_: _named(f"{store.unit.name} update")),
    (Gradient, "reduce", lambda grad, *_: _named(f"{grad.unit.name} reduce")),
    (File, "move", lambda file, verb, data, *_: _named(f"{verb} {len(data) >> 10} KiB")),
    *((owner, name, lambda *_, why=why: _named(f"wait {why}")) for why, owner, name in WAITS),
)


class profile(contextlib.ExitStack):  # a verb, as contextlib's are
    """Record steps: ``trace.json`` for https://ui.perfetto.dev, ``timeline.png`` of the last one.

    ``with zk.profile(optimizer, "profile"):`` records all steps inside, ``steps=3`` the next three.

    Args:
        optimizer: a ZeroOptimizer, or what has one as ``.optimizer``.
        folder: is made if missing. Rank 1 writes ``trace-rank1.json`` and ``timeline-rank1.png``.
        steps: to record, at least 1; None records until the context ends.
        skip: steps to let pass first, in which caches fill and kernels are compiled.
    """

    def __init__(
        self, optimizer: Any, folder: str | Path, *, steps: int | None = None, skip: int = 0
    ) -> None:
        if (steps is not None and steps < 1) or skip < 0:
            raise ValueError(
                "steps must be at least 1, or None, and skip at least 0; got "
                f"steps={steps!r}, skip={skip!r}"
            )
        super().__init__()
        while not isinstance(getattr(optimizer, "_runtime", None), Runtime):
            if not hasattr(optimizer, "optimizer"):
                given = type(optimizer).__name__
                raise TypeError(f"zk.profile needs a ZeroOptimizer; got {given}")
            optimizer = optimizer.optimizer
        self.folder, self.optimizer, self.taken, alive = Path(folder), optimizer, -1, [self]
        self.first, self.last = skip, skip + steps if steps else None
        self.folder.mkdir(parents=True, exist_ok=True)
        self.forwards: list[Any] = []  # ranges
        # of units in backward, the last one is at work
        self.backward, self.units = contextlib.ExitStack(), list[str]()
        self.callback(alive.clear)  # the hook stays, as torch iterates over them when a profile ends
        optimizer.register_step_post_hook(lambda *_: list(map(profile._advance, alive)))
        self._advance()

    def _advance(self) -> None:
        self.taken += 1
        if self.taken == self.first:
            self._begin()
        elif self.taken == self.last:
            self.close()

    def _begin(self) -> None:
        if torch._C._autograd._profiler_enabled():
            raise RuntimeError("there can be one profile at a time: close the first, or torch's")
        stores = self.optimizer._runtime.stores
        names = {self.optimizer.model: "model"} | {s.unit.module: s.unit.name for s in stores}
        for module, name in names.items():
            begin, end = (Hook(functools.partial(self._pass, name, b)) for b in (True, False))
            self.callback(module.register_forward_pre_hook(begin, with_kwargs=True).remove)
            self.callback(module.register_forward_hook(end, always_call=True).remove)
        self.callback(self._write)
        threads = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
        self.torch = self.enter_context(torch.profiler.profile(experimental_config=threads))
        for owner, name, around in _PHASES:
            self.callback(wrap(owner, name, around))

    def _pass(self, name: str, begins: bool, *given: Any) -> None:
        """A forward begins or ends; its backward does the other when a gradient arrives there."""
        if begins:
            self.forwards.append(_named(f"{name} forward").__enter__())
        elif self.forwards:
            self.forwards.pop().__exit__(None, None, None)
        values = given[1:] if begins else given[-1]
        for value in tree_leaves(values) if torch.is_grad_enabled() else ():
            if isinstance(value, torch.Tensor) and value.requires_grad:
                value.register_hook(lambda _: self._backward(name, not begins))

    def _backward(self, name: str | None = None, begins: bool = False) -> None:
        """A unit's backward begins with its output's gradient, and ends with its input's.

        Without ``name`` all of backward has ended.
        """
        if begins and not self.units:
            torch.autograd.Variable._execution_engine.queue_callback(self._backward)
        units = [unit for unit in self.units if name not in (unit, None)]
        units += [name] * begins  # type: ignore[list-item]
        if units[-1:] != self.units[-1:]:
            self.backward.close()
            for unit in units[-1:]:
                self.backward.enter_context(_named(f"{unit} backward"))
        self.units = units

    def _write(self) -> None:
        rank = self.optimizer._layout.comm.rank
        trace = self.folder / ("trace.json" if rank == 0 else f"trace-rank{rank}.json")
        self.torch.export_chrome_trace(str(trace))
        has_picture = importlib.util.find_spec("matplotlib")
        picture = draw(trace) if has_picture else "no picture, as matplotlib is not installed"
        if rank == 0:
            say(f"zk: wrote {trace}, for https://ui.perfetto.dev; {picture}")


def _kind(event: dict[str, Any]) -> str:
    said = f"{event.get('cat')} {event.get('name')}".lower()
    return next((kind for pattern, kind in _KINDS.items() if re.match(pattern, said)), "")


class Activity:
    """When each kind of work was done in the last whole step of a trace."""

    def __init__(self, events: list[dict[str, Any]]) -> None:
        whole = [event for event in events if event.get("ph") == "X" and _kind(event)]
        ends = sorted(e["ts"] + e["dur"] for e in whole if _kind(e) == "step")
        steps = [min((event["ts"] for event in whole), default=0.0), *ends]
        self.start = steps[-2:][0]
        self.us = max(steps[-1] - self.start, 1)
        training = {event["tid"] for event in whole if _kind(event) in _PASSES}
        told = {_kind(e) for e in whole if e["cat"] != "user_annotation"}  # by the GPU itself
        self.busy: dict[str, Bins] = defaultdict(lambda: np.zeros(_BINS, bool))  # elsewhere
        self.own: dict[str, Bins] = defaultdict(lambda: np.zeros(_BINS, bool))  # as training
        for event in whole:
            kind, by_host = _kind(event), event["cat"] == "user_annotation"
            first, last = (self.bin(event["ts"] + more) for more in (0, event["dur"]))
            if by_host and event["tid"] in training:
                self.own[kind][first : last + 1] = True
            elif (kind in told) != by_host and kind != "wait":
                self.busy[kind][first : last + 1] = True
        others = [self.own[kind] for kind in {"step", *self.own} - {"forward", "backward"}]
        passes = self.own["forward"] | self.own["backward"]
        self.own["compute"] = passes & ~np.any(others, axis=0)
        for kind in _ROWS.keys() - told:
            self.busy[kind] |= self.own[kind] & ~(self.own["wait"] & (kind != "wait"))
        self.rows = [kind for kind in _ROWS if self.busy[kind].any()]

    def bin(self, us: float) -> int:
        return max(-1, int((us - self.start) / self.us * _BINS)) if us >= self.start else 0

    def bars(self, bins: Bins) -> list[tuple[float, float]]:
        """Begin and length in ms of each stretch of ``bins``."""
        edges = np.flatnonzero(np.diff(bins, prepend=False, append=False)) * self.us / 1e3 / _BINS
        return list(zip(edges[::2], edges[1::2] - edges[::2], strict=True))


def draw(trace: Path) -> Path:
    """Draw the last whole step of a trace in the same folder, a row for each resource."""
    from matplotlib.figure import Figure

    found = Activity(json.loads(trace.read_text())["traceEvents"])
    rows, own, width = found.rows, found.own, found.us / 1e3
    figure = Figure(figsize=(12, 1.7 + 0.5 * len(rows)), layout="constrained")
    axes = figure.subplots()
    for kind, shade in _PASSES.items():
        bars, place = found.bars(own[kind]), (-1, len(rows) + 1)
        axes.broken_barh(bars, place, facecolors=shade, linewidth=0, zorder=0)
        left, long = max(bars, key=lambda bar: bar[1], default=(0.0, 0.0))
        name = kind if long > 0.05 * width else ""
        axes.text(left + long / 2, -0.72, name, ha="center", va="center", color="#555555")
    for row, kind in enumerate(rows):
        busy = found.busy[kind]
        hidden = busy & (found.busy["compute"] if kind != "wait" else True)
        is_pale = own["backward"] & (kind == "compute")
        for bins, alpha in ((busy, 0.4), (hidden & ~is_pale, 1.0)):
            style: Any = {"facecolors": _ROWS[kind][1], "alpha": alpha, "linewidth": 0}
            axes.broken_barh(found.bars(bins), (row - 0.31, 0.62), **style)
        share = f", {hidden.sum() / busy.sum():.0%} hidden" * (kind not in ("compute", "wait"))
        said = f"{busy.mean() * width:,.0f} ms{share}"
        axes.text(1.01, row, said, transform=axes.get_yaxis_transform(), va="center")
    labels = [_ROWS[kind][0] for kind in rows]
    axes.set(xlim=(0, width), ylim=(len(rows) - 0.45, -1), yticks=range(len(rows)))
    axes.set(yticklabels=labels, title=f"The last step: {width:,.0f} ms")
    axes.set(xlabel="ms since the step began; pale: not hidden behind compute")
    axes.spines[["top", "right", "left"]].set_visible(False)
    picture = trace.with_name(trace.name.replace("trace", "timeline")).with_suffix(".png")
    figure.savefig(picture, dpi=130)
    return picture
