"""`make bench`: every benchmark runs, a wrong result is not timed, and the report stands also where one failed."""

import json
import os
import sys
from pathlib import Path

import torch

from tests.programs import run

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "benchmarks"))  # where pytest has it for the benchmarks themselves

import report  # noqa: E402


def test_each_benchmark_runs_once_and_the_report_has_a_row_of_it(tmp_path: Path) -> None:
    """Torch's compiler is left out: it takes longer than all others together."""
    failing = tmp_path / "bench_failing.py"
    failing.write_text("def test_always(benchmark): raise RuntimeError\n")
    files = [str(path) for path in sorted((ROOT / "benchmarks").glob("bench_*.py"))]
    found = tmp_path / "bench.json"
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}  # with which pytest-benchmark times nothing
    environment = {**own, "ZK_BENCH_SMALL": "1", "ZK_BENCH_NVME": str(tmp_path / "drive"), "PYTHONPATH": str(ROOT)}
    options = ["-k", "not compile", "-p", "no:cacheprovider", "-p", "no:xdist", f"--benchmark-json={found}"]
    done = run("-m", "pytest", *options, *files, str(failing), env=environment)
    assert done.returncode == 1 and " 1 failed" in f" {done.stdout.splitlines()[-1]}", done.stdout[-3000:]
    rows = json.loads(found.read_text())
    text = report.table(rows)
    for system in ("zk_split_master", "torch_fused", "zk_file", "zk_4_tiles", "torch_cat"):
        assert system in text
    if not torch.cuda.is_available():
        assert "| zk_4_tiles (reference) |" in text and "| zk_file |" in text
    report.plot(rows, tmp_path / "bench.png")
    assert (tmp_path / "bench.png").stat().st_size > 10_000
