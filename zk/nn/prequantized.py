"""Weights that bitsandbytes has saved in 4 bits: codes, and beside them, in the same files, the quant_state that says what these stand for.

The codes are a parameter. The state (scales, 1/64 byte for each weight; 1/16 where they are not quantized too) is no parameter, and read at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from zk.checkpoint.base import digest_of
from zk.core.owners import owner_of

PACKED = "quant_state.bitsandbytes__"
PARTS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map", f"{PACKED}nf4", f"{PACKED}fp4")


def takes_codes(tensor: Any) -> bool:
    """Check that ``tensor`` is a Params4bit of bitsandbytes: quantized, or about to be and held by no optimizer."""
    return hasattr(tensor, "bnb_quantized") and (tensor.bnb_quantized or owner_of(tensor) is None)


def state_of(param: Any, shape: tuple[int, ...], dtype: torch.dtype | None, parts: Mapping[str, Tensor], device: torch.device) -> Any:
    """The quant_state of ``parts``, for codes of ``shape`` and ``dtype``; ValueError unless ``param`` was built for these."""
    from bitsandbytes.functional import QuantState

    try:
        state = QuantState.from_dict(dict(parts), device)
    except (KeyError, ValueError) as error:
        raise ValueError(f"has no whole quant_state beside it ({error})") from None
    whole, nested = tuple(param.shape if param.quant_state is None else param.quant_state.shape), param.compress_statistics
    blocks = -(-math.prod(whole) // param.blocksize)
    built = {
        "quant_type": (state.quant_type, param.quant_type),
        "shape": (tuple(state.shape), whole),
        "blocksize": (state.blocksize, param.blocksize),
        "quant_storage": (dtype, param.quant_storage),
        "codes": (shape, ((math.prod(whole) + 1) // (2 * param.quant_storage.itemsize), 1)),
        "absmax": ((state.absmax.numel(), state.absmax.dtype), (blocks, torch.uint8 if nested else torch.float32)),
        "nested_absmax": (state.state2.absmax.numel() if state.nested else 0, -(-blocks // 256) if nested else 0),
    }
    others = [f"{what} {found} instead of {wanted}" for what, (found, wanted) in built.items() if found != wanted]
    if others:
        raise ValueError(f"has {', '.join(others)}")
    return state


def restore(param: Any, state: Any, shape: tuple[int, ...]) -> None:
    """Make ``param``, which stays the same object, one of codes that are yet to come; nothing to do without a ``state``."""
    if state is None:
        return
    if param.shape != shape or param.dtype != param.quant_storage:  # it was not quantized yet, or packed anew
        Tensor.data.__set__(param, torch.empty(shape, dtype=param.quant_storage, device=param.device))  # type: ignore[attr-defined]
    param.quant_state, param.bnb_quantized = state, True
    if param.module is not None:
        param.module.quant_state = state


def scales_of(param: Any) -> str:
    """Words that are others, as a rule, where scales are; empty for a parameter without."""
    state = getattr(param, "quant_state", None)
    return "" if state is None else f", under scales {digest_of(state.absmax.reshape(-1)[:4096])[:8]}"
