"""Copies between a device and the host come after the events they name, and what is done with either end comes after theirs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from benchmarks.throttled import CPU, ThrottledLink, pretend
from tests import softgpu
from tests.models import DEVICE
from zk.core.events import COMPLETED
from zk.offload.streams import link_to

if not softgpu.installed():
    pytest.skip("for the software GPU (pytest -p tests.softgpu.plugin)", allow_module_level=True)


def pair() -> tuple[Tensor, Tensor]:
    """Eight values on the device, and a place for them in host memory."""
    return torch.arange(8.0, device=DEVICE), torch.zeros(8)


def is_there(host: Tensor) -> bool:
    return host.tolist() == list(range(8))


def test_without_a_device_there_is_nothing_to_copy() -> None:
    link = link_to(CPU)
    assert link.joined and link.mark().done
    with pytest.raises(AssertionError, match="nothing to offload"):
        link.offload(torch.zeros(1), torch.zeros(1), ())
    with pretend(ThrottledLink(nbytes_per_s=1e9)) as pretended:
        assert link_to(CPU) is pretended
    assert link_to(CPU) is link


def test_an_offload_arrives_when_the_host_waits_and_not_before() -> None:
    link, (near, host) = link_to(DEVICE), pair()
    event = link.offload(host, near, [link.mark()])
    assert host.isnan().all() and not event.done
    link.follow(event)
    near.zero_()  # compute may use the source again; the host has not waited
    assert host.isnan().all()
    event.wait()
    assert is_there(host) and event.done


def test_an_upload_arrives_when_compute_follows() -> None:
    link, (values, host) = link_to(DEVICE), pair()
    host.copy_(values)
    near = torch.empty(8, device=DEVICE)
    event = link.upload(near, host, [link.mark()])
    assert not event.done
    link.follow(event)
    assert is_there(near) and event.done, "who reads a value has waited for all that it came after"


def test_a_later_copy_of_the_same_direction_brings_the_earlier_ones() -> None:
    link = link_to(DEVICE)
    pairs = [pair() for _ in range(3)]
    events = [link.offload(host, near, [link.mark()]) for near, host in pairs]
    events[-1].wait()
    assert all(is_there(host) for _, host in pairs) and events[0].done


def test_what_compute_followed_is_known_to_whoever_waits_for_compute() -> None:
    link, (near, host) = link_to(DEVICE), pair()
    up = link.upload(near, host, [link.mark()])
    link.follow(up)
    gradient, there = pair()
    link.offload(there, gradient, [link.mark()]).wait()  # comes after compute, and so after the upload
    host.fill_(1.0)
    assert up.done and near.sum().item() == 0


def test_a_copy_comes_after_every_event_that_it_names() -> None:
    link, (near, host) = link_to(DEVICE), pair()
    other = torch.empty(8, device=DEVICE)
    event = link.offload(host, near, [link.mark()])
    link.follow(link.upload(other, host, [link.mark(), event]))
    assert is_there(other)


@pytest.mark.parametrize("device", (CPU, DEVICE))
def test_events_of_the_host_are_waited_for_by_copies_and_by_compute(device: torch.device) -> None:
    class Told:
        done = False

        def wait(self) -> None:
            self.done = True

    link, told = link_to(device), [Told() for _ in range(3)]
    link.follow(told[0])
    with link.beside([told[1]]):
        pass
    if link.joined:
        told[2].wait()  # there are no copies
    else:
        near, host = pair()
        link.offload(host, near, [told[2], link.mark()]).wait()
        assert is_there(host)
    assert all(event.done for event in told)


@pytest.mark.parametrize("direction", ("down", "up"))
def test_what_runs_beside_compute_comes_after_the_copies_it_names_and_before_its_event(direction: str) -> None:
    link, (near, host) = link_to(DEVICE), pair()
    event = link.offload(host, near, [link.mark()]) if direction == "down" else link.upload(near, host, [link.mark()])
    with link.beside([event]) as reached:
        near.add_(1)
        event = reached()
    link.follow(event)
    assert near[0].item() == 1


def test_what_runs_beside_compute_does_not_wait_for_it() -> None:
    link = link_to(DEVICE)
    torch.ones(8, device=DEVICE)
    computing = link.mark()
    with link.beside([COMPLETED]) as reached:
        torch.ones(8, device=DEVICE)
        reached().wait()
    assert not computing.done


@pytest.mark.races
@pytest.mark.parametrize("forgotten", ("the offload that reads it", "what compute did with it", "what runs beside compute"))
def test_device_memory_that_is_used_on_two_streams_needs_each_of_three_events(forgotten: str) -> None:
    link, (near, host) = link_to(DEVICE), pair()
    offloaded = link.offload(host, near, [link.mark()])
    near.sum()
    after = {"the offload that reads it": offloaded, "what compute did with it": link.mark()}
    with link.beside([event for what, event in after.items() if what != forgotten]) as reached:
        near.add_(1)
        after["what runs beside compute"] = reached()
    assert bool(softgpu.races) == (forgotten != "what runs beside compute")
    near.add_(1)
    torch.cuda.synchronize()


def test_a_throttled_link_takes_its_time_in_both_directions_at_once() -> None:
    link = ThrottledLink(nbytes_per_s=4e6)
    there, back = (torch.ones(50_000), torch.zeros(50_000)), (torch.ones(50_000), torch.zeros(50_000))  # 0.05 s each
    events = [link.offload(there[1], there[0], [link.mark()]), link.upload(back[1], back[0], [link.mark(), COMPLETED])]
    for event in events:
        event.wait()
    assert link.down.busy_s >= 0.05 and link.up.busy_s >= 0.05
    assert torch.equal(there[1], there[0]) and torch.equal(back[1], back[0])
