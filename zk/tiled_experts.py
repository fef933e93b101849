"""TiledExperts: experts that are one parameter (experts, ...) each, cut into groups of experts that are fetched where a token goes to one.

Mixtures of experts keep the experts of a layer in parameters of three dimensions, and their forward takes hidden states and a routing: for each
token the numbers of its experts, and a weight for each. Here a group of experts is a module of the same class with fewer experts, and computes
by that class's own forward, with the tokens that are routed to it. Its outputs are added up as the whole layer adds them up: expert after
expert, or over the experts of each token where transformers' grouped and batched products compute. So the bits are those of the whole layer.

As autograd sees it each group has inputs of its own, so backward takes one group after the other, in the reverse order of forward.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from zk.core.logs import log
from zk.core.owners import is_wrapper, owner_of
from zk.nn.tiles import Piece, Tile, Tiled, Whole, check_call, check_untied, joined, replace, users_of
from zk.parallel.comm import CHOICE

_OF_ANY_MODULE = frozenset(vars(nn.Module()))


class ExpertTile(Tile):
    """Some experts of a TiledExperts: ``part`` is a module of the whole layer's class."""

    def __init__(self, part: nn.Module, experts: slice) -> None:
        super().__init__()
        self.part, self.experts = part, experts
        self.is_checked = False

    def forward(self, rows: Tensor, chosen: Tensor, weights: Tensor, by_all: bool) -> Tensor:
        """The outputs of ``rows`` (n, ...), each of one expert: ``chosen`` (n, 1) says which of these, ``weights`` (n, 1) how much of it.

        ``by_all``: all ranks call it, with tokens or without, and in backward they gather it again alike.
        """
        if len(rows) and not self.is_checked:
            self._check(rows[:1], chosen[:1], weights[:1])
        out = self.part(rows, chosen, weights) if len(rows) else rows
        if by_all and torch.is_grad_enabled():
            return _GatheredAgain.apply(out, rows, *self.parameters())  # type: ignore[no-untyped-call, no-any-return]
        return out

    @torch.no_grad()
    def _check(self, row: Tensor, chosen: Tensor, weight: Tensor) -> None:
        """Check on one row that twice the weight gives twice the output: else experts cannot be computed one by one and added up."""
        once, twice = (self.part(row, chosen, torch.full_like(weight, factor)) for factor in (1, 2))
        is_linear = (
            once.shape == row.shape
            and once.dtype == row.dtype
            and torch.allclose(twice, 2 * once, rtol=1e-2, atol=torch.finfo(row.dtype).smallest_normal, equal_nan=True)
        )
        if not is_linear:
            raise ValueError(
                f"{type(self.part).__name__} gives something else for a token than the sum of its experts' outputs, each times its weight, in the "
                "shape and dtype of the hidden states (it adds to it, normalizes the weights, or draws random numbers), so its experts cannot be "
                "tiled; raise max_nbytes above its size, or do in the module around it what is not an expert's"
            )
        self.is_checked = True

    def extra_repr(self) -> str:
        return f"experts {self.experts.start}:{self.experts.stop}"


class _GatheredAgain(torch.autograd.Function):
    """The output of a tile. In backward its parameters are read, whatever else reads them; those without tokens get zeros."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, rows: Tensor, *params: Tensor) -> Tensor:
        ctx.none = None if len(rows) else rows.detach()
        ctx.save_for_backward(*params)
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        params = ctx.saved_tensors
        if ctx.none is None:
            return grad, None, *[None] * len(params)
        zeros = [param.new_zeros(()).expand(param.shape) for param in params]
        return grad, torch.zeros_like(ctx.none), *zeros


class _Unused(torch.autograd.Function):
    """The output of the layer. In backward ``params``, which no token was routed to, get the zeros that rows of a whole parameter would have."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, *params: Tensor) -> Tensor:
        # (not the parameters, which may be released)
        ctx.like = [(param.shape, param.dtype, param.device) for param in params]
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        zeros = [
            torch.zeros((), dtype=dtype, device=device).expand(shape)
            for shape, dtype, device in ctx.like
        ]
        return grad, *zeros


