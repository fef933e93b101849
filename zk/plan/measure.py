"""In: a folder on the drive. Out: what this machine's CPU Adam and that drive do, measured in a few seconds."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from zk.kernels.step import AdamStep
from zk.memory import aligned
from zk.offload.cpu_adam import adam_
from zk.offload.nvme import File

_NUMEL = 1 << 24  # of the update: far more than caches hold
_NBYTES = 256 << 20  # of the file
_REPEATS = 5


def _median_s(work: Callable[[], None]) -> float:
    """Seconds, after a first time that does not count."""
    taken = []
    for _ in range(_REPEATS + 1):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[1:])


def measure_cpu_adam() -> float:
    """1e9 parameters/s of the update that training uses: bf16, split master, fp32 moments, all threads."""
    param, grad = torch.zeros(_NUMEL, dtype=torch.bfloat16), torch.full((_NUMEL,), 1e-3, dtype=torch.bfloat16)
    master = torch.zeros(_NUMEL, dtype=torch.int16)
    exp_avg, exp_avg_sq = torch.zeros(_NUMEL), torch.zeros(_NUMEL)
    scalars = AdamStep(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, decoupled=True, step=1, grad_scale=1.0)
    return _NUMEL / _median_s(lambda: adam_(param, grad, master, exp_avg, exp_avg_sq, scalars)) / 1e9


def measure_disk(path: str) -> float:
    """1e9 bytes/s that zk's file I/O reads and writes at ``path``, half of each. OSError if it is no folder, or has no room for 256 MiB."""
    with tempfile.TemporaryDirectory(dir=path, prefix="zk-plan-") as folder:
        data = aligned(_NBYTES)
        with File(Path(folder) / "measure.bin", _NBYTES) as file:
            written, read = _median_s(lambda: file.write(data)), _median_s(lambda: file.read(data))
    return 2 * _NBYTES / (written + read) / 1e9
