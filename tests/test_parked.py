"""optimizer.parked(): memory is given back and taken again, and training goes on with the same bits."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from tests.models import DEVICE, GPT, batch, loss_of
from tests.resident import resident_nbytes
from tests.world import run_world
from zk import ZeroOptimizer, gather
from zk.core.parked import _device_storages, _shadows, _tensors
from zk.core.timeline import phase
from zk.offload.nvme import File
from zk.tools.metrics import Rates

pytestmark = pytest.mark.usefixtures("one_thread")
PLACES: dict[str, dict[str, Any]] = {
    "0": {"stage": 0},
    "1, fp32": {"stage": 1, "optimizer_tier": "host", "dtype": "fp32"},
    "2, bf16": {"stage": 2, "optimizer_tier": "host", "dtype": "bf16"},
    "2, in the background": {"stage": 2, "optimizer_tier": "host", "overlap_step": True},
    "2, in backward": {"stage": 2, "optimizer_tier": "host", "overlap_step": "backward", "dtype": "bf16"},
    "3, device": {"stage": 3, "dtype": "bf16"},
    "3, host": {"stage": 3, "param_tier": "host", "optimizer_tier": "host", "dtype": "bf16"},
    "3, nvme": {"stage": 3, "param_tier": "nvme", "optimizer_tier": "nvme"},
    "3, both": {"stage": 3, "param_tier": "host", "optimizer_tier": "nvme"},
}
HERE = list(PLACES)
if DEVICE.type == "cuda":  # what lies otherwise there than on a CPU
    PLACES["2, by the device"] = {"stage": 2, "optimizer_tier": "host", "dtype": "bf16", "update_on": "device"}
    HERE = ["2, in the background", "2, in backward", "2, by the device", "3, device", "3, host", "3, both"]


def made(folder: Path | str, model: nn.Module | None = None, **options: Any) -> ZeroOptimizer:
    torch.manual_seed(0)
    model = model or GPT().to(DEVICE)
    paths = {"nvme_path": str(folder)} if "nvme" in options.values() else {}
    return ZeroOptimizer(model, torch.optim.AdamW(model.parameters(), lr=1e-2), **options, **paths)


def train(optimizer: ZeroOptimizer, first: int, steps: int) -> list[float]:
    losses = []
    for index in range(first, first + steps):
        loss = loss_of(optimizer.model, batch(index))
        optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def values(optimizer: ZeroOptimizer) -> list[torch.Tensor]:
    optimizer.synchronize()
    return list(optimizer.consolidated_state_dict(dtype="fp32").values())


def on_both(place: str, folder: str) -> bool:
    """Train with and without having been parked, on a device also in host memory; True if all bits are the same."""
    found = []
    for parks, to_host in ((False, False), (True, False), *[(True, True)] * (DEVICE.type == "cuda")):
        optimizer = made(folder, **PLACES[place])
        losses = train(optimizer, 0, 2)
        assert (place == "2, in backward" or optimizer.assembly.stream is not None) == bool(list(_shadows(optimizer)))
        if parks:
            with optimizer.parked(None if to_host else folder):
                pass
            with optimizer.parked(None if to_host else folder), pytest.raises(RuntimeError, match="is parked"):
                optimizer.step()
        found.append((losses + train(optimizer, 2, 2), values(optimizer)))
        optimizer.close()
    (want, x), *others = found
    return all(losses == want and all(map(torch.equal, x, y)) for losses, y in others)


@pytest.mark.device
@pytest.mark.parametrize("place", HERE)
def test_training_goes_on_with_the_same_bits(place: str, tmp_path: Path) -> None:
    assert on_both(place, str(tmp_path))
    assert list(tmp_path.iterdir()) == []  # private files are gone


def on_rank(case: tuple[str, str]) -> bool:
    return on_both(*case)


def test_two_ranks_park_their_parts(tmp_path: Path) -> None:
    places = ("1, fp32", "3, host")
    assert run_world(2, on_rank, [(place, str(tmp_path)) for place in places]) == [[True, True]] * len(places)


def one_refuses(folder: str) -> str:
    optimizer = made(folder, **PLACES["3, host"])
    train(optimizer, 0, 1)
    want, refuses = values(optimizer), OSError(28, "No space left on device")
    with contextlib.ExitStack() as stack:
        if optimizer.comm.rank == 1:
            stack.enter_context(mock.patch.object(File, "wait", side_effect=refuses))
        with pytest.raises(OSError, match="No space left") as caught, optimizer.parked(folder):
            raise AssertionError("parked")
    assert all(map(torch.equal, want, values(optimizer)))
    train(optimizer, 1, 1)
    optimizer.close()
    return str(caught.value)


def test_where_one_rank_cannot_park_none_does(tmp_path: Path) -> None:
    ((first, second),) = run_world(2, one_refuses, [str(tmp_path)])
    assert "parked() has failed elsewhere, on rank 1: [Errno 28] No space left" in first and second.startswith("[Errno 28]"), (first, second)


def test_the_memory_is_given_back(tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(8)))  # 4 MiB each
    optimizer = made(tmp_path, model, stage=3, param_tier="host", optimizer_tier="host", units=[str(index) for index in range(8)])
    model(torch.ones(1, 1024)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    def there() -> int:
        return sum(map(resident_nbytes, _tensors(optimizer)))

    before = there()
    assert before >= 3 * 32 * 2**20  # parameters and moments, fp32
    with optimizer.parked(tmp_path):
        assert there() <= before / 100
        with pytest.raises(RuntimeError, match="is parked"):
            model.state_dict()
        assert sum(file.stat().st_size for file in tmp_path.rglob("parked*")) >= 3 * 32 * 2**20
    assert there() >= 3 * 32 * 2**20
    optimizer.close()


@pytest.mark.device_only
def test_device_memory_is_given_back(tmp_path: Path) -> None:
    optimizer = made(tmp_path, stage=2)
    train(optimizer, 0, 1)
    before, nbytes = torch.cuda.memory_allocated(), sum(storage.nbytes() for storage in _device_storages(optimizer))
    assert nbytes >= 12 * sum(param.numel() for param in optimizer.model.parameters())
    with optimizer.parked():
        assert before - torch.cuda.memory_allocated() >= nbytes
    train(optimizer, 1, 1)
    optimizer.close()


@pytest.mark.device_only
def test_states_that_stream_through_the_device_are_given_back_too(tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False, device=DEVICE) for _ in range(4)))
    optimizer = made(tmp_path, model, stage=2, optimizer_tier="host", update_on="device")
    arena, losses = optimizer.transfer.arena, []
    assert arena is not None

    def step() -> None:
        loss = model(torch.ones(1, 256, device=DEVICE)).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())

    step()
    before = sum(resident_nbytes(region.memory) for region in arena._regions)
    assert before >= 12 * 4 * 256 * 256 and all(region.pinned for region in arena._regions)
    with optimizer.parked(tmp_path):
        assert sum(resident_nbytes(region.memory) for region in arena._regions) <= before / 50
        assert not any(region.pinned for region in arena._regions)
    assert all(region.pinned for region in arena._regions)
    for _ in range(2):
        step()
    assert losses[0] > losses[1] > losses[2]
    optimizer.close()


@pytest.mark.parametrize("place", ("0", "3, host", "3, nvme"))
def test_the_model_is_refused_meanwhile(place: str, tmp_path: Path) -> None:
    optimizer = made(tmp_path, **PLACES[place])
    train(optimizer, 0, 1)
    param = next(optimizer.model.parameters())
    uses = {
        "forward": lambda: loss_of(optimizer.model, batch(0)),
        "read": lambda: param.sum(),
        "gather": lambda: gather(param).__enter__(),
        "state_dict": lambda: optimizer.model.state_dict()[next(iter(dict(optimizer.model.named_parameters())))].sum(),
        "step": optimizer.step,
        "save": lambda: optimizer.save_checkpoint(tmp_path / "saved"),
        "load": lambda: optimizer.load_checkpoint(tmp_path / "saved"),
        "state": lambda: optimizer.state[param]["exp_avg"],
        "again": lambda: optimizer.parked(tmp_path).__enter__(),
        "weights": optimizer.consolidated_state_dict,
    }
    with optimizer.parked(tmp_path):
        for name, use in uses.items():
            with pytest.raises(RuntimeError, match=r"is parked|released"):
                use()
                print("taken:", name)
        optimizer.metrics(), repr(optimizer)  # these are there
    train(optimizer, 1, 1)
    optimizer.close()


def test_an_error_inside_takes_the_memory_again(tmp_path: Path) -> None:
    optimizer = made(tmp_path, **PLACES["3, host"])
    train(optimizer, 0, 1)
    want = values(optimizer)
    with pytest.raises(ZeroDivisionError), optimizer.parked(tmp_path):
        raise ZeroDivisionError
    assert all(map(torch.equal, want, values(optimizer))) and list(tmp_path.iterdir()) == []
    train(optimizer, 1, 1)
    optimizer.close()


def test_a_drive_that_refuses_leaves_everything_as_it_was(tmp_path: Path) -> None:
    optimizer = made(tmp_path, **PLACES["2, bf16"])
    train(optimizer, 0, 1)
    want = values(optimizer)
    with mock.patch.object(File, "wait", side_effect=OSError(28, "No space left on device")), pytest.raises(OSError, match="No space"):
        optimizer.parked(tmp_path).__enter__()
    assert all(map(torch.equal, want, values(optimizer))) and list(tmp_path.iterdir()) == []
    with pytest.raises(NotADirectoryError, match=r"parked\(path=\) must be an existing folder"):
        optimizer.parked(tmp_path / "missing").__enter__()
    train(optimizer, 1, 1)
    optimizer.close()


def refused_until_loaded(optimizer: ZeroOptimizer, words: str, want: list[torch.Tensor], folder: Path) -> None:
    with pytest.raises(RuntimeError, match=words):
        train(optimizer, 1, 1)
    optimizer.load_checkpoint(folder / "saved")
    assert all(map(torch.equal, want, values(optimizer)))
    train(optimizer, 1, 1)
    optimizer.close()


def test_what_does_not_come_back_is_refused_until_a_checkpoint_is_loaded(tmp_path: Path) -> None:
    optimizer = made(tmp_path, **PLACES["3, host"])
    train(optimizer, 0, 1)
    optimizer.save_checkpoint(tmp_path / "saved")
    want = values(optimizer)
    with pytest.raises(OSError, match="not what was written there"), optimizer.parked(tmp_path):
        (file,) = tmp_path.rglob("parked*")
        with open(file, "r+b") as damaged:
            os.pwrite(damaged.fileno(), bytes(4096 * [255]), 0)
    refused_until_loaded(optimizer, r"parked has not come back \(OSError: .*load_checkpoint\(\) makes all of it whole again", want, tmp_path)


@pytest.mark.device
@pytest.mark.parametrize("to", [f"to {place}" for place in ("drive", "host")[: 1 + (DEVICE.type == "cuda")]])
def test_what_ctrl_c_has_not_let_come_back_is_refused(tmp_path: Path, to: str) -> None:
    optimizer = made(tmp_path, **PLACES["3, device" if to == "to host" else "3, host"])
    train(optimizer, 0, 1)
    optimizer.save_checkpoint(tmp_path / "saved")
    want, place = values(optimizer), None if to == "to host" else tmp_path
    ended = mock.patch("zk.core.parked._bytes_of" if place is None else "zk.offload.nvme.File.wait", side_effect=KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt), contextlib.ExitStack() as patched, optimizer.parked(place):
        patched.enter_context(ended)
    refused_until_loaded(optimizer, r"what was parked has not come back \(KeyboardInterrupt: ", want, tmp_path)


def test_what_cannot_be_parked_is_refused_by_name(tmp_path: Path) -> None:
    optimizer = made(tmp_path, **PLACES["0"])
    if DEVICE.type == "cpu":
        with pytest.raises(ValueError, match="here both are the same; give path=, a folder on a drive"):
            optimizer.parked().__enter__()
    optimizer.backward(loss_of(optimizer.model, batch(0)))
    with pytest.raises(RuntimeError, match=r"found gradients, .* call it between zero_grad\(\) and the next backward"):
        optimizer.parked(tmp_path).__enter__()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.close()
    with pytest.raises(RuntimeError, match="is closed"):
        optimizer.parked(tmp_path).__enter__()


def test_the_time_meanwhile_is_no_part_of_a_step(tmp_path: Path) -> None:
    model, made = nn.Sequential(*(nn.Linear(8, 8) for _ in range(2))), time.perf_counter()
    options: dict[str, Any] = {"stage": 3, "param_tier": "host", "optimizer_tier": "host", "device": "cpu"}
    with ZeroOptimizer(model, torch.optim.AdamW(model.parameters()), **options) as optimizer:
        rates = Rates(optimizer)
        for number in range(3):
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if number == 1:
                with optimizer.parked(tmp_path), phase("wait", "drive: of something else"):
                    time.sleep(0.5)
                    assert 2 * optimizer.metrics()["step_s"] <= time.perf_counter() - made - 0.5
        found, passed = rates.take(), time.perf_counter() - made
        assert 3 * found["step_s"] <= passed - 0.5 and found["wait_share"] + found["update_share"] <= 1
