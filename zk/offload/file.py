"""Asynchronous files: tensors go to drives and come back while the caller computes.

A request is cut into blocks, and a few threads move each by one ``preadv`` or ``pwritev``, past the
page cache (O_DIRECT) where the file system can. These calls release the GIL. What the drive refuses
raises in ``wait()``, with path, offset, bytes and errno; nothing is reported done before all of it
is.

Sources: ZeRO-Infinity, arXiv 2104.07857, section 6.3; open(2) on O_DIRECT.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import fcntl
import functools
import os
import queue
import tempfile
import threading
import weakref
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor

from zk.logs import rank_log
from zk.memory import aligned, round_up

ALIGN = 4096  # what O_DIRECT asks of addresses, offsets and sizes on every drive in use
BLOCK_NBYTES, THREADS = 4 << 20, 4
PATIENCE_S = 10.0  # with a thread that is to end
NO_RESERVATION = errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS  # EINVAL: of no bytes, too
SYSTEM: Any = os  # whose calls move bytes, each within one block; tests make them fail


class Request:
    """One read or write in flight. Its tensor must stay as it is until ``wait()`` has returned."""

    def __init__(self, what: str, timeout_s: float):
        self.what, self.timeout_s = what, timeout_s
        self.blocks: list[Future[None]] = []

    @property
    def done(self) -> bool:
        """All of it is moved, without an error."""
        return all(block.done() and not block.exception() for block in self.blocks)

    def wait(self) -> None:
        """Return when every byte is moved.

        Raises:
            OSError: if the drive refused, with path, offset, bytes and errno.
            TimeoutError: if it says nothing for ``timeout_s``.
        """
        try:
            errors = [block.exception(self.timeout_s) for block in self.blocks]
        except TimeoutError:
            raise TimeoutError(
                f"{self.what} has not ended after {self.timeout_s:g} s; is the drive still there?"
            ) from None
        for error in filter(None, errors):  # a new one for each who waits, who may add to it
            raise copy.copy(error)


class File:
    """A file without a name, striped over one in each of ``folders``, that ends with the process.

    Args:
        folders: on different drives; blocks go to them in turn.
        nbytes: for which space is reserved now; ``extend`` reserves more.
        timeout_s: how many seconds ``wait`` waits for the drive.

    It moves whole pages, between memory and offsets that are multiples of one. Requests that
    overlap are not ordered: wait for one before the next. ``close()`` waits for those in flight.

    Raises:
        OSError: if a folder cannot be used, or has no room: with needed and free bytes.
    """

    def __init__(
        self, folders: Sequence[str | os.PathLike[str]], nbytes: int = 0, timeout_s: float = 300.0
    ):
        self.nbytes, self.reserved, self.timeout_s, self.pid = 0, 0, timeout_s, os.getpid()
        self.system = SYSTEM
        self.read_nbytes = self.written_nbytes = 0
        self.paths, self.descriptors = [os.fspath(folder) for folder in folders], list[int]()
        self.jobs: Any = queue.SimpleQueue()
        ended: Any = queue.SimpleQueue()
        threads: list[threading.Thread] = []
        self.close = weakref.finalize(self, end, self.jobs, ended, threads, self.descriptors)
        for path in self.paths:
            self.descriptors.append(open_unnamed(path))
        self.extend(nbytes)
        for _ in range(THREADS):
            threads.append(threading.Thread(target=work, args=(self.jobs, ended), daemon=True))
            threads[-1].start()

    def extend(self, nbytes: int) -> int:
        """Reserve space for ``nbytes`` more, zeros; returns the offset of the first."""
        offset = round_up(self.nbytes, ALIGN)
        self.nbytes, start, count = offset + nbytes, self.reserved, len(self.paths)
        self.reserved = round_up(self.nbytes, BLOCK_NBYTES * count) // count  # in each folder
        for path, descriptor in zip(self.paths, self.descriptors, strict=True):
            reserve(descriptor, path, self.reserved, start)
        return offset

    def read_async(self, tensor: Tensor, offset: int = 0) -> Request:
        """Start to fill a tensor in host memory with the bytes at ``offset``."""
        request = self.start("read", tensor, offset)
        self.read_nbytes += tensor.nbytes
        return request

    def write_async(self, tensor: Tensor, offset: int = 0, after: Iterable[Any] = ()) -> Request:
        """Start to write a tensor in host memory, once what is in ``after`` has ended."""
        request = self.start("write", tensor, offset, after)
        self.written_nbytes += tensor.nbytes
        return request

    def start(self, verb: str, tensor: Tensor, offset: int, after: Iterable[Any] = ()) -> Request:
        what = f"{verb} of {tensor.nbytes} bytes at offset {offset} of {', '.join(self.paths)}"
        if self.pid != os.getpid() or not self.close.alive:
            raise RuntimeError(f"{what}, which is closed, or open in the process that forked this")
        if (tensor.data_ptr() | tensor.nbytes | offset) % ALIGN:
            raise ValueError(f"{what} needs whole pages of {ALIGN} bytes, in memory that is aligned")
        first, stop = offset, offset + tensor.nbytes
        if offset < 0 or stop > self.nbytes:
            raise ValueError(f"{what} is outside of its {self.nbytes}")
        # torch refuses what is not contiguous, or not in host memory
        data = tensor.detach().view(-1).view(torch.uint8).numpy().data
        request = Request(f"the {what}", self.timeout_s)
        while offset < stop:
            end = min(stop, offset - offset % BLOCK_NBYTES + BLOCK_NBYTES)
            part, future = data[offset - first : end - first], Future[None]()
            request.blocks.append(future)
            self.jobs.put((future, functools.partial(self.move, verb, part, offset, after)))
            offset = end
        return request

    def move(self, verb: str, data: memoryview, offset: int, after: Iterable[Any]) -> None:
        """Move a part of one block, all of it, on an I/O thread."""
        block, within = divmod(offset, BLOCK_NBYTES)
        row, number = divmod(block, len(self.paths))
        for event in after:
            event.wait()
        call = self.system.pwritev if verb == "write" else self.system.preadv
        moved = 0
        while moved < len(data):
            place = row * BLOCK_NBYTES + within + moved
            what = f"{verb} of {len(data) - moved} bytes at offset {place}"
            try:
                some = call(self.descriptors[number], [data[moved:]], place)
                if some <= 0:
                    raise OSError(errno.EIO, "the file has become shorter")
            except OSError as error:
                why = f"{what} failed ({error.strerror})"
                raise OSError(error.errno, why, self.paths[number]) from None
            moved += some


def work(jobs: Any, ended: Any) -> None:
    """Move blocks, on a thread of its own, until told to end."""
    while (job := jobs.get()) is not None:
        future, move = job
        try:
            future.set_result(move())
        except BaseException as error:
            future.set_exception(error)
        del job, future, move  # and with them the memory, until there is another one
    ended.put(None)


def end(jobs: Any, ended: Any, threads: list[threading.Thread], descriptors: list[int]) -> None:
    """End the threads once all that was asked of them is done, and close.

    A thread still in a call when Python goes away would end the process with SIGABRT, so this runs
    at exit too; one that hangs is left after PATIENCE_S. It joins none: the garbage collector may
    call it while ``threading`` holds a lock that the end of a thread asks for.
    """
    me = threading.get_ident()
    others = [thread for thread in threads if thread.is_alive() and thread.ident != me]
    for _ in threads:
        jobs.put(None)
    with contextlib.suppress(queue.Empty):
        for _ in others:
            ended.get(timeout=PATIENCE_S)
        for descriptor in descriptors:  # none is closed under a call
            os.close(descriptor)


def open_unnamed(folder: str) -> int:
    """A descriptor of a new file, gone when closed; a warning where the page cache is not passed."""
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            descriptor = os.dup(file.fileno())
    except OSError as error:
        why = f"nvme_path must be an existing folder that can be written ({error.strerror})"
        raise OSError(error.errno, why, folder) from None
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_DIRECT)
        os.pwritev(descriptor, [aligned(ALIGN).numpy().data], 0)  # some take the flag, and no more
    except OSError as error:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, 0)
        rank_log.warning(
            "%s does not take O_DIRECT (%s), so transfers take memory and time for the page cache",
            folder,
            error.strerror,
        )
    return descriptor


def reserve(descriptor: int, path: str, stop: int, start: int = 0) -> None:
    """Take the space from ``start`` to ``stop``; OSError, with what is free, where there is none."""
    try:
        SYSTEM.posix_fallocate(descriptor, start, stop - start)
    except OSError as error:
        if error.errno in NO_RESERVATION:
            return os.ftruncate(descriptor, stop)
        drive, needed = os.fstatvfs(descriptor), (stop - start) / 2**20
        free = drive.f_bavail * drive.f_frsize / 2**20
        why = f"{needed:,.1f} MiB are needed and {free:,.1f} MiB are free ({error.strerror})"
        raise OSError(error.errno, why, path) from None
