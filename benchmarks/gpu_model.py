"""Decoders of Qwen2.5's sizes in plain torch for `make gpu`, with random weights and without positions, which cost next to nothing.

Blocks are checkpointed whole, so a step computes 8 operations for each parameter and token: 6 of the model, and 2 to compute blocks again.
Logits of 64K tokens over 152K words would take 20 GB: the loss makes them for 1,024 tokens at a time, and again in backward.
"""

import functools
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

PIECE = 1024  # tokens whose logits exist at once


class Size(NamedTuple):
    layers: int
    width: int
    heads: tuple[int, int, int]  # of queries, keys and values
    ffn: int
    vocab: int = 152064
    dim: int = 128
    context: int = 4096

    def working_nbytes(self, tokens: int, micro: int) -> int:
        """An estimate of a step's activations: the inputs of blocks for ``tokens``, and what computing with ``micro`` of them takes."""
        return 2 * tokens * self.width * self.layers + 2 * micro * (8 * self.width + 6 * self.ffn) + min(micro, PIECE) * 14 * self.vocab


SIZES = {name: Size(layers, 3584, (28, 4, 4), 18944) for name, layers in (("12", 12), ("7b", 28))} | {"14b": Size(48, 5120, (40, 8, 8), 13824)}
TINY = Size(2, 64, (4, 2, 2), 160, vocab=256, dim=16, context=4)


class Block(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.norm1, self.norm2 = (nn.RMSNorm(size.width, eps=1e-6) for _ in range(2))
        self.qkv = nn.Linear(size.width, sum(size.heads) * size.dim)
        self.gate, self.up = (nn.Linear(size.width, size.ffn, bias=False) for _ in range(2))
        self.proj, self.down = (nn.Linear(inside, size.width, bias=False) for inside in (size.heads[0] * size.dim, size.ffn))

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm1(x)).unflatten(-1, (sum(self.heads), -1)).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(*heads.split(self.heads, dim=1), is_causal=True, enable_gqa=True)
        x = x + self.proj(mixed.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Model(nn.Module):
    """Ids (batch, time + 1) int64 -> the mean cross entropy of each next one, fp32."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocab, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm, self.head = nn.RMSNorm(size.width, eps=1e-6), nn.Linear(size.width, size.vocab, bias=False)

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x).float(), targets, reduction="sum")

    def forward(self, ids: Tensor) -> Tensor:
        again = functools.partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
        x = self.tokens(ids[:, :-1])
        for block in self.blocks:
            x = again(block, x)
        pairs = zip(self.norm(x).flatten(0, 1).split(PIECE), ids[:, 1:].flatten().split(PIECE), strict=True)
        return torch.stack([again(self.loss, *pair) for pair in pairs]).sum() / ids[:, 1:].numel()


@torch.no_grad()
def build(size: Size, device: torch.device) -> Model:
    """A bf16 model whose weights are drawn on ``device``, the same in every process; on "meta" it has no memory."""
    torch.manual_seed(0)
    with torch.device("meta"):
        model = Model(size).bfloat16()
    for name, param in model.to_empty(device=device).named_parameters():
        param.normal_(std=0.02) if param.ndim == 2 else param.fill_("norm" in name)
    return model
