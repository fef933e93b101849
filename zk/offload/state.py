"""In: reduced gradients of one unit's slice. Out: the slice of the parameters, updated. Holds master, moments and gradient on their tier."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zk.offload.cpu_adam import sum_of_squares
from zk.offload.rules import Rule
from zk.offload.split import join, split_
from zk.offload.tiers import Tier, move


class OptimizerShard:
    """Optimizer state of the slice of a unit that this rank updates.

    Args:
        param: (n,) the slice of the parameters, wherever they compute; updated parameters end up here.
        initial: (n,) the same values in the model's original precision: the master starts from them.
        rule: the optimizer's arithmetic.
        names: the per-element states the unit's groups need.
        tier: where everything here rests.
        state_dtype: of the moments.
    """

    def __init__(self, param: Tensor, initial: Tensor, rule: Rule, names: Sequence[str], tier: Tier, state_dtype: torch.dtype) -> None:
        self.rule, self.tier, self.home = rule, tier, param
        # where parameters compute on the optimizer's tier they are updated in place; else a copy here is, and uploaded
        same_memory = param.device == tier.device
        self.param = param if same_memory else tier.allocate(param.numel(), param.dtype)
        self.states = {name: tier.allocate(param.numel(), state_dtype if name != "max_exp_avg_sq" else torch.float32) for name in names}
        self.grad: Tensor | None = None
        self.split = param.dtype == torch.bfloat16 and rule.splits_master and "exp_avg_sq" in self.states
        self.master: Tensor | None = None
        if self.split:
            self.master = tier.allocate(param.numel(), torch.int16)
        elif param.dtype != torch.float32:
            self.master = tier.allocate(param.numel(), torch.float32)
        self.set_master(slice(0, param.numel()), initial)

    # ---- gradients -----------------------------------------------------------------------------------------------------------

    def accumulate(self, grad: Tensor) -> None:
        """Take a reduced gradient (n,): offloaded in its own precision the first time, added in fp32 from then on. Takes ownership."""
        if self.grad is None:
            if grad.device != self.tier.device:
                offloaded = torch.empty(grad.numel(), dtype=grad.dtype, device=self.tier.device)
                move(grad, offloaded)
                grad = offloaded
            self.grad = grad
            return
        if self.grad.dtype != torch.float32:
            self.grad = self.grad.float()
        self.grad += grad.to(self.grad.device)

    def sum_of_squares(self, num_threads: int) -> float:
        """Of the gradient held here, in float64; 0 without one. Not finite exactly if some element is not."""
        return 0.0 if self.grad is None else sum_of_squares(self.grad, num_threads)

    # ---- update --------------------------------------------------------------------------------------------------------------

    def update(self, run: slice, group: Mapping[str, Any], step: int, grad_scale: float, num_threads: int) -> None:
        """Update the elements ``run``, all of one group and step count, and cast them in the same pass."""
        assert self.grad is not None
        flat: dict[str, Tensor | None] = {name: state[run] for name, state in self.states.items()}
        flat["param"], flat["grad"] = self.param[run], self.grad[run]
        flat["master"] = None if self.master is None else self.master[run]
        self.rule.update(flat, group, step, grad_scale, num_threads)

    def upload(self) -> None:
        """Bring the updated parameters to where they compute."""
        move(self.param, self.home)

    # ---- reading and writing state -------------------------------------------------------------------------------------------

    def get_master(self, part: slice) -> Tensor:
        """The fp32 master of ``part``; may be a view."""
        if self.split:
            assert self.master is not None
            return join(self.param[part], self.master[part], self.states["exp_avg_sq"][part])
        return self.param[part] if self.master is None else self.master[part]

    def set_master(self, part: slice, values: Tensor) -> None:
        """Write (n,) ``values`` of any precision into master and parameter of ``part``."""
        values = values.to(self.tier.device)
        if self.split:
            assert self.master is not None
            split_(values.float(), self.param[part], self.master[part], self.states["exp_avg_sq"][part])
        else:
            if self.master is not None:
                self.master[part].copy_(values)
            if self.param[part].data_ptr() != values.data_ptr():
                self.param[part].copy_(values)
        if self.param.device != self.home.device:
            self.home[part].copy_(self.param[part])

    def adopt(self, part: slice) -> None:
        """Parameters of ``part`` were written from outside: elements that changed replace their master, the others keep it."""
        if self.master is None and self.param is self.home:
            return
        written, master = self.home[part].to(self.tier.device, copy=True), self.get_master(part)
        self.set_master(part, torch.where(master.to(written.dtype) == written, master, written.float()))

    def get_state(self, name: str, part: slice) -> Tensor:
        """The state ``name`` of ``part`` in fp32; a view where that is what is stored."""
        state = self.states[name][part].float()
        return state.abs() if self.split and name == "exp_avg_sq" else state

    def set_state(self, name: str, part: slice, values: Tensor) -> None:
        """Overwrite the state ``name`` of ``part``; the master keeps its value."""
        if self.split and name == "exp_avg_sq":
            master = self.get_master(part)
            self.states[name][part].copy_(values)
            self.set_master(part, master)
        else:
            self.states[name][part].copy_(values)

    @property
    def nbytes(self) -> dict[str, int]:
        """Bytes by kind: master, moments, gradient, and the parameter copy where there is one."""
        sizes = {"moments": sum(state.nbytes for state in self.states.values()), "master": 0 if self.master is None else self.master.nbytes}
        sizes["grad"] = 0 if self.grad is None else self.grad.nbytes
        sizes["param_copy"] = 0 if self.param is self.home else self.param.nbytes
        return sizes
