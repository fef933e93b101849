"""Phases of training: methods of the core that are wrapped from outside, as long as somebody looks."""

from __future__ import annotations

import functools
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from zk.offload.file import Request
from zk.offload.tiers import Event
from zk.parallel.comm import Collective, Comm
from zk.store import UnitStore

Around = Callable[..., AbstractContextManager[Any]]
WAITS: tuple[tuple[str, type, str], ...] = (  # what is waited for, and in which method
    ("drive", Request, "wait"),
    ("link", Event, "wait"),
    ("ranks", Collective, "wait"),
    ("ranks", Comm, "rows"),
    ("update", UnitStore, "wait"),
)
WAITED = Counter[str]()  # ns of threads that train, by what they waited for


def wrap(owner: type, name: str, around: Around) -> Callable[[], None]:
    """Call a method within ``around(...)``, of its arguments; returns what undoes it."""
    before = getattr(owner, name)

    @functools.wraps(before)
    def within(*args: Any, **kwargs: Any) -> Any:
        with around(*args):
            return before(*args, **kwargs)

    setattr(owner, name, within)
    return functools.partial(setattr, owner, name, before)


class Waiting:
    """Adds the time inside to ``WAITED``, unless the thread is one of zk's, beside training."""

    def __init__(self, reason: str, *_: Any):
        self.reason = reason

    def __enter__(self) -> None:
        self.start_ns = time.perf_counter_ns()

    def __exit__(self, *_: Any) -> None:
        if not threading.current_thread().name.startswith("zk-"):
            WAITED[self.reason] += time.perf_counter_ns() - self.start_ns


@functools.cache
def count_waits() -> None:
    """Count waits from now on: whoever never asks for rates pays nothing."""
    for reason, owner, name in WAITS:
        wrap(owner, name, functools.partial(Waiting, reason))
