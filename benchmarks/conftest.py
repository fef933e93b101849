"""Shared by all benchmarks: the device, and what its memory and its matrix unit can do, measured in the same run that is compared with it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import pytest
import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def wait() -> None:
    """Until the device has done what it was given."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def finished(work: Callable[[], object]) -> Callable[[], None]:
    """``work`` and the wait for its end: what a host clock can time."""

    def whole() -> None:
        work()
        wait()

    return whole


def median_seconds(work: Callable[[], object], rounds: int = 9) -> float:
    """Of ``rounds`` calls, after a first one."""
    seconds = []
    for _ in range(rounds + 1):
        wait()
        start = time.perf_counter()
        finished(work)()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


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


@pytest.fixture(scope="session")
def device_copy_gbps() -> float:
    """The same on the device, which may be the host."""
    source, target = torch.ones(1 << 27, device=DEVICE), torch.zeros(1 << 27, device=DEVICE)
    return 2 * source.nbytes / median_seconds(lambda: target.copy_(source)) / 1e9


@pytest.fixture(scope="session")
def matmul_tflops() -> float:
    """bf16 matrices of 4096 (on a CPU 1024), multiplied by the vendor's library."""
    size = 4096 if DEVICE.type == "cuda" else 1024
    a, b = (torch.randn(size, size, device=DEVICE).bfloat16() for _ in range(2))
    out = torch.empty_like(a)
    return 2 * size**3 / median_seconds(lambda: torch.mm(a, b, out=out)) / 1e12
