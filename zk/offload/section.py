"""Section: consecutive elements of a shard whose state is on one tier. Shadow: room for what the next update makes of it, before that counts.

Attempt: the update of a shard in shadows, before the norm of all gradients is known, as if nothing were clipped. It counts only if that was right.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Mapping

from torch import Tensor

from zk.core.events import COMPLETED, Event, Ticket
from zk.core.timeline import phase
from zk.offload.packing import part_of
from zk.offload.rules import Change
from zk.offload.streamed import Stream
from zk.offload.tiers import Fields, Grads, HostCopies, HostGrads, ResidentFields
from zk.offload.transfer import Transfer, evenly

Opened = dict[str, Tensor]  # the fields of one chunk

# elements that are copied to a shadow at once, and updated there while the cache has them
_BLOCK = 1 << 17


@contextlib.contextmanager
def opened(state: Fields, param: Fields | HostCopies | None, chunk: slice, changes: bool, read: bool = True, keep: bool = False) -> Iterator[Opened]:
    """All fields of one chunk, put back whatever happens inside."""
    with contextlib.ExitStack() as closing:
        fields = {**state.open(chunk, read)}
        closing.callback(state.close, chunk, changes, keep)
        if param is not None:
            fields |= param.open(chunk, read)
            closing.callback(param.close, chunk, changes)
        yield fields


def _settle(written: Event) -> None:
    """Wait until updated state is in host memory."""
    with phase("wait", "link: updated state"):
        written.wait()


@dataclasses.dataclass(slots=True, eq=False)
class Shadow:
    """Room for what the next update makes of a section's states, which stay as they are until ``commit``."""

    state: Fields  # as the section has, and so is ``param``
    param: Fields | None  # without it, parameters are updated in ``near``
    near: Tensor | None  # (elements,) device memory, in which updated parameters are before they count; None: they are uploaded afterwards

    def update(
        self, section: Section, grads: Grads, chunk: slice, change: Change, num_threads: int, mark: Event | None
    ) -> contextlib.ExitStack | None:
        """Make what ``chunk`` of the section becomes by ``grads``. ``mark``: what compute must have done before ``near`` is written.

        Returns as ``Section.stream_through``.
        """
        if section.stream is not None:
            return section.stream_through(self, grads, chunk, change, mark)
        assert self.param is not None
        with (
            opened(section.state, section.param, chunk, changes=False) as now,
            opened(self.state, self.param, chunk, changes=True, read=False) as then,
        ):
            grad = grads.open(chunk)
            try:
                for block in evenly(0, chunk.stop - chunk.start, chunk.stop if change.rule.is_whole else _BLOCK, 64):
                    source, target = part_of(now, block), part_of(then, block)
                    for name, field in target.items():
                        field.copy_(source[name])
                    elements = slice(chunk.start + block.start, chunk.start + block.stop)
                    change.apply(target, grad[block], elements, num_threads)
            finally:
                grads.close(chunk)
        if self.near is not None:
            assert isinstance(self.param, ResidentFields)
            updated = self.param.open(chunk)["param"]
            self.param.copies[chunk.start] = section.transfer.upload(section.part_of(self.near, chunk), updated, mark)
        return None

    def commit(self, section: Section) -> None:
        """The section's states become what was made of them; the shadow is what they were."""
        section.state.exchange(self.state)  # type: ignore[arg-type]  # of one tier
        if isinstance(section.param, HostCopies):
            return  # which ``take_home`` brings there
        assert self.param is not None
        if not section.is_fixed:
            section.param.exchange(self.param)  # type: ignore[arg-type]
            return
        for chunk in section.state.chunks:
            section.param.open(chunk)["param"].copy_(self.param.open(chunk)["param"])


