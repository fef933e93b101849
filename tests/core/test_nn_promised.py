"""Tensors without memory are made unit by unit as a ZeroOptimizer takes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import zk
from tests.models import DEVICE, GPT, batch, loss_of
from zk.promised import promise


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


@pytest.mark.parametrize("options", [{"stage": 0}, {"stage": 2, "dtype": "bf16"}, {"stage": 3, "param_tier": "nvme", "optimizer_tier": "nvme"}])
def test_promised_parameters_are_made_in_place(options: dict[str, Any], tmp_path: Path) -> None:
    model, ones = promised()
    objects = {name: id(param) for name, param in model.named_parameters()}
    if "param_tier" in options:
        options = options | {"nvme_path": tmp_path}
    optimizer = zk.ZeroOptimizer(model, torch.optim.AdamW(model.parameters()), **options)
    assert ones.made == len([*model.parameters(), *model.buffers()])
    assert objects == {name: id(param) for name, param in model.named_parameters()}
    with zk.gather(model.parameters()):
        for param in model.parameters():
            assert (param == 1).all() and isinstance(param, nn.Parameter) and param.requires_grad
    loss_of(model, batch(0)).backward()
    optimizer.step()
    optimizer.close()


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
