"""What zk says: errors, lines, and log records that begin with ``zk:`` (of several ranks: and the rank)."""

from __future__ import annotations

import contextlib
import logging
import os
import sys

import torch.distributed as dist


def require(holds: object, message: str, error: type[Exception] = ValueError) -> None:
    """Raise ``error`` unless ``holds``."""
    if not holds:
        raise error(message)


def _ranks() -> tuple[int, int]:
    """This rank, and how many there are or will be."""
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    rank, world = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    return (int(rank), int(world)) if rank.isdigit() and world.isdigit() else (0, 1)


def _signed(record: logging.LogRecord) -> bool:
    """Put ``zk:`` and the rank in front; drop what all ranks say, but for the first one's."""
    rank, world = _ranks()
    record.msg = f"zk: rank {rank}: {record.msg}" if world > 1 else f"zk: {record.msg}"
    return record.name != log.name or rank == 0


log = logging.getLogger("zk")  # what all ranks say
rank_log = logging.getLogger("zk.rank")  # what is this rank's own
log.addFilter(_signed)
rank_log.addFilter(_signed)


def is_quiet() -> bool:
    """Tell if ``ZK_QUIET=1`` has ended what zk says by itself."""
    return os.environ.get("ZK_QUIET", "") not in ("", "0")


def say(text: str, always: bool = False) -> None:
    """Print lines to stderr, unless zk is quiet or nobody reads them: training goes on without."""
    if sys.stderr is not None and (always or not is_quiet()):
        with contextlib.suppress(OSError, ValueError):  # a closed pipe or file
            print(text, file=sys.stderr, flush=True)
