"""Shared by all benchmarks: what the machine's memory can do, measured in the same run that is compared with it."""

from __future__ import annotations

import statistics
import time

import pytest
import torch


@pytest.fixture(scope="session")
def copy_gbps() -> float:
    """Bytes read plus bytes written per second of a large copy in host memory: the median of nine."""
    source, target = torch.ones(1 << 27), torch.zeros(1 << 27)  # 512 MiB each
    seconds = []
    for _ in range(10):
        start = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - start)
    return 2 * source.nbytes / statistics.median(seconds[1:]) / 1e9
