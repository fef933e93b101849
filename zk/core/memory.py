"""Host memory straight from the kernel: page-aligned, exactly sized, zeroed, in huge pages, really given back, and not copied for forked processes.

malloc is no place for buffers of megabytes that come and go: glibc before 2.39 cannot reuse a freed aligned block for a request of the
same size, so the heap grows (by as much as the model, where units are gathered and released), and 4 KiB pages are touched at 2.5 GB/s
where huge ones are at 15 (measured on 2 cores, kernel 6.18). Page alignment is also what O_DIRECT asks for.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import mmap
import os
import re
import resource
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch
from torch import Tensor

_HUGE = 2 << 20
_OWN = weakref.WeakValueDictionary[int, mmap.mmap]()  # regions that forked processes do not get, by address


def _map(nbytes: int, inherited: bool) -> mmap.mmap:
    region = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # another system: forked processes get copies of what is written, and pages are small
        if not inherited:
            region.madvise(18)  # MADV_WIPEONFORK: a forked process has zeros there, and the kernel copies nothing for it
            _OWN[ctypes.addressof(ctypes.c_char.from_buffer(region))] = region
        if nbytes >= _HUGE:
            region.madvise(mmap.MADV_HUGEPAGE)
    return region


def _protect() -> None:
    """End a forked process that reads what it was not given, rather than let it read zeros."""
    protect = ctypes.CDLL(None).mprotect
    for address, region in _OWN.items():
        protect(ctypes.c_void_p(address), ctypes.c_size_t(len(region)), 0)


os.register_at_fork(after_in_child=_protect)


def bequeath(tensor: Tensor) -> None:
    """Let processes that are forked from now on have host memory that was not ``inherited``."""
    with contextlib.suppress(KeyError):
        _OWN.pop(tensor.untyped_storage().data_ptr()).madvise(19)  # MADV_KEEPONFORK


def aligned(nbytes: int, inherited: bool = True) -> Tensor:
    """A page-aligned buffer of host memory: (nbytes,) uint8, zero. Its pages exist once they are written.

    Of what forked processes have too (``inherited``), the kernel copies each page that is written while they live: twice the optimizer states.
    """
    return torch.frombuffer(_map(nbytes, inherited), dtype=torch.uint8)[:nbytes]


staging = functools.partial(aligned, inherited=False)  # on the way to a device or a drive


def zeros(shape: int | tuple[int, ...], dtype: torch.dtype, device: torch.device, inherited: bool = False) -> Tensor:
    """Zeros in device memory, or in host memory whose pages exist once they are written. ``inherited``: as for ``aligned``."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    numel = math.prod(shape)
    if numel * dtype.itemsize < mmap.PAGESIZE:
        return torch.zeros(shape, dtype=dtype)
    return aligned(numel * dtype.itemsize, inherited).view(dtype).view(shape)


class Lease:
    """A flat tensor (numel,) whose memory can be given back and taken again, while the tensor, and every view of it, stay."""

    @torch.inference_mode(False)  # a new one may be needed within, and be trained with outside
    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self.nbytes = numel * dtype.itemsize
        self.region: mmap.mmap | None = None
        if device.type == "cpu":
            self.region = _map(self.nbytes, False)
            self.tensor = torch.frombuffer(self.region, dtype=torch.uint8)[: self.nbytes].view(dtype)
        else:
            self.tensor = torch.empty(numel, dtype=dtype, device=device)

    def allocate(self) -> None:
        """Allocate the memory again; its values are undefined."""
        if self.region is None:
            self.tensor.untyped_storage().resize_(self.nbytes)

    def free(self) -> None:
        """Give the memory back to where it came from."""
        if self.region is not None:
            self.region.madvise(mmap.MADV_DONTNEED)
        else:
            self.tensor.untyped_storage().resize_(0)


_TAIL = 1 << 12  # elements that are copied aside


def widen_(full: Tensor, narrow: torch.dtype) -> None:
    """Cast values in place: those of ``full`` (n,) are in the first half of its memory, in ``narrow``, of half the size.

    First the last half of the values, whose place is free; then half of what is left, whose place has been read; and so on.
    """
    source, stop = full.view(narrow), full.numel()
    while stop > _TAIL:
        start = (stop + 1) // 2
        full[start:stop] = source[start:stop]
        stop = start
    full[:stop] = source[:stop].clone()


