"""A warning, once, of a model that computes in 16 bits on a CPU that has no kernels for it.

It is there for every optimizer, without an option. Methods of the core: Layout.comm, Runtime.stores.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from zk.addon import Addon
from zk.config import NAMES
from zk.logs import log

if TYPE_CHECKING:
    from zk.optimizer import ZeroOptimizer


class SlowProducts(Addon):
    def attach(self, optimizer: ZeroOptimizer) -> None:
        units = [store.unit for store in optimizer._runtime.stores]
        for dtype in {unit.dtype for unit in units if unit.device.type == "cpu"}:
            warn(dtype)


@functools.cache
def warn(dtype: torch.dtype) -> None:
    is_slow = dtype in (torch.bfloat16, torch.float16) and torch.backends.mkldnn.is_available()
    if is_slow and not getattr(torch.ops.mkldnn, f"_is_mkldnn_{NAMES[dtype]}_supported")():
        log.warning(
            "the model computes in %s, for which torch has no fast kernels on this CPU: matrix products "
            "take 10 to 100 times as long as in fp32; use dtype='fp32'",
            NAMES[dtype],
        )
