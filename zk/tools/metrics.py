"""Numbers of training: ``optimizer.metrics()``, and rates over an interval of steps."""

from __future__ import annotations

import re
import time
import weakref
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from zk.tools.phases import WAITED, count_waits
from zk.tools.summary import placed

if TYPE_CHECKING:
    from zk.optimizer import ZeroOptimizer

_rates: weakref.WeakKeyDictionary[Any, Rates] = weakref.WeakKeyDictionary()


def metrics(optimizer: ZeroOptimizer) -> dict[str, float]:
    """Counts, the last gradient norm, the loss scale, this rank's bytes, and rates.

    ``fetched_nbytes`` and ``evicted_nbytes`` were read from the drive and written. Bytes by tier and
    kind (``host_moments_nbytes``) are those between two steps, gradients included. Rates are those
    of ``Rates`` since the last call that found a step; the first call begins them.
    """
    placement, places = placed(optimizer)
    sizes = placement.at_rest(places)
    rates = _rates.setdefault(optimizer, _rates.get(optimizer) or Rates(optimizer))
    return {
        **counts_of(optimizer),
        "grad_norm": optimizer.norm,
        "loss_scale": optimizer._scaler.scale,
        **{f"{tier}_{kind}_nbytes": nbytes for (tier, kind), nbytes in sizes.items()},
        **rates.take(),
    }


def counts_of(optimizer: Any) -> Counter[str]:
    """What has been done since the start."""
    found = Counter(steps=optimizer.num_steps, skipped_steps=optimizer.skipped_steps)
    found.update(optimizer._runtime.counts)
    for drive in filter(None, [optimizer._layout.tiers.get("nvme")]):
        found["fetched_nbytes"] = drive.file.read_nbytes
        found["evicted_nbytes"] = drive.file.written_nbytes
    return found


class Rates:
    """Rates since the last ``take()`` that found a step. Loading a checkpoint restarts them.

    Waits are those of the process's training threads, whichever optimizer they train. Waits of a GPU
    are not counted.

    Args:
        optimizer: a ZeroOptimizer.
    """

    def __init__(self, optimizer: Any):
        count_waits()
        self.optimizer = weakref.ref(optimizer)
        self.last: dict[str, float] = {}
        optimizer.register_step_post_hook(lambda *_: self._count())
        self.restart()

    def restart(self) -> None:
        """Begin an interval now: the time since the last one was not spent training."""
        self.taken = 0  # steps
        self.before, self.waited = self._read(), WAITED.copy()
        self.start = time.perf_counter()

    def _read(self) -> Counter[str]:
        optimizer = self.optimizer()
        return counts_of(optimizer) if optimizer else Counter()

    def _count(self) -> None:
        """A step has been taken; it is another than the next one where a checkpoint was loaded."""
        self.taken += 1
        now = self._read()
        if sum(now[k] - self.before[k] for k in ("steps", "skipped_steps")) != self.taken:
            self.restart()

    def take(self) -> dict[str, float]:
        """The rates of the interval that ends now; those of the last one if there was no step in it.

        ``step_s``; ``wait_share`` of the time, and by reason ``wait_drive_share``,
        ``wait_link_share``, ``wait_ranks_share``, ``wait_update_share``; ``drive_gbps`` read and
        written; ``prefetch_hit_rate``; ``peak_host_gib`` of the process and ``peak_device_gib`` of
        torch, since the start. Shares are of 1. What does not apply is left out.
        """
        optimizer = self.optimizer()
        if not self.taken or optimizer is None:
            return self.last
        seconds, moved = time.perf_counter() - self.start, counts_of(optimizer)
        moved.subtract(self.before)
        device = optimizer._layout.device
        peaks = [torch.cuda.max_memory_allocated(device)] if device.type == "cuda" else []
        waited = (WAITED - self.waited).items()
        waits = {f"wait_{what}_share": ns / 1e9 / seconds for what, ns in waited if ns > 1e6}
        some = {
            "prefetch_hit_rate": moved["prefetch_hits"] / max(moved["gathers"], 1),
            "drive_gbps": (moved["fetched_nbytes"] + moved["evicted_nbytes"]) / seconds / 1e9,
        }
        self.last = {
            "step_s": seconds / self.taken,
            "wait_share": sum(waits.values()),
            **dict(sorted(waits.items())),
            **{name: value for name, value in some.items() if value},
            "peak_host_gib": peak_nbytes() / 2**30,
        }
        self.last.update(("peak_device_gib", peak / 2**30) for peak in peaks)
        self.restart()
        return self.last


def peak_nbytes() -> int:
    """The most memory this process has had at once (its resident set's high-water mark)."""
    # getrusage may include the process that started this one
    status = Path("/proc/self/status").read_text()
    return int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0]) * 1024


def loggable(optimizer: Any, rates: Rates) -> dict[str, float]:
    """Numbers for loggers, as ``zk/step_s``: rates, to four digits, and loss scale and skipped steps
    where there are some.
    """
    scaler = optimizer._scaler
    some = {"loss_scale": scaler.is_active * scaler.scale, "skipped_steps": optimizer.skipped_steps}
    found = {name: value for name, value in some.items() if value}
    found |= {name: float(f"{value:.4g}") for name, value in rates.take().items()}
    return {f"zk/{name}": value for name, value in found.items()}
