"""The plan: bytes are those of real optimizers, formulas give the papers' numbers, sizes those of known models."""

from __future__ import annotations

import dataclasses
import io
import json
import re
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn
from typer.testing import CliRunner

import zk
from benchmarks.throttled import CPU, pretend
from tests import papers, programs
from tests.world import run_world
from zk.core.events import Event
from zk.core.precision import stored_dtypes
from zk.core.units import Layout, find_units
from zk.offload.streams import Link
from zk.tools.cli import app
from zk.tools.plan import picture, report
from zk.tools.plan.choose import as_dict, as_python, consider, footprint, largest, plan, shown
from zk.tools.plan.footprint import Footprint
from zk.tools.plan.picture import draw
from zk.tools.plan.shape import Decoder, Shape, Units, decoder_of, gpt_decoder, shape_of, shape_of_module
from zk.tools.plan.speed import Machine, length, step_of
from zk.tools.train.gpt import GPT, GPTConfig
from zk.tools.train.mixture import MixtureConfig
from zk.tools.train.sizes import model_of

GIB = 1 << 30
ROOT = Path(__file__).parent.parent


def machine(**options: Any) -> Machine:
    return Machine(**{"gpu_nbytes": 32 * GIB, "ram_nbytes": 128 * GIB, "nvme_nbytes": 1 << 40, **options})


# ---- against real optimizers -----------------------------------------------------------------------------------------------------------

SMALL = GPTConfig(vocab=256, width=64, layers=3, heads=4, context=32)
WIDE = GPTConfig(vocab=512, width=256, layers=6, heads=4, context=32)
MIXTURE = MixtureConfig(width=128, layers=3, heads=4, context=32, experts=8, used=8)  # all of them, as a plan counts
# stage, parameters, optimizer, size, dtype, state_dtype, whether device and host are apart
REAL = [
    (0, "device", "nvme", SMALL, "bf16", "fp32", False),
    (1, "device", "host", WIDE, "fp16", "fp32", False),
    (2, "device", "host", SMALL, "bf16", "bf16", False),
    (3, "device", "device", WIDE, "fp32", "fp32", False),
    (3, "host", "nvme", SMALL, "fp16", "bf16", False),
    (3, "host", "nvme", SMALL, "bf16", "8bit", False),
    (3, "nvme", "nvme", WIDE, "bf16", "fp32", False),
    (3, "nvme", "host", SMALL, "fp32", "fp32", False),
    (2, "device", "device", WIDE, "bf16", "fp32", True),
    (2, "device", "host", WIDE, "bf16", "fp32", True),
    (2, "device", "nvme", WIDE, "bf16", "fp32", True),
    (3, "host", "host", WIDE, "bf16", "bf16", True),
    (3, "host", "nvme", WIDE, "bf16", "fp32", True),
    (3, "nvme", "nvme", MIXTURE, "bf16", "fp32", False),
]


class Copy:
    """Training takes a copy to be in flight until it has waited for it itself, or for all of them."""

    def __init__(self) -> None:
        self.done = False

    def wait(self) -> None:
        self.done |= threading.current_thread() is threading.main_thread()


class SlowestLink(Link):
    """A device with memory of its own. As many copies are in flight as zk allows, however fast the machine is."""

    joined = False

    def __init__(self) -> None:
        super().__init__(CPU)
        self.copies: list[Copy] = []

    def offload(self, host: Tensor, source: Tensor, after: Sequence[Event]) -> Event:
        host.copy_(source)
        self.copies.append(Copy())
        return self.copies[-1]

    def upload(self, target: Tensor, host: Tensor, after: Sequence[Event]) -> Event:
        return self.offload(target, host, after)

    def finish(self) -> None:
        """End all copies: the optimizer's step has waited for them, some in its threads."""
        for copy in self.copies:
            copy.done = True


@pytest.mark.parametrize(("stage", "param_tier", "optimizer_tier", "size", "dtype", "state_dtype", "apart"), REAL)
def test_bytes_are_those_of_real_optimizers(
    stage: int, param_tier: str, optimizer_tier: str, size: GPTConfig, dtype: str, state_dtype: str, apart: bool, tmp_path: Path
) -> None:
    drive = {"nvme_path": tmp_path} if "nvme" in (param_tier, optimizer_tier) else {}
    tiers = {"param_tier": param_tier, "optimizer_tier": optimizer_tier}
    are_real(zk.ZeroConfig(stage=stage, dtype=dtype, state_dtype=state_dtype, **tiers, **drive), size, apart, tmp_path)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("param_tier", "optimizer_tier", "apart"),
    (("device", "host", True), ("host", "host", True), ("nvme", "nvme", False)),
)
def test_bytes_of_updates_in_backward_are_those_of_real_optimizers(param_tier: str, optimizer_tier: str, apart: bool, tmp_path: Path) -> None:
    drive = {"nvme_path": tmp_path} if "nvme" in (param_tier, optimizer_tier) else {}
    stage, tiers = 2 if param_tier == "device" else 3, {"param_tier": param_tier, "optimizer_tier": optimizer_tier}
    are_real(zk.ZeroConfig(stage=stage, dtype="bf16", overlap_step="backward", **tiers, **drive), WIDE, apart, tmp_path)  # type: ignore[arg-type]


@pytest.mark.parametrize(("tier", "apart"), (("device", True), ("host", True), ("nvme", False)))
def test_bytes_of_what_computes_in_fp32_are_those_of_real_optimizers(tier: str, apart: bool, tmp_path: Path) -> None:
    drive = {"nvme_path": tmp_path} if tier == "nvme" else {}
    where: dict[str, Any] = {"param_tier": tier, "optimizer_tier": tier, **drive}
    are_real(zk.ZeroConfig(stage=3, dtype="bf16", compute_dtype="fp32", **where), WIDE, apart, tmp_path)


