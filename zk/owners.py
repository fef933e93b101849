"""The unit, and the optimizer, that hold a parameter."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn

if TYPE_CHECKING:
    from zk.events import Ticket


class Gradients(Protocol):
    """Keeper of gradients that have left."""

    def has_left(self, param: nn.Parameter) -> bool:
        """Check that the parameter has a gradient, and that it is somewhere else."""

    def is_asked(self, param: nn.Parameter) -> bool:
        """Check that it has one there, or may have one on another rank."""

    def read(self, param: nn.Parameter) -> Tensor | None:
        """Return the gradient."""

    def write(self, param: nn.Parameter, value: Tensor | None) -> None:
        """Set ``param.grad``."""


class Holder(Protocol):
    """A unit's store, as its parameters see it."""

    owner: weakref.ref[Any] | None  # the ZeroOptimizer, until that is closed
    gradients: weakref.ref[Gradients] | None
    watches_data: bool  # wants to hear of ``data`` that are used

    def use(self) -> None:
        """Make released parameters usable, or raise."""

    def take_data(self, param: nn.Parameter) -> None:
        """Note that the ``data`` of a full parameter are used."""


# by the id of a parameter, as long as that lives: what ends the entry with it, who holds it, and the update of it that is in flight
HOLDERS: dict[int, tuple[weakref.ref[Tensor], weakref.ref[Holder], Ticket | None]] = {}


def hold(param: Tensor, holder: Holder, update: Ticket | None = None) -> None:
    """Note who holds ``param``, without keeping that alive."""
    key = id(param)
    HOLDERS[key] = weakref.ref(param, lambda _: HOLDERS.pop(key, None)), weakref.ref(holder), update


def holder_of(param: Tensor) -> Any:
    """The UnitStore that holds ``param``, or None."""
    entry = HOLDERS.get(id(param))
    return entry[1]() if entry is not None else None


def owner_of(param: Tensor) -> Any:
    """The ZeroOptimizer that holds ``param``, or None."""
    holder = holder_of(param)
    return holder.owner() if holder is not None and holder.owner is not None else None


def held_params() -> list[Tensor]:
    """All parameters that an optimizer holds."""
    found = [reference() for reference, *_ in list(HOLDERS.values())]
    return [param for param in found if param is not None and owner_of(param) is not None]
