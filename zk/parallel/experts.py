"""Experts over ranks: each rank may call other ones, and all gather the same ones in one order.

A rank knows which experts it uses only when it calls them. So, until the forward of the block around them (their chooser) ends, each rank
says before a call which expert it wants, and all gather those that any rank wants. A rank that wants none says so, until none does.
What was gathered stays until the forward has ended, as a rank alone cannot gather again; in backward it is gathered at once, when the gradient
of the block's output comes, and reduced when that of its input has come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from zk.core.store import UnitStore
from zk.parallel.comm import CHOICE, Comm


class Experts:
    """Experts by their chooser; none in one process.

    Args:
        comm: the ranks.
        gather: called with stores, the same ones on all ranks.
    """

    def __init__(self, comm: Comm, gather: Callable[[Sequence[UnitStore]], None]) -> None:
        self.comm, self.gather = comm, gather
        self.of: dict[nn.Module, list[UnitStore]] = {}

    def find(self, stores: Iterable[UnitStore]) -> None:
        """Take the experts among ``stores``, in this order on all ranks."""
        self.of = {}
        for store in stores:
            if store.unit.is_expert:
                assert store.unit.chooser is not None
                self.of.setdefault(store.unit.chooser, []).append(store)

    def chooser_in(self, entered: Sequence[nn.Module]) -> nn.Module | None:
        """The innermost chooser among modules whose forward is in progress."""
        return next((module for module in reversed(entered) if module in self.of), None)

    def choose(self, chooser: nn.Module, wanted: UnitStore | None, has_graph: bool | None = None) -> bool:
        """Gather the experts that any rank wants now, this one ``wanted``. False if none does. On all ranks.

        Args:
            has_graph: True or False if the chooser's forward has ended, and so had its output.

        Raises:
            RuntimeError: on all ranks, when all have ended, and the outputs of some have a graph and of others none.
        """
        experts = self.of[chooser]
        wants = [store is wanted for store in experts]
        *ranks, with_graph, without = self.comm.ranks_with([*wants, has_graph is True, has_graph is False], CHOICE, experts[0].index)
        chosen = [store for store, number in zip(experts, ranks, strict=True) if number]
        self.gather(chosen)
        if not chosen and with_graph and without:
            raise RuntimeError(
                f"the output of the block around {experts[0].unit.name!r} is part of a graph on some ranks and of none on others, and backward would "
                "gather its experts on some ranks only; let the block's input require gradients on all of them: train what comes before it, or call "
                "enable_input_require_grads() of a transformers model"
            )
        return bool(chosen)

    def choose_no_more(self, chooser: nn.Module, has_graph: bool | None = None) -> None:
        """Gather what other ranks want, until none wants anything; ``has_graph`` as for ``choose``. On all ranks."""
        while self.choose(chooser, None, has_graph):
            pass


def passed_through(given: Any, output: Any) -> Any:
    """The ``output`` of a block with views in place of tensors that it was ``given``, so that its backward begins at a place of its own."""
    inputs = {id(leaf) for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor)}
    if not any(id(leaf) in inputs for leaf in tree_leaves(output)):
        return output
    return tree_map(lambda leaf: leaf.view_as(leaf) if id(leaf) in inputs else leaf, output)
