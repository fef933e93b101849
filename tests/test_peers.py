"""Ranks that wait for each other: each wait ends, says who is missing and why, and what differs between ranks is refused by name on all of them."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import zk
from tests.models import GPT, batch, loss_of
from tests.world import run_world

TIMEOUT_S = 3.0  # of the process groups here


def adamw(model: torch.nn.Module, lr: float = 1e-2) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=lr)


def made(**options: Any) -> tuple[torch.nn.Module, zk.ZeroOptimizer]:
    torch.manual_seed(0)
    model = GPT()
    return model, zk.ZeroOptimizer(model, adamw(model), **{"stage": 2, "optimizer_tier": "host", **options})


def step(model: torch.nn.Module, optimizer: zk.ZeroOptimizer, seed: int = 0) -> None:
    optimizer.backward(loss_of(model, batch(seed)))
    optimizer.step()
    optimizer.zero_grad()


def error_of(call: Any, *arguments: Any, **options: Any) -> tuple[str, float]:
    """What ``call`` raises, and after how many seconds."""
    begun = time.monotonic()
    try:
        call(*arguments, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - begun
    return "", time.monotonic() - begun


# ---- a rank that does not come ---------------------------------------------------------------------------------------------------


def gives_up(_: None) -> list[tuple[str, float]]:
    """The second rank's optimizer is refused, twice, for what only that rank sees: before ranks meet there, and after."""
    rank = dist.get_rank()
    found = [error_of(made, units=["nothing of that name"] if rank else None)]
    model = GPT()
    if rank:
        model.extra = torch.nn.Parameter(torch.zeros(3, dtype=torch.int32), requires_grad=False)
    found.append(error_of(zk.ZeroOptimizer, model, adamw(model) if not rank else "not an optimizer", stage=2))
    step(*made())  # and the third try is as if there had been no other
    return found


def test_a_rank_hears_why_another_one_made_no_optimizer() -> None:
    (ours, theirs) = run_world(2, gives_up, [None], timeout=60)[0]
    for (said, took), (reason, _) in zip(ours, theirs, strict=True):
        kind, _, text = reason.partition(": ")
        assert kind in ("ValueError", "TypeError") and f"on rank 1, {kind}: {text[:60]}" in said and took < 10, (said, took, reason)


def never_comes(_: None) -> tuple[str, float]:
    if dist.get_rank():
        time.sleep(TIMEOUT_S + 2)
        return "", 0.0
    return error_of(made)


def test_a_rank_that_never_comes_is_waited_for_as_long_as_the_group_says() -> None:
    said, took = run_world(2, never_comes, [None], TIMEOUT_S)[0][0]
    assert "failed, as another rank is gone" in said and TIMEOUT_S <= took < 3 * TIMEOUT_S, (said, took)


# ---- ranks that differ -------------------------------------------------------------------------------------------------------------

DIFFERENCES = {
    "clip": r"clip_grad_norm is 0\.5 on rank 0 and 1 on rank 1",
    "prefetch": r"prefetch is 1 on rank 0 and 2 on rank 1",
    "list": r"param_groups\[0\]\['betas'\] is \(0\.9, 0\.9\) on rank 0 and \(0\.8, 0\.9\) on rank 1",
    "numpy": r"param_groups\[0\]\['lr'\] is 0\.5 on rank 0 and 1\.5 on rank 1",
    "betas": r"param_groups\[0\]\['betas'\] is \(0\.9, 0\.999\) on rank 0 and \(0\.8, 0\.999\) on rank 1",
}


def differs(what: str) -> str:
    rank, model = dist.get_rank(), GPT()
    options: dict[str, Any] = {"stage": 2, "optimizer_tier": "host"}
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
    return error_of(zk.ZeroOptimizer, model, plain, **options)[0]


def test_ranks_that_would_train_by_different_rules_are_refused_on_all_of_them() -> None:
    table = run_world(2, differs, list(DIFFERENCES), timeout=60)
    for pattern, row in zip(DIFFERENCES.values(), table, strict=True):
        for said in row:
            assert re.search(pattern, said), said


def differs_in_name_only(_: None) -> str:
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


def test_ranks_that_differ_in_what_decides_nothing_train() -> None:
    assert run_world(2, differs_in_name_only, [None], timeout=60)[0] == ["", ""]


# ---- groups that are not the whole world ---------------------------------------------------------------------------------------------


def in_part(folder: str) -> str:
    """Two of three ranks train, with connections of every kind; the third one has no part in that."""
    group = dist.new_group([0, 2])
    said = ""
    if dist.get_rank() != 1:
        model, optimizer = made(process_group=group, stage=3, overlap_step=True)
        for seed in range(3):
            step(model, optimizer, seed)
            optimizer.save_checkpoint(folder, async_save=True)
        optimizer.synchronize()
        said = (Path(folder) / "latest").read_text()
        optimizer.close()
    dist.barrier()
    return said


def test_a_part_of_the_ranks_trains_and_saves_beside_training(tmp_path: Path) -> None:
    assert run_world(3, in_part, [str(tmp_path)], timeout=30)[0] == ["step-00000003\n", "", "step-00000003\n"]


# ---- a rank that is killed, frozen, or interrupted ---------------------------------------------------------------------------------
