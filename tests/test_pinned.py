"""Blocks of page-locked memory never overlap, come back once their copies are over, and cost no more than their sum.

Runs on the software GPU, which knows what is page-locked.
"""

from __future__ import annotations

import dataclasses
import gc
import logging
import os
import random
import re
import resource
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import softgpu
from tests.models import DEVICE
from tests.softgpu import memory
from zk.core.events import COMPLETED
from zk.offload import nvme, pinned
from zk.offload.nvme import ALIGN, File, round_up
from zk.offload.pinned import Arena, Record
from zk.offload.stash import POOLS
from zk.offload.streams import CudaLink, Link, link_to

if not softgpu.installed():
    pytest.skip("for the software GPU (pytest -p tests.softgpu.plugin)", allow_module_level=True)

PAGE = 4096
Span = tuple[int, int]  # first and last + 1 address, whole pages


class Late:
    """An event that is over only once it has been waited for."""

    done = False

    def wait(self) -> None:
        self.done = True


class Never(Late):
    """An event that nobody should have to wait for."""

    def wait(self) -> None:
        assert self.done, "waited for nothing"


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
        gc.collect()  # arenas of other tests that went round in a circle
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
    st.tuples(st.just("acquire"), st.integers(0, 5 * PAGE), st.booleans())
    | st.tuples(st.just("release"), st.integers(0, 30), st.booleans()),
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


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9 * PAGE), st.booleans()), min_size=1, max_size=12), st.randoms(use_true_random=False))
def test_cycle_after_cycle_fits_into_the_exact_sum(blocks: list[tuple[int, bool]], order: random.Random) -> None:
    total = sum(round_up(numel) for numel, _ in blocks)
    arena = Arena(link_to(DEVICE), total)
    passing = [numel for numel, lasting in blocks if not lasting]
    forever = [numel for numel, lasting in blocks if lasting]
    for _ in range(4):
        asked = [(numel, False) for numel in passing] + [(numel, True) for numel in forever]  # the lasting ones in the first cycle only
        forever = []
        order.shuffle(asked)
        records = [(arena.acquire(numel, torch.uint8, lasting), lasting) for numel, lasting in asked]
        assert in_use(arena) == total
        order.shuffle(records)
        for record, lasting in records:
            if not lasting:
                record.release(Late() if order.random() < 0.5 else COMPLETED)
    assert arena.nbytes == total


