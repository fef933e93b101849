"""In: gradients, one parameter at a time, as backward produces them. Out: each unit's reduced slice, handed to its sink: grad -> flatten -> reduce.

A gradient is copied into its unit's flat bucket in its own 16 bits as soon as autograd has it, and freed. A second one for the same
parameter before the next step is added in fp32. When a unit is complete its bucket is reduced over ranks while backward goes on. Reductions
are started in one order on all ranks, that of the first backward on the first rank, so an order that differs costs overlap, not correctness.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
import weakref
from collections.abc import Callable, Collection, Iterator

import torch
from torch import Tensor, nn

from zk.events import COMPLETED, Awaited, Event
from zk.memory import zeros
from zk.parallel.comm import STATE, Group, Solo
from zk.parallel.layout import Layout
from zk.parallel.released import ask_elsewhere, grad_is_away, grad_left, own_grad
from zk.units import Unit

# reductions under way at once: one being summed while the next one's bytes travel
_IN_FLIGHT = 2


@dataclasses.dataclass(slots=True)
class UnitGrads:
    """Gradients of one trained unit on their way out."""

    unit: Unit
    index: int  # the unit's number, the same on all ranks
    layout: Layout
    held: slice  # of the flat buffer: what this rank updates
    # takes a reduced gradient (held,): None if it keeps the tensor itself, else what to come after before that is used again
    sink: Callable[[Tensor], Event | None]
    bucket: Tensor | None = None  # (layout.numel,) this rank's gradients, not yet reduced
    present: set[int] = dataclasses.field(default_factory=set)  # parameters in the bucket
    accumulated: bool = False  # some parameter is in the bucket more than once
    wide: bool = False  # the step before accumulated: start with an fp32 bucket
    arrived: set[int] = dataclasses.field(default_factory=set)  # parameters seen in this backward
    expected: int = 0  # parameters that can be seen in it
    used: set[int] = dataclasses.field(default_factory=set)  # parameters seen since the last step
    kept: set[int] = dataclasses.field(default_factory=set)  # parameters whose gradient is still in its own place, as backward made it


def _arrived(reference: weakref.ref[GradReducer], position: int, index: int, param: nn.Parameter) -> None:
    """The hook of one parameter; weak, as the parameter would keep alive what keeps it alive."""
    reducer = reference()
    if reducer is not None:
        reducer._arrived(position, index, param)


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
        self.queue: list[tuple[UnitGrads, Awaited, Tensor, Tensor]] = []
        # buckets to use again, each with what to come after; by layout: what is padding in one is a parameter in another
        self.pool: dict[tuple[Layout, torch.dtype], list[tuple[Tensor, Event]]] = {}
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
            arrived = torch.compiler.disable(functools.partial(_arrived, weakref.ref(self), position, index))
            self.handles.append(param.register_post_accumulate_grad_hook(arrived))

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
        """Whether gradients are passed on in backward."""
        return self.sync and (self.in_backward or self.flushed)

    # ---- flatten -------------------------------------------------------------------------------------------------------------

    def _arrived(self, position: int, index: int, param: nn.Parameter) -> None:
        with self.lock:
            self._take_grad(position, index, param)

    def _take_grad(self, position: int, index: int, param: nn.Parameter) -> None:
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
                f"a hook of parameter {unit.unit.names[index]!r} sees its new gradient alone: the one that it is to be added to has left, as it was "
                "clipped with all others, was used in a step without zero_grad(), came before the hook, or has a loss scale; register hooks before "
                "the first backward, call zero_grad() after each step, and accumulate without a loss scale"
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
        self.completed.append(position)
        if self.eager:
            for following in self.order:
                if following not in self.started:
                    if following not in self.completed:
                        break
                    self._reduce(following)

    def collect(self, unit: UnitGrads, index: int, param: nn.Parameter, grad: Tensor) -> None:
        """Move ``grad``, which is part of no graph unless gradients are off, from ``param.grad`` into the unit's bucket."""
        self.check(param)
        name = unit.unit.names[index]
        if grad.layout is not torch.strided:
            raise TypeError(f"the gradient of {name!r} is sparse and cannot be flattened; build the embedding with sparse=False")
        if unit.bucket is None:
            unit.bucket = self._take(unit)
        where = unit.layout.whole(index)
        if grad.dtype == torch.float32 != unit.bucket.dtype:  # assigned by hand, in full precision
            narrow, unit.bucket, unit.accumulated = unit.bucket, unit.bucket.float(), True
            self._give(unit, narrow)
        if index not in unit.present:
            unit.unit.shaped(index, unit.bucket[where]).copy_(grad)
            unit.present.add(index)
        else:
            unit.accumulated = True
            if unit.bucket.dtype != torch.float32:
                narrow, unit.bucket = unit.bucket, unit.bucket.float()
                self._give(unit, narrow)
            unit.unit.shaped(index, unit.bucket[where]).add_(grad)
        unit.used.add(index)
        grad_left(param)

    def drop(self, unit: UnitGrads, indices: Collection[int]) -> None:
        """Forget what the bucket has of some parameters."""
        unit.present.difference_update(indices)
        unit.used.difference_update(indices)
        if unit.bucket is not None and not unit.present:
            self._give(unit, unit.bucket)
            unit.bucket, unit.accumulated = None, False

    @property
    def settled(self) -> bool:
        """Check that ``finish`` has seen all gradients that have left."""
        return not self.unfinished and not self.queue and all(unit.bucket is None and not unit.used for unit in self.units)

    def pass_on(self, unit: UnitGrads) -> None:
        """Alone, in backward: what there is of a unit goes on now, the rest of it after."""
        if unit.bucket is not None:
            self._reduce(self.units.index(unit))

    def _take(self, unit: UnitGrads) -> Tensor:
        """A bucket whose padding is zero. Used ones come back: fresh memory costs a page fault every 4 KiB."""
        dtype = torch.float32 if unit.wide else unit.unit.dtype
        free = self.pool.get((unit.layout, dtype))
        if not free or not (free[0][1].done or len(free) >= _IN_FLIGHT):  # on its way out: another one, as long as that are not too many
            return zeros(unit.layout.numel, dtype, unit.unit.device)
        bucket, event = free.pop(0)
        self.follow(event)
        return bucket

    def _give(self, unit: UnitGrads, bucket: Tensor, after: Event = COMPLETED) -> None:
        free = self.pool.setdefault((unit.layout, bucket.dtype), [])
        if not self.in_backward or len(free) < _IN_FLIGHT:
            free.append((bucket, after))

    def recycle(self, unit: UnitGrads, grad: Tensor | None) -> None:
        """A gradient given to the sink is not needed any more."""
        if grad is not None and grad.numel() == unit.layout.numel and grad.device == unit.unit.device:
            if unit.wide and grad.dtype != torch.float32:
                return  # the next bucket will be a wide one
            self._give(unit, grad)

    # ---- reduce --------------------------------------------------------------------------------------------------------------

    def _reduce(self, position: int) -> None:
        """Start the reduction of a unit's bucket; a unit without gradients takes part with zeros, as other ranks may have some."""
        self.before()
        unit = self.units[position]
        self.started.add(position)
        bucket = unit.bucket
        if bucket is None:
            bucket = self._take(unit)
        for absent in set(range(len(unit.unit.params))) - unit.present:
            bucket[unit.layout.whole(absent)].zero_()
        narrow = torch.float32 if unit.accumulated else unit.unit.dtype  # what was added up in fp32 stays in it
        alone = self.comm.world == 1  # nothing to reduce: the bucket is the shard
        shard = bucket if alone else torch.empty(unit.layout.shard_numel, dtype=narrow, device=bucket.device)
        pending = self.comm.reduce_scatter(unit.index, bucket, shard)
        unit.bucket, unit.present, unit.accumulated, unit.wide = None, set(), False, unit.wide or unit.accumulated
        self.queue.append((unit, pending, bucket, shard))
        if alone or len(self.queue) > _IN_FLIGHT:
            self._complete()

    def _complete(self) -> None:
        """Wait for the oldest reduction and hand it on."""
        unit, pending, bucket, shard = self.queue.pop(0)
        pending.wait()
        if self.replicate:  # the bucket has been read: the whole result has room there
            self.comm.all_gather(unit.index, bucket, shard).wait()
            shard = bucket
        if shard is not bucket:
            self._give(unit, bucket)
        after = unit.sink(shard)
        if after is not None and shard is bucket:
            self._give(unit, bucket, after)

    def _backward_ended(self) -> None:
        with self.lock:
            self._reduce_rest()

    def _reduce_rest(self) -> None:
        self.task = -1
        for unit in self.units:
            if self.loss_scale() != 1:  # whoever looks sees it without
                self._collect_kept(unit)
            if self.comm.world > 1:  # another rank may have a gradient where this one has none
                for param in unit.unit.params:
                    ask_elsewhere(param)
        if self.eager:
            for position in self.order:
                late = self.units[position].bucket is not None
                if late or (position not in self.started and self.comm.world > 1):
                    self._reduce(position)
            while self.queue:
                self._complete()
            if not self.learned:
                self._learn()
        self.started, self.completed = set(), []
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
        for unit in self.units if not keep else ():
            self._collect_kept(unit)
            for index, param in enumerate(unit.unit.params):
                grad = own_grad(param)
                if grad is not None:  # assigned by hand
                    self.collect(unit, index, param, grad if scale == 1 else grad.float() * scale)
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
        result, start = [], len(left)
        for unit in self.units:
            count = len(unit.unit.params)
            result.append({index for index in range(count) if flags[start + index]})
            start += count
        self.forget()
        self.flushed = True
        return result

    def forget(self) -> None:
        """Drop gradients that are not reduced yet, and all memory of a backward that was interrupted."""
        while self.queue:
            unit, pending, bucket, _ = self.queue.pop(0)
            pending.wait()
            self._give(unit, bucket)
        for unit in self.units:
            self.drop(unit, range(len(unit.unit.params)))
            unit.arrived.clear()
        self.unfinished = False
        self.threads.clear()
        self.started, self.completed, self.task = set(), [], -1

    def begin(self) -> None:
        """A forward of the model begins. If a backward is still recorded as under way, an error ended it: what it left counts with the next."""
        with self.lock:
            self.threads.add(threading.get_ident())
            if self.task != -1:
                self.started, self.completed, self.task = set(), [], -1
                for unit in self.units:
                    unit.arrived.clear()

    @property
    def nbytes(self) -> int:
        """Bytes of buckets, in use and kept for use again."""
        buckets = [unit.bucket for unit in self.units] + [bucket for free in self.pool.values() for bucket, _ in free]
        return sum(bucket.nbytes for bucket in buckets if bucket is not None)
