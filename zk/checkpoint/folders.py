"""A folder of checkpoints: the whole ones, the newest of them, and a new one, whole or not there; for one run at a time.

A checkpoint is written into a folder with a name of its own, and gets its final name when all of it is on the drive; ``latest`` names it after
that. Checkpoints are numbered as they are finished, as a run that has gone back to an earlier step finishes a lower step later. Whoever saves
holds a lock on the file ``.lock`` until it closes its optimizer or ends, however it ends.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import fcntl
import json
import os
import re
import secrets
import shutil
import socket
import weakref
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

from zk.checkpoint.files import CheckpointError, Written, check_regular, sync_folder, write_durably
from zk.core.logs import rank_log

LATEST = "latest"
LOCK = ".lock"
MANIFEST = "manifest.json"


def rank_files(rank: int, world: int) -> tuple[str, str]:
    """The names of one rank's tensors, and of what it says of them."""
    stem = f"rank-{rank:05d}-of-{world:05d}"
    return f"{stem}.safetensors", f"{stem}.json"


def crc_of(head: Mapping[str, Any]) -> str:
    """The CRC-32 of a manifest."""
    return f"{zlib.crc32(json.dumps(head, sort_keys=True, separators=(',', ':')).encode()):08x}"


def sealed(head: Mapping[str, Any]) -> bytes:
    """The manifest's file: ``head`` and its own CRC-32."""
    return json.dumps({**head, "crc32": crc_of(head)}, indent=1).encode()


def place_of(root: Path, step: int) -> Path:
    """The folder of a step."""
    return root / f"step-{step:08d}"


def begin(final: Path, claim: Claim) -> Path:
    """Make the folder that a checkpoint is in until it is whole; what saves left there that were killed goes.

    Raises OSError, naming the other run, where another process saves into the same folder.
    """
    root = final.parent
    try:
        root.mkdir(parents=True, exist_ok=True)
        _hold(claim, root)
    except OSError as error:
        if error.filename == str(root) and not isinstance(error, FileExistsError):
            raise
        why = f"no checkpoint can be saved there ({error.strerror}); give a folder on a drive that has room"
        raise type(error)(error.errno, why, str(root)) from None
    for folder in root.glob(".step-*.replaced"):
        name = folder.with_name(folder.name[1:].removesuffix(".replaced"))
        if name.exists():
            shutil.rmtree(folder)
        else:
            folder.rename(name)
    for folder in root.glob(".step-*.partial"):
        shutil.rmtree(folder)
    for file in root.glob(f".{LATEST}.*.tmp"):
        file.unlink(missing_ok=True)
    beside = final.with_name(f".{final.name}.{secrets.token_hex(4)}.partial")
    beside.mkdir()
    return beside


def publish(folder: Path, final: Path, head: Mapping[str, Any], world: int) -> None:
    """``folder`` has all that ranks write: add the manifest, give it its final name, and let ``latest`` name it."""
    parts, files = [], []
    for rank in range(world):
        name = rank_files(rank, world)[1]
        data = (folder / name).read_bytes()
        parts.append(Written.of_bytes(name, data).as_json())
        try:
            files.append(json.loads(data)["written"])
        except ValueError as error:
            raise OSError(errno.EIO, f"the drive has not kept what was written ({error})", str(folder / name)) from error
    number = 1 + max(map(_number, whole(final.parent)), default=0)
    write_durably(folder / MANIFEST, sealed({"finished": number, **head, "parts": parts, "files": files}))
    sync_folder(folder)
    replaced = final.with_name(f".{final.name}.replaced")  # where a checkpoint is while another one of the same step takes its place
    if final.exists():
        final.rename(replaced)
    folder.rename(final)
    sync_folder(final.parent)
    write_durably(final.parent / LATEST, final.name.encode() + b"\n")
    shutil.rmtree(replaced, ignore_errors=True)


def _number(folder: Path) -> int:
    """The number of checkpoints that had been finished in its folder with this one; 0 where that is not known."""
    with open(folder / MANIFEST, "rb") as file:
        begins = re.match(rb'\s*{\s*"finished": (\d{1,9}),', file.read(100))  # and may be long
    return int(begins[1]) if begins else 0


