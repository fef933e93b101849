"""Activations in files, where device memory is host memory: bit for bit, in every order, and nothing of them stays behind.

What test_activations_device.py does on a GPU as well is here, too.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

import zk
from benchmarks.throttled import ThrottledLink, pretend
from tests.adversary import adversarial_drive
from tests.models import DEVICE, GPT, batch, loss_of
from zk.nn.activations import ActivationOffload
from zk.offload import nvme, stash

KiB = 1024


def nothing_left(offload: ActivationOffload) -> bool:
    """Check that nothing is kept; torch's thread of a device lets go of what an error held when it gets to it, after the error was raised."""
    queues = (offload.newest, offload.leaving, offload.landed, offload.here)
    deadline = time.monotonic() + 20
    while True:
        gc.collect()
        nbytes = offload.kept_nbytes + offload.host_nbytes + offload.file_nbytes + sum(queue.nbytes for queue in queues)
        if nbytes == 0 and not any((offload.blocks, offload.by_storage, *queues)) and not (offload.files and offload.files.in_use):
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)


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


# ---- any order -------------------------------------------------------------------------------------------------------------------


def chain(x: Tensor, weights: list[Tensor]) -> list[Tensor]:
    """Each layer saves its input and its output."""
    outputs = [x]
    for weight in weights:
        outputs.append((outputs[-1] @ weight).tanh())
    return outputs


def weights_of(count: int, width: int = 16) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter((torch.randn(width, width, generator=generator) / 4).to(DEVICE)) for _ in range(count)]


def in_order(order: str, offload: ActivationOffload | None) -> list[Tensor]:
    """Graphs of 12 layers, used in other ways than backwards once."""
    weights = weights_of(12)
    torch.manual_seed(2)
    inputs = [torch.randn(8, 16, device=DEVICE) for _ in range(3)]
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


def check_shapes(offload: ActivationOffload) -> None:
    """Save tensors of all kinds, and compare what comes back."""
    with DEVICE:
        tensors, found, one = shapes_that_go_wrong(), list[Tensor](), torch.ones(1, requires_grad=True)
    copies = [tensor.clone(memory_format=torch.preserve_format) for tensor in tensors]
    wanted = [(tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()) for tensor in tensors]
    with offload:
        y = Saves.apply(one, found, *tensors)
    del tensors
    y.backward()
    assert offload.num_offloaded == len(wanted) - 4  # four are views of the first
    assert [(tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()) for tensor in found] == wanted
    for tensor, saved in zip(found, copies, strict=True):
        assert torch.equal(tensor.contiguous().view(torch.uint8), saved.contiguous().view(torch.uint8))
    del found, tensor, y
    assert nothing_left(offload)


def test_tensors_come_back_from_files_as_they_were(tmp_path: Path) -> None:
    with adversarial_drive():
        check_shapes(small(min_nbytes=1, keep_last=0, nvme_path=tmp_path))


class Own(Tensor):
    pass


@pytest.mark.filterwarnings("ignore::UserWarning")  # quantized tensors
def test_what_must_or_had_better_stay_is_left_alone(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16))
    large, leaf = torch.randn(100, 100), torch.randn(16, 16, requires_grad=True)
    stays = [
        leaf, leaf.t(), model[0].weight, model[0].weight.t(), model[0].weight.detach(), model[1].running_mean, large[:20],
        torch.randn(16, 16).to_sparse(), torch.randn(4), nn.Parameter(torch.randn(16, 16), requires_grad=False),
        nn.Parameter(torch.randn(16, 16), requires_grad=False).t(),
        torch.randn(16, 16, device="meta"), torch.randn(16, 16, dtype=torch.complex64).conj(), torch.empty(0),
        torch.quantize_per_tensor(torch.randn(16, 16), 0.1, 0, torch.quint8), torch.randn(16, 16).as_subclass(Own),
    ]  # fmt: skip
    for tensor in stays:
        found: list[Tensor] = []
        with small(model=model, min_nbytes=64, keep_last=0, nvme_path=tmp_path) as offload:
            Saves.apply(torch.ones(1, requires_grad=True), found, tensor).backward()
        assert not offload.num_offloaded and offload.count == 0, tensor
        assert found[0].shape == tensor.shape and type(found[0]) in (type(tensor), Tensor)
    with small(min_nbytes=64, keep_last=0, nvme_path=tmp_path) as offload:
        Saves.apply(torch.ones(1, requires_grad=True), [], large[:20], large[:50], large[:20])
    assert (offload.count, offload.num_offloaded) == (2, 1), "a small view goes along with a storage that moves anyway"


