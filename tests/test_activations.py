"""What autograd saves comes back bit for bit from host memory and from files, in every order, and nothing of it stays behind."""

from __future__ import annotations

import contextlib
import copy
import gc
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import zk
from tests.adversary import adversarial_drive
from tests.models import GPT, batch, loss_of
from zk.activations import ActivationOffload
from zk.offload import nvme, stash
from zk.offload.streams import Event
from zk.offload.twins import AdversarialLink, ThrottledLink, pretend

pytestmark = pytest.mark.usefixtures("one_thread")

KiB = 1024


class Strict(AdversarialLink):
    """Also finds device memory that is given up before compute knows of its copy, and host memory unpinned before the host does."""

    def check(self) -> None:
        with self.lock:
            for copied in self.copies:
                unknown = self.known["compute"].get(copied.queue, 0) < copied.number
                device_end = copied.source if copied.queue == "down" else copied.target
                if unknown and sys.getrefcount(device_end) <= 3:  # the record's, this function's, and getrefcount's own
                    self.races.append(f"device memory of copy {copied.queue} {copied.number} was dropped before compute followed")

    def mark(self) -> Event:
        self.check()
        return super().mark()

    def finish(self) -> None:
        self.check()
        super().finish()

    def unpin(self, memory: Tensor) -> None:
        with self.lock:
            for copied in self.copies:
                host_end = copied.target if copied.queue == "down" else copied.source
                if host_end.data_ptr() == memory.data_ptr() and self.known["host"].get(copied.queue, 0) < copied.number:
                    self.races.append(f"the host memory of copy {copied.queue} {copied.number} was unpinned under it")
        super().unpin(memory)


class Lazy(AdversarialLink):
    """Copies at once and holds nothing; its events are done when somebody has waited for them."""

    class Event:
        def __init__(self, link: Lazy, nbytes: int) -> None:
            self.link, self.nbytes, self.done = link, nbytes, nbytes == 0
            link.pending += nbytes
            link.most_pending = max(link.most_pending, link.pending)

        def wait(self) -> None:
            if not self.done:
                self.done = True
                self.link.pending -= self.nbytes

    pending = most_pending = 0

    def mark(self) -> Event:
        return Lazy.Event(self, 0)

    def follow(self, event: Event) -> None:
        event.wait()

    def _copy(self, queue: str, target: Tensor, source: Tensor, after: object) -> Event:
        target.copy_(source)
        self.moved[queue] += source.nbytes
        return Lazy.Event(self, source.nbytes)


@contextlib.contextmanager
def strict() -> Iterator[Strict]:
    with pretend(Strict()) as link:
        yield link
        link.finish()
        assert not link.races, link.races[:3]


def nothing_left(offload: ActivationOffload) -> bool:
    gc.collect()
    queues = (offload.newest, offload.leaving, offload.landed, offload.here)
    nbytes = offload.kept_nbytes + offload.host_nbytes + offload.file_nbytes + sum(queue.nbytes for queue in queues)
    return nbytes == 0 and not any((offload.blocks, offload.by_storage, *queues)) and not (offload.files and offload.files.in_use)


def make(variant: str = "plain", layers: int = 3) -> GPT:
    torch.manual_seed(0)
    return GPT(variant, layers=layers)


def losses_and_grads(
    model: nn.Module, offload: contextlib.AbstractContextManager[object] | None, steps: int = 2, inside: bool = False
) -> list[Tensor]:
    """Of some forward and backward passes, the backward outside the context or inside."""
    found = []
    for step in range(steps):
        torch.manual_seed(step)
        with offload or contextlib.nullcontext():
            loss = loss_of(model, batch(step))
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        found.append(loss.detach().clone())
        found += [param.grad.clone() for param in model.parameters() if param.grad is not None]
    return found


def same(found: list[Tensor], wanted: list[Tensor]) -> bool:
    return len(found) == len(wanted) > 1 and all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def small(**options: object) -> ActivationOffload:
    """Everything of more than a few bytes moves."""
    return zk.offload_activations(**{"min_nbytes": 64, "keep_last": 4 * KiB, **options})  # type: ignore[arg-type]


# ---- exact, over the worst device ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inside", [False, True], ids=["after", "inside"])
@pytest.mark.parametrize("variant", ["plain", "tied", "frozen", "elsewhere", "checkpointed", "checkpointed_reentrant"])
def test_losses_and_gradients_are_those_without(variant: str, inside: bool) -> None:
    wanted = losses_and_grads(make(variant), None)
    with strict() as link:
        model, offload = make(variant), small(keep_last=2 * KiB)
        assert same(losses_and_grads(model, offload, inside=inside), wanted)
        assert link.moved["down"] == offload.offloaded_nbytes > 0 and link.moved["up"] > 0
        assert nothing_left(offload)


