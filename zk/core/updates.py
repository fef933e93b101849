"""Updates: in which order the units of an optimizer are updated, when, by which thread and on which side; and if all of them are of one step.

Delayed, the update of one step goes on beside forward and backward of the next, whose step() makes it count. It changes numbers: ``step()`` i applies
the gradient of step i-1, with the options, the clipping and the loss scale of step i-1. Until then parameters are what they were: the update goes to
shadows (zk/offload/section.py), as far as there is memory for them, and is done in place by the next step() elsewhere.
Source: the one-step delayed parameter update of ZeRO-Offload, arXiv 2101.06840, section 4.4.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from zk.config import ZeroConfig
from zk.core.logs import say
from zk.core.memory import ranks_here
from zk.core.probe import measure_update
from zk.core.store import UnitStore
from zk.core.words import named
from zk.kernels.codec import state_fields
from zk.offload import pipeline
from zk.offload.cpu_adam import compile_ahead
from zk.offload.pipeline import Task
from zk.offload.rules import Change
from zk.offload.section import Attempt
from zk.offload.streamed import best_share
from zk.offload.streams import link_to
from zk.parallel.comm import Comm, Group, tell, together

_SPLIT_NUMEL = 1 << 15  # fewer elements are updated by one thread


class Updates:
    """The updates of one ZeroOptimizer: in step(), in the background of what comes after it, or one step later."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = weakref.proxy(optimizer)
        self.delay: int | None = optimizer.config.delay_update  # steps before updates begin to be delayed
        self.delayed: dict[UnitStore, Task] = {}  # what is to count with the next step()
        self.publisher: Comm = Comm()  # ranks' connections of the update that goes on in the background
        self.forward_order: dict[int, None] = {}  # of units, with overlap_step

    @property
    def threads_beside(self) -> int:
        """Threads of the update in the background: one is left for this one, which launches what the device computes."""
        most: int = self.optimizer.num_threads
        return most if self.optimizer.config.num_threads else max(1, most - 1)

    def run(self, grad_scale: float) -> None:
        """fetch -> update -> cast -> evict -> upload -> gather, unit by unit; of the step before, where updates are delayed."""
        optimizer = self.optimizer
        group_of = self.options()  # what is updated in the background must not see what schedulers write meanwhile
        self._adopt()  # may refuse, before anything is changed
        changes: dict[UnitStore, Change] = {store: store.change(group_of, store.used, grad_scale) for store in optimizer._trained if store.used}
        if not optimizer.config.keep_gradients:
            with together(optimizer.everyone, "step()"):  # before any rank waits for what another publishes
                for store, change in changes.items():
                    _check_as_expected(store, change)
        tasks: dict[UnitStore, Task] = {}
        try:
            for store, change in changes.items():
                assert store.shard is not None
                store.count_step(group_of)
                publish = functools.partial(store.publish, beside=self.publisher) if optimizer.config.overlap_step else store.publish
                tasks[store] = Task(store.unit.name, store.shard, change, publish, set(store.used))
            is_delayed = self.delay is not None and sum(optimizer.counters.values()) >= self.delay
            self._run(self._due() if is_delayed else tasks)
            if is_delayed:
                self._begin_delayed(tasks)
        except BaseException as error:
            optimizer.integrity.tear(error)
            raise

    def apply_delayed(self) -> None:
        """Make the update that has been delayed count."""
        optimizer = self.optimizer
        if not self.delayed:
            return
        self.wait()
        try:
            optimizer.partition.reset()  # what was asked for ahead has the old values
            self._adopt()
            self._run(self._due())
        except BaseException as error:
            optimizer.integrity.tear(error)
            raise

    def _begin_delayed(self, tasks: dict[UnitStore, Task]) -> None:
        """Take the gradients of a step, and begin the update that counts with the next, after all that the worker has been asked to do."""
        self.delayed, worker = tasks, self.optimizer.worker
        for store, task in tasks.items():
            shard = task.shard
            task.handed_over, task.keep, task.attempt, shard.attempt = shard.hand_over(), False, None, None
            store.drop_gradient()
            grads = {section: its for section, its in task.handed_over.items() if section.shadow is not None}
            if not grads or task.unread is not None:
                continue
            attempt = Attempt(task.name, grads, task.change, self.optimizer.transfer.mark(), True)
            task.attempt = shard.attempt = attempt
            attempt.done = worker.submit(functools.partial(attempt.run, self.threads_beside, worker.stop))

    def _due(self) -> dict[UnitStore, Task]:
        """Give the update that is to count now."""
        due, self.delayed = self.delayed, {}
        return due

    def forget(self) -> None:
        """Drop gradients, and the update that was to count: what they were for is replaced."""
        self.optimizer._drop_gradients()
        for task in self._due().values():
            task.shard.drop_attempt()
            for grads in task.handed_over.values():
                grads.clear()

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

    def order(self) -> tuple[list[UnitStore], bool]:
        """In which order the next update goes through the units that are trained; and whether from the last chunk to the first."""
        held, grads, trained = self.optimizer.held, self.optimizer.grads, self.optimizer._trained
        if isinstance(self.publisher, Group):  # ranks publish alike, and a forward may use units of its own (experts): as backward ended with them
            return list(reversed(grads.order)), False
        if self.optimizer.config.overlap_step:  # as forward will want them
            order = [held[number] for number in self.forward_order if held[number].shard is not None]
            return list(dict.fromkeys((*order, *trained))), False
        if "nvme" in self.optimizer.tiers:  # there and back again: what is still in memory comes first
            return trained, self.optimizer.counters["steps"] % 2 == 1
        return list(grads.order), False  # in which gradients have left

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

    def _run(self, tasks: dict[UnitStore, Task]) -> None:
        """Update in the background, or at once."""
        optimizer = self.optimizer
        order, backwards = self.order()
        order = [store for store in order if store in tasks]
        ordered = [tasks[store] for store in order]
        if not optimizer.config.overlap_step:
            pipeline.update(ordered, optimizer.num_threads, keep="nvme" in optimizer.tiers, backwards=backwards)
            for store, task in tasks.items():
                store.updated(task.used)
                store.underway = task
                store.arrive()
            return
        shared = [store for store in order if store.is_shared]  # with tensors that cannot be made to wait, so step() does
        pipeline.update(ordered, self.threads_beside, beside=False)
        worker, say = optimizer.worker, functools.partial(tell, self.publisher, "the update in the background")
        update = functools.partial(pipeline.update, ordered, self.threads_beside, mark=optimizer.transfer.mark())
        worker.submit(functools.partial(update, beside=True, stop=worker.stop, tell=say))
        for store in order:
            store.updated(tasks[store].used)
            store.begin(tasks[store])
        for store in shared:
            store.arrive()


