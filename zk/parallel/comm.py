"""Collectives over the ranks of a group, and what else ranks do together.

One process is a group of one rank, where they return what they are given. ``about`` names what is
exchanged, for errors and traces. An error of a collective names it: it says that a rank is gone, or
went another way, as soon as the group's timeout does.
"""

from __future__ import annotations

import contextlib
import os
import weakref
import zlib
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zk.kernels import reference
from zk.memory import empty

Group = dist.ProcessGroup | None
TIMEOUT = timedelta(minutes=10)  # of a collective, until it says that a rank is missing
# what all ranks raise where one fails: the first that its error is
KINDS = ValueError, TypeError, OSError, MemoryError, RuntimeError, Exception


def connect() -> None:
    """Make the default group of the ranks that torchrun has started, if nobody has."""
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started < 2 or dist.is_initialized():
        return
    place: dict[str, Any] = {}
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        # this store outlives restarts, and has the addresses of ranks of earlier attempts still
        where = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        made: Any = dist
        store = made.TCPStore(*where, started, is_master=False)
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = made.PrefixStore(f"zk/attempt/{attempt}", store)
        place = {"store": store, "rank": int(os.environ["RANK"]), "world_size": started}
    dist.init_process_group(timeout=TIMEOUT, **place)  # gloo in host memory, NCCL on devices


class Comm:
    """The five collectives that zk is built on: gather, reduce, numbers, words, broadcast."""

    def __init__(self, group: Group = None, alone: bool = False):
        self.group = group
        alone = alone or not dist.is_initialized()
        self.size, self.rank = (1, 0) if alone else (dist.get_world_size(group), dist.get_rank(group))
        self.sharers = self  # an add-on may have fewer ranks share states
        self.way = 0  # a checksum of the collectives since ranks exchanged words
        self.of_host = host_group(group or dist.group.WORLD) if self.size > 1 else group

    def all_gather(
        self, about: str, shard: Tensor, full: Tensor | None = None
    ) -> tuple[Tensor, Collective]:
        """The shards (n,) of all ranks as (size * n,), and the work to wait for. Alone: the shard."""
        if self.size == 1:
            return shard, Collective(self, about, ())
        if full is None:
            full = empty(self.size * shard.numel(), shard.dtype, shard.device)
        group = self.group_for(about, shard)
        with self.named("all_gather", about):
            if shard.device.type != "cpu":
                work = _all_gather(full, shard, group=group, async_op=True)
                return full, Collective(self, about, [work])
            parts = full.chunk(self.size)  # gloo's broadcasts take a third of its all_gather's time
            if parts[self.rank].data_ptr() != shard.data_ptr():
                parts[self.rank].copy_(shard)
            pairs = enumerate(parts)
            works = [dist.broadcast(p, group=group, group_src=r, async_op=True) for r, p in pairs]
        return full, Collective(self, about, works)

    def reduce_scatter(self, about: str, bucket: Tensor, dtype: Any = None) -> Tensor:
        """This rank's part (n,) of the mean of all ranks' ``bucket`` (size * n,), in ``dtype`` or its.

        Summed in fp32 in the order of ranks and rounded once: the bits depend on nothing else.
        """
        dtype = dtype or bucket.dtype
        if self.size == 1:
            return bucket.to(dtype)
        rows = empty(bucket.numel(), bucket.dtype, bucket.device)
        with self.named("reduce_scatter", about):
            dist.all_to_all_single(rows, bucket, group=self.group_for(about, bucket))
        shard = empty(bucket.numel() // self.size, dtype, bucket.device)
        reference.unchecked("reduce", bucket.device)(rows.view(self.size, -1), shard)
        return shard

    def rows(self, about: str, values: list[float]) -> list[list[float]]:
        """The numbers of each rank, in the order of ranks; over the host's own connections."""
        if self.size == 1:
            return [values]
        # of one length where they are few, so that ranks that went other ways can be told
        mine = torch.tensor([0.0, *values, *[0.0] * (7 - len(values))], dtype=torch.float64)
        group, mine[0] = self.group_for(about, mine), self.way
        rows = mine.repeat(self.size, 1)
        with self.named("exchange of numbers", about):
            _all_gather(rows.view(-1), mine, group=group)
            if rows[:, 0].unique().numel() > 1:
                self.way = 0
                raise RuntimeError("their collectives before this one differ")
        return rows[:, 1 : len(values) + 1].tolist()  # type: ignore[no-any-return]

    def words(self, about: str, value: Any) -> list[Any]:
        """What each rank says: any value that can be pickled."""
        said: list[Any] = [value] * self.size
        if self.size > 1:
            with self.named("exchange of words", about):
                dist.all_gather_object(said, value, group=self.of_host)
            self.way = self.sharers.way = 0  # all are here
        return said

    def broadcast(self, about: str, values: Tensor) -> None:
        """Give all ranks the first one's ``values``, as bytes, which every backend takes."""
        if self.size > 1:
            with self.named("broadcast", about):
                sent = (whole := values.contiguous()).view(-1).view(torch.uint8)
                dist.broadcast(sent, group=self.group_for(about, values), group_src=0)
                values.copy_(whole)

    def group_for(self, about: str, values: Tensor) -> Group:
        """The group for a collective of ``values``, which is noted: NCCL takes those on devices only."""
        self.way = zlib.crc32(about.encode(), self.way)
        return self.of_host if values.device.type == "cpu" else self.group

    @contextlib.contextmanager
    def named(self, operation: str, about: str) -> Iterator[None]:
        """An error of the collective inside says which one it is."""
        try:
            yield
        except RuntimeError as error:
            raise dist.DistError(
                f"rank {self.rank} of {self.size}: {operation} of {about!r} failed, as another rank "
                f"is gone, or went another way (announce=True compares): {error}"
            ) from error

    # ---- what ranks do together, outside of training steps ---------------------------------------

    @contextlib.contextmanager
    def together(self, about: str) -> Iterator[None]:
        """An error of one rank inside is raised by all. No collective may be inside."""
        failed: Any = None
        words = None
        try:
            yield
        except Exception as error:
            failed, kind = error, next(kind for kind in KINDS if isinstance(error, kind))
            words = kind, f"{type(error).__name__}: {error}"
        said = [(rank, *words) for rank, words in enumerate(self.words(about, words)) if words]
        if failed is not None:
            raise failed
        for _, kind, _ in said:
            reasons = "; ".join(f"on rank {rank}, {text}" for rank, _, text in said)
            raise kind(f"{about} failed elsewhere: {reasons}")


class Collective:
    """An all_gather in flight, as several of torch's; alone there are none."""

    def __init__(self, comm: Comm, about: str, works: Iterable[Any]):
        self.comm, self.about, self.works = comm, about, works

    def wait(self) -> None:
        for work in self.works:
            with self.comm.named("all_gather", self.about):
                work.wait()


_of_gloo: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def host_group(group: Any, of_its_own: bool = False) -> Any:
    """A group of the same ranks that takes tensors in host memory: itself, or one of gloo."""
    if torch.device("cpu") in group._device_types and not of_its_own:
        return group
    if group not in _of_gloo:
        ranks = dist.get_process_group_ranks(group)
        _of_gloo[group] = new_group(group, ranks, backend="gloo")
    return _of_gloo[group]


def new_group(like: Any, ranks: Any, **options: Any) -> Any:
    """A group of ``ranks``, which call this, with the timeout of ``like``."""
    options["timeout"] = like._get_backend(like._device_types[0]).options._timeout
    return dist.new_group(ranks, use_local_synchronization=True, **options)


# torch 2.13 renames it, and warns where it is called by the old name
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
