"""Gradient: one unit's gradient, from ``param.grad`` to this rank's shard of the mean over ranks.

collect -> reduce -> take     flattened on this rank; mean over ranks; the shard on its tier
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from zk.kernels import reference
from zk.memory import empty
from zk.offload.cpu_adam import sum_of_squares

if TYPE_CHECKING:
    from zk.offload.tiers import Chunk
    from zk.store import UnitStore

ALL = -1  # parameters of a chunk


class Gradient:
    """The values of one unit's gradient, and what is known beside them. They have the loss scale.

    local      (numel,)  collected on this rank, and not yet reduced
    chunks     (shard,)  reduced: in the unit's dtype, or as an fp32 sum of several
    """

    def __init__(self, store: UnitStore, chunks: list[Chunk]):
        self.store, self.unit, self.layout, self.chunks = store, store.unit, store.layout, chunks
        self.me = weakref.ref(self)
        self.none = torch.empty(0, dtype=self.unit.dtype, device=self.unit.device)
        self.sums_each = False  # sums of squares are asked for by parameter
        self.is_taken = False  # this rank's shard is on its tier
        self.drop()

    def drop(self) -> None:
        """Free the values, which were used or are not wanted, and begin without a gradient."""
        for chunk in self.chunks:
            chunk.drop()
        count = len(self.unit.params)
        self.is_taken = False
        self.present = [False] * count  # which parameters have one, on any rank
        self.factors = [1.0] * count  # what each is multiplied with when it is used or read
        # of each chunk: parameter or ALL -> sum of squares of elements, without the factor
        self.squares: list[dict[int, Any]] = [{} for _ in self.chunks]
        self.local: Tensor | None = None
        self.marks: list[Left | None] = [None] * count  # what stands for them in ``param.grad``
        self.added = dict[int, Tensor]()  # what autograd has put there, to be added

    @property
    def scale(self) -> float:
        return self.layout.reducer.scaler.scale

    # ---- collect -> reduce -> take ---------------------------------------------------------------

    def collect(self, passes: bool = True) -> None:
        """Take what is new in ``param.grad``, in the unit's dtype; add it in fp32 to what is here."""
        self.store.wait()  # an update in flight uses what is here
        unit, new = self.unit, self.look(passes)
        if not new:
            return
        self.settle()
        missing = self.scale / self.layout.reducer.loss_scale  # a factor of what users have assigned
        if self.local is None:
            self.local = empty(unit.numel, unit.dtype, unit.device)
            flat = [self.none] * len(unit.params)
            for index, grad in new.items():
                flat[index] = unit.flat(index, grad)
            reference.unchecked("flatten", unit.device)(flat, self.local, unit.regions)
            if missing != 1.0:
                self.local = in_fp32(self.local).mul_(missing)
        else:
            self.local = in_fp32(self.local)
            views = unit.views(self.local)
            for index, grad in new.items():
                views[index].add_(grad, alpha=missing)
        self.leave([old or index in new for index, old in enumerate(self.present)])

    def look(self, passes: bool) -> dict[int, Tensor]:
        """What is new in ``param.grad``; what users have removed there, or replaced, is forgotten."""
        new, removed, stale = dict[int, Tensor](), [], None
        for index, (param, mark) in enumerate(zip(self.unit.params, self.marks, strict=True)):
            grad = param.grad
            if grad is mark:
                continue
            if isinstance(grad, Left):
                stale = grad.gone()
                continue
            if grad is not None and grad.layout is not torch.strided:
                raise TypeError(
                    f"the gradient of {self.unit.names[index]!r} is sparse, and zk reduces dense "
                    "ones: use sparse=False"
                )
            if grad is not None:
                new[index] = grad.detach()
            if mark is not None and (grad is None or grad is not self.added.get(index)):
                removed.append(index)
        if stale and (new or not passes):  # backward passes by what is frozen since its step
            raise stale
        for index in removed:
            self.present[index], self.marks[index] = False, None
        if removed and not any(self.present):
            self.drop()
        for index in removed if self.is_taken or self.local is not None else ():
            self.write(index, torch.zeros(self.unit.shapes[index]))
        return new

    def settle(self) -> None:
        """Multiply values by the factors that were noted: others are about to be added."""
        for index, factor in enumerate(self.factors):
            for piece, _ in self.pieces(index) if factor != 1.0 else ():
                piece.mul_(factor)
            self.factors[index] = 1.0

    def reduce(self, dtype: torch.dtype | None) -> None:
        """Reduce what is collected over ranks, which agree on a ``dtype``; take this rank's shard."""
        unit, comm, sharers = self.unit, self.layout.comm, self.layout.sharers
        self.settle()  # a rank may have noted factors that others have not
        bucket, self.local = self.local, None
        if bucket is None:  # other ranks have some
            bucket = empty(unit.numel, unit.dtype, unit.device).zero_()
        if comm.size > 1:
            bucket = bucket.to(dtype or unit.dtype)
        shard = comm.reduce_scatter(unit.name, bucket)
        if sharers.size < comm.size:  # stage 0: every rank has all of it
            shard, work = comm.all_gather(unit.name, shard)
            work.wait()
        self.take(shard)

    def take(self, shard: Tensor) -> None:
        """Keep ``shard`` (shard,) on its tier, or add it in fp32 to what is there."""
        for number, (chunk, bound) in enumerate(zip(self.chunks, self.store.bounds, strict=True)):
            values = shard if len(self.chunks) == 1 else shard[bound]
            if self.is_taken:
                values = chunk.load("grad", values.device, in_fp32).wait().add_(values)
            self.sum_squares(number, values)
            chunk.put("grad", values)
        self.is_taken = True

    def sum_squares(self, number: int, values: Tensor) -> None:
        """Note the sum of squares of chunk ``number``, or of each parameter in it."""
        parts = {ALL: values}
        if self.sums_each:
            parts = {index: values[here] for index, here, _ in self.store.within(number)}
        threads = self.layout.num_threads
        self.squares[number] = {i: sum_of_squares(part, threads) for i, part in parts.items()}

    def sums(self, index: int | None) -> list[tuple[Any, float]]:
        """Sums of squares of parts of one parameter, or of all, on a GPU tensors; and a factor."""
        is_alike = index is None and len(set(self.factors)) == 1
        if not is_alike and not self.sums_each:  # from now on
            self.sums_each = True
            for number, chunk in enumerate(self.chunks if self.is_taken else ()):
                self.sum_squares(number, chunk.open()["grad"])
                chunk.close(changed=False)
        return [
            (squares, (self.factors[max(i, 0)] / self.scale) ** 2)
            for each in self.squares
            for i, squares in each.items()
            if index in (None, i)
        ]

    def leave(self, present: list[bool]) -> None:
        """The gradients that are ``present`` have left: put what stands for them in ``param.grad``."""
        marks, self.present = self.marks, present
        for index, param in enumerate(self.unit.params):
            if present[index] and marks[index] is None:
                marks[index] = Left(self, index)
            param.grad = marks[index]
        self.added.clear()

    # ---- access ----------------------------------------------------------------------------------

    def read(self, index: int) -> Tensor:
        """One parameter's gradient, whole, without the loss scale: a copy in its dtype.

        A collective of the ranks; in backward, what is not yet reduced is this rank's.
        """
        self.meet()
        if not self.present[index]:
            raise ValueError(
                f"{self.unit.names[index]!r} has no gradient: no backward() has given it one, or "
                "step() or zero_grad() came after it"
            )
        whole = self.store.whole("grad", index) if self.is_taken else torch.zeros(())
        if self.local is not None:
            whole = whole + self.unit.views(self.local)[index].float()
        return (whole * (self.factors[index] / self.scale)).to(self.unit.dtype)

    def meet(self) -> None:
        """Reduce what is on this rank, as all ranks look at gradients together (stage 1, no_sync)."""
        if self.local is not None and not in_backward():
            self.layout.reducer.settle()

    def write(self, index: int, value: Tensor) -> None:
        """Make ``value`` one parameter's gradient: it is the same on all ranks."""
        self.factors[index] = 1.0
        flat = self.unit.flat(index, value.to(self.unit.device).float() * self.scale)
        for piece, there in self.pieces(index):
            piece.copy_(flat[there])
        if self.is_taken and self.local is not None:  # the last piece, which the others are added to
            piece.zero_()

    def pieces(self, index: int) -> Iterator[tuple[Tensor, slice]]:
        """One parameter's elements on this rank, to be changed; and which of all they are."""
        for number, here, there in self.store.parts(index) if self.is_taken else ():
            grad = self.chunks[number].open()["grad"]
            yield grad[here], there
            self.sum_squares(number, grad)
            self.chunks[number].close(changed=True)
        if self.local is not None:
            first = self.unit.offsets[index]
            yield self.local[first : first + self.unit.sizes[index]], slice(None)


