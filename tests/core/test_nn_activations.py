"""Activations that leave a device: bit for bit, in every order, also at stage 3; nothing of them stays behind."""

from __future__ import annotations

import contextlib
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import zk
from tests import softgpu
from tests.models import DEVICE, batch, loss_of
from tests.test_activations import KiB, Saves, chain, in_order, losses_and_grads, make, same, shapes_that_go_wrong, weights_of

on_a_device = pytest.mark.skipif(not softgpu.installed(), reason="for the software GPU (pytest -p tests.softgpu.plugin)")


def small(**options: Any) -> Any:
    """Everything of more than a few bytes moves."""
    return zk.offload_activations(**{"min_nbytes": 64, "keep_last": 4 * KiB, **options})


def nothing_left(offload: Any) -> bool:
    gc.collect()
    return not any(block() for block in offload.saved)


def test_quick_where_device_memory_is_host_memory_it_does_nothing() -> None:
    layer, x = nn.Linear(64, 64), torch.randn(64, 64)
    with zk.offload_activations(layer, min_nbytes=0, keep_last=0, device="cpu") as offload:
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        layer(x).sum().backward()
    assert offload.num_offloaded == 0 and layer.weight.grad is not None
    with pytest.raises(ValueError, match="keep_last"):
        zk.offload_activations(keep_last="many")


@on_a_device
@pytest.mark.parametrize("variant", ("plain", "elsewhere", "checkpointed", "checkpointed_reentrant"))
@pytest.mark.parametrize("keep_last", (0, 2 * KiB, 1 << 30))
def test_losses_and_gradients_are_those_without(variant: str, keep_last: int) -> None:
    wanted = losses_and_grads(make(variant), None)
    offload = small(keep_last=keep_last)
    assert same(losses_and_grads(make(variant), offload, inside=variant.endswith("reentrant")), wanted)
    assert (offload.num_offloaded == 0) == (keep_last == 1 << 30) and nothing_left(offload)
    assert offload.num_uploaded <= 1.5 * offload.num_offloaded, "few come back in vain"


@on_a_device
@pytest.mark.parametrize("order", ("first graph first", "together", "retained", "parts", "twice"))
def test_other_orders_of_backward_are_right(order: str) -> None:
    wanted = in_order(order, None)
    offload = small(keep_last=2 * KiB)
    assert same(in_order(order, offload), wanted) and offload.num_offloaded > 20 and nothing_left(offload)


@on_a_device
def test_what_comes_back_is_what_was_saved_to_the_bit() -> None:
    with DEVICE:
        tensors, found, one = shapes_that_go_wrong(), list[Tensor](), torch.ones(1, requires_grad=True)
    copies = [tensor.clone(memory_format=torch.preserve_format) for tensor in tensors]
    wanted = [(tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()) for tensor in tensors]
    with small(min_nbytes=1, keep_last=0) as offload:
        y = Saves.apply(one, found, *tensors)
    del tensors
    y.backward()
    assert [(tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()) for tensor in found] == wanted
    for tensor, saved in zip(found, copies, strict=True):
        assert torch.equal(tensor.contiguous().view(torch.uint8), saved.contiguous().view(torch.uint8))
    del found, tensor, y
    assert nothing_left(offload)


@on_a_device
def test_parameters_stay_and_writes_to_what_was_saved_are_errors() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16)).to(DEVICE)
    leaf, large = torch.randn(16, 16, device=DEVICE, requires_grad=True), torch.randn(100, 100, device=DEVICE)
    one = torch.ones(1, requires_grad=True, device=DEVICE)
    linear, norm = model
    for tensor in (leaf, leaf.t(), linear.weight.t(), linear.weight.detach(), norm.running_mean, large[:20], torch.randn(16, 16)):
        found: list[Tensor] = []
        with small(model=model, keep_last=0) as offload:
            Saves.apply(one, found, tensor).backward()
        assert not offload.num_offloaded and found[0].shape == tensor.shape
    with small(keep_last=1 << 20):
        y = large.detach().requires_grad_().exp()
        end = y.sum()
        y.detach().add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        end.backward()


@on_a_device
def test_a_graph_that_is_dropped_gives_everything_back_and_the_device_has_the_window_alone() -> None:
    offload = small(min_nbytes=512)
    for used in (False, True):
        with offload:
            outputs = chain(torch.randn(16, 16, device=DEVICE), list(weights_of(20)))
            y = outputs[-1].exp().softmax(-1)  # both save what they return
        if used:  # uploads are in flight when the rest is dropped
            torch.autograd.grad(outputs[5].sum(), outputs[3], retain_graph=True)
        on_device = [ref().device is not None for ref in offload.saved if ref()]
        assert sum(on_device) * KiB <= 4 * KiB + used * 9 * KiB
        storage = StorageWeakRef(y.untyped_storage())
        del y, outputs
        assert nothing_left(offload) and storage.expired()
    gone = weakref.ref(offload)
    del offload
    gc.collect()
    assert gone() is None


class Inside(nn.Module):
    """Enters the context within its forward."""

    def __init__(self, model: nn.Module, offload: Any) -> None:
        super().__init__()
        self.model, self.offload = model, offload

    def forward(self, ids: Tensor) -> Tensor:
        with self.offload:
            logits: Tensor = self.model(ids)
        return logits


def trained(model: nn.Module, around: Any, options: dict[str, Any]) -> list[Tensor]:
    optimizer = zk.ZeroOptimizer(model, torch.optim.AdamW(model.parameters(), lr=1e-2), **options)
    found = []
    for step in range(3):
        with around:
            loss = loss_of(model, batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach().clone())
    with zk.gather(model.parameters()):
        found += [param.detach().clone() for param in model.parameters()]
    optimizer.close()
    return found


@on_a_device
@pytest.mark.parametrize("variant", ("plain", "elsewhere", "checkpointed"))
@pytest.mark.parametrize("options", ({"stage": 2, "optimizer_tier": "host"}, {"stage": 3, "param_tier": "host", "optimizer_tier": "host"}), ids=str)
def test_training_with_zero_is_the_same(options: dict[str, Any], variant: str) -> None:
    wanted = trained(make(variant), contextlib.nullcontext(), options)
    offload, inside = small(min_nbytes=512), small(min_nbytes=512)
    assert same(trained(make(variant), offload, options), wanted) and offload.num_offloaded and nothing_left(offload)
    assert same(trained(Inside(make(variant), inside), contextlib.nullcontext(), options), wanted)
    assert inside.num_offloaded and nothing_left(inside)
