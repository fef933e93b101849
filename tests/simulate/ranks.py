"""In: collectives and the store of pretended ranks. Out: the same between threads of one process, late, and with the ends that ranks can have.

A collective moves its bytes once all ranks have started it, some time before the first of them hears of that; what it will write is NaN until
then. With a rank that has ended, it fails as gloo's do; with one that says nothing, after the group's timeout. Two ranks that start different
collectives at the same place end the run: gloo would end the process.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.simulate.scheduler import Process, Simulation, poison


class ProcessGroup:
    """The ranks of a group, and what each has started in it."""

    def __init__(self, world: World, ranks: Sequence[int], timeout: timedelta) -> None:
        self.world, self.ranks, self.timeout = world, list(ranks), timeout
        self.started: dict[int, int] = dict.fromkeys(ranks, 0)
        self.meetings: list[_Meeting] = []
        self.broken = ""

    def _get_backend(self, device: Any) -> Any:
        return SimpleNamespace(options=SimpleNamespace(_timeout=self.timeout))


@dataclasses.dataclass(slots=True)
class _Meeting:
    """One collective, of all ranks that have come to it."""

    what: tuple[Any, ...]
    move: Callable[[dict[int, tuple[Tensor | None, Tensor | None]]], None]
    there: dict[int, tuple[Tensor | None, Tensor | None]]  # rank -> input and output
    moved: bool = False


class Work:
    """One rank's part in a collective."""

    def __init__(self, group: ProcessGroup, meeting: _Meeting, label: str) -> None:
        self.group, self.meeting, self.label = group, meeting, label
        self.simulation = group.world.simulation
        self.until = self.simulation.now + group.timeout.total_seconds()
        self.done, self.error = False, ""
        self.simulation.act(f"{label} is heard of", self._can_end, self._end)

    def _failure(self) -> str:
        missing = [rank for rank in self.group.ranks if rank not in self.meeting.there]
        gone = [rank for rank in missing if not self.group.world.processes[rank].alive]
        if self.group.broken:
            return self.group.broken
        if gone and not self.meeting.moved:
            return f"[gloo] Connection closed by peer [127.0.0.1]:{20000 + gone[0]}"
        if self.simulation.now > self.until and not self.meeting.moved:
            return f"[gloo] Timed out waiting {self.group.timeout.total_seconds() * 1e3:.0f}ms for recv operation to complete"
        return ""

    def _can_end(self) -> bool:
        return self.meeting.moved or bool(self._failure())

    def _end(self) -> None:
        self.error = "" if self.meeting.moved else self._failure()
        if self.error and "Timed out" in self.error:
            self.group.broken = self.error
        self.done = True

    def is_completed(self) -> bool:
        return self.done

    def wait(self, timeout: timedelta | None = None) -> bool:
        seconds = max(0.0, self.until - self.simulation.now) + 1 if timeout is None else timeout.total_seconds()
        self.simulation.maybe(self.label)
        if not self.done and not self.simulation.pause(self.label, lambda: self.done, seconds):
            raise RuntimeError(f"[gloo] Timed out waiting {seconds * 1e3:.0f}ms for {self.label}")
        if self.error:
            raise RuntimeError(self.error)
        return True


