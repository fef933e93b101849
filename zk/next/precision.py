"""Precision: which parameters are cast, and inputs; the loss scale; and the factor of clipping."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from zk.next.options import NAMES

# what a cast changes: a tensor of another dtype holds codes, whose values are lost in a cast
CASTABLE = torch.float64, torch.float32, torch.bfloat16, torch.float16
KEPT_BY_MODELS = "_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"  # of transformers
# what torch says of the CPU: without kernels of oneDNN's a product is a plain loop
SUPPORTED = {
    torch.bfloat16: "_is_mkldnn_bf16_supported",
    torch.float16: "_is_mkldnn_fp16_supported",
}


def dtypes_of(
    model: nn.Module, dtype: Any, keep: Sequence[str | type[nn.Module]] | None
) -> Callable[[Tensor], torch.dtype]:
    """The dtype that each parameter will have. ValueError for an entry of ``keep`` without one."""
    kept = kept_in_dtype(model, keep or ()) if dtype else set()

    def dtype_of(param: Tensor) -> torch.dtype:
        casts = dtype is not None and param.dtype in CASTABLE and param not in kept
        return dtype if casts else param.dtype

    return dtype_of


def kept_in_dtype(model: nn.Module, keep: Sequence[str | type[nn.Module]]) -> set[Tensor]:
    """Parameters that keep their dtype where the model is cast.

    Args:
        model: any module.
        keep: module classes; names of modules and parameters, or whole parts of names.

    The parameters of modules that compute with buffers in their own dtype (BatchNorm) are kept, and
    what the model names in ``_keep_in_fp32_modules``. ValueError for an entry that matches nothing.
    """
    words = {entry: named(model, entry) for entry in keep if isinstance(entry, str)}
    kinds = {entry: of_kind(model, entry) for entry in keep if isinstance(entry, type)}
    missing = [entry for entry, found in (words | kinds).items() if not found]
    if missing:
        shown = ", ".join(repr(getattr(entry, "__name__", entry)) for entry in missing)
        raise ValueError(
            f"keep_dtype: the model has no module or parameter {shown}; names are those of "
            "model.named_modules() and model.named_parameters(), or whole parts of them"
        )
    kept = set().union(*words.values(), *kinds.values())
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._NormBase) and module.running_mean is not None:
            kept |= set(module.parameters())
        for attribute in KEPT_BY_MODELS:
            words = getattr(module, attribute, None)
            for word in words if isinstance(words, (list, tuple, set)) else ():
                kept |= named(model, word)
    return kept


def named(model: nn.Module, word: str) -> set[Tensor]:
    """Parameters with ``word`` among the dotted parts of their names."""
    pairs = model.named_parameters(remove_duplicate=False)
    return {param for name, param in pairs if f".{word}." in f".{name}."}


def of_kind(model: nn.Module, kind: type[nn.Module]) -> set[Tensor]:
    modules = (module for module in model.modules() if isinstance(module, kind))
    return {param for module in modules for param in module.parameters()}


@dataclasses.dataclass(frozen=True)
class CastInputs:
    """Forward pre-hook of the model: floating point inputs are cast to ``dtype``. Copies keep it."""

    dtype: torch.dtype

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        def cast(value: Any) -> Any:
            is_cast = isinstance(value, Tensor) and value.dtype in CASTABLE
            return value.to(self.dtype) if is_cast else value

        return tree_map(cast, args), tree_map(cast, kwargs)


@functools.cache
def warn_of_slow_products(dtype: torch.dtype) -> None:
    """Warn once of a model that computes in ``dtype`` on a CPU that is slow in it."""
    has_library = dtype in SUPPORTED and torch.backends.mkldnn.is_available()
    if has_library and not getattr(torch.ops.mkldnn, SUPPORTED[dtype])():
        logging.getLogger("zk").warning(
            "zk: the model computes in %s, for which torch has no fast kernels on this CPU: matrix "
            "products take 10 to 100 times as long as in fp32; use dtype='fp32'",
            NAMES[dtype],
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DynamicLossScale:
    """How a dynamic loss scale moves.

    It falls on overflow, after ``hysteresis`` of them, and grows after ``window`` steps without one.
    ValueError for a setting out of its range.
    """

    init: float = 2.0**16
    """The scale of the first step."""
    window: int = 1000
    """Steps without overflow until the scale grows."""
    hysteresis: int = 2
    """The scale falls from this many-th overflow on; the count is restored when it grows."""
    minimum: float = 1.0
    """The scale never falls below this."""
    factor: float = 2.0
    """What the scale is multiplied and divided by."""

    def __post_init__(self) -> None:
        for holds, rule in (
            (self.factor > 1, "factor > 1"),
            (0 < self.minimum <= self.init, "0 < minimum <= init"),
            (self.window >= 1 and self.window == int(self.window), "window, a whole number >= 1"),
            (self.hysteresis >= 1, "hysteresis >= 1"),
        ):
            if not holds:
                raise ValueError(f"DynamicLossScale needs {rule}; got {self}")


def loss_scale_of(asked: Any, trained: set[torch.dtype]) -> DynamicLossScale | float | None:
    """What ``loss_scale=`` means for these dtypes: "auto" is dynamic for fp16, and else none."""
    if asked != "auto":
        return asked  # type: ignore[no-any-return]
    return DynamicLossScale() if torch.float16 in trained else None


class LossScaler:
    """The loss scale of a run: a constant, or what ``rule`` makes of it."""

    def __init__(self, rule: DynamicLossScale | float | None) -> None:
        self.rule = rule if isinstance(rule, DynamicLossScale) else None
        self.scale = rule.init if isinstance(rule, DynamicLossScale) else float(rule or 1.0)
        self.patience = self.rule.hysteresis if self.rule else 0
        self.is_active = rule is not None
        self.clean_steps = 0  # since the last overflow or growth

    def update(self, overflow: bool) -> None:
        """Account for one step."""
        if self.rule is None:
            return
        self.clean_steps = 0 if overflow else self.clean_steps + 1
        if overflow and self.patience > 1:
            self.patience -= 1
        elif overflow:
            self.scale = max(self.scale / self.rule.factor, self.rule.minimum)
        elif self.clean_steps >= self.rule.window:
            self.clean_steps, self.patience = 0, self.rule.hysteresis
            self.scale *= self.rule.factor

    def state_dict(self) -> dict[str, Any]:
        counts = {"clean_steps": self.clean_steps, "patience": self.patience}
        return {"scale": self.scale, **counts, "active": self.is_active}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the scale of a run that had one; that of bf16 or fp32 says nothing about fp16."""
        if self.rule and state.get("active", True):
            self.scale, self.clean_steps = float(state["scale"]), int(state["clean_steps"])
            self.patience = int(state["patience"])


def clip_factor(norm: float, max_norm: float | None) -> float:
    """What gradients of this norm are multiplied with, as torch's clip_grad_norm_ does."""
    return 1.0 if max_norm is None else min(1.0, max_norm / (norm + 1e-6))


def floats_of(tensors: list[Tensor | float]) -> Iterator[float]:
    """Numbers, of which some may be on a GPU: one read for all of these."""
    far = [value for value in tensors if isinstance(value, Tensor)]
    found = iter(torch.stack(far).tolist() if far else ())
    return (next(found) if isinstance(value, Tensor) else value for value in tensors)
