"""Rates of training over an interval of steps: seconds, waits and their reasons, bytes moved, peaks of memory, and the share of the floor."""

from __future__ import annotations

import os
import sys
import weakref
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

from zk.core.memory import peak_nbytes, ranks_here
from zk.tools.monitor import measured

# kinds of zk.core.timeline.SPENT -> what is waited for, by its name in the rates; any other wait is "other"
REASONS = {"wait: drive": "drive", "wait: link": "link", "wait: other ranks": "ranks", "wait: update": "update", "wait: save": "save"}
USES = {
    "compute": "compute",
    "update": "update",
    "wait_drive": "waiting for the drive",
    "wait_link": "waiting for the link",
    "wait_ranks": "waiting for ranks",
    "wait_update": "waiting for the update",
    "wait_save": "waiting for a save",
    "wait_other": "other waits",
}
"""Uses of the time of a step, as people call them."""


def zero_of(given: Any) -> Any:
    """The ZeroOptimizer that this is, or that is inside of it: accelerate's prepared one, the engine of zk.initialize. TypeError without one."""
    kind, found = sys.modules["zk"].ZeroOptimizer, given
    while found is not None and not isinstance(found, kind):
        found = getattr(found, "optimizer", None)
    if found is None:
        raise TypeError(f"optimizer must be a ZeroOptimizer, or what has one as .optimizer; got a {type(given).__name__}")
    return found


def spent(rates: Mapping[str, float]) -> dict[str, float]:
    """The share of the time for each use of it, of an interval's rates."""
    found = {use: rates.get(f"{use}_share", 0.0) for use in USES if use != "compute"}
    return {"compute": max(0.0, 1 - sum(found.values())), **found}


def counts_of(optimizer: Any) -> tuple[Counter[str], Counter[str]]:
    """Read the counters, and ``SPENT``, in microseconds."""
    nvme, prefetcher, transfer = optimizer.tiers.get("nvme"), optimizer.partition.prefetcher, optimizer.transfer
    files = [file for _, file in nvme.spill.files] if nvme is not None else []
    ns, spent_ns = optimizer.clock.read()  # which stands while the optimizer is parked
    counts = Counter(
        ns=ns,
        steps=optimizer.counters["steps"] + optimizer.counters["skipped_steps"],
        read=sum(file.read_nbytes for file in files),
        written=sum(file.written_nbytes for file in files),
        io_cpu_ns=sum(engine.cpu_ns() for engine in {file.engine for file in files}),
        linked=transfer.uploaded_nbytes + transfer.offloaded_nbytes,
        uses=prefetcher.uses,
        hits=prefetcher.hits,
    )
    return counts, spent_ns


def stolen_s(optimizer: Any, io_cpu_ns: int) -> float:
    """Seconds that I/O took from work: its processor time, where compute has a thread on each core.

    A thread of compute that loses its core keeps all others waiting, where they meet next. With cores to spare, I/O takes nothing.
    """
    threads = torch.get_num_threads() * ranks_here(optimizer.everyone.world)
    if optimizer.device.type != "cpu" or threads < len(os.sched_getaffinity(0)):
        return 0.0
    return io_cpu_ns / 1e9


