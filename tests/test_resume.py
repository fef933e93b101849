"""`zk train` goes on as if it had not been stopped: by a file, by SIGTERM, by a rank that was killed."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from typer.testing import CliRunner

import zk
from tests.programs import Program, rank_of
from tests.world import START, free_port, processes
from zk.checkpoint import CheckpointError
from zk.tools.cli import app
from zk.tools.train import resume
from zk.tools.train.data import Text
from zk.tools.train.gpt import GPTConfig
from zk.tools.train.run import Job, train

ROOT = Path(__file__).parent.parent
SMALL = GPTConfig(width=16, layers=2, heads=2, context=16)
TIERS: dict[str, dict[str, Any]] = {
    "host": {"stage": 3, "param_tier": "host", "optimizer_tier": "host", "prefetch": 2},
    "nvme": {"stage": 3, "param_tier": "nvme", "optimizer_tier": "nvme"},
    "overlapped": {"stage": 2, "optimizer_tier": "host", "overlap_step": True},
}


def job(out: Path, tier: str = "host", **options: Any) -> Job:
    path = {"nvme_path": out.parent} if tier == "nvme" else {}
    zero = zk.ZeroConfig(clip_grad_norm=1.0, dtype="bf16", **TIERS[tier], **path)
    return Job(out=out, model=SMALL, steps=12, batch=2, sample=0, zero=zero, **options)


def weights(out: Path) -> dict[str, Any]:
    return load_file(out / "model.safetensors")


@pytest.mark.parametrize("tier", ("nvme", "overlapped"))
def test_sigterm_saves_and_resume_goes_on_bit_for_bit(tier: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    want = train(job(tmp_path / "unbroken", tier))
    handler = signal.getsignal(signal.SIGTERM)
    draw, count = Text.draw, itertools.count(1)

    def told_to_end(part: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
        if next(count) == 4 + 5:  # four to validate, then one for each step
            os.kill(os.getpid(), signal.SIGTERM)
        return draw(part, *arguments)

    with mock.patch.object(Text, "draw", told_to_end):
        first = train(job(tmp_path / "broken", tier))
    assert len(first.losses) == 5 and first.losses == want.losses[:5]
    assert signal.getsignal(signal.SIGTERM) is handler
    assert "saved after step 5" in capsys.readouterr().out
    again = train(job(tmp_path / "broken", tier, resume="auto"))
    assert again.losses == want.losses and again.valid == want.valid
    assert "after step 5" in capsys.readouterr().out
    left, right = weights(tmp_path / "unbroken"), weights(tmp_path / "broken")
    assert left.keys() == right.keys() and all(bool((left[name] == right[name]).all()) for name in left)


def test_checkpoints_now_and_then_and_from_a_named_folder(tmp_path: Path) -> None:
    want = train(job(tmp_path / "a", save_every=5, keep=3))
    names = sorted(path.name for path in (tmp_path / "a" / "checkpoints").glob("step-*"))
    assert names == ["step-00000005", "step-00000010", "step-00000012"]
    again = train(job(tmp_path / "b", resume=str(tmp_path / "a" / "checkpoints" / "step-00000005")))
    assert again.losses == want.losses
    with pytest.raises(ValueError, match="nothing left to do"):
        train(job(tmp_path / "a", resume="auto"))
    model = weights(tmp_path / "a")
    (tmp_path / "a" / "model.safetensors").unlink()  # it ended after its last step, and before it had written the model
    assert train(job(tmp_path / "a", resume="auto")).losses == want.losses
    assert all(bool((model[name] == value).all()) for name, value in weights(tmp_path / "a").items())


def test_a_second_sigterm_does_not_lose_what_the_first_one_saves(tmp_path: Path) -> None:
    steps, save = itertools.count(), resume.save

    def saved(*arguments: Any, **options: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return save(*arguments, **options)

    def told_to_end(part: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
        if next(steps) == 6:
            os.kill(os.getpid(), signal.SIGTERM)
        return draw(part, *arguments)

    draw = Text.draw
    with mock.patch.object(Text, "draw", told_to_end), mock.patch.object(resume, "save", saved):
        train(job(tmp_path))
    assert (tmp_path / "checkpoints" / "latest").exists()


def test_what_cannot_be_resumed_is_refused(tmp_path: Path) -> None:
    train(job(tmp_path / "a", save_every=5))
    (tmp_path / "text").write_bytes(b"another text, " * 10_000)
    with pytest.raises(ValueError, match="the text is another one"):
        train(job(tmp_path / "a", resume="auto", data=(tmp_path / "text",)))
    with pytest.raises(CheckpointError, match="no checkpoint to resume from"):
        train(job(tmp_path / "b", resume=str(tmp_path)))
    with pytest.raises(ValueError, match="--check"):
        train(job(tmp_path / "a", resume="auto", check=True))
    done = CliRunner().invoke(app, ["train", "--out", str(tmp_path / "a"), "--resume", "auto", "--layers", "3", "--steps", "20", "--sample", "0"])
    assert done.exit_code == 2 and "zk train:" in done.output


def command(out: Path, *more: str) -> list[str]:
    small = {"width": 16, "layers": 2, "heads": 2, "context": 16, "batch": 2, "sample": 0, "stage": 2, "dtype": "fp32"}
    return ["-m", "zk", "train", *(f"--{name}={value}" for name, value in small.items()), f"--out={out}", *more]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def test_a_process_that_gets_sigterm_exits_with_0(tmp_path: Path) -> None:
    process = Program(*command(tmp_path, "--steps", "100000", "--save-every", "1"), env=environment())
    latest = tmp_path / "checkpoints" / "latest"
    while not latest.exists() and process.returncode is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate()
    assert process.returncode == 0 and "SIGTERM   saved after step" in said
    assert (tmp_path / "checkpoints" / "latest").exists()


def killed_once(environment: dict[str, str], out: Path, arguments: list[str]) -> None:
    """One of the ranks; the second one ends by itself in its first life, once a checkpoint is there."""
    os.environ.update(environment)
    torch.set_num_threads(1)
    count, draw = itertools.count(1), Text.draw

    def counted(part: Tensor, *more: Any) -> tuple[Tensor, Tensor]:
        if next(count) == 4 + 15:  # four to validate, then one for each step
            while not (out / "checkpoints" / "latest").exists():  # which is written in the background
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        return draw(part, *more)

    if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        Text.draw = counted  # type: ignore[assignment]
    app(arguments, standalone_mode=False)


def agent(folder: Path) -> LaunchConfig:
    """What torchrun starts two ranks with, of which each is forked from a process that has imported torch."""
    processes()  # the agent makes such a context too
    logs = DefaultLogsSpecs(log_dir=str(folder), redirects=Std.ALL)
    # as --master-port says it: addresses of earlier attempts stay in the store
    place = {"rdzv_backend": "static", "rdzv_endpoint": f"127.0.0.1:{free_port()}", "rdzv_configs": {"rank": 0}, "logs_specs": logs}
    return LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=2, max_restarts=2, monitor_interval=0.1, start_method=START, **place)  # type: ignore[arg-type]


@pytest.fixture
def handlers() -> Iterator[None]:
    """The agent leaves its handlers of signals behind."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("handlers")
def test_torchrun_starts_again_after_a_killed_rank_and_ends_with_the_same_model(tmp_path: Path) -> None:
    more, port = ("--steps", "20", "--save-every", "10", "--resume", "auto"), free_port()
    unbroken = [Program(*command(tmp_path / "a", *more), env=rank_of(2, rank, port)) for rank in range(2)]
    elastic_launch(agent(tmp_path / "logs"), killed_once)(environment(), tmp_path / "b", command(tmp_path / "b", *more)[2:])
    # the agent's SIGTERM may end rank 0 before it says who has gone: what it says then is test_rank_killed.py's
    said = "".join(file.read_text() for file in (tmp_path / "logs").rglob("*.log"))
    assert "resume    after step" in said, said[-3000:]
    assert all(rank.communicate()[1] == "" for rank in unbroken)
    left, right = weights(tmp_path / "a"), weights(tmp_path / "b")
    assert all(bool((left[name] == right[name]).all()) for name in left)
