"""The order of vertical accumulation: which block comes next, for whom, what is gathered for it, and when its gradient leaves."""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import operator
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_unflatten

from zk.accumulation.calls import NO_CACHE, Block, Boundary, Call, contents, differentiable, key_of, nodes, split
from zk.accumulation.micro_batch import Attributes, Changes, MicroBatch, Random, settings_of
from zk.core.store import UnitStore
from zk.nn.activations import no_hooks, saved_nbytes
from zk.nn.tiled_linear import autocast_as, autocast_now
from zk.nn.tiles import Tile
from zk.parallel.partitioned import is_of_checkpoint

LossFn = Callable[[nn.Module, Any], Any]

_OWN_BACKWARD = (
    "loss_fn calls backward() or torch.autograd.grad() itself, and accumulate() has cut the graph at the model's blocks; return the loss, or use the "
    "usual loop for losses of gradients"
)
_CHECKPOINT = "_gradient_checkpointing_func"  # of modules of transformers


class Accumulation:
    """One call of ``ZeroOptimizer.accumulate``.

    Args:
        optimizer: holds the model.
        batches: of the micro-batches.
        loss_fn: of the model and a batch.
        keep_nbytes: of activations to keep at most, instead of computing them again.
    """

    def __init__(self, optimizer: Any, batches: Sequence[Any], loss_fn: LossFn, keep_nbytes: int) -> None:
        self.optimizer, self.loss_fn, self.partition, self.depths = optimizer, loss_fn, optimizer.partition, optimizer.calls
        self.keep_nbytes, self.ahead = keep_nbytes, optimizer.config.prefetch
        self.blocks = [Block(module, name, position) for position, (name, module) in enumerate(_outermost(optimizer))]
        self.random = Random(optimizer.device)
        seeds = [int(torch.randint(2**62, ())) for _ in batches]
        self.lanes = [
            MicroBatch(number, functools.partial(self._loss_of, batch), self.random.seeded(seed))
            for number, (batch, seed) in enumerate(zip(batches, seeds, strict=True))
        ]
        self.pinned: dict[UnitStore, None] = {}  # in use, or ahead of it
        self.called: dict[Block, None] = {}  # whose gradient has not left
        self.losses: list[Any] = []
        self.in_backward = False
        # checkpoints (use_reentrant=False) around a block and more, with the attributes of its micro-batch
        self.frames: weakref.WeakKeyDictionary[Any, Changes] = weakref.WeakKeyDictionary()
        self.dummy = torch.zeros(0, requires_grad=True)
        # what torch keeps by thread
        self.autocast, self.hooks = autocast_now(optimizer.device), list[Any]()
        self.stream = torch.cuda.current_stream(optimizer.device) if optimizer.device.type == "cuda" else None

    def run(self) -> list[Any]:
        """Compute forward and backward of all micro-batches; returns what loss_fn has returned."""
        outside = self.random.now([])
        with contextlib.ExitStack() as stack:
            stack.callback(self.random.set, outside)
            self.prefetcher = stack.enter_context(self.partition.scheduled())
            stack.enter_context(self.optimizer.grads.joined())
            self.hooks = stack.enter_context(no_hooks())
            stack.callback(lambda: self._unpin(*self.pinned))
            for block in self.blocks:
                block.module.__dict__["_compiled_call_impl"] = functools.partial(self._called, block)
                stack.callback(_restore, block)
                for own in (module.__dict__ for module in block.module.modules()):
                    if _CHECKPOINT in own:  # inside of the block, which is computed again in any case
                        stack.callback(own.__setitem__, _CHECKPOINT, own[_CHECKPOINT])
                        own[_CHECKPOINT] = operator.call  # no more than a call
            self.attributes = Attributes(self.optimizer.model)
            stack.enter_context(self.attributes.watched())
            stack.callback(self._stop)
            self._forward()
            self._backward()
        return self.losses

    # ---- threads -------------------------------------------------------------------------------------------------------------

    def _lane(self) -> MicroBatch | None:
        """The micro-batch whose thread this is."""
        return next((lane for lane in self.lanes if lane is threading.current_thread()), None)

    def _loss_of(self, batch: Any) -> Any:
        """Call loss_fn with one micro-batch, in its thread."""
        with contextlib.ExitStack() as stack:
            if self.stream is not None:
                stack.enter_context(torch.cuda.device(self.optimizer.device))
                stack.enter_context(torch.cuda.stream(self.stream))
            for pack, unpack in reversed(self.hooks):
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, unpack))
            stack.enter_context(autocast_as(self.autocast, keeps_casts=None))
            return self.loss_fn(self.optimizer.model, batch)

    def _called(self, block: Block, *args: Any, **kwargs: Any) -> Any:
        """The model calls a block."""
        lane = self._lane()
        if lane is None or torch._C._current_graph_task_id() != -1:  # within another block, or by a checkpoint in backward
            for frame in _checkpoints("target_frame_ref"):
                if frame in self.frames:
                    return self._recomputed(block, self.frames[frame], args, kwargs)
            return block.call(*args, **kwargs)
        self.frames.update({frame: dict(lane.attributes) for frame in _checkpoints("frame")})
        back, last = lane.turn
        lane.turn = (back + (block.position <= last), block.position)
        hooks = self.partition.hooks_around()
        hooks = None if is_of_checkpoint(hooks) else hooks  # this is a checkpoint itself
        call = Call(block, len(lane.calls), lane.turn, args, kwargs, hooks, self.depths.depth, self.optimizer.device)
        del args, kwargs
        if call.has_graph:
            lane.calls.append(call)
            for edge in call.edges.values():
                lane.first_use.setdefault(key_of(edge), call.number)
        lane.wait_for(call)
        if call.error is not None:
            raise call.error
        result, call.result = call.result, None
        return self._linked(block, call, result) if call.has_graph else result

    def _recomputed(self, block: Block, attributes: Changes, args: Any, kwargs: Any) -> Any:
        """The call of a block once more, as part of what a checkpoint around it and more computes again for backward.

        There the block saves nothing for backward, as in forward: it goes back through its own call.
        """
        inputs = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
        has_graph = torch.is_grad_enabled() and (block.is_trained or any(tensor.requires_grad for tensor in inputs))
        self.attributes.put(attributes)
        try:
            with torch.no_grad():
                result = block.call(*args, **kwargs)
        finally:
            self.attributes.take_away(self.attributes.changes())
        return self._linked(block, None, result) if has_graph else result

    def _linked(self, block: Block, call: Call | None, result: Any) -> Any:
        """Make what a call has returned part of its micro-batch's graph, or without one, of a graph that is not gone back through."""
        leaves, together = split(result, block.name)
        outputs = differentiable(leaves)
        if call is not None:
            call.shapes, call.grads = [output.shape for output in outputs], [None] * len(outputs)
        if not outputs:
            return result
        # (a parameter that is returned is about to lose its memory)
        plain = [output.detach().clone() if self.partition._stores_of(output) else output.detach() for output in outputs]
        with_graph = Boundary.apply(self.dummy, call, self._expect, plain)  # type: ignore[no-untyped-call]
        found = {id(output): new for output, new in zip(outputs, with_graph, strict=True)}
        return together([found.get(id(leaf), leaf) for leaf in leaves])

    def _expect(self) -> None:
        if not self.in_backward:
            raise RuntimeError(_OWN_BACKWARD)

    def _switch_to(self, lane: MicroBatch) -> None:
        """Let a micro-batch run until it calls a block, or ends."""
        self.random.set(lane.random)
        self.attributes.put(lane.attributes)
        with self.partition.apart(lane.progress), settings_of(lane.settings):
            lane.go_on()
        lane.random, lane.attributes = self.random.now(lane.random), self.attributes.changes()
        if lane.ended:
            self.attributes.keep(lane.attributes)
        else:
            self.attributes.take_away(lane.attributes)

    def _resume(self, lane: MicroBatch) -> None:
        self._switch_to(lane)
        if lane.error is not None:
            if "been used in the graph" in str(lane.error):
                lane.error.add_note(_OWN_BACKWARD)
            raise lane.error
        while len(self.losses) < len(self.lanes) and self.lanes[len(self.losses)].ended:
            self._loss_ended(self.lanes[len(self.losses)])

    def _stop(self) -> None:
        """End all threads. Those that have not come to their end leave the model's forward as after an error."""
        for lane in self.lanes:
            if lane.ident is not None:
                lane.stopped = True
                while not lane.ended:
                    self._switch_to(lane)
                lane.join()
            for kept in (lane.calls, lane.first_use, lane.pending):  # the graph goes now, and not when the collector comes
                kept.clear()
        self.lanes.clear()

    # ---- parameters ----------------------------------------------------------------------------------------------------------

    def _stores(self, module: nn.Module) -> list[UnitStore]:
        return [held for held in self.optimizer.held if held.unit.anchors[0] is module or module in held.unit.members]

    def _pin(self, store: UnitStore) -> None:
        if store in self.pinned:
            store.gather()
        else:
            store.pin()
            self.pinned[store] = None

    def _unpin(self, *stores: UnitStore) -> None:
        for store in stores:
            if store in self.pinned:
                del self.pinned[store]
                store.unpin()

    @contextlib.contextmanager
    def _gathered(self, block: Block, following: Sequence[Block], stays: bool = False) -> Iterator[None]:
        """Context: the block's parameters are there, after it too if it ``stays``, and those of the ``following`` ones are on their way."""
        stores = self._stores(block.module)
        for store in stores:
            self.prefetcher.uses += store.lease is not None
            self.prefetcher.hits += store.lease is not None and store in self.pinned
            self._pin(store)
        for number, other in enumerate(following[: 2 * self.ahead + 1] if self.ahead else ()):
            for store in self._stores(other.module):
                if number >= self.ahead:
                    store.fetch()
                elif store not in self.pinned and (self.optimizer.comm.world > 1 or not store.is_updating):  # in one order on all ranks
                    store.prefetch()
                    store.pins += 1
                    self.pinned[store] = None
        try:
            yield
        finally:
            if not stays:
                following_too = self._stores(following[0].module) if following else ()
                self._unpin(*(store for store in stores if store not in following_too))

    # ---- forward -------------------------------------------------------------------------------------------------------------

    def _forward(self) -> None:
        for lane in self.lanes:
            lane.start()
            self._resume(lane)
        rest = self._stores(self.optimizer.model)
        for store in rest:
            self._pin(store)
        first = [*rest, *(store for block in self.blocks for store in self._stores(block.module))]
        self.prefetcher.first = [store.index for store in first if store.is_partitioned]
        kept = self._kept()
        while waiting := [lane.waiting for lane in self.lanes if lane.waiting is not None]:
            turn = min(call.turn for call in waiting)
            block, calls = self.blocks[turn[1]], []
            is_last = block is self.blocks[-1]  # with which backward begins
            with self._gathered(block, self.blocks[-2::-1] if is_last else self.blocks[turn[1] + 1 :], stays=is_last):
                for number, lane in enumerate(self.lanes):
                    call = lane.waiting
                    if call is not None and call.turn == turn:
                        calls.append(call)
                        is_kept = (block, number) in kept
                        self._call(lane, call, call.has_graph and (is_kept or is_last))
                        self._resume(lane)
                        if call.kept is not None and not is_kept:
                            if lane.ended and len(self.losses) > number and lane.calls[-1] is call:  # backward of this one begins right here
                                self._back(lane, lane.calls.pop())
                            call.kept = None
            for call in reversed(calls):  # backward takes them the other way around
                call.pack()

    def _kept(self) -> set[tuple[Block, int]]:
        """Blocks, and numbers of micro-batches, whose activations are to be kept: those that backward wants first, of the last micro-batches.

        Of the last block one is kept at a time in any case, as its backward begins right after its forward.
        """
        left, found = self.keep_nbytes, set[tuple[Block, int]]()
        for block in self.blocks[-2::-1]:
            for number in reversed(range(len(self.lanes))):
                nbytes = self.optimizer.saved_nbytes.get(block.module, 0)
                if not nbytes or nbytes > left:
                    return found
                left -= nbytes
                found.add((block, number))
        return found

    def _call(self, lane: MicroBatch, call: Call, with_graph: bool) -> None:
        """Make the call in forward."""
        block = call.block
        call.random, call.attributes, call.settings = lane.random, dict(lane.attributes), list(lane.settings)
        if call.has_graph:
            self.called[block] = None
        flat, leaves = call.leaves() if with_graph else (call.plain(), {})
        given = tree_unflatten(flat, call.spec)
        before, versions = contents(given), [buffer._version for buffer in block.buffers]
        if block.writes_buffers is not False:
            call.buffers = [buffer.clone() for buffer in block.buffers]
        self.random.set(lane.random)
        self.attributes.put(lane.attributes)
        with settings_of(lane.settings), torch.set_grad_enabled(with_graph):
            try:
                call.result = call.make(given, self.depths)
            except BaseException as error:  # which the model may expect
                call.error = error
        lane.random, changes = self.random.now(lane.random), self.attributes.changes()
        own = {key: value for key, value in changes.items() if key in lane.attributes}
        others = {key: value for key, value in changes.items() if key not in own}
        if with_graph:
            self._refuse_graphs(block, changes)
        self.attributes.keep(others)
        self.attributes.take_away(own)
        lane.attributes.update(own)
        block.writes_buffers = versions != [buffer._version for buffer in block.buffers]
        call.buffers = call.buffers if block.writes_buffers else []
        if call.error is not None or not call.has_graph:
            return
        call.check("by the block")
        if contents(given) != before:
            raise RuntimeError(
                f"block {block.name!r} writes into an object that it is called with, and would do so again in backward, where accumulate() calls "
                f"it once more; let it return what it makes ({NO_CACHE})"
            )
        if call.buffers and any(other.block is block for other in lane.calls if other is not call):
            raise RuntimeError(
                f"block {block.name!r} writes its buffers, and each micro-batch calls it several times: that would be in another order than in the "
                "usual loop, which is to be used"
            )
        if with_graph:
            call.kept = differentiable(split(call.result, block.name)[0]), leaves

    # ---- backward ------------------------------------------------------------------------------------------------------------

    def _autograd(self, roots: Sequence[Any], grads: Sequence[Tensor | None], retain_graph: bool) -> None:
        self.in_backward = self.optimizer.in_scaled_backward = True
        try:
            torch.autograd.backward(roots, grads, retain_graph=retain_graph)  # type: ignore[arg-type]
        finally:
            self.in_backward = self.optimizer.in_scaled_backward = False

    def _loss_ended(self, lane: MicroBatch) -> None:
        """From the loss to the last blocks, before another micro-batch has as much in memory."""
        loss = lane.loss if lane.loss is not None else lane.result
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            got = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise TypeError(f"loss_fn must return a scalar tensor, the loss of one micro-batch; got {got}")
        self.losses.append(lane.result.detach() if isinstance(lane.result, Tensor) else lane.result)
        lane.loss = lane.result = None
        with self.optimizer.scaled(loss) as scaled:
            del loss
        used = nodes([scaled.grad_fn])
        for call in lane.calls:
            if call.kept is not None and not used.isdisjoint(nodes([output.grad_fn for output in call.kept[0]])):
                raise RuntimeError(_kept_graph(call.block))
        below = nodes([edge.node for call in lane.calls for edge in call.edges.values()])
        self._autograd([scaled], [None], retain_graph=not below.isdisjoint(used))

    def _backward(self) -> None:
        self._leave()
        while any(lane.calls for lane in self.lanes):
            turn = max(lane.calls[-1].turn for lane in self.lanes if lane.calls)
            with self._gathered(self.blocks[turn[1]], self.blocks[: turn[1]][::-1]):
                lanes = [lane for lane in self.lanes if lane.calls and lane.calls[-1].turn == turn]
                for lane in lanes:
                    self._back(lane, lane.calls.pop())
                self._leave()

    def _leave(self) -> None:
        """Pass on the gradients of blocks that backward has no calls of any more."""
        done = set(self.called) - {call.block for lane in self.lanes for call in lane.calls}
        needed = [store for block in set(self.called) - done for store in self._stores(block.module)]
        stores = [store for block in done for store in self._stores(block.module) if store not in needed]
        for block in done:
            del self.called[block]
        self._unpin(*stores)
        self.optimizer.grads.leave(stores)

    def _back(self, lane: MicroBatch, call: Call) -> None:
        """Go back through a call, and on through what the model did before it."""
        if any(grad is not None for grad in call.grads):
            self._through(lane, call)
        entries = [lane.pending.pop(key) for key in list(lane.pending) if lane.first_use[key] == call.number]
        call.edges, call.flat = {}, []
        if entries:
            self._autograd([edge for edge, _ in entries], [grad for _, grad in entries], retain_graph=True)

    def _through(self, lane: MicroBatch, call: Call) -> None:
        with call.buffers_then() if call.kept is None else contextlib.nullcontext():
            outputs, leaves = call.kept or self._call_again(call)
            call.kept = None
            alive = [weakref.ref(tensor) for tensor in (*(output for output in outputs if not output.is_leaf), *leaves.values())]
            pairs = [(output, grad) for output, grad in zip(outputs, call.grads, strict=True) if grad is not None and output.requires_grad]
            call.grads = []
            del outputs
            if pairs:
                self._autograd([output for output, _ in pairs], [grad for _, grad in pairs], retain_graph=False)
            del pairs
        edges = {key_of(edge): edge for edge in call.edges.values()}
        while leaves:
            key, leaf = leaves.popitem()
            if leaf.grad is not None:
                grad = leaf.grad if key not in lane.pending else lane.pending[key][1] + leaf.grad
                lane.pending[key] = edges[key], grad
                leaf.grad = None
            del leaf
        if any(reference() is not None for reference in alive):
            gc.collect()
            if any(reference() is not None for reference in alive):
                raise RuntimeError(_kept_graph(call.block))

    def _call_again(self, call: Call) -> tuple[list[Tensor], dict[Any, Tensor]]:
        """Make the call with a graph: the outputs that can have gradients, and the inputs that get them."""
        block = call.block
        flat, leaves = call.leaves()
        call.flat = []
        self.random.set(call.random)
        self.attributes.put(call.attributes)
        try:
            with settings_of(call.settings), torch.enable_grad(), self._measured(block):
                result = call.make(tree_unflatten(flat, call.spec), self.depths)
        finally:
            changes = self.attributes.changes()
            self.attributes.take_away(changes)
        self._refuse_graphs(block, changes)
        outputs = differentiable(split(result, block.name)[0])
        if [output.shape for output in outputs] != call.shapes:
            raise RuntimeError(
                f"block {block.name!r} returned tensors of {[*map(tuple, call.shapes)]} in forward, and of {[tuple(o.shape) for o in outputs]} when "
                "accumulate() called it again in backward; it must compute the same again"
            )
        return outputs, leaves

    @contextlib.contextmanager
    def _measured(self, block: Block) -> Iterator[None]:
        """Context: count the bytes that a block saves for backward, where that may be of use and is not known."""
        if not self.keep_nbytes or block.module in self.optimizer.saved_nbytes:
            yield
            return
        with saved_nbytes() as found:
            yield
        self.optimizer.saved_nbytes[block.module] = sum(found.values())

    def _refuse_graphs(self, block: Block, changes: Changes) -> None:
        for (module, name), value in changes.items():
            if any(getattr(hook, "name", None) == name for hook in module._forward_pre_hooks.values()):
                continue  # weights that torch.nn.utils makes before each forward
            if any(isinstance(leaf, Tensor) and leaf.grad_fn is not None for leaf in tree_leaves(value)):
                raise RuntimeError(
                    f"block {block.name!r} leaves a tensor with a graph in attribute {name!r} of a {type(module).__name__}, and accumulate() has cut "
                    "the graph at the block: a loss made of it would have no gradient. Return it from the block, or use the usual loop"
                )


