"""Update on the device of optimizer state that rests in host memory, or on a drive: it streams through the device, block by block.

    host -> buffer     upload, once the block that was there has left
    buffer             update, once the block is there
    buffer -> host     offload, once it is updated

Of three buffers one is filled, one updated and one emptied at a time, so the link is busy both ways. Copies and updates have streams of their own:
they queue behind no gradient and no gather, and the host asks for them ahead. A bf16 parameter that rests on the device takes 12 bytes up (2 of its
gradient, 10 of split master and fp32 moments) and 10 down, where an update by host threads takes 2 up. Arithmetic is the device kernel's
(zk/kernels/adam.py), whose bits are the host's. Source: ZeRO-Infinity, arXiv 2104.07857, section 5.2, which streams state from NVMe through the
host's memory; here the device is the next tier.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from zk.core.events import COMPLETED, Event
from zk.offload.transfer import Transfer, evenly

# elements of one block: large enough that asking for its copies takes the host less time than they do
BLOCK_NUMEL = 1 << 22
BUFFERS = 3
_ALIGN = 512  # bytes, of each field in a buffer, as torch's allocator aligns


def buffer_nbytes(numel: int, element_nbytes: int) -> int:
    """Bytes of all buffers, for sections of ``numel`` elements at most with so many bytes each, the gradient's not counted."""
    most = min(BLOCK_NUMEL, numel)
    return BUFFERS * (most * (element_nbytes + torch.float32.itemsize) + 8 * _ALIGN)  # a gradient that is added up is fp32


@dataclasses.dataclass(slots=True)
class _Buffer:
    memory: Tensor  # (nbytes,) uint8, device
    left: Event = COMPLETED  # its last block has

    def rooms(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Room for each of ``tensors``."""
        rooms, start = {}, 0
        for name, tensor in tensors.items():
            rooms[name] = self.memory[start : start + tensor.nbytes].view(tensor.dtype)
            start += -(-tensor.nbytes // _ALIGN) * _ALIGN
        return rooms


@dataclasses.dataclass(frozen=True, slots=True)
class Streamed:
    """The update of consecutive elements, in flight."""

    read: Event  # host memory has been read
    ready: Event  # what is on the device is updated
    written: Event  # and so is what is in host memory


class Stream:
    """Buffers on one device, and streams on which blocks go through them. May be used from several threads.

    Args:
        transfer: between the device and the host, the optimizer's.
    """

    def __init__(self, transfer: Transfer) -> None:
        self.transfer = Transfer(transfer.link.twin(), None, transfer.overlap, transfer)
        self.stream = torch.cuda.Stream(self.transfer.link.device)  # of updates
        self.buffers: list[_Buffer] = []
        self.turn = self.nbytes = 0
        self.lock = threading.Lock()

    def reserve(self, nbytes: int) -> None:
        """Have buffers of so many bytes in all, as ``buffer_nbytes`` counts them."""
        if nbytes > self.nbytes:
            self.synchronize()
            self.nbytes = nbytes
            self.buffers = [_Buffer(torch.empty(nbytes // BUFFERS, dtype=torch.uint8, device=self.transfer.link.device)) for _ in range(BUFFERS)]

    def synchronize(self) -> None:
        """Return when all that was asked for is in host memory. What is on the device is there for whoever follows its event."""
        for buffer in self.buffers:
            buffer.left.wait()

    def update(
        self, now: Mapping[str, Tensor], then: Mapping[str, Tensor], grad: Tensor, change: Callable[[dict[str, Tensor], slice], None], after: Event
    ) -> Streamed:
        """Start to make ``then`` of ``now``, which may be the same tensors (n,), in host or device memory; after ``after``.

        Args:
            grad: (n,) host.
            change: updates the fields of a block, "grad" among them, on the device: called with them, and with the elements that they are.
        """
        read: Event = COMPLETED
        ready: Event = COMPLETED
        written: Event = COMPLETED
        with self.lock, torch.cuda.stream(self.stream):
            for block in evenly(0, len(grad), BLOCK_NUMEL, 64):
                buffer = self.buffers[self.turn]
                self.turn = (self.turn + 1) % BUFFERS
                source, target = ({name: field[block] for name, field in fields.items()} for fields in (now, then))
                source["grad"] = grad[block]
                resting = {name: field for name, field in target.items() if field.is_cuda}
                here = {**buffer.rooms({name: field for name, field in source.items() if name not in resting}), **resting}
                for name, field in source.items():
                    if not field.is_cuda:
                        read = self.transfer.upload(here[name], field, buffer.left, after)
                self.transfer.follow(read)  # the last of them, on one stream; they have followed ``after``, and what has left the buffer
                for name, field in source.items():
                    if field.is_cuda and field.data_ptr() != here[name].data_ptr():
                        here[name].copy_(field)
                change(here, block)
                ready = self.transfer.mark()
                for name, field in target.items():
                    if name not in resting:
                        buffer.left = written = self.transfer.offload_to(field, here[name], ready)
        return Streamed(read, ready, written)

    def copy(self, there: Tensor, updated: Tensor, after: Event) -> Event:
        """Start to copy ``updated`` parameters, in host or device memory, to where they rest on the device."""
        with self.lock, torch.cuda.stream(self.stream):
            if updated.is_cuda:
                self.transfer.follow(after)
                there.copy_(updated)
            else:
                self.transfer.follow(self.transfer.upload(there, updated, after))
            return self.transfer.mark()


def best_share(rates: Mapping[str, float], state_nbytes: int, size: int, is_near: bool) -> float:
    """The share of elements for which the update takes least, where both sides work at once; the smallest of them.

    Args:
        rates: "cpu", elements/s that host threads update; "up" and "down", bytes/s of the link; "memory", bytes/s of the host's.
        state_nbytes, size: bytes of an element's master and moments, and of its parameter or gradient.
        is_near: parameters rest on the device.
    """
    there = 0 if is_near else size  # parameters that travel along
    shares = (step / 32 for step in range(33))
    return min(shares, key=lambda share: max(update_seconds(share, rates, state_nbytes + there, state_nbytes, size, (1 - share) * (size - there))))


def update_seconds(
    share: float, rates: Mapping[str, float], back: int, state_nbytes: int, size: int, returned: float, wide: int = 1
) -> tuple[float, float, float]:
    """Seconds by element of an update of which the device does ``share``: of the host's threads and memory, and of the link up and down.

    Args:
        rates, state_nbytes, size: as for ``best_share``.
        back: bytes of an element that streams through the device which return, to host memory.
        returned: bytes of updated parameters that go up, by element of the whole update.
        wide: bytes of a gradient's element over those of the parameter's.
    """
    touched = 2 * state_nbytes + 3 * size  # of host memory, by the update there
    both = share * (2 * back + size) + (1 - share) * touched
    host = max((1 - share) / rates["cpu"], both / max(rates["memory"], rates["cpu"] * touched))
    return host, (share * (back + size * wide) + returned) / rates["up"], share * back / rates["down"]
