"""Whole weights with the model's own names: of a checkpoint into safetensors, of a model into memory.

Elements go from file to file: memory does not grow with the model, and neither the model nor its
class is needed.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from zk.checkpoint import files
from zk.checkpoint.contents import Checkpoint, buffers_of, cuts_of
from zk.checkpoint.files import CheckpointError, Entry, write_durably
from zk.config import parse_dtype
from zk.optimizer import ZeroOptimizer
from zk.parallel.gather import place_of
from zk.precision import CASTABLE


class Exported(NamedTuple):
    """The result of ``export``."""

    files: list[Path]
    num_tensors: int
    nbytes: int
    tied: dict[str, str]  # name that is left out -> name of the same tensor


def export(
    checkpoint: Path, out: Path, dtype: torch.dtype | None = None, shard_nbytes: int = 5 * 10**9
) -> Exported:
    """Write ``model.safetensors``, or several files and an index, into the new folder ``out``.

    Args:
        checkpoint: what ``save_checkpoint`` was given (the newest one is taken), or one step's folder.
        out: must not exist (ValueError).
        dtype: of parameters (masters are rounded once); None keeps each in the precision it was
            trained in. Integers, codes and buffers stay as they are.
        shard_nbytes: a file is closed before it gets larger than this.

    A tied weight is written once; the header of its file says which other names it has.

    Raises:
        CheckpointError: for a checkpoint that is not whole, or a value that does not fit in
            ``dtype``. Only an export that is whole gets its name ``out``.
    """
    if (out := out.resolve()).exists():
        raise ValueError(f"{out} exists: name a new folder")
    with Checkpoint(files.find(checkpoint)) as found:
        for written in found.files:
            written.check(found.folder)
        entries = entries_of(found, dtype)
        made, total = shards(entries, shard_nbytes), sum(entry.nbytes for entry in entries)
        beside = out.with_name(f".{out.name}.partial")
        shutil.rmtree(beside, ignore_errors=True)  # of an export that failed, or was killed
        beside.mkdir(parents=True)
        tied = found.head["tied"]
        with files.undone(lambda: shutil.rmtree(beside)):
            for name, shard in made.items():
                own = {entry.key for entry in shard}
                metadata = {"format": "pt"} | {o: kept for o, kept in tied.items() if kept in own}
                values = (value_of(found, entry) for entry in shard)
                files.write_file(beside / name, shard, values, metadata)
            places = {entry.key: name for name, shard in made.items() for entry in shard}
            index = {"metadata": {"total_size": total}, "weight_map": places}
            if config := found.head["model_config"]:  # of Hugging Face
                write_durably(beside / "config.json", config.encode())
            if len(made) > 1:
                write_durably(beside / "model.safetensors.index.json", json.dumps(index).encode())
            files.sync_folder(beside)
        beside.rename(out)
        files.sync_folder(out.parent)
    return Exported([out / name for name in made], len(entries), total, tied)


def entries_of(checkpoint: Checkpoint, dtype: torch.dtype | None) -> list[Entry]:
    """All weights and buffers."""
    entries = [
        Entry(name, dtype if dtype and part.dtype in CASTABLE else part.dtype, part.cut.shape)
        for name, (part, *_) in checkpoint.weights.items()
    ]
    buffers = ((name, checkpoint.buffer(name)) for name in checkpoint.buffers)
    return entries + [Entry(name, v.dtype, tuple(v.shape)) for name, v in buffers]


def value_of(checkpoint: Checkpoint, entry: Entry) -> Tensor:
    """A weight, rounded once, or a buffer."""
    if entry.key in checkpoint.buffers:
        return checkpoint.buffer(entry.key)
    values = checkpoint.whole(checkpoint.weights[entry.key], "param")
    found = values.to(entry.dtype)
    if entry.dtype == torch.float16 and not torch.equal(found.isinf(), values.isinf()):
        raise CheckpointError(f"{entry.key!r} has values beyond fp16's 65504; export bf16 or fp32")
    return found


def shards(entries: list[Entry], shard_nbytes: int) -> dict[str, list[Entry]]:
    """Files in the order of ``entries``."""
    shards, size = [list[Entry]()], 0
    for entry in entries:
        if shards[-1] and size + entry.nbytes > shard_nbytes:
            shards, size = [*shards, []], 0
        shards[-1].append(entry)
        size += entry.nbytes
    of = f"of-{len(shards):05d}.safetensors"
    names = [f"model-{number:05d}-{of}" for number in range(1, len(shards) + 1)]
    return dict(zip(names if len(shards) > 1 else ["model.safetensors"], shards, strict=True))


@torch.no_grad()
def consolidated_state_dict(
    optimizer: ZeroOptimizer,
    dtype: str | torch.dtype | None = None,
    *,
    rank0_only: bool = False,
    names: Collection[str] | None = None,
) -> dict[str, Tensor]:
    """The whole model in host memory, by the names of ``model.state_dict()``. Call it on all ranks.

    Args:
        dtype: of the parameters: "fp32" gives the masters, None what each is trained in. Integers,
            codes and buffers stay as they are.
        rank0_only: the other ranks take part and get an empty dict, so a machine holds it once.
        names: of parameters that are wanted; None: all.

    Tied parameters share memory. For large models, save a checkpoint and let ``zk export`` write it.
    """
    wanted = parse_dtype(dtype, "dtype") if dtype is not None else None
    optimizer._settle()
    is_kept = not rank0_only or optimizer._layout.comm.rank == 0
    cuts, full, named = cuts_of(optimizer.model), dict[Tensor, Tensor](), dict[str, Tensor]()
    for name, param in optimizer.model.named_parameters(remove_duplicate=False):
        cut, place = cuts[name], place_of(param)
        if place is None or (names is not None and cut.whole not in names):
            continue
        if param not in full:
            store, index = place
            is_cast = wanted is not None and store.unit.dtype in CASTABLE
            value = store.read("master" if is_cast and store.unit.is_trained else "param", index)
            value = value if is_kept else value.new_empty(0)
            full[param] = value.to("cpu", wanted if is_cast else value.dtype).contiguous()
        if is_kept and cut.shape == param.shape:
            named[name] = full[param]
        elif is_kept:
            like = torch.empty(cut.shape, dtype=full[param].dtype)
            named.setdefault(cut.whole, like)[cut.place] = full[param]
    beside = dict(buffers_of(optimizer, all_names=True)) if is_kept else {}
    return named | {name: value.to("cpu", copy=True) for name, value in beside.items()}
