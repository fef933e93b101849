"""tile_sequence: the position-wise modules of a model, found by their shape, run tile by tile of tokens."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator

from torch import nn

from zk.core.options import parse_nbytes
from zk.token_tiles import TokenTiles

# arguments of modules whose tokens look at each other
_BETWEEN_TOKENS = ("mask", "position", "past", "cache", "ids")


def tile_sequence(model: nn.Module, modules: Collection[str | type[nn.Module]] | None = None, max_nbytes: int | str | None = None) -> list[str]:
    """Let position-wise modules of ``model`` run tile by tile of tokens, in place: MLPs, mixtures of experts and norms.

    Memory for what is inside of them no longer grows with the sequence. They are computed once more in backward, as in a checkpoint. Gradients
    of parameters are the sums over tiles in fp32, and arrive once. A call with no more tokens than a tile is what it was. It works before and
    after the optimizer is made, at every stage; ``untile_sequence`` takes it back.

    Args:
        model: its modules keep class, parameters and ``state_dict()``; their ``forward`` is called in tiles.
        modules: names of modules (``"model.layers.0.mlp"``), ends of names (``"mlp"``), or classes. By default those that are found by shape: in
            the members of lists, what is called with hidden states alone and has weights from a width to a larger one and back; and all norms.
        max_nbytes: bytes (or "512MiB") that the activations of a tile and their gradients may take. A module whose tile takes more is refused. The
            tile itself has 512 tokens in host memory and 4,096 on a device, always, so no bit depends on this.

    Returns:
        The names of the modules that run in tiles.

    Raises:
        ValueError: if no module is found; and in the first call of several tiles, for a module whose tokens see each other (it is tried with two),
            or whose tile is larger than ``max_nbytes`` (one token is measured).
        RuntimeError: in forward, for a module that draws random numbers (dropout in training), changes its input or a buffer, keeps a tensor in an
            attribute, or has hooks inside of it or on its parameters, which would see tiles.

    Source: sequence tiling, Arctic Long Sequence Training, arXiv 2506.13996, section 3.1.
    """
    limit = None if max_nbytes is None else parse_nbytes(max_nbytes, "max_nbytes")
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module; got {type(model).__name__}")
    tiled = [name for name, module in model.named_modules() if isinstance(vars(module).get("forward"), TokenTiles)]
    found = dict(_found(model) if modules is None else _named(model, modules))
    if tiled and (modules is None or set(tiled) & set(found.values())):
        raise ValueError(f"{tiled[0]!r} runs in tiles already; call untile_sequence(model) first")
    if not found:
        raise ValueError(
            f"no position-wise module was found in {type(model).__name__}: none in a list of blocks is called with one tensor and has weights to a "
            'larger width and back; name them: modules=["mlp"], by name, end of name, or class'
        )
    for module, name in found.items():
        module.forward = TokenTiles(module, name, limit)  # type: ignore[method-assign]
    return list(found.values())


def untile_sequence(model: nn.Module) -> None:
    """Undo ``tile_sequence``."""
    for module in model.modules():
        tiles = vars(module).get("forward")
        if isinstance(tiles, TokenTiles):
            del module.forward
            if tiles.before is not None:
                module.forward = tiles.before  # type: ignore[method-assign]


def _named(model: nn.Module, modules: Collection[str | type[nn.Module]]) -> Iterator[tuple[nn.Module, str]]:
    if isinstance(modules, str):
        raise TypeError(f"modules must be a list of names or classes; got {modules!r} (modules=[{modules!r}])")
    for wanted in modules:
        matches = [
            (module, name)
            for name, module in model.named_modules()
            if (isinstance(module, wanted) if isinstance(wanted, type) else name == wanted or name.endswith(f".{wanted}"))
        ]
        if not matches:
            raise ValueError(f"no module of {type(model).__name__} is called {wanted!r}, ends so, or is of that class")
        yield from matches


def _found(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    for name, module in model.named_modules():
        if _is_norm(module):
            yield module, name
    for path, blocks in model.named_modules():
        if isinstance(blocks, nn.ModuleList):
            for number, block in enumerate(blocks):
                yield from _inside(block, f"{path}.{number}")


def _inside(block: nn.Module, path: str) -> Iterator[tuple[nn.Module, str]]:
    """The outermost position-wise modules in a block, without itself."""
    for name, child in block.named_children():
        if _is_mlp(child):
            yield child, f"{path}.{name}"
        else:
            yield from _inside(child, f"{path}.{name}")


def _is_norm(module: nn.Module) -> bool:
    named = isinstance(module, (nn.LayerNorm, nn.RMSNorm)) or type(module).__name__.endswith(("RMSNorm", "LayerNorm"))
    return named and not list(module.children()) and all(param.ndim == 1 for param in module.parameters()) and _takes_hidden_states_alone(module)


def _is_mlp(module: nn.Module) -> bool:
    """Tell if it is called with hidden states alone, and has weights to a larger width and back, or experts."""
    if isinstance(module, nn.ModuleList) or not _takes_hidden_states_alone(module):
        return False
    lists = [child for child in module.children() if isinstance(child, nn.ModuleList) and len(child) > 1]
    params = list(module.parameters())
    has_experts = any(param.ndim == 3 for param in params) or any(len(set(map(type, experts))) == 1 for experts in lists)
    shapes = {tuple(param.shape) for param in params if param.ndim == 2}
    # (2 * wide, narrow) of two weights in one
    pairs = ((high, width, back) for high, width in shapes for low, back in shapes if low == width < min(high, back))
    return (has_experts and len(params) > 1) or any(back in (high, 2 * high) or high == 2 * back for high, _, back in pairs)


def _takes_hidden_states_alone(module: nn.Module) -> bool:
    arguments = list(inspect.signature(module.forward).parameters.values())
    if not arguments or any(word in argument.name for argument in arguments for word in _BETWEEN_TOKENS):
        return False
    required = [argument for argument in arguments if argument.default is argument.empty and argument.kind in (0, 1, 3)]
    return len(required) == 1 and arguments[0] is required[0]
