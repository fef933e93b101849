"""In: a model, held by ZeroOptimizer or not. Out: its parameters and buffers as safetensors, never more than one file of them in memory."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import zk
from zk.held import owner_of
from zk.tiled_linear import Piece, pieces_of


def _unit_of(param: Tensor) -> int:
    owner = owner_of(param) if isinstance(param, nn.Parameter) else None
    return id(owner.units[param][0]) if owner is not None else 0  # type: ignore[index]


def _entries(model: nn.Module) -> Iterator[tuple[str, int, Callable[[bool], Tensor]]]:
    """Name, bytes, and what copies the values (on all ranks; True for those that want them). Call it before going on."""
    pieces = pieces_of(model)
    named = [*model.named_parameters(), *((name, buffer) for name, buffer in model.named_buffers() if buffer.numel())]
    tiles: dict[str, list[tuple[Piece, nn.Parameter]]] = {}
    for name, tensor in named:
        if name in pieces:
            assert isinstance(tensor, nn.Parameter)
            tiles.setdefault(pieces[name].whole, []).append((pieces[name], tensor))
    for _, members in itertools.groupby(named, key=lambda item: _unit_of(item[1])):
        group = list(members)
        with zk.gather([param for name, param in group if isinstance(param, nn.Parameter) and name not in pieces]):
            for name, tensor in group:
                if name not in pieces:
                    yield name, tensor.nbytes, functools.partial(_copied, tensor)
                elif pieces[name].whole in tiles:  # the first of its tiles
                    parts = tiles.pop(pieces[name].whole)
                    yield pieces[name].whole, sum(part.nbytes for _, part in parts), functools.partial(_joined, parts)


def _copied(tensor: Tensor, wanted: bool) -> Tensor:
    return tensor.detach().cpu().clone().contiguous() if wanted else torch.empty(0)


def _joined(parts: list[tuple[Piece, nn.Parameter]], wanted: bool) -> Tensor:
    whole = torch.empty(parts[0][0].shape if wanted else 0, dtype=parts[0][1].dtype)
    for piece, param in parts:
        with zk.gather(param):
            if wanted:
                whole[piece.place] = param.detach().cpu()
    return whole


def save_model(model: nn.Module, folder: Path, metadata: dict[str, str], write: bool, max_file_nbytes: int = 1 << 29) -> Path:
    """Write ``model.safetensors``, or several files and their index if it is larger than ``max_file_nbytes``. On all ranks; one writes.

    What an earlier run left under these names is replaced. Returns the file, or the index.
    """
    if write:
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob("model*.safetensors*"):
            old.unlink()
    written: list[list[str]] = []
    batch: dict[str, Tensor] = {}
    nbytes = total = 0

    def flush() -> None:
        nonlocal nbytes
        if batch:
            if write:
                save_file(batch, folder / f"part-{len(written)}.tmp", metadata=metadata)
            written.append(list(batch))
            batch.clear()
            nbytes = 0

    for name, size, copy in _entries(model):
        if nbytes + size > max_file_nbytes:
            flush()
        batch[name] = copy(write)
        nbytes += size
        total += size
    flush()
    if not write:
        return folder
    if len(written) == 1:
        path = folder / "model.safetensors"
        (folder / "part-0.tmp").rename(path)
        return path
    where = {}
    for index, names in enumerate(written):
        file = f"model-{index + 1:05d}-of-{len(written):05d}.safetensors"
        (folder / f"part-{index}.tmp").rename(folder / file)
        where.update(dict.fromkeys(names, file))
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=1))
    return path