@pytest.mark.parametrize("order", ("horizontal", "vertical"))
@pytest.mark.parametrize(
    ("param_tier", "optimizer_tier", "apart"),
    (("nvme", "nvme", False), ("host", "nvme", True), ("host", "host", False), ("host", "host", True), ("device", "device", True)),
)
def test_bytes_of_several_micro_batches_are_those_of_real_optimizers(
    param_tier: str, optimizer_tier: str, apart: bool, order: str, tmp_path: Path
) -> None:
    drive = {"nvme_path": tmp_path} if "nvme" in (param_tier, optimizer_tier) else {}
    config = zk.ZeroConfig(stage=3, dtype="bf16", param_tier=param_tier, optimizer_tier=optimizer_tier, **drive)  # type: ignore[arg-type]
    are_real(config, WIDE, apart, tmp_path, order=order)


def adafactor(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.Adafactor(model.parameters())]


def muon(model: nn.Module) -> list[torch.optim.Optimizer]:
    matrices = {param for name, param in model.named_parameters() if param.ndim == 2 and "blocks" in name}
    return [torch.optim.Muon(matrices), torch.optim.AdamW([param for param in model.parameters() if param not in matrices])]


@pytest.mark.parametrize(
    ("optimizer", "stage", "param_tier", "optimizer_tier", "dtype"),
    [
        ("adafactor", 3, "nvme", "nvme", "fp16"),
        ("muon", 2, "device", "host", "bf16"),
    ],
)
def test_bytes_of_whole_parameters_are_those_of_real_optimizers(
    optimizer: str, stage: int, param_tier: str, optimizer_tier: str, dtype: str, tmp_path: Path
) -> None:
    drive = {"nvme_path": tmp_path} if "nvme" in (param_tier, optimizer_tier) else {}
    config = zk.ZeroConfig(stage=stage, dtype=dtype, param_tier=param_tier, optimizer_tier=optimizer_tier, **drive)  # type: ignore[arg-type]
    are_real(config, WIDE, False, tmp_path, optimizer, {"adafactor": adafactor, "muon": muon}[optimizer])


def adamw(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW(model.parameters())]


def are_real(
    config: zk.ZeroConfig,
    size: GPTConfig,
    apart: bool,
    tmp_path: Path,
    name: str = "adamw",
    made: Callable[[nn.Module], list[torch.optim.Optimizer]] = adamw,
    order: str = "",
) -> None:
    """Check the bytes that are planned for a config against those of the optimizer that is ``made``; ``order``: of two micro-batches."""
    shape = dataclasses.replace(Shape.of(gpt_decoder(size), "gpt"), optimizer=name)
    planned = footprint(shape, config, machine(gpu_nbytes=GIB if apart else None), micro_batches=2 if order else 1)

    def loss(model: Any, seed: int) -> Tensor:
        ids = torch.randint(0, size.vocab, (1, 5), generator=torch.Generator().manual_seed(seed))
        return model(ids[:, :-1], ids[:, 1:])  # type: ignore[no-any-return]

    compare(planned, lambda: model_of(size), ".up", loss, config, apart, tmp_path, made, order)


def compare(
    planned: Footprint,
    build: Callable[[], nn.Module],
    inside: str,
    loss: Callable[[nn.Module, int], Tensor],
    config: zk.ZeroConfig,
    apart: bool,
    folder: Path,
    made: Callable[[nn.Module], list[torch.optim.Optimizer]] = adamw,
    order: str = "",
) -> None:
    """Check what was planned against the third step of a real optimizer. ``inside``: how the names of layers end that come late in a block."""
    real: Counter[tuple[str, str]] = Counter()
    gathered = 0

    def look(*_: object) -> None:
        nonlocal gathered
        gathered = max(gathered, int(optimizer.metrics()["device_gathered_nbytes"]))

    link = SlowestLink()
    with pretend(link) if apart else torch.enable_grad():
        model = build()
        with zk.ZeroOptimizer(model, made(model), config) as optimizer:
            for name, module in model.named_modules():
                if name.endswith(inside):
                    module.register_forward_hook(look)
            file_nbytes = sum(file.stat().st_size for file in folder.rglob("state*.bin"))
            for seed in range(3):
                if order == "vertical":
                    optimizer.accumulate([seed, seed + 3], loss)
                for micro_batch in [] if order == "vertical" else [seed, seed + 3] if order else [seed]:
                    optimizer.backward(loss(model, micro_batch))
                if seed < 2:
                    optimizer.step()
                    optimizer.zero_grad()
                    link.finish()
            optimizer.clip_grad_norm_(1.0)  # all gradients have arrived where they rest
            for name, nbytes in optimizer.metrics().items():
                tier, _, kind = name.removesuffix("_nbytes").partition("_")
                if name.endswith("_nbytes") and tier in ("device", "host", "nvme") and kind != "gathered":
                    real[tier, kind] += int(nbytes)
    want = Counter(planned.sizes)
    # metrics() adds buckets to gradients, under the name of where they go if the device is a CPU, also one that is pretended to be something else
    grad = "device" if config.optimizer_tier == "device" else "host", "grad"
    want[grad] += (bucket := want.pop(("device", "bucket"), 0))
    for tier in ("device", "host", "nvme"):
        want[tier, "grad"] += want.pop((tier, "sums"), 0)
    if order == "horizontal":  # whose buckets are smaller than those of the other order
        assert want[grad] - bucket <= real[grad] <= want[grad]
        real[grad] = want[grad]
    buffers, spare = want.pop(("host", "buffer"), 0), want.pop(("nvme", "spare"), 0)
    most_gathered = want.pop(("device", "gathered"), 0)
    want.pop(("host", "staging"), None)
    for kind in ("fresh", "dequantized", "scales"):  # autograd's, and of packages that quantize
        want.pop(("device", kind), None)
    used = real.pop(("host", "buffer"), 0)
    assert +real == +want
    assert gathered == most_gathered
    assert 0.5 * buffers <= used <= buffers  # made as they are needed: two thirds of them also by a drive that answers at once
    assert file_nbytes == spare + sum(nbytes for (tier, _), nbytes in want.items() if tier == "nvme")  # to the byte


