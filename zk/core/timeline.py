"""Phases of training: ranges of torch's profiler, and the seconds that training threads wait or update."""

from __future__ import annotations

import collections
import contextlib
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any, Literal

import torch

OF_UNITS = ("forward", "backward", "step", "update", "gather", "reduce")  # ``zk: layers.3 forward``; others ``zk: read 64 KiB``
Resource = Literal["forward", "backward", "step", "update", "gather", "reduce", "upload", "offload", "read", "write", "wait"]
profiles: set[object] = set()  # that record all threads now
_profiled = torch._C._autograd._profiler_enabled  # of the calling thread


class _Thread(threading.local):
    background, inner_ns = False, 0  # works beside training; counted inside the phase that is counted now


_thread = _Thread()
_COUNTED = ("wait", "update")
SPENT = collections.Counter[str]()  # ns of training threads: "update", and waits by reason, such as "wait: drive"


class Clock:
    """Nanoseconds of training, and ``SPENT``; both stand still while the optimizer is parked or loads a checkpoint."""

    def __init__(self) -> None:
        self.away_ns, self.away_spent = 0, collections.Counter[str]()
        self.stands: tuple[int, collections.Counter[str]] | None = None  # time and SPENT where it stopped
        self.rates = weakref.WeakSet[Any]()  # that read it, and restart when counters are loaded

    def read(self) -> tuple[int, collections.Counter[str]]:
        """Nanoseconds, and those spent, by kind."""
        now_ns, spent = self.stands or (time.perf_counter_ns(), collections.Counter(SPENT))
        return now_ns - self.away_ns, spent - self.away_spent

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Stop the clock inside."""
        since, before = self.stands = time.perf_counter_ns(), collections.Counter(SPENT)
        try:
            yield
        finally:
            self.stands = None
            self.away_ns, self.away_spent = self.away_ns + time.perf_counter_ns() - since, self.away_spent + SPENT - before


def in_background() -> None:
    """Leave the calling thread out of ``SPENT``: it works beside training."""
    _thread.background = True


class phase(contextlib.ContextDecorator):  # a verb, as contextlib's are
    """Range of ``resource`` on the calling thread, for a unit, or for what ``name`` says is moved or waited for ("drive", "link: a copy")."""

    def __init__(self, resource: Resource, name: str = "") -> None:
        self.resource, self.name = resource, name

    def __enter__(self) -> None:
        words = (self.name, self.resource) if self.resource in OF_UNITS else (self.resource, self.name)
        self.label = torch.profiler.record_function(f"zk: {' '.join(words)}").__enter__() if profiles or _profiled() else None
        if self.resource in _COUNTED:
            self.outer_ns, _thread.inner_ns = _thread.inner_ns, 0
            self.start_ns = time.perf_counter_ns()

    def __exit__(self, *exc: Any) -> None:
        if self.resource in _COUNTED:
            taken = time.perf_counter_ns() - self.start_ns
            if not _thread.background:
                SPENT["update" if self.resource == "update" else f"wait: {self.name.partition(':')[0]}"] += taken - _thread.inner_ns
            _thread.inner_ns = self.outer_ns + taken
        if self.label is not None:
            self.label.__exit__(None, None, None)
