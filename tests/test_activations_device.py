"""Activations that leave a GPU: bit for bit, in every order, whatever else is on the device, and nothing of them stays behind."""

from __future__ import annotations

import contextlib
import gc
import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from tests import softgpu
from tests.adversary import adversarial_drive
from tests.crossing import counted
from tests.models import DEVICE, batch, loss_of
from tests.test_activations import (
    STAGES,
    Inside,
    KiB,
    Saves,
    chain,
    check_files,
    check_reading_again,
    check_refusals,
    check_shapes,
    doubled,
    in_order,
    losses_and_grads,
    make,
    nothing_left,
    same,
    slow,
    small,
    train,
    weights_of,
)
from zk.core.events import Event
from zk.nn.activations import ActivationOffload
from zk.offload import nvme, stash
from zk.offload.streams import LINKS, CudaLink, Link, link_to

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"), pytest.mark.usefixtures("one_thread")]


def randn(*size: int, **options: bool) -> Tensor:
    return torch.randn(*size, device=DEVICE, **options)


def one() -> Tensor:
    return torch.ones(1, requires_grad=True, device=DEVICE)


@contextlib.contextmanager
def own_link() -> Iterator[Link]:
    """Context: a link of its own, without host memory that other tests have left."""
    with mock.patch.dict(LINKS):
        LINKS.clear()
        link = link_to(DEVICE)
        yield link
        torch.cuda.synchronize()
        stash.POOLS[link].trim(link, 0)


# ---- exact -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variant", "inside"),
    [(variant, False) for variant in ("plain", "elsewhere", "checkpointed", "checkpointed_reentrant")] + [("checkpointed_reentrant", True)],
)
def test_losses_and_gradients_are_those_without(variant: str, inside: bool) -> None:
    wanted = losses_and_grads(make(variant), None)
    model, offload = make(variant), small(keep_last=2 * KiB)
    with counted() as crossing:
        assert same(losses_and_grads(model, offload, inside=inside), wanted)
    assert crossing.offloaded_nbytes == offload.offloaded_nbytes > 0 and crossing.uploaded_nbytes > 0
    assert nothing_left(offload)


@pytest.mark.parametrize("keep_last", [1, 700, 1 << 30])
def test_any_window_is_right(keep_last: int) -> None:
    wanted = losses_and_grads(make(), None)
    offload = small(keep_last=keep_last)
    assert same(losses_and_grads(make(), offload), wanted) and nothing_left(offload)
    assert (offload.num_offloaded == 0) == (keep_last == 1 << 30)


@pytest.mark.parametrize("dtype", [torch.float64, "autocast"])
def test_other_precisions(dtype: torch.dtype | str) -> None:
    def run(offload: ActivationOffload | None) -> list[Tensor]:
        model = make("checkpointed") if dtype == "autocast" else make().to(dtype)  # type: ignore[arg-type]
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=dtype == "autocast"):
            return losses_and_grads(model, offload)

    wanted = run(None)
    offload = small()
    assert same(run(offload), wanted) and offload.num_offloaded


@pytest.mark.parametrize("reentrant", [False, True])
def test_dropout_is_recomputed_as_it_was(reentrant: bool) -> None:
    torch.manual_seed(3)
    layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5), nn.Tanh()) for _ in range(5)).to(DEVICE)

    def run(offload: ActivationOffload | None) -> list[Tensor]:
        layers.zero_grad()
        torch.manual_seed(5)
        with offload or contextlib.nullcontext():
            x = randn(8, 16, requires_grad=True) * 1
            for layer in layers:
                x = checkpoint(layer, x, use_reentrant=reentrant)
        x.sum().backward()
        return [x.detach(), *[param.grad.clone() for param in layers.parameters()]]

    wanted = run(None)
    offload = small(keep_last=512)
    assert same(run(offload), wanted) and offload.num_offloaded > 3 and nothing_left(offload)


def test_what_checkpoint_saves_moves_and_what_it_does_not_save_does_not() -> None:
    for reentrant in ("", "_reentrant"):
        offload, model = small(keep_last=0), make("checkpointed" + reentrant, layers=6)
        with offload:
            loss = loss_of(model, batch(0))
        plain = small(keep_last=0)
        with plain:
            other = loss_of(make(layers=6), batch(0))
        assert 6 <= offload.num_offloaded < 20 < plain.num_offloaded
        del loss, other


def test_nothing_is_saved_under_no_grad() -> None:
    with small() as offload, torch.no_grad():
        make()(batch(0))
        assert not offload.count and nothing_left(offload)


