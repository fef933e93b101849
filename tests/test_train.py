"""What a newcomer runs: the train command, alone and under torchrun, and the examples."""

from __future__ import annotations

import difflib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from zk.train.data import Text, default_text
from zk.train.gpt import GPT, GPTConfig

ROOT = Path(__file__).parent.parent
SMALL = ["--steps", "6", "--batch", "2", "--layers", "2", "--width", "32", "--heads", "2", "--context", "32", "--sample", "8", "--lr", "3e-3"]


def run(*command: str, ok: bool = True) -> str:
    """The command's output; its own failure is the test's."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "160"}
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, cwd=ROOT, env=environment, timeout=240)
    assert (done.returncode == 0) == ok, done.stdout + done.stderr
    return done.stdout + done.stderr


def losses(output: str) -> list[str]:
    return re.findall(r"step +\d+/\d+ +loss ([\d.]+)", output)


def test_train_learns_reports_and_saves(tmp_path: Path) -> None:
    shown = run("-m", "zk", "train", *SMALL, "--steps", "40", "--out", str(tmp_path), "--check", "--dtype", "fp32")
    before, after = map(float, re.search(r"validation loss +([\d.]+) -> ([\d.]+)", shown).groups())  # type: ignore[union-attr]
    assert after < before - 0.5
    assert re.search(r"host +moments .* 8\.\d\d", shown)
    mine, plain = re.search(r"last loss ([\d.]+), plain PyTorch ([\d.]+)", shown).groups()  # type: ignore[union-attr]
    assert float(mine) == pytest.approx(float(plain), rel=1e-4)
    assert (tmp_path / "training.png").read_bytes().startswith(b"\x89PNG")
    model = GPT(GPTConfig(layers=2, width=32, heads=2, context=32))
    model.load_state_dict(load_file(tmp_path / "model.safetensors"))


def test_two_ranks_learn_what_one_process_learns_from_twice_the_batch(tmp_path: Path) -> None:
    options = ["--dtype", "fp32", "--out", str(tmp_path)]
    rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--master_addr", "127.0.0.1", "--master_port", "0"]
    launcher = ["-m", "torch.distributed.run", "--nproc_per_node", "2", *rendezvous]
    two = run(*launcher, "-m", "zk", "train", *SMALL, *options)
    first = load_file(tmp_path / "model.safetensors")
    one = run("-m", "zk", "train", *SMALL, *options, "--batch", "4")
    second = load_file(tmp_path / "model.safetensors")
    assert len(losses(two)) == 6
    for a, b in zip(losses(two), losses(one), strict=True):
        assert float(a) == pytest.approx(float(b), abs=2e-3)
    for name, value in first.items():
        torch.testing.assert_close(value, second[name], rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.parametrize(
    "options",
    (["--stage", "2", "--dtype", "bf16"], ["--stage", "0", "--optimizer-tier", "device"], ["--accumulate", "2", "--dtype", "fp16"]),
)
def test_other_options_run(options: list[str], tmp_path: Path) -> None:
    assert "validation loss" in run("-m", "zk", "train", *SMALL, *options, "--out", str(tmp_path))


@pytest.mark.parametrize(
    ("options", "message"),
    (
        (["--stage", "7"], "stage must be 0, 1, 2 or 3; got 7"),
        (["--optimizer-tier", "nvme"], "nvme_path is not set"),
        (["--width", "33"], "--width must be a multiple of --heads"),
        (["--data", "no-such-file"], "no-such-file"),
        (["--dtype", "int3"], "dtype must be one of"),
    ),
)
def test_bad_options_end_with_one_clear_line(options: list[str], message: str) -> None:
    shown = run("-m", "zk", "train", *SMALL, *options, ok=False)
    assert message in shown and "Traceback" not in shown


def test_users_own_text_is_used_and_too_little_is_refused(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be, that is the question. " * 200)
    assert f"{text}" in run("-m", "zk", "train", *SMALL, "--data", str(text), "--out", str(tmp_path))
    text.write_text("too little")
    assert "has 10 bytes, too few" in run("-m", "zk", "train", *SMALL, "--data", str(text), ok=False)


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
        shown = run(str(ROOT / "examples" / name), str(ROOT / "LICENSE"), "12")
        outputs.append([float(value) for value in re.findall(r"loss ([\d.]+)", shown)])
    assert outputs[0] == pytest.approx(outputs[1], abs=2e-4)
    assert outputs[1][-1] < outputs[1][0]
