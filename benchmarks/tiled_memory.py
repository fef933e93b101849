"""What one large linear layer needs beyond its resting state, whole and in tiles: peak memory of the process, forward, backward and update.

usage: python benchmarks/tiled_memory.py FOLDER [--features 16384] [--splits 1 4 16] [--out FILE.md]
The layer (features x features, bf16) rests on a drive at stage 3, so that what is in memory is what is worked on: the gathered weight,
its gradient, and the buffers on their way. Each run is a process of its own; the peak is taken beyond what a layer of 64 features needs.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

import zk


def train(features: int, splits: int, folder: str, steps: int) -> list[float]:
    """Losses of a few steps."""
    torch.manual_seed(0)
    with zk.deferred_init():
        layer = zk.TiledLinear(features, features, bias=False, out_splits=splits) if splits > 1 else nn.Linear(features, features, bias=False)
        model = nn.Sequential(layer, nn.Tanh())
    adam = torch.optim.AdamW(model.parameters(), lr=1e-4)
    place = {"stage": 3, "param_tier": "nvme", "optimizer_tier": "nvme", "nvme_path": folder, "prefetch": 0}
    losses = []
    with zk.ZeroOptimizer(model, adam, dtype="bf16", **place) as optimizer:
        x = torch.randn(4, features).bfloat16()
        for _ in range(steps):
            loss = (model(x).float() - 0.5).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
    return losses


def measure(features: int, splits: int, folder: str) -> None:
    """In a process of its own: print the peak beyond a tiny layer's, and the losses."""
    train(64, 1, folder, 2)
    process, done = psutil.Process(), threading.Event()
    before = peak = process.memory_info().rss

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.001):
            peak = max(peak, process.memory_info().rss)

    watcher = threading.Thread(target=watch)
    watcher.start()
    start = time.perf_counter()
    losses = train(features, splits, folder, 3)
    seconds = time.perf_counter() - start
    done.set()
    watcher.join()
    print("RESULT " + json.dumps({"peak": peak - before, "losses": losses, "seconds": seconds}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--features", type=int, default=16384)
    parser.add_argument("--splits", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--measure", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        measure(options.features, options.measure, str(options.folder))
        return
    runs: dict[int, dict[str, Any]] = {}
    for splits in options.splits:
        command = [sys.executable, __file__, str(options.folder), "--features", str(options.features), "--measure", str(splits)]
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)})
        lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        if not lines:
            sys.exit(f"{splits} tiles: the run ended with {done.returncode}\n{done.stderr[-2000:]}")
        runs[splits] = json.loads(lines[0].removeprefix("RESULT "))
        print(f"{splits} tiles: {runs[splits]}", file=sys.stderr)
    weight = options.features**2 * 2
    text = (
        f"# Memory of one linear layer in tiles, {datetime.date.today()}\n\n{options.features} x {options.features}, bf16: weight "
        f"{weight / 2**20:.0f} MiB, at stage 3 on NVMe; {platform.machine()}, {len(os.sched_getaffinity(0))} cores, torch {torch.__version__}. "
        f"Peak resident memory over three steps, beyond that of a layer of 64 features. Command: `make bench-tiled`\n\n"
        "| tiles | peak MiB | of the weight | of the whole layer's peak | losses | s, all three steps |\n|---|---|---|---|---|---|\n"
    )
    first = runs[options.splits[0]]["peak"]
    for splits, run in runs.items():
        losses = ", ".join(f"{loss:.5f}" for loss in run["losses"])
        peak = run["peak"]
        text += f"| {splits} | {peak / 2**20:.0f} | {peak / weight:.2f} | {peak / first:.3f} | {losses} | {run['seconds']:.1f} |\n"
    print(text)
    if options.out:
        options.out.write_text(text)


if __name__ == "__main__":
    main()
