"""Checkpoints of a run: written now and then and on SIGTERM, and resumed from."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import zk
from zk.checkpoint import CheckpointError, folders


@dataclasses.dataclass(slots=True)
class Position:
    """The state of a run beyond its optimizer's."""

    losses: list[float]
    valid: float  # before the first step
    sample: str  # before the first step
    draws: torch.Generator  # of the training batches
    text_crc32: int

    def as_extra(self) -> dict[str, Any]:
        draws = bytes(self.draws.get_state().tolist()).hex()
        return {"losses": self.losses, "valid": self.valid, "sample": self.sample, "draws": draws, "text_crc32": self.text_crc32}

    @classmethod
    def of_extra(cls, extra: Any, raw: bytes) -> Position:
        """ValueError if the checkpoint is not one of `zk train`, or the text is another one."""
        if not isinstance(extra, dict) or not {"losses", "draws", "text_crc32"} <= set(extra):
            raise ValueError("the checkpoint was not saved by `zk train`; load it with ZeroOptimizer.load_checkpoint")
        if extra["text_crc32"] != zlib.crc32(raw):
            raise ValueError("the text is another one than when the checkpoint was saved; give the same --data")
        draws = torch.Generator()
        draws.set_state(torch.tensor(list(bytes.fromhex(extra["draws"])), dtype=torch.uint8))
        return cls(**{**extra, "draws": draws})


def find(resume: str | None, folder: Path) -> Path | None:
    """The checkpoints to resume from: "auto" means those in ``folder``, if there are any; CheckpointError for a path without one."""
    if resume is None:
        return None
    path = folder if resume == "auto" else Path(resume)
    if folders.find(path) is not None:
        return path
    if resume == "auto":
        return None
    raise CheckpointError(f"{path} has no checkpoint to resume from; --resume auto starts from the beginning where there is none")


@contextlib.contextmanager
def termination() -> Iterator[list[int]]:
    """Note SIGTERM and the first Ctrl-C in the list, instead of ending the process, so that the run can save first."""
    asked: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return

    def note(number: int, frame: Any) -> None:
        if asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        asked.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)


def save(optimizer: zk.ZeroOptimizer, scheduler: Any, position: Position, folder: Path, keep: int, beside: bool) -> Path | None:
    """Write a checkpoint, ``beside``: in the background, where an error of the drive is logged; else it raises."""
    on_error = "warn" if beside else "raise"
    return optimizer.save_checkpoint(folder, scheduler=scheduler, extra=position.as_extra(), keep=keep, async_save=beside, on_save_error=on_error)
