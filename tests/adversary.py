"""A drive at its worst: transfers run late and in any order, and memory that is being read into holds NaN until they have."""

import contextlib
import queue
import random
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from zk.offload import file
from zk.offload.file import ALIGN, File, Request


class LateQueue(queue.Queue[Any]):
    """Gives any of the jobs that wait, and not at once."""

    random = random.Random(0)

    def _get(self) -> Any:
        moves = [number for number, job in enumerate(self.queue) if job is not None]
        number = self.random.choice(moves or [0])  # the end comes last
        job = self.queue[number]
        del self.queue[number]
        return job

    def get(self, *given: Any, **how: Any) -> Any:
        job = super().get(*given, **how)
        time.sleep(self.random.choice((0, 0, 0.001)))
        return job


@contextlib.contextmanager
def adversarial_drive() -> Iterator[None]:
    """Files opened inside use it."""
    read_async = File.read_async

    def poisoned(self: File, tensor: Tensor, offset: int = 0) -> Request:
        tensor.view(torch.uint8).fill_(0xFF)  # NaN in fp32, bf16 and fp16
        return read_async(self, tensor, offset)

    with (
        mock.patch.object(file.queue, "SimpleQueue", LateQueue),
        mock.patch.object(file, "BLOCK_NBYTES", 8 * ALIGN),
        mock.patch.object(File, "read_async", poisoned),
    ):
        yield
