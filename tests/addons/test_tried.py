"""Optimizers that zk does not know: what passes the trial trains what plain torch trains, and the rest is refused by what differed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zk
from tests.models import GPT, batch, loss_of, train
from tests.parity import Case, Lion, run_case_with
from tests.world import run_world
from zk.addons import ALWAYS

pytestmark = pytest.mark.usefixtures("torch_engine", "one_thread")


class Simple(torch.optim.Optimizer):
    """Elementwise: an average that is sharpened by an attribute, and decay."""

    def __init__(self, params: Any, lr: float = 1e-2, weight_decay: float = 0.0) -> None:
        self.sharpness = 0.5
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.change(param, param.grad, self.state[param], group)

    def change(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        state["average"] = state.get("average", torch.zeros_like(param)).lerp(grad, 1 - self.sharpness)
        param.mul_(1 - group["lr"] * group["weight_decay"]).sub_(group["lr"] * state["average"].tanh())


class OfWhole(Simple):
    """As LAMB and LARS do: a step as long as the parameter."""

    def change(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if "average" not in state:
            state["average"], state["updates"] = torch.zeros_like(param), 0
        state["updates"] += 1
        state["average"].lerp_(grad, 1 - self.sharpness)
        ratio = param.norm() / state["average"].norm().clamp(min=1e-6)
        param.sub_(group["lr"] * state["updates"] ** -0.5 * ratio * state["average"])


class Changed(Simple):
    """SGD, but for what one of ``OTHERS`` makes of a gradient."""

    def change(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        param.sub_(group["lr"] * OTHERS[type(self).__name__](grad, state, group))


OTHERS: dict[str, Any] = {
    "Noisy": lambda grad, *_: grad + torch.randn_like(grad),
    "ByShape": lambda grad, *_: grad * grad.ndim,
    "InPlace": lambda grad, *_: grad.mul_(2),  # an update that is made again would need what it was
    "Counting": lambda grad, state, group: (group.update(seen=group.get("seen", 0) + 1), grad / group["seen"])[1],
    "Rows": lambda grad, state, _: (state.update(rows=grad.square().mean(dim=-1)), grad)[1],
    "Bits": lambda grad, state, _: state.setdefault("first", grad.bfloat16()),  # fewer than zk keeps
    "ByNumber": lambda grad, state, _: (state.update(most=grad.abs().max()), grad)[1],
    "Global": lambda grad, state, group: grad / sum(param.grad.norm() for param in group["params"] if param.grad is not None),
}


def of(kind: type[torch.optim.Optimizer], params: list[nn.Parameter]) -> torch.optim.Optimizer:
    matrices, vectors = [p for p in params if p.ndim >= 2], [p for p in params if p.ndim < 2]
    return kind([{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "lr": 3e-3}])  # type: ignore[call-arg]


KINDS = {"Signs": (Lion, "elementwise"), "Simple": (Simple, "elementwise"), "OfWhole": (OfWhole, "parameterwise")}


def run(case: Case) -> str:
    return run_case_with(case, lambda name, params: of(KINDS[name][0], params), **{KINDS[case.optimizer][1]: True})


GRID = [
    Case(stage=stage, dtype=dtype, tier=tier, optimizer=name, model=model, steps=3)
    for name, cases in {
        "Signs": [(0, "bf16", "host", "plain"), (2, "fp16", "nvme", "plain"), (3, "bf16", "host", "sometimes")],
        "Simple": [(1, "fp32", "host", "frozen"), (3, "bf16", "nvme", "plain")],
        "OfWhole": [(0, "bf16", "host", "plain"), (1, "fp32", "nvme", "sometimes"), (2, "fp16", "host", "plain"), (3, "bf16", "nvme", "frozen")],
    }.items()
    for stage, dtype, tier, model in cases
]
GRID += [Case(stage=3, dtype="bf16", optimizer="Signs", overlap_step=True, steps=3)]
GRID += [Case(optimizer=name, overlap_step="backward", clip=50.0, steps=4) for name in ("Simple", "OfWhole")]  # type: ignore[arg-type]


@pytest.mark.parametrize("case", GRID, ids=str)
def test_what_passes_the_trial_trains_what_plain_torch_trains(case: Case) -> None:
    assert run(case) == ""


def test_over_ranks_too() -> None:
    table = run_world(2, run, GRID, timeout=300)
    assert {str(case): rows for case, rows in zip(GRID, table, strict=True) if any(rows)} == {}


PARAM = r"\['param'\]"


@pytest.mark.parametrize(
    ("name", "option", "says"),
    [
        ("OfWhole", "elementwise", f"OfWhole is not elementwise, as zk found with small parameters.*{PARAM}.*use parameterwise=True or torch"),
        *(("Noisy", option, PARAM) for option in ("elementwise", "parameterwise")),
        ("ByShape", "elementwise", PARAM),
        *(("InPlace", option, PARAM) for option in ("elementwise", "parameterwise")),
        *(("Counting", option, PARAM) for option in ("elementwise", "parameterwise")),
        ("Rows", "elementwise", r"\['rows'\]"),
        ("Rows", "parameterwise", "The size of tensor a|'shape' do not match"),
        ("Bits", "elementwise", r"'dtype' do not match.*\['first'\]"),
        *(("ByNumber", option, r"\['most'\]") for option in ("elementwise", "parameterwise")),
        ("Global", "parameterwise", f"Global is not parameterwise, .*{PARAM}.*use torch.optim.Muon"),
        ("LBFGS", "elementwise", "LBFGS is not elementwise.*closure"),
        ("Adafactor", "parameterwise", r"'shape' do not match.*_var'\]"),
    ],
)
def test_the_trial_refuses_by_what_differed_before_anything_moves(name: str, option: str, says: str) -> None:
    kind: Any = OfWhole if name == "OfWhole" else type(name, (Changed,), {}) if name in OTHERS else getattr(torch.optim, name)
    model = GPT()
    places, draws = [param.data_ptr() for param in model.parameters()], torch.get_rng_state()
    with pytest.raises(TypeError, match=f"(?s){says}"):
        zk.ZeroOptimizer(model, kind(model.parameters()), **{option: True})
    assert places == [param.data_ptr() for param in model.parameters()] and torch.equal(draws, torch.get_rng_state())


@pytest.mark.parametrize("name", [*KINDS])
def test_schedules_hooks_attributes_and_states_reach_the_update(name: str, tmp_path: Path) -> None:
    """A schedule counts calls in the place of the optimizer's step(), which updates of slices must not call."""
    kind, option = KINDS[name]
    torch.manual_seed(0)
    model, plain = GPT(), GPT()
    plain.load_state_dict(model.state_dict())
    mine, theirs = of(kind, list(model.parameters())), of(kind, list(plain.parameters()))
    schedules = [torch.optim.lr_scheduler.ExponentialLR(one, 0.5) for one in (mine, theirs)]
    calls: list[Any] = []
    mine.register_step_pre_hook(lambda *_: calls.append(1))
    with zk.ZeroOptimizer(model, mine, stage=1, **{option: True}) as optimizer:
        for number in range(4):
            train(model, optimizer, start=number)
            loss_of(plain, batch(number)).backward()
            theirs.step()
            theirs.zero_grad()
            for schedule in schedules:
                schedule.step()
            for one in (mine, theirs):
                one.sharpness = 0.7  # type: ignore[attr-defined]
            if number == 1:
                optimizer.save_checkpoint(tmp_path)
                states, weights = optimizer.state_dict(), {name: value.clone() for name, value in model.state_dict().items()}
            for way in ("states", "a checkpoint") if number == 2 else ():
                if way == "states":
                    model.load_state_dict(weights)
                    optimizer.load_state_dict(states)
                else:
                    optimizer.load_checkpoint(tmp_path)
                train(model, optimizer, start=2)  # again
                assert all(map(torch.equal, model.parameters(), plain.parameters()))
                for group, other in zip(optimizer.param_groups, theirs.param_groups, strict=True):
                    group["lr"] = other["lr"]
        assert calls == [1] * 6
        assert all(map(torch.equal, model.parameters(), plain.parameters()))


def test_what_means_nothing_or_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = GPT()
    with pytest.raises(ValueError, match="elementwise must be True or False; got 1"):
        zk.ZeroOptimizer(model, Lion(model.parameters()), elementwise=1)
    monkeypatch.setitem(sys.modules, "zk.addons.whole", None)
    monkeypatch.delitem(ALWAYS, "whole")
    with pytest.raises(TypeError, match=r"'parameterwise' is in zk\.addons\.whole, which is not there"):
        zk.ZeroOptimizer(model, Lion(model.parameters()), parameterwise=True)
    zk.ZeroOptimizer(model, Lion(model.parameters()), elementwise=True).close()
