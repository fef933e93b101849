"""Models that torch's parallelize_module cuts over tensor parallel ranks, and the whole models that they are parts of."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

WIDTH, INNER, VOCAB, LENGTH = 16, 40, 24, 6


class Block(nn.Module):
    """A gated MLP behind a norm."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, inner)
        self.down = nn.Linear(inner, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return out


class Model(nn.Module):
    """Embedding, blocks, tied head."""

    def __init__(self, inner: int = INNER) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList([Block(inner) for _ in range(2)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.norm(x))
        return out


def whole_model(inner: int = INNER) -> Model:
    """The model, whole, with the same values on every rank."""
    torch.manual_seed(0)
    model = Model(inner)
    for param in model.parameters():
        nn.init.normal_(param, std=0.3)
    return model


def cut(model: Model, mesh: DeviceMesh, kind: str) -> Model:
    """Cut a whole model over the ranks of ``mesh``.

    "tensor": layers of blocks, with plain parameters beside them. "sequence": all parameters are DTensors, and norms see a part of each sequence.
    """
    if kind == "tensor":
        for block in model.blocks:
            parallelize_module(block, mesh, {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()})
        return model
    for block in model.blocks:
        plan = {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
            "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        }
        parallelize_module(block, mesh, plan)  # type: ignore[arg-type]
    ends = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=False),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, ends)  # type: ignore[arg-type]
    model.head.weight = model.embed.weight  # what parallelize_module has parted
    return model


def whole(value: Tensor) -> Tensor:
    """All of a DTensor, on every rank; any other tensor as it is."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def batch(step: int, rank: int) -> Tensor:
    """The tokens that data parallel rank ``rank`` trains on in a step."""
    return torch.randint(VOCAB, (3, LENGTH + 1), generator=torch.Generator().manual_seed(100 * step + rank))


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    """The mean over next tokens."""
    logits = model(ids[:, :-1])
    return F.cross_entropy(logits.reshape(-1, VOCAB), ids[:, 1:].reshape(-1))