def _kept_graph(block: Block) -> str:
    return (
        f"something keeps an input or output of block {block.name!r} with its graph after the call (a hook, a list, a cache), and accumulate() has "
        "cut the graph there: a loss made of it would have no gradient. Keep tensor.detach(), return from the block what the loss needs, or use the "
        "usual loop (transformers: output_hidden_states and output_router_logits = False)"
    )


def _outermost(optimizer: Any) -> Iterator[tuple[str, nn.Module]]:
    """The modules that units are made of, without those inside of others, and without tiles, in order of definition."""
    anchors = {module for held in optimizer.held for module in (held.unit.anchors[0], *held.unit.members)} - {optimizer.model}
    seen = set[nn.Module]()

    def inside(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
        for name, child in module.named_children():
            if child not in seen and not isinstance(child, Tile):
                seen.add(child)
                yield from [(path + name, child)] if child in anchors else inside(child, f"{path}{name}.")

    return inside(optimizer.model, "")


def _restore(block: Block) -> None:
    del block.module.__dict__["_compiled_call_impl"]
    if block.compiled is not None:
        block.module.__dict__["_compiled_call_impl"] = block.compiled


def _checkpoints(name: str) -> Iterator[Any]:
    """The frames of torch's checkpoints in progress in this thread, by the name that their hooks on saved tensors have for them, innermost first."""
    with no_hooks() as hooks:
        packs = [pack for pack, _ in hooks]
    for pack in packs:
        if is_of_checkpoint((pack,)):
            found = inspect.getclosurevars(inspect.unwrap(pack)).nonlocals.get(name)
            frame = found() if isinstance(found, weakref.ref) else found
            if frame is not None:
                yield frame


def accumulate(optimizer: Any, batches: Sequence[Any], loss_fn: LossFn, keep_nbytes: int) -> list[Any]:
    """See ``ZeroOptimizer.accumulate``."""
    if not callable(loss_fn):
        raise TypeError(f"loss_fn must be a function of the model and one batch that returns its loss; got {loss_fn!r}")
    if not batches:
        raise ValueError("accumulate() was given no batches; it takes those of one step, one for each micro-batch")
    try:
        return Accumulation(optimizer, batches, loss_fn, keep_nbytes).run()
    except BaseException:
        optimizer.zero_grad()
        raise
