"""The optimizers that hold parameters."""

from __future__ import annotations

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

# every parameter that some ZeroOptimizer holds -> a weak reference to that optimizer
OWNERS: WeakIdKeyDictionary = WeakIdKeyDictionary()


def is_held(param: Tensor) -> bool:
    """Tell if a ZeroOptimizer that still lives holds ``param``."""
    reference = OWNERS.get(param)
    return reference is not None and reference() is not None
