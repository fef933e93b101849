"""Adapters of PEFT over bases in 4 and 8 bits, with the packages that quantize them."""

from __future__ import annotations

import copy
import hashlib
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from typer.testing import CliRunner

import zk
from tests.world import run_world
from zk.checkpoint.base import digest_of
from zk.core.owners import inner_tensors
from zk.tools.cli import app

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.usefixtures("torch_engine"),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"),
]

KINDS = {"nf4": "bitsandbytes", "fp4 in files": "bitsandbytes", "nf4 in files": "bitsandbytes", "int8": "torchao", "float8": "torchao"}
PROJ = "model.layers.1.mlp.up_proj.weight"


KEPT: dict[str, dict[str, bytes]] = {}  # files that have been made, by what they are of


def made_once(folder: Path, what: str, make: Callable[[Path], object]) -> Path:
    """Make files in a folder, or put there those that the first call with these words made."""
    if what not in KEPT:
        make(folder)
        KEPT[what] = {path.name: path.read_bytes() for path in folder.iterdir()}
    folder.mkdir(exist_ok=True)
    for name, content in KEPT[what].items():
        (folder / name).write_bytes(content)
    return folder


def base_in(folder: Path) -> Path:
    """A small model, as it is published: in full precision."""

    def make(base: Path) -> None:
        torch.manual_seed(0)
        config = transformers.LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=128)
        transformers.LlamaForCausalLM(config).save_pretrained(base)

    return made_once(folder / "base", "base", make)


def in_4_bits(**options: Any) -> Any:
    options = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": torch.float32, **options}
    return transformers.BitsAndBytesConfig(load_in_4bit=True, **options)


def quantized(kind: str, folder: Path) -> nn.Module:
    """A model as transformers makes it of files, with all of it in memory."""
    pytest.importorskip(KINDS[kind])
    if kind.endswith("files"):
        return transformers.LlamaForCausalLM.from_pretrained(published(kind, folder), device_map="cpu")  # type: ignore[no-any-return]
    if kind == "nf4":
        how = in_4_bits()
    else:
        quantization = pytest.importorskip("torchao.quantization")
        how = transformers.TorchAoConfig(quantization.Int8WeightOnlyConfig() if kind == "int8" else quantization.Float8WeightOnlyConfig())
    model = transformers.LlamaForCausalLM.from_pretrained(folder / "base", quantization_config=how, device_map="cpu", dtype=torch.float32)
    return model  # type: ignore[no-any-return]


def saved_in_4_bits(folder: Path, name: str, max_shard_size: str = "60KB", **options: Any) -> Path:
    """The base's weights as transformers saves them when bitsandbytes has quantized them."""

    def make(target: Path) -> None:
        how = in_4_bits(**options)
        model = transformers.LlamaForCausalLM.from_pretrained(folder / "base", quantization_config=how, device_map="cpu", dtype=torch.float32)
        model.save_pretrained(target, max_shard_size=max_shard_size)

    return made_once(folder / name, f"{max_shard_size} {options}", make)


def edited(source: Path, target: Path, change: Callable[[dict[str, Tensor]], object]) -> Path:
    """A copy of weights of one file, with ``change``."""
    shutil.copytree(source, target)
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    return target


def published(kind: str, folder: Path) -> Path:
    """A base that is in 4 bits in its files, several of them."""
    once = {"bnb_4bit_quant_type": "fp4", "bnb_4bit_use_double_quant": False, "bnb_4bit_quant_storage": torch.bfloat16}
    options = {} if kind.startswith("nf4") else once
    return folder / kind if (folder / kind).exists() else saved_in_4_bits(folder, kind, **options)


def without_memory(files: Path) -> nn.Module:
    """The model of these files, with the layers of bitsandbytes, before any values are there."""
    config = transformers.AutoConfig.from_pretrained(files)
    with zk.deferred_init():
        model = transformers.AutoModelForCausalLM.from_config(config)
        model.hf_quantizer = transformers.quantizers.AutoHfQuantizer.from_config(config.quantization_config)
        model.hf_quantizer.preprocess_model(model, device_map=None)
        model.hf_quantizer.postprocess_model(model)
    return model  # type: ignore[no-any-return]


