"""Arithmetic of the user's torch optimizer as a rule that updates any slice of any flat buffer, or a refusal with the reason."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from zk.kernels.reference import update_chunks
from zk.kernels.step import AdamStep
from zk.offload.cpu_adam import adam_


class Rule(Protocol):
    """Elementwise arithmetic of an optimizer: what one element becomes depends on no other element."""

    # a bf16 parameter may keep only the lower half of its master (needs a second moment: see split.py)
    splits_master: bool

    def state_names(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """Names of the per-element state that parameters of ``group`` need, as torch's optimizer calls them."""

    def update(self, flat: Mapping[str, Tensor | None], group: Mapping[str, Any], step: int, grad_scale: float, num_threads: int) -> None:
        """Update in place: ``flat`` has param, grad, master and the states, all (n,); ``step`` counts from 1."""


class AdamRule:
    """torch.optim.Adam and AdamW."""

    splits_master = True

    def __init__(self, decoupled: bool) -> None:
        self.decoupled = decoupled

    def state_names(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if group.get("amsgrad") else ("exp_avg", "exp_avg_sq")

    def update(self, flat: Mapping[str, Tensor | None], group: Mapping[str, Any], step: int, grad_scale: float, num_threads: int) -> None:
        beta1, beta2 = group["betas"]
        scalars = AdamStep(
            lr=float(group["lr"]),
            beta1=float(beta1),
            beta2=float(beta2),
            eps=float(group["eps"]),
            weight_decay=float(group["weight_decay"]),
            decoupled=bool(group.get("decoupled_weight_decay", self.decoupled)),
            step=step,
            grad_scale=grad_scale,
            maximize=bool(group.get("maximize")),
            amsgrad=bool(group.get("amsgrad")),
        )
        param, grad, exp_avg, exp_avg_sq = flat["param"], flat["grad"], flat["exp_avg"], flat["exp_avg_sq"]
        assert param is not None and grad is not None and exp_avg is not None and exp_avg_sq is not None
        adam_(param, grad, flat["master"], exp_avg, exp_avg_sq, scalars, max_exp_avg_sq=flat.get("max_exp_avg_sq"), num_threads=num_threads)


class SGDRule:
    """torch.optim.SGD, with momentum, dampening and Nesterov."""

    splits_master = False

    def state_names(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        return ("momentum_buffer",) if group["momentum"] else ()

    def update(self, flat: Mapping[str, Tensor | None], group: Mapping[str, Any], step: int, grad_scale: float, num_threads: int) -> None:
        lr, momentum, decay = float(group["lr"]), float(group["momentum"]), float(group["weight_decay"])
        buffer = flat.get("momentum_buffer")

        def update(x: Tensor, g: Tensor, piece: slice) -> None:
            if decay:
                g = g.add(x, alpha=decay)
            if momentum:
                assert buffer is not None
                held = buffer[piece].float()  # the buffer itself where it is fp32
                if step == 1:
                    held.copy_(g)
                else:
                    held.mul_(momentum).add_(g, alpha=1 - group["dampening"])
                if held.dtype != buffer.dtype:
                    buffer[piece] = held
                g = g.add(held, alpha=momentum) if group["nesterov"] else held
            x.add_(g, alpha=-lr)

        param, grad = flat["param"], flat["grad"]
        assert param is not None and grad is not None
        update_chunks(param, grad, flat["master"], None, -grad_scale if group["maximize"] else grad_scale, update)


# what the update of one element needs, for optimizers people ask about
_WHOLE_MATRIX = {
    "Muon": "orthogonalizes whole momentum matrices",
    "Adafactor": "keeps row and column statistics of whole matrices",
    "Shampoo": "multiplies with factors of whole matrices",
    "SOAP": "rotates whole matrices",
    "LBFGS": "takes inner products over all parameters and calls the closure many times",
    "LAMB": "scales by norms of whole parameters",
    "LARS": "scales by norms of whole parameters",
    "SparseAdam": "needs sparse gradients, which cannot be flattened",
}


def rule_for(optimizer: torch.optim.Optimizer) -> Rule:
    """The rule of a torch Adam, AdamW or SGD; TypeError, with the reason, for any other optimizer (subclasses may change the arithmetic)."""
    kind = type(optimizer)
    for group in optimizer.param_groups:
        if group.get("differentiable"):
            raise ValueError("differentiable=True is not supported: the update runs outside autograd; remove it")
    if kind is torch.optim.AdamW or kind is torch.optim.Adam:
        return AdamRule(decoupled=kind is torch.optim.AdamW)
    if kind is torch.optim.SGD:
        return SGDRule()
    for base in kind.__mro__:
        if base.__name__ in _WHOLE_MATRIX:
            raise TypeError(
                f"{kind.__name__} cannot be partitioned: it {_WHOLE_MATRIX[base.__name__]}, and a rank holds only slices of them; "
                "use torch.optim.AdamW, Adam or SGD"
            )
    raise TypeError(
        f"ZeroOptimizer knows the arithmetic of torch.optim.AdamW, Adam and SGD; got {kind.__module__}.{kind.__name__}. "
        "Each rank updates slices of flat buffers, so an unknown step() cannot be trusted to give the same result"
    )
