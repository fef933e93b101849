"""Export of a checkpoint as a plain safetensors model with the model's own names, as Hugging Face and ``safetensors.torch.load_model`` read it.

Elements go from file to file: memory does not grow with the model, and neither the model nor its class is needed.
"""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from zk.checkpoint.files import CheckpointError, Entry, Writer, check_file, sync_folder, undone, write_durably
from zk.checkpoint.load import Contents, find
from zk.checkpoint.manifest import Manifest, Weight
from zk.checkpoint.save import PIECE_NUMEL
from zk.core.precision import CASTABLE


@dataclasses.dataclass(frozen=True, slots=True)
class Exported:
    """The result of ``export``."""

    files: list[Path]
    num_tensors: int
    nbytes: int
    tied: dict[str, str]  # name that is left out -> name of the same tensor
    not_there: int  # frozen parameters that the checkpoint has not
    entries: list[str]  # that modules' own code adds to state_dict(), which it has not


def export(checkpoint: Path, out: Path, dtype: torch.dtype | None = None, shard_nbytes: int = 5 * 10**9) -> Exported:
    """Write ``model.safetensors``, or several files and ``model.safetensors.index.json``, into the new folder ``out``.

    Args:
        checkpoint: what ``save_checkpoint`` was given (the latest one is taken), or the folder of one step.
        out: must not exist, or be empty (but for hidden files).
        dtype: of parameters (masters are rounded once); None keeps each in the precision it was trained in. Integers, codes and buffers stay as
            they are.
        shard_nbytes: a file is closed before it gets larger than this, if it has more than one tensor.

    A tied weight is written once; the header of its file says which other names it has. Frozen parameters that the checkpoint was saved
    without are not there. Raises CheckpointError for a checkpoint that is not whole, ValueError if ``out`` is in use or a value does not fit
    in ``dtype``; nothing is left in ``out`` then.
    """
    if shard_nbytes < 1:
        raise ValueError(f"a file must be allowed at least 1 byte; got {shard_nbytes}")
    if out.exists() and (not out.is_dir() or any(out.glob("[!.]*"))):
        raise ValueError(f"{out} exists and is not an empty folder; name a new one")
    manifest = Manifest.read(find(checkpoint))
    for written in manifest.files:
        check_file(manifest.folder, written)
    all_weights = manifest.weights()
    weights = {name: weight for name, weight in all_weights.items() if not any(part.sha256 for part in weight.parts)}
    tied = {other: kept for other, kept in manifest.head["tied"].items() if kept in weights}
    beside = out / ".partial" if out.exists() else out.with_name(f".{out.name}.partial")
    shutil.rmtree(beside, ignore_errors=True)  # of an export that was killed
    beside.mkdir(parents=True)
    with undone(shutil.rmtree, beside, ignore_errors=True), Contents(manifest) as contents:
        entries = [Entry(name, dtype if dtype and weight.dtype in CASTABLE else weight.dtype, weight.shape) for name, weight in weights.items()]
        entries += [dataclasses.replace(entry, key=name) for name in contents.buffers if (entry := contents.buffer_entry(name)) is not None]
        files = shards(entries, shard_nbytes)
        for name, shard in files.items():
            own = {entry.key for entry in shard}
            metadata = {"format": "pt"} | {other: kept for other, kept in tied.items() if kept in own}
            writer = Writer(beside / name, shard, metadata)
            with undone(writer.abort):
                for entry in shard:
                    if entry.key in weights:
                        for values in _row_by_row(contents, weights[entry.key]):
                            writer.add(_rounded(values, entry))
                    else:
                        writer.add(contents.buffer(entry.key))
                writer.finish()
        total = sum(entry.nbytes for entry in entries)
        if len(files) > 1:
            index = {"metadata": {"total_size": total}, "weight_map": {entry.key: name for name, shard in files.items() for entry in shard}}
            write_durably(beside / "model.safetensors.index.json", json.dumps(index, indent=1).encode())
        if manifest.head["model_config"]:
            write_durably(beside / "config.json", manifest.head["model_config"].encode())
        sync_folder(beside)
        if beside.parent == out:  # it may be a link, or where the caller is
            for path in sorted(beside.iterdir()):  # the index last
                path.rename(out / path.name)
            beside.rmdir()
            sync_folder(out)
        else:
            beside.rename(out)
        sync_folder(out.parent)
    return Exported(
        [out / name for name in files], len(entries), total, tied, len(all_weights) - len(weights), list(manifest.head["entries"])
    )


def _row_by_row(contents: Contents, weight: Weight) -> Iterator[Tensor]:
    """The elements of a weight as a model without tiles has them, a few at a time: (n,)."""
    numel, first = math.prod(weight.shape), weight.parts[0]
    if first.place is not None or first.order is not None:
        height, others = weight.shape[0], [slice(0, size) for size in weight.shape[1:]]
        step = max(1, PIECE_NUMEL // max(1, math.prod(weight.shape[1:])))
        for row in range(0, height, step):
            yield contents.cut(weight, "param", (slice(row, min(row + step, height)), *others)).reshape(-1)
    else:
        for start in range(0, numel, PIECE_NUMEL):
            yield contents.elements(first, "param", slice(start, min(start + PIECE_NUMEL, numel)))


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
    return {f"model-{number:05d}-of-{len(shards):05d}.safetensors": shard for number, shard in enumerate(shards, 1)}


def _rounded(values: Tensor, entry: Entry) -> Tensor:
    rounded = values.to(entry.dtype)
    if entry.dtype == torch.float16 and not torch.equal(rounded.isinf(), values.isinf()):
        raise CheckpointError(f"{entry.key!r} has values beyond fp16's 65504 (up to {values.abs().max().item():g}); export bf16 or fp32")
    return rounded