def wrapped(model: nn.Module, dora: bool = False) -> nn.Module:
    torch.manual_seed(1)
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], use_dora=dora)).train()  # type: ignore[no-any-return]


def adapted(kind: str, folder: Path, dora: bool) -> nn.Module:
    return wrapped(quantized(kind, folder), dora)


def for_zk(kind: str, folder: Path, dora: bool) -> nn.Module:
    """The same; one that is in 4 bits in its files stays there."""
    if not kind.endswith("files"):
        return adapted(kind, folder, dora)
    model = without_memory(published(kind, folder))
    zk.load_pretrained(model, published(kind, folder))
    with zk.deferred_init():
        return wrapped(model)


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2)


def tokens(seed: int) -> Tensor:
    return torch.randint(0, 128, (2, 12), generator=torch.Generator().manual_seed(seed))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, start: int = 0) -> list[float]:
    losses = []
    for seed in range(start, start + steps):
        loss = model(input_ids=tokens(seed), labels=tokens(seed)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def on_drive(model: nn.Module, folder: Path) -> zk.ZeroOptimizer:
    drive: dict[str, Any] = {"param_tier": "nvme", "optimizer_tier": "nvme", "nvme_path": folder}
    return zk.ZeroOptimizer(model, adamw(model), stage=3, **drive)


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=tokens(9)).logits  # type: ignore[no-any-return]


def read_again(kind: str, adapter: Path, folder: Path) -> Tensor:
    """What plain PEFT computes with an adapter's files over the quantized base."""
    return logits(peft.PeftModel.from_pretrained(quantized(kind, folder), adapter))


def digest(folder: Path) -> str:
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(folder.iterdir()))).hexdigest()


def whole_life(case: tuple[str, bool, Path]) -> list[str]:
    """Train on the drive, save, go on in another optimizer, merge, and give the adapter to plain PEFT: what differs from plain training."""
    kind, dora, folder = case
    world, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    plain = adapted(kind, folder, dora)
    base = published(kind, folder) if kind.endswith("files") else folder / "base"
    before = digest(base)
    want = train(plain, adamw(plain), 3)
    plain.save_pretrained(folder / f"plain-{rank}")
    expected = read_again(kind, folder / f"plain-{rank}", folder)

    model = for_zk(kind, folder, dora)
    with on_drive(model, folder) as optimizer:
        got = train(model, optimizer, 1)
        optimizer.save_checkpoint(folder / f"{kind}-{dora}", frozen=False)
    model = for_zk(kind, folder, dora)
    optimizer = on_drive(model, folder)
    optimizer.load_checkpoint(folder / f"{kind}-{dora}")
    got += train(model, optimizer, 2, 1)
    found = [] if got == want else [f"losses {got} instead of {want}"]
    if kind.endswith("files"):
        frozen = sum(param.nbytes for param in plain.parameters() if not param.requires_grad) / world
        metrics, trained = optimizer.metrics(), sum(param.nbytes for param in plain.parameters() if param.requires_grad) / world
        if not frozen <= metrics["nvme_in_place_nbytes"] <= 1.01 * frozen + 1024 or metrics["nvme_param_nbytes"] != trained:
            found.append(f"{metrics} of {frozen} frozen bytes, {trained} trained")
    with zk.gather(model.parameters()):
        model.save_pretrained(folder / f"zk-{rank}")
        merged = copy.deepcopy(model).merge_and_unload()  # type: ignore[operator]
        found += [
            name
            for (name, value), other in zip(model.state_dict().items(), plain.state_dict().values(), strict=True)
            if not all(digest_of(a) == digest_of(b) for (_, a), (_, b) in zip(inner_tensors(value), inner_tensors(other), strict=True))
        ]
    found += ["no logits after merging"] * (not logits(merged).isfinite().all())
    optimizer.close()
    if not torch.equal(read_again(kind, folder / f"zk-{rank}", folder), expected):
        found.append("plain PEFT reads another adapter")
    if digest(base) != before:
        found.append("the base's files have changed")
    return found


