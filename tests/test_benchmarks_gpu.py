"""`make gpu` in its dry run: all of it executes without a GPU, so that what a GPU sees first is right the first time."""

import argparse
import importlib
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
GIB = 1 << 30


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("gpu")


def line(report: str, start: str) -> str:
    found = [one for one in report.splitlines() if one.startswith(start)]
    assert len(found) == 1, (start, found)
    return found[0]


def test_floors_and_steps_are_in_the_report(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--dry-run", "--out", str(tmp_path), "--nvme", str(tmp_path)]
    command += ["--sections", "floors,12/torch,12/on_device,14b/auto"]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (report,) = (path.read_text() for path in tmp_path.glob("*.md"))
    assert "A dry run" in report, report
    for words in ("bf16 product", "link, pinned, both at once", "page-lock", "CPU Adam, 1 threads", "drive, read"):
        assert f"|{words}" in report
    curve, ends = report.split("|row|tokens")[1].split("|row|s|")
    losses = {one.split("|")[-2] for one in curve.splitlines() if one.startswith(("|12/torch|", "|12/on_device|", "|14b/auto|8|"))}
    assert len({loss[:4] for loss in losses}) == 1 and "differ" not in report, losses
    assert curve.count("|14b/auto|") == 3
    assert all(phase in line(ends, "|12/on_device|") for phase in ("done", "built", "pinned", "touched", "first step"))


def test_a_row_without_time_says_so_and_one_that_is_not_there_is_refused(gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu.signal, "signal", lambda *_: None)
    for sections, said in (("12/stage2", "^False$"), ("12/stage2,13", "^there is no 13; there are floors/device, ")):
        monkeypatch.setattr(sys, "argv", f"gpu.py --dry-run --minutes 0 --out {tmp_path} --sections {sections}".split())
        with pytest.raises(SystemExit, match=said):
            gpu.main()
    (report,) = tmp_path.glob("*.md")
    assert "not run" in line(report.read_text(), "|12/stage2|")


def test_a_failure_a_crash_and_a_row_over_its_limit_are_told(gpu: Any, tmp_path: Path) -> None:
    options = argparse.Namespace(dry_run=False, out=tmp_path)

    def said(work: Any, limit: float = 60.0) -> Any:
        return gpu.follow(gpu.Row("a/row", limit, work), options, limit)

    def fails(row: Any, say: Any, options: Any) -> None:
        say("built", "at 0.1 s")
        raise ValueError("no such thing")

    def hangs(row: Any, say: Any, options: Any) -> None:
        say("child", subprocess.Popen(["sleep", "600"]).pid)
        time.sleep(600)

    found = said(fails)
    assert found["outcome"] == ["failed: ValueError: no such thing"] and found["built"] == ["at 0.1 s"]
    assert said(lambda *_: os.kill(os.getpid(), 9))["outcome"] == ["failed: killed, as where host memory runs out; its status is -9"]
    assert said(lambda *_: None)["outcome"] == ["done"]
    found = said(hangs, 2.0)
    assert found["outcome"][0].startswith("failed: over its limit of 2 s")
    status = Path(f"/proc/{found['child'][0]}/stat")
    assert not status.exists() or status.read_text().split()[2] == "Z", "what a row has started ends with it"


def test_a_row_that_does_not_fit_is_refused_with_the_sum(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    there = gpu.Machine(gpu_nbytes=int(139.8 * GIB), ram_nbytes=int(125.8 * GIB))
    monkeypatch.setattr(gpu.Machine, "of", lambda *_: there)
    monkeypatch.setattr(gpu.clock, "the_gpu", lambda: None)
    rows = {row.name: row for row in gpu.ROWS if row.work is gpu.train}
    fits = {name: gpu.plan(gpu.SIZES[name.partition("/")[0]], gpu.MICRO, gpu.MICRO, row.given or {})[1:] for name, row in rows.items()}
    assert [name for name, (_, does) in fits.items() if not does] == ["14b/cpu"], fits
    assert "98.8 of 113.2 GiB of the host" in fits["7b/cpu"][0], fits
    with pytest.raises(MemoryError, match=r"does not fit: for 8,192 tokens .* of 113\.2 GiB of the host"):
        gpu.train(rows["14b/cpu"], lambda *_: None, argparse.Namespace(dry_run=False))


def test_a_row_of_zk_has_ended_within_two_minutes(gpu: Any) -> None:
    """Even where all rows until then take as long as they may, with fifteen seconds to begin."""
    names = [row.name for row in gpu.ROWS]
    assert sum(row.limit for row in gpu.ROWS[: names.index("12/stage2") + 1]) <= 105


def test_formulas_give_percentages_of_a_step_by_tokens(gpu: Any) -> None:
    """Of 16 cores at 120 GB/s, and of 50 GB/s each way, beside 600 TFLOP/s."""
    for update, wanted in ((0.25, "44/33/30, 87/53/47, 100/97/78"), (0.2, "55/39/35, 100/60/52, 100/100/81")):
        for tokens, row in zip(gpu.TOKENS, wanted.split(", "), strict=True):
            compute = 8 * tokens / gpu.RATES["matrices"] / 1e3
            found = [100 * compute / gpu.bound(compute, update, mode) for mode in ("backward", True, None)]
            assert found == pytest.approx([float(one) for one in row.split("/")], abs=1.0), (tokens, update)
