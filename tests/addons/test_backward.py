"""Updates that begin in backward: whatever happens until step(), the bits are those of updates that begin there."""

from __future__ import annotations

import contextlib
import itertools
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zk
from tests import softgpu
from tests.core.test_ranks import train
from tests.models import DEVICE, GPT, batch, loss_of
from tests.parity import PLACE, Case, Stepwise, halved, place, run_case, trained_at_stage_2, unlike
from tests.world import call, run_world
from zk import store
from zk.addons import backward as module
from zk.addons.backward import Backward
from zk.precision import DynamicLossScale
from zk.store import UnitStore

STEPS = 6
COUNT = {"taken": 0, "waits": 1}


def backward(model: GPT, optimizer: zk.ZeroOptimizer, step: int, factor: float = 0.01, by: float = 0.0) -> None:
    """Of ``factor`` times the loss, plus ``by`` times the sum of the last parameters that backward reaches. What has begun is done then."""
    loss = loss_of(model, batch(step)) * factor
    if by:
        with zk.gather(model.tokens.weight) if optimizer.config.stage == 3 else contextlib.nullcontext():
            loss = loss + by * model.tokens.weight.float().sum()
    optimizer.backward(loss)
    for one in optimizer._seams.addons if COUNT["waits"] else ():
        for *_, done in one.attempts.values() if isinstance(one, Backward) else ():
            done.exception()


def made(overlap_step: Any, **options: Any) -> tuple[GPT, zk.ZeroOptimizer]:
    return halved(overlap_step=overlap_step, **options)


def differing(program: Stepwise, **options: Any) -> tuple[list[int], int]:
    """What differs from updates in step(), by number, and how many units' shadows were taken."""
    trained_at_stage_2(program, STEPS, frozenset((name, value) for name, value in options.items() if name not in PLACE))  # takes none
    before = COUNT["taken"]
    return unlike(program, STEPS, {"overlap_step": "backward"}, **options), COUNT["taken"] - before


