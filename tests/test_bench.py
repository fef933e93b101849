"""`make bench`: every benchmark runs, a wrong result is not timed, and the report stands also where one failed."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.programs import run

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "benchmarks"))  # where pytest has it for the benchmarks themselves

import report  # noqa: E402
from cases import adam, kernels, link  # noqa: E402

FAILING = "def test_always(benchmark): raise RuntimeError\n"


def test_each_benchmark_runs_once_and_the_report_has_a_row_of_it(tmp_path: Path) -> None:
    """Torch's compiler is left out: it takes longer than all others together."""
    failing = tmp_path / "bench_failing.py"
    failing.write_text(FAILING)
    files = [str(path) for path in sorted((ROOT / "benchmarks").glob("bench_*.py"))]
    found = tmp_path / "bench.json"
    environment = {**os.environ, "ZK_BENCH_SMALL": "1", "ZK_BENCH_NVME": str(tmp_path / "drive")}
    for name in [name for name in environment if name.startswith("PYTEST_XDIST")]:
        del environment[name]  # where it sees one of these, pytest-benchmark times nothing
    options = ["-k", "not compile", "-p", "no:cacheprovider", "-p", "no:xdist", f"--benchmark-json={found}"]
    done = run("-m", "pytest", *options, *files, str(failing), env={**environment, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 1 and " 1 failed" in f" {done.stdout.splitlines()[-1]}", done.stdout[-3000:]
    rows = json.loads(found.read_text())
    text = report.table(rows)
    for system in ("zk_split_master", "torch_fused", "zk_file", "zk_4_tiles", "torch_cat"):
        assert system in text
    if not torch.cuda.is_available():
        assert "| zk_4_tiles (reference) |" in text and "| zk_file |" in text
    report.plot(rows, tmp_path / "bench.png")
    assert (tmp_path / "bench.png").stat().st_size > 10_000


def test_a_wrong_result_is_not_timed() -> None:
    wrong = adam.by_torch
    with pytest.raises(RuntimeError, match=r"differ from torch\.optim\.AdamW's"):
        adam.check(lambda param, grad: wrong(param, -grad), loose=True)
    cpu = torch.device("cpu")
    with pytest.raises(RuntimeError, match=r"reduce 1 rows .* does not agree"):
        kernels.reduce_case("zk", lambda rows, out: out.zero_(), 1, 640, cpu)
    with pytest.raises(ValueError, match="has the host's memory"):
        link.measure(1 << 20, 1, cpu)


def row(name: str, median: float, **extra: Any) -> dict[str, Any]:
    stats = {"median": median}
    return {"group": "job", "name": name, "param": name, "params": None, "stats": stats, "extra_info": extra}


def test_the_report_names_references_and_compares_with_zks_main_row() -> None:
    rows = [row("torch", 1.0), row("zk", 2.0, device="cpu"), row("zk_other", 3e-5, device="H100")]
    machine = {"cpu": {"brand_raw": "CPU", "count": 2}, "python_version": "3.11"}
    text = report.table({"datetime": "2026-01-01T00", "machine_info": machine, "benchmarks": rows})
    assert "| torch | 1 s |  | 0.50 |" in text and "| zk (reference) | 2 s | cpu | 1.00 |" in text
    assert "| zk_other | 30 us | H100 | 0.00 |" in text
