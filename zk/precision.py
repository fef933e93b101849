"""Precision: which parameters are cast, and inputs; the loss scale; and the factor of clipping."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Container, Iterator, Sequence
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
            "names are those of model.named_modules() and model.named_parameters(), or whole parts of "
            "them",
        )
        kept |= found
    for module in model.modules():
        if getattr(module, "running_mean", None) is not None:
            kept |= set(module.parameters())
        words = (getattr(module, attribute, None) or () for attribute in KEPT_BY_MODELS)
        for word in itertools.chain.from_iterable(words):
            kept |= matching(model, word)
    return lambda p: dtype if dtype and p.dtype in CASTABLE and p not in kept else p.dtype


def matching(model: nn.Module, entry: Entry) -> set[Tensor]:
    """Parameters of a class of modules, or with a word among the dotted parts of their names."""
    if isinstance(entry, type):
        modules = (module for module in model.modules() if isinstance(module, entry))
        return {param for module in modules for param in module.parameters()}
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

        return tree_map(cast, args), tree_map(cast, kwargs)


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


class LossScaler:
    """The loss scale of a run: a constant, or what a rule makes of it.

    "auto": dynamic if fp16 is among the ``trained`` dtypes, and else none.
    """

    def __init__(
        self, asked: DynamicLossScale | float | str | None, trained: Container[torch.dtype] = ()
    ) -> None:
        if asked == "auto":
            asked = DynamicLossScale() if torch.float16 in trained else None
        self.is_active = asked is not None
        self.rule = asked if isinstance(asked, DynamicLossScale) else None
        self.scale = self.rule.init if self.rule else float(asked or 1.0)  # type: ignore[arg-type]
        self.patience = self.rule.hysteresis if self.rule else 0
        self.clean_steps = 0  # since the last overflow or growth

    def update(self, overflow: bool) -> None:
        """Account for one step."""
        rule = self.rule
        if rule is None:
            return
        self.clean_steps = 0 if overflow else self.clean_steps + 1
        if overflow and self.patience > 1:
            self.patience -= 1
        elif overflow:
            self.scale = max(self.scale / rule.factor, rule.minimum)
        elif self.clean_steps >= rule.window:
            self.clean_steps, self.patience = 0, rule.hysteresis
            self.scale *= rule.factor

    def state_dict(self) -> dict[str, Any]:
        counts = {"clean_steps": self.clean_steps, "patience": self.patience}
        return {"scale": self.scale, **counts, "active": self.is_active}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the scale of a run that had one; that of bf16 or fp32 says nothing about fp16."""
        if self.rule and state.get("active", True):
            self.scale, self.clean_steps = float(state["scale"]), int(state["clean_steps"])
            self.patience = int(state["patience"])


def clip_factor(norm: float, max_norm: float | None) -> float:
    """What gradients of this norm are multiplied with, as torch's clip_grad_norm_ does.

    1.0 for one that is not finite, so that step() sees it.
    """
    is_clipped = max_norm is not None and math.isfinite(norm)
    return min(1.0, max_norm / (norm + 1e-6)) if is_clipped else 1.0  # type: ignore[operator]


def floats_of(tensors: list[Tensor | float]) -> Iterator[float]:
    """Numbers, of which some may be on a GPU: one read for all of these."""
    far = [value for value in tensors if isinstance(value, Tensor)]
    found = iter(torch.stack(far).tolist() if far else ())
    return (next(found) if isinstance(value, Tensor) else value for value in tensors)
