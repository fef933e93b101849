"""Set before anything imports triton or numba: kernels are interpreted where no GPU is, and the machine's launcher variables do not leak in.

Where tests run in several processes (`make test`), torch in each of them, and in the programs that they start, gets its part of the cores.
"""

import os
from collections.abc import Iterator

import pytest

if "PYTEST_XDIST_WORKER_COUNT" in os.environ:  # before OpenMP is loaded, which reads these once
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"]))))
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # threads without work sleep: spinning, they take the core of another process

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
    os.environ.pop(name, None)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """torch computes with one thread: several sum in another order, and for tiny tensors wait for each other on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def torch_engine() -> Iterator[None]:
    """The CPU update whose bits are torch.optim's."""
    from zk.offload.cpu_adam import default_engine

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ZK_CPU_ADAM", "torch")
        default_engine.cache_clear()
        yield
    default_engine.cache_clear()  # only now: a thread that still updates must not find the setting again
