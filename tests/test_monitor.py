"""Summaries of optimizers, what is said at the start, and the CPU update that is compiled before the first step."""

from __future__ import annotations

import io
import os
import re
import sys
import time
import types
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zk
from tests.programs import Program, rank_of, run
from tests.world import free_port
from zk import ZeroOptimizer
from zk.bench import io as drives
from zk.core.memory import host_memory
from zk.core.timeline import SPENT, phase
from zk.offload import cpu_adam_numba, nvme
from zk.offload.worker import Worker
from zk.tools.monitor import measured
from zk.tools.monitor.progress import rates_line
from zk.tools.monitor.rates import Rates, counts_of, loggable, reason_of, stolen_s
from zk.tools.monitor.start import say
from zk.tools.monitor.summary import placed_of, sizes_of, traffic_of
from zk.tools.monitor.words import seconds

WIDTH = 256
MODEL = """
import os, sys, torch, zk
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
options = dict(stage=3, param_tier="host", optimizer_tier="host", dtype="bf16", units=["0", "1", "2"])
wrap = lambda **more: zk.ZeroOptimizer(model, torch.optim.AdamW(model.parameters()), **{**options, **more})
"""


def wrapped(count: int = 4, **options: object) -> ZeroOptimizer:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(count)))
    return ZeroOptimizer(model, torch.optim.AdamW(model.parameters()), units=[str(index) for index in range(count)], **options)  # type: ignore[arg-type]


def step(optimizer: ZeroOptimizer) -> None:
    optimizer.model(torch.ones(2, WIDTH, dtype=next(optimizer.model.parameters()).dtype)).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("dtype", ("fp32", "bf16", "fp16"))
def test_summary_has_the_bytes_that_training_takes(dtype: str) -> None:
    with wrapped(stage=3, param_tier="host", optimizer_tier="host", dtype=dtype) as optimizer:
        summary, numel = optimizer.summary(), sum(param.numel() for param in optimizer.model.parameters())
        expected = {
            "fp32": {"parameters": 4, "gradients": 4, "moments": 8},
            "bf16": {"parameters": 2, "gradients": 2, "master": 2, "moments": 8},
            "fp16": {"parameters": 2, "gradients": 2, "master": 4, "moments": 8},
        }[dtype]
        assert {kind: row["host"] / numel for kind, row in summary.nbytes.items() if kind != "buffers"} == expected
        if dtype != "fp16":
            step(optimizer)
        found = optimizer.metrics()
        for kind, name in (("parameters", "param"), ("moments", "moments"), ("master", "master")):
            assert found[f"host_{name}_nbytes"] == summary.nbytes.get(kind, {}).get("host", 0)


def test_summary_says_stage_precision_ranks_and_where_bytes_are(tmp_path: Path) -> None:
    with wrapped(stage=3, param_tier="nvme", optimizer_tier="nvme", nvme_path=tmp_path, dtype="bf16") as optimizer:
        text = optimizer.summary().text()
        first, tiers, *rows, total, moved = text.splitlines()
        assert re.fullmatch(r"zk [\d.]+ \| stage 3 \| bf16, fp32 master split \| 1 rank \| 263K parameters in 4 units", first)
        assert "host" in tiers and f" ...{str(tmp_path)[-21:]} " in tiers
        assert [row[:12].strip() for row in rows] == ["parameters", "gradients", "master", "moments", "buffers"]
        assert re.search(r"total .* MiB +\[#\.+\] .* MiB +\[#\.+\]", total)
        assert re.match(r"one step reads [\d.]+ MiB from the drive and writes [\d.]+ MiB to the drive", moved)
        assert repr(optimizer) == text and str(optimizer.summary()) == text
    assert repr(optimizer) == "ZeroOptimizer, closed" and "closed" in optimizer._repr_html_()


def test_summary_counts_the_bytes_that_a_step_moves(tmp_path: Path) -> None:
    with wrapped(24, stage=3, param_tier="nvme", optimizer_tier="nvme", nvme_path=tmp_path) as optimizer:
        placed = placed_of(optimizer)
        expected = traffic_of(optimizer, placed, sizes_of(optimizer, placed))
        for _ in range(3):
            before = optimizer.metrics()
            step(optimizer)
        now = optimizer.metrics()
        # up to two chunks, and the last unit of backward, are still in memory
        assert 0.85 < (now["fetched_nbytes"] - before["fetched_nbytes"]) / expected.read <= 1.01
        assert 0.85 < (now["evicted_nbytes"] - before["evicted_nbytes"]) / expected.written <= 1.05


