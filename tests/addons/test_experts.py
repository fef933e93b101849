"""Experts that travel alone: the bits of plain torch, and no byte of an expert that nobody uses. Ranks use different ones."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zk
from tests.addons.common import faults_of_ranks
from tests.models import adamw, descend
from tests.parity import Case, run_case
from tests.world import call, run_world

pytestmark = pytest.mark.usefixtures("torch_engine")
WIDTH, NUM = 16, 8
EXPERTS = (("experts", True),)
CASES = [
    Case(stage=3, dtype="fp16", model="experts", tier="nvme", accumulation=3, prefetch=3, steps=4, budgets=EXPERTS),
    Case(stage=3, dtype="bf16", model="experts_checkpointed", tier="nvme", overlap_step=True, steps=4, budgets=EXPERTS),
    Case(stage=2, dtype="bf16", model="experts", tier="nvme", accumulation=2, no_sync=True, steps=4, budgets=EXPERTS),
    Case(stage=3, model="experts", accumulation=2, no_sync=True, prefetch=0, clip=None, steps=4, budgets=EXPERTS),
    Case(stage=3, dtype="bf16", model="experts_checkpointed_reentrant", accumulation=2, overlap_step="backward", steps=4, budgets=EXPERTS),
]
if torch.cuda.is_available():
    CASES = [Case(stage=3, dtype="bf16", model=f"experts{how}", accumulation=2, steps=2, budgets=EXPERTS) for how in ("", "_checkpointed")]


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


def mixture() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block())


def wrapped(model: nn.Module, **options: Any) -> zk.ZeroOptimizer:
    return zk.ZeroOptimizer(model, adamw(model), stage=3, units=[Block], **options)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_experts_train_as_in_plain_torch(case: Case) -> None:
    assert run_case(case) == ""


@pytest.mark.device
def test_ranks_that_use_different_experts_train_as_plain_torch() -> None:
    assert faults_of_ranks(2 if torch.cuda.is_available() else 3, run_case, [*CASES[:2], *CASES[4:]]) == {}


def test_an_expert_that_is_not_used_does_not_move(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, moved = mixture(), set[str]()
    options: dict[str, Any] = {"param_tier": "nvme", "optimizer_tier": "nvme", "nvme_path": tmp_path, "prefetch": 3}
    with wrapped(model, experts=True, **options) as optimizer:
        for store in optimizer._runtime.stores:
            for chunk in (store.param, *store.states, *store.grad.chunks):
                for call in ("fetch", "open", "put"):
                    plain = getattr(chunk, call)
                    noted = lambda *given, name=store.unit.name, plain=plain: (moved.add(name), plain(*given))[1]  # noqa: E731
                    monkeypatch.setattr(chunk, call, noted)
        for step, closed in enumerate(([], [], [0, 1, 2, 3], [4, 5, 6, 7])):  # what was used before is not brought again
            moved.clear()
            for layer in model:
                layer.closed = closed
            descend(optimizer, model(torch.randn(24, WIDTH, generator=torch.Generator().manual_seed(step))).square().mean())
            assert {f"{layer}.experts.{number}" for layer in range(2) for number in range(NUM) if number not in closed} & moved
            assert {f"{layer}.experts.{number}" for layer in range(2) for number in closed} & moved == set()


def trained(kind: str) -> tuple[list[set[str]], dict[str, int]]:
    """What is gathered in each step, where one of two ranks leaves out what ``closed`` has; and how often, in the last one."""
    model, rank, gathered = mixture(), dist.get_rank(), []
    with wrapped(model, experts=True) as optimizer:
        names, plain = list[str](), optimizer._layout.sharers.all_gather
        optimizer._layout.sharers.all_gather = lambda about, *given: (names.append(about), plain(about, *given))[1]  # type: ignore[method-assign]
        for step, closed in enumerate(([], [0, 1, 2], [4, 5, 6, 7])):
            names.clear()
            for number, layer in enumerate(model):
                layer.closed = [*closed, 3 + rank] if number else closed
            x = torch.randn(24, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))
            if kind == "no grad first":  # as an evaluation, or a part that is frozen
                with torch.no_grad():
                    out = model(x)
                out = out + model(x)
            else:  # a part of each block, and what is around it
                out = checkpoint(model[1], checkpoint(model[0], x, use_reentrant=False), use_reentrant=False)
            (out.square().mean() + out.mean()).backward()
            gathered.append({*names})
            optimizer.step()
            optimizer.zero_grad()
        return gathered, {name: names.count(name) for name in names}


def outside(_: None) -> None:
    model = mixture()
    with wrapped(model, experts=True), pytest.raises(RuntimeError, match=r"'0\.experts\.0' is used outside of its block"):
        model[0].experts[0](torch.ones(2, WIDTH))


def test_over_ranks_an_expert_that_no_rank_uses_is_not_gathered() -> None:
    with pytest.raises(ValueError, match="experts must be True or False; got 3"):
        wrapped(mixture(), experts=3)
    with pytest.raises(ValueError, match="no block has a ModuleList; give units="):
        zk.ZeroOptimizer(experts := mixture()[0].experts, adamw(experts), experts=True)
    kinds = ["no grad first", "checkpointed"]
    *table, said = run_world(2, call, [*((trained, kind) for kind in kinds), (outside, None)], timeout=120)
    assert said == [None, None]
    for kind, ((gathered, counts), (others, _)) in zip(kinds, table, strict=True):
        assert gathered == others  # what one rank uses, all gather
        unused = [set(), {0, 1, 2}, {4, 5, 6, 7}]
        for names, closed in zip(gathered, unused, strict=True):
            used = {int(name.rpartition(".")[2]) for name in names if ".experts." in name}
            assert used == {*range(NUM)} - closed, kind
        assert {counts[f"0.experts.{number}"] for number in range(4)} == {2 + (kind == "no grad first")}, kind