@pytest.fixture(autouse=True)
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Units of several chunks; shadows that are taken are counted."""
    take = Backward.take

    def counted(self: Backward, store: UnitStore, number: int, *given: Any) -> None:
        COUNT["taken"] += number == 0
        take(self, store, number, *given)

    monkeypatch.setattr(Backward, "take", counted)
    monkeypatch.setattr(store, "CHUNK_NUMEL", 2048)
    yield
    COUNT["waits"] = 1
    assert not softgpu.installed() or softgpu.found() == []


# ---- what gradients may be ---------------------------------------------------------------------------------------------------------------


def early(model: GPT, optimizer: zk.ZeroOptimizer, step: int) -> None:
    """Not clipped but in one step."""
    backward(model, optimizer, step, 100.0 if step == 3 else 0.01)


def infinite(model: GPT, optimizer: zk.ZeroOptimizer, step: int) -> None:
    """In one step the last gradient is not finite: all others have been updated in their shadows."""
    backward(model, optimizer, step, 0.01, float("inf") if step == 3 else 0.0)


def late(model: GPT, optimizer: zk.ZeroOptimizer, step: int) -> None:
    """In one step the last gradient is too large."""
    backward(model, optimizer, step, 0.01, 10.0 if step == 3 else 0.0)


def always(model: GPT, optimizer: zk.ZeroOptimizer, step: int) -> None:
    backward(model, optimizer, step, 100.0)


UNITS, PLACES = 3, ("0 host", "1 host", "2 host", "3 host", "2 nvme", "3 nvme")
# steps of six: nothing begins in the first one, and after one that was clipped, or (for two steps) skipped
TAKEN = {early: 3, infinite: 2, late: 3, always: 0}


ON_DEVICE = {(early, "1 host"), (infinite, "2 nvme"), (late, "3 host"), (late, "2 host"), (infinite, "3 nvme"), (early, "0 host")}


@pytest.mark.parametrize(
    ("program", "name"),
    [pytest.param(*both, marks=[pytest.mark.device] * (both in ON_DEVICE)) for both in itertools.product(TAKEN, PLACES)],
    ids=lambda v: v if isinstance(v, str) else v.__name__,
)
def test_clipped_or_not_bits_are_those_of_updates_in_step(program: Stepwise, name: str, tmp_path: Path) -> None:
    found, num_taken = differing(program, **place(name, tmp_path))
    assert found == []
    if name[0] == "1":  # where updates begin in step(), what has not begun with the norm is not taken
        assert num_taken <= TAKEN[program] * UNITS
    else:
        assert num_taken == TAKEN[program] * UNITS


@pytest.mark.parametrize(
    "options",
    (
        {"dtype": "fp32"},
        {"dtype": "fp32", "stage": 3, "units": (nn.Linear,)},
        {"dtype": "fp16", "loss_scale": DynamicLossScale(init=2.0**17, hysteresis=1, window=3)},
        {"kind": torch.optim.SGD},
        {"kind": torch.optim.NAdam},
        {"kind": torch.optim.ASGD, "stage": 3},
        {"state_dtype": "bf16"},
        {"state_dtype": "8bit"},
        {"clip_grad_norm": None, "model": "frozen"},
        {"model": "tied", "stage": 0},
        {"model": "unused", "stage": 3},
        {"model": "checkpointed", "stage": 3},
        {"optimizer_tier": "device"},
    ),
    ids=str,
)
def test_with_every_kind_of_state(options: dict[str, Any]) -> None:
    if options.get("optimizer_tier") == "device" and DEVICE.type == "cuda":
        pytest.skip("refused")
    found, num_taken = differing(early, **options)
    assert found == [] and num_taken > 0


# ---- what users may do between backward and step() ---------------------------------------------------------------------------------------


def change_rate(model: GPT, optimizer: zk.ZeroOptimizer, step: int) -> None:
    backward(model, optimizer, step)
    optimizer.param_groups[step % 2]["lr"] = 1e-2 / (1 + step)


def read_gradients(model: GPT, optimizer: zk.ZeroOptimizer, step: int) -> None:
    backward(model, optimizer, step)
    assert all(param.grad is not None and param.grad.float().isfinite().all() for param in model.parameters())


def scale_gradients(model: GPT, optimizer: zk.ZeroOptimizer, step: int) -> None:
    backward(model, optimizer, step)
    if step == 3:
        model.head.weight.grad.mul_(0.5)  # type: ignore[union-attr]


def write_gradients(model: GPT, optimizer: zk.ZeroOptimizer, step: int) -> None:
    """Values in another order, whose sum of squares is the same."""
    backward(model, optimizer, step)
    with zk.gather(model.blocks[0].up.weight, kind="grad", write=True) as grads:  # type: ignore[union-attr]
        grads[0].copy_(grads[0].flip(0))


def assign_gradients(model: GPT, optimizer: zk.ZeroOptimizer, step: int) -> None:
    backward(model, optimizer, step)
    model.head.weight.grad = torch.full(model.head.weight.shape, 1e-3, dtype=torch.bfloat16, device=DEVICE)
    model.norm.bias.grad = None


def add_gradients(model: GPT, optimizer: zk.ZeroOptimizer, step: int) -> None:
    for micro in range(1 + step // 2):
        backward(model, optimizer, 10 * step + micro)


def begin_anew(model: GPT, optimizer: zk.ZeroOptimizer, step: int) -> None:
    backward(model, optimizer, step)
    optimizer.zero_grad()
    backward(model, optimizer, step + 100)


def write_parameters(model: GPT, optimizer: zk.ZeroOptimizer, step: int) -> None:
    backward(model, optimizer, step)
    with torch.no_grad(), zk.gather(model.head.weight, write=True):
        model.head.weight.clamp_(-0.05, 0.05)


def change_states(model: GPT, optimizer: zk.ZeroOptimizer, step: int) -> None:
    backward(model, optimizer, step)
    if step == 3:
        with zk.gather(model.head.weight, kind="exp_avg", write=True) as averages:
            averages[0].zero_()


def load_states(model: GPT, optimizer: zk.ZeroOptimizer, step: int) -> None:
    backward(model, optimizer, step)
    if step == 3:
        optimizer.load_state_dict(optimizer.state_dict())
        backward(model, optimizer, step)


def look(model: GPT, optimizer: zk.ZeroOptimizer, step: int) -> None:
    """Between backward and step() states and parameters are what they were."""
    with zk.gather(model.parameters()):
        before = [param.detach().clone() for param in model.parameters()]
    states = optimizer.state_dict()["state"]
    backward(model, optimizer, step)
    with torch.no_grad():
        loss_of(model, batch(step))
    with zk.gather(model.parameters()):
        assert all(map(torch.equal, before, model.parameters()))
    for key, state in optimizer.state_dict()["state"].items():
        assert all(torch.equal(value, states[key][name]) for name, value in state.items())


def clip_by_torch(model: GPT, optimizer: zk.ZeroOptimizer, step: int) -> None:
    backward(model, optimizer, step)
    nn.utils.clip_grad_norm_(model.parameters(), 0.001 if step == 3 else 10.0)


def clip_first(model: GPT, optimizer: zk.ZeroOptimizer, step: int) -> None:
    backward(model, optimizer, step)
    optimizer.clip_grad_norm_(0.001 if step == 3 else 10.0)


def never_step(model: GPT, optimizer: zk.ZeroOptimizer, step: int) -> None:
    """What has begun for gradients that are dropped leaves nothing."""
    backward(model, optimizer, step)
    for param in model.parameters():
        param.grad = None
    backward(model, optimizer, step + 50)


FOLDER: list[Path] = []


def save(model: GPT, optimizer: zk.ZeroOptimizer, step: int) -> None:
    """A checkpoint between backward and step() has the states before, also one that is written behind; and it is loaded there."""
    folder = FOLDER[0] / str(optimizer.config.options.get("overlap_step"))
    backward(model, optimizer, step)
    if step in (1, 2):
        optimizer.save_checkpoint(folder, async_save=step == 2)
    if step == 4:
        optimizer.load_checkpoint(folder)
        backward(model, optimizer, step)


PROGRAMS = {  # shadows that are taken
    change_rate: 0, read_gradients: 15, scale_gradients: 11, write_gradients: 10, assign_gradients: 10, add_gradients: 9, begin_anew: 15,
    write_parameters: 10, change_states: 14, load_states: 9, look: 15, clip_by_torch: 9, clip_first: 9, never_step: 15, save: 9,
}


BETWEEN = [(program, name) for number, program in enumerate(PROGRAMS) for name in (("2 host", "3 host", "2 nvme")[number % 3], "3 nvme")]


@pytest.mark.parametrize(("program", "name"), BETWEEN, ids=lambda v: v if isinstance(v, str) else v.__name__)
def test_what_happens_between_backward_and_step_counts(program: Stepwise, name: str, tmp_path: Path) -> None:
    FOLDER[:] = [tmp_path / "saved"]
    (tmp_path / "drive").mkdir()
    found, num_taken = differing(program, **place(name, tmp_path / "drive"))
    is_late = program is assign_gradients  # step() reduces those, and may begin before it cancels
    assert found == [] and PROGRAMS[program] <= num_taken <= PROGRAMS[program] + 5 * is_late


def decay(model: GPT, optimizer: zk.ZeroOptimizer, step: int) -> None:
    for group in optimizer.param_groups:
        group["lr"] = 1e-2 / (1 + step)
        group.update({"momentum_decay": 0.1 * (1 + step)} if "momentum_decay" in group else {})  # NAdam's product depends on those before
    early(model, optimizer, step)


@pytest.mark.parametrize("program", [change_rate, decay])
@pytest.mark.parametrize("kind", [torch.optim.ASGD, torch.optim.NAdam, torch.optim.AdamW])
def test_numbers_that_follow_from_rates_are_those_of_updates_in_step(program: Stepwise, kind: Any) -> None:
    assert differing(program, kind=kind, dtype="fp32")[0] == []


class Clamped(torch.optim.Optimizer):
    """Its step() changes gradients: once more changes nothing, so that a trial does not see it, but a clipped one is another."""

    def __init__(self, params: Any, lr: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in [param for param in group["params"] if param.grad is not None]:
                param.sub_(param.grad.clamp_(-1e-3, 1e-3), alpha=group["lr"])


@pytest.mark.parametrize("program", [early, clip_first])
def test_a_step_that_changes_gradients_changes_copies(program: Stepwise) -> None:
    assert differing(program, kind=Clamped, elementwise=True, dtype="fp32")[0] == []


@pytest.mark.device
@pytest.mark.parametrize("program", [scale_gradients, add_gradients, begin_anew, write_parameters, change_states, load_states, never_step, infinite])
@pytest.mark.parametrize("name", ["2 host", "3 nvme"])
def test_whatever_a_thread_does_meanwhile_changes_no_bit(program: Stepwise, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Users do not wait for what has begun: it reads what they change, and is not taken."""
    apply = UnitStore.apply

    def late(self: UnitStore, *given: Any) -> None:
        time.sleep(0.002)
        apply(self, *given)

    monkeypatch.setattr(UnitStore, "apply", late)
    COUNT["waits"] = 0
    assert differing(program, **place(name, tmp_path))[0] == []


