"""NCCL on the pretended devices: gloo carries the bytes; device tensors only, and each group computes on a stream of its own.

A collective comes after what the current stream had been asked to do, and ``wait()`` makes the current stream (not the host) wait for it.
Kernels of two communicators may block each other for good where ranks launch them in different orders. One thread launches in one order; so
what two threads have in flight at once on two communicators of a device is reported.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.softgpu.cuda import Stream, StreamContext
from tests.softgpu.memory import block_of, current_queue, host_view, plainly, span
from tests.softgpu.streams import LOCK, Point, Queue, join, make_queue, race, stats, tell

_launched: dict[int, tuple[Queue, int]] = {}  # the stream of each communicator that is there, and the thread that launched last


class Work(dist._Work if hasattr(dist, "_Work") else dist.Work):  # type: ignore[misc]
    """A collective in flight."""

    def __init__(self, queue: Queue | None, device: int, result: list[Tensor]) -> None:
        super().__init__()
        self.queue, self.point, self.device, self.tensors = queue, Point(), device, result
        self.stashed: list[Tensor] = []  # what is read lives until it is waited for
        self.receives: list[tuple[Any, Tensor, Tensor]] = []  # what gloo brings, into which memory, and where it belongs
        if queue is not None:
            self.point.record(queue)

    def wait(self, timeout: Any = None) -> bool:
        while self.receives:
            arrival, received, into = self.receives.pop(0)
            arrival.wait()
            into.copy_(received)
        self.point.block(current_queue(self.device))
        self.stashed.clear()
        return True

    def is_completed(self) -> bool:
        return self.point.done()

    def is_success(self) -> bool:
        return True

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> list[Tensor]:
        return self.tensors

    def get_future(self) -> Any:
        future: Any = torch.futures.Future(devices=[torch.device("cuda", self.device)])
        stream = Stream(stream_id=self.queue.handle, device_index=self.device) if self.queue is not None else None
        with StreamContext(stream):  # who waits for the future waits for what its streams have been asked to do
            future.set_result(self.tensors)
        return future


class _Options:
    """ProcessGroupNCCL.Options."""

    is_high_priority_stream = False
    _timeout = timedelta(minutes=10)
    split_from: Any = None
    split_color = 0
    global_ranks_in_group: list[int] = []  # noqa: RUF012
    group_name = ""


class ProcessGroupNCCL(dist.ProcessGroup):
    """torch.distributed.ProcessGroupNCCL."""

    Options = _Options

    def __init__(self, store: dist.Store, rank: int, size: int, options: _Options) -> None:
        super().__init__(rank, size)
        self.options, self.store = options, store
        self.gloo = dist.ProcessGroupGloo(dist.PrefixStore("softgpu", store), rank, size, timeout=options._timeout)
        self.queues: dict[int, Queue] = {}
        self.sent: list[tuple[Any, Tensor]] = []  # and not yet received, with their memory
        caller = sys._getframe(1)
        while caller is not None and "backend_config" not in caller.f_locals:
            caller = caller.f_back  # type: ignore[assignment]
        # a group for both kinds of tensors ("cpu:gloo,cuda:nccl") is one group here, that knows of both
        self.takes_host = caller is not None and "cpu" in caller.f_locals["backend_config"].get_device_backend_map()

    def __reduce__(self) -> Any:
        raise TypeError("a process group cannot be pickled")

    # ---- what torch asks of a group -------------------------------------------------------------------------------------------

    def getBackendName(self) -> str:
        return "nccl"

    def name(self) -> str:
        return "nccl"

    @property
    def group_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]

    def _set_sequence_number_for_group(self) -> None:
        return

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu"), torch.device("cuda")] if self.takes_host else [torch.device("cuda")]

    def _get_backend(self, device: torch.device) -> Any:
        return self.gloo if device.type == "cpu" and self.takes_host else self

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self.options._timeout = timeout

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cuda")] + [torch.device("cpu")] * self.takes_host

    @property
    def supports_splitting(self) -> bool:
        return False

    @property
    def supports_coalescing(self) -> bool:
        return False

    @property
    def bound_device_id(self) -> torch.device | None:
        return None

    @bound_device_id.setter
    def bound_device_id(self, device: torch.device | None) -> None:
        return

    def eager_connect_single_device(self, device: Any) -> None:
        return

    def abort(self) -> None:
        self.shutdown()

    def shutdown(self) -> None:
        for queue in self.queues.values():
            _launched.pop(queue.serial, None)
        self.queues.clear()

    # ---- collectives ----------------------------------------------------------------------------------------------------------

    def _launch(self, reads: Sequence[Tensor], writes: Sequence[Tensor], run: Callable[[list[Tensor], list[Tensor]], None]) -> Any:
        every = [*reads, *writes]
        for tensor in every:
            if not tensor.is_cuda:
                race("a host tensor is given to NCCL")
                raise RuntimeError(f"No backend type associated with device type {tensor.device.type}")
            if not tensor.is_contiguous():
                raise ValueError("Tensors must be contiguous")
        device = every[0].get_device()
        if any(tensor.get_device() != device for tensor in every):
            raise ValueError("Tensors must be on the same device")
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
            stats["collectives"] += 1
            for tensor in reads:
                if tensor.numel():
                    block_of(tensor).use(queue, *span(tensor), False, "a collective")
            for tensor in writes:
                if tensor.numel():
                    block_of(tensor).use(queue, *span(tensor), True, "a collective")
            work = Work(queue, device, list(writes))
            work.stashed = list(reads)
            far = [host_view(tensor) for tensor in reads], [host_view(tensor) for tensor in writes]
        begin = time.time_ns()
        with torch.no_grad():
            run(*far)
        tell("kernel", "ncclDevKernel", queue, begin)
        return work

    def _is_hosts(self, tensors: Sequence[Tensor]) -> bool:
        return self.takes_host and not tensors[0].is_cuda

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Any:
        if self._is_hosts(tensors):
            return self.gloo.broadcast(tensors, opts)
        return self._launch([], tensors, lambda _, far: self._wait(self.gloo.broadcast([t.view(torch.uint8).view(-1) for t in _whole(far)], opts)))

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        opts = opts or dist.AllreduceOptions()
        if self._is_hosts(tensors):
            return self.gloo.allreduce(tensors, opts)
        return self._launch([], tensors, lambda _, far: self._reduce_all(far, opts.reduceOp))

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any) -> Any:
        return self.allreduce(tensors, opts)

    def _reduce_all(self, tensors: list[Tensor], op: Any) -> None:
        for tensor in tensors:
            rows = self._rows(tensor.reshape(1, -1).expand(self.size(), -1).contiguous())
            tensor.copy_(_reduced(rows, op).view(tensor.shape))

    def reduce(self, tensors: list[Tensor], opts: Any) -> Any:
        return self._launch([], tensors, lambda _, far: self._reduce_all(far, opts.reduceOp))

    def _allgather_base(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        if self._is_hosts([input]):
            return self.gloo._allgather_base(output, input)
        if output.dtype != input.dtype:
            raise TypeError("output tensor must have the same type as input tensor")
        return self._launch([input], [output], lambda reads, writes: self._gather(writes[0].view(-1).chunk(self.size()), reads[0]))

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        if self._is_hosts(inputs):
            return self.gloo.allgather(outputs, inputs)
        return self._launch(inputs, outputs[0], lambda reads, writes: self._gather(writes, reads[0]))

    def allgather_into_tensor_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        works = [self._allgather_base(output, input) for output, input in zip(outputs, inputs, strict=True)]
        return works[-1]

    def _gather(self, parts: Sequence[Tensor], mine: Tensor) -> None:
        parts[self.rank()].copy_(mine.view(parts[self.rank()].shape))
        for rank, part in enumerate(parts):
            options = dist.BroadcastOptions()
            options.rootRank = rank
            self._wait(self.gloo.broadcast([part.view(-1).view(torch.uint8)], options))

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> Any:
        if self._is_hosts(inputs):
            return self.gloo.gather(outputs, inputs, opts)
        writes = outputs[0] if self.rank() == opts.rootRank else []

        def run(reads: list[Tensor], parts: list[Tensor]) -> None:
            mine = [tensor.view(-1).view(torch.uint8) for tensor in reads]
            self._wait(self.gloo.gather([[part.view(-1).view(torch.uint8) for part in parts]] if parts else [], mine, opts))

        return self._launch(inputs, writes, run)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> Any:
        if self._is_hosts(outputs):
            return self.gloo.scatter(outputs, inputs, opts)
        reads = inputs[0] if self.rank() == opts.rootRank else []

        def run(parts: list[Tensor], writes: list[Tensor]) -> None:
            mine = [tensor.view(-1).view(torch.uint8) for tensor in writes]
            self._wait(self.gloo.scatter(mine, [[part.view(-1).view(torch.uint8) for part in parts]] if parts else [], opts))

        return self._launch(reads, outputs, run)

    def _reduce_scatter_base(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        op = opts.reduceOp if opts is not None else dist.ReduceOp.SUM
        if self._is_hosts([input]):
            return self.gloo._reduce_scatter_base(output, input, opts)
        if output.dtype != input.dtype:
            raise TypeError("input tensor must be the same type as the output tensor.")

        def run(reads: list[Tensor], writes: list[Tensor]) -> None:
            rows = self._rows(reads[0].reshape(self.size(), -1))
            writes[0].copy_(_reduced(rows, op).view(writes[0].shape))

        return self._launch([input], [output], run)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> Any:
        def run(reads: list[Tensor], writes: list[Tensor]) -> None:
            rows = self._rows(torch.stack([read.reshape(-1) for read in reads]))
            writes[0].copy_(_reduced(rows, opts.reduceOp).view(writes[0].shape))

        return self._launch(inputs[0], outputs, run)

    def reduce_scatter_tensor_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> Any:
        works = [self._reduce_scatter_base(output, input, opts) for output, input in zip(outputs, inputs, strict=True)]
        return works[-1]

    def alltoall_base(self, output: Tensor, input: Tensor, output_splits: list[int], input_splits: list[int], opts: Any = None) -> Any:
        if self._is_hosts([input]):
            return self.gloo.alltoall_base(output, input, output_splits, input_splits, opts or dist.AllToAllOptions())

        def run(reads: list[Tensor], writes: list[Tensor]) -> None:
            scale = reads[0].itemsize * (reads[0][:1].numel() if reads[0].dim() > 1 else 1)
            splits = [[count * scale for count in counts] for counts in (output_splits, input_splits)]
            far = writes[0].view(-1).view(torch.uint8), reads[0].reshape(-1).view(torch.uint8)
            self._wait(self.gloo.alltoall_base(*far, *splits, dist.AllToAllOptions()))

        return self._launch([input], [output], run)

    def _rows(self, mine: Tensor) -> Tensor:
        """(world, n): row i of each rank's ``mine`` to rank i."""
        received = torch.empty_like(mine)
        options = dist.AllToAllOptions()
        self._wait(self.gloo.alltoall_base(received.view(-1).view(torch.uint8), mine.contiguous().view(-1).view(torch.uint8), [], [], options))
        return received

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
        """Leaves at once with a copy, as ranks that send to each other in one batch wait for no order."""
        if self._is_hosts(tensors):
            return self.gloo.send(tensors, peer, tag)

        def run(far: list[Tensor], _: list[Tensor]) -> None:
            self.sent = [one for one in self.sent if not one[0].is_completed()]
            for tensor in far:
                copy = tensor.view(-1).view(torch.uint8).clone()
                self.sent.append((self.gloo.send([copy], peer, tag), copy))

        return self._launch(tensors, [], run)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
        """What comes is there when it is waited for."""
        if self._is_hosts(tensors):
            return self.gloo.recv(tensors, peer, tag)
        pending: list[tuple[Any, Tensor, Tensor]] = []

        def run(_: list[Tensor], far: list[Tensor]) -> None:
            for tensor in far:
                into = torch.empty_like(tensor.view(-1).view(torch.uint8))
                pending.append((self.gloo.recv([into], peer, tag), into, tensor.view(-1).view(torch.uint8)))

        work = self._launch([], tensors, run)
        work.receives = pending
        return work

    def barrier(self, opts: Any = None) -> Any:
        self._wait(self.gloo.barrier(opts or dist.BarrierOptions()))
        return Work(None, torch.cuda.current_device(), [])

    # what torch 2.13 calls them
    all_gather_single, all_gather_single_coalesced = _allgather_base, allgather_into_tensor_coalesced
    reduce_scatter_single, reduce_scatter_single_coalesced = _reduce_scatter_base, reduce_scatter_tensor_coalesced
    all_to_all_single = alltoall_base

    @staticmethod
    def _wait(work: Any) -> None:
        work.wait()


def _whole(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.view(-1) for tensor in tensors]


def _reduced(rows: Tensor, op: Any) -> Tensor:
    """One row from one of each rank, in the order of ranks; 16 bits are summed in fp32 and rounded once."""
    exact = rows.float() if rows.is_floating_point() and rows.itemsize < 4 else rows
    if op == dist.ReduceOp.MAX:
        return exact.amax(0).to(rows.dtype)
    if op == dist.ReduceOp.MIN:
        return exact.amin(0).to(rows.dtype)
    if op == dist.ReduceOp.PRODUCT:
        return exact.prod(0).to(rows.dtype)
    if not (op == dist.ReduceOp.SUM or op == dist.ReduceOp.AVG):  # (``in`` compares the other way round, and says no)
        raise NotImplementedError(f"the software GPU's NCCL does not do {op}")
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
