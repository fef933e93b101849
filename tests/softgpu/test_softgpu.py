"""The software GPU finds what it is there to find: each fault that is planted here is reported, with the line of zk that did it."""

from __future__ import annotations

import gc
import io
import subprocess
import sys
import threading
from collections.abc import Callable
from types import FrameType
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import zk
from tests import softgpu
from tests.models import GPT, batch, loss_of
from zk import kernels
from zk.kernels.adam_kernel import _adam_kernel
from zk.kernels.numerics import grid
from zk.kernels.reference import AdamStep
from zk.offload.tiers import TO_DEVICE, TO_HOST, CudaLink, Event, link_to

if not softgpu.installed():
    pytest.skip("for the software GPU (pytest -p tests.softgpu.plugin)", allow_module_level=True)
from tests.softgpu import memory, native


@pytest.fixture(autouse=True)
def every_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpret each, though one of its form has been seen."""
    monkeypatch.setattr("tests.softgpu.interpreter.ALWAYS", True)


def reported(*words: str) -> list[str]:
    """The races so far, which must name all of ``words`` in one line; forgets them."""
    lines = softgpu.found()
    assert any(all(word in line for word in words) for line in lines), f"{words} not in {lines}"
    return lines


def offload(link: CudaLink, host: Tensor, near: Tensor, after: list[Event]) -> Event:
    """As the link's, after what is asked for and no more."""
    return link.copy(TO_HOST, host, near, after)


def upload(link: CudaLink, near: Tensor, host: Tensor, after: list[Event]) -> Event:
    return link.copy(TO_DEVICE, near, host, after)


def train(steps: int = 2, **options: object) -> None:
    torch.manual_seed(0)
    model = GPT()
    with zk.ZeroOptimizer(model, torch.optim.AdamW(model.parameters(), lr=1e-2), dtype="bf16", **options) as optimizer:  # type: ignore[arg-type]
        for step in range(steps):
            loss_of(model, batch(step)).backward()
            optimizer.step()
            optimizer.zero_grad()


HOST = {"stage": 3, "param_tier": "host", "optimizer_tier": "host"}


def test_training_without_a_fault_is_not_reported() -> None:
    before = dict(softgpu.stats)
    train(**HOST)
    assert softgpu.found() == []
    assert softgpu.stats["copies"] > before["copies"] and softgpu.stats["kernels"] > before["kernels"]


def test_a_missing_wait_of_compute_is_reported_with_the_line_of_the_model() -> None:
    with mock.patch.object(CudaLink, "follow", lambda self, event: torch.cuda.current_stream()):
        train(**HOST)
    reported("reads device memory that an upload", "unordered", "tests/models.py")


def test_a_missing_mark_is_reported_with_the_line_of_zk() -> None:
    copy = CudaLink.copy
    with mock.patch.object(CudaLink, "copy", lambda self, kind, target, source, after: copy(self, kind, target, source, ())):
        train(stage=2, optimizer_tier="host")
    reported("an offload", "reads device memory that", "zk/offload/tiers.py", "zk/parallel/gradient.py")


def test_a_host_that_does_not_wait_is_reported() -> None:
    link = link_to(torch.device("cuda:0"))
    near, host = torch.ones(8, device="cuda"), torch.zeros(8)
    offload(link, host, near, [link.mark()])
    assert host.isnan().all(), "the copy is late"
    host.zero_()
    torch.cuda.synchronize()
    reported("the host changed the target of an offload", "tests/softgpu/test_softgpu.py")


def test_numbers_give_tensors_without_dimensions_no_other_precision() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        near, host = torch.tensor(0.5, device="cuda", dtype=dtype), torch.tensor(0.5, dtype=dtype)
        for compute in (lambda x: x * 0.3, lambda x: x + 1, lambda x: 2 - x, lambda x: x / 3):
            assert compute(near).dtype == dtype and torch.equal(compute(near).cpu(), compute(host))
    assert (torch.tensor(3, device="cuda") * 0.5).dtype == torch.float32


def test_what_the_device_follows_is_not_there_for_the_host() -> None:
    link = link_to(torch.device("cuda:0"))
    near, host = torch.ones(8, device="cuda"), torch.zeros(8)
    event = offload(link, host, near, [link.mark()])
    link.follow(event)
    near.zero_()
    assert host.isnan().all() and not event.done, "the device has gone on, and the host has not waited"
    event.wait()
    assert (host == 1).all() and event.done and softgpu.found() == []


