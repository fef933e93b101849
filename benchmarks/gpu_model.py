"""zk's GPT with checkpointed blocks: a step computes 8 operations a parameter and token, not 6."""

import functools

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from zk.tools.gpt import GPT, GPTConfig

_ROWS = {"12": (3584, 12, 28), "7b": (3584, 42, 28), "14b": (5120, 42, 40)}
SIZES = {name: GPTConfig(152064, *row, 4096) for name, row in _ROWS.items()}
TINY = GPTConfig(width=64, layers=2, context=4)
PIECE = 1024  # tokens whose logits exist at once: those of 64K over 152K words would take 20 GB


class Model(GPT):
    """Ids (batch, time + 1) int64 -> the mean cross entropy of each next one, fp32."""

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x).float(), targets, reduction="sum")

    def forward(self, ids: Tensor) -> Tensor:  # type: ignore[override]
        again = functools.partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
        x, targets = self.tokens(ids[:, :-1]), ids[:, 1:].flatten()
        x = x + self.positions(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            x = again(block, x)
        pairs = zip(self.norm(x).flatten(0, 1).split(PIECE), targets.split(PIECE), strict=True)
        return torch.stack([again(self.loss, *pair) for pair in pairs]).sum() / targets.numel()


def build(size: GPTConfig, device: torch.device) -> Model:
    """A bf16 model, the same in every process; on "meta" it has no memory."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with device:
        model = Model(size)
    torch.set_default_dtype(torch.float32)
    return model
