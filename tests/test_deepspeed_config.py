"""DeepSpeed's JSON and its training calls: every key is accounted for, and a script that changes two lines trains what plain PyTorch trains."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import zk
from tests.models import DEVICE, GPT, batch, loss_of
from tests.plain import train_plain
from tests.world import free_port, run_world
from zk.checkpoint.files import CheckpointError
from zk.integrations.deepspeed_config import Settings, batch_sizes, make_optimizer, make_scheduler, read_object
from zk.integrations.deepspeed_table import ALIASES, KEYS, Key, Kind, markdown

ROOT = Path(__file__).parents[1]
CLIPPED = {"gradient_clipping": 1.0}  # so that its absence is not warned of

# as the ZeRO-Offload tutorial of DeepSpeed has it, faults included
TUTORIAL = """{
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": {
            "device": "cpu",
        }
        "contiguous_gradients": true,
        "overlap_comm": true
    }
}
"""


def nested(name: str, value: Any, beside: dict[str, Any] | None = None) -> dict[str, Any]:
    """A config with one dotted key, and others."""
    config: dict[str, Any] = {}
    for key, item in {**CLIPPED, **(beside or {}), name: value}.items():
        *sections, last = key.split(".")
        place = config
        for section in sections:
            place = place.setdefault(section, {})
        place[last] = item
    return config


def of_kind(*kinds: Kind) -> list[Key]:
    return [key for key in KEYS.values() if key.kind in kinds]


SWITCHED = """torch_autocast amp nebula autotuning quantize_training eigenvalue data_efficiency curriculum_learning progressive_layer_drop
    elasticity hybrid_engine expert_parallel timers.throughput"""
# values that ask for something, where neither true nor (of what is on by default) false is one
EXAMPLES: dict[str, Any] = {
    "train_batch_size": 8,
    "gradient_clipping": 0.5,
    "fp16.loss_scale": 128,
    "fp16.initial_scale_power": 8,
    "fp16.loss_scale_window": 50,
    "fp16.hysteresis": 1,
    "fp16.min_loss_scale": 2,
    "communication_data_type": "fp32",
    "seq_parallel_communication_data_type": "fp32",
    "data_types.grad_accum_dtype": "bf16",
    "data_types.param_dtype": "bf16",
    "data_types.buffer_dtype": "bf16",
    "data_types.keep_in_fp32_modules": ["rotary"],
    "gradient_predivide_factor": 2.0,
    "gradient_allreduce_op": "sum",
    "zero_optimization.stage": 2,
    "zero_optimization.stage3_prefetch_bucket_size": 0,
    "zero_optimization.zenflow": {"topk_ratio": 0.1},
    "zero_optimization.zeropp_loco_param": {"err_beta": 0.8},
    "zero_optimization.zero_hpz_partition_size": 8,
    "zero_optimization.mics_shard_size": 8,
    "zero_optimization.offload_optimizer.device": "cpu",
    "zero_optimization.offload_optimizer.nvme_path": "/scratch",
    "zero_optimization.offload_optimizer.ratio": 0.5,
    "zero_optimization.offload_param.device": "cpu",
    "zero_optimization.offload_param.nvme_path": "/scratch",
    "optimizer.params.lr": 0.01,
    "optimizer.params.betas": [0.8, 0.9],
    "optimizer.params.eps": 1e-6,
    "optimizer.params.weight_decay": 0.1,
    "optimizer.params.momentum": 0.5,
    "optimizer.params.dampening": 0.5,
    "optimizer.params.max_grad_norm": 1.0,
    "scheduler.params.last_batch_iteration": 10,
    "checkpoint.tag_validation": "Warn",
    "checkpoint.parallel_write": {"pipeline_stage": True},
    "checkpoint.writer": {"type": "fast"},
    "datastates_ckpt": {"host_cache_size": 16},
    "compression_training": {"weight_quantization": {}},
    "weight_quantization": {"quantized_initialization": {}},
    "sparse_attention": {"mode": "fixed"},
    "pipeline": {"stages": 2},
    "tensor_parallel": {"autotp_size": 2},
    "sequence_parallel_size": 2,
    "data_parallel_size": 2,
    "compile": {"deepcompile": True},
    **{name: {"enabled": True} for name in SWITCHED.split()},
}


def example_of(key: Key) -> Any:
    return EXAMPLES.get(key.name, True not in key.off)


def switch_of(key: Key) -> dict[str, Any]:
    """What makes the key's section count."""
    switch = f"{key.name.rpartition('.')[0]}.enabled"
    return {switch: True} if switch in KEYS and switch != key.name else {}


# ---- what is not JSON --------------------------------------------------------------------------------------------------------


