"""Asynchronous files: tensors go to drives and come back while the caller computes.

A request is cut into blocks, and a few threads move each by one ``preadv`` or ``pwritev``, past the
page cache (O_DIRECT) where the file system can. These calls release the GIL. What the drive refuses
raises in ``wait()``, with path, offset, bytes and errno; nothing is reported done before all of it
is, and every block that is read must be what was written there, by its checksum.

Sources: ZeRO-Infinity, arXiv 2104.07857, section 6.3; open(2) on O_DIRECT.
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import errno
import functools
import os
import queue
import secrets
import threading
import weakref
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from zk.logs import rank_log
from zk.memory import aligned, round_up

ALIGN = 4096  # what O_DIRECT asks of addresses, offsets and sizes on every drive in use
NO_DIRECT = errno.EINVAL, errno.EOPNOTSUPP  # of file systems without it
NO_RESERVATION = errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS
Move = Callable[[memoryview], None]

_checksum: Callable[[memoryview], int] = zlib.crc32
with contextlib.suppress(ImportError):  # as fast as memory is read
    from xxhash import xxh3_64_intdigest as _checksum  # type: ignore[no-redef]


class System:
    """The system calls that move bytes: tests make them fail, stall and come up short."""

    preadv = staticmethod(os.preadv)
    pwritev = staticmethod(os.pwritev)
    posix_fallocate = staticmethod(os.posix_fallocate)


SYSTEM = System()


class Awaited(Protocol):
    def wait(self) -> None: ...


class Request:
    """One read or write in flight. Its tensor must stay as it is until ``wait()`` has returned."""

    def __init__(self, what: str, blocks: int, timeout_s: float, after: Awaited | None) -> None:
        self.what, self.timeout_s, self.after = what, timeout_s, after
        self.missing = blocks
        self.lock, self.ended = threading.Lock(), threading.Event()
        self.error: BaseException | None = None
        if not blocks:
            self.ended.set()

    @property
    def done(self) -> bool:
        return self.ended.is_set()

    def wait(self) -> None:
        """Return when every byte is moved.

        Raises:
            OSError: if the drive refused, with path, offset, bytes and errno.
            TimeoutError: if it says nothing for ``timeout_s``.
        """
        if not self.ended.wait(self.timeout_s):
            raise TimeoutError(
                f"{self.what} has not ended after {self.timeout_s:g} s; is the drive still there?"
            )
        if self.error is not None:  # a new one for each who waits, who may add to it
            raise copy.copy(self.error).with_traceback(self.error.__traceback__)

    def move(self, move: Move, bounce: memoryview) -> None:
        """Move one block; once one has failed, the others are left."""
        try:
            if self.error is None:
                if self.after is not None:
                    self.after.wait()
                move(bounce)
        except BaseException as failure:
            self.error = self.error or failure
        with self.lock:
            self.missing -= 1
            if not self.missing:
                self.ended.set()


class Engine:
    """The threads that move blocks of ``block_nbytes``, a multiple of 4096."""

    def __init__(self, num_threads: int = 4, block_nbytes: int = 4 << 20) -> None:
        self.block_nbytes, self.pid = block_nbytes, os.getpid()
        self.jobs = queue.SimpleQueue[tuple[Request, Move] | None]()
        self.threads = [
            threading.Thread(target=self.run, name=f"zk-file-{index}", daemon=True)
            for index in range(num_threads)
        ]
        for thread in self.threads:
            thread.start()

    def run(self) -> None:
        bounce = aligned(self.block_nbytes).numpy().data  # for memory that is not aligned
        while (job := self.jobs.get()) is not None:
            request, move = job
            request.move(move, bounce)
            del job, request, move  # and with them the memory, until there is another one

    def close(self, timeout_s: float | None = None) -> None:
        """End the threads once all that was asked of them is done."""
        if os.getpid() == self.pid:
            for _ in self.threads:
                self.jobs.put(None)
            for thread in self.threads:
                thread.join(timeout_s)


@functools.cache
def engine_of(pid: int) -> Engine:
    """The engine of a process: a forked one has none of its parent's threads."""
    engine = Engine()
    # a thread that is still in a call when Python goes away would end the process with SIGABRT
    atexit.register(engine.close, 10.0)
    return engine