def test_frozen_parameters_are_counted_apart_and_plain_dtypes_named() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH).requires_grad_(False), nn.Linear(WIDTH, WIDTH))
    with ZeroOptimizer(model, torch.optim.SGD(model[1].parameters(), lr=0.1), units=["0", "1"]) as optimizer:
        text = optimizer.summary().text()
        assert "| fp32 | 1 rank | 132K parameters (65.8K trained) in 2 units" in text
        assert "moments" not in text and "one step" not in text


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.widths: list[float] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open.append(tag)
        style = dict(attrs).get("style") or ""
        self.widths += [float(found) for found in re.findall(r"width:([\d.]+)%", style)]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_notebooks_show_a_bar_for_each_tier(tmp_path: Path) -> None:
    with wrapped(stage=3, param_tier="nvme", optimizer_tier="nvme", nvme_path=tmp_path, dtype="bf16") as optimizer:
        tags = Tags()
        tags.feed(optimizer._repr_html_())
        assert not tags.open and len(tags.widths) >= 5 and 0 < sum(tags.widths) <= 200
        assert optimizer._repr_html_().count("text-align:left;background") == 2  # notebooks align numbers, and what is in cells, to the right
        assert str(tmp_path)[-21:] in optimizer._repr_html_()
        tags.feed(optimizer.config._repr_html_())
        assert not tags.open and "param_tier" in optimizer.config._repr_html_() and "prefetch" not in optimizer.config._repr_html_()


# ---- the start ---------------------------------------------------------------------------------------------------------------------


def loud(env: dict[str, str] | None = None, **more: str) -> dict[str, str]:
    return {**(env or os.environ), "ZK_QUIET": "0", **more}


def test_the_summary_is_printed_once_to_stderr_and_not_where_it_is_unwanted() -> None:
    program = MODEL + "wrap().close()"
    done = run("-c", program, env=loud(), check=True)
    assert done.stdout == "" and done.stderr.count("zk 0.1.0 | stage 3 | bf16") == 1 and "\ntotal " in done.stderr
    assert run("-c", program, env=loud(ZK_QUIET="1"), check=True).stderr.count("| stage 3 |") == 0


def test_only_the_first_of_two_ranks_speaks() -> None:
    program = MODEL + "torch.distributed.init_process_group('gloo')\nwrap().close()\ntorch.distributed.destroy_process_group()"
    port = free_port()
    ranks = [Program("-c", program, env=loud(rank_of(2, rank, port))) for rank in range(2)]
    (_, first), (_, second) = [rank.communicate(60) for rank in ranks]
    assert first.count("| 2 ranks |") == 1 and "/ 2 ranks" in first and "| stage" not in second, (first, second)


@pytest.mark.parametrize("stderr", ("sys.stderr = None", "sys.stderr.close()", "os.close(2)", "r, w = os.pipe(); os.dup2(w, 2); os.close(r)"))
def test_training_goes_on_where_nobody_reads_stderr(stderr: str) -> None:
    program = MODEL + f"{stderr}\nwrap(dtype='fp32').close()\nprint('trained')\nsys.stderr = open(os.devnull, 'w')"
    done = run("-c", program, env=loud(), check=True)
    assert done.stdout == "trained\n"


def test_the_drive_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    sizes: list[int] = []
    passes = drives.passes
    monkeypatch.setattr(drives, "passes", lambda path, nbytes, *more: (sizes.append(nbytes), passes(path, nbytes, *more))[1])
    monkeypatch.setattr(measured, "_NBYTES", 1 << 20)
    said: list[str] = []
    assert measured.drive([str(tmp_path)]) is None
    first = measured.measure_drive([str(tmp_path)], said.append)
    assert first is not None and first["read"] > 0 and first["write"] > 0 and len(said) == 1
    again = measured.measure_drive([str(tmp_path)], said.append)
    assert again is not None and again["read"] == first["read"] and len(said) == 1 and sizes == [1 << 20]
    soon = time.time() + 601
    with monkeypatch.context() as later:
        later.setattr(measured.time, "time", lambda: soon)
        assert measured.drive([str(tmp_path)]) is None
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]  # the file that was measured is gone
    with wrapped(stage=3, param_tier="nvme", optimizer_tier="nvme", nvme_path=tmp_path / "cache") as optimizer:
        assert re.search(r"at the [\d.]+ and [\d.]+ GB/s measured here$", optimizer.summary().text())
    (tmp_path / "cache" / "zk" / "rates.json").write_text("{")  # of a process that was killed, say
    assert measured.drive([str(tmp_path)]) is None


