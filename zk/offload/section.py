"""Section: consecutive elements of a shard whose state is on one tier. Shadow: room for what the next update makes of it, before that counts."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence

from torch import Tensor

from zk.events import COMPLETED, Event
from zk.offload.rules import Rule, Run
from zk.offload.tiers import Fields, Grads, ResidentFields
from zk.offload.transfer import Transfer, evenly

Opened = dict[str, Tensor]  # the fields of one chunk

# elements that are copied to a shadow at once, and updated there while the cache has them
_BLOCK = 1 << 17


@contextlib.contextmanager
def opened(state: Fields, param: Fields, chunk: slice, changes: bool, read: bool = True, keep: bool = False) -> Iterator[Opened]:
    """All fields of one chunk, put back whatever happens inside."""
    fields = state.open(chunk, read)
    try:
        beside = param.open(chunk, read)
        try:
            yield {**fields, **beside}
        finally:
            param.close(chunk, changes)
    finally:
        state.close(chunk, changes, keep)


def apply(rule: Rule, fields: Opened, grad: Tensor, elements: slice, runs: Sequence[Run], grad_scale: float, num_threads: int) -> None:
    """Update ``fields``, which are these ``elements`` of a shard, by their ``grad``: what lies in each run."""
    for run in runs:
        start, stop = max(run.part.start, elements.start), min(run.part.stop, elements.stop)
        if start < stop:
            assert not rule.is_whole or (start, stop) == (run.part.start, run.part.stop), "a chunk cuts a parameter that is updated whole"
            here = slice(start - elements.start, stop - elements.start)
            flat: dict[str, Tensor | None] = {name: field[here] for name, field in fields.items()}
            flat["grad"] = grad[here]
            flat.setdefault("master", None)
            rule.update(flat, run, grad_scale, num_threads)


class Shadow:
    """Room for what the next update makes of a section's states, which stay as they are until ``commit``.

    Args:
        state, param: room, as the section has.
        near: (elements,) device memory, to which updated parameters are uploaded before they count; None: they are uploaded afterwards.
    """

    def __init__(self, state: Fields, param: Fields, near: Tensor | None) -> None:
        self.state, self.param, self.near = state, param, near

    def update(
        self, section: Section, grads: Grads, chunk: slice, rule: Rule, runs: Sequence[Run], grad_scale: float, num_threads: int, mark: Event | None
    ) -> None:
        """Make what ``chunk`` of the section becomes by ``grads``. ``mark``: what compute must have done before ``near`` is written."""
        with (
            opened(section.state, section.param, chunk, changes=False) as now,
            opened(self.state, self.param, chunk, changes=True, read=False) as then,
        ):
            grad = grads.open(chunk)
            try:
                for block in evenly(0, chunk.stop - chunk.start, chunk.stop if rule.is_whole else _BLOCK, 64):
                    for name, field in then.items():
                        field[block].copy_(now[name][block])
                    elements = slice(chunk.start + block.start, chunk.start + block.stop)
                    apply(rule, {name: field[block] for name, field in then.items()}, grad[block], elements, runs, grad_scale, num_threads)
            finally:
                grads.close(chunk)
        if self.near is not None:
            assert isinstance(self.param, ResidentFields)
            updated = self.param.open(chunk)["param"]
            self.param.readers[chunk.start] = section.transfer.upload(section.part_of(self.near, chunk), updated, mark)

    def commit(self, section: Section) -> None:
        """The section's states become what was made of them; the shadow is what they were."""
        section.state.exchange(self.state)  # type: ignore[arg-type]  # of one tier
        if not section.is_fixed:
            section.param.exchange(self.param)  # type: ignore[arg-type]
            return
        for chunk in section.state.chunks:
            section.param.open(chunk)["param"].copy_(self.param.open(chunk)["param"])


@dataclasses.dataclass(slots=True, eq=False)
class Section:
    """Consecutive elements of a shard whose state is on one tier, in chunks."""

    tier: str  # the name of the tier of gradient, master and moments
    param: Fields  # the parameters where the update reaches them, as the field "param"
    state: Fields  # master and moments, as ``state_fields`` names them
    grads: Grads
    home: ResidentFields | None  # where the shard's parameters rest, if that is other memory than ``param``: they are copied there
    transfer: Transfer
    beside: bool  # host threads do the update, so it can go on while the device computes
    is_fixed: bool  # ``param`` is memory of the model's own parameters, or of other sections too
    shadow: Shadow | None = None
    spare: Grads | None = None  # room for the next gradient while the update of this one goes on

    @property
    def whole(self) -> slice:
        """Of the shard."""
        return slice(self.state.chunks[0].start, self.state.chunks[-1].stop)

    def part_of(self, values: Tensor, chunk: slice) -> Tensor:
        """The elements of ``chunk`` in a tensor of all of the section."""
        start = self.whole.start
        return values[chunk.start - start : chunk.stop - start]

    def take_home(self, chunk: slice, mark: Event | None, near: Tensor | None = None) -> Event:
        """Start to copy a chunk of the parameters home, if it is not there; after ``mark``, as for Transfer.

        ``near``: (elements of the section,) device memory that it has been uploaded to.
        """
        if self.home is None:
            return COMPLETED
        assert isinstance(self.param, ResidentFields)
        there = self.home.whole()[chunk]
        if near is not None:
            with self.transfer.beside(mark) as reached:
                there.copy_(self.part_of(near, chunk))
                return reached()
        here = self.param.open(chunk)["param"]
        copy = self.transfer.upload if self.home.memory == "device" else self.transfer.offload_to
        event = self.param.readers[chunk.start] = copy(there, here, mark)
        return event
