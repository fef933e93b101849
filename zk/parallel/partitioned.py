"""Parameters that exist only while in use (stage 3): gather -> compute -> release.

UnitStore holds one unit and its state; Partition holds the model's hooks and decides when each unit is needed.
A forward of a unit's module gathers it before and releases it after. In backward there are two signals. Autograd unpacks a saved parameter:
gather its unit, and ask for the next. The gradient of a module's inputs is complete: release. So no order of backward can meet memory that
was released, and a unit that backward does not read (an embedding) is not gathered for it.
Experts of which each rank may call other ones are gathered and released with the block around them (experts.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import checkpoint
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from zk.core.hooks import Hook, weakly
from zk.core.owners import inner_tensors, is_wrapper, rebuilt
from zk.core.store import State, UnitStore
from zk.parallel.comm import Comm
from zk.parallel.experts import Experts, passed_through

_FOLLOWED = (torch._C._functorch.TransformType.Vmap, torch._C._functorch.TransformType.Functionalize)

_LONGEST = 1 << 14  # uses that are remembered at most, should no backward ever end the recording
_STEADY = 8  # passes in a row that use a unit, after one that did not, until it is asked for ahead again


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


def is_of_checkpoint(hooks: Any) -> bool:
    """Tell if hooks on saved tensors, or None, are those of torch.utils.checkpoint."""
    return hooks is not None and hooks[0].__module__ == checkpoint.__name__


def _owner_of(hooks: Any) -> Any:
    """The object of which hooks on saved tensors are methods, as those of a Partition are; None for others."""
    return getattr(getattr(hooks[0], "func", None), "__self__", None)


def _tensors(value: Any) -> list[Tensor]:
    """Every tensor in nested outputs: containers that torch knows, and dataclasses."""
    found = []
    for leaf in (value,) if isinstance(value, Tensor) else tree_leaves(value):
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            found += _tensors([getattr(leaf, field.name) for field in dataclasses.fields(leaf)])
    return found


def owned(model: nn.Module, stores: Collection[UnitStore]) -> dict[nn.Module, dict[UnitStore, list[int]]]:
    """The parameters that are each module's own: their stores, and their numbers there."""
    places = {id(param): (store, index) for store in stores for index, param in enumerate(store.unit.params)}
    owners: dict[nn.Module, dict[UnitStore, list[int]]] = {}
    for module in model.modules() if stores else ():
        for param in module.parameters(recurse=False):
            for _, tensor in inner_tensors(param):
                if id(tensor) in places:
                    store, index = places[id(tensor)]
                    owners.setdefault(module, {}).setdefault(store, []).append(index)
    return owners


class Managed:
    """True as a module's ``_is_fsdp_managed_module``, by which transformers asks if parameters are partitioned over ranks.

    With it, ``generate`` runs on every rank until the last one has finished, and LayerDrop skips nothing. It is set on the modules
    around units, not on units: torch.compile, which reads it too, would not compile those. False once removed, and in a copy.
    """

    def __init__(self, model: nn.Module, units: Collection[nn.Module]) -> None:
        self.active = True
        for module in model.modules():
            if module is model or hasattr(module, "generate") or any(inner in units for inner in module.modules() if inner is not module):
                module._is_fsdp_managed_module = self  # type: ignore[assignment]

    def __bool__(self) -> bool:
        return self.active

    def __reduce__(self) -> tuple[type[bool], tuple[()]]:
        return bool, ()

    def remove(self) -> None:
        """Answer False from now on."""
        self.active = False


