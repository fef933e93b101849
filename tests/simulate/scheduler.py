"""In: the threads of several pretended processes. Out: one of them runs at a time, and a seed decides which; time is a number.

Every primitive that zk waits with (locks, events, queues, futures, threads, sleep) has a twin here. A thread that comes to one of them may have to
let another one go on, so a run is a row of choices, and the same seed makes the same ones. Beside threads there are actions: what hardware does
by itself once it can, such as a copy. Where nobody can go on, the clock moves to the next deadline; where there is none, the run is stuck,
which is a finding. A process that is killed leaves at the next primitive of each of its threads, and nothing that it does on the way out has
an effect.
"""

from __future__ import annotations

import queue as real_queue
import random
import threading as real_threading
import traceback
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import torch

TICK_S = 1e-6  # of virtual time, for each choice
STEPS = 400_000  # choices after which a run is taken to turn in a circle


class Killed(BaseException):
    """The process of this thread is no more."""


class Process:
    """A pretended process: what Python would keep once for each.

    Args:
        name: for traces.
        pid: what os.getpid() says in it.
        kept: module, attribute and first value of the globals that each process has for itself.
    """

    def __init__(self, name: str, pid: int, kept: Iterable[tuple[Any, str, Callable[[], Any]]] = ()) -> None:
        self.name, self.pid = name, pid
        self.alive, self.frozen_until = True, 0.0
        self.kept = [(module, attribute, make()) for module, attribute, make in kept]
        self.at_exit: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = []
        self.finalizers: list[Any] = []

    def enter(self) -> None:
        """Make the globals those of this process."""
        for module, attribute, value in self.kept:
            setattr(module, attribute, value)


class Task:
    """A thread under the scheduler."""

    def __init__(self, simulation: Simulation, process: Process, name: str, run: Callable[[], None]) -> None:
        self.simulation, self.process, self.name, self.body = simulation, process, name, run
        self.gate = real_threading.Lock()
        self.gate.acquire()
        self.ready: Callable[[], bool] | None = None
        self.deadline: float | None = None
        self.waits_for = ""
        self.timed_out = self.ended = False
        self.interrupted = False  # Ctrl-C has been pressed
        self.priority = simulation.dice.random()
        self.error: BaseException | None = None
        self.thread = real_threading.Thread(target=self._run, name=name, daemon=True)
        self.is_started = False

    def _run(self) -> None:
        self.gate.acquire()
        torch.set_num_threads(1)  # OpenMP asks each thread for itself
        try:
            if self.process.alive:
                self.body()
        except Killed:
            pass  # as it was asked to
        except BaseException as error:
            self.error = error
            if self.process.alive and not isinstance(error, SystemExit):
                self.simulation.found.append(f"the thread {self.name} of {self.process.name} died:\n" + "".join(traceback.format_exception(error)))
        finally:
            self.ended = True
            self.simulation.leave(self)

    def can_run(self, now: float) -> bool:
        """True where the scheduler may choose it."""
        if not self.process.alive or self.interrupted:
            return True
        if now < self.process.frozen_until:
            return False
        return self.ready is None or self.ready() or (self.deadline is not None and now >= self.deadline)


class Action:
    """Something that happens by itself once ``ready`` says that it can."""

    def __init__(self, name: str, ready: Callable[[], bool], run: Callable[[], None]) -> None:
        self.name, self.ready, self.run = name, ready, run


