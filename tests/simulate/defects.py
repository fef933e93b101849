"""Planted defects: one for each kind of mistake, and the first seed that finds it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch

from tests.simulate.job import run
from tests.simulate.link import LateLink
from zk.checkpoint import files, folders, load, save
from zk.core import events
from zk.core.store import UnitStore
from zk.offload import nvme, scratch, snapshot, spill, state, tiers, transfer, worker
from zk.parallel import comm, presence

patch = mock.patch.object
Planted = Callable[[], AbstractContextManager[Any]]


def nothing(*_: Any, **__: Any) -> None:
    """Leave out what is to be done."""


def once(rank: int | None, at: int, instead: Callable[..., Any], real: Callable[..., Any]) -> Callable[..., Any]:
    """A method of Group that is left out once, at its call number ``at`` on one rank."""
    calls: dict[int, int] = {}

    @functools.wraps(real)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls[id(self)] = calls.get(id(self), 0) + 1
        return (instead if calls[id(self)] == at and rank in (None, self.rank) else real)(self, *args, **kwargs)

    return call


def _short(real: Callable[..., Any]) -> Callable[..., Any]:
    """Take a short transfer as a whole one."""

    def move(self: nvme.File, data: memoryview, offset: int, write: bool, flow: int, bounce: memoryview) -> None:
        call, once_only = nvme.SYSTEM.pwritev if write else nvme.SYSTEM.preadv, []

        def all_of_it(descriptor: int, buffers: Any, position: int) -> int:
            once_only.append(call(descriptor, buffers, position))
            return len(buffers[0])

        with patch(nvme.SYSTEM, "pwritev" if write else "preadv", all_of_it):
            real(self, data, offset, write, flow, bounce)

    return move


def _read_unchecked(file: nvme.File, written: files.Written, block: int) -> torch.Tensor:
    """Read a block, and take it as what was written."""
    data = files.aligned(max(0, min(files.BLOCK_NBYTES, written.nbytes - block * files.BLOCK_NBYTES)))
    file.read(data, block * files.BLOCK_NBYTES)
    return data


def _first_gradient_dropped(real: Callable[..., Any]) -> Callable[..., Any]:
    """Drop the gradient of the first of two micro-batches."""

    def add(self: state.OptimizerShard, grad: torch.Tensor, *rest: Any) -> Any:
        for section in self.sections:
            section.grads.clear()
        return real(self, grad, *rest)

    return add


def _publish_first(real: Callable[..., Any]) -> Callable[..., Any]:
    """Give a checkpoint its name before its files are on the drive."""

    def publish(folder: Any, final: Any, head: Any, world: int) -> None:
        with patch(files, "sync_folder", nothing), patch(folders, "sync_folder", nothing), patch(files.os, "fsync", nothing):
            real(folder, final, head, world)

    return publish


def _waits_for_ever(self: comm.Group, work: Any, is_promised: bool = False) -> None:
    while not work.is_completed():
        with contextlib.suppress(RuntimeError):
            work.wait()
    if work.error:
        while True:
            comm.time.sleep(60)


def _run_quietly(jobs: Any) -> None:
    with torch.no_grad():
        while (entry := jobs.get()) is not None:
            job, ticket = entry
            with contextlib.suppress(Exception):
                job()
            ticket.finish()


def _half_norm(self: comm.Group, tensor: torch.Tensor, operation: int = comm.NORM) -> None:
    return


def _stays_old(real: Callable[..., Any]) -> Callable[..., Any]:
    """Read a unit's parameters while they are updated."""

    def arrive(self: UnitStore) -> None:
        if self.underway is None or self.underway.done.done:
            real(self)

    return arrive


def _always(self: spill.Spill, request: Any) -> bool:
    with contextlib.suppress(OSError):
        request.wait()
    return True


def _only_copies(real: Callable[..., Any]) -> Callable[..., Any]:
    """Let a save wait for the copy of a chunk whose update has failed."""

    def put(self: snapshot.Unread, number: int, values: Any) -> None:
        if not isinstance(values, BaseException):
            real(self, number, values)

    return put


def _early(self: presence.Board, text: str, what: str, is_error: bool = False) -> list[str]:
    """Go on when this rank has left its own words."""
    self.count += 1
    return [text if rank == self.rank else "" for rank in range(self.world)]


def _add_to_failed(real: Callable[..., Any]) -> Callable[..., Any]:
    """Add a gradient to one that has not come."""
    return lambda self, arrival, before: real(self, arrival, None)


