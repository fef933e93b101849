"""A folder of checkpoints: the whole ones, the newest of them, and a new one, whole or not there.

A checkpoint is written into a hidden folder, and gets its name when all of it is on the drive;
``latest`` names it after that. Checkpoints are numbered as they are finished, as a run that has gone
back to an earlier step finishes a lower step later. Who saves holds a lock until it closes its
optimizer or ends.
"""

from __future__ import annotations

import contextlib
import dataclasses
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
from pathlib import Path
from typing import Any

from zk.checkpoint.contents import crc_of
from zk.checkpoint.files import MANIFEST, CheckpointError, Written, regular, write_durably
from zk.logs import rank_log

LATEST = "latest"


def rank_files(rank: int, ranks: int) -> tuple[str, str]:
    """The names of one rank's tensors, and of what it says of them."""
    stem = f"rank-{rank:05d}-of-{ranks:05d}"
    return f"{stem}.safetensors", f"{stem}.json"


def begin(final: Path) -> tuple[Path, Lock]:
    """The hidden folder that a checkpoint is in until it is whole, and a lock to be held.

    What saves left there that were killed goes. OSError, naming the other run, where another process
    saves into the same folder.
    """
    root = final.parent
    root.mkdir(parents=True, exist_ok=True)
    lock = lock_of(root)
    for place, folder in steps_in(root, ".step-*.replaced").items():
        if not place.exists():  # a crash came between two renames
            folder.rename(place)
    for folder in (*root.glob(".step-*.replaced"), *root.glob(".step-*.partial")):
        shutil.rmtree(folder)
    beside = final.with_name(f".{final.name}.{secrets.token_hex(4)}.partial")
    beside.mkdir()
    return beside, lock


def publish(folder: Path, final: Path, head: dict[str, Any], ranks: int, keep: int | None) -> None:
    """Add the manifest to what ranks have written, and give it its final name."""
    said = [folder / rank_files(rank, ranks)[1] for rank in range(ranks)]
    parts = [dataclasses.asdict(Written.of(path)) for path in said]
    files = [json.loads(path.read_bytes())["written"] for path in said]
    number = 1 + max(map(number_of, whole(final.parent)), default=0)
    head = {"finished": number, **head, "parts": parts, "files": files}
    sealed = json.dumps({**head, "crc32": crc_of(head)}, indent=1)
    write_durably(folder / MANIFEST, sealed.encode())
    replaced = final.with_name(f".{final.name}.replaced")  # another one of the same step
    with contextlib.suppress(FileNotFoundError):
        final.rename(replaced)
    folder.rename(final)
    write_durably(final.parent / LATEST, f"{final.name}\n".encode())
    shutil.rmtree(replaced, ignore_errors=True)
    for old in whole(final.parent)[:-keep] if keep else ():
        if old != final:
            shutil.rmtree(old, ignore_errors=True)


def number_of(folder: Path) -> int:
    """How many checkpoints had been finished in its folder with this one; 0: not known."""
    with open(folder / MANIFEST, "rb") as file:
        begins = re.match(rb'\s*{\s*"finished": (\d{1,9}),', file.read(100))  # it may be long
    return int(begins[1]) if begins else 0


def steps_in(root: Path, pattern: str) -> dict[Path, Path]:
    """The place of a step -> the folder that has it."""
    return {root / folder.name.strip(".").split(".")[0]: folder for folder in root.glob(pattern)}


def whole(root: Path) -> list[Path]:
    """All whole checkpoints in ``root``, in the order in which they were finished."""
    found = steps_in(root, ".step-*.replaced") | steps_in(root, "step-*")
    there = [folder for folder in found.values() if (folder / MANIFEST).exists()]
    return sorted(there, key=lambda folder: (number_of(folder), folder.name))


def named(root: Path) -> str:
    """Name in ``latest`` of ``root``; empty without one."""
    with contextlib.suppress(OSError, ValueError):
        name = regular(root / LATEST).read_text().strip()
        return name * (name == Path(name).name)
    return ""


def find(path: Path) -> Path:
    """The checkpoint that ``path`` means: itself, or the newest in it. CheckpointError without one.

    ``latest`` may also name a folder of checkpoints, such as a tag.
    """
    if (path / MANIFEST).exists():
        return path
    if (name := named(path)) and (path / name).exists():
        return find(path / name)
    if there := whole(path):
        return there[-1]
    weights = f"; zk.load_pretrained(model, {str(path)!r}) reads the weights that are there"
    raise CheckpointError(
        f"{path} has no checkpoint: neither {MANIFEST} nor a folder step-* with one"
        + weights * any(path.glob("*.safetensors*"))
    )


class Lock:
    """A folder that this process saves into, as long as somebody has this."""

    def __init__(self, descriptor: int) -> None:
        self.close = weakref.finalize(self, os.close, descriptor)


LOCKS = weakref.WeakValueDictionary[tuple[int, Path], Lock]()  # by process and folder


def lock_of(root: Path) -> Lock:
    """Lock a folder; OSError, naming the other run, if another process has.

    The lock is the process's own: it ends with it, and no forked process has it.
    """
    own = os.getpid(), root.resolve()
    if own in LOCKS:
        return LOCKS[own]
    file = os.open(root / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    lock = Lock(file)
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            who = os.read(file, 200).decode(errors="replace").strip()
            why = f"another run saves into this folder ({who}); give each run its own"
            raise OSError(error.errno, why, str(root)) from None
        rank_log.warning("%s cannot be locked (%s): let no other run save there", root, error)
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    os.ftruncate(file, 0)
    os.pwrite(file, f"host {socket.gethostname()}, pid {os.getpid()}, since {now}".encode(), 0)
    LOCKS[own] = lock
    return lock
