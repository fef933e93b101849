"""In: phases, marked where work is done. Out: when each resource was busy during a step, and how much of that was hidden behind compute.

``with phase("update", unit):`` marks what the calling thread does; ``note`` what is known only afterwards. Under torch's profiler every
phase is a label, ``zk::update unit``; inside a ``Recorder`` it is a ``Span``. With neither it costs less than a microsecond.

```python
with Recorder() as recorder:
    ...  # one step
for row in recorder.timeline.overlap():
    print(row.resource, row.busy_ms, row.hidden_ms, row.share)
write_chrome_trace(recorder.timeline, "trace.json")  # for https://ui.perfetto.dev and chrome://tracing
```

What the figures mean:

- A phase holds its thread: of phases inside one another, a moment belongs to the innermost. So a wait inside backward is not backward.
- Compute is forward and backward on the training thread; on a GPU, the kernels. Where no kernels are recorded, it is the host's view.
- A resource is busy while at least one of its spans is under way; it is hidden while compute is busy too, and exposed otherwise.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import itertools
import json
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, ParamSpec, TypeVar

import torch

Resource = Literal["forward", "backward", "step", "compute", "update", "collective", "upload", "offload", "read", "write", "wait"]
RESOURCES: Mapping[Resource, str] = {
    "forward": "the training thread in the model's forward",
    "backward": "the training thread in the model's backward",
    "step": "the training thread in the optimizer's step, with none of the rest under way: norm, clipping, bookkeeping",
    "compute": "kernels on a device, where they are recorded",
    "update": "the optimizer's arithmetic and the cast, on the CPU or the device",
    "collective": "between ranks: from the launch until the result is in place",
    "upload": "over the link, host to device",
    "offload": "over the link, device to host",
    "read": "from the drive",
    "write": "to the drive",
    "wait": "a thread stands still, for what its name says; before a colon, the kind: drive, link, other ranks",
}
"""What a phase can be spent on."""
MEASURED: tuple[Resource, ...] = ("update", "collective", "upload", "offload", "read", "write")  # what wants to be hidden
Intervals = list[tuple[int, int]]  # (start, stop) in ns; in order, apart from one another, none empty

P = ParamSpec("P")
R = TypeVar("R")
# spans are written down on the clock of time.time_ns(), and measured on one that no one sets meanwhile
_OFFSET_NS = time.time_ns() - time.perf_counter_ns()
_RECORDERS: tuple[Recorder, ...] = ()
_changing = threading.Lock()
_profiled: Callable[[], bool] = torch._C._autograd._profiler_enabled  # of the calling thread


def now_ns() -> int:
    """Nanoseconds since 1970: the clock of all spans, the same on all threads, never set back."""
    return time.perf_counter_ns() + _OFFSET_NS


def recording() -> bool:
    """Whether spans are kept now; for work that is done only to describe them."""
    return bool(_RECORDERS)


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """One piece of work."""

    resource: Resource
    name: str
    start_ns: int
    stop_ns: int
    thread: str
    """Whose work it was, or who noted it."""
    holds: bool = True
    """The thread did nothing else meanwhile."""


class phase:  # a verb, as contextlib's are
    """The calling thread works on ``resource`` inside. Also a decorator. An exception ends the phase like anything else.

    Args:
        resource: a key of ``RESOURCES``.
        name: of the unit, or of what is waited for.
    """

    __slots__ = ("label", "name", "resource", "start_ns")

    def __init__(self, resource: Resource, name: str = "") -> None:
        self.resource, self.name = resource, name

    def __enter__(self) -> None:
        self.label = None
        if _profiled():
            self.label = torch.profiler.record_function(f"zk::{self.resource} {self.name}")
            self.label.__enter__()
        self.start_ns = now_ns()
        for recorder in _RECORDERS:
            recorder._began(self)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if _RECORDERS:
            stop_ns = now_ns()
            for recorder in _RECORDERS:
                recorder._ended(self, stop_ns)
        if self.label is not None:
            self.label.__exit__(kind, error, trace)

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def inside(*args: P.args, **kwargs: P.kwargs) -> R:
            with phase(self.resource, self.name):
                return function(*args, **kwargs)

        return inside


def note(resource: Resource, name: str, start_ns: int, stop_ns: int, holds: bool = False) -> None:
    """Keep a span that is over, of work that went on beside the calling thread (or held it). Times are ``now_ns()``'s."""
    for recorder in _RECORDERS:
        recorder.spans.append(Span(resource, name, start_ns, stop_ns, threading.current_thread().name, holds))


