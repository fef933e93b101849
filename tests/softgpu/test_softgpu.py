"""The software GPU finds what it is there to find: each fault that is planted here is reported, with the line that did it."""

from __future__ import annotations

import subprocess
import sys
import threading
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import zk
from tests import softgpu
from tests.models import GPT, train
from zk import kernels
from zk.kernels.adam_kernel import _adam_kernel
from zk.kernels.numerics import grid
from zk.kernels.reference import AdamStep
from zk.offload.tiers import TO_DEVICE, TO_HOST, CudaLink, Event, link_to

if not softgpu.installed():
    pytest.skip("for the software GPU (pytest -p tests.softgpu.plugin)", allow_module_level=True)
from tests.softgpu import memory, native

HERE = "tests/softgpu/test_softgpu.py"


def reported(*words: str) -> None:
    """One of the races so far has all of ``words``; forgets them."""
    lines = softgpu.found()
    assert any(all(word in line for word in words) for line in lines), f"{words} not in {lines}"


class Ends:
    """Both ends of copies, and copies after what is asked for and no more."""

    def __init__(self) -> None:
        link = link_to(torch.device("cuda:0"))
        assert link is not None
        self.link, self.near, self.host = link, torch.ones(8, device="cuda"), torch.zeros(8)

    def offload(self, *after: Event, source: Tensor | None = None) -> Event:
        return self.link.copy(TO_HOST, self.host, self.near if source is None else source, after or [self.link.mark()])

    def upload(self, *after: Event, target: Tensor | None = None, source: Tensor | None = None) -> Event:
        ends = self.near if target is None else target, self.host if source is None else source
        return self.link.copy(TO_DEVICE, *ends, after or [self.link.mark()])


def trained(**options: object) -> None:
    torch.manual_seed(0)
    model = GPT()
    with zk.ZeroOptimizer(model, torch.optim.AdamW(model.parameters(), lr=1e-2), dtype="bf16", **options) as optimizer:  # type: ignore[arg-type]
        train(model, optimizer, 2)


def test_training_is_reported_where_compute_does_not_wait_or_a_copy_has_no_mark_and_not_otherwise() -> None:
    before, host, copy = dict(softgpu.stats), {"stage": 3, "param_tier": "host", "optimizer_tier": "host"}, CudaLink.copy
    trained(**host)
    assert softgpu.found() == []
    assert softgpu.stats["copies"] > before["copies"] and softgpu.stats["kernels"] > before["kernels"]
    with mock.patch.object(CudaLink, "follow", lambda self, event: torch.cuda.current_stream()):
        trained(**host)
    reported("reads device memory that an upload", "unordered", "tests/models.py")
    with mock.patch.object(CudaLink, "copy", lambda self, kind, target, source, after: copy(self, kind, target, source, ())):
        trained(stage=2, optimizer_tier="host")
    reported("an offload", "reads device memory that", "zk/offload/tiers.py", "zk/parallel/gradient.py")


def test_a_host_that_does_not_wait_is_reported() -> None:
    ends = Ends()
    ends.offload()
    assert ends.host.isnan().all(), "the copy is late"
    ends.host.zero_()
    reported("the host changed the target of an offload", HERE)
    ends.link.follow(event := ends.upload())
    ends.near.add_(1)
    ends.host.fill_(2)  # the device has waited, and the host has not
    event.wait()
    reported("the host changed the source of an upload", HERE)
    ends.offload()
    ends.host.copy_(ends.near)
    reported("a copy by torch meets an offload in host memory", "unordered", HERE)
    ends.link.pin(ends.host)
    near = ends.host.fill_(1).to("cuda", non_blocking=True)
    ends.host.zero_()
    assert near.sum().item() != 8.0
    reported("the host changed the source of a copy by torch")
    ends.link.unpin(ends.host)


