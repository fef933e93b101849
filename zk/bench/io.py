"""In: a folder on a drive. Out: what zk.offload.nvme.File writes and reads there: whole passes over a file that is gone afterwards."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from zk.bench.clock import Report, Row, copy_gbps, seconds_of
from zk.memory import aligned
from zk.offload.nvme import Engine, File
from zk.offload.tiers import readable

_BUFFER_NBYTES = 64 << 20  # of one request
_BUFFERS = 4
_LEAST_NBYTES = 4096  # what a drive moves at once
_MOST_DEPTH = 1024  # each is a thread


def _requests(nbytes: int) -> Iterator[slice]:
    for start in range(0, nbytes, _BUFFER_NBYTES):
        yield slice(start, min(start + _BUFFER_NBYTES, nbytes))


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


def passes(path: str, nbytes: int, block: int, depth: int, rounds: int) -> tuple[list[float], list[float]]:
    """Sorted seconds of ``rounds`` passes over a file of ``nbytes`` in folder ``path``, written and read, past the page cache if it can be.

    Every byte is compared before anything is timed. OSError if ``path`` is no folder, cannot be written or has no room.
    """
    check_room(path, nbytes)
    buffers = [aligned(min(nbytes, _BUFFER_NBYTES)) for _ in range(_BUFFERS)]
    engine = Engine(depth, block)
    try:
        with tempfile.TemporaryDirectory(dir=path, prefix="zk-bench-") as folder, File(Path(folder) / "io.bin", nbytes, engine=engine) as file:
            _check(file, nbytes, buffers)

            def whole(move: Callable[[Tensor, int], object]) -> None:
                for number, part in enumerate(_requests(nbytes)):
                    move(buffers[number % _BUFFERS][: part.stop - part.start], part.start)
                file.wait()

            return seconds_of(lambda: whole(file.write_async), rounds), seconds_of(lambda: whole(file.read_async), rounds)
    finally:
        engine.close()


def _check(file: File, nbytes: int, buffers: list[Tensor]) -> None:
    """Write other bytes to each part, and see that they come back."""
    for number, part in enumerate(_requests(nbytes)):
        file.write(buffers[0][: part.stop - part.start].fill_(number % 251 + 1), part.start)
    for number, part in enumerate(_requests(nbytes)):
        here = buffers[1][: part.stop - part.start].fill_(0)
        file.read(here, part.start)
        if not bool((here == number % 251 + 1).all()):
            raise OSError(errno.EIO, f"bytes {part.start} to {part.stop} are not what was written there", file.paths[0])


def measure(path: str, nbytes: int = 1 << 30, block: int = 4 << 20, depth: int = 4, rounds: int = 5) -> Report:
    """Write and read passes; the floor is a copy of as many bytes in memory. ValueError and OSError as for ``passes``, or if depth is above 1024."""
    check_room(path, nbytes)
    if depth > _MOST_DEPTH:
        raise ValueError(f"depth, transfers at once, must be at most {_MOST_DEPTH}, as each is a thread; got {depth}: drives are busy with 4 to 64")
    copy = copy_gbps(torch.device("cpu"), min(nbytes, 1 << 29), rounds)
    written, read = passes(path, nbytes, block, depth, rounds)
    rows = [Row(name, seconds, nbytes / copy / 1e9, {"gbps": nbytes / 1e9}) for name, seconds in (("write", written), ("read", read))]
    return Report("io", {"copy_gbps": copy}, rows, {"path": str(path), "nbytes": nbytes, "block_nbytes": block, "depth": depth})