@dataclasses.dataclass(frozen=True, slots=True)
class _Routing:
    """A routing as pairs of a token and one of its experts, by expert: (pairs,) each."""

    expert: Tensor
    order: Tensor  # of the pairs in the routing
    token: Tensor
    weight: Tensor
    counts: list[int]  # pairs of each expert, and of none
    bounds: list[int]  # where those of each one begin, and where all end
    slots: int  # experts of each token
    tail: tuple[int, ...]  # dimensions of the routing after the tokens, for one expert

    @classmethod
    def of(cls, chosen: Tensor, weights: Tensor, num: int, by_token: bool) -> _Routing:
        """Sort the pairs of ``chosen`` and ``weights`` (tokens, k). Those of one expert keep the order in which the whole layer takes them."""
        tokens, slots = len(chosen), math.prod(chosen.shape[1:])
        numbers = chosen.reshape(tokens, slots)
        if by_token:  # the very sort of transformers, which is not stable
            expert, order = numbers.reshape(-1).sort()
            token, slot = order // slots, order % slots
        else:
            expert, order = numbers.t().reshape(-1).sort(stable=True)
            token, slot = order % tokens, order // tokens
        weight = weights.reshape(tokens, slots)[token, slot]
        counts = torch.bincount(expert, minlength=num + 1).tolist()
        bounds = [0, *itertools.accumulate(counts)]
        tail = (1,) * (chosen.ndim - 1)
        return cls(expert, order, token, weight, counts, bounds, slots, tail)

    def span(self, tile: ExpertTile) -> slice:
        """The pairs of a tile's experts."""
        first, stop = tile.experts.start, tile.experts.stop
        return slice(self.bounds[first], self.bounds[stop])

    def of_rows(self, tile: ExpertTile, weight: Tensor) -> tuple[Tensor, Tensor]:
        """The routing of a tile's rows: numbers of its own experts, and what of ``weight`` (pairs,) is theirs."""
        span = self.span(tile)
        numbers = self.expert[span] - tile.experts.start
        shape = (-1, *self.tail)
        return numbers.view(shape), weight[span].view(shape)


