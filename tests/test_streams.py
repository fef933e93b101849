"""The adversarial device finds every way to forget a wait, and has nothing to say where none is forgotten."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from zk.offload.streams import PAST, link_to
from zk.offload.twins import CPU, AdversarialLink, ThrottledLink, pretend


def in_thread(call: Callable[[], None]) -> None:
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


def pair() -> tuple[Tensor, Tensor]:
    return torch.arange(8.0), torch.zeros(8)


def test_without_a_device_there_is_nothing_to_copy() -> None:
    link = link_to(CPU)
    assert link.joined and link.mark().done
    with pytest.raises(AssertionError, match="nothing to offload"):
        link.offload(torch.zeros(1), torch.zeros(1), ())
    with pretend(AdversarialLink()) as pretended:
        assert link_to(CPU) is pretended
    assert link_to(CPU) is link


def test_an_offload_arrives_when_the_host_waits_and_not_before() -> None:
    link, (device, host) = AdversarialLink(), pair()
    event = link.offload(host, device, [link.mark()])
    assert host.isnan().all() and not event.done
    link.follow(event)  # compute may use the source again; the host has not waited
    assert host.isnan().all()
    event.wait()
    assert torch.equal(host, device) and event.done and not link.races


def test_an_upload_arrives_when_compute_follows() -> None:
    link, (host, device) = AdversarialLink(), pair()
    event = link.upload(device, host, [link.mark()])
    in_thread(event.wait)
    assert device.isnan().all(), "the training thread has not waited, only another one"
    link.follow(event)
    assert torch.equal(host, device) and not link.races


def test_a_later_copy_of_the_same_direction_brings_the_earlier_ones() -> None:
    link = AdversarialLink()
    pairs = [pair() for _ in range(3)]
    events = [link.offload(host, device, [link.mark()]) for device, host in pairs]
    events[-1].wait()
    assert all(torch.equal(host, device) for device, host in pairs) and events[0].done


def test_what_compute_followed_is_known_to_whoever_waits_for_compute() -> None:
    link, (host, device) = AdversarialLink(), pair()
    up = link.upload(device, host, [link.mark()])
    link.follow(up)
    gradient, there = pair()
    link.offload(there, gradient, [link.mark()]).wait()  # comes after compute, and so after the upload
    host.zero_()
    link.finish()
    assert up.done and not link.races


def test_it_finds_a_source_that_is_overwritten_too_early() -> None:
    link, (device, host) = AdversarialLink(), pair()
    event = link.offload(host, device, [link.mark()])
    device.zero_()  # without follow
    event.wait()
    assert torch.equal(host, torch.arange(8.0))
    link.finish()
    assert len(link.races) == 1 and "down" in link.races[0]
    link, (host, device) = AdversarialLink(), pair()
    event = link.upload(device, host, [link.mark()])
    link.follow(event)
    host.zero_()  # compute has followed, the host has not waited
    event.wait()
    assert len(link.races) == 1 and "up" in link.races[0]


@pytest.mark.parametrize("after", ("nothing", "an old mark"))
def test_it_finds_a_copy_that_does_not_come_after_compute(after: str) -> None:
    link, (device, host) = AdversarialLink(), pair()
    old = link.mark()
    link.follow(link.offload(host, device, [old]))
    device += 1
    link.offload(host, device, [old] if after == "an old mark" else []).wait()
    assert host.isnan().all() and len(link.races) == 1 and "come after what compute does" in link.races[0]


def test_it_finds_an_upload_of_what_has_not_arrived() -> None:
    link, (device, host) = AdversarialLink(), pair()
    event = link.offload(host, device, [link.mark()])
    link.upload(torch.zeros(8), host, [link.mark(), event])
    assert len(link.races) == 1 and "its owner must wait first" in link.races[0]


def test_it_finds_a_copy_that_comes_after_an_older_mark_than_what_compute_wrote() -> None:
    link, (device, host) = AdversarialLink(), pair()
    link.follow(link.offload(host, device, [link.mark()]))
    mark = link.mark()
    device += 1
    link.offload(host, device, [mark]).wait()
    assert host.isnan().all() and len(link.races) == 1 and "an older mark" in link.races[0]
    link.offload(host, device, [link.mark()]).wait()
    assert torch.equal(host, device) and len(link.races) == 1


@pytest.mark.parametrize("direction", ("down", "up"))
def test_it_finds_a_target_that_is_written_before_the_copy_is_over(direction: str) -> None:
    link, (source, target) = AdversarialLink(), pair()
    copy = link.offload if direction == "down" else link.upload
    copy(target, source, [link.mark()])
    target.zero_()
    link.finish()
    assert len(link.races) == 1 and "was written under it" in link.races[0]


def test_it_shows_no_copy_whose_target_a_later_one_is_still_to_write() -> None:
    link, (device, host) = AdversarialLink(), pair()
    first = link.offload(host, device, [link.mark()])
    second = link.offload(host, torch.ones(8), [link.mark()])
    first.wait()
    assert host.isnan().all()
    second.wait()
    assert (host == 1).all() and not link.races


def test_it_finds_memory_that_is_unlocked_under_a_copy() -> None:
    link, (device, _) = AdversarialLink(), pair()
    memory = torch.zeros(16)
    link.pin(memory)
    event = link.offload(memory[8:], device, [link.mark()])
    link.unpin(memory)
    assert len(link.races) == 1 and "unlocked under it" in link.races[0]
    link.pin(memory)
    event.wait()
    link.unpin(memory)
    assert len(link.races) == 1


def test_what_is_uploaded_is_there_for_what_runs_beside_compute_and_not_for_compute() -> None:
    link, (host, device) = AdversarialLink(), pair()
    link.upload(device, host, [link.mark()])
    with link.beside() as reached:
        assert torch.equal(device, host)
        event = reached()
    assert device.isnan().all()
    link.follow(event)
    assert torch.equal(device, host) and not link.races


def test_compute_gets_hold_of_memory_once_for_each_copy() -> None:
    """The host learns later than compute that an upload is over; that is not compute's business any more."""
    link, (host, device) = AdversarialLink(), pair()
    link.follow(link.upload(device, host, [link.mark()]))
    mark = link.mark()
    link.follow(link.upload(torch.empty(8), torch.ones(8), [link.mark()]))
    event = link.upload(device, torch.ones(8), [mark])
    link.follow(event)
    assert (device == 1).all() and not link.races


def test_pieces_of_one_tensor_are_each_their_own() -> None:
    """What compute gets hold of is the bytes of a copy, not all that lies beside them."""
    link, (host, device) = AdversarialLink(), pair()
    mark = link.mark()
    link.follow(link.upload(device[:4], host[:4], [mark]))
    link.follow(link.upload(device[4:], host[4:], [mark]))
    assert torch.equal(device, host) and not link.races
    link.upload(device[2:6], torch.ones(4), [mark])
    assert len(link.races) == 1


def test_a_throttled_link_takes_its_time_in_both_directions_at_once() -> None:
    link = ThrottledLink(nbytes_per_s=4e6)
    there, back = (torch.ones(50_000), torch.zeros(50_000)), (torch.ones(50_000), torch.zeros(50_000))  # 0.05 s each
    events = [link.offload(there[1], there[0], [link.mark()]), link.upload(back[1], back[0], [link.mark(), PAST])]
    for event in events:
        event.wait()
    assert link.down.busy_s >= 0.05 and link.up.busy_s >= 0.05
    assert torch.equal(there[1], there[0]) and torch.equal(back[1], back[0])
