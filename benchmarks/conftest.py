"""Shared by all benchmarks: the device, the rates that are their floors, and the timing of a case by pytest-benchmark."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from zk.bench import clock
from zk.nn.deferred import default_device

DEVICE = default_device()
Floors = dict[str, float]


def time_case(benchmark: Any, case: clock.Case, floors: Floors, rounds: int, device: torch.device = DEVICE) -> None:
    """Time it, and note its rates and its fraction of the floor."""

    def whole() -> None:
        case.work()
        clock.wait(device)

    benchmark.pedantic(whole, rounds=rounds, warmup_rounds=2)
    row = case.row(floors, benchmark.stats.stats.data)
    benchmark.extra_info.update({name: round(row[name], 3) for name in (*case.amounts, "fraction_of_floor")})


@pytest.fixture(scope="session")
def host_floors() -> Floors:
    """Bytes read plus bytes written per second of a copy of 512 MiB in host memory: the median of nine."""
    return {"copy_gbps": clock.copy_gbps(clock.CPU)}


@pytest.fixture(scope="session")
def floors() -> Floors:
    """The same on the device, which may be the host; and bf16 matrices of 4096 (on a CPU 1024), multiplied by the vendor's library."""
    return {"copy_gbps": clock.copy_gbps(DEVICE), "matmul_tflops": clock.matmul_tflops(DEVICE, 4096 if DEVICE.type == "cuda" else 1024)}
