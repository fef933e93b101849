"""Buffers that forward writes, over ranks: as DDP has them after a step."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zk
from tests.world import run_world


class Codebook(nn.Module):
    """BatchNorm, an average that forward replaces, a buffer whose size differs by rank, and one that is never written."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        for name in ("mean", "seen", "table"):
            self.register_buffer(name, torch.zeros(4), persistent=name != "seen")

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.layer(x))
        self.mean = self.mean * 0.9 + x.detach().mean(0) * 0.1
        self.seen = torch.ones(3 + dist.get_rank())
        return x + self.mean + self.table


def x(step: int, rank: int) -> Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(10 * step + rank))


def differs_from_ddp(stage: int) -> list[str]:
    torch.manual_seed(0)
    model = Codebook()
    plain = copy.deepcopy(model)
    plain._ddp_params_and_buffers_to_ignore = ["seen"]  # type: ignore[assignment]
    ddp = nn.parallel.DistributedDataParallel(plain)
    inner = torch.optim.SGD(ddp.parameters(), lr=0.1)
    optimizer = zk.ZeroOptimizer(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage)
    wrong = []
    for step in range(5):
        for each, own in ((ddp, inner), (model, optimizer)):
            own.zero_grad()
            each(x(step, dist.get_rank())).square().mean().backward()
            own.step()
        ddp._sync_buffers()  # which it does before the next forward
        want: dict[str, Any] = dict(ddp.module.named_buffers())
        wrong += [f"{step} {name}" for name, value in model.named_buffers() if name != "seen" and not torch.equal(value, want[name])]
        wrong += ["seen"] * (model.seen.numel() != 3 + dist.get_rank())
    optimizer.close()
    return wrong


def test_they_are_the_first_ranks_after_each_step() -> None:
    assert run_world(2, differs_from_ddp, [1, 3]) == [[[], []]] * 2


class Counted(zk.Addon):
    def comm(self, comm: Any) -> Any:
        self.asked = 0
        words = comm.words

        def count(about: str, value: Any) -> Any:
            self.asked += about == "buffers"
            return words(about, value)

        comm.words = count
        return comm


def asked(stage: int) -> int:
    model, counted = nn.Sequential(nn.Linear(4, 4)), Counted()
    model.register_buffer("rotary", torch.ones(4))
    optimizer = zk.ZeroOptimizer(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage, addons=[counted])
    for step in range(40):
        model(x(step, dist.get_rank())).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return counted.asked


def test_ranks_of_a_model_that_writes_none_hardly_ask() -> None:
    assert run_world(2, asked, [2]) == [[7, 7]]  # before steps 0, 1, 2, 4, 8, 16, 32
