"""The seams of the core: what an add-on may override, and the options that make add-ons.

Five questions have an answer that can be replaced:

    Tier    where a chunk of a unit's states rests         ``tier``, a seam of Addon
    Codec   what its bytes mean                            ``codec``
    Rule    which arithmetic updates it                    ``rules``
    Comm    how ranks talk                                 ``comm``
    Events  what else happens, and when                    the methods below

An add-on is a subclass of ``Addon``: it overrides what it needs. The core calls what is overridden
and knows no add-on by name.
"""

from __future__ import annotations

import importlib
import types
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from zk.logs import require

if TYPE_CHECKING:
    import torch

    from zk.config import ZeroConfig
    from zk.offload.rules import Codec, Rules
    from zk.offload.tiers import Tier
    from zk.optimizer import ZeroOptimizer
    from zk.parallel.comm import Comm
    from zk.store import Step, UnitStore
    from zk.unit import Unit

    Update = Callable[[list[UnitStore], Step], None]


class Addon:
    """Each method answers as the core does without an add-on; override what should differ."""

    # ---- before anything is made, in this order --------------------------------------------------

    def device(self, model: nn.Module, device: torch.device | None) -> torch.device | None:
        """Return the device that computes; None: where parameters are."""
        return device

    def check(
        self, model: nn.Module, optimizers: list[torch.optim.Optimizer], config: ZeroConfig
    ) -> None:
        """Refuse what this add-on cannot be right with: raise."""

    def comm(self, comm: Comm) -> Comm:
        """Return the collectives of the ranks, wrapped or not."""
        return comm

    def blocks(self, model: nn.Module, blocks: dict[str, nn.Module]) -> dict[str, nn.Module]:
        """Return the modules whose parameters travel together, by name."""
        return blocks

    def kind(self, name: str, param: nn.Parameter) -> Hashable:
        """Return the parameter's kind: parameters of one block but of two kinds travel apart."""
        return None

    def rules(self, rules: Rules) -> Rules:
        """Return the (predicate, rule) pairs; the first whose predicate holds updates a unit."""
        return rules

    def codec(self, unit: Unit, codec: Codec) -> Codec:
        """Return what the bytes of a unit's states mean."""
        return codec

    def tier(self, unit: Unit, what: str, tier: Tier) -> Tier:
        """Return the tier of a unit's "param" or "state" (gradients and optimizer states)."""
        return tier

    def fill(self, unit: Unit, views: list[Tensor], is_first: bool) -> None:
        """Give a unit's parameters values, which are then copied to ``views`` of all; no collectives.

        ``is_first``: of the ranks, which get this one's values.
        """

    def attach(self, optimizer: ZeroOptimizer) -> None:
        """The optimizer is made: keep it, or give it methods."""

    # ---- while it trains -------------------------------------------------------------------------

    def used(self, store: UnitStore) -> None:
        """A unit has been gathered for a use."""

    def reduced(self, store: UnitStore) -> None:
        """A unit's gradient has been reduced and is on its tier."""

    def before_step(self) -> None:
        """step() begins, or states are read or written: nothing may be in flight."""

    def totals(self, sums: list[float]) -> list[float]:
        """Return the sums of squares of all ranks; given are those of the ranks that share states."""
        return sums

    def around_update(self, run: Update) -> Update:
        """Return what updates units: ``run(stores, step)``, or a function that calls it."""
        return run

    def updater(self) -> Update | None:
        """Return what runs updates instead of step() itself; only one add-on may."""
        return None

    def changing(self, store: UnitStore, number: int) -> None:
        """Chunk ``number`` of a unit's states is about to be changed, perhaps by another thread."""

    def updated(self, store: UnitStore) -> None:
        """A unit has been updated, perhaps by another thread, and then full parameters are old."""

    def synchronized(self) -> None:
        """The user waits for all that is in flight: return when nothing of this add-on is."""

    def closed(self) -> None:
        """The optimizer has been closed: give back what this add-on holds."""


NAMES = [name for name in vars(Addon) if not name.startswith("_")]


class Seams(types.SimpleNamespace):
    """The add-ons of one optimizer: for each method a tuple of those that override it, or none."""

    def __init__(self, addons: list[Addon]):
        self.addons: list[Addon] = []
        self.add(*addons)

    def add(self, *addons: Addon) -> None:
        """Hear of more add-ons from now on."""
        self.addons += addons
        for name in NAMES:
            neutral = getattr(Addon, name)
            own = [addon for addon in self.addons if getattr(type(addon), name) is not neutral]
            setattr(self, name, tuple(getattr(addon, name) for addon in own))

    def chain(self, name: str, *given: Any) -> Any:
        """Pass the last of ``given`` through all add-ons; the others are told to each."""
        *told, value = given
        for answer in getattr(self, name):
            value = answer(*told, value)
        return value

    def first(self, name: str) -> Any:
        """The one answer that is not None; RuntimeError if two add-ons give one."""
        found = {type(m.__self__).__name__: a for m in getattr(self, name) if (a := m()) is not None}
        if len(found) > 1:
            raise RuntimeError(f"{' and '.join(found)} each decide {name!r}; remove all but one")
        return next(iter(found.values()), None)


# by name, as everything there: the core imports none of it before it is used
tables = importlib.import_module("zk.addons")
OPTIONS: dict[str, str] = tables.OPTIONS
ALWAYS: dict[str, str] = tables.ALWAYS
METHODS: dict[str, str] = tables.METHODS


def register(**options: str) -> None:
    """Make ``ZeroOptimizer(..., option=value)`` add ``Class(value)`` of "module:Class"."""
    OPTIONS.update(options)


def register_methods(**methods: str) -> None:
    """Make ``optimizer.method(...)`` call ``function(optimizer, ...)`` of "module:function"."""
    METHODS.update(methods)


def found(name: str, registry: dict[str, str], error: type[Exception]) -> Any:
    """Import what is registered for ``name``; ``error`` where its module is not there."""
    module, attribute = registry[name].split(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as cause:
        raise error(f"{name!r} is in {module}, which is not there: {cause}") from cause


def method_of(optimizer: ZeroOptimizer, name: str) -> Callable[..., Any]:
    """A registered method; AttributeError for others."""
    require(name in METHODS, f"a ZeroOptimizer has no attribute {name!r}", AttributeError)
    return types.MethodType(found(name, METHODS, AttributeError), optimizer)


def make(options: dict[str, Any]) -> list[Addon]:
    """The add-ons of options that are neither None nor False, and those that are always there.

    TypeError for an option without its file.
    """
    always = [found(name, ALWAYS, ImportError)() for name in ALWAYS]
    asked = [name for name, value in options.items() if value is not None and value is not False]
    return always + [found(name, OPTIONS, TypeError)(options[name]) for name in asked]