def squares_of(gradients: Iterable[Gradient], index: int | None = None) -> Any:
    """Their sum of squares, or that of one parameter; all that is on a GPU is read at once."""
    sums = [entry for gradient in gradients for entry in gradient.sums(index)]
    far = [value for value, _ in sums if isinstance(value, Tensor)]
    found = iter(torch.stack(far).tolist() if far else ())
    return sum(by * (next(found) if isinstance(v, Tensor) else v) for v, by in sums)


def in_fp32(values: Tensor) -> Tensor:
    """``values`` (n,) themselves, or in memory that is used again."""
    if values.dtype == torch.float32:
        return values
    return empty(values.numel(), torch.float32, values.device).copy_(values)


# ---- what stands in param.grad --------------------------------------------------------------------

aten = torch.ops.aten
TWO_NORM = (), (2.0,)  # what torch.linalg.vector_norm is given, apart from the tensor
INSTEAD = {  # what to do instead of an operation; for all others:
    None: "change it in 'with zk.gather(params, kind=\"grad\", write=True):', or assign another",
    aten._amp_foreach_non_finite_check_and_unscale_.default: "leave torch.amp.GradScaler out: "
    "loss_scale= of ZeroOptimizer and optimizer.backward(loss) do what it does",
}


class Left(Tensor):
    """What stands in ``param.grad`` for a gradient that has left: a tensor without memory.

        reading it      any operation reads the reduced gradient, a copy (several ranks: a collective)
        its 2-norm      is known from sums that were made when it left
        times a number  is noted, and becomes a factor of the step; so torch's clip_grad_norm_ works
        zero_()         makes it zeros, as if they were assigned
        changing it     in any other way is an error that names ``zk.gather(params, kind="grad")``
        removing it     ``param.grad = None``, zero_grad(): the gradient is dropped, as in torch
        replacing it    ``param.grad = tensor``: that is the gradient instead

    It is a tensor of torch's wrapper kind: parameters keep their class, and torch its functions.
    A view of it is one too, as changes of that would be lost as well.
    """

    made_by: weakref.ref[Gradient]  # weak, as the garbage collector does not look into param.grad
    number: int
    part: Tensor | None  # a view's values

    @staticmethod
    def __new__(cls, gradient: Gradient, number: int, part: Tensor | None = None) -> Left:
        unit, shape = gradient.unit, gradient.unit.shapes[number]
        strides = unit.strides[number]
        if part is not None:
            shape, strides = part.shape, part.stride()
        left: Left = torch.Tensor._make_wrapper_subclass(
            cls, shape, strides=strides, dtype=unit.dtype, device=unit.device
        )
        left.made_by, left.number, left.part = gradient.me, number, part
        return left

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable or func.namespace == "c10d":  # the first is changed, or ``out``
            changed = tree_leaves((args[:1], kwargs))
            lefts = [value for value in changed if isinstance(value, Left)]
            if lefts:
                change(func, lefts, args)
                return args[0] if args[0] is lefts[0] else None
        left: Any = args[0] if args else None
        is_norm = func is aten.linalg_vector_norm.default and args[1:] in TWO_NORM and not kwargs
        if is_norm and left.part is None:
            return left.two_norm()
        args, kwargs = tree_map(fetched, (args, kwargs))
        values = func(*args, **kwargs)
        if not func.is_view:
            return values
        return tree_map(lambda part: Left(left.gradient, left.number, part), values)

    @property
    def gradient(self) -> Gradient:
        gradient = self.made_by()
        if gradient is None:
            raise RuntimeError("the ZeroOptimizer that has this gradient is gone")
        return gradient

    @property
    def name(self) -> str:
        return self.gradient.unit.names[self.number]

    def gone(self) -> RuntimeError:
        return RuntimeError(
            f"the gradient of {self.name!r} is gone, as step() has used it, or it was removed, "
            "replaced, or assigned again: call zero_grad() after step() and before the next "
            "backward(), read param.grad before step(), and clone() what you keep"
        )

    def current(self) -> Gradient:
        """What it is a part of; RuntimeError if it is gone."""
        gradient = self.gradient
        gradient.store.wait()  # an update in flight uses it
        if gradient.marks[self.number] is not self:
            raise self.gone()
        return gradient

    def add_later(self, grad: Tensor) -> None:
        """Put what autograd adds into param.grad, alone: it is added where this one is."""
        gradient = self.current()
        param = gradient.unit.params[self.number]
        if len(param._post_accumulate_grad_hooks) > 1:
            raise RuntimeError(
                f"a hook on {self.name!r} (register_post_accumulate_grad_hook) sees its new gradient "
                "alone, as the others have left: use register_hook(), or one backward() a step"
            )
        param.grad = gradient.added[self.number] = grad.clone()

    def two_norm(self) -> Tensor:
        """Its 2-norm, a scalar."""
        gradient = self.current()
        gradient.meet()
        if gradient.local is not None:
            return torch.linalg.vector_norm(fetched(self))  # type: ignore[no-any-return]
        squares = [squares_of([gradient], self.number)]
        layout = gradient.layout
        # at stage 0 a rank needs no other's, and has all say theirs to find out who does not
        rows = layout.comm.sharers.rows(self.name, squares)[: layout.sharers.size]
        norm = math.sqrt(sum(row[0] for row in rows))
        return torch.tensor(norm, dtype=torch.float32, device=self.device)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Left(shape={tuple(self.shape)}, reads as the reduced gradient)"


