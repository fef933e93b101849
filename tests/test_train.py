"""What a newcomer runs: the train command, alone and on two ranks, and the examples."""

from __future__ import annotations

import contextlib
import difflib
import io
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from tests import programs
from tests.programs import Program, rank_of
from tests.world import free_port
from zk.tools.cli import app
from zk.tools.train.data import Text, default_text
from zk.tools.train.gpt import GPT, GPTConfig

ROOT = Path(__file__).parent.parent
SMALL = ["--steps", "6", "--batch", "2", "--layers", "2", "--width", "32", "--heads", "2", "--context", "32", "--sample", "8", "--lr", "3e-3"]


def run(*command: str, ok: bool = True) -> str:
    """The command's output; its own failure is the test's."""
    done = programs.run(*command, env={**os.environ, "COLUMNS": "160"})
    assert (done.returncode == 0) == ok, done.stdout + done.stderr
    return done.stdout + done.stderr


def here(out: Path, *options: str) -> str:
    """What `zk train` prints that runs in this process."""
    done = CliRunner().invoke(app, ["train", *SMALL, *options, "--out", str(out)], env={"COLUMNS": "160"}, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def refused(*options: str) -> str:
    """What `zk train` says as it ends in this process, with an exit code and no error of Python's."""
    with pytest.raises(SystemExit) as ended, contextlib.redirect_stderr(io.StringIO()) as said:
        app(["train", *SMALL, *options])
    assert ended.value.code
    return said.getvalue()


def last_loss(shown: str) -> float:
    """The loss of the last step that was printed."""
    return float(re.findall(r"step \d+/\d+ \| loss ([\d.]+)", shown)[-1])


def test_train_learns_reports_and_saves(tmp_path: Path) -> None:
    shown = run("-m", "zk", "train", *SMALL, "--steps", "40", "--out", str(tmp_path), "--check", "--dtype", "fp32")
    before, after = map(float, re.search(r"validation loss +([\d.]+) -> ([\d.]+)", shown).groups())  # type: ignore[union-attr]
    assert after < before - 0.5
    assert re.search(r"host +moments .* 8\.\d\d", shown)
    mine, plain = re.search(r"last loss ([\d.]+), plain PyTorch ([\d.]+)", shown).groups()  # type: ignore[union-attr]
    assert float(mine) == pytest.approx(float(plain), rel=1e-4)
    model = GPT(GPTConfig(layers=2, width=32, heads=2, context=32))
    model.load_state_dict(load_file(tmp_path / "model.safetensors"))


@pytest.mark.device_only
def test_a_gpu_trains_in_bf16_from_host_memory_and_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    shown = here(tmp_path, "--overlap-step", "--save-every", "3", "--check")
    assert "stage 3, bfloat16, parameters on host, optimizer on host, 1 rank" in shown
    assert re.search(r"device +grad +0\.\d\d +2\.00", shown) and re.search(r"device memory +[\d.]+ [KMG]iB at most", shown)
    assert float(re.search(r"largest difference of any step (\S+)", shown)[1]) < 1e-3  # type: ignore[index] # plain PyTorch sums the norm in fp32
    want, loss = load_file(tmp_path / "model.safetensors"), last_loss(shown)
    shutil.rmtree(max((tmp_path / "checkpoints").glob("step-*")))
    again = here(tmp_path, "--overlap-step", "--resume", "auto")
    assert "resume    after step 3" in again and last_loss(again) == loss
    got = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(got[name], value) for name, value in want.items())
    assert again.split("sample after")[1].split("validation")[0] == shown.split("sample after")[1].split("validation")[0]


def test_micro_batches_that_go_block_by_block_learn_the_same(tmp_path: Path) -> None:
    place = ["--optimizer-tier", "nvme", "--param-tier", "nvme", "--nvme-path", str(tmp_path), "--dtype", "fp32", "--steps", "3"]
    shown, found = [], []
    for order in ("horizontal", "auto"):
        shown.append(here(tmp_path, *place, "--accumulate", "3", "--accumulation", order))
        found.append(last_loss(shown[-1]))
    assert found[0] == pytest.approx(found[1], abs=1e-3)
    gathers = [int(re.search(r"gathers +(\d+)", text)[1]) for text in shown]  # type: ignore[index]
    assert gathers[1] < gathers[0]
    said = refused("--accumulation", "diagonal", "--out", str(tmp_path))
    assert "--accumulation must be horizontal, vertical or auto; got 'diagonal'" in said


