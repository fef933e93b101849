"""`make gpu` in its dry run: every part that measures goes through on a CPU, so that what is run on a GPU once is right the first time."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

FOLDER = Path(__file__).parent.parent / "benchmarks"
GIB = 1 << 30


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a module of benchmarks/."""
    monkeypatch.syspath_prepend(str(FOLDER))

    def module(name: str) -> ModuleType:
        return importlib.import_module(name)

    return module


@pytest.fixture
def bench(load: Any, tmp_path: Path) -> Any:
    return load("gpu_common").Bench(tmp_path / "rows.jsonl", "step", "job", dry=True)


def rows(path: Path, kind: str) -> list[dict[str, Any]]:
    return [row for row in map(json.loads, path.read_text().splitlines()) if row["kind"] == kind]


ZK = ("zk_device", "zk_stage2", "zk_stage2_overlap", "zk_stage3", "zk_stage3_overlap", "zk_nvme", "zk_nvme_part")


def test_all_systems_train_the_same_model(load: Any, bench: Any, tmp_path: Path) -> None:
    step = load("gpu_step")
    for system in ("torch", *ZK):
        bench.job = system
        job: dict[str, Any] = {"system": system, "size": "tiny", "tokens": [64, 32], "warmup": 1, "steps": 1, "nvme": str(tmp_path / "drive")}
        job["offload_activations_at"] = [32] if system in ("zk_stage3", "zk_stage2_overlap") else []
        job["options"] = {"host_budget": "8MiB"} if system == "zk_nvme_part" else {}
        job["timeline"] = system == "zk_stage3_overlap"
        step.run(bench, job)
    found = rows(bench.rows, "step")
    assert len(found) == 2 * (1 + len(ZK)) and not rows(bench.rows, "failed") and all(row["sound"] for row in found)
    for position in (0, 1):
        losses = {row["system"]: row["losses"] for row in found if row["position"] == position}
        assert all(losses[system] == losses["zk_device"] for system in ZK), "zk's systems have the same bits"
        assert losses["torch"] == pytest.approx(losses["zk_device"], rel=1e-4)
    assert rows(bench.rows, "timeline")[0]["overlap"]


def test_the_machine_is_measured_and_copies_are_compared_with_their_sources(load: Any, bench: Any, tmp_path: Path) -> None:
    link = load("gpu_link")
    for part in (link.copies, link.device, lambda bench: link.disk(bench, tmp_path / "drive")):
        part(bench)
    copies = rows(bench.rows, "copy")
    assert {row["system"] for row in copies} == {"torch", "zk", "zk transfer"} and {row["direction"] for row in copies} == set(link.DIRECTIONS)
    assert all(0 < row["gbps"] < 5 for row in copies if row["system"] != "torch"), "a pretended link moves 2 GB/s each way"
    assert len(rows(bench.rows, "disk")) == 2 and rows(bench.rows, "matmul") and not list((tmp_path / "drive").iterdir())


def test_a_deferred_model_has_the_parameters_of_one_that_was_made(load: Any) -> None:
    import zk

    model = load("gpu_model")
    size, cpu = model.SIZES["tiny"], torch.device("cpu")
    made, deferred = model.build(size, torch.bfloat16, cpu), model.build(size, torch.bfloat16, cpu, deferred=True)
    wide = dict(model.build(size, torch.float32, cpu).named_parameters())
    assert sum(param.numel() for param in made.parameters()) == size.numel
    with zk.ZeroOptimizer(deferred, torch.optim.SGD(deferred.parameters(), lr=0.1)):
        for (name, param), other in zip(made.named_parameters(), deferred.parameters(), strict=True):
            assert torch.equal(param, other) and torch.equal(param.float(), wide[name]), name
    ids, targets = model.batch(size, 4 * size.context, cpu)
    assert ids.shape == targets.shape == (4, size.context) and torch.equal(ids[:, 1:], targets[:, :-1])


