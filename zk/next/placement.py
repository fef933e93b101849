"""Placement: the tiers of units, and the refusal of what cannot fit, by numbers alone.

``Placement`` is the arithmetic of one rank; ``choose`` asks it for the memory that is here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import pathlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zk.next import store
from zk.next.config import ZeroConfig, pasted
from zk.next.memory import host_memory
from zk.next.offload.drive import SPARE, Drive, capacity_of
from zk.next.offload.link import LINKS
from zk.next.parallel.comm import Comm
from zk.next.parallel.runtime import GATHERED_IN_BACKWARD
from zk.next.unit import Unit

MEMORIES = {"device": "device", "host": "host", "nvme": "drive"}  # and their names in messages
HOST, DRIVE, WHOLE = {"optimizer_tier": "host"}, {"optimizer_tier": "nvme"}, {"stage": 3}
AWAY = WHOLE | {"param_tier": "host"}
# what to offer instead of tiers that do not fit, the fastest first
INSTEAD: tuple[dict[str, Any], ...] = (
    WHOLE, HOST, HOST | AWAY, DRIVE, DRIVE | AWAY, DRIVE | AWAY | {"param_tier": "nvme"}
)  # fmt: skip
ELSEWHERE = {
    "device": "stage=3 over more ranks, or optimizer_tier='host'",
    "host": "more ranks or 'nvme' tiers; on these, make units smaller (units=)",
}
MIRRORED = ("device", "host"), ("device", "nvme")
Nbytes = Mapping[str, int]  # memory -> bytes
Sizes = Counter[tuple[str, str]]  # (tier, kind) -> bytes


class Size(NamedTuple):
    """One unit: its elements, padding included, and the bytes of one."""

    numel: int
    param: int  # and its gradient
    master: int
    moments: int
    is_trained: bool
    is_block: bool  # gathered for its own forward alone

    @classmethod
    def of(cls, unit: Unit, fields: Mapping[str, torch.dtype], model: nn.Module) -> Size:
        """``fields``: what the unit's codec keeps of an element."""
        kept = {name: dtype.itemsize for name, dtype in fields.items()}
        states = kept.pop("master", 0), sum(kept.values()) - kept.get("master", 0)
        is_block = unit.module is not model
        return cls(unit.numel, unit.dtype.itemsize, *states, unit.is_trained, is_block)


class Place(NamedTuple):
    """The tiers of one unit."""

    param: str  # "mirrored": on the device, and a copy in host memory is updated
    state: str  # of its gradient, master and moments; "" of a frozen one


