"""What one sees of training: the block at the start, summaries, metrics, rates, profiles, and the line after Ctrl-C."""

from __future__ import annotations

import gc
import json
import os
import re
import signal
import subprocess
import sys
import time
import types
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zk
from tests.programs import ROOT, Program, rank_of, run
from tests.world import free_port, run_world
from zk import ZeroOptimizer
from zk.core.timeline import SPENT, phase
from zk.offload import cpu_adam_numba
from zk.offload.worker import Worker
from zk.tools.metrics import Rates, loggable
from zk.tools.summary import Summary, configured, wrap

WIDTH = 256
ON_HOST = {"stage": 3, "param_tier": "host", "optimizer_tier": "host"}
MODEL = """
import os, sys, torch, zk
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
options = dict(stage=3, param_tier="host", optimizer_tier="host", dtype="bf16", units=["0", "1", "2"])
wrap = lambda **more: zk.ZeroOptimizer(model, torch.optim.AdamW(model.parameters()), **{**options, **more})
"""


def wrapped(count: int = 4, **options: Any) -> ZeroOptimizer:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(count)))
    units = [str(index) for index in range(count)]
    return ZeroOptimizer(model, torch.optim.AdamW(model.parameters()), units=units, **options)


def on_drive(folder: Path) -> dict[str, Any]:
    return {"stage": 3, "param_tier": "nvme", "optimizer_tier": "nvme", "nvme_path": folder}


def step(optimizer: ZeroOptimizer) -> None:
    x = torch.ones(2, WIDTH, dtype=next(optimizer.model.parameters()).dtype)
    optimizer.model(x).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def waited(kind: str, ms: float) -> None:
    with phase("wait", kind):
        time.sleep(ms / 1e3)


# ---- the summary -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ("fp32", "bf16", "fp16"))
def test_the_summary_has_the_bytes_that_training_takes(dtype: str) -> None:
    with wrapped(**ON_HOST, dtype=dtype) as optimizer:
        summary, params = optimizer.summary(), list(optimizer.model.parameters())
        numel = sum(param.numel() for param in params)
        expected = {
            "fp32": {"parameters": 4, "gradients": 4, "moments": 8},
            "bf16": {"parameters": 2, "gradients": 2, "master": 2, "moments": 8},
            "fp16": {"parameters": 2, "gradients": 2, "master": 4, "moments": 8},
        }[dtype]
        told = {kind: row["host"] / numel for kind, row in summary.nbytes.items()}
        assert {kind: each for kind, each in told.items() if kind != "buffers"} == expected
        with zk.gather(params):
            assert summary.nbytes["parameters"]["host"] == sum(param.nbytes for param in params)
        if dtype != "fp16":
            step(optimizer)
        found, state = optimizer.metrics(), optimizer.state_dict()["state"]
        moments = sum(one[name].nbytes for one in state.values() for name in ("exp_avg", "exp_avg_sq") if name in one)
        assert found["host_moments_nbytes"] == summary.nbytes["moments"]["host"] and moments in (0, found["host_moments_nbytes"])
        assert found["host_master_nbytes"] == summary.nbytes.get("master", {}).get("host", 0)


def test_print_of_an_optimizer_fits_80_columns_and_can_be_copied(tmp_path: Path) -> None:
    with wrapped(**on_drive(tmp_path), dtype="bf16") as optimizer:
        shown = repr(optimizer)
        assert max(map(len, str(optimizer.summary()).splitlines())) <= 80
        heading = " ".join(shown.split("\nhost ")[0].split())
        threads = rf"1 rank, {optimizer.num_threads} threads?"
        assert re.fullmatch(rf"zk \S+ \| stage 3 \| bf16, fp32 master split \| {threads} \| 263K parameters in 4 units", heading)
        host = r"host [\d.]+ [GT]iB free of [\d.]+ [GT]iB, state [\d.]+ [KM]iB \(<0.1%\): buffers"
        assert re.search(host, " ".join(shown.split()))
        drive = " ".join(shown.split(str(tmp_path)[-13:])[1].split("zk.ZeroConfig")[0].split())
        assert all(kind in drive for kind in ("parameters 514.0 KiB", "gradients", "master", "moments 2.0 MiB"))
        config = eval(shown[shown.index("zk.ZeroConfig(") :])
        assert config == zk.ZeroConfig(**on_drive(tmp_path), dtype="bf16", units=["0", "1", "2", "3"])
    assert repr(optimizer) == "ZeroOptimizer, closed"


def test_a_config_is_copied_with_its_budgets_in_gib() -> None:
    config = zk.ZeroConfig(stage=3, param_tier="auto", optimizer_tier="auto", device_budget="6604MiB", nvme_path="d", state_dtype="8bit")
    shown = configured(config)
    assert "    device_budget='6.449GiB',\n" in shown and eval(shown).state_dtype == config.state_dtype
    assert configured(zk.ZeroConfig()) == "zk.ZeroConfig()"


