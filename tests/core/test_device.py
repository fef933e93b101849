"""Devices with memory of their own: parity with plain torch, what moves and what fits. Copies run as late as they may, and races are reported."""

import copy
import functools
import gc
import itertools
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zk
from tests import softgpu
from tests.core.test_placement import GIB, free
from tests.core.test_tiers import walk
from tests.models import DEVICE, GPT, adamw, batch, gpt, loss_of, small_chunks, train, wrap
from tests.parity import Case, run_case
from tests.world import run_world
from zk import memory
from zk.kernels import reference
from zk.offload import tiers as link_module
from zk.offload.tiers import CPU, TO_HOST, CudaLink, HostChunk, Tier, link_to
from zk.placement import Place

if not softgpu.installed():
    pytest.skip("for the software GPU (pytest -p tests.softgpu.plugin)", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("torch_engine")

TIERS, DTYPES = ("device", "host", "nvme"), ("bf16", "fp16", "fp32")
# each stage with each tier, and each precision with each tier
GRID = [
    Case(stage=stage, dtype=DTYPES[(stage + number) % 3], tier=tier, steps=3)
    for stage, (number, tier) in itertools.product((0, 1, 2, 3), enumerate(TIERS))
]
OTHERS = [
    Case(stage=2, dtype="bf16", accumulation=3, steps=2),
    Case(stage=3, dtype="bf16", accumulation=3, tier="nvme", steps=2),
    Case(stage=3, dtype="bf16", accumulation=2, no_sync=True, model="tied", steps=2),
    Case(stage=3, dtype="bf16", model="checkpointed_reentrant", tier="nvme", steps=3),
    Case(stage=3, dtype="bf16", model="elsewhere", prefetch=0, steps=3),
    Case(stage=3, dtype="bf16", tier="host", params="device", clip=None, prefetch=3, steps=3),
    Case(stage=3, dtype="bf16", tier="device", params="host", model="frozen", steps=3),
    Case(stage=3, dtype="bf16", tier="nvme", params="host", optimizer="SGD", steps=3),
    Case(stage=3, dtype="bf16", overlap_step=True, steps=3),
]


@pytest.fixture(autouse=True)
def torch_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the device too the update is torch's own ops: interpreted, the kernel rounds otherwise, and takes most of the time."""
    monkeypatch.setattr("zk.kernels.adam_kernel.launch", reference.adam)


@pytest.mark.parametrize("case", [*GRID, *OTHERS], ids=str)
def test_the_latest_copies_change_no_bit(case: Case) -> None:
    assert run_case(case) == ""


def test_ranks_with_devices_train_as_plain_torch() -> None:
    cases = [
        Case(stage=2, dtype="bf16", steps=3),
        Case(stage=3, dtype="bf16", overlap_step=True, steps=3),
        Case(stage=3, dtype="bf16", tier="nvme", accumulation=2, steps=2),
        Case(stage=3, dtype="bf16", model="checkpointed", params="device", steps=3),
    ]
    table = run_world(2, run_case, cases, timeout=120)
    assert {str(case): rows for case, rows in zip(cases, table, strict=True) if any(rows)} == {}


@small_chunks()
def test_any_order_of_what_a_user_does_gives_the_same_bits(tmp_path: Path) -> None:
    want = walk(2, "device", tmp_path, overlap_step=False)
    for options in ({"tier": "host", "param_tier": "device"}, {"tier": "nvme"}, {"tier": "host", "optimizer_tier": "device"}):
        assert walk(2, path=tmp_path, **{"overlap_step": False, **options}) == want
    assert walk(2, "host", tmp_path) == want  # beside the next forward


# ---- copies ---------------------------------------------------------------------------------------------------------------------------------
def test_what_follows_an_upload_runs_beside_compute() -> None:
    link, near = link_to(DEVICE), torch.zeros(8, device=DEVICE)
    arrival = link.beside(near, lambda values: values + 1, link.upload(near, torch.full((8,), 3.0)))
    torch.ones(8, device=DEVICE)
    assert not link.mark().done  # nobody has waited for compute, nor compute for the copy
    assert arrival.wait().tolist() == [4.0] * 8


def test_a_value_made_beside_compute_is_freed_after_what_compute_does_with_it() -> None:
    (chunk,) = Tier(DEVICE, HostChunk).chunks({"param": torch.float32}, [1 << 10])
    chunk.put("param", torch.ones(1 << 10, device=DEVICE))
    for _ in range(2):
        chunk.load("param", DEVICE, lambda values: values + 1).wait().mul_(2)
    assert softgpu.found() == []


def test_what_is_read_beside_compute_is_not_used_again_before() -> None:
    for _ in range(3):
        values, link = torch.ones(1 << 16, device=DEVICE), link_to(DEVICE)
        arrival = link.beside(values, lambda values: values + 1, link.mark())
        del values
        torch.full((1 << 16,), 7.0, device=DEVICE)  # the next memory of compute
        assert arrival.wait().eq(2).all()


def test_what_was_made_on_another_stream_is_not_used_again_before_its_copy() -> None:
    link, side = link_to(DEVICE), torch.cuda.Stream()
    host = memory.empty(1 << 16, torch.float32, CPU, link)
    for value in range(1, 4):
        with torch.cuda.stream(side):
            event = link.offload(host, torch.full((1 << 16,), float(value), device=DEVICE))
        link.follow(event)
        with torch.cuda.stream(side):
            torch.full((1 << 16,), 7.0, device=DEVICE)
        event.wait()
        assert host.eq(value).all()


def test_gradients_behind_their_copies_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """However far the host is ahead: compute waits for a copy before its memory is used again."""
    monkeypatch.setattr(link_module, "BEHIND_NBYTES", 3 << 20)
    (chunk,) = Tier(DEVICE, HostChunk).chunks({"grad": torch.float32}, [1 << 18])
    before, syncs = torch.cuda.memory_allocated(), softgpu.stats["syncs"]
    for _ in range(20):
        chunk.put("grad", torch.ones(1 << 18, device=DEVICE))
    assert torch.cuda.memory_allocated() - before <= 4 << 20 and softgpu.stats["syncs"] == syncs
    assert len(chunk.link.behind) == 3  # compute waits for no more of them than it has to
    torch.cuda.synchronize()
    chunk.put("grad", torch.ones(1 << 18, device=DEVICE))
    assert len(chunk.link.in_flight[TO_HOST]) == 1  # ends of copies that are over are not kept
    assert chunk.open()["grad"].eq(1).all()


def trained(steps: int, **options: Any) -> tuple[zk.ZeroOptimizer, list[float]]:
    torch.manual_seed(0)
    model = GPT()
    optimizer = zk.ZeroOptimizer(model, torch.optim.AdamW(model.parameters()), stage=3, dtype="bf16", **options)
    return optimizer, train(model, optimizer, steps)


HOST = {"param_tier": "host", "optimizer_tier": "host"}


def test_page_locked_memory_is_used_again_and_given_back_and_backward_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()
    memory.trim()
    assert softgpu.pinned_nbytes() == 0
    optimizer, _ = trained(0, **HOST)  # what gradients need is locked before training
    pinned = softgpu.pinned_nbytes()
    monkeypatch.setattr(memory, "aligned", lambda nbytes: pytest.fail(f"{nbytes} new bytes"))
    train(optimizer.model, optimizer, 2)
    pageable = softgpu.stats["pageable_copies"]
    train(optimizer.model, optimizer, 2, start=2)
    # the batch and the norm of each step are none of the tiers'
    assert softgpu.pinned_nbytes() == pinned > 0 and softgpu.stats["pageable_copies"] == pageable + 2 * 2
    syncs = softgpu.stats["syncs"]
    loss_of(optimizer.model, batch(3)).backward()
    assert softgpu.stats["syncs"] == syncs
    optimizer.step()
    optimizer.close()
    assert softgpu.pinned_nbytes() == 0


def test_a_system_that_does_not_lock_pages_costs_one_warning(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "one_link", functools.cache(CudaLink))
    _, want = trained(3, optimizer_tier="device")
    with softgpu.refuse_to_pin():
        optimizer, losses = trained(3, **HOST)
        optimizer.close()
    assert losses == want and caplog.text.count("does not page-lock") == 1 and "ulimit -l" in caplog.text


def test_what_is_all_on_the_device_needs_no_cupy_and_copies_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "one_link", functools.cache(CudaLink))
    monkeypatch.setitem(sys.modules, "cupy", None)
    copies = softgpu.stats["copies"]
    trained(2, optimizer_tier="device")
    assert softgpu.stats["copies"] == copies
    with pytest.raises(ImportError, match="pip install cupy-cuda13x"):
        trained(1, **HOST)


