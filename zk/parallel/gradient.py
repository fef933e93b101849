"""Gradient: one unit's gradient, from ``param.grad`` to this rank's shard of the mean over ranks.

collect -> reduce -> take     flattened on this rank; mean over ranks; the shard on its tier
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable
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
        if all(grad is None for grad in here):  # (count() would compare tensors)
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
                f"{self.unit.names[index]!r} has no gradient: no backward() has given it one, or "
                "step() or zero_grad() came after it"
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


def check_dense(names: Iterable[str], grads: Iterable[Tensor | None]) -> None:
    """Gradients are dense."""
    for name, grad in zip(names, grads, strict=True):
        if grad is not None and grad.layout is not torch.strided:
            raise TypeError(
                f"the gradient of {name!r} is sparse, and zk reduces dense ones: use sparse=False"
            )


def in_fp32(values: Tensor) -> Tensor:
    """``values`` (n,) themselves, or in memory that is used again."""
    if values.dtype == torch.float32:
        return values
    return empty(values.numel(), torch.float32, values.device).copy_(values)


# ---- what stands in param.grad --------------------------------------------------------------------

aten = torch.ops.aten
TIMES = aten.mul_.Tensor, aten.mul_.Scalar, aten._foreach_mul_.Tensor, aten._foreach_mul_.Scalar
OVER = aten.div_.Tensor, aten.div_.Scalar, aten._foreach_div_.Tensor, aten._foreach_div_.Scalar
POWERS = {**dict.fromkeys(TIMES, 1), **dict.fromkeys(OVER, -1)}  # of the number that is the factor
SAME = aten.detach.default, aten.alias.default  # views of all
NORM = 2, None, False  # order, dimensions, keepdim
INSTEAD = {  # what to do instead of an operation; for all others:
    None: "change it within 'with zk.gather(params, kind=\"grad\", write=True):', or assign a new "
    "param.grad",
    aten._amp_foreach_non_finite_check_and_unscale_.default: "leave torch.amp.GradScaler out: "
    "loss_scale= of ZeroOptimizer and optimizer.backward(loss) do what it does",
}


class Left(Tensor):
    """What stands in ``param.grad`` for a gradient that has left: a tensor without memory.

        reading it      any operation reads the reduced gradient, a copy (several ranks: a collective)
        its 2-norm      is known from sums that were made when it left
        times a number  is noted, and becomes a factor of the step; so torch's clip_grad_norm_ works
        zero_()         makes it zeros
        changing it     in any other way is an error that names ``zk.gather(params, kind="grad")``
        removing it     ``param.grad = None``, zero_grad(): the gradient is dropped, as in torch
        replacing it    ``param.grad = tensor``: that is the gradient instead

    It is a tensor of torch's wrapper kind: parameters keep their class, and torch its functions.
    """

    made_by: weakref.ref[Gradient]  # weak, as the garbage collector does not look into param.grad
    number: int
    part: Tensor | None  # a view's values
    token: object  # one for all that stand for one gradient

    @staticmethod
    def __new__(
        cls, gradient: Gradient, number: int, token: object, part: Tensor | None = None
    ) -> Left:
        unit, shape = gradient.unit, gradient.unit.shapes[number]
        strides = unit.strides[number]
        if part is not None:
            shape, strides = part.shape, part.stride()
        left: Left = torch.Tensor._make_wrapper_subclass(
            cls, shape, strides=strides, dtype=unit.dtype, device=unit.device
        )
        left.made_by, left.number, left.token, left.part = gradient.me, number, token, part
        return left

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable or func.namespace == "c10d":
            return change(func, args, kwargs)
        left = args[0] if args and isinstance(args[0], Left) else None
        if left is not None and func in SAME:
            return left.stand_in(left.part)
        is_norm = func is aten.linalg_vector_norm.default and not any(kwargs.values())
        if left is not None and is_norm and (*args[1:], *NORM[len(args) - 1 :]) == NORM:
            return left.two_norm()
        values = read(func, args, kwargs)
        return values if left is None or not func.is_view else tree_map(left.stand_in, values)

    def stand_in(self, part: Tensor | None) -> Left:
        """What is read as ``part``, or as all, and refused where it is changed."""
        return Left(self.gradient, self.number, self.token, part)

    @property
    def gradient(self) -> Gradient:
        gradient = self.made_by()
        if gradient is None:
            raise RuntimeError("the ZeroOptimizer that has this gradient is gone")
        return gradient

    @property
    def name(self) -> str:
        return self.gradient.unit.names[self.number]

    def current(self) -> Gradient:
        """The gradient that it stands for, of all ranks; RuntimeError if that is gone."""
        gradient = self.gradient
        gradient.store.wait()  # an update in flight uses it
        mark = gradient.marks[self.number]
        if mark is None or mark.token is not self.token:
            raise RuntimeError(
                f"the gradient of {self.name!r} is gone, as step() has used it, or it was removed or "
                "replaced: read param.grad before step(), and clone() what you keep"
            )
        gradient.meet()
        return gradient

    def add_later(self, grad: Tensor) -> Left:
        """Put what autograd adds into param.grad, alone: it is added where this one is."""
        gradient = self.gradient
        if gradient.marks[self.number] is not self:
            raise RuntimeError(
                f"backward() after step() without zero_grad(): the gradient of {self.name!r} was "
                "used "
                "by step(); call zero_grad() before the next backward()"
            )
        param = gradient.unit.params[self.number]
        if len(param._post_accumulate_grad_hooks) > 1:
            raise RuntimeError(
                f"a hook on {self.name!r} (register_post_accumulate_grad_hook) sees its new gradient "
                "alone, as the one before has left: use param.register_hook(), or one "
                "backward() a step"
            )
        gradient.added.add(self.number)
        param.grad = grad.clone()
        return self

    def fetched(self) -> Tensor:
        """The reduced gradient, or the view of it: a copy in the parameter's dtype."""
        return self.current().read(self.number) if self.part is None else self.part

    def two_norm(self) -> Tensor:
        """Its 2-norm, a scalar."""
        gradient = self.current()
        if gradient.local is not None or self.part is not None:
            two_norm: Tensor = torch.linalg.vector_norm(self.fetched())
            return two_norm
        squares = [float(gradient.sum_of_squares(self.number))]
        norm = math.sqrt(gradient.layout.sharers.total(gradient.unit.name, squares)[0])
        return torch.tensor(norm, dtype=torch.float32, device=self.device)

    def times(self, factor: float) -> None:
        self.current().factors[self.number] *= factor

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Left(shape={tuple(self.shape)}, reads as the reduced gradient)"


def change(func: Any, args: Any, kwargs: Any) -> Any:
    """What autograd adds is added; a number is noted as a factor; all else is refused."""
    first = args[0]
    if func is aten.add_.Tensor and in_backward() and isinstance(first, Left):
        return first.add_later(args[1])
    lefts = [value for value in written(func, args, kwargs) if isinstance(value, Left)]
    if not lefts:
        return read(func, args, kwargs)
    is_whole = all(left.part is None for left in lefts)
    if is_whole and func is aten.zero_.default:
        first.gradient.zero(first.number)
    elif is_whole and func in POWERS and is_number(args[1]):
        factor = float(args[1]) ** POWERS[func]
        for value in tree_leaves(first):
            value.times(factor) if isinstance(value, Left) else value.mul_(factor)
    else:
        raise RuntimeError(
            f"the gradient of {lefts[0].name!r} has left param.grad, and {func} in place would "
            f"be lost; {INSTEAD.get(func, INSTEAD[None])}"
        )
    return first if isinstance(first, Tensor) else None


def written(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """What an operation writes to; a collective of torch's, to all."""
    arguments, is_c10d = func._schema.arguments, func.namespace == "c10d"
    given = {**dict(zip((a.name for a in arguments), args, strict=False)), **kwargs}
    writes = (a.name for a in arguments if is_c10d or (a.alias_info and a.alias_info.is_write))
    return tree_leaves([given.get(name) for name in writes])


def read(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation on the values."""
    args, kwargs = tree_map(
        lambda value: value.fetched() if isinstance(value, Left) else value, (args, kwargs)
    )
    return func(*args, **kwargs)


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.ndim == 0)


def in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
