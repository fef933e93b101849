"""In: sizes. Out: a GPT for benchmarks on a GPU, as plain torch: checkpointed blocks, logits in pieces, weights that cost no random numbers.

Blocks are checkpointed whole, so a step is 8 flops per parameter and token: 6 of the model, 2 to compute each block again. The head is
tied to the embedding, so each parameter counts once. The logits of 64K tokens over 50K words would be 6.6 GB in bf16 and 13 in fp32: they
are made, and made again in backward, for a few thousand tokens at a time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import zk

_TABLE = 262_139  # a prime, and more than any matrix has rows: no two rows are alike


@dataclasses.dataclass(frozen=True, slots=True)
class Size:
    """Sizes of a GPT."""

    layers: int
    width: int
    heads: int
    vocab: int = 50304
    context: int = 2048
    piece: int = 8192  # tokens whose logits are there at once

    @property
    def layer_numel(self) -> int:
        """Parameters of one block: qkv, proj, up and down with their biases, two norms."""
        return 12 * self.width**2 + 13 * self.width

    @property
    def rest_numel(self) -> int:
        """Embeddings, which are the head too, and the last norm."""
        return (self.vocab + self.context + 2) * self.width

    @property
    def numel(self) -> int:
        """All parameters."""
        return self.layers * self.layer_numel + self.rest_numel


SIZES = {
    "1.3B": Size(layers=24, width=2048, heads=16),
    "7B": Size(layers=32, width=4096, heads=32),
    "tiny": Size(layers=3, width=64, heads=2, vocab=512, context=32, piece=64),
}


def of_layers(layers: int) -> Size:
    """As wide as 7B, and ``layers`` deep."""
    return dataclasses.replace(SIZES["7B"], layers=layers)


@functools.cache
def _table() -> Tensor:
    """(_TABLE,) normal numbers."""
    return torch.randn(_TABLE, generator=torch.Generator().manual_seed(1))


class _Maker:
    """Makes parameters from one table of normal numbers, row after row of it: the same on every device, at the speed of a copy.

    All are rounded to bf16, so that a model in bf16 and one in fp32 begin alike.
    """

    def __init__(self, table: Tensor, dtype: torch.dtype) -> None:
        self.table, self.dtype, self.device, self.start = table, dtype, table.device, 0

    def matrix(self, rows: int, columns: int, std: float) -> nn.Parameter:
        """(rows, columns) of standard deviation ``std``."""
        values = torch.empty(rows, columns, dtype=self.dtype, device=self.device)
        self.start = (self.start + 65_537) % _TABLE  # each parameter begins elsewhere in the table
        table = (torch.cat([self.table[self.start :], self.table[: self.start]]) * std).bfloat16().to(self.dtype)
        flat, whole = values.view(-1), rows * columns // _TABLE
        with torch.no_grad():
            if whole:
                flat[: whole * _TABLE].view(whole, _TABLE).copy_(table)
            flat[whole * _TABLE :].copy_(table[: rows * columns - whole * _TABLE])
        return nn.Parameter(values)

    def zeros(self, numel: int) -> nn.Parameter:
        """(numel,) zeros."""
        return nn.Parameter(torch.zeros(numel, dtype=self.dtype, device=self.device))

    def norm(self, width: int) -> nn.LayerNorm:
        """Its weights are ones, its biases zeros."""
        return nn.LayerNorm(width, dtype=self.dtype, device=self.device)


class Linear(nn.Module):
    """(..., inputs) -> (..., outputs), with a bias."""

    def __init__(self, make: _Maker, inputs: int, outputs: int, std: float) -> None:
        super().__init__()
        self.weight, self.bias = make.matrix(outputs, inputs, std), make.zeros(outputs)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class Block(nn.Module):
    """Attention and MLP on the residual stream: (batch, time, width) -> the same. Keeps its input only, for backward."""

    def __init__(self, make: _Maker, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        residual = 0.02 / (2 * size.layers) ** 0.5
        self.norm1 = make.norm(size.width)
        self.qkv = Linear(make, size.width, 3 * size.width, 0.02)
        self.proj = Linear(make, size.width, size.width, residual)
        self.norm2 = make.norm(size.width)
        self.up = Linear(make, size.width, 4 * size.width, 0.02)
        self.down = Linear(make, 4 * size.width, size.width, residual)

    def _compute(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, time, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(batch, time, width))
        out: Tensor = x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))
        return out

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self._compute, x, use_reentrant=False, preserve_rng_state=False)
        return out


class GPT(nn.Module):
    """Ids and targets (batch, time) int64 -> the mean cross entropy, fp32."""

    def __init__(self, make: _Maker, size: Size) -> None:
        super().__init__()
        self.size = size
        self.tokens = make.matrix(size.vocab, size.width, 0.02)
        self.positions = make.matrix(size.context, size.width, 0.02)
        self.blocks = nn.ModuleList(Block(make, size) for _ in range(size.layers))
        self.norm = make.norm(size.width)

    def _loss(self, x: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, self.tokens).float(), targets, reduction="sum")

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = F.embedding(ids, self.tokens) + self.positions[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        x = self.norm(x).flatten(0, 1)
        total = x.new_zeros((), dtype=torch.float32)
        for piece, wanted in zip(x.split(self.size.piece), targets.flatten().split(self.size.piece), strict=True):
            total = total + checkpoint(self._loss, piece, wanted, use_reentrant=False, preserve_rng_state=False)
        return total / targets.numel()


def build(size: Size, dtype: torch.dtype, device: torch.device, deferred: bool = False) -> GPT:
    """A model on ``device``; ``deferred`` leaves its values to be made when a ZeroOptimizer takes it."""
    make = _Maker(_table().to("cpu" if deferred else device), dtype)
    with zk.deferred_init(device) if deferred else contextlib.nullcontext():
        return GPT(make, size)


def batch(size: Size, num_tokens: int, device: torch.device, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random ids and targets, (rows, context) each, ``num_tokens`` in all."""
    assert num_tokens % size.context == 0, f"{num_tokens} tokens are not whole rows of {size.context}"
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, size.vocab, (num_tokens // size.context, size.context + 1), generator=generator)
    return ids[:, :-1].contiguous().to(device), ids[:, 1:].contiguous().to(device)
