"""What travels together, and when: units of the link between memories."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zk
from tests.models import DEVICE, GPT, WIDTH, batch, loss_of, train
from tests.world import run_world
from zk import unit
from zk.store import UnitStore


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def gpt(variant: str = "plain") -> GPT:
    torch.manual_seed(0)
    return GPT(variant).to(DEVICE)


@pytest.mark.parametrize(("variant", "own"), (("plain", ["tokens", "head"]), ("tied", [])))
def test_what_is_large_outside_of_blocks_is_a_unit_of_its_own_if_it_is_not_shared(variant: str, own: list[str]) -> None:
    want = train(model := gpt(variant), zk.ZeroOptimizer(model, adamw(model), stage=3), 3)
    model = gpt(variant)
    with mock.patch.object(unit, "LARGE", model.tokens.weight.numel()), zk.ZeroOptimizer(model, adamw(model), stage=3) as optimizer:
        names = [store.unit.name for store in optimizer._trained]
        assert sorted(names) == sorted(["blocks.0", "blocks.1", "model", *own])
        assert train(model, optimizer, 3) == want


def test_forward_begins_with_what_step_has_asked_for_and_backward_with_what_forward_has_kept() -> None:
    model, seen, begin = gpt(), list[Any](), UnitStore.begin_gather
    with mock.patch.object(UnitStore, "begin_gather", lambda store: seen.append(store.unit.name) or begin(store)):
        optimizer = zk.ZeroOptimizer(model, adamw(model), stage=3)
        train(model, optimizer, 3)
        seen.append("forward")
        loss = loss_of(model, batch(3))
        seen.append("backward")
        loss.backward()
        seen.append("step")
        optimizer.step()
    # forward and backward begin with the model's own unit
    assert seen[-9:] == ["model", "forward", "blocks.0", "blocks.1", "backward", "blocks.1", "blocks.0", "step", "model"]


def test_what_was_asked_for_is_new_whatever_is_written_before_it_is_used() -> None:
    losses = []
    for is_asked in (1, 0):
        model = gpt()
        with zk.ZeroOptimizer(model, adamw(model), stage=3, prefetch=is_asked) as optimizer:
            train(model, optimizer, 3)
            with zk.gather(model.parameters(), kind="master", write=True) as masters:
                for master in masters:
                    master.mul_(0.5)
            losses.append(loss_of(model, batch(3)).item())
            loss_of(model, batch(4)).item()  # a forward without a backward keeps a unit
            optimizer.load_state_dict(optimizer.state_dict())
            losses[-1] = (losses[-1], *train(model, optimizer, 2, start=4))
    assert losses[0] == losses[1]


def test_a_write_between_forward_and_backward_is_refused_for_what_is_kept_too() -> None:
    model = gpt()
    optimizer = zk.ZeroOptimizer(model, adamw(model), stage=3)
    train(model, optimizer, 2)
    loss = loss_of(model, batch(2))
    with torch.no_grad():
        model.norm.weight.mul_(2.0)
    loss.backward()
    with pytest.raises(RuntimeError, match=r"'norm\.weight' was changed, and at stage 3 that"):
        optimizer.step()


def looked_at(is_alone: bool) -> list[float]:
    """Losses of training in which the first rank, or none, uses a block by itself before each step."""
    model, losses = gpt(), list[float]()
    optimizer = zk.ZeroOptimizer(model, adamw(model), stage=3)
    for seed in range(4):
        loss = loss_of(model, batch(seed))
        loss.backward()
        with zk.gather(model.parameters()), torch.no_grad():
            if is_alone and dist.get_rank() == 0:
                model.blocks[1](torch.ones(2, 3, WIDTH, device=DEVICE))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_all_ranks_ask_for_the_same_unit_after_one_of_them_has_used_another_one_that_is_held() -> None:
    want, got = run_world(2, looked_at, (False, True))
    assert got == want
    assert isinstance(want[0], list)