class Simulation:
    """One run. The thread that makes it is its first task.

    Args:
        seed: decides everything that is left open.
        patience_s: of virtual time, after which the run is taken to hang.
    """

    def __init__(self, seed: int, patience_s: float) -> None:
        self.dice = random.Random(seed)
        self.now, self.steps, self.patience_s = 0.0, 0, patience_s
        self.trace: list[str] = []
        self.found: list[str] = []  # what must not be
        self.stuck = ""
        self.tasks: list[Task] = []
        self.actions: list[Action] = []
        self.choosing = False  # what Python drops meanwhile may come to a primitive
        # how often a thread gives way where it need not, and whether some threads go first for long
        self.gives_way = self.dice.choice((0.0, 0.02, 0.1, 0.3))
        self.by_priority = self.dice.random() < 0.4
        self.world = Process("the launcher", 1)
        self.current = Task(self, self.world, "launcher", lambda: None)
        self.current.is_started = True
        self.tasks.append(self.current)

    # ---- choices -------------------------------------------------------------------------------------------------------------

    def note(self, what: str) -> None:
        """Add to the trace."""
        self.trace.append(f"{self.now:.6f} {self.current.process.name}/{self.current.name}: {what}")

    def digest(self) -> str:
        """A checksum of the trace."""
        return f"{zlib.crc32(chr(10).join(self.trace).encode()):08x}"

    def pause(self, what: str, ready: Callable[[], bool] | None = None, timeout_s: float | None = None) -> bool:
        """Let others go on, until ``ready()``; False if ``timeout_s`` have passed before."""
        task = self.current
        task.ready, task.waits_for, task.timed_out = ready, what, False
        task.deadline = None if timeout_s is None else self.now + timeout_s
        self._switch(self._choose())
        if not task.process.alive:
            raise Killed
        if task.interrupted:
            task.interrupted = False
            self.note("is interrupted")
            raise KeyboardInterrupt
        done = task.ready is None or task.ready()
        task.ready = task.deadline = None
        return done

    def maybe(self, what: str) -> None:
        """A point at which another thread may come first."""
        if self.choosing:
            return
        if not self.current.process.alive:
            raise Killed
        if self.current.interrupted or self.current.process.frozen_until > self.now or self.dice.random() < self.gives_way:
            self.pause(what)

    def _choose(self) -> Task:
        """The task that goes on. Actions that come before it are done here."""
        assert not self.choosing, "something waits within an action"
        self.choosing = True
        try:
            return self._chosen()
        finally:
            self.choosing = False

    def _chosen(self) -> Task:
        while True:
            self.now += TICK_S
            self.steps += 1
            if (self.now > self.patience_s or self.steps > STEPS) and not self.stuck:
                self._give_up(f"the run has not ended after {self.now:.0f} s and {self.steps} choices")
            able: list[Task | Action] = [task for task in self.tasks if task.can_run(self.now)]
            dying = [task for task in able if isinstance(task, Task) and not task.process.alive]
            if dying:  # first of all, as they have no part in the run any more
                return dying[0]
            able += [action for action in self.actions if action.ready()]
            if able:
                chosen = self._pick(able)
                if isinstance(chosen, Task):
                    return chosen
                self.actions.remove(chosen)
                self.trace.append(f"{self.now:.6f} {chosen.name}")
                chosen.run()
                continue
            wakes = [max(task.deadline, task.process.frozen_until) for task in self.tasks if task.deadline is not None]
            wakes += [task.process.frozen_until for task in self.tasks if task.process.frozen_until > self.now]
            if wakes:
                self.now = max(self.now, min(wakes))
            else:
                self._give_up("nobody can go on")

    def _pick(self, able: list[Task | Action]) -> Task | Action:
        if not self.by_priority or self.dice.random() < 0.1:
            return able[int(self.dice.random() * len(able))]
        tasks = [one for one in able if isinstance(one, Task)]
        if not tasks or (len(tasks) < len(able) and self.dice.random() < 0.3):
            return able[-1 - int(self.dice.random() * (len(able) - len(tasks)))]
        first = max(tasks, key=lambda task: task.priority)
        if self.dice.random() < 0.02:
            first.priority = self.dice.random()
        return first

    def _give_up(self, why: str) -> None:
        waiting = [f"  {task.process.name}/{task.name} waits for {task.waits_for}" for task in self.tasks if task.process.alive]
        self.stuck = f"{why}:\n" + "\n".join(waiting)
        for task in self.tasks:
            if task.process is not self.world:
                task.process.alive = False
        self.actions.clear()

    def _switch(self, chosen: Task) -> None:
        before = self.current
        if chosen is before:
            return
        self.current = chosen
        if chosen.process is not before.process:
            chosen.process.enter()
        self._let(chosen)
        before.gate.acquire()

    def _let(self, chosen: Task) -> None:
        if chosen.is_started:
            chosen.gate.release()
        else:
            chosen.is_started = True
            chosen.thread.start()
            chosen.gate.release()

    # ---- tasks and processes -------------------------------------------------------------------------------------------------

    def start(self, process: Process, name: str, run: Callable[[], None]) -> Task:
        """A new thread of a process."""
        task = Task(self, process, name, run)
        self.tasks.append(task)
        return task

    def leave(self, task: Task) -> None:
        """Go on with another thread, as this one has ended."""
        self.tasks.remove(task)
        chosen = self._choose()
        self.current = chosen
        if chosen.process is not task.process:
            chosen.process.enter()
        self._let(chosen)

    def kill(self, process: Process) -> None:
        """End a process, as the system does: none of its threads does anything any more."""
        process.alive = False

    def act(self, name: str, ready: Callable[[], bool], run: Callable[[], None]) -> None:
        """Have ``run()`` called some time after ``ready()`` is true."""
        self.actions.append(Action(name, ready, run))

    def drain(self) -> None:
        """Let the threads of processes that are no more end."""
        while any(not task.process.alive for task in self.tasks):
            self.pause("the threads of processes that have ended")


