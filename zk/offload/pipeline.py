"""In: units with reduced gradients. Out: updated parameters where they compute: update -> cast -> upload -> publish. The only scheduler."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from zk.offload.state import OptimizerShard


class Ticket(Protocol):
    """Something under way that can be waited for."""

    def wait(self) -> None: ...


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """Consecutive elements of a shard that take the same scalars."""

    elements: slice
    group: Mapping[str, Any]
    step: int


@dataclasses.dataclass(frozen=True, slots=True)
class Task:
    """One unit's part in a step."""

    name: str
    shard: OptimizerShard
    runs: Sequence[Run]
    publish: Callable[[], Ticket | None]  # brings the updated slice to the other ranks


def update(tasks: Sequence[Task], grad_scale: float, num_threads: int) -> None:
    """Update every unit, and publish one while the next is updated. Gradients are multiplied by ``grad_scale`` on the way."""
    tickets = []
    for task in tasks:
        with torch.profiler.record_function(f"zk::update {task.name}"):
            for run in task.runs:
                task.shard.update(run.elements, run.group, run.step, grad_scale, num_threads)
            task.shard.upload()
            tickets.append(task.publish())
    for ticket in tickets:
        if ticket is not None:
            ticket.wait()
