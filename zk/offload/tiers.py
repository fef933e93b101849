"""Tiers: where a unit's states rest. A chunk is a set of flat fields that move together.

    Memory      device memory, or the host's where both are one: a chunk is always there
    Host        host memory beside a device: put and load copy, while device and host compute
    Drive       a file: fetch starts to read a chunk, open waits for it, close writes it behind

A field is (numel,), named by what it holds: "param", "grad", "master", "exp_avg", ...
Copies are known in here alone: who puts, opens and awaits what it loaded has what it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from zk.memory import empty, trim, zeros
from zk.offload.link import Arrival, CudaLink, Event, link_to

Dtypes = Mapping[str, torch.dtype]
Fields = dict[str, Tensor]
Then = Callable[[Tensor], Any]
ALL = slice(None)
CPU = torch.device("cpu")


class Chunk:
    """Fields that rest in memory. Every tier's chunks have these six methods."""

    stays = True
    """What ``load`` brings is the field itself, where it always is."""

    def __init__(self, dtypes: Dtypes, numel: int, device: torch.device) -> None:
        self.numel, self.device = numel, device
        self.fields = {name: zeros(numel, dtype, device) for name, dtype in dtypes.items()}

    def fetch(self) -> None:
        """Start to bring the fields to memory."""

    def open(self, part: slice = ALL) -> Fields:
        """The elements ``part`` of the fields, to be read and changed until ``close``."""
        if part is ALL:
            return self.fields
        return {name: field[part] for name, field in self.fields.items()}

    def close(self, changed: bool, part: slice = ALL) -> None:
        """End what ``open`` of the same part began."""

    def put(self, name: str, values: Tensor) -> None:
        """Take ``values`` (numel,) as a field; without a copy where they are on this tier."""
        self.fields[name] = values.to(self.device)

    def load(self, name: str, device: torch.device, then: Then) -> Arrival:
        """Start to bring a field to ``device``; ``wait()`` returns what ``then`` has made of it."""
        return Arrival(then(self.fields[name].to(device)))

    def drop(self) -> None:
        """Free the fields: their values are not needed any more."""
        self.fields = {}


class HostChunk(Chunk):
    """Fields in host memory that come from a device, and go there."""

    stays = False

    def __init__(self, dtypes: Dtypes, numel: int, link: CudaLink) -> None:
        super().__init__(dtypes, numel, CPU)
        self.link = link
        self.arriving: dict[str, Event] = {}  # copies into fields
        self.leaving: list[tuple[slice, Event]] = []  # copies of parts of them

    def open(self, part: slice = ALL) -> Fields:
        for event in list(self.arriving.values()):
            event.wait()
        for copied, event in list(self.leaving):
            if overlap(copied, part, self.numel):
                event.wait()
        return super().open(part)

    def put(self, name: str, values: Tensor) -> None:
        """Start to copy ``values`` to page-locked memory that is used again."""
        host = self.fields[name] = empty(self.numel, values.dtype, CPU, self.link)
        if values.device == CPU:
            self.arriving.pop(name, None)
            host.copy_(values)
        else:
            self.arriving[name] = self.link.offload(host, values)

    def load(self, name: str, device: torch.device, then: Then) -> Arrival:
        if device == CPU:
            return Arrival(then(self.open()[name]))
        target = torch.empty(self.numel, dtype=self.fields[name].dtype, device=device)
        self.upload(target, name, ALL)
        return self.link.beside(target, then)

    def upload(self, target: Tensor, name: str, part: slice) -> None:
        after = [self.arriving[name]] if name in self.arriving else ()
        event = self.link.upload(target, self.fields[name][part], after)
        self.leaving = [(p, e) for p, e in self.leaving if not e.done] + [(part, event)]

    def drop(self) -> None:
        super().drop()
        self.arriving, self.leaving = {}, []


class MirroredChunk(HostChunk):
    """Parameters in host memory that are kept alike on the device: what is put is also a target."""

    stays = True
    near: Tensor  # (numel,)

    def put(self, name: str, values: Tensor) -> None:
        super().put(name, values)
        self.near = values
        if name in self.arriving:
            self.link.follow(self.arriving[name])  # compute may change what it still has

    def close(self, changed: bool, part: slice = ALL) -> None:
        """Start to bring what has changed to the device."""
        if changed:
            self.upload(self.near[part], "param", part)

    def load(self, name: str, device: torch.device, then: Then) -> Arrival:
        return (
            super().load(name, device, then) if device == CPU else self.link.beside(self.near, then)
        )


def overlap(one: slice, other: slice, numel: int) -> bool:
    """Tell if two parts of ``numel`` elements have some in common."""
    (start, stop, _), (first, last, _) = one.indices(numel), other.indices(numel)
    return max(start, first) < min(stop, last)


class Tier(Protocol):
    """A place where chunks rest."""

    chunk_numel: int
    """The most elements of optimizer states that one of its chunks should have."""

    def chunks(self, dtypes: Dtypes, sizes: list[int]) -> list[Chunk]:
        """A chunk of zeros for each of ``sizes`` (elements)."""

    def close(self) -> None:
        """Give back what the tier holds."""


class Memory:
    """The tier of one device's memory."""

    chunk_numel = 1 << 23

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def chunks(self, dtypes: Dtypes, sizes: list[int]) -> list[Chunk]:
        return [Chunk(dtypes, size, self.device) for size in sizes]

    def close(self) -> None:
        """Memory goes with its tensors."""


class Host(Memory):
    """The tier of host memory beside a device. ``mirrored``: with a copy on the device."""

    def __init__(self, near: torch.device, mirrored: bool = False) -> None:
        super().__init__(CPU)
        self.near, self.kind = near, MirroredChunk if mirrored else HostChunk
        self.made: list[Chunk] = []

    def chunks(self, dtypes: Dtypes, sizes: list[int]) -> list[Chunk]:
        link = link_to(self.near)
        if link is None:
            return super().chunks(dtypes, sizes)
        made: list[Chunk] = [self.kind(dtypes, size, link) for size in sizes]
        self.made += made
        return made

    def close(self) -> None:
        for chunk in self.made:
            chunk.open()  # once nothing is in flight
            chunk.drop()
        self.made.clear()
        trim()
