"""Bytes that hybrid sharding sends: nothing is gathered between replicas, and only the reduced shard goes there."""

from __future__ import annotations

import collections
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import zk
from tests.megatron import batch, loss_of, whole_model
from tests.world import run_world
from zk.parallel import comm

CONTROL_NBYTES = 32  # of an announcement


class Counted:
    """torch.distributed, with a count of the bytes that each call has this rank send: (ranks of the group, call) -> bytes."""

    def __init__(self) -> None:
        self.sent: collections.Counter[tuple[tuple[int, ...], str]] = collections.Counter()

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def _note(self, call: str, nbytes: float, group: Any) -> None:
        self.sent[tuple(dist.get_process_group_ranks(group)), call] += int(nbytes)

    def all_to_all_single(self, output: torch.Tensor, given: torch.Tensor, group: Any, async_op: bool) -> Any:
        ranks = dist.get_world_size(group)
        self._note("exchange", given.nbytes * (ranks - 1) / ranks, group)
        return dist.all_to_all_single(output, given, group=group, async_op=async_op)

    def broadcast(self, tensor: torch.Tensor, rank: int, group: Any, async_op: bool) -> Any:
        self._note("gather", (rank == dist.get_rank()) * tensor.nbytes * (dist.get_world_size(group) - 1), group)
        return dist.broadcast(tensor, rank, group=group, async_op=async_op)

    def all_reduce(self, tensor: torch.Tensor, group: Any, async_op: bool) -> Any:
        self._note("sum", tensor.nbytes, group)
        return dist.all_reduce(tensor, group=group, async_op=async_op)

    def all_gather_single(self, full: torch.Tensor, shard: torch.Tensor, group: Any, async_op: bool) -> Any:
        self._note("announcement" if shard.nbytes == CONTROL_NBYTES else "all-gather", shard.nbytes, group)
        return getattr(dist, "all_gather_single", dist.all_gather_into_tensor)(full, shard, group=group, async_op=async_op)

    all_gather_into_tensor = all_gather_single


def one_step(stage: int) -> tuple[dict[str, dict[str, int]], list[int]]:
    """Bytes that this rank sends in the third step, by ranks that it goes to and by call; and elements of each unit, the last outside of blocks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = whole_model()
    optimizer = zk.ZeroOptimizer(
        model, torch.optim.AdamW(model.parameters()), stage=stage, dtype="bf16", clip_grad_norm=1.0, process_group=mesh, prefetch=1
    )
    numels = [held.layout.numel for held in optimizer.held]
    counted = Counted()
    try:
        for step in range(3):
            counted.sent.clear()
            comm.dist = counted  # type: ignore[attr-defined]
            loss_of(model, batch(step, dist.get_rank())).backward()
            optimizer.step()
            optimizer.zero_grad()
    finally:
        comm.dist = dist  # type: ignore[attr-defined]
    optimizer.close()
    names = {2 * (dist.get_rank() // 2): "row"}
    sent: dict[str, dict[str, int]] = {"row": {}, "column": {}, "all": {}}
    for (ranks, call), nbytes in counted.sent.items():
        where = "all" if len(ranks) == 4 else "row" if ranks[0] in names and ranks[1] == ranks[0] + 1 else "column"
        sent[where][call] = nbytes
    return sent, numels


def test_between_replicas_goes_the_reduced_shard_and_nothing_else() -> None:
    for stage, ranks in zip((2, 3), run_world(4, one_step, [2, 3], timeout=60), strict=True):
        for sent, numels in ranks:
            numel, replicas, shards = sum(numels), 2, 2
            mean = numel // shards
            # of its shard's mean in fp32 each sends what others sum, and of the sum in bf16 what others lack
            assert sent["column"] == {"exchange": 4 * mean * (replicas - 1) // replicas, "gather": 2 * mean * (replicas - 1) // replicas}
            # parameters: updated ones at stage 2; at stage 3 all of them for forward, and blocks again for backward
            gathered = numel if stage == 2 else numel + sum(numels[:-1])
            assert sent["row"] == {"exchange": 2 * numel * (shards - 1) // shards, "gather": 2 * gathered // shards * (shards - 1)}, stage
            # no more than announcements, the norm in fp64, and flags in fp32: three of each unit, and which parameters have gradients
            params = sum(1 for _ in whole_model().parameters())
            assert set(sent["all"]) == {"sum", "announcement"} and sent["all"]["sum"] == 8 + 4 * (3 * len(numels) + params)
