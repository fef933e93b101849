"""Mixtures of experts: an expert that is not called is not fetched, gathered or updated."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zk
from tests.world import run_world
from zk.parallel.comm import Group

pytestmark = pytest.mark.usefixtures("torch_engine")

WIDTH, INNER, NUM = 32, 96, 8
EXPERT = 2 * WIDTH * INNER + INNER + WIDTH  # elements


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Each token goes to the best of its experts, of those that are open."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gate = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, NUM, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(NUM))
        self.open = list(range(NUM))

    def forward(self, x: Tensor) -> Tensor:
        if not self.open:
            return x
        flat = self.norm(x).reshape(-1, WIDTH)
        weights = torch.softmax(self.gate(flat)[:, self.open], dim=-1)
        best, chosen = weights.max(dim=-1)
        out = torch.zeros_like(flat)
        for number in chosen.unique().tolist():
            rows = (chosen == number).nonzero().flatten()
            expert = self.experts[self.open[number]]
            out = out.index_add(0, rows, expert(flat[rows]) * best[rows, None])
        return x + out.view_as(x)


class Mixture(nn.Module):
    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]

    def open(self, *experts: int) -> None:
        for block in self.blocks:
            assert isinstance(block, Block)
            block.open = list(experts)


def make(layers: int = 2) -> Mixture:
    torch.manual_seed(0)
    return Mixture(layers)


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def loss_of(model: nn.Module, seed: int, tokens: int, has_graph: bool = False) -> Tensor:
    x = torch.randn(2, tokens // 2, WIDTH, generator=torch.Generator().manual_seed(seed))
    return model(x.requires_grad_(has_graph)).square().mean()  # type: ignore[no-any-return]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, start: int = 0, tokens: int = 12) -> list[float]:
    losses = []
    for seed in range(start, start + steps):
        loss = loss_of(model, seed, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


SETTINGS: dict[str, dict[str, Any]] = {
    "2-beside": {"stage": 2, "overlap_step": True},
    "3-host": {"stage": 3, "param_tier": "host"},
    "3-nvme": {"stage": 3, "param_tier": "nvme", "optimizer_tier": "nvme"},
    "3-nvme-far": {"stage": 3, "param_tier": "nvme", "optimizer_tier": "nvme", "prefetch": 3},
}


def wrapped(model: nn.Module, setting: str, folder: Path, **more: Any) -> zk.ZeroOptimizer:
    options = {**SETTINGS[setting], **more, **({"nvme_path": folder} if "nvme" in setting else {})}
    return zk.ZeroOptimizer(model, adamw(model), **options)


@pytest.mark.parametrize("setting", ("2-beside", "3-host", "3-nvme-far"))
def test_experts_train_as_in_plain_torch(setting: str, tmp_path: Path) -> None:
    model, plain = make(), make()
    other = adamw(plain)
    with wrapped(model, setting, tmp_path) as optimizer:
        num_units = sum(".experts." in store.unit.name for store in optimizer.held)
        assert num_units == (2 * NUM if optimizer.config.stage == 3 else 0)  # where full parameters stay there is nothing to gain
        for start, experts in enumerate((range(NUM), (0, 1), (2, 5, 7), range(NUM))):
            model.open(*experts)
            plain.open(*experts)
            assert train(model, optimizer, 2, 2 * start, 4) == train(plain, other, 2, 2 * start, 4)
        optimizer.synchronize()
        with zk.gather(model.parameters()):
            assert [name for (name, got), want in zip(model.named_parameters(), plain.parameters(), strict=True) if not torch.equal(got, want)] == []


def test_only_experts_in_use_are_fetched(tmp_path: Path) -> None:
    """Bytes of a step, against those where nothing is asked for ahead of use: others in each step, and the same in each step."""

    def fetched(prefetch: int, changes: bool) -> float:
        model, draw = make(), random.Random(0)
        with wrapped(model, "3-nvme", tmp_path, prefetch=prefetch) as optimizer:
            for step in range(9):
                if step == 3:
                    optimizer.synchronize()
                    before = optimizer.metrics()["fetched_nbytes"]
                model.open(*(sorted(draw.sample(range(NUM), 2)) if changes else (2, 5)))
                train(model, optimizer, 1, step)
            optimizer.synchronize()
            return (optimizer.metrics()["fetched_nbytes"] - before) / 6

    for changes in (True, False):
        needed = fetched(0, changes)
        for prefetch in (1, 3):
            nbytes = fetched(prefetch, changes)
            assert 0.5 * needed <= nbytes <= 1.1 * needed, (changes, prefetch, nbytes, needed)  # parameters, half of it, may be in memory still
    state = 4 * 2 + 4 * 2 + 4 * 2 + 4  # per element: parameters for forward, backward; twice more for the update; moments, gradient
    assert needed <= 1.1 * state * 2 * 2 * EXPERT + 60 * 4096  # the rest is small, and each piece begins on a page


# the experts that are open to each of two ranks, step by step: other ones, some of them the same, all, and none to one
ALL = range(NUM)
OPEN: list[tuple[Sequence[int], Sequence[int]]] = [
    *(((0, 1), (6, 7)), ((3,), (3, 4, 5)), (ALL, ALL), ((2, 5), ()), ((), (1,)), ((), ()), ((7, 0), (0, 1))),
]


def run_apart(case: tuple[str, str, Path]) -> list[str]:
    """Train with other experts on each rank, and in one process on the batches of both; returns what differs."""
    kind, setting, folder = case
    rank = torch.distributed.get_rank()
    layers = 2 if kind in ("plain", "named") else 1
    model, plain = make(layers), make(layers)
    if kind == "adapted":
        for name, param in [*model.named_parameters(), *plain.named_parameters()]:
            param.requires_grad_(name.endswith("bias"))
    if kind == "inside":  # nothing else is trained: a rank that uses no expert has no gradient of a parameter
        for name, param in [*model.named_parameters(), *plain.named_parameters()]:
            param.requires_grad_(".experts." in name and name.endswith("bias"))
    if kind == "unlike":  # of one class, and of other shapes
        torch.manual_seed(1)
        for block in plain.blocks:
            for number in (1, 6):
                block.experts[number].down = nn.Sequential(nn.Linear(INNER, 10 + number), nn.Linear(10 + number, WIDTH))  # type: ignore[index]
        model = copy.deepcopy(plain)
    if kind == "tiled":
        zk.tile_linears(model, 7_000), zk.tile_linears(plain, 7_000)  # two tiles of each layer of an expert
    other, found = adamw(plain), []
    with wrapped(model, setting, folder, **({"units": [Block, Expert, nn.LayerNorm]} if kind == "named" else {})) as optimizer:
        for step, opened in enumerate(OPEN):
            if (kind == "named" and not all(opened)) or (kind == "inside" and not any(opened)):
                continue  # the norm would rest on one rank; a step has no gradient on any
            losses = []
            for peer, numbers in enumerate(opened):
                plain.open(*numbers)
                losses.append(loss_of(plain, 2 * step + peer, 8, kind == "inside"))
                (losses[-1] / 2).backward()
            other.step()
            other.zero_grad()
            model.open(*opened[rank])
            loss = loss_of(model, 2 * step + rank, 8, kind == "inside")
            loss.backward()
            if kind == "inside" and all(param.grad is None for param in model.parameters()):  # a look, on all ranks
                found.append(f"no gradient in step {step}")
            optimizer.step()
            optimizer.zero_grad()
            if loss != losses[rank]:
                found.append(f"loss {loss.item()} instead of {losses[rank].item()} in step {step}")
        with torch.no_grad():
            for each in (model, plain):
                each.open(*range(4 * rank, 4 * rank + 4))
            if loss_of(model, 99, 8) != loss_of(plain, 99, 8):
                found.append("evaluation differs")
        want = plain.state_dict()
        found += [name for name, value in model.state_dict().items() if not torch.equal(value, want[name])]
    return found


def test_ranks_that_use_other_experts_train_as_one_process_with_all_batches(tmp_path: Path) -> None:
    cases = [("plain", "3-nvme-far", tmp_path), ("named", "3-nvme", tmp_path), ("tiled", "3-host", tmp_path)]
    cases += [("adapted", "3-nvme-far", tmp_path), ("unlike", "3-host", tmp_path), ("inside", "3-nvme-far", tmp_path)]
    table = run_world(2, run_apart, cases)
    assert {case[:2]: rows for case, rows in zip(cases, table, strict=True) if rows != [[], []]} == {}


def gathered_nbytes(changes: bool) -> tuple[float, float]:
    """Bytes gathered in a step after some, and those of the experts that any rank used and of what every token uses, twice."""
    gather, nbytes, draw = Group.all_gather, 0, random.Random(0)

    def count(self: Group, unit: int, full: Tensor, shard: Tensor) -> Any:
        nonlocal nbytes
        nbytes += full.nbytes
        return gather(self, unit, full, shard)

    model, used = make(), 0
    with zk.ZeroOptimizer(model, adamw(model), stage=3) as optimizer, pytest.MonkeyPatch.context() as patch:
        rest = sum(store.full.nbytes for store in optimizer.held if not store.unit.is_expert)
        for step in range(8):
            if step == 6:
                patch.setattr(Group, "all_gather", count)
            opened = [sorted(draw.sample(range(NUM), 2)) if changes else ((2, 5), (5, 7))[peer] for peer in range(2)]
            model.open(*opened[torch.distributed.get_rank()])
            train(model, optimizer, 1, step, 64)
            used += 2 * (2 * 4 * EXPERT * len({*opened[0], *opened[1]}) + rest) * (step >= 6)
    return nbytes / 2, used / 2


def test_ranks_gather_the_experts_that_some_rank_uses() -> None:
    for changes, rows in zip((True, False), run_world(2, gathered_nbytes, (True, False)), strict=True):
        for nbytes, used in rows:
            assert 0.9 * used <= nbytes <= 1.1 * used, (changes, nbytes, used)


def run_alone(where: str) -> str:
    """Call an expert by itself: on all ranks or on one; or give one rank's block no input with a graph."""
    rank, model = torch.distributed.get_rank(), make()
    model.enter.requires_grad_(where != "no graph")
    with zk.ZeroOptimizer(model, adamw(model), stage=3):
        try:
            x = torch.ones(2, 3, WIDTH)
            if where == "on all ranks" or (where == "on one" and rank == 0):
                expert = model.blocks[0].experts[3]  # type: ignore[union-attr,index]
                assert torch.equal(expert(x), make().blocks[0].experts[3](x))  # type: ignore[union-attr,index,operator]
            model.open(*(() if where == "no graph" and rank else range(NUM)))
            model(x).sum().backward()
        except RuntimeError as error:
            return str(error)
        return ""


def test_experts_that_ranks_do_not_use_alike_are_an_error_with_names() -> None:
    alike, one = run_world(2, run_alone, ["on all ranks", "on one"])
    (graph,) = run_world(2, run_alone, ["no graph"])
    assert alike == ["", ""]
    assert all("the choice of experts" in text and "ranks diverged" in text for text in one), one
    assert all("blocks.0" in text and "enable_input_require_grads" in text for text in graph), graph


def test_lists_of_other_things_stay_in_their_block() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList([nn.Linear(64, 64), nn.LayerNorm(64)])  # as in T5: not alike
            self.small = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
            self.one = nn.ModuleList([nn.Linear(128, 128)])

    model = nn.Sequential(Mixed(), Mixed())
    with zk.ZeroOptimizer(model, adamw(model)) as optimizer:
        assert [store.unit.name for store in optimizer.held] == ["0", "1"]


def test_layers_by_number_in_a_dict_are_units() -> None:
    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleDict({"enter": nn.Linear(8, 8), "norm": nn.LayerNorm(8)})  # not alike
            self.heads = nn.ModuleDict({"one": nn.Linear(8, 2), "two": nn.Linear(8, 2)})  # alike, and with nothing inside
            self.layers = nn.ModuleDict({str(number): Expert() for number in (3, 4)})

    model = Layers()
    with zk.ZeroOptimizer(model, adamw(model)) as optimizer:
        assert [store.unit.name for store in optimizer.held] == ["layers.3", "layers.4", "rest"]


