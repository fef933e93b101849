"""DeepSpeed's JSON, whose keys are all used, named or refused, and its calls in a script."""

import argparse
import contextlib
import functools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import zk
from tests.models import DEVICE, GPT, adamw, batch, loss_of
from tests.plain import train_plain
from tests.programs import run
from tests.world import run_world

ZERO = "zero_optimization"
SCALE = zk.DynamicLossScale
CPU = {"device": "cpu", "pin_memory": True}
NVME = {"device": "nvme", "nvme_path": "/scratch"}
FP16 = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 50, "min_loss_scale": 2}
BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def test_a_key_becomes_a_field_and_overrides_win() -> None:
    drive = {"param_tier": "nvme", "optimizer_tier": "nvme", "nvme_path": ("/scratch",)}
    for config, fields in (
        ({}, {"stage": 0, "clip_grad_norm": 1.0, "dtype": None}),
        ({"gradient_clipping": 0}, {"clip_grad_norm": None}),
        ({"bfloat16": {"enabled": True}}, {"dtype": torch.bfloat16, "loss_scale": "auto"}),
        ({"fp16": {"enabled": True}}, {"dtype": torch.float16, "loss_scale": SCALE(init=2.0**16)}),
        ({"fp16": {"enabled": True, "loss_scale": 128}}, {"loss_scale": 128.0}),
        ({"fp16": FP16}, {"loss_scale": SCALE(init=256.0, window=50, minimum=2.0)}),
        ({ZERO: {"stage": 2, "offload_optimizer": CPU}}, {"stage": 2, "optimizer_tier": "host"}),
        ({ZERO: {"stage": 3, "offload_param": CPU}}, {"param_tier": "host"}),
        ({ZERO: {"stage": 3, "offload_param": NVME, "offload_optimizer": NVME}}, drive),
    ):
        found = zk.ZeroConfig.from_deepspeed(config, num_threads=3)
        assert {name: getattr(found, name) for name in fields} == fields and found.num_threads == 3, config


def test_what_zk_cannot_do_is_refused_with_a_remedy(tmp_path: Path) -> None:
    for config, message in (
        ({"zero_optimisation": {"stage": 2}}, "got 2: write 'zero_optimization.stage', or remove it"),
        ({"bf16": True}, "'bf16'; got True: write 'bf16.enabled', or remove it"),
        ({ZERO: {"cpu_offload": True}}, "got True: write 'zero_optimization.offload_optimizer'"),
        ({ZERO: {"offload_optimizer": {"device": "disk"}}}, "a disk 'nvme'.; got 'disk'"),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "bf16 and fp16 .* one of them false"),
        ({"bf16": {"enabled": "auto"}}, 'bf16.enabled is "auto", which nothing fills in'),
        ([1], r"the config must be an object, \{...\}; got \[1\]"),
    ):
        (tmp_path / "ds_config.json").write_text(json.dumps(config))
        with pytest.raises(ValueError, match=message):
            zk.ZeroConfig.from_deepspeed(tmp_path / "ds_config.json")


def test_batch_sizes_are_completed_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for sizes, world, expected in (
        ((32, 4, None), 4, (32, 4, 2)),
        ((32, None, 2), 4, (32, 4, 2)),
        ((32, 4, 3), 4, "got 32, 4, 3 and 4: write two of them"),
        ((None, None, None), 1, "got 0, 0, 1 and 1: write two of them"),
        (("auto", 4, 2), 4, "which nothing fills in"),
    ):
        monkeypatch.setattr("zk.integrations.deepspeed.Comm", lambda _, world=world: SimpleNamespace(size=world))
        config, model = dict(zip(BATCH, sizes, strict=True)), nn.Linear(2, 2)
        with pytest.raises(ValueError, match=expected) if isinstance(expected, str) else contextlib.nullcontext():
            engine, optimizer, _, _ = zk.initialize(model, adamw(model), config=config)
            optimizer.close()
            assert tuple(getattr(engine, name)() for name in BATCH) == expected


def test_the_optimizer_of_the_config_and_what_initialize_cannot_take() -> None:
    for section, options in (
        ({"type": "Adam"}, {"decoupled_weight_decay": True, "lr": 1e-3, "weight_decay": 0.0}),
        ({"type": "Adam", "params": {"adam_w_mode": False}}, {"decoupled_weight_decay": False}),
        ({"type": "AdamW", "params": {"lr": 0.5, "betas": [0.8, 0.9]}}, {"lr": 0.5, "betas": (0.8, 0.9)}),
        ({"type": "SGD", "params": {"momentum": 0.5}}, {"momentum": 0.5}),
    ):
        _, optimizer, loader, scheduler = zk.initialize(nn.Linear(3, 2), config={"train_batch_size": 2, "optimizer": section})
        group = optimizer.param_groups[0]
        assert {name: type(want)(group[name]) for name, want in options.items()} == options and loader is scheduler is None
        optimizer.close()
    model, config = nn.Linear(2, 2), {"train_batch_size": 2}
    given = {"model": model, "optimizer": adamw(model), "config": config}
    for error, message, wrong in (
        (TypeError, "model must be a module", {"model": "args", "config": config}),
        (TypeError, "config= a path or dict; got .*None", {"model": model}),
        (ValueError, "type must be Adam", {"model": model, "config": config}),
        (TypeError, "stages", {**given, "stages": 2}),
        (ValueError, "write 'lr_scheduler='", {**given, "config": {"scheduler": {"type": "X"}}}),
        (ValueError, "JSON file; got .*nothere", {**given, "config": "nothere.json"}),
        (TypeError, "no option 'config_params'", {**given, "config_params": config}),
    ):
        with pytest.raises(error, match=message):
            zk.initialize(**wrong)
    zk.ZeroOptimizer(model, adamw(model), stage=0).close()  # the model is untouched


