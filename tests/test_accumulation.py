"""Micro-batches that pass the model block by block train what the usual loop trains, with fewer bytes; what cannot be right is refused by name."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import zk
from tests import softgpu
from tests.models import DEVICE, GPT, batch, loss_of
from tests.parity import Case, run_case
from tests.world import mesh_of, run_world
from zk.offload import spill
from zk.offload.nvme import Request

pytestmark = pytest.mark.usefixtures("torch_engine")

# models that are part of another one (unused of sometimes, frozen of unfreezing, checkpointed of experts_checkpointed) are the usual backward's
TWO = Case(stage=3, dtype="bf16", accumulation=2, vertical=True, steps=3)
THREE = dataclasses.replace(TWO, accumulation=3)  # where the one in the middle, neither the first nor the last, is another case
BELOW = {"sometimes": 0, "checkpointed_reentrant": 2, "experts": 0}  # beside stage 3, which meets each model
PLAIN = [
    dataclasses.replace(TWO, accumulation=1),
    *(dataclasses.replace(TWO, stage=stage, tier=tier) for stage, tier in ((0, "nvme"), (1, "host"), (2, "nvme"))),
    dataclasses.replace(THREE, dtype="fp32"),
    dataclasses.replace(TWO, dtype="fp16", tier="nvme"),
]
OTHERS = [
    *(dataclasses.replace(THREE, stage=stage, model=model) for model, stage in BELOW.items()),
    *(dataclasses.replace(THREE, model=model, tier="nvme") for model in (*BELOW, "unfreezing", "experts_checkpointed")),
    # parameters that are used in two places: the order of additions is another one
    *(
        dataclasses.replace(THREE, stage=stage, dtype="fp32", model=model, tolerance=2e-5)
        for stage, model in ((2, "elsewhere"), (3, "elsewhere"), (3, "tied"))
    ),
    dataclasses.replace(THREE, overlap_step=True, steps=4),
    dataclasses.replace(THREE, stage=2, model="unfreezing", tier="nvme", overlap_step=True, steps=5),
    dataclasses.replace(TWO, tier="nvme", prefetch=0),
    dataclasses.replace(TWO, stage=2, optimizer="SGD", clip=None),
    dataclasses.replace(THREE, stage=2, narrow=True),
]
# ranks, and a device, add what they add to one process in one precision, with two or three micro-batches, and fewer models; experts are summed in
# the precision that each rank has them in, which is not that of one process
OF_RANKS = [
    dataclasses.replace(TWO, model="checkpointed_reentrant", tier="nvme"),
    dataclasses.replace(TWO, model="experts", tolerance=0.05),
    dataclasses.replace(THREE, stage=2, overlap_step=True, steps=4),
    dataclasses.replace(THREE, model="unfreezing", tier="nvme", overlap_step=True, steps=5),
    dataclasses.replace(THREE, tier="nvme", narrow=True, prefetch=3),  # all ahead
]
if softgpu.installed():
    ALONE = [
        dataclasses.replace(THREE, stage=2, tier="nvme", narrow=True),
        dataclasses.replace(TWO, tier="nvme", prefetch=0, optimizer="SGD", clip=None),
        dataclasses.replace(THREE, model="experts", overlap_step=True, steps=4),
    ]
    TOGETHER = [OF_RANKS[0], OF_RANKS[2], dataclasses.replace(OF_RANKS[3], narrow=True)]
else:
    ALONE = PLAIN + OTHERS
    TOGETHER = [*OF_RANKS, dataclasses.replace(TWO, stage=2, tier="nvme")]
WORLDS = {1: ALONE, 2: TOGETHER}


@pytest.mark.device
@pytest.mark.parametrize("world", (1, 2))
def test_block_by_block_is_plain_torch_with_any_stage_tier_dtype_and_number(world: int) -> None:
    cases = WORLDS[world]
    table = run_world(world, run_case, cases, timeout=120) if world > 1 or softgpu.installed() else [[run_case(case)] for case in cases]
    assert {str(case): rows for case, rows in zip(cases, table, strict=True) if rows != [""] * world} == {}


# ---- models that do not go straight through their blocks -----------------------------------------------------------------------


@dataclasses.dataclass
class Output:
    """What a block returns: a container that torch does not know."""

    hidden: Tensor
    side: dict[str, Tensor]


class Part(nn.Module):
    def __init__(self, width: int, statistics: bool) -> None:
        super().__init__()
        self.a, self.b, self.drop = nn.Linear(width, width), nn.Linear(width, width), nn.Dropout(0.3)
        self.batch_norm = nn.BatchNorm1d(width) if statistics else None
        if statistics:
            self.register_buffer("level", torch.ones(width))
        self.count = 0

    def forward(self, x: Tensor, shared: Tensor, scale: float = 1.0, *, more: list[Tensor | None]) -> Output:
        self.count += 1
        h = torch.tanh(self.a(x) + shared)
        if self.batch_norm is not None:
            h = (h + self.batch_norm(h.flatten(0, 1)).view_as(h)) * self.level.clone()
            with torch.no_grad():
                self.level.lerp_(h.abs().mean((0, 1)), 0.1)
        if more[0] is not None:
            h = h * more[0]
        return Output(self.drop(h) * scale, {"side": self.b(h).mean(), "ids": torch.arange(3), "bias": self.b.bias, "buffers": list(self.buffers())})


class Odd(nn.Module):
    """Dropout, running statistics, levels that follow their use, counters, several inputs and outputs, a tensor that all blocks share, additions
    in place to what a block returns, a block that is used twice, one that some micro-batches skip, one that is called without a graph, tied
    weights, and attributes that forward sets."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed, self.mix = nn.Embedding(50, width), nn.Linear(width, width)
        self.bias = nn.Parameter(torch.randn(width) * 0.1)
        self.blocks = nn.ModuleList(Part(width, statistics=number in (0, 2)) for number in range(4))
        self.scale = 1.0

    def forward(self, ids: Tensor, skip: bool = False) -> Tensor:
        x = self.embed(ids)
        shared, side = self.mix(self.bias), torch.zeros((), device=ids.device)
        gate = torch.sigmoid(x.mean(-1, keepdim=True))
        with torch.no_grad():
            x = x + 0.1 * self.blocks[3](x, shared, more=[None]).hidden
        for number, block in enumerate([*self.blocks, self.blocks[1]]):
            if skip and number == 2:
                continue
            self.scale = 1.0 + 0.1 * number + (0.5 if skip else 0.0)
            out = block(x, shared, scale=self.scale, more=[gate if number == 1 else None])
            y = out.hidden
            y += x * self.scale
            side = side + out.side["side"] + out.side["bias"].square().sum()
            x = y
        assert out.side["ids"].dtype == torch.int64
        return F.cross_entropy((x @ self.embed.weight.T).flatten(0, 1), ids.flatten()) + 0.01 * side


