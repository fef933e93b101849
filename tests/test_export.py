"""A checkpoint becomes a plain model, and a model in memory."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from torch import nn
from typer.testing import CliRunner

import zk
from tests.models import GPT
from tests.test_checkpoint import SETTINGS, make, snapshot, train
from tests.world import run_world
from zk.checkpoint import CheckpointError, base
from zk.checkpoint.export import export
from zk.core.store import State, UnitStore
from zk.offload import rules
from zk.tools.cli import app


def saved(setting: str, folder: Path, variant: str = "tied", **options: object) -> tuple[GPT, zk.ZeroOptimizer]:
    model, optimizer, scheduler = make(setting, folder, variant, **options)
    train(model, optimizer, scheduler, 0, 2)
    optimizer.save_checkpoint(folder / "saved")
    return model, optimizer


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("dtype", (None, "fp32"))
def test_an_exported_model_loads_into_the_plain_one(setting: str, dtype: str | None, tmp_path: Path) -> None:
    model, optimizer = saved(setting, tmp_path)
    state = snapshot(model, optimizer)
    done = export(tmp_path / "saved", tmp_path / "out", torch.float32 if dtype else None)
    assert done.files == [tmp_path / "out" / "model.safetensors"] and done.nbytes == sum(v.nbytes for v in load_file(done.files[0]).values())
    plain = GPT("tied")
    plain.register_buffer("seen", torch.zeros(3))
    if dtype is None:
        plain.bfloat16()
    missing, unexpected = load_model(plain, done.files[0])
    assert not missing and not unexpected
    for name, param in plain.named_parameters():
        want = state[name] if dtype is None else state[f"master {name}"].view(param.shape)
        assert torch.equal(param, want), name
    assert torch.equal(plain.seen, model.seen.to(plain.seen.dtype)) and plain.head.weight is plain.tokens.weight

    consolidated = optimizer.consolidated_state_dict(dtype)
    assert consolidated.keys() == plain.state_dict().keys()
    assert all(torch.equal(consolidated[name].to(value.dtype), value) for name, value in plain.state_dict().items())
    assert all(consolidated[name].dtype == (torch.float32 if dtype else torch.bfloat16) for name, _ in plain.named_parameters())
    plain.load_state_dict(consolidated)
    assert train(model, optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0), 2, 3)  # and training goes on


def run_consolidated(case: tuple[str, str]) -> list[str]:
    model, optimizer, scheduler = make(case[0], Path(case[1]), "tied")
    train(model, optimizer, scheduler, 0, 2)
    found, state = optimizer.consolidated_state_dict("fp32"), snapshot(model, optimizer)
    optimizer.close()
    return [name for name, _ in GPT("tied").named_parameters() if not torch.equal(found[name].view(-1), state[f"master {name}"])]


def test_every_rank_gets_the_whole_model(tmp_path: Path) -> None:
    for found in run_world(2, run_consolidated, [("3-host", str(tmp_path))])[0]:
        assert found == []


def test_it_is_the_model_after_the_last_update(tmp_path: Path) -> None:
    model, optimizer, scheduler = make("2-host-overlapped", tmp_path)
    adam_ = rules.adam_

    def slow(*arguments: Any, **options: Any) -> None:
        threading.Event().wait(0.05)
        adam_(*arguments, **options)

    with mock.patch.object(rules, "adam_", slow):
        train(model, optimizer, scheduler, 0, 1)
        found = optimizer.consolidated_state_dict("fp32")
    state = snapshot(model, optimizer)
    assert all(torch.equal(found[name.removeprefix("master ")].view(-1), value) for name, value in state.items() if name.startswith("master "))


def test_large_models_are_several_files_with_an_index(tmp_path: Path) -> None:
    model, optimizer = saved("3-nvme", tmp_path, "frozen")
    state = snapshot(model, optimizer)
    done = export(tmp_path / "saved", tmp_path / "out", torch.float32, shard_nbytes=20_000)
    assert len(done.files) > 2 and all(file.stat().st_size < 20_000 + 8192 or len(load_file(file)) == 1 for file in done.files)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == done.nbytes
    for name in dict(model.named_parameters()):
        with safe_open(tmp_path / "out" / index["weight_map"][name], "pt") as file:
            want = state[f"master {name}"] if f"master {name}" in state else state[name].float()
            assert torch.equal(file.get_tensor(name), want.view(file.get_slice(name).get_shape()))


def test_hugging_face_reads_it(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=2, n_head=2)
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config)
    optimizer = zk.ZeroOptimizer(model, torch.optim.AdamW(model.parameters(), lr=1e-2), stage=3, dtype="bf16", optimizer_tier="host")
    ids = torch.arange(16)[None]
    for _ in range(2):
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.save_checkpoint(tmp_path / "saved")
    export(tmp_path / "saved", tmp_path / "out", shard_nbytes=30_000)
    again = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    want = optimizer.consolidated_state_dict()
    assert all(torch.equal(value, want[name]) for name, value in again.state_dict().items())
    assert again.lm_head.weight is again.transformer.wte.weight


def test_what_cannot_be_exported_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    model, optimizer = saved("3-host", tmp_path)
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").touch()
    with pytest.raises(ValueError, match="not an empty folder"):
        export(tmp_path / "saved", tmp_path / "used")
    with zk.gather(model.parameters(), write=True), torch.no_grad():
        model.norm.weight[0] = 1e6
    optimizer.save_checkpoint(tmp_path / "saved")
    with pytest.raises(CheckpointError, match=r"norm\.weight.*65504"):
        export(tmp_path / "saved", tmp_path / "out", torch.float16)
    (file,) = (tmp_path / "saved").glob("step-*/*.safetensors")
    data = bytearray(file.read_bytes())
    data[-5] ^= 4
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=file.name):
        export(tmp_path / "saved", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["saved", "used"]


def test_the_command_says_what_it_wrote(tmp_path: Path) -> None:
    saved("3-host", tmp_path)
    done = CliRunner().invoke(app, ["export", str(tmp_path / "saved"), str(tmp_path / "out"), "--dtype", "fp32"])
    assert done.exit_code == 0 and "model.safetensors" in done.output and "is tied to" in done.output
    again = CliRunner().invoke(app, ["export", str(tmp_path / "saved"), str(tmp_path / "out")])
    assert again.exit_code == 2 and "zk export:" in again.output and "name a new one" in again.output
    wrong = CliRunner().invoke(app, ["export", str(tmp_path), str(tmp_path / "new"), "--dtype", "int8"])
    assert wrong.exit_code == 2 and "--dtype must be one of" in wrong.output


def test_the_checkpoint_that_latest_names_is_exported_and_loaded(tmp_path: Path) -> None:
    """As the engine of zk.initialize saves: a folder of a tag, named by ``latest``."""
    model, adam = nn.Linear(8, 8), {"type": "AdamW", "params": {"lr": 0.1}}
    engine, optimizer, *_ = zk.initialize(model, config={"optimizer": adam, "train_batch_size": 1, "gradient_clipping": 1.0})
    root, weights = tmp_path / "ck", []
    for tag in ("z1", "a2", "t3"):
        engine.backward(engine(torch.ones(1, 8)).sum())
        engine.step()
        engine.save_checkpoint(root, tag=tag)
        weights.append(model.weight.detach().clone())
    (root / "latest").write_text("a2\n")  # neither the last in time nor the last by name
    done = CliRunner().invoke(app, ["export", str(root), str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["weight"], weights[1])
    optimizer.load_checkpoint(root)
    assert torch.equal(model.weight, weights[1])
    engine.load_checkpoint(root)
    assert torch.equal(model.weight, weights[1]) and engine.global_steps == 2
    (root / "latest").write_text("gone")
    lost = CliRunner().invoke(app, ["export", str(root), str(tmp_path / "more")])
    assert lost.exit_code == 2 and f"{root}/gone, which {root}/latest names, has no checkpoint" in lost.output.replace("\n", "")
    (root / "gone").mkdir()
    (root / "gone" / "mp_rank_00_model_states.pt").touch()
    with pytest.raises(CheckpointError, match=r"DeepSpeed wrote it: .*zero_to_fp32.py.*zk.load_pretrained"):
        optimizer.load_checkpoint(root)
    optimizer.close()


class Noted(nn.Linear):
    """A layer whose own code adds to state_dict() what it reads off its weight, and what is no tensor."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight.largest"] = self.weight.detach().abs().max()

    def get_extra_state(self) -> Any:
        return {"uses": 3}


