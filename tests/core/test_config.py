"""ZeroConfig: what is read as meant, and what is refused with rule, value and remedy."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zk


def test_quick_values_are_read_as_users_write_them(tmp_path: Path) -> None:
    config = zk.ZeroConfig(
        dtype="torch.bfloat16", device_budget="1.5TiB", host_budget="500 MB", units=nn.Linear, keep_dtype="norm",
        param_tier="NVMe", stage=3, optimizer_tier="auto", nvme_path=tmp_path, device="cpu", loss_scale="dynamic",
    )  # fmt: skip
    assert config.dtype == torch.bfloat16 and config.device == torch.device("cpu") and config.param_tier == "nvme"
    assert (config.device_budget, config.host_budget) == (3 << 39, 500 * 10**6)
    assert (config.units, config.keep_dtype, config.nvme_path) == ((nn.Linear,), ("norm",), (str(tmp_path),))
    assert config.loss_scale == zk.DynamicLossScale()
    assert copy.deepcopy(config) == pickle.loads(pickle.dumps(config)) == config and hash(config)


VALUES: list[tuple[dict[str, Any], str]] = [
    ({"stage": 4}, "stage must be 0, 1, 2 or 3; got 4"),
    ({"optimizer_tier": "disk"}, "optimizer_tier must be 'device', 'host', 'nvme' or 'auto' .*a disk 'nvme'.*; got 'disk'"),
    ({"param_tier": ["host"]}, r"param_tier must be .*; got \['host'\]$"),
    ({"optimizer_tier": "nvme"}, "nvme_path is not set"),
    ({"optimizer_tier": "nvme", "nvme_path": ["/tmp", "/tmp"]}, "each of them once"),
    ({"stage": 3, "param_tier": "nvme", "nvme_path": "/tmp"}, "updated in host memory"),
    ({"param_tier": "host"}, "param_tier='host' needs stage=3"),
    ({"nvme_path": "/tmp"}, "nvme_path has no effect"),
    ({"host_budget": "1GiB"}, "host_budget has no effect"),
    ({"host_budget": "24 potatoes"}, "host_budget must be a number of bytes above 0, or a string like"),
    ({"host_budget": 0}, "above 0"),
    ({"clip_grad_norm": "1"}, "clip_grad_norm must be more than 0"),
    ({"clip_grad_norm": float("nan")}, "clip_grad_norm must be more than 0"),
    ({"dtype": "int8"}, "dtype must be one of"),
    ({"keep_dtype": "table"}, "keep_dtype has no effect without dtype="),
    ({"loss_scale": "sometimes"}, "loss_scale must be"),
    ({"loss_scale": float("inf")}, "finite number above 0"),
    ({"loss_scale": True}, "loss_scale must be"),
    ({"prefetch": -1}, "prefetch must be"),
    ({"num_threads": 0}, "num_threads must be"),
    ({"device": "meta"}, "'cuda' or 'cuda:N'; got 'meta'"),
    *([] if torch.cuda.is_available() else [({"device": "cuda"}, "torch sees 0 CUDA devices")]),
]
TYPES: list[tuple[dict[str, Any], str]] = [
    ({"host_budget": True}, "host_budget must be"),
    ({"dtype": "bf16", "keep_dtype": (int,)}, "keep_dtype must hold module names or nn.Module classes"),
    ({"units": [3]}, "units must hold"),
    ({"device": 0}, "got 0"),
    ({"nvme_path": 7}, "nvme_path must be a path"),
    ({"process_group": "all"}, r"this rank is a member of .*mesh\.get_group"),
    ({"addons": [zk.Addon]}, "addons must be a list of zk.Addon objects"),
    ({"stages": 3}, "no option 'stages'; the closest one is 'stage'"),
    ({"overlap_stop": True}, "the closest one is 'overlap_step'"),
    ({"qqq": 1}, "there are stage, dtype"),
    ({"options": {"overlap_stop": 1}}, "no option 'overlap_stop'"),
]
REFUSED = [*((ValueError, *case) for case in VALUES), *((TypeError, *case) for case in TYPES)]


@pytest.mark.parametrize(("error", "options", "message"), REFUSED, ids=str)
def test_values_without_a_meaning_and_unknown_options_are_refused(error: type[Exception], options: dict[str, Any], message: str) -> None:
    model = nn.Linear(2, 2)
    for make in (
        lambda: zk.ZeroConfig(**options),
        lambda: dataclasses.replace(zk.ZeroConfig(), **options),
        lambda: zk.ZeroOptimizer(model, torch.optim.AdamW(model.parameters()), zk.ZeroConfig(), **options),
    ):
        with pytest.raises(error, match=message):
            make()


def test_add_ons_have_the_other_options() -> None:
    config = zk.ZeroConfig(overlap_step=True, stage=3)
    changed = dataclasses.replace(config, state_dtype="bf16", stage=1)
    assert changed.options == {"overlap_step": True, "state_dtype": "bf16"} and config.options == {"overlap_step": True}
    assert dataclasses.replace(changed, overlap_step=False).options["overlap_step"] is False


def test_options_win_over_the_config_they_are_given_with() -> None:
    model = nn.Linear(2, 2)
    optimizer = zk.ZeroOptimizer(model, torch.optim.SGD(model.parameters(), lr=0.1), zk.ZeroConfig(stage=1, prefetch=0), stage=0)
    assert (optimizer.config.stage, optimizer.config.prefetch) == (0, 0)
    optimizer.close()
    with pytest.raises(TypeError, match=r"config must be a zk\.ZeroConfig"):
        zk.ZeroOptimizer(model, torch.optim.SGD(model.parameters(), lr=0.1), {"stage": 1})  # type: ignore[arg-type]