def test_a_source_that_the_host_changes_after_the_device_has_gone_on_is_reported() -> None:
    link = link_to(torch.device("cuda:0"))
    near, host = torch.zeros(8, device="cuda"), torch.ones(8)
    event = upload(link, near, host, [link.mark()])
    link.follow(event)
    near.add_(1)
    host.zero_()
    event.wait()
    reported("the host changed the source of an upload", "tests/softgpu/test_softgpu.py")


@pytest.mark.parametrize("ordered", (False, True))
def test_copies_of_the_same_host_memory_in_both_directions_need_an_event(ordered: bool) -> None:
    link = link_to(torch.device("cuda:0"))
    near, other, host = torch.ones(8, device="cuda"), torch.zeros(8, device="cuda"), torch.zeros(8)
    event = offload(link, host, near, [link.mark()])
    link.follow(upload(link, other, host, [link.mark(), *[event] * ordered]))
    if ordered:
        assert other.tolist() == [1.0] * 8 and softgpu.found() == []
    else:
        reported("an upload meets an offload in host memory", "unordered", "tests/softgpu/test_softgpu.py")


def test_a_copy_that_the_host_waits_for_comes_after_those_that_its_stream_follows() -> None:
    link = link_to(torch.device("cuda:0"))
    near, host = torch.ones(8, device="cuda"), torch.zeros(8)
    link.follow(offload(link, host, near, [link.mark()]))
    assert host.cuda().tolist() == [1.0] * 8
    link.follow(offload(link, host, near, [link.mark()]))
    host.copy_(near + 1)
    assert host.tolist() == [2.0] * 8 and softgpu.found() == []
    offload(link, host, near, [link.mark()])
    host.copy_(near)
    reported("a copy by torch meets an offload in host memory", "unordered", "tests/softgpu/test_softgpu.py")


def test_host_memory_holds_no_copy_while_a_later_one_is_to_be_written_there() -> None:
    link = link_to(torch.device("cuda:0"))
    host = torch.zeros(8)
    first, second = (offload(link, host, torch.full((8,), value, device="cuda"), [link.mark()]) for value in (1.0, 2.0))
    first.wait()
    assert host.isnan().all()
    second.wait()
    assert (host == 2).all() and softgpu.found() == []


def test_an_offload_that_comes_after_less_than_what_compute_wrote_is_reported() -> None:
    link = link_to(torch.device("cuda:0"))
    near, host = torch.ones(8, device="cuda"), torch.zeros(8)
    mark = link.mark()
    near.add_(1)
    offload(link, host, near, [mark]).wait()
    assert host.isnan().all()
    reported("an offload", "reads device memory that aten::add", "unordered")
    offload(link, host, near, [link.mark()]).wait()
    assert (host == 2).all() and softgpu.found() == []


@pytest.mark.parametrize("direction", ("down", "up"))
def test_device_memory_that_compute_writes_under_a_copy_is_reported(direction: str) -> None:
    link = link_to(torch.device("cuda:0"))
    near, host = torch.ones(8, device="cuda"), torch.zeros(8)
    copy = (lambda: offload(link, host, near, [link.mark()])) if direction == "down" else (lambda: upload(link, near, host, [link.mark()]))
    copy()
    near.zero_()
    reported("aten::zero_", "writes device memory that an " + ("offload" if direction == "down" else "upload"), "unordered")
    link.follow(copy())
    near.zero_()
    assert softgpu.found() == []


def test_only_the_bytes_of_a_copy_are_its_own() -> None:
    link = link_to(torch.device("cuda:0"))
    near, mark = torch.empty(8, device="cuda"), link.mark()
    upload(link, near[:4], torch.ones(4), [mark])
    near[4:].zero_()
    assert not softgpu.races
    upload(link, near[2:6], torch.ones(4), [mark])
    reported("an upload", "writes device memory that aten::zero_")


def test_a_host_tensor_in_a_kernel_is_reported_with_the_line_of_zk() -> None:
    near = torch.ones(4096, device="cuda")
    step = AdamStep(1e-3, 0.9, 0.99, 1e-8, 0.0, True, 1)
    with mock.patch("zk.kernels.ops.check_adam"), pytest.raises(ValueError, match="cannot be accessed from Triton"):
        kernels.adam(near, torch.ones(4096), None, near.clone(), near.clone(), step)
    reported("a host tensor is given to a triton kernel", "zk/kernels/ops.py")


CONSTANTS = {"FROM_GRAD": False, "L2": False, "SPLIT": False, "CODED": False, "BLOCK": 2048}


