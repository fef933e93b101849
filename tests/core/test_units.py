"""Units of the link between memories: what travels together, and when; tensors that autograd saves at stage 3."""

from __future__ import annotations

import contextlib
import gc
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import zk
from tests.models import DEVICE, WIDTH, adamw, batch, gpt, loss_of, train
from tests.world import run_world
from zk import unit
from zk.store import UnitStore


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


# ---- what autograd saves at stage 3: what is no parameter's is saved as torch saves it, by the user's hooks too ---------------------------


class Exps(nn.Module):
    """Saves its output; or writes to what was saved."""

    def __init__(self, writes: bool = False) -> None:
        super().__init__()
        self.layers, self.writes = nn.ModuleList(nn.Linear(8, 8) for _ in range(2)), writes

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).exp()
            if self.writes:
                x.mul_(2)
        return x


def held(model: nn.Module) -> zk.ZeroOptimizer:
    return zk.ZeroOptimizer(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=3, param_tier="host")


def test_an_output_that_backward_does_not_use_is_freed() -> None:
    model = Exps()
    optimizer = held(model)
    y = model(torch.randn(2, 8))
    storage = StorageWeakRef(y.untyped_storage())
    del y
    gc.collect()
    assert storage.expired()
    optimizer.close()


@pytest.mark.parametrize("reentrant", (True, False))
def test_quick_all_of_the_model_or_blocks_called_alone_may_be_checkpoints(reentrant: bool) -> None:
    model, x = Exps(), torch.randn(2, 8, requires_grad=True)
    wanted = torch.autograd.grad(model(x).sum(), [*model.parameters()])
    optimizer = held(model)
    for alone in (False, True):
        optimizer.zero_grad()
        y = x
        for layer in model.layers if alone else ():
            y = checkpoint(layer, y, use_reentrant=reentrant).exp()
        (y if alone else checkpoint(model, x, use_reentrant=reentrant)).sum().backward()
        assert all(torch.equal(param.grad + 0, grad) for param, grad in zip(model.parameters(), wanted, strict=True))
    optimizer.close()


def test_a_write_to_what_was_saved_is_an_error_in_backward() -> None:
    model = Exps(writes=True)
    optimizer = held(model)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model(torch.randn(2, 8)).sum().backward()
    optimizer.close()


def test_quick_hooks_of_the_user_get_what_is_no_parameter() -> None:
    packed, grads = list[torch.Size](), []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor.shape)
        return tensor.detach() * 2 if tensor.is_floating_point() else tensor.detach()  # (seen if not undone)

    hooks = saved_tensors_hooks(pack, lambda tensor: tensor / 2 if tensor.is_floating_point() else tensor)
    for around in (contextlib.nullcontext(), hooks):
        model = gpt("checkpointed")
        with held(model):
            with around:
                loss = loss_of(model, batch(0))
            loss.backward()
            grads.append([param.grad + 0 for param in model.parameters() if param.grad is not None])
    assert packed and not any(shape == param.shape for shape in packed for param in model.parameters() if param.ndim > 1)
    assert len(grads[0]) > 4 and all(map(torch.equal, *grads))
