"""Bytes that a step fetches from the drive, and gathers from other ranks, against those of the experts that it uses.

    python benchmarks/experts.py [FOLDER] [--steps 12]
    torchrun --nproc_per_node 2 benchmarks/experts.py ...

A model of two blocks, each with so many experts of 131,712 parameters of which every token uses the best of four that are drawn for each step.
What is needed: for each element in use its parameter for forward, for backward and for the update, two moments and the gradient, in fp32. Over
ranks each one draws experts of its own; what any rank uses counts for all, and is gathered for forward and backward.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile

import torch
from torch import Tensor, nn

import zk
from zk.parallel.comm import Group

WIDTH, OPEN, LAYERS = 128, 4, 2
BYTES = 4 * 3 + 8 + 4  # of each element: parameters three times, moments, gradient


class Block(nn.Module):
    """Each token goes to one expert, of those that are open."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(experts)
        )
        self.open = list(range(experts))
        self.used: set[int] = set()

    def forward(self, x: Tensor) -> Tensor:
        weight, chosen = self.gate(x)[:, self.open].softmax(-1).max(-1)
        self.used = {self.open[place] for place in chosen.unique().tolist()}
        out = torch.zeros_like(x)
        for place in chosen.unique().tolist():
            rows = (chosen == place).nonzero().flatten()
            out = out.index_add(0, rows, self.experts[self.open[place]](x[rows]) * weight[rows, None])
        return x + out


class Gathered:
    """Counter of the bytes that ranks gather."""

    def __init__(self) -> None:
        self.nbytes, gather = 0, Group.all_gather

        def counting(group: Group, unit: int, full: Tensor, shard: Tensor) -> object:
            self.nbytes += full.nbytes
            return gather(group, unit, full, shard)

        Group.all_gather = counting  # type: ignore[method-assign,assignment]


def measured(experts: int, steps: int, folder: str, gathered: Gathered) -> tuple[float, float, float, float]:
    """Bytes that all ranks fetch in a step, that are needed, and of a model that fetches every expert; bytes gathered, over twice those in use."""
    torch.manual_seed(0)
    draw = random.Random(int(os.environ.get("RANK", "0")))
    model = nn.Sequential(*(Block(experts) for _ in range(LAYERS)))
    expert = 8 * WIDTH * WIDTH + 5 * WIDTH
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    total = sum(param.numel() for param in model.parameters())
    needed = in_use = 0
    with zk.ZeroOptimizer(model, inner, stage=3, param_tier="nvme", optimizer_tier="nvme", nvme_path=folder) as optimizer:
        for step in range(2 + steps):
            if step == 2:
                optimizer.synchronize()
                before, gathered.nbytes = optimizer.metrics()["fetched_nbytes"], 0
            for block in model:
                block.open = draw.sample(range(experts), OPEN)
            model(torch.randn(512, WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step >= 2:
                everywhere = torch.zeros(LAYERS, experts)
                for place, block in enumerate(model):
                    everywhere[place, list(block.used)] = 1
                optimizer.comm.all_reduce(everywhere)
                used = int(everywhere.count_nonzero())
                in_use += total - LAYERS * experts * expert + used * expert
                needed += BYTES * (total - LAYERS * experts * expert + used * expert)
        optimizer.synchronize()
        fetched = torch.tensor([float(optimizer.metrics()["fetched_nbytes"] - before)])
        optimizer.comm.all_reduce(fetched)
    return fetched.item() / steps, needed / steps, BYTES * total, gathered.nbytes / (2 * 4 * in_use)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", nargs="?", default=tempfile.gettempdir(), help="on the drive")
    parser.add_argument("--steps", type=int, default=12)
    given = parser.parse_args()
    ranks, counter = int(os.environ.get("WORLD_SIZE", "1")), Gathered()
    heads = ["experts in a block", "parameters", "fetched in a step", "needed", "fetched / needed", "all of the model"]
    heads += ["gathered / in use"] * (ranks > 1)
    rows = [f"| {' | '.join(heads)} |", "|" + "---:|" * len(heads)]
    for count in (8, 32, 128):
        got, want, every, share = measured(count, given.steps, given.folder, counter)
        rows.append(f"| {count} | {every / BYTES / 1e6:.1f}M | {got / 1e6:.1f} MB | {want / 1e6:.1f} MB | {got / want:.3f} | {every / 1e6:.1f} MB |")
        rows[-1] += f" {share:.3f} |" if ranks > 1 else ""
    if os.environ.get("RANK", "0") == "0":
        print("\n".join(rows))
