"""Saving a model that is on the drive: memory, rate, and what training notices of it.

usage: python benchmarks/checkpoint_save.py FOLDER [--layers 26] [--width 2048] [--accumulate 8] [--out FILE.md]      `make bench-save`

The training state is in files in FOLDER, and the checkpoint goes to FOLDER too, so a save reads and writes one drive. Its floor is the bytes it
reads and the bytes it writes at the drive's rates, each measured in this run by whole passes over 4 GiB. A save in the background is compared with
steps of the same run without one: what ``metrics()`` calls a stall is time in which training waited for the save, or copied for it; the rest
of what steps take longer is that both share the drive and the cores.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import shutil
import statistics
import sys
import time
from pathlib import Path

import torch
from nvme_floor import rates

import zk
from zk.core.memory import peak_nbytes
from zk.tools.gpt import GPT, GPTConfig

GB = 1e9


class Run:
    """A GPT whose state is all on the drive."""

    def __init__(self, folder: Path, config: GPTConfig, batch: int, accumulate: int) -> None:
        torch.manual_seed(0)
        with zk.deferred_init():
            self.model = GPT(config)
        self.num_params = sum(param.numel() for param in self.model.parameters())
        inner = torch.optim.AdamW(self.model.parameters(), lr=2e-6)
        tiers = {"param_tier": "nvme", "optimizer_tier": "nvme", "nvme_path": folder}
        self.optimizer = zk.ZeroOptimizer(self.model, inner, stage=3, dtype="bf16", clip_grad_norm=1.0, **tiers)
        self.draws = torch.Generator().manual_seed(1)
        self.shape = (batch, config.context)
        self.accumulate = accumulate

    def step(self) -> float:
        """One step; returns its seconds."""
        start = time.perf_counter()
        for _ in range(self.accumulate):
            ids = torch.randint(0, 256, (self.shape[0], self.shape[1] + 1), generator=self.draws)
            (self.model(ids[:, :-1], ids[:, 1:]) / self.accumulate).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - start

    def moved(self) -> float:
        """Bytes read from the drive by the tier so far."""
        return self.optimizer.metrics()["fetched_nbytes"]

    def stall_s(self) -> float:
        return self.optimizer.metrics().get("save_stall_ms", 0.0) / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=26)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--accumulate", type=int, default=8)
    parser.add_argument("--steps", type=int, default=2, help="without a save, and with one each")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if shutil.which("fio") is None:
        sys.exit("fio is not installed (Debian: apt install fio)")
    rate = rates(options.folder)
    run = Run(options.folder, GPTConfig(layers=options.layers, width=options.width, heads=16), options.batch, options.accumulate)
    saved = options.folder / "zk-bench-saved"
    try:
        run.step()
        alone = [run.step() for _ in range(options.steps)]
        before, start = run.moved(), time.perf_counter()
        run.optimizer.save_checkpoint(saved, keep=1)
        took = time.perf_counter() - start
        peak = peak_nbytes()  # of the whole run
        read, written = run.moved() - before, sum(file.stat().st_size for file in saved.rglob("*") if file.is_file())
        beside, calls = [], []
        for _ in range(options.steps):
            start = time.perf_counter()
            run.optimizer.save_checkpoint(saved, keep=1, async_save=True)
            calls.append(time.perf_counter() - start)
            beside.append(run.step())
            start = time.perf_counter()
            run.optimizer.synchronize()  # a save that takes longer than a step is not over yet
            rest = time.perf_counter() - start
            print(f"beside: step {beside[-1]:.1f} s, save {rest:.1f} s longer, stalled {run.stall_s():.1f} s so far", file=sys.stderr, flush=True)
        stall = run.stall_s() / options.steps + statistics.median(calls)
    finally:
        run.optimizer.close()
        shutil.rmtree(saved, ignore_errors=True)
    floor = {who: read / rate[f"{who} read"] + written / rate[f"{who} write"] for who in ("fio", "zk")}
    longer = statistics.median(beside) - statistics.median(alone)
    text = f"""# Saving {run.num_params / 1e6:,.1f}M parameters that are on the drive, {datetime.date.today()}

{platform.machine()}, {len(os.sched_getaffinity(0))} cores; everything on the drive, and the checkpoint on the same drive. Command: `make bench-save`

The drive, GB/s: fio reads {rate["fio read"] / GB:.2f} and writes {rate["fio write"] / GB:.2f}, zk reads {rate["zk read"] / GB:.2f} and \
writes {rate["zk write"] / GB:.2f}.

| | |
|---|---|
| read and written by a save | {read / GB:.2f} GB and {written / GB:.2f} GB |
| save between two steps | {took:.1f} s |
| the same bytes at fio's rates, and at zk's | {floor["fio"]:.1f} s, {floor["zk"]:.1f} s |
| share of the drive's rate | {floor["fio"] / took:.0%} of fio's, {floor["zk"] / took:.0%} of zk's |
| peak resident memory of the run, save included | {peak / 2**30:.2f} GiB |
| step of {options.accumulate} micro-batches without a save | {statistics.median(alone):.1f} s |
| step with a save beside it | {statistics.median(beside):.1f} s, {longer:+.1f} s ({longer / took:.0%} of a save between two steps) |
| training stalled by a save beside it: the call, waiting and copying | {stall:.2f} s ({stall / took:.1%} of a save between two steps) |
"""
    print(text)
    if options.out:
        options.out.write_text(text)


if __name__ == "__main__":
    main()
