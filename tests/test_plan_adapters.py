"""The plan of adapters over a frozen base: bytes are those of real optimizers over what bitsandbytes and torchao make."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import zk
from tests.test_plan import CONFIGS, GIB, compare, machine
from zk.tools.cli import app
from zk.tools.plan.adapters import BASES, adapted, base_of
from zk.tools.plan.choose import footprint
from zk.tools.plan.shape import Shape, shape_of, shape_of_module

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")

SIZES = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 96}
# as transformers writes them
QUANTIZED: dict[str, dict[str, Any]] = {
    "": {},
    "nf4": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "nf4, scales not quantized": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "int8": {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int8WeightOnlyConfig", "_version": 2}}},
    "fp8": {"quant_method": "torchao", "quant_type": {"default": {"_type": "Float8WeightOnlyConfig", "_version": 2}}},
}
# base, stage, parameters, optimizer, whether device and host are apart
REAL = [
    ("", 3, "nvme", "nvme", False),
    ("", 3, "host", "host", True),
    ("nf4", 0, "device", "device", False),
    ("nf4", 2, "device", "host", True),
    ("nf4", 3, "host", "host", False),
    ("nf4", 3, "host", "host", True),
    ("nf4", 3, "nvme", "nvme", False),
    ("nf4, scales not quantized", 3, "nvme", "host", False),
    ("int8", 3, "nvme", "nvme", False),
    ("int8", 3, "host", "nvme", True),
    ("fp8", 3, "host", "host", True),
]


def described(base: str, folder: Path) -> Shape:
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **SIZES, **({"quantization_config": QUANTIZED[base]} if base else {})}))
    return shape_of(str(folder / "config.json"))


def llama(base: str, folder: Path, rank: int) -> nn.Module:
    """What a user has: a model that transformers quantized as it was read, and PEFT's adapters."""
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    if base.startswith("nf4"):
        pytest.importorskip("bitsandbytes")
        how = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=base == "nf4")
    elif base:
        quantization = pytest.importorskip("torchao.quantization")
        how = transformers.TorchAoConfig(quantization.Int8WeightOnlyConfig() if base == "int8" else quantization.Float8WeightOnlyConfig())
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).to(torch.bfloat16)
    if base:
        model.save_pretrained(folder / "base")
        model = transformers.LlamaForCausalLM.from_pretrained(folder / "base", quantization_config=how, device_map="cpu", dtype=torch.bfloat16)
    return peft.get_peft_model(model, peft.LoraConfig(r=rank, target_modules="all-linear")).train()  # type: ignore[no-any-return]


def loss(model: Any, seed: int) -> Tensor:
    ids = torch.randint(0, SIZES["vocab_size"], (1, 5), generator=torch.Generator().manual_seed(seed))
    return model(input_ids=ids, labels=ids).loss  # type: ignore[no-any-return]


def scales_of(model: nn.Module) -> int:
    """Bytes that bitsandbytes' layers keep beside their weights."""
    states = [state for param in model.parameters() if (state := getattr(param, "quant_state", None)) is not None]
    states += [state.state2 for state in states if state.nested]
    return sum(value.nbytes for state in states for value in vars(state).values() if isinstance(value, Tensor))


@pytest.mark.parametrize(("base", "stage", "param_tier", "optimizer_tier", "apart"), REAL)
def test_bytes_are_those_of_real_optimizers(base: str, stage: int, param_tier: str, optimizer_tier: str, apart: bool, tmp_path: Path) -> None:
    drive = tmp_path / "drive"
    drive.mkdir()
    tiers: dict[str, Any] = {"param_tier": param_tier, "optimizer_tier": optimizer_tier}
    config = zk.ZeroConfig(stage=stage, dtype="bf16", **tiers, nvme_path=drive if "nvme" in tiers.values() else None)
    shape = adapted(described(base, tmp_path), "rank=4", None)
    model = llama(base, tmp_path, 4)
    assert shape.num_trained == sum(param.numel() for param in model.parameters() if param.requires_grad)
    planned = footprint(shape, config, machine(gpu_nbytes=GIB if apart else None))
    assert planned.sizes["device", "scales"] == scales_of(model)
    compare(planned, lambda: model, ".up_proj", loss, config, apart, drive)


@pytest.mark.parametrize("base", QUANTIZED)
def test_a_configuration_says_how_its_weights_are_stored(base: str, tmp_path: Path) -> None:
    shape = described(base, tmp_path)
    assert adapted(shape, "rank=4", None).units == adapted(described("", tmp_path), "rank=4", base or "bf16").units
    assert adapted(shape, None, None).units == shape.units  # what is trained whole is not quantized


def test_weights_are_what_they_stand_for_however_they_are_stored(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["llama-2-7b"][1]))
    shape = shape_of(str(tmp_path))
    config = zk.ZeroConfig(stage=3, dtype="bf16", param_tier="host", optimizer_tier="host")
    linear = 32 * (4 * 4096**2 + 3 * 4096 * 11008)
    nbytes = {}
    for base in BASES:
        over = adapted(shape, "rank=16", base or None)
        assert over.num_trained == 32 * 16 * (8 * 4096 + 3 * (4096 + 11008)) and over.num_params == shape.num_params + over.num_trained
        assert over.grown(1.01).num_trained > over.num_trained and over.grown(1.0).units == over.units
        sizes = footprint(over, config, machine()).sizes
        nbytes[base] = sizes["host", "param"] + sizes["device", "scales"] - 2 * (over.num_params - linear)
        assert sizes["host", "moments"] == 8 * over.num_trained and sizes["host", "grad"] == 2 * over.num_trained
    per_weight = {base: nbytes[base] / linear for base in nbytes}
    want = {"nf4": 0.5 + 1 / 64 + 4 / 64 / 256, "nf4, scales not quantized": 0.5625, "int8": 1.0, "fp8": 1.0, "": 2.0}
    assert per_weight == pytest.approx(want, rel=2e-3)


