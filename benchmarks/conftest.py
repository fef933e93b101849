"""Shared by all benchmarks: the device, and what its memory and its matrix unit can do, measured in the same run that is compared with it."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import pytest
import torch

from zk.bench import clock

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def wait() -> None:
    """Until the device has done what it was given."""
    clock.wait(DEVICE)


def finished(work: Callable[[], object]) -> Callable[[], None]:
    """``work`` and the wait for its end: what a host clock can time."""

    def whole() -> None:
        work()
        wait()

    return whole


def median_seconds(work: Callable[[], object], rounds: int = 9) -> float:
    """Of ``rounds`` calls, after a first one."""
    return statistics.median(clock.seconds_of(work, rounds, DEVICE, patience_s=60.0))


@pytest.fixture(scope="session")
def copy_gbps() -> float:
    """Bytes read plus bytes written per second of a copy of 512 MiB in host memory: the median of nine."""
    return clock.copy_gbps(torch.device("cpu"))


@pytest.fixture(scope="session")
def device_copy_gbps() -> float:
    """The same on the device, which may be the host."""
    return clock.copy_gbps(DEVICE)


@pytest.fixture(scope="session")
def matmul_tflops() -> float:
    """bf16 matrices of 4096 (on a CPU 1024), multiplied by the vendor's library."""
    return clock.matmul_tflops(DEVICE, 4096 if DEVICE.type == "cuda" else 1024)
