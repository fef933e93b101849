"""Updates: in which order the units of an optimizer are updated, when, and by which thread."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from zk.checkpoint import save
from zk.delay import DelayedUpdate
from zk.offload import pipeline
from zk.offload.pipeline import Options, Task
from zk.offload.rules import Change
from zk.parallel.comm import Comm, Group
from zk.store import UnitStore


class Updates:
    """The updates of one ZeroOptimizer: in step(), in the background of what comes after it, or one step later."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = weakref.proxy(optimizer)
        self.delay: DelayedUpdate | None = None
        self.publisher: Comm = Comm()  # ranks' connections of the update that goes on in the background
        self.forward_order: dict[int, None] = {}  # of units, with overlap_step

    @property
    def threads_beside(self) -> int:
        """Threads of the update in the background: one is left for this one, which launches what the device computes."""
        most: int = self.optimizer.num_threads
        return most if self.optimizer.config.num_threads else max(1, most - 1)

    def run(self, grad_scale: float) -> None:
        """fetch -> update -> cast -> evict -> upload -> gather, unit by unit; of the step before, where updates are delayed."""
        optimizer, held = self.optimizer, self.optimizer.held
        group_of = self.options()  # what is updated in the background must not see what schedulers write meanwhile
        self._adopt()  # may refuse, before anything is changed
        used = [(number, store) for number, store in enumerate(held) if store.shard is not None and store.used]
        changes = {number: store.change(group_of, store.used, grad_scale) for number, store in used}
        if not optimizer.config.keep_gradients:
            with save.together(optimizer.everyone, "step()"):  # before any rank waits for what another publishes
                for number, store in used:
                    _check_as_expected(store, changes[number])
        tasks: dict[int, Task] = {}
        try:
            for number, store in used:
                store.count_step(group_of)
                publish = functools.partial(store.publish_beside, self.publisher) if optimizer.config.overlap_step else store.publish
                tasks[number] = Task(store.unit.name, store.shard, changes[number], publish, set(store.used))
            if self.delay is None or sum(optimizer.counters.values()) < self.delay.since:
                self._run(tasks)
                return
            self._run(self.delay.take())
            self.delay.begin(tasks, held)
        except BaseException as error:
            optimizer.integrity.tear(error)
            raise

    def apply_delayed(self) -> None:
        """Make the update that has been delayed count."""
        optimizer = self.optimizer
        if self.delay is None or not self.delay.pending:
            return
        self.wait()
        try:
            optimizer.partition.reset()  # what was asked for ahead has the old values
            self._adopt()
            self._run(self.delay.take())
        except BaseException as error:
            optimizer.integrity.tear(error)
            raise

    def settle(self) -> None:
        """Return when all updates count and are done."""
        self.apply_delayed()
        self.wait()

    def wait(self) -> None:
        """Wait for what is updated in the background."""
        for store in self.optimizer.held:
            try:
                store.arrive()
            except BaseException as error:
                if store.underway is not None and store.underway.done.error is error:  # and not Ctrl-C: that ends the waiting only
                    self.optimizer.integrity.tear(error)
                raise

    def join(self) -> None:
        """Return when the update in the background has ended, well or not."""
        for store in self.optimizer.held:
            if store.underway is not None:
                store.underway.done.join()
                if store.underway.done.error is None:
                    store.arrive()
                elif store.shard is not None:
                    store.transfer.follow(store.shard.arriving)  # what was updated before the error is on its way
                    store.forget_update()

    def order(self) -> tuple[list[int], bool]:
        """In which order the next update goes through the units that are trained, by number; and whether from the last chunk to the first."""
        held, grads = self.optimizer.held, self.optimizer.grads
        trained = [number for number, store in enumerate(held) if store.shard is not None]
        if isinstance(self.publisher, Group):  # ranks publish alike, and a forward may use units of its own (experts): as backward ended with them
            return [grads.stores[position].index for position in reversed(grads.order)], False
        if self.optimizer.config.overlap_step:  # as forward will want them
            order = [number for number in self.forward_order if held[number].shard is not None]
            return order + [number for number in trained if number not in self.forward_order], False
        if "nvme" in self.optimizer.tiers:  # there and back again: what is still in memory comes first
            return trained, self.optimizer.counters["steps"] % 2 == 1
        return [grads.stores[position].index for position in grads.order], False  # in which gradients have left

    def forward_uses(self, number: int, *_: Any) -> None:
        """Hook: wait for a unit's own update, and note in which order forward uses units.

        Where backward may be the last to see its gradient, what user code has written is taken over now: updates begin from it there.
        """
        store = self.optimizer.held[number]
        self.forward_order[number] = None
        store.arrive()
        if not self.optimizer.config.keep_gradients and torch._C._current_graph_task_id() == -1:
            store.adopt_writes()
            if store.shown_state:
                store.keep_state()

    def options(self) -> dict[nn.Parameter, dict[str, Any]]:
        """The options of each parameter's group, as they are now."""
        return {param: options for group in self.optimizer.param_groups for options in [as_now(group)] for param in group["params"]}

    def _adopt(self) -> None:
        """Take over what user code has made of states and parameters."""
        self.optimizer._keep_state()
        for store in self.optimizer.held:
            store.adopt_writes()

    def _run(self, tasks: dict[int, Task]) -> None:
        """Update in the background, or at once."""
        optimizer, held = self.optimizer, self.optimizer.held
        order, backwards = self.order()
        order = [number for number in order if number in tasks]
        ordered = [tasks[number] for number in order]
        if not optimizer.config.overlap_step:
            pipeline.update(ordered, Options(optimizer.num_threads, keep="nvme" in optimizer.tiers, backwards=backwards))
            for number, task in tasks.items():
                held[number].updated(task.used)
                held[number].underway = task
                held[number].arrive()
            return
        shared = [number for number in order if held[number].is_shared]  # with tensors that cannot be made to wait, so step() does
        pipeline.update(ordered, Options(self.threads_beside), beside=False)
        options = Options(self.threads_beside, mark=optimizer.transfer.mark())
        worker, tell = optimizer.worker, functools.partial(save.tell, self.publisher, "the update in the background")
        worker.submit(functools.partial(pipeline.update, ordered, options, beside=True, stop=worker.stop, tell=tell))
        for number in order:
            held[number].updated(tasks[number].used)
            held[number].begin(tasks[number])
        for number in shared:
            held[number].arrive()


def as_now(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group's options as they are now: a learning rate that is a tensor may be changed in place while an update goes on in the background.

    It stays a tensor, as an optimizer's own step() computes with it in its precision; in host memory, which any device takes a number from.
    """

    def value(option: Any) -> Any:
        if isinstance(option, Tensor):
            return option.detach().to("cpu", copy=True)
        if isinstance(option, np.generic):
            return option.item()
        return tuple(map(value, option)) if isinstance(option, (tuple, list)) else option

    return {name: value(option) for name, option in group.items() if name != "params"}


def _check_as_expected(store: UnitStore, change: Change) -> None:
    """Raise where a unit's gradient was handed over to an update that is not that of the step."""
    shard = store.shard
    if shard is None or not shard.is_handed_over:
        return
    if shard.attempt is None or shard.attempt.change != change or shard.unread is not None:
        raise RuntimeError(
            f"unit {store.unit.name!r} was updated in backward, as keep_gradients=False asks for, and parameters, optimizer.state or options of "
            "param_groups were changed after that, or a save was begun. Do so between step() and the next backward, or use keep_gradients=True; "
            "call zero_grad() to leave this step out"
        )
