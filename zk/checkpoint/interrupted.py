"""Ctrl-C under a framework's Trainer: one line with the checkpoint to resume from, not a traceback."""

from __future__ import annotations

import sys
from typing import Any

from zk.optimizer import ZeroOptimizer


def tell(error: BaseException, optimizer: ZeroOptimizer, resume_from: Any = None) -> None:
    """Print where to resume instead of the traceback of ``error``, if it ends the program."""
    before, steps = sys.excepthook, optimizer.num_steps + optimizer.skipped_steps
    where = f"resume from {resume_from}" if resume_from else "there is no checkpoint to resume from"

    def hook(kind: Any, raised: BaseException, trace: Any) -> None:
        if raised is not error:
            before(kind, raised, trace)
        elif optimizer._layout.comm.rank == 0:
            print(f"\nzk: stopped after step {steps}; {where}", file=sys.stderr)

    sys.excepthook = hook