def odd_loss(model: nn.Module, given: tuple[Tensor, bool]) -> Tensor:
    return model(*given) / 3


def odd_batches(step: int) -> list[tuple[Tensor, bool]]:
    generator = torch.Generator().manual_seed(step)
    return [(torch.randint(50, (2, 7), generator=generator).to(DEVICE), number == 1) for number in range(3)]


def one_by_one(model: nn.Module, batches: Sequence[Any], loss_fn: Callable[[nn.Module, Any], Tensor]) -> list[Tensor]:
    """The usual loop, each micro-batch with the random numbers that accumulate() gives it."""
    seeds = [int(torch.randint(2**62, ())) for _ in batches]
    outside = torch.get_rng_state(), torch.cuda.get_rng_state() if DEVICE.type == "cuda" else None
    losses = []
    for given, seed in zip(batches, seeds, strict=True):
        torch.set_rng_state(torch.Generator().manual_seed(seed).get_state())
        if DEVICE.type == "cuda":
            torch.cuda.set_rng_state(torch.Generator(DEVICE).manual_seed(seed).get_state())
        loss = loss_fn(model, given)
        loss.backward()
        losses.append(loss.detach())
    torch.set_rng_state(outside[0])
    if outside[1] is not None:
        torch.cuda.set_rng_state(outside[1])
    return losses


