"""Tensors that autograd saves, and that hooks leave alone: the hooks around get them.

torch asks the innermost hooks alone, and then neither breaks the cycle of an output that its own graph
saves nor notices writes to what is saved.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]  # pack, unpack


class Passed(NamedTuple):
    """What other hooks have packed."""

    unpack: Callable[[Any], Tensor]
    value: Any


def saving_hooks() -> Hooks:
    """The innermost hooks on saved tensors; without any, those that save as torch does."""
    found: Hooks | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return found or (keep, kept)


def keep(tensor: Tensor) -> tuple[Tensor, int]:
    # with its graph it would keep itself alive
    return tensor if tensor.is_leaf else tensor.detach(), tensor._version


def kept(packed: tuple[Tensor, int]) -> Tensor:
    tensor, version = packed
    if tensor._version != version:
        raise RuntimeError(
            f"a tensor of shape {tuple(tensor.shape)} that backward needs was modified by an inplace "
            f"operation after forward saved it (version {version}, now {tensor._version}); write to a "
            "copy of it instead"
        )
    return tensor
