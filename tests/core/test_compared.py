"""Ranks that would train by different rules, or different models, are refused on all of them."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import zk
from tests.models import GPT, batch, loss_of
from tests.world import call, run_world


def adamw(model: torch.nn.Module, lr: float = 1e-2) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=lr)


DIFFERENCES = {
    "stage": "stage is 1 on rank 0 and 2 on rank 1",
    "model": r"of torch.float32 on rank 0 and \(\d+, \d+\) of torch.float32, frozen on rank 1",
    "clip": r"clip_grad_norm is 0\.5 on rank 0 and 1 on rank 1",
    "prefetch": r"prefetch is 1 on rank 0 and 2 on rank 1",
    "list": r"param_groups\[0\]\['betas'\] is \(0\.9, 0\.9\) on rank 0 and \(0\.8, 0\.9\) on rank 1",
    "numpy": r"param_groups\[0\]\['lr'\] is 0\.5 on rank 0 and 1\.5 on rank 1",
    "betas": r"param_groups\[0\]\['betas'\] is \(0\.9, 0\.999\) on rank 0 and \(0\.8, 0\.999\) on rank 1",
}


def differs(what: str) -> str:
    rank, model = dist.get_rank(), GPT()
    options: dict[str, Any] = {"stage": 2, "optimizer_tier": "host"}
    if what == "stage":
        options["stage"] = 1 + rank
    if what == "model":
        model.head.weight.requires_grad_(rank == 0)
    if what == "clip":
        options["clip_grad_norm"] = 0.5 + rank / 2
    if what == "prefetch":
        options |= {"stage": 3, "prefetch": 1 + rank}
    plain = adamw(model)
    if what == "betas" and rank:
        plain.param_groups[0]["betas"] = (0.8, 0.999)
    if what == "list":
        plain.param_groups[0]["betas"] = [0.9 - rank / 10, 0.9]
    if what == "numpy":
        plain.param_groups[0]["lr"] = np.float32(0.5 + rank)
    try:
        zk.ZeroOptimizer(model, plain, **options)
    except ValueError as error:
        return str(error)
    return "nothing"



def differs_in_name_only(_: str) -> str:
    """Numbers of other types, options in another order, and names that only users read."""
    torch.manual_seed(0)
    model, rank = GPT(), dist.get_rank()
    plain = adamw(model, (1.0, 1)[rank])
    if rank:
        for name in list(plain.param_groups[0]):
            plain.param_groups[0][name] = plain.param_groups[0].pop(name)
    plain.param_groups[0]["name"] = f"of rank {rank}"
    optimizer = zk.ZeroOptimizer(model, plain, stage=2, clip_grad_norm=(1, 1.0)[rank], num_threads=1 + rank)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10)
    for seed in range(3):
        optimizer.backward(loss_of(model, batch(seed)))
        optimizer.clip_grad_norm_(0.3)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return ""


def test_ranks_that_would_train_by_different_rules_are_refused_on_all_of_them_and_others_train() -> None:
    *table, alike = run_world(2, call, [*((differs, what) for what in DIFFERENCES), (differs_in_name_only, "")], timeout=60)
    for pattern, row in zip(DIFFERENCES.values(), table, strict=True):
        assert all(re.search(pattern, str(said)) for said in row), row
    assert alike == ["", ""]
