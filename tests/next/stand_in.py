"""The names of zk that user-like tests speak to, from the new core: options of the old one that say nothing are left out."""

from __future__ import annotations

from typing import Any
from unittest import mock

import tests.parity
import zk.next
import zk.next.store
from tests.parity import Case

# options that the old core has and the new one has not, with the value at which they change nothing
SILENT: dict[str, Any] = {
    "compute_dtype": None, "overlap": (True, False), "overlap_step": False, "delay_update": None, "keep_gradients": True,
    "update_on": "host", "elementwise": (True, False), "parameterwise": False, "nvme_checksum": (True, False),
}  # fmt: skip


def known(options: dict[str, Any]) -> dict[str, Any]:
    """``options`` without those that change nothing."""
    def says_something(name: str, value: Any) -> bool:
        silent = SILENT.get(name, ...)
        return silent is ... or not (value in silent if isinstance(silent, tuple) else value == silent)

    return {name: value for name, value in options.items() if says_something(name, value) and name != "grad_accum_dtype"}


class Zk:
    """Stands for the package in tests/parity.py."""

    gather = staticmethod(zk.next.gather)

    @staticmethod
    def ZeroOptimizer(model: Any, optimizer: Any, **options: Any) -> zk.next.ZeroOptimizer:
        return zk.next.ZeroOptimizer(model, optimizer, **known(options))


def run_case(case: Case) -> str:
    """tests.parity.run_case on the new core, in chunks of 1,024 elements."""
    with mock.patch.object(tests.parity, "zk", Zk), mock.patch.object(zk.next.store, "CHUNK_NUMEL", 1024):
        return tests.parity.run_case(case)