def test_a_model_may_bring_adapters_and_codes_of_its_own() -> None:
    quantization, peft = pytest.importorskip("torchao.quantization"), pytest.importorskip("peft")

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down, self.norm = nn.Linear(64, 96, bias=False), nn.Linear(96, 64, bias=False), nn.LayerNorm(64)

    model = nn.ModuleDict({"blocks": nn.ModuleList(Block() for _ in range(3)), "head": nn.Linear(64, 8)})
    quantization.quantize_(model["blocks"], quantization.Float8WeightOnlyConfig())
    shape = shape_of_module(peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=["up", "down"]), model), "mine")
    found = {(units.count, units.trained, units.dtype): units.numels for units in shape.units}
    assert found == {
        (3, False, torch.float8_e4m3fn): (64 * 96, 64 * 96),
        (3, False, torch.float32): (64, 96),
        (3, True, None): (2 * 64, 2 * 64, 2 * 96, 2 * 96),
        (3, False, None): (64, 64),
        (1, False, None): (8, 8 * 64),
    }
    assert len({units.block for units in shape.units if units.count == 3}) == 1
    assert {units.count for units in shape.grown(2).units} == {6, 1}
    with pytest.raises(ValueError, match="'mine' has to build its model with adapters"):
        adapted(shape, "rank=4", None)


@pytest.mark.parametrize(
    ("spec", "base", "says"),
    (
        ("rank=0", None, "--adapters takes rank=NUMBER.*got 'rank=0'"),
        ("16", None, "got '16'"),
        ("rank=16", "nf3", "--base takes nf4, int8, fp8 or the --dtype of the run; got 'nf3'"),
        ("rank=16", "fp32", "--base fp32 is not --dtype bf16"),
        (None, "nf4", "--base nf4 has no effect without --adapters"),
    ),
)
def test_adapters_that_are_not_understood_are_refused(spec: str | None, base: str | None, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        adapted(shape_of("gpt:125m"), spec, base)


@pytest.mark.parametrize(
    ("quantized", "says"),
    (
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "in 8 bits, whose layers keep a second hold on their codes.*--base nf4"),
        ({"quant_method": "gptq", "bits": 4}, "quantizes with gptq, which is not counted here"),
        ({"quant_method": "torchao", "quant_type": {"default": {"_type": "Int4WeightOnlyConfig"}}}, "torchao's Int4WeightOnlyConfig"),
    ),
)
def test_configurations_that_cannot_be_counted_are_refused_by_name(quantized: dict[str, Any], says: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **SIZES, "quantization_config": quantized}))
    with pytest.raises(ValueError, match=says):
        adapted(shape_of(str(tmp_path)), "rank=4", None)
    assert adapted(shape_of(str(tmp_path)), "rank=4", "nf4").num_trained


def test_older_configurations_are_read_too() -> None:
    assert base_of({"load_in_4bit": True}) == "nf4, scales not quantized"
    assert base_of({"quant_method": "torchao", "quant_type": "int8_weight_only"}) == "int8"
    assert base_of({}) == ""


def test_codes_of_experts_are_not_made_up(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["mixtral-8x7b"][1]))
    shape = shape_of(str(tmp_path))
    assert adapted(shape, "rank=4", None).num_trained == 32 * 4 * (4 * 4096 + 2 * (4096 + 1024))  # of attention
    with pytest.raises(ValueError, match=r"experts are one parameter .* only --base bf16 is counted"):
        adapted(shape, "rank=4", "nf4")
    with pytest.raises(ValueError, match="experts that are modules of their own, as 'moe:100m' has"):
        adapted(shape_of("moe:100m"), "rank=4", None)


def test_the_command_counts_adapters_and_refuses_by_name() -> None:
    arguments = ["plan", "gpt:7b", "--gpu", "12GiB", "--ram", "32GiB", "--adapters", "rank=16"]
    done = CliRunner().invoke(app, [*arguments, "--base", "nf4"])
    assert done.exit_code == 0 and "35.7M of them trained" in done.output and "scales of 4-bit weights" in done.output, done.output
    done = CliRunner().invoke(app, [*arguments, "--base", "nf4", "--json"])
    said = json.loads(done.output)
    assert said["recommended"]["fits"] and said["recommended"]["kinds"]["device_scales_nbytes"] and said["model"]["num_trained"] < 36e6
    done = CliRunner().invoke(app, [*arguments, "--base", "nf3"])
    assert done.exit_code == 2 and "--base takes nf4" in done.output


def test_a_frozen_base_takes_less_compute_and_is_neither_reduced_nor_written(tmp_path: Path) -> None:
    from zk.tools.plan.speed import step_of

    where = machine(world=2, per_machine=2)
    config = zk.ZeroConfig(stage=3, dtype="bf16", param_tier="nvme", optimizer_tier="nvme", nvme_path="/nvme")
    full = described("", tmp_path)
    steps = [step_of(shape, footprint(shape, config, where), config, where, 100) for shape in (full, adapted(full, "rank=1", None))]
    for resource, most in (("compute", 0.8), ("ranks", 0.75), ("disk", 0.45), ("cpu", 0.1)):
        assert 0 < steps[1].busy[resource] < most * steps[0].busy[resource], resource
