"""Sides of the update: the host's threads, or the device through which states stream; and what "auto" becomes."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from zk.config import ZeroConfig
from zk.kernels.codec import state_fields
from zk.memory import ranks_here
from zk.monitor.measured import measure_update
from zk.monitor.start import say
from zk.offload.streamed import best_share
from zk.offload.streams import link_to


def settled(config: ZeroConfig, device: torch.device) -> ZeroConfig:
    """Replace "auto" of overlap_step by what gains: nothing does where update and compute share cores and memory. Check update_on."""
    joined = link_to(device).joined
    if config.overlap_step == "auto":
        is_elsewhere = bool({config.param_tier, config.optimizer_tier} - {"device", "host"}) if joined else config.optimizer_tier != "device"
        config = dataclasses.replace(config, overlap_step="backward" if is_elsewhere else False)
    if config.streamed_share and (device.type != "cuda" or joined):
        raise ValueError(
            f"update_on={config.update_on!r} needs a CUDA device, and the model is on {device}, whose memory is the host's; remove it, "
            "or use update_on='auto'"
        )
    return config


def check_kernels(optimizer: Any) -> None:
    """That the device has kernels for all updates that are asked of it."""
    asked = optimizer.config.update_on
    for inner, rule in zip(optimizer.inners, optimizer.rule_of_inner, strict=True) if asked not in ("host", "auto") else ():
        if not all(map(rule.has_kernel, inner.param_groups)):
            raise ValueError(
                f"update_on={asked!r} needs Adam or AdamW without amsgrad, whose kernel on the device has the bits of the update "
                f"in host memory; {type(inner).__name__} has none, so use update_on='host'"
            )


def chosen(optimizer: Any) -> float | str:
    """The share of the update that the device does, for "auto": the smallest of all ranks, which divide their state alike."""
    share = 0.0 if optimizer.transfer.joined or optimizer.device.type != "cuda" else _best_share(optimizer)
    return min(map(float, optimizer.comm.exchange(str(share), "choosing the side of the update"))) or "host"


def _best_share(optimizer: Any) -> float:
    """The share by measured rates, for what the first group has that the device can update; 0 if there is none."""
    pairs, config = zip(optimizer.rules, optimizer.param_groups, strict=True), optimizer.config
    able = [(rule, group) for rule, group in pairs if group["params"] and rule.has_kernel(group)]
    if not able:
        return 0.0
    rule, group = able[0]
    dtype = optimizer.stored.get(group["params"][0], group["params"][0].dtype)
    nbytes = sum(kept.itemsize for kept in state_fields(dtype, rule.state_names(group), config.state_dtype, rule.splits_master).values())
    rates = measure_update(optimizer.device, optimizer.num_threads, ranks_here(optimizer.everyone.world), lambda text: say(f"zk: {text}"))
    return best_share(rates, nbytes, dtype.itemsize, config.param_tier in ("device", "auto"))
