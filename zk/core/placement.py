"""Bytes that each unit takes on a rank, and the tiers that they go to."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from zk.config import ZeroConfig
from zk.core.units import Layout, Unit, strides_of
from zk.kernels.codec import state_fields
from zk.nn.deferred import place_of
from zk.offload.nvme import Excerpt
from zk.offload.packing import Kept, Packing, packed_nbytes
from zk.offload.rules import Rule
from zk.offload.spill import chunks_of
from zk.offload.streamed import buffer_nbytes
from zk.offload.tiers import CHUNKS_IN_MEMORY, GRADIENTS_IN_MEMORY, HANDED_OVER, Needs, place


def places_of(unit: Unit) -> list[Excerpt] | None:
    """The place of each parameter of a frozen unit in the user's files, if all lie there as they are kept; else None."""
    is_rounded = torch.promote_types(unit.dtype, unit.widest) != unit.widest  # a copy is made in that
    if unit.trained or unit.orders or is_rounded:
        return None
    found = [place for param in unit.params if (place := place_of(param, unit.dtype)) is not None]
    return found if len(found) == len(unit.params) else None


class Place(NamedTuple):
    """The place of one unit."""

    param_tier: str
    parts: tuple[tuple[str, int], ...]
    """Tiers of its optimizer state with the elements on each, in order."""
    streams: bool
    """The device updates what is not in its memory (zk/offload/streamed.py)."""


