"""Consolidated state dict: the whole model in host memory, by the names of ``model.state_dict()``."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from zk.checkpoint import base, save
from zk.owners import inner_tensors, is_coded, is_dtensor, rebuilt
from zk.parallel.dtensors import is_first_part, join_parts
from zk.tiles import pieces_of


def consolidated(optimizer: Any, wanted: torch.dtype | None, rank0_only: bool, names: Collection[str] | None) -> dict[str, Tensor]:
    """See ``ZeroOptimizer.consolidated_state_dict``."""
    is_kept = not rank0_only or (optimizer.comm.rank == 0 and is_first_part(optimizer.model))
    full: dict[Tensor, Tensor] = {}
    all_named = dict(optimizer.model.named_parameters(remove_duplicate=False))
    tiles = pieces_of(optimizer.model)
    shown_as = {name: tiles[name].whole if name in tiles else name for name in all_named}
    chosen, coded = set[Tensor](), set[Tensor]()
    for name, param in all_named.items():
        if names is None or shown_as[name] in names:
            inner = [tensor for _, tensor in inner_tensors(param)]
            chosen.update(inner)
            coded.update(inner if is_coded(param) else ())
    for held in optimizer.held:
        if not chosen.intersection(held.unit.params):
            continue
        for param, values in held.masters().items():
            if param in chosen and (is_kept or held.unit.around):
                full[param] = values.to("cpu", held.unit.dtype if wanted is None or param in coded else wanted).contiguous()
        held.unpin()
    join_parts(optimizer.model, full)
    with optimizer.partition.reading():
        added = {name: value for _, name, value in base.entries_of(optimizer.model) if names is None or name in names}
    if not is_kept:
        return {}
    named: dict[str, Tensor] = {}
    for name, param in all_named.items():
        if names is not None and shown_as[name] not in names:
            continue
        if param in full and name in tiles:
            whole = named.setdefault(shown_as[name], torch.empty(tiles[name].shape, dtype=full[param].dtype))
            whole[tiles[name].place] = full[param]
        elif all(tensor in full for _, tensor in inner_tensors(param)):
            named[name] = full[next(inner_tensors(param))[1]] if is_dtensor(param) else rebuilt(param, full.__getitem__)
    beside = {**added, **dict(save.buffers_of(optimizer))}
    return {**named, **{name: value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value for name, value in beside.items()}}
