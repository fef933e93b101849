"""Whole training jobs, drawn from seeds, against plain PyTorch: bit for bit without faults, and with them refused by name and resumed bit for bit.

    python -m tests.simulate --seeds 10000 [--first 0] [--workers 2]
    python -m tests.simulate --first 17               one job, with what it is in words
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
from collections.abc import Iterable, Iterator
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
from zk.addons import checksums
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
ME = threading.local()  # of a rank's threads
patch = mock.patch.object

# ---- the job ------------------------------------------------------------------------------------------------------------------------


class Sums(NamedTuple):
    """All that the result depends on: plain training is computed once for each."""

    dtype: str
    world: int
    accumulation: int
    local: bool  # micro-batches are added up on each rank before ranks reduce
    optimizer: str
    clip: float | None
    is_dynamic: bool  # the loss scale
    tied: bool
    skips: str  # "step", "rank": a block is left out in some steps, or on some ranks in them
    acts: tuple[str, ...]  # before each step: "", "param", "master", "state" (one is halved), "inf" (in this step), "unfreeze"


class Life(NamedTuple):
    """How zk trains from one start to the next."""

    stage: int
    options: dict[str, Any]
    late: bool  # transfers of drives are late, and in another order


class Fault(NamedTuple):
    kind: str  # one of FAULTS
    rank: int
    number: int  # of the read, write, collective ... that meets it
    errno: int
    is_recovered: bool  # a run alone loads its last checkpoint into the optimizer that has failed; of death: the machine loses power


class Job(NamedTuple):
    seed: int
    sums: Sums
    lives: tuple[Life, ...]
    acts: tuple[tuple[str, ...], ...]  # before each step, what changes no value: saves, moves to the next life, reads
    fault: Fault


FAULTS = {  # kind -> where it comes about
    **{"": "", "short": "", "tier read": "read", "tier write": "write", "lie": "read", "reserve": "reserve", "fsync": "fsync"},
    **{"load": "load", "collective": "collective", "die in collective": "collective", "die in fsync": "fsync", "hurt": "hurt"},
}
STATE = {"AdamW": "exp_avg", "Adam": "max_exp_avg_sq", "SGD": "momentum_buffer", "Adagrad": "sum"}  # what is read, and halved
READS = "read param", "read master", "read state", "read grad", "evaluate", "synchronize", "parked"
WRITES = "save", "save", "async save", "move by checkpoint", "move by checkpoint", "move by state_dict"


def draw(seed: int) -> Job:
    dice = random.Random(seed)
    pick = dice.choice
    steps, world, dtype = dice.randint(2, 3), pick((1, 1, 1, 1, 2, 2, 3)), pick(("fp32", "bf16", "bf16", "fp16"))
    accumulation, grows = pick((1, 1, 1, 2)), dice.random() < 0.1
    local = accumulation > 1 and pick((True, False))
    values = [pick(("", "", "", "param", "master", "state", "inf")) if dice.random() < 0.5 else "" for _ in range(steps)]
    if grows:
        values[dice.randrange(1, steps)] = "unfreeze"
    more = pick([*STATE, "AdamW"]), pick((None, 0.5)), dtype == "fp16" and pick((True, False)), pick((True, False, False))
    skips = pick(("", "", "", "step", "rank"))
    stages = [0, *[1] * (local or accumulation == 1), 2] + [3] * 4 * (skips != "rank")
    lives = tuple(draw_life(dice, pick(stages), grows) for _ in range(3))
    acts = tuple((*dice.sample(WRITES[: 6 - grows], pick((0, 1, 1))), *dice.sample(READS, pick((0, 0, 1)))) for _ in range(steps))
    kind = pick(list(FAULTS)) if dice.random() < 0.7 else ""
    number = 1 + int(dice.expovariate(1 / {"reserve": 3, "fsync": 6, "hurt": 0.5}.get(FAULTS[kind], 25)))
    fault = Fault(kind, dice.randrange(world), number, pick((errno.ENOSPC, errno.EIO, errno.EDQUOT)), pick((True, False)))
    return Job(seed, Sums(dtype, world, accumulation, local, *more, skips, tuple(values)), lives, acts, fault)


def draw_life(dice: random.Random, stage: int, grows: bool) -> Life:
    names = ("device", "host", "nvme", "nvme", "nvme", "auto")
    state, param = dice.choice(names), dice.choice(names) if stage == 3 else "device"
    state = "nvme" if (param, state) == ("nvme", "device") else state
    options: dict[str, Any] = {"optimizer_tier": state, "param_tier": param} | ({"growing": True} if grows else {})
    if stage == 3:
        options |= {"prefetch": dice.randint(0, 2), "overlap_step": dice.choice((True, False))}
    if not grows and "nvme" in (param, state) and dice.random() < 0.3:
        options["host_budget"] = dice.randint(250_000, 350_000)  # of which buffers take the most
    if not grows and "auto" in (param, state):
        options |= {"device_budget": dice.randint(60_000, 200_000), "host_budget": dice.randint(250_000, 350_000)}
    return Life(stage, options, dice.random() < 0.5)


# ---- the model, and plain training of it --------------------------------------------------------------------------------------------


class Tiny(nn.Module):
    def __init__(self, sums: Sums) -> None:
        super().__init__()
        self.skips, self.tokens, self.head = sums.skips, nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        wide = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH))
        self.blocks = nn.ModuleList([wide, nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH, bias=False))])
        make = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for param in self.parameters():  # values that all dtypes have: what is frozen keeps no others
                param.copy_(torch.randint(-64, 64, param.shape, generator=make) / 128 + (param.ndim == 1))
        if sums.tied:
            self.head.weight = self.tokens.weight
        if "unfreeze" in sums.acts:
            self.blocks[1].requires_grad_(False)

    def forward(self, ids: Tensor, step: int, rank: int) -> Tensor:
        x = self.tokens(ids)
        for number, block in enumerate(self.blocks):
            if not number or not self.skips or (step + rank * (self.skips == "rank")) % 3 != 1:
                x = x + torch.tanh(block(x))
        return F.cross_entropy(self.head(x).float().view(-1, VOCAB), ids.roll(1, 1).flatten())


@functools.cache
def batch(step: int, micro: int, rank: int) -> Tensor:
    return torch.randint(0, VOCAB, (2, 3), generator=torch.Generator().manual_seed(100 * step + 10 * micro + rank))


def make_inner(name: str, params: list[nn.Parameter]) -> torch.optim.Optimizer:
    groups = [{"params": [p for p in params if p.ndim > 1], "weight_decay": 0.1}, {"params": [p for p in params if p.ndim < 2], "lr": 3e-2}]
    more: dict[str, Any] = {"Adam": {"amsgrad": True}, "SGD": {"momentum": 0.9}}.get(name, {})
    return getattr(torch.optim, name)(groups, lr=1e-2, **more)  # type: ignore[no-any-return]


def is_inf(sums: Sums, step: int, rank: int) -> bool:
    return sums.acts[step] == "inf" and rank == step % sums.world


@functools.lru_cache(4096)
def plain(sums: Sums) -> list[Any]:
    """For each step what is there once the acts before it are done, and its results; and what is there in the end."""
    dtype, model = DTYPES[sums.dtype], Tiny(sums).to(DTYPES[sums.dtype])
    params, scale, clean = list(model.parameters()), 1024.0 if sums.dtype == "fp16" else 1.0, 0
    masters = [nn.Parameter(param.detach().float()) for param in params]
    optimizer, records = make_inner(sums.optimizer, masters), list[Any]()

    def note() -> Any:
        kinds = params, masters, [optimizer.state[master].get(STATE[sums.optimizer]) for master in masters]
        copies = [[None if value is None else value.detach().clone() for value in values] for values in kinds]
        return SimpleNamespace(**dict(zip(("params", "masters", "states"), copies, strict=True)), losses=collections.defaultdict(list))

    for step, act in enumerate(sums.acts):
        param, master = params[3 * step % len(params)], masters[3 * step % len(params)]
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
            loss = model(batch(step, micro, rank), step, rank)
            record.losses[rank].append(loss.item())
            (loss * (math.inf if is_inf(sums, step, rank) else 1) * scale).backward()
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
        if sums.is_dynamic:  # it halves at once, and doubles after two clean steps
            clean = clean + 1 if is_finite else 0
            scale, clean = scale * 2 ** (clean // 2) if is_finite else scale / 2, clean % 2
    return [*records, note()]


def total_of(rows: list[list[Tensor | None]], sums: Sums, dtype: torch.dtype) -> Tensor | None:
    """The gradient of one parameter, of [rank][micro-batch]; None where it has none."""
    there = [grad for row in rows for grad in row if grad is not None]
    if not there:
        return None
    full = [[torch.zeros_like(there[0]) if grad is None else grad for grad in row] for row in rows]
    if sums.local or sums.world == 1:
        added = [functools.reduce(torch.add, (grad.float() for grad in row)) if len(row) > 1 else row[0] for row in full]
        return mean_of_ranks(added, torch.float32 if sums.accumulation > 1 else dtype).float()
    return functools.reduce(torch.add, (mean_of_ranks([*column], dtype).float() for column in zip(*full, strict=True)))


# ---- collectives and drives, and how they fail --------------------------------------------------------------------------------------


class Dead(BaseException):
    """The rank has been killed."""


class Fate:
    """What happens to one rank of a run, and when."""

    def __init__(self, run: Run, rank: int) -> None:
        self.run, self.rank, self.fault, self.counts = run, rank, run.job.fault, collections.Counter[str]()
        self.is_next = self.fault.rank == rank and self.fault.kind != ""

    def meets(self, where: str) -> str:
        """The kind of the fault that comes about here and now."""
        self.counts[where] += 1
        if not self.is_next or FAULTS[self.fault.kind] != where or self.counts[where] < self.fault.number:
            return ""
        self.is_next, self.run.has_failed = False, True
        if self.fault.kind.startswith("die"):
            self.run.lose_power()
            raise Dead
        return self.fault.kind

    def fail(self, where: str) -> None:
        if self.meets(where):
            raise OSError(self.fault.errno, os.strerror(self.fault.errno))


class Fabric:
    """What connects the ranks of one group: the n-th collective of each is one of all."""

    def __init__(self, size: int) -> None:
        self.size, self.changes, self.ended, self.broken, self.mixed = size, threading.Condition(), set[int](), False, ""
        self.meetings = collections.defaultdict[int, dict[int, Any]](dict)


class Group:
    """A process group, as one rank sees it."""

    _device_types = (torch.device("cpu"),)

    def __init__(self, fabric: Fabric, rank: int, fate: Fate | None) -> None:
        self.fabric, self.rank, self.fate, self.count = fabric, rank, fate, 0

    def start(self, what: Any, given: Any, then: Any, is_async: bool = False) -> Any:
        """Send, and wait now or later; ``then`` takes what all have sent."""
        is_failed = self.fate is not None and self.fate.meets("collective") != ""
        with self.fabric.changes:
            self.fabric.broken |= is_failed
            meeting = self.fabric.meetings[self.count]
            self.count += 1
            meeting[self.rank] = what, given.clone() if isinstance(given, Tensor) else given
            self.fabric.changes.notify_all()
        work = SimpleNamespace(wait=functools.partial(self.wait, meeting, then))
        return work if is_async else work.wait()

    def wait(self, meeting: dict[int, Any], then: Any) -> None:
        fabric = self.fabric
        with fabric.changes:
            fabric.changes.wait_for(lambda: fabric.broken or len(meeting) == fabric.size or fabric.ended - meeting.keys(), BOUND_S)
            kinds = {what for what, _ in meeting.values()}
            fabric.mixed = fabric.mixed or f"ranks meet at different collectives: {kinds}" * (len(kinds) > 1)
            if fabric.broken or len(meeting) < fabric.size or fabric.mixed:
                fabric.broken = True
                fabric.changes.notify_all()
                raise RuntimeError("connection closed by peer")
        then([meeting[rank][1] for rank in range(fabric.size)])


def poison(tensor: Tensor) -> None:
    """NaN in all dtypes, until what was asked for is there."""
    tensor.detach().view(-1).view(torch.uint8).fill_(255)


def all_gather(rows: Tensor, values: Tensor, group: Any) -> None:
    group.start(("all_gather", values.numel(), values.dtype), values, lambda given: rows.copy_(torch.cat(given)))


def all_to_all(rows: Tensor, bucket: Tensor, group: Any) -> None:
    take = lambda given: rows.copy_(torch.cat([one.chunk(len(given))[group.rank] for one in given]))  # noqa: E731
    group.start(("all_to_all", bucket.numel(), bucket.dtype), bucket, take)


def broadcast(tensor: Tensor, group: Any, group_src: int, async_op: bool = False) -> Any:
    what, given = ("broadcast", tensor.numel(), tensor.dtype, group_src), tensor.detach().clone()
    if group.rank != group_src:
        poison(tensor)
    return group.start(what, given, lambda values: tensor.detach().copy_(values[group_src].view_as(tensor)), async_op)


DISTRIBUTED = SimpleNamespace(  # what zk.parallel.comm calls of torch's
    ProcessGroup=dist.ProcessGroup,
    is_available=lambda: True,
    is_initialized=lambda: True,
    get_world_size=lambda group: group.fabric.size if group else 1,
    get_rank=lambda group: group.rank if group else 0,
    broadcast=broadcast,
    all_to_all_single=all_to_all,
    all_gather_object=lambda said, value, group: group.start("words", value, lambda given: said.__setitem__(slice(None), given)),
)


class Under(zk.Addon):
    """What a rank stands on: the collectives, and the system calls that reach drives."""

    def __init__(self, group: Group, fate: Fate) -> None:
        self.group, self.fate, self.known = group, fate, set[Any]()

    def comm(self, plain: Any) -> Any:
        return comm.Comm(self.group) if self.group.fabric.size > 1 else plain  # type: ignore[arg-type]

    def tier(self, unit: Any, what: str, tier: Any) -> Any:
        if hasattr(tier, "file") and tier not in self.known:
            self.known.add(tier)
            tier.file.system = self
        return tier

    def preadv(self, descriptor: int, buffers: list[Any], offset: int) -> int:
        if self.fate.fault.kind == "tier read":
            self.fate.fail("read")
        moved = os.preadv(descriptor, self.cut(buffers), offset)
        if self.fate.fault.kind == "lie" and self.fate.meets("read"):
            buffers[0][moved // 2] ^= 16
        return moved

    def pwritev(self, descriptor: int, buffers: list[Any], offset: int) -> int:
        self.fate.fail("write")
        return os.pwritev(descriptor, self.cut(buffers), offset)

    def cut(self, buffers: list[Any]) -> list[Any]:
        return [buffers[0][: max(512, len(buffers[0]) // 1024 * 512)]] if self.fate.fault.kind == "short" else buffers


class Pool(concurrent.futures.ThreadPoolExecutor):
    """Its threads are of the rank that makes it."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given, initializer=lambda kept: vars(ME).update(kept), initargs=(vars(ME).copy(),))