def test_large_runs_have_a_table_and_frozen_parameters_are_counted_apart() -> None:
    tiers = {"device": ("GPU", 20 << 30, 24 << 30, 24 << 30), "host": ("host for 2 ranks", 50 << 30, 128 << 30, 64 << 30)}
    tiers |= {"nvme": (".../longer/drive", 90 << 30, 99 << 30, 50 << 30), "files": ("your files", 0, 0, 0)}
    nbytes = {"parameters": {"device": 2 << 30}, "in your files": {"files": 1 << 30}, "moments": {"host": 8 << 30}}
    lines = str(Summary("zk", tiers, nbytes, ("a note",))).splitlines()
    assert lines[0] == "zk" and lines[-1] == "a note" and max(map(len, lines)) <= 80
    assert lines[1].split("  ")[-1] == "your files" and lines[2].split()[:3] == ["20.0", "GiB", "free"]
    assert lines[3].split()[:3] == ["of", "24.0", "GiB"]
    assert [line.split() for line in lines[4:7:2]] == [["parameters", "2.0", "GiB", "-", "-", "-"], ["moments", "-", "8.0", "GiB", "-", "-"]]
    assert lines[7].split() == ["total", "2.0", "GiB", "(8.3%)", "8.0", "GiB", "(12.5%)", "-", "1.0", "GiB"]
    assert wrap("a b | " * 20 + "c", " | ").splitlines()[1].startswith("  a b |")
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH).requires_grad_(False), nn.Linear(WIDTH, WIDTH))
    with ZeroOptimizer(model, torch.optim.SGD(model[1].parameters(), lr=0.1), units=["0", "1"]) as optimizer:
        shown = " ".join(str(optimizer.summary()).split())
        assert "132K parameters (65.8K trained) in 2 units" in shown and "moments" not in shown


# ---- the start -------------------------------------------------------------------------------------


def loud(env: dict[str, str] | None = None, **more: str) -> dict[str, str]:
    return {**(env or os.environ), "ZK_QUIET": "0", **more}


def test_the_block_is_printed_once_to_stderr_with_the_threads_that_are_asked_for(tmp_path: Path) -> None:
    program, env = MODEL + "wrap().close()", loud(XDG_CACHE_HOME=str(tmp_path), OMP_NUM_THREADS="1")
    for name in ("NUMBA_CACHE_DIR", "LOCAL_WORLD_SIZE", "ZK_CPU_ADAM"):
        env.pop(name, None)
    first = run("-c", program, env=env, check=True)
    assert first.stdout == "" and first.stderr.count("| stage 3 | bf16") == 1 and "1 rank, 1 thread |" in first.stderr
    assert first.stderr.count("compiling the CPU update, once for bf16 (about 15 s)") == 1
    launched = run("-c", program, env={**env, "LOCAL_WORLD_SIZE": "1"}, check=True).stderr
    cores = len(os.sched_getaffinity(0))
    assert "compiling" not in launched and f"1 rank, {cores} thread{'s' * (cores > 1)} |" in launched
    assert run("-c", program, env={**env, "ZK_QUIET": "1"}, check=True).stderr.count("| stage 3 |") == 0


def test_only_the_first_of_two_ranks_speaks() -> None:
    program = MODEL + "torch.distributed.init_process_group('gloo')\nwrap().close()\ntorch.distributed.destroy_process_group()"
    port = free_port()
    ranks = [Program("-c", program, env=loud(rank_of(2, rank, port))) for rank in range(2)]
    (_, first), (_, second) = [rank.communicate(60) for rank in ranks]
    assert first.count("| 2 ranks, ") == 1 and "for 2 ranks" in first and "| stage" not in second, (first, second)


@pytest.mark.parametrize("stderr", ("sys.stderr = None", "os.close(2)", "r, w = os.pipe(); os.dup2(w, 2); os.close(r)"))
def test_training_goes_on_where_nobody_reads_stderr(stderr: str) -> None:
    program = MODEL + f"{stderr}\nwrap(dtype='fp32').close()\nprint('trained')\nsys.stderr = open(os.devnull, 'w')"
    assert run("-c", program, env=loud(), check=True).stdout == "trained\n"


