"""A GPT as plain torch, from token ids to logits; nothing here knows of zk."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclasses.dataclass(frozen=True, slots=True)
class GPTConfig:
    """Sizes of a GPT. ValueError for those that do not go together."""

    vocab: int = 256
    width: int = 256
    layers: int = 6
    heads: int = 4
    context: int = 128
    kv_heads: int = 0  # of keys and values, which heads share; 0: as many as heads
    head_dim: int = 0  # 0: width / heads

    def __post_init__(self) -> None:
        if not self.head_dim and self.width % self.heads:
            raise ValueError(f"width must be a multiple of heads; got {self.width} and {self.heads}")
        object.__setattr__(self, "kv_heads", self.kv_heads or self.heads)
        object.__setattr__(self, "head_dim", self.head_dim or self.width // self.heads)
        if self.heads % self.kv_heads:
            raise ValueError(f"heads must be a multiple of kv_heads; got {self.heads} and {self.kv_heads}")


class Block(nn.Module):
    """Attention and MLP, each after a LayerNorm, each added to the residual stream: (batch, time, width) -> the same."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.head_counts = [config.heads, config.kv_heads, config.kv_heads]
        self.norm1 = nn.LayerNorm(config.width)
        self.qkv = nn.Linear(config.width, sum(self.head_counts) * config.head_dim)
        self.proj = nn.Linear(config.heads * config.head_dim, config.width)
        self.norm2 = nn.LayerNorm(config.width)
        self.add_mlp(config)

    def add_mlp(self, config: GPTConfig) -> None:
        """Make the modules of ``mlp``."""
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, _ = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, time, sum(self.head_counts), -1).transpose(1, 2)
        q, k, v = heads.split(self.head_counts, dim=1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=k.shape[1] < q.shape[1])
        x = x + self.proj(mixed.transpose(1, 2).reshape(batch, time, -1))
        return x + self.mlp(self.norm2(x))

    def mlp(self, x: Tensor) -> Tensor:
        """Work on each token alone: (batch, time, width) -> the same."""
        out: Tensor = self.down(F.gelu(self.up(x), approximate="tanh"))
        return out


class GPT(nn.Module):
    """Ids (batch, time) int64 -> logits (batch, time, vocab), or with ``targets`` of the same shape the mean cross entropy."""

    block: type[Block] = Block

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(self.block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab, bias=False)
        for name, param in self.named_parameters():
            if param.ndim == 2:
                residual = name.endswith(("proj.weight", "down.weight"))
                nn.init.normal_(param, std=0.02 / (2 * config.layers) ** 0.5 if residual else 0.02)

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def generate(self, ids: Tensor, num_new: int, temperature: float = 0.8, generator: torch.Generator | None = None) -> Tensor:
        """Append ``num_new`` sampled tokens to ``ids`` (1, time), or fewer, where the model's output is not finite."""
        for _ in range(num_new):
            logits = self(ids[:, -self.config.context :])[:, -1].float() / temperature
            if not logits.isfinite().all():
                break
            ids = torch.cat([ids, torch.multinomial(logits.softmax(-1).cpu(), 1, generator=generator).to(ids.device)], dim=1)
        return ids