def on_two_ranks(case: tuple[int, str, str]) -> tuple[dict[str, float], int]:
    """metrics() before the second step, and the most that was gathered at once."""
    stage, param_tier, optimizer_tier = case
    gathered = 0

    def look(*_: object) -> None:
        nonlocal gathered
        gathered = max(gathered, int(optimizer.metrics()["device_gathered_nbytes"]))

    model = GPT(WIDE)
    with zk.ZeroOptimizer(
        model, torch.optim.AdamW(model.parameters()), stage=stage, param_tier=param_tier, optimizer_tier=optimizer_tier, dtype="bf16"
    ) as optimizer:
        for block in model.blocks:
            block.up.register_forward_hook(look)  # type: ignore[union-attr, operator]
        for seed in range(2):
            ids = torch.randint(0, WIDE.vocab, (1, 5), generator=torch.Generator().manual_seed(seed))
            model(ids[:, :-1], ids[:, 1:]).backward()
            if seed < 1:
                optimizer.step()
                optimizer.zero_grad()
        return optimizer.metrics(), gathered


def test_bytes_of_each_of_two_ranks_are_those_of_real_optimizers() -> None:
    cases = [(0, "device", "host"), (1, "device", "device"), (3, "device", "device"), (3, "host", "host")]
    for case, ranks in zip(cases, run_world(2, on_two_ranks, cases), strict=True):
        config = zk.ZeroConfig(stage=case[0], param_tier=case[1], optimizer_tier=case[2], dtype="bf16")  # type: ignore[arg-type]
        want = footprint(Shape.of(gpt_decoder(WIDE), "gpt"), config, machine(gpu_nbytes=None, world=2, per_machine=2))
        for metrics, gathered in ranks:
            for kind in ("param", "master", "moments"):
                real = sum(metrics.get(f"{tier}_{kind}_nbytes", 0) for tier in ("device", "host"))
                assert real == sum(want.sizes[tier, kind] for tier in ("device", "host")), (case, kind)
            grads = sum(metrics.get(f"{tier}_grad_nbytes", 0) for tier in ("device", "host"))
            most = sum(nbytes for (_, kind), nbytes in want.sizes.items() if kind in ("grad", "bucket"))
            assert 0.5 * most < grads <= most, (case, grads, most)  # some buckets are in flight while others are filled
            assert gathered == pytest.approx(want.sizes["device", "gathered"], rel=0.1), case


def test_a_trillion_parameters_on_512_ranks_are_laid_out_as_the_formula_says() -> None:
    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(125_000, 125_000))
            self.bias = nn.Parameter(torch.empty(125_000 + 7))

    with zk.deferred_init("cpu"):
        model = nn.Sequential(*(Large() for _ in range(64)))
    num_params = sum(param.numel() for param in model.parameters())
    assert num_params > 1e12
    units = find_units(model, dict.fromkeys(model.parameters(), 0), stored_dtypes(model, torch.bfloat16))
    layouts = [Layout.of([param.numel() for param in unit.params], 512) for unit in units]
    shard = sum(layout.shard_numel for layout in layouts)
    config = zk.ZeroConfig(stage=3, dtype="bf16", param_tier="nvme", optimizer_tier="nvme", nvme_path="/nvme")
    found = footprint(shape_of_module(model, "large"), config, machine(world=512, per_machine=8))
    for kind, size in (("param", 2), ("grad", 2), ("master", 2), ("moments", 8)):
        assert found.sizes["nvme", kind] == size * shard
    assert shard == pytest.approx(num_params / 512, rel=1e-6)
    assert found.on("nvme") == pytest.approx(16 * num_params / 512, rel=1e-3)  # 31 GB
    assert found.sizes["device", "gathered"] == 2 * sum(layout.numel for layout in layouts[:2])


# ---- shapes ----------------------------------------------------------------------------------------------------------------------------

CONFIGS: dict[str, tuple[int, dict[str, Any]]] = {
    "gpt2": (124_439_808, {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "vocab_size": 50257}),
    "llama-2-7b": (
        6_738_415_616,
        {
            "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "intermediate_size": 11008,
            "vocab_size": 32000, "tie_word_embeddings": False,
        },
    ),
    "llama-3-8b": (
        8_030_261_248,
        {
            "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
            "intermediate_size": 14336, "vocab_size": 128256,
        },
    ),
    "mistral-7b": (
        7_241_732_096,
        {
            "model_type": "mistral", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
            "intermediate_size": 14336, "vocab_size": 32000,
        },
    ),
    "qwen2-0.5b": (
        494_032_768,
        {
            "model_type": "qwen2", "hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
            "intermediate_size": 4864, "vocab_size": 151936, "tie_word_embeddings": True,
        },
    ),
    "qwen3-0.6b": (
        596_049_920,
        {
            "model_type": "qwen3", "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
            "head_dim": 128, "intermediate_size": 3072, "vocab_size": 151936, "tie_word_embeddings": True,
        },
    ),
    "gemma-2b": (
        2_506_172_416,
        {
            "model_type": "gemma", "hidden_size": 2048, "num_hidden_layers": 18, "num_attention_heads": 8, "num_key_value_heads": 1,
            "head_dim": 256, "intermediate_size": 16384, "vocab_size": 256000,
        },
    ),
    "phi-3-mini": (
        3_821_079_552,
        {
            "model_type": "phi3", "hidden_size": 3072, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
            "intermediate_size": 8192, "vocab_size": 32064, "tie_word_embeddings": False,
        },
    ),
    "pythia-160m": (
        162_322_944,
        {
            "model_type": "gpt_neox", "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072,
            "vocab_size": 50304,
        },
    ),
    "opt-125m": (
        125_239_296,
        {
            "model_type": "opt", "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "ffn_dim": 3072, "vocab_size": 50272,
            "max_position_embeddings": 2048, "word_embed_proj_dim": 768,
        },
    ),
    "mixtral-8x7b": (
        46_702_792_704,
        {
            "model_type": "mixtral", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
            "intermediate_size": 14336, "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2,
        },
    ),
    "qwen3-30b-a3b": (
        30_532_122_624,
        {
            "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
            "head_dim": 128, "intermediate_size": 6144, "moe_intermediate_size": 768, "vocab_size": 151936, "num_experts": 128,
            "num_experts_per_tok": 8, "decoder_sparse_step": 1, "mlp_only_layers": [], "tie_word_embeddings": False,
        },
    ),
    "gpt-oss-20b": (
        20_914_757_184,
        {
            "model_type": "gpt_oss", "hidden_size": 2880, "num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8,
            "head_dim": 64, "intermediate_size": 2880, "vocab_size": 201088, "num_local_experts": 32, "num_experts_per_tok": 4,
            "attention_bias": True, "tie_word_embeddings": False,
        },
    ),
    "bloom-560m": (559_214_592, {"model_type": "bloom", "hidden_size": 1024, "n_layer": 24, "n_head": 16, "vocab_size": 250880}),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_configs_of_known_models_have_their_number_of_parameters(name: str, tmp_path: Path) -> None:
    num_params, config = CONFIGS[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert shape_of(str(tmp_path)).num_params == shape_of(str(tmp_path / "config.json")).num_params == num_params


def test_of_experts_a_token_uses_a_few(tmp_path: Path) -> None:
    name, active = "qwen3-30b-a3b", 3_353_032_704
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name][1]))
    shape = shape_of(str(tmp_path))
    assert shape.num_active == active and shape_of("gpt:125m").num_active == shape_of("gpt:125m").num_params
    assert Shape.of(decoder_of(CONFIGS["mixtral-8x7b"][1]), "mixtral").num_active == 12_879_925_248
    done = CliRunner().invoke(app, ["plan", str(tmp_path), "--gpu", "80GiB", "--ram", "512GiB", "--nvme", "2TiB", "--json"])
    found = json.loads(done.stdout)
    assert found["model"]["num_active"] == active < found["model"]["num_params"] == CONFIGS[name][0]
    best = found["recommended"]
    assert best["fits"] and best["nbytes"]["nvme"] + best["nbytes"]["host"] + best["nbytes"]["device"] >= 12 * CONFIGS[name][0]