def test_a_storage_that_was_resized_is_saved_as_it_is(tmp_path: Path) -> None:
    found: list[Tensor] = []
    with adversarial_drive(), small(keep_last=4 * KiB, nvme_path=tmp_path):
        x = torch.empty(0).set_(torch.ones(64).untyped_storage(), 0, (64,))
        first = Saves.apply(torch.ones(1, requires_grad=True), [], x)
        x.untyped_storage().resize_(4 * KiB)
        longer = torch.empty(0).set_(x.untyped_storage(), 0, (KiB,)).fill_(2)
        longer = torch.empty(0).set_(x.untyped_storage(), 0, (KiB,))
        assert longer._version == x._version
        second = Saves.apply(torch.ones(1, requires_grad=True), found, longer)
        others = chain(torch.randn(16, 16), list(weights_of(9)))  # push both out
        second.backward()
        assert torch.equal(found[0], torch.full((KiB,), 2.0))
        del first, others


# ---- beside other hooks ------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def doubled(packed: list[int]) -> Iterator[None]:
    """Hooks that note the storages of what they are given."""

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor.untyped_storage()._cdata)
        return tensor.detach() * 2 if tensor.is_floating_point() else tensor.detach()  # (seen if not undone)

    with saved_tensors_hooks(pack, lambda tensor: tensor / 2 if tensor.is_floating_point() else tensor):
        yield


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


@pytest.mark.parametrize(
    ("number", "variant"), [(0, "plain"), (1, "elsewhere"), (1, "checkpointed"), (2, "plain"), (2, "checkpointed_reentrant")], ids=str
)
def test_training_with_zero_is_the_same_with_activations_on_nvme(number: int, variant: str, tmp_path: Path) -> None:
    options = {**STAGES[number], "nvme_path": tmp_path} if "nvme" in STAGES[number].values() else STAGES[number]
    wanted = train(make(variant), contextlib.nullcontext(), **options)
    with adversarial_drive():
        offload = small(nvme_path=tmp_path, min_nbytes=512)
        assert same(train(make(variant), offload, **options), wanted)
        assert offload.num_offloaded and nothing_left(offload)
        inside = small(nvme_path=tmp_path, min_nbytes=512)
        assert same(train(Inside(make(variant), lambda: inside), contextlib.nullcontext(), **options), wanted)
        assert inside.num_offloaded and nothing_left(inside)


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
        with doubled(packed):
            y = model(batch(0))
        assert torch.equal(y, plain(batch(0))) and len(packed) > 20
        assert zero.partition.by_storage and not set(packed) & zero.partition.by_storage.keys() and zero.partition.saved_hooks is None
        y.square().sum().backward()
        assert all(store.state.name == "RELEASED" for store in zero.partition.stores.values())
        zero.zero_grad()
        y = model(batch(0))
        storage = StorageWeakRef(y.untyped_storage())
        del y
        assert storage.expired(), "a graph that is dropped without a backward is gone"
        with small(keep_last=0, nvme_path=tmp_path) as offload, zk.gather(model.parameters()):
            z = Saves.apply(torch.ones(1, requires_grad=True), [], model.model.blocks[0].qkv.weight.detach())  # type: ignore[union-attr]
            assert not offload.count, "a detached parameter is known by its storage"
            del z


