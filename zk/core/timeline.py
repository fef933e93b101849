"""Timelines of steps: when each resource was busy, and how much of that was hidden behind compute.

``with phase("update", unit):`` marks work of the calling thread, ``note`` work that is over. Under torch's profiler every phase is a label,
``zk::update unit``; inside a ``Recorder`` it is a ``Span``. With neither it costs less than a microsecond.

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
- A resource is busy while at least one of its spans is active; it is hidden while compute is busy too, and exposed otherwise.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import decimal
import functools
import itertools
import json
import operator
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch

Resource = Literal["forward", "backward", "step", "compute", "update", "collective", "upload", "offload", "read", "write", "wait"]
RESOURCES: Mapping[Resource, str] = {
    "forward": "the training thread in the model's forward",
    "backward": "the training thread in the model's backward",
    "step": "the training thread in the optimizer's step, outside of the others: norm, clipping, bookkeeping",
    "compute": "kernels on a device, where they are recorded",
    "update": "the optimizer's arithmetic and the cast, on the CPU or the device",
    "collective": "between ranks: from the launch until the result is in place",
    "upload": "over the link, host to device",
    "offload": "over the link, device to host",
    "read": "from the drive",
    "write": "to the drive",
    "wait": "a thread stands still, for what its name says; before a colon, the kind: drive, link, other ranks",
}
"""The kinds of phases."""
LABELS: Mapping[Resource, str] = {
    "forward": "training: forward",
    "backward": "training: backward",
    "step": "training: optimizer step",
    "compute": "GPU kernels",
    "update": "optimizer update",
    "collective": "between ranks",
    "upload": "copies to the GPU",
    "offload": "copies from the GPU",
    "read": "drive reads",
    "write": "drive writes",
    "wait": "waits",
}
"""Names of their rows in a trace."""
MEASURED: tuple[Resource, ...] = ("update", "collective", "upload", "offload", "read", "write")  # what wants to be hidden
Intervals = list[tuple[int, int]]  # (start, stop) in ns; in order, apart from one another, none empty

T = TypeVar("T")
# spans are written down on the clock of time.time_ns(), and measured on one that no one sets meanwhile
_OFFSET_NS = time.time_ns() - time.perf_counter_ns()
_RECORDERS: tuple[Recorder, ...] = ()
_changing = threading.Lock()
_profiled: Callable[[], bool] = torch._C._autograd._profiler_enabled  # of the calling thread


def now_ns() -> int:
    """Nanoseconds since 1970: the clock of all spans, the same on all threads, never set back."""
    return time.perf_counter_ns() + _OFFSET_NS


def recording() -> bool:
    """Check that spans are kept now, before work that is done only to describe them."""
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
    flow: int = 0
    """The number of the transfer that this is, or waits for; 0 for none."""


class _Thread(threading.local):
    """One thread's part in ``SPENT``."""

    background = False  # its waits keep no step from going on
    inner_ns = 0  # of what has been counted inside of the phase that is counted now


_thread = _Thread()
_COUNTED = ("wait", "update")
SPENT: collections.Counter[str] = collections.Counter()
"""Nanoseconds since the start of training threads in updates ("update") and in waits ("wait: drive", "wait: other ranks"), always counted."""


class Clock:
    """A clock of training, which stands while something else has the memory, and ``SPENT`` without what was spent meanwhile."""

    def __init__(self) -> None:
        self.away_ns, self.away_spent = 0, collections.Counter[str]()
        self.stands: tuple[int, collections.Counter[str]] | None = None  # time, and SPENT, of where it does

    def read(self) -> tuple[int, collections.Counter[str]]:
        """Nanoseconds, and those spent, by kind."""
        now_is, spent = self.stands or (now_ns(), collections.Counter(SPENT))
        return now_is - self.away_ns, spent - self.away_spent

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """The clock stands inside."""
        since, before = self.stands = now_ns(), collections.Counter(SPENT)
        try:
            yield
        finally:
            self.stands = None
            self.away_ns, self.away_spent = self.away_ns + now_ns() - since, self.away_spent + SPENT - before


