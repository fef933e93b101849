"""`zk doctor` finds what stands in the way of training, and says what to do."""

from __future__ import annotations

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


def named(rows: object, what: str) -> Finding:
    return next(row for row in rows if row.what == what)  # type: ignore[attr-defined]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A card from before bf16, on a system that locks little memory."""
    card = SimpleNamespace(name="Tesla T4", major=7, minor=5)
    for name, value in {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "get_device_properties": lambda _: card,
        "mem_get_info": lambda _: (10 * GIB, 15 * GIB),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    low = {resource.RLIMIT_MEMLOCK: (8 << 20, 8 << 20)}
    monkeypatch.setattr(resource, "getrlimit", lambda kind: low.get(kind, (-1, -1)))


def missing(*names: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let imports of these modules fail."""
    for name in names:
        monkeypatch.setitem(sys.modules, name, None)


def test_a_machine_that_can_train_has_nothing_to_do(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["doctor", "--path", str(tmp_path)], catch_exceptions=False)
    assert torch.__version__ in done.output and "GB/s read" in done.output and "what to do" in done.output
    assert done.exit_code == int(any(row.must for row in (*packages(), *machine())))
    assert list(tmp_path.iterdir()) == []


def test_a_package_that_is_missing_is_an_error_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    missing("numba", monkeypatch=monkeypatch)
    row = named(packages(), "numba")
    assert row.must and row.to_do == "python -m pip install numba" and "numba" in row.found
    done = CliRunner().invoke(app, ["doctor"])
    assert done.exit_code == 1 and "python -m pip install numba" in done.output


def test_triton_and_cupy_are_needed_only_where_there_is_a_gpu(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    missing("triton", "cupy", monkeypatch=monkeypatch)
    if not torch.cuda.is_available():
        assert not {"triton", "cupy"} & {row.what for row in packages()}
    request.getfixturevalue("gpu")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    rows = list(packages())
    assert named(rows, "triton").must and named(rows, "cupy").to_do == "python -m pip install cupy-cuda13x"


@pytest.mark.usefixtures("gpu")
def test_an_old_gpu_and_too_little_locked_memory() -> None:
    rows = list(machine())
    assert "Tesla T4" in named(rows, "GPU 0").found and "fp16" in named(rows, "GPU 0").to_do
    assert named(rows, "locked memory").must and "ulimit -l unlimited" in named(rows, "locked memory").to_do
    assert "dtype='fp32'" not in named(rows, "CPU").to_do


@pytest.mark.skipif(torch.cuda.is_available(), reason="about a machine without a GPU")
def test_a_cpu_that_is_slow_in_bf16_and_a_container(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "multiplies_bf16", lambda: False)
    monkeypatch.setattr(doctor, "host_memory", lambda: (1 * GIB, GIB // 2))
    rows = list(machine())
    assert named(rows, "CPU").to_do == "bf16 is slow on this CPU: use dtype='fp32'"
    assert named(rows, "memory").found == "512.0 MiB of 1.0 GiB free" and "container" in named(rows, "memory").to_do
    assert not any("fp16" in row.to_do for row in rows)


def test_folders_that_are_no_drive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (row,) = drive(tmp_path / "none")
    assert row.must and row.to_do.startswith(f"mkdir -p {tmp_path / 'none'}")
    monkeypatch.setattr(doctor, "in_memory", lambda _: True)
    monkeypatch.setattr(doctor, "measure_drive", lambda _: (1e8, 1e8, False))
    memory, direct, rate = drive(tmp_path)
    assert memory.must and "drive" in memory.to_do and direct.found == "no" and "NVMe" in rate.to_do
    monkeypatch.undo()
    assert doctor.in_memory(Path("/dev/shm")) and not doctor.in_memory(Path("/proc"))
