"""`zk doctor` finds what stands in the way of training, and says what to do."""

import functools
import resource
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from zk.tools import doctor
from zk.tools.cli import app
from zk.tools.doctor import Finding, drive, machine, packages

GIB = 1 << 30
INSTALLED = functools.cache(doctor.packages_distributions)


def found(rows: object) -> dict[str, Finding]:
    return {row.what: row for row in rows}  # type: ignore[attr-defined]


def a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A card from before bf16, on a system that locks little memory."""
    card = SimpleNamespace(name="Tesla T4", major=7, minor=5)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: card)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (10 * GIB, 15 * GIB))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    low = {resource.RLIMIT_MEMLOCK: (8 << 20, 8 << 20)}
    monkeypatch.setattr(resource, "getrlimit", lambda kind: low.get(kind, (-1, -1)))


def test_a_machine_that_can_train_has_nothing_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "measure_drive", functools.partial(doctor.measure_drive, nbytes=16 << 20))
    done = CliRunner().invoke(app, ["doctor", "--path", str(tmp_path)], catch_exceptions=False)
    assert torch.__version__ in done.output and "GB/s read" in done.output and "what to do" in done.output
    assert done.exit_code == int(any(row.must for row in (*packages(), *machine())))
    assert list(tmp_path.iterdir()) == []


def test_a_package_that_is_missing_is_an_error_with_its_command_and_some_are_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "packages_distributions", INSTALLED)
    for name in ("numba", "triton", "cupy"):
        monkeypatch.setitem(sys.modules, name, None)
    if not torch.cuda.is_available():
        rows = found(packages())
        assert rows["numba"].must and rows["numba"].to_do == "python -m pip install numba" and not {"triton", "cupy"} & rows.keys()
    done = CliRunner().invoke(app, ["doctor"])
    assert done.exit_code == 1 and "python -m pip install numba" in done.output
    a_gpu(monkeypatch)
    rows = found(packages())
    assert rows["triton"].must and rows["cupy"].to_do == "python -m pip install cupy-cuda13x"


def test_an_old_gpu_too_little_locked_memory_a_cpu_that_is_slow_in_bf16_and_a_container(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "multiplies_bf16", lambda: False)
    monkeypatch.setattr(doctor, "host_memory", lambda: (1 * GIB, GIB // 2))
    if not torch.cuda.is_available():
        rows = found(machine())
        assert rows["CPU"].to_do == "bf16 is slow on this CPU: use dtype='fp32'" and not any("fp16" in row.to_do for row in rows.values())
        assert rows["memory"].found == "512.0 MiB of 1.0 GiB free" and "container" in rows["memory"].to_do
    a_gpu(monkeypatch)
    rows = found(machine())
    assert "Tesla T4" in rows["GPU 0"].found and "fp16" in rows["GPU 0"].to_do and "dtype='fp32'" not in rows["CPU"].to_do
    assert rows["locked memory"].must and "ulimit -l unlimited" in rows["locked memory"].to_do


def test_folders_that_are_no_drive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (row,) = drive(tmp_path / "none")
    assert row.must and row.to_do.startswith(f"mkdir -p {tmp_path / 'none'}")
    assert doctor.in_memory(Path("/dev/shm")) and not doctor.in_memory(Path("/proc"))
    monkeypatch.setattr(doctor, "in_memory", lambda _: True)
    monkeypatch.setattr(doctor, "measure_drive", lambda _: (1e8, 1e8, False))
    memory, direct, rate = drive(tmp_path)
    assert memory.must and "drive" in memory.to_do and direct.found == "no" and "NVMe" in rate.to_do
