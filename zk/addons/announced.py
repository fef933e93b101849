"""``announce=True``: ranks compare what each is about to do before every collective.

One that goes another way is an error on all, with the words of each. Without it the transport fails,
or waits until the group's timeout. Uses of the core: the seam ``comm``, the collectives of Comm.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zk.addon import Addon
from zk.parallel.comm import Collective, Comm, host_group

NBYTES = 128  # of what is announced: operation, unit, number and kind of elements


class AnnouncedComm(Comm):
    """The same collectives, each after an exchange over connections of its own."""

    def __init__(self, comm: Comm) -> None:
        super().__init__(comm.group)
        self.own = host_group(comm.group or dist.group.WORLD, of_its_own=True)

    def announce(self, operation: str, about: str, numel: int, kind: Any = "numbers") -> None:
        """RuntimeError on all ranks if one is about to do something else."""
        text = f"{operation} of {about!r}, {numel} {kind}"
        mine = torch.frombuffer(bytearray(text.encode()[:NBYTES].ljust(NBYTES)), dtype=torch.uint8)
        rows = [torch.empty(NBYTES, dtype=torch.uint8) for _ in range(self.size)]
        with self.named("announcement", text):
            dist.all_gather(rows, mine, group=self.own)
        if any(not torch.equal(row, mine) for row in rows):
            said = [bytes(row.tolist()).decode(errors="replace").strip() for row in rows]
            each = "; ".join(f"rank {rank}: {words}" for rank, words in enumerate(said))
            raise RuntimeError(
                f"ranks went different ways: {each}; all ranks of stage 3 call the same blocks, and all "
                "call step(), state_dict(), zk.gather() and reads of param.grad together"
            )

    def all_gather(
        self, about: str, shard: Tensor, full: Tensor | None = None
    ) -> tuple[Tensor, Collective]:
        self.announce("all_gather", about, shard.numel(), shard.dtype)
        return super().all_gather(about, shard, full)

    def reduce_scatter(self, about: str, bucket: Tensor) -> Tensor:
        self.announce("reduce_scatter", about, bucket.numel(), bucket.dtype)
        return super().reduce_scatter(about, bucket)

    def rows(self, about: str, values: list[float]) -> list[list[float]]:
        self.announce("exchange", about, len(values))
        return super().rows(about, values)

    def words(self, about: str, value: Any) -> list[Any]:
        self.announce("exchange", about, 1, "values")
        return super().words(about, value)

    def broadcast(self, about: str, values: Tensor) -> None:
        self.announce("broadcast", about, values.numel(), values.dtype)
        super().broadcast(about, values)


class Announced(Addon):
    def __init__(self, value: bool) -> None:
        if value is not True:
            raise ValueError(f"announce must be True or False; got {value!r}")

    def comm(self, comm: Comm) -> Comm:
        return AnnouncedComm(comm) if comm.size > 1 else comm
