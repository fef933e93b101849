"""Calls of torch that go through all gradients, made right for parameters whose gradients a ZeroOptimizer has.

Clipping by the norm of all of them, dividing and dropping them need not bring them back to ``param.grad``. Another optimizer over the model
would train nothing. A pipeline reduces gradients after its last micro-batch. So the first ZeroOptimizer puts these functions in front of torch's
own; what belongs to none goes on to torch as it came.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad
from torch.optim.optimizer import register_optimizer_step_pre_hook

from zk.checkpoint import state_dicts
from zk.core.owners import owner_of
from zk.core.store import State
from zk.parallel.released import own_grad


@functools.cache
def watch_torch() -> None:
    """From now on torch's functions know of gradients that have left. Done once; later calls do nothing."""
    _clip_first()
    for kind, params_of in ((nn.Module, nn.Module.parameters), (torch.optim.Optimizer, _grouped)):
        _drop_before(kind, params_of)
    _go_to_owner("state_dict")
    _go_to_owner("load_state_dict")
    _go_to_owner("add_param_group")
    register_optimizer_step_pre_hook(_step_begins)


def watch_pipelines() -> None:
    """The same for the stages of torch.distributed.pipelining, once that was imported: which takes seconds, and is left to those who use it."""
    if "torch.distributed.pipelining.stage" in sys.modules:
        _watch_stages()


@functools.cache
def _watch_stages() -> None:
    kind: Any = sys.modules["torch.distributed.pipelining.stage"]._PipelineStageBase
    for name, ours in (("scale_grads", _scale_stage), ("backward_maybe_with_nosync", _stage_backward)):
        of_torch = getattr(kind, name, None)
        if of_torch is None:
            raise RuntimeError(f"torch {torch.__version__} has no {name} of a pipeline's stage, which zk builds on; torch 2.11 to 2.13 are supported")
        setattr(kind, name, functools.partialmethod(ours, of_torch))


def _go_to_owner(name: str) -> None:
    """Send calls of a method to the ZeroOptimizer that an optimizer was given to, as that one has its state."""
    of_torch = getattr(torch.optim.Optimizer, name)

    @functools.wraps(of_torch)
    def method(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        owner = next((owner_of(param) for param in _grouped(self)), None)
        if owner is None or not owner._built or owner.closed or self not in owner.inners:
            return of_torch(self, *args, **kwargs)
        if len(owner.inners) == 1 or name == "add_param_group":
            return getattr(owner, name)(*args, **kwargs)
        if name == "state_dict":
            return state_dicts.part(owner, self)
        raise ValueError(f"this {type(self).__name__} is one of several optimizers of a ZeroOptimizer; call {name}() of that, with the state of all")

    setattr(torch.optim.Optimizer, name, method)


def _grouped(optimizer: torch.optim.Optimizer) -> Iterator[nn.Parameter]:
    return (param for group in optimizer.param_groups for param in group["params"])


def _drop_before(kind: type[Any], params_of: Callable[[Any], Iterator[nn.Parameter]]) -> None:
    """Let ``zero_grad`` of a class drop the gradients that have left first."""
    of_torch = kind.zero_grad

    @functools.wraps(of_torch)
    def zero_grad(self: Any, set_to_none: bool = True) -> None:
        if _drop_gradients(list(params_of(self)), set_to_none):
            of_torch(self, set_to_none)

    kind.zero_grad = zero_grad


def _clip_first() -> None:
    """Let torch's ``clip_grad_norm_`` call zk's with what it called so far as first argument, also where others imported it by name long ago."""
    function: Any = clip_grad.clip_grad_norm_
    inner = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)).get("func")  # it is under a no_grad wrapper
    if inner is None:
        raise RuntimeError(f"torch {torch.__version__} defines clip_grad_norm_ in another way than zk knows; torch 2.11 to 2.13 are supported")
    inner.cell_contents = functools.partial(_clip_norm, inner.cell_contents)


def _trainer_of(param: Tensor) -> Any:
    """The ZeroOptimizer that trains a parameter, or None."""
    owner = owner_of(param)
    return owner if owner is not None and param in owner.units and owner.units[param][0].shard is not None else None