# ---- any order -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("order", "keep_last"), [*((order, 0) for order in ("first graph first", "together", "retained", "parts", "twice")), ("parts", 2 * KiB)]
)
def test_other_orders_of_backward_are_right(order: str, keep_last: int) -> None:
    wanted = in_order(order, None)
    offload = small(keep_last=keep_last)
    assert same(in_order(order, offload), wanted) and offload.num_offloaded > 20
    assert nothing_left(offload)


def test_accumulation_over_several_forwards_before_their_backwards() -> None:
    def run(offload: ActivationOffload | None) -> list[Tensor]:
        model, losses = make(), []
        for seed in range(3):
            with offload or contextlib.nullcontext():
                losses.append(loss_of(model, batch(seed)))
        losses[1].backward()
        losses[0].backward()
        losses[2].backward()
        return [param.grad for param in model.parameters() if param.grad is not None]

    wanted = run(None)
    offload = small()
    assert same(run(offload), wanted) and nothing_left(offload)


# ---- memory ----------------------------------------------------------------------------------------------------------------------


def peak_of(function: Callable[[], object]) -> int:
    """The most bytes of device memory that ``function`` takes."""
    torch.cuda.synchronize()
    link_to(DEVICE).mark()  # lets go of copies that are over
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    return torch.cuda.max_memory_allocated() - before


def test_device_memory_falls_to_the_window_also_where_the_host_runs_ahead() -> None:
    weights, ends = weights_of(40), list[Tensor]()

    def forward(offload: ActivationOffload) -> None:
        x = randn(16, 16)  # 1 KiB, as each output
        with offload:
            for weight in weights:
                x = (x @ weight).tanh()
        ends.append(x)

    def backward() -> None:
        torch.autograd.backward(ends.pop().sum(), inputs=weights)

    peaks = {}
    gc.collect()
    for keep_last in (1 << 20, 4 * KiB, 4 * KiB):  # once so that gradients are there
        offload = small(min_nbytes=512, keep_last=keep_last)
        peaks[keep_last] = peak_of(lambda offload=offload: forward(offload)), peak_of(backward)  # type: ignore[misc]
        assert nothing_left(offload)
    assert peaks[1 << 20][0] >= 40 * KiB
    assert peaks[4 * KiB][0] <= (4 + 4 + 2) * KiB, "the newest, those on their way, and what is computed"
    assert peaks[4 * KiB][1] <= (4 + 1 + 4) * KiB, "those that have come ahead, the one that is used, and what is computed"


def test_what_has_arrived_in_host_memory_is_off_the_device_at_once() -> None:
    offload_late = CudaLink.offload

    def prompt(self: CudaLink, host: Tensor, source: Tensor, after: Sequence[Event]) -> Event:
        event = offload_late(self, host, source, after)
        event.wait()
        return event

    with mock.patch.object(CudaLink, "offload", prompt), small(min_nbytes=512, keep_last=4 * KiB) as offload:
        outputs = chain(randn(16, 16), list(weights_of(20)))
        assert offload.kept_nbytes == offload.newest.nbytes <= 4 * KiB
        del outputs


def test_copies_ahead_of_use_are_bounded_whatever_is_used() -> None:
    weights = weights_of(10)
    offload = small(min_nbytes=512, keep_last=4 * KiB)
    with offload:
        graphs = [chain(randn(16, 16), list(weights)) for _ in range(12)]
    for index in (0, 4, 8, 1, 5, 9, 2, 6, 10, 3, 7, 11):
        torch.autograd.grad(graphs[index][8].sum(), graphs[index][7], retain_graph=True)  # others come ahead, in vain
        assert offload.here.nbytes <= 6 * KiB
    late = offload.num_late
    for _ in range(3):
        for graph in reversed(graphs):
            torch.autograd.grad(graph[-1].sum(), weights, retain_graph=True)
            assert offload.here.nbytes <= 6 * KiB
    assert offload.num_late - late <= 6, "what came in vain does not stay in the way"


@pytest.mark.parametrize("keep_last", [4 * KiB, 0])
def test_uploads_are_in_flight_before_they_are_needed(keep_last: int) -> None:
    with small(min_nbytes=512, keep_last=keep_last) as offload:
        chain(randn(16, 16), list(weights_of(40)))[-1].sum().backward()
        assert offload.num_offloaded > 30 and offload.num_uploaded == offload.num_ahead + offload.num_late
        assert offload.num_late == 0 and offload.num_ahead > 25


