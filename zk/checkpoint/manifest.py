"""What the manifest of a checkpoint says of an optimizer, and of all that is no tensor."""

from __future__ import annotations

import base64
import random
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from zk.checkpoint.contents import FORMAT, Cut
from zk.optimizer import ZeroOptimizer
from zk.store import UnitStore


def cuts_of(model: nn.Module) -> dict[str, Cut]:
    """All parameters by name; modules say in ``pieces()`` what theirs are cut from."""
    named = model.named_parameters(remove_duplicate=False)
    found = {name: Cut.all_of(name, param.shape) for name, param in named}
    for path, module in model.named_modules(remove_duplicate=False):
        prefix = f"{path}." * bool(path)
        for name, piece in getattr(module, "pieces", dict)().items():
            found[prefix + name] = Cut(prefix + piece.whole, piece.shape, piece.place)
    return found


def of_optimizer(optimizer: ZeroOptimizer, scheduler: Any, extra: Any) -> dict[str, Any]:
    """What a manifest says, the same on all ranks."""
    model, cuts, names = optimizer.model, cuts_of(optimizer.model), names_of(optimizer.model)
    groups = [g | {"params": [names[p] for p in g["params"]]} for g in optimizer.param_groups]
    everywhere = model.named_parameters(remove_duplicate=False)
    held = [(name, names[p]) for name, p in everywhere if p in optimizer._runtime.store_of]
    config = getattr(getattr(model, "config", None), "to_json_string", None)  # of Hugging Face
    return {
        **FORMAT,
        "optimizer": kind_of(optimizer),
        "world": optimizer._layout.comm.size,
        "counters": {"steps": optimizer.num_steps, "skipped_steps": optimizer.skipped_steps},
        "loss_scale": optimizer._scaler.state_dict(),
        "groups": plain(groups, "param_groups"),
        "units": [of_unit(store, cuts) for store in optimizer._runtime.stores],
        "tied": {name: kept for name, kept in held if name != kept},
        "model_config": str(config()) if callable(config) else None,
        "scheduler": scheduler and plain(scheduler.state_dict(), "scheduler.state_dict()"),
        "scheduler_type": scheduler and type(scheduler).__name__,
        "extra": plain(extra, "extra"),
    }


def of_unit(store: UnitStore, cuts: Mapping[str, Cut]) -> dict[str, Any]:
    """What a manifest says of a unit, without its elements."""
    unit, params = store.unit, []
    for index, (name, steps) in enumerate(zip(unit.names, store.steps, strict=True)):
        numbers = store.rule.numbers(store.groups[index], steps) if steps else {}
        cut = cuts[name]
        place = [[part.start, part.stop] for part in cut.place]
        param = {
            "name": name,
            "shape": unit.shapes[index],
            "dtype": str(unit.dtype).removeprefix("torch."),
            "offset": unit.offsets[index],
            "steps": steps,
            "scalars": plain(numbers, f"the state of {name!r}"),
            "order": order_of(store, index),
            "whole": {"name": cut.whole, "shape": cut.shape, "place": place},
        }
        params.append(param)
    return {"name": unit.name, "kinds": kinds_of(store), "params": params}


def kinds_of(store: UnitStore) -> list[str]:
    """The kinds of values that are saved of each element."""
    return ["master", *store.rule.names] if store.unit.is_trained else ["param"]


def order_of(store: UnitStore, index: int) -> tuple[int, ...]:
    """A parameter's dimensions from the slowest to the fastest in memory; of no elements: none."""
    strides = store.unit.strides[index] * bool(store.unit.sizes[index])
    return tuple(sorted(range(len(strides)), key=strides.__getitem__, reverse=True))


def names_of(model: nn.Module) -> dict[nn.Parameter, str]:
    """The names that units have of parameters."""
    return {param: name for name, param in model.named_parameters()}


def kind_of(optimizer: ZeroOptimizer) -> str:
    """The classes of the user's optimizers."""
    return " and ".join(type(inner).__name__ for inner in optimizer._inners)


def buffers_of(optimizer: ZeroOptimizer, all_names: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Buffers that state_dict() has, and parameters that came later, such as averages.

    By name: once each, or under ``all_names`` of their modules.
    """
    known = optimizer._runtime.store_of
    for prefix, module in optimizer.model.named_modules(remove_duplicate=not all_names):
        for name, tensor in {**module._parameters, **module._buffers}.items():
            is_saved = tensor is not None and tensor not in known
            if is_saved and name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}".removeprefix("."), tensor.detach()


def plain(value: Any, what: str) -> Any:
    """``value`` as JSON can hold it. TypeError, saying where, for what it cannot."""
    if isinstance(value, (str, bool, int, float, type(None))):
        return value
    if isinstance(value, np.generic) or (isinstance(value, Tensor) and value.numel() == 1):
        return value.item()
    if isinstance(value, (list, tuple)):
        return [plain(item, f"{what}[{index}]") for index, item in enumerate(value)]
    if not isinstance(value, Mapping) or not all(isinstance(key, (str, int)) for key in value):
        raise TypeError(
            f"{what} is a {type(value).__name__}; a checkpoint keeps what JSON can hold: numbers, "
            "strings, lists, and dicts by strings or numbers"
        )
    items = {key: plain(item, f"{what}[{key!r}]") for key, item in value.items()}
    # JSON would make strings of numbers
    is_by_number = "__items__" in value or any(isinstance(key, int) for key in value)
    return {"__items__": [*map(list, items.items())]} if is_by_number else items


def revived(value: Any, here: Any = None) -> Any:
    """Undo ``plain``, in the types of what is in its place ``here``: tuples, tensors, Counters."""
    if isinstance(value, list):
        like = [*here] if isinstance(here, (list, tuple)) else []
        found = [revived(*pair) for pair in zip(value, like + [None] * len(value), strict=False)]
        return tuple(found) if isinstance(here, tuple) else found
    if isinstance(value, dict):
        old = here if isinstance(here, dict) else {}
        made = old.copy()  # of its class: a Counter, say
        made.clear()
        pairs = value.get("__items__", value.items())
        made.update({key: revived(item, old.get(key)) for key, item in pairs})
        return made
    is_tensor = isinstance(here, Tensor) and isinstance(value, (int, float))
    return torch.full_like(here, value) if is_tensor else value


def random_state(device: torch.device) -> dict[str, Any]:
    """The generators of this process, and of the GPU that its model computes on."""
    states: dict[str, Any] = {"python": random.getstate(), "numpy": np.random.get_state()}
    found: dict[str, Any] = {"torch": packed(torch.get_rng_state()), "cuda": None}
    for name, (kind, keys, *rest) in states.items():
        found[name] = [kind, packed(np.array(keys, np.uint32)), *rest]
    if device.type == "cuda":
        found["cuda"] = packed(torch.cuda.get_rng_state(device))
    return found


def restore_random(state: Mapping[str, Any], device: torch.device) -> None:
    """Give the generators their states again."""
    for name, put in {"python": random.setstate, "numpy": np.random.set_state}.items():
        kind, keys, *rest = state[name]
        put((kind, tuple(unpacked(keys).view(np.uint32).tolist()), *rest))
    torch.set_rng_state(torch.from_numpy(unpacked(state["torch"])))
    if state["cuda"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(torch.from_numpy(unpacked(state["cuda"])), device)


def packed(numbers: Any) -> str:
    """Numbers, of which there are many, as text."""
    return base64.b64encode(zlib.compress(np.asarray(numbers).tobytes())).decode()


def unpacked(text: str) -> np.ndarray:
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), np.uint8).copy()
