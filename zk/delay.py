"""Delayed update: the update of one step goes on beside forward and backward of the next, whose step() makes it count. It changes numbers.

``step()`` i applies the gradient of step i-1, with the options, the clipping and the loss scale of step i-1. Until then parameters are what they
were: the update goes to shadows (zk/offload/section.py), as far as there is memory for them, and is done in place by the next step() elsewhere.
Source: the one-step delayed parameter update of ZeRO-Offload, arXiv 2101.06840, section 4.4.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from zk.offload.attempt import Attempt
from zk.offload.pipeline import Task
from zk.store import UnitStore


class DelayedUpdate:
    """The update that is to count with the next step()."""

    def __init__(self, optimizer: Any) -> None:
        self.since = optimizer.config.delay_update  # steps before updates are delayed
        self.worker, self.transfer, self.num_threads = optimizer.worker, optimizer.transfer, optimizer.updates.threads_beside
        self.pending: dict[int, Task] = {}  # by the number of the unit

    def begin(self, tasks: Mapping[int, Task], stores: Sequence[UnitStore]) -> None:
        """Take the gradients of a step, and begin the update that counts with the next, after all that the worker has been asked to do."""
        self.pending = dict(tasks)
        for number, task in tasks.items():
            shard = task.shard
            task.handed_over, task.keep, task.attempt, shard.attempt = shard.hand_over(), False, None, None
            stores[number].drop_gradient()
            grads = {section: its for section, its in task.handed_over.items() if section.shadow is not None}
            if not grads or task.unread is not None:
                continue
            attempt = Attempt(task.name, grads, task.change, self.transfer.mark(), True)
            task.attempt = shard.attempt = attempt
            attempt.done = self.worker.submit(functools.partial(attempt.run, self.num_threads, self.worker.stop))

    def take(self) -> dict[int, Task]:
        """Give the update that is to count now."""
        pending, self.pending = self.pending, {}
        return pending

    def forget(self) -> None:
        """Drop the update: what it was for is replaced."""
        for task in self.take().values():
            task.shard.drop_attempt()
            for grads in task.handed_over.values():
                grads.clear()
