"""Blocks of page-locked memory never overlap, come back once their copies are over, and cost no more than their sum.

Runs on the software GPU, which knows what is page-locked.
"""

from __future__ import annotations

import dataclasses
import gc
import logging
import re
import resource
import weakref
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import softgpu
from tests.models import DEVICE
from tests.softgpu import memory
from zk.core.events import COMPLETED
from zk.next import memory as next_memory
from zk.offload.nvme import round_up
from zk.offload.pinned import Arena, Record
from zk.offload.stash import POOLS
from zk.offload.streams import CudaLink, link_to

if not softgpu.installed():
    pytest.skip("for the software GPU (pytest -p tests.softgpu.plugin)", allow_module_level=True)

PAGE = 4096
Span = tuple[int, int]  # first and last + 1 address, whole pages


class Late:
    """An event that is over only once it has been waited for."""

    done = False

    def wait(self) -> None:
        self.done = True


@dataclasses.dataclass
class Busy:
    record: Record
    value: int
    event: Late | None = None

    @property
    def span(self) -> Span:
        start = self.record.tensor.data_ptr()
        return start, start + round_up(self.record.tensor.nbytes)

    def check(self) -> None:
        assert (self.record.tensor == self.value).all(), "somebody else has written here"


def locked() -> dict[int, int]:
    """Page-locked memory: address -> bytes."""
    return {start: stop - start for start, (stop, by) in memory._pinned.items() if by == "cudaHostRegister"}


def in_use(arena: Arena) -> int:
    """Bytes that are handed out and not released."""
    return arena.nbytes - sum(stop - start for start, stop in arena.spans(free=True))


@pytest.fixture(autouse=True)
def nothing_is_locked_at_first() -> None:
    for link, pool in POOLS.items():
        pool.trim(link, 0)  # what activations of other tests were copied to is kept for the next
    if locked():
        gc.collect()
        next_memory.trim()  # arenas of other tests that went round in a circle
    assert not locked()


def largest_hole(busy: list[Span]) -> int:
    """The most bytes in one piece that nobody has, in any region."""
    largest = 0
    for start, nbytes in locked().items():
        inside = sorted(span for span in busy if start <= span[0] < start + nbytes)
        ends = [start, *(stop for _, stop in inside)]
        largest = max([largest, *(begin - end for begin, end in zip([*(begin for begin, _ in inside), start + nbytes], ends, strict=True))])
    return largest


# acquire (elements, lasting), or release (which one, whether its event is late)
STEPS = st.lists(
    st.tuples(st.just("acquire"), st.integers(0, 5 * PAGE), st.booleans()) | st.tuples(st.just("release"), st.integers(0, 30), st.booleans()),
    max_size=50,
)


@settings(max_examples=150, deadline=None)
@given(STEPS, st.integers(0, 30))
def test_blocks_never_overlap_and_the_arena_grows_only_when_no_hole_is_large_enough(steps: list[tuple[str, int, bool]], pages: int) -> None:
    arena = Arena(link_to(DEVICE), pages * PAGE)
    live: list[Busy] = []
    released: list[Busy] = []
    for value, (verb, number, flag) in enumerate(steps, 1):
        if verb == "acquire":
            before = arena.nbytes
            largest = largest_hole([busy.span for busy in live]) if locked() else before
            new = Busy(arena.acquire(number, torch.uint8, lasting=flag), value)
            grown = round_up(number) if round_up(number) > largest else 0
            assert arena.nbytes == before + grown
            released = [busy for busy in released if busy.event is not None and not busy.event.done]
            for other in live + released:  # what is released is still being copied, until its event is done
                assert new.span[1] <= other.span[0] or other.span[1] <= new.span[0]
            new.record.tensor.fill_(value)
            live.append(new)
        elif live:
            gone = live.pop(number % len(live))
            gone.check()
            gone.event = Late() if flag else None
            gone.record.release(gone.event or COMPLETED)
            released.append(gone)
        assert in_use(arena) == sum(busy.span[1] - busy.span[0] for busy in live)
        assert sum(locked().values()) in (0, arena.nbytes)
    for busy in live:
        busy.check()
    arena.close()
    assert not locked() and all(busy.event is None or busy.event.done for busy in released if busy.record.tensor.numel())