@dataclasses.dataclass(slots=True, eq=False)
class Section:
    """Consecutive elements of a shard whose state is on one tier, in chunks."""

    tier: str  # the name of the tier of gradient, master and moments
    param: Fields | HostCopies  # the parameters where the update reaches them, as the field "param"
    state: Fields  # master and moments, as ``state_fields`` names them
    grads: Grads
    home: ResidentFields | None  # where the shard's parameters rest, if that is other memory than ``param``: they are copied there
    transfer: Transfer
    beside: bool  # the update can go on while the device computes: host threads do it, or a stream of its own
    is_fixed: bool  # ``param`` is memory of the model's own parameters, or of other sections too
    stream: Stream | None = None  # the device does the update, through which states stream
    shadow: Shadow | None = None
    spare: Grads | None = None  # room for the next gradient while the update of this one goes on

    @property
    def whole(self) -> slice:
        """Of the shard."""
        return slice(self.state.chunks[0].start, self.state.chunks[-1].stop)

    @property
    def numel(self) -> int:
        return int(self.whole.stop - self.whole.start)

    @property
    def resting(self) -> Fields:
        """The parameters where they are, without copies for whoever opens them in host memory."""
        return self.param.near if isinstance(self.param, HostCopies) else self.param

    def fetch(self, chunk: slice, grads: Grads) -> bool:
        """Ask for all that the update of a chunk by ``grads`` needs; False if not all of it can be asked for now."""
        return self.state.fetch(chunk) and self.param.fetch(chunk) and grads.fetch(chunk)

    def part_of(self, values: Tensor, chunk: slice) -> Tensor:
        """The elements of ``chunk`` in a tensor of all of the section."""
        start = self.whole.start
        return values[chunk.start - start : chunk.stop - start]

    def stream_through(
        self, shadow: Shadow | None, grads: Grads, chunk: slice, change: Change, mark: Event | None, keep: bool = False
    ) -> contextlib.ExitStack | None:
        """Start to update ``chunk`` on the device, in place or into a ``shadow``; after ``mark``, as for Transfer.

        What is in memory is there once the copies of its fields are over. What is on the drive is put back when the result is closed, which waits
        for them: after the next chunk has been started, so that this one streams while that one is read. None if nothing is on the drive.
        """
        assert self.stream is not None
        after = mark or self.transfer.mark()
        with contextlib.ExitStack() as closing:
            fields: list[Fields | None] = [self.state, self.resting]
            now = then = closing.enter_context(opened(self.state, self.resting, chunk, shadow is None, keep=keep))
            if shadow is not None:
                fields += (shadow.state, shadow.param)
                then = closing.enter_context(opened(shadow.state, shadow.param, chunk, True, read=False))
                if shadow.near is not None:
                    then["param"] = self.part_of(shadow.near, chunk)
            grad = grads.open(chunk)
            closing.callback(grads.close, chunk)

            def update(block: Opened, part: slice) -> None:
                change.apply(block, block.pop("grad"), slice(chunk.start + part.start, chunk.start + part.stop), 1)

            done = self.stream.update(now, then, grad, update, after)
            for one in fields:
                if isinstance(one, ResidentFields):
                    one.copies[chunk.start] = done.ready if one.memory == "device" else done.written
            if isinstance(grads, HostGrads):
                grads.reader = done.read
            if isinstance(grads, HostGrads) and all(one.resident for one in fields if one is not None):
                return None
            closing.callback(_settle, done.written)
            return closing.pop_all()

    def take_home(self, chunk: slice, mark: Event | None, taken: Shadow | None = None) -> Event:
        """Start to copy a chunk of the parameters home, if it is not there; after ``mark``, as for Transfer. Returns when they are there.

        ``taken``: what they have been updated in.
        """
        if self.stream is not None:
            param = self.resting
            if not isinstance(param, ResidentFields):
                return COMPLETED
            if taken is not None and isinstance(self.param, HostCopies):
                updated = self.part_of(taken.near, chunk) if taken.near is not None else taken.param.open(chunk)["param"]  # type: ignore[union-attr]
                there = param.open(chunk)["param"]
                param.copies[chunk.start] = self.stream.copy(there, updated, mark or self.transfer.mark())
                if isinstance(taken.param, ResidentFields):
                    taken.param.copies[chunk.start] = param.copies[chunk.start]
            return param.copies.get(chunk.start, COMPLETED)
        if self.home is None:
            return COMPLETED
        assert isinstance(self.param, ResidentFields)
        there = self.home.whole()[chunk]
        if taken is not None and taken.near is not None:
            with self.transfer.beside(mark) as reached:
                there.copy_(self.part_of(taken.near, chunk))
                return reached()
        here = self.param.open(chunk)["param"]
        copy = self.transfer.upload if self.home.memory == "device" else self.transfer.offload_to
        event = self.param.copies[chunk.start] = copy(there, here, mark)
        return event


@dataclasses.dataclass(slots=True, eq=False)
class Attempt:
    """One unit's update out of place, by the worker's thread. ``commit`` takes what it has made of a section, or tells that it cannot be taken."""

    name: str  # of the unit
    grads: Mapping[Section, Grads]  # of each section that is updated, all of which have a shadow
    change: Change  # of the step, as it is expected to be
    mark: Event  # what compute must have done before memory on the device is written
    is_handed_over: bool = False  # ``grads`` are not those that change with the next backward
    has_counted: Callable[[], None] = lambda: None  # called once, if it does
    done: Ticket = COMPLETED  # of the worker, which has been asked to run this
    is_given_up: bool = False
    has_begun: bool = False
    finished: set[Section] = dataclasses.field(default_factory=set)
    taken: dict[Section, bool] = dataclasses.field(default_factory=dict)

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
        for section in sections:
            self.grads[section].discard()

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
