"""In: calls of the operating system on files under ``/simulated``. Out: the same on a dictionary, with the faults that a drive can have.

Writes are in the page cache until fsync(); at a power cut each of them is there, in part or not, and of the changes to names those after some
point are not. A transfer takes the caller's memory piece by piece while others go on, so memory that is changed too early is written as it is
then, and memory that is read too early holds NaN.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import fcntl
import io
import itertools
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from tests.simulate.scheduler import Process, Simulation
from zk.offload import nvme

ROOT = "/simulated"
_FIRST = 1 << 20  # descriptors from here on are simulated
SECTOR = 512


class Node:
    """A file or a folder."""

    numbers = itertools.count(1)

    def __init__(self, is_folder: bool, mtime: float) -> None:
        self.number, self.is_folder, self.mtime = next(Node.numbers), is_folder, mtime
        self.data = bytearray()
        self.durable = bytearray()
        self.unsynced: list[tuple[int, bytes]] = []  # (offset, bytes) since the last fsync; offset -1: a length
        self.entries: dict[str, Node] = {}
        self.locked_by: int | None = None


class Opened:
    """A descriptor."""

    def __init__(self, node: Node, flags: int, process: Process, path: str) -> None:
        self.node, self.flags, self.process, self.path, self.at = node, flags, process, path, 0


class Drive:
    """The file system of one run. ``faults`` is asked before each transfer, sync and change of names."""

    def __init__(self, simulation: Simulation, bypasses_cache: bool, room_nbytes: int = 1 << 40) -> None:
        self.simulation, self.bypasses_cache, self.room_nbytes = simulation, bypasses_cache, room_nbytes
        self.root = Node(True, 0.0)
        self.journal: list[list[tuple[Node, str, Node | None]]] = []  # changes of names that are not on the drive yet: what was there before
        self.opened: dict[int, Opened] = {}
        self.descriptors = itertools.count(_FIRST)
        self.faults: Callable[[str, str], str] = lambda operation, path: ""

    # ---- names ---------------------------------------------------------------------------------------------------------------

    def _find(self, path: str) -> Node:
        node = self.root
        for name in [part for part in path[len(ROOT) :].split("/") if part not in ("", ".")]:
            if not node.is_folder:
                raise NotADirectoryError(errno.ENOTDIR, "Not a directory", path)
            if name not in node.entries:
                raise FileNotFoundError(errno.ENOENT, "No such file or directory", path)
            node = node.entries[name]
        return node

    def _parent(self, path: str) -> tuple[Node, str]:
        head, _, name = path.rstrip("/").rpartition("/")
        return self._find(head), name

    def _set(self, *changes: tuple[Node, str, Node | None]) -> None:
        """Change names, all at once."""
        self.journal.append([(folder, name, folder.entries.get(name)) for folder, name, _ in changes])
        for folder, name, node in changes:
            if node is None:
                del folder.entries[name]
            else:
                folder.entries[name] = node
            folder.mtime = self.simulation.now

    def _step(self, operation: str, path: str) -> str:
        """Let others come first; return the fault that this call has, if any."""
        self.simulation.maybe(operation)
        fault = self.faults(operation, path)
        if fault in ("EIO", "ENOSPC", "EACCES"):
            number = getattr(errno, fault)
            raise OSError(number, os.strerror(number), path)
        return fault

    # ---- after a crash -------------------------------------------------------------------------------------------------------

    def let_go(self, process: Process) -> None:
        """Close the descriptors and locks of a process that has ended."""
        for number, opened in list(self.opened.items()):
            if opened.process is process:
                del self.opened[number]
                if opened.node.locked_by == number:
                    opened.node.locked_by = None

    def cut_power(self) -> None:
        """Lose what was not synced, in part."""
        dice = self.simulation.dice
        for changes in reversed(self.journal[dice.randrange(len(self.journal) + 1) :]):
            for folder, name, before in changes:
                if before is None:
                    folder.entries.pop(name, None)
                else:
                    folder.entries[name] = before
        self.journal.clear()
        nodes = [self.root]
        for node in nodes:
            nodes += node.entries.values()
            if node.is_folder or not node.unsynced:
                continue
            node.data = bytearray(node.durable)
            for offset, data in node.unsynced:
                luck = dice.random()
                if offset < 0:
                    self._resize(node, len(data) and int.from_bytes(data, "little"))
                elif luck < 0.4:
                    self._put(node, offset, data)
                elif luck < 0.7 and len(data) > SECTOR:
                    self._put(node, offset, data[: SECTOR * dice.randrange(1, -(-len(data) // SECTOR))])
            self._sync(node)

    @staticmethod
    def _put(node: Node, offset: int, data: bytes | memoryview) -> None:
        if len(node.data) < offset:
            node.data.extend(bytes(offset - len(node.data)))
        node.data[offset : offset + len(data)] = data

    @staticmethod
    def _resize(node: Node, nbytes: int) -> None:
        del node.data[nbytes:]
        node.data.extend(bytes(nbytes - len(node.data)))

    @staticmethod
    def _sync(node: Node) -> None:
        node.durable, node.unsynced = bytearray(node.data), []

    def _write(self, node: Node, offset: int, data: bytes) -> None:
        self._put(node, offset, data)
        node.unsynced.append((offset, data))

    # ---- the calls -----------------------------------------------------------------------------------------------------------

    def open(self, path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        self._step("open", path)
        if flags & os.O_DIRECT and not self.bypasses_cache:
            raise OSError(errno.EINVAL, "Invalid argument", path)
        folder, name = self._parent(path) if path != ROOT else (self.root, "")
        node = folder.entries.get(name) if name else self.root
        if node is None and not flags & os.O_CREAT:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", path)
        if node is not None and flags & os.O_EXCL:
            raise FileExistsError(errno.EEXIST, "File exists", path)
        if node is None:
            node = Node(False, self.simulation.now)
            self._set((folder, name, node))
        if flags & os.O_TRUNC:
            self._resize(node, 0)
            node.unsynced.append((-1, b""))
        number = next(self.descriptors)
        self.opened[number] = Opened(node, flags, self.simulation.current.process, path)
        return number

    def close(self, number: int) -> None:
        opened = self.opened.pop(number, None)
        if opened is None:
            raise OSError(errno.EBADF, "Bad file descriptor")
        if opened.node.locked_by == number:
            opened.node.locked_by = None

    def _opened(self, number: int) -> Opened:
        if number not in self.opened:
            raise OSError(errno.EBADF, "Bad file descriptor")
        return self.opened[number]

    def _check_alignment(self, opened: Opened, buffer: Any, offset: int) -> None:
        if opened.flags & os.O_DIRECT:
            address = torch.frombuffer(buffer, dtype=torch.uint8).data_ptr() if len(buffer) else 0
            if address % nvme.ALIGN or len(buffer) % nvme.ALIGN or offset % nvme.ALIGN:
                raise OSError(errno.EINVAL, "Invalid argument", opened.path)

    def preadv(self, number: int, buffers: Any, offset: int, flags: int = 0) -> int:
        opened, (buffer,) = self._opened(number), buffers
        self._check_alignment(opened, buffer, offset)
        view = memoryview(buffer)
        view[:] = b"\xff" * len(view)
        fault = self._step("pread", opened.path)
        if fault == "EINTR":
            raise InterruptedError(errno.EINTR, "Interrupted system call")
        wanted = self._moved(fault, len(view))
        data = bytes(opened.node.data[offset : offset + wanted])
        half = len(data) // 2
        view[:half] = data[:half]
        self.simulation.maybe("the second half of a pread")
        data = data[:half] + bytes(opened.node.data[offset + half : offset + len(data)])
        if fault == "corrupt" and data:
            at = self.simulation.dice.randrange(len(data))
            data = data[:at] + bytes([data[at] ^ (1 << self.simulation.dice.randrange(8))]) + data[at + 1 :]
        view[: len(data)] = data
        return len(data)

    def pwritev(self, number: int, buffers: Any, offset: int, flags: int = 0) -> int:
        opened, (buffer,) = self._opened(number), buffers
        self._check_alignment(opened, buffer, offset)
        view = memoryview(buffer)
        fault = self._step("pwrite", opened.path)
        if fault == "EINTR":
            raise InterruptedError(errno.EINTR, "Interrupted system call")
        wanted = self._moved(fault, len(view))
        if fault == "lose":
            return wanted
        if fault == "tear":
            self._write(opened.node, offset, bytes(view[: wanted // 2 // SECTOR * SECTOR]))
            return wanted
        half = wanted // 2
        self._write(opened.node, offset, bytes(view[:half]))
        self.simulation.maybe("the second half of a pwrite")
        self._write(opened.node, offset + half, bytes(view[half:wanted]))
        return wanted

    def _moved(self, fault: str, nbytes: int) -> int:
        """Number of the bytes that are moved."""
        if fault == "short" and nbytes > 1:
            nbytes = max(1, self.simulation.dice.randrange(nbytes) // SECTOR * SECTOR)
        elif fault.startswith("stall"):
            self.simulation.pause("a drive that stalls", lambda: False, float(fault.split()[1]))
        return nbytes

    def read(self, number: int, nbytes: int) -> bytes:
        opened = self._opened(number)
        data = bytes(opened.node.data[opened.at : opened.at + nbytes])
        opened.at += len(data)
        return data

    def write(self, number: int, data: Any) -> int:
        opened = self._opened(number)
        fault = self._step("pwrite", opened.path)  # (after a signal Python calls again)
        data = bytes(data)
        data = data[: self._moved(fault, len(data))]
        if fault != "lose":
            self._write(opened.node, opened.at, data)
        opened.at += len(data)
        return len(data)

    def pwrite(self, number: int, data: Any, offset: int) -> int:
        self._write(self._opened(number).node, offset, bytes(data))
        return len(data)

    def fsync(self, number: int) -> None:
        opened = self._opened(number)
        fault = self._step("fsync", opened.path)
        if fault.startswith("stall"):
            self._moved(fault, 0)
        if opened.node.is_folder:
            self.journal.clear()
        else:
            self._sync(opened.node)

    def ftruncate(self, number: int, nbytes: int) -> None:
        node = self._opened(number).node
        self._resize(node, nbytes)
        node.unsynced.append((-1, nbytes.to_bytes(8, "little")))

    def truncate(self, path: Any, nbytes: int) -> None:
        node = self._find(os.fspath(path))
        self._resize(node, nbytes)
        node.unsynced.append((-1, nbytes.to_bytes(8, "little")))

    def posix_fallocate(self, number: int, offset: int, nbytes: int) -> None:
        opened = self._opened(number)
        self._step("fallocate", opened.path)
        if len(opened.node.data) < offset + nbytes:
            self.ftruncate(number, offset + nbytes)

    def fstat(self, number: int) -> os.stat_result:
        return self._stat(self._opened(number).node)

    def stat(self, path: Any, *, dir_fd: int | None = None, follow_symlinks: bool = True) -> os.stat_result:
        return self._stat(self._find(path))

    def lstat(self, path: Any, *, dir_fd: int | None = None) -> os.stat_result:
        return self._stat(self._find(path))

    @staticmethod
    def _stat(node: Node) -> os.stat_result:
        mode = (stat.S_IFDIR | 0o755) if node.is_folder else (stat.S_IFREG | 0o600)
        times = (node.mtime, node.mtime, node.mtime)
        return os.stat_result((mode, node.number, 99, 1, os.getuid(), os.getgid(), len(node.data), *map(int, times), *times))

    def statvfs(self, path: Any) -> Any:
        free = self.room_nbytes // 4096
        return SimpleNamespace(f_bavail=free, f_bfree=free, f_blocks=free, f_frsize=4096, f_bsize=4096)

    def access(self, path: str, mode: int, **_: Any) -> bool:
        return True

    def mkdir(self, path: str, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        self._step("mkdir", path)
        folder, name = self._parent(path)
        if name in folder.entries:
            raise FileExistsError(errno.EEXIST, "File exists", path)
        self._set((folder, name, Node(True, self.simulation.now)))

    def rmdir(self, path: str, *, dir_fd: int | None = None) -> None:
        self._step("rmdir", path)
        folder, name = self._parent(path)
        if self._find(path).entries:
            raise OSError(errno.ENOTEMPTY, "Directory not empty", path)
        self._set((folder, name, None))

    def unlink(self, path: str, *, dir_fd: int | None = None) -> None:
        self._step("unlink", path)
        folder, name = self._parent(path)
        self._find(path)
        self._set((folder, name, None))

    def rename(self, source: str, target: str, **_: Any) -> None:
        self._step("rename", source)
        node = self._find(source)
        (here, name), (there, new) = self._parent(source), self._parent(target)
        if new in there.entries and there.entries[new].is_folder and there.entries[new].entries:
            raise OSError(errno.ENOTEMPTY, "Directory not empty", target)
        self._set((here, name, None), (there, new, node))

    def listdir(self, path: str) -> list[str]:
        return list(self._find(path).entries)

    def scandir(self, path: Any) -> Any:
        return _Scan([_Entry(self, path, name) for name in self._find(path).entries])

    def readlink(self, path: str, *, dir_fd: int | None = None) -> str:
        raise OSError(errno.EINVAL, "Invalid argument", path)

    def flock(self, number: int, operation: int) -> None:
        opened = self._opened(number)
        if operation & fcntl.LOCK_UN:
            opened.node.locked_by = None
        elif opened.node.locked_by not in (None, number):
            raise BlockingIOError(errno.EWOULDBLOCK, "Resource temporarily unavailable", opened.path)
        else:
            opened.node.locked_by = number


class _Scan:
    def __init__(self, entries: list[Any]) -> None:
        self.entries = iter(entries)

    def __iter__(self) -> Any:
        return self.entries

    def __next__(self) -> Any:
        return next(self.entries)

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def close(self) -> None:
        return


class _Entry:
    """An entry of os.scandir()."""

    def __init__(self, drive: Drive, folder: str, name: str) -> None:
        self.drive, self.name, self.path = drive, name, f"{folder}/{name}"

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        return self.drive.stat(self.path)

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        with contextlib.suppress(OSError):
            return stat.S_ISDIR(self.stat().st_mode)
        return False

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        return not self.is_dir()

    def is_symlink(self) -> bool:
        return False

    def is_junction(self) -> bool:
        return False


class _File(io.RawIOBase):
    """The file that open() gives, before it is buffered."""

    def __init__(self, drive: Drive, path: str, flags: int) -> None:
        self.drive, self.number, self.flags = drive, drive.open(path, flags), flags

    def fileno(self) -> int:
        return self.number

    def readable(self) -> bool:
        return not self.flags & os.O_WRONLY

    def writable(self) -> bool:
        return bool(self.flags & (os.O_WRONLY | os.O_RDWR))

    def readinto(self, buffer: Any) -> int:
        data = self.drive.read(self.number, len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def write(self, data: Any) -> int:
        return self.drive.write(self.number, data)

    def close(self) -> None:
        if not self.closed:
            super().close()
            with contextlib.suppress(OSError):  # of a process that is no more
                self.drive.close(self.number)


_BY_PATH = (
    *("open", "stat", "lstat", "statvfs", "access", "mkdir", "rmdir", "unlink", "remove", "rename", "replace", "listdir", "scandir"),
    *("readlink", "truncate"),
)
_BY_NUMBER = ("close", "read", "write", "pwrite", "fsync", "fdatasync", "ftruncate", "fstat")
_SAME = {"remove": "unlink", "replace": "rename", "fdatasync": "fsync"}
_FLAGS = {"r": os.O_RDONLY, "w": os.O_WRONLY | os.O_CREAT | os.O_TRUNC, "x": os.O_WRONLY | os.O_CREAT | os.O_EXCL}


def _again(call: Callable[..., int]) -> Callable[..., int]:
    """Call again after a signal, as Python's own functions do."""

    def until_it_moves(*args: Any) -> int:
        while True:
            with contextlib.suppress(InterruptedError):
                return call(*args)

    return until_it_moves


