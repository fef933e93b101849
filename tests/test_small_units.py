"""Many small blocks: neighbours are one unit, which changes no bit, and takes requests to a drive once for all of them."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zk
from tests.world import run_world
from zk.core import units
from zk.core.store import State, UnitStore
from zk.core.units import find_units
from zk.offload import nvme

pytestmark = pytest.mark.usefixtures("torch_engine", "one_thread")
BLOCKS, WIDTH = 16, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.up(self.norm(x)))


class Net(nn.Module):
    """Calls its blocks in ``way``; a tuple in it is one checkpoint."""

    def __init__(self, way: str = "in order") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.way, self.step = way, 0
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        if way == "tied":
            self.blocks[9].up.weight = self.blocks[1].up.weight
        if way == "frozen":
            for block in self.blocks:
                block.up.weight.requires_grad_(False)

    def order(self) -> list[int | tuple[int, ...]]:
        every = list(range(BLOCKS))
        if self.way == "backwards":
            return every[::-1]
        if self.way == "twice":
            return [number for number in every for _ in range(2)]
        if self.way == "skips":
            return every[self.step % 3 : -2 or None : 2]
        if self.way == "segments":  # that are no units, and go to and fro
            return [tuple(every[:4]), tuple(every[4:8][::-1]), (8,), tuple(every[9:])]
        return every

    def forward(self, x: Tensor) -> Tensor:
        def run(numbers: tuple[int, ...], x: Tensor) -> Tensor:
            for number in numbers:
                x = self.blocks[number](x)
            return x

        x = self.first(x)
        for part in self.order():
            x = checkpoint(run, part, x, use_reentrant=False) if isinstance(part, tuple) else run((part,), x)
        self.step += self.training
        return x


def inner_of(model: nn.Module) -> torch.optim.AdamW:
    params = [param for param in model.parameters() if param.requires_grad]
    vectors = [param for param in params if param.ndim < 2]
    return torch.optim.AdamW([{"params": [p for p in params if p.ndim > 1]}, {"params": vectors, "weight_decay": 0.0}], lr=1e-2)


def loss_of(model: nn.Module, seed: int) -> Tensor:
    return model(torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed))).square().mean()  # type: ignore[no-any-return]


def trained(way: str, nbytes: int, options: dict[str, Any], vertical: bool = False) -> tuple[list[float], dict[str, Tensor], int]:
    """Losses, weights, and the number of units after some steps, with units of small blocks up to ``nbytes``."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    with mock.patch.object(units, "TOGETHER_NBYTES", nbytes), tempfile.TemporaryDirectory() as folder:
        drive = {"nvme_path": folder} if "nvme" in options.values() else {}
        model = Net(way)
        losses = []
        with zk.ZeroOptimizer(model, inner_of(model), clip_grad_norm=0.1, **options, **drive) as optimizer:
            for step in range(3 if way == "skips" else 2):
                seeds = [100 * step + 10 * micro + rank for micro in range(1 + vertical)]
                if vertical:
                    losses += [loss.item() for loss in optimizer.accumulate(seeds, loss_of)]
                for seed in seeds if not vertical else ():
                    loss = loss_of(model, seed)
                    loss.backward()  # type: ignore[no-untyped-call]
                    losses.append(loss.item())
                optimizer.step()
                optimizer.zero_grad()
                if options["stage"] == 3:
                    assert not any(held.state is State.GATHERED for held in optimizer.held if held.lease is not None)
            with torch.no_grad():
                losses.append(loss_of(model, 7).item())
            return losses, optimizer.consolidated_state_dict("fp32"), len(optimizer.held)


STAGE_2 = {"stage": 2, "optimizer_tier": "host"}
ON_HOST = {"stage": 3, "param_tier": "host", "optimizer_tier": "host", "dtype": "bf16", "compute_dtype": "fp32"}  # (which moves, with one rank too)
ON_DRIVE = {"stage": 3, "param_tier": "nvme", "optimizer_tier": "nvme"}
WAYS = ("backwards", "twice", "segments", "tied", "frozen")
CASES: list[tuple[str, dict[str, Any], bool]] = [
    *((way, ON_HOST, False) for way in WAYS),
    *((way, ON_DRIVE, False) for way in ("in order", "segments")),
    ("tied", STAGE_2, False),
    ("in order", ON_DRIVE, True),
    ("frozen", ON_HOST, True),
    *(("skips", {**ON_HOST, "overlap_step": how}, False) for how in (True, "backward")),
]
OF_TWO: list[tuple[str, dict[str, Any], bool]] = [("segments", ON_HOST, False), ("frozen", STAGE_2, False)]


