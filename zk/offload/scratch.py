"""Private files on drives that are gone when the run is: at close, at exit, or when the next run comes.

Each rank makes one folder of its own under every path, ``zk-scratch-HOST-PID-TOKEN-rankN``, and holds a lock on the file ``owner`` in it
for as long as it lives. The kernel lets go of the lock when the process ends, however it ends, so the next run on the same path can tell
what is left over. It removes that, and nothing else: only folders with this name, this user's, with our mark in ``owner`` and no lock, of a run on
this machine: where several machines see the path, a lock may be known to one of them only.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import os
import secrets
import socket
import stat
import time
import weakref
from collections.abc import Sequence
from pathlib import Path

from zk.core.logs import rank_log

PREFIX = "zk-scratch-"
_MAKING_S = 60.0  # a folder that is not locked yet is somebody's who is just making it, or was, if it is older than this
_MARK = "zk scratch folder; removed by the run that made it, or by the next one\n"


class Scratch:
    """This rank's private folders, one on each path.

    Args:
        paths: existing folders, on one drive or several.
        rank: goes into the name.

    Raises OSError, with path and remedy, if a path is not a folder or cannot be written.
    """

    def __init__(self, paths: Sequence[str], rank: int) -> None:
        self.folders: list[Path] = []
        self._locks: list[int] = []
        self._cleanup = weakref.finalize(self, _remove, self.folders, self._locks, os.getpid())
        _ALL.add(self)
        name = f"{PREFIX}{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}-rank{rank}"
        for path in paths:
            if not os.path.isdir(path):
                raise NotADirectoryError(errno.ENOTDIR, "nvme_path must be an existing folder; create it on the drive to use", path)
            sweep(path)
            self._create(Path(path), name)

    def _create(self, path: Path, name: str) -> None:
        made = path / f".{name}"  # under its final name only once it is locked, so that no sweep meets it unlocked
        try:
            made.mkdir(mode=0o700)
        except OSError as error:
            raise OSError(error.errno, f"the scratch folder cannot be made ({error.strerror}); nvme_path must be writable", str(path)) from None
        self.folders.append(made)  # from here on it goes with this one
        lock = os.open(made / "owner", os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._locks.append(lock)
        os.write(lock, f"{_MARK}{socket.gethostname()}\n{_boot()}\n{os.getpid()}\n".encode())
        with contextlib.suppress(OSError):  # a file system without locks: then no other run can take one either, and none sweeps
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        made.rename(path / name)
        self.folders[-1] = path / name

    def paths(self, name: str) -> list[Path]:
        """The file ``name`` on every path."""
        return [folder / f"{name}.bin" for folder in self.folders]

    def close(self) -> None:
        """Remove the folders and all in them; also happens by itself at exit."""
        self._cleanup()


_ALL: weakref.WeakSet[Scratch] = weakref.WeakSet()


def _let_go() -> None:
    """A forked child would hold the locks on after this process has died; it has no use for them."""
    for scratch in _ALL:
        for lock in scratch._locks:
            os.close(lock)
        scratch._locks.clear()


os.register_at_fork(after_in_child=_let_go)


def _remove(folders: list[Path], locks: list[int], pid: int) -> None:
    if os.getpid() != pid:
        return  # a forked child: the folders are its parent's
    for folder in folders:
        _remove_folder(folder)
    for lock in locks:
        os.close(lock)
    folders.clear()
    locks.clear()


def _remove_folder(folder: Path) -> None:
    """Delete our kinds of files and then the folder; what somebody else put there stays, and so does the folder then."""
    try:
        for file in (*folder.glob("*.bin"), folder / "owner"):
            file.unlink(missing_ok=True)
        folder.rmdir()
    except FileNotFoundError:
        return  # another rank swept it at the same time
    except OSError as error:
        rank_log.warning("scratch folder %s stays: %s", folder, error.strerror)


def sweep(path: str) -> list[str]:
    """Remove what runs that ended without cleaning up left in ``path``. Returns the names of the folders removed."""
    removed = []
    for entry in os.scandir(path):
        if entry.name.removeprefix(".").startswith(PREFIX) and _is_abandoned(entry):
            _remove_folder(Path(entry.path))
            removed.append(entry.name)
            rank_log.info("removed %s, left over from a run that has ended", entry.path)
    return removed


@functools.cache
def _boot() -> str:
    """The start of the kernel: the same in all containers on it."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:  # not Linux
        return ""


def _is_abandoned(entry: os.DirEntry[str]) -> bool:
    try:
        folder = entry.stat(follow_symlinks=False)
        being_made = entry.name.startswith(".") and time.time() - folder.st_mtime < _MAKING_S
        if being_made or not stat.S_ISDIR(folder.st_mode) or folder.st_uid != os.getuid():
            return False
        owner = os.open(os.path.join(entry.path, "owner"), os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False  # gone in the meantime, or not made by us
    try:
        text = os.read(owner, 1000).decode(errors="replace") if stat.S_ISREG(os.fstat(owner).st_mode) else ""
        host, boot, *_ = [*text.removeprefix(_MARK).splitlines(), "", ""]
        if not text.startswith(_MARK) or not (boot == _boot() or host == socket.gethostname()):
            return False  # of another kernel, whose locks may not be known here; a machine that was started again has its name still
        fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False  # its owner lives, or this file system has no locks
    finally:
        os.close(owner)
    return True
