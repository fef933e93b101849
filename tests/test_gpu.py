"""Training on a device with memory of its own: a GPU, or the software GPU (``make test``).

Everything runs with torch's deterministic algorithms, which also fill new memory with NaN, so what is used before it has arrived shows.
"""

from __future__ import annotations

import copy
import gc
import math
import os
import weakref
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import psutil
import pytest
import torch
from torch import Tensor

import zk
from tests.models import DEVICE, GPT, batch, loss_of
from zk.nn.tiled_linear import TiledLinear
from zk.offload import spill, transfer
from zk.offload.pinned import Arena
from zk.offload.streams import CudaLink, link_to

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what deterministic algorithms ask for, before the first product
LONG = 100_000_000  # cycles: some 50 ms, in which any copy of these tests would have ended


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.fixture
def small_pieces() -> Iterator[None]:
    """Units of these models are moved and updated in several pieces."""
    with mock.patch.object(transfer, "PIECE_NUMEL", 8192), mock.patch.object(spill, "CHUNK_NUMEL", 8192):
        yield


def losses(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int = 5) -> list[float]:
    found = []
    for seed in range(steps):
        loss = loss_of(model, batch(seed))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss.detach()))
    return found


# ---- the link ----------------------------------------------------------------------------------------------------------------


def pair(numel: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Values in host memory, a place for them on the device that holds NaN, and one in host memory."""
    values = torch.arange(numel, dtype=torch.float32).to(dtype)
    return values, torch.full((numel,), float("nan"), dtype=dtype, device="cuda"), torch.full((numel,), float("nan"), dtype=dtype)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
@pytest.mark.parametrize("numel", (1, 1009, 1 << 20))
@pytest.mark.parametrize("pinned", (True, False))
def test_copies_of_any_size_arrive_in_both_directions(pinned: bool, numel: int, dtype: torch.dtype) -> None:
    link, (values, near, host) = link_to(DEVICE), pair(numel, dtype)
    if pinned:
        arena = Arena(link, 1 << 24)
        records = [arena.acquire(numel, dtype) for _ in range(2)]
        values, host = records[0].tensor.copy_(values), records[1].tensor.fill_(float("nan"))
        assert arena.is_pinned and values.is_pinned() and host.is_pinned()
    event = link.upload(near, values, [link.mark()])
    link.follow(event)
    link.offload(host, near, [link.mark()]).wait()
    assert event.done and torch.equal(host, values) and torch.equal(near.cpu(), values)
    if pinned:
        arena.close()
        assert not values.is_pinned() and torch.equal(host, values), "the pages are unlocked, and still there"


def test_an_offload_comes_after_what_compute_had_been_asked_to_do() -> None:
    link, (values, near, host) = link_to(DEVICE), pair(1 << 16)
    values = values.cuda()
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    near.copy_(values)
    event = link.offload(host, near, [link.mark()])
    assert not event.done, "compute is still asleep"
    event.wait()
    assert torch.equal(host, values.cpu())


@pytest.mark.races
def test_without_its_mark_an_offload_would_have_been_too_early() -> None:
    """What the test before it would show if the mark were forgotten: otherwise it shows nothing."""
    link, (values, near, host) = link_to(DEVICE), pair(1 << 16)
    values = values.cuda()
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    near.copy_(values)
    link.offload(host, near, []).wait()
    assert host.isnan().all()
    torch.cuda.synchronize()


@pytest.mark.races
def test_compute_that_follows_an_upload_sees_it_and_compute_that_does_not_may_miss_it() -> None:
    link, (values, near, _) = link_to(DEVICE), pair(1 << 16)
    torch.cuda.synchronize()
    with link.beside([]):
        torch.cuda._sleep(LONG)  # uploads are held up
    event = link.upload(near, values, [link.mark()])
    early = near.clone()
    link.follow(event)
    late = near.clone()
    assert early.isnan().all() and torch.equal(late.cpu(), values)


def test_an_upload_does_not_overwrite_what_compute_still_reads() -> None:
    link, (values, near, _) = link_to(DEVICE), pair(1 << 16)
    near.fill_(7.0)
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    read = near + 0
    link.follow(link.upload(near, values, [link.mark()]))
    assert (read == 7).all() and torch.equal(near.cpu(), values)


def test_an_optimizer_that_is_dropped_unlocks_its_pages_after_its_copies() -> None:
    model = GPT()
    optimizer = zk.ZeroOptimizer(model, torch.optim.AdamW(model.parameters()), stage=2, optimizer_tier="host", dtype="bf16")
    torch.cuda._sleep(LONG)
    loss_of(model, batch(0)).backward()  # gradients are on their way to the host
    dropped = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert dropped() is None


def test_memory_that_is_being_copied_is_not_given_to_anyone_else() -> None:
    link, (values, _, host) = link_to(DEVICE), pair(1 << 20)
    near = values.cuda()
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(LONG)
        late = link.mark()
    event = link.offload(host, near, [link.mark(), late])
    del near
    others = [torch.full((1 << 20,), float("nan"), device="cuda") for _ in range(8)]
    assert not event.done, "the copy has not begun"
    event.wait()
    assert torch.equal(host, values)
    del others


def test_work_beside_comes_after_uploads_and_not_after_compute() -> None:
    link, (values, near, _) = link_to(DEVICE), pair(1 << 16)
    torch.cuda.synchronize()
    mark = link.mark()
    torch.cuda._sleep(LONG)
    with link.beside([link.upload(near, values, [mark])]) as reached:
        doubled = near * 2
        event = reached()
    event.wait()
    assert not link.mark().done, "compute was not waited for"
    link.follow(event)
    assert torch.equal(doubled.cpu(), values * 2)


def test_released_blocks_wait_for_the_copies_that_read_them() -> None:
    link = link_to(DEVICE)
    arena = Arena(link, 1 << 22)
    first = arena.acquire(1 << 20, torch.float32)
    first.tensor.fill_(1.0)
    near = torch.zeros(1 << 20, device="cuda")
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    first.release(after=link.upload(near, first.tensor, [link.mark()]))
    second = arena.acquire(1 << 20, torch.float32)  # the same memory, as there is no other
    second.tensor.fill_(2.0)
    torch.cuda.synchronize()
    assert (near == 1).all() and arena.nbytes == 1 << 22
    second.release()
    arena.close()


def test_one_link_serves_all_who_name_the_device() -> None:
    assert isinstance(link_to(DEVICE), CudaLink)
    assert link_to(torch.device("cuda")) is link_to(torch.device("cuda", torch.cuda.current_device()))


# ---- every tier is the same training -------------------------------------------------------------------------------------------


class Trained:
    """A run: losses, parameters, masters and moments, and what the optimizer counts."""

    def __init__(
        self,
        accumulation: int = 1,
        steps: int = 3,
        slow: bool = False,
        **options: object,
    ) -> None:
        torch.manual_seed(0)
        model = GPT(width=96, layers=3)
        if slow:  # compute is behind, so that copies that do not wait for it are too early
            for block in model.blocks:
                block.register_forward_pre_hook(lambda *_: torch.cuda._sleep(LONG // 10))
        groups = [
            {"params": [param for param in model.parameters() if param.ndim > 1], "weight_decay": 0.1},
            {"params": [param for param in model.parameters() if param.ndim <= 1], "weight_decay": 0.0, "lr": 3e-3},
        ]
        inner = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))
        self.losses: list[float] = []
        with zk.ZeroOptimizer(model, inner, **{"dtype": "bf16", **options}) as optimizer:  # type: ignore[arg-type]
            for step in range(steps):
                for micro in range(accumulation):
                    loss = loss_of(model, batch(100 * step + micro))
                    optimizer.backward(loss)
                    self.losses.append(float(loss.detach()))
                optimizer.step()
                optimizer.zero_grad()
            self.metrics = optimizer.metrics()
            self.resting = optimizer.resting("param"), optimizer.resting("optimizer")
            self.sections = max(len(held.shard.sections) for held in optimizer.held if held.shard is not None)
            with zk.gather(model.parameters()):
                self.tensors = {name: param.detach().cpu().clone() for name, param in model.named_parameters()}
            for key, state in optimizer.state_dict()["state"].items():
                self.tensors |= {f"{key} {name}": value.cpu().clone() for name, value in state.items()}

    def differs(self, other: Trained) -> list[str]:
        """Names of what has other bits."""
        names = [name for name in self.tensors if not torch.equal(self.tensors[name], other.tensors[name])]
        return names + ([f"losses {self.losses} and {other.losses}"] if self.losses != other.losses else [])


@pytest.fixture(scope="module")
def on_the_device() -> dict[str, Trained]:
    """Runs with everything on the device, to compare with, made when first asked for."""
    return {}


def reference(made: dict[str, Trained], **options: object) -> Trained:
    key = repr(sorted(options.items(), key=str))
    if key not in made:
        made[key] = Trained(stage=2, optimizer_tier="device", **options)  # type: ignore[arg-type]
    return made[key]


BUDGET = 700_000  # bytes: more than one unit's optimizer state, less than two


def place(stage: int, tier: str, folder: Path) -> dict[str, object]:
    """Options for a tier; "divided" cuts a unit in two between device and host."""
    options: dict[str, object] = {"stage": stage}
    if tier == "divided":
        room = BUDGET if stage == 3 else BUDGET + 2 * 4 * 96**2 * 3  # parameters count too, where they are on the device
        return options | {"optimizer_tier": "auto", "device_budget": room, **({"param_tier": "host"} if stage == 3 else {})}
    options |= {"optimizer_tier": tier, **({"param_tier": tier} if stage == 3 else {})}
    return options | ({"nvme_path": folder} if tier == "nvme" else {})


@pytest.mark.parametrize(
    ("stage", "tier", "overlap_step"),
    (
        *((0, "device", False), (0, "nvme", True), (1, "host", True), (1, "divided", False), (2, "nvme", False), (2, "divided", True)),
        *((3, "device", False), (3, "host", False), (3, "nvme", True), (3, "divided", True)),
    ),
)
def test_every_stage_and_tier_has_the_bits_of_the_device_tier(
    stage: int, tier: str, overlap_step: bool, tmp_path: Path, small_pieces: None, on_the_device: dict[str, Trained]
) -> None:
    got = Trained(**place(stage, tier, tmp_path), overlap_step=overlap_step)  # type: ignore[arg-type]
    assert not got.differs(reference(on_the_device))
    if tier == "divided":
        assert got.sections == 2 and got.resting[1] == "device+host", (got.sections, got.resting)
    elif stage == 3:
        assert got.resting == (tier, tier)


@pytest.mark.parametrize(("stage", "tier", "overlap_step"), ((2, "host", True), (2, "nvme", False), (3, "nvme", True)))
def test_gradients_added_up_over_micro_batches_have_the_bits_of_the_device_tier(
    stage: int, tier: str, overlap_step: bool, tmp_path: Path, small_pieces: None, on_the_device: dict[str, Trained]
) -> None:
    got = Trained(accumulation=3, steps=2, **place(stage, tier, tmp_path), overlap_step=overlap_step)  # type: ignore[arg-type]
    assert not got.differs(reference(on_the_device, accumulation=3, steps=2))


@pytest.mark.parametrize(("prefetch", "overlap_step"), ((0, False), (1, True), (3, True)))
def test_copies_wait_for_compute_that_is_late(prefetch: int, overlap_step: bool, small_pieces: None, on_the_device: dict[str, Trained]) -> None:
    how = {"stage": 3, "param_tier": "host", "optimizer_tier": "host", "prefetch": prefetch, "overlap_step": overlap_step}
    got = Trained(slow=True, **how)  # type: ignore[arg-type]
    assert not got.differs(reference(on_the_device))
    if prefetch:
        assert got.metrics["prefetch_hits"] > got.metrics["gathers"] / 2


@pytest.mark.parametrize(("stage", "tier"), ((2, "host"), (3, "nvme")))
def test_fp16_skips_the_same_steps_and_has_the_bits_of_the_device_tier(
    stage: int, tier: str, tmp_path: Path, small_pieces: None, on_the_device: dict[str, Trained]
) -> None:
    how = {"dtype": "fp16", "loss_scale": zk.DynamicLossScale(init=2.0**24, hysteresis=1), "steps": 9}
    want = reference(on_the_device, **how)
    assert want.metrics["skipped_steps"] > 0 and want.metrics["steps"] > 0
    got = Trained(**place(stage, tier, tmp_path), **how)  # type: ignore[arg-type]
    assert got.metrics["skipped_steps"] == want.metrics["skipped_steps"] and not got.differs(want)


def test_clipping_by_a_norm_that_was_taken_on_either_side_is_the_same(small_pieces: None, on_the_device: dict[str, Trained]) -> None:
    """The norm is a sum in float64, in another order on the device: 1e-12 of it, and what hangs on that."""
    want = reference(on_the_device, clip_grad_norm=0.1)
    got = Trained(stage=3, param_tier="host", optimizer_tier="host", clip_grad_norm=0.1)
    assert got.metrics["grad_norm"] == pytest.approx(want.metrics["grad_norm"], rel=1e-12)
    assert got.losses == pytest.approx(want.losses, rel=1e-5)


@pytest.mark.parametrize(("stage", "tier"), ((2, "device"), (2, "divided"), (3, "host"), (3, "nvme")))
def test_one_inf_among_the_gradients_skips_the_step_and_changes_nothing(stage: int, tier: str, tmp_path: Path, small_pieces: None) -> None:
    torch.manual_seed(0)
    model = GPT(width=96, layers=3).to(DEVICE)
    bad = model.blocks[1].up.weight
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with zk.ZeroOptimizer(model, inner, dtype="bf16", clip_grad_norm=0.1, **place(stage, tier, tmp_path)) as optimizer:  # type: ignore[arg-type]
        losses(model, optimizer, steps=1)
        with zk.gather(model.parameters()):
            before = [param.detach().cpu().clone() for param in model.parameters()]
        state = copy.deepcopy(optimizer.state_dict()["state"])
        mark = torch.zeros(bad.shape, device=DEVICE)
        mark[3, 5] = float("inf")
        hook = bad.register_hook(lambda grad: grad + mark.to(grad.dtype))
        losses(model, optimizer, steps=1)
        hook.remove()
        found = optimizer.metrics()
        assert (found["steps"], found["skipped_steps"], found["grad_norm"]) == (1, 1, float("inf"))
        with zk.gather(model.parameters()):
            assert all(torch.equal(param.detach().cpu(), old) for param, old in zip(model.parameters(), before, strict=True))
        for key, values in optimizer.state_dict()["state"].items():
            assert all(torch.equal(value, state[key][name]) for name, value in values.items()), f"parameter {key}"
        assert math.isfinite(losses(model, optimizer, steps=1)[0]) and optimizer.metrics()["steps"] == 2


def test_the_device_tier_trains_what_plain_torch_trains() -> None:
    """And with it all that have its bits."""
    torch.manual_seed(0)
    model = GPT()
    plain = copy.deepcopy(model)
    want = losses(plain, torch.optim.AdamW(plain.parameters(), lr=1e-3))
    with zk.ZeroOptimizer(model, torch.optim.AdamW(model.parameters(), lr=1e-3), stage=2, optimizer_tier="device") as optimizer:
        assert losses(model, optimizer) == pytest.approx(want, rel=1e-4)


def test_a_model_in_host_memory_goes_to_its_tiers_and_never_whole_to_the_device() -> None:
    torch.manual_seed(0)
    wide = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(16)))  # 16 MiB
    plain = copy.deepcopy(wide).cuda()
    x = torch.randn(4, 512, device="cuda")
    want = plain(x)
    del plain
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    where = {"stage": 3, "param_tier": "host", "optimizer_tier": "host", "device": "cuda"}
    with zk.ZeroOptimizer(wide, torch.optim.AdamW(wide.parameters()), **where) as optimizer:
        torch.testing.assert_close(wide(x), want)
        wide(x).square().mean().backward()
        optimizer.step()
        assert torch.cuda.max_memory_allocated() - before < 10 << 20, "some layers, with their gradients"


def test_device_memory_is_given_back_in_the_end() -> None:
    def taken_after_one_more() -> int:
        Trained(steps=2, stage=3, param_tier="host", optimizer_tier="host", overlap_step=True)
        gc.collect()
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    taken_after_one_more()
    first = taken_after_one_more()
    for _ in range(2):
        last = taken_after_one_more()
    assert last - first < 1 << 18, "less than a unit; a link keeps the last copy of each direction until the next"


def test_a_layer_of_64k_features_trains_where_the_whole_layer_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """8 GiB of bf16 weight, its gradient, and no room for both: the cap is 12 GiB."""
    size, cap = 65536, 12 * 2**30
    total = torch.cuda.get_device_properties(0).total_memory
    if total < 16 * 2**30 or torch.cuda.mem_get_info()[0] < cap or psutil.virtual_memory().total < 64 * 2**30:
        pytest.skip("needs a GPU with 16 GiB and 64 GiB of host memory")
    # four billion random numbers, drawn twice on one core, would be most of the test
    monkeypatch.setattr(torch.nn.init, "uniform_", lambda tensor, low, high: torch.nn.init.constant_(tensor, high))
    torch.use_deterministic_algorithms(False)
    torch.cuda.set_per_process_memory_fraction(cap / total)
    try:
        with pytest.raises(torch.cuda.OutOfMemoryError):
            whole = torch.nn.Linear(size, size, bias=False, device="cuda", dtype=torch.bfloat16)
            whole(torch.randn(16, size, device="cuda", dtype=torch.bfloat16)).sum().backward()
        del whole
        torch.cuda.empty_cache()
        with zk.deferred_init("cuda"):
            model = torch.nn.Sequential(TiledLinear(size, size, bias=False, out_splits=32, dtype=torch.bfloat16))
        where = {"stage": 3, "dtype": "bf16", "param_tier": "host", "optimizer_tier": "host", "prefetch": 0}
        with zk.ZeroOptimizer(model, torch.optim.SGD(model.parameters(), lr=1e-3), **where) as optimizer:
            for _ in range(2):
                model(torch.randn(16, size, device="cuda")).float().square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
