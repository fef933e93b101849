"""Folders of checkpoints: one run saves into one at a time, and the newest is found."""

import os
import shutil
import sys
from pathlib import Path
from unittest import mock

import pytest

from tests.core.test_checkpoint import differ, make, snapshot, there, train
from tests.programs import Program
from zk.checkpoint import files
from zk.checkpoint.export import export
from zk.checkpoint.files import CheckpointError

SAVES = """
import os, sys, time
from pathlib import Path
from tests.core.test_checkpoint import make, train
run = make("2-host", Path(sys.argv[1]))
train(*run, 0, 1)
run[1].save_checkpoint(sys.argv[1])
if not os.fork():
    time.sleep(60)
    os._exit(0)
print("saved", flush=True)
time.sleep(60)
"""


def test_a_second_run_is_refused_until_the_first_one_has_ended(tmp_path: Path) -> None:
    other = Program("-c", SAVES, str(tmp_path))
    try:
        assert other.stdout.readline() == "saved\n"
        run = make("2-host", tmp_path)
        train(*run, 0, 2)
        said = rf"another run saves into this folder \(host {os.uname().nodename}, pid {other.pid}\).*{tmp_path}"
        for options in ({}, {"async_save": True}):
            with pytest.raises(OSError, match=said):
                run[1].save_checkpoint(tmp_path, **options)
                run[1].synchronize()
        assert there(tmp_path) == ["latest", "step-00000001"]
    finally:
        other.kill()
    other.wait()
    run[1].save_checkpoint(tmp_path)  # the kernel has let go of the lock; a process that was forked does not hold it
    assert there(tmp_path) == ["latest", "step-00000001", "step-00000002"]


def test_the_newest_is_what_was_finished_last(tmp_path: Path) -> None:
    run = make("2-host", tmp_path)
    for step in range(6):
        train(*run, step, step + 1)
        run[1].save_checkpoint(tmp_path)
    run[1].load_checkpoint(tmp_path / "step-00000001")
    train(*run, 1, 3)
    run[1].save_checkpoint(tmp_path, keep=2)
    assert there(tmp_path) == ["latest", "step-00000003", "step-00000006"], "the old step 3 was replaced"
    (tmp_path / "latest").unlink()
    assert files.find(tmp_path).name == "step-00000003"
    os.mkfifo(tmp_path / "latest")  # which nobody waits for
    run[1].load_checkpoint(tmp_path)
    assert run[1].num_steps == 3


def test_latest_may_name_a_folder_of_checkpoints(tmp_path: Path) -> None:
    run = make("2-host", tmp_path)
    for step, tag in enumerate(("z1", "a2", "t3")):
        train(*run, step, step + 1)
        run[1].save_checkpoint(tmp_path / tag)
    for path in (tmp_path / "latest", tmp_path / "t3" / "latest"):
        path.write_text("a2\n")  # neither the last in time nor the last by name
    export(tmp_path, tmp_path / "out")
    run[1].load_checkpoint(tmp_path)
    assert run[1].num_steps == 2
    (tmp_path / "latest").write_text("gone")
    with pytest.raises(CheckpointError, match="has no checkpoint"):
        run[1].load_checkpoint(tmp_path)


def test_a_crash_leaves_what_is_in_nobodys_way(tmp_path: Path) -> None:
    run = make("3-host", tmp_path)
    train(*run, 0, 1)
    folder = run[1].save_checkpoint(tmp_path)
    want = snapshot(*run[:2])
    folder.rename(tmp_path / ".step-00000001.replaced")  # between two renames
    shutil.copytree(tmp_path / ".step-00000001.replaced", tmp_path / ".step-00000001.partial")
    (tmp_path / ".step-00000000.0123abcd.partial").mkdir()
    (tmp_path / ".latest.tmp").write_text("half")
    again = make("2-host", tmp_path)
    again[1].load_checkpoint(tmp_path)
    assert differ(snapshot(*again[:2]), want) == []
    run[1].save_checkpoint(tmp_path)
    assert there(tmp_path) == ["latest", "step-00000001"]
    (folder / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="has no checkpoint"):  # and no older one is taken for it
        run[1].load_checkpoint(tmp_path)


def test_a_folder_that_cannot_be_locked_is_saved_into_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(files.fcntl, "lockf", mock.Mock(side_effect=OSError(95, "Operation not supported")))
    assert make("2-host", tmp_path)[1].save_checkpoint(tmp_path) is not None
    assert "cannot be locked" in caplog.text


ENDS = """
import sys, threading
from pathlib import Path
from tests.core.test_checkpoint import make, mock, save, train
run, write = make("2-host", Path(sys.argv[1])), save.write_file
train(*run, 0, 1)

def slow(path, entries, values, metadata):
    return write(path, entries, (threading.Event().wait(0.001) or value for value in values), metadata)

mock.patch.object(save, "write_file", slow).start()
run[1].save_checkpoint(sys.argv[1], async_save=True)
sys.exit()
"""


def test_a_process_that_ends_ends_its_save_first(tmp_path: Path) -> None:
    other = Program("-c", ENDS, str(tmp_path))
    said = other.communicate()[1]
    assert other.returncode == 0 and "not saved" not in said, said
    assert (tmp_path / "latest").read_text() == "step-00000001\n"


def test_ctrl_c_says_in_one_line_where_to_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    tell = pytest.importorskip("zk.integrations.huggingface").tell
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    run, error = make("2-host", tmp_path), KeyboardInterrupt()
    train(*run, 0, 2)
    tell(error, run[1], run[1].save_checkpoint(tmp_path))
    sys.excepthook(type(error), error, None)  # as the interpreter does at its end
    said = capsys.readouterr().err
    assert "Traceback" not in said and f"zk: stopped after step 2; resume from {tmp_path}/step-00000002\n" in said