@pytest.mark.parametrize("stage", [pytest.param(stage, marks=[pytest.mark.device] * (stage == 3)) for stage in (0, 2, 3)])
def test_odd_models_train_as_in_plain_torch(stage: int) -> None:
    torch.manual_seed(0)
    model = Odd().to(DEVICE)
    twin = copy.deepcopy(model)
    plain = torch.optim.SGD(twin.parameters(), lr=0.01)
    with zk.ZeroOptimizer(model, torch.optim.SGD(model.parameters(), lr=0.01), stage=stage, optimizer_tier="host") as optimizer:
        for step in range(2):
            torch.manual_seed(step)
            want = one_by_one(twin, odd_batches(step), odd_loss)
            after = torch.get_rng_state()
            torch.manual_seed(step)
            got = optimizer.accumulate(odd_batches(step), odd_loss)
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
            assert not any(loss.requires_grad for loss in got)
            assert torch.equal(torch.get_rng_state(), after)
            plain.step()
            plain.zero_grad()
            optimizer.step()
            optimizer.zero_grad()
        trained = optimizer.consolidated_state_dict()
        for name, value in twin.state_dict().items():
            torch.testing.assert_close(trained[name].cpu(), value.cpu(), rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")
        assert [block.count for block in model.blocks] == [block.count for block in twin.blocks]
        assert model.scale == twin.scale


def test_random_numbers_decide_what_is_dropped() -> None:
    """The comparison above can fail."""
    losses = []
    for seed in (1, 1, 2):
        torch.manual_seed(0)
        model = Odd().to(DEVICE)
        with zk.ZeroOptimizer(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=3, optimizer_tier="host") as optimizer:
            torch.manual_seed(seed)
            losses.append(torch.stack(optimizer.accumulate(odd_batches(0), odd_loss)))
    assert torch.equal(losses[0], losses[1])
    assert not torch.equal(losses[0], losses[2])


# ---- what it goes together with ------------------------------------------------------------------------------------------------


def gpt(stage: int = 3, *, layers: int = 3, **options: Any) -> tuple[GPT, zk.ZeroOptimizer]:
    torch.manual_seed(0)
    model = GPT(layers=layers)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, zk.ZeroOptimizer(model, inner, **{"stage": stage, "optimizer_tier": "host", **options})


def mean_loss(model: nn.Module, ids: Tensor) -> Tensor:
    return loss_of(model, ids) / 2


def masters(optimizer: zk.ZeroOptimizer) -> dict[str, Tensor]:
    return optimizer.consolidated_state_dict("fp32")


def differing(got: dict[str, Tensor], want: dict[str, Tensor]) -> list[str]:
    return [name for name in want if not torch.equal(got[name], want[name])]


@pytest.mark.parametrize("stage", (0, 2, 3))
def test_it_adds_to_the_gradients_of_the_usual_backward_before_and_after_it(stage: int) -> None:
    found = []
    for vertical in (False, True):
        model, optimizer = gpt(stage, dtype="bf16", clip_grad_norm=0.5)
        with optimizer:
            for step in range(2):
                ids = [batch(10 * step + number) for number in range(4)]
                optimizer.backward(mean_loss(model, ids[0]))
                if vertical:
                    optimizer.accumulate(ids[1:3], mean_loss)
                else:
                    with optimizer.no_sync() if stage == 0 else contextlib.nullcontext():  # what is added up before it is rounded
                        optimizer.backward(mean_loss(model, ids[1]))
                        optimizer.backward(mean_loss(model, ids[2]))
                optimizer.backward(mean_loss(model, ids[3]))
                optimizer.step()
                optimizer.zero_grad()
            found.append(masters(optimizer))
    assert differing(found[1], found[0]) == []


def test_gradients_can_be_looked_at_and_dropped() -> None:
    model, optimizer = gpt()
    with optimizer:
        optimizer.accumulate([batch(0), batch(1)], mean_loss)
        with zk.gather(model.parameters()):
            plain = copy.deepcopy(model)
        (loss_of(plain, batch(0)) / 2).backward()
        (loss_of(plain, batch(1)) / 2).backward()
        for (name, param), twin in zip(model.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(param.grad, twin.grad, msg=name)
        optimizer.zero_grad()
        assert all(param.grad is None for param in model.parameters())
        with pytest.raises(RuntimeError, match="found no gradient"):
            optimizer.step()


def test_in_no_sync_gradients_stay_until_the_step(tmp_path: Path) -> None:
    found = []
    for inside in (False, True):
        _, optimizer = gpt(2, optimizer_tier="nvme", nvme_path=tmp_path)
        with optimizer:
            with optimizer.no_sync() if inside else contextlib.nullcontext():
                optimizer.accumulate([batch(0), batch(1)], mean_loss)
            assert inside == any(held.unreduced and held.bucket is not None for held in optimizer.held)
            optimizer.step()
            found.append(masters(optimizer))
    assert differing(found[1], found[0]) == []


@pytest.mark.parametrize("where", ("around", "inside"))
def test_autocast_is_that_of_the_call(where: str) -> None:
    kind, found = DEVICE.type, []
    for vertical in (False, True):
        model, optimizer = gpt(clip_grad_norm=1.0)

        def loss_fn(model: nn.Module, ids: Tensor) -> Tensor:
            with torch.autocast(kind, torch.bfloat16) if where == "inside" else contextlib.nullcontext():
                return mean_loss(model, ids)

        with optimizer:
            for step in range(2):
                ids = [batch(10 * step), batch(10 * step + 1)]
                if vertical:
                    with torch.autocast(kind, torch.bfloat16) if where == "around" else contextlib.nullcontext():
                        optimizer.accumulate(ids, loss_fn)
                else:
                    for each in ids:
                        with torch.autocast(kind, torch.bfloat16) if where == "around" else contextlib.nullcontext():
                            loss = loss_fn(model, each)
                        loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            found.append(masters(optimizer))
    assert differing(found[1], found[0]) == []


@pytest.mark.device
def test_inputs_of_blocks_leave_with_saved_tensors(tmp_path: Path) -> None:
    found = []
    for offloads in (False, True):
        model, optimizer = gpt(dtype="bf16")
        offload = zk.offload_activations(model, min_nbytes=1, keep_last=0, nvme_path=tmp_path) if offloads else contextlib.nullcontext()
        with optimizer:
            for step in range(2):
                with offload:
                    optimizer.accumulate([batch(10 * step), batch(10 * step + 1)], mean_loss)
                optimizer.step()
                optimizer.zero_grad()
            found.append(masters(optimizer))
    assert differing(found[1], found[0]) == []
    assert offload.num_offloaded >= 2 * 2 * 3  # steps, micro-batches, blocks
    assert not offload.blocks


def test_tiles_and_modules_of_the_users_choice_are_units_as_always() -> None:
    found = []
    for vertical in (False, True):
        torch.manual_seed(0)
        model = GPT(layers=2)
        zk.tile_linears(model.blocks[0], 2048)
        zk.tile_linears(model, 1024)
        inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with zk.ZeroOptimizer(model, inner, stage=3, param_tier="host", optimizer_tier="host", dtype="bf16") as optimizer:
            for step in range(2):
                ids = [batch(10 * step), batch(10 * step + 1)]
                if vertical:
                    optimizer.accumulate(ids, mean_loss)
                else:
                    for each in ids:
                        optimizer.backward(mean_loss(model, each))
                optimizer.step()
                optimizer.zero_grad()
            found.append(masters(optimizer))
    assert differing(found[1], found[0]) == []


def test_settings_of_the_process_are_each_micro_batchs_own() -> None:
    def loss_fn(model: nn.Module, ids: Tensor) -> Tensor:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            loss = mean_loss(model, ids)
            assert not torch.backends.cuda.flash_sdp_enabled()
        assert torch.backends.cuda.flash_sdp_enabled()
        return loss

    _, optimizer = gpt()
    with optimizer:
        optimizer.accumulate([batch(0), batch(1), batch(2)], loss_fn)
    assert torch.backends.cuda.flash_sdp_enabled()
    assert torch.backends.cuda.mem_efficient_sdp_enabled()


@pytest.mark.parametrize("stage", (2, 3))
def test_what_is_kept_is_not_computed_again(stage: int) -> None:
    """As many bytes as asked for, of the blocks and the micro-batches that backward wants first; the bits are the same."""
    found, calls = [], [0, 0, 0]
    for keep in (0, 8_000, "1MiB"):
        model, optimizer = gpt(stage, dtype="bf16")
        for number, block in enumerate(model.blocks):
            block.register_forward_hook(lambda *_, number=number: calls.__setitem__(number, calls[number] + 1))
        counts = []
        with optimizer:
            for step in range(2):
                calls[:] = [0, 0, 0]
                optimizer.accumulate([batch(10 * step), batch(10 * step + 1)], mean_loss, keep_activations=keep)
                counts.append(tuple(calls))
                optimizer.step()
                optimizer.zero_grad()
            found.append((masters(optimizer), counts))
    assert differing(found[1][0], found[0][0]) == differing(found[2][0], found[0][0]) == []
    assert found[0][1] == [(4, 4, 2)] * 2  # backward of the last block begins right after its forward
    assert found[1][1] == [(4, 4, 2), (4, 3, 2)]
    assert found[2][1] == [(4, 4, 2), (2, 2, 2)]


# ---- bytes ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", (1, 4))
def test_a_block_is_gathered_twice_in_a_step_and_its_gradient_leaves_once(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, optimizer = gpt(layers=4, param_tier="nvme", optimizer_tier="nvme", nvme_path=tmp_path)
    taken: list[str] = []
    add = zk.offload.state.OptimizerShard.add
    monkeypatch.setattr(zk.offload.state.OptimizerShard, "add", lambda self, *given: (taken.append("gradient"), add(self, *given))[1])
    with optimizer:
        for _ in range(2):
            taken.clear()
            before = optimizer.metrics()["gathers"]
            optimizer.accumulate([batch(each) for each in range(number)], mean_loss)
            assert len(taken) == len(optimizer.held)
            optimizer.zero_grad()
        assert optimizer.metrics()["gathers"] - before == 2 * 4 - 1  # backward begins where forward ended


def bytes_moved(number: int, folder: Path, vertical: bool) -> dict[str, float]:
    """In a step of ``number`` micro-batches, with everything on the drive, for each parameter."""
    model, optimizer = gpt(layers=5, dtype="bf16", param_tier="nvme", optimizer_tier="nvme", nvme_path=folder, clip_grad_norm=1.0)
    with optimizer:
        for step in range(3):
            if step == 2:
                optimizer.synchronize()
                before = optimizer.metrics()
            if vertical:
                optimizer.accumulate([batch(each) for each in range(number)], mean_loss)
            else:
                for each in range(number):
                    optimizer.backward(mean_loss(model, batch(each)))
            optimizer.step()
            optimizer.zero_grad()
        optimizer.synchronize()
        after = optimizer.metrics()
        elements = sum(held.held_numel for held in optimizer.held)
    return {name: (after[name] - before[name]) / elements for name in ("fetched_nbytes", "evicted_nbytes", "gathers")}


def test_bytes_on_the_drive_do_not_grow_with_the_number_of_micro_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = spill.Spill.write

    def ended(*arguments: Any) -> Request:
        """What is in memory until its write ends need not be read again: how much that is does not depend on the drive here."""
        request = write(*arguments)
        request.wait()
        return request

    monkeypatch.setattr(spill, "CHUNK_NUMEL", 2048)
    monkeypatch.setattr(spill.Spill, "write", ended)
    eight, many = bytes_moved(8, tmp_path, True), bytes_moved(16, tmp_path, True)
    assert many == pytest.approx(eight, rel=0.02)
    usual = bytes_moved(8, tmp_path, False)
    assert eight["fetched_nbytes"] < usual["fetched_nbytes"] / 3
    assert eight["evicted_nbytes"] < usual["evicted_nbytes"] / 2


# ---- what is refused, and what goes wrong --------------------------------------------------------------------------------------


class Noisy(nn.Module):
    """A block that draws random numbers, and reads an attribute that forward sets."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.shift = nn.Linear(8, 8), nn.Linear(8, 8), 0.0

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(F.dropout(torch.tanh(self.first(x + self.shift)), 0.3))


class CheckpointedAround(nn.Module):
    """Checkpoints are around a block and more, around two blocks, and around another checkpoint."""

    def __init__(self, around: str) -> None:
        super().__init__()
        self.around, self.into, self.blocks = around, nn.Linear(8, 8), nn.ModuleList(Noisy() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        for block in self.blocks:
            block.shift = float(x.detach().mean())
        for number in (0, 2):
            x = checkpoint(getattr(self, self.around), x, number, use_reentrant=False)
        return x

    def more(self, x: Tensor, number: int) -> Tensor:
        x = F.silu(self.blocks[number](torch.sin(x)))
        return torch.tanh(x.mul_(self.blocks[number + 1](F.dropout(x, 0.2))))

    def two(self, x: Tensor, number: int) -> Tensor:
        return self.blocks[number + 1](self.blocks[number](x))

    def nested(self, x: Tensor, number: int) -> Tensor:
        return torch.sin(checkpoint(self.more, torch.exp(-x), number, use_reentrant=False))


@pytest.mark.parametrize(("around", "stage"), (("more", 2), ("two", 3), ("nested", 3)))
def test_checkpoints_around_blocks_and_more_compute_again_what_forward_did(around: str, stage: int, tmp_path: Path) -> None:
    tiers: dict[str, Any] = {"param_tier": "nvme", "optimizer_tier": "nvme", "nvme_path": tmp_path} if stage == 3 else {}
    batches = list(torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(1)))
    found = []
    for vertical in (False, True):
        torch.manual_seed(0)
        model = CheckpointedAround(around).to(DEVICE)
        with zk.ZeroOptimizer(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage, **tiers) as optimizer:
            passes = optimizer.accumulate if vertical else functools.partial(one_by_one, model)
            passes(batches, lambda model, x: model(x.to(DEVICE)).square().mean())
            found.append([param.grad.clone().cpu() for param in model.parameters()])  # type: ignore[union-attr]
    assert all(grad.abs().max() > 0 for grad in found[0])
    for first, second in zip(*found, strict=True):
        torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-6)


class Tricky(nn.Module):
    """A block that does what the test asks for."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.register_buffer("number", torch.zeros(()))
        self.trick: Callable[[Tricky, Tensor, list[Tensor]], Any] = lambda block, x, given: block.linear(x)

    def forward(self, x: Tensor, given: list[Tensor]) -> Any:
        return self.trick(self, x, given)


class TrickyModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Tricky(8) for _ in range(3))
        self.change: Callable[[Tensor], Tensor] = lambda x: x

    def forward(self, x: Tensor) -> Tensor:
        x, given = self.first(x), []
        for block in self.blocks:
            y = block(x, given)
            y = y[0] if isinstance(y, tuple) else y
            self.change(x)
            x = torch.relu(y)
        return x.square().mean()


class Cache:
    """An object that a block writes to."""

    def __init__(self) -> None:
        self.kept: list[Tensor] = []


def sets_attribute(block: Tricky, x: Tensor, given: list[Tensor]) -> Tensor:
    y = block.linear(x)
    block.extra = y.mean()
    return y


def appends(block: Tricky, x: Tensor, given: list[Tensor]) -> Tensor:
    y = block.linear(x)
    given.append(y)
    return y


KEPT: list[Tensor] = []


def keeps(block: Tricky, x: Tensor, given: list[Tensor]) -> Tensor:
    y = block.linear(x)
    KEPT.append(y)
    return y + 1


def writes(block: Tricky, x: Tensor, given: list[Tensor]) -> Tensor:
    y = block.linear(x)
    x.mul_(2)
    return y


def returns_object(block: Tricky, x: Tensor, given: list[Tensor]) -> Any:
    cache = Cache()
    cache.kept.append(x)
    return block.linear(x), cache


def changes_shape(block: Tricky, x: Tensor, given: list[Tensor]) -> Tensor:
    y = block.linear(x)
    return y if torch.is_grad_enabled() else y[:1]


def fails(block: Tricky, x: Tensor, given: list[Tensor]) -> Tensor:
    raise ZeroDivisionError("this block is broken")


def fails_in_backward(block: Tricky, x: Tensor, given: list[Tensor]) -> Tensor:
    y = block.linear(x)
    if torch.is_grad_enabled():
        y.register_hook(lambda grad: 1 / 0)
    return y


def counts(block: Tricky, x: Tensor, given: list[Tensor]) -> Tensor:
    block.number.add_(1)
    return block.linear(x)


def twice(model: nn.Module, x: Tensor) -> Tensor:
    model.blocks[1].trick = counts
    return model(x) + model(x)


def calls_backward(model: nn.Module, x: Tensor) -> Tensor:
    loss = model(x)
    loss.backward()
    return loss


def takes_gradient(model: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    return model(x) + torch.autograd.grad(model(x), x, create_graph=True)[0].square().mean()


def plain_loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x)


def broken_loss(model: nn.Module, x: Tensor) -> Tensor:
    model(x)
    raise KeyError("loss_fn is broken")


def write_input(x: Tensor) -> Tensor:
    with torch.no_grad():
        return x.add_(1)


REFUSED: dict[str, tuple[Any, str, type[BaseException], str]] = {
    "a graph in an attribute": (sets_attribute, "trick", RuntimeError, r"block 'blocks.1' leaves a tensor with a graph in attribute 'extra'"),
    "a list of the caller's": (appends, "trick", RuntimeError, r"block 'blocks.1' writes into an object that it is called with"),
    "a list of somebody's": (keeps, "trick", RuntimeError, r"something keeps an input or output of block 'blocks.1' with its graph"),
    "an input written by the block": (writes, "trick", RuntimeError, r"block 'blocks.1' was modified by an inplace operation, by the block"),
    "an object with tensors": (returns_object, "trick", RuntimeError, r"block 'blocks.1' returns a Cache that has tensors"),
    "another shape in backward": (changes_shape, "trick", RuntimeError, r"block 'blocks.1' returned tensors of \[\(1, 8\)\] in forward"),
    "an error in a block": (fails, "trick", ZeroDivisionError, "this block is broken"),
    "an error in backward": (fails_in_backward, "trick", ZeroDivisionError, "division by zero"),
    "an input written after the call": (write_input, "change", RuntimeError, r"block 'blocks.0' was modified by an inplace op.*, after the call"),
    "backward in loss_fn": (calls_backward, "loss", RuntimeError, "loss_fn calls backward"),
    "gradients in loss_fn": (takes_gradient, "loss", RuntimeError, "loss_fn calls backward"),
    "an error in loss_fn": (broken_loss, "loss", KeyError, "loss_fn is broken"),
    "a count in another order": (twice, "loss", RuntimeError, r"block 'blocks.1' writes its buffers, and each micro-batch calls it several times"),
    "no scalar": (lambda model, x: model.first(x), "loss", TypeError, r"must return a scalar tensor.*got shape \(4, 8\)"),
    "no tensor": (lambda model, x: model(x).item(), "loss", TypeError, "must return a scalar tensor.*got float"),
    "no graph": (lambda model, x: model(x).detach(), "loss", RuntimeError, "does not require grad"),
}


@functools.cache
def tricky_training(stage: int, case: str = "") -> dict[str, Tensor]:
    """Masters after two steps, before which ``case`` has been refused."""
    torch.manual_seed(0)
    model = TrickyModel().to(DEVICE)
    batches = [torch.randn(4, 8, device=DEVICE) for _ in range(3)]
    with zk.ZeroOptimizer(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage, optimizer_tier="host") as optimizer:
        if case:
            trick, where, kind, message = REFUSED[case]
            before = dict(model.blocks[1].__dict__)
            if where == "trick":
                model.blocks[1].trick = trick
            if where == "change":
                model.change = trick
            with pytest.raises(kind, match=message):
                optimizer.accumulate(batches, trick if where == "loss" else plain_loss)
            KEPT.clear()
            model.blocks[1].number.zero_()
            model.blocks[1].trick, model.change = Tricky(8).trick, TrickyModel().change
            assert model.blocks[1].__dict__.keys() - {"extra"} == before.keys()
            assert not [thread for thread in threading.enumerate() if thread.name.startswith("zk micro-batch")]
            assert not any(held.depth or held.pins for held in optimizer.held)
            assert all(param.grad is None for param in model.parameters())
        for _ in range(2):
            optimizer.accumulate(batches, plain_loss)
            optimizer.step()
            optimizer.zero_grad()
        return masters(optimizer)


# what is left behind depends on the stage where a block or its backward fails
@pytest.mark.parametrize(("case", "stage"), [*((case, 3) for case in REFUSED), ("an error in a block", 2), ("an error in backward", 2)])
def test_what_would_be_wrong_is_refused_and_leaves_nothing(case: str, stage: int) -> None:
    state = torch.get_rng_state()
    assert differing(tricky_training(stage, case), tricky_training(stage)) == []
    assert state.numel() == torch.get_rng_state().numel()


def test_bad_arguments_are_refused_by_name() -> None:
    _, optimizer = gpt()
    with pytest.raises(ValueError, match="was given no batches"):
        optimizer.accumulate([], mean_loss)
    with pytest.raises(TypeError, match="loss_fn must be a function of the model and one batch"):
        optimizer.accumulate([batch(0)], None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="takes 0 positional arguments but 2 were given"):
        optimizer.accumulate([batch(0)], lambda: 0)  # type: ignore[arg-type,misc]
    optimizer.close()
    with pytest.raises(RuntimeError, match="closed"):
        optimizer.accumulate([batch(0)], mean_loss)


def test_ctrl_c_ends_the_threads_and_training_can_go_on() -> None:
    def interrupted(model: nn.Module, ids: Tensor) -> Tensor:
        loss = mean_loss(model, ids)
        signal.raise_signal(signal.SIGINT)  # the main thread waits for this one
        return loss

    found = []
    for spoiled in (False, True):
        _, optimizer = gpt()
        with optimizer:
            if spoiled:
                with pytest.raises(KeyboardInterrupt):
                    optimizer.accumulate([batch(0), batch(1)], interrupted)
                assert not [thread for thread in threading.enumerate() if thread.name.startswith("zk micro-batch")]
                assert not any(held.depth or held.pins for held in optimizer.held)
            optimizer.accumulate([batch(0), batch(1)], mean_loss)
            optimizer.step()
            found.append(masters(optimizer))
    assert differing(found[1], found[0]) == []


# ---- ranks ---------------------------------------------------------------------------------------------------------------------


def fails_on_one_rank(stage: int) -> tuple[str, list[str]]:
    """An error of the second rank's loss_fn: what the first one hears, and what differs from training without it."""
    found, heard = [], ""
    for spoiled in (False, True):
        _, optimizer = gpt(stage)

        def loss_fn(model: nn.Module, ids: Tensor, spoiled: bool = spoiled) -> Tensor:
            loss = mean_loss(model, ids)
            if spoiled and torch.distributed.get_rank() == 1:
                raise KeyError("only here")
            return loss

        with optimizer:
            if spoiled:
                try:
                    optimizer.accumulate([batch(0), batch(1)], loss_fn)
                    optimizer.step()
                except Exception as error:
                    heard = f"{type(error).__name__}: {error}"
                optimizer.zero_grad()
            optimizer.accumulate([batch(0), batch(1)], mean_loss)
            optimizer.step()
            found.append(masters(optimizer))
    return heard, differing(found[1], found[0])


def with_tensor_parallel_blocks(stage: int) -> list[str]:
    """Differences between both orders, over ranks that have a half of each block's MLP."""
    found = []
    for vertical in (False, True):
        torch.manual_seed(0)
        model = GPT(layers=3)
        mesh = mesh_of(DEVICE.type, (1, 2), "data", "tensor")
        for block in model.blocks:
            plan = {"qkv": ColwiseParallel(output_layouts=Replicate()), "proj": RowwiseParallel(input_layouts=Replicate())}
            parallelize_module(block, mesh["tensor"], plan)
        inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
        place = {"stage": stage, "optimizer_tier": "host", "clip_grad_norm": 0.1}
        with zk.ZeroOptimizer(model, inner, process_group=mesh["data"], **place) as optimizer:
            for step in range(2):
                ids = [batch(10 * step), batch(10 * step + 1)]
                if vertical:
                    optimizer.accumulate(ids, mean_loss)
                for each in ids if not vertical else ():
                    optimizer.backward(mean_loss(model, each))
                optimizer.step()
                optimizer.zero_grad()
            found.append(masters(optimizer))
    return differing(found[1], found[0])


def on_ranks(case: tuple[str, int]) -> Any:
    what, stage = case
    return fails_on_one_rank(stage) if what == "error" else with_tensor_parallel_blocks(stage)


def test_ranks_hear_of_an_error_of_one_and_may_have_parts_of_blocks() -> None:
    cases = [("error", 2), ("error", 3), ("tensor parallel", 3)]
    for case, (first, second) in zip(cases, run_world(2, on_ranks, cases, timeout=60), strict=True):
        if case[0] == "tensor parallel":
            assert first == second == [], case
            continue
        assert "only here" in second[0] and second[0].startswith("KeyError")
        assert "rank 1" in first[0] and "only here" in first[0]
        assert first[1] == second[1] == []
