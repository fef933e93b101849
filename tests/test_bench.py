"""`python -m zk bench`: every subcommand measures what it says, checks it first, leaves nothing behind, and says why where it cannot."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner, Result

import zk
from benchmarks.throttled import ThrottledLink, pretend
from tests.world import processes
from zk.bench import adam, io, kernels, link, step
from zk.bench.clock import Case, Report, copy_gbps, matmul_tflops, row_of, seconds_of
from zk.offload.nvme import File
from zk.tools import doctor
from zk.tools.cli import app
from zk.tools.gpt import GPTConfig

CPU = torch.device("cpu")
MIB = 1 << 20
NUM_KERNELS = sum(map(len, (*[kernels.REDUCES] * len(kernels.RANKS), kernels.FLATTENS, kernels.ADAMS, kernels.MATMULS)))


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", *arguments], env={"COLUMNS": "200"})


def said(*arguments: str) -> dict[str, Any]:
    done = run(*arguments, "--json")
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    for row in found["rows"]:
        assert 0 < row["p20_s"] <= row["median_s"] <= row["p80_s"] and row["floor_s"] > 0
        assert row["fraction_of_floor"] == pytest.approx(row["floor_s"] / row["median_s"])
    return found


def test_a_row_has_the_median_its_neighbours_and_its_rates() -> None:
    row = row_of("x", [1.0, 2.0, 3.0, 4.0, 5.0, 6.0], 1.75, {"gbps": 7.0}, note="n")
    assert row == {
        "name": "x", "median_s": 3.5, "p20_s": 2.0, "p80_s": 5.0, "floor_s": 1.75, "fraction_of_floor": 0.5, "gbps": 2.0, "note": "n"
    }
    assert row_of("x", [3.0], 1.0, {})["p80_s"] == 3.0
    case = Case("x", lambda: None, {"gbps": 2.0, "tflops": 3.0})
    assert case.row({"copy_gbps": 4.0, "matmul_tflops": 1.0}, [1.0])["floor_s"] == 3.0
    assert Report("b", {"copy_gbps": 1.0}, [row]).as_dict() == {"bench": "b", "copy_gbps": 1.0, "rows": [row]}


def test_the_first_call_does_not_count() -> None:
    calls: list[int] = []
    assert len(seconds_of(lambda: calls.append(1), 4, CPU)) == 4 and len(calls) == 5
    calls.clear()
    assert len(seconds_of(lambda: calls.append(1), 9, patience_s=0.0)) == 3  # and what takes too long is done three times
    assert len(seconds_of(lambda: calls.append(1), 2, patience_s=0.0)) == 2
    assert copy_gbps(CPU, MIB, 2) > 0 and matmul_tflops(CPU, 32, torch.float32, 2) > 0


def test_io_measures_a_file_and_leaves_nothing_behind(tmp_path: Path) -> None:
    found = said("io", str(tmp_path), "--size", "300000", "--block", "8KiB", "--depth", "2", "--rounds", "2")
    assert [row["name"] for row in found["rows"]] == ["write", "read"] and found["nbytes"] == 300_000
    assert (found["block_nbytes"], found["depth"]) == (8192, 2) and all(row["gbps"] > 0 for row in found["rows"])
    assert not list(tmp_path.iterdir())
    done = run("io", str(tmp_path), "--size", "64KiB", "--rounds", "1")
    assert done.exit_code == 0 and "GB/s" in done.output and "write" in done.output and "of floor" in done.output


def test_io_refuses_what_has_no_room_or_is_no_folder(tmp_path: Path) -> None:
    with mock.patch.object(os, "statvfs", lambda _: mock.Mock(f_bavail=1, f_frsize=4096)):
        done = run("io", str(tmp_path), "--size", "1GiB")
    assert done.exit_code == 2 and "1.00 GiB are to be written and 4096 bytes are free" in done.output
    assert run("io", str(tmp_path / "none")).exit_code == 2
    done = run("io", str(tmp_path), "--block", "5000")
    assert done.exit_code == 2 and "multiple of 4096" in done.output
    done = run("io", str(tmp_path), "--size", "1KiB")
    assert done.exit_code == 2 and "must have at least 4096 bytes to be measured; got 1024" in done.output
    done = run("io", str(tmp_path), "--depth", "100000")
    assert done.exit_code == 2 and "must be at most 1024, as each is a thread; got 100000" in done.output
    assert "--size must be" in run("io", str(tmp_path), "--size", "much").output
    assert not list(tmp_path.iterdir())


def test_io_says_where_a_folder_is_no_drive(tmp_path: Path) -> None:
    for kind, said_so in (("tmpfs", True), ("ext4", False)):
        with mock.patch.object(doctor, "filesystem", lambda _, kind=kind: kind):
            done = run("io", str(tmp_path), "--size", "64KiB", "--rounds", "1")
        assert done.exit_code == 0 and ("is host memory, not a drive" in done.output) == said_so


def test_io_times_nothing_that_comes_back_wrong(tmp_path: Path) -> None:
    read = File.read

    def wrong(self: File, tensor: Tensor, offset: int = 0) -> None:
        read(self, tensor, offset)
        tensor[-1] += 1

    with mock.patch.object(File, "read", wrong), pytest.raises(OSError, match="are not what was written there"):
        io.passes(str(tmp_path), 100_000, 4096, 1, 1)
    assert not list(tmp_path.iterdir())


def test_adam_measures_zk_and_torch() -> None:
    found = said("adam", "--numel", "2000", "--rounds", "2")
    assert [row["name"] for row in found["rows"]] == list(adam.SYSTEMS)
    for row in found["rows"]:
        assert row["ns_per_parameter"] == pytest.approx(row["median_s"] / 2000 * 1e9)
    done = run("adam", "--numel", "1000", "--rounds", "1")
    assert done.exit_code == 0 and "ns/param" in done.output and "torch_foreach" in done.output
    assert run("adam", "--numel", "0").exit_code == 2


def test_adam_times_nothing_that_differs_from_torch() -> None:
    adam.check(adam.SYSTEMS["torch_fused"][1], loose=False)
    with pytest.raises(RuntimeError, match=r"of the parameters differ from torch.optim.AdamW's"):
        adam.check(lambda param, grad: adam.by_torch(param, -grad), loose=True)


def test_more_than_there_is_memory_for_is_one_line() -> None:
    done = run("adam", "--numel", str(10**14))
    assert done.exit_code == 2 and "can't allocate memory" in done.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("command", ("link", "kernels"))
def test_without_a_gpu_its_benchmarks_say_so(command: str) -> None:
    done = run(command)
    assert done.exit_code == 2 and f"zk bench {command}: torch sees no GPU" in done.output and "nothing to measure" in done.output


def test_a_link_is_measured_each_way_by_what_moves_over_it() -> None:
    with pytest.raises(ValueError, match="has the host's memory"):
        link.measure(MIB, 1, CPU)
    with pretend(ThrottledLink(1e9)):
        found = link.measure(MIB, 2, CPU).as_dict()
    assert [row["name"] for row in found["rows"]][:3] == ["pinned, host to device", "pinned, device to host", "pinned, both at once"]
    assert [row["name"] for row in found["rows"]][3:] == ["pageable, host to device", "pageable, device to host"]
    limits = (1.0, 1.0, 2.0)  # 1e9 bytes/s each way
    assert all(0 < row["gbps"] <= limit * 1.01 for row, limit in zip(found["rows"][:3], limits, strict=True))


@pytest.mark.device_only
def test_the_link_to_a_gpu_and_its_kernels_are_measured() -> None:
    found = said("link", "--size", "64KiB", "--rounds", "1")
    assert found["device"] == "cuda:0" and found["page_locked"] and len(found["rows"]) == 5
    found = said("kernels", "--numel", "6400", "--size", "64", "--rounds", "1")
    assert found["device"] == torch.cuda.get_device_name()
    assert len(found["rows"]) == NUM_KERNELS


@pytest.mark.device_only
@pytest.mark.parametrize("dtype", ("fp32", "bf16", "fp16"))
def test_a_step_on_a_gpu_has_the_losses_of_plain_torch_and_a_peak_of_its_memory(dtype: str, one_thread: None) -> None:
    zero = zk.ZeroConfig(stage=3, param_tier="host", optimizer_tier="host", dtype=dtype)
    job = step.Job(GPTConfig(vocab=32, width=16, layers=2, heads=2, context=8), zero, 2, 1, 1)
    plain = step.run(job, True, [])
    mine = step.run(job, False, plain["losses"])  # raises where they are others
    assert mine["peak_nbytes"] > 0 and len(mine["seconds"]) == 1


def test_a_link_that_does_not_copy_is_not_timed() -> None:
    twin = ThrottledLink(1e12)
    with pretend(twin), mock.patch.object(twin, "upload", lambda *_: twin.mark()), pytest.raises(RuntimeError, match="is not its source"):
        link.measure(MIB, 1, CPU)


def test_kernels_are_each_beside_plain_torch() -> None:
    """On a CPU it is the references that run: that all of it goes through."""
    found = kernels.measure(6400, 64, 1, CPU).as_dict()
    names = [row["name"] for row in found["rows"]]
    assert len(names) == len(set(names)) == NUM_KERNELS
    assert all(("gbps" in row) != ("tflops" in row) for row in found["rows"])


def test_kernels_that_are_wrong_are_not_timed() -> None:
    wrong = mock.Mock(side_effect=lambda rows, out, stats: out.copy_(rows[0]))
    with mock.patch.dict(kernels.REDUCES, {"zk": wrong}), pytest.raises(RuntimeError, match="reduce 1 rows with statistics by zk does not agree"):
        kernels.measure(640, 64, 1, CPU)


@contextlib.contextmanager
def forked() -> Iterator[None]:
    """Processes of their own are forked from one that has imported torch, where tests of ranks are."""
    context = processes()
    with mock.patch.object(multiprocessing, "get_context", {"spawn": context}.__getitem__):
        yield


TINY = ("--layers", "2", "--width", "16", "--heads", "2", "--context", "8", "--vocab", "32", "--batch", "2", "--rounds", "2")


def test_step_trains_plain_torch_and_zk_apart() -> None:
    with forked():
        found = said("step", *TINY, "--dtype", "fp32")
    plain, own = found["rows"]
    assert (plain["name"], own["name"]) == ("plain torch", "zk")
    assert own["first_losses"] == pytest.approx(plain["first_losses"], rel=1e-4) and own["first_losses"][0] != own["first_losses"][2]
    assert own["peak_nbytes"] > 0 and own["tokens_per_s"] == pytest.approx(16 / own["median_s"])


def test_step_refuses_settings_and_other_losses(tmp_path: Path) -> None:
    assert "width must be a multiple of heads" in run("step", "--width", "10", "--heads", "4").output
    done = run("step", *TINY, "--stage", "2", "--param-tier", "host")
    assert done.exit_code == 2 and "needs stage=3" in done.output
    job = step.Job(GPTConfig(vocab=32, width=16, layers=1, heads=2, context=8), zk.ZeroConfig(stage=2, dtype="fp32"), 2, 1, 1)
    with pytest.raises(RuntimeError, match=r"step 1 has loss .* in plain torch: not within 0\.0001"):
        step.run(job, False, [1e9])
    assert len(step.run(job, False, [])["seconds"]) == 1


def end(*_: object) -> None:
    os._exit(1)


def test_what_ends_a_step_s_process_is_told() -> None:
    job = step.Job(GPTConfig(vocab=32, width=16, layers=1, heads=2, context=8), zk.ZeroConfig(host_budget="1KiB", optimizer_tier="host"), 2, 1, 1)
    with forked(), pytest.raises(ValueError, match="host_budget is"):
        step.apart(job, False, [])
    with forked(), mock.patch.object(step, "run", end), pytest.raises(RuntimeError, match="the process that trains with zk was ended from outside"):
        step.apart(job, False, [])