def test_a_kernel_that_leaves_its_tensors_is_reported() -> None:
    values = [torch.ones(64, device="cuda") for _ in range(4)]
    with pytest.raises(Exception, match="illegal memory access"):
        grid(_adam_kernel, 1)(*values[:2], None, *values[2:], *[1.0] * 10, 1 << 20, **CONSTANTS)
    reported("which is not memory of the device")


def test_memory_that_is_freed_under_a_copy_is_reported() -> None:
    link = link_to(torch.device("cuda:0"))
    near = torch.zeros(1024, device="cuda")
    with mock.patch.object(link, "in_flight", {1: FakeDeque(), 2: FakeDeque()}):  # the link does not keep the tensors of its copies
        upload(link, near, torch.ones(1024), [link.mark()])
    del near
    torch.ones(1, device="cuda")
    reported("bytes of device memory are freed while an upload")


class FakeDeque(list[object]):
    """Keeps nothing."""

    def append(self, item: object) -> None:
        return

    def __getitem__(self, index: object) -> object:  # type: ignore[override]
        return (mock.Mock(done=False),)


def test_another_device_is_reported_with_the_line_of_zk() -> None:
    far = torch.ones(4096, device="cuda:1")
    with pytest.raises(Exception, match="illegal memory access"):
        _adam_kernel[(1,)](far, far, None, far, far, *[1.0] * 10, 4096, **CONSTANTS)  # the current device is 0
    reported("runs on cuda:0 uses memory of cuda:1")
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        far + torch.ones(4096, device="cuda:0")


def test_locking_pages_twice_is_reported_with_the_line_of_zk() -> None:
    link = link_to(torch.device("cuda:0"))
    memory = torch.ones(1 << 12)
    link.pin(memory)
    link.pin(memory)
    reported("host memory is registered twice", "zk/offload/tiers.py")
    assert link.refuses
    link.refuses = False
    link.unpin(memory)


def test_unlocking_what_is_not_locked_or_is_being_copied_is_reported() -> None:
    link = link_to(torch.device("cuda:0"))
    memory = torch.ones(1 << 12)
    with pytest.raises(Exception, match="NotRegistered"):
        link.runtime.hostUnregister(memory.data_ptr())
    reported("unregistered that was not registered", "tests/softgpu/test_softgpu.py")
    near = torch.zeros(1 << 12, device="cuda")
    for waits in (False, True):
        link.pin(memory)
        event = upload(link, near, memory, [link.mark()])
        link.follow(event)
        near.add_(1)
        event.wait() if waits else None
        link.runtime.hostUnregister(memory.data_ptr())  # (the link itself waits)
        link.pinned.discard(memory.data_ptr())
        assert waits or reported("host memory is unlocked while a copy of it is in flight", "tests/softgpu/test_softgpu.py")
    assert softgpu.found() == []


def test_a_collective_that_is_not_waited_for_is_reported() -> None:
    group = torch.distributed.is_initialized()
    assert not group
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("nccl", store=store, rank=0, world_size=1)
    try:
        values = torch.ones(16, device="cuda")
        work = torch.distributed.all_reduce(values, async_op=True)
        values + 1
        reported("aten::add", "that a collective", "writes, unordered")
        work.wait()
        values + 1
        assert softgpu.found() == []
        with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
            torch.distributed.all_reduce(torch.ones(1))
        reported("a host tensor is given to NCCL")
    finally:
        torch.distributed.destroy_process_group()


