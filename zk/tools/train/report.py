"""The console output of a run: tables and samples at its end."""

from __future__ import annotations

import dataclasses
import math
import statistics

from rich.console import Console

import zk
from zk.core.memory import peak_nbytes
from zk.core.nbytes import nbytes_of
from zk.offload.tiers import readable
from zk.tools.terminal import table
from zk.tools.train.record import Record


def print_state(console: Console, optimizer: zk.ZeroOptimizer, num_params: int) -> None:
    """Bytes of training state by tier and kind."""
    shown = table("training state of this rank", ("tier", "what"), ("MiB", "bytes per parameter of the model"))
    for (tier, kind), nbytes in nbytes_of(optimizer).items():
        if nbytes:
            shown.add_row(tier, kind.replace("_", " "), f"{nbytes / 2**20:,.2f}", f"{nbytes / num_params:.2f}")
    console.print()
    console.print(shown)


def print_sample(console: Console, when: str, text: str) -> None:
    """Print the model's text, with a dot for each character that cannot be shown."""
    shown = "".join(c if (c.isprintable() and c != "\ufffd") or c == "\n" else "·" for c in text)
    console.print(f"\n[bold]sample {when} training[/bold]")
    console.print("\n".join("  | " + line for line in shown.splitlines()), markup=False)


def print_summary(console: Console, record: Record, metrics: dict[str, float], device_peak: str | None, saved: str) -> None:
    """Losses, times, use of the drive, peaks of memory, and files, a line each."""
    first, *_, last = record.valid.values()
    lines = {"validation loss": f"{first:.4f} -> [bold]{last:.4f}[/bold] nats per byte{'' if math.isfinite(last) else ': try a lower --lr'}"}
    if record.step_ms:
        skipped = f"{int(metrics['skipped_steps'])} of {max(record.valid)} steps skipped"
        lines["step"] = f"{statistics.median_high(record.step_ms):.0f} ms (median); {skipped}"
    if metrics["gathers"]:
        lines["gathers"] = f"{int(metrics['gathers'])}, {metrics['prefetch_hits'] / metrics['gathers']:.0%} asked for ahead of use"
    if "fetches" in metrics:
        read, wrote = metrics["fetched_nbytes"] / 2**30, metrics["evicted_nbytes"] / 2**30
        hits, waited = f"{metrics['fetch_hit_rate']:.0%} ahead of use", f"{metrics['stall_ms'] / 1e3:.1f} s of waiting for it"
        lines["drive"] = f"{read:.2f} GiB read, {wrote:.2f} GiB written, {hits}, {waited}"
    if record.routing:
        steps = record.routing[1:] or record.routing  # the first one finds a drive that nothing was left of
        experts, numel, needed, fetched = (
            statistics.fmean(values)
            for values in zip(*map(dataclasses.astuple, steps), strict=True)
        )
        lines["experts"] = f"{experts:.1f} of a layer in use in a step, {numel / 1e6:.2f}M parameters with what every token uses (mean)"
        if needed:
            times = f"{fetched / needed:.2f} times what these need"
            lines["read in a step"] = f"{readable(round(fetched))}, {times} ({readable(round(needed))})"
    if device_peak is not None:
        lines["device memory"] = f"{device_peak} at most, tensors of this process"
    lines["host memory"] = f"{peak_nbytes() / 2**30:.2f} GiB at most, all of this process"
    if record.check_losses:
        worst = max(abs(a - b) for a, b in zip(record.losses, record.check_losses, strict=True))
        both = f"last loss {record.losses[-1]:.6f}, plain PyTorch {record.check_losses[-1]:.6f}"
        lines["check"] = f"{both}; largest difference of any step {worst:.2g}"
    lines["saved"] = saved
    console.print()
    for label, line in lines.items():
        console.print(f"{label:17}{line}", soft_wrap=True)