@pytest.mark.device
def test_two_ranks_learn_what_one_process_learns_from_twice_the_batch(tmp_path: Path) -> None:
    options, port = ["--dtype", "fp32", "--out", str(tmp_path), "--steps", "3"], free_port()
    ranks = [Program("-m", "zk", "train", *SMALL, *options, env=rank_of(2, rank, port)) for rank in range(2)]
    (shown, _), _ = [rank.communicate() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    first, two = load_file(tmp_path / "model.safetensors"), last_loss(shown)
    alone = run("-m", "zk", "train", *SMALL, *options, "--batch", "4")
    second = load_file(tmp_path / "model.safetensors")
    assert "2 ranks" in shown and two == pytest.approx(last_loss(alone), abs=2e-3)
    for name, value in first.items():
        torch.testing.assert_close(value, second[name], rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.parametrize(
    "options",
    (
        ["--stage", "2", "--dtype", "bf16"],
        ["--stage", "0", "--optimizer-tier", "device"],
        ["--accumulate", "2", "--dtype", "fp16"],
        ["--dtype", "bf16", "--compute-dtype", "fp32"],
    ),
)
def test_other_options_run(options: list[str], tmp_path: Path) -> None:
    assert "validation loss" in here(tmp_path, *options)


def test_a_run_that_diverges_says_what_to_do(tmp_path: Path) -> None:
    shown = here(tmp_path, "--lr", "1e20", "--dtype", "fp32")
    assert re.search(r"-> nan nats per byte: try a lower --lr", shown)


@pytest.mark.parametrize(
    ("options", "message"),
    (
        (["--optimizer-tier", "nvme"], "nvme_path is not set"),
        (["--width", "33"], "width must be a multiple of heads"),
        (["--data", "no-such-file"], "no-such-file"),
        (["--dtype", "int3"], "dtype must be one of"),
        (["--compute-dtype", "fp32"], "needs dtype='bf16' or 'fp16'"),
    ),
)
def test_bad_options_end_with_one_clear_line(options: list[str], message: str) -> None:
    assert message in refused(*options)


def test_a_program_of_bad_options_ends_without_a_traceback() -> None:
    shown = run("-m", "zk", "train", *SMALL, "--stage", "7", ok=False)
    assert "stage must be 0, 1, 2 or 3; got 7" in shown and "Traceback" not in shown


def test_users_own_text_is_used_and_too_little_is_refused(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be, that is the question. " * 200)
    assert f"{text}" in here(tmp_path, "--data", str(text))
    text.write_text("too little")
    assert "has 10 bytes, too few" in refused("--data", str(text))


def test_training_and_validation_text_are_disjoint_parts_of_real_text() -> None:
    raw = default_text()
    text = Text.of(raw, 64)
    assert len(raw) > 1_000_000 and len(text.train) + len(text.valid) == len(raw)
    assert 0.08 < len(text.valid) / len(raw) < 0.12
    assert b"def " in raw and b"expression" in raw


def test_examples_run_alike_and_differ_only_where_zk_is_adopted(tmp_path: Path) -> None:
    plain, adopted = ((ROOT / "examples" / name).read_text().splitlines() for name in ("train_gpt.py", "train_gpt_zk.py"))
    body = [line for line in difflib.unified_diff(plain, adopted, n=0, lineterm="") if line[0] in "+-" and line[:3] not in ("+++", "---")]
    code = [line[1:].strip() for line in body if "train_gpt" not in line and line[1:].strip()]
    assert code == ["import zk", 'optimizer = zk.ZeroOptimizer(model, optimizer, stage=3, param_tier="host", optimizer_tier="host")']
    outputs = []
    for name in ("train_gpt.py", "train_gpt_zk.py"):
        shown = run(str(ROOT / "examples" / name), str(ROOT / "LICENSE"), "5")
        outputs.append([float(value) for value in re.findall(r"loss ([\d.]+)", shown)])
    assert outputs[0] == pytest.approx(outputs[1], abs=2e-4)
    assert outputs[1][-1] < outputs[1][0]