class Store:
    """The key-value store that ranks have met over, kept by one process."""

    def __init__(self, world: World, keeper: Process, kept: dict[str, Any] | None = None) -> None:
        self.world, self.keeper, self.kept = world, keeper, {} if kept is None else kept

    def clone(self) -> Store:
        return Store(self.world, self.keeper, self.kept)

    def _ask(self, what: str) -> None:
        simulation = self.world.simulation
        simulation.maybe(f"the store: {what}")
        if simulation.now < self.keeper.frozen_until and simulation.current.process is not self.keeper:
            simulation.pause(f"the store: {what}", lambda: simulation.now >= self.keeper.frozen_until or not self.keeper.alive, 300.0)
        if not self.keeper.alive:
            raise RuntimeError("recv failed: Connection reset by peer")

    def set(self, key: str, value: str) -> None:
        self._ask("set")
        self.kept[key] = value.encode()

    def get(self, key: str) -> bytes:
        self._ask("get")
        if key not in self.kept:
            raise RuntimeError(f"wait timeout: nobody has set {key}")
        found: bytes = self.kept[key]
        return found

    def check(self, keys: Sequence[str]) -> bool:
        self._ask("check")
        return all(key in self.kept for key in keys)

    def add(self, key: str, value: int) -> int:
        self._ask("add")
        self.kept[key] = str(int(self.kept.get(key, b"0")) + value).encode()
        return int(self.kept[key])

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        self._ask("compare_set")
        if self.kept.get(key, b"").decode() == expected:
            self.kept[key] = value.encode()
        found: bytes = self.kept[key]
        return found

    def delete_key(self, key: str) -> bool:
        self._ask("delete_key")
        return self.kept.pop(key, None) is not None


