"""Rates of this machine's drives, measured once for each and kept in the user's cache folder."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence

from zk.cache import read_json, write_json

_FILE = "rates.json"
_VALID_S = 30 * 86_400
_NBYTES, _ROUNDS = 256 << 20, 3


def _key(paths: Sequence[str]) -> str:
    return f"{platform.node()}: " + ", ".join(str(os.stat(path).st_dev) for path in paths)


def drive(paths: Sequence[str] | None) -> dict[str, float] | None:
    """Bytes/s that were measured: "read" and "write", of all folders together; None if they have not been for a month."""
    try:
        found = read_json(_FILE).get(_key(paths or ()))
    except OSError:  # a folder that has gone
        return None
    if not isinstance(found, dict) or not all(isinstance(found.get(name), float) and found[name] > 0 for name in ("read", "write", "when")):
        return None
    return found if time.time() - found["when"] < _VALID_S else None


def measure_drive(paths: Sequence[str], say: Callable[[str], None]) -> dict[str, float] | None:
    """Measure the drives of ``paths``, with a file of 256 MiB in each, unless that has been done; ``say`` is told first. None if one refuses."""
    found = drive(paths)
    if found is not None:
        return found
    from zk.bench.io import passes

    say(f"measuring the drive at {', '.join(paths)}, once a month (a few seconds)")
    total = {"read": 0.0, "write": 0.0}
    try:
        for path in paths:
            written, read = passes(path, _NBYTES, 4 << 20, 4, _ROUNDS)
            total["read"] += _NBYTES / statistics.median(read)
            total["write"] += _NBYTES / statistics.median(written)
        write_json(_FILE, {**read_json(_FILE), _key(paths): {**total, "when": time.time()}})
    except OSError as error:
        say(f"the rate of the drive is not known: {error}")
        return None
    return total