class Prefetcher:
    """Follows the order of use seen last time and asks for the units that come next.

    A use that is not the expected one costs nothing but its own wait: the position is looked up again further on in the order.
    A unit that only some passes use (an expert) is not asked for ahead of use, as its bytes would mostly be moved for nothing.

    Args:
        ask: called with a unit's number, starts to gather it if it is not there.
        fetch: called with a unit's number, brings this rank's slice of it nearer, where it rests on a slow tier.
        ahead: how many units beyond the one in use to ask for; as many and one more beyond these are fetched.
    """

    def __init__(self, ask: Callable[[int], None], fetch: Callable[[int], None], ahead: int) -> None:
        self.ask, self.fetch, self.ahead = ask, fetch, ahead
        self.orders: dict[str, Sequence[int]] = {}
        self.first: Sequence[int] = ()  # what the last training pass has used, from its beginning
        self.doubtful: dict[str, dict[int, int]] = {}  # by mode: units, and the passes that have to use each first
        self.mode = "train"
        self.seen: list[int] = []
        self.position = 0
        self.uses = self.hits = 0

    def begin(self, mode: str) -> None:
        """A pass starts that uses units in an order of its own ("train": forward and backward; "infer": forward only)."""
        self.mode, self.seen, self.position = mode, [], 0

    def used(self, unit: int, was_there: bool) -> None:
        """``unit`` is needed now; ``was_there`` if it had been asked for in time. Asks for what follows it."""
        if self.seen and self.seen[-1] == unit:
            return
        self.uses += 1
        self.hits += was_there
        if len(self.seen) < _LONGEST:
            self.seen.append(unit)
        order = self.orders.get(self.mode, ())
        if not self.ahead or not order:
            return
        try:
            self.position = order.index(unit, self.position) + 1
        except ValueError:
            return  # off the known path: wait for it to come back
        ahead = itertools.islice(order, self.position, self.position + 4 * (2 * self.ahead + 1))
        doubtful = self.doubtful.get(self.mode, {})
        following = list(dict.fromkeys(other for other in ahead if other != unit and other not in doubtful))
        for other in following[: self.ahead]:
            self.ask(other)
        for other in following[self.ahead : 2 * self.ahead + 1]:
            self.fetch(other)

    def between_passes(self) -> None:
        """No pass is in progress: fetch what the next training pass begins with."""
        doubtful = self.doubtful.get("train", {})
        for unit in dict.fromkeys(self.first[: 2 * self.ahead + 1]) if self.ahead else ():
            if unit not in doubtful:
                self.fetch(unit)

    def end(self) -> None:
        """The pass is over: what was seen is what to expect next time."""
        if self.seen:
            seen, expected = set(self.seen), set(self.orders.get(self.mode, self.seen))
            doubtful = {unit: left - 1 for unit, left in self.doubtful.get(self.mode, {}).items() if left > 1}
            self.doubtful[self.mode] = doubtful | dict.fromkeys(seen ^ expected, _STEADY)
            self.orders[self.mode] = tuple(self.seen)
            self.first = self.orders.get("train", ())
        self.seen, self.position = [], 0


