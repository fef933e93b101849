"""long_context: what a causal language model needs for long sequences, in one call."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from zk.core.hooks import Hook
from zk.deferred_logits import DeferredHead
from zk.nn.activations import ActivationOffload, offload_activations
from zk.nn.tiled_linear import TiledLinear
from zk.tile_sequence import tile_sequence


def long_context(
    model: nn.Module,
    head: str | None = None,
    max_nbytes: int | str | None = None,
    checkpoint: bool = True,
    nvme_path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None,
) -> list[str]:
    """Let a causal language model train on long sequences, in place: no logits, MLPs and norms tile by tile, checkpoints away from the device.

    The loss is the model's own: its head gives logits that are computed when they are used, and ``F.cross_entropy`` of them is
    ``zk.linear_cross_entropy``, also behind casts, shifts, a factor and a softcap. Where they are used otherwise (evaluation with metrics, a loss of
    one's own), they are what they were, until the head is written (by ``step()``). Generation and other forwards without labels and gradients are
    as before.

    Args:
        model: of transformers, or any module. Checkpoints are those of ``gradient_checkpointing_enable()``, which it should have.
        head: name of the linear layer that makes logits; by default ``model.get_output_embeddings()``.
        max_nbytes: bytes (or "512MiB") that a tile of a module may take (``tile_sequence``), and the logits that exist at once
            (``linear_cross_entropy``). No bit depends on it.
        checkpoint: checkpoint blocks, and offload what the checkpoints save.
        nvme_path: where checkpoints go instead of host memory (``offload_activations``). In host memory alone they stay where they are.

    Returns:
        The names of the modules that run in tiles.

    Raises:
        TypeError: for a head that is no nn.Linear or TiledLinear (an adapter around it, say), also in forward, if it has become one.
        ValueError: for a model without one, and what ``tile_sequence`` refuses.

    Call it before or after the optimizer is made. Source: Arctic Long Sequence Training, arXiv 2506.13996.
    """
    _head(model, head)
    enable: Any = getattr(model, "activation_checkpointing_enable", getattr(model, "gradient_checkpointing_enable", None))  # (the first since 5.17)
    if checkpoint and enable is None:
        raise ValueError(
            f"{type(model).__name__} has no gradient_checkpointing_enable(); checkpoint its blocks by torch.utils.checkpoint, and pass "
            "checkpoint=False"
        )
    names = tile_sequence(model, None, max_nbytes)
    logits = _Logits(model, head, max_nbytes)
    model.register_forward_pre_hook(Hook(logits.begin), with_kwargs=True)
    model.register_forward_hook(Hook(logits.end), always_call=True, prepend=True)
    if checkpoint:
        enable({"use_reentrant": False})
        away = _Away(nvme_path)
        model.register_forward_pre_hook(Hook(away.begin))
        model.register_forward_hook(Hook(away.end), always_call=True, prepend=True)
    return names


def _head(model: nn.Module, name: str | None) -> Any:
    """The layer that makes logits now; refused if its ``forward`` cannot be deferred."""
    layer: Any = model.get_submodule(name) if name is not None else getattr(model, "get_output_embeddings", lambda: None)()
    if layer is None:
        raise ValueError(f"{type(model).__name__} names no layer that makes its logits; name it: head='lm_head'")
    if type(layer) is not nn.Linear and not isinstance(layer, TiledLinear):
        raise TypeError(
            f"the head of {type(model).__name__} is a {type(layer).__name__}, and a loss without logits needs an nn.Linear or a TiledLinear; take "
            "adapters off it (modules_to_save, target_modules), or use zk.tile_sequence(model) alone"
        )
    if "forward" in vars(layer):
        raise ValueError(f"forward of the head is replaced already, by a {type(vars(layer)['forward']).__name__}; call long_context once, and first")
    return layer


class _Logits:
    """Defers the logits of a model's head, also of one that has taken the place of the first."""

    def __init__(self, model: nn.Module, name: str | None, max_nbytes: int | str | None) -> None:
        self.name, self.max_nbytes = name, max_nbytes
        self.deferred = DeferredHead(_head(model, name), max_nbytes)

    def begin(self, model: nn.Module, _args: Any, kwargs: Any) -> None:
        """Look for another head, and for labels."""
        head: Any = model.get_submodule(self.name) if self.name is not None else model.get_output_embeddings()  # type: ignore[operator]
        if head is not self.deferred.head:
            new = DeferredHead(_head(model, self.name), self.max_nbytes)
            del self.deferred.head.forward
            self.deferred = new
        self.deferred.has_labels = kwargs.get("labels") is not None

    def end(self, *_: Any) -> None:
        """Forget the labels."""
        self.deferred.has_labels = False


class _Away:
    """Checkpoints of a model's forward go to host memory or files."""

    def __init__(self, nvme_path: Any) -> None:
        self.nvme_path = nvme_path
        self.offload: ActivationOffload | None = None
        self.entered: list[ActivationOffload] = []

    def begin(self, model: nn.Module, _args: Any) -> None:
        """Enter the context, where there will be a backward."""
        if torch.is_grad_enabled():
            if self.offload is None:  # only now is the model where it computes
                self.offload = offload_activations(model, nvme_path=self.nvme_path)
            self.entered.append(self.offload.__enter__())

    def end(self, *_: Any) -> None:
        """Leave the context that ``begin`` has entered."""
        if self.entered:
            self.entered.pop().__exit__()
