"""The command line of the package."""

from __future__ import annotations

import os

os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ["OMP_NUM_THREADS"] = "1"  # one thread goes on at a time
import argparse
import concurrent.futures
import itertools
import multiprocessing
import sys
import time

from tests.simulate.defects import DEFECTS, find
from tests.simulate.job import report, run, several

CHUNK = 50


def main() -> None:
    """The command line of the package."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulate", description="Replays training jobs from seeds.")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--seeds", type=int, default=1, help="how many")
    parser.add_argument("--trace", action="store_true", help="print all that happened")
    parser.add_argument("--defects", nargs="*", metavar="NAME", help="plant these, or all, and look for the first seed that finds each")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    # forked, as each is to have zk and torch at once, and spawned ones take 3 s for that
    pool = concurrent.futures.ProcessPoolExecutor(options.workers, multiprocessing.get_context("forkserver"))
    begun = time.perf_counter()
    if options.defects is not None:
        names = options.defects or list(DEFECTS)
        seeds = options.seeds if options.seeds > 1 else 1000
        missed = 0
        for done in concurrent.futures.as_completed([pool.submit(find, name, seeds) for name in names]):
            name, seed, problem = done.result()
            missed += seed is None
            where = f"seed {seed}" if seed is not None else "NOT FOUND"
            print(f"{name:28} {where:10} {problem.partition(chr(10))[0][:150]}", flush=True)
        pool.shutdown()
        print(f"{len(names) - missed} of {len(names)} planted defects found within {seeds} seeds, {time.perf_counter() - begun:.0f} s")
        sys.exit(bool(missed))
    if options.seeds == 1:
        outcome = run(options.seed)
        print("\n".join(outcome.trace) if options.trace else "", report(outcome), sep="\n")
        sys.exit(bool(outcome.problems))
    ends = [*range(options.seed, options.seed + options.seeds, CHUNK), options.seed + options.seeds]
    count = wrong = faults = 0
    for done in concurrent.futures.as_completed([pool.submit(several, *each) for each in itertools.pairwise(ends)]):
        ran, bad, fired = done.result()
        count, wrong, faults = count + ran, wrong + len(bad), faults + fired
        for text in bad:
            print(text, flush=True)
        print(f"{count} of {options.seeds} seeds, {wrong} wrong, {faults} faults, {time.perf_counter() - begun:.0f} s", file=sys.stderr, flush=True)
    pool.shutdown()
    print(f"{count} seeds from {options.seed} on: {wrong} wrong, {faults} faults came about, {time.perf_counter() - begun:.0f} s")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
