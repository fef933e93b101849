"""Integrity: if all parameters and state are those of one step, and what makes them so again where they are not."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from torch import nn

from zk.checkpoint import save
from zk.parallel.comm import Comm
from zk.store import UnitStore


class Integrity:
    """Of one optimizer's parameters and state.

    Args:
        comm, everyone: its ranks, and those with all parts of the model.
        held: the stores of its units.
    """

    def __init__(self, comm: Comm, everyone: Comm, held: Sequence[UnitStore]) -> None:
        self.comm, self.everyone, self.held = comm, everyone, held
        self.interrupted = ""  # what has left parameters and state mixed
        self.mixed: set[str] = set()  # which of them
        self.misfits: list[str] = []  # in which torch collects what of a model's state does not fit

    def tear(self, why: BaseException | str) -> None:
        """Note that some are new and others old."""
        why = why if isinstance(why, str) else f"an earlier step() ended half-way ({type(why).__name__}: {why})"
        self.interrupted, self.mixed = self.interrupted or why, {"parameters", "state"}

    def check(self, what: str) -> None:
        """Refuse ``what`` where they are mixed."""
        if self.interrupted:
            mends = {
                frozenset({"state"}): "load_state_dict()",
                frozenset({"parameters"}): "model.load_state_dict() or zk.load_pretrained()",
            }.get(frozenset(self.mixed), "model.load_state_dict() and then load_state_dict()")
            raise RuntimeError(
                f"{self.interrupted}: of {' and '.join(sorted(self.mixed))} some are new and others old, so {what} is refused. load_checkpoint() "
                f"makes all of it whole again; so does {mends}, of what was saved together"
            )

    @contextlib.contextmanager
    def replacing(self, what: str, kinds: Collection[str] = ("parameters", "state")) -> Iterator[None]:
        """Context: all ``kinds`` are replaced inside, on all ranks. Until that has come to its end they are mixed, and refused."""
        self.interrupted, self.mixed = self.interrupted or f"{what} has not come to its end", self.mixed.union(kinds)
        try:
            # a rank that fails inside is waited for by those of its part, in what these do, and by all others where all meet
            part = save.together(self.comm, what) if self.everyone is not self.comm else contextlib.nullcontext()
            with save.together(self.everyone, what), part:
                yield
        except BaseException as error:
            self.interrupted = f"{what} was interrupted ({type(error).__name__}: {error})"
            raise
        self.made_whole(kinds)

    def made_whole(self, kinds: Collection[str]) -> None:
        """Note that all ``kinds`` are of one step again."""
        self.mixed = self.mixed.difference(kinds)
        self.interrupted = self.interrupted if self.mixed else ""

    def weights_come(self, *given: Any) -> None:
        """Hook: the model is about to be given weights."""
        self.misfits = given[-1]

    def weights_came(self, _: nn.Module, differ: Any) -> None:
        """Hook: it has been given them. Parameters that were mixed are whole if those are all of them."""
        names = (name for store in self.held for name in store.unit.names)
        if self.mixed and not self.misfits and not set(differ.missing_keys).intersection(names):
            self.made_whole(("parameters",))
