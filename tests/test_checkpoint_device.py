"""Checkpoints of what a GPU trains: they are of one point in time, and resume bit for bit, its random numbers included."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.models import batch, loss_of
from tests.test_checkpoint import (
    EXACT,
    SETTINGS,
    Made,
    SlowWriter,
    check_save_beside_training,
    check_what_the_user_wrote,
    make,
    same,
    snapshot,
    train,
)
from tests.world import run_world
from zk.checkpoint import save
from zk.offload import spill

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def make_noisy(setting: str, folder: Path, **options: Any) -> Made:
    """A model whose losses depend on the GPU's random numbers."""
    model, optimizer, scheduler = make(setting, folder, **options)
    for block in model.blocks:
        block.register_forward_hook(lambda module, args, output: nn.functional.dropout(output, 0.2))
    return model, optimizer, scheduler


# ---- resuming ----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of 5 steps, and the state after them."""
    model, optimizer, scheduler = make_noisy("2-host-overlapped", tmp_path_factory.mktemp("unbroken"))
    losses = train(model, optimizer, scheduler, 0, 5)
    state = snapshot(model, optimizer)
    optimizer.close()
    return losses, state


@pytest.mark.parametrize("setting", SETTINGS)
def test_training_goes_on_as_if_it_had_not_stopped_whatever_it_goes_on_as(
    setting: str, unbroken: tuple[list[float], dict[str, Tensor]], tmp_path: Path
) -> None:
    losses, state = unbroken
    with mock.patch.object(spill, "CHUNK_NUMEL", 2048):
        model, optimizer, scheduler = make_noisy(setting, tmp_path)
        assert train(model, optimizer, scheduler, 0, 3) == losses[:3]
        folder = optimizer.save_checkpoint(tmp_path / "saved", scheduler=scheduler, extra={"epoch": 1, "at": [2, 3]})
        halfway = snapshot(model, optimizer)
        random.seed(1), np.random.seed(1)
        optimizer.save_checkpoint(tmp_path / "saved", scheduler=scheduler, extra={"epoch": 1, "at": [2, 3]})  # once more, over it
        drawn = random.random(), np.random.rand(), torch.rand(1).item()
        optimizer.close()
        assert folder == tmp_path / "saved" / "step-00000003"

        for other in SETTINGS if setting == "2-host-overlapped" else ("3-nvme",):
            model, optimizer, scheduler = make_noisy(other, tmp_path)
            train(model, optimizer, scheduler, 90, 91)  # something else, and a gradient that nobody wants
            loss_of(model, batch(5)).backward()
            assert optimizer.load_checkpoint(tmp_path / "saved", scheduler=scheduler) == {"epoch": 1, "at": [2, 3]}
            assert (random.random(), np.random.rand(), torch.rand(1).item()) == drawn
            assert same(snapshot(model, optimizer), halfway) == []
            assert train(model, optimizer, scheduler, 3, 5) == losses[3:]
            assert same(snapshot(model, optimizer), state) == []
            assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-2 * 0.9**5)
            optimizer.close()


def resume_in_ranks(case: tuple[str, str]) -> tuple[list[float], list[float], list[str]]:
    """Losses after a save in the background, those after resuming from it, and what differs in the end."""
    setting, root = case
    with tempfile.TemporaryDirectory() as drive, mock.patch.object(save, "Writer", SlowWriter):
        model, optimizer, scheduler = make_noisy(setting, Path(drive), **EXACT)
        torch.cuda.manual_seed(torch.distributed.get_rank())  # each rank has random numbers of its own
        train(model, optimizer, scheduler, 0, 2)
        optimizer.save_checkpoint(root, scheduler=scheduler, async_save=True)
        losses = train(model, optimizer, scheduler, 2, 4)
        state = snapshot(model, optimizer)
        optimizer.close()
        model, optimizer, scheduler = make_noisy(setting, Path(drive), **EXACT)
        optimizer.load_checkpoint(root, scheduler=scheduler)
        again = train(model, optimizer, scheduler, 2, 4)
        found = same(snapshot(model, optimizer), state)
        optimizer.close()
    return losses, again, found


def test_ranks_resume_with_random_numbers_of_their_own(tmp_path: Path) -> None:
    cases = [(setting, str(tmp_path / setting)) for setting in ("2-host-overlapped", "3-host")]
    for case, ranks in zip(cases, run_world(2, resume_in_ranks, cases, timeout=120), strict=True):
        for losses, again, found in ranks:
            assert losses == again and found == [], case
        assert ranks[0][0] != ranks[1][0]


# ---- saving in the background ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "room"),
    [*((setting, "some") for setting in ("0-host", "1-device", "3-host", "3-nvme")), ("2-host-overlapped", "none"), ("2-host-overlapped", "plenty")],
)
def test_a_save_beside_training_is_the_state_when_it_was_asked_for(setting: str, room: str, tmp_path: Path) -> None:
    check_save_beside_training(setting, room, tmp_path, make_noisy)


@pytest.mark.parametrize("beside", (False, True))
def test_what_the_users_own_stream_has_just_written_is_saved(beside: bool, tmp_path: Path) -> None:
    with torch.cuda.stream(torch.cuda.Stream()):
        model, optimizer, scheduler = make("1-device", tmp_path)
        train(model, optimizer, scheduler, 0, 1)
        loss_of(model, batch(1)).backward()
        optimizer.step()
        model.seen.fill_(7)
        optimizer.save_checkpoint(tmp_path / "saved", async_save=beside)
        optimizer.synchronize()
        want = snapshot(model, optimizer)
        optimizer.close()
    model, optimizer, _ = make("3-host", tmp_path)
    optimizer.load_checkpoint(tmp_path / "saved")
    assert same(snapshot(model, optimizer), want) == [] and model.seen.tolist() == [7.0] * 3


def test_what_the_user_wrote_since_the_last_step_is_saved(tmp_path: Path) -> None:
    check_what_the_user_wrote(tmp_path)
