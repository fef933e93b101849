"""Collectives over flat buffers, announced by the name of their unit, checked and in order. The only importer of
torch.distributed.

Every collective is announced first: ranks exchange what they are about to do (operation, unit, count, a value), 32 bytes each. A rank that
goes another way, because its inputs took another branch or a unit was skipped, is then an error that names both units, where a
mismatched collective would hang, mix up data or end the process inside the transport. Announcements have connections of their own, so
that no collective of the user's can meet them.

Every wait for other ranks ends: with the process group's timeout at the latest, at once where a rank has said why it gives up, and within a
second on Ctrl-C.

Reduce-scatter is all-to-all and a local fp32 sum in rank order: the same bytes over the wire, one rounding, and a result that does not
depend on the backend or its algorithm. On gloo it takes 7 ms against 91, and all-gather, as one broadcast for each rank, 7 ms against 15-50
(2 ranks on 2 cores, 12.6M bf16 elements, torch 2.13).
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import functools
import hashlib
import itertools
import json
import math
import os
import re
import sys
import time
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from zk.core.events import COMPLETED, Awaited
from zk.core.logs import rank_log
from zk.core.timeline import phase
from zk.kernels.reference import unchecked
from zk.parallel.presence import Board, Presence, fail, why

Ranks: TypeAlias = "dist.ProcessGroup | DeviceMesh | None"  # that train together, as ZeroConfig.process_group has them
GATHER, REDUCE, NORM, BROADCAST, STATE, MEMORY, TEXT, RULES, CHOICE = range(9)
_VERBS = (
    "gather", "reduce", "norm", "broadcast", "state", "the check of memory", "the exchange of errors", "the check of options",
    "the choice of experts",
)  # fmt: skip
LOOK_S = 1.0  # in a wait for other ranks, how often to look whether it can still end well
_LABEL_NBYTES = 120  # of what ranks tell each other when they are in different collectives
TELL_S = 10.0  # how often to log who is waited for
INTERRUPT_S = 2.0  # how long Ctrl-C is put off for other ranks to come to what was announced


class RankError(RuntimeError):
    """An error that all of ``ranks`` have heard of, at the same point: nobody need tell them again."""

    def __init__(self, text: str, ranks: Sequence[int]) -> None:
        super().__init__(text)
        self.ranks = frozenset(ranks)


class Comm:
    """Ranks that train together; here one process: every collective is done. Buffers and shards are the same memory, so nothing is copied."""

    rank, world = 0, 1
    shard_rank, shards, replica = 0, 1, 0
    ranks: Sequence[int] = ()
    names: Sequence[str] = ()  # of units, for error messages

    def agree(self, rules: Mapping[str, object], failing: str = "") -> None:
        return

    def exchange(self, text: str, what: str, is_error: bool = False) -> list[str]:
        return [text]

    def board(self) -> Comm | Board:
        return self

    def fail(self, error: BaseException, rank: int | None = None) -> None:
        return

    def close(self) -> None:
        return

    def all_gather(self, unit: int, full: Tensor, shard: Tensor) -> Awaited:
        if full.data_ptr() != shard.data_ptr():
            full.copy_(shard)
        return COMPLETED

    def reduce_scatter(self, unit: int, bucket: Tensor, shard: Tensor, stats: Tensor | None = None) -> Awaited:
        return COMPLETED

    def broadcast(self, unit: int, tensor: Tensor, operation: int = BROADCAST) -> None:
        return

    def all_reduce(self, tensor: Tensor, operation: int = NORM, unit: int | None = None) -> None:
        return

    def ranks_with(self, flags: Sequence[bool], operation: int = NORM, unit: int | None = None) -> list[int]:
        """The number of ranks that have set each of ``flags``, of which all have as many; ``operation`` and ``unit`` as for ``all_reduce``."""
        everywhere = torch.tensor(flags, dtype=torch.float32)
        self.all_reduce(everywhere, operation, unit)
        return [int(ranks) for ranks in everywhere.tolist()]


class _Works:
    """Several asynchronous works, and what follows once all are done. Keeps the buffers alive meanwhile.

    ``finish`` runs once, on the stream of the first ``wait``.
    """

    def __init__(self, comm: Group, label: str, works: Sequence[dist.Work], finish: Callable[[], object], on_device: bool) -> None:
        self.comm, self.label, self.works, self.on_device = comm, label, works, on_device
        self.finish: Callable[[], object] | None = finish

    def wait(self) -> None:
        with phase("wait", f"other ranks: {self.label}"):
            self.comm.wait_for_all(self.label, self.works, self.on_device)
        if self.finish is not None:
            finish, self.finish = self.finish, None
            finish()


class Group(Comm):
    """Ranks of a torch.distributed process group (gloo or NCCL), with connections of zk's own for announcements and host values.

    Args:
        group: carries what is sent; None takes the default group.
        overlap: False waits for each collective where it is started.
        exact: False leaves the reduction of gradients to NCCL, in their own 16 bits.
        ranks: all that take part, where these are more than are in ``group``.
        column: the ranks of other groups that have the same place in theirs.

    All of the group's ranks make one at the same point; ranks that are not in it have no part in that.

    States are divided into ``shards``, one for each rank of ``group``; this rank has number ``shard_rank``. Where there is a ``column``, ``ranks``
    are rows and columns: each row has all shards, as a ``replica``. Parameters are gathered in a row, and gradients are reduced there first.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        overlap: bool = True,
        exact: bool = True,
        ranks: Sequence[int] | None = None,
        column: dist.ProcessGroup | None = None,
    ) -> None:
        self.row: Any = group or dist.distributed_c10d._get_default_group()
        self.row_ranks = dist.get_process_group_ranks(self.row)
        self.ranks = list(ranks or self.row_ranks)
        self.rank, self.world = self.ranks.index(dist.get_rank()), len(self.ranks)
        self.shard_rank, self.shards = dist.get_rank(self.row), len(self.row_ranks)
        self.column: Any = column
        self.replica = dist.get_rank(column) if column is not None else 0
        self.gloo = _backend_of(self.row) == "gloo"
        self.overlap, self.exact = overlap, exact
        self.count = self.boards = 0
        self.unheard = 0  # collectives that have begun here, and not ended well
        self.owned: dict[tuple[str, str, tuple[int, ...], timedelta], Any] = {}  # groups that are not the user's
        self.numbers = itertools.count()
        self.interrupted: KeyboardInterrupt | None = None  # put off until what was announced has begun
        self.timeout: timedelta = self.row._get_backend(torch.device("cpu" if self.gloo else "cuda")).options._timeout
        self.place = _next_place(self.ranks)
        self.presence = Presence(dist.distributed_c10d._get_default_store(), dist.get_rank())
        if not _GROUPS:
            atexit.register(_leave, os.getpid())
        _GROUPS.add(self)
        # torch's own rendezvous waits for a rank that has ended, and does not hear Ctrl-C: ranks meet before it. Where connections are there already
        # there is none, and a rank that is ahead may have been refused what the others are about to be refused
        left = sorted(_LEFT)
        said = self.presence.meet(self.place, self.ranks, self.timeout.total_seconds(), json.dumps([place for place, *_ in left]))
        offered = {rank: set(json.loads(words)) for rank, words in said.items()}
        self.free = [key for key in left if all(key[0] in offered.get(rank, ()) for rank in key[2])]
        self._connect(self.row if ranks is None else None)

    def _connect(self, group: Any) -> None:
        """Make the connections, but for those that ``group`` has."""
        self.control: Any = self._own("gloo", self.ranks)
        self.group: Any = group or self._own(_backend_of(self.row), self.ranks)
        self.row_of_host: Any = self.row
        if not self.gloo:
            self.row_of_host = self.control if self.shards == self.world else self._own("gloo", self.row_ranks)

    @property
    def _of_host(self) -> Any:
        """The group that carries host memory."""
        return self.group if self.gloo else self.control

    def _own(self, backend: str, ranks: Sequence[int]) -> Any:
        """Connections of these ranks for this object alone: those that an optimizer has left which is closed on all of them, or new ones."""
        kind = (backend, tuple(ranks), self.timeout)
        key = next((key for key in self.free if key[1:] == kind and key in _LEFT), (f"{self.place}/{next(self.numbers)}", *kind))
        group = _LEFT.pop(key, None)
        if group is None:
            failure = self.presence.failure(self.place)
            if failure:  # of one that was here, and is gone: the others would wait for it in vain
                raise RuntimeError(f"not all ranks stayed where a ZeroOptimizer is made: {failure}")
            group = dist.new_group(list(ranks), self.timeout, backend, use_local_synchronization=True)
        self.owned[key] = group
        return group

    def twin(self) -> Group:
        """The same ranks over connections of their own, for another thread; a collective."""
        twin: Group = copy.copy(self)
        twin.count, twin.unheard, twin.owned = 0, 0, {}
        twin.row = twin._own(_backend_of(self.row), self.row_ranks)
        twin._connect(twin.row if self.shards == self.world else None)
        _GROUPS.add(twin)
        return twin

    def board(self) -> Board:
        """Make a board on which another thread hears what other ranks have to say in one piece of work, without connections of its own."""
        self.boards += 1
        return Board(self.presence, f"{self.place}/{self.boards}", self.ranks, self.timeout.total_seconds())

    def close(self) -> None:
        """Let go of the process groups, so that destroying them ends their threads; leave those on which nothing is in flight to later optimizers."""
        if not self.unheard:
            _LEFT.update(self.owned)
        self.owned = {}
        self.group = self.control = self.row = self.row_of_host = self.column = None

    def agree(self, rules: Mapping[str, object], failing: str = "train by different rules") -> None:
        """Compare what must be the same on all ranks; RuntimeError on all of them, naming the first difference, where it is not."""
        # (1 is 1.0)
        text = json.dumps({key: str(int(rule) if isinstance(rule, float) and rule.is_integer() else rule) for key, rule in sorted(rules.items())})
        mine = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "little")
        _, check = self._announce(RULES, -1, mine)
        if set(check()) == {mine}:
            return
        everyone = [json.loads(said) for said in self.exchange(text, "comparing options")]
        for key in dict.fromkeys(itertools.chain.from_iterable(everyone)):
            for rank, others in enumerate(everyone):
                if others.get(key) != everyone[0].get(key):
                    here, there = (said.get(key, "not there") for said in (everyone[0], others))
                    reason = f"the ranks {failing}: {key} is {here} on rank 0 and {there} on rank {rank}; it must be the same on all ranks"
                    raise RankError(reason, self.ranks)
        raise AssertionError(f"the same rules have other digests: {everyone}")

    def exchange(self, text: str, what: str, is_error: bool = False) -> list[str]:
        """The words of each rank, by rank. None at all costs an announcement; an error is heard by ranks that are elsewhere too.

        Args:
            text: this rank's words.
            what: the occasion, such as "saving runs/a". Its first word must be the same on all ranks: those that load and those that save do
                not take each other's words.
            is_error: of this rank.
        """
        data = text.encode()
        control = self._open_control()
        occasion = -2 - zlib.crc32(re.split(r"\W", what)[0].encode())
        with self._undivided():
            _, check = self._announce(TEXT, occasion, len(data) if is_error else -len(data), what)
            lengths = list(map(abs, check()))
            return self._say(data, lengths, control) if any(lengths) else [""] * self.world

    @contextlib.contextmanager
    def _undivided(self) -> Iterator[None]:
        """Context: what is announced inside is begun inside, Ctrl-C or not."""
        try:
            yield
        finally:
            interrupted, self.interrupted = self.interrupted, None
            if interrupted is not None:
                raise interrupted

    def _open_control(self) -> Any:
        """The connections of announcements. Whoever has them may go on with them while the process ends, and another thread closes the group."""
        if self.control is None:
            raise RuntimeError("the process groups of this optimizer are closed")
        return self.control

    def _say(self, data: bytes, lengths: Sequence[int], control: Any) -> list[str]:
        """Exchange texts of known lengths in bytes."""
        label = self._label(TEXT, -1)
        rows, work = self._tell(label, torch.frombuffer(bytearray(data.ljust(max(lengths))), dtype=torch.uint8), control)
        with self.guard(label):
            self.wait_for(work, is_promised=True)
        self.unheard -= 1
        return [row[:length].numpy().tobytes().decode() for row, length in zip(rows, lengths, strict=True)]

    def _tell(self, label: str, mine: Tensor, control: Any) -> tuple[Tensor, dist.Work]:
        """Start to exchange ``mine`` (n,) over the connections of announcements: what all ranks say (world, n), once the work has ended."""
        rows = mine.new_empty(self.world, len(mine))
        self.unheard += 1
        with self.guard(label):
            work = _all_gather(rows.view(-1), mine, control)
        return rows, work

    def fail(self, error: BaseException, rank: int | None = None) -> None:
        """Tell ranks that wait, or come to wait, for this one, which they may know as another ``rank``, why it will not come."""
        self.presence.fail(self.place, why(self.rank if rank is None else rank, error))

    def wait_for(self, work: dist.Work, is_promised: bool = False) -> None:
        """Wait for a collective in host memory; RuntimeError where it cannot end any more.

        ``is_promised``: others go on from it to something that they do with this rank, which a first Ctrl-C lets begin, if they are there.
        """
        begun = time.monotonic()
        tell, until = begun + TELL_S, math.inf
        while True:
            try:
                if self._has_ended(work):
                    return
                if time.monotonic() > tell:
                    tell += TELL_S
                    waited, at_most = time.monotonic() - begun, self.timeout.total_seconds()
                    who = self.presence.who_is_gone(self.ranks)
                    rank_log.warning("waiting for other ranks for %.0f s, at most %.0f s. %s", waited, at_most, who)
            except KeyboardInterrupt as error:
                if not is_promised:
                    raise
                until = time.monotonic() + (INTERRUPT_S if self.interrupted is None else 0)
                self.interrupted = error
            if self.interrupted is not None and time.monotonic() >= until:
                self.fail(self.interrupted)
                raise self.interrupted

    def _has_ended(self, work: dist.Work) -> bool:
        """Wait for a while; RuntimeError where it failed, or a rank has given up."""
        try:
            work.wait(timedelta(seconds=LOOK_S))
            return True
        except RuntimeError:
            if work.is_completed():
                work.wait()  # its own error; or it ended meanwhile
                return True
        failure = self.presence.failure(self.place)
        if failure:
            raise RuntimeError(failure)
        return False

    def _label(self, operation: int, unit: int, what: str = "") -> str:
        if what or not 0 <= operation < len(_VERBS):
            return what or "a collective that is not zk's"
        return _VERBS[operation] + (f" of unit {self.names[unit]!r}" if 0 <= unit < len(self.names) else "")

    @contextlib.contextmanager
    def guard(self, label: str) -> Iterator[None]:
        """Context for calls into torch.distributed: a failure is raised again with what was asked and by whom."""
        try:
            yield
        except RuntimeError as error:
            where = f"rank {self.rank} of {self.world} failed in collective {self.count} ({label})"
            reason = self.presence.failure(self.place)
            if reason:
                raise RuntimeError(f"{where}: {reason}") from error
            raise RuntimeError(f"{where}: {self.presence.who_is_gone(self.ranks)}{error}") from error

    def wait_for_all(self, label: str, works: Sequence[dist.Work], on_device: bool) -> None:
        """Wait for collectives that have been started: on a device the current stream does."""
        with self.guard(label):
            for work in works:
                if on_device:
                    work.wait()
                else:
                    self.wait_for(work)

    def _announce(self, operation: int, unit: int, value: int = 0, what: str = "") -> tuple[str, Callable[[], list[int]]]:
        """Tell the other ranks what comes next. Returns its label and a check that raises if any of them is about to do something else.

        The check returns every rank's ``value``.
        """
        control = self._open_control()
        self.count += 1
        label = self._label(operation, unit, what)
        number = self.count
        all_, work = self._tell(label, torch.tensor([operation, unit, number, value]), control)

        @functools.cache
        def check() -> list[int]:
            with phase("wait", f"other ranks: they announce {label}"), self.guard(label):
                self.wait_for(work, is_promised=self.gloo or operation == TEXT)
            self.unheard -= 1
            rows = all_.tolist()
            said = [max(row[3], 0) if row[0] == TEXT else 0 for row in rows]
            if self.gloo and any(said):  # a rank has left what it was in, and says why: whatever this one is in, it listens
                if operation == TEXT and value >= 0:
                    return said
                reasons = "; ".join(f"rank {rank} failed: {reason_of(text)}" for rank, text in enumerate(self._say(b"", said, control)) if text)
                raise RankError(f"{reasons} (this rank was in {label})", self.ranks)
            if any(row[:3] != rows[0][:3] for row in rows):
                # (on NCCL this is found later, and not by all ranks at one point)
                labels = [self._label(*row[:2]) for row in rows]
                if self.gloo:
                    labels = self._say(label.encode("ascii", "backslashreplace")[:_LABEL_NBYTES], [_LABEL_NBYTES] * self.world, control)
                rank = next(rank for rank, row in enumerate(rows) if row[:3] != [operation, unit, number])
                raise RankError(
                    f"ranks diverged at collective {number}: rank {self.rank} is in {label} while rank {rank} is in "
                    f"{labels[rank].rstrip()} (its number {rows[rank][2]}). Every rank must run the same modules in the same order: "
                    "look for a branch that depends on the rank's data, or for a call made on one rank only",
                    self.ranks,
                )
            return [row[3] for row in rows]

        if self.gloo:  # a mismatched collective ends the process inside gloo, so look before starting it
            check()
        return label, check

    def _launch(
        self,
        operation: int,
        unit: int,
        group: Any,
        start: Callable[[], Sequence[dist.Work]],
        finish: Callable[[], object] | None = None,
    ) -> Awaited:
        """Announce a collective, and start it in ``group``. ``finish`` is the arithmetic after it."""
        with self._undivided():
            label, check = self._announce(operation, unit)
            self.unheard += 1
            with self.guard(label):
                works = start()

            def done() -> None:
                check()
                if finish is not None:
                    with phase("reduce", label.removeprefix("reduce of ")):
                        finish()
                self.unheard -= 1

            pending = _Works(self, label, works, done, on_device=_backend_of(group) != "gloo")
            if not self.overlap:
                pending.wait()
            return pending

    def all_gather(self, unit: int, full: Tensor, shard: Tensor) -> Awaited:
        """Collect every rank's ``shard`` (shard_numel,) into ``full`` (shards * shard_numel,). ``shard`` may be a view of ``full``.

        Host memory goes over gloo, whatever carries the device's.
        """
        group = self.row if full.device.type != "cpu" else self.row_of_host
        return self._launch(GATHER, unit, group, lambda: _gather(full, shard, group))

    def reduce_scatter(self, unit: int, bucket: Tensor, shard: Tensor, stats: Tensor | None = None) -> Awaited:
        """The mean over ranks of ``bucket`` (shards * shard_numel,), this rank's slice of it to ``shard`` (shard_numel,).

        Summed in fp32 in the order of ranks and rounded once, whatever carries it, if it is to be exact. ``stats`` as for ``zk.kernels.reduce``.
        """
        # what each rank has for this one; or their mean, as NCCL takes it
        rows = bucket.new_empty(self.shards if self.exact else 1, shard.numel())
        reduce = unchecked("reduce", shard.device)

        def start() -> list[dist.Work]:
            return [_exchange(rows, bucket, self.row) if self.exact else _reduce_scatter(rows[0], bucket, self.row)]

        def finish() -> None:
            if self.column is None:
                reduce(rows, shard, stats)
                return
            mean = torch.empty_like(shard, dtype=torch.float32)
            reduce(rows, mean, None)
            whole = self._mean_of_replicas(self._label(REDUCE, unit), mean, shard.dtype)
            reduce(whole[None], shard, stats)

        return self._launch(REDUCE, unit, self.row, start, finish)

    def _mean_of_replicas(self, label: str, mine: Tensor, dtype: torch.dtype) -> Tensor:
        """The mean over the column of each rank's ``mine`` (n,) fp32, in ``dtype``: each has a part of it to sum, and gathers the others'."""
        replicas = dist.get_world_size(self.column)
        part = math.ceil(mine.numel() / replicas)
        padded, rows = mine.new_zeros(replicas * part), mine.new_empty(replicas, part)
        padded[: mine.numel()] = mine
        self.wait_for_all(label, [_exchange(rows, padded, self.column)], on_device=not self.gloo)
        whole = torch.empty(replicas * part, dtype=dtype, device=mine.device)
        summed = torch.empty(part, dtype=dtype, device=mine.device)
        unchecked("reduce", mine.device)(rows, summed, None)
        self.wait_for_all(label, _gather(whole, summed, self.column), on_device=not self.gloo)
        return whole[: mine.numel()]

    def broadcast(self, unit: int, tensor: Tensor, operation: int = BROADCAST) -> None:
        """Overwrite ``tensor`` (contiguous) on every rank with the first rank's. Host memory goes over gloo, as in ``all_gather``."""
        group = self.group if tensor.device.type != "cpu" else self._of_host
        as_bytes = tensor.view(-1).view(torch.uint8)  # neither gloo nor NCCL knows all dtypes
        pending = self._launch(operation, unit, group, lambda: [dist.broadcast(as_bytes, self.ranks[0], group=group, async_op=True)])
        pending.wait()

    def all_reduce(self, tensor: Tensor, operation: int = NORM, unit: int | None = None) -> None:
        """Sum ``tensor`` (host memory) over ranks, in place; of a size that follows from the ``unit`` that it is about, if there is one."""
        about = -tensor.numel() if unit is None else unit  # another size would end the process inside gloo
        pending = self._launch(operation, about, self._of_host, lambda: [dist.all_reduce(tensor, group=self._of_host, async_op=True)])
        pending.wait()


