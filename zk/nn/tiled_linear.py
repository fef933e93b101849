"""TiledLinear: a linear layer that is too large to exist whole, computed tile by tile.

y = x W^T + b, with W (out_features, in_features) cut into out_splits x in_splits tiles. Each tile is a
unit: at stage 3 one after the other is gathered, used and released, and in backward in the reverse
order, where its gradient leaves before the next tile comes. Sums over tiles are fp32, rounded once.

Autograd sees a chain, one node for each tile, so that backward cannot take two at once. What runs
along it is the gradient of x, in fp32; forward, its links are tensors without memory.
Source: memory-centric tiling, ZeRO-Infinity, arXiv 2104.07857, section 5.1.3.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_leaves

from zk import kernels
from zk.options import NAMES, is_count
from zk.parallel.gather import place_of

GRAIN = 64  # features: tiles begin at multiples, 128 bytes in 16 bits, where there is room


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """The place of a tile's parameter in the parameter that the layer has without tiles."""

    whole: str
    shape: tuple[int, ...]
    place: tuple[slice, ...]


def cuts(features: int, splits: int) -> list[slice]:
    """``features`` in ``splits`` slices, as even as whole grains allow."""
    grain = GRAIN if features >= GRAIN * splits else 1
    edges = [features * index // splits // grain * grain for index in range(splits)] + [features]
    return [slice(start, stop) for start, stop in itertools.pairwise(edges)]


def length(cut: slice) -> int:
    return int(cut.stop - cut.start)


class LinearTile(nn.Module):
    """One tile: ``weight`` (rows of the output, columns of the input)."""

    travels_alone = True

    def __init__(self, weight: nn.Parameter, rows: slice, columns: slice) -> None:
        super().__init__()
        self.weight, self.rows, self.columns = weight, rows, columns

    def forward(self, link: Tensor, bias: Tensor | None, call: Call) -> Tensor:
        return Step.apply(link, self.weight, bias, call, self.rows, self.columns)  # type: ignore[no-untyped-call, no-any-return]


class TiledLinear(nn.Linear):
    """``torch.nn.Linear``, computed tile by tile.

    Args:
        in_features, out_features, bias, device, dtype: as of nn.Linear; fp32, bf16 or fp16.
        in_splits: tiles along the input.
        out_splits: tiles along the output; splitting it alone keeps the bits of the output.

    ``state_dict()`` has nn.Linear's names and shapes, and ``load_state_dict()`` takes them. ``weight``
    as an attribute is put together from the tiles, in memory for all of it; what is written to it is
    written to them. Initial values have nn.Linear's distribution, not its sequence of draws.
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, in_splits: int = 1,
        out_splits: int = 1, device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        def made(*place: slice) -> nn.Parameter:
            size = [*map(length, place)]
            return nn.Parameter(torch.empty(size, device=device, dtype=dtype))

        self.build((in_features, out_features), (in_splits, out_splits), made)
        self.register_parameter("bias", made(slice(0, out_features)) if bias else None)
        self.reset_parameters()

    def build(
        self, sizes: tuple[int, int], splits: tuple[int, int], made: Callable[..., nn.Parameter]
    ) -> None:
        """Set all but the bias; ``made`` makes the weight of a tile with these rows and columns."""
        nn.Module.__init__(self)
        for name, size, count in zip(("in_splits", "out_splits"), sizes, splits, strict=True):
            if not is_count(count) or count > max(1, size):
                raise ValueError(f"{name} must be between 1 and the features, {size}; got {count!r}")
        self.in_features, self.out_features = sizes
        self.in_cuts, self.out_cuts = map(cuts, sizes, splits)
        places = itertools.product(self.out_cuts, self.in_cuts)
        self.tiles = nn.ModuleList(LinearTile(made(*place), *place) for place in places)
        self.register_state_dict_post_hook(put_together)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(take_apart)  # type: ignore[no-untyped-call]

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, in_splits: int = 1, out_splits: int = 1
    ) -> TiledLinear:
        """The same layer, with a copy of the weight in tiles, and the very bias."""
        if type(linear) is not nn.Linear or "weight" not in linear._parameters:
            raise TypeError(
                f"from_linear takes a torch.nn.Linear as it was made; got {type(linear).__name__}, "
                "which may compute something else (weight_norm, parametrize, prune: remove that first)"
            )
        whole = linear.weight
        if whole.is_meta:
            raise ValueError("this layer has no values yet; make its tiles inside zk.deferred_init()")

        def copied(*place: slice) -> nn.Parameter:
            part = whole.detach()[place].clone(memory_format=torch.contiguous_format)
            return nn.Parameter(part, whole.requires_grad)

        tiled = cls.__new__(cls)
        tiled.build((linear.in_features, linear.out_features), (in_splits, out_splits), copied)
        tiled.register_parameter("bias", linear.bias)
        return tiled.train(linear.training)

    def reset_parameters(self) -> None:
        """Uniform between -1/sqrt(in_features) and 1/sqrt(in_features), as nn.Linear."""
        bound = 1 / math.sqrt(max(self.in_features, 1))
        for param in self.parameters():
            nn.init.uniform_(param, -bound, bound)

    def pieces(self) -> dict[str, Piece]:
        """Name of a tile's parameter in this layer -> what it is a piece of, row by row."""
        shape, tiles = (self.out_features, self.in_features), enumerate[Any](self.tiles)
        return {f"tiles.{i}.weight": Piece("weight", shape, (t.rows, t.columns)) for i, t in tiles}

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """(out_features, in_features), put together from the tiles; gradients flow back to them."""
        return Whole.of(self.joined(map(self.get_parameter, self.pieces())), self)

    def joined(self, parts: Iterable[Tensor]) -> Tensor:
        """The weight, of values of its tiles."""
        whole: Any = None
        for part, piece in zip(parts, self.pieces().values(), strict=True):
            whole = part.new_empty(piece.shape) if whole is None else whole
            whole[piece.place] = part
        return whole  # type: ignore[no-any-return]

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "weight":
            super().__setattr__(name, value)
        elif not (isinstance(value, Whole) and value.memory[0].shape == value.shape):
            raise AttributeError(  # that is layer.weight *= 2, which has written it
                "the weight of a TiledLinear is its tiles, and cannot be replaced; write to it within "
                "torch.no_grad(): layer.weight.copy_(values)"
            )

    @_disable_dynamo  # as torch.compiler.disable, which would import the compiler with zk
    def forward(self, x: Tensor) -> Tensor:
        dtype, on = self.tiles[0].weight.dtype, x.device.type
        if torch.amp.is_autocast_available(on) and torch.is_autocast_enabled(on):
            x = x.to(torch.get_autocast_dtype(on))
        elif x.dtype != dtype or dtype not in NAMES:
            raise ValueError(
                f"the input must be in the weight's precision, {dtype}, and that fp32, bf16 or fp16; "
                f"got {x.dtype}"
            )
        if x.shape[-1:] != (self.in_features,):
            raise ValueError(f"the input must have {self.in_features} features; got {tuple(x.shape)}")
        link = x.reshape(math.prod(x.shape[:-1]), self.in_features)
        call = Call(link, self.bias, self)
        for tile in self.tiles:
            # the last one has the gradient of the whole bias
            link = tile(link, self.bias if tile is self.tiles[-1] else None, call)
        return link.view(*x.shape[:-1], self.out_features)


# ---- the chain -----------------------------------------------------------------------------------------


class Call:
    """One call of the layer: what its tiles share."""

    def __init__(self, x: Tensor, bias: Tensor | None, layer: TiledLinear) -> None:
        self.last = layer.out_cuts[-1], layer.in_cuts[-1]
        # several tiles add to each element of the gradient of x only where the output is split
        dtype = torch.float32 if len(layer.out_cuts) > 1 else x.dtype
        self.link = torch.zeros((), dtype=dtype, device=x.device).expand_as(x)  # without memory
        self.x, self.x_wanted = x.detach(), x.requires_grad  # (m, in_features)
        self.bias = None if bias is None else bias.detach()
        self.y: Any = x.new_empty(x.shape[0], layer.out_features)  # in forward only
        self.partial: Any = None  # (m, rows) fp32: a row of tiles while it is added up
        self.dy: Any = None  # (m, out_features), in backward only


class Step(torch.autograd.Function):
    """One tile: y += x W^T; in backward dW = dy^T x, dx += dy W.

    The first one takes x and the last one returns y; what others take and return has no memory.
    """

    @staticmethod
    def forward(
        ctx: Any, link: Tensor, weight: Tensor, bias: Any, call: Call, rows: slice, columns: slice
    ) -> Tensor:
        ctx.call, ctx.rows, ctx.columns = call, rows, columns
        ctx.save_for_backward(call.x, weight)
        out, added = call.y[:, rows], call.bias
        plus = call.partial if columns.start else None
        if columns != call.last[1]:
            out = call.partial = torch.empty(out.shape, device=out.device) if plus is None else plus
            added = None
        with no_autocast(out.device):
            added = None if added is None else added[rows].to(out.dtype)
            weight = weight.to(call.x.dtype).t()
            kernels.tiled_matmul(call.x[:, columns], weight, out, plus=plus, bias=added)
        if (rows, columns) != call.last:
            return call.link.detach()
        y, call.y, call.partial = call.y, None, None
        return y  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        call, rows, columns = ctx.call, ctx.rows, ctx.columns
        x, weight = ctx.saved_tensors
        dweight = dbias = None
        with no_autocast(x.device):
            if (rows, columns) == call.last:
                call.dy, size = grad, x.shape if call.x_wanted else ()
                grad = torch.empty(size, dtype=call.link.dtype, device=x.device).expand(x.shape)
            if ctx.needs_input_grad[2]:
                dbias = call.dy.sum(0, dtype=torch.float32).to(call.bias.dtype)
            dy = call.dy[:, rows]
            if ctx.needs_input_grad[1]:
                dweight = torch.empty_like(weight)
                kernels.tiled_matmul(dy.t(), x[:, columns], dweight)
            if call.x_wanted:
                into = grad[:, columns]
                plus = None if rows == call.last[0] else into
                kernels.tiled_matmul(dy, weight.to(x.dtype), into, plus=plus)
        return grad, dweight, dbias, None, None, None


def no_autocast(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    there = torch.amp.is_autocast_available(device.type)
    return torch.autocast(device.type, enabled=False) if there else contextlib.nullcontext()


# ---- the whole weight ----------------------------------------------------------------------------------


class Whole(Tensor):
    """A weight put together from tiles, or a view of it. What is written to it is written to them."""

    layer: TiledLinear
    memory: list[Any]  # of all of it, and the version of it that the tiles have

    @classmethod
    def of(cls, values: Tensor, layer: TiledLinear, memory: list[Any] | None = None) -> Whole:
        whole = values.as_subclass(cls)
        whole.layer, whole.memory = layer, memory or [values, values._version]
        return whole

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in REFUSED:
            raise RuntimeError(
                "data, grad and requires_grad of a TiledLinear's weight are set by tile: "
                "for tile in layer.tiles: tile.weight..."
            )
        wholes = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Whole)]
        with torch._C.DisableTorchFunctionSubclass():
            # .data would count writes apart
            result = wholes[0].detach() if func == DATA.__get__ else func(*args, **(kwargs or {}))
            for whole in wholes:
                whole.keep_written()
            is_view = isinstance(result, Tensor) and result is not wholes[0]
            if is_view and torch._C._is_alias_of(result, wholes[0]):  # type: ignore[attr-defined]
                return Whole.of(result, wholes[0].layer, wholes[0].memory)
        return result

    @torch.no_grad()
    def keep_written(self) -> None:
        values, version = self.memory
        if values._version != version:
            self.memory[1] = values._version
            for name, piece in self.layer.pieces().items():
                self.layer.get_parameter(name).copy_(values[piece.place])


