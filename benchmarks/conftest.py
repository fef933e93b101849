"""Shared by all benchmarks: the device, the rates that are their floors, and the timing of a case.

``ZK_BENCH_SMALL=1`` runs every benchmark once at a small size, to see that all of them work.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from cases import clock

from zk.nn.deferred import default_device

DEVICE = default_device()
SMALL = os.environ.get("ZK_BENCH_SMALL") == "1"
Floors = dict[str, float]


def time_case(benchmark: Any, case: clock.Case, floors: Floors, rounds: int, device: torch.device = DEVICE) -> None:
    """Time a case, and note its rates and its fraction of the floor."""

    def whole() -> None:
        case.work()
        clock.wait(device)

    benchmark.pedantic(whole, rounds=1 if SMALL else rounds, warmup_rounds=0 if SMALL else 2)
    row = case.row(floors, benchmark.stats.stats.data)
    rates = {name: round(row[name], 3) for name in (*case.amounts, "fraction_of_floor")}
    benchmark.extra_info.update(rates)


def copy_gbps(device: torch.device) -> float:
    """1e9 bytes/s, read plus written, of a copy of 512 MiB: the median of nine."""
    return clock.copy_gbps(device, 1 << 20, 2) if SMALL else clock.copy_gbps(device)


@pytest.fixture(scope="session")
def host_floors() -> Floors:
    """The rate of a copy in host memory."""
    return {"copy_gbps": copy_gbps(clock.CPU)}


@pytest.fixture(scope="session")
def floors() -> Floors:
    """The rates of the device, which may be the host: a copy, and bf16 matrix products."""
    size = 64 if SMALL else 4096 if DEVICE.type == "cuda" else 1024
    return {"copy_gbps": copy_gbps(DEVICE), "matmul_tflops": clock.matmul_tflops(DEVICE, size)}