@dataclasses.dataclass(frozen=True)
class Placement:
    """Tiers and bytes of one rank."""

    config: ZeroConfig
    sizes: Sequence[Size]  # in the order of the model
    ranks: int
    joined: bool  # the device's memory is the host's

    def shard(self, size: Size) -> int:
        """Elements whose states this rank keeps."""
        return size.numel // (self.ranks if self.config.stage else 1)

    def places(self, room: Nbytes) -> list[Place]:
        """The tiers of each unit.

        ``room``: bytes that "auto" may fill of "device" and "host". ValueError for budgets that do not
        hold what must rest there.
        """
        tiers = ("device", "host", *["nvme"] * bool(self.config.nvme_path))
        found = self.filled(room, tiers)
        if "auto" in self.tiers and on_drive(found):
            found = self.filled({**room, "host": room["host"] - self.buffers_nbytes}, tiers)
        self.cache_nbytes(found)
        return found

    @property
    def tiers(self) -> tuple[str, str]:
        """What users asked for: of parameters, and of states."""
        config = self.config
        return config.param_tier if config.stage == 3 else "device", config.optimizer_tier

    def filled(self, room: Nbytes, tiers: tuple[str, ...]) -> list[Place]:
        """Fill ``tiers`` with whole units: parameters first, which are used twice in a step."""
        used, (param_tier, state_tier) = Counter[str](), self.tiers
        shared = self.joined and self.config.device_budget is None

        def fits(tier: str, nbytes: int) -> bool:
            there = used["device"] + used["host"] if shared else used[tier]
            return there + nbytes <= room[tier]

        def take(wanted: tuple[str, ...], nbytes: int) -> str:
            """The first tier with room; the last one takes what is left over."""
            tier = next((tier for tier in wanted[:-1] if fits(tier, nbytes)), wanted[-1])
            used[tier] += nbytes
            return tier

        fillable = tiers[:2] if state_tier == "device" else tiers
        wanted = fillable if param_tier == "auto" else (param_tier,)
        numels = [size.numel if self.config.stage < 3 else self.shard(size) for size in self.sizes]
        params = [take(wanted, n * s.param) for n, s in zip(numels, self.sizes, strict=True)]
        states = ["" if s.is_trained and state_tier == "auto" else state_tier for s in self.sizes]
        for number, (size, param) in enumerate(zip(self.sizes, params, strict=True)):
            if not states[number] and param == "device":
                states[number] = take(("device", ""), self.state_nbytes(size))
                used["host"] += self.copy_nbytes(size) * (not states[number])
        for number, size in enumerate(self.sizes):
            states[number] = states[number] or take(tiers[1:], self.state_nbytes(size))
        return [
            Place("mirrored" if (p, s) in MIRRORED and size.is_trained else p, s * size.is_trained)
            for size, p, s in zip(self.sizes, params, states, strict=True)
        ]

    def state_nbytes(self, size: Size) -> int:
        """Bytes of gradient, master and moments."""
        return self.shard(size) * (size.param + size.master + size.moments)

    def copy_nbytes(self, size: Size) -> int:
        """Bytes of the copy of parameters that rest on the device and are updated elsewhere."""
        return 0 if self.joined else self.shard(size) * size.param

    def at_rest(self, places: Sequence[Place]) -> Sizes:
        """Bytes between uses: what no step can do without."""
        sizes = Sizes()
        for size, (param, state) in zip(self.sizes, places, strict=True):
            shard, rests = self.shard(size), "device" if param == "mirrored" else param
            sizes[rests, "param"] += size.param * (shard if self.config.stage == 3 else size.numel)
            sizes["host", "param_copy"] += self.copy_nbytes(size) * (param == "mirrored")
            if size.is_trained:
                sizes[state, "master"] += shard * size.master
                sizes[state, "moments"] += shard * size.moments
                sizes[state, "grad"] += shard * size.param
        return +sizes

    def footprint(self, places: Sequence[Place]) -> Sizes:
        """Bytes at the fullest point of a step, without activations."""
        sizes, config = self.at_rest(places), self.config
        moved = [s for s, place in zip(self.sizes, places, strict=True) if self.is_gathered(place)]
        blocks = sorted((s.numel * s.param for s in moved if s.is_block), reverse=True)
        ahead = 1 + config.prefetch + GATHERED_IN_BACKWARD
        outside = sum(size.numel * size.param for size in moved if not size.is_block)
        grads = sorted((s.numel * s.param for s in self.sizes if s.is_trained), reverse=True)
        is_away = any(place.state not in ("", "device") for place in places) and not self.joined
        in_flight = 3 if self.ranks > 1 else 2 * is_away  # the unit's own is where it rests
        is_late = self.ranks > 1 and config.stage == 1  # reduced in step()
        sizes["device", "gathered"] = outside + sum(blocks[:ahead])
        sizes["device", "bucket"] = sum(grads if is_late else grads[:in_flight])
        sizes["device", "fresh"] = max(grads, default=0)
        sizes["host", "buffer"] = self.buffers_nbytes * on_drive(places)
        return +sizes

    def is_gathered(self, place: Place) -> bool:
        """Tell if full parameters are a copy of what rests."""
        is_here = place.param in ("device", "mirrored") or (self.joined and place.param == "host")
        return self.config.stage == 3 and (self.ranks > 1 or not is_here)

    @property
    def buffers_nbytes(self) -> int:
        """Host memory that chunks of the drive take on their way."""
        sizes, goes = self.sizes, self.tiers[0] in ("nvme", "auto")
        most_numel = min(store.CHUNK_NUMEL, Drive.chunk_numel)
        chunks = [min(self.shard(s), most_numel) * s.is_trained for s in sizes]
        most = [
            max((self.shard(size) * size.param * goes for size in sizes), default=0),
            max((4 * chunk for chunk in chunks), default=0),
            max(
                (n * (s.master + s.moments) for n, s in zip(chunks, sizes, strict=True)), default=0
            ),
        ]
        return SPARE * sum(map(capacity_of, filter(None, most)))

    def by_memory(self, sizes: Sizes) -> Counter[str]:
        """Bytes of each memory."""
        found = Counter[str]()
        for (tier, _), nbytes in sizes.items():
            found["host" if self.joined and tier == "device" else tier] += nbytes
        return found

    def cache_nbytes(self, places: Sequence[Place]) -> int:
        """What a host_budget leaves to the drive's cache; ValueError for budgets that are too small."""
        budgets = {"device": self.config.device_budget, "host": self.config.host_budget}
        used = Counter[str]()
        for (tier, _), nbytes in self.at_rest(places).items():
            used[tier] += nbytes
        cache = int(budgets["host"] or 0) - used["host"]
        if used["nvme"] > cache:
            used["host"] += self.buffers_nbytes * on_drive(places)
        for tier, budget in budgets.items():
            if budget is not None and used[tier] > budget:
                raise ValueError(
                    f"this rank's training state needs {readable(used[tier])} on the {tier} tier, and "
                    f"{tier}_budget is {readable(budget)}; raise the budget, use {ELSEWHERE[tier]}"
                )
        return max(0, cache)


