"""What stands in the way is found, with its remedy."""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import psutil
import pytest
import torch
from typer.testing import CliRunner

from zk.tools import doctor
from zk.tools.cli import app
from zk.tools.doctor import Finding, examine
from zk.tools.plan import measure

GIB = 1 << 30


def named(findings: list[Finding], what: str) -> Finding:
    return next(finding for finding in findings if finding.what == what)


def test_this_machine_can_train(tmp_path: Path) -> None:
    found = examine([tmp_path], lambda folder: 2.0)
    assert {finding.part for finding in found} >= {"versions", "devices", "cores", "memory", str(tmp_path)}
    assert named(found, "torch").found == torch.__version__ and named(found, "torch").verdict == "ok"
    assert named(found, "reads and writes") == Finding(str(tmp_path), "reads and writes", "2.00 GB/s")
    assert all(finding.remedy for finding in found if finding.verdict == "mend")


def test_packages_that_are_missing_or_broken() -> None:
    with mock.patch.object(doctor, "_NEEDED", ("nothing_of_this_name",)):
        row = named(list(doctor.versions()), "nothing_of_this_name")
        assert (row.verdict, row.remedy) == ("mend", "python -m pip install nothing_of_this_name")
    with mock.patch.object(doctor.importlib, "import_module", mock.Mock(side_effect=ImportError("numpy 9 is not supported"))):
        row = named(list(doctor.versions()), "numba")
        assert row.verdict == "mend" and "numpy 9 is not supported" in row.found


@pytest.mark.parametrize(
    ("names", "verdict", "remedy"),
    (
        (["cupy-cuda13x"], None, ""),
        (["cupy-cuda12x"], "mend", "pip install cupy-cuda13x"),
        (["cupy-cuda13x", "cupy-cuda12x"], "mend", "pip uninstall cupy-cuda12x"),
    ),
)
def test_cupy_goes_with_torchs_cuda(names: list[str], verdict: str | None, remedy: str) -> None:
    with mock.patch.object(doctor, "_distributions", lambda: {"cupy": names}), mock.patch.object(torch.version, "cuda", "13.0"):
        rows = list(doctor._cupy())
    assert [row.verdict for row in rows] == ([verdict] if verdict else [])
    assert all(remedy in row.remedy for row in rows)


