"""Ctrl-C: one line with the step that training stopped after and the checkpoint to resume from, instead of a traceback.

It is ``sys.excepthook`` that prints it, so whatever a script does with KeyboardInterrupt comes first. ``ZK_TRACEBACK=1`` keeps tracebacks.
"""

from __future__ import annotations

import contextlib
import os
import sys
import weakref
from types import TracebackType
from typing import Any

from zk.checkpoint import folders
from zk.tools.monitor.runfile import close_all
from zk.tools.monitor.start import say_always

_TRAINING: weakref.WeakSet[Any] = weakref.WeakSet()


def watch(optimizer: Any) -> None:
    """Tell of this ZeroOptimizer when the program is interrupted."""
    _TRAINING.add(optimizer)
    if not hasattr(sys.excepthook, "of_zk"):
        sys.excepthook = _hook_before(sys.excepthook)


def _hook_before(hook: Any) -> Any:
    def interrupted(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        close_all(error)
        if not issubclass(kind, KeyboardInterrupt) or not tell():
            hook(kind, error, trace)

    interrupted.of_zk = True  # type: ignore[attr-defined]
    return interrupted


def tell() -> bool:
    """Print the line of each optimizer that was in use when it was interrupted, from its first rank. False if there is none."""
    if os.environ.get("ZK_TRACEBACK", "") not in ("", "0"):
        return False
    stopped = [one for one in _TRAINING if not one.forked and (not one.closed or "KeyboardInterrupt" in one.integrity.interrupted)]
    for optimizer in stopped:
        if optimizer.everyone.rank == 0:
            say_always(f"\nzk: {line(optimizer)}")
    return bool(stopped)


def line(optimizer: Any) -> str:
    """The step after which an optimizer is, and the checkpoint to resume from: the newest one that is whole."""
    steps = sum(optimizer.counters.values())
    root, found = optimizer.saved_to, None
    with contextlib.suppress(ValueError):  # it is damaged
        found = root and folders.find(root)
    if not found:
        return f"stopped after step {steps}; there is no checkpoint to resume from"
    step = found.name.removeprefix("step-")  # of a copy it may be any name
    return f"stopped after step {steps}; resume from {optimizer.resume_from or root}{f', which is of step {int(step)}' if step.isdecimal() else ''}"