def change(func: Any, lefts: list[Left], args: Any) -> None:
    """What autograd adds is added; a number is noted as a factor; all else is refused."""
    first: Left = lefts[0]
    operand: Any = args[1] if len(args) > 1 else None
    is_number = isinstance(operand, (int, float)) or getattr(operand, "ndim", 1) == 0
    whole = func if first.part is None else None
    node = torch._C._current_autograd_node()  # type: ignore[attr-defined]
    param = first.gradient.unit.params[first.number]
    if func is aten._foreach_mul_.Tensor:
        for value in args[0]:
            value.mul_(operand)
    elif whole is aten.add_.Tensor and getattr(node, "variable", None) is param:
        first.add_later(operand)
    elif whole is aten.zero_.default:
        if param.grad is not first:
            raise first.gone()
        param.grad = torch.zeros(first.shape, dtype=first.dtype, device=first.device)
    elif whole is aten.mul_.Tensor and is_number:
        first.current().factors[first.number] *= float(operand)
    elif whole is aten.div_.Tensor and is_number:
        first.current().factors[first.number] /= float(operand)
    else:
        raise RuntimeError(
            f"the gradient of {first.name!r} has left param.grad, and {func} in place would "
            f"be lost; {INSTEAD.get(func, INSTEAD[None])}"
        )


def fetched(value: Any) -> Any:
    """A reduced gradient, or the view of it, for what stands for it: a copy in its dtype."""
    if not isinstance(value, Left):
        return value
    return value.current().read(value.number) if value.part is None else value.part


def in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