def meeting(where: str, call: Any) -> Any:
    """``call``, before which the fault of this thread's rank may come."""

    def met(*given: Any, **named: Any) -> Any:
        ME.fate.fail(where)
        return call(*given, **named)

    return met


def fsync(descriptor: int) -> None:
    """Note that the drive has it: what it has not is lost with the power."""
    ME.fate.fail("fsync")
    ME.fate.run.synced[os.fstat(descriptor).st_ino] = os.fstat(descriptor).st_size


@contextlib.contextmanager
def simulated() -> Iterator[None]:
    """zk among ranks that are threads, on drives that fail when they should, with small chunks."""
    read_async, threads, level = file.File.read_async, torch.get_num_threads(), zk.logs.log.level

    def poisoned(self: Any, tensor: Tensor, offset: int = 0) -> Any:
        poison(tensor)
        return read_async(self, tensor, offset)

    class Open(weakref.WeakSet[Any]):
        """Threads may make and close optimizers while others look through all."""

        def __iter__(self) -> Any:
            return (one for ref in list(self.data) if (one := ref()) is not None)

    system = SimpleNamespace(preadv=os.preadv, pwritev=os.pwritev, posix_fallocate=meeting("reserve", os.posix_fallocate))
    jobs = SimpleNamespace(SimpleQueue=lambda: LateQueue(ME.fate.run.job.seed) if ME.late else queue.SimpleQueue())
    with contextlib.ExitStack() as stack:
        for where, name, value in (
            *((comm, "dist", DISTRIBUTED), (comm, "_all_gather", all_gather), (save, "PIECE_NUMEL", 1000)),
            *((tier, "chunk_numel", 2048) for tier in (tiers.Tier, drive.Drive)),
            *((contents, "random_state", lambda device: RANDOM), (contents, "restore_random", nothing), (file.File, "read_async", poisoned)),
            *((file, "SYSTEM", system), (file, "queue", jobs), (file, "BLOCK_NBYTES", 2 * file.ALIGN), (file, "THREADS", 2)),
            *((files, "ThreadPoolExecutor", Pool), (save, "ThreadPoolExecutor", Pool)),
            (files, "os", SimpleNamespace(**vars(os) | {"fsync": fsync, "pread": meeting("load", os.pread)})),
            (files.Tensors, "elements", meeting("load", files.Tensors.elements)),
            *((module, "trim", bool) for module in (zk.optimizer, drive, tiers)),
        ):
            stack.enter_context(patch(where, name, value))
        stack.callback(setattr, RUNTIMES, "__class__", weakref.WeakSet)
        RUNTIMES.__class__ = Open
        stack.enter_context(warnings.catch_warnings(action="ignore"))
        stack.callback(torch.set_num_threads, threads)
        stack.callback(zk.logs.log.setLevel, level)
        torch.set_num_threads(1)
        zk.logs.log.setLevel("CRITICAL")
        yield


