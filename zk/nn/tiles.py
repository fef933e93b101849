"""Layers whose parameters are cut into tiles: each tile is a module with parameters of its own, and so a unit of its own.

For everything else such a layer has the parameters of the layer that it was made from: ``state_dict()``, checkpoints and exports have their
names and shapes, and as attributes they are put together from the tiles.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from zk.core.owners import owner_of


class Tile(nn.Module):
    """A part of a layer that is a unit of its own, wherever it is in the model."""


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """The place of a tile's parameter in the parameter that the layer has without tiles."""

    whole: str  # its name there
    shape: tuple[int, ...]
    place: tuple[slice, ...]


class Tiled(nn.Module):
    """A layer made of tiles."""

    def pieces(self) -> dict[str, Piece]:
        """Name of a tile's parameter in this layer -> what it is a piece of, in order."""
        raise NotImplementedError

    def has_whole(self, name: str) -> bool:
        """Check that the layer without tiles has a parameter of this name."""
        raise NotImplementedError

    def parts(self, name: str) -> list[tuple[nn.Parameter, tuple[slice, ...]]]:
        """The parameters of tiles that one of the layer is made of, each with its place."""
        return [
            (self.get_parameter(own), piece.place)
            for own, piece in self.pieces().items()
            if piece.whole == name
        ]

    def keep_names(self) -> None:
        """Give ``state_dict()`` and ``load_state_dict()`` the layer without tiles."""
        self.register_state_dict_post_hook(_put_together)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_take_apart)  # type: ignore[no-untyped-call]

    def __setattr__(self, name: str, value: Any) -> None:
        if self.has_whole(name):
            if isinstance(value, Whole) and value.layer is self and value.called == name and value.shape == value.memory.shape:
                return  # layer.weight *= 2 has written it
            raise AttributeError(
                f"{name!r} of a {type(self).__name__} is its tiles, and cannot be replaced; write to it within torch.no_grad(): "
                f"layer.{name}.copy_(values)"
            )
        super().__setattr__(name, value)


def joined(parts: Iterable[tuple[Tensor, tuple[slice, ...]]], shape: tuple[int, ...]) -> Tensor:
    """A parameter of ``shape``, from its tiles; gradients flow back to them."""
    whole: Tensor | None = None
    for part, place in parts:
        whole = part.new_empty(shape) if whole is None else whole
        whole[place] = part
    assert whole is not None
    return whole


class Whole(Tensor):
    """A parameter of a tiled layer, put together from its tiles, or some of its rows. What is written to it is written to them."""

    layer: Tiled
    called: str  # in the layer
    memory: Tensor  # of all of it

    @classmethod
    def of(cls, layer: Tiled, name: str, values: Tensor, memory: Tensor | None = None) -> Whole:
        """``values`` as the parameter ``name`` of ``layer``, or as a part of it, which is in ``memory``."""
        whole = values.as_subclass(cls)
        whole.layer, whole.called, whole.memory = layer, name, values if memory is None else memory
        return whole

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        first = next(value for value in tree_leaves((args, kwargs)) if isinstance(value, Whole))
        name, attribute = getattr(func, "__name__", ""), getattr(func, "__self__", None)
        with torch._C.DisableTorchFunctionSubclass():
            if attribute is _DATA and name == "__get__":
                return Whole.of(first.layer, first.called, first.detach(), first.memory)
            if first.shape == first.memory.shape:
                if attribute is _GRAD:
                    return first._gradient(*args[1:])
                if (attribute is _REQUIRES_GRAD and name == "__set__") or name == "requires_grad_":
                    for param, _ in first.layer.parts(first.called):
                        param.requires_grad_(*args[1:], **kwargs)
                    return first
                if attribute is _DATA:
                    return first._write(args[1])
            target = kwargs.get("out", args[0] if args else first)
            is_write = "out" in kwargs or (name.endswith("_") and not name.endswith(("__", "requires_grad_"))) or name in _IN_PLACE
            if not (is_write and isinstance(target, Whole)):
                result = func(*args, **kwargs)
                # (a part that shares its memory, as rows do)
                if name in ("__getitem__", "narrow", "select", "view") and torch._C._is_alias_of(result, first):  # type: ignore[attr-defined]
                    return Whole.of(first.layer, first.called, result, first.memory)
                return result
            if torch.is_grad_enabled() and target.requires_grad and getattr(func, "__module__", "") != nn.init.__name__:
                raise RuntimeError(
                    f"{target.called!r} of a {type(target.layer).__name__}, which requires grad, is changed in place; do so within torch.no_grad()"
                )
            values = target.detach()
            given = tree_map(lambda value: values if value is target else value, (args, kwargs))
            func(*given[0], **given[1])
            target._write(target.memory)
            return target

    @torch.no_grad()
    def _write(self, values: Tensor) -> None:
        for param, place in self.layer.parts(self.called):
            param.copy_(values[place])

    def _gradient(self, *value: Tensor | None) -> Tensor | None:
        parts = self.layer.parts(self.called)
        if value:
            for param, place in parts:
                param.grad = None if value[0] is None else value[0][place].clone()
            return None
        grads = [(param.grad, place) for param, place in parts]
        return None if any(grad is None for grad, _ in grads) else joined(grads, tuple(self.shape))  # type: ignore[arg-type]


