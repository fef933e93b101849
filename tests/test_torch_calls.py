"""torch's own clipping functions, called on parameters whose gradients zk has taken away."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_  # the function itself, before there is a ZeroOptimizer: as scripts do

import zk
from tests.models import GPT, batch, loss_of


def make_model() -> GPT:
    torch.manual_seed(0)
    return GPT()


def trained(**options: object) -> tuple[nn.Module, zk.ZeroOptimizer]:
    model = make_model()
    optimizer = zk.ZeroOptimizer(model, torch.optim.AdamW(model.parameters(), lr=1e-2), **options)
    return model, optimizer


@pytest.mark.parametrize("stage", (1, 3))
def test_torchs_clip_grad_norm_clips_what_zk_has_taken(stage: int) -> None:
    (model, optimizer), (other, beside) = trained(stage=stage), trained(stage=stage)
    for seed in range(3):
        for one, by in ((model, optimizer), (other, beside)):
            loss_of(one, batch(seed)).backward()
            norm = clip_grad_norm_(one.parameters(), 0.05) if by is optimizer else by.clip_grad_norm_(0.05)
            assert norm.item() > 0.05
            by.step()
            by.zero_grad()
    got, want = (one.state_dict() for one in (model, other))
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=1e-6, atol=1e-7)  # torch rounds its factor to fp32
    plain = make_model()
    loss_of(plain, batch(0)).backward()
    assert clip_grad_norm_(plain.parameters(), 0.05).item() > 0.05  # torch's are still torch's
    assert torch.cat([p.grad.flatten() for p in plain.parameters() if p.grad is not None]).norm().item() == pytest.approx(0.05, rel=1e-4)


def test_clipping_a_norm_that_is_not_finite_raises_where_that_is_asked_for() -> None:
    model, optimizer = trained()
    (loss_of(model, batch(0)) * math.inf).backward()
    with pytest.raises(RuntimeError, match="error_if_nonfinite"):
        clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    optimizer.zero_grad()


def test_values_of_plain_parameters_are_clipped_by_torch() -> None:
    trained()
    param = nn.Parameter(torch.zeros(2))
    param.grad = torch.tensor([3.0, -0.5])
    nn.utils.clip_grad_value_([param], 1.0)
    assert param.grad.tolist() == [1.0, -0.5]


def test_a_model_wrapped_in_ddp_afterwards_is_refused_at_its_first_forward() -> None:
    model, _ = trained()
    ddp = nn.parallel.DistributedDataParallel.__new__(nn.parallel.DistributedDataParallel)  # without a process group
    nn.Module.__init__(ddp)
    ddp.module = model
    with ddp._inside_ddp_forward(), pytest.raises(RuntimeError, match="DistributedDataParallel after"):
        loss_of(model, batch(0))


# ---- zero_grad, and other optimizers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", (1, 2, 3))
def test_zero_grad_of_the_model_drops_gradients_that_have_left(stage: int) -> None:
    (model, optimizer), plain = trained(stage=stage), make_model()
    beside = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for one, by in ((model, optimizer), (plain, beside)):
        loss_of(one, batch(1)).backward()
        one.zero_grad()
        loss_of(one, batch(2)).backward()
        by.step()
    got, want = model.state_dict(), plain.state_dict()
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=1e-5, atol=1e-6)


def test_another_optimizer_over_the_model_is_refused_until_zk_lets_go() -> None:
    model, optimizer = trained(stage=3)
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(model, batch(0)).backward()
    with pytest.raises(RuntimeError, match="more than one element of the written-to tensor"):
        other.step()
    with pytest.raises(RuntimeError, match="this AdamW was given to a ZeroOptimizer"):
        optimizer._inners[0].step()
    optimizer.step()
    optimizer.close(gather=True)
    loss_of(model, batch(0)).backward()
    before = model.head.weight.clone()
    other.step()
    assert not torch.equal(before, model.head.weight)


def test_of_several_clips_before_a_step_the_smallest_counts() -> None:
    (model, optimizer), plain = trained(), make_model()
    beside = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for seed in range(2):
        norms = []
        for one, by in ((model, optimizer), (plain, beside)):
            loss_of(one, batch(seed)).backward()
            norms.append([clip_grad_norm_(one.parameters(), limit).item() for limit in (0.5, 0.05, 1e9, math.inf)])
            by.step()
            by.zero_grad()
        assert norms[0] == pytest.approx(norms[1], rel=1e-4)
    for got, want in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


# ---- gradients that some have dropped, or do not have --------------------------------------------------------------------------


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))


def pairs(tmp_path: Path, tier: str, stage: int) -> list[tuple[nn.Sequential, torch.optim.Optimizer]]:
    """A plain model and its optimizer, and the same with zk."""
    plain, model = small(), small()
    made = [torch.optim.AdamW(one.parameters(), lr=1e-2, eps=1e-3) for one in (plain, model)]
    options = {"optimizer_tier": tier, "nvme_path": tmp_path} if tier == "nvme" else {"optimizer_tier": tier}
    return [(plain, made[0]), (model, zk.ZeroOptimizer(model, made[1], stage=stage, **options))]


def backward(model: nn.Module, seed: int) -> None:
    model(torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))).square().mean().backward()


def assert_alike(both: list[tuple[nn.Sequential, torch.optim.Optimizer]]) -> None:
    """Gradients, and what a step makes of them."""
    (plain, beside), (model, optimizer) = both
    for want, got in zip(plain.parameters(), model.parameters(), strict=True):
        assert (want.grad is None) == (got.grad is None)
        if want.grad is not None:
            torch.testing.assert_close(got.grad, want.grad)
    beside.step()
    optimizer.step()
    with zk.gather(model.parameters()):
        for want, got in zip(plain.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(got.detach(), want.detach())


@pytest.mark.parametrize(("tier", "stage"), [("device", 1), ("host", 2), ("nvme", 1), ("nvme", 3)])
def test_a_gradient_that_was_dropped_is_not_added_to(tier: str, stage: int, tmp_path: Path) -> None:
    both = pairs(tmp_path, tier, stage)
    for model, _ in both:
        backward(model, 1)
        model[0].weight.grad = None
        backward(model, 2)
    assert_alike(both)


@pytest.mark.parametrize("part", (False, True))
@pytest.mark.parametrize("stage", (1, 2, 3))
def test_a_gradient_that_was_dropped_does_not_become_zeros(stage: int, part: bool, tmp_path: Path) -> None:
    both = pairs(tmp_path, "host", stage)
    for model, by in both:
        backward(model, 1)
        by.step()
        by.zero_grad()
        backward(model, 2)
        assert model[0].bias.grad is not None
        model[0].weight.grad = None
        (model[0] if part else by).zero_grad(set_to_none=False)
    assert_alike(both)


def test_a_gradient_that_was_assigned_stays_where_another_part_drops_its_own(tmp_path: Path) -> None:
    both = pairs(tmp_path, "device", 2)
    for model, _ in both:
        model[0].weight.grad = torch.ones(4, 4)
        model[1].zero_grad()
    assert_alike(both)
