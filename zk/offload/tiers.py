"""Tiers: placement of each unit's training state on device, host and NVMe, and the fields that hold it there.

A store hands out flat fields chunk by chunk. In memory (device or host) there is one chunk, and it is the tensors themselves, worked
on in place: on a machine without an accelerator the device is the host, so offload and upload find source and destination to be the
same memory and do nothing. On NVMe a chunk is fetched, worked on, and evicted (see spill.py).
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from zk.config import ZeroConfig
from zk.core.events import COMPLETED, Event
from zk.core.logs import rank_log
from zk.core.memory import host_memory, staging, zeros
from zk.offload.cpu_adam import sum_of_squares
from zk.offload.nvme import Excerpt, Excerpts, File, round_up
from zk.offload.packing import PACKED, Packing
from zk.offload.pinned import Record
from zk.offload.scratch import Scratch
from zk.offload.spill import Buffers, FileFields, FileGrads, FileParams, Spill, chunks_of
from zk.offload.transfer import Arrival, Transfer, pieces_of
from zk.offload.worker import Worker

K = TypeVar("K", bound=Hashable)

# chunks of the update in host buffers at once, on NVMe: being read, worked on, written, and kept for the next step
CHUNKS_IN_MEMORY = 6
# of these, kept: the last ones of a step are the first ones of the next, which goes the other way
CHUNKS_KEPT = 2
# gradients on their way to the drive
GRADIENTS_IN_MEMORY = 2
# units whose gradients wait in memory for an update that has been asked for, where that is all that they are for
HANDED_OVER = 2


class _Resident:
    """Chunks that are always in memory."""

    def fetch(self, chunk: slice) -> bool:
        """Ask for a chunk; False if that is not possible now."""
        return True

    def close(self, chunk: slice, changed: bool = False, keep: bool = False) -> None:
        """Done with a chunk."""

    # of gradients: none is in memory for an update alone

    is_handed_over = False

    def discard(self) -> None:
        """Nothing is left when it has been used."""


class ResidentFields(_Resident):
    """Flat fields of consecutive elements of a shard, in memory, worked on where they are, once copies that read them are over.

    Args:
        chunks: slices of the shard, in order and without gaps.
        fields: name -> (elements,), and all PACKED bytes where there is a ``packing``.
        memory: "device" or "host".
    """

    resident = True  # what was opened stays valid after it is closed

    def __init__(self, chunks: Sequence[slice], fields: dict[str, Tensor], memory: str, packing: Packing | None = None) -> None:
        self.chunks, self.fields, self.memory, self.start = chunks, fields, memory, chunks[0].start if chunks else 0
        self.packing = packing
        self.reader: Event = COMPLETED  # the last copy of all parameters
        self.copies: dict[int, Event] = {}  # the last copy from or to a chunk, by its start

    @property
    def dtypes(self) -> Mapping[str, torch.dtype]:
        return {name: field.dtype for name, field in self.fields.items() if name != PACKED}

    def open(self, chunk: slice, read: bool = True) -> dict[str, Tensor]:
        """The fields of a chunk, to work on in place; ``read=False`` if all is to be overwritten."""
        self.reader.wait()
        self.copies.get(chunk.start, COMPLETED).wait()
        opened = {name: field[chunk.start - self.start : chunk.stop - self.start] for name, field in self.fields.items()}
        return opened if self.packing is None else opened | {PACKED: self.fields[PACKED][self.packing.bytes_of(chunk)]}

    def exchange(self, other: ResidentFields) -> None:
        """Exchange memory with ``other``, of the same chunks and fields, and the copies from and to it."""
        self.fields, other.fields = other.fields, self.fields
        self.reader, other.reader = other.reader, self.reader
        self.copies, other.copies = other.copies, self.copies

    def nbytes(self, name: str) -> int:
        return self.fields[name].nbytes

    # of the parameters of a unit, where they rest; copies to and from them come in the order of compute

    def prefetch(self) -> bool:
        return True

    def whole(self) -> Tensor:
        return self.fields["param"]

    def release(self, after: Event = COMPLETED) -> None:
        self.reader = after

    def write(self, values: Tensor) -> None:
        self.reader.wait()
        self.fields["param"].copy_(values)


class HostCopies(_Resident):
    """Parameters that rest in device memory, opened as copies in host memory, which are written back where they change."""

    resident = True

    def __init__(self, near: ResidentFields) -> None:
        self.near = near
        self.opened: dict[tuple[int, int], dict[str, Tensor]] = {}  # by thread and chunk

    def open(self, chunk: slice, read: bool = True) -> dict[str, Tensor]:
        """Copies of the fields of a chunk, of any value unless ``read``."""
        copies = {
            name: field.cpu() if read else torch.empty_like(field, device="cpu")
            for name, field in self.near.open(chunk).items()
        }
        self.opened[threading.get_ident(), chunk.start] = copies
        return copies

    def close(self, chunk: slice, changed: bool = False, keep: bool = False) -> None:
        copies = self.opened.pop((threading.get_ident(), chunk.start))
        for name, field in self.near.open(chunk).items() if changed else ():
            field.copy_(copies[name])

    def nbytes(self, name: str) -> int:
        return self.near.nbytes(name)


class MemoryGrads(_Resident):
    """The gradient as a tensor in the memory where backward made it: in its own precision, in ``sum_dtype`` once it is accumulated."""

    is_here = True

    def __init__(self, chunks: Sequence[slice], num_threads: int, sum_dtype: torch.dtype) -> None:
        self.start, self.num_threads, self.sum_dtype = chunks[0].start, num_threads, sum_dtype
        self.flat: Tensor | None = None
        self.squares: float | Tensor | None = None  # of ``flat``, once somebody has asked

    def add(self, grad: Tensor, is_measured: bool = False) -> Event | None:
        """Take it, or add it to what is there. None: its memory is taken too; else that may be used again after the event."""
        self.squares = None
        if self.flat is None:
            self.flat = grad
            return None
        self.flat = self.flat.to(self.sum_dtype)
        self.flat += grad
        return COMPLETED

    def sum_of_squares(self) -> float | Tensor:
        if self.squares is None:
            self.squares = 0.0 if self.flat is None else sum_of_squares(self.flat, self.num_threads)
        return self.squares

    def open(self, chunk: slice) -> Tensor:
        assert self.flat is not None
        return self.flat[chunk.start - self.start : chunk.stop - self.start]

    def clear(self) -> Tensor | None:
        flat, self.flat, self.squares = self.flat, None, None
        return flat

    @property
    def nbytes(self) -> int:
        return 0 if self.flat is None else self.flat.nbytes


class HostGrads(_Resident):
    """The gradient in host memory, offloaded from a device in its own precision; added up in ``sum_dtype`` in the background once there is a second.

    ``returns``: the sum is uploaded for the update, so it is page-locked.
    """

    def __init__(
        self, chunks: Sequence[slice], transfer: Transfer, worker: Worker, num_threads: int, sum_dtype: torch.dtype, returns: bool
    ) -> None:
        self.transfer, self.worker, self.num_threads, self.sum_dtype, self.returns = transfer, worker, num_threads, sum_dtype, returns
        self.pieces = [slice(chunk.start - chunks[0].start, chunk.stop - chunks[0].start) for chunk in chunks]
        self.index = {chunk.start: index for index, chunk in enumerate(chunks)}
        self.first: Arrival | None = None
        self.squares: float | Tensor = 0.0  # of the first, if nobody has measured it on its way
        self.total: Tensor | None = None
        self.locked: Record | None = None  # its memory, if that is page-locked
        self.added = COMPLETED  # the last addition
        self.reader: Event = COMPLETED  # the last copy of it back to the device

    def add(self, grad: Tensor, is_measured: bool = False) -> Event | None:
        arrival = self.transfer.offload(grad, self.pieces)
        if self.first is None and self.total is None:
            self.squares, self.first = 0.0 if is_measured else sum_of_squares(grad, self.num_threads), arrival
        else:
            if self.total is None:
                self.locked = self.transfer.room(grad.numel(), self.sum_dtype) if self.returns else None
                self.total = zeros(grad.numel(), self.sum_dtype, torch.device("cpu")) if self.locked is None else self.locked.tensor
            first, self.first = self.first, None
            self.added = self.worker.submit(functools.partial(_add_up, self.total, first, arrival, self.reader))
        return arrival.events[-1]

    @property
    def is_here(self) -> bool:
        """Check that nothing of it is still arriving."""
        return self.added.done and (self.first is None or self.first.events[-1].done)

    def sum_of_squares(self) -> float | Tensor:
        self.added.wait()
        return sum_of_squares(self.total, self.num_threads) if self.total is not None else self.squares if self.first is not None else 0.0

    def open(self, chunk: slice) -> Tensor:
        self.added.wait()
        index = self.index[chunk.start]
        if self.first is not None:
            return self.first.piece(index)
        assert self.total is not None
        return self.total[self.pieces[index]]

    def clear(self) -> Tensor | None:
        self.added.join()
        self.added = COMPLETED
        if self.first is not None:
            self.first.drop(self.reader)
        if self.locked is not None:
            self.locked.release(self.reader)
        self.first = self.total = self.locked = None
        self.reader = COMPLETED
        return None

    @property
    def nbytes(self) -> int:
        kept = self.total if self.total is not None else self.first.record.tensor if self.first is not None else None
        return 0 if kept is None else kept.nbytes


def _add_up(total: Tensor, first: Arrival | None, second: Arrival, reader: Event) -> None:
    """``total`` (n,) becomes or grows by what has arrived, once ``reader`` has what was there."""
    if first is not None:
        total.copy_(first.whole())
        first.drop(reader)
    reader.wait()
    total += second.whole()
    second.drop()


@dataclasses.dataclass(frozen=True, slots=True)
class MemoryTier:
    """Device or host memory. ``memory`` says which; on a machine where both are the same all is "host"."""

    name: str
    device: torch.device
    memory: str
    transfer: Transfer
    worker: Worker

    @property
    def across(self) -> bool:
        """Tell if a link is between this memory and the device."""
        return self.memory == "host" and not self.transfer.joined

    def chunks(self, start: int, stop: int, uncut: Sequence[slice] = ()) -> list[slice]:
        """Slices that are worked on at once: one, where nothing is moved for that; pieces, where a link is between it and the device."""
        return pieces_of(start, stop, uncut) if self.across else [slice(start, stop)]

    def zeros(self, numel: int, dtype: torch.dtype, crosses: bool) -> Tensor:
        """(numel,) zeros; ``crosses``: they are copied to or from the device."""
        return self.transfer.memory(numel, dtype) if crosses and self.across else zeros(numel, dtype, self.device)

    def flush(self) -> None:
        """Nothing is written behind."""

    def home(self, numel: int, dtype: torch.dtype, uncut: Sequence[slice] = ()) -> ResidentFields:
        """Room for parameters."""
        return self.store(self.chunks(0, numel, uncut), {"param": dtype})

    def store(
        self, chunks: Sequence[slice], fields: Mapping[str, torch.dtype], crosses: bool = False, packing: Packing | None = None
    ) -> ResidentFields:
        """Room for some or all that is kept for each element, and of whole parameters, zeroed.

        ``crosses``: as for ``zeros``; parameters always do.
        """
        numel = chunks[-1].stop - chunks[0].start
        room = {name: self.zeros(numel, dtype, crosses or name == "param") for name, dtype in fields.items()}
        if packing is not None:
            room[PACKED] = self.zeros(packing.nbytes, torch.uint8, crosses)
        return ResidentFields(chunks, room, self.memory, packing)

    def grads(self, chunks: Sequence[slice], num_threads: int, sum_dtype: torch.dtype, returns: bool = False) -> MemoryGrads | HostGrads:
        """Room for a gradient, and for a sum of them in ``sum_dtype``. ``returns``: the device updates with it, wherever it rests."""
        if self.across:
            return HostGrads(chunks, self.transfer, self.worker, num_threads, sum_dtype, returns)
        return MemoryGrads(chunks, num_threads, sum_dtype)


class NVMeTier:
    """Files on a drive, one for each rank, striped where there are several paths. Reserve first, then ``spill.create``, then use.

    Args:
        paths: folders on the drives.
        rank: of this process.
        ahead: units whose parameters may be in host memory at once.
        checksum: notice when the drive returns something else than was written.
        transfer, worker: as for MemoryTier.
        handed_over: units whose gradients wait in host memory for their updates, unwritten.
    """

    name, memory = "nvme", "host"

    def __init__(
        self, paths: Sequence[str], rank: int, ahead: int, checksum: bool, transfer: Transfer, worker: Worker, handed_over: int = 0
    ) -> None:
        self.transfer, self.worker = transfer, worker
        self.scratch = Scratch(paths, rank)
        self.checksum = checksum
        self.crosses = False  # the device updates what is here, so chunks are copied to it and back
        self.spill = Spill(self._file)
        self.states, self.params, self.parts = (Buffers(self.spill, 0, CHUNKS_IN_MEMORY, self._updated) for _ in range(3))  # the last: of gradients
        self.whole_params = Buffers(self.spill, 0, ahead, self._crossing, caches=True)
        self.gradients = Buffers(self.spill, 0, GRADIENTS_IN_MEMORY + handed_over, self._updated if handed_over else staging)

    def _crossing(self, nbytes: int) -> Tensor:
        """A buffer on the way to the device, or from it."""
        return staging(nbytes) if self.transfer.joined else self.transfer.memory(nbytes, torch.uint8)

    def _updated(self, nbytes: int) -> Tensor:
        """A buffer of what is updated."""
        return self._crossing(nbytes) if self.crosses else staging(nbytes)

    def _file(self, nbytes: int, starts: Iterable[int]) -> File:
        name = f"state-{len(self.spill.files)}" if self.spill.files else "state"
        return File(self.scratch.paths(name), nbytes, checksum=self.checksum, cuts=starts)

    def chunks(self, start: int, stop: int, uncut: Sequence[slice] = ()) -> list[slice]:
        """Slices that are moved, and worked on, at once."""
        return chunks_of(start, stop, uncut)

    def flush(self) -> None:
        """Return when the drive has taken what was written behind; raises what it refused."""
        self.spill.flush()

    def borrow(self, slices: Mapping[K, tuple[int, torch.dtype, Iterable[Excerpt]]]) -> dict[K, FileParams]:
        """Homes of frozen parameters that stay in files of the user's, all of which are opened here, once.

        Args:
            slices: key -> elements, their dtype, and the bytes of files that they are.
        """
        excerpts: list[Excerpt] = []
        cuts: list[int] = []
        starts: dict[K, int] = {}
        end = 0
        for key, (numel, dtype, parts) in slices.items():
            starts[key] = end
            excerpts += [dataclasses.replace(part, start=end + part.start) for part in parts]
            cuts += [end + chunk.start * dtype.itemsize for chunk in self.chunks(0, numel)]
            end += round_up(numel * dtype.itemsize)
        first = self.spill.borrow(Excerpts(excerpts, end, checksum=self.checksum, cuts=cuts))
        return {key: self._params(self.chunks(0, numel), dtype, first + starts[key]) for key, (numel, dtype, _) in slices.items()}

    def _params(self, chunks: Sequence[slice], dtype: torch.dtype, borrowed: int | None = None) -> FileParams:
        return FileParams(self.params, self.whole_params, chunks, dtype, borrowed)

    def home(self, numel: int, dtype: torch.dtype, uncut: Sequence[slice] = ()) -> FileParams:
        """Room for parameters."""
        return self._params(self.chunks(0, numel, uncut), dtype)

    def store(self, chunks: Sequence[slice], fields: Mapping[str, torch.dtype], crosses: bool = False, packing: Packing | None = None) -> Fields:
        """Room for optimizer state, as MemoryTier has it. None of it, as of plain SGD in fp32, is in no file."""
        return FileFields(self.states, chunks, fields, packing) if fields or packing is not None else ResidentFields(chunks, {}, self.memory)

    def grads(self, chunks: Sequence[slice], num_threads: int, sum_dtype: torch.dtype, returns: bool = False) -> FileGrads:
        """Room for a gradient, as MemoryTier has it; all that is updated passes through one sort of buffers, whoever updates it."""
        return FileGrads(self.gradients, self.parts, chunks, self.transfer, self.worker, num_threads, sum_dtype)

    def metrics(self) -> dict[str, float]:
        """Pieces fetched, the share that was there when needed, milliseconds of waiting for the drive, and bytes moved, since the start."""
        spill, files = self.spill, [file for _, file in self.spill.files]
        return {
            "fetches": spill.fetches,
            "fetch_hit_rate": spill.hits / max(1, spill.fetches),
            "stall_ms": spill.stall_ms,
            "fetched_nbytes": sum(file.read_nbytes for file in files),
            "evicted_nbytes": sum(file.written_nbytes for file in files),
        }

    def close(self) -> None:
        """Wait for what is in flight, and remove the files. What fails now is of no consequence, and logged."""
        try:
            self.spill.close()
        except OSError as error:
            rank_log.warning("while closing the nvme tier: %s", error)
        finally:
            self.scratch.close()


Tier = MemoryTier | NVMeTier
Fields = ResidentFields | FileFields
Grads = MemoryGrads | HostGrads | FileGrads


@dataclasses.dataclass(frozen=True, slots=True)
class Needs:
    """Bytes of one unit on one rank between uses."""

    param_nbytes: int  # parameters
    numel: int  # elements whose optimizer state this rank keeps; 0 for a frozen unit
    element_nbytes: int  # gradient, master and moments of one element
    copy_nbytes: int = 0  # and beyond that, of an element that is updated off the device while its parameter rests there
    is_whole: bool = False  # its state is on one tier
    packed_nbytes: int = 0  # of what is kept of whole parameters, on the rank that has the most

    @property
    def state_nbytes(self) -> int:
        """Bytes of all gradients, masters and moments."""
        return self.numel * self.element_nbytes + self.packed_nbytes


def readable(nbytes: int) -> str:
    """As a person would say it: "1.50 GiB", "20.00 MiB", "10 bytes"."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if nbytes >= size:
            return f"{nbytes / size:.2f} {unit}"
    return f"{nbytes} bytes"


