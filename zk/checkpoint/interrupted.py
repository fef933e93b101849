"""Ctrl-C under a framework's Trainer: one line with the checkpoint to resume from, instead of a traceback."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

from zk.checkpoint import folders
from zk.core.logs import say


def stopped(optimizer: Any) -> str:
    """The step that training stopped after, and the newest whole checkpoint."""
    steps, root, found = sum(optimizer.counters.values()), optimizer.saved_to, None
    with contextlib.suppress(ValueError):  # it is damaged
        found = root and folders.find(root)
    if not found:
        return f"zk: stopped after step {steps}; there is no checkpoint to resume from"
    step = found.name.removeprefix("step-")  # a copy may have any name
    of = f", which is of step {int(step)}" if step.isdecimal() else ""
    return f"zk: stopped after step {steps}; resume from {optimizer.resume_from or root}{of}"


def tell(error: BaseException, optimizer: Any) -> None:
    """Print ``stopped`` instead of the traceback of ``error``, if it ends the program; whoever catches it before sees it as it is."""
    said, before = stopped(optimizer), sys.excepthook

    def hook(kind: Any, raised: BaseException, trace: Any) -> None:
        if raised is not error:
            before(kind, raised, trace)
        elif optimizer.everyone.rank == 0:
            say(f"\n{said}", always=True)

    sys.excepthook = hook
