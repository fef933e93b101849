"""Reducer: when each unit's gradient is reduced. Several ranks reduce in one order, at one time.

They need not do the same. A block may be used by some ranks only, and one rank may make fewer
backward passes than another, or none: three small exchanges make it right.

    BEGIN   before the first reduction of a backward pass: in which dtype are units reduced?
            Then they are, in the order of the pass before, as soon as they are whole.
    END     the pass has ended: which other units has any rank a gradient of?
    STEP    step() begins: a rank that hears BEGIN of another joins its pass, with what it has.

At stage 3 all ranks gather the same units in the same order. There a unit is reduced between the
same two events (a gather, or the first use of a unit) on all, even where a rank has no gradient of
some of its parameters, and would wait for it in vain. Where events are not those of the pass
before, on any rank and so on all, what is left is reduced at the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from zk.parallel.comm import Comm
from zk.parallel.left import is_here
from zk.store import UnitStore

Event = tuple[str, UnitStore]
BEGIN, END, STEP = 1.0, 2.0, 3.0
MANY = 1 << 20  # more than there are units: (events, units) as one number


class Reducer:
    def __init__(self, comm: Comm, listeners: tuple[Callable[[UnitStore], Any], ...]) -> None:
        self.comm, self.listeners = comm, listeners
        self.waiting: dict[UnitStore, int] = {}  # trained units, and gradients that are missing
        self.order: list[tuple[UnitStore, int]] = []  # and after how many events
        self.position = 0  # in ``order``, in this pass
        self.events: list[Event] = []  # of this pass
        self.used: set[UnitStore] = set()  # in this pass
        self.expected: list[Event] = []  # those of the pass before that reduced
        self.whole_at: dict[UnitStore, int] = {}  # events * MANY + units before, in this pass
        self.syncs, self.num_local = True, 0  # passes since the last one that reduced
        self.has_begun = False  # ranks have met at BEGIN
        self.loss_scale = 1.0  # of what is in ``param.grad``
        # what ranks have agreed on for reductions; None: the unit's own
        self.dtype: torch.dtype | None = None
        self.scale: float | None = None

    def begin(self) -> None:
        """Forget a pass that an error has cut short."""
        self.waiting = {store: len(store.unit.params) for store in self.waiting}
        self.whole_at, self.events, self.used = {}, [], set()
        self.position, self.has_begun = 0, False

    def forget(self, store: UnitStore) -> None:
        """Reduce a unit no more."""
        self.waiting.pop(store, None)
        self.order = [entry for entry in self.order if entry[0] is not store]

    def on_grad(self, store: UnitStore) -> bool:
        """Count one more gradient of a unit; True if it is the last one."""
        self.waiting[store] -= 1
        return self.waiting[store] == 0

    def on_whole(self, store: UnitStore) -> None:
        """All gradients of a unit are there: collect it, and reduce what is due."""
        self.collect(store)
        self.whole_at[store] = len(self.events) * MANY + len(self.whole_at)
        if self.syncs and self.comm.size == 1:
            self.reduce(store)
        elif self.syncs:
            self.reduce_due(lambda other: self.waiting[other] <= 0)

    def before_use(self, store: UnitStore) -> None:
        """A unit is about to be used in backward."""
        if self.comm.size > 1 and store not in self.used:
            self.used.add(store)
            self.before("use", store)

    def before_gather(self, store: UnitStore) -> None:
        """A unit is about to be gathered in backward."""
        if self.comm.size > 1:
            self.before("gather", store)

    def before(self, what: str, store: UnitStore) -> None:
        """Reduce what is reduced before this event."""
        if self.syncs:
            self.reduce_due(lambda other: True)
        at = len(self.events)
        self.events.append((what, store))
        if self.expected[at : at + 1] != self.events[at:]:
            del self.order[self.position :]

    @torch.no_grad()
    def reduce_due(self, is_ready: Callable[[UnitStore], bool]) -> None:
        while self.position < len(self.order):
            store, num_events = self.order[self.position]
            if num_events > len(self.events) or not is_ready(store):
                return
            self.meet()
            self.reduce_next()

    def reduce_next(self) -> None:
        store, _ = self.order[self.position]
        self.position += 1
        self.collect_here(store)
        self.reduce(store, self.scale)

    def collect(self, store: UnitStore) -> None:
        store.grad.drop_removed()
        store.grad.collect(self.loss_scale)
        store.grad.leave()

    @torch.no_grad()
    def collect_rest(self) -> None:
        """Collect what is in ``param.grad``, which has ``loss_scale``."""
        for store in self.waiting:
            self.collect_here(store)

    def collect_here(self, store: UnitStore) -> None:
        """Collect a unit of which some parameters have no gradient."""
        if any(is_here(param.grad) for param in store.unit.params):
            self.collect(store)

    def reduce(self, store: UnitStore, scale: float | None = None) -> None:
        store.wait()
        store.grad.reduce(self.dtype, scale)
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

    @torch.no_grad()
    def settle(self) -> None:
        """step() begins: reduce what any rank has collected, and what those in backward reduce."""
        while True:
            self.collect_rest()
            has_rest = any(store.grad.local is not None for store in self.waiting)
            said = self.exchange([STEP, self.num_local, has_rest])
            is_end = all(row[0] == STEP for row in said)
            if any(row[2] for row in said):
                self.finish(in_order=not is_end)
            if is_end:
                return

    def meet(self) -> None:
        """BEGIN: ranks in a backward pass that reduces, and those that join it, learn of it."""
        if not self.has_begun:
            self.has_begun = True
            self.exchange([BEGIN, self.num_local + 1, True])

    def exchange(self, mine: list[float]) -> list[list[float]]:
        """Tell all ranks phase, number of passes, and if there is something to reduce."""
        said = self.comm.rows("reductions", [*mine, self.loss_scale])
        # sums of several passes are in fp32; without a pass the scale is 1.0
        self.dtype = torch.float32 if max(row[1] for row in said) > 1 else None
        self.scale = max(row[3] for row in said)
        return said

    @torch.no_grad()
    def finish(self, in_order: bool = True) -> None:
        """END: reduce what is left; all ranks learn what has a gradient, and the next order."""
        # one rank has reduced each unit as it was whole
        while in_order and self.comm.size > 1 and self.position < len(self.order):
            self.reduce_next()
        trained, took_part = list(self.waiting), self.has_begun
        for store in trained:
            self.collect_here(store)
        late = [store.grad.scale if store.grad.local is not None else 0.0 for store in trained]
        absent = math.inf if took_part else -1.0  # of a unit that is not whole; no opinion
        places = [float(self.whole_at.get(store, absent)) for store in trained]
        known = [float(flag) for store in trained for flag in store.grad.present]
        said = self.comm.rows("gradients", late + places + known)
        most = iter(max(column) for column in zip(*said, strict=True))
        for store, scale in [(store, next(most)) for store in trained]:
            if scale:
                self.reduce(store, scale)
        places = [next(most) for _ in trained]
        for store in trained:
            store.grad.agree([bool(next(most)) for _ in store.unit.params])
        whole = sorted(
            (place, -number) for number, place in enumerate(places) if 0 <= place < math.inf
        )
        if max(places, default=-1.0) >= 0:  # some rank is in a backward pass
            self.order = [(trained[-number], int(place) // MANY) for place, number in whole]
            self.expected = self.events
        self.num_local = 0
        self.begin()
