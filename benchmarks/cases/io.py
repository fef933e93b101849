"""Files of the nvme tier: whole passes over one in a folder on a drive, past the page cache, which is gone afterwards."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from zk.memory import aligned
from zk.offload.file import File
from zk.placement import readable

from .clock import seconds_of

_BUFFER_NBYTES = 64 << 20  # of one request
_BUFFERS = 4
_LEAST_NBYTES = 4096  # what a drive moves at once


def check_room(path: str, nbytes: int) -> None:
    """OSError if ``path`` is no folder, or has no room; ValueError if that is less than a drive moves at once."""
    if nbytes < _LEAST_NBYTES:
        raise ValueError(f"a file must have at least {_LEAST_NBYTES} bytes to be measured; got {nbytes}: give a larger size, such as 1GiB")
    if not os.path.isdir(path):
        raise NotADirectoryError(errno.ENOTDIR, "files are measured in an existing folder", path)
    found = os.statvfs(path)
    free = found.f_bavail * found.f_frsize
    if nbytes > free:
        raise OSError(errno.ENOSPC, f"{readable(nbytes)} are to be written and {readable(free)} are free; give a smaller size", path)


def passes(path: str, nbytes: int, rounds: int) -> tuple[list[float], list[float]]:
    """Sorted seconds of ``rounds`` passes over a file of ``nbytes`` in folder ``path``, written and read, past the page cache if it can be.

    Every byte is compared before anything is timed. OSError if ``path`` is no folder, cannot be written or has no room.
    """
    check_room(path, nbytes)
    buffers = [aligned(min(nbytes, _BUFFER_NBYTES)) for _ in range(_BUFFERS)]

    def requests() -> Iterator[tuple[int, int, Tensor]]:
        """Number, offset and memory of each request of a pass."""
        for number, start in enumerate(range(0, nbytes, _BUFFER_NBYTES)):
            yield number, start, buffers[number % _BUFFERS][: min(_BUFFER_NBYTES, nbytes - start)]

    with contextlib.ExitStack() as stack:
        file = File([path], nbytes)
        stack.callback(file.close)

        def whole(move: Callable[[Tensor, int], Any]) -> None:
            for request in [move(memory, start) for _, start, memory in requests()]:
                request.wait()

        for number, start, memory in requests():
            file.write_async(memory.fill_(number % 251 + 1), start).wait()
        for number, start, memory in requests():
            file.read_async(memory.fill_(0), start).wait()
            if not bool((memory == number % 251 + 1).all()):
                raise OSError(errno.EIO, f"bytes {start} to {start + len(memory)} are not what was written there", file.paths[0])
        return seconds_of(lambda: whole(file.write_async), rounds), seconds_of(lambda: whole(file.read_async), rounds)
