"""``overlap_step=True``: the update runs in a thread beside the next forward; the same bits.

At stage 3, where parameters are gathered: a unit's first use waits for its own update. Uses of the
core: the seams ``check``, ``updater``, ``updated``; ``UnitStore.updating``,
``ZeroOptimizer._update_units``.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from zk.addon import Addon, found
from zk.logs import require
from zk.store import Step, UnitStore


def overlapped(value: object) -> Any:
    """The add-on that ``overlap_step=value`` asks for."""
    if value == "backward":
        name = "overlap_step='backward'"
        return found(name, {name: "zk.addons.backward:Backward"}, TypeError)()
    require(value is True, f"overlap_step must be True, 'backward' or False; got {value!r}")
    return Overlap()


class Overlap(Addon):
    """``overlap_step=True``. Each unit has a Future, for which whoever uses the unit waits."""

    def __init__(self) -> None:
        self.executor = ThreadPoolExecutor(1, "zk-update")
        self.pending: dict[UnitStore, Future[None]] = {}

    def check(self, model: object, optimizers: object, config: Any) -> None:
        require(
            config.stage == 3,
            f"overlap_step=True needs stage=3; got stage={config.stage}, where parameters are read at "
            "any time, and would be those before the update: use stage=3, or remove it",
        )

    def attach(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def updater(self) -> Any:
        return None if +self.optimizer._runtime.held else self.begin  # who holds units reads them

    def begin(self, stores: object, step: Step) -> None:
        """Update in the order of forward, and return at once."""
        self.pending = {s: Future() for s in self.optimizer._trained if s.grad.is_taken}
        for store, future in self.pending.items():
            store.updating = future.result
        self.executor.submit(self.run, [*self.pending], step)

    @torch.no_grad()
    def run(self, stores: list[UnitStore], step: Step) -> None:
        try:
            self.optimizer._update_units(stores, step)
        except BaseException as error:  # whoever uses a unit hears of it
            for future in self.pending.values():
                future.set_exception(error)

    def updated(self, store: UnitStore) -> None:
        self.pending.pop(store, Future()).set_result(None)
