"""``delay_update=N``: after N steps, each update counts one step later, and runs beside the next.

The one-step delayed parameter update of ZeRO-Offload (arXiv 2101.06840, section 5.2): step() counts
the update of the step before, and begins that of its own gradients in a thread, in the shadows of
zk/addons/backward.py. Numbers change: forward sees parameters that are one update old. Whatever
settles states makes it count. Uses of the core: the seams ``check``, ``attach``, ``updater``,
``before_step``; ``Gradient``; ``UnitStore.absorb``.
"""

from copy import copy
from typing import Any

import torch

from zk.addon import Addon
from zk.addons.backward import Backward
from zk.config import is_count
from zk.logs import require
from zk.parallel.gradient import Gradient


class Delayed(Backward):
    reduced = Addon.reduced  # nothing begins there

    def __init__(self, value: int) -> None:
        said = f"delay_update must be a number of steps, 0 or more, or None; got {value!r}"
        require(is_count(value, 0), said)
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
        return self.begin if self.optimizer.num_steps >= self.delay else None

    def begin(self, stores: Any, step: Any) -> None:
        """Hand the gradients over, and return at once."""
        self.stores, self.step = stores, step
        for store in stores:
            store.grad.marks = [None] * len(store.steps)  # what stands for them is gone
            self.spare[store].drop()  # of a step that failed
            if self.shadows[store]:
                twin = copy(store)
                self.last = self.executor.submit(self.make, twin, self.shadows[store], step)
                self.attempts[store] = twin, step, self.last
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