@pytest.mark.parametrize(("kind", "dora"), (("nf4", True), ("fp4 in files", False), ("int8", False), ("float8", True)))
def test_adapters_over_a_quantized_base_on_the_drive(kind: str, dora: bool, tmp_path: Path) -> None:
    base_in(tmp_path)
    assert whole_life((kind, dora, tmp_path)) == []


def test_adapters_over_a_quantized_base_over_ranks(tmp_path: Path) -> None:
    for package in set(KINDS.values()):
        pytest.importorskip(package)
    base_in(tmp_path)
    published("nf4 in files", tmp_path)
    cases = [(kind, False, tmp_path) for kind in ("int8", "nf4 in files", "whole 2", "whole 3", "other scales")]
    saved_in_4_bits(tmp_path, "0", max_shard_size="1GB")
    edited(tmp_path / "0", tmp_path / "1", lambda tensors: tensors[f"{PROJ}.absmax"].sub_(1))
    says = f"parameter '{PROJ}' is .*, under scales .* on rank 0 and .*, under scales .* on rank 1"
    *found, (first, second) = run_world(2, on_a_rank, cases)
    assert found == [[[], []]] * (len(cases) - 1)
    assert re.search(says, first) and re.search(says, second)


def on_a_rank(case: tuple[str, bool, Path]) -> Any:
    """Lead a whole life, or say if the whole model is; or load files that the other rank has with other scales, and return what is said."""
    kind, _, folder = case
    if kind.startswith("whole"):
        return [kind] * (not whole(int(kind[-1]), folder))
    if kind != "other scales":
        return whole_life(case)
    model = without_memory(folder / "0")
    zk.load_pretrained(model, folder / str(dist.get_rank()))
    with pytest.raises(RuntimeError) as error:
        zk.ZeroOptimizer(model, adamw(model), stage=3)
    return str(error.value)


def test_adapters_over_published_files_leave_them_where_they_are(tmp_path: Path) -> None:
    """A base that never exists whole, and of which nothing is written, beside plain PEFT."""
    published = base_in(tmp_path)
    config, lora = transformers.LlamaConfig.from_pretrained(published), peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    torch.manual_seed(1)
    plain = transformers.LlamaForCausalLM(config)
    plain.load_state_dict(load_file(published / "model.safetensors"))
    plain = peft.get_peft_model(plain, lora)
    want = train(plain, adamw(plain), 3)
    torch.manual_seed(1)
    with zk.deferred_init():
        model = transformers.LlamaForCausalLM(config)
    before = digest(published)
    zk.load_pretrained(model, published)
    with zk.deferred_init():
        model = peft.get_peft_model(model, lora)
    with on_drive(model, tmp_path) as optimizer:
        written = optimizer.metrics()["evicted_nbytes"]
        assert train(model, optimizer, 3) == want
        frozen = sum(param.numel() * 4 for param in plain.parameters() if not param.requires_grad)
        assert optimizer.metrics()["nvme_in_place_nbytes"] == frozen > 10 * written
    assert digest(published) == before


def same_entries(model: nn.Module, optimizer: zk.ZeroOptimizer) -> bool:
    """The whole model has what state_dict() has."""
    got, want = optimizer.consolidated_state_dict(), model.state_dict()
    if got.keys() != want.keys():
        return False
    return all(torch.equal(a, b) for name in want for (_, a), (_, b) in zip(inner_tensors(got[name]), inner_tensors(want[name]), strict=True))


def whole(stage: int, folder: Path) -> bool:
    options: dict[str, Any] = {"param_tier": "nvme", "optimizer_tier": "nvme", "nvme_path": folder} if stage == 3 else {}
    model = adapted("nf4", folder, False)
    with zk.ZeroOptimizer(model, adamw(model), stage=stage, **options) as optimizer:
        train(model, optimizer, 1)
        return same_entries(model, optimizer) and any(name.endswith("quant_state.bitsandbytes__nf4") for name in optimizer.consolidated_state_dict())


