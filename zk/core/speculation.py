"""Speculation: updates that begin in backward, before the norm of all gradients is known, and change no bit.

A unit whose gradient is whole is updated out of place, in the background, as if nothing were clipped (zk/offload/section.py). In step() the norm is
known: where that was right the unit's memory is exchanged, and nothing is computed again; else the shadow is left, and the unit updated as always.
Three things bound the price: an update ends where the sum of squares so far says that gradients will be clipped; none begins after a step that was
clipped, until one was not; and as many units have shadows as memory is left for, those first whose gradients come first.
Where gradients are not kept (``keep_gradients=False``) nothing is guessed: a unit's first gradient is all of it, and stays in memory for the update.
Source: speculation with validation as in SuperOffload, arXiv 2509.21271, which computes back what was wrong; here nothing has to be.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from zk.core.checks import check_groups
from zk.core.store import UnitStore
from zk.core.timeline import phase
from zk.offload.section import Attempt
from zk.offload.state import OptimizerShard
from zk.offload.tiers import HANDED_OVER
from zk.offload.transfer import Arrival


@dataclasses.dataclass(slots=True)
class _Step:
    """One step's attempts. Some may still run when the next step has begun."""

    is_over: bool = False  # none begins any more
    counts: dict[UnitStore, int] = dataclasses.field(default_factory=dict)  # gradients that have come
    attempts: list[Attempt] = dataclasses.field(default_factory=list)
    options: Mapping[nn.Parameter, Mapping[str, Any]] | None = None  # of each parameter's group, once they have been asked for
    # of the worker's thread
    squares: float = 0.0  # of the gradients that have come, as far as they are known here
    is_clipped: bool = False  # that alone says that gradients will be


class Speculation:
    """Attempts of one optimizer."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = weakref.proxy(optimizer)
        self.worker, self.transfer, self.num_threads = optimizer.worker, optimizer.transfer, optimizer.updates.threads_beside
        self.is_alone = optimizer.comm.world == 1  # and knows which parameters have a gradient; several ranks expect those of the step before
        self.keeps_gradients = optimizer.config.keep_gradients  # else they are gone after the update, and agreed on by all ranks
        self.grad_scale = optimizer.factors.of_squares  # what gradients are multiplied by in the update, if these are the squares of all
        self.step = _Step()
        self.was_clipped = True  # the step before, or there was none
        self.expected: dict[UnitStore, tuple[int, set[int]]] = {}  # gradients that came in the step before, and parameters that had one
        self.counters = {"updates_in_backward": 0, "updates_in_backward_taken": 0}  # of units

    def hands_over(self, store: UnitStore) -> bool:
        """Tell if a gradient that comes now goes to its update in memory. Waits until there is room for it.

        Raises for a second one before step(): the first may have been used.
        """
        assert store.shard is not None
        if store.shard.stats:
            raise RuntimeError(
                f"a second gradient of unit {store.unit.name!r} comes before step() or zero_grad(), and with keep_gradients=False the first was all "
                "of it, and has gone to its update. Give all micro-batches to optimizer.accumulate(), or call backward of all but the last within "
                "optimizer.no_sync(); call zero_grad() after an error in backward; and use keep_gradients=True for parameters with hooks of your own "
                "(register_post_accumulate_grad_hook), and for blocks that backward goes through twice (checkpoints with use_reentrant=True)"
            )
        if self.step.is_over or store.shard.unread is not None:
            return False
        if len(self.step.attempts) >= HANDED_OVER:
            with phase("wait", "updates in backward"):
                self.step.attempts[-HANDED_OVER].done.wait()
        return True

    def has_come(self, store: UnitStore) -> None:
        """Hear that a unit's gradient is on its tier, or on its way there: begin its update if it is whole, and likely to count."""
        step, shard = self.step, store.shard
        step.counts[store] = count = step.counts.get(store, 0) + 1
        whole, used = self.expected.get(store, (0, set())) if self.keeps_gradients else (1, store.agreed)
        assert shard is not None
        grads = {section: section.grads for section in shard.sections if section.shadow is not None}
        if (self.was_clipped and self.keeps_gradients) or step.is_over or count != whole or not grads or shard.unread is not None:
            return
        if step.options is None:
            check_groups(self.optimizer)
            step.options = self.optimizer.updates.options()
        change = store.change(step.options, set(store.unreduced) if self.is_alone else used, self.grad_scale(0.0))
        attempt = Attempt(store.unit.name, grads, change, self.transfer.mark(), has_counted=self._taken)
        stats = shard.stats[0] if len(shard.stats) == 1 else None  # on the device, where the kernels have measured
        arrival = None if stats is None else self.transfer.offload(stats, [slice(0, stats.numel())])
        attempt.done = self.worker.submit(functools.partial(self._run, step, attempt, shard, arrival))
        step.attempts.append(attempt)
        shard.attempt = attempt

    def _run(self, step: _Step, attempt: Attempt, shard: OptimizerShard, arrival: Arrival | None) -> None:
        """Update one unit, unless gradients will be clipped. In the worker's thread."""
        if arrival is not None:
            step.squares += float(arrival.whole()[0])
            arrival.drop()
        elif not attempt.is_given_up:
            found = [section.grads.sum_of_squares() for section in shard.sections if section.beside]
            step.squares += sum(part for part in found if isinstance(part, float))
        # sums of squares only grow
        step.is_clipped |= not math.isfinite(step.squares) or self.grad_scale(step.squares) != attempt.change.grad_scale
        if not step.is_clipped:
            attempt.run(self.num_threads, self.worker.stop)
            self.counters["updates_in_backward"] += len(attempt.finished) == len(attempt.grads)
        else:  # of a step that will be left out, where gradients are not kept
            attempt.discard(*attempt.grads)

    def _taken(self) -> None:
        self.counters["updates_in_backward_taken"] += 1

    def settle(self) -> None:
        """step() is about to know the norm: nothing begins any more, as from now on units are updated in place."""
        self.step.is_over = True
        for attempt in self.step.attempts:
            attempt.give_up(goes_on=True)

    def know(self, grad_scale: float) -> None:
        """Learn what gradients are multiplied by: if not by what was expected, all that goes on is in vain."""
        self.was_clipped = grad_scale != self.grad_scale(0.0)
        for attempt in self.step.attempts if self.was_clipped else ():
            attempt.give_up()

    def ended(self, stores: Sequence[UnitStore]) -> None:
        """Learn from a step for the next one which gradients there were."""
        self.expected = {store: (self.step.counts.get(store, 0), set(store.used)) for store in stores}
        self.begin()

    def begin(self) -> None:
        """A step begins, or begins anew."""
        self.step = _Step()
