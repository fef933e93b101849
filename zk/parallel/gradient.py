"""Gradient: one unit's gradient, from ``param.grad`` to this rank's shard of the mean over ranks.

collect -> reduce -> take     flattened on this rank; mean over ranks; the shard on its tier
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from zk.checks import check_dense
from zk.kernels import reference
from zk.memory import empty
from zk.offload.cpu_adam import sum_of_squares
from zk.parallel.left import Left, in_backward

if TYPE_CHECKING:
    from zk.offload.tiers import Chunk
    from zk.store import UnitStore

ALL = -1  # parameters of a chunk


class Gradient:
    """The values of one unit's gradient, and what is known beside them.

    local      (numel,)  collected on this rank, and not yet reduced
    chunks     (shard,)  reduced: in the unit's dtype, or as an fp32 sum of several
    """

    def __init__(self, store: UnitStore, chunks: list[Chunk]) -> None:
        self.store, self.unit, self.layout, self.chunks = store, store.unit, store.layout, chunks
        self.me = weakref.ref(self)
        self.sums_each = False  # sums of squares are asked for by parameter
        self.is_taken = False  # this rank's shard is on its tier
        self.drop()

    def drop(self) -> None:
        """Free the values, which were used or are not wanted, and begin without a gradient."""
        for chunk in self.chunks if self.is_taken else ():
            chunk.drop()
        count = len(self.unit.params)
        self.is_taken = False
        self.present = [False] * count  # which parameters have one, on any rank
        self.factors = [1.0] * count  # what each is multiplied with when it is used or read
        self.scale = 1.0  # the loss scale that values have
        # of each chunk: parameter or ALL -> sum of squares of elements, without the factor
        self.squares: list[dict[int, Any]] = [{} for _ in self.chunks]
        self.local: Tensor | None = None
        self.marks: list[Left | None] = [None] * count  # what stands for them in ``param.grad``
        self.added: set[int] = set()  # autograd has put there what is to be added

    # ---- collect -> reduce -> take ---------------------------------------------------------------

    def collect(self, scale: float) -> None:
        """Take what is new in ``param.grad``, under a loss ``scale``; add it in fp32 to what is here.

        What users have removed there, or replaced, is forgotten.
        """
        unit, here = self.unit, self.look()
        if here.count(None) == len(here):
            return
        check_dense(unit.names, here)
        if any(self.present):
            self.settle()
        else:
            self.scale = scale
        is_sum = self.local is not None or self.scale != scale
        bucket = empty(unit.numel, torch.float32 if is_sum else unit.dtype, unit.device)
        none = bucket.new_empty(0, dtype=unit.dtype)  # as the others
        flat = [none if g is None else unit.flat(i, g.detach()) for i, g in enumerate(here)]
        reference.unchecked("flatten", unit.device)(flat, bucket, unit.regions)
        if self.scale != scale:
            bucket.mul_(self.scale / scale)
        self.local = bucket if self.local is None else bucket.add_(self.local)
        self.present = [old or new is not None for old, new in zip(self.present, here, strict=True)]
        self.leave()

    def look(self) -> list[Tensor | None]:
        """What is new in ``param.grad``; gradients that are not there any more are forgotten."""
        here = [param.grad for param in self.unit.params]
        pairs, added = enumerate(zip(here, self.marks, strict=True)), self.added
        removed = [i for i, (g, mark) in pairs if g is not mark is not None and i not in added]
        for index in removed:
            self.present[index], self.marks[index] = False, None
            self.write(index, torch.zeros(self.unit.shapes[index]))
        if removed and not any(self.present):
            self.drop()
        return [None if isinstance(grad, Left) else grad for grad in here]

    def settle(self) -> None:
        """Multiply values by the factors that were noted: others are about to be added."""
        for index, factor in [(i, f) for i, f in enumerate(self.factors) if f != 1.0]:
            if self.local is not None:
                self.unit.views(self.local)[index].mul_(factor)
            for number, here, _ in self.parts(index):
                self.chunks[number].open()["grad"][here].mul_(factor)
                self.chunks[number].close(changed=True)
            self.factors[index] = 1.0

    def reduce(self, dtype: torch.dtype | None = None, scale: float | None = None) -> None:
        """Reduce what is collected over ranks; take this rank's shard.

        Several ranks agree on a ``dtype``, if not the unit's, and on the loss ``scale``.
        """
        unit, layout = self.unit, self.layout
        bucket, self.local = self.local, None
        if bucket is None:  # other ranks have some
            bucket = empty(unit.numel, unit.dtype, unit.device).zero_()
        if layout.comm.size > 1:
            bucket = bucket.to(dtype or unit.dtype)
        if scale not in (None, self.scale) and not self.is_taken:
            bucket, self.scale = bucket.mul_(scale / self.scale), scale
        shard = layout.comm.reduce_scatter(unit.name, bucket)
        if layout.sharers.size < layout.comm.size:  # stage 0: every rank has all of it
            shard, work = layout.comm.all_gather(unit.name, shard)
            work.wait()
        self.take(shard)

    def take(self, shard: Tensor) -> None:
        """Keep ``shard`` (shard,) on its tier, or add it in fp32 to what is there."""
        for number, (chunk, bound) in enumerate(zip(self.chunks, self.store.bounds, strict=True)):
            values = shard[bound]
            if self.is_taken:
                values = chunk.load("grad", values.device, in_fp32).wait().add_(values)
            self.sum_squares(number, values)
            chunk.put("grad", values)
        self.is_taken = True

    def sum_squares(self, number: int, values: Tensor) -> None:
        """Note the sum of squares of chunk ``number``, or of each parameter in it."""
        places = [(ALL, slice(None))]
        if self.sums_each:
            places = [(index, here) for index, here, _ in self.store.within(number)]
        threads = self.layout.num_threads
        self.squares[number] = {i: sum_of_squares(values[here], threads) for i, here in places}

    def sum_of_squares(self, index: int | None = None) -> Any:
        """Of one parameter, or of all; a number, or a scalar tensor on a GPU."""
        is_alike = index is None and len(set(self.factors)) == 1
        if not is_alike and not self.sums_each:  # from now on
            self.sums_each = True
            for number, chunk in enumerate(self.chunks if self.is_taken else ()):
                self.sum_squares(number, chunk.open()["grad"])
                chunk.close(changed=False)
        return sum(
            squares * (self.factors[max(i, 0)] / self.scale) ** 2
            for each in self.squares
            for i, squares in each.items()
            if index in (None, i)
        )

    # ---- param.grad ------------------------------------------------------------------------------

    def leave(self) -> None:
        """The gradients have left: put what stands for them into ``param.grad``."""
        marks = self.marks
        for index, (param, present) in enumerate(zip(self.unit.params, self.present, strict=True)):
            if present and marks[index] is None:
                marks[index] = Left(self, index, object())
            param.grad = marks[index]
        self.added.clear()

    def agree(self, present: list[bool]) -> None:
        """Take over which parameters have a gradient on any rank."""
        if present != self.present:
            self.present = present
            self.leave()

    # ---- access ----------------------------------------------------------------------------------

    def read(self, index: int) -> Tensor:
        """One parameter's gradient, whole, without the loss scale: a copy in its dtype.

        A collective of the ranks; in backward, what is not yet reduced is this rank's.
        """
        self.meet()
        if not self.present[index]:
            raise ValueError(
                f"{self.unit.names[index]!r} has no gradient: no backward() has given it one, or step() "
                "or zero_grad() came after it"
            )
        whole = self.store.whole("grad", index) if self.is_taken else torch.zeros(())
        if self.local is not None:
            whole = whole + self.unit.views(self.local)[index].float()
        return (whole * (self.factors[index] / self.scale)).to(self.unit.dtype)

    def meet(self) -> None:
        """Reduce what is on this rank, as all ranks look at gradients together (stage 1, no_sync)."""
        if self.local is not None and self.layout.comm.size > 1 and not in_backward():
            self.layout.reducer.settle()

    def write(self, index: int, value: Tensor) -> None:
        """Make ``value`` one parameter's gradient: it is the same on all ranks."""
        self.factors[index] = 1.0
        value = value.to(self.unit.device).float() * self.scale
        if self.local is not None:
            self.unit.views(self.local)[index].copy_(value)
            value = torch.zeros_like(value)
        flat = self.unit.flat(index, value)
        for number, here, there in self.parts(index):
            grad = self.chunks[number].open()["grad"]
            grad[here] = flat[there].to(grad)
            self.sum_squares(number, grad)
            self.chunks[number].close(changed=True)

    def parts(self, index: int) -> Iterable[tuple[int, slice, slice]]:
        """As the store's, of what is on its tier."""
        return self.store.parts(index) if self.is_taken else ()

    def zero(self, index: int) -> None:
        """Make one parameter's gradient zeros: a step with them is a step."""
        self.look()
        if not any(self.present):
            self.local = empty(self.unit.numel, self.unit.dtype, self.unit.device).zero_()
        self.present[index] = True
        self.write(index, torch.zeros(self.unit.shapes[index]))
        self.leave()


def in_fp32(values: Tensor) -> Tensor:
    """``values`` (n,) themselves, or in memory that is used again."""
    if values.dtype == torch.float32:
        return values
    return empty(values.numel(), torch.float32, values.device).copy_(values)
