"""`zk train` and the examples, as a newcomer runs them: alone, on two ranks, without triton."""

import difflib
import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from tests import programs
from tests.programs import Program, rank_of
from tests.world import free_port
from zk.tools.cli import app
from zk.tools.gpt import GPT, GPTConfig, config_of
from zk.tools.train import read_text, split

ROOT = Path(__file__).parent.parent
SIZES = {"--model": "gpt:layers=2,width=32,heads=2", "--context": "32", "--batch": "2"}
SMALL = [word for pair in SIZES.items() for word in pair] + ["--sample", "8", "--steps", "6", "--data", str(ROOT / "README.md")]
ENV = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "160", "ZK_QUIET": "1"}


def command(out: Path, *more: str) -> list[str]:
    """Arguments of a program."""
    return ["-m", "zk", "train", *SMALL, "--out", str(out), *more]


def here(out: Path, *more: str, status: int = 0) -> str:
    """What `zk train` prints that runs in this process."""
    done = CliRunner().invoke(app, command(out, *more)[2:], env={"COLUMNS": "160"})
    assert done.exit_code == status and "Traceback" not in done.output, done.output
    return done.output


def weights(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / "model" / "model.safetensors")


def same(one: Path, two: Path) -> bool:
    left, right = weights(one), weights(two)
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def losses(shown: str) -> list[float]:
    """Before and after training."""
    return [float(value) for value in re.findall(r"training \.\.\. ([\d.]+) nats per byte", shown)]


@pytest.fixture(autouse=True)
def no_picture(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """As without matplotlib, half a run's time, in this process."""
    if "picture" not in request.node.name:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, find=importlib.util.find_spec: find(name) if name != "matplotlib" else None)


def test_it_learns_and_leaves_a_model_and_a_picture_in_which_the_line_of_memory_is_inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figure, drawn = pytest.importorskip("matplotlib.figure").Figure, list[Any]()
    monkeypatch.setattr(figure, "savefig", lambda self, *where, save=figure.savefig, **how: (drawn.append(self), save(self, *where, **how)))
    shown = here(tmp_path, "--steps", "40", "--dtype", "fp32")
    before, after = losses(shown)
    assert after < before - 0.5
    assert re.search(r"step 40/40  loss \d\.\d{4}  [\d.]+ s/step  [\d,]+ bytes/s  waits \d+%", shown)
    assert re.search(r"step  1/40  loss \d\.\d{4}\n", shown)  # no rate, as that has compilation
    assert re.search(r"sample +before training\n  \| ", shown) and "sample       after training" in shown
    bottom, top = drawn[0].axes[2].get_ylim()
    assert all(bottom < y < 0.99 * top for y in drawn[0].axes[2].lines[0].get_ydata())
    assert (tmp_path / "training.png").read_bytes().startswith(b"\x89PNG")
    GPT(GPTConfig(layers=2, width=32, heads=2, context=32)).load_state_dict(weights(tmp_path))