@pytest.mark.parametrize("keep_last", [0, 1, 700, 8 * KiB, 1 << 30])
def test_any_window_is_right(keep_last: int) -> None:
    wanted = losses_and_grads(make(), None)
    with strict() as link:
        offload = small(keep_last=keep_last)
        assert same(losses_and_grads(make(), offload), wanted) and nothing_left(offload)
        assert (link.moved["down"] == 0) == (keep_last == 1 << 30)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, "autocast"])
def test_other_precisions(dtype: torch.dtype | str) -> None:
    def run(offload: ActivationOffload | None) -> list[Tensor]:
        model = make("checkpointed") if dtype == "autocast" else make().to(dtype)  # type: ignore[arg-type]
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "autocast"):
            return losses_and_grads(model, offload)

    wanted = run(None)
    with strict():
        offload = small()
        assert same(run(offload), wanted) and offload.num_offloaded


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_dropout_is_recomputed_as_it_was(reentrant: bool | None) -> None:
    torch.manual_seed(3)
    layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5), nn.Tanh()) for _ in range(5))

    def run(offload: ActivationOffload | None) -> list[Tensor]:
        layers.zero_grad()
        torch.manual_seed(5)
        with offload or contextlib.nullcontext():
            x = torch.randn(8, 16, requires_grad=True) * 1
            for layer in layers:
                x = layer(x) if reentrant is None else checkpoint(layer, x, use_reentrant=reentrant)
        x.sum().backward()
        return [x.detach(), *[param.grad.clone() for param in layers.parameters()]]

    wanted = run(None)
    with strict():
        offload = small(keep_last=512)
        assert same(run(offload), wanted) and offload.num_offloaded > 3 and nothing_left(offload)


def test_what_checkpoint_saves_moves_and_what_it_does_not_save_does_not() -> None:
    for reentrant in ("", "_reentrant"):
        with strict():
            offload, model = small(keep_last=0), make("checkpointed" + reentrant, layers=6)
            with offload:
                loss = loss_of(model, batch(0))
            plain = small(keep_last=0)
            with plain:
                other = loss_of(make(layers=6), batch(0))
            assert 6 <= offload.num_offloaded < 20 < plain.num_offloaded
            del loss, other


def test_nothing_is_saved_under_no_grad() -> None:
    with strict(), small() as offload, torch.no_grad():
        make()(batch(0))
        assert not offload.count and nothing_left(offload)


# ---- any order -------------------------------------------------------------------------------------------------------------------


def chain(x: Tensor, weights: list[Tensor]) -> list[Tensor]:
    """Each layer saves its input and its output."""
    outputs = [x]
    for weight in weights:
        outputs.append((outputs[-1] @ weight).tanh())
    return outputs


def weights_of(count: int, width: int = 16) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(width, width, generator=generator) / 4) for _ in range(count)]


def in_order(order: str, offload: ActivationOffload | None) -> list[Tensor]:
    """Graphs of 12 layers, used in other ways than backwards once."""
    weights = weights_of(12)
    torch.manual_seed(2)
    inputs = [torch.randn(8, 16) for _ in range(3)]
    with offload or contextlib.nullcontext():
        graphs = [chain(x, list(weights)) for x in inputs]
    ends = [outputs[-1].square().sum() for outputs in graphs]
    grads: list[Tensor] = [end.detach() for end in ends]
    if order == "first graph first":
        for end in ends:
            end.backward()
    elif order == "together":
        torch.stack(ends).sum().backward()
    elif order == "retained":
        for _ in range(3):
            ends[1].backward(retain_graph=True)
        ends[0].backward()
        ends[1].backward()
    elif order == "parts":
        middle = graphs[2][6]
        grads += torch.autograd.grad(middle.sum(), weights[2:5], retain_graph=True)
        grads += torch.autograd.grad(graphs[2][9].sum(), [middle, weights[8]], retain_graph=True)
        grads += torch.autograd.grad(graphs[0][3].sum(), weights[:3])
        graphs[1].clear()
        ends[1] = ends[1].detach()
        ends[2].backward()
    elif order == "twice":
        with offload or contextlib.nullcontext():
            first = torch.autograd.grad(ends[0], weights, create_graph=True)
            penalty = torch.stack([grad.square().sum() for grad in first]).sum()
        (penalty + ends[1]).backward()
    return grads + [weight.grad.clone() for weight in weights if weight.grad is not None]


@pytest.mark.parametrize("keep_last", [0, 2 * KiB])
@pytest.mark.parametrize("order", ["first graph first", "together", "retained", "parts", "twice"])
def test_other_orders_of_backward_are_right(order: str, keep_last: int) -> None:
    wanted = in_order(order, None)
    with strict():
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
    with strict():
        offload = small()
        assert same(run(offload), wanted) and nothing_left(offload)


