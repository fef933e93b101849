"""Layers that are cut over tensor parallel ranks as Megatron cuts them, in plain torch, and the whole model that they are parts of."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, INNER, VOCAB, LENGTH = 16, 32, 24, 6


class _Same(torch.autograd.Function):
    """The input of ranks that each use it: gradients are summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _Sum(torch.autograd.Function):
    """The sum of what ranks have."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        x = x.contiguous().clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class Block(nn.Module):
    """A gated MLP behind a norm: first columns, then rows, cut over ``group``; None: whole."""

    def __init__(self, group: Any = None) -> None:
        super().__init__()
        self.group, parts = group, dist.get_world_size(group) if group is not None else 1
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, INNER // parts)
        self.down = nn.Linear(INNER // parts, WIDTH, bias=False)
        self.bias = nn.Parameter(torch.zeros(WIDTH))
        if group is not None:
            for param, dim in ((self.up.weight, 0), (self.up.bias, 0), (self.down.weight, 1)):
                param.tensor_model_parallel, param.partition_dim = True, dim  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        if self.group is None:
            return x + self.down(F.gelu(self.up(y))) + self.bias
        return x + _Sum.apply(self.down(F.gelu(self.up(_Same.apply(y, self.group)))), self.group) + self.bias


class Model(nn.Module):
    """Embedding, blocks, tied head; only blocks are cut."""

    def __init__(self, group: Any = None, depth: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList([Block(group) for _ in range(depth)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.norm(x))
        return out


def whole_model(depth: int = 2) -> Model:
    """The model, whole, with the same values on every rank."""
    torch.manual_seed(0)
    model = Model(depth=depth)
    for param in model.parameters():
        nn.init.normal_(param, std=0.3)
    return model


def part_of(name: str, param: Tensor, whole: Tensor, group: Any) -> Tensor:
    """The part of a parameter that this rank of ``group`` has."""
    if not hasattr(param, "partition_dim"):
        return whole
    return whole.chunk(dist.get_world_size(group), dim=param.partition_dim)[dist.get_rank(group)]


def cut_model(group: Any, depth: int = 2) -> Model:
    """This rank's part of ``whole_model``."""
    whole, model = dict(whole_model(depth).named_parameters()), Model(group, depth)
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(part_of(name, param, whole[name], group))
    return model


def batch(step: int, rank: int) -> Tensor:
    """What data parallel rank ``rank`` trains on in a step."""
    return torch.randint(VOCAB, (3, LENGTH), generator=torch.Generator().manual_seed(100 * step + rank))


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    """The mean over next tokens."""
    logits = model(ids[:, :-1])
    return F.cross_entropy(logits.reshape(-1, VOCAB), ids[:, 1:].reshape(-1))
