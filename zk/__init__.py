"""ZeRO, ZeRO-Offload and ZeRO-Infinity for PyTorch: train models larger than the accelerator's memory."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zk.addon import Addon, register, register_methods
    from zk.checkpoint.files import CheckpointError
    from zk.config import ZeroConfig
    from zk.integrations.deepspeed import add_config_arguments, init_distributed, initialize
    from zk.nn.activations import offload_activations
    from zk.nn.deferred import deferred_init
    from zk.nn.pretrained import load_pretrained
    from zk.nn.tiled_linear import TiledLinear, tile_linears
    from zk.optimizer import ZeroOptimizer
    from zk.parallel.gather import gather
    from zk.precision import DynamicLossScale
    from zk.tools.profile import profile

__version__ = "0.2.0.dev0"

__all__ = [
    "Addon", "CheckpointError", "DynamicLossScale", "TiledLinear", "ZeroConfig", "ZeroOptimizer",
    "add_config_arguments", "deferred_init", "gather", "init_distributed", "initialize",
    "load_pretrained", "offload_activations", "profile", "register", "register_methods",
    "tile_linears",
]  # fmt: skip

# each is imported when it is first used, so that `zk --help` needs no torch
_MODULES = {
    "Addon": "zk.addon",
    "CheckpointError": "zk.checkpoint.files",
    "DynamicLossScale": "zk.precision",
    "TiledLinear": "zk.nn.tiled_linear",
    "ZeroConfig": "zk.config",
    "ZeroOptimizer": "zk.optimizer",
    "add_config_arguments": "zk.integrations.deepspeed",
    "deferred_init": "zk.nn.deferred",
    "gather": "zk.parallel.gather",
    "init_distributed": "zk.integrations.deepspeed",
    "initialize": "zk.integrations.deepspeed",
    "load_pretrained": "zk.nn.pretrained",
    "offload_activations": "zk.nn.activations",
    "profile": "zk.tools.profile",
    "register": "zk.addon",
    "register_methods": "zk.addon",
    "tile_linears": "zk.nn.tiled_linear",
}

def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    if name in _MODULES:
        globals()[name] = value = getattr(importlib.import_module(_MODULES[name]), name)
        return value
    words = "see dir(zk); docs/guides/from_deepspeed.md has what replaces DeepSpeed's names"
    raise AttributeError(f"module 'zk' has no attribute {name!r}; {words}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
