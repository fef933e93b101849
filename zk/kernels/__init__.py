"""Triton kernels, usable alone: flattening, reduction, casts, Adam, tiled matrix products.

In host memory each runs its plain PyTorch reference.

Triton is imported with the first of them, not with zk.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from zk.kernels.step import AdamStep

if TYPE_CHECKING:
    from zk.kernels.adam import adam
    from zk.kernels.flatten import flatten, unflatten
    from zk.kernels.reduce import cast, reduce
    from zk.kernels.tiled_matmul import tiled_matmul

__all__ = ["AdamStep", "adam", "cast", "flatten", "reduce", "tiled_matmul", "unflatten"]
_FILES = {name: {"cast": "reduce", "unflatten": "flatten"}.get(name, name) for name in __all__[1:]}


def free_tables() -> None:
    """Free the device memory of tables that ``flatten`` keeps for the layouts it has seen."""
    if "zk.kernels.flatten" in sys.modules:
        sys.modules["zk.kernels.flatten"].table.cache_clear()


class _Kernels(ModuleType):
    """A package in which a function may have the name of the file that it is in."""

    def __getattr__(self, name: str) -> Any:
        if name not in _FILES:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        function = getattr(importlib.import_module(f"{self.__name__}.{_FILES[name]}"), name)
        setattr(self, name, function)
        return function

    def __dir__(self) -> list[str]:
        return [*__all__, *(name for name in vars(self) if name.startswith("__"))]

    def __setattr__(self, name: str, value: Any) -> None:
        """Importing a file puts it here under its name: the function stays what is found."""
        super().__setattr__(name, getattr(value, name) if name in _FILES and isinstance(value, ModuleType) else value)


sys.modules[__name__].__class__ = _Kernels