def test_two_communicators_in_flight_from_two_threads_are_reported() -> None:
    torch.distributed.init_process_group("nccl", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        first, second = None, torch.distributed.new_group([0])
        values = [torch.ones(16, device="cuda") for _ in range(2)]

        def launch(group: torch.distributed.ProcessGroup | None, tensor: Tensor) -> torch.distributed.Work | None:
            return torch.distributed.all_reduce(tensor, group=group, async_op=True)

        for ordered in (True, False):
            work = launch(first, values[0])
            assert work is not None
            if ordered:
                work.wait()
                torch.cuda.synchronize()
            thread = threading.Thread(target=launch, args=(second, values[1]))
            thread.start()
            thread.join()
            assert any("two communicators" in line for line in softgpu.found()) != ordered
            torch.cuda.synchronize()
    finally:
        torch.distributed.destroy_process_group()


# ---- CUDA's rules ---------------------------------------------------------------------------------------------------------------


def side() -> torch.cuda.Stream:
    return torch.cuda.Stream()


def test_work_on_two_streams_needs_an_event() -> None:
    values, stream = torch.ones(8, device="cuda"), side()
    with torch.cuda.stream(stream):
        values.add_(1)
    reported("aten::add", "the stream of cuda:0 made at tests/softgpu/test_softgpu.py")
    stream.synchronize()
    other = torch.ones(8, device="cuda")
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        other.add_(1)
    torch.cuda.current_stream().wait_stream(stream)
    assert (other + 1).tolist() == [3.0] * 8 and softgpu.found() == []


def test_backward_computes_on_the_stream_of_forward() -> None:
    layer, stream = nn.Linear(4, 4, device="cuda"), side()
    stream.wait_stream(torch.cuda.current_stream())
    seen: list[int] = []
    layer.weight.register_hook(lambda grad: seen.append(torch.cuda.current_stream().cuda_stream))
    with torch.cuda.stream(stream):
        layer(torch.ones(2, 4, device="cuda")).sum().backward()
    assert seen == [stream.cuda_stream]
    torch.cuda.current_stream().wait_stream(stream)
    assert layer.weight.grad is not None and layer.weight.grad.sum().item() == 32.0 and softgpu.found() == []


def test_backward_on_another_device_has_that_device_as_current() -> None:
    layer, seen = nn.Linear(4, 4, device="cuda:1"), []
    layer.weight.register_hook(lambda grad: seen.append(torch.cuda.current_device()))
    layer(torch.ones(2, 4, device="cuda:1")).sum().backward()
    assert seen == [1] and torch.cuda.current_device() == 0


def test_the_current_device_belongs_to_a_thread_and_to_a_context() -> None:
    with torch.cuda.device(1):
        assert torch.ones(1, device="cuda").device.index == torch.cuda.current_device() == 1
        with torch.cuda.stream(torch.cuda.Stream(device=0)):
            assert torch.cuda.current_device() == 0
        assert torch.cuda.current_device() == 1
    assert torch.cuda.current_device() == 0
    with pytest.raises(Exception, match="invalid device ordinal"):
        torch.cuda.set_device(2)


def test_each_device_has_its_own_memory_and_says_when_it_is_full() -> None:
    before = torch.cuda.memory_allocated(0), torch.cuda.memory_allocated(1)
    values = torch.empty(1 << 20, device="cuda:1")
    assert torch.cuda.memory_allocated(0) == before[0] and torch.cuda.memory_allocated(1) == before[1] + (4 << 20)
    assert values.isnan().all(), "new memory holds NaN"
    torch.cuda.set_per_process_memory_fraction(1e-2, 1)
    try:
        with pytest.raises(torch.cuda.OutOfMemoryError, match="CUDA out of memory"):
            torch.empty(1 << 26, device="cuda:1")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, 1)
    del values
    assert torch.cuda.memory_allocated(1) == before[1]


@pytest.mark.parametrize("named", (False, True))
def test_memory_of_another_stream_may_be_freed_where_a_named_stream_waits_for_its_uses(named: bool) -> None:
    owner, user = side(), side()
    with torch.cuda.stream(owner):
        values = torch.ones(8, device="cuda")
    user.wait_stream(owner)
    with torch.cuda.stream(user):
        values + 1
    torch.cuda.current_stream().wait_stream(user)
    if named:
        values.record_stream(torch.cuda.current_stream())
    del values
    torch.cuda.memory_allocated()
    if named:
        assert softgpu.found() == []
    else:
        reported("bytes of device memory are freed while aten::add")


def test_a_tensor_may_be_dropped_by_another_thread_while_one_is_made() -> None:
    new_capsule, before = memory._new_capsule, torch.cuda.memory_allocated()
    kept: list[Tensor] = []

    def drop_meanwhile(*arguments: object) -> object:
        kept.clear()  # the next storage may take its address
        return new_capsule(*arguments)

    for _ in range(100):
        kept.append(torch.ones(8, device="cuda"))
        with mock.patch.object(memory, "_new_capsule", drop_meanwhile):
            made = torch.ones(8, device="cuda")
        torch.cuda.memory_allocated()  # takes back what was dropped
        assert made.tolist() == [1.0] * 8
        del made
    assert torch.cuda.memory_allocated() == before