class World:
    """The ranks of one attempt.

    Args:
        processes: by rank.
        timeout_s: of all groups, in virtual seconds.
        keeper: the process that keeps the store.
    """

    def __init__(self, simulation: Simulation, processes: Sequence[Process], timeout_s: float, keeper: Process) -> None:
        self.simulation, self.processes = simulation, processes
        self.timeout = timedelta(seconds=timeout_s)
        self.default = ProcessGroup(self, range(len(processes)), self.timeout)
        self.store = Store(self, keeper)
        self.groups: dict[tuple[int, ...], list[ProcessGroup]] = {}
        self.made: dict[tuple[int, tuple[int, ...]], int] = {}

    @property
    def rank(self) -> int:
        """Rank of the process that runs now."""
        return self.processes.index(self.simulation.current.process)

    def leave(self, process: Process) -> None:
        """Keep what a process that ends has sent as it is now: its memory is nobody's from here on."""
        rank = self.processes.index(process)
        for group in (self.default, *(group for groups in self.groups.values() for group in groups)):
            for meeting in group.meetings:
                if not meeting.moved and rank in meeting.there:
                    given, target = meeting.there[rank]
                    meeting.there[rank] = (None if given is None else given.clone(), None if target is None else target.clone())

    def new_group(self, ranks: Sequence[int], timeout: timedelta, backend: str, use_local_synchronization: bool = False) -> ProcessGroup:
        """The next group of these ranks; returns when all of them are there."""
        key = tuple(ranks)
        number = self.made[self.rank, key] = self.made.get((self.rank, key), 0) + 1
        groups = self.groups.setdefault(key, [])
        if len(groups) < number:
            groups.append(ProcessGroup(self, ranks, timeout))
        group = groups[number - 1]
        work = self._start(group, "the making of a group", ("group", number), None, None, lambda there: None)
        work.wait()
        return group

    def _start(
        self,
        group: ProcessGroup,
        name: str,
        what: tuple[Any, ...],
        given: Tensor | None,
        target: Tensor | None,
        move: Callable[[dict[int, tuple[Tensor | None, Tensor | None]]], None],
    ) -> Work:
        rank = self.rank
        self.simulation.maybe(f"to start {name}")
        number = group.started[rank]
        group.started[rank] += 1
        if number == len(group.meetings):
            meeting = _Meeting((name, *what), move, {})
            group.meetings.append(meeting)
            # whoever has come and ended meanwhile has sent its part, and takes none
            self.simulation.act(f"{name} moves", lambda: len(meeting.there) == len(group.ranks) and not group.broken, lambda: self._move(meeting))
        meeting = group.meetings[number]
        if meeting.what != (name, *what):
            other = f"rank {min(meeting.there)} has started {meeting.what}"
            self.simulation.found.append(f"gloo would end the process: collective {number} of rank {rank} is {(name, *what)} where {other}")
            group.broken = "[gloo] ranks have sent each other something else than was waited for"
        if target is not None and (given is None or target.data_ptr() != given.data_ptr()):
            poison(target)
        meeting.there[rank] = (given, target)
        return Work(group, meeting, f"{name} {number}")

    def _move(self, meeting: _Meeting) -> None:
        with torch.no_grad():
            meeting.move(meeting.there)
        meeting.moved = True

    # ---- what zk calls of torch.distributed ------------------------------------------------------------------------------------

    def broadcast(self, tensor: Tensor, src: int, group: Any = None, async_op: bool = False) -> Work:
        def move(there: dict[int, tuple[Tensor | None, Tensor | None]]) -> None:
            source = there[src][0]
            assert source is not None
            for rank, (_, target) in there.items():
                if rank != src and target is not None:
                    target.copy_(source)

        mine = self.rank == src
        return self._start(
            group or self.default,
            "broadcast",
            (src, tensor.numel(), str(tensor.dtype)),
            tensor if mine else None,
            None if mine else tensor,
            move,
        )

    def all_gather_into_tensor(self, full: Tensor, shard: Tensor, group: Any = None, async_op: bool = False) -> Work:
        group = group or self.default

        def move(there: dict[int, tuple[Tensor | None, Tensor | None]]) -> None:
            shards = [there[rank][0].clone() for rank in group.ranks]  # type: ignore[union-attr]
            for _, target in there.values():
                assert target is not None
                target.view(-1).copy_(torch.cat([each.view(-1) for each in shards]))

        return self._start(group, "all_gather", (shard.numel(), str(shard.dtype)), shard, full, move)

    def all_to_all_single(self, received: Tensor, sent: Tensor, group: Any = None, async_op: bool = False) -> Work:
        group = group or self.default

        def move(there: dict[int, tuple[Tensor | None, Tensor | None]]) -> None:
            parts = {rank: there[rank][0].chunk(len(group.ranks)) for rank in group.ranks}  # type: ignore[union-attr]
            for place, rank in enumerate(group.ranks):
                target = there[rank][1]
                assert target is not None
                target.copy_(torch.cat([parts[other][place] for other in group.ranks]))

        return self._start(group, "all_to_all", (sent.numel(), str(sent.dtype)), sent, received, move)

    def all_reduce(self, tensor: Tensor, group: Any = None, async_op: bool = False) -> Work:
        group = group or self.default

        def move(there: dict[int, tuple[Tensor | None, Tensor | None]]) -> None:
            total = there[group.ranks[0]][0].clone()  # type: ignore[union-attr]
            for rank in group.ranks[1:]:
                total += there[rank][0]
            for _, target in there.values():
                assert target is not None
                target.copy_(total)

        return self._start(group, "all_reduce", (tensor.numel(), str(tensor.dtype)), tensor, tensor, move)


def distributed(world: Callable[[], World | None]) -> Any:
    """A twin of the module torch.distributed, for the ranks of ``world()``; None is a process alone."""

    def here() -> World:
        found = world()
        assert found is not None
        return found

    def start(name: str) -> Callable[..., Work]:
        return lambda *args, **kwargs: getattr(here(), name)(*args, **kwargs)

    names = ("broadcast", "all_gather_into_tensor", "all_to_all_single", "all_reduce", "new_group")
    twin = SimpleNamespace(
        ProcessGroup=ProcessGroup,
        Work=Work,
        is_available=lambda: True,
        is_initialized=lambda: world() is not None,
        get_rank=lambda group=None: (group or here().default).ranks.index(here().rank),
        get_world_size=lambda group=None: len((group or here().default).ranks),
        get_backend=lambda group=None: "gloo",
        get_process_group_ranks=lambda group: group.ranks,
        destroy_process_group=lambda: None,
        distributed_c10d=SimpleNamespace(_get_default_group=lambda: here().default, _get_default_store=lambda: here().store),
        **{name: start(name) for name in names},
    )
    return twin
