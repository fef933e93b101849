"""Reducer: when each unit's gradient is reduced. Several ranks reduce in one order, at one time.

They need not do the same. A block may be used by some ranks only, and one rank may make fewer
backward passes than another, or none: four small exchanges make it right.

    BEGIN   before the first reduction of a backward pass: in which dtype are units reduced?
            Then they are, in the order of the pass before, as soon as they are whole.
    WHOLE   before a gather, where no order is left: which units are whole on all ranks?
    END     the pass has ended: which other units has any rank a gradient of?
    STEP    step() begins: a rank that hears BEGIN of another joins its pass, with what it has.

At stage 3 all ranks gather the same units in the same order. There a unit is reduced between the
same two gathers on all, even where a rank has no gradient of some of its parameters, and would wait
for it in vain. Gathers that are not those of the pass before end its order: what is left is WHOLE, or
reduced at the end.
"""

from __future__ import annotations

import math
from collections.abc import Container
from typing import Any

import torch

from zk.parallel.comm import Comm
from zk.precision import DynamicLossScale
from zk.store import UnitStore

STEP, BEGIN = 0.0, 1.0


class Reducer:
    def __init__(self, comm: Comm, listeners: tuple[Any, ...]):
        self.comm, self.listeners = comm, listeners
        self.waiting = dict[UnitStore, int]()  # trained units, and gradients that are missing
        self.order = list[tuple[UnitStore, int]]()  # and after how many gathers
        self.expected = list[UnitStore]()  # what the pass before gathered
        self.syncs, self.num_local = True, 0  # passes since the last one that reduced
        self.scaler = LossScaler(None)
        self.loss_scale = 1.0  # of what is in ``param.grad``
        self.dtype: torch.dtype | None = None  # of reductions, as ranks agreed; None: the unit's
        self.begin()

    def begin(self) -> None:
        """Begin a pass, and forget one that an error has cut short."""
        self.waiting = {store: len(store.unit.params) for store in self.waiting}
        self.position = 0  # in ``order``
        self.gathers = list[UnitStore]()
        self.whole_at = dict[UnitStore, float]()  # gathers before; and, as millionths, units
        self.has_begun = False  # ranks have met at BEGIN

    def forget(self, store: UnitStore) -> None:
        """Reduce a unit no more."""
        self.waiting.pop(store, None)
        self.order = [entry for entry in self.order if entry[0] is not store]

    def on_whole(self, store: UnitStore) -> None:
        """All gradients of a unit are there: collect it, and reduce what is due."""
        store.grad.collect()
        self.whole_at[store] = len(self.gathers) + len(self.whole_at) / 1e6
        if self.syncs and self.comm.size == 1:
            self.reduce(store)
        elif self.syncs:
            self.reduce_due(are_whole=True)

    def before_gather(self, store: UnitStore) -> None:
        """A unit is about to be gathered in backward: reduce what is reduced before that."""
        at = len(self.gathers)
        if self.syncs and self.comm.size > 1:
            self.reduce_due(are_whole=False)
            if self.position == len(self.order) < len(self.waiting):
                self.reduce_whole()
        self.gathers.append(store)
        if self.expected[at : at + 1] != [store]:
            del self.order[self.position :]

    def reduce_due(self, are_whole: bool) -> None:
        """Reduce units whose turn it is; ``are_whole``: as long as these are."""
        for store, num_gathers in self.order[self.position :]:
            if num_gathers > len(self.gathers) or (are_whole and self.waiting[store] > 0):
                return
            self.meet()
            self.position += 1
            store.grad.collect()
            self.reduce(store)

    def reduce_whole(self) -> None:
        """WHOLE: reduce what is whole on all ranks, which have no order to follow."""
        self.meet()
        mine: list[float] = [s in self.whole_at and s.grad.local is not None for s in self.waiting]
        said = self.comm.rows("whole gradients", mine)
        for store, *are_whole in zip(self.waiting, *said, strict=True):
            if all(are_whole):
                self.reduce(store)

    @torch.no_grad()
    def collect_rest(self, passes: bool = True) -> None:
        """Collect what is in ``param.grad``, which has ``loss_scale``."""
        for store in self.waiting:
            store.grad.collect(passes)

    @torch.no_grad()
    def reduce(self, store: UnitStore) -> None:
        store.grad.reduce(self.dtype)
        for reduced in self.listeners:
            reduced(store)

    def end(self) -> None:
        """A backward pass has ended."""
        if self.syncs:
            self.meet()
            self.finish()
        else:
            self.collect_rest()
            self.num_local += 1
            self.begin()

    def settle(self) -> None:
        """step() begins: reduce what any rank has collected, and what those in backward reduce."""
        is_end = False
        while not is_end:
            self.collect_rest(passes=False)
            has_rest = any(store.grad.local is not None for store in self.waiting)
            said = self.exchange(STEP, self.num_local, has_rest)
            is_end = all(phase == STEP for phase, *_ in said)
            if any(has_rest for *_, has_rest in said):
                self.finish(in_order=not is_end)

    def meet(self) -> None:
        """BEGIN: ranks in a backward pass that reduces, and those that join it, learn of it."""
        if not self.has_begun:
            self.has_begun = True
            self.exchange(BEGIN, self.num_local + 1, True)

    def exchange(self, *mine: float) -> list[list[float]]:
        """Tell all ranks phase, number of passes, and if there is something to reduce."""
        said = self.comm.rows("reductions", [*mine])
        # sums of several passes are in fp32
        self.dtype = torch.float32 if max(row[1] for row in said) > 1 else None
        return said

    def finish(self, in_order: bool = True) -> None:
        """END: reduce what is left."""
        self.collect_rest()
        for store, _ in self.order[self.position :] if in_order else ():
            self.reduce(store)
        for store in self.rest():
            self.reduce(store)
        self.num_local = 0
        self.begin()

    def rest(self) -> list[UnitStore]:
        """What any rank has to reduce; all learn what has a gradient, and the next order."""
        absent = math.inf if self.has_begun else -1.0  # of a unit that is not whole; no opinion
        mine: list[float] = []
        for store in self.waiting:
            own = self.whole_at.get(store, absent), store.grad.local is not None
            mine += [*own, *store.grad.present]
        most = map(max, zip(*self.comm.rows("gradients", mine), strict=True))
        places, found = [], []
        for store in self.waiting:
            places.append((next(most), store))
            found += [store] if next(most) else []
            present = [bool(next(most)) for _ in store.unit.params]
            if present != store.grad.present:
                store.grad.leave(present)
        if self.comm.size > 1 and any(place >= 0 for place, _ in places):  # one is in backward
            whole = sorted(places, key=lambda entry: entry[0])
            self.order = [(store, int(place)) for place, store in whole if place < math.inf]
            self.expected = self.gathers
        return found


class LossScaler:
    """The loss scale of a run; "auto": dynamic if fp16 is among the ``trained`` dtypes, or none."""

    def __init__(
        self, asked: DynamicLossScale | float | str | None, trained: Container[torch.dtype] = ()
    ):
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
        names = "scale", "clean_steps", "patience"
        return {name: getattr(self, name) for name in names} | {"active": self.is_active}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the scale of a run that had one; that of bf16 or fp32 says nothing about fp16."""
        if self.rule and state.get("active", True):
            self.scale, self.clean_steps = float(state["scale"]), int(state["clean_steps"])
            self.patience = int(state["patience"])
