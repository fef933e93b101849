"""Tensors without memory, whose values rest where an offload of activations has put them, and come back when somebody computes with them.

A micro-batch that stands before a block holds what it has computed so far in variables of the model's own forward, which cannot be taken away from
it. So what it gets there are such tensors.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from zk.nn.activations import ActivationOffload


class Resting(Tensor):
    """See above. Made by ``rest``."""

    offload: ActivationOffload
    saved: Any

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Resting(shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        for argument, given in zip(func._schema.arguments, args, strict=False):
            if type(given) is cls and argument.alias_info is not None and argument.alias_info.is_write:
                raise RuntimeError(
                    f"a tensor of shape {tuple(given.shape)} that goes into a block, or comes out of one, was modified by an inplace operation "
                    f"({func._schema.name}), and rests elsewhere during accumulate(); write to a copy of it instead (x = x + y, not x += y)"
                )
        args, kwargs = tree_map(value_of, (args, kwargs or {}))
        return func(*args, **kwargs)


class _Rest(torch.autograd.Function):
    """The same tensor, resting; a link of the graph."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, offload: ActivationOffload) -> Tensor:
        saved = offload.rest(tensor)
        if saved is None:
            return tensor.view_as(tensor)
        made: Resting = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            Resting, tensor.shape, strides=tensor.stride(), dtype=tensor.dtype, device=tensor.device
        )
        made.offload, made.saved = offload, saved
        return made

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad, None


def rest(tensor: Tensor, offload: ActivationOffload | None) -> Tensor:
    """Let a tensor rest. What stays in memory in any case (small tensors, parameters; all without an offload) is returned as it is."""
    if offload is None or type(tensor) is not Tensor or not offload.may_move(tensor):
        return tensor
    return _Rest.apply(tensor, offload)  # type: ignore[no-untyped-call, no-any-return]


def value_of(value: Any) -> Any:
    """The tensor itself of one that rests, without a graph; anything else as it is."""
    return value.offload.fetch(value.saved) if type(value) is Resting else value


def fetch_ahead(values: Iterable[Any]) -> None:
    """Start to bring back those that rest: they are next."""
    for value in values:
        if type(value) is Resting:
            value.offload.prefetch(value.saved)
