"""Time that seeing takes: of what is always counted, of a run's file and progress, and of a profile, as a share of a step.

usage: python benchmarks/monitor_overhead.py FOLDER [--steps 10] [--layers 24 --width 1024 --batch 1 --context 128] [--out FILE.md]

Steps differ by more than what is looked for, so no two runs are compared: each call of the monitor is timed where it is called. What is
always counted, phases and transfers of the drive, is their number in a step times what one takes here, phases without a recorder and with one.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import os
import platform
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import zk
from zk.core import timeline
from zk.offload import nvme
from zk.tools.monitor import profile as profiles
from zk.tools.train.gpt import GPT, GPTConfig

SPENT: Counter[str] = Counter()  # seconds
CALLS: Counter[str] = Counter()


def timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """Add the time of each call to ``SPENT``."""

    def inside(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return call(*args, **kwargs)
        finally:
            SPENT[name] += time.perf_counter() - start
            CALLS[name] += 1

    return inside


def one_s(call: Callable[[], None], count: int = 20_000) -> float:
    """Seconds that one call takes: the median of ten times, as others use the cores, too."""
    taken = []
    for _ in range(10):
        start = time.perf_counter()
        for _ in range(count // 10):
            call()
        taken.append((time.perf_counter() - start) / (count // 10))
    return statistics.median(taken)


def phase_s(resource: timeline.Resource) -> float:
    def one() -> None:
        with timeline.phase(resource, "nothing"):
            pass

    return one_s(one)


def transfer_s() -> float:
    """Seconds that it takes to count one of many transfers for the drive's rate."""
    rate = nvme.DriveRate(1)
    for _ in range(nvme._WINDOWS * nvme._WINDOW_NBYTES >> 22):
        rate.end(4 << 20, rate.begin())
    return one_s(lambda: rate.end(4 << 20, rate.begin()))


@contextlib.contextmanager
def counted() -> Iterator[None]:
    """Count phases, and time the calls of the monitor."""
    enter, begin = timeline.phase.__enter__, nvme.DriveRate.begin

    def entering(self: timeline.phase) -> None:
        CALLS["counted" if self.resource in ("wait", "update") else "others"] += 1
        enter(self)

    def beginning(self: nvme.DriveRate) -> tuple[int, int] | None:
        CALLS["transfers"] += 1
        return begin(self)

    timeline.phase.__enter__, nvme.DriveRate.begin = entering, beginning  # type: ignore[method-assign]
    for name in ("_enter", "_leave"):
        setattr(profiles.profile, name, timed("profile", getattr(profiles.profile, name)))
    yield
    timeline.phase.__enter__, nvme.DriveRate.begin = enter, begin  # type: ignore[method-assign]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path)
    for name, value in (("steps", 10), ("layers", 24), ("width", 1024), ("batch", 1), ("context", 128)):
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    os.environ["ZK_QUIET"] = "0"
    kinds: dict[str, timeline.Resource] = {"counted": "wait", "others": "read"}
    rows, cost = [], {**{kind: phase_s(resource) for kind, resource in kinds.items()}, "transfers": transfer_s()}
    with timeline.Recorder():
        recorded = {kind: phase_s(resource) - cost[kind] for kind, resource in kinds.items()}
    with counted():
        for tier in ("host", "nvme"):
            torch.manual_seed(0)
            config = GPTConfig(vocab=4096, width=options.width, layers=options.layers, heads=16, context=options.context)
            model = GPT(config)
            numel = sum(param.numel() for param in model.parameters())
            tiers: dict[str, Any] = {"param_tier": tier, "optimizer_tier": tier, "nvme_path": str(options.folder) if tier == "nvme" else None}
            optimizer = zk.ZeroOptimizer(model, torch.optim.AdamW(model.parameters()), stage=3, dtype="bf16", clip_grad_norm=1.0, **tiers)
            run = options.folder / f"run-{tier}"
            seconds: list[float] = []

            def steps(number: int, after: Callable[[torch.Tensor], None], optimizer: Any = optimizer, seconds: list[float] = seconds) -> None:
                seconds.clear()
                for _ in range(number):
                    start = time.perf_counter()
                    ids = torch.randint(0, 4096, (options.batch, options.context))
                    loss = optimizer.model(ids, ids)
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    after(loss)
                    seconds.append(time.perf_counter() - start)

            steps(2, lambda loss: None)
            CALLS.clear()
            steps(options.steps, lambda loss: None)
            step_s = statistics.median(seconds)
            default = sum(CALLS[kind] * cost[kind] for kind in cost) / options.steps
            SPENT.clear()
            with zk.Progress(optimizer, options.steps, run=run) as progress:
                progress.step = timed("file of the run, progress", progress.step)  # type: ignore[method-assign]
                steps(options.steps, lambda loss, progress=progress: progress.step(loss, tokens=options.context))
            shown = SPENT["file of the run, progress"] / options.steps
            SPENT.clear()
            CALLS.clear()
            with zk.profile(optimizer, options.folder / "trace.json", steps=options.steps, skip=0):
                SPENT.clear()
                CALLS.clear()
                steps(options.steps - 1, lambda loss: None)
                profiled = (SPENT["profile"] + sum(CALLS[kind] * recorded[kind] for kind in kinds)) / (options.steps - 1)
            optimizer.close()
            rows.append((tier, numel, step_s, default, shown, profiled))
    lines = [
        f"# Time that seeing takes, {datetime.date.today()}",
        "",
        f"GPT of {rows[0][1] / 1e6:.1f}M parameters, stage 3, bf16, {options.batch * options.context} tokens a step, {platform.machine()}, "
        f"{len(os.sched_getaffinity(0))} cores, {options.steps} steps of each; torch {torch.__version__}. "
        "Command: `python benchmarks/monitor_overhead.py FOLDER`",
        "",
        "| tiers | s/step | always counted (default) | file of the run and progress | profile, while it records | all of it |",
        "|---|---|---|---|---|---|",
    ]
    for tier, _, step_s, *parts in rows:
        cells = " | ".join(f"{1e3 * part:.2f} ms, {part / step_s:.3%}" for part in (*parts, sum(parts)))
        lines.append(f"| {tier} | {step_s:.2f} | {cells} |")
    print("\n".join(lines))
    if options.out:
        options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
