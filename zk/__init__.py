"""ZeRO, ZeRO-Offload and ZeRO-Infinity for PyTorch: train models larger than the accelerator's memory."""

from typing import TYPE_CHECKING, Any

from zk.config import ZeroConfig
from zk.core.precision import DynamicLossScale
from zk.nn.activations import offload_activations
from zk.nn.deferred import deferred_init
from zk.nn.pretrained import load_pretrained
from zk.nn.tiled_linear import TiledLinear, tile_linears
from zk.optimizer import ZeroOptimizer
from zk.parallel.gather import gather
from zk.tools.profile import profile

if TYPE_CHECKING:
    from zk.integrations.deepspeed import add_config_arguments, init_distributed, initialize

__version__ = "0.1.0"
__all__ = [
    "DynamicLossScale",
    "TiledLinear",
    "ZeroConfig",
    "ZeroOptimizer",
    "add_config_arguments",
    "deferred_init",
    "gather",
    "init_distributed",
    "initialize",
    "load_pretrained",
    "offload_activations",
    "profile",
    "tile_linears",
]

_OF_DEEPSPEED = {  # names of DeepSpeed that scripts use: what to write instead
    "DeepSpeedEngine": "zk.integrations.deepspeed.Engine is what zk.initialize returns",
    "checkpointing": "use torch.utils.checkpoint, and zk.offload_activations()",
    "comm": "use torch.distributed",
    "get_accelerator": "use torch.cuda",
    "init_inference": "zk only trains; write the weights with zk export",
    "ops": "use torch.optim.AdamW for DeepSpeedCPUAdam and FusedAdam",
    "zero": "zero.Init is zk.deferred_init, zero.GatheredParameters is zk.gather(params, write=True)",
}


def __getattr__(name: str) -> Any:
    """DeepSpeed's calls, which are imported when they are used."""
    if name in ("add_config_arguments", "init_distributed", "initialize"):
        from zk.integrations import deepspeed

        return getattr(deepspeed, name)
    hint = f"; {_OF_DEEPSPEED[name]}" if name in _OF_DEEPSPEED else ""
    raise AttributeError(f"module 'zk' has no attribute {name!r}{hint}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