def test_memory_under_a_copy_is_handed_out_once_the_copy_is_over() -> None:
    link = link_to(DEVICE)
    arena = Arena(link, PAGE)
    device = torch.zeros(PAGE // 4, device=DEVICE)
    first = arena.acquire(PAGE // 4, torch.float32)
    first.tensor.fill_(1.0)
    arrival = link.upload(device, first.tensor, [link.mark()])
    first.release(arrival)
    second = arena.acquire(PAGE // 4, torch.float32)
    second.tensor.fill_(2.0)
    link.follow(arrival)
    assert (device == 1.0).all() and arena.nbytes == PAGE


def test_tensors_are_page_aligned_and_have_storages_of_their_own() -> None:
    arena = Arena(link_to(DEVICE), 4 * PAGE + 1)
    assert arena.nbytes == 5 * PAGE and not locked(), "nothing is locked before the first acquire"
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.uint8):
        record = arena.acquire(7, dtype)
        assert record.tensor.shape == (7,) and record.tensor.dtype == dtype and record.tensor.data_ptr() % PAGE == 0
        assert record.tensor.untyped_storage().data_ptr() == record.tensor.data_ptr()  # a view saves and races as itself
    empty = arena.acquire(0, torch.float32)
    assert empty.tensor.shape == (0,) and in_use(arena) == 4 * PAGE
    empty.release()
    assert list(locked().values()) == [5 * PAGE]


@pytest.mark.parametrize(
    ("limit", "version", "remedy"),
    [
        (8 << 20, "Linux 6.8", r"RLIMIT_MEMLOCK is 8\.000 MiB; .*ulimit -l unlimited.*--ulimit memlock=-1"),
        (resource.RLIM_INFINITY, "Linux 6.8", r"RLIMIT_MEMLOCK is unlimited; free host memory"),
        (8 << 20, "Linux 5.15-Microsoft-WSL2", r"memory= .*\.wslconfig"),
    ],
)
def test_what_the_system_refuses_to_lock_is_said_once_and_used_pageable(
    limit: int, version: str, remedy: str, caplog: pytest.LogCaptureFixture
) -> None:
    arena = Arena(link_to(DEVICE), PAGE)
    with (
        softgpu.refuse_to_pin("cudaErrorMemoryAllocation: out of memory"),
        mock.patch.object(resource, "getrlimit", return_value=(limit, limit)),
        mock.patch.object(Path, "read_text", return_value=version),
        caplog.at_level(logging.WARNING, "zk"),
    ):
        records = [arena.acquire(PAGE, torch.uint8) for _ in range(3)]  # the region, and two more
    assert len(caplog.records) == 1 and not arena.is_pinned and arena.nbytes == 3 * PAGE
    message = caplog.records[0].getMessage()
    assert re.search(r"cudaErrorMemoryAllocation: out of memory.*" + remedy, message), message
    for value, record in enumerate(records):
        record.tensor.fill_(value)
    assert [int(record.tensor.sum()) for record in records] == [0, PAGE, 2 * PAGE]
    arena.close()  # unlocks nothing: CUDA would refuse


def test_close_waits_for_what_is_in_flight_and_then_unlocks_everything_once() -> None:
    arena, copied = Arena(link_to(DEVICE), PAGE), Late()
    kept, gone = arena.acquire(PAGE, torch.uint8), arena.acquire(PAGE, torch.uint8)  # two regions
    kept.tensor.fill_(7)
    assert sorted(locked().values()) == [PAGE, PAGE]

    unpin = CudaLink.unpin

    def checked(self: CudaLink, memory: torch.Tensor) -> None:
        assert copied.done, "the copy still runs"
        unpin(self, memory)

    gone.release(copied)
    with mock.patch.object(CudaLink, "unpin", checked):
        arena.close()
        arena.close()
    assert not locked() and arena.nbytes == 0
    late = weakref.ref(event := Late())
    kept.release(event)  # nobody will wait for it, so nobody keeps it
    del event
    assert late() is None and in_use(arena) == 0 and (kept.tensor == 7).all()


def test_a_wait_that_fails_raises_and_still_unlocks() -> None:
    class Broken(Late):
        def wait(self) -> None:
            raise OSError("the drive has gone")

    arena = Arena(link_to(DEVICE), PAGE)
    arena.acquire(PAGE, torch.uint8).release(Broken())
    for _ in range(2):
        with pytest.raises(OSError, match="gone"):
            arena.acquire(PAGE, torch.uint8)
    with pytest.raises(OSError, match="gone"):
        arena.close()
    assert not locked()


def test_an_arena_that_is_forgotten_unlocks_its_memory_while_it_is_still_there() -> None:
    arena = Arena(link_to(DEVICE), PAGE)
    tensor = arena.acquire(PAGE, torch.uint8).tensor.fill_(3)
    del arena  # without gc: nothing goes round in a circle
    assert not locked() and int(tensor.sum()) == 3 * PAGE
