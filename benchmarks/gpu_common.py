"""The device, the link and the rows that the parts of `make gpu` share.

A part is a process of its own. It prints each figure as a row as soon as it has it, so that a later failure takes none away.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

GIB = 1 << 30
MARK = "row "  # begins each line of output that is a row


def emit(kind: str, **values: Any) -> None:
    """Print one row as JSON."""
    print(MARK + json.dumps({"kind": kind, **values}), flush=True)


def die_first() -> None:
    """Make the kernel end this process, not the one that writes the report, when host memory runs out."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
