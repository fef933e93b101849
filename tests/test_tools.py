"""What a ZeroOptimizer says of itself: the block at the start, its summary, and the trace of a profile."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zk
from tests.adversary import adversarial_drive
from tests.models import descend
from tests.world import run_world
from zk.logs import log, rank_log, say
from zk.store import UnitStore

TIERS = {"stage": 3, "dtype": "bf16", "param_tier": "nvme", "optimizer_tier": "nvme"}


def made(folder: Path) -> zk.ZeroOptimizer:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    return zk.ZeroOptimizer(model, torch.optim.AdamW(model.parameters()), units=[nn.Linear], nvme_path=folder, **TIERS)


def train(optimizer: zk.ZeroOptimizer, steps: int) -> None:
    for x in torch.randn(steps, 4, 64):
        descend(optimizer, optimizer.model(x).float().square().mean())


def test_the_start_block_is_the_summary_unless_zk_is_quiet(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for quiet in ("", "1"):
        monkeypatch.setenv("ZK_QUIET", quiet)
        made(tmp_path).close()
        say("of a user's")
        said = capsys.readouterr().err
        assert ("stage 3 | bf16, fp32 master split | 1 rank" in said) == ("of a user's" in said) == (not quiet)
        assert ("parameters 24.4 KiB" in said) == (not quiet) and max(map(len, said.splitlines()), default=0) <= 80


def test_a_summary_has_the_bytes_of_each_kind_and_print_the_options(tmp_path: Path) -> None:
    with made(tmp_path) as optimizer:
        drive = optimizer.summary().nbytes["nvme"]
        assert drive["parameters"] == drive["gradients"] == drive["master"] == drive["moments"] // 4 == 3 * 2 * 65 * 64
        name, free, whole = optimizer.summary().tiers["nvme"]
        assert name.endswith(str(tmp_path)[-13:]) and 0 < free <= whole
        shown = str(optimizer)
        assert "zk.ZeroConfig(" in shown and "    optimizer_tier='nvme',\n" in shown
    assert str(optimizer) == "ZeroOptimizer, closed"


def ranges(folder: Path) -> list[str]:
    events: list[dict[str, Any]] = json.loads((folder / "trace.json").read_text())["traceEvents"]
    return [event["name"] for event in events if event.get("cat") == "user_annotation" and event["name"].startswith("zk: ")]


def test_a_profile_names_the_phases_of_the_steps_that_it_records(tmp_path: Path) -> None:
    before = UnitStore.update
    with adversarial_drive(), made(tmp_path) as optimizer:  # which is waited for
        zk.profile(optimizer, tmp_path / "profile", steps=2, skip=1)
        train(optimizer, 4)
        found = ranges(tmp_path / "profile")
        assert UnitStore.update is before, "nothing stays wrapped"
        for words in ("model forward", "1 forward", "1 reduce", "1 update"):
            assert found.count(f"zk: {words}") == 2, (words, found)
        for words in ("1 gather", "wait drive", "read ", "write "):
            assert any(one.startswith(f"zk: {words}") for one in found), words
        with zk.profile(optimizer, tmp_path / "again"):
            train(optimizer, 1)
            with pytest.raises(RuntimeError, match="one profile at a time"):
                zk.profile(optimizer, tmp_path)
        assert ranges(tmp_path / "again").count("zk: model forward") == 1
        with pytest.raises(ValueError, match="steps must be at least 1, or None"):
            zk.profile(optimizer, tmp_path, steps=0)
    with pytest.raises(TypeError, match="needs a ZeroOptimizer; got Linear"):
        zk.profile(nn.Linear(2, 2), tmp_path)


def said(_: None = None) -> list[str]:
    """What is said for all ranks, and of something of a rank's own."""
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("zk").addHandler(handler)
    log.warning("for %s", "all")
    rank_log.warning("my drive")
    logging.getLogger("zk").removeHandler(handler)
    return heard


def test_the_first_rank_speaks_for_all_and_each_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    assert said() == ["zk: for all", "zk: my drive"]
    assert run_world(2, said, [None]) == [[["zk: rank 0: for all", "zk: rank 0: my drive"], ["zk: rank 1: my drive"]]]
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")  # torchrun's, before ranks are joined
    assert said() == ["zk: rank 1: my drive"]
    monkeypatch.delenv("WORLD_SIZE")
    assert said() == ["zk: for all", "zk: my drive"]
