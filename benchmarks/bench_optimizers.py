"""Updates by an optimizer's own step(), over slices, against the same optimizer in plain torch. `make bench`.

Every row starts from bf16 gradients and ends with bf16 parameters, over an fp32 master, casts included; both rows of an optimizer have given
the same bits first.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases.adam import with_casts
from cases.clock import CPU, Case, Work
from conftest import SMALL, Floors, time_case
from torch import Tensor

from zk.offload.rules import StepRule

SIDE = 64 if SMALL else 1024
NUMEL = 20_000 if SMALL else 20_000_000
KINDS: dict[str, tuple[type[torch.optim.Optimizer], int]] = {  # and elements
    "NAdam": (torch.optim.NAdam, NUMEL),
    "RMSprop": (torch.optim.RMSprop, NUMEL),
}


def by_zk(kind: type[torch.optim.Optimizer], param: Tensor, grad: Tensor) -> Work:
    """One chunk of a shard, as a step updates it."""
    inner = kind([torch.zeros(2, requires_grad=True)])  # type: ignore[call-arg]
    rule, group, count = StepRule(inner), inner.param_groups[0], 0
    codec = rule.codec(param.dtype)
    fields = {name: torch.zeros(param.numel(), dtype=dtype) for name, dtype in codec.fields.items()}
    fields["param"] = param
    codec.start(fields, param.float())

    def update() -> None:
        nonlocal count
        count += 1
        rule.update(codec, fields, grad, group, count, 1.0)

    return update


def by_torch(kind: type[torch.optim.Optimizer], param: Tensor, grad: Tensor) -> Work:
    """Plain torch over masters."""
    return with_casts(param, grad, lambda masters: kind(masters))  # type: ignore[call-arg]


@pytest.mark.parametrize("system", ["zk", "torch"])
@pytest.mark.parametrize("name", KINDS)
def test_update(name: str, system: str, benchmark: Any, host_floors: Floors) -> None:
    kind, numel = KINDS[name]
    benchmark.group = f"update by {name}, {numel / 1e6:.3g}M parameters"
    draws = torch.Generator().manual_seed(0)
    start, grad = (torch.randn(SIDE * SIDE, generator=draws).bfloat16() for _ in range(2))
    small = []
    for make in (by_zk, by_torch):
        small.append(start.clone())
        update = make(kind, small[-1], grad)
        for _ in range(3):
            update()
    assert torch.equal(*small), f"{name} of zk and of torch differ"
    param, grads = (torch.randn(numel, generator=draws).bfloat16() for _ in range(2))
    made = (by_zk if system == "zk" else by_torch)(kind, param, grads)
    states = {"NAdam": 2, "RMSprop": 1}[name]
    time_case(benchmark, Case(f"{name}_{system}", made, {"gbps": (2 + 8 * (1 + states) + 2) * numel / 1e9}), host_floors, 5, CPU)
    nanoseconds = benchmark.stats.stats.median / numel * 1e9
    benchmark.extra_info.update(ns_per_parameter=round(nanoseconds, 3), copy_gbps=round(host_floors["copy_gbps"], 1), threads=torch.get_num_threads())
