"""NCCL on the pretended devices: gloo carries the bytes; device tensors only, and each group computes on a stream of its own.

A collective comes after what the current stream had been asked to do, and ``wait()`` makes the current stream (not the host) wait for it.
Kernels of two communicators may block each other for good where ranks launch them in different orders. One thread launches in one order; so
what two threads have in flight at once on two communicators of a device is reported.
"""

from __future__ import annotations

import threading
import types
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.softgpu.memory import block_of, current_queue, host_view, plainly, span
from tests.softgpu.streams import LOCK, Point, Queue, join, make_queue, race

_launched: dict[int, tuple[Queue, int]] = {}  # the stream of each communicator that is there, and the thread that launched last


class Work(dist._Work if hasattr(dist, "_Work") else dist.Work):  # type: ignore[misc]
    """A collective in flight."""

    def __init__(self, queue: Queue | None, device: int, reads: Sequence[Tensor]) -> None:
        super().__init__()
        self.point, self.device, self.stashed = Point(), device, reads  # what is read lives until the wait
        if queue is not None:
            self.point.record(queue)

    def wait(self, timeout: Any = None) -> bool:
        self.point.block(current_queue(self.device))
        self.stashed = ()
        return True


class _Options(types.SimpleNamespace):
    """ProcessGroupNCCL.Options."""

    _timeout = timedelta(minutes=10)


class ProcessGroupNCCL(dist.ProcessGroup):
    """torch.distributed.ProcessGroupNCCL, with the collectives that zk and exchanges of objects use."""

    Options = _Options
    supports_splitting = supports_coalescing = False
    bound_device_id: Any = None

    def __init__(self, store: dist.Store, rank: int, size: int, options: _Options) -> None:
        super().__init__(rank, size)
        self.options, self.store = options, store
        self.gloo = dist.ProcessGroupGloo(dist.PrefixStore("softgpu", store), rank, size, timeout=options._timeout)
        self.queues: dict[int, Queue] = {}

    def _set_sequence_number_for_group(self) -> None:
        return

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cuda")]

    def _get_backend(self, device: torch.device) -> Any:
        return self

    def shutdown(self) -> None:
        for queue in self.queues.values():
            _launched.pop(queue.serial, None)
        self.queues.clear()

    abort = shutdown

    def _launch(self, reads: Sequence[Tensor], writes: Sequence[Tensor], run: Callable[[list[Tensor], list[Tensor]], Any]) -> Any:
        every = [*reads, *writes]
        device = every[0].get_device()
        for tensor in every:
            if not tensor.is_cuda:
                race("a host tensor is given to NCCL")
                raise RuntimeError(f"No backend type associated with device type {tensor.device.type}")
            if not tensor.is_contiguous() or tensor.get_device() != device:
                raise ValueError("Tensors must be contiguous, and on one device")
        with LOCK, plainly(), torch.no_grad():
            queue = self.queues.get(device)
            if queue is None:
                queue = self.queues[device] = make_queue(device)
                _launched[queue.serial] = queue, 0
            join(queue.clock, current_queue(device).clock)
            queue.issue()
            # who calls backward() waits for the threads that it runs in
            thread = threading.get_ident() if torch._C._current_graph_task_id() == -1 else threading.main_thread().ident
            for other, launcher in _launched.values():
                if other.device == device and launcher not in (0, thread) and queue.clock.get(other.serial, 0) < other.count:
                    race("collectives of two communicators are in flight at once, launched by two threads: ranks may launch them in different orders")
            _launched[queue.serial] = queue, thread
            for index, tensor in enumerate(every):
                if tensor.numel():
                    block_of(tensor).use(queue, *span(tensor), index >= len(reads), "a collective")
            work = Work(queue, device, reads)
            far = [host_view(tensor) for tensor in reads], [host_view(tensor) for tensor in writes]
        with torch.no_grad():
            run(*far)
        return work

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Any:
        return self._launch([], tensors, lambda _, far: self.gloo.broadcast([_bytes(tensor) for tensor in far], opts).wait())

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        return self._launch([], tensors, lambda _, far: self.gloo.allreduce(far, opts or dist.AllreduceOptions()).wait())

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        return self._launch([input], [output], lambda reads, writes: self._gather(writes[0].view(-1).chunk(self.size()), reads[0]))

    def _gather(self, parts: Sequence[Tensor], mine: Tensor) -> None:
        parts[self.rank()].copy_(mine.view(parts[self.rank()].shape))
        for rank, part in enumerate(parts):
            options = dist.BroadcastOptions()
            options.rootRank = rank
            self.gloo.broadcast([_bytes(part)], options).wait()

    def all_to_all_single(self, output: Tensor, input: Tensor, output_splits: list[int], input_splits: list[int], opts: Any = None) -> Any:
        options, exchange = dist.AllToAllOptions(), self.gloo.alltoall_base
        return self._launch([input], [output], lambda reads, writes: exchange(_bytes(writes[0]), _bytes(reads[0]), [], [], options).wait())

    def barrier(self, opts: Any = None) -> Any:
        self.gloo.barrier(opts or dist.BarrierOptions()).wait()
        return Work(None, torch.cuda.current_device(), ())


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


def install() -> None:
    """Make torch.distributed find NCCL."""
    c10d: Any = dist.distributed_c10d
    c10d.ProcessGroupNCCL = ProcessGroupNCCL
    c10d._NCCL_AVAILABLE = True
    c10d.default_pg_nccl_timeout = timedelta(minutes=10)
    torch.cuda.nccl.version = lambda: (2, 27, 0)
    dist.ProcessGroupNCCL = ProcessGroupNCCL  # type: ignore[attr-defined]
