"""Floors of a machine: the link, page locking, host memory, the device and the drive. Part of `make gpu`.

    python benchmarks/gpu_floors.py machine|floors|kernels [--dry-run] [--nvme FOLDER]

Every copy is compared with its source before it is timed. A floor that fails is a row, and the next one is measured.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from cases import clock, io
from cases import kernels as bench_kernels
from cases import link as bench_link
from gpu_common import GIB, die_first, emit
from torch import Tensor

from zk.kernels.reference import AdamStep
from zk.memory import aligned, host_memory, zeros
from zk.nn.deferred import default_device
from zk.offload.cpu_adam import adam_, default_engine
from zk.offload.tiers import link_to

DIRECTIONS = ("host to device", "device to host", "both at once")
_CPU = torch.device("cpu")


def machine(dry: bool, nvme: Path) -> None:
    """Hardware and versions."""
    found: dict[str, Any] = {"python": platform.python_version(), "linux": platform.release()}
    found |= {"torch": torch.__version__, "cuda": torch.version.cuda, "host_nbytes": host_memory()[0]}
    for name in ("triton", "cupy", "numba"):
        try:
            found[name] = importlib.import_module(name).__version__
        except ImportError:
            found[name] = "not there"
    found["cores"] = len(os.sched_getaffinity(0))
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    found["cpu"] = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
    found |= {"gpu": "no GPU", "device_nbytes": 4 * GIB, "free_nbytes": 4 * GIB, "capability": "none", "driver": "none", "pcie": "none"}
    if torch.cuda.is_available():
        device = default_device()
        found["gpu"] = torch.cuda.get_device_name(device)
        found["free_nbytes"], found["device_nbytes"] = torch.cuda.mem_get_info(device)
        found["capability"] = ".".join(map(str, torch.cuda.get_device_capability(device)))
        query = ["nvidia-smi", "--query-gpu=driver_version,pcie.link.gen.max,pcie.link.width.max", "--format=csv,noheader"]
        try:
            answer = subprocess.run(query, capture_output=True, text=True, check=True, timeout=20).stdout.splitlines()[0].split(", ")
            found["driver"], found["pcie"] = answer[0], f"generation {answer[1]}, {answer[2]} lanes"
        except (OSError, subprocess.SubprocessError, IndexError):
            found["driver"] = found["pcie"] = "unknown"
    emit("machine", **found)


def link(dry: bool, nvme: Path) -> None:
    """Copies between host and device: by plain PyTorch on a stream for each direction, and by zk, which also measures pageable memory."""
    device, numel, rounds = default_device(), 1 << 20 if dry else 1 << 28, 2 if dry else 7
    values = torch.arange(numel, dtype=torch.int32)
    far, near = [values, torch.zeros_like(values)], [torch.zeros_like(values, device=device), values.to(device)]
    if device.type == "cuda":
        far = [one.pin_memory() for one in far]
        streams = [torch.cuda.Stream(device) for _ in far]

    def copy(number: int) -> None:
        target, source = ((near[0], far[0]), (far[1], near[1]))[number]
        if device.type != "cuda":
            target.copy_(source)
            return
        with torch.cuda.stream(streams[number]):
            target.copy_(source, non_blocking=True)

    clock.wait(device)
    for direction, numbers in zip(DIRECTIONS, ((0,), (1,), (0, 1)), strict=True):
        seconds = clock.seconds_of(lambda ns=numbers: [copy(n) for n in ns], rounds, device)  # type: ignore[misc]
        emit("copy", system="torch, pinned", direction=direction, gbps=len(numbers) * values.nbytes / statistics.median(seconds) / 1e9)
    if not (torch.equal(near[0].cpu(), values) and torch.equal(far[1], values)):
        raise RuntimeError("copies of plain PyTorch are not their sources")
    if device.type != "cuda":
        return  # its memory is the host's
    found = bench_link.measure(values.nbytes, rounds, device).as_dict()
    for row in found["rows"]:
        memory, _, direction = row["name"].partition(", ")
        emit("copy", system=f"zk, {memory}", direction=direction, gbps=row["gbps"], page_locked=found["page_locked"])


def pin(dry: bool, nvme: Path) -> None:
    """Seconds to touch and to lock pages of host memory, as zk does; and those of torch's pinned allocator."""
    device, nbytes = default_device(), 1 << 22 if dry else 8 * GIB
    start = time.perf_counter()
    memory = aligned(nbytes).fill_(1)
    touched = time.perf_counter()
    locked, here = touched, link_to(device)
    if here is not None:
        here.pin(memory)
        locked = time.perf_counter()
        here.unpin(memory)
    emit("pin", system="zk", nbytes=nbytes, touch_s=touched - start, lock_s=locked - touched)
    del memory
    if device.type == "cuda":
        start = time.perf_counter()
        pinned = torch.empty(nbytes, dtype=torch.uint8).pin_memory() if dry else torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        emit("pin", system="torch", nbytes=pinned.nbytes, touch_s=0.0, lock_s=time.perf_counter() - start)


