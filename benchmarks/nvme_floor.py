"""A step with everything on the drive, against its floor: the bytes it moved at the drive's rate, or its compute, whichever is longer.

usage: python benchmarks/nvme_floor.py FOLDER [--rounds 3] [--steps 5] [--gib 1] [--out FILE.md] [-- options of peers/step.py, such as --layers 8]
fio must be installed. `make bench-nvme`

Compute is the same step with host tiers, and for one that uses no drive the step itself. The drive's rate is measured before and after each run,
as drives change theirs within minutes, on whole passes, reads and writes apart: once by fio, and once by zk.offload.nvme, whose buffers in huge
pages make the same drive faster. Both floors assume that all I/O hides behind compute, which clipping forbids: no state may be updated before the
last gradient is known. What can be had without breaking that is compute and then the update's bytes.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import shutil
import statistics
import sys
from pathlib import Path
from typing import Any

from nvme_vs_fio import with_fio, with_zk, write_once
from peers.compare import WHAT, run_once

from zk.offload.nvme import aligned

SYSTEMS = ("zk_stage3", "zk_stage3_device", "zk_stage3_nvme", "zk_stage3_nvme_cached", "zk_stage3_nvme_bf16_moments")
DEPTH, BLOCK = 4, 4 << 20


def rates(folder: Path, nbytes: int) -> dict[str, float]:
    """Bytes per second of whole passes, by system and direction."""
    path = folder / "zk-bench.bin"
    buffers = [aligned(64 << 20).fill_(index + 1) for index in range(8)]
    try:
        write_once(path, nbytes, buffers)
        found = {}
        for write in (True, False):
            direction = "write" if write else "read"
            found[f"fio {direction}"] = nbytes / with_fio(path, nbytes, write, DEPTH, BLOCK)
            found[f"zk {direction}"] = nbytes / with_zk(path, nbytes, write, DEPTH, BLOCK, buffers)
        return found
    finally:
        path.unlink(missing_ok=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--gib", type=int, default=1)
    parser.add_argument("--out", type=Path)
    options, rest = parser.parse_known_args()
    rest = [option for option in rest if option != "--"]
    if shutil.which("fio") is None:
        sys.exit("fio is not installed (Debian: apt install fio)")
    options.folder.mkdir(parents=True, exist_ok=True)
    os.environ["ZK_BENCH_NVME"] = str(options.folder)
    passes: dict[str, list[dict[str, float]]] = {system: [] for system in SYSTEMS}  # beside its runs
    runs: dict[str, list[dict[str, Any]]] = {system: [] for system in SYSTEMS}
    for number in range(options.rounds):
        before = rates(options.folder, options.gib << 30)
        for system, results in runs.items():
            results.append(run_once(system, options.steps, rest))
            passes[system] += [before, before := rates(options.folder, options.gib << 30)]
            print(f"round {number + 1}/{options.rounds}  {system:28} {results[-1]['median']:.2f} s", file=sys.stderr, flush=True)
    beside = {system: {name: statistics.median(one[name] for one in found) for name in found[0]} for system, found in passes.items()}
    rate = {name: statistics.median(one[name] for one in beside.values()) for name in beside["zk_stage3"]}
    seconds = {system: statistics.median(s for run in results for s in run["seconds"]) for system, results in runs.items()}
    compute = seconds["zk_stage3"]
    lines = [
        f"# A step with everything on the drive, against its floor, {datetime.date.today()}",
        "",
        f"GPT of {runs['zk_stage3'][0]['params'] / 1e6:.1f}M parameters, {platform.machine()}, {len(os.sched_getaffinity(0))} cores; "
        f"{options.rounds} rounds of {options.steps} warm steps. Command: `make bench-nvme`",
        "",
        f"Compute (the same step with host tiers): {compute:.2f} s. The drive, GB/s: fio reads {rate['fio read'] / 1e9:.2f} and writes "
        f"{rate['fio write'] / 1e9:.2f}, zk reads {rate['zk read'] / 1e9:.2f} and writes {rate['zk write'] / 1e9:.2f}.",
        "",
        "| system | s/step | GB read | GB written | floor, fio's rates | times | floor, zk's rates | times | compute + I/O, zk's rates | times |",
        f"|{'---|' * 10}",
    ]
    for system in SYSTEMS:
        read = statistics.median(run["fetched_nbytes"] for run in runs[system])
        written = statistics.median(run["evicted_nbytes"] for run in runs[system])
        moving = {who: read / beside[system][f"{who} read"] + written / beside[system][f"{who} write"] for who in ("fio", "zk")}
        working = compute if read or written else seconds[system]
        row = f"| {WHAT[system]} | {seconds[system]:.2f} | {read / 1e9:.2f} | {written / 1e9:.2f} "
        for floor in (max(working, moving["fio"]), max(working, moving["zk"]), working + moving["zk"]):
            row += f"| {floor:.2f} | {seconds[system] / floor:.2f} "
        lines.append(f"{row}|")
    text = "\n".join(lines) + "\n"
    print(text)
    if options.out:
        options.out.write_text(text)


if __name__ == "__main__":
    main()
