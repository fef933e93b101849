"""Everything there is to check and to measure on a GPU so far, and a dated report of it. `make gpu`, or, with a Python that has all packages,

    python benchmarks/gpu.py [--out FOLDER]

Runs the kernels' tests on the GPU, then the kernel benchmarks, and a training step on the device tier against plain PyTorch. Writes
DATE-gpu.md and DATE-gpu.png. Ends with an error if a test fails, and says so in the report: what is red is not measured.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from report import plot, table

ROOT = Path(__file__).parent.parent


def run(*command: str) -> subprocess.CompletedProcess[str]:
    """A command from the project's root, its output shown as it comes and kept."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        sys.stderr.write(line)
        lines.append(line)
    return subprocess.CompletedProcess(command, process.wait(), "".join(lines), "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("there is no GPU here; `make test` interprets and compiles the kernels without one")
    options.out.mkdir(parents=True, exist_ok=True)
    date, name = datetime.date.today(), torch.cuda.get_device_name()
    free, total = torch.cuda.mem_get_info()
    lines = [
        f"# {name}, {date}",
        "",
        f"{total / 2**30:.0f} GiB ({free / 2**30:.0f} free), compute capability {'.'.join(map(str, torch.cuda.get_device_capability()))}, torch "
        f"{torch.__version__}, CUDA {torch.version.cuda}. Command: `make gpu`",
        "",
    ]
    tests = run(sys.executable, "-m", "pytest", "-q", "-x", "tests/test_kernels.py", "tests/test_gpu.py")
    summary = next((line for line in reversed(tests.stdout.splitlines()) if "passed" in line or "failed" in line or "error" in line), "no summary")
    lines.append(f"Tests on the GPU: {summary.strip('= ')}.")
    if tests.returncode == 0:
        results = options.out / f".{date}-gpu.json"
        bench = run(sys.executable, "-m", "pytest", "-q", "benchmarks/bench_kernels.py", "--benchmark-columns=median", f"--benchmark-json={results}")
        if results.exists():
            measured = json.loads(results.read_text())
            lines += ["", "\n".join(table(measured).splitlines()[4:])]
            plot(measured, options.out / f"{date}-gpu.png")
            results.unlink()
        if bench.returncode:
            lines += ["", "Some benchmarks failed:", "", "```", *bench.stdout.splitlines()[-20:], "```"]
        tests = bench if bench.returncode else tests
    else:
        lines += ["", "Nothing was measured, as a test failed:", "", "```", *tests.stdout.splitlines()[-30:], "```"]
    report = options.out / f"{date}-gpu.md"
    report.write_text("\n".join(lines) + "\n")
    print(f"report: {report}")
    sys.exit(tests.returncode)


if __name__ == "__main__":
    main()
