"""Host memory and the drive under ZeroOptimizer: what is written and read, what a bad drive does, what stays; memory that is used again."""

import copy
import gc
import mmap
import os
import random
import time
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
import torch
from torch import Tensor, nn

import zk
from tests.core.test_files import Faults, faults  # noqa: F401
from tests.models import DEVICE, small_chunks
from tests.programs import run
from zk import memory
from zk.offload.drive import Drive, FileChunk
from zk.offload.file import File
from zk.offload.tiers import CPU

pytestmark = pytest.mark.usefixtures("torch_engine")


@pytest.fixture
def late(faults: Faults, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """Transfers take their time, each another one, into memory that holds no value until then."""
    read, faults.is_late = File.read_async, True
    monkeypatch.setattr(File, "read_async", lambda self, tensor, offset=0: read(self, tensor.fill_(255), offset))


class Blocks(nn.Module):
    def __init__(self, count: int = 6, width: int = 48) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(count))
        self.skip: set[int] = set()

    def forward(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            if index not in self.skip:
                x = x + torch.tanh(block(x))
        return x


def held(model: nn.Module, path: Path, tier: str = "nvme", **options: Any) -> zk.ZeroOptimizer:
    options = {"stage": 3, "dtype": "bf16", "param_tier": tier, "optimizer_tier": tier, "nvme_path": path if tier == "nvme" else None, **options}
    return zk.ZeroOptimizer(model, torch.optim.AdamW(model.parameters(), lr=1e-2), **options)


def step(model: nn.Module, optimizer: zk.ZeroOptimizer, seed: int = 0, micro_batches: int = 1) -> float:
    for number in range(micro_batches):
        x = torch.randn(4, 48, generator=torch.Generator().manual_seed(10 * seed + number)).to(DEVICE, torch.bfloat16)
        loss = model(x).float().square().mean()
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def drive_of(optimizer: Any) -> Drive:
    return optimizer._layout.tiers["nvme"]  # type: ignore[no-any-return]


def moved(drive: Drive, model: nn.Module, optimizer: zk.ZeroOptimizer, **options: int) -> tuple[float, float]:
    """Bytes read and written in a step, for each parameter."""
    before = drive.file.read_nbytes, drive.file.written_nbytes
    step(model, optimizer, 7, **options)
    count = sum(param.numel() for param in model.parameters())
    return (drive.file.read_nbytes - before[0]) / count, (drive.file.written_nbytes - before[1]) / count


# ---- what is read and written ------------------------------------------------------------------------------------------------------------
def test_without_a_budget_all_is_read_and_written_once_in_each_use(tmp_path: Path) -> None:
    model = Blocks(24, 192)
    optimizer = held(model, tmp_path)
    model.forward = lambda x: Blocks.forward(model, nn.functional.pad(x, (0, 144)))  # type: ignore[method-assign]
    step(model, optimizer)
    read, written = moved(drive_of(optimizer), model, optimizer)
    # parameters in forward, backward and update; gradients in 16 bits; masters and moments
    assert 0.7 * (3 * 2 + 2 + 10) < read < 1.1 * (3 * 2 + 2 + 10)
    assert 0.95 * (2 + 2 + 10) < written < 1.1 * (2 + 2 + 10)
    _, with_sums = moved(drive_of(optimizer), model, optimizer, micro_batches=2)
    assert 0.95 * 4 < with_sums - written < 1.1 * 4  # the sum of two is in fp32, and is written once more
    assert drive_of(optimizer).used.total() <= drive_of(optimizer).room.total()
    optimizer.close()


@small_chunks()
def test_the_drive_reads_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Blocks()
    optimizer = held(model, tmp_path)
    step(model, optimizer)
    reads, read = {True: 0, False: 0}, FileChunk.read

    def counted(chunk: FileChunk, must: bool) -> bool:
        was_here, is_here = chunk.buffer is not None, read(chunk, must)
        reads[must] += is_here and not was_here
        return is_here

    monkeypatch.setattr(FileChunk, "read", counted)
    step(model, optimizer)
    assert reads[False] > 9 * reads[True]


def test_a_read_ahead_does_not_reach_what_comes_after_it_and_what_is_open_stays(late: None, faults: Faults, tmp_path: Path) -> None:  # noqa: F811
    descriptors, write = os.listdir("/proc/self/fd"), faults.pwritev
    faults.pwritev = lambda *given: (time.sleep(faults.random.random() * 2e-2), write(*given))[1]  # type: ignore[method-assign]
    drive = Drive([str(tmp_path)], CPU)
    chunk, *_, other = chunks = drive.chunks({"grad": torch.float32}, [1 << 16] * 6)
    evict = lambda: [other.open() and other.close(changed=False) for other in chunks[1:]]  # noqa: E731
    for value in range(16):
        chunk.put("grad", torch.full((1 << 16,), float(value)))
        for _ in range(value % 2 * 2):  # as it was put, and as it was written
            assert chunk.open()["grad"].eq(value).all()
            chunk.close(changed=False)
            evict()
            time.sleep(3e-2)  # until a write that nobody waits for has ended, too
        chunk.drop()
        chunk.fetch()
    for value in range(4, 7):
        chunk.drop()
        chunk.fetch()
        chunk.drop()  # its buffer is free
        other.put("grad", torch.full((1 << 16,), float(value)))
        assert other.open()["grad"].eq(value).all()
        other.close(changed=False)
        other.drop()
    chunk.open()["grad"].fill_(8)  # others take the buffers of those that are not in use
    evict()
    chunk.close(changed=True)
    evict()
    assert chunk.open()["grad"].eq(8).all()
    [chunk.close(changed=False) for _ in range(chunk.opened)] and evict()
    with mock.patch.object(drive.file, "read_async", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        chunk.fetch()
    assert chunk.open()["grad"].eq(8).all()  # and not what was in the buffer
    assert len([one.open()["grad"] for one in chunks]) == len(drive.cached) == 6  # more than there is room for, as all are in use
    assert [chunk.close(changed=False) for _ in range(2)] and chunk.load("grad", CPU, Tensor.sum).wait() == 8 << 16 and chunk not in drive.cached
    drive.close()
    assert os.listdir("/proc/self/fd") == descriptors


@small_chunks()
def test_what_fits_stays_and_is_never_written(tmp_path: Path) -> None:
    losses, moves = [], []
    every: list[tuple[Any, Any]] = [(None, ({"nvme"}, {"nvme"})), (450_000, ({"host"}, {"host", "nvme"})), ("1GiB", ({"host"}, {"host"}))]
    for budget, wanted in every:
        torch.manual_seed(0)
        model = Blocks(24)
        optimizer = held(model, tmp_path, host_budget=budget)
        losses.append([step(model, optimizer, seed) for seed in range(3)])
        if "nvme" in optimizer._layout.tiers:
            moves.append(moved(drive_of(optimizer), model, optimizer))
        params, states = ({getattr(place, what) for place in optimizer._layout.places.values()} for what in ("param", "state"))
        assert (params, states) == wanted
        optimizer.close()
    assert losses[1:] == losses[:1] * 2 and len(moves) == 2
    assert moves[1][0] < moves[0][0] - 4 and moves[1][1] < moves[0][1] - 1.5


# ---- any order gives the bits of host memory ------------------------------------------------------------------------------------------------
def walk(seed: int, tier: str, path: Path, **options: Any) -> list[float]:
    """Steps, micro-batches, writes, loads, evaluations, single blocks, skipped blocks, dropped gradients, in any order: what is seen of them."""
    choices = random.Random(seed)
    torch.manual_seed(0)
    model, out, saved = Blocks().to(DEVICE), list[float](), None
    x = torch.ones(2, 48, device=DEVICE, dtype=torch.bfloat16)
    optimizer = held(model, path, tier, **{"prefetch": choices.choice((0, 1, 3)), "overlap_step": seed % 3 == 2, **options})
    for number in range(20):
        what = choices.choice(("step", "step", "sum", "halve", "save", "load", "drop", "validate", "block", "skip", "clip"))
        if what in ("step", "sum"):
            out.append(step(model, optimizer, number, 1 + 2 * (what == "sum")))
        elif what == "halve":
            with zk.gather(model.parameters(), write=True), torch.no_grad():
                for param in model.parameters():
                    param.mul_(0.5)
        elif what == "save":
            saved = copy.deepcopy(optimizer.state_dict())
        elif what == "load" and saved is not None:
            optimizer.load_state_dict(saved)
        elif what == "skip":
            model.skip = set(choices.sample(range(6), choices.randrange(5)))
        elif what in ("drop", "clip"):
            model(x).float().sum().backward()
            if what == "clip":
                out.append(float(optimizer.clip_grad_norm_(1.0)))
                optimizer.step()
            optimizer.zero_grad()
        elif what in ("validate", "block"):
            with torch.no_grad():
                out.append((model if what == "validate" else model.blocks[choices.randrange(6)])(x).float().sum().item())
    if "nvme" in optimizer._layout.tiers:
        assert drive_of(optimizer).used <= drive_of(optimizer).room
    optimizer.close()
    return out


@small_chunks()
def test_any_order_of_what_a_user_does_gives_the_same_bits(late: None, tmp_path: Path) -> None:
    """Also of those that a budget keeps, and over two folders; overlapped."""
    seed = 2
    want, folders = walk(seed, "host", tmp_path), [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    assert walk(seed, "nvme", tmp_path, nvme_path=folders) == want and walk(seed, "nvme", tmp_path, host_budget=150_000) == want
    assert [os.listdir(folder) for folder in folders] == [[], []]


# ---- memory -------------------------------------------------------------------------------------------------------------------------------------
def test_memory_is_used_again_once_its_last_view_is_gone_and_large_memory_has_large_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()
    memory.trim()
    first = memory.empty(50_000, torch.float32, CPU)
    view, address = first[10:20], first.data_ptr()
    assert address % 4096 == memory.zeros(4096, torch.uint8, CPU).data_ptr() % 4096 == 0
    del first
    assert memory.empty(50_000, torch.float32, CPU).data_ptr() != address  # somebody has a view of it
    del view
    assert memory.empty(100_000, torch.bfloat16, CPU).data_ptr() == address  # of the same bytes, whatever they are
    advised = list[int]()
    note = {"madvise": lambda region, what: advised.append(len(region) * (what == mmap.MADV_HUGEPAGE))}
    monkeypatch.setattr(memory.mmap, "mmap", type("Region", (mmap.mmap,), note))
    assert not any(memory.aligned(nbytes).any() for nbytes in (memory.HUGE - 1, memory.HUGE)) and max(advised) == sum(advised) == memory.HUGE


def test_host_memory_is_not_copied_by_a_fork_and_reading_it_there_ends() -> None:
    program = (
        "import os, signal, torch\nfrom zk.memory import aligned, zeros\n"
        "x, y = zeros(1 << 20, torch.float32, torch.device('cpu')).fill_(1), torch.ones(3)\n"
        "if os.fork() == 0:\n    assert y.sum() == 3\n    x.sum()\n    os._exit(0)\n"
        "print(os.waitstatus_to_exitcode(os.wait()[1]), x.sum().item())\n"
    )
    assert run("-c", program).stdout.split() == ["-11", str(float(1 << 20))]


def test_a_limit_of_a_container_is_the_memory_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    total, free = memory.host_memory()
    folder = tmp_path / "job/step"
    folder.mkdir(parents=True)
    (folder / "memory.max").write_text("max\n")  # its own has none, the one above has
    (folder.parent / "memory.max").write_text(f"{50 << 20}\n")
    for where in (folder, folder.parent):
        (where / "memory.current").write_text(f"{30 << 20}\n")
        (where / "memory.stat").write_text(f"anon 7\ninactive_file {5 << 20}\nactive_file {1 << 20}\nactive_files 9\n")
    (tmp_path / "own").write_text("4:cpu:/job\n0::/job/step\n")
    monkeypatch.setattr(memory, "CGROUPS", tmp_path)
    monkeypatch.setattr(memory, "OWN_CGROUPS", tmp_path / "own")
    assert memory.host_memory() == (50 << 20, 26 << 20) and total > 50 << 20 and free > 26 << 20
    (tmp_path / "own").write_text("4:cpu:/job\n")
    assert memory.host_memory()[0] == psutil.virtual_memory().total
