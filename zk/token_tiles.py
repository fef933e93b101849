"""A position-wise module, run tile by tile of tokens: its activations exist for one tile at a time, forward and backward.

Forward keeps no graph. Backward computes each tile again with one, and adds up the gradients of parameters in fp32, tile after tile; each parameter
gets its sum once. The tile is a fixed number of tokens, whatever memory is free and whatever the limit, so the same sequence gives the same bits.
Source: sequence tiling, Arctic Long Sequence Training, arXiv 2506.13996, section 3.1.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from zk.accumulation.calls import contents
from zk.accumulation.micro_batch import Random
from zk.core.hooks import CastInputs, Hook
from zk.nn.activations import saved_nbytes
from zk.nn.tiled_linear import autocast_as, autocast_now, memoryless
from zk.nn.tiles import Tile
from zk.parallel.gather import keep_gathered

# tokens of a tile: in host memory, and on a device, which has more to do at once. Adding a tile's gradient to the sums in fp32 moves 10 to 12 bytes
# for each weight: with fewer tokens that takes longer than its product, and memory gains little, as a tile is about as large as the sums are
TOKENS, TOKENS_ON_DEVICE = 512, 4096


class TokenTiles:
    """Stand-in for a module's ``forward``, which calls that for one tile after the other."""

    def __init__(self, module: nn.Module, name: str, max_nbytes: int | None) -> None:
        self.module, self.name, self.max_nbytes = module, name, max_nbytes
        self.before = module.__dict__.get("forward")  # somebody else's, in place of the class's
        self.is_checked = False

    def whole(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module without tiles."""
        return type(self.module).forward(self.module, *args, **kwargs) if self.before is None else self.before(*args, **kwargs)

    @_disable_dynamo  # as torch.compiler.disable, which would import the compiler with zk
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        flat, spec = tree_flatten((args, kwargs))
        places = [place for place, leaf in enumerate(flat) if isinstance(leaf, Tensor)]
        if not places or flat[places[0]].ndim < 2 or not flat[places[0]].numel():
            return self.whole(*args, **kwargs)
        call = _Call(self, flat, spec, places)
        if call.tokens <= call.size:
            return self.whole(*args, **kwargs)
        inputs = [flat[place] for place in places]
        if any(tensor.shape[:-1] != call.lead for tensor in inputs):
            raise ValueError(
                f"{self.name!r} is called with tensors of {[tuple(tensor.shape) for tensor in inputs]}, and all of them must have the same tokens, "
                "(..., features), to be cut into tiles of tokens; leave it out of tile_sequence(modules=...)"
            )
        for path, module in self.module.named_modules():
            # (of forward and backward)
            hooks = (
                hook
                for kind, its in vars(module).items()
                if path and kind.endswith(("ward_hooks", "ward_pre_hooks"))
                for hook in its.values()
            )
            if not all(isinstance(hook, CastInputs | Hook) or getattr(hook, "__name__", "") == "output_capturing_hook" for hook in hooks):
                raise RuntimeError(
                    f"{path!r} in {self.name!r} has a hook, which would be called once for each tile of tokens; remove it, or leave "
                    "the module out of tile_sequence(modules=...)"
                )
        params = [param for param in self.module.parameters() if param.requires_grad]
        if any(param._backward_hooks for param in params):
            raise RuntimeError(
                f"a parameter of {self.name!r} has a hook (register_hook), which would see the gradient of each tile of tokens, and their sum; use "
                "register_post_accumulate_grad_hook, or leave the module out of tile_sequence(modules=...)"
            )
        if not self.is_checked:
            call.check(inputs)
            if self.max_nbytes is not None:
                call.refuse_large(inputs, self.max_nbytes)
            self.is_checked = self.max_nbytes is None or not torch.is_inference_mode_enabled()  # where nothing is saved
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (*inputs, *params)):
            outputs = _Outputs.apply(_Inputs.apply(call, *inputs, *params), call, inputs)  # type: ignore[no-untyped-call]
        else:
            outputs = call.forward(inputs)
        return call.result(outputs)


class _Call:
    """One call of a module."""

    def __init__(self, owner: TokenTiles, flat: list[Any], spec: Any, places: list[int]) -> None:
        first: Tensor = flat[places[0]]
        self.owner, self.spec, self.places = owner, spec, places
        self.flat = [None if isinstance(leaf, Tensor) else leaf for leaf in flat]
        self.device, self.lead = first.device, first.shape[:-1]
        self.tokens, self.size = math.prod(self.lead), TOKENS if first.device.type == "cpu" else TOKENS_ON_DEVICE
        self.out_spec: Any = None
        self.grads: tuple[Tensor | None, ...] = ()  # of the outputs, in backward
        self.others: dict[int, Any] = {}  # what the module returns beside tensors, by place
        self.autocast, self.random = autocast_now(first.device), Random(first.device)  # autocast: in forward

    def tiles(self) -> Iterator[slice]:
        """The tokens of each tile."""
        return (slice(start, min(start + self.size, self.tokens)) for start in range(0, self.tokens, self.size))

    def tile(self, tensor: Tensor, rows: slice) -> Tensor:
        """Some tokens of ``tensor`` (..., features), with as many dimensions, the leading ones of size 1."""
        return tensor.detach().reshape(self.tokens, -1)[rows].view(*[1] * (len(self.lead) - 1), -1, tensor.shape[-1])

    def call(self, tensors: Sequence[Tensor]) -> Any:
        """Call the module with these in place of the tensors that it was given."""
        flat = list(self.flat)
        for place, tensor in zip(self.places, tensors, strict=True):
            flat[place] = tensor
        args, kwargs = tree_unflatten(flat, self.spec)
        return self.owner.whole(*args, **kwargs)

    def forward(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """All outputs that are tensors, tile by tile."""
        found: list[Tensor] = []
        refuse = self._watch(inputs)
        for rows in self.tiles():
            count = rows.stop - rows.start
            with torch.no_grad():
                leaves, self.out_spec = tree_flatten(self.call([self.tile(tensor, rows) for tensor in inputs]))
            before, self.others = self.others, {place: leaf for place, leaf in enumerate(leaves) if not isinstance(leaf, Tensor)}
            tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
            if contents(self.others) or (found and before != self.others):
                raise ValueError(
                    f"{self.owner.name!r} returns, beside tensors, {[type(leaf).__name__ for leaf in self.others.values()]}, of which each tile of "
                    "tokens has its own; let it return tensors in tuples, lists or dicts, or leave it out of tile_sequence(modules=...)"
                )
            if not found:
                refuse()
                kept = _attributes(self.owner.module)
                found = [tensor.new_empty(*self._shape(tensor, count)) for tensor in tensors]
            for whole, part in zip(found, tensors, strict=True):
                self.rows_of(whole)[rows] = part.reshape(count, *self.rows_of(whole).shape[1:])
        refuse()
        if kept.keys() != _attributes(self.owner.module).keys():
            raise RuntimeError(
                f"{self.owner.name!r} keeps a tensor in an attribute (a loss of its router, say), where only that of the last tile of tokens would "
                "be, without a graph; let it return what is wanted of each token, or leave it out of tile_sequence(modules=...)"
            )
        return tuple(found)

    def rows_of(self, whole: Tensor) -> Tensor:
        """An output, or its gradient, by token: (tokens, ...)."""
        return whole if whole.shape[0] == self.tokens else whole.reshape(self.tokens, *whole.shape[len(self.lead) :])

    def _shape(self, part: Tensor, count: int) -> tuple[int, ...]:
        """The shape of an output of which ``part`` are ``count`` tokens: as the input is, or token by token."""
        ones = len(self.lead) - 1
        if part.shape[: ones + 1] == (*[1] * ones, count):
            return *self.lead, *part.shape[ones + 1 :]
        if part.ndim and part.shape[0] == count:
            return self.tokens, *part.shape[1:]
        raise ValueError(
            f"{self.owner.name!r} returns a tensor of {tuple(part.shape)} for {count} tokens, which is not one row for each, and cannot be put "
            "together from tiles of tokens; leave it out of tile_sequence(modules=...)"
        )

    def result(self, outputs: Sequence[Tensor]) -> Any:
        """Put together as the module returns it."""
        tensors = iter(outputs)
        return tree_unflatten(
            [self.others[place] if place in self.others else next(tensors) for place in range(self.out_spec.num_leaves)], self.out_spec
        )

    def _watch(self, inputs: Sequence[Tensor]) -> Callable[[], None]:
        """Return the check that nothing has happened since which is not to happen in a tile."""
        written = [*inputs, *self.owner.module.buffers()]
        versions, random, seen, name = versions_of(written), self.random.now([]), _captured(), self.owner.name

        def refuse() -> None:
            if self.random.now(random) is not random:
                self.random.set(random)
                raise RuntimeError(
                    f"{name!r} draws random numbers, and tile by tile of tokens they would be others than those of the whole sequence; set its "
                    "dropout (or jitter) to 0, or leave it out of tile_sequence(modules=...)"
                )
            if versions_of(written) != versions:
                raise RuntimeError(
                    f"{name!r} changes its input in place, or a buffer, and backward computes it again; leave it out of tile_sequence(modules=...)"
                )
            if seen != _captured():
                raise RuntimeError(
                    f"transformers collects outputs of modules inside of {name!r}, tile by tile of tokens and without a graph; set "
                    "output_router_logits, output_hidden_states and output_attentions to False, or leave the module out of "
                    "tile_sequence(modules=...)"
                )

        return refuse

    @torch.no_grad()
    def check(self, inputs: Sequence[Tensor]) -> None:
        """Check on two tokens that each one's output is its own."""
        found = []
        for rows in (slice(0, 2), slice(0, 1), slice(1, 2)):
            copies = [self.tile(tensor, rows).clone() for tensor in inputs]
            refuse = self._watch([*inputs, *copies])
            count = rows.stop - rows.start
            leaves = [leaf for leaf in tree_leaves(self.call(copies)) if isinstance(leaf, Tensor)]
            for leaf in leaves:
                self._shape(leaf, count)
            found.append([leaf.reshape(count, -1) for leaf in leaves])
            refuse()
        for both, first, second in zip(*found, strict=True):
            apart = torch.cat([first, second]).double()
            if not torch.allclose(both.double(), apart, rtol=1e-2, atol=1e-2 * float(apart.abs().max()), equal_nan=True):
                raise ValueError(
                    f"{self.owner.name!r} gives a token another output beside another token: it is not position-wise, and cannot run tile by tile of "
                    "tokens; leave it out of tile_sequence(modules=...)"
                )

    def refuse_large(self, inputs: Sequence[Tensor], max_nbytes: int) -> None:
        """Refuse a tile whose activations, and the gradients of these, take more: what a call of one token twice saves beyond one of it once."""
        totals, random = [], self.random.now([])
        for copies in (1, 2):
            tokens = [torch.cat([self.tile(tensor, slice(0, 1))] * copies, -2).requires_grad_(tensor.is_floating_point()) for tensor in inputs]
            with torch.enable_grad(), saved_nbytes() as found:
                kept = self.call(tokens)
            totals.append(sum(found.values()))
            del kept
        self.random.set(random)
        needed = 2 * (totals[1] - totals[0]) * self.size
        if needed > max_nbytes:
            raise ValueError(
                f"max_nbytes must be at least {needed}: as much as a tile of {self.size} tokens of {self.owner.name!r} takes, its activations and "
                f"their gradients; got {max_nbytes}. Raise it, or leave the module out of tile_sequence(modules=...)"
            )


class _Inputs(torch.autograd.Function):
    """The inputs of a call, saved before its outputs are computed: a checkpoint that computes them again stops here where nothing else is needed.

    Its output is a link without memory to ``_Outputs``. Backward computes all tiles.
    """

    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: Tensor) -> Tensor:
        count = len(call.places)
        ctx.save_for_backward(*tensors[:count])
        ctx.call, ctx.params = call, tensors[count:]
        return memoryless((1,), torch.float32, call.device)

    @staticmethod
    def backward(ctx: Any, link: Tensor) -> tuple[Tensor | None, ...]:
        call: _Call = ctx.call
        grads, call.grads = call.grads, ()
        inputs, params = ctx.saved_tensors, ctx.params
        by_token = [None if grad is None else call.rows_of(grad) for grad in grads]
        wants = [tensor for tensor, wanted in zip(inputs, ctx.needs_input_grad[1:], strict=False) if wanted]
        sums: list[Tensor | None] = [None] * len(params)
        found = {id(tensor): torch.zeros_like(tensor, memory_format=torch.contiguous_format) for tensor in wants}
        with keep_gathered(_own(call.owner.module), call.owner.module.parameters()):
            for rows in call.tiles():
                parts = {id(tensor): call.tile(tensor, rows).requires_grad_(id(tensor) in found) for tensor in inputs}
                with torch.enable_grad(), autocast_as(call.autocast):
                    outputs = [leaf for leaf in tree_leaves(call.call([parts[id(tensor)] for tensor in inputs])) if isinstance(leaf, Tensor)]
                pairs = [
                    (output, grad[rows].reshape(output.shape))
                    for output, grad in zip(outputs, by_token, strict=True)
                    if grad is not None and output.requires_grad
                ]
                if not pairs:
                    continue
                leaves = [*(parts[id(tensor)] for tensor in wants), *params]
                tensors, of_tensors = zip(*pairs, strict=True)
                made = torch.autograd.grad(tensors, leaves, of_tensors, allow_unused=True)
                for tensor, grad in zip(wants, made, strict=False):
                    if grad is not None:
                        found[id(tensor)].view(call.tokens, -1)[rows] = grad.reshape(rows.stop - rows.start, -1)
                for number, grad in enumerate(made[len(wants) :]):
                    before = sums[number]
                    if grad is not None:
                        sums[number] = grad.to(torch.promote_types(grad.dtype, torch.float32)) if before is None else before.add_(grad)
        of_inputs = [found.pop(id(tensor), None) for tensor in inputs]  # once, of one that was given twice
        of_params = [None if total is None else total.to(param.dtype) for total, param in zip(sums, params, strict=True)]
        return None, *of_inputs, *of_params


