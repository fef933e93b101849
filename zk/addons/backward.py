"""Updates beside other work, in shadows of states: ``overlap_step="backward"``, ``delay_update=``.

With ``overlap_step="backward"`` a unit's update begins as its gradient is reduced, and the bits are
the same. With ``delay_update=N`` it begins in step() and counts one step later: numbers change.

A thread updates a shadow of the unit's states, as if nothing were clipped. ``step()`` takes it if
all is as supposed; if not, it updates the unit itself. Shadows take what the host's budget leaves.
Uses of the core: the seams ``check``, ``reduced``, ``changing``, ``before_step``, ``updater``,
``closed``; ``UnitStore.apply``, ``update``, ``fetch``, ``absorb``; ``Gradient`` and its ``squares``,
new for new values; ``summary``, ``Chunk.fields``, ``Drive.acquire``.
"""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor, wait
from copy import copy, deepcopy
from functools import partial
from typing import Any

import torch

from zk.addon import Addon
from zk.config import is_count
from zk.logs import require
from zk.memory import host_memory
from zk.offload.drive import FileChunk
from zk.offload.rules import AdamRule, StepRule
from zk.offload.tiers import CPU, Chunk, Fields, HostChunk
from zk.optimizer import options_of
from zk.parallel.gradient import Gradient
from zk.store import Step, UnitStore


class Backward(Addon):
    """``overlap_step="backward"``, and what both options do in shadows."""

    def __init__(self) -> None:
        self.executor = ThreadPoolExecutor(1, "zk-update")
        self.last: Any = self.executor.submit(bool)  # of all that it was asked for
        self.shadows = dict[UnitStore, list[Fields]]()  # by chunk; none where there is no room
        # the unit as it was, the supposed step, a Future
        self.attempts = dict[UnitStore, Any]()
        self.counts = Counter[UnitStore]()  # reductions since the last step
        self.expected = Counter[UnitStore]()  # and before it

    def check(self, model: Any, optimizers: object, config: Any) -> None:
        near = config.device or next(model.parameters()).device
        said = "overlap_step='backward' on GPUs needs optimizer_tier='host' or 'nvme'; got 'device'"
        require(config.optimizer_tier != "device" or near.type == "cpu", said)

    def attach(self, optimizer: Any) -> None:
        self.optimizer, budget = optimizer, optimizer.config.host_budget
        used = sum(optimizer.summary().nbytes.get("host", {}).values())
        room = budget - used if budget else host_memory()[1] // 2 // optimizer._layout.comm.size
        for store in reversed(optimizer._trained):  # in the order of backward
            is_here = type(store.states[0]) in (Chunk, HostChunk, FileChunk)
            is_here &= type(store.rule) in (AdamRule, StepRule)  # others may send what they make
            is_here &= store.param.device == store.states[0].device == CPU
            kept = {"param": store.unit.dtype, **store.codec.fields}
            nbytes = store.unit.shard_numel * sum(dtype.itemsize for dtype in kept.values())
            chunks = store.states * (is_here and nbytes <= room)
            room -= nbytes * bool(chunks)
            self.shadows[store] = [Chunk(kept, chunk.numel, CPU).fields for chunk in chunks]

    def reduced(self, store: UnitStore) -> None:
        """Begin, if there were as many reductions as before the last step."""
        self.changing(store, 0)
        self.counts[store] += 1
        if self.counts[store] == self.expected[store]:
            options = options_of(self.optimizer.param_groups)
            self.begin(store, Step(1.0 / self.optimizer._scaler.scale, options))

    def begin(self, store: UnitStore, step: Step) -> None:
        """Begin to update the unit's shadow, if it has one."""
        if shadows := self.shadows.get(store):
            twin = copy(store)  # as it is now
            twin.grad, twin.rule = grad, rule = copy(store.grad), copy(store.rule)
            grad.factors, grad.squares = [*grad.factors], [*grad.squares]
            vars(rule)["known"] = deepcopy(vars(rule).get("known"))
            self.last = self.executor.submit(self.make, twin, shadows, step)
            self.attempts[store] = twin, step, self.last

    @torch.no_grad()
    def make(self, twin: UnitStore, shadows: list[Fields], step: Step) -> None:
        for number, shadow in enumerate(shadows):
            twin.fetch(min(number + 1, len(shadows) - 1))
            with twin.open(number, changed=False) as fields:
                for name, field in fields.items():
                    shadow[name].copy_(field)
            twin.apply(number, shadow, step)

    def changing(self, store: UnitStore, number: int) -> None:
        if store in self.attempts:
            self.attempts.pop(store)[-1].cancel()

    def before_step(self) -> None:
        for *_, done in [*self.attempts.values()]:
            done.cancel()  # what has not begun is less work in place
        wait([self.last])  # and those before it

    def closed(self) -> None:
        self.shadows.clear()

    def updater(self) -> Any:
        return self.run

    def run(self, stores: list[UnitStore], step: Step) -> None:
        self.before_step()  # at stage 1 some have begun since
        factors = {factor for store in stores for factor in store.grad.factors}
        is_clipped = {*factors, step.scale / (1.0 / self.optimizer._scaler.scale)} != {1.0}
        self.expected, self.counts = Counter() if is_clipped else self.counts, Counter()
        right = [s for s, attempt in self.attempts.items() if self.is_right(s, step, *attempt)]
        for store in right:
            vars(store)["update"] = partial(self.take, store)
            vars(store)["fetch"] = lambda _, param=store.param: param.fetch()
        try:
            self.optimizer._update_units(stores, step)
        finally:
            for store in right:
                del vars(store)["update"], vars(store)["fetch"]

    def is_right(self, store: UnitStore, step: Step, twin: Any, supposed: Step, done: Any) -> bool:
        """Tell if a unit's shadow is what its update would make."""
        grads = twin.grad, store.grad
        old, new = ((one.factors, one.present, [*map(id, one.squares)]) for one in grads)
        is_made = not done.cancelled() and done.exception() is None
        return is_made and supposed == step and old == new

    def take(self, store: UnitStore, number: int, step: Step) -> None:
        """Make the shadow of chunk ``number`` the unit's states."""
        chunk, shadow = store.states[number], self.shadows[store][number]
        for changing in store.layout.seams.changing:
            changing(store, number)
        for _, index in store.runs(number):  # as each follows from the one before
            store.rule.numbers(step.options[id(store.groups[index])], store.steps[index] + 1)
        store.param.open(store.bounds[number])["param"].copy_(shadow["param"])
        store.param.close(True, store.bounds[number])
        if isinstance(chunk, FileChunk):
            with chunk.lock:  # all of it is written: nothing is read
                chunk.tier.acquire(chunk)
                chunk.lay_out()
            for name, field in chunk.open().items():
                field.copy_(shadow[name])
            chunk.close(True)
        else:
            before = chunk.open()
            chunk.fields = {name: shadow[name] for name in before}
            shadow.update(before)


