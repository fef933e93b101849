"""In: a ZeroOptimizer, whose state is elsewhere. Out: what ``optimizer.state`` shows of it to torch.distributed.checkpoint."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any


class Shown(defaultdict[Any, Any]):
    """Empty, but not false: torch.distributed.checkpoint makes a step with zero gradients and lr=0 to fill a state that is.

    Having asked it expects ``state_dict()`` to hold something to load into, before the first step too; and of ``state[param]`` the names.
    """

    def __init__(self, names_of: Callable[[Any], list[str]]) -> None:
        super().__init__(dict)
        self.names_of, self.asked = names_of, False

    def __bool__(self) -> bool:
        self.asked = True
        return True

    def __missing__(self, param: Any) -> dict[str, None]:
        return dict.fromkeys(self.names_of(param))

    def __reduce__(self) -> Any:
        return defaultdict, (dict,)
