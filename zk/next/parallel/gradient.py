"""What stands in ``param.grad`` for a gradient that has left: a tensor without memory.

    reading it      any operation reads the reduced gradient, a copy (several ranks: a collective)
    its 2-norm      is known from sums that were made when it left
    times a number  is noted, and becomes a factor of the step; so torch's clip_grad_norm_ works
    changing it     in any other way is an error that names ``zk.gather(params, kind="grad")``
    removing it     ``param.grad = None``, zero_grad(): the gradient is dropped, as in torch
    replacing it    ``param.grad = tensor``: that is the gradient instead

It is a tensor of torch's wrapper kind: parameters keep their class, and torch its functions.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from zk.next.precision import refuse_grad_scaler

if TYPE_CHECKING:
    from zk.next.store import UnitStore

aten = torch.ops.aten
UNSCALE = aten._amp_foreach_non_finite_check_and_unscale_.default
SCALINGS = aten.mul_.Tensor, aten.mul_.Scalar, aten.div_.Tensor, aten.div_.Scalar


class Left(Tensor):
    """Stands for the gradient of parameter ``index`` of a unit."""

    store: UnitStore
    index: int
    is_added: bool  # autograd has put another one into its place, to be added

    @staticmethod
    def __new__(cls, store: UnitStore, index: int) -> Left:
        unit = store.unit
        shape, like = unit.shapes[index], {"dtype": unit.dtype, "device": unit.device}
        left: Left = torch.Tensor._make_wrapper_subclass(
            cls, shape, strides=unit.strides[index], **like
        )
        left.store, left.index, left.is_added = store, index, False
        return left

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, Left) and func._schema.is_mutable:
            return first.change(func, *args[1:])
        if func is UNSCALE:
            refuse_grad_scaler()
        if func is aten.linalg_vector_norm.default and isinstance(first, Left) and is_2norm(args):
            return first.norm()
        args, kwargs = tree_map(values_of, (args, kwargs))
        return func(*args, **kwargs)

    def change(self, func: Any, other: Any = None, *rest: Any) -> Left:
        """What autograd adds is added; a number is noted as a factor; all else is refused."""
        if func is aten.add_.Tensor and in_backward():
            return self.add_later(other)
        if func in SCALINGS and not rest and (not isinstance(other, Tensor) or other.ndim == 0):
            number = float(other)
            factor = number if func in SCALINGS[:2] else 1.0 / number
            self.store.grad.factors[self.index] *= factor
            self.store.num_grads += 1
            return self
        name = self.store.unit.names[self.index]
        raise RuntimeError(
            f"the gradient of {name!r} has left param.grad, and {func} in place would be lost; change "
            "it within 'with zk.gather(params, kind=\"grad\", write=True):', or assign a new param.grad"
        )

    def add_later(self, grad: Tensor) -> Left:
        """Put what autograd adds into param.grad, alone: it is added where this one is."""
        name, state = self.store.unit.names[self.index], self.store.grad
        if not state.is_taken and state.local is None:
            raise RuntimeError(
                f"backward() after step() without zero_grad(): the gradient of {name!r} was used"
            )
        self.is_added = True
        self.store.unit.params[self.index].grad = grad.clone()
        return self

    def value(self) -> Tensor:
        """The reduced gradient, a copy in the parameter's dtype."""
        store, factor = self.store, self.store.grad.factors[self.index]
        if not store.grad.present[self.index]:
            raise RuntimeError(
                f"the gradient of {store.unit.names[self.index]!r} is gone: step() has used it, and "
                "zero_grad() was not called; read it before step()"
            )
        grad = store.read("grad", self.index)
        return (grad if factor == 1.0 else grad * factor).to(store.unit.dtype)

    def norm(self) -> Tensor:
        """Its 2-norm, a scalar in fp32."""
        store = self.store
        if store.grad.local is not None:
            return torch.linalg.vector_norm(self.value())
        squares = [float(store.grad.sum_of_squares(self.index))]
        norm = math.sqrt(store.layout.sharers.total(store.unit.name, squares)[0])
        return torch.tensor(norm, device=self.device)

    def __repr__(self, **_: Any) -> str:
        return f"Left(shape={tuple(self.shape)}, reads as the reduced gradient)"


def is_2norm(args: tuple[Any, ...]) -> bool:
    """Tell if a vector norm is of the whole tensor, and of order 2."""
    order, dims = (*args[1:], *(2, None)[len(args) - 1 :])[:2]
    return order == 2 and dims is None


def values_of(value: Any) -> Any:
    return value.value() if isinstance(value, Left) else value


def is_here(grad: Tensor | None) -> bool:
    """Tell a gradient in ``param.grad`` from what stands for one."""
    return grad is not None and not isinstance(grad, Left)


def in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
