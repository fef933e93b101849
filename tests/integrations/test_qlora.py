"""Adapters of PEFT over bases in 4 and 8 bits, with the packages that quantize them."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
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

KINDS = {"nf4": "bitsandbytes", "fp4": "bitsandbytes", "int8": "torchao", "float8": "torchao"}


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
    if kind == "nf4":
        how = in_4_bits()
    elif kind == "fp4":
        once = {"bnb_4bit_use_double_quant": False, "bnb_4bit_quant_storage": torch.bfloat16}
        how = in_4_bits(bnb_4bit_quant_type="fp4", **once)
    else:
        quantization = pytest.importorskip("torchao.quantization")
        how = transformers.TorchAoConfig(quantization.Int8WeightOnlyConfig() if kind == "int8" else quantization.Float8WeightOnlyConfig())
    model = transformers.LlamaForCausalLM.from_pretrained(folder / "base", quantization_config=how, device_map="cpu", dtype=torch.float32)
    return model  # type: ignore[no-any-return]


def wrapped(model: nn.Module, dora: bool = False) -> nn.Module:
    torch.manual_seed(1)
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], use_dora=dora)).train()  # type: ignore[no-any-return]


def adapted(kind: str, folder: Path, dora: bool) -> nn.Module:
    return wrapped(quantized(kind, folder), dora)


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
    """Train on the drive, save, resume in another optimizer, merge, and give the adapter to plain PEFT: what differs from plain training."""
    kind, dora, folder = case
    rank = dist.get_rank() if dist.is_initialized() else 0
    plain = adapted(kind, folder, dora)
    before = digest(folder / "base")
    want = train(plain, adamw(plain), 3)
    plain.save_pretrained(folder / f"plain-{rank}")
    expected = read_again(kind, folder / f"plain-{rank}", folder)

    model = adapted(kind, folder, dora)
    with on_drive(model, folder) as optimizer:
        got = train(model, optimizer, 1)
        optimizer.save_checkpoint(folder / f"{kind}-{dora}", frozen=False)
    model = adapted(kind, folder, dora)
    optimizer = on_drive(model, folder)
    optimizer.load_checkpoint(folder / f"{kind}-{dora}")
    got += train(model, optimizer, 2, 1)
    found = [] if got == want else [f"losses {got} instead of {want}"]
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
    if digest(folder / "base") != before:
        found.append("the base's files have changed")
    return found


@pytest.mark.parametrize(("kind", "dora"), (("nf4", True), ("fp4", False), ("int8", False), ("float8", True)))
def test_adapters_over_a_quantized_base_on_the_drive(kind: str, dora: bool, tmp_path: Path) -> None:
    base_in(tmp_path)
    assert whole_life((kind, dora, tmp_path)) == []


def test_adapters_over_a_quantized_base_over_ranks(tmp_path: Path) -> None:
    for package in set(KINDS.values()):
        pytest.importorskip(package)
    base_in(tmp_path)
    cases = [(kind, False, tmp_path) for kind in ("int8", "nf4", "whole 2", "whole 3")]
    assert run_world(2, on_a_rank, cases) == [[[], []]] * len(cases)


def on_a_rank(case: tuple[str, bool, Path]) -> list[str]:
    """Lead a whole life, or say if the whole model is not complete."""
    kind, _, folder = case
    if kind.startswith("whole"):
        return [kind] * (not whole(int(kind[-1]), folder))
    return whole_life(case)


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
    assert done.exit_code == 0 and "more, which state_dict() adds; optimizer.consolidated_state_dict() has them" in done.output


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


@pytest.mark.parametrize("what", ("files", "layers"))
def test_load_pretrained_refuses_weights_in_4_bits(what: str, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    files, coded = base_in(tmp_path), quantized("nf4", tmp_path)
    model = coded
    if what == "files":
        files = tmp_path / "nf4"
        coded.save_pretrained(files)  # type: ignore[operator]
        with zk.deferred_init():
            model = transformers.LlamaForCausalLM(transformers.LlamaConfig.from_pretrained(tmp_path / "base"))
    for strict in (True, False):
        with pytest.raises(ValueError, match=r"reads no weights in 4 bits.*from_pretrained of transformers"):
            zk.load_pretrained(model, files, strict=strict)
