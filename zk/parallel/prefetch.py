"""The order in which units are used, and the ones to ask for next. Decides when, never moves bytes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

_LONGEST = 1 << 14  # uses that are remembered at most, should no backward ever end the recording
_STEADY = 8  # passes in a row that use a unit, after one that did not, until it is asked for ahead again


class Prefetcher:
    """Follows the order of use seen last time and asks for the units that come next.

    A use that is not the expected one costs nothing but its own wait: the position is looked up again further on in the order.
    A unit that only some passes use (an expert) is not asked for ahead of use, as its bytes would mostly be moved for nothing.

    Args:
        ask: called with a unit's number, starts to gather it if it is not there.
        fetch: called with a unit's number, brings this rank's slice of it nearer, where it rests on a slow tier.
        ahead: how many units beyond the one in use to ask for; as many and one more beyond these are fetched.
    """

    def __init__(self, ask: Callable[[int], None], fetch: Callable[[int], None], ahead: int) -> None:
        self.ask, self.fetch, self.ahead = ask, fetch, ahead
        self.orders: dict[str, Sequence[int]] = {}
        self.first: Sequence[int] = ()  # what the last training pass has used, from its beginning
        self.doubtful: dict[str, dict[int, int]] = {}  # by mode: units, and the passes that have to use each first
        self.mode = "train"
        self.seen: list[int] = []
        self.position = 0
        self.uses = self.hits = 0

    def begin(self, mode: str) -> None:
        """A pass starts that uses units in an order of its own ("train": forward and backward; "infer": forward only)."""
        self.mode, self.seen, self.position = mode, [], 0

    def used(self, unit: int, was_there: bool) -> None:
        """``unit`` is needed now; ``was_there`` if it had been asked for in time. Asks for what follows it."""
        if self.seen and self.seen[-1] == unit:
            return
        self.uses += 1
        self.hits += was_there
        if len(self.seen) < _LONGEST:
            self.seen.append(unit)
        order = self.orders.get(self.mode, ())
        if not self.ahead or not order:
            return
        try:
            self.position = order.index(unit, self.position) + 1
        except ValueError:
            return  # off the known path: wait for it to come back
        self._look_ahead(order, {unit})

    def _look_ahead(self, order: Sequence[int], known: set[int]) -> None:
        following, doubtful = [], self.doubtful.get(self.mode, {})
        for unit in itertools.islice(order, self.position, self.position + 4 * (2 * self.ahead + 1)):
            if unit not in known and unit not in doubtful:
                known.add(unit)
                following.append(unit)
        for unit in following[: self.ahead]:
            self.ask(unit)
        for unit in following[self.ahead : 2 * self.ahead + 1]:
            self.fetch(unit)

    def between_passes(self) -> None:
        """No pass is in progress: fetch what the next training pass begins with."""
        doubtful = self.doubtful.get("train", {})
        for unit in dict.fromkeys(self.first[: 2 * self.ahead + 1]) if self.ahead else ():
            if unit not in doubtful:
                self.fetch(unit)

    def end(self) -> None:
        """The pass is over: what was seen is what to expect next time."""
        if self.seen:
            seen, expected = set(self.seen), set(self.orders.get(self.mode, self.seen))
            doubtful = {unit: left - 1 for unit, left in self.doubtful.get(self.mode, {}).items() if left > 1}
            self.doubtful[self.mode] = doubtful | dict.fromkeys(seen ^ expected, _STEADY)
            self.orders[self.mode] = tuple(self.seen)
            self.first = self.orders.get("train", ())
        self.seen, self.position = [], 0