@contextlib.contextmanager
def installed(drive: Drive) -> Iterator[None]:
    """Context: what Python asks of the system for files under ROOT goes to the drive."""
    patches = []

    def by_path(name: str) -> Any:
        real, twin = getattr(os, name), getattr(drive, _SAME.get(name, name))

        def call(path: Any = ".", *args: Any, **kwargs: Any) -> Any:
            text = path if isinstance(path, (str, int)) else os.fspath(path)
            if isinstance(text, str) and text.startswith(ROOT):
                return twin(text, *(os.fspath(arg) if hasattr(arg, "__fspath__") else arg for arg in args), **kwargs)
            if isinstance(text, int) and text >= _FIRST:
                return getattr(drive, "f" + name)(text)
            return real(path, *args, **kwargs)

        return call

    def by_number(name: str) -> Any:
        real, twin = getattr(os, name), getattr(drive, _SAME.get(name, name))
        return lambda number, *args: twin(number, *args) if number >= _FIRST else real(number, *args)

    def opens(file: Any, mode: str = "r", buffering: int = -1, encoding: Any = None, errors: Any = None, newline: Any = None, *rest: Any) -> Any:
        text = file if isinstance(file, int) else os.fspath(file)
        if isinstance(text, int) or not str(text).startswith(ROOT):
            return real_open(file, mode, buffering, encoding, errors, newline, *rest)
        raw = _File(drive, text, _FLAGS[mode[0]])
        buffered = io.BufferedWriter(raw) if raw.writable() else io.BufferedReader(raw)
        return buffered if "b" in mode else io.TextIOWrapper(buffered, encoding or "utf-8", errors, newline)

    real_open, real_flock = builtins.open, fcntl.flock
    patches += [mock.patch.object(os, name, by_path(name)) for name in _BY_PATH]
    patches += [mock.patch.object(os, name, by_number(name)) for name in _BY_NUMBER]
    patches += [mock.patch.object(nvme.SYSTEM, name, getattr(drive, name), create=True) for name in ("preadv", "pwritev", "posix_fallocate")]
    patches += [mock.patch.object(os, name, _again(getattr(drive, name))) for name in ("preadv", "pwritev")]
    patches += [mock.patch.object(module, "open", opens) for module in (builtins, io)]
    patches += [mock.patch.object(fcntl, "flock", lambda number, how: drive.flock(number, how) if number >= _FIRST else real_flock(number, how))]
    patches += [mock.patch.object(shutil, "_use_fd_functions", False)]
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield
