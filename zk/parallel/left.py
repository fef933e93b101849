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

from __future__ import annotations

import math
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

if TYPE_CHECKING:
    from zk.parallel.gradient import Gradient

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
    """Stands for the gradient of parameter ``number`` of a unit, or for a view of it."""

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
                f"backward() after step() without zero_grad(): the gradient of {self.name!r} was used "
                "by step(); call zero_grad() before the next backward()"
            )
        param = gradient.unit.params[self.number]
        if len(param._post_accumulate_grad_hooks) > 1:
            raise RuntimeError(
                f"a hook on {self.name!r} (register_post_accumulate_grad_hook) sees its new gradient "
                "alone, as the one before has left: use param.register_hook(), or one backward() a step"
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
            f"the gradient of {lefts[0].name!r} has left param.grad, and {func} in place would be lost; "
            f"{INSTEAD.get(func, INSTEAD[None])}"
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
