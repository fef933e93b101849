"""Ranks that wait for each other: each wait ends, says who is missing and why, and what differs between ranks is refused by name on all of them."""

from __future__ import annotations

import ctypes
import gc
import os
import re
import signal
import textwrap
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import zk
from tests.models import GPT, batch, loss_of
from tests.programs import Program, rank_of
from tests.world import free_port, run_world
from zk.parallel import comm
from zk.parallel.presence import Presence

TIMEOUT_S = 3.0  # of the process groups here


def adamw(model: torch.nn.Module, lr: float = 1e-2) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=lr)


def made(**options: Any) -> tuple[torch.nn.Module, zk.ZeroOptimizer]:
    torch.manual_seed(0)
    model = GPT()
    return model, zk.ZeroOptimizer(model, adamw(model), **{"stage": 2, "optimizer_tier": "host", **options})


def step(model: torch.nn.Module, optimizer: zk.ZeroOptimizer, seed: int = 0) -> None:
    optimizer.backward(loss_of(model, batch(seed)))
    optimizer.step()
    optimizer.zero_grad()


@pytest.fixture(scope="module")
def under_way(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[Any, Future[Any]]]:
    """What takes long because ranks wait, all at once: name -> its result, some time."""
    folders = [tmp_path_factory.mktemp("ranks") for _ in range(3)]
    with ThreadPoolExecutor(8) as pool:
        yield {
            gives_up: pool.submit(run_world, 2, gives_up, [None], 60),
            busy_elsewhere: pool.submit(run_world, 2, busy_elsewhere, [str(folders[2])], 30),
            **{waits: pool.submit(run_world, 2, waits, [None], TIMEOUT_S) for waits in (comes_late, never_comes, another_collective)},
            **{("stands still", victim): pool.submit(stands_still, victim, folders[victim]) for victim in (0, 1)},
        }


