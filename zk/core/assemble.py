"""Assembly of the optimizer's units: their tiers, the room on the drive, and a store of each whose parameters have been moved into place."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from zk.core.logs import log
from zk.core.memory import overwrite, zeros
from zk.core.placement import Place, Placement
from zk.core.store import UnitStore
from zk.core.units import Unit
from zk.nn.deferred import give_memory, values_of
from zk.offload.nvme import ALIGN, Excerpt, round_up
from zk.offload.packing import Packing
from zk.offload.pinned import Arena
from zk.offload.section import Section, Shadow
from zk.offload.spill import FileParams
from zk.offload.state import OptimizerShard
from zk.offload.streamed import Stream
from zk.offload.tiers import Fields, Grads, HostCopies, MemoryTier, NVMeTier, ResidentFields, Tier, free_nbytes, readable, rooms
from zk.offload.transfer import Transfer
from zk.offload.worker import Worker
from zk.parallel.comm import Comm, Group
from zk.parallel.grads import GradReducer
from zk.parallel.partitioned import Partition


class _Part(NamedTuple):
    """Consecutive elements of one unit's optimizer state, on one tier. What lies on the drive is reserved before anything is moved."""

    tier: Tier
    numel: int
    chunks: Sequence[slice]
    grads: Grads
    state: Fields | None  # what is in memory is made later


class _Room(NamedTuple):
    """The place of one unit."""

    param_tier: Tier
    parts: list[_Part]
    streams: bool
    home: FileParams | None  # on the drive


