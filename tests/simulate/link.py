"""In: copies between a device and the host. Out: the same copies late, each direction in order; what is on its way is NaN."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from tests.simulate.scheduler import Process, Simulation, poison
from zk.core.events import COMPLETED, Awaited, Event
from zk.offload.streams import check_copy


class _Copied:
    """The event of a copy."""

    def __init__(self, simulation: Simulation, name: str) -> None:
        self.simulation, self.name, self.done = simulation, name, False

    def wait(self) -> None:
        self.simulation.maybe(self.name)
        if not self.done:
            self.simulation.pause(self.name, lambda: self.done)


class LateLink:
    """Host memory that is a device of its own: a copy begins when those before it have ended, and takes a while."""

    joined = False

    def __init__(self, simulation: Simulation, process: Process) -> None:
        self.simulation, self.process, self.device = simulation, process, torch.device("cpu")
        self.last: dict[str, Event] = {"offload": COMPLETED, "upload": COMPLETED}

    def mark(self) -> Event:
        return COMPLETED  # a CPU has done what it was asked to

    def follow(self, event: Awaited) -> None:
        event.wait()

    def _copy(self, way: str, target: Tensor, source: Tensor, after: Sequence[Event]) -> Event:
        check_copy(target, source)
        simulation, process = self.simulation, self.process
        copied, before = _Copied(simulation, f"an {way} of {source.numel()}"), (*after, self.last[way])
        self.last[way] = copied
        name = f"{process.name}: {copied.name}"

        def begin() -> None:
            poison(target)
            simulation.act(f"{name} ends", lambda: True, end)

        def end() -> None:
            if process.alive:
                with torch.no_grad():
                    target.copy_(source)
            copied.done = True

        simulation.act(f"{name} begins", lambda: all(event.done for event in before), begin)
        return copied

    def offload(self, host: Tensor, source: Tensor, after: Sequence[Event]) -> Event:
        return self._copy("offload", host, source, after)

    def upload(self, target: Tensor, host: Tensor, after: Sequence[Event]) -> Event:
        return self._copy("upload", target, host, after)

    @contextlib.contextmanager
    def beside(self, after: Sequence[Event]) -> Iterator[Callable[[], Event]]:
        for event in (*after, self.last["upload"]):
            event.wait()
        yield lambda: COMPLETED

    def pin(self, memory: Tensor) -> None:
        return

    def unpin(self, memory: Tensor) -> None:
        for event in self.last.values():
            event.wait()