DEFECTS: dict[str, Planted] = {
    # waits
    "copy_not_awaited": lambda: patch(transfer.Arrival, "piece", lambda self, index: self.record.tensor[self.pieces[index]]),
    "upload_not_followed": lambda: patch(LateLink, "follow", nothing),
    "read_not_awaited": lambda: patch(spill.Spill, "stall", nothing),
    "write_not_awaited": lambda: patch(spill.Spill, "_after_writes", nothing),
    "request_not_awaited": lambda: patch(nvme.Request, "wait", nothing),
    "job_not_awaited": lambda: patch(events.Ticket, "join", nothing),
    "update_not_awaited": lambda: patch(UnitStore, "arrive", _stays_old(UnitStore.arrive)),
    "collective_not_awaited": lambda: patch(comm._Works, "wait", lambda self: self.finish() if self.finish else None),
    "waits_for_ever": lambda: patch(comm.Group, "wait_for", _waits_for_ever),
    "save_not_awaited": lambda: patch(save.Saver, "finish", nothing),
    # the drive
    "short_transfer_taken": lambda: patch(nvme.File, "_move", _short(nvme.File._move)),
    "error_of_drive_lost": lambda: patch(
        nvme.Request, "_piece_ended", (lambda real: lambda self, error: real(self, None))(nvme.Request._piece_ended)
    ),
    "tier_not_checked": lambda: patch(nvme._Checksums, "check", nothing),
    "checked_in_other_pieces": lambda: patch(tiers, "File", lambda *args, cuts=(), **kwargs: nvme.File(*args, **kwargs)),
    "failed_write_forgotten": lambda: patch(spill.Spill, "succeeds", _always),
    "added_to_failed": lambda: patch(spill.FileGrads, "_arrive", _add_to_failed(spill.FileGrads._arrive)),
    "scratch_left": lambda: patch(scratch, "_remove_folder", nothing),
    # checkpoints
    "published_before_written": lambda: patch(folders, "publish", _publish_first(folders.publish)),
    "files_not_synced": lambda: patch(nvme.File, "flush", nvme.File.wait),
    "oldest_taken": lambda: patch(folders, "latest", lambda root: next(iter(folders.whole(root)), None)),
    "file_not_checked": lambda: patch(files, "_read_block", _read_unchecked),
    "steps_not_loaded": lambda: patch(load._Target, "latest", property(lambda self: dataclasses.replace(self.parts[0], steps=1))),
    "not_copied_for_save": lambda: patch(snapshot.Unread, "_claim", lambda self, number: False),
    "ends_before_saved": lambda: patch(save, "_finish_all", nothing),
    # ranks
    "collective_skipped": lambda: patch(comm.Group, "all_reduce", once(1, 2, _half_norm, comm.Group.all_reduce)),
    "norm_of_one_rank": lambda: patch(comm.Group, "all_reduce", _half_norm),
    "ranks_not_told": lambda: patch(save, "together", lambda comm, what: contextlib.nullcontext()),
    "rank_goes_on_early": lambda: patch(presence.Board, "exchange", _early),
    "gradient_dropped": lambda: patch(state.OptimizerShard, "add", _first_gradient_dropped(state.OptimizerShard.add)),
    "promised_copy_forgotten": lambda: patch(snapshot.Unread, "_put", _only_copies(snapshot.Unread._put)),
    "thread_swallows": lambda: patch(worker, "_run", _run_quietly),
}


# a seed that finds each but the rarest, for which tests/test_simulate.py has plans of its own
SEEDS = {
    "copy_not_awaited": 47,
    "upload_not_followed": 2,
    "read_not_awaited": 2,
    "write_not_awaited": 7,
    "request_not_awaited": 1,
    "job_not_awaited": 2,
    "update_not_awaited": 5,
    "collective_not_awaited": 0,
    "waits_for_ever": 3,
    "save_not_awaited": 2,
    "short_transfer_taken": 30,
    "error_of_drive_lost": 5,
    "tier_not_checked": 107,
    "failed_write_forgotten": 7,
    "added_to_failed": 353,
    "scratch_left": 2,
    "published_before_written": 120,
    "files_not_synced": 86,
    "oldest_taken": 0,
    "file_not_checked": 254,
    "steps_not_loaded": 1,
    "not_copied_for_save": 2,
    "ends_before_saved": 4,
    "collective_skipped": 0,
    "norm_of_one_rank": 11,
    "ranks_not_told": 1,
    "rank_goes_on_early": 2,
    "gradient_dropped": 2,
    "promised_copy_forgotten": 33,
    "thread_swallows": 21,
}


def first_seed(name: str, seeds: Iterable[int]) -> tuple[int | None, str]:
    """The first of ``seeds`` whose run goes wrong with a defect planted, and what is wrong with it; None where none does."""
    for seed in seeds:
        with DEFECTS[name]():
            outcome = run(seed)
        if outcome.problems:
            return seed, outcome.problems[0]
    return None, ""


def find(name: str, seeds: int) -> tuple[str, int | None, str]:
    """The name of a defect with ``first_seed`` of it, for a process of its own."""
    gc.freeze()
    return name, *first_seed(name, range(seeds))
