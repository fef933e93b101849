"""Report on this machine: what it has for training, what stands in the way of speed or of running at all, and the remedy.

Every check is a row: what was looked at, what was found, and whether that is fine, worth knowing, or to be mended.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import importlib
import importlib.metadata
import mmap
import os
import platform
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

import psutil
import torch

from zk import numa
from zk.core.memory import host_memory
from zk.core.precision import has_fast_products
from zk.offload.cpu_adam import default_threads
from zk.offload.nvme import can_bypass_cache
from zk.offload.pinned import in_wsl
from zk.offload.tiers import readable

Verdict = Literal["ok", "note", "mend"]
_NEEDED = ("torch", "numpy", "triton", "numba", "psutil", "safetensors")
_OPTIONAL = {
    "cupy": "streams and page-locked memory on a CUDA device",
    "matplotlib": "the pictures of `zk train` and `zk plan`",
    "transformers": "models and Trainer of Hugging Face (pip install 'zk-offload[hf]')",
    "accelerate": "ZeroAccelerator and ZeroTrainer",
    "peft": "adapters",
    "lightning": "Trainer and Fabric of Lightning",
}
_IN_MEMORY = ("tmpfs", "ramfs")  # file systems
_THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """One row."""

    part: str
    what: str
    found: str
    verdict: Verdict = "ok"
    remedy: str = ""


@functools.cache
def _distributions() -> Mapping[str, list[str]]:
    return importlib.metadata.packages_distributions()


def version_of(package: str) -> str | None:
    """The installed version of what is imported as ``package``; None if it is not there."""
    for name in _distributions().get(package, ()):
        return importlib.metadata.version(name)
    return None


def versions() -> Iterator[Finding]:
    """Python, the packages that zk needs, and those it can use."""
    yield Finding("versions", "python", platform.python_version())
    yield Finding("versions", "zk", version_of("zk") or "not installed: run from its folder")
    for package in _NEEDED:
        found = version_of(package)
        if found is None:
            yield Finding("versions", package, "missing", "mend", f"python -m pip install {package}")
            continue
        try:
            importlib.import_module(package)
        except Exception as error:  # whatever an import runs into
            yield Finding("versions", package, f"{found}, which cannot be imported: {error}", "mend", f"python -m pip install --upgrade {package}")
        else:
            yield Finding("versions", package, found)
    for package, purpose in _OPTIONAL.items():
        found = version_of(package)
        if found is not None:
            yield Finding("versions", package, found)
        elif package != "cupy" or torch.cuda.is_available():
            name = "cupy-cuda12x or cupy-cuda13x, as `python -m torch.utils.collect_env` shows CUDA" if package == "cupy" else package
            verdict: Verdict = "mend" if package == "cupy" else "note"
            yield Finding("versions", package, f"not installed; for {purpose}", verdict, f"python -m pip install {name}")


def devices() -> Iterator[Finding]:
    """GPUs, their driver, and what goes with them."""
    if not torch.cuda.is_available():
        built = torch.version.cuda
        if shutil.which("nvidia-smi") is None:
            yield Finding("devices", "GPU", "none: zk trains on the CPU")
        elif built is None:
            yield Finding(
                "devices", "GPU", "there is a driver, and this torch is built for CPUs", "mend", "install a CUDA build: https://pytorch.org"
            )
        else:
            remedy = f"a driver for CUDA {built} or newer; see nvidia-smi"
            yield Finding("devices", "GPU", f"there is a driver, and torch (CUDA {built}) finds no device with it", "mend", remedy)
        return
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        what = f"{properties.name}, compute capability {properties.major}.{properties.minor}, {readable(free)} of {readable(total)} free"
        old = properties.major < 8
        yield Finding("devices", f"GPU {index}", what, "note" if old else "ok", "bf16 needs compute capability 8.0: use dtype='fp16'" if old else "")
    driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    yield Finding("devices", "driver", f"{driver or 'unknown'}; torch is built for CUDA {torch.version.cuda}")
    yield from _cupy()


def _cupy() -> Iterator[Finding]:
    names = [name for name in _distributions().get("cupy", ()) if name.startswith("cupy-cuda")]
    if len(names) > 1:
        yield Finding("devices", "cupy", " and ".join(names), "mend", f"they overwrite one another: python -m pip uninstall {' '.join(names[1:])}")
    major = (torch.version.cuda or "").split(".")[0]
    if names and major and not names[0].startswith(f"cupy-cuda{major}"):
        remedy = f"python -m pip uninstall {names[0]} && python -m pip install cupy-cuda{major}x"
        yield Finding("devices", "cupy", f"{names[0]} beside torch for CUDA {torch.version.cuda}", "mend", remedy)


def cores() -> Iterator[Finding]:
    """The engines that the CPU Adam has to run on."""
    there, mine = os.cpu_count() or 1, len(os.sched_getaffinity(0))
    if mine < there:
        remedy = "taskset, Slurm or a container leave this process no more: the update runs on those"
        yield Finding("cores", "cores", f"{mine} of {there}", "note", remedy)
    else:
        yield Finding("cores", "cores", str(there))
    device = numa.find(torch.device("cuda", 0)) if torch.cuda.is_available() else None
    threads = f"{default_threads() if device is None else device.num_threads} for each rank on this machine"
    yield Finding("cores", "threads of the CPU Adam", threads)
    yield from numa_nodes()
    quota = cpu_quota()
    if quota is not None and quota < mine:
        remedy = f"zk.ZeroConfig(num_threads={max(1, int(quota))}): more threads than that are stopped again and again"
        yield Finding("cores", "container's limit", f"{quota:g} cores' worth of time", "mend", remedy)
    if not torch.cuda.is_available():
        slow = [name for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)) if not has_fast_products(dtype)]
        dtypes = "stage=3, dtype='bf16', compute_dtype='fp32'" if "bf16" in slow else "dtype='bf16'"
        remedy = f"zk.ZeroConfig({dtypes}) for training on this CPU" + ", or dtype='fp32'" * ("bf16" in slow)
        if slow:
            yield Finding("cores", "matrix products", f"10 to 100 times slower than fp32 in {' and '.join(slow)}", "note", remedy)
        else:
            yield Finding("cores", "matrix products", "fast in fp32, bf16 and fp16")


def numa_nodes() -> Iterator[Finding]:
    """The nodes of the machine and of its GPUs, and what keeps a rank from being bound to its own."""
    there, what = numa.nodes(), "NUMA nodes"
    if len(there) < 2:
        yield Finding("cores", what, "one: nothing to bind")
        return
    if not torch.cuda.is_available():
        yield Finding("cores", what, f"{len(there)}; without a GPU ranks run where the launcher puts them (numactl, taskset)")
        return
    places = {index: numa.node_of(index) for index in range(torch.cuda.device_count())}
    said = ", ".join(f"GPU {index} on node {node}" if node in there else f"of GPU {index} not known" for index, node in places.items())
    if how := numa.chosen(there, frozenset(os.sched_getaffinity(0))):
        yield Finding("cores", what, f"{len(there)}, {said}; this process has been bound {how}, and stays so")
        return
    unknown = not set(places.values()) <= there.keys()
    remedy = "the system does not say where a GPU is: bind its rank with numactl, or torchrun --numa-binding" if unknown else ""
    yield Finding("cores", what, f"{len(there)}, {said}", "note" if unknown else "ok", remedy)
    probe = mmap.mmap(-1, mmap.PAGESIZE)
    for node in sorted(set(places.values()) & there.keys()):
        if reason := numa.place(ctypes.addressof(ctypes.c_char.from_buffer(probe)), mmap.PAGESIZE, node):
            yield Finding("cores", f"memory of node {node}", "the system refuses to choose it", "mend", reason)


def cpu_quota(root: Path = Path("/sys/fs/cgroup")) -> float | None:
    """Cores' worth of time that a container may have; None without a limit."""
    try:
        limit, period = (root / "cpu.max").read_text().split()
        return None if limit == "max" else int(limit) / int(period)
    except (OSError, ValueError):
        pass
    try:
        limit, period = ((root / "cpu" / name).read_text() for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us"))
        return None if int(limit) <= 0 else int(limit) / int(period)
    except (OSError, ValueError):
        return None


def memory() -> Iterator[Finding]:
    """Host memory, and what of it may be page-locked."""
    total, available = host_memory()
    machine = psutil.virtual_memory().total
    limited = total < machine
    yield Finding(
        "memory",
        "host",
        f"{readable(available)} of {readable(total)} free" + (f" (the machine has {readable(machine)})" if limited else ""),
        "note" if limited else "ok",
        "the limit of a container, or of ulimit -v: what goes beyond it ends the process" if limited else "",
    )
    swap = psutil.swap_memory()
    if swap.used > 1 << 30:
        yield Finding("memory", "swap", f"{readable(swap.used)} in use", "note", "pages of training state that are swapped out make steps slow")
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    unlimited = limit == resource.RLIM_INFINITY or limit >= total
    said = "no limit" if unlimited else readable(limit)
    wants = torch.cuda.is_available()
    if in_wsl():
        yield Finding("memory", "page-locked", f"{said}, in WSL", "note", "WSL locks only part of its memory: memory= under [wsl2] in .wslconfig")
    elif unlimited or not wants:
        yield Finding("memory", "page-locked", said)
    else:
        remedy = "'ulimit -l unlimited', LimitMEMLOCK=infinity (systemd), or docker run --ulimit memlock=-1"
        yield Finding("memory", "page-locked", said, "mend", remedy)
    try:
        huge = _THP.read_text()
    except OSError:
        huge = ""
    if "[never]" in huge:
        remedy = f"echo madvise | sudo tee {_THP}: buffers are touched several times faster in huge pages"
        yield Finding("memory", "huge pages", "never", "mend", remedy)


def path(folder: Path, rates: Callable[[str], float] | None) -> Iterator[Finding]:
    """A folder for the nvme tier. ``rates`` measures it, in 1e9 bytes/s."""
    part = str(folder)
    if folder.exists() and not folder.is_dir():
        yield Finding(part, "folder", "a file, not a folder", "mend", f"name a folder: {folder.absolute().parent} is the one that it is in")
        return
    if not folder.is_dir():
        yield Finding(part, "folder", "not there", "mend", f"mkdir -p {folder}, on the drive")
        return
    free = shutil.disk_usage(folder).free
    kind = filesystem(folder)
    no_drive = kind in _IN_MEMORY
    remedy = "this is host memory, not a drive: name a folder on one" if no_drive else ""
    yield Finding(part, "file system", f"{kind}, {readable(free)} free", "mend" if no_drive else "ok", remedy)
    try:
        direct = can_bypass_cache(part)
    except OSError as error:
        yield Finding(part, "writing", str(error), "mend", "choose a folder that this user may write to")
        return
    remedy = "transfers go through the page cache, which takes memory and time; ext4 and xfs take it" if not direct else ""
    yield Finding(part, "O_DIRECT", "yes" if direct else "no", "ok" if direct else "note", remedy)
    if rates is not None:
        rate = rates(part)
        slow = rate < 0.5
        remedy = "a step moves tens of bytes per parameter: use an NVMe drive of this machine" if slow else ""
        yield Finding(part, "reads and writes", f"{rate:.2f} GB/s", "note" if slow else "ok", remedy)


def filesystem(folder: Path) -> str:
    """The type of the file system that ``folder`` is on."""
    real = str(folder.resolve())
    best = max(
        (one for one in psutil.disk_partitions(all=True) if real == one.mountpoint or real.startswith(one.mountpoint.rstrip("/") + "/")),
        key=lambda one: len(one.mountpoint),
        default=None,
    )
    return best.fstype if best is not None else "unknown"


def in_memory(folder: Path) -> bool:
    """Tell if files in ``folder`` are host memory, and on no drive."""
    return filesystem(folder) in _IN_MEMORY


def environment() -> Iterator[Finding]:
    """Settings that change how zk runs."""
    if os.environ.get("TRITON_INTERPRET") == "1" and torch.cuda.is_available():
        yield Finding("environment", "TRITON_INTERPRET", "1", "mend", "kernels run in Python, thousands of times slower: unset it")
    if os.environ.get("CUDA_LAUNCH_BLOCKING") == "1" and torch.cuda.is_available():
        yield Finding("environment", "CUDA_LAUNCH_BLOCKING", "1", "mend", "nothing overlaps: unset it")
    allocator = os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or os.environ.get("PYTORCH_ALLOC_CONF") or ""
    if torch.cuda.is_available() and "expandable_segments:True" not in allocator:
        remedy = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True wastes less device memory"
        yield Finding("environment", "PYTORCH_CUDA_ALLOC_CONF", allocator or "not set", "note", remedy)


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.splitlines()[0].strip()
    except (OSError, subprocess.SubprocessError, IndexError):
        return ""


def examine(paths: Sequence[Path] = (), rates: Callable[[str], float] | None = None) -> list[Finding]:
    """All rows for this machine, and for ``paths`` on drives; ``rates`` measures those (see ``path``)."""
    found = [*versions(), *devices(), *cores(), *memory(), *environment()]
    for folder in paths:
        found += path(folder, rates)
    return found
