"""Parameters that exist only while in use (stage 3): gather -> compute -> release.

One ladder: PartitionedParams holds one unit and its state; Partition holds the model's hooks and decides when each unit is needed.
A forward of a unit's module gathers it before and releases it after. In backward there are two signals. Autograd unpacks a saved parameter:
gather its unit, and ask for the next. The gradient of a module's inputs is complete: release. So no order of backward can meet memory that
was released, and a unit that backward does not read (an embedding) is not gathered for it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import checkpoint
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from zk.events import COMPLETED, Awaited, Event
from zk.hooks import Hook, weakly
from zk.memory import Lease
from zk.offload.spill import FileParams
from zk.offload.tiers import ResidentFields
from zk.offload.transfer import Transfer
from zk.parallel.comm import Group, Solo
from zk.parallel.layout import Layout
from zk.parallel.prefetch import Prefetcher
from zk.parallel.released import Released, Watched, stand_in, watch_data, watch_use
from zk.parallel.replicated import adopt_replaced, view_params
from zk.units import Unit


class State(enum.Enum):
    RELEASED = "only the shard exists; the parameters have no memory"
    GATHERING = "memory is there and a collective is filling it"
    GATHERED = "the parameters are full and readable"


class PartitionedParams:
    """Stage 3: between uses only this rank's shard exists.

    Args:
        unit, index, layout, comm: as for ReplicatedParams.
        home: where this rank's slice rests between uses.
        uploads: brings the slice from there to the device; None where it rests in the device's memory.
        on_use: called when a released parameter is used; gathers or raises.
        in_place: this rank's slice is everything, and rests where it computes: it has the same rules, and nothing is moved.
    """

    def __init__(
        self,
        unit: Unit,
        index: int,
        layout: Layout,
        comm: Solo | Group,
        home: ResidentFields | FileParams,
        uploads: Transfer | None,
        on_use: Callable[[PartitionedParams], None],
        in_place: bool = False,
    ) -> None:
        self.unit, self.index, self.layout, self.comm = unit, index, layout, comm
        self.held = layout.shard(comm.rank)
        self.home, self.uploads = home, uploads
        # whether the slice is being updated in the background, at the end of which it is waited for if asked to
        self.updating: Callable[[bool], bool] = lambda wait: False
        self.uploaded: Event = COMPLETED
        self.lease = None if in_place else Lease(layout.numel, unit.dtype, unit.device)
        self.full = home.whole() if self.lease is None else self.lease.tensor
        view_params(unit, layout, self.full)
        self.state, self.pins, self.on_use = State.GATHERED, 0, on_use
        self.on_write: Callable[[PartitionedParams, list[int]], None] = lambda *_: None
        self.versions: list[int] = []  # of the parameters, when they became full
        self.data_taken = False  # and may have been written without a trace
        self.pointers: list[int] = []  # to their memory
        on_use = functools.partial(_used, weakref.ref(self))  # (weak: a parameter must not keep its own unit alive)
        for param in unit.params:
            watch_data(param, self._take_data)
            watch_use(param, on_use)
        self.known: dict[int, PartitionedParams] = {}  # whose memory is whose
        self.pending: Awaited | None = None
        self.depth = 0  # forwards in progress
        # a graph that create_graph=True has made, or a collective that was interrupted, may use the full memory after the release
        self.is_borrowed = False
        self._free()

    def _free(self) -> None:
        if self.is_borrowed and self.lease is not None:  # the memory goes with the borrower
            self.lease, self.is_borrowed = Lease(self.layout.numel, self.unit.dtype, self.unit.device), False
            self.known.pop(self.full.untyped_storage()._cdata, None)
            self.full = self.lease.tensor
            self.known[self.full.untyped_storage()._cdata] = self
            stand_in(self.unit.params, Watched)  # a released parameter would be gathered before it gets its new memory
            view_params(self.unit, self.layout, self.full)
        if self.lease is not None:
            self.lease.free()
        stand_in(self.unit.params, Released)
        self.state = State.RELEASED

    def fetch(self) -> None:
        """Ask for this rank's slice, so that a later ``start`` need not wait for it."""
        if self.state is State.RELEASED and not self.updating(False):
            self.home.prefetch()

    def start(self) -> None:
        """RELEASED -> GATHERING."""
        if self.state is not State.RELEASED:
            return
        self.updating(True)
        source = self.home.whole()
        if self.lease is not None:
            self.lease.allocate()
            try:
                self._fill(source)
            except BaseException:  # other ranks are elsewhere, or gone
                self._undo()
                raise
        self.state = State.GATHERING

    def _undo(self) -> None:
        """GATHERING -> RELEASED, without the full parameters."""
        self.pending = None
        self.home.release(self.uploaded)
        self.is_borrowed = True
        self._free()

    def _fill(self, source: Tensor) -> None:
        if self.uploads is None:
            self.pending = self.comm.all_gather(self.index, self.full, source)
        else:
            mine = self.full[self.held]
            self.uploaded = self.uploads.upload(mine, source)
            if self.comm.world > 1:
                with self.uploads.beside():
                    self.pending = self.comm.all_gather(self.index, self.full, mine)

    def gather(self) -> None:
        """Any state -> GATHERED, waiting for the collective."""
        self.start()
        if self.state is State.GATHERING:
            if self.uploads is not None:
                self.uploads.follow(self.uploaded)
            pending, self.pending = self.pending, None
            if pending is not None:
                try:
                    pending.wait()
                except BaseException:
                    self._undo()
                    raise
            self.home.release(self.uploaded)
            stand_in(self.unit.params, Watched)
            self.note_versions()
            self.state = State.GATHERED

    def _take_data(self, _param: nn.Parameter) -> None:
        self.data_taken = True

    def note_versions(self) -> None:
        """The full parameters are what the shards are."""
        self.data_taken = False
        self.versions = [param._version for param in self.unit.params]
        self.pointers = [param.data_ptr() for param in self.unit.params]

    def is_changed(self) -> bool:
        """Check whether the full parameters differ from the shards. On all ranks."""
        if any(param._version != version for param, version in zip(self.unit.params, self.versions, strict=True)):
            return True
        if not self.data_taken:
            return False
        source = self.home.whole()
        same = torch.equal(self.full[self.held].to(source.device), source)
        self.home.release()
        differ = torch.tensor([float(not same)])  # here; what was written may lie in another rank's slice
        self.comm.all_reduce(differ)
        return bool(differ.item())

    def settle(self) -> None:
        """GATHERING -> GATHERED: nobody reads the shard any more, so it may be written."""
        if self.state is State.GATHERING:
            self.gather()

    def release(self) -> None:
        """Any state -> RELEASED, unless somebody holds it. The shard is what remains, with what forward has written."""
        if self.state is State.RELEASED or self.pins:
            return
        self.gather()
        params = self.unit.params
        if self.data_taken or [param._version for param in params] != self.versions or [param.data_ptr() for param in params] != self.pointers:
            with torch.no_grad():
                written = set(adopt_replaced(self.unit, self.layout, self.full))
            written |= {index for index, param in enumerate(params) if self.data_taken or param._version != self.versions[index]}
            self.on_write(self, sorted(written))
        self._free()

    def pin(self) -> None:
        """Gather and keep until ``unpin``."""
        self.gather()
        self.pins += 1

    def unpin(self) -> None:
        """Undo one ``pin``; the last one releases."""
        self.pins -= 1
        if not self.depth:
            self.release()

    def publish(self) -> None:
        """The shard was updated: a full copy that somebody holds is made current."""
        if self.state is not State.RELEASED:
            pins, self.pins = self.pins, 0
            self.gather()
            self._free()
            self.pins = pins
            if pins:
                self.gather()

    @property
    def nbytes(self) -> dict[str, int]:
        return {"param": self.home.nbytes("param"), "gathered": 0 if self.state is State.RELEASED or self.lease is None else self.full.nbytes}


