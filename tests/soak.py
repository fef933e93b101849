"""Kills a training run at random instants, while it loads, steps and saves, and starts it again: it must go on bit for bit every time.

    python -m tests.soak [--kills 50] [--ranks 1] [--seed 0] [--settings 3-host 3-nvme ...]

Of several ranks one is killed, any of them; the others must end by themselves, and say so.

Every life of the run has a setting of its own (stage, tiers; saving in between or in the background), loads the newest whole checkpoint, and
prints its loss and the CRC-32 of all parameters, masters and moments after each step. They are compared with those of a run that was never
interrupted.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import random
import tempfile
import threading
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.programs import Program, rank_of
from tests.world import free_port

STEPS = 2000  # more than any soak takes


@dataclasses.dataclass(frozen=True)
class Said:
    """One line of a life."""

    what: str  # "from", "step" or "saved"
    step: int
    loss: str = ""
    digest: str = ""


def digest(model: Any, optimizer: Any) -> str:
    """CRC-32 of everything that the next step depends on."""
    from tests.core.test_checkpoint import snapshot

    crc = 0
    for name, value in sorted(snapshot(model, optimizer).items()):
        data = value.contiguous().view(-1).view(torch.uint8).numpy().data if isinstance(value, torch.Tensor) else repr(value).encode()
        crc = zlib.crc32(data, zlib.crc32(name.encode(), crc))
    return f"{crc:08x}"


def live(folder: Path, setting: str, beside: bool) -> None:
    """Train and save until killed. Every rank has the same batches, so that any number of them trains what one does."""
    from tests.core.test_checkpoint import make, train

    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    model, optimizer, scheduler = make(setting, folder, clip_grad_norm=None)
    root = folder / "saved"
    print("made 0", flush=True)
    if (root / "latest").exists():
        optimizer.load_checkpoint(root, scheduler=scheduler)
    start = optimizer.num_steps
    print("from", start, flush=True)
    for step in range(start, STEPS):
        (loss,) = train(model, optimizer, scheduler, step, step + 1, ranks=1)
        print("step", step, repr(loss), digest(model, optimizer), flush=True)  # which waits for the save
        if beside and step > start:
            print("saved", step, flush=True)
        optimizer.save_checkpoint(root, scheduler=scheduler, keep=2, async_save=beside)
        if not beside:
            print("saved", step + 1, flush=True)


def one_life(folder: Path, setting: str, beside: bool, saved: int, wanted: int, delay_s: float, ranks: int = 1, victim: int = 0) -> list[Said]:
    """Start the run, and kill rank ``victim`` ``delay_s`` after it has saved ``wanted`` checkpoints more than ``saved``; 0: while it loads.

    Returns what the first rank printed.
    """
    port = free_port()
    arguments = ("-m", "tests.soak", "--live", str(folder), "--settings", setting, *["--beside"] * beside)
    programs = [Program(*arguments, env=rank_of(ranks, rank, port) if ranks > 1 else None) for rank in range(ranks)]
    lines: list[str] = []
    for line in programs[0].stdout:
        lines.append(line)
        if line.startswith("saved") and int(line.split()[1]) >= saved + wanted > saved:
            break
        if line.startswith("made") and not wanted:
            break
    threading.Event().wait(delay_s)
    programs[victim].kill()
    ends = [program.communicate(timeout=60.0) for program in programs]
    for rank, (_, said) in enumerate(ends):
        if rank != victim:
            assert "Connection" in said or "is gone" in said, f"rank {rank} does not say that another has gone:\n{said}"
    lines += ends[0][0].splitlines(keepends=True)
    found = [Said(what, int(step), *more) for what, step, *more in (line.split() for line in lines if line.endswith("\n"))]
    return [line for line in found if line.what != "made"]


class Unbroken:
    """The run that is never interrupted, made as far as it is needed."""

    def __init__(self, folder: Path, setting: str = "2-host") -> None:
        from tests.core.test_checkpoint import make

        self.model, self.optimizer, self.scheduler = make(setting, folder, clip_grad_norm=None)
        self.known: list[tuple[str, str]] = []

    def __getitem__(self, step: int) -> tuple[str, str]:
        from tests.core.test_checkpoint import train

        while len(self.known) <= step:
            (loss,) = train(self.model, self.optimizer, self.scheduler, len(self.known), len(self.known) + 1, ranks=1)
            self.known.append((repr(loss), digest(self.model, self.optimizer)))
        return self.known[step]


def soak(kills: int, seed: int, settings: Sequence[str], folder: Path, say: bool = False, ranks: int = 1) -> int:
    """Kill ``kills`` times; AssertionError at the first difference. Returns the steps that were saved."""
    dice, saved, unbroken = random.Random(seed), 0, Unbroken(folder)
    for kill in range(kills):
        setting, beside = dice.choice(list(settings)), dice.random() < 0.5
        delay, victim = dice.uniform(0, 0.06), dice.randrange(ranks)
        wanted = 0 if dice.random() < 0.2 else dice.randint(1, 8)
        start = time.perf_counter()
        said = one_life(folder, setting, beside, saved, wanted, delay, ranks, victim)
        assert all(line.step >= saved for line in said if line.what == "from"), f"kill {kill}: {saved} steps were saved, and it said {said[:1]}"
        for line in said:
            if line.what == "from":
                continue
            if line.what == "saved":
                saved = line.step
            else:
                want = unbroken[line.step]
                assert (line.loss, line.digest) == want, (
                    f"life {kill} ({setting}, from step {said[0].step}): step {line.step} has loss {line.loss} and state {line.digest}; "
                    f"the unbroken run has {want[0]} and {want[1]}"
                )
        if say:
            how, took = "beside" if beside else "", time.perf_counter() - start
            where = f"from {said[0].step if said else '-':>4} saved {saved:4}, rank {victim} killed {1e3 * delay:4.1f} ms later"
            print(f"{kill + 1:3} of {kills}: {setting:18} {how:6} {where}, {took:.1f} s, same", flush=True)
    return saved


def main() -> None:
    """The command line above."""
    from tests.core.test_checkpoint import SETTINGS

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--live", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--beside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)  # several sum in another order
    if options.live:
        live(options.live, options.settings[0], options.beside)
        return
    with tempfile.TemporaryDirectory() as folder:
        saved = soak(options.kills, options.seed, options.settings, Path(folder), say=True, ranks=options.ranks)
    print(f"killed {options.kills} times, {saved} steps saved, every loss, parameter and moment as in the unbroken run")


if __name__ == "__main__":
    main()
