"""Safetensors files, written as tensors come, checked block by block, and read back by ranges of elements.

A file is written from front to back through a few page-aligned buffers, past the page cache where the file system can, while the next ones
are filled: memory does not grow with the file. A CRC-32 of every block goes into the manifest, so that a reader finds what a drive, a copy or a
hand has changed, before it changes anything itself. Format: https://github.com/huggingface/safetensors (8 bytes of length, JSON, data).
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import errno
import functools
import json
import math
import os
import secrets
import stat
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zk.core.events import COMPLETED
from zk.core.memory import aligned
from zk.core.units import overlap
from zk.offload.nvme import ALIGN, File, round_up
from zk.offload.worker import Worker
from zk.parallel.comm import raised_by_all

BLOCK_NBYTES = 8 << 20  # of a checksum, and of a transfer
_DTYPES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
}
DTYPE_OF = {name: dtype for dtype, name in _DTYPES.items()}
_IN_FLIGHT = 4
_LONGEST_HEADER = 100 << 20


@raised_by_all
class CheckpointError(ValueError):
    """A checkpoint, or a file of it, is not what it should be. The message names the file."""


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True, slots=True)
class Written:
    """A file's entry in a manifest."""

    name: str
    nbytes: int
    crc32: tuple[int, ...]  # of each block of BLOCK_NBYTES

    def as_json(self) -> dict[str, Any]:
        return {"name": self.name, "nbytes": self.nbytes, "block_nbytes": BLOCK_NBYTES, "crc32": [f"{crc:08x}" for crc in self.crc32]}

    @classmethod
    def of_bytes(cls, name: str, data: bytes) -> Written:
        """Of a small file with these bytes."""
        return cls(name, len(data), tuple(zlib.crc32(data[at : at + BLOCK_NBYTES]) for at in range(0, len(data), BLOCK_NBYTES)))

    @classmethod
    def of_json(cls, value: Mapping[str, Any]) -> Written:
        if value["block_nbytes"] != BLOCK_NBYTES:
            raise ValueError(f"checksums of blocks of {value['block_nbytes']} bytes are not known")
        return cls(str(value["name"]), int(value["nbytes"]), tuple(int(crc, 16) for crc in value["crc32"]))


def header_of(entries: Sequence[Entry], metadata: Mapping[str, str]) -> bytes:
    """The beginning of a safetensors file, padded so that data starts on a page."""
    table: dict[str, Any] = {"__metadata__": dict(metadata)}
    start = 0
    for entry in entries:
        if entry.dtype not in _DTYPES:
            raise ValueError(f"{entry.key!r} is {entry.dtype}, which safetensors files cannot hold")
        table[entry.key] = {"dtype": _DTYPES[entry.dtype], "shape": list(entry.shape), "data_offsets": [start, start + entry.nbytes]}
        start += entry.nbytes
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (round_up(8 + len(text)) - 8 - len(text))
    return len(text).to_bytes(8, "little") + text


