"""Asynchronous file I/O: bytes of tensors go to files and back, while the caller goes on, at the speed of the drive.

A request is cut into blocks, and a few threads move each with one ``preadv`` or ``pwritev``, past the page cache (O_DIRECT) where the
file system can. These calls release the GIL, so one process keeps as many transfers in flight as it has threads. What the drive
refuses raises in ``wait()``, with path, offset, bytes and errno; nothing is reported done before all of it is.

Usable alone:

```python
with File("/scratch/weights.bin", nbytes=tensor.nbytes) as file:
    request = file.write_async(tensor, offset=0)
    ...
    request.wait()
```

Sources: ZeRO-Infinity, arXiv 2104.07857, section 6.3; open(2) on O_DIRECT.
"""

from __future__ import annotations

import atexit
import bisect
import contextlib
import copy
import dataclasses
import errno
import functools
import itertools
import operator
import os
import queue
import secrets
import threading
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from zk.core.events import Ticket
from zk.core.logs import rank_log
from zk.core.memory import aligned
from zk.core.timeline import phase

# what O_DIRECT asks of addresses, offsets and sizes on every drive in use
ALIGN = 4096
_NO_DIRECT = errno.EINVAL, errno.EOPNOTSUPP  # of file systems without it
__all__ = ["Engine", "File", "Request", "aligned"]


class System:
    """The system calls that move bytes, in one place so that tests can make them fail, stall and come up short."""

    preadv = staticmethod(os.preadv)
    pwritev = staticmethod(os.pwritev)
    posix_fallocate = staticmethod(os.posix_fallocate)


SYSTEM = System()


