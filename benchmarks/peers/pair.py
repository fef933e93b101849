"""Steps of two systems in turn: the ratio of their times, from which the drift of a shared machine cancels.

usage: python benchmarks/peers/pair.py SYSTEM SYSTEM [--checkouts FOLDER FOLDER] [--steps N] [-- options of step.py]

Both processes live at once and never step at once, so memory has to hold both. ``--checkouts`` takes each system's zk from a folder, to compare
one commit with another.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
PAUSE_S = 0.2  # threads of the other process that spin for work go to sleep meanwhile
WARMUP = 3


class System:
    """A process that steps when it is asked to."""

    def __init__(self, name: str, checkout: Path, steps: int, nvme: str, rest: list[str]) -> None:
        command = [sys.executable, str(HERE.with_name("step.py")), name, "--in-turns", "--warmup", str(WARMUP), "--steps", str(steps), *rest]
        environment = {**os.environ, "PYTHONPATH": str(checkout), "ZK_BENCH_NVME": nvme}
        self.process = subprocess.Popen(command, cwd=checkout, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def _line(self, start: str) -> str:
        """The next line of output that begins so."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(start):
                return line
        raise RuntimeError(f"{' '.join(map(str, self.process.args))} ended with code {self.process.wait()}")  # type: ignore[arg-type]

    def step(self) -> None:
        """Take one step, and wait for its end."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        self._line("TURN")

    def report(self) -> dict[str, Any]:
        """Wait for the end of the process. Returns its report on all steps."""
        line = self._line("RESULT")
        self.process.wait()
        return json.loads(line.removeprefix("RESULT"))  # type: ignore[no-any-return]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("systems", nargs=2, metavar="SYSTEM", help="as in step.py")
    parser.add_argument("--checkouts", nargs=2, type=Path, default=[HERE.parents[2]] * 2, metavar="FOLDER")
    parser.add_argument("--steps", type=int, default=40)
    options, rest = parser.parse_known_args()
    rest = [option for option in rest if option != "--"]
    with tempfile.TemporaryDirectory(dir=os.environ.get("ZK_BENCH_NVME")) as folder:
        both = []
        for number, (name, checkout) in enumerate(zip(options.systems, options.checkouts, strict=True)):
            os.mkdir(nvme := f"{folder}/{number}")
            both.append(System(name, checkout.resolve(), options.steps, nvme, rest))
        try:
            for turn in range(WARMUP + options.steps):
                for system in both if turn % 2 else reversed(both):
                    time.sleep(PAUSE_S)
                    system.step()
            reports = [system.report() for system in both]
        finally:
            for system in both:
                system.process.kill()
    first, second = (report["seconds"] for report in reports)
    ratios = [b / a for a, b in zip(first, second, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    for name, seconds in zip(options.systems, (first, second), strict=True):
        print(f"{name}: {statistics.median(seconds):.3f} s, the median of {len(seconds)} steps")
    print(f"ratio of the medians {statistics.median(second) / statistics.median(first):.3f}; of pairs {middle:.3f} (quartiles {low:.3f}, {high:.3f})")
    one, other = (report["peak_rss"] / 2**30 for report in reports)
    print(f"peak {one:.2f} and {other:.2f} GiB, ratio {other / one:.3f}")
    if reports[0]["losses"] != reports[1]["losses"]:
        print("their losses differ")


if __name__ == "__main__":
    main()