def test_threads_share_a_context() -> None:
    def run(offload: ActivationOffload | None, found: dict[int, list[Tensor]], key: int) -> None:
        torch.manual_seed(0)
        found[key] = losses_and_grads(models[key], offload, steps=6)

    models, wanted, found = [make() for _ in range(4)], dict[int, list[Tensor]](), dict[int, list[Tensor]]()
    run(None, wanted, 0)
    models[0] = make()
    with pretend(ThrottledLink(1e9)):
        offload = small()
        threads = [threading.Thread(target=run, args=(offload, found, key)) for key in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(same(found[key], wanted[0]) for key in range(4)) and offload.num_offloaded and nothing_left(offload)


# ---- memory ----------------------------------------------------------------------------------------------------------------------


def alive(storages: list[StorageWeakRef]) -> int:
    return sum(not storage.expired() for storage in storages)


def note_outputs(x: Tensor, weights: list[nn.Parameter], seen: list[StorageWeakRef], most: list[int]) -> Tensor:
    for weight in weights:
        x = (x @ weight).tanh()
        seen.append(StorageWeakRef(x.untyped_storage()))
        most[0] = max(most[0], alive(seen))
    return x


def test_device_memory_falls_to_the_window_and_copies_are_bounded() -> None:
    weights, x = weights_of(40), torch.randn(16, 16)  # 1 KiB for each output
    for offload_it in (False, True):
        with pretend(Lazy()) as link:
            seen: list[StorageWeakRef] = []
            most = [0]
            offload = small(min_nbytes=512, keep_last=4 * KiB)
            with offload if offload_it else contextlib.nullcontext():
                y = note_outputs(x, weights, seen, most)
                assert offload.kept_nbytes <= 8 * KiB
            assert most[0] <= (4 + 4 + 2 if offload_it else 40) and (offload_it or most[0] == 40)
            assert link.most_pending <= 5 * KiB
            link.pending = link.most_pending = 0
            device = [0]

            def note(_grad: Tensor, device: list[int] = device, offload: ActivationOffload = offload) -> None:
                device[0] = max(device[0], offload.kept_nbytes + offload.here.nbytes)

            for weight in weights:
                weight.register_hook(note)
            y.sum().backward()
            assert device[0] <= (4 + 4 + 4 + 1) * KiB and link.most_pending <= 6 * KiB
            assert nothing_left(offload)


class Prompt(Lazy):
    """Its copies are done at once."""

    def _copy(self, queue: str, target: Tensor, source: Tensor, after: object) -> Event:
        super()._copy(queue, target, source, after).wait()
        return Lazy.Event(self, 0)


def test_what_has_arrived_in_host_memory_is_off_the_device_at_once() -> None:
    with pretend(Prompt()), small(min_nbytes=512, keep_last=4 * KiB) as offload:
        outputs = chain(torch.randn(16, 16), list(weights_of(20)))
        assert offload.kept_nbytes == offload.newest.nbytes <= 4 * KiB
        del outputs


def test_copies_ahead_of_use_are_bounded_whatever_is_used() -> None:
    weights = weights_of(10)
    with pretend(Lazy()):
        offload = small(min_nbytes=512, keep_last=4 * KiB)
        with offload:
            graphs = [chain(torch.randn(16, 16), list(weights)) for _ in range(12)]
        for index in (0, 4, 8, 1, 5, 9, 2, 6, 10, 3, 7, 11):
            torch.autograd.grad(graphs[index][8].sum(), graphs[index][7], retain_graph=True)  # others come ahead, in vain
            assert offload.here.nbytes <= 6 * KiB
        late = offload.num_late
        for _ in range(3):
            for graph in reversed(graphs):
                torch.autograd.grad(graph[-1].sum(), weights, retain_graph=True)
                assert offload.here.nbytes <= 6 * KiB
        assert offload.num_late - late <= 6, "what came in vain does not stay in the way"


def test_uploads_are_under_way_before_they_are_needed() -> None:
    weights, x = weights_of(40), torch.randn(16, 16)
    for keep_last in (4 * KiB, 0):
        with pretend(Lazy()), small(min_nbytes=512, keep_last=keep_last) as offload:
            chain(x, list(weights))[-1].sum().backward()
            assert offload.num_offloaded > 30 and offload.num_uploaded == offload.num_ahead + offload.num_late
            assert offload.num_late == 0 and offload.num_ahead > 25


def test_each_storage_moves_once_however_many_views_of_it_are_saved() -> None:
    weight = nn.Parameter(torch.randn(16, 48))
    with strict() as link, small(min_nbytes=512, keep_last=0) as offload:
        h = torch.randn(16, 16) @ weight  # leaves its 3 KiB storage to three views; the input is 1 KiB
        q, k, v = h.chunk(3, dim=-1)
        end = (q * k).sum() + (k * v).sum() + (h.t() * h.t()).sum() + torch.randn(16, 16, requires_grad=True).exp().sum()
        end.backward()
        assert (offload.num_offloaded, offload.num_uploaded) == (3, 2) and link.moved["down"] == 5 * KiB


def test_what_is_saved_again_is_among_the_newest_again() -> None:
    a, b, c = (torch.randn(16, 16) for _ in range(3))
    with strict(), small(keep_last=2 * KiB) as offload:
        y = Saves.apply(torch.ones(1, requires_grad=True), [], a, b, a, c)
        moved = [offload.by_storage[tensor.untyped_storage()._cdata] not in offload.newest for tensor in (a, b, c)]
        assert moved == [False, True, False]
        del y


def test_a_graph_that_is_dropped_gives_everything_back() -> None:
    with strict() as link:
        offload = small(keep_last=2 * KiB)
        for used in (False, True):
            with offload:
                x = torch.randn(4, 16) @ torch.randn(16, 16)
                outputs = chain(x, list(weights_of(9)))
                y = outputs[-1].exp().softmax(-1)  # both save what they return
            storage = StorageWeakRef(y.untyped_storage())
            if used:  # uploads are under way when the rest is dropped
                torch.autograd.grad(outputs[5].sum(), outputs[3], retain_graph=True)
            del x, y, outputs
            assert nothing_left(offload)
            link.finish()
            assert storage.expired()
        with small(min_nbytes="1MiB"):  # what is left alone
            y = torch.randn(8, 8, requires_grad=True).exp()
        storage = StorageWeakRef(y.untyped_storage())
        del y
        assert storage.expired()
        gone = weakref.ref(offload)
        del offload
        gc.collect()
        assert gone() is None


def test_an_error_inside_gives_everything_back() -> None:
    with strict(), contextlib.suppress(KeyError):
        offload = small(keep_last=0)
        for _ in range(2):
            try:
                with offload:
                    loss_of(make(), batch(0))
                    raise KeyError("the user's")
            except KeyError:
                pass
            assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
            assert nothing_left(offload)


def test_host_memory_is_recycled_and_what_is_not_needed_any_more_is_unpinned() -> None:
    with strict() as link:
        losses_and_grads(make(layers=4), small(keep_last=0), steps=1)
        pinned = dict(link.pinned)
        for _ in range(3):
            losses_and_grads(make(layers=4), small(keep_last=0), steps=1)
        assert link.pinned == pinned and pinned
        offload = small(keep_last=0)
        for _ in range(4 * stash._AGE):
            with offload:
                graph = chain(torch.randn(32, 64), list(weights_of(2, 64)))
            del graph
        assert 0 < len(link.pinned) < len(pinned) / 2


def test_memory_that_cannot_be_pinned_is_used_as_it_is_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    wanted = losses_and_grads(make(), None)
    stash._warn_pageable.cache_clear()
    with caplog.at_level(logging.WARNING, "zk"), pretend(AdversarialLink(refuses_to_pin="no more locked memory")):
        assert same(losses_and_grads(make(), small()), wanted)
    assert sum("no more locked memory" in record.message for record in caplog.records) == 1


# ---- what is saved, to the bit -----------------------------------------------------------------------------------------------------


class Saves(torch.autograd.Function):
    """Saves tensors; its backward shows what came back."""

    @staticmethod
    def forward(ctx, x, found, *tensors):  # type: ignore[no-untyped-def]
        ctx.found = found
        ctx.save_for_backward(*tensors)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        ctx.found += ctx.saved_tensors
        return grad, None, *[None] * len(ctx.saved_tensors)


def shapes_that_go_wrong() -> list[Tensor]:
    x, bits = torch.randn(12, 10), torch.randint(0, 255, (1000,), dtype=torch.uint8)
    return [
        x, x.t(), x[3:], x[:, 2:7], torch.randn(1, 40).expand(30, 40), torch.randn(6, 5, 4).permute(2, 0, 1), x.view(torch.int32),
        torch.randn(50).bool(), torch.arange(77), torch.randn(9, 9, dtype=torch.complex64), torch.randn(99, dtype=torch.bfloat16)[1:],
        bits.view(torch.float8_e4m3fn), torch.randn(3, 2, 5, 5).to(memory_format=torch.channels_last), torch.randn(60).as_strided((4, 9), (7, 2), 3),
    ]  # fmt: skip


@pytest.mark.parametrize("where", ["host", "nvme"])
def test_tensors_come_back_as_they_were(where: str, tmp_path: Path) -> None:
    tensors, found = shapes_that_go_wrong(), list[Tensor]()
    copies = [tensor.clone(memory_format=torch.preserve_format) for tensor in tensors]
    wanted = [(tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()) for tensor in tensors]
    with contextlib.ExitStack() as stack:
        if where == "host":
            stack.enter_context(strict())
        else:
            stack.enter_context(adversarial_drive())
        offload = small(min_nbytes=1, keep_last=0, nvme_path=tmp_path if where == "nvme" else None)
        with offload:
            y = Saves.apply(torch.ones(1, requires_grad=True), found, *tensors)
        del tensors
        y.backward()
        assert offload.num_offloaded == len(wanted) - 4  # four are views of the first
        assert [(tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()) for tensor in found] == wanted
        for tensor, saved in zip(found, copies, strict=True):
            assert torch.equal(tensor.contiguous().view(torch.uint8), saved.contiguous().view(torch.uint8))
        del found, tensor, y
        assert nothing_left(offload)


@pytest.mark.filterwarnings("ignore::UserWarning")  # quantized tensors
def test_what_must_or_had_better_stay_is_left_alone() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16))
    large, leaf = torch.randn(100, 100), torch.randn(16, 16, requires_grad=True)
    stays = [
        leaf, leaf.t(), model[0].weight, model[0].weight.t(), model[0].weight.detach(), model[1].running_mean, large[:20],
        torch.randn(16, 16).to_sparse(), torch.randn(4), nn.Parameter(torch.randn(16, 16), requires_grad=False),
        nn.Parameter(torch.randn(16, 16), requires_grad=False).t(),
        torch.randn(16, 16, device="meta"), torch.randn(16, 16, dtype=torch.complex64).conj(), torch.empty(0),
        torch.quantize_per_tensor(torch.randn(16, 16), 0.1, 0, torch.quint8), torch.randn(16, 16).as_subclass(Own),
    ]  # fmt: skip
    with strict():
        for tensor in stays:
            found: list[Tensor] = []
            with small(model=model, min_nbytes=64, keep_last=0) as offload:
                Saves.apply(torch.ones(1, requires_grad=True), found, tensor).backward()
            assert not offload.num_offloaded and offload.count == 0, tensor
            assert found[0].shape == tensor.shape and type(found[0]) in (type(tensor), Tensor)
        with small(min_nbytes=64, keep_last=0) as offload:
            Saves.apply(torch.ones(1, requires_grad=True), [], large[:20], large[:50], large[:20])
        assert (offload.count, offload.num_offloaded) == (2, 1), "a small view goes along with a storage that moves anyway"


