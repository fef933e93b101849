"""Whole training jobs, drawn from seeds, against plain PyTorch: bit for bit without faults, and with them refused by name and resumed bit for bit.

    python -m tests.simulate --first 17               one job; --seeds 10000: many; what is wrong with them
    python -m tests.simulate --defects [NAME ...]     plants defects in zk, and looks for the first seed that finds each

Ranks are threads of one process over collectives in memory. A job has up to three lives, each with a layout of its own (stage, tiers). It moves
from one to the next by a checkpoint or by state dicts when its schedule says so, and by the last complete checkpoint after a fault.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import contextlib
import errno
import functools
import gc
import itertools
import json
import math
import multiprocessing
import os
import queue
import random
import shutil
import sys
import tempfile
import threading
import time
import traceback
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

os.environ |= {"OMP_NUM_THREADS": "1", "ZK_CPU_ADAM": "torch", "ZK_QUIET": "1"} if __name__ == "__main__" else {}

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import zk
from tests.adversary import LateQueue
from tests.plain import mean_of_ranks
from zk import store
from zk.addons import accumulation, checksums
from zk.checkpoint import contents, files, load, save
from zk.kernels import reference
from zk.offload import drive, file, tiers
from zk.parallel import comm
from zk.parallel.runtime import RUNTIMES
from zk.precision import DynamicLossScale

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
VOCAB, WIDTH, HIDDEN = 11, 8, 300  # a block of several chunks, each of whole pages
RANDOM = contents.random_state(torch.device("cpu"))  # the process has it, which is not of one rank
BOUND_S = 120.0  # real seconds: more than any life takes, on a busy machine too
NO_ROOM = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
BATCHES = torch.randint(0, VOCAB, (3, 2, 3, 2, 3), generator=torch.Generator().manual_seed(1))  # by step, micro-batch, rank
patch = mock.patch.object


class Sums(NamedTuple):
    """All that the result depends on: plain training is computed once for each."""

    dtype: str
    world: int
    accumulation: int
    local: bool  # micro-batches are added up on each rank before ranks reduce
    optimizer: str
    clip: float | None
    tied: bool
    skips: str  # "step", "rank": a block is left out in some steps, or on some ranks in them
    acts: tuple[str, ...]  # before each step: "", "param", "master", "state" (one is halved), "inf" (in this step), "unfreeze"

    def inner(self, params: list[nn.Parameter]) -> torch.optim.Optimizer:
        groups = [{"params": [p for p in params if p.ndim > 1], "weight_decay": 0.1}, {"params": [p for p in params if p.ndim < 2], "lr": 3e-2}]
        more: Any = {"Adam": {"amsgrad": True}, "SGD": {"momentum": 0.9}}.get(self.optimizer, {})
        return getattr(torch.optim, self.optimizer)(groups, lr=1e-2, **more)  # type: ignore[no-any-return]


class Job(NamedTuple):
    seed: int
    sums: Sums
    lives: tuple[dict[str, Any], ...]  # from one start to the next: options of zk; "late": transfers of drives are, and in another order
    acts: tuple[tuple[str, ...], ...]  # before each step, what changes no value: saves, moves to the next life, reads
    fault: str  # one of FAULTS
    victim: int  # the rank that meets it
    number: int  # of the read, write, collective ... that does
    is_recovered: bool  # a run alone loads its last checkpoint into the optimizer that has failed; of death: the machine loses power


FAULTS = {  # kind -> where it comes about
    **{"": "", "short": "", "tier read": "read", "tier write": "write", "lie": "read", "reserve": "reserve", "fsync": "fsync"},
    **{"load": "load", "collective": "collective", "die in collective": "collective", "die in fsync": "fsync", "hurt": "hurt"},
}
STATE = {"AdamW": "exp_avg", "Adam": "max_exp_avg_sq", "SGD": "momentum_buffer", "Adagrad": "sum"}  # what is read, and halved
READS = "read param", "read master", "read state", "read grad", "evaluate", "synchronize", "parked"
WRITES = "save", "save", "async save", "move by checkpoint", "move by checkpoint", "move by state_dict"


def draw(seed: int) -> Job:
    dice = random.Random(seed // 4)  # plain training of it serves four seeds
    pick = dice.choice
    steps, world, dtype = dice.randint(2, 3), pick((1, 1, 1, 1, 2, 2, 3)), pick(("fp32", "bf16", "bf16", "fp16"))
    accumulation, grows = pick((1, 1, 1, 2)), dice.random() < 0.1
    local = accumulation > 1 and pick((True, False))
    values = [pick(("", "", "", "param", "master", "state", "inf")) if dice.random() < 0.5 else "" for _ in range(steps)]
    if grows:
        values[dice.randrange(1, steps)] = "unfreeze"
    more = pick([*STATE, "AdamW"]), pick((None, 0.5)), pick((True, False, False)), pick(("", "", "", "step", "rank"))
    sums = Sums(dtype, world, accumulation, local, *more, tuple(values))
    dice.seed(seed)
    stages = [0, *[1] * (local or accumulation == 1), 2] + [3] * 4 * (sums.skips != "rank")
    lives = tuple(draw_life(dice, pick(stages), grows) for _ in range(3))
    acts = tuple((*dice.sample(WRITES[: 6 - grows], pick((0, 1))), *dice.sample(READS, pick((0, 0, 1)))) for _ in range(steps))
    no = ("read", "write") * (not any("nvme" in life.values() for life in lives)) + ("collective",) * (world == 1)
    kinds = [kind for kind in FAULTS if FAULTS[kind] not in no]
    kind = pick(kinds) if dice.random() < 0.75 else ""
    number = 1 + int(dice.expovariate(1 / {"reserve": 3, "fsync": 5, "hurt": 0.3}.get(FAULTS[kind], 15)))
    return Job(seed, sums, lives, acts, kind, dice.randrange(world), number, pick((True, False)))


def draw_life(dice: random.Random, stage: int, grows: bool) -> dict[str, Any]:
    names = ("device", "host", "nvme", "nvme", "nvme", "auto")
    state, param = dice.choice(names), dice.choice(names) if stage == 3 else "device"
    state = "nvme" if (param, state) == ("nvme", "device") else state
    options: dict[str, Any] = {"optimizer_tier": state, "param_tier": param} | ({"growing": True} if grows else {})
    options["overlap_step"] = dice.choice((False, "backward", stage == 3))
    options |= {"prefetch": dice.randint(0, 2)} if stage == 3 else {}
    if not grows and "nvme" in (param, state) and dice.random() < 0.3:
        options["host_budget"] = dice.randint(250_000, 350_000)  # of which buffers take the most
    if not grows and "auto" in (param, state):
        options |= {"device_budget": dice.randint(150_000 if state == "device" else 60_000, 200_000), "host_budget": dice.randint(250_000, 350_000)}
    return options | {"stage": stage, "late": dice.random() < 0.5, "block by block": dice.random() < 0.5}


class Tiny(nn.Module):
    def __init__(self, sums: Sums, step: int = 0) -> None:
        super().__init__()
        self.skips, self.tokens, self.head = sums.skips, nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        wide = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH, bias=False))
        self.blocks = nn.ModuleList([wide, nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH, bias=False))])
        make = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for param in self.parameters():  # values that all dtypes have: what is frozen keeps no others
                param.copy_(torch.randint(-64, 64, param.shape, generator=make) / 128 + (param.ndim == 1))
        if sums.tied:
            self.head.weight = self.tokens.weight
        if "unfreeze" in sums.acts[step:]:
            self.blocks[1].requires_grad_(False)

    def forward(self, ids: Tensor, step: int, rank: int) -> Tensor:
        x = self.tokens(ids)
        for number, block in enumerate(self.blocks):
            if not number or not self.skips or (step + rank * (self.skips == "rank")) % 3 != 1:
                x = x + torch.tanh(block(x))
        return F.cross_entropy(self.head(x).float().view(-1, VOCAB), ids.roll(1, 1).flatten())


@functools.lru_cache(16)
def plain(sums: Sums) -> list[Any]:
    """For each step what is there once the acts before it are done, and its results; and what is there in the end."""
    dtype, model = DTYPES[sums.dtype], Tiny(sums).to(DTYPES[sums.dtype])
    params, scale, clean = list(model.parameters()), 1024.0 if sums.dtype == "fp16" else 1.0, 0
    masters = [nn.Parameter(param.detach().float()) for param in params]
    optimizer, records = sums.inner(masters), list[Any]()

    def note() -> Any:
        kinds = params, masters, [optimizer.state[master].get(STATE[sums.optimizer]) for master in masters]
        copies = [[None if value is None else value.detach().clone() for value in values] for values in kinds]
        return SimpleNamespace(**dict(zip(("params", "masters", "states"), copies, strict=True)), losses=collections.defaultdict(list))

    for step, act in enumerate(sums.acts):
        param, master = params[(2 + 3 * step) % len(params)], masters[(2 + 3 * step) % len(params)]
        with torch.no_grad():
            if act == "param":
                master.copy_(param.mul_(0.5))
            if act == "master" and param.requires_grad:
                param.copy_(master.mul_(0.5))
            if act == "state" and param.requires_grad and (value := optimizer.state[master].get(STATE[sums.optimizer])) is not None:
                value.mul_(0.5)
        if act == "unfreeze":
            model.requires_grad_(True)
        records.append(record := note())
        rows: list[Any] = [[[None] * sums.accumulation for _ in range(sums.world)] for _ in params]
        for rank, micro in itertools.product(range(sums.world), range(sums.accumulation)):
            loss = model(BATCHES[step, micro, rank], step, rank)
            record.losses[rank].append(loss.item())
            (loss * (math.inf if act == "inf" and rank == step % sums.world else 1) * scale).backward()
            for row, each in zip(rows, params, strict=True):
                row[rank][micro], each.grad = each.grad, None
        totals = [total_of(row, sums, dtype) for row in rows]
        record.norm = math.sqrt(sum(total.double().square().sum().item() for total in totals if total is not None)) / scale
        record.grads = [None if total is None else (total / scale).to(dtype) for total in totals]
        is_finite, factor = math.isfinite(record.norm), min(1.0, (sums.clip or math.inf) / (record.norm + 1e-6)) / scale
        if is_finite:
            for master, total in zip(masters, totals, strict=True):
                master.grad = total if total is None or factor == 1 else total * factor
            optimizer.step()
            with torch.no_grad():
                for master, param in zip(masters, params, strict=True):
                    param.copy_(master)
        if sums.dtype == "fp16":  # the scale halves at once, and doubles after two clean steps
            scale, clean = (scale * 2**clean, 1 - clean) if is_finite else (scale / 2, 0)
    return [*records, note()]


def total_of(rows: list[list[Tensor | None]], sums: Sums, dtype: torch.dtype) -> Tensor | None:
    """The gradient of one parameter, of [rank][micro-batch]; None where it has none."""
    there = [grad for row in rows for grad in row if grad is not None]
    if not there:
        return None
    full = [[torch.zeros_like(there[0]) if grad is None else grad for grad in row] for row in rows]
    if sums.local:
        return mean_of_ranks([functools.reduce(torch.add, (grad.float() for grad in row)) for row in full], torch.float32)
    return functools.reduce(torch.add, (mean_of_ranks([*column], dtype).float() for column in zip(*full, strict=True)))


class Dead(BaseException):
    """The rank has been killed."""


class Thread(threading.Thread):
    """It is of the rank of the thread that makes it."""

    def __init__(self, *given: Any, rank: Rank | None = None, **named: Any) -> None:
        super().__init__(*given, **named)
        self.rank = rank or getattr(threading.current_thread(), "rank", None)


me: Any = threading.current_thread  # of a rank


class Group:
    """A process group, as one rank sees it; ``fabric`` connects all: the n-th collective of each is one of all."""

    _device_types = (torch.device("cpu"),)

    def __init__(self, fabric: Any, rank: Rank) -> None:
        self.fabric, self.rank, self.size, self.of, self.count = fabric, rank.rank, rank.sums.world, rank, 0

    def start(self, what: Any, given: Any, then: Any, is_async: bool = False) -> Any:
        """Send, and wait now or later; ``then`` takes what all have sent."""
        is_failed = self.of.meets("collective")
        with self.fabric.changes:
            self.fabric.broken |= is_failed
            meeting = self.fabric.meetings.setdefault(self.count, {})
            self.count += 1
            meeting[self.rank] = what, given.clone() if isinstance(given, Tensor) else given
            self.fabric.changes.notify_all()
        work = SimpleNamespace(wait=functools.partial(self.wait, meeting, then))
        return work if is_async else work.wait()

    def wait(self, meeting: dict[int, Any], then: Any) -> None:
        fabric = self.fabric
        with fabric.changes:
            fabric.changes.wait_for(lambda: fabric.broken or len(meeting) == self.size or fabric.ended - meeting.keys(), BOUND_S)
            kinds = {what for what, _ in meeting.values()}
            fabric.mixed = fabric.mixed or f"ranks meet at different collectives: {kinds}" * (len(kinds) > 1)
            if fabric.broken or len(meeting) < self.size or fabric.mixed:
                fabric.broken = True
                fabric.changes.notify_all()
                raise RuntimeError("connection closed by peer")
        then([meeting[rank][1] for rank in range(self.size)])


def poison(tensor: Tensor) -> Tensor:
    """The same, and NaN in all dtypes until what was asked for is there."""
    tensor.detach().view(-1).view(torch.uint8).fill_(255)
    return tensor


def all_to_all(rows: Tensor, sent: Tensor, group: Any) -> None:
    what, own = ("all_to_all", sent.numel(), sent.dtype), slice(group.rank, None, group.size)
    group.start(what, sent, lambda given: rows.copy_(torch.cat([part for one in given for part in one.chunk(group.size)][own])))


def broadcast(tensor: Tensor, group: Any, group_src: int, async_op: bool = False) -> Any:
    what, given = ("broadcast", tensor.numel(), tensor.dtype, group_src), tensor.detach().clone()
    if group.rank != group_src:
        poison(tensor)
    return group.start(what, given, lambda values: tensor.detach().copy_(values[group_src].view_as(tensor)), async_op)


DISTRIBUTED = SimpleNamespace(  # what zk.parallel.comm calls of torch's
    ProcessGroup=dist.ProcessGroup,
    DistError=RuntimeError,
    group=type("", (), {"WORLD": property(lambda self: me().rank.groups[0])})(),
    is_initialized=lambda: True,
    get_world_size=lambda group: me().rank.sums.world,
    get_rank=lambda group: me().rank.rank,
    broadcast=broadcast,
    all_to_all_single=all_to_all,
    all_gather_object=lambda said, value, group: group.start("words", value, lambda given: said.__setitem__(slice(None), given)),
)


def moving(where: str, call: Any) -> Any:
    """``call``, of half of what is asked for where drives are short; a lie comes with no low bits, and not in padding."""

    def moved(descriptor: int, buffers: list[Any], offset: int) -> int:
        is_lie, data = me().rank.meets(where), buffers[0]
        count: int = call(descriptor, [data[: max(512, len(data) // 1024 * 512)] if me().rank.job.fault == "short" else data], offset)
        if is_lie:
            data[3] ^= 16
        return count

    return moved


def meeting(where: str, call: Any) -> Any:
    """``call``, before which the fault of the rank may come."""
    return lambda *given, **named: me().rank.meets(where) or call(*given, **named)


def fsync(descriptor: int) -> None:
    """Note that the drive has it: what it has not is lost with the power."""
    me().rank.meets("fsync")
    me().rank.run.synced[os.fstat(descriptor).st_ino] = os.fstat(descriptor).st_size


def publish(*given: Any) -> None:
    """Power is lost before it, within an fsync of it, or after it."""
    with me().rank.run.power:
        PUBLISH(*given)


@contextlib.contextmanager
def simulated() -> Iterator[None]:
    """zk among ranks that are threads, on drives that fail when they should, with small chunks."""
    moves = {"preadv": moving("read", os.preadv), "pwritev": moving("write", os.pwritev)}
    system = SimpleNamespace(**moves, posix_fallocate=meeting("reserve", os.posix_fallocate))
    queues = SimpleNamespace(Empty=queue.Empty, SimpleQueue=lambda: (queue.SimpleQueue, LateQueue)[me().rank.job.lives[me().rank.life]["late"]]())
    with contextlib.ExitStack() as stack:
        for where, name, value in (
            (comm, "_all_gather", lambda rows, sent, group: group.start(("rows", sent.shape), sent, lambda all: rows.copy_(torch.cat(all)))),
            *((tier, "chunk_numel", 2048) for tier in (tiers.Tier, drive.Drive)),
            *((contents, "random_state", lambda device: RANDOM), (contents, "restore_random", nothing), (files, "publish", publish)),
            *((file, "SYSTEM", system), (file, "queue", queues), (file, "BLOCK_NBYTES", 2 * file.ALIGN), (file, "THREADS", 2)),
            *((threading, "Thread", Thread), (accumulation, "Thread", Thread), (comm, "dist", DISTRIBUTED), (save, "PIECE_NUMEL", 1500)),
            (file.File, "read_async", lambda self, tensor, offset=0: READ(self, poison(tensor), offset)),
            (files, "os", SimpleNamespace(**vars(os) | {"fsync": fsync, "pread": meeting("load", os.pread)})),
            (files.Tensors, "elements", meeting("load", files.Tensors.elements)),
            (weakref.WeakSet, "__iter__", lambda self: (one for ref in [*self.data] if (one := ref()) is not None)),  # others make optimizers
            *((log, "disabled", True) for log in (zk.logs.log, zk.logs.rank_log)),
            *((module, "trim", bool) for module in (zk.optimizer, drive, tiers)),
        ):
            stack.enter_context(patch(where, name, value))
        stack.enter_context(warnings.catch_warnings(action="ignore"))
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)
        yield


class Run:
    """All lives of a job. ``problems``: what zk has broken of its promises."""

    def __init__(self, job: Job) -> None:
        self.job, self.problems, self.synced = job, list[str](), dict[int, int]()
        self.is_next, self.has_failed, self.power, self.ranks = job.fault != "", False, threading.RLock(), list[Rank]()

    def go(self) -> list[str]:
        with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
            self.folder, self.root = Path(folder), Path(folder, "saved")
            ranks = self.live(0, is_resumed=False)
            self.judge(ranks)
            if not self.problems and any(rank.error for rank in ranks):
                promised = min(rank.promised for rank in ranks)
                self.is_next = False
                ranks = self.live(1, is_resumed=True)
                self.problems += [f"resumed, {rank}" for rank in ranks if rank.error]
                self.problems += [f"resumed at step {r.begun}, and step {promised} had been saved" for r in ranks if r.begun < promised]
                self.problems += [problem for rank in ranks for problem in rank.problems]
        for rank in self.ranks:
            rank.error = None  # it refers to optimizers, whose threads are of this rank
        return self.problems

    def live(self, life: int, is_resumed: bool) -> list[Rank]:
        fabrics = [SimpleNamespace(changes=threading.Condition(), meetings={}, ended=set(), broken=False, mixed="") for _ in range(2)]
        self.ranks += (ranks := [Rank(self, fabrics, rank, life, is_resumed) for rank in range(self.job.sums.world)])
        threads = [Thread(target=rank.main, daemon=True, rank=rank) for rank in ranks]
        for thread in threads:
            thread.start()
        for rank, thread in zip(ranks, threads, strict=True):
            thread.join(BOUND_S)
            if thread.is_alive():
                self.problems += [f"{rank}hangs:\n" + "".join(traceback.format_stack(sys._current_frames()[thread.ident or 0], 6))]
        self.problems += [fabric.mixed for fabric in fabrics if fabric.mixed and not self.has_failed]
        return ranks

    def judge(self, ranks: list[Rank]) -> None:
        """Each rank is right, or ends with an error that names the fault, or says that another rank has failed."""
        self.problems += [problem for rank in ranks for problem in rank.problems]
        kind, words = self.job.fault, "another rank is gone"
        own = words if "collective" in kind or "die" in kind else "differs" if kind == "lie" else NO_ROOM.args[1]
        for rank in ranks:
            is_others = rank.rank != self.job.victim or "in give_back" in str(rank)  # close() raises the error of the last unit
            is_named = self.has_failed and (own in str(rank.error) or (is_others and words in str(rank.error)))
            if rank.error and not isinstance(rank.error, Dead) and not is_named:
                self.problems.append(str(rank))

    def lose_power(self) -> None:
        """Keep what the drives have now, as a rank dies: what they were not asked to sync is cut."""
        with self.power:
            if self.job.is_recovered and self.root.exists():
                leave = shutil.ignore_patterns("*.partial", "*.tmp")  # others go on writing them
                self.root = Path(shutil.copytree(self.root, self.folder / "after", copy_function=self.copy, ignore=leave))

    def copy(self, source: str, target: str) -> None:
        data, about = Path(source).read_bytes(), os.stat(source)
        Path(target).write_bytes(data[: len(data) if self.synced.get(about.st_ino) == about.st_size else len(data) // 2])


class Rank:
    """One rank of one or more lives, until it ends."""

    def __init__(self, run: Run, fabrics: list[Any], rank: int, life: int, is_resumed: bool) -> None:
        self.run, self.job, self.sums, self.rank, self.life, self.is_resumed = run, run.job, run.job.sums, rank, life, is_resumed
        self.fabrics, self.root, self.records = fabrics, run.root, plain(run.job.sums)
        self.groups, self.counts, self.problems = [Group(fabric, self) for fabric in fabrics], collections.Counter[str](), list[str]()
        self.step = self.begun = self.promised = self.pending = self.loads = 0
        self.counted, self.is_saving = [0, 0], False  # steps and those that were skipped; a save is in the background
        none: Any = None
        self.error = self.model = self.optimizer = none

    def __str__(self) -> str:
        trace = "".join(traceback.format_exception(self.error)) if self.error else ""
        return f"rank {self.rank} in step {self.step} of life {self.life}: {self.error!r}\n{trace}"

    def meets(self, where: str) -> bool:
        """Whether the drive lies or the connection breaks here and now; what else fails raises."""
        self.counts[where] += 1
        job, run = self.job, self.run
        if not run.is_next or self.rank != job.victim or FAULTS[job.fault] != where or self.counts[where] < job.number:
            return False
        run.is_next, run.has_failed = False, True
        if job.fault.startswith("die"):
            run.lose_power()
            raise Dead
        if job.fault not in ("lie", "collective"):
            raise OSError(*NO_ROOM.args)
        return True

    def main(self) -> None:
        torch.set_num_threads(1)
        try:
            self.train()
        except BaseException as error:
            self.error = error
            if self.optimizer is not None and not isinstance(error, Dead):
                with contextlib.suppress(Exception):
                    self.optimizer.close(gather=False)
        for fabric in self.fabrics:
            with fabric.changes:
                fabric.ended.add(self.rank)
                fabric.changes.notify_all()
        self.optimizer = self.model = None

    def train(self) -> None:
        self.step = self.begun = self.newest() if self.is_resumed else 0
        self.start(Tiny(self.sums, self.step))
        if self.step:
            self.load()
        while self.step < len(self.sums.acts):
            try:
                self.one_step()
            except Exception as error:
                is_alone = self.sums.world == 1 and self.job.is_recovered and self.promised and self.run.has_failed
                if self.error or not is_alone or self.optimizer is None or self.optimizer._runtime not in RUNTIMES:
                    raise
                self.error = error
                self.run.judge([self])
                self.load()  # what the drive has refused may be refused again
        self.error = None
        self.synced()
        self.optimizer.close()
        self.same("parameters", [*self.model.parameters()], self.records[-1].params)

    def start(self, model: nn.Module) -> None:
        life, sums, self.model, self.optimizer = self.job.lives[self.life], self.sums, model, None
        options = {name: value for name, value in life.items() if name not in ("late", "block by block")}
        options |= {"nvme_path": str(self.run.folder)} if {"nvme", "auto"} & {life["optimizer_tier"], life["param_tier"]} else {}
        scale = DynamicLossScale(init=1024.0, window=2, hysteresis=1) if sums.dtype == "fp16" else None
        options |= {"clip_grad_norm": sums.clip, "loss_scale": scale, "num_threads": 1, "dtype": sums.dtype}
        self.optimizer = zk.ZeroOptimizer(model, sums.inner([*model.parameters()]), **options)
        if sums.world > 1:
            save.saver_of(self.optimizer).own = comm.Comm(self.groups[1])  # type: ignore[arg-type]

    def one_step(self) -> None:
        step, sums, acts, record = self.step, self.sums, self.job.acts[self.step], self.records[self.step]
        for act in [act for act in acts if act in WRITES]:
            self.act(act)
        value, optimizer, losses = sums.acts[step], self.optimizer, []
        self.change(value)
        self.read(*{*acts} - {"read grad"})
        is_inf = value == "inf" and self.rank == step % sums.world
        is_together = self.job.lives[self.life]["block by block"] and sums.local and value != "inf" and sums.skips != "rank"
        if is_together:  # all ranks call the same blocks
            batches = [BATCHES[step, micro, self.rank] for micro in range(sums.accumulation)]
            losses = [loss.item() for loss in optimizer.accumulate(batches, lambda model, ids: model(ids, step, self.rank))]
        for micro in range(sums.accumulation * (not is_together)):
            with optimizer.no_sync() if sums.local and micro < sums.accumulation - 1 else contextlib.nullcontext():
                loss = self.model(BATCHES[step, micro, self.rank], step, self.rank)
                optimizer.backward(loss * math.inf if is_inf else loss)
            losses.append(loss.item())
        self.same("losses", [torch.tensor(losses)], [torch.tensor(record.losses[self.rank])])
        self.read(*{"read grad"} & {*acts})
        optimizer.step()
        optimizer.zero_grad()
        is_skipped = not math.isfinite(record.norm)
        self.step, self.counted = step + 1, [self.counted[0] + (not is_skipped), self.counted[1] + is_skipped]
        self.same("counts of steps", [torch.tensor([optimizer.num_steps, optimizer.skipped_steps])], [torch.tensor(self.counted)])
        if not is_skipped and not math.isclose(optimizer.norm, record.norm, rel_tol=1e-6):
            self.note(f"the norm is {optimizer.norm} instead of {record.norm}")

    def note(self, problem: str) -> None:
        self.problems.append(f"rank {self.rank}, step {self.step}, life {self.life}: {problem}")

    def same(self, what: str, got: list[Any], want: list[Any]) -> None:
        pairs = enumerate(zip(got, want, strict=True))
        wrong = [n for n, (one, other) in pairs if one.dtype != other.dtype or not torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))]
        if wrong:
            self.note(f"{what} {wrong} differ from plain training's")

    def synced(self) -> None:
        self.optimizer.synchronize()
        self.promised, self.is_saving = max(self.promised, self.pending), False

    def act(self, act: str) -> None:
        if act == "move by state_dict":
            states = self.optimizer.state_dict()
            self.synced()
            self.optimizer.close()
            self.life, self.counted = (self.life + 1) % 3, [0, 0]
            self.start(self.model)
            self.optimizer.load_state_dict(states)
            return
        is_async, about = act == "async save", {"step": self.step, "counted": self.counted}
        folder = self.optimizer.save_checkpoint(self.root, extra=about, async_save=is_async, keep=2)
        self.pending, self.promised, self.is_saving = self.step, self.promised if is_async else self.step, is_async
        if act == "move by checkpoint":
            self.optimizer.close()
            self.life = (self.life + 1) % 3
            self.start(Tiny(self.sums, self.step))
            self.load(folder)

    def newest(self) -> int:
        """The step of the newest checkpoint; 0 without one."""
        with self.run.power:
            there = [*self.root.glob("step-*"), *self.root.glob(".step-*.replaced")]
            self.problems += [f"{one} has its name, and is not whole" for one in there if not (one / files.MANIFEST).exists()]
            is_there = there and not self.problems
            return json.loads(Path(files.find(self.root), files.MANIFEST).read_text())["extra"]["step"] if is_there else 0

    def load(self, folder: Path | None = None) -> None:
        """Load the newest checkpoint, or one that may be hurt before."""
        self.loads += folder is not None
        if folder is not None and self.job.fault == "hurt" and self.loads == self.job.number:
            self.hurt(folder)
        extra = self.optimizer.load_checkpoint(folder or self.root)
        self.step, self.counted = extra["step"], extra["counted"]

    def hurt(self, folder: Path) -> None:
        """A file of a copy is cut, changed, another or gone: loading is refused, and changes nothing."""
        dice, self.run.has_failed, before = random.Random(self.job.seed), True, self.masters()
        copy = Path(shutil.copytree(folder, self.run.folder / f"copy-{self.rank}"))
        path, how = dice.choice(sorted(copy.iterdir())), dice.choice(("cut", "flip", "swap", "gone"))
        whole = path.read_bytes()
        at, other = dice.randrange(len(whole)), dice.choice(sorted(self.root.glob(f"step-*/*{path.suffix}"))).read_bytes()
        hurt = {"cut": whole[:at], "flip": whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :], "swap": other}.get(how)
        path.unlink() if hurt is None else path.write_bytes(hurt)
        try:
            self.optimizer.load_checkpoint(copy)
            if hurt != whole:
                self.note(f"a checkpoint was loaded whose {path.name} is hurt ({how})")
        except zk.CheckpointError as error:
            if ("copy-" if how == "swap" else path.name) not in str(error):  # who knows which of two whole files is the wrong one
                self.note(f"{path.name} is not named (it is hurt: {how}): {error}")
            self.same("after a load that was refused, masters", self.masters(), before)

    def masters(self) -> list[Tensor]:
        with zk.gather([param for param in self.model.parameters() if param.requires_grad], kind="master") as values:
            return values

    def change(self, act: str) -> None:
        params, kinds = [*self.model.parameters()], {"param": "param", "master": "master", "state": STATE[self.sums.optimizer]}
        param, kind = params[(2 + 3 * self.step) % len(params)], kinds.get(act)
        if act == "unfreeze":
            self.model.requires_grad_(True)
        if act == "param" and self.is_saving:
            self.synced()  # a save in the background refuses writes from outside, and says so
        if kind == "param" and self.job.lives[self.life]["stage"] < 3 and self.job.seed % 2:
            with torch.no_grad():
                param.mul_(0.5)
        elif kind is not None and (kind == "param" or param.requires_grad):
            with zk.gather(param, kind=kind, write=True) as values, torch.no_grad():
                values[0].mul_(0.5) if self.rank == 0 else values[0].fill_(7.0)

    def read(self, *acts: str) -> None:
        record, params, step, state = self.records[self.step], [*self.model.parameters()], self.step, STATE[self.sums.optimizer]
        if "evaluate" in acts:
            with torch.no_grad():
                loss = self.model(BATCHES[step, 0, self.rank], step, self.rank)
            self.same("loss without gradients", [loss], [torch.tensor(record.losses[self.rank][0])])
        kinds = {"param": record.params, "master": record.masters, state: record.states, "grad": record.grads}
        for act, (kind, want) in zip(READS, kinds.items(), strict=False):
            if act in acts and (kind not in ("master", state) or self.sums.acts[step] != "unfreeze"):  # which the next forward sees
                there = [n for n, param in enumerate(params) if want[n] is not None and (kind == "param" or param.requires_grad)]
                with zk.gather([params[n] for n in there], kind=kind) as values:
                    self.same(kind, values, [want[n] for n in there])
        if {"synchronize", "parked"} & {*acts}:
            with self.optimizer.parked(self.run.folder) if "parked" in acts else contextlib.nullcontext():
                pass
            self.synced()


def nothing(*_: Any, **__: Any) -> None:
    """Leave it out."""


def published_early(folder: Path, final: Path, head: Any, ranks: int, keep: Any) -> None:
    """Give it its name before the manifest is there."""
    if not final.exists():
        folder.rename(final)
        files.sync_folder(final.parent)
        final.rename(folder)
    PUBLISH(folder, final, head, ranks, keep)


def skipped_counted(self: Any) -> float:
    """Count the step for the bias correction of Adam, before it is known whether it is one."""
    norm = REDUCE(self)
    for one in self._trained if not math.isfinite(norm) else ():
        one.steps = [steps + 1 for steps in one.steps]
    return norm


PUBLISH, READ, REDUCE, ROWS = files.publish, file.File.read_async, zk.ZeroOptimizer._reduce, comm.Comm.rows
DEFECTS: dict[str, Any] = {
    "read not awaited": lambda: patch(tiers.HostChunk, "wait", nothing),
    "update not awaited": lambda: patch(store.UnitStore, "wait", nothing),
    "gather not awaited": lambda: patch(comm.Collective, "wait", nothing),
    "rank dropped from sums": lambda: patch(reference, "reduce", lambda rows, out: out.copy_(rows[:-1].float().sum(0) / len(rows))),
    "norm of the own shard": lambda: patch(comm.Comm, "rows", lambda self, *given: [given[1]] if given[0] == "norm" else ROWS(self, *given)),
    "ranks not told of an error": lambda: patch(comm.Comm, "together", lambda self, about: contextlib.nullcontext()),
    "error of the drive swallowed": lambda: patch(file.Request, "wait", lambda self: concurrent.futures.wait(self.blocks)),
    "drive not checked": lambda: patch(checksums, "checksum", lambda data: 0),
    "published before it is whole": lambda: patch(files, "publish", published_early),
    "checkpoint not synced": lambda: patch(files, "sync", lambda file: file.flush()),
    "checkpoint not checked": lambda: patch(files.Written, "check", lambda self, folder: folder / self.name),
    "steps not restored": lambda: patch(load.Target, "count", nothing),
    "skipped step counted": lambda: patch(zk.ZeroOptimizer, "_reduce", skipped_counted),
    "stale parameters": lambda: patch(store.UnitStore, "publish", nothing),
}


def several(start: int, stop: int, defect: str = "") -> tuple[int, int, list[str], float]:
    """How many jobs of these seeds met their fault, what is wrong with which, and processor seconds. A defect ends with the first that finds it."""
    found, faults, begun, seed = list[str](), 0, time.process_time(), start
    with simulated(), DEFECTS[defect]() if defect else contextlib.nullcontext():
        while seed < stop and not (found and defect):
            if problems := (one := Run(draw(seed))).go():
                found.append("\n".join([f"seed {seed}, alone: python -m tests.simulate --first {seed}", *problems, *map(str, one.job)]))
            faults, seed = faults + one.has_failed, seed + 1
    gc.collect()  # optimizers of ranks that were killed have threads
    return seed - start, faults, found, time.process_time() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"first": 0, "seeds": 1, "workers": 1 + (os.cpu_count() or 1)}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--defects", nargs="*", metavar="NAME")
    options, begun, sums = parser.parse_args(), time.perf_counter(), [0, 0, 0, 0.0]
    names, stop, size = options.defects, options.first + options.seeds, 20
    if names is not None:
        names, stop, size = names or DEFECTS, options.first + (options.seeds if options.seeds > 1 else 2000), 2000
    parts = [(first, min(first + size, stop), name) for name in names or [""] for first in range(options.first, stop, size)]
    pool = concurrent.futures.ProcessPoolExecutor(options.workers, multiprocessing.get_context("forkserver"), gc.freeze)
    jobs = {pool.submit(several, *part): part for part in parts}
    for done in concurrent.futures.as_completed(jobs):
        *counts, found, seconds = done.result()
        sums = [one + more for one, more in zip(sums, [*counts, len(found), seconds], strict=True)]
        if name := jobs[done][2]:
            print(f"{name:32} " + (found[0] if found else "is not found").replace("\n", "  ")[:200], flush=True)
        else:
            print(*found, sep="\n", end="\n" * bool(found), flush=True)
        print("{} seeds, {} met a fault, {} wrong, {:.0f} s of processors, {:.0f} s".format(*sums, time.perf_counter() - begun), file=sys.stderr)
    sys.exit(sums[2] != len(names or ()))


if __name__ == "__main__":
    main()
