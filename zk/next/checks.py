"""Checks of what users give: an error states the rule, the value and the remedy, and changes nothing."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from zk.next.config import ZeroConfig
from zk.next.options import NAMES
from zk.next.promised import check_promised, device_of
from zk.next.unit import Unit

Optimizers = list[torch.optim.Optimizer]
FP4 = getattr(torch, "float4_e2m1fn_x2", None)  # which torch cannot copy
WRAPPERS = {  # classes of modules that would reduce gradients a second time
    "DistributedDataParallel": "pass model.module",
    "DataParallel": "pass model.module, and start a process for each GPU with torchrun",
    "FullyShardedDataParallel": "pass the model as it was before FSDP",
    "FSDPModule": "pass the model as it was before fully_shard",
}


def check_arguments(model: nn.Module, optimizer: Any, config: Any, own: type) -> Optimizers:
    """The optimizers, after a check that all is what it is called.

    ``own``: the class of optimizers that wrap others.
    """
    optimizers = [*optimizer] if isinstance(optimizer, (list, tuple)) else [optimizer]
    if config is not None and not isinstance(config, ZeroConfig):
        raise TypeError(
            f"config must be a zk.ZeroConfig, or give options by name (stage=2); got {config!r}"
        )
    if not isinstance(model, nn.Module):
        is_swapped = isinstance(model, torch.optim.Optimizer)
        hint = "; the arguments are swapped: ZeroOptimizer(model, optimizer)" if is_swapped else ""
        raise TypeError(f"model must be an nn.Module; got {type(model).__name__}{hint}")
    if not optimizers:
        raise ValueError("the list of optimizers is empty; give at least one")
    for one in optimizers:
        check_optimizer(one, own)
    for name, module in model.named_modules():
        kinds = [kind.__name__ for kind in type(module).__mro__ if kind.__name__ in WRAPPERS]
        if kinds:
            whose = f"module {name!r}" if name else "the model"
            raise ValueError(
                f"{whose} is wrapped in {kinds[0]}, which shares gradients itself; {WRAPPERS[kinds[0]]}"
            )
        if isinstance(module, torch.jit.ScriptModule) and any(True for _ in module.parameters()):
            raise TypeError(
                f"{f'module {name!r}' if name else 'the model'} is a ScriptModule, which takes no "
                "hooks; wrap the model as it was before torch.jit"
            )
    return optimizers


def check_optimizer(optimizer: Any, own: type) -> None:
    """It is a torch optimizer whose arithmetic and parameters can be taken over."""
    if isinstance(optimizer, own):
        raise ValueError("the optimizer is a ZeroOptimizer already; wrap the torch optimizer once")
    if not isinstance(optimizer, torch.optim.Optimizer):
        kind = type(optimizer).__name__
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, or a list of them; got {kind}")
    step = vars(optimizer).get("step")
    # a scheduler counts calls that way
    if step is not None and not hasattr(step, "_wrapped_by_lr_sched"):
        raise ValueError(
            "the step() of this optimizer was replaced, and a ZeroOptimizer never calls it; wrap the "
            "optimizer as torch made it, and use register_step_pre_hook or register_step_post_hook"
        )
    if not any(group["params"] for group in optimizer.param_groups):
        raise ValueError(f"this {type(optimizer).__name__} has no parameters; leave it out")
    for number, group in enumerate(optimizer.param_groups):
        if group.get("differentiable"):
            raise ValueError(
                f"differentiable=True in group {number}: the update of a ZeroOptimizer has no "
                "backward; remove it"
            )


def check_params(
    model: nn.Module,
    optimizers: Optimizers,
    device: Any,
    dtype_of: Callable[[Tensor], torch.dtype],
    held: Container[Tensor],
) -> None:
    """Parameters can be taken, and trained ones trained.

    Args:
        model: of the user.
        optimizers: over parameters of it.
        device: where parameters will be moved; None: they stay where they are.
        dtype_of: the dtype that a parameter will have.
        held: parameters of other ZeroOptimizers.
    """
    names = {param: name for name, param in model.named_parameters()}
    if not names:
        raise ValueError("model has no parameters")
    for param, name in names.items():
        check_param(name, param, held)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        check_promised(name, tensor)
    check_memory_is_own(names)
    places: dict[torch.device, str] = {}
    for param, name in names.items():
        places.setdefault(device_of(param), name)
    if device is None and len(places) > 1:
        (first, name), (second, other) = itertools.islice(places.items(), 2)
        raise ValueError(
            f"all parameters must be on one device; {name!r} is on {first} and {other!r} on {second}: "
            f"call model.to({str(first)!r}), or give device= to have it moved"
        )
    seen: dict[Tensor, int] = {}
    for number, optimizer in enumerate(optimizers):
        for group, param in params_of(optimizer):
            check_trained(names, group, param, dtype_of)
            if seen.setdefault(param, number) != number:
                raise ValueError(
                    f"parameter {names[param]!r} is in two of the optimizers; give it to one of them"
                )


def params_of(optimizer: torch.optim.Optimizer) -> Iterator[tuple[int, Tensor]]:
    """The number of its group, and each parameter."""
    for number, group in enumerate(optimizer.param_groups):
        yield from ((number, param) for param in group["params"])


def check_param(name: str, param: Tensor, held: Container[Tensor]) -> None:
    """One parameter is a plain dense tensor, and nobody else's."""
    if param in held:
        raise ValueError(
            f"parameter {name!r} belongs to another ZeroOptimizer; close() that one first"
        )
    if nn.parameter.is_lazy(param):
        raise ValueError(
            f"parameter {name!r} has no shape yet (a lazy module); run one forward of the model first"
        )
    kind = type(param).__name__
    is_coded = param.dtype is FP4 or hasattr(param, "quant_state")
    if is_coded or is_traceable_wrapper_subclass(param):
        raise ValueError(
            f"parameter {name!r} is a {kind}, whose values are in other tensors or codes; zk takes "
            "plain tensors: build the model without quantization, DTensors and tensor parallelism"
        )
    if param.layout is not torch.strided:
        raise ValueError(
            f"parameter {name!r} is {param.layout}; zk takes dense tensors: to_dense()"
        )
    if any(n > 1 and not step for n, step in zip(param.shape, param.stride(), strict=True)):
        raise ValueError(
            f"parameter {name!r} is expanded: elements share memory, which no optimizer can update; "
            "make it of expanded.clone()"
        )


