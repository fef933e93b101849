"""Copies between device and host memory that happen as late as they may.

Until then the target holds NaN: for the device until a later operation of it comes after the copy, in host memory until the host has waited,
whatever the device knows. A source that the host changes meanwhile, a target that it writes, memory that is unlocked: each is a race.
"""

from __future__ import annotations

import ctypes
import time
from typing import Any

from tests.softgpu.memory import Block, CudaError, find, is_pinned
from tests.softgpu.streams import Late, Queue, in_flight, land, place, put_off, race, stats, tell

TO_DEVICE, TO_HOST = 1, 2  # cudaMemcpyKind


class Copy(Late):
    """One copy in flight on a stream. ``keep`` lives as long."""

    def __init__(self, queue: Queue, target: int, source: int, nbytes: int, to_device: bool, what: str, keep: Any = None) -> None:
        near, far = (target, source) if to_device else (source, target)
        block = find(near, nbytes)
        if block is None:
            race(f"{what}: its device end is not device memory")
            raise CudaError(1, f"cudaErrorInvalidValue: {near:#x} is not device memory")
        if find(far, 1) is not None:
            race(f"{what}: its host end is device memory")
            raise CudaError(1, "cudaErrorInvalidValue: the host's end is device memory")
        if not block.taken:
            race(f"{what}: an illegal memory access: the storage was resized to 0")
            raise CudaError(700, "cudaErrorIllegalAddress: the storage was resized to 0")
        stats["copies"] += 1
        stats["pageable_copies"] += not is_pinned(far, nbytes)
        self.block: Block = block
        self.queue, self.nbytes, self.to_device, self.what, self.keep = queue, nbytes, to_device, what, keep
        self.target, self.source = target, source
        self.asked_at, self.landed = place(), False
        self.host_start, self.host_stop = far, far + nbytes
        self.number, self.begin = queue.issue(), time.time_ns()
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
        tell("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)" if self.to_device else "Memcpy DtoH (Device -> Pinned)", self.queue, self.begin)
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
                land(other)
