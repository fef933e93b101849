"""UnitStore: all model states of one unit on this rank, one method for each arrow of the papers.

gather -> release     full parameters, around their use
update -> publish     the optimizer's arithmetic, chunk by chunk; then back to parameters
read, write           one parameter's values of a kind, whole

Its gradient is in parallel/gradient.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from zk.kernels import codec
from zk.memory import empty
from zk.offload.tiers import Chunk, Fields
from zk.parallel.gradient import Gradient
from zk.unit import Unit

if TYPE_CHECKING:
    from zk.optimizer import Layout

Shown = tuple[Tensor | None, list[Tensor], list[Any]]  # full parameters, views, places of these
version_of = attrgetter("_version")


class Step(NamedTuple):
    """What one step applies to all units."""

    scale: float  # the factor of gradients: clipping, and the end of the loss scale
    options: dict[int, dict[str, Any]]  # the param_groups as they were, by their id


class UnitStore:
    """One unit's model states on this rank.

    full     (numel,)   parameters of all ranks, while gathered; ``param.data`` are views of it
    param    (shard,)   this rank's parameters at rest, in one chunk
    states   (shard,)   what the rule keeps: masters, moments; in chunks
    grad                the unit's gradient
    """

    def __init__(self, unit: Unit, layout: Layout):
        self.unit, self.layout = unit, layout
        self.rule, self.codec = layout.rule_of(unit), layout.codec_of(unit)
        self.is_partitioned = layout.stage == 3
        self.gathering: Any = None  # the collective of a gather in flight
        self.updating: Any = None  # waits for an update in the background
        self.is_updated = False  # the shard is newer than the full parameters
        self.version = 0  # of the parameters: their number of updates
        self.steps = [0] * len(unit.params)
        self.groups = [layout.owners[param][1] for param in unit.params if unit.is_trained]
        self.alike: list[Any] = []  # for what ``cuts`` of each chunk were made
        self.start = layout.sharers.rank * unit.shard_numel
        ones = torch.full((unit.dtype.itemsize,), 255, dtype=torch.uint8, device=unit.device)
        nan = ones.view(unit.dtype)[0]  # -1 of integers
        views = [nan.expand(shape) for shape in unit.shapes]
        self.released: Shown = None, views, self.places_of(views)
        self.viewed: Shown = self.released  # the last full parameters, and their views
        with layout.comm.together(f"taking over {unit.name!r}"):
            values = empty(unit.numel, unit.params[0].dtype, unit.device).zero_()
            for fill in layout.seams.fill:
                fill(unit, unit.views(values), layout.comm.rank == 0)
            for view, param in zip(unit.views(values), unit.params, strict=True):
                if view.data_ptr() != param.data_ptr():
                    view.copy_(param.detach())
                    param.data = view  # what it was is free
        layout.comm.broadcast(unit.name, values)
        with layout.comm.together(f"placing {unit.name!r}"):
            full = self.place(values)
        self.full: Any = None
        self.point(None if self.is_partitioned else full)
        self.note_versions()

    def place(self, values: Tensor) -> Tensor:
        """The full parameters; this rank's are on their tier then, with room for what trains them."""
        unit, layout, numel = self.unit, self.layout, self.unit.shard_numel
        full, mine = values, slice(self.start, self.start + numel)
        if values.dtype != unit.dtype:
            full = empty(unit.numel, unit.dtype, unit.device).copy_(values)
        self.param = layout.tier_of(unit, "param").chunks({"param": unit.dtype}, [numel])[0]
        is_part = self.is_partitioned and layout.sharers.size > 1
        self.param.put("param", full[mine].clone() if is_part else full[mine])
        tier = layout.tier_of(unit, "state") if unit.is_trained else None
        step = tier.chunk_numel if tier else numel
        self.bounds = [slice(at, min(at + step, numel)) for at in range(0, numel, step)]
        self.stateless = [Chunk({}, 0, self.param.device)] * len(self.bounds)
        self.states, grads = self.stateless, list[Chunk]()
        if tier:
            sizes = [bound.stop - bound.start for bound in self.bounds]
            grads = tier.chunks({"grad": torch.float32}, sizes)
            self.states = tier.chunks(self.codec.fields, sizes)
            for chunk, bound in zip(self.states, self.bounds, strict=True):
                param = full[mine][bound]
                self.codec.start(chunk.open() | {"param": param}, values[mine][bound])
                chunk.close(changed=True)
        self.grad = Gradient(self, grads)
        if layout.places[unit].state == "host":  # page-lock what gradients will need, now
            for chunk, bound in zip(grads, self.bounds, strict=True):
                chunk.put("grad", full[mine][bound])
                chunk.open()
        return full

    # ---- parameters: fetch -> gather -> release --------------------------------------------------

    @property
    def is_away(self) -> bool:
        """Parameters are released, and not about to come; never at stages 0 to 2."""
        return self.full is None and self.gathering is None

    def begin_gather(self) -> None:
        """Start the collective that makes released parameters whole."""
        self.publish()
        unit, sharers, full = self.unit, self.layout.sharers, None
        if sharers.size > 1:  # made here, as what follows the copy runs beside compute
            full = empty(unit.numel, unit.dtype, unit.device)

        def all_gather(shard: Tensor) -> tuple[Tensor, Any]:
            sent = self.codec.pre_gather(shard)
            return sharers.all_gather(unit.name, sent, full if sent is shard else None)

        self.gathering = self.param.load("param", unit.device, all_gather)

    def gather(self) -> None:
        """Make the parameters whole, and new."""
        if self.full is not None:
            self.publish()
            return
        self.check_unchanged()
        if self.gathering is None:
            self.begin_gather()
        full, work = self.gathering.wait()
        work.wait()
        self.gathering = None
        self.point(self.codec.post_gather(full))

    def point(self, full: Tensor | None) -> None:
        """Point the parameters to ``full`` (numel,); None: to one element, which is NaN."""
        if full is not None and full is not self.viewed[0]:
            views = self.unit.views(full)
            self.viewed = full, views, self.places_of(views)
        to, views, places = self.released if full is None else self.viewed
        if self.is_partitioned:  # until the last has come: changed() sees to a Ctrl-C here
            self.full, self.places = None, []
        for param, view in zip(self.unit.params, views, strict=True):
            param.data = view
        self.full, self.places = to, places

    def places_of(self, params: Sequence[Tensor]) -> list[Any]:
        """Where parameters are; what is released has other strides."""
        strides = () if self.is_partitioned else map(Tensor.stride, params)
        return [*map(Tensor.data_ptr, params), *strides]

    def note_versions(self) -> None:
        """What is written to the parameters from now on is not in the shard."""
        self.versions = [*map(version_of, self.unit.params)]

    def release(self) -> None:
        """Free the full parameters, which keep their shape; below stage 3 they stay.

        Whoever has a view keeps the memory: what is released too early is not read wrong.
        """
        if not self.is_partitioned:
            return
        if self.gathering is not None:
            self.gather()
        self.point(None)
        if self.layout.sharers.size > 1 or not self.param.stays:
            self.viewed = self.released

    def give_back(self) -> None:
        """Make the parameters plain tensors, each with memory of its own."""
        self.gather()
        for param, view in zip(self.unit.params, self.viewed[1], strict=True):
            param.data = view.clone()

    def take_back(self) -> None:
        """Forget what users have written to the parameters."""
        self.point(self.full)
        self.note_versions()

    def check_unchanged(self) -> None:
        """RuntimeError if a parameter was changed at stage 3 where that is lost."""
        if changed := self.changed():
            self.take_back()
            raise RuntimeError(
                f"{self.unit.names[changed[0]]!r} was changed, and at stage 3 that is lost: change it "
                "within 'with zk.gather(params, write=True):'"
            )

    def changed(self) -> list[int]:
        """The parameters that were written to, or given other data, since the shard was alike."""
        if not self.places:
            self.point(None)
        params, before = self.unit.params, self.versions + self.places
        now = [*map(version_of, params), *self.places_of(params)]
        if now == before:
            return []
        pairs = enumerate(zip(now, before, strict=True))
        return sorted({number % len(params) for number, (new, old) in pairs if new != old})

    def absorb(self) -> None:
        """Take what users have written to full parameters into the shard and the masters."""
        self.wait()
        if self.full is None:
            self.check_unchanged()
            return
        changed, unit = self.changed(), self.unit
        for index in changed:
            unit.check(index)
        # all first: writing one makes all as the shard is
        values = {index: unit.params[index].detach().clone() for index in changed}
        for index, value in values.items():
            self.write("master" if unit.is_trained else "param", index, value)
        if changed:
            self.take_back()

    # ---- the optimizer: fetch -> update -> evict, publish ----------------------------------------

    def fetch(self, number: int) -> None:
        """Start to bring what the update of chunk ``number`` needs."""
        for chunk in (self.param, self.states[number], self.grad.chunks[number]):
            chunk.fetch()

    def update(self, number: int, step: Step) -> None:
        """Update chunk ``number``."""
        with self.open(number) as fields:
            self.apply(number, fields, step)

    def apply(self, number: int, fields: Fields, step: Step) -> None:
        """Update ``fields`` (a chunk's, or a copy) by the gradient of chunk ``number``."""
        grad = self.grad.chunks[number].open()["grad"]
        for run, index in self.runs(number):
            is_all = run == slice(0, len(grad))
            part = fields if is_all else {name: field[run] for name, field in fields.items()}
            options, count = step.options[id(self.groups[index])], self.steps[index] + 1
            factor = step.scale * self.grad.factors[index]
            self.rule.update(self.codec, part, grad[run], options, count, factor)
        self.grad.chunks[number].close(changed=False)

    def updated(self) -> None:
        """All chunks have been updated: count it, and drop the gradient."""
        pairs = zip(self.steps, self.grad.present, strict=True)
        self.steps = [step + present for step, present in pairs]
        self.is_updated, self.version = True, self.version + 1
        self.grad.drop()

    def publish(self) -> None:
        """Make full parameters new from every rank's updated shard; at stage 3 a gather does it."""
        self.wait()
        if self.is_updated:
            if self.gathering is not None:  # what they were before
                self.release()
            if self.full is not None:
                self.param.load("param", self.unit.device, self.renew).wait().wait()
            torch.autograd.graph.increment_version(self.unit.params)
            self.note_versions()
            self.is_updated = False

    def renew(self, shard: Tensor) -> Any:
        """Start to make the full parameters those of all ranks' shards."""
        mine = self.full[self.start : self.start + self.unit.shard_numel]
        if mine.data_ptr() != shard.data_ptr():
            mine.copy_(shard)
        return self.layout.sharers.all_gather(self.unit.name, mine, self.full)[1]

    def wait(self) -> None:
        """Wait for an update in the background; raises what went wrong in it."""
        if self.updating is not None:
            self.updating()
            self.updating = None

    @contextlib.contextmanager
    def open(self, number: int, changed: bool = True, kind: str = "") -> Iterator[Fields]:
        """The fields of chunk ``number``, "param" among them; of ``kind`` "grad" or "param": it."""
        for changing in self.layout.seams.changing if changed else ():
            changing(self, number)
        bound, own = self.bounds[number], {"grad": self.grad.chunks, "param": self.stateless}
        states, param = own.get(kind, self.states)[number], self.param.open(bound)["param"]
        near = param.to(states.device)
        yield states.open() | {"param": near}
        if changed and near is not param:  # parameters rest elsewhere than they are updated
            param.copy_(near)
        states.close(changed)
        self.param.close(changed, bound)

    def within(self, number: int, *indices: int) -> Iterator[tuple[int, slice, slice]]:
        """Parameters with elements in chunk ``number``, as ``Unit.within`` yields them."""
        bound = self.bounds[number]
        return self.unit.within(self.start + bound.start, self.start + bound.stop, *indices)

    def runs(self, number: int) -> list[tuple[slice, int]]:
        """Neighbours that are updated alike: their elements in chunk ``number``, and the first one.

        They are found anew only where gradients, factors or numbers of updates differ otherwise.
        """
        grad, first = self.grad, self.steps[0]
        alike = [*grad.present, *grad.factors, *[step - first for step in self.steps]]
        if alike != self.alike:
            self.alike, self.cuts = alike, [self.cut(n) for n in range(len(self.bounds))]
        return self.cuts[number]

    def cut(self, number: int) -> list[tuple[slice, int]]:
        """What ``runs`` returns."""
        groups, steps, factors = self.groups, self.steps, self.grad.factors
        present = [(i, here) for i, here, _ in self.within(number) if self.grad.present[i]]

        def alike(entry: tuple[int, tuple[int, slice]]) -> Any:
            ordinal, (index, _) = entry
            return index - ordinal, id(groups[index]), steps[index], factors[index]

        runs = [[*map(itemgetter(1), run)] for _, run in groupby(enumerate(present), alike)]
        return [(slice(run[0][1].start, run[-1][1].stop), run[0][0]) for run in runs]

    # ---- access: one parameter's values of a kind, on all ranks ----------------------------------

    @property
    def kinds(self) -> list[str]:
        """What ``read`` and ``write`` know of a parameter."""
        trained = ["grad", "master", *self.rule.names, *self.codec.fields] * self.unit.is_trained
        return list(dict.fromkeys(["param", *trained]))

    def read(self, kind: str, index: int) -> Tensor:
        """One parameter's "param", "grad", "master" or optimizer state, whole: a copy.

        A collective of the ranks that share it.
        """
        self.absorb()
        return self.grad.read(index) if kind == "grad" else self.whole(kind, index)

    def whole(self, kind: str, index: int) -> Tensor:
        """What chunks of all ranks hold of a parameter."""
        unit, sharers = self.unit, self.layout.sharers
        first, size, numel = unit.offsets[index], unit.sizes[index], unit.shard_numel
        # the most of it on one rank, and what ranks before this one have
        mine = torch.empty(min(size, numel), dtype=self.dtype_of(kind), device=unit.device)
        before = max(self.start - first, 0)
        for number, here, there in self.parts(index):
            with self.open(number, changed=False, kind=kind) as fields:
                part = {name: field[here] for name, field in fields.items()}
                value = part[kind] if kind in ("grad", "param") else self.codec.read(part, kind)
                mine[there.start - before : there.stop - before] = value
        rows, work = sharers.all_gather(unit.name, mine)
        work.wait()
        starts = range(0, unit.numel, numel)
        counts = [max(min(first + size, at + numel) - max(first, at), 0) for at in starts]
        pairs = zip(rows.view(len(counts), mine.numel()), counts, strict=True)
        flat = torch.cat([row[:count] for row, count in pairs])
        return flat.as_strided(unit.shapes[index], unit.strides[index])

    def dtype_of(self, kind: str) -> torch.dtype:
        """The dtype of what ``whole`` returns, on all ranks."""
        own = {"grad": torch.float32, "param": self.unit.dtype}.get(kind)
        return own or codec.dtype_of(self.codec.fields, kind)

    def parts(self, index: int) -> Iterator[tuple[int, slice, slice]]:
        """This rank's parts of a parameter: chunk, elements of the chunk, of the parameter."""
        for number in range(len(self.bounds)):
            for _, here, there in self.within(number, index):
                yield number, here, there

    @torch.no_grad()
    def write(self, kind: str, index: int, value: Tensor) -> None:
        """Overwrite what ``read`` reads with ``value``, whole. ``publish`` once all is written."""
        self.wait()
        value = value.expand(self.unit.shapes[index]).detach()
        if kind == "grad":
            self.grad.write(index, value)
            return
        flat = self.unit.flat(index, value)
        for number, here, there in self.parts(index):
            with self.open(number, kind=kind) as fields:
                if kind == "param":
                    fields["param"][here] = flat[there]
                else:
                    part = {name: field[here] for name, field in fields.items()}
                    self.codec.write(part, {kind: flat[there]})
        if kind in ("master", "param"):
            self.is_updated, self.version = True, self.version + 1