class Own(Tensor):
    pass


@pytest.mark.parametrize(("keep_last", "min_nbytes"), [(0, 64), (1 << 20, 64), (0, 1 << 20)], ids=["moved", "newest", "left alone"])
def test_writing_to_a_saved_tensor_is_an_error_in_backward(keep_last: int, min_nbytes: int) -> None:
    with pretend(AdversarialLink()), small(min_nbytes=min_nbytes, keep_last=keep_last):  # (what is copied meanwhile does not matter)
        x = torch.randn(16, 16, requires_grad=True)
        y = x * 1
        z = y * y
        y.add_(1)
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
    with pretend(AdversarialLink()), small(keep_last=keep_last):
        x = torch.zeros(16, 16)
        first = Saves.apply(torch.ones(1, requires_grad=True), found, x)
        others = chain(torch.randn(16, 16), list(weights_of(5)))  # push it out
        x.add_(1)
        second = Saves.apply(torch.ones(1, requires_grad=True), found, x)
        others += chain(torch.randn(16, 16), list(weights_of(5)))
        second.backward()
        assert torch.equal(found[0], torch.ones(16, 16))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            first.backward()


def test_a_storage_that_was_resized_is_saved_as_it_is() -> None:
    found: list[Tensor] = []
    with pretend(Lazy()), small(keep_last=0):
        x = torch.empty(0).set_(torch.ones(64).untyped_storage(), 0, (64,))
        first = Saves.apply(torch.ones(1, requires_grad=True), [], x)
        x.untyped_storage().resize_(4 * KiB)
        longer = torch.empty(0).set_(x.untyped_storage(), 0, (KiB,)).fill_(2)
        longer = torch.empty(0).set_(x.untyped_storage(), 0, (KiB,))
        assert longer._version == x._version
        second = Saves.apply(torch.ones(1, requires_grad=True), found, longer)
        others = chain(torch.randn(16, 16), list(weights_of(5)))
        second.backward()
        assert torch.equal(found[0], torch.full((KiB,), 2.0))
        del first, others