def _used(reference: weakref.ref[PartitionedParams]) -> None:
    params = reference()
    if params is None:
        raise RuntimeError("this parameter was partitioned by a ZeroOptimizer that is gone, and its values too; keep the optimizer with its model")
    params.on_use(params)


_FOLLOWED = (torch._C._functorch.TransformType.Vmap, torch._C._functorch.TransformType.Functionalize)


def _refuse_transforms() -> None:
    for interpreter in torch._C._functorch.get_interpreter_stack() or ():
        if interpreter.key() not in _FOLLOWED:
            raise RuntimeError(
                "a model that stage 3 partitions was called within torch.func.grad, vjp, jvp, jacrev, jacfwd or hessian, whose derivatives cannot "
                "be followed to the parameters; use torch.autograd.grad(..., create_graph=True), or stage 2"
            )


def _on_grads(tensors: Sequence[Tensor], call: Callable[..., None]) -> None:
    """Call ``call`` in each backward when the gradients of all ``tensors`` have come."""
    if len(tensors) == 1:  # the usual case; torch's hook for several costs many times as much
        tensors[0].register_hook(call)
    else:
        torch.autograd.graph.register_multi_grad_hook(tensors, call)


def _tensors(value: Any) -> list[Tensor]:
    """Every tensor in nested outputs: containers that torch knows, and dataclasses."""
    found = []
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            found += _tensors([getattr(leaf, field.name) for field in dataclasses.fields(leaf)])
    return found