def test_a_notebook_shows_the_summary_once_and_not_on_stderr(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    shown: list[Any] = []
    module: Any = types.ModuleType("IPython")
    module.get_ipython = type("ZMQInteractiveShell", (), {})
    module.display = types.SimpleNamespace(display=shown.append)
    monkeypatch.setitem(sys.modules, "IPython", module)
    monkeypatch.setenv("ZK_QUIET", "0")
    with wrapped(stage=2) as optimizer:
        assert [str(one) for one in shown] == [str(optimizer.summary())] and "| stage 2" not in capsys.readouterr().err


@pytest.mark.parametrize("dtype", ("fp32", "bf16"))
def test_the_update_is_compiled_when_the_optimizer_is_made(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ZK_CPU_ADAM", raising=False)
    with wrapped(**ON_HOST, dtype=dtype, num_threads=2) as optimizer:
        names = [name for name in dir(cpu_adam_numba) if name.endswith(("_block", "_parallel"))]
        compiled = {name: list(getattr(cpu_adam_numba, name).signatures) for name in names}
        assert all(compiled.values())
        step(optimizer)
        for _ in range(2):  # gradients that are added up, in fp32
            optimizer.model(torch.ones(2, WIDTH, dtype=optimizer.config.dtype)).float().square().mean().backward()  # type: ignore[arg-type]
        optimizer.step()
        assert {name: list(getattr(cpu_adam_numba, name).signatures) for name in names} == compiled


# ---- rates -----------------------------------------------------------------------------------------


def test_waits_are_counted_once_and_those_in_the_background_not() -> None:
    before = Counter(SPENT)
    with phase("update", "unit"):
        time.sleep(0.02)
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
    assert set(SPENT - before) == {"wait: drive"}


def test_rates_are_of_the_last_interval(tmp_path: Path) -> None:
    with wrapped(**on_drive(tmp_path)) as optimizer:
        rates = Rates(optimizer)
        assert rates.take() == {} and "step_s" not in optimizer.metrics()
        for _ in range(4):
            step(optimizer)
            waited("save", 25)
        rates.tokens += 4000
        start = time.perf_counter()
        first = rates.take()
        assert first["wait_share"] >= first["wait_save_share"] > 0 and first["wait_save_share"] * 4 * first["step_s"] >= 0.1
        assert first["tokens_per_s"] == pytest.approx(4000 / (4 * first["step_s"])) and first["drive_gbps"] > 0
        assert rates.take() == first  # no step since
        step(optimizer)
        second = rates.take()
        assert "wait_save_share" not in second and "tokens_per_s" not in second and second["update_share"] > 0
        assert second["step_s"] <= time.perf_counter() - start
        waited("save", 25)
        rates.restart()
        step(optimizer)
        assert "wait_save_share" not in rates.take()
        assert optimizer.metrics()["wait_save_share"] > 0  # whose interval is its own
    assert rates.take() == rates.last
    del optimizer
    assert rates.take() == rates.last


@pytest.mark.parametrize("by", ("checkpoint", "state_dict"))
def test_rates_are_right_after_a_resume(by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with wrapped(**ON_HOST) as optimizer:
        for _ in range(3):
            step(optimizer)
        optimizer.save_checkpoint(tmp_path)
        state = optimizer.state_dict()
    with wrapped(**ON_HOST) as optimizer:
        rates = Rates(optimizer)
        if by == "checkpoint":
            optimizer.load_checkpoint(tmp_path)
        else:
            optimizer.load_state_dict(state)
        assert optimizer.metrics()["steps"] == 3 and rates.take() == {}
        start = time.perf_counter()
        for _ in range(2):
            step(optimizer)
            time.sleep(0.1)
        for found in (rates.take(), optimizer.metrics()):
            assert 0.1 <= found["step_s"] <= (time.perf_counter() - start) / 2 + 0.05
        before = optimizer.clock.read()[0]
        optimizer.load_checkpoint(tmp_path)
        assert optimizer.clock.read()[0] - before < 1e9 * (time.perf_counter() - start)


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


# ---- profiles --------------------------------------------------------------------------------------


def events_of(path: Path) -> list[dict[str, Any]]:
    return [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X" and event["name"].startswith("zk: ")]


def test_a_profile_has_forward_and_backward_by_unit_and_what_other_threads_do(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with wrapped(**on_drive(tmp_path)) as optimizer:
        recording = zk.profile(optimizer, tmp_path / "profile", steps=2, skip=1)
        for number in range(5):
            step(optimizer)
            assert (tmp_path / "profile" / "trace.json").exists() == (number >= 2)
        written = (tmp_path / "profile" / "trace.json").stat().st_mtime_ns
        recording.close()
        assert (tmp_path / "profile" / "trace.json").stat().st_mtime_ns == written
    events = events_of(tmp_path / "profile" / "trace.json")
    counts = Counter(event["name"] for event in events)
    for unit in range(4):
        assert counts[f"zk: {unit} forward"] == counts[f"zk: {unit} backward"] == counts[f"zk: {unit} update"] == 2
        assert counts[f"zk: {unit} gather"] >= 2 and counts[f"zk: {unit} reduce"] == 2
    assert counts["zk: model forward"] == counts["zk: optimizer step"] == 2 and counts["zk: wait drive"] > 0
    training = {event["tid"] for event in events if event["name"] == "zk: optimizer step"}
    moving = {event["tid"] for event in events if re.match(r"zk: (read|write) \d+ KiB at \d+", event["name"])}
    assert len(training) == 1 and moving and not moving & training
    # backward goes from the last unit to the first, each within backward
    begun = [event["name"] for event in sorted(events, key=lambda event: event["ts"]) if re.fullmatch(r"zk: \d backward", event["name"])]
    assert begun == [f"zk: {unit} backward" for unit in (3, 2, 1, 0)] * 2
    assert (tmp_path / "profile" / "timeline.png").read_bytes().startswith(b"\x89PNG")


def test_a_context_records_what_is_inside_and_checkpointed_blocks_too(tmp_path: Path) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.blocks = nn.Embedding(8, 8), nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.embed(x)
            for block in self.blocks:
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
            return x

    model = Checkpointed()
    wrapper = types.SimpleNamespace(optimizer=ZeroOptimizer(model, torch.optim.SGD(model.parameters(), lr=0.1), **ON_HOST))
    with wrapper.optimizer as optimizer, zk.profile(wrapper, tmp_path):
        model(torch.arange(8)).sum().backward()
        optimizer.step()
    counts = Counter(event["name"] for event in events_of(tmp_path / "trace.json"))
    assert counts["zk: blocks.1 backward"] == counts["zk: blocks.0 backward"] == 1 and counts["zk: blocks.0 forward"] == 2
    for options in ({"steps": 0}, {"skip": -1}):
        with pytest.raises(ValueError, match="steps must be at least 1, or None, and skip at least 0"):
            zk.profile(optimizer, tmp_path, **options)  # type: ignore[arg-type]


def test_a_second_profile_and_another_optimizer_are_refused(tmp_path: Path) -> None:
    with wrapped(1) as optimizer:
        for other in (zk.profile(optimizer, tmp_path / "first"), torch.profiler.profile()):
            with other, pytest.raises(RuntimeError, match="one profile at a time: close the first"):
                zk.profile(optimizer, tmp_path)
        with pytest.raises(TypeError, match="needs a ZeroOptimizer; got SGD"):
            zk.profile(torch.optim.SGD([torch.ones(1)]), tmp_path)
        ended = weakref.ref(zk.profile(optimizer, tmp_path / "third", steps=1))
        step(optimizer)
        gc.collect()
        assert (tmp_path / "third" / "trace.json").exists() and ended() is None
        step(optimizer)


def profiled(folder: Path) -> list[str]:
    with wrapped(**ON_HOST) as optimizer, zk.profile(optimizer, folder):
        step(optimizer)
    return sorted(path.name for path in folder.iterdir())


def test_each_rank_writes_a_profile_of_its_own(tmp_path: Path) -> None:
    run_world(2, profiled, [tmp_path])
    for name in ("trace.json", "trace-rank1.json"):
        counts = Counter(event["name"] for event in events_of(tmp_path / name))
        assert counts["zk: 0 gather"] >= 1 and counts["zk: 0 reduce"] >= 1
        assert any(name.startswith("zk: wait other ranks: ") for name in counts)


# ---- Ctrl-C ----------------------------------------------------------------------------------------

TRAINER = """
import os, signal, sys, torch, zk
from zk.checkpoint import interrupted
model = torch.nn.Linear(4, 4)
with zk.ZeroOptimizer(model, torch.optim.AdamW(model.parameters())) as optimizer:
    try:
        for number in range(5):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if number == 1 and len(sys.argv) > 1:
                optimizer.save_checkpoint(sys.argv[1])
            if number == 3:
                os.kill(os.getpid(), signal.SIGINT)
    except KeyboardInterrupt as error:  # as ZeroTrainer.train does
        interrupted.tell(error, optimizer)
        raise
"""


def ended(*arguments: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: how Python ends one is looked at."""
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})


@pytest.mark.parametrize("saves", (True, False))
def test_ctrl_c_ends_with_one_line_and_its_status(saves: bool, tmp_path: Path) -> None:
    done = ended("-c", TRAINER, *[str(tmp_path)] * saves)
    where = f"resume from {tmp_path}, which is of step 2" if saves else "there is no checkpoint to resume from"
    assert done.stderr.strip() == f"zk: stopped after step 4; {where}", done.stderr
    assert done.returncode in (-signal.SIGINT, 128 + signal.SIGINT) and done.stdout == ""


def test_another_error_keeps_its_traceback() -> None:
    done = ended("-c", TRAINER.replace("        raise\n", '        raise ValueError("mine")\n'))
    assert "ValueError: mine" in done.stderr and "stopped after" not in done.stderr and done.returncode == 1
