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

from tests.softgpu.cuda import Stream, StreamContext
from tests.softgpu.memory import block_of, current_queue, host_view, plainly, span
from tests.softgpu.streams import LOCK, Point, Queue, join, make_queue, race

_launched: dict[int, tuple[Queue, int]] = {}  # the stream of each communicator that is there, and the thread that launched last


class Work(dist._Work if hasattr(dist, "_Work") else dist.Work):  # type: ignore[misc]
    """A collective in flight."""

    def __init__(self, queue: Queue | None, device: int, reads: list[Tensor], writes: list[Tensor]) -> None:
        super().__init__()
        self.queue, self.point, self.device, self.tensors, self.stashed = queue, Point(), device, writes, reads  # what is read lives until the wait
        if queue is not None:
            self.point.record(queue)

    def wait(self, timeout: Any = None) -> bool:
        self.point.block(current_queue(self.device))
        self.stashed = []
        return True

    def is_completed(self) -> bool:
        return self.point.done()

    def get_future(self) -> Any:
        future: Any = torch.futures.Future(devices=[torch.device("cuda", self.device)])
        stream = Stream(stream_id=self.queue.handle, device_index=self.device) if self.queue is not None else None
        with StreamContext(stream):  # who waits for the future waits for what its streams have been asked to do
            future.set_result(self.tensors)
        return future


class _Options(types.SimpleNamespace):
    """ProcessGroupNCCL.Options."""

    _timeout = timedelta(minutes=10)


class ProcessGroupNCCL(dist.ProcessGroup):
    """torch.distributed.ProcessGroupNCCL, with the collectives that zk, DDP and exchanges of objects use."""

    Options = _Options
    supports_splitting = supports_coalescing = False
    bound_device_id: Any = None

    def __init__(self, store: dist.Store, rank: int, size: int, options: _Options) -> None:
        super().__init__(rank, size)
        self.options, self.store = options, store
        self.gloo = dist.ProcessGroupGloo(dist.PrefixStore("softgpu", store), rank, size, timeout=options._timeout)
        self.queues: dict[int, Queue] = {}

    def getBackendName(self) -> str:
        return "nccl"

    name = getBackendName

    @property
    def group_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]

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
            work = Work(queue, device, list(reads), list(writes))
            far = [host_view(tensor) for tensor in reads], [host_view(tensor) for tensor in writes]
        with torch.no_grad():
            run(*far)
        return work

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Any:
        return self._launch([], tensors, lambda _, far: self.gloo.broadcast([_bytes(tensor) for tensor in far], opts).wait())

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        op = dist.ReduceOp.SUM if opts is None else opts.reduceOp

        def run(_: list[Tensor], far: list[Tensor]) -> None:
            for tensor in far:
                rows = torch.empty(self.size(), tensor.numel(), dtype=tensor.dtype)
                self._gather(list(rows), tensor)
                tensor.copy_(_reduced(rows, op).view(tensor.shape))

        return self._launch([], tensors, run)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        return self._launch([input], [output], lambda reads, writes: self._gather(writes[0].view(-1).chunk(self.size()), reads[0]))

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        return self._launch(inputs, outputs[0], lambda reads, writes: self._gather(writes, reads[0]))

    def _gather(self, parts: Sequence[Tensor], mine: Tensor) -> None:
        parts[self.rank()].copy_(mine.view(parts[self.rank()].shape))
        for rank, part in enumerate(parts):
            options = dist.BroadcastOptions()
            options.rootRank = rank
            self.gloo.broadcast([_bytes(part)], options).wait()

    def all_to_all_single(self, output: Tensor, input: Tensor, output_splits: list[int], input_splits: list[int], opts: Any = None) -> Any:
        return self._launch([input], [output], lambda reads, writes: self._exchange(writes[0], reads[0]))

    def _exchange(self, theirs: Tensor, mine: Tensor) -> None:
        self.gloo.alltoall_base(_bytes(theirs), _bytes(mine), [], [], dist.AllToAllOptions()).wait()

    def barrier(self, opts: Any = None) -> Any:
        self.gloo.barrier(opts or dist.BarrierOptions()).wait()
        return Work(None, torch.cuda.current_device(), [], [])

    _allgather_base, alltoall_base = all_gather_single, all_to_all_single  # until torch 2.13


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


def _reduced(rows: Tensor, op: Any) -> Tensor:
    """One row from one of each rank, in the order of ranks; 16 bits are summed in fp32 and rounded once."""
    if not (op == dist.ReduceOp.SUM or op == dist.ReduceOp.AVG):  # (``in`` compares the other way round, and says no)
        raise NotImplementedError(f"the software GPU's NCCL does not do {op}")
    exact = rows.float() if rows.is_floating_point() and rows.itemsize < 4 else rows
    total = exact[0].clone()
    for row in exact[1:]:
        total += row
    return (total / len(rows) if op == dist.ReduceOp.AVG else total).to(rows.dtype)


def install() -> None:
    """Make torch.distributed find NCCL."""
    c10d: Any = dist.distributed_c10d
    c10d.ProcessGroupNCCL = ProcessGroupNCCL
    c10d._NCCL_AVAILABLE = True
    c10d.default_pg_nccl_timeout = timedelta(minutes=10)
    torch.cuda.nccl.version = lambda: (2, 27, 0)
    dist.Logger.set_runtime_stats_and_log = lambda self: None  # type: ignore[attr-defined,method-assign] # of DDP, with timers of C++
    dist.ProcessGroupNCCL = ProcessGroupNCCL  # type: ignore[attr-defined]
