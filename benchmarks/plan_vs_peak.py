"""Memory by `zk plan` against the peak of real runs, and the size of their file on the drive.

usage: python benchmarks/plan_vs_peak.py [--folder runs/nvme] [--only N ...] [--out FILE.md]

`make bench-plan` runs it. Each combination trains three steps of one token in a process of its own,
from deferred initialization, so that only zk holds memory. The peak is the high-water mark of the
resident set beyond that of a tiny model before it. Without a GPU device and host are one memory.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import zk
from zk.memory import trim
from zk.tools.metrics import peak_nbytes
from zk.tools.plan import Machine, Plan

MIB = 1 << 20
ROOT = Path(__file__).parent.parent
SIZES = {"50M": (1024, 24), "101M": (2048, 12), "151M": (2048, 18)}  # width and blocks
# stage, parameters, optimizer, size, other options
COMBINATIONS: list[tuple[int, str, str, str, dict[str, Any]]] = [
    (0, "device", "device", "50M", {"dtype": "bf16"}),
    (1, "device", "host", "101M", {"dtype": "bf16"}),
    (2, "device", "host", "151M", {"dtype": "bf16"}),
    (2, "device", "device", "50M", {"dtype": "fp32"}),
    (3, "host", "host", "101M", {"dtype": "bf16"}),
    (3, "host", "host", "50M", {"dtype": "fp16"}),
    (3, "host", "host", "151M", {"dtype": "bf16", "state_dtype": "bf16"}),
    (0, "device", "nvme", "151M", {"dtype": "bf16"}),
    (2, "device", "nvme", "101M", {"dtype": "bf16"}),
    (3, "host", "nvme", "151M", {"dtype": "bf16"}),
    (3, "nvme", "host", "101M", {"dtype": "bf16"}),
    (3, "nvme", "nvme", "151M", {"dtype": "bf16"}),
    (3, "nvme", "nvme", "101M", {"dtype": "bf16", "prefetch": 0}),
]


class Block(nn.Module):
    """Two square layers that touch all their weights for one token."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def build(width: int, blocks: int) -> nn.Sequential:
    return nn.Sequential(*(Block(width) for _ in range(blocks)))


def train(width: int, blocks: int, options: dict[str, Any]) -> int:
    """Train three steps; return the bytes of the file on the drive."""
    with zk.deferred_init():
        model = build(width, blocks)
    with zk.ZeroOptimizer(model, torch.optim.AdamW(model.parameters()), **options) as optimizer:
        for _ in range(3):
            optimizer.backward(model(torch.randn(1, width)).float().square().mean())
            optimizer.step()
            optimizer.zero_grad()
        drive: Any = optimizer._layout.tiers.get("nvme")
        return drive.file.nbytes if drive is not None else 0


def measure(number: int, folder: str) -> None:
    """Print what was planned, and what a run in this process took."""
    stage, param_tier, optimizer_tier, size, rest = COMBINATIONS[number]
    options = {"stage": stage, "param_tier": param_tier, "optimizer_tier": optimizer_tier, **rest}
    if "nvme" in (param_tier, optimizer_tier):
        options["nvme_path"] = folder
    torch.set_num_threads(1)
    train(32, 4, options)
    trim()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = peak_nbytes()
    file_nbytes = train(*SIZES[size], options)
    took = peak_nbytes() - before
    with torch.device("meta"):
        model = build(*SIZES[size])
    machine = Machine(gpu_nbytes=None, ram_nbytes=1 << 40, nvme_nbytes=1 << 40)
    state_dtype = options.get("state_dtype", "fp32")
    plan = Plan(name=size, model=model, machine=machine, tokens=0, state_dtype=state_dtype)
    found = plan.row(zk.ZeroConfig(**options))
    print("RESULT " + json.dumps([found.used["host"], took, found.used["nvme"], file_nbytes]))


def run(number: int, folder: Path) -> tuple[str, bool]:
    """Measure a combination in a process of its own: its row of the table, and if it is within 10%."""
    command = [sys.executable, __file__, "--folder", str(folder), "--measure", str(number)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        sys.exit(f"combination {number} ended with {done.returncode}\n{done.stderr[-2000:]}")
    plan, peak, drive, file = json.loads(lines[0].removeprefix("RESULT "))
    stage, param_tier, optimizer_tier, size, rest = COMBINATIONS[number]
    options = ", ".join(f"{name}={value}" for name, value in rest.items())
    cells = [stage, param_tier, optimizer_tier, size, options, plan // MIB, peak // MIB]
    cells += [f"{plan / peak:.3f}", f"{drive / MIB:.0f} / {file / MIB:.0f}" if file else "-"]
    is_near = abs(plan / peak - 1) <= 0.1 and abs(drive - file) <= 0.02 * file
    return f"| {' | '.join(map(str, cells))} |", is_near


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--only", type=int, nargs="*", default=list(range(len(COMBINATIONS))))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--measure", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure is not None:
        measure(options.measure, str(options.folder))
        return
    rows = []
    for number in options.only:
        rows.append(run(number, options.folder))
        print(rows[-1][0], file=sys.stderr, flush=True)
    near = sum(is_near for _, is_near in rows)
    where = f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores, torch {torch.__version__}"
    text = (
        f"# `zk plan` against the peak of real runs, {datetime.date.today()}\n\n{where}, no GPU. "
        f"MiB. Command: `make bench-plan`. Of {len(rows)} combinations {near} are within 10%.\n\n"
        "| stage | parameters | optimizer | size | options | plan | peak | plan / peak | drive |\n"
        "|---|---|---|---|---|---|---|---|---|\n" + "\n".join(row for row, _ in rows) + "\n"
    )
    print(text)
    if options.out:
        options.out.write_text(text)
    if near < len(rows):
        sys.exit(f"{len(rows) - near} combinations are off by more than 10%")


if __name__ == "__main__":
    main()
