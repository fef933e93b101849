"""The seams as an add-on of a user's sees them."""

import os
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import zk
from tests.programs import run
from zk import addon


def double(optimizer: zk.ZeroOptimizer, value: int) -> int:
    """Twice the value, where the optimizer is whole."""
    return 2 * value if optimizer.config.stage == 1 else 0


def test_registered_options_and_methods_are_an_optimizers_own_and_are_missed_by_name() -> None:
    model = nn.Linear(2, 2)
    with mock.patch.dict(addon.METHODS), mock.patch.dict(addon.OPTIONS):
        zk.register_methods(doubled="tests.core.test_addon:double", gone="zk.nowhere:function")
        zk.register(listens="tests.core.test_addon:Listening")
        optimizer = zk.ZeroOptimizer(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=1, listens=[])
        assert optimizer.doubled(3) == 6 and "doubled" in dir(optimizer) and "Twice" in optimizer.doubled.__doc__
        with pytest.raises(AttributeError, match=r"'gone' is in zk\.nowhere, which is not there"):
            optimizer.gone()
    assert not hasattr(optimizer, "anything_else") and not hasattr(optimizer, "doubled")


class Listening(zk.Addon):
    def __init__(self, heard: list[Any]) -> None:
        self.heard = heard

    def changing(self, store: Any, number: int) -> None:
        self.heard.append((store.unit.name, number, float(store.unit.params[0].detach()[0, 0])))

    def synchronized(self) -> None:
        self.heard.append("synchronized")


class Updating(zk.Addon):
    def attach(self, optimizer: zk.ZeroOptimizer) -> None:
        self.optimizer = optimizer

    def updater(self) -> Any:
        return self.optimizer._update_units


def test_an_add_on_hears_of_a_chunk_before_it_changes_and_one_alone_updates() -> None:
    model, heard = nn.Linear(1, 1, bias=False), list[Any]()
    model.weight.data.fill_(1.0)
    addons: list[addon.Addon] = [Listening(heard), Updating()]
    optimizer = zk.ZeroOptimizer(model, torch.optim.SGD(model.parameters(), lr=0.5), stage=1, addons=addons)
    model(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    optimizer.synchronize()
    assert heard == [("model", 0, 1.0), "synchronized"] and model.weight.item() == 0.5
    optimizer.close()
    another = type("Another", (Updating,), {})()
    optimizer = zk.ZeroOptimizer(model, torch.optim.SGD(model.parameters(), lr=0.5), addons=[*addons, another])
    model(torch.ones(1, 1)).sum().backward()
    with pytest.raises(RuntimeError, match="Updating and Another each decide 'updater'"):
        optimizer.step()


WALK = """
import os, sys
from pathlib import Path
import pytest
import torch
from torch import nn
import zk, zk.addons
from tests.parity import run_case
from tests.test_parity import ALONE, OVERLAPPED
from zk import addon

CASES = ALONE[::7] + OVERLAPPED[:1]  # each stage and tier
OTHER = {"zk.addons.backward": [("overlap_step", "backward")]}  # values that have a file of their own

def without(module, cases):
    sys.modules[module] = None
    for name in [name for name, place in addon.ALWAYS.items() if place.startswith(module + ":")]:
        del addon.ALWAYS[name]
    model = nn.Linear(2, 2)
    weight, inner = model.weight.data_ptr(), torch.optim.AdamW(model.parameters())
    options = [(name, True) for name, place in addon.OPTIONS.items() if place.startswith(module + ":")]
    for name, value in options + OTHER.get(module, []):
        with pytest.raises(TypeError, match=f"{name}.* is in {module}, which is not there"):
            zk.ZeroOptimizer(model, inner, stage=3, **{name: value})
        assert model.weight.data_ptr() == weight
    for case in cases:
        if not any(getattr(case, name, None) for name, _ in options):
            assert run_case(case) == "", case
    optimizer = zk.ZeroOptimizer(model, inner, stage=3)
    for name in [name for name, place in addon.METHODS.items() if place.startswith(module + ":")]:
        with pytest.raises(AttributeError, match=f"{name!r} is in {module}, which is not there"):
            getattr(optimizer, name)()

for number, file in enumerate(sorted(Path(zk.addons.__file__).parent.glob("*.py"))):
    module = f"zk.addons.{file.stem}"
    if file.stem == "__init__":
        continue
    assert module not in sys.modules or module == "zk.addons.promised", module  # it is imported when it is used
    if (child := os.fork()) == 0:
        without(module, CASES[number % 7 :: 7])
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, module
    print(module)
"""


def test_without_any_one_of_the_files_the_core_trains_and_its_option_is_refused_by_name() -> None:
    """Each in a process where it cannot be imported, and its line of the registry, where it has no option, is gone. A seventh of the smoke runs."""
    done = run("-c", WALK, env={**os.environ, "ZK_CPU_ADAM": "torch"})
    assert done.returncode == 0 and "zk.addons.parked" in done.stdout, done.stdout + done.stderr
