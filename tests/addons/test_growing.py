"""growing=True: what is unfrozen later trains as in plain torch; without it, that is heard; what is refused."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zk
from tests import parity
from tests.addons.common import same
from tests.addons.test_whole import Pair, several
from tests.models import batch, gpt, loss_of, train
from tests.parity import Case, run_case_with
from tests.world import call, run_world
from zk import placement
from zk.offload import drive

pytestmark = pytest.mark.usefixtures("torch_engine")

SETTINGS: list[dict[str, Any]] = [
    {"stage": 0, "dtype": "bf16"},
    {"stage": 1, "tier": "nvme", "accumulation": 2},
    {"stage": 2, "tier": "nvme", "dtype": "fp16", "accumulation": 2, "no_sync": True},
    {"stage": 3, "tier": "nvme", "dtype": "bf16", "overlap_step": True, "accumulation": 2, "clip": None},
    {"stage": 2, "tier": "device", "optimizer": "SGD"},
    {"stage": 3, "tier": "nvme", "params": "device", "adversary": True, "dtype": "fp16"},
    {"stage": 3, "optimizer": "Muon"},
]
CASES = [Case(model="unfreezing", steps=6, **setting) for setting in SETTINGS]
ON_DEVICE = {0, 3, 4}


def forward(model: Any, ids: Tensor, step: int) -> Tensor:
    """Unfreeze parts of units, of which one is frozen again for a step; a whole block; what the model itself uses."""
    for part in {1: [model.blocks[0].qkv, model.blocks[1].up], 3: [model.blocks[1]], 4: [model.tokens]}.get(step, ()):
        part.requires_grad_(True)
    model.blocks[1].up.requires_grad_(step not in (0, 2))
    return loss_of(model, ids)


def run_case(case: Case) -> str:
    with mock.patch.object(parity, "forward", forward):
        make: Any = (lambda _, params: several(params), lambda _, params: Pair(params)) if case.optimizer == "Muon" else (parity.make_optimizer,)
        return run_case_with(case, *make, growing=True)


@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.device] * (n in ON_DEVICE)) for n, case in enumerate(CASES)], ids=str)
def test_what_is_unfrozen_trains_as_in_plain_torch(case: Case) -> None:
    assert run_case(case) == ""


def wrapped(stage: int = 3, **options: Any) -> tuple[Any, Any]:
    model = gpt("unfreezing")
    return model, zk.ZeroOptimizer(model, torch.optim.AdamW(model.parameters()), stage=stage, **{"growing": True} | options)


def values(model: nn.Module) -> list[Tensor]:
    with zk.gather(model.parameters()):
        return [param.detach().clone() for param in model.parameters()]


def test_checkpoints_of_before_and_after(tmp_path: Path) -> None:
    model, optimizer = wrapped()
    train(model, optimizer, 2)
    optimizer.save_checkpoint(tmp_path / "before", async_save=True)
    model.requires_grad_(True)
    torch.inference_mode()(loss_of)(model, batch(0))  # nothing is made in there
    values(model)
    losses = train(model, optimizer, 2, 2)
    optimizer.save_checkpoint(tmp_path / "after")
    optimizer.load_checkpoint(tmp_path / "before")
    assert train(model, optimizer, 2, 2) == losses
    other, anew = wrapped()
    anew.load_checkpoint(tmp_path / "after")
    assert same(values(model), values(other))
    optimizer.close()
    assert not model._forward_pre_hooks and not optimizer._inners[0]._optimizer_step_pre_hooks


def apart(stage: int) -> list[Tensor]:
    """Ranks that unfreeze different things; one that has no forward in the first step after it."""
    model, optimizer = wrapped(stage=stage)
    (model.tokens, model.blocks[1])[dist.get_rank()].requires_grad_(True)
    with pytest.raises(ValueError, match="what is unfrozen must be the same on all ranks"):
        loss_of(model, batch(0))
    model.requires_grad_(True)
    if dist.get_rank() == 0 or stage == 3:
        loss_of(model, batch(1)).backward()
    optimizer.step()
    return values(model)


def test_ranks() -> None:
    *said, second, third = run_world(2, call, [*((run_case, case) for case in CASES[:4]), (apart, 2), (apart, 3)], timeout=120)
    assert said == [["", ""]] * 4
    assert same(*second) and same(*third)


@pytest.mark.parametrize("stage", [2, 3])
def test_what_cannot_be_right_is_an_error(stage: int, tmp_path: Path) -> None:
    model, optimizer = wrapped(stage=stage, optimizer_tier="nvme", nvme_path=tmp_path)
    before, _ = loss_of(model, batch(0)), model.requires_grad_(True)
    with mock.patch.object(placement, "free_memory", lambda *_: {"host": 1 << 40, "nvme": 0}), pytest.raises(MemoryError):
        loss_of(model, batch(1))  # nothing is changed
    with pytest.raises(RuntimeError, match="were updated between") if stage == 3 else nullcontext():
        (before + loss_of(model, batch(1))).backward()
    model, optimizer = wrapped(stage=stage, growing=None)
    model.tokens.requires_grad_(True)
    loss_of(model, batch(0)).backward()
    with pytest.raises(RuntimeError, match=r"'tokens.weight' .* was unfrozen after .* growing=True"):
        optimizer.step()
    model, optimizer = wrapped(stage=stage)
    with mock.patch.object(drive.Tier, "chunks", side_effect=OSError("no room")), pytest.raises(OSError, match="no room"):
        loss_of(model.requires_grad_(True), batch(0))
    with pytest.raises(RuntimeError, match="this ZeroOptimizer is closed"):
        optimizer.step()
    for given in ({"growing": 2}, {"optimizer_tier": "host", "host_budget": "1GiB"}, {"delay_update": 1}):
        with pytest.raises(ValueError, match="growing"):
            wrapped(**given)
