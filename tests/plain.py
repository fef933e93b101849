"""Training in plain PyTorch, with the arithmetic that zk promises: what every stage, tier and world size is compared with."""

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.models import batch, loss_of


def mean_of_ranks(grads: list[Tensor], dtype: torch.dtype) -> Tensor:
    """Summed in fp32 in the order of ranks, divided, rounded once."""
    total = grads[0].float()
    for grad in grads[1:]:
        total = total + grad
    return (total / len(grads)).to(dtype) if len(grads) > 1 else grads[0].to(dtype)


def train_plain(
    model: nn.Module,
    make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    *,
    dtype: torch.dtype,
    world: int = 1,
    accumulation: int = 1,
    local: bool = False,
    steps: int = 10,
    clip: float | None = None,
    loss_scale: float = 1.0,
    forward: Callable[[nn.Module, Tensor, int], Tensor] | None = None,
) -> tuple[list[float], nn.Module, list[Tensor], torch.optim.Optimizer]:
    """Losses of rank 0, the trained model, fp32 masters and the optimizer over them. ``local``: passes add up before ranks average them."""
    forward = forward or (lambda m, ids, step: loss_of(m, ids))
    masters = [nn.Parameter(param.detach().float().clone(), requires_grad=param.requires_grad) for param in model.parameters()]
    model = copy.deepcopy(model).to(dtype)
    params = list(model.parameters())
    optimizer = make_optimizer(masters)
    losses = []
    for step in range(steps):
        grads: list[Any] = [[[None] * accumulation for _ in range(world)] for _ in params]  # [parameter][rank][micro-batch]
        for rank in range(world):
            for micro in range(accumulation):
                loss = forward(model, batch(1000 * step + 10 * micro + rank), step)
                if rank == 0:
                    losses.append(loss.item())
                (loss * loss_scale).backward()
                for param, by_rank in zip(params, grads, strict=True):
                    by_rank[rank][micro], param.grad = param.grad, None
        totals: list[Tensor | None] = []
        for param, by_rank in zip(params, grads, strict=True):
            if all(grad is None for row in by_rank for grad in row):
                totals.append(None)
                continue
            rows = [[torch.zeros_like(param, dtype=dtype) if grad is None else grad for grad in row] for row in by_rank]
            if local:
                sums = [row[0] if accumulation == 1 else sum((g.float() for g in row[1:]), row[0].float()) for row in rows]
                totals.append(mean_of_ranks(sums, torch.float32 if accumulation > 1 else dtype).float())
            else:
                means = [mean_of_ranks([row[micro] for row in rows], dtype) for micro in range(accumulation)]
                totals.append(sum((m.float() for m in means[1:]), means[0].float()))
        scale = 1 / loss_scale
        if clip is not None:
            norm = math.sqrt(sum(total.double().square().sum().item() for total in totals if total is not None)) / loss_scale
            scale = min(1.0, clip / (norm + 1e-6)) / loss_scale
        for master, total in zip(masters, totals, strict=True):
            master.grad = total if total is None or scale == 1 else total * scale
        optimizer.step()
        with torch.no_grad():
            for param, master in zip(params, masters, strict=True):
                param.copy_(master.to(dtype))
    return losses, model, [master.detach() for master in masters], optimizer
