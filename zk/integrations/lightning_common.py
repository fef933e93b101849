"""The part of zk's strategies that Lightning's Trainer and Fabric have in common: options, processes, precision, the optimizer.

The classes here are mixins: each is put in front of Lightning's own class of one package.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from zk.config import ZeroConfig
from zk.optimizer import ZeroOptimizer

NVME_PATH = "ZK_NVME_PATH"
_FIELDS = frozenset(field.name for field in dataclasses.fields(ZeroConfig))
_PASSED_ON = "accelerator parallel_devices cluster_environment checkpoint_io precision_plugin precision process_group_backend timeout"
_OF_LIGHTNING = frozenset(_PASSED_ON.split())  # options of its DDP strategies
# Lightning's name -> what parameters are cast to; None: they keep their own
DTYPES: dict[str, torch.dtype | None] = {
    "32-true": None,
    "bf16-true": torch.bfloat16,
    "bf16-mixed": torch.bfloat16,
    "16-true": torch.float16,
    "16-mixed": torch.float16,
}
_KNOWN = ("Precision", "HalfPrecision", "MixedPrecision")  # the plugins of these names
_BASE: Any = object


class Precision(_BASE):  # type: ignore[misc]
    """A precision plugin that leaves weights and loss scale to the ZeroOptimizer.

    What Lightning's plugin does around forward stays: autocast where it is "mixed", the default dtype and 16-bit inputs where it is "true".
    ``optimizer`` is the one of a Trainer's that trains at the moment; Fabric's strategy scales the loss itself.
    """

    optimizer: ZeroOptimizer | None = None

    def __init__(self, around: Any) -> None:
        super().__init__()
        if type(around).__name__ not in _KNOWN or around.precision not in DTYPES:
            raise ValueError(
                f"precision={around.precision!r} ({type(around).__name__}) is not for zk, which trains fp32, bf16 and fp16 parameters; "
                f"choose one of {', '.join(map(repr, DTYPES))}"
            )
        self.precision, self.dtype = around.precision, DTYPES[around.precision]
        self.master_dtype = "fp32" if self.precision.endswith("mixed") else None  # of the model outside of training; None: as trained
        self.forward_context, self.convert_input, self.convert_output = around.forward_context, around.convert_input, around.convert_output

    def backward(self, tensor: Tensor, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        with scaled(self.optimizer, tensor) as loss:
            model.backward(loss, *args, **kwargs)


def scaled(optimizer: ZeroOptimizer | None, loss: Tensor) -> Any:
    """Context: the loss, times the optimizer's loss scale."""
    return contextlib.nullcontext(loss) if optimizer is None else optimizer.scaled(loss)


class Strategy(_BASE):  # type: ignore[misc]
    """Options, processes and precision of a strategy; everything else about processes is Lightning's DDP strategy."""

    plugin: type[Precision]  # for the package of this strategy

    def __init__(self, **options: Any) -> None:
        unknown = sorted(set(options) - _FIELDS - _OF_LIGHTNING)
        if unknown:
            raise TypeError(f"{', '.join(unknown)}: not a field of zk.ZeroConfig, nor one of {', '.join(sorted(_OF_LIGHTNING))}")
        if "device" in options:
            raise TypeError("device is what accelerator= and devices= of Lightning say; leave it out of the strategy")
        fields = {name: value for name, value in options.items() if name in _FIELDS}
        if "nvme" in (fields.get("param_tier"), fields.get("optimizer_tier")) and not fields.get("nvme_path"):
            if not os.environ.get(NVME_PATH):
                raise ValueError(
                    f"a tier is 'nvme' and no path is given: set the environment variable {NVME_PATH} to a folder on the drive (or several, "
                    f"with {os.pathsep!r} in between), or pass strategy=ZeroStrategy(..., nvme_path=...)"
                )
            fields["nvme_path"] = os.environ[NVME_PATH].split(os.pathsep)
        self.config = ZeroConfig(**fields)
        super().__init__(**{name: value for name, value in options.items() if name in _OF_LIGHTNING})

    @property
    def is_alone(self) -> bool:
        """True for one process, which needs no launcher, no group and no sampler."""
        return bool(self.num_processes * self.num_nodes == 1)

    def _configure_launcher(self) -> None:
        if not self.is_alone:
            super()._configure_launcher()

    def setup_environment(self) -> None:
        """torchrun says how many ranks share this machine, and so its cores and memory; Lightning, which can start them as well, does not."""
        if not self.is_alone:
            os.environ.setdefault("LOCAL_WORLD_SIZE", str(self.num_processes))
        super().setup_environment()

    def delegated(self, plugin: Any) -> Any:
        """A precision plugin of Lightning as one of zk's."""
        if plugin is not None and not isinstance(plugin, Precision):
            plugin = self.plugin(plugin)
            self.config_for(plugin)
        return plugin

    def config_for(self, precision: Precision) -> ZeroConfig:
        """The config with the dtype that Lightning's precision means. ValueError where both are given and differ."""
        config = self.config
        if config.compute_dtype is not None and precision.precision != "32-true":
            raise ValueError(
                f"precision={precision.precision!r} computes in 16 bits, and compute_dtype='fp32' was given to the strategy, whose dtype= says what "
                "parameters rest in; leave one out"
            )
        if config.dtype is None:
            return dataclasses.replace(config, dtype=precision.dtype)
        if precision.precision != "32-true" and precision.dtype != config.dtype:  # 32-true is what Lightning has where nobody says anything
            raise ValueError(
                f"precision={precision.precision!r} means {precision.dtype} parameters, and dtype={config.dtype} was given to the strategy; "
                "leave one out"
            )
        return config


class LightningZeroOptimizer(ZeroOptimizer):
    """A ZeroOptimizer as Lightning handles optimizers.

    Lightning wraps it in objects that take over its class and look up in it what they do not have: what methods called on these set must
    reach the optimizer itself. And a step for which no rank has a gradient (``training_step`` returned None) changes nothing.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        inside = self.__dict__.get("_optimizer")
        if inside is not None and name not in self.__dict__:
            setattr(inside, name, value)
        else:
            super().__setattr__(name, value)

    def _without_gradient(self) -> None:
        return


def has_memory(module: nn.Module) -> bool:
    """False for a module of which a part has no memory yet."""
    return not any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))


def to_device(module: nn.Module, device: torch.device) -> None:
    """Move what has memory; what has none yet will be made there."""
    if has_memory(module):
        module.to(device)
        return
    for tensor in (*module.parameters(), *module.buffers()):
        if not tensor.is_meta:
            tensor.data = tensor.data.to(device)


def through_forward(module: nn.Module, method: str, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """``module.method(*args, **kwargs)``, from within a forward of the module, where zk's hooks see it.

    The arguments do not pass the hooks: which of them are cast is the precision plugin's to say.
    """
    own = {name: value for name, value in vars(module).items() if name == "forward"}

    def restore() -> None:
        vars(module).pop("forward", None)
        vars(module).update(own)

    def once() -> Any:
        restore()
        return getattr(module, method)(*args, **kwargs)

    vars(module)["forward"] = once
    try:
        return module()
    finally:
        restore()
