"""``announce=True``: ranks compare what each is about to do before every collective.

One that goes another way is an error on all, with the words of each. Uses of the core: the seam
``comm``.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zk.core.events import Awaited
from zk.next.addon import Addon
from zk.next.parallel.comm import Comm

NBYTES = 96  # of what is announced: operation, unit, number of elements


class AnnouncedComm(Comm):
    """The same collectives, each after an exchange over connections of its own."""

    def __init__(self, comm: Comm) -> None:
        super().__init__(comm.group)
        ranks = dist.get_process_group_ranks(comm.group or dist.group.WORLD)
        self.own = dist.new_group(ranks, backend="gloo")

    def announce(self, operation: str, about: str, numel: int) -> None:
        text = f"{operation} of {about!r}, {numel} elements".encode()[-NBYTES:].ljust(NBYTES)
        rows = [torch.empty(NBYTES, dtype=torch.uint8) for _ in range(self.size)]
        mine = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        dist.all_gather(rows, mine, group=self.own)
        said = [bytes(row.tolist()).decode(errors="replace").strip() for row in rows]
        if len(set(said)) > 1:
            each = "; ".join(f"rank {rank}: {words}" for rank, words in enumerate(said))
            raise RuntimeError(f"ranks went different ways: {each}")

    def all_gather(
        self, about: str, shard: Tensor, full: Tensor | None = None
    ) -> tuple[Tensor, Awaited]:
        self.announce("all_gather", about, shard.numel())
        return super().all_gather(about, shard, full)

    def reduce_scatter(self, about: str, bucket: Tensor) -> Tensor:
        self.announce("reduce_scatter", about, bucket.numel())
        return super().reduce_scatter(about, bucket)

    def rows(self, about: str, values: list[float]) -> list[list[float]]:
        self.announce("exchange", about, len(values))
        return super().rows(about, values)

    def words(self, about: str, value: Any) -> list[Any]:
        self.announce("words", about, 1)
        return super().words(about, value)

    def broadcast(self, about: str, values: Tensor) -> None:
        self.announce("broadcast", about, values.numel())
        super().broadcast(about, values)


class Announced(Addon):
    def __init__(self, value: bool) -> None:
        """``value``: True."""

    def comm(self, comm: Comm) -> Comm:
        return AnnouncedComm(comm) if comm.size > 1 else comm
