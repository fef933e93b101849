"""Weights from safetensors reach every kind of model, as from_pretrained of transformers reads them."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import zk
from tests.models import GPT, batch, loss_of
from tests.world import run_world
from zk.nn import deferred


def tensors(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in (*model.named_parameters(), *model.named_buffers())}


def saved(folder: Path, form: str) -> tuple[dict[str, Tensor], Path]:
    """Weights of a GPT with tied embeddings: one file, or several with an index."""
    torch.manual_seed(5)
    want = tensors(GPT("tied"))
    folder.mkdir(exist_ok=True)
    if form == "file":
        save_file(want, folder / "one.safetensors")
        return want, folder / "one.safetensors"
    for name, tensor in want.items():
        save_file({name: tensor}, folder / f"{name}.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {name: f"{name}.safetensors" for name in want}}))
    return want, folder


def loaded(kind: str, path: Path, scratch: Path) -> tuple[nn.Module, Any]:
    """A model of a kind with the weights in ``path``."""
    deferred.SMALL = 16
    if kind == "deferred":
        with zk.deferred_init("cpu"):
            model: nn.Module = GPT("tied")
    elif kind == "meta":
        with torch.device("meta"):
            model = GPT("tied")
    else:
        model = GPT("tied").requires_grad_(kind != "frozen")
    if kind == "frozen":
        model.norm.requires_grad_(True)
    if kind in ("deferred", "meta", "plain"):
        zk.load_pretrained(model, path)
        assert all(param.is_meta for param in model.parameters()) == (kind != "plain")
    options: dict[str, Any] = {"stage": 2}
    if kind in ("frozen", "nvme", "deferred"):
        tier = "nvme" if kind == "nvme" else "host"
        options = {"stage": 3, "param_tier": tier, "optimizer_tier": tier, "nvme_path": scratch}
    params = [param for param in model.parameters() if param.requires_grad]
    optimizer = zk.ZeroOptimizer(model, torch.optim.AdamW(params, lr=1e-2), **options)
    if kind not in ("deferred", "meta", "plain"):
        loss_of(model, batch(0)).backward()
        optimizer.step()
        optimizer.zero_grad()
        zk.load_pretrained(model, path)
    return model, optimizer


@pytest.mark.parametrize("form", ("file", "folder"))
@pytest.mark.parametrize("kind", ("plain", "deferred", "meta", "stage 2", "nvme", "frozen"))
def test_weights_reach_every_kind_of_model(kind: str, form: str, tmp_path: Path) -> None:
    want, path = saved(tmp_path / "files", form)
    model, optimizer = loaded(kind, path, tmp_path)
    with zk.gather(model.parameters()):
        found = tensors(model)
        assert all(torch.equal(found[name], tensor) for name, tensor in want.items())
    optimizer.close()


def on_a_rank(case: tuple[str, Path]) -> str:
    kind, folder = case
    model, optimizer = loaded(kind, folder / "one.safetensors", folder)
    want = load_file(folder / "one.safetensors")
    with zk.gather(model.parameters()):
        wrong = [name for name, value in tensors(model).items() if not torch.equal(value, want[name])]
    loss_of(model, batch(1)).backward()
    optimizer.step()
    optimizer.close()
    return " ".join(wrong)


def test_quick_over_two_ranks_each_takes_its_part(tmp_path: Path) -> None:
    saved(tmp_path, "file")
    assert run_world(2, on_a_rank, [("deferred", tmp_path), ("frozen", tmp_path)]) == [["", ""]] * 2


def test_masters_take_the_full_precision_of_the_file(tmp_path: Path) -> None:
    model = GPT()
    want = {name: torch.randn_like(param) for name, param in model.named_parameters()}
    save_file(want, tmp_path / "x.safetensors")
    optimizer = zk.ZeroOptimizer(model, torch.optim.AdamW(model.parameters()), dtype="bf16")
    model.norm.weight.detach().zero_()  # what was written before is not lost in its unit
    zk.load_pretrained(model, tmp_path / "x.safetensors")
    with zk.gather(model.parameters(), kind="master") as masters:
        for master, (name, param) in zip(masters, model.named_parameters(), strict=True):
            assert torch.equal(master, want[name]) and torch.equal(param, want[name].bfloat16())
    optimizer.close()


def test_files_that_do_not_fit_are_refused_before_anything_changes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = GPT()
    before, good = tensors(model), tensors(GPT())
    lacking = {name: tensor for name, tensor in good.items() if name != "norm.weight"}
    save_file(lacking | {"extra": torch.zeros(1)}, tmp_path / "a.safetensors")
    save_file(good | {"norm.weight": torch.zeros(3)}, tmp_path / "b.safetensors")
    (tmp_path / "c.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{}")
    (tmp_path / "d.json").write_text(json.dumps({"weight_map": {"norm.weight": "gone.safetensors"}}))
    (tmp_path / "e.json").write_text("{")
    (tmp_path / "f.bin").touch()
    for name, error, says in (
        ("a.safetensors", ValueError, r"missing: norm\.weight; unexpected: extra \(strict=False ignores these"),
        ("b.safetensors", ValueError, r"other shapes: norm\.weight is \(3,\), the model's \(24,\)"),
        ("c.safetensors", ValueError, r"c\.safetensors is not a whole safetensors file"),
        ("d.json", FileNotFoundError, r"names gone\.safetensors, which is not there"),
        ("e.json", ValueError, r"e\.json is no index of safetensors files"),
        ("f.bin", ValueError, r"f\.bin is a pickle; convert it once"),
        ("none", FileNotFoundError, "no safetensors file, and no folder with"),
    ):
        with pytest.raises(error, match=says):
            zk.load_pretrained(model, tmp_path / name)
    assert all(torch.equal(tensor, before[name]) for name, tensor in tensors(model).items())
    with caplog.at_level(logging.WARNING, logger="zk"):
        zk.load_pretrained(model, tmp_path / "a.safetensors", strict=False)
    assert "lacks them: norm.weight" in caplog.text
    assert torch.equal(model.norm.weight, before["norm.weight"]) and torch.equal(model.head.weight, good["head.weight"])


@pytest.mark.parametrize("kind", ("mixtral", "llava", "qwen2-vl", "a base into a tied head", "a head into a base", "tied"))
def test_a_folder_of_transformers_is_read_as_from_pretrained_reads_it(kind: str, tmp_path: Path) -> None:
    families = pytest.importorskip("tests.integrations.families")
    torch.manual_seed(0)
    families.FOLDERS[kind][0]().save_pretrained(tmp_path / "published")
    with zk.deferred_init("cpu"):
        model = families.FOLDERS[kind][1]()
    want = type(model).from_pretrained(tmp_path / "published", config=model.config).state_dict()
    zk.load_pretrained(model, tmp_path / "published")
    optimizer = zk.ZeroOptimizer(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=3, param_tier="host")
    with zk.gather(model.parameters(), write=True), torch.no_grad():
        assert all(torch.equal(model.state_dict()[name], value) for name, value in want.items())
        for param in model.parameters():
            param.zero_()
    zk.load_pretrained(model, tmp_path / "published")
    optimizer.close()
    assert all(torch.equal(model.state_dict()[name], value) for name, value in want.items())


def test_what_does_not_fit_a_model_of_transformers_is_named(tmp_path: Path) -> None:
    families = pytest.importorskip("tests.integrations.families")
    families.FOLDERS["mixtral"][0]().save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    layer = "model.layers.1.block_sparse_moe.experts."
    for says, changed in (
        (r"experts\.0\.w1\.weight cannot be converted", {k: v for k, v in weights.items() if k != f"{layer}3.w1.weight"}),
        (r"missing: model\.norm\.weight; unexpected: model\.norms\.weight", {k.replace("model.norm", "model.norms"): v for k, v in weights.items()}),
        (r"missing: model\.layers\.1\.mlp\.experts\.gate_up_proj, ", {k: v for k, v in weights.items() if not k.startswith(layer)}),
    ):
        save_file(changed, tmp_path / "changed.safetensors")
        with pytest.raises(ValueError, match=says):
            zk.load_pretrained(families.mixtral(), tmp_path / "changed.safetensors")
    families.FOLDERS["tied"][0]().save_pretrained(tmp_path / "t5")
    tied = load_file(tmp_path / "t5" / "model.safetensors")
    save_file(tied | {"lm_head.weight": tied["shared.weight"] + 1}, tmp_path / "untied.safetensors")
    with pytest.raises(ValueError, match=r"one tensor where .* differ: shared.weight and lm_head.weight"):
        zk.load_pretrained(families.t5(), tmp_path / "untied.safetensors")
