"""Tensors without memory that cannot be made are refused, and nothing is changed."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import zk
from tests.models import DEVICE, GPT
from zk.addons.promised import promise


class Ones:
    """Promises ones, and counts what it makes."""

    def __init__(self) -> None:
        self.device, self.made, self.are_written = DEVICE, 0, False

    def make(self, tensor: Tensor) -> Tensor:
        self.made += 1
        return torch.ones(tensor.shape, dtype=tensor.dtype)

    def saw(self, tensor: Tensor) -> bool:
        return not self.are_written


def promised() -> tuple[nn.Module, Ones]:
    with torch.device("meta"), mock.patch("tests.models.DEVICE", torch.device("meta")):
        model = GPT()
    ones = Ones()
    for tensor in (*model.parameters(), *model.buffers()):
        promise(tensor, ones)
    return model, ones


def test_what_nobody_promises_or_was_changed_is_refused_and_stays() -> None:
    model, ones = promised()
    ones.are_written = True
    with pytest.raises(RuntimeError, match=r"'tokens.weight' was written or converted after deferred_init"):
        zk.ZeroOptimizer(model, torch.optim.AdamW(model.parameters()))
    ones.are_written = False
    norm: Any = model.norm
    norm.weight = nn.Parameter(torch.empty(24, device="meta"))
    with pytest.raises(ValueError, match=r"'norm.weight' is on the meta device"):
        zk.ZeroOptimizer(model, torch.optim.AdamW(model.parameters()))
    assert not ones.made and all(param.is_meta for param in model.parameters())
    norm.weight = nn.Parameter(next(iter(model.parameters())).detach().view(-1)[:24])
    with pytest.raises(ValueError, match="share memory"):
        zk.ZeroOptimizer(model, torch.optim.AdamW(model.parameters()))