class Rates:
    """Rates since the last ``take()`` that found a step.

    Waits are those of training threads of this process: with several optimizers in it, each sees all of them. What the device waits for by
    itself, in streams, is not among them.

    Args:
        optimizer: a ZeroOptimizer.
    """

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = weakref.ref(optimizer)
        self.ranks = ranks_here(optimizer.everyone.world)
        self.last: dict[str, float] = {}
        self.drive: dict[str, float] = {}  # bytes/s of it, "read" and "write", once they are known
        self.restart()

    def restart(self) -> None:
        """Begin an interval now: the time since the last one was not spent training."""
        self.tokens = 0
        optimizer = self.optimizer()
        if optimizer is not None:
            self.before = counts_of(optimizer)

    def take(self) -> dict[str, float]:
        """The rates of the interval that ends now, if there was a step in it, and else those of the last one.

        ``step_s``, and ``tokens_per_s`` where ``tokens`` were counted; ``wait_share`` of the time, of which ``wait_drive_share``,
        ``wait_link_share``, ``wait_ranks_share``, ``wait_update_share`` (one in the background), ``wait_save_share`` and ``wait_other_share``;
        ``update_share``, of an update that is not in the background; ``drive_gbps`` read and
        written, ``link_gbps``; ``prefetch_hit_rate``; ``peak_host_gib`` of the process and ``peak_device_gib`` of torch, since the start;
        ``floor_s``: a step if all waits were hidden, and no less than the drive needs for its bytes, at the rates that training has
        seen while all I/O threads read, or all wrote (as measured at the start, until 128 MiB were moved so, and where ranks share the drive);
        ``floor_share`` is that by the step. Where the model is computed by all cores, which I/O then takes from it, the processor time of I/O
        is not work.
        Shares are of 1; what has no meaning here is left out.
        """
        optimizer = self.optimizer()
        if optimizer is None or optimizer.closed:
            return self.last
        now, tokens = counts_of(optimizer), self.tokens
        moved, spent_ns = (after - before for after, before in zip(now, self.before, strict=True))
        steps, seconds, read, written = moved["steps"], moved["ns"] / 1e9, moved["read"], moved["written"]
        if steps <= 0 or seconds <= 0:
            return self.last
        self.before, self.tokens = now, 0
        spent = Counter[str]()
        for kind, ns in spent_ns.items():
            spent["own update" if kind == "update" else REASONS.get(kind, "other")] += ns
        shares = {reason: ns / 1e9 / seconds for reason, ns in spent.items()}
        update = shares.pop("own update", 0.0)
        waited = sum(shares.values())
        found = {"step_s": seconds / steps}
        if tokens:
            found["tokens_per_s"] = tokens / seconds
        found["wait_share"] = waited
        found |= {f"wait_{reason}_share": share for reason, share in sorted(shares.items()) if share >= 5e-4}
        found["update_share"] = update
        if read or written:
            found["drive_gbps"] = (read + written) / seconds / 1e9
        if moved["linked"]:
            found["link_gbps"] = moved["linked"] / seconds / 1e9
        if moved["uses"]:
            found["prefetch_hit_rate"] = moved["hits"] / moved["uses"]
        found["peak_host_gib"] = peak_nbytes() / 2**30
        if optimizer.device.type == "cuda":
            found["peak_device_gib"] = torch.cuda.max_memory_allocated(optimizer.device) / 2**30
        floor = self._floor(optimizer, max(0.0, (1 - waited) * seconds - stolen_s(optimizer, moved["io_cpu_ns"])), read, written)
        if floor is not None:
            floor = min(floor, seconds)  # a drive that reads and writes at once may have been faster
            found |= {"floor_s": floor / steps, "floor_share": floor / seconds}
        self.last = found
        return found

    def _floor(self, optimizer: Any, work_s: float, read: int, written: int) -> float | None:
        """Seconds of the interval if all waits were hidden; None if the drive was used and has no known rates."""
        if not read and not written:
            return work_s
        seen = optimizer.tiers["nvme"].spill.rates if self.ranks == 1 else {}  # several share the drive, and each sees a part of its rate
        self.drive = {**(measured.drive(optimizer.config.nvme_path) or self.drive), **seen}
        moved = {way: nbytes for way, nbytes in (("read", read), ("write", written)) if nbytes}
        if not moved.keys() <= self.drive.keys():
            return None
        return max(work_s, self.ranks * sum(nbytes / self.drive[way] for way, nbytes in moved.items()))


def loggable(optimizer: Any, rates: Rates) -> dict[str, float]:
    """Numbers for loggers, as ``zk/step_s``: rates, to four digits, the loss scale where there is one, and skipped steps where there were some.

    With ``ZK_METRICS=all`` everything in ``optimizer.metrics()`` too. ValueError for another value of it.
    """
    wanted = os.environ.get("ZK_METRICS", "")
    if wanted not in ("", "rates", "all"):
        raise ValueError(f"the environment variable ZK_METRICS must be 'rates' (the default) or 'all', for counters too; got {wanted!r}")
    found = dict(optimizer.metrics()) if wanted == "all" else {}
    if optimizer.scaler.active:
        found["loss_scale"] = optimizer.scaler.scale
    if optimizer.counters["skipped_steps"]:
        found["skipped_steps"] = optimizer.counters["skipped_steps"]
    found |= {name: float(f"{value:.4g}") for name, value in rates.take().items()}
    return {f"zk/{name}": value for name, value in found.items()}


def reason_of(rates: Mapping[str, float]) -> str:
    """The main reason for waiting: "drive", "link", "ranks", "update", "save" or "other"; empty if it did not."""
    found = {name: share for name, share in rates.items() if name.startswith("wait_") and name != "wait_share"}
    most = max(found, key=lambda name: found[name], default="")
    return most.removeprefix("wait_").removesuffix("_share")
