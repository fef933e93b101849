"""``announce=True``: ranks compare what each is about to do before every collective.

One that goes another way is an error on all, with the words of each. Without it the transport fails,
or waits until the group's timeout. Announced are the operation, the unit, and the number and kind of
elements; parts and other groups announce nothing. Uses of the core: the seam ``comm``, the collectives of Comm.
"""

from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor

from zk.addon import Addon
from zk.logs import require
from zk.parallel.comm import Comm, host_group


class Announced(Addon):
    def __init__(self, value: bool) -> None:
        require(value is True, f"announce must be True or False; got {value!r}")

    def comm(self, comm: Comm) -> Comm:
        if comm.size > 1:
            self.own = Comm(host_group(comm.group or dist.group.WORLD, of_its_own=True))
            for name in ("all_gather", "reduce_scatter", "rows", "words", "broadcast"):
                vars(comm)[name] = partial(self.run, name, getattr(comm, name))
        return comm

    def run(self, name: str, plain: Any, about: str, value: Any, *given: Any) -> Any:
        """A collective, after an exchange of words; RuntimeError on all ranks where they differ."""
        what = f"{value.numel()} {value.dtype}" if isinstance(value, Tensor) else "values"
        what = f"{len(value)} numbers" if name == "rows" else what
        text = f"{name} of {about!r}, {what}"
        said = self.own.words(text, text)
        each = "; ".join(f"rank {rank}: {words}" for rank, words in enumerate(said))
        require(
            len({*said}) == 1,
            f"ranks went different ways: {each}; all ranks of stage 3 call the same blocks, and all "
            "call step(), state_dict(), zk.gather() and reads of param.grad together",
            RuntimeError,
        )
        return plain(about, value, *given)
