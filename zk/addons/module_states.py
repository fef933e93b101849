"""``state_dict()`` and ``load_state_dict()`` of modules are whole at stage 3, as a collective.

Every optimizer has it, without an option. Uses of the core: ``gather``, ``UnitStore.read``.
"""

from __future__ import annotations

import contextlib
from typing import Any

from torch import nn

from zk.addon import Addon
from zk.optimizer import ZeroOptimizer
from zk.parallel.gather import gather, place_of
from zk.parallel.runtime import Hook


class ModuleStates(Addon):
    def __init__(self) -> None:
        self.handles: list[Any] = []

    def attach(self, optimizer: ZeroOptimizer) -> None:
        is_partitioned = optimizer.config.stage == 3
        for module in [m for m in optimizer.model.modules() if m._parameters and is_partitioned]:
            self.handles += hooks_of(module)

    def closed(self) -> None:
        for handle in self.handles:
            handle.remove()


def hooks_of(module: nn.Module) -> list[Any]:
    """Make ``state_dict()`` and ``load_state_dict()`` of a module whole: collectives at stage 3."""
    loading = contextlib.ExitStack()

    def read(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        for name, param in module._parameters.items():
            store, index = place_of(param) or (None, 0)
            if store is not None and store.full is None and prefix + name in state:
                state[prefix + name] = store.read("param", index).cpu()

    def begin(*_: Any) -> None:
        loading.enter_context(gather([*module._parameters.values()], write=True))

    def end(*_: Any) -> None:
        loading.close()

    return [
        module.register_state_dict_post_hook(Hook(read)),
        module.register_load_state_dict_pre_hook(Hook(begin)),
        module.register_load_state_dict_post_hook(Hook(end)),
    ]
