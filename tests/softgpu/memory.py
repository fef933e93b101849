"""Memory of the pretended devices: tensors that torch takes for CUDA's, over host memory, and who has used which bytes of them.

DLPack makes the tensors: a capsule says "CUDA" of host memory. They are plain torch tensors with a CUDA storage.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import dataclasses
import os
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tests.softgpu import native
from tests.softgpu.streams import BEFORE, LOCK, Queue, find_queue, host_clock, in_flight, queue_of, race

NUM_DEVICES = 2
NBYTES = int(os.environ.get("SOFTGPU_NBYTES", 4 << 30))  # of each device
ROUNDED = 512  # what torch's allocator rounds blocks up to
plainly = torch._C.DisableTorchFunction  # torch function modes and subclasses see nothing of what is done inside


@dataclasses.dataclass
class Account:
    """What is taken of a device's memory."""

    taken: int = 0
    peak: int = 0

    def add(self, nbytes: int, device: int) -> None:
        """Take ``nbytes``, or give them back if below zero. Raises torch.OutOfMemoryError."""
        if nbytes > 0 and self.taken + nbytes > NBYTES:
            free = f"GPU {device} has a total capacity of {NBYTES} bytes of which {NBYTES - self.taken} bytes is free"
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
    views: dict[Any, Tensor] = dataclasses.field(default_factory=dict)

    @property
    def device(self) -> int:
        return self.queue.device

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
                        f"{what} on {queue} {'writes' if write else 'reads'} device memory that {earlier} on {queue_of(serial)} "
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
        """The allocator gives freed memory to the next who asks on the same stream: it must come after all other streams' uses.

        It also comes after what streams named by ``record_stream`` have been asked to do, and so after all that these wait for.
        """
        clocks = [host_clock(), self.queue.clock, *(queue_of(serial).clock for serial in self.recorded)]
        for (serial, *_), (number, what) in self.uses.items():
            if max(clock.get(serial, 0) for clock in clocks) < number:
                race(f"{self.nbytes} bytes of device memory are freed while {what} on {queue_of(serial)} may still use them")


_blocks: dict[int, Block] = {}  # address of a StorageImpl -> what is behind it
_starts: list[int] = []  # first bytes of blocks, sorted
_at: dict[int, Block] = {}  # first byte -> block
_managed: dict[int, list[Any]] = {}  # address of a DLManagedTensor -> it, the StorageImpl made from it, the memory behind it


_freed = native.Mailbox()  # DLManagedTensors whose storages are gone
_collecting: list[int] = []  # threads that take freed memory back: one, with LOCK


def collect() -> None:
    """Take freed memory back. Comes before anything that could let a stream, or the host, know more than it did when it was freed."""
    if _freed.taken == _freed.count.value:
        return
    with LOCK:  # who waits for a collective may not have it, and two threads would take the same memory back
        if _collecting:  # a finalizer has run between two lines of the loop below, which goes on after it
            return
        _collecting.append(threading.get_ident())
        try:
            for address in _freed.take():
                _, key, block = _managed.pop(address)
                if _blocks.get(key) is block:  # else a new storage has its address already
                    del _blocks[key]
                place = bisect.bisect_left(_starts, block.start)
                if place < len(_starts) and _starts[place] == block.start:
                    del _starts[place]
                if _at.get(block.start) is block:  # else, here too, another one has the address already
                    del _at[block.start]
                accounts[block.device].add(-block.taken, block.device)
                block.check_free()
        finally:
            _collecting.clear()


BEFORE.append(collect)
_CODES = {torch.bool: 6, torch.bfloat16: 4}
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype, _new_capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


def _dlpack_type(dtype: torch.dtype) -> int:
    code = _CODES.get(dtype)
    if code is None:
        code = 5 if dtype.is_complex else 2 if dtype.is_floating_point else 1 if dtype == torch.uint8 else 0
    return code | dtype.itemsize << 11 | 1 << 16


_ODD = frozenset(getattr(torch, name) for name in dir(torch) if name.startswith("float8") or name.startswith("float4"))


