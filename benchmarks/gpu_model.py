"""Sizes for benchmarks on a GPU, in plain torch: sizes of Qwen2.5 and GPT-2, checkpointed blocks, logits in pieces, random weights.

Blocks are checkpointed whole, so that a step computes 8 operations for each parameter and token: 6 of the model, and 2 to compute each block
again. The logits of 64K tokens over 152K words would take 20 GB in bf16 and 40 GB in fp32. The loss makes them for 1,024 tokens at a time, and
again in backward.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

PIECE = 1024  # tokens whose logits exist at once


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """Sizes of a decoder."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    head_dim: int = 128
    positions: int = 0  # rows of a learned position embedding; 0: rotary
    tied: bool = False
    gated: bool = False
    qkv_bias: bool = False
    biased: bool = False  # all other layers, and the norms


_QWEN = Size(layers=28, width=3584, heads=28, kv_heads=4, ffn=18944, vocab=152064, gated=True, qkv_bias=True)
_GPT2 = Size(layers=50, width=4096, heads=32, kv_heads=32, ffn=16384, vocab=50304, positions=1024, qkv_bias=True, biased=True, tied=True)
SIZES = {
    "Qwen2.5-7B": _QWEN,
    "Qwen2.5-14B": dataclasses.replace(_QWEN, layers=48, width=5120, heads=40, kv_heads=8, ffn=13824),
    "GPT-2 10B": _GPT2,
    "GPT-2 1.3B": dataclasses.replace(_GPT2, layers=24, width=2048, heads=16, kv_heads=16, ffn=8192),
}


def tiny(size: Size) -> Size:
    """A decoder of the same kind for dry runs."""
    small = dataclasses.replace(size, layers=3, width=64, heads=4, kv_heads=2, head_dim=16, ffn=160, vocab=256, positions=size.positions // 256)
    return small if size.kv_heads < size.heads else dataclasses.replace(small, kv_heads=4)


def context_of(size: Size, dry: bool) -> int:
    """Tokens of a sequence: as many as there are learned positions, or 4,096 (16 in a dry run)."""
    return size.positions or (16 if dry else 4096)


def inputs_nbytes(size: Size, tokens: int) -> int:
    """Inputs of all blocks, which checkpointing keeps."""
    return 2 * tokens * size.width * size.layers


def working_nbytes(size: Size, tokens: int, keep_last: int | None = None) -> int:
    """An estimate of activations on the device: that of ``zk plan`` with logits of one piece, and ``keep_last`` bytes of the blocks' inputs."""
    block = size.width * (size.layers + 8) + 3 * size.ffn * (1 + size.gated)
    offloaded = 0 if keep_last is None else max(0, inputs_nbytes(size, tokens) - keep_last)
    return 2 * tokens * block + min(tokens, PIECE) * (2 + 3 * 4) * size.vocab - offloaded


def _norm(size: Size) -> nn.Module:
    return nn.LayerNorm(size.width) if size.biased else nn.RMSNorm(size.width, eps=1e-6)


def _rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Rotary embedding of (batch, heads, time, dim) by ``angles`` (time, dim / 2), half against half as Qwen does."""
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Block(nn.Module):
    """Attention and MLP on the residual stream (batch, time, width)."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size, inside = size, size.heads * size.head_dim
        self.norm1 = _norm(size)
        self.qkv = nn.Linear(size.width, inside + 2 * size.kv_heads * size.head_dim, bias=size.qkv_bias)
        self.proj = nn.Linear(inside, size.width, bias=size.biased)
        self.norm2 = _norm(size)
        self.gate = nn.Linear(size.width, size.ffn, bias=size.biased) if size.gated else None
        self.up = nn.Linear(size.width, size.ffn, bias=size.biased)
        self.down = nn.Linear(size.ffn, size.width, bias=size.biased)

    def forward(self, x: Tensor, angles: Tensor | None) -> Tensor:
        size, (batch, time, _) = self.size, x.shape
        heads = self.qkv(self.norm1(x)).view(batch, time, -1, size.head_dim).transpose(1, 2)
        q, k, v = heads.split((size.heads, size.kv_heads, size.kv_heads), dim=1)
        if angles is not None:
            q, k = _rotate(q, angles), _rotate(k, angles)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=size.kv_heads < size.heads)
        x = x + self.proj(mixed.transpose(1, 2).reshape(batch, time, -1))
        y = self.norm2(x)
        inner = F.gelu(self.up(y), approximate="tanh") if self.gate is None else F.silu(self.gate(y)) * self.up(y)
        out: Tensor = x + self.down(inner)
        return out


class Model(nn.Module):
    """Ids and targets (batch, time) int64 -> the mean cross entropy, fp32."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size = size
        self.tokens = nn.Embedding(size.vocab, size.width)
        self.positions = nn.Embedding(size.positions, size.width) if size.positions else None
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = _norm(size)
        self.head = nn.Linear(size.width, size.vocab, bias=False)
        if size.tied:
            self.head.weight = self.tokens.weight

    def _loss(self, x: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x).float(), targets, reduction="sum")

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x, angles, time = self.tokens(ids), None, torch.arange(ids.shape[1], device=ids.device)
        if self.positions is not None:
            x = x + self.positions(time)
        else:
            rates = 1e6 ** -(torch.arange(0, self.size.head_dim, 2, device=ids.device) / self.size.head_dim)
            angles = time[:, None] * rates
        for block in self.blocks:
            x = checkpoint(block, x, angles, use_reentrant=False, preserve_rng_state=False)
        x = self.norm(x).flatten(0, 1)
        total = x.new_zeros((), dtype=torch.float32)
        for piece, wanted in zip(x.split(PIECE), targets.flatten().split(PIECE), strict=True):
            total = total + checkpoint(self._loss, piece, wanted, use_reentrant=False, preserve_rng_state=False)
        return total / targets.numel()


def build(size: Size, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Model:
    """A model on ``device``. Its weights are drawn there, the same in every process."""
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = Model(size)
    finally:
        torch.set_default_dtype(before)
    with torch.no_grad():
        for param in model.parameters():
            if param.ndim == 2:
                param.normal_(std=0.02)
    return model


def batch(size: Size, num_tokens: int, context: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Random ids and targets (rows, context), ``num_tokens`` of each."""
    if num_tokens % context:
        raise ValueError(f"{num_tokens} tokens are not whole sequences of {context}")
    ids = torch.randint(0, size.vocab, (num_tokens // context, context + 1), generator=torch.Generator().manual_seed(0))
    return ids[:, :-1].contiguous().to(device), ids[:, 1:].contiguous().to(device)