def in_background() -> None:
    """Leave the calling thread, which works in the background of training, out of ``SPENT``."""
    _thread.background = True


class phase(contextlib.ContextDecorator):  # a verb, as contextlib's are
    """The calling thread works on ``resource`` inside. Also a decorator. An exception ends the phase like anything else.

    Args:
        resource: a key of ``RESOURCES``.
        name: of the unit, or of what is waited for.
        flow: the number of the transfer that this is, or waits for.
    """

    __slots__ = ("flow", "label", "name", "outer_ns", "resource", "start_ns")

    def __init__(self, resource: Resource, name: str = "", flow: int = 0) -> None:
        self.resource, self.name, self.flow = resource, name, flow

    def __enter__(self) -> None:
        self.label = None
        if _profiled():
            self.label = torch.profiler.record_function(f"zk::{self.resource} {self.name}")
            self.label.__enter__()
        if self.resource in _COUNTED:
            self.outer_ns, _thread.inner_ns = _thread.inner_ns, 0
        self.start_ns = time.perf_counter_ns()
        for recorder in _RECORDERS:
            recorder.open[self] = threading.current_thread().name

    def __exit__(self, *exc: Any) -> None:
        if self.resource in _COUNTED:
            taken = time.perf_counter_ns() - self.start_ns
            if not _thread.background:
                SPENT["update" if self.resource == "update" else f"wait: {self.name.partition(':')[0]}"] += taken - _thread.inner_ns
            _thread.inner_ns = self.outer_ns + taken
        if _RECORDERS:
            note(self.resource, self.name, self.start_ns + _OFFSET_NS, now_ns(), holds=True, flow=self.flow)
            for recorder in _RECORDERS:
                recorder.open.pop(self, None)
        if self.label is not None:
            self.label.__exit__(*exc)

    def _recreate_cm(self) -> phase:
        """Each call of a decorated function is a phase of its own."""
        return phase(self.resource, self.name)


def note(resource: Resource, name: str, start_ns: int, stop_ns: int, holds: bool = False, flow: int = 0) -> None:
    """Keep a span that is over, of work in the background of the calling thread (or that held it). Times are ``now_ns()``'s."""
    for recorder in _RECORDERS:
        recorder.spans.append(Span(resource, name, start_ns, stop_ns, threading.current_thread().name, holds, flow))


class Recorder:
    """Collects the spans of all threads while it is entered; ``timeline`` has them afterwards.

    Args:
        device: a CUDA device, whose kernels and copies are recorded too (through torch.profiler); None, or another, records the host.
    """

    timeline: Timeline
    """The record, once the recorder is left."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.spans: list[Span] = []  # appending needs no lock
        self.open: dict[phase, str] = {}  # and its thread
        self.device = device if device is not None and device.type == "cuda" else None

    def __enter__(self) -> Recorder:
        global _RECORDERS
        self.thread = threading.current_thread().name
        self.profile = _start_profile(self.device) if self.device is not None else None
        self.start_ns = now_ns()
        with _changing:
            _RECORDERS = (*_RECORDERS, self)
        return self

    def __exit__(self, *exc: object) -> None:
        global _RECORDERS
        if self.device is not None:
            torch.cuda.synchronize(self.device)  # what the step has asked of the device belongs to it
        start_ns, stop_ns = self.start_ns, now_ns()
        with _changing:
            _RECORDERS = tuple(recorder for recorder in _RECORDERS if recorder is not self)
        still = ((work, work.start_ns + _OFFSET_NS, thread) for work, thread in list(self.open.items()))
        spans = [*self.spans, *(Span(work.resource, work.name, start, stop_ns, thread) for work, start, thread in still)]
        if self.profile is not None:
            spans = _with_device(spans, _stop_profile(self.profile))
        kept = [
            dataclasses.replace(span, start_ns=max(span.start_ns, start_ns), stop_ns=min(span.stop_ns, stop_ns))
            for span in spans
            if span.start_ns <= stop_ns and span.stop_ns >= start_ns
        ]
        self.timeline = Timeline(sorted(kept, key=lambda span: span.start_ns), start_ns, stop_ns, self.thread)


# ---- figures -----------------------------------------------------------------------------------------------------------------------


def moments(spans: Iterable[Span]) -> Iterator[tuple[int, int, list[Span]]]:
    """Cut time wherever a span begins or ends: (start, stop, the spans that are active, in order), without gaps."""
    waiting = sorted(spans, key=lambda span: span.start_ns)[::-1]  # the next to begin is the last
    active: list[Span] = []
    for start, stop in itertools.pairwise(sorted({edge for span in waiting for edge in (span.start_ns, span.stop_ns)})):
        while waiting and waiting[-1].start_ns <= start:
            active.append(waiting.pop())
        active = [span for span in active if span.stop_ns > start]
        yield start, stop, active


def joined(pieces: Iterable[tuple[int, int, T]]) -> Iterator[tuple[int, int, T]]:
    """Join neighbours of one value, and leave out those whose value is false."""
    for value, run in itertools.groupby(pieces, key=operator.itemgetter(2)):
        if value:
            edges = [edge for start, stop, _ in run for edge in (start, stop)]
            yield edges[0], edges[-1], value


def own(spans: Iterable[Span]) -> list[Span]:
    """Pieces of one thread's spans in which each is the innermost: the one that began last, then ends first, then is named first."""
    inner = ((start, stop, max(active, key=lambda span: (span.start_ns, -span.stop_ns), default=None)) for start, stop, active in moments(spans))
    return [dataclasses.replace(span, start_ns=start, stop_ns=stop) for start, stop, span in joined(inner) if span is not None]


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """How long one resource was busy in a step, and what else was meanwhile. Milliseconds."""

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


