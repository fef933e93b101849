"""The programs of test_user_programs.py with two ranks, each of which has half of a batch."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import zk
from tests.test_user_programs import fault
from tests.user_programs import PROGRAMS, Case
from tests.world import run_world

TOGETHER = (*(Case(stage, 2) for stage in range(4)), Case(2, 2, "host", overlap_step=True), Case(3, 2, "nvme"), Case(2, 2, sgd=True))


def case_of(name: str) -> Case:
    """One of the cases, another for the next program."""
    return TOGETHER[list(PROGRAMS).index(name) % len(TOGETHER)]


def of_a_rank(names_and_drive: tuple[list[str], str]) -> list[str]:
    names, drive = names_and_drive
    return [found for name in names if (found := fault(name, case_of(name), dist.get_rank(), drive))]


def test_two_ranks(tmp_path: Path) -> None:
    for faults in run_world(2, of_a_rank, [(list(PROGRAMS), str(tmp_path))])[0]:
        assert not faults, "\n".join(faults)


def of_one_rank_only(_: None) -> str:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = zk.ZeroOptimizer(model, torch.optim.AdamW(model.parameters()), stage=2)
    model(torch.ones(2, 4)).sum().backward()
    try:
        if dist.get_rank() == 0:
            assert model.weight.grad is not None
        else:
            optimizer.step()
            optimizer.save_checkpoint("never")
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_a_gradient_that_one_rank_only_reads_is_an_error_that_names_both() -> None:
    found = run_world(2, of_one_rank_only, [None])[0]
    assert all("rank" in message and "'" in message for message in found), found