def _all_gather(full: Tensor, shard: Tensor, group: dist.ProcessGroup) -> dist.Work:
    call = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # torch 2.11 has the second only
    return call(full, shard, group=group, async_op=True)  # type: ignore[no-any-return]


def _backend_of(group: dist.ProcessGroup | None) -> str:
    """The name of what carries a group; where torch was not told, as for the default group of a mesh, what it takes for the device."""
    name: str = dist.get_backend(group)
    return ("nccl" if torch.cuda.is_available() else "gloo") if name == "undefined" else name


def _gather(full: Tensor, shard: Tensor, group: dist.ProcessGroup) -> list[dist.Work]:
    """Start to collect every rank's ``shard`` into ``full``."""
    if _backend_of(group) != "gloo":
        return [_all_gather(full.view(torch.uint8), shard.view(torch.uint8), group)]
    parts, ranks = full.chunk(dist.get_world_size(group)), dist.get_process_group_ranks(group)
    mine = parts[dist.get_rank(group)]
    if mine.data_ptr() != shard.data_ptr():
        mine.copy_(shard)
    return [dist.broadcast(part.view(torch.uint8), rank, group=group, async_op=True) for part, rank in zip(parts, ranks, strict=True)]


def _exchange(rows: Tensor, bucket: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Start to send each rank its part of ``bucket``; ``rows`` are what they have for this one."""
    sent = rows.view(-1).view(torch.uint8), bucket.view(torch.uint8)
    return dist.all_to_all_single(*sent, group=group, async_op=True)  # type: ignore[no-any-return]


def _reduce_scatter(shard: Tensor, bucket: Tensor, group: dist.ProcessGroup) -> dist.Work:
    call = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
    return call(shard, bucket, op=dist.ReduceOp.AVG, group=group, async_op=True)  # type: ignore[no-any-return]


_GROUPS: weakref.WeakSet[Group] = weakref.WeakSet()

# Process groups left by closed optimizers, by where they were made (the same on all of their ranks), backend, ranks and timeout; torch keeps them
# while its world lasts. A gloo group has a thread that wakes 100 times a second, so later optimizers take them. To destroy one is no way out:
# torch names a group by its ranks, and a rank that has not destroyed the last one would meet at another name.
_LEFT: weakref.WeakValueDictionary[tuple[str, str, tuple[int, ...], timedelta], Any] = weakref.WeakValueDictionary()

_TRIED: Counter[tuple[int, ...]] = Counter()  # how often the same ranks have begun to make an optimizer


def _next_place(ranks: Sequence[int]) -> str:
    """Name where these ranks meet to make an optimizer: the same on all of them, and another one each time."""
    _TRIED[tuple(ranks)] += 1
    return f"{hashlib.sha256(repr(list(ranks)).encode()).hexdigest()[:16]}/{_TRIED[tuple(ranks)]}"


# ---- errors of one rank ---------------------------------------------------------------------------------------------------------


_KINDS: dict[str, type[Exception]] = {"OSError": OSError}
_Kind = TypeVar("_Kind", bound=type[Exception])


def raised_by_all(kind: _Kind) -> _Kind:
    """Have ranks that hear of such an error raise one of the same kind; of others they raise a RuntimeError."""
    _KINDS[kind.__name__] = kind
    return kind


@contextlib.contextmanager
def together(comm: Comm | Board, what: str) -> Iterator[None]:
    """Fail on all ranks, by name, where one of them does: on the others with an error of its kind (``raised_by_all``), or a RuntimeError."""
    failure: BaseException | None = None
    try:
        yield
    except BaseException as error:  # also Ctrl-C
        if _is_known(error, comm):
            raise
        failure = error
    kind = next((name for name, kind in _KINDS.items() if isinstance(failure, kind)), type(failure).__name__)
    try:
        said = comm.exchange(json.dumps([kind, str(failure)]) if failure is not None else "", what, is_error=failure is not None)
    except RuntimeError as error:
        failure = failure or RuntimeError(f"{what}: {error}")
        raise (_mark_known(failure, comm) if _is_known(error, comm) else failure) from error
    failed = {rank: json.loads(words) for rank, words in enumerate(said) if words}
    if failed and failure is None:
        kinds = {kind for kind, _ in failed.values()}
        reasons = "; ".join(f"on rank {rank}: {reason if kind in _KINDS else f'{kind}: {reason}'}" for rank, (kind, reason) in failed.items())
        failure = _KINDS.get(kinds.pop() if len(kinds) == 1 else "", RuntimeError)(f"{what} has failed elsewhere, {reasons}")
    if failure is not None:
        raise _mark_known(failure, comm)


@contextlib.contextmanager
def telling(comm: Comm, what: str, fail: Callable[[BaseException], None] | None = None) -> Iterator[None]:
    """Tell other ranks, wherever they are, what goes wrong on this one; ``together`` without an exchange where nothing does.

    ``fail`` tells ranks that would not hear an exchange, as they may wait over other connections; it is the last that they do with this one.
    """
    try:
        yield
    except Exception as error:
        if fail is None:
            tell(comm, what, error)
        elif not _is_known(error, comm):
            fail(error)
        raise
    except BaseException as error:  # Ctrl-C: this rank goes, and waits for nobody
        (fail or comm.fail)(error)
        raise


def tell(comm: Comm | Board, what: str, error: BaseException) -> None:
    """Tell other ranks, which are elsewhere, of an error; whoever waits for this one's part hears it."""
    with contextlib.suppress(type(error), RuntimeError), together(comm, what):
        raise error


def _is_known(error: BaseException, comm: Comm | Board) -> bool:
    """Check whether all who speak over ``comm`` have heard of the error. One error may end a save and a step, which speak apart."""
    if isinstance(error, RankError) and isinstance(comm, Comm) and error.ranks.issuperset(comm.ranks):
        return True
    return comm in getattr(error, "known_to", ())


def _mark_known(error: Any, comm: Comm | Board) -> BaseException:
    """Note that all have heard of it, so that nobody exchanges it again further out."""
    error.known_to = weakref.WeakSet([*getattr(error, "known_to", ()), comm])
    return error  # type: ignore[no-any-return]


def reason_of(words: str) -> str:
    """The error that ``together`` has a rank tell, for people."""
    kind, reason = json.loads(words)
    return f"{kind}: {reason}"


@contextlib.contextmanager
def giving_up(process_group: Ranks) -> Iterator[None]:
    """Tell ranks that come to ``connect``, where this fails, that this one will not; they must have met before."""
    try:
        yield
    except BaseException as error:
        if _are_connected() and isinstance(process_group, (dist.ProcessGroup, DeviceMesh, type(None))):
            ranks = ranks_of(process_group)
            fail(dist.distributed_c10d._get_default_store(), _next_place(ranks), why(ranks.index(dist.get_rank()), error))
        raise


def _leave(process: int) -> None:
    """At exit: end gloo's threads while Python can still take back the tensors they hold; later, that ends the process with SIGABRT."""
    if process != os.getpid():  # forked, without these threads
        return
    for group in _GROUPS:
        group.close()
    # after an error peers may be waiting in a collective, and ending the threads would wait for them
    if dist.is_initialized() and not hasattr(sys, "last_type"):
        dist.destroy_process_group()


def _meeting_place() -> dict[str, Any]:
    """The place where ranks meet: torch's own choice, but for torchrun's store, which outlives restarts.

    With ``--master-port``, that has the addresses of ranks of earlier attempts still, and torch 2.13 would take them for today's.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return {}
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    make: Any = dist.TCPStore  # type: ignore[attr-defined]
    store = make(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), world, is_master=False, timeout=timedelta(minutes=10))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return {"store": dist.distributed_c10d.PrefixStore(f"zk/attempt/{attempt}", store), "rank": rank, "world_size": world}


def ranks_of(group: Ranks, option: str = "process_group") -> list[int]:
    """The ranks of a group, in order; TypeError, which names the option, for anything else."""
    if isinstance(group, DeviceMesh):
        return group.mesh.flatten().tolist()  # type: ignore[no-any-return]
    if not isinstance(group, (dist.ProcessGroup, type(None))) and group != dist.GroupMember.NON_GROUP_MEMBER:
        raise TypeError(f"{option} must be a group, as torch.distributed.new_group() makes it, a DeviceMesh or None; got {group!r}")
    return dist.get_process_group_ranks(group or dist.distributed_c10d._get_default_group())


def _dimensions(mesh: DeviceMesh) -> tuple[dist.ProcessGroup, list[int] | None, dist.ProcessGroup | None]:
    """The arguments of Group for a mesh: group, ranks, column."""
    sizes = tuple(mesh.mesh.shape)
    if len(sizes) not in (1, 2):
        raise ValueError(
            f"process_group is a mesh of {len(sizes)} dimensions; give one (ranks that partition the states), or two (replicas, and the ranks of "
            "each that partition them), such as mesh['replicate', 'shard']"
        )
    if len(sizes) == 1 or sizes[0] == 1:
        return mesh.get_group(len(sizes) - 1), None, None
    if sizes[1] == 1:
        raise ValueError(
            f"process_group is a mesh of {sizes[0]} replicas of one rank each, and no state would be partitioned; give its first dimension alone, "
            "with stage=0, or another mesh"
        )
    return mesh.get_group(1), ranks_of(mesh), mesh.get_group(0)


def _are_connected() -> bool:
    return dist.is_available() and dist.is_initialized()


def world_to_join(process_group: Ranks) -> int:
    """How many ranks ``connect`` would find."""
    if process_group is not None or _are_connected():
        return len(ranks_of(process_group))
    return int(os.environ.get("WORLD_SIZE", "1"))


def connect(process_group: Ranks, overlap: bool, device: torch.device, exact: bool = True) -> Comm:
    """The ranks to train with: the group given, the default group, one made from torchrun's environment, or this process alone."""
    if process_group is None and not _are_connected():
        if not dist.is_available() or world_to_join(None) < 2:
            return Comm()
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timedelta(minutes=10), **_meeting_place())
    ranks = ranks_of(process_group)
    if dist.get_rank() not in ranks:
        raise ValueError(f"this rank, {dist.get_rank()}, is not in process_group, which has ranks {ranks}; give each rank the group that it is in")
    if len(ranks) == 1:
        return Comm()
    group, others, column = _dimensions(process_group) if isinstance(process_group, DeviceMesh) else (process_group, None, None)
    if not exact and _backend_of(group) == "gloo":  # (before ranks make a group, which one that leaves would disturb)
        raise ValueError(
            "exact_reduce=False leaves the reduction of gradients to NCCL, and these ranks are connected by gloo, where the exact one is the "
            "faster one; remove it"
        )
    return Group(group, overlap, exact, others, column)
