"""Checks of what users give: an error states rule, value and remedy, and nothing has been changed."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from zk.config import ZeroConfig
from zk.options import NAMES, require
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


FAULTS: tuple[tuple[Callable[[Tensor], bool], str], ...] = (
    (nn.parameter.is_lazy, "has no shape yet (a lazy module); run one forward of the model first"),
    (
        lambda p: p.dtype is FP4,
        "is {dtype}, which torch cannot copy; keep it as param.view(torch.uint8)",
    ),
    (
        lambda p: hasattr(p, "quant_state") or is_traceable_wrapper_subclass(p),
        "is a {kind}, whose values are in other tensors or codes; zk takes plain tensors: build the "
        "model without quantization, DTensors and tensor parallelism",
    ),
    (
        lambda p: p.layout is not torch.strided,
        "is {layout}, and zk takes dense tensors: make it of to_dense()",
    ),
    (
        lambda p: any(n > 1 and not step for n, step in zip(p.shape, p.stride(), strict=True)),
        "is expanded, and elements that share memory cannot be updated; use expanded.clone()",
    ),
)


def check_arguments(model: nn.Module, optimizer: Any, config: Any, own: type) -> Optimizers:
    """The optimizers, after a check that all is what it is called; ``own`` is ZeroOptimizer."""
    require(
        config is None or isinstance(config, ZeroConfig),
        f"config must be a zk.ZeroConfig, or give stage=2 and such; got {config!r}",
        TypeError,
    )
    is_swapped = isinstance(model, torch.optim.Optimizer)
    hint = "; the arguments are swapped: ZeroOptimizer(model, optimizer)" * is_swapped
    words = f"model must be an nn.Module; got {type(model).__name__}{hint}"
    require(isinstance(model, nn.Module), words, TypeError)
    for name, module in model.named_modules():
        where = f"module {name!r} is" if name else "the model is"
        for kind in [kind.__name__ for kind in type(module).__mro__ if kind.__name__ in WRAPPERS]:
            raise ValueError(
                f"{where} wrapped in {kind}, which shares gradients itself; {WRAPPERS[kind]}"
            )
        is_script = isinstance(module, torch.jit.ScriptModule)
        require(
            not is_script or not [*module.parameters()],
            f"{where} a ScriptModule, which takes no hooks; wrap the model as it was before torch.jit",
            TypeError,
        )
    optimizers = [*optimizer] if isinstance(optimizer, (list, tuple)) else [optimizer]
    require(optimizers, "the list of optimizers is empty; give at least one")
    for one in optimizers:
        check_optimizer(one, own)
    return optimizers


def check_optimizer(one: Any, own: type) -> None:
    """An optimizer can be taken over."""
    kind = type(one).__name__
    words = "the optimizer is a ZeroOptimizer already; wrap torch's optimizer once"
    require(not isinstance(one, own), words)
    words = f"optimizer must be a torch.optim.Optimizer, or several; got {kind}"
    require(isinstance(one, torch.optim.Optimizer), words, TypeError)
    step = vars(one).get("step")
    require(
        step is None or hasattr(step, "_wrapped_by_lr_sched"),  # a scheduler counts calls that way
        f"{kind}: the step() of this optimizer was replaced, and zk never calls it; wrap it as torch "
        "made it, and use register_step_pre_hook or register_step_post_hook",
    )
    words = "differentiable=True, and no gradient goes through zk's update; remove it"
    require(not any(g.get("differentiable") for g in one.param_groups), f"{kind}: {words}")
    words = "this optimizer has no parameters; leave it out"
    require(any(group["params"] for group in one.param_groups), f"{kind}: {words}")


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
    require(names, "model has no parameters")
    for param, name in names.items():
        words = "belongs to another ZeroOptimizer; close() that one first, or make the model anew"
        require(param not in held, f"parameter {name!r} {words}")
        for is_faulty, words in FAULTS:
            own = {"dtype": param.dtype, "layout": param.layout, "kind": type(param).__name__}
            require(not is_faulty(param), f"parameter {name!r} {words.format(**own)}")
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        check_promised(name, tensor)
    check_memory_is_own(model, names)
    places: dict[str, str] = {}
    for param, name in names.items():
        places.setdefault(str(param.device), name)
    homes = " and ".join(f"{name!r} on {place}" for place, name in places.items())
    require(
        device is not None or len(places) == 1,
        f"all parameters must be on one device; there is {homes}: call model.to({next(iter(places))!r}), or "
        "give device= to have it moved",
    )
    check_trained(names, optimizers, dtype_of)


def check_trained(
    names: dict[nn.Parameter, str],
    optimizers: Optimizers,
    dtype_of: Callable[[Tensor], torch.dtype],
) -> None:
    """Parameters of optimizers are the model's, of one optimizer each, and of a dtype to train."""
    owners: dict[Tensor, torch.optim.Optimizer] = {}
    groups = [(one, group) for one in optimizers for group in one.param_groups]
    for optimizer, param in ((one, param) for one, group in groups for param in group["params"]):
        require(
            param in names,
            f"a parameter of shape {tuple(param.shape)} is not one of model.parameters(); make the "
            "optimizer of the model that is passed",
        )
        require(
            owners.setdefault(param, optimizer) is optimizer,
            f"parameter {names[param]!r} is in two of the optimizers; give it to one",
        )
        require(
            not param.requires_grad or dtype_of(param) in NAMES,
            f"parameter {names[param]!r} is {param.dtype}; zk trains fp32, bf16 and fp16: freeze it, "
            "convert it, or pass dtype= (which casts fp64 too, but for keep_dtype=)",
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
    storage = tensor.untyped_storage()
    where = f"meta {storage._cdata}" if tensor.is_meta else str(tensor.device)
    start = int(storage.data_ptr() + tensor.storage_offset() * tensor.element_size())
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
        options = {key: value for key, value in group.items() if key != "name"}
        values |= {f"param_groups[{number}][{key!r}]": value for key, value in options.items()}
        values[f"param_groups[{number}]['params']"] = len(group["params"])
    values |= {
        f"parameter {name!r}": f"{tuple(param.shape)} of {param.dtype}"
        + f", strides {param.stride()}" * (not param.is_contiguous())
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
    if hasattr(value, "tolist"):  # a tensor, or a number of numpy's
        return readable(value.tolist())
    if isinstance(value, float) and value.is_integer():
        return int(value)
    is_known = value is None or isinstance(value, (bool, int, float, str, type, torch.dtype))
    return value if is_known or hasattr(value, "__dataclass_fields__") else type(value).__name__
