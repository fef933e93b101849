"""Weights from safetensors reach every kind of model, as from_pretrained of transformers reads them."""

import contextlib
import itertools
import json
import logging
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import zk
from tests.models import GPT, step
from tests.world import run_world


def tensors(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in (*model.named_parameters(), *model.named_buffers())}


def saved(folder: Path, is_file: bool) -> tuple[dict[str, Tensor], Path]:
    """Weights of a GPT with tied embeddings: one file, or several with an index."""
    torch.manual_seed(5)
    want = tensors(GPT("tied"))
    if is_file:
        save_file(want, folder / "one.safetensors")
        return want, folder / "one.safetensors"
    for name, tensor in want.items():
        save_file({name: tensor}, folder / f"{name}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {name: f"{name}.safetensors" for name in want}}))
    return want, folder


BEFORE = {"plain": contextlib.nullcontext, "meta": lambda: torch.device("meta"), "deferred": lambda: zk.deferred_init("cpu")}


@pytest.mark.parametrize("kind", (*BEFORE, "stage 2", "frozen", "nvme"))
def test_weights_reach_every_kind_of_model(kind: str, tmp_path: Path) -> None:
    want, path = saved(tmp_path, kind in ("plain", "meta", "frozen"))
    with BEFORE.get(kind, contextlib.nullcontext)():
        model = GPT("tied").requires_grad_(kind != "frozen")
    model.norm.requires_grad_(True)
    if kind in BEFORE:
        zk.load_pretrained(model, path)
        assert all(param.is_meta for param in model.parameters()) == (kind != "plain")
    tier = "nvme" if kind == "nvme" else "host"
    options = {"stage": 3, "param_tier": tier, "optimizer_tier": tier, "nvme_path": tmp_path if tier == "nvme" else None}
    params = [param for param in model.parameters() if param.requires_grad]
    optimizer = zk.ZeroOptimizer(model, torch.optim.AdamW(params, lr=1e-2), **options if kind in ("frozen", "nvme", "deferred") else {"stage": 2})
    if kind not in BEFORE:
        step(model, optimizer)
        zk.load_pretrained(model, path)
    with zk.gather(model.parameters()):
        found = tensors(model)
        assert all(torch.equal(found[name], tensor) for name, tensor in want.items())
    optimizer.close()


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
        ("a.safetensors", ValueError, r"missing: norm\.weight; unexpected: extra; build .* \(strict=False ignores"),
        ("b.safetensors", ValueError, r"shapes: norm\.weight is \(3,\), the model's \(24,\)"),
        ("c.safetensors", ValueError, r"c\.safetensors is not a whole safetensors file"),
        ("d.json", FileNotFoundError, r"gone\.safetensors"),
        ("e.json", ValueError, r"e\.json is not a whole safetensors file, or an index"),
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


def test_a_file_of_another_precision_for_a_model_with_buffers_that_are_not_saved(tmp_path: Path) -> None:
    plain = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    halves = {name: value.half() if value.is_floating_point() else value for name, value in plain.state_dict().items()}
    save_file(halves, tmp_path / "model.safetensors")
    with zk.deferred_init():
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        model.register_buffer("mask", torch.ones(4), persistent=False)
    zk.load_pretrained(model, tmp_path)
    with zk.ZeroOptimizer(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=1):
        assert model[1].running_mean.dtype == torch.float32 and model[1].num_batches_tracked.dtype == torch.int64
        assert torch.equal(model[0].weight.half().cpu(), halves["0.weight"])


# ---- as from_pretrained reads them ---------------------------------------------------------------------
def published(kind: str, folder: Path) -> Path:
    families = pytest.importorskip("tests.integrations.families")
    torch.manual_seed(0)
    families.FOLDERS[kind][0]().save_pretrained(folder / "published")
    return folder / "published"


def read_as_transformers_does(case: tuple[str, str, Path]) -> list[str]:
    """The names of what has other values than from_pretrained gives, made at stage 3 and read again into what is held."""
    families = pytest.importorskip("tests.integrations.families")
    kind, tier, folder = case
    with zk.deferred_init("cpu"):
        model = families.FOLDERS[kind][1]()
    want = type(model).from_pretrained(folder / "published", config=model.config).state_dict()
    options = {"param_tier": tier, "optimizer_tier": tier, "nvme_path": folder if tier == "nvme" else None}
    zk.load_pretrained(model, folder / "published")
    optimizer = zk.ZeroOptimizer(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=3, **options)
    values = [dict(optimizer.consolidated_state_dict())]
    with zk.gather(model.parameters(), write=True), torch.no_grad():
        for param in model.parameters():
            param.zero_()
    zk.load_pretrained(model, folder / "published")
    values.append(dict(optimizer.consolidated_state_dict()))
    at, says = ("there", "no safetensors") if torch.distributed.get_rank() else ("published", "failed elsewhere: on rank 1, FileNotFoundError")
    with pytest.raises(OSError, match=says):
        zk.load_pretrained(model, folder / at)
    optimizer.close()
    return [name for found in values if found for name in want if not torch.equal(found[name], want[name])]


def test_over_ranks_folders_are_read_as_from_pretrained_reads_them(tmp_path: Path) -> None:
    kinds = ("mixtral", "qwen2-vl", "llava", "tied", "a head into a base", "a base into a tied head")
    cases = [(kind, "nvme" if kind == "qwen2-vl" else "host", tmp_path / kind) for kind in kinds]
    for kind, _, folder in cases:
        published(kind, folder)
    assert run_world(2, read_as_transformers_does, cases) == [[[], []] for _ in cases]


def test_what_does_not_fit_a_model_of_transformers_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    families = pytest.importorskip("tests.integrations.families")
    weights = load_file(published("mixtral", tmp_path) / "model.safetensors")
    layer = "model.layers.1.block_sparse_moe.experts."
    lacking = {name: value for name, value in weights.items() if not name.startswith(layer)}
    tied = load_file(published("tied", tmp_path) / "model.safetensors")
    partly, renamed = (k != f"{layer}3.w1.weight" for k in weights), {k.replace("model.norm", "model.norms"): v for k, v in weights.items()}
    for says, changed, make in (
        (r"experts\.0\.w1\.weight cannot be converted", dict(itertools.compress(weights.items(), partly)), families.mixtral),
        (r"missing: model\.norm\.weight; unexpected: model\.norms\.weight", renamed, families.mixtral),
        (r"missing: model\.layers\.1\.mlp\.experts\.gate_up_proj, .* \(strict=False ignores", lacking, families.mixtral),
        (r"different here .*: shared.weight and lm_head.weight; build", tied | {"lm_head.weight": tied["shared.weight"] + 1}, families.t5),
    ):
        save_file(changed, tmp_path / "changed.safetensors")
        with pytest.raises(ValueError, match=says):
            zk.load_pretrained(make(), tmp_path / "changed.safetensors")
    save_file(lacking, tmp_path / "lacking.safetensors")
    zk.load_pretrained(families.mixtral(), tmp_path / "lacking.safetensors", strict=False)
    assert "trained parameters keep the values" in caplog.text and "model.layers.1.mlp.experts.down_proj" in caplog.text
    monkeypatch.setitem(sys.modules, "transformers.conversion_mapping", None)  # as before 5.0
    with pytest.raises(ImportError, match=r"transformers\.conversion_mapping"):
        zk.load_pretrained(families.mixtral(), tmp_path / "changed.safetensors")
