"""``overlap_step=True``: the update runs in a thread beside the next forward; the same bits.

At stage 3, where parameters are gathered: a unit's first use waits for its own update. Uses of the
core: the seams ``check``, ``updater``, ``updated``; ``UnitStore.updating``,
``ZeroOptimizer._update_units``.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch

from zk.addon import Addon, found

if TYPE_CHECKING:
    from zk.addon import Update
    from zk.config import ZeroConfig
    from zk.optimizer import ZeroOptimizer
    from zk.store import Step, UnitStore


class Overlap(Addon):
    def __new__(cls, value: bool | str) -> Any:
        name, file = "overlap_step='backward'", "zk.addons.backward:Backward"
        other = found(name, {name: file}, TypeError) if value == "backward" else None
        return other() if other else super().__new__(cls)

    def __init__(self, value: bool) -> None:
        if value is not True:
            raise ValueError(f"overlap_step must be True, 'backward' or False; got {value!r}")
        self.executor = ThreadPoolExecutor(1, "zk-update")
        self.pending: dict[UnitStore, Future[None]] = {}

    def check(self, model: object, optimizers: object, config: ZeroConfig) -> None:
        if config.stage != 3:
            raise ValueError(
                f"overlap_step=True needs stage=3; got stage={config.stage}, where parameters are read at "
                "any time, and would be those before the update: use stage=3, or remove it"
            )

    def attach(self, optimizer: ZeroOptimizer) -> None:
        self.optimizer = optimizer

    def updater(self) -> Update:
        return self.begin

    def begin(self, stores: list[UnitStore], step: Step) -> None:
        """Update in the order of forward, and return at once."""
        self.pending = {store: Future() for store in stores}
        for store, future in self.pending.items():
            store.updating = future.result
        everything = self.optimizer._runtime.stores
        in_order = [store for store in everything if store in self.pending]
        self.executor.submit(self.run, in_order, step)

    @torch.no_grad()
    def run(self, stores: list[UnitStore], step: Step) -> None:
        try:
            self.optimizer._update_units(stores, step)
        except BaseException as error:  # whoever uses a unit hears of it
            for future in self.pending.values():
                if not future.done():
                    future.set_exception(error)

    def updated(self, store: UnitStore) -> None:
        self.pending[store].set_result(None)