def state_dict_hooks(
    units: list[PartitionedParams], by_storage: Mapping[int, PartitionedParams], written: Callable[[PartitionedParams, list[int]], None]
) -> list[RemovableHandle]:
    """Make ``state_dict()`` and ``load_state_dict()`` of the model and its parts work, on all ranks: each unit is gathered meanwhile.

    What ``state_dict()`` returns is a copy; ``written(params, indices)`` keeps what was loaded.
    """
    owners: dict[nn.Module, list[tuple[PartitionedParams, list[int]]]] = {}
    for params in units:
        for anchor in params.unit.anchors:
            for module in anchor.modules():
                own = [index for index, param in enumerate(params.unit.params) if any(param is p for p in module._parameters.values())]
                if own and not any(other is params for other, _ in owners.get(module, ())):
                    owners.setdefault(module, []).append((params, own))

    def gather(module: nn.Module, *_: Any) -> None:
        for params, _own in owners[module]:
            params.pin()

    def copy(module: nn.Module, state: dict[str, Any], *_: Any) -> None:
        for key, value in state.items():
            if isinstance(value, Tensor) and value.untyped_storage()._cdata in by_storage:
                state[key] = value.detach().clone()
        for params, _own in owners[module]:
            params.unpin()

    def keep(module: nn.Module, *_: Any) -> None:
        for params, own in owners[module]:
            written(params, own)
            params.unpin()

    before, copied, kept = Hook(gather), Hook(copy), Hook(keep)
    handles: list[RemovableHandle] = []
    for module in owners:
        handles.append(module.register_state_dict_pre_hook(before))
        handles.append(module.register_state_dict_post_hook(copied))
        handles.append(module.register_load_state_dict_pre_hook(before))
        handles.append(module.register_load_state_dict_post_hook(kept))
    return handles


