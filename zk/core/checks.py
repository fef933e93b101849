"""Checks of a model, its optimizer and groups, as the user gave or changed them: an error has rule, value and remedy."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from zk.core.owners import inner_tensors, is_coded, is_dtensor, is_wrapper, owner_of
from zk.core.store import UnitStore
from zk.core.units import Unit
from zk.kernels.step import AdamStep
from zk.nn.deferred import can_make, device_of
from zk.offload.rules import AdamRule, OwnStep, Rule
from zk.parallel.model_parallel import check_dtensor
from zk.parallel.released import is_released


def check_arguments(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], already: type) -> None:
    """``already`` is what a wrapped optimizer is an instance of."""
    if not optimizers:
        raise ValueError("the list of optimizers is empty; give at least one")
    if not isinstance(model, nn.Module):
        swapped = isinstance(model, torch.optim.Optimizer) and isinstance(optimizers[0], nn.Module)
        hint = "; the two arguments are swapped: ZeroOptimizer(model, optimizer)" if swapped else ""
        raise TypeError(f"model must be an nn.Module; got {type(model).__name__}{hint}")
    for optimizer in optimizers:
        if isinstance(optimizer, already):
            raise ValueError("the optimizer is a ZeroOptimizer already; wrap the torch optimizer once")
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"optimizer must be a torch.optim.Optimizer; got {type(optimizer).__name__}")
        step = vars(optimizer).get("step")
        if step is not None and not hasattr(step, "_wrapped_by_lr_sched"):  # a scheduler counts calls that way
            raise ValueError(
                "the step() of this optimizer was replaced, and a ZeroOptimizer never calls it; wrap the optimizer as torch made it, and register "
                "what is to run around a step with register_step_pre_hook or register_step_post_hook"
            )
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise ValueError("model is wrapped in DistributedDataParallel, which would reduce gradients a second time; pass model.module")
    if next(model.parameters(), None) is None:
        raise ValueError("model has no parameters")
    for name, param in model.named_parameters():
        if owner_of(param) is not None:
            raise ValueError(
                f"parameter {name!r} belongs to another ZeroOptimizer; close() that one first (with gather=True, if it partitions parameters)"
            )
        if is_dtensor(param):
            check_dtensor(name, param)
    for name, buffer in model.named_buffers():
        if is_dtensor(buffer):
            raise ValueError(
                f"buffer {name!r} is a DTensor, and zk sends the first rank's buffers to all, whole; put a plain tensor there: "
                "module.register_buffer(name, buffer.to_local())"
            )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta and not all(can_make(inner) for _, inner in inner_tensors(tensor)):
            built = "distribute a model that has memory" if is_dtensor(tensor) else "build the model within zk.deferred_init()"
            raise ValueError(
                f"{name!r} is on the meta device and nothing says what its values are; {built}, or call zk.load_pretrained(model, path) first"
            )


def check_params(
    model: nn.Module, groups: Sequence[dict[str, Any]], stored: Mapping[Tensor, torch.dtype], device: torch.device | None
) -> None:
    """Every trained parameter is the model's, will be ``stored`` in a dtype that zk trains, and shares memory with no other.

    All parameters are on one device, if they are not moved to ``device``.
    """
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule) and any(True for _ in module.parameters()):
            raise TypeError(
                f"{f'module {name!r}' if name else 'the model'} is a ScriptModule, which takes no hooks: wrap the model as it was before torch.jit; "
                "for inference, make another one, give it model.state_dict(), and script that"
            )
    names = {param: name for name, param in model.named_parameters()}
    for index, group in enumerate(groups):
        for param in group["params"]:
            if param not in names:
                raise ValueError(
                    f"a parameter of shape {tuple(param.shape)} in group {index} is not one of model.parameters(); make the optimizer from "
                    "the model that is passed (after any .to() that replaces parameters)"
                )
            name = names[param]
            if nn.parameter.is_lazy(param):
                raise ValueError(f"parameter {name!r} has no shape yet (a lazy module); run one forward of the model before wrapping it")
            if param.requires_grad and is_coded(param):
                raise ValueError(
                    f"parameter {name!r} is a {type(param).__name__}, and zk trains plain tensors only: freeze it, and train an adapter over it"
                )
            if param.requires_grad and stored[next(inner_tensors(param))[1]] not in (torch.float32, torch.bfloat16, torch.float16):
                raise ValueError(
                    f"parameter {name!r} is {param.dtype}; zk trains fp32, bf16 and fp16: freeze it, convert it, or pass dtype= (which casts "
                    "fp64, fp32, bf16 and fp16 but for what keep_dtype= names)"
                )
    if device is None:
        check_one_device(names)
    for param, name in names.items():
        if type(param).__name__ == "Int8Params" and param.dtype == torch.int8:
            raise ValueError(
                f"parameter {name!r} is of bitsandbytes in 8 bits, whose layers keep a second hold on their codes, so that these cannot be moved; "
                "quantize to 4 bits (load_in_4bit=True), or with torchao's Int8WeightOnlyConfig"
            )
        if getattr(getattr(param, "quant_state", None), "packing_format_for_cpu", False):
            raise ValueError(
                f"bitsandbytes has packed the codes of parameter {name!r} for evaluation on this CPU: no gradient goes through the layer now, and "
                "its scales were rounded; load the model again, and make ZeroOptimizer, which keeps codes as they are, before evaluating it"
            )
        if device is not None and device_of(next(inner_tensors(param))[1]) != device and is_wrapper(param):
            made = "distribute it over a mesh of devices" if is_dtensor(param) else "quantize the model"
            raise ValueError(
                f"parameter {name!r} is a {type(param).__name__} on {param.device}, and cannot be moved to {device} without a copy; {made} where it "
                "computes"
            )
    free = {tensor: label for param, name in names.items() if owner_of(param) is None for label, tensor in inner_tensors(param, name)}
    for param, other in _sharing(free, free):
        raise ValueError(
            f"parameters {free[param]!r} and {free[other]!r} share memory but are two Parameter objects, so they would drift apart; tie them by "
            f"assigning one object to both modules"
        )


def check_aliases(model: nn.Module) -> None:
    """No buffer or attribute of a module is a view of a parameter: parameters move to other memory, and it would keep the old values."""
    params = {tensor: label for name, param in model.named_parameters() for label, tensor in inner_tensors(param, name)}
    wrappers = set(filter(is_wrapper, model.parameters()))
    others: dict[Tensor, str] = {}
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        others |= {buffer: prefix + name for name, buffer in module._buffers.items() if buffer is not None}
        for name, value in vars(module).items():
            if name in ("_parameters", "_buffers"):
                continue
            for leaf in value if isinstance(value, (list, tuple)) else value.values() if isinstance(value, dict) else (value,):
                if not isinstance(leaf, Tensor) or leaf in params or leaf in wrappers:
                    continue
                if f"{name}_orig" not in module._parameters:  # (spectral_norm makes it anew)
                    others[leaf] = prefix + name
    for param, other in _sharing(params, others):
        raise ValueError(
            f"{others[other]!r} shares memory with parameter {params[param]!r}, which zk moves to other memory, so it would keep the values of now; "
            "assign the parameter itself, or take the view of it in forward; if forward does, set what is left of an earlier one to None"
        )


def _extent(tensor: Tensor) -> tuple[str, int, int] | None:
    """The device, and the bytes there from the first element to the last; None where it has no memory."""
    if is_wrapper(tensor) or tensor.is_meta or tensor.is_nested or tensor.layout is not torch.strided or not tensor.numel() or is_released(tensor):
        return None
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return str(tensor.device), tensor.data_ptr(), tensor.data_ptr() + span * tensor.element_size()


def _sharing(params: Iterable[Tensor], others: Iterable[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Pairs of a parameter and another tensor that have memory in common."""
    mine, last, where, reach = set(params), None, "", 0
    spans = ((extent, tensor) for tensor in dict.fromkeys((*params, *others)) if (extent := _extent(tensor)) is not None)
    for (device, start, stop), this in sorted(spans, key=operator.itemgetter(0)):
        if device != where:
            where, reach = device, 0
        if last is not None and start < reach and not mine.isdisjoint((this, last)):
            yield (this, last) if this in mine else (last, this)
        if stop > reach:
            reach, last = stop, this


