"""Digests of frozen parameters, which a checkpoint may leave out: they tell whether a model has the base that it was trained over."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

import torch
from torch import Tensor

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
        if held.digests is None or held.written_since(None):
            held.arrive()
            held.adopt_writes()
            held.pin()
            held.digests = {
                name: digest_of(param)
                for index, (name, param) in enumerate(zip(held.unit.names, held.unit.params, strict=True))
                if index % optimizer.comm.world == optimizer.comm.rank
            }
            held.unpin()
        mine |= held.digests
    everywhere = optimizer.comm.exchange(json.dumps(mine), "comparing what is frozen")
    return {name: digest for said in everywhere for name, digest in json.loads(said).items()}
