"""Files and folders of checkpoints: each whole or not there, and found again by checksums.

Safetensors files are written from front to back, and read by ranges of elements. The manifest has a
CRC-32 of every block: a reader finds what a drive, a copy or a hand has changed.

A checkpoint is written into a hidden folder, and gets its name when all of it is on the drive; then
``latest`` names it. They are numbered as they are finished: a run that has gone back to an earlier
step finishes a lower step later. Who saves locks the folder until it closes its optimizer or ends.

Format: https://github.com/huggingface/safetensors (8 bytes of length, JSON, data).
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import itertools
import json
import math
import os
import re
import secrets
import shutil
import socket
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from zk.logs import rank_log
from zk.offload.file import reserve

MANIFEST, LATEST = "manifest.json", "latest"
BLOCK_NBYTES = 8 << 20  # of a checksum
SYNCED_NBYTES = 256 << 20  # that are in the page cache at most, before the drive has them
PAGE = 4096
DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8},
    **{"U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8},
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E4M3FNUZ": torch.float8_e4m3fnuz},
    **{"F8_E5M2": torch.float8_e5m2, "F8_E5M2FNUZ": torch.float8_e5m2fnuz},
    **{"F8_E8M0": torch.float8_e8m0fnu, "C64": torch.complex64, "BOOL": torch.bool},
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


class CheckpointError(ValueError):
    """A checkpoint, or a file of it, is not what it should be. The message names the file."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """One tensor of a file."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class Written:
    """A file's entry in a manifest."""

    name: str
    nbytes: int
    crc32: list[str]
    """Of each block, in hexadecimal."""
    block_nbytes: int = BLOCK_NBYTES

    @classmethod
    def of(cls, path: Path, each: Callable[..., Iterable[str]] = map) -> Written:
        """State of a file now: all of it is read, in blocks that ``each`` maps to their checksums."""
        with regular(path).open("rb") as file:
            nbytes = os.fstat(file.fileno()).st_size

            def crc_of(start: int) -> str:
                with naming(path):
                    return f"{zlib.crc32(os.pread(file.fileno(), BLOCK_NBYTES, start)):08x}"

            return cls(path.name, nbytes, [*each(crc_of, range(0, nbytes, BLOCK_NBYTES))])

    def check(self, folder: Path) -> Path:
        """The file, if all of it is what was written."""
        path = folder / self.name
        with ThreadPoolExecutor(4, "zk-check") as pool:
            found = Written.of(path, pool.map)
        if found != self:
            raise CheckpointError(
                f"{path} is not what was written: {found.nbytes} bytes, where there were {self.nbytes}, "
                "or others; a copy was cut short, or changed"
            )
        return path


def header_of(entries: Iterable[Entry], metadata: Mapping[str, str]) -> bytes:
    """The beginning of a safetensors file, padded so that data starts on a page."""
    table: dict[str, Any] = {"__metadata__": metadata}
    start = 0
    for entry in entries:
        if entry.dtype not in NAMES:
            raise ValueError(f"{entry.key!r} is {entry.dtype}, which safetensors files cannot hold")
        about = {"dtype": NAMES[entry.dtype], "shape": entry.shape}
        table[entry.key] = about | {"data_offsets": [start, start := start + entry.nbytes]}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % PAGE)
    return len(text).to_bytes(8, "little") + text


