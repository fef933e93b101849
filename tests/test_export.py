"""A checkpoint becomes a plain model, and a model in memory."""

import json
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, load_model
from torch import Tensor, nn
from typer.testing import CliRunner

import zk
from tests.core.test_checkpoint import Made, differ, make, train
from tests.models import GPT
from zk.checkpoint import export as exporting
from zk.checkpoint.export import export
from zk.checkpoint.files import CheckpointError
from zk.tools.cli import app


def saved(setting: str, folder: Path, variant: str = "tied") -> Made:
    run = make(setting, folder, variant)
    train(*run, 0, 2)
    run[1].save_checkpoint(folder / "saved")
    return run


def values_of(run: Made, kind: str) -> dict[str, Tensor]:
    """Parameters, or the masters of those that are trained."""
    names = [n for n, p in run[0].named_parameters() if kind == "param" or p.requires_grad]
    params = [run[0].get_parameter(name) for name in names]
    with zk.gather(params, kind=kind) as values:
        return {name: value.detach().clone().cpu() for name, value in zip(names, values, strict=True)}


@pytest.mark.parametrize(("setting", "dtype"), (("1-device", "fp32"), ("3-host", None), ("3-nvme", "fp32")))
def test_an_exported_model_and_one_in_memory_are_what_was_trained(setting: str, dtype: str | None, tmp_path: Path) -> None:
    run = saved(setting, tmp_path)
    want = values_of(run, "master" if dtype else "param")
    done = export(tmp_path / "saved", tmp_path / "out", torch.float32 if dtype else None)
    assert done.files == [tmp_path / "out" / "model.safetensors"] and done.nbytes == sum(v.nbytes for v in load_file(done.files[0]).values())
    plain = GPT("tied")
    plain.register_buffer("seen", torch.zeros(3))
    plain.to(torch.float32 if dtype else torch.bfloat16)
    assert load_model(plain, done.files[0]) == (set(), [])
    assert differ(dict(plain.named_parameters()), want) == [] and plain.head.weight is plain.tokens.weight
    assert torch.equal(plain.seen.float(), run[0].seen.cpu())
    found = run[1].consolidated_state_dict(dtype)
    assert found.keys() == plain.state_dict().keys() and found["head.weight"] is found["tokens.weight"]
    assert all(torch.equal(found[name], value) and found[name].dtype == value.dtype for name, value in want.items())
    assert train(*run, 2, 3)  # and training goes on


def test_large_models_are_several_files_with_an_index(tmp_path: Path) -> None:
    run = saved("3-nvme", tmp_path, "frozen")
    want = run[1].consolidated_state_dict("fp32")
    done = export(tmp_path / "saved", tmp_path / "out", torch.float32, shard_nbytes=9_000)
    assert len(done.files) > 2 and all(file.stat().st_size < 9_000 + 8192 or len(load_file(file)) == 1 for file in done.files)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == done.nbytes
    found = {name: load_file(tmp_path / "out" / file)[name] for name, file in index["weight_map"].items()}
    assert differ(found, want) == []


def test_what_cannot_be_exported_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    run = saved("3-host", tmp_path)
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").touch()
    with pytest.raises(ValueError, match="name a new folder"):
        export(tmp_path / "saved", tmp_path / "used")
    with zk.gather(run[0].parameters(), write=True), torch.no_grad():
        run[0].norm.weight[0] = 1e6
    run[1].save_checkpoint(tmp_path / "saved")
    with pytest.raises(CheckpointError, match=r"norm\.weight.*65504"):
        export(tmp_path / "saved", tmp_path / "out", torch.float16)
    (file,) = (tmp_path / "saved").glob("step-*/*.safetensors")
    data = bytearray(file.read_bytes())
    data[-5] ^= 4
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=file.name):
        export(tmp_path / "saved", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["saved", "used"]


def test_an_export_that_is_cut_short_has_no_name_and_the_command_says_what_it_wrote(tmp_path: Path) -> None:
    saved("3-host", tmp_path)
    with mock.patch.object(exporting, "value_of", side_effect=[torch.zeros(1), KeyboardInterrupt]), pytest.raises(KeyboardInterrupt):
        export(tmp_path / "saved", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    command = ["export", str(tmp_path / "saved"), str(tmp_path / "out")]
    for more, code, words in (
        (["--dtype", "fp32"], 0, ("model.safetensors", "is tied to")),
        ([], 2, ("zk export:", "name a new folder")),
        (["--dtype", "int8"], 2, ("--dtype must be one of",)),
    ):
        done = CliRunner().invoke(app, [*command, *more])
        assert done.exit_code == code and all(word in done.output for word in words), done.output


class Mixed(nn.Module):
    """A layer, numbers of other kinds, and a module with two names."""

    def __init__(self, start: int) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.again = self.norm
        self.rows = nn.Parameter(torch.arange(4 * start, 4 * start + 10), requires_grad=False)
        self.codes = nn.Parameter(torch.arange(start, start + 6, dtype=torch.uint8), requires_grad=False)


@pytest.mark.parametrize("stage", (2, 3))
def test_numbers_of_other_kinds_are_not_cast_and_buffers_have_all_their_names(stage: int, tmp_path: Path) -> None:
    model, other = Mixed(250), Mixed(0)
    optimizer, again = (zk.ZeroOptimizer(one, torch.optim.AdamW(one.layer.parameters()), stage=stage) for one in (model, other))
    model.norm(torch.randn(3, 4))
    optimizer.save_checkpoint(tmp_path / "saved")
    want = optimizer.consolidated_state_dict("bf16")
    again.load_checkpoint(tmp_path / "saved")
    for found in (load_file(export(tmp_path / "saved", tmp_path / "out", torch.bfloat16).files[0]), again.consolidated_state_dict("bf16")):
        assert found["layer.weight"].dtype == torch.bfloat16
        for name in ("rows", "codes"):
            numbers = getattr(Mixed(250), name)
            assert found[name].dtype == numbers.dtype and torch.equal(found[name], numbers)
    assert want.keys() == model.state_dict().keys() and torch.equal(want["again.running_mean"], model.norm.running_mean)
    Mixed(0).load_state_dict(want)
    assert torch.equal(other.again.running_mean, model.norm.running_mean)
