"""Logits that are computed when somebody uses their values; their cross entropy is computed without them.

They stand for the output of a linear head. What models do between head and loss is followed: casts, shifts and views of tokens, a factor, a softcap.
Anything else gets the logits, as they would have been.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from zk.linear_cross_entropy import linear_cross_entropy
from zk.nn.tiled_linear import autocast_as, autocast_dtype, autocast_now
from zk.parallel.gather import gather
from zk.token_tiles import versions_of

_PROPERTIES = frozenset((
    "shape", "dtype", "device", "ndim", "requires_grad", "is_leaf", "layout", "grad_fn", "itemsize", "is_cuda", "is_cpu", "is_sparse", "is_meta",
    "is_nested", "is_quantized", "is_mkldnn",
))  # fmt: skip
_METHODS = ("size", "dim", "numel", "nelement", "element_size", "is_floating_point", "is_complex", "get_device", "__len__", "__hash__", "ndimension")
_FACTORS = {"mul": 1, "__mul__": 1, "__rmul__": 1, "multiply": 1, "div": -1, "__truediv__": -1, "true_divide": -1, "divide": -1}
_CASTS = {"float": torch.float32, "bfloat16": torch.bfloat16, "half": torch.float16}
_OF_TOKENS = ("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "contiguous")


@dataclasses.dataclass(frozen=True, slots=True)
class _Source:
    """Origin of logits: hidden states, the head, and what was done since."""

    hidden: Tensor  # (..., features)
    head: nn.Module
    compute: Callable[[Tensor], Tensor]
    has_graph: bool  # they are to be trained
    autocast: list[Any]  # as it was there
    versions: list[int]  # of the head's parameters
    max_nbytes: int | str | None = None  # of the loss
    steps: tuple[Callable[[Tensor], Tensor], ...] = ()  # from the head's output on, without changes of shape
    factor: float = 1.0
    softcap: float | None = None
    is_capped: bool = False  # tanh is taken, and its factor is to come


class DeferredLogits(Tensor):
    """See above. Made by ``of``."""

    source: _Source
    computed: Tensor | None

    @staticmethod
    def of(source: _Source, dtype: torch.dtype, vocab: int) -> DeferredLogits:
        """Logits (..., vocab) of ``dtype`` that will be computed from ``source``."""
        hidden = source.hidden
        made: DeferredLogits = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            DeferredLogits, (*hidden.shape[:-1], vocab), dtype=dtype, device=hidden.device
        )
        made.source, made.computed = source, None
        return made

    def _like(self, dtype: torch.dtype | None = None, **changes: Any) -> DeferredLogits:
        return DeferredLogits.of(dataclasses.replace(self.source, **changes), dtype or self.dtype, self.shape[-1])

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"DeferredLogits(shape={tuple(self.shape)}, dtype={self.dtype}, {'not computed yet' if self.computed is None else 'computed'})"

    def checked(self) -> _Source:
        """The origin of the logits, if these can still be computed."""
        if self.source.versions != versions_of(self.source.head.parameters()):
            raise RuntimeError(
                "logits are computed when they are used, and the parameters of the head were written after the forward that these are of, by step() "
                "for example; use them before that, or compute them before: logits = logits + 0"
            )
        return self.source

    def compute(self) -> Tensor:
        """The logits themselves; kept."""
        if self.computed is None:
            source = self.checked()
            with (
                contextlib.ExitStack() as stack, autocast_as(source.autocast),
                torch.inference_mode(False), torch.set_grad_enabled(source.has_graph)
            ):  # fmt: skip
                if not source.has_graph:  # (with one, parameters of stage 3 would be gone before its backward: reading them says so)
                    stack.enter_context(gather(source.head.parameters()))
                values = source.compute(source.hidden)
                for step in source.steps:
                    values = step(values)
            self.computed = values
        return self.computed

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", "")
        first = args[0] if args else None
        if isinstance(first, DeferredLogits) and first.computed is None:
            if name in _METHODS or (name == "__get__" and getattr(getattr(func, "__self__", None), "__name__", "") in _PROPERTIES):
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **kwargs)
            found = first._follow(name, args[1:], kwargs)
            if found is not None:
                return found
            if func is F.cross_entropy:
                loss = first._cross_entropy(*args[1:], **kwargs)
                if loss is not None:
                    return loss
        if func is F.cross_entropy and isinstance(kwargs.get("input"), DeferredLogits):
            return F.cross_entropy(kwargs.pop("input"), *args, **kwargs)
        return cls.__torch_dispatch__(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        args, kwargs = tree_map(lambda leaf: leaf.compute() if isinstance(leaf, DeferredLogits) else leaf, (args, kwargs or {}))
        return func(*args, **kwargs)

    def _follow(self, name: str, args: Any, kwargs: Any) -> DeferredLogits | None:
        """The result of what can be done to logits that are not there; None of what cannot."""
        source = self.source
        if name in _CASTS and not (args or kwargs):
            return self._cast(_CASTS[name])
        if name == "to" and "copy" not in kwargs:
            device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
            return None if device not in (None, self.device) else self._cast(dtype or self.dtype)
        if name == "detach":
            return self._like(hidden=source.hidden.detach(), has_graph=False)
        if name == "__getitem__":
            index = _of_tokens(args[0], self.ndim)
            return None if index is None else self._like(hidden=source.hidden[index])
        if name in _OF_TOKENS:
            shape = getattr(torch.empty(self.shape, device="meta"), name)(*args, **kwargs).shape
            features = source.hidden.shape[-1]
            return self._like(hidden=source.hidden.reshape(*shape[:-1], features)) if shape and shape[-1] == self.shape[-1] else None
        if name == "tanh" and not (args or kwargs or source.is_capped or source.softcap):
            return self._like(steps=(*source.steps, torch.tanh), is_capped=True)
        if name in _FACTORS and len(args) == 1 and not kwargs and type(args[0]) in (int, float) and args[0] > 0 and not source.softcap:
            given, times = args[0], _FACTORS[name] > 0
            by = given if times else 1 / given
            steps = (*source.steps, functools.partial(torch.mul if times else torch.div, other=given))
            if not source.is_capped:
                return self._like(steps=steps, factor=source.factor * by)
            if abs(by * source.factor - 1) < 1e-6:  # softcap * tanh(logits / softcap)
                return self._like(steps=steps, factor=1.0, softcap=float(by), is_capped=False)
        return None

    def _cast(self, dtype: torch.dtype) -> DeferredLogits | None:
        if dtype not in _CASTS.values():
            return None
        return self._like(dtype=dtype, steps=(*self.source.steps, lambda values: values.to(dtype)))

    def _cross_entropy(self, target: Tensor, *args: Any, **given: Any) -> Tensor | None:
        """F.cross_entropy, with options by name; None of what needs logits."""
        options = {name: value for name, value in given.items() if value is not None}
        source = self.checked()
        head: Any = source.head
        if self.ndim != 2 or args or source.is_capped or target.is_floating_point():
            return None
        if options.keys() - {"ignore_index", "label_smoothing", "reduction"}:
            return None
        if source.factor != 1 and head.bias is not None:  # which has the factor, too
            return None
        hidden = source.hidden if source.factor == 1 else source.hidden * source.factor
        with autocast_as(source.autocast), contextlib.nullcontext() if source.has_graph else torch.no_grad():
            return linear_cross_entropy(hidden, head, target, softcap=source.softcap, max_nbytes=source.max_nbytes, **options)


def _of_tokens(index: Any, ndim: int) -> Any:
    """The part of an index into logits that is about tokens; None if it chooses logits, too, or adds dimensions."""
    parts = list(index) if isinstance(index, tuple) else [index]
    if any(part is None or isinstance(part, (bool, list)) for part in parts):
        return None
    sizes = [0 if part is Ellipsis else part.ndim if isinstance(part, Tensor) and part.dtype == torch.bool else 1 for part in parts]
    if Ellipsis in [part for part in parts if not isinstance(part, Tensor)]:
        at = next(place for place, part in enumerate(parts) if part is Ellipsis)
        parts[at : at + 1] = [slice(None)] * (ndim - sum(sizes))
        sizes[at : at + 1] = [1] * (ndim - sum(sizes))
    if sum(sizes) < ndim:
        return tuple(parts)
    last = parts.pop()
    return tuple(parts) if isinstance(last, slice) and last == slice(None) else None


class DeferredHead:
    """Stand-in for a linear head's ``forward``: logits are deferred in what is to be trained, or has labels."""

    def __init__(self, head: Any, max_nbytes: int | str | None) -> None:
        self.head, self.max_nbytes, self.has_labels = head, max_nbytes, False
        head.forward = self

    def __call__(self, hidden: Tensor) -> Tensor:
        head, device = self.head, hidden.device
        if not (torch.is_grad_enabled() or self.has_labels) or hidden.ndim < 2:
            return self.compute(hidden)
        now = torch.is_grad_enabled(), autocast_now(device), versions_of(head.parameters())
        source = _Source(hidden, head, self.compute, *now, self.max_nbytes)
        return DeferredLogits.of(source, autocast_dtype(device) or hidden.dtype, head.out_features)

    def compute(self, hidden: Tensor) -> Tensor:
        """Call the head itself."""
        return type(self.head).forward(self.head, hidden)  # type: ignore[no-any-return]
