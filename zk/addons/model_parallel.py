"""The options of ranks that hold other parts of the same layers, as tensor parallelism has them.

    model_parallel_group=   ranks with the other parts; process_group= has those with the same part
    replicated_params=      names, or ends of names, of parameters that all parts hold alike

The framework sees to it that replicated parameters begin alike and get the same gradient on all
parts: step() compares norms of these gradients. ``parts`` reads both, and does the rest.
"""

from __future__ import annotations

from typing import Any

import zk.addons.parts  # noqa: F401 (without it, they are refused)
from zk.addon import Addon


def given(value: Any) -> Addon:
    """An option without a seam of its own."""
    return Addon()
