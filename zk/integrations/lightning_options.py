"""In: what the user gave to a strategy, and Lightning's precision. Out: a ZeroConfig, and what is left for Lightning's DDP strategy."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from zk.config import ZeroConfig

NVME_PATH = "ZK_NVME_PATH"
_FIELDS = frozenset(field.name for field in dataclasses.fields(ZeroConfig))
# of Lightning's DDP strategies
_OF_LIGHTNING = frozenset(
    (
        "accelerator",
        "parallel_devices",
        "cluster_environment",
        "checkpoint_io",
        "precision_plugin",
        "precision",
        "process_group_backend",
        "timeout",
    )
)


_BASE: Any = object  # a DDP strategy of Lightning, of which this comes first


class Processes(_BASE):  # type: ignore[misc]
    """One process needs no launcher."""

    @property
    def _alone(self) -> bool:
        return bool(self.num_processes * self.num_nodes == 1)

    def _configure_launcher(self) -> None:
        if not self._alone:
            super()._configure_launcher()


def split_options(options: Mapping[str, Any]) -> tuple[ZeroConfig, dict[str, Any]]:
    """What is for zk, checked, and what is for Lightning. TypeError for what neither knows."""
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
    return ZeroConfig(**fields), {name: value for name, value in options.items() if name in _OF_LIGHTNING}


def with_precision(config: ZeroConfig, precision: Any) -> ZeroConfig:
    """``config`` with the dtype that Lightning's precision means. ValueError where both are given and differ."""
    if config.dtype is None:
        return dataclasses.replace(config, dtype=precision.dtype)
    if precision.precision != "32-true" and precision.dtype != config.dtype:  # 32-true is what Lightning has where nobody says anything
        raise ValueError(
            f"precision={precision.precision!r} means {precision.dtype} parameters, and dtype={config.dtype} was given to the strategy; leave one out"
        )
    return config