def error_of(call: Any, *arguments: Any, **options: Any) -> tuple[str, float]:
    """What ``call`` raises, and after how many seconds."""
    begun = time.monotonic()
    try:
        call(*arguments, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - begun
    return "", time.monotonic() - begun


# ---- a rank that does not come ---------------------------------------------------------------------------------------------------


def gives_up(_: None) -> list[tuple[str, float]]:
    """The second rank's optimizer is refused, twice, for what only that rank sees: before ranks meet there, and after."""
    rank = dist.get_rank()
    found = [error_of(made, units=["nothing of that name"] if rank else None)]
    model = GPT()
    if rank:
        model.extra = torch.nn.Parameter(torch.zeros(3, dtype=torch.int32), requires_grad=False)
    found.append(error_of(zk.ZeroOptimizer, model, adamw(model) if not rank else "not an optimizer", stage=2))
    step(*made())  # and the third try is as if there had been no other
    return found


def test_a_rank_hears_why_another_one_made_no_optimizer(under_way: dict[Any, Future[Any]]) -> None:
    (ours, theirs) = under_way[gives_up].result()[0]
    for (said, took), (reason, _) in zip(ours, theirs, strict=True):
        kind, _, text = reason.partition(": ")
        assert kind in ("ValueError", "TypeError") and f"rank 1 gave up: {kind}: {text[:60]}" in said and took < 10, (said, took, reason)


def busy_elsewhere(folder: str) -> tuple[str, str]:
    """The second rank does something that lets no thread of it run, where the first one meets it, and in a save in the background."""
    made()[1].close()
    gc.collect()  # and with it whatever showed signs of life
    rank = dist.get_rank()
    time.sleep(5 * rank)
    model, optimizer = made()
    step(model, optimizer)
    if rank:
        ctypes.PyDLL(None).sleep(5)  # with the interpreter's lock

    def save() -> None:
        optimizer.save_checkpoint(folder, async_save=True)
        optimizer.synchronize()

    said = error_of(save)[0]
    return said, (Path(folder) / "latest").read_text()


def test_a_rank_that_is_busy_is_waited_for(under_way: dict[Any, Future[Any]]) -> None:
    for said, latest in under_way[busy_elsewhere].result()[0]:
        assert (said, latest) == ("", "step-00000001\n")


def comes_late(_: None) -> list[str]:
    """The second rank comes when the first one has given up: both hear of it, and meet at the next try."""
    if dist.get_rank():
        time.sleep(TIMEOUT_S + 1)
    found = [error_of(made)[0]]
    dist.barrier()
    step(*made())
    return found


def test_ranks_that_missed_each_other_meet_at_the_next_try(under_way: dict[Any, Future[Any]]) -> None:
    ours, theirs = under_way[comes_late].result()[0]
    assert "rank 1 did not come" in ours[0] and "rank 0 gave up" in theirs[0], (ours, theirs)


def never_comes(_: None) -> tuple[str, float]:
    if dist.get_rank():
        time.sleep(TIMEOUT_S + 2)
        return "", 0.0
    return error_of(made)


def test_a_rank_that_never_comes_is_waited_for_as_long_as_the_group_says(under_way: dict[Any, Future[Any]]) -> None:
    said, took = under_way[never_comes].result()[0][0]
    assert "rank 1 did not come" in said and TIMEOUT_S <= took < 3 * TIMEOUT_S, (said, took)


def another_collective(_: None) -> tuple[str, float]:
    """The first rank is in a barrier of its own while the second one steps."""
    model, optimizer = made()
    step(model, optimizer)
    return error_of(dist.barrier) if dist.get_rank() == 0 else error_of(step, model, optimizer)


def test_a_barrier_of_the_users_does_not_meet_a_collective_of_ours(under_way: dict[Any, Future[Any]]) -> None:
    for said, took in under_way[another_collective].result()[0]:
        assert said.startswith(("RuntimeError", "DistBackendError")) and took < 2 * TIMEOUT_S + 5, (said, took)


# ---- ranks that differ -------------------------------------------------------------------------------------------------------------

DIFFERENCES = (
    ("group", "the second step", r"param_groups\[0\]\['lr'\] is 0\.01 on rank 0 and 0\.02 on rank 1"),
    ("group beside", "the second step", r"param_groups\[0\]\['lr'\] is 0\.01 on rank 0 and 0\.02 on rank 1"),
    ("clip", "making it", r"clip_grad_norm is 0\.5 on rank 0 and 1 on rank 1"),
    ("prefetch", "making it", r"prefetch is 1 on rank 0 and 2 on rank 1"),
    ("list", "making it", r"param_groups\[0\]\['betas'\] is \(0\.9, 0\.9\) on rank 0 and \(0\.8, 0\.9\) on rank 1"),
    ("numpy", "making it", r"param_groups\[0\]\['lr'\] is 0\.5 on rank 0 and 1\.5 on rank 1"),
    ("betas", "making it", r"param_groups\[0\]\['betas'\] is \(0\.9, 0\.999\) on rank 0 and \(0\.8, 0\.999\) on rank 1"),
)


def differs(what: str) -> tuple[str, str]:
    rank = dist.get_rank()
    options: dict[str, Any] = {"overlap_step": what == "group beside"}
    if what == "clip":
        options["clip_grad_norm"] = 0.5 + rank / 2
    if what == "prefetch":
        options |= {"stage": 3, "prefetch": 1 + rank}
    torch.manual_seed(0)
    model = GPT()
    plain = adamw(model)
    if what == "betas" and rank:
        plain.param_groups[0]["betas"] = (0.8, 0.999)
    if what == "list":
        plain.param_groups[0]["betas"] = [0.9 - rank / 10, 0.9]
    if what == "numpy":
        plain.param_groups[0]["lr"] = np.float32(0.5 + rank)
    found: list[zk.ZeroOptimizer] = []
    said, _ = error_of(lambda: found.append(zk.ZeroOptimizer(model, plain, **{"stage": 2, "optimizer_tier": "host", **options})))
    if said:
        return "making it", said
    step(model, found[0])
    found[0].param_groups[0]["lr"] *= 1 + rank
    before = [param.detach().clone() for param in model.parameters()]
    said, _ = error_of(step, model, found[0])
    assert all(map(torch.equal, before, model.parameters())), "nothing is updated"
    found[0].param_groups[0]["lr"] = 0.01  # as on the first rank: training goes on
    found[0].step()
    return "the second step", said


def test_ranks_that_would_train_by_different_rules_are_refused_on_all_of_them() -> None:
    table = run_world(2, differs, [name for name, _, _ in DIFFERENCES], timeout=60)
    for (_, when, pattern), row in zip(DIFFERENCES, table, strict=True):
        for at, said in row:
            assert at == when and re.search(pattern, said), said


def differs_in_name_only(_: None) -> str:
    """Numbers of other types, options in another order, and names that only users read."""
    torch.manual_seed(0)
    model, rank = GPT(), dist.get_rank()
    plain = adamw(model, (1.0, 1)[rank])
    if rank:
        for name in list(plain.param_groups[0]):
            plain.param_groups[0][name] = plain.param_groups[0].pop(name)
    plain.param_groups[0]["name"] = f"of rank {rank}"
    optimizer = zk.ZeroOptimizer(model, plain, stage=2, clip_grad_norm=(1, 1.0)[rank], num_threads=1 + rank)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10)
    for seed in range(3):
        optimizer.backward(loss_of(model, batch(seed)))
        optimizer.clip_grad_norm_(0.3)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return ""


