"""In: a seed. Out: a whole training job under the scheduler, with the faults that the seed brings, and what about it must not be.

A launcher starts ranks and, when all of them have ended, starts them again until the job is done: they load the newest checkpoint and go on. What
is looked at: losses and parameters are those of plain training, bit for bit; everybody ends; who fails says what went wrong; a
checkpoint that was saved is there, also after a power cut; buffers do not grow; nothing of a run is left on the drive.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import itertools
import logging
import math
import os
import random
import re
import socket
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zk
import zk.logs
from tests.models import VOCAB, batch, loss_of, unlike_the_first
from tests.plain import train_plain
from tests.simulate import drive as drives
from tests.simulate.drive import ROOT, Drive
from tests.simulate.link import LateLink
from tests.simulate.ranks import World, distributed
from tests.simulate.scheduler import Killed, Process, Simulation, primitives
from zk.checkpoint import folders, save
from zk.checkpoint.files import CheckpointError
from zk.core.store import UnitStore
from zk.offload import nvme, spill, streams, transfer, worker
from zk.offload.cpu_adam import default_engine
from zk.parallel import comm, presence

_PID = os.getpid()
STEPS = 4
TIMEOUT_S = 20.0  # of process groups, in virtual time
PATIENCE_S = 3000.0  # of a whole job
ATTEMPTS = 8
SAVED = Path(ROOT) / "saved"
SCRATCH = Path(ROOT) / "scratch"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Model(nn.Module):
    """Two blocks of a few chunks, and what is left over. Variants: plain, tied, frozen (a block), checkpointed."""

    def __init__(self, variant: str) -> None:
        super().__init__()
        self.variant = variant
        self.tokens = nn.Embedding(VOCAB, 32)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(2))
        self.head = nn.Linear(32, VOCAB, bias=False)
        if variant == "tied":
            self.head.weight = self.tokens.weight
        if variant == "frozen":
            self.blocks[0].requires_grad_(False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = x + (checkpoint(block, x, use_reentrant=False) if self.variant == "checkpointed" else block(x))
        logits: Tensor = self.head(x)
        return logits


def make_optimizer(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1)


@functools.cache
def plain(
    variant: str, dtype: str, world: int, accumulation: int, local: bool, clip: float | None
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of the first rank and fp32 values of parameters, in plain torch."""
    torch.manual_seed(0)
    losses, model, masters, _ = train_plain(
        Model(variant), make_optimizer, dtype=DTYPES[dtype], world=world, accumulation=accumulation, local=local, steps=STEPS, clip=clip
    )
    named = zip(model.named_parameters(), masters, strict=True)
    return losses, {name: master if param.requires_grad else param.detach().float() for (name, param), master in named}  # a frozen one has no master


# ---- what a seed decides -------------------------------------------------------------------------------------------------------

# of the drive: the operation, and what becomes of it
TRANSFERS = (
    *itertools.product(("pread", "pwrite"), ("EIO", "EIO", "EINTR", "short", "stall 3", "stall 400")),
    *(("pwrite", "ENOSPC"), ("pwrite", "EIO"), ("pwrite", "EIO"), ("pwrite", "lose"), ("pwrite", "tear"), ("pread", "corrupt"), ("pread", "corrupt")),
)
OTHERS = (
    ("fsync", "EIO"),
    ("fsync", "stall 30"),
    ("fallocate", "ENOSPC"),
    ("rename", "EIO"),
    ("mkdir", "ENOSPC"),
    ("open", "EIO"),
    ("unlink", "EIO"),
)
SILENT = ("lose", "tear")
ENDS = ("kill", "freeze 2", "freeze 12", "freeze 90", "interrupt", "raise", "cut the power")
GONE = r"given this save up|ended, or stands still|has ended|it has ended|Connection closed|is gone|gave up|diverged|did not come|other ranks"
SAYS = {
    "EIO": r"Input/output error|errno 5\b",
    "ENOSPC": r"No space left|are needed and \d+",
    "stall 400": r"has not ended after|Timed out|did not come for|not there after",
    "stall 30": r"Timed out|did not come for|not there after",
    "lose": r"what (was|were) (written|there)|has not kept what|not a whole|is damaged|is missing|CRC|checksum|another checkpoint|cannot be read",
    "kill": GONE,
    "freeze": rf"{GONE}|stands still|Timed out|not there after|does not answer|timeout",
    "interrupt": r"KeyboardInterrupt",
    "raise": r"the user's own error",
}
SAYS |= {"tear": SAYS["lose"], "corrupt": SAYS["lose"], "cut the power": SAYS["kill"]}


