"""Hooks around a module's forward that stay behind when the module is copied or pickled: a copy is a plain module."""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.hooks import RemovableHandle


class Hook:
    """Calls ``call``; its copies call nothing."""

    def __init__(self, call: Callable[..., Any] | None) -> None:
        self.call = call

    @torch._compile._disable_dynamo  # as torch.compiler.disable, which would import the compiler with zk
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs) if self.call is not None else None

    def __deepcopy__(self, memo: dict[int, Any]) -> Hook:
        return Hook(None)

    def __reduce__(self) -> tuple[type[Hook], tuple[None]]:
        return Hook, (None,)


class KeepCodes:
    """Handle: until it is removed, bitsandbytes leaves the codes of 4-bit layers as they are in evaluation, too.

    For CPUs with bf16 products it packs them anew, in place, at the first forward in eval mode. No gradient goes through such a layer any
    more, its scales have been rounded, and its bytes and shape are no longer those of the base that was loaded.
    """

    def __init__(self, model: nn.Module) -> None:
        self.modules = [module for module in model.modules() if getattr(module, "support_avx512bf16_for_cpu", False)]
        for module in self.modules:
            module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]

    def remove(self) -> None:
        """Let it pack them."""
        for module in self.modules:
            module.support_avx512bf16_for_cpu = True  # type: ignore[assignment]


@dataclasses.dataclass(frozen=True)
class CastInputs:
    """Forward pre-hook: floating point inputs are cast to ``dtype``, in which the parameters are. Copies of the model keep it."""

    dtype: torch.dtype

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        def cast(value: Any) -> Any:
            return value.to(self.dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

        return tree_map(cast, args), tree_map(cast, kwargs)


def calls_of(module: nn.Module) -> int:
    """How many calls of ``module`` this thread is in, by its frames: one that Ctrl-C has ended was told to no hook."""
    calls, frame = 0, inspect.currentframe()
    while frame is not None:
        calls += frame.f_code is nn.Module._call_impl.__code__ and frame.f_locals["self"] is module
        frame = frame.f_back
    return calls


class Calls(threading.local):
    """Counter of the model's calls in progress, in each thread. A copy begins anew.

    Args:
        alone: of all threads, ids of parts that were called by themselves since the model's last call.
    """

    depth = 0

    def __init__(self, alone: set[int]) -> None:
        self.alone = alone

    def __reduce__(self) -> tuple[type[Calls], tuple[set[int]]]:
        return Calls, (set(),)

    def begin(self, *_: Any) -> None:
        """Count a call that begins."""
        self.depth += 1
        self.alone.clear()

    def end(self, *_: Any) -> None:
        """Count a call that has ended, well or not."""
        self.depth -= 1


@dataclasses.dataclass(frozen=True)
class CastPart(CastInputs):
    """Forward pre-hook of a part of the model: the same where the part is called by itself, outside of the model's own call.

    What a checkpoint computes again in backward is cast if it was in forward.
    """

    calls: Calls

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if self.calls.depth:
            return None
        if torch._C._current_graph_task_id() == -1:
            self.calls.alone.add(id(module))
        elif id(module) not in self.calls.alone:
            return None
        return super().__call__(module, args, kwargs)


class InputCasts:
    """Casts of what a model is given: by its own call, for model.encode(x), and for layers one by one.

    Args:
        dtype: of its parameters.
        calls: counter of the model's calls.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype, calls: Calls) -> None:
        self.model, self.part, self.casting = model, CastPart(dtype, calls), weakref.WeakSet((model,))
        self.handles = [
            model.register_forward_pre_hook(Hook(calls.begin), prepend=True),
            model.register_forward_hook(Hook(calls.end), always_call=True),
            model.register_forward_pre_hook(CastInputs(dtype), with_kwargs=True),
            *self.attach(),
            model.register_forward_hook(ExplainDtypes(dtype), always_call=True),
        ]

    def attach(self) -> Iterator[RemovableHandle]:
        """Hook parts of the model that have no hook yet."""
        for part in self.model.modules():
            if part not in self.casting and any(param.dtype == self.part.dtype for param in part.parameters()):
                self.casting.add(part)
                yield part.register_forward_pre_hook(self.part, with_kwargs=True)


_TWO_DTYPES = re.compile(
    r"same d?type|scalar type|type .* should be the same|dtypes? (match|must be)|be equal to src.dtype|expected dtype|[Tt]ype promot"
)


@dataclasses.dataclass(frozen=True)
class ExplainDtypes:
    """Forward hook that is always called: an error of torch about two dtypes is told which buffers kept theirs. Copies of the model keep it."""

    dtype: torch.dtype

    def __call__(self, module: nn.Module, *_: Any) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, RuntimeError) or not _TWO_DTYPES.search(str(error)) or hasattr(error, "__notes__"):
            return
        kept = [name for name, buffer in module.named_buffers() if buffer.is_floating_point() and buffer.dtype != self.dtype]
        if kept:
            more = f" and {len(kept) - 3} more" if len(kept) > 3 else ""
            error.add_note(
                f"zk: the model computes in {self.dtype}, and its buffers keep their dtype ({', '.join(kept[:3])}{more}). If forward mixes them with "
                "activations, cast them where they are used, or pass cast_buffers=True (with keep_dtype= for those that must not be rounded)"
            )


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """Calls ``method`` as long as its object lives, and does not keep it alive: the model's hooks would. None once it is gone."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        alive = reference()
        return alive(*args) if alive is not None else None

    return call