class TiledExperts(Tiled):
    """The experts of a layer, in groups that are units of their own. Made by ``tile_experts``.

    Parameters are those of the tiles; ``state_dict()``, ``load_state_dict()`` and attributes have those of the whole layer.
    """

    def __init__(self, experts: nn.Module, num_tiles: int, rest: bool = False) -> None:
        super().__init__()
        own = {name: value for name, value in vars(experts).items() if name not in _OF_ANY_MODULE}
        vars(self).update(own)  # config, number of experts, and what else other modules read of it
        self._kind, self._rest = type(experts).__name__, rest
        self._arguments = tuple(inspect.signature(experts.forward).parameters)
        params = dict(experts.named_parameters())  # (all are its own)
        self._shapes = {name: tuple(param.shape) for name, param in params.items()}
        self._num = num = next(iter(self._shapes.values()))[0]
        self.tiles = nn.ModuleList()
        for start, stop in itertools.pairwise(num * index // num_tiles for index in range(num_tiles + 1)):
            part = type(experts).__new__(type(experts))
            nn.Module.__init__(part)
            numbers = {
                name: stop - start
                for name, value in own.items()
                if "expert" in name.lower() and type(value) is int and value == num
            }
            vars(part).update(own | numbers)
            for name, child in experts._modules.items():  # (they have no parameters)
                part.add_module(name, child)
            for name, param in params.items():
                values = param.detach()[start:stop].clone(memory_format=torch.contiguous_format)
                part.register_parameter(name, nn.Parameter(values, param.requires_grad))
            self.tiles.append(ExpertTile(part, slice(start, stop)))
        self.keep_names()
        self.train(experts.training)

    def has_whole(self, name: str) -> bool:
        return name in vars(self).get("_shapes", ())

    def pieces(self) -> dict[str, Piece]:
        found = {}
        for index, tile in enumerate(self.each_tile()):
            for name, shape in self._shapes.items():
                others = [slice(0, size) for size in shape[1:]]
                found[f"tiles.{index}.part.{name}"] = Piece(name, shape, (tile.experts, *others))
        return found

    def __getattr__(self, name: str) -> Any:
        if self.has_whole(name):
            return Whole.of(self, name, joined(self.parts(name), self._shapes[name]))
        return super().__getattr__(name)

    def each_tile(self) -> list[ExpertTile]:
        """From the first expert to the last."""
        return list(self.tiles)  # type: ignore[arg-type]

    # ---- forward -------------------------------------------------------------------------------------------------------------

    @_disable_dynamo  # as torch.compiler.disable, which would import the compiler with zk
    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Hidden states (tokens, ...), and a routing (tokens, experts of each): numbers, where the number of experts stands for none, and weights."""
        hidden, chosen, weights = self._given(args, kwargs)
        # of transformers' products, all but the eager one add up the outputs of each token
        implementation = getattr(getattr(self, "config", None), "_experts_implementation", None)
        by_token = hasattr(self, "is_concatenated") and implementation not in (None, "eager")
        routing = _Routing.of(chosen, weights, self._num, by_token)
        if len(routing.counts) > self._num + 1:
            raise IndexError(f"{self._kind} has {self._num} experts, and a token is routed to expert {len(routing.counts) - 1}")
        used, by_all = self._taken(routing)
        add_up = self._add_by_token if by_token else self._add_in_turn
        out = add_up(hidden, routing, used, by_all)
        if self._rest or not torch.is_grad_enabled() or not (used or by_token):
            return out
        unused = [param for tile in self.each_tile() if tile not in used for param in tile.parameters() if param.requires_grad]
        return _Unused.apply(out, *unused) if unused else out  # type: ignore[no-untyped-call, no-any-return]

    def _add_in_turn(self, hidden: Tensor, routing: _Routing, used: Sequence[ExpertTile], by_all: bool) -> Tensor:
        """The output, to which one expert after the other adds its tokens'."""
        out = torch.zeros_like(hidden)
        for tile in used:
            span = routing.span(tile)
            of_each = routing.token[span].split(routing.counts[tile.experts])
            # (at least one, be it empty)
            of_each = tuple(tokens for tokens in of_each if len(tokens)) or of_each[:1]
            rows = torch.cat([hidden[tokens] for tokens in of_each])
            values = tile(rows, *routing.of_rows(tile, routing.weight), by_all)
            parts = values.split([len(tokens) for tokens in of_each])
            for tokens, part in zip(of_each, parts, strict=True):
                out.index_add_(0, tokens, part)
        return out

    def _add_by_token(self, hidden: Tensor, routing: _Routing, used: Sequence[ExpertTile], by_all: bool) -> Tensor:
        """The output, where those of each token's experts are added up at once."""
        if not used:
            return torch.zeros_like(hidden)
        spans = [routing.span(tile) for tile in used]
        rows = hidden[routing.token[: routing.bounds[self._num]]]
        parts = rows.split([span.stop - span.start for span in spans])
        ones = torch.ones_like(routing.weight)
        outs = [
            # (each part with a node of its own, as hooks on what split gives run with the last one only)
            tile(part.view_as(part), *routing.of_rows(tile, ones), by_all)
            for tile, part in zip(used, parts, strict=True)
        ]
        values, num = torch.cat(outs), len(routing.order)
        if len(values) < num:  # some places stand for no expert
            none = values.new_zeros(num - len(values), *values.shape[1:])
            values = torch.cat([values, none])
        back = torch.empty_like(routing.order)
        back[routing.order] = torch.arange(num, device=back.device)
        weight = routing.weight.view(-1, *[1] * (values.ndim - 1))
        weighted = (values * weight)[back]
        per_token = weighted.view(-1, routing.slots, *values.shape[1:])
        return per_token.sum(1).to(hidden.dtype)

    def _given(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
        """Hidden states, numbers of experts, and their weights."""
        given = dict(zip(self._arguments, args, strict=False)) | kwargs
        values = [given.get(name) for name in self._arguments]
        tensors = [value for value in values if isinstance(value, Tensor)]
        routing = sorted(tensors[1:], key=Tensor.is_floating_point)
        if len(given) != 3 or [value.is_floating_point() for value in routing] != [False, True]:
            what = ", ".join(f"{name} {getattr(value, 'dtype', type(value).__name__)}" for name, value in given.items())
            raise TypeError(f"a tiled {self._kind} takes hidden states, the numbers of each token's experts and their weights; got {what}")
        hidden, (chosen, weights) = tensors[0], routing
        if chosen.shape != weights.shape or chosen.ndim not in (1, 2) or len(chosen) != len(hidden):
            raise ValueError(
                f"a tiled {self._kind} takes a routing of (tokens, experts of each) for hidden states of (tokens, ...); got numbers "
                f"{tuple(chosen.shape)} and weights {tuple(weights.shape)} for {tuple(hidden.shape)}"
            )
        return hidden, chosen, weights

    def _taken(self, routing: _Routing) -> tuple[list[ExpertTile], bool]:
        """The tiles that this call takes; and whether all ranks take the same ones, in forward and in backward.

        Those with tokens. Ranks that partition parameters have to gather alike: they take what has tokens on any of them. On all ranks.
        """
        counts = [sum(routing.counts[tile.experts]) for tile in self.each_tile()]
        param = next(self.tiles.parameters())
        owner = owner_of(param)
        by_all = owner is not None and owner.comm.world > 1 and owner.config.stage == 3
        if by_all:
            counts = owner.comm.ranks_with([count > 0 for count in counts], CHOICE, owner.units[param][0].index)
        return [tile for tile, count in zip(self.each_tile(), counts, strict=True) if count], by_all

    def extra_repr(self) -> str:
        return f"{self._kind} of {self._num} experts" + (", which rest without tokens" if self._rest else "")


def _num_fused(module: nn.Module) -> int:
    """The number of experts in parameters of a module, where it has nothing else: (experts, ...) of three dimensions, and of two."""
    params = list(module.parameters(recurse=False))
    dims = {param.ndim for param in params}
    has_others = len(params) != len(list(module.parameters())) or list(module.buffers()) or any(map(is_wrapper, params))
    if has_others or 3 not in dims or dims - {2, 3}:
        return 0
    sizes = {param.shape[0] for param in params}
    return sizes.pop() if len(sizes) == 1 else 0


def _takes_routing(module: nn.Module) -> bool:
    """Check that forward has three arguments, for hidden states and a routing, and is the class's own."""
    plain = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    kinds = [argument.kind for argument in inspect.signature(module.forward).parameters.values()]
    return len(kinds) == 3 and all(kind in plain for kind in kinds) and "forward" not in vars(module)


def tile_experts(model: nn.Module, max_nbytes: int, *, rest: bool = False) -> list[str]:
    """Replace all experts that are rows of one parameter, of more than ``max_nbytes`` in a layer, by groups of experts, in place.

    A group is a unit of its own, which is gathered only where a token is routed to one of its experts. What is replaced are modules whose
    parameters all are (experts, ...), of three dimensions, and of two for biases, and whose forward takes hidden states (tokens, ...), the
    numbers of each token's experts (tokens, k) and their weights (tokens, k), as in transformers (Mixtral, Qwen-MoE, gpt-oss, ...). The output
    for a token must be the sum of its experts' outputs, each times its weight, which is checked with the first token.

    Call it before the optimizer is made, as the parameters are new ones; for a model from deferred_init, inside that context.

    Args:
        model: changed in place.
        max_nbytes: bytes that a group's parameters may have, in the precision in which they are stored now. An expert that is larger is a
            group of its own.
        rest: False trains as the whole parameter does, whose rows without tokens have gradients of zero: weight decay and momentum change them
            in each step. True leaves a group without tokens as it is, without gradient, as a module that was not called.

    Returns:
        The names of the modules that were replaced.

    Raises:
        ValueError: before anything is changed, for a parameter that is tied to another one, or a model that a ZeroOptimizer holds; with the
            first token, for experts whose outputs are not just added up.
    """
    check_call(model, "tile_experts", "max_nbytes", max_nbytes)
    users = users_of(model)
    tiled = {
        inner
        for module in model.modules()
        if isinstance(module, Tiled)
        for inner in module.modules()
    }
    chosen: dict[str, tuple[nn.Module, int]] = {}
    for path, module in model.named_modules():
        num = _num_fused(module) if module not in tiled else 0
        nbytes = sum(param.nbytes for param in module.parameters(recurse=False))
        if num < 2 or nbytes <= max_nbytes:
            continue
        if not _takes_routing(module):
            log.warning("%r has parameters of %d experts, and its forward takes no routing of tokens: it stays in one piece", path, num)
            continue
        if module is model:
            raise ValueError("the model itself is the experts of one layer and cannot be replaced in place; put it into another module")
        for name, param in module.named_parameters():
            check_untied(users, name, path, param, "max_nbytes")
            if param.is_meta:
                raise ValueError(f"the {name} of {path!r} does not exist yet; call tile_experts inside zk.deferred_init()")
        if nbytes // num > max_nbytes:
            log.warning("an expert of %r has %d bytes, more than max_nbytes=%d: each one is a group of its own", path, nbytes // num, max_nbytes)
        chosen[path] = module, math.ceil(num / max(1, max_nbytes // (nbytes // num)))
    for module, num_tiles in chosen.values():
        replace(model, module, TiledExperts(module, num_tiles, rest))
    return list(chosen)
