"""In: flat buffers and the name of their unit. Out: collectives, checked and in order. Beside checkpoint/dcp.py
the only importer of torch.distributed.

Every collective is announced first: ranks exchange what they are about to do (operation, unit, count), 24 bytes each. A rank that
goes another way, because its inputs took another branch or a unit was skipped, is then an error that names both units, where a
mismatched collective would hang, mix up data or end the process inside the transport.

Two collectives are spelled differently on gloo, for measured reasons (2 ranks on 2 cores, 12.6M bf16 elements, torch 2.13):
reduce-scatter as all-to-all plus a local fp32 sum in rank order takes 7 ms against gloo's 91, rounds once, and its result does
not depend on the backend's algorithm; all-gather as one broadcast for each rank takes 7 ms against 15-50.
"""

from __future__ import annotations

import atexit
import hashlib
import itertools
import os
import sys
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from zk.parallel.presence import Presence
from zk.timeline import note, now_ns, phase, recording

GATHER, REDUCE, NORM, BROADCAST, STATE, MEMORY = range(6)
_VERBS = ("gather", "reduce", "norm", "broadcast", "state", "the check of memory")


class Pending(Protocol):
    """A collective in flight."""

    def wait(self) -> None:
        """Order the calling thread's current stream after the result; in host memory, return when it is there. Raises what went wrong on any rank.

        A call orders one stream: whoever reads the result on another one calls again.
        """


class Done:
    """A collective that needed no work."""

    done = True

    def wait(self) -> None:
        return


class Solo:
    """One process: every collective is already done. Buffers and shards are the same memory, so nothing is copied."""

    rank, world = 0, 1

    def name_units(self, names: Sequence[str], digest: str) -> None:
        return

    def close(self) -> None:
        return

    def all_gather(self, unit: int, full: Tensor, shard: Tensor) -> Pending:
        if full.data_ptr() != shard.data_ptr():
            full.copy_(shard)
        return Done()

    def reduce_scatter(self, unit: int, bucket: Tensor, shard: Tensor) -> Pending:
        if bucket.data_ptr() != shard.data_ptr():
            shard.copy_(bucket)
        return Done()

    def broadcast(self, unit: int, tensor: Tensor, operation: int = BROADCAST) -> None:
        return

    def all_reduce(self, tensor: Tensor, operation: int = NORM) -> None:
        return


class _Works:
    """Several asynchronous works, and what follows once all are done. Keeps the buffers alive meanwhile.

    ``finish`` runs once, on the stream of the first ``wait``.
    """

    def __init__(self, comm: Group, label: str, works: list[dist.Work], finish: Callable[[], object] | None = None) -> None:
        self.comm, self.label, self.works, self.finish = comm, label, works, finish

    def wait(self) -> None:
        with phase("wait", f"other ranks: {self.label}"):
            for work in self.works:
                self.comm.guard(self.label, work.wait)
        if self.finish is not None:
            finish, self.finish = self.finish, None
            finish()