# ---- a run --------------------------------------------------------------------------------------------------------------------------


class Run:
    """All lives of a job. ``problems``: what zk has broken of its promises."""

    def __init__(self, job: Job) -> None:
        self.job, self.problems, self.has_failed, self.synced = job, list[str](), False, dict[int, int]()
        self.fates = [Fate(self, rank) for rank in range(job.sums.world)]

    def go(self) -> list[str]:
        with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
            self.folder, self.root = Path(folder), Path(folder, "saved")
            ranks = self.live(0, is_resumed=False)
            self.judge(ranks)
            if not self.problems and any(rank.error for rank in ranks):
                promised = min(rank.promised for rank in ranks)
                for fate in self.fates:
                    fate.is_next = False
                ranks = self.live(1, is_resumed=True)
                self.problems += [f"resumed, {rank}" for rank in ranks if rank.error]
                self.problems += [f"resumed at step {r.begun}, and step {promised} had been saved" for r in ranks if r.begun < promised]
                self.problems += [problem for rank in ranks for problem in rank.problems]
        return self.problems

    def live(self, life: int, is_resumed: bool) -> list[Rank]:
        """Start all ranks, and wait for their ends."""
        fabrics = [Fabric(self.job.sums.world) for _ in range(3)]
        ranks = [Rank(self, fabrics, rank, life, is_resumed) for rank in range(self.job.sums.world)]
        threads = [threading.Thread(target=rank.main, daemon=True) for rank in ranks]
        for thread in threads:
            thread.start()
        until = time.monotonic() + BOUND_S
        for rank, thread in zip(ranks, threads, strict=True):
            thread.join(max(0.0, until - time.monotonic()))
            if thread.is_alive():
                where = "".join(traceback.format_stack(sys._current_frames()[thread.ident])[-6:])  # type: ignore[index]
                self.problems.append(f"rank {rank.rank} hangs in step {rank.step}:\n{where}")
        self.problems += [fabric.mixed for fabric in fabrics if fabric.mixed and not self.has_failed]
        return ranks

    def judge(self, ranks: list[Rank]) -> None:
        """Each rank is right, or ends with an error that names the fault, or says that another rank has failed."""
        self.problems += [problem for rank in ranks for problem in rank.problems]
        fault, words = self.job.fault, "another rank is gone"
        own = {"": "-", "short": "-", "hurt": "-", "lie": "differs"}.get(fault.kind, os.strerror(fault.errno))
        own = words if "collective" in fault.kind or "die" in fault.kind else own
        for rank in ranks:
            is_named = self.has_failed and (own in str(rank.error) or (rank.rank != fault.rank and words in str(rank.error)))
            if rank.error and not isinstance(rank.error, Dead) and not is_named:
                self.problems.append(str(rank))

    def lose_power(self) -> None:
        """Keep what the drives have now, as a rank dies: what they were not asked to sync is cut."""
        if self.job.fault.is_recovered and self.root.exists():
            self.root = Path(shutil.copytree(self.root, self.folder / "after", copy_function=self.copy))

    def copy(self, source: str, target: str) -> None:
        data, about = Path(source).read_bytes(), os.stat(source)
        Path(target).write_bytes(data[: len(data) if self.synced.get(about.st_ino) == about.st_size else len(data) // 2])


class Rank:
    """One rank of one or more lives, until it ends."""

    def __init__(self, run: Run, fabrics: list[Fabric], rank: int, life: int, is_resumed: bool) -> None:
        self.run, self.job, self.sums, self.rank, self.life, self.is_resumed = run, run.job, run.job.sums, rank, life, is_resumed
        self.fabrics, self.root, self.fate, self.records = fabrics, run.root, run.fates[rank], plain(run.job.sums)
        self.groups = [Group(fabric, rank, fate) for fabric, fate in zip(fabrics, (self.fate, self.fate, None), strict=True)]
        self.step = self.begun = self.promised = self.pending = self.loads = 0
        self.counted, self.is_saving = [0, 0], False  # steps and those that were skipped; a save is in the background
        self.error: BaseException | None = None
        self.problems: list[str] = []
        self.optimizer: Any = None

    def __str__(self) -> str:
        trace = "".join(traceback.format_exception(self.error)) if self.error else ""
        return f"rank {self.rank} in step {self.step} of life {self.life}: {self.error!r}\n{trace}"

    def main(self) -> None:
        ME.fate, ME.late = self.fate, False
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
        self.step = self.newest() if self.is_resumed else 0
        self.start(Tiny(self.sums))
        if self.step:
            self.begun = self.load()
        while self.step < len(self.sums.acts):
            try:
                self.one_step()
            except Exception as error:
                is_alone = self.sums.world == 1 and self.job.fault.is_recovered and self.promised and self.run.has_failed
                if not is_alone or self.optimizer is None or self.optimizer._runtime not in RUNTIMES:
                    raise
                self.error = error
                self.run.judge([self])
                self.error = None
                self.load()
        self.synced()
        self.optimizer.close()
        self.same("parameters", [*self.model.parameters()], self.records[-1].params)

    def start(self, model: nn.Module) -> None:
        """Make the optimizer of this life."""
        life, sums, self.model, self.optimizer = self.job.lives[self.life], self.sums, model, None
        ME.late = life.late
        if "unfreeze" in sums.acts[: self.step]:
            model.requires_grad_(True)
        needs_drive = {"nvme", "auto"} & {life.options["optimizer_tier"], life.options["param_tier"]}
        options = life.options | ({"nvme_path": str(self.run.folder)} if needs_drive else {})
        dynamic = DynamicLossScale(init=1024.0, window=2, hysteresis=1) if sums.is_dynamic else 1024.0
        options |= {"clip_grad_norm": sums.clip, "loss_scale": dynamic if sums.dtype == "fp16" else None, "num_threads": 1}
        options |= {"stage": life.stage, "dtype": sums.dtype, "addons": [Under(self.groups[0], self.fate)]}
        self.optimizer = zk.ZeroOptimizer(model, make_inner(sums.optimizer, [*model.parameters()]), **options)
        if sums.world > 1:
            save.saver_of(self.optimizer).own = comm.Comm(self.groups[1])  # type: ignore[arg-type]

    def one_step(self) -> None:
        step, sums, acts, record = self.step, self.sums, self.job.acts[self.step], self.records[self.step]
        for act in acts:
            if act in WRITES:
                self.act(act)
        optimizer, losses = self.optimizer, []
        self.change(sums.acts[step])
        for act in acts:
            self.read(act)
        for micro in range(sums.accumulation):
            with optimizer.no_sync() if sums.local and micro < sums.accumulation - 1 else contextlib.nullcontext():
                loss = self.model(batch(step, micro, self.rank), step, self.rank)
                optimizer.backward(loss * math.inf if is_inf(sums, step, self.rank) else loss)
            losses.append(loss.item())
        self.same("losses", [torch.tensor(losses)], [torch.tensor(record.losses[self.rank])])
        at = 3 * step % len(record.params)
        if "read grad" in acts and record.grads[at] is not None:
            with zk.gather([*self.model.parameters()][at], kind="grad") as values:
                self.same("gradient", values, [record.grads[at]])
        optimizer.step()
        optimizer.zero_grad()
        is_skipped = not math.isfinite(record.norm)
        self.step, self.counted = step + 1, [self.counted[0] + (not is_skipped), self.counted[1] + is_skipped]
        found = [optimizer.num_steps, optimizer.skipped_steps]
        if found != self.counted:
            self.note(f"{found} steps and skipped ones are counted, instead of {self.counted}")
        if not is_skipped and not math.isclose(optimizer.norm, record.norm, rel_tol=1e-6):
            self.note(f"the norm is {optimizer.norm} instead of {record.norm}")

    def note(self, problem: str) -> None:
        self.problems.append(f"rank {self.rank}, step {self.step}, life {self.life}: {problem}")

    def same(self, what: str, got: list[Any], want: list[Any]) -> None:
        pairs = enumerate(zip(got, want, strict=True))
        wrong = [n for n, (one, other) in pairs if one.dtype != other.dtype or not torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))]
        if wrong:
            self.note(f"{what} {wrong} differ from plain training's")

    def met(self) -> None:
        """Wait until all ranks are here, as users' programs do."""
        self.groups[2].start("here", None, bool)

    def synced(self) -> None:
        self.optimizer.synchronize()
        self.promised, self.is_saving = max(self.promised, self.pending), False

    def act(self, act: str) -> None:
        """Save, or move to the next life."""
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
            self.start(Tiny(self.sums))
            self.load(folder)

    def newest(self) -> int:
        """The step of the newest checkpoint; 0 without one."""
        if not [*self.root.glob("step-*/manifest.json"), *self.root.glob(".step-*.replaced/manifest.json")]:
            return 0
        return json.loads(Path(files.find(self.root), "manifest.json").read_text())["extra"]["step"]  # type: ignore[no-any-return]

    def load(self, folder: Path | None = None) -> int:
        """Load the newest checkpoint, or one that may be hurt before."""
        self.loads += folder is not None
        if folder is not None and self.job.fault.kind == "hurt" and self.loads == self.job.fault.number:
            self.hurt(folder)
        extra = self.optimizer.load_checkpoint(folder or self.root)
        self.step, self.counted = extra["step"], extra["counted"]
        return self.step

    def hurt(self, folder: Path) -> None:
        """A file of a checkpoint is cut, changed, another or gone: loading is refused, and changes nothing."""
        dice, self.run.has_failed = random.Random(self.job.seed), True
        path, how = dice.choice(sorted(folder.iterdir())), dice.choice(("cut", "flip", "swap", "gone"))
        self.met()
        if self.rank == 0:
            whole = path.read_bytes()
            others = [one for one in sorted(self.root.glob("step-*/*")) if one.suffix == path.suffix and one != path]
            other, at = dice.choice(others).read_bytes() if others else b"", dice.randrange(len(whole))
            flipped = whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :]
            path.unlink()
            if how != "gone":
                path.write_bytes({"cut": whole[:at], "flip": flipped, "swap": other}[how])
        self.met()
        before = self.masters()
        try:
            self.optimizer.load_checkpoint(folder)
            if how in ("cut", "gone"):
                self.note(f"a checkpoint was loaded whose {path.name} is {how}")
        except zk.CheckpointError as error:
            if path.name not in str(error):
                self.note(f"{path.name} is not named (it is {how}): {error}")
            self.same("after a load that was refused, masters", self.masters(), before)
        self.met()
        if self.rank == 0:
            path.write_bytes(whole)
        self.met()

    def masters(self) -> list[Tensor]:
        with zk.gather([param for param in self.model.parameters() if param.requires_grad], kind="master") as values:
            return values

    def change(self, act: str) -> None:
        """What changes values."""
        params, kinds = [*self.model.parameters()], {"param": "param", "master": "master", "state": STATE[self.sums.optimizer]}
        param, kind = params[3 * self.step % len(params)], kinds.get(act)
        if act == "unfreeze":
            self.model.requires_grad_(True)
        if act == "param" and self.is_saving:
            self.synced()  # a save in the background refuses writes from outside, and says so
        if kind == "param" and self.job.lives[self.life].stage < 3 and self.job.seed % 2:
            with torch.no_grad():
                param.mul_(0.5)
        elif kind is not None and (kind == "param" or param.requires_grad):
            with zk.gather(param, kind=kind, write=True) as values, torch.no_grad():
                values[0].mul_(0.5) if self.rank == 0 else values[0].fill_(7.0)

    def read(self, act: str) -> None:
        """What changes nothing."""
        record, params, step = self.records[self.step], [*self.model.parameters()], self.step
        if act == "evaluate":
            with torch.no_grad():
                loss = self.model(batch(step, 0, self.rank), step, self.rank)
            self.same("loss without gradients", [loss], [torch.tensor(record.losses[self.rank][0])])
        if act == "read param":
            with zk.gather(params) as values:
                self.same("parameters", values, record.params)
        if act in ("read master", "read state") and self.sums.acts[step] != "unfreeze":  # which the next forward sees
            kind, want = ("master", record.masters) if act == "read master" else (STATE[self.sums.optimizer], record.states)
            numbers = [n for n, param in enumerate(params) if param.requires_grad and want[n] is not None]
            with zk.gather([params[n] for n in numbers], kind=kind) as values:
                self.same(kind, values, [want[n] for n in numbers])
        if act in ("synchronize", "parked"):
            with self.optimizer.parked(self.run.folder) if act == "parked" else contextlib.nullcontext():
                pass
            self.synced()


