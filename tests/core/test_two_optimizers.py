"""Two ZeroOptimizers over two halves of one model, in turns: a generator and a discriminator."""

from __future__ import annotations

import copy
import itertools
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zk
import zk.offload.cpu_adam
from tests.models import DEVICE
from tests.plain import mean_of_ranks
from tests.world import run_world


def half(*widths: int) -> nn.Sequential:
    return nn.Sequential(*(layer for pair in itertools.pairwise(widths) for layer in (nn.Linear(*pair), nn.Tanh())))


class Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator, self.discriminator = half(4, 16, 16, 8), half(8, 16, 16, 1)


def draw(seed: int, width: int) -> Tensor:
    return torch.randn(6, width, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def turns(gan: Gan, seed: int) -> tuple[Tensor, Tensor]:
    """The discriminator's loss, and the generator's, whose forward comes before the first one's step."""
    fake = gan.generator(draw(seed, 4))
    real = gan.discriminator(draw(seed + 50, 8))
    return (gan.discriminator(fake.detach()) - real).mean(), fake


def train_plain(gan: Gan, world: int) -> dict[str, Tensor]:
    halves = gan.discriminator, gan.generator
    inners = [torch.optim.AdamW(half.parameters(), lr=1e-2) for half in halves]
    for step in range(3):
        first, fakes = zip(*(turns(gan, 100 * step + rank) for rank in range(world)), strict=True)
        losses: Any = first, (-gan.discriminator(fake).mean() for fake in fakes)  # these are of the new discriminator
        for half, inner, of_ranks in zip(halves, inners, losses, strict=True):
            grads = [torch.autograd.grad(loss, list(half.parameters()), retain_graph=True) for loss in of_ranks]
            for param, *each in zip(half.parameters(), *grads, strict=True):
                param.grad = mean_of_ranks(each, torch.float32)
            inner.step()
    return gan.state_dict()


def train(stage: int) -> list[str]:
    """What is not as in plain torch, on every rank; a loop as in textbooks."""
    os.environ["ZK_CPU_ADAM"] = "torch"
    zk.offload.cpu_adam.default_engine.cache_clear()
    torch.manual_seed(0)
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    gan = Gan().to(DEVICE)
    wanted = train_plain(copy.deepcopy(gan), world)
    first, second = (
        zk.ZeroOptimizer(half, torch.optim.AdamW(half.parameters(), lr=1e-2), stage=stage)
        for half in (gan.discriminator, gan.generator)
    )
    for step in range(3):
        first.zero_grad()
        loss, fake = turns(gan, 100 * step + rank)
        first.backward(loss)
        first.step()
        first.zero_grad()  # what the generator's loss adds is of the new discriminator
        second.zero_grad()
        second.backward(-gan.discriminator(fake).mean())
        second.step()
    with zk.gather(gan.parameters()):
        wrong = [name for name, value in gan.state_dict().items() if not torch.equal(value, wanted[name])]
    second.close()
    first.close()
    return wrong


def test_quick_alone_and_on_two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZK_CPU_ADAM", "torch")
    assert train(0) == train(2) == []
    assert run_world(2, train, [1, 3], timeout=20) == [[[], []]] * 2


def test_gradients_of_the_other_half_are_refused_before_they_mix() -> None:
    gan = Gan()
    optimizer = zk.ZeroOptimizer(gan.discriminator, torch.optim.AdamW(gan.discriminator.parameters()))
    zk.ZeroOptimizer(gan.generator, torch.optim.AdamW(gan.generator.parameters()))
    loss, fake = turns(gan, 0)
    loss.backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"call zero_grad\(\) after step\(\) and before the next backward"):
        gan.discriminator(fake).mean().backward()
