"""Checks of what users give: an error states rule, value and remedy, and nothing has been changed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from zk.config import ZeroConfig
from zk.options import NAMES
from zk.promised import check_promised
from zk.unit import Unit

Optimizers = list[torch.optim.Optimizer]
FP4 = getattr(torch, "float4_e2m1fn_x2", None)
WRAPPERS = {  # classes of modules that share gradients themselves
    "DistributedDataParallel": "pass model.module",
    "DataParallel": "pass model.module, and start a process for each GPU with torchrun",
    "FullyShardedDataParallel": "pass the model as it was before FSDP",
    "FSDPModule": "pass the model as it was before fully_shard",
}


def check_arguments(model: nn.Module, optimizer: Any, config: Any, own: type) -> Optimizers:
    """The optimizers, after a check that all is what it is called; ``own`` is ZeroOptimizer."""
    optimizers = [*optimizer] if isinstance(optimizer, (list, tuple)) else [optimizer]
    if config is not None and not isinstance(config, ZeroConfig):
        raise TypeError(f"config must be a zk.ZeroConfig, or give stage=2 and such; got {config!r}")
    if not isinstance(model, nn.Module):
        is_swapped = isinstance(model, torch.optim.Optimizer)
        hint = "; the arguments are swapped: ZeroOptimizer(model, optimizer)" if is_swapped else ""
        raise TypeError(f"model must be an nn.Module; got {type(model).__name__}{hint}")
    for name, module in model.named_modules():
        fault = fault_of_module(module)
        if fault:
            error = TypeError if isinstance(module, torch.jit.ScriptModule) else ValueError
            raise error(f"{f'module {name!r}' if name else 'the model'} is {fault}")
    if not optimizers:
        raise ValueError("the list of optimizers is empty; give at least one")
    for one in optimizers:
        if isinstance(one, own):
            raise ValueError(
                "the optimizer is a ZeroOptimizer already; wrap torch's optimizer once"
            )
        if not isinstance(one, torch.optim.Optimizer):
            kind = type(one).__name__
            raise TypeError(f"optimizer must be a torch.optim.Optimizer, or several; got {kind}")
        fault = fault_of_optimizer(one)
        if fault:
            raise ValueError(f"{type(one).__name__}: {fault}")
    return optimizers


def fault_of_module(module: nn.Module) -> str:
    """Why hooks of a module's would not do; "" where they would."""
    for kind in type(module).__mro__:
        if kind.__name__ in WRAPPERS:
            remedy = WRAPPERS[kind.__name__]
            return f"wrapped in {kind.__name__}, which shares gradients itself; {remedy}"
    if isinstance(module, torch.jit.ScriptModule) and any(True for _ in module.parameters()):
        return "a ScriptModule, which takes no hooks; wrap the model as it was before torch.jit"
    return ""


