"""Cross entropy of a linear layer without its logits.

A whole weight gets its gradients in forward, where the logits are: backward multiplies them by the gradient of the loss. That needs one factor
for all tokens. With ``reduction="none"`` each token has its own, and of a TiledLinear only one tile is to be there: then forward measures the
logits, backward computes them again, and each tile of the weight is a node in autograd, gathered once for all tokens in each direction.
Source: Liger Kernel, arXiv 2410.10989, section 3.2; Cut Your Losses, arXiv 2411.09009.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from zk.core.options import parse_nbytes
from zk.core.owners import is_wrapper
from zk.kernels.launch import FLOATS
from zk.linear_loss import LinearLoss, cut
from zk.nn.tiled_linear import TiledLinear, autocast_dtype, memoryless, no_autocast
from zk.nn.tiles import Whole
from zk.parallel.gather import gather


def _times(grad: Tensor, factor: Tensor, dtype: torch.dtype, keep: bool) -> Tensor:
    """``grad`` times a scalar, in fp32 and rounded once; in its own memory unless that is kept for another backward."""
    out = torch.empty_like(grad, dtype=dtype) if keep or grad.dtype != dtype else grad
    for rows in cut(len(grad), 1024):
        out[rows] = grad[rows].float() * factor
    return out


def _once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator of backward: refuse a graph of it. (torch's ``once_differentiable`` lets one be made that has no derivative.)"""

    @functools.wraps(backward)
    def checked(*args: Any) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "linear_cross_entropy has no second derivative, and backward was called with create_graph=True; call it without, or use "
                "torch.nn.functional.cross_entropy on the logits"
            )
        return backward(*args)

    return checked


class _Whole(torch.autograd.Function):
    """The sum of all tokens' losses over a whole weight, and its gradients for a factor of 1."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, call: LinearLoss) -> Tensor:
        wants = ctx.needs_input_grad[:3] if call.trains else (False, False, False)
        device = call.hidden.device
        with gather([weight]), no_autocast(device):
            whole = weight.detach().to(call.hidden.dtype)
            for_hidden = torch.empty_like(call.hidden, dtype=hidden.dtype) if wants[0] else None
            for_weight = torch.zeros(whole.shape, device=device) if wants[1] else None
            for_bias = torch.zeros(call.vocab, device=device) if wants[2] else None
            # in fp16 small probabilities are kept by a power of two, which comes off again in fp32
            raised = 1024.0 if call.hidden.dtype == torch.float16 else 1.0
            if raised != 1:
                call.scale = torch.full((len(call.hidden),), raised, device=device)
            for rows in call.tokens():
                if not any(wants):
                    call.measure(rows, whole, 0)
                    continue
                part = torch.zeros(call.hidden[rows].shape, device=device) if wants[0] else None
                call.add_gradients(rows, whole, 0, (part, for_weight, for_bias), True)
                if for_hidden is not None and part is not None:
                    for_hidden[rows] = part if raised == 1 else part / raised
        ctx.save_for_backward(for_hidden, for_weight, for_bias)
        ctx.dtypes, ctx.raised = (hidden.dtype, weight.dtype, None if bias is None else bias.dtype), (1.0, raised, raised)
        return call.losses().sum()

    @staticmethod
    @_once
    def backward(ctx: Any, factor: Tensor) -> tuple[Tensor | None, ...]:
        keep = torch._C._autograd._get_current_graph_task_keep_graph()  # type: ignore[attr-defined]
        given = zip(ctx.saved_tensors, ctx.dtypes, ctx.raised, strict=True)
        return *(None if grad is None else _times(grad, factor / raised, dtype, keep) for grad, dtype, raised in given), None


class _Open(torch.autograd.Function):
    """The first link of the chain of tiles, without memory; backward ends here, with the gradients of the hidden states and of the bias."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, bias: Tensor | None, anchor: Tensor, call: LinearLoss) -> Tensor:
        ctx.call, ctx.dtypes = call, (hidden.dtype, None if bias is None else bias.dtype)
        return memoryless(hidden.shape, torch.float32, hidden.device)

    @staticmethod
    @_once
    def backward(ctx: Any, link: Tensor) -> tuple[Tensor | None, ...]:
        call: LinearLoss = ctx.call
        grads = [None if grad is None else grad.to(dtype) for grad, dtype in zip((call.grad_hidden, call.grad_bias), ctx.dtypes, strict=True)]
        call.scale = call.grad_hidden = call.grad_bias = None
        call.free()
        return *grads, None, None


