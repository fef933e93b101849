"""Runtime: when units are gathered, released and reduced. torch's hooks call everything here.

forward     a block is called, or one of its parameters is asked for: gather; it returns: release
backward    autograd unpacks a saved parameter, or a checkpoint calls a block again: gather
            a unit's last gradient is there: release, and the Reducer collects and reduces it
            it ends: release all, and reduce what is left
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from threading import get_ident
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from zk.parallel.gradient import Left, in_backward
from zk.precision import CastInputs
from zk.store import UnitStore

if TYPE_CHECKING:
    from zk.optimizer import Layout

Call = Callable[..., Any]
set_compiler = torch._C._dynamo.eval_frame.set_eval_frame
GATHERED_IN_BACKWARD = 3  # units beside those that are prefetched
RUNTIMES: weakref.WeakKeyDictionary[Runtime, None] = weakref.WeakKeyDictionary()  # as made


class Runtime:
    def __init__(self, model: nn.Module, layout: Layout, owner: Call):
        """``owner``: returns the ZeroOptimizer, or None."""
        self.model, self.owner, self.seams = model, owner, layout.seams
        self.prefetch = layout.config.prefetch
        self.reducer = layout.reducer
        self.stores: list[UnitStore] = []
        self.store_of: dict[Any, UnitStore] = {}  # by parameter
        self.by_storage: dict[int, UnitStore] = {}  # of full parameters
        self.gathered: dict[UnitStore, None] = {}  # the one used longest ago is first
        self.held = Counter[UnitStore]()  # not to be released: contexts that hold them
        # traced: (unit, in backward) -> the unit used after it; None -> the first one
        self.following: dict[Any, UnitStore] = {}
        self.last: UnitStore | None = None
        self.kept: UnitStore | None = None  # from forward to backward, which begins with it
        self.depth, self.thread = 0, 0  # of calls of the model, and who makes them
        self.descending = 0  # the thread of the backward whose end is awaited
        self.makes_graph = False  # that backward was called with create_graph=True
        self.partitions = layout.stage == 3  # parameters are released between uses
        self.handles: dict[UnitStore | None, list[Any]] = {}
        self.saving: Any = contextlib.nullcontext()  # of saved tensors, within forward
        self.around: tuple[Any, Any] = keep, kept  # the hooks around it
        self.broken = ""  # why parameters may not be used
        self.counts = {"gathers": 0, "prefetch_hits": 0}
        RUNTIMES[self] = None

    # ---- hooks -----------------------------------------------------------------------------------

    def attach(self, store: UnitStore) -> None:
        """Put hooks on a unit's parameters, and on the module that uses it."""
        unit = store.unit
        self.stores.append(store)
        self.store_of |= dict.fromkeys(unit.params, store)
        handles = self.handles[store] = []
        if self.partitions or self.seams.used:
            before, after = partial(self.before_forward, store), partial(self.after_forward, store)
            handles += hooks_around(unit.module, before, after)
        if unit.is_trained:
            self.reducer.waiting[store] = len(unit.params)
            # weak, as the garbage collector does not see what a tensor's hooks refer to
            weak: Any = weakref.ref(self)
            its: Any = weakref.ref(store)
            on_grad = Hook(lambda _: weak().on_grad(its()))
            handles += [p.register_post_accumulate_grad_hook(on_grad) for p in unit.params]

    def attach_model(self, dtype: Any) -> None:
        """Put hooks around the model; at stage 3 its modules tell when a parameter is read.

        Inputs are cast to ``dtype``.
        """
        handles = self.handles[None] = hooks_around(self.model, self.enter, self.leave)
        if dtype is not None:
            cast = self.model.register_forward_pre_hook(CastInputs(dtype), with_kwargs=True)
            handles.append(cast)
        blocks = {store.unit.module for store in self.stores} - {self.model}
        inside = {part for block in blocks for part in block.modules()} | {self.model}
        for module in self.model.modules() if self.partitions else ():
            module._parameters = UsedParameters(module._parameters, self.on_read)
            # a part of the model that is no block may be called by itself
            if module._parameters and module not in inside:
                handles += hooks_around(module, self.enter, self.leave)

    def detach(self, store: UnitStore | None) -> None:
        """Remove a unit's hooks; None: the model's."""
        for handle in self.handles.pop(store, []):
            handle.remove()
        if store is None:
            RUNTIMES.pop(self, None)
            for module in self.model.modules():
                module._parameters = dict(module._parameters)
            return
        self.reducer.forget(store)
        self.stores.remove(store)
        self.gathered.pop(store, None)  # else who holds it releases it later
        store.grad.drop()
        for param in store.unit.params:
            param.grad = None
            del self.store_of[param]

    # ---- forward ---------------------------------------------------------------------------------

    def before_forward(self, store: UnitStore, *_: Any) -> None:
        self.enter()
        self.use(store)

    def after_forward(self, store: UnitStore, *_: Any) -> None:
        try:
            if not in_backward():  # there it was just computed again, and its backward follows
                self.release(store)
        finally:
            self.leave()

    def enter(self, *_: Any) -> None:
        """Begin a call; the outermost one packs what autograd saves."""
        if self.broken:
            raise RuntimeError(self.broken)
        if in_backward():  # a checkpoint computes again
            return
        if not self.depth:
            self.thread, self.descending = get_ident(), 0
            self.kept = self.following.get((None, True))
            check_call(self.model)
            for store in self.stores:
                store.unit.check(0)
            self.reducer.begin()
            self.save()
        elif self.partitions and self.thread != get_ident():
            raise RuntimeError(
                "two threads call the model at once, which needs its parameters in memory: use "
                "stage 0, 1 or 2, or one thread"
            )
        self.depth += 1

    def save(self) -> None:
        """Pack what autograd saves from now on; a checkpoint around the call keeps nothing of it."""
        self.around = saving_hooks()
        is_checkpoint = getattr(self.around[0], "__module__", "") == "torch.utils.checkpoint"
        if is_checkpoint or not self.partitions or not torch.is_grad_enabled():
            return
        saving = torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)
        try:
            saving.__enter__()
        except RuntimeError as error:
            raise RuntimeError(
                "torch.func.grad, jvp and hessian at stage 3, whose parameters autograd must not "
                "keep: use torch.autograd.grad, or stage 2; torch.no_grad() around zk.gather()"
            ) from error
        self.saving = saving

    def leave(self, *_: Any) -> None:
        # torch calls this too where ``enter``, or a hook of the user's, has raised
        if in_backward() or (self.partitions and self.thread != get_ident()):
            return
        self.depth = max(self.depth - 1, 0)
        if not self.depth:
            saving, self.saving, self.last = self.saving, contextlib.nullcontext(), None
            saving.__exit__(None, None, None)
            self.release_all()

    def forget_calls(self) -> None:
        """No call is in progress: forget those that an interrupt (Ctrl-C) has cut short."""
        self.descending = 0
        if self.depth and not +self.held:
            self.depth = 1
            self.leave()

    def on_read(self, param: nn.Parameter) -> None:
        """A module is asked for a parameter: within forward or backward that is a use."""
        store = self.store_of.get(param)
        if store is not None and store.full is None and (self.depth or in_backward()):
            self.use(store)

    def use(self, store: UnitStore) -> None:
        """Gather a unit, and start to bring those that followed it last time.

        What is held is not traced: one rank alone may use it, and all are to ask for the same.
        """
        backward = in_backward()
        self.gather(store, backward)
        if self.last is not store and not self.held[store]:
            self.following[self.last, backward] = store
            self.last = store
            self.look_ahead(store, backward)

    def begin_gather(self, store: UnitStore, backward: bool) -> None:
        if store.is_away:
            if backward:
                self.reducer.before_gather(store)
            store.begin_gather()

    def gather(self, store: UnitStore, backward: bool = False) -> None:
        if store.full is None:
            self.counts["gathers"] += 1
            self.counts["prefetch_hits"] += store.gathering is not None
            self.begin_gather(store, backward)
        store.gather()
        self.gathered.pop(store, None)
        self.gathered[store] = None
        self.by_storage[storage_of(store.full)] = store
        if backward:
            self.queue_end()
            for oldest in list(self.gathered)[: -GATHERED_IN_BACKWARD - self.prefetch]:
                self.release(oldest)
        for used in self.seams.used:
            used(store)

    def on_updated(self, store: UnitStore) -> None:
        """Publish a unit, but for an update in the background; ask for what forward begins with."""
        if store.updating is None:
            store.publish()
            if self.prefetch and store is self.following.get((None, False)):
                self.begin_gather(store, False)

    def look_ahead(self, store: UnitStore, backward: bool) -> None:
        """Fetch ``prefetch`` units that follow, and gather the next one.

        A gather from a drive waits for its read, so that only one is begun.
        """
        ahead = [store]
        while len(ahead) <= self.prefetch and (ahead[-1], backward) in self.following:
            ahead.append(self.following[ahead[-1], backward])
        for other in ahead[1:]:
            if other.is_away:
                other.param.fetch()
        for following in ahead[1:2]:
            self.begin_gather(following, backward)

    def release(self, store: UnitStore) -> None:
        """Free a unit's full parameters, unless somebody holds them, or backward begins with them."""
        if store is self.kept or self.held.get(store) or store not in self.gathered:
            return
        del self.gathered[store]
        self.by_storage.pop(storage_of(store.full), None)
        store.release()

    def release_all(self) -> None:
        for store in list(self.gathered):
            self.release(store)
        for store in self.stores:
            if store.gathering is not None:  # it was prefetched, and not used
                store.release()

    def pack(self, tensor: Tensor) -> Any:
        """Make a saved view of a unit's parameters a recipe, which keeps no memory."""
        store = self.by_storage.get(storage_of(tensor))
        if store is None or tensor.dtype != store.unit.dtype or isinstance(tensor, Left):
            pack, unpack = self.around
            return Passed(unpack, pack(tensor))
        offset = tensor.storage_offset() - store.full.storage_offset()
        return store, store.version, tensor.size(), tensor.stride(), offset

    def unpack(self, saved: Any) -> Any:
        if isinstance(saved, Passed):
            return saved.unpack(saved.value)
        if self.broken:
            raise RuntimeError(self.broken)
        store, version, size, stride, offset = saved
        self.use(store)
        if store.version != version:
            raise RuntimeError(
                f"the parameters of {store.unit.name!r} were updated between forward and backward"
            )
        return store.full.as_strided(size, stride, store.full.storage_offset() + offset)

    # ---- backward --------------------------------------------------------------------------------

    def queue_end(self) -> None:
        """Have the end of a backward pass told; a checkpoint's own, within another, has none."""
        if not self.descending:
            self.descending = get_ident()
            self.makes_graph, self.kept = False, None
            torch.autograd.Variable._execution_engine.queue_callback(self.end_of_backward)
        elif self.descending != get_ident():
            raise RuntimeError("two threads run backward() at once: let one follow the other")

    def on_grad(self, store: UnitStore) -> None:
        """A parameter's gradient is whole. With its last one a unit is released and reduced."""
        self.queue_end()
        self.makes_graph = torch.is_grad_enabled()  # so has all that a checkpoint computes again
        waiting = self.reducer.waiting
        waiting[store] -= 1
        if not waiting[store]:
            self.refuse_backward()
            if not self.makes_graph:  # else gradients have a graph, and stay until step()
                self.release(store)
                self.reducer.on_whole(store)

    def refuse_backward(self) -> None:
        """RuntimeError for gradients that have a graph, or no loss scale, where that is wrong."""
        has_scale = self.reducer.scaler.scale != 1.0
        if self.makes_graph and (self.partitions or has_scale):
            raise RuntimeError(
                "backward(create_graph=True) at stage 3 or with a loss scale: use "
                "torch.autograd.grad(loss, params, create_graph=True), or stage 2"
            )
        if has_scale and self.reducer.loss_scale == 1.0:
            raise RuntimeError(
                "the loss was not scaled: call optimizer.backward(loss) instead of loss.backward()"
            )

    def end_of_backward(self) -> None:
        """Reduce what is left, as all ranks agree; release all units."""
        self.descending, self.last = 0, None
        self.release_all()
        if not self.makes_graph:
            self.reducer.end()

    # ---- what users may ask for ------------------------------------------------------------------

    @contextlib.contextmanager
    def holding(self, stores: list[UnitStore]) -> Iterator[None]:
        """Keep units gathered inside."""
        with contextlib.ExitStack() as stack:
            self.enter()
            self.kept = None  # so that all are released, and what is changed by mistake is seen
            stack.callback(self.leave)
            for store in stores:
                self.gather(store)
                stack.callback(self.release, store)
            self.held.update(stores)
            stack.callback(self.held.subtract, stores)
            yield


