"""Delayed updates: each step applies the gradients of the one before, to the bit, at every stage and on every tier."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zk
from benchmarks.throttled import ThrottledLink, pretend
from tests import softgpu
from tests.models import DEVICE, GPT, batch, loss_of
from tests.parity import Case, run_case
from tests.world import run_world
from zk.core.precision import DynamicLossScale


def case_of(stage: int, tier: str, overlap_step: bool, delay: int, **more: Any) -> Case:
    return Case(stage=stage, tier=tier, overlap_step=overlap_step, delay=delay, steps=3 + (delay > 0), **{"dtype": "bf16", **more})


# each with one process or with two: ranks add up and divide what is late as they do what is not
ELSEWHERE = {"accumulation": 2, "model": "elsewhere"}
HOST = {
    1: [
        case_of(0, "host", False, 0),
        case_of(0, "host", True, 2, **ELSEWHERE),
        case_of(0, "device", False, 1, optimizer="Adam", dtype="fp32"),
        case_of(3, "host", False, 0),
        case_of(3, "nvme", False, 0, model="sometimes"),
    ],
    2: [
        case_of(2, "host", True, 2, **ELSEWHERE),
        case_of(2, "nvme", False, 0, model="sometimes"),
        case_of(3, "host", True, 2, **ELSEWHERE),
        case_of(3, "nvme", True, 0, adversary=True),
    ],
}
SOFTWARE_GPU = {1: HOST[1][1:3] + HOST[1][4:], 2: HOST[2][2:]}


@pytest.mark.device
@pytest.mark.parametrize("world", (1, 2))
def test_trains_what_plain_torch_trains_with_the_same_delay(world: int) -> None:
    cases = (SOFTWARE_GPU if softgpu.installed() else HOST)[world]
    table = run_world(world, run_case, cases, timeout=120)
    assert {str(case): rows for case, rows in zip(cases, table, strict=True) if rows != [""] * world} == {}


# ---- what applies the update that is pending ---------------------------------------------------------------------------------


class Plain:
    """torch's optimizer, with each gradient applied one step later."""

    def __init__(self, model: nn.Module, clip: float | None = None) -> None:
        self.model, self.clip = model, clip
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        self.pending: tuple[list[Tensor | None], float] | None = None

    def apply(self) -> None:
        if self.pending is None:
            return
        grads, rate = self.pending
        self.pending, now = None, self.optimizer.param_groups[0]["lr"]
        for param, grad in zip(self.model.parameters(), grads, strict=True):
            param.grad = grad
        self.optimizer.param_groups[0]["lr"] = rate
        self.optimizer.step()
        self.optimizer.param_groups[0]["lr"] = now
        self.optimizer.zero_grad()

    def step(self) -> None:
        grads = [None if param.grad is None else param.grad.clone() for param in self.model.parameters()]
        if self.clip is not None:
            norm = math.sqrt(sum(grad.double().square().sum().item() for grad in grads if grad is not None))
            grads = [None if grad is None else grad * min(1.0, self.clip / (norm + 1e-6)) for grad in grads]
        is_finite = all(grad is None or grad.isfinite().all() for grad in grads)
        self.apply()
        self.pending = (grads, self.optimizer.param_groups[0]["lr"]) if is_finite else None
        self.optimizer.zero_grad()


PLACES: dict[str, dict[str, Any]] = {
    "host": {"stage": 2, "optimizer_tier": "host"},
    "beside": {"stage": 3, "param_tier": "host", "optimizer_tier": "host", "overlap_step": True},
    "nvme": {"stage": 3, "param_tier": "nvme", "optimizer_tier": "nvme"},
}


