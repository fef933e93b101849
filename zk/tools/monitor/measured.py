"""Rates of this machine: of its drives, and of the update on either side of the link, which are measured, and kept in the user's cache folder.

Drives change their rates within minutes, so what is known of one is soon measured again, and then training goes by what it sees (rates.py).
"""

from __future__ import annotations

import os
import platform
import shutil
import time
from collections.abc import Callable, Sequence

import torch

from zk.core.cache import read_json, write_json

_FILE = "rates.json"
_VALID_S = 30 * 86_400
_DRIVE_VALID_S = 600
_NBYTES, _ROUNDS = 256 << 20, 3


def _key(paths: Sequence[str]) -> str:
    return f"{platform.node()}: " + ", ".join(str(os.stat(path).st_dev) for path in paths)


def drive(paths: Sequence[str] | None) -> dict[str, float] | None:
    """Bytes/s that were measured: "read" and "write", of all folders together; None if they have not been for ten minutes."""
    try:
        return _known(_key(paths or ()), _DRIVE_VALID_S, "read", "write")
    except OSError:  # a folder that has gone
        return None


def _known(key: str, valid_s: float, *names: str) -> dict[str, float] | None:
    """The rates of a key, if all were measured in the last ``valid_s`` seconds."""
    found = read_json(_FILE).get(key)
    if not isinstance(found, dict) or not all(isinstance(found.get(name), float) and found[name] > 0 for name in (*names, "when")):
        return None
    return found if time.time() - found["when"] < valid_s else None


def _keep(key: str, rates: dict[str, float]) -> None:
    write_json(_FILE, {**read_json(_FILE), key: {**rates, "when": time.time()}})


def measure_update(device: torch.device, num_threads: int, ranks: int, say: Callable[[str], None]) -> dict[str, float]:
    """Rates of both sides of the update, as for ``zk.offload.streamed.best_share``, measured unless they are known; ``say`` is told first.

    Args:
        device: with memory of its own.
        num_threads: of the update in host memory.
        ranks: on this machine, which all measure at once.
    """
    key = f"{platform.node()}: update on {torch.cuda.get_device_name(device)} or {num_threads} threads, {ranks} ranks"
    found = _known(key, _VALID_S, "up", "down", "cpu", "memory")
    if found is not None:
        return found
    from zk.bench.clock import CPU, copy_gbps
    from zk.bench.link import DOWN, UP, measure
    from zk.tools.plan.measure import measure_cpu_adam

    say("measuring the link and the CPU update, once a month (a few seconds)")
    rows = {row["name"]: float(row["gbps"]) for row in measure(_NBYTES, _ROUNDS, device).as_dict()["rows"]}
    both = rows["pinned, both at once"] / 2  # the way in which blocks stream
    up, down = (1e9 * min(rows[f"pinned, {way}"], both) for way in (UP, DOWN))
    rates = {"up": up, "down": down, "cpu": 1e9 * measure_cpu_adam(num_threads, _ROUNDS), "memory": 1e9 * copy_gbps(CPU, _NBYTES, _ROUNDS)}
    _keep(key, rates)
    return rates


def measure_drive(paths: Sequence[str], say: Callable[[str], None]) -> dict[str, float] | None:
    """Measure the drives of ``paths``, unless that has been done; ``say`` is told first. None if one refuses.

    The file in each has 256 MiB, as less would show what the drive does in a burst.
    """
    found = drive(paths)
    if found is not None:
        return found
    from zk.bench.io import passes

    full = [path for path in paths if os.path.isdir(path) and shutil.disk_usage(path).free < 2 * _NBYTES]
    if full:
        say(f"the rate of the drive is not known, and not measured, as less than {2 * _NBYTES >> 20} MiB are free at {', '.join(full)}")
        return None
    say(f"measuring the drive at {', '.join(paths)} (about a second)")
    total = {"read": 0.0, "write": 0.0}
    try:
        for path in paths:
            written, read = passes(path, _NBYTES, 4 << 20, 4, 1)
            total["read"] += _NBYTES / read[0]
            total["write"] += _NBYTES / written[0]
        _keep(_key(paths), total)
    except OSError as error:
        say(f"the rate of the drive is not known: {error}")
        return None
    return total
