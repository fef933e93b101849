"""Modules tell transformers, TRL and PEFT that their parameters are partitioned over ranks.

Methods of the core: Layout.comm, Runtime.stores. It is there for every optimizer, without an option.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zk.addon import Addon

if TYPE_CHECKING:
    from zk.optimizer import ZeroOptimizer


class Partitioned(Addon):
    """True as ``_is_fsdp_managed_module`` of modules, at stage 3 over several ranks, until closed.

    With it ``generate`` runs on every rank until the last one has finished, and LayerDrop skips
    nothing. It is on the modules around units, not on units: torch.compile reads it too, and would
    not compile those. Copies of a module have False.
    """

    def __init__(self) -> None:
        self.is_active = False

    def attach(self, optimizer: ZeroOptimizer) -> None:
        model, stores = optimizer.model, optimizer._runtime.stores
        self.is_active = optimizer._layout.comm.size > 1 and stores[0].is_partitioned
        units = {store.unit.module for store in stores if store.unit.module is not model}
        for module in model.modules() if self.is_active else ():
            has_units = any(part in units for part in module.modules() if part is not module)
            if module is model or has_units or hasattr(module, "generate"):
                module._is_fsdp_managed_module = self  # type: ignore[assignment]

    def closed(self) -> None:
        self.is_active = False

    def __bool__(self) -> bool:
        return self.is_active

    def __reduce__(self) -> tuple[type[bool], tuple[()]]:
        return bool, ()
