"""A rank's threads and buffers on the node of its device: on a made-up machine, and by the kernel's own calls on node 0 of this one."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

import zk
from tests.models import GPT, batch, loss_of
from zk import numa
from zk.core import memory
from zk.numa import Binding
from zk.offload import cpu_adam
from zk.offload.cpu_adam import CPUAdam, default_threads
from zk.offload.nvme import Engine
from zk.offload.worker import Worker
from zk.tools import doctor

CORES = {0: "0-3,8-11\n", 1: "4-7,12-15\n", 2: "\n"}  # the last one is memory alone
GPUS = {1: 0, 2: 1, 3: -1, 4: 7}  # bus -> node


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    """A machine of two nodes with cores, and four GPUs."""
    for node, cores in CORES.items():
        (tmp_path / f"devices/system/node/node{node}").mkdir(parents=True)
        (tmp_path / f"devices/system/node/node{node}/cpulist").write_text(cores)
    for bus, node in GPUS.items():
        (tmp_path / f"bus/pci/devices/0000:{bus:02x}:00.0").mkdir(parents=True)
        (tmp_path / f"bus/pci/devices/0000:{bus:02x}:00.0/numa_node").write_text(f"{node}\n")
    return tmp_path


@pytest.fixture
def on_two_nodes(sysfs: Path) -> Iterator[mock.Mock]:
    """This machine pretends to be that one; what is given says which cores a process may run on, by its number."""
    affinity = mock.Mock(side_effect=lambda process: set(range(16)))
    cuda = {
        "is_available": lambda: True,
        "device_count": lambda: len(GPUS),
        "get_device_properties": lambda index: SimpleNamespace(pci_domain_id=0, pci_bus_id=index + 1, pci_device_id=0),
    }
    cores = mock.patch.object(os, "sched_getaffinity", affinity)
    with mock.patch.object(numa, "SYSFS", sysfs), cores, unbound(), mock.patch.multiple(torch.cuda, **cuda):
        yield affinity


def unbound() -> Any:
    """Context: no launcher has said anything."""
    clean = {name: value for name, value in os.environ.items() if name not in (*numa._OPENMP, "LOCAL_RANK", "LOCAL_WORLD_SIZE")}
    return mock.patch.dict(os.environ, clean, clear=True)


def found(index: int) -> Binding | None:
    return numa.find(torch.device("cuda", index))


FIRST, SECOND = (frozenset((*range(start, start + 4), *range(start + 8, start + 12))) for start in (0, 4))


def test_a_rank_gets_the_node_of_its_device_and_a_share_of_its_cores(on_two_nodes: mock.Mock) -> None:
    assert found(0) == Binding(0, 2, FIRST, 1) and found(1) == Binding(1, 2, SECOND, 1)
    assert found(1).num_threads == 8  # type: ignore[union-attr]
    assert found(2) is None and found(3) is None, "a node that is not known, and one that there is not"
    assert numa.find(torch.device("cpu")) is None
    places = SimpleNamespace(pci_domain_id=0, pci_bus_id=9, pci_device_id=0)
    with mock.patch.object(torch.cuda, "get_device_properties", lambda index: places):
        assert found(0) is None, "a device that is not in the system's table"
    for rank, bound in (("0", Binding(0, 2, FIRST, 1)), ("1", Binding(1, 2, SECOND, 1))):
        with mock.patch.dict(os.environ, {"LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": "4"}):  # of four devices one is on each node
            assert found(int(rank)) == bound
    with mock.patch.dict(os.environ, {"LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "5"}):  # each rank sees its device alone
        assert found(0) == Binding(0, 2, FIRST, 3) and found(0).num_threads == 2  # type: ignore[union-attr]


def test_what_the_launcher_has_chosen_stays(on_two_nodes: mock.Mock, sysfs: Path) -> None:
    on_two_nodes.side_effect = lambda process: {4, 5} if process == 0 else set(range(16))
    assert found(0) is None and found(1) is None, "bound to a node, be it another one"
    for ranks, threads in ((1, 2), (8, 2), (16, 1)):
        with mock.patch.dict(os.environ, {"LOCAL_WORLD_SIZE": str(ranks)}):
            assert default_threads() == threads, "of sixteen cores of all ranks, two of which are this one's"
    on_two_nodes.side_effect = lambda process: {3, 4, 5}
    assert found(1) == Binding(1, 2, frozenset({4, 5}), 1), "what a container leaves of the node"
    with mock.patch.dict(os.environ, {"LOCAL_WORLD_SIZE": "2"}):
        assert default_threads() == 1
    for name, value, chosen in (("OMP_PROC_BIND", "close", True), ("OMP_PROC_BIND", "FALSE", False), ("GOMP_CPU_AFFINITY", "0-3", True)):
        with mock.patch.dict(os.environ, {name: value}):
            assert (found(1) is None) == chosen, name
    libc = mock.Mock()
    libc.syscall.side_effect = lambda number, mode, *rest: setattr(mode._obj, "value", 3) or 0  # interleaved
    with mock.patch.object(numa, "_libc", lambda: libc):
        assert found(1) is None
    (sysfs / "devices/system/node/node0/cpulist").write_text("\n")
    assert found(1) is None, "one node with cores"


def test_the_doctor_names_nodes_and_what_keeps_a_rank_from_its_own(on_two_nodes: mock.Mock, sysfs: Path) -> None:
    with mock.patch.object(numa, "place", return_value="mbind to node 0: Operation not permitted; a container needs docker run --cap-add SYS_NICE"):
        rows = list(doctor.numa_nodes())
    assert rows[0].found == "2, GPU 0 on node 0, GPU 1 on node 1, of GPU 2 not known, of GPU 3 not known" and rows[0].verdict == "note"
    assert [(row.what, row.verdict) for row in rows[1:]] == [("memory of node 0", "mend"), ("memory of node 1", "mend")]
    assert all("--cap-add SYS_NICE" in row.remedy for row in rows[1:])
    on_two_nodes.side_effect = lambda process: {4, 5}
    assert "has been bound to cores of node 1, and stays so" in next(doctor.numa_nodes()).found
    with mock.patch.object(torch.cuda, "is_available", lambda: False):
        assert "where the launcher puts them" in next(doctor.numa_nodes()).found
    (sysfs / "devices/system/node/node1/cpulist").write_text("\n")
    assert next(doctor.numa_nodes()).found == "one: nothing to bind"


# ---- the kernel's own calls ------------------------------------------------------------------------------------------------------


@pytest.fixture
def core() -> Iterator[int]:
    """zk's threads are bound to one core of this machine, and its memory to node 0."""
    last = max(os.sched_getaffinity(0))
    early = Worker("zk early")
    early.submit(lambda: None).wait()
    numa.bind(Binding(0, 2, frozenset({last}), 1))
    assert early.thread is not None and os.sched_getaffinity(early.thread.native_id or 0) == {last}, "a thread that was there already"
    early.close()
    yield last
    numa.bind(None)


