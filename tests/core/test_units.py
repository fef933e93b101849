"""Units of the link between memories: what travels together, and when; tensors that autograd saves at stage 3."""

import contextlib
import gc
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

import zk
from tests.models import adamw, batch, gpt, loss_of, train
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


def test_units_that_are_named_are_all_but_the_model() -> None:
    model = gpt()
    with zk.ZeroOptimizer(model, adamw(model), stage=3, units=["blocks.0", "norm"]) as optimizer:
        assert {store.unit.name for store in optimizer._trained} == {"model", "blocks.0", "norm"}


def test_parameters_are_right_after_what_has_ended_while_they_were_pointed_to_others() -> None:
    want = train(model := gpt(), zk.ZeroOptimizer(model, adamw(model)), 3)
    optimizer = zk.ZeroOptimizer(model := gpt(), adamw(model), stage=3)
    store = optimizer._trained[0]
    ends = [store.unit.params[0], *[object()] * (len(store.unit.params) - 1)]  # as Ctrl-C may
    with mock.patch.object(store.unit, "params", ends), pytest.raises(AttributeError):
        store.point(torch.zeros(store.unit.numel))
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


# ---- what autograd saves at stage 3: what is no parameter's is saved as torch saves it, by the user's hooks too ---------------------------
def held(model: nn.Module) -> zk.ZeroOptimizer:
    return zk.ZeroOptimizer(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=3, param_tier="host")


def test_an_output_that_backward_does_not_use_is_freed_and_a_write_to_one_that_it_uses_is_an_error() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    with held(model):
        y = model(torch.randn(2, 8))
        storage = StorageWeakRef(y.untyped_storage())
        del y
        gc.collect()
        assert storage.expired()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            model(torch.randn(2, 8)).mul_(2).sum().backward()


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