@dataclasses.dataclass
class Placement:
    """The arithmetic of one rank of ``world``, for an optimizer's groups and the rule of each. ``joined``: the device's memory is the host's."""

    config: ZeroConfig
    world: int
    rules: Sequence[Rule]
    groups: Sequence[Mapping[str, Any]]
    joined: bool

    def __post_init__(self) -> None:
        self.regroup()
        self.on_device = "host" if self.joined else "device"
        self.layouts: dict[Unit, Layout] = {}
        self.packings: dict[tuple[Unit, int], Packing] = {}  # by rank, too

    def regroup(self) -> None:
        """Take the groups as they are now."""
        self.group_of = {param: group for group in self.groups for param in group["params"]}
        self.rule_of = {param: rule for rule, group in zip(self.rules, self.groups, strict=True) for param in group["params"]}

    def memory_of(self, tier: str) -> str:
        """The memory in which the content of a tier is worked on."""
        return self.on_device if tier == "device" else "host"

    def partitions(self, unit: Unit, param_tier: str) -> bool:
        """Tell if a unit's parameters on this tier exist in full only while in use."""
        is_whole = self.world == 1 and self.memory_of(param_tier) == self.on_device and param_tier != "nvme" and not unit.is_widened
        return self.config.stage == 3 and not is_whole

    def rule(self, unit: Unit) -> Rule:
        """The rule of a unit that is trained."""
        return self.rule_of[unit.users[0]]

    def state_fields(self, unit: Unit) -> tuple[list[str], dict[str, torch.dtype]]:
        """Names of the states that the unit's groups need, and the dtype of all that is kept for each element."""
        if not unit.trained:
            return [], {}
        rule = self.rule(unit)
        names = list(dict.fromkeys(name for param in unit.users for name in rule.state_names(self.group_of[param])))
        assert isinstance(self.config.state_dtype, torch.dtype)
        return names, state_fields(unit.dtype, () if rule.is_whole else names, self.config.state_dtype, rule.splits_master)

    def layout(self, unit: Unit) -> Layout:
        """The flat buffer of a unit for these ranks."""
        if unit not in self.layouts:
            is_whole = unit.trained and self.rule(unit).is_whole
            self.layouts[unit] = Layout.of([param.numel() for param in unit.params], self.world, is_whole)
        return self.layouts[unit]

    def held(self, unit: Unit, rank: int) -> slice:
        """The slice of a unit's flat buffer that a rank updates."""
        layout = self.layout(unit)
        return layout.shard(rank) if self.config.stage else slice(0, layout.numel)

    def uncut(self, unit: Unit, rank: int) -> list[slice]:
        """The parts of that slice that no chunk may cut."""
        return self.layout(unit).uncut(self.held(unit, rank))

    def packing(self, unit: Unit, rank: int) -> Packing:
        """The place of what is kept of the whole parameters that a rank updates."""
        if (unit, rank) not in self.packings:
            layout, held = self.layout(unit), self.held(unit, rank)
            parts = {index: layout.part(index, held)[0] for index in range(len(unit.params))}
            here = {index: part.start for index, part in parts.items() if part.stop > part.start}
            self.packings[unit, rank] = Packing(here, self.packings[unit, 0].kept if rank else self._kept(unit))
        return self.packings[unit, rank]

    def _kept(self, unit: Unit) -> list[dict[str, Kept]]:
        """Describe what is kept of each parameter as a whole."""
        lies = ((param.shape, strides_of(param.shape, unit.orders.get(index))) for index, param in enumerate(unit.params))
        return [self.rule(unit).kept(self.group_of[user], *its) for user, its in zip(unit.users, lies, strict=True)]

    def _packings(self, unit: Unit) -> list[Packing]:
        """Of each rank, which have other parameters each; none where all is kept for each element."""
        ranks = self.world if self.config.stage else 1
        return [self.packing(unit, rank) for rank in range(ranks * self.layout(unit).is_whole)]

    def packed_nbytes(self, unit: Unit) -> int:
        """Bytes of what is kept of whole parameters, on the rank that has the most."""
        if not unit.trained or not self.layout(unit).is_whole:
            return 0
        layout, by_rank = self.layout(unit), Counter[int]()
        for offset, kept in zip(layout.offsets, self.packing(unit, 0).kept, strict=True):
            by_rank[offset // max(1, layout.shard_numel) if self.config.stage else 0] += packed_nbytes(kept)
        return max(by_rank.values())

    def chunks(self, unit: Unit, numel: int) -> list[list[tuple[int, int]]]:
        """Elements of each chunk on the drive of ``numel`` elements of a unit, and bytes that are packed there: for each rank that differs."""
        packings: Sequence[Packing | None] = self._packings(unit) or [None]
        found = []
        for rank, packing in enumerate(packings):
            chunks = chunks_of(0, numel, self.uncut(unit, rank))
            packed = [slice(0, 0) if packing is None else packing.bytes_of(chunk) for chunk in chunks]
            found.append([(chunk.stop - chunk.start, part.stop - part.start) for chunk, part in zip(chunks, packed, strict=True)])
        return found

    def largest_chunk(self, unit: Unit, numel: int, element_nbytes: int) -> int:
        """Bytes of the largest chunk, on any rank, with so many bytes for each element."""
        return max((count * element_nbytes + packed for rank in self.chunks(unit, numel) for count, packed in rank), default=0)

    def slice_numel(self, unit: Unit, since_stage: int) -> int:
        """Elements of one rank's slice of what is partitioned from a stage on."""
        return self.layout(unit).numel // (self.world if self.config.stage >= since_stage else 1)

    def in_place(self, unit: Unit, param_tier: str) -> list[Excerpt] | None:
        """The place of each parameter of a unit in the user's files, if the tier reads them from there; else None."""
        return places_of(unit) if self.config.stage == 3 and param_tier == "nvme" else None

    def needs(self, unit: Unit) -> Needs:
        """Bytes of one unit on this rank between uses."""
        size = unit.dtype.itemsize  # of parameters and gradients
        copy = 0 if self.joined or self.config.streamed_share == 1 else size  # of parameters that rest on the device, to update them in host memory
        numel = self.slice_numel(unit, 1) if unit.trained else 0
        is_whole = self.layout(unit).is_whole
        return Needs(self.slice_numel(unit, 3) * size, numel, self.state_nbytes(unit) + size, copy, is_whole, self.packed_nbytes(unit))

    def sum_dtype(self, unit: Unit) -> torch.dtype:
        """Dtype of the sum of several gradients."""
        return unit.dtype if self.config.grad_accum_dtype != torch.float32 else torch.float32

    def state_nbytes(self, unit: Unit) -> int:
        """Bytes of master and moments of one element."""
        return sum(dtype.itemsize for dtype in self.state_fields(unit)[1].values())

    @property
    def reads_ahead(self) -> int:
        """Units whose parameters may be in host buffers at once: in use, gathering, and fetched beyond; one where nothing is asked ahead.

        With those of gradients that are handed over, as their updates begin with what backward has fetched.
        """
        return (2 * self.config.prefetch + 3 if self.config.prefetch else 1) + self.handed_over

    @property
    def handed_over(self) -> int:
        """Units whose gradients wait in host buffers for their updates."""
        return 0 if self.config.keep_gradients else HANDED_OVER

    def buffer_nbytes(self, units: Iterable[Unit]) -> int:
        """Host memory that the buffers of the nvme tier take at most, should all units go there; gradients in their own precision."""
        chunk = params = grads = 0
        for unit in units:
            numel, size = self.slice_numel(unit, 1), unit.dtype.itemsize
            params, grads = max(params, numel * size), max(grads, numel * size * unit.trained)
            chunk = max(chunk, self.largest_chunk(unit, numel, self.state_nbytes(unit) + 2 * size) if unit.trained else 0)
        params *= self.config.param_tier in ("nvme", "auto")
        return CHUNKS_IN_MEMORY * chunk + self.reads_ahead * params + (GRADIENTS_IN_MEMORY + self.handed_over) * grads

    def tiers_of(self, units: Sequence[Unit], device: torch.device, room: Mapping[str, int] | None = None) -> list[Place]:
        """The place of each unit, by ``place``. A unit may be there many times: it is counted once."""
        needs = {unit: self.needs(unit) for unit in set(units)}
        buffers = self.buffer_nbytes(needs) if self.config.nvme_path else None
        placed = place(self.config, [needs[unit] for unit in units], device, buffers, room)
        streams = self._streams(units, [parts for _, parts in placed])
        return [Place(param_tier, tuple(parts), one) for (param_tier, parts), one in zip(placed, streams, strict=True)]

    def _streams(self, units: Sequence[Unit], parts: Sequence[Sequence[tuple[str, int]]]) -> Iterator[bool]:
        """Tell for each unit if the device updates it: such a share of all elements, spread evenly, so that both sides have work at any time."""
        share, total, streamed = 0 if self.joined else self.config.streamed_share, 0, 0
        trained = {unit for unit in units if unit.trained}
        has_kernel = {unit: all(self.rule(unit).has_kernel(self.group_of[param]) for param in unit.users) for unit in trained}
        for unit, tiers in zip(units, parts, strict=True):
            numel = sum(count for tier, count in tiers if tier != "device") * unit.trained
            total += numel
            does = numel > 0 and has_kernel[unit] and streamed + numel / 2 <= share * total
            streamed += numel * does
            yield does

    def stream_nbytes(self, unit: Unit, parts: Iterable[tuple[str, int]]) -> int:
        """Bytes of the device's buffers that a unit needs to stream through."""
        most = max((count for tier, count in parts if tier != "device"), default=0)
        return buffer_nbytes(most, self.state_nbytes(unit) + unit.dtype.itemsize)