def test_cores_and_the_time_of_a_container(tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    assert doctor.cpu_quota(tmp_path) == 1.5
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert doctor.cpu_quota(tmp_path) is None
    (tmp_path / "cpu.max").unlink()
    assert doctor.cpu_quota(tmp_path) is None
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("200000")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000")
    assert doctor.cpu_quota(tmp_path) == 2.0
    patches = (
        mock.patch.object(os, "sched_getaffinity", lambda _: {0, 1, 2}),
        mock.patch.object(os, "cpu_count", lambda: 64),
        mock.patch.object(doctor, "cpu_quota", lambda: 1.5),
    )
    with patches[0], patches[1], patches[2]:
        rows = list(doctor.cores())
    assert named(rows, "cores").found == "3 of 64" and "num_threads=1" in named(rows, "container's limit").remedy


@pytest.mark.parametrize(
    ("slow", "verdict", "said", "remedy"),
    (
        (set(), "ok", "fast in fp32, bf16 and fp16", ""),
        ({torch.float16}, "note", "slower than fp32 in fp16", "dtype='bf16'"),
        ({torch.bfloat16, torch.float16}, "note", "slower than fp32 in bf16 and fp16", "dtype='fp32'"),
    ),
)
def test_precisions_that_the_cpu_is_slow_in(slow: set[torch.dtype], verdict: str, said: str, remedy: str) -> None:
    with mock.patch.object(doctor, "has_fast_products", lambda dtype: dtype not in slow):
        row = named(list(doctor.cores()), "matrix products")
        assert row.verdict == verdict and said in row.found and remedy in row.remedy
        with mock.patch.object(torch.cuda, "is_available", lambda: True):
            assert "matrix products" not in [row.what for row in doctor.cores()]


@pytest.mark.parametrize(
    ("limit", "cuda", "wsl", "verdict", "said"),
    (
        (8 << 20, True, False, "mend", "ulimit -l unlimited"),
        (8 << 20, False, False, "ok", ""),
        (resource.RLIM_INFINITY, True, False, "ok", ""),
        (resource.RLIM_INFINITY, True, True, "note", ".wslconfig"),
    ),
)
def test_page_locking(limit: int, cuda: bool, wsl: bool, verdict: str, said: str) -> None:
    patches = (
        mock.patch.object(resource, "getrlimit", lambda which: (limit if which == resource.RLIMIT_MEMLOCK else resource.RLIM_INFINITY, limit)),
        mock.patch.object(torch.cuda, "is_available", lambda: cuda),
        mock.patch.object(doctor, "in_wsl", lambda: wsl),
    )
    with patches[0], patches[1], patches[2]:
        row = named(list(doctor.memory()), "page-locked")
    assert row.verdict == verdict and said in row.remedy


def test_memory_of_a_container_swap_and_huge_pages(tmp_path: Path) -> None:
    (tmp_path / "enabled").write_text("always madvise [never]\n")
    patches = (
        mock.patch.object(doctor, "host_memory", lambda: (8 * GIB, 3 * GIB)),
        mock.patch.object(psutil, "swap_memory", lambda: SimpleNamespace(used=2 * GIB)),
        mock.patch.object(doctor, "_THP", tmp_path / "enabled"),
    )
    with patches[0], patches[1], patches[2]:
        rows = list(doctor.memory())
    assert "3.00 GiB of 8.00 GiB free (the machine has" in named(rows, "host").found
    assert named(rows, "swap").verdict == "note" and named(rows, "huge pages").verdict == "mend"


def test_folders(tmp_path: Path) -> None:
    assert next(iter(doctor.path(tmp_path / "none", None))).remedy.startswith("mkdir -p")
    (tmp_path / "file").write_text("")
    (row,) = doctor.path(tmp_path / "file", None)
    assert (row.found, row.verdict) == ("a file, not a folder", "mend") and "mkdir" not in row.remedy and str(tmp_path) in row.remedy
    with mock.patch.object(doctor, "filesystem", lambda _: "tmpfs"), mock.patch.object(doctor, "can_bypass_cache", lambda _: False):
        rows = list(doctor.path(tmp_path, lambda _: 0.1))
    assert [row.verdict for row in rows] == ["mend", "note", "note"]
    with mock.patch.object(doctor, "can_bypass_cache", mock.Mock(side_effect=PermissionError(13, "Permission denied"))):
        rows = list(doctor.path(tmp_path, None))
    assert rows[-1].verdict == "mend" and "Permission denied" in rows[-1].found
    assert doctor.filesystem(Path("/proc")) == "proc"


def test_a_gpu_and_its_settings() -> None:
    old = SimpleNamespace(name="Tesla T4", major=7, minor=5)
    patches = (
        mock.patch.object(torch.cuda, "is_available", lambda: True),
        mock.patch.object(torch.cuda, "device_count", lambda: 1),
        mock.patch.object(torch.cuda, "get_device_properties", lambda _: old),
        mock.patch.object(torch.cuda, "mem_get_info", lambda _: (10 * GIB, 15 * GIB)),
        mock.patch.dict(os.environ, {"TRITON_INTERPRET": "1"}),
    )
    with patches[0], patches[1], patches[2], patches[3], patches[4]:
        rows = [*doctor.devices(), *doctor.environment()]
    assert "Tesla T4" in named(rows, "GPU 0").found and "fp16" in named(rows, "GPU 0").remedy
    assert named(rows, "TRITON_INTERPRET").verdict == "mend"


@pytest.mark.device_only
def test_each_gpu_is_named_with_its_memory() -> None:
    rows = examine()
    for index in range(torch.cuda.device_count()):
        row = named(rows, f"GPU {index}")
        assert row.part == "devices" and torch.cuda.get_device_name(index) in row.found and " free" in row.found
    assert f"torch is built for CUDA {torch.version.cuda}" in named(rows, "driver").found
    assert named(rows, "PYTORCH_CUDA_ALLOC_CONF").verdict == "note"


def test_the_command_prints_rows_or_json_and_its_exit_code_says_whether_all_is_well(tmp_path: Path) -> None:
    with mock.patch.object(measure, "measure_disk", lambda _: 3.0):
        done = CliRunner().invoke(app, ["doctor", "--path", str(tmp_path), "--json"])
        rows = json.loads(done.output)
        assert named([Finding(**row) for row in rows], "reads and writes").found == "3.00 GB/s"
        assert done.exit_code == int(any(row["verdict"] == "mend" for row in rows))
        done = CliRunner().invoke(app, ["doctor", "--path", str(tmp_path / "none")])
    assert done.exit_code == 1 and "mkdir -p" in done.output and torch.__version__ in done.output