def check_call(model: nn.Module) -> None:
    """RuntimeError if DDP calls the model."""
    around = nn.parallel.DistributedDataParallel._get_active_ddp_module()
    if around is not None and around.module is model:
        raise RuntimeError(
            "the model was wrapped in DistributedDataParallel after ZeroOptimizer was made, and would "
            "reduce gradients a second time; use the model itself"
        )


class UsedParameters(dict[str, Any]):
    """A module's ``_parameters`` that tells when ``module.weight`` is read.

    torch has no hook for this; only a stand-in for the parameter, or for this table, hears of it.
    """

    def __init__(self, params: dict[str, Any], on_read: Call):
        super().__init__(params)
        self.on_read = on_read

    def __getitem__(self, name: str) -> Any:
        param = super().__getitem__(name)
        if param is not None and not is_compiling():  # a compiled block is gathered by its hooks
            self.on_read(param)
        return param

    def __reduce_ex__(self, protocol: Any) -> Any:  # copies and files have a plain one
        return dict, (dict(self),)


class Hook:
    """A hook, which the compiler of a module, or of a loop with its backward(), does not look into.

    The module's copies and files have one that does nothing.
    """

    def __init__(self, run: Any):
        self.run = run

    @torch._dynamo.decorators.skip  # type: ignore[untyped-decorator]
    def __call__(self, *args: Any) -> Any:
        compiler = set_compiler(None)  # it looks into nothing that is called here
        try:
            return self.run and self.run(*args)
        finally:
            set_compiler(compiler)

    def __reduce__(self) -> Any:
        return Hook, (None,)


