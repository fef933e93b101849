"""The CPU update of 50M parameters, bf16 gradient in and bf16 parameter out, against what else is there, and the norm. `make bench`.

Every row does the whole job: it starts from bf16 gradients and ends with bf16 parameters, casts included. ``fraction_of_floor`` is the
time that moving the fewest possible bytes would take at the copy bandwidth of the same run, over the time taken; it can pass 1, as a copy
writes memory that it has not read. DeepSpeed's row appears where DeepSpeed is installed (`make bench-peers` installs it).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import adam
from cases.clock import CPU, Case, Work
from conftest import SMALL, Floors, time_case
from torch import Tensor

from zk.memory import zeros
from zk.offload.cpu_adam import sum_of_squares

NUMEL = 20_000 if SMALL else 50_000_000


def deepspeed(param: Tensor, grad: Tensor) -> Work:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return adam.with_casts(param, grad, lambda masters: DeepSpeedCPUAdam(masters, adamw_mode=True, fp32_optimizer_states=True, **adam.OPTIONS))


SYSTEMS: dict[str, tuple[int, adam.Make]] = {**adam.SYSTEMS, "deepspeed_cpu_adam": (adam.FP32_STATE, deepspeed)}


@pytest.mark.parametrize("system", SYSTEMS)
def test_cpu_adam(system: str, benchmark: Any, host_floors: Floors) -> None:
    if system.startswith("deepspeed") and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed")
    benchmark.group = f"AdamW on the CPU, {NUMEL / 1e6:g}M parameters, bf16 gradient in, bf16 parameter out"
    torch.manual_seed(0)
    time_case(benchmark, adam.case(system, SYSTEMS[system], NUMEL), host_floors, 3 if system in ("torch_foreach", "zk_torch_engine") else 15, CPU)
    nanoseconds = benchmark.stats.stats.median / NUMEL * 1e9
    benchmark.extra_info.update(ns_per_parameter=round(nanoseconds, 3), copy_gbps=round(host_floors["copy_gbps"], 1), threads=torch.get_num_threads())


def by_torch(grad: Tensor, threads: int) -> float:
    """The sum of squares by torch's norm, in fp32."""
    return float(torch.linalg.vector_norm(grad, dtype=torch.float32).square())


NORMS: dict[str, Callable[[Tensor, int], float]] = {"zk": sum_of_squares, "torch_vector_norm": by_torch}


@pytest.mark.parametrize("system", NORMS)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=("fp32", "bf16"))
def test_norm(dtype: torch.dtype, system: str, benchmark: Any, host_floors: Floors) -> None:
    """The sum of squares of a gradient, which clipping and the search for overflow go by."""
    kind, norm = ("fp32" if dtype == torch.float32 else "bf16"), NORMS[system]
    benchmark.group = f"sum of squares of {NUMEL / 1e6:g}M gradients, {kind}, one thread"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        draws = torch.randn(NUMEL, generator=torch.Generator().manual_seed(0))
        grad = zeros(NUMEL, dtype, CPU).copy_(draws)  # memory as gradients have it in training
        exact = grad.double().square().sum().item()
        error = abs(norm(grad, 1) / exact - 1)
        assert error < (1e-9 if system == "zk" else 2e-2)  # torch adds 50 million squares up in fp32
        case = Case(system, lambda: norm(grad, 1), {"gbps": grad.nbytes / 1e9})
        time_case(benchmark, case, host_floors, 9, CPU)
        benchmark.extra_info["relative_error"] = float(f"{error:.1g}")
    finally:
        torch.set_num_threads(threads)
    nanoseconds = benchmark.stats.stats.median / NUMEL * 1e9
    benchmark.extra_info.update(ns_per_parameter=round(nanoseconds, 3))
