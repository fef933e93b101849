"""Collectives over the ranks of a group.

One process is a group of one rank, where they return what they are given. ``about`` names what is
exchanged, for errors and traces.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zk.core.events import COMPLETED, Awaited
from zk.kernels import reference
from zk.next.memory import empty

Group = dist.ProcessGroup | None


class Comm:
    """The five collectives that zk is built on: gather, reduce, numbers, words, broadcast."""

    def __init__(self, group: Group = None, alone: bool = False) -> None:
        self.group = group
        alone = alone or not (dist.is_available() and dist.is_initialized())
        self.size = 1 if alone else dist.get_world_size(group)
        self.rank = 0 if alone else dist.get_rank(group)

    def all_gather(
        self, about: str, shard: Tensor, full: Tensor | None = None
    ) -> tuple[Tensor, Awaited]:
        """The shards (n,) of all ranks as (size * n,), and the work to wait for. Alone: the shard."""
        if self.size == 1:
            return shard, COMPLETED
        if full is None:
            full = empty(self.size * shard.numel(), shard.dtype, shard.device)
        return full, _all_gather(full, shard, group=self.group, async_op=True)

    def reduce_scatter(self, about: str, bucket: Tensor) -> Tensor:
        """This rank's part (n,) of the mean of all ranks' ``bucket`` (size * n,), in its dtype.

        Summed in fp32 in the order of ranks and rounded once: the bits depend on nothing else.
        """
        if self.size == 1:
            return bucket
        rows = empty(bucket.numel(), bucket.dtype, bucket.device)
        dist.all_to_all_single(rows, bucket, group=self.group)
        shard = empty(bucket.numel() // self.size, bucket.dtype, bucket.device)
        reference.unchecked("reduce", bucket.device)(rows.view(self.size, -1), shard)
        return shard

    def rows(self, about: str, values: list[float]) -> list[list[float]]:
        """The numbers of each rank, in the order of ranks."""
        if self.size == 1:
            return [values]
        rows = torch.empty(self.size * len(values), dtype=torch.float64)
        _all_gather(rows, torch.tensor(values, dtype=torch.float64), group=self.group)
        found: list[list[float]] = rows.view(self.size, -1).tolist()
        return found

    def total(self, about: str, values: list[float]) -> list[float]:
        """The sum over ranks of each number, in the order of ranks: the same on all."""
        return [sum(column) for column in zip(*self.rows(about, values), strict=True)]

    def words(self, about: str, value: Any) -> list[Any]:
        """What each rank says: any value that can be pickled."""
        if self.size == 1:
            return [value]
        said: list[Any] = [None] * self.size
        dist.all_gather_object(said, value, group=self.group)
        return said

    def broadcast(self, about: str, values: Tensor) -> None:
        """Give all ranks the first one's ``values``."""
        if self.size > 1:
            dist.broadcast(values, group=self.group, group_src=0)


# torch 2.13 renames it, and warns where it is called by the old name
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
