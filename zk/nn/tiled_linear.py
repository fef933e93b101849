"""TiledLinear: a linear layer that is too large to exist whole, computed tile by tile.

y = x W^T + b, with the rows of W (out_features, in_features) cut into tiles. Each tile is a unit:
at stage 3 one after the other is gathered, used and released, and in backward in the reverse order,
where its gradient leaves before the next tile comes. Sums over tiles are fp32, rounded once.

Autograd sees a chain, one node for each tile, so that backward cannot take two at once. What runs
along it is the gradient of x, in fp32; forward, its links are tensors without memory.
Source: memory-centric tiling, ZeRO-Infinity, arXiv 2104.07857, section 5.1.3.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.autograd.function import once_differentiable

from zk import kernels
from zk.checkpoint.contents import Cut
from zk.config import NAMES, is_count
from zk.parallel.gather import place_of

GRAIN = 64  # features: tiles begin at multiples, 128 bytes in 16 bits, where there is room


def cuts(features: int, splits: int) -> list[slice]:
    """``features`` in ``splits`` slices, as even as whole grains allow."""
    grain = GRAIN if features >= GRAIN * splits else 1
    edges = [features * index // splits // grain * grain for index in range(splits)] + [features]
    return [slice(start, stop) for start, stop in itertools.pairwise(edges)]


class LinearTile(nn.Module):
    """One tile: ``weight``, some rows of the whole one."""

    travels_alone = True

    def __init__(self, weight: nn.Parameter, rows: slice):
        super().__init__()
        self.weight, self.rows = weight, rows

    def forward(self, link: Tensor, bias: Tensor | None, call: Call) -> Any:
        return Step.apply(link, self.weight, bias, call, self.rows)  # type: ignore[no-untyped-call]


class TiledLinear(nn.Linear):
    """``torch.nn.Linear``, computed tile by tile.

    Args:
        in_features, out_features, bias, device, dtype: as of nn.Linear; fp32, bf16 or fp16.
        out_splits: tiles along the output.

    ``state_dict()`` has nn.Linear's names and shapes, and ``load_state_dict()`` takes them. There
    is no ``weight``, but tiles: ``layer.tiles[0].weight`` has its rows ``layer.tiles[0].rows``.
    Initial values have nn.Linear's distribution, not its sequence of draws.
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None, *,
        out_splits: int = 1,
    ):  # fmt: skip
        like = torch.empty(0, device=device, dtype=dtype)
        shape = out_features, in_features
        self.build(shape, out_splits, lambda r: like.new_empty(r.stop - r.start, in_features))
        made = nn.Parameter(like.new_empty(out_features)) if bias else None
        self.register_parameter("bias", made)
        self.reset_parameters()

    def build(
        self, shape: tuple[int, int], splits: int, values_of: Callable[[slice], Tensor]
    ) -> None:
        """Set all but the bias."""
        nn.Module.__init__(self)
        self.out_features, self.in_features = shape
        if not is_count(splits) or splits > max(1, shape[0]):
            raise ValueError(f"out_splits must be between 1 and {shape[0]} rows; got {splits!r}")
        tiles = (LinearTile(nn.Parameter(values_of(rows)), rows) for rows in cuts(shape[0], splits))
        self.tiles: Any = nn.ModuleList(tiles)
        self.register_state_dict_post_hook(put_together)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(take_apart)  # type: ignore[no-untyped-call]

    @classmethod
    def from_linear(cls, linear: nn.Linear, out_splits: int = 1) -> TiledLinear:
        """The same layer, with a copy of the weight in tiles, and the very bias."""
        if type(linear) is not nn.Linear or "weight" not in linear._parameters:
            raise TypeError(
                f"from_linear takes a torch.nn.Linear as it was made; got {type(linear).__name__}, "
                "which may compute something else (remove weight_norm, parametrize or prune first)"
            )
        whole, tiled = linear.weight.detach(), cls.__new__(cls)
        shape = linear.out_features, linear.in_features
        rows_first = torch.contiguous_format
        tiled.build(shape, out_splits, lambda rows: whole[rows].clone(memory_format=rows_first))
        tiled.tiles.requires_grad_(linear.weight.requires_grad)
        tiled.register_parameter("bias", linear.bias)
        return tiled.train(linear.training)

    def reset_parameters(self) -> None:
        """Uniform between -1/sqrt(in_features) and 1/sqrt(in_features), as nn.Linear."""
        bound = 1 / math.sqrt(max(self.in_features, 1))
        for param in self.parameters():
            nn.init.uniform_(param, -bound, bound)

    def pieces(self) -> dict[str, Cut]:
        """Name of a tile's parameter in this layer -> what it is a piece of."""
        shape, columns = (self.out_features, self.in_features), slice(0, self.in_features)
        rows = enumerate(tile.rows for tile in self.tiles)
        return {f"tiles.{i}.weight": Cut("weight", shape, (cut, columns)) for i, cut in rows}

    def parts(self, values: Tensor) -> Any:
        """``values``, a row for each output, as views for each tile."""
        return values.tensor_split([tile.rows.start for tile in self.tiles][1:])

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight":
            raise AttributeError(
                "a TiledLinear has tiles in place of its weight: write to them (for tile in "
                "layer.tiles: tile.weight, the rows tile.rows), or load_state_dict() with it whole"
            )
        super().__setattr__(name, value)

    @_disable_dynamo  # as torch.compiler.disable, which would import the compiler with zk
    def forward(self, x: Tensor) -> Tensor:
        dtype, device = self.tiles[0].weight.dtype, x.device.type
        if torch.is_autocast_enabled(device):
            x = x.to(torch.get_autocast_dtype(device))
            dtype = x.dtype
        if x.dtype != dtype or x.shape[-1:] != (self.in_features,):
            raise ValueError(
                f"the input must have {self.in_features} features in the weight's precision, "
                f"{dtype}; got {tuple(x.shape)} in {x.dtype}"
            )
        link = x.reshape(math.prod(x.shape[:-1]), self.in_features)
        call, parts = Call(link, self), itertools.repeat(None)
        if self.bias is not None:  # views keep its memory where tiles push its unit out
            parts = self.parts(self.bias.to(x.dtype))
        for tile, bias in zip(self.tiles, parts, strict=False):
            link = tile(link, bias, call)
        return link.view(*x.shape[:-1], self.out_features)