def test_units_that_are_named_lie_within_each_other() -> None:
    model = make()
    with zk.ZeroOptimizer(model, adamw(model), stage=3, param_tier="host", units=[Block, "blocks.0.experts.3", nn.LayerNorm]) as optimizer:
        held = {store.unit.name: store.unit.names for store in optimizer.held}
        assert list(held) == ["blocks.0.norm", "blocks.0", "blocks.0.experts.3", "blocks.1.norm", "blocks.1", "rest"]
        assert held["blocks.0.experts.3"] == [f"blocks.0.experts.3.{name}.{kind}" for name in ("up", "down") for kind in ("weight", "bias")]
        assert len(held["blocks.0"]) == 1 + 7 * 4 and len(held["blocks.1"]) == 1 + 8 * 4
        plain = copy.deepcopy(make())
        assert train(model, optimizer, 3) == train(plain, adamw(plain), 3)


def ranks(settings: dict[str, Any]) -> str:
    """Train on this rank's part of each batch, with experts of this rank's own; "" if every rank has what the plain model has."""
    rank, model, plain = dist.get_rank(), make(), make()
    other = adamw(plain)
    with zk.ZeroOptimizer(model, adamw(model), **settings) as optimizer:
        for step, experts in enumerate((([0, 1], [6, 7]), ([7, 0], [0, 3]), ([1], [1]))):
            x = torch.randn(2, 4, WIDTH, generator=torch.Generator().manual_seed(step))
            model.open(*experts[rank])
            model(x[rank]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            for number, chosen in enumerate(experts):
                plain.open(*chosen)
                (plain(x[number]).square().mean() / 2).backward()
            other.step()
            other.zero_grad()
        have = optimizer.consolidated_state_dict()
    worst = max((have[name] - value).abs().max().item() for name, value in plain.state_dict().items())
    return "" if worst < 2e-5 else f"parameters differ by {worst}"  # the mean over ranks is rounded otherwise than the sum of two halves


def test_ranks_that_use_other_experts_publish_updates_in_one_order() -> None:
    for results in run_world(2, ranks, [{"stage": stage, "overlap_step": True, "units": [Block, Expert]} for stage in (1, 2)]):
        assert results == ["", ""], results
