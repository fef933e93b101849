"""Optimizers beyond Adam: each trains what plain torch trains with it, bit for bit, wherever its state is; what cannot be right is refused."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import zk
from tests.models import DEVICE, GPT, batch, loss_of, train
from tests.parity import PARAMETERWISE, WITH_OTHERS, Blocks, Case, Lion, Several, make_optimizer, run_case, with_others
from tests.world import call, run_world
from zk.offload import spill

pytestmark = pytest.mark.usefixtures("torch_engine")

ELEMENTWISE = ("RMSprop", "NAdam", "RAdam", "Adagrad", "Adadelta", "Adamax", "Rprop", "ASGD", "Lion")
# parameters of one unit with other step counts each; masters, gradients that are clipped; slices that begin anywhere
HERE = [
    Case(stage=index % 4, dtype=("bf16", "fp32")[index % 2], model="sometimes", optimizer=name, steps=4) for index, name in enumerate(ELEMENTWISE)
]
ELSEWHERE = [
    Case(stage=3, dtype="bf16", optimizer="RMSprop", tier="nvme", adversary=True, steps=3),
    Case(stage=2, dtype="fp16", optimizer="NAdam", tier="nvme", accumulation=2, steps=3),
    Case(stage=2, dtype="bf16", optimizer="Adagrad", overlap_step="backward", clip=None, steps=4),
    Case(stage=2, optimizer="NAdam", delay=1, steps=4),
]


@pytest.mark.parametrize("case", HERE, ids=str)
def test_an_elementwise_optimizer_trains_what_plain_torch_trains(case: Case) -> None:
    assert run_case(case) == ""


RANKS = [Case(stage=1, dtype="bf16", optimizer="NAdam", model="sometimes", steps=3)]


def wrapped(name: str, **options: Any) -> tuple[nn.Module, zk.ZeroOptimizer]:
    torch.manual_seed(0)
    model = GPT("sometimes").bfloat16()
    return model, zk.ZeroOptimizer(model, make_optimizer(name, list(model.parameters())), elementwise=name == "Lion", **options)


def named(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The parameters in the order of ``make_optimizer``'s groups."""
    return sorted(model.named_parameters(), key=lambda entry: entry[1].ndim < 2)


@pytest.mark.parametrize("name", ["NAdam", "Adagrad", "Lion"])
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
    with pytest.raises(ValueError, match="another kind of optimizer than AdamW" if name == "NAdam" else "'exp_avg.*is not there"):
        adam.load_checkpoint(tmp_path / "saved")
    adam.close()
    optimizer.close()


def test_state_is_read_and_changed_by_name() -> None:
    model, optimizer = wrapped("NAdam")
    train(model, optimizer)
    param = model.head.weight
    with pytest.raises(ValueError, match="has no state before its first update"):
        optimizer.state[model.branch.weight]["exp_avg"] = torch.zeros(24, 24)
    assert set(optimizer.state[param]) == {"step", "mu_product", "exp_avg", "exp_avg_sq"}
    optimizer.state[param]["mu_product"].fill_(0.25)
    optimizer.state[param]["step"] = 7.0
    del optimizer.state[model.norm.weight]
    train(model, optimizer, start=1)
    state = optimizer.state_dict()["state"]
    steps = {name: state[index]["step"].item() for index, (name, _) in enumerate(named(model)) if index in state}
    assert (steps["head.weight"], steps["norm.weight"], steps["tokens.weight"]) == (8.0, 1.0, 2.0)
    products = {name: state[index]["mu_product"].item() for index, (name, _) in enumerate(named(model)) if index in state}
    assert products["head.weight"] < products["tokens.weight"] < 0.25 < products["norm.weight"]
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