def test_copies_and_compute_that_no_event_orders_are_reported() -> None:
    ends = Ends()
    ends.offload()
    ends.link.follow(ends.upload(target=torch.zeros(8, device="cuda")))
    reported("an upload meets an offload in host memory", "unordered", HERE)
    mark = ends.link.mark()
    ends.near.add_(1)
    ends.offload(mark).wait()
    assert ends.host.isnan().all()
    reported("an offload", "reads device memory that aten::add", "unordered")
    for copy, words in ((ends.offload, "an offload"), (ends.upload, "an upload")):
        copy()
        ends.near.zero_()
        reported("aten::zero_", f"writes device memory that {words}", "unordered")
    mark = ends.link.mark()
    ends.upload(mark, target=ends.near[:4], source=ends.host[:4])
    ends.near[4:].zero_()
    assert not softgpu.races, "only the bytes of a copy are its own"
    ends.upload(mark, target=ends.near[2:6], source=ends.host[:4])
    reported("an upload", "writes device memory that aten::zero_")
    values = torch.ones(8, device="cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        values.add_(1)
    reported("aten::add", "the stream of cuda:0 made at " + HERE)


def test_memory_that_is_freed_under_a_copy_is_reported() -> None:
    ends, nothing = Ends(), mock.MagicMock()  # keeps no tensors of copies
    nothing.__bool__.return_value = False
    with mock.patch.object(ends.link, "in_flight", {TO_DEVICE: nothing, TO_HOST: nothing}):
        ends.upload(target=torch.zeros(1024, device="cuda"), source=torch.ones(1024)).near = None
    torch.ones(1, device="cuda")
    reported("bytes of device memory are freed while an upload")


CONSTANTS = {"FROM_GRAD": False, "L2": False, "SPLIT": False, "CODED": False, "BLOCK": 2048}


def test_a_kernel_that_is_given_other_memory_or_leaves_its_own_is_reported() -> None:
    near, far, step = torch.ones(64, device="cuda"), torch.ones(64, device="cuda:1"), AdamStep(1e-3, 0.9, 0.99, 1e-8, 0.0, True, 1)
    with mock.patch("zk.kernels.ops.check_adam"), pytest.raises(ValueError, match="cannot be accessed from Triton"):
        kernels.adam(near, torch.ones(64), None, near.clone(), near.clone(), step)
    reported("a host tensor is given to a triton kernel", "zk/kernels/ops.py")
    with pytest.raises(Exception, match="illegal memory access"):
        grid(_adam_kernel, 1)(near, near.clone(), None, near.clone(), near.clone(), *[1.0] * 10, 1 << 20, **CONSTANTS)
    reported("which is not memory of the device")
    with pytest.raises(Exception, match="illegal memory access"):
        _adam_kernel[(1,)](far, far, None, far, far, *[1.0] * 10, 64, **CONSTANTS)  # the current device is 0
    reported("runs on cuda:0 uses memory of cuda:1")
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        far + near


def test_pages_that_are_locked_twice_or_unlocked_too_early_are_reported() -> None:
    ends = Ends()
    ends.link.pin(ends.host)
    ends.link.pin(ends.host)
    reported("host memory is registered twice", "zk/offload/tiers.py")
    assert ends.link.refuses
    ends.link.refuses = False
    ends.link.unpin(ends.host)
    with pytest.raises(Exception, match="NotRegistered"):
        ends.link.runtime.hostUnregister(ends.host.data_ptr())
    reported("unregistered that was not registered", HERE)
    for waits in (True, False):
        ends.link.runtime.hostRegister(ends.host.data_ptr(), ends.host.nbytes, 1)
        ends.link.follow(event := ends.upload())
        event.wait() if waits else None
        ends.link.runtime.hostUnregister(ends.host.data_ptr())  # (the link itself waits)
        assert not waits or not softgpu.races
    reported("host memory is unlocked while a copy of it is in flight", HERE)


# ---- what is right is not reported -------------------------------------------------------------------------------------------------


def test_copies_that_are_waited_for_where_they_must_be_are_not_reported() -> None:
    ends = Ends()
    ends.link.follow(event := ends.offload())
    ends.near.zero_()
    assert ends.host.isnan().all() and not event.done, "the device has gone on, and the host has not waited"
    event.wait()
    assert (ends.host == 1).all() and event.done
    ends.near.fill_(2)
    event = ends.offload()
    other = torch.zeros(8, device="cuda")
    ends.link.follow(ends.upload(ends.link.mark(), event, target=other))
    assert other.tolist() == [2.0] * 8
    first, second = (ends.offload(source=torch.full((8,), value, device="cuda")) for value in (1.0, 2.0))
    first.wait()
    assert ends.host.isnan().all(), "a later copy is to be written there"
    second.wait()
    assert (ends.host == 2).all()
    assert softgpu.found() == []


def test_two_streams_with_an_event_are_not_reported_and_backward_computes_on_that_of_forward() -> None:
    layer, stream, seen = nn.Linear(4, 4, device="cuda"), torch.cuda.Stream(), list[int]()
    stream.wait_stream(torch.cuda.current_stream())
    layer.weight.register_hook(lambda grad: seen.append(torch.cuda.current_stream().cuda_stream))
    with torch.cuda.stream(stream):
        layer(torch.ones(2, 4, device="cuda")).sum().backward()
    assert seen == [stream.cuda_stream]
    torch.cuda.current_stream().wait_stream(stream)
    assert layer.weight.grad is not None and layer.weight.grad.sum().item() == 32.0 and softgpu.found() == []


def test_plain_copies_by_torch_block() -> None:
    host = torch.ones(8)
    near = host.to("cuda", non_blocking=True)
    host.zero_()
    assert near.sum().item() == 8.0
    assert near.to("cpu", non_blocking=True).tolist() == [1.0] * 8
    assert torch.zeros(8).copy_(near, non_blocking=True).tolist() == [1.0] * 8 and softgpu.found() == []


# ---- NCCL -----------------------------------------------------------------------------------------------------------------------------


def test_collectives_that_are_not_waited_for_or_in_flight_from_two_threads_are_reported() -> None:
    torch.distributed.init_process_group("nccl", store=torch.distributed.HashStore(), rank=0, world_size=1)
    second, values = torch.distributed.new_group([0]), [torch.ones(16, device="cuda") for _ in range(2)]
    for ordered in (True, False):
        work = torch.distributed.all_reduce(values[0], async_op=True)
        if ordered:
            values[0] + 1
            reported("aten::add", "that a collective", "writes, unordered")
            work.wait()
            values[0] + 1
            assert softgpu.found() == []
        thread = threading.Thread(target=torch.distributed.all_reduce, args=(values[1],), kwargs={"group": second, "async_op": True})
        thread.start()
        thread.join()
        assert any("two communicators" in line for line in softgpu.found()) != ordered
        torch.cuda.synchronize()
    with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
        torch.distributed.all_reduce(torch.ones(1))
    reported("a host tensor is given to NCCL")
    torch.distributed.destroy_process_group()


# ---- CUDA's rules ---------------------------------------------------------------------------------------------------------------------


def test_the_current_device_belongs_to_a_thread_and_to_a_context_and_to_backward() -> None:
    weight, seen = torch.ones(4, device="cuda:1", requires_grad=True), list[int]()
    weight.register_hook(lambda grad: seen.append(torch.cuda.current_device()))
    weight.sum().backward()
    assert seen == [1] and torch.cuda.current_device() == 0
    with torch.cuda.device(1):
        assert torch.ones(1, device="cuda").device.index == torch.cuda.current_device() == 1
        with torch.cuda.stream(torch.cuda.Stream(device=0)):
            assert torch.cuda.current_device() == 0
        assert torch.cuda.current_device() == 1
    assert torch.cuda.current_device() == 0
    with pytest.raises(Exception, match="invalid device ordinal"):
        torch.cuda.set_device(2)


def test_each_device_has_its_own_memory_and_says_when_it_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.cuda.memory_allocated(0), torch.cuda.memory_allocated(1)
    values = torch.empty(1 << 20, device="cuda:1")
    assert (torch.cuda.memory_allocated(0), torch.cuda.memory_allocated(1)) == (before[0], before[1] + (4 << 20))
    assert values.isnan().all(), "new memory holds NaN"
    del values
    assert torch.cuda.memory_allocated(1) == before[1]
    monkeypatch.setattr(memory, "NBYTES", before[1] + (1 << 20))
    with pytest.raises(torch.cuda.OutOfMemoryError, match="CUDA out of memory"):
        torch.empty(1 << 20, device="cuda:1")


def test_memory_of_another_stream_may_be_freed_where_a_named_stream_waits_for_its_uses() -> None:
    for named in (False, True):
        owner, user = torch.cuda.Stream(), torch.cuda.Stream()
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
        assert named or reported("bytes of device memory are freed while aten::add") is None
    assert softgpu.found() == []


def test_another_torch_is_refused_with_what_to_do() -> None:
    with mock.patch.object(torch, "__version__", "9.9.0"), pytest.raises(RuntimeError, match=r"made for a CPU build of torch 2\.13.*MADE_FOR"):
        native.check_version()


PROGRAM = """
import os, torch
if os.fork():
    print(os.waitstatus_to_exitcode(os.wait()[1]), torch.cuda.device_count())
else:
    x = torch.ones(8, device="cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        x.add_(1)
"""


def test_a_program_that_a_test_starts_has_the_devices_and_fails_if_it_races() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "unordered" in done.stdout and done.stdout.endswith("86 2\n"), done