class Delayed(Backward):
    """``delay_update=N``: after N steps, each update counts one step later, and runs beside the next.

    The one-step delayed parameter update of ZeRO-Offload (arXiv 2101.06840, section 5.2): step()
    counts the update of the step before, and begins that of its own gradients in a thread. Numbers
    change: forward sees parameters that are one update old. Whatever settles states makes it count.
    """

    reduced = Addon.reduced  # nothing begins there

    def __init__(self, value: int):
        require(
            is_count(value, 0),
            f"delay_update must be a number of steps, 0 or more, or None; got {value!r}",
        )
        super().__init__()
        self.delay = value
        self.stores: Any = []  # whose update is to count

    def check(self, model: object, optimizers: object, config: Any) -> None:
        mode = config.options.get("overlap_step")
        said = f"delay_update={self.delay} and overlap_step={mode!r} exclude each other: remove one"
        require(not mode, said)

    def attach(self, optimizer: Any) -> None:
        super().attach(optimizer)
        self.spare = {}  # gradients that the pending update uses; else room for the next ones
        for store in optimizer._trained:
            tier, sizes = store.layout.tier_of(store.unit, "state"), [c.numel for c in store.states]
            self.spare[store] = Gradient(store, tier.chunks({"grad": torch.float32}, sizes))

    def updater(self) -> Any:
        return self.hand_over if self.optimizer.num_steps >= self.delay else None

    def hand_over(self, stores: Any, step: Any) -> None:
        """Hand the gradients over, and return at once."""
        self.stores, self.step = stores, step
        for store in stores:
            store.grad.marks = [None] * len(store.steps)  # what stands for them is gone
            self.spare[store].drop()  # of a step that failed
            self.begin(store, step)
        self.swap(stores)

    def swap(self, stores: Any) -> None:
        for store in stores:
            store.grad, self.spare[store] = self.spare[store], store.grad

    @torch.no_grad()
    def before_step(self) -> None:
        """Make the update that is pending count."""
        super().before_step()
        for store in self.stores:
            store.absorb()
        stores, self.stores = self.stores, []
        if stores:
            self.swap(stores)
            self.run(stores, self.step)
            self.swap(stores)