def test_the_tutorials_config_says_what_to_mend_and_works_once_it_is_mended(tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(TUTORIAL)
    with pytest.raises(ValueError) as caught:
        zk.ZeroConfig.from_deepspeed(path)
    assert str(caught.value).split("\n") == [
        f"{path}, line 5, column 28: a comma before the closing bracket",
        '                "device": "cpu",',
        "                               ^",
        "write line 5 as",
        '                "device": "cpu"',
        f"{path}, line 6, column 10: a comma is missing",
        "            }",
        "             ^",
        "write line 6 as",
        "            },",
    ]
    lines = TUTORIAL.split("\n")
    for number, line in re.findall(r"write line (\d+) as\n    (.*)", str(caught.value)):
        lines[int(number) - 1] = line
    path.write_text("\n".join(lines))
    config = zk.ZeroConfig.from_deepspeed(path)
    assert (config.stage, config.optimizer_tier, config.param_tier, config.overlap) == (2, "host", "device", True)


@pytest.mark.parametrize(
    "text, where, mended",
    [
        ('{"a": 1 "b": 2}', (1, 8), '{"a": 1, "b": 2}'),
        ('{"a": 1\n\t"b": 2}', (1, 8), '{"a": 1,'),
        ('{"a": [1 2]}', (1, 9), '{"a": [1, 2]}'),
        ('{"a": [1, 2,]}', (1, 12), '{"a": [1, 2]}'),
        ('{"a": {"b": 1,\n}}', (1, 14), '{"a": {"b": 1'),
        ('{"a":,}', (1, 6), None),
        ('{"a": 12x}', (1, 9), None),
        ('{"a" 2}', (1, 6), None),
        ("{'a': 1}", (1, 2), None),
        ('{"a": 1, // one\n"b": 2}', (1, 10), None),
        ('{"a": 1', (1, 8), None),
        ('{\n\t"a": tru}', (2, 7), None),
        ("", (1, 1), None),
    ],
)
def test_what_is_not_json_is_pointed_at(text: str, where: tuple[int, int], mended: str | None, tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    path.write_text(text)
    with pytest.raises(ValueError) as caught:
        read_object(path)
    first, line, caret, *rest = str(caught.value).split("\n")
    assert first.startswith(f"{path}, line {where[0]}, column {where[1]}: ")
    assert line == "    " + text.split("\n")[where[0] - 1] and caret.expandtabs(1).index("^") == 4 + where[1] - 1
    assert rest == ([] if mended is None else [f"write line {where[0]} as", f"    {mended}"])


def test_a_config_is_an_object_with_each_key_once(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    path.write_text("[1]")
    with pytest.raises(ValueError, match="must hold a JSON object"):
        read_object(path)
    path.write_text('{"fp16": {"enabled": true, "enabled": false}}')
    with pytest.raises(ValueError, match=r"c.json: the key 'enabled' is there 2 times"):
        read_object(path)
    with pytest.raises(TypeError, match="path to a JSON file, or a dict; got 3"):
        read_object(3)  # type: ignore[arg-type]
    with pytest.raises(FileNotFoundError):
        read_object(tmp_path / "none.json")


# ---- key by key --------------------------------------------------------------------------------------------------------------


def test_the_page_is_what_the_table_says() -> None:
    assert (ROOT / "docs" / "deepspeed_config.md").read_text() == markdown() + "\n", "run: make docs"


def test_every_row_says_why_and_has_an_example_that_asks_for_something() -> None:
    for key in KEYS.values():
        assert not key.is_off(example_of(key)) and key.is_off(None), key.name
        assert "|" not in key.becomes + key.why
        assert key.becomes if key.kind is not Kind.ACCEPTED else key.why, key.name
        assert key.why or key.kind in (Kind.HONOURED, Kind.TRANSLATED), key.name


@pytest.mark.parametrize("key", of_kind(Kind.ACCEPTED), ids=lambda key: key.name)
def test_a_key_without_counterpart_changes_nothing_and_is_named_once(key: Key, caplog: pytest.LogCaptureFixture) -> None:
    plain = zk.ZeroConfig.from_deepspeed(nested("zero_optimization.stage", 2, switch_of(key)))
    caplog.clear()
    settings = Settings(nested(key.name, example_of(key), {"zero_optimization.stage": 2, **switch_of(key)}))
    assert [key.name in record.message for record in caplog.records] == [True]
    caplog.clear()
    for value in (*key.off, "auto"):
        Settings(nested(key.name, value, {"zero_optimization.stage": 2}))
    assert caplog.records == []
    if not key.name.startswith("optimizer"):
        assert zk.ZeroConfig.from_deepspeed(nested(key.name, example_of(key), {"zero_optimization.stage": 2, **switch_of(key)})) == plain
    assert settings.get("zero_optimization.stage") == 2


@pytest.mark.parametrize("key", of_kind(Kind.REFUSED), ids=lambda key: key.name)
def test_a_key_that_would_change_results_is_refused_with_reason_and_remedy(key: Key, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ValueError) as caught:
        Settings(nested(key.name, example_of(key), switch_of(key)))
    for part in (f"{key.name!r} is {example_of(key)!r}", key.why, f"Instead: {key.becomes}"):
        assert part in str(caught.value)
    for value in (*key.off, *(({}, {"enabled": False}) if isinstance(example_of(key), dict) else ())):
        Settings(nested(key.name, value))
    assert caplog.records == []


SCALE = zk.DynamicLossScale
FP16 = {"fp16.enabled": True}
NVME = {"zero_optimization.stage": 3, "zero_optimization.offload_optimizer.device": "nvme"}
# the key's example, with what else -> fields of the ZeroConfig
FIELDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gradient_clipping": ({}, {"clip_grad_norm": 0.5}),
    "bf16.enabled": ({}, {"dtype": torch.bfloat16, "loss_scale": "auto"}),
    "fp16.enabled": ({}, {"dtype": torch.float16, "loss_scale": SCALE(init=2.0**16, window=1000, hysteresis=2, minimum=1.0)}),
    "fp16.loss_scale": (FP16, {"loss_scale": 128.0}),
    "fp16.initial_scale_power": (FP16, {"loss_scale": SCALE(init=256.0)}),
    "fp16.loss_scale_window": (FP16, {"loss_scale": SCALE(window=50)}),
    "fp16.hysteresis": (FP16, {"loss_scale": SCALE(hysteresis=1)}),
    "fp16.min_loss_scale": (FP16, {"loss_scale": SCALE(minimum=2.0)}),
    "data_types.grad_accum_dtype": ({"bf16.enabled": True}, {"grad_accum_dtype": torch.bfloat16}),
    "data_types.buffer_dtype": ({"bf16.enabled": True}, {"cast_buffers": True}),
    "data_types.keep_in_fp32_modules": (FP16, {"keep_dtype": ("rotary",), "cast_buffers": False}),
    "communication_data_type": ({}, {"dtype": None}),
    "zero_optimization.stage": ({}, {"stage": 2}),
    "zero_optimization.overlap_comm": ({}, {"overlap": False}),
    "zero_optimization.stage3_prefetch_bucket_size": ({"zero_optimization.stage": 3}, {"prefetch": 0}),
    "zero_optimization.offload_optimizer.device": ({}, {"optimizer_tier": "host", "param_tier": "device"}),
    "zero_optimization.offload_optimizer.nvme_path": (NVME, {"optimizer_tier": "nvme", "nvme_path": ("/scratch",)}),
    "zero_optimization.offload_param.device": ({"zero_optimization.stage": 3}, {"param_tier": "host", "optimizer_tier": "device"}),
    "zero_optimization.offload_param.nvme_path": (
        {**NVME, "zero_optimization.offload_param.device": "nvme", "zero_optimization.offload_optimizer.nvme_path": "/other"},
        {"param_tier": "nvme", "nvme_path": ("/scratch", "/other")},
    ),
    "zero_optimization.cpu_offload": ({}, {"optimizer_tier": "host"}),
    "zero_optimization.cpu_offload_param": ({"zero_optimization.stage": 3}, {"param_tier": "host"}),
}


@pytest.mark.parametrize("name", FIELDS)
def test_a_key_becomes_a_field(name: str) -> None:
    beside, expected = FIELDS[name]
    found = zk.ZeroConfig.from_deepspeed(nested(name, example_of(KEYS[name]), beside))
    assert {field: getattr(found, field) for field in expected} == expected


def of_optimizer(name: str) -> torch.optim.Optimizer:
    kind = "SGD" if name in ("momentum", "dampening", "nesterov") else "AdamW"
    beside = {"optimizer.type": kind, **({"optimizer.params.momentum": 0.5} if name == "nesterov" else {})}
    key = KEYS[f"optimizer.params.{name}"]
    return make_optimizer(Settings(nested(key.name, example_of(key), beside)), [nn.Parameter(torch.zeros(2))])


@pytest.mark.parametrize("name", ["lr", "betas", "eps", "weight_decay", "amsgrad", "momentum", "dampening", "nesterov"])
def test_an_option_of_the_optimizer_becomes_torchs(name: str) -> None:
    value = example_of(KEYS[f"optimizer.params.{name}"])
    assert of_optimizer(name).param_groups[0][name] == (tuple(value) if name == "betas" else value)


def test_adam_is_adamw_unless_it_says_otherwise_and_has_deepspeeds_defaults() -> None:
    def made(kind: str, **params: Any) -> torch.optim.Optimizer:
        return make_optimizer(Settings({"optimizer": {"type": kind, "params": params}}), [nn.Parameter(torch.zeros(2))])

    for kind, params, cls, decay in [
        ("Adam", {}, torch.optim.AdamW, 0.0),
        ("Adam", {"adam_w_mode": False}, torch.optim.Adam, 0.0),
        ("adamw", {"adam_w_mode": False}, torch.optim.AdamW, 0.0),
        ("AdamW", {"torch_adam": True}, torch.optim.AdamW, 0.01),
        ("Adam", {"torch_adam": True, "adam_w_mode": False}, torch.optim.Adam, 0.0),
        ("SGD", {}, torch.optim.SGD, 0.0),
    ]:
        found = made(kind, **params)
        assert type(found) is cls and found.defaults["weight_decay"] == decay and found.defaults["lr"] == 1e-3, (kind, params)
    for kind in ("OneBitAdam", "Lamb", "Lion", "Muon", "Adagrad", None):
        with pytest.raises(ValueError, match=r"use one of these|no 'optimizer'"):
            made(kind)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"'optimizer.params.momentum' is no option of AdamW; it has adam_w_mode"):
        made("AdamW", momentum=0.9)


def test_every_key_that_is_honoured_or_translated_is_looked_at_here() -> None:
    elsewhere = {"optimizer.type", "optimizer.params.adam_w_mode", "optimizer.params.torch_adam", "scheduler.type", "dataloader_drop_last"}
    elsewhere |= {"train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"}  # test_batch_sizes, test_the_loader
    elsewhere |= {"steps_per_print", "wall_clock_breakdown"}  # tests/test_deepspeed_monitor.py, and so are these
    elsewhere |= {f"{section}.{key}" for section in ("tensorboard", "csv_monitor") for key in ("enabled", "output_path", "job_name")}
    elsewhere |= {f"flops_profiler.{key}" for key in ("enabled", "profile_step", "module_depth", "top_modules", "detailed", "output_file")}
    elsewhere |= {f"wandb.{key}" for key in ("enabled", "group", "team", "project")}
    options = {f"optimizer.params.{name}" for name in ("lr", "betas", "eps", "weight_decay", "amsgrad", "momentum", "dampening", "nesterov")}
    schedules = {f"scheduler.params.{name}" for _, params, _ in SCHEDULES for name in params}
    assert {*FIELDS, *elsewhere, *options, *schedules} == {key.name for key in of_kind(Kind.HONOURED, Kind.TRANSLATED)}


@pytest.mark.parametrize("old", ALIASES)
def test_another_spelling_is_the_same_key(old: str) -> None:
    if old == "bfloat16":
        assert zk.ZeroConfig.from_deepspeed({"bfloat16": {"enabled": True}}).dtype is torch.bfloat16
        with pytest.raises(ValueError, match="'bf16' and 'bfloat16' are two spellings of one key"):
            Settings({"bfloat16": {"enabled": True}, "bf16": {"enabled": True}})
        return
    assert Settings(nested(old, 7)).values == {"gradient_clipping": 1.0, ALIASES[old]: 7}


@pytest.mark.parametrize(
    "config, closest",
    [
        ({"zero_optimisation": {}}, "zero_optimization"),
        ({"stage": 2}, "zero_optimization.stage"),
        ({"train_batchsize": 2}, "train_batch_size"),
        ({"zero_optimization": {"stages": 2}}, "zero_optimization.stage"),
        ({"zero_optimization": {"offload_optimizer": {"devices": "cpu"}}}, "zero_optimization.offload_optimizer.device"),
        ({"zero_optimization": {"offload_params": {}}}, "zero_optimization.offload_param"),
        ({"bfloat16": {"enable": True}}, "bf16.enabled"),
        ({"scheduler": {"params": {"warmup_steps": 3}}}, "scheduler.params.warmup_num_steps"),
        ({"lr": 3}, "optimizer.params.lr"),
        ({"xyzzy": 3}, None),
    ],
)
def test_an_unknown_key_is_an_error_that_names_the_closest_one(config: dict[str, Any], closest: str | None) -> None:
    with pytest.raises(ValueError, match="is no key of DeepSpeed's config that zk knows; ") as caught:
        zk.ZeroConfig.from_deepspeed(config)
    assert str(caught.value).endswith(f"the closest one is {closest!r}" if closest else "see docs/deepspeed_config.md for all of them")


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
def test_no_key_of_deepspeeds_own_models_is_missing() -> None:
    spec = importlib.util.find_spec("deepspeed")
    assert spec is not None and spec.origin is not None
    sections = {
        ("runtime/zero/config.py", "DeepSpeedZeroConfig"): "zero_optimization.",
        ("runtime/zero/offload_config.py", "DeepSpeedZeroOffloadParamConfig"): "zero_optimization.offload_param.",
        ("runtime/zero/offload_config.py", "DeepSpeedZeroOffloadOptimizerConfig"): "zero_optimization.offload_optimizer.",
        ("runtime/precision_config.py", "DeepSpeedBF16Config"): "bf16.",
        ("runtime/precision_config.py", "DeepSpeedFP16Config"): "fp16.",
        ("monitor/config.py", "TensorBoardConfig"): "tensorboard.",
        ("monitor/config.py", "WandbConfig"): "wandb.",
        ("monitor/config.py", "CSVConfig"): "csv_monitor.",
        ("monitor/config.py", "CometConfig"): "comet.",
        ("comm/config.py", "CommsLoggerConfig"): "comms_logger.",
    }
    known = {*KEYS, *ALIASES, "zero_optimization.offload_param", "zero_optimization.offload_optimizer"}
    for (file, name), prefix in sections.items():
        tree = ast.parse((Path(spec.origin).parent / file).read_text())
        model = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
        fields = [node.target.id for node in model.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)]
        assert fields and [field for field in fields if prefix + field not in known] == [], name