def write_file(
    path: Path, entries: list[Entry], values: Iterable[Tensor], metadata: Mapping[str, str]
) -> Written:
    """Write a new safetensors file of ``entries``; ``values`` are their elements, of any size each.

    OSError if there is no room for all of it, before anything is written.
    """
    header = header_of(entries, metadata)
    nbytes = len(header) + sum(entry.nbytes for entry in entries)
    crcs, position = [0] * -(-nbytes // BLOCK_NBYTES), 0
    with undone(lambda: path.unlink(missing_ok=True)), naming(path), open(path, "xb") as file:
        reserve(file.fileno(), str(path), nbytes)
        for data in itertools.chain([memoryview(header)], map(bytes_of, values)):
            while data:
                block, start = divmod(position, BLOCK_NBYTES)
                part, data = data[: BLOCK_NBYTES - start], data[BLOCK_NBYTES - start :]
                crcs[block] = zlib.crc32(part, crcs[block])
                file.write(part)
                position += len(part)
                if not position % SYNCED_NBYTES:
                    sync(file)
        sync(file)
    assert position == nbytes
    return Written(path.name, nbytes, [f"{crc:08x}" for crc in crcs])


def bytes_of(tensor: Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data


def sync(file: IO[bytes]) -> None:
    """Make the drive keep what was written, and free its memory."""
    file.flush()
    os.fsync(file.fileno())
    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Name the file in errors of the drive that do not."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


@contextlib.contextmanager
def undone(undo: Callable[[], object]) -> Iterator[None]:
    """Call ``undo`` if what is done inside fails, also by Ctrl-C."""
    try:
        yield
    except BaseException:
        undo()
        raise


def write_durably(path: Path, data: bytes) -> None:
    """Write a small file that is whole or not there, also after a crash."""
    beside = path.with_name(f".{path.name}.tmp")
    with naming(path), open(beside, "wb") as file:
        file.write(data)
        sync(file)
    beside.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the drive keep the folder's names."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):  # it keeps names by itself
            raise
    finally:
        os.close(descriptor)


def regular(path: Path) -> Path:
    """The same; CheckpointError for what is not there, or no regular file: a pipe would wait."""
    if not path.is_file():
        raise CheckpointError(f"{path} is missing, or no regular file: the checkpoint is not whole")
    return path


class Tensors:
    """An open safetensors file."""

    def __init__(self, file: IO[bytes]):
        size = int.from_bytes(file.read(8), "little")
        self.file, self.table, self.start = file, json.loads(file.read(size)), 8 + size

    def entry(self, key: str) -> Entry:
        about = self.table[key]
        return Entry(key, DTYPES[about["dtype"]], tuple(about["shape"]))

    def elements(self, key: str, start: int, stop: int) -> Tensor:
        """Elements of the flattened tensor ``key``: (n,)."""
        entry, offset = self.entry(key), self.start + self.table[key]["data_offsets"][0]
        found = torch.empty(stop - start, dtype=entry.dtype)
        with naming(Path(self.file.name)):
            self.file.seek(offset + start * entry.dtype.itemsize)
            self.file.readinto(bytes_of(found))  # type: ignore[attr-defined]
        return found


# ---- folders --------------------------------------------------------------------------------------


def crc_of(head: Mapping[str, Any]) -> str:
    """The CRC-32 of a manifest."""
    return f"{zlib.crc32(json.dumps(head, sort_keys=True, separators=(',', ':')).encode()):08x}"


def rank_files(rank: int, ranks: int) -> tuple[str, str]:
    """The names of one rank's tensors, and of what it says of them."""
    stem = f"rank-{rank:05d}-of-{ranks:05d}"
    return f"{stem}.safetensors", f"{stem}.json"


def begin(final: Path) -> tuple[Path, IO[bytes]]:
    """The hidden folder that a checkpoint is in until it is whole, and a lock to be held.

    What saves left there that were killed goes.
    """
    root = final.parent
    root.mkdir(parents=True, exist_ok=True)
    held = lock(root)
    for place, folder in steps_in(root, ".step-*.replaced").items():
        if not place.exists():  # a crash came between two renames
            folder.rename(place)
    for folder in (*root.glob(".step-*.replaced"), *root.glob(".step-*.partial")):
        shutil.rmtree(folder)
    beside = final.with_name(f".{final.name}.{secrets.token_hex(4)}.partial")
    beside.mkdir()
    return beside, held


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
    """The checkpoint that ``path`` means: itself, or the newest in it, or in what ``latest`` names."""
    if (path / MANIFEST).exists():
        return path
    if (name := named(path)) and (path / name).exists():
        return find(path / name)
    if there := whole(path):
        return there[-1]
    words = f"neither {MANIFEST} nor a folder step-* with one (zk.load_pretrained reads weights)"
    raise CheckpointError(f"{path} has no checkpoint: {words}")


LOCKS = weakref.WeakValueDictionary[tuple[int, Path], IO[bytes]]()  # by process and folder


def lock(root: Path) -> IO[bytes]:
    """Lock a folder as long as somebody has the result, in this process.

    OSError, naming the other run, if another process has it.
    """
    own = os.getpid(), root.resolve()
    if own in LOCKS:
        return LOCKS[own]
    file = open(root / ".lock", "a+b")  # noqa: SIM115
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if isinstance(error, (BlockingIOError, PermissionError)):
            who = os.pread(file.fileno(), 200, 0).decode(errors="replace")
            why = f"another run saves into this folder ({who}); give each run its own"
            raise OSError(error.errno, why, str(root)) from error
        rank_log.warning("%s cannot be locked (%s): let no other run save there", root, error)
    file.truncate(0)
    file.write(f"host {socket.gethostname()}, pid {os.getpid()}".encode())
    file.flush()
    LOCKS[own] = file
    return file
