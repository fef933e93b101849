"""``shard_group=``: a few ranks, such as a node's, share states; other groups hold replicas.

Parameters are gathered within the group, whose links are fast; a rank then holds a larger share.
Gradients are reduced within it, and then over groups: fp32 means of groups cross the slow links.
Each rank writes what it reduces into a checkpoint. Hybrid sharding: PyTorch FSDP, arXiv 2304.11277.
Uses of the core: the seams ``check`` and ``comm``; Comm, of which ``sharers`` differ from all ranks.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zk.addon import Addon
from zk.config import PARSERS
from zk.logs import require
from zk.parallel.comm import Comm, new_group


class HybridComm(Comm):
    """All ranks, numbered by their shard: each reduces a part of it, and ``all_gather`` makes it whole."""

    def __init__(self, comm: Comm, group: dist.ProcessGroup):
        super().__init__(comm.group)
        said = comm.words("shard_group", dist.get_process_group_ranks(group))
        members = dist.get_process_group_ranks(world := comm.group or dist.group.WORLD)
        groups = {*map(tuple, said)}
        self.sharers, size = Comm(group), len(said[0])
        require(
            size > 1 and sorted(sum(groups, ())) == members and {*map(len, groups)} == {size},
            "shard_group must be one of several groups of process_group= that have no rank in "
            f"common, at least two each, and equally many; ranks gave {sorted(groups)}",
        )
        places = [*map(list.index, said, members)]  # within their groups
        numbered = sorted(range(self.size), key=places.__getitem__)
        alike = [members[rank] for rank in numbered if places[rank] == self.sharers.rank]
        self.replicas = Comm(new_group(world, alike))
        self.rank = numbered.index(self.rank)

    def reduce_scatter(self, about: str, bucket: Tensor, dtype: Any = torch.float32) -> Tensor:
        part = self.sharers.reduce_scatter(about, bucket, dtype)
        return self.replicas.reduce_scatter(about, part, bucket.dtype)

    def all_gather(self, about: str, shard: Tensor, full: Any = None) -> Any:
        return self.replicas.all_gather(about, shard, full)


class Hybrid(Addon):
    def __init__(self, group: Any):
        PARSERS["process_group"](group, "shard_group")
        self.group = group

    def check(self, model: object, optimizers: object, config: Any) -> None:
        require(config.stage, "shard_group= needs stage 1, 2 or 3: at stage 0 nothing is a shard")
        require(not config.options.get("announce"), "shard_group= and announce=True: remove one")

    def comm(self, comm: Comm) -> Comm:
        return HybridComm(comm, self.group)
