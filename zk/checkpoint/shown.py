"""``optimizer.state`` as torch has it, to be read and changed, of a ZeroOptimizer whose state is elsewhere.

A parameter's state is brought back where it is read, as tensors that are the user's; what these have become goes to its tier again before
the next update or save. Names and numbers of parameters are known without that.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from zk.core.store import UnitStore
from zk.nn.tiles import Whole

if TYPE_CHECKING:
    from zk.checkpoint.manifest import Training


@dataclasses.dataclass(eq=False, repr=False)
class StateOf(MutableMapping[str, Any]):
    """The state of one parameter, by name: ``step``, a number as a tensor, and the optimizer's, in fp32 and the parameter's shape."""

    owner: Training
    param: nn.Parameter

    def _names(self) -> tuple[str, ...]:
        held, index = self.owner.units[self.param]
        if held.shard is None or index not in held.steps:
            return ()
        return *held.number_names, *held.state_names(index)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names())

    def __len__(self) -> int:
        return len(self._names())

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names():
            raise KeyError(name)
        held, index = self.owner.units[self.param]
        self.owner._settle_state()
        with torch.inference_mode(False), torch.no_grad():  # it may be changed later, outside
            return held.show_state(index, name)

    def __setitem__(self, name: str, value: Any) -> None:
        held, index = self.owner.units[self.param]
        self.owner._settle_state()
        held.replace_state(index, name, value)

    def __delitem__(self, name: str) -> None:
        raise TypeError(
            f"{name!r} cannot be taken from a parameter's state alone: optimizer.state.pop(param) forgets all of it, and "
            f"state[param][{name!r}] = torch.zeros_like(param) sets it to zero"
        )

    def __repr__(self) -> str:
        return f"{{{', '.join(map(repr, self))}}} (read where one is looked at)"


class Shown(defaultdict[Any, Any]):
    """The state of all parameters that were updated."""

    def __init__(self, owner: Training) -> None:
        super().__init__(dict)
        self.owner = owner

    def __iter__(self) -> Iterator[Any]:
        return iter([param for param, (held, index) in self.owner.units.items() if index in held.steps and held.unit.user(index) is param])

    def __len__(self) -> int:
        return sum(1 for _ in self)

    # a dict's own would see nothing
    keys, values, items = MutableMapping.keys, MutableMapping.values, MutableMapping.items  # type: ignore[assignment]
    update, popitem, clear = MutableMapping.update, MutableMapping.popitem, MutableMapping.clear  # type: ignore[assignment]

    def __contains__(self, param: object) -> bool:
        return any(param is other for other in self)

    def __getitem__(self, param: Any) -> StateOf:
        self._place_of(param)
        return StateOf(self.owner, param)

    def _place_of(self, param: Any) -> tuple[UnitStore, int]:
        if isinstance(param, Whole):
            first = next(name for name, piece in param.layer.pieces().items() if piece.whole == param.called).replace(".0.", "[0].", 1)
            raise KeyError(f"the {param.called} of a {type(param.layer).__name__} has its state by tile: optimizer.state[layer.{first}]")
        if not isinstance(param, nn.Parameter) or param not in self.owner.units:
            raise KeyError(f"the state of this optimizer is by parameter that it holds; got {type(param).__name__}: keep what is your own elsewhere")
        return self.owner.units[param]

    def get(self, param: Any, default: Any = None) -> Any:
        return self[param] if param in self else default  # noqa: SIM401

    def setdefault(self, param: Any, default: Any = None) -> Any:
        if param not in self and default:
            self[param] = default
        return self[param]

    def __setitem__(self, param: Any, state: Mapping[str, Any]) -> None:
        held, index = self._place_of(param)
        held.check_state_names(index, state.keys() - {"master"})
        self.owner._settle_state()
        for write in held.import_plan(index, state):
            write()

    def __delitem__(self, param: Any) -> None:
        if param not in self:
            raise KeyError("this parameter has no state")
        self.owner._settle_state()
        held, index = self.owner.units[param]
        held.forget_state(index)

    def pop(self, param: Any, *default: Any) -> Any:
        if default and param not in self:
            return default[0]
        state = dict(self[param])
        del self[param]
        return state

    def copy(self) -> Any:
        """All states, brought back."""
        return {param: dict(state) for param, state in self.items()}

    __copy__ = copy

    def __deepcopy__(self, memo: Any) -> Any:
        return {param: {name: value.clone() for name, value in state.items()} for param, state in self.items()}

    def __reduce__(self) -> Any:
        return dict, (self.copy(),)

    def __repr__(self) -> str:
        return f"<state of {len(self)} parameters>"


class Gone(defaultdict[Any, Any]):
    """The state of an optimizer whose ZeroOptimizer had it, and is closed: nothing trains on from no state without having been told to."""

    def __missing__(self, param: Any) -> Any:
        raise RuntimeError(
            "this optimizer was given to a ZeroOptimizer, which had its state and is closed: load_state_dict() what state_dict() gave before "
            "close(), or make a new optimizer of the same class, to begin without state"
        )
