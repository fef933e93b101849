"""Ctrl-C at each line that gathers, releases or moves parameters: training that goes on after it is right."""

from __future__ import annotations

import copy
import linecache
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import zk
from zk.core.assemble import Assembly
from zk.core.store import State, UnitStore
from zk.offload.nvme import File
from zk.offload.spill import Buffers, FileParams
from zk.parallel.released import stand_in

OF_STORES = (UnitStore.prefetch, UnitStore._fill, UnitStore.gather, UnitStore.release, UnitStore._free, stand_in)
OF_FILES = (
    *(Buffers.open, Buffers.evict, Buffers._begin, Buffers._take, Buffers._give_up, Buffers._rest),
    *(FileParams.whole, FileParams.release, File._start),
)


def lines_of(function: Any) -> Iterator[tuple[types.CodeType, int]]:
    """The lines of a function where Python looks for signals: not those of ``try`` and ``with``, which are come to once more as they are left."""
    code = function.__code__
    for line in sorted({line for *_, line in code.co_lines() if line is not None and line > code.co_firstlineno}):
        if not linecache.getline(code.co_filename, line).lstrip().startswith(("try:", "with ", "@", "def ")):
            yield code, line


class CtrlC:
    """Interrupts the calling thread as it comes to a line for the first time."""

    def __init__(self, code: types.CodeType, line: int) -> None:
        self.code, self.line, self.came = code, line, False

    def __call__(self, frame: types.FrameType, event: str, _: object) -> Any:
        if frame.f_code is not self.code:
            return None
        if event == "line" and frame.f_lineno == self.line:
            self.came = True
            sys.settrace(None)
            raise KeyboardInterrupt
        return self


class Interrupted(nn.Module):
    """Ctrl-C, once."""

    came = False

    def forward(self, value: Tensor) -> Tensor:
        if self.came:
            return value
        self.came = True
        raise KeyboardInterrupt


def test_a_part_that_is_called_by_itself_is_still_cast() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Interrupted())
    values = torch.ones(1, 4)
    with zk.ZeroOptimizer(model, torch.optim.AdamW(model.parameters()), stage=2, dtype="bf16"):
        with pytest.raises(KeyboardInterrupt):
            model(values)
        model(values)
        assert model[0](values).dtype == torch.bfloat16


def test_training_that_goes_on_is_that_of_plain_torch(tmp_path: Path, one_thread: None, torch_engine: None) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(2)))
    plain = copy.deepcopy(model)
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    optimizer = zk.ZeroOptimizer(
        model, torch.optim.AdamW(model.parameters(), lr=1e-3), stage=3, param_tier="nvme", optimizer_tier="nvme", nvme_path=tmp_path
    )
    came, outer = 0, sys.gettrace()

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
        forward_and_backward(model, seed)
        optimizer.step()
        optimizer.zero_grad()

    def forward_and_backward(model: nn.Module, seed: int) -> None:
        model(torch.randn(4, 16, generator=torch.Generator().manual_seed(seed))).square().mean().backward()

    with optimizer:
        step(model, optimizer, 0)
        step(plain, reference, 0)
        for seed, (code, line) in enumerate((place for function in OF_STORES + OF_FILES for place in lines_of(function)), 1):
            trace = CtrlC(code, line)
            sys.settrace(trace)
            try:
                forward_and_backward(model, seed)
            except KeyboardInterrupt:
                came += 1
            finally:
                sys.settrace(outer)
            optimizer.zero_grad()
            if not trace.came:
                continue
            step(model, optimizer, seed)
            step(plain, reference, seed)
            hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)  # type: ignore[attr-defined]
            assert hooks is None and not any(store.depth or store.state is not State.RELEASED for store in optimizer.held), code.co_qualname
            for (name, value), other in zip(model.state_dict().items(), plain.state_dict().values(), strict=True):
                assert torch.equal(value, other), f"{name} after Ctrl-C at {code.co_qualname}, line {line}"
    assert came > 30


def test_training_goes_on_after_ctrl_c_within_inference_mode(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    drive = {"param_tier": "nvme", "optimizer_tier": "nvme", "nvme_path": tmp_path}
    with zk.ZeroOptimizer(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=3, units=["0", "1"], **drive) as optimizer:
        interrupts = mock.patch.object(UnitStore, "note_versions", side_effect=KeyboardInterrupt)
        with torch.inference_mode(), pytest.raises(KeyboardInterrupt), interrupts:
            model(torch.ones(2, 4))
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()


def test_another_optimizer_can_be_made_after_ctrl_c_in_the_middle_of_one() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    plain = copy.deepcopy(model)
    units, hold = [], Assembly.hold

    def interrupted(self: Assembly, *given: Any) -> UnitStore:
        if len(units) == 2:
            raise KeyboardInterrupt
        units.append(given)
        return hold(self, *given)

    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (plain, model)]
    with pytest.raises(KeyboardInterrupt) as caught, mock.patch.object(Assembly, "hold", interrupted):  # which keeps what was made
        zk.ZeroOptimizer(model, optimizers[1], stage=2)
    with zk.ZeroOptimizer(model, optimizers[1], stage=2) as again:
        for one, by in ((plain, optimizers[0]), (model, again)):
            for _ in range(2):
                one(torch.ones(2, 4)).sum().backward()
                by.step()
                by.zero_grad()
    assert all(torch.equal(value, other) for value, other in zip(plain.parameters(), model.parameters(), strict=True)), caught
