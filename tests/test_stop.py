"""Ctrl-C: one line with the step, and the checkpoint to resume from."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from tests.programs import ROOT
from tests.test_resume import job
from zk import ZeroOptimizer
from zk.tools.monitor import stop
from zk.tools.monitor.runfile import FILE, read
from zk.tools.train.data import Text
from zk.tools.train.run import train


def made() -> ZeroOptimizer:
    model = nn.Linear(4, 4)
    return ZeroOptimizer(model, torch.optim.AdamW(model.parameters()))


def step(optimizer: ZeroOptimizer) -> None:
    optimizer.model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_the_line_names_the_newest_checkpoint_that_is_whole(tmp_path: Path) -> None:
    with made() as optimizer:
        step(optimizer)
        assert stop.line(optimizer) == "stopped after step 1; there is no checkpoint to resume from"
        optimizer.save_checkpoint(tmp_path)
        step(optimizer)
        assert stop.line(optimizer) == f"stopped after step 2; resume from {tmp_path}, which is of step 1"
        with mock.patch("zk.checkpoint.save.Save.run", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
            optimizer.save_checkpoint(tmp_path)
        assert stop.line(optimizer) == f"stopped after step 2; resume from {tmp_path}, which is of step 1"
        optimizer.save_checkpoint(tmp_path / "zk")
        optimizer.resume_from = tmp_path  # as the Trainer has it
        assert stop.line(optimizer) == f"stopped after step 2; resume from {tmp_path}, which is of step 2"
    with made() as optimizer:
        optimizer.load_checkpoint(tmp_path / "step-00000001")
        assert stop.line(optimizer).endswith(f"resume from {tmp_path / 'step-00000001'}, which is of step 1")


def test_a_checkpoint_may_have_any_name(tmp_path: Path) -> None:
    with made() as optimizer:
        step(optimizer)
        optimizer.save_checkpoint(tmp_path).rename(tmp_path / "best")
        optimizer.load_checkpoint(tmp_path / "best")
        assert stop.line(optimizer) == f"stopped after step 1; resume from {tmp_path / 'best'}"
    (tmp_path / "best").rename(tmp_path / ".step-00000001.replaced")  # as a crash between two renames leaves it
    with made() as optimizer:
        optimizer.load_checkpoint(tmp_path)
        assert stop.line(optimizer).endswith(f"resume from {tmp_path}")


def test_other_interruptions_keep_their_traceback(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[type[BaseException]] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, *_: seen.append(kind))
    monkeypatch.setattr(stop, "_TRAINING", type(stop._TRAINING)())
    optimizer = made()
    with made():  # a second one does not hook in again
        sys.excepthook(ValueError, ValueError("no"), None)
        sys.excepthook(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert seen == [ValueError] and capsys.readouterr().err.count("zk: stopped after step 0") == 2
    monkeypatch.setenv("ZK_TRACEBACK", "1")
    sys.excepthook(KeyboardInterrupt, KeyboardInterrupt(), None)
    monkeypatch.setenv("ZK_TRACEBACK", "0")
    optimizer.close()  # nothing trains any more
    sys.excepthook(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert seen == [ValueError, KeyboardInterrupt, KeyboardInterrupt] and capsys.readouterr().err == ""


PROGRAM = """
import os, signal, sys, torch, zk
model = torch.nn.Linear(4, 4)
with zk.ZeroOptimizer(model, torch.optim.AdamW(model.parameters())) as optimizer:
    progress = zk.Progress(optimizer, run=sys.argv[2])  # that nobody closes
    for number in range(5):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        progress.step()
        optimizer.zero_grad()
        if number == 1:
            optimizer.save_checkpoint(sys.argv[1])
        if number == 3:
            os.kill(os.getpid(), signal.SIGINT)
"""


def test_a_program_that_is_interrupted_ends_with_one_line_and_the_status_of_ctrl_c(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path), str(tmp_path / "run")],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.stderr.strip() == f"zk: stopped after step 4; resume from {tmp_path}, which is of step 2", done.stderr
    assert done.returncode in (-signal.SIGINT, 128 + signal.SIGINT) and done.stdout == ""
    run = read(tmp_path / "run" / FILE)
    assert (run["state"], run["done"]) == ("interrupted", 4)


def test_the_first_ctrl_c_of_zk_train_saves_and_the_second_ends_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    handler, draw = signal.getsignal(signal.SIGINT), Text.draw
    told = iter([0] * 8 + [1] + [0] * 99)

    def interrupted(part: Any, *arguments: Any) -> Any:
        for _ in range(next(told)):
            os.kill(os.getpid(), signal.SIGINT)
        return draw(part, *arguments)

    with mock.patch.object(Text, "draw", interrupted):
        assert len(train(job(tmp_path, "host")).losses) == 5
    assert re.search(r"Ctrl-C +saved after step 5 in .* go on with --resume auto", capsys.readouterr().out, re.DOTALL)
    assert signal.getsignal(signal.SIGINT) is handler
    told = iter([2])
    with mock.patch.object(Text, "draw", interrupted), pytest.raises(KeyboardInterrupt):
        train(job(tmp_path, "host", resume="auto"))