@dataclasses.dataclass(frozen=True)
class Timeline:
    """The spans of one step, in order of their start."""

    spans: Sequence[Span]
    start_ns: int
    stop_ns: int
    thread: str
    """The training thread."""

    def trains(self, thread: str) -> bool:
        """Check for the training thread, or one of autograd's, for which the training thread waits: Python did not start these."""
        return thread == self.thread or thread.startswith("Dummy-")

    def pieces(self) -> list[Span]:
        """Every span without the moments that belong to one inside it."""
        threads: dict[str, list[Span]] = {}
        for span in self.spans:
            if span.holds:
                threads.setdefault(self.thread if self.trains(span.thread) else span.thread, []).append(span)
        free = [span for span in self.spans if not span.holds]
        return sorted((*free, *(piece for spans in threads.values() for piece in own(spans))), key=lambda piece: piece.start_ns)

    @functools.cached_property
    def _moments(self) -> list[tuple[int, int, set[Resource]]]:
        """The resources that were busy, moment by moment."""
        compute: set[Resource] = {"forward", "backward"}
        if any(span.resource == "compute" for span in self.spans):
            compute = {"compute"}
        found = []
        for start, stop, active in moments(self.pieces()):
            busy = {span.resource for span in active if span.resource != "wait" or self.trains(span.thread)}
            if busy & compute:
                busy.add("compute")
            found.append((start, stop, busy))
        return found

    def busy(self, *resources: Resource, hidden: bool = False) -> Intervals:
        """The times when any of the resources was at work, ``hidden``: while compute was, too; "wait" is the training thread's alone."""
        wanted = set(resources)
        pieces = ((start, stop, bool(busy & wanted) and ("compute" in busy or not hidden)) for start, stop, busy in self._moments)
        return [(start, stop) for start, stop, _ in joined(pieces)]

    def compute(self) -> Intervals:
        """The times when compute was busy: the device's kernels if they were recorded, else forward and backward without their waits."""
        return self.busy("compute")

    def overlap(self) -> list[Row]:
        """A row for compute, and one for each resource that was used and wants to be hidden behind it."""
        spent = collections.Counter[tuple[Resource, str]]()
        for start, stop, busy in self._moments:
            behind = next((other for other in ("compute", "update") if other in busy), "nothing")
            for resource in busy:
                spent[resource, "all"] += stop - start
                spent[resource, behind] += stop - start
        rows = []
        for resource in ("compute", *MEASURED):
            whole, hidden, update = (spent[resource, behind] / 1e6 for behind in ("all", "compute", "update"))
            if whole or resource == "compute":
                rows.append(Row(resource, whole, hidden, 0.0 if resource == "update" else update))
        return rows

    def training_thread(self) -> dict[str, float]:
        """The training thread's time, in ms, by phase, or "wait: drive" -> ms; "other" outside of all phases."""
        spent = collections.Counter[str]()
        for piece in self.pieces():
            if piece.holds and self.trains(piece.thread):
                kind = f"wait: {piece.name.partition(':')[0]}" if piece.resource == "wait" else piece.resource
                spent[kind] += piece.stop_ns - piece.start_ns
        spent["other"] = max(0, self.stop_ns - self.start_ns - spent.total())
        return {kind: ns / 1e6 for kind, ns in spent.items()}


