"""Optimizer state of a unit's slice: takes reduced gradients, and updates the slice. Holds master, moments and gradient on their tier."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from zk.core.events import COMPLETED, Event
from zk.core.units import overlap
from zk.kernels import codec
from zk.offload.packing import PACKED, Packing, part_of
from zk.offload.rules import Change, Rule
from zk.offload.section import Attempt, Opened, Section, opened
from zk.offload.snapshot import Unread
from zk.offload.spill import FileGrads
from zk.offload.tiers import Grads


class OptimizerShard:
    """Optimizer state of the slice of a unit that this rank updates.

    Args:
        rule: the optimizer's arithmetic.
        sections: where the state is, in order and without gaps.
        names: the states that the options of its parameters ask for.
        packing_of: of what is kept of whole parameters, by rank; None where all is kept for each element.
        rank: this one.
    """

    def __init__(
        self, rule: Rule, sections: Sequence[Section], names: Sequence[str], packing_of: Callable[[int], Packing] | None = None, rank: int = 0
    ) -> None:
        self.rule, self.sections, self.asked, self.packing_of = rule, sections, tuple(names), packing_of
        self.names = self.asked if packing_of is None else ()  # the moments
        self.packing = None if packing_of is None else packing_of(rank)
        self.places = [(section, chunk) for section in sections for chunk in section.state.chunks]
        self.chunks = [chunk for _, chunk in self.places]
        self.dtypes = sections[0].state.dtypes  # of master and moments
        self.has_master, self.is_split = "master" in self.dtypes, codec.is_split(self.dtypes)
        self.stats: list[Tensor | None] = []  # of each gradient that was added, as for ``add``
        self.arriving: Event = COMPLETED  # the last copy home
        self.unread: Unread | None = None  # by a save in progress
        self.attempt: Attempt | None = None  # to update it before step()

    def start(self, initial: Tensor) -> None:
        """Masters start from ``initial`` (n,), the values in the model's original precision; moments from zero."""
        for index, chunk in enumerate(self.chunks):
            with self.opened(index, changes=True, read=False) as fields:
                codec.start(fields, initial[chunk])
        self.upload()

    # ---- chunks --------------------------------------------------------------------------------------------------------------

    def opened(self, number: int, changes: bool = False, read: bool = True, keep: bool = False) -> contextlib.AbstractContextManager[Opened]:
        """The fields of chunk ``number``, put back whatever happens inside."""
        section, chunk = self.places[number]
        return opened(section.state, section.param, chunk, changes, read, keep)

    @contextlib.contextmanager
    def changed(self, number: int, unread: Unread | None, keep: bool = False) -> Iterator[Opened]:
        """The same, to be changed: not before a save in progress has what it still needs of it."""
        claimed = contextlib.nullcontext() if unread is None else unread.before_change(number)
        with claimed as hand, self.opened(number, changes=True, keep=keep) as fields:
            if hand is not None:
                hand(fields)
            yield fields

    def _overlap(self, part: slice) -> Iterator[tuple[int, slice, slice]]:
        """For each chunk that ``part`` touches: its index, the slice of the chunk, the slice of ``part``."""
        for index, chunk in enumerate(self.chunks):
            here, there = overlap(chunk, part)
            if here.start < here.stop:
                yield index, here, there

    def drop_attempt(self, of_gradient: bool = False) -> None:
        """Give up an update that has begun: what it was made from is about to change, or only the gradient that comes from backward now is."""
        if self.attempt is not None and not (of_gradient and self.attempt.is_handed_over):
            self.attempt.drop()
            self.attempt = None

    # ---- the gradient --------------------------------------------------------------------------------------------------------

    def add(self, grad: Tensor, stats: Tensor | None = None, hands_over: bool = False) -> Event | None:
        """Take (n,) ``grad``, or add it to what is there: None, its memory is taken too; else that may be used again after the event.

        ``stats``: (2,) fp64, of which the first is its sum of squares, where that is known. ``hands_over``: an attempt will use it, and nothing
        else, so that it is not written to a drive.
        """
        self.drop_attempt(of_gradient=True)
        dtype = self.sections[0].grads.sum_dtype
        if grad.dtype.itemsize > dtype.itemsize:  # assigned by hand
            grad, stats = grad.to(dtype), None
        self.stats.append(stats)
        for section in self.sections:
            if isinstance(section.grads, FileGrads):
                section.grads.hands_over = hands_over and section.shadow is not None
        if len(self.sections) == 1:
            return self.sections[0].grads.add(grad, stats is not None)
        events = [section.grads.add(grad[section.whole], stats is not None) for section in self.sections]
        return None if None in events else events[-1]

    def hand_over(self) -> dict[Section, Grads]:
        """Take the gradient of each section away, for an update that ends after the next one has begun to come."""
        self.stats, given = [], {section: section.grads for section in self.sections}
        for section in self.sections:
            assert section.spare is not None
            section.grads, section.spare = section.spare, section.grads
        return given

    def squares(self) -> list[float | Tensor]:
        """Parts of the sum of squares of the gradient, in float64. Not finite exactly if some element is not."""
        if len(self.stats) == 1 and self.stats[0] is not None:
            return [self.stats[0][0]]
        return [section.grads.sum_of_squares() for section in self.sections]

    def bring(self, device: torch.device) -> Tensor:
        """Take the gradient out: (n,) on ``device``, in memory of its own."""
        self.drop_attempt(of_gradient=True)
        pieces = []
        for section, chunk in self.places:
            pieces.append(section.grads.open(chunk).to(device, copy=True))
            section.grads.close(chunk)
        self.clear()
        return torch.cat(pieces) if len(pieces) != 1 else pieces[0]

    def clear(self) -> Tensor | None:
        """Forget the gradient; returns memory that was taken."""
        self.drop_attempt(of_gradient=True)
        self.stats = []
        memory = [section.grads.clear() for section in self.sections]
        return next((one for one in memory if one is not None), None)

    @property
    def is_handed_over(self) -> bool:
        """Check that some of the gradient is in memory for an attempt alone, or is not there any more."""
        return any(section.grads.is_handed_over for section in self.sections)

    def discard(self) -> None:
        """Give back the memory of a gradient that was handed over, and has been used."""
        for section in self.sections:
            if isinstance(section.grads, FileGrads):
                section.grads.discard()

    # ---- update --------------------------------------------------------------------------------------------------------------

    def fetch(self, number: int, handed_over: Mapping[Section, Grads]) -> bool:
        """Ask for all that the update of a chunk needs; False if not all of it can be asked for now."""
        section, chunk = self.places[number]
        return section.fetch(chunk, handed_over.get(section, section.grads))

    def update(
        self,
        number: int,
        change: Change,
        num_threads: int,
        keep: bool,
        mark: Event | None,
        unread: Unread | None,
        attempt: Attempt | None,
        handed_over: Mapping[Section, Grads],
    ) -> contextlib.ExitStack | None:
        """Update and cast chunk ``number``, unless an ``attempt`` has, and start to copy it home. Returns as ``Section.stream_through``.

        ``keep`` as for Store.close; ``mark`` as for Section.take_home; ``unread``: what a save began to read before this update was asked for.
        ``handed_over``: the gradient of each section that is not where the next one will be.
        """
        section, chunk = self.places[number]
        is_done = unread is None and attempt is not None and attempt.commit(section, change)
        grads, streams = handed_over.get(section, section.grads), None
        if not is_done and section.stream is not None:
            if unread is not None:
                with unread.before_change(number) as hand, self.opened(number) as fields:
                    hand(fields)
            streams = section.stream_through(None, grads, chunk, change, mark, keep)
        elif not is_done:
            with self.changed(number, unread, keep) as fields:
                grad = grads.open(chunk)
                try:
                    change.apply(fields, grad, chunk, num_threads)
                finally:
                    grads.close(chunk)
        event = section.take_home(chunk, mark, section.shadow if is_done else None)
        if event is not COMPLETED:
            self.arriving = event
        return streams

    # ---- checkpoints ---------------------------------------------------------------------------------------------------------

    def fetch_state(self, number: int) -> None:
        """Ask for a chunk, without its gradient, ahead of ``opened``."""
        section, chunk = self.places[number]
        section.state.fetch(chunk)
        section.param.fetch(chunk)

    def upload(self) -> None:
        """Bring all parameters to where they rest, for compute to use."""
        for section, chunk in self.places:
            self.arriving = section.take_home(chunk, None)
            section.transfer.follow(self.arriving)

    # ---- what is kept of whole parameters ------------------------------------------------------------------------------------

    def packed(self) -> Tensor:
        """Copy all of it: (packing.nbytes,) uint8."""
        pieces = []
        for number in range(len(self.chunks)):
            with self.opened(number) as fields:
                pieces.append(fields[PACKED].clone())
        return torch.cat(pieces)

    def pack(self, index: int, name: str, value: Tensor) -> None:
        """Overwrite what is kept of parameter ``index``, if that is in this slice, by ``value`` in its shape or flat."""
        if self.packing is None or index not in self.packing.offsets:
            return
        self.drop_attempt()
        number = next(number for number, chunk in enumerate(self.chunks) if index in self.packing.inside(chunk))
        with self.changed(number, self.unread) as fields:
            view = self.packing.views(index, fields[PACKED], self.chunks[number])[name]
            view.copy_(value.reshape(view.shape))

    # ---- reading and writing state -------------------------------------------------------------------------------------------

    @property
    def has_copies(self) -> bool:
        """Check that what is written to parameters has to reach a master, or a copy of them that is updated."""
        return (self.has_master and not self.is_split) or any(section.home is not None for section in self.sections)

    def adopt(self, parts: Sequence[slice]) -> None:
        """Parameters of ``parts`` were written from outside: elements that changed replace their master, the others keep it.

        All that were written at once, as what comes home afterwards is everything.
        """
        self.drop_attempt()
        if not self.has_copies:
            return
        for part in parts:
            for index, here, there in self._overlap(part):
                home = self.places[index][0].home
                with self.changed(index, self.unread) as fields:
                    master = codec.read(part_of(fields, here), "master")
                    written = fields["param"][here].clone() if home is None else home.whole()[part][there].to(master.device, copy=True)
                    held = master.to(written.dtype) if home is None else fields["param"][here]  # a 24-bit master rounds in its own way
                    codec.write(part_of(fields, here), {"master": torch.where(held == written, master, written.float())})
        self.upload()

    def get_state(self, name: str, part: slice, copies: bool = False) -> Tensor:
        """The "master" of ``part``, or a state by name, in fp32; a view where one chunk in memory has that as it is, unless it ``copies``."""
        rests = len(self.chunks) == 1 and self.sections[0].state.resident and self.sections[0].param.resident
        pieces = []
        for index, here, _ in self._overlap(part):
            with self.opened(index) as fields:
                value = codec.read(part_of(fields, here), name).float()
                is_kept = rests and not copies
                pieces.append(value if is_kept else value.to("cpu", copy=True) if len(self.sections) > 1 else value.clone())
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces or [torch.empty(0)])

    def set_state(self, name: str, part: slice, values: Tensor) -> None:
        """Overwrite the "master" of ``part``, with the parameter, or a state by name, by (n,) ``values``; the others keep their value."""
        self.drop_attempt()
        for index, here, there in self._overlap(part):
            with self.changed(index, self.unread) as fields:
                codec.write(part_of(fields, here), {name: values[there]})
        if name == "master":
            self.upload()

    @property
    def nbytes(self) -> Iterator[tuple[str, str, int]]:
        """Tier, kind and bytes: of master, moments, gradient, the parameter copy where there is one, and shadows of them."""
        for section in self.sections:
            tier, shadow = section.tier, section.shadow
            kept = (*section.state.dtypes, *((PACKED,) if self.packing is not None else ()))
            yield tier, "moments", sum(section.state.nbytes(name) for name in kept if name != "master")
            yield tier, "master", section.state.nbytes("master") if self.has_master else 0
            yield tier, "grad", section.grads.nbytes + (section.spare.nbytes if section.spare is not None else 0)
            copied_to = "host" if tier == "nvme" else tier  # what is updated on the drive's behalf is in host memory
            yield copied_to, "param_copy", 0 if section.home is None else section.param.nbytes("param")
            if shadow is not None:
                yield tier, "shadow", sum(shadow.state.nbytes(name) for name in kept)
                if shadow.param is not None:
                    yield "host" if shadow.param.resident else "nvme", "shadow", shadow.param.nbytes("param")
                if shadow.near is not None:
                    yield "device", "shadow", shadow.near.nbytes
