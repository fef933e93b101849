"""Refusals, by name, of what the ZeroOptimizer does instead of what was handed over.

Every optimizer has it, without an option. Uses of the core: ``ZeroOptimizer._inners``, ``state``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from zk.addon import Addon
from zk.optimizer import ZeroOptimizer


class HandedOver(Addon):
    """The user's optimizers refuse to step, and ``optimizer.state`` says where states are."""

    def __init__(self) -> None:
        self.handles: list[Any] = []

    def attach(self, optimizer: ZeroOptimizer) -> None:
        optimizer.state = Elsewhere()  # type: ignore[assignment]
        self.handles += [
            getattr(inner, f"register_{call}_pre_hook")(refuse_to(call))
            for inner in optimizer._inners
            for call in ("step", "state_dict", "load_state_dict")
        ]

    def closed(self) -> None:
        for handle in self.handles:
            handle.remove()


ELSEWHERE = (
    "states of a ZeroOptimizer rest on its tiers: optimizer.state_dict() and load_state_dict() read and "
    "write them, and zk.gather(param, kind='exp_avg', write=True)"
)


class Elsewhere(dict[Any, Any]):
    """``optimizer.state``: empty, as states rest on tiers. It says where they are."""

    def __missing__(self, key: Any) -> Any:
        raise KeyError(ELSEWHERE)

    def refuse(self, *_: Any) -> None:
        raise TypeError(ELSEWHERE)

    __setitem__ = __delitem__ = update = setdefault = pop = clear = refuse  # type: ignore[assignment]


def refuse_to(call: str) -> Callable[..., None]:
    """A hook of an optimizer that was given to a ZeroOptimizer."""

    def refuse(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not isinstance(optimizer, ZeroOptimizer):
            raise RuntimeError(
                f"this {type(optimizer).__name__} was given to a ZeroOptimizer, which has its states: "
                f"call {call}() of that one, or close() it first"
            )

    return refuse
