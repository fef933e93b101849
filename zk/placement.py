"""Placement: the tiers of units, and the refusal of what cannot fit, by numbers alone.

``Placement`` is the arithmetic of one rank; ``choose`` asks it for the memory that is here.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zk.config import ZeroConfig
from zk.logs import require
from zk.memory import host_memory
from zk.offload.drive import SPARE, Drive, capacity_of
from zk.parallel.comm import Comm
from zk.parallel.runtime import GATHERED_IN_BACKWARD
from zk.unit import Unit

REMEDIES = {
    "device": "optimizer_tier='host', stage=3 with param_tier='host', or stage=3 over more ranks",
    "host": "optimizer_tier='nvme', stage=3 with param_tier='nvme', smaller units=, or more ranks",
    "nvme": "a larger drive, several folders as nvme_path=, or more ranks",
}
MIRRORED = ("device", "host"), ("device", "nvme")
Nbytes = Mapping[str, float]  # memory -> bytes
Sizes = Counter[tuple[str, str]]  # (tier, kind) -> bytes


class Size(NamedTuple):
    """One unit: its elements, padding included, and the bytes of one."""

    numel: int
    param: int  # and its gradient
    master: int
    moments: int
    is_trained: bool
    is_block: bool  # gathered for its own forward alone

    @property
    def nbytes(self) -> int:
        """Of its parameters, full."""
        return self.numel * self.param

    @classmethod
    def of(cls, unit: Unit, fields: Mapping[str, torch.dtype], model: nn.Module) -> Size:
        """``fields``: what the unit's codec keeps of an element."""
        kept = {name: dtype.itemsize for name, dtype in fields.items()}
        # a codec whose "param" has fewer bytes takes the rest from elsewhere
        own = kept.pop("param", unit.dtype.itemsize), kept.pop("master", 0)
        return cls(unit.numel, *own, sum(kept.values()), unit.is_trained, unit.module is not model)


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

    def rests(self, size: Size) -> int:
        """Bytes of parameters between uses."""
        return size.param * (self.shard(size) if self.config.stage == 3 else size.numel)

    def state(self, size: Size) -> int:
        """Bytes of gradient, master and moments."""
        return self.shard(size) * (size.param + size.master + size.moments)

    def copy(self, size: Size) -> int:
        """Bytes of parameters that rest on the device, where they are updated elsewhere."""
        return 0 if self.joined else self.shard(size) * size.param

    @property
    def tiers(self) -> tuple[str, str]:
        """What users asked for: of parameters, and of states."""
        config = self.config
        return config.param_tier if config.stage == 3 else "device", config.optimizer_tier

    def places(self, room: Nbytes) -> list[Place]:
        """The tiers of each unit.

        ``room``: bytes that may be filled of "device" and "host": by "auto", and by "nvme" with a budget
        of the host. ValueError for budgets that do not hold what must rest there.
        """
        found = self.filled(room)
        if on_drive(found):
            found = self.filled({**room, "host": room["host"] - self.buffers})
        self.check(found)
        return found

    def filled(self, room: Nbytes) -> list[Place]:
        """Fill tiers with whole units: parameters first, which are used twice in a step."""
        used, (param_tier, state_tier) = Counter[str](), self.tiers
        memory, drive = ("device", "host"), ("nvme",) * bool(self.config.nvme_path)
        budgeted = ("host", "nvme") if self.config.host_budget else ("nvme",)
        shared = self.joined and self.config.device_budget is None and "auto" in self.tiers

        def take(asked: str, auto: tuple[str, ...], nbytes: int) -> str:
            """The first tier with room; the last one takes what is left over."""
            wanted = {"auto": auto, "nvme": budgeted}.get(asked, (asked,))
            full = {tier: used.total() if shared else used[tier] for tier in wanted}
            fits = (tier for tier in wanted[:-1] if full[tier] + nbytes <= room[tier])
            used[found := next(fits, wanted[-1])] += nbytes
            return found

        auto = memory if state_tier == "device" else memory + drive
        params = [take(param_tier, auto, self.rests(size)) for size in self.sizes]
        places, pairs = list[Place](), list(zip(self.sizes, params, strict=True))
        # what rests on the device has a copy in host memory, unless it is updated on the device
        copies = (self.copy(size) * size.is_trained for size, param in pairs if param == "device")
        used["host"] += sum(copies) * (state_tier != "device")
        for size, param in pairs:
            auto = (memory if param == "device" else memory[1:]) + drive
            state = take(state_tier, auto, self.state(size)) if size.is_trained else ""
            places.append(Place("mirrored" if (param, state) in MIRRORED else param, state))
        return places

    def at_rest(self, places: Sequence[Place]) -> Sizes:
        """Bytes between uses: what no step can do without."""
        sizes = Sizes()
        for size, (param, state) in zip(self.sizes, places, strict=True):
            is_copied, shard = param == "mirrored", self.shard(size) * size.is_trained
            sizes["device" if is_copied else param, "param"] += self.rests(size)
            sizes["host", "param_copy"] += self.copy(size) * is_copied
            sizes[state, "master"] += shard * size.master
            sizes[state, "moments"] += shard * size.moments
            sizes[state, "grad"] += shard * size.param
        return +sizes

    def footprint(self, places: Sequence[Place]) -> Sizes:
        """Bytes at the fullest point of a step, without activations."""
        sizes, config = self.at_rest(places), self.config
        here = ("device", "mirrored", *["host"] * self.joined)
        pairs = zip(self.sizes, places, strict=True)
        moved = [
            s for s, (p, _) in pairs if config.stage == 3 and (self.ranks > 1 or p not in here)
        ]
        blocks = sorted((s.nbytes for s in moved if s.is_block), reverse=True)
        grads = sorted((s.nbytes for s in self.sizes if s.is_trained), reverse=True)
        outside = sum(s.nbytes for s in moved if not s.is_block)
        is_away = {state for _, state in places} - {"", "device"} and not self.joined
        in_flight = 3 if self.ranks > 1 else 2 if is_away else 0  # alone, it is where it rests
        is_late = self.ranks > 1 and config.stage == 1  # reduced in step()
        ahead = 1 + config.prefetch + GATHERED_IN_BACKWARD
        sizes["device", "gathered"] = outside + sum(blocks[:ahead])
        sizes["device", "bucket"] = sum(grads if is_late else grads[:in_flight])
        sizes["device", "fresh"] = max(grads, default=0)
        sizes["host", "buffer"] = self.buffers * on_drive(places)
        return +sizes

    @property
    def buffers(self) -> int:
        """Bytes of host memory that chunks of the drive pass through."""
        moves = self.tiers[0] in ("nvme", "auto")
        params, grads, states = {0}, {0}, {0}
        for size in self.sizes:
            chunk = min(self.shard(size), Drive.chunk_numel) * size.is_trained
            params.add(self.shard(size) * size.param * moves)
            grads.add(chunk * 4)
            states.add(chunk * (size.master + size.moments))
        return SPARE * sum(capacity_of(max(kind)) for kind in (params, grads, states))

    def by_memory(self, sizes: Sizes) -> Counter[str]:
        """Bytes of each memory."""
        found = Counter[str]()
        for (tier, _), nbytes in sizes.items():
            found["host" if self.joined and tier == "device" else tier] += nbytes
        return found

    def check(self, places: Sequence[Place]) -> None:
        """ValueError for budgets that do not hold what must rest there."""
        used = dataclasses.replace(self, joined=False).by_memory(self.at_rest(places))
        used["host"] += self.buffers * on_drive(places)
        for tier in ("device", "host"):
            budget = getattr(self.config, f"{tier}_budget")
            require(
                budget is None or used[tier] <= budget,
                f"this rank's training state needs {readable(used[tier])} on the {tier} tier, and "
                f"{tier}_budget is {readable(budget or 0)}; raise it, or use {REMEDIES[tier]}",
            )


