"""Processor time of a step with ``compute_dtype="fp32"`` and in both plain precisions, on one thread, interleaved. As on a CPU without bf16 products:

    ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 python benchmarks/compute_dtype.py
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from typing import Any

os.environ.setdefault("ZK_QUIET", "1")

import torch

import zk
from zk.tools.gpt import GPT, GPTConfig

SETTINGS: dict[str, dict[str, Any]] = {
    'dtype="bf16"': {"dtype": "bf16"},
    'dtype="bf16", compute_dtype="fp32"': {"dtype": "bf16", "compute_dtype": "fp32"},
    'dtype="fp32"': {"dtype": "fp32"},
}


def made(width: int, options: dict[str, Any]) -> tuple[GPT, zk.ZeroOptimizer]:
    """A small GPT in host memory at stage 3."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(layers=2, width=width, heads=width // 64, context=128))
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return model, zk.ZeroOptimizer(model, inner, stage=3, param_tier="host", optimizer_tier="host", num_threads=1, **options)


def main() -> None:
    """Print the medians, and their ratios to the middle setting."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--sequences", type=int, default=4, help="of 128 tokens, in a step")
    parser.add_argument("--rounds", type=int, default=4)
    given = parser.parse_args()
    torch.set_num_threads(1)
    runs = {name: made(given.width, options) for name, options in SETTINGS.items()}
    ids = torch.randint(0, 256, (given.sequences, 129), generator=torch.Generator().manual_seed(1))
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(given.rounds + 1):
        for name, (model, optimizer) in runs.items():
            begun = time.process_time()
            optimizer.backward(model(ids[:, :-1], ids[:, 1:]))
            optimizer.step()
            optimizer.zero_grad()
            seconds[name].append(time.process_time() - begun)
    medians = {name: statistics.median(times[1:]) for name, times in seconds.items()}
    _, one, _ = medians.values()
    for name, median in medians.items():
        print(f"{name:36} {1e3 * median:8.1f} ms of one core, {median / one:6.2f} times the second")
    for _, optimizer in runs.values():
        optimizer.close()


if __name__ == "__main__":
    main()
