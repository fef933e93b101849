"""Held: one unit, all that zk keeps for it, and what is done to that unit alone."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from zk.events import COMPLETED, Awaited, Event, Ticket
from zk.memory import zeros
from zk.offload.pipeline import Run, Task
from zk.offload.state import OptimizerShard
from zk.offload.tiers import Tier
from zk.offload.transfer import Transfer
from zk.owners import OWNERS
from zk.parallel.comm import Group, Solo
from zk.parallel.grads import UnitGrads
from zk.parallel.layout import Layout
from zk.parallel.partitioned import PartitionedParams
from zk.parallel.released import grad_gone, grad_left, mark, unmark, watch_data
from zk.parallel.replicated import ReplicatedParams, adopt_replaced
from zk.timeline import phase
from zk.units import Unit

if TYPE_CHECKING:
    from zk.optimizer import ZeroOptimizer


def owner_of(param: Tensor) -> ZeroOptimizer | None:
    """The ZeroOptimizer that holds ``param``."""
    reference: weakref.ref[ZeroOptimizer] | None = OWNERS.get(param)
    return reference() if reference is not None else None


@dataclasses.dataclass(slots=True, weakref_slot=True)
class Held:
    """One unit and everything zk keeps for it. Frozen units have parameters only."""

    unit: Unit
    layout: Layout
    comm: Solo | Group
    params: ReplicatedParams | PartitionedParams
    param_tier: Tier
    transfer: Transfer
    shard: OptimizerShard | None = None
    grads: UnitGrads | None = None
    used: set[int] = dataclasses.field(default_factory=set)  # parameters with a gradient, on any rank, since the last step
    shown: dict[int, Tensor | None] = dataclasses.field(default_factory=dict)  # gradients that the user looked at, or replaced, or dropped
    shown_state: dict[int, dict[str, Tensor]] = dataclasses.field(default_factory=dict)  # of the optimizer, which the user looked at
    spent: float | None = None  # the gradient was used in a step, and is what was stored times this
    loss_scale: Callable[[], float] = lambda: 1.0  # of what backward makes now
    clip: Callable[[], None] = lambda: None  # clips what is there, if that was asked for and has not been done
    steps: dict[int, int] = dataclasses.field(default_factory=dict)  # of the parameters that were updated: how often
    versions: list[int] = dataclasses.field(default_factory=list)  # of the parameters, when zk last wrote them
    taken: set[int] = dataclasses.field(default_factory=set)  # parameters whose ``data`` somebody may have written
    sharers: int = 0  # tensors in the memory of full parameters, of zk's own
    recycle: Callable[[UnitGrads, Tensor | None], None] | None = None  # takes memory of gradients back
    underway: Task | None = None  # an update that goes on in the background
    lock: threading.RLock = dataclasses.field(default_factory=threading.RLock)  # several threads may want the parameters at once
    counting: threading.Lock = dataclasses.field(default_factory=threading.Lock)  # while versions change; never held while waiting

    def mine(self, index: int) -> slice:
        """The elements of this rank's slice that are of parameter ``index``."""
        return self.layout.part(index, self.params.held)[0]

    # ---- the step ------------------------------------------------------------------------------------------------------------

    def count_step(self) -> None:
        """The parameters in use are about to be updated."""
        for index in self.used:
            self.steps[index] = self.steps.get(index, 0) + 1

    def runs(self, group_of: Mapping[nn.Parameter, Mapping[str, Any]]) -> Iterator[Run]:
        """Neighbours of one group and step count, merged; parameters without a gradient are left out, as torch leaves them alone."""
        run: Run | None = None
        for index, param in enumerate(self.unit.params):
            part = self.mine(index)
            if index in self.used and part.stop > part.start:
                group, step = group_of[param], self.steps[index]
                if run is not None and run[1] is group and run[2] == step:
                    run = slice(run[0].start, part.stop), group, step
                    continue
                if run is not None:
                    yield run
                run = part, group, step
            elif run is not None and index not in self.used:
                yield run
                run = None
        if run is not None:
            yield run

    def updated(self) -> None:
        """The parameters in use have new values, as autograd should know."""
        changed = [self.unit.params[index] for index in self.used]
        with self.counting:
            torch.autograd.graph.increment_version(changed)
            for index in self.used:
                self.versions[index] = self.unit.params[index]._version

    def publish(self, uploaded: Event, mark: Event | None = None) -> Awaited:
        """The updated slice becomes what all ranks use; returns what compute must follow. The collective comes after all of compute so far."""
        if isinstance(self.params, PartitionedParams) or self.params.is_whole:
            return uploaded
        self.transfer.follow(uploaded)
        return self.params.publish()

    def publish_beside(self, comm: Solo | Group, uploaded: Event, mark: Event | None) -> Event:
        """The same, beside compute, over ranks' connections of its own: after ``mark``, as for Transfer.

        The slice may have been updated by compute itself, and compute may still read what the collective overwrites.
        """
        if isinstance(self.params, PartitionedParams) or self.params.is_whole:
            return uploaded
        with self.transfer.beside(mark) as reached:
            comm.all_gather(self.params.index, self.params.full, self.params.shard).wait()
            return reached()

    def begin(self, task: Task) -> None:
        """The update of this unit has been handed over: whoever uses its parameters waits for it."""
        with self.lock:
            self.underway = task
            if isinstance(self.params, ReplicatedParams):
                for param in self.unit.params:
                    mark(param, functools.partial(_arrive, weakref.ref(self), weakref.ref(param), task.done))
            elif self.params.pins:
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
                self.spent = task.grad_scale
            if isinstance(self.params, PartitionedParams):
                self.params.publish()

    def forget_update(self) -> None:
        """The update in flight has ended, one way or the other."""
        with self.lock:
            task, self.underway = self.underway, None
            if isinstance(self.params, ReplicatedParams):
                for param in self.unit.params:
                    unmark(param)
            if task is not None and not task.keep:
                self._recycle()

    def updating(self, wait: bool) -> bool:
        """Tell if an update is in flight, after ``wait``ing for it if asked to."""
        if wait:
            self.arrive()
        return self.underway is not None and not self.underway.done.done

    # ---- the gradient between backward and zero_grad ------------------------------------------------------------------------

    def take_in(self, grad: Tensor, stats: Tensor | None) -> Event | None:
        """Add a reduced gradient, as OptimizerShard.add does, to what ``param.grad`` is."""
        assert self.shard is not None
        self.clip()
        self.renew()
        return self.shard.add(grad, stats)

    def bring_back(self) -> None:
        """Bring every gradient into ``shown``. On all ranks."""
        self.arrive()
        mine = self._bring()
        full = self.full(lambda _: mine)
        for index in self.used - self.shown.keys():
            self.shown[index] = self.unit.shaped(index, full[self.layout.whole(index)]).clone()

    def only_here(self) -> bool:
        """Check that nobody else has what was brought back, or a part of its memory."""
        for index in self.shown:
            grad = self.shown[index]
            if grad is None:
                continue
            in_python, in_torch = sys.getrefcount(grad), grad._use_count()  # type: ignore[attr-defined]
            memory = torch._C._storage_Use_Count(grad.untyped_storage()._cdata)  # type: ignore[attr-defined]
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
        rest = self._bring() if self.used - shown.keys() else None
        self.used -= {index for index, grad in shown.items() if grad is None}
        parts = {}
        for index in self.used:
            mine, piece = self.layout.part(index, self.params.held)
            grad = shown.get(index)
            if grad is not None:
                parts[index] = mine, self.unit.flat(index, grad.detach())[piece]
            elif rest is not None:
                parts[index] = mine, rest[mine]
        if not parts:
            return
        dtype = functools.reduce(torch.promote_types, (values.dtype for _, values in parts.values()))
        flat = zeros(self.params.held.stop - self.params.held.start, dtype if scale == 1 else torch.float32, self.unit.device)
        for mine, values in parts.values():
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
            if self.underway is not None:
                self.underway.keep = False
            else:
                self._recycle()
        for param in self.unit.params:
            grad_gone(param)

    def zero_gradient(self, used: set[int]) -> None:
        """The gradients of these parameters become zeros, and there are no others."""
        assert self.shard is not None
        self.arrive()
        self.used |= used
        self.shard.add(zeros(self.params.held.stop - self.params.held.start, self.unit.dtype, self.unit.device))
        for index in used:
            grad_left(self.unit.params[index])

    def _recycle(self) -> None:
        if self.shard is not None and self.recycle is not None and self.grads is not None:
            self.recycle(self.grads, self.shard.clear())

    # ---- values from outside -------------------------------------------------------------------------------------------------

    def written_since(self, versions: Sequence[int] | None) -> bool:
        """Tell if anybody but zk wrote parameters where they are: since zk did, or since they had these ``versions``."""
        if isinstance(self.params, PartitionedParams):
            return False  # what is written there is handed over by zk.gather
        with self.counting:
            return [param._version for param in self.unit.params] != (self.versions if versions is None else versions)

    def watch(self) -> None:
        """Note from now on whether somebody shares the parameters' memory, and whose ``data`` are used where writes to them have to be found."""
        self.sharers = self._count_sharers()
        if isinstance(self.params, ReplicatedParams) and self.shard is not None and self.shard.has_copies:
            for param in self.unit.params:
                watch_data(param, self._take_data)

    def _count_sharers(self) -> int:
        return torch._C._storage_Use_Count(self.params.full.untyped_storage()._cdata)  # type: ignore[attr-defined, no-any-return]

    @property
    def is_shared(self) -> bool:
        """Check that somebody holds a tensor in the memory of full parameters (``data``, ``detach()``, a state_dict)."""
        return isinstance(self.params, ReplicatedParams) and self._count_sharers() > self.sharers

    def _take_data(self, param: nn.Parameter) -> None:
        self.taken.add(next(index for index, other in enumerate(self.unit.params) if other is param))

    def adopt_writes(self) -> None:
        """Parameters that the user wrote since the last update (load_state_dict on the model, say) go into the master."""
        if isinstance(self.params, PartitionedParams):
            return
        with torch.no_grad():
            written = set(adopt_replaced(self.unit, self.layout, self.params.full))
        now = [param._version for param in self.unit.params]
        written |= {index for index, version in enumerate(now) if version != self.versions[index]} | self.taken
        if not self.is_shared:  # else they may be written again
            self.taken.clear()
        if self.shard is not None:
            self.shard.adopt([self.mine(index) for index in sorted(written)])
        self.versions = now

    def keep_written(self, indices: Sequence[int]) -> None:
        """Parameters of a full unit were overwritten on every rank: the first rank's values stay, and masters follow."""
        self.comm.broadcast(self.params.index, self.params.full)
        if isinstance(self.params, PartitionedParams):
            self.params.home.write(self.params.full[self.params.held])
            self.params.note_versions()
        if self.shard is not None:
            self.shard.adopt([self.mine(index) for index in indices])

    def republish(self) -> None:
        """The slice was written from outside, and is where it rests: it becomes what all ranks use."""
        self.transfer.follow(self.params.publish() or COMPLETED)

    def rewritten(self) -> None:
        """All parameters have other values now, and masters agree with them."""
        torch.autograd.graph.increment_version(self.unit.params)
        self.versions = [param._version for param in self.unit.params]

    def overwrite(self, values: Mapping[int, Callable[[], Tensor]]) -> None:
        """Replace parameters, and their masters: number in the unit -> what makes its values. On all ranks, with equal values."""
        self.arrive()
        if self.shard is None:
            self.params.pin()
            for index, make in values.items():
                self.params.full[self.layout.whole(index)] = self.unit.flat(index, make())
            if isinstance(self.params, PartitionedParams):
                self.params.home.write(self.params.full[self.params.held])
            self.params.unpin()
            return
        self.adopt_writes()
        self.params.settle()
        for index, make in values.items():
            mine, piece = self.layout.part(index, self.params.held)
            self.shard.set_master(mine, self.unit.flat(index, make())[piece])
        self.republish()

    # ---- optimizer state -----------------------------------------------------------------------------------------------------

    def full(self, read: Callable[[slice], Tensor]) -> Tensor:
        """The whole flat buffer (layout.numel,) of something that each rank holds a slice of; a collective where there are several ranks."""
        mine = read(slice(0, self.params.held.stop - self.params.held.start))
        if mine.numel() == self.layout.numel:
            return mine
        full = torch.empty(self.layout.numel, dtype=mine.dtype, device=mine.device)
        self.comm.all_gather(self.params.index, full, mine.contiguous()).wait()
        return full

    def masters(self) -> dict[nn.Parameter, Tensor]:
        """Copies of the parameters in full precision, with what the user has written."""
        self.adopt_writes()
        self.params.pin()
        exact = self.full(self.shard.get_master) if self.shard is not None else self.params.full
        return {param: self.unit.shaped(index, exact[self.layout.whole(index)]).clone() for index, param in enumerate(self.unit.params)}

    def export_state(self, own_part: bool) -> dict[nn.Parameter, dict[str, Tensor]]:
        """torch's state of each parameter that was updated, in fp32, with the ``master`` of 16-bit ones. A collective unless ``own_part``."""
        state: dict[nn.Parameter, dict[str, Tensor]] = {}
        if self.shard is None:
            return state
        readers: dict[str, Callable[[slice], Tensor]] = {name: functools.partial(self.shard.get_state, name) for name in self.shard.names}
        if self.shard.has_master:
            readers["master"] = self.shard.get_master
        if own_part:
            from zk.checkpoint.dcp import part_of  # with all of DTensor
        for name, read in readers.items():
            full = None if own_part else self.full(read)
            for index, step in sorted(self.steps.items()):
                param = self.unit.params[index]
                entry = state.setdefault(param, {"step": torch.tensor(float(step))})
                entry[name] = part_of(self, index, read) if full is None else self.unit.shaped(index, full[self.layout.whole(index)])
        if not readers:
            for index, step in sorted(self.steps.items()):
                state[self.unit.params[index]] = {"step": torch.tensor(float(step))}
        return state

    def show_state(self, index: int, name: str) -> Tensor:
        """The state ``name`` of one parameter, as a tensor of the user's: what it becomes counts. On all ranks, but for ``step``."""
        shown = self.shown_state.setdefault(index, {})
        if name not in shown:
            assert self.shard is not None
            read = functools.partial(self.shard.get_state, name)
            if name == "step":
                shown[name] = torch.tensor(float(self.steps.get(index, 0)))
            elif self.params.held.stop - self.params.held.start == self.layout.numel:
                shown[name] = self.unit.shaped(index, read(self.mine(index))).clone()
            else:
                shown[name] = self.unit.shaped(index, self.full(read)[self.layout.whole(index)]).clone()
        return shown[name]

    def check_state_names(self, index: int, names: Iterable[str]) -> None:
        """KeyError for a name that is not one of this optimizer's states."""
        known = ("step", *self.shard.names) if self.shard is not None else ()
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
        value = value if isinstance(value, Tensor) else torch.tensor(float(value))
        if value.numel() != 1 if name == "step" else value.shape != self.unit.params[index].shape:
            raise ValueError(f"{name!r} of {self.unit.names[index]!r} has shape {tuple(self.unit.params[index].shape)}; got {tuple(value.shape)}")
        self.shown_state.setdefault(index, {})[name] = value
        self.steps.setdefault(index, int(name == "momentum_buffer"))  # which the first step makes where there is none

    def keep_state(self) -> None:
        """Put the states that were shown on their tier, with what the user has made of them."""
        shown, self.shown_state = self.shown_state, {}
        for index, state in shown.items():
            mine, piece = self.layout.part(index, self.params.held)
            for name, value in state.items():
                if name == "step":
                    self.steps[index] = int(value)
                elif self.shard is not None:
                    self.shard.set_state(name, mine, self.unit.flat(index, value.detach())[piece])

    def forget_state(self, index: int) -> None:
        """Parameter ``index`` becomes as before its first step; its master stays."""
        self.steps.pop(index, None)
        self.shown_state.pop(index, None)
        if self.shard is not None:
            mine = self.mine(index)
            for name in self.shard.names:
                self.shard.set_state(name, mine, torch.zeros(mine.stop - mine.start))

    def import_plan(self, index: int, saved: Mapping[str, Any]) -> list[Callable[[], None]]:
        """Check that one parameter's saved state fits, and give the writes that load it."""
        shard, name, param = self.shard, self.unit.names[index], self.unit.params[index]
        if shard is None:
            raise ValueError(f"the state holds entries for {name!r}, which is frozen here")
        mine, piece = self.layout.part(index, self.params.held)
        if not saved or ("momentum_buffer" in saved and saved["momentum_buffer"] is None):
            return [functools.partial(self.forget_state, index)]
        unknown = saved.keys() - {"step", "master", *shard.names}
        if unknown and not set(shard.names) & saved.keys():
            raise ValueError(f"the state of {name!r} is {', '.join(('step', *shard.names))}; got {', '.join(sorted(unknown))}")
        step = saved.get("step", 1)
        if isinstance(step, str) or not float(step) >= 0 or float(step) % 1:
            raise ValueError(f"the step of {name!r} is {step!r}, and no count of steps")
        writes: list[Callable[[], None]] = [lambda: self.steps.__setitem__(index, int(step))]
        for key in [*shard.names, "master"]:
            value = saved.get(key)
            if key == "master":
                if value is None or not shard.has_master:
                    continue
            elif value is None:
                if key == "momentum_buffer":
                    continue  # torch keeps None there before the first step
                raise ValueError(f"the state of {name!r} has no {key!r}; it has {sorted(saved)}")
            if hasattr(value, "full_tensor"):  # a DTensor
                from zk.checkpoint.dcp import values_of

                value = values_of(value, self, index)
            if value.is_meta or not value.is_floating_point():
                raise ValueError(f"{key!r} of {name!r} is {value.dtype} on {value.device}; real floating point values are needed, in memory")
            if tuple(value.shape) == tuple(param.shape):
                value = self.unit.flat(index, value.detach())[piece]
            elif tuple(value.shape) != (mine.stop - mine.start,):
                raise ValueError(
                    f"{key!r} of {name!r} has shape {tuple(value.shape)}; this parameter is {tuple(param.shape)} and this rank holds "
                    f"{mine.stop - mine.start} elements of it"
                )
            if key == "master":
                writes.append(lambda value=value: shard.set_master(mine, value))  # type: ignore[misc]
            else:
                writes.append(lambda key=key, value=value: shard.set_state(key, mine, value))  # type: ignore[misc]
        return writes


def _arrive(reference: weakref.ref[Held], param: weakref.ref[nn.Parameter], done: Ticket) -> None:
    held, kept = reference(), param()
    if held is not None:
        held.arrive()
        return
    done.wait()  # the optimizer is gone; what went wrong in its last update is not
    if kept is not None:
        unmark(kept)
