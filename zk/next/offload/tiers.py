"""Tiers: where a unit's states rest. A chunk is a set of flat fields that move together.

    Memory      device or host memory: a chunk is always there
    Drive       a file: fetch starts to read a chunk, open waits for it, close writes it behind

A field is (numel,), named by what it holds: "param", "grad", "master", "exp_avg", ...
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from zk.core.memory import zeros

Dtypes = Mapping[str, torch.dtype]
Fields = dict[str, Tensor]
Then = Callable[[Tensor], Any]


class Chunk:
    """Fields that rest in memory. Every tier's chunks have these six methods."""

    def __init__(self, dtypes: Dtypes, numel: int, device: torch.device) -> None:
        self.numel, self.device = numel, device
        self.fields = {name: zeros(numel, dtype, device) for name, dtype in dtypes.items()}

    def fetch(self) -> None:
        """Start to bring the fields to memory."""

    def open(self) -> Fields:
        """The fields in memory, to be read and changed until ``close``."""
        return self.fields

    def close(self, changed: bool) -> None:
        """End what ``open`` began."""

    def put(self, name: str, values: Tensor) -> None:
        """Take ``values`` (numel,) as a field; without a copy where they are on this tier."""
        self.fields[name] = values.to(self.device)

    def load(self, name: str, device: torch.device, then: Then) -> Any:
        """Bring a field to ``device`` and return what ``then`` makes of it there."""
        return then(self.fields[name].to(device))

    def drop(self) -> None:
        """Free the fields: their values are not needed any more."""
        self.fields = {}


class Tier(Protocol):
    """A place where chunks rest."""

    def chunks(self, dtypes: Dtypes, sizes: list[int]) -> list[Chunk]:
        """A chunk of zeros for each of ``sizes`` (elements)."""

    def close(self) -> None:
        """Give back what the tier holds."""


class Memory:
    """The tier of one device's memory, or the host's."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def chunks(self, dtypes: Dtypes, sizes: list[int]) -> list[Chunk]:
        return [Chunk(dtypes, size, self.device) for size in sizes]

    def close(self) -> None:
        """Memory goes with its tensors."""