# ---- planted defects ----------------------------------------------------------------------------------------------------------------


def nothing(*_: Any, **__: Any) -> None:
    """Leave it out."""


def published_early(folder: Path, final: Path, head: Any, ranks: int, keep: Any) -> None:
    """Give it its name, and ``latest`` too, before the manifest is there."""
    if not final.exists():
        folder.rename(final)
        files.write_durably(final.parent / files.LATEST, f"{final.name}\n".encode())
        final.rename(folder)
    PUBLISH(folder, final, head, ranks, keep)


def skipped_counted(self: Any) -> float:
    """Count the step for the bias correction of Adam, before it is known whether it is one."""
    norm = REDUCE(self)
    for one in self._trained if not math.isfinite(norm) else ():
        one.steps = [steps + 1 for steps in one.steps]
    return norm


PUBLISH, REDUCE, TOTAL = files.publish, zk.ZeroOptimizer._reduce, comm.Comm.total
DEFECTS: dict[str, Any] = {
    "read not awaited": lambda: patch(tiers.HostChunk, "wait", nothing),
    "update not awaited": lambda: patch(store.UnitStore, "wait", nothing),
    "gather not awaited": lambda: patch(comm.Collective, "wait", nothing),
    "rank dropped from sums": lambda: patch(reference, "reduce", lambda rows, out: out.copy_(rows[:-1].float().sum(0) / len(rows))),
    "norm of the own shard": lambda: patch(comm.Comm, "total", lambda self, *given: given[1] if given[0] == "norm" else TOTAL(self, *given)),
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


def find(name: str, seeds: Iterable[int]) -> tuple[str, int | None, str]:
    """The first of ``seeds`` that finds a defect, and what it says."""
    with simulated(), DEFECTS[name]():
        for seed in seeds:
            if problems := Run(draw(seed)).go():
                return name, seed, problems[0]
    return name, None, "not found"


# ---- many jobs ----------------------------------------------------------------------------------------------------------------------


def several(start: int, stop: int) -> tuple[int, int, list[str]]:
    """How many jobs of these seeds met their fault, and what is wrong with which."""
    found, faults = [], 0
    with simulated():
        for seed in range(start, stop):
            one = Run(draw(seed))
            if problems := one.go():
                found.append("\n".join([f"seed {seed}; alone: python -m tests.simulate --first {seed}", *map(str, one.job), *problems]))
            faults += one.has_failed
    gc.collect()  # optimizers of ranks that were killed have threads
    return stop - start, faults, found


def main() -> None:
    """The command line above."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"first": 0, "seeds": 1, "workers": 2}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--defects", nargs="*", metavar="NAME")
    options, begun, count, faults, wrong = parser.parse_args(), time.perf_counter(), 0, 0, 0
    pool = concurrent.futures.ProcessPoolExecutor(options.workers, multiprocessing.get_context("forkserver"))
    if options.defects is not None:
        seeds = range(options.first, options.first + (options.seeds if options.seeds > 1 else 2000))
        for done in concurrent.futures.as_completed([pool.submit(find, name, seeds) for name in options.defects or DEFECTS]):
            name, seed, problem = done.result()
            wrong += seed is None
            print(f"{name:32} {seed!s:>5}  {problem.partition(chr(10))[0][:150]}", flush=True)
        sys.exit(bool(wrong))
    if options.seeds == 1:
        print(*draw(options.first), sep="\n")
    ends = [*range(options.first, options.first + options.seeds, 20), options.first + options.seeds]
    for done in concurrent.futures.as_completed([pool.submit(several, *each) for each in itertools.pairwise(ends)]):
        ran, fired, found = done.result()
        count, faults, wrong = count + ran, faults + fired, wrong + len(found)
        print(*found, sep="\n", end="\n" * bool(found), flush=True)
        print(f"{count} seeds, {faults} met a fault, {wrong} wrong, {time.perf_counter() - begun:.0f} s", file=sys.stderr, flush=True)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
