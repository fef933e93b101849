"""optimizer.parked(): memory that is given back and taken again, with the same bits; what is refused inside, and what goes wrong."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import nn

import zk
from tests.models import DEVICE, GPT, batch, loss_of, step
from tests.parity import DTYPES, Case, make_optimizer
from tests.world import run_world
from zk import store
from zk.addons import parked
from zk.offload.cpu_adam import default_engine

pytestmark = pytest.mark.usefixtures("torch_engine", "one_thread")

CASES = [
    *(Case(stage=stage, dtype="bf16", tier=tier) for stage in (0, 1, 2, 3) for tier in ("device", "host", "nvme")),
    *(Case(stage=stage, dtype=dtype, tier="nvme") for stage in (1, 3) for dtype in ("fp16", "fp32")),
    Case(stage=0, dtype="fp16", no_sync=True),
    Case(stage=2, no_sync=True, tier="nvme"),
    Case(stage=3, dtype="bf16", no_sync=True),
    Case(stage=2, dtype="bf16", model="frozen"),
    Case(stage=3, dtype="bf16", model="frozen", tier="nvme"),
    Case(stage=3, dtype="bf16", model="tied", params="device"),
    Case(stage=3, dtype="bf16", model="checkpointed", tier="nvme", overlap_step=True),
    Case(stage=1, optimizer="two"),
    Case(stage=3, dtype="bf16", tier="device", params="host", optimizer="two"),
]


def made(case: Case, model: nn.Module, folder: str) -> zk.ZeroOptimizer:
    params = list(model.parameters())
    inner: Any = make_optimizer("AdamW", params)
    if case.optimizer == "two":
        inner = [torch.optim.SGD(params[:3], lr=0.1, momentum=0.9), torch.optim.AdamW(params[3:], lr=1e-2)]
    return zk.ZeroOptimizer(
        model,
        inner,
        stage=case.stage,
        dtype=case.dtype,
        optimizer_tier=case.tier,
        param_tier=(case.params or case.tier) if case.stage == 3 else "device",
        nvme_path=folder if case.tier == "nvme" else None,
        clip_grad_norm=0.5,
        overlap_step=case.overlap_step,
        loss_scale=zk.DynamicLossScale(init=2.0**30, factor=2.0**10, hysteresis=1) if case.dtype == "fp16" else None,
    )


Park = Callable[[zk.ZeroOptimizer, nn.Module, str], None]


def trained(case: Case, park: Park | None) -> dict[str, Any]:
    """Losses, counts, states and parameters after three steps, with ``park`` wherever a user may call it."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    torch.manual_seed(0)
    model, losses = GPT(case.model), []
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(store, "CHUNK_NUMEL", 2048):
        optimizer = made(case, model, folder)

        def pause() -> None:
            if park is not None:
                park(optimizer, model, folder)

        for number in range(3):
            for micro in range(2):
                pause()
                with optimizer.no_sync() if case.no_sync and not micro else contextlib.nullcontext():
                    loss = loss_of(model, batch(100 * number + 10 * micro + rank))
                    optimizer.backward(loss)
                losses.append(loss.item())
            pause()
            if number:
                torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], 0.1)
                pause()
            optimizer.step()
            pause()  # with gradients that step() has used, or an update in flight
            optimizer.zero_grad()
        states = optimizer.state_dict()
        with zk.gather(model.parameters()):
            params = [param.detach().cpu().clone() for param in model.parameters()]
        optimizer.close()
    flat = {f"{key}.{name}": value for key, state in states["state"].items() for name, value in state.items()}
    counts = {"losses": losses, "skipped": optimizer.skipped_steps, "norm": optimizer.norm, "groups": states["param_groups"]}
    return counts | flat | dict(enumerate(params))  # type: ignore[arg-type]


@functools.cache
def unparked(case: Case) -> dict[str, Any]:
    return trained(case, None)


def wanted(case: Case) -> dict[str, Any]:
    """Without parking; on one rank neither stage nor tier change a bit."""
    tier = "device" if case.tier == "device" else "host"  # a device's kernel has other bits than torch's update on the host
    alike = dataclasses.replace(case, stage=2, tier=tier, params="", no_sync=False, overlap_step=False)
    return unparked(case if dist.is_initialized() else alike)


def unlike(got: dict[Any, Any], want: dict[Any, Any]) -> list[Any]:
    """The names of what differs."""
    pairs = {name: (got.get(name), want.get(name)) for name in got | want}
    return [name for name, (one, other) in pairs.items() if not (torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other)]


