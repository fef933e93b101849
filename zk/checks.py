"""Checks while it trains, and what ranks must have alike."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from zk.config import ZeroConfig
from zk.unit import Unit


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
