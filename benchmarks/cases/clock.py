"""The clock of all benchmarks: cases that are checked, and rows that say how long one takes beside its floor."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch

from zk.nn.deferred import default_device

Work = Callable[[], object]
CPU = torch.device("cpu")
FLOORS = {"gbps": "copy_gbps", "tflops": "matmul_tflops"}  # rate of a case -> the rate of this machine that bounds it


def the_gpu() -> torch.device:
    """This process's GPU; ValueError, with the reason, where there is none."""
    if not torch.cuda.is_available():
        built = f"this torch is built for CUDA {torch.version.cuda}" if torch.version.cuda else "this torch is built without CUDA"
        raise ValueError(f"torch sees no GPU ({built}), so there is nothing to measure; zk doctor says why")
    return default_device()


def wait(device: torch.device) -> None:
    """Wait for the device to finish its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(work: Work, rounds: int, device: torch.device = CPU, patience_s: float = 4.0) -> list[float]:
    """Seconds of each of ``rounds`` calls, with their work on ``device``, sorted; after a first call that does not count.

    Where they take more than ``patience_s`` together, three are enough.
    """
    taken: list[float] = []
    while len(taken) <= rounds and (len(taken) <= 3 or sum(taken) <= patience_s):
        start = time.perf_counter()
        work()
        wait(device)
        taken.append(time.perf_counter() - start)
    return sorted(taken[1:])


def row_of(name: str, seconds: list[float], floor_s: float, amounts: Mapping[str, float], **notes: Any) -> dict[str, Any]:
    """Median, p20 and p80 of the seconds, the fraction of the floor, rates at the median, and notes.

    ``amounts``: name of a rate -> the amount of one call, such as 1e9 bytes.
    """
    p20, median, p80 = (float(np.percentile(seconds, share)) for share in (20, 50, 80))
    row: dict[str, Any] = {"name": name, "median_s": median, "p20_s": p20, "p80_s": p80, "floor_s": floor_s, "fraction_of_floor": floor_s / median}
    return row | {rate: amount / median for rate, amount in amounts.items()} | notes


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """Work to time, checked already."""

    name: str
    work: Work
    amounts: dict[str, float]  # as of row_of; its rates are keys of FLOORS

    @classmethod
    def checked(cls, name: str, is_right: bool, work: Work, **amounts: float) -> Case:
        """RuntimeError unless the result ``is_right``."""
        if not is_right:
            raise RuntimeError(f"{name.replace(': ', ' by ')} does not agree with plain torch, so it is not timed")
        return cls(name, work, amounts)

    def row(self, floors: Mapping[str, float], seconds: list[float]) -> dict[str, Any]:
        """Its row, of seconds of calls."""
        floor_s = max(amount / floors[FLOORS[rate]] for rate, amount in self.amounts.items())
        return row_of(self.name, seconds, floor_s, self.amounts)


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """Rows of one subcommand."""

    bench: str
    floor: dict[str, float]  # rates of this machine, measured first
    rows: list[dict[str, Any]]
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, bench: str, cases: Iterable[Case], floors: dict[str, float], rounds: int, device: torch.device = CPU) -> Report:
        """Time the cases, one after the other as they are made."""
        return cls(bench, floors, [case.row(floors, seconds_of(case.work, rounds, device)) for case in cases])

    def as_dict(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return {"bench": self.bench, **self.settings, **self.floor, "rows": self.rows}


def copy_gbps(device: torch.device, nbytes: int = 1 << 29, rounds: int = 9) -> float:
    """1e9 bytes/s, read plus written, of a large copy in the device's memory; caches hold a small one."""
    source, target = torch.ones(nbytes // 4, device=device), torch.zeros(nbytes // 4, device=device)
    return 2 * source.nbytes / statistics.median(seconds_of(lambda: target.copy_(source), rounds, device)) / 1e9


def matmul_tflops(device: torch.device, size: int, dtype: torch.dtype = torch.bfloat16, rounds: int = 9) -> float:
    """1e12 operations/s of square matrices multiplied by the vendor's library."""
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * size**3 / statistics.median(seconds_of(lambda: torch.mm(a, b, out=out), rounds, device)) / 1e12