class Checksums:
    """What was written (XXH3, 64 bits), by block; parts that were written over are forgotten."""

    def __init__(self, block_nbytes: int) -> None:
        self.block_nbytes = block_nbytes
        # by block: start, stop and checksum of its parts, which do not overlap
        self.parts = defaultdict[int, list[tuple[int, int, int | None]]](list)
        self.lock = threading.Lock()

    def note(self, offset: int, data: memoryview, value: int | None) -> None:
        """Take the checksum of a part of one block; None: it is not known."""
        start, stop, block = offset, offset + len(data), offset // self.block_nbytes
        with self.lock:
            apart = [part for part in self.parts[block] if part[1] <= start or stop <= part[0]]
            self.parts[block] = [*apart, (start, stop, value)]

    def check(self, path: str, offset: int, data: memoryview) -> None:
        """OSError if ``data``, read at ``offset``, is not what was written there."""
        with self.lock:
            known = self.parts[offset // self.block_nbytes]
        for start, stop, value in known:
            if value is None or start < offset or stop > offset + len(data):
                continue
            if _checksum(data[start - offset : stop - offset]) != value:
                raise OSError(
                    errno.EIO,
                    f"the {stop - start} bytes at offset {start} are not what was written there "
                    "(their checksum differs): the drive, or another process, has changed them",
                    path,
                )


class File:
    """A file without a name, striped over one in each of ``folders``, that ends with the process.

    Args:
        folders: on different drives; blocks go to them in turn.
        nbytes: for which space is reserved now; ``extend`` reserves more.
        checksum: check every block that is read.
        engine: threads to use; None takes those shared by all files.
        timeout_s: how many seconds ``wait`` waits for the drive.

    Any offset, size and memory works; whole pages at page-aligned memory are fastest. Requests that
    overlap are not ordered: wait for one before the next.

    Raises:
        OSError: if a folder cannot be used, or has no room: with needed and free bytes.
    """

    def __init__(
        self,
        folders: Sequence[str | os.PathLike[str]],
        nbytes: int = 0,
        *,
        checksum: bool = True,
        engine: Engine | None = None,
        timeout_s: float = 300.0,
    ) -> None:
        self.nbytes, self.timeout_s = 0, timeout_s
        self.engine = engine or engine_of(os.getpid())
        self.block_nbytes = self.engine.block_nbytes
        self.checksums = Checksums(self.block_nbytes) if checksum else None
        self.read_nbytes = self.written_nbytes = 0
        self.lock, self.in_flight = threading.Lock(), set[Request]()
        self.paths: list[str] = []
        self.cached: list[int] = []  # descriptors, through the page cache: for what is not aligned
        self.direct: list[int] = []  # past it; -1 where the file system cannot
        self.close_descriptors = weakref.finalize(self, close_all, self.direct, self.cached)
        try:
            for folder in folders:
                self.add_stripe(os.fspath(folder))
            self.extend(nbytes)
        except BaseException:
            self.close_descriptors()
            raise

    def add_stripe(self, folder: str) -> None:
        path = os.path.join(folder, f"zk-{os.getpid()}-{secrets.token_hex(8)}")
        flags = os.O_RDWR | os.O_CLOEXEC
        try:
            self.cached.append(os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600))
        except OSError as error:
            why = f"nvme_path must be an existing folder that can be written ({error.strerror})"
            raise OSError(error.errno, why, folder) from None
        try:
            self.paths.append(path)
            self.direct.append(open_direct(path, flags))
        finally:
            os.unlink(path)  # its bytes are there as long as it is open, however this process ends

    def extend(self, nbytes: int) -> int:
        """Reserve space for ``nbytes`` more, zeros; returns the offset of the first."""
        offset = round_up(self.nbytes, ALIGN)
        before, after = (self.stripe_nbytes(stop) for stop in (self.nbytes, offset + nbytes))
        for number, path in enumerate(self.paths):
            reserve(self.cached[number], path, after[number], before[number])
        self.nbytes = offset + nbytes
        return offset

    def stripe_nbytes(self, nbytes: int) -> list[int]:
        """Bytes of each stripe, for ``nbytes`` in all."""
        blocks, count = -(-nbytes // self.block_nbytes), len(self.paths)
        if count == 1:
            return [round_up(nbytes, ALIGN)]
        return [len(range(number, blocks, count)) * self.block_nbytes for number in range(count)]

    # ---- transfers -------------------------------------------------------------------------------

    def read_async(self, tensor: Tensor, offset: int = 0) -> Request:
        """Start to fill a contiguous tensor in host memory with the bytes at ``offset``."""
        return self.start("read", tensor, offset, None)

    def write_async(self, tensor: Tensor, offset: int = 0, after: Awaited | None = None) -> Request:
        """Start to write a contiguous tensor in host memory, once ``after`` has ended."""
        return self.start("write", tensor, offset, after)

    def start(self, verb: str, tensor: Tensor, offset: int, after: Awaited | None) -> Request:
        what = f"{verb} of {tensor.nbytes} bytes at offset {offset} of {', '.join(self.paths)}"
        if self.engine.pid != os.getpid():
            raise RuntimeError(f"{what}, in a forked process: the threads of files are not here")
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            raise ValueError(f"{what} needs a contiguous tensor in host memory")
        if offset < 0 or offset + tensor.nbytes > self.nbytes:
            raise ValueError(f"{what} is outside of its {self.nbytes}")
        data, is_write = tensor.detach().reshape(-1).view(torch.uint8).numpy().data, verb == "write"
        blocks = list(self.blocks(offset, len(data)))
        request = Request(f"the {what}", len(blocks), self.timeout_s, after)
        with self.lock:
            self.in_flight = {other for other in self.in_flight if not other.done} | {request}
            self.written_nbytes += len(data) * is_write
            self.read_nbytes += len(data) * (not is_write)
        for start, stop in blocks:
            part = data[start - offset : stop - offset]
            self.engine.jobs.put((request, functools.partial(self.move, part, start, is_write)))
        return request

    def blocks(self, offset: int, nbytes: int) -> Iterator[tuple[int, int]]:
        """Start and stop of the parts that lie in one block each."""
        start, stop = offset, offset + nbytes
        while start < stop:
            end = min(start - start % self.block_nbytes + self.block_nbytes, stop)
            yield start, end
            start = end

    def move(self, data: memoryview, offset: int, write: bool, bounce: memoryview) -> None:
        """Move a part of one block, all of it, on an I/O thread."""
        block, within = divmod(offset, self.block_nbytes)
        number = block % len(self.paths)
        place = block // len(self.paths) * self.block_nbytes + within
        if write and self.checksums is not None:
            self.checksums.note(offset, data, None)  # until all of it is there
            value = _checksum(data)
        moved = 0
        while moved < len(data):
            moved += self.move_some(data[moved:], number, place + moved, write, bounce)
        if self.checksums is not None and write:
            self.checksums.note(offset, data, value)
        elif self.checksums is not None:
            self.checksums.check(self.paths[number], offset, data)

    def move_some(
        self, rest: memoryview, number: int, place: int, write: bool, bounce: memoryview
    ) -> int:
        """Move what one call can: whole pages past the cache, or the rest of a page through it."""
        descriptor, buffer = self.direct[number], rest[: len(rest) - len(rest) % ALIGN]
        through_bounce = False
        if descriptor < 0:
            descriptor, buffer = self.cached[number], rest
        elif place % ALIGN or not buffer:
            descriptor, buffer = self.cached[number], rest[: ALIGN - place % ALIGN]
        elif np.frombuffer(rest, np.uint8).ctypes.data % ALIGN:
            buffer, through_bounce = bounce[: len(buffer)], True
            if write:
                copy_bytes(buffer, rest[: len(buffer)])
        call: Callable[..., int] = SYSTEM.pwritev if write else SYSTEM.preadv
        path, verb = self.paths[number], "write" if write else "read"
        what = f"{verb} of {len(buffer)} bytes at offset {place}"
        try:
            moved = call(descriptor, [buffer], place)
        except InterruptedError:
            return 0
        except OSError as error:
            raise OSError(error.errno, f"{what} failed ({error.strerror})", path) from None
        if moved <= 0:
            raise OSError(errno.EIO, f"{what} moved none: the file has become shorter", path)
        if through_bounce and not write:
            copy_bytes(rest[:moved], buffer[:moved])
        return moved

    def close(self) -> None:
        """Wait for what is in flight, and give the space back."""
        is_over = all(request.ended.wait(self.timeout_s) for request in list(self.in_flight))
        if is_over:  # a descriptor is not closed under a call
            self.close_descriptors()


def copy_bytes(into: memoryview, source: memoryview) -> None:
    """Copy bytes; numpy lets other threads run meanwhile, and memoryview does not."""
    np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(source, np.uint8))


