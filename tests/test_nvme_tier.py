"""The NVMe tier under ZeroOptimizer: what rests where, what a failing drive does, and what a dead run leaves behind."""

from __future__ import annotations

import contextlib
import copy
import errno
import logging
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import zk
from benchmarks.throttled import ThrottledLink, pretend
from tests.models import GPT, batch, loss_of
from tests.programs import Program, run
from tests.test_nvme import Faults
from zk.offload import nvme, spill
from zk.offload.nvme import Engine, File
from zk.offload.tiers import Needs, NVMeTier, place


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(spill, "CHUNK_NUMEL", 2048)
    yield


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Faults:
    faults = Faults()
    monkeypatch.setattr(nvme, "SYSTEM", faults)
    return faults


def wrap(model: nn.Module, path: Path, **options: object) -> zk.ZeroOptimizer:
    options = {"stage": 3, "dtype": "bf16", "param_tier": "nvme", "optimizer_tier": "nvme", "nvme_path": path, **options}
    return zk.ZeroOptimizer(model, torch.optim.AdamW(model.parameters(), lr=1e-2), **options)


def step(model: nn.Module, optimizer: zk.ZeroOptimizer, seed: int = 0) -> float:
    loss = loss_of(model, batch(seed))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def test_bytes_are_on_the_drive_and_metrics_say_so(tmp_path: Path) -> None:
    model = GPT(width=96, layers=4)
    num_params = sum(param.numel() for param in model.parameters())
    with wrap(model, tmp_path) as optimizer:
        for seed in range(3):
            step(model, optimizer, seed)
        metrics = optimizer.metrics()
        assert metrics["nvme_param_nbytes"] == pytest.approx(2 * num_params, rel=0.05)
        assert metrics["nvme_moments_nbytes"] == pytest.approx(8 * num_params, rel=0.05)
        assert metrics["nvme_master_nbytes"] == pytest.approx(2 * num_params, rel=0.05)
        assert metrics.get("host_param_nbytes", 0) == metrics.get("host_moments_nbytes", 0) == metrics["device_gathered_nbytes"] == 0
        assert 0 < metrics["host_buffer_nbytes"] < 10 * num_params
        (folder,) = tmp_path.iterdir()
        # parameters 2, gradients 4 (they may be accumulated), master 2, moments 8; and whole pages
        assert 16 * num_params <= (folder / "state.bin").stat().st_size < 16 * num_params + 100 * 4096
        # a step reads parameters for forward, backward and update, gradients, and optimizer state; and writes the last three
        before = metrics
        step(model, optimizer, 3)
        after = optimizer.metrics()
        assert after["fetched_nbytes"] - before["fetched_nbytes"] < (2 + 2 + 2 + 2 + 10) * num_params * 1.2
        assert after["evicted_nbytes"] - before["evicted_nbytes"] < (2 + 2 + 10) * num_params * 1.2
        assert 0 < after["fetch_hit_rate"] <= 1 and after["stall_ms"] > 0
    assert list(tmp_path.iterdir()) == []


def test_copies_of_parameters_on_a_device_are_in_host_memory_and_in_its_budget(tmp_path: Path) -> None:
    """Those too whose optimizer state is on the drive."""
    torch.manual_seed(0)
    model = GPT(width=192, layers=8)
    num_params = sum(param.numel() for param in model.parameters())
    budget = 3_000_000 + 6 * num_params
    with pretend(ThrottledLink(1e10)):
        options = {"stage": 2, "param_tier": "device", "host_budget": budget}
        with wrap(model, tmp_path, **options) as optimizer:
            step(model, optimizer)
            metrics = optimizer.metrics()
            assert metrics["host_param_copy_nbytes"] == pytest.approx(2 * num_params, rel=0.01) and "nvme_param_copy_nbytes" not in metrics
            assert metrics["nvme_moments_nbytes"] > 0 and metrics["host_moments_nbytes"] > 0
            # gradients of what is updated in host memory are there from backward to step
            kept = sum(metrics.get(f"host_{kind}_nbytes", 0) for kind in ("moments", "master", "param_copy", "buffer"))
            assert kept + 2 * metrics["host_moments_nbytes"] / 8 <= budget
    with pretend(ThrottledLink(1e10)), pytest.raises(ValueError, match="host_budget is"):
        wrap(GPT(width=192, layers=8), tmp_path, stage=2, param_tier="device", host_budget=2 * num_params - 1)


