"""In: functions to call around a module's forward. Out: hooks that stay behind when the module is copied or pickled: a copy is a plain module."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map


class Hook:
    """Calls ``call``; its copies call nothing."""

    def __init__(self, call: Callable[..., Any] | None) -> None:
        self.call = torch.compiler.disable(call) if call is not None else None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs) if self.call is not None else None

    def __deepcopy__(self, memo: dict[int, Any]) -> Hook:
        return Hook(None)

    def __reduce__(self) -> tuple[type[Hook], tuple[None]]:
        return Hook, (None,)


@dataclasses.dataclass(frozen=True)
class CastInputs:
    """Forward pre-hook: floating point inputs are cast to ``dtype``, in which the parameters are. Copies of the model keep it."""

    dtype: torch.dtype

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        def cast(value: Any) -> Any:
            return value.to(self.dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

        return tree_map(cast, args), tree_map(cast, kwargs)


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """Calls ``method`` as long as its object lives, and does not keep it alive: the model's hooks would. None once it is gone."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        alive = reference()
        return alive(*args) if alive is not None else None

    return call