def affinities() -> dict[int, set[int]]:
    """The cores of each thread of this process."""
    return {int(task): os.sched_getaffinity(int(task)) for task in os.listdir("/proc/self/task")}


def policy_of(address: int) -> tuple[int, int]:
    """The kernel's policy for a page, and the first nodes that it names."""
    mode, mask = ctypes.c_int(-1), (ctypes.c_ulong * 16)()
    of_address = ctypes.c_void_p(address), ctypes.c_ulong(2)  # MPOL_F_ADDR
    assert not numa._libc().syscall(numa._GET_MEMPOLICY, ctypes.byref(mode), mask, ctypes.c_ulong(1024), *of_address)
    return mode.value, mask[0]


def test_threads_of_zk_are_on_the_node_and_those_of_the_user_are_not(core: int) -> None:
    torch.ones(1 << 22).sum()  # torch's own threads
    mine, before = os.sched_getaffinity(0), affinities()
    seen = list[set[int]]()
    worker, engine = Worker("zk test"), Engine(num_threads=1)
    worker.submit(lambda: seen.append(os.sched_getaffinity(0))).wait()
    assert seen == [{core}] and os.sched_getaffinity(engine.threads[0].native_id or 0) == {core}
    worker.close()
    engine.close()
    results = []
    for bound in (True, False):
        if not bound:
            numa.bind(None)
        torch.manual_seed(0)
        param = torch.nn.Parameter(torch.randn(100_000))
        adam = CPUAdam([param], num_threads=2)
        param.grad = torch.randn(100_000)
        adam.step()
        results.append((param.detach().clone(), cpu_adam.sum_of_squares(param.grad, 2)))
        if bound and cpu_adam.default_engine() == "numba":
            assert "zk cores" in {thread.name for thread in threading.enumerate()}
            assert {tuple(cores) for task, cores in affinities().items() if task not in before} == {(core,)}, "numba's threads as well"
    assert torch.equal(results[0][0], results[1][0]) and results[0][1] == results[1][1]
    assert os.sched_getaffinity(0) == mine, "what DataLoader workers inherit"