def whole(root: Path) -> list[Path]:
    """All whole checkpoints in ``root``, as they were finished. What a crash left unfinished is passed over."""
    found = {folder.name: folder for folder in root.glob("step-*")}
    for folder in root.glob(".step-*.replaced"):  # a crash came between two renames
        found.setdefault(folder.name[1:].removesuffix(".replaced"), folder)
    there = [(_number(folder), name, folder) for name, folder in found.items() if (folder / MANIFEST).exists()]
    return [folder for _, _, folder in sorted(there)]


def latest(root: Path) -> Path | None:
    """The newest whole checkpoint in ``root``, or None. CheckpointError where that has lost its manifest: no crash of a save does that."""
    name = named(root)
    if name.startswith("step-") and (root / name).exists():
        if not (root / name / MANIFEST).exists():
            raise CheckpointError(f"{root / name} has lost its {MANIFEST}: copy it there again, or remove the folder to go on from the one before it")
        return root / name
    return next(reversed(whole(root)), None)


def named(root: Path) -> str:
    """The name of a folder in ``root`` that ``latest`` has; empty without one."""
    with contextlib.suppress(OSError, ValueError):
        check_regular(root / LATEST)
        name = (root / LATEST).read_text().strip()
        return name if name == Path(name).name else ""
    return ""


def find(path: Path) -> Path | None:
    """The checkpoint that ``path`` means: itself, or the newest in it; None if there is none.

    ``latest`` may also name a folder of checkpoints, as the engine of ``zk.initialize`` saves a tag.
    """
    if (path / MANIFEST).exists():
        return path
    tag = named(path)
    return find(path / tag) if tag and not tag.startswith("step-") else latest(path)


# ---- one run at a time ---------------------------------------------------------------------------------------------------------


class _Lock:
    """A folder that this process saves into, as long as a claim has this."""

    def __init__(self, root: Path, descriptor: int) -> None:
        self.descriptor = descriptor  # of the locked file
        self.unlock = weakref.finalize(self, _unlock, root, descriptor)


_LOCKS: weakref.WeakValueDictionary[Path, _Lock] = weakref.WeakValueDictionary()  # of this process


# the folders that somebody saves into: other processes are kept out of them until it is cleared, or until nobody has it any more
Claim: TypeAlias = dict[Path, _Lock]


def _hold(claim: Claim, root: Path) -> None:
    """Lock a folder; OSError, naming the other run, if another process has."""
    root = root.resolve()
    lock = claim.get(root) or _LOCKS.get(root) or _lock(root)
    if lock is not None:
        claim[root] = _LOCKS[root] = lock


def _lock(root: Path) -> _Lock | None:
    """A lock on a folder; None, with a warning, where the file system has no locks."""
    path = root / LOCK
    while True:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            who = os.read(lock, 200).decode(errors="replace").strip()
            os.close(lock)
            if error.errno not in (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES):  # a file system without locks
                rank_log.warning("%s cannot be locked (%s): see to it that no other run saves there", root, error.strerror)
                return None
            said = f"another run saves into this folder ({who or 'it has just begun'}); give each run a folder of its own"
            raise OSError(error.errno, said, str(root)) from None
        if os.path.exists(path) and os.path.samestat(os.fstat(lock), os.stat(path)):
            now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
            os.ftruncate(lock, 0)
            os.pwrite(lock, f"host {socket.gethostname()}, pid {os.getpid()}, since {now}\n".encode(), 0)
            return _Lock(root, lock)
        os.close(lock)  # who had it has removed it meanwhile


def _unlock(root: Path, descriptor: int) -> None:
    with contextlib.suppress(OSError):  # the folder is gone, or can be written no more: the lock goes all the same
        os.unlink(root / LOCK)
    os.close(descriptor)


def _let_all_go() -> None:
    """A forked process does not save for its parent, and must not hold its locks on when that has ended."""
    for lock in _LOCKS.values():
        lock.unlock.detach()
        os.close(lock.descriptor)


os.register_at_fork(after_in_child=_let_all_go)
