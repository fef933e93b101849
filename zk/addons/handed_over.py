"""Models and optimizers that a ZeroOptimizer has, as users still meet them until it is closed.

    the user's optimizers   refuse to step, and to give or take states
    optimizer.state         is empty, says where states are, and may not be replaced
    modules at stage 3      have whole values in state_dict(), and take them in load_state_dict():
                            both are collectives then; over several ranks modules tell transformers,
                            TRL and PEFT that their parameters are partitioned

Every optimizer has it, without an option. Uses of the core: ``ZeroOptimizer._inners``, ``state``;
``gather``, ``UnitStore.read``; RUNTIMES, ``Runtime.handles``, which are removed when it is closed.
"""

import contextlib
from functools import partial
from typing import Any

from torch import nn

from zk.addon import Addon
from zk.logs import require
from zk.optimizer import ZeroOptimizer
from zk.parallel.gather import gather, place_of
from zk.parallel.runtime import RUNTIMES, Hook


class HandedOver(Addon):
    """It stands as ``_is_fsdp_managed_module`` in modules, and is true until the optimizer is closed.

    With it ``generate`` runs on every rank until the last has finished, and LayerDrop skips nothing.
    Units lack it, as torch.compile reads it too, and would not compile them. Copies have False.
    """

    def attach(self, optimizer: ZeroOptimizer) -> None:
        model, self.runtime = optimizer.model, optimizer._runtime
        handles, is_among = self.runtime.handles[None], optimizer._layout.comm.size > 1
        optimizer.state = Elsewhere()  # type: ignore[assignment]
        handles += [
            getattr(inner, f"register_{call}_pre_hook")(partial(refuse, call))
            for inner in optimizer._inners
            for call in ("step", "state_dict", "load_state_dict")
        ]
        units = {store.unit.module for store in self.runtime.stores}
        for module in model.modules() if self.runtime.partitions else ():
            handles += hooks_of(module) if module._parameters else ()
            has_units = units & ({*module.modules()} - {module})
            if is_among and (module is model or has_units or hasattr(module, "generate")):
                module._is_fsdp_managed_module = self  # type: ignore[assignment]

    def around_update(self, run: Any) -> Any:
        require(type(self.runtime.owner().state) is Elsewhere, ELSEWHERE)
        return run

    def __bool__(self) -> bool:
        return self.runtime in RUNTIMES

    def __reduce__(self) -> Any:
        return bool, ()


def hooks_of(module: nn.Module) -> list[Any]:
    """Make ``state_dict()`` (in host memory) and ``load_state_dict()`` of one module whole."""
    loading = contextlib.ExitStack()

    def read(module: nn.Module, state: Any, prefix: str, _: Any) -> None:
        for name, param in module._parameters.items():
            store, index = place_of(param) or (None, 0)
            if store and store.full is None and prefix + name in state:
                state[prefix + name] = store.read("param", index).cpu()

    def begin(*_: Any) -> None:
        loading.enter_context(gather([*module._parameters.values()], write=True))

    return [
        module.register_state_dict_post_hook(Hook(read)),
        module.register_load_state_dict_pre_hook(Hook(begin)),
        module.register_load_state_dict_post_hook(Hook(lambda *_: loading.close())),
    ]


ELSEWHERE = (
    "states of a ZeroOptimizer rest on its tiers: use state_dict(), load_state_dict(), zk.gather"
)


class Elsewhere(dict[Any, Any]):
    """``optimizer.state``: empty, as states rest on tiers. It says where they are."""

    def refuse(self, *_: Any) -> None:
        raise TypeError(ELSEWHERE)

    __missing__ = __setitem__ = __delitem__ = __ior__ = refuse  # type: ignore[assignment]
    update = setdefault = pop = clear = refuse  # type: ignore[assignment]


def refuse(call: str, optimizer: object, *_: Any) -> None:
    """A hook of an optimizer that was given to a ZeroOptimizer, which may have it too."""
    require(
        isinstance(optimizer, ZeroOptimizer),
        f"this {type(optimizer).__name__} was given to a ZeroOptimizer, which has its states: call "
        f"{call}() of that one, or close() it first",
        RuntimeError,
    )