class Recorder:
    """Collects the spans of all threads while it is entered; ``timeline`` has them afterwards.

    Args:
        device: a CUDA device, whose kernels and copies are recorded too (through torch.profiler); None, or another, records the host.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self.spans: list[Span] = []  # appending needs no lock
        self.device = device if device is not None and device.type == "cuda" else None
        self.start_ns = 0
        self._open: dict[int, tuple[phase, str]] = {}
        self._timeline: Timeline | None = None
        self._profile: Any = None

    @property
    def timeline(self) -> Timeline:
        """What was recorded."""
        assert self._timeline is not None, "the timeline is there once the recorder is left"
        return self._timeline

    def _began(self, phase: phase) -> None:
        self._open[id(phase)] = (phase, threading.current_thread().name)

    def _ended(self, phase: phase, stop_ns: int) -> None:
        _, thread = self._open.pop(id(phase), (phase, ""))
        self.spans.append(Span(phase.resource, phase.name, phase.start_ns, stop_ns, thread or threading.current_thread().name))

    def __enter__(self) -> Recorder:
        global _RECORDERS
        self.thread = threading.current_thread().name
        if self.device is not None:
            self._profile = _start_profile(self.device)
        self.start_ns = now_ns()
        with _changing:
            _RECORDERS = (*_RECORDERS, self)
        return self

    def __exit__(self, *exc: object) -> None:
        global _RECORDERS
        if self.device is not None:
            torch.cuda.synchronize(self.device)  # what the step has asked of the device belongs to it
        stop_ns = now_ns()
        with _changing:
            _RECORDERS = tuple(recorder for recorder in _RECORDERS if recorder is not self)
        spans = list(self.spans)
        for under_way, thread in list(self._open.values()):
            spans.append(Span(under_way.resource, under_way.name, under_way.start_ns, stop_ns, thread))
        self._open.clear()
        if self._profile is not None:
            spans = _with_device(spans, _stop_profile(self._profile))
            self._profile = None
        kept = [
            dataclasses.replace(span, start_ns=max(span.start_ns, self.start_ns), stop_ns=min(span.stop_ns, stop_ns))
            for span in spans
            if span.start_ns <= stop_ns and span.stop_ns >= self.start_ns
        ]
        self._timeline = Timeline(sorted(kept, key=lambda span: span.start_ns), self.start_ns, stop_ns, self.thread)


# ---- arithmetic of intervals ------------------------------------------------------------------------------------------------------


def union(intervals: Iterable[tuple[int, int]]) -> Intervals:
    """The moments that lie in any of them."""
    merged: Intervals = []
    for start, stop in sorted(intervals):
        if stop <= start:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], stop))
        else:
            merged.append((start, stop))
    return merged


def intersection(first: Intervals, second: Intervals) -> Intervals:
    """The moments that lie in both."""
    both: Intervals = []
    i = j = 0
    while i < len(first) and j < len(second):
        start, stop = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if start < stop:
            both.append((start, stop))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return both


def length(intervals: Intervals) -> int:
    """Nanoseconds in all."""
    return sum(stop - start for start, stop in intervals)


def own(spans: Sequence[Span]) -> list[tuple[Span, int, int]]:
    """The moments of each of one thread's spans in which it is the innermost: the one that began last, then ends first, then is named first."""
    edges = sorted({edge for span in spans for edge in (span.start_ns, span.stop_ns)})
    waiting = sorted(spans, key=lambda span: span.start_ns)[::-1]  # the next to begin is the last
    active: list[tuple[int, int, int, Span]] = []
    pieces: list[tuple[Span, int, int]] = []
    order = 0
    for start, stop in itertools.pairwise(edges):
        while waiting and waiting[-1].start_ns <= start:
            span = waiting.pop()
            order += 1
            heapq.heappush(active, (-span.start_ns, span.stop_ns, order, span))
        while active and active[0][1] <= start:
            heapq.heappop(active)
        if active:
            inner = active[0][3]
            if pieces and pieces[-1][0] is inner and pieces[-1][2] == start:
                pieces[-1] = (inner, pieces[-1][1], stop)
            else:
                pieces.append((inner, start, stop))
    return pieces


