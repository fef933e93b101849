"""Checkpoints of a run: written now and then and on SIGTERM, and resumed from; its model at the end."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import signal
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import zk
from zk.checkpoint import CheckpointError, folders
from zk.checkpoint.export import shards
from zk.checkpoint.files import Entry


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


def save_model(optimizer: zk.ZeroOptimizer, folder: Path, metadata: dict[str, str], max_file_nbytes: int = 1 << 29) -> Path:
    """Write ``model.safetensors``, or several files and their index if it is larger than ``max_file_nbytes``. On all ranks; the first one writes,
    with no more than one file of it in memory.

    Parameters only. Earlier files of these names are replaced. Returns the file, or the index.
    """
    params = optimizer.model.named_parameters()
    files = shards([Entry(name, optimizer.units[param][0].unit.dtype, tuple(param.shape)) for name, param in params], max_file_nbytes)
    writes, unfinished = optimizer.comm.rank == 0, folder / "unfinished.tmp"
    if writes:
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob("model*.safetensors*"):
            old.unlink()
    for file, entries in files.items():
        tensors = optimizer.consolidated_state_dict(rank0_only=True, names={entry.key for entry in entries})
        if writes:
            save_file(tensors, unfinished, metadata=metadata)
            unfinished.rename(folder / file)
    if len(files) == 1:
        return folder / "model.safetensors"
    path = folder / "model.safetensors.index.json"
    if writes:
        size = sum(entry.nbytes for entries in files.values() for entry in entries)
        where = {entry.key: file for file, entries in files.items() for entry in entries}
        path.write_text(json.dumps({"metadata": {"total_size": size}, "weight_map": where}, indent=1))
    return path
