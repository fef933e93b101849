"""Tiles of long sequences as micro-batches: what they are, and the keys and values that later tiles look at.

All tiles pass a block before any passes the next one. So a tile's attention in a block finds the keys and values of all tiles before it, which rest
between their uses. In backward the last tile comes first: gradients for keys and values of earlier tiles are added up in fp32 until their own tile's
turn, when they are whole. Of forward attention's output is kept, so that backward need not compute it again.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from zk.accumulation.attention import Kind, attend, attend_backward, merge
from zk.accumulation.resting import fetch_ahead, rest, value_of
from zk.core.memory import trim
from zk.core.options import is_count
from zk.nn.activations import ActivationOffload, no_hooks
from zk.nn.tiled_linear import autocast_dtype, no_autocast
from zk.parallel.partitioned import is_of_checkpoint

_IGNORED = -100
_RULE = "attention over tiles of a sequence is causal over all tokens before, by torch.nn.functional.scaled_dot_product_attention(is_causal=True)"
_TRIMMED_NBYTES = 2 << 20  # keys and values that are looked at, after which malloc gives back what it keeps
_MIXES_TOKENS = (nn.modules.conv._ConvNd, nn.RNNBase)


class SequenceTile(dict[str, Any]):
    """A tile of tokens, as a causal language model of transformers is called with: ``model(**tile)``. Made by ``sequence_tiles``."""

    def __init__(self, values: Mapping[str, Any], batch: object, number: int, count: int, length: int) -> None:
        super().__init__(values)
        self.batch, self.number, self.count, self.length = batch, number, count, length

    @property
    def tokens(self) -> int:
        """Number of tokens of each sequence."""
        return int(self["input_ids"].shape[1])

    def to(self, device: torch.device) -> SequenceTile:
        """The same with its tensors on ``device``."""
        moved = copy.copy(self)
        moved.update({name: value.to(device) for name, value in self.items() if isinstance(value, Tensor)})
        return moved


def sequence_tiles(batch: Mapping[str, Any] | Sequence[Mapping[str, Any]], tokens: int) -> list[SequenceTile]:
    """Cut sequences into tiles of tokens, the micro-batches of ``optimizer.accumulate``: memory is that of one tile, whatever the length.

    ```python
    losses = optimizer.accumulate(zk.sequence_tiles(batch, tokens=4096), lambda model, tile: model(**tile).loss)
    loss = sum(losses)
    ```

    Attention looks at all tokens before, also in other tiles. Loss and gradients are those of the whole sequences, but for the order of additions.
    Give the tiles to ``accumulate`` as they are, all of a batch in order; they go to the device one at a time.

    Args:
        batch: ``input_ids`` and ``labels`` (batch, tokens), and what else the model takes of this shape; or a list of such batches, of one step.
        tokens: of a tile; the last one of a batch has what is left.

    Returns:
        Tiles with ``position_ids``, ``labels`` and ``shift_labels`` (both the targets: labels, shifted before they are cut), and
        ``num_items_in_batch``, the number of targets of all batches unless the first batch has one: losses of transformers add up to the mean.

    Raises:
        ValueError: for padding that is not on the right with labels of -100, positions that do not count from 0 (packed sequences), and values that
            cannot be cut.
    """
    check_tokens(tokens, "tokens")
    batches = [batch] if isinstance(batch, Mapping) else list(batch)
    wholes = [_whole(each) for each in batches]
    count = next((each["num_items_in_batch"] for each in batches if "num_items_in_batch" in each), None)
    if count is None:
        count = sum(int((whole["labels"][:, 1:] != _IGNORED).sum()) for whole in wholes)
    return [tile for whole in wholes for tile in _cut(whole, tokens, count)]


def check_tokens(tokens: Any, name: str) -> None:
    """Refuse what is no number of tokens of a tile."""
    if not is_count(tokens, 2):
        raise ValueError(f"{name} must be a number of tokens, 2 or more; got {tokens!r}")


def _whole(batch: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors to cut, (batch, tokens, ...)."""
    ids, labels = batch.get("input_ids"), batch.get("labels")
    if not isinstance(ids, Tensor) or not isinstance(labels, Tensor) or ids.ndim != 2 or ids.shape != labels.shape or ids.shape[1] < 2:
        got = {name: tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__ for name, value in batch.items()}
        raise ValueError(
            f"a batch must have input_ids and labels, both (batch, tokens), of 2 tokens or more (labels=input_ids, where all are targets); got {got}"
        )
    shape, whole = ids.shape, dict[str, Tensor]()
    for name, value in batch.items():
        if value is None:
            continue
        if name == "attention_mask":
            if not _is_right_padding(value, labels):
                raise ValueError(
                    "attention_mask must be 1 for all tokens of a sequence in tiles, but for padding on the right, with labels of -100: no token "
                    "before looks at it. Pad on the right (tokenizer.padding_side), or give each sequence as a batch of its own"
                )
        elif name == "position_ids":
            if not bool((value == torch.arange(shape[1], device=value.device)).all()):
                raise ValueError(
                    "position_ids must count from 0 in a sequence in tiles: attention looks at all tokens before, also across sequences that are "
                    "packed into one; give each sequence as a batch of its own"
                )
        elif isinstance(value, Tensor) and value.shape[:2] == shape:
            whole[name] = value
        elif name != "num_items_in_batch":
            raise ValueError(f"{name} cannot be cut into tiles of tokens: it must be a tensor of {tuple(shape)} as input_ids is; leave it away")
    return whole


