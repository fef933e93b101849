"""``experts=True``: entries of ModuleLists inside of blocks travel alone, each when it is called.

An expert that no rank uses does not move. At stages 0 to 2 ranks may use different ones; at stage 3 a
gather is a collective, so it is for one rank. Experts are not prefetched, as the router decides.
Uses of the core: the seams ``check``, ``comm``, ``blocks``, ``attach``; ``Runtime.use``, ``gather``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from zk.addon import Addon
from zk.logs import require
from zk.parallel.gradient import in_backward
from zk.unit import blocks_of

if TYPE_CHECKING:
    from zk.config import ZeroConfig
    from zk.optimizer import ZeroOptimizer
    from zk.parallel.comm import Comm
    from zk.store import UnitStore


class Experts(Addon):
    def __init__(self, value: bool) -> None:
        require(value is True, f"experts must be True or False; got {value!r}")
        self.experts = set[nn.Module]()

    def check(self, model: nn.Module, optimizers: object, config: ZeroConfig) -> None:
        self.stage = config.stage

    def comm(self, comm: Comm) -> Comm:
        require(
            self.stage < 3 or comm.size == 1,
            f"experts=True at stage=3 is for one rank, as ranks that use different experts cannot gather "
            f"them together; got {comm.size} ranks: use stage=2, or remove it",
        )
        return comm

    def blocks(self, model: nn.Module, blocks: dict[str, nn.Module]) -> dict[str, nn.Module]:
        found = dict(blocks)
        for name, block in blocks.items():
            found |= {f"{name}.{inner}": expert for inner, expert in blocks_of(block).items()}
        self.experts = {expert for name, expert in found.items() if name not in blocks}
        return found

    def attach(self, optimizer: ZeroOptimizer) -> None:
        runtime: Any = optimizer._runtime
        plain = runtime.use

        def use(store: UnitStore) -> None:
            if store.unit.module in self.experts:
                runtime.gather(store, in_backward())
            else:
                plain(store)

        runtime.use = use
