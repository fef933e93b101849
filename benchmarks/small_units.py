"""Processor time of a step of many small blocks, each a unit of its own and neighbours together, interleaved in one process, on one thread.

    python benchmarks/small_units.py --path /folder/on/a/drive
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("ZK_QUIET", "1")

import torch
from torch import nn

import zk

PLACES: dict[str, dict[str, Any]] = {
    "stage 2, optimizer on host": {"stage": 2, "optimizer_tier": "host"},
    "stage 3, all on host": {"stage": 3, "param_tier": "host", "optimizer_tier": "host"},
    "stage 2, optimizer on nvme": {"stage": 2, "optimizer_tier": "nvme"},
    "stage 3, all on nvme": {"stage": 3, "param_tier": "nvme", "optimizer_tier": "nvme"},
}


def trainer(blocks: int, wrap: Callable[[nn.Module, torch.optim.Optimizer], Any]) -> Callable[[], float]:
    """A function that trains one step, and returns its processor time."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(blocks)))
    optimizer = wrap(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    x = torch.randn(4, 64)

    def step() -> float:
        begun = time.process_time()
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.process_time() - begun

    return step


def main() -> None:
    """Print what zk adds to the processor time of plain torch, apart and together."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", default=".", help="folder on the drive")
    parser.add_argument("--blocks", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=15)
    given = parser.parse_args()
    torch.set_num_threads(1)
    for place, options in PLACES.items():
        with tempfile.TemporaryDirectory(dir=given.path) as folder:
            options |= {"nvme_path": folder, "num_threads": 1} if "nvme" in options.values() else {"num_threads": 1}
            runs = {
                "plain": trainer(given.blocks, lambda model, inner: inner),
                "apart": trainer(given.blocks, lambda model, inner: zk.ZeroOptimizer(model, inner, units=[nn.Linear], **options)),  # noqa: B023
                "together": trainer(given.blocks, lambda model, inner: zk.ZeroOptimizer(model, inner, **options)),  # noqa: B023
            }
            seconds: dict[str, list[float]] = {name: [] for name in runs}
            for _ in range(given.rounds):
                for name, step in runs.items():
                    seconds[name].append(step())
            plain, apart, together = (statistics.median(times[3:]) for times in seconds.values())
            more = [1e6 * (one - plain) / given.blocks for one in (apart, together)]
            print(f"{place:28} {more[0]:7.0f} us more for each block if apart, {more[1]:5.0f} together: {more[0] / more[1]:5.1f} times", flush=True)


if __name__ == "__main__":
    main()