def test_a_mixture_of_experts_is_planned_by_name() -> None:
    """The sizes of Qwen3-30B-A3B in the model that `zk train` builds: biases and a table of positions are what is between them."""
    done = CliRunner().invoke(app, ["plan", "moe:100m", "--gpu", "256MiB", "--ram", "200MiB", "--nvme", "1TiB"], env={"COLUMNS": "160"})
    assert "moe:100m: 107M parameters (6.89M for each token), 7 blocks, width 320" in done.stdout
    assert "param_tier='nvme', optimizer_tier='nvme'" in done.stdout
    shape = shape_of("moe:30B-A3B")
    assert shape.num_params == pytest.approx(CONFIGS["qwen3-30b-a3b"][0], rel=2e-4) and shape.num_active == pytest.approx(3_353_032_704, rel=1e-3)
    assert (shape.layers, shape.width) == (48, 2048) and 30.45e9 < shape.num_params < 30.55e9 and 3.355e9 < shape.num_active < 3.365e9
    assert shape.grown(2).num_params == pytest.approx(8 * shape.num_params, rel=0.05)
    for spec, about in (("moe:100m", 100e6), ("moe:1b", 1e9), ("moe:30b", 30e9)):
        sized = shape_of(spec)
        assert sized.num_params == pytest.approx(about, rel=0.1) and 15.5 < sized.num_params / sized.num_active < 17.5


def test_experts_that_travel_alone_take_less_room_in_use() -> None:
    """At stage 3 in one process; over ranks they travel with their block, as they do in the optimizer."""
    shape = shape_of("moe:1b")
    config = zk.ZeroConfig(stage=3, dtype="bf16", param_tier="nvme", optimizer_tier="nvme", nvme_path="/nvme")
    one, two = (footprint(shape, config, machine(world=world, per_machine=world)) for world in (1, 2))
    blocks, rest = shape.units
    own, expert = (2 * sum(part.numels) for part in blocks.parts)
    assert one.sizes["device", "gathered"] == pytest.approx(2 * rest.numel + 2 * own + expert, rel=0.01)
    assert two.sizes["device", "gathered"] == pytest.approx(2 * rest.numel + 2 * (own + 128 * expert), rel=0.01)
    assert one.on("nvme", "moments") == pytest.approx(2 * two.on("nvme", "moments"), rel=0.01)


