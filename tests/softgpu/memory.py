"""Memory of the pretended devices: tensors that torch takes for CUDA's, over host memory, and who has used which bytes of them.

DLPack makes the tensors: a capsule says "CUDA" of host memory. They are plain torch tensors with a CUDA storage.
"""

from __future__ import annotations

import bisect
import ctypes
import dataclasses
import functools
import os
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from tests.softgpu import native
from tests.softgpu.streams import BEFORE, HOST, LOCK, QUEUES, Queue, find_queue, in_flight, race

NUM_DEVICES = 2
NBYTES = int(os.environ.get("SOFTGPU_NBYTES", 4 << 30))  # of each device
ROUNDED = 512  # what torch's allocator rounds blocks up to
plainly = torch._C.DisableTorchFunction  # torch function modes and subclasses see nothing of what is done inside


@dataclasses.dataclass
class Account:
    """What is taken of a device's memory."""

    taken: int = 0
    peak: int = 0

    def add(self, nbytes: int) -> None:
        """Take ``nbytes``, or give them back if below zero. Raises torch.OutOfMemoryError."""
        if nbytes > 0 and self.taken + nbytes > NBYTES:
            free = f"The GPU has a total capacity of {NBYTES} bytes of which {NBYTES - self.taken} bytes is free"
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {nbytes} bytes. {free}.")
        self.taken += nbytes
        self.peak = max(self.peak, self.taken)


accounts = [Account() for _ in range(NUM_DEVICES)]


@dataclasses.dataclass(slots=True, eq=False)
class Block:
    """Memory behind one CUDA storage."""

    host: torch.UntypedStorage
    start: int
    nbytes: int
    queue: Queue  # the stream it was allocated on
    taken: int
    uses: dict[tuple[int, int, int, bool], tuple[int, str]] = dataclasses.field(default_factory=dict)  # stream, bytes, write -> number, what
    recorded: set[int] = dataclasses.field(default_factory=set)  # streams named by Tensor.record_stream

    def use(self, queue: Queue, begin: int, end: int, write: bool, what: str) -> bool:
        """The latest operation of ``queue`` reads or writes bytes begin..end. Returns whether it comes after all that it must."""
        ordered = True
        mine, clock, covered = queue.serial, queue.clock, []
        for key, (number, earlier) in self.uses.items():
            serial, first, last, wrote = key
            if serial != mine:
                if (write or wrote) and first < end and begin < last and clock.get(serial, 0) < number:
                    ordered = False
                    race(
                        f"{what} on {queue} {'writes' if write else 'reads'} device memory that {earlier} on {QUEUES[serial]} "
                        f"{'writes' if wrote else 'reads'}, unordered"
                    )
            elif not write:
                continue
            if write and begin <= first and last <= end:
                covered.append(key)
        for key in covered:
            del self.uses[key]
        self.uses[mine, begin, end, write] = (queue.count, what)
        return ordered

    def check_free(self) -> None:
        """Who asks for freed memory on its stream comes after uses on all others, and after what those of ``record_stream`` were asked to do."""
        clocks = [HOST, self.queue.clock, *(QUEUES[serial].clock for serial in self.recorded)]
        for (serial, *_), (number, what) in self.uses.items():
            if max(clock.get(serial, 0) for clock in clocks) < number:
                race(f"{self.nbytes} bytes of device memory are freed while {what} on {QUEUES[serial]} may still use them")


_blocks: dict[int, Block] = {}  # address of a StorageImpl -> what is behind it
_starts: list[int] = []  # first bytes of blocks, sorted
_at: dict[int, Block] = {}  # first byte -> block
_managed: dict[int, tuple[Any, int, Block]] = {}  # address of a DLManagedTensor -> it, the StorageImpl made from it, the memory behind it
_freed = native.Mailbox()  # DLManagedTensors whose storages are gone
_collecting: list[bool] = []


def collect() -> None:
    """Take freed memory back. Comes before anything that could let a stream, or the host, know more than it did when it was freed."""
    if _freed.taken == _freed.count.value:
        return
    with LOCK:
        if _collecting:  # a finalizer has run between two lines of the loop below, which goes on after it
            return
        _collecting.append(True)
        try:
            for address in _freed.take():
                _, key, block = _managed.pop(address)
                if _blocks.get(key) is block:  # else a new storage has its address already
                    del _blocks[key]
                if _at.get(block.start) is block:  # else, here too, another one has the address already
                    del _at[block.start]
                    del _starts[bisect.bisect_left(_starts, block.start)]
                accounts[block.queue.device].add(-block.taken)
                block.check_free()
        finally:
            _collecting.clear()


BEFORE.append(collect)
_CODES = {torch.bool: 6, torch.bfloat16: 4, torch.uint8: 1}
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype, _new_capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


@functools.cache
def _dlpack_type(dtype: torch.dtype) -> int:
    code = _CODES.get(dtype, 5 if dtype.is_complex else 2 if dtype.is_floating_point else 0)
    return code | dtype.itemsize << 11 | 1 << 16


