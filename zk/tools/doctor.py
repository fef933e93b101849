"""Check this machine for problems and suggest fixes: `zk doctor`."""

from __future__ import annotations

import fcntl
import importlib
import os
import platform
import resource
import shutil
import time
from collections.abc import Iterator
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import NamedTuple

import psutil
import torch

from zk.memory import aligned, host_memory
from zk.offload.cpu_adam import default_threads
from zk.offload.file import File
from zk.tools.summary import size

NEEDED = ("zk", "torch", "numpy", "numba", "psutil", "safetensors")
USED = ("matplotlib", "transformers", "accelerate", "peft", "trl", "lightning")


class Finding(NamedTuple):
    """One row: what was found, and what ``to_do`` about it, if anything; ``must`` for errors."""

    part: str
    what: str
    found: str
    to_do: str = ""
    must: bool = False


def packages() -> Iterator[Finding]:
    """Python, and packages; triton and cupy only where there is a GPU."""
    yield Finding("versions", "python", platform.python_version())
    installed, cuda = packages_distributions(), (torch.version.cuda or "").partition(".")[0]
    on_gpu = {"triton": "triton", "cupy": f"cupy-cuda{cuda}x"} if torch.cuda.is_available() else {}
    for module in (*NEEDED, *on_gpu):
        found = ", ".join(f"{name} {version(name)}" for name in installed.get(module, ()))
        try:
            importlib.import_module(module)
            yield Finding("versions", module, found or "not installed: run from its folder")
        except Exception as error:  # a broken package can raise anything
            install = f"python -m pip install {on_gpu.get(module, module)}"
            yield Finding("versions", module, f"{found}: {error}".strip(": "), install, True)
    used = (f"{name} {version(name)}" for name in USED if name in installed)
    yield Finding("versions", "used if installed", ", ".join(used))


def multiplies_bf16() -> bool:
    """Tell if this CPU multiplies matrices in bf16 about as fast as in fp32."""
    known = torch.backends.mkldnn.is_available()
    return not known or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def machine() -> Iterator[Finding]:
    """GPUs, cores and the dtypes that they multiply fast, host memory."""
    has_gpu, has_driver = torch.cuda.is_available(), bool(shutil.which("nvidia-smi"))
    if not has_gpu:
        fix = "torch does not see it: install a CUDA build for its driver" * has_driver
        yield Finding("machine", "GPU", "none", fix, has_driver)
    for index in range(torch.cuda.device_count()):
        card, free = torch.cuda.get_device_properties(index), torch.cuda.mem_get_info(index)[0]
        fix = "it has no bf16: use dtype='fp16'" * (card.major < 8)
        yield Finding("machine", f"GPU {index}", f"{card.name}, {size(free)} free", fix)
    said = f"{len(os.sched_getaffinity(0))} of {os.cpu_count()}"
    yield Finding("machine", "cores", f"{said}; update threads per rank: {default_threads()}")
    fast = multiplies_bf16()
    fix = "bf16 is slow on this CPU: use dtype='fp32'" * (not fast and not has_gpu)
    yield Finding("machine", "CPU", f"bf16 is {'fast' if fast else 'slow'}", fix)
    (total, free), whole = host_memory(), psutil.virtual_memory().total
    fix = f"a container allows no more of {size(whole)}" * (total < whole)
    yield Finding("machine", "memory", f"{size(free)} of {size(total)} free", fix)
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    low = has_gpu and 0 <= limit < total  # -1 is no limit
    said, fix = f"{limit >> 20} MiB", "ulimit -l unlimited, or docker run --ulimit memlock=-1" * low
    yield Finding("machine", "locked memory", said if limit >= 0 else "no limit", fix, low)


def measure_drive(folder: str, nbytes: int = 256 << 20) -> tuple[float, float, bool]:
    """Bytes/s that a drive is read and written, and if that is past the page cache.

    Raises OSError if ``folder`` is not there, cannot be written, or has no room for ``nbytes``.
    """
    file, rates, part = File([folder], nbytes), [], nbytes // 4
    try:
        buffers = [aligned(part).fill_(number) for number in range(4)]
        for move in (file.write_async, file.read_async, file.write_async):  # the first allocates
            start = time.perf_counter()
            for request in [move(buffer, part * i) for i, buffer in enumerate(buffers)]:
                request.wait()
            rates.append(nbytes / (time.perf_counter() - start))
        flags = fcntl.fcntl(file.descriptors[0], fcntl.F_GETFL)
        return rates[1], rates[2], bool(flags & os.O_DIRECT)
    finally:
        file.close()


def in_memory(folder: Path) -> bool:
    """Tell if files in ``folder`` are in host memory, not on a drive."""
    mounts = {disk.mountpoint: disk.fstype for disk in psutil.disk_partitions(all=True)}
    above = (str(path) for path in (folder.resolve(), *folder.resolve().parents))
    return next((mounts[path] for path in above if path in mounts), "") in ("tmpfs", "ramfs")


def drive(folder: Path) -> Iterator[Finding]:
    """A folder for the nvme tier: free space, O_DIRECT and rates."""
    part = str(folder)
    try:
        fix = "it is host memory: choose a folder on a drive" * in_memory(folder)
        yield Finding(part, "free", size(shutil.disk_usage(folder).free), fix, bool(fix))
        read, write, direct = measure_drive(part)
        fix = "files use the page cache: choose ext4 or xfs" * (not direct)
        yield Finding(part, "O_DIRECT", "yes" if direct else "no", fix)
        said, slow = f"{read / 1e9:.2f} GB/s read, {write / 1e9:.2f} written", read < 0.5e9
        yield Finding(part, "rate", said, "use a local NVMe drive" * slow)
    except OSError as error:
        fix = f"mkdir -p {folder}, writable for you, on a drive with 256 MiB free"
        yield Finding(part, "folder", error.strerror or str(error), fix, True)