@pytest.mark.parametrize("family", ("Mixtral", "Qwen3Moe", "GptOss"))
def test_mixtures_of_experts_are_counted_parameter_by_parameter(family: str) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    config = getattr(transformers, f"{family}Config")(**sizes, vocab_size=64, num_local_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
    with torch.device("meta"):
        model = getattr(transformers, f"{family}ForCausalLM")(config)
    counted = Shape.of(decoder_of(config.to_dict()), family)
    real = shape_of_module(model, family)
    assert counted.units == real.units and counted.num_params == sum(param.numel() for param in model.parameters())


def test_experts_that_cannot_be_counted_are_refused(tmp_path: Path) -> None:
    for change, message in (({"mlp_only_layers": [0]}, "take turns"), ({"num_experts_per_tok": 200}, "a token goes to 200 experts")):
        (tmp_path / "config.json").write_text(json.dumps({**CONFIGS["qwen3-30b-a3b"][1], **change}))
        with pytest.raises(ValueError, match=message):
            shape_of(str(tmp_path))


def test_the_built_in_gpt_is_counted_parameter_by_parameter() -> None:
    for config in (SMALL, WIDE, MIXTURE):
        model = model_of(config)
        counted, real = Shape.of(gpt_decoder(config), "gpt"), shape_of_module(model, "gpt")
        assert tuple(dataclasses.replace(units, parts=()) for units in counted.units) == real.units
        assert counted.num_params == sum(param.numel() for param in model.parameters())
        assert (counted.width, counted.vocab, counted.layers) == (real.width, real.vocab, real.layers)
        assert counted.ffn == (real.ffn if config is not MIXTURE else 8 * 2 * MIXTURE.inner)


@pytest.mark.parametrize(("spec", "num_params"), (("gpt:125m", 125e6), ("gpt:1.3B", 1.3e9), ("GPT:10B", 10e9), ("gpt:175b", 175e9), ("gpt:1t", 1e12)))
def test_built_in_sizes_have_about_that_many_parameters(spec: str, num_params: float) -> None:
    assert shape_of(spec).num_params == pytest.approx(num_params, rel=0.06)


def a_factory() -> nn.Module:
    return GPT(SMALL)


def test_a_factory_is_built_without_memory_and_grows_in_blocks() -> None:
    shape = shape_of("tests.test_plan:a_factory")
    assert shape.num_params == sum(param.numel() for param in GPT(SMALL).parameters())
    grown = shape.grown(4)
    assert grown.layers == 12 and grown.num_params - shape.num_params == 9 * sum(shape.units[0].numels)


def test_a_decoder_grows_in_width_and_depth() -> None:
    shape = shape_of("gpt:10b")
    assert shape.grown(2).num_params == pytest.approx(8 * shape.num_params, rel=0.05)


@pytest.mark.parametrize(
    ("spec", "says"),
    (
        ("gpt:huge", "takes a size .* or any of .*width.*got 'huge'"),
        ("gpt:layers=0", "got 'layers=0'"),
        ("gpt:width=30,heads=4", "multiple of heads; got 30 and 4"),
        ("what is this", "a model is gpt:SIZE"),
        ("no.such:thing", "is neither gpt:SIZE.*one of llama:1b, .*No module named"),
        ("tests.test_plan:machine", "must return an nn.Module; it returned a Machine"),
        ("zk.tools.train.gpt:GPT", "to call without arguments .*'config'"),
        ("zk.tools.train.gpt:__name__", "to call without arguments"),
    ),
)
def test_models_that_are_not_understood_are_refused(spec: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        shape_of(spec)


def test_configs_that_are_not_understood_are_refused() -> None:
    with pytest.raises(ValueError, match=r"model_type 'mamba' is not one of llama.*module:factory"):
        decoder_of({"model_type": "mamba"})
    with pytest.raises(ValueError, match="has none of hidden_size"):
        decoder_of({"model_type": "llama"})
    with pytest.raises(ValueError, match="hidden_size must be a number above 0; got '12'"):
        decoder_of({"model_type": "llama", "hidden_size": "12"})


# ---- the papers ------------------------------------------------------------------------------------------------------------------------


def test_zero_figure_1() -> None:
    """7.5 billion parameters on 64 GPUs."""
    assert [round(papers.zero_nbytes(7.5e9, 64, stage) / 1e9, 1) for stage in range(4)] == [120.0, 31.4, 16.6, 1.9]


# trillions of parameters; layers, hidden, heads; TiB of states, of all activations of a node, of its checkpoints; GiB of working memory
INFINITY_TABLE = [
    (0.10, papers.Transformer(80, 10 * 1024, 128), 1.83, 2.03, 0.05, None, 1.63),
    (0.50, papers.Transformer(100, 20 * 1024, 160), 9.16, 3.91, 0.12, 6.25, 2.50),
    (1.01, papers.Transformer(128, 25 * 1024, 256), 18.31, 7.13, 0.20, 9.77, 3.56),
    (10.05, papers.Transformer(195, 64 * 1024, 512), 182.81, 24.38, 0.76, 64.00, 8.00),
    (101.47, papers.Transformer(315, 160 * 1024, 1024), 1845.70, 88.59, 3.08, 400.00, 18.00),
]


@pytest.mark.parametrize(("trillions", "model", "states", "activations", "checkpoints", "states_working", "activations_working"), INFINITY_TABLE)
def test_zero_infinity_figure_2a(
    trillions: float,
    model: papers.Transformer,
    states: float,
    activations: float,
    checkpoints: float,
    states_working: float | None,
    activations_working: float,
) -> None:
    """Sequences of 1024; a batch of 32 for a node's checkpoints, of 4 on each of its 16 GPUs for what is computed."""
    assert model.num_params / 1e12 == pytest.approx(trillions, abs=0.006)
    assert model.states_nbytes / 2**40 == pytest.approx(states, abs=0.006)
    assert model.checkpoints_nbytes(batch=32) / 2**40 == pytest.approx(checkpoints, abs=0.006)
    assert model.activations_working_nbytes(batch=4) / GIB == pytest.approx(activations_working, abs=0.006)
    assert 16 * model.layers * model.activations_working_nbytes(batch=4) / 2**40 == pytest.approx(activations, abs=0.006)
    if states_working is not None:
        assert model.states_working_nbytes / GIB == pytest.approx(states_working, abs=0.006)


def test_zero_infinity_section_4_bandwidths() -> None:
    peak = 70e12  # a V100, as they take it
    params = papers.params_intensity(seq=1024, batch=1)
    assert papers.efficiency(params, 70e9, peak) > 0.5 and papers.bandwidth_for(0.5, params, peak) == pytest.approx(70e9, rel=0.03)
    optimizer = papers.optimizer_intensity(seq=1024, batch=2)
    assert papers.efficiency(optimizer, 1.5e12, peak) > 0.9
    assert papers.bandwidth_for(0.9, optimizer, peak) == pytest.approx(1.5e12, rel=0.2)  # "nearly 1.5 TB/s"
    assert papers.efficiency(papers.checkpoints_intensity(2048), 2e9, peak) > 0.5
    assert papers.bandwidth_for(0.5, papers.checkpoints_intensity(8192), peak) < 1e9


def test_largest_models_on_one_dgx_2_are_below_their_bounds() -> None:
    """16 GPUs of 32 GB, 1.5 TB of host memory, 28 TB of NVMe; the sizes are those that were trained."""
    gpu, host, nvme = 32 * GIB, 1.5e12, 28e12
    assert 1.4e9 <= papers.zero_largest(gpu, 16, 0) < 2.2e9
    assert 13e9 <= papers.offload_largest(gpu) < 2 * 13e9
    assert 20e9 <= papers.zero_largest(gpu, 16, 3) < 2 * 20e9
    assert 70e9 <= papers.infinity_largest(host) < 80e9
    assert 1e12 <= papers.infinity_largest(nvme) < 1.5e12
    assert 32e12 <= papers.infinity_largest(32 * nvme) < 45e12  # 512 GPUs


def test_a_layer_of_64k_needs_64_gib_and_a_tile_its_share() -> None:
    assert papers.linear_nbytes(64 * 1024) == 64 * GIB
    assert papers.linear_nbytes(64 * 1024, tiles=16) == 4 * GIB


# ---- choices, times, output ------------------------------------------------------------------------------------------------------------


def test_what_is_recommended_fits_and_is_the_fastest_that_does() -> None:
    found = plan(shape_of("gpt:10b"), machine(), 8192)
    assert found.best is not None and found.best.fits
    assert found.best.step.seconds == min(option.step.seconds for option in found.options if option.fits)
    for option in found.options:
        assert option.fits == all(option.found.on(tier) <= machine().capacity(tier) for tier in ("device", "host", "nvme"))
    made = eval(as_python(found.best.config), {"zk": zk})
    assert made == found.best.config == zk.ZeroConfig(**json.loads(json.dumps(shown(found.best.config))))


def test_the_largest_model_fits_and_one_larger_does_not() -> None:
    config = zk.ZeroConfig(stage=3, dtype="bf16", param_tier="nvme", optimizer_tier="nvme", nvme_path="/nvme")
    found = largest(shape_of("gpt:1b"), config, machine(), 8192)
    assert found is not None
    assert not machine().lacks(footprint(found, config, machine(), 8192))
    assert machine().lacks(footprint(found.grown(1.05), config, machine(), 8192))
    assert found.num_params == pytest.approx((1 << 40) / 16, rel=0.03)
    small = machine(gpu_nbytes=1 << 20)
    assert largest(shape_of("gpt:1b"), config, small, 8192) is None


def test_more_memory_is_never_worse() -> None:
    sizes = [plan(shape_of("gpt:1b"), machine(ram_nbytes=ram * GIB), 2048).largest["host"][0].num_params for ram in (32, 128)]
    assert sizes[1] > 3 * sizes[0]


@pytest.mark.parametrize(
    ("times", "inside", "beside"),
    (((30, 60, 15, 15), 855, 765), ((15, 30, 70, 20), 1150, 1185), ((15, 30, 20, 70), 940, 855), ((40, 40, 40, 40), 1000, 760)),
)
def test_steps_are_those_of_the_model_that_was_measured(times: tuple[int, int, int, int], inside: float, beside: float) -> None:
    """benchmarks/overlap_model.py: 8 units; milliseconds of one in forward, backward, on the link, in its update."""
    forward, backward, link, update = (8 * ms for ms in times)
    phases = ({"compute": forward}, {"compute": backward, "link": link}, {"link": link, "cpu": update})
    assert sum(length(phase, 8) for phase in phases) == pytest.approx(inside, rel=0.15)
    both = ({"compute": backward, "link": link}, {"compute": forward, "link": link, "cpu": update})
    assert sum(length(phase, 8) for phase in both) == pytest.approx(beside, rel=0.15)


@pytest.mark.parametrize(
    ("times", "beside", "backward"), (((30, 15, 15), 2205, 2205), ((15, 20, 70), 2125, 1575), ((10, 20, 100), 2390, 1940), ((40, 40, 40), 3000, 3000))
)
def test_updates_in_backward_take_what_the_model_says_that_was_measured(times: tuple[int, int, int], beside: float, backward: float) -> None:
    """Formulas of benchmarks/overlap_model.py, of 18 units; milliseconds of one in forward, a third of backward, on the link, and in its update."""
    shape = shape_of("gpt:1b")
    count, forward, link, update = shape.num_params, *(sum(units.count for units in shape.units) * ms / 1e3 for ms in times)
    rates = {"tflops": 2 * count * 8192 / forward / 1e12, "link_gbps": 2 * count / link / 1e9, "cpu_adam": count / update / 1e9}
    config, where = zk.ZeroConfig(stage=2, dtype="bf16", optimizer_tier="host"), machine(gpu_nbytes=80 * GIB, **rates)
    found = footprint(shape, config, where, 8192)

    def seconds_with(overlap_step: bool | str, shadows: float = 1.0) -> float:
        return step_of(shape, found, config, where, 8192, overlap_step, shadows=shadows).seconds

    assert seconds_with(True) == pytest.approx(beside / 1e3, rel=0.02)
    assert seconds_with("backward") == pytest.approx(backward / 1e3, rel=0.06)
    # where there is memory for few, few begin early
    found_with = [seconds_with("backward", shadows) for shadows in (1.0, 0.5, 0.2, 0.0)]
    assert found_with == sorted(found_with) and found_with[-1] == seconds_with(True)


def test_updates_in_backward_are_planned_in_memory_that_is_left() -> None:
    """Half of it, as without a budget; and where there is none they are not recommended, nor is a machine too small for them."""
    config = zk.ZeroConfig(stage=2, dtype="bf16", optimizer_tier="host", update_on="host", overlap_step="auto")
    shape, shadows = shape_of("gpt:7.6b"), []
    for ram in (512, 192, 128, 120):
        where = machine(gpu_nbytes=141 * 10**9, ram_nbytes=ram * GIB, tflops=600, link_gbps=50, cpu_adam=4.0)
        found = consider(shape, config, where, 8192)
        assert found is not None and found.fits, ram
        shadows.append((found.config.overlap_step, found.found.sizes["host", "shadow"]))
        assert {kind for _, kind in found.found.sizes} <= report._KINDS.keys() & (picture._COLORS.keys() | {"scales", "dequantized"})
        assert found.found.on("host") <= where.capacity("host")
    (first, whole), (second, some), (_, few), (last, none) = shadows
    assert first == second == "backward" and last is True
    assert 0.999 < whole / (12 * shape.num_params) < 1.01 and whole > some > few > none == 0


@pytest.mark.parametrize(
    ("slow", "tiers", "bound"),
    (
        ({"tflops": 0.1}, ("host", "host"), "compute"),
        ({"link_gbps": 0.01}, ("host", "host"), "link"),
        ({"cpu_adam": 0.001}, ("host", "host"), "cpu"),
        ({"disk_gbps": 0.01}, ("nvme", "nvme"), "disk"),
        ({"fabric_gbps": 0.001}, ("host", "host"), "ranks"),
    ),
)
def test_a_slow_resource_is_what_a_step_is_bound_by(slow: dict[str, float], tiers: tuple[str, str], bound: str) -> None:
    where, shape = machine(world=2, per_machine=2, **slow), shape_of("gpt:1b")
    drive = {"nvme_path": "/nvme"} if "nvme" in tiers else {}
    config = zk.ZeroConfig(stage=3, dtype="bf16", param_tier=tiers[0], optimizer_tier=tiers[1], **drive)  # type: ignore[arg-type]
    step = step_of(shape, footprint(shape, config, where, 8192), config, where, 8192)
    assert step.bound == bound and step.seconds >= step.busy[bound] * 0.99
    assert max(step.busy.values()) <= step.seconds <= sum(step.busy.values()) * 1.01


def test_compute_alone_takes_its_operations() -> None:
    shape = Shape("x", (Units((1000, 1000), 10), Units((500,), 1)), 10, 40, 0)
    option = consider(shape, zk.ZeroConfig(stage=2, dtype="bf16"), machine(tflops=1e-6), 100)
    assert option is not None and option.step.seconds == pytest.approx(8 * shape.num_params * 100 / 1e6)


def test_block_by_block_the_number_of_micro_batches_moves_nothing() -> None:
    """Bytes for each parameter on the drive, read and written, as in benchmarks/results: parameters twice, the gradient once, the update."""
    shape, where = shape_of("gpt:1b"), machine()
    config = zk.ZeroConfig(stage=3, dtype="bf16", param_tier="nvme", optimizer_tier="nvme", nvme_path="/nvme")
    found = footprint(shape, config, where)

    def moved(micro_batches: int, vertical: bool) -> dict[str, float]:
        step = step_of(shape, found, config, where, 1 << 16, False, micro_batches, vertical)
        return {resource: nbytes / shape.num_params for resource, nbytes in step.moved.items()}

    assert moved(8, True) == moved(32, True)
    assert moved(8, True)["disk"] == pytest.approx(4 + 4 + 4 + 4 + 20, rel=0.01)
    assert moved(8, False)["disk"] == pytest.approx(8 * 4 + 15 * 4 + 4 + 4 + 20, rel=0.01)
    assert moved(8, False)["link"] == pytest.approx(8 * moved(1, False)["link"], rel=0.1)
    option = consider(shape, config, where, 1 << 16, 8)
    assert option is not None and option.vertical and option.other is not None and option.other.seconds > option.step.seconds
    with pytest.raises(ValueError, match="--accumulate must divide --tokens"):
        plan(shape, where, 1000, micro_batches=3)


def test_frozen_units_have_parameters_only() -> None:
    config = zk.ZeroConfig(stage=2, dtype="bf16")
    found = footprint(Shape("x", (Units((64,), 2, trained=False), Units((640,), 1)), 1, 1, 0), config, machine())
    sizes = {kind: nbytes for (tier, kind), nbytes in found.sizes.items() if tier == "device"}
    assert sizes == {"param": 2 * 768, "fresh": 1280, "grad": 1280, "master": 1280, "moments": 5120} and len(found.sizes) == 5


def test_without_an_accelerator_the_device_is_the_host() -> None:
    found = plan(shape_of("gpt:125m"), machine(gpu_nbytes=None, nvme_nbytes=0), 512)
    assert all(option.found.on("device") == 0 < option.found.on("host") for option in found.options)
    assert found.best is not None and found.best.step.busy["link"] == 0


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return programs.run("-m", "zk", "plan", *arguments, env={"PATH": "", "COLUMNS": "160"})


def test_the_command_prints_json_and_pictures(tmp_path: Path) -> None:
    done = run("gpt:1.3b", "--gpu", "16GiB", "--ram", "64GiB", "--nvme", "500GB", "--world", "2", "--json", "--plot", str(tmp_path))
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["model"]["num_params"] == shape_of("gpt:1.3b").num_params and said["recommended"]["fits"]
    assert set(said["largest"]) == {"device", "host", "nvme"}
    assert zk.ZeroConfig(**said["recommended"]["config"]).dtype == torch.bfloat16
    assert {path.name for path in tmp_path.iterdir()} == {"largest.png", "memory.png", "efficiency.png"}


def test_no_more_ranks_share_a_machine_than_there_are() -> None:
    found = [
        json.loads(CliRunner().invoke(app, ["plan", "gpt:1b", "--gpu", "24GiB", "--ram", "64GiB", "--world", "2", *more, "--json"]).stdout)
        for more in ([], ["--per-machine", "8"])
    ]
    assert found[0] == found[1] and found[0]["machine"]["per_machine"] == 2


def test_the_command_plans_for_compute_in_fp32() -> None:
    plain, wide = (json.loads(run("gpt:125m", "--ram", "8GiB", "--json", *more).stdout) for more in ((), ("--compute-dtype", "fp32")))
    assert {option["config"].get("compute_dtype") for option in wide["options"]} == {"fp32"}
    assert {option["config"]["stage"] for option in wide["options"]} == {3}
    narrow = {tuple(option["config"].get(tier) for tier in ("stage", "param_tier", "optimizer_tier")): option["kinds"] for option in plain["options"]}
    for option in wide["options"]:
        kinds = narrow[tuple(option["config"].get(tier) for tier in ("stage", "param_tier", "optimizer_tier"))]
        assert all(option["kinds"][kind] == nbytes for kind, nbytes in kinds.items() if kind.split("_", 1)[1] in ("param_nbytes", "grad_nbytes"))
        assert option["kinds"]["device_activations_nbytes"] > kinds["device_activations_nbytes"] and option["kinds"]["device_gathered_nbytes"] > 0


def test_the_command_prints_tables_and_refuses_by_name() -> None:
    done = run("gpt:125m", "--gpu", "24GiB", "--ram", "32GiB")
    assert done.returncode == 0 and "Recommended" in done.stdout and "zk.ZeroConfig(stage=" in done.stdout, done.stdout + done.stderr
    done = run("gpt:1.3b", "--gpu", "8GiB", "--ram", "8GiB", "--nvme", "1TiB", "--accumulate", "8")
    assert done.returncode == 0 and "8 micro-batches of 1,024 tokens" in done.stdout and "block by block (accumulate)" in done.stdout
    done = run("gpt:125m", "--gpu", "lots")
    assert done.returncode == 2 and "--gpu must be a number of bytes" in done.stderr
    done = run("gpt:125m", "--link", "0")
    assert done.returncode == 2 and "--link must be a rate above 0" in done.stderr


def test_rates_are_measured(tmp_path: Path) -> None:
    done = run("gpt:125m", "--gpu", "none", "--ram", "8GiB", "--nvme", "8GiB", "--measure", "--nvme-path", str(tmp_path), "--json")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)["machine"]
    assert said["cpu_adam"] != 2.5 and said["cpu_adam"] > 0 and said["disk_gbps"] != 3.0 and said["disk_gbps"] > 0
    assert not list(tmp_path.iterdir())


def test_pictures_are_left_out_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert draw(plan(shape_of("gpt:125m"), machine(), 512), tmp_path) == []


def test_everything_is_json_for_decoders_of_any_kind() -> None:
    for name in ("gpt2", "gemma-2b", "qwen3-30b-a3b"):
        shape = Shape.of(decoder_of(CONFIGS[name][1]), "x")
        assert isinstance(shape.decoder, Decoder)
        json.dumps(as_dict(plan(shape, machine(nvme_nbytes=0), 512)))


def test_what_is_recommended_can_be_read_and_names_no_folder_that_was_not_given(tmp_path: Path) -> None:
    arguments = ["plan", "gpt:10b", "--gpu", "32GiB", "--ram", "128GiB", "--nvme", "1TiB"]
    for given, named in (([], "/path/on/the/drive"), (["--nvme-path", str(tmp_path)], str(tmp_path))):
        done = CliRunner().invoke(app, [*arguments, *given])
        line = next(line for line in done.output.splitlines() if line.startswith("zk.ZeroConfig("))
        assert f"nvme_path='{named}'" in line and re.search(r"host_budget='\d+[MG]iB'", line), line


def test_the_exit_code_is_1_where_nothing_fits() -> None:
    small = ["plan", "gpt:1b", "--gpu", "1GiB", "--ram", "1GiB"]
    done, as_json = (CliRunner().invoke(app, [*small, *more]) for more in ([], ["--json"]))
    assert done.exit_code == as_json.exit_code == 1
    assert "Nothing fits" in done.output and json.loads(as_json.output)["recommended"] is None


def test_on_a_narrow_terminal_what_lacks_takes_two_lines() -> None:
    file = io.StringIO()
    machine = Machine(gpu_nbytes=32 << 30, ram_nbytes=128 << 30, nvme_nbytes=1 << 40)
    report.print_plan(Console(file=file, width=80), plan(shape_of("gpt:10b"), machine, 8192))
    lines = file.getvalue().splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("0-3    device device"))
    assert "-105.2 " in lines[first] and lines[first].rstrip().endswith("compute")
    assert lines[first + 1].strip() == "GiB GPU" and lines[first + 2].startswith("0,2,3  device host")
    assert any(line.startswith("0,2*,3 device auto") for line in lines)


