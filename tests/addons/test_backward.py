"""Updates that begin in backward: whatever happens until step(), the bits are those of updates that begin there."""

import itertools
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import zk
from tests import softgpu
from tests.addons.common import BETWEEN, FOLDER, HOW, PROGRAMS, backward, same, told
from tests.addons.test_whole import KINDS
from tests.models import DEVICE, small_chunks
from tests.parity import halved, place, unlike
from zk.addons import backward as module
from zk.addons.backward import Backward
from zk.precision import DynamicLossScale
from zk.store import UnitStore

pytestmark = pytest.mark.usefixtures("torch_engine")
STEPS, UNITS = 6, 3
# shadows that are taken, of six steps: nothing begins in the first one, and after one that was clipped, or (for two steps) skipped
TAKEN = {"early": 3 * UNITS, "infinite": 2 * UNITS, "late": 3 * UNITS, "always": 0, "decay": 3 * UNITS}
TAKEN |= dict(zip(BETWEEN, (0, 15, 11, 10, 10, 9, 15, 10, 14, 9, 15, 9, 9, 15, 9), strict=True))
PLACES = {"early": ("0 host", "1 host", "3 nvme"), "infinite": ("3 nvme",), "late": ("1 host", "2 host", "3 host"), "always": ("2 nvme",)}
MEANWHILE = "scale gradients", "begin anew", "change states", "load states", "add gradients", "write parameters"
CASES: list[tuple[str, str, dict[str, Any]]] = [
    *((what, name, {}) for what, names in PLACES.items() for name in names),
    *((what, ("2 host", "3 host", "2 nvme", "3 nvme")[number % 4], {}) for number, what in enumerate(BETWEEN)),
    *((what, ("2 host", "3 nvme")[number // 2 % 2], {"waits": False}) for number, what in enumerate(MEANWHILE)),
    ("early", "3 host", {"dtype": "fp32", "units": (nn.Linear,)}),
    ("early", "2 host", {"dtype": "fp16", "loss_scale": DynamicLossScale(init=2.0**17, hysteresis=1, window=3)}),
    ("early", "2 host", {"kind": torch.optim.SGD}),
    ("early", "2 host", {"kind": KINDS["InPlace"], "elementwise": True, "dtype": "fp32"}),
    ("early", "2 host", {"state_dtype": "bf16"}),
    ("early", "2 host", {"state_dtype": "8bit"}),
    ("early", "2 host", {"clip_grad_norm": None, "model": "frozen"}),
    ("early", "3 host", {"model": "unused"}),
    ("early", "2 device", {}),
    ("decay", "2 host", {"kind": torch.optim.NAdam, "dtype": "fp32"}),  # whose numbers follow from rates
    ("change rate", "2 host", {"kind": torch.optim.ASGD, "dtype": "fp32"}),
]
ON_DEVICE: list[Any] = [("early", "1 host", {}), ("infinite", "3 nvme", {}), ("late", "2 host", {}), ("late", "3 host", {})]
ON_DEVICE += [case for case in CASES if "waits" in case[2] and case[0] in MEANWHILE[::2]]


def differing(what: str, waits: bool = True, **options: Any) -> tuple[list[int], int]:
    """What differs from updates in step(), by number, and how many units' shadows were taken. Units have several chunks."""
    taken, take = list[int](), Backward.take
    counted = mock.patch.object(Backward, "take", lambda *given: take(*given) or taken.append(given[2]))
    with counted, small_chunks(), mock.patch.dict(HOW, waits=waits):
        return unlike(PROGRAMS[what], STEPS, {"overlap_step": "backward"}, **options), taken.count(0)


@pytest.mark.parametrize(
    ("what", "name", "options"), [pytest.param(*case, marks=[pytest.mark.device] * (case in ON_DEVICE)) for case in CASES], ids=told
)
def test_bits_are_those_of_updates_in_step(what: str, name: str, options: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clipped or not; what users do between backward and step() counts, also while a thread updates; and shadows are taken where they are right."""
    if name == "2 device" and DEVICE.type == "cuda":
        pytest.skip("refused")
    FOLDER[:] = [tmp_path / "saved"]
    (tmp_path / "drive").mkdir()
    if "waits" in options:  # it reads what they change, and is not taken
        apply = UnitStore.apply
        monkeypatch.setattr(UnitStore, "apply", lambda *given: time.sleep(0.002) or apply(*given))
    found, num_taken = differing(what, **place(name, tmp_path / "drive"), **options)
    assert found == [] and (not softgpu.installed() or softgpu.found() == [])
    if options:
        assert "waits" in options or (num_taken > 0) == (what != "change rate")
    elif name[0] == "1":  # updates begin in step(), and are not taken where they have not begun with the norm
        assert num_taken <= TAKEN[what]
    else:  # step() reduces gradients that were assigned, and may begin before it cancels
        assert TAKEN[what] <= num_taken <= TAKEN[what] + 5 * (what == "assign gradients")


def test_shadows_take_what_the_budget_leaves_and_the_others_are_updated_in_step() -> None:
    _, optimizer = halved(overlap_step="backward")
    least = sum(12 * store.unit.shard_numel for store in optimizer._trained)  # gradient, master, moments
    optimizer.close()
    with mock.patch.object(module, "host_memory", lambda: (0, 2 * least - 2)):  # half of it has room for two of three
        assert differing("read gradients") == ([], 10)
    assert differing("read gradients", host_budget=least) == ([], 0)
    assert differing("read gradients", host_budget="1GiB") == ([], 15)
    with mock.patch.object(Backward, "make", side_effect=MemoryError):  # an error in the thread
        assert differing("read gradients") == ([], 0)


def test_what_cannot_be_right_is_refused() -> None:
    for value in ("auto", 1):
        with pytest.raises(ValueError, match="overlap_step must be True, 'backward' or False; got"):
            halved(overlap_step=value)
    with pytest.raises(ValueError, match="on GPUs needs optimizer_tier='host' or 'nvme'; got 'device'"):
        Backward().check(nn.Linear(2, 2, device="meta"), [], zk.ZeroConfig())


@small_chunks()
def test_an_error_while_shadows_are_taken_is_a_step_that_failed_half_way(tmp_path: Path) -> None:
    model, optimizer = halved(overlap_step="backward", **place("3 nvme", tmp_path))
    backward(model, optimizer, 0)
    optimizer.step()
    saved, take, calls = optimizer.state_dict(), Backward.take, itertools.count()
    optimizer.zero_grad()
    backward(model, optimizer, 1)

    def fails(*given: Any) -> None:
        if next(calls) == 2:
            raise OSError("full")
        take(*given)

    with mock.patch.object(Backward, "take", fails), pytest.raises(OSError, match="full"):
        optimizer.step()
    with pytest.raises(RuntimeError, match="failed half-way"):
        optimizer.state_dict()
    optimizer.load_state_dict(saved)
    for key, state in optimizer.state_dict()["state"].items():
        assert same([*state.values()], [*saved["state"][key].values()])
    backward(model, optimizer, 1)
    optimizer.step()
    optimizer.close()
