"""Precision: what ``dtype`` casts and what keeps its own, the loss scale, the norm and the clip, the dtypes that a CPU is slow in."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zk.core.logs import log
from zk.core.options import is_count
from zk.core.owners import has_codes, inner_tensors

# torch gives these products to oneDNN where that has kernels for the CPU, and else to a plain loop
_SUPPORTED = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}


# what a cast changes: a tensor of another dtype holds codes or scales, whose values are lost in a cast
CASTABLE = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def _named(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers, under each of their names."""
    for name, param in model.named_parameters(remove_duplicate=False):
        yield from inner_tensors(param, name)
    yield from model.named_buffers(remove_duplicate=False)


def _called(model: nn.Module, word: str) -> set[Tensor]:
    """Tensors whose name has ``word`` among its dotted parts: "norm" and "layers.0" match "layers.0.norm.weight"."""
    return {tensor for name, tensor in _named(model) if f".{word}." in f".{name}."}


def kept_in_dtype(model: nn.Module, keep: Sequence[str | type[nn.Module]], cast_buffers: bool) -> set[Tensor]:
    """Parameters and buffers that keep their dtype where the model is cast.

    Args:
        model: any module.
        keep: module classes, and names as for ``_called``.
        cast_buffers: False keeps every buffer, and the parameters of normalizations that compute with buffers.

    What the model names in ``_keep_in_fp32_modules`` and ``_keep_in_fp32_modules_strict``, as those of transformers do, is kept too.
    Raises ValueError for an entry of ``keep`` that matches nothing.
    """
    kept = set() if cast_buffers else set(model.buffers())
    missing, whole = [], list[nn.Module]()
    for entry in keep:
        named = _called(model, entry) if isinstance(entry, str) else set()
        modules = [module for module in model.modules() if isinstance(module, entry)] if isinstance(entry, type) else []
        if not named and not modules:
            missing.append(getattr(entry, "__name__", entry))
        kept |= named
        whole += modules
    for module in model.modules():
        # torch wants the parameters of a module that computes with running statistics in their dtype
        if isinstance(module, nn.modules.batchnorm._NormBase) and module.running_mean is not None and not cast_buffers:
            whole.append(module)
        for attribute in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"):
            words = getattr(module, attribute, None)
            for word in words if isinstance(words, (list, tuple, set)) else ():
                kept |= _called(module, word)
    kept.update(tensor for module in whole for _, tensor in _named(module))
    if missing:
        raise ValueError(
            f"keep_dtype: the model has no module, parameter or buffer {', '.join(map(repr, missing))}; names are those of "
            "model.named_modules() and model.named_parameters(), or whole parts of them"
        )
    return kept


def stored_dtypes(
    model: nn.Module,
    dtype: torch.dtype | None,
    keep: Sequence[str | type[nn.Module]] = (),
    cast_buffers: bool = False,
    computes: torch.dtype | None = None,
) -> dict[Tensor, torch.dtype]:
    """The dtype that each parameter and buffer has once it is held; all keep their own without ``dtype``.

    ``computes``: the dtype of buffers that are cast, which rest where modules compute with them.
    """
    if dtype is None:
        return {tensor: tensor.dtype for _, tensor in _named(model)}
    kept = kept_in_dtype(model, keep, cast_buffers)
    kept.update(inner for param in filter(has_codes, model.parameters()) for _, inner in inner_tensors(param))
    cast = dict.fromkeys(model.buffers(), computes or dtype)
    return {
        tensor: cast.get(tensor, dtype) if tensor.dtype in CASTABLE and tensor not in kept else tensor.dtype for _, tensor in _named(model)
    }


def has_fast_products(dtype: torch.dtype) -> bool:
    """Check that the CPU multiplies matrices in ``dtype`` about as fast as in fp32. True where torch does not say."""
    if dtype not in _SUPPORTED or not torch.backends.mkldnn.is_available():
        return True
    return bool(getattr(torch.ops.mkldnn, _SUPPORTED[dtype])())