def test_what_cannot_fit_is_refused_before_it_fills_the_machine(load: Any, bench: Any) -> None:
    step = load("gpu_step")
    bench.host_nbytes = 64 * GIB
    with pytest.raises(RuntimeError, match=r"not tried: it needs 86\.8 GiB of host memory, and there are 64\.0"):
        step.check_room({"system": "zk_stage3", "size": "7B"}, bench)
    step.check_room({"system": "zk_device", "size": "7B"}, bench)
    layers, spare = step.largest_layers(64 * GIB, 16 * GIB, use_device=False)
    assert spare == 0 and step.of_layers(layers).numel * step.HOST_NBYTES <= 64 * GIB < step.of_layers(layers + 6).numel * step.HOST_NBYTES
    assert step.largest_layers(64 * GIB, 32 * GIB, use_device=True)[0] > layers


def row(system: str, median: float, losses: list[float], section: str = "step", **more: Any) -> dict[str, Any]:
    values = {"section": section, "job": system, "kind": "step", "system": system, "model": "1.3B", "numel": 1_300_000_000, "tokens": 65536}
    values |= {"position": 0, "median": median, "backward_seconds": median, "losses": losses, "sound": losses[-1] < losses[0], "cap": None}
    values |= {"tokens_per_s": 65536 / median, "tflops": 1.0, "hardware_tflops": 1.3, "device_nbytes": 0, "reserved_nbytes": 0, "rss_nbytes": 0}
    return values | {"host_more_nbytes": 0, "moved": {}, "activations_offloaded": False, "note": "", **more}


def line(report: str, *parts: str) -> str:
    found = [one for one in report.splitlines() if one.startswith("|") and all(part in one for part in parts)]
    assert len(found) == 1, (parts, found)
    return found[0]


def test_the_verdict_rounds_nothing_up_and_counts_no_speed_of_a_wrong_loss(load: Any) -> None:
    report = load("gpu_report").report
    losses, cap = [11.0, 10.9, 10.8], 32 * GIB
    fine = [row("zk_device", 0.8499, losses), row("torch", 0.9, losses), row("fsdp2_offload", 2.0, losses, "peers")]
    fine.append(row("zk_stage2", 1.0, [11.0, 10.901, 10.8]))
    fine.append(row("zk_stage2_overlap", 0.5, [11.0, 10.95, 10.8]))
    fine.append(row("zk_stage3", 3.0, losses, "seven", model="7B", cap=cap, reserved_nbytes=cap - 1, tokens=4096))
    copies = [{"section": "link", "job": "link", "kind": "copy", "system": "torch", "direction": "down", "nbytes": 1 << 20, "gbps": 50.0}]
    copies += [{**copies[0], "system": "zk transfer", "gbps": 44.999}]
    text = report([*fine, *copies], "today")
    assert "0.849 (" in line(text, "stage 2, host optimizer: 1.3B", "0.85 of no offload") and "**not met**" in line(text, "stage 2, host", "0.85")
    assert line(text, "stage 2, host optimizer: 1.3B", "2 x FSDP2").endswith("| met |")
    assert "not measured" in line(text, "overlap_step (exact)", "0.85 of no offload"), "its losses are others'"
    assert "no speed: loss 1 is 10.95" in line(text, "optimizer on the host, overlap_step |")
    assert "0.899 (" in line(text, "copies, device to host") and "**not met**" in line(text, "copies, device to host")
    assert "not measured" in line(text, "copies, both at once")
    assert line(text, "7B trains under 32 GiB").endswith("| met |")
    assert "This part of the report failed" not in text
    assert "not met" in line(report([*fine[:-1], {**fine[-1], "reserved_nbytes": cap + 1}], "today"), "7B trains under 32 GiB")
    empty = report([], "today")
    assert "Not measured." in empty and "met |" not in empty.replace("not measured |", "")


def test_one_command_runs_parts_and_keeps_what_it_does_not_run_again(tmp_path: Path) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(FOLDER / "gpu.py"), "--dry-run", "--out", str(tmp_path / "out"), "--nvme", str(tmp_path), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=240)

    ended = run("--sections", "link", "--jobs", "machine")
    assert ended.returncode == 0, ended.stderr
    assert "copies, both at once" in ended.stdout
    report = next((tmp_path / "out").glob("*.md"))
    assert "# no GPU (dry run)" in report.read_text() and "link 0" not in report.read_text()
    ended = run("--sections", "step", "--jobs", "zk_device", "--total", "0.5")  # no time for anything
    assert ended.returncode == 0, ended.stderr
    text = report.read_text()
    assert "no time was left" in text and "# no GPU (dry run)" in text and "This part of the report failed" not in text
