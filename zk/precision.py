"""Precision: which parameters are cast, and inputs; and how a dynamic loss scale moves."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from zk.logs import require

# others hold codes, whose values a cast would lose
CASTABLE = torch.float64, torch.float32, torch.bfloat16, torch.float16
KEPT_BY_MODELS = "_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"  # of transformers
Entry = str | type[nn.Module]


def dtypes_of(
    model: nn.Module, dtype: Any, keep: Sequence[Entry] | None
) -> Callable[[Tensor], torch.dtype]:
    """The dtype that each parameter will have: ``dtype``, but for what ``keep`` matches, what models
    name themselves, and what computes with buffers in their own dtype (BatchNorm).

    ValueError for an entry of ``keep`` that matches nothing.
    """
    kept = set[Tensor]()
    for entry in keep or ():
        found = matching(model, entry)
        require(
            found,
            f"keep_dtype: the model has no module or parameter {getattr(entry, '__name__', entry)!r}; "
            "see model.named_modules() and model.named_parameters() for names, or parts of some",
        )
        kept |= found
    for module in model.modules():
        if getattr(module, "running_mean", None) is not None:
            kept |= set(module.parameters())
        for attribute in KEPT_BY_MODELS:
            for word in getattr(module, attribute, None) or ():
                kept |= matching(model, word)
    return lambda p: dtype if dtype and p.dtype in CASTABLE and p not in kept else p.dtype


def matching(model: nn.Module, entry: Entry) -> set[Tensor]:
    """Parameters of a class of modules, or with a word among the dotted parts of their names."""
    if isinstance(entry, type):
        return {p for m in model.modules() if isinstance(m, entry) for p in m.parameters()}
    pairs = model.named_parameters(remove_duplicate=False)
    return {param for name, param in pairs if f".{entry}." in f".{name}."}


@dataclasses.dataclass(frozen=True)
class CastInputs:
    """Forward pre-hook of the model: floating point inputs are cast to ``dtype``. Copies keep it."""

    dtype: torch.dtype

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        def cast(value: Any) -> Any:
            is_cast = isinstance(value, Tensor) and value.dtype in CASTABLE
            return value.to(self.dtype) if is_cast else value

        return tree_map(cast, (args, kwargs))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DynamicLossScale:
    """How a dynamic loss scale moves. ValueError for a setting out of its range."""

    init: float = 2.0**16  # the scale of the first step
    window: int = 1000  # steps without overflow until it grows
    hysteresis: int = 2  # it falls from this many-th overflow on, counted anew when it grows
    minimum: float = 1.0  # it never falls below this
    factor: float = 2.0  # what it is multiplied and divided by

    def __post_init__(self) -> None:
        for holds, rule in (
            (self.factor > 1, "factor > 1"),
            (0 < self.minimum <= self.init, "0 < minimum <= init"),
            (self.window >= 1 and self.window == int(self.window), "window, a whole number >= 1"),
            (self.hysteresis >= 1, "hysteresis >= 1"),
        ):
            require(holds, f"DynamicLossScale needs {rule}; got {self}")
