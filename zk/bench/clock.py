"""In: something to do, over and over. Out: Row, how long it takes (median, p20, p80) beside its floor. And what floors are made of."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

Work = Callable[[], object]


def wait(device: torch.device) -> None:
    """Until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# what takes so long is not done as often as it was asked for, but a few times; the user waits
PATIENCE_S, _FEW = 4.0, 3


def seconds_of(work: Work, rounds: int, device: torch.device | None = None, patience_s: float = PATIENCE_S) -> list[float]:
    """Of each of ``rounds`` calls, with what they start on ``device``, sorted; after a first call that does not count.

    Where they take more than ``patience_s`` together, three are enough.
    """
    taken: list[float] = []
    for _ in range(rounds + 1):
        if len(taken) > _FEW and sum(taken) > patience_s:
            break
        start = time.perf_counter()
        work()
        if device is not None:
            wait(device)
        taken.append(time.perf_counter() - start)
    return sorted(taken[1:])


def quantile(values: list[float], share: float) -> float:
    """Of sorted values, between neighbours in proportion."""
    place = share * (len(values) - 1)
    low = int(place)
    high = min(low + 1, len(values) - 1)
    return values[low] + (place - low) * (values[high] - values[low])


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One thing that was timed."""

    name: str
    seconds: list[float]  # sorted
    floor_s: float
    amounts: dict[str, float] = dataclasses.field(default_factory=dict)  # name of a rate -> what of it is done in one call, such as 1e9 bytes
    notes: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    def as_dict(self) -> dict[str, Any]:
        """Seconds, rates at the median, the fraction of the floor, and notes."""
        return {
            "name": self.name,
            "median_s": self.median_s,
            "p20_s": quantile(self.seconds, 0.2),
            "p80_s": quantile(self.seconds, 0.8),
            "floor_s": self.floor_s,
            "fraction_of_floor": self.floor_s / self.median_s,
            **{name: amount / self.median_s for name, amount in self.amounts.items()},
            **self.notes,
        }


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """What one subcommand found."""

    bench: str
    floor: dict[str, float]  # what floors were computed from, measured first
    rows: list[Row]
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return {"bench": self.bench, **self.settings, **self.floor, "rows": [row.as_dict() for row in self.rows]}


def copy_gbps(device: torch.device, nbytes: int = 1 << 29, rounds: int = 9) -> float:
    """1e9 bytes/s, read plus written, of a large copy in the device's memory; caches hold a small one."""
    source, target = torch.ones(nbytes // 4, device=device), torch.zeros(nbytes // 4, device=device)
    return 2 * source.nbytes / statistics.median(seconds_of(lambda: target.copy_(source), rounds, device)) / 1e9


def matmul_tflops(device: torch.device, size: int, dtype: torch.dtype = torch.bfloat16, rounds: int = 9) -> float:
    """1e12 operations/s of square matrices multiplied by the vendor's library."""
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * size**3 / statistics.median(seconds_of(lambda: torch.mm(a, b, out=out), rounds, device)) / 1e12