class Writer:
    """One safetensors file, tensor by tensor in the order of ``entries``.

    Args:
        path: of the file, which must not exist.
        entries: all tensors it will have.
        metadata: strings for its header.

    Raises OSError if there is not room for all of it, before anything is written.
    """

    def __init__(self, path: Path, entries: Sequence[Entry], metadata: Mapping[str, str]) -> None:
        self.path, self.entries = path, list(entries)
        header = header_of(entries, metadata)
        self.nbytes = len(header) + sum(entry.nbytes for entry in entries)
        self.file = File(path, round_up(self.nbytes))
        self.crcs = [0] * -(-self.nbytes // BLOCK_NBYTES)
        self.buffers = [aligned(BLOCK_NBYTES) for _ in self.crcs[:_IN_FLIGHT]]
        self.writes = [COMPLETED] * len(self.buffers)  # the last of each buffer
        # not a ThreadPoolExecutor, which takes nothing any more when a program ends with a save in progress
        self.workers = [Worker(f"zk write {number}") for number in range(len(self.buffers))]
        self.position = self.at = self.next = 0  # bytes taken, of them in the current entry; number of the entry
        with undone(self.abort):
            self._append(torch.frombuffer(bytearray(header), dtype=torch.uint8))

    def add(self, tensor: Tensor) -> None:
        """The next elements, in order, of the next tensors."""
        if tensor.numel() == 0:
            return
        while self.at == self.entries[self.next].nbytes:
            self.next, self.at = self.next + 1, 0
        entry = self.entries[self.next]
        assert tensor.dtype == entry.dtype and self.at + tensor.nbytes <= entry.nbytes, f"{tensor.dtype} {tuple(tensor.shape)} for {entry}"
        self.at += tensor.nbytes
        self._append(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8))

    def _append(self, data: Tensor) -> None:
        done = 0
        while done < data.nbytes:
            block, start = divmod(self.position, BLOCK_NBYTES)
            slot = block % len(self.buffers)
            if start == 0:
                self.writes[slot].wait()
            count = min(BLOCK_NBYTES - start, data.nbytes - done)
            self.buffers[slot][start : start + count].copy_(data[done : done + count])
            self.position += count
            done += count
            if start + count == BLOCK_NBYTES:
                self._send(block, BLOCK_NBYTES)

    def _send(self, block: int, nbytes: int) -> None:
        slot = block % len(self.buffers)
        self.writes[slot] = self.workers[slot].submit(functools.partial(self._write, block, self.buffers[slot], nbytes))

    def _write(self, block: int, memory: Tensor, nbytes: int) -> None:
        memory[nbytes : round_up(nbytes)] = 0
        request = self.file.write_async(memory[: round_up(nbytes)], block * BLOCK_NBYTES)
        self.crcs[block] = zlib.crc32(memory[:nbytes].numpy().data)
        request.wait()

    def finish(self) -> Written:
        """Write what is left, and make the drive keep all of it."""
        assert self.position == self.nbytes, f"{self.position} of {self.nbytes} bytes of {self.path} were given"
        try:
            blocks, rest = divmod(self.nbytes, BLOCK_NBYTES)
            if rest:
                self._send(blocks, rest)
            for write in self.writes:
                write.wait()
            os.truncate(self.path, self.nbytes)
            self.file.flush()
        finally:
            self._close()
        return Written(self.path.name, self.nbytes, tuple(self.crcs))

    def abort(self) -> None:
        """Give up: the file goes."""
        try:
            self._close()
        finally:
            self.path.unlink(missing_ok=True)

    def _close(self) -> None:
        for worker in self.workers:
            worker.close()
        self.file.close()


Blocks = Callable[["Reader", int], Tensor]  # checked bytes of a block, by its number


