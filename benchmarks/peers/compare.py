"""All systems' training step in turn, several rounds, each run in a process of its own. Prints one table; `make bench-peers`.

usage: python benchmarks/peers/compare.py [--rounds 3] [--steps 5] [--systems A B ...] [--out FILE.md] [-- options of step.py, such as --micro 8]
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ORDER = ("torch_autocast", "torch_bf16", "fsdp2", "deepspeed_zero2", "deepspeed_zero3", "zk_stage2", "zk_stage3")
RATIOS = (
    ("zk_stage2", "deepspeed_zero2"),
    ("zk_stage3", "deepspeed_zero3"),
    ("zk_stage2", "torch_autocast"),
    ("zk_stage3", "torch_autocast"),
    ("zk_stage2", "fsdp2"),
    ("zk_stage3_nvme", "deepspeed_zero3_nvme"),
    ("zk_stage3_nvme_cached", "deepspeed_zero3_nvme"),
    ("zk_stage3_nvme_bf16_moments", "deepspeed_zero3_nvme"),
)
WHAT = {
    "torch_autocast": "plain torch, fp32 weights, autocast, fused AdamW",
    "torch_bf16": "plain torch, bf16 weights and moments, no fp32 master",
    "fsdp2": "FSDP2, bf16 compute, fp32 master",
    "deepspeed_zero2": "DeepSpeed ZeRO-2, optimizer on CPU",
    "deepspeed_zero3": "DeepSpeed ZeRO-3, optimizer and parameters on CPU",
    "zk_stage2": "zk stage 2, optimizer on host",
    "zk_stage3": "zk stage 3, optimizer and parameters on host",
    "zk_stage3_device": "zk stage 3, optimizer and parameters on the device",
    "deepspeed_zero3_nvme": "DeepSpeed ZeRO-3, optimizer and parameters on NVMe",
    "zk_stage3_nvme": "zk stage 3, both on NVMe, no host budget",
    "zk_stage3_nvme_cached": "zk stage 3, both on NVMe, host_budget 1.75 GiB",
    "zk_stage3_nvme_bf16_moments": "zk stage 3, both on NVMe, host_budget 1.75 GiB, bf16 moments",
    "zk_stage3_overlap_step": "zk stage 3, optimizer and parameters on host, overlap_step",
    "zk_stage3_nvme_overlap_step": "zk stage 3, both on NVMe, no host budget, overlap_step",
    "zk_stage3_nvme_cached_overlap_step": "zk stage 3, both on NVMe, host_budget 1.75 GiB, overlap_step",
}


def run_once(system: str, steps: int, rest: list[str], checkout: Path = HERE.parent.parent) -> dict[str, Any]:
    """One process; RuntimeError with its last lines if it gave no result."""
    command = [sys.executable, str(HERE / "step.py"), system, "--steps", str(steps), *rest]
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    found = re.search(r"^RESULT (.*)$", done.stdout, re.MULTILINE)
    if found is None:
        raise RuntimeError(f"{system} ended with {done.returncode} and no result:\n" + "\n".join((done.stdout + done.stderr).splitlines()[-15:]))
    result: dict[str, Any] = json.loads(found[1])
    return result


def processor() -> str:
    names = re.findall(r"model name\s*:\s*(.*)", Path("/proc/cpuinfo").read_text()) if Path("/proc/cpuinfo").exists() else []
    return f"{names[0] if names else platform.processor()}, {len(os.sched_getaffinity(0))} cores"


def table(runs: dict[str, list[dict[str, Any]]]) -> str:
    """Medians over all warm steps of all rounds; ratios are to zk at the same stage and to the fastest run of zk."""
    medians = {system: statistics.median(s for run in rounds for s in run["seconds"]) for system, rounds in runs.items()}
    peaks = {system: statistics.median(run["peak_rss"] for run in rounds) for system, rounds in runs.items()}
    titles = ["system", "s/step (median)", "fastest - slowest", "peak RSS GiB", "drive: B read per parameter", "written", "last loss"]
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for system, rounds in runs.items():
        seconds = [s for run in rounds for s in run["seconds"]]
        drive = [rounds[-1].get(name, 0) / rounds[-1]["params"] for name in ("fetched_nbytes", "evicted_nbytes")]
        moved = " | ".join(f"{nbytes:.1f}" if nbytes else "" for nbytes in drive)
        lines.append(
            f"| {WHAT[system]} | {medians[system]:.2f} | {min(seconds):.2f} - {max(seconds):.2f} "
            f"| {peaks[system] / 2**30:.2f} | {moved} | {rounds[-1]['losses'][-1]:.3f} |"
        )
    lines += ["", "| ratio | time | peak RSS |", "|---|---|---|"]
    for ours, theirs in RATIOS:
        if ours in runs and theirs in runs:
            lines.append(f"| {ours} / {theirs} | {medians[ours] / medians[theirs]:.2f} | {peaks[ours] / peaks[theirs]:.2f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--systems", nargs="+", choices=WHAT, default=list(ORDER))
    parser.add_argument("--checkout", type=Path, default=HERE.parent.parent, help="folder that zk is imported from, such as one of another commit")
    parser.add_argument("--out", type=Path)
    options, rest = parser.parse_known_args()
    rest = [option for option in rest if option != "--"]
    systems = [s for s in options.systems if not s.startswith("deepspeed") or importlib.util.find_spec("deepspeed")]
    for missing in set(options.systems) - set(systems):
        print(f"{missing}: DeepSpeed is not installed; `make bench-peers` installs it", file=sys.stderr)
    runs: dict[str, list[dict[str, Any]]] = {system: [] for system in systems}
    for number in range(options.rounds):
        for system in systems:
            runs[system].append(run_once(system, options.steps, rest, options.checkout.resolve()))
            last = runs[system][-1]
            figures = f"{last['median']:.2f} s  {last['peak_rss'] / 2**30:.2f} GiB"
            print(f"round {number + 1}/{options.rounds}  {system:16} {figures}", file=sys.stderr, flush=True)
    packages = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "numba", "deepspeed") if importlib.util.find_spec(name))
    clip = rest[rest.index("--clip") + 1] if "--clip" in rest else "1.0"
    params = next(iter(runs.values()))[0]["params"]
    text = (
        f"# One training step, {datetime.date.today()}\n\nGPT of {params / 1e6:.1f}M parameters, clip {clip}, {processor()}; {packages}. "
        f"{options.rounds} interleaved rounds of {options.steps} warm steps after 2, each run in its own process. "
        f"Command: `python benchmarks/peers/compare.py {' '.join(sys.argv[1:])}`\n\n{table(runs)}\n"
    )
    print(text)
    if options.out:
        options.out.write_text(text)


if __name__ == "__main__":
    main()
