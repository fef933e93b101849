"""UnitStore: all model states of one unit on this rank, one method for each arrow of the papers.

gather -> release             full parameters, around their use
collect -> reduce -> take     the gradient: flattened; mean over ranks; this rank's shard of it
update -> publish             the optimizer's arithmetic, chunk by chunk; then back to parameters
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from zk.kernels import codec, reference
from zk.next.checks import check_dense
from zk.next.memory import empty
from zk.next.offload.tiers import Fields
from zk.next.parallel.gradient import Left, is_here
from zk.next.precision import CASTABLE
from zk.next.promised import fill
from zk.next.unit import Unit
from zk.offload.cpu_adam import sum_of_squares

if TYPE_CHECKING:
    from zk.next.optimizer import Layout

CHUNK_NUMEL = 1 << 23  # elements that are fetched, updated and evicted at once


@dataclasses.dataclass(frozen=True)
class Step:
    """What one step applies to all units."""

    scale: float
    """The factor of gradients: clipping, and one over the loss scale."""
    options: dict[int, dict[str, Any]]
    """The param_groups as they were, by their id."""


@dataclasses.dataclass
class Gradient:
    """What is known of a unit's gradient beside its values."""

    present: list[bool]
    """Which parameters have one, on any rank."""
    factors: list[float]
    """What each is multiplied with when it is used or read."""
    squares: dict[tuple[int, int], Any]
    """(chunk, parameter) -> sum of squares of this rank's elements, without the factor."""
    local: Tensor | None = None
    """(numel,): collected on this rank, and not yet reduced."""
    is_taken: bool = False
    """This rank's shard of it is on its tier."""

    @classmethod
    def none(cls, count: int) -> Gradient:
        return cls([False] * count, [1.0] * count, {})

    def sum_of_squares(self, index: int | None = None) -> Any:
        """Of one parameter, or of all; a number, or a scalar tensor on a GPU."""
        chosen = (key for key in self.squares if index is None or key[1] == index)
        return sum(self.squares[key] * self.factors[key[1]] ** 2 for key in chosen)


