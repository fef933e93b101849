"""Ranks that have parts of the same sequences: all of them are one process group, and attention exchanges heads for tokens."""

from __future__ import annotations

import dataclasses
import functools
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import zk
from tests.world import mesh_of, run_world

WIDTH, HEADS, VOCAB, LENGTH, STEPS = 16, 4, 24, 8, 3


class _Exchange(torch.autograd.Function):
    """Of (parts, ...) on each rank, part number i goes to rank i; its gradient comes back the same way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group, out = group, torch.empty_like(x, memory_format=torch.contiguous_format)
        dist.all_to_all_single(out, x.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _Exchange.apply(grad, ctx.group), None


class Attention(nn.Module):
    """Causal attention as DeepSpeed-Ulysses has it (arXiv 2309.14509): each rank of ``group`` has some tokens, and in between some heads."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.group = group
        # (without a bias: the keys' has a gradient of zero but for rounding, which Adam makes steps of)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        qkv = self.qkv(x).view(batch, tokens, 3, HEADS, WIDTH // HEADS)
        if self.group is not None:
            ranks = dist.get_world_size(self.group)
            # (ranks of heads, batch, tokens here, 3, heads, size) -> (ranks of tokens, ...)
            qkv = _Exchange.apply(qkv.unflatten(3, (ranks, -1)).movedim(3, 0), self.group)
            qkv = qkv.movedim(0, 1).flatten(1, 2)
        queries, keys, values = qkv.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(queries, keys, values, is_causal=True).transpose(1, 2)
        if self.group is not None:
            y = _Exchange.apply(y.unflatten(1, (ranks, -1)).movedim(1, 0), self.group)
            y = y.movedim(0, 2).flatten(2, 3)
        out: Tensor = self.out(y.reshape(batch, tokens, WIDTH))
        return out


class Block(nn.Module):
    """Attention and an MLP."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.attention, self.mlp = Attention(group), nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        out: Tensor = x + self.mlp(self.norms[1](x))
        return out


class Model(nn.Module):
    """A decoder; ``group`` has a part of the sequence on each rank."""

    def __init__(self, group: Any = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList([Block(group) for _ in range(2)])
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids: Tensor, first: int = 0) -> Tensor:
        x = self.embed(ids) + self.positions(torch.arange(first, first + ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


def batch(step: int, data: int) -> Tensor:
    return torch.randint(VOCAB, (3, LENGTH + 1), generator=torch.Generator().manual_seed(10 * step + data))


def loss_of(model: nn.Module, ids: Tensor, part: int = 0, parts: int = 1) -> Tensor:
    """The mean over next tokens of one part of the sequences."""
    tokens = LENGTH // parts
    first = part * tokens
    logits = model(ids[:, first : first + tokens], first)
    return F.cross_entropy(logits.flatten(0, 1), ids[:, first + 1 : first + tokens + 1].flatten())


@dataclasses.dataclass(frozen=True)
class Case:
    stage: int
    clip: float | None = None
    overlap_step: bool = False
    tier: str = "device"
    overflow: bool = False  # of one part of one sequence, in the second step
    saves: bool = False  # after two steps, while the next one is trained; another optimizer goes on from there


@functools.cache
def plain(data: int, clip: float | None, overflow: bool) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Losses, norms and parameters of one process with whole sequences, and all of them."""
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, norms = [], []
    for step in range(STEPS):
        loss = torch.stack([loss_of(model, batch(step, rank)) for rank in range(data)]).mean()
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), clip or float("inf")).item())
        if not (overflow and step == 1):
            optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms, {name: param.detach() for name, param in model.named_parameters()}


def train(case: Case, mesh: DeviceMesh, model: nn.Module, optimizer: zk.ZeroOptimizer, steps: range) -> None:
    losses, norms, _ = plain(2, case.clip, case.overflow)
    for step in steps:
        loss = loss_of(model, batch(step, mesh.get_local_rank("data")), mesh.get_local_rank("sequence"), 2)
        overflows = case.overflow and step == 1
        (loss * float("inf") if overflows and dist.get_rank() == 1 else loss).backward()
        optimizer.step()
        assert overflows or optimizer.metrics()["grad_norm"] == pytest.approx(norms[step], rel=1e-4)
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        assert mean.item() / 4 == pytest.approx(losses[step], rel=1e-5)


def run(case: Case) -> str:
    """On every rank; raises where it is not as in one process."""
    mesh = mesh_of("cpu", (2, 2), "data", "sequence")
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)

    def begin() -> tuple[nn.Module, zk.ZeroOptimizer]:
        tiers = {"optimizer_tier": case.tier, "param_tier": case.tier if case.stage == 3 else "device"}
        options = {"clip_grad_norm": case.clip, "overlap_step": case.overlap_step, **({"nvme_path": folder[0]} if case.tier == "nvme" else {})}
        model = Model(mesh.get_group("sequence"))
        return model, zk.ZeroOptimizer(model, torch.optim.AdamW(model.parameters(), lr=1e-2), stage=case.stage, **tiers, **options)

    model, optimizer = begin()
    if case.saves:
        train(case, mesh, model, optimizer, range(2))
        optimizer.save_checkpoint(Path(folder[0], "saved"), async_save=True)
        train(case, mesh, model, optimizer, range(2, 3))
        optimizer.close()
        model, optimizer = begin()
        optimizer.load_checkpoint(Path(folder[0], "saved"))
    train(case, mesh, model, optimizer, range(2 if case.saves else 0, STEPS))
    assert optimizer.metrics()["skipped_steps"] == case.overflow
    want = plain(2, case.clip, case.overflow)[2]
    with zk.gather(model.parameters()):
        for name, param in model.named_parameters():
            torch.testing.assert_close(param.detach(), want[name], rtol=1e-4, atol=2e-5)
    optimizer.close()
    dist.barrier()  # others are about to remove what is theirs
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])
    return "as one process"


CASES = [
    Case(2, 0.3, tier="nvme", overflow=True),
    Case(3, 0.3, overlap_step=True, tier="host", saves=True),
]


def test_parts_of_sequences_train_as_whole_ones_in_one_process() -> None:
    for case, ranks in zip(CASES, run_world(4, run, CASES, timeout=60), strict=True):
        assert ranks == ["as one process"] * 4, case