DATA, GRAD, REQUIRES_GRAD = (getattr(Tensor, name) for name in ("data", "grad", "requires_grad"))
REFUSED = DATA.__set__, GRAD.__set__, REQUIRES_GRAD.__set__, Tensor.requires_grad_


def put_together(layer: Any, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
    """Hook of state_dict(): the whole weight in place of its tiles."""
    bias = {f"{prefix}bias": state.pop(f"{prefix}bias")} if layer.bias is not None else {}
    state[f"{prefix}weight"] = layer.joined([state.pop(prefix + name) for name in layer.pieces()])
    state.update(bias)


def take_apart(
    layer: Any, state: dict[str, Any], prefix: str, metadata: Any, _: bool, missing: Any, *more: Any
) -> None:
    """Hook of load_state_dict(): tiles in place of the whole weight."""
    values, shape = state.pop(f"{prefix}weight", None), (layer.out_features, layer.in_features)
    if values is None:
        missing.append(f"{prefix}weight")
    elif tuple(values.shape) != shape:
        more[-1].append(f"size mismatch for {prefix}weight: {tuple(values.shape)}, not {shape}")
        values = None
    for name, piece in layer.pieces().items():
        # what is not given stays, and is not reported under a name that the user never saw
        part = layer.get_parameter(name).detach() if values is None else values[piece.place]
        # a parameter that is assigned would keep the memory of all of it
        state[prefix + name] = part.clone() if metadata.get("assign_to_params_buffers") else part


# ---- tiles for a model -----------------------------------------------------------------------------------


def tile_linears(model: nn.Module, max_tile_nbytes: int) -> list[str]:
    """Replace every nn.Linear with a weight larger than ``max_tile_nbytes`` by a TiledLinear.

    Call it before the optimizer is made, as parameters are new ones; for a model from deferred_init,
    inside that context. The output is split, which keeps the bits of forward. Layers that only derive
    from nn.Linear are left alone.

    Args:
        model: changed in place.
        max_tile_nbytes: bytes that a tile's weight may have, in its precision now; one row is the least.

    Returns:
        The names of the layers that were replaced.

    Raises:
        ValueError: before anything is changed, for a weight that is tied to another parameter or of
            another precision, or a model that a ZeroOptimizer holds.
    """
    if not is_count(max_tile_nbytes):
        raise ValueError(f"max_tile_nbytes must be a number of bytes; got {max_tile_nbytes!r}")
    users: dict[Any, list[str]] = {}
    for path, module in model.named_modules():
        for name, param in module._parameters.items():
            users.setdefault(param, []).append(f"{path}.{name}")
    chosen = {
        module: path
        for path, module in model.named_modules()
        if type(module) is nn.Linear
        and "weight" in module._parameters
        and module.weight.nbytes > max_tile_nbytes
    }
    for linear, path in chosen.items():
        check_tiled(path, linear.weight, users[linear.weight])
    for linear in chosen:
        count, most = linear.out_features, max_tile_nbytes // linear.weight[0].nbytes
        fitting = (n for n in range(1, count) if max(map(length, cuts(count, n))) <= most)
        tiled = TiledLinear.from_linear(linear, 1, next(fitting, count))
        vars(tiled).update({name: hooks for name, hooks in vars(linear).items() if "ward_" in name})
        for parent in model.modules():
            children = [name for name, child in parent._modules.items() if child is linear]
            parent._modules.update(dict.fromkeys(children, tiled))
    return list(chosen.values())


def check_tiled(path: str, weight: Any, users: list[str]) -> None:
    """ValueError for a layer that cannot be replaced."""
    for breaks, says in (
        (not path, "the model itself is one nn.Linear: use TiledLinear.from_linear(model, ...)"),
        (place_of(weight), f"{path!r} is held by a ZeroOptimizer: make its tiles before that"),
        (weight.dtype not in NAMES, f"{path!r} is {weight.dtype}, and must be fp32, bf16 or fp16"),
        (
            len(users) > 1,
            f"the weight of {path!r} is tied ({', '.join(sorted(users))}), and its tiles could not "
            "be; untie it, or raise max_tile_nbytes above its size",
        ),
    ):
        if breaks:
            raise ValueError(f"tile_linears: {says}")