def _owner_of_all(params: Sequence[Tensor]) -> Any:
    """The ZeroOptimizer that trains these parameters, all that it trains, and no others with a gradient; None for anything else."""
    owner = next(filter(None, map(_trainer_of, params)), None)
    given = set(params)
    if owner is None or not all(given.issuperset(held.unit.users) for held in owner._trained):
        return None
    return owner if all(_trainer_of(param) is owner or param.grad is None for param in params) else None


def _clip_norm(
    of_torch: Callable[..., Tensor],
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    owner = _owner_of_all(params) if float(norm_type) == 2.0 and max_norm > 0 else None
    if owner is None:
        return of_torch(params, max_norm, norm_type, error_if_nonfinite, foreach)
    norm: Tensor = owner.clip_grad_norm_(float(max_norm))
    if error_if_nonfinite and not torch.isfinite(norm):
        raise RuntimeError(f"the norm of the gradients is {norm.item()}, and error_if_nonfinite=True asks for an error; the step would be skipped")
    return norm


def _owners_of(params: Iterable[Tensor]) -> list[Any]:
    """The ZeroOptimizers that hold these parameters, each once."""
    return list(filter(None, dict.fromkeys(map(owner_of, params))))


def _drop_gradients(params: list[nn.Parameter], set_to_none: bool) -> bool:
    """Those of ``params`` that have left are dropped, or become zeros. False if that was all that there is to do."""
    given = set(params)
    for owner in _owners_of(params):
        if owner.comm.world > 1 and _owner_of_all(params) is not owner:
            owner.grads.finish(keep=True)  # ranks then know of the same gradients
        pending = [
            param
            for held in owner._trained
            for param in held.unit.users
            if own_grad(param) is not None or owner.gradients.has_left(param)
        ]
        if given.issuperset(pending):
            owner.zero_grad(set_to_none)
            continue
        for param in pending:
            if param in given:
                param.grad = None if set_to_none else torch.zeros_like(param.grad)
    return any(owner_of(param) is None or own_grad(param) is not None for param in params)


def _scale_stage(stage: Any, of_torch: Callable[..., None], grad_scale_factor: int) -> None:
    """Divide the gradients of a pipeline's stage."""
    owner = _owner_of_all(list(stage.submod.parameters())) if grad_scale_factor != 1 else None
    if owner is None:
        of_torch(stage, grad_scale_factor)
    else:
        owner.scale_grads(1 / grad_scale_factor)


def _stage_backward(stage: Any, of_torch: Callable[..., Any], backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False) -> Any:
    """Backward of one micro-batch through a pipeline's stage. Only the last one reduces."""
    with contextlib.ExitStack() as contexts:
        for owner in _owners_of(stage.submod.parameters()):
            owner.refuse_collectives_beside("stages of a pipeline")
            if not last_backward and owner.comm.world > 1:
                contexts.enter_context(owner.no_sync())
            if backward_type != "full":
                if any(held.is_partitioned and held.state is State.RELEASED for held in owner.held):
                    raise RuntimeError(
                        f"stage {stage.stage_index} of a pipeline computes gradients of inputs and of weights apart (a zero-bubble schedule), for "
                        "which torch looks at all its parameters, and at ZeRO stage 3 these are released; call the schedule's step() within `with "
                        "zk.gather(module.parameters()):`, which gathers them once for all micro-batches, or take Interleaved1F1B, or ZeRO stage 2"
                    )
                contexts.enter_context(owner.gradients.hidden())
        return of_torch(stage, backward_type, bwd_kwargs, last_backward)


def _step_begins(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        for param in group["params"][:1]:
            owner = _trainer_of(param) if owner_of(param) is not optimizer else None
            if owner is not None:
                name = type(optimizer).__name__
                if optimizer in owner.inners:
                    raise RuntimeError(f"this {name} was given to a ZeroOptimizer, which has its gradients; call step() of that one")
                raise RuntimeError(
                    f"this {name} has parameters that a ZeroOptimizer trains, and would find no gradients; call close(gather=True) of that one "
                    "first (of a ZeroTrainer: trainer.zero)"
                )
