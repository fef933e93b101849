"""A GPT as plain torch, from token ids to logits; nothing here knows of zk."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclasses.dataclass(frozen=True, slots=True)
class GPTConfig:
    """Sizes of a GPT; ``num_params`` counts what they make."""

    vocab: int = 256
    width: int = 256
    layers: int = 6
    heads: int = 4
    context: int = 128


class Block(nn.Module):
    """Attention and MLP, each after a LayerNorm, each added to the residual stream: (batch, time, width) -> the same."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.norm1 = nn.LayerNorm(config.width)
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.proj = nn.Linear(config.width, config.width)
        self.norm2 = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, time, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(batch, time, width))
        out: Tensor = x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))
        return out


class GPT(nn.Module):
    """Ids (batch, time) int64 -> logits (batch, time, vocab), or with ``targets`` of the same shape the mean cross entropy."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
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
        """Append ``num_new`` sampled tokens to ``ids`` (1, time)."""
        for _ in range(num_new):
            logits = self(ids[:, -self.config.context :])[:, -1].float() / temperature
            ids = torch.cat([ids, torch.multinomial(logits.softmax(-1).cpu(), 1, generator=generator).to(ids.device)], dim=1)
        return ids
