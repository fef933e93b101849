"""The seams as an add-on of a user's sees them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
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


REFUSED = """
import torch
from torch import nn
import zk
from zk import addon

for name in addon.OPTIONS:
    model = nn.Linear(2, 2)
    weight = model.weight.data_ptr()
    try:
        zk.ZeroOptimizer(model, torch.optim.AdamW(model.parameters()), stage=3, **{name: True})
    except TypeError as error:
        print(error)
    assert model.weight.data_ptr() == weight
"""


def test_without_its_file_an_option_is_refused_by_name_and_all_else_works(tmp_path: Path) -> None:
    """In a copy of the tree, without the files of options."""
    top = Path(__file__).resolve().parents[2]
    for folder in ("zk", "tests"):
        shutil.copytree(top / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(top / "setup.cfg", tmp_path)
    modules = {name: place.partition(":")[0] for name, place in addon.OPTIONS.items()}
    for module in set(modules.values()):
        (tmp_path / (module.replace(".", "/") + ".py")).unlink()

    def says(*arguments: str) -> str:
        environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
        done = subprocess.run([sys.executable, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=300)
        return f"{done.returncode} {done.stdout} {done.stderr}"

    said = says("-c", REFUSED)
    assert said.startswith("0 ") and all(f"'{name}' is in {module}, which is not there" in said for name, module in modules.items()), said
    said = says("-m", "pytest", "-p", "no:benchmark", "-q", "-x", "tests/core/test_quick.py", "-k", "tied or checkpointed")
    assert said.startswith("0 "), said
