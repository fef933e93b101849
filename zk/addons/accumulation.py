"""``optimizer.accumulate(batches, loss_fn)``: micro-batches, block by block.

All micro-batches pass a block before any passes the next, in forward and backward: a step gathers a
block twice, and reduces its gradient once. The bits are those of the usual loop, all but its last
pass within no_sync(), with a checkpoint around each block.

Forward and backward of a micro-batch run in a lane: a thread that stops where a block is called, by
the model or by a checkpoint that computes it again. One lane runs at a time, and each has random
numbers of its own. What cannot be followed is refused by name, and all gradients are dropped.

Uses of the core: ``Runtime.holding``, ``begin_gather``, ``release``, its state of a call;
``Reducer.exchange``, ``finish``, ``begin``, ``waiting``; ``Gradient.collect``.
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain
from queue import SimpleQueue
from threading import Thread
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from zk.addons.compared import agree
from zk.logs import require
from zk.nn.activations import offload_activations
from zk.optimizer import ZeroOptimizer
from zk.parallel.gradient import in_backward
from zk.parallel.runtime import RUNTIMES, keep, kept, saving_hooks
from zk.store import UnitStore

Loss = Callable[[nn.Module, Any], Any]
ACCUMULATE = 2.0  # what a rank says where others say STEP or BEGIN


def accumulate(
    optimizer: ZeroOptimizer,
    batches: Iterable[Any],
    loss_fn: Loss,
    keep_activations: str = "device",
) -> list[Tensor]:
    """Forward and backward of ``loss_fn(model, batch)`` for each batch; step() comes after it.

    A collective of all ranks. It adds to gradients of earlier passes, as backward() does.

    Args:
        batches: the micro-batches of a step.
        loss_fn: returns a scalar tensor with a graph, divided by what the mean is taken over. It
            runs in a thread of its own for each batch, one at a time.
        keep_activations: where inputs of blocks wait for backward, "device" or "host".

    Returns the losses, detached. RuntimeError for what it cannot follow; errors drop all gradients.
    """
    for one in optimizer._seams.addons:  # units that grow do so before they are held
        getattr(one, "grow", bool)()
    with optimizer._layout.comm.together("accumulate()"):
        batches = list(batches)
        require(batches, "accumulate() was given no batches; give it those of one step")
        words = f"keep_activations must be 'device' or 'host'; got {keep_activations!r}"
        require(keep_activations in ("device", "host"), words)
        work = Accumulation(optimizer, loss_fn, keep_activations == "host")
    try:
        return work.run(batches)
    except BaseException:
        work.reducer.num_local = 0
        optimizer.zero_grad()
        raise


def refuse(is_wrong: Any, words: str) -> None:
    require(not is_wrong, f"accumulate(): {words}; use the usual loop", RuntimeError)


class Lane:
    """One micro-batch: it runs between two calls of blocks."""

    def __init__(self, compute: Any, random: list[Tensor]):
        self.random, self.is_back = random, False
        self.go = SimpleQueue[bool]()  # True: end
        self.stands = SimpleQueue[Any]()
        self.block: Any = self  # that it is about to call; None: it has ended
        # what the runtime knows of the call, and of the backward, in this thread
        self.runtime = {"depth": 0, "thread": 0, "saving": contextlib.nullcontext()}
        self.runtime |= {"around": (keep, kept), "descending": 0}
        context = contextvars.copy_context()
        Thread(target=context.run, args=(self.run, compute), daemon=True).start()

    def run(self, compute: Any) -> None:
        self.go.get()
        try:
            compute(self)
            self.stands.put((None, None))
        except BaseException as error:
            self.stands.put((None, error))

    def stand(self, block: nn.Module) -> None:
        self.stands.put((block, None))
        if self.go.get():
            raise SystemExit  # another lane has failed


class Accumulation:
    """One call of ``accumulate``."""

    def __init__(self, optimizer: ZeroOptimizer, loss_fn: Loss, is_host: bool):
        self.optimizer, self.runtime, self.loss_fn = optimizer, optimizer._runtime, loss_fn
        model = optimizer.model
        self.reducer, device = optimizer._layout.reducer, optimizer._layout.device
        self.stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self.contexts = [
            partial(torch.autocast, k, torch.get_autocast_dtype(k), torch.is_autocast_enabled(k))
            for k in {"cpu", device.type}
        ]
        self.generators = [torch.default_generator, *torch.cuda.default_generators]
        self.keeping = offload_activations(model) if is_host else contextlib.nullcontext()
        self.lanes, self.losses = list[Lane](), list[Tensor]()
        stores = self.runtime.stores
        used = {store.unit.module for store in stores} - {model}
        used -= {part for one in used for part in one.modules() if part is not one}
        self.names = {m: name for name, m in model.named_modules() if m in used}
        parts = {block: {*block.modules()} for block in self.names}
        self.stores = {b: [s for s in stores if s.unit.module in parts[b]] for b in parts}
        owners = [r for r in RUNTIMES if not {*r.model.modules()}.isdisjoint(model.modules())]
        refuse(owners[1:], "two ZeroOptimizers train the model")

    @torch.no_grad()
    def run(self, batches: list[Any]) -> list[Tensor]:
        reducer, runtime, syncs = self.reducer, self.runtime, self.reducer.syncs
        inside = {*chain(*self.stores.values())}
        seeds = [int(torch.randint(2**62, ())) for _ in batches]
        with contextlib.ExitStack() as stack:
            stack.callback(self.put_random, self.random())
            stack.enter_context(runtime.holding([s for s in runtime.stores if s not in inside]))
            for store in reducer.waiting:  # what users have put there has no loss scale
                if any(param.grad is not None for param in store.unit.params):
                    store.grad.collect()
            stack.callback(reducer.begin)
            stack.callback(vars(reducer).update, loss_scale=1.0, syncs=syncs)
            stack.callback(vars(runtime).update, prefetch=runtime.prefetch)
            passes, runtime.prefetch = reducer.num_local + len(batches), 0
            vars(reducer).update(syncs=False, loss_scale=reducer.scaler.scale)
            said = reducer.exchange(ACCUMULATE, passes, True) if syncs else []
            refuse(any(row[0] != ACCUMULATE for row in said), "another rank does not call it")
            for block in self.names:
                stack.callback(vars(block).update, _compiled_call_impl=block._compiled_call_impl)
                call = block._compiled_call_impl or block._call_impl
                vars(block)["_compiled_call_impl"] = partial(self.called, block, call)
            modules = self.optimizer.model.modules()
            self.before = [(space, {**space}) for m in modules for space in (vars(m), m._buffers)]
            stack.callback(self.stop)
            for batch, seed in zip(batches, seeds, strict=True):
                for generator in self.generators:
                    generator.manual_seed(seed)
                self.lanes.append(Lane(partial(self.compute, batch), self.random()))
                self.switch(self.lanes[-1])
            self.pass_blocks(syncs)
            if syncs:
                self.reduce(runtime.stores, "no block")
        return self.losses

    def pass_blocks(self, syncs: bool) -> None:
        """Let all lanes pass a block, and then the next: in forward, and the other way in backward."""
        blocks, order = [*self.names], list[nn.Module]()
        while ways := {self.names.get(lane.block) for lane in self.lanes} - {None}:
            (block, is_back), *others = {(lane.block, lane.is_back) for lane in self.lanes}
            refuse(others, f"micro-batches take different ways, to blocks {ways}")
            if is_back:
                refuse(block not in order, f"a checkpoint is around {self.names[block]!r} and more")
                while order.pop() is not block:
                    pass  # no gradient goes through that one
            order += [block] * (not is_back)
            following = order[-1:] if is_back else blocks[blocks.index(block) + 1 :][:1]
            with self.runtime.holding(self.stores[block]):
                for other in following if self.optimizer.config.prefetch else ():
                    for store in self.stores[other]:
                        self.runtime.begin_gather(store, False)
                for lane in self.lanes:
                    self.switch(lane)
            for store in list(self.runtime.gathered):  # what autograd has gathered of others
                self.runtime.release(store)
            self.compare_attributes()
            if syncs and is_back:
                self.reduce(self.stores[block], self.names[block])

    def compare_attributes(self) -> None:
        """Refuse what forward has set in modules, but for flags: other lanes see it."""
        for space, old in self.before:
            names = [n for n in space | old if old.get(n) is not space.get(n) is not True]
            refuse(names, f"forward sets {names} of a module, which all micro-batches would see")

    def switch(self, lane: Lane, ends: bool = False) -> None:
        """Let a lane run until it calls a block, or ends; collect each gradient that it made."""
        runtime, self.lane = vars(self.runtime), lane
        main = {name: runtime[name] for name in lane.runtime}
        self.put_random(lane.random)
        runtime.update(lane.runtime)
        try:
            lane.go.put(ends)
            lane.block, error = lane.stands.get()
        finally:
            lane.runtime = {name: runtime[name] for name in main}
            runtime.update(main)
            lane.random = self.random()
        if error:
            raise error
        for store, missing in self.reducer.waiting.items():
            if missing < len(store.unit.params):
                store.grad.collect()
        self.reducer.begin()

    def stop(self) -> None:
        """End all lanes; those that stand before a block leave it as after an error."""
        for lane in self.lanes:
            while lane.block is not None:
                with contextlib.suppress(BaseException):
                    self.switch(lane, ends=True)

    def compute(self, batch: Any, lane: Lane) -> None:
        """In a lane: what threads have of their own is as outside, also in backward."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.cuda.stream(self.stream))
            for context in self.contexts:
                stack.enter_context(context())
            loss = self.loss_fn(self.optimizer.model, batch)
            is_loss = isinstance(loss, Tensor) and not loss.ndim and loss.requires_grad
            refuse(not is_loss, "loss_fn must return a scalar tensor that has a graph")
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            lane.is_back = True
            (loss * self.reducer.loss_scale).backward()  # type: ignore[no-untyped-call]
            self.losses.append(loss.detach())

    def called(self, block: nn.Module, call: Any, /, *args: Any, **kwargs: Any) -> Any:
        """A block is called: wait for the other lanes; in forward, compute it within a checkpoint."""

        def run(*args: Any) -> Any:
            if in_backward():
                refuse(not self.lane.is_back, "loss_fn calls backward() or torch.autograd.grad()")
                self.lane.stand(block)
            return call(*args, **kwargs)

        if not in_backward():
            self.lane.stand(block)
        saves = getattr(saving_hooks()[0], "__module__", "") != "torch.utils.checkpoint"
        if in_backward() or not saves or not torch.is_grad_enabled():  # the model has a checkpoint
            return run(*args)
        watched = [args, kwargs, *block.buffers()]
        known = contents(watched)
        with self.keeping:
            result = checkpoint(run, *args, use_reentrant=False)
        words = f"block {self.names[block]!r} writes into its arguments (use_cache=) or buffers"
        refuse(contents(watched) != known, words)
        return result

    def random(self) -> list[Tensor]:
        return [generator.get_state() for generator in self.generators]

    def put_random(self, states: list[Tensor]) -> None:
        for generator, state in zip(self.generators, states, strict=True):
            generator.set_state(state)

    def reduce(self, stores: list[UnitStore], name: str) -> None:
        """Reduce what any rank has of these units; all learn what has a gradient."""
        agree(self.reducer.comm, "the way of accumulate() through blocks", {"the next one": name})
        reducer, waiting = self.reducer, self.reducer.waiting
        reducer.waiting = {store: 0 for store in stores if store in waiting}
        reducer.finish(in_order=False)
        reducer.waiting = waiting


def contents(value: Any, depth: int = 5) -> list[Any]:
    """Identity and version of all tensors that a value leads to, through its attributes too."""
    found = []
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            found.append((id(leaf), leaf._version))
        elif depth and not isinstance(leaf, nn.Module | type):
            found += contents(getattr(leaf, "__dict__", {}), depth - 1)
    return found
