"""A minute's smoke of the new core: one case of each kind."""

from __future__ import annotations

import pytest
import torch

import zk
from tests.models import GPT, batch, loss_of
from tests.parity import Case, run_case
from zk.store import UnitStore

CASES = [
    Case(stage=0, dtype="bf16", steps=3),
    Case(stage=1, dtype="fp16", accumulation=2, steps=2),
    Case(stage=2, model="tied", steps=3),
    Case(stage=3, dtype="bf16", model="checkpointed", steps=3),
    Case(stage=3, dtype="fp32", tier="nvme", optimizer="SGD", steps=2),
    Case(stage=3, dtype="bf16", overlap_step=True, steps=3),
]


@pytest.mark.usefixtures("torch_engine")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_quick_parity_with_plain_torch(case: Case) -> None:
    assert run_case(case) == ""


class Reductions(zk.Addon):
    def __init__(self) -> None:
        self.names: list[str] = []

    def reduced(self, store: UnitStore) -> None:
        self.names.append(store.unit.name)


def test_quick_a_backward_pass_reduces_each_unit_once() -> None:
    model, seen = GPT(), Reductions()
    optimizer = zk.ZeroOptimizer(model, torch.optim.AdamW(model.parameters()), stage=2, addons=[seen])
    for step in range(3):
        loss_of(model, batch(step)).backward()
        assert sorted(seen.names) == ["blocks.0", "blocks.1", "model"]
        seen.names.clear()
        optimizer.step()
        optimizer.zero_grad()


def test_quick_methods_of_a_gradient_that_has_left_are_torchs() -> None:
    model = GPT()
    optimizer = zk.ZeroOptimizer(model, torch.optim.AdamW(model.parameters()), stage=2)
    loss_of(model, batch(0)).backward()
    grad = model.head.weight.grad
    whole = grad.clone()
    assert type(whole) is torch.Tensor and whole.any()
    assert torch.equal(grad.norm(1), whole.norm(1)) and torch.allclose(grad.norm(2), whole.norm(2))
    assert torch.equal(grad.norm(p=2, dim=0), whole.norm(p=2, dim=0)) and float(grad.abs().max()) == float(whole.abs().max())
    optimizer.close()
