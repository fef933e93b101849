"""A drive and a worker thread at their worst.

Transfers run late and in any order, and memory that is being read into holds NaN until they have. Jobs begin when somebody waits for one.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterator
from unittest import mock

import torch
from torch import Tensor

from zk.core.events import Ticket
from zk.offload import nvme
from zk.offload.nvme import Engine, File, Request
from zk.offload.worker import Worker

_LATE_S = 0.02


class LateEngine(Engine):
    """Takes any of the transfers that wait, never the next one if there is another, and not at once."""

    def __init__(self, seed: int) -> None:
        self.waiting: list[tuple[Request, Callable[[memoryview], None]]] = []
        self.condition = threading.Condition()
        self.random = random.Random(seed)
        super().__init__(num_threads=2, block_nbytes=8 * nvme.ALIGN)

    def submit(self, request: Request, move: Callable[[memoryview], None]) -> None:
        with self.condition:
            self.waiting.append((request, move))
            self.condition.notify()

    def _run(self) -> None:
        bounce = memoryview(bytearray(self.block_nbytes + nvme.ALIGN))
        start = -torch.frombuffer(bounce, dtype=torch.uint8).data_ptr() % nvme.ALIGN
        while True:
            with self.condition:
                while not self.waiting:
                    self.condition.wait()
                request, move = self.waiting.pop(self.random.randrange(len(self.waiting)))
            time.sleep(self.random.choice((0, 0, 0.001)))
            error: BaseException | None = None
            try:
                move(bounce[start : start + self.block_nbytes])
            except BaseException as failure:
                error = failure
            request._piece_ended(error)


@contextlib.contextmanager
def adversarial_drive(seed: int = 0) -> Iterator[None]:
    """Files opened inside use it."""
    engine, start = LateEngine(seed), File._start

    def poisoned(self: File, tensor: Tensor, offset: int, write: bool) -> Request:
        if not write:
            tensor.view(torch.uint8).fill_(0xFF)  # NaN in fp32, bf16 and fp16
        return start(self, tensor, offset, write)

    with mock.patch.object(nvme, "default_engine", lambda: engine), mock.patch.object(File, "_start", poisoned):
        yield


@contextlib.contextmanager
def late_worker() -> Iterator[None]:
    """Jobs submitted inside begin when somebody waits for one of them, or a little later: who does not wait goes on before they are done."""
    asked, submit, join = threading.Event(), Worker.submit, Ticket.join

    def submit_late(self: Worker, job: Callable[[], None]) -> Ticket:
        def late() -> None:
            asked.wait(_LATE_S)
            job()

        asked.clear()
        return submit(self, late)

    def ask(self: Ticket) -> None:
        asked.set()
        join(self)

    with mock.patch.object(Worker, "submit", submit_late), mock.patch.object(Ticket, "join", ask):
        yield