class CountsItself(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        self.count = getattr(self, "count", 0) + 1
        return super().step(closure)


class Counts(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
        return super().step(closure)


class Rows(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["rows"] = param.reshape(-1)[:2].clone()


class Shampoo(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            if param.grad is not None:
                self.state[param]["factors"] = [param.grad @ param.grad.T] if param.ndim == 2 else []


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
        (torch.optim.AdamW, {"elementwise": True}, ValueError, "elementwise=True has no effect, as zk knows AdamW"),
        (torch.optim.NAdam, {"state_dtype": "bf16"}, ValueError, "NAdam updates by its own step"),
        (torch.optim.LBFGS, {"elementwise": True}, TypeError, "calls the closure many times"),
        (Lion, {}, TypeError, "knows the arithmetic of .*got tests.parity.Lion.*elementwise=True"),
        (Clipped, {}, TypeError, "Clipped, which has its own step"),
        (Clipped, {"elementwise": True}, TypeError, "the parameter differs in .* in halves"),
        (CountsItself, {"elementwise": True}, TypeError, "step.. changes count"),
        (Counts, {"elementwise": True}, TypeError, r"step.. changes param_groups\[...\]\['k'\]"),
        (Rows, {"elementwise": True}, TypeError, "its state 'rows' is a tensor of shape .*parameterwise=True instead"),
        (Blocks, {}, TypeError, "depends on no other parameter, parameterwise=True"),
        (Shampoo, {}, TypeError, "multiplies with factors of whole matrices; pass parameterwise=True"),
        (Shampoo, {"parameterwise": True}, TypeError, "its state 'factors' is a list, and zk keeps plain tensors"),
        (Clipped, {"parameterwise": True}, TypeError, "in step 1 the parameter, .*becomes something else if parameters are updated one by one"),
        (CountsItself, {"parameterwise": True}, TypeError, "step.. changes count time and again"),
        (Counts, {"parameterwise": True}, TypeError, r"step.. changes param_groups\[...\]\['k'\] time and again"),
        (Lion, {"parameterwise": True, "elementwise": True}, ValueError, "exclude each other"),
        (torch.optim.Adafactor, {"parameterwise": True}, ValueError, "parameterwise=True has no effect, as zk knows Adafactor"),
        (torch.optim.LBFGS, {"parameterwise": True}, TypeError, "calls the closure many times"),
        (torch.optim.Adafactor, {"state_dtype": "bf16"}, ValueError, "Adafactor updates by its own step"),
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
    saved = optimizer.state_dict()
    if stage < 3:
        for one, other in zip(theirs, mine, strict=True):  # plain torch goes on with a part each
            one.load_state_dict(other.state_dict())
    optimizer.load_state_dict(saved)
    optimizer.close()
    return found


def test_a_list_of_optimizers_trains_what_each_of_them_trains() -> None:
    assert train_several(2) == "" and results(2)[-1] == ["", ""]
    model = GPT()
    mine = several(model)
    with zk.ZeroOptimizer(model, mine) as optimizer:
        train(model, optimizer)
        with pytest.raises(ValueError, match="no group can be added to a list"):
            optimizer.add_param_group({"params": []})
        with pytest.raises(ValueError, match="one of several optimizers of a ZeroOptimizer"):
            mine[0].load_state_dict(mine[0].state_dict())
        with pytest.raises(RuntimeError, match="which has its gradients"):
            mine[1].step()
        mine[2].param_groups.append(mine[2].param_groups[0])
        with pytest.raises(ValueError, match="a group was added to one of a list"):
            train(model, optimizer)
        mine[2].param_groups.pop()
    with pytest.raises(ValueError, match="the list of optimizers is empty"):
        zk.ZeroOptimizer(model, [])


# on a GPU plain torch multiplies matrices there, and zk where their state is
MUON = [
    Case(stage=1, dtype="bf16", optimizer="Muon", tier="device", steps=3),
    Case(stage=0, dtype="bf16", optimizer="Muon", model="sometimes", accumulation=2, steps=3),
    Case(stage=1, dtype="fp32", optimizer="Muon", model="tied", steps=3),
    Case(stage=2, dtype="bf16", optimizer="Muon", tier="nvme", adversary=True, steps=3),
    Case(stage=3, dtype="bf16", optimizer="Muon", model="unfreezing", steps=4),
    Case(stage=3, dtype="fp32", optimizer="Muon", tier="nvme", adversary=True, overlap_step="backward", clip=None, steps=3),
]


# vectors too; statistics of rows and columns, codes and scales of blocks
ADAFACTOR = [
    Case(stage=0, dtype="bf16", optimizer="Adafactor", model="sometimes", tier="device", steps=3),
    Case(stage=1, dtype="fp16", optimizer="Adafactor and AdamW", model="tied", accumulation=2, steps=3),
    Case(stage=2, dtype="bf16", optimizer="Adafactor", model="frozen", tier="nvme", adversary=True, steps=3),
    Case(stage=3, dtype="fp32", optimizer="Adafactor", model="unfreezing", overlap_step=True, steps=4),
    Case(stage=3, dtype="bf16", optimizer="Adafactor", model="experts", tier="nvme", overlap_step="backward", clip=None, steps=3),
    Case(stage=1, dtype="fp32", optimizer="Blocks", model="sometimes", steps=4),
    Case(stage=3, dtype="bf16", optimizer="Blocks", tier="nvme", adversary=True, delay=1, steps=4),
]


# each with one process or with two; of three some have no parameter of a unit: each optimizer, with and without slices of parameters
WHOLE = {1: [*MUON[:5], ADAFACTOR[0], *ADAFACTOR[4:6]], 2: [MUON[5], *ADAFACTOR[1:4], ADAFACTOR[6]]}
WHOLE[3] = [ADAFACTOR[1], *ADAFACTOR[4:6]]
ON_A_DEVICE = {1: [ELSEWHERE[0], ELSEWHERE[2], MUON[0]], 2: [MUON[5], ADAFACTOR[3]]}


def cases_of(world: int) -> list[Case]:
    if DEVICE.type == "cpu":
        return {1: ELSEWHERE, 2: RANKS}.get(world, []) + WHOLE[world]
    return [case if world == 1 else dataclasses.replace(case, tolerance=0.05) for case in ON_A_DEVICE[world]]


@functools.cache
def results(world: int) -> list[list[Any]]:
    """All that a world of so many ranks is asked."""
    jobs: list[Any] = [(run_case, case) for case in cases_of(world)]
    if world == 2 and DEVICE.type == "cpu":
        jobs += [(train_several, 3)]
    return run_world(world, call, jobs)


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.device), pytest.param(2, marks=pytest.mark.device), 3])
def test_where_state_is_when_it_is_updated_and_how_many_ranks_have_it_change_no_bit(world: int) -> None:
    cases = cases_of(world)
    table = results(world)[: len(cases)]  # what follows is looked at below
    assert {str(case): rows for case, rows in zip(cases, table, strict=True) if rows != [""] * world} == {}


def wide(optimizers: str, width: int = 64, **options: Any) -> tuple[nn.Module, Any]:
    """A model of matrices that are longer than chunks, and its optimizer; plain where there are no ``options``."""
    torch.manual_seed(0)
    model = GPT(width=width, layers=2 if width == 64 else 1)
    params = list(model.parameters())
    made = with_others(optimizers, params) if optimizers in WITH_OTHERS else [make_optimizer(optimizers, params)]
    return model, zk.ZeroOptimizer(model, made, parameterwise=optimizers in PARAMETERWISE, **options) if options else Several(made)


def resume(case: tuple[str, str, list[Tensor]]) -> str:
    """Go on from a checkpoint of another world size and tier, and save; return what differs from plain training."""
    name, folder, want = case
    with mock.patch.object(spill, "CHUNK_NUMEL", 2048):
        model, optimizer = wide(name, stage=3, param_tier="host", optimizer_tier="nvme", nvme_path=folder)
        optimizer.load_checkpoint(f"{folder}/saved")
        train(model, optimizer, 1, start=2)
        optimizer.save_checkpoint(f"{folder}/saved")
        with zk.gather(model.parameters()):
            found = [name for (name, param), other in zip(model.named_parameters(), want, strict=True) if not torch.equal(param, other)]
        optimizer.close()
    return ", ".join(found)


@pytest.mark.usefixtures("one_thread")  # as ranks have: the last bits of sums depend on it
def test_whole_matrices_go_between_world_sizes_and_tiers(tmp_path: Path) -> None:
    wanted = dict[str, list[list[Tensor]]]()
    for name in ("Muon", "Blocks"):
        plain, theirs = wide(name)
        wanted[name] = []
        for step in range(4):
            loss_of(plain, batch(step)).backward()
            theirs.step()
            plain.zero_grad()
            wanted[name].append([param.detach().clone() for param in plain.parameters()])
        model, optimizer = wide(name, stage=2)
        train(model, optimizer, 2)
        optimizer.save_checkpoint(tmp_path / name / "saved", async_save=True)
        train(model, optimizer, 1, start=2)
        theirs.optimizers[0].load_state_dict(optimizer.inners[0].state_dict())
        optimizer.close()
    assert run_world(2, resume, [(name, str(tmp_path / name), want[2]) for name, want in wanted.items()]) == [["", ""]] * len(wanted)
    for name, want in wanted.items():
        model, optimizer = wide(name, stage=1)
        optimizer.load_checkpoint(tmp_path / name / "saved")
        train(model, optimizer, 1, start=3)
        assert [torch.equal(param, other) for param, other in zip(model.parameters(), want[3], strict=True)] == [True] * len(want[3]), name
        optimizer.close()


@pytest.mark.parametrize("kind", [torch.optim.Muon, torch.optim.Adafactor])
def test_a_piece_of_a_matrix_is_not_updated_as_a_whole_one(kind: Any) -> None:
    model = nn.Sequential(nn.Linear(8, 8), zk.TiledLinear(8, 8, in_splits=2, bias=False))
    with pytest.raises(ValueError, match="is a piece of a larger one"):
        zk.ZeroOptimizer(model, kind([param for param in model.parameters() if param.ndim == 2]))


@pytest.fixture
def bf16_is_the_default() -> Iterator[None]:
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("bf16_is_the_default")
@pytest.mark.parametrize("name", ["AdamW", "Adafactor", "Lion"])
def test_torchs_default_dtype_is_not_that_of_states_and_counts(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False, dtype=torch.float32) for _ in range(2)))
    plain = copy.deepcopy(model)
    theirs = make_optimizer(name, list(plain.parameters()))
    with zk.ZeroOptimizer(model, make_optimizer(name, list(model.parameters())), parameterwise=name == "Lion") as optimizer:
        for step in range(300 if name == "AdamW" else 3):
            x = torch.randn(4, 8, dtype=torch.float32)
            for one, by in ((model, optimizer), (plain, theirs)):
                one(x).square().mean().backward()
                by.step()
                by.zero_grad()
            if step == 270:
                optimizer.state[model[0].weight]["step"] += 0  # is read, and put back
                optimizer.load_state_dict(optimizer.state_dict())
        assert all(map(torch.equal, model.parameters(), plain.parameters()))
        assert optimizer.state_dict()["state"][0]["step"] == step + 1
