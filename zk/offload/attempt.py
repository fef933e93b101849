"""Attempt: the update of one shard before the norm of all gradients is known, as if nothing were clipped. It counts only if that was right."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping

from zk.events import COMPLETED, Event, Ticket
from zk.offload.rules import Change
from zk.offload.section import Section
from zk.offload.spill import FileGrads
from zk.offload.tiers import Grads
from zk.timeline import phase


class Attempt:
    """One unit's update out of place. The worker's thread runs it; ``commit`` takes what it has made of a section, or tells that it cannot be taken.

    Args:
        name: of the unit.
        grads: the gradient of each section that is updated, all of which have a shadow.
        change: of the step, as it is expected to be.
        mark: what compute must have done before memory on the device is written.
        is_handed_over: ``grads`` are not those that change with the next backward.
        has_counted: called once, if it does.
    """

    def __init__(
        self,
        name: str,
        grads: Mapping[Section, Grads],
        change: Change,
        mark: Event,
        is_handed_over: bool = False,
        has_counted: Callable[[], None] = lambda: None,
    ) -> None:
        self.name, self.grads, self.change, self.mark = name, grads, change, mark
        self.is_handed_over, self.has_counted = is_handed_over, has_counted
        self.is_given_up = self.has_begun = False
        self.finished: set[Section] = set()
        self.taken: dict[Section, bool] = {}
        self.done: Ticket = COMPLETED  # of the worker, which has been asked to run this

    def run(self, num_threads: int, stop: threading.Event) -> None:
        """Update all sections in their shadows, unless this is given up."""
        self.has_begun = True
        places = [(section, chunk) for section in self.grads for chunk in section.state.chunks]
        with contextlib.ExitStack() as behind:
            for (section, chunk), following in zip(places, [*places[1:], None], strict=True):
                assert section.shadow is not None
                if self.is_given_up or stop.is_set():
                    return
                if following is not None:
                    following[0].fetch(following[1], self.grads[following[0]])
                with phase("update", self.name):
                    streams = section.shadow.update(section, self.grads[section], chunk, self.change, num_threads, self.mark)
                    behind.close()  # the chunk before this one
                if following is None or following[0] is not section:
                    behind.callback(self._finish, section)
                if streams is None:
                    behind.close()
                else:
                    behind.enter_context(streams)

    def _finish(self, section: Section) -> None:
        self.finished.add(section)
        self.discard(section)

    def discard(self, *sections: Section) -> None:
        """Give back the memory of gradients that were handed over, of these sections."""
        for grads in map(self.grads.__getitem__, sections):
            if isinstance(grads, FileGrads):
                grads.discard()

    def give_up(self, goes_on: bool = False) -> None:
        """Begin nothing more; what is finished may still be taken. ``goes_on``: unless it has begun, or waits for the gradient to arrive."""
        is_waiting = not all(grads.is_here for grads in self.grads.values())
        self.is_given_up |= not (goes_on and (self.has_begun or is_waiting))

    def drop(self) -> None:
        """Give up, and forget what is finished. Returns when nothing is read any more."""
        self.give_up()
        self.done.join()
        self.finished.clear()
        self.discard(*self.grads)

    def commit(self, section: Section, change: Change) -> bool:
        """Make a section what this has made of it, if the step is what was expected. Says the same for all of its chunks."""
        if section.shadow is None:
            return False
        if section not in self.taken:
            self.done.wait()
            self.taken[section] = section in self.finished and change == self.change
            if self.taken[section]:
                section.shadow.commit(section)
                if sum(self.taken.values()) == 1:
                    self.has_counted()
        return self.taken[section]