def test_the_whole_model_has_the_scales_of_4_bit_weights(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    base_in(tmp_path)
    assert whole(0, tmp_path) and whole(3, tmp_path)


def test_evaluation_leaves_the_base_as_it_was(tmp_path: Path) -> None:
    """bitsandbytes would pack its codes for CPUs with bf16 products, through which no gradient goes."""
    pytest.importorskip("bitsandbytes")
    base_in(tmp_path)
    model, plain = adapted("nf4", tmp_path, False), adapted("nf4", tmp_path, False)
    for module in (*model.modules(), *plain.modules()):
        if hasattr(module, "support_avx512bf16_for_cpu"):  # also on CPUs without
            module.support_avx512bf16_for_cpu = module in set(model.modules())
    with on_drive(model, tmp_path) as optimizer:
        got = train(model, optimizer, 2)
        logits(model)
        optimizer.save_checkpoint(tmp_path / "small", frozen=False)
        got += train(model.train(), optimizer, 2, 2)
    assert got == train(plain, adamw(plain), 4)
    assert any(getattr(module, "support_avx512bf16_for_cpu", False) for module in model.modules())  # it may from now on
    fresh = adapted("nf4", tmp_path, False)
    with on_drive(fresh, tmp_path) as optimizer:
        optimizer.load_checkpoint(tmp_path / "small")
        assert train(fresh, optimizer, 2, 2) == got[2:]
    for param in (packed := adapted("nf4", tmp_path, False)).parameters():
        if hasattr(param, "quant_state"):
            param.quant_state.packing_format_for_cpu = True
    with pytest.raises(ValueError, match=r"bitsandbytes has packed the codes of parameter .*load the model again"):
        on_drive(packed, tmp_path)


def test_the_same_codes_under_other_scales_are_another_base(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    base_in(tmp_path)
    model = adapted("nf4", tmp_path, False)
    with on_drive(model, tmp_path) as optimizer:
        train(model, optimizer, 1)
        small = optimizer.save_checkpoint(tmp_path / "small", frozen=False)
        optimizer.save_checkpoint(tmp_path / "whole")
    assert small is not None
    trained = sum(param.numel() for param in model.parameters() if param.requires_grad)
    largest = max(path.stat().st_size for path in small.iterdir())
    assert 3 * 4 * trained <= largest <= 1.2 * 3 * 4 * trained + 8192  # master and two moments in fp32; a header
    other = adapted("nf4", tmp_path, False)
    with torch.no_grad():
        next(param for param in other.parameters() if hasattr(param, "quant_state")).quant_state.offset *= 2
    with on_drive(other, tmp_path) as optimizer:
        for folder in ("small", "whole"):
            with pytest.raises(ValueError, match=r"saved over another base: 'base_model.*weight.quant_state.bitsandbytes__nf4' and 0 more"):
                optimizer.load_checkpoint(tmp_path / folder)
    done = CliRunner().invoke(app, ["export", str(tmp_path / "whole"), str(tmp_path / "out")])
    assert done.exit_code == 0 and "more, which modules add to state_dict() themselves, are not in the checkpoint" in done.output


def test_weights_in_8_bits_that_cannot_be_moved_are_refused_by_name(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    how = transformers.BitsAndBytesConfig(load_in_8bit=True)
    model = transformers.LlamaForCausalLM.from_pretrained(base_in(tmp_path), quantization_config=how, device_map="cpu")
    model = peft.get_peft_model(model, peft.LoraConfig(r=4))
    with pytest.raises(ValueError, match="is of bitsandbytes in 8 bits, whose layers keep a second hold on their codes"):
        zk.ZeroOptimizer(model, adamw(model))


@pytest.mark.parametrize("storage", (torch.bfloat16, torch.float16), ids=str)
def test_codes_that_are_kept_as_numbers_of_16_bits_are_no_numbers(storage: torch.dtype, tmp_path: Path) -> None:
    """Backward needs them, too, and no cast changes them."""
    pytest.importorskip("bitsandbytes")
    how = in_4_bits(bnb_4bit_quant_storage=storage)

    def made() -> nn.Module:
        base = base_in(tmp_path)
        return wrapped(transformers.LlamaForCausalLM.from_pretrained(base, quantization_config=how, device_map="cpu", dtype=torch.float32))

    plain, model = made(), made()
    with on_drive(model, tmp_path) as optimizer:
        assert train(model, optimizer, 2) == train(plain, adamw(plain), 2)
    model = made()
    with zk.ZeroOptimizer(model, adamw(model), stage=2, dtype=torch.float16 if storage == torch.bfloat16 else torch.bfloat16):
        codes = {name: param for name, param in plain.named_parameters() if hasattr(param, "quant_state")}
        assert codes and all(torch.equal(model.get_parameter(name).view(torch.int16), param.view(torch.int16)) for name, param in codes.items())


# ---- a base that is in 4 bits in its files --------------------------------------------------------------------------------------------


def computed(model: nn.Module) -> Tensor:
    """Logits while training, where bitsandbytes packs nothing."""
    with torch.no_grad():
        return model.train()(input_ids=tokens(9)).logits  # type: ignore[no-any-return]


@pytest.mark.parametrize("stage", (0, 2, 3))
def test_codes_in_files_are_loaded_where_they_rest(stage: int, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    base_in(tmp_path)
    plain, model = adapted("nf4 in files", tmp_path, False), for_zk("nf4 in files", tmp_path, False)
    tiers = {"param_tier": "host", "optimizer_tier": "host"} if stage == 3 else {}
    with zk.ZeroOptimizer(model, adamw(model), stage=stage, **tiers) as optimizer:
        assert train(model, optimizer, 2) == train(plain, adamw(plain), 2)
        assert same_entries(model, optimizer) and torch.equal(computed(model), computed(plain))


@pytest.mark.parametrize("how", ("free", "packed", "held", "on the drive", "not quantized yet"))
def test_a_model_in_memory_takes_codes_and_scales(how: str, tmp_path: Path) -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    base_in(tmp_path)
    files, want = published("nf4 in files", tmp_path), quantized("nf4 in files", tmp_path)
    model = quantized("nf4 in files", tmp_path)
    for param in model.parameters():
        if hasattr(param, "quant_state"):
            param.data ^= 255
            param.quant_state.absmax.sub_(3)
            param.quant_state.offset *= 2
            if how == "packed":  # by an evaluation, on some CPUs
                param.data, param.quant_state = bitsandbytes.functional._convert_weight_packed_for_cpu(param.data, param.quant_state)
    if how == "not quantized yet":
        for layer in model.model.layers:  # type: ignore[union-attr]
            layer.mlp.up_proj = bitsandbytes.nn.Linear4bit(64, 128, bias=False, compute_dtype=torch.float32, quant_type="nf4")
    tiers = {"stage": 3, "param_tier": "nvme", "optimizer_tier": "nvme", "nvme_path": tmp_path} if how == "on the drive" else {"stage": 2}
    optimizer = zk.ZeroOptimizer(model, adamw(model), **tiers) if how in ("held", "on the drive") else None
    assert how in ("packed", "not quantized yet") or not torch.equal(computed(model), computed(want))
    zk.load_pretrained(model, files)
    assert torch.equal(computed(model), computed(want))
    assert train(model.train(), optimizer or adamw(model), 2) == train(want.train(), adamw(want), 2)
    if optimizer is not None:
        optimizer.close(gather=True)
    state = want.state_dict()
    assert model.state_dict().keys() == state.keys() and all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def without(*parts: str) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: [tensors.pop(f"{PROJ}.{part}") for part in parts]


MISFITS: dict[str, tuple[dict[str, Any], Callable[[dict[str, Tensor]], object], str]] = {  # of the files, and what is said
    "without a state": ({}, without("quant_state.bitsandbytes__nf4"), f"{PROJ} has no whole quant_state beside it .Expected packed"),
    "without scales": ({}, without("absmax"), f"{PROJ} has no whole quant_state beside it .'absmax'"),
    "without scales of scales": ({}, without("nested_absmax"), f"{PROJ} has nested_absmax 0 instead of 1"),
    "without a map of scales": ({}, without("nested_quant_map"), f"{PROJ} has no whole quant_state beside it .'nested_quant_map'"),
    "with two states": (
        {},
        lambda tensors: tensors.update({f"{PROJ}.quant_state.bitsandbytes__fp4": torch.zeros(1, dtype=torch.uint8)}),
        f"{PROJ} has no whole quant_state beside it .There should be exactly one",
    ),
    "fewer scales": (
        {},
        lambda tensors: tensors.update({f"{PROJ}.absmax": tensors[f"{PROJ}.absmax"][1:].clone()}),
        rf"{PROJ} has absmax \(127, torch.uint8\) instead of \(128, torch.uint8\)",
    ),
    "fewer codes": (
        {},
        lambda tensors: tensors.update({PROJ: tensors[PROJ][1:].clone()}),
        rf"{PROJ} has codes \(4095, 1\) instead of \(4096, 1\)",
    ),
    "another kind": ({"bnb_4bit_quant_type": "fp4"}, len, "q_proj.weight has quant_type fp4 instead of nf4[,;]"),
    "once": ({"bnb_4bit_use_double_quant": False}, len, r"absmax \(64, torch.float32\) instead of \(64, torch.uint8\), nested_absmax 0 instead of 1"),
    "other storage": ({"bnb_4bit_quant_storage": torch.bfloat16}, len, "has quant_storage torch.bfloat16 instead of torch.uint8, codes"),
}


@pytest.mark.parametrize("what", (*MISFITS, "another shape", "other blocks", "in full", "a plain model", "inside of PEFT"))
def test_codes_that_do_not_fit_are_refused_by_name(what: str, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    base_in(tmp_path)
    right = saved_in_4_bits(tmp_path, "right", "1GB")
    options, change, says = MISFITS.get(what, ({}, len, ""))
    files = edited(saved_in_4_bits(tmp_path, "other", "1GB", **options), tmp_path / "files", change)
    model = without_memory(right)
    if what == "another shape":
        config = transformers.AutoConfig.from_pretrained(right)
        config.update({"intermediate_size": 192})
        config.save_pretrained(right)
        model, says = without_memory(right), r"gate_proj.weight has shape \(128, 64\) instead of \(192, 64\), codes"
    elif what == "other blocks":
        model.get_parameter(PROJ).blocksize = 128  # type: ignore[attr-defined]
        says = f"{PROJ} has blocksize 64 instead of 128, absmax"
    elif what == "in full":
        files, says = tmp_path / "base", "q_proj.weight has no whole quant_state beside it"
    elif what == "a plain model":
        with zk.deferred_init():
            model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(right))
        says = r"other shapes: .*; bitsandbytes has quantized these: AutoHfQuantizer.from_config\(config.quantization_config\) gives"
    elif what == "inside of PEFT":
        with zk.deferred_init():
            model = wrapped(model)
        says = "load a base before PEFT wraps it"
    before = {name: (param.shape, param.dtype, getattr(param, "quant_state", None)) for name, param in model.named_parameters()}
    for strict in (True, False) if what != "inside of PEFT" else (True,):
        with pytest.raises(ValueError, match=f"does not fit the model; .*{says}"):
            zk.load_pretrained(model, files, strict=strict)
    assert before == {name: (param.shape, param.dtype, getattr(param, "quant_state", None)) for name, param in model.named_parameters()}
    if what not in ("another shape", "other blocks", "a plain model", "inside of PEFT"):
        zk.load_pretrained(model, right)


def test_what_files_lack_or_have_beside_codes_is_left_where_it_is_asked_for(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    base_in(tmp_path)

    def change(tensors: dict[str, Tensor]) -> None:
        del tensors["model.norm.weight"]
        tensors["more"] = torch.zeros(1)

    files = edited(saved_in_4_bits(tmp_path, "right", "1GB"), tmp_path / "files", change)
    model = without_memory(files)
    with pytest.raises(ValueError, match=r"missing: model.norm.weight; unexpected: more \(strict=False ignores these\)"):
        zk.load_pretrained(model, files)
    zk.load_pretrained(model, files, strict=False)
    with on_drive(model, tmp_path):
        want = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "right", device_map="cpu")
        assert torch.equal(computed(model), computed(want))  # whose norm is one, as it is in the files
