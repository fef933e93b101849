"""``announce=True``: before a collective, ranks compare operation, unit, number and kind of elements.

"learned": only before one that was not at this place in the pass before. Without it, ranks that go
different ways fail in the transport, or wait until the group's timeout; so do, with "learned", ranks
that stay in the known order. Uses of the core: the seam ``comm``, the collectives of Comm.
"""

from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor

from zk.addon import Addon
from zk.addons.compared import agree
from zk.logs import require
from zk.parallel.comm import Comm, host_group

RULE = "blocks that ranks call, and step(), state_dict(), zk.gather() and reads of param.grad,"


class Announced(Addon):
    done: Any = ()  # collectives of this pass
    known: Any = iter(done)  # what comes next in the pass before, which ranks have compared

    def __init__(self, value: Any):
        require(value in (True, "learned"), f"announce must be True or 'learned'; got {value!r}")
        self.learns = value == "learned"

    def comm(self, comm: Comm) -> Comm:
        if comm.size > 1:
            self.own = Comm(host_group(comm.group or dist.group.WORLD, of_its_own=True))
            for name in ("all_gather", "reduce_scatter", "rows", "words", "broadcast"):
                vars(comm)[name] = partial(self.run, name, getattr(comm, name))
        return comm

    def run(self, name: str, plain: Any, about: str, value: Any, *given: Any) -> Any:
        """A collective, after ranks have compared; ValueError on all where they differ."""
        what = f"{value.numel()} {value.dtype}" if isinstance(value, Tensor) else "values"
        text = f"{name} of {about!r}, {what}"
        if next(self.known, "") != text:
            agree(self.own, RULE, {"the next one": text})
        self.done = [*self.done, text][:9999]  # of a model that only forwards, there is no end
        if about == "gradients":  # the last one of a backward pass that all ranks have
            self.known, self.done = iter(self.done * self.learns), ()
        return plain(about, value, *given)
