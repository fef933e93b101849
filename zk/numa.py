"""NUMA: the node of a rank's device, on whose cores zk's own threads run, and in whose memory its buffers lie.

On a machine with several nodes a device hangs on one of them, and copies, or an update by threads, that cross to another share the connection
between the two. What is bound is zk's: threads whose names begin with "zk", those that numba starts for them, and memory that zk maps. The threads
of the user and of torch stay where they are, as DataLoader workers, which are forked from them, would inherit it. What a launcher has chosen is kept.
"""

from __future__ import annotations

import ctypes
import dataclasses
import errno
import functools
import mmap
import os
import platform
import threading
from pathlib import Path

import torch

from zk.core.logs import rank_log

SYSFS = Path("/sys")
_MBIND, _GET_MEMPOLICY = {"aarch64": (235, 236)}.get(platform.machine(), (237, 239))  # numbers of system calls, else of x86_64
_PREFERRED = 1  # MPOL_PREFERRED: from another node where this one is full
_OPENMP = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")


@dataclasses.dataclass(frozen=True, slots=True)
class Binding:
    """The node of a rank's device."""

    node: int
    num_nodes: int  # with cores, on this machine
    cores: frozenset[int]  # of the node, that this process may use
    num_ranks: int  # on this node

    @property
    def num_threads(self) -> int:
        """An even share of the node's cores."""
        return max(1, len(self.cores) // self.num_ranks)


bound: Binding | None = None  # of this process: one rank, and one device


def nodes() -> dict[int, frozenset[int]]:
    """The cores of each node that has some."""
    found = {}
    for folder in SYSFS.glob("devices/system/node/node[0-9]*"):
        cores = _numbers((folder / "cpulist").read_text())
        if cores:
            found[int(folder.name.removeprefix("node"))] = cores
    return found


def _numbers(text: str) -> frozenset[int]:
    """The kernel's lists, such as 0-3,8."""
    found = set[int]()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def node_of(index: int) -> int:
    """The node of a CUDA device; -1 if the system does not say, as in many virtual machines."""
    device = torch.cuda.get_device_properties(index)
    place = f"{device.pci_domain_id:04x}:{device.pci_bus_id:02x}:{device.pci_device_id:02x}.0"  # type: ignore[attr-defined]
    try:
        return int((SYSFS / "bus/pci/devices" / place / "numa_node").read_text())
    except OSError:
        return -1


def find(device: torch.device) -> Binding | None:
    """The binding of a rank that computes on ``device``; None where there is nothing to choose, or where it is not known, or chosen already."""
    if device.type != "cuda":
        return None  # what computes is torch's threads, which the launcher places
    there, mine = nodes(), frozenset(os.sched_getaffinity(0))
    if len(there) < 2 or chosen(there, mine):
        return None
    index = torch.cuda.current_device() if device.index is None else device.index
    node = node_of(index)
    cores = there.get(node, frozenset()) & mine
    return Binding(node, len(there), cores, _ranks_on(node, index, len(there))) if cores else None


def chosen(there: dict[int, frozenset[int]], mine: frozenset[int]) -> str:
    """How the launcher has bound this process, which may run on the cores ``mine``; empty if it has not."""
    node = next((number for number, cores in there.items() if mine <= cores), None)
    if node is not None:
        return f"to cores of node {node}"
    names = [name for name in _OPENMP if os.environ.get(name, "false").lower() not in ("false", "disabled", "none")]
    mode = ctypes.c_int(0)
    if not names and not _libc().syscall(_GET_MEMPOLICY, ctypes.byref(mode), None, ctypes.c_ulong(0), None, ctypes.c_ulong(0)) and mode.value:
        return "by a memory policy, as of numactl"
    return f"by {' and '.join(names)}" if names else ""


def _ranks_on(node: int, index: int, num_nodes: int) -> int:
    """Ranks of this machine whose device is on a node: by their devices, if rank n has device n; else as if they were spread evenly."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
    if ranks <= torch.cuda.device_count() and str(index) == os.environ.get("LOCAL_RANK"):
        return sum(node_of(other) == node for other in range(ranks))
    return -(-ranks // num_nodes)


def bind(binding: Binding | None) -> None:
    """Bind zk's threads, those that there are and those to come, and memory that zk maps from now on; None binds nothing from now on."""
    global bound
    bound = binding
    for thread in threading.enumerate() if binding is not None else ():
        if is_own(thread) and thread.native_id is not None:
            join(thread.native_id)


def is_own(thread: threading.Thread) -> bool:
    """Tell if a thread is zk's."""
    return thread.name.startswith("zk")


def join(thread: int = 0) -> None:
    """Bind a thread, by its number in the system; the calling one by default."""
    if bound is not None:
        try:
            os.sched_setaffinity(thread, bound.cores)
        except OSError as error:  # the cores that this process may use have changed
            _say(f"threads stay where they are: {error}")


def prefer(region: mmap.mmap) -> None:
    """Have the pages of a region, none of which exist yet, in the node's memory, as far as it has room."""
    if bound is not None and (reason := place(ctypes.addressof(ctypes.c_char.from_buffer(region)), len(region), bound.node)):
        _say(f"host memory is where the system puts it: {reason}")


def place(address: int, nbytes: int, node: int) -> str:
    """Ask the kernel for that; returns why it refuses, and what to do."""
    mask = (ctypes.c_ulong * (node // 64 + 1))()
    mask[node // 64] = 1 << node % 64
    most = ctypes.c_ulong(64 * len(mask) + 1)
    if not _libc().syscall(_MBIND, ctypes.c_void_p(address), ctypes.c_ulong(nbytes), _PREFERRED, mask, most, 0):
        return ""
    code = ctypes.get_errno()
    remedy = "; a container needs docker run --cap-add SYS_NICE" if code in (errno.EPERM, errno.ENOSYS) else ""
    return f"mbind to node {node}: {os.strerror(code)}{remedy}"


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


@functools.cache
def _say(what: str) -> None:
    """Warn once."""
    rank_log.warning("%s", what)