class UnitStore:
    """One unit's model states on this rank.

    full     (numel,)   parameters of all ranks, while gathered; ``param.data`` are views of it
    param    (shard,)   this rank's parameters at rest, in one chunk
    grads    (shard,)   the reduced gradient, in chunks: of the unit's dtype, or fp32 sums of several
    states   (shard,)   what the rule keeps: masters, moments; in chunks
    """

    def __init__(self, unit: Unit, layout: Layout) -> None:
        self.unit, self.layout = unit, layout
        self.rule, self.codec = layout.rule_of(unit), layout.codec_of(unit)
        self.is_partitioned = layout.stage == 3
        self.full: Tensor | None = None
        self.views: list[Tensor] = []  # the parameters within ``views_of``
        self.views_of: Tensor | None = None
        self.gathering: Any = None  # the collective of a gather in flight
        self.updating: Callable[[], None] | None = None  # waits for an update in the background
        self.is_updated = False  # the shard is newer than the full parameters
        self.version = 0  # of the parameters: their number of updates
        self.written: list[int] = []  # torch's versions of them, when the shard was alike
        self.grad = Gradient.none(len(unit.params))
        self.num_grads = 0  # changes of the gradient, so far
        self.left: list[Left] = []  # what stands for gradients that have left
        self.steps = [0] * len(unit.params)
        self.groups = [layout.groups[param] for param in unit.params if unit.is_trained]
        self.start = layout.sharers.rank * unit.shard_numel
        sizes = range(0, unit.shard_numel, CHUNK_NUMEL)
        self.bounds = [slice(at, min(at + CHUNK_NUMEL, unit.shard_numel)) for at in sizes]
        self.place()

    def place(self) -> None:
        """Move the parameters to their tier, and make room for gradients and states."""
        unit, layout, numel = self.unit, self.layout, self.unit.shard_numel
        values = torch.zeros(unit.numel, dtype=unit.params[0].dtype, device=unit.device)
        fill(unit, values, layout.comm.rank == 0)
        is_cast = values.dtype in CASTABLE  # no backend sends the others
        layout.comm.broadcast(unit.name, values if is_cast else values.view(torch.uint8))
        full, mine = values.to(unit.dtype), slice(self.start, self.start + numel)
        self.param = layout.tier_of(unit, "param").chunks({"param": unit.dtype}, [numel])[0]
        self.param.put("param", full[mine].clone() if self.is_partitioned else full[mine])
        if unit.is_trained:
            tier = layout.tier_of(unit, "state")
            sizes = [bound.stop - bound.start for bound in self.bounds]
            self.grads = tier.chunks({"grad": torch.float32}, sizes)
            self.states = tier.chunks(self.codec.fields, sizes)
            for chunk, bound in zip(self.states, self.bounds, strict=True):
                param = full[mine][bound].to(chunk.device)
                self.codec.start(chunk.open() | {"param": param}, values[mine][bound].float())
                chunk.close(changed=True)
        nan = torch.full((), none_of(unit.dtype), dtype=unit.dtype, device=unit.device)
        self.released = [nan.expand(shape) for shape in unit.shapes]
        if self.is_partitioned:
            self.point(self.released)
        else:
            self.show(full)

    # ---- parameters: fetch -> gather -> release --------------------------------------------------

    def prefetch(self) -> None:
        """Start to bring the shard to memory."""
        if self.full is None and self.gathering is None:
            self.param.fetch()

    def begin_gather(self) -> None:
        """Start the collective that makes the parameters whole."""
        if self.full is None and self.gathering is None:
            self.publish()
            self.gathering = self.gathered()

    def gathered(self) -> Any:
        """Start to bring the shard, and then those of all ranks."""
        unit, sharers, full = self.unit, self.layout.sharers, None
        if sharers.size > 1:  # made here, as what follows the copy runs beside compute
            full = empty(unit.numel, unit.dtype, unit.device)

        def all_gather(shard: Tensor) -> tuple[Tensor, Any]:
            sent = self.codec.pre_gather(shard)
            return sharers.all_gather(unit.name, sent, full if sent is shard else None)

        return self.param.load("param", unit.device, all_gather)

    def gather(self) -> None:
        """Make the parameters whole, and new."""
        self.wait()
        if self.full is None:
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
        self.point(self.views)
        self.full = full

    def point(self, values: list[Tensor]) -> None:
        for param, value in zip(self.unit.params, values, strict=True):
            param.data = value
        self.note_versions()

    def note_versions(self) -> None:
        """What is written to the parameters from now on is not in the shard."""
        self.written = [param._version for param in self.unit.params]

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
        self.point(self.released)
        if self.layout.sharers.size > 1 or not self.param.stays:
            self.views_of, self.views = None, []
        self.full = None
        if changed:
            raise RuntimeError(
                f"{self.unit.names[changed[0]]!r} was changed in place while it was gathered, and at "
                "stage 3 that is lost: change it within 'with zk.gather(params, write=True):'"
            )

    def changed(self) -> list[int]:
        """The parameters that were written to since the shard was alike, by number."""
        pairs = enumerate(zip(self.unit.params, self.written, strict=True))
        return [index for index, (param, version) in pairs if param._version != version]

    @torch.no_grad()
    def absorb(self) -> None:
        """Take what users have written to full parameters into the shard and the masters."""
        for index in self.changed() if self.full is not None else ():
            value = self.unit.params[index].detach()
            if self.unit.is_trained:
                self.write("master", index, value.float())
            else:
                self.write("param", index, value)
        self.note_versions()

    # ---- gradients: collect -> reduce -> take ----------------------------------------------------

    def collect(self) -> None:
        """Flatten what is in ``param.grad``, and add it in fp32 to what was collected before."""
        unit, grad = self.unit, self.grad
        here = [param.grad if is_here(param.grad) else None for param in unit.params]
        check_dense(unit.names, here)
        dtype = unit.dtype if grad.local is None else torch.float32
        bucket = empty(unit.numel, dtype, unit.device)
        none = bucket[:0]
        flat = [none if g is None else unit.flat(i, g.detach()) for i, g in enumerate(here)]
        reference.unchecked("flatten", unit.device)(flat, bucket, unit.regions)
        grad.local = bucket if grad.local is None else bucket.add_(grad.local)
        grad.present = [old or new is not None for old, new in zip(grad.present, here, strict=True)]
        self.num_grads += 1

    def reduce(self, dtype: torch.dtype | None = None) -> None:
        """Reduce what is collected over ranks, in ``dtype`` or its own; take this rank's shard."""
        unit, layout = self.unit, self.layout
        self.wait()
        bucket, self.grad.local = self.grad.local, None
        if bucket is None:  # other ranks have some
            bucket = empty(unit.numel, unit.dtype, unit.device).zero_()
        if layout.comm.size > 1:
            bucket = bucket.to(dtype or unit.dtype)
        shard = layout.comm.reduce_scatter(unit.name, bucket)
        if layout.sharers.size < layout.comm.size:  # stage 0: every rank has all of it
            shard, work = layout.comm.all_gather(unit.name, shard)
            work.wait()
        self.take(shard)

    def take(self, shard: Tensor) -> None:
        """Keep ``shard`` (shard,) on its tier, or add it in fp32 to what is there."""
        grad = self.grad
        for number, (chunk, bound) in enumerate(zip(self.grads, self.bounds, strict=True)):
            values = shard[bound]
            if grad.is_taken:
                values = chunk.load("grad", values.device, in_fp32).wait().add_(values)
            self.sum_squares(number, values)
            chunk.put("grad", values)
        grad.is_taken = True
        self.num_grads += 1

    def sum_squares(self, number: int, values: Tensor) -> None:
        """Note the sums of squares of chunk ``number`` by parameter."""
        bound, threads = self.bounds[number], self.layout.num_threads
        for index, here, _ in self.unit.within(self.start + bound.start, self.start + bound.stop):
            self.grad.squares[number, index] = sum_of_squares(values[here], threads)

    def leave(self) -> None:
        """The gradients have left: put what stands for them into ``param.grad``."""
        marks = zip(self.unit.params, self.left, self.grad.present, strict=True)
        for param, left, is_present in marks:
            left.is_added = False
            param.grad = left if is_present else None

    def agree(self, present: list[bool]) -> None:
        """Take over which parameters have a gradient on any rank."""
        if present != self.grad.present:
            self.grad.present = present
            self.leave()

    def drop_removed(self) -> None:
        """Forget the gradients that users have removed from ``param.grad``, or replaced there."""
        grad, removed = self.grad, []
        for index, (param, left) in enumerate(zip(self.unit.params, self.left, strict=True)):
            if grad.present[index] and param.grad is not left and not left.is_added:
                removed.append(index)
        for index in removed:
            grad.present[index], grad.factors[index] = False, 1.0
            self.write("grad", index, torch.zeros(self.unit.shapes[index]))
        if removed and not any(grad.present):
            self.drop_grad()

    def drop_grad(self) -> None:
        """Free the gradient."""
        if self.grad.is_taken:
            for chunk in self.grads:
                chunk.drop()
        self.grad = Gradient.none(len(self.unit.params))

    # ---- the optimizer: fetch -> update -> evict, publish ----------------------------------------

    def fetch(self, number: int) -> None:
        """Start to bring what the update of chunk ``number`` needs."""
        for chunk in (self.param, self.states[number], self.grads[number]):
            chunk.fetch()

    def update(self, number: int, step: Step) -> None:
        """Update chunk ``number``."""
        with self.open(number) as fields:
            self.apply(number, fields, step)

    def apply(self, number: int, fields: Fields, step: Step) -> None:
        """Update ``fields`` (a chunk's, or a copy) by the gradient of chunk ``number``."""
        grad = self.grads[number].open()["grad"]
        for run, group, count, factor in self.runs(self.bounds[number]):
            part = {name: field[run] for name, field in fields.items()}
            options, scale = step.options[id(group)], step.scale * factor
            self.rule.update(self.codec, part, grad[run], options, count + 1, scale)
        self.grads[number].close(changed=False)

    def updated(self) -> None:
        """All chunks have been updated: count it, and drop the gradient."""
        pairs = zip(self.steps, self.grad.present, strict=True)
        self.steps = [step + present for step, present in pairs]
        self.is_updated, self.version = True, self.version + 1
        self.drop_grad()

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
        assert self.full is not None
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
        for number, bound in enumerate(self.bounds):
            with self.open(number, changed) as fields:
                yield number, bound, fields

    def runs(self, bound: slice) -> Iterator[tuple[slice, dict[str, Any], int, float]]:
        """Neighbours that are updated alike, within ``bound`` of the shard.

        Yields:
            elements from the bound's start on, group, number of updates so far, factor.
        """
        run: tuple[slice, dict[str, Any], int, float] | None = None
        last = -1
        for index, place, _ in self.unit.within(self.start + bound.start, self.start + bound.stop):
            if not self.grad.present[index]:
                continue
            alike = self.groups[index], self.steps[index], self.grad.factors[index]
            joins = (
                run is not None
                and last == index - 1
                and run[1] is alike[0]
                and run[2:] == alike[1:]
            )
            if run is not None and not joins:
                yield run
            run, last = (slice(run[0].start if joins else place.start, place.stop), *alike), index
        if run is not None:
            yield run

    # ---- access: one parameter's values of a kind, on all ranks ----------------------------------

    @property
    def kinds(self) -> list[str]:
        """What ``read`` and ``write`` know of a parameter."""
        return ["param", "grad", "master", *self.rule.names] if self.unit.is_trained else ["param"]

    def read(self, kind: str, index: int) -> Tensor:
        """One parameter's "param", "grad", "master" or optimizer state, whole: a copy on its device.

        A collective of the ranks that share it.
        """
        self.wait()
        unit = self.unit
        if kind == "grad" and self.grad.local is not None:
            return unit.views(self.grad.local)[index].to(unit.dtype, copy=True)
        parts = [self.part(kind, number, here) for number, here, _ in self.parts(index)]
        mine = torch.cat(parts) if parts else torch.empty(0, dtype=self.dtype_of(kind))
        flat = self.of_all_ranks(index, mine.to(unit.device))
        return flat.as_strided(unit.shapes[index], unit.strides[index])

    def of_all_ranks(self, index: int, mine: Tensor) -> Tensor:
        """(size,): a parameter's values, of which this rank has ``mine``."""
        unit, sharers = self.unit, self.layout.sharers
        if sharers.size == 1:
            return mine
        first, stop, numel = (
            unit.offsets[index],
            unit.offsets[index] + unit.sizes[index],
            unit.shard_numel,
        )
        most = min(unit.sizes[index], numel)  # of it on one rank
        padded = mine.new_zeros(most)
        padded[: mine.numel()] = mine
        rows, work = sharers.all_gather(unit.name, padded)
        work.wait()
        counts = [min(stop, at + numel) - max(first, at) for at in range(0, unit.numel, numel)]
        return torch.cat(
            [row[: max(n, 0)] for row, n in zip(rows.view(-1, most), counts, strict=True)]
        )

    def parts(self, index: int) -> Iterator[tuple[int, slice, slice]]:
        """This rank's parts of a parameter: chunk, elements of the chunk, of the parameter."""
        for number, bound in enumerate(self.bounds):
            within = self.unit.within(self.start + bound.start, self.start + bound.stop)
            yield from ((number, here, there) for found, here, there in within if found == index)

    def part(self, kind: str, number: int, here: slice) -> Tensor:
        """A copy of some elements of chunk ``number``."""
        if kind == "grad":
            values = self.grads[number].open()["grad"][here].clone()
            self.grads[number].close(changed=False)
            return values
        if kind == "param":
            values = self.param.open(self.bounds[number])["param"][here].clone()
            self.param.close(False, self.bounds[number])
            return values
        with self.open(number, changed=False) as fields:
            return self.codec.read(
                {name: field[here] for name, field in fields.items()}, kind
            ).clone()

    @torch.no_grad()
    def write(self, kind: str, index: int, value: Tensor) -> None:
        """Overwrite what ``read`` reads with ``value``, whole. ``publish`` once all is written."""
        self.wait()
        flat = self.unit.flat(index, value.expand(self.unit.shapes[index]).detach())
        if kind == "grad" and self.grad.local is not None:
            self.unit.views(self.grad.local)[index].copy_(value)
        for number, here, there in self.parts(index):
            if kind == "grad":
                self.write_grad(number, here, flat[there])
            elif kind == "param":
                self.param.open(self.bounds[number])["param"][here] = flat[there]
                self.param.close(True, self.bounds[number])
            else:
                with self.open(number) as fields:
                    part = {name: field[here] for name, field in fields.items()}
                    self.codec.write(part, {kind: flat[there]})
        self.num_grads += kind == "grad"
        if kind in ("master", "param"):
            self.is_updated, self.version = True, self.version + 1

    def write_grad(self, number: int, here: slice, values: Tensor) -> None:
        grad = self.grads[number].open()["grad"]
        grad[here] = values.to(grad)
        self.sum_squares(number, grad)
        self.grads[number].close(changed=True)

    def dtype_of(self, kind: str) -> torch.dtype:
        """The dtype of what ``read`` returns."""
        if kind in ("grad", "param"):
            return self.unit.dtype
        return codec.dtype_of(self.codec.fields | {"param": self.unit.dtype}, kind)


def none_of(dtype: torch.dtype) -> float:
    """What a released parameter reads as: NaN, or the largest of integers."""
    return torch.nan if dtype.is_floating_point or dtype.is_complex else torch.iinfo(dtype).max


def in_fp32(values: Tensor) -> Tensor:
    """``values`` (n,) themselves, or in memory that is used again."""
    if values.dtype == torch.float32:
        return values
    return empty(values.numel(), torch.float32, values.device).copy_(values)
