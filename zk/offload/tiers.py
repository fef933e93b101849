"""In: names of tiers and budgets. Out: where each unit's training state lives, and the stores that hold it there.

A store hands out flat fields chunk by chunk. In memory (device or host) there is one chunk, and it is the tensors themselves, worked
on in place: on a machine without an accelerator the device is the host, so offload and upload find source and destination to be the
same memory and do nothing. On NVMe a chunk is fetched, worked on, and evicted (see spill.py).
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Protocol

import psutil
import torch
from torch import Tensor

from zk.memory import zeros
from zk.offload.cpu_adam import sum_of_squares
from zk.offload.nvme import File
from zk.offload.scratch import Scratch
from zk.offload.spill import Buffers, FileGrads, FileHome, FileStore, Spill, chunks_of

log = logging.getLogger("zk")
# chunks of the update in host buffers at once, on NVMe: being read, worked on, written, and kept for the next step
CHUNKS_IN_MEMORY = 6
# of these, kept: the last ones of a step are the first ones of the next, which goes the other way
CHUNKS_KEPT = 2


class Store(Protocol):
    """Flat fields (numel,) of one shard, by chunks."""

    chunks: Sequence[slice]
    resident: bool  # what was opened stays valid after it is closed

    def fetch(self, index: int) -> bool:
        """Ask for a chunk; False if that is not possible now."""

    def open(self, index: int, read: bool = True) -> dict[str, Tensor]:
        """The fields of a chunk, to work on in place; ``read=False`` if all is to be overwritten."""

    def close(self, index: int, changed: bool, keep: bool = False) -> None:
        """Done with a chunk."""

    def nbytes(self, name: str) -> int:
        """Bytes of a field."""


class Grads(Protocol):
    """The reduced gradient of one shard (numel,), between backward and update."""

    def add(self, grad: Tensor) -> bool:
        """Take it, or add it in fp32 to what is there. True: its memory is taken too."""

    def fetch(self, index: int) -> bool:
        """Ask for a chunk; False if that is not possible now."""

    def open(self, index: int) -> Tensor:
        """A chunk of the gradient."""

    def close(self, index: int) -> None:
        """Done with a chunk."""

    def sum_of_squares(self) -> float:
        """In float64; 0 without a gradient. Not finite exactly if some element is not."""

    def clear(self) -> Tensor | None:
        """Forget the gradient; returns memory that was taken."""

    @property
    def nbytes(self) -> int: ...


class MemoryStore:
    """Fields as tensors (numel,) that are always there."""

    resident = True

    def __init__(self, chunks: Sequence[slice], fields: dict[str, Tensor]) -> None:
        self.chunks, self.fields = chunks, fields

    def fetch(self, index: int) -> bool:
        return True

    def open(self, index: int, read: bool = True) -> dict[str, Tensor]:
        return {name: field[self.chunks[index]] for name, field in self.fields.items()}

    def close(self, index: int, changed: bool, keep: bool = False) -> None:
        return

    def nbytes(self, name: str) -> int:
        return self.fields[name].nbytes


class MemoryHome:
    """A rank's slice of a unit's parameters (numel,) in device or host memory."""

    def __init__(self, shard: Tensor, chunks: Sequence[slice]) -> None:
        self.shard, self.device = shard, shard.device
        self.store = MemoryStore(chunks, {"param": shard})

    def fetch(self) -> bool:
        return True

    def open(self) -> Tensor:
        return self.shard

    def close(self) -> None:
        return

    def write(self, values: Tensor) -> None:
        self.shard.copy_(values)

    @property
    def nbytes(self) -> int:
        return self.shard.nbytes


class MemoryGrads:
    """The gradient as a tensor: offloaded in its own precision, fp32 once it is accumulated."""

    def __init__(self, chunks: Sequence[slice], device: torch.device, num_threads: int) -> None:
        self.chunks, self.device, self.num_threads = chunks, device, num_threads
        self.flat: Tensor | None = None

    def add(self, grad: Tensor) -> bool:
        if self.flat is None:
            taken = grad.device == self.device
            self.flat = grad if taken else grad.to(self.device)
            return taken
        if self.flat.dtype != torch.float32:
            self.flat = self.flat.float()
        self.flat += grad.to(self.device)
        return False

    def fetch(self, index: int) -> bool:
        return True

    def open(self, index: int) -> Tensor:
        assert self.flat is not None
        return self.flat[self.chunks[index]]

    def close(self, index: int) -> None:
        return

    def sum_of_squares(self) -> float:
        return 0.0 if self.flat is None else sum_of_squares(self.flat, self.num_threads)

    def clear(self) -> Tensor | None:
        flat, self.flat = self.flat, None
        return flat

    @property
    def nbytes(self) -> int:
        return 0 if self.flat is None else self.flat.nbytes


@dataclasses.dataclass(frozen=True, slots=True)
class MemoryTier:
    """Device or host memory."""

    name: str
    device: torch.device

    def chunks(self, numel: int) -> list[slice]:
        """One: memory is not moved to be worked on."""
        return [slice(0, numel)]

    def home(self, numel: int, dtype: torch.dtype) -> MemoryHome:
        """Room for parameters."""
        return MemoryHome(zeros(numel, dtype, self.device), self.chunks(numel))

    def store(self, chunks: Sequence[slice], fields: Mapping[str, torch.dtype]) -> MemoryStore:
        """Room for optimizer state, zeroed."""
        numel = chunks[-1].stop if chunks else 0
        return MemoryStore(chunks, {name: zeros(numel, dtype, self.device) for name, dtype in fields.items()})

    def grads(self, chunks: Sequence[slice], num_threads: int) -> MemoryGrads:
        """Room for a gradient."""
        return MemoryGrads(chunks, self.device, num_threads)


class NVMeTier:
    """Files on a drive, one for each rank, striped where there are several paths. Reserve first, then ``create``, then use.

    Args:
        paths: folders on the drives.
        rank: of this process.
        ahead: units whose parameters may be in host memory at once.
        checksum: notice when the drive returns something else than was written.
    """

    name, device = "nvme", torch.device("cpu")

    def __init__(self, paths: Sequence[str], rank: int, ahead: int, checksum: bool) -> None:
        self.ahead = ahead
        self.scratch = Scratch(paths, rank)
        self.spill = Spill(lambda nbytes: File(self.scratch.paths("state"), nbytes, checksum=checksum))
        self.stores: list[FileStore] = []
        self.homes: list[FileHome] = []
        self.all_grads: list[FileGrads] = []

    def chunks(self, numel: int) -> list[slice]:
        """What is moved, and worked on, at once."""
        return chunks_of(numel)

    def home(self, numel: int, dtype: torch.dtype) -> FileHome:
        """Room for parameters."""
        self.homes.append(FileHome(self.spill, self.chunks(numel), dtype))
        return self.homes[-1]

    def store(self, chunks: Sequence[slice], fields: Mapping[str, torch.dtype]) -> FileStore:
        """Room for optimizer state."""
        self.stores.append(FileStore(self.spill, chunks, fields))
        return self.stores[-1]

    def grads(self, chunks: Sequence[slice], num_threads: int) -> FileGrads:
        """Room for a gradient."""
        self.all_grads.append(FileGrads(self.spill, chunks, num_threads))
        return self.all_grads[-1]

    def create(self) -> None:
        """Take the room on the drive, and buffers in host memory. OSError if there is not enough room."""
        self.spill.create()
        states = Buffers(self.spill, max((store.largest for store in self.stores), default=0), CHUNKS_IN_MEMORY)
        params = Buffers(self.spill, max((home.store.largest for home in self.homes), default=0), CHUNKS_IN_MEMORY)
        whole = Buffers(self.spill, max((home.piece.nbytes for home in self.homes), default=0), self.ahead)
        largest = max((chunk.stop - chunk.start for grads in self.all_grads for chunk in grads.chunks), default=0)
        parts = Buffers(self.spill, largest * torch.float32.itemsize, CHUNKS_IN_MEMORY)
        grads_out = Buffers(self.spill, max((grads.numel for grads in self.all_grads), default=0) * torch.float32.itemsize, 2)
        for store in self.stores:
            store.buffers = states
        for home in self.homes:
            home.store.buffers, home.buffers = params, whole
        for grads in self.all_grads:
            grads.whole, grads.parts = grads_out, parts

    def metrics(self) -> dict[str, float]:
        """Pieces fetched, the share that was there when needed, milliseconds of waiting for the drive, and bytes moved, since the start."""
        traffic, file = self.spill.traffic, self.spill.file
        return {
            "fetches": traffic.fetches,
            "fetch_hit_rate": traffic.hits / max(1, traffic.fetches),
            "stall_ms": traffic.stall_ms,
            "fetched_nbytes": file.read_nbytes if file else 0,
            "evicted_nbytes": file.written_nbytes if file else 0,
        }

    def close(self) -> None:
        """Wait for what is under way, and remove the files. What fails now is of no consequence, and logged."""
        try:
            self.spill.close()
        except OSError as error:
            log.warning("while closing the nvme tier: %s", error)
        finally:
            self.scratch.close()


Tier = MemoryTier | NVMeTier


@dataclasses.dataclass(frozen=True, slots=True)
class Needs:
    """Bytes of training state of one unit on one rank, by kind."""

    param_nbytes: int  # parameters between uses
    optimizer_nbytes: int  # gradients, masters and moments; 0 for a frozen unit


def readable(nbytes: int) -> str:
    """As a person would say it: "1.50 GiB", "20.00 MiB", "10 bytes"."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if nbytes >= size:
            return f"{nbytes / size:.2f} {unit}"
    return f"{nbytes} bytes"