def _is_right_padding(mask: Any, labels: Tensor) -> bool:
    """Tell if a mask leaves out no more than tokens at the end that are no targets."""
    if not isinstance(mask, Tensor) or mask.shape != labels.shape:
        return False
    kept = mask == 1
    is_plain = ((mask == 0) | kept).all() and kept[:, 0].all() and (kept[:, 1:] <= kept[:, :-1]).all()
    return bool(is_plain and (labels[~kept] == _IGNORED).all())


def _cut(whole: Mapping[str, Tensor], tokens: int, targets: Any) -> Iterator[SequenceTile]:
    length, batch = whole["input_ids"].shape[1], object()
    starts = [start for start in range(0, length, tokens) if start == 0 or length - start > 1]  # one token more goes to the tile before
    for number, (start, end) in enumerate(zip(starts, [*starts[1:], length], strict=True)):
        values: dict[str, Any] = {name: value[:, start:end].contiguous() for name, value in whole.items()}
        shifted = whole["labels"][:, start + 1 : end + 1]
        values["labels"] = values["shift_labels"] = F.pad(shifted, (0, end - start - shifted.shape[1]), value=_IGNORED).contiguous()
        values["position_ids"] = torch.arange(start, end, device=shifted.device).unsqueeze(0)
        yield SequenceTile({**values, "num_items_in_batch": targets}, batch, number, len(starts), length)


# ---- in accumulate -----------------------------------------------------------------------------------------------------------


class Sequences:
    """The keys and values of one ``accumulate``: of each sequence, by the call of attention."""

    def __init__(self, batches: Sequence[Any], model: nn.Module) -> None:
        self.layers: dict[Any, Layer] = {}
        self.tiles = [batch if isinstance(batch, SequenceTile) else None for batch in batches]
        self.numbers: list[int] = []  # of sequences, which may be the same batch once more
        number, batch = 0, object()  # of the next tile
        for tile in (*self.tiles, None):
            if number if tile is None else tile.number != number or (number and tile.batch is not batch):
                raise ValueError("accumulate() must be given all tiles of a batch that sequence_tiles has cut, one after the other, in order")
            self.numbers.append(self.numbers[-1] if number else len(self.numbers))
            number, batch = (0, batch) if tile is None else ((number + 1) % tile.count, tile.batch)
        longest = max((tile.length for tile in self.tiles if tile is not None), default=0)
        if longest:
            _check_model(model, longest)

    def __bool__(self) -> bool:
        return any(tile is not None for tile in self.tiles)

    def check(self) -> None:
        """Refuse an end at which gradients are left."""
        if any(layer.grads for layer in self.layers.values()):
            raise RuntimeError(
                f"{_RULE}; backward has not come to all of its calls that forward has made, and gradients of keys and values are left over. Train "
                "this model without sequence_tiles"
            )

    def layer(self, key: Any) -> Layer:
        """The layer of attention of a sequence, by its number, that of the block's call, and that of attention's call in it."""
        return self.layers.setdefault(key, Layer(self.layers, key))


