"""Digests of what a checkpoint leaves out: they tell whether a model has the base that it was trained over."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from zk.core.owners import inner_tensors

if TYPE_CHECKING:
    from zk.checkpoint.manifest import Training

_PIECE_NBYTES = 1 << 24


def digest_of(values: Tensor) -> str:
    """The SHA-256 of a tensor's dtype, and of its elements in the order of its dimensions, whatever its place in memory."""
    found = hashlib.sha256(str(values.dtype).encode())
    flat = values.detach().reshape(-1).view(torch.uint8)
    for piece in flat.split(_PIECE_NBYTES):
        found.update(piece.cpu().numpy().data)
    return found.hexdigest()


@torch.no_grad()
def digests(optimizer: Training) -> dict[str, str]:
    """The digest of each frozen parameter, by name. On all ranks, which share the work; units are gathered one by one.

    What cannot have been written since the last time is not read again.
    """
    mine: dict[str, str] = {}
    for held in optimizer.held:
        if held.shard is not None:
            continue
        if held.digests is None or held.taken or held.written_since(None):
            held.arrive()
            held.adopt_writes()
            held.gather()
            held.digests = {
                name: digest_of(param.to(held.unit.dtype) if held.unit.is_widened else param)
                for index, (name, param) in enumerate(zip(held.unit.names, held.unit.params, strict=True))
                if index % optimizer.comm.world == optimizer.comm.rank
            }
            held.release()
            held.watch()
        mine |= held.digests
    everywhere = optimizer.comm.exchange(json.dumps(mine), "comparing what is frozen")
    return {name: digest for said in everywhere for name, digest in json.loads(said).items()}


def entries_of(model: nn.Module) -> Iterator[tuple[nn.Module, str, Any]]:
    """The entries of state_dict() that modules' own code adds to parameters and buffers: scales of 4-bit weights, get_extra_state()."""
    for path, module in model.named_modules(remove_duplicate=False):
        kind, plain = type(module), nn.Module
        if kind._save_to_state_dict is plain._save_to_state_dict and kind.get_extra_state is plain.get_extra_state:
            continue
        prefix = f"{path}." if path else ""
        found: dict[str, Any] = {}
        module._save_to_state_dict(found, prefix, keep_vars=True)
        own = {f"{prefix}{name}" for name in (*module._parameters, *module._buffers)}
        yield from ((module, name, value) for name, value in found.items() if name not in own)


@torch.no_grad()
def digests_of_entries(optimizer: Training) -> dict[str, str]:
    """The digest of each tensor, by name, that modules' own code adds to their frozen parameters, such as scales to codes. On all ranks."""
    with optimizer.partition.reading():
        entries = list(entries_of(optimizer.model))
    found: dict[str, str] = {}
    for module, name, value in entries:
        params = [tensor for param in module._parameters.values() if param is not None for _, tensor in inner_tensors(param)]
        stays = [param in optimizer.units and optimizer.units[param][0].shard is None for param in params]  # type: ignore[index]
        if isinstance(value, Tensor) and stays and all(stays):
            found[name] = digest_of(value)
    return found
