"""One micro-batch's call of a block: its inputs, its place in the random numbers, and the gradients of its outputs as they arrive."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from zk.accumulation.micro_batch import Changes, Edge
from zk.nn.tiled_linear import autocast_as, autocast_now

NO_CACHE = "transformers: model.config.use_cache = False"


class Block:
    """A module that all micro-batches pass before any passes the next one."""

    def __init__(self, module: nn.Module, name: str, position: int) -> None:
        self.module, self.name, self.position = module, name, position
        self.compiled = module.__dict__.get("_compiled_call_impl")
        self.call: Callable[..., Any] = module._call_impl if self.compiled is None else self.compiled
        self.buffers = list(module.buffers())
        self.writes_buffers: bool | None = None  # None: it has not been called

    @property
    def is_trained(self) -> bool:
        """Tell if any of its parameters is."""
        with torch._C.DisableTorchFunctionSubclass():  # which is slow for released parameters
            return any(param.requires_grad for param in self.module.parameters())


def key_of(edge: GradientEdge) -> Edge:
    """The place in the graph that a gradient goes to."""
    return edge.node, edge.output_nr


def contents(value: Any, depth: int = 6) -> list[tuple[int, int]]:
    """Identity and version of all tensors that ``value`` leads to, through containers and attributes of objects."""
    found = []
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            found.append((id(leaf), leaf._version))
        elif depth and not isinstance(leaf, nn.Module | type):
            inside = list(leaf) if isinstance(leaf, set | frozenset) else getattr(leaf, "__dict__", None)
            found += contents(inside, depth - 1) if inside else []
    return found


def split(value: Any, name: str) -> tuple[list[Any], Callable[[Sequence[Any]], Any]]:
    """Leaves of what block ``name`` returns, and what puts it together again from others. Dataclasses are containers too."""
    flat, spec = tree_flatten(value)
    parts: list[tuple[list[Any], Callable[[Sequence[Any]], Any]]] = []
    for leaf in flat:
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            fields = [field.name for field in dataclasses.fields(leaf)]
            inner, join = split([getattr(leaf, field) for field in fields], name)
            parts.append((inner, functools.partial(_with_fields, leaf, fields, join)))
        elif not isinstance(leaf, Tensor) and contents(leaf):
            raise RuntimeError(
                f"block {name!r} returns a {type(leaf).__name__} that has tensors: accumulate() cannot see whether they are part of a graph. Let it "
                f"return tensors, in tuples, lists, dicts or dataclasses ({NO_CACHE})"
            )
        else:
            parts.append(([leaf], lambda leaves: leaves[0]))

    def together(leaves: Sequence[Any]) -> Any:
        rest = iter(leaves)
        return tree_unflatten([join([next(rest) for _ in inner]) for inner, join in parts], spec)

    return [leaf for inner, _ in parts for leaf in inner], together


def _with_fields(value: Any, names: Sequence[str], join: Callable[[Sequence[Any]], Any], leaves: Sequence[Any]) -> Any:
    copy = object.__new__(type(value))
    for name, leaf in {**vars(value), **dict(zip(names, join(leaves), strict=True))}.items():
        object.__setattr__(copy, name, leaf)
    return copy


def differentiable(leaves: Sequence[Any]) -> list[Tensor]:
    """The different tensors among ``leaves`` that can have a gradient, in order."""
    return list({id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())}.values())


class Call:
    """One call of a block, made in the thread of its micro-batch.

    Args:
        block: that is called.
        number: of the call in its micro-batch.
        turn: how often the micro-batch had come back to an earlier block, and the block's position. Calls of one turn go together.
        args, kwargs: as the model gives them.
        hooks: the user's on saved tensors, or None.
        depth: of the model's calls in this thread.
        device: that computes.
    """

    def __init__(
        self, block: Block, number: int, turn: tuple[int, int], args: Any, kwargs: Any, hooks: Any, depth: int, device: torch.device
    ) -> None:
        self.block, self.number, self.turn, self.hooks, self.depth = block, number, turn, hooks, depth
        self.flat, self.spec = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in self.flat if isinstance(leaf, Tensor)]
        self.has_graph = torch.is_grad_enabled() and (any(tensor.requires_grad for tensor in tensors) or block.is_trained)
        self.versions = {id(tensor): tensor._version for tensor in tensors}
        self.edges: dict[int, GradientEdge] = {}  # by number of the leaf, of those that get gradients
        for place, leaf in enumerate(self.flat if self.has_graph else ()):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                self.edges[place] = get_gradient_edge(leaf)
        self.autocast, self.context = autocast_now(device), contextvars.copy_context()
        self.packed: dict[int, Any] = {}
        self.random: list[Tensor] = []
        self.attributes: Changes = {}
        self.settings: list[Any] = []
        self.buffers: list[Tensor] = []  # of the block as they were, if it writes them
        self.result: Any = None
        self.error: BaseException | None = None
        self.shapes: list[torch.Size] = []  # of the outputs that can have gradients
        self.grads: list[Tensor | None] = []  # of these
        self.kept: tuple[list[Tensor], dict[Edge, Tensor]] | None = None  # these with their graph, and the inputs at its other end

    def make(self, arguments: tuple[Any, Any], depths: Any) -> Any:
        """Call the block as the model did, with these arguments, by position and by name.

        What autocast has cast is not kept for the next call: it may have no graph.
        """
        (args, kwargs), before, depths.depth = arguments, depths.depth, self.depth
        try:
            with autocast_as(self.autocast):
                return self.context.run(self.block.call, *args, **kwargs)
        finally:
            depths.depth = before

    def check(self, when: str) -> None:
        """Raise if an input was written since the call."""
        for leaf in self.flat:
            if isinstance(leaf, Tensor) and leaf._version != self.versions[id(leaf)]:
                raise RuntimeError(
                    f"an input of shape {tuple(leaf.shape)} of block {self.block.name!r} was modified by an inplace operation, {when}; "
                    "accumulate() needs it once more in backward: write to a copy of it instead (x = x + y, not x += y)"
                )

    def plain(self) -> list[Any]:
        """The inputs, without a graph."""
        return [leaf.detach() if isinstance(leaf, Tensor) and leaf.requires_grad else leaf for leaf in self.flat]

    def leaves(self) -> tuple[list[Any], dict[Edge, Tensor]]:
        """The inputs with the graph cut, and those of them that get gradients, by where these go."""
        self.check("after the call")
        cut: dict[Edge, Tensor] = {}
        flat = list(self.flat)
        for place, edge in self.edges.items():
            key = key_of(edge)
            if key not in cut:
                tensor = self.hooks[1](self.packed[place]) if place in self.packed else flat[place]
                cut[key] = tensor.detach().requires_grad_()
            flat[place] = cut[key]
        self.packed.clear()
        return flat, cut

    def pack(self) -> None:
        """Give the inputs that get gradients to hooks on saved tensors, as zk.offload_activations has; others stay."""
        if self.has_graph and self.kept is None:
            self.check("after the call")
            for place in self.edges if self.hooks is not None else ():
                self.packed[place] = self.hooks[0](self.flat[place].detach())
                self.flat[place] = None

    @contextlib.contextmanager
    def buffers_then(self) -> Iterator[None]:
        """Context: the block has the buffers that it was called with."""
        latest = [buffer.clone() for buffer in self.block.buffers] if self.buffers else []
        _copy(self.block.buffers, self.buffers)
        try:
            yield
        finally:
            _copy(self.block.buffers, latest)


@torch.no_grad()
def _copy(buffers: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for buffer, own in zip(buffers, values, strict=bool(values)):
        buffer.copy_(own)


class Boundary(torch.autograd.Function):
    """Outputs of a call become part of the micro-batch's graph; what arrives in backward stays with the call.

    ``expected`` raises where backward is not the one that goes through the calls.
    """

    @staticmethod
    def forward(ctx: Any, dummy: Tensor, call: Call, expected: Callable[[], None], outputs: list[Tensor]) -> tuple[Tensor, ...]:
        # (a list, in which autograd sees no inputs)
        ctx.call, ctx.expected = call, expected
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, None, None, None]:  # type: ignore[override]
        ctx.expected()
        held = ctx.call.grads
        for place, grad in enumerate(grads):
            if grad is not None:
                held[place] = grad if held[place] is None else held[place] + grad
        return None, None, None, None


def nodes(roots: Sequence[Any]) -> set[Any]:
    """The nodes of the graph that lead from ``roots`` to calls of blocks, without these and without leaves."""
    found, left = set[Any](), [root for root in roots if root is not None]
    while left:
        node = left.pop()
        if node not in found and not isinstance(node, Boundary._backward_cls) and node.next_functions:  # type: ignore[attr-defined]
            found.add(node)
            left += [following for following, _ in node.next_functions if following is not None]
    return found