def _check_model(model: nn.Module, length: int) -> None:
    """Refuse what looks at other tokens otherwise than by attention, or at some of those before only."""
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    kinds = getattr(config, "layer_types", None)
    for name in ("sliding_window", "attention_chunk_size"):
        window = getattr(config, name, None)
        if isinstance(window, int) and window < length and getattr(config, "use_sliding_window", True) and set(kinds or [""]) != {"full_attention"}:
            raise ValueError(f"{_RULE}; the model's {name} is {window}, less than the sequence's {length} tokens. Train it without sequence_tiles")
    rope: Any = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    for each in (rope, *(value for value in rope.values() if isinstance(value, Mapping))):
        kind = each.get("rope_type", each.get("type"))
        limit: int = each.get("original_max_position_embeddings") or getattr(config, "max_position_embeddings", 0)
        if kind in ("dynamic", "longrope") and length > limit:
            raise ValueError(
                f"the model's positions (rope_type {kind!r}) depend on the length of a sequence beyond {limit} tokens, and tiles of {length} tokens "
                "have not theirs. Train it without sequence_tiles"
            )
    for path, module in model.named_modules():
        if hasattr(module, "create_position_ids_from_input_ids"):
            raise ValueError(
                f"{path!r} ({type(module).__name__}) makes positions of its own from input_ids, counted from padding_idx + 1, and tiles of a "
                "sequence have others. Train it without sequence_tiles"
            )
        if isinstance(module, _MIXES_TOKENS):
            raise ValueError(f"{_RULE}; {path!r} is a {type(module).__name__}, which would not see other tiles. Train it without sequence_tiles")


class Layer:
    """One call of attention in a block: what rests of each tile, by its number."""

    def __init__(self, layers: dict[Any, Layer], key: Any) -> None:
        self.layers, self.key = layers, key
        self.keys: dict[int, tuple[Tensor, Tensor]] = {}  # and values
        self.outputs: dict[int, tuple[Tensor, Tensor]] = {}  # and logsumexp
        self.grads: dict[int, tuple[Tensor, Tensor]] = {}  # of keys and values, from later tiles, in fp32

    def before(self, number: int) -> Iterable[tuple[int, Tensor, Tensor]]:
        """Number, keys and values of the tiles before, the nearest first, each read while the one before it is computed with."""
        nbytes = 0
        for earlier in range(number - 1, -1, -1):
            key, value = map(value_of, self.keys[earlier])
            fetch_ahead(self.keys.get(earlier - 1, ()))
            nbytes += key.nbytes + value.nbytes
            yield earlier, key, value
            if nbytes >= _TRIMMED_NBYTES and key.device.type == "cpu":
                nbytes = 0
                trim()

    def free(self, number: int) -> None:
        """Drop what rests of a tile: nobody looks at it any more."""
        for values in (self.keys, self.outputs, self.grads):
            values.pop(number, None)
        if not self.keys:
            self.layers.pop(self.key, None)