@dataclasses.dataclass
class Fault:
    """One thing that goes wrong."""

    what: str
    operation: str  # of the drive, at which it does, and where: "pwrite saved", "load pread saved"; "choice" counts those of the scheduler
    at: int  # how often there was one
    rank: int = 0  # of the process that it befalls
    fired: bool = False

    def __str__(self) -> str:
        return f"{self.what} at {self.operation} {self.at}" + (f", rank {self.rank}" if self.what in ENDS else "")


@dataclasses.dataclass
class Plan:
    """All that a seed decides before the run begins."""

    world: int
    variant: str
    dtype: str
    accumulation: int
    clip: float | None
    is_separate: bool  # the device has memory of its own
    save_every: int
    async_save: bool
    keep: int | None
    retries: bool  # loads again in place after an error
    returns: int  # after this step, once in each attempt, the newest checkpoint is loaded again; 0: never
    insists: bool  # saves after a load that has failed
    closes: bool  # the optimizer, at its end
    settings: list[dict[str, Any]]  # of each attempt
    faults: list[Fault]
    keeper_is_rank: bool

    @classmethod
    def of(cls, seed: int) -> Plan:
        dice = random.Random(f"plan {seed}")
        world = dice.choice((1, 1, 2, 2, 2, 3))
        accumulation = dice.choice((1, 1, 2))
        settings = [_setting(dice) for _ in range(ATTEMPTS)]
        if accumulation > 1:  # what is added up where depends on the stage
            settings = settings[:1] * ATTEMPTS
        faults, returns = [], dice.choice((0, 0, 1, 2, 3))
        for _ in range(dice.choice((0, 1, 1, 1, 2, 2, 3))):
            operation, what = dice.choice(TRANSFERS if dice.random() < 0.75 else OTHERS)
            where, most = dice.choice((("tier", 300), ("saved", 40)))
            if dice.random() < 0.4:
                what = dice.choice(ENDS)
                if dice.random() < 0.5:
                    operation, where, most = "choice", "", 8000
            if returns and operation != "choice" and dice.random() < 0.6:
                operation, most = f"load {operation}", 40
            at = int(math.exp(dice.uniform(math.log(20) if operation == "choice" else 0, math.log(most))))
            faults.append(Fault(what, f"{operation} {where}".strip(), at, dice.randrange(world)))
        if dice.random() < 0.3:  # so that there is something to load
            faults.append(Fault("kill", "choice", int(math.exp(dice.uniform(math.log(300), math.log(4000)))), dice.randrange(world)))
        plan = cls(
            world=world,
            variant=dice.choice(("plain", "plain", "tied", "frozen", "checkpointed")),
            dtype=dice.choice(("fp32", "bf16")),
            accumulation=accumulation,
            clip=dice.choice((None, 0.5)),
            is_separate=dice.random() < 0.5,
            save_every=dice.choice((1, 1, 2)),
            async_save=dice.random() < 0.5,
            keep=dice.choice((None, 1, 2)),
            retries=dice.random() < 0.4,
            returns=returns,
            insists=dice.random() < 0.5,
            closes=dice.random() < 0.5,
            settings=settings,
            faults=faults,
            keeper_is_rank=dice.random() < 0.5,
        )
        if dice.random() < 0.15:  # a drive that goes bad
            plan.faults += [Fault("EIO", "pwrite tier", dice.randrange(1, 150)) for _ in range(3)]
        return plan


def _setting(dice: random.Random) -> dict[str, Any]:
    if dice.random() < 0.15:  # what rests where is chosen by bytes
        stage, budget = dice.choice((1, 2, 3)), dice.choice((340_000, 360_000, 400_000, 1 << 20))
        tiers = {"optimizer_tier": "auto", "param_tier": "auto" if stage == 3 else "device"}
        return {"stage": stage, **tiers, "device_budget": dice.choice((100_000, 200_000)), "host_budget": budget, "overlap_step": False}
    stage, tier = dice.choice((0, 1, 2, 3, 3)), dice.choice(("device", "host", "nvme", "nvme", "nvme"))
    return {
        "stage": stage,
        "optimizer_tier": tier,
        "param_tier": dice.choice(("device", "host", "nvme", "nvme")) if stage == 3 and tier != "device" else "device",
        "overlap": dice.random() < 0.8,
        "overlap_step": tier != "device" and dice.random() < 0.5,
        "prefetch": dice.choice((0, 1, 2)) if stage == 3 else 1,
    }


