"""What stands in ``param.grad`` for a gradient that has left: a tensor without memory.

    reading it      any operation reads the reduced gradient, a copy (several ranks: a collective)
    its 2-norm      is known from sums that were made when it left
    times a number  is noted, and becomes a factor of the step; so torch's clip_grad_norm_ works, and
                    its GradScaler
    zero_()         makes it zeros
    changing it     in any other way is an error that names ``zk.gather(params, kind="grad")``
    removing it     ``param.grad = None``, zero_grad(): the gradient is dropped, as in torch
    replacing it    ``param.grad = tensor``: that is the gradient instead

It is a tensor of torch's wrapper kind: parameters keep their class, and torch its functions.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

if TYPE_CHECKING:
    from zk.parallel.gradient import Gradient

aten = torch.ops.aten
TIMES = aten.mul_.Tensor, aten.mul_.Scalar, aten._foreach_mul_.Tensor, aten._foreach_mul_.Scalar
OVER = aten.div_.Tensor, aten.div_.Scalar, aten._foreach_div_.Tensor, aten._foreach_div_.Scalar
SAME = aten.detach.default, aten.alias.default  # views of all
UNSCALE = aten._amp_foreach_non_finite_check_and_unscale_.default  # of torch.amp.GradScaler


class Left(Tensor):
    """Stands for the gradient of parameter ``index`` of a unit, or for a view of it."""

    made_by: weakref.ref[Gradient]  # weak, as the garbage collector does not look into param.grad
    index: int  # type: ignore[assignment]
    is_added: bool  # autograd has put another one into its place, to be added
    views: tuple[Callable[[Tensor], Tensor], ...]  # what makes the view
    token: object  # one for all views of one gradient

    @staticmethod
    def __new__(
        cls,
        gradient: Gradient,
        index: int,
        base: Left | None = None,
        form: Any = None,
        views: Any = (),
    ) -> Left:
        unit = gradient.unit
        shape, strides = form or (unit.shapes[index], unit.strides[index])
        left: Left = torch.Tensor._make_wrapper_subclass(
            cls, shape, strides=strides, dtype=unit.dtype, device=unit.device
        )
        left.made_by, left.index, left.is_added, left.views = gradient.me, index, False, views
        left.token = object() if base is None else base.token
        return left

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs, first = kwargs or {}, args[0] if args else None
        if func._schema.is_mutable or func.namespace == "c10d":
            return change(func, args, kwargs)
        if isinstance(first, Left) and func.is_view:
            return first.view_by(func, args[1:], kwargs)
        if func is aten.linalg_vector_norm.default and isinstance(first, Left) and is_2norm(args):
            return first.two_norm()
        args, kwargs = tree_map(values_of, (args, kwargs))
        return func(*args, **kwargs)

    def view_by(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What stands for views: read where they are used, and refused where they are changed."""
        form = torch.empty_strided(self.shape, self.stride(), dtype=self.dtype, device="meta")
        made = func(form, *args, **kwargs)

        def pick(number: int, part: Tensor) -> Left:
            def view(value: Tensor) -> Any:
                found = func(value, *args, **kwargs)
                return found if isinstance(found, Tensor) else found[number]

            views = self.views if func in SAME else (*self.views, view)
            return Left(self.gradient, self.index, self, (part.shape, part.stride()), views)

        if isinstance(made, Tensor):
            return pick(0, made)
        return [pick(number, part) for number, part in enumerate(made)]

    @property
    def gradient(self) -> Gradient:
        gradient = self.made_by()
        if gradient is None:
            raise RuntimeError("the ZeroOptimizer that has this gradient is gone")
        return gradient

    @property
    def name(self) -> str:
        return self.gradient.unit.names[self.index]

    def current(self) -> Gradient:
        """The gradient that it stands for; RuntimeError if that is gone."""
        gradient = self.gradient
        gradient.store.wait()  # an update in flight uses it
        mark = gradient.marks[self.index]
        if mark is None or mark.token is not self.token:
            raise RuntimeError(
                f"the gradient of {self.name!r} is gone, as step() has used it, or it was removed or "
                "replaced: read param.grad before step(), and clone() what you keep"
            )
        return gradient

    def add_later(self, grad: Tensor) -> Left:
        """Put what autograd adds into param.grad, alone: it is added where this one is."""
        if self.gradient.marks[self.index] is not self:
            raise RuntimeError(
                f"backward() after step() without zero_grad(): the gradient of {self.name!r} was used "
                "by step(); call zero_grad() before the next backward()"
            )
        param = self.gradient.unit.params[self.index]
        if len(param._post_accumulate_grad_hooks) > 1:
            raise RuntimeError(
                f"a hook on {self.name!r} (register_post_accumulate_grad_hook) sees its new gradient "
                "alone, as the one before has left: use param.register_hook(), or one backward() a step"
            )
        self.is_added = True
        param.grad = grad.clone()
        return self

    def fetched(self) -> Tensor:
        """The reduced gradient, or the view of it: a copy in the parameter's dtype."""
        value: Tensor = self.current().read(self.index)
        for view in self.views:
            value = view(value)
        return value

    def two_norm(self) -> Tensor:
        """Its 2-norm, a scalar."""
        gradient = self.current()
        gradient.meet()
        if gradient.local is not None or self.views:
            two_norm: Tensor = torch.linalg.vector_norm(self.fetched())
            return two_norm
        squares = [float(gradient.sum_of_squares(self.index))]
        norm = math.sqrt(gradient.layout.sharers.total(gradient.unit.name, squares)[0])
        return torch.tensor(norm, dtype=torch.float32, device=self.device)

    def times(self, number: float) -> None:
        self.current().meet()
        self.current().factors[self.index] *= number

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Left(shape={tuple(self.shape)}, reads as the reduced gradient)"


