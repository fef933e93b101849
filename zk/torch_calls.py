"""In: calls of torch that look at ``param.grad``. Out: what they mean for parameters whose gradients a ZeroOptimizer has taken away.

There is nothing in ``param.grad`` any more, so clipping would return 0 and clip nothing, ``model.zero_grad()`` would drop nothing, and another
optimizer over the model would train nothing, all without a word. So the first ZeroOptimizer puts these functions in front of torch's own;
what belongs to none goes on to torch as it came.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad
from torch.optim.optimizer import register_optimizer_step_pre_hook

from zk.held import owner_of

if TYPE_CHECKING:
    from zk.optimizer import ZeroOptimizer


@functools.cache
def watch_torch() -> None:
    """From now on torch's functions know of gradients that have left. Done once; later calls do nothing."""
    for name, ours in (("clip_grad_norm_", _clip_norm), ("clip_grad_value_", _clip_value), ("_clip_grads_with_norm_", _clip_with_norm)):
        _put_before(name, ours)
    of_torch = nn.Module.zero_grad

    @functools.wraps(of_torch)
    def zero_grad(self: nn.Module, set_to_none: bool = True) -> None:
        of_torch(self, set_to_none)
        _drop_gradients(self)

    nn.Module.zero_grad = zero_grad  # type: ignore[method-assign]
    register_optimizer_step_pre_hook(_step_begins)


def _put_before(name: str, ours: Callable[..., Any]) -> None:
    """Let torch's function call ``ours`` with what it called so far as first argument, also where others imported it by name long ago."""
    function = getattr(clip_grad, name)
    inner = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)).get("func")  # it is under a no_grad wrapper
    if inner is None:
        raise RuntimeError(f"torch {torch.__version__} defines {name} in another way than zk knows; torch 2.11 to 2.13 are supported")
    inner.cell_contents = functools.partial(ours, inner.cell_contents)


def _owner(params: list[Tensor], asked: str) -> ZeroOptimizer | None:
    """Whose gradients these are; None if they are torch's. ValueError for a part of them, which cannot be clipped alone."""
    owners = {id(owner): owner for param in params if (owner := owner_of(param)) is not None and _is_trained(owner, param)}
    if not owners:
        return None
    owner = next(iter(owners.values()))
    given = {id(param) for param in params}
    left_out = [name for held in owner._trained for name, param in zip(held.unit.names, held.unit.params, strict=True) if id(param) not in given]
    if left_out or len(owners) > 1 or any(param.grad is not None for param in params):
        others = f"without {left_out[0]!r}" if left_out else "together with parameters that are not in it"
        raise ValueError(
            f"{asked} was given parameters of a ZeroOptimizer {others}: it clips all of its gradients by their common norm; "
            "call it with the parameters of that model, alone"
        )
    return owner


def _is_trained(owner: ZeroOptimizer, param: Tensor) -> bool:
    return owner.units[param][0].shard is not None  # type: ignore[index]


def _listed(parameters: Tensor | Iterable[Tensor]) -> list[Tensor]:
    return [parameters] if isinstance(parameters, Tensor) else list(parameters)


def _clip_norm(
    of_torch: Callable[..., Tensor],
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    params = _listed(parameters)
    owner = _owner(params, "clip_grad_norm_")
    if owner is None:
        return of_torch(params, max_norm, norm_type, error_if_nonfinite, foreach)
    if float(norm_type) != 2.0:
        raise ValueError(f"a ZeroOptimizer clips by the 2-norm; got norm_type={norm_type!r}; leave it out")
    norm = owner.clip_grad_norm_(float(max_norm))
    if error_if_nonfinite and not torch.isfinite(norm):
        raise RuntimeError(f"the norm of the gradients is {norm.item()}, and error_if_nonfinite=True asks for an error; the step would be skipped")
    return norm


def _clip_value(of_torch: Callable[..., None], parameters: Tensor | Iterable[Tensor], clip_value: float, foreach: bool | None = None) -> None:
    params = _listed(parameters)
    if _owner(params, "clip_grad_value_") is not None:
        raise ValueError(
            f"clip_grad_value_({clip_value}) cannot reach gradients that a ZeroOptimizer has taken away; clip by norm, with clip_grad_norm=1.0 or "
            "torch.nn.utils.clip_grad_norm_"
        )
    of_torch(params, clip_value, foreach)


def _clip_with_norm(
    of_torch: Callable[..., None], parameters: Tensor | Iterable[Tensor], max_norm: float, total_norm: Tensor, foreach: bool | None = None
) -> None:
    params = _listed(parameters)
    if _owner(params, "clip_grads_with_norm_") is not None:
        raise ValueError(
            "clip_grads_with_norm_ cannot reach gradients that a ZeroOptimizer has taken away, and get_total_norm does not see them; "
            "torch.nn.utils.clip_grad_norm_ does both"
        )
    of_torch(params, max_norm, total_norm, foreach)


def _drop_gradients(module: nn.Module) -> None:
    """Those of the module's parameters that have left. ValueError if others would go with them."""
    params = {id(param) for param in module.parameters()}
    owners = {id(owner): owner for param in module.parameters() if (owner := owner_of(param)) is not None}
    for owner in owners.values():
        pending = owner.with_gradients()
        other = next((name for name, param in pending.items() if id(param) not in params), None)
        if pending and other is None:
            owner.zero_grad()
        elif any(id(param) in params for param in pending.values()):
            raise ValueError(
                f"zero_grad() of a part of a model cannot drop gradients that a ZeroOptimizer has taken, without those of {other!r}; call it of "
                "the model, or of the optimizer"
            )


def _step_begins(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        for param in group["params"][:1]:
            owner = owner_of(param)
            if owner is not None and owner is not optimizer and _is_trained(owner, param):
                name = type(optimizer).__name__
                if owner.inner is optimizer:
                    raise RuntimeError(f"this {name} was given to a ZeroOptimizer, which has its gradients; call step() of that one")
                raise RuntimeError(
                    f"this {name} has parameters that a ZeroOptimizer trains, and would find no gradients; call close(gather=True) of that one "
                    "first (of a ZeroTrainer: trainer.zero)"
                )
