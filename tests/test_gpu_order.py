"""Collectives on a GPU run on streams of their own: what they read and write is ordered by events, or not at all.

Results that are right show little, as kernels usually run in the order in which they are launched. So these tests need a device on which
an order that is missing is an error, such as the software GPU of these tests; on another one they compare bits only.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zk
from tests.models import GPT, batch, loss_of
from tests.world import run_world
from zk.parallel.comm import Group

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
Bits = tuple[list[float], list[bytes]]


def rank_device() -> torch.device:
    """The GPU of this rank."""
    return torch.device("cuda", dist.get_rank() % torch.cuda.device_count())


def train(options: dict[str, Any]) -> Bits:
    """Losses of three steps on this rank, and the model's bytes."""
    torch.manual_seed(0)
    model = GPT().to(rank_device())
    losses = []
    with zk.ZeroOptimizer(model, torch.optim.AdamW(model.parameters(), lr=1e-2), **options) as optimizer:
        for step in range(3):
            loss = loss_of(model, batch(2 * step + dist.get_rank()).to(rank_device()))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())  # reading it would wait for all that the device has been asked to do
        whole = optimizer.consolidated_state_dict()
    return [float(loss) for loss in losses], [value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for value in whole.values()]


def of_ranks(cases: list[dict[str, Any]]) -> list[Bits]:
    """What training gives on the first of two ranks, case by case; the parameters of both are equal."""
    table = run_world(2, train, cases, backend="nccl")
    for case, ranks in zip(cases, table, strict=True):
        for result in ranks:
            assert not isinstance(result, BaseException), f"{case}: {result}"
        assert ranks[0][1] == ranks[1][1], f"{case}: the ranks have different parameters"
    return [ranks[0] for ranks in table]


def test_forward_waits_for_the_gather_also_where_collectives_are_waited_for_at_once() -> None:
    options = {"stage": 3, "param_tier": "host", "optimizer_tier": "host"}
    overlapped, at_once = of_ranks([options, {**options, "overlap": False}])
    assert at_once == overlapped


def gathered_at_once(_: None) -> list[float]:
    """What a collective gives whose result nobody waits for."""
    group = Group(None, overlap=False)
    mine = torch.full((4,), 1.0 + dist.get_rank(), device=rank_device())
    full = torch.zeros(8, device=rank_device())
    pending = group.all_gather(0, full, mine)
    found = full.tolist()
    pending.wait()
    group.close()
    return found


def test_without_overlap_a_collective_is_over_where_it_has_been_started() -> None:
    assert run_world(2, gathered_at_once, [None], backend="nccl") == [[[1.0] * 4 + [2.0] * 4] * 2]


@pytest.mark.parametrize("stage", (1, 2))
def test_ranks_publish_what_the_device_has_updated_and_not_what_was_there_before(stage: int) -> None:
    options = {"stage": stage, "optimizer_tier": "auto", "dtype": "bf16"}
    # on the device: all optimizer state, or no more than parameters
    budgets = ("64MiB", 44_000)
    cases = [{**options, "device_budget": budget, "overlap_step": beside} for budget in budgets for beside in (False, True)]
    results = of_ranks(cases)
    for in_step, beside in zip(results[::2], results[1::2], strict=True):
        assert beside == in_step


def train_with_its_own_budget(case: tuple[int, int, bool]) -> Bits:
    smaller, larger, beside = case
    budget = smaller if dist.get_rank() else larger
    return train({"stage": 2, "optimizer_tier": "auto", "dtype": "bf16", "device_budget": budget, "overlap_step": beside})


def test_ranks_that_have_different_room_on_their_gpus_divide_their_state_alike() -> None:
    """Budgets stand in for free memory, of which no two GPUs have the same."""
    cases = [(70_000, 120_000, False), (80_000, 200_000, True)]
    for case, ranks in zip(cases, run_world(2, train_with_its_own_budget, cases, backend="nccl"), strict=True):
        for result in ranks:
            assert not isinstance(result, BaseException), f"{case}: {result}"
        assert ranks[0][1] == ranks[1][1], f"{case}: the ranks have different parameters"


def on_a_stream(tmp_path: Path, options: dict[str, Any]) -> list[list[float]]:
    """Losses with saves in the background, all of it on a stream of the user's: of the run, and of the one that goes on from the second save."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    found: list[list[float]] = []
    with torch.cuda.stream(stream):
        for resumed in (False, True):
            torch.manual_seed(0)
            model = GPT().cuda()
            folder = {"nvme_path": tmp_path} if options["optimizer_tier"] == "nvme" else {}
            optimizer = zk.ZeroOptimizer(model, torch.optim.AdamW(model.parameters(), lr=1e-2), dtype="bf16", **options, **folder)
            if resumed:
                optimizer.load_checkpoint(tmp_path / "step-00000002")
            losses = []
            for step in range(2 if resumed else 0, 4):
                loss = loss_of(model, batch(step).cuda())
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach())  # reading it would wait for all that the stream has been asked to do
                if not resumed:
                    optimizer.save_checkpoint(tmp_path, async_save=True)
            optimizer.close()
            found.append([float(loss) for loss in losses])
    torch.cuda.current_stream().wait_stream(stream)
    return found


@pytest.mark.parametrize(
    "options",
    (
        {"stage": 2, "optimizer_tier": "device"},
        {"stage": 2, "optimizer_tier": "host", "overlap_step": True},
        {"stage": 2, "optimizer_tier": "auto", "device_budget": 80_000, "overlap_step": True},
        {"stage": 3, "optimizer_tier": "host", "param_tier": "host"},
        {"stage": 3, "optimizer_tier": "nvme", "param_tier": "nvme", "overlap_step": True},
    ),
    ids=lambda options: f"{options['stage']}-{options['optimizer_tier']}",
)
def test_saves_beside_training_on_a_stream_of_the_users_read_what_that_stream_has_written(options: dict[str, Any], tmp_path: Path) -> None:
    unbroken, resumed = on_a_stream(tmp_path, options)
    assert unbroken[2:] == resumed