class Partition:
    """Watches the model run and keeps the right units gathered.

    Args:
        model: the module that was given to ZeroOptimizer.
        ahead: units to gather ahead of use.
        written: called with a held unit of which some parameters (by number) were overwritten on every rank; makes that last.
        comm: the ranks.
    """

    def __init__(self, model: nn.Module, ahead: int, written: Callable[[UnitStore, list[int]], None], comm: Comm) -> None:
        self.model, self.ahead, self.written, self.comm = model, ahead, written, comm
        self.stores: dict[int, UnitStore] = {}  # by index
        self.by_storage: dict[int, UnitStore] = {}
        self.prefetcher = Prefetcher(self._ask, self._fetch, ahead)
        self.asked: list[UnitStore] = []  # ahead of use, oldest first
        self.by_module: dict[nn.Module, list[UnitStore]] = {}  # what a forward of the module uses
        self.experts = Experts(comm, weakly(self._gather))
        self.experts_done: Callable[[nn.Module], None] = lambda _: None  # called with a chooser whose backward is complete
        self.owners: dict[nn.Module, dict[UnitStore, list[int]]] = {}  # and what its state_dict() does
        self.handles: list[RemovableHandle] = []
        self.entered: list[nn.Module] = []  # modules whose forward is in progress
        self.thread = 0  # in which they are
        self.task = -1  # the backward in progress
        self.makes_graph = False  # which it is with create_graph=True
        # forwards whose backward is not complete, by unit: of each checkpoint, and of those that backward repeats by itself (use_reentrant=True)
        self.frames: weakref.WeakKeyDictionary[Any, Counter[int]] = weakref.WeakKeyDictionary()
        self.repeated = Counter[int]()
        self.saved_hooks: contextlib.AbstractContextManager[Any] | None = None
        self.closed = self.reads = False

    # ---- wiring --------------------------------------------------------------------------------------------------------------

    def add(self, store: UnitStore) -> None:
        """Watch one more unit."""
        self.stores[store.index] = store
        store.known, store.on_write = self.by_storage, self.written
        if store.lease is not None:
            self.by_storage[store.full.untyped_storage()._cdata] = store

    def remove(self, store: UnitStore) -> None:
        """Watch a unit no more."""
        self.stores.pop(store.index, None)  # (below stage 3 it is not watched)
        self.by_storage.pop(store.full.untyped_storage()._cdata, None)

    def attach(self) -> None:
        """Put hooks on the modules that have none; again after ``add`` and ``remove``."""
        before, after = Hook(self._before), Hook(self._after)
        by_module: dict[nn.Module, list[UnitStore]] = {self.model: []} if self.stores else {}
        self.experts.find(self.stores.values())
        for store in self.stores.values():
            for anchor in store.unit.anchors:
                by_module.setdefault(anchor, []).append(store)
        for chooser in self.experts.of:
            by_module.setdefault(chooser, [])
        for module in by_module.keys() - self.by_module.keys():
            self.handles += (
                module.register_forward_pre_hook(before, with_kwargs=True, prepend=True),
                module.register_forward_hook(after, with_kwargs=True, always_call=True),
            )
        gather, copy, keep = Hook(self._gather_own), Hook(self._copy_own), Hook(self._keep_own)
        owners = owned(self.model, self.stores.values())
        for module in owners.keys() - self.owners.keys():
            self.handles += (
                module.register_state_dict_pre_hook(gather),
                module.register_state_dict_post_hook(copy),
                module.register_load_state_dict_pre_hook(gather),
                module.register_load_state_dict_post_hook(keep),
            )
        if self.stores and self.comm.world > 1:
            self.handles.append(Managed(self.model, by_module.keys()))  # type: ignore[arg-type]
        self.by_module, self.owners = by_module, owners

    @contextlib.contextmanager
    def apart(self, progress: dict[str, Any]) -> Iterator[None]:
        """Context: the forwards in progress are those of ``progress``, another thread's, which is kept up to date."""
        outside = {name: getattr(self, name) for name in ("entered", "thread", "saved_hooks")}
        vars(self).update(progress or {"entered": [], "thread": 0, "saved_hooks": None})
        try:
            yield
        finally:
            progress.update({name: getattr(self, name) for name in outside})
            vars(self).update(outside)

    @contextlib.contextmanager
    def scheduled(self) -> Iterator[Prefetcher]:
        """Context: somebody else gathers units ahead of use, in another order, and counts their uses in what this yields."""
        outside, self.prefetcher = self.prefetcher, Prefetcher(self._ask, self._fetch, 0)
        try:
            yield outside
        finally:
            self.prefetcher = outside

    def abandon(self) -> None:
        """Forget the forward of this thread, which Ctrl-C has ended."""
        if self.thread != threading.get_ident():
            return
        if self.saved_hooks is not None:  # the user may have entered others since
            stack, above = torch._C._autograd, list[Any]()
            while (hooks := stack._top_saved_tensors_default_hooks(True)) is not None and _owner_of(hooks) is not self:
                stack._pop_saved_tensors_default_hooks()
                above.append(hooks)
            if hooks is not None:  # (a thread may have the number of one that has ended)
                stack._pop_saved_tensors_default_hooks()
            for pack, unpack in reversed(above):
                stack._push_saved_tensors_default_hooks(pack, unpack)
        self.saved_hooks, self.entered = None, []
        for store in self.stores.values():
            store.depth = 0

    # ---- state_dict() and load_state_dict() of the model and its parts, on all ranks ------------------------------------------

    def _gather_own(self, module: nn.Module, *_: Any) -> None:
        for store in self.owners[module]:
            store.pin()

    def _copy_own(self, module: nn.Module, state: dict[str, Any], *_: Any) -> None:
        for key, value in state.items():
            if isinstance(value, Tensor) and self._stores_of(value):
                state[key] = rebuilt(value, lambda tensor: tensor.detach().clone())
        for store in self.owners[module]:
            store.unpin()

    def _keep_own(self, module: nn.Module, *_: Any) -> None:
        for store, own in self.owners[module].items():
            self.written(store, own)
            store.unpin()

    # ---- what comes next -----------------------------------------------------------------------------------------------------

    def _ask(self, index: int) -> None:
        """Start to gather a unit. Of what was asked for and has not been used when its turn was over, the pass has taken another way."""
        store = self.stores[index]
        if store.state is not State.RELEASED:
            return
        self.asked = [other for other in self.asked if other.state is State.GATHERING]
        if len(self.asked) > self.ahead:  # (one more is the unit that is being used)
            self.asked.pop(0).release()
        store.prefetch()
        self.asked.append(store)

    def _fetch(self, index: int) -> None:
        self.stores[index].fetch()

    def saving(self) -> contextlib.AbstractContextManager[Any]:
        """Context: parameters that autograd saves for backward are gathered for it again."""
        around = self.hooks_around()
        below = around if is_of_checkpoint(around) else torch._C._autograd._top_saved_tensors_default_hooks(True)
        return torch.autograd.graph.saved_tensors_hooks(functools.partial(self._pack, below), self._unpack)

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
                self.saved_hooks = self.saving()
                self.saved_hooks.__enter__()
        self.entered.append(module)
        units = self.by_module[module]
        for store in units:
            store.depth += 1
        for store in units:
            self._use(store)
        blocks, calls = [], self._calls(in_backward)
        if calls is not None and torch.is_grad_enabled():
            blocks = [store.index for store in self._released_with(module) if self.model not in store.unit.anchors]
            calls.update(blocks)
        # (a leaf's hook cannot be waited for in torch.autograd.grad; then the end of backward releases)
        inputs = [t for given in (*args, *kwargs.values()) for t in _tensors(given) if t.grad_fn is not None] if blocks else []
        if inputs:  # (weakly, as graphs and what hangs on them are not seen by Python's collector)
            _on_grads(inputs, functools.partial(weakly(self._inputs_done), blocks, module, calls))

    def _after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        if self.entered[-1:] != [module] or self.thread != threading.get_ident():
            return None  # the hook before it failed, or refused this thread
        self.entered.pop()
        in_backward = torch._C._current_graph_task_id() != -1
        with_graph, passed_on = [], None
        if torch.is_grad_enabled():
            if module in self.experts.of:
                output = passed_on = passed_through((args, kwargs), output)
            with_graph = [tensor for tensor in _tensors(output) if tensor.requires_grad]
        has_graph = bool(with_graph)
        if module in self.experts.of:
            self.experts.choose_no_more(module, None if in_backward or output is None else has_graph)
        # bitsandbytes keeps a view of the codes for backward where autograd does not see it; some ranks may not use the router
        gathered = [store for store in self.by_module[module] if store.lease is not None and (module in self.experts.of or store.has_codes)]
        gathered += [store for store in self.experts.of.get(module, ()) if store.state is State.GATHERED]
        for tensor in with_graph if gathered else ():
            tensor.register_hook(functools.partial(weakly(self._outputs_done), [store.index for store in gathered]))
        for store in self.by_module[module]:
            store.depth -= 1
        for store in self._released_with(module):
            is_rest = self.model in store.unit.anchors
            if store.depth or in_backward or (is_rest and (self.model in self.entered or has_graph)):
                continue  # still in use, or about to be: what is left over opens the backward
            if store.unit.ends_with(module, is_backward=False):
                store.release()
        if not self.entered and not in_backward:
            if self.saved_hooks is not None:
                hooks, self.saved_hooks = self.saved_hooks, None
                hooks.__exit__(None, None, None)
            if not torch.is_grad_enabled():
                self.prefetcher.end()
                self._release_all()
        return passed_on

    def _use(self, store: UnitStore) -> None:
        if self.closed:
            raise RuntimeError(
                f"the parameters of unit {store.unit.name!r} are needed, and the optimizer that holds them is closed; close it after the last "
                "backward"
            )
        if store.unit.is_expert:
            if store.state is not State.GATHERED:
                self.experts.choose(store.unit.chooser, store)  # type: ignore[arg-type]
        else:
            chooser = self.experts.chooser_in(self.entered)
            if chooser is not None and store not in self.by_module[chooser]:
                self.experts.choose_no_more(chooser)  # other ranks may want experts before they come to this unit
            self._gather([store])
        store.is_borrowed |= self.makes_graph

    def _gather(self, stores: Sequence[UnitStore]) -> None:
        """Gather units, in this order on all ranks, and ask for what follows."""
        for store in stores[1:]:
            store.fetch()
        for store in stores:
            is_there = store.lease is None or (store.unit.members and store.state is State.GATHERED)
            if not is_there:
                self.prefetcher.used(store.index, store.state is not State.RELEASED)
            store.gather()

    def _released_with(self, module: nn.Module) -> list[UnitStore]:
        """The units to release when a forward or backward of the module has ended: experts with their chooser, so that ranks agree."""
        own = self.by_module[module]
        if self.experts.chooser_in(self.entered) is not None:
            own = [store for store in own if not store.unit.is_expert]
        return own + self.experts.of.get(module, [])

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Context: parameters become full where they are read, which all ranks do in one order."""
        self.reads = True
        try:
            yield
        finally:
            self.reads = False
            self.reset()

    def on_use(self, store: UnitStore) -> None:
        """A released parameter is read. Inside a forward or backward that is a use like any other."""
        if self.closed:
            raise RuntimeError(
                f"the parameters of unit {store.unit.name!r} were partitioned when the optimizer was closed; close(gather=True) leaves them full"
            )
        if self.entered or torch._C._current_graph_task_id() != -1:
            self._watch_backward()  # (another one inside of it, which also reads parameters, is not to end it)
            self._use(store)
            return
        if self.reads:
            store.gather()
            return
        raise RuntimeError(
            f"parameter {store.unit.names[0]!r} of unit {store.unit.name!r} is read while released: at stage 3 parameters are full only inside "
            "a forward or backward. Read or write them in `with zk.gather(params):`, on all ranks; after training, close(gather=True) of the "
            "optimizer leaves them full"
        )

    # ---- backward ------------------------------------------------------------------------------------------------------------

    def _watch_backward(self) -> None:
        task = torch._C._current_graph_task_id()
        if self.task == -1 and task != -1:
            self.task, self.makes_graph = task, torch.is_grad_enabled()
            torch.autograd.Variable._execution_engine.queue_callback(self.backward_ended)  # type: ignore[attr-defined]

    def _outputs_done(self, indices: Sequence[int], *_: Any) -> None:
        self._watch_backward()
        stores = [store for store in map(self.stores.__getitem__, indices) if store.state is not State.GATHERED]
        self._gather(stores)
        for store in stores:
            store.is_borrowed |= self.makes_graph

    def _calls(self, in_backward: bool) -> Counter[int] | None:
        """The counter of a forward that begins; None where another one stands for it in backward.

        What a checkpoint has saved again for one call of a module is read without hooks of this class, so it stays until the other calls in that
        checkpoint are done too.
        """
        hooks = self.hooks_around()  # (of a block that was called by itself, too)
        if not is_of_checkpoint(hooks):
            return self.repeated if in_backward else Counter()
        return None if in_backward else self.frames.setdefault(hooks[0], Counter())

    def _inputs_done(self, blocks: Sequence[int], module: nn.Module, calls: Counter[int], *_: Any) -> None:
        self._watch_backward()
        calls.subtract(blocks)
        for index in blocks:
            store = self.stores[index]
            if not calls[index] and not store.depth and store.unit.ends_with(module, is_backward=True):
                store.release()
        if module in self.experts.of:
            self.experts_done(module)

    def hooks_around(self) -> Any:
        """The hooks on saved tensors that there are in this thread, without those of this class; None if there are no others."""
        hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
        while hooks is not None and isinstance(_owner_of(hooks), Partition):
            (hooks,) = hooks[0].args
        return hooks

    def _stores_of(self, tensor: Tensor) -> list[UnitStore]:
        """The stores in whose full parameters a tensor lies, or those that it is a wrapper around."""
        if is_wrapper(tensor):
            return [store for _, part in inner_tensors(tensor) for store in self._stores_of(part)]
        if tensor.layout is not torch.strided:
            return []
        store = self.by_storage.get(tensor.untyped_storage()._cdata)
        return [store] if store is not None else []

    def _pack(self, below: Any, tensor: Tensor) -> tuple[Any, Any, int]:
        known = self._stores_of(tensor)
        # torch asks the innermost hooks only: what is no parameter goes on to those around, and all of it to a checkpoint, which counts them
        if below is not None and (not known or is_of_checkpoint(below)):
            pack, unpack = below
            return unpack, pack(tensor), -1
        # (an output that is kept with its graph, which keeps what it saved, would never be freed)
        return known, tensor if tensor.is_leaf else tensor.detach(), tensor._version

    def _unpack(self, packed: tuple[Any, Any, int]) -> Tensor:
        stores, saved, version = packed
        if callable(stores):
            return stores(saved)  # type: ignore[no-any-return]
        tensor: Tensor = saved
        if stores:
            self._watch_backward()
        for store in stores:
            if store.state is not State.GATHERED:
                self._use(store)
        if tensor._version != version:  # torch's own check, which hooks on saved tensors switch off
            raise RuntimeError(
                f"a tensor of shape {tuple(tensor.shape)} that backward needs was modified by an inplace operation after forward saved it "
                f"(version {version}, now {tensor._version}); was a parameter written, or step() called, between forward and backward?"
            )
        for store in stores if torch.is_grad_enabled() else ():
            store.is_borrowed = True
        return tensor

    def backward_ended(self) -> None:
        """Everything is released; the order that was seen is the one to expect."""
        self.prefetcher.end()
        self._release_all()

    def _release_all(self) -> None:
        """Release what no forward is using: no backward is in progress."""
        self.task, self.makes_graph = -1, False
        self.repeated.clear()
        for store in self.stores.values():
            if not store.depth:
                store.release()

    def reset(self) -> None:
        """Between steps: nothing is in progress, whatever was interrupted."""
        if not self.entered:
            self._release_all()