# ---- values that depend on each other ----------------------------------------------------------------------------------------


def test_absent_keys_are_deepspeeds_defaults(caplog: pytest.LogCaptureFixture) -> None:
    config = zk.ZeroConfig.from_deepspeed({})
    assert dataclasses.replace(config, clip_grad_norm=None) == zk.ZeroConfig(stage=0) and config.clip_grad_norm == 1.0
    assert ["'gradient_clipping' is not set" in record.message for record in caplog.records] == [True]
    assert zk.ZeroConfig.from_deepspeed({"gradient_clipping": 0}).clip_grad_norm is None
    assert zk.ZeroConfig.from_deepspeed({"zero_optimization": True, **CLIPPED}).stage == 1


@pytest.mark.parametrize(
    "config, message",
    [
        ({"zero_optimization": {"stage": 4}}, "stage must be 0, 1, 2 or 3; got 4"),
        ({"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}, "param_tier='host' needs stage=3"),
        ({"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}, "nvme_path is not set"),
        ({"zero_optimization": {"offload_optimizer": {"device": "gpu"}}}, "offload_optimizer.device' must be 'none', 'cpu' or 'nvme'; got 'gpu'"),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/x"}}}, "needs optimizer_tier='host', 'nvme'"),
        ({"zero_optimization": 3}, "'zero_optimization' must be an object"),
        ({"zero_optimization": {"overlap_comm": "yes"}}, "'zero_optimization.overlap_comm' must be true or false; got 'yes'"),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "'bf16' and 'fp16' are both enabled"),
        ({"bf16": {"enabled": 1}}, "'bf16.enabled' must be true or false; got 1"),
        ({"bf16": {"enabled": True}, "communication_data_type": "fp32"}, "gradients travel in that, and are summed in fp32; remove it"),
        ({"gradient_clipping": -1}, "'gradient_clipping' must be a number, 0 or more; got -1"),
        ({"fp16": {"enabled": True, "loss_scale_window": 0}}, "'fp16.loss_scale_window' must be a number, 1 or more; got 0"),
        ({"bf16": {"enabled": "auto"}}, '\'bf16.enabled\' is "auto", and there is nothing to take it from'),
    ],
)
def test_values_that_mean_nothing_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match="^the config: .*" + re.escape(message)):
        zk.ZeroConfig.from_deepspeed({**CLIPPED, **config})


def test_a_path_that_no_device_uses_is_left_out_and_overrides_win() -> None:
    offload = {"stage": 3, "offload_optimizer": {"device": "cpu", "nvme_path": "/unused"}}
    config = zk.ZeroConfig.from_deepspeed({"zero_optimization": offload}, clip_grad_norm=0.1, optimizer_tier="nvme", nvme_path="/used", prefetch=4)
    assert (config.nvme_path, config.optimizer_tier, config.clip_grad_norm, config.prefetch) == (("/used",), "nvme", 0.1, 4)


@pytest.mark.parametrize(
    "train, micro, accumulation, world, expected",
    [
        (32, 4, 2, 4, (32, 4, 2)),
        (32, 4, None, 4, (32, 4, 2)),
        (32, None, 2, 4, (32, 4, 2)),
        (None, 4, 2, 4, (32, 4, 2)),
        (32, None, None, 4, (32, 8, 1)),
        (None, 4, None, 4, (16, 4, 1)),
        ("auto", 4, 2, 4, (32, 4, 2)),
        (32, 4, 3, 4, "32 is not 4 x 3 x 4"),
        (10, 4, None, 1, "10 is not 4 x 2 x 1"),
        (2, None, None, 4, "2 is not 0 x 1 x 4"),
        (None, None, 2, 1, "neither 'train_batch_size' nor"),
        ("auto", "auto", "auto", 1, "neither 'train_batch_size' nor"),
        (None, 2.5, None, 1, "must be a whole number; got 2.5"),
        (None, True, None, 1, "must be a number, 1 or more; got True"),
    ],
)
def test_batch_sizes(train: Any, micro: Any, accumulation: Any, world: int, expected: Any) -> None:
    settings = Settings({"train_batch_size": train, "train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": accumulation})
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=expected):
            batch_sizes(settings, world)
    else:
        assert batch_sizes(settings, world) == expected


HUGGING_FACE = {
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2, "min_loss_scale": 1},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto", "total_num_steps": "auto"},
    },
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}
ADAM = {"lr": 1e-3, "betas": [0.8, 0.9], "eps": 1e-7, "weight_decay": 0.1}
AUTO: dict[str, Any] = {
    "gradient_clipping": 0.7,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 3,
    "scheduler.params.warmup_num_steps": 4,
    "scheduler.params.total_num_steps": 10,
    **{f"optimizer.params.{name}": value for name, value in ADAM.items()},
}


