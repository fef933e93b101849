"""Muon, alone and beside AdamW: the bits of plain torch, however parameters are cut over chunks, tiers and ranks."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import zk
from tests.models import GPT, batch, loss_of, train
from tests.parity import Case, make_optimizer, run_case_with
from tests.world import run_world
from zk import store

pytestmark = pytest.mark.usefixtures("torch_engine", "one_thread")


class Pair(torch.optim.Optimizer):
    """Muon for matrices and AdamW for the rest, as plain training sees one optimizer."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        self.parts = several(params)
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step()

    def state_dict(self) -> dict[str, Any]:
        states = [part.state.get(param, {}) for part in self.parts for group in part.param_groups for param in group["params"]]
        return {"state": {number: state for number, state in enumerate(states) if state}}


def several(params: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
    matrices, others = [p for p in params if p.ndim == 2], [p for p in params if p.ndim != 2]
    first = torch.optim.Muon([{"params": matrices[:3]}, {"params": matrices[3:], "weight_decay": 0.0, "nesterov": False}], lr=2e-2)
    return [first, torch.optim.AdamW(others, lr=1e-2, betas=(0.9, 0.95))]


def run(case: Case) -> str:
    return run_case_with(case, lambda name, params: several(params), lambda name, params: Pair(params))


GRID = [
    Case(stage=stage, dtype=dtype, tier=tier, optimizer="Muon", steps=3)
    for stage, (dtype, tier) in itertools.product(range(4), (("bf16", "host"), ("fp32", "nvme"), ("fp16", "device")))
]
OTHERS = [
    Case(stage=2, dtype="bf16", optimizer="Muon", model="sometimes", accumulation=2, steps=4),
    Case(stage=3, dtype="bf16", optimizer="Muon", model="frozen", tier="nvme", adversary=True, steps=3),
    Case(stage=3, dtype="bf16", optimizer="Muon", model="tied", no_sync=True, accumulation=2, clip=None, steps=3),
    Case(stage=2, dtype="bf16", optimizer="Muon", clip=50.0, overlap_step="backward", steps=4),  # type: ignore[arg-type]
    Case(stage=3, dtype="bf16", optimizer="Muon", clip=50.0, overlap_step="backward", tier="nvme", steps=4),  # type: ignore[arg-type]
]


@pytest.mark.parametrize("case", [*GRID, *OTHERS], ids=str)
def test_muon_trains_what_plain_torch_trains(case: Case) -> None:
    assert run(case) == ""


ON_DEVICES = [
    Case(stage=stage, dtype="bf16", tier=tier, optimizer="Muon", model=model, accumulation=2, steps=2)
    for tier in ("device", "host")
    for stage, model in ((3, "plain"), (2, "sometimes"))
]


@pytest.mark.device
@pytest.mark.parametrize("case", ON_DEVICES, ids=str)
def test_muon_where_copies_run_late(case: Case) -> None:
    assert run(case) == ""


@pytest.mark.device
def test_muon_over_ranks_trains_what_plain_torch_trains() -> None:
    cases = ON_DEVICES if torch.cuda.is_available() else [*GRID[1:], *OTHERS]
    table = run_world(2, run, cases, timeout=300)
    assert {str(case): rows for case, rows in zip(cases, table, strict=True) if any(rows)} == {}


def wrapped(variant: str = "sometimes", **options: Any) -> tuple[nn.Module, list[Any], zk.ZeroOptimizer]:
    """One with a weight that lies in memory as its transpose does, which is cut over chunks and ranks."""
    torch.manual_seed(0)
    model = GPT(variant).bfloat16() if variant == "sometimes" else GPT(variant)
    model.head.weight.data = model.head.weight.data.t().contiguous().t()
    inners = several(list(model.parameters()))
    with mock.patch.object(store, "CHUNK_NUMEL", 1000):
        return model, inners, zk.ZeroOptimizer(model, inners, **options)


def test_states_go_to_plain_torch_and_to_checkpoints_and_back(tmp_path: Path) -> None:
    model, _, optimizer = wrapped()
    train(model, optimizer, 2)
    optimizer.save_checkpoint(tmp_path / "saved", async_save=True)
    states = copy.deepcopy(optimizer.state_dict())
    plain = several([nn.Parameter(torch.zeros_like(param, dtype=torch.float32)) for param in model.parameters()])
    assert [len(group["params"]) for group in states["param_groups"]] == [len(group["params"]) for one in plain for group in one.param_groups]
    assert all(states["state"][n]["momentum_buffer"].shape == p.shape for n, p in enumerate(plain[0].param_groups[0]["params"]))
    want = train(model, optimizer, 2, start=2)
    optimizer.close()
    for way in ("a checkpoint", "state_dict"):
        other, _, again = wrapped(stage=3, param_tier="host", optimizer_tier="nvme", nvme_path=tmp_path)
        if way == "a checkpoint":
            again.load_checkpoint(tmp_path / "saved")
        else:  # masters come along
            again.load_state_dict(states)
        assert train(other, again, 2, start=2) == want, way
        again.close()


@pytest.mark.parametrize("stage", [1, 3])
def test_a_weight_in_another_order_is_updated_in_its_own(stage: int) -> None:
    model, _, optimizer = wrapped("plain", stage=stage, units=["blocks"])
    torch.manual_seed(0)
    plain = GPT()
    plain.head.weight.data = plain.head.weight.data.t().contiguous().t()
    theirs = Pair(list(plain.parameters()))
    with optimizer:
        for number in range(3):
            train(model, optimizer, start=number)
            loss_of(plain, batch(number)).backward()
            theirs.step()
            plain.zero_grad()
    assert all(torch.equal(got, want) for got, want in zip(model.parameters(), plain.parameters(), strict=True))


def test_an_error_half_way_is_heard() -> None:
    model, inners, optimizer = wrapped(stage=2)
    train(model, optimizer)
    saved = optimizer.state_dict()
    inners[0].param_groups[1]["ns_steps"] = 100  # which torch refuses in step()
    with pytest.raises(ValueError, match="less than 100"):
        train(model, optimizer)
    with pytest.raises(RuntimeError, match=r"a step failed half-way \(ValueError"):
        train(model, optimizer)
    inners[0].param_groups[1]["ns_steps"] = 5
    optimizer.load_state_dict(saved)
    train(model, optimizer)


@pytest.mark.parametrize("options", [{"overlap_step": True, "stage": 3}, {"state_dtype": "bf16"}])
def test_what_updates_slices_is_refused(options: dict[str, Any]) -> None:
    model = GPT()
    places = [param.data_ptr() for param in model.parameters()]
    for inner in (several(list(model.parameters())), make_optimizer("Lion", list(model.parameters()))):
        with pytest.raises(ValueError, match=r"overlap_step=True updates beside.*use overlap_step='backward'|state_dtype= is for Adam"):
            zk.ZeroOptimizer(model, inner, **options, **({} if isinstance(inner, list) else {"parameterwise": True}))
    assert places == [param.data_ptr() for param in model.parameters()]
