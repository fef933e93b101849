"""In: units with reduced gradients. Out: updated parameters where they compute: fetch -> update+cast -> evict -> upload -> publish, over chunks.

The only scheduler. State in memory is one chunk that is always there; on NVMe the next chunks are read and the last ones written while
one is updated. Every other step goes the other way, so that what is still in memory is used first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from zk.offload.state import OptimizerShard
from zk.offload.tiers import CHUNKS_IN_MEMORY, CHUNKS_KEPT

Run = tuple[slice, Mapping[str, Any], int]  # consecutive elements of a shard, their group, and their step count


class Ticket(Protocol):
    """Something under way that can be waited for."""

    def wait(self) -> None: ...


@dataclasses.dataclass(frozen=True, slots=True)
class Task:
    """One unit's part in a step."""

    name: str
    shard: OptimizerShard
    runs: Sequence[Run]
    publish: Callable[[], Ticket | None]  # brings the updated slice to the other ranks


def update(tasks: Sequence[Task], grad_scale: float, num_threads: int, backwards: bool) -> None:
    """Update every unit, and publish one while the next is updated. Gradients are multiplied by ``grad_scale`` on the way.

    ``backwards`` goes from the last chunk of the last unit to the first; all ranks alike.
    """
    work = [(task, index) for task in tasks for index in range(len(task.shard.chunks))]
    if backwards:
        work.reverse()
    left = {task.name: len(task.shard.chunks) for task in tasks}
    tickets = []
    asked = 0
    for position, (task, index) in enumerate(work):
        asked = max(asked, position)
        while asked < min(len(work), position + CHUNKS_IN_MEMORY - 1) and work[asked][0].shard.fetch(work[asked][1]):
            asked += 1
        with torch.profiler.record_function(f"zk::update {task.name}"):
            task.shard.update(index, task.runs, grad_scale, num_threads, keep=position >= len(work) - CHUNKS_KEPT)
        left[task.name] -= 1
        if left[task.name] == 0:
            task.shard.upload()
            tickets.append(task.publish())
    for ticket in tickets:
        if ticket is not None:
            ticket.wait()