def round_up(nbytes: int, multiple: int = ALIGN) -> int:
    """The smallest multiple of ``multiple`` that is at least ``nbytes``."""
    return -(-nbytes // multiple) * multiple


@functools.cache
def can_bypass_cache(directory: str) -> bool:
    """Tell if files in ``directory`` take O_DIRECT; tried once for each directory, with one warning where they do not."""
    probe = os.path.join(directory, f".zk-probe-{secrets.token_hex(8)}")
    buffer = aligned(ALIGN).numpy().data
    try:
        descriptor = os.open(probe, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECT | os.O_CLOEXEC, 0o600)
        try:
            return os.pwritev(descriptor, [buffer], 0) == ALIGN and os.preadv(descriptor, [buffer], 0) == ALIGN
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in _NO_DIRECT:
            raise
        rank_log.warning(
            "%s does not take O_DIRECT (%s): transfers go through the page cache, which takes memory and time", directory, error.strerror
        )
        return False
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(probe)


class Request(Ticket):
    """One read or write in flight. The tensor must stay as it is until ``wait()`` has returned."""

    def __init__(self, what: str, pieces: int, timeout_s: float, check: Callable[[], None] | None) -> None:
        super().__init__()
        self.what, self.timeout_s, self.check = what, timeout_s, check
        self.pieces, self.begun, self.ended = pieces, 0, 0
        self.reported = False  # somebody has waited for it
        self.lock = threading.Lock()
        if not pieces:
            self.finish()

    def wait(self) -> None:
        """Return when every byte is moved.

        Raises:
            OSError: if the drive refused, with path, offset, bytes and errno.
            TimeoutError: if it says nothing for ``timeout_s``.
        """
        if not self.event.wait(self.timeout_s):
            raise TimeoutError(f"{self.what} has not ended after {self.timeout_s:g} s; is the drive still there?")
        self.reported = True
        if self.error is not None:
            # a new one each time: whoever waits first notes on it who has heard of it, which is not so of the next
            raise copy.copy(self.error).with_traceback(self.error.__traceback__)

    def _begin(self) -> bool:
        """Take a piece; False where no more are to be moved."""
        with self.lock:
            is_wanted = self.begun < self.pieces
            self.begun += is_wanted
            return is_wanted

    def _give_up(self, error: BaseException) -> None:
        """No more pieces come, and those that no thread has begun with are not moved. Whoever made the request hears of ``error``."""
        with self.lock:
            self.pieces, self.reported = self.begun, True
            self.error = self.error or OSError(errno.ECANCELED, f"{self.what} was given up ({type(error).__name__})")
            if self.ended == self.pieces:
                self.event.set()

    def _piece_ended(self, error: BaseException | None) -> None:
        with self.lock:
            self.error = self.error or error
            self.ended += 1
            is_last = self.ended == self.pieces
        if is_last:
            try:
                if self.check is not None and self.error is None:
                    self.check()
            except BaseException as failure:
                self.error = failure
            self.event.set()


class Engine:
    """The threads that move blocks.

    Args:
        num_threads: transfers in flight at once (the queue depth).
        block_nbytes: largest transfer; requests are cut into pieces of it. A multiple of 4096.
    """

    def __init__(self, num_threads: int = 4, block_nbytes: int = 4 << 20) -> None:
        if num_threads < 1 or block_nbytes < ALIGN or block_nbytes % ALIGN:
            raise ValueError(f"an engine needs num_threads >= 1 and block_nbytes a multiple of {ALIGN}; got {num_threads}, {block_nbytes}")
        self.num_threads, self.block_nbytes = num_threads, block_nbytes
        self.closed, self.pid = False, os.getpid()
        self.jobs: queue.SimpleQueue[tuple[Request, Callable[[memoryview], None]] | None] = queue.SimpleQueue()
        self.threads = [threading.Thread(target=self._run, name=f"zk-nvme-{index}", daemon=True) for index in range(num_threads)]
        for thread in self.threads:
            thread.start()

    def submit(self, request: Request, move: Callable[[memoryview], None]) -> None:
        """Call ``move(bounce)`` on one of the threads; ``bounce`` is that thread's own aligned block."""
        self.jobs.put((request, move))

    def check(self) -> None:
        """RuntimeError if there are no threads to move anything."""
        if self.closed or os.getpid() != self.pid:
            reason = "was closed" if self.closed else "belongs to the process that forked this one; open the file again here"
            raise RuntimeError(f"this engine {reason}, so nothing would move the bytes")

    def _run(self) -> None:
        bounce = aligned(self.block_nbytes).numpy().data
        while (job := self.jobs.get()) is not None:
            request, move = job
            if not request._begin():
                continue
            error: BaseException | None = None
            try:
                if request.error is None:  # one that failed is not carried on with
                    move(bounce)
            except BaseException as failure:
                error = failure
            request._piece_ended(error)

    def close(self, timeout_s: float | None = None) -> None:
        """End the threads once all that was submitted is done; with ``timeout_s``, wait no longer than that for each."""
        if self.closed or os.getpid() != self.pid:
            return
        self.closed = True
        for _ in self.threads:
            self.jobs.put(None)
        for thread in self.threads:
            thread.join(timeout_s)


def default_engine() -> Engine:
    """The engine of files that are not given one, shared by this process."""
    return _engine_of(os.getpid())


@functools.cache
def _engine_of(pid: int) -> Engine:
    """A forked child has none of its parent's threads, and gets its own."""
    engine = Engine()
    atexit.register(engine.close, 10.0)  # a thread that is still in a call when Python goes away would end the process with SIGABRT
    return engine


_checksum: Callable[[memoryview], int] = zlib.crc32
with contextlib.suppress(ImportError):  # as fast as memory is read, five times as fast as that
    from xxhash import xxh3_64_intdigest as _checksum  # type: ignore[no-redef]


class _Checksums:
    """A checksum of what was written (XXH3, 64 bits), by place; a place that was written again in other pieces is forgotten.

    Args:
        cuts: offsets that no checksum reaches over, as what is read begins there.
    """

    def __init__(self, cuts: Iterable[int]) -> None:
        self.cuts = sorted(set(cuts))
        self.parts: list[tuple[int, int, int]] = []  # start, stop and checksum of each, in order and apart
        self.lock = threading.Lock()

    def _touched(self, start: int, stop: int) -> slice:
        """The parts that have some of these bytes."""
        first = bisect.bisect_right(self.parts, start, key=operator.itemgetter(1))
        return slice(first, bisect.bisect_left(self.parts, stop, key=operator.itemgetter(0)))

    def forget(self, start: int, stop: int) -> None:
        with self.lock:
            del self.parts[self._touched(start, stop)]

    def of(self, offset: int, data: memoryview, known: bool = True) -> list[tuple[int, int, int]]:
        """Compute those of ``data`` at ``offset``: start, stop and checksum of each part, or of those alone that have none yet."""
        stop = offset + len(data)
        inside = self.cuts[bisect.bisect_right(self.cuts, offset) : bisect.bisect_left(self.cuts, stop)]
        with self.lock:
            passed_over = set() if known else {part[0] for part in self.parts[self._touched(offset, stop)]}
        return [
            (start, end, _checksum(data[start - offset : end - offset]))
            for start, end in itertools.pairwise((offset, *inside, stop))
            if start not in passed_over
        ]

    def note(self, parts: list[tuple[int, int, int]]) -> None:
        with self.lock:
            for part in parts:
                self.parts[self._touched(*part[:2])] = [part]

    def check(self, path: Callable[[int], str], offset: int, data: memoryview, were: str = "written", remedy: str = "") -> None:
        """OSError for a part of ``data`` that is not what it was; ``path`` gives the file of an offset."""
        stop = offset + len(data)
        with self.lock:
            known = self.parts[self._touched(offset, stop)]
        for start, end, checksum in known:
            if offset <= start and end <= stop and _checksum(data[start - offset : end - offset]) != checksum:
                raise OSError(
                    errno.EIO,
                    f"the {end - start} bytes at offset {start} are not what was {were} there (their checksum differs): the drive, or another "
                    f"process, has changed them{remedy}",
                    path(start),
                )


def _copy(into: memoryview, source: memoryview) -> None:
    """Copy bytes.

    numpy lets other threads run meanwhile, and an assignment to a memoryview does not: parameters that are read from files of the user's, where
    they lie as the user has put them, all come this way.
    """
    np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(source, np.uint8))


