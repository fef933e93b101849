"""Updates in the background on a GPU: whatever is in flight arrives before it is read, and budgets are kept to the element."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch

from tests import softgpu
from tests.crossing import counted
from tests.test_overlap import Dropped, check_overlap_settings, make, train, values
from zk.offload import spill, transfer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_no_overlap_setting_changes_a_bit_with_clipping_and_an_overflow() -> None:
    check_overlap_settings(stage=3, steps=10)


def test_what_a_dropped_optimizer_has_in_flight_arrives_before_it_is_read() -> None:
    model, optimizer = make(overlap_step=False)
    train(model, optimizer, 2)
    want = values(model)
    model, optimizer = make()
    train(model, optimizer, 2)
    dropped = Dropped(optimizer)
    del optimizer
    assert dropped.is_gone()
    found = [param.detach().clone() for param in model.parameters()]
    assert all(map(torch.equal, found, want))


@pytest.mark.parametrize("dtype", ("fp32", "bf16"))
def test_what_is_written_through_data_reaches_the_copy_that_is_updated(dtype: str) -> None:
    """Also through a tensor that is held: step() waits for the update of what it shares memory with, and of nothing else."""
    model, optimizer = make(dtype=dtype)
    train(model, optimizer, 2)
    held = model.head.weight.data
    for group in optimizer.param_groups:
        group.update(lr=0.0)
    for step in (2, 3):
        held.view(-1)[step::7] = 0
        model.blocks[0].up.weight.data.clamp_(-0.01, 0.01)
        train(model, optimizer, 1, start=step)
        assert not held.view(-1)[step::7].any()
        optimizer.synchronize()
        assert [unit.is_shared for unit in optimizer.held] == ["head.weight" in unit.unit.names for unit in optimizer.held]
    assert model.blocks[0].up.weight.detach().abs().max() <= 0.0101
    assert optimizer.consolidated_state_dict("fp32")["head.weight"].view(-1)[3::7].abs().max() < 1e-40
    optimizer.close()


# ---- budgets -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", (2, 3))
def test_auto_fills_the_device_to_the_element_and_trains_the_same(stage: int, tmp_path: Path) -> None:
    want, theirs = make(overlap_step=False, stage=stage, width=72)
    losses = train(want, theirs, steps=3)
    per_element = 2 + 2 + 8  # gradient, lower half of the master, moments
    params = sum(theirs.metrics()[name] for name in theirs.metrics() if name.endswith("_param_nbytes"))
    budget = int(params) + 30_000 * per_element
    for host_budget, overlap_step in ((None, True), (800_000, False)):
        with mock.patch.object(transfer, "PIECE_NUMEL", 1024), mock.patch.object(spill, "CHUNK_NUMEL", 2048):
            model, optimizer = make(
                width=72,
                stage=stage,
                optimizer_tier="auto",
                param_tier="auto" if stage == 3 else "device",
                device_budget=budget,
                host_budget=host_budget,
                overlap_step=overlap_step,
                nvme_path=tmp_path if host_budget else None,
            )
            metrics = optimizer.metrics()
            on_device = metrics["device_moments_nbytes"] / 8
            assert 30_000 - 2048 < on_device <= 30_000, "less than one section is left free"
            assert sum(metrics.get(f"device_{kind}_nbytes", 0) for kind in ("param", "moments", "master")) <= budget
            tiers = {"device", "host"} | ({"nvme"} if host_budget else set())
            assert set(optimizer.resting("optimizer").split("+")) == tiers
            assert train(model, optimizer, steps=3) == losses
            assert all(torch.equal(a, b) for a, b in zip(values(model), values(want), strict=True))
            mine, plain = optimizer.state_dict()["state"], theirs.state_dict()["state"]
            assert all(torch.equal(mine[key][name].cpu(), plain[key][name].cpu()) for key in plain for name in plain[key])
            optimizer.load_state_dict(theirs.state_dict())
            optimizer.close()


def test_page_locked_memory_is_what_crosses_the_link_and_no_more() -> None:
    with counted() as crossing:
        model, optimizer = make()
        train(model, optimizer, steps=2)
        numel = sum(held.layout.numel for held in optimizer.held)
        exact = sum(2 * -(-2 * held.layout.numel // 4096) * 4096 for held in optimizer.held)  # gradient and parameter, whole pages
        assert optimizer.metrics()["pinned_nbytes"] == exact == sum(crossing.pinned.values()) < 4 * numel + 2 * 4096 * len(optimizer.held)
        optimizer.close()
    assert crossing.pinned == {}


@pytest.mark.skipif(not softgpu.installed(), reason="a real driver does not refuse when it is asked to")
def test_a_system_that_refuses_to_lock_pages_costs_speed_only(caplog: pytest.LogCaptureFixture) -> None:
    want, theirs = make(overlap_step=False)
    losses = train(want, theirs, steps=3)
    theirs.close()
    with softgpu.refuse_to_pin("cannot allocate memory"):
        model, optimizer = make()
        assert train(model, optimizer, steps=3) == losses
        optimizer.close()
    warnings = [record.getMessage() for record in caplog.records if "cannot allocate memory" in record.getMessage()]
    assert len(warnings) == 1 and "memlock" in warnings[0]


def test_an_overlap_that_could_not_overlap_is_refused() -> None:
    with pytest.raises(ValueError, match="overlap_step=True has no effect"):
        make(optimizer_tier="device")
