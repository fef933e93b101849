"""UnitStore: all model states of one unit on this rank, one method for each arrow of the papers.

gather -> release     full parameters, around their use
update -> publish     the optimizer's arithmetic, chunk by chunk; then back to parameters
read, write           one parameter's values of a kind, whole

Its gradient is in parallel/gradient.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from zk.kernels import codec
from zk.memory import empty
from zk.offload.tiers import Chunk, Fields
from zk.parallel.gradient import Gradient
from zk.precision import CASTABLE
from zk.promised import fill
from zk.unit import Unit

if TYPE_CHECKING:
    from zk.optimizer import Layout
    from zk.parallel.comm import Comm

CHUNK_NUMEL = 1 << 23  # elements that are fetched, updated and evicted at once


@dataclasses.dataclass(frozen=True)
class Step:
    """What one step applies to all units."""

    scale: float
    """The factor of gradients: clipping."""
    options: dict[int, dict[str, Any]]
    """The param_groups as they were, by their id."""


class UnitStore:
    """One unit's model states on this rank.

    full     (numel,)   parameters of all ranks, while gathered; ``param.data`` are views of it
    param    (shard,)   this rank's parameters at rest, in one chunk
    states   (shard,)   what the rule keeps: masters, moments; in chunks
    grad                the unit's gradient
    """

    def __init__(self, unit: Unit, layout: Layout) -> None:
        self.unit, self.layout = unit, layout
        self.rule, self.codec = layout.rule_of(unit), layout.codec_of(unit)
        self.is_partitioned = layout.stage == 3
        self.full: Any = None
        self.views: list[Tensor] = []  # the parameters within ``views_of``
        self.views_of: Tensor | None = None
        self.gathering: Any = None  # the collective of a gather in flight
        self.updating: Callable[[], None] | None = None  # waits for an update in the background
        self.is_updated = False  # the shard is newer than the full parameters
        self.version = 0  # of the parameters: their number of updates
        # of the parameters, when the shard was alike: torch's versions, and where their data is
        self.versions: list[int] = []
        self.pointers: list[int] = []
        self.steps = [0] * len(unit.params)
        self.groups = [layout.groups[param] for param in unit.params if unit.is_trained]
        self.start = layout.sharers.rank * unit.shard_numel
        step = CHUNK_NUMEL
        if unit.is_trained:
            step = min(step, layout.tier_of(unit, "state").chunk_numel)
        starts = range(0, unit.shard_numel, step)
        self.bounds = [slice(at, min(at + step, unit.shard_numel)) for at in starts]
        with layout.comm.together(f"taking over {unit.name!r}"):
            values = empty(unit.numel, unit.params[0].dtype, unit.device).zero_()
            fill(unit, values, layout.comm.rank == 0)
        is_cast = values.dtype in CASTABLE  # no backend sends the others
        layout.comm.broadcast(unit.name, values if is_cast else values.view(torch.uint8))
        with layout.comm.together(f"placing {unit.name!r}"):
            full = self.place(values)
        nan = torch.full((), none_of(unit.dtype), dtype=unit.dtype, device=unit.device)
        self.released = [nan.expand(shape) for shape in unit.shapes]
        self.released_pointers = [nan.data_ptr()] * len(unit.params)
        self.note_versions()
        if self.is_partitioned:
            self.point(self.released, self.released_pointers)
        else:
            self.show(full)

    def place(self, values: Tensor) -> Tensor:
        """The full parameters, once this rank's are on their tier, with room for what trains them."""
        unit, layout, numel = self.unit, self.layout, self.unit.shard_numel
        full, mine = values, slice(self.start, self.start + numel)
        if values.dtype != unit.dtype:
            full = empty(unit.numel, unit.dtype, unit.device).copy_(values)
        self.param = layout.tier_of(unit, "param").chunks({"param": unit.dtype}, [numel])[0]
        is_part = self.is_partitioned and layout.sharers.size > 1
        self.param.put("param", full[mine].clone() if is_part else full[mine])
        grads: list[Chunk] = []
        self.states: list[Chunk] = []
        if unit.is_trained:
            tier, sizes = layout.tier_of(unit, "state"), [b.stop - b.start for b in self.bounds]
            grads, self.states = (
                tier.chunks(dtypes, sizes)
                for dtypes in ({"grad": torch.float32}, self.codec.fields)
            )
        self.grad = Gradient(self, grads)
        for chunk, bound in zip(self.states, self.bounds, strict=False):
            param = full[mine][bound].to(chunk.device, copy=True)
            self.codec.start(chunk.open() | {"param": param}, values[mine][bound].float())
            chunk.close(changed=True)
        return full

    # ---- parameters: fetch -> gather -> release --------------------------------------------------

    def prefetch(self) -> None:
        """Start to bring the shard to memory."""
        if self.full is None and self.gathering is None:
            self.param.fetch()

    def begin_gather(self) -> None:
        """Start the collective that makes the parameters whole."""
        if self.full is None and self.gathering is None:
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
        self.wait()
        if self.full is None:
            self.refuse(self.changed(), "while it was released")
            self.begin_gather()
            full, work = self.gathering.wait()
            work.wait()
            self.gathering = None
            self.show(self.codec.post_gather(full))
        elif self.is_updated:
            self.publish()

    def show(self, full: Tensor) -> None:
        """Point the parameters to ``full`` (numel,)."""
        if self.views_of is not full:
            self.views_of, self.views = full, self.unit.views(full)
            self.full_pointers = [view.data_ptr() for view in self.views]
        self.point(self.views, self.full_pointers)
        self.full = full

    def point(self, values: list[Tensor], pointers: list[int]) -> None:
        for param, value in zip(self.unit.params, values, strict=True):
            param.data = value
        self.pointers = pointers

    def take_back(self) -> None:
        """Point the parameters to where they are, and forget what users have written."""
        is_full = self.full is not None
        self.point(
            self.views if is_full else self.released,
            self.full_pointers if is_full else self.released_pointers,
        )
        self.note_versions()

    def note_versions(self) -> None:
        """What is written to the parameters from now on is not in the shard."""
        self.versions = [param._version for param in self.unit.params]

    def release(self) -> None:
        """Free the full parameters. They keep their shape, in one element of memory that is NaN.

        Whoever has a view keeps the memory: what is released too early is not read wrong.
        """
        if not self.is_partitioned:
            return
        if self.gathering is not None:
            self.gather()
        if self.full is None:
            return
        changed = self.changed()
        self.point(self.released, self.released_pointers)
        if self.layout.sharers.size > 1 or not self.param.stays:
            self.views_of, self.views = None, []
        self.full = None
        self.refuse(changed, "while it was gathered to be read")

    def give_back(self) -> None:
        """Make the parameters plain tensors, each with memory of its own."""
        self.gather()
        for param, view in zip(self.unit.params, self.views, strict=True):
            param.data = view.clone()

    def refuse(self, changed: list[int], when: str) -> None:
        """RuntimeError if a parameter was changed at stage 3 where that would be lost."""
        if changed:
            self.take_back()
            raise RuntimeError(
                f"{self.unit.names[changed[0]]!r} was changed {when}, and at stage 3 that is lost: "
                "change it within 'with zk.gather(params, write=True):'"
            )

    def changed(self) -> list[int]:
        """The parameters that were written to, or given other data, since the shard was alike."""
        params = self.unit.params
        same = [p._version for p in params] == self.versions
        same = same and [p.data_ptr() for p in params] == self.pointers
        # what is released has other strides
        if same and (self.is_partitioned or [p.stride() for p in params] == self.unit.strides):
            return []
        alike = zip(self.versions, self.pointers, self.unit.strides, strict=True)
        return [
            index
            for index, (p, (version, pointer, stride)) in enumerate(zip(params, alike, strict=True))
            if (p._version, p.data_ptr()) != (version, pointer) or p.stride() != stride
        ]

    @torch.no_grad()
    def absorb(self) -> None:
        """Take what users have written to full parameters into the shard and the masters."""
        changed = self.changed() if self.full is not None else []
        values = {}
        for index in changed:
            param = self.unit.params[index]
            if param.shape != self.unit.shapes[index] or param.dtype != self.unit.dtype:
                raise RuntimeError(
                    f"{self.unit.names[index]!r} was moved or converted after its ZeroOptimizer was "
                    "made: change the model first, then make the optimizer (dtype= casts it)"
                )
            # all first: writing one makes all as the shard is
            values[index] = param.detach().clone()
        for index, value in values.items():
            if self.unit.is_trained:
                self.write("master", index, value.float())
            else:
                self.write("param", index, value)
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
        grad, scale = self.grad.chunks[number].open()["grad"], step.scale / self.grad.scale
        for run, group, count, factor in self.runs(number):
            part = {name: field[run] for name, field in fields.items()}
            options = step.options[id(group)]
            self.rule.update(self.codec, part, grad[run], options, count + 1, scale * factor)
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
        if self.is_updated and self.full is not None:
            self.param.load("param", self.unit.device, self.renew).wait().wait()
        if self.is_updated:
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
    def open(self, number: int, changed: bool = True) -> Iterator[Fields]:
        """The fields of chunk ``number``, parameters among them."""
        for changing in self.layout.seams.changing if changed else ():
            changing(self, number)
        bound, states = self.bounds[number], self.states[number]
        param = self.param.open(bound)["param"]
        near = param.to(states.device)
        yield states.open() | {"param": near}
        if changed and near is not param:  # parameters rest elsewhere than they are updated
            param.copy_(near)
        states.close(changed)
        self.param.close(changed, bound)

    def opened(self, changed: bool = True) -> Iterator[tuple[int, slice, Fields]]:
        for number, bound in enumerate(self.bounds if self.states else ()):
            with self.open(number, changed) as fields:
                yield number, bound, fields

    def within(self, number: int) -> Iterator[tuple[int, slice, slice]]:
        """Parameters with elements in chunk ``number``, as ``Unit.within`` yields them."""
        bound = self.bounds[number]
        return self.unit.within(self.start + bound.start, self.start + bound.stop)

    def runs(self, number: int) -> Iterator[tuple[slice, dict[str, Any], int, float]]:
        """Neighbours that are updated alike, within chunk ``number``.

        Yields:
            elements from the chunk's start on, group, number of updates so far, factor.
        """
        groups, steps, factors = self.groups, self.steps, self.grad.factors
        present = [(i, place) for i, place, _ in self.within(number) if self.grad.present[i]]

        def alike(entry: tuple[int, tuple[int, slice]]) -> Any:
            ordinal, (index, _) = entry
            return index - ordinal, id(groups[index]), steps[index], factors[index]

        for _, run in itertools.groupby(enumerate(present), alike):
            found = [place for _, place in run]
            index, last = found[0][0], found[-1][1]
            yield slice(found[0][1].start, last.stop), groups[index], steps[index], factors[index]

    # ---- access: one parameter's values of a kind, on all ranks ----------------------------------

    @property
    def kinds(self) -> list[str]:
        """What ``read`` and ``write`` know of a parameter."""
        if not self.unit.is_trained:
            return ["param"]
        return list(
            dict.fromkeys(["param", "grad", "master", *self.rule.names, *self.codec.fields])
        )

    def read(self, kind: str, index: int) -> Tensor:
        """One parameter's "param", "grad", "master" or optimizer state, whole: a copy on its device.

        A collective of the ranks that share it.
        """
        self.wait()
        self.absorb()
        return self.grad.read(index) if kind == "grad" else self.whole(kind, index)

    def whole(self, kind: str, index: int) -> Tensor:
        """What chunks of all ranks hold of a parameter."""
        unit = self.unit
        parts = [self.part(kind, number, here) for number, here, _ in self.parts(index)]
        mine = torch.cat(parts) if parts else torch.empty(0)
        flat = of_all_ranks(
            unit, self.layout.sharers, index, mine.to(unit.device, self.dtype_of(kind))
        )
        return flat.as_strided(unit.shapes[index], unit.strides[index])

    def parts(self, index: int) -> Iterator[tuple[int, slice, slice]]:
        """This rank's parts of a parameter: chunk, elements of the chunk, of the parameter."""
        for number in range(len(self.bounds)):
            for found, here, there in self.within(number):
                if found == index:
                    yield number, here, there

    def part(self, kind: str, number: int, here: slice) -> Tensor:
        """A copy of some elements of chunk ``number``."""
        if kind == "grad":
            values = self.grad.chunks[number].open()["grad"][here].clone()
            self.grad.chunks[number].close(changed=False)
            return values
        if kind == "param":
            values = self.param.open(self.bounds[number])["param"][here].clone()
            self.param.close(False, self.bounds[number])
            return values
        with self.open(number, changed=False) as fields:
            part = {name: field[here] for name, field in fields.items()}
            return self.codec.read(part, kind).clone()

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
            if kind == "param":
                for changing in self.layout.seams.changing:
                    changing(self, number)
                self.param.open(self.bounds[number])["param"][here] = flat[there]
                self.param.close(True, self.bounds[number])
            else:
                with self.open(number) as fields:
                    part = {name: field[here] for name, field in fields.items()}
                    self.codec.write(part, {kind: flat[there]})
        if kind in ("master", "param"):
            self.is_updated, self.version = True, self.version + 1

    def dtype_of(self, kind: str) -> torch.dtype:
        """The dtype of what ``whole`` returns, on all ranks."""
        if kind in ("grad", "param"):
            return torch.float32 if kind == "grad" else self.unit.dtype
        return codec.dtype_of({**self.codec.fields, "param": self.unit.dtype}, kind)


def none_of(dtype: torch.dtype) -> float:
    """What a released parameter reads as: NaN, or the largest of integers."""
    return torch.nan if dtype.is_floating_point or dtype.is_complex else torch.iinfo(dtype).max


def of_all_ranks(unit: Unit, sharers: Comm, index: int, mine: Tensor) -> Tensor:
    """(size,): a parameter's values, of which this rank has ``mine``."""
    if sharers.size == 1:
        return mine
    first, size, numel = unit.offsets[index], unit.sizes[index], unit.shard_numel
    padded = mine.new_zeros(min(size, numel))  # the most of it on one rank
    padded[: mine.numel()] = mine
    rows, work = sharers.all_gather(unit.name, padded)
    work.wait()
    starts = range(0, unit.numel, numel)
    counts = [max(min(first + size, at + numel) - max(first, at), 0) for at in starts]
    pairs = zip(rows.view(len(counts), -1), counts, strict=True)
    return torch.cat([row[:count] for row, count in pairs])
