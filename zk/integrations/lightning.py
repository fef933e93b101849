"""Strategies that Lightning's Trainer and Fabric know by name once this is imported, and their classes.

``lightning`` and ``pytorch_lightning`` have classes of their own, which do not mix. What is registered at import is for the one that has
been imported before, or for both; if none has, for the one that is installed, ``lightning`` first.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from types import SimpleNamespace
from typing import Any

from zk.integrations.lightning_checkpoint import consolidate
from zk.integrations.lightning_common import Precision
from zk.integrations.lightning_fabric import FabricStrategy
from zk.integrations.lightning_strategy import TrainerStrategy
from zk.tools.metrics import Rates, loggable

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
    """Sends rates to the Trainer's loggers, as ``zk/step_s``, ``zk/wait_share``, ..., whenever the Trainer logs (``log_every_n_steps``).

    With ``ZK_METRICS=all`` all of ``optimizer.metrics()`` too. Validation and checkpoints are not part of the time of a step.
    """

    rates: Rates | None = None

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if self.rates is not None:
            self.rates.restart()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        zero = _zero(trainer, "ZeroMetrics reads")
        if self.rates is None or self.rates.optimizer() is not zero:
            self.rates = Rates(zero)
        if trainer._logger_connector.should_update_logs:
            values = loggable(zero, self.rates)
            for logger in trainer.loggers:
                logger.log_metrics(values, step=trainer.fit_loop.epoch_loop._batches_that_stepped)


def _zero(trainer: Any, use: str) -> Any:
    """The ZeroOptimizer of a Trainer; RuntimeError, with its ``use``, if the strategy has none."""
    zero = getattr(trainer.strategy, "zero", None)
    if zero is None:
        raise RuntimeError(f"{use} the optimizer of zk's strategies; this Trainer has {type(trainer.strategy).__name__}")
    return zero


@functools.cache
def of(package: str) -> SimpleNamespace:
    """The classes for ``"lightning"`` or ``"pytorch_lightning"``, which is imported; their strategies are registered."""
    if package not in _PACKAGES:
        raise ValueError(f"package must be one of {', '.join(map(repr, _PACKAGES))}; got {package!r}")
    trainer, fabric = map(importlib.import_module, _PACKAGES[package])

    def combined(name: str, mixin: type, base: type, **members: Any) -> type:
        return type(name, (mixin, base), {"__module__": __name__, "__doc__": mixin.__doc__, **members})

    def strategy(name: str, mixin: type, module: Any) -> type:
        precision = importlib.import_module(f"{module.__name__}.plugins.precision").Precision
        return combined(name, mixin, module.strategies.DDPStrategy, plugin=combined("ZeroPrecision", Precision, precision))

    classes = SimpleNamespace(
        ZeroStrategy=strategy("ZeroStrategy", TrainerStrategy, trainer),
        ZeroFabricStrategy=strategy("ZeroFabricStrategy", FabricStrategy, fabric),
        ZeroMetrics=combined("ZeroMetrics", _Metrics, trainer.Callback),
    )
    for name, fields in NAMES.items():
        described = ", ".join(f"{key}={value}" for key, value in fields.items()) or "defaults of zk.ZeroConfig"
        trainer.strategies.StrategyRegistry.register(name, classes.ZeroStrategy, f"ZeRO by zk: {described}", **fields)
        fabric.strategies.STRATEGY_REGISTRY.register(name, classes.ZeroFabricStrategy, f"ZeRO by zk: {described}", **fields)
    return classes


_installed = [package for package in _PACKAGES if importlib.util.find_spec(package) is not None]
if not _installed:
    raise ImportError("zk.integrations.lightning needs Lightning: pip install 'zk-offload[lightning]' (or pytorch-lightning)")
_made = [*map(of, [package for package in _PACKAGES if package in sys.modules] or _installed[:1])]
ZeroStrategy, ZeroFabricStrategy, ZeroMetrics = _made[0].ZeroStrategy, _made[0].ZeroFabricStrategy, _made[0].ZeroMetrics