# ---- what was achieved ------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """How long one resource was busy in a step, and what went on meanwhile. Milliseconds."""

    resource: str
    busy_ms: float
    hidden_ms: float
    """Of it, while compute was busy."""
    update_ms: float
    """Of the rest, while the update was busy."""

    @property
    def exposed_ms(self) -> float:
        """Not hidden behind compute."""
        return self.busy_ms - self.hidden_ms

    @property
    def share(self) -> float:
        """Hidden of busy, 0 to 1."""
        return self.hidden_ms / self.busy_ms if self.busy_ms else 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class Timeline:
    """The spans of one step, in order of their start."""

    spans: Sequence[Span]
    start_ns: int
    stop_ns: int
    thread: str
    """The training thread."""

    def trains(self, thread: str) -> bool:
        """Whether it is the training thread, or one of autograd's, for which the training thread waits: Python did not start these."""
        return thread == self.thread or thread.startswith("Dummy-")

    def pieces(self) -> list[tuple[Span, int, int]]:
        """Every span without the moments that belong to one inside it."""
        threads: dict[str, list[Span]] = {}
        free: list[tuple[Span, int, int]] = []
        for span in self.spans:
            if span.holds:
                threads.setdefault(self.thread if self.trains(span.thread) else span.thread, []).append(span)
            elif span.stop_ns > span.start_ns:
                free.append((span, span.start_ns, span.stop_ns))
        return sorted((*free, *(piece for spans in threads.values() for piece in own(spans))), key=lambda piece: piece[1])

    def busy(self, *resources: Resource) -> Intervals:
        """When any of the resources was at work; "wait" is the training thread's alone."""
        return union((start, stop) for span, start, stop in self.pieces() if span.resource in resources and self._counts(span))

    def _counts(self, span: Span) -> bool:
        return span.resource != "wait" or self.trains(span.thread)

    def compute(self) -> Intervals:
        """When compute was busy: the device's kernels if they were recorded, else forward and backward without their waits."""
        if any(span.resource == "compute" for span in self.spans):
            return self.busy("compute")
        return self.busy("forward", "backward")

    def overlap(self) -> list[Row]:
        """A row for compute, and one for each resource that was used and wants to be hidden behind it."""
        compute, update = self.compute(), self.busy("update")
        rows = [Row("compute", length(compute) / 1e6, length(compute) / 1e6, 0.0)]
        for resource in MEASURED:
            busy = self.busy(resource)
            if busy:
                hidden = intersection(busy, compute)
                beside = 0 if resource == "update" else length(intersection(busy, update)) - length(intersection(hidden, update))
                rows.append(Row(resource, length(busy) / 1e6, length(hidden) / 1e6, beside / 1e6))
        return rows

    def training_thread(self) -> dict[str, float]:
        """Where the training thread's time went, in ms: phase, or "wait: drive" -> ms; "other" outside of all phases."""
        spent: dict[str, float] = {}
        for span, start, stop in self.pieces():
            if span.holds and self.trains(span.thread):
                what = f"wait: {span.name.partition(':')[0]}" if span.resource == "wait" else span.resource
                spent[what] = spent.get(what, 0.0) + (stop - start) / 1e6
        spent["other"] = max(0.0, (self.stop_ns - self.start_ns) / 1e6 - sum(spent.values()))
        return spent


# ---- Chrome's trace format ---------------------------------------------------------------------------------------------------------

_DAY_NS = 86_400 * 10**9


def chrome_trace(timeline: Timeline, rank: int = 0) -> dict[str, Any]:
    """The spans as Chrome trace events: a process for the rank, a thread for each resource (or more, where its spans overlap).

    Format: "Trace Event Format", complete events; times in microseconds from ``baseTimeNanoseconds`` on, as torch.profiler writes them.
    """
    base = timeline.start_ns // _DAY_NS * _DAY_NS  # a double has no room for nanoseconds since 1970; and ranks share it
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}},
        {"ph": "M", "name": "process_sort_index", "pid": rank, "tid": 0, "args": {"sort_index": rank}},
    ]
    tid = 0
    for resource in RESOURCES:
        spans = [span for span in timeline.spans if span.resource == resource]
        for number, lane in enumerate(_lanes(spans)):
            tid += 1
            name = resource if number == 0 else f"{resource} {number + 1}"
            events.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": tid, "args": {"name": name}})
            events.append({"ph": "M", "name": "thread_sort_index", "pid": rank, "tid": tid, "args": {"sort_index": tid}})
            for span in lane:
                events.append(
                    {
                        "ph": "X",
                        "cat": resource,
                        "name": span.name or resource,
                        "pid": rank,
                        "tid": tid,
                        "ts": (span.start_ns - base) / 1e3,
                        "dur": (span.stop_ns - span.start_ns) / 1e3,
                        "args": {"thread": span.thread},
                    }
                )
    return {"displayTimeUnit": "ms", "baseTimeNanoseconds": base, "traceEvents": events}