# ---- Chrome's trace format ---------------------------------------------------------------------------------------------------------

_DAY_NS = 86_400 * 10**9


def chrome_trace(timeline: Timeline, rank: int = 0) -> dict[str, Any]:
    """The spans as Chrome trace events: a process for the rank, a thread for each resource (or more, where its spans overlap), and arrows from each
    read to what used it.

    Format: "Trace Event Format", complete and flow events; times in microseconds from ``baseTimeNanoseconds`` on, as torch.profiler writes them.
    """
    base = timeline.start_ns // _DAY_NS * _DAY_NS  # a double has no room for nanoseconds since 1970; and ranks share it
    events: list[dict[str, Any]] = []

    def name(kind: str, name: str, tid: int, place: int) -> None:
        for key, value in (("name", name), ("sort_index", place)):
            events.append({"ph": "M", "name": f"{kind}_{key}", "pid": rank, "tid": tid, "args": {key: value}})

    name("process", f"rank {rank}", 0, rank)
    tid, rows = 0, list[tuple[Span, int]]()
    for resource in RESOURCES:
        for number, lane in enumerate(_lanes(span for span in timeline.spans if span.resource == resource), 1):
            tid += 1
            name("thread", LABELS[resource] if number == 1 else f"{LABELS[resource]} {number}", tid, tid)
            rows += [(span, tid) for span in lane]
            for span in lane:
                start, duration = (span.start_ns - base) / 1e3, (span.stop_ns - span.start_ns) / 1e3
                event = {"ph": "X", "cat": resource, "name": span.name or resource, "pid": rank, "tid": tid, "ts": start, "dur": duration}
                events.append({**event, "args": {"thread": span.thread}})
    for read, source, user, target, at_ns in _arrows(rows):
        flow = {"cat": "read", "name": "to its use", "id": f"{rank}.{read.flow}", "pid": rank}
        events.append({**flow, "ph": "s", "tid": source, "ts": (max(read.start_ns, read.stop_ns - 1) - base) / 1e3})
        events.append({**flow, "ph": "f", "bp": "e", "tid": target, "ts": (at_ns - base) / 1e3, "args": {"use": user.name or user.resource}})
    return {"displayTimeUnit": "ms", "baseTimeNanoseconds": base, "traceEvents": events}


def _arrows(rows: Iterable[tuple[Span, int]]) -> Iterator[tuple[Span, int, Span, int, int]]:
    """For each read that something waited for: it and its row, the innermost phase around the wait (the wait itself, outside of all) and its row,
    and the last moment of the wait in that phase. Of a read in pieces it is the last one.

    Arrows begin and end a nanosecond before spans do: at the very end, a viewer finds the span or not, as rounding will have it.
    """
    ordered = sorted(rows, key=lambda row: (row[0].start_ns, -row[0].stop_ns))
    reads = {span.flow: (span, row) for span, row in sorted(ordered, key=lambda row: row[0].stop_ns) if span.resource == "read" and span.flow}
    around: dict[str, list[tuple[Span, int]]] = collections.defaultdict(list)
    for span, row in ordered:
        phases = around[span.thread]
        while phases and phases[-1][0].stop_ns <= span.start_ns:
            phases.pop()
        if span.resource != "wait" and span.holds:
            phases.append((span, row))
        elif span.resource == "wait" and span.flow in reads:
            user, target = phases[-1] if phases else (span, row)
            yield *reads[span.flow], user, target, max(user.start_ns, min(span.stop_ns, user.stop_ns) - 1)