# ---- one run -------------------------------------------------------------------------------------------------------------------


class _Ordered:
    """A weak set that is walked through in the order of coming."""

    def __init__(self) -> None:
        self.members: list[weakref.ref[Any]] = []

    def add(self, member: Any) -> None:
        self.members = [ref for ref in self.members if ref() is not None] + [weakref.ref(member)]

    def discard(self, member: Any) -> None:
        self.members = [ref for ref in self.members if ref() not in (None, member)]

    def __iter__(self) -> Iterator[Any]:
        return iter([member for ref in self.members if (member := ref()) is not None])

    def __bool__(self) -> bool:
        return any(True for _ in self)

    def clear(self) -> None:
        self.members.clear()


class _Finalizer:
    """A twin of weakref.finalize that belongs to a process."""

    def __init__(self, process: Callable[[], Process], of: Any, call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        self.atexit = True  # as its user sets it
        self.real = weakref.finalize(of, call, *args, **kwargs)
        self.real.atexit = False
        process().finalizers.append(self)

    @property
    def alive(self) -> bool:
        return self.real.alive

    def detach(self) -> Any:
        return self.real.detach()

    def __call__(self) -> Any:
        return self.real()


@dataclasses.dataclass
class Outcome:
    """The result of a run."""

    seed: int
    plan: Plan
    problems: list[str]
    trace: list[str]
    digest: str
    steps: int
    attempts: int
    fired: list[str]


class Job:
    """The job of a seed.

    Args:
        seed: decides everything.
        plan: instead of the seed's own.
    """

    def __init__(self, seed: int, plan: Plan | None = None) -> None:
        self.seed, self.plan = seed, plan or Plan.of(seed)
        self.simulation = Simulation(seed, PATIENCE_S)
        dice = self.simulation.dice
        self.drive = Drive(self.simulation, bypasses_cache=dice.random() < 0.7)
        self.counts: Counter[str] = Counter()
        self.fired: list[Fault] = []
        self.armed: list[Fault] = []
        self.ranks: World | None = None
        self.pids = itertools.count(100)
        self.errors: dict[int, str] = {}  # rank -> what ended it in this attempt
        self.kinds: dict[int, type[BaseException]] = {}
        self.problems = self.simulation.found
        self.saved_step = 0  # on the drive for sure
        self.finished: dict[int, dict[str, Tensor]] = {}
        self.raises: set[int] = set()  # ranks whose next loss fails
        self.exited = 0  # processes that have come to their end
        self.saving = 0  # the step of the last save, if the ranks came to their end
        self.damaged = False  # what was written may not be what is read
        self.attempt = 0
        self.loading: list[Process] = []  # those that load a checkpoint

    # ---- faults --------------------------------------------------------------------------------------------------------------

    def _fault(self, operation: str, path: str) -> str:
        kind = f"{operation} {'saved' if path.startswith(str(SAVED)) else 'tier'}"
        kinds = [kind, f"load {kind}"] if self.simulation.current.process in self.loading else [kind]
        self.counts.update(kinds)
        for fault in self.plan.faults:
            if fault.operation in kinds and not fault.fired and self.counts[fault.operation] >= fault.at:
                if fault.what not in ENDS:
                    self._fire(fault)
                    return fault.what
                if fault not in self.armed:  # some time after this
                    self._arm(fault, lambda: True)
        return ""

    def _fire(self, fault: Fault) -> None:
        fault.fired = True
        self.fired.append(fault)
        self.damaged |= fault.what in SILENT
        self.simulation.note(f"FAULT {fault}")

    def _arm(self, fault: Fault, ready: Callable[[], bool]) -> None:
        """Have something befall a process some time after ``ready()``."""
        self.armed.append(fault)

        def can_happen() -> bool:
            return self.ranks is not None and self.ranks.processes[fault.rank].alive and ready()

        self.simulation.act(str(fault), can_happen, functools.partial(self._befall, fault))

    def _befall(self, fault: Fault) -> None:
        simulation, ranks = self.simulation, self.ranks
        assert ranks is not None
        process = ranks.processes[fault.rank]
        self._fire(fault)
        if fault.what == "kill":
            ranks.leave(process)
            simulation.kill(process)
        elif fault.what.startswith("freeze"):
            process.frozen_until = simulation.now + float(fault.what.split()[1])
        elif fault.what == "interrupt":
            next(task for task in simulation.tasks if task.process is process and task.name == "main").interrupted = True
        elif fault.what == "raise":
            self.raises.add(fault.rank)
        else:
            for each in ranks.processes:
                simulation.kill(each)
            self.drive.cut_power()

    def _has_come_to(self, at: int) -> bool:
        return self.simulation.steps >= at

    # ---- a rank --------------------------------------------------------------------------------------------------------------

    def _rank(self, rank: int, options: dict[str, Any]) -> None:
        """The program of the user, on one rank."""
        plan = self.plan
        torch.manual_seed(0)
        model = Model(plan.variant)
        if rank:
            unlike_the_first(model, rank)
        optimizer = zk.ZeroOptimizer(
            model,
            make_optimizer(list(model.parameters())),
            dtype=DTYPES[plan.dtype],
            clip_grad_norm=plan.clip,
            num_threads=1,
            check_memory=False,
            **options,
            **({"nvme_path": str(SCRATCH), "nvme_checksum": True} if {"nvme", "auto"} & set(options.values()) else {}),
        )
        step = saving = 0
        if folders.latest(SAVED) is not None:
            step = self._load(optimizer, rank)
        failures, has_returned = 0, False
        peak = 0.0
        while step < STEPS:
            try:
                for micro in range(plan.accumulation):
                    loss = loss_of(model, batch(1000 * step + 10 * micro + rank))
                    if rank in self.raises:
                        self.raises.discard(rank)
                        raise RuntimeError("the user's own error")
                    if rank == 0:
                        want = self.want[0][step * plan.accumulation + micro]
                        if loss.item() != want:
                            self.problems.append(f"step {step} has a loss of {loss.item()!r} instead of {want!r}")
                    optimizer.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                step += 1
                if step % plan.save_every == 0:
                    optimizer.save_checkpoint(SAVED, keep=plan.keep, async_save=plan.async_save)
                    if rank == 0:  # the save before this one has ended, and this one if it was not in the background
                        self._is_saved(saving if plan.async_save else step)
                    saving = step
                if step == plan.returns and not has_returned and step >= plan.save_every:
                    has_returned, saving = True, 0
                    step = self._load(optimizer, rank)
            except Exception as error:
                failures += 1
                self.simulation.note(f"step {step} failed: {error}")
                if not plan.retries or failures > 2 or folders.latest(SAVED) is None:
                    raise
                self._explain(rank, error)
                saving = 0
                try:
                    step = self._load(optimizer, rank)
                except Exception as failure:
                    self._explain(rank, failure)
                    optimizer.zero_grad()  # and goes on all the same: what is whole may, what is mixed must be refused
                    if plan.insists:
                        self._insist(optimizer, rank)
            peak = self._check_memory(optimizer, step, peak)
        values = optimizer.consolidated_state_dict("fp32")
        if plan.closes:
            optimizer.close()
        self.finished[rank], self.saving = values, saving

    def _check_memory(self, optimizer: zk.ZeroOptimizer, step: int, peak: float) -> float:
        """Check that host memory keeps to its budget and does not grow from step to step; returns the most so far, from the third step on."""
        metrics = optimizer.metrics()
        used = sum(value for name, value in metrics.items() if name.startswith("host_"))
        budget = optimizer.config.host_budget
        if budget is not None and used > budget:
            self.problems.append(f"{used} bytes of host memory are used at step {step}, of a budget of {budget}: {metrics}")
        if peak and used > 3 * peak:
            self.problems.append(f"{used} bytes of host memory are used at step {step}, and {peak} before")
        return max(peak, used) if step > 1 else 0.0

    def _is_saved(self, step: int) -> None:
        if not self.damaged:
            self.saved_step = max(self.saved_step, step)

    def _insist(self, optimizer: zk.ZeroOptimizer, rank: int) -> None:
        """Save after a load that has failed: what is mixed must not become the newest checkpoint."""
        try:
            optimizer.save_checkpoint(SAVED, keep=self.plan.keep)
        except Exception as error:
            self._explain(rank, error)

    def _load(self, optimizer: zk.ZeroOptimizer, rank: int) -> int:
        process = self.simulation.current.process
        self.loading.append(process)
        try:
            optimizer.load_checkpoint(SAVED)
        finally:
            self.loading.remove(process)
        step = int(optimizer.counters["steps"])
        self.simulation.note(f"goes on from step {step}")
        if step < self.saved_step and not self.damaged:
            self.problems.append(f"step {self.saved_step} was saved, and rank {rank} goes on from step {step}")
        return step

    def _main(self, rank: int, options: dict[str, Any], process: Process) -> None:
        """The process of one rank, from its start to its end."""
        try:
            self._rank(rank, options)
        except (Exception, KeyboardInterrupt) as error:
            self.errors[rank] = f"{type(error).__name__}: {error}"
            self.kinds[rank] = type(error)
            self.simulation.note(f"ends with {self.errors[rank]}")
            has_failed = True
        else:
            has_failed = False
        # the error is gone by now, and with its traceback the optimizer: a process that ends keeps nothing
        with mock.patch.object(sys, "last_type", RuntimeError, create=True) if has_failed else contextlib.nullcontext():
            self._exit(process)

    def _exit(self, process: Process) -> None:
        for call, args, kwargs in reversed(process.at_exit):
            try:
                call(*args, **kwargs)
            except KeyboardInterrupt:  # which Python prints, and goes on; the save that was waited for is given up
                self.saving = 0
        for finalizer in reversed(process.finalizers):
            if finalizer.alive and finalizer.atexit:
                finalizer()
        self.exited += 1
        self._end(process)

    def _end(self, process: Process) -> None:
        """End a process: what it has not done it does not do."""
        if self.ranks is not None:
            self.ranks.leave(process)
        self.simulation.kill(process)
        self.drive.let_go(process)
        for finalizer in process.finalizers:
            finalizer.detach()

    # ---- the launcher --------------------------------------------------------------------------------------------------------

    def _kept(self) -> list[tuple[Any, str, Callable[[], Any]]]:
        """Globals that each process has for itself."""
        return [
            (worker, "_WORKERS", _Ordered),
            (presence, "_ALL", _Ordered),
            (comm, "_GROUPS", _Ordered),
            (comm, "_TRIED", Counter),
            (comm, "_LEFT", weakref.WeakValueDictionary),
            (save, "_UNDER_WAY", set),
            (folders, "_LOCKS", weakref.WeakValueDictionary),
            (streams, "LINKS", dict),
        ]

    def _start(self) -> None:
        """Start the ranks of one attempt, and wait for them."""
        simulation = self.simulation
        options = self.plan.settings[self.attempt]
        processes = [Process(f"rank{rank}.{self.attempt}", next(self.pids), self._kept()) for rank in range(self.plan.world)]
        self.errors, self.kinds, self.finished, self.exited = {}, {}, {}, 0
        self.ranks = World(simulation, processes, TIMEOUT_S, processes[0] if self.plan.keeper_is_rank else simulation.world)
        simulation.note(f"attempt {self.attempt}: {options}")
        tasks = []
        for rank, process in enumerate(processes):
            process.at_exit = [(worker._end_all, (), {}), (presence._end_all, (), {})]
            if self.plan.is_separate:
                links = next(value for module, name, value in process.kept if name == "LINKS")
                links[torch.device("cpu")] = LateLink(simulation, process)
            tasks.append(simulation.start(process, "main", functools.partial(self._main, rank, options, process)))
        simulation.pause("the ranks", lambda: all(task.ended for task in tasks))
        for process in processes:
            self._end(process)
        if len(self.finished) == self.exited == self.plan.world and self.saving:  # at exit, at the latest
            self._is_saved(self.saving)
        simulation.drain()

    def _explain(self, rank: int, error: BaseException | str) -> None:
        """Check that a failure says what has gone wrong."""
        allowed = {pattern for fault in self.fired for kind, pattern in SAYS.items() if fault.what.startswith(kind)}
        allowed |= {GONE} if self.fired else set()
        text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
        if not any(re.search(pattern, text) for pattern in allowed):
            self.problems.append(f"rank {rank} failed, and does not say why ({[str(fault) for fault in self.fired]}): {text}")

    def _between_attempts(self) -> None:
        """Do what an operator does after a failure."""
        for rank, error in self.errors.items():
            self._explain(rank, error)
        newest = folders.latest(SAVED)
        if newest is not None and self.damaged and any(issubclass(kind, CheckpointError) for kind in self.kinds.values()):
            self.simulation.note(f"the operator removes {newest}")
            drives.shutil.rmtree(newest)

    def run(self) -> Outcome:
        """Run the job to its end."""
        plan = self.plan
        local = plan.accumulation > 1 and (plan.world == 1 or plan.settings[0]["stage"] == 1)
        self.want = plain(plan.variant, plan.dtype, plan.world, plan.accumulation, local, plan.clip)
        attempts = 0
        with self._installed():
            os.mkdir(SAVED)
            os.mkdir(SCRATCH)
            self.drive.journal.clear()
            self.drive.faults = self._fault
            for fault in plan.faults:
                if fault.operation == "choice":
                    self._arm(fault, functools.partial(self._has_come_to, fault.at))
            for attempt in range(ATTEMPTS):
                self.attempt, attempts = attempt, attempt + 1
                self._start()
                if self.simulation.stuck or self.problems or len(self.finished) == plan.world:
                    break
                if not any(fault.fired for fault in plan.faults):
                    self.problems.append(f"nothing went wrong, and ranks failed: {self.errors}")
                    break
                self._between_attempts()
            else:
                self.problems.append(f"the job is not done after {ATTEMPTS} attempts: {self.errors}")
            if self.simulation.stuck:
                self.problems.append(self.simulation.stuck)
            elif not self.problems:
                self._check_end()
        simulation, fired = self.simulation, [str(fault) for fault in self.fired]
        return Outcome(self.seed, plan, self.problems, simulation.trace, simulation.digest(), simulation.steps, attempts, fired)

    def _check_end(self) -> None:
        for rank, values in self.finished.items():
            for name, want in self.want[1].items():
                if not torch.equal(values[name], want):
                    self.problems.append(f"rank {rank} ends with another {name} than plain training")
        newest = folders.latest(SAVED)
        reads = ("saved", "tier") if self.plan.async_save else ("saved",)  # a save at exit that fails is logged
        refused = any(fault.operation.endswith(reads) or fault.what == "freeze 90" for fault in self.fired)
        if self.saved_step and not refused and (newest is None or newest < folders.place_of(SAVED, self.saved_step)):
            self.problems.append(f"step {self.saved_step} was saved, and the newest checkpoint is {newest}")
        left = os.listdir(SCRATCH)
        if left and not any(fault.what in ("kill", "cut the power") or fault.operation.startswith("unlink") for fault in self.fired):
            self.problems.append(f"the scratch folder has {left}")

    @contextlib.contextmanager
    def _installed(self) -> Iterator[None]:
        """Context: zk waits with the scheduler's primitives, on the simulated drive, among the simulated ranks."""
        simulation, twins = self.simulation, primitives(self.simulation)
        tokens = random.Random(f"tokens {self.seed}")
        modules = [module for name, module in sorted(sys.modules.items()) if name == "zk" or name.startswith("zk.")]
        dist = distributed(lambda: self.ranks if self.plan.world > 1 else None)
        replaced: dict[str, Any] = {
            "threading": twins.threading,
            "time": twins.time,
            "queue": twins.queue,
            "concurrent": twins.concurrent,
            "Future": twins.Future,
            "dist": dist,
            "weakref": SimpleNamespace(**{**vars(weakref), "finalize": functools.partial(_Finalizer, lambda: simulation.current.process)}),
            "atexit": SimpleNamespace(register=lambda call, *args, **kwargs: simulation.current.process.at_exit.append((call, args, kwargs))),
            "secrets": SimpleNamespace(token_hex=lambda nbytes=4: f"{tokens.getrandbits(8 * nbytes):0{2 * nbytes}x}"),
        }
        engines: weakref.WeakKeyDictionary[Process, nvme.Engine] = weakref.WeakKeyDictionary()

        def engine() -> nvme.Engine:
            process = simulation.current.process
            if process not in engines:
                engines[process] = nvme.Engine(num_threads=2, block_nbytes=2 * nvme.ALIGN)
                process.at_exit.append((engines[process].close, (10.0,), {}))
            return engines[process]

        alive = {simulation.world.pid}

        def begun(pid: int) -> str:
            processes = self.ranks.processes if self.ranks is not None else []
            return "1" if pid in alive or any(process.pid == pid and process.alive for process in processes) else ""

        registered: weakref.WeakSet[Process] = weakref.WeakSet()

        def register_exit() -> None:
            if simulation.current.process not in registered:
                registered.add(simulation.current.process)
                register()

        make_held, register = UnitStore.__init__, save._register.__wrapped__

        def with_locks(held: UnitStore, *args: Any, **kwargs: Any) -> None:
            make_held(held, *args, **kwargs)
            held.lock, held.counting = twins.RLock(), twins.Lock()

        unraisable = sys.unraisablehook
        with contextlib.ExitStack() as stack:
            for module in modules:
                for name, twin in replaced.items():
                    if name in vars(module) and not isinstance(vars(module)[name], (str, int)):
                        stack.enter_context(mock.patch.object(module, name, twin))
            for module, name, make in self._kept():
                stack.enter_context(mock.patch.object(module, name, make()))
            simulation.world.kept = [(module, name, vars(module)[name]) for module, name, _ in self._kept()]
            for module in (nvme, save):
                stack.enter_context(mock.patch.object(module, "default_engine", engine))
            stack.enter_context(mock.patch.object(presence, "_begun", begun))
            stack.enter_context(mock.patch.object(save, "_register", register_exit))
            stack.enter_context(mock.patch.object(UnitStore, "__init__", with_locks))
            stack.enter_context(mock.patch.object(spill, "CHUNK_NUMEL", 2048))
            stack.enter_context(mock.patch.object(transfer, "PIECE_NUMEL", 1024))
            stack.enter_context(mock.patch.object(os, "getpid", lambda: simulation.current.process.pid))
            stack.enter_context(mock.patch.object(os, "register_at_fork", lambda **_: None))
            stack.enter_context(mock.patch.object(socket, "gethostname", lambda: "simulated"))
            stack.enter_context(mock.patch.dict(os.environ, {"ZK_CPU_ADAM": "torch"}))
            stack.enter_context(mock.patch.object(sys, "unraisablehook", lambda what: None if what.exc_type is Killed else unraisable(what)))
            stack.enter_context(drives.installed(self.drive))
            nvme.can_bypass_cache.cache_clear()
            default_engine.cache_clear()
            stack.callback(default_engine.cache_clear)
            stack.callback(nvme.can_bypass_cache.cache_clear)
            logging.disable(logging.CRITICAL)
            stack.callback(logging.disable, logging.NOTSET)
            threads = torch.get_num_threads()
            torch.set_num_threads(1)
            stack.callback(torch.set_num_threads, threads)
            cores = os.sched_getaffinity(0)
            os.sched_setaffinity(0, {sorted(cores)[_PID % len(cores)]})  # threads take turns: three times as fast on one core
            stack.callback(os.sched_setaffinity, 0, cores)
            collects = gc.isenabled()
            gc.disable()  # what it drops, it drops at other points each time
            if collects:
                stack.callback(gc.enable)
            stack.callback(gc.collect)  # what is left, while the drive is there
            yield


def run(seed: int, plan: Plan | None = None) -> Outcome:
    """The job of one seed, from start to end."""
    return Job(seed, plan).run()


def report(outcome: Outcome) -> str:
    """Text to print of a run that went wrong."""
    plan = dataclasses.replace(outcome.plan, settings=outcome.plan.settings[: outcome.attempts])
    head = f"seed {outcome.seed}: trace {outcome.digest}, {outcome.steps} choices, {outcome.attempts} attempts"
    return "\n".join([head, f"  {plan}", f"  fired: {outcome.fired}", *(f"  {problem}" for problem in outcome.problems)])


def several(start: int, stop: int) -> tuple[int, list[str], int]:
    """Run seeds; returns how many, what to say of those that went wrong, and how many faults came about."""
    bad, faults = [], 0
    gc.collect()
    gc.freeze()  # torch's million objects need not be looked at after each run
    for seed in range(start, stop):
        outcome = run(seed)
        faults += len(outcome.fired)
        if outcome.problems:
            bad.append(report(outcome))
    return stop - start, bad, faults