def rounded(nbytes: int) -> int:
    return -(-nbytes // ROUNDED) * ROUNDED


def place_on(host: Tensor, queue: Queue) -> Tensor:
    """A tensor of the queue's device over the memory of ``host``, which nobody else has: its shape, its strides, its values."""
    with plainly(), LOCK:
        if host.dtype in _ODD:
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
        accounts[queue.device].add(rounded(nbytes), queue.device)
        ndim, start = host.ndim, storage.data_ptr()
        fields = (start, 2 | queue.device << 32, ndim | _dlpack_type(host.dtype) << 32, 0, 0, 0, 0, _freed.function, *host.shape, *host.stride())
        managed = (ctypes.c_int64 * (8 + 2 * ndim))(*fields)
        address = ctypes.addressof(managed)
        managed[3], managed[4] = address + 64, address + 64 + 8 * ndim
        block = Block(storage, start, nbytes, queue, rounded(nbytes))
        entry = _managed[address] = [managed, 0, block]
        tensor: Tensor = torch._C._from_dlpack(_new_capsule(address, b"dltensor", None))  # type: ignore[attr-defined]
        entry[1] = key = tensor.untyped_storage()._cdata
        _blocks[key] = block
        bisect.insort(_starts, start)
        _at[start] = block
        return tensor


def block_of(tensor: Tensor) -> Block:
    """The memory of a device tensor."""
    return _blocks[tensor.untyped_storage()._cdata]


def host_view(tensor: Tensor, block: Block | None = None) -> Tensor:
    """The same elements as a host tensor."""
    block = block or block_of(tensor)
    key = (tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride())
    view = block.views.get(key)
    if view is None:
        with plainly(), torch.no_grad():
            view = torch.empty(0, dtype=tensor.dtype, device="cpu").set_(block.host, tensor.storage_offset(), tensor.shape, tensor.stride())
        if len(block.views) > 256:
            block.views.clear()
        block.views[key] = view
    if tensor.is_neg() or tensor.is_conj():
        view = torch._neg_view(view) if tensor.is_neg() else torch.conj(view)
    return view


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
    if index < 0:
        return None
    block = _at.get(_starts[index])
    return block if block is not None and address + nbytes <= block.start + max(block.nbytes, 1) else None


def nbytes_of(storage: torch.UntypedStorage) -> int | None:
    """The size of a device storage; None for one that is not here."""
    block = _blocks.get(storage._cdata)
    return None if block is None else block.nbytes


# ---- page-locked host memory ------------------------------------------------------------------------------------------------------

_pinned: dict[int, tuple[int, str]] = {}  # first byte -> last, who locked it
_refusal: list[str] = []


class CudaError(RuntimeError):
    """cupy.cuda.runtime.CUDARuntimeError."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@contextlib.contextmanager
def refuse_to_pin(reason: str = "cudaErrorMemoryAllocation: out of memory") -> Iterator[None]:
    """Context: the system does not lock pages."""
    _refusal.append(reason)
    try:
        yield
    finally:
        _refusal.pop()


def register(address: int, nbytes: int, by: str) -> None:
    """cudaHostRegister."""
    with LOCK:
        if not nbytes or not address:
            raise CudaError(1, "cudaErrorInvalidValue: invalid argument")
        if find(address, 1) is not None:
            race("device memory is registered as the host's")
            raise CudaError(1, "cudaErrorInvalidValue: device memory cannot be registered")
        if _refusal:
            raise CudaError(2, _refusal[-1])
        if any(start < address + nbytes and address < stop for start, (stop, _) in _pinned.copy().items()):
            race("host memory is registered twice")
            raise CudaError(712, "cudaErrorHostMemoryAlreadyRegistered: part or all of the requested memory range is already mapped")
        _pinned[address] = (address + nbytes, by)


def unregister(address: int) -> None:
    """cudaHostUnregister."""
    with LOCK:
        if address not in _pinned:
            race("host memory is unregistered that was not registered")
            raise CudaError(713, "cudaErrorHostMemoryNotRegistered: pointer does not correspond to a registered memory region")
        stop, _ = _pinned.pop(address)
        if any(getattr(late, "host_start", 0) < stop and address < getattr(late, "host_stop", 0) for late in in_flight()):
            race("host memory is unlocked while a copy of it is in flight")


def is_pinned(address: int, nbytes: int = 1) -> bool:
    return any(start <= address and address + nbytes <= stop for start, (stop, _) in _pinned.copy().items())


def pinned_nbytes() -> int:
    """Bytes of host memory that are page-locked through cudaHostRegister."""
    return sum(stop - start for start, (stop, by) in _pinned.copy().items() if by == "cudaHostRegister")


def pinned_like(tensor: Tensor) -> Tensor:
    """An empty host tensor of the same shape in page-locked memory, as torch's pinned allocator gives it."""
    memory = (ctypes.c_char * max(tensor.nbytes, 1))()
    address = ctypes.addressof(memory)
    register(address, max(tensor.nbytes, 1), "torch")
    weakref.finalize(memory, _release_pinned, address).atexit = False
    with plainly():
        flat = torch.frombuffer(memory, dtype=torch.uint8)[: tensor.nbytes].view(tensor.dtype)
        if tensor.is_contiguous():
            return flat.view(tensor.shape)
        return flat.as_strided(tensor.shape, torch.empty_like(tensor, device="cpu").stride())


def _release_pinned(address: int) -> None:
    with LOCK:
        _pinned.pop(address, None)  # torch's allocator keeps blocks until their copies are over


def current_queue(device: int) -> Queue:
    """The calling thread's current stream of ``device``."""
    return find_queue(device, native.current_stream_handle(device))