def _close_all(direct: list[int], cached: list[int]) -> None:
    for descriptor in (*direct, *cached):
        if descriptor >= 0:
            os.close(descriptor)
    direct.clear()
    cached.clear()


class File:
    """One file, or one striped over several, read and written by tensors at byte offsets.

    Args:
        paths: a path, or several (on different drives) to stripe over, block by block.
        nbytes: size in all. Given, the file is created if need be, readable by its owner only, and its space is reserved now, in whole
            pages of 4096 bytes; None opens what is there.
        writable: False opens existing files for reading only.
        checksum: keep a checksum of every piece written and check it when the piece is read: all of it, as a part of one says nothing.
        cuts: byte offsets at which pieces begin that are written together and read apart, for ``checksum``.
        engine: threads to use; None takes those shared by all files.
        timeout_s: how many seconds ``wait`` waits for the drive.

    Any offset, size and memory works; whole pages at page-aligned memory (``aligned``) are fastest. Requests that overlap are not
    ordered: wait for one before the next.

    Raises:
        OSError: if the file cannot be opened or its space not be had (needed and free bytes are in the message).
        ValueError: for no path, one path twice, or a size that has no meaning.
    """

    def __init__(
        self,
        paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        nbytes: int | None = None,
        *,
        writable: bool = True,
        checksum: bool = False,
        cuts: Iterable[int] = (),
        engine: Engine | None = None,
        timeout_s: float = 300.0,
    ) -> None:
        given = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
        if not given:
            raise ValueError("a File needs at least one path; got an empty sequence")
        if nbytes is not None and (not 0 <= nbytes < 1 << 62 or not writable):
            raise ValueError(f"nbytes must be 0 or more, and a size can be given only to a writable file; got {nbytes}, writable={writable}")
        self.paths = [os.fspath(path) for path in given]
        if len({os.path.realpath(path) for path in self.paths}) < len(self.paths):
            raise ValueError(f"each path to stripe over must be another file; got {self.paths}")
        self.engine, self.timeout_s, self.writable = engine or default_engine(), timeout_s, writable
        self.checksums = _Checksums(cuts) if checksum else None
        self.direct: list[int] = []  # descriptors with O_DIRECT, one for each path; -1 without
        self.cached: list[int] = []  # descriptors that go through the page cache, for what is not aligned
        self._close_descriptors = weakref.finalize(self, _close_all, self.direct, self.cached)
        self.closed = False
        self.lock, self.pending = threading.Lock(), list[Request]()
        self.read_nbytes = self.written_nbytes = 0
        made: list[str] = []
        try:
            for path in self.paths:
                made += [path] if nbytes is not None and not os.path.exists(path) else []
                self._open(path, create=nbytes is not None)
            if nbytes is not None:
                for stripe in range(len(self.paths)):
                    self._reserve(stripe, self._stripe_nbytes(stripe, nbytes))
        except BaseException:
            self._close_descriptors()
            for path in made:
                with contextlib.suppress(OSError):
                    os.unlink(path)
            raise
        self.nbytes = nbytes if nbytes is not None else sum(os.fstat(descriptor).st_size for descriptor in self.cached)

    # ---- opening -------------------------------------------------------------------------------------------------------------

    def _open(self, path: str, create: bool) -> None:
        flags = (os.O_RDWR if self.writable else os.O_RDONLY) | os.O_CLOEXEC
        self.cached.append(os.open(path, flags | (os.O_CREAT if create else 0), 0o600))
        directory = os.path.dirname(os.path.abspath(path))
        bypass = os.access(directory, os.W_OK) and can_bypass_cache(directory)
        self.direct.append(os.open(path, flags | os.O_DIRECT) if bypass else -1)

    def _stripe_nbytes(self, stripe: int, nbytes: int) -> int:
        blocks, count = -(-nbytes // self.engine.block_nbytes), len(self.paths)
        own = len(range(stripe, blocks, count)) * self.engine.block_nbytes
        return own if count > 1 else round_up(nbytes)

    def _reserve(self, stripe: int, nbytes: int) -> None:
        if not nbytes:
            return
        path, descriptor = self.paths[stripe], self.cached[stripe]
        existed = os.fstat(descriptor).st_size
        try:
            SYSTEM.posix_fallocate(descriptor, 0, nbytes)
        except OSError as error:
            if error.errno in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                os.ftruncate(descriptor, max(existed, nbytes))
                return
            why = f"reserving {nbytes} bytes failed ({error.strerror})"
            if error.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
                os.ftruncate(descriptor, existed)
                drive = os.statvfs(os.path.dirname(os.path.abspath(path)))
                free = drive.f_bavail * drive.f_frsize
                why = (
                    f"{nbytes} bytes ({nbytes / 2**20:,.1f} MiB) are needed and {free} ({free / 2**20:,.1f} MiB) are free "
                    f"({os.strerror(error.errno)})"
                )
            raise OSError(error.errno, why, path) from None

    # ---- transfers -----------------------------------------------------------------------------------------------------------

    def read_async(self, tensor: Tensor, offset: int = 0) -> Request:
        """Start to fill a tensor, and return.

        Args:
            tensor: in host memory, contiguous, any shape and dtype.
            offset: of its first byte, in the file.

        Raises:
            ValueError: for another tensor, or bytes outside the file. What the drive refuses raises in the request's ``wait()``.
        """
        return self._start(tensor, offset, write=False)

    def write_async(self, tensor: Tensor, offset: int = 0) -> Request:
        """Start to write the bytes of a tensor, and return.

        Args:
            tensor: in host memory, contiguous, any shape and dtype; it must stay as it is until the request's ``wait()`` has returned.
            offset: of its first byte, in the file.

        Raises:
            ValueError: for another tensor, or bytes outside the file. What the drive refuses raises in the request's ``wait()``.
        """
        return self._start(tensor, offset, write=True)

    def read(self, tensor: Tensor, offset: int = 0) -> None:
        """Fill ``tensor`` and return; raises OSError."""
        self.read_async(tensor, offset).wait()

    def write(self, tensor: Tensor, offset: int = 0) -> None:
        """Write ``tensor`` and return; raises OSError."""
        self.write_async(tensor, offset).wait()

    def wait(self) -> None:
        """Return when nothing is in flight; raises the first error that nobody has waited for yet."""
        with self.lock:
            pending, self.pending = self.pending, []
        failure: BaseException | None = None
        for request in pending:
            known = request.reported
            try:
                request.wait()
            except OSError as error:
                failure = failure or (None if known else error)
        if failure is not None:
            raise failure

    def flush(self) -> None:
        """``wait()``, and then make the drive keep what was written (fsync)."""
        self.wait()
        for descriptor in self.cached:
            os.fsync(descriptor)

    def _start(self, tensor: Tensor, offset: int, write: bool) -> Request:
        verb, where = "write" if write else "read", ", ".join(self.paths)
        if self.closed:
            raise ValueError(f"{verb} on a closed file: {where}")
        self.engine.check()
        if write and not self.writable:
            raise ValueError(f"write on a file opened for reading: {where}")
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            raise ValueError(f"{verb} needs a contiguous tensor in host memory; got {tuple(tensor.shape)} on {tensor.device}")
        if offset < 0 or offset + tensor.nbytes > self.nbytes:
            raise ValueError(f"{verb} of {tensor.nbytes} bytes at offset {offset} is outside the {self.nbytes} bytes of {where}")
        data = tensor.detach().reshape(-1).view(torch.uint8).numpy().data
        pieces = list(self._cut(offset, data))
        if self.checksums is not None and write:
            self.checksums.forget(offset, offset + len(data))
        check = functools.partial(self._check, offset, data) if self.checksums is not None and not write else None
        request = Request(f"the {verb} of {len(data)} bytes at offset {offset} of {where}", len(pieces), self.timeout_s, check)
        try:
            with self.lock:
                self.pending = [other for other in self.pending if not other.done or (other.error is not None and not other.reported)]
                self.pending.append(request)
                if write:
                    self.written_nbytes += len(data)
                else:
                    self.read_nbytes += sum(stop - start for start, stop in pieces)
            for start, stop in pieces:
                self.engine.submit(request, functools.partial(self._move, data[start:stop], offset + start, write))
        except BaseException as error:  # Ctrl-C, say: whoever closes the file must not wait for what will not come
            request._give_up(error)
            raise
        return request

    def _cut(self, offset: int, data: memoryview) -> Iterator[tuple[int, int]]:
        """The pieces in which ``data`` is moved: start and stop of each."""
        return self._blocks(offset, 0, len(data))

    def _blocks(self, offset: int, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Cut what lies from ``offset + start`` on at multiples of the block in its file, so that no piece crosses stripes."""
        block = self.engine.block_nbytes
        while start < stop:
            end = min(start + block - self._locate(offset + start)[1] % block, stop)
            yield start, end
            start = end

    def _locate(self, offset: int) -> tuple[int, int]:
        """The number of the path that has the byte at ``offset``, and its place there."""
        block, count = self.engine.block_nbytes, len(self.paths)
        return offset // block % count, offset // block // count * block + offset % block

    def _path_of(self, offset: int) -> str:
        return self.paths[self._locate(offset)[0]]

    def _check(self, offset: int, data: memoryview) -> None:
        """OSError if ``data`` that was read is not what was written."""
        assert self.checksums is not None
        self.checksums.check(self._path_of, offset, data)

    def _move(self, data: memoryview, offset: int, write: bool, bounce: memoryview) -> None:
        """Move one piece, all of it, on an I/O thread."""
        number, place = self._locate(offset)
        path, direct, cached = self.paths[number], self.direct[number], self.cached[number]
        call: Callable[..., int] = SYSTEM.pwritev if write else SYSTEM.preadv
        verb: Literal["read", "write"] = "write" if write else "read"
        address = torch.frombuffer(data, dtype=torch.uint8).data_ptr()
        # before the write, while the processor's cache has what was updated
        checksums = self.checksums.of(offset, data) if write and self.checksums is not None else []
        moved = 0
        while moved < len(data):
            rest, position = data[moved:], place + moved
            descriptor, buffer = direct, rest[: len(rest) - len(rest) % ALIGN]
            through_bounce = False
            if direct < 0:
                descriptor, buffer = cached, rest
            elif position % ALIGN or not buffer:
                # to the next page boundary, or the last part of a page, through the page cache
                descriptor, buffer = cached, rest[: ALIGN - position % ALIGN]
            elif (address + moved) % ALIGN:
                buffer, through_bounce = bounce[: len(buffer)], True
                if write:
                    _copy(buffer, rest[: len(buffer)])
            try:
                with phase(verb, f"{len(buffer) >> 10} KiB at {position}"):
                    now = call(descriptor, [buffer], position)
            except InterruptedError:
                continue
            except OSError as error:
                raise OSError(error.errno, f"{verb} of {len(buffer)} bytes at offset {position} failed ({error.strerror})", path) from None
            if now <= 0:
                raise OSError(errno.EIO, f"{verb} of {len(buffer)} bytes at offset {position} moved none: the file has become shorter", path)
            if through_bounce and not write:
                _copy(rest[:now], buffer[:now])
            moved += now
        if self.checksums is not None:
            self.checksums.note(checksums)

    # ---- closing -------------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Wait for what is in flight and close. Raises what went wrong in it."""
        if self.closed:
            return
        self.closed = True
        if os.getpid() != self.engine.pid:
            self._close_descriptors()  # a forked child: what is in flight is its parent's
            return
        try:
            self.wait()
        finally:
            self._close_descriptors()

    def __enter__(self) -> File:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


Identity = tuple[int, int, int, int]


def identity_of(status: os.stat_result) -> Identity:
    """Device, inode, bytes, and the time of the last write in nanoseconds: what tells a file from another one, and from itself after a change."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


@dataclasses.dataclass(frozen=True, slots=True)
class Excerpt:
    """Consecutive bytes of a file that is somebody else's, and their place in what is read."""

    path: str
    seen: Identity  # of the file, when it was learnt what it has
    offset: int  # of the first byte, in the file
    nbytes: int
    start: int = 0  # of the first byte, in what is read

    def is_followed_by(self, other: Excerpt) -> bool:
        """Check that ``other`` begins where this one ends, in the file and in what is read."""
        return other.seen == self.seen and other.offset - self.offset == other.start - self.start == self.nbytes

    def part(self, elements: slice, start: int, size: int) -> Excerpt:
        """Some of the elements, of ``size`` bytes each, to be read to element ``start``."""
        nbytes = (elements.stop - elements.start) * size
        return dataclasses.replace(self, offset=self.offset + elements.start * size, nbytes=nbytes, start=start * size)


class Excerpts(File):
    """Excerpts of other files, read as if they were one, and never written. Bytes that no excerpt has are zero.

    Excerpts may begin anywhere in their files. What lies within whole pages there passes the page cache, through the blocks of the I/O threads
    where it goes to another place in a page; the rest of its first and last page does not.

    Args:
        excerpts: which do not overlap where they are read to.
        nbytes: in all.
        checksum: keep a checksum of every piece when it is first read, and check it when it is read again.
        cuts: as for File.
        engine: as for File.

    Files are opened once, for reading only. One that is removed or replaced afterwards is read on as it was. One whose size or time of change is
    not what was ``seen`` raises, so that no step reads half of another model.

    Raises:
        OSError: for a file that is gone or has changed, here and in ``wait``, with its name and the remedy.
    """

    def __init__(
        self,
        excerpts: Sequence[Excerpt],
        nbytes: int,
        *,
        checksum: bool = False,
        cuts: Iterable[int] = (),
        engine: Engine | None = None,
    ) -> None:
        files = {excerpt.seen: excerpt.path for excerpt in excerpts}
        self.excerpts: list[Excerpt] = []
        for excerpt in sorted(excerpts, key=lambda excerpt: excerpt.start):
            if self.excerpts and self.excerpts[-1].is_followed_by(excerpt):
                # neighbours in the file and here: one read
                before = self.excerpts[-1]
                self.excerpts[-1] = dataclasses.replace(before, nbytes=before.nbytes + excerpt.nbytes)
            elif excerpt.nbytes:
                self.excerpts.append(excerpt)
        self.starts = [excerpt.start for excerpt in self.excerpts]
        self.seen = list(files)  # of each path
        super().__init__(list(files.values()), writable=False, checksum=checksum, cuts=cuts, engine=engine)
        self.nbytes = nbytes

    def _open(self, path: str, create: bool) -> None:
        try:
            self.cached.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        except FileNotFoundError:
            raise FileNotFoundError(errno.ENOENT, f"is not there any more{_REMEDY}", path) from None
        self.direct.append(_past_cache(path))
        self._refuse_changed(len(self.cached) - 1)
        if self.direct[-1] >= 0:
            # what goes through the cache are beginnings and ends of excerpts, and nothing after them
            os.posix_fadvise(self.cached[-1], 0, 0, os.POSIX_FADV_RANDOM)

    def _cut(self, offset: int, data: memoryview) -> Iterator[tuple[int, int]]:
        """Cut ``data`` at the bounds of excerpts, and at multiples of the block in their files. The rest becomes zero."""
        done = 0
        first = max(0, bisect.bisect_right(self.starts, offset) - 1)
        last = bisect.bisect_left(self.starts, offset + len(data))
        for excerpt in self.excerpts[first:last]:
            start = max(excerpt.start - offset, 0)
            end = min(excerpt.start + excerpt.nbytes - offset, len(data))
            if start < end:
                data[done:start] = bytes(start - done)
                done = end
            yield from self._blocks(offset, start, end)
        data[done:] = bytes(len(data) - done)

    def _locate(self, offset: int) -> tuple[int, int]:
        excerpt = self.excerpts[bisect.bisect_right(self.starts, offset) - 1]
        return self.seen.index(excerpt.seen), excerpt.offset + offset - excerpt.start

    def _check(self, offset: int, data: memoryview) -> None:
        """OSError if ``data`` that was read is not what was read before."""
        assert self.checksums is not None
        self.checksums.check(self._path_of, offset, data, "read", _REMEDY)
        self.checksums.note(self.checksums.of(offset, data, known=False))

    def _move(self, data: memoryview, offset: int, write: bool, bounce: memoryview) -> None:
        try:
            super()._move(data, offset, write, bounce)
        finally:
            self._refuse_changed(self._locate(offset)[0])

    def _refuse_changed(self, number: int) -> None:
        """OSError if a file is not what it was."""
        opened = {identity_of(os.fstat(descriptor)) for descriptor in (self.cached[number], self.direct[number]) if descriptor >= 0}
        if opened != {self.seen[number]}:
            raise OSError(errno.ESTALE, f"has been changed since its names were read{_REMEDY}", self.paths[number])


# what to do about a file of the user's that is not what it was
_REMEDY = "; frozen parameters are read from it in place: put back what was there and start again, or have them copied with in_place=False"


def _past_cache(path: str) -> int:
    """A descriptor that reads a file past the page cache; -1 where its file system has none.

    ``can_bypass_cache`` would find that out with a file beside it, in a folder that is not zk's.
    """
    descriptor = -1
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
        SYSTEM.preadv(descriptor, [aligned(ALIGN).numpy().data], 0)
    except OSError as error:
        if descriptor >= 0:
            os.close(descriptor)
        if error.errno not in _NO_DIRECT:
            raise
        return -1
    return descriptor