def put_together(layer: Any, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
    """Hook of state_dict(): the whole weight in place of its tiles."""
    state[f"{prefix}weight"] = torch.cat([state.pop(prefix + name) for name in layer.pieces()])


def take_apart(layer: Any, state: dict[str, Any], prefix: str, metadata: Any, *_: Any) -> None:
    """Hook of load_state_dict(): tiles in place of the whole weight."""
    values = state.pop(f"{prefix}weight", None)
    parts = layer.parts(values) if values is not None else ()
    for name, part in zip(layer.pieces(), parts, strict=False):
        # a parameter that is assigned would keep the memory of all of it
        state[prefix + name] = part.clone() if metadata.get("assign_to_params_buffers") else part


# ---- the chain -----------------------------------------------------------------------------------


class Call:
    """One call of the layer: what its tiles share."""

    def __init__(self, x: Tensor, layer: TiledLinear):
        self.last = layer.tiles[-1].rows
        # several tiles add to each element of the gradient of x
        dtype = torch.float32 if len(layer.tiles) > 1 else x.dtype
        self.link = torch.zeros((), dtype=dtype, device=x.device).expand_as(x)  # without memory
        self.x, self.x_wanted = x.detach(), x.requires_grad  # (m, in_features)
        # (m, out_features): y in forward, dy in backward
        self.y: Any = x.new_empty(x.shape[0], layer.out_features)


class Step(torch.autograd.Function):
    """One tile: y = x W^T; in backward dW = dy^T x, dx += dy W.

    The first one takes x and the last one returns y; what others take and return has no memory.
    """

    @staticmethod
    def forward(ctx: Any, _: Tensor, weight: Tensor, bias: Any, call: Call, rows: slice) -> Any:
        ctx.call, ctx.rows = call, rows
        ctx.save_for_backward(call.x, weight)
        with torch.autocast(call.x.device.type, enabled=False):
            weight = weight.to(call.x.dtype).t()
            kernels.tiled_matmul(call.x, weight, call.y[:, rows], bias=bias)
        if rows != call.last:
            return call.link.detach()
        y, call.y = call.y, None
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        call, (x, weight) = ctx.call, ctx.saved_tensors
        is_last = ctx.rows == call.last
        if is_last:
            call.y, grad = grad, torch.empty_like(x, dtype=call.link.dtype)
        dweight, dbias, dy = None, None, call.y[:, ctx.rows]
        with torch.autocast(x.device.type, enabled=False):
            if ctx.needs_input_grad[2]:
                dbias = dy.sum(0, dtype=torch.float32).to(dy.dtype)
            if ctx.needs_input_grad[1]:
                dweight = torch.empty_like(weight)
                kernels.tiled_matmul(dy.t(), x, dweight)
            if call.x_wanted:
                kernels.tiled_matmul(dy, weight.to(x.dtype), grad, plus=None if is_last else grad)
        return grad, dweight, dbias, None, None


# ---- tiles for a model ---------------------------------------------------------------------------


def tile_linears(model: nn.Module, max_tile_nbytes: int) -> list[str]:
    """Replace every nn.Linear with a weight larger than ``max_tile_nbytes`` by a TiledLinear.

    Call it before the optimizer is made, as parameters are new ones; for a model of deferred_init,
    inside that context. Layers that only derive from nn.Linear are left alone.

    Args:
        model: changed in place.
        max_tile_nbytes: bytes that a tile's weight may have in its precision; one row at least.

    Returns:
        The names of the layers that were replaced.

    Raises:
        ValueError: before anything is changed, for a weight that is tied to another parameter or of
            another precision, or a model that a ZeroOptimizer holds.
    """
    if not is_count(max_tile_nbytes):
        raise ValueError(f"max_tile_nbytes must be a number of bytes; got {max_tile_nbytes!r}")
    modules, tiled = dict(model.named_modules()), dict[Any, TiledLinear]()
    chosen: dict[str, Any] = {
        path: module
        for path, module in modules.items()
        if type(module) is nn.Linear
        and "weight" in module._parameters
        and module.weight.nbytes > max_tile_nbytes
    }
    for path, linear in chosen.items():
        check_tiled(path, linear.weight, modules)
    for linear in chosen.values():
        count, most = linear.out_features, max(max_tile_nbytes // linear.weight[0].nbytes, 1)
        tried = ((n, cuts(count, n)) for n in range(1, count + 1))
        splits = next(n for n, rows in tried if all(r.stop - r.start <= most for r in rows))
        new = tiled[linear] = TiledLinear.from_linear(linear, splits)
        vars(new).update({name: hooks for name, hooks in vars(linear).items() if "ward_" in name})
    for parent in modules.values():
        for name, child in parent._modules.items():
            parent._modules[name] = tiled.get(child, child)
    return list(chosen)


def check_tiled(path: str, weight: Any, modules: dict[str, nn.Module]) -> None:
    """ValueError for a layer that cannot be replaced."""
    params = ((f"{at}.{k}", p) for at, m in modules.items() for k, p in m._parameters.items())
    users = [name for name, param in params if param is weight]
    for breaks, says in (
        (not path, "the model itself is one nn.Linear: use TiledLinear.from_linear(model, ...)"),
        (place_of(weight), f"{path!r} is held by a ZeroOptimizer: make its tiles before that"),
        (weight.dtype not in NAMES, f"{path!r} is {weight.dtype}, and must be fp32, bf16 or fp16"),
        (
            len(users) > 1,
            f"the weight of {path!r} is tied ({', '.join(users)}), and its tiles could not be; "
            "untie it, or raise max_tile_nbytes above its size",
        ),
    ):
        if breaks:
            raise ValueError(f"tile_linears: {says}")
