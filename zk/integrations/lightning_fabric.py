"""The strategy of Fabric: the same loop, with a ZeroOptimizer for each pair of model and optimizer that is set up."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn

from zk.integrations import lightning_checkpoint as checkpoints
from zk.integrations.lightning_common import LightningZeroOptimizer, Strategy, scaled, to_device
from zk.nn.deferred import deferred_init
from zk.optimizer import ZeroOptimizer


class Forward(nn.Module):
    """Calls the model: Fabric sends other methods through forward only if what it calls is not the model itself."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


class FabricStrategy(Strategy):
    """ZeRO through zk, for Fabric.

    Args:
        options: fields of ZeroConfig, and accelerator, parallel_devices, cluster_environment, checkpoint_io, precision,
            process_group_backend and timeout as Fabric's DDPStrategy has them.
    """

    def __init__(self, **options: Any) -> None:
        self.modules: list[nn.Module] = []
        self.optimizers: list[LightningZeroOptimizer] = []
        super().__init__(**options)
        self._backward_sync_control = weakref.proxy(self)  # what Fabric asks for no_backward_sync

    # ---- processes and precision ---------------------------------------------------------------------------------------------

    def _setup_distributed(self) -> None:
        if self.is_alone:
            self._set_world_ranks()
        else:
            super()._setup_distributed()

    @property
    def distributed_sampler_kwargs(self) -> Any:
        return None if self.is_alone else super().distributed_sampler_kwargs  # alone, loaders stay as they are

    @property
    def precision(self) -> Any:
        return super().precision

    @precision.setter
    def precision(self, plugin: Any) -> None:
        self._precision = self.delegated(plugin)

    # ---- setup ---------------------------------------------------------------------------------------------------------------

    def module_init_context(self, empty_init: bool | None = None) -> Any:
        """``with fabric.init_module():`` builds a model that has no memory until fabric.setup."""
        return deferred_init(self.root_device)

    def module_to_device(self, module: nn.Module) -> None:
        to_device(module, self.root_device)

    def setup_module(self, module: nn.Module) -> nn.Module:
        self.modules.append(module)
        return Forward(module)

    def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        params = {param for group in optimizer.param_groups for param in group["params"]}
        found = [module for module in self.modules if params <= set(module.parameters())]
        if len(found) != 1:
            raise ValueError(
                f"an optimizer must belong to one model that was set up, and its parameters are those of {len(found)}; call "
                "fabric.setup(model, optimizer)"
            )
        self.optimizers = [known for known in self.optimizers if not known.closed]
        if any(known.model is found[0] for known in self.optimizers):
            raise ValueError(
                f"zk trains a model with one optimizer, and {type(found[0]).__name__} was set up with one already; call fabric.setup(model, "
                "optimizer) once, and put the parts that differ into param_groups of that optimizer"
            )
        self.optimizers.append(LightningZeroOptimizer(found[0], optimizer, self.config_for(self.precision)))
        return self.optimizers[-1]

    def optimizer_of(self, module: nn.Module | None) -> LightningZeroOptimizer | None:
        """Of a module that was set up; of the only one, if none is named. None if that has no optimizer."""
        found = [optimizer for optimizer in self.optimizers if not optimizer.closed and _inside(module) in (None, optimizer.model)]
        if len(found) > 1 and any(optimizer.scaler.active for optimizer in found):
            raise ValueError("several models are set up, and each has a loss scale of its own; call fabric.backward(loss, model=model)")
        return found[0] if found else None

    # ---- the loop ------------------------------------------------------------------------------------------------------------

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> Any:
        """Gradients of the backward inside stay on their rank: at stages 2 and 3, too, it then has all of them, in fp32, until the step."""
        optimizer = self.optimizer_of(module)
        return optimizer.no_sync() if enabled and optimizer is not None else contextlib.nullcontext()

    def backward(self, tensor: Tensor, module: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        with scaled(self.optimizer_of(module), tensor) as loss:
            loss.backward(*args, **kwargs)

    def clip_gradients_norm(
        self, module: nn.Module, optimizer: Any, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = True
    ) -> Tensor:
        norm: Tensor = super().clip_gradients_norm(module, optimizer, max_norm, norm_type, error_if_nonfinite=False)
        if error_if_nonfinite and not norm.isfinite() and not optimizer.scaler.active:  # a loss scale is lowered by such a step
            raise RuntimeError(f"the gradient norm is {norm.item()}; error_if_nonfinite=False skips such steps instead")
        return norm

    # ---- checkpoints ---------------------------------------------------------------------------------------------------------

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        optimizer = self.optimizer_of(module)
        if optimizer is None:
            return super().get_module_state_dict(_inside(module))  # type: ignore[no-any-return]
        return optimizer.consolidated_state_dict(self.precision.master_dtype)

    def load_module_state_dict(self, module: nn.Module, state_dict: dict[str, Any], strict: bool = True) -> None:
        super().load_module_state_dict(_inside(module), state_dict, strict)

    def save_checkpoint(self, path: Any, state: dict[str, Any], storage_options: Any = None, filter: Any = None) -> None:
        """With an optimizer in ``state``, a folder; without, one plain file."""
        path = self.broadcast(path)
        if not any(isinstance(value, ZeroOptimizer) for value in state.values()):
            super().save_checkpoint(path, state, storage_options, filter)
            return
        optimizer, partitioned = _partitioned(state)
        if storage_options is not None or partitioned & set(filter or ()):
            raise TypeError(f"storage_options, and filter for {sorted(partitioned)}, have no effect on what zk writes; leave them out")
        rest = self._convert_stateful_objects_in_state({k: v for k, v in state.items() if k not in partitioned}, filter=filter or {})
        checkpoints.save(optimizer, path, {**rest, "zk_keys": sorted(partitioned)}, self.checkpoint_io.save_checkpoint)

    def load_checkpoint(self, path: Any, state: Any = None, strict: bool = True, **kwargs: Any) -> dict[str, Any]:
        if not os.path.isdir(path):
            return super().load_checkpoint(path, state, strict, **kwargs)  # type: ignore[no-any-return]
        optimizer, partitioned = _partitioned(state if isinstance(state, MutableMapping) else {})
        rest, step = checkpoints.read(path, super().load_checkpoint, **kwargs)
        saved, others = rest.pop("zk_keys", ()), set(state) - partitioned
        if strict and others - set(rest):
            raise KeyError(f"{path} has no {', '.join(sorted(others - set(rest)))}; it has {sorted([*rest, *saved])}")
        optimizer.load_checkpoint(step)  # before the others: what it refuses has changed nothing
        for name in others & set(rest):
            if hasattr(state[name], "load_state_dict"):
                state[name].load_state_dict(rest.pop(name))
            else:
                state[name] = rest.pop(name)
        return rest


def _inside(value: Any) -> Any:
    return value.module if isinstance(value, Forward) else value


def _partitioned(state: Mapping[str, Any]) -> tuple[ZeroOptimizer, set[str]]:
    """The optimizer in a state, and the names of it and its model. ValueError for another number of optimizers."""
    optimizers = {name: value for name, value in state.items() if isinstance(value, ZeroOptimizer)}
    if len(optimizers) != 1:
        raise ValueError(
            f"a checkpoint that is a folder has the state of one optimizer and its model; the state has {len(optimizers)} of them. Save "
            "each pair to a path of its own"
        )
    (optimizer,) = optimizers.values()
    return optimizer, {*optimizers, *(name for name, value in state.items() if _inside(value) is optimizer.model)}