def test_auto_is_taken_from_the_model_the_settings_and_what_is_given(caplog: pytest.LogCaptureFixture) -> None:
    engine, optimizer, _, scheduler = zk.initialize(nn.Linear(3, 2).bfloat16(), config=HUGGING_FACE, auto=AUTO)
    assert optimizer.config == zk.ZeroConfig(stage=3, dtype="bf16", param_tier="host", optimizer_tier="host", clip_grad_norm=0.7)
    group = optimizer.param_groups[0]
    assert (group["initial_lr"], group["betas"], group["eps"], group["weight_decay"]) == (1e-3, (0.8, 0.9), 1e-7, 0.1)
    assert (scheduler.warmup_min_lr, scheduler.warmup_max_lr, scheduler.num_steps, scheduler.total_num_steps) == ([0.0], [1e-3], 4, 10)
    assert (engine.train_batch_size(), engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()) == (6, 2, 3)
    assert len([record for record in caplog.records if "no counterpart" in record.message]) == 1
    optimizer.close()


def test_auto_precision_of_a_model_in_fp32_is_fp32_and_that_is_said(caplog: pytest.LogCaptureFixture) -> None:
    config = {**CLIPPED, "train_batch_size": 2, "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}
    for auto, dtype, told in (({}, None, True), ({"bf16.enabled": True}, torch.bfloat16, False)):
        caplog.clear()
        engine, optimizer, _, _ = zk.initialize(nn.Linear(3, 2), adamw, config=config, auto=auto)
        assert optimizer.config.dtype is dtype and ("training is in torch.float32, as the model is" in caplog.text) is told
        engine.destroy()


@pytest.mark.parametrize("missing", [name for name in AUTO if name != "gradient_accumulation_steps"])
def test_auto_with_nothing_to_take_it_from_is_an_error(missing: str) -> None:
    model = nn.Linear(3, 2).bfloat16()
    with pytest.raises(ValueError, match=missing):
        zk.initialize(model, config=HUGGING_FACE, auto={name: value for name, value in AUTO.items() if name != missing})
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    zk.ZeroOptimizer(model, torch.optim.AdamW(model.parameters()), stage=0).close()  # nothing holds the model any more


def test_auto_names_a_key() -> None:
    with pytest.raises(ValueError, match=r"auto=.*the closest one is 'gradient_clipping'"):
        Settings({}, {"gradient_cliping": 1.0})


# ---- schedules ---------------------------------------------------------------------------------------------------------------


def warm(t: int, n: int) -> float:
    return min(1.0, math.log(t + 1) / math.log(n))


# type, parameters, learning rate of the step after ``t + 1`` others (t from -1)
SCHEDULES: list[tuple[str, dict[str, Any], Callable[[int], float]]] = [
    ("WarmupLR", {"warmup_min_lr": 0.1, "warmup_max_lr": 0.5, "warmup_num_steps": 6}, lambda t: 0.1 + 0.4 * warm(max(t, 0), 6)),
    ("WarmupLR", {"warmup_num_steps": 4, "warmup_type": "linear"}, lambda t: 0.2 * min(1.0, max(t, 0) / 4)),
    ("WarmupLR", {"warmup_num_steps": 1}, lambda t: 0.2 * warm(max(t, 0), 2)),
    (
        "WarmupDecayLR",
        {"total_num_steps": 12, "warmup_min_lr": 0.1, "warmup_max_lr": 0.5, "warmup_num_steps": 4, "warmup_type": "linear"},
        lambda t: 0.1 + 0.4 * (max(t, 0) / 4 if t < 4 else max(0.0, (12 - t) / 8)),
    ),
    (
        "WarmupCosineLR",
        {"total_num_steps": 14, "warmup_min_ratio": 0.1, "warmup_num_steps": 5, "cos_min_ratio": 0.01},
        lambda t: 0.2
        * (0.0 if t < 0 else 0.1 + 0.9 * warm(t, 5) if t < 5 else 0.01 + 0.99 * (1 + math.cos(math.pi * min(1.0, (t - 4) / 9))) / 2),
    ),
    (
        "LRRangeTest",
        {"lr_range_test_min_lr": 0.01, "lr_range_test_step_size": 3, "lr_range_test_step_rate": 2.0, "lr_range_test_staircase": True},
        lambda t: 0.01 * (1 + 2.0 * ((t + 1) // 3)),
    ),
    ("LRRangeTest", {"lr_range_test_min_lr": 0.01, "lr_range_test_step_size": 3}, lambda t: 0.01 * (1 + (t + 1) / 3)),
    (
        "OneCycle",
        {
            "cycle_min_lr": 0.1,
            "cycle_max_lr": 0.4,
            "decay_lr_rate": 0.5,
            "cycle_first_step_size": 5,
            "cycle_second_step_size": 3,
            "decay_step_size": 2,
            "cycle_momentum": True,
            "cycle_min_mom": 0.8,
            "cycle_max_mom": 0.95,
            "decay_mom_rate": 0.01,
        },
        lambda t: 0.1 / (1 + 0.5 * (t - 7) / 2) if t >= 8 else 0.1 + 0.3 * (t + 1) / 5 if t < 5 else 0.1 + 0.3 * (7 - t) / 3 if t < 7 else 0.1,
    ),
    (
        "OneCycle",
        {"cycle_min_lr": 0.1, "cycle_max_lr": 0.4, "cycle_first_step_size": 6, "cycle_first_stair_count": 3, "cycle_second_stair_count": 2},
        lambda t: 0.1 if t >= 11 else 0.1 + 0.3 * ((t + 1) // 2 / 3 if t < 6 else (11 - t) // 3 / 2),
    ),
]
ITERATIONS = 20


def run_schedule(kind: str, params: dict[str, Any]) -> list[tuple[float, float]]:
    """Learning rate and beta1 of each step."""
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(2))], lr=0.2)
    scheduler = make_scheduler(Settings({"scheduler": {"type": kind, "params": params}}), optimizer)
    assert scheduler is not None
    found = []
    for _ in range(ITERATIONS):
        group = optimizer.param_groups[0]
        found.append((group["lr"], group["betas"][0]))
        assert scheduler.get_last_lr() == [group["lr"]]
        optimizer.step()
        scheduler.step()
    return found


@pytest.mark.parametrize("index", range(len(SCHEDULES)), ids=[kind for kind, _, _ in SCHEDULES])
def test_a_schedule_has_the_values_of_its_formula(index: int) -> None:
    kind, params, formula = SCHEDULES[index]
    assert [lr for lr, _ in run_schedule(kind, params)] == pytest.approx([formula(step - 1) for step in range(ITERATIONS)], rel=1e-12)


def test_beta1_goes_the_other_way_round_and_sgd_keeps_its_own(caplog: pytest.LogCaptureFixture) -> None:
    kind, params, _ = SCHEDULES[-2]
    found = [beta for _, beta in run_schedule(kind, params)]
    assert found[:9] == pytest.approx([0.8, 0.92, 0.89, 0.86, 0.83, 0.8, 0.85, 0.9, 0.95]) and found[9] == pytest.approx(0.95 * 1.005)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.2, momentum=0.5)
    make_scheduler(Settings({"scheduler": {"type": kind, "params": params}}), optimizer)
    assert optimizer.param_groups[0]["momentum"] == 0.5 and "OneCycle leaves momentum as it is: SGD has no betas" in caplog.text