@contextlib.contextmanager
def pair(place: str, path: Path, **options: Any) -> Any:
    """Plain torch and zk, with a link where the machine has none."""
    link = contextlib.nullcontext() if DEVICE.type == "cuda" else pretend(ThrottledLink(1e9))
    with link:
        torch.manual_seed(0)
        plain = Plain(GPT(), options.get("clip_grad_norm"))
        torch.manual_seed(0)
        model = GPT()
        drive = {"nvme_path": str(path)} if place == "nvme" else {}
        inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with zk.ZeroOptimizer(model, inner, **{**PLACES[place], **drive, "delay_update": 0, **options}) as optimizer:
            yield plain, model, optimizer


def one_step(plain: Plain, model: GPT, optimizer: zk.ZeroOptimizer, step: int, rate: float = 1e-2, by: float = 1.0) -> None:
    for its_model, its_optimizer in ((plain.model, plain.optimizer), (model, optimizer)):
        its_optimizer.param_groups[0]["lr"] = rate
        (loss_of(its_model, batch(step)) * by).backward()
    plain.step()
    optimizer.step()
    optimizer.zero_grad()


def are_equal(plain: Plain, model: GPT) -> bool:
    with zk.gather(model.parameters()):
        return all(map(torch.equal, plain.model.parameters(), model.parameters()))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.usefixtures("torch_engine")
def test_schedules_synchronize_and_what_looks_at_states(place: str, tmp_path: Path) -> None:
    with pair(place, tmp_path, clip_grad_norm=0.5) as (plain, model, optimizer):
        for step in range(10):
            one_step(plain, model, optimizer, step, rate=1e-2 / (1 + step))
            assert all(param.grad is None for param in model.parameters())
            assert are_equal(plain, model), step  # nobody has been asked to apply what is pending
            looks = {3: optimizer.synchronize, 5: optimizer.state_dict, 7: optimizer.consolidated_state_dict}
            looks[8] = lambda: optimizer.state[model.head.weight]["exp_avg"]
            if step in looks:
                looks[step]()
                plain.apply()
                optimizer.synchronize()
                assert are_equal(plain, model), step


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.usefixtures("torch_engine")
def test_what_users_write_meanwhile_stays(place: str, tmp_path: Path) -> None:
    with pair(place, tmp_path) as (plain, model, optimizer):
        for step in range(5):
            one_step(plain, model, optimizer, step)
            with torch.no_grad(), zk.gather(model.parameters(), write=True):
                model.head.weight.clamp_(-0.05, 0.05)
                plain.model.head.weight.clamp_(-0.05, 0.05)
        assert are_equal(plain, model)


@pytest.mark.usefixtures("torch_engine")
def test_a_step_with_an_overflow_is_left_out(tmp_path: Path) -> None:
    with pair("host", tmp_path) as (plain, model, optimizer):
        for step in range(6):
            one_step(plain, model, optimizer, step, by=float("inf") if step == 2 else 1.0)
            assert are_equal(plain, model), step
        assert optimizer.metrics()["skipped_steps"] == 1
    with pytest.raises(ValueError, match="delay_update must be a number of steps"):
        zk.ZeroConfig(delay_update=-1)
    with pytest.raises(ValueError, match="both use the time of backward"):
        zk.ZeroConfig(delay_update=0, overlap_step="backward", optimizer_tier="host")
    assert zk.ZeroConfig(delay_update=3, loss_scale=DynamicLossScale(), dtype="fp16").delay_update == 3


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.usefixtures("torch_engine")
def test_a_checkpoint_applies_it_and_training_goes_on_from_there(place: str, tmp_path: Path) -> None:
    with pair(place, tmp_path) as (plain, model, optimizer):
        for step in range(6):
            one_step(plain, model, optimizer, step)
            if step == 2:
                optimizer.save_checkpoint(tmp_path / "saved", async_save=place == "beside")
                plain.apply()
        optimizer.synchronize()
        plain.apply()
        assert are_equal(plain, model)
    with pair(place, tmp_path) as (_, again, optimizer):
        optimizer.load_checkpoint(tmp_path / "saved")
        for step in range(3, 6):
            loss_of(again, batch(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.synchronize()
        assert are_equal(plain, again)
