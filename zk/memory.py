"""Host memory: aligned, used again, not copied by a fork; and how much there is."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import re
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor

SMALL = 1 << 12
HUGE = 2 << 20
WIPE_ON_FORK = 18  # madvise(2): a forked process has zeros there, and the kernel copies nothing
CGROUPS, OWN_CGROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")

_regions = weakref.WeakSet[mmap.mmap]()  # what forked processes lack
_free: dict[Any, list[np.ndarray]] = {}  # by size and link: buffers that nobody uses


def round_up(nbytes: int, multiple: int = mmap.PAGESIZE) -> int:
    return -(-nbytes // multiple) * multiple


# ---- memory that is new --------------------------------------------------------------------------


def aligned(nbytes: int) -> Tensor:
    """(nbytes,) uint8, zero, page-aligned. Its pages exist once they are written.

    Forked processes do not get it: the kernel would copy each page that is written meanwhile.
    """
    region = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE)
    with contextlib.suppress(OSError):  # another system: pages are small, and forks copy
        region.madvise(WIPE_ON_FORK)
        _regions.add(region)
        if nbytes >= HUGE:
            region.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(region, dtype=torch.uint8)[:nbytes]


def end_reads_in_forks() -> None:
    """End a forked process that reads what it was not given, rather than let it read zeros."""
    for region in _regions:
        address = ctypes.byref(ctypes.c_char.from_buffer(region))
        ctypes.CDLL(None).mprotect(address, ctypes.c_size_t(len(region)), 0)


os.register_at_fork(after_in_child=end_reads_in_forks)


def zeros(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """(numel,) zeros; in host memory their pages exist once they are written."""
    nbytes = numel * dtype.itemsize
    if device.type != "cpu" or nbytes < mmap.PAGESIZE:
        return torch.zeros(numel, dtype=dtype, device=device)
    return aligned(nbytes).view(dtype)


# ---- memory that is used again -------------------------------------------------------------------


def empty(numel: int, dtype: torch.dtype, device: torch.device, link: Any = None) -> Tensor:
    """(numel,) of any value, as torch.empty, from buffers of the same size that were freed.

    A buffer is free when the last tensor that shares its memory is gone. Its pages stay touched,
    which costs a third of a second for each GiB that is new. ``link`` (a CudaLink): they are
    page-locked for it, once.
    """
    nbytes = numel * dtype.itemsize
    if device.type != "cpu" or (nbytes < SMALL and link is None):
        return torch.empty(numel, dtype=dtype, device=device)
    capacity = round_up(max(nbytes, 1))
    free = _free.setdefault((capacity, link), [])
    try:
        buffer = free.pop()
    except IndexError:
        new = aligned(capacity)
        if link is not None:
            link.pin(new.zero_())  # touched by all threads
        buffer = new.numpy()
    lent = buffer[:nbytes].view(Lent)
    lent.buffer, lent.free = buffer, free
    return torch.from_numpy(lent).view(dtype)


class Lent(np.ndarray):
    """What a tensor's storage keeps, and so it is gone when that is: the buffer is free then."""

    buffer: np.ndarray
    free: list[np.ndarray]

    def __del__(self) -> None:
        self.free.append(self.buffer)


def trim() -> None:
    """Give back to the system what nobody uses, and what malloc keeps of freed memory (glibc)."""
    for (_, link), buffers in _free.items():
        while buffers:
            buffer = torch.from_numpy(buffers.pop())
            if link is not None:  # pages must not be unmapped while they are locked
                link.unpin(buffer)
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


# ---- how much there is ---------------------------------------------------------------------------


def host_memory() -> tuple[int, int]:
    """Bytes of host memory that this process may have, and that are free of them.

    The machine's; less in a control group (version 2) with a limit, as a container is one. What the
    kernel drops where memory is short counts as free.
    """
    machine = psutil.virtual_memory()
    total, free = machine.total, machine.available
    own = CGROUPS / OWN_CGROUPS.read_text().rpartition("0::/")[2].strip()
    for group in (own, *own.parents):
        with contextlib.suppress(OSError, ValueError):  # without a limit ("max"), or no group
            limit = int((group / "memory.max").read_text())
            stat = (group / "memory.stat").read_text()
            dropped = re.findall(r"(?m)^(?:in)?active_file (\d+)$", stat)
            used = int((group / "memory.current").read_text()) - sum(map(int, dropped))
            total, free = min(total, limit), min(free, max(0, limit - used))
    return total, free