class Group:
    """Ranks of a torch.distributed process group (gloo or NCCL).

    Args:
        process_group: None takes the default group.
        overlap: False waits for each collective where it is started.
        presence: tells which ranks are there; None makes one.
    """

    def __init__(self, process_group: dist.ProcessGroup | None, overlap: bool = True, presence: Presence | None = None) -> None:
        self.group: Any = process_group or dist.distributed_c10d._get_default_group()
        self.rank, self.world = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.gloo = dist.get_backend(self.group) == "gloo"
        self.overlap = overlap
        self.names: tuple[str, ...] = ()
        self.count = 0
        ranks = dist.get_process_group_ranks(self.group)
        # announcements and small host values travel over gloo, whatever carries the data
        self.control: Any = self.group if self.gloo else dist.new_group(ranks, backend="gloo")
        self.ranks = ranks
        self.presence = presence or Presence(dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size())
        if not _GROUPS:
            atexit.register(_leave)
        _GROUPS.add(self)

    def twin(self, backend: str | None = None) -> Group:
        """The same ranks over connections of their own, for another thread; a collective. ``backend``: another than this one's."""
        group = dist.new_group(self.ranks, backend=backend or dist.get_backend(self.group))
        twin = Group(group, self.overlap, self.presence)
        twin.names = self.names
        return twin

    def close(self) -> None:
        """Let go of the process groups, so that destroying them ends their threads."""
        self.group = self.control = None

    def name_units(self, names: Sequence[str], digest: str) -> None:
        """Agree on the units: ``names`` for error messages, ``digest`` (names and shapes) equal on all ranks or RuntimeError."""
        self.names = tuple(names)
        mine = torch.tensor(list(hashlib.sha256(digest.encode()).digest()), dtype=torch.uint8)
        first = mine.clone()
        dist.broadcast(first, self.ranks[0], group=self.control)
        same = torch.tensor([int(torch.equal(mine, first))])
        dist.all_reduce(same, op=dist.ReduceOp.MIN, group=self.control)
        if not same.item():
            raise RuntimeError(
                f"the ranks hold different models or parameter groups (seen from rank {self.rank}): parameter names, shapes, memory formats, order, "
                "requires_grad and groups must be the same on every rank"
            )

    def _label(self, operation: int, unit: int) -> str:
        if not 0 <= operation < len(_VERBS):
            return "a collective that is not zk's"
        return _VERBS[operation] + (f" of unit {self.names[unit]!r}" if 0 <= unit < len(self.names) else "")

    def guard(self, label: str, call: Callable[[], object]) -> None:
        """Run a call into torch.distributed; a failure is raised again with what was asked and by whom."""
        try:
            call()
        except RuntimeError as error:
            where = f"rank {self.rank} of {self.world} failed in collective {self.count} ({label})"
            raise RuntimeError(f"{where}: {self._who_is_gone()}{error}") from error

    def _who_is_gone(self) -> str:
        """Ranks that have ended, as a sentence; nothing where all of them show signs of life, as then only the error says what went wrong."""
        gone = self.presence.gone()
        if gone is None:
            return "the store over which the ranks have met is gone, and with it the process that keeps it (rank 0, or torchrun). "
        named = [self.ranks.index(rank) for rank in gone if rank in self.ranks]
        if named:
            return f"rank{'s' * (len(named) > 1)} {', '.join(map(str, named))} ended: no sign of life any more. "
        return ""

    def _announce(self, operation: int, unit: int) -> tuple[str, Callable[[], None]]:
        """Tell the other ranks what comes next. Returns its label and a check that raises if any of them is about to do something else."""
        self.count += 1
        label = self._label(operation, unit)
        mine = torch.tensor([operation, unit, self.count])
        all_ = torch.empty(self.world, 3, dtype=torch.int64)
        works: list[dist.Work] = []
        self.guard(label, lambda: works.append(_all_gather(all_.view(-1), mine, self.control)))

        def check() -> None:
            with phase("wait", f"other ranks: they announce {label}"):
                self.guard(label, works[0].wait)
            for rank, row in enumerate(all_.tolist()):
                if row != mine.tolist():
                    raise RuntimeError(
                        f"ranks diverged at collective {self.count}: rank {self.rank} is in {label} while rank {rank} is in "
                        f"{self._label(row[0], row[1])} (its number {row[2]}). Every rank must run the same modules in the same order: "
                        "look for a branch that depends on the rank's data, or for a call made on one rank only"
                    )

        if self.gloo:  # a mismatched collective ends the process inside gloo, so look before starting it
            check()
            return label, lambda: None
        return label, check

    def _launch(self, label: str, check: Callable[[], None], start: Callable[[], list[dist.Work]], finish: Callable[[], object] | None) -> Pending:
        works: list[dist.Work] = []
        start_ns = now_ns()
        self.guard(label, lambda: works.extend(start()))
        if self.gloo and recording():  # NCCL's own kernels tell more
            _note_when_done(label, start_ns, works)

        def done() -> None:
            check()
            if finish is not None:
                with phase("collective", f"{label}: its arithmetic"):
                    finish()

        pending = _Works(self, label, works, done)
        if not self.overlap:
            pending.wait()
        return pending

    def all_gather(self, unit: int, full: Tensor, shard: Tensor) -> Pending:
        """Collect every rank's ``shard`` (shard_numel,) into ``full`` (world * shard_numel,). ``shard`` may be a view of ``full``.

        Host memory goes over gloo, whatever carries the device's.
        """
        label, check = self._announce(GATHER, unit)
        if not self.gloo and full.device.type != "cpu":
            return self._launch(label, check, lambda: [_all_gather(full.view(torch.uint8), shard.view(torch.uint8), self.group)], None)
        parts = full.chunk(self.world)
        if parts[self.rank].data_ptr() != shard.data_ptr():
            parts[self.rank].copy_(shard)
        as_bytes = [part.view(torch.uint8) for part in parts]
        return self._launch(
            label,
            check,
            lambda: [dist.broadcast(part, self.ranks[rank], group=self.control, async_op=True) for rank, part in enumerate(as_bytes)],
            None,
        )

    def reduce_scatter(self, unit: int, bucket: Tensor, shard: Tensor) -> Pending:
        """The mean over ranks of ``bucket`` (world * shard_numel,), this rank's slice of it to ``shard`` (shard_numel,).

        gloo: summed in fp32 in the order of ranks and rounded once. NCCL: in the bucket's dtype.
        """
        label, check = self._announce(REDUCE, unit)
        if not self.gloo:
            mean_shard = shard if shard.dtype == bucket.dtype else torch.empty_like(shard, dtype=bucket.dtype)
            cast = None if mean_shard is shard else lambda: shard.copy_(mean_shard)
            return self._launch(label, check, lambda: [_reduce_scatter(mean_shard, bucket, self.group)], cast)
        received = torch.empty_like(bucket)  # (world, shard_numel): what each rank has for this one

        def mean() -> None:
            for start in range(0, shard.numel(), 1 << 16):
                piece = slice(start, start + (1 << 16))
                rows = [row[piece] for row in received.chunk(self.world)]
                total = rows[0].float()
                for row in rows[1:]:
                    total += row
                shard[piece] = total.div_(self.world)

        def start() -> list[dist.Work]:
            work = dist.all_to_all_single(received.view(torch.uint8), bucket.view(torch.uint8), group=self.group, async_op=True)
            return [work]

        return self._launch(label, check, start, mean)

    def broadcast(self, unit: int, tensor: Tensor, operation: int = BROADCAST) -> None:
        """Overwrite ``tensor`` (contiguous) on every rank with the first rank's. Host memory goes over gloo, as in ``all_gather``."""
        label, check = self._announce(operation, unit)
        group = self.group if tensor.device.type != "cpu" else self.control
        as_bytes = tensor.view(-1).view(torch.uint8)  # neither gloo nor NCCL knows all dtypes
        self._launch(label, check, lambda: [dist.broadcast(as_bytes, self.ranks[0], group=group, async_op=True)], None).wait()

    def all_reduce(self, tensor: Tensor, operation: int = NORM) -> None:
        """Sum ``tensor`` (host memory) over ranks, in place."""
        label, check = self._announce(operation, -1)
        self._launch(label, check, lambda: [dist.all_reduce(tensor, group=self.control, async_op=True)], None).wait()