def close_all(direct: list[int], cached: list[int]) -> None:
    for descriptor in (*direct, *cached):
        if descriptor >= 0:
            os.close(descriptor)
    direct.clear()
    cached.clear()


def open_direct(path: str, flags: int) -> int:
    """A descriptor of a new file that passes the page cache; -1, and a warning, without."""
    descriptor = -1
    try:
        descriptor = os.open(path, flags | os.O_DIRECT)
        os.pwritev(descriptor, [aligned(ALIGN).numpy().data], 0)  # some open it, and no more
        return descriptor
    except OSError as error:
        if descriptor >= 0:
            os.close(descriptor)
        if error.errno not in NO_DIRECT:
            raise
        warn_of_cache(os.path.dirname(path), str(error.strerror))
        return -1


@functools.cache
def warn_of_cache(folder: str, why: str) -> None:
    rank_log.warning(
        "%s does not take O_DIRECT (%s): transfers go through the page cache, which takes memory and "
        "time",
        folder,
        why,
    )


def reserve(descriptor: int, path: str, stop: int, start: int = 0) -> None:
    """Take the space from ``start`` to ``stop``; OSError, with what is free, where there is none."""
    if start == stop:
        return
    try:
        SYSTEM.posix_fallocate(descriptor, start, stop - start)
    except OSError as error:
        if error.errno in NO_RESERVATION:
            return os.ftruncate(descriptor, stop)
        drive = os.statvfs(os.path.dirname(path))
        free = drive.f_bavail * drive.f_frsize
        why = (
            f"{stop - start} bytes ({(stop - start) / 2**20:,.1f} MiB) are needed and {free} "
            f"({free / 2**20:,.1f} MiB) are free ({error.strerror})"
        )
        raise OSError(error.errno, why, path) from None
