"""Activations that leave a device: bit for bit, in every order, also at stage 3; nothing of them stays behind."""

import contextlib
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import zk
from tests.models import DEVICE, adamw, batch, gpt, loss_of

KiB = 1024
on_a_device = pytest.mark.device_only


def trained(model: nn.Module, around: Any = contextlib.nullcontext(), stage: int | None = None, inside: bool = False) -> list[Tensor]:  # noqa: B008
    """Losses and parameters of two steps, in plain torch or at a stage, the backward outside the context or inside."""
    optimizer: Any = adamw(model)
    optimizer = optimizer if stage is None else zk.ZeroOptimizer(model, optimizer, stage=stage, optimizer_tier="host")
    found = []
    for step in range(2):
        with around:
            loss = loss_of(model, batch(step))
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach().clone())
    with zk.gather(model.parameters()) if stage is not None else contextlib.nullcontext():
        return found + [param.detach().clone() for param in model.parameters()]


def same(found: list[Tensor], wanted: list[Tensor]) -> bool:
    return len(found) == len(wanted) > 1 and all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def chain(x: Tensor, weights: list[Tensor]) -> list[Tensor]:
    """Each layer saves its input and its output."""
    outputs = [x]
    for weight in weights:
        outputs.append((outputs[-1] @ weight).tanh())
    return outputs


def weights_of(count: int) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter((torch.randn(16, 16, generator=generator) / 4).to(DEVICE)) for _ in range(count)]


class Saves(torch.autograd.Function):
    """Saves tensors; its backward shows what came back."""

    @staticmethod
    def forward(ctx, x, found, *tensors):  # type: ignore[no-untyped-def]
        ctx.found = found
        ctx.save_for_backward(*tensors)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        ctx.found += ctx.saved_tensors
        return grad, None, *[None] * len(ctx.saved_tensors)


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
    for options, error, message in (
        ({"min_nbytes": -1}, ValueError, "min_nbytes must be a number of bytes above 0.*got -1"),
        ({"min_nbytes": 1.5}, TypeError, "min_nbytes must be a number of bytes"),
        ({"keep_last": "many"}, ValueError, "keep_last must be a number of bytes above 0, or a string"),
        ({"device": "nowhere"}, ValueError, "device must be 'cpu', 'cuda' or 'cuda:N'; got 'nowhere'"),
    ):
        with pytest.raises(error, match=message):
            zk.offload_activations(**options)  # type: ignore[arg-type]


VARIANTS = (
    *((None, 0, "checkpointed_reentrant"), (None, 1 << 30, "plain"), (None, 2 * KiB, "elsewhere")),
    *((2, 4 * KiB, "plain"), (3, 4 * KiB, "checkpointed")),
)


@on_a_device
@pytest.mark.parametrize(("stage", "keep_last", "variant"), VARIANTS)
def test_losses_and_parameters_are_those_without(stage: int | None, keep_last: int, variant: str) -> None:
    offload = small(keep_last=keep_last, min_nbytes=64 if stage is None else 512)
    wanted, found = (trained(gpt(variant), around, stage, variant.endswith("reentrant")) for around in (contextlib.nullcontext(), offload))
    assert same(found, wanted) and nothing_left(offload)
    assert (offload.num_offloaded == 0) == (keep_last == 1 << 30)
    assert stage is not None or offload.num_uploaded <= 1.7 * offload.num_offloaded, "few come back in vain"


def in_other_orders(around: Any) -> list[Tensor]:
    """Gradients of a graph of 12 layers by parts, of a gradient, and of another graph after it."""
    weights, x = weights_of(12), torch.linspace(-1, 1, 128, device=DEVICE).view(8, 16)
    with around:
        parts, first, last = (chain(x + number, list(weights)) for number in range(3))
        found = list(torch.autograd.grad(first[-1].square().sum(), weights, create_graph=True))
        penalty = torch.stack([grad.square().sum() for grad in found]).sum()
    found += torch.autograd.grad(parts[6].sum(), weights[2:5], retain_graph=True)
    found += torch.autograd.grad(parts[9].sum(), [parts[6], weights[8]], retain_graph=True)
    (penalty + last[-1].sum()).backward()
    parts[-1].sum().backward()
    return found + [weight.grad for weight in weights if weight.grad is not None]


