"""In: ``import zk.integrations.lightning``. Out: strategies that Trainer and Fabric know by name, and their classes.

``lightning`` and ``pytorch_lightning`` have classes of their own, which do not mix. What is registered at import is for the one that has
been imported before, or for both; if none has, for the one that is installed, ``lightning`` first.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import sys
from typing import Any

from zk.integrations.lightning_checkpoint import consolidate
from zk.integrations.lightning_fabric import FabricStrategy
from zk.integrations.lightning_precision import FabricPrecision, TrainerPrecision
from zk.integrations.lightning_strategy import TrainerStrategy

__all__ = ["NAMES", "ZeroFabricStrategy", "ZeroMetrics", "ZeroStrategy", "consolidate", "of"]

# name of a strategy -> fields of ZeroConfig
NAMES: dict[str, dict[str, Any]] = {
    "zk": {},
    "zk_stage_1": {"stage": 1},
    "zk_stage_2": {"stage": 2},
    "zk_stage_3": {"stage": 3},
    "zk_stage_2_offload": {"stage": 2, "optimizer_tier": "host"},
    "zk_stage_3_offload": {"stage": 3, "param_tier": "host", "optimizer_tier": "host"},
    "zk_stage_3_offload_nvme": {"stage": 3, "param_tier": "nvme", "optimizer_tier": "nvme"},
}
_PACKAGES = {"lightning": ("lightning.pytorch", "lightning.fabric"), "pytorch_lightning": ("pytorch_lightning", "lightning_fabric")}


class _Metrics:
    """Sends ``optimizer.metrics()`` to the Trainer's loggers, as ``zk/...``, whenever the Trainer logs (``log_every_n_steps``)."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        zero = getattr(trainer.strategy, "zero", None)
        if zero is None:
            raise RuntimeError(f"ZeroMetrics reads the optimizer of zk's strategies; this Trainer has {type(trainer.strategy).__name__}")
        if trainer._logger_connector.should_update_logs:
            values = {f"zk/{name}": value for name, value in zero.metrics().items()}
            for logger in trainer.loggers:
                logger.log_metrics(values, step=trainer.fit_loop.epoch_loop._batches_that_stepped)


@dataclasses.dataclass(frozen=True, slots=True)
class Classes:
    """For one package."""

    ZeroStrategy: Any
    ZeroFabricStrategy: Any
    ZeroMetrics: Any


@functools.cache
def of(package: str) -> Classes:
    """The classes for ``"lightning"`` or ``"pytorch_lightning"``, which is imported; their strategies are registered."""
    if package not in _PACKAGES:
        raise ValueError(f"package must be one of {', '.join(map(repr, _PACKAGES))}; got {package!r}")
    trainer, fabric = (importlib.import_module(name) for name in _PACKAGES[package])
    plugins, fabric_plugins = (importlib.import_module(f"{module.__name__}.plugins.precision") for module in (trainer, fabric))
    strategies, fabric_strategies = (importlib.import_module(f"{module.__name__}.strategies") for module in (trainer, fabric))

    def combined(name: str, mixin: type, base: type, **members: Any) -> type:
        return type(name, (mixin, base), {"__module__": __name__, "__doc__": mixin.__doc__, **members})

    plugin = combined("ZeroPrecision", TrainerPrecision, plugins.Precision)
    fabric_plugin = combined("ZeroFabricPrecision", FabricPrecision, fabric_plugins.Precision)
    classes = Classes(
        combined("ZeroStrategy", TrainerStrategy, strategies.DDPStrategy, plugin=plugin),
        combined("ZeroFabricStrategy", FabricStrategy, fabric_strategies.DDPStrategy, plugin=fabric_plugin),
        combined("ZeroMetrics", _Metrics, trainer.Callback),
    )
    for name, fields in NAMES.items():
        described = ", ".join(f"{key}={value}" for key, value in fields.items()) or "defaults of zk.ZeroConfig"
        for registry, strategy in (
            (strategies.StrategyRegistry, classes.ZeroStrategy),
            (fabric_strategies.STRATEGY_REGISTRY, classes.ZeroFabricStrategy),
        ):
            registry.register(name, strategy, description=f"ZeRO by zk: {described}", **fields)
    return classes


def _packages() -> list[str]:
    imported = [package for package in _PACKAGES if package in sys.modules]
    installed = [package for package in _PACKAGES if importlib.util.find_spec(package) is not None]
    if not installed:
        raise ImportError("zk.integrations.lightning needs Lightning: pip install 'zk-offload[lightning]' (or pytorch-lightning)")
    return imported or installed[:1]


_made = [of(package) for package in _packages()]
ZeroStrategy, ZeroFabricStrategy, ZeroMetrics = _made[0].ZeroStrategy, _made[0].ZeroFabricStrategy, _made[0].ZeroMetrics
