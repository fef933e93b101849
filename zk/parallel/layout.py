"""Offsets and slices of flat buffers. Integers only; padding is decided here and nowhere else."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

# Every parameter starts on a multiple of this many elements: 64 bytes at 16 bits, a cache line and an AVX-512 register.
ALIGN = 32


def round_up(numel: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is at least ``numel``."""
    return -(-numel // multiple) * multiple


def evenly(start: int, stop: int, most: int, multiple: int) -> list[slice]:
    """Elements ``start`` to ``stop`` in slices of about one size, a ``multiple``, and at most about ``most``."""
    numel = stop - start
    size = round_up(-(-numel // max(1, -(-numel // most))), multiple) or multiple
    return [slice(begin, min(begin + size, stop)) for begin in range(start, stop, size)]


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """The place of each parameter in a unit's flat buffer, and the slice of that buffer that each rank holds."""

    numels: tuple[int, ...]  # elements of each parameter
    offsets: tuple[int, ...]  # its first element in the flat buffer
    numel: int  # elements of the flat buffer, a multiple of world * ALIGN
    world: int

    @classmethod
    def of(cls, numels: Sequence[int], world: int) -> Layout:
        """Lay parameters of ``numels`` elements one after the other, for ``world`` ranks (at least 1)."""
        if world < 1 or any(numel < 0 for numel in numels):
            raise ValueError(f"a layout needs world >= 1 and sizes >= 0; got world={world}, numels={tuple(numels)}")
        offsets, end = [], 0
        for numel in numels:
            offsets.append(end)
            end = round_up(end + numel, ALIGN)
        return cls(tuple(numels), tuple(offsets), round_up(end, world * ALIGN), world)

    @property
    def shard_numel(self) -> int:
        """Elements of one rank's slice, the same on every rank."""
        return self.numel // self.world

    def regions(self, indices: Sequence[int]) -> list[int]:
        """Bounds of what these parameters take, each with the padding after it: start, stop, start, ..."""
        stops = (*self.offsets[1:], self.numel)
        return [bound for index in indices for bound in (self.offsets[index], stops[index])]

    def shard(self, rank: int) -> slice:
        """The slice of the flat buffer that ``rank`` holds."""
        return slice(rank * self.shard_numel, (rank + 1) * self.shard_numel)

    def whole(self, index: int) -> slice:
        """The slice of the flat buffer that parameter ``index`` takes."""
        return slice(self.offsets[index], self.offsets[index] + self.numels[index])

    def part(self, index: int, held: slice) -> tuple[slice, slice]:
        """The share of the slice ``held`` of the flat buffer in parameter ``index``: (slice of held, slice of the parameter); maybe empty."""
        start = min(max(self.offsets[index], held.start), held.stop)
        stop = max(min(self.offsets[index] + self.numels[index], held.stop), start)
        begin = min(start - self.offsets[index], self.numels[index]) if stop > start else 0
        return slice(start - held.start, stop - held.start), slice(begin, begin + stop - start)
