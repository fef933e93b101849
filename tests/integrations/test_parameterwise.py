"""Optimizers of other packages over whole parameters: each trains what it trains in plain torch, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import zk
from tests.parity import PARAMETERWISE, Case, run_case

pytest.importorskip("transformers")
pytest.importorskip("bitsandbytes")
pytestmark = pytest.mark.usefixtures("torch_engine")

CASES = [
    Case(stage=stage, dtype="bf16", optimizer=optimizer, model="sometimes", tier=tier, steps=3)
    for optimizer in ("Adafactor of transformers", "AdamW8bit")
    for stage, tier in ((1, "host"), (3, "nvme"))
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_trains_what_it_trains_in_plain_torch(case: Case) -> None:
    assert run_case(case) == ""


def test_codes_in_8_bits_are_kept_as_they_are_and_go_back_to_bitsandbytes() -> None:
    def made(**options: Any) -> tuple[nn.Linear, Any]:
        torch.manual_seed(0)
        model = nn.Linear(64, 64)
        inner = PARAMETERWISE["AdamW8bit"](model.parameters(), lr=1e-2)
        return model, zk.ZeroOptimizer(model, inner, parameterwise=True, **options) if options else inner

    model, optimizer = made(stage=2, optimizer_tier="host")
    plain, theirs = made()
    for one, by in ((model, optimizer), (plain, theirs)):
        one(torch.ones(2, 64)).square().sum().backward()
        by.step()
    state = optimizer.state[model.weight]
    assert {name: (value.dtype, tuple(value.shape)) for name, value in state.items() if isinstance(value, torch.Tensor) and value.ndim} == {
        "state1": (torch.uint8, (64, 64)),
        "state2": (torch.uint8, (64, 64)),
        "qmap1": (torch.float32, (256,)),
        "qmap2": (torch.float32, (256,)),
        "absmax1": (torch.float32, (16,)),
        "absmax2": (torch.float32, (16,)),
    }
    assert optimizer.metrics()["host_moments_nbytes"] == 2 * (4096 + 1024 + 64) + 2 * 4 * 64  # 2.1 bytes for each of 4,096 elements, and tables
    optimizer.load_state_dict(theirs.state_dict())  # which has codes in a dict of its own
    theirs.load_state_dict(optimizer.state_dict())
    for one, by in ((model, optimizer), (plain, theirs)):
        one(torch.ones(2, 64)).square().sum().backward()
        by.step()
    assert all(torch.equal(mine, other) for mine, other in zip(model.parameters(), plain.parameters(), strict=True))
    optimizer.close()