def test_what_lasts_lies_at_the_low_end_and_what_passes_fills_the_smallest_hole_from_the_high_end() -> None:
    arena = Arena(link_to(DEVICE), 10 * PAGE)

    def place(pages: int, lasting: bool = False) -> tuple[Record, int]:
        record = arena.acquire(pages * PAGE // 2, torch.bfloat16, lasting)
        return record, (record.tensor.data_ptr() - next(iter(locked()))) // PAGE

    (one, at_one), (_, at_two) = place(1), place(2)
    (_, low), (_, next_low) = place(1, lasting=True), place(1, lasting=True)
    assert (at_one, at_two, low, next_low) == (9, 7, 0, 1)
    one.release()
    assert place(1)[1] == 9, "the hole of one page, not the five in the middle"


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


def test_released_blocks_are_waited_for_oldest_first_and_no_longer_than_needed() -> None:
    arena = Arena(link_to(DEVICE), 3 * PAGE)
    events: list[Late] = [Late(), Late(), Never()]
    records = [arena.acquire(PAGE, torch.uint8) for _ in events]
    for record, event in zip(records, events, strict=True):
        record.release(event)
    arena.acquire(2 * PAGE, torch.uint8)
    assert [event.done for event in events] == [True, True, False]
    arena.acquire(2 * PAGE, torch.uint8)  # waiting would not help
    assert arena.nbytes == 5 * PAGE
    events[2].done = True


@pytest.mark.parametrize("beside", [False, True])
def test_what_is_free_is_taken_before_a_copy_is_waited_for(beside: bool) -> None:
    arena = Arena(link_to(DEVICE), 4 * PAGE)
    top, _, low = (arena.acquire(PAGE, torch.uint8) for _ in range(3))
    running = Never()
    released = low if beside else top  # one gap with the free page, or a gap that fits as well as it
    released.release(running)
    assert arena.acquire(PAGE, torch.uint8).tensor.data_ptr() == low.tensor.data_ptr() - PAGE
    running.done = True
    assert arena.acquire(PAGE, torch.uint8).tensor.data_ptr() == released.tensor.data_ptr()


def test_another_thread_can_release_while_one_waits() -> None:
    arena = Arena(link_to(DEVICE), 2 * PAGE)
    mine, theirs = arena.acquire(PAGE, torch.uint8), arena.acquire(PAGE, torch.uint8)

    class Joint(Late):
        def wait(self) -> None:
            thread = threading.Thread(target=theirs.release, daemon=True)
            thread.start()
            thread.join(2.0)
            assert not thread.is_alive(), "the arena is locked while an event is waited for"
            super().wait()

    mine.release(Joint())
    assert arena.acquire(1, torch.uint8).tensor.data_ptr() == mine.tensor.data_ptr()


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


def test_mistakes_of_ours_are_assertions() -> None:
    with pytest.raises(AssertionError, match="same"):
        Arena(Link(torch.device("cpu")), PAGE)
    arena = Arena(link_to(DEVICE), PAGE)
    for numel in (1, 0):
        record = arena.acquire(numel, torch.uint8)
        record.release()
        with pytest.raises(AssertionError, match="twice"):
            record.release()
    arena.close()
    for numel in (1, 0):
        with pytest.raises(AssertionError, match="closed"):
            arena.acquire(numel, torch.uint8)


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


def test_the_first_error_is_raised_where_every_call_fails_after_it() -> None:
    class Broken(Late):
        def wait(self) -> None:
            raise RuntimeError("an illegal memory access")

    unpin = CudaLink.unpin

    def refuse(self: CudaLink, memory: torch.Tensor) -> None:
        unpin(self, memory)
        raise OSError(f"the same error, told by {len(locked())} more")

    arena = Arena(link_to(DEVICE), PAGE)
    records = [arena.acquire(PAGE, torch.uint8) for _ in range(3)]  # three regions
    records[0].release(Broken())
    with mock.patch.object(CudaLink, "unpin", refuse), pytest.raises(RuntimeError, match="illegal memory access"):
        arena.close()
    assert not locked(), "the others are unlocked all the same"
    arena = Arena(link_to(DEVICE), PAGE)
    records = [arena.acquire(PAGE, torch.uint8) for _ in range(2)]
    with mock.patch.object(CudaLink, "unpin", refuse), pytest.raises(OSError, match="told by 1 more"):
        arena.close()
    assert not locked()


def test_an_arena_that_is_forgotten_unlocks_its_memory_while_it_is_still_there() -> None:
    arena = Arena(link_to(DEVICE), PAGE)
    tensor = arena.acquire(PAGE, torch.uint8).tensor.fill_(3)
    del arena  # without gc: nothing goes round in a circle
    assert not locked() and int(tensor.sum()) == 3 * PAGE


def test_a_forked_child_leaves_its_parents_memory_locked() -> None:
    arena = Arena(link_to(DEVICE), PAGE)
    arena.acquire(1, torch.uint8)
    with mock.patch.object(os, "getpid", return_value=-1):
        arena.close()
    assert len(locked()) == 1
    for region in arena._regions:
        link_to(DEVICE).unpin(region.memory)


def test_files_take_the_arenas_memory_past_the_page_cache(tmp_path: Path) -> None:
    arena = Arena(link_to(DEVICE), 4 * PAGE)
    written, read = arena.acquire(PAGE, torch.bfloat16), arena.acquire(PAGE, torch.bfloat16)
    written.tensor.copy_(torch.randn(PAGE))
    read.tensor.fill_(float("nan"))
    addresses: list[tuple[int, int]] = []  # descriptor, address

    def note(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        addresses.append((descriptor, torch.frombuffer(buffers[0], dtype=torch.uint8).data_ptr()))
        return os.pwritev(descriptor, buffers, offset)

    with File(tmp_path / "block", nbytes=2 * PAGE) as file, mock.patch.object(nvme.SYSTEM, "pwritev", note):
        file.write(written.tensor)
        request = file.read_async(read.tensor)
        read.release(request)  # a request is an event too
        request.wait()
        direct = file.direct[0] if file.direct[0] >= 0 else file.cached[0]
    assert addresses == [(direct, written.tensor.data_ptr())] and written.tensor.data_ptr() % ALIGN == 0
    assert torch.equal(read.tensor, written.tensor)


def give_way(frame: FrameType, event: str, argument: object) -> Callable[..., Any] | None:
    """A trace function: other threads run between any two lines of pinned.py, and not only every few thousand."""
    if event == "call" and frame.f_code.co_filename != pinned.__file__:
        return None
    time.sleep(0)
    return give_way


def test_threads_never_get_the_same_memory() -> None:
    arena = Arena(link_to(DEVICE), 24 * PAGE)
    failures: list[BaseException] = []
    start = threading.Barrier(4)

    def hammer(seed: int) -> None:
        choose = random.Random(seed)
        held: list[tuple[Record, int]] = []
        try:
            start.wait()
            for turn in range(40):
                if len(held) < 4 and choose.random() < 0.6:
                    record = arena.acquire(choose.randrange(3 * PAGE), torch.uint8)
                    record.tensor.fill_(value := (seed * 64 + turn % 64))
                    held.append((record, value))
                elif held:
                    record, value = held.pop(choose.randrange(len(held)))
                    assert (record.tensor == value).all(), "somebody else has written here"
                    record.release(choose.choice([COMPLETED, Late()]))
            for record, _ in held:
                record.release()
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=hammer, args=(seed,)) for seed in range(4)]
    threading.settrace(give_way)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        threading.settrace(None)
    assert not failures and in_use(arena) == 0 and sum(locked().values()) == arena.nbytes
    arena.close()
    assert not locked()
