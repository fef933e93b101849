"""Updates by an optimizer's own step(), over slices or whole matrices, against the same optimizer in plain torch. `make bench`.

Every row starts from bf16 gradients and ends with bf16 parameters, over an fp32 master, casts included; both rows of an optimizer have given
the same bits first. Elementwise ones update 20M parameters, Muon 4 matrices of 1024 x 1024, whose products are what takes the time.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases.adam import with_casts
from cases.clock import CPU, Case, Work
from conftest import SMALL, Floors, time_case
from torch import Tensor

from zk.offload.rules import Run, options_of, rule_for

SIDE = 64 if SMALL else 1024
NUMEL = 20_000 if SMALL else 20_000_000
KINDS: dict[str, tuple[type[torch.optim.Optimizer], int]] = {  # and elements
    "NAdam": (torch.optim.NAdam, NUMEL),
    "RMSprop": (torch.optim.RMSprop, NUMEL),
    "Muon": (torch.optim.Muon, 4 * SIDE * SIDE),
}


def by_zk(kind: type[torch.optim.Optimizer], param: Tensor, grad: Tensor) -> Work:
    """Chunks of one shard, as the scheduler updates them; Muon's are matrices."""
    options = kind([torch.zeros(2, 2, requires_grad=True)])  # type: ignore[call-arg]
    rule, group = rule_for(options), options_of(options.param_groups[0])
    states = rule.state_names(group)
    fields: dict[str, Tensor] = {name: torch.zeros(param.numel()) for name in states}
    fields |= {"param": param, "grad": grad, "master": param.float()}
    size, count = (SIDE * SIDE, 0) if rule.is_whole else (param.numel(), 0)
    scalars = None

    def update() -> None:
        nonlocal count, scalars
        for start in range(0, param.numel(), size):
            part = slice(start, start + size)
            run = Run(part, group, count + 1, scalars, (lambda flat: flat.view(SIDE, -1)) if rule.is_whole else None)
            here = {name: field[part] for name, field in fields.items()}
            if rule.is_whole:  # its state has the shape of its matrix
                here |= {name: here[name].view(SIDE, -1) for name in states}
            rule.update(here, here.pop("grad"), run, 1.0, torch.get_num_threads())
        count, scalars = count + 1, rule.scalars(group, scalars)

    return update


def by_torch(kind: type[torch.optim.Optimizer], param: Tensor, grad: Tensor) -> Work:
    """Plain torch over masters."""
    if kind is not torch.optim.Muon:
        return with_casts(param, grad, lambda masters: kind(masters))  # type: ignore[call-arg]
    matrices = [with_casts(p.view(SIDE, -1), g.view(SIDE, -1), kind) for p, g in zip(param.split(SIDE * SIDE), grad.split(SIDE * SIDE), strict=True)]  # type: ignore[arg-type]
    return lambda: [update() for update in matrices] and None


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
    states = {"NAdam": 2, "RMSprop": 1, "Muon": 1}[name]
    time_case(benchmark, Case(f"{name}_{system}", made, {"gbps": (2 + 8 * (1 + states) + 2) * numel / 1e9}), host_floors, 5, CPU)
    nanoseconds = benchmark.stats.stats.median / numel * 1e9
    benchmark.extra_info.update(ns_per_parameter=round(nanoseconds, 3), copy_gbps=round(host_floors["copy_gbps"], 1), threads=torch.get_num_threads())
