"""Four ranks: hybrid sharding has plain torch's bits of a mean of means, and checkpoints as ever; buffers are as DDP has them."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zk
from tests.addons.common import faults_of_ranks
from tests.models import adamw, batch, descend, gpt, loss_of
from tests.parity import Case, run_case
from tests.plain import mean_of_ranks
from tests.world import call, mesh_of

pytestmark = pytest.mark.usefixtures("torch_engine")
CASES = [
    Case(stage=3, dtype="bf16", tier="nvme", accumulation=2, no_sync=True, steps=3, overlap_step=True),
    Case(stage=2, dtype="fp16", model="sometimes", steps=3),
    Case(stage=1, accumulation=2, steps=3),
]


def group_of() -> Any:
    return mesh_of("cpu", (2, 2), "replica", "shard")["shard"].get_group()


def mean_of_groups(grads: list[Tensor], dtype: torch.dtype) -> Tensor:
    """Of ranks 0 and 1, and of 2 and 3, each in fp32; and of these two means."""
    return mean_of_ranks([mean_of_ranks(grads[first : first + 2], torch.float32) for first in (0, 2)], dtype)


def trained(case: Case) -> str:
    with mock.patch("tests.plain.mean_of_ranks", mean_of_groups):
        return run_case(replace(case, budgets=(("shard_group", group_of()),)))


def made(stage: int, **options: Any) -> zk.ZeroOptimizer:
    model = gpt()
    return zk.ZeroOptimizer(model, adamw(model), stage=stage, clip_grad_norm=0.5, **options)


def step(optimizer: zk.ZeroOptimizer, number: int) -> None:
    here = dist.get_rank() < 2  # sums of ranks that have none are the same in any order
    descend(optimizer, loss_of(optimizer.model, batch(10 * number + dist.get_rank())) * here)


def at_rest_and_resumed(folder: str) -> list[str]:
    """States of a rank of two are twice those of one of four. A checkpoint of either kind is read by either, and training goes on."""
    optimizers = [made(3, shard_group=group_of()), made(3)]
    sizes = [sum(chunk.numel for store in optimizer._trained for chunk in store.states) for optimizer in optimizers]
    found = []
    for way in ("first", "resumed"):
        for number, optimizer in enumerate(optimizers):
            if way == "resumed":
                optimizer.load_checkpoint(Path(folder, str(1 - number)))
            else:
                step(optimizer, 0)
                optimizer.save_checkpoint(Path(folder, str(number)))
            step(optimizer, 1)
            found.append(optimizer.consolidated_state_dict("fp32", rank0_only=False))
    wrong = [name for one in found for name in one if not torch.equal(one[name], found[0][name])]
    return wrong + [f"{sizes} at rest"] * (sizes[0] != 2 * sizes[1])


def refusals(_: None) -> None:
    uneven = [dist.new_group([0, 1, 2]), dist.new_group([3])]
    for options, words in (
        ({"shard_group": group_of(), "stage": 0}, "needs stage 1, 2 or 3"),
        ({"shard_group": group_of(), "announce": True}, "remove one"),
        ({"shard_group": uneven[dist.get_rank() // 3]}, r"equally many; ranks gave \[\(0, 1, 2\), \(3,\)\]"),
        ({"shard_group": mesh_of("cpu", (2, 2), "replica", "shard")}, "must be a ProcessGroup"),
    ):
        with pytest.raises((ValueError, TypeError), match=words):
            made(**{"stage": 3, **options})


class Codebook(nn.Module):
    """BatchNorm, an average that forward replaces, a buffer whose size differs by rank, and one that is never written."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        for name in ("mean", "seen", "table"):
            self.register_buffer(name, torch.zeros(4), persistent=name != "seen")

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.layer(x))
        if self.training:
            self.mean = self.mean * 0.9 + x.detach().mean(0) * 0.1
            self.seen = torch.ones(3 + dist.get_rank())
        return x + self.mean + self.table


def differs_from_ddp(stage: int) -> list[str]:
    model = Codebook()
    plain = copy.deepcopy(model)
    plain._ddp_params_and_buffers_to_ignore = ["seen"]
    ddp = nn.parallel.DistributedDataParallel(plain)
    inner = torch.optim.SGD(ddp.parameters(), lr=0.1)
    optimizer = zk.ZeroOptimizer(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage)
    wrong = []
    for number in range(6):
        [one.train(stage == 1 or number > 4) for one in (ddp, model)]  # that nothing was written lately says nothing
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(10 * number + dist.get_rank()))
        for one, own in ((ddp, inner), (model, optimizer)):
            descend(own, one(x).square().mean())
        ddp._sync_buffers()  # which it does before the next forward
        want: dict[str, Any] = dict(ddp.module.named_buffers())
        wrong += [f"{number} {name}" for name, value in model.named_buffers() if name != "seen" and not torch.equal(value, want[name])]
        wrong += ["seen"] * (model.seen.numel() != (3 + dist.get_rank() if model.training else 4))
    return wrong


def test_groups_of_two_and_buffers_among_four_ranks(tmp_path: Path) -> None:
    jobs: list[Any] = [(at_rest_and_resumed, str(tmp_path)), (refusals, None), (differs_from_ddp, 1), (differs_from_ddp, 3)]
    assert faults_of_ranks(4, call, [*((trained, case) for case in CASES), *jobs]) == {}
