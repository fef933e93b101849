"""ZeRO, ZeRO-Offload and ZeRO-Infinity for PyTorch: train models larger than the accelerator's memory."""

from zk.config import ZeroConfig
from zk.core.precision import DynamicLossScale
from zk.integrations.deepspeed_engine import initialize
from zk.nn.activations import offload_activations
from zk.nn.deferred import deferred_init
from zk.nn.pretrained import load_pretrained
from zk.nn.tiled_linear import TiledLinear, tile_linears
from zk.optimizer import ZeroOptimizer
from zk.parallel.gather import gather
from zk.tools.monitor.profile import profile
from zk.tools.monitor.progress import Progress

__version__ = "0.1.0"
__all__ = [
    "DynamicLossScale",
    "Progress",
    "TiledLinear",
    "ZeroConfig",
    "ZeroOptimizer",
    "deferred_init",
    "gather",
    "initialize",
    "load_pretrained",
    "offload_activations",
    "profile",
    "tile_linears",
]