# ---- beside other hooks ------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def counted(packed: list[int]) -> Iterator[None]:
    """Hooks that note the storages of what they are given."""

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor.untyped_storage()._cdata)
        return tensor.detach() * 2 if tensor.is_floating_point() else tensor.detach()  # (seen if not undone)

    with saved_tensors_hooks(pack, lambda tensor: tensor / 2 if tensor.is_floating_point() else tensor):
        yield


def test_what_is_left_alone_goes_on_to_the_hooks_around() -> None:
    wanted, packed = losses_and_grads(make(), None), list[int]()
    with strict():
        offload = small(min_nbytes=1500, keep_last=2 * KiB)
        with counted(packed):
            assert same(losses_and_grads(make(), offload), wanted)
        assert offload.num_offloaded and packed
        with torch.autograd.graph.save_on_cpu():
            assert same(losses_and_grads(make(), offload), wanted)
        assert nothing_left(offload)


def test_contexts_nest() -> None:
    wanted = losses_and_grads(make(), None)
    with strict():
        outer, inner = small(), small(min_nbytes=1500)
        with outer, outer:
            assert same(losses_and_grads(make(), inner), wanted)
        assert outer.num_offloaded and inner.num_offloaded and nothing_left(outer) and nothing_left(inner)


class Inside(nn.Module):
    """Enters the context within its forward."""

    def __init__(self, model: nn.Module, offload: Callable[[], contextlib.AbstractContextManager[object]]) -> None:
        super().__init__()
        self.model, self.offload = model, offload

    def forward(self, ids: Tensor) -> Tensor:
        with self.offload():
            return self.model(ids)  # type: ignore[no-any-return]


