"""A link of a given speed between host memory and host memory: models of time without a GPU.

    with pretend(ThrottledLink(1e9)):
        ...train...
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TypeVar
from unittest import mock

import torch
from torch import Tensor

from zk.core.events import COMPLETED, Event, Ticket
from zk.core.timeline import Resource, phase
from zk.offload.streams import LINKS, Link, check_copy

CPU = torch.device("cpu")
AnyLink = TypeVar("AnyLink", bound=Link)


@contextlib.contextmanager
def pretend(link: AnyLink) -> Iterator[AnyLink]:
    """Make the CPU a device of its own inside, reached over ``link``."""
    with mock.patch.dict(LINKS, {CPU: link}):
        yield link


class _Flag(Ticket):
    """The end of a copy."""

    def wait(self) -> None:
        if not self.done:
            with phase("wait", "link"):
                super().wait()


class _Lane:
    """One direction: copies one after the other, each as long as its bytes take."""

    def __init__(self, nbytes_per_s: float, resource: Resource) -> None:
        self.nbytes_per_s, self.resource, self.busy_s = nbytes_per_s, resource, 0.0
        self.last: Event = COMPLETED
        self.queue = queue.SimpleQueue[tuple[Tensor, Tensor, tuple[Event, ...], _Flag]]()
        threading.Thread(target=self._run, daemon=True, name=f"zk-twin-{resource}").start()

    def submit(self, target: Tensor, source: Tensor, after: Sequence[Event]) -> Event:
        check_copy(target, source)
        self.last = flag = _Flag()
        self.queue.put((target, source, tuple(after), flag))
        return flag

    def _run(self) -> None:
        while True:
            target, source, after, flag = self.queue.get()
            for event in after:
                event.wait()
            with phase(self.resource, f"{source.nbytes >> 10} KiB"):
                start = time.perf_counter()
                target.copy_(source)
                time.sleep(max(0.0, start + source.nbytes / self.nbytes_per_s - time.perf_counter()))
            self.busy_s += time.perf_counter() - start
            flag.finish()


class ThrottledLink(Link):
    """Moves ``nbytes_per_s`` bytes per second in each direction, both at once."""

    joined = False

    def __init__(self, nbytes_per_s: float) -> None:
        super().__init__(CPU)
        self.down, self.up = _Lane(nbytes_per_s, "offload"), _Lane(nbytes_per_s, "upload")

    def offload(self, host: Tensor, source: Tensor, after: Sequence[Event]) -> Event:
        return self.down.submit(host, source, after)

    def upload(self, target: Tensor, host: Tensor, after: Sequence[Event]) -> Event:
        return self.up.submit(target, host, after)

    def beside(self, after: Sequence[Event]) -> AbstractContextManager[Callable[[], Event]]:
        return super().beside((*after, self.up.last))

    def twin(self) -> Link:
        return self
