"""`zk.offload.nvme` against fio: the same file size, block size, queue depth and O_DIRECT, in turn, on one drive. `make bench-nvme`.

usage: python benchmarks/nvme_vs_fio.py FOLDER [--gib 4] [--rounds 5] [--out FILE.md]      fio must be installed; it uses io_uring.
Both write a file that has its room reserved already and was written once, and then read it; each figure is one pass over all of it.
zk's buffers are in huge pages where the kernel has them, as in training; the last columns are zk with 4 KiB pages, like fio's.
"""

from __future__ import annotations

import argparse
import datetime
import json
import mmap
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from zk.offload.nvme import Engine, File, aligned

SETTINGS = ((4, 4 << 20), (8, 1 << 20), (4, 1 << 20))  # queue depth, block bytes


def with_fio(path: Path, nbytes: int, write: bool, depth: int, block: int) -> float:
    """Seconds of one pass by fio."""
    command = ["fio", "--name=pass", f"--filename={path}", "--rw=" + ("write" if write else "read"), "--ioengine=io_uring", "--direct=1"]
    command += [f"--bs={block}", f"--iodepth={depth}", f"--size={nbytes}", "--output-format=json", "--overwrite=1", "--fallocate=none"]
    report = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    figures = report["jobs"][0]["write" if write else "read"]
    assert figures["io_bytes"] == nbytes
    return float(figures["runtime"]) / 1e3


def write_once(path: Path, nbytes: int, buffers: list[torch.Tensor]) -> None:
    """Make the file, with its room reserved and all of it written."""
    with File(path, nbytes) as file:
        for offset in range(0, nbytes, buffers[0].nbytes):
            file.write(buffers[0], offset)


def with_zk(path: Path, nbytes: int, write: bool, depth: int, block: int, buffers: list[torch.Tensor]) -> float:
    """Seconds of one pass by File: requests of a buffer each, all handed over, then waited for."""
    engine = Engine(depth, block)
    with File(path, writable=True, engine=engine) as file:
        start = time.perf_counter()
        for index, offset in enumerate(range(0, nbytes, buffers[0].nbytes)):
            buffer = buffers[index % len(buffers)]
            if write:
                file.write_async(buffer, offset)
            else:
                file.read_async(buffer, offset)
        file.wait()
        seconds = time.perf_counter() - start
    engine.close()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gib", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if shutil.which("fio") is None:
        sys.exit("fio is not installed (Debian: apt install fio)")
    nbytes = int(options.gib * 2**30) // (64 << 20) * (64 << 20)
    path = options.folder / "zk-bench.bin"
    version = subprocess.run(["fio", "--version"], capture_output=True, text=True, check=True).stdout.strip()
    lines = [
        f"# I/O of {nbytes / 2**30:.0f} GiB, {datetime.date.today()}",
        "",
        f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores, Linux {platform.release()}, {version} with io_uring; O_DIRECT on both sides, "
        f"medians of {options.rounds} passes in turn. Command: `make bench-nvme`",
        "",
        "| operation | queue depth | block MiB | fio GB/s | zk GB/s | zk / fio | zk, 4 KiB pages | / fio |",
        "|---|---|---|---|---|---|---|---|",
    ]
    buffers = [aligned(64 << 20).fill_(index + 1) for index in range(8)]
    maps = [mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) for _ in buffers]
    for region in maps:
        region.madvise(mmap.MADV_NOHUGEPAGE)
    small = [torch.frombuffer(region, dtype=torch.uint8).fill_(index + 1) for index, region in enumerate(maps)]
    try:
        write_once(path, nbytes, buffers)
        for depth, block in SETTINGS:
            for write in (True, False):
                systems: dict[str, Callable[[], float]] = {
                    "fio": lambda w=write, d=depth, b=block: with_fio(path, nbytes, w, d, b),  # type: ignore[misc]
                    "zk": lambda w=write, d=depth, b=block: with_zk(path, nbytes, w, d, b, buffers),  # type: ignore[misc]
                    "zk_small": lambda w=write, d=depth, b=block: with_zk(path, nbytes, w, d, b, small),  # type: ignore[misc]
                }
                seconds: dict[str, list[float]] = {name: [] for name in systems}
                for number in range(options.rounds):
                    for name in sorted(systems, reverse=number % 2 == 1):
                        seconds[name].append(systems[name]())
                rates = {name: nbytes / statistics.median(times) / 1e9 for name, times in seconds.items()}
                operation = "write" if write else "read"
                row = f"{rates['fio']:.2f} | {rates['zk']:.2f} | {rates['zk'] / rates['fio']:.2f}"
                row += f" | {rates['zk_small']:.2f} | {rates['zk_small'] / rates['fio']:.2f}"
                lines.append(f"| {operation} | {depth} | {block >> 20} | {row} |")
                print(lines[-1], file=sys.stderr, flush=True)
    finally:
        path.unlink(missing_ok=True)
    text = "\n".join(lines) + "\n"
    print(text)
    if options.out:
        options.out.write_text(text)


if __name__ == "__main__":
    main()
