"""In: a run under way. Out: its checkpoints, now and then and when it is told to end; and the run as it was, from the newest one."""

from __future__ import annotations

import dataclasses
import signal
import threading
import zlib
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import zk
from zk.checkpoint import CheckpointError
from zk.checkpoint.folders import latest


@dataclasses.dataclass(slots=True)
class Position:
    """All that a run goes on from beside its optimizer."""

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
        return cls(extra["losses"], extra["valid"], extra["sample"], draws, extra["text_crc32"])


def find(resume: str | None, folder: Path) -> Path | None:
    """The checkpoints to go on from: "auto" means those in ``folder``, if there are any; CheckpointError for a path without one."""
    if resume is None:
        return None
    if resume == "auto":
        return folder if latest(folder) is not None else None
    path = Path(resume)
    if not (path / "manifest.json").exists() and latest(path) is None:
        raise CheckpointError(f"{path} has no checkpoint to resume from; --resume auto starts from the beginning where there is none")
    return path


class Termination:
    """Between ``begin`` and ``end`` SIGTERM does not end the process: it is noted, so that the run can save first."""

    def __init__(self) -> None:
        self.asked = False
        self.before: Any = None

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.asked = True

    def begin(self) -> None:
        """There is something to save from now on."""
        if threading.current_thread() is threading.main_thread():
            self.before = signal.signal(signal.SIGTERM, self._note)

    def end(self) -> None:
        """SIGTERM does what it did before."""
        if self.before is not None:
            signal.signal(signal.SIGTERM, self.before)


def save(optimizer: zk.ZeroOptimizer, scheduler: Any, position: Position, folder: Path, keep: int, beside: bool) -> Path | None:
    """Write a checkpoint of the run; what the drive refuses is logged where it is one of many, and raises where it is the last."""
    on_error = "warn" if beside else "raise"
    return optimizer.save_checkpoint(folder, scheduler=scheduler, extra=position.as_extra(), keep=keep, async_save=beside, on_save_error=on_error)
