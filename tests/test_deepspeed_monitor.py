"""DeepSpeed's monitors, and the names of its engine that scripts use."""

from __future__ import annotations

import csv
import logging
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import zk
from tests.models import GPT, batch, loss_of
from zk.integrations.deepspeed_monitor import _flops

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def loud(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZK_QUIET", "0")


def trained(config: dict[str, Any], steps: int = 4, model: nn.Module | None = None) -> tuple[Any, list[float]]:
    torch.manual_seed(0)
    base = {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 1.0, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}
    engine, _, _, _ = zk.initialize(model or GPT(), config={**base, **config})
    losses = []
    for index in range(steps):
        loss = loss_of(engine, batch(index))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return engine, losses


def test_a_line_at_every_so_many_steps_and_times_of_phases(capsys: pytest.CaptureFixture[str]) -> None:
    engine, losses = trained({"steps_per_print": 2, "wall_clock_breakdown": True, "gradient_accumulation_steps": 2}, 8)
    lines = capsys.readouterr().err.splitlines()
    said = [line for line in lines if line.startswith("zk: ") and " | stage " not in line and "compiling" not in line]
    assert [line.partition(",")[0] for line in said[::2]] == ["zk: step=2", "zk: step=4"]
    mean = sum(losses[2:4]) / 2
    assert re.match(rf"zk: step=2, skipped=0, lr=\[0\.01\], mom=\[\(0\.9, 0\.999\)\] \| loss {mean:.4g} \| .*s/step", said[0]), said
    times = re.match(r"zk: ms of a step \| forward: ([\d.]+) \| backward: ([\d.]+) \| step: ([\d.]+)$", said[1])
    assert times is not None and all(float(one) > 0 for one in times.groups()), said
    assert engine.steps_per_print() == 2 and engine.wall_clock_breakdown()
    engine.destroy()


def test_without_them_nothing_is_printed_and_no_loss_is_read(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    off = {"tensorboard": {"enabled": False, "output_path": "x"}, "wall_clock_breakdown": False}
    with caplog.at_level(logging.WARNING, "zk"):
        engine, _ = trained(off)
    assert engine.monitor.loss is None and not engine.monitor.enabled and "not used" not in caplog.text
    assert [line for line in capsys.readouterr().err.splitlines() if "step=" in line] == []
    engine.destroy()


def test_flops_are_those_of_torch_at_the_step_that_was_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = GPT()
    with FlopCounterMode(display=False) as forward:
        loss = loss_of(model, batch(1))
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    drive = {"device": "nvme", "nvme_path": str(tmp_path)}
    section = {"enabled": True, "profile_step": 1, "recompute_fwd_factor": 0.0, "top_modules": 2, "detailed": False}
    config = {"zero_optimization": {"stage": 3, "offload_param": drive, "offload_optimizer": drive}, "flops_profiler": section}
    engine, losses = trained(config, 3)
    engine.destroy()
    said = [line.removeprefix("zk: ") for line in capsys.readouterr().err.splitlines() if "FLOP" in line or "flops of" in line]
    expected = [_flops(counter.get_total_flops()) for counter in (forward, backward)]
    assert said[0].startswith("flops of the first micro batch of step 1, ") and said[0].endswith(" parameters")
    assert [re.match(r"(?:forward|backward) +([\d.]+ [kMGT]FLOP) in ", line)[1] for line in said[1:3]] == expected, said  # type: ignore[index]
    assert said[3] == f"GPT {expected[0]}, 100% of forward" and {line.count("  ") for line in said[4:]} >= {1, 2}
    whole = {**section, "detailed": True, "module_depth": 2, "output_file": str(tmp_path / "flops.txt")}
    engine, plain = trained({"zero_optimization": {"stage": 1}, "flops_profiler": whole}, 3)
    engine.destroy()
    written = (tmp_path / "flops.txt").read_text()
    assert "GPT.blocks.0 " in written and "GPT.blocks.0." not in written and "FLOP" not in capsys.readouterr().err
    assert plain == losses == trained({"zero_optimization": {"stage": 1}}, 3)[1]  # counting changes nothing


def test_csv_and_tensorboard_have_loss_and_rates_over_samples(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    place = {"enabled": True, "output_path": str(tmp_path)}
    sections = {"csv_monitor": {**place, "job_name": "csv"}, "tensorboard": {**place, "job_name": "board"}, "steps_per_print": 4}
    engine, losses = trained(sections)
    engine.monitor.write_events([("Train/Samples/accuracy", 0.5, 8)])
    with open(tmp_path / "csv" / "Train_Samples_train_loss.csv") as file:
        rows = list(csv.reader(file))
    assert rows[0] == ["step", "Train_Samples_train_loss"] and [int(row[0]) for row in rows[1:]] == [2, 4, 6, 8]
    assert [float(row[1]) for row in rows[1:]] == pytest.approx(losses)
    assert (tmp_path / "csv" / "Train_Samples_accuracy.csv").read_text().split() == ["step,Train_Samples_accuracy", "8,0.5"]
    events = accumulator.EventAccumulator(str(tmp_path / "board"))
    events.Reload()
    assert [event.value for event in events.Scalars("Train/Samples/train_loss")] == pytest.approx(losses)
    assert [event.step for event in events.Scalars("Train/Samples/lr")] == [2, 4, 6, 8]
    assert len(events.Scalars("zk/step_s")) == 1 and "Train/Samples/loss_scale" not in events.Tags()["scalars"]
    engine.destroy()


def test_wandb_gets_the_same_and_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    wandb: Any = types.ModuleType("wandb")
    wandb.init = lambda **options: calls.append(options)
    wandb.log = lambda values, step: calls.append((values, step))
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    engine, losses = trained({"wandb": {"enabled": True, "team": "us", "project": "p"}}, 1)
    assert calls[0] == {"project": "p", "group": None, "entity": "us"}
    assert calls[1] == ({"Train/Samples/train_loss": pytest.approx(losses[0])}, 2)
    engine.destroy()
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ImportError, match="'wandb' is enabled, and wandb cannot be imported: python -m pip install wandb, or disable it"):
        trained({"wandb": {"enabled": True}}, 0)


def test_from_deepspeed_says_that_monitors_are_for_initialize(caplog: pytest.LogCaptureFixture) -> None:
    zk.ZeroConfig.from_deepspeed({"gradient_clipping": 1.0, "steps_per_print": 10, "tensorboard": {"enabled": True}})
    assert "steps_per_print (for zk.initialize); tensorboard (for zk.initialize)" in caplog.text


def test_names_that_scripts_of_deepspeed_use(tmp_path: Path) -> None:
    engine, _ = trained({"gradient_accumulation_steps": 2, "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}, 1)
    assert not engine.was_step_applied()
    engine.backward(loss_of(engine, batch(1)))
    engine.step()
    assert engine.was_step_applied() and engine.get_global_grad_norm() > 0
    assert (engine.global_rank, engine.world_size, engine.dp_world_size, engine.cur_scale, engine.loss_scale()) == (0, 1, 1, 1.0, 1.0)
    assert engine.zero_optimization() and engine.zero_optimization_stage() == 3 and engine.zero_optimization_partition_weights()
    assert not engine.fp16_enabled() and not engine.bfloat16_enabled() and engine.gradient_clipping() == 1.0
    assert engine.get_mom() == [(0.9, 0.999)]
    with pytest.raises(ValueError, match=r"no_sync\(\) needs whole gradients, and stage 3 keeps shards of them; leave it out"):
        engine.no_sync()
    engine.empty_partition_cache()
    assert engine.save_16bit_model(tmp_path / "out")
    plain = GPT()
    plain.load_state_dict(torch.load(tmp_path / "out" / "pytorch_model.bin", weights_only=True))
    with zk.gather(engine.module.parameters()):
        assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), engine.module.parameters(), strict=True))
    with pytest.raises(AttributeError, match=r"zk's engine has no 'timers'; with zk\.timeline\.Recorder\(\)"):
        engine.timers  # noqa: B018
    assert not hasattr(engine, "dump_state")
    engine.destroy()


def test_a_model_without_what_is_frozen_is_saved_if_that_is_asked_for(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4))
    engine, _, _, _ = zk.initialize(model, config={"train_batch_size": 1, "gradient_clipping": 0, "optimizer": {"type": "SGD"}})
    engine.save_16bit_model(tmp_path, "model.bin", exclude_frozen_parameters=True)
    assert set(torch.load(tmp_path / "model.bin", weights_only=True)) == {"1.weight", "1.bias"}
    engine.destroy()