def _lanes(spans: Iterable[Span]) -> list[list[Span]]:
    """Spans in as few rows as hold them side by side or inside one another, the only two ways that viewers can draw."""
    lanes: list[tuple[list[Span], list[int]]] = []  # spans, and the ends of those that the next one may lie inside of
    for span in sorted(spans, key=lambda span: (span.start_ns, -span.stop_ns)):
        for _, ends in lanes:
            while ends and ends[-1] <= span.start_ns:
                ends.pop()
        fits = (lane for lane in lanes if not lane[1] or span.stop_ns <= lane[1][-1])
        lane = next(fits, None)
        if lane is None:
            lane = ([], [])
            lanes.append(lane)
        lane[0].append(span)
        lane[1].append(span.stop_ns)
    return [lane for lane, _ in lanes]


def write_chrome_trace(timeline: Timeline, path: str | os.PathLike[str], rank: int = 0) -> Path:
    """Write ``chrome_trace`` as JSON."""
    target = Path(path)
    target.write_text(json.dumps(chrome_trace(timeline, rank)))
    return target


# ---- the device's side, from torch.profiler ------------------------------------------------------------------------------------------

_CLOCK = "zk::clock "


def _start_profile(device: torch.device) -> Any:
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities):  # the first one sets CUPTI up, which takes seconds
        pass
    torch.cuda.synchronize(device)
    profile = torch.profiler.profile(activities=activities)
    profile.start()
    set_clock()
    return profile


def set_clock() -> None:
    """Leave labels in torch's profile that say what ``now_ns()`` was just before them: ``device_spans`` puts both on one clock with these."""
    for _ in range(4):  # the first takes longest
        with torch.profiler.record_function(f"{_CLOCK}{now_ns()}"):
            pass


def _stop_profile(profile: Any) -> list[Span]:
    profile.stop()
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "kineto.json")
        profile.export_chrome_trace(path)
        with open(path) as file:
            return device_spans(json.load(file))


def device_spans(trace: Mapping[str, Any]) -> list[Span]:
    """Kernels and copies of a trace that torch.profiler exported, as spans on the clock of ``now_ns()``.

    Kineto's events: ``cat`` "kernel", "gpu_memcpy" or "gpu_memset", ``ts`` and ``dur`` in microseconds, the stream in ``args``. Times count
    from ``baseTimeNanoseconds`` (older torch: from 1970). The labels of ``set_clock``, if they are there, correct what the clocks differ by.
    """
    base = int(trace.get("baseTimeNanoseconds", 0))
    events = [event for event in trace.get("traceEvents", ()) if event.get("ph") == "X" and "ts" in event]
    clocks = [event for event in events if event.get("cat") == "user_annotation" and event["name"].startswith(_CLOCK)]
    shifts = (int(event["name"].removeprefix(_CLOCK)) - base - _ns(event["ts"]) for event in clocks)
    shift = max(shifts, default=0)  # a label begins a little after the time it names: the one that was delayed least
    spans = []
    for event in events:
        resource = _device_resource(event.get("cat", ""), event["name"])
        if resource is not None:
            start = base + shift + _ns(event["ts"])
            args = event.get("args", {})
            thread = f"device {args.get('device', event.get('pid'))} stream {args.get('stream', event.get('tid'))}"
            spans.append(Span(resource, event["name"], start, start + _ns(event.get("dur", 0)), thread, holds=False))
    return sorted(spans, key=lambda span: span.start_ns)


def _ns(us: float) -> int:
    """Microseconds, which may count from 1970, in nanoseconds."""
    whole = int(us)
    return whole * 1000 + round((us - whole) * 1000)


def _device_resource(category: str, name: str) -> Resource | None:
    lower = name.lower()
    if category == "kernel":
        if lower.removeprefix("void ").startswith("nccl"):
            return "collective"
        return "update" if "adam" in lower else "compute"
    if category == "gpu_memcpy":
        if "htod" in lower:
            return "upload"
        if "dtoh" in lower:
            return "offload"
        return None if "htoh" in lower else "compute"  # within the device
    return "compute" if category == "gpu_memset" else None


def _with_device(host: Iterable[Span], device: Sequence[Span]) -> list[Span]:
    """What the device says of its work is truer than what the host noted beside itself."""
    told = {span.resource for span in device}
    return [*(span for span in host if span.holds or span.resource not in told), *device]
