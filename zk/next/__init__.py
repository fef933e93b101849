"""ZeRO, ZeRO-Offload and ZeRO-Infinity for PyTorch: the core on five seams."""

import importlib
from typing import TYPE_CHECKING, Any

from zk.next.addon import Addon, register, register_methods
from zk.next.config import ZeroConfig
from zk.next.optimizer import ZeroOptimizer
from zk.next.parallel.gather import gather
from zk.next.precision import DynamicLossScale

if TYPE_CHECKING:
    from zk.next.checkpoint.files import CheckpointError
    from zk.next.nn.activations import offload_activations
    from zk.next.nn.deferred import deferred_init
    from zk.next.nn.pretrained import load_pretrained
    from zk.next.nn.tiled_linear import TiledLinear, tile_linears

# each line, and its file, may be deleted: the option is then unknown
register(overlap_step="zk.next.addons.overlap:Overlap")
register(state_dtype="zk.next.addons.state_dtype:StateDtype")
register(announce="zk.next.addons.announced:Announced")

# what is imported when it is first used; each line, and its file, may be deleted
MODULES = {
    "CheckpointError": "zk.next.checkpoint.files",
    "TiledLinear": "zk.next.nn.tiled_linear",
    "deferred_init": "zk.next.nn.deferred",
    "load_pretrained": "zk.next.nn.pretrained",
    "offload_activations": "zk.next.nn.activations",
    "tile_linears": "zk.next.nn.tiled_linear",
}
# and so may these, with their room
register_methods(
    save_checkpoint="zk.next.checkpoint.save:save_checkpoint",
    load_checkpoint="zk.next.checkpoint.load:load_checkpoint",
    consolidated_state_dict="zk.next.checkpoint.state_dict:consolidated_state_dict",
)

__all__ = [
    "Addon",
    "CheckpointError",
    "DynamicLossScale",
    "TiledLinear",
    "ZeroConfig",
    "ZeroOptimizer",
    "deferred_init",
    "gather",
    "load_pretrained",
    "offload_activations",
    "register",
    "register_methods",
    "tile_linears",
]


def __getattr__(name: str) -> Any:
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(MODULES[name]), name)