def whole_model(options: dict[str, Any]) -> list[bool]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Noted(8, 8) for _ in range(3)))
    model[0].requires_grad_(False)
    with zk.ZeroOptimizer(model, torch.optim.AdamW(model.parameters()), units=[Noted], **options) as optimizer:
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        got, want = optimizer.consolidated_state_dict(), model.state_dict()
        some = optimizer.consolidated_state_dict(names=["1.weight"])
    same = [torch.equal(got[name], value) if isinstance(value, torch.Tensor) else got[name] == value for name, value in want.items()]
    return [got.keys() == want.keys(), all(same), got["2._extra_state"] == {"uses": 3}, list(some) == ["1.weight"]]


def test_the_whole_model_has_what_modules_add_to_state_dict(tmp_path: Path) -> None:
    drive = {"stage": 3, "param_tier": "nvme", "optimizer_tier": "nvme", "nvme_path": tmp_path}
    cases: list[dict[str, Any]] = [{"stage": 0}, {"stage": 2, "overlap_step": True}, {"stage": 3}, drive]
    for case in cases:
        assert whole_model(case) == [True] * 4, case
    assert run_world(2, whole_model, cases) == [[[True] * 4] * 2] * len(cases)


def test_what_modules_add_is_compared_where_it_belongs_to_a_frozen_weight(tmp_path: Path) -> None:
    def built(scale: float) -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(Noted(8, 8), Noted(8, 8))
        model[0].requires_grad_(False)
        model[0].weight *= scale
        model[1].weight.data.mul_(scale)
        return model

    with zk.ZeroOptimizer(model := built(1), torch.optim.AdamW(model.parameters())) as optimizer:
        optimizer.save_checkpoint(tmp_path / "saved")
    with zk.ZeroOptimizer(model := built(2), torch.optim.AdamW(model.parameters())) as optimizer:
        with pytest.raises(ValueError, match=r"saved over another base: '0.weight.largest' and 0 more"):
            optimizer.load_checkpoint(tmp_path / "saved")
        model[0].weight /= 2
        optimizer.load_checkpoint(tmp_path / "saved")  # what is trained comes from the checkpoint
        assert torch.equal(model[1].weight, built(1)[1].weight)
    assert export(tmp_path / "saved", tmp_path / "out").entries == ["0.weight.largest"]