def check_one_device(names: Mapping[nn.Parameter, str]) -> None:
    """One optimizer has one link between device and host. Parameters without memory count where they will compute."""
    first: dict[torch.device, str] = {}
    for param, name in names.items():
        if owner_of(param) is None:
            first.setdefault(device_of(next(inner_tensors(param))[1]), name)
    if len(first) > 1:
        (device, name), (other, another) = itertools.islice(first.items(), 2)
        raise ValueError(
            f"all parameters must be on one device; {name!r} is on {device} and {another!r} on {other}: move the model with "
            f"model.to({str(device)!r}), or give device= to have zk move it"
        )


def check_groups(optimizer: Any) -> None:
    """Check what the user did to param_groups and parameters since the start; the same on all ranks, so before any collective."""
    groups, rules = optimizer.param_groups, optimizer.rules
    grouped = {param for group in groups for param in group["params"]}
    for held in optimizer._trained:
        for name, param in zip(held.unit.names, held.unit.users, strict=True):
            if param not in grouped:
                raise ValueError(f"parameter {name!r} is in no param_group any more; to stop training it set requires_grad=False")
    if len(groups) != len(rules):
        raise ValueError("a group was added to one of a list of optimizers; make each with all its groups, also of parameters that are frozen now")
    for group, rule in zip(groups, rules, strict=True):
        check_group(optimizer.units, group, rule)


