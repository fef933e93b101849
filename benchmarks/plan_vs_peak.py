"""What `zk plan` says a run needs against what real runs need: the peak of their memory, and their file on the drive.

usage: python benchmarks/plan_vs_peak.py [--folder runs/nvme] [--only N ...] [--out FILE.md]      `make bench-plan`
Each combination trains three steps of a model in a process of its own, from deferred initialization, so that nothing but zk holds
memory. Peak is the high-water mark of the resident set, beyond that of the same run of a tiny model in the same process just before.
Activations are a few KiB: one token. There is no GPU in it, so that device and host are one memory. ``check`` is what ZeroOptimizer
would refuse below: it must not be more than the peak.
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
from unittest import mock

import torch
from torch import Tensor, nn

import zk
from zk.memory import peak_nbytes, trim
from zk.plan import check
from zk.plan.choose import footprint
from zk.plan.shape import Shape, shape_of_module
from zk.plan.speed import Machine

MIB = 1 << 20
ROOT = Path(__file__).parent.parent
# width and blocks: 50M, 101M, 151M parameters
SIZES = {"50M": (1024, 24), "101M": (2048, 12), "151M": (2048, 18)}
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


def train(width: int, blocks: int, options: dict[str, Any]) -> tuple[int, int]:
    """Three steps; what the check found to be needed at least, and the bytes of the file on the drive."""
    needed: list[int] = []

    def look(need: dict[str, int], _free: dict[str, int]) -> dict[str, int]:
        needed.append(need["host"])
        return {}

    with zk.deferred_init():
        model = build(width, blocks)
    with mock.patch.object(check, "lacking", look), zk.ZeroOptimizer(model, torch.optim.AdamW(model.parameters()), **options) as optimizer:
        nvme = optimizer.tiers.get("nvme")
        file_nbytes = nvme.spill.nbytes if nvme is not None else 0  # type: ignore[union-attr]
        for _ in range(3):
            optimizer.backward(model(torch.randn(1, width)).float().square().mean())
            optimizer.step()
            optimizer.zero_grad()
    return needed[0], file_nbytes


def planned(width: int, blocks: int, options: dict[str, Any]) -> tuple[int, int]:
    """Bytes of host memory and of the drive, by `zk plan`."""
    with zk.deferred_init():
        shape: Shape = shape_of_module(build(width, blocks), "squares")
    machine = Machine(gpu_nbytes=None, ram_nbytes=1 << 40, nvme_nbytes=1 << 40)
    found = footprint(shape, zk.ZeroConfig(**options), machine)
    return found.on("host"), found.on("nvme")


def measure(number: int, folder: str) -> None:
    """In a process of its own: print what was planned, found and taken."""
    stage, param_tier, optimizer_tier, size, rest = COMBINATIONS[number]
    options = {"stage": stage, "param_tier": param_tier, "optimizer_tier": optimizer_tier, **rest}
    if "nvme" in (param_tier, optimizer_tier):
        options["nvme_path"] = folder
    torch.set_num_threads(1)
    train(32, 4, options)
    trim()
    Path("/proc/self/clear_refs").write_text("5")  # from here on
    before = peak_nbytes()
    least, file_nbytes = train(*SIZES[size], options)
    took = peak_nbytes() - before
    plan, drive = planned(*SIZES[size], options)
    num_params = sum(p.numel() for p in build(*SIZES[size]).parameters())
    found = {"plan": plan, "peak": took, "least": least, "drive": drive, "file": file_nbytes, "params": num_params}
    print("RESULT " + json.dumps(found))


def row(number: int, found: dict[str, int]) -> str:
    stage, param_tier, optimizer_tier, _, rest = COMBINATIONS[number]
    options = ", ".join(f"{name}={value}" for name, value in rest.items())
    plan, peak = found["plan"], found["peak"]
    said = f"{found['drive'] / MIB:.0f} / {found['file'] / MIB:.0f}" if found["file"] else "-"
    return (
        f"| {stage} | {param_tier} | {optimizer_tier} | {found['params'] / 1e6:.0f}M | {options} | {plan / MIB:.0f} | {peak / MIB:.0f} "
        f"| {plan / peak:.3f} | {found['least'] / peak:.3f} | {said} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--only", type=int, nargs="+", default=list(range(len(COMBINATIONS))))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--measure", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure is not None:
        measure(options.measure, str(options.folder))
        return
    rows, off = [], []
    for number in options.only:
        command = [sys.executable, __file__, "--folder", str(options.folder), "--measure", str(number)]
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
        lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        if not lines:
            sys.exit(f"combination {number}: the run ended with {done.returncode}\n{done.stderr[-2000:]}")
        found = json.loads(lines[0].removeprefix("RESULT "))
        rows.append(row(number, found))
        print(rows[-1], file=sys.stderr, flush=True)
        if abs(found["plan"] / found["peak"] - 1) > 0.1 or found["least"] > found["peak"] or found["drive"] != found["file"]:
            off.append(number)
    where = f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores, no GPU, torch {torch.__version__}"
    text = (
        f"# What `zk plan` says against the peak of real runs, {datetime.date.today()}\n\nThree steps of a model of square layers in a process of "
        f"its own, one token; {where}. Peak: high-water mark of the resident set beyond a tiny model's, MiB. Command: `make bench-plan`\n\n"
        f"Of {len(rows)} combinations {len(rows) - len(off)} are within 10%, with a check that asks for no more than the peak, and a file on the "
        "drive of the size that was planned.\n\n"
        "| stage | parameters | optimizer | size | options | plan | peak | plan / peak | check / peak | drive: plan / file |\n"
        "|---|---|---|---|---|---|---|---|---|---|\n" + "\n".join(rows) + "\n"
    )
    print(text)
    if options.out:
        options.out.write_text(text)
    if off:
        sys.exit(f"combinations that are off: {off}")


if __name__ == "__main__":
    main()
