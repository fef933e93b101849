"""A drive at its worst: transfers run late and in any order, and memory that is being read into holds NaN until they have."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from zk.offload import file
from zk.offload.file import ALIGN, Engine, File, Request


class LateQueue:
    """Gives any of the jobs that wait, and not at once."""

    def __init__(self, seed: int) -> None:
        self.jobs: list[Any] = []
        self.condition, self.random = threading.Condition(), random.Random(seed)

    def put(self, job: Any) -> None:
        with self.condition:
            self.jobs.append(job)
            self.condition.notify()

    def get(self) -> Any:
        with self.condition:
            while not self.jobs:
                self.condition.wait()
            job = self.jobs.pop(self.random.randrange(len(self.jobs)))
        time.sleep(self.random.choice((0, 0, 0.001)))
        return job


class LateEngine(Engine):
    def __init__(self, seed: int) -> None:
        with mock.patch.object(file.queue, "SimpleQueue", {tuple[Request, file.Move] | None: lambda: LateQueue(seed)}):
            super().__init__(num_threads=2, block_nbytes=8 * ALIGN)


@contextlib.contextmanager
def adversarial_drive(seed: int = 0) -> Iterator[None]:
    """Files opened inside use it."""
    engine, read_async = LateEngine(seed), File.read_async

    def poisoned(self: File, tensor: Tensor, offset: int = 0) -> Request:
        tensor.view(torch.uint8).fill_(0xFF)  # NaN in fp32, bf16 and fp16
        return read_async(self, tensor, offset)

    with mock.patch.object(file, "engine_of", lambda pid: engine), mock.patch.object(File, "read_async", poisoned):
        yield
    engine.close()
