"""`zk train` under torchrun goes on after a rank was killed, and ends with the same model."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from tests.programs import Program, rank_of
from tests.test_train import ENV, command, same
from tests.world import START, free_port, processes
from zk.tools import train
from zk.tools.cli import app
from zk.tools.train import draw


def killed_once(environment: dict[str, str], out: Path, arguments: list[str]) -> None:
    """One of the ranks; the second is killed in its first life, once there is a checkpoint."""
    os.environ.update(environment)
    torch.set_num_threads(1)

    def drawn(text: Tensor, *more: Any) -> tuple[Tensor, Tensor]:
        if (out / "checkpoints" / "latest").exists():
            os.kill(os.getpid(), signal.SIGKILL)
        return draw(text, *more)

    if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        train.draw = drawn
    app(arguments, standalone_mode=False)


def agent(folder: Path) -> LaunchConfig:
    """What torchrun starts two ranks with, of which each is forked from a process that has imported torch."""
    processes()  # the agent makes such a context too
    logs = DefaultLogsSpecs(log_dir=str(folder), redirects=Std.ALL)
    # as --standalone says it
    place = {"rdzv_backend": "c10d", "rdzv_endpoint": f"127.0.0.1:{free_port()}", "logs_specs": logs}
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
    more, port = ("--steps", "4", "--save-every", "2", "--resume", "auto"), free_port()
    whole = [Program(*command(tmp_path / "a", *more), env=rank_of(2, rank, port)) for rank in range(2)]
    started = elastic_launch(agent(tmp_path / "logs"), killed_once)
    started({**ENV, "OMP_NUM_THREADS": "1"}, tmp_path / "b", command(tmp_path / "b", *more)[2:])
    said = "".join(file.read_text() for file in (tmp_path / "logs").rglob("*.log"))
    assert "resume       after step 2" in said, said[-3000:]
    assert all(rank.communicate()[1] == "" for rank in whole)
    assert same(tmp_path / "a", tmp_path / "b")
