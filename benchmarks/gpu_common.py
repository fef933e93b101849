"""What the parts of `make gpu` share: where results go (lines of JSON), the device, and the dry run, in which a CPU stands in for it.

A part is a process of its own; it writes each figure down as soon as it has it, so that what comes later cannot take it away again.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import psutil
import torch

from zk.memory import peak_nbytes
from zk.offload.streams import Link
from zk.offload.twins import ThrottledLink, pretend

GIB = 1 << 30


class Bench:
    """One part's surroundings.

    Args:
        rows: file that lines of JSON are added to.
        section, job: what they are filed under.
        dry: tiny sizes, on a CPU whose link to itself moves 2 GB/s.
        host_nbytes: host memory of the machine; None asks the system.
    """

    def __init__(self, rows: Path, section: str, job: str, dry: bool, host_nbytes: int | None = None) -> None:
        self.rows, self.section, self.job, self.dry = rows, section, job, dry
        self.device = torch.device("cpu") if dry else torch.device("cuda", torch.cuda.current_device())
        self.host_nbytes = host_nbytes or psutil.virtual_memory().total
        self.used_before = _used_nbytes()

    def emit(self, kind: str, **values: Any) -> None:
        """Write one figure, or several that belong together, down."""
        write_row(self.rows, section=self.section, job=self.job, kind=kind, dry=self.dry, **values)

    def link(self) -> AbstractContextManager[Link | None]:
        """Inside, a dry run's CPU is a device of its own."""
        return pretend(ThrottledLink(2e9)) if self.dry else contextlib.nullcontext()

    def wait(self) -> None:
        """Until the device has done all it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def wait_for_compute(self) -> None:
        """Until the device has done what it was given on the stream that computes; copies beside it may go on."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def cap(self, nbytes: int) -> None:
        """Let torch's allocator have no more device memory than that."""
        if self.device.type == "cuda":
            torch.cuda.set_per_process_memory_fraction(min(1.0, nbytes / torch.cuda.get_device_properties(self.device).total_memory))

    def forget_peaks(self) -> None:
        """Give cached device memory back and start to look for the peak anew."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)

    def memory(self) -> dict[str, int]:
        """Peaks in bytes: of tensors on the device, of what torch's allocator took for them, of this process in host memory; and what the
        host has more in use than when the part began, which has memory in it that drivers took."""
        found = {"rss_nbytes": peak_nbytes(), "host_more_nbytes": _used_nbytes() - self.used_before, "device_nbytes": 0, "reserved_nbytes": 0}
        if self.device.type == "cuda":
            found["device_nbytes"] = torch.cuda.max_memory_allocated(self.device)
            found["reserved_nbytes"] = torch.cuda.max_memory_reserved(self.device)
        return found

    def seconds(self, work: Callable[[], object], rounds: int, warmup: int = 1) -> float:
        """Median of ``rounds`` calls, each with the wait for its end."""
        found = []
        for _ in range(warmup + rounds):
            self.wait()
            start = time.perf_counter()
            work()
            self.wait()
            found.append(time.perf_counter() - start)
        return statistics.median(found[warmup:])


def _used_nbytes() -> int:
    memory = psutil.virtual_memory()
    return memory.total - memory.available


def write_row(rows: Path, **values: Any) -> None:
    """Add a line of JSON to ``rows``."""
    with rows.open("a") as file:
        file.write(json.dumps({**values, "time": datetime.datetime.now().isoformat(timespec="seconds")}) + "\n")


def die_first() -> None:
    """Where the machine's memory is used up, end this process, and not the one that writes the report."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def arguments(description: str | None) -> argparse.ArgumentParser:
    """Those of every part."""
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--section", required=True)
    parser.add_argument("--job", required=True)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--host-nbytes", type=int)
    return parser


def bench_of(options: argparse.Namespace) -> Bench:
    """From ``arguments``."""
    die_first()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    return Bench(options.rows, options.section, options.job, options.dry_run, options.host_nbytes)