# ---- what threads wait with ------------------------------------------------------------------------------------------------------


def primitives(simulation: Simulation) -> SimpleNamespace:
    """Twins of the modules threading, queue, time and concurrent.futures, and of Future."""
    pause, maybe = simulation.pause, simulation.maybe

    class Lock:
        def __init__(self) -> None:
            self.owner: Task | None = None
            self.depth = 0

        def _free(self) -> bool:
            return self.owner is None

        def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
            maybe("a lock")
            if self.owner is not None and not (blocking and pause("a lock", self._free, None if timeout < 0 else timeout)):
                return False
            self.owner = simulation.current
            return True

        def release(self) -> None:
            assert self.owner is not None, "a lock that nobody has is released"
            self.owner = None

        def locked(self) -> bool:
            return self.owner is not None

        def __enter__(self) -> bool:
            return self.acquire()

        def __exit__(self, *_: object) -> None:
            self.release()

    class RLock(Lock):
        def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
            if self.owner is not simulation.current and not super().acquire(blocking, timeout):
                return False
            self.depth += 1
            return True

        def release(self) -> None:
            assert self.owner is simulation.current, "a lock is released by a thread that does not have it"
            self.depth -= 1
            if not self.depth:
                self.owner = None

    class Event:
        def __init__(self) -> None:
            self.flag = False

        def is_set(self) -> bool:
            return self.flag

        def set(self) -> None:
            self.flag = True
            maybe("to set an event")

        def clear(self) -> None:
            self.flag = False

        def wait(self, timeout: float | None = None) -> bool:
            maybe("an event")
            return self.flag or pause("an event", self.is_set, timeout)

    class Condition:
        def __init__(self, lock: Any = None) -> None:
            self.lock = lock or RLock()
            self.waiters: deque[list[bool]] = deque()
            self.acquire, self.release = self.lock.acquire, self.lock.release

        def __enter__(self) -> Any:
            return self.lock.__enter__()

        def __exit__(self, *error: object) -> None:
            self.lock.__exit__(*error)

        def wait(self, timeout: float | None = None) -> bool:
            assert self.lock.owner is simulation.current, "a condition is waited for without its lock"
            told = [False]
            self.waiters.append(told)
            depth, self.lock.depth, self.lock.owner = self.lock.depth, 0, None
            try:
                return pause("a condition", lambda: told[0], timeout)
            finally:
                if simulation.current.process.alive:
                    if self.lock.owner is not None:
                        pause("the lock of a condition", self.lock._free)
                    self.lock.owner, self.lock.depth = simulation.current, depth
                else:
                    self.lock.owner, self.lock.depth = simulation.current, 1

        def notify(self, n: int = 1) -> None:
            while n and self.waiters:
                self.waiters.popleft()[0] = True
                n -= 1

        def notify_all(self) -> None:
            self.notify(len(self.waiters))

    class Thread:
        def __init__(
            self, group: None = None, target: Any = None, name: str = "a thread", args: Any = (), kwargs: Any = None, *, daemon: bool | None = None
        ) -> None:
            self.name, self.daemon, self.native_id = name, daemon, None  # which no kernel knows
            self.call = (target, args, kwargs or {})
            self.task: Task | None = None

        def run(self) -> None:
            target, args, kwargs = self.call
            target(*args, **kwargs)

        def _run(self) -> None:
            try:
                self.run()
            finally:
                self.call = (None, (), {})

        def start(self) -> None:
            self.task = simulation.start(simulation.current.process, self.name, self._run)
            self.task.twin = self  # type: ignore[attr-defined]
            maybe("to start a thread")

        def is_alive(self) -> bool:
            return self.task is not None and not self.task.ended

        def join(self, timeout: float | None = None) -> None:
            maybe("the end of a thread")
            if self.is_alive():
                pause(f"the end of the thread {self.name}", lambda: not self.is_alive(), timeout)

    class SimpleQueue:
        def __init__(self) -> None:
            self.items: deque[Any] = deque()

        def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
            self.items.append(item)
            maybe("to put something into a queue")

        def get(self, block: bool = True, timeout: float | None = None) -> Any:
            maybe("something from a queue")
            if not self.items and not (block and pause("something from a queue", lambda: bool(self.items), timeout)):
                raise real_queue.Empty
            return self.items.popleft()

        def empty(self) -> bool:
            return not self.items

    class Future:
        def __init__(self) -> None:
            self.event, self.value, self.error = Event(), None, None
            self.callbacks: list[Callable[[Any], object]] = []

        def set_result(self, value: Any) -> None:
            self.value = value
            self._end()

        def set_exception(self, error: Any) -> None:
            self.error = error
            self._end()

        def _end(self) -> None:
            self.event.set()
            for call in self.callbacks:
                call(self)

        def add_done_callback(self, call: Callable[[Any], object]) -> None:
            if self.event.flag:
                call(self)
            else:
                self.callbacks.append(call)

        def done(self) -> bool:
            return self.event.flag

        def result(self, timeout: float | None = None) -> Any:
            if not self.event.wait(timeout):
                raise TimeoutError
            if self.error is not None:
                raise self.error
            return self.value

    class ThreadPoolExecutor:
        def __init__(self, max_workers: int, thread_name_prefix: str = "pool") -> None:
            self.jobs = SimpleQueue()
            self.threads = [Thread(target=self._work, name=f"{thread_name_prefix}-{index}") for index in range(max_workers)]
            for thread in self.threads:
                thread.start()

        def _work(self) -> None:
            while (job := self.jobs.get()) is not None:
                future, function, args = job
                try:
                    value = function(*args)
                except Killed:
                    raise
                except BaseException as error:
                    future.set_exception(error)
                else:
                    future.set_result(value)

        def submit(self, function: Callable[..., Any], *args: Any) -> Any:
            future = Future()
            self.jobs.put((future, function, args))
            return future

        def map(self, function: Callable[..., Any], items: Iterable[Any]) -> Iterator[Any]:
            for future in [self.submit(function, item) for item in items]:
                yield future.result()

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: object) -> None:
            for _thread in self.threads:
                self.jobs.put(None)
            for thread in self.threads:
                thread.join()

    def current_thread() -> Any:
        return getattr(simulation.current, "twin", None) or SimpleNamespace(name=simulation.current.name)

    def sleep(seconds: float) -> None:
        pause("time to pass", lambda: False, seconds)

    def clock() -> float:
        simulation.now += TICK_S
        return simulation.now

    threading = SimpleNamespace(
        Lock=Lock,
        RLock=RLock,
        Event=Event,
        Condition=Condition,
        Thread=Thread,
        current_thread=current_thread,
        get_ident=lambda: id(simulation.current),
    )
    time = SimpleNamespace(sleep=sleep, monotonic=clock, perf_counter=clock, time=clock, perf_counter_ns=lambda: int(clock() * 1e9))
    time.time_ns = time.perf_counter_ns
    queue = SimpleNamespace(SimpleQueue=SimpleQueue, Empty=real_queue.Empty)
    return SimpleNamespace(
        threading=threading,
        time=time,
        queue=queue,
        concurrent=SimpleNamespace(futures=SimpleNamespace(ThreadPoolExecutor=ThreadPoolExecutor, Future=Future)),
        Future=Future,
        Lock=Lock,
        RLock=RLock,
    )


def poison(memory: Any) -> None:
    """Fill a tensor with NaN, or with bytes of ones: what is on its way is not there yet."""
    with torch.no_grad():
        memory.detach().reshape(-1).view(torch.uint8).fill_(0xFF)