@pytest.mark.parametrize(
    "scheduler, message",
    [
        ({"type": "Cosine"}, "'scheduler.type' is 'Cosine'; zk has WarmupLR, "),
        ({"type": "WarmupDecayLR", "params": {}}, "missing 1 required positional argument: 'total_num_steps'"),
        ({"type": "WarmupLR", "params": {"total_num_steps": 3}}, "params.total_num_steps' is no parameter of WarmupLR; it has warmup_min_lr"),
        ({"type": "WarmupCosineLR", "params": {"warmup_max_lr": 1}}, "it ends warmup at the optimizer's own lr"),
        ({"type": "WarmupLR", "params": {"warmup_num_steps": 0}}, "scheduler.params.warmup_num_steps must be a number of steps, 1 or more; got 0"),
        ({"type": "WarmupLR", "params": {"warmup_type": "cubic"}}, "scheduler.params.warmup_type must be 'log' or 'linear'; got 'cubic'"),
        ({"type": "WarmupLR", "params": {"warmup_max_lr": [1, 2]}}, "one for each of the 1 param groups; got [1, 2]"),
    ],
)
def test_schedulers_that_are_not_there_are_refused(scheduler: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make_scheduler(Settings({"scheduler": scheduler}), torch.optim.AdamW([nn.Parameter(torch.zeros(2))], lr=0.2))


# ---- the same script ---------------------------------------------------------------------------------------------------------

SCRIPT = """
import torch
import deepspeed

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.GELU(), torch.nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
engine, optimizer, _, scheduler = deepspeed.initialize(args=None, config="ds_config.json", model=model, optimizer=optimizer)

losses, norms = [], []
for index in range(24):
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(index))
    x = x.to(engine.device)
    loss = (engine(x) - x.sum(1, keepdim=True)).square().mean()
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())
    if (index + 1) % engine.gradient_accumulation_steps() == 0:
        norms.append(float(engine.get_global_grad_norm()))
"""
SCRIPT_CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 0.5,
    "zero_optimization": {"stage": 2},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.02, "warmup_num_steps": 3, "warmup_type": "linear"}},
}