class _Step(torch.autograd.Function):
    """One tile of the weight, for all tokens. ``gathers``: no module does that for it."""

    @staticmethod
    def forward(ctx: Any, link: Tensor, weight: Tensor, call: LinearLoss, first: int, gathers: bool) -> Tensor:
        ctx.params = [weight] if gathers else []
        with gather(ctx.params), no_autocast(link.device):
            tile = weight.detach().to(call.hidden.dtype)
            for rows in call.tokens():
                call.measure(rows, tile, first)
        ctx.save_for_backward(weight, call.hidden)
        ctx.call, ctx.first = call, first
        return memoryless(link.shape, link.dtype, link.device)

    @staticmethod
    @_once
    def backward(ctx: Any, link: Tensor) -> tuple[Tensor | None, ...]:
        call, first = ctx.call, ctx.first
        with gather(ctx.params), no_autocast(link.device):
            weight, call.hidden = ctx.saved_tensors
            tile = weight.detach().to(call.hidden.dtype)
            for_weight = torch.zeros(tile.shape, device=tile.device) if ctx.needs_input_grad[1] else None
            for_bias = None if call.grad_bias is None else call.grad_bias[first : first + len(tile)]
            for rows in call.tokens():
                for_hidden = None if call.grad_hidden is None else call.grad_hidden[rows]
                call.add_gradients(rows, tile, first, (for_hidden, for_weight, for_bias), False)
        return link, None if for_weight is None else for_weight.to(weight.dtype), None, None, None


class _TiledLoss(LinearLoss):
    """The call as tiles of a TiledLinear see it."""

    def step(self, link: Tensor, weight: Tensor, rows: slice, columns: slice) -> Tensor:
        """Measure all tokens over rows ``rows`` of the weight, of which this is a tile; backward, their gradients."""
        return _Step.apply(link, weight, self, rows.start, False)  # type: ignore[no-untyped-call, no-any-return]


class _Close(torch.autograd.Function):
    """The last link becomes the losses (tokens,); backward begins here, with the gradient of each."""

    @staticmethod
    def forward(ctx: Any, link: Tensor, call: LinearLoss, wants: tuple[bool, bool]) -> Tensor:
        ctx.call, ctx.shape, ctx.wants = call, link.shape, wants
        ctx.save_for_backward(call.targets)
        ctx.state = call.state  # (the kernel's op counts as one that writes it)
        result = call.losses()
        call.free()
        return result

    @staticmethod
    @_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        call: LinearLoss = ctx.call
        (call.targets,), call.state = ctx.saved_tensors, ctx.state
        call.scale = grad.contiguous()
        call.grad_hidden = torch.zeros(ctx.shape, device=grad.device) if ctx.wants[0] else None
        call.grad_bias = torch.zeros(call.vocab, device=grad.device) if ctx.wants[1] else None
        return memoryless(ctx.shape, torch.float32, grad.device), None, None


