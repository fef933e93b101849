"""Numbers of training: ``optimizer.metrics()``, and rates over an interval of steps."""

from __future__ import annotations

import os
import weakref
from collections import Counter, defaultdict
from typing import Any

import torch

from zk.core.memory import peak_nbytes
from zk.core.nbytes import nbytes_of

# kinds of zk.core.timeline.SPENT -> what is waited for, in the names of rates; any other wait is "other"
REASONS = {"wait: drive": "drive", "wait: link": "link", "wait: other ranks": "ranks", "wait: update": "update", "wait: save": "save"}


def _counts(optimizer: Any) -> tuple[Counter[str], Counter[str]]:
    """Counters, and nanoseconds by what they were spent on."""
    nvme, prefetcher, transfer = optimizer.tiers.get("nvme"), optimizer.partition.prefetcher, optimizer.transfer
    files = [file for _, file in nvme.spill.files] if nvme is not None else []
    ns, spent_ns = optimizer.clock.read()
    counts = Counter(
        ns=ns,
        steps=sum(optimizer.counters.values()),
        drive=sum(file.read_nbytes + file.written_nbytes for file in files),
        link=transfer.uploaded_nbytes + transfer.offloaded_nbytes,
        uses=prefetcher.uses,
        hits=prefetcher.hits,
    )
    return counts, spent_ns


class Rates:
    """Rates since the last ``take()`` that found a step. Loading a checkpoint restarts them.

    Waits are those of the process's training threads, whichever optimizer they train; waits of a GPU are not counted.

    Args:
        optimizer: a ZeroOptimizer.
    """

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = weakref.ref(optimizer)
        self.last: dict[str, float] = {}
        self.restart()
        optimizer.clock.rates.add(self)

    def restart(self) -> None:
        """Begin an interval now: the time since the last one was not spent training."""
        self.tokens = 0  # of all ranks in this interval; the training loop counts them
        if (optimizer := self.optimizer()) is not None:
            self.before = _counts(optimizer)

    def take(self) -> dict[str, float]:
        """The rates of the interval that ends now; those of the last one if there was no step in it.

        ``step_s``; ``tokens_per_s`` where ``tokens`` were counted; ``wait_share`` of the time, and by reason ``wait_drive_share``,
        ``wait_link_share``, ``wait_ranks_share``, ``wait_update_share``, ``wait_save_share``, ``wait_other_share``; ``update_share`` of
        updates in ``step()``; ``drive_gbps`` read and written; ``link_gbps`` both ways; ``prefetch_hit_rate``; ``peak_host_gib`` of the
        process and ``peak_device_gib`` of torch, since the start. Shares are of 1. What does not apply is left out.
        """
        optimizer = self.optimizer()
        if optimizer is None or optimizer.closed:
            return self.last
        now, tokens = _counts(optimizer), self.tokens
        moved, spent_ns = (after - before for after, before in zip(now, self.before, strict=True))
        if not moved["steps"]:
            return self.last
        self.before, self.tokens = now, 0
        shares: dict[str, float] = defaultdict(float)
        for kind, ns in spent_ns.items():
            shares["update" if kind == "update" else f"wait_{REASONS.get(kind, 'other')}"] += ns / moved["ns"]
        update, seconds = shares.pop("update", 0.0), moved["ns"] / 1e9
        found: dict[str, float] = {
            "step_s": seconds / moved["steps"],
            "tokens_per_s": tokens / seconds,
            "wait_share": sum(shares.values()),
            **{f"{name}_share": share for name, share in sorted(shares.items())},
            "update_share": update,
            "drive_gbps": moved["drive"] / seconds / 1e9,
            "link_gbps": moved["link"] / seconds / 1e9,
            "peak_host_gib": peak_nbytes() / 2**30,
        }
        if moved["uses"]:
            found["prefetch_hit_rate"] = moved["hits"] / moved["uses"]
        if optimizer.device.type == "cuda":
            found["peak_device_gib"] = torch.cuda.max_memory_allocated(optimizer.device) / 2**30
        self.last = {name: value for name, value in found.items() if value or name in ("wait_share", "update_share", "prefetch_hit_rate")}
        return self.last


def loggable(optimizer: Any, rates: Rates) -> dict[str, float]:
    """Numbers for loggers, as ``zk/step_s``: rates, to four digits, and loss scale and skipped steps where there are some.

    With ``ZK_METRICS=all`` everything in ``optimizer.metrics()`` too. ValueError for another value of it.
    """
    wanted = os.environ.get("ZK_METRICS", "")
    if wanted not in ("", "rates", "all"):
        raise ValueError(f"the environment variable ZK_METRICS must be 'rates' (the default) or 'all', for counters too; got {wanted!r}")
    some = {"loss_scale": optimizer.scaler.active and optimizer.scaler.scale, "skipped_steps": optimizer.counters["skipped_steps"]}
    found = dict(optimizer.metrics()) if wanted == "all" else {name: value for name, value in some.items() if value}
    found |= {name: float(f"{value:.4g}") for name, value in rates.take().items()}
    return {f"zk/{name}": value for name, value in found.items()}


def metrics_of(optimizer: Any) -> dict[str, float]:
    """See ``ZeroOptimizer.metrics``."""
    prefetcher, speculation, nvme = optimizer.partition.prefetcher, optimizer.speculation, optimizer.tiers.get("nvme")
    optional = {"pinned_nbytes": optimizer.transfer.nbytes, "save_stall_ms": optimizer.saver.stall_ms}
    return {
        **optimizer.counters,
        **(speculation.counters if speculation is not None else {}),
        "grad_norm": optimizer.factors.norm,
        "loss_scale": optimizer.scaler.scale,
        "gathers": prefetcher.uses,
        "prefetch_hits": prefetcher.hits,
        **(nvme.metrics() if nvme is not None else {}),
        **{name: value for name, value in optional.items() if value},
        **{f"{tier}_{kind}_nbytes": nbytes for (tier, kind), nbytes in nbytes_of(optimizer).items()},
        **optimizer.rates.take(),
    }