def on_drive(places: Sequence[Place]) -> bool:
    """Tell if some unit needs the drive."""
    return any("nvme" in place for place in places)


def readable(nbytes: float) -> str:
    """As a person would say it: "1.50 GiB", "20.00 MiB", "10 bytes"."""
    name, size = ("GiB", 2**30) if nbytes >= 2**30 else ("MiB", 2**20)
    return f"{nbytes / size:.2f} {name}" if nbytes >= size else f"{nbytes:.0f} bytes"


# ---- the memory that is here ---------------------------------------------------------------------


def free_memory(device: torch.device, paths: Sequence[str]) -> dict[str, int]:
    """Bytes that can still be had of the host, of a GPU, and of the drives that have ``paths``.

    A container's limit counts, and swap does not. Several paths are written to alike.
    """
    free = {"host": host_memory()[1]}
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        free["device"] = torch.cuda.mem_get_info(device)[0] + unused
    if not paths or not all(map(os.path.isdir, paths)):
        return free  # whoever opens files there says what is wrong
    drives, shares = [os.stat(path).st_dev for path in paths], []
    for path, drive in zip(paths, drives, strict=True):
        found = os.statvfs(path)
        shares.append(found.f_bavail * found.f_frsize // drives.count(drive))
    return free | {"nvme": len(shares) * min(shares)}


def held_nbytes(tensors: Iterable[Any], joined: bool) -> Counter[str]:
    """Bytes of each memory that ``tensors`` have now, shared ones once."""
    plain = (one for one in tensors if isinstance(one, Tensor) and one.layout is torch.strided)
    found = Counter[str]()
    for one in {one.untyped_storage()._cdata: one for one in plain if not one.is_meta}.values():
        memory = "host" if joined or one.device.type == "cpu" else "device"
        found[memory] += one.untyped_storage().nbytes()
    return found


def rooms(config: ZeroConfig, there: Nbytes, joined: bool) -> dict[str, float]:
    """Bytes that "auto" may fill: of a GPU half, as activations need some, of the host nine tenths."""
    host = 0.9 * there["host"]
    device = host if joined else 0.5 * there["device"]
    return {"device": config.device_budget or device, "host": config.host_budget or host}  # type: ignore[dict-item]


def choose(
    config: ZeroConfig, sizes: list[Size], comm: Comm, device: torch.device, freed: Iterable[Any]
) -> list[Place]:
    """The tiers of each unit; MemoryError on all ranks if one lacks some. ``freed``: given back."""
    joined = device.type == "cpu"
    placement = Placement(config, sizes, comm.sharers.size, joined)
    held = held_nbytes(freed, joined)
    local = max(1, min(comm.size, int(os.environ.get("LOCAL_WORLD_SIZE", 1))))
    sharers = {"device": 1, "host": local, "nvme": local}
    with comm.together("ZeroOptimizer()"):
        free = free_memory(device, config.nvme_path or ())  # type: ignore[arg-type]
        there = {n: free.get(n, math.inf) / ranks + held[n] for n, ranks in sharers.items()}
        places = placement.places(rooms(config, there, joined))
        needed = placement.by_memory(placement.at_rest(places))
        few = [name for name, nbytes in there.items() if nbytes < needed[name]]
        said = (f"{readable(needed[n])} on the {n} tier and has {readable(there[n])}" for n in few)
        require(
            not few,
            f"there is not enough memory for this model: this rank needs {', '.join(said)}, "
            "with what the model holds now, and activations come on top. Nothing has been changed; use "
            f"{REMEDIES.get(''.join(few[:1]))} (zk plan says what fits)",
            MemoryError,
        )
    return places


@torch.no_grad()
def place_buffers(model: nn.Module, device: torch.device, moves: bool, comm: Comm) -> None:
    """Give all ranks the first one's buffers, and move them to ``device``."""
    for name, buffer in model.named_buffers():
        if comm.size > 1 and buffer.numel():
            values = buffer.to(device, copy=True)
            comm.broadcast(name, values)
            buffer.data = torch.empty_like(buffer).copy_(values)  # of its own, if it was expanded
        if moves:
            buffer.data = buffer.to(device)
