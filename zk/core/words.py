"""Sizes, counts, dtypes and paths as people write them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

_DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.uint8: "8bit"}


def size(nbytes: float) -> str:
    """ "1.5 GiB"; nothing for nothing."""
    for unit, power in (("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if nbytes >= 1 << power:
            return f"{nbytes / (1 << power):,.1f} {unit}"
    return f"{nbytes:,.0f} B" if nbytes else ""


def count(num_params: int) -> str:
    """ "1.34B"."""
    for unit, scale in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if num_params >= scale:
            return f"{num_params / scale:.3g}{unit}"
    return str(num_params)


def short(path: str, most: int = 24) -> str:
    """The end of a long path: ".../runs/mine"."""
    return path if len(path) <= most else f"...{path[3 - most :]}"


def some(items: Sequence[object], most: int) -> str:
    """ "one, two and 3 more": no more than ``most`` of them by name."""
    return ", ".join(map(str, items[:most])) + (f" and {len(items) - most} more" if len(items) > most else "")


def named(dtype: torch.dtype) -> str:
    """The name that users know: bf16."""
    return _DTYPES.get(dtype, str(dtype).removeprefix("torch."))