def free_nbytes(device: torch.device) -> int:
    """Bytes that can still be allocated on ``device``: what is free, and on a GPU what torch's allocator keeps unused."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + int(unused)
    return host_memory()[1]


# sections of a unit's optimizer state begin on multiples of this many elements: a page in 16 bits
_SECTION = 2048


def rooms(config: ZeroConfig, device: torch.device, ranks: int = 1) -> dict[str, int]:
    """Bytes of training state that "auto" may put on the device and on the host. Free host memory is shared by ``ranks``."""
    if "auto" not in (config.param_tier, config.optimizer_tier):  # only budgets count
        return {"device": int(config.device_budget or 0), "host": int(config.host_budget or 0)}
    # what is left free on a device is for activations and gathered parameters
    share = 0.9 if device.type == "cpu" else 0.5
    free = free_nbytes(device) // (ranks if device.type == "cpu" else 1)
    most = {"device": (config.device_budget, share * free), "host": (config.host_budget, 0.9 * free_nbytes(torch.device("cpu")) / ranks)}
    return {name: int(nbytes if budget is None else budget) for name, (budget, nbytes) in most.items()}


def place(
    config: ZeroConfig,
    needs: Sequence[Needs],
    device: torch.device,
    buffer_nbytes: int | None,
    room: Mapping[str, int] | None = None,
) -> list[tuple[str, list[tuple[str, int]]]]:
    """For each unit, the tier of its parameters, and the tiers of its optimizer state with the elements on each, in order.

    "auto" fills the device up to its budget, then the host, then NVMe. What "nvme" is asked for stays in the host's memory as far as a
    host_budget is given. Parameters go first, unit by unit: they are used twice in every step, optimizer state once. That fills what is
    left to the element, so at most one unit is divided between two tiers.
    ``buffer_nbytes`` is what moving to and from NVMe takes of the host; None where there is no path for it. ``room``: as ``rooms`` gives it,
    which is asked where it is None.
    Raises ValueError if the state does not fit in the budgets, with what it needs and the remedy.
    """
    param_tier, optimizer_tier, host_budget = config.param_tier, config.optimizer_tier, config.host_budget
    assert not isinstance(host_budget, str)
    room = dict(room or rooms(config, device))
    needed = sum(
        (need.numel * need.copy_nbytes if param_tier == "device" else need.param_nbytes) + (optimizer_tier != "device") * need.state_nbytes
        for need in needs
    )
    if buffer_nbytes is not None and host_budget is not None and needed > host_budget:
        if buffer_nbytes > host_budget:
            raise ValueError(
                f"the nvme tier needs {readable(buffer_nbytes)} of host memory for its buffers, and host_budget is {readable(host_budget)}; "
                "raise it, use prefetch=0, or make units smaller (units=)"
            )
        room["host"] -= buffer_nbytes
    shared = device.type == "cpu" and config.device_budget is None  # the device is the host: what one takes the other has not
    used = {"device": 0, "host": 0, "nvme": 0}
    in_order = list(used)[: 2 if buffer_nbytes is None else 3]  # "auto" fills these

    def left(tier: str) -> int:
        return max(0, room[tier] - (used["device"] + used["host"] if shared else used[tier]))

    def order(wanted: str) -> list[str]:
        """The tiers to try; the last one takes what is left over."""
        return in_order if wanted == "auto" else ["host", "nvme"] if wanted == "nvme" and host_budget is not None else [wanted]

    def whole(nbytes: int) -> str:
        tiers = order(param_tier) if param_tier != "auto" or config.stage == 3 else ["device"]
        tier = next((tier for tier in tiers[:-1] if nbytes <= left(tier)), tiers[-1])
        used[tier] += nbytes
        return tier

    def divided(need: Needs, rests_on_drive: bool) -> list[tuple[str, int]]:
        parts: list[tuple[str, int]] = []
        rest, tiers = need.numel, order(optimizer_tier)
        if rests_on_drive and len(tiers) > 1:
            tiers = [tier for tier in tiers if tier != "device"]  # they are updated in host memory
        for tier in tiers:
            fits = rest if tier == tiers[-1] else min(rest, max(0, left(tier) - need.packed_nbytes) // need.element_nbytes)
            if fits < rest:  # what is on the drive is updated as it is moved, by whole chunks
                fits = 0 if rests_on_drive or need.is_whole else fits - fits % _SECTION
            if fits:
                parts.append((tier, fits))
                used[tier] += fits * need.element_nbytes + need.packed_nbytes  # (all of which is on one tier)
                rest -= fits
        return parts or [(tiers[0], 0)]

    params = [whole(need.param_nbytes) for need in needs]
    # copies of parameters that rest on the device are in the host's memory, whether the state beside them is there or on NVMe
    copied = [need for need, tier in zip(needs, params, strict=True) if tier == "device" and optimizer_tier != "device"]
    stay = left("device") if optimizer_tier == "auto" else 0
    for need in copied:
        staying = min(stay, need.state_nbytes) if not need.is_whole or stay >= need.state_nbytes else 0
        stay -= staying
        used["host"] += max(0, need.numel - staying // need.element_nbytes) * need.copy_nbytes
    states = [divided(need, tier == "nvme") for need, tier in zip(needs, params, strict=True)]
    moves = "optimizer_tier='host', or stage=3 with param_tier='host', moves it off the device"
    for name, remedy in (("device", moves), ("host", "more ranks, or 'nvme' tiers with nvme_path")):
        budget = getattr(config, f"{name}_budget")
        if budget is not None and used[name] > budget:
            raise ValueError(
                f"this rank's training state needs {readable(used[name])} on the {name} tier, and {name}_budget is "
                f"{readable(budget)}; raise the budget, or choose a higher stage ({remedy})"
            )
    return list(zip(params, states, strict=True))
