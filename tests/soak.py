"""Kills a training run at random instants, while it loads, steps and saves, and starts it again: it must go on bit for bit every time.

    python -m tests.soak [--kills 50] [--ranks 1] [--seed 0] [--settings 3-host 3-nvme ...]

Of several ranks one is killed, any of them; the others must end by themselves, and say so. Every life of the run has a setting of its own (stage,
tiers; saving in between or in the background), loads the newest whole checkpoint, and prints its loss and the CRC-32 of all parameters, masters
and moments after each step. They are compared with those of a run that was never interrupted.
"""

import argparse
import os
import random
import tempfile
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


def stepped(model: Any, optimizer: Any, scheduler: Any, step: int) -> list[str]:
    """Train one step. Returns the loss, and the CRC-32 of everything that the next step depends on."""
    from tests.core.test_checkpoint import snapshot, train

    (loss,) = train(model, optimizer, scheduler, step, step + 1, ranks=1)
    crc = 0
    for name, value in sorted(snapshot(model, optimizer).items()):
        data = value.contiguous().view(-1).view(torch.uint8).numpy().data if isinstance(value, torch.Tensor) else repr(value).encode()
        crc = zlib.crc32(data, zlib.crc32(name.encode(), crc))
    return [repr(loss), f"{crc:08x}"]


def live(folder: Path, setting: str, beside: bool) -> None:
    """Train and save until killed. Every rank has the same batches, so that any number of them trains what one does."""
    from tests.core.test_checkpoint import make

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
        print("step", step, *stepped(model, optimizer, scheduler, step), flush=True)  # which waits for the save
        if beside and step > start:
            print("saved", step, flush=True)
        optimizer.save_checkpoint(root, scheduler=scheduler, keep=2, async_save=beside)
        if not beside:
            print("saved", step + 1, flush=True)


def one_life(folder: Path, setting: str, beside: bool, wanted: int, delay_s: float, ranks: int, victim: int) -> list[list[str]]:
    """Start the run, and kill rank ``victim`` ``delay_s`` after ``wanted`` steps are saved; 0: while it loads. Returns the first rank's words."""
    port = free_port()
    arguments = ("-m", "tests.soak", "--live", str(folder), "--settings", setting, *["--beside"] * beside)
    programs = [Program(*arguments, env=rank_of(ranks, rank, port) if ranks > 1 else None) for rank in range(ranks)]
    lines: list[str] = []
    for line in programs[0].stdout:
        lines.append(line)
        if (line.startswith("saved") and int(line.split()[1]) >= wanted > 0) or (line.startswith("made") and not wanted):
            break
    time.sleep(delay_s)
    programs[victim].kill()
    ends = [program.communicate(timeout=60.0) for program in programs]
    for rank, (_, said) in enumerate(ends):
        if rank != victim:
            assert "Connection" in said or "is gone" in said, f"rank {rank} does not say that another has gone:\n{said}"
    lines += ends[0][0].splitlines(keepends=True)
    return [line.split() for line in lines if line.endswith("\n") and not line.startswith("made")]


def soak(kills: int, seed: int, settings: Sequence[str], folder: Path, ranks: int = 1) -> int:
    """Kill ``kills`` times; AssertionError at the first difference. Returns the steps that were saved."""
    from tests.core.test_checkpoint import make

    dice, saved = random.Random(seed), 0
    unbroken, known = make("2-host", folder, clip_grad_norm=None), list[list[str]]()
    for kill in range(kills):
        setting, beside = dice.choice(list(settings)), dice.random() < 0.5
        delay, victim = dice.uniform(0, 0.06), dice.randrange(ranks)
        wanted = 0 if dice.random() < 0.2 else saved + dice.randint(1, 8)
        for what, number, *more in one_life(folder, setting, beside, wanted, delay, ranks, victim):
            step = int(number)
            if what == "from":
                assert step >= saved, f"kill {kill}: {saved} steps were saved, and it goes on from {step}"
            elif what == "saved":
                saved = step
            else:
                known += [stepped(*unbroken, number) for number in range(len(known), step + 1)]
                assert more == known[step], f"life {kill} ({setting}): step {step} has loss and state {more}; the unbroken run has {known[step]}"
        print(f"{kill + 1:3} of {kills}: {setting:18} {'beside' * beside:6} saved {saved:4}, rank {victim} killed, same", flush=True)
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
        saved = soak(options.kills, options.seed, options.settings, Path(folder), ranks=options.ranks)
    print(f"killed {options.kills} times, {saved} steps saved, every loss, parameter and moment as in the unbroken run")


if __name__ == "__main__":
    main()
