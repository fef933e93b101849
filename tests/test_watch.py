"""The file of a run, and what is made of it: zk watch, zk report."""

from __future__ import annotations

import html
import io
import json
import os
import platform
import re
import shutil
import subprocess
import time
import types
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import zk
from benchmarks.throttled import ThrottledLink, pretend
from tests.browser import CHROMIUM, Browser
from tests.test_monitor import step, waited, wrapped
from zk import ZeroOptimizer
from zk.tools.cli import app
from zk.tools.monitor import advice, measured, report, runfile, watch
from zk.tools.monitor.rates import USES, Rates
from zk.tools.monitor.runfile import COLUMNS, FILE, FORMAT, RunFile, read, state_of
from zk.tools.monitor.words import seconds, size


@pytest.fixture
def optimizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(runfile, "_ROW_S", 0.0)
    monkeypatch.setattr(advice, "_LEAST", 0.0)
    monkeypatch.setattr(measured, "drive", lambda paths: {"read": 1e9, "write": 1e9, "when": 0.0})
    options: dict[str, Any] = {"stage": 3, "param_tier": "nvme", "optimizer_tier": "nvme", "nvme_path": tmp_path, "host_budget": "8MiB"}
    with wrapped(8, **options) as made:
        yield made


def trained(optimizer: ZeroOptimizer, run: Path, steps: int = 3, done: int = 0, total: int | None = None) -> dict[str, Any]:
    """The file of a run that waits for the drive."""
    with zk.Progress(optimizer, total or done + steps, done=done, run=run, about={"lr": 1e-3}) as progress:
        for number in range(steps):
            step(optimizer)
            waited("drive", 20)
            progress.step(torch.tensor(3.0 - number), tokens=100)
    return read(run / FILE)