def check_trained(
    names: dict[nn.Parameter, str],
    group: int,
    param: Any,
    dtype_of: Callable[[Tensor], torch.dtype],
) -> None:
    """One parameter of an optimizer is the model's, and of a dtype that can be trained."""
    if param not in names:
        raise ValueError(
            f"a parameter of shape {tuple(param.shape)} in group {group} is not one of "
            "model.parameters(); make the optimizer of the model that is passed"
        )
    if param.requires_grad and dtype_of(param) not in NAMES:
        raise ValueError(
            f"parameter {names[param]!r} is {param.dtype}; zk trains fp32, bf16 and fp16: freeze it, "
            "convert it, or pass dtype= (which casts fp64 too, but for what keep_dtype= names)"
        )


def check_memory_is_own(names: dict[nn.Parameter, str]) -> None:
    """No two Parameters share memory: each would get its own, and drift apart."""
    spans = sorted(
        (*place_of(param), extent(param), name) for param, name in names.items() if param.numel()
    )
    for (device, start, nbytes, name), (other, after, _, second) in itertools.pairwise(spans):
        if device == other and after < start + nbytes:
            raise ValueError(
                f"parameters {name!r} and {second!r} share memory but are two Parameter objects, so "
                "they would drift apart; tie them by assigning one object to both modules"
            )


def place_of(tensor: Tensor) -> tuple[str, int]:
    """A memory, and the byte in it where a tensor starts."""
    if tensor.is_meta:
        storage = tensor.untyped_storage()._cdata
        return f"meta {storage}", tensor.storage_offset() * tensor.element_size()
    return str(tensor.device), tensor.data_ptr()


def extent(tensor: Tensor) -> int:
    """Bytes from the first element to the last, gaps included."""
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def check_dense(names: Iterable[str], grads: Iterable[Tensor | None]) -> None:
    """Gradients are dense."""
    for name, grad in zip(names, grads, strict=True):
        if grad is not None and grad.layout is not torch.strided:
            raise TypeError(
                f"the gradient of {name!r} is sparse, and zk reduces dense ones; make the layer with "
                "sparse=False"
            )


def check_unmoved(units: Iterable[Unit]) -> None:
    """A unit's first parameter has the dtype and the device that it was given."""
    for unit in units:
        param = unit.params[0]
        if param.dtype is not unit.dtype or param.device != unit.device:
            raise RuntimeError(
                f"parameter {unit.names[0]!r} was moved or converted after ZeroOptimizer took it "
                f"(model.to() or .half()): it is {param.dtype} on {param.device}; convert the model "
                "before wrapping it, or use dtype= and device="
            )
