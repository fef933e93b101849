"""UnitStore: one unit's model states on this rank, and everything that is done to that unit alone.

Parameters are full on every rank (stages 0-2), views of one flat buffer of which this rank updates a slice; or only the slice exists between uses
(stage 3), and the full ones are gathered into memory that comes and goes. The optimizer's state of the slice is in ``shard``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import sys
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zk.core.events import COMPLETED, Awaited, Event
from zk.core.memory import Lease, bequeath, widen_, zeros
from zk.core.owners import Gradients, fit, hold, is_dtensor, local_of
from zk.core.timeline import phase
from zk.core.units import Layout, Unit, overlap, strides_of
from zk.offload.packing import EVERYTHING, PACKED, Kept, flattened, wrapped
from zk.offload.pipeline import Task
from zk.offload.rules import Change, Run, Scalars, as_number
from zk.offload.spill import FileParams
from zk.offload.state import OptimizerShard
from zk.offload.tiers import ResidentFields
from zk.offload.transfer import Transfer
from zk.parallel.comm import Comm
from zk.parallel.released import Released, Watched, grad_gone, grad_left, mark, redress, stand_in, unmark

_use_count: Callable[[int], int] = torch._C._storage_Use_Count  # type: ignore[attr-defined]


class State(enum.Enum):
    """The full parameters of a unit that is partitioned."""

    RELEASED = "only the shard exists; the parameters have no memory"
    GATHERING = "memory is there and a collective is filling it"
    GATHERED = "the parameters are full and readable"


class UnitStore:
    """One unit's model states on this rank. Frozen units have parameters only.

    Args:
        unit: parameters, which become views of the full flat buffer.
        index: the unit's number, the same on all ranks.
        layout: of the flat buffer.
        comm: the ranks.
        transfer: between the device and the host.
        param_tier: the name of the tier of the parameters.
        held: the slice of the flat buffer that this rank updates.
        home: where that slice rests between uses.
        full: (layout.numel,) the flat buffer, where it stays; None takes memory while parameters are in use.
        on_use: called when a released parameter is used, gathers or raises; None: parameters are always full.
    """

    def __init__(
        self,
        unit: Unit,
        index: int,
        layout: Layout,
        comm: Comm,
        transfer: Transfer,
        param_tier: str,
        held: slice,
        home: ResidentFields | FileParams,
        full: Tensor | None = None,
        on_use: Callable[[UnitStore], None] | None = None,
    ) -> None:
        self.unit, self.index, self.layout, self.comm, self.transfer = unit, index, layout, comm, transfer
        self.param_tier, self.held, self.home, self.on_use = param_tier, held, home, on_use or UnitStore.arrive
        self.held_numel: int = held.stop - held.start
        self.is_whole = self.held_numel == layout.numel  # this rank's slice is everything
        # bitsandbytes keeps codes in bytes, or, if asked to, two or four to a number of another dtype
        self.has_codes = unit.dtype.itemsize == 1 or any(hasattr(param, "quant_state") for param in unit.params)
        self.owner: weakref.ref[Any] | None = None  # the ZeroOptimizer
        self.lock = threading.RLock()  # several threads may want the parameters at once
        self.counting = threading.Lock()  # while versions change; never held while waiting
        # parameters
        self.is_partitioned = self.watches_data = on_use is not None
        self.lease = None if full is not None else Lease(layout.numel, unit.computes, unit.device)
        self.full: Tensor = full if self.lease is None else self.lease.tensor  # type: ignore[assignment]
        self.is_uploaded = self.lease is not None and home.memory == "host" and not transfer.joined
        self.state, self.pins = State.GATHERED, 0
        self.depth = 0  # forwards in progress
        # a graph that create_graph=True has made, or a collective that was interrupted, may use the full memory after the release
        self.is_borrowed = False
        self.uploaded: Event = COMPLETED
        self.pending: Awaited | None = None  # the collective that fills them
        self.known: dict[int, UnitStore] = {}  # whose memory is whose
        self.on_write: Callable[[UnitStore, list[int]], None] = lambda *_: None  # keeps what forward has written
        self.versions: list[int]  # of the parameters, when zk last wrote them
        self.pointers: list[int] = []  # to their memory, of a unit that is partitioned
        self.taken: set[int] = set()  # parameters whose ``data`` somebody may have written
        self.sharers = 0  # tensors in the memory of full parameters, of zk's own
        self.digests: dict[str, str] | None = None  # of frozen parameters, as they are (zk/checkpoint/base.py)
        # the gradient on its way out of backward (zk/parallel/grads.py)
        self.waiting: dict[int, Tensor] = {}  # gradients of parameters, which go into the bucket together
        self.bucket: Tensor | None = None  # (layout.numel,) this rank's gradients, not yet reduced; anything where there is none
        self.stats: Tensor | None = None  # (2,) fp64, of what is in the bucket, as for ``zk.kernels.flatten``; None where they are not known
        self.present: set[int] = set()  # parameters in the bucket
        self.accumulated = False  # some parameter is in the bucket more than once
        self.wide = False  # the step before accumulated: start with an fp32 bucket
        self.arrived: set[int] = set()  # parameters seen in this backward
        self.expected = 0  # parameters that can be seen in it
        self.unreduced: set[int] = set()  # parameters whose gradient has left since all ranks last compared them
        self.kept: set[int] = set()  # parameters whose gradient is still in its own place, as backward made it
        # the gradient between backward and zero_grad
        self.used: set[int] = set()  # parameters with a gradient, on any rank, since the last step
        self.shown: dict[int, Tensor | None] = {}  # gradients that the user looked at, or replaced, or dropped
        self.spent: float | None = None  # the gradient was used in a step, and is what was stored times this
        self.gradients: weakref.ref[Gradients] | None = None  # what shows them
        self.loss_scale: Callable[[], float] = lambda: 1.0  # of what backward makes now
        self.clip: Callable[[], None] = lambda: None  # clips what is there, if that was asked for and has not been done
        self.recycle: Callable[[UnitStore, Tensor | None], None] = lambda *_: None  # takes memory of gradients back
        # tells if a gradient that comes now goes to its update in memory; raises if it had to be added to one that did
        self.hands_over: Callable[[UnitStore], bool] = lambda _: False
        self.agreed: set[int] = set()  # parameters that have it on any rank, where that is asked
        self.has_taken: Callable[[UnitStore], None] = lambda _: None  # hears of each gradient that has come
        # the optimizer
        self.shard: OptimizerShard | None = None
        self.steps: dict[int, int] = {}  # of the parameters that were updated: how often
        self.scalars: dict[int, Scalars] = {}  # beyond that, what an optimizer's own step() keeps of a parameter
        self.shown_state: dict[int, dict[str, Tensor]] = {}  # which the user looked at
        self.underway: Task | None = None  # an update that goes on in the background
        self._view()
        self.versions = unit.versions
        for param in unit.objects:
            hold(param, self)
        if self.is_partitioned:
            self._free()

    def _view(self) -> None:
        """Make every parameter a view of the full buffer."""
        for index, param in enumerate(self.unit.params):
            view = self.unit.shaped(index, self.full[self.layout.whole(index)])
            if param.is_floating_point() and param.dtype != view.dtype:
                self.unit.user(index).grad = None  # of the old precision
            param.data = view
        for param in self.unit.around.values():
            fit(param)

    def mine(self, index: int) -> slice:
        """The elements of this rank's slice that are of parameter ``index``."""
        return overlap(self.held, self.layout.whole(index))[0]

    @property
    def nbytes(self) -> dict[str, int]:
        """Bytes of the parameters where they rest (``in_place``: in files of the user's), and of full ones beside them."""
        if not self.is_partitioned:
            return {"param": self.full.nbytes, "gathered": 0}
        kind = "in_place" if isinstance(self.home, FileParams) and self.home.borrowed is not None else "param"
        return {kind: self.home.nbytes("param"), "gathered": 0 if self.state is State.RELEASED or self.lease is None else self.full.nbytes}

    # ---- parameters: fetch -> upload -> gather -> release --------------------------------------------------------------------

    def fetch(self) -> None:
        """Ask for this rank's slice, so that a later ``prefetch`` need not wait for it."""
        if self.state is State.RELEASED and not self.is_updating:
            self.home.prefetch()

    def prefetch(self) -> None:
        """RELEASED -> GATHERING."""
        if self.state is not State.RELEASED:
            return
        self.arrive()
        try:
            if self.is_borrowed:
                self._free()  # which was interrupted
            self.state = State.GATHERING
            source = self.home.whole()
            if self.lease is not None:
                with phase("gather", self.unit.name):
                    self.lease.allocate()
                    self._fill(source)
        except BaseException:  # Ctrl-C; or other ranks are elsewhere, or gone
            self._undo()
            raise

    def _fill(self, source: Tensor) -> None:
        full = self.full if not self.unit.is_widened else self.full.view(self.unit.dtype)[: self.layout.numel]
        if not self.is_uploaded:
            self.pending = self.comm.all_gather(self.index, full, source)
        else:
            mine = full[self.held]
            self.uploaded = self.transfer.upload(mine, source)
            if self.comm.shards > 1:
                with self.transfer.beside():
                    self.pending = self.comm.all_gather(self.index, full, mine)

    def _undo(self) -> None:
        """GATHERING -> RELEASED, without the full parameters."""
        self.pending = None
        self.home.release(self.uploaded)
        self.is_borrowed = True
        self._free()

    def gather(self) -> None:
        """Any state -> GATHERED, waiting for the collective."""
        self.prefetch()
        if self.state is State.GATHERING:
            try:
                self.transfer.follow(self.uploaded)
                if self.pending is not None:
                    self.pending.wait()
                    self.pending = None
                self.home.release(self.uploaded)
                if self.unit.is_widened:
                    widen_(self.full, self.unit.dtype)
                stand_in(self.unit.objects, Watched)
                self.note_versions()
                self.state = State.GATHERED
            except BaseException:
                self._undo()
                raise

    def settle(self) -> None:
        """GATHERING -> GATHERED: nobody reads the shard any more, so it may be written."""
        if self.state is State.GATHERING:
            self.gather()

    def release(self) -> None:
        """Any state -> RELEASED, unless somebody holds it. The shard is what remains, with what forward has written."""
        if self.state is State.RELEASED or self.pins or not self.is_partitioned:
            return
        self.gather()
        params = self.unit.params
        if self.taken or self.unit.versions != self.versions or [param.data_ptr() for param in params] != self.pointers:
            self.on_write(self, self._written())
        self._free()

    def _free(self) -> None:
        self.state = State.RELEASED  # first: Ctrl-C may come after any line
        if self.is_borrowed and self.lease is not None:  # the memory goes with the borrower
            self.lease = Lease(self.layout.numel, self.unit.computes, self.unit.device)
            self.known.pop(self.full.untyped_storage()._cdata, None)
            self.full = self.lease.tensor
            self.known[self.full.untyped_storage()._cdata] = self
            stand_in(self.unit.objects, Watched)  # a released parameter would be gathered before it gets its new memory
            self._view()
        self.is_borrowed = False
        stand_in(self.unit.objects, Released)
        if self.lease is not None:
            self.lease.free()

    def pin(self) -> None:
        """Gather and keep until ``unpin``."""
        self.gather()
        self.pins += 1

    def unpin(self) -> None:
        """Undo one ``pin``; the last one releases."""
        self.pins -= 1
        if not self.depth:
            self.release()

    def refresh(self) -> None:
        """The shard was updated: a full copy that somebody holds is made current."""
        if self.is_partitioned and self.state is not State.RELEASED:
            self.gather()
            self._free()
            if self.pins:
                self.gather()

    def use(self) -> None:
        """Make the parameters usable: gathered, or updated. Raises where they cannot be."""
        self.on_use(self)

    def refuse(self, check: Callable[[], None]) -> None:
        """Refuse every use of the parameters from now on: ``check`` raises."""
        self.on_use = lambda _: check()
        vars(self)["prefetch"] = check  # which every gather begins with
        for param in self.unit.objects:
            mark(param, self)

    def let_be(self) -> None:
        """Leave the parameters to the user: the optimizer is closed."""
        self.owner = self.gradients = None
        self.watches_data = False
        bequeath(self.full)
        for param in self.unit.objects:
            redress(param)

    # ---- the step ------------------------------------------------------------------------------------------------------------

    def count_step(self, group_of: Mapping[nn.Parameter, Mapping[str, Any]]) -> None:
        """The parameters in use are about to be updated, by a ``change`` that was made before."""
        assert self.shard is not None
        users = self.unit.users
        for index in self.used:
            self.steps[index] = self.steps.get(index, 0) + 1
            after = self.shard.rule.scalars(group_of[users[index]], self.scalars.get(index))
            if after is not None:
                self.scalars[index] = after

    def change(self, group_of: Mapping[nn.Parameter, Mapping[str, Any]], used: Collection[int], grad_scale: float) -> Change:
        """The next update: neighbours of one group and step count, merged, if they may be cut anywhere.

        Parameters without a gradient (not ``used``) are left out, as torch leaves them alone.
        """
        assert self.shard is not None
        runs, is_neighbour = list[Run](), False
        for index, param in enumerate(self.unit.users):
            part = self.mine(index)
            if index not in used:
                is_neighbour = False
            elif part.stop > part.start:
                shaped, views = None, None
                if self.shard.packing is not None:
                    shaped, views = functools.partial(self.unit.shaped, index), functools.partial(self.shard.packing.views, index)
                steps = self.steps.get(index, 0) + 1
                new = Run(part, group_of[param], steps, self.scalars.get(index), shaped, views, self.kept_of(index))
                if is_neighbour and shaped is None and runs[-1].group is new.group and (runs[-1].step, runs[-1].scalars) == (new.step, new.scalars):
                    runs[-1] = dataclasses.replace(new, part=slice(runs[-1].part.start, part.stop))
                else:
                    runs.append(new)
                is_neighbour = True
        return Change(self.shard.rule, runs, grad_scale)

    def updated(self, used: Collection[int]) -> None:
        """These parameters have new values, as autograd should know."""
        users = self.unit.users
        with self.counting:
            torch.autograd.graph.increment_version([users[index] for index in used])
            now = self.unit.versions if not self.is_partitioned else []
            for index in used if now else ():
                self.versions[index] = now[index]

    def publish(self, uploaded: Event = COMPLETED, mark: Event | None = None, beside: Comm | None = None) -> Awaited:
        """The updated slice becomes what all ranks use; returns what compute must follow. The collective comes after all of compute so far.

        Stage 3 gathers it with the next use.

        Args:
            uploaded: the slice is there.
            beside: ranks' connections of its own, for a collective beside compute and after ``mark``, as for Transfer: the slice may have been
                updated by compute itself, and compute may still read what the collective overwrites.
        """
        if self.is_partitioned or self.is_whole:
            return uploaded
        if beside is None:
            self.transfer.follow(uploaded)
            return self.comm.all_gather(self.index, self.full, self.full[self.held])
        with self.transfer.beside(mark, uploaded) as reached:
            beside.all_gather(self.index, self.full, self.full[self.held]).wait()
            return reached()

    def begin(self, task: Task) -> None:
        """The update of this unit has been handed over: whoever uses its parameters waits for it."""
        with self.lock:
            self.underway = task
            if not self.is_partitioned:
                for param in self.unit.objects:
                    mark(param, self, task.done)
            elif self.pins:
                self.arrive()  # somebody reads the full parameters at this moment

    def arrive(self) -> None:
        """Wait for the update in flight, if there is one. Raises what went wrong in it, every time."""
        if self.underway is None:
            return
        with self.lock:
            task = self.underway
            if task is None:
                return
            with contextlib.nullcontext() if task.done.done else phase("wait", f"update: {self.unit.name}"):
                task.done.wait()
            self.forget_update()
            self.transfer.follow(task.arriving)
            if task.keep:
                self.spent = task.change.grad_scale
            self.refresh()

    def forget_update(self) -> None:
        """The update in flight has ended, one way or the other."""
        with self.lock:
            task, self.underway = self.underway, None
            if not self.is_partitioned:
                for param in self.unit.objects:
                    unmark(param)
            if task is not None and not task.keep:
                self._recycle(task)

    @property
    def is_updating(self) -> bool:
        """Tell if an update is in flight."""
        return self.underway is not None and not self.underway.done.done

    # ---- the gradient between backward and zero_grad ------------------------------------------------------------------------

    def take_in(self, grad: Tensor, stats: Tensor | None) -> Event | None:
        """Add a reduced gradient, as OptimizerShard.add does, to what ``param.grad`` is."""
        assert self.shard is not None
        self.clip()
        self.renew()
        after = self.shard.add(grad, stats, self.hands_over(self))
        self.has_taken(self)
        return after

    def bring_back(self) -> None:
        """Bring every gradient into ``shown``. On all ranks."""
        self.arrive()
        mine = self._bring()
        full = self.whole_of(lambda _: mine)
        full = full.float() if self.unit.is_widened else full
        for index in self.used - self.shown.keys():
            self.shown[index] = self.unit.shown(index, full[self.layout.whole(index)]).clone()

    def only_here(self) -> bool:
        """Check that nobody else has what was brought back, or a part of its memory."""
        for index in self.shown:
            grad = self.shown[index]
            if grad is None:
                continue
            if is_dtensor(grad):  # whose memory is another tensor's
                return False
            in_python, in_torch = sys.getrefcount(grad), grad._use_count()  # type: ignore[attr-defined]
            memory = _use_count(grad.untyped_storage()._cdata)
            # (shown, grad and the argument of getrefcount; the storage asked for is one more)
            if in_python > 3 or in_torch > 1 or memory > 2:
                return False
        return True

    def renew(self) -> None:
        """Put the gradient on its tier as ``param.grad`` is: with the user's changes, and with the clip of a step that has used it."""
        self.arrive()
        scale = self.loss_scale()
        if not self.shown and (self.spent is None or self.spent * scale == 1):
            self.spent = None
            return
        assert self.shard is not None
        shown, self.shown = self.shown, {}
        # what is there stays, as it may be of parameters that only other ranks know of
        parts = [(slice(0, self.held_numel), self._bring())] if self.shard.stats else []
        for index, grad in shown.items():
            mine, piece = self.layout.part(index, self.held)
            if grad is None:
                self.used.discard(index)
            parts.append((mine, self.full.new_zeros(()) if grad is None else self.unit.flat(index, grad.detach())[piece]))
        if not parts:
            return
        dtype = functools.reduce(torch.promote_types, (values.dtype for _, values in parts))
        flat = zeros(self.held_numel, dtype if scale == 1 else torch.float32, self.unit.device)
        for mine, values in parts:
            flat[mine] = values if scale == 1 else values.float() * scale
        self.shard.add(flat)

    def _bring(self) -> Tensor:
        """Take this rank's slice of what ``param.grad`` is from its tier."""
        assert self.shard is not None
        by = self.spent if self.spent is not None else 1 / self.loss_scale()
        self.spent = None
        grad = self.shard.bring(self.unit.device)  # (in new memory, which will be used again instead)
        return grad if by == 1 else grad.float() * by

    def drop_gradient(self) -> None:
        """Forget the gradient; an update in flight does so at its end."""
        with self.lock:
            self.used.clear()
            self.shown.clear()
            self.spent = None
            task = self.underway
            if task is None or (task.handed_over and self.shard is not None and self.shard.sections[0].grads not in task.handed_over.values()):
                self._recycle()
            elif not task.handed_over:
                task.keep = False
        for param in self.unit.users:
            grad_gone(param)

    def zero_gradient(self, used: set[int]) -> None:
        """The gradients of these parameters become zeros, and there are no others."""
        assert self.shard is not None
        self.arrive()
        self.used |= used
        self.shard.add(zeros(self.held_numel, self.unit.dtype, self.unit.device))
        for index in used:
            grad_left(self.unit.user(index))

    def _recycle(self, task: Task | None = None) -> None:
        """Forget the gradient, or that which was handed over to an update."""
        if task is not None and task.handed_over:
            for grads in task.handed_over.values():
                self.recycle(self, grads.clear())
        elif self.shard is not None:
            self.recycle(self, self.shard.clear())

    # ---- values from outside -------------------------------------------------------------------------------------------------

    def note_versions(self) -> None:
        """The full parameters are what the shards are."""
        self.taken.clear()
        self.versions = self.unit.versions
        self.pointers = [param.data_ptr() for param in self.unit.params]

    @torch.no_grad()
    def _written(self) -> list[int]:
        """Numbers of the parameters that somebody but zk has written, in order.

        Those that were given other memory, or lie in it otherwise (``param.data = ...``), become views of ``full`` again, with their values.
        RuntimeError for one that has another dtype or shape, or is elsewhere.
        """
        unit, full = self.unit, self.full
        for index, user in unit.around.items():
            if user._local_tensor is not unit.params[index]:  # type: ignore[attr-defined]  # model.to(), say
                unit.params[index].data, user._local_tensor = user._local_tensor, unit.params[index]  # type: ignore[attr-defined]
        found, start, size = set[int](), full.data_ptr(), full.element_size()
        for index, param in enumerate(unit.params):
            offset, numel = self.layout.offsets[index], self.layout.numels[index]
            is_alike, strides = param.dtype == full.dtype and param.numel() == numel, strides_of(param.shape, unit.orders.get(index))
            if is_alike and (not numel or (param.data_ptr() == start + offset * size and param.stride() == strides)):
                continue
            if not is_alike or param.device != full.device:
                raise RuntimeError(
                    f"parameter {unit.names[index]!r} was moved or converted after ZeroOptimizer took it (model.to(), .half() or a new "
                    ".data); move the model first, then wrap it, and use dtype= to convert"
                )
            place = unit.shaped(index, full[self.layout.whole(index)])
            place.copy_(param.detach().clone())  # it may lie where it goes to
            param.data = place
            found.add(index)
        return sorted(found | self.taken | {i for i, pair in enumerate(zip(self.versions, unit.versions, strict=True)) if pair[0] != pair[1]})

    def is_changed(self) -> bool:
        """Check whether the full parameters differ from the shards. On all ranks."""
        if self.unit.versions != self.versions:
            return True
        if not self.taken:
            return False
        source = self.home.whole()
        same = torch.equal(self.full[self.held].to(source.device), source.to(self.full.dtype))
        self.home.release()
        return self.comm.ranks_with([not same]) != [0]  # what was written may lie in another rank's slice

    def written_since(self, versions: Sequence[int] | None) -> bool:
        """Tell if anybody but zk wrote parameters where they are: since zk did, or since they had these ``versions``."""
        if self.is_partitioned:
            return False  # what is written there is handed over by zk.gather
        with self.counting:
            return self.unit.versions != (self.versions if versions is None else versions)

    def watch(self) -> None:
        """Note from now on whether somebody shares the parameters' memory, and whose ``data`` are used where writes to them have to be found."""
        self.sharers = _use_count(self.full.untyped_storage()._cdata)
        if not self.is_partitioned and (self.shard is None or self.shard.has_copies):
            self.watches_data = True
            for param in self.unit.objects:
                redress(param)

    @property
    def is_shared(self) -> bool:
        """Check that somebody holds a tensor in the memory of full parameters (``data``, ``detach()``, a state_dict)."""
        return not self.is_partitioned and _use_count(self.full.untyped_storage()._cdata) > self.sharers

    def take_data(self, param: nn.Parameter) -> None:
        """Note that the ``data`` of a parameter are used, and may be written without a trace."""
        self.taken.add(next(index for index, own in enumerate(self.unit.params) if param is own or param is self.unit.user(index)))

    def adopt_writes(self) -> None:
        """Parameters that the user wrote since the last update (load_state_dict on the model, say) go into the master."""
        if self.is_partitioned:
            return
        written = self._written()
        self.digests = None if written else self.digests
        now = self.unit.versions
        if not self.is_shared:  # else they may be written again
            self.taken.clear()
        if self.shard is not None and written:
            self.shard.adopt([self.mine(index) for index in written])
        self.versions = now

    def keep_written(self, indices: Sequence[int]) -> None:
        """Parameters of a full unit were overwritten on every rank: the first rank's values stay, and masters follow."""
        self.digests = None
        if self.shard is not None:
            self.shard.drop_attempt()
        if self.is_partitioned:
            self._written()  # a new ``data``, say
        self.comm.broadcast(self.index, self.full)
        if self.is_partitioned:
            self._write_home()
            self.note_versions()
        if self.shard is not None:
            self.shard.adopt([self.mine(index) for index in indices])

    def _write_home(self) -> None:
        """Full parameters were written: they become what rests, rounded as that is."""
        if self.unit.is_widened:
            self.full.copy_(self.full.to(self.unit.dtype))
        self.home.write(self.full[self.held])

    def republish(self) -> None:
        """The slice was written from outside, and is where it rests: it becomes what all ranks use."""
        self.digests = None
        self.refresh()
        self.transfer.follow(self.publish())

    def rewritten(self) -> None:
        """All parameters have other values now, and masters agree with them."""
        torch.autograd.graph.increment_version(self.unit.users)
        if not self.is_partitioned:
            self.versions = self.unit.versions

    def overwrite(self, values: Mapping[int, Callable[[], Tensor]]) -> None:
        """Replace parameters, and their masters: number in the unit -> what makes its values. On all ranks, with equal values."""
        self.arrive()
        self.digests = None
        if self.shard is None:
            self.gather()
            for index, make in values.items():
                self.full[self.layout.whole(index)] = self.unit.flat(index, make())
            if self.is_partitioned:
                self._write_home()
            self.release()
            return
        self.adopt_writes()
        self.settle()
        for index, make in values.items():
            mine, piece = self.layout.part(index, self.held)
            self.shard.set_state("master", mine, self.unit.flat(index, make())[piece])
        self.republish()

    def whole_of(self, read: Callable[[slice], Tensor]) -> Tensor:
        """The whole flat buffer (layout.numel,) of something that each rank holds a slice of; a collective where there are several ranks."""
        mine = read(slice(0, self.held_numel))
        if mine.numel() == self.layout.numel:
            return mine
        full = torch.empty(self.layout.numel, dtype=mine.dtype, device=mine.device)
        self.comm.all_gather(self.index, full, mine.contiguous()).wait()
        return full

    def masters(self) -> dict[nn.Parameter, Tensor]:
        """Copies of the parameters in full precision, with what the user has written."""
        self.adopt_writes()
        self.gather()
        exact = self.whole_of(functools.partial(self.shard.get_state, "master")) if self.shard is not None else self.full
        return {param: self.unit.shaped(index, exact[self.layout.whole(index)]).clone() for index, param in enumerate(self.unit.params)}

    # ---- optimizer state -----------------------------------------------------------------------------------------------------

    def export_state(self, own_part: bool, copies: bool = False) -> dict[nn.Parameter, dict[str, Tensor]]:
        """torch's state of each parameter that was updated, in fp32, with the ``master`` of 16-bit ones. A collective unless ``own_part``.

        Without ``copies`` it may be the memory in which states rest. That of a DTensor is one, cut as it is, with all elements that data parallel
        ranks hold.
        """
        shard, state = self.shard, {index: self._counts(index) for index in sorted(self.steps)}
        if shard is None:
            return {}
        for name in (*shard.names, *(("master",) if shard.has_master else ())):
            read = functools.partial(shard.get_state, name, copies=copies)
            full = self.whole_of(read) if not own_part or self.unit.around else None
            for index, its in state.items():
                is_part = full is None or (own_part and index not in self.unit.around)
                its[name] = _apart(read(self.mine(index))) if is_part else self.unit.shown(index, full[self.layout.whole(index)])  # type: ignore[index]
        values, numbers = self.kept_states(own_part), shard.rule.numbers
        for index, its in state.items():
            kept, mine = self.kept_of(index), values.get(index, {})
            if own_part:
                none = {name: torch.empty(0, dtype=one.dtype) for name, one in kept.items()}
                its |= {name: mine[name].cpu().reshape(-1).clone() if name in mine else nothing for name, nothing in none.items()}
            else:
                its |= wrapped({name: numbers[name](value.item()) if name in numbers else value for name, value in mine.items()}, kept)
        return {self.unit.user(index): its for index, its in state.items()}

    def kept_states(self, own_part: bool) -> dict[int, dict[str, Tensor]]:
        """Copies of what is kept of whole parameters, by number and name; of those of all ranks, and so a collective, unless ``own_part``."""
        shard = self.shard
        if shard is None or shard.packing is None or shard.packing_of is None:
            return {}
        packings, rows = [shard.packing], [shard.packed()]
        if not own_part and not self.is_whole:
            packings = [shard.packing_of(rank) for rank in range(self.comm.shards)]
            padded = torch.zeros(max(1, *(packing.nbytes for packing in packings)), dtype=torch.uint8, device=rows[0].device)
            padded[: len(rows[0])] = rows[0]
            full = padded.new_empty(len(packings) * len(padded))
            self.comm.all_gather(self.index, full, padded).wait()
            rows = [*full.view(len(packings), -1)]
        return {index: packing.views(index, row, EVERYTHING) for packing, row in zip(packings, rows, strict=True) for index in packing.indices}

    def _counts(self, index: int) -> dict[str, Any]:
        """The state of one parameter that is no tensor of its elements."""
        assert self.shard is not None
        rule = self.shard.rule
        kept = rule.stored(self.scalars[index]) if index in self.scalars else rule.templates or {}  # (before the first update, to load a state into)
        return {"step": torch.tensor(self.steps.get(index, 0), dtype=torch.float32), **kept}

    def show_state(self, index: int, name: str) -> Tensor:
        """The state ``name`` of one parameter, as a tensor of the user's: what it becomes counts. On all ranks, but for ``step``."""
        shown = self.shown_state.setdefault(index, {})
        if name not in shown:
            assert self.shard is not None
            if name in self.number_names:
                shown[name] = self._counts(index)[name]
            elif name in self.kept_of(index):
                shown[name] = self.kept_states(own_part=False)[index][name].clone()
            else:
                read = functools.partial(self.shard.get_state, name)
                flat = read(self.mine(index)) if self.is_whole else self.whole_of(read)[self.layout.whole(index)]
                shown[name] = self.unit.shown(index, flat).clone()
        return shown[name]

    @property
    def number_names(self) -> tuple[str, ...]:
        """Names of the states that are no tensors of elements."""
        return tuple(dict.fromkeys(("step", *(self.shard.rule.templates or ())))) if self.shard is not None else ()

    def kept_of(self, index: int) -> Mapping[str, Kept]:
        """Describe what is kept of a parameter as a whole, by name."""
        return self.shard.packing.kept[index] if self.shard is not None and self.shard.packing is not None else {}

    def kept_in(self, index: int, name: str, fields: Mapping[str, Tensor], chunk: slice) -> Tensor:
        """One state of a whole parameter, from the ``fields`` of its chunk: flat; in the order of the parameter's elements where it has its shape."""
        assert self.shard is not None and self.shard.packing is not None
        value = self.shard.packing.views(index, fields[PACKED], chunk)[name]
        return self.unit.flat(index, value) if value.shape == self.unit.params[index].shape else value.reshape(-1)

    def state_names(self, index: int) -> tuple[str, ...]:
        """Names of the states of one parameter that are tensors."""
        return (*self.shard.names, *self.kept_of(index)) if self.shard is not None else ()

    def check_state_names(self, index: int, names: Iterable[str]) -> None:
        """KeyError for a name that is not one of this optimizer's states."""
        known = (*self.number_names, *self.state_names(index))
        for name in names:
            if name not in known:
                raise KeyError(
                    f"the state of {self.unit.names[index]!r} is {', '.join(known) or 'nothing, as it is frozen'}; got {name!r}: keep what is "
                    "your own in a dictionary of your own"
                )

    def replace_state(self, index: int, name: str, value: Any) -> None:
        """The state ``name`` of one parameter becomes what ``value`` is until ``keep_state``."""
        self.check_state_names(index, (name,))
        if value is None:  # torch's SGD begins so
            self.forget_state(index)
            return
        if self.shard is not None and self.shard.rule.templates is not None and index not in self.scalars:
            raise ValueError(
                f"{self.unit.names[index]!r} has no state before its first update, so {name!r} alone cannot be set; give all of it: "
                "optimizer.state[param] = {...}"
            )
        value = value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float32)
        kept = self.kept_of(index).get(name)
        shape = kept.shape if kept is not None else (self.unit.user(index) if is_dtensor(value) else self.unit.params[index]).shape
        if value.numel() != 1 if name in self.number_names else value.shape != shape:
            raise ValueError(f"{name!r} of {self.unit.names[index]!r} has shape {tuple(shape)}; got {tuple(value.shape)}")
        self.shown_state.setdefault(index, {})[name] = value
        self.steps.setdefault(index, int(name == "momentum_buffer"))  # which the first step makes where there is none

    def keep_state(self) -> None:
        """Put the states that were shown on their tier, with what the user has made of them."""
        assert self.shard is not None
        shown, self.shown_state = self.shown_state, {}
        for index, state in shown.items():
            mine, piece = self.layout.part(index, self.held)
            for name, value in state.items():
                if name == "step":
                    self.steps[index] = int(value)
                if name in self.number_names:
                    if name in self.scalars.get(index, {}):
                        self.scalars[index] = {**self.scalars[index], name: as_number(value)}
                elif name in self.kept_of(index):
                    self.shard.pack(index, name, value)
                else:
                    self.shard.set_state(name, mine, self.unit.flat(index, value.detach())[piece])

    def forget_state(self, index: int) -> None:
        """Parameter ``index`` becomes as before its first step; its master stays."""
        self.steps.pop(index, None)
        self.scalars.pop(index, None)
        self.shown_state.pop(index, None)
        if self.shard is not None:
            mine = self.mine(index)
            for name in self.shard.names:
                self.shard.set_state(name, mine, torch.zeros(mine.stop - mine.start))

    def import_plan(self, index: int, saved: Mapping[str, Any]) -> list[Callable[[], None]]:
        """Check that one parameter's saved state fits, and give the writes that load it."""
        shard, name, param = self.shard, self.unit.names[index], self.unit.params[index]
        assert shard is not None
        mine, piece = self.layout.part(index, self.held)
        for nested in [value for value in saved.values() if isinstance(value, dict)]:  # as bitsandbytes has it
            saved = {**saved, **nested}
        saved = flattened(saved)
        if not saved or ("momentum_buffer" in saved and saved["momentum_buffer"] is None):
            return [functools.partial(self.forget_state, index)]
        known, kept, numel = self.state_names(index), self.kept_of(index), mine.stop - mine.start
        unknown = saved.keys() - {*self.number_names, "master", *known}
        if unknown and not set(known) & saved.keys():
            raise ValueError(f"the state of {name!r} is {', '.join((*self.number_names, *known))}; got {', '.join(sorted(unknown))}")
        step = saved.get("step", 1)
        if isinstance(step, str) or not float(step) >= 0 or float(step) % 1:
            raise ValueError(f"the step of {name!r} is {step!r}, and no count of steps")
        writes: list[Callable[[], None]] = [lambda: self.steps.__setitem__(index, int(step))]
        if shard.rule.templates is not None:
            lacking = [key for key in shard.rule.templates if not isinstance(saved.get(key), (int, float, Tensor))]
            if lacking:
                raise ValueError(f"the state of {name!r} has no {', '.join(map(repr, lacking))}, a number; it has {sorted(saved)}")
            scalars = {key: as_number(saved[key]) for key in shard.rule.templates}
            writes.append(functools.partial(self.scalars.__setitem__, index, scalars))
        for key in (*known, *(("master",) if shard.has_master else ())):
            value = saved.get(key)
            if value is None and key in ("master", "momentum_buffer"):  # torch keeps None there before the first step
                continue
            if value is None:
                raise ValueError(f"the state of {name!r} has no {key!r}; it has {sorted(saved)}")
            if hasattr(value, "full_tensor"):  # a DTensor
                user = self.unit.user(index)
                value = local_of(value, user) if is_dtensor(user) and value.shape == user.shape else value.full_tensor()
            if key in kept:
                value = torch.as_tensor(value, dtype=None if isinstance(value, Tensor) else kept[key].dtype)
                here = kept[key].numel if shard.packing is None or index in shard.packing.offsets else 0  # elements on this rank
                is_alike = value.dtype.is_floating_point == kept[key].dtype.is_floating_point and not value.is_meta
                if not is_alike or (tuple(value.shape) != kept[key].shape and tuple(value.shape) != (here,)):
                    raise ValueError(
                        f"{key!r} of {name!r} is {value.dtype} of shape {tuple(value.shape)}, and this optimizer keeps {kept[key].dtype} of shape "
                        f"{kept[key].shape}"
                    )
                writes.append(functools.partial(shard.pack, index, key, value.detach()))
                continue
            if value.is_meta or not value.is_floating_point():
                raise ValueError(f"{key!r} of {name!r} is {value.dtype} on {value.device}; real floating point values are needed, in memory")
            if tuple(value.shape) == tuple(param.shape):
                value = self.unit.flat(index, value.detach())[piece]
            elif tuple(value.shape) != (numel,):
                raise ValueError(
                    f"{key!r} of {name!r} has shape {tuple(value.shape)}; this parameter is {tuple(param.shape)} and this rank holds "
                    f"{numel} elements of it"
                )
            writes.append(functools.partial(shard.set_state, key, mine, value))
        return writes


def _apart(values: Tensor) -> Tensor:
    """``values`` (n,) fp32 in host memory, as a storage of their own: torch.save writes the whole storage of a tensor."""
    return torch.from_numpy(values.cpu().numpy())