_GRAD, _DATA, _REQUIRES_GRAD = Tensor.grad, Tensor.data, Tensor.requires_grad
_IN_PLACE = ("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__idiv__", "__ipow__")


def _put_together(layer: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
    assert isinstance(layer, Tiled)
    pieces = layer.pieces()
    parts = {name: state.pop(prefix + name) for name in pieces}
    others = {key: state.pop(key) for key in list(state) if key.startswith(prefix)}
    for whole, shape in {piece.whole: piece.shape for piece in pieces.values()}.items():
        placed = [
            (parts[name], piece.place)
            for name, piece in pieces.items()
            if piece.whole == whole
        ]
        state[prefix + whole] = joined(placed, shape)
    state.update(others)


def _take_apart(
    layer: nn.Module,
    state: dict[str, Any],
    prefix: str,
    metadata: Any,
    _strict: bool,
    missing: list[str],
    _unexpected: Any,
    errors: list[str],
) -> None:
    assert isinstance(layer, Tiled)
    assigned = bool(metadata.get("assign_to_params_buffers"))  # a view would keep all of the parameter
    pieces = layer.pieces()
    given: dict[str, Tensor | None] = {}
    for whole, shape in {piece.whole: piece.shape for piece in pieces.values()}.items():
        values = given[whole] = state.pop(prefix + whole, None)
        if values is not None and tuple(values.shape) != shape:
            errors.append(
                f"size mismatch for {prefix}{whole}: copying a param with shape {values.shape} from checkpoint, the shape in current model is "
                f"{torch.Size(shape)}."
            )
            given[whole] = None
        elif values is None and not any(prefix + name in state for name, piece in pieces.items() if piece.whole == whole):
            missing.append(prefix + whole)
    for name, piece in pieces.items():
        values, param = given[piece.whole], layer.get_parameter(name)
        if values is not None:
            part = values[piece.place]
            state[prefix + name] = part.clone(memory_format=torch.contiguous_format) if assigned else part
        elif prefix + name not in state and owner_of(param) is None:
            state[prefix + name] = param.detach()  # stays as it is, and is not reported under a name that the user never saw


def pieces_of(model: nn.Module) -> dict[str, Piece]:
    """Name of a tile's parameter -> what it is a piece of, for every tiled layer of the model."""
    found = {}
    for path, layer in model.named_modules(remove_duplicate=False):
        if isinstance(layer, Tiled):
            prefix = f"{path}." if path else ""
            for name, piece in layer.pieces().items():
                found[prefix + name] = dataclasses.replace(piece, whole=prefix + piece.whole)
    return found


def users_of(model: nn.Module) -> dict[Tensor, set[str]]:
    """The names that each parameter has."""
    users: dict[Tensor, set[str]] = collections.defaultdict(set)
    for path, module in model.named_modules():
        for name, param in module._parameters.items():
            if param is not None:
                users[param].add(f"{path}.{name}" if path else name)
    return users


def replace(model: nn.Module, before: nn.Module, after: nn.Module) -> None:
    """Put ``after`` wherever ``before`` is in the model, with its hooks on forward and backward."""
    vars(after).update({name: value for name, value in vars(before).items() if "ward_" in name})
    for parent in model.modules():
        for name, child in list(parent._modules.items()):
            if child is before:
                setattr(parent, name, after)
