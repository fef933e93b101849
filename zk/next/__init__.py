"""ZeRO, ZeRO-Offload and ZeRO-Infinity for PyTorch: the core on five seams."""

from zk.next.addon import Addon, register, register_methods
from zk.next.config import ZeroConfig
from zk.next.optimizer import ZeroOptimizer
from zk.next.parallel.gather import gather
from zk.next.precision import DynamicLossScale

# each line, and its file, may be deleted: the option is then unknown
register(overlap_step="zk.next.addons.overlap:Overlap")
register(state_dtype="zk.next.addons.state_dtype:StateDtype")
register(announce="zk.next.addons.announced:Announced")

__all__ = [
    "Addon",
    "DynamicLossScale",
    "ZeroConfig",
    "ZeroOptimizer",
    "gather",
    "register",
    "register_methods",
]