def free_nbytes(device: torch.device) -> int:
    """Bytes that can still be allocated on ``device``."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)


def place(
    param_tier: str,
    optimizer_tier: str,
    needs: Sequence[Needs],
    stage: int,
    device: torch.device,
    device_budget: int | None,
    host_budget: int | None,
    buffer_nbytes: int | None,
) -> list[tuple[str, str]]:
    """For each unit, the tiers of its parameters and of its optimizer state.

    "auto" fills the device up to its budget, then the host, then NVMe. What "nvme" is asked for stays in the host's memory as far as a
    host_budget is given. Parameters go first: they are used twice in every step, optimizer state once.
    ``buffer_nbytes`` is what moving to and from NVMe takes of the host; None where there is no path for it.
    Raises ValueError if the state does not fit in the budgets, with what it needs and the remedy.
    """
    room = {
        "device": device_budget if device_budget is not None else int(0.9 * free_nbytes(device)),
        "host": host_budget if host_budget is not None else int(0.9 * free_nbytes(torch.device("cpu"))),
    }
    may_spill = buffer_nbytes is not None
    needed = sum((param_tier != "device") * need.param_nbytes + (optimizer_tier != "device") * need.optimizer_nbytes for need in needs)
    if buffer_nbytes is not None and host_budget is not None and needed > host_budget:
        if buffer_nbytes > host_budget:
            raise ValueError(
                f"the nvme tier needs {readable(buffer_nbytes)} of host memory for its buffers, and host_budget is {readable(host_budget)}; "
                "raise it, use prefetch=0, or make units smaller (units=)"
            )
        room["host"] -= buffer_nbytes
    shared = device.type == "cpu" and device_budget is None  # the device is the host: what one takes the other has not
    used = {"device": 0, "host": 0, "nvme": 0}

    def fits(tier: str, nbytes: int) -> bool:
        taken = used["device"] + used["host"] if shared else used[tier]
        return taken + nbytes <= room[tier]

    def choose(wanted: str, nbytes: int, may_leave: bool) -> str:
        if wanted == "auto":
            order = ["device", "host"] if may_leave else ["device"]
            tier = next((tier for tier in order if fits(tier, nbytes)), "nvme" if may_spill and may_leave else order[-1])
        elif wanted == "nvme" and host_budget is not None and fits("host", nbytes):
            tier = "host"
        else:
            tier = wanted
        used[tier] += nbytes
        return tier

    params = [choose(param_tier, need.param_nbytes, stage == 3) for need in needs]
    states = [choose(optimizer_tier, need.optimizer_nbytes, True) for need in needs]
    for name, budget in (("device", device_budget), ("host", host_budget)):
        if budget is not None and used[name] > budget:
            remedy = "optimizer_tier='host', or stage=3 with param_tier='host', moves it off the device" if name == "device" else (
                "more ranks, or 'nvme' tiers with nvme_path"
            )
            raise ValueError(
                f"this rank's training state needs {readable(used[name])} on the {name} tier, and {name}_budget is "
                f"{readable(budget)}; raise the budget, or choose a higher stage ({remedy})"
            )
    return list(zip(params, states, strict=True))
