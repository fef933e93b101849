"""zk.profile: a trace of a few steps, by itself and as a callback."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zk
from tests.test_monitor import step, wrapped
from tests.test_timeline import inside
from zk.core.timeline import LABELS, RESOURCES, Span, Timeline
from zk.tools.monitor import profile
from zk.tools.monitor.profile import bytes_by_tier, counters
from zk.tools.monitor.runfile import COLUMNS, FILE, read


def tracks(path: Path) -> tuple[dict[str, list[dict[str, Any]]], set[str], list[dict[str, Any]]]:
    """Counter events by name, names of rows, and spans, of a trace."""
    events = json.loads(path.read_text())["traceEvents"]
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "C":
            found[event["name"]].append(event)
    names = {event["args"]["name"] for event in events if event["ph"] == "M" and event["name"] == "thread_name"}
    return found, names, [event for event in events if event["ph"] == "X"]


def uses(path: Path) -> set[str]:
    """Kinds of the spans at which arrows of a trace end; each begins at a read, and all are drawn."""
    found = inside(json.loads(path.read_text()))
    begins, ends = ({arrow["id"]: (arrow["ts"], span["cat"]) for arrow, span in found if arrow["ph"] == phase} for phase in "sf")
    assert begins.keys() == ends.keys() and len(found) == 2 * len(begins) >= 8
    assert all(kind == "read" and at < ends[number][0] for number, (at, kind) in begins.items())
    return {kind for _, kind in ends.values()}


def test_a_trace_of_so_many_steps_has_rows_for_people_and_counters(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with wrapped(stage=3, param_tier="nvme", optimizer_tier="nvme", nvme_path=tmp_path) as optimizer:
        recording = zk.profile(optimizer, path, steps=2, skip=1)
        for number in range(5):
            step(optimizer)
            assert path.exists() == (number >= 2)
        assert not recording.handles
        written = path.stat().st_mtime_ns
        recording.close()
        assert path.stat().st_mtime_ns == written
        assert bytes_by_tier(optimizer)["nvme"] == 3 * 4 * sum(param.numel() for param in optimizer.model.parameters())
    found, names, spans = tracks(path)
    assert {"drive reads", "drive writes", "optimizer update"} <= {name.rstrip(" 0123456789") for name in names}
    assert {"MiB on host", "MiB on nvme", "GB/s drive reads", "GB/s drive writes"} == set(found)
    start, stop = min(event["ts"] for event in spans), max(event["ts"] + event["dur"] for event in spans)
    assert all(start - 1e5 <= event["ts"] <= stop + 1e5 for events in found.values() for event in events)
    read = sum(int(event["name"].split()[0]) << 10 for event in spans if event["cat"] == "read")
    counted = sum(event["args"]["GB/s"] * 0.01 * 1e9 for event in found["GB/s drive reads"])
    assert counted == pytest.approx(read, rel=1e-3) and read > 0
    assert LABELS.keys() == RESOURCES.keys()
    assert {"update", "wait"} <= uses(path)
    assert {"training: forward", "waits"} <= {name.rstrip(" 0123456789") for name in names}


def test_a_rate_is_that_of_the_bytes_in_its_bin() -> None:
    spans = [Span("read", "10000 KiB at 0", 5_000_000, 15_000_000, "io"), Span("write", "checkpoint", 0, 1, "io")]
    events = list(counters(Timeline(spans, 0, 20_000_000, "main"), [(0, {"host": 1 << 20})], 1, 0))
    assert events[0] == {"ph": "C", "name": "MiB on host", "pid": 1, "ts": 0.0, "args": {"MiB": 1.0}}
    rates = [event["args"]["GB/s"] for event in events[1:]]
    assert rates == pytest.approx([0.512, 0.512, 0.0]) and {event["name"] for event in events[1:]} == {"GB/s drive reads"}


def test_a_context_ends_early_and_numbers_are_checked(tmp_path: Path) -> None:
    with wrapped(stage=2) as optimizer:
        with zk.profile(optimizer, tmp_path / "early.json", steps=9, skip=0):
            step(optimizer)
        assert "MiB on host" in tracks(tmp_path / "early.json")[0]
        with zk.profile(optimizer, tmp_path / "none.json", skip=5):
            step(optimizer)
        assert not (tmp_path / "none.json").exists()
        zk.profile(optimizer, tmp_path / "first.json", steps=1, skip=0)  # each ends while torch goes through hooks
        zk.profile(optimizer, tmp_path / "second.json", steps=1, skip=1)
        later: list[int] = []
        optimizer.register_step_post_hook(lambda *_: later.append(1))
        for _ in range(3):
            step(optimizer)
        assert (tmp_path / "first.json").exists() and (tmp_path / "second.json").exists() and len(later) == 3
        for options in ({"steps": 0}, {"skip": -1}, {"steps": 1.5}):
            with pytest.raises(ValueError, match="must be a number of steps, at least"):
                zk.profile(optimizer, **options)  # type: ignore[arg-type]


def test_the_callbacks_record_steps_of_trainer_and_lightning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    lightning = pytest.importorskip("lightning")
    from tests.integrations.test_huggingface import made
    from zk.integrations.huggingface import ZeroProfile, ZeroRun, ZeroTrainer

    on_drive = {"stage": 3, "param_tier": "nvme", "optimizer_tier": "nvme", "nvme_path": str(tmp_path / "drive")}
    (tmp_path / "drive").mkdir()
    trainer = made(ZeroTrainer, "gpt2", tmp_path, more={"max_steps": 3, "save_strategy": "no", "eval_strategy": "no"}, zero=on_drive)
    trainer.add_callback(ZeroProfile(tmp_path / "trainer.json", steps=1))
    trainer.add_callback(ZeroRun(tmp_path / "trainer"))
    trainer.train()
    written = read(tmp_path / "trainer" / FILE)
    assert (written["state"], written["done"], written["total"]) == ("ended", 3, 3) and "accumulate" in written["about"]
    assert {"MiB on host", "MiB on nvme"} <= tracks(tmp_path / "trainer.json")[0].keys()
    assert uses(tmp_path / "trainer.json") <= {"update", "forward", "wait"}

    import zk.integrations.lightning as zl

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Sequential(*(nn.Linear(4, 4) for _ in range(8)))

        def training_step(self, batch: Any, number: int) -> Any:
            return self.layer(batch).sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

    monkeypatch.chdir(tmp_path)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    options = {"accelerator": "cpu", "devices": 1, "max_steps": 4, "callbacks": [zl.ZeroProfile("lightning.json", steps=2), zl.ZeroRun()], **quiet}
    strategy = zl.ZeroStrategy(**on_drive, units=[nn.Linear])
    lightning.Trainer(strategy=strategy, **options).fit(Module(), torch.utils.data.DataLoader(torch.ones(8, 4), batch_size=2))
    assert "optimizer update" in tracks(tmp_path / "lightning.json")[1]
    assert uses(tmp_path / "lightning.json") <= {"update", "forward", "wait"}
    written = read(tmp_path / FILE)
    assert (written["state"], written["done"], written["total"]) == ("ended", 4, 4) and written["rows"][-1][COLUMNS.index("loss")] is not None


def test_a_recording_that_has_not_come_to_its_end_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ZK_QUIET", "0")
    with wrapped(stage=2) as optimizer:
        capsys.readouterr()
        for path in (tmp_path, tmp_path / "trace.json" / "deep.json"):  # found out before the steps
            (tmp_path / "trace.json").touch()
            with pytest.raises(OSError, match=f"{path} cannot be written: "):
                zk.profile(optimizer, path)
        zk.profile(optimizer, tmp_path / "new" / "a.json", steps=2, skip=0)
        zk.profile(optimizer, tmp_path / "b.json", steps=2, skip=3)
        step(optimizer)
        profile._close_all()
        assert (tmp_path / "new" / "a.json").exists() and not (tmp_path / "b.json").exists()
        said = sorted(capsys.readouterr().err.splitlines())
        assert "no trace in" in said[0] and "without 1 of its steps" in said[1] and len(said) == 2


def test_a_file_that_is_refused_at_the_end_ends_no_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with wrapped(stage=2) as optimizer:
        zk.profile(optimizer, tmp_path / "there" / "trace.json", steps=1, skip=0)
        (tmp_path / "there").rmdir()
        step(optimizer)
        assert optimizer.metrics()["steps"] == 1 and "trace.json cannot be written: " in caplog.text