@pytest.mark.parametrize("spec", ("", "nofile.json"))
def test_a_model_that_is_none_is_told_what_one_may_be(spec: str) -> None:
    done = CliRunner().invoke(app, ["plan", spec])
    assert done.exit_code == 2 and "a model is gpt:SIZE" in done.output and "Errno" not in done.output
    assert ("there is no file 'nofile.json'" in done.output) == bool(spec)


def test_a_plan_is_made_for_an_optimizer_by_name() -> None:
    def planned(*options: str) -> dict[str, Any]:
        done = CliRunner().invoke(app, ["plan", "gpt:1b", "--gpu", "8GiB", "--ram", "32GiB", "--json", *options])
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)  # type: ignore[no-any-return]

    found = {name: planned("--optimizer", name) for name in ("adamw", "lion", "adafactor")}
    largest_of = {name: plan["largest"]["host"]["num_params"] for name, plan in found.items()}
    assert largest_of["adamw"] < largest_of["lion"] < largest_of["adafactor"]
    kinds = next(option["kinds"] for option in found["adafactor"]["options"] if option["config"] == {**option["config"], "optimizer_tier": "host"})
    assert kinds["host_moments_nbytes"] < 0.01 * kinds["host_master_nbytes"]
    assert "elementwise=True" in found["lion"]["recommended"]["python"]
    text = CliRunner().invoke(app, ["plan", "gpt:1b", "--gpu", "8GiB", "--ram", "32GiB", "--optimizer", "sgd"], env={"COLUMNS": "160"}).output
    assert "by sgd" in text and "optimizer's state" in text and "Adam's moments" not in text


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--optimizer", "adan"], "--optimizer must be one of adamw, adam, sgd, lion, muon, adafactor"),
        (["--optimizer", "adafactor", "--state-dtype", "8bit"], "state_dtype='8bit' is for AdamW and Adam"),
        (["--optimizer", "muon", "--update-on", "device"], "--update-on device needs Adam or AdamW"),
    ],
)
def test_a_plan_for_an_optimizer_that_cannot_be_is_refused(options: list[str], says: str) -> None:
    done = CliRunner().invoke(app, ["plan", "gpt:1b", "--gpu", "8GiB", "--ram", "32GiB", *options], env={"COLUMNS": "1000"})
    assert done.exit_code != 0
    assert says in done.output
