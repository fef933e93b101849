"""The seams as an add-on of a user's sees them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import zk
from zk import addon


def double(optimizer: zk.ZeroOptimizer, value: int) -> int:
    """Twice the value, where the optimizer is whole."""
    return 2 * value if optimizer.config.stage == 1 else 0


def test_quick_methods_of_other_rooms_are_found_by_name_and_missed_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    methods: dict[str, Any] = {"doubled": "tests.core.test_addon:double", "gone": "zk.nowhere:function"}
    monkeypatch.setattr(addon, "METHODS", {**addon.METHODS, **methods})
    model = nn.Linear(2, 2)
    optimizer = zk.ZeroOptimizer(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=1)
    assert optimizer.doubled(3) == 6 and "doubled" in dir(optimizer) and "Twice" in optimizer.doubled.__doc__
    assert not hasattr(optimizer, "anything_else")
    with pytest.raises(AttributeError, match=r"'gone' is in zk\.nowhere, which is not there"):
        optimizer.gone()


class Listening(zk.Addon):
    def __init__(self) -> None:
        self.heard: list[Any] = []

    def changing(self, store: Any, number: int) -> None:
        self.heard.append((store.unit.name, number, float(store.unit.params[0].detach()[0, 0])))

    def synchronized(self) -> None:
        self.heard.append("synchronized")


def test_an_add_on_hears_of_a_chunk_before_it_changes_and_of_who_waits_and_may_come_later() -> None:
    model = nn.Linear(1, 1, bias=False)
    model.weight.data.fill_(1.0)
    optimizer = zk.ZeroOptimizer(model, torch.optim.SGD(model.parameters(), lr=0.5), stage=1)
    listening = Listening()
    optimizer._seams.add(listening)
    model(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    optimizer.synchronize()
    assert listening.heard == [("model", 0, 1.0), "synchronized"] and model.weight.item() == 0.5