def _note_when_done(label: str, start_ns: int, works: Sequence[dist.Work]) -> None:
    """A span until the last of ``works`` has ended, which gloo's own threads tell; they may be waited for much later."""
    ended = itertools.count(1)

    def end(_: object) -> None:
        if next(ended) == len(works):
            note("collective", label, start_ns, now_ns())

    for work in works:
        work.get_future().add_done_callback(end)


def _all_gather(full: Tensor, shard: Tensor, group: dist.ProcessGroup) -> dist.Work:
    call = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # torch 2.11 has the second only
    work: dist.Work = call(full, shard, group=group, async_op=True)
    return work


def _reduce_scatter(shard: Tensor, bucket: Tensor, group: dist.ProcessGroup) -> dist.Work:
    call = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
    work: dist.Work = call(shard, bucket, op=dist.ReduceOp.AVG, group=group, async_op=True)
    return work


_GROUPS: weakref.WeakSet[Group] = weakref.WeakSet()


def _leave() -> None:
    """At exit: end gloo's threads while Python can still take back the tensors they hold; later, that ends the process with SIGABRT."""
    for group in _GROUPS:
        group.close()
    # after an error peers may be waiting in a collective, and ending the threads would wait for them
    if dist.is_initialized() and not hasattr(sys, "last_type"):
        dist.destroy_process_group()


def _meeting_place() -> dict[str, Any]:
    """Where ranks meet: torch's own choice, but for torchrun's store, which outlives restarts.

    With ``--master-port``, that has the addresses of ranks of earlier attempts still, and torch 2.13 would take them for today's.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return {}
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    make: Any = dist.TCPStore  # type: ignore[attr-defined]
    store = make(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), world, is_master=False, timeout=timedelta(minutes=10))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return {"store": dist.distributed_c10d.PrefixStore(f"zk/attempt/{attempt}", store), "rank": rank, "world_size": world}


def world_to_join(process_group: dist.ProcessGroup | None) -> int:
    """How many ranks ``connect`` would find."""
    if process_group is not None or (dist.is_available() and dist.is_initialized()):
        return dist.get_world_size(process_group)
    return int(os.environ.get("WORLD_SIZE", "1"))


def connect(process_group: dist.ProcessGroup | None, overlap: bool, device: torch.device) -> Solo | Group:
    """The ranks to train with: the group given, the default group, one made from torchrun's environment, or this process alone."""
    available = dist.is_available()
    if process_group is None and available and not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timedelta(minutes=10), **_meeting_place())
    if process_group is None and not (available and dist.is_initialized()):
        return Solo()
    group = Group(process_group, overlap)
    if group.world == 1:
        return Solo()
    return group