def place_on(host: Tensor, queue: Queue) -> Tensor:
    """A tensor of the queue's device over the memory of ``host``, which nobody else has: its shape, its strides, its values."""
    with plainly(), LOCK:
        if host.is_floating_point() and host.itemsize == 1:  # DLPack has no such kinds
            return place_on(host.view(torch.uint8), queue).view(host.dtype)
        storage = host.untyped_storage()
        nbytes = storage.nbytes()
        if host.storage_offset() or not nbytes - 64 < host.nbytes <= nbytes:
            host = host.clone(memory_format=torch.contiguous_format)
            storage = host.untyped_storage()
            nbytes = storage.nbytes()
        if not nbytes:  # torch keeps nothing of an empty capsule
            storage = torch.UntypedStorage(64)
        collect()
        taken = -(-nbytes // ROUNDED) * ROUNDED
        accounts[queue.device].add(taken)
        ndim, start = host.ndim, storage.data_ptr()
        fields = (start, 2 | queue.device << 32, ndim | _dlpack_type(host.dtype) << 32, 0, 0, 0, 0, _freed.function, *host.shape, *host.stride())
        managed = (ctypes.c_int64 * (8 + 2 * ndim))(*fields)
        address = ctypes.addressof(managed)
        managed[3], managed[4] = address + 64, address + 64 + 8 * ndim
        tensor: Tensor = torch._C._from_dlpack(_new_capsule(address, b"dltensor", None))  # type: ignore[attr-defined]
        key, block = tensor.untyped_storage()._cdata, Block(storage, start, nbytes, queue, taken)
        _managed[address] = managed, key, block
        _blocks[key] = _at[start] = block
        index = bisect.bisect_left(_starts, start)
        if _starts[index : index + 1] != [start]:  # else what was there is freed, and not yet taken back
            _starts.insert(index, start)
        return tensor


def block_of(tensor: Tensor) -> Block:
    """The memory of a device tensor."""
    return _blocks[tensor.untyped_storage()._cdata]


def host_view(tensor: Tensor) -> Tensor:
    """The same elements as a host tensor."""
    with plainly(), torch.no_grad():
        place = block_of(tensor).host, tensor.storage_offset(), tensor.shape, tensor.stride()
        view = torch.empty(0, dtype=tensor.dtype, device="cpu").set_(*place)
    return torch._neg_view(view) if tensor.is_neg() else view.conj() if tensor.is_conj() else view


def span(tensor: Tensor) -> tuple[int, int]:
    """First and last byte of a tensor in its storage."""
    first = tensor.storage_offset() * tensor.itemsize
    if tensor.is_contiguous():
        return first, first + tensor.nbytes
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return first, first + (1 + last) * tensor.itemsize


def find(address: int, nbytes: int) -> Block | None:
    """The block that has ``nbytes`` from ``address`` on."""
    index = bisect.bisect(_starts, address) - 1
    block = _at[_starts[index]] if index >= 0 else None
    return block if block is not None and address + nbytes <= block.start + max(block.nbytes, 1) else None


def nbytes_of(storage: torch.UntypedStorage) -> int | None:
    """The size of a device storage; None for one that is not here."""
    block = _blocks.get(storage._cdata)
    return None if block is None else block.nbytes


# ---- page-locked host memory ------------------------------------------------------------------------------------------------------

_pinned: dict[int, int] = {}  # first byte -> last
locks_pages = True


class CudaError(RuntimeError):
    """cupy.cuda.runtime.CUDARuntimeError."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def refuse_to_pin() -> Any:
    """Context: the system does not lock pages."""
    return mock.patch(f"{__name__}.locks_pages", False)


def register(address: int, nbytes: int, flags: int) -> None:
    """cudaHostRegister."""
    with LOCK:
        if not nbytes or not address or find(address, 1) is not None:
            raise CudaError(1, "cudaErrorInvalidValue: invalid argument")
        if not locks_pages:
            raise CudaError(2, "cudaErrorMemoryAllocation: out of memory")
        if any(start < address + nbytes and address < stop for start, stop in _pinned.items()):
            race("host memory is registered twice")
            raise CudaError(712, "cudaErrorHostMemoryAlreadyRegistered: part or all of the requested memory range is already mapped")
        _pinned[address] = address + nbytes


def unregister(address: int) -> None:
    """cudaHostUnregister."""
    with LOCK:
        if address not in _pinned:
            race("host memory is unregistered that was not registered")
            raise CudaError(713, "cudaErrorHostMemoryNotRegistered: pointer does not correspond to a registered memory region")
        stop = _pinned.pop(address)
        if any(late.host_start < stop and address < late.host_stop for late in in_flight()):
            race("host memory is unlocked while a copy of it is in flight")


def is_pinned(address: int, nbytes: int = 1) -> bool:
    return any(start <= address and address + nbytes <= stop for start, stop in _pinned.copy().items())


def pinned_nbytes() -> int:
    """Bytes of host memory that are page-locked."""
    return sum(stop - start for start, stop in _pinned.copy().items())


def current_queue(device: int) -> Queue:
    """The calling thread's current stream of ``device``."""
    return find_queue(device, native.current_stream_handle(device))