def park_all(optimizer: zk.ZeroOptimizer, model: nn.Module, folder: str) -> None:
    """On a drive, and where there is a device in host memory too; as somebody who generates."""
    for path in (folder, None)[: 2 if DEVICE.type == "cuda" else 1]:
        before = os.listdir(folder)
        with torch.inference_mode(), optimizer.parked(path):
            assert all(param.isnan().all() for param in model.parameters()) and os.listdir(folder) == before


def differences(case: Case) -> list[Any]:
    with mock.patch.dict(os.environ, {"ZK_CPU_ADAM": "torch"}):
        default_engine.cache_clear()
        return unlike(trained(case, park_all), wanted(case))


@pytest.mark.device
@pytest.mark.parametrize("case", CASES, ids=str)
def test_training_goes_on_with_the_same_bits(case: Case) -> None:
    assert differences(case) == []


def test_ranks_park_together() -> None:
    cases = [case for case in CASES if case.no_sync or case == Case(stage=1, optimizer="two") or (case.tier == "nvme" and case.dtype == "bf16")]
    table = run_world(2, differences, cases, timeout=120)
    assert {str(case): rows for case, rows in zip(cases, table, strict=True) if rows != [[], []]} == {}


def one_fails(case: Case) -> list[Any]:
    """The first rank's drive is full when it is about to park, or what it does inside fails: the other one goes on alike."""
    said = []

    def full(optimizer: zk.ZeroOptimizer, model: nn.Module, folder: str) -> None:
        with contextlib.ExitStack() as stack:
            if dist.get_rank() == 0:
                stack.enter_context(mock.patch.object(parked, "TemporaryFile", lambda dir: open("/dev/full", "r+b")))  # noqa: SIM115
            with pytest.raises(OSError, match="No space left"), optimizer.parked(folder):
                said.append("parked")
        with contextlib.suppress(KeyError), optimizer.parked(folder):
            if dist.get_rank() == 0:
                raise KeyError

    with mock.patch.dict(os.environ, {"ZK_CPU_ADAM": "torch"}):
        default_engine.cache_clear()
        return said + unlike(trained(case, full), wanted(case))


def test_where_one_rank_cannot_none_does_and_an_error_of_one_is_its_own() -> None:
    cases = [Case(stage=1), Case(stage=3, dtype="bf16", tier="nvme")]
    assert run_world(2, one_fails, cases, timeout=120) == [[[], []], [[], []]]


def test_memory_is_given_back_and_taken_again(tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Linear(1024, 1024, device=DEVICE) for _ in range(4)))
    optimizer = zk.ZeroOptimizer(model, torch.optim.AdamW(model.parameters()), stage=2, units=[nn.Linear])
    x = torch.ones(2, 1024, device=DEVICE)
    for _ in range(2):
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    model(x).sum().backward()
    process, nbytes = psutil.Process(), 4 * 2**20 * 4 * 4  # parameters, which are masters, two moments, and gradient
    before = process.memory_info().rss
    with optimizer.parked(tmp_path):
        inside = process.memory_info().rss
    assert before - inside > 0.9 * nbytes < process.memory_info().rss - inside


# ---- what is refused -------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [Case(stage=0), Case(stage=2, dtype="fp16"), Case(stage=3, dtype="bf16", tier="nvme")], ids=str)
def test_what_needs_states_or_parameters_is_refused_inside_and_changes_nothing(case: Case, tmp_path: Path) -> None:
    saved: dict[str, Any] = {}

    def refused(optimizer: zk.ZeroOptimizer, model: Any, folder: str) -> None:
        checkpoint, ids = tmp_path / "saved", batch(0)
        if not checkpoint.exists():
            optimizer.save_checkpoint(checkpoint)
            saved.update(optimizer.state_dict())
        groups = [dict(group) for group in optimizer.param_groups]

        def gathered(**kind: Any) -> None:
            with zk.gather(model.parameters(), **kind):
                pass

        calls: dict[str, Callable[[], Any]] = {
            "step": optimizer.step,
            "clip": lambda: optimizer.clip_grad_norm_(1.0),
            "synchronize": optimizer.synchronize,
            "state_dict": optimizer.state_dict,
            "load_state_dict": lambda: optimizer.load_state_dict(saved),
            "save_checkpoint": lambda: optimizer.save_checkpoint(tmp_path / "another"),
            "load_checkpoint": lambda: optimizer.load_checkpoint(checkpoint),
            "consolidated_state_dict": optimizer.consolidated_state_dict,
            "close": lambda: optimizer.close(),
            "exit": lambda: optimizer.__exit__(KeyError),
            "forward": lambda: model(ids),
            "gather": gathered,
            "master": lambda: gathered(kind="master"),
            "parked": lambda: optimizer.parked(folder).__enter__(),
        }
        if model.head.weight.grad is not None:
            calls["grad"] = lambda: model.head.weight.grad.norm()
        with optimizer.parked(folder):
            for name, call in calls.items():
                with pytest.raises(RuntimeError, match="is parked: leave"):
                    print(name, call())
        assert not (tmp_path / "another").exists() and [dict(group) for group in optimizer.param_groups] == groups

    assert unlike(trained(case, refused), trained(case, None)) == []


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_backward_inside_is_refused_and_a_graph_lives_through_it(stage: int, tmp_path: Path) -> None:
    found = []
    for parks in (False, True):
        torch.manual_seed(0)
        model = GPT()
        optimizer = made(Case(stage=stage), model, "")
        step(model, optimizer)
        loss, other = loss_of(model, batch(1)), loss_of(model, batch(1))
        if parks:
            with optimizer.parked(tmp_path), pytest.raises(RuntimeError, match="is parked: leave"):
                other.backward()
            optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        optimizer.close()
        found.append({name: param.detach().clone() for name, param in model.named_parameters()})
    assert unlike(*found) == []


