"""Host memory as this process may use it."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import psutil
import pytest
import torch

from zk import ZeroConfig
from zk.core import fit, memory
from zk.core.fit import free_memory
from zk.core.memory import free_addresses, free_swap, host_memory, ranks_here
from zk.offload.tiers import Needs, free_nbytes, place, rooms

GIB = 1 << 30


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Path]:
    """A machine of 64 GiB, 40 of them free, with control groups in a folder."""
    virtual = mock.Mock(total=64 * GIB, available=40 * GIB)
    patches = (
        mock.patch.object(psutil, "virtual_memory", lambda: virtual),
        mock.patch.object(memory, "_CGROUPS", tmp_path / "cgroup"),
        mock.patch.object(memory, "_OWN_CGROUPS", tmp_path / "own"),
    )
    with patches[0], patches[1], patches[2]:
        yield tmp_path


def test_without_limits_it_is_the_machines(machine: Path) -> None:
    assert host_memory() == (64 * GIB, 40 * GIB)
    (machine / "own").write_text("0::/user.slice\n")
    write(machine / "cgroup" / "user.slice", memory__max="max\n", memory__current="5\n", memory__stat="inactive_file 1\n")
    assert host_memory() == (64 * GIB, 40 * GIB)


def test_the_smallest_limit_on_the_way_to_the_root_counts(machine: Path) -> None:
    (machine / "own").write_text("0::/pod/container\n")
    stat = f"anon 1\ninactive_file {GIB - 4096}\nactive_file 4096\nfile 3\n"
    write(machine / "cgroup" / "pod", memory__max=str(16 * GIB), memory__current=str(10 * GIB), memory__stat=stat)
    write(machine / "cgroup" / "pod" / "container", memory__max=str(20 * GIB), memory__current=str(4 * GIB), memory__stat=stat)
    assert host_memory() == (16 * GIB, 7 * GIB)
    assert free_nbytes(torch.device("cpu")) == 7 * GIB


def test_version_1_of_control_groups(machine: Path) -> None:
    (machine / "own").write_text("4:cpu,cpuacct:/x\n3:memory:/job\n0::/\n")
    stat = f"total_inactive_file {2 * GIB}\n"
    write(machine / "cgroup" / "memory" / "job", memory__limit_in_bytes=str(8 * GIB), memory__usage_in_bytes=str(9 * GIB), memory__stat=stat)
    write(machine / "cgroup" / "memory", memory__limit_in_bytes=str(2**63 - 4096), memory__usage_in_bytes="0", memory__stat="")
    assert host_memory() == (8 * GIB, 1 * GIB)


def test_files_that_say_nothing_are_passed_over(machine: Path) -> None:
    (machine / "own").write_text("0::/odd\n")
    write(machine / "cgroup" / "odd", memory__max="a lot", memory__current="5", memory__stat="")
    assert host_memory() == (64 * GIB, 40 * GIB)


def test_free_swap_is_the_machines_or_less_in_a_container(machine: Path) -> None:
    with mock.patch.object(psutil, "swap_memory", lambda: mock.Mock(free=6 * GIB)):
        assert free_swap() == 6 * GIB
        (machine / "own").write_text("0::/pod/container\n")
        write(machine / "cgroup" / "pod", memory__swap__max="max\n")
        assert free_swap() == 6 * GIB
        write(machine / "cgroup" / "pod" / "container", memory__swap__max=str(4 * GIB), memory__swap__current=str(GIB))
        assert free_swap() == 3 * GIB
        write(machine / "cgroup" / "pod", memory__swap__max="0\n", memory__swap__current="0\n")
        assert free_swap() == 0


def test_ranks_of_a_machine_count_on_their_share_of_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    monkeypatch.setattr("zk.offload.tiers.free_nbytes", lambda device: 10_000_000)
    need = [Needs(param_nbytes=0, numel=1_000_000, element_nbytes=8)]
    config = ZeroConfig(optimizer_tier="auto")
    for ranks, elements in ((1, 1_000_000), (4, 10_000_000 * 0.9 / 4 / 8)):
        parts = dict(place(config, need, cpu, 0, rooms(config, cpu, ranks))[0][1])
        assert parts.get("device", 0) + parts.get("host", 0) == pytest.approx(elements, abs=2 * 2048)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert (ranks_here(16), ranks_here(1)) == (8, 1)


def test_a_limit_of_addresses_counts_less_what_the_process_has(machine: Path) -> None:
    limit = {resource.RLIMIT_AS: 8 * GIB}
    assert free_addresses() > 64 * GIB or resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY
    with mock.patch.object(resource, "getrlimit", lambda which: (limit.get(which, resource.RLIM_INFINITY),) * 2):
        with mock.patch.object(psutil.Process, "memory_info", lambda process: mock.Mock(vms=5 * GIB)):
            assert host_memory() == (8 * GIB, 3 * GIB)
            with mock.patch.object(psutil, "swap_memory", lambda: mock.Mock(free=6 * GIB)):
                assert free_memory(torch.device("cpu"), True, []) == {"host": 3 * GIB}  # swap needs addresses too
            limit[resource.RLIMIT_AS] = 4 * GIB
            assert host_memory() == (4 * GIB, 0)
        taken = psutil.Process().memory_info().vms
        limit[resource.RLIMIT_AS] = taken + GIB
        assert free_addresses() == pytest.approx(GIB, abs=64 << 20)


def test_room_on_drives_is_counted_once_for_each_file_system(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
    both, cpu = [str(tmp_path / name) for name in "ab"], torch.device("cpu")
    room = {"f_bavail": 10, "f_bfree": 10, "f_frsize": 1 << 20}
    with mock.patch.object(os, "statvfs", lambda _: mock.Mock(**room)):
        assert free_memory(cpu, True, both[:1])["nvme"] == 10 << 20
        assert free_memory(cpu, True, both)["nvme"] == 10 << 20  # two stripes on one drive
    assert free_memory(cpu, True, [str(tmp_path / "not there")]).keys() == {"host"}
    swap = mock.patch.object(psutil, "swap_memory", lambda: mock.Mock(free=GIB))
    with swap, mock.patch.object(fit, "host_memory", lambda: (0, 5)):
        assert free_memory(cpu, True, []) == {"host": GIB + 5}