def test_a_folder_that_is_there_and_empty_is_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the caller is, and behind a link: neither may be replaced."""
    saved("3-host", tmp_path)
    folder, link = tmp_path / "here", tmp_path / "link"
    (folder / ".partial").mkdir(parents=True)  # of an export that was killed
    link.symlink_to(folder)
    monkeypatch.chdir(folder)
    assert export(tmp_path / "saved", Path()).files == [Path("model.safetensors")]
    assert [path.name for path in Path().iterdir()] == ["model.safetensors"]
    Path("model.safetensors").unlink()
    export(tmp_path / "saved", link, shard_nbytes=1000)
    found = sorted(path.name for path in Path().iterdir())
    assert found[-1] == "model.safetensors.index.json" and len(found) > 2


class Mixed(nn.Module):
    """A layer, and numbers of other kinds beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.rows = nn.Parameter(torch.arange(1000, 1010), requires_grad=False)
        self.chosen = nn.Parameter(torch.tensor([True, False]), requires_grad=False)


@pytest.mark.parametrize("stage", (2, 3))
def test_numbers_that_are_not_of_floating_point_are_not_cast(stage: int, tmp_path: Path) -> None:
    model = Mixed()
    with zk.ZeroOptimizer(model, torch.optim.AdamW(model.layer.parameters()), stage=stage) as optimizer:
        optimizer.save_checkpoint(tmp_path / "saved")
        written = load_file(export(tmp_path / "saved", tmp_path / "out", torch.bfloat16).files[0])
        for found in (written, optimizer.consolidated_state_dict("bf16")):
            assert found["layer.weight"].dtype == torch.bfloat16
            assert found["rows"].tolist() == list(range(1000, 1010)) and found["chosen"].tolist() == [True, False]
            assert (found["rows"].dtype, found["chosen"].dtype) == (torch.int64, torch.bool)


def test_a_module_that_has_two_names_has_its_buffers_under_both(tmp_path: Path) -> None:
    def built() -> nn.Module:
        norm = nn.BatchNorm1d(4)
        return nn.Sequential(norm, nn.Linear(4, 4), norm)

    model, again = built(), built()
    with zk.ZeroOptimizer(model, torch.optim.AdamW(model.parameters())) as optimizer:
        model(torch.randn(3, 4)).sum().backward()
        optimizer.step()
        found = optimizer.consolidated_state_dict()
        assert found.keys() == model.state_dict().keys()
        again.load_state_dict(found)
        optimizer.save_checkpoint(tmp_path)
        optimizer.load_checkpoint(tmp_path)
    assert torch.equal(again[2].running_mean, model[0].running_mean)


@pytest.mark.parametrize("what", ("consolidated", "digests"))
def test_what_was_gathered_to_be_read_is_released_after_ctrl_c(what: str, tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    model[0].requires_grad_(False)
    tiers = {"stage": 3, "param_tier": "host", "optimizer_tier": "host", "dtype": "bf16", "units": [nn.Linear]}
    with zk.ZeroOptimizer(model, torch.optim.AdamW(model.parameters()), **tiers) as optimizer:
        interrupted = mock.Mock(side_effect=KeyboardInterrupt)
        where = (UnitStore, "whole_of") if what == "consolidated" else (base, "digest_of")
        with mock.patch.object(*where, interrupted), pytest.raises(KeyboardInterrupt):
            optimizer.consolidated_state_dict() if what == "consolidated" else optimizer.save_checkpoint(tmp_path, frozen=False)
        model(torch.ones(2, 8)).float().sum().backward()
        optimizer.step()
        assert [held.unit.name for held in optimizer.held if held.state is not State.RELEASED] == []
