"""What crosses the link between a GPU and the host, and the host memory that is page-locked for it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from unittest import mock

from torch import Tensor

from zk.core.events import Event
from zk.offload.streams import CudaLink


class Crossing:
    """Bytes that copies were asked to move, and what is page-locked: address -> bytes."""

    def __init__(self) -> None:
        self.offloaded_nbytes = self.uploaded_nbytes = 0
        self.pinned: dict[int, int] = {}


@contextlib.contextmanager
def counted() -> Iterator[Crossing]:
    """Context: all links count what crosses them from here on."""
    crossing, offload, upload, pin, unpin = Crossing(), CudaLink.offload, CudaLink.upload, CudaLink.pin, CudaLink.unpin

    def counted_offload(self: CudaLink, host: Tensor, source: Tensor, after: Sequence[Event]) -> Event:
        crossing.offloaded_nbytes += source.nbytes
        return offload(self, host, source, after)

    def counted_upload(self: CudaLink, target: Tensor, host: Tensor, after: Sequence[Event]) -> Event:
        crossing.uploaded_nbytes += host.nbytes
        return upload(self, target, host, after)

    def counted_pin(self: CudaLink, memory: Tensor) -> None:
        pin(self, memory)
        crossing.pinned[memory.data_ptr()] = memory.nbytes

    def counted_unpin(self: CudaLink, memory: Tensor) -> None:
        unpin(self, memory)
        crossing.pinned.pop(memory.data_ptr(), None)

    with mock.patch.multiple(CudaLink, offload=counted_offload, upload=counted_upload, pin=counted_pin, unpin=counted_unpin):
        yield crossing