def plain_script() -> tuple[list[float], list[float]]:
    """What the script does, in plain PyTorch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    losses, norms = [], []
    for index in range(24):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(index))
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        (loss / 4).backward()
        losses.append(loss.item())
        if index % 4 == 3:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
            optimizer.param_groups[0]["lr"] = 0.02 * min(1.0, max(0, index // 4 - 1) / 3)
            optimizer.step()
            optimizer.zero_grad()
    return losses, norms


@pytest.mark.device
def test_a_script_with_two_lines_changed_trains_what_plain_pytorch_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ds_config.json").write_text(json.dumps(SCRIPT_CONFIG))
    monkeypatch.chdir(tmp_path)
    changed = SCRIPT.replace("import deepspeed", "import zk").replace("deepspeed.initialize", "zk.initialize")
    assert sum(old != new for old, new in zip(SCRIPT.split("\n"), changed.split("\n"), strict=True)) == 2
    found: dict[str, Any] = {}
    exec(changed, found)
    losses, norms = plain_script()
    assert found["losses"] == pytest.approx(losses, rel=1e-5) and found["norms"] == pytest.approx(norms, rel=1e-5)
    assert found["losses"][-1] < 0.9 * losses[0] and max(norms) > 0.5
    found["engine"].destroy()


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
def test_deepspeed_itself_gives_the_same_losses_and_schedules(tmp_path: Path) -> None:
    (tmp_path / "ds_config.json").write_text(json.dumps(SCRIPT_CONFIG))
    more = f"""
from deepspeed.runtime import lr_schedules
values = []
for kind, params in {[(kind, params) for kind, params, _ in SCHEDULES]!r}:
    plain = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))], lr=0.2)
    schedule = getattr(lr_schedules, kind)(plain, **params)
    rows = []
    for _ in range({ITERATIONS}):
        rows.append((plain.param_groups[0]["lr"], plain.param_groups[0]["betas"][0]))
        schedule.step()
    values.append(rows)
