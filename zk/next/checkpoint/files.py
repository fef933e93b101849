"""Safetensors files: written from front to back with checksums, and read by ranges of elements.

Memory does not grow with a file. The manifest has a CRC-32 of every block, so that a reader finds
what a drive, a copy or a hand has changed, before it changes anything itself.

Format: https://github.com/huggingface/safetensors (8 bytes of length, JSON, data).
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import itertools
import json
import math
import os
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from zk.next.offload.file import reserve
from zk.next.parallel.comm import Comm

BLOCK_NBYTES = 8 << 20  # of a checksum
SYNCED_NBYTES = 256 << 20  # that the page cache holds at most before the drive has them
PAGE = 4096
MANIFEST = "manifest.json"
LONGEST_HEADER = 100 << 20
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


KINDS: tuple[type[Exception], ...] = CheckpointError, OSError, ValueError, TypeError, RuntimeError


@contextlib.contextmanager
def together(comm: Comm, what: str) -> Iterator[None]:
    """What fails inside on one rank raises on all: on the others an error of its kind."""
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    kind = next((n for n, kind in enumerate(KINDS) if isinstance(failure, kind)), -1)
    said = comm.words(what, failure and (kind, str(failure)))
    if failure is not None:
        raise failure
    failed = [(rank, *words) for rank, words in enumerate(said) if words]
    for rank, kind, reason in failed:
        raise KINDS[kind](f"{what} has failed on rank {rank}: {reason}")


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
    def of_bytes(cls, name: str, data: bytes) -> Written:
        """The entry of a small file."""
        blocks = (data[at : at + BLOCK_NBYTES] for at in range(0, len(data), BLOCK_NBYTES))
        return cls(name, len(data), [f"{zlib.crc32(block):08x}" for block in blocks])


# ---- writing ---------------------------------------------------------------------------------------


def header_of(entries: Iterable[Entry], metadata: Mapping[str, str]) -> tuple[bytes, int]:
    """The beginning of a safetensors file, padded so that data starts on a page; bytes of data."""
    table: dict[str, Any] = {"__metadata__": dict(metadata)}
    start = 0
    for entry in entries:
        if entry.dtype not in NAMES:
            raise ValueError(f"{entry.key!r} is {entry.dtype}, which safetensors files cannot hold")
        stop = start + entry.nbytes
        about = {"dtype": NAMES[entry.dtype], "shape": entry.shape, "data_offsets": [start, stop]}
        table[entry.key], start = about, stop
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % PAGE)
    return len(text).to_bytes(8, "little") + text, start


def write_file(
    path: Path, entries: list[Entry], values: Iterable[Tensor], metadata: Mapping[str, str]
) -> Written:
    """Write a new safetensors file.

    Args:
        path: must not exist.
        entries: all tensors it will have.
        values: their elements in this order, in tensors of any size.
        metadata: strings for its header.

    Raises:
        OSError: if there is no room for all of it, before anything is written.
    """
    header, nbytes = header_of(entries, metadata)
    nbytes += len(header)
    crcs, position = [0] * -(-nbytes // BLOCK_NBYTES), 0
    with undone(lambda: path.unlink(missing_ok=True)), naming(path), open(path, "xb") as file:
        reserve(file.fileno(), str(path), nbytes)
        for data in itertools.chain([memoryview(header)], map(bytes_of, values)):
            while data:
                block, start = divmod(position, BLOCK_NBYTES)
                part = data[: BLOCK_NBYTES - start]
                crcs[block] = zlib.crc32(part, crcs[block])
                file.write(part)
                data, position = data[len(part) :], position + len(part)
                if not position % SYNCED_NBYTES:
                    sync(file)
        sync(file)
    if position != nbytes:
        raise AssertionError(f"{position} of {nbytes} bytes of {path} were given")
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
        if error.filename is None:
            raise OSError(error.errno, f"writing failed ({error.strerror})", str(path)) from error
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
    with undone(lambda: beside.unlink(missing_ok=True)), naming(path), open(beside, "wb") as file:
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


# ---- reading ---------------------------------------------------------------------------------------


class File:
    """A file whose bytes are checked as they are read. CheckpointError for others. Close it."""

    def __init__(self, folder: Path, written: Written) -> None:
        name, self.written = written.name, written
        if not isinstance(name, str) or Path(name).name != name or name in ("", ".."):
            raise CheckpointError(f"{folder / MANIFEST} names {name!r}, which is not in its folder")
        self.path = folder / name
        with self.refusing():
            check_regular(self.path)
            self.descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        self.block = functools.lru_cache(maxsize=2)(self.read_block)
        nbytes = os.fstat(self.descriptor).st_size
        self.blocks = range(-(-nbytes // BLOCK_NBYTES))
        known = written.nbytes, len(written.crc32), written.block_nbytes
        if known != (nbytes, len(self.blocks), BLOCK_NBYTES):
            self.close()
            raise CheckpointError(
                f"{self.path} has {nbytes} bytes and was written with {written.nbytes}: it is cut "
                "short, or another file"
            )

    @contextlib.contextmanager
    def refusing(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise CheckpointError(f"{self.path} is missing") from None
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read: {error}") from error

    def read_block(self, number: int) -> np.ndarray:
        start = number * BLOCK_NBYTES
        with self.refusing():
            data = os.pread(self.descriptor, BLOCK_NBYTES, start)
        crc, wanted = f"{zlib.crc32(data):08x}", self.written.crc32[number]
        if crc != wanted:
            raise CheckpointError(
                f"{self.path} is not what was written: the CRC-32 of its bytes from {start} on is "
                f"{crc}, and not {wanted}"
            )
        return np.frombuffer(data, np.uint8)

    def check(self) -> None:
        """Check all of it."""
        with ThreadPoolExecutor(4, "zk-check") as pool:
            for _ in pool.map(lambda number: self.read_block(number).size, self.blocks):
                pass

    def read(self, start: int, stop: int) -> np.ndarray:
        """(stop - start,) uint8."""
        first, last = start // BLOCK_NBYTES, -(-stop // BLOCK_NBYTES)
        found = np.empty(stop - start, np.uint8)
        for number in range(first, last):
            begin = number * BLOCK_NBYTES
            low, high = max(start, begin), min(stop, begin + BLOCK_NBYTES)
            found[low - start : high - start] = self.block(number)[low - begin : high - begin]
        return found

    def close(self) -> None:
        os.close(self.descriptor)


class Tensors(File):
    """A safetensors file, read by ranges of elements."""

    def __init__(self, folder: Path, written: Written) -> None:
        super().__init__(folder, written)
        self.entries: dict[str, Entry] = {}
        self.offsets: dict[str, int] = {}
        with undone(self.close):
            try:
                size = int.from_bytes(self.read(0, min(8, written.nbytes)).tobytes(), "little")
                if not 2 <= size <= min(LONGEST_HEADER, written.nbytes - 8):
                    raise ValueError(f"its header has {size} bytes")
                table = json.loads(self.read(8, 8 + size).tobytes())
                table.pop("__metadata__", None)
                for key, value in table.items():
                    entry = Entry(key, DTYPES[value["dtype"]], tuple(value["shape"]))
                    start, stop = (8 + size + place for place in value["data_offsets"])
                    if start < 8 + size or stop - start != entry.nbytes or stop > written.nbytes:
                        raise ValueError(f"{key!r} does not lie in the file")
                    self.entries[key], self.offsets[key] = entry, start
            except CheckpointError:
                raise
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                why = f"{self.path} is not a whole safetensors file: {error}"
                raise CheckpointError(why) from error

    def elements(self, key: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Elements of the flattened tensor ``key``: (n,)."""
        entry, offset = self.entries[key], self.offsets[key]
        size, stop = entry.dtype.itemsize, entry.numel if stop is None else stop
        return torch.from_numpy(self.read(offset + start * size, offset + stop * size)).view(
            entry.dtype
        )


def check_regular(path: Path) -> None:
    """CheckpointError for what is no regular file: opening a pipe would wait. FileNotFoundError."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise CheckpointError(f"{path} is no regular file")