@on_a_device
def test_other_orders_of_backward_are_right() -> None:
    offload = small(keep_last=2 * KiB)
    assert same(in_other_orders(offload), in_other_orders(contextlib.nullcontext())) and offload.num_offloaded > 20 and nothing_left(offload)


@on_a_device
def test_what_comes_back_is_what_was_saved_to_the_bit() -> None:
    with DEVICE:
        found, one = list[Tensor](), torch.ones(1, requires_grad=True)
        x, bits = torch.randn(12, 10), torch.randint(0, 255, (1000,), dtype=torch.uint8)
        tensors = [
            x, x.t(), x[3:], x[:, 2:7], torch.randn(1, 40).expand(30, 40), torch.randn(6, 5, 4).permute(2, 0, 1), x.view(torch.int32),
            torch.randn(50).bool(), torch.arange(77), torch.randn(9, 9, dtype=torch.complex64), torch.randn(99, dtype=torch.bfloat16)[1:],
            bits.view(torch.float8_e4m3fn), torch.randn(3, 2, 5, 5).to(memory_format=torch.channels_last),
            torch.randn(60).as_strided((4, 9), (7, 2), 3),
        ]  # fmt: skip
    copies = [tensor.clone(memory_format=torch.preserve_format) for tensor in tensors]
    wanted = [(tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()) for tensor in tensors]
    with small(min_nbytes=1, keep_last=0) as offload:
        y = Saves.apply(one, found, *tensors)
    del tensors, x, bits
    y.backward()
    assert [(tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()) for tensor in found] == wanted
    for tensor, saved in zip(found, copies, strict=True):
        assert torch.equal(tensor.contiguous().view(torch.uint8), saved.contiguous().view(torch.uint8))
    del found, tensor, y
    assert nothing_left(offload)


@on_a_device
def test_parameters_and_what_had_better_stay_are_left_alone() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16)).to(DEVICE)
    (linear, norm), large = model, torch.randn(100, 100, device=DEVICE)
    leaf, frozen = torch.randn(16, 16, device=DEVICE, requires_grad=True), nn.Parameter(torch.randn(16, 16, device=DEVICE), requires_grad=False)
    one = torch.ones(1, requires_grad=True, device=DEVICE)
    stays = [
        leaf, leaf.t(), linear.weight, linear.weight.t(), linear.weight.detach(), norm.running_mean, frozen, frozen.t(), large[:20],
        torch.randn(16, 16), torch.randn(4, device=DEVICE), torch.empty(0, device=DEVICE), torch.randn(16, 16, device="meta"),
        torch.randn(16, 16, dtype=torch.complex64, device=DEVICE).conj(), torch.randn(16, 16, device=DEVICE).as_subclass(type("Own", (Tensor,), {})),
    ]  # fmt: skip
    for tensor in stays:
        found: list[Tensor] = []
        with small(model=model, keep_last=0) as offload:
            Saves.apply(one, found, tensor).backward()
        assert not offload.num_offloaded and found[0].shape == tensor.shape
    with small(keep_last=0) as offload:
        y = Saves.apply(one, [], large[:20], large[:50], large[:20])
    assert offload.num_offloaded == 1, "a small view goes along with a storage that moves anyway"
    del y


@on_a_device
@pytest.mark.parametrize(("keep_last", "min_nbytes"), [pytest.param(0, 64, marks=pytest.mark.races), (1 << 20, 64)], ids=("moved", "newest"))
def test_writing_to_a_saved_tensor_is_an_error_in_backward(keep_last: int, min_nbytes: int) -> None:
    with small(min_nbytes=min_nbytes, keep_last=keep_last):
        x = torch.randn(16, 16, device=DEVICE, requires_grad=True)
        y = x * 1
        z = y * y
        y.add_(1)  # what is copied meanwhile does not matter
        with pytest.raises(RuntimeError, match=r"modified by an inplace operation \(it was of version 0, now 1\)"):
            z.sum().backward()
        y = x * 1
        y.relu_()  # saves what it wrote
        y.detach().view(-1).mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


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