# ---- ranks -------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("torch_engine")
def test_ranks_train_as_plain_torch() -> None:
    how = {"overlap_step": "backward"}
    cases = [
        *(Case(stage=stage, dtype="bf16", clip=50.0, steps=4, overlap_step="backward") for stage in range(4)),  # type: ignore[arg-type]
        Case(stage=3, dtype="fp16", clip=None, tier="nvme", steps=4, overlap_step="backward"),  # type: ignore[arg-type]
        Case(stage=2, dtype="bf16", clip=None, accumulation=3, steps=3, overlap_step="backward"),  # type: ignore[arg-type]
        Case(stage=3, clip=None, accumulation=2, no_sync=True, steps=3, overlap_step="backward"),  # type: ignore[arg-type]
    ]
    differ = [(stage, (torch.float32, torch.bfloat16)[stage % 2], how) for stage in range(4)]
    jobs: list[Any] = [*((run_case, case) for case in cases), *((train, case) for case in differ)]
    table = run_world(2, call, jobs, timeout=100)
    assert {str(case): rows for (_, case), rows in zip(jobs, table, strict=True) if any(rows)} == {}


# ---- memory, refusals, errors ------------------------------------------------------------------------------------------------------------


def shadows_of(optimizer: zk.ZeroOptimizer) -> dict[str, int]:
    """Bytes of each unit's shadow, by name."""
    (found,) = [one for one in optimizer._seams.addons if isinstance(one, Backward)]
    pairs = found.shadows.items()
    return {store.unit.name: sum(field.nbytes for fields in shadows for field in fields.values()) for store, shadows in pairs}