@pytest.mark.parametrize("nth", range(24))
def test_freed_memory_is_taken_back_once_where_a_finalizer_asks_for_it_too(nth: int) -> None:
    gc.collect()  # of what ran before
    gc.disable()
    before, tracer, lines = torch.cuda.memory_allocated(), sys.gettrace(), 0

    def at_each_line(frame: FrameType, event: str, _: object) -> object:
        nonlocal lines
        if frame.f_code not in (memory.collect.__code__, native.Mailbox.take.__code__):
            return None
        lines += event == "line"
        if lines == nth and event == "line":
            sys.settrace(None)
            memory.collect()  # as the garbage collector may, between any two
        return at_each_line

    kept = [torch.ones(8, device="cuda") for _ in range(3)]
    kept.clear()
    try:
        sys.settrace(at_each_line)
        memory.collect()
        assert lines >= nth and torch.cuda.memory_allocated() == before
    finally:
        sys.settrace(tracer)
        gc.enable()


def copies(source: Tensor, pinned: bool) -> Tensor:
    return source.pin_memory() if pinned else source


def test_page_locked_memory_of_torch_lives_as_long_as_its_copies() -> None:
    near = torch.ones(1 << 20).pin_memory().to("cuda", non_blocking=True)
    others = [torch.zeros(1 << 20).pin_memory() for _ in range(3)]
    assert near.sum().item() == 1 << 20 and softgpu.found() == [] and others


@pytest.mark.parametrize("pinned", (True, False))
def test_a_copy_by_torch_is_late_only_from_and_to_page_locked_memory(pinned: bool) -> None:
    host = copies(torch.ones(8), pinned)
    assert host.is_pinned() == pinned
    near = host.to("cuda", non_blocking=True)
    host.zero_()
    assert (near.sum().item() == 8.0) != pinned
    if pinned:
        reported("the host changed the source of a copy by torch")
    back = torch.full((8,), 3.0, device="cuda").to("cpu", non_blocking=True)
    assert back.is_pinned() and back.isnan().all()
    torch.cuda.synchronize()
    assert back.tolist() == [3.0] * 8
    plain = torch.zeros(8)
    plain.copy_(torch.full((8,), 3.0, device="cuda"), non_blocking=True)
    assert plain.tolist() == [3.0] * 8


def test_a_file_of_torch_is_loaded_to_the_device_it_was_saved_from() -> None:
    file = io.BytesIO()
    torch.save({"there": torch.arange(3, device="cuda:1"), "here": torch.arange(2)}, file)
    file.seek(0)
    found = torch.load(file)
    assert found["there"].device == torch.device("cuda:1") and found["there"].tolist() == [0, 1, 2] and found["here"].tolist() == [0, 1]


def test_random_numbers_are_the_devices_own() -> None:
    torch.manual_seed(0)
    on_host = torch.default_generator.get_state()
    torch.cuda.manual_seed_all(7)
    first, second = torch.rand(4, device="cuda:0"), torch.rand(4, device="cuda:1")
    assert torch.equal(first.cpu(), second.cpu()) and torch.equal(torch.default_generator.get_state(), on_host)
    generator = torch.Generator(device="cuda:1").manual_seed(7)
    assert torch.equal(torch.rand(4, device="cuda:1", generator=generator), second)
    with pytest.raises(RuntimeError, match="Expected a 'cuda' device type for generator"):
        torch.rand(4, device="cuda", generator=torch.Generator())
    state = torch.cuda.get_rng_state(1)
    dropped = nn.functional.dropout(torch.ones(64, device="cuda:1"))
    torch.cuda.set_rng_state(state, 1)
    assert torch.equal(nn.functional.dropout(torch.ones(64, device="cuda:1")), dropped)


def test_another_torch_is_refused_with_what_to_do() -> None:
    from tests.softgpu import native

    with mock.patch.object(torch, "__version__", "9.9.0"), pytest.raises(RuntimeError, match=r"made for a CPU build of torch 2\.13.*MADE_FOR"):
        native.check_version()


def program(text: str) -> Callable[[], subprocess.CompletedProcess[str]]:
    return lambda: subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=100)


def test_a_program_that_a_test_starts_has_the_devices_and_fails_if_it_races() -> None:
    done = program(
        "import os, torch\n"
        "races = os.fork() == 0\n"
        "if races:\n"
        "    x = torch.ones(8, device='cuda')\n"
        "    with torch.cuda.stream(torch.cuda.Stream()): x.add_(1)\n"
        "else:\n"
        "    print(os.waitstatus_to_exitcode(os.wait()[1]), torch.cuda.device_count())\n"
    )()
    assert done.returncode == 0 and "unordered" in done.stdout and done.stdout.endswith("86 2\n"), done