@dataclasses.dataclass
class Assembly(Placement):
    """Places units, then holds them one by one; and others later, which are trained from then on. The first fields are those of Placement."""

    comm: Comm
    num_threads: int
    device: torch.device  # where the model computes
    transfer: Transfer  # between the device and the host; it gets its page-locked memory here
    worker: Worker  # adds up gradients that arrive from the device, in the background
    ranks: int  # that share this machine

    def __post_init__(self) -> None:
        super().__post_init__()
        self.tiers: dict[str, Tier] = {
            "device": MemoryTier("device", self.device, self.on_device, self.transfer, self.worker),
            "host": MemoryTier("host", torch.device("cpu"), "host", self.transfer, self.worker),
        }
        self.units: list[Unit] = []
        self.rooms: dict[Unit, _Room] = {}  # of those that are about to be held
        self.stream: Stream | None = None  # through which the device updates what is not in its memory
        self.room: Mapping[str, int] | None = None  # of each tier, as it was before anything was placed; the same on all ranks

    def place(self, units: Sequence[Unit], given_up: Sequence[Unit] = ()) -> None:
        """Choose the tiers of each of these units, and take all room on the drive and all page-locked memory, where others are given up."""
        config, others = self.config, [unit for unit in self.units if unit not in given_up]
        paths = [os.fspath(path) for path in config.nvme_path or ()]  # type: ignore[union-attr, arg-type]
        if self.room is None and "auto" in (config.param_tier, config.optimizer_tier):  # all divide alike, as they publish and gather in one order
            said = self.comm.exchange(json.dumps(rooms(config, self.device, self.ranks)), "placing the units")
            everywhere = [json.loads(words) for words in said]
            self.room = {name: min(room[name] for room in everywhere) for name in everywhere[0]}
        placed = self.tiers_of([*others, *units], self.device, self.room)[len(others) :]
        if "nvme" not in self.tiers and any("nvme" in (param_tier, *(name for name, _ in parts)) for param_tier, parts, _ in placed):
            given = config.nvme_checksum, self.transfer, self.worker, self.handed_over
            self.tiers["nvme"] = NVMeTier(paths, self.comm.rank, self.reads_ahead, *given)
        homes = {} if self.units else self._in_place(units, [tier for tier, *_ in placed], paths)
        for unit, its in zip(units, placed, strict=True):
            self.rooms[unit] = self._room(unit, its, homes.get(unit))
        if config.overlap_step and config.optimizer_tier == "device" and not self.transfer.joined:
            raise ValueError(
                "overlap_step=True has no effect: all optimizer state is in the device's memory, where the update runs between two steps of "
                "compute; remove it, or set optimizer_tier='host'"
            )
        if not self.transfer.joined and self.transfer.arena is None:  # which grows with what comes later
            self.transfer.arena = Arena(self.transfer.link, sum(self._crossing(units)))
        nvme = self.tiers.get("nvme")
        nbytes = max((self.stream_nbytes(unit, its.parts) for unit, its in zip(units, placed, strict=True) if its.streams), default=0)
        if nbytes:
            self.stream = self.stream or Stream(self.transfer)
            self.stream.reserve(nbytes)
        if isinstance(nvme, NVMeTier):
            nvme.crosses = self.stream is not None
            nvme.spill.create()
        self.units = [*others, *units]

    def place_buffers(self, model: nn.Module, stored: Mapping[Tensor, torch.dtype]) -> None:
        """The model's buffers: made if they were deferred, on the device, in their dtype, the first rank's values on all."""
        for name, buffer in model.named_buffers():
            dtype = stored.get(buffer, buffer.dtype)  # (one that came later keeps its own)
            if buffer.is_meta:
                give_memory(buffer, values_of(buffer, name).to(self.device, buffer.dtype))
            if self.config.device is not None or dtype != buffer.dtype:
                buffer.data = buffer.data.to(self.device if self.config.device is not None else buffer.device, dtype)
            if isinstance(self.comm, Group):
                values = buffer.data.contiguous()
                self.comm.broadcast(-1, values)
                if values.data_ptr() != buffer.data_ptr():
                    overwrite(buffer, values)

    def _in_place(self, units: Sequence[Unit], tiers: Sequence[str], paths: Sequence[str]) -> dict[Unit, FileParams]:
        """Homes of the units that all ranks read from the user's files.

        The first rank's values are everybody's. So ranks with other files, or without, have all of them copied.
        """
        if self.config.param_tier not in ("nvme", "auto") or all(unit.trained for unit in units):
            return {}
        places = {unit: self.in_place(unit, tier) for unit, tier in zip(units, tiers, strict=True) if self.layout(unit).numel}
        found = {unit: its for unit, its in places.items() if its is not None}
        if self.comm.world > 1:
            said = json.dumps({unit.name: _content_of(its) for unit, its in found.items()})
            everywhere = [set(json.loads(words).items()) for words in self.comm.exchange(said, "placing what is frozen")]
            alike = dict(set.intersection(*everywhere))
            found = {unit: its for unit, its in found.items() if unit.name in alike}
        if not found:
            return {}
        _report_in_place([place for its in found.values() for place in its], paths)
        nvme = self.tiers["nvme"]
        assert isinstance(nvme, NVMeTier)
        return nvme.borrow({unit: (self.slice_numel(unit, 1), unit.dtype, [*self._mine(unit, its)]) for unit, its in found.items()})

    def _mine(self, unit: Unit, places: Sequence[Excerpt]) -> Iterator[Excerpt]:
        """This rank's slice of a unit, in the ``places`` of its parameters."""
        layout = self.layout(unit)
        for index, place in enumerate(places):
            mine, elements = layout.part(index, layout.shard(self.comm.shard_rank))
            yield place.part(elements, mine.start, unit.dtype.itemsize)

    def _room(self, unit: Unit, place: Place, home: FileParams | None) -> _Room:
        """Find the place of one unit, and its room on the drive, unless its parameters have a ``home`` in the user's files."""
        tiers = self.tiers if self.layout(unit).numel else dict.fromkeys(self.tiers, self.tiers["host"])
        param_tier, uncut, start, parts = tiers[place.param_tier], self.uncut(unit, self.comm.shard_rank), 0, list[_Part]()
        placed = [(tiers[name], numel) for name, numel in place.parts if unit.trained]
        if isinstance(param_tier, NVMeTier):
            if any(tier.memory != "host" for tier, _ in placed):
                raise ValueError("param_tier='nvme' needs optimizer_tier='host' or 'nvme', as parameters are updated in host memory")
            home = home or param_tier.home(self.slice_numel(unit, 1), unit.dtype, uncut)
        for tier, numel in placed:
            chunks = tier.chunks(start, start + numel, uncut) if home is None else home.chunks
            state = tier.store(chunks, self.state_fields(unit)[1], packing=self._packing(unit)) if isinstance(tier, NVMeTier) else None
            returns = place.streams and tier.name != "device"
            parts.append(_Part(tier, numel, chunks, tier.grads(chunks, self.num_threads, self.sum_dtype(unit), returns), state))
            start += numel
        return _Room(param_tier, parts, place.streams, home)

    def _crossing(self, units: Sequence[Unit]) -> Iterator[int]:
        """Bytes of each block of host memory that copies to or from the device need."""
        written = 0  # the largest gradient on its way to the drive
        for unit in units:
            room, size = self.rooms[unit], unit.dtype.itemsize
            nbytes = self.slice_numel(unit, 1) * size
            partitioned = self.partitions(unit, room.param_tier.name)
            if partitioned and isinstance(room.param_tier, NVMeTier):
                continue  # counted below
            if partitioned and room.param_tier.memory == "host":
                yield round_up(nbytes)
            for part in room.parts:
                if isinstance(part.tier, NVMeTier):
                    written = max(written, part.numel * size)
                elif part.tier.memory == "host":
                    yield round_up(part.numel * size)  # the gradient
                if part.tier.memory == "host" and not room.streams and (room.param_tier.memory == "device" or not partitioned):
                    yield round_up(part.numel * size)  # the parameters, to be uploaded
                if part.tier.name == "host" and room.streams:
                    yield from (round_up(part.numel * dtype.itemsize) for dtype in self.state_fields(unit)[1].values())
        yield 2 * round_up(written)
        homes = [room.home.piece.nbytes for room in self.rooms.values() if room.home is not None]
        yield self.reads_ahead * max(homes, default=0)

    @property
    def updates_elsewhere(self) -> bool:
        """Tell if some optimizer state of what is about to be held is not in the device's memory."""
        return any(part.tier.name == "nvme" or part.tier.memory != self.on_device for room in self.rooms.values() for part in room.parts)

    def hold(self, index: int, unit: Unit, partition: Partition, reducer: GradReducer) -> UnitStore:
        """Move one unit's parameters into its flat buffer and set up what it trains with."""
        room, numel = self.rooms.pop(unit), self.slice_numel(unit, 1)
        is_in_place = room.home is not None and room.home.borrowed is not None
        initial = torch.empty(0)
        if not is_in_place:
            initial = self._initial(unit)
            self.comm.broadcast(index, initial)
        for param in unit.params:
            if param.is_meta:
                give_memory(param, torch.empty(1, dtype=unit.dtype, device=unit.device).expand(param.shape))
        held = self.held(unit, self.comm.shard_rank)
        home: ResidentFields | FileParams
        if self.partitions(unit, room.param_tier.name):
            full, home = None, room.home or room.param_tier.home(numel, unit.dtype)
        else:  # it stays; where stage 3 has nothing to move it has the same rules
            full = initial.to(unit.dtype)
            home = ResidentFields([slice(0, numel)], {"param": full[held]}, self.on_device)
        is_partitioned = self.config.stage == 3
        on_use, tier = partition.on_use if is_partitioned else None, room.param_tier.name
        store = UnitStore(unit, index, self.layout(unit), self.comm, self.transfer, tier, held, home, full, on_use)
        if is_partitioned:
            partition.add(store)
        if unit.trained:
            store.shard = self._shard(unit, room, home, full is not None)
            store.shard.start(initial[held])
            store.watch()
            store.recycle = reducer.recycle
            reducer.add(store)
        elif is_partitioned and not is_in_place:
            home.write(initial[held])
        return store

    def _initial(self, unit: Unit) -> Tensor:
        """The unit's parameters as one new flat buffer, in the widest precision among them; padding is zero, and all on a rank that will be sent
        the first rank's.
        """
        layout = self.layout(unit)
        flat = zeros(layout.numel, unit.widest, unit.device, inherited=not unit.trained)
        for index, param in enumerate(unit.params if self.comm.rank == 0 else ()):
            flat[layout.whole(index)] = unit.flat(index, values_of(param, unit.names[index]))
        return flat

    def _shard(self, unit: Unit, room: _Room, home: ResidentFields | FileParams, is_full: bool) -> OptimizerShard:
        """The optimizer state of a unit whose parameters rest in ``home``, which is memory of the model's own if they are full."""
        (names, fields), packing = self.state_fields(unit), self._packing(unit)
        sections = []
        for tier, _, chunks, grads, reserved in room.parts:
            stream = self.stream if room.streams and tier.name != "device" else None
            param: Fields | HostCopies = home
            rests: ResidentFields | None = None
            if isinstance(home, ResidentFields) and home.memory != tier.memory:
                if stream is None:  # a copy is updated, and taken home
                    param, rests = self.tiers[tier.memory].store(chunks, {"param": unit.dtype}), home
                else:
                    param = HostCopies(ResidentFields(chunks, {"param": home.whole()[chunks[0].start : chunks[-1].stop]}, home.memory))
            state = reserved or tier.store(chunks, fields, stream is not None, packing)
            is_fixed = rests is None and isinstance(home, ResidentFields) and (is_full or len(room.parts) > 1)
            sections.append(Section(tier.name, param, state, grads, rests, self.transfer, tier.memory == "host", is_fixed, stream))
        packing_of = functools.partial(self.packing, unit) if packing is not None else None
        return OptimizerShard(self.rule(unit), sections, names, packing_of, self.comm.shard_rank)

    def _packing(self, unit: Unit) -> Packing | None:
        """The place of what this rank keeps of whole parameters; None where all is kept for each element."""
        return self.packing(unit, self.comm.shard_rank) if self.layout(unit).is_whole else None

    def cast_shadows(self, stores: Sequence[UnitStore], with_gradients: bool) -> None:
        """Take room for updates out of place, those of the last units first, as far as there is memory. OSError where the drive has too little.

        ``with_gradients``: and for the next gradient of all of them.
        """
        room = self._left(stores, 1 + with_gradients)
        for store in reversed(stores):
            for section in store.shard.sections if store.shard is not None else ():
                if with_gradients and section.spare is None:
                    tier, dtype = self.tiers[section.tier], section.grads.sum_dtype
                    section.spare = tier.grads(section.state.chunks, self.num_threads, dtype, section.stream is not None)
                needed = self._needed_for_shadow(section)
                has_near = 0 < needed["device"] <= room["device"]
                if isinstance(section.param, HostCopies) and not has_near:
                    needed["host"] += needed["device"]
                if section.shadow is None and section.beside and section.numel and needed["host"] <= room["host"]:
                    section.shadow = self._shadow(store, section, has_near)
                    room["host"] -= needed["host"]
                    room["device"] -= needed["device"] * has_near
        nvme = self.tiers.get("nvme")
        if isinstance(nvme, NVMeTier):
            nvme.spill.create()

    def _needed_for_shadow(self, section: Section) -> dict[str, int]:
        """Bytes of memory for one section: on the host, and on the device where its parameters rest there."""
        in_memory = [fields for fields in (section.state, section.param) if isinstance(fields, ResidentFields)]
        rests_there = isinstance(section.param, HostCopies) or (section.home is not None and section.home.memory == "device")
        param = section.param.nbytes("param") if rests_there else 0
        return {"host": sum(fields.nbytes(name) for fields in in_memory for name in fields.fields), "device": param}

    def _shadow(self, store: UnitStore, section: Section, has_near: bool) -> Shadow:
        tier, memory, dtype = self.tiers[section.tier], self.tiers["host"], store.unit.dtype
        state = tier.store(section.state.chunks, section.state.dtypes, section.stream is not None, section.state.packing)
        near = torch.empty(section.numel, dtype=dtype, device=self.device) if has_near else None
        param: Fields | None = None
        if isinstance(section.param, FileParams):
            assert isinstance(store.home, FileParams)
            param = self.tiers["nvme"].home(store.held_numel, dtype, store.layout.uncut(store.held))
        elif near is None or section.stream is None:
            param = memory.store(section.state.chunks, {"param": dtype})
        return Shadow(state, param, near)

    def _left(self, stores: Sequence[UnitStore], gradients: int) -> dict[str, int]:
        """Bytes of memory that training state leaves of the budgets; without one half of what is free on the host, and nothing on a device."""
        used = Counter[str]()
        for store in stores:
            used[store.param_tier] += store.nbytes.get("param", 0)
            for tier, kind, nbytes in store.shard.nbytes if store.shard is not None else ():
                used[tier] += nbytes * (kind != "grad")
            for section in store.shard.sections if store.shard is not None else ():
                used[section.tier] += section.numel * gradients * store.unit.dtype.itemsize
        if self.joined:
            used["host"] += used["device"]
        config = self.config
        assert not isinstance(config.host_budget, str) and not isinstance(config.device_budget, str)
        free = free_nbytes(torch.device("cpu")) // (2 * self.ranks)
        return {
            "host": free if config.host_budget is None else config.host_budget - used["host"],
            "device": 0 if config.device_budget is None else config.device_budget - used["device"],
        }