def test_memory_is_on_the_node_unless_the_system_refuses(core: int, caplog: pytest.LogCaptureFixture) -> None:
    page = memory.aligned(4096)
    if "SYS_NICE" in (reason := numa.place(page.data_ptr(), 4096, 0)):
        pytest.skip(reason)
    host = torch.device("cpu")
    for tensor in (page, memory.staging(1 << 22), memory.zeros(5000, torch.float32, host), memory.Lease(4096, torch.bfloat16, host).tensor):
        assert policy_of(tensor.data_ptr()) == (1, 1)
    numa.bind(Binding(900, 901, frozenset({core}), 1))
    numa._say.cache_clear()
    for _ in range(2):
        assert memory.staging(4096).sum() == 0
    said = [record.message for record in caplog.records if "host memory is where the system puts it: mbind to node 900" in record.message]
    assert len(said) == 1
    numa.bind(None)
    page = memory.staging(4096)
    assert policy_of(page.data_ptr())[0] == 0


@pytest.mark.device_only
def test_an_optimizer_binds_its_rank_and_says_so(sysfs: Path) -> None:
    mine = sorted(os.sched_getaffinity(0))
    if len(mine) < 2:
        pytest.skip("one core is on one node")
    for node, cores in enumerate((mine[:1], mine[1:])):
        (sysfs / f"devices/system/node/node{node}/cpulist").write_text(",".join(map(str, cores)))
    (sysfs / "bus/pci/devices/0000:01:00.0/numa_node").write_text("1\n")
    losses = []
    for root in (sysfs, sysfs / "nothing"):
        with mock.patch.object(numa, "SYSFS", root), unbound():
            torch.manual_seed(0)
            model = GPT()
            with zk.ZeroOptimizer(model, torch.optim.AdamW(model.parameters()), optimizer_tier="host", overlap_step=True) as optimizer:
                text = f"threads and host memory are on NUMA node 1 of 2, the GPU's: {len(mine) - 1} cores"
                assert (text in optimizer.summary().text()) == (root == sysfs) == (numa.bound is not None)
                assert optimizer.num_threads == len(mine) - (root == sysfs)
                for step in range(2):
                    loss = loss_of(model, batch(step))
                    optimizer.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
                assert optimizer.worker.thread is not None
                assert os.sched_getaffinity(optimizer.worker.thread.native_id or 0) == set(mine[root == sysfs :])
                losses.append(float(loss.detach()))
    assert losses[0] == losses[1] and sorted(os.sched_getaffinity(0)) == mine
