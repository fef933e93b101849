"""Folders that several runs know of: one of them saves into a folder at a time, and what another machine may still use is left alone."""

from __future__ import annotations

import gc
import os
import signal
import textwrap
from pathlib import Path

import pytest

import zk
from tests.models import train
from tests.programs import Program
from tests.test_load import made
from zk.checkpoint import folders

SAVES = textwrap.dedent(
    """
    import os, sys, time
    from tests.models import train
    from tests.test_load import made
    model, optimizer = made()
    train(model, optimizer, steps=1)
    optimizer.save_checkpoint(sys.argv[1])
    if sys.argv[2] == "fork" and not os.fork():
        time.sleep(60)
        os._exit(0)
    print("saved", flush=True)
    time.sleep(60)
    """
)


@pytest.mark.parametrize("forks", ("fork", "alone"))
def test_a_second_run_is_refused_until_the_first_one_has_ended(forks: str, tmp_path: Path) -> None:
    other = Program("-c", SAVES, str(tmp_path), forks)
    try:
        assert other.stdout.readline() == "saved\n"
        model, optimizer = made()
        train(model, optimizer, steps=2)
        said = rf"another run saves into this folder \(host {os.uname().nodename}, pid {other.pid}, since 20..-..-..T.*\).*{tmp_path}"
        for options in ({}, {"async_save": True}):
            with pytest.raises(OSError, match=said):
                optimizer.save_checkpoint(tmp_path, **options)
                optimizer.synchronize()
        assert optimizer.save_checkpoint(tmp_path, on_save_error="warn") is None
        assert [path.name for path in folders.whole(tmp_path)] == ["step-00000001"]
        other.send_signal(signal.SIGKILL)
        other.wait()
        optimizer.save_checkpoint(tmp_path)  # the kernel has let go of the lock; a process that was forked does not hold it
        assert (tmp_path / ".lock").exists()
        optimizer.close()
        assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000001", "step-00000002"]
    finally:
        other.kill()


def test_optimizers_of_one_process_may_save_into_one_folder(tmp_path: Path) -> None:
    first, second = made()[1], made()[1]
    first.save_checkpoint(tmp_path)
    second.save_checkpoint(tmp_path)
    first.close()
    assert (tmp_path / ".lock").exists()
    second.close()
    assert not (tmp_path / ".lock").exists()
    dropped = made()[1]
    dropped.save_checkpoint(tmp_path)
    del dropped
    gc.collect()
    assert not (tmp_path / ".lock").exists()


def test_the_newest_is_what_was_finished_last(tmp_path: Path) -> None:
    model, optimizer = made()
    for step in range(6):
        train(model, optimizer, start=step, steps=1)
        optimizer.save_checkpoint(tmp_path)
    optimizer.load_checkpoint(tmp_path / "step-00000001")
    train(model, optimizer, start=1, steps=2)
    optimizer.save_checkpoint(tmp_path, keep=2)
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-00000003", "step-00000006"], "the old step 3 was replaced"
    (tmp_path / "latest").unlink()
    found = folders.latest(tmp_path)
    assert found is not None and found.name == "step-00000003"
    optimizer.close()


def test_names_that_dead_processes_left_are_in_nobodys_way(tmp_path: Path) -> None:
    for name in (f".latest.{os.getpid()}.tmp", ".latest.1.tmp"):
        (tmp_path / name).write_text("half")
    (tmp_path / ".step-00000000.0123abcd.partial").mkdir()
    _, optimizer = made()
    optimizer.save_checkpoint(tmp_path)
    optimizer.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000000"]


def test_a_folder_that_cannot_be_locked_is_saved_into_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(folders.fcntl, "flock", no_locks)
    _, optimizer = made()
    assert isinstance(optimizer, zk.ZeroOptimizer) and optimizer.save_checkpoint(tmp_path) is not None
    assert "cannot be locked" in caplog.text
    optimizer.close()