def hooks_around(module: nn.Module, before: Call, after: Call) -> Any:
    """Call ``before`` and ``after`` around each forward of ``module``."""
    return [
        module.register_forward_pre_hook(Hook(before), prepend=True),
        module.register_forward_hook(Hook(after), always_call=True),
    ]


def storage_of(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata  # type: ignore[no-any-return]


# ---- tensors that autograd saves, and that hooks leave alone: the hooks around get them --------
#
# torch asks the innermost hooks alone, and then neither breaks the cycle of an output that its own
# graph saves nor notices writes to what is saved.

Hooks = tuple[Call, Call]  # pack, unpack


class Passed(NamedTuple):
    """What other hooks have packed."""

    unpack: Call
    value: Any


def saving_hooks() -> Hooks:
    """The innermost hooks on saved tensors; without any, those that save as torch does."""
    found: Hooks | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return found or (keep, kept)


def keep(tensor: Tensor) -> tuple[Tensor, int]:
    # with its graph it would keep itself alive
    return tensor if tensor.is_leaf else tensor.detach(), tensor._version


def kept(packed: tuple[Tensor, int]) -> Tensor:
    tensor, version = packed
    if tensor._version != version:
        raise RuntimeError(
            f"a tensor of shape {tuple(tensor.shape)} that backward needs was modified by an inplace "
            f"operation (it was of version {version}, now {tensor._version}): write to a copy"
        )
    return tensor
