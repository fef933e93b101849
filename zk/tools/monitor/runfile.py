"""The file of a run, ``zk_run.json``: its figures so far, for ``zk watch`` while it trains and for ``zk report`` at any time."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import platform
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from zk.config import ZeroConfig
from zk.core.cache import folder_for, replace_text
from zk.core.logs import log
from zk.core.memory import peak_nbytes
from zk.tools.monitor.advice import advice_of, sentence
from zk.tools.monitor.rates import USES, Rates, spent, zero_of
from zk.tools.monitor.summary import nbytes_of, rows_of, summary_of
from zk.tools.monitor.words import duration
from zk.tools.plan.check import changes

FILE, FORMAT = "zk_run.json", 2
COLUMNS = ("step", "steps", "seconds", "tokens", "moved_nbytes", "floor_s", "loss", *USES)
"""Of a row: the number of its last step, how many there are, and of all of them seconds, tokens (of all ranks), bytes to and from the drive,
seconds if waits were hidden, the last loss, and the seconds of each use of the time."""
_LOSS = COLUMNS.index("loss")
_KEYS = {"heading", "process", "started", "total", "capacity", "budgets", "planned", "traffic", "zero", "about", "advice", "state", "updated", "done"}
_KEYS |= {"skipped", "rates", "rows", "memory"}
_MOST = 400  # rows, and readings of memory; more are joined two by two
_ROW_S, _WRITE_S, _QUIET_S = 0.05, 1.0, 60.0
_SHARE = 1e-3  # of the time may go into writing, unless nothing would be seen for ten seconds
_OPEN: dict[Path, RunFile] = {}  # those of this process that have not ended


class RunFile(contextlib.AbstractContextManager["RunFile"]):
    """Writes the file, at most once a second, so that readers never see half of it. The first rank does, of itself.

    Args:
        optimizer: the ZeroOptimizer that is stepped.
        folder: of the file; made if it is not there.
        total: steps of the whole run, if that is known.
        done: steps that were taken before; the file that these left is continued.
        about: settings to show beside zk's own.

    Raises:
        OSError: if the file cannot be written.
        ValueError: if another process writes it.

    A run that is not closed ends with the process, or with the exception that ends it.
    """

    def __init__(
        self, optimizer: Any, folder: str | os.PathLike[str], total: int | None = None, *, done: int = 0, about: Mapping[str, Any] | None = None
    ) -> None:
        optimizer = zero_of(optimizer)
        self.path = Path(folder) / FILE if optimizer.everyone.rank == 0 else None
        self.rates, self.clock, self.done, self.loss, self.skipped = Rates(optimizer), optimizer.clock, done, None, 0
        self.rows: list[list[Any]] = []
        self.memory: list[list[Any]] = []
        self.content: dict[str, Any] = {}
        if self.path is None:
            return
        folder_for(self.path)
        self._continue(done)
        summary, config = summary_of(optimizer), optimizer.config
        traffic, process, ranks = summary.traffic, psutil.Process(), self.rates.ranks
        budgets = {tier: getattr(config, f"{tier}_budget", None) for tier in summary.capacity}
        self.content = {
            "format": FORMAT, "columns": COLUMNS, "heading": summary.heading,
            "process": [platform.node(), process.pid, process.create_time()],
            "started": time.time(),
            "total": total,
            "capacity": summary.capacity,
            "budgets": {tier: nbytes for tier, nbytes in budgets.items() if nbytes is not None},
            "planned": summary.nbytes,
            "traffic": {"read": ranks * traffic.read, "written": ranks * traffic.written},
            "zero": {"stage": config.stage, **{name: str(value) for name, value in changes(config, ZeroConfig()).items()}},
            "about": {name: str(value) for name, value in (about or {}).items()},
            "advice": None,
        }
        self.restart()
        self.next_row = self.next_write = 0.0
        self.is_heard = False  # that it could not be written
        replace_text(self.path, self._text("running"))
        self.key = self.path.resolve()
        _OPEN[self.key] = self

    def _continue(self, done: int) -> None:
        """Take over the rows of the file that is there, until step ``done``."""
        assert self.path is not None
        if not self.path.exists():
            return
        try:
            before = read(self.path)
        except ValueError as error:  # no reason not to train
            if done:
                log.warning("%s: its figures begin anew", error)
            return
        node, pid, _ = before["process"]
        if node == platform.node() and pid != os.getpid() and state_of(before).startswith("running"):
            raise ValueError(f"process {pid} writes its run into {self.path.parent}, and one folder is for one run; give another folder")
        if done:
            self.rows = [row for row in before["rows"] if row[0] <= done]
            self.memory = [reading for reading in before["memory"] if reading[0] <= done]

    def restart(self) -> None:
        """Begin a row now: the time since the last step was not spent training."""
        self.rates.restart()
        self.row_at, self.row_step = self.clock.read()[0] / 1e9, self.done

    def step(self, loss: Any = None, tokens: int = 0) -> None:
        """Count a step. ``loss``: a number or a scalar tensor, which is read when the file is written. ``tokens``: of all ranks."""
        self.done, self.loss = self.done + 1, loss
        if self.path is None:
            return
        self.rates.tokens += tokens
        now = time.perf_counter()
        if now >= self.next_row or self.done == self.content["total"]:  # what comes after the last step is no part of it
            self._add_row()
            self.next_row = now + _ROW_S
        if now >= self.next_write:
            self._write("running")
            taken = time.perf_counter() - now
            self.next_write = now + min(10 * _WRITE_S, max(_WRITE_S, taken / _SHARE))

    def _add_row(self) -> None:
        """Add what was measured since the last row."""
        now, tokens = self.clock.read()[0] / 1e9, self.rates.tokens
        steps, seconds = self.done - self.row_step, now - self.row_at
        found = self.rates.take() if steps > 0 else {}
        if not found:
            return
        floor = seconds * found["floor_share"] if "floor_share" in found else None
        moved = seconds * found.get("drive_gbps", 0.0) * 1e9
        self.rows.append([self.done, steps, seconds, tokens, moved, floor, self.loss, *(seconds * share for share in spent(found).values())])
        self.row_at, self.row_step = now, self.done
        if len(self.rows) > _MOST:
            self.rows = [_joined(*self.rows[place : place + 2]) for place in range(0, len(self.rows), 2)]

    def _text(self, state: str) -> str:
        optimizer = self.rates.optimizer()
        if optimizer is not None and not optimizer.closed:
            self.skipped = int(optimizer.counters["skipped_steps"])
            process, peak = psutil.Process().memory_info().rss, {"host": peak_nbytes()}
            if optimizer.device.type == "cuda":
                peak["device"] = round(self.rates.last.get("peak_device_gib", 0.0) * 2**30)
            self.memory.append([self.done, rows_of(optimizer, nbytes_of(optimizer)), process, peak])
            if len(self.memory) > _MOST:
                self.memory = self.memory[1::2]
            if not sentence(self.content["advice"], self.rates.last):
                self.content["advice"] = advice_of(optimizer, self.rates)
        for row in self.rows:
            row[_LOSS] = None if row[_LOSS] is None else float(row[_LOSS])  # a tensor, until now
        self.content |= {"state": state, "updated": time.time(), "done": self.done, "skipped": self.skipped, "rates": self.rates.last}
        return json.dumps(self.content | {"rows": self.rows, "memory": self.memory})

    def _write(self, state: str) -> None:
        assert self.path is not None
        try:
            replace_text(self.path, self._text(state))
        except OSError as error:  # training goes on
            if not self.is_heard:
                log.warning("%s; it says no more than it did", error)
            self.is_heard = True

    def close(self, error: BaseException | None = None, results: Mapping[str, str] | None = None) -> None:
        """Write that the run has ended, by which error, and with which results; once."""
        if self.path is None or self.content["process"][1] != os.getpid() or _OPEN.get(self.key) is not self:
            return  # closed already; in a forked process; or another run has the folder now
        del _OPEN[self.key]
        self._add_row()
        self.content["results"] = dict(results or {})
        self._write("ended" if error is None else "interrupted" if isinstance(error, KeyboardInterrupt) else f"failed: {error!r}")
        self.path = None

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self.close(error)


@atexit.register
def close_all(error: BaseException | None = None) -> None:
    """Write of all runs of this process that they have ended, and by which error."""
    for run in list(_OPEN.values()):
        run.close(error)


def _joined(row: list[Any], other: list[Any] | None = None) -> list[Any]:
    """Two rows as one: the last step and loss, and sums of everything else."""
    if other is None:
        return row
    sums: list[Any] = [None if one is None or two is None else one + two for one, two in zip(row, other, strict=True)]
    sums[0], sums[_LOSS] = other[0], other[_LOSS]
    return sums


def find(run: str | os.PathLike[str]) -> Path:
    """The file of a run, given it or its folder. FileNotFoundError if there is none."""
    path = Path(run)
    path = path / FILE if path.is_dir() else path
    if not path.exists():
        raise FileNotFoundError(
            f"{path} is not there: zk train writes it, zk.Progress(optimizer, run=FOLDER) does for a loop of your own, and ZeroRun(FOLDER) for "
            "Trainer and Lightning"
        )
    return path


def read(path: Path) -> dict[str, Any]:
    """The content of the file. ValueError for another file."""
    found: Any = None
    with contextlib.suppress(ValueError):
        found = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(found, dict) or found.get("format") != FORMAT or not found.keys() >= _KEYS:
        raise ValueError(f"{path} is not the file of a run, or one of another version of zk")
    return found


def state_of(run: Mapping[str, Any]) -> str:
    """The state of a run: "ended", "interrupted", "failed: ..."; "running", and since when nothing was heard; or that it has died."""
    if run["state"] != "running":
        return str(run["state"])
    node, pid, created = run["process"]
    try:
        process = psutil.Process(pid) if node == platform.node() else None
        if process is not None and (abs(process.create_time() - created) >= 1 or process.status() == psutil.STATUS_ZOMBIE):
            raise psutil.NoSuchProcess(pid)
    except psutil.NoSuchProcess:
        return f"died: its process {pid} is gone, and has not said that it ends"
    silent = time.time() - run["updated"]
    return "running" if silent < _QUIET_S + 10 * run["rates"].get("step_s", 0.0) else f"running, but not heard of for {duration(silent)}"