def _lanes(spans: Iterable[Span]) -> list[list[Span]]:
    """Spans in as few rows as hold them side by side or inside one another, the only two ways that viewers can draw."""
    lanes: list[tuple[list[Span], list[int]]] = []  # spans, and the ends of those that the next one may lie inside of
    for span in sorted(spans, key=lambda span: (span.start_ns, -span.stop_ns)):
        for row in lanes:
            while row[1] and row[1][-1] <= span.start_ns:
                row[1].pop()
            if not row[1] or span.stop_ns <= row[1][-1]:
                break
        else:
            row = ([], [])
            lanes.append(row)
        row[0].append(span)
        row[1].append(span.stop_ns)
    return [lane for lane, _ in lanes]


def write_chrome_trace(timeline: Timeline, path: str | os.PathLike[str], rank: int = 0) -> Path:
    """Write ``chrome_trace`` as JSON."""
    target = Path(path)
    target.write_text(json.dumps(chrome_trace(timeline, rank)))
    return target


# ---- the device's side, from torch.profiler ------------------------------------------------------------------------------------------

_CLOCK = "zk::clock "
# category and name of an event, in lower case, by the first that fits
_EVENTS: Mapping[str, Resource | None] = {
    r"kernel (void )?nccl": "collective",
    r"kernel .*adam": "update",
    r"kernel": "compute",
    r"gpu_memcpy .*htod": "upload",
    r"gpu_memcpy .*dtoh": "offload",
    r"gpu_memcpy .*htoh": None,
    r"gpu_mem(cpy|set)": "compute",  # within the device
}


def _start_profile(device: torch.device) -> torch.profiler.profile:
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


def _stop_profile(profile: torch.profiler.profile) -> list[Span]:
    profile.stop()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kineto.json"
        profile.export_chrome_trace(str(path))
        return device_spans(json.loads(path.read_text()))


def device_spans(trace: Mapping[str, Any]) -> list[Span]:
    """Kernels and copies of a trace that torch.profiler exported, as spans on the clock of ``now_ns()``.

    Kineto's events: ``cat`` "kernel", "gpu_memcpy" or "gpu_memset", ``ts`` and ``dur`` in microseconds, the stream in ``args``. Times count
    from ``baseTimeNanoseconds`` (older torch: from 1970). The labels of ``set_clock``, if they are there, correct what the clocks differ by.
    """
    base = int(trace.get("baseTimeNanoseconds", 0))
    events = [event for event in trace.get("traceEvents", ()) if event.get("ph") == "X" and "ts" in event]
    clocks = [event for event in events if event.get("cat") == "user_annotation" and event["name"].startswith(_CLOCK)]
    shifts = (int(event["name"].removeprefix(_CLOCK)) - base - _ns(event["ts"]) for event in clocks)
    zero = base + max(shifts, default=0)  # a label begins a little after the time it names: the one that was delayed least
    spans = []
    for event in events:
        key = f"{event.get('cat', '')} {event['name']}".lower()
        resource = next((resource for pattern, resource in _EVENTS.items() if re.match(pattern, key)), None)
        if resource is not None:
            start, args = zero + _ns(event["ts"]), event.get("args", {})
            thread = f"device {args.get('device', event.get('pid'))} stream {args.get('stream', event.get('tid'))}"
            spans.append(Span(resource, event["name"], start, start + _ns(event.get("dur", 0)), thread, holds=False))
    return sorted(spans, key=lambda span: span.start_ns)


def _ns(us: float) -> int:
    """Microseconds, which may count from 1970, in nanoseconds."""
    return round(decimal.Decimal(us) * 1000)


def _with_device(host: Iterable[Span], device: Sequence[Span]) -> list[Span]:
    """Replace notes of the host in the background by what the device says of the same resources."""
    told = {span.resource for span in device}
    return [*(span for span in host if span.holds or span.resource not in told), *device]
