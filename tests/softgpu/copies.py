"""Copies between device and host memory that happen as late as they may.

Until then the target holds NaN: for the device until a later operation of it comes after the copy, in host memory until the host has waited,
whatever the device knows. A source that the host changes meanwhile, a target that it writes, memory that is unlocked: each is a race.
"""

from __future__ import annotations

import ctypes
import importlib.machinery
import sys
import types
from typing import Any

from tests.softgpu import native
from tests.softgpu.memory import CudaError, find, is_pinned, register, unregister
from tests.softgpu.streams import LOCK, Queue, find_queue, in_flight, place, put_off, race, stats

TO_DEVICE, TO_HOST = 1, 2  # cudaMemcpyKind


class Copy:
    """One copy in flight on a stream. ``keep`` lives as long."""

    def __init__(self, queue: Queue, target: int, source: int, nbytes: int, to_device: bool, what: str, keep: Any = None) -> None:
        near, far = (target, source) if to_device else (source, target)
        block = find(near, nbytes)
        if block is None or find(far, 1) is not None:
            race(f"{what}: its device end is not device memory, or its host end is")
            raise CudaError(1, "cudaErrorInvalidValue: invalid argument")
        stats["copies"] += 1
        stats["pageable_copies"] += not is_pinned(far, nbytes)
        self.block = block  # whose memory lives as long
        self.queue, self.nbytes, self.to_device, self.what, self.keep = queue, nbytes, to_device, what, keep
        self.target, self.source = target, source
        self.asked_at, self.landed = place(), False
        self.host_start, self.host_stop = far, far + nbytes
        self.number = queue.issue()
        self.clock = dict(queue.clock)
        use_host(queue, far, far + nbytes, not to_device, what)
        self.ordered = block.use(queue, near - block.start, near - block.start + nbytes, to_device, what)
        self.content = ctypes.string_at(source, nbytes)
        ctypes.memset(target, 0xFF, nbytes)  # NaN in fp32, bf16 and fp16
        put_off(queue, self)

    def run(self) -> None:
        if self.to_device and self.ordered:  # else it may have been too early, and the target keeps its NaN
            ctypes.memmove(self.target, self.source, self.nbytes)

    def land(self) -> None:
        if self.landed:
            return
        self.landed = True
        said = f"{self.what} ({self.nbytes} bytes, asked for at {self.asked_at})"
        if self.to_device:
            if ctypes.string_at(self.source, self.nbytes) != self.content:
                race(f"the host changed the source of {said} before it was read")
            return
        if ctypes.string_at(self.target, self.nbytes) != b"\xff" * self.nbytes:
            race(f"the host changed the target of {said} before it was written")
        if self.ordered:
            ctypes.memmove(self.target, self.content, self.nbytes)


def use_host(queue: Queue, start: int, stop: int, write: bool, what: str) -> None:
    """The latest operation of ``queue`` reads or writes bytes of the host: after copies in flight that it comes after; others are races."""
    for other in in_flight():
        if isinstance(other, Copy) and (write or not other.to_device) and start < other.host_stop and other.host_start < stop:
            if queue.clock.get(other.queue.serial, 0) < other.number:
                race(f"{what} meets {other.what} in host memory ({other.nbytes} bytes, asked for at {other.asked_at}), unordered")
            else:
                other.land()


def _memcpy_async(dst: int, src: int, size: int, kind: int, stream: int) -> None:
    with LOCK:
        if size:
            Copy(find_queue(native.current_device(), stream), dst, src, size, kind == TO_DEVICE, "an upload" if kind == TO_DEVICE else "an offload")


def install() -> None:
    """Make ``import cupy`` find what zk uses of it: copies, and host memory that is page-locked."""
    names = "cupy", "cupy.cuda", "cupy.cuda.runtime"
    cupy, cuda, runtime = (types.ModuleType(name) for name in names)
    runtime.__dict__.update(CUDARuntimeError=CudaError, memcpyAsync=_memcpy_async, hostRegister=register, hostUnregister=unregister)
    cuda.__dict__.update(runtime=runtime)
    cupy.__dict__.update(cuda=cuda, __version__="14.2.0", __path__=[])
    for name, module in zip(names, (cupy, cuda, runtime), strict=True):
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        sys.modules[name] = module