def test_shadows_take_what_the_budget_leaves_and_the_others_are_updated_in_step(monkeypatch: pytest.MonkeyPatch) -> None:
    _, optimizer = made("backward")
    sizes = shadows_of(optimizer)
    optimizer.close()
    assert len(sizes) == UNITS and all(sizes.values()) and not any(shadows_of(optimizer).values())
    room = sum(sizes.values()) - 1
    monkeypatch.setattr(module, "host_memory", lambda: (0, 2 * room))
    _, optimizer = made("backward")
    assert [name for name, nbytes in shadows_of(optimizer).items() if nbytes] == [*sizes][:2]
    optimizer.close()
    assert differing(read_gradients) == ([], 10)
    least = sum(12 * store.unit.shard_numel for store in made("backward")[1]._trained)  # gradient, master, moments
    assert differing(read_gradients, host_budget=least) == ([], 0)
    assert differing(read_gradients, host_budget="1GiB") == ([], 15)


@pytest.mark.parametrize("value", ["auto", "forward", 1, 0.5])
def test_other_values_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="overlap_step must be True, 'backward' or False; got"):
        made(value)


def test_without_its_file_it_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zk.addons.backward", None)
    with pytest.raises(TypeError, match=r"overlap_step='backward'.*is not there"):
        made("backward")
    _, optimizer = made(True, stage=3)
    optimizer.close()


def test_where_backward_and_updates_take_turns_it_is_refused() -> None:
    with pytest.raises(ValueError, match="on GPUs needs optimizer_tier='host' or 'nvme'; got 'device'"):
        Backward().check(nn.Linear(2, 2, device="meta"), [], zk.ZeroConfig())


@pytest.mark.parametrize("name", ["2 host", "3 nvme"])
def test_an_error_in_the_thread_leaves_the_update_to_step(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(Backward, "make", fails)
    assert differing(read_gradients, **place(name, tmp_path)) == ([], 0)


@pytest.mark.parametrize("name", ["2 host", "3 nvme"])
def test_an_error_while_shadows_are_taken_is_a_step_that_failed_half_way(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = made("backward", **place(name, tmp_path))
    take, calls = Backward.take, itertools.count()

    def fails(*given: Any) -> None:
        if next(calls) == 2:
            raise OSError("full")
        take(*given)

    for step in range(2):
        saved = optimizer.state_dict()
        backward(model, optimizer, step)
        if step:
            monkeypatch.setattr(Backward, "take", fails)
            with pytest.raises(OSError, match="full"):
                optimizer.step()
            with pytest.raises(RuntimeError, match="failed half-way"):
                optimizer.state_dict()
        else:
            optimizer.step()
            optimizer.zero_grad()
    optimizer.load_state_dict(saved)
    assert not any({"update", "fetch"} & vars(store).keys() for store in optimizer._trained)
    for key, state in optimizer.state_dict()["state"].items():
        assert all(torch.equal(value, saved["state"][key][kind]) for kind, value in state.items())
    backward(model, optimizer, 1)
    optimizer.step()
    optimizer.close()
