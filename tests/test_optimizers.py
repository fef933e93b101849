"""Optimizers beyond Adam: each trains what plain torch trains with it, bit for bit, wherever its state is; what cannot be right is refused."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zk
from tests.models import DEVICE, GPT, batch, loss_of, train
from tests.parity import Case, Lion, make_optimizer, run_case
from tests.world import call, run_world

pytestmark = pytest.mark.usefixtures("torch_engine")

ELEMENTWISE = ("RMSprop", "NAdam", "RAdam", "Adagrad", "Adadelta", "Adamax", "Rprop", "ASGD")
# parameters of one unit with other step counts each; masters, gradients that are clipped; slices that begin anywhere
HERE = [
    Case(stage=index % 4, dtype=("bf16", "fp32")[index % 2], model="sometimes", optimizer=name, steps=4) for index, name in enumerate(ELEMENTWISE)
]
ELSEWHERE = [
    Case(stage=3, dtype="bf16", optimizer="RMSprop", tier="nvme", adversary=True, steps=3),
    Case(stage=2, dtype="fp16", optimizer="NAdam", tier="nvme", accumulation=2, steps=3),
    Case(stage=3, dtype="bf16", optimizer="Adagrad", overlap_step=True, clip=None, steps=4),
]


@pytest.mark.parametrize("case", HERE, ids=str)
def test_an_elementwise_optimizer_trains_what_plain_torch_trains(case: Case) -> None:
    assert run_case(case) == ""


@pytest.mark.parametrize("name", ["ASGD", "NAdam"])
def test_numbers_follow_the_learning_rate_of_their_own_step(name: str) -> None:
    def trained(is_wrapped: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = GPT()
        inner = make_optimizer(name, list(model.parameters()))
        optimizer: Any = zk.ZeroOptimizer(model, inner, stage=2) if is_wrapped else inner
        for start in range(4):
            loss_of(model, batch(start)).backward()
            optimizer.step()
            optimizer.zero_grad()
            for group in inner.param_groups:
                group["lr"] *= 0.5
        return [param.detach().clone() for param in model.parameters()]

    assert all(map(torch.equal, trained(True), trained(False)))


RANKS = [Case(stage=1, dtype="bf16", optimizer="NAdam", model="sometimes", steps=3)]


def wrapped(name: str, **options: Any) -> tuple[nn.Module, zk.ZeroOptimizer]:
    torch.manual_seed(0)
    model = GPT("sometimes").bfloat16()
    return model, zk.ZeroOptimizer(model, make_optimizer(name, list(model.parameters())), **options)


@pytest.mark.parametrize("name", ["NAdam", "Adagrad"])
def test_state_goes_to_plain_torch_and_to_checkpoints_and_back(name: str, tmp_path: Path) -> None:
    model, optimizer = wrapped(name)
    train(model, optimizer, 2)
    optimizer.save_checkpoint(tmp_path / "saved")
    plain = make_optimizer(name, [nn.Parameter(torch.zeros_like(param, dtype=torch.float32)) for param in model.parameters()])
    plain.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    want = train(model, optimizer, 2, start=2)
    for way in ("a checkpoint", "state_dict"):
        other, again = wrapped(name, stage=3, param_tier="host", optimizer_tier="nvme", nvme_path=tmp_path)
        if way == "a checkpoint":
            again.load_checkpoint(tmp_path / "saved")
        else:  # masters come along
            again.load_state_dict(plain.state_dict())
        assert train(other, again, 2, start=2) == want, way
        again.close()
    _, adam = wrapped("AdamW")
    with pytest.raises(ValueError, match=r"this optimizer keeps \['master', 'exp_avg', 'exp_avg_sq'\]: make the same kind"):
        adam.load_checkpoint(tmp_path / "saved")
    adam.close()
    optimizer.close()


class OptionsOnly(torch.optim.AdamW):
    """AdamW with other defaults, and a method that torch never calls."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, lr=lr, betas=(0.8, 0.9))

    def halve(self) -> None:
        for group in self.param_groups:
            group["lr"] /= 2