def change(func: Any, args: Any, kwargs: Any) -> Any:
    """What autograd adds is added; a number is noted as a factor; all else is refused."""
    first, rest = args[0], args[1:]
    if func is aten.add_.Tensor and in_backward() and isinstance(first, Left):
        return first.add_later(rest[0])
    lefts = [value for value in written(func, args, kwargs) if isinstance(value, Left)]
    if not lefts:
        args, kwargs = tree_map(values_of, (args, kwargs))
        return func(*args, **kwargs)
    is_whole = not any(left.views for left in lefts)
    if is_whole and func is aten.zero_.default:
        first.gradient.zero(first.index)
    elif is_whole and func is UNSCALE:
        unscale(*args)
    elif is_whole and func in TIMES + OVER and is_number(rest[0]):
        number = float(rest[0]) if func in TIMES else 1.0 / float(rest[0])
        for value in [first] if isinstance(first, Tensor) else first:
            value.times(number) if isinstance(value, Left) else value.mul_(number)
    else:
        raise RuntimeError(
            f"the gradient of {lefts[0].name!r} has left param.grad, and {func} in place would be lost; "
            "change it within 'with zk.gather(params, kind=\"grad\", write=True):', or assign a new "
            "param.grad"
        )
    return first if isinstance(first, Tensor) else None


def written(func: Any, args: Any, kwargs: Any) -> Iterator[Any]:
    """What an operation writes to."""
    if func.namespace == "c10d":
        yield from tree_leaves((args, kwargs))
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            yield from tree_leaves(value)


def unscale(grads: list[Tensor], found_inf: Tensor, factor: Tensor) -> None:
    """What torch.amp.GradScaler does with the gradients of an optimizer."""
    here = [grad for grad in grads if not isinstance(grad, Left)]
    if here:
        UNSCALE(here, found_inf, factor)
    for left in grads:
        if isinstance(left, Left):
            left.times(float(factor))
            if not left.two_norm().isfinite():
                found_inf.fill_(1.0)


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.ndim == 0)


def is_2norm(args: tuple[Any, ...]) -> bool:
    """Tell if a vector norm is of the whole tensor, and of order 2."""
    order, dims = (*args[1:], *(2, None)[len(args) - 1 :])[:2]
    return order == 2 and dims is None


def values_of(value: Any) -> Any:
    return value.fetched() if isinstance(value, Left) else value


def is_here(grad: Tensor | None) -> bool:
    """Tell a gradient in ``param.grad`` from what stands for one."""
    return grad is not None and not isinstance(grad, Left)


def in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
