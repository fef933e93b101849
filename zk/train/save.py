"""A model that an optimizer holds, written as safetensors with no more than one file of it in memory."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import save_file

import zk
from zk.checkpoint.export import shards
from zk.checkpoint.files import Entry


def save_model(optimizer: zk.ZeroOptimizer, folder: Path, metadata: dict[str, str], max_file_nbytes: int = 1 << 29) -> Path:
    """Write ``model.safetensors``, or several files and their index if it is larger than ``max_file_nbytes``. On all ranks; the first one writes.

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
