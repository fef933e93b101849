"""TiledLinear: a linear layer that is too large to exist whole, computed tile by tile, forward and backward.

y = x W^T + b, with W (out_features, in_features) cut into out_splits x in_splits tiles. Each tile is a module with a parameter of its
own, and so a unit of its own: at stage 3 one tile is gathered, used and released after the other, in forward, and in the reverse order
in backward, where its gradient leaves before the next tile comes. Sums over tiles are kept in fp32 and rounded once.

Autograd sees a chain, one node for each tile, so that backward cannot take two tiles at once. What runs along the chain is the gradient
of x, in fp32 where several tiles add to it; forward, nothing does: its links are tensors without memory.
Source: memory-centric tiling, ZeRO-Infinity, arXiv 2104.07857, section 5.1.3.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.autograd.function import once_differentiable

from zk import kernels
from zk.core.options import is_count
from zk.core.owners import is_dtensor, owner_of
from zk.kernels.launch import FLOATS
from zk.nn.tiles import Piece, Tile, Tiled, Whole, joined, replace, users_of

# tiles begin at multiples of this many features where the layer is large enough: 128 bytes in 16 bits
_GRAIN = 64


def cuts(features: int, splits: int) -> list[slice]:
    """``features`` in ``splits`` slices, as even as whole grains allow."""
    grain = _GRAIN if features >= _GRAIN * splits else 1
    edges = [features * index // splits // grain * grain for index in range(splits)] + [features]
    return [slice(start, stop) for start, stop in itertools.pairwise(edges)]


class LinearTile(Tile):
    """One tile of a TiledLinear: ``weight`` (rows of the output, columns of the input)."""

    def __init__(self, weight: nn.Parameter, rows: slice, columns: slice) -> None:
        super().__init__()
        self.weight = weight
        self.rows, self.columns = rows, columns

    def forward(self, link: Tensor, run: _Run) -> Tensor:
        return _Step.apply(link, self.weight, run, self.rows, self.columns)  # type: ignore[no-untyped-call, no-any-return]

    def extra_repr(self) -> str:
        return f"rows {self.rows.start}:{self.rows.stop}, columns {self.columns.start}:{self.columns.stop}"


class _Run:
    """One call of the layer: what its tiles share."""

    def __init__(self, x: Tensor, bias: Tensor | None, layer: TiledLinear) -> None:
        self.in_splits = layer.in_splits
        self.row_cuts, self.combined = layer.out_cuts, layer.combine_out_splits
        self.last_rows, self.last_columns = layer.out_cuts[-1], layer.in_cuts[-1]
        self.x_wanted = x.requires_grad
        # several tiles add to each element of the gradient of x only where the output is split
        self.link_dtype = torch.float32 if layer.out_splits > 1 else x.dtype
        # forward only
        self.x: Tensor | None = x.detach()  # (m, in_features)
        self.bias = None if bias is None else bias.detach()
        self.partial: Tensor | None = None  # (m, rows) fp32: one tile of the output while its inputs are added up
        widths = [layer.out_features] if self.combined else [cut.stop - cut.start for cut in layer.out_cuts]
        self.outputs = [x.new_empty(x.shape[0], width) for width in widths]
        # backward only
        self.grads: Sequence[Tensor] = ()  # of the outputs

    def output_rows(self, tensors: Sequence[Tensor], rows: slice) -> Tensor:
        """The part of ``rows`` of the weight in ``tensors``, the outputs or their gradients: (m, rows)."""
        return tensors[0][:, rows] if self.combined else tensors[self.row_cuts.index(rows)]

    def forward_ended(self) -> tuple[Tensor, ...]:
        """The outputs; nothing of forward stays."""
        outputs, self.outputs = tuple(self.outputs), []
        self.x = self.bias = self.partial = None
        return outputs


def memoryless(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros of ``shape`` that share one element."""
    return torch.zeros((), dtype=dtype, device=device).expand(shape)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype that autocast computes in on ``device`` now; None where it is off."""
    on = torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)
    return torch.get_autocast_dtype(device.type) if on else None


def autocast_now(device: torch.device) -> list[tuple[str, torch.dtype, bool]]:
    """Autocast as it is, on the host and on ``device``, for ``autocast_as``."""
    kinds = [kind for kind in dict.fromkeys(("cpu", device.type)) if torch.amp.is_autocast_available(kind)]
    return [(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in kinds]


@contextlib.contextmanager
def autocast_as(then: Sequence[tuple[str, torch.dtype, bool]], keeps_casts: bool | None = False) -> Iterator[None]:
    """Context: autocast is as it was ``then``. What it casts is kept for as long as the context, if ``keeps_casts``; None: if that is so outside."""
    with contextlib.ExitStack() as stack:
        for kind, dtype, enabled in then:
            stack.enter_context(torch.autocast(kind, dtype, enabled, keeps_casts))
        yield


def no_autocast(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    return torch.autocast(device.type, enabled=False) if torch.amp.is_autocast_available(device.type) else contextlib.nullcontext()


class _Open(torch.autograd.Function):
    """The chain's first link, of the shape of x and without memory; backward, the whole gradient of x arrives here."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, run: _Run) -> Tensor:
        ctx.run, ctx.dtype = run, x.dtype
        return memoryless(x.shape, run.link_dtype, x.device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        ctx.run.grads = ()
        return (grad.to(ctx.dtype) if ctx.needs_input_grad[0] else None), None, None


class _Step(torch.autograd.Function):
    """One tile."""

    @staticmethod
    def forward(ctx: Any, link: Tensor, weight: Tensor, run: _Run, rows: slice, columns: slice) -> Tensor:
        assert run.x is not None
        ctx.run, ctx.rows, ctx.columns = run, rows, columns
        ctx.save_for_backward(run.x, weight)
        out = target = run.output_rows(run.outputs, rows)
        bias = run.bias[rows].to(out.dtype) if run.bias is not None and columns == run.last_columns else None
        if run.in_splits > 1 and columns.start == 0:
            run.partial = torch.empty(out.shape, dtype=torch.float32, device=out.device)
        if columns != run.last_columns:
            assert run.partial is not None
            target = run.partial
        with no_autocast(out.device):
            kernels.tiled_matmul(run.x[:, columns], weight.to(out.dtype).t(), target, plus=run.partial if columns.start else None, bias=bias)
        return memoryless(link.shape, link.dtype, link.device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        run, rows, columns = ctx.run, ctx.rows, ctx.columns
        x, weight = ctx.saved_tensors
        dy, dweight = run.output_rows(run.grads, rows), None
        with no_autocast(x.device):
            if ctx.needs_input_grad[1]:
                dweight = torch.empty_like(weight)
                kernels.tiled_matmul(dy.t(), x[:, columns], dweight)
            if run.x_wanted:
                first = rows == run.last_rows
                if first and columns == run.last_columns:
                    grad = torch.empty(x.shape, dtype=run.link_dtype, device=x.device)
                into = grad[:, columns]
                kernels.tiled_matmul(dy, weight.to(x.dtype), into, plus=None if first else into)
        return grad, dweight, None, None, None


class _Close(torch.autograd.Function):
    """The chain's last link becomes the outputs; backward, the tiles find their gradients in the run, and the bias gets its own."""

    @staticmethod
    def forward(ctx: Any, link: Tensor, bias: Tensor | None, run: _Run) -> Any:
        ctx.run, ctx.shape, ctx.device = run, link.shape, link.device
        ctx.bias_dtype = None if bias is None else bias.dtype
        return run.forward_ended()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.run.grads = grads
        bias = torch.cat([dy.sum(0, dtype=torch.float32) for dy in grads]).to(ctx.bias_dtype) if ctx.needs_input_grad[1] else None
        return memoryless(ctx.shape, ctx.run.link_dtype, ctx.device), bias, None


class TiledLinear(Tiled, nn.Linear):
    """``torch.nn.Linear``, computed tile by tile.

    Args:
        in_features: columns of the weight.
        out_features: rows of the weight.
        bias: whether there is one.
        in_splits: tiles along the input.
        out_splits: tiles along the output; at stage 3, memory for weights and their gradients falls with ``in_splits * out_splits``.
            Splitting the output alone keeps the bits of the output.
        input_is_already_split: the input is a sequence of ``in_splits`` tensors (..., columns of each).
        combine_out_splits: False returns a list of ``out_splits`` tensors (..., rows of each).
        device: of the parameters.
        dtype: of the parameters: fp32, bf16 or fp16.

    Raises:
        ValueError: for more splits than features, and, in forward, for an input of another width or precision.

    Parameters are those of the tiles, and ``bias`` (out_features,); ``state_dict()`` has nn.Linear's ``weight`` and ``bias``, and
    ``load_state_dict()`` takes them. ``weight`` as an attribute is put together from the tiles, which takes the memory of all of it; what is
    written to it (nn.init, ``weight.data.normal_()``, ``requires_grad_``) is written to them. Its gradient is put together for reading.
    Initial values have nn.Linear's distribution, not its sequence of draws.
    """

    bias: nn.Parameter | None  # type: ignore[assignment]

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        in_splits: int = 1,
        out_splits: int = 1,
        input_is_already_split: bool = False,
        combine_out_splits: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        nn.Module.__init__(self)
        for rows, columns in self._lay_out(in_features, out_features, in_splits, out_splits, input_is_already_split, combine_out_splits):
            weight = torch.empty(rows.stop - rows.start, columns.stop - columns.start, device=device, dtype=dtype)
            self.tiles.append(LinearTile(nn.Parameter(weight), rows, columns))
        self.register_parameter("bias", nn.Parameter(torch.empty(out_features, device=device, dtype=dtype)) if bias else None)
        self.reset_parameters()

    def _lay_out(
        self, in_features: int, out_features: int, in_splits: int, out_splits: int, is_split: bool, combines: bool
    ) -> Iterator[tuple[slice, slice]]:
        """Set all that is no parameter; returns rows and columns of each tile, row by row."""
        for name, splits, features in (("in_splits", in_splits, in_features), ("out_splits", out_splits, out_features)):
            if not is_count(splits) or splits > max(1, features):
                raise ValueError(f"{name} must be between 1 and the number of features, {features}; got {splits!r}")
        self.in_features, self.out_features = in_features, out_features
        self.in_splits, self.out_splits = in_splits, out_splits
        self.in_cuts, self.out_cuts = cuts(in_features, in_splits), cuts(out_features, out_splits)
        self.tiles = nn.ModuleList()
        self.input_is_already_split, self.combine_out_splits = is_split, combines
        self.keep_names()
        return itertools.product(self.out_cuts, self.in_cuts)

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        in_splits: int = 1,
        out_splits: int = 1,
        *,
        input_is_already_split: bool = False,
        combine_out_splits: bool = True,
    ) -> TiledLinear:
        """The same layer, with a copy of the weight in tiles, and the very bias. TypeError for what only derives from nn.Linear."""
        if type(linear) is not nn.Linear:
            raise TypeError(f"from_linear takes a torch.nn.Linear; got {type(linear).__name__}, which may compute something else")
        if "weight" not in linear._parameters:
            raise ValueError("the weight of this layer is computed (weight_norm, parametrize, prune), so it has no tiles; remove that first")
        whole = linear.weight
        if whole.is_meta:
            raise ValueError("the weight of this layer does not exist yet; call from_linear or tile_linears inside zk.deferred_init()")
        tiled = cls.__new__(cls)
        nn.Module.__init__(tiled)
        cut = tiled._lay_out(linear.in_features, linear.out_features, in_splits, out_splits, input_is_already_split, combine_out_splits)
        for rows, columns in cut:
            weight = nn.Parameter(whole.detach()[rows, columns].clone(memory_format=torch.contiguous_format), whole.requires_grad)
            tiled.tiles.append(LinearTile(weight, rows, columns))
        tiled.register_parameter("bias", linear.bias)
        return tiled.train(linear.training)

    def reset_parameters(self) -> None:
        """Uniform between -1/sqrt(in_features) and 1/sqrt(in_features), as nn.Linear."""
        bound = 1 / math.sqrt(self.in_features) if self.in_features else 0.0
        for param in self.parameters():
            nn.init.uniform_(param, -bound, bound)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """(out_features, in_features), put together from the tiles; gradients flow back to them. All of it in memory."""
        return Whole.of(self, "weight", joined(self.parts("weight"), (self.out_features, self.in_features)))

    def has_whole(self, name: str) -> bool:
        return name == "weight"

    def pieces(self) -> dict[str, Piece]:
        shape = self.out_features, self.in_features
        return {f"tiles.{index}.weight": Piece("weight", shape, (tile.rows, tile.columns)) for index, tile in enumerate(self.each_tile())}

    def each_tile(self) -> list[LinearTile]:
        """Row by row."""
        return list(self.tiles)  # type: ignore[arg-type]

    @_disable_dynamo  # as torch.compiler.disable, which would import the compiler with zk
    def forward(self, x: Tensor | Sequence[Tensor]) -> Tensor | list[Tensor]:  # type: ignore[override]
        """(..., in_features) -> (..., out_features); see ``input_is_already_split`` and ``combine_out_splits`` for lists."""
        if self.input_is_already_split:
            widths = [cut.stop - cut.start for cut in self.in_cuts]
            if isinstance(x, Tensor) or [piece.shape[-1] for piece in x] != widths:
                got = tuple(x.shape) if isinstance(x, Tensor) else [tuple(piece.shape) for piece in x]
                raise ValueError(f"the input is to be a sequence of tensors with {widths} features; got {got}")
            x = torch.cat(list(x), -1)
        elif not isinstance(x, Tensor):
            raise TypeError(f"the input is to be one tensor; got {type(x).__name__} (input_is_already_split=True takes several)")
        if x.ndim < 1 or x.shape[-1] != self.in_features:
            raise ValueError(f"the input must have {self.in_features} features in its last dimension; got {tuple(x.shape)}")
        stored = self.each_tile()[0].weight.dtype
        if stored not in FLOATS:
            raise TypeError(f"a TiledLinear computes in fp32, bf16 or fp16; its weight is {stored}")
        if (cast := autocast_dtype(x.device)) is not None:
            x = x.to(cast)
        elif x.dtype != stored:
            raise ValueError(f"the input must be in the weight's precision, {stored}; got {x.dtype} (autocast would cast it)")
        rows = x.reshape(math.prod(x.shape[:-1]), self.in_features)
        run = _Run(rows, self.bias, self)
        trained = x.requires_grad or any(param.requires_grad for param in self.parameters())
        link: Tensor = _Open.apply(rows, torch.zeros((), device=x.device, requires_grad=trained), run)  # type: ignore[no-untyped-call]
        for tile in self.each_tile():
            link = tile(link, run)
        outputs = [out.view(*x.shape[:-1], out.shape[1]) for out in _Close.apply(link, self.bias, run)]  # type: ignore[no-untyped-call]
        return outputs[0] if self.combine_out_splits else outputs


def tile_linears(model: nn.Module, max_tile_nbytes: int) -> list[str]:
    """Replace every nn.Linear of ``model`` whose weight is larger than ``max_tile_nbytes`` by a TiledLinear of smaller tiles, in place.

    Call it before the optimizer is made, as the parameters are new ones; for a model from deferred_init, inside that context. The
    output is split first, which keeps the bits of forward; the input only where a tile of 64 rows is still too large. Layers that only
    derive from nn.Linear are left alone.

    Args:
        model: changed in place.
        max_tile_nbytes: bytes that a tile's weight may have, in the precision in which it is stored now.

    Returns:
        The names of the layers that were replaced.

    Raises:
        ValueError: before anything is changed, for a weight that is tied to another parameter, or a model that a ZeroOptimizer holds.
    """
    if not is_count(max_tile_nbytes):
        raise ValueError(f"max_tile_nbytes must be a number of bytes, at least 1; got {max_tile_nbytes!r}")
    if any(map(owner_of, model.parameters())):
        raise ValueError("this model is held by a ZeroOptimizer, which would not see the tiles; call tile_linears before the optimizer is made")
    users = users_of(model)
    chosen: dict[nn.Linear, str] = {}
    for path, module in model.named_modules():
        if type(module) is nn.Linear and "weight" in module._parameters and module.weight.nbytes > max_tile_nbytes:
            if module is model:
                raise ValueError("the model itself is one nn.Linear and cannot be replaced in place; use TiledLinear.from_linear(model, ...)")
            if module.weight.dtype not in FLOATS:
                raise ValueError(f"the weight of {path!r} is {module.weight.dtype}; a TiledLinear computes in fp32, bf16 or fp16")
            if is_dtensor(module.weight):
                raise ValueError(
                    f"the weight of {path!r} is a DTensor, of which each rank has a part, and no tiles are made of parts; leave the layer out of "
                    "parallelize_module's plan, or raise max_tile_nbytes above its size"
                )
            if len(users[module.weight]) > 1:
                raise ValueError(
                    f"the weight of {path!r} is tied ({', '.join(sorted(users[module.weight]))}), and its tiles could not be; untie it, or raise "
                    "max_tile_nbytes above its size"
                )
            chosen[module] = path
    for linear in chosen:
        replace(model, linear, TiledLinear.from_linear(linear, *_splits(linear, max_tile_nbytes)))
    return list(chosen.values())


def _splits(linear: nn.Linear, max_tile_nbytes: int) -> tuple[int, int]:
    """in_splits and out_splits that keep every tile within ``max_tile_nbytes``, as far as one element allows."""
    wide, tall = linear.in_features, linear.out_features

    def fits(in_splits: int, out_splits: int) -> bool:
        most = [max(cut.stop - cut.start for cut in cuts(features, splits)) for features, splits in ((wide, in_splits), (tall, out_splits))]
        return bool(math.prod(most) * linear.weight.element_size() <= max_tile_nbytes)

    rows = max(1, tall // _GRAIN)
    out_splits = next((count for count in range(1, rows) if fits(1, count)), rows)
    in_splits = next((count for count in range(1, wide) if fits(count, out_splits)), wide)
    return in_splits, next((count for count in range(out_splits, tall) if fits(in_splits, count)), tall)