class Page(HTMLParser):
    """Checks that all tags are closed; collects series, limits, cells and whatever names another file."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.series: dict[str, str] = {}
        self.limits: list[str] = []
        self.outside: list[str] = []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if tag not in ("meta", "line"):
            self.open.append(tag)
        if "data-series" in found:
            self.series[str(found["data-series"])] = str(found["points"])
        if "data-limit" in found:
            self.limits.append(str(found["data-limit"]))
        self.outside += [name for name in ("src", "href", "xlink:href", "srcset", "action") if name in found]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        assert tag == "line"

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_file_has_all_steps_and_watch_shows_them(optimizer: ZeroOptimizer, tmp_path: Path) -> None:
    start = time.perf_counter()
    run = trained(optimizer, tmp_path / "run", 4)
    passed = time.perf_counter() - start
    rows = [dict(zip(COLUMNS, row, strict=True)) for row in run["rows"]]
    assert [row["step"] for row in rows] == [1, 2, 3, 4] and [row["loss"] for row in rows] == [3, 2, 1, 0]
    assert sum(row["tokens"] for row in rows) == 400 and 0.08 < sum(row["seconds"] for row in rows) <= passed
    for row in rows:
        assert row["wait_drive"] >= 0.02 and row["moved_nbytes"] > 0
        assert sum(row[use] for use in USES) == pytest.approx(row["seconds"], rel=1e-6)
    run["rates"] = {"step_s": 1.0, "tokens_per_s": 9.0, "wait_share": 0.5, "wait_drive_share": 0.5, "update_share": 0.1, "peak_host_gib": 1.0}
    run["rates"] |= {"floor_s": 0.5, "floor_share": 0.5}
    shown = watch.text(watch.lines(run, state_of(run), "run"))
    assert re.match(r"zk watch \| run \| step 4/4 \| ended \| \d s\nzk [\d.]+ \| stage 3 \| fp32", shown)
    assert re.search(r"^host .* \[#*\.*\] .*buffers [\d.]+ MiB, all of the process [\d,.]+ [MG]iB \(budget 8.0 MiB\)$", shown, re.M)
    assert re.search(rf"^\.\.\.{str(tmp_path)[-21:]} [\d.,]+ [GT]iB +\[#\.+\] .*moments [\d.]+ MiB$", shown, re.M)
    assert re.search(r"^a step +waiting for the drive 50%, compute 40%, update 10%$", shown, re.M) and "\nloss " in shown
    assert re.search(r"^rates +9 tok/s \| 1.00 s/step \| 50% waiting: drive", shown, re.M)
    assert re.search(r"^of what is possible +\[#{10}\.{10}\] 50%", shown, re.M)


def test_advice_is_a_budget_and_what_the_planner_says_that_it_saves(
    optimizer: ZeroOptimizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = trained(optimizer, tmp_path / "run")
    found, needed = run["advice"], 16 * sum(param.numel() for param in optimizer.model.parameters())
    assert found["change"] == 'host_budget="1GiB"'  # as much as is worth writing, not as much as is free
    on_drive = sum(run["planned"][kind]["nvme"] for kind in ("parameters", "gradients", "moments"))
    assert size(on_drive) in found["effect"] and on_drive <= needed
    assert found["seconds"] == pytest.approx(sum(run["traffic"].values()) / 1e9)
    said = advice.sentence(found, run["rates"])
    assert re.fullmatch(r'host_budget="1GiB" would keep [\d.]+ MiB more off the drive, and save up to [\d.]+ m?s of a step', said)
    rates = {**run["rates"], "step_s": 1.0, "wait_drive_share": 1e-3}
    assert advice.sentence(found, rates).endswith("save up to 1 ms of a step")  # no more than was waited
    monkeypatch.setattr(advice, "_LEAST", 0.05)
    assert advice.sentence(found, rates) == "" == advice.sentence(None, rates)  # not worth a word
    with wrapped(stage=2) as resident:
        assert trained(resident, tmp_path / "resident")["advice"] is None


@pytest.mark.parametrize("error", (None, KeyboardInterrupt(), ValueError("no <room>")))
def test_how_a_run_ends_is_said(error: BaseException | None, tmp_path: Path) -> None:
    with wrapped(stage=2) as optimizer:
        try:
            with RunFile(optimizer, tmp_path) as run:
                step(optimizer)
                run.step()
                assert state_of(read(tmp_path / FILE)) == "running"
                if error is not None:
                    raise error
        except type(error or AssertionError):
            pass
        run.close()  # once
    expected = {type(None): "ended", KeyboardInterrupt: "interrupted", ValueError: "failed: ValueError('no <room>')"}[type(error)]
    content = read(tmp_path / FILE)
    assert state_of(content) == expected and content["done"] == 1
    Page(report.html(content, expected, "run"))
    content["state"], done = "running", subprocess.Popen(["true"])
    done.wait()
    for process, silent, said in (
        ([platform.node(), done.pid, time.time()], 0, "died: its process"),
        ([*content["process"][:2], content["process"][2] - 60], 0, "died: its process"),  # its number has been given to another
        (content["process"], 300, "running, but not heard of for 5 min"),
        (["elsewhere", 1, 0.0], 300, "running, but not heard of for 5 min"),
        (["elsewhere", 1, 0.0], 0, "running"),
    ):
        assert state_of({**content, "process": process, "updated": time.time() - silent}).startswith(said)


def test_a_resumed_run_goes_on_in_its_file_which_stays_small(
    optimizer: ZeroOptimizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(runfile, "_MOST", 4)
    first = trained(optimizer, tmp_path / "run", 4, total=13)
    run = trained(optimizer, tmp_path / "run", 10, done=3, total=13)  # the fourth was after the checkpoint
    rows = [dict(zip(COLUMNS, row, strict=True)) for row in run["rows"]]
    assert len(first["rows"]) == 4 and len(rows) <= 5 and len(run["memory"]) <= 5
    assert sum(row["steps"] for row in rows) == rows[-1]["step"] == run["done"] == 13 and rows[-1]["loss"] == -6
    assert sum(row["tokens"] for row in rows) == 1300
    assert trained(optimizer, tmp_path / "run", 1)["rows"][0][0] == 1  # from the beginning: another run
    (tmp_path / "run" / FILE).write_text("{}")
    assert [row[0] for row in trained(optimizer, tmp_path / "run", 1, done=3)["rows"]] == [4] and "its figures begin anew" in caplog.text


def test_the_report_is_one_file_with_all_series_and_their_limits(optimizer: ZeroOptimizer, tmp_path: Path) -> None:
    run = trained(optimizer, tmp_path / "a <run>")
    for row in run["rows"]:
        for use in ("seconds", "wait_drive"):
            row[COLUMNS.index(use)] += 1.0
    (tmp_path / "a <run>" / FILE).write_text(json.dumps(run))
    done = CliRunner().invoke(app, ["report", str(tmp_path / "a <run>")], catch_exceptions=False)
    path = tmp_path / "a <run>" / "report.html"
    assert done.exit_code == 0 and done.output.replace("\n", "") == str(path)
    assert report.write(path.parent, tmp_path / "new" / "x.html").exists() and report.write(path.parent, tmp_path).name == "report.html"
    assert report.write(path.parent, tmp_path / "folder") == tmp_path / "folder" / "report.html"
    text = path.read_text()
    page = Page(text)
    assert {"training", "compute", "waiting for the drive", "floor", "parameters", "moments", "buffers", "all of the process"} <= page.series.keys()
    assert page.series["training"].count(",") == 3 and page.series["moments"].count(",") >= 4
    assert "budget 8.0 MiB" in page.limits and any(limit.startswith("host ") for limit in page.limits)
    assert not page.outside and not re.search(r"https?:|url\(|@import|<script", text)
    for said in ("a &lt;run&gt;", "at the fullest point of a step", "for one micro-batch", "param_tier", "lr", "host_budget="):
        assert said in text
    assert html.escape(run["advice"]["change"]) in text


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here; tags, series and addresses are checked above")
def test_a_browser_without_network_draws_the_report(optimizer: ZeroOptimizer, tmp_path: Path) -> None:
    trained(optimizer, tmp_path)
    page, broken = report.write(tmp_path, tmp_path / "report.html"), tmp_path / "broken.html"
    broken.write_text('<!doctype html><img src="http://127.0.0.1:9/x.png"><script>missing()</script>')
    with Browser() as browser:
        browser.open(page.as_uri())
        assert browser.requests() == [page.as_uri()] and not browser.complaints()
        drawn = "[...document.querySelectorAll('[data-series]')].filter(e => e.getBoundingClientRect().width > 100).map(e => e.dataset.series)"
        assert set(browser.evaluate(drawn)) == set(Page(page.read_text()).series)
        assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth")
        browser.open(broken.as_uri())
        assert len(browser.requests()) == 2 and len(browser.complaints()) >= 2


def test_commands_say_what_is_missing(tmp_path: Path) -> None:
    for command in ("watch", "report"):
        done = CliRunner().invoke(app, [command, str(tmp_path)])
        assert done.exit_code == 2 and "zk.Progress(optimizer, run=FOLDER)" in " ".join(done.output.split())
    for content in ({"columns": []}, {"format": FORMAT, "rows": []}):
        (tmp_path / FILE).write_text(json.dumps(content))
        done = CliRunner().invoke(app, ["watch", str(tmp_path)])
        assert done.exit_code == 2 and "is not the file of a run" in " ".join(done.output.split())
    done = CliRunner().invoke(app, ["train", "--out", str(tmp_path / FILE)])
    assert done.exit_code == 2 and "zk_run.json: File exists" in done.output.replace("\n", "") and "Errno" not in done.output
    with wrapped(stage=2) as optimizer, RunFile(optimizer, tmp_path):  # before the first step
        shown = CliRunner().invoke(app, ["watch", str(tmp_path), "--once"], catch_exceptions=False).output
    assert "step 0 | running" in shown
    page = report.html(read(tmp_path / FILE), "ended", "run")
    assert not {"floor", "compute"} & Page(page).series.keys() and "Seconds of a step" not in page  # there was none
    with wrapped(stage=2) as optimizer, pytest.raises(OSError, match="zk_run"):
        RunFile(optimizer, tmp_path / FILE)


def test_other_ranks_write_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with wrapped(stage=2) as optimizer:
        monkeypatch.setattr(optimizer.everyone, "rank", 1)
        with RunFile(optimizer, tmp_path / "run") as run:
            step(optimizer)
            run.step(1.0)
            run.restart()
    assert run.done == 1 and not (tmp_path / "run").exists()


def test_a_folder_that_goes_away_ends_no_run(tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runfile, "_WRITE_S", 0.0)
    with wrapped(stage=2) as optimizer, RunFile(optimizer, tmp_path / "run") as run:
        shutil.rmtree(tmp_path / "run")
        for _ in range(3):
            step(optimizer)
            run.step(1.0)
    assert caplog.text.count("cannot be written") == 1


def test_what_nobody_closes_is_closed_at_the_end_and_what_comes_after_the_last_step_is_no_part_of_it(tmp_path: Path) -> None:
    start = time.perf_counter()
    with wrapped(stage=2) as optimizer:
        inside = types.SimpleNamespace(optimizer=types.SimpleNamespace(optimizer=optimizer))  # accelerate's wrapper in an engine, say
        progress = zk.Progress(inside, 1, run=tmp_path)
        optimizer.model(torch.ones(2, 256)).mul(float("nan")).sum().backward()
        optimizer.step()
        progress.step(float("nan"))
        time.sleep(0.2)  # an evaluation
        optimizer.metrics()
        runfile.close_all(ValueError("later"))
    passed, run = time.perf_counter() - start, read(tmp_path / FILE)
    assert sum(row[COLUMNS.index("seconds")] for row in run["rows"]) <= passed - 0.2
    shown = watch.text(watch.lines(run, state_of(run), "run"))
    assert "step 1/1 (1 skipped) | failed: ValueError('later')" in shown and "loss " in shown and shown.count("nan") == 1
    page = report.html(run, "ended", "run")
    assert not Page(page).series.get("training") and "nan after step 1; 1 of 1 are not finite" in page
    with pytest.raises(TypeError, match=r"must be a ZeroOptimizer, or what has one as \.optimizer; got a AdamW"):
        zk.Progress(torch.optim.AdamW(optimizer.model.parameters()))


def test_a_folder_is_for_one_run_of_one_process(tmp_path: Path) -> None:
    parent = psutil.Process(os.getppid())
    with wrapped(stage=2) as optimizer:
        first, second = RunFile(optimizer, tmp_path), RunFile(optimizer, tmp_path, done=3)  # as when a cell of a notebook is run again
        first.close(ValueError())
        second.close()
        run = read(tmp_path / FILE)
        assert run["state"] == "ended" and len(run["memory"]) == 3
        run |= {"state": "running", "process": [platform.node(), parent.pid, parent.create_time()]}
        (tmp_path / FILE).write_text(json.dumps(run))
        with pytest.raises(ValueError, match=f"process {parent.pid} writes its run into .* give another folder"):
            RunFile(optimizer, tmp_path)
        (tmp_path / "file").touch()
        for folder in (tmp_path / FILE, tmp_path / "file" / "run"):
            with pytest.raises(OSError, match=f"{folder}/{FILE} cannot be written: "):
                RunFile(optimizer, folder)


@pytest.mark.parametrize("overlap_step", (False, True))
def test_advice_for_updates_is_to_run_them_beside_what_the_planner_says_is_long_enough(overlap_step: bool) -> None:
    with pretend(ThrottledLink(1e9)), wrapped(2, stage=2, optimizer_tier="host", overlap_step=overlap_step) as optimizer:
        rates = Rates(optimizer)
        for update, link, change, saved in (
            (0.1, 0.05, "overlap_step=True would update behind the next forward", 0.075),  # the shorter of both, less one of two units
            (0.3, 0.2, 'overlap_step="backward" would update behind backward and the next forward', 0.25),
        ):
            rates.last = {"step_s": 1.0, "update_share": update, "wait_link_share": link}
            if overlap_step:  # what it has not hidden yet
                rates.last = {"step_s": 1.0, "wait_update_share": update + link}
                change, saved = 'overlap_step="backward" would update behind backward and the next forward', (update + link) / 2
            found = advice.advice_of(optimizer, rates)
            assert found is not None and found["seconds"] == pytest.approx(saved)
            assert advice.sentence(found, rates.last) == f"{change}, and save up to {seconds(saved)} of a step"
        rates.last = {"step_s": 1.0, "wait_ranks_share": 0.9}
        assert advice.sentence(advice.advice_of(optimizer, rates), rates.last) == ""
    with wrapped(2, stage=2) as resident:
        rates.optimizer = lambda: resident  # type: ignore[assignment]
        rates.last = {"step_s": 1.0, "update_share": 0.5}
        assert advice.advice_of(resident, rates) is None  # the same cores


def test_one_slow_step_does_not_swing_the_time_that_remains(optimizer: ZeroOptimizer, tmp_path: Path) -> None:
    run = trained(optimizer, tmp_path / "run", 2, total=20)
    first, row = run["rows"]
    usual = [[number, 1, 2.0, *row[3:]] for number in range(2, 15)]
    run |= {"rows": [[1, 1, 60.0, *first[3:]], *usual, [15, 1, 12.0, *row[3:]]], "done": 15}
    assert "| eta 10 s" in watch.lines(run, "running", "run")[0][1]  # 5 steps as most of the last ten are
    run |= {"rows": run["rows"][:1], "done": 1}
    assert "| eta 19 min" in watch.lines(run, "running", "run")[0][1]  # there is no other


def test_narrow_terminals_wrap_within_the_column(optimizer: ZeroOptimizer, tmp_path: Path) -> None:
    run = trained(optimizer, tmp_path / "run")
    console = Console(width=60, file=io.StringIO(), force_terminal=True, color_system=None, markup=False, highlight=False)
    console.print(watch.on_terminal(watch.lines(run, "ended", "a [bold]" + "very " * 9 + "long name")))
    shown = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    heads = shown.index(next(line for line in shown if line.startswith("host ")))
    assert max(map(len, shown)) <= 60 and all(line[19:21] == "  " for line in shown[heads:]) and len(shown) > 12