def test_parameters_are_those_of_loaded_masters_at_once() -> None:
    model = GPT().to(DEVICE)
    with zk.ZeroOptimizer(model, adamw(model), stage=1, dtype="bf16", optimizer_tier="host") as optimizer:
        train(model, optimizer)
        saved, want = optimizer.state_dict(), {name: value.clone() for name, value in model.state_dict().items()}
        train(model, optimizer)
        optimizer.load_state_dict(saved)
        assert all(torch.equal(value, want[name]) for name, value in model.state_dict().items()) and saved["state"][0]["master"].is_cpu


# ---- what moves to a device, and what fits there --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("options", [{"stage": 2}, {"stage": 3, **HOST}])
def test_a_model_in_host_memory_moves_with_its_buffers_and_trains_the_same_bits(options: dict[str, Any]) -> None:
    net = gpt().cpu()
    net.register_buffer("table", torch.randn(5))
    other = copy.deepcopy(net).cuda()
    optimizer, plain = wrap(net, dtype="bf16", device="cuda", **options), wrap(other, dtype="bf16", **options)
    assert {tensor.device for tensor in (*net.parameters(), *net.buffers())} == {torch.device("cuda", 0)}
    assert train(net, optimizer, 2) == train(other, plain, 2)
    optimizer.close(), plain.close()
    assert all(map(torch.equal, net.state_dict().values(), other.state_dict().values()))


