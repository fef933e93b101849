"""Add-ons together: the bits of the same training without those that change none."""

import contextlib
import functools
import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import zk
from tests.addons.common import faults_of_ranks
from tests.addons.test_experts import WIDTH, Mixture
from tests.parity import states_of

pytestmark = pytest.mark.usefixtures("torch_engine")
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
CASES = [  # all pairs of options, with usual passes too where accumulate() stands for them
    ("overlap announce experts accumulate parked 8bit", "host"),
    ("backward announce experts accumulate parked bf16", "nvme"),
    ("overlap announce experts parked bf16", "nvme"),
    ("backward announce experts parked 8bit", "host"),
]


def trained(case: tuple[str, str], uneven: bool = False) -> list[Tensor]:
    """Masters and states after three steps of two micro-batches; ``uneven``: of one more on the second rank."""
    (words, tier), rank = case, dist.get_rank() if dist.is_initialized() else 0
    model, options, dtype = Mixture(), dict[str, Any](), torch.bfloat16 if tier == "nvme" else torch.float32
    for name in words.split():
        options |= OPTIONS[name]
    with tempfile.TemporaryDirectory() as folder:
        options |= {"optimizer_tier": tier, "param_tier": tier, "nvme_path": folder if tier == "nvme" else None}
        inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
        optimizer = zk.ZeroOptimizer(model, inner, stage=3, dtype=dtype, clip_grad_norm=0.5, **options)
        for step in range(3):
            draws = [torch.Generator().manual_seed(100 * step + 10 * micro + rank) for micro in range(2 + uneven * rank)]
            batches = [torch.randn(24, WIDTH, generator=draw).to(dtype) for draw in draws]
            if "accumulate" in words:
                optimizer.accumulate(batches, lambda model, x: model(x) / 2)
            for x in () if "accumulate" in words else batches:
                is_local = dist.is_initialized() and x is batches[0]  # ranks then add up in the order of accumulate()
                with optimizer.no_sync() if is_local else contextlib.nullcontext():
                    optimizer.backward(model(x) / 2)
            optimizer.step()
            optimizer.zero_grad()
            if "parked" in words:
                with optimizer.parked(folder):
                    assert all(bool(param.isnan().all()) for param in model.parameters())
        return states_of(optimizer)


@functools.cache
def wanted(words: str, tier: str, uneven: bool) -> list[Tensor]:
    return trained((words, tier), uneven)


def differs(case: tuple[str, str], uneven: bool = False) -> list[int]:
    want = wanted(" ".join(CHANGES & {*case[0].split()}) + " accumulate" * uneven, case[1], uneven)
    return [number for number, (got, value) in enumerate(zip(trained(case, uneven), want, strict=True)) if not torch.equal(got, value)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_they_train_as_without_them(case: tuple[str, str]) -> None:
    assert differs(case) == []


def of_rank(case: tuple[str, str]) -> list[int]:
    return differs(case, uneven=case[0] == "experts accumulate")


def test_over_ranks_too_and_with_experts_they_may_accumulate_over_other_numbers_of_micro_batches() -> None:
    assert faults_of_ranks(2, of_rank, [CASES[1], CASES[2], ("experts accumulate", "host")]) == {}
