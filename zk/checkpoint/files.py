"""Safetensors files: written from front to back with checksums, and read by ranges of elements.

Memory does not grow with a file. The manifest has a CRC-32 of every block, so that a reader finds
what a drive, a copy or a hand has changed, before it changes anything itself.

Format: https://github.com/huggingface/safetensors (8 bytes of length, JSON, data).
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import itertools
import json
import math
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from zk.offload.file import reserve

MANIFEST = "manifest.json"
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
    def of(cls, path: Path) -> Written:
        """State of a file now: all of it is read."""
        with regular(path).open("rb") as file, ThreadPoolExecutor(4, "zk-check") as pool:
            nbytes = os.fstat(file.fileno()).st_size

            def crc_of(start: int) -> str:
                with naming(path):
                    return f"{zlib.crc32(os.pread(file.fileno(), BLOCK_NBYTES, start)):08x}"

            return cls(path.name, nbytes, [*pool.map(crc_of, range(0, nbytes, BLOCK_NBYTES))])

    def check(self, folder: Path) -> Path:
        """The file, if all of it is what was written."""
        path = folder / self.name
        if (found := Written.of(path)) != self:
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
    assert position == nbytes, f"{position} of {nbytes} bytes of {path} were given"
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

    def __init__(self, file: IO[bytes]) -> None:
        size = int.from_bytes(file.read(8), "little")
        self.file, self.table, self.start = file, json.loads(file.read(size)), 8 + size

    def entry(self, key: str) -> Entry:
        about = self.table[key]
        return Entry(key, DTYPES[about["dtype"]], tuple(about["shape"]))

    def elements(self, key: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Elements of the flattened tensor ``key``: (n,)."""
        entry, offset = self.entry(key), self.start + self.table[key]["data_offsets"][0]
        stop = entry.numel if stop is None else stop
        found = torch.empty(stop - start, dtype=entry.dtype)
        with naming(Path(self.file.name)):
            self.file.seek(offset + start * entry.dtype.itemsize)
            self.file.readinto(bytes_of(found))  # type: ignore[attr-defined]
        return found