def test_ranks_that_differ_in_what_decides_nothing_train() -> None:
    assert run_world(2, differs_in_name_only, [None], timeout=60)[0] == ["", ""]


# ---- groups that are not the whole world ---------------------------------------------------------------------------------------------


def in_part(folder: str) -> str:
    """Two of three ranks train, with connections of every kind; the third one has no part in that."""
    group = dist.new_group([0, 2])
    said = ""
    if dist.get_rank() != 1:
        model, optimizer = made(process_group=group, overlap_step=True)
        for seed in range(3):
            step(model, optimizer, seed)
            optimizer.save_checkpoint(folder, async_save=True)
        optimizer.synchronize()
        said = (Path(folder) / "latest").read_text()
        optimizer.close()
    dist.barrier()
    return said


def test_a_part_of_the_ranks_trains_and_saves_beside_training(tmp_path: Path) -> None:
    assert run_world(3, in_part, [str(tmp_path)], timeout=30)[0] == ["step-00000003\n", "", "step-00000003\n"]


def one_after_another(_: object) -> list[int]:
    """How many process groups there are after each optimizer is closed: both ways twice; on rank 0 alone; after an error of rank 1."""
    counts = []

    def count() -> None:
        counts.append(len(dist.distributed_c10d._world.pg_map))

    for overlaps in (False, True, False, True):
        model, optimizer = made(overlap_step=overlaps)
        step(model, optimizer)
        optimizer.close()
        count()
    model, open_on_one = made()
    if dist.get_rank() == 0:
        open_on_one.close()
    model, optimizer = made(stage=3)
    step(model, optimizer)
    count()
    with pytest.raises(RuntimeError, match="rank 1 gave up: RuntimeError: on purpose" if dist.get_rank() == 0 else "on purpose"):
        if dist.get_rank() == 1:
            with optimizer:
                raise RuntimeError("on purpose")
        step(model, optimizer)
    optimizer.close()
    open_on_one.close()
    model, optimizer = made(stage=3)
    step(model, optimizer)
    optimizer.close()
    count()
    return counts


def test_connections_of_closed_optimizers_serve_later_ones() -> None:
    assert run_world(2, one_after_another, [None], timeout=30)[0] == [[2, 4, 4, 4, 4, 4]] * 2


