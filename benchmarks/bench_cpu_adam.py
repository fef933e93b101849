"""The CPU update of 50M parameters, bf16 gradient in and bf16 parameter out, against what else is there. `make bench`.

Every row does the whole job: it starts from bf16 gradients and ends with bf16 parameters, casts included. ``fraction_of_copy`` is the
time that moving the fewest possible bytes would take at the copy bandwidth of the same run, over the time taken; it can pass 1, as a copy
writes memory that it has not read. DeepSpeed's row appears where DeepSpeed is installed (`make bench-peers` installs it).
"""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from torch import Tensor

from zk.bench.adam import FP32_STATE, OPTIONS, Make, check, with_casts
from zk.bench.adam import SYSTEMS as OWN
from zk.bench.clock import Work

NUMEL = 50_000_000


def deepspeed(param: Tensor, grad: Tensor) -> Work:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return with_casts(param, grad, lambda masters: DeepSpeedCPUAdam(masters, adamw_mode=True, fp32_optimizer_states=True, **OPTIONS))


SYSTEMS: dict[str, tuple[int, Make]] = {**OWN, "deepspeed_cpu_adam": (FP32_STATE, deepspeed)}


@pytest.mark.parametrize("system", SYSTEMS)
def test_cpu_adam(system: str, benchmark: Any, copy_gbps: float) -> None:
    nbytes, make = SYSTEMS[system]
    if system.startswith("deepspeed") and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed")
    check(make, loose="bf16_moments" in system)
    torch.manual_seed(0)
    update = make(torch.randn(NUMEL).bfloat16(), torch.randn(NUMEL).bfloat16())
    benchmark.pedantic(update, rounds=3 if system in ("torch_foreach", "zk_torch_engine") else 15, warmup_rounds=2)
    seconds = benchmark.stats.stats.median
    benchmark.extra_info.update(
        ns_per_parameter=round(seconds / NUMEL * 1e9, 3),
        gbps=round(nbytes * NUMEL / seconds / 1e9, 1),
        fraction_of_copy=round(nbytes * NUMEL / (copy_gbps * 1e9) / seconds, 2),
        copy_gbps=round(copy_gbps, 1),
        threads=torch.get_num_threads(),
    )