class Reader(contextlib.ExitStack):
    """A safetensors file, read by ranges of elements, as a context.

    Args:
        path: of the file.
        written: what a manifest keeps of it: then every block is checked as it is read. None reads without checks.
        blocks: ``Reader.block``, or a cache of it.
    """

    def __init__(self, path: Path, written: Written | None = None, blocks: Blocks | None = None) -> None:
        super().__init__()
        self.path, self.written, self.blocks = path, written, blocks or Reader.block
        check_regular(path)
        self.file = self.enter_context(File(path, writable=False))
        try:
            length = torch.empty(8, dtype=torch.uint8)
            self._fill(length, 0)
            size = int.from_bytes(length.numpy().tobytes(), "little")
            if not 2 <= size <= min(_LONGEST_HEADER, self.file.nbytes - 8):
                raise ValueError(f"its header has {size} bytes")
            text = torch.empty(size, dtype=torch.uint8)
            self._fill(text, 8)
            table = json.loads(text.numpy().tobytes())
            table.pop("__metadata__", None)
            self.entries = {key: Entry(key, DTYPE_OF[value["dtype"]], tuple(value["shape"])) for key, value in table.items()}
            self.offsets = {key: 8 + size + value["data_offsets"][0] for key, value in table.items()}
            for key, entry in self.entries.items():
                start, stop = table[key]["data_offsets"]
                if start < 0 or stop - start != entry.nbytes or self.offsets[key] + entry.nbytes > self.file.nbytes:
                    raise ValueError(f"{key!r} does not lie in the file")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            self.close()
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"{path} is not a whole safetensors file: {error}") from error

    def read(self, key: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Elements ``start`` to ``stop`` of the flattened tensor ``key``."""
        entry = self.entries[key]
        numel = math.prod(entry.shape)
        stop = numel if stop is None else stop
        assert 0 <= start <= stop <= numel
        found = torch.empty(stop - start, dtype=entry.dtype)
        self._fill(found.view(torch.uint8), self.offsets[key] + start * entry.dtype.itemsize)
        return found

    def _fill(self, data: Tensor, start: int) -> None:
        """Fill (nbytes,) uint8 with the bytes of the file from ``start`` on."""
        if self.written is None:
            self.file.read(data, start)
            return
        stop = start + data.numel()
        for number in range(start // BLOCK_NBYTES, -(-stop // BLOCK_NBYTES)):
            block, begin = self.blocks(self, number), number * BLOCK_NBYTES
            here, there = overlap(slice(start, stop), slice(begin, begin + block.numel()))
            data[here] = block[there]

    def block(self, number: int) -> Tensor:
        """The bytes of a block; CheckpointError if they are not what was written."""
        assert self.written is not None
        return _read_block(self.file, self.written, number)


def check_name(folder: Path, name: str) -> None:
    """CheckpointError unless ``name`` is that of a file in ``folder``, and of none elsewhere."""
    if not isinstance(name, str) or name in ("", ".", "..") or Path(name).name != name:
        raise CheckpointError(f"{folder / 'manifest.json'} names {name!r}, which is not in its folder")


def check_regular(path: Path) -> None:
    """CheckpointError for what is no file with bytes of its own: opening a FIFO waits until somebody writes. FileNotFoundError."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise CheckpointError(f"{path} is no regular file")


def check_file(folder: Path, written: Written) -> None:
    """CheckpointError, with the file's name, unless it is byte for byte what was written."""
    check_name(folder, written.name)
    path = folder / written.name
    try:
        check_regular(path)
        nbytes = path.stat().st_size
        if nbytes != written.nbytes:
            raise CheckpointError(f"{path} has {nbytes} bytes and was written with {written.nbytes}: it is cut short, or another file")
        with File(path, writable=False) as file, concurrent.futures.ThreadPoolExecutor(_IN_FLIGHT, "zk-crc") as pool:
            list(pool.map(lambda block: _read_block(file, written, block).numel(), range(-(-nbytes // BLOCK_NBYTES))))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def _read_block(file: File, written: Written, block: int) -> Tensor:
    """The bytes of a block, checked."""
    data = aligned(max(0, min(BLOCK_NBYTES, written.nbytes - block * BLOCK_NBYTES)))
    file.read(data, block * BLOCK_NBYTES)
    crc, expected = zlib.crc32(data.numpy().data), written.crc32[block] if block < len(written.crc32) else None
    if crc != expected:
        raise CheckpointError(
            f"{file.paths[0]} is not what was written: the CRC-32 of its bytes from {block * BLOCK_NBYTES} on is {crc:08x}, and not "
            f"{expected or 0:08x}"
        )
    return data


@contextlib.contextmanager
def undone(undo: Callable[..., object], *args: Any, **kwargs: Any) -> Iterator[None]:
    """Call ``undo`` with the arguments if what is done inside fails, also by Ctrl-C."""
    try:
        yield
    except BaseException:
        undo(*args, **kwargs)
        raise


def write_durably(path: Path, data: bytes) -> None:
    """A small file that is whole or not there, also after a crash."""
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    with undone(beside.unlink, missing_ok=True):
        with open(beside, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the drive keep the folder's names."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):  # a file system that keeps names by itself
            raise
    finally:
        os.close(descriptor)


assert BLOCK_NBYTES % ALIGN == 0
