"""A loop written for accelerate, under Accelerator and under ZeroAccelerator: the same losses."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

pytest.importorskip("accelerate")

from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState

import zk
from tests.models import DEVICE, GPT, adamw, batch, gpt, loss_of
from zk.integrations.accelerate import ZeroAccelerator

ACCUMULATION, STEPS = 4, 4


def loop(accelerator: Any, folder: Path, *, stop: int = STEPS, resume: bool = False, seed: int = 0) -> tuple[list[float], nn.Module]:
    """The user's script. It does not know of zk."""
    torch.manual_seed(seed)
    model = GPT()
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    rows: Any = [batch(index)[0] for index in range(2 * ACCUMULATION * STEPS)]
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, DataLoader(rows, batch_size=2), scheduler)
    done = stop if resume else 0
    if resume:
        accelerator.load_state(str(folder))
        loader = accelerator.skip_first_batches(loader, ACCUMULATION * done)
    losses = []
    for ids in loader:
        with accelerator.accumulate(model):
            loss = loss_of(model, ids)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                losses += [loss.item(), accelerator.clip_grad_norm_(model.parameters(), 0.1).item()]
                done += 1
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if done == stop and not resume:
            accelerator.save_state(str(folder))
            break
    losses.append(optimizer.param_groups[0]["lr"])
    return losses, accelerator.unwrap_model(model)


def made(zero: Any, **options: Any) -> Any:
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    common = {"cpu": DEVICE.type == "cpu", "gradient_accumulation_steps": ACCUMULATION, **options}
    return Accelerator(**common) if zero is None else ZeroAccelerator(zero=zero, **common)


@pytest.mark.device
@pytest.mark.parametrize("stage", (2, 3))
def test_a_plain_loop_of_accelerate_trains_alike_and_resumes_from_its_state(stage: int, tmp_path: Path) -> None:
    drive = {"param_tier": "nvme", "nvme_path": str(tmp_path)} if stage == 3 else {}
    want, plain = loop(made(None), tmp_path / "plain")
    accelerator = made({"stage": stage, "optimizer_tier": "host", **drive})
    first, begun = loop(accelerator, tmp_path / "zk", stop=2)
    rest, model = loop(made({"stage": 1}), tmp_path / "zk", stop=2, resume=True, seed=5)
    assert first[:-1] + rest == pytest.approx(want, rel=1e-5)
    for got, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(got.to(expected.device), expected, rtol=1e-5, atol=1e-5)
    found = accelerator.get_state_dict(begun)
    assert found.keys() == plain.state_dict().keys()
    with zk.gather(list(begun.parameters())):
        assert all(torch.equal(found[name].cpu(), value.cpu()) for name, value in begun.named_parameters())


def test_what_zk_cannot_do_is_refused_and_an_optimizer_that_was_made_before_is_taken(tmp_path: Path) -> None:
    one, other = GPT(), GPT()
    with pytest.raises(ValueError, match="pass both in one call"):
        made({}).prepare(adamw(one))
    with pytest.raises(ValueError, match="needs the model of an optimizer's parameters"):
        made({}).prepare(one, other, adamw(nn.ModuleList([one, other])))
    accelerator = made({})
    mine = zk.ZeroOptimizer(one, adamw(one), stage=2)
    assert accelerator.prepare(one, mine)[1].optimizer is mine
    with pytest.raises(ValueError, match=r"zk has no checkpoint"):
        accelerator.load_state(str(tmp_path))
    accelerator.register_save_state_pre_hook(lambda models, weights, folder: None)
    with pytest.raises(ValueError, match=r"write your files after save_state\(\)"):
        accelerator.save_state(str(tmp_path))
    with pytest.raises(ValueError, match="takes one optimizer"):
        accelerator.prepare(other, adamw(other))
    with pytest.raises(ValueError, match="mixed precision is 'bf16'"):
        made({"dtype": "fp16"}, mixed_precision="bf16")
    with pytest.raises(ValueError, match="compile its blocks"):
        made({}, dynamo_backend="inductor")


def test_a_state_is_written_over_and_other_models_are_accelerates(tmp_path: Path) -> None:
    accelerator = made({"stage": 2})
    model, teacher = GPT(), nn.Linear(2, 2)
    model, optimizer, teacher = accelerator.prepare(model, adamw(model), teacher)
    kept = teacher.weight.clone()
    for seed in range(3):
        accelerator.backward(loss_of(model, batch(seed)))
        optimizer.step()
        optimizer.zero_grad()
        accelerator.save_state(str(tmp_path))
    nn.init.zeros_(teacher.weight)
    accelerator.load_state(str(tmp_path))
    assert torch.equal(teacher.weight, kept) and len(list((tmp_path / "zk").glob("step-*"))) == 1


def test_clipping_all_is_one_exchange_and_clipping_a_part_is_accelerates(monkeypatch: pytest.MonkeyPatch) -> None:
    norms = []
    for zero in (None, {"stage": 2}):
        accelerator, model = made(zero, gradient_accumulation_steps=1), gpt()
        model, _ = accelerator.prepare(model, adamw(model))
        accelerator.backward(loss_of(model, batch(0)))
        part = accelerator.clip_grad_norm_(model.blocks.parameters(), 0.1).item()
        if zero is not None:
            monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", None)
        norms.append((part, accelerator.clip_grad_norm_(model.parameters(), 0.05).item()))
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)