@pytest.mark.device
def test_two_ranks_learn_what_one_learns_from_twice_the_batch(tmp_path: Path) -> None:
    options, port = ["--dtype", "fp32", "--sample", "0", "--steps", "3"], free_port()
    ranks = [Program(*command(tmp_path / "two", *options), env=rank_of(2, rank, port)) for rank in range(2)]
    shown = [rank.communicate()[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0] and shown[1] == ""
    one = here(tmp_path / "one", *options, "--batch", "4")
    for name, value in weights(tmp_path / "one").items():
        torch.testing.assert_close(weights(tmp_path / "two")[name], value, rtol=1e-3, atol=1e-4)
    assert losses(shown[0])[0] == pytest.approx(losses(one)[0], abs=0.1)


def test_a_killed_run_resumes_to_the_last_digit(tmp_path: Path) -> None:
    place = ["--dtype", "bf16", "--optimizer-tier", "nvme", "--nvme-path", str(tmp_path)]
    options = [*place, "--save-every", "2", "--steps", "12"]
    whole = here(tmp_path / "whole", *options)
    process = Program(*command(tmp_path / "killed", *options), env=ENV)
    wait_for(process, tmp_path / "killed")
    process.send_signal(signal.SIGKILL)
    process.communicate()
    again = here(tmp_path / "killed", *options, "--resume", "auto")
    assert re.search(r"resume +after step \d+, from", again)
    assert losses(again)[-1] == losses(whole)[-1] and same(tmp_path / "whole", tmp_path / "killed")
    samples = [re.search(r"(?s)sample +after training.*?saved", shown) for shown in (whole, again)]
    assert samples[0] and samples[1] and samples[0][0] == samples[1][0]


def wait_for(process: Program, out: Path) -> None:
    """Until a run has saved its first checkpoint."""
    while not (out / "checkpoints" / "latest").exists():
        assert process.returncode is None
        time.sleep(0.01)


@pytest.mark.parametrize(("number", "status"), ((signal.SIGINT, 130), (signal.SIGTERM, 0)))
def test_ctrl_c_and_sigterm_save_and_say_so(number: int, status: int, tmp_path: Path) -> None:
    process = Program(*command(tmp_path, "--steps", "100000", "--save-every", "1"), env=ENV)
    wait_for(process, tmp_path)
    process.send_signal(number)
    shown, errors = process.communicate()
    assert process.returncode == status and "Traceback" not in errors
    said = re.search(r"saved after step (\d+) in [\d.]+ s: (\S+); go on with --resume auto", shown)
    assert said and Path(said[2]).name == f"step-{int(said[1]):08}"


def test_a_finished_run_goes_on_with_more_steps(tmp_path: Path) -> None:
    assert "step 6/6" in here(tmp_path, "--resume", "auto")
    assert "all 6 steps are done; to go on, raise --steps" in here(tmp_path, "--resume", "auto", status=2)
    assert "resume       after step 6" in here(tmp_path, "--resume", "auto", "--steps", "8")
    (tmp_path / "text").write_bytes(b"another text, " * 10_000)
    more = ["--resume", str(tmp_path / "checkpoints"), "--data", str(tmp_path / "text")]
    assert "give the same --data" in here(tmp_path, *more, status=2)
    other = ["--model", "gpt:layers=1,width=32,heads=2", "--resume", "auto"]
    assert "not in this model" in here(tmp_path, *other, status=2)
    assert "has no checkpoint" in here(tmp_path, "--resume", str(tmp_path / "model"), status=2)


def test_what_a_user_can_fix_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    for options, message in (
        (["--optimizer-tier", "nvme"], "nvme_path is not set"),
        (["--model", "gpt:width=33"], "heads must divide width; got 4 and 33"),
        (["--model", "moe:1b"], "gpt:125m, gpt:10b"),
        (["--data", "no-such-file"], "no-such-file"),
        (["--dtype", "int3"], "dtype must be one of"),
        (["--stage", "7"], "zk train: stage must be 0, 1, 2 or 3; got 7"),
        (["--data", str(ROOT / "setup.cfg"), "--context", "9999"], "too few for --context 9999"),
        (["--steps", "x"], "Invalid value for '--steps'"),
    ):
        assert message in " ".join(here(tmp_path, *options, status=2).split())


def test_a_learning_rate_that_diverges_is_named(tmp_path: Path) -> None:
    assert "nan nats per byte: try a lower --lr" in here(tmp_path, "--lr", "1e20", "--dtype", "fp32")


def test_sizes_by_name_and_the_text_to_train_on_is_real_and_apart_from_the_one_to_validate_with() -> None:
    assert config_of("gpt:layers=3,context=8", 64) == GPTConfig(layers=3, context=8)
    for spec, about in (("gpt:125m", 125e6), ("GPT:10B", 10e9)):
        with torch.device("meta"):
            model = GPT(config_of(spec, 1024))
        assert sum(param.numel() for param in model.parameters()) == pytest.approx(about, rel=0.06)
    raw = read_text(())
    train, valid = split(raw, 64)
    assert len(raw) > 1_000_000 and len(train) + len(valid) == len(raw)
    assert 0.08 < len(valid) / len(raw) < 0.12 and b"def " in raw and b"expression" in raw


def test_examples_run_alike_and_differ_only_where_zk_is_adopted() -> None:
    paths = [ROOT / "examples" / name for name in ("train_gpt.py", "train_gpt_zk.py")]
    lines = difflib.unified_diff(*(path.read_text().splitlines() for path in paths), n=0, lineterm="")
    code = [line[1:].strip() for line in lines if re.match(r"[+-](?![+-])", line) and "train_gpt" not in line and line[1:].strip()]
    wrapped = 'zk.ZeroOptimizer(model, optimizer, stage=3, param_tier="host", optimizer_tier="host")'
    assert code == ["import zk", f"optimizer = {wrapped}"]
    shown = [programs.run(str(path), str(ROOT / "LICENSE"), "5", env=ENV, check=True).stdout for path in paths]
    found = [[float(value) for value in re.findall(r"loss ([\d.]+)", one)] for one in shown]
    assert found[0] == pytest.approx(found[1], abs=2e-4) and found[1][-1] < found[1][0]


def test_help_and_version_import_no_torch() -> None:
    program = "import sys; from zk.tools.cli import main\ntry: main()\nfinally: print('torch' in sys.modules, 'numpy' in sys.modules)"
    for option, words in (("--help", "Usage: zk"), ("--version", "zk 0.")):
        done = subprocess.run([sys.executable, "-c", program, option], env=ENV, capture_output=True, text=True, check=True)
        assert done.stdout.endswith("False False\n") and words in done.stdout
        commands = re.findall(r"^│ (\w+)  ", done.stdout, re.MULTILINE)
        assert commands == ["train", "plan", "export", "doctor"] * (option == "--help")
