"""Measured rates of this machine's CPU Adam, of a drive and of the link to a GPU, in a few seconds."""

from __future__ import annotations

import statistics

import torch

from zk.bench.adam import by_zk
from zk.bench.clock import seconds_of
from zk.bench.io import passes
from zk.bench.link import measure

_NUMEL = 1 << 24  # of the update: far more than caches hold
_NBYTES = 256 << 20  # of the file
_ROUNDS = 5


def measure_cpu_adam(num_threads: int | None = None, rounds: int = _ROUNDS) -> float:
    """1e9 parameters/s of the update that training uses: bf16, split master, fp32 moments, and all threads, unless ``num_threads`` says how many."""
    param, grad = torch.zeros(_NUMEL, dtype=torch.bfloat16), torch.full((_NUMEL,), 1e-3, dtype=torch.bfloat16)
    return _NUMEL / statistics.median(seconds_of(by_zk(param, grad, num_threads=num_threads), rounds)) / 1e9


def measure_disk(path: str) -> float:
    """1e9 bytes/s that zk's file I/O reads and writes at ``path``, half of each. OSError if it is no folder, or has no room for 256 MiB."""
    written, read = passes(path, _NBYTES, 4 << 20, 4, _ROUNDS)
    return 2 * _NBYTES / (statistics.median(written) + statistics.median(read)) / 1e9


def measure_link(device: torch.device | None = None) -> float:
    """1e9 bytes/s between host and device, from page-locked memory, in the slower direction. ValueError where there is no GPU."""
    rows = measure(_NBYTES, _ROUNDS, device).as_dict()["rows"]
    return min(float(row["gbps"]) for row in rows if row["name"] in ("pinned, host to device", "pinned, device to host"))