def host(dry: bool, nvme: Path) -> None:
    """Host memory by threads: a = b + s c over 1 GiB each, and the update of 128M parameters."""
    import numba

    @numba.njit(parallel=True, fastmath=True)  # type: ignore[untyped-decorator]
    def triad(a, b, c, s):  # type: ignore[no-untyped-def]
        for i in numba.prange(a.size):
            a[i] = b[i] + s * c[i]

    numel, rounds = (1 << 18, 2) if dry else (1 << 28, 5)
    a, b, c = (zeros(numel, torch.float32, _CPU).fill_(value) for value in (0.0, 1.0, 2.0))
    triad(a.numpy(), b.numpy(), c.numpy(), 3.0)
    if not bool((a == 7).all()):
        raise RuntimeError("the triad has other results than 1 + 3 x 2")
    for threads in _threads():
        numba.set_num_threads(threads)
        seconds = clock.seconds_of(lambda: triad(a.numpy(), b.numpy(), c.numpy(), 3.0), rounds)
        emit("triad", threads=threads, gbps=3 * a.nbytes / statistics.median(seconds) / 1e9)
    numel //= 2
    param, grad = (zeros(numel, torch.bfloat16, _CPU).fill_(value) for value in (1.0, 1e-3))
    master, (m, v) = zeros(numel, torch.int16, _CPU), (zeros(numel, torch.float32, _CPU).fill_(1e-6) for _ in range(2))
    step = AdamStep(1e-4, 0.9, 0.95, 1e-8, 0.1, True, 1)
    for threads in _threads():
        update: Callable[[], Tensor | None] = functools.partial(adam_, param, grad, master, m, v, step, num_threads=threads)
        seconds = clock.seconds_of(update, rounds)
        emit("cpu adam", engine=default_engine(), threads=threads, billion_per_s=numel / statistics.median(seconds) / 1e9)


def _threads() -> list[int]:
    cores = len(os.sched_getaffinity(0))
    return [count for count in (1, 2, 4, 8, 16, 32, 64) if count < cores] + [cores]


def device(dry: bool, nvme: Path) -> None:
    """The device's matrix unit in bf16, and its memory."""
    size, rounds, where = 256 if dry else 8192, 2 if dry else 20, default_device()
    emit("matmul", size=size, tflops=clock.matmul_tflops(where, size, rounds=rounds))
    emit("device copy", gbps=clock.copy_gbps(where, 1 << 22 if dry else GIB, rounds))


def drive(dry: bool, nvme: Path) -> None:
    """Whole passes over a file, past the page cache."""
    nvme.mkdir(parents=True, exist_ok=True)
    nbytes = 1 << 22 if dry else 2 * GIB
    written, read = io.passes(str(nvme), nbytes, 2)
    for name, seconds in (("write", written), ("read", read)):
        emit("drive", direction=name, gbps=nbytes / statistics.median(seconds) / 1e9, nbytes=nbytes)


def kernels(dry: bool, nvme: Path) -> None:
    """Each Triton kernel beside plain torch."""
    found = bench_kernels.measure(*((6400, 64, 1) if dry else ()), device=default_device()).as_dict()
    emit("kernels", rows=found["rows"], copy_gbps=found["copy_gbps"], matmul_tflops=found["matmul_tflops"])


def main() -> None:
    parts: dict[str, tuple[Callable[[bool, Path], None], ...]]
    parts = {"machine": (machine,), "floors": (link, pin, host, device, drive), "kernels": (kernels,)}
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("part", choices=parts)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--nvme", type=Path, default=Path("runs/nvme"))
    options = parser.parse_args()
    die_first()
    failed = False
    for part in parts[options.part]:
        try:
            part(options.dry_run, options.nvme)
        except Exception as error:  # the other floors are still wanted
            failed = True
            emit("failed", what=part.__name__, reason=f"{type(error).__name__}: {error}")
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
