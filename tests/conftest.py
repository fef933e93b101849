"""Set before anything imports triton or numba: kernels are interpreted where no GPU is, and the machine's launcher variables do not leak in."""

import gc
import os
import signal
import sys
from collections.abc import Iterator

import pytest

import tests.threads  # isort: skip  # noqa: F401 (before OpenMP is loaded)
import torch

from tests.device_files import WHOLE

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a script's shell has it for what it starts in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)  # so that tests of Ctrl-C, and the programs that they start, hear it
os.environ.setdefault("ZK_QUIET", "1")  # no summary of each optimizer, and no drive measured for it
collect_ignore: list[str] = []
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    collect_ignore += WHOLE  # `make test` runs them on devices that are software
for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
    os.environ.pop(name, None)

# The files that take longest come first: none of them is left to one process at the end.
LONGEST = (
    *("test_parity", "test_ranks", "test_backward", "test_kernels", "test_device", "test_lightning", "test_update_on", "test_benchmarks_gpu"),
    *("test_huggingface", "test_programs", "test_parked", "test_accumulation", "test_train", "test_checkpoint", "test_experts", "test_cpu_adam"),
)


def pytest_configure(config: pytest.Config) -> None:
    config.option.loadscopereorder = False  # xdist's own order, by the number of tests
    if config.getoption("numprocesses", None) and "TRITON_INTERPRET" in os.environ:  # there is no GPU, with which no process can be forked
        import execnet.gateway_io

        from tests.workers import Worker

        execnet.gateway_io.Popen2IOMaster = Worker


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out, without a GPU, what is for one; begin with the longest files."""
    if not torch.cuda.is_available():
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("device_only")])
        items[:] = [item for item in items if not item.get_closest_marker("device_only")]
    items.sort(key=lambda item: LONGEST.index(item.path.stem) if item.path.stem in LONGEST else len(LONGEST))


def pytest_collection_finish() -> None:
    """Take what is imported out of the collector's sight, before any test: half a second for each ``gc.collect()``."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def engine_found_anew() -> Iterator[None]:
    """The engine of the CPU update is chosen once in a process: the next test chooses anew. Set up before all others, it ends after them."""
    yield
    if cpu_adam := sys.modules.get("zk.offload.cpu_adam"):
        cpu_adam.default_engine.cache_clear()


@pytest.fixture
def torch_engine() -> Iterator[None]:
    """The CPU update whose bits are torch.optim's."""
    from zk.offload.cpu_adam import default_engine

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ZK_CPU_ADAM", "torch")
        default_engine.cache_clear()
        yield
    default_engine.cache_clear()  # only now: a thread that still updates must not find the setting again


def pytest_unconfigure() -> None:
    gc.unfreeze()  # C extensions look at the end whether all of theirs is gone
