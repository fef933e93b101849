"""``overlap_step=True``: the update runs in a thread beside the next forward; the same bits.

A unit's first use waits for its own update. Uses of the core: the seams ``updater`` and
``updated``, ``UnitStore.updating``, ``ZeroOptimizer._update_units``.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch

from zk.next.addon import Addon

if TYPE_CHECKING:
    from zk.next.addon import Update
    from zk.next.optimizer import ZeroOptimizer
    from zk.next.store import Step, UnitStore


class Overlap(Addon):
    def __init__(self, value: bool) -> None:
        if value is not True:
            raise ValueError(f"overlap_step must be True or False; got {value!r}")
        self.executor = ThreadPoolExecutor(1, "zk-update")
        self.pending: dict[UnitStore, Future[None]] = {}

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

    def used(self, store: UnitStore) -> None:
        """Listening gives every unit hooks around its forward, at stages 0 to 2 too."""

    def updated(self, store: UnitStore) -> None:
        self.pending[store].set_result(None)