@functools.cache
def warn_of_slow_products(dtype: torch.dtype) -> None:
    """Warn, once per process, of a model that computes in ``dtype`` on a CPU that is slow in it."""
    if not has_fast_products(dtype):
        log.warning(
            "the model computes in %s, for which torch has no fast kernels on this CPU: matrix products take 10 to 100 times as long as in "
            "fp32; use compute_dtype='fp32' at stage 3, where parameters rest in %s and compute in fp32, or dtype='fp32'",
            dtype,
            dtype,
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DynamicLossScale:
    """How a dynamic loss scale moves. The scale halves on overflow (after ``hysteresis`` of them) and doubles after a clean window.

    Raises:
        ValueError: for a setting out of its range.
    """

    init: float = 2.0**16
    """The scale of the first step."""
    window: int = 1000
    """Steps without overflow until the scale is doubled."""
    hysteresis: int = 2
    """The scale is lowered from this many-th overflow on; the count is restored when the scale grows."""
    minimum: float = 1.0
    """The scale never falls below this."""
    factor: float = 2.0
    """The factor that the scale is multiplied and divided by."""

    def __post_init__(self) -> None:
        if not self.factor > 1:
            raise ValueError(f"DynamicLossScale.factor must be more than 1; got {self.factor!r}")
        if not 0 < self.minimum <= self.init:
            raise ValueError(f"DynamicLossScale needs 0 < minimum <= init; got minimum={self.minimum!r}, init={self.init!r}")
        for name in ("window", "hysteresis"):
            if not is_count(count := getattr(self, name)):
                raise ValueError(f"DynamicLossScale.{name} must be a whole number of steps, at least 1; got {count!r}")


class LossScaler:
    """The loss scale: constant, or halved on overflow and doubled after a window without one.

    Args:
        rule: DynamicLossScale, a number, or None for no scaling.
    """

    def __init__(self, rule: DynamicLossScale | float | None) -> None:
        self.rule = rule if isinstance(rule, DynamicLossScale) else None
        self.scale, self.patience = (rule.init, rule.hysteresis) if isinstance(rule, DynamicLossScale) else (float(rule or 1.0), 0)
        self.active = rule is not None
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
        elif self.clean_steps >= rule.window:  # more where a state of a longer window was loaded
            self.clean_steps, self.patience = 0, rule.hysteresis
            self.scale *= rule.factor

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale, "clean_steps": self.clean_steps, "patience": self.patience, "active": self.active}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with the scale of a run that had one; that of bf16 or fp32 says nothing about fp16."""
        if self.rule and state.get("active", True):
            self.scale, self.clean_steps, self.patience = float(state["scale"]), int(state["clean_steps"]), int(state["patience"])


class GradFactors:
    """Factor of the gradients of a step in its update: of the loss scale, of clipping, and as was asked for.

    Args:
        scaler: of the loss.
        max_norm: that each step clips to; None: no clipping.
    """

    def __init__(self, scaler: LossScaler, max_norm: float | None) -> None:
        self.scaler, self.default = scaler, max_norm
        self.norm = math.nan  # of all gradients, as it was taken last
        self.begin()

    def begin(self) -> None:
        """Begin a step."""
        self.max_norm = self.default
        self.clip_by = 1.0  # what clip_grad_norm_ has the gradients that are there multiplied by
        self.scaled_by = 1.0  # and what scale_grads has; their norm is taken after it

    def of(self, norm: float) -> float:
        """The factor in the update, of gradients of this norm."""
        return self.scaled_by * self.clip_by * clip_coefficient(norm, self.max_norm) / self.scaler.scale

    def of_squares(self, squares: float) -> float:
        """The factor, if these are the squares of all gradients."""
        return self.of(norm_of(squares * self.scaled_by**2, self.scaler.scale))

    def clip(self, max_norm: float) -> float:
        """Clip to ``max_norm`` instead of what the config says, unless it is infinite; returns the norm before."""
        norm = self.norm * self.clip_by
        if not math.isinf(max_norm):
            self.clip_by *= clip_coefficient(norm, max_norm) if math.isfinite(norm) else 1
            self.max_norm = None
        return norm

    def take(self) -> float:
        """The factor that was asked for, of gradients that are multiplied by it now."""
        by, self.clip_by, self.scaled_by = self.clip_by * self.scaled_by, 1.0, 1.0
        return by

    def rules(self) -> dict[str, Any]:
        """Numbers that all ranks must have in common."""
        return {"the norm to clip to": self.max_norm, "the factor of clip_grad_norm_": self.clip_by, "the loss scale": self.scaler.scale}


def clip_coefficient(norm: float, max_norm: float | None) -> float:
    """The factor of gradients of 2-norm ``norm``, as in torch.nn.utils.clip_grad_norm_."""
    return 1.0 if max_norm is None else min(1.0, max_norm / (norm + 1e-6))


def norm_of(sum_of_squares: float, scale: float) -> float:
    """The 2-norm of gradients that were scaled by ``scale``; not finite if any of them is not."""
    return math.sqrt(sum_of_squares) / scale if sum_of_squares >= 0 else math.nan