# ---- files -------------------------------------------------------------------------------------------------------------------------


def test_where_device_and_host_are_one_and_no_file_is_given_nothing_happens() -> None:
    with zk.offload_activations(min_nbytes=1, keep_last=0) as offload:
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        loss_of(make(), batch(0)).backward()
    assert not offload.moves and offload.num_offloaded == 0


def check_files(keep_last: int, folder: Path) -> None:
    """Train, and use graphs in several orders, with activations in files of two folders."""
    drives = folder / "a", folder / "b"
    for drive in drives:
        drive.mkdir()
    wanted, orders = losses_and_grads(make(), None), {order: in_order(order, None) for order in ("parts", "retained", "together")}
    with mock.patch.object(stash, "_SEGMENT_NBYTES", (16 * KiB, 128 * KiB)):
        offload = small(keep_last=keep_last, nvme_path=drives)
        for inside in (False, True):
            assert same(losses_and_grads(make(), offload, inside=inside), wanted)
        for order, result in orders.items():
            assert same(in_order(order, offload), result), order
        assert offload.files and len(offload.files.files) > 2 and nothing_left(offload)
        assert offload.files.nbytes < offload.num_offloaded * nvme.ALIGN / 2, "places are used again"
        assert [len(os.listdir(drive)) for drive in drives] == [1, 1]
        del offload
        gc.collect()
        assert [os.listdir(drive) for drive in drives] == [[], []]


@pytest.mark.parametrize("keep_last", [0, 4 * KiB])
def test_files_hold_what_memory_does_not(keep_last: int, tmp_path: Path) -> None:
    with adversarial_drive():
        check_files(keep_last, tmp_path)


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


def refuse(*_: object) -> int:
    raise OSError(5, "the drive is gone")


def check_reading_again(folder: Path) -> None:
    """Fail to read what backward needs, and try again."""
    nvme.can_bypass_cache(str(folder))
    weights = weights_of(12)

    def summed(offload: ActivationOffload | None) -> Tensor:
        torch.manual_seed(1)
        with offload or contextlib.nullcontext():
            return chain(torch.randn(8, 16, device=DEVICE), list(weights))[-1].sum()

    wanted = list(torch.autograd.grad(summed(None), weights))
    loss = summed(small(keep_last=0, nvme_path=folder))
    with mock.patch.object(nvme.SYSTEM, "preadv", refuse), pytest.raises(OSError, match="the drive is gone"):
        torch.autograd.grad(loss, weights, retain_graph=True)
    assert same(list(torch.autograd.grad(loss, weights)), wanted)


def test_what_could_not_be_read_can_be_read_later(tmp_path: Path) -> None:
    check_reading_again(tmp_path)


def check_refusals(call: str, folder: Path) -> None:
    """Train on a drive that refuses ``call``, and once more when it does not."""
    nvme.can_bypass_cache(str(folder))
    offload = small(keep_last=0, nvme_path=folder)
    with mock.patch.object(nvme.SYSTEM, call, refuse), pytest.raises(OSError, match="the drive is gone"):
        losses_and_grads(make(), offload)
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert nothing_left(offload)
    assert same(losses_and_grads(make(), offload), losses_and_grads(make(), None)), "and it works again"


@pytest.mark.parametrize("call", ["pwritev", "preadv"])
def test_a_drive_that_refuses_is_an_error_and_never_a_wrong_gradient(call: str, tmp_path: Path) -> None:
    check_refusals(call, tmp_path)


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
        ({"device": "nowhere"}, ValueError, "device must be 'cpu', 'cuda' or 'cuda:N'; got 'nowhere'"),
    ):
        with pytest.raises(error, match=message):
            zk.offload_activations(**options)  # type: ignore[arg-type]
    assert zk.offload_activations(copy.deepcopy(make()), device="cpu", keep_last="1GiB").keep_last == 1 << 30
