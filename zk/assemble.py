"""In: units and their layouts. Out: each unit's tiers, the room on the drive, and Held units whose parameters have been moved into place."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from zk.config import ZeroConfig
from zk.held import Held
from zk.materialize import give_memory, values_of
from zk.offload.rules import Rule
from zk.offload.spill import FileGrads, FileHome, FileStore, chunks_of
from zk.offload.state import OptimizerShard, state_fields
from zk.offload.tiers import CHUNKS_IN_MEMORY, MemoryHome, MemoryStore, MemoryTier, Needs, NVMeTier, Tier, place
from zk.parallel.comm import Group, Solo
from zk.parallel.grads import GradReducer, UnitGrads
from zk.parallel.layout import Layout
from zk.parallel.partitioned import Partition, PartitionedParams
from zk.parallel.replicated import ReplicatedParams, flatten_params
from zk.units import Unit


@dataclasses.dataclass(slots=True)
class _Room:
    """Where one unit goes. What lies on the drive is reserved before anything is moved."""

    param_tier: Tier
    optimizer_tier: Tier
    home: FileHome | None = None
    state: FileStore | None = None
    grads: FileGrads | None = None


class Assembly:
    """Places all units, then holds them one by one.

    Args:
        config, comm, rule, num_threads: the optimizer's.
        groups: its param_groups.
        device: where the model computes.
    """

    def __init__(
        self, config: ZeroConfig, comm: Solo | Group, rule: Rule, num_threads: int, groups: Sequence[Mapping[str, Any]], device: torch.device
    ) -> None:
        self.config, self.comm, self.rule, self.num_threads, self.device = config, comm, rule, num_threads, device
        self.group_of: dict[nn.Parameter, Mapping[str, Any]] = {param: group for group in groups for param in group["params"]}
        self.tiers: dict[str, Tier] = {"device": MemoryTier("device", device), "host": MemoryTier("host", torch.device("cpu"))}
        self.rooms: list[_Room] = []

    def _state_fields(self, unit: Unit) -> tuple[list[str], dict[str, torch.dtype]]:
        """Names of the moments that the unit's groups need, and the dtype of all that is kept for each element."""
        groups = {id(self.group_of[param]): self.group_of[param] for param in unit.params if param in self.group_of}
        names = list(dict.fromkeys(name for group in groups.values() for name in self.rule.state_names(group)))
        assert isinstance(self.config.state_dtype, torch.dtype)
        return names, state_fields(unit.dtype, self.rule, names, self.config.state_dtype)

    def _numel(self, layout: Layout, since_stage: int) -> int:
        """Elements of one rank's slice of what is partitioned from a stage on."""
        return layout.numel // (self.comm.world if self.config.stage >= since_stage else 1)

    def _needs(self, unit: Unit, layout: Layout) -> Needs:
        """Bytes of one unit on this rank between uses."""
        per_element = sum(dtype.itemsize for dtype in self._state_fields(unit)[1].values()) + unit.dtype.itemsize  # the last is the gradient
        return Needs(self._numel(layout, 3) * unit.dtype.itemsize, self._numel(layout, 1) * per_element if unit.trained else 0)

    @property
    def _reads_ahead(self) -> int:
        """Units whose parameters may be in host buffers at once: in use, gathering, and fetched beyond; one where nothing is asked ahead."""
        return 2 * self.config.prefetch + 3 if self.config.prefetch else 1

    def _buffer_nbytes(self, units: Sequence[Unit], layouts: Sequence[Layout]) -> int:
        """Host memory that the buffers of the nvme tier take at most, should all units go there; gradients in their own precision."""
        chunk = params = grads = 0
        for unit, layout in zip(units, layouts, strict=True):
            numel, size = self._numel(layout, 1), unit.dtype.itemsize
            params, grads = max(params, numel * size), max(grads, numel * size if unit.trained else 0)
            kept = sum(dtype.itemsize for dtype in self._state_fields(unit)[1].values()) + 2 * size
            chunk = max(chunk, max((part.stop - part.start for part in chunks_of(numel)), default=0) * kept)
        if self.config.param_tier not in ("nvme", "auto"):
            params = 0
        return CHUNKS_IN_MEMORY * chunk + self._reads_ahead * params + 2 * grads

    def place(self, units: Sequence[Unit], layouts: Sequence[Layout]) -> None:
        """Choose every unit's tiers, and take all room on the drive."""
        config = self.config
        needs = [self._needs(unit, layout) for unit, layout in zip(units, layouts, strict=True)]
        paths = [os.fspath(path) for path in config.nvme_path or ()]  # type: ignore[union-attr, arg-type]
        placed = place(
            config.param_tier,
            config.optimizer_tier,
            needs,
            config.stage,
            self.device,
            config.device_budget,  # type: ignore[arg-type]
            config.host_budget,  # type: ignore[arg-type]
            self._buffer_nbytes(units, layouts) if paths else None,
        )
        if any("nvme" in names for names in placed):
            self.tiers["nvme"] = NVMeTier(paths, self.comm.rank, self._reads_ahead, config.nvme_checksum)
        for unit, layout, names in zip(units, layouts, placed, strict=True):
            param_tier, optimizer_tier = (self.tiers[name if layout.numel else "host"] for name in names)
            room = _Room(param_tier, optimizer_tier)
            if isinstance(room.param_tier, NVMeTier):
                if room.optimizer_tier.device != room.param_tier.device:
                    raise ValueError("param_tier='nvme' needs optimizer_tier='host' or 'nvme', as parameters are updated in host memory")
                room.home = room.param_tier.home(self._numel(layout, 1), unit.dtype)
            if isinstance(room.optimizer_tier, NVMeTier) and unit.trained:
                chunks = room.optimizer_tier.chunks(self._numel(layout, 1))
                room.state = room.optimizer_tier.store(chunks, self._state_fields(unit)[1])
                room.grads = room.optimizer_tier.grads(chunks, self.num_threads)
            self.rooms.append(room)
        nvme = self.tiers.get("nvme")
        if isinstance(nvme, NVMeTier):
            nvme.create()

    @property
    def updates_elsewhere(self) -> bool:
        """Whether some optimizer state is not in the device's memory."""
        return any(room.optimizer_tier.name == "nvme" or room.optimizer_tier.device != self.device for room in self.rooms)

    def hold(self, index: int, unit: Unit, layout: Layout, partition: Partition, reducer: GradReducer) -> Held:
        """Move one unit's parameters into its flat buffer and set up what it trains with."""
        room, numel = self.rooms[index], self._numel(layout, 1)
        initial = flatten_params(unit, layout, values_of if self.comm.rank == 0 else None)
        self.comm.broadcast(index, initial)
        for param in unit.params:
            if param.is_meta:
                give_memory(param, torch.empty(1, dtype=unit.dtype, device=unit.device).expand(param.shape))
        if self.config.stage == 3 and (self.comm.world > 1 or room.param_tier.device != unit.device or room.home is not None):
            home = room.home or room.param_tier.home(numel, unit.dtype)
            params: ReplicatedParams | PartitionedParams = PartitionedParams(unit, index, layout, self.comm, home, partition.on_use)
            partition.add(params)  # type: ignore[arg-type]
        else:
            params = ReplicatedParams(unit, index, layout, self.comm, initial, partitioned=self.config.stage > 0)
            home = MemoryHome(params.shard, [slice(0, numel)])
        held = Held(unit, layout, self.comm, params, room.param_tier, versions=[param._version for param in unit.params])
        if unit.trained:
            held.tier, held.shard = room.optimizer_tier, self._shard(unit, room, home, numel)
            held.shard.start(initial[params.held])
            held.grads = UnitGrads(unit, index, layout, params.held, held.shard.grads.add)
            reducer.add(held.grads)
        elif isinstance(params, PartitionedParams):
            home.write(initial[params.held])
        return held

    def _shard(self, unit: Unit, room: _Room, home: MemoryHome | FileHome, numel: int) -> OptimizerShard:
        """The optimizer state of a unit whose parameters rest in ``home``."""
        names, fields = self._state_fields(unit)
        tier, store = room.optimizer_tier, home.store
        chunks = next((chunked.chunks for chunked in (room.state, store) if chunked is not None and not chunked.resident), [slice(0, numel)])
        here = home.device == tier.device  # updated in place; else a copy is, and uploaded
        if store.resident:
            store = MemoryStore(chunks, {"param": home.open() if here else torch.empty_like(home.open(), device=tier.device)})
        state, grads = room.state or tier.store(chunks, fields), room.grads or tier.grads(chunks, self.num_threads)
        return OptimizerShard(self.rule, store, state, grads, names, None if here else home.open())