def test_where_it_cannot_be_right_it_is_refused_before_anything_is_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(optimizer: zk.ZeroOptimizer, model: nn.Module, folder: str) -> None:
        if DEVICE.type == "cpu":
            with pytest.raises(ValueError, match="needs path=, a folder"), optimizer.parked():
                pass
        with pytest.raises(FileNotFoundError, match="nowhere"), optimizer.parked(tmp_path / "nowhere"):
            pass
        with zk.gather(model.parameters()), pytest.raises(RuntimeError, match=r"leave zk\.gather"), optimizer.parked(tmp_path):
            pass
        with monkeypatch.context() as patch:
            patch.setattr(parked, "TemporaryFile", lambda dir: open("/dev/full", "r+b"))  # noqa: SIM115
            with pytest.raises(OSError, match="No space left"), optimizer.parked(tmp_path):
                pass

    assert unlike(trained(Case(stage=3, dtype="bf16"), wrong), trained(Case(stage=3, dtype="bf16"), None)) == []


# ---- what goes wrong -------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [1, 3])
def test_an_error_inside_restores_all_and_so_does_another_try_once_there_is_memory(stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(optimizer: zk.ZeroOptimizer, model: nn.Module, folder: str) -> None:
        with pytest.raises(KeyError, match="inside"), optimizer.parked(folder):
            raise KeyError("inside")

        def full(*_: Any) -> Any:
            raise MemoryError("no memory")

        with monkeypatch.context() as patch:
            patch.setattr(parked, "empty", full)
            with pytest.raises(RuntimeError, match=r"has not come back: MemoryError.*still there: free memory"), optimizer.parked(folder):
                pass
            for call in (optimizer.step, optimizer.state_dict, optimizer.synchronize, lambda: model(batch(0))):
                with pytest.raises(RuntimeError, match="has not come back"):
                    call()
            assert all(param.isnan().all() for param in model.parameters())
        optimizer.synchronize()

    case = Case(stage=stage, dtype="bf16", tier="nvme" if stage == 3 else "host")
    assert unlike(trained(case, fails), trained(case, None)) == []


def test_a_drive_that_lies_is_heard_and_nothing_is_trained_on(tmp_path: Path) -> None:
    model = GPT()
    optimizer = made(Case(stage=2), model, "")
    step(model, optimizer)
    parking = optimizer.parked(tmp_path)
    with pytest.raises(RuntimeError, match=r"has not come back: OSError.*other bytes"), parking:
        os.pwrite(parking.file.fileno(), b"else", 128)
    for call in (optimizer.step, optimizer.close):
        with pytest.raises(RuntimeError, match="other bytes"):
            call()
    assert DTYPES["fp32"] is model.head.weight.dtype and model.head.weight.isnan().all()


@pytest.mark.parametrize("stage", [2, 3])
def test_what_is_written_to_parameters_inside_is_lost_by_name_and_the_rest_is_as_it_was(stage: int) -> None:
    def writes(optimizer: zk.ZeroOptimizer, model: Any, folder: str) -> None:
        with pytest.raises(RuntimeError, match=r"change \['norm.bias'\] after parked"), optimizer.parked(folder):
            model.norm.bias.data = torch.zeros(24, device=DEVICE)

    case = Case(stage=stage)
    assert unlike(trained(case, writes), trained(case, None)) == []
