"""Causal attention of one tile of tokens, over the keys and values of its own tile and of those before it, a tile at a time.

Each tile of keys gives a part of the output and the logarithm of its sum of exponentials; parts are put together in fp32. Backward needs the whole
output and that logarithm alone, and gives each tile's part of the gradients.

Source: Ring Attention, arXiv 2310.01889; FlashAttention-2, arXiv 2307.08691.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_flash_attention

_ROWS = 256  # queries at once where there is no kernel: as many rows of weights exist


class Kind(NamedTuple):
    """Options of one call."""

    scale: float
    is_causal: bool  # the tile looks at itself


def attend(query: Tensor, key: Tensor, value: Tensor, kind: Kind) -> tuple[Tensor, Tensor]:
    """Output (batch, heads, tokens, features) over these keys and values alone, and logsumexp (batch, heads, tokens) of their weights."""
    heads = query.shape[1]
    key, value = _for_heads(key, heads), _for_heads(value, heads)
    if _on_host(query, value):
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(  # type: ignore[no-any-return]
            query, key, value, 0.0, kind.is_causal, scale=kind.scale
        )
    if _has_flash(query, key, value, kind):
        found = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, kind.is_causal, False, scale=kind.scale)
        return found[0], found[1]
    out = query.new_empty(*query.shape[:-1], value.shape[-1])
    lse = query.new_empty(query.shape[:-1], dtype=_wide(query))
    for rows, weights in _weights(query, key, kind):
        lse[..., rows] = weights.logsumexp(-1)
        out[..., rows, :] = weights.softmax(-1) @ value.to(weights.dtype)
    return out, lse


def merge(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Put two parts together, in the precision of ``lse``; ``out`` is written where it has that."""
    total = torch.logaddexp(lse, more_lse)
    first, second = (lse - total).exp().unsqueeze(-1), (more_lse - total).exp().unsqueeze(-1)
    return out.to(lse.dtype).mul_(first).addcmul_(more.to(lse.dtype), second), total


def attend_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, kind: Kind
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, and of these keys and values, by the whole output and logsumexp; in their dtype, or wider."""
    heads, groups = query.shape[1], key.shape[1]
    grad = grad if grad.stride(-1) == 1 else grad.contiguous()
    wide_key, wide_value = _for_heads(key, heads), _for_heads(value, heads)
    if _on_host(query, value):
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, query, wide_key, wide_value, out, lse, 0.0, kind.is_causal, scale=kind.scale
        )
    elif _has_flash(query, wide_key, wide_value, kind):
        state = torch.empty(2, dtype=torch.uint64, device=query.device)  # of random numbers, which no dropout draws
        grads = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            *(grad, query, wide_key, wide_value, out, lse, None, None),
            *(query.shape[2], key.shape[2], 0.0, kind.is_causal, state, state[:0]),
            scale=kind.scale,
        )
    else:
        grads = _backward(grad, query, wide_key, wide_value, out, lse, kind)
    for_query, *others = grads
    return for_query, *(_of_groups(given, groups) for given in others)  # type: ignore[return-value]


def _backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, kind: Kind) -> tuple[Tensor, Tensor, Tensor]:
    wide = lse.dtype
    for_query, for_key, for_value = (torch.zeros_like(tensor, dtype=wide) for tensor in (query, key, value))
    for rows, weights in _weights(query, key, kind):
        part = (weights - lse[..., rows, None]).exp()
        by = grad[..., rows, :].to(wide)
        for_value += part.mT @ by
        mean = (by * out[..., rows, :]).sum(-1, keepdim=True)
        part *= (by @ value.to(wide).mT - mean) * kind.scale
        for_query[..., rows, :] = part @ key.to(wide)
        for_key += part.mT @ query[..., rows, :].to(wide)
    return for_query, for_key, for_value


def _weights(query: Tensor, key: Tensor, kind: Kind) -> Iterator[tuple[slice, Tensor]]:
    """Scaled products of some queries with all keys, those that are to be seen; -inf of others."""
    wide = _wide(query)
    for start in range(0, query.shape[2], _ROWS):
        rows = slice(start, min(start + _ROWS, query.shape[2]))
        weights = (query[..., rows, :].to(wide) @ key.to(wide).mT) * kind.scale
        if kind.is_causal:
            later = torch.ones(weights.shape[-2:], dtype=torch.bool, device=query.device).triu_(start + 1)
            weights.masked_fill_(later, -torch.inf)
        yield rows, weights


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _for_heads(tensor: Tensor, heads: int) -> Tensor:
    """Keys or values for each head of the queries."""
    return tensor if tensor.shape[1] == heads else tensor.repeat_interleave(heads // tensor.shape[1], 1)


def _of_groups(grad: Tensor, groups: int) -> Tensor:
    """The sum over heads that share keys and values, in fp32."""
    if grad.shape[1] == groups:
        return grad
    return grad.unflatten(1, (groups, -1)).sum(2, dtype=_wide(grad))  # type: ignore[no-untyped-call, no-any-return]


def _on_host(query: Tensor, value: Tensor) -> bool:
    return query.device.type == "cpu" and query.shape[-1] == value.shape[-1]


def _has_flash(query: Tensor, key: Tensor, value: Tensor, kind: Kind) -> bool:
    """Tell if the device has torch's kernel for these."""
    fits = query.shape[-1] == value.shape[-1] and query.shape[-1] % 8 == 0
    return query.device.type == "cuda" and fits and can_use_flash_attention(SDPAParams(query, key, value, None, 0.0, kind.is_causal, False))
