"""A GPT whose MLPs are mixtures of experts, as plain torch; nothing here knows of zk."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zk.tools.train.gpt import GPT, Block, GPTConfig

BALANCE = 0.01  # weight of each block's balance in the loss, as in Switch Transformers


@dataclasses.dataclass(frozen=True, slots=True)
class MixtureConfig(GPTConfig):
    """Sizes of a GPT whose blocks have many small MLPs, of which a token uses a few.

    With those that are given here the model has 13 to 17 times as many parameters as a token uses: the more, the wider it is.
    """

    experts: int = 128  # of a block
    used: int = 4  # of them, by a token
    inner: int = 0  # width inside of an expert; 0: 3/8 of the model's

    def __post_init__(self) -> None:
        GPTConfig.__post_init__(self)
        object.__setattr__(self, "inner", self.inner or max(1, self.width * 3 // 8))
        if self.used > self.experts:
            raise ValueError(f"used, the experts of a token, must be at most experts; got {self.used} and {self.experts}")

    @property
    def expert_numel(self) -> int:
        """Parameters of one expert."""
        return 3 * self.width * self.inner

    @property
    def idle_numel(self) -> int:
        """Parameters that a token does not use."""
        return self.layers * (self.experts - self.used) * self.expert_numel


class Expert(nn.Module):
    """A gated MLP: (tokens, width) -> the same."""

    def __init__(self, config: MixtureConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.width, config.inner, bias=False)
        self.up = nn.Linear(config.width, config.inner, bias=False)
        self.down = nn.Linear(config.inner, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


class MixtureBlock(Block):
    """A block in which a router sends each token to a few experts. The others are not called.

    A token's weights are its largest shares, divided by their sum, as in Mixtral.
    A forward leaves ``load``, the tokens that each expert got, and ``balance``, which is smallest, 1, where all get as many.
    """

    def add_mlp(self, config: GPTConfig) -> None:
        assert isinstance(config, MixtureConfig)
        self.used = config.used
        self.router = nn.Linear(config.width, config.experts, bias=False)
        self.experts = nn.ModuleList(Expert(config) for _ in range(config.experts))

    def mlp(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        shares = self.router(tokens).float().softmax(-1)  # (tokens, experts)
        weights, chosen = shares.topk(self.used)  # (tokens, used)
        weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype)
        self.load = torch.bincount(chosen.flatten(), minlength=len(self.experts))
        self.balance = len(self.experts) * (self.load / chosen.numel() * shares.mean(0)).sum()
        out = torch.zeros_like(tokens)
        for index in self.load.nonzero().flatten().tolist():
            rows, place = (chosen == index).nonzero(as_tuple=True)
            out = out.index_add(0, rows, self.experts[index](tokens[rows]) * weights[rows, place, None])
        return out.view_as(x)


class Mixture(GPT):
    """A GPT of such blocks.

    While it trains, the loss includes the balance of each block's experts, so that all of them come to be used.
    In ``eval()`` it is the cross entropy alone.
    """

    block = MixtureBlock

    def __init__(self, config: MixtureConfig) -> None:
        super().__init__(config)
        for name, param in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(param)  # what all tokens have in common would send all of them to the same experts

    @property
    def load(self) -> Tensor:
        """Tokens that each expert got in the last forward: (layers, experts)."""
        return torch.stack([block.load for block in self.blocks])  # type: ignore[misc]

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Tensor:
        out = super().forward(ids, targets)
        if targets is None or not self.training:
            return out
        return out + BALANCE * torch.stack([block.balance for block in self.blocks]).sum()  # type: ignore[misc]
