"""In: a checkpoint. Out: a plain safetensors model with the model's own names, as Hugging Face and ``safetensors.torch.load_model`` read it.

Elements go from file to file: memory does not grow with the model, and neither the model nor its class is needed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zk.checkpoint.files import CheckpointError, Entry, Writer, check_file, sync_folder, write_durably
from zk.checkpoint.load import elements, find, readers_of, reordered
from zk.checkpoint.manifest import Manifest, sources_of

_PIECE_NUMEL = 1 << 21


@dataclasses.dataclass(frozen=True, slots=True)
class Exported:
    """What ``export`` wrote."""

    files: list[Path]
    num_tensors: int
    nbytes: int
    tied: dict[str, str]  # name that is left out -> name of the same tensor


def export(checkpoint: Path, out: Path, dtype: torch.dtype | None = None, shard_nbytes: int = 5 * 10**9) -> Exported:
    """Write ``model.safetensors``, or several files and ``model.safetensors.index.json``, into the new folder ``out``.

    Args:
        checkpoint: what ``save_checkpoint`` was given (the latest one is taken), or the folder of one step.
        out: must not exist, or be empty.
        dtype: of all parameters (masters are rounded once); None keeps each in the precision it was trained in. Buffers stay as they are.
        shard_nbytes: a file is closed before it gets larger than this, if it has more than one tensor.

    A tied weight is written once; the header of its file says which other names it has. Raises CheckpointError for a checkpoint that is not
    whole, ValueError if ``out`` is in use or a value does not fit in ``dtype``; nothing is left of ``out`` then.
    """
    if shard_nbytes < 1:
        raise ValueError(f"a file must be allowed at least 1 byte; got {shard_nbytes}")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} exists and is not an empty folder; name a new one")
    manifest = Manifest.read(find(checkpoint))
    for written in manifest.files:
        check_file(manifest.folder, written)
    entries = _entries(manifest, dtype)
    files = _shards(entries, shard_nbytes)
    whole = {param["name"]: _name(param) for unit in manifest.head["units"] for param in unit["params"]}
    tied = {other: kept for other, kept in manifest.head["tied"].items() if whole[kept] == kept}
    out.parent.mkdir(parents=True, exist_ok=True)
    beside = out.with_name(f".{out.name}.partial")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir()
    try:
        with readers_of(manifest) as readers:
            kinds = {_name(param): unit["kinds"][0] for unit in manifest.head["units"] for param in unit["params"]}
            sources, tiles, orders = sources_of(manifest), _tiles(manifest), manifest.orders()

            def values_of(entry: Entry) -> Iterator[Tensor]:
                """The elements of a tensor row by row, a few at a time."""
                name, numel = entry.key, math.prod(entry.shape)
                if name not in kinds:
                    yield readers[manifest.ranks[0]["file"]].read(f"buffer/{name}")
                elif name in tiles:
                    yield from _joined(tiles[name], sources, readers)
                elif name in orders:
                    yield from reordered(sources[name, kinds[name]], readers, entry.shape, orders[name], None).split(_PIECE_NUMEL)
                else:
                    for start in range(0, numel, _PIECE_NUMEL):
                        for _, values in elements(sources[name, kinds[name]], readers, start, min(start + _PIECE_NUMEL, numel)):
                            yield values

            for name, shard in files.items():
                own = {entry.key for entry in shard}
                metadata = {"format": "pt"} | {other: kept for other, kept in tied.items() if kept in own}
                with _writing(beside / name, shard, metadata) as writer:
                    for entry in shard:
                        for values in values_of(entry):
                            writer.add(_rounded(values, entry))
        total = sum(entry.nbytes for entry in entries)
        if len(files) > 1:
            weight_map = {entry.key: name for name, shard in files.items() for entry in shard}
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            write_durably(beside / "model.safetensors.index.json", json.dumps(index, indent=1).encode())
        if manifest.head["model_config"]:
            write_durably(beside / "config.json", manifest.head["model_config"].encode())
        sync_folder(beside)
        if out.exists():
            out.rmdir()
        beside.rename(out)
        sync_folder(out.parent)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise
    return Exported([out / name for name in files], len(entries), total, tied)


@dataclasses.dataclass(frozen=True, slots=True)
class _Tile:
    """A piece of a weight that was trained in tiles."""

    source: tuple[str, str]  # its name, and what is exact of it
    rows: tuple[int, int]
    columns: tuple[int, int]


def _name(param: dict[str, Any]) -> str:
    """The name that a parameter is exported under: for a tile, that of the weight that it is a piece of."""
    return str(param["whole"]["name"] if "whole" in param else param["name"])


def _tiles(manifest: Manifest) -> dict[str, list[_Tile]]:
    """Weight -> its tiles, row by row."""
    found: dict[str, list[_Tile]] = {}
    for unit in manifest.head["units"]:
        for param in unit["params"]:
            if "whole" in param:
                rows, columns = param["whole"]["place"]
                found.setdefault(_name(param), []).append(_Tile((param["name"], unit["kinds"][0]), tuple(rows), tuple(columns)))
    return {name: sorted(tiles, key=lambda tile: (tile.rows, tile.columns)) for name, tiles in found.items()}


def _joined(tiles: Sequence[_Tile], sources: Any, readers: Any) -> Iterator[Tensor]:
    """The elements of a weight in order, a few rows at a time."""
    for (begin, end), group in itertools.groupby(tiles, key=lambda tile: tile.rows):
        beside = list(group)
        step = max(1, _PIECE_NUMEL // max(1, beside[-1].columns[1]))
        for row in range(0, end - begin, step):
            parts = []
            for tile in beside:
                width, stop = tile.columns[1] - tile.columns[0], min(row + step, end - begin)
                values = [value for _, value in elements(sources[tile.source], readers, row * width, stop * width)]
                parts.append(torch.cat(values).view(-1, width))
            yield torch.cat(parts, 1).reshape(-1)


def _entries(manifest: Manifest, dtype: torch.dtype | None) -> list[Entry]:
    found: list[Entry] = []
    for unit in manifest.head["units"]:
        for param in unit["params"]:
            shape = param["whole"]["shape"] if "whole" in param else param["shape"]
            if all(entry.key != _name(param) for entry in found):  # the first of its tiles
                found.append(Entry(_name(param), dtype or getattr(torch, param["dtype"]), tuple(shape)))
    with readers_of(manifest) as readers:
        first = readers[manifest.ranks[0]["file"]]
        for name in manifest.ranks[0]["buffers"]:
            buffer = first.entries[f"buffer/{name}"]
            found.append(Entry(name, buffer.dtype, buffer.shape))
    return found


def _shards(entries: Sequence[Entry], shard_nbytes: int) -> dict[str, list[Entry]]:
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


@contextlib.contextmanager
def _writing(path: Path, entries: Sequence[Entry], metadata: dict[str, str]) -> Iterator[Writer]:
    writer = Writer(path, entries, metadata)
    try:
        yield writer
        writer.finish()
    except BaseException:
        writer.abort()
        raise


def _rounded(values: Tensor, entry: Entry) -> Tensor:
    rounded = values.to(entry.dtype)
    if entry.dtype == torch.float16 and not torch.equal(rounded.isinf(), values.isinf()):
        raise CheckpointError(f"{entry.key!r} has values beyond fp16's 65504 (up to {values.abs().max().item():g}); export bf16 or fp32")
    return rounded
