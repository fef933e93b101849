"""optimizer.parked(): memory that is given back and taken again, with the same bits; what is refused inside, and what goes wrong."""

import contextlib
import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import nn

import zk
from tests.addons.common import faults_of_ranks, told
from tests.models import DEVICE, GPT, batch, descend, loss_of, small_chunks, step
from tests.parity import halved, place, trained
from zk.addons import parked

pytestmark = pytest.mark.usefixtures("torch_engine")
Park = Callable[[zk.ZeroOptimizer, Any, str], None]
Case = tuple[Park, str, dict[str, Any]]  # where it is parked, the place, and options


def program(park: Park | None, model: GPT, optimizer: zk.ZeroOptimizer, number: int) -> None:
    """Two steps of two micro-batches, the last one within no_sync() and but for step(), with ``park`` wherever a user may call it."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    with tempfile.TemporaryDirectory() as folder:
        pause = partial(park, optimizer, model, folder) if park else bool
        for part in range(2):
            for micro in range(2):
                pause()
                loss = loss_of(model, batch(100 * part + 10 * micro + rank))
                pause()
                with optimizer.no_sync() if part > micro else contextlib.nullcontext():
                    optimizer.backward(loss)
            pause()
            if part:
                nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], 0.1)
                pause()
            else:
                optimizer.step()
                pause()  # with gradients that step() has used, or an update in flight
                optimizer.zero_grad()


def differing(case: Case) -> list[str]:
    """What is trained otherwise than without parking, by number, and how much: by rounding, or from other values."""
    park, name, options = case
    with tempfile.TemporaryDirectory() as folder, small_chunks():
        found = [trained(partial(program, one), 1, **place(name, Path(folder)), **options) for one in (None, park)]
        assert "loss_scale" not in options or found[0][-1] == 1
    pairs = enumerate(zip(*found, strict=True))
    return [f"{number}: by up to {(one.float() - other.float()).abs().max()}" for number, (one, other) in pairs if not torch.equal(one, other)]


def park_all(optimizer: zk.ZeroOptimizer, model: Any, folder: str) -> None:
    """On a drive, and where there is a device in host memory too; as somebody who generates."""
    for path in (folder, None)[: 2 if DEVICE.type == "cuda" else 1]:
        before = os.listdir(folder)
        with torch.inference_mode(), optimizer.parked(path):
            assert all(param.isnan().all() for param in model.parameters()) and os.listdir(folder) == before


def refused(optimizer: zk.ZeroOptimizer, model: Any, folder: str) -> None:
    """What needs states or parameters is refused inside, and changes nothing."""
    checkpoint, ids = Path(folder, "saved"), batch(0)
    if not checkpoint.exists():
        optimizer.save_checkpoint(checkpoint)
    groups, saved = [dict(group) for group in optimizer.param_groups], optimizer.state_dict()
    calls: list[Callable[[], Any]] = [
        *(optimizer.step, optimizer.synchronize, optimizer.state_dict, optimizer.consolidated_state_dict),
        lambda: optimizer.clip_grad_norm_(1.0),
        lambda: optimizer.load_state_dict(saved),
        lambda: optimizer.save_checkpoint(Path(folder, "another")),
        lambda: optimizer.load_checkpoint(checkpoint),
        lambda: optimizer.close(),
        lambda: optimizer.__exit__(KeyError),
        lambda: model(ids),
        lambda: zk.gather(model.parameters()).__enter__(),
        lambda: zk.gather(model.parameters(), kind="master").__enter__(),
        lambda: optimizer.parked(folder).__enter__(),
    ]
    has_grad = model.head.weight.grad is not None
    calls.append((lambda: model.head.weight.grad.norm()) if has_grad else partial(optimizer.backward, loss_of(model, ids)))
    with optimizer.parked(folder):
        for number, refuses in enumerate(calls):
            with pytest.raises(RuntimeError, match="is parked: leave"):
                print(number, refuses())
    if not has_grad:
        optimizer.zero_grad()
    assert not Path(folder, "another").exists() and [dict(group) for group in optimizer.param_groups] == groups


def full() -> Any:
    return mock.patch.object(parked, "TemporaryFile", lambda dir: open("/dev/full", "r+b"))


def wrong(optimizer: zk.ZeroOptimizer, model: Any, folder: str) -> None:
    """Where it cannot be right it is refused before anything is given back."""
    if DEVICE.type == "cpu":
        with pytest.raises(ValueError, match="needs path=, a folder"), optimizer.parked():
            pass
    with pytest.raises(FileNotFoundError, match="nowhere"), optimizer.parked(Path(folder, "nowhere")):
        pass
    with zk.gather(model.parameters()), pytest.raises(RuntimeError, match=r"leave zk\.gather"), optimizer.parked(folder):
        pass
    with full(), pytest.raises(OSError, match="No space left"), optimizer.parked(folder):
        pass


def fails(optimizer: zk.ZeroOptimizer, model: Any, folder: str) -> None:
    """An error inside restores all, and so does another try once there is memory."""
    with pytest.raises(KeyError, match="inside"), optimizer.parked(folder):
        raise KeyError("inside")
    with mock.patch.object(parked, "empty", side_effect=MemoryError("no memory")):
        with pytest.raises(RuntimeError, match=r"has not come back: MemoryError.*still there: free memory"), optimizer.parked(folder):
            pass
        for refuses in (optimizer.step, optimizer.state_dict, optimizer.synchronize, lambda: model(batch(0))):
            with pytest.raises(RuntimeError, match="has not come back"):
                refuses()
        assert all(param.isnan().all() for param in model.parameters())
    optimizer.synchronize()


def writes(optimizer: zk.ZeroOptimizer, model: Any, folder: str) -> None:
    """What is written to parameters inside is lost by name, and the rest is as it was."""
    with pytest.raises(RuntimeError, match=r"change \['norm.bias'\] after parked"), optimizer.parked(folder):
        model.norm.bias.data = torch.zeros(24, device=DEVICE)


FP16 = {"dtype": "fp16", "loss_scale": zk.DynamicLossScale(init=2.0**24, factor=2.0**10, hysteresis=1)}  # the first step overflows
CASES: list[Case] = [
    (park_all, "0 device", {}),
    (park_all, "1 host", FP16),
    (park_all, "2 nvme", {"model": "frozen"}),
    (park_all, "3 device host", {"kind": torch.optim.SGD}),
    (park_all, "3 host device", {"model": "tied", "dtype": "fp32"}),
    (park_all, "3 nvme", FP16),
    (park_all, "3 nvme", {"model": "checkpointed", "overlap_step": True, "state_dtype": "8bit"}),
    (refused, "0 host", {}),
    (refused, "3 nvme", FP16),
    (wrong, "3 host", {}),
    (fails, "1 host", {}),
    (fails, "3 nvme", {}),
    (writes, "2 host", {}),
    (writes, "3 host", {}),
]


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.device] * (case[0] is park_all)) for case in CASES], ids=lambda case: "-".join(map(told, case))
)
def test_training_goes_on_with_the_same_bits(case: Case) -> None:
    assert differing(case) == []


def one_fails(optimizer: zk.ZeroOptimizer, model: Any, folder: str) -> None:
    """The first rank's drive is full when it is about to park, or what it does inside fails: the other one goes on alike."""
    with contextlib.ExitStack() as stack:
        if dist.get_rank() == 0:
            stack.enter_context(full())
        with pytest.raises(OSError, match="No space left"), optimizer.parked(folder):
            pass
    with contextlib.suppress(KeyError), optimizer.parked(folder):
        if dist.get_rank() == 0:
            raise KeyError


