"""Optimizers by name: torch's own over parameters that have sizes alone, for the rules by which a plan counts their state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from zk.core.checks import check_state_dtype
from zk.offload.rules import Rule, rule_for

# names of an optimizer on the command line, and the optimizer of torch's that keeps the same; of Lion one average, as of SGD with momentum
_MADE: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": lambda params: torch.optim.SGD(params, momentum=0.9),
    "lion": lambda params: torch.optim.SGD(params, momentum=0.9),
    "muon": torch.optim.Muon,
    "adafactor": torch.optim.Adafactor,
    **{kind.__name__.lower(): kind for kind in (torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop, torch.optim.Adagrad)},
}
# a parameter with at least so many rows as wide as the model is taken for a matrix, where its shape is not known
_ROWS = 32


def check_optimizer(name: str, state_dtype: str | torch.dtype, update_on: str | float) -> None:
    """Raise ValueError for a name that is not known, or for options that it cannot have."""
    if name not in _MADE:
        raise ValueError(f"--optimizer must be one of {', '.join(_MADE)}; got {name!r}")
    rules, groups = rules_of(name, [nn.Parameter(torch.empty(64, 64, device="meta"))], [])
    if state_dtype != torch.float32:
        check_state_dtype(state_dtype, rules, groups, {})
    if update_on not in ("auto", "host", 0) and not rules[0].has_kernel(groups[0]):
        raise ValueError(f"--update-on {update_on} needs Adam or AdamW, which the GPU has a kernel for; --optimizer is {name}: take host")


def has_kernel(name: str) -> bool:
    """Tell if a GPU has a kernel for the update of state in other memory."""
    return name in ("adamw", "adam")


def shape_of_numel(numel: int, width: int) -> tuple[int, ...]:
    """The shape of a parameter of a model so wide: a matrix with a side of that, as all in blocks and embeddings are, or a vector."""
    return (numel // width, width) if width and numel % width == 0 and numel >= _ROWS * width else (numel,)


def rules_of(name: str, matrices: Sequence[nn.Parameter], others: Sequence[nn.Parameter]) -> tuple[list[Rule], list[dict[str, Any]]]:
    """Groups of parameters, and the rule of each. ``matrices``: those inside of blocks, which alone Muon updates, beside AdamW."""
    by = [(name, matrices), ("adamw", others)] if name == "muon" else [(name, [*matrices, *others])]
    made = [_MADE[one](params) for one, params in by if params]
    return [rule_for(optimizer) for optimizer in made], [optimizer.param_groups[0] for optimizer in made]