def test_a_drive_that_refuses_is_named_and_training_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    said: list[str] = []
    assert measured.measure_drive([str(tmp_path / "missing" / "..")], said.append) is None or said == []
    monkeypatch.setattr(measured, "_NBYTES", 1 << 60)
    assert measured.measure_drive([str(tmp_path)], said.append) is None and "are free" in said[-1]


@pytest.mark.parametrize("dtype", ("fp32", "bf16"))
def test_the_update_is_compiled_when_the_optimizer_is_made(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ZK_CPU_ADAM", raising=False)
    with wrapped(stage=3, param_tier="host", optimizer_tier="host", dtype=dtype, num_threads=2) as optimizer:
        compiled = {name: list(getattr(cpu_adam_numba, name).signatures) for name in dir(cpu_adam_numba) if name.endswith(("_block", "_parallel"))}
        assert all(compiled.values())
        step(optimizer)
        for _ in range(2):  # and gradients that are added up, in fp32
            optimizer.model(torch.ones(2, WIDTH, dtype=optimizer.config.dtype)).float().square().mean().backward()  # type: ignore[arg-type]
        optimizer.step()
        assert {name: list(getattr(cpu_adam_numba, name).signatures) for name in compiled} == compiled
        assert cpu_adam_numba._adam_block.stats.cache_path is not None


def test_compiling_says_so_once_and_not_where_it_is_cached(tmp_path: Path) -> None:
    program, env = MODEL + "wrap().close()", loud(XDG_CACHE_HOME=str(tmp_path))
    env.pop("NUMBA_CACHE_DIR", None)
    first, second = (run("-c", program, env=env, check=True).stderr for _ in range(2))
    assert (tmp_path / "zk" / "numba").is_dir()
    assert first.count("compiling the CPU update for bfloat16, once per machine") == 1 and "compiling" not in second, (first, second)


# ---- rates -------------------------------------------------------------------------------------------------------------------------


def waited(kind: str, ms: float) -> None:
    with phase("wait", kind):
        time.sleep(ms / 1e3)


def test_waits_are_counted_once_and_those_in_the_background_not() -> None:
    before = Counter(SPENT)
    with phase("update", "unit"):
        time.sleep(0.02)
        with phase("collective", "gather"):
            waited("other ranks: gather", 30)
    worker = Worker("zk test")
    worker.submit(lambda: waited("drive", 40)).join()
    worker.close()
    spent = {kind: ns / 1e6 for kind, ns in (SPENT - before).items()}
    assert set(spent) == {"update", "wait: other ranks"}
    assert spent["wait: other ranks"] >= 30 and spent["update"] >= 20
    before = Counter(SPENT)
    with pytest.raises(OSError, match="drive"), phase("wait", "drive"):
        raise OSError("the drive")
    waited("link: a gradient", 0)
    assert set(SPENT - before) == {"wait: drive", "wait: link"}


def test_the_floor_goes_by_the_rates_that_training_sees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drive = {"read": 1e3, "write": 1e3, "when": 0.0}  # as it was measured: so slow that all of a step is the drive's
    monkeypatch.setattr(measured, "drive", lambda paths: drive or None)
    monkeypatch.setattr(nvme, "_WINDOW_NBYTES", 1 << 60)  # nothing is seen but what is put in below
    with wrapped(24, stage=3, param_tier="nvme", optimizer_tier="nvme", nvme_path=tmp_path) as optimizer:
        windows_of_both = [rate.windows for rate in optimizer.tiers["nvme"].spill.files[0][1].rates.values()]
        rates = Rates(optimizer)

        def taken() -> tuple[dict[str, float], float, float, float]:
            """The rates of an interval with a long wait, what it read and wrote, and its seconds of work without I/O."""
            rates.restart()
            step(optimizer)
            waited("drive", 500)
            moved, found = counts_of(optimizer)[0] - rates.before[0], rates.take()
            work = (1 - found["wait_share"]) * found["step_s"] - stolen_s(optimizer, moved["io_cpu_ns"])
            return found, moved["read"], moved["written"], work

        found, *_ = taken()
        assert found["floor_share"] == 1.0  # and not thousands: what has been done can be done
        for read_bps, write_bps in ((1e8, 1e9), (1e9, 1e8), (1e8, 1e8)):  # a drive that changes
            for windows, rate in zip(windows_of_both, (read_bps, write_bps), strict=True):
                windows.extend([rate / 2] * (3 * windows.maxlen // 4) + [rate] + [2 * rate] * (windows.maxlen // 4 - 1))  # few are too fast
            found, read, written, work = taken()
            assert found["floor_s"] == pytest.approx(min(found["step_s"], max(work, read / read_bps + written / write_bps)), rel=1e-3)
        drive.clear()  # ten minutes ago
        for windows in windows_of_both:
            windows.clear()
        assert "floor_s" in taken()[0] and (rates.drive["read"], rates.drive["write"]) == (1e8, 1e8)  # what was known last
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
        monkeypatch.setattr(optimizer.everyone, "world", 2)
        monkeypatch.setattr(rates, "ranks", Rates(optimizer).ranks)
        assert f"/{host_memory()[0] / 2**31:.0f} GiB" in rates_line(rates.last, rates.ranks)  # as ranks share the machine's memory
        drive.update(read=1e7, write=1e7)
        for windows in windows_of_both:
            windows.append(1e12)
        found, read, written, _ = taken()  # ranks share the drive, so each sees a part of its rate
        assert found["floor_s"] == pytest.approx(min(found["step_s"], 2 * (read + written) / 1e7))


@pytest.mark.parametrize(("cores", "ranks", "taken"), ((1, 1, True), (3, 1, False), (3, 3, True)))
def test_io_takes_processor_time_from_work_where_compute_needs_all_cores(
    monkeypatch: pytest.MonkeyPatch, cores: int, ranks: int, taken: bool
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    with wrapped() as optimizer:
        monkeypatch.setattr(optimizer.everyone, "world", ranks)
        assert stolen_s(optimizer, 5_000_000) == 0.005 * taken
        monkeypatch.setattr(optimizer, "device", torch.device("cuda"))
        assert stolen_s(optimizer, 5_000_000) == 0


def test_rates_are_of_the_last_interval() -> None:
    with wrapped(stage=3, param_tier="host", optimizer_tier="host") as optimizer:
        rates = Rates(optimizer)
        assert rates.take() == {} and "step_s" not in optimizer.metrics()
        for _ in range(4):
            step(optimizer)
            waited("drive", 25)
        rates.tokens += 4000
        start = time.perf_counter()
        first = rates.take()
        assert first["wait_drive_share"] == first["wait_share"] > 0 and reason_of(first) == "drive"
        assert first["wait_share"] * 4 * first["step_s"] >= 0.1
        assert first["tokens_per_s"] == pytest.approx(4000 / (4 * first["step_s"]))
        assert first["floor_share"] == pytest.approx(1 - first["wait_share"])
        assert rates_line(first, 1).endswith(f" | floor {seconds(first['floor_s'])}")
        assert rates.take() == first  # no step since
        step(optimizer)
        second = rates.take()
        assert "wait_drive_share" not in second and "tokens_per_s" not in second and second["update_share"] > 0
        assert second["step_s"] <= time.perf_counter() - start
        waited("drive", 25)
        rates.restart()
        step(optimizer)
        assert "wait_drive_share" not in rates.take()
        found = optimizer.metrics()  # whose interval is its own
        assert found["wait_drive_share"] > 0 and found["step_s"] > 0
    assert rates.take() == rates.last
    del optimizer
    assert rates.take() == rates.last


def test_rates_of_the_drive_have_its_floor_once_it_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with wrapped(stage=3, param_tier="nvme", optimizer_tier="nvme", nvme_path=tmp_path) as optimizer:
        step(optimizer)
        (before, _), now = counts_of(optimizer), optimizer.rates.take()
        assert now["drive_gbps"] > 0 and 0 <= now["prefetch_hit_rate"] <= 1 and "floor_share" not in now
        monkeypatch.setattr(measured, "drive", lambda paths: {"read": 1e8, "write": 2e8})  # a slow one: it decides
        step(optimizer)
        waited("drive", 500)
        (after, _), now = counts_of(optimizer), optimizer.rates.take()
        moved = after - before
        moving, work = moved["read"] / 1e8 + moved["written"] / 2e8, (1 - now["wait_share"]) * now["step_s"]
        assert now["floor_s"] == pytest.approx(max(moving, work - stolen_s(optimizer, moved["io_cpu_ns"])), rel=1e-6)


@pytest.mark.parametrize("value", ("", "all", "some"))
def test_loggers_get_few_numbers_and_all_if_asked_for(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZK_METRICS", value)
    with wrapped(stage=2) as optimizer:
        rates = Rates(optimizer)
        step(optimizer)
        if value == "some":
            with pytest.raises(ValueError, match=r"ZK_METRICS must be 'rates' .* got 'some'"):
                loggable(optimizer, rates)
            return
        found = loggable(optimizer, rates)
        assert all(name.startswith("zk/") and isinstance(number, (int, float)) for name, number in found.items())
        assert ("zk/grad_norm" in found) == (value == "all") and found["zk/step_s"] > 0 and (len(found) <= 8 or value == "all")


# ---- progress ----------------------------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_prints_lines_to_files_and_renews_one_in_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZK_QUIET", "0")
    monkeypatch.setenv("COLUMNS", "60")
    with wrapped(stage=2) as optimizer:
        for file in (io.StringIO(), Terminal()):
            with zk.Progress(optimizer, 3, file=file) as progress:
                for number in range(3):
                    step(optimizer)
                    progress.step(torch.tensor(2.5 - number, requires_grad=True), tokens=100)
            shown = file.getvalue()
            if isinstance(file, Terminal):
                assert shown.startswith("\r[") and shown.endswith("\n") and max(map(len, shown.split("\r"))) <= 60
                assert re.search(r"\r\[#+\.+\] step 1/3 \| loss 2\.5 \| \d s \| eta \d+ s( \||\r)", shown) and " | host" not in shown  # whole parts
            else:
                first, last = shown.splitlines()  # ten seconds have not passed
                pattern = r"zk: step 1/3 \| loss 2\.5 \| \d s \| eta \d+ s \| [\d,]+ tok/s \| [\de+.]+ m?s/step \| .*host [\d.]+/\d+ GiB"
                assert re.fullmatch(pattern, first), first
                assert last.startswith("zk: step 3/3 | loss 0.5 |") and "eta" not in last
        optimizer.counters["skipped_steps"] = 2
        assert " | 2 skipped | " in zk.Progress(optimizer, file=io.StringIO()).line()
        quiet = io.StringIO()
        monkeypatch.setenv("ZK_QUIET", "1")
        for loss in ("2.5", torch.zeros(3)):
            with pytest.raises(TypeError, match="loss must be a number, or a tensor of one element; got"):
                zk.Progress(optimizer, file=quiet).step(loss)
        with zk.Progress(optimizer, file=quiet) as progress:
            progress.step(1.0)
        assert quiet.getvalue() == ""


def test_what_is_said_beside_progress_has_a_line_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZK_QUIET", "0")
    with wrapped(stage=2) as optimizer:
        monkeypatch.setattr(sys, "stderr", Terminal())
        with zk.Progress(optimizer, 3) as progress:
            progress.step(1.0)
            say("zk: one")
            say("zk: two")
        say("zk: three")
        first, *others, last, _ = sys.stderr.getvalue().split("\n")  # type: ignore[attr-defined]
        assert "step 1/3" in first and others[:2] == ["zk: one", "zk: two"] and last == "zk: three"


def test_progress_goes_on_without_anybody_who_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZK_QUIET", "0")
    closed = io.StringIO()
    closed.close()
    with wrapped(stage=2) as optimizer:
        for file in (closed, None):
            monkeypatch.setattr("sys.stderr", None)
            with zk.Progress(optimizer, 1, file=file) as progress:
                step(optimizer)
                progress.step(1.0)
        with pytest.raises(ValueError, match="total must be a number of steps, at least 1, or None; got 0"):
            zk.Progress(optimizer, 0)


def test_progress_in_a_notebook_renews_one_output(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    handle = types.SimpleNamespace(update=lambda data, raw: shown.append(data["text/plain"]))
    module: Any = types.ModuleType("IPython")
    module.get_ipython = type("ZMQInteractiveShell", (), {})
    module.display = types.ModuleType("IPython.display")
    module.display.display = lambda display_id: handle
    monkeypatch.setitem(sys.modules, "IPython", module)
    monkeypatch.setitem(sys.modules, "IPython.display", module.display)
    monkeypatch.setenv("ZK_QUIET", "0")
    with wrapped(stage=2) as optimizer, zk.Progress(optimizer, 2) as progress:
        for _ in range(2):
            step(optimizer)
            progress.step(1.0)
    assert [line.partition(" | ")[0] for line in shown] == ["step 1/2", "step 2/2"]
