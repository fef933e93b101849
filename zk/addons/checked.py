"""Refuse by name what zk cannot train, before anything is moved: rule, value and remedy.

One warning of a model that computes in 16 bits on a CPU without kernels for it. Every optimizer has
it. Uses of the core: RUNTIMES, dtypes_of, ``Runtime.stores``, ``Layout.owners``; three seams.
"""

import functools
import gc
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from zk.addon import Addon
from zk.config import NAMES
from zk.logs import log, require
from zk.parallel.runtime import RUNTIMES, storage_of
from zk.precision import dtypes_of

Names = dict[Any, str]
WRAPPERS = {  # classes of modules that share gradients themselves
    "DistributedDataParallel": "pass model.module",
    "DataParallel": "pass model.module, and start a process for each GPU with torchrun",
    "FullyShardedDataParallel": "pass the model as it was before FSDP",
    "FSDPModule": "pass the model as it was before fully_shard",
}
FAULTS: dict[str, Any] = {  # what is wrong with a parameter -> tells if it is
    "belongs to another ZeroOptimizer; close() that one first, or make the model anew": (
        lambda p: any(p in runtime.store_of for runtime in RUNTIMES)
    ),
    "has no shape yet (a lazy module); run one forward of the model first": nn.parameter.is_lazy,
    "is {0.dtype}, which torch cannot copy; keep it as param.view(torch.uint8)": (
        lambda p: p.dtype is torch.float4_e2m1fn_x2
    ),
    "is a {0.__class__.__name__}, whose values are in other tensors or codes; zk takes plain "
    "tensors: build the model without quantization, DTensors and tensor parallelism": (
        is_traceable_wrapper_subclass
    ),
    "is {0.layout}, and zk takes dense tensors: make it of to_dense()": (
        lambda p: p.layout is not torch.strided
    ),
    "is expanded, and elements that share memory cannot be updated; use expanded.clone()": (
        lambda p: any(n > 1 and not step for n, step in zip(p.shape, p.stride(), strict=True))
    ),
}


class Checked(Addon):
    """Modules, optimizers, parameters, their memory, and what is trained, in this order."""

    made: Any = ()  # the optimizer, once it is

    def check(self, model: nn.Module, optimizers: Any, config: Any) -> None:
        self.names = names = {param: name for name, param in model.named_parameters()}
        check_modules(model)
        for optimizer in optimizers:
            check_optimizer(optimizer)
        check_params(names, config.device)
        check_memory_is_own(model, names)
        check_trained(names, optimizers, dtypes_of(model, config.dtype, config.keep_dtype))

    def attach(self, optimizer: Any) -> None:
        self.made = (optimizer,)
        for store in optimizer._runtime.stores if optimizer._layout.device.type == "cpu" else ():
            warn(store.unit.dtype)

    def before_step(self) -> None:
        """Refuse gradients of parameters that were unfrozen: nothing trains them."""
        for one in self.made:
            for param in unfrozen(one) if one._trained else ():  # else it is being closed
                require(
                    param.grad is None and param.dtype in NAMES,
                    f"parameter {self.names[param]!r} ({param.dtype}) was unfrozen after the "
                    "ZeroOptimizer was made, which does not train it: give growing=True for fp32, bf16 "
                    "and fp16, and call the model after it; or close() it and make another. "
                    "model.zero_grad() drops gradients",
                    RuntimeError,
                )


def unfrozen(optimizer: Any) -> dict[nn.Parameter, Any]:
    """Parameters of groups that were frozen when the units were made: the stores that have them."""
    stores, owners = optimizer._runtime.store_of, optimizer._layout.owners
    return {p: stores[p] for p in owners if p.requires_grad and not stores[p].unit.is_trained}


@functools.cache
def warn(dtype: torch.dtype) -> None:
    is_slow = dtype in (torch.bfloat16, torch.float16) and torch.backends.mkldnn.is_available()
    if is_slow and not getattr(torch.ops.mkldnn, f"_is_mkldnn_{NAMES[dtype]}_supported")():
        log.warning(
            "the model computes in %s, for which torch has no fast kernels on this CPU: matrix products "
            "take 10 to 100 times as long as in fp32; use dtype='fp32'",
            NAMES[dtype],
        )


def check_modules(model: nn.Module) -> None:
    """No module shares gradients itself, and all take hooks."""
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


def check_optimizer(one: torch.optim.Optimizer) -> None:
    """An optimizer can be taken over."""
    kind, step = type(one).__name__, vars(one).get("step")
    require(
        step is None or hasattr(step, "_wrapped_by_lr_sched"),  # a scheduler counts calls that way
        f"{kind}: the step() of this optimizer was replaced, and zk never calls it; wrap it as torch "
        "made it, and use register_step_pre_hook or register_step_post_hook",
    )
    words = "differentiable=True, and no gradient goes through zk's update; remove it"
    require(not any(g.get("differentiable") for g in one.param_groups), f"{kind}: {words}")
    words = "this optimizer has no parameters; leave it out"
    require(any(group["params"] for group in one.param_groups), f"{kind}: {words}")


def check_params(names: Names, device: torch.device | None) -> None:
    """Parameters can be taken, and move to ``device`` unless it is None."""
    require(names, "model has no parameters")
    for param, name in names.items():
        for words, is_faulty in FAULTS.items():
            require(not is_faulty(param), f"parameter {name!r} {words.format(param)}")
    places = {param.device: name for param, name in names.items()}
    homes = " and ".join(f"{name!r} on {place}" for place, name in places.items())
    require(
        device is not None or len(places) == 1,
        f"all parameters must be on one device; there is {homes}: call model.to(device), or "
        "give device= to have it moved",
    )


def check_trained(names: Names, optimizers: Any, dtype_of: Any) -> None:
    """Parameters of optimizers are the model's, of one optimizer each, and of a dtype to train."""
    owners: dict[Tensor, Any] = {}
    for optimizer in optimizers:
        for param in [p for group in optimizer.param_groups for p in group["params"]]:
            require(
                param in names,
                f"a parameter of shape {tuple(param.shape)} is not one of model.parameters(); make "
                "the optimizer of the model that is passed",
            )
            require(
                owners.setdefault(param, optimizer) is optimizer,
                f"parameter {names[param]!r} is in two of the optimizers; give it to one",
            )
            require(
                not param.requires_grad or dtype_of(param) in NAMES,
                f"parameter {names[param]!r} is {param.dtype}; zk trains fp32, bf16 and fp16: freeze "
                "it, convert it, or pass dtype= (which casts fp64 too, but for keep_dtype=)",
            )


def check_memory_is_own(model: nn.Module, names: Names) -> None:
    """Nothing of the model shares memory with a Parameter: it would not see what that becomes."""
    others = {tensor: name for name, tensor in tensors_beside(model) if tensor not in names}
    known = Counter(map(storage_of, names | others))
    own = [(n, storage_of(p)) for p, n in names.items() if p.requires_grad and n[-5:] != "_orig"]
    for name, memory in own:  # spectral_norm has a view of its own; what storage_of made counts too
        if torch._C._storage_Use_Count(memory) > known[memory] + 1:
            gc.collect()  # what nobody can read any more may be in a cycle
        if torch._C._storage_Use_Count(memory) > known[memory] + 1:
            log.warning(
                "a tensor outside of the model, or a graph that waits for backward, has the memory of "
                "%r: it sees no update, and writes to it are lost; take it after ZeroOptimizer is made",
                name,
            )
            break
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
    where = f"meta {storage_of(tensor)}" if tensor.is_meta else str(tensor.device)
    start = tensor.data_ptr()
    return where, start, start + (last + 1) * tensor.itemsize
