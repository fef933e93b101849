"""Phases, what is told from them, and the command that shows it."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from benchmarks.throttled import ThrottledLink
from zk.core import timeline as module
from zk.core.timeline import (
    MEASURED,
    RESOURCES,
    Recorder,
    Resource,
    Span,
    Timeline,
    chrome_trace,
    device_spans,
    joined,
    note,
    now_ns,
    own,
    phase,
    recording,
    set_clock,
    write_chrome_trace,
)
from zk.parallel.comm import Group
from zk.tools.cli import app

MS = 1_000_000


def span(resource: Resource, start: int, stop: int, thread: str = "main", name: str = "", holds: bool = True) -> Span:
    return Span(resource, name, start * MS, stop * MS, thread, holds)


def timeline(*spans: Span, stop: int = 100) -> Timeline:
    return Timeline(sorted(spans, key=lambda s: s.start_ns), 0, stop * MS, "main")


def length(intervals: list[tuple[int, int]]) -> int:
    return sum(stop - start for start, stop in intervals)


def rows(*spans: Span) -> dict[str, tuple[float, float, float]]:
    return {row.resource: (row.busy_ms, row.hidden_ms, row.update_ms) for row in timeline(*spans).overlap()}


# ---- what the figures mean -------------------------------------------------------------------------------------------------------


def test_what_lies_within_compute_is_hidden_and_the_rest_is_exposed() -> None:
    told = rows(span("forward", 0, 40), span("backward", 50, 80), span("read", 30, 60, "io"))
    assert told == {"compute": (70, 70, 0), "read": (30, 20, 0)}
    row = timeline(span("forward", 0, 40), span("read", 30, 50, "io")).overlap()[1]
    assert (row.share, row.exposed_ms) == (0.5, 10)


def test_transfers_at_once_are_busy_once() -> None:
    assert rows(span("forward", 0, 10), span("write", 5, 25, "a"), span("write", 15, 35, "b"), span("write", 16, 17, "c"))["write"] == (30, 5, 0)


def test_a_wait_inside_backward_is_not_compute_and_hides_nothing() -> None:
    spans = (span("backward", 0, 100), span("wait", 20, 50, name="drive"), span("read", 10, 60, "io"))
    assert rows(*spans) == {"compute": (70, 70, 0), "read": (50, 20, 0)}


def test_waits_of_other_threads_do_not_stop_compute() -> None:
    told = timeline(span("forward", 0, 10), span("wait", 2, 8, "worker"))
    assert told.compute() == [(0, 10 * MS)] and told.busy("wait") == []


def test_what_autograds_own_thread_waits_for_is_time_of_the_training_thread() -> None:
    told = timeline(span("backward", 0, 10), span("wait", 2, 8, "Dummy-3", "link"), stop=10)
    assert length(told.compute()) == 4 * MS and told.training_thread() == {"backward": 4, "wait: link": 6, "other": 0}


def test_an_update_by_the_training_thread_is_exposed_even_inside_backward_and_one_beside_it_is_hidden() -> None:
    assert rows(span("backward", 0, 10), span("update", 4, 6))["update"] == (2, 0, 0)
    assert rows(span("backward", 0, 10), span("update", 4, 6, "worker"))["update"] == (2, 2, 0)


def test_an_update_that_waits_for_the_drive_is_not_busy_and_what_goes_on_beside_the_update_is_told() -> None:
    told = rows(span("step", 0, 100), span("update", 0, 50), span("wait", 10, 30), span("read", 0, 40, "io"))
    assert told["update"] == (30, 0, 0) and told["read"] == (40, 0, 20)


def test_a_collective_noted_beside_the_training_thread_leaves_compute_alone() -> None:
    assert rows(span("forward", 0, 10), span("collective", 2, 12, holds=False)) == {"compute": (10, 10, 0), "collective": (10, 8, 0)}


def test_kernels_of_a_device_are_its_compute_instead_of_the_hosts_view() -> None:
    device = [span("compute", 30, 60, "stream 7", holds=False), span("upload", 20, 40, "stream 9", holds=False)]
    assert rows(span("forward", 0, 50), *device) == {"compute": (30, 30, 0), "upload": (20, 10, 0)}


def test_the_training_threads_time_is_divided_without_a_rest() -> None:
    told = timeline(
        span("forward", 5, 30), span("forward", 6, 20), span("wait", 10, 15, name="other ranks: gather of unit 'a'"), span("step", 40, 60)
    )
    assert told.training_thread() == {"forward": 20, "wait: other ranks": 5, "step": 20, "other": 55}


times = st.integers(0, 40)
spans = st.builds(
    lambda resource, a, b, thread, holds: span(resource, min(a, b), max(a, b), thread, holds=holds),
    st.sampled_from(list(RESOURCES)),
    times,
    times,
    st.sampled_from(["main", "io", "worker"]),
    st.booleans(),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(spans, max_size=12))
def test_figures_are_those_of_a_count_moment_by_moment(some: list[Span]) -> None:
    told = timeline(*some, stop=40)
    ticks: dict[Resource, set[int]] = {resource: set() for resource in RESOURCES}
    for tick in range(40):
        for thread in ("main", "io", "worker"):
            held = [s for s in told.spans if s.thread == thread and s.holds and s.start_ns <= tick * MS < s.stop_ns]
            # of spans alike in start and end, the first in the list is inside: it was the first to end
            inner = max(held, key=lambda s: (s.start_ns, -s.stop_ns), default=None)
            free = [s for s in told.spans if s.thread == thread and not s.holds and s.start_ns <= tick * MS < s.stop_ns]
            for active in (*([inner] if inner else []), *free):
                if active.resource != "wait" or thread == "main":
                    ticks[active.resource].add(tick)
    compute = ticks["compute"] if any(s.resource == "compute" for s in some) else ticks["forward"] | ticks["backward"]
    assert length(told.compute()) == len(compute) * MS
    by_name = {row.resource: row for row in told.overlap()}
    for resource in MEASURED:
        expected = (len(ticks[resource]), len(ticks[resource] & compute), len((ticks[resource] - compute) & ticks["update"]))
        assert length(told.busy(resource, hidden=True)) == expected[1] * MS
        row = by_name.get(resource)
        if row is None:
            assert expected[0] == 0
            continue
        assert (row.busy_ms, row.hidden_ms) == expected[:2]
        assert resource == "update" or row.update_ms == expected[2]
        assert row.busy_ms <= sum(s.stop_ns - s.start_ns for s in some if s.resource == resource) / MS
        assert 0 <= row.hidden_ms <= row.busy_ms and 0 <= row.share <= 1
    assert told.training_thread()["other"] >= 0


def test_neighbours_of_one_value_are_joined_and_intervals_lie_apart() -> None:
    assert list(joined([(0, 1, "a"), (1, 3, "a"), (3, 4, ""), (4, 5, "a"), (5, 6, "b")])) == [(0, 3, "a"), (4, 5, "a"), (5, 6, "b")]
    told = timeline(span("read", 0, 2, "a"), span("read", 1, 3, "b"), span("read", 3, 4, "a"), span("read", 6, 6), span("write", 7, 9))
    assert told.busy("read") == [(0, 4 * MS)] and told.busy("read", "write") == [(0, 4 * MS), (7 * MS, 9 * MS)]


def test_pieces_of_a_thread_do_not_overlap_and_leave_out_what_is_inside() -> None:
    outer, inner = span("backward", 0, 10), span("wait", 4, 6)
    assert own([outer, inner]) == [span("backward", 0, 4), inner, span("backward", 6, 10)]


# ---- recording -------------------------------------------------------------------------------------------------------------------


def test_spans_of_several_threads_keep_their_threads_names_and_lie_on_one_clock() -> None:
    def work(name: str) -> None:
        for _ in range(50):
            with phase("read", name):
                pass

    before = time.time_ns()
    with Recorder() as recorder:
        threads = [threading.Thread(target=work, args=(f"job {n}",), name=f"io-{n}") for n in range(4)]
        for thread in threads:
            thread.start()
        with phase("forward", "model"):
            for thread in threads:
                thread.join()
    told = recorder.timeline.spans
    assert len(told) == 201
    for n in range(4):
        assert [s.thread for s in told if s.name == f"job {n}"] == [f"io-{n}"] * 50
    assert all(recorder.timeline.start_ns <= s.start_ns <= s.stop_ns <= recorder.timeline.stop_ns for s in told)
    assert abs(recorder.timeline.start_ns - before) < 60e9 and recorder.timeline.thread == threading.current_thread().name


def test_without_a_recorder_nothing_is_kept_and_no_label_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    with Recorder() as recorder:
        assert recording()
    assert not recording()

    def refuse(*_: object) -> None:
        raise AssertionError("called though nobody records")

    monkeypatch.setattr(torch.profiler, "record_function", refuse)
    monkeypatch.setattr(module, "Span", refuse)
    monkeypatch.setattr(threading, "current_thread", refuse)
    with phase("update", "unit"):
        note("read", "block", now_ns(), now_ns())
    assert recorder.timeline.spans == []


def test_an_exception_inside_keeps_the_span_and_goes_on() -> None:
    with pytest.raises(KeyError), Recorder() as recorder, phase("backward", "whole"), phase("update", "unit"):
        raise KeyError("x")
    assert [(s.resource, s.name) for s in recorder.timeline.spans] == [("backward", "whole"), ("update", "unit")]
    assert not recording()


def test_a_phase_is_a_decorator_and_each_call_a_span() -> None:
    @phase("update", "unit")
    def double(x: int, *, plus: int = 0) -> int:
        return 2 * x + plus if x > 2 else double(x + 1, plus=plus)

    with Recorder() as recorder:
        assert double(2, plus=1) == 7
    assert len(recorder.timeline.spans) == 2 and double.__name__ == "double"


def test_work_that_goes_on_across_the_ends_of_the_recording_counts_with_the_part_inside() -> None:
    entered, leave, gone = threading.Event(), threading.Event(), threading.Event()

    def work(resource: Resource) -> Callable[[], None]:
        def run() -> None:
            with phase(resource, ""):
                entered.set()
                leave.wait(10)
            gone.set()

        return run

    early = threading.Thread(target=work("read"))
    early.start()
    entered.wait(10)
    with Recorder() as recorder:
        leave.set()
        early.join()
        entered.clear()
        leave.clear()
        late = threading.Thread(target=work("write"))
        late.start()
        entered.wait(10)
    leave.set()
    late.join()
    told = recorder.timeline
    assert [s.resource for s in told.spans] == ["read", "write"]
    assert told.spans[0].start_ns == told.start_ns and told.spans[1].stop_ns == told.stop_ns


def test_under_torchs_profiler_phases_are_labels() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile, phase("update", "blocks.0"):
        pass
    assert "zk::update blocks.0" in [event.name for event in profile.events()]


def test_a_collective_is_a_span_until_it_ends_and_not_until_it_is_waited_for(tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        comm = Group(None)
        comm.names = ["blocks.0"]
        bucket, shard = torch.ones(64), torch.empty(64)
        with Recorder() as recorder:
            pending = comm.reduce_scatter(0, bucket, shard)
            deadline = time.monotonic() + 30
            while not any(s.resource == "collective" for s in recorder.spans) and time.monotonic() < deadline:
                time.sleep(0.001)
            waited_from = now_ns()
            pending.wait()
        comm.close()
    finally:
        torch.distributed.destroy_process_group()
    assert torch.equal(shard, bucket)
    told = {(s.resource, s.name, s.holds): s for s in recorder.timeline.spans}
    under_way = told["collective", "reduce of unit 'blocks.0'", False]
    assert under_way.stop_ns < waited_from
    assert told["collective", "reduce of unit 'blocks.0': its arithmetic", True].start_ns >= waited_from
    assert ("wait", "other ranks: reduce of unit 'blocks.0'", True) in told


def test_copies_over_a_throttled_link_are_spans_of_its_two_directions() -> None:
    link = ThrottledLink(64e6)
    host, device = torch.zeros(1 << 18), torch.ones(1 << 18)
    recorder = Recorder()

    class Waiting:
        """Past when this thread waits for the link."""

        done = False

        def wait(self) -> None:
            while not any(phase.resource == "wait" for phase in list(recorder.open)):
                time.sleep(0.001)

    with recorder:
        arrived = [link.offload(host, device, [link.mark(), Waiting()]), link.upload(torch.empty_like(device), host.clone(), [])]
        for event in arrived:
            link.follow(event)
    told = {s.resource: s for s in recorder.timeline.spans}
    assert set(told) == {"offload", "upload", "wait"} and told["wait"].name == "link"
    assert (told["offload"].stop_ns - told["offload"].start_ns) >= 15 * MS  # 1 MiB at 64 MB/s takes 16.4 ms
    assert {told["offload"].thread, told["upload"].thread} == {"zk-twin-offload", "zk-twin-upload"}


# ---- Chrome's format -------------------------------------------------------------------------------------------------------------


def test_a_chrome_trace_holds_every_span_and_survives_json(tmp_path: Path) -> None:
    start = now_ns()
    some = [
        Span("forward", "model", start + 5, start + 105_003, "main"),
        Span("read", "1024 KiB", start + 1_000, start + 3_000, "io-0", flow=7),
        Span("read", "1024 KiB", start + 2_000, start + 4_000, "io-1", flow=7),
        Span("wait", "drive", start + 3_000, start + 4_500, "main", flow=7),
        Span("wait", "drive", start + 5_000, start + 5_500, "main", flow=8),  # for a write
    ]
    trace = json.loads(write_chrome_trace(Timeline(some, start, start + 200_000, "main"), tmp_path / "trace.json", rank=3).read_text())
    assert trace == chrome_trace(Timeline(some, start, start + 200_000, "main"), rank=3)
    complete = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    names = {event["tid"]: event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "thread_name"}
    again = {
        (
            event["cat"],
            event["name"],
            trace["baseTimeNanoseconds"] + round(event["ts"] * 1e3),
            trace["baseTimeNanoseconds"] + round((event["ts"] + event["dur"]) * 1e3),
            event["args"]["thread"],
        )
        for event in complete
    }
    assert again == {(s.resource, s.name, s.start_ns, s.stop_ns, s.thread) for s in some}
    assert {event["pid"] for event in trace["traceEvents"]} == {3}
    assert sorted(names[event["tid"]] for event in complete) == ["drive reads", "drive reads 2", "training: forward", "waits", "waits"]
    arrows = [event for event in trace["traceEvents"] if event["ph"] in "sf"]
    found = [(event["ph"], names[event["tid"]], trace["baseTimeNanoseconds"] + round(event["ts"] * 1e3) - start) for event in arrows]
    assert found == [("s", "drive reads 2", 3_999), ("f", "training: forward", 4_499)]
    assert {event["ph"] for event in trace["traceEvents"]} == {"M", "X", "s", "f"}


def inside(trace: dict[str, Any]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Arrows of a trace, each with the innermost span of its row: found by Chrome (in doubles) and by Perfetto (in nanoseconds, without the end)."""
    spans: dict[int, list[dict[str, Any]]] = {}
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            spans.setdefault(event["tid"], []).append(event)
    found = []
    for arrow in trace["traceEvents"]:
        if arrow["ph"] in "sf":
            at = round(arrow["ts"] * 1e3)
            around = [
                span
                for span in spans[arrow["tid"]]
                if span["ts"] <= arrow["ts"] <= span["ts"] + span["dur"]
                and round(span["ts"] * 1e3) <= at < round(span["ts"] * 1e3) + round(span["dur"] * 1e3)
            ]
            assert around, f"an arrow that no viewer draws: {arrow}"
            found.append((arrow, max(around, key=lambda span: (span["ts"], -span["dur"]))))
    return found


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 86_399 * 10**9), st.lists(st.integers(1, 10**7), min_size=3, max_size=3), st.booleans())
def test_arrows_end_inside_of_spans_at_any_time_of_the_day(start: int, lengths: list[int], in_phase: bool) -> None:
    first, wait, stop, phase_stop = itertools.accumulate(lengths, initial=start)
    some = [Span("read", "4 KiB at 0", first, wait, "io", flow=1), Span("wait", "drive", wait, stop, "main", flow=1)]
    if in_phase:
        some.append(Span("update", "unit", first, phase_stop, "main"))
    (begin, source), (end, target) = inside(chrome_trace(Timeline(some, start, phase_stop, "main")))
    assert (begin["ph"], source["cat"], end["ph"], target["cat"]) == ("s", "read", "f", "update" if in_phase else "wait")


