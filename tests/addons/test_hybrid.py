"""Hybrid sharding: the bits of plain torch on all ranks, shards of a group, and checkpoints as ever."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zk
from tests.models import GPT, batch, loss_of
from tests.parity import Case, run_case
from tests.world import call, mesh_of, run_world

pytestmark = pytest.mark.usefixtures("torch_engine")
CASES = [
    Case(stage=3, dtype="bf16", steps=3),
    Case(stage=3, dtype="bf16", tier="nvme", accumulation=2, no_sync=True, steps=3, overlap_step=True),
    Case(stage=2, dtype="fp16", steps=3),
    Case(stage=1, accumulation=2, steps=3),
    Case(stage=3, model="sometimes", steps=3),
]


def group_of() -> Any:
    return whole_mesh()["shard"].get_group()


def trained(case: Case) -> str:
    return run_case(replace(case, budgets=(("shard_group", group_of()),)))


def numel_at_rest(stage: int) -> list[int]:
    """Of all states on a rank: with groups of two ranks, and of all four; and the way a checkpoint goes between them."""
    found = []
    for options in ({"shard_group": group_of()}, {}):
        optimizer = made(stage, **options)
        found.append(sum(chunk.numel for store in optimizer._trained for chunk in store.states))
        optimizer.close()
    return found


def made(stage: int, **options: Any) -> zk.ZeroOptimizer:
    torch.manual_seed(0)
    model = GPT()
    return zk.ZeroOptimizer(model, torch.optim.AdamW(model.parameters(), lr=1e-2), stage=stage, clip_grad_norm=0.5, **options)


def resumed(folder: str) -> list[bool]:
    """A checkpoint of either kind is read by either: the masters after a step more are those of a run without a break."""
    optimizers = []
    for options in ({"shard_group": group_of()}, {}):
        optimizer = made(3, **options)
        step(optimizer, 0)
        optimizer.save_checkpoint(Path(folder, str(len(options))))
        step(optimizer, 1)
        optimizers.append(optimizer)
    want = [optimizer.consolidated_state_dict("fp32", rank0_only=False) for optimizer in optimizers]
    for optimizer, other in zip(optimizers, ("0", "1"), strict=True):
        optimizer.load_checkpoint(Path(folder, other))
        step(optimizer, 1)
    got = [optimizer.consolidated_state_dict("fp32", rank0_only=False) for optimizer in optimizers]
    return [torch.equal(one[name], want[0][name]) for one in (*want, *got) for name in one]


def step(optimizer: zk.ZeroOptimizer, number: int) -> None:
    loss_of(optimizer.model, batch(10 * number + dist.get_rank())).backward()
    optimizer.step()
    optimizer.zero_grad()


def refused(case: tuple[dict[str, Any], str]) -> bool:
    options, words = case
    options = {name: value() if callable(value) else value for name, value in options.items()}
    with pytest.raises((ValueError, TypeError), match=words):
        made(**{"stage": 3, **options})
    return True


def whole_mesh() -> Any:
    return mesh_of("cpu", (2, 2), "replica", "shard")


def uneven() -> Any:
    """A group of three ranks, and one of one."""
    groups = [dist.new_group([0, 1, 2]), dist.new_group([3])]
    return groups[dist.get_rank() == 3]


REFUSED = [
    ({"shard_group": group_of, "stage": 0}, "needs stage 1, 2 or 3"),
    ({"shard_group": group_of, "announce": True}, "remove one"),
    ({"shard_group": uneven}, r"equally many; ranks gave \[\(0, 1, 2\), \(3,\)\]"),
    ({"shard_group": whole_mesh}, "must be a ProcessGroup"),
]


def test_groups_of_two_among_four_ranks(tmp_path: Path) -> None:
    jobs: list[Any] = [(trained, case) for case in CASES]
    jobs += [(numel_at_rest, stage) for stage in (1, 3)] + [(resumed, str(tmp_path))] + [(refused, case) for case in REFUSED]
    rows = run_world(4, call, jobs)
    for case, said in zip(CASES, rows, strict=False):
        assert said == [""] * 4, case
    sizes, (equal, *_), answers = rows[len(CASES) : -len(REFUSED) - 1], rows[-len(REFUSED) - 1], rows[-len(REFUSED) :]
    assert all(of_two == 2 * of_four for of_rank in sizes for of_two, of_four in of_rank)
    assert equal and all(equal)
    assert answers == [[True] * 4] * len(REFUSED)
