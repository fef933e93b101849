"""Gradients on their way from backward to each unit's reduced slice: grad -> flatten -> reduce.

A gradient leaves ``param.grad`` as soon as autograd has it. When those of a unit are complete, one launch moves them into the unit's flat
bucket, in their own 16 bits (in host memory a large one moves at once, while the cache has it); a second one of the same parameter before the
next step is added in fp32, unless ``narrow``. Then the bucket is reduced over ranks
while backward goes on. Reductions are started in one order on all ranks, that of the first backward on the first rank, so an order that
differs costs overlap, not correctness. Blocks with experts, of which each rank may have used other ones, are reduced when their backward is
complete, where any rank has a gradient. On a device both kernels measure what they write, so that the norm need not read it again.

Where user code looks for a gradient that has left, its unit's gradient is brought back whole, as tensors that are the user's; what the user has made
of them goes to the tier again before the norm and the update. After step() it is still there, as in torch, until zero_grad().
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from zk.core.events import COMPLETED, Awaited, Event
from zk.core.hooks import weakly
from zk.core.memory import zeros
from zk.core.owners import is_dtensor, local_of
from zk.core.store import UnitStore
from zk.core.timeline import phase
from zk.kernels.reference import unchecked
from zk.parallel.comm import REDUCE, STATE, Comm
from zk.parallel.released import compute_as_itself, grad_gone, grad_is_away, grad_left, own_grad

# reductions in flight at once: one being summed while the next one's bytes travel
_IN_FLIGHT = 2
# bytes of a gradient that stays in the cache until its unit's others have come
_SMALL = 1 << 16


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
        comm: Comm,
        in_backward: bool,
        replicate: bool,
        check: Callable[[nn.Parameter], None],
        follow: Callable[[Event], None],
        before: Callable[[], None],
    ) -> None:
        self.comm, self.in_backward, self.replicate, self.check, self.follow, self.before = comm, in_backward, replicate, check, follow, before
        self.stores: list[UnitStore] = []
        self.order: list[UnitStore] = []
        self.learned = False
        self.completed: list[UnitStore] = []
        self.started: set[UnitStore] = set()
        self.queue: list[tuple[UnitStore, Awaited, Tensor, Tensor, Tensor | None]] = []
        self.pool: dict[tuple[int, torch.dtype], list[tuple[Tensor, Event]]] = {}  # buckets to use again, each with what to come after
        self.handles: list[torch.utils.hooks.RemovableHandle] = []
        self.sync = True
        self.narrow = False  # gradients are added up in their own precision, else in fp32
        self.agrees = False  # ranks agree on the parameters that have a gradient as it is reduced, as nothing of it can be done again
        self.is_joined = False  # each backward is a part of one
        self.unfinished = False  # a backward has brought gradients since ``finish``
        self.loss_scale: Callable[[], float] = lambda: 1.0  # of what backward makes
        self.lock = threading.RLock()  # several threads may be in backward at once
        self.threads: set[int] = set()  # that called the model since the last step
        self.flushed = False  # some of this step's gradients have been passed on: others follow as they come, to be added in their order
        self.task = -1

    def add(self, store: UnitStore) -> None:
        """Watch the parameters of one more unit."""
        position = len(self.stores)
        self.stores.append(store)
        # until the order is known: last block first, what is left over last of all
        self.order = sorted(self.stores, key=lambda store: (store.unit.name.startswith("rest"), -store.index))
        self.learned = False
        take_grad = torch.compiler.disable(weakly(self.take_grad))  # weak, as parameters would keep alive what keeps them alive
        for index, param in enumerate(store.unit.users):
            take = functools.partial(take_grad, position, index)
            requires_grad = param.requires_grad
            with torch.no_grad():
                param.requires_grad_(True)  # only then torch takes a hook, which then stays
                self.handles.append(param.register_post_accumulate_grad_hook(take))
                param.requires_grad_(requires_grad)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, gradients stay on their rank; the next backward outside, or the step, reduces them all at once."""
        before, self.sync = self.sync, False
        try:
            yield
        finally:
            self.sync = before

    @contextlib.contextmanager
    def joined(self) -> Iterator[None]:
        """Context: all backward passes inside are one, and ``leave`` says which units have all of their gradients."""
        self._begin_backward()
        self.threads.add(threading.get_ident())
        self.is_joined = True
        try:
            yield
        finally:
            self.is_joined = False
        self._backward_ended()

    def leave(self, stores: Sequence[UnitStore]) -> None:
        """Pass on the gradients of units that are complete, inside of ``joined``."""
        with self.lock:
            for store in self.stores:
                if store in stores and (self.comm.world > 1 or store.unreduced):
                    self._completed(store)

    @property
    def eager(self) -> bool:
        """Tell if gradients are passed on in backward."""
        return self.sync and (self.in_backward or self.flushed)

    def _watch_backward(self) -> None:
        """Have ``_backward_ended`` called at the end of a backward that is in progress."""
        task = torch._C._current_graph_task_id()
        self.unfinished = True
        if task != -1 and self.task == -1:
            self.task = task
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_ended)  # type: ignore[attr-defined]

    # ---- flatten -------------------------------------------------------------------------------------------------------------

    def take_grad(self, position: int, index: int, param: nn.Parameter) -> None:
        """Take the gradient that a parameter has got, and reduce what is complete with it."""
        with self.lock:
            self._watch_backward()
            store = self.stores[position]
            grad = own_grad(param)
            with torch._C.DisableTorchFunctionSubclass():  # which is slow for released parameters
                if not store.arrived:
                    store.expected = sum(p.requires_grad for p in store.unit.users)
                hooked = len(param._post_accumulate_grad_hooks) > 1  # type: ignore[attr-defined]
            if grad is not None:
                if hooked and grad_is_away(param):
                    raise RuntimeError(
                        f"a hook of parameter {store.unit.names[index]!r} sees its new gradient alone: the one that it is to be added to has left, "
                        "as it was clipped with all others, was used in a step without zero_grad(), came before the hook, or has a loss scale; "
                        "register hooks before the first backward, call zero_grad() after each step, and accumulate without a loss scale"
                    )
                if grad.requires_grad and self.loss_scale() != 1:
                    raise RuntimeError(
                        "backward with create_graph=True and a loss scale: gradients that are part of a graph stay in param.grad, with the scale; "
                        "use torch.autograd.grad(loss, params, create_graph=True), or set loss_scale=None"
                    )
                if hooked or grad.requires_grad or len(self.threads) > 1:
                    # what hooks work on, what is part of a graph, and what another thread may be adding to, stays where it is until the step
                    store.kept.add(index)
                else:
                    self.collect(store, index, param, grad)
            store.arrived.add(index)
            if len(store.arrived) < store.expected:
                return
            self.flatten(store)
            if not self.is_joined:
                self._completed(store)

    def _completed(self, store: UnitStore) -> None:
        """A unit has all of its gradients: reduce it, and those that have waited for it."""
        self.completed.append(store)
        if self.eager and store.unit.chooser is None:
            for following in self.order if self.comm.world > 1 else (store,):
                if following not in self.started and following.unit.chooser is None:
                    if following not in self.completed:
                        break
                    self._reduce(following)

    def collect(self, store: UnitStore, index: int, param: nn.Parameter, grad: Tensor) -> None:
        """Take ``grad``, which is part of no graph unless gradients are off, from ``param.grad``."""
        self.check(param)
        if grad.layout is not torch.strided:
            raise TypeError(f"the gradient of {store.unit.names[index]!r} is sparse and cannot be flattened; build the embedding with sparse=False")
        if index in store.waiting:
            self.flatten(store)
        grad = local_of(grad, param)
        if store.unit.is_widened and grad.dtype == torch.float32:
            grad = grad.to(store.unit.dtype)
        store.waiting[index] = grad
        store.unreduced.add(index)
        grad_left(param)
        if grad.device.type == "cpu" and grad.nbytes >= _SMALL:
            self.flatten(store)

    def flatten(self, store: UnitStore) -> None:
        """Move the gradients that wait into the bucket, in one launch; those of which there is one already are added to it."""
        waiting, store.waiting = store.waiting, {}
        if not waiting:
            return
        if any(grad.dtype != store.unit.dtype for grad in waiting.values()):  # assigned by hand, in full precision
            waiting = {index: grad.to(store.unit.dtype if self.narrow else torch.float32) for index, grad in waiting.items()}
            store.accumulated = not self.narrow
        again = store.present.intersection(waiting)
        store.accumulated |= bool(again) and not self.narrow
        if store.bucket is None:
            store.wide |= store.accumulated
            store.bucket, store.stats = self._take(store), stats_on(store.unit.device)
        elif store.accumulated:
            store.bucket = store.bucket.float()  # as the next ones are: nobody would use the memory of this one again
        new = sorted(waiting.keys() - again)
        if new:
            flat = [store.unit.flat(index, waiting[index]).contiguous() for index in new]
            unchecked("flatten", store.bucket.device)(flat, store.bucket, store.layout.regions(new), store.stats)
        if again:
            store.stats = None
        for index in again:
            store.unit.shaped(index, store.bucket[store.layout.whole(index)]).add_(waiting[index])
        store.present.update(waiting)

    def drop(self, store: UnitStore, indices: Collection[int]) -> None:
        """Forget what there is of some parameters."""
        store.unreduced.difference_update(indices)
        gone = store.present.intersection(indices)
        store.present -= gone
        for index in indices:
            store.waiting.pop(index, None)
        if store.bucket is not None and not store.present:
            self._give(store.bucket)
            store.bucket, store.stats, store.accumulated = None, None, False
        elif gone:
            store.stats = None

    @property
    def settled(self) -> bool:
        """Check that ``finish`` has seen all gradients that have left."""
        return not self.unfinished and not self.queue and all(store.bucket is None and not store.unreduced for store in self.stores)

    def _take(self, store: UnitStore) -> Tensor:
        """A bucket for a unit, with anything in it. Used ones come back: fresh memory costs a page fault every 4 KiB."""
        dtype = torch.float32 if store.wide else store.unit.dtype
        free = self.pool.get((store.layout.numel, dtype))
        if not free or not (free[0][1].done or len(free) >= _IN_FLIGHT):  # on its way out: another one, as long as that are not too many
            return zeros(store.layout.numel, dtype, store.unit.device)
        bucket, event = free.pop(0)
        self.follow(event)
        return bucket

    def _give(self, bucket: Tensor, after: Event = COMPLETED) -> None:
        free = self.pool.setdefault((bucket.numel(), bucket.dtype), [])
        if not self.in_backward or len(free) < _IN_FLIGHT:
            free.append((bucket, after))

    def recycle(self, store: UnitStore, grad: Tensor | None) -> None:
        """A gradient given to the sink is not needed any more."""
        if grad is None or grad.numel() != store.layout.numel or grad.device != store.unit.device:
            return
        if grad.dtype == torch.float32 or not store.wide:  # else the next bucket will be a wide one
            self._give(grad)

    # ---- reduce --------------------------------------------------------------------------------------------------------------

    def reduce_together(self, chooser: nn.Module | None = None) -> None:
        """Reduce, in backward, what any rank has of the units of a chooser, or of all choosers. On all ranks."""
        with self.lock:
            stores = [store for store in self.order if store.unit.chooser is not None and chooser in (None, store.unit.chooser)]
            if chooser is not None:  # a rank may use none of its experts
                self._watch_backward()
            if self.eager and stores and not self.is_joined:
                for store in self._left(stores)[0]:
                    self._reduce(store)

    def _left(self, stores: Sequence[UnitStore], flags: Sequence[bool] = ()) -> tuple[list[UnitStore], list[bool]]:
        """Find those of ``stores`` of which any rank has a bucket, and give them one precision on all ranks.

        Returns them, and which of the ``flags`` any rank has set.
        """
        for store in stores:
            self.flatten(store)
        mine = [[store.bucket is not None, store.wide or store.accumulated, store.accumulated] for store in stores]
        said = (ranks > 0 for ranks in self.comm.ranks_with([*itertools.chain.from_iterable(mine), *flags], REDUCE))
        left = []
        for store in stores:
            has, wide, accumulated = itertools.islice(said, 3)
            if has:
                left.append(store)
                store.wide, store.accumulated = wide, accumulated
                if wide and store.bucket is not None:
                    store.bucket = store.bucket.float()
        return left, list(said)

    def _reduce(self, store: UnitStore) -> None:
        """Start the reduction of a unit's bucket; a unit without gradients takes part with zeros, as other ranks may have some."""
        self.before()
        self.started.add(store)
        self.flatten(store)
        bucket = store.bucket if store.bucket is not None else self._take(store)
        for index in set(range(len(store.unit.params))) - store.present:
            bucket[slice(*store.layout.regions([index]))] = 0
        narrow = torch.float32 if store.accumulated else store.unit.dtype  # what was added up in fp32 stays in it
        alone = self.comm.world == 1  # nothing to reduce: the bucket is the shard
        shard = bucket if alone else torch.empty(store.layout.shard_numel, dtype=narrow, device=bucket.device)
        stats = store.stats if alone else stats_on(bucket.device)
        with phase("reduce", store.unit.name):
            pending = self.comm.reduce_scatter(store.index, bucket, shard, stats)
        store.bucket, store.stats, store.present, store.accumulated, store.wide = None, None, set(), False, store.wide or store.accumulated
        self.queue.append((store, pending, bucket, shard, stats))
        if alone or len(self.queue) > _IN_FLIGHT:
            self._complete()

    def _complete(self) -> None:
        """Wait for the oldest reduction and hand it on."""
        store, pending, bucket, shard, stats = self.queue.pop(0)
        pending.wait()
        if self.replicate:  # the bucket has been read: the whole result has room there
            self.comm.all_gather(store.index, bucket, shard).wait()
            shard, stats = bucket, None
        if shard is not bucket:
            self._give(bucket)
        store.agreed = set(store.unreduced)
        if self.agrees:
            has = self.comm.ranks_with([index in store.agreed for index in range(len(store.unit.params))], REDUCE, store.index)
            store.agreed = {index for index, ranks in enumerate(has) if ranks}
        after = store.take_in(shard, stats)
        if after is not None and shard is bucket:
            self._give(bucket, after)

    def _backward_ended(self) -> None:
        with self.lock:
            self.task = -1
            for store in self.stores:
                if self.loss_scale() != 1:  # whoever looks sees it without
                    self._collect_kept(store)
                self.flatten(store)
                if self.is_joined:
                    store.arrived.clear()
                elif self.comm.world > 1:  # another rank may have a gradient where this one has none
                    for param in store.unit.users:
                        if own_grad(param) is None:
                            grad_left(param)
            if self.is_joined:
                return
            if self.eager:
                for store in self.order:
                    if store.unit.chooser is None and (store.bucket is not None or (store not in self.started and self.comm.world > 1)):
                        self._reduce(store)
                self.reduce_together()
                while self.queue:
                    self._complete()
                if not self.learned:
                    self._learn()
            self._begin_backward()

    def _begin_backward(self) -> None:
        self.started, self.completed, self.task = set(), [], -1
        for store in self.stores:
            store.arrived.clear()

    def _learn(self) -> None:
        """Take the first rank's order of completion for all that follows."""
        positions = torch.tensor([self.stores.index(store) for store in dict.fromkeys((*self.completed, *self.order))])
        self.comm.broadcast(-1, positions, STATE)
        self.order, self.learned = [self.stores[position] for position in positions.tolist()], True

    @torch.no_grad()
    def _collect_kept(self, store: UnitStore) -> None:
        for index in sorted(store.kept):
            grad = own_grad(store.unit.user(index))
            if grad is not None:
                self.collect(store, index, store.unit.user(index), grad)
        store.kept.clear()

    @torch.no_grad()
    def take_assigned(self) -> None:
        """Take the gradients that were put into their own place without the loss scale: by hand, or by a pipeline's backward of weights."""
        scale = self.loss_scale()
        for store in self.stores:
            for index, param in enumerate(store.unit.users):
                grad = own_grad(param)
                if grad is not None and index not in store.kept:
                    self.collect(store, index, param, grad if scale == 1 else grad.float() * scale)

    @torch.no_grad()
    def finish(self, keep: bool = False) -> None:
        """Reduce whatever is left. What has a gradient on any rank is ``used`` from then on.

        ``keep``: gradients in their own place stay there.
        """
        for store in self.stores if not keep else ():
            self._collect_kept(store)
        if not keep:
            self.take_assigned()
        places = [(store, index) for store in self.stores for index in range(len(store.unit.params))]
        # of no_sync, of a backward that was interrupted, or by hand
        left, used = self._left(self.order, [index in store.unreduced for store, index in places])
        for store in left:
            self._reduce(store)
        while self.queue:
            self._complete()
        self.forget()
        self.flushed = True
        for store, index in itertools.compress(places, used):
            store.used.add(index)

    def forget(self) -> None:
        """Drop gradients that are not reduced yet, and all memory of a backward that was interrupted."""
        while self.queue:
            _, pending, bucket, *_ = self.queue.pop(0)
            pending.wait()
            self._give(bucket)
        for store in self.stores:
            self.drop(store, range(len(store.unit.params)))
        self.unfinished = False
        self.threads.clear()
        self._begin_backward()

    def begin(self) -> None:
        """A forward of the model begins. If a backward is still recorded as in progress, an error ended it: what it left counts with the next."""
        with self.lock:
            if not self.is_joined:  # whose threads run one after the other
                self.threads.add(threading.get_ident())
            if self.task != -1:
                self._begin_backward()

    @property
    def nbytes(self) -> int:
        """Bytes of buckets, in use and kept for use again."""
        buckets = [store.bucket for store in self.stores] + [bucket for free in self.pool.values() for bucket, _ in free]
        return sum(bucket.nbytes for bucket in buckets if bucket is not None)


