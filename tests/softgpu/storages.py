"""torch.UntypedStorage and Tensor.is_pinned, where Python asks them about device memory or page-locked memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.softgpu.memory import nbytes_of, plainly


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    with plainly():
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def install() -> None:
    """Replace the methods that torch has no device for."""
    storage: Any = torch.UntypedStorage
    nbytes, new = storage.nbytes, storage.__new__

    def make(cls: type, *args: Any, device: Any = None, **options: Any) -> Any:
        if device is None or torch.device(device).type != "cuda":
            return new(cls, *args, **options, **{} if device is None else {"device": device})
        return torch.empty(*(args or (0,)), dtype=torch.uint8, device=device).untyped_storage()

    def size_of(self: torch.UntypedStorage) -> int:
        known = nbytes_of(self) if self.device.type == "cuda" else None
        return int(nbytes(self)) if known is None else known

    storage.__new__ = make
    storage.nbytes = storage.size = size_of
    storage.cpu = lambda self: _bytes(self).cpu().untyped_storage()
