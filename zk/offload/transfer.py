"""Offload and upload, in large pieces, both at once: gradients go down to the host, parameters come up to the device.

Source: ZeRO-Offload, arXiv 2101.06840, section 4: 16-bit gradients go down and 16-bit parameters come up, 2 bytes each per parameter.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from zk.core.events import COMPLETED, Event
from zk.core.timeline import phase
from zk.offload.pinned import Arena, Record
from zk.offload.streams import Link

# elements of one piece: 16 MiB in 16 bits, large enough for the full speed of a link, small enough that the update soon has its first
PIECE_NUMEL = 1 << 23


def evenly(start: int, stop: int, most: int, multiple: int, uncut: Sequence[slice] = ()) -> list[slice]:
    """Elements ``start`` to ``stop`` in slices of about one size, a ``multiple``, and at most about ``most``, but for what is ``uncut``."""
    numel = stop - start
    size = -(-numel // max(1, -(-numel // most)))
    size = -(-size // multiple) * multiple or multiple
    bounds = set(range(start, stop, size))
    for part in uncut:
        inside = {bound for bound in bounds if part.start < bound < part.stop}
        bounds = bounds - inside | {part.start if bound - part.start < part.stop - bound else min(part.stop, stop) for bound in inside}
    return [slice(*pair) for pair in itertools.pairwise(sorted({*bounds, stop}))]


def pieces_of(start: int, stop: int, uncut: Sequence[slice] = ()) -> list[slice]:
    """Elements ``start`` to ``stop`` in even pieces of at most about PIECE_NUMEL, whole cache lines each."""
    return evenly(start, stop, PIECE_NUMEL, 64, uncut) or [slice(start, start)]


@dataclasses.dataclass(slots=True)
class Arrival:
    """A tensor on its way into host memory, and its events, piece by piece."""

    record: Record
    pieces: Sequence[slice]
    events: list[Event]

    def piece(self, index: int) -> Tensor:
        """Piece ``index``, once it is there."""
        if not self.events[index].done:
            with phase("wait", "link: a gradient"):
                self.events[index].wait()
        return self.record.tensor[self.pieces[index]]

    def whole(self) -> Tensor:
        """All of it, once it is there."""
        self.events[-1].wait()
        return self.record.tensor

    def drop(self, reader: Event = COMPLETED) -> None:
        """It is not needed any more, once ``reader`` is done, a copy of it."""
        if not reader.done:
            self.events[-1].wait()
        self.record.release(self.events[-1] if reader.done else reader)


class Transfer:
    """Copies between one device and the host for one optimizer.

    Args:
        link: to the device.
        arena: host memory that copies run to and from; None where both memories are the same.
        overlap: False waits for every copy where it is asked for.
        counts: counts the bytes; None: this one does.
    """

    def __init__(self, link: Link, arena: Arena | None, overlap: bool, counts: Transfer | None = None) -> None:
        self.link, self.arena, self.overlap, self.counts = link, arena, overlap, counts or self
        self.uploaded_nbytes = self.offloaded_nbytes = 0  # since the start
        self.joined, self.mark, self.follow = link.joined, link.mark, link.follow

    def memory(self, numel: int, dtype: torch.dtype) -> Tensor:
        """(numel,) of host memory for as long as the optimizer lives, zero."""
        assert self.arena is not None
        return self.arena.acquire(numel, dtype, lasting=True).tensor.zero_()

    def room(self, numel: int, dtype: torch.dtype) -> Record:
        """(numel,) of host memory until it is released, of any value."""
        assert self.arena is not None
        return self.arena.acquire(numel, dtype)

    def offload(self, source: Tensor, pieces: Sequence[slice]) -> Arrival:
        """Start to bring ``source`` (numel,) to host memory of its own. ``source`` may be used again after the last event."""
        record = self.room(source.numel(), source.dtype)
        return Arrival(record, pieces, [self.offload_to(record.tensor[piece], source[piece]) for piece in pieces])

    def offload_to(self, host: Tensor, source: Tensor, mark: Event | None = None) -> Event:
        """Start to copy ``source`` to ``host``; after ``mark``, or after what compute has been asked to do so far."""
        self.counts.offloaded_nbytes += source.nbytes
        with phase("offload", f"{source.nbytes >> 10} KiB"):
            return self._started(self.link.offload(host, source, [mark or self.link.mark()]))

    def upload(self, target: Tensor, host: Tensor, mark: Event | None = None, *others: Event) -> Event:
        """Start to copy ``host`` to ``target``; after ``mark``, or after what compute has been asked to do so far, and after ``others``."""
        self.counts.uploaded_nbytes += host.nbytes
        with phase("upload", f"{host.nbytes >> 10} KiB"):
            return self._started(self.link.upload(target, host, [mark or self.link.mark(), *others]))

    def _started(self, event: Event) -> Event:
        if not self.overlap:
            event.wait()
        return event

    def beside(self, mark: Event | None = None, *others: Event) -> AbstractContextManager[Callable[[], Event]]:
        """Start collectives after all uploads so far, as for ``upload``. Yields as for Link."""
        return self.link.beside([mark or self.link.mark(), *others])

    @property
    def nbytes(self) -> int:
        """Page-locked host memory taken."""
        return self.arena.nbytes if self.arena is not None else 0

    def close(self) -> None:
        """Give page-locked memory back, once what is in flight is over."""
        if self.arena is not None:
            self.arena.close()