class TileAttention(TorchFunctionMode):
    """Context of a block's call: attention looks at earlier tiles, too.

    Args:
        sequences: of all tiles.
        number: of the micro-batch, which is a tile.
        call: number of the block's call.
        name: of the block.
        has_graph: there will be a backward through the call.
        offload: where keys and values rest.
    """

    def __init__(self, sequences: Sequences, number: int, call: int, name: str, has_graph: bool, offload: ActivationOffload | None) -> None:
        super().__init__()
        self.sequences, self.call, self.name, self.has_graph, self.offload = sequences, (sequences.numbers[number], call), name, has_graph, offload
        self.tile: Any = sequences.tiles[number]
        self.order = 0  # of the next call of attention

    def __enter__(self) -> TileAttention:
        self.order, self.with_graph = 0, torch.is_grad_enabled()
        return super().__enter__()  # type: ignore[no-any-return, no-untyped-call]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            self.order += 1
            return self._attend(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def check(self) -> None:
        """Refuse a block that has not called attention."""
        if not self.order:
            raise RuntimeError(
                f"{_RULE}; block {self.name!r} does not call it, and would not see other tiles "
                '(transformers: attn_implementation="sdpa")'
            )

    @_disable_dynamo  # as torch.compiler.disable, which would import the compiler with zk
    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        tokens, tile = self.tile.tokens, self.tile
        if self.with_graph and not torch.is_grad_enabled():
            raise RuntimeError(elsewhere(f"without a graph in block {self.name!r}, which has one: by torch.no_grad, or a reentrant checkpoint"))
        with no_hooks() as hooks:
            if any(map(is_of_checkpoint, hooks)):
                raise RuntimeError(elsewhere(f"by a checkpoint inside of block {self.name!r}, which accumulate() computes again in any case"))
        wrong = {
            "a mask (padding, packed sequences, a window)": attn_mask is not None,
            "dropout": dropout_p > 0,
            "is_causal=False": not is_causal,
            f"queries and keys of {tuple(query.shape)} and {tuple(key.shape)} for {tokens} tokens": query.ndim != 4
            or {query.shape[2], key.shape[2], value.shape[2]} != {tokens},
        }
        if any(wrong.values()):
            got = next(name for name, is_so in wrong.items() if is_so)
            raise RuntimeError(
                f"{_RULE}; block {self.name!r} calls it with {got}. Set that to none in the model, or train it without sequence_tiles"
            )
        if (cast := autocast_dtype(query.device)) is not None:
            query, key, value = (tensor if tensor.dtype == torch.float64 else tensor.to(cast) for tensor in (query, key, value))
        query, key, value = (tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in (query, key, value))  # as kernels read them
        scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
        layer = self.sequences.layer((*self.call, self.order))
        has_grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
        if has_grad:
            return _Attention.apply(query, key, value, self, layer, scale)  # type: ignore[no-untyped-call, no-any-return]
        with torch.no_grad(), no_autocast(query.device):
            out, lse = self.compute(layer, query, key, value, scale)
        if self.has_graph and not torch.is_grad_enabled():
            layer.outputs[tile.number] = self.rest(out), self.rest(lse)
        elif not self.has_graph and tile.number == tile.count - 1:  # there is no backward
            for number in range(tile.count):
                layer.free(number)
        return out

    def rest(self, tensor: Tensor) -> Tensor:
        """Let a tensor rest, without others that share its memory."""
        return rest(tensor.detach() if tensor.nbytes == tensor.untyped_storage().nbytes() else tensor.detach().clone(), self.offload)

    def compute(self, layer: Layer, query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Output and logsumexp over the tile itself and all before, as they were if they have been computed; keys and values are kept."""
        number = self.tile.number
        if number in layer.outputs:
            return tuple(map(value_of, layer.outputs.pop(number)))  # type: ignore[return-value]
        if number < self.tile.count - 1:  # nobody looks at those of the last one
            layer.keys[number] = self.rest(key), self.rest(value)
        out, lse = attend(query, key, value, Kind(scale, True))
        dtype = out.dtype
        for _, other_key, other_value in layer.before(number):
            out, lse = merge(out, lse, *attend(query, other_key, other_value, Kind(scale, False)))
        return out.to(dtype), lse

    def compute_backward(
        self, layer: Layer, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, scale: float, keep: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of a tile's queries, keys and values; those of earlier keys and values are added to what rests, if they are to be had."""
        number = self.tile.number
        later = layer.grads.pop(number, ())
        for_query, *own = attend_backward(grad, query, key, value, out, lse, Kind(scale, True))
        whole = [for_key + value_of(more) for for_key, more in zip(own, later, strict=True)] if later else own
        del own, later
        for earlier, other_key, other_value in layer.before(number):
            fetch_ahead(layer.grads.get(earlier, ()) if keep else ())
            part, *others = attend_backward(grad, query, other_key, other_value, out, lse, Kind(scale, False))
            for_query = for_query.to(lse.dtype).add_(part)
            if keep:
                before = layer.grads.pop(earlier, ())
                sums = [value_of(old) + new for old, new in zip(before, others, strict=True)] if before else [new.to(lse.dtype) for new in others]
                layer.grads[earlier] = self.rest(sums[0]), self.rest(sums[1])
        layer.free(number)
        return for_query.to(query.dtype), whole[0].to(key.dtype), whole[1].to(value.dtype)


class _Attention(torch.autograd.Function):
    """Attention of one tile; its backward adds to what gradients of earlier tiles' keys and values are."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mode: TileAttention, layer: Layer, scale: float) -> Tensor:
        with no_autocast(query.device):
            out, lse = mode.compute(layer, query, key, value, scale)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.mode, ctx.layer, ctx.scale = mode, layer, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        keep = any(ctx.needs_input_grad[1:3])
        with no_autocast(grad.device):
            grads = ctx.mode.compute_backward(ctx.layer, grad, *ctx.saved_tensors, ctx.scale, keep)
        return *(given if wanted else None for given, wanted in zip(grads, ctx.needs_input_grad, strict=False)), None, None, None


class Outside(TorchFunctionMode):
    """Context of what a model computes between blocks: attention there would not see other tiles.

    Args:
        tile: that the model is called with. Its labels are not to be shifted once more. At the end of the context something must have been
            computed with its ``position_ids``: a model that counts tokens from 0 in each tile has wrong positions in all but the first.
    """

    def __init__(self, tile: SequenceTile) -> None:
        super().__init__()
        self.tile, self.has_positions = tile, tile.count == 1 or "position_ids" not in tile

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        super().__exit__(kind, error, traceback)  # type: ignore[no-untyped-call]
        if error is None and not self.has_positions and "position_ids" in self.tile:
            raise RuntimeError(
                "nothing was computed with position_ids of a tile of a sequence, so tokens have positions that begin at 0 in each tile: the "
                "model, or loss_fn, leaves them out. Let the model take its positions from there; where it has none, del tile['position_ids'] in "
                "loss_fn; or train it without sequence_tiles"
            )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            raise RuntimeError(elsewhere("outside of the model's blocks"))
        if self.shifts(func, *args):
            raise RuntimeError(
                "labels of a tile of a sequence are the targets, shifted before the sequence was cut, and the model shifts them once more: let it "
                "take shift_labels, or compute the loss of its logits and tile['shift_labels'] in loss_fn"
            )
        if getattr(func, "__name__", "") != "__get__":  # (attributes, as a shape)
            self.see((*args, *(kwargs or {}).values()))
        return func(*args, **(kwargs or {}))

    def shifts(self, func: Any, given: Any = None, how: Any = None, *_: Any) -> bool:
        """Tell if a function makes labels of the next token."""
        index = how if isinstance(how, tuple) else (how,)
        leaves_first_out = func is Tensor.__getitem__ and any(isinstance(part, slice) and part.start == 1 for part in index)
        return given is not None and given is self.tile.get("labels") and (func is F.pad or leaves_first_out)

    def see(self, given: Iterable[Any]) -> None:
        """Note whether a function, or a block, is given the tile's positions."""
        self.has_positions = self.has_positions or any(value is self.tile.get("position_ids") for value in given)


def elsewhere(where: str) -> str:
    """The error of attention that would not see other tiles."""
    return f"{_RULE}; here it is called {where}. Change that in the model, or train it without sequence_tiles"