def test_each_storage_moves_once_however_many_views_of_it_are_saved() -> None:
    weight = nn.Parameter(randn(16, 48))
    with small(min_nbytes=512, keep_last=0) as offload, counted() as crossing:
        h = randn(16, 16) @ weight  # leaves its 3 KiB storage to three views; the input is 1 KiB
        q, k, v = h.chunk(3, dim=-1)
        end = (q * k).sum() + (k * v).sum() + (h.t() * h.t()).sum() + randn(16, 16, requires_grad=True).exp().sum()
        end.backward()
        assert (offload.num_offloaded, offload.num_uploaded) == (3, 2) and crossing.offloaded_nbytes == 5 * KiB


def test_what_is_saved_again_is_among_the_newest_again() -> None:
    a, b, c = (randn(16, 16) for _ in range(3))
    with small(keep_last=2 * KiB) as offload:
        y = Saves.apply(one(), [], a, b, a, c)
        moved = [offload.by_storage[tensor.untyped_storage()._cdata] not in offload.newest for tensor in (a, b, c)]
        assert moved == [False, True, False]
        del y


def test_a_graph_that_is_dropped_gives_everything_back() -> None:
    offload = small(keep_last=2 * KiB)
    for used in (False, True):
        with offload:
            x = randn(4, 16) @ randn(16, 16)
            outputs = chain(x, list(weights_of(9)))
            y = outputs[-1].exp().softmax(-1)  # both save what they return
        storage = StorageWeakRef(y.untyped_storage())
        if used:  # uploads are in flight when the rest is dropped
            torch.autograd.grad(outputs[5].sum(), outputs[3], retain_graph=True)
        del x, y, outputs
        assert nothing_left(offload) and storage.expired()
    with small(min_nbytes="1MiB"):  # what is left alone
        y = randn(8, 8, requires_grad=True).exp()
    storage = StorageWeakRef(y.untyped_storage())
    del y
    assert storage.expired()
    gone = weakref.ref(offload)
    del offload
    gc.collect()
    assert gone() is None


def test_an_error_inside_gives_everything_back() -> None:
    offload = small(keep_last=0)
    for _ in range(2):
        with pytest.raises(KeyError, match="the user's"), offload:
            loss_of(make(), batch(0))
            raise KeyError("the user's")
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        assert nothing_left(offload)


def test_host_memory_is_recycled_and_what_is_not_needed_any_more_is_unpinned() -> None:
    with own_link(), counted() as crossing:
        losses_and_grads(make(layers=4), small(keep_last=0), steps=1)
        pinned = dict(crossing.pinned)
        for _ in range(3):
            losses_and_grads(make(layers=4), small(keep_last=0), steps=1)
        assert crossing.pinned == pinned and pinned
        offload = small(keep_last=0)
        for _ in range(4 * stash._AGE):
            with offload:
                graph = chain(randn(32, 64), list(weights_of(2, 64)))
            del graph
        assert 0 < len(crossing.pinned) < len(pinned) / 2


@pytest.mark.skipif(not softgpu.installed(), reason="a real driver does not refuse when it is asked to")
def test_memory_that_cannot_be_pinned_is_used_as_it_is_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    wanted = losses_and_grads(make(), None)
    stash._warn_pageable.cache_clear()
    with caplog.at_level(logging.WARNING, "zk"), own_link(), softgpu.refuse_to_pin("no more locked memory"):
        assert same(losses_and_grads(make(), small()), wanted)
    assert sum("no more locked memory" in record.message for record in caplog.records) == 1


# ---- what is saved, to the bit -----------------------------------------------------------------------------------------------------


def test_tensors_come_back_as_they_were() -> None:
    check_shapes(small(min_nbytes=1, keep_last=0))


@pytest.mark.parametrize(
    ("keep_last", "min_nbytes"),
    [pytest.param(0, 64, id="moved", marks=pytest.mark.races), pytest.param(1 << 20, 64, id="newest"), pytest.param(0, 1 << 20, id="left alone")],
)
def test_writing_to_a_saved_tensor_is_an_error_in_backward(keep_last: int, min_nbytes: int) -> None:
    with small(min_nbytes=min_nbytes, keep_last=keep_last):
        x = randn(16, 16, requires_grad=True)
        y = x * 1
        z = y * y
        y.add_(1)  # what is copied meanwhile does not matter
        with pytest.raises(RuntimeError, match=r"modified by an inplace operation after forward saved it \(version 0, now 1\)"):
            z.sum().backward()
        y = x * 1
        y.relu_()  # saves what it wrote
        y.detach().view(-1).mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


