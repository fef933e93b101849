"""``delay_update=``: the numbers of plain torch with an optimizer whose step() applies the gradients of the step before."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.parity import Case, make_optimizer, run_case_with
from tests.world import run_world
from zk.addons.backward import Backward
from zk.store import UnitStore

pytestmark = pytest.mark.usefixtures("torch_engine", "one_thread")
STEPS = 5
TAKEN: list[UnitStore] = []  # units whose updates were made beside


class Late:
    """An optimizer whose step() number ``delay`` and later keeps its gradients and rates for the next one. The last one applies all."""

    def __init__(self, inner: torch.optim.Optimizer, delay: int) -> None:
        self.inner, self.delay, self.count, self.state_dict = inner, delay, 0, inner.state_dict
        self.pending: list[Any] = []

    def step(self) -> None:
        groups = self.inner.param_groups
        self.pending.append([(group["lr"], [param.grad for param in group["params"]]) for group in groups])
        self.count += 1
        rates = [group["lr"] for group in groups]
        while len(self.pending) > (self.delay < self.count < STEPS):
            for group, (group["lr"], grads) in zip(groups, self.pending.pop(0), strict=True):
                for param, grad in zip(group["params"], grads, strict=True):
                    param.grad = grad
            self.inner.step()
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate


def run(case: Case) -> str:
    """``case.optimizer`` is a name and the delay."""
    plain = lambda name, params: Late(make_optimizer(name.split()[0], params), int(name.split()[1]))  # noqa: E731
    return run_case_with(case, lambda name, params: make_optimizer(name.split()[0], params), plain, delay_update=int(case.optimizer.split()[1]))


GRID = [
    *(Case(stage=stage, dtype=dtype, optimizer="AdamW 2", steps=STEPS) for stage in range(4) for dtype in ("fp32", "bf16")),
    *(Case(stage=stage, dtype="bf16", optimizer="AdamW 1", tier="nvme", accumulation=2, steps=STEPS) for stage in (1, 2, 3)),
    Case(stage=3, dtype="fp16", optimizer="SGD 0", tier="device", no_sync=True, accumulation=2, steps=STEPS),
    Case(stage=2, dtype="bf16", optimizer="NAdam 0", model="sometimes", steps=STEPS),
    Case(stage=3, dtype="bf16", optimizer="Adagrad 1", model="checkpointed", clip=None, steps=STEPS),
]


@pytest.fixture(autouse=True)
def counted(monkeypatch: pytest.MonkeyPatch) -> None:
    TAKEN.clear()
    take = Backward.take
    monkeypatch.setattr(Backward, "take", lambda self, store, *given: (TAKEN.append(store), take(self, store, *given)))


@pytest.mark.parametrize("case", GRID, ids=str)
def test_it_trains_what_a_late_optimizer_of_plain_torch_trains(case: Case) -> None:
    assert run(case) == ""


@pytest.mark.device
@pytest.mark.parametrize("stage", [2, 3])
def test_copies_beside_are_ordered(stage: int) -> None:
    assert run(Case(stage=stage, dtype="bf16", optimizer="AdamW 0", steps=STEPS)) == ""


def test_over_ranks_too() -> None:
    table = run_world(2, run, GRID, timeout=300)
    assert {str(case): rows for case, rows in zip(GRID, table, strict=True) if any(rows)} == {}