class _Outputs(torch.autograd.Function):
    """The outputs of a call; backward begins here."""

    @staticmethod
    def forward(ctx: Any, link: Tensor, call: _Call, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        outputs = call.forward(inputs)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(output for output in outputs if not output.is_floating_point()))
        ctx.call = call
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        call: _Call = ctx.call
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"{call.owner.name!r} runs tile by tile of tokens, and has no second derivative; call backward without create_graph=True, or leave "
                "the module out of tile_sequence(modules=...)"
            )
        call.grads = grads
        return memoryless((1,), torch.float32, call.device), None, None


def _own(module: nn.Module) -> list[nn.Parameter]:
    """The parameters that each tile uses: not those of experts, nor of tiles of weights, which are units of their own."""
    found = list(module._parameters.values())
    for child in module.children():
        if not isinstance(child, (nn.ModuleList, Tile)):
            found += _own(child)
    return [param for param in found if param is not None]


def _attributes(module: nn.Module) -> dict[int, Tensor]:
    """Tensors that a module, and those inside of it, have in plain attributes, by id."""
    return {id(value): value for part in module.modules() for value in vars(part).values() if isinstance(value, Tensor)}


def versions_of(tensors: Iterable[Tensor]) -> list[int]:
    """Versions of tensors, which writes change."""
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors]  # without a backward, writes do no harm


def _captured() -> int:
    """How many outputs of modules transformers has collected in the forward in progress, if it does."""
    capturing = sys.modules.get("transformers.utils.output_capturing")
    collected = capturing._active_collector.get() if capturing is not None else None
    return sum(len(values) for values in collected.values() if isinstance(values, list)) if collected else 0