@settings(max_examples=100, deadline=None)
@given(st.lists(spans, max_size=15))
def test_in_a_chrome_trace_events_of_one_row_lie_beside_or_inside_one_another(some: list[Span]) -> None:
    events = [event for event in chrome_trace(timeline(*some))["traceEvents"] if event["ph"] == "X"]
    assert len(events) == len(some)
    for a in events:
        for b in events:
            if a["tid"] == b["tid"] and a["ts"] < b["ts"] < a["ts"] + a["dur"]:
                assert b["ts"] + b["dur"] <= a["ts"] + a["dur"]


# ---- the device's side -----------------------------------------------------------------------------------------------------------

BASE = 1_790_857_026_000_000_000
KINETO = {
    "schemaVersion": 1,
    "deviceProperties": [{"id": 0, "name": "a GPU"}],
    "baseTimeNanoseconds": BASE,
    "traceEvents": [
        {"ph": "X", "cat": "user_annotation", "name": f"zk::clock {BASE + 1_000_000}", "pid": 1, "tid": 1, "ts": 1400.25, "dur": 3},
        {"ph": "X", "cat": "user_annotation", "name": f"zk::clock {BASE + 1_500_000}", "pid": 1, "tid": 1, "ts": 1501.25, "dur": 1},
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 1510, "dur": 40, "args": {"External id": 5}},
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaMemcpyAsync", "pid": 1, "tid": 1, "ts": 1511, "dur": 4, "args": {"correlation": 9}},
        {"ph": "X", "cat": "kernel", "name": "ampere_bf16_s16816gemm_bf16_128x64", "pid": 0, "tid": 7, "ts": 1520.5, "dur": 30.25,
         "args": {"device": 0, "stream": 7, "correlation": 8}},
        {"ph": "X", "cat": "kernel", "name": "_adam_kernel", "pid": 0, "tid": 7, "ts": 1600, "dur": 10, "args": {"device": 0, "stream": 7}},
        {"ph": "X", "cat": "kernel", "name": "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "pid": 0, "tid": 20,
         "ts": 1530, "dur": 25, "args": {"device": 0, "stream": 20}},
        {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy HtoD (Pinned -> Device)", "pid": 0, "tid": 13, "ts": 1540, "dur": 20,
         "args": {"device": 0, "stream": 13, "bytes": 4096}},
        {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy DtoH (Device -> Pinned)", "pid": 0, "tid": 14, "ts": 1545, "dur": 5,
         "args": {"device": 0, "stream": 14, "bytes": 4096}},
        {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy DtoD (Device -> Device)", "pid": 0, "tid": 7, "ts": 1552, "dur": 1, "args": {"stream": 7}},
        {"ph": "X", "cat": "gpu_memset", "name": "Memset (Device)", "pid": 0, "tid": 7, "ts": 1554, "dur": 1, "args": {"device": 0, "stream": 7}},
        {"ph": "X", "cat": "gpu_user_annotation", "name": "zk::forward model", "pid": 0, "tid": 7, "ts": 1520, "dur": 90},
        {"ph": "s", "cat": "ac2g", "name": "ac2g", "pid": 1, "tid": 1, "ts": 1511, "id": 9},
        {"ph": "i", "name": "Record Window End", "pid": "", "tid": "", "ts": 1700, "s": "g"},
        {"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "ts": 0, "args": {"name": "python"}},
    ],
}  # fmt: skip


def test_kernels_and_copies_of_a_kineto_trace_become_spans_on_our_clock() -> None:
    told = device_spans(KINETO)
    assert [(s.resource, s.thread) for s in told] == [
        ("compute", "device 0 stream 7"),
        ("collective", "device 0 stream 20"),
        ("upload", "device 0 stream 13"),
        ("offload", "device 0 stream 14"),
        ("compute", "device 0 stream 7"),
        ("compute", "device 0 stream 7"),
        ("update", "device 0 stream 7"),
    ]
    # the label that came soonest after its time was 1.25 us late: so much is kineto's clock ahead
    assert (told[0].start_ns, told[0].stop_ns) == (BASE + 1_520_500 - 1_250, BASE + 1_550_750 - 1_250)
    assert not any(s.holds for s in told)


def test_a_kineto_trace_of_older_torch_counts_from_1970() -> None:
    old = {"traceEvents": [{"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": 7, "ts": 1_790_857_026_000_001, "dur": 2}]}
    assert [(s.start_ns, s.stop_ns, s.thread) for s in device_spans(old)] == [(BASE + 1_000, BASE + 3_000, "device 0 stream 7")]


def test_what_the_device_tells_stands_in_for_what_the_host_noted() -> None:
    host = [span("forward", 0, 10), span("collective", 0, 9, holds=False), span("collective", 1, 2), span("read", 0, 1, holds=False)]
    device = [span("collective", 3, 5, "stream 20", holds=False)]
    assert module._with_device(host, device) == [host[0], host[2], host[3], device[0]]


def test_torchs_own_trace_is_put_on_our_clock(tmp_path: Path) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        set_clock()
        start = now_ns()
        with torch.profiler.record_function("here"):
            pass
    profile.export_chrome_trace(str(tmp_path / "kineto.json"))
    trace = json.loads((tmp_path / "kineto.json").read_text())
    for event in trace["traceEvents"]:  # a label stands in for a kernel, which only a GPU has
        if event.get("name") == "here":
            event["cat"] = "kernel"
    [here] = device_spans(trace)
    assert abs(here.start_ns - start) < 50 * MS


# ---- the command -----------------------------------------------------------------------------------------------------------------


def test_train_with_profile_writes_a_trace_and_a_picture_and_prints_what_was_hidden(tmp_path: Path) -> None:
    small = ["--steps", "3", "--batch", "2", "--layers", "2", "--width", "32", "--heads", "2", "--context", "32", "--sample", "0"]
    drive = ["--optimizer-tier", "nvme", "--param-tier", "nvme", "--nvme-path", str(tmp_path)]
    done = CliRunner().invoke(app, ["train", *small, *drive, "--profile", "--out", str(tmp_path / "out")], env={"COLUMNS": "100"})
    assert done.exit_code == 0, done.output
    assert "overlap in step 2" in done.output and "not seen during this step: collective, upload, offload" in done.output
    for resource in ("read", "write", "update"):
        line = next(line for line in done.output.splitlines() if line.startswith(f"{resource} "))
        assert line.rstrip().endswith("%") and float(line.split()[1]) >= float(line.split()[2]) >= 0
    assert (tmp_path / "out" / "timeline.png").read_bytes().startswith(b"\x89PNG")
    events = json.loads((tmp_path / "out" / "trace.json").read_text())["traceEvents"]
    seen = {(event["cat"], event["name"]) for event in events if event["ph"] == "X"}
    assert {("forward", "model"), ("forward", "blocks.1"), ("backward", "blocks.0"), ("step", "optimizer")} <= seen
    assert {"read", "write", "update"} <= {category for category, _ in seen}
    assert not recording()