class Gradients:
    """Read and write ``param.grad`` for the parameters of one ZeroOptimizer.

    Args:
        units: where each parameter is: its unit, and its number in that.
        reducer: takes gradients away.
        reduce_rest: reduces what has not been reduced, on all ranks; True leaves what is in its own place there.
        check: raises where gradients cannot be had any more.
    """

    def __init__(
        self,
        units: Mapping[nn.Parameter, tuple[UnitStore, int]],
        reducer: GradReducer,
        reduce_rest: Callable[[bool], None],
        check: Callable[[], None],
    ) -> None:
        self.units, self.reducer, self.comm, self.reduce_rest, self.check = units, reducer, reducer.comm, reduce_rest, check
        self.looked: dict[UnitStore, None] = {}  # units whose gradients have been brought back
        self.is_hidden = False  # the gradients that have left are not shown

    def has_left(self, param: nn.Parameter) -> bool:
        """Check that the parameter has a gradient, and that it is somewhere else."""
        held, index = self.units[param]
        return index in held.unreduced or (index in held.used and held.shown.get(index, param) is not None)

    def is_asked(self, param: nn.Parameter) -> bool:
        """Check that it has one there, or may have one on another rank."""
        return not self.is_hidden and (self.has_left(param) or (self.comm.world > 1 and self.reducer.unfinished))

    @contextlib.contextmanager
    def hidden(self) -> Iterator[None]:
        """Context: gradients that have left are not looked at; what is put into ``param.grad`` inside is added to them."""
        self.is_hidden = True
        try:
            yield
        finally:
            self.is_hidden = False
        self.reducer.take_assigned()
        self.reducer.unfinished = True

    @torch.no_grad()
    def read(self, param: nn.Parameter) -> Tensor | None:
        """The gradient of ``param``, over all ranks and without the loss scale: in its dtype, or in fp32 where zk keeps it so."""
        self.check()
        held, index = self.units[param]
        with torch.inference_mode(False):  # it may be changed later, outside
            if not self._is_shown(held, index):
                self._bring_back(held, index)
        return held.shown.get(index)

    def write(self, param: nn.Parameter, value: Tensor | None) -> None:
        """Replace the gradient of ``param``, or drop it."""
        self.check()
        held, index = self.units[param]
        held.clip()
        if value is None:
            self.reducer.drop(held, [index])
            held.shown[index] = None
            if all(held.shown.get(other, param) is None for other in range(len(held.unit.params))):  # (other ranks may have some)
                held.drop_gradient()
            else:
                self.looked[held] = None
            grad_gone(param)
            return
        if not isinstance(value, Tensor):
            raise TypeError(f"the gradient of a parameter must be a tensor or None; got {type(value).__name__}")
        if is_dtensor(value) != is_dtensor(param):
            name = held.unit.names[index]
            raise RuntimeError(f"the gradient of {name!r} must be a {type(param).__name__}, as that is; got a {type(value).__name__}")
        if value.shape != param.shape or value.device != param.device or not value.is_floating_point():
            raise RuntimeError(
                f"the gradient of {held.unit.names[index]!r} must be of floating point, shape {tuple(param.shape)} and on {param.device}; got "
                f"{value.dtype}, {tuple(value.shape)} on {value.device}"
            )
        if not self._is_shown(held, index):
            self._bring_back(held, index)
        held.shown[index] = value
        held.used.add(index)

    def computes(self, whether: bool, *_: object) -> None:
        """Note that the model computes, which code from torch.compile does with parameters of their own class."""
        dynamo = sys.modules.get("torch._dynamo.eval_frame")
        is_used = dynamo is not None and any(backend is not None for backend in dynamo.cached_backends.values())
        for param in self.units if is_used else ():
            compute_as_itself(param, whether)

    # ---- bringing back -------------------------------------------------------------------------------------------------------

    def _is_shown(self, held: UnitStore, index: int) -> bool:
        """Check that the user has the gradient already."""
        if self.comm.world > 1 and self.reducer.unfinished:  # another rank may have more of it
            return False
        return index in held.shown and index not in held.unreduced and own_grad(held.unit.user(index)) is None

    def _bring_back(self, held: UnitStore, index: int) -> None:
        """Turn all of the unit's gradients into tensors of the user's."""
        if torch._C._current_graph_task_id() != -1:
            if self.comm.world > 1:
                raise RuntimeError(
                    f"the gradient of {held.unit.names[index]!r} is read in backward, after it has left for the other ranks; read it after "
                    "backward, or in a hook of that parameter's own: param.register_post_accumulate_grad_hook"
                )
            self.reducer.flatten(held)
            if held.bucket is not None:  # what there is goes on now, the rest of it after
                self.reducer._reduce(held)
            held.used |= held.unreduced
            held.unreduced.clear()
        else:
            self.reduce_rest(own_grad(held.unit.user(index)) is None)
        if index in held.used and not self._is_shown(held, index):
            alone = self.comm.world == 1  # else who has a reference may differ by rank, and what is brought back is so together
            for other in [other for other in self.looked if alone and other is not held and other.only_here()]:
                del self.looked[other]
                other.renew()
            held.bring_back()
        self.looked[held] = None