def test_ranks_park_together_and_where_one_cannot_none_does() -> None:
    assert faults_of_ranks(2, differing, [CASES[1], *CASES[4:7], (one_fails, "1 host", {}), (one_fails, "3 nvme", {})]) == {}


def test_memory_is_given_back_and_taken_again(tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Linear(1024, 1024, device=DEVICE) for _ in range(4)))
    optimizer = zk.ZeroOptimizer(model, torch.optim.AdamW(model.parameters()), stage=2, units=[nn.Linear])
    ones = torch.ones(2, 1024, device=DEVICE)
    for _ in range(2):
        descend(optimizer, model(ones).sum())
    model(ones).sum().backward()
    process, nbytes = psutil.Process(), 4 * 2**20 * 4 * 4  # parameters, which are masters, two moments, and gradient
    before = process.memory_info().rss
    with optimizer.parked(tmp_path):
        inside = process.memory_info().rss
    assert before - inside > 0.9 * nbytes < process.memory_info().rss - inside


def test_a_drive_that_lies_is_heard_and_nothing_is_trained_on(tmp_path: Path) -> None:
    model, optimizer = halved(dtype=None)
    step(model, optimizer)
    parking = optimizer.parked(tmp_path)
    with pytest.raises(RuntimeError, match=r"has not come back: OSError.*other bytes"), parking:
        os.pwrite(parking.file.fileno(), b"else", 128)
    for refuses in (optimizer.step, optimizer.close):
        with pytest.raises(RuntimeError, match="other bytes"):
            refuses()
    assert model.head.weight.dtype == torch.float32 and model.head.weight.isnan().all()
