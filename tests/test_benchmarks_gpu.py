"""`make gpu` in its dry run: all of it executes without a GPU, so that what a GPU sees first is right the first time."""

from __future__ import annotations

import argparse
import dataclasses
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

FOLDER = Path(__file__).parent.parent / "benchmarks"
GIB = 1 << 30
PARTS = ("gpu", "gpu_common", "gpu_floors", "gpu_model", "gpu_plan", "gpu_report", "gpu_step")


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    """The modules of `make gpu`."""
    monkeypatch.syspath_prepend(str(FOLDER))
    return {name: importlib.import_module(name) for name in PARTS}


def machine(device: int = 4 * GIB, host: int = 24 * GIB, dry: bool = True) -> dict[str, Any]:
    """The row of a machine."""
    found = {"section": "floors", "name": "machine", "kind": "machine", "dry": dry, "time": "2026-01-01T00:00:00", "gpu": "a GPU", "driver": "1"}
    found |= {"device_nbytes": device, "free_nbytes": device, "host_nbytes": host, "capability": "9.0", "pcie": "generation 5, 16 lanes"}
    return found | dict.fromkeys(("cores", "cpu", "linux", "python", "torch", "cuda", "triton", "cupy", "numba"), "1")


def printed(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    """Rows that a part has printed."""
    return [json.loads(line.removeprefix("row ")) for line in capsys.readouterr().out.splitlines() if line.startswith("row ")]


# ---- parts -----------------------------------------------------------------------------------------------------------------------


# plain torch, updates in host memory and on the device, and a cap with parameters that leave: the others are in between
ALL_KINDS = (("7b", "torch"), ("7b", "zk_stage2"), ("7b", "zk_auto"), ("overlap", "zk_stage3"))


@pytest.mark.device_only
def test_all_systems_train_the_same_model(parts: dict[str, ModuleType], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    losses, first, tokens = {}, {}, 64
    for run in parts["gpu"].runs(dry=True):
        if run.job is None or (run.section, run.name) not in ALL_KINDS:
            continue
        job = dataclasses.replace(run.job, tokens=(tokens,))
        planned = parts["gpu_plan"].plan_job(job, [machine()], True, tmp_path)
        gc.collect()
        # a job has a process of its own, and a cap on all that the process has on the device: here that is also what other tests keep
        cap = job.cap and job.cap + (torch.cuda.memory_allocated() if torch.cuda.is_available() else 0)
        try:
            parts["gpu_step"].run(dataclasses.replace(job, zero=planned.zero, cap=cap), dry=True)
        finally:
            if torch.cuda.is_available():
                torch.cuda.set_per_process_memory_fraction(1.0)  # the job's cap is not for those after it
        rows = printed(capsys)
        found = next(row for row in rows if row["kind"] == "step")
        assert found["sound"] and found["tokens"] == tokens and len(found["seconds"]) == 3, found
        losses[run.section, run.name], first[run.section, run.name] = found["losses"], next(row["loss"] for row in rows if row["kind"] == "first")
    assert len(losses) == len(ALL_KINDS) and len(set(first.values())) == 1, first
    assert len({tuple(values) for (_, name), values in losses.items() if name != "torch"}) == 1, f"zk's systems have the same bits: {losses}"
    assert losses["7b", "torch"] == pytest.approx(losses["7b", "zk_stage2"], rel=1e-2), "parameters without an fp32 master round more"


@pytest.mark.device
def test_floors_are_measured_and_copies_compared_with_their_sources(
    parts: dict[str, ModuleType], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    floors = parts["gpu_floors"]
    for part in (floors.machine, floors.link, floors.pin, floors.device, floors.drive):
        part(True, tmp_path / "drive")
    rows = printed(capsys)
    copies = {(row["system"], row["direction"]) for row in rows if row["kind"] == "copy"}
    systems = ["torch, pinned", *["zk, pinned"] * torch.cuda.is_available()]
    wanted = {(system, direction) for system in systems for direction in floors.DIRECTIONS}
    if torch.cuda.is_available():
        wanted |= {("zk, pageable", direction) for direction in floors.DIRECTIONS[:2]}
    assert copies == wanted
    assert {row["kind"] for row in rows} == {"machine", "copy", "pin", "matmul", "device copy", "drive"}
    assert [row["direction"] for row in rows if row["kind"] == "drive"] == ["write", "read"] and not list((tmp_path / "drive").iterdir())


def test_a_floor_that_fails_is_a_row_and_the_next_one_is_measured(tmp_path: Path) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_text("")
    command = [sys.executable, str(FOLDER / "gpu_floors.py"), "floors", "--dry-run", "--nvme", str(in_the_way)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment())
    rows = [json.loads(line.removeprefix("row ")) for line in ended.stdout.splitlines() if line.startswith("row ")]
    failed = [row for row in rows if row["kind"] == "failed"]
    assert ended.returncode == 1 and [row["what"] for row in failed] == ["drive"] and "FileExistsError" in failed[0]["reason"], ended.stderr
    assert {"copy", "triad", "cpu adam", "matmul"} < {row["kind"] for row in rows}


def environment() -> dict[str, str]:
    """The environment of a part that is started by itself."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(FOLDER.parent), os.environ.get("PYTHONPATH"))))}


# ---- models and plans ------------------------------------------------------------------------------------------------------------


def test_models_have_the_parameters_that_are_planned(parts: dict[str, ModuleType]) -> None:
    model = parts["gpu_model"]
    sizes = {"Qwen2.5-7B": 7_615_616_512, "Qwen2.5-14B": 14_770_033_664, "GPT-2 10B": 10_279_239_680, "GPT-2 1.3B": 1_313_722_368}
    for name, size in model.SIZES.items():
        for one in (size, model.tiny(size)):
            with torch.device("meta"):
                made = model.Model(one)
            assert sum(param.numel() for param in made.parameters()) == sum(parts["gpu_plan"].numels_of(one)), name
        assert sum(parts["gpu_plan"].numels_of(size)) == sizes[name]
        context = model.context_of(model.tiny(size), dry=True)
        ids, targets = model.batch(model.tiny(size), 4 * context, context, torch.device("cpu"))
        assert ids.shape == targets.shape == (4, context) and torch.equal(ids[:, 1:], targets[:, :-1])


def test_activations_are_within_a_tenth_of_those_that_torch_counts(parts: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the real sizes with few blocks, in fake tensors, whose memory only torch's tracker takes."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    model = parts["gpu_model"]
    for module in (torch.nn.Linear, torch.nn.Embedding):
        monkeypatch.setattr(module, "reset_parameters", lambda self: None)
    for name, tokens in (("Qwen2.5-7B", 65536), ("GPT-2 10B", 10240)):
        size = dataclasses.replace(model.SIZES[name], layers=2)
        context = model.context_of(size, dry=False)
        with FakeTensorMode():
            made = model.build(size, torch.device("cpu"))
            for param in made.parameters():
                param.grad = torch.zeros_like(param)
            ids = torch.zeros(tokens // context, context, dtype=torch.int64)
            tracker = MemTracker()
            tracker.track_external(made)
            with tracker:
                made(ids, ids).backward()
        peak = next(iter(tracker.get_tracker_snapshot("peak").values()))
        counted = sum(nbytes for kind, nbytes in peak.items() if str(getattr(kind, "value", kind)) in ("Activation", "Temp"))
        assert counted > GIB / 2 and model.working_nbytes(size, tokens) == pytest.approx(counted, rel=0.1), name


def test_all_jobs_fit_a_machine_of_one_h200_and_128_gib(parts: dict[str, ModuleType], tmp_path: Path) -> None:
    rows = [machine(device=int(139.8 * GIB), host=128 * GIB, dry=False)]
    found = {}
    for run in parts["gpu"].runs(dry=False):
        if run.job is not None:
            found[run.section, run.name] = planned = parts["gpu_plan"].plan_job(run.job, rows, False, tmp_path)
            assert not planned.refused and not planned.missing.keys() & {"device", "host"}, (run, planned)
            assert planned.device_nbytes < (run.job.cap or 139 * GIB) and planned.host_nbytes < 128 * GIB, (run, planned)
    assert found["7b", "zk_stage2"].host_nbytes == pytest.approx(14 * 7.6156e9, rel=1e-3)
    assert found["tutorial", "zk_stage2"].host_nbytes == pytest.approx(10 * 10.279e9, rel=1e-3), "with bf16 moments"
    small = [machine(device=int(139.8 * GIB), host=100 * GIB, dry=False)]
    job = next(run.job for run in parts["gpu"].runs(dry=False) if run.section == "14b")
    assert "bf16 moments" in parts["gpu_plan"].plan_job(job, small, False, tmp_path).note, "where fp32 ones find no room"
    large = [machine(device=int(139.8 * GIB), host=144 * GIB, dry=False)]
    assert "state_dtype" not in parts["gpu_plan"].plan_job(job, large, False, tmp_path).zero
    tight = parts["gpu_plan"].plan_job(parts["gpu_step"].Job("zk_stage3", "Qwen2.5-7B", (4096,)), [machine(host=64 * GIB)], False, tmp_path)
    assert "99.3 GiB of host memory, and there are 64.0" in tight.refused


# ---- runs and the report ---------------------------------------------------------------------------------------------------------


def session(parts: dict[str, ModuleType], folder: Path, **options: Any) -> Any:
    given = {"out": folder, "nvme": folder, "dry_run": True, "minutes": 1.0, "host": None, **options}
    return parts["gpu"].Session(argparse.Namespace(**given))


def line(report: str, *words: str) -> str:
    found = [one for one in report.splitlines() if one.startswith("|") and all(word in one for word in words)]
    assert len(found) == 1, (words, found)
    return found[0]


def test_a_failure_a_crash_and_a_job_over_its_time_are_rows_and_the_next_job_runs(
    parts: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    this, Run, started = session(parts, tmp_path, minutes=100.0), parts["gpu"].Run, tmp_path / "started"
    clock = time.monotonic
    monkeypatch.setattr(parts["gpu"].time, "monotonic", lambda: clock() + 1000 * started.exists())  # time flies once a job hangs
    this.rows.append(machine())
    code = 'import os, subprocess, sys, time\nprint(\'row {"kind": "first", "loss": 1.0}\', flush=True)\n'
    child = "print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']).pid, flush=True)\n"
    this.execute(Run("a", "raises", 600, 0, ("-c", code + "raise ValueError('no such thing')")))
    this.execute(Run("a", "crashes", 600, 0, ("-c", code + "os.kill(os.getpid(), 11)")))
    this.execute(Run("a", "is_killed", 600, 0, ("-c", code + "os.kill(os.getpid(), 9)")))
    this.execute(Run("a", "hangs", 600, 0, ("-c", f"{code}{child}open({str(started)!r}, 'w').close()\ntime.sleep(600)")))
    this.execute(Run("a", "goes_well", 3600, 0, ("-c", code)))
    this.execute(Run("a", "too_long", 3600, 1e6, ("-c", code)))
    this.write()
    outcomes = {row["name"]: row["outcome"] for row in this.rows if row["kind"] == "outcome"}
    assert outcomes["raises"] == "failed: ValueError: no such thing (status 1)" and outcomes["crashes"] == "failed: (SIGSEGV)"
    assert outcomes["is_killed"] == "failed: (SIGKILL, as when host memory runs out)"
    assert outcomes["hangs"] == "failed: over its time limit of 600 s" and outcomes["goes_well"] == "done"
    assert outcomes["too_long"].startswith("not run: time")
    printed_first = [row["name"] for row in this.rows if row["kind"] == "first"]
    assert printed_first == ["raises", "crashes", "is_killed", "hangs", "goes_well"], "rows that came before the end"
    log = this.log.read_text().split("a/hangs")[1].split("====")[0].splitlines()
    grandchild = next(int(one) for one in log if one.isdecimal())
    status = Path(f"/proc/{grandchild}/stat")
    assert not status.exists() or status.read_text().split()[2] == "Z", "what a job has started ends with it"
    text = this.markdown.read_text()
    assert "over its time limit" in line(text, "a/hangs") and "This part of the report failed" not in text
    assert parts["gpu_report"].read(this.jsonl) == this.rows


def steps(name: str, median: float, loss: float, section: str = "7b", **more: Any) -> list[dict[str, Any]]:
    """Rows of a job that has measured 65,536 tokens of a step."""
    where = {"section": section, "name": name, "dry": False}
    plan = {"system": name, "model": "Qwen2.5-7B", "tokens": [65536, 4096], "cap": None, "numel": 7_615_616_512, "device_nbytes": 40 * GIB}
    plan |= {"host_nbytes": 99 * GIB, "missing": {}, "zero": {}, "note": "a note", "refused": ""}
    step = {"tokens": 65536, "seconds": [median] * 3, "median": median, "backward_seconds": median, "losses": [12.0, 11.0], "sound": True}
    step |= {"notes": [], "moved": {}, "device_nbytes": 41 * GIB, "reserved_nbytes": 43 * GIB, "rss_nbytes": 100 * GIB, **more}
    end = {"outcome": "failed: OutOfMemoryError: too much", "seconds": 60.0, "host_nbytes": 101 * GIB, "kept_nbytes": 0}
    kinds = {"plan": plan, "first": {"loss": loss}, "step": step, "outcome": end}
    return [{**where, "kind": kind, **values} for kind, values in kinds.items()]


def test_the_report_has_a_row_for_each_job_and_no_speed_of_a_wrong_loss(parts: dict[str, ModuleType]) -> None:
    report = parts["gpu_report"].report
    rows = [machine(dry=False), {"kind": "matmul", "section": "floors", "name": "floors", "size": 8192, "tflops": 700.0}]
    rows += [*steps("torch", 8.0, 12.0), *steps("fsdp2", 30.0, 12.0), *steps("zk_stage2", 10.0, 12.0001), *steps("zk_stage3", 1.0, 12.01)]
    rows += steps("zk_auto", 1.0, 12.0, sound=False)
    text = report(rows, "a command")
    cells = [cell.strip() for cell in line(text, "| zk_stage2 |", "65,536", "6,554").split("|")]
    assert cells[5:10] == [f"{6 * 7_615_616_512 * 6553.6 / 1e12:.1f}", "0.800", "3.00", "10.000", "10.000"], cells
    assert cells[10:13] == ["41.00 GiB", "43.00 GiB", "101.00 GiB"], "the peak of host memory is the system's, if that is more"
    assert "the first loss is 12.01, that of torch is 12" in line(text, "| zk_stage3 |", "65,536")
    assert "did not fall" in line(text, "| zk_auto |", "65,536")
    assert "failed: OutOfMemoryError: too much" in line(text, "| zk_stage2 |", "4,096"), "measured tokens stay, the others say why not"
    assert "6,321" in text and "13,863" in text and "`a command`" in text and "This part of the report failed" not in text
    alone = report([rows[0], rows[1], *steps("zk_stage2", 10.0, 12.0)], "")
    assert f"{6 * 7_615_616_512 * 6553.6 / 700e12:.3f} of matrices" in line(alone, "| zk_stage2 |", "6,554")
    assert "was not described" in report([], "")


@pytest.mark.device_only
def test_one_command_runs_sections_and_keeps_the_rows_of_others(
    parts: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*arguments: str) -> str:
        before = signal.getsignal(signal.SIGTERM)
        monkeypatch.setattr(sys, "argv", ["gpu.py", "--dry-run", "--out", str(tmp_path), "--nvme", str(tmp_path), *arguments])
        try:
            with pytest.raises(SystemExit) as ended:
                parts["gpu"].main()
        finally:
            signal.signal(signal.SIGTERM, before)
        assert ended.value.code == 0
        return next(tmp_path.glob("*.md")).read_text()

    every = parts["gpu"].runs(dry=True)
    said = f"print('row ' + {json.dumps(machine())!r})"  # in place of what describes the machine, and is executed above
    every[0] = dataclasses.replace(every[0], command=("-S", "-c", said))
    monkeypatch.setattr(parts["gpu"], "runs", lambda dry: every)
    text = run("--sections", "tutorial")
    assert "A dry run" in text and line(text, "| GPT-2 10B | 40 | zk_stage2 |").endswith("| bf16 moments |")
    text = run("--sections", "14b", "--minutes", "0.001")
    assert "not run: time" in line(text, "| 14b/zk_auto | 0.0 |") and line(text, "| tutorial/zk_stage2 |", "| done |"), "the other section stays"


def test_a_section_that_does_not_exist_is_refused_with_those_that_do(parts: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--dry-run", "--sections", "floors,seven"])
    with pytest.raises(SystemExit, match="there is no section seven; there are floors, bits, 7b, 14b, tutorial"):
        parts["gpu"].main()