@dataclasses.dataclass(eq=False)
class Integrity:
    """Of one optimizer's parameters and state."""

    comm: Comm  # its ranks
    everyone: Comm  # and those with all parts of the model
    held: Sequence[UnitStore]  # the stores of its units
    interrupted: str = ""  # what has left parameters and state mixed
    mixed: Collection[str] = ()  # which of them
    misfits: Sequence[str] = ()  # in which torch collects what of a model's state does not fit

    def tear(self, why: BaseException | str) -> None:
        """Note that some are new and others old."""
        why = why if isinstance(why, str) else f"an earlier step() ended half-way ({type(why).__name__}: {why})"
        self.interrupted, self.mixed = self.interrupted or why, {"parameters", "state"}

    def check(self, what: str) -> None:
        """Refuse ``what`` where they are mixed."""
        if self.interrupted:
            kinds = " and ".join(sorted(self.mixed))
            mends = {"state": "load_state_dict()", "parameters": "model.load_state_dict() or zk.load_pretrained()"}
            both = "model.load_state_dict() and then load_state_dict()"
            raise RuntimeError(
                f"{self.interrupted}: of {kinds} some are new and others old, so {what} is refused. load_checkpoint() "
                f"makes all of it whole again; so does {mends.get(kinds, both)}, of what was saved together"
            )

    @contextlib.contextmanager
    def replacing(self, what: str, kinds: Collection[str] = ("parameters", "state")) -> Iterator[None]:
        """Context: all ``kinds`` are replaced inside, on all ranks. Until that has come to its end they are mixed, and refused."""
        self.interrupted, self.mixed = self.interrupted or f"{what} has not come to its end", {*self.mixed, *kinds}
        try:
            # a rank that fails inside is waited for by those of its part, in what these do, and by all others where all meet
            part = together(self.comm, what) if self.everyone is not self.comm else contextlib.nullcontext()
            with together(self.everyone, what), part:
                yield
        except BaseException as error:
            self.interrupted = f"{what} was interrupted ({type(error).__name__}: {error})"
            raise
        self.made_whole(kinds)

    def made_whole(self, kinds: Collection[str]) -> None:
        """Note that all ``kinds`` are of one step again."""
        self.mixed = set(self.mixed).difference(kinds)
        self.interrupted = self.interrupted if self.mixed else ""

    def weights_come(self, *given: Any) -> None:
        """Hook: the model is about to be given weights."""
        self.misfits = given[-1]

    def weights_came(self, _: nn.Module, differ: Any) -> None:
        """Hook: it has been given them. Parameters that were mixed are whole if those are all of them."""
        names = (name for store in self.held for name in store.unit.names)
        if self.mixed and not self.misfits and not set(differ.missing_keys).intersection(names):
            self.made_whole(("parameters",))


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