class Partition:
    """Watches the model run and keeps the right units gathered.

    Args:
        model: the module that was given to ZeroOptimizer.
        ahead: units to gather ahead of use.
        written: called with a held unit of which some parameters (by number) were overwritten on every rank; makes that last.
    """

    def __init__(self, model: nn.Module, ahead: int, written: Callable[[PartitionedParams, list[int]], None]) -> None:
        self.model, self.ahead, self.written = model, ahead, written
        self.params: list[PartitionedParams] = []
        self.by_storage: dict[int, PartitionedParams] = {}
        self.prefetcher = Prefetcher(self._ask, self._fetch, ahead)
        self.asked: list[PartitionedParams] = []  # ahead of use, oldest first
        self.by_index: dict[int, PartitionedParams] = {}
        self.by_module: dict[nn.Module, list[PartitionedParams]] = {}  # what a forward of the module uses
        self.handles: list[RemovableHandle] = []
        self.entered: list[nn.Module] = []  # modules whose forward is in progress
        self.thread = 0  # in which they are
        self.task = -1  # the backward in progress
        self.makes_graph = False  # which it is with create_graph=True
        self.saved_hooks: contextlib.AbstractContextManager[Any] | None = None
        self.below: tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None = None  # the hooks on saved tensors around them
        self.closed = False

    # ---- wiring --------------------------------------------------------------------------------------------------------------

    def add(self, params: PartitionedParams) -> None:
        """Watch one more unit."""
        self.params.append(params)
        params.known, params.on_write = self.by_storage, self.written
        if params.lease is not None:
            self.by_storage[params.full.untyped_storage()._cdata] = params
        self.by_index[params.index] = params

    def attach(self) -> None:
        """Put hooks on the modules; again after ``add``."""
        self.detach()
        self.handles += state_dict_hooks(self.params, self.by_storage, self.written)
        self.by_module = {self.model: []}
        for params in self.params:
            for anchor in params.unit.anchors:
                self.by_module.setdefault(anchor, []).append(params)
        before, after = Hook(self._before), Hook(self._after)
        for module in self.by_module:
            self.handles.append(module.register_forward_pre_hook(before, with_kwargs=True, prepend=True))
            self.handles.append(module.register_forward_hook(after, always_call=True))

    def detach(self) -> None:
        """Remove all hooks."""
        for handle in self.handles:
            handle.remove()
        self.handles.clear()

    def _ask(self, index: int) -> None:
        """Start to gather a unit. Of what was asked for and has not been used when its turn was over, the pass has taken another way."""
        params = self.by_index[index]
        if params.state is not State.RELEASED:
            return
        self.asked = [other for other in self.asked if other.state is State.GATHERING]
        if len(self.asked) > self.ahead:  # (one more is the unit that is being used)
            self.asked.pop(0).release()
        params.start()
        self.asked.append(params)

    def _fetch(self, index: int) -> None:
        self.by_index[index].fetch()

    # ---- forward -------------------------------------------------------------------------------------------------------------

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        in_backward = torch._C._current_graph_task_id() != -1
        if not self.entered:
            self.thread = threading.get_ident()
        elif self.thread != threading.get_ident():
            raise RuntimeError(
                "two threads call the model at once, and at stage 3 one would release what the other computes with; call it in one thread after "
                "the other, or use stage 2"
            )
        if not self.entered and not in_backward:
            if self.task != -1:  # an error ended the last backward
                self.reset()
                self.prefetcher.begin("train")
            mode = "train" if torch.is_grad_enabled() else "infer"
            if mode == "infer" or self.prefetcher.mode != mode:
                self.prefetcher.begin(mode)
            _refuse_transforms()
            if self.by_storage:  # there is memory that goes
                self.below = torch._C._autograd._top_saved_tensors_default_hooks(True)
                self.saved_hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
                self.saved_hooks.__enter__()
        self.entered.append(module)
        units = self.by_module[module]
        for params in units:
            params.depth += 1
        for params in units:
            self._use(params)
        blocks = [params.index for params in units if self.model not in params.unit.anchors] if torch.is_grad_enabled() else []
        # (a leaf's hook cannot be waited for in torch.autograd.grad; then the end of backward releases)
        inputs = [t for t in _tensors((args, kwargs)) if t.grad_fn is not None] if blocks else []
        if inputs:  # (weakly, as graphs and what hangs on them are not seen by Python's collector)
            _on_grads(inputs, functools.partial(weakly(self._inputs_done), blocks))

    def _after(self, module: nn.Module, _args: Any, output: Any) -> None:
        if self.entered[-1:] != [module] or self.thread != threading.get_ident():
            return  # the hook before it failed, or refused this thread
        self.entered.pop()
        in_backward = torch._C._current_graph_task_id() != -1
        has_graph = torch.is_grad_enabled() and any(t.requires_grad for t in _tensors(output))
        for params in self.by_module[module]:
            params.depth -= 1
            is_rest = self.model in params.unit.anchors
            if params.depth or in_backward or (is_rest and (self.model in self.entered or has_graph)):
                continue  # still in use, or about to be: what is left over opens the backward
            params.release()
        if not self.entered and not in_backward:
            if self.saved_hooks is not None:
                hooks, self.saved_hooks, self.below = self.saved_hooks, None, None
                hooks.__exit__(None, None, None)
            if not torch.is_grad_enabled():
                self.prefetcher.end()
                self.release_all()

    def _use(self, params: PartitionedParams) -> None:
        if self.closed:
            raise RuntimeError(
                f"the parameters of unit {params.unit.name!r} are needed, and the optimizer that holds them is closed; close it after the last "
                "backward"
            )
        self.prefetcher.used(params.index, params.state is not State.RELEASED)
        params.gather()
        params.is_borrowed |= self.makes_graph

    def on_use(self, params: PartitionedParams) -> None:
        """A released parameter is read. Inside a forward or backward that is a use like any other."""
        if self.closed:
            raise RuntimeError(
                f"the parameters of unit {params.unit.name!r} were partitioned when the optimizer was closed; close(gather=True) leaves them full"
            )
        if self.entered or torch._C._current_graph_task_id() != -1:
            self._use(params)
            return
        raise RuntimeError(
            f"a parameter of unit {params.unit.name!r} ({', '.join(params.unit.names[:3])}{', ...' if len(params.unit.names) > 3 else ''}) is "
            f"read while released: at stage 3 parameters are full only inside a forward or backward. Read or write them in "
            f"`with zk.gather(params):`, on all ranks"
        )

    # ---- backward ------------------------------------------------------------------------------------------------------------

    def _watch_backward(self) -> None:
        task = torch._C._current_graph_task_id()
        if self.task == -1 and task != -1:
            self.task, self.makes_graph = task, torch.is_grad_enabled()
            torch.autograd.Variable._execution_engine.queue_callback(self.backward_ended)  # type: ignore[attr-defined]

    def _inputs_done(self, blocks: Sequence[int], *_: Any) -> None:
        self._watch_backward()
        for index in blocks:
            if not self.by_index[index].depth:
                self.by_index[index].release()

    def _pack(self, tensor: Tensor) -> tuple[Any, Any, int]:
        known = tensor.layout is torch.strided and self.by_storage.get(tensor.untyped_storage()._cdata)
        # torch asks the innermost hooks only: what is no parameter goes on to those around, and all of it to a checkpoint, which counts them
        if self.below is not None and (not known or self.below[0].__module__ == checkpoint.__name__):
            pack, unpack = self.below
            return unpack, pack(tensor), -1
        # (an output that is kept with its graph, which keeps what it saved, would never be freed)
        return known or None, tensor if tensor.is_leaf else tensor.detach(), tensor._version

    def _unpack(self, packed: tuple[Any, Any, int]) -> Tensor:
        params, saved, version = packed
        if callable(params):
            return params(saved)  # type: ignore[no-any-return]
        tensor: Tensor = saved
        if params is not None:
            self._watch_backward()
            if params.state is not State.GATHERED:
                self._use(params)
        if tensor._version != version:  # torch's own check, which hooks on saved tensors switch off
            raise RuntimeError(
                f"a tensor of shape {tuple(tensor.shape)} that backward needs was modified by an inplace operation after forward saved it "
                f"(version {version}, now {tensor._version}); was a parameter written, or step() called, between forward and backward?"
            )
        if params is not None and torch.is_grad_enabled():
            params.is_borrowed = True
        return tensor

    def backward_ended(self) -> None:
        """Everything is released; the order that was seen is the one to expect."""
        self.task, self.makes_graph = -1, False
        self.prefetcher.end()
        self.release_all()

    def release_all(self) -> None:
        """Release what no forward is using."""
        for params in self.params:
            if not params.depth:
                params.release()

    def gather_all(self) -> None:
        """Every unit becomes full, for good."""
        for params in self.params:
            params.pin()

    def reset(self) -> None:
        """Between steps: nothing is in progress, whatever was interrupted."""
        if not self.entered:
            self.task, self.makes_graph = -1, False
            self.release_all()