class _Overtaking:
    """A store in which the other rank comes, and is refused what it asks for, just after it has been looked for."""

    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}

    def set(self, key: str, value: str) -> None:
        self.kept[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self.kept[key]

    def check(self, keys: list[str]) -> bool:
        there = all(key in self.kept for key in keys)
        if keys == ["zk/at/here/1"]:
            self.kept |= {"zk/at/here/1": b"words", "zk/failed/here": b"rank 1 gave up"}
        return there


def test_a_rank_that_is_ahead_may_be_refused_before_others_have_seen_it() -> None:
    one = Presence(_Overtaking(), 0)
    try:
        assert one.meet("here", [0, 1], 10.0, "mine") == {0: "mine", 1: "words"}
    finally:
        one.close()


# ---- a rank that is killed, frozen, or interrupted ---------------------------------------------------------------------------------

PROGRAM = textwrap.dedent(
    """
    import os, sys, time
    from datetime import timedelta
    from pathlib import Path
    import torch.distributed as dist
    from tests.test_peers import TIMEOUT_S, made, step
    folder, rank = Path(sys.argv[1]), os.environ["RANK"]
    dist.init_process_group("gloo", timeout=timedelta(seconds=float(sys.argv[2])))
    model, optimizer = made()
    step(model, optimizer)
    print("ready", flush=True)
    while not (folder / rank).exists():
        time.sleep(0.02)
    task, begun = (folder / rank).read_text(), time.monotonic()
    try:
        if task == "fork and step":
            child = os.fork()
            if not child:
                sys.exit(0)
            print("the child ended with", os.waitpid(child, 0)[1], flush=True)
        if task == "save":
            optimizer.save_checkpoint(folder / "saved", async_save=True)
            optimizer.synchronize()
        else:
            step(model, optimizer)
        print("done", flush=True)
    except (Exception, KeyboardInterrupt) as error:
        print(f"{time.monotonic() - begun:.1f} {type(error).__name__}: {error}", flush=True)
    """
)


@contextmanager
def two_ranks(folder: Path, timeout_s: float = TIMEOUT_S) -> Iterator[list[Program]]:
    """Two programs that have taken a step, and wait for what ``tell`` has them do."""
    port = free_port()
    ranks = [Program("-c", PROGRAM, str(folder), str(timeout_s), env=rank_of(2, rank, port)) for rank in range(2)]
    try:
        for process in ranks:
            assert process.stdout.readline() == "ready\n"
        yield ranks
    finally:
        for process in ranks:
            process.send_signal(signal.SIGCONT)
            process.kill()
            process.communicate()


def tell(folder: Path, rank: int, task: str) -> None:
    (folder / f".{rank}").write_text(task)
    os.replace(folder / f".{rank}", folder / str(rank))


@pytest.mark.parametrize("victim", (0, 1))
def test_a_rank_that_ended_before_the_first_save_beside_training_is_missed(victim: int, tmp_path: Path) -> None:
    with two_ranks(tmp_path) as ranks:
        ranks[victim].kill()
        ranks[victim].wait()
        tell(tmp_path, 1 - victim, "save")
        said = ranks[1 - victim].stdout.readline()
    took, _, error = said.partition(" ")
    assert re.match(r"RuntimeError: saving .*: (rank 1 ended|the store .* is gone)", error) and float(took) < TIMEOUT_S, said
    assert not list(tmp_path.glob("saved/step-*")), "what was begun is no checkpoint"


def stands_still(victim: int, folder: Path) -> str:
    """What the other rank says of its step."""
    with two_ranks(folder) as ranks:
        ranks[victim].send_signal(signal.SIGSTOP)
        tell(folder, 1 - victim, "step")
        return ranks[1 - victim].stdout.readline()


@pytest.mark.parametrize("victim", (0, 1))
def test_a_rank_that_stands_still_is_waited_for_as_long_as_the_group_says_and_named(victim: int, under_way: dict[Any, Future[Any]]) -> None:
    said = under_way["stands still", victim].result()
    took, _, error = said.partition(" ")
    assert error.startswith(f"RuntimeError: rank {1 - victim} of 2 failed in collective"), said
    assert "rank 1 ended, or stands still" in error if victim else "the store over which the ranks have met does not answer" in error, said
    assert TIMEOUT_S <= float(took) < 6 * TIMEOUT_S, said


@pytest.mark.parametrize("frozen", (False, True))
def test_ctrl_c_ends_a_wait_for_another_rank(frozen: bool, tmp_path: Path) -> None:
    with two_ranks(tmp_path, timeout_s=120) as ranks:  # which does not come before the signal, however busy the machine is
        if frozen:
            ranks[0].send_signal(signal.SIGSTOP)
        tell(tmp_path, 1, "step")
        time.sleep(1.5)
        ranks[1].send_signal(signal.SIGINT)
        said = ranks[1].stdout.readline()
    took, _, error = said.partition(" ")
    assert error.startswith("KeyboardInterrupt") and float(took) < 120, said


def test_a_rank_that_could_not_make_its_optimizer_and_ended_is_heard(tmp_path: Path) -> None:
    program = PROGRAM.replace("made()", "made(units=['nothing of that name'] if rank == '1' else None)")
    port = free_port()
    ranks = [Program("-c", program, str(tmp_path), str(TIMEOUT_S), env=rank_of(2, rank, port)) for rank in range(2)]
    said = [process.communicate()[1] for process in ranks]
    assert "ValueError" in said[1] and "rank 1 gave up: ValueError" in said[0], said


def test_a_forked_process_that_ends_takes_no_connections_with_it(tmp_path: Path) -> None:
    with two_ranks(tmp_path) as ranks:
        for rank in range(2):
            tell(tmp_path, rank, "fork and step")
        for process in ranks:
            assert process.stdout.readline() == "the child ended with 0\n"
            assert process.stdout.readline() == "done\n"


def interrupted_between(_: None) -> tuple[str, float]:
    """Ctrl-C comes to the first rank after it has announced a gather, and before the other one has."""
    group = comm.Group(None)
    full = torch.zeros(4)
    mine = full[2 * group.rank :][:2].fill_(group.rank + 1)
    begun = time.monotonic()
    try:
        with comm.together(group, "trying"):
            if group.rank == 0:
                signal.signal(signal.SIGINT, signal.default_int_handler)
                threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
            else:
                time.sleep(1.2)
            group.all_gather(0, full, mine).wait()
            assert full.tolist() == [1, 1, 2, 2]
    except (KeyboardInterrupt, RuntimeError) as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - begun
    return "nothing", time.monotonic() - begun


def test_ctrl_c_lets_begin_what_was_announced_so_that_others_hear_of_it() -> None:
    (first, _), (other, took) = run_world(2, interrupted_between, [None], 60)[0]
    assert first.startswith("KeyboardInterrupt") and "on rank 0: KeyboardInterrupt" in other
    assert took < 20
