"""The start of training: what takes long is done and announced, and the summary is printed once, by the first rank, to stderr."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any

from zk.core.logs import log
from zk.offload.cpu_adam import compile_ahead
from zk.tools.monitor.measured import measure_drive
from zk.tools.monitor.summary import summary_of

_SPLIT_NUMEL = 1 << 15  # fewer elements are updated by one thread


def is_quiet() -> bool:
    """Tell if ``ZK_QUIET=1`` has ended what zk says by itself."""
    return os.environ.get("ZK_QUIET", "") not in ("", "0")


_begun: Any = None  # the terminal in whose last line a Progress is


def begun_line(file: Any) -> None:
    """Note that the last line of this terminal is not ended; None: that it is."""
    global _begun
    _begun = file


def say(text: str) -> None:
    """Print lines to stderr, unless zk is quiet."""
    if not is_quiet():
        say_always(text)


def say_always(text: str) -> None:
    """Print lines to stderr, if there is one: training goes on without it."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):  # a pipe that nobody reads any more, a file that is closed
            if _begun is sys.stderr and not text.startswith("\n"):
                text = f"\n{text}"
            print(text, file=sys.stderr, flush=True)
            begun_line(None)


def begin(optimizer: Any) -> None:
    """Compile the CPU update of a ZeroOptimizer, and print its summary."""
    is_first = optimizer.everyone.rank == 0

    def tell(text: str) -> None:
        if is_first:
            say(f"zk: {text}")

    # dtype of the parameters, and the state, of all that host threads update
    beside = [
        (held.unit.dtype, section.state)
        for held in optimizer.held
        for section in (held.shard.sections if held.shard is not None else ())
        if section.beside and section.stream is None and section.state.chunks
    ]
    largest = max((chunk.stop - chunk.start for _, state in beside for chunk in state.chunks), default=0)
    threads = optimizer.num_threads if largest > _SPLIT_NUMEL else 1
    updates = [(dtype, dict(state.dtypes)) for dtype, state in beside]
    dtypes = " and ".join(sorted({str(dtype).removeprefix("torch.") for dtype, _ in updates}))
    compile_ahead(updates, threads, lambda: tell(f"compiling the CPU update for {dtypes}, once per machine (about 15 s)"))
    if is_quiet():
        return
    if "nvme" in optimizer.tiers and int(os.environ.get("LOCAL_RANK") or optimizer.everyone.rank) == 0:
        measure_drive(optimizer.config.nvme_path, tell)
    if is_first:
        try:
            text = summary_of(optimizer).text()
        except Exception:  # a line less to read is no reason to end a run
            log.exception("the summary could not be made")
        else:
            say(text)