def _report_in_place(places: Sequence[Excerpt], paths: Sequence[str]) -> None:
    """Log what is read in place, and warn where that may be slower than from scratch files in ``paths``.

    A network's file system, say, is read in every step then, and once where parameters are copied.
    """
    nbytes = sum(place.nbytes for place in places)
    devices = {place.path: place.seen[0] for place in places}
    log.info(
        "%s of frozen parameters are read in place, and 0 bytes of them are written; they lie in %s%s",
        readable(nbytes),
        next(iter(devices)),
        f" and {len(devices) - 1} more files" if len(devices) > 1 else "",
    )
    drives = {os.stat(path).st_dev for path in paths}
    elsewhere = [path for path, device in devices.items() if device not in drives]
    if elsewhere:
        log.warning(
            "frozen parameters are read from %s in every step, which is on another file system than nvme_path; if that is slower, have them "
            "copied: zk.load_pretrained(model, path, in_place=False)",
            elsewhere[0],
        )


def _content_of(places: Sequence[Excerpt]) -> str:
    """Digest of how values lie in files, and of the first page of each, which tells one model's files from another's of the same form.

    Ranks on other machines have files of their own, whose time of change and numbers mean nothing here.
    """
    digest = hashlib.sha256()
    for place in places:
        with open(place.path, "rb", buffering=0) as file:
            page = os.pread(file.fileno(), min(place.nbytes, ALIGN), place.offset)
        lies = place.seen[2], place.offset, place.nbytes
        digest.update(repr(lies).encode() + page)
    return digest.hexdigest()
