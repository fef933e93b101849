"""Checkpoints of what a GPU trains: of one point in time, and resumed bit for bit, its random numbers included."""

import contextlib
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.core.test_checkpoint import EXACT, SETTINGS, Made, differ, make, overtaken, snapshot, train
from tests.models import batch, loss_of, small_chunks
from tests.world import run_world

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
SETTINGS |= {"3-auto": {"stage": 3, "optimizer_tier": "auto", "device_budget": 40_000}}


def noisy(setting: str, folder: Path, **options: Any) -> Made:
    """A model whose losses depend on the GPU's random numbers."""
    run = make(setting, folder, **options)
    for block in run[0].blocks:
        block.register_forward_hook(lambda module, args, output: nn.functional.dropout(output, 0.2))
    return run


@pytest.mark.parametrize(
    ("setting", "other", "room"),
    [
        *(("2-host", "3-auto", None), ("3-nvme", "0-host", None)),
        *(("1-device", "3-host", 60_000), ("3-auto", "3-host", 0), ("3-nvme", "3-host", 1 << 30)),  # beside training
    ],
)
@small_chunks()
def test_training_goes_on_as_if_it_had_not_stopped_from_what_was_when_a_save_was_asked_for(
    setting: str, other: str, room: int | None, tmp_path: Path
) -> None:
    run = noisy(setting, tmp_path)
    train(*run, 0, 2)
    halfway = snapshot(*run[:2])
    with contextlib.nullcontext() if room is None else overtaken(room):
        run[1].save_checkpoint(tmp_path / "saved", scheduler=run[2], async_save=room is not None)
        drawn = random.random(), np.random.rand(), torch.rand(1).item()
        losses = train(*run, 2, 4)
        run[1].synchronize()
        want = snapshot(*run[:2])
        run[1].close()
    run = noisy(other, tmp_path)
    loss_of(run[0], batch(5)).backward()  # a gradient that nobody wants
    run[1].load_checkpoint(tmp_path / "saved", scheduler=run[2])
    assert (random.random(), np.random.rand(), torch.rand(1).item()) == drawn
    assert differ(snapshot(*run[:2]), halfway) == []
    assert train(*run, 2, 4) == losses and differ(snapshot(*run[:2]), want) == []
    run[1].close()


def resumed_in_ranks(folder: str) -> tuple[list[float], list[float]]:
    """Losses after a save, and after resuming from it."""
    run = noisy("3-host", Path(folder), **EXACT)
    torch.cuda.manual_seed(dist.get_rank())
    train(*run, 0, 2)
    run[1].save_checkpoint(folder, scheduler=run[2])
    losses = train(*run, 2, 4)
    run[1].load_checkpoint(folder, scheduler=run[2])
    return losses, train(*run, 2, 4)


def test_ranks_resume_with_random_numbers_of_their_own(tmp_path: Path) -> None:
    (((first, again), (other, others_again)),) = run_world(2, resumed_in_ranks, [str(tmp_path)], timeout=120)
    assert first == again and other == others_again and first != other


@pytest.mark.parametrize("beside", (False, True))
def test_what_the_users_own_stream_has_just_written_is_saved(beside: bool, tmp_path: Path) -> None:
    with torch.cuda.stream(torch.cuda.Stream()):
        run = make("1-device", tmp_path)
        train(*run, 0, 1)
        run[0].seen.fill_(7)
        with torch.no_grad():
            run[0].head.weight.fill_(0.25)
        run[1].save_checkpoint(tmp_path / "saved", async_save=beside)
        run[1].synchronize()
        want = snapshot(*run[:2])
        run[1].close()
    run = make("3-host", tmp_path)
    run[1].load_checkpoint(tmp_path / "saved")
    found = snapshot(*run[:2])
    assert differ({**found, "groups": 0}, {**want, "groups": 0}) == []
    assert found["seen"].tolist() == [7.0] * 3 and (found["head.weight"] == 0.25).all()
