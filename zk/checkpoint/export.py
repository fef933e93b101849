"""Export of a checkpoint as plain safetensors with the model's own names.

Elements go from file to file: memory does not grow with the model, and neither the model nor its
class is needed.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from zk.checkpoint import folders
from zk.checkpoint.files import (
    CheckpointError,
    Entry,
    sync_folder,
    undone,
    write_durably,
    write_file,
)
from zk.checkpoint.load import Contents
from zk.checkpoint.manifest import Manifest, Saved
from zk.precision import CASTABLE


@dataclasses.dataclass(frozen=True)
class Exported:
    """The result of ``export``."""

    files: list[Path]
    num_tensors: int
    nbytes: int
    tied: dict[str, str]
    """Name that is left out -> name of the same tensor."""


def export(
    checkpoint: Path, out: Path, dtype: torch.dtype | None = None, shard_nbytes: int = 5 * 10**9
) -> Exported:
    """Write ``model.safetensors``, or several files and an index, into the new folder ``out``.

    Args:
        checkpoint: what ``save_checkpoint`` was given (the newest one is taken), or one step's folder.
        out: must not exist.
        dtype: of parameters (masters are rounded once); None keeps each in the precision it was
            trained in. Integers, codes and buffers stay as they are.
        shard_nbytes: a file is closed before it gets larger than this.

    A tied weight is written once; the header of its file says which other names it has.

    Raises:
        CheckpointError: for a checkpoint that is not whole, or a value that does not fit in
            ``dtype``; nothing is left in ``out`` then.
        ValueError: if ``out`` exists.
    """
    if shard_nbytes < 1:
        raise ValueError(f"a file must be allowed at least 1 byte; got {shard_nbytes}")
    out = out.resolve()
    if out.exists():
        raise ValueError(f"{out} exists: name a new folder")
    manifest = Manifest.read(folders.find(checkpoint))
    manifest.check_files()
    weights = manifest.weights()
    tied = {other: kept for other, kept in manifest.head["tied"].items() if kept in weights}
    beside = out.with_name(f".{out.name}.partial")
    shutil.rmtree(beside, ignore_errors=True)  # of an export that was killed
    beside.mkdir(parents=True)
    with undone(lambda: shutil.rmtree(beside, ignore_errors=True)), Contents(manifest) as contents:
        entries = [
            Entry(name, dtype if dtype and w.dtype in CASTABLE else w.dtype, w.cut.shape)
            for name, (w, *_) in weights.items()
        ]
        buffers = {name: contents.buffer(name) for name in contents.buffers}
        entries += [Entry(name, v.dtype, tuple(v.shape)) for name, v in buffers.items()]
        files = shards(entries, shard_nbytes)
        for name, shard in files.items():
            own = {entry.key for entry in shard}
            metadata = {"format": "pt"} | {o: kept for o, kept in tied.items() if kept in own}
            write_file(beside / name, shard, values_of(shard, contents, weights), metadata)
        total = sum(entry.nbytes for entry in entries)
        if len(files) > 1:
            places = {entry.key: name for name, shard in files.items() for entry in shard}
            index = {"metadata": {"total_size": total}, "weight_map": places}
            path = beside / "model.safetensors.index.json"
            write_durably(path, json.dumps(index, indent=1).encode())
        if manifest.head["model_config"]:
            write_durably(beside / "config.json", manifest.head["model_config"].encode())
        sync_folder(beside)
        beside.rename(out)
        sync_folder(out.parent)
    return Exported([out / name for name in files], len(entries), total, tied)


def values_of(
    entries: Sequence[Entry], contents: Contents, weights: dict[str, list[Saved]]
) -> Iterator[Tensor]:
    """The elements of ``entries``, one weight at a time."""
    for entry in entries:
        if entry.key in weights:
            yield rounded(contents.whole(weights[entry.key], "param"), entry)
        else:
            yield contents.buffer(entry.key)


def shards(entries: Sequence[Entry], shard_nbytes: int) -> dict[str, list[Entry]]:
    """Files in the order of ``entries``."""
    shards: list[list[Entry]] = [[]]
    size = 0
    for entry in entries:
        if shards[-1] and size + entry.nbytes > shard_nbytes:
            shards.append([])
            size = 0
        shards[-1].append(entry)
        size += entry.nbytes
    if len(shards) == 1:
        return {"model.safetensors": shards[0]}
    of = f"of-{len(shards):05d}.safetensors"
    return {f"model-{number:05d}-{of}": shard for number, shard in enumerate(shards, 1)}


def rounded(values: Tensor, entry: Entry) -> Tensor:
    found = values.to(entry.dtype)
    if entry.dtype == torch.float16 and not torch.equal(found.isinf(), values.isinf()):
        raise CheckpointError(
            f"{entry.key!r} has values beyond fp16's 65504 (up to {values.abs().max().item():g}); "
            "export bf16 or fp32"
        )
    return found