import json
open("found.json", "w").write(json.dumps([losses, norms, values]))
"""
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    (tmp_path / "script.py").write_text(SCRIPT + more)
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, env={**os.environ, **ranks}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    losses, norms, values = json.loads((tmp_path / "found.json").read_text())
    plain = plain_script()
    assert losses == pytest.approx(plain[0], rel=1e-5) and norms == pytest.approx(plain[1], rel=1e-5)
    for (kind, params, _), theirs in zip(SCHEDULES, values, strict=True):
        for mine, their in zip(run_schedule(kind, params), theirs, strict=True):
            assert mine == pytest.approx(their, rel=1e-12), kind


# ---- the engine --------------------------------------------------------------------------------------------------------------


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2)


def make(config: dict[str, Any], **given: Any) -> zk.integrations.deepspeed_engine.Engine:
    torch.manual_seed(3)
    engine, _, loader, scheduler = zk.initialize(GPT(), adamw, config={**CLIPPED, "train_micro_batch_size_per_gpu": 2, **config}, **given)
    assert loader is None and scheduler is engine.lr_scheduler
    return engine


@pytest.mark.parametrize(
    ("stage", "vertical"), [(0, False), pytest.param(2, False, marks=pytest.mark.device), pytest.param(3, True, marks=pytest.mark.device), (0, True)]
)
def test_accumulation_over_four_with_clipping_is_plain_pytorchs_to_the_bit(stage: int, vertical: bool, torch_engine: None) -> None:
    torch.manual_seed(3)
    model = GPT()
    want, _, masters, _ = train_plain(
        model, adamw, dtype=torch.bfloat16, accumulation=4, steps=3, clip=0.05, forward=lambda m, ids, step: loss_of(m, ids) / 4
    )
    place = {"stage": stage, "offload_optimizer": {"device": "cpu"}} if stage else {"stage": 0}
    engine = make({"zero_optimization": place, "bf16": {"enabled": True}, "gradient_clipping": 0.05, "gradient_accumulation_steps": 4})
    losses, boundaries = [], []
    for step in range(3 if vertical else 0):
        with pytest.raises(ValueError, match="4 by gradient_accumulation_steps; got 3"):
            engine.accumulate([batch(0)] * 3, loss_of)
        losses += [loss.item() for loss in engine.accumulate([batch(1000 * step + 10 * index) for index in range(4)], loss_of)]
        engine.step()
        assert engine.global_steps == step + 1
    for index in range(0 if vertical else 12):
        boundaries.append(engine.is_gradient_accumulation_boundary())
        losses.append(engine.backward(loss_of(engine, batch(1000 * (index // 4) + 10 * (index % 4)))).item())
        engine.step()
        assert engine.global_steps == (index + 1) // 4
    assert losses == want and boundaries == [False, False, False, True] * (3 if not vertical else 0)
    found = engine.optimizer.consolidated_state_dict("fp32")
    assert all(torch.equal(found[name], master.cpu()) for (name, _), master in zip(model.named_parameters(), masters, strict=True))
    norm = engine.get_global_grad_norm()
    assert norm is not None and norm > 0.05 and engine.global_samples == 24 and engine.train_batch_size() == 8
    engine.destroy()


def test_an_fp16_step_that_overflows_is_skipped_and_leaves_the_schedule_where_it_is() -> None:
    engine = make(
        {
            "fp16": {"enabled": True, "initial_scale_power": 40, "hysteresis": 1, "loss_scale_window": 2},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto", "warmup_num_steps": 4}},
        }
    )
    scales = []
    for step in range(30):
        scales.append(engine.optimizer.scaler.scale)
        rate = engine.get_lr()
        skipped = engine.skipped_steps
        engine.backward(loss_of(engine, batch(step)))
        engine.step()
        if engine.skipped_steps > skipped:
            assert engine.optimizer.scaler.scale == scales[-1] / 2 and engine.lr_scheduler.last_epoch == engine.optimizer.counters["steps"]
            assert engine.get_lr() == rate
    assert scales[0] == 2.0**40 and 2.0 < min(scales) < 2.0**30
    assert 5 < engine.skipped_steps < 30 == engine.global_steps == engine.micro_steps
    engine.destroy()


def test_a_static_loss_scale_changes_nothing_where_nothing_underflows(torch_engine: None) -> None:
    losses = []
    for scale in (1.0, 1024):
        engine = make({"fp16": {"enabled": True, "loss_scale": scale}})
        assert engine.optimizer.scaler.scale == scale
        for step in range(4):
            losses.append(engine.backward(loss_of(engine, batch(step))).item())
            engine.step()
        engine.destroy()
    assert losses[:4] == pytest.approx(losses[4:], rel=2e-3)


@pytest.mark.parametrize("tag", (None, pytest.param("best", marks=pytest.mark.device)))
def test_a_run_goes_on_from_its_checkpoint(tag: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = {
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
        "bf16": {"enabled": True},
        "gradient_accumulation_steps": 2,
        "scheduler": {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 2, "total_num_steps": 9}},
    }

    def train(engine: zk.integrations.deepspeed_engine.Engine, first: int) -> list[float]:
        losses = []
        for index in range(first, first + 6):
            loss = loss_of(engine, batch(index))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        return losses

    engine = make(config)
    assert engine.load_checkpoint(tmp_path / "ckpt") == (None, None) and "has no checkpoint; nothing was loaded" in caplog.text
    train(engine, 0)
    assert engine.save_checkpoint(tmp_path / "ckpt", tag, client_state={"epoch": 3})
    want, rates = train(engine, 6), engine.get_lr()
    engine.destroy()

    engine = make(config)
    folder, client = engine.load_checkpoint(tmp_path / "ckpt")
    assert folder == str(tmp_path / "ckpt" / (tag or "")) and client == {"epoch": 3}
    assert engine.global_steps == 3 and engine.micro_steps == 6
    assert train(engine, 6) == want and engine.get_lr() == rates
    engine.destroy()
    for options in ({"load_module_only": True}, {"load_optimizer_states": False}):
        with pytest.raises(ValueError, match="goes on with all that was saved"):
            engine.load_checkpoint(tmp_path / "ckpt", **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="tag must not begin with 'step-'"):
        engine.save_checkpoint(tmp_path / "ckpt", "step-5")
    with pytest.raises(ValueError, match="exclude_frozen_parameters=True is not supported"):
        engine.save_checkpoint(tmp_path / "ckpt", exclude_frozen_parameters=True)
    without = make({**config, "scheduler": {}})
    with pytest.raises(CheckpointError, match="has a scheduler, and none was given"):
        without.load_checkpoint(tmp_path / "ckpt", tag)
    without.destroy()


def saved_by_ranks(root: str) -> str:
    """Save with a tag, and load at once; then let the second rank see another folder than the first."""
    engine = make({"zero_optimization": {"stage": 2}})
    engine.backward(loss_of(engine, batch(0)))
    engine.step()
    for tag in ("first", "second"):
        engine.save_checkpoint(root, tag)
        folder, _ = engine.load_checkpoint(root)
        assert folder == str(Path(root, tag))
    try:
        engine.load_checkpoint(root if engine.global_rank == 0 else root + "/elsewhere")
    except RuntimeError as error:
        return str(error)
    finally:
        engine.destroy()
    return "nothing was refused"


def test_ranks_see_what_was_saved_as_soon_as_the_call_returns(tmp_path: Path) -> None:
    for found in run_world(2, saved_by_ranks, [str(tmp_path)])[0]:
        assert re.search(r"ranks see different checkpoints in .* \(rank 0: second, rank 1: nothing\)", str(found))


@pytest.mark.device
def test_states_give_their_memory_back_and_take_it_again(tmp_path: Path) -> None:
    engine = make({"zero_optimization": {"stage": 2}})
    drive = {"device": "nvme", "nvme_path": str(tmp_path)}
    on_drive = make({"zero_optimization": {"stage": 3, "offload_optimizer": drive, "offload_param": drive}})
    for one, device in ((engine, "cpu"), (on_drive, "nvme")):
        one.backward(loss_of(one, batch(0)))
        one.step()
        want = {name: value.clone() for name, value in one.optimizer.consolidated_state_dict().items()}
        one.offload_states(device=device)
        if device == "nvme":
            with pytest.raises(RuntimeError, match="parked"):
                loss_of(one, batch(1))
        one.reload_states()
        found = one.optimizer.consolidated_state_dict()
        assert all(torch.equal(value, found[name]) for name, value in want.items())
        one.set_lr(0.5)
        assert one.get_lr() == [0.5]
    for options, says in (({"include": ["hp_params"]}, "leave include out"), ({"device": "nvme"}, "where the config has an nvme_path")):
        with pytest.raises(ValueError, match=says):
            engine.offload_states(**options)  # type: ignore[arg-type]
    engine.destroy()
    on_drive.destroy()


def test_a_checkpoint_of_deepspeed_is_refused_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "global_step4").mkdir()
    (tmp_path / "global_step4" / "mp_rank_00_model_states.pt").touch()
    (tmp_path / "latest").write_text("global_step4")
    engine = make({})
    with pytest.raises(ValueError, match=r"was written by DeepSpeed, .* with zero_to_fp32.py of DeepSpeed, then .*zk.load_pretrained"):
        engine.load_checkpoint(tmp_path)
    engine.destroy()


@pytest.mark.device
def test_the_loader_has_micro_batches_of_this_ranks_part() -> None:
    data = torch.utils.data.TensorDataset(torch.arange(11.0)[:, None])
    for drop_last, sizes in ((False, [4, 4, 3]), (True, [4, 4])):
        config = {**CLIPPED, "train_micro_batch_size_per_gpu": 4, "dataloader_drop_last": drop_last, "optimizer": {"type": "SGD"}}
        engine, _, loader, _ = zk.initialize(nn.Linear(1, 1), config=config, training_data=data)
        assert loader is not None
        batches = [x for (x,) in loader]
        assert [len(x) for x in batches] == sizes and len(set(torch.cat(batches).flatten().tolist())) == sum(sizes)
        engine.destroy()


@pytest.mark.device
def test_the_engine_is_the_model_where_it_is_nothing_of_its_own() -> None:
    engine = make({})
    model = engine.module
    assert isinstance(engine, nn.Module) and engine.variant == "plain" and engine.blocks is model.blocks
    assert engine.eval() is engine and not model.training and engine.train().training and model.training
    assert engine.device.type == DEVICE.type and engine.local_rank == 0 and engine.get_global_grad_norm() is None
    assert engine.gradient_accumulation_steps() == 1 and engine.get_lr() == [1e-2]
    with pytest.raises(AttributeError, match=r"GPT.*nothing_like_it"):
        engine.nothing_like_it  # noqa: B018
    engine.backward(loss_of(engine, batch(0)))
    engine.zero_grad()
    with pytest.raises(RuntimeError, match="no gradient"):
        engine.step()
    assert engine.micro_steps == 0
    engine.destroy()


def test_what_is_given_wins_over_the_config_and_that_is_said(caplog: pytest.LogCaptureFixture) -> None:
    config = {"optimizer": {"type": "Lamb"}, "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}}}
    engine = make(config, lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5))
    assert "not used: optimizer (one was given); scheduler (one was given)" in caplog.text
    engine.backward(loss_of(engine, batch(0)))
    engine.step()
    assert engine.get_lr() == [5e-3]
    engine.destroy()


def test_initialize_refuses_what_it_cannot_take() -> None:
    model = nn.Linear(2, 2)
    config = {"train_batch_size": 2, **CLIPPED}
    with pytest.raises(TypeError, match=r"model must be an nn\.Module; got str"):
        zk.initialize("args", config=config)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"give the config once: .*; got 0"):
        zk.initialize(model)
    with pytest.raises(ValueError, match=r"give the config once: .*; got 2"):
        zk.initialize(model, config=config, config_params=config)
    with pytest.raises(ValueError, match="there is no 'optimizer', and none was given; pass optimizer="):
        zk.initialize(model, config=config)
    with pytest.raises(TypeError, match="stages"):
        zk.initialize(model, adamw, config=config, stages=2)


def test_arguments_of_a_command_line_name_the_config(tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text(json.dumps({"train_batch_size": 2, "optimizer": {"type": "Adam", "params": {"lr": 0.5}}, **CLIPPED}))

    class Args:
        deepspeed_config = str(tmp_path / "c.json")
        local_rank = -1

    model = nn.Linear(2, 2)
    engine, optimizer, _, scheduler = zk.initialize(args=Args(), model=model, model_parameters=[{"params": [model.weight], "lr": 0.1}])
    assert [group["lr"] for group in optimizer.param_groups] == [0.1] and engine.local_rank == 0 and scheduler is None
    engine.destroy()


def run_two_ranks(stage: int) -> list[Any]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))
    config = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": stage}, "gradient_clipping": 0}
    engine, optimizer, _, _ = zk.initialize(model, adamw, config=config)
    assert engine.gradient_accumulation_steps() == 2
    assert engine.device.index == (optimizer.comm.rank if DEVICE.type == "cuda" else None)  # the device chosen: there is no LOCAL_RANK
    for index in range(6):
        x = torch.randn(2, 2, 5, generator=torch.Generator().manual_seed(index))[optimizer.comm.rank].to(engine.device)
        engine.backward(F.mse_loss(engine(x), x.sum(1, keepdim=True)))
        engine.step()
    found = [value.tolist() for value in optimizer.consolidated_state_dict().values()]
    engine.destroy()
    return found


@pytest.mark.device
def test_two_ranks_train_on_the_mean_of_their_gradients() -> None:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))
    optimizer = adamw(model.parameters())
    for index in range(6):
        for x in torch.randn(2, 2, 5, generator=torch.Generator().manual_seed(index)):
            (F.mse_loss(model(x), x.sum(1, keepdim=True)) / 4).backward()
        if index % 2:
            optimizer.step()
            optimizer.zero_grad()
    for ranks in run_world(2, run_two_ranks, [1, 3]):
        for found in ranks:
            assert not isinstance(found, Exception), found
            for mine, plain in zip(found, model.parameters(), strict=True):
                torch.testing.assert_close(torch.tensor(mine), plain.detach(), rtol=1e-5, atol=1e-6)