def on_drive(places: Sequence[Place]) -> bool:
    """Tell if some unit needs the drive."""
    return any("nvme" in place for place in places)


def lacking(needed: Nbytes, there: Nbytes) -> dict[str, int]:
    """Bytes too few, by memory; what ``there`` does not name has no limit."""
    return {name: needed[name] - n for name, n in there.items() if n < needed.get(name, 0)}


def readable(nbytes: int) -> str:
    """As a person would say it: "1.50 GiB", "20.00 MiB", "10 bytes"."""
    name, size = ("GiB", 2**30) if nbytes >= 2**30 else ("MiB", 2**20)
    return f"{nbytes / size:.2f} {name}" if nbytes >= size else f"{nbytes} bytes"


# ---- the memory that is here ---------------------------------------------------------------------


def free_memory(device: torch.device, paths: Sequence[str]) -> dict[str, int]:
    """Bytes that can still be had of the host, of a GPU, and of the drive that has ``paths``.

    A container's limit counts, and swap does not. Several paths are written to alike.
    """
    free = {"host": host_memory()[1]}
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        free["device"] = torch.cuda.mem_get_info(device)[0] + unused
    every = [(path, *map(str, pathlib.Path(path).parents)) for path in paths]
    folders = [next(filter(os.path.isdir, own)) for own in every]  # what is there of them
    drives = [os.stat(folder).st_dev for folder in folders]
    rooms = []
    for folder, drive in zip(folders, drives, strict=True):
        found = os.statvfs(folder)
        rooms.append(found.f_bavail * found.f_frsize // drives.count(drive))
    return free | {"nvme": len(rooms) * min(rooms)}


def held_nbytes(tensors: Iterable[Any], joined: bool) -> Counter[str]:
    """Bytes of each memory that ``tensors`` have now, shared ones once."""
    plain = (one for one in tensors if isinstance(one, Tensor) and one.layout is torch.strided)
    found = Counter[str]()
    for one in {one.untyped_storage()._cdata: one for one in plain if not one.is_meta}.values():
        memory = "host" if joined or one.device.type == "cpu" else "device"
        found[memory] += one.untyped_storage().nbytes()
    return found


def rooms(config: ZeroConfig, there: Nbytes, joined: bool) -> dict[str, int]:
    """Bytes that "auto" may fill: of a GPU half, as activations need some, of the host nine tenths."""
    host = there["host"] * 9 // 10
    device = host if joined else there.get("device", host) // 2
    return {"device": config.device_budget or device, "host": config.host_budget or host}


def choose(
    config: ZeroConfig,
    sizes: Sequence[Size],
    comm: Comm,
    device: torch.device,
    freed: Iterable[Any],
) -> tuple[list[Place], int]:
    """The tiers of each unit, and bytes of the drive's cache.

    ``freed``: tensors whose memory training gives back. MemoryError, on all ranks, for what is more
    than they have.
    """
    placement = Placement(config, sizes, comm.size, device.type == "cpu" and device not in LINKS)
    local = max(1, min(comm.size, int(os.environ.get("LOCAL_WORLD_SIZE", 1))))
    held = held_nbytes(freed, placement.joined)
    free = free_memory(device, config.nvme_path or [os.getcwd()])  # type: ignore[arg-type]
    shares = {name: n // (1 if name == "device" else local) for name, n in free.items()}
    rows = comm.rows("memory", [float(nbytes + held[name]) for name, nbytes in shares.items()])
    there = [dict(zip(free, map(int, row), strict=True)) for row in rows]
    places = placement.places(rooms(config, least_of(there), placement.joined))
    needed = placement.by_memory(placement.at_rest(places))
    short = [rank for rank, row in enumerate(there) if lacking(needed, row)]
    if short:
        raise MemoryError("\n".join(refusal(placement, needed, there, short)))
    return places, placement.cache_nbytes(places)


def least_of(there: Sequence[Nbytes]) -> dict[str, int]:
    """What each rank has."""
    return {name: min(row[name] for row in there) for name in there[0]}


def refusal(
    placement: Placement, needed: Nbytes, there: Sequence[Nbytes], short: Sequence[int]
) -> Iterator[str]:
    """Lines that say what ranks lack, and what would fit."""
    config, row = placement.config, there[short[0]]
    who = f" on rank {', '.join(map(str, short))} of {len(there)}" * (len(there) > 1)
    options = pasted(config, ZeroConfig()) or "the defaults"
    yield f"there is not enough memory{who} for this model with {options}. Nothing has been changed."
    yield f"{'':8}{'needed':>14}{'there':>14}"
    few = lacking(needed, row)
    for name in filter(needed.get, row):
        said = f"   {readable(few.get(name, 0))} too few" * (name in few)
        yield f"{MEMORIES[name]:8}{readable(needed[name]):>14}{readable(row[name]):>14}{said}"
    yield "(of one rank, with what the model holds now; activations come on top)"
    found = list(itertools.islice(fitting(placement, least_of(there)), 2))
    yield "What fits instead:" if found else "No other tier fits: use more ranks, or fewer bits"
    yield from (f"    {change}" for change in found)


def fitting(placement: Placement, there: Nbytes) -> Iterator[str]:
    """Other stages and tiers that fit, as they may be written."""
    for change in INSTEAD:
        path = (
            {"nvme_path": placement.config.nvme_path or os.getcwd()}
            if "nvme" in change.values()
            else {}
        )
        with contextlib.suppress(ValueError):  # of budgets, or options that do not go together
            config = dataclasses.replace(placement.config, **change, **path)
            other = dataclasses.replace(placement, config=config)
            places = other.places(rooms(config, there, other.joined))
            said = pasted(config, placement.config)
            if said and not lacking(other.by_memory(other.at_rest(places)), there):
                yield said


@torch.no_grad()
def place_buffers(model: nn.Module, device: torch.device, moves: bool, comm: Comm) -> None:
    """Give all ranks the first one's buffers, and move them to ``device``."""
    for name, buffer in model.named_buffers():
        if comm.size > 1 and buffer.numel():
            values = buffer.to(device, memory_format=torch.contiguous_format, copy=True)
            comm.broadcast(name, values.reshape(-1).view(torch.uint8))
            buffer.data = torch.empty_like(buffer).copy_(values)  # of its own, if it was expanded
        if moves:
            buffer.data = buffer.to(device)
