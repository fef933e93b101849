"""Small models with the shapes that go wrong: odd sizes, ties, branches, frozen parts, checkpointing."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import zk
from zk.offload.drive import Drive
from zk.offload.tiers import Tier

VOCAB, WIDTH, LENGTH = 19, 24, 7
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # where models of tests compute


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.proj = nn.Linear(width, width)
        self.up = nn.Linear(width, 37)
        self.down = nn.Linear(37, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        mixed = torch.softmax((q @ k.transpose(-1, -2)) / 4, dim=-1) @ v
        x = x + self.proj(mixed)
        return x + self.down(F.gelu(self.up(x)))


class Mixture(Block):
    """The MLP is two of four experts, or none of them, as the data say. Each half of the batch calls the experts that its tokens go to."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        del self.up, self.down
        self.gate = nn.Linear(width, 4, bias=False)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(width, 96), nn.GELU(), nn.Linear(96, width)) for _ in range(4))
        self.open: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        x = x + self.proj(torch.softmax((q @ k.transpose(-1, -2)) / 4, dim=-1) @ v)
        return torch.stack([self.mixed(tokens) for tokens in x]) if self.open else x

    def mixed(self, tokens: Tensor) -> Tensor:
        weights, chosen = torch.softmax(self.gate(tokens)[:, self.open], dim=-1).max(dim=-1)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.open):
            rows = (chosen == number).nonzero().flatten()
            if len(rows):
                out = out.index_add(0, rows, self.experts[expert](tokens[rows]) * weights[rows, None])
        return tokens + out


class GPT(nn.Module):
    """Variants: plain, tied, unused, frozen, unfreezing, sometimes, elsewhere, experts; checkpointed, checkpointed_reentrant, also of experts."""

    def __init__(self, variant: str = "plain", width: int = WIDTH, layers: int = 2) -> None:
        super().__init__()
        self.variant = variant
        self.tokens = nn.Embedding(VOCAB, width)
        self.blocks = nn.ModuleList((Mixture if variant.startswith("experts") else Block)(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCAB, bias=False)
        if variant == "tied":
            self.head.weight = self.tokens.weight
        if variant in ("unused", "sometimes"):
            self.branch = nn.Linear(width, width)
        if variant in ("frozen", "unfreezing"):
            for param in [*self.tokens.parameters(), *self.blocks[1].parameters(), self.blocks[0].qkv.weight]:
                param.requires_grad_(False)
        if variant == "unfreezing":  # from values that all precisions have: what is frozen keeps no others
            for param in self.parameters():
                param.data = torch.where(param.abs() < 1e-3, 0, param).bfloat16().float()
        if self.norm.weight.device.type != "meta":
            self.to(DEVICE)

    def forward(self, ids: Tensor, branch: bool = False) -> Tensor:
        x = self.tokens(ids)
        for number, block in enumerate(self.blocks):
            if isinstance(block, Mixture):
                way = (int(ids.sum()) + number) % 5
                block.open = [] if way == 4 else [way, (way + 1) % 4]
            if "checkpointed" in self.variant:
                x = checkpoint(block, x, use_reentrant=self.variant.endswith("reentrant"))
            else:
                x = block(x)
        if self.variant == "sometimes" and branch:
            x = x + self.branch(x)
        if self.variant == "elsewhere":  # a block's parameter, used by the model itself after the block is done
            x = x + F.linear(x, self.blocks[0].proj.weight)
        return self.head(self.norm(x))


def gpt(variant: str = "plain", layers: int = 2) -> GPT:
    """The same values each time."""
    torch.manual_seed(0)
    return GPT(variant, layers=layers)


def adamw(model: nn.Module, **options: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2, **options)


def wrap(model: nn.Module, path: Path | None = None, **options: Any) -> zk.ZeroOptimizer:
    drive = {"nvme_path": path} if "nvme" in options.values() else {}
    return zk.ZeroOptimizer(model, adamw(model), **options, **drive)


def loss_of(model: nn.Module, ids: Tensor, **kwargs: bool) -> Tensor:
    logits = model(ids[:, :-1], **kwargs).float()
    return F.cross_entropy(logits.reshape(-1, VOCAB), ids[:, 1:].reshape(-1))


def batch(seed: int) -> Tensor:
    """(2, LENGTH + 1) token ids."""
    return torch.randint(0, VOCAB, (2, LENGTH + 1), generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def unlike_the_first(model: nn.Module, rank: int) -> None:
    """Give a rank other values than the first one, whose values win."""
    for param in model.parameters():
        param.data.add_(rank)


def descend(optimizer: torch.optim.Optimizer, loss: Tensor) -> float:
    """One step as users of plain torch write it; returns the loss."""
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int = 0) -> float:
    return descend(optimizer, loss_of(model, batch(seed)))


def train(model: nn.Module, optimizer: Any, steps: int = 1, start: int = 0) -> list[float]:
    """Steps of a ZeroOptimizer on the batches ``start`` and on; returns the losses."""
    losses = []
    for step in range(start, start + steps):
        loss = loss_of(model, batch(step))
        optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@contextlib.contextmanager
def small_chunks(numel: int = 2048) -> Iterator[None]:
    """Chunks of states have at most ``numel`` elements, on every tier."""
    with mock.patch.object(Tier, "chunk_numel", numel), mock.patch.object(Drive, "chunk_numel", numel):
        yield
