"""``delay_update=``: the numbers of plain torch with an optimizer whose step() applies the gradients of the step before."""

from pathlib import Path
from typing import Any

import pytest
import torch

import zk
from tests.addons.common import begun, faults_of_ranks, same
from tests.models import batch, loss_of, train
from tests.parity import Case, halved, make_optimizer, run_case_with, states_of
from zk.addons.backward import Backward

pytestmark = pytest.mark.usefixtures("torch_engine")
STEPS = 5


class Late:
    """An optimizer whose step() after the first ``delay`` ones keeps its gradients for the next one. The last one applies all."""

    def __init__(self, inner: torch.optim.Optimizer, delay: int) -> None:
        self.inner, self.delay, self.count, self.state_dict = inner, delay, 0, inner.state_dict
        self.params, self.pending = [param for group in inner.param_groups for param in group["params"]], list[Any]()

    def step(self) -> None:
        self.count += 1
        self.pending.append([param.grad for param in self.params])
        while len(self.pending) > (self.delay < self.count < STEPS):
            for param, grad in zip(self.params, self.pending.pop(0), strict=True):
                param.grad = grad
            self.inner.step()


def run(case: Case) -> str:
    delay = int(case.optimizer.split()[1])  # after its name
    make = lambda name, params: make_optimizer(name.split()[0], params)  # noqa: E731
    return run_case_with(case, make, lambda *given: Late(make(*given), delay), delay_update=delay)


GRID = [
    Case(stage=0, dtype="bf16", optimizer="AdamW 2", steps=STEPS),
    Case(stage=1, optimizer="AdamW 2", steps=STEPS),
    Case(stage=3, dtype="bf16", optimizer="AdamW 1", tier="nvme", accumulation=2, steps=STEPS),
    Case(stage=3, dtype="fp16", optimizer="SGD 0", tier="device", no_sync=True, accumulation=2, steps=STEPS),
    Case(stage=2, dtype="bf16", optimizer="NAdam 0", model="sometimes", clip=None, steps=STEPS),
]


@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.device] * (n in (0, 2))) for n, case in enumerate(GRID)], ids=str)
def test_it_trains_what_a_late_optimizer_of_plain_torch_trains(case: Case) -> None:
    assert run(case) == ""


def test_over_ranks_too() -> None:
    assert faults_of_ranks(2, run, GRID[1:]) == {}


SETTLES: dict[str, Any] = {  # what makes the update that is pending count
    "synchronize": lambda optimizer, folder: optimizer.synchronize(),
    "load_state_dict": lambda optimizer, folder: optimizer.load_state_dict(optimizer.state_dict()),
    "save_checkpoint": lambda optimizer, folder: optimizer.save_checkpoint(folder / "saved", async_save=True),
    "load_checkpoint": lambda optimizer, folder: optimizer.load_checkpoint(optimizer.save_checkpoint(folder / "kept") or folder / "kept"),
    "parked": lambda optimizer, folder: [(one.__enter__(), one.__exit__(None, None, None)) for one in [optimizer.parked(folder)]],
}


@pytest.mark.parametrize("settle", SETTLES)
def test_settled_after_each_step_it_is_training_without_delay(settle: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, taken, take = [], [], Backward.take
    monkeypatch.setattr(Backward, "take", lambda *given: taken.append(take(*given)))
    for delay in (None, 0):
        model, optimizer = halved(delay_update=delay, stage=3, state_dtype="bf16")
        for number in range(3):
            optimizer.param_groups[0]["lr"] = 1e-2 / (1 + number)
            train(model, optimizer, start=number)
            optimizer.param_groups[0]["lr"] = 0.5  # of no step
            begun(optimizer)
            SETTLES[settle](optimizer, tmp_path)
        found.append(states_of(optimizer))
    assert same(*found) and taken


@pytest.mark.parametrize("stage", [0, 3])
def test_what_a_user_writes_meanwhile_is_updated_and_not_lost(stage: int) -> None:
    """Also where there is no room beside: then the update is made when it counts."""
    found = []
    for delay, has_room in ((None, True), (0, True), (0, False)):
        model, optimizer = halved(delay_update=delay, stage=stage)
        for one in [one for one in optimizer._seams.addons if isinstance(one, Backward) and not has_room]:
            one.shadows = {store: [] for store in one.shadows}
        loss_of(model, batch(0)).backward()
        if delay == 0 or stage == 3:  # zk.gather makes the pending update count; a write at stage 0 comes before it
            optimizer.step()
            with pytest.raises(RuntimeError, match="is gone, as step"):
                model.head.weight.grad.clone()  # type: ignore[union-attr]
        with torch.no_grad(), zk.gather(model.head.weight if stage else (), write=True):
            model.head.weight.mul_(0.5)
        optimizer.step() if delay is None and stage == 0 else None
        found.append(states_of(optimizer))
    assert same(*found[:2]) and same(*found[1:])


def test_states_are_read_as_they_count_and_parameters_as_forward_sees_them() -> None:
    model, optimizer = halved(delay_update=0)
    train(model, optimizer, 1)
    loss = loss_of(model, batch(1))
    with zk.gather(model.head.weight):
        loss.backward()
    with zk.gather(model.head.weight, kind="exp_avg") as (read,):
        assert any(torch.equal(read, state["exp_avg"]) for state in optimizer.state_dict()["state"].values())


def test_what_cannot_be_right_is_refused() -> None:
    for value in (-1, True):
        with pytest.raises(ValueError, match="delay_update must be a number of steps, 0 or more"):
            halved(delay_update=value)
    for mode in (True, "backward"):
        with pytest.raises(ValueError, match=r"delay_update=2 and overlap_step=.* exclude each"):
            halved(delay_update=2, stage=3, overlap_step=mode)
