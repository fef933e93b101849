"""Files through zk.offload.file against plain Python files and torch.save, 1 GiB. `make bench`.

``gbps`` is bytes of the file per second. The folder is $ZK_BENCH_NVME, or runs/nvme.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import SMALL
from torch import Tensor

from zk.memory import aligned
from zk.offload.file import File

NBYTES = 1 << 20 if SMALL else 1 << 30


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    path = Path(os.environ.get("ZK_BENCH_NVME", "runs/nvme"))
    path.mkdir(parents=True, exist_ok=True)
    yield path
    for file in FILES.values():
        file.close()
    FILES.clear()
    for name in ("zk-bench-io.raw",):
        (path / name).unlink(missing_ok=True)


FILES: dict[Path, File] = {}


def zk_write(folder: Path, data: Tensor) -> None:
    if folder not in FILES:
        FILES[folder] = File([folder], NBYTES)
    FILES[folder].write_async(data).wait()


def zk_read(folder: Path, data: Tensor) -> None:
    FILES[folder].read_async(data).wait()


def python_write(folder: Path, data: Tensor) -> None:
    with open(folder / "zk-bench-io.raw", "wb", buffering=0) as file:
        file.write(data.numpy().data)
        os.fsync(file.fileno())


def python_read(folder: Path, data: Tensor) -> None:
    with open(folder / "zk-bench-io.raw", "rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, NBYTES, os.POSIX_FADV_DONTNEED)  # from the drive, as a model larger than memory would be
        assert file.readinto(data.numpy().data) == NBYTES


SYSTEMS: dict[str, tuple[Callable[[Path, Tensor], None], Callable[[Path, Tensor], None]]] = {
    "zk_file": (zk_write, zk_read),
    "python_file": (python_write, python_read),
}


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("direction", ("write", "read"))
def test_io(system: str, direction: str, folder: Path, benchmark: Any) -> None:
    benchmark.group = f"{direction} {NBYTES >> 20} MiB"
    write, read = SYSTEMS[system]
    data = aligned(NBYTES)
    data.copy_(torch.arange(256, dtype=torch.uint8).repeat(NBYTES // 256))
    write(folder, data)
    back = aligned(NBYTES)
    read(folder, back)
    assert torch.equal(back, data)
    benchmark.pedantic(lambda: (write if direction == "write" else read)(folder, back), rounds=1 if SMALL else 5, warmup_rounds=1)
    benchmark.extra_info["gbps"] = round(NBYTES / benchmark.stats.stats.median / 1e9, 2)
