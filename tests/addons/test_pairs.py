"""Add-ons in pairs: the bits of the same training without those that change none, or a refusal that names both."""

from __future__ import annotations

import contextlib
import functools
import itertools
import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import zk
from tests.addons.test_experts import WIDTH, Mixture
from tests.parity import states_of
from tests.world import run_world

pytestmark = pytest.mark.usefixtures("torch_engine", "one_thread")
OPTIONS: dict[str, dict[str, Any]] = {
    "overlap": {"overlap_step": True},
    "backward": {"overlap_step": "backward"},
    "announce": {"announce": True},
    "experts": {"experts": True},
    "accumulate": {},  # instead of two backward passes
    "parked": {},  # between steps
    "8bit": {"state_dtype": "8bit"},
    "bf16": {"state_dtype": "bf16"},
}
CHANGES = {"8bit", "bf16"}  # what is computed
ONE_OPTION = ({"overlap", "backward"}, {"8bit", "bf16"})
PAIRS = [pair for pair in itertools.combinations(OPTIONS, 2) if set(pair) not in ONE_OPTION]


def trained(case: tuple[set[str], int, str]) -> list[Tensor]:
    """Masters and states after three steps of two micro-batches."""
    names, stage, tier = case
    torch.manual_seed(0)
    model, options, dtype = Mixture(), dict[str, Any](), torch.bfloat16 if tier == "nvme" else torch.float32
    for name in names:
        options |= OPTIONS[name]
    rank = dist.get_rank() if dist.is_initialized() else 0
    with tempfile.TemporaryDirectory() as folder:
        options |= {"optimizer_tier": tier, "param_tier": tier if stage == 3 else "device", "nvme_path": folder if tier == "nvme" else None}
        inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
        optimizer = zk.ZeroOptimizer(model, inner, stage=stage, dtype=dtype, clip_grad_norm=0.5, **options)
        for step in range(3):
            draws = [torch.Generator().manual_seed(100 * step + 10 * micro + rank) for micro in range(2)]
            batches = [torch.randn(24, WIDTH, generator=draw).to(dtype) for draw in draws]
            if "accumulate" in names:
                optimizer.accumulate(batches, lambda model, x: model(x) / 2)
            for x in () if "accumulate" in names else batches:
                is_local = dist.is_initialized() and x is batches[0]  # ranks then add up in the order of accumulate()
                with optimizer.no_sync() if is_local else contextlib.nullcontext():
                    optimizer.backward(model(x) / 2)
            optimizer.step()
            optimizer.zero_grad()
            if "parked" in names:
                with optimizer.parked(folder):
                    assert all(bool(param.isnan().all()) for param in model.parameters())
        return states_of(optimizer)


@functools.cache
def wanted(changes: frozenset[str], stage: int, tier: str) -> list[Tensor]:
    return trained(({*changes}, stage, tier))


def differs(case: tuple[set[str], int, str]) -> list[int]:
    names, stage, tier = case
    pairs = zip(trained(case), wanted(frozenset(names & CHANGES), stage, tier), strict=True)
    return [number for number, (got, want) in enumerate(pairs) if not torch.equal(got, want)]


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_pairs_train_as_without_them(pair: tuple[str, str]) -> None:
    """Each add-on on either tier, with one or another."""
    assert differs(({*pair}, 3, ("host", "nvme")[sum(map([*OPTIONS].index, pair)) % 2])) == []


def test_pairs_over_ranks() -> None:
    """Of those that talk, or wait for others."""
    cases = [({*pair}, 3, "host") for pair in PAIRS if {"announce", "parked", "experts"} & {*pair} and "bf16" not in pair]
    table = run_world(2, differs, cases)
    assert {str(case): rows for case, rows in zip(cases, table, strict=True) if any(rows)} == {}


def uneven(options: dict[str, Any]) -> list[Tensor]:
    """A rank has one micro-batch more than the other."""
    torch.manual_seed(0)
    model = Mixture()
    optimizer = zk.ZeroOptimizer(model, torch.optim.AdamW(model.parameters(), lr=1e-2), stage=3, **options)
    torch.manual_seed(dist.get_rank())
    for _ in range(2):
        optimizer.accumulate([torch.randn(24, WIDTH) for _ in range(2 + dist.get_rank())], lambda model, x: model(x) / 3)
        optimizer.step()
        optimizer.zero_grad()
    return states_of(optimizer)


def test_ranks_with_experts_may_accumulate_over_other_numbers_of_micro_batches() -> None:
    plain, experts = run_world(2, uneven, [{}, {"experts": True}], timeout=60)
    for pair in zip(plain, experts, strict=True):
        assert all(map(torch.equal, *pair))