def fault_of_optimizer(optimizer: torch.optim.Optimizer) -> str:
    """Why an optimizer cannot be taken over; "" where it can."""
    step = vars(optimizer).get("step")
    # a scheduler counts calls that way
    if step is not None and not hasattr(step, "_wrapped_by_lr_sched"):
        return (
            "the step() of this optimizer was replaced, and zk never calls it; wrap it as torch made "
            "it, and use register_step_pre_hook or register_step_post_hook"
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return "differentiable=True, and no gradient goes through zk's update; remove it"
    has_some = any(group["params"] for group in optimizer.param_groups)
    return "" if has_some else "this optimizer has no parameters; leave it out"


def check_params(
    model: nn.Module,
    optimizers: Optimizers,
    device: Any,
    dtype_of: Callable[[Tensor], torch.dtype],
    held: Container[Tensor],
) -> None:
    """Parameters can be taken, and trained ones trained.

    They will have the dtype that ``dtype_of`` says, and move to ``device`` unless it is None. Those
    that are ``held`` are other ZeroOptimizers'.
    """
    names = {param: name for name, param in model.named_parameters()}
    if not names:
        raise ValueError("model has no parameters")
    for param, name in names.items():
        fault = fault_of_param(param, held)
        if fault:
            raise ValueError(f"parameter {name!r} {fault}")
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        check_promised(name, tensor)
    check_memory_is_own(model, names)
    places: dict[torch.device, str] = {}
    for param, name in names.items():
        places.setdefault(param.device, name)
    if device is None and len(places) > 1:
        (first, name), (second, other) = itertools.islice(places.items(), 2)
        raise ValueError(
            f"all parameters must be on one device; {name!r} is on {first} and {other!r} on {second}: "
            f"call model.to({str(first)!r}), or give device= to have it moved"
        )
    check_trained(names, optimizers, dtype_of)


def fault_of_param(param: Tensor, held: Container[Tensor]) -> str:
    """Why a parameter is no plain dense tensor that is free; "" where it is."""
    if param in held:
        return "belongs to another ZeroOptimizer; close() that one first, or make the model anew"
    if nn.parameter.is_lazy(param):
        return "has no shape yet (a lazy module); run one forward of the model first"
    if param.dtype is FP4:
        return f"is {param.dtype}, which torch cannot copy; keep it as param.view(torch.uint8)"
    if hasattr(param, "quant_state") or is_traceable_wrapper_subclass(param):
        return (
            f"is a {type(param).__name__}, whose values are in other tensors or codes; zk takes plain "
            "tensors: build the model without quantization, DTensors and tensor parallelism"
        )
    if param.layout is not torch.strided:
        return f"is {param.layout}, and zk takes dense tensors: make it of to_dense()"
    if any(n > 1 and not step for n, step in zip(param.shape, param.stride(), strict=True)):
        return "is expanded, and elements that share memory cannot be updated; use expanded.clone()"
    return ""


def check_trained(
    names: dict[nn.Parameter, str],
    optimizers: Optimizers,
    dtype_of: Callable[[Tensor], torch.dtype],
) -> None:
    """Parameters of optimizers are the model's, of one optimizer each, and of a dtype to train."""
    owners: dict[Tensor, torch.optim.Optimizer] = {}
    groups = [(one, group) for one in optimizers for group in one.param_groups]
    for optimizer, param in ((one, param) for one, group in groups for param in group["params"]):
        if param not in names:
            raise ValueError(
                f"a parameter of shape {tuple(param.shape)} is not one of model.parameters(); make "
                "the optimizer of the model that is passed"
            )
        if owners.setdefault(param, optimizer) is not optimizer:
            raise ValueError(
                f"parameter {names[param]!r} is in two of the optimizers; give it to one"
            )
        if param.requires_grad and dtype_of(param) not in NAMES:
            raise ValueError(
                f"parameter {names[param]!r} is {param.dtype}; zk trains fp32, bf16 and fp16: freeze "
                "it, convert it, or pass dtype= (which casts fp64 too, but for keep_dtype=)"
            )


def check_memory_is_own(model: nn.Module, names: dict[nn.Parameter, str]) -> None:
    """Nothing of the model shares memory with a Parameter: it would not see what that becomes."""
    others = {tensor: name for name, tensor in tensors_beside(model) if tensor not in names}
    found = [(*span_of(t), name, t in names) for t, name in (names | others).items() if t.numel()]
    last = "", 0, 0, "", False  # of those so far that end last
    for span in sorted(found):
        (where, _, stop, name, is_param), (other, start, _, second, is_another) = last, span
        if where == other and start < stop and (is_param or is_another):
            raise ValueError(
                f"parameters {name!r} and {second!r} share memory but are two Parameter objects, so "
                "they would drift apart; tie them by assigning one object to both modules"
                if is_param and is_another
                else f"{(name, second)[is_param]!r} shares memory with parameter "
                f"{(second, name)[is_param]!r}, which zk moves to other memory; assign the parameter "
                "itself, or take the view of it in forward"
            )
        last = span if where != other else max(last, span, key=lambda entry: entry[2])


def tensors_beside(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Buffers and attributes of modules that are tensors, or lists or dicts of some, by name."""
    for path, module in model.named_modules():
        for key, value in (vars(module) | module._buffers).items():
            # spectral_norm makes the weight anew in each forward
            for leaf in tree_leaves(value) if f"{key}_orig" not in module._parameters else ():
                if isinstance(leaf, Tensor) and leaf.layout is torch.strided and not leaf.is_nested:
                    yield f"{path}.{key}".lstrip("."), leaf


def span_of(tensor: Tensor) -> tuple[str, int, int]:
    """A memory, and the bytes in it from a tensor's first element to its last."""
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    where, start = str(tensor.device), int(tensor.storage_offset() * tensor.element_size())
    if tensor.is_meta:
        where = f"meta {tensor.untyped_storage()._cdata}"
    else:
        start = tensor.data_ptr()
    return where, start, start + (last + 1) * tensor.element_size()


def check_dense(names: Iterable[str], grads: Iterable[Tensor | None]) -> None:
    """Gradients are dense."""
    for name, grad in zip(names, grads, strict=True):
        if grad is not None and grad.layout is not torch.strided:
            raise TypeError(
                f"the gradient of {name!r} is sparse, and zk reduces dense ones: use sparse=False"
            )


def check_call(model: nn.Module, units: Iterable[Unit]) -> None:
    """The model is not called by DDP, and is what and where it was (of a unit: its first one)."""
    around = nn.parallel.DistributedDataParallel._get_active_ddp_module()
    if around is not None and around.module is model:
        raise RuntimeError(
            "the model was wrapped in DistributedDataParallel after ZeroOptimizer was made, and would "
            "reduce gradients a second time; use the model itself"
        )
    for unit in units:
        param = unit.params[0]
        if param.dtype is not unit.dtype or param.device != unit.device:
            raise RuntimeError(
                f"parameter {unit.names[0]!r} was moved or converted after ZeroOptimizer took it: it "
                f"is {param.dtype} on {param.device}; convert the model before, or use dtype= and "
                "device= of ZeroOptimizer"
            )


OWN = "process_group", "nvme_path", "device", "num_threads", "device_budget", "host_budget"


def alike(model: nn.Module, groups: list[dict[str, Any]], config: ZeroConfig) -> dict[str, object]:
    """What must be the same on all ranks, by name; what only this rank could read is its type's."""
    values = {name: value for name, value in vars(config).items() if name not in OWN}
    for number, group in enumerate(groups):
        values |= {f"param_groups[{number}][{key!r}]": value for key, value in group.items()}
        values[f"param_groups[{number}]['params']"] = len(group["params"])
    values |= {
        f"parameter {name!r}": f"{tuple(param.shape)} of {param.dtype}"
        + ("" if param.requires_grad else ", frozen")
        for name, param in model.named_parameters()
    }
    return {name: readable(value) for name, value in values.items()}


def readable(value: Any) -> object:
    """``value``, in words that are the same in every process."""
    if isinstance(value, (list, tuple)):
        return tuple(map(readable, value))
    if isinstance(value, dict):
        return {name: readable(one) for name, one in value.items()}
    if isinstance(value, Tensor):
        return value.tolist()
    is_known = value is None or isinstance(value, (bool, int, float, str, type, torch.dtype))
    return value if is_known or hasattr(value, "__dataclass_fields__") else type(value).__name__