def settled(config: ZeroConfig, device: torch.device) -> ZeroConfig:
    """Replace "auto" of overlap_step by what gains: nothing does where update and compute share cores and memory. Check update_on."""
    joined = link_to(device).joined
    if config.overlap_step == "auto":
        is_elsewhere = bool({config.param_tier, config.optimizer_tier} - {"device", "host"}) if joined else config.optimizer_tier != "device"
        config = dataclasses.replace(config, overlap_step="backward" if is_elsewhere else False)
    if config.streamed_share and (device.type != "cuda" or joined):
        raise ValueError(
            f"update_on={config.update_on!r} needs a CUDA device, and the model is on {device}, whose memory is the host's; remove it, "
            "or use update_on='auto'"
        )
    return config


def check_kernels(optimizer: Any) -> None:
    """That the device has kernels for all updates that are asked of it."""
    asked = optimizer.config.update_on
    for inner, rule in zip(optimizer.inners, optimizer.rule_of_inner, strict=True) if asked not in ("host", "auto") else ():
        if not all(map(rule.has_kernel, inner.param_groups)):
            raise ValueError(
                f"update_on={asked!r} needs Adam or AdamW without amsgrad, whose kernel on the device has the bits of the update "
                f"in host memory; {type(inner).__name__} has none, so use update_on='host'"
            )


def chosen(optimizer: Any) -> float | str:
    """The share of the update that the device does, for "auto": the smallest of all ranks, which divide their state alike.

    By measured rates, for what the first group has that the device can update.
    """
    share, pairs, config = 0.0, zip(optimizer.rules, optimizer.param_groups, strict=True), optimizer.config
    able = ((rule, group) for rule, group in pairs if group["params"] and rule.has_kernel(group))
    if optimizer.device.type == "cuda" and not optimizer.transfer.joined and (first := next(able, None)) is not None:
        rule, group = first
        dtype = optimizer.stored.get(group["params"][0], group["params"][0].dtype)
        nbytes = sum(kept.itemsize for kept in state_fields(dtype, rule.state_names(group), config.state_dtype, rule.splits_master).values())
        rates = measure_update(optimizer.device, optimizer.num_threads, ranks_here(optimizer.everyone.world), lambda text: say(f"zk: {text}"))
        share = best_share(rates, nbytes, dtype.itemsize, config.param_tier in ("device", "auto"))
    return min(map(float, optimizer.comm.exchange(str(share), "choosing the side of the update"))) or "host"


def compile_updates(optimizer: Any) -> None:
    """Compile the update in host memory before the first step, and say so where that takes seconds."""
    # dtype of the parameters, and the state, of all that host threads update
    beside = [
        (held.unit.dtype, section.state)
        for held in optimizer.held
        for section in (held.shard.sections if held.shard is not None else ())
        if section.beside and section.stream is None and section.state.chunks
    ]
    largest = max((chunk.stop - chunk.start for _, state in beside for chunk in state.chunks), default=0)
    dtypes = " and ".join(sorted({named(dtype) for dtype, _ in beside}))
    said = f"zk: compiling the CPU update, once for {dtypes} (about 15 s)"
    threads = optimizer.num_threads if largest > _SPLIT_NUMEL else 1
    updates = [(dtype, dict(state.dtypes)) for dtype, state in beside]
    compile_ahead(updates, threads, lambda: say(said) if optimizer.everyone.rank == 0 else None)