@_disable_dynamo  # as torch.compiler.disable, which would import the compiler with zk
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor | nn.Linear | TiledLinear,
    targets: Tensor,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    reduction: str = "mean",
    max_nbytes: int | str | None = None,
) -> Tensor:
    """``F.cross_entropy(F.linear(hidden, weight, bias), targets)`` without the logits, in memory that does not grow with the number of tokens.

    Logits, their softmax, and sums of gradients are fp32, whatever the precision of ``hidden`` and ``weight``; so is the loss. Of a whole
    weight the gradients are made in forward and kept for backward: fp32 in the shape of ``weight``. With
    ``reduction="none"``, and for a TiledLinear, backward computes the logits again.

    Args:
        hidden: (..., features) fp32, bf16 or fp16. Under autocast products are in its precision.
        weight: (vocab, features) in the precision of ``hidden``; or an nn.Linear, or a TiledLinear, with its bias. A parameter that stage 3 has
            released is gathered for the call, once for all tokens, on all ranks; a TiledLinear tile by tile.
        targets: (...) int64, numbers in the vocabulary. They are not shifted.
        bias: (vocab,).
        ignore_index: target of tokens that do not count.
        label_smoothing: as in ``F.cross_entropy``.
        softcap: logits become ``softcap * tanh(logits / softcap)``.
        z_loss: adds ``z_loss * logsumexp(logits) ** 2`` to each token's loss.
        reduction: "mean" over the tokens that count (NaN where none does, and gradients of zero), "sum", or "none", the shape of ``targets``.
        max_nbytes: bytes (or "64MiB") of fp32 logits that exist at once; by default those of a block of 256 tokens, of 1,024 on a device. Less
            takes the vocabulary in tiles of 4,096 (8,192) or a multiple, and computes each twice; it changes no bit.

    Raises:
        ValueError: for shapes that do not fit together, and a ``max_nbytes`` below one block of tokens and one tile of the vocabulary.
        TypeError: for precisions and kinds of parameters that are not known.
        IndexError: for targets outside of the vocabulary in host memory; on a device the loss is NaN.

    Source: Liger Kernel, arXiv 2410.10989, section 3.2.
    """
    options = {"ignore_index": ignore_index, "label_smoothing": label_smoothing, "softcap": softcap or 0.0, "z_loss": z_loss}
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap must be more than 0, or None; got {softcap!r}")
    if type(weight) is nn.Linear or isinstance(weight, TiledLinear):
        if bias is not None:
            raise ValueError(f"bias has no place beside a {type(weight).__name__}, which has its own; pass its weight, or leave bias out")
        bias = weight.bias
    head: Any = weight.weight if type(weight) is nn.Linear else weight
    if isinstance(head, Tensor):
        head = head.as_subclass(Tensor) if isinstance(head, Whole) else head
        if is_wrapper(head):
            raise TypeError(
                f"weight is a {type(head).__name__}, whose rows are not all here as numbers that products take; leave the head out of "
                "parallelize_module's plan and of quantization"
            )
        params, shape = [head], tuple(head.shape)
    elif isinstance(head, TiledLinear):
        if head.in_splits > 1 or head.input_is_already_split:
            raise ValueError(
                f"the head has in_splits={head.in_splits}, and no logit is whole in one tile; split its output alone: in_splits=1, out_splits="
                f"{head.in_splits * head.out_splits}"
            )
        params, shape = [tile.weight for tile in head.each_tile()], (head.out_features, head.in_features)
    else:
        raise TypeError(f"weight must be a tensor (vocab, features), an nn.Linear or a TiledLinear; got {type(weight).__name__}")
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction must be 'mean', 'sum' or 'none'; got {reduction!r}")
    if not 0 <= label_smoothing <= 1 or not z_loss >= 0:
        raise ValueError(f"label_smoothing must be between 0 and 1, and z_loss at least 0; got {label_smoothing} and {z_loss}")
    if (
        len(shape) != 2
        or not shape[0]
        or hidden.ndim < 1
        or hidden.shape[-1] != shape[1]
        or hidden.shape[:-1] != targets.shape
    ):
        raise ValueError(
            f"hidden (..., features), weight (vocab, features) and targets (...) must fit together; got {tuple(hidden.shape)}, {shape} and "
            f"{tuple(targets.shape)}"
        )
    if bias is not None and bias.shape != shape[:1]:
        raise ValueError(f"bias must be ({shape[0]},), one for each row of weight; got {tuple(bias.shape)}")
    if targets.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"targets must be numbers of classes, int64; got {targets.dtype} (probabilities of classes need all logits)")
    if hidden.dtype not in FLOATS or params[0].dtype not in FLOATS:
        raise TypeError(f"hidden and weight must be fp32, bf16 or fp16; got {hidden.dtype} and {params[0].dtype}")
    device, vocab = hidden.device, shape[0]
    for name, tensor in (("weight", params[0]), ("targets", targets), ("bias", bias)):
        if tensor is not None and tensor.device != device:
            raise ValueError(f"{name} is on {tensor.device}, hidden on {device}")
    chosen = autocast_dtype(device)
    product = chosen or hidden.dtype
    if chosen is None and params[0].dtype != product:
        raise ValueError(f"hidden must be in the weight's precision, {params[0].dtype}; got {hidden.dtype} (autocast would cast it)")
    numbers = targets.reshape(-1).to(torch.int64).contiguous()
    if device.type == "cpu":
        counts = numbers[numbers != ignore_index]
        if len(counts) and not 0 <= int(counts.min()) <= int(counts.max()) < vocab:
            raise IndexError(
                f"targets must be between 0 and {vocab - 1}, or ignore_index={ignore_index}; got {int(counts.min())} to {int(counts.max())}"
            )
    rows = hidden.reshape(len(numbers), hidden.shape[-1])
    with gather([] if bias is None else [bias]):
        wide = None if bias is None else bias.detach().to(torch.float32, copy=True)
    trains = torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in (hidden, bias, *params))
    state = torch.zeros(4, len(numbers), device=device)
    limit = None if max_nbytes is None else parse_nbytes(max_nbytes, "max_nbytes")
    call = _TiledLoss(rows.detach().to(product), numbers, wide, vocab, options, limit, state, trains)
    least = 4 * call.piece[0] * min(call.piece[1], vocab)
    if limit is not None and limit < least:
        raise ValueError(f"max_nbytes must be at least {least}, the logits of {call.piece[0]} tokens over one tile of the vocabulary; got {limit}")
    if reduction != "none" and isinstance(head, Tensor):
        total: Tensor = _Whole.apply(rows, head, bias, call)  # type: ignore[no-untyped-call]
    else:
        anchor = torch.zeros((), device=device, requires_grad=trains)
        link: Tensor = _Open.apply(rows, bias, anchor, call)  # type: ignore[no-untyped-call]
        if isinstance(head, TiledLinear):
            for tile in head.each_tile():
                link = tile(link, call)
        else:
            link = _Step.apply(link, head, call, 0, True)  # type: ignore[no-untyped-call]
        wants = rows.requires_grad, bias is not None and bias.requires_grad
        each: Tensor = _Close.apply(link, call, wants)  # type: ignore[no-untyped-call]
        if reduction == "none":
            return each.view(targets.shape)
        total = each.sum()
    if reduction == "sum":
        return total
    count = (numbers != ignore_index).sum()
    return torch.where(count > 0, total / count.clamp(min=1), torch.nan)