def differences(case: tuple[str, dict[str, Any], bool]) -> str:
    way, options, vertical = case
    apart, together, by_three = (trained(way, nbytes, options, vertical) for nbytes in (0, units.TOGETHER_NBYTES, 1000))
    kinds = 2 if way == "frozen" else 1
    assert apart[2] == 1 + kinds * BLOCKS and together[2] == 1 + kinds and together[2] < by_three[2] < apart[2]
    found = [case] * (apart[0] != together[0] or apart[0] != by_three[0])
    found += [name for name, value in apart[1].items() for other in (together, by_three) if not torch.equal(value, other[1][name])]
    return str(found) if found else ""


@pytest.mark.parametrize("world", (1, 2))
def test_no_bit_depends_on_which_blocks_travel_together(world: int) -> None:
    table = [[differences(case)] for case in CASES] if world == 1 else run_world(world, differences, OF_TWO, timeout=120)
    wrong = [row for row in table if any(row)]
    assert not wrong, wrong


def test_a_checkpoint_does_not_depend_on_it(tmp_path: Path) -> None:
    options = {**STAGE_2, "dtype": "bf16"}
    ends = []
    for nbytes in (0, 1 << 20):
        with mock.patch.object(units, "TOGETHER_NBYTES", nbytes), zk.ZeroOptimizer(model := Net(), inner_of(model), **options) as optimizer:
            if nbytes:
                optimizer.load_checkpoint(tmp_path)
            for seed in (0, 1) if not nbytes else (1,):
                if seed and not nbytes:
                    optimizer.save_checkpoint(tmp_path)
                loss_of(model, seed).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
            ends.append(optimizer.consolidated_state_dict("fp32"))
    assert all(torch.equal(value, ends[1][name]) for name, value in ends[0].items())


def found(model: nn.Module, **options: Any) -> dict[str, list[str]]:
    trained = {param: index for index, param in enumerate(model.parameters())} if "groups" not in options else options.pop("groups")
    return {unit.name: unit.names for unit in find_units(model, trained, **options)}


def test_small_neighbours_are_one_unit_up_to_a_size_and_others_stay() -> None:
    plain = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(16)))
    assert list(found(plain)) == ["0 to 15"]
    assert list(found(plain[:15])) == [str(number) for number in range(15)]  # of few, each stays
    assert list(found(plain, wanted=[nn.Linear])) == [str(number) for number in range(16)]  # what the user says
    with mock.patch.object(units, "TOGETHER_NBYTES", 3 * 64):
        assert list(found(plain)) == ["0 to 2", "3 to 5", "6 to 8", "9 to 11", "12 to 14", "15"]
        assert list(found(plain, stored=dict.fromkeys(plain.parameters(), torch.bfloat16))) == ["0 to 5", "6 to 11", "12 to 15"]
    large = nn.Sequential(*(nn.Linear(4, 4 if number != 5 else 1 << 17, bias=False) for number in range(20)))
    assert list(found(large)) == ["0 to 4", "5", "6 to 19"]
    large[7].weight.requires_grad_(False)
    assert list(found(large)) == ["0 to 4", "5", "6 to 19", "7"]
    groups = {param: index % 2 for index, param in enumerate(plain.parameters())}
    assert found(plain, groups=groups)["0 to 15"] == [f"{number}.weight" for number in (*range(0, 16, 2), *range(1, 16, 2))]


def counted(owner: type, name: str, call: Callable[[], object]) -> int:
    """Calls of a method while ``call`` runs."""
    method, count = getattr(owner, name), 0

    def counting(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        return method(*args, **kwargs)

    with mock.patch.object(owner, name, counting):
        call()
    return count


@pytest.mark.parametrize("vertical", (False, True))
def test_a_unit_of_many_blocks_moves_once_for_all_of_them(vertical: bool) -> None:
    def step(optimizer: zk.ZeroOptimizer) -> None:
        if vertical:
            optimizer.accumulate([0, 1], loss_of)
        else:
            loss_of(optimizer.model, 0).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    found = {}
    for nbytes in (0, units.TOGETHER_NBYTES):
        with mock.patch.object(units, "TOGETHER_NBYTES", nbytes), tempfile.TemporaryDirectory() as folder:
            model = Net()
            with zk.ZeroOptimizer(model, inner_of(model), nvme_path=folder, **ON_DRIVE) as optimizer:
                for _ in range(2):
                    step(optimizer)
                requests = counted(nvme.File, "_start", functools.partial(step, optimizer))
                gathers = counted(UnitStore, "_fill", functools.partial(step, optimizer))
                gradients = counted(UnitStore, "take_in", functools.partial(step, optimizer))
                found[nbytes] = requests, gathers, gradients
    apart, together = found.values()
    # the first layer is not read in backward; with ``accumulate`` the last block stays for backward
    assert apart[1:] == (1 + 2 * BLOCKS - vertical, 1 + BLOCKS) and together[1:] == (1 + 2 - vertical, 1 + 1)
    assert 5 * together[0] < apart[0]