def check_group(units: Mapping[nn.Parameter, tuple[UnitStore, int]], group: Mapping[str, Any], rule: Rule) -> None:
    """That there is room for the state that the group's options ask for."""
    asked = set(rule.state_names(group))
    for param in group["params"]:
        if is_coded(param):
            continue
        if param not in units:
            raise ValueError(f"a parameter of shape {tuple(param.shape)} was put into param_groups; use add_param_group")
        shard = units[param][0].shard
        missing = asked.difference(shard.asked) if shard is not None else None
        if missing:
            raise ValueError(
                f"the options of a param_group ask for {', '.join(sorted(missing))}, which the optimizer had not when ZeroOptimizer was made; "
                "set amsgrad, momentum and the like before"
            )


def check_whole(units: Sequence[Unit], rule_of: Callable[[Unit], Rule], pieces: Collection[str]) -> None:
    """That no parameter which is updated whole is one of the ``pieces`` of larger ones."""
    for unit in units:
        rule = rule_of(unit) if unit.trained else None
        if not isinstance(rule, OwnStep) or not rule.is_whole:
            continue
        for name in unit.names:
            if name in pieces or unit.around:
                raise ValueError(
                    f"parameter {name!r} is a piece of a larger one (a tile, or cut over model parallel ranks), and {rule.name} updates whole "
                    "parameters; leave that layer uncut, or give the parameter to another optimizer, such as torch.optim.AdamW"
                )


def check_state_dtype(dtype: object, rules: Sequence[Rule], groups: Sequence[Mapping[str, Any]], stored: Mapping[Tensor, torch.dtype]) -> None:
    """That there is state which another dtype than fp32 is for; ``stored``: the dtypes of parameters."""
    if dtype == torch.uint8:
        for rule, group in zip(rules, groups, strict=True):
            if not isinstance(rule, AdamRule):
                name = getattr(rule, "name", "SGD")
                raise ValueError(f"state_dtype='8bit' is for AdamW and Adam, whose second moment bounds the first one; got {name}: remove it")
            AdamStep.of(group, rule.decoupled, 1).check_coded()
            if any(stored.get(param) == torch.float16 for param in group["params"] if param.requires_grad):
                raise ValueError("state_dtype='8bit' is for parameters in bf16 and fp32: fp16 has no 24-bit master; use dtype='bf16', or remove it")
        return
    own = next((rule for rule in rules if isinstance(rule, OwnStep)), None)
    if own is not None:
        raise ValueError(f"state_dtype={dtype} is for AdamW, Adam and SGD; {own.name} updates by its own step(), with state in fp32: remove it")
    if not any(rule.state_names(group) for rule, group in zip(rules, groups, strict=True)):
        raise ValueError(f"state_dtype={dtype} has no effect: the optimizer with these options keeps no state")


def check_options(number: int, group: Mapping[str, Any], saved: Mapping[str, Any], where: str) -> None:
    """Check that the options of a saved group are of the kind that is here: a step would fail on others, or go another way."""
    for name, value in saved.items():
        here = group.get(name)
        if name != "params" and here is not None and kind_of(value) != kind_of(here) and not (value is None and kind_of(here) != "number"):
            raise ValueError(f"{where}: {name!r} of param_groups[{number}] is {value!r}, and {here!r} in this optimizer: of another type")


def check_scale_and_counters(saved: Mapping[str, Any], where: str) -> None:
    """Check that a saved loss scale and counters are numbers."""
    if not isinstance(saved, Mapping) or not all(isinstance(saved.get(part), Mapping) for part in ("loss_scale", "counters")):
        raise ValueError(f"{where} has no loss scale, or no counters")
    for name, value in (*saved["loss_scale"].items(), *saved["counters"].items()):
        if kind_of(value) != "number" and name != "active":
            raise ValueError(f"{where}: {name!r} is {value!r}, and no number")


def kind_of(option: Any) -> str:
    """The use of an option, whatever holds it: a learning rate may be a tensor."""
    if isinstance(option, bool) or option is None:
        return type(option).__name__
    if isinstance(option, (int, float, Tensor, np.number)):
        return "number"
    return "sequence" if isinstance(option, (list, tuple)) else type(option).__name__
