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
from zk.offload.file import ALIGN, File, Request


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
            moves = [number for number, job in enumerate(self.jobs) if job is not None]
            job = self.jobs.pop(self.random.choice(moves or [0]))  # the end comes last
        time.sleep(self.random.choice((0, 0, 0.001)))
        return job


@contextlib.contextmanager
def adversarial_drive(seed: int = 0) -> Iterator[None]:
    """Files opened inside use it."""
    read_async = File.read_async

    def poisoned(self: File, tensor: Tensor, offset: int = 0) -> Request:
        tensor.view(torch.uint8).fill_(0xFF)  # NaN in fp32, bf16 and fp16
        return read_async(self, tensor, offset)

    with (
        mock.patch.object(file.queue, "SimpleQueue", lambda: LateQueue(seed)),
        mock.patch.object(file, "BLOCK_NBYTES", 8 * ALIGN),
        mock.patch.object(File, "read_async", poisoned),
    ):
        yield