def train(model: nn.Module, around: contextlib.AbstractContextManager[object], steps: int = 3, **options: object) -> list[Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
    with zk.ZeroOptimizer(model, optimizer, **options) as zero:  # type: ignore[arg-type]
        for step in range(steps):
            with around:
                loss = loss_of(model, batch(step))
            loss.backward()
            zero.step()
            zero.zero_grad()
            found.append(loss.detach().clone())
        with zk.gather(model.parameters()):
            return found + [param.detach().clone() for param in model.parameters()]


# (alone on a CPU, stage 3 gathers and releases only what rests in a file)
STAGES = [
    {"stage": 2, "optimizer_tier": "host"},
    {"stage": 3, "param_tier": "host", "optimizer_tier": "host"},
    {"stage": 3, "param_tier": "nvme", "optimizer_tier": "nvme"},
]


@pytest.mark.parametrize("variant", ["plain", "checkpointed", "checkpointed_reentrant", "elsewhere"])
@pytest.mark.parametrize("options", STAGES, ids=["stage2", "stage3", "stage3-nvme"])
def test_training_with_zero_is_the_same_with_activations_on_nvme(options: dict[str, object], variant: str, tmp_path: Path) -> None:
    options = {**options, "nvme_path": tmp_path} if "nvme" in options.values() else options
    wanted = train(make(variant), contextlib.nullcontext(), **options)
    with adversarial_drive():
        offload = small(nvme_path=tmp_path, min_nbytes=512)
        assert same(train(make(variant), offload, **options), wanted)
        assert offload.num_offloaded and nothing_left(offload)
        inside = small(nvme_path=tmp_path, min_nbytes=512)
        assert same(train(Inside(make(variant), lambda: inside), contextlib.nullcontext(), **options), wanted)
        assert inside.num_offloaded and nothing_left(inside)


@pytest.mark.parametrize("variant", ["plain", "checkpointed", "checkpointed_reentrant"])
@pytest.mark.parametrize("options", STAGES[:2], ids=["stage2", "stage3"])
def test_training_with_zero_is_the_same_with_both_on_one_device(options: dict[str, object], variant: str) -> None:
    wanted = train(make(variant), contextlib.nullcontext(), **options)
    for inside in (False, True):
        with pretend(AdversarialLink()) as link:  # (``Strict`` counts references, and the optimizer's are views of what it keeps)
            offload = small()
            model, around = (Inside(make(variant), lambda o=offload: o), contextlib.nullcontext()) if inside else (make(variant), offload)  # type: ignore[misc]
            assert same(train(model, around, **options), wanted)  # type: ignore[arg-type]
            link.finish()
            assert not link.races, link.races[:3]
            assert offload.num_offloaded and nothing_left(offload)


class Ends(nn.Module):
    """Returns what its last function saves."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(ids[:, :-1]).softmax(-1)  # type: ignore[no-any-return]


def test_the_hooks_of_stage_3_pass_on_what_is_not_theirs_and_keep_what_is(tmp_path: Path) -> None:
    packed: list[int] = []
    model, plain = Ends(make()), Ends(make())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with zk.ZeroOptimizer(model, optimizer, stage=3, param_tier="nvme", optimizer_tier="nvme", nvme_path=tmp_path) as zero:
        with counted(packed):
            y = model(batch(0))
        assert torch.equal(y, plain(batch(0))) and len(packed) > 20
        assert zero.partition.by_storage and not set(packed) & zero.partition.by_storage.keys() and zero.partition.below is None
        y.square().sum().backward()
        assert all(params.state.name == "RELEASED" for params in zero.partition.params)
        zero.zero_grad()
        y = model(batch(0))
        storage = StorageWeakRef(y.untyped_storage())
        del y
        assert storage.expired(), "a graph that is dropped without a backward is gone"
        with pretend(AdversarialLink()), small(keep_last=0) as offload, zk.gather(model.parameters()):
            z = Saves.apply(torch.ones(1, requires_grad=True), [], model.model.blocks[0].qkv.weight.detach())  # type: ignore[union-attr]
            assert not offload.count, "a detached parameter is known by its storage"
            del z


# ---- files -------------------------------------------------------------------------------------------------------------------------


def test_where_device_and_host_are_one_and_no_file_is_given_nothing_happens() -> None:
    with zk.offload_activations(min_nbytes=1, keep_last=0) as offload:
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        loss_of(make(), batch(0)).backward()
    assert not offload.moves and offload.num_offloaded == 0


@pytest.mark.parametrize("keep_last", [0, 4 * KiB])
@pytest.mark.parametrize("link", ["joined", "adversarial", "late"])
def test_files_hold_what_memory_does_not(link: str, keep_last: int, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    wanted, orders = losses_and_grads(make(), None), {order: in_order(order, None) for order in ("parts", "retained", "together")}
    with contextlib.ExitStack() as stack:
        if link != "joined":
            stack.enter_context(strict())
        if link != "adversarial":
            stack.enter_context(adversarial_drive())
        stack.enter_context(mock.patch.object(stash, "_SEGMENT_NBYTES", (16 * KiB, 128 * KiB)))
        offload = small(keep_last=keep_last, nvme_path=[tmp_path / "a", tmp_path / "b"])
        for inside in (False, True):
            assert same(losses_and_grads(make(), offload, inside=inside), wanted)
        for order, result in orders.items():
            assert same(in_order(order, offload), result), order
        assert offload.files and len(offload.files.files) > 2 and nothing_left(offload)
        assert offload.files.nbytes < offload.num_offloaded * nvme.ALIGN / 2, "places are used again"
        assert len(os.listdir(tmp_path / "a")) == len(os.listdir(tmp_path / "b")) == 1
        del offload
        gc.collect()
        assert not os.listdir(tmp_path / "a") and not os.listdir(tmp_path / "b")


def test_host_memory_is_bounded_with_files(tmp_path: Path) -> None:
    weights = weights_of(60)
    with pretend(Lazy()) as link:
        offload = small(min_nbytes=512, keep_last=4 * KiB, nvme_path=tmp_path)
        for pages in range(1, 12):  # other sizes every time
            with offload:
                chain(torch.randn(pages, 1024), [nn.Parameter(torch.eye(1024)) for _ in range(3)])
        assert sum(link.pinned.values()) <= (32 + 4 * 11) * KiB
    with pretend(Lazy()):
        offload = small(min_nbytes=512, keep_last=2 * KiB, nvme_path=tmp_path)
        with offload:
            x, most = torch.randn(16, 16), 0
            for weight in weights:
                x = (x @ weight).tanh()
                most = max(most, offload.host_nbytes)
            assert 0 < most <= 16 * KiB  # 8 windows, and a page is the least
        x.sum().backward()
        assert sum(size * len(idle) for size, idle in offload.pool.idle.items()) <= 24 * KiB
        assert nothing_left(offload)


def test_writes_under_way_are_bounded_where_device_and_host_are_one(tmp_path: Path) -> None:
    with adversarial_drive():
        offload, seen, most = small(min_nbytes=512, keep_last=4 * KiB, nvme_path=tmp_path), list[StorageWeakRef](), [0]
        with offload:
            y = note_outputs(torch.randn(16, 16), weights_of(60), seen, most)
        assert most[0] <= 4 + 4 + 3
        y.sum().backward()
        assert nothing_left(offload)


@contextlib.contextmanager
def slow(call: str, first: int, count: int) -> Iterator[None]:
    """Some of the transfers take their time."""
    really, numbers = getattr(nvme.SYSTEM, call), iter(range(1 << 30))

    def move(*args: object) -> int:
        if first <= next(numbers) < first + count:
            time.sleep(0.1)
        return really(*args)  # type: ignore[no-any-return]

    with mock.patch.object(nvme.SYSTEM, call, move):
        yield


def test_a_place_is_not_given_away_under_a_write(tmp_path: Path) -> None:
    nvme.can_bypass_cache(str(tmp_path))
    offload, found = small(keep_last=0, nvme_path=tmp_path), list[Tensor]()
    with slow("pwritev", 0, 1), offload:
        Saves.apply(torch.ones(1, requires_grad=True), [], torch.full((64, 64), -1.0))  # dropped at once, while it is written
        y = Saves.apply(torch.ones(1, requires_grad=True), found, torch.full((64, 64), 1.0))
        z = Saves.apply(torch.ones(1, requires_grad=True), [], torch.full((64, 64), 2.0))
        time.sleep(0.2)
    y.backward()
    assert torch.equal(found[0], torch.full((64, 64), 1.0)) and offload.num_late == 1
    del z


def test_a_host_buffer_is_not_given_away_under_a_read(tmp_path: Path) -> None:
    wanted = in_order("together", None)
    nvme.can_bypass_cache(str(tmp_path))
    with strict():
        offload = small(keep_last=2 * KiB, nvme_path=tmp_path)
        with offload:
            outputs = chain(torch.randn(8, 16), list(weights_of(20)))
        with slow("preadv", 0, 20):
            torch.autograd.grad(outputs[12].sum(), outputs[11])  # starts to fetch what comes before
            assert any(block.read is not None for block in offload.blocks.values())
            del outputs
            assert same(in_order("together", offload), wanted)


def test_what_could_not_be_read_can_be_read_later(tmp_path: Path) -> None:
    def grads(offload: ActivationOffload | None) -> Iterator[list[Tensor]]:
        torch.manual_seed(1)
        weights = weights_of(12)
        with offload or contextlib.nullcontext():
            end = chain(torch.randn(8, 16), list(weights))[-1].sum()
        while True:
            yield list(torch.autograd.grad(end, weights, retain_graph=True))

    def refuse(*_: object) -> int:
        raise OSError(5, "the drive is gone")

    nvme.can_bypass_cache(str(tmp_path))
    for around in (contextlib.nullcontext, strict):
        with around():
            end = grads(small(keep_last=0, nvme_path=tmp_path))
            wanted = next(grads(None))
            assert same(next(end), wanted)
            with torch.no_grad():
                weights = weights_of(12)
            offload = small(keep_last=0, nvme_path=tmp_path)
            with offload:
                torch.manual_seed(1)
                loss = chain(torch.randn(8, 16), list(weights))[-1].sum()
            with mock.patch.object(nvme.SYSTEM, "preadv", refuse), pytest.raises(OSError, match="the drive is gone"):
                torch.autograd.grad(loss, weights, retain_graph=True)
            assert same(list(torch.autograd.grad(loss, weights)), wanted)
            del loss, end


@pytest.mark.parametrize("call", ["pwritev", "preadv"])
@pytest.mark.parametrize("joined", [True, False], ids=["joined", "device"])
def test_a_drive_that_refuses_is_an_error_and_never_a_wrong_gradient(call: str, joined: bool, tmp_path: Path) -> None:
    nvme.can_bypass_cache(str(tmp_path))

    def refuse(*_: object) -> int:
        raise OSError(5, "the drive is gone")

    with contextlib.nullcontext() if joined else strict():
        offload = small(keep_last=0, nvme_path=tmp_path)
        with mock.patch.object(nvme.SYSTEM, call, refuse), pytest.raises(OSError, match="the drive is gone"):
            losses_and_grads(make(), offload)
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        assert nothing_left(offload)
        assert same(losses_and_grads(make(), offload), losses_and_grads(make(), None)), "and it works again"


# ---- arguments ---------------------------------------------------------------------------------------------------------------------


def test_bad_arguments_are_refused(tmp_path: Path) -> None:
    for options, error, message in (
        ({"model": 3}, TypeError, "model must be an nn.Module"),
        ({"min_nbytes": -1}, ValueError, "min_nbytes must be more than zero bytes; got -1"),
        ({"min_nbytes": 1.5}, TypeError, "min_nbytes must be a number of bytes"),
        ({"keep_last": "many"}, ValueError, "keep_last must be a number of bytes or a string"),
        ({"nvme_path": 3}, TypeError, "nvme_path must be a path"),
        ({"nvme_path": []}, ValueError, "nvme_path must name at least one folder"),
        ({"nvme_path": tmp_path / "missing"}, OSError, "nvme_path must be an existing folder"),
        ({"device": "nowhere"}, RuntimeError, "nowhere"),
    ):
        with pytest.raises(error, match=message):
            zk.offload_activations(**options)  # type: ignore[arg-type]
    assert zk.offload_activations(copy.deepcopy(make()), device="cpu", keep_last="1GiB").keep_last == 1 << 30
