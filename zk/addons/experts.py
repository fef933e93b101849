"""``experts=True``: entries of ModuleLists inside of blocks travel alone, each when it is called.

An expert that no rank uses is not gathered, and ranks may use different ones. Experts are not
prefetched, as the router decides. At stage 3 over several ranks all gather the same in one order:

    forward     before a rank calls an expert that is not gathered, all say which they want, and
                gather these, until all have left the block. Then all experts are released
    backward    with the gradient of the block's output all gather what any rank has used in it. It
                stays until that of the block below comes, or backward ends
    checkpoint  the block finds its experts; with use_reentrant=True ranks ask as in forward

Uses of the core: the seams ``blocks``, ``attach``; ``Comm.rows``; ``Runtime.use``, ``gather``,
``gathered``, ``release``, ``end_of_backward``, ``handles``; its stores; ``Reducer.before_gather``.
"""

from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from zk.addon import Addon
from zk.logs import require
from zk.parallel.gradient import in_backward
from zk.parallel.runtime import hooks_around
from zk.store import UnitStore
from zk.unit import blocks_of

NONE = -1  # the number of no unit


class Experts(Addon):
    def __init__(self, value: bool):
        require(value is True, f"experts must be True or False; got {value!r}")
        self.around = list[nn.Module]()  # the blocks with experts
        self.depth = 0  # of calls of these blocks
        self.open: list[UnitStore] = []  # experts that ranks have gathered together

    def blocks(self, model: object, blocks: Any) -> Any:
        found = dict[str, nn.Module]()
        for name, block in blocks.items():
            inner = {f"{name}.{key}": expert for key, expert in blocks_of(block).items()}
            self.around += [block] * bool(inner)
            found |= inner
        require(
            found,
            "experts=True, and no block has a ModuleList; give units=, the class that has them",
        )
        self.experts = {*found.values()}
        return blocks | found

    def attach(self, optimizer: Any) -> None:
        runtime = optimizer._runtime
        self.runtime, self.ranks = runtime, optimizer._layout.comm
        self.plain, end = runtime.use, runtime.end_of_backward
        self.is_shared = self.ranks.size > 1 and runtime.partitions
        runtime.use = self.use
        if self.is_shared:
            runtime.end_of_backward = lambda: (self.free(), end())
            for block in self.around:
                runtime.handles[None] += hooks_around(block, self.enter, self.leave)

    def use(self, store: UnitStore) -> None:
        """Stand in for ``Runtime.use``: gather a unit before it is used."""
        if store.unit.module not in self.experts:
            self.plain(store)
        elif not self.is_shared:
            self.runtime.gather(store, in_backward())
        elif store.full is None:
            require(
                self.depth,
                f"{store.unit.name!r} is used outside of its block, where ranks cannot agree on what they "
                "gather: call it in the block's forward, or use stage=2",
                RuntimeError,
            )
            self.meet(self.runtime.stores.index(store))

    def meet(self, wanted: int) -> Any:
        """Gather what any rank wants; tell if there is something."""
        if in_backward():  # all ranks reduce the same before it
            self.runtime.reducer.before_gather(None)
        found = {int(number) for (number,) in self.ranks.rows("experts", [wanted])} - {NONE}
        for number in sorted(found):
            self.gather(self.runtime.stores[number])
        return found

    def gather(self, store: UnitStore) -> None:
        """Gather an expert, which stays until ``free``, whatever this rank uses meanwhile."""
        self.runtime.gather(store, in_backward())
        del self.runtime.gathered[store]
        self.open.append(store)

    def free(self) -> Any:
        """Release the experts that ranks have gathered."""
        for store in self.open:
            self.runtime.gathered[store] = None
            self.runtime.release(store)
        self.open = []

    def enter(self, *_: Any) -> None:
        if not self.depth and not in_backward():
            self.free()  # what an error has left
        self.depth += 1

    def leave(self, block: nn.Module, given: Any, output: Any) -> None:
        """The block returns: gather what others want; then its backward knows what to gather."""
        self.depth -= 1
        if self.depth:  # within another block
            return
        store_of = self.runtime.store_of  # within accumulate() all is held, and nobody asks
        while any(store_of[p].full is None for p in block.parameters()) and self.meet(NONE):
            pass
        used = self.open
        self.free()
        for value in () if in_backward() else tree_leaves(output):
            if isinstance(value, Tensor) and value.requires_grad:
                value.register_hook(partial(self.begin, used))

    def begin(self, used: list[UnitStore], _: Tensor) -> None:
        """The gradient of a block's output is there."""
        if self.open is not used:
            self.free()
            for store in used:
                self.gather(store)
            self.open = used
