"""Gradients on their way from backward to each unit's reduced slice: grad -> flatten -> reduce.

A gradient leaves ``param.grad`` as soon as autograd has it. When those of a unit are complete, one launch moves them into the unit's flat
bucket, in their own 16 bits (in host memory each one moves at once, while the cache has it); a second one of the same parameter before the
next step is added in fp32. Then the bucket is reduced over ranks
while backward goes on. Reductions are started in one order on all ranks, that of the first backward on the first rank, so an order that
differs costs overlap, not correctness. On a device both kernels measure what they write, so that the norm need not read it again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Collection, Iterator

import torch
from torch import Tensor, nn

from zk.events import COMPLETED, Awaited, Event
from zk.hooks import weakly
from zk.kernels.reference import unchecked
from zk.memory import zeros
from zk.parallel.comm import STATE, Group, Solo
from zk.parallel.layout import Layout
from zk.parallel.released import ask_elsewhere, grad_is_away, grad_left, own_grad
from zk.units import Unit

# reductions in flight at once: one being summed while the next one's bytes travel
_IN_FLIGHT = 2


@dataclasses.dataclass(slots=True)
class UnitGrads:
    """Gradients of one trained unit on their way out."""

    unit: Unit
    index: int  # the unit's number, the same on all ranks
    layout: Layout
    # takes a reduced gradient (held,) and its ``stats``: None if it keeps the tensor itself, else what to come after before that is used again
    sink: Callable[[Tensor, Tensor | None], Event | None]
    waiting: dict[int, Tensor] = dataclasses.field(default_factory=dict)  # gradients of parameters, which go into the bucket together
    bucket: Tensor | None = None  # (layout.numel,) this rank's gradients, not yet reduced; anything where there is none
    stats: Tensor | None = None  # (2,) fp64, of what is in the bucket, as for ``zk.kernels.flatten``; None where they are not known
    present: set[int] = dataclasses.field(default_factory=set)  # parameters in the bucket
    accumulated: bool = False  # some parameter is in the bucket more than once
    wide: bool = False  # the step before accumulated: start with an fp32 bucket
    arrived: set[int] = dataclasses.field(default_factory=set)  # parameters seen in this backward
    expected: int = 0  # parameters that can be seen in it
    used: set[int] = dataclasses.field(default_factory=set)  # parameters seen since the last step
    kept: set[int] = dataclasses.field(default_factory=set)  # parameters whose gradient is still in its own place, as backward made it


def stats_on(device: torch.device) -> Tensor | None:
    """Room for what kernels measure on their way; None in host memory, where the threads of the update do that faster."""
    return None if device.type == "cpu" else torch.zeros(2, dtype=torch.float64, device=device)


class GradReducer:
    """Hooks on every trained parameter.

    Args:
        comm: the ranks.
        in_backward: reduce each unit when it is complete, and pass it on; False keeps full gradients until ``finish``.
        replicate: every rank gets the whole reduced gradient (stage 0).
        check: called before anything is accepted; raises if gradients must not arrive now.
        follow: makes compute come after what a sink returned.
        before: called before each reduction: what other threads have still to launch on these ranks is launched, and ordered before it.
    """

    def __init__(
        self,
        comm: Solo | Group,
        in_backward: bool,
        replicate: bool,
        check: Callable[[nn.Parameter], None],
        follow: Callable[[Event], None] = Awaited.wait,
        before: Callable[[], None] = lambda: None,
    ) -> None:
        self.comm, self.in_backward, self.replicate, self.check, self.follow, self.before = comm, in_backward, replicate, check, follow, before
        self.units: list[UnitGrads] = []
        self.order: list[int] = []  # positions in units
        self.learned = False
        self.completed: list[int] = []
        self.started: set[int] = set()
        self.queue: list[tuple[UnitGrads, Awaited, Tensor, Tensor, Tensor | None]] = []
        self.pool: dict[tuple[int, torch.dtype], list[tuple[Tensor, Event]]] = {}  # buckets to use again, each with what to come after
        self.handles: list[torch.utils.hooks.RemovableHandle] = []
        self.sync = True
        self.unfinished = False  # a backward has brought gradients since ``finish``
        self.loss_scale: Callable[[], float] = lambda: 1.0  # of what backward makes
        self.lock = threading.RLock()  # several threads may be in backward at once
        self.threads: set[int] = set()  # that called the model since the last step
        self.flushed = False  # some of this step's gradients have been passed on: others follow as they come, to be added in their order
        self.task = -1

    def add(self, unit: UnitGrads) -> None:
        """Watch the parameters of one more unit."""
        position = len(self.units)
        self.units.append(unit)
        # until the order is known: last block first, what is left over last of all
        self.order = sorted(range(len(self.units)), key=lambda i: (self.units[i].unit.name.startswith("rest"), -i))
        self.learned = False
        for index, param in enumerate(unit.unit.params):
            # weak, as the parameter would keep alive what keeps it alive
            take = torch.compiler.disable(functools.partial(weakly(self.take_grad), position, index))
            self.handles.append(param.register_post_accumulate_grad_hook(take))

    def detach(self) -> None:
        """Remove all hooks."""
        for handle in self.handles:
            handle.remove()
        self.handles.clear()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, gradients stay on their rank; the next backward outside, or the step, reduces them all at once."""
        before, self.sync = self.sync, False
        try:
            yield
        finally:
            self.sync = before

    @property
    def eager(self) -> bool:
        """Tell if gradients are passed on in backward."""
        return self.sync and (self.in_backward or self.flushed)

    # ---- flatten -------------------------------------------------------------------------------------------------------------

    def take_grad(self, position: int, index: int, param: nn.Parameter) -> None:
        """Take the gradient that a parameter has got, and reduce what is complete with it."""
        with self.lock:
            task = torch._C._current_graph_task_id()
            if task != -1 and self.task == -1:
                self.task = task
                torch.autograd.Variable._execution_engine.queue_callback(self._backward_ended)  # type: ignore[attr-defined]
            unit = self.units[position]
            if not unit.arrived:
                unit.expected = sum(p.requires_grad for p in unit.unit.params)
            grad = own_grad(param)
            self.unfinished = True
            hooked = len(param._post_accumulate_grad_hooks) > 1  # type: ignore[attr-defined]
            if grad is not None and hooked and grad_is_away(param):
                raise RuntimeError(
                    f"a hook of parameter {unit.unit.names[index]!r} sees its new gradient alone: the one that it is to be added to has left, as it "
                    "was clipped with all others, was used in a step without zero_grad(), came before the hook, or has a loss scale; register hooks "
                    "before the first backward, call zero_grad() after each step, and accumulate without a loss scale"
                )
            if grad is not None and grad.requires_grad and self.loss_scale() != 1:
                raise RuntimeError(
                    "backward with create_graph=True and a loss scale: gradients that are part of a graph stay in param.grad, with the scale; use "
                    "torch.autograd.grad(loss, params, create_graph=True), or set loss_scale=None"
                )
            if grad is not None and (hooked or grad.requires_grad or len(self.threads) > 1):
                # what the user's hooks work on, what is part of a graph, and what another thread may be adding to, stays where it is until the step
                unit.kept.add(index)
            elif grad is not None:
                self.collect(unit, index, param, grad)
            unit.arrived.add(index)
            if len(unit.arrived) < unit.expected:
                return
            self.flatten(unit)
            self.completed.append(position)
            if self.eager:
                for following in self.order:
                    if following not in self.started:
                        if following not in self.completed:
                            break
                        self._reduce(following)

    def collect(self, unit: UnitGrads, index: int, param: nn.Parameter, grad: Tensor) -> None:
        """Take ``grad``, which is part of no graph unless gradients are off, from ``param.grad``."""
        self.check(param)
        if grad.layout is not torch.strided:
            raise TypeError(f"the gradient of {unit.unit.names[index]!r} is sparse and cannot be flattened; build the embedding with sparse=False")
        if index in unit.waiting:
            self.flatten(unit)
        unit.waiting[index] = grad
        unit.used.add(index)
        grad_left(param)
        if grad.device.type == "cpu":
            self.flatten(unit)

    def flatten(self, unit: UnitGrads) -> None:
        """Move the gradients that wait into the bucket, in one launch; those of which there is one already are added to it in fp32."""
        waiting, unit.waiting = unit.waiting, {}
        if not waiting:
            return
        narrow = unit.unit.dtype
        if any(grad.dtype != narrow for grad in waiting.values()):  # assigned by hand, in full precision
            waiting = {index: grad.float() for index, grad in waiting.items()}
            unit.accumulated = True
        again = unit.present.intersection(waiting)
        unit.accumulated |= bool(again)
        if unit.bucket is None:
            unit.wide |= unit.accumulated
            unit.bucket, unit.stats = self._take(unit), stats_on(unit.unit.device)
        elif unit.accumulated and unit.bucket.dtype != torch.float32:
            before, unit.bucket = unit.bucket, unit.bucket.float()
            self._give(before)
        new = sorted(waiting.keys() - again)
        if new:
            flat = [unit.unit.flat(index, waiting[index]).contiguous() for index in new]
            unchecked("flatten", unit.bucket.device)(flat, unit.bucket, unit.layout.regions(new), unit.stats)
        if again:
            unit.stats = None
        for index in again:
            unit.unit.shaped(index, unit.bucket[unit.layout.whole(index)]).add_(waiting[index])
        unit.present.update(waiting)

    def drop(self, unit: UnitGrads, indices: Collection[int]) -> None:
        """Forget what there is of some parameters."""
        unit.used.difference_update(indices)
        gone = unit.present.intersection(indices)
        unit.present -= gone
        for index in indices:
            unit.waiting.pop(index, None)
        if unit.bucket is not None and not unit.present:
            self._give(unit.bucket)
            unit.bucket, unit.stats, unit.accumulated = None, None, False
        elif gone:
            unit.stats = None

    @property
    def settled(self) -> bool:
        """Check that ``finish`` has seen all gradients that have left."""
        return not self.unfinished and not self.queue and all(unit.bucket is None and not unit.used for unit in self.units)

    def pass_on(self, unit: UnitGrads) -> None:
        """Alone, in backward: what there is of a unit goes on now, the rest of it after."""
        self.flatten(unit)
        if unit.bucket is not None:
            self._reduce(self.units.index(unit))

    def _take(self, unit: UnitGrads) -> Tensor:
        """A bucket for a unit, with anything in it. Used ones come back: fresh memory costs a page fault every 4 KiB."""
        dtype = torch.float32 if unit.wide else unit.unit.dtype
        free = self.pool.get((unit.layout.numel, dtype))
        if not free or not (free[0][1].done or len(free) >= _IN_FLIGHT):  # on its way out: another one, as long as that are not too many
            return zeros(unit.layout.numel, dtype, unit.unit.device)
        bucket, event = free.pop(0)
        self.follow(event)
        return bucket

    def _give(self, bucket: Tensor, after: Event = COMPLETED) -> None:
        free = self.pool.setdefault((bucket.numel(), bucket.dtype), [])
        if not self.in_backward or len(free) < _IN_FLIGHT:
            free.append((bucket, after))

    def recycle(self, unit: UnitGrads, grad: Tensor | None) -> None:
        """A gradient given to the sink is not needed any more."""
        if grad is not None and grad.numel() == unit.layout.numel and grad.device == unit.unit.device:
            if unit.wide and grad.dtype != torch.float32:
                return  # the next bucket will be a wide one
            self._give(grad)

    # ---- reduce --------------------------------------------------------------------------------------------------------------

    def _reduce(self, position: int) -> None:
        """Start the reduction of a unit's bucket; a unit without gradients takes part with zeros, as other ranks may have some."""
        self.before()
        unit = self.units[position]
        self.started.add(position)
        self.flatten(unit)
        bucket = unit.bucket if unit.bucket is not None else self._take(unit)
        for index in set(range(len(unit.unit.params))) - unit.present:
            bucket[slice(*unit.layout.regions([index]))] = 0
        narrow = torch.float32 if unit.accumulated else unit.unit.dtype  # what was added up in fp32 stays in it
        alone = self.comm.world == 1  # nothing to reduce: the bucket is the shard
        shard = bucket if alone else torch.empty(unit.layout.shard_numel, dtype=narrow, device=bucket.device)
        stats = unit.stats if alone else stats_on(bucket.device)
        pending = self.comm.reduce_scatter(unit.index, bucket, shard, stats)
        unit.bucket, unit.stats, unit.present, unit.accumulated, unit.wide = None, None, set(), False, unit.wide or unit.accumulated
        self.queue.append((unit, pending, bucket, shard, stats))
        if alone or len(self.queue) > _IN_FLIGHT:
            self._complete()

    def _complete(self) -> None:
        """Wait for the oldest reduction and hand it on."""
        unit, pending, bucket, shard, stats = self.queue.pop(0)
        pending.wait()
        if self.replicate:  # the bucket has been read: the whole result has room there
            self.comm.all_gather(unit.index, bucket, shard).wait()
            shard, stats = bucket, None
        if shard is not bucket:
            self._give(bucket)
        after = unit.sink(shard, stats)
        if after is not None and shard is bucket:
            self._give(bucket, after)

    def _backward_ended(self) -> None:
        with self.lock:
            self.task = -1
            for unit in self.units:
                if self.loss_scale() != 1:  # whoever looks sees it without
                    self._collect_kept(unit)
                self.flatten(unit)
                if self.comm.world > 1:  # another rank may have a gradient where this one has none
                    for param in unit.unit.params:
                        ask_elsewhere(param)
            if self.eager:
                for position in self.order:
                    if self.units[position].bucket is not None or (position not in self.started and self.comm.world > 1):
                        self._reduce(position)
                while self.queue:
                    self._complete()
                if not self.learned:
                    self._learn()
            self._begin_backward()

    def _begin_backward(self) -> None:
        self.started, self.completed, self.task = set(), [], -1
        for unit in self.units:
            unit.arrived.clear()

    def _learn(self) -> None:
        """Take the first rank's order of completion for all that follows."""
        seen = dict.fromkeys(self.completed)
        order = torch.tensor(list(seen) + [i for i in self.order if i not in seen])
        self.comm.broadcast(-1, order, STATE)
        self.order, self.learned = order.tolist(), True

    @torch.no_grad()
    def _collect_kept(self, unit: UnitGrads) -> None:
        for index in sorted(unit.kept):
            grad = own_grad(unit.unit.params[index])
            if grad is not None:
                self.collect(unit, index, unit.unit.params[index], grad)
        unit.kept.clear()

    @torch.no_grad()
    def finish(self, keep: bool = False) -> list[set[int]]:
        """Reduce whatever is left. Returns, for each unit, which parameters have a gradient on any rank.

        ``keep``: gradients in their own place stay there.
        """
        scale = self.loss_scale()
        for unit in self.units:
            if not keep:
                self._collect_kept(unit)
            for index, param in enumerate(unit.unit.params) if not keep else ():
                grad = own_grad(param)
                if grad is not None:  # assigned by hand
                    self.collect(unit, index, param, grad if scale == 1 else grad.float() * scale)
            self.flatten(unit)
        left = [float(unit.bucket is not None) for unit in self.units]  # of no_sync, of a backward that was interrupted, or by hand
        used = [float(index in unit.used) for unit in self.units for index in range(len(unit.unit.params))]
        everywhere = torch.tensor(left + used)
        self.comm.all_reduce(everywhere)
        flags = [flag > 0 for flag in everywhere.tolist()]
        for position in self.order:
            if flags[position]:
                self._reduce(position)
        while self.queue:
            self._complete()
        self.forget()
        self.flushed = True
        is_used = iter(flags[len(left) :])
        return [{index for index in range(len(unit.unit.params)) if next(is_used)} for unit in self.units]

    def forget(self) -> None:
        """Drop gradients that are not reduced yet, and all memory of a backward that was interrupted."""
        while self.queue:
            _, pending, bucket, *_ = self.queue.pop(0)
            pending.wait()
            self._give(bucket)
        for unit in self.units:
            self.drop(unit, range(len(unit.unit.params)))
        self.unfinished = False
        self.threads.clear()
        self._begin_backward()

    def begin(self) -> None:
        """A forward of the model begins. If a backward is still recorded as in progress, an error ended it: what it left counts with the next."""
        with self.lock:
            self.threads.add(threading.get_ident())
            if self.task != -1:
                self._begin_backward()

    @property
    def nbytes(self) -> int:
        """Bytes of buckets, in use and kept for use again."""
        buckets = [unit.bucket for unit in self.units] + [bucket for free in self.pool.values() for bucket, _ in free]
        return sum(bucket.nbytes for bucket in buckets if bucket is not None)
