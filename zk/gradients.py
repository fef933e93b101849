"""Reading and writing of ``param.grad`` while the gradient is elsewhere, until zero_grad().

A gradient leaves in backward, for its unit's bucket, the other ranks and its tier. Where user code looks for it, the unit's gradient is
brought back whole, as a tensor that is the user's; what the user has made of it goes to the tier again before the norm and the update.
After step() the gradient is still there, as in torch, until zero_grad(). Nothing of this is done where nobody looks.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn

from zk.owners import is_dtensor
from zk.parallel.comm import Comm
from zk.parallel.grads import GradReducer
from zk.parallel.released import compute_as_itself, grad_gone, own_grad
from zk.store import UnitStore


class Gradients:
    """Read and write ``param.grad`` for the parameters of one ZeroOptimizer.

    Args:
        units: where each parameter is: its unit, and its number in that.
        reducer: takes gradients away.
        comm: the ranks.
        reduce_rest: reduces what has not been reduced, on all ranks; True leaves what is in its own place there.
        check: raises where gradients cannot be had any more.
    """

    def __init__(
        self,
        units: Mapping[nn.Parameter, tuple[UnitStore, int]],
        reducer: GradReducer,
        comm: Comm,
        reduce_rest: Callable[[bool], None],
        check: Callable[[], None],
    ) -> None:
        self.units, self.reducer, self.comm, self.reduce_rest, self.check = units, reducer, comm, reduce_rest, check
        self.looked: list[UnitStore] = []  # units whose gradients have been brought back
        self.is_hidden = False  # the gradients that have left are not shown

    def has_left(self, param: nn.Parameter) -> bool:
        """Check that the parameter has a gradient, and that it is somewhere else."""
        held, index = self.units[param]
        if index in held.unreduced:
            return True
        return index in held.used and held.shown.get(index, param) is not None

    def is_asked(self, param: nn.Parameter) -> bool:
        """Check that it has one there, or may have one on another rank."""
        return not self.is_hidden and (self.has_left(param) or (self.comm.world > 1 and self.reducer.unfinished))

    @contextlib.contextmanager
    def hidden(self) -> Iterator[None]:
        """Context: gradients that have left are not looked at; what is put into ``param.grad`` inside is added to them."""
        self.is_hidden = True
        try:
            yield
        finally:
            self.is_hidden = False
        self.reducer.take_assigned()
        self.reducer.unfinished = True

    @torch.no_grad()
    def read(self, param: nn.Parameter) -> Tensor | None:
        """The gradient of ``param``, over all ranks and without the loss scale: in its dtype, or in fp32 where zk keeps it so."""
        self.check()
        held, index = self.units[param]
        with torch.inference_mode(False):  # it may be changed later, outside
            if not self._is_shown(held, index):
                self._bring_back(held, index)
        return held.shown.get(index)

    def write(self, param: nn.Parameter, value: Tensor | None) -> None:
        """Replace the gradient of ``param``, or drop it."""
        self.check()
        held, index = self.units[param]
        held.clip()
        if value is None:
            self.reducer.drop(held, [index])
            held.shown[index] = None
            if all(held.shown.get(other, param) is None for other in held.used | held.unreduced):
                held.drop_gradient()
            elif held not in self.looked:
                self.looked.append(held)
            grad_gone(param)
            return
        if not isinstance(value, Tensor):
            raise TypeError(f"the gradient of a parameter must be a tensor or None; got {type(value).__name__}")
        if is_dtensor(value) != is_dtensor(param):
            name = held.unit.names[index]
            raise RuntimeError(f"the gradient of {name!r} must be a {type(param).__name__}, as that is; got a {type(value).__name__}")
        if value.shape != param.shape or value.device != param.device or not value.is_floating_point():
            raise RuntimeError(
                f"the gradient of {held.unit.names[index]!r} must be of floating point, shape {tuple(param.shape)} and on {param.device}; got "
                f"{value.dtype}, {tuple(value.shape)} on {value.device}"
            )
        if not self._is_shown(held, index):
            self._bring_back(held, index)
        held.shown[index] = value
        held.used.add(index)

    def computes(self, whether: bool, *_: object) -> None:
        """Note that the model computes, which code from torch.compile does with parameters of their own class."""
        dynamo = sys.modules.get("torch._dynamo.eval_frame")
        is_used = dynamo is not None and any(backend is not None for backend in dynamo.cached_backends.values())
        for param in self.units if is_used else ():
            compute_as_itself(param, whether)

    def put_back(self) -> None:
        """Put every gradient back on its tier, with what user code has made of it."""
        self.looked.clear()
        for held in {id(held): held for held, _ in self.units.values()}.values():
            if held.shard is not None:
                held.renew()

    # ---- bringing back -------------------------------------------------------------------------------------------------------

    def _is_shown(self, held: UnitStore, index: int) -> bool:
        """Check that the user has the gradient already."""
        return index in held.shown and index not in held.unreduced and own_grad(held.unit.user(index)) is None

    def _bring_back(self, held: UnitStore, index: int) -> None:
        """Turn all of the unit's gradients into tensors of the user's."""
        if torch._C._current_graph_task_id() != -1:
            if self.comm.world > 1:
                raise RuntimeError(
                    f"the gradient of {held.unit.names[index]!r} is read in backward, after it has left for the other ranks; read it after "
                    "backward, or in a hook of that parameter's own: param.register_post_accumulate_grad_hook"
                )
            self.reducer.pass_on(held)
            held.used |= held.unreduced
            held.unreduced.clear()
        else:
            self.reduce_rest(own_grad(held.unit.user(index)) is None)
        if index in held.used and not self._is_shown(held, index):
            alone = self.comm.world == 1  # else who has a reference may differ by rank, and what is brought back is so together
            for other in [other for other in self.looked if alone and other is not held and other.only_here()]:
                self.looked.remove(other)
                other.renew()
            held.bring_back()
        if held not in self.looked:
            self.looked.append(held)

