"""The software GPU finds what it is there to find: each fault that is planted here is reported, with the line that did it."""

from __future__ import annotations

import threading
from unittest import mock

import pytest
import torch
from torch import Tensor

import zk
from tests import programs, softgpu
from tests.models import GPT, train
from zk.offload.tiers import TO_DEVICE, TO_HOST, CudaLink, Event, link_to

if not softgpu.installed():
    pytest.skip("for the software GPU (pytest -p tests.softgpu.plugin)", allow_module_level=True)

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

    def offload(self, *after: Event) -> Event:
        return self.link.copy(TO_HOST, self.host, self.near, after or [self.link.mark()])

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


def test_collectives_that_are_not_waited_for_or_in_flight_from_two_threads_are_reported() -> None:
    torch.distributed.init_process_group("nccl", store=torch.distributed.HashStore(), rank=0, world_size=1)
    second, values = torch.distributed.new_group([0]), [torch.ones(16, device="cuda") for _ in range(2)]
    for ordered in (True, False):
        work = torch.distributed.broadcast(values[0], 0, async_op=True)
        if ordered:
            values[0] + 1
            reported("aten::add", "that a collective", "writes, unordered")
            work.wait()
            values[0] + 1
            assert softgpu.found() == []
        thread = threading.Thread(target=torch.distributed.broadcast, args=(values[1], 0, second, True))
        thread.start()
        thread.join()
        assert any("two communicators" in line for line in softgpu.found()) != ordered
        torch.cuda.synchronize()
    with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
        torch.distributed.broadcast(torch.ones(1), 0)
    reported("a host tensor is given to NCCL")
    torch.distributed.destroy_process_group()


PROGRAM = """
import torch
print(torch.cuda.device_count())
x = torch.ones(8, device="cuda")
with torch.cuda.stream(torch.cuda.Stream()):
    x.add_(1)
"""


def test_a_program_that_a_test_starts_has_the_devices_and_fails_if_it_races() -> None:
    done = programs.run("-c", PROGRAM)
    assert done.returncode == 86 and done.stdout.startswith("2\n") and "unordered" in done.stdout, done
