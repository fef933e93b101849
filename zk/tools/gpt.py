"""A GPT in plain torch, and its sizes from text such as `gpt:10b`, for `zk train` and `zk plan`."""

from __future__ import annotations

import dataclasses
import re

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclasses.dataclass(frozen=True, slots=True)
class GPTConfig:
    """Sizes of a GPT. Raises ValueError for a width that its heads do not divide."""
    vocab: int = 256
    width: int = 256
    layers: int = 6
    heads: int = 4
    context: int = 128

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"heads must divide width; got {self.heads} and {self.width}")


def config_of(spec: str, context: int = 128) -> GPTConfig:
    """Sizes from ``gpt:10b``, as GPT-3's, or ``gpt:layers=24,width=2048``; else ValueError."""
    text = spec.lower().removeprefix("gpt:")
    if number := re.fullmatch(r"(?=.*[1-9])(\d{1,9}(?:\.\d+)?)([mbt])", text):
        blocks = float(number[1]) * {"m": 1e6, "b": 1e9, "t": 1e12}[number[2]] / 12  # width**2 each
        layers = max(1, round((blocks / 128**2) ** (1 / 3)))
        heads = max(1, round((blocks / layers) ** 0.5 / 64))
        return GPTConfig(width=64 * heads, layers=layers, heads=heads, context=context)
    sizes, known = {"context": context}, ", ".join(f.name for f in dataclasses.fields(GPTConfig))
    for name, _, value in (part.partition("=") for part in text.split(",")):
        if name not in known.split(", ") or not value.isdecimal() or not int(value):
            raise ValueError(f"give gpt:125m, gpt:10b or gpt:NAME=N,... of {known}; got {spec!r}")
        sizes[name] = int(value)
    return GPTConfig(**sizes)


class Block(nn.Module):
    """Attention and MLP, after LayerNorms, both residual: (batch, time, width) -> the same."""

    def __init__(self, config: GPTConfig):
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
        qkv = self.qkv(self.norm1(x)).view(batch, time, 3 * self.heads, -1).transpose(1, 2)
        q, k, v = qkv.chunk(3, dim=1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(batch, time, width))
        out: Tensor = x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))
        return out


class GPT(nn.Module):
    """Ids (batch, time) int64 -> logits (batch, time, vocab); with ``targets``, the loss."""

    def __init__(self, config: GPTConfig):
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
    def generate(self, ids: Tensor, new: int, draws: torch.Generator) -> Tensor:
        """Append ``new`` sampled tokens to ``ids`` (1, time); fewer once logits are not finite."""
        for _ in range(new):
            logits = self(ids[:, -self.config.context :])[:, -1].float() / 0.8
            if not logits.isfinite().all():
                break
            token = torch.multinomial(logits.softmax(-1).cpu(), 1, generator=draws)
            ids = torch.cat([ids, token.to(ids.device)], dim=1)
        return ids
