"""A software GPU: two CUDA devices, pretended, on which code for CUDA runs as it is.

    from tests import softgpu
    softgpu.install()     # before anything asks torch.cuda.is_available()
    ...
    softgpu.check()       # raises for every race; softgpu.races has them

For pytest: ``-p tests.softgpu.plugin``. For programs that tests start: ``softgpu.environment()``. Tensors are torch's own, with the dispatch
key CUDA and storages of ``cuda:0`` and ``cuda:1``; their memory is host memory, handed to torch through DLPack as a GPU's. All threads see
them; autograd runs its device threads. What makes these worse devices than real ones:

- Host and device tensors do not mix, nor do those of two devices.
- Copies, through cupy or by torch from and to page-locked memory, run as late as an event allows; until then their target holds NaN.
- Vector clocks of the host and of each stream find accesses to device memory that no event or synchronization orders, memory that is freed
  while another stream may still use it, and ends of copies in host memory that the host touches too early.
- New memory holds NaN. Each device has SOFTGPU_NBYTES (4 GiB) and no more.
- Triton kernels are interpreted; each of their loads and stores must be in memory of the device that they run on.
- NCCL takes device tensors only, and runs on streams of its own. gloo carries the bytes.

What it cannot show: speed, sizes, fragmentation, hangs of NCCL, compiled kernels. All threads of the host are taken to know what one of them
knows, so waiting that is missing between two host threads is not found. Random numbers are a CPU generator's.
"""

from __future__ import annotations

import os
from collections import defaultdict
from typing import Any

from tests.softgpu.memory import pinned_nbytes, refuse_to_pin
from tests.softgpu.streams import races, stats, synchronize

__all__ = ["check", "environment", "found", "install", "installed", "pinned_nbytes", "races", "refuse_to_pin", "stats"]
_kept: list[Any] = []


def installed() -> bool:
    """Whether this process has the software GPU."""
    return bool(_kept)


def install() -> None:
    """Make torch, cupy, Triton and NCCL believe in two devices, for the rest of the process."""
    if _kept:
        return
    os.environ.setdefault("TRITON_INTERPRET", "1")
    from tests.softgpu import native

    native.check_version()
    from tests.softgpu import copies, cuda, interpreter, memory, nccl, ops, storages, streams

    for index in range(memory.NUM_DEVICES):
        streams.make_queue(index, default=True)
    points = defaultdict[int, streams.Point](streams.Point)

    def record(event: int, device: int, stream: int) -> int:
        event = event or len(points) + 1
        points[event].record(streams.find_queue(device, stream))
        return event

    def block(event: int, device: int, stream: int) -> None:
        points[event].block(streams.find_queue(device, stream))

    def wait(device: int, stream: int | None) -> None:
        streams.synchronize(device) if stream is None else streams.host_learns(streams.find_queue(device, stream).clock)

    native.install_guard(memory.NUM_DEVICES, record, block, wait)
    native.install_hooks(memory.NUM_DEVICES, memory.is_pinned)
    for module in (ops, cuda, storages, copies, interpreter, nccl):
        _kept.append(module.install())


def found() -> list[str]:
    """Wait for the devices. Returns every race since the last call, each once."""
    synchronize()
    lines = sorted(set(races))
    races.clear()
    return lines


def check() -> None:
    """Wait for the devices. Raises AssertionError with every race since the last call."""
    if lines := found():
        raise AssertionError("\n".join([f"{len(lines)} races:", *lines]))


def environment() -> dict[str, str]:
    """Variables with which ranks and programs of tests have the software GPU. A program ends with status 86 where it raced."""
    return {"ZK_SOFTGPU": "1", "TRITON_INTERPRET": "1"}