@pytest.mark.parametrize("keep_last", [0, 1 << 20])
def test_the_same_memory_saved_before_and_after_a_write_is_two_things(keep_last: int) -> None:
    found: list[Tensor] = []
    with small(keep_last=keep_last):
        x = torch.zeros(16, 16, device=DEVICE)
        first = Saves.apply(one(), found, x)
        others = chain(randn(16, 16), list(weights_of(5)))  # push it out
        x.add_(1)
        second = Saves.apply(one(), found, x)
        others += chain(randn(16, 16), list(weights_of(5)))
        second.backward()
        assert torch.equal(found[0], torch.ones_like(x))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            first.backward()


# ---- beside other hooks ------------------------------------------------------------------------------------------------------------


def test_what_is_left_alone_goes_on_to_the_hooks_around() -> None:
    wanted, packed = losses_and_grads(make(), None), list[int]()
    offload = small(min_nbytes=1500, keep_last=2 * KiB)
    with doubled(packed):
        assert same(losses_and_grads(make(), offload), wanted)
    assert offload.num_offloaded and packed
    with torch.autograd.graph.save_on_cpu():
        assert same(losses_and_grads(make(), offload), wanted)
    assert nothing_left(offload)


def test_contexts_nest() -> None:
    wanted = losses_and_grads(make(), None)
    outer, inner = small(), small(min_nbytes=1500)
    with outer, outer:
        assert same(losses_and_grads(make(), inner), wanted)
    assert outer.num_offloaded and inner.num_offloaded and nothing_left(outer) and nothing_left(inner)


@pytest.mark.parametrize(("stage", "variant"), [(2, "plain"), (3, "checkpointed")])
def test_training_with_zero_is_the_same_with_both_over_one_link(stage: int, variant: str) -> None:
    options = STAGES[stage - 2]
    wanted = train(make(variant), contextlib.nullcontext(), **options)
    for inside in (False, True):
        offload = small()
        model, around = (Inside(make(variant), lambda o=offload: o), contextlib.nullcontext()) if inside else (make(variant), offload)  # type: ignore[misc]
        assert same(train(model, around, **options), wanted)  # type: ignore[arg-type]
        assert offload.num_offloaded and nothing_left(offload)


# ---- files -------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("drive", "keep_last"), [("prompt", 0), ("prompt", 4 * KiB), ("late", 0)])
def test_files_hold_what_memory_does_not(drive: str, keep_last: int, tmp_path: Path) -> None:
    with adversarial_drive() if drive == "late" else contextlib.nullcontext():
        check_files(keep_last, tmp_path)


def test_host_memory_is_bounded_with_files(tmp_path: Path) -> None:
    with own_link(), counted() as crossing:
        offload = small(min_nbytes=512, keep_last=4 * KiB, nvme_path=tmp_path)
        for pages in range(1, 12):  # other sizes every time
            with offload:
                chain(randn(pages, 1024), [nn.Parameter(torch.eye(1024, device=DEVICE)) for _ in range(3)])
        assert sum(crossing.pinned.values()) <= (32 + 4 * 11) * KiB
    weights = weights_of(60)
    with own_link():
        offload = small(min_nbytes=512, keep_last=2 * KiB, nvme_path=tmp_path)
        with offload:
            x, most = randn(16, 16), 0
            for weight in weights:
                x = (x @ weight).tanh()
                most = max(most, offload.host_nbytes)
            assert 0 < most <= 16 * KiB  # 8 windows, and a page is the least
        x.sum().backward()
        assert sum(size * len(idle) for size, idle in offload.pool.idle.items()) <= 24 * KiB
        assert nothing_left(offload)


def test_a_host_buffer_is_not_given_away_under_a_read(tmp_path: Path) -> None:
    wanted = in_order("together", None)
    nvme.can_bypass_cache(str(tmp_path))
    offload = small(keep_last=2 * KiB, nvme_path=tmp_path)
    with offload:
        outputs = chain(randn(8, 16), list(weights_of(20)))
    with slow("preadv", 0, 20):
        torch.autograd.grad(outputs[12].sum(), outputs[11])  # starts to fetch what comes before
        assert any(block.read is not None for block in offload.blocks.values())
        del outputs
        assert same(in_order("together", offload), wanted)


def test_what_could_not_be_read_can_be_read_later(tmp_path: Path) -> None:
    check_reading_again(tmp_path)


@pytest.mark.parametrize("call", ["pwritev", "preadv"])
def test_a_drive_that_refuses_is_an_error_and_never_a_wrong_gradient(call: str, tmp_path: Path) -> None:
    check_refusals(call, tmp_path)