@pytest.mark.parametrize("budget", (40, 47, 48, 50, 54, 55, 56, 60))
def test_buffers_and_copies_of_parameters_are_in_the_budget_together(budget: int) -> None:
    million, needs, buffers = 10**6, [Needs(2 * 10**6, 10**6, 12, 2)] * 4, 3 * 10**6
    config = zk.ZeroConfig(stage=2, optimizer_tier="nvme", nvme_path="/tmp", host_budget=budget * million)
    parts = [part for _, parts in place(config, needs, torch.device("cuda"), buffers) for part in parts]
    states = sum(12 * numel for tier, numel in parts if tier == "host")
    assert states + 8 * million + buffers * any(tier == "nvme" for tier, _ in parts) <= budget * million
    assert (states == 48 * million) == (budget >= 56)


def test_a_host_budget_keeps_what_fits_parameters_first(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = GPT(width=96, layers=8)
    others = [copy.deepcopy(model) for _ in range(2)]
    num_params = sum(param.numel() for param in model.parameters())
    losses, where = [], []
    buffers = 850_000  # of these small chunks and units
    for other, budget in zip((model, *others), (None, f"{buffers + 4 * num_params}B", "1GiB"), strict=True):
        with wrap(other, tmp_path, host_budget=budget) as optimizer:
            where.append((optimizer.resting("param"), optimizer.resting("optimizer")))
            losses.append([step(other, optimizer, seed) for seed in range(2)])
            metrics = optimizer.metrics()
            kept = metrics.get("host_moments_nbytes", 0) + metrics.get("host_master_nbytes", 0) + metrics.get("host_param_nbytes", 0)
            if budget not in (None, "1GiB"):
                assert kept + metrics["host_buffer_nbytes"] <= int(budget[:-1])
    assert where == [("nvme", "nvme"), ("host", "host+nvme"), ("host", "host")]
    assert losses[1:] == losses[:1] * 2


def test_auto_fills_device_then_host_then_drive(tmp_path: Path) -> None:
    model = GPT(width=192, layers=8)
    num_params = sum(param.numel() for param in model.parameters())
    budgets = {"device_budget": f"{num_params}B", "host_budget": f"{2_600_000 + 3 * num_params}B"}
    with wrap(model, tmp_path, param_tier="auto", optimizer_tier="auto", **budgets) as optimizer:
        assert optimizer.resting("param") == "device+host" and optimizer.resting("optimizer") == "host+nvme"
        step(model, optimizer)
        assert optimizer.metrics()["device_param_nbytes"] <= num_params
    with pytest.raises(ValueError, match="of host memory for its buffers, and host_budget is"):
        wrap(GPT(width=192, layers=8), tmp_path, host_budget="1MB")
    with pytest.raises(ValueError, match="on the host tier, and host_budget is"):
        wrap(GPT(width=192, layers=8), tmp_path, param_tier="auto", optimizer_tier="auto", nvme_path=None, **budgets)


def test_stripes_over_several_folders_share_the_bytes(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in "ab"]
    for path in paths:
        path.mkdir()
    model = GPT(width=192, layers=8)
    with wrap(model, tmp_path, nvme_path=paths) as optimizer:
        step(model, optimizer)
        sizes = [sum(file.stat().st_blocks for file in path.rglob("state.bin")) for path in paths]
        assert min(sizes) > 0
    assert [list(path.iterdir()) for path in paths] == [[], []]


# ---- a drive that fails ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ("missing", "a file", "read-only"))
def test_paths_that_cannot_be_used_are_refused_and_the_model_is_untouched(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "x"
    if kind == "a file":
        path.write_text("")
    model = GPT()
    before = [param.data_ptr() for param in model.parameters()]
    if kind == "read-only":
        if os.geteuid() == 0 and not _mount_read_only(path):
            pytest.skip("root may write everywhere, and mounting is not permitted here")
        path.mkdir(mode=0o500, exist_ok=True)
    try:
        with pytest.raises(OSError, match="nvme_path must be") as caught:
            wrap(model, path)
        assert caught.value.filename == str(path)
    finally:
        if kind == "read-only" and os.geteuid() == 0:
            subprocess.run(["umount", "-l", str(path)], check=True)
    assert [param.data_ptr() for param in model.parameters()] == before


def _mount_read_only(path: Path) -> bool:
    path.mkdir()
    return subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m,ro", "tmpfs", str(path)], capture_output=True).returncode == 0


def test_a_full_drive_is_refused_before_anything_is_moved(tmp_path: Path, faults: Faults) -> None:
    model = GPT()
    before = [param.data_ptr() for param in model.parameters()]
    faults.fail = {"posix_fallocate": [errno.ENOSPC]}
    with pytest.raises(OSError, match=r"\d+ bytes .* are needed and \d+ .* are free"):
        wrap(model, tmp_path)
    assert [param.data_ptr() for param in model.parameters()] == before and list(tmp_path.iterdir()) == []
    with wrap(model, tmp_path) as optimizer:
        step(model, optimizer)


@pytest.mark.parametrize(("call", "number"), (("preadv", errno.EIO), ("pwritev", errno.EIO), ("pwritev", errno.ENOSPC)))
@pytest.mark.parametrize("when", (0, 7, 40))
def test_an_error_of_the_drive_is_raised_in_training(call: str, number: int, when: int, tmp_path: Path, faults: Faults) -> None:
    model = GPT()
    optimizer = wrap(model, tmp_path)
    step(model, optimizer)
    faults.fail = {call: [0] * when + [number]}
    with pytest.raises(OSError) as caught:
        for seed in range(4):
            step(model, optimizer, seed)
    assert caught.value.errno == number and str(tmp_path) in str(caught.value.filename) and "bytes at offset" in str(caught.value)
    optimizer.close()
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_is_loaded_over_parameters_that_could_not_be_written(tmp_path: Path, faults: Faults) -> None:
    model = GPT(layers=8)  # more units than buffers
    last = next(model.blocks[-1].parameters())
    with wrap(model, tmp_path) as optimizer:
        step(model, optimizer)
        optimizer.save_checkpoint(tmp_path / "saved")
        want = step(model, optimizer, 1)
        with zk.gather(last, write=True), torch.no_grad():
            last.mul_(0.5)
            optimizer.tiers["nvme"].flush()
            faults.fail = {"pwritev": [errno.EIO]}
        with pytest.raises(OSError, match="Input/output error"):
            step(model, optimizer, 2)
        optimizer.zero_grad()
        optimizer.load_checkpoint(tmp_path / "saved")
        assert step(model, optimizer, 1) == want


@pytest.mark.parametrize("overlap", (False, "backward"))
def test_a_checkpoint_is_loaded_whatever_a_step_could_not_write(overlap: object, tmp_path: Path, faults: Faults) -> None:
    """Gradients, and what an update made out of place, are forgotten, and nobody writes them again."""
    for count in range(0, 30, 3):
        with wrap(GPT(), tmp_path, overlap_step=overlap) as optimizer:
            step(optimizer.model, optimizer)
            optimizer.save_checkpoint(tmp_path / f"saved-{count}")
            optimizer.tiers["nvme"].flush()
            faults.fail = {"pwritev": [0] * count + [errno.EIO]}
            with contextlib.suppress(OSError):
                for seed in range(4):
                    step(optimizer.model, optimizer, seed)
            faults.fail = {}
            with contextlib.suppress(OSError):  # it may be the first to hear of it
                optimizer.load_checkpoint(tmp_path / f"saved-{count}")
            optimizer.load_checkpoint(tmp_path / f"saved-{count}")
            step(optimizer.model, optimizer, 1)


def test_short_and_late_transfers_change_nothing(tmp_path: Path, faults: Faults) -> None:
    torch.manual_seed(0)
    model = GPT()
    other = copy.deepcopy(model)
    with wrap(model, tmp_path) as optimizer:
        want = [step(model, optimizer, seed) for seed in range(3)]
    faults.short, faults.delay = 0.4, 0.0005
    with wrap(other, tmp_path) as optimizer:
        assert [step(other, optimizer, seed) for seed in range(3)] == want


def test_a_drive_that_does_not_answer_ends_in_a_bounded_wait(tmp_path: Path, faults: Faults, monkeypatch: pytest.MonkeyPatch) -> None:
    real, engine = File.__init__, Engine()
    monkeypatch.setattr(File, "__init__", lambda self, *args, **options: real(self, *args, **options, engine=engine))
    model = GPT()
    optimizer = wrap(model, tmp_path)
    step(model, optimizer)
    nvme = optimizer.tiers["nvme"]
    assert isinstance(nvme, NVMeTier)
    ((_, file),) = nvme.spill.files
    file.wait()  # for what was asked ahead of the next step
    file.timeout_s = 0.2
    faults.answers.clear()
    with pytest.raises(TimeoutError, match=r"the (read|write) of \d+ bytes at offset \d+ of .*state\.bin has not ended after 0\.2 s"):
        step(model, optimizer)
    faults.answers.set()
    engine.close()  # once all that was asked of it is done
    optimizer.close()


def test_a_changed_byte_is_noticed(tmp_path: Path) -> None:
    model = GPT()
    optimizer = wrap(model, tmp_path)
    step(model, optimizer)
    nvme_file = next(tmp_path.rglob("state.bin"))
    with open(nvme_file, "r+b") as file:
        data = bytearray(file.read())
        data[:] = bytes(byte ^ 1 for byte in data)
        file.seek(0)
        file.write(data)
    with pytest.raises(OSError, match="are not what was written there"):
        step(model, optimizer, 1)
    optimizer.close()


def test_a_folder_removed_under_a_run_is_no_loss(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The kernel keeps open files; what is gone is gone at close."""
    torch.manual_seed(0)
    model = GPT()
    other = copy.deepcopy(model)
    with wrap(other, tmp_path) as optimizer:
        want = [step(other, optimizer, seed) for seed in range(3)]
    with caplog.at_level(logging.WARNING), wrap(model, tmp_path) as optimizer:
        got = [step(model, optimizer, 0)]
        shutil.rmtree(next(tmp_path.iterdir()))
        got += [step(model, optimizer, seed) for seed in (1, 2)]
    assert got == want and list(tmp_path.iterdir()) == []


RUN = """
import signal, sys, torch, zk
signal.signal(signal.SIGINT, signal.default_int_handler)  # what starts the tests may have it ignored
from tests.models import GPT, batch, loss_of
torch.manual_seed(0)
model = GPT(width=96, layers=4)
optimizer = zk.ZeroOptimizer(model, torch.optim.AdamW(model.parameters()), stage=3, param_tier="nvme", optimizer_tier="nvme", nvme_path=sys.argv[1])
for seed in range(int(sys.argv[2])):
    loss = loss_of(model, batch(seed))
    loss.backward()
    optimizer.step()
    print(seed, loss.item(), flush=True)
"""


@pytest.mark.parametrize("number", (signal.SIGKILL, signal.SIGTERM, signal.SIGINT))
def test_a_run_ended_in_mid_step_leaves_nothing_for_the_next(number: int, tmp_path: Path) -> None:
    first = Program("-c", RUN, str(tmp_path), "100000")
    for _ in range(5):
        assert first.stdout.readline()
    first.send_signal(number)
    assert first.wait() != 0
    if number == signal.SIGKILL:
        assert len(list(tmp_path.iterdir())) == 1
    again = run("-c", RUN, str(tmp_path), "3")
    assert again.returncode == 0 and again.stdout.count("\n") == 3, again.stderr
    assert list(tmp_path.iterdir()) == []


# ---- buffers ---------------------------------------------------------------------------------------------------------------------------


def test_frozen_codes_of_one_byte_are_saved_as_they_are(tmp_path: Path) -> None:
    """A chunk of them ends within a page, and is read for a checkpoint from where the whole slice was written."""

    class Coded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.codes = nn.Parameter(torch.randint(0, 255, (3 * 2048 + 5,), dtype=torch.uint8), requires_grad=False)
            self.layer = nn.Linear(4, 4)

    model = Coded()
    want = model.codes.detach().clone()
    with wrap(model, tmp_path) as optimizer:
        optimizer.save_checkpoint(tmp_path / "saved")
        with zk.gather(model.codes, write=True):
            model.codes.zero_()
        optimizer.load_checkpoint(tmp_path / "saved")
        with zk.gather(model.codes):
            assert torch.equal(model.codes, want)