class Clipped(torch.optim.AdamW):
    """An AdamW that looks at whole gradients first."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            torch.nn.utils.clip_grad_norm_(group["params"], 1.0)
        return super().step(closure)


def test_a_subclass_that_changes_options_is_its_base() -> None:
    torch.manual_seed(0)
    model, plain = GPT(), GPT()
    plain.load_state_dict(model.state_dict())
    mine, theirs = OptionsOnly(model.parameters()), OptionsOnly(plain.parameters())
    with zk.ZeroOptimizer(model, mine) as optimizer:
        train(model, optimizer, 2)
        for ids in (batch(0), batch(1)):
            loss_of(plain, ids).backward()
            theirs.step()
            theirs.zero_grad()
        assert all(torch.equal(one, other) for one, other in zip(model.parameters(), plain.parameters(), strict=True))


@pytest.mark.parametrize(
    ("kind", "options", "error", "says"),
    [
        (torch.optim.NAdam, {"state_dtype": "bf16"}, ValueError, "state_dtype"),
        (torch.optim.LBFGS, {}, TypeError, "got torch.optim.lbfgs.LBFGS"),
        (Lion, {}, TypeError, "knows the arithmetic of .*got tests.parity.Lion.*Addon.rules"),
        (Clipped, {}, TypeError, "subclasses that keep their step.*got tests.test_optimizers.Clipped"),
        (torch.optim.Adafactor, {}, TypeError, "cannot tell what it looks at. Say so"),
    ],
)
def test_what_cannot_be_right_is_refused(kind: Any, options: dict[str, Any], error: type[Exception], says: str) -> None:
    model = GPT()
    with pytest.raises(error, match=says):
        zk.ZeroOptimizer(model, kind(model.parameters()), **options)


def several(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Matrices of blocks by NAdam, what is left by AdamW, in two groups; the first block's vectors by RMSprop."""
    by: dict[str, list[nn.Parameter]] = {"NAdam": [], "AdamW": [], "RMSprop": []}
    for name, param in model.named_parameters():
        by["NAdam" if param.ndim > 1 and "blocks" in name else "RMSprop" if "blocks.0" in name else "AdamW"].append(param)
    adam = torch.optim.AdamW([{"params": by["AdamW"][:2]}, {"params": by["AdamW"][2:], "weight_decay": 0.0}], lr=1e-2)
    return [torch.optim.NAdam(by["NAdam"], lr=1e-2), adam, torch.optim.RMSprop(by["RMSprop"], lr=1e-3)]


def train_several(stage: int) -> str:
    """Train with a list of optimizers and a schedule of one of them, against plain torch; return what differs."""
    torch.manual_seed(0)
    plain, model = GPT(), GPT()
    model.load_state_dict(plain.state_dict())
    theirs, mine = several(plain), several(model)
    optimizer = zk.ZeroOptimizer(model, mine, stage=stage, optimizer_tier="host", overlap_step=stage == 3)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(one, 0.5) for one in (theirs[1], mine[1])]
    for step in range(3):
        loss_of(plain, batch(step)).backward()
        for one in theirs:
            one.step()
            one.zero_grad()
        train(model, optimizer, start=step)
        for schedule in schedules:
            schedule.step()
    assert [group["lr"] for group in optimizer.param_groups] == [1e-2, 1.25e-3, 1.25e-3, 1e-3]
    found = ""
    with zk.gather(model.parameters()):
        for (name, got), want in zip(model.named_parameters(), plain.parameters(), strict=True):
            found += "" if torch.equal(got, want) else f"{name} differs; "
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.close()
    return found


def test_a_list_of_optimizers_trains_what_each_of_them_trains() -> None:
    assert train_several(2) == "" and results(2)[-1] == ["", ""]
    model = GPT()
    mine = several(model)
    with zk.ZeroOptimizer(model, mine) as optimizer:
        train(model, optimizer)
        with pytest.raises(RuntimeError, match="was given to a ZeroOptimizer, which has its states"):
            mine[0].state_dict()
        with pytest.raises(RuntimeError, match="was given to a ZeroOptimizer"):
            mine[1].step()
    with pytest.raises(ValueError, match="the list of optimizers is empty"):
        zk.ZeroOptimizer(model, [])


ON_A_DEVICE = {1: ELSEWHERE[::2], 2: RANKS}


def cases_of(world: int) -> list[Case]:
    if DEVICE.type == "cpu":
        return {1: ELSEWHERE, 2: RANKS}[world]
    return [case if world == 1 else dataclasses.replace(case, tolerance=0.05) for case in ON_A_DEVICE[world]]


@functools.cache
def results(world: int) -> list[list[Any]]:
    """All that a world of so many ranks is asked."""
    jobs: list[Any] = [(run_case, case) for case in cases_of(world)]
    if world == 2 and DEVICE.type == "cpu":
        jobs += [(train_several, 3)]
    return run_world(world, call, jobs)


@pytest.mark.parametrize("world", (1, 2))
def test_where_state_is_when_it_is_updated_and_how_many_ranks_have_it_change_no_bit(world: int) -> None:
    cases = cases_of(world)
    table = results(world)[: len(cases)]  # what follows is looked at below
    assert {str(case): rows for case, rows in zip(cases, table, strict=True) if rows != [""] * world} == {}


@pytest.fixture
def bf16_is_the_default() -> Iterator[None]:
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("bf16_is_the_default")
@pytest.mark.parametrize("name", ["AdamW", "NAdam"])
def test_torchs_default_dtype_is_not_that_of_states_and_counts(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False, dtype=torch.float32) for _ in range(2)))
    plain = copy.deepcopy(model)
    theirs = make_optimizer(name, list(plain.parameters()))
    with zk.ZeroOptimizer(model, make_optimizer(name, list(model.parameters()))) as optimizer:
        for step in range(300 if name == "AdamW" else 3):
            x = torch.randn(4, 8, dtype=torch.float32)
            for one, by in ((model, optimizer), (plain, theirs)):
                one(x).square().mean().backward()
                by.step()
                by.zero_grad()
            if step == 270:
                optimizer.load_state_dict(optimizer.state_dict())
        assert all(map(torch.equal, model.parameters(), plain.parameters()))
        assert optimizer.state_dict()["state"][0]["step"] == step + 1