def overwrite(tensor: Tensor, values: Tensor) -> None:
    """Write ``values`` to ``tensor``; where its elements share memory, as those of an expanded one do, it gets memory of its own."""
    if any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        tensor.data = values.to(tensor.device, tensor.dtype, copy=True)
    else:
        with torch.no_grad():
            tensor.copy_(values)


def trim() -> None:
    """Give back what malloc keeps of freed memory, where the C library can (glibc): it holds on to blocks of up to 32 MiB."""
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def peak_nbytes() -> int:
    """The most memory this process has had at once (its resident set's high-water mark)."""
    try:
        status = Path("/proc/self/status").read_text()
        return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) * 1024  # type: ignore[index]
    except (OSError, TypeError):  # no /proc: what getrusage says may include the process that started this one
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


_CGROUPS, _OWN_CGROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
# of version 2 and 1: limit, usage, and what of the usage are pages of files: the kernel drops them where memory is short, also those in use
_FIELDS = (
    ("memory.max", "memory.current", ("inactive_file", "active_file")),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
)


def _own_groups() -> Iterator[tuple[Path, tuple[str, str, tuple[str, ...]]]]:
    """Folders of this process's control groups for memory, from its own up to the root; names of the files in them."""
    try:
        lines = _OWN_CGROUPS.read_text().splitlines()
    except OSError:  # no /proc
        return
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "memory" not in controllers.split(","):
            continue
        root, fields = (_CGROUPS / "memory", _FIELDS[1]) if controllers else (_CGROUPS, _FIELDS[0])
        own = root / path.lstrip("/")
        for folder in (own, *own.parents):
            if folder.is_relative_to(root):
                yield folder, fields


def ranks_here(world: int) -> int:
    """How many of ``world`` ranks share this machine's memory, as the launcher says; one if it says nothing."""
    return max(1, min(world, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))


def free_addresses() -> int:
    """Bytes of addresses that this process may still take (ulimit -v); ``sys.maxsize`` without a limit."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return sys.maxsize if limit == resource.RLIM_INFINITY else max(0, limit - int(psutil.Process().memory_info().vms))


def host_memory() -> tuple[int, int]:
    """Bytes of host memory that this process may have, and that are free of them: the machine's, or less in a container with a limit, or where
    the process has one for its addresses (ulimit -v).
    """
    machine = psutil.virtual_memory()
    total, available = int(machine.total), int(machine.available)
    for folder, (limit_name, usage_name, droppable) in _own_groups():
        try:
            limit = (folder / limit_name).read_text().strip()
            if limit == "max" or int(limit) >= machine.total:
                continue
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            used = int((folder / usage_name).read_text()) - sum(int(stat.get(name, 0)) for name in droppable)
        except (OSError, ValueError):  # not mounted here, or another kernel's
            continue
        total, available = min(total, int(limit)), min(available, max(0, int(limit) - used))
    addresses = resource.getrlimit(resource.RLIMIT_AS)[0]
    return total if addresses == resource.RLIM_INFINITY else min(total, addresses), min(available, free_addresses())


def in_memory(folder: Path) -> bool:
    """Tell if files in ``folder`` are in host memory, not on a drive."""
    mounts = {disk.mountpoint: disk.fstype for disk in psutil.disk_partitions(all=True)}
    above = (str(path) for path in (folder.resolve(), *folder.resolve().parents))
    return next((mounts[path] for path in above if path in mounts), "") in ("tmpfs", "ramfs")


def free_swap() -> int:
    """Bytes that could still be swapped out: the machine's, or less in a container with a limit (of version 2 of control groups)."""
    free = int(psutil.swap_memory().free)
    for folder, _ in _own_groups():
        try:
            limit = (folder / "memory.swap.max").read_text().strip()
            if limit != "max":
                free = min(free, max(0, int(limit) - int((folder / "memory.swap.current").read_text())))
        except (OSError, ValueError):  # not mounted here, or another kernel's
            continue
    return free