def make(config: dict[str, Any], **given: Any) -> Any:
    torch.manual_seed(3)
    config, model = {"train_micro_batch_size_per_gpu": 2, **config}, GPT()
    return zk.initialize(model, adamw(model), config=config, **given)[0]


def test_an_fp16_step_that_overflows_leaves_the_schedule_where_it_is(tmp_path: Path) -> None:
    """In a script with the config on its command line, and arguments that zk does not need."""
    run("-c", "import zk; zk.init_distributed(auto_mpi_discovery=False, distributed_port=29501)", check=True)
    config = {"train_micro_batch_size_per_gpu": 2, "fp16": {"enabled": True, "initial_scale_power": 40, "hysteresis": 1}}
    (tmp_path / "ds.json").write_text(json.dumps(config))
    command, model = ["--deepspeed", "--deepspeed_config", str(tmp_path / "ds.json")], GPT()
    args = zk.add_config_arguments(argparse.ArgumentParser()).parse_args(command)
    schedule = torch.optim.lr_scheduler.StepLR(inner := adamw(model), 1, 0.5)
    engine, _, _, _ = zk.initialize(args=args, model=model, optimizer=inner, lr_scheduler=schedule)
    for step in range(30):
        engine.backward(loss_of(engine, batch(step)))
        engine.step()
        assert engine.optimizer.param_groups[0]["lr"] == 1e-2 * 0.5**engine.optimizer.num_steps
    assert 5 < engine.optimizer.skipped_steps < 30 == engine.global_steps
    engine.optimizer.close()


def trained(engine: Any, first: int) -> list[float]:
    losses = []
    for index in range(first, first + 6):
        losses.append(engine.backward(loss_of(engine, batch(index))).item())
        engine.step()
    return losses


@pytest.mark.device
def test_a_run_resumes_from_its_checkpoint_of_any_tag(tmp_path: Path, caplog: Any) -> None:
    config = {ZERO: {"stage": 3, "offload_optimizer": CPU}, "gradient_accumulation_steps": 2}
    given = {"lr_scheduler": lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)}
    engine, tags = make(config, **given), {None: "global_step3", "best": "best"}
    assert engine.load_checkpoint(tmp_path / "None") == (None, None)
    assert "has no checkpoint; nothing was loaded" in caplog.text
    trained(engine, 0)
    for tag in tags:
        engine.save_checkpoint(tmp_path / str(tag), tag, client_state={"epoch": 3})
    want, rate = trained(engine, 6), engine.optimizer.param_groups[0]["lr"]
    assert rate == pytest.approx(1e-2 * 0.9**6)
    engine.optimizer.close()
    for tag, name in tags.items():
        engine = make(config, **given)
        assert engine.load_checkpoint(tmp_path / str(tag)) == (str(tmp_path / str(tag) / name), {"epoch": 3})
        assert engine.global_steps == 3 and engine.micro_steps == 6
        assert trained(engine, 6) == want and engine.optimizer.param_groups[0]["lr"] == rate
        engine.optimizer.close()


@pytest.mark.device
def test_the_engine_is_the_model_where_it_is_nothing_of_its_own_and_says_where_to_look() -> None:
    engine = make({})
    model = engine.module
    assert engine.variant == "plain" and engine.blocks is model.blocks
    assert engine.eval() is engine and not model.training and engine.train().training
    assert engine.device.type == DEVICE.type and "initialize" in dir(zk)
    with pytest.raises(AttributeError, match=r"no 'get_lr'; .*optimizer has param_groups, metrics"):
        engine.get_lr()
    with pytest.raises(AttributeError, match=r"from_deepspeed\.md"):
        _ = zk.zero
    engine.optimizer.close()


def run_two_ranks(stage: int, root: str) -> list[Any]:
    engine = make({"gradient_accumulation_steps": 2, "gradient_clipping": 0.05, ZERO: {"stage": stage}})
    rank = engine.global_rank  # there is no LOCAL_RANK: it is the device that the program chose
    assert engine.device.index == (rank if DEVICE.type == "cuda" else None) and engine.train_batch_size() == 8
    for index in range(6):
        assert engine.is_gradient_accumulation_boundary() == bool(index % 2)
        engine.backward(loss_of(engine, batch(1000 * (index // 2) + 10 * (index % 2) + rank)))
        engine.step()
        assert engine.global_steps == (index + 1) // 2
    assert engine.optimizer.metrics()["grad_norm"] > 0.05
    engine.save_checkpoint(root)  # all ranks see it at once
    assert engine.load_checkpoint(root)[0] == str(Path(root, "global_step3"))
    with pytest.raises(ValueError, match=r"manifest\.json is missing"):
        engine.load_checkpoint(root + f"/{rank}" * rank)
    found = [value.tolist() for value in engine.optimizer.consolidated_state_dict().values()]
    engine.optimizer.close()
    return found


@pytest.mark.device
def test_two_ranks_train_on_the_mean_of_their_gradients(tmp_path: Path) -> None:
    torch.manual_seed(3)
    part = {"world": 2, "accumulation": 2, "steps": 3, "clip": 0.05, "forward": lambda m, ids, step: loss_of(m, ids) / 2}
    _, _, masters, _ = train_plain(GPT(), functools.partial(torch.optim.AdamW, lr=1e-2), dtype=torch.float32, **part)
    for found in [found for ranks in run_world(2, functools.partial(run_two_ranks, root=str(tmp_path)), [1, 3]) for found in ranks]:
        assert not isinstance(found, Exception), found
        for mine, plain in zip(found, masters, strict=True):
            torch.testing.assert_close(torch.tensor(mine), plain.cpu(), rtol=1e-5, atol=1e-5)
