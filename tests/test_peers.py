"""Ranks that wait for each other: each wait ends, says who is missing and why, and what differs between ranks is refused by name on all of them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import zk
from tests.models import GPT, train
from tests.world import run_world

TIMEOUT_S = 2.0  # of the group in which one rank does not come


def made(**options: Any) -> tuple[torch.nn.Module, zk.ZeroOptimizer]:
    torch.manual_seed(0)
    model = GPT()
    return model, zk.ZeroOptimizer(model, torch.optim.AdamW(model.parameters()), **{"stage": 2, "optimizer_tier": "host", **options})


def error_of(call: Any, *arguments: Any, **options: Any) -> tuple[str, float]:
    """What ``call`` raises, and after how many seconds."""
    begun, said = time.monotonic(), ""
    try:
        call(*arguments, **options)
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    return said, time.monotonic() - begun


def gives_up(_: None) -> list[tuple[str, float]]:
    """The second rank's optimizer is refused, twice, for what only that rank sees: before ranks meet there, and after."""
    rank = dist.get_rank()
    found = [error_of(made, device_budget=1 if rank else None)]
    model = GPT()
    inner: Any = torch.optim.AdamW(model.parameters())
    if rank:
        model.extra = torch.nn.Parameter(torch.zeros(3, dtype=torch.int32), requires_grad=False)
    found.append(error_of(zk.ZeroOptimizer, model, "not an optimizer" if rank else inner, stage=2))
    train(*made())  # and the third try is as if there had been no other
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


def in_part(folder: str) -> str:
    """Two of three ranks train, with connections of every kind; the third one has no part in that."""
    group, said = dist.new_group([0, 2]), ""
    if dist.get_rank() != 1:
        model, optimizer = made(process_group=group, stage=3, overlap_step=True)
        for seed in range(3):
            train(model, optimizer, start=seed)
            optimizer.save_checkpoint(folder, async_save=True)
        optimizer.synchronize()
        said = (Path(folder) / "latest").read_text()
        optimizer.close()
    dist.barrier()
    return said


def test_a_part_of_the_ranks_trains_and_saves_beside_training(tmp_path: Path) -> None:
    assert run_world(3, in_part, [str(tmp_path)], timeout=30)[0] == ["step-00000003\n", "", "step-00000003\n"]
