"""Experts that travel alone: the bits of plain torch, and no byte of an expert that nobody uses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zk
from tests.parity import Case, run_case
from tests.world import run_world

pytestmark = pytest.mark.usefixtures("torch_engine")
WIDTH, NUM = 16, 8
EXPERTS = (("experts", True),)
CASES = [
    *(Case(stage=stage, dtype=dtype, model="experts", steps=4, budgets=EXPERTS) for stage in range(4) for dtype in ("fp32", "bf16")),
    Case(stage=3, dtype="fp16", model="experts", tier="nvme", accumulation=3, prefetch=3, steps=4, budgets=EXPERTS),
    Case(stage=3, dtype="bf16", model="experts_checkpointed", tier="nvme", steps=4, budgets=EXPERTS),
    Case(stage=3, dtype="bf16", model="experts", overlap_step=True, steps=4, budgets=EXPERTS),
    Case(stage=2, dtype="bf16", model="experts", tier="nvme", accumulation=2, no_sync=True, steps=4, budgets=EXPERTS),
]


class Block(nn.Module):
    """As Mixtral's: a router, the two best experts of each token, a loop over those that are hit. ``closed`` ones are not."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.closed = nn.Linear(WIDTH, NUM, bias=False), list[int]()
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, 64), nn.SiLU(), nn.Linear(64, WIDTH)) for _ in range(NUM))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x).index_fill(1, torch.tensor(self.closed, dtype=torch.long, device=x.device), float("-inf"))
        weights, chosen = scores.softmax(dim=-1).topk(2, dim=-1)
        out = torch.zeros_like(x)
        for number in chosen.unique().tolist():
            rows, place = (chosen == number).nonzero(as_tuple=True)
            out = out.index_add(0, rows, self.experts[number](x[rows]) * weights[rows, place, None])
        return x + out


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_experts_train_as_in_plain_torch(case: Case) -> None:
    assert run_case(case) == ""


def test_ranks_that_use_different_experts_train_as_plain_torch() -> None:
    cases = [case for case in CASES if case.stage < 3]
    table = run_world(2, run_case, cases, timeout=120)
    assert {str(case): rows for case, rows in zip(cases, table, strict=True) if any(rows)} == {}


@pytest.mark.parametrize("prefetch", [0, 3])
def test_an_expert_that_is_not_used_does_not_move(prefetch: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, moved = Mixture(), set[str]()
    options: dict[str, Any] = {"param_tier": "nvme", "optimizer_tier": "nvme", "nvme_path": tmp_path, "prefetch": prefetch}
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with zk.ZeroOptimizer(model, inner, stage=3, experts=True, **options) as optimizer:
        for store in optimizer._runtime.stores:
            for chunk in (store.param, *store.states, *store.grad.chunks):
                for call, method in ((call, getattr(chunk, call)) for call in ("fetch", "open", "put")):

                    def noted(*given: Any, name: str = store.unit.name, plain: Any = method) -> Any:
                        moved.add(name)
                        return plain(*given)

                    monkeypatch.setattr(chunk, call, noted)
        for step, closed in enumerate(([], [], [0, 1, 2, 3], [4, 5, 6, 7])):  # what was used before is not brought again
            moved.clear()
            for layer in model.layers:
                layer.closed = closed  # type: ignore[assignment]
            model(torch.randn(24, WIDTH, generator=torch.Generator().manual_seed(step))).backward()
            optimizer.step()
            optimizer.zero_grad()
            assert {f"layers.{layer}.experts.{number}" for layer in range(2) for number in range(NUM) if number not in closed} & moved
            assert {f"layers.{layer}.experts.{number}" for layer in range(2) for number in closed} & moved == set()


def refused(_: int) -> str:
    model = Mixture()
    try:
        zk.ZeroOptimizer(model, torch.optim.AdamW(model.parameters()), stage=3, experts=True)
    except ValueError as error:
        return str(error)
    return ""


def test_what_it_cannot_do_is_refused_by_name() -> None:
    assert all("experts=True at stage=3 is for one rank" in said for said in run_world(2, refused, [0], timeout=60)[0])
    model = Mixture()
    with pytest.raises(ValueError, match="experts must be True or False; got 3"):
        zk.ZeroOptimizer(model, torch.optim.AdamW(model.parameters()), experts=3)
