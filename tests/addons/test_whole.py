"""Muon, and optimizers that zk does not know: the bits of plain torch wherever parameters are cut, or refused by what differed in a trial."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zk
from tests.addons.common import faults_of_ranks
from tests.models import gpt, small_chunks, step, train
from tests.parity import Case, Lion, run_case_with

pytestmark = pytest.mark.usefixtures("torch_engine")


class Pair(torch.optim.Optimizer):
    """Muon for matrices and AdamW for the rest, as plain training sees one optimizer."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        self.parts = several(params)
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        _ = [part.step() for part in self.parts]

    def state_dict(self) -> dict[str, Any]:
        states = [part.state.get(param, {}) for part in self.parts for group in part.param_groups for param in group["params"]]
        return {"state": {number: state for number, state in enumerate(states) if state}}


def several(params: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
    matrices, others = [p for p in params if p.ndim == 2], [p for p in params if p.ndim != 2]
    first = torch.optim.Muon([{"params": matrices[:3]}, {"params": matrices[3:], "weight_decay": 0.0, "nesterov": False}], lr=2e-2)
    return [first, torch.optim.AdamW(others, lr=1e-2, betas=(0.9, 0.95))]


def simple(self: Any, param: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
    state["average"] = state.get("average", torch.zeros_like(param)).lerp(param.grad, 1 - self.sharpness)
    return param * group["weight_decay"] + state["average"].tanh()


def of_whole(self: Any, param: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
    state.setdefault("updates", torch.zeros(())).add_(1)  # in place, as torch's optimizers count
    average = simple(self, param, state, group)
    return state["updates"] ** -0.5 * param.norm() / average.norm().clamp(min=1e-6) * average


DIRECTIONS: dict[str, Any] = {  # what an optimizer goes along
    "Simple": simple,
    "OfWhole": of_whole,  # as LAMB and LARS do: a step as long as the parameter
    "Noisy": lambda self, param, state, group: param.grad + torch.randn_like(param),
    "InPlace": lambda self, param, state, group: param.grad.mul_(2),
    "Counting": lambda self, param, state, group: (group.update(seen=group.get("seen", 0) + 1), param.grad / group["seen"])[1],
    "Rows": lambda self, param, state, group: (state.update(rows=param.grad.square().mean(dim=-1)), param.grad)[1],
    "Bits": lambda self, param, state, group: state.setdefault("first", param.grad.bfloat16()),  # fewer than zk keeps
    "ByNumber": lambda self, param, state, group: (state.update(most=param.grad.abs().max()), param.grad)[1],
    "Global": lambda self, param, state, group: param.grad / sum(one.grad.norm() for one in group["params"] if one.grad is not None),
}


class Along(torch.optim.Optimizer):
    def __init__(self, params: Any, lr: float = 1e-2, weight_decay: float = 0.0) -> None:
        self.sharpness = 0.5
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in [param for param in group["params"] if param.grad is not None]:
                param.sub_(group["lr"] * DIRECTIONS[type(self).__name__](self, param, self.state[param], group))


KINDS: dict[str, Any] = {name: type(name, (Along,), {}) for name in DIRECTIONS}


def of(name: str, params: list[nn.Parameter]) -> torch.optim.Optimizer:
    matrices, vectors = [p for p in params if p.ndim >= 2], [p for p in params if p.ndim < 2]
    return KINDS.get(name, Lion)([{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "lr": 3e-3}, {"params": []}])  # type: ignore


PARAM = r"\['param'\]"
OPTIONS = {"Muon": None, "Signs": "elementwise", "Simple": "elementwise", "OfWhole": "parameterwise"}


def run(case: Case) -> str:
    ours, plain = (lambda name, params: several(params), lambda name, params: Pair(params)) if case.optimizer == "Muon" else (of, of)
    return run_case_with(case, ours, plain, **{OPTIONS[case.optimizer] or "parameterwise": case.optimizer != "Muon"})


GRID = [
    *(Case(stage=stage, dtype="bf16", optimizer=name, steps=3) for stage, name in ((0, "Muon"), (1, "Signs"), (3, "OfWhole"))),
    *(Case(stage=stage, optimizer=name, tier="nvme", steps=3) for stage, name in ((0, "OfWhole"), (2, "Muon"))),
    *(Case(stage=stage, dtype="fp16", optimizer=name, tier="device", steps=3) for stage, name in ((1, "OfWhole"), (3, "Muon"))),
    *(Case(stage=2, dtype="bf16", optimizer=name, model="sometimes", accumulation=2, steps=4) for name in ("Muon", "OfWhole")),
    *(Case(stage=3, dtype="bf16", optimizer=name, model="frozen", tier="nvme", adversary=True, steps=3) for name in ("Muon", "OfWhole")),
    Case(stage=3, dtype="bf16", optimizer="Muon", model="tied", no_sync=True, accumulation=2, clip=None, steps=3),
    Case(stage=3, dtype="bf16", optimizer="Signs", overlap_step=True, steps=3),
    *(Case(stage=2, optimizer=name, clip=50.0, overlap_step="backward", steps=4) for name in ("Muon", "Simple")),
]
ON_RANKS = [case for case in GRID if case.stage == 3] + [GRID[1], GRID[5], GRID[-1]]
if torch.cuda.is_available():
    GRID = [Case(stage=s, dtype="bf16", tier=tier, optimizer="Muon", accumulation=2, steps=2) for s, tier in ((2, "device"), (3, "host"))]
    ON_RANKS = GRID


@pytest.mark.device
@pytest.mark.parametrize("case", GRID, ids=str)
def test_it_trains_what_plain_torch_trains(case: Case) -> None:
    assert run(case) == ""


@pytest.mark.device
def test_ranks_train_what_plain_torch_trains() -> None:
    assert faults_of_ranks(2, run, ON_RANKS) == {}


def wrapped(variant: str = "sometimes", **options: Any) -> tuple[nn.Module, list[Any], zk.ZeroOptimizer]:
    """One with a weight that lies in memory as its transpose does, which is cut over chunks and ranks."""
    model = gpt(variant)
    model.head.weight.data = model.head.weight.data.t().contiguous().t()
    inners = several(list(model.parameters()))
    with small_chunks(1000):
        return model, inners, zk.ZeroOptimizer(model, inners, **options)


def test_states_go_to_checkpoints_and_back_and_an_option_that_is_refused_changes_none(tmp_path: Path) -> None:
    model, inners, optimizer = wrapped(dtype="bf16")
    train(model, optimizer, 2)
    optimizer.save_checkpoint(tmp_path / "saved", async_save=True)
    states = copy.deepcopy(optimizer.state_dict())
    want = train(model, optimizer, 2, start=2)
    inners[0].param_groups[1]["ns_steps"], kept = 100, copy.deepcopy(optimizer.state_dict()["state"])  # torch refuses 100 in step()
    with pytest.raises(ValueError, match="less than 100"):
        train(model, optimizer)
    torch.testing.assert_close(optimizer.state_dict()["state"], kept, rtol=0, atol=0)
    for way in ("a checkpoint", "state_dict"):
        other, _, again = wrapped(dtype="bf16", stage=3, param_tier="host", optimizer_tier="nvme", nvme_path=tmp_path)
        again.load_checkpoint(tmp_path / "saved") if way == "a checkpoint" else again.load_state_dict(states)
        assert train(other, again, 2, start=2) == want, way
        again.close()


@pytest.mark.parametrize("stage", [1, 3])
def test_a_weight_in_another_order_is_updated_in_its_own(stage: int) -> None:
    model, _, optimizer = wrapped("plain", stage=stage, units=["blocks"])
    plain = gpt()
    plain.head.weight.data = plain.head.weight.data.t().contiguous().t()
    theirs = Pair(list(plain.parameters()))
    with optimizer:
        for number in range(3):
            train(model, optimizer, start=number)
            step(plain, theirs, number)
    assert all(map(torch.equal, model.parameters(), plain.parameters()))


@pytest.mark.parametrize("options", [{"overlap_step": True, "stage": 3}, {"state_dtype": "bf16"}])
def test_what_updates_slices_or_means_nothing_is_refused(options: dict[str, Any]) -> None:
    model = gpt()
    with pytest.raises(ValueError, match="elementwise must be True or False; got 1"):
        zk.ZeroOptimizer(model, Lion(model.parameters()), elementwise=1)
    says = r"overlap_step=True updates beside.*use overlap_step='backward'|state_dtype= is for Adam"
    for option, inner in (({}, several), ({"parameterwise": True}, Lion)):
        with pytest.raises(ValueError, match=says):
            zk.ZeroOptimizer(model, inner([*model.parameters()]), **options, **option)


@pytest.mark.parametrize(
    ("name", "option", "says"),
    [
        ("OfWhole", "elementwise", f"OfWhole is not elementwise, as zk found with small parameters.*{PARAM}.*use parameterwise=True or torch"),
        ("Rows", "elementwise", r"\['rows'\]"),
        ("Bits", "elementwise", r"'dtype' do not match.*\['first'\]"),
        ("Global", "parameterwise", f"Global is not parameterwise, .*{PARAM}.*use torch.optim.Muon"),
        ("LBFGS", "elementwise", "LBFGS is not elementwise.*closure"),
        *((name, "parameterwise", "The size of tensor a|'row_var'") for name in ("Rows", "Adafactor")),
        ("Noisy", "elementwise", PARAM),
        *((name, "parameterwise", PARAM) for name in ("Noisy", "Counting")),
        *(("ByNumber", option, r"\['most'\]") for option in ("elementwise", "parameterwise")),
    ],
)
def test_the_trial_refuses_by_what_differed_before_anything_moves(name: str, option: str, says: str) -> None:
    model = gpt()
    places, draws = [param.data_ptr() for param in model.parameters()], torch.get_rng_state()
    with pytest.raises(TypeError, match=f"(?s){says}"):
        zk.ZeroOptimizer(model, (KINDS.get(name) or getattr(torch.optim, name))(model.parameters()), **{option: True})
    assert places == [param.data_ptr() for param in model.parameters()] and torch.equal(draws, torch.get_rng_state())


@pytest.mark.parametrize("name", ["Simple", "OfWhole"])
def test_schedules_hooks_attributes_and_states_reach_the_update(name: str, tmp_path: Path) -> None:
    """A schedule counts calls in the place of the optimizer's step(), which updates of slices must not call."""
    model, calls = gpt(), []
    plain = copy.deepcopy(model)
    mine, theirs = (of(name, list(one.parameters())) for one in (model, plain))
    schedules = [torch.optim.lr_scheduler.ExponentialLR(one, 0.5) for one in (mine, theirs)]
    mine.register_step_pre_hook(lambda *_: calls.append(1))
    with zk.ZeroOptimizer(model, mine, stage=1, **{OPTIONS[name]: True}) as optimizer:
        for number in range(3):
            train(model, optimizer, start=number)
            step(plain, theirs, number)
            mine.sharpness = theirs.sharpness = 0.7  # type: ignore[attr-defined]
            for schedule in schedules if number < 2 else ():
                schedule.step()
            if number == 1:
                optimizer.save_checkpoint(tmp_path)
                states, weights = optimizer.state_dict(), copy.deepcopy(model.state_dict())
        for way in ("", "states", "a checkpoint"):
            if way:  # and again
                optimizer.load_checkpoint(tmp_path) if way == "a checkpoint" else optimizer.load_state_dict(states)
                model.load_state_dict(weights)
                train(model, optimizer, start=2)
            assert all(map(torch.equal, model.parameters(), plain.parameters())), way
        assert calls == [1] * 5