def test_no_more_than_a_unit_is_whole_on_the_device_while_a_model_moves_and_after_it_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "BEHIND_NBYTES", 0)  # of copies to the host, which end late here
    net = nn.Sequential(*(nn.Linear(256, 256) for _ in range(16)))
    nbytes = sum(param.nbytes for param in net.parameters())
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    optimizer = wrap(net, device="cuda", stage=3, units=[nn.Linear], **HOST)
    assert torch.cuda.max_memory_allocated() - before < nbytes / 4
    with torch.no_grad():
        net(torch.ones(1, 256, device="cuda"))
    assert torch.cuda.memory_allocated() - before < nbytes / 4
    optimizer.close()


def transposed(_: int) -> float:
    net = nn.Linear(8, 4).cuda()
    net.weight = nn.Parameter(torch.randn(8, 4, device="cuda").t())
    with wrap(net), zk.gather(net.weight, write=True), torch.no_grad():
        net.weight.fill_(3.0 + torch.distributed.get_rank())
    return net.weight.mean().item()


def test_ranks_send_each_other_what_is_not_contiguous() -> None:
    assert run_world(2, transposed, [0], timeout=20) == [[3.0, 3.0]]


def test_devices_that_differ_or_are_not_there_are_refused() -> None:
    net = gpt().cuda()
    net.tokens.cpu()
    with pytest.raises(ValueError, match=r"'tokens.weight' on cpu and 'head.weight' on cuda:0: .*device="):
        wrap(net)
    with pytest.raises(ValueError, match="'cuda:7', and torch sees 2 CUDA devices: name another"):
        wrap(net, device="cuda:7")
    optimizer = wrap(net, device="cuda")
    train(net, optimizer, 2)
    net.cpu()
    with pytest.raises(RuntimeError, match=r"was moved or converted after .* on cpu"):
        net(batch(0))


def test_auto_fills_half_of_the_device_and_trains_the_same_bits(tmp_path: Path) -> None:
    losses, places = [], []
    auto = {"optimizer_tier": "auto", "nvme_path": tmp_path, "param_tier": "auto"}
    numel = sum(param.numel() for param in gpt().parameters())
    for nbytes in (GIB, int(1.5 * numel), -4 * numel):
        net = gpt().cuda()
        with free(device=nbytes):
            optimizer = wrap(net, dtype="bf16", stage=3, **auto)
        places.append(set(optimizer._layout.places.values()))
        losses.append(train(net, optimizer, 2))
        optimizer.close()
    assert losses == losses[:1] * 3 and places[0] == {Place("device", "device")}
    assert Place("mirrored", "host") in places[1] and places[2] == {Place("host", "host")}
    with free(device=-4 * numel), pytest.raises(MemoryError):  # full parameters are on the device
        wrap(gpt().cuda(), dtype="bf16", stage=2, optimizer_tier="auto", nvme_path=tmp_path)
