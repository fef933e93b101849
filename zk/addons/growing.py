"""``growing=True``: parameters of groups train from the first forward, or step(), after unfreezing.

Units that have some are made anew. Uses of the core: ``Layout.units``, ``place``; Runtime, UnitStore.
"""

from typing import Any

import torch

from zk.addon import Addon
from zk.addons.checked import unfrozen
from zk.addons.compared import agree
from zk.addons.whole import Whole
from zk.logs import require
from zk.parallel.runtime import Hook
from zk.store import UnitStore


class Growing(Addon):
    def __init__(self, value: bool):
        require(value is True, f"growing must be True or False; got {value!r}")

    def check(self, model: Any, optimizers: Any, config: Any) -> None:
        delay = config.options.get("delay_update")
        require(
            {config.device_budget, config.host_budget, delay} == {None},
            "growing=True excludes device_budget=, host_budget= and delay_update=: remove one",
        )

    def attach(self, optimizer: Any) -> None:
        self.one = optimizer
        hook = optimizer.model.register_forward_pre_hook(Hook(self.grow), prepend=True)
        optimizer._runtime.handles[None] += hook, optimizer.register_step_pre_hook(self.grow)

    def grow(self, *_: Any) -> None:
        one = self.one
        layout, runtime = one._layout, one._runtime
        stores = dict.fromkeys(unfrozen(one).values())
        if not stores or runtime.depth or torch.is_inference_mode_enabled():
            return
        one.synchronize()
        for store in stores:
            own, tiers = dict.fromkeys(store.unit.params, store.unit.dtype), {**layout.tiers}
            units = [unit for unit in layout.units(one.model, own.get) if unit.dtype]
            agree(layout.comm, "what is unfrozen", {str(u.names): u.is_trained for u in units})
            layout.place(units, one.model, own)
            layout.tiers |= tiers  # there is one drive
            try:
                store.gather()
                runtime.detach(store)
                store.param.drop()
                for unit in units:
                    UnitStore.__init__(store, unit, layout)  # hooks of this call know the first
                    store.version = 1 << 32  # recipes of what it was are refused
                    runtime.attach(store)
                    store = object.__new__(UnitStore)
            except BaseException:
                one.close(gather=False)
                raise
            one._trained = [*layout.reducer.waiting]
            Whole().attach(one)
