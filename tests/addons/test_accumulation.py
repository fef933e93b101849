"""``optimizer.accumulate``: the bits of the usual loop, and what it cannot follow."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import zk
from tests.models import DEVICE, GPT, batch, loss_of, unlike_the_first
from tests.parity import DTYPES, Case, compare, drive, forward, make_optimizer, plain_training
from tests.world import run_world
from zk import store
from zk.offload.cpu_adam import default_engine


def run_case(case: Case) -> str:
    """One case against plain torch, whose ranks add micro-batches up in fp32 before they average: what differs."""
    with drive(case) as options, mock.patch.object(store, "CHUNK_NUMEL", 2048), mock.patch.dict(os.environ, {"ZK_CPU_ADAM": "torch"}):
        default_engine.cache_clear()
        try:
            return _run(case, options)
        finally:
            default_engine.cache_clear()


def _run(case: Case, options: dict[str, Any]) -> str:
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    scale, local = 1024.0 if case.dtype == "fp16" else 1.0, case.accumulation > 1
    losses, want, _ = plain_training(
        case.model, case.dtype, case.optimizer, world, case.accumulation, local, case.steps, case.clip, scale
    )
    torch.manual_seed(0)
    model = GPT(case.model)
    unlike_the_first(model, rank)
    optimizer = zk.ZeroOptimizer(
        model, make_optimizer(case.optimizer, list(model.parameters())), stage=case.stage, dtype=case.dtype, optimizer_tier=case.tier,
        param_tier=case.tier if case.stage == 3 else "device", clip_grad_norm=case.clip, loss_scale=scale if scale != 1 else None,
        prefetch=case.prefetch if case.stage == 3 else 1, overlap_step=case.overlap_step, **options,
    )  # fmt: skip
    mine = []
    for step in range(case.steps):
        batches = [batch(1000 * step + 10 * micro + rank) for micro in range(case.accumulation)]
        mine += optimizer.accumulate(batches, lambda model, ids, step=step: forward(model, ids, step))
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()
    found = []
    if rank == 0 and case.tolerance == 0 and [loss.item() for loss in mine] != losses:
        found.append(f"losses {mine} instead of {losses}")
    with zk.gather(model.parameters()):
        for (name, got), value in zip(model.named_parameters(), want, strict=True):
            found.append(compare(name, got.detach().cpu(), value, case.tolerance))
    optimizer.close()
    return "\n".join(line for line in found if line)


STAGES = [Case(stage=stage, dtype=dtype, accumulation=3, steps=4) for stage in range(4) for dtype in DTYPES]
MODELS = [Case(stage=stage, model=model, accumulation=2, steps=4) for stage in (2, 3)
          for model in ("checkpointed", "checkpointed_reentrant", "unused", "frozen", "sometimes")]  # fmt: skip
OTHERS = [
    Case(stage=3, dtype="bf16", accumulation=3, tier="nvme", steps=4),
    Case(stage=2, dtype="bf16", accumulation=3, tier="nvme", steps=4),
    Case(stage=3, dtype="bf16", accumulation=2, tier="nvme", steps=4, prefetch=0),
    Case(stage=3, dtype="bf16", accumulation=2, steps=4, overlap_step=True),
    Case(stage=3, dtype="bf16", accumulation=1, steps=4),
    Case(stage=2, dtype="fp16", accumulation=1, steps=4, clip=None),
    Case(stage=3, accumulation=2, steps=4, optimizer="SGD"),
    Case(stage=3, accumulation=2, steps=4, model="tied"),
    Case(stage=3, accumulation=2, steps=4, model="elsewhere"),
]


@pytest.mark.parametrize("case", STAGES + MODELS + [pytest.param(case, marks=pytest.mark.device) for case in OTHERS], ids=str)
def test_one_rank_has_the_bits_of_plain_torch(case: Case) -> None:
    assert run_case(case) == ""


def ranks_differ(stage: int) -> str:
    """Ranks with other numbers of micro-batches, which a usual loop within no_sync() takes too."""
    count = 2 + dist.get_rank()
    got = trained(True, stage, count=count, steps=3)
    want = trained(False, min(stage, 2), count=count, steps=3)  # at stage 3 ranks would gather other units
    return "" if got == want else f"{got} instead of {want}"


def test_two_ranks_have_the_bits_of_plain_torch() -> None:
    cases = [Case(stage=stage, dtype="bf16", accumulation=2, steps=2) for stage in range(4)]
    cases += [replace(case, steps=2) for case in (*MODELS[2:4], MODELS[-1], OTHERS[0], OTHERS[4], STAGES[-1])]
    for case, said in zip(cases, run_world(2, run_case, cases, timeout=60.0), strict=True):
        assert said == ["", ""], case
    assert run_world(2, ranks_differ, [0, 1, 2, 3], timeout=60.0) == [["", ""]] * 4


# ---- against the usual loop ----------------------------------------------------------------------


class Dropped(nn.Module):
    """Blocks with dropout, and dropout between them."""

    def __init__(self, residual: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.4), nn.GELU(), nn.Linear(8, 8)) for _ in range(3))
        self.residual, self.is_checkpointed = residual, False
        self.to(DEVICE)

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(self.first(x), 0.2)
        for block in self.blocks:
            out = checkpoint(block, x, use_reentrant=False) if self.is_checkpointed else block(x)
            x = F.dropout(out, 0.1) + self.residual * x if self.residual else F.dropout(out, 0.1)
        return x


def squares(model: nn.Module, x: Tensor) -> Tensor:
    return model(x.to(DEVICE)).float().square().mean()


def masters(optimizer: zk.ZeroOptimizer) -> list[Any]:
    with zk.gather(optimizer.model.parameters(), kind="master") as values:
        return [value.tolist() for value in values]


def trained(
    accumulates: bool, stage: int = 3, count: int = 3, steps: int = 3, make: Any = Dropped, loss: Any = squares, around: bool = False,
    **options: Any,
) -> tuple[list[float], Any]:
    """Losses, norms and masters of ``accumulate``, or of the usual loop with checkpoints, whose seeds are those of accumulate."""
    torch.manual_seed(0)
    model, found = make(), []
    model.is_checkpointed = not accumulates
    optimizer = zk.ZeroOptimizer(model, torch.optim.AdamW(model.parameters(), lr=1e-2), stage=stage, clip_grad_norm=0.3, **options)
    for step in range(steps):
        batches = [torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * step + i)) for i in range(count)]
        if accumulates:
            with torch.autocast(DEVICE.type, torch.bfloat16, enabled=around):
                losses = optimizer.accumulate(batches, loss)
        else:
            seeds, losses = [int(torch.randint(2**62, ())) for _ in batches], []
            after = torch.get_rng_state()
            for x, seed in zip(batches, seeds, strict=True):
                torch.manual_seed(seed)
                with contextlib.nullcontext() if len(losses) == count - 1 else optimizer.no_sync():
                    losses.append(loss(model, x))
                    optimizer.backward(losses[-1])
            torch.set_rng_state(after)
        optimizer.step()
        optimizer.zero_grad()
        found += [*(one.item() for one in losses), optimizer.norm]
    states = masters(optimizer)
    optimizer.close()
    return found, states


@pytest.mark.parametrize("stage", [1, 3])
def test_random_numbers_of_a_block_are_drawn_again(stage: int) -> None:
    got, want = trained(True, stage), trained(False, stage)
    assert got == want and len(set(got[0])) == len(got[0])


class Twice(Dropped):
    """A block is called twice, with a residual around it, and modules have hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].register_full_backward_hook(lambda *_: None)
        self.blocks[1].register_forward_hook(lambda module, args, out: out * 1.5)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(super().forward(x)) + x


class Flagged(Dropped):
    """What is set once, as libraries note that they have installed hooks."""

    def forward(self, x: Tensor) -> Tensor:
        self.is_installed = True
        return super().forward(x)


def two_calls(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        target = model(x.to(DEVICE))
    return squares(model, x) + squares(model, x + 1) * target.mean()


WAYS = {
    "residual": {"make": lambda: Dropped(0.5)}, "twice": {"make": Twice}, "flagged": {"make": Flagged}, "two calls": {"loss": two_calls},
    "one": {"count": 1}, "nine": {"count": 9}, "backward": {"overlap_step": "backward", "optimizer_tier": "host"}, "8bit": {"state_dtype": "8bit"},
}  # fmt: skip


@pytest.mark.device
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("way", WAYS)
def test_ways_of_models_and_options(way: str, stage: int) -> None:
    assert trained(True, stage, **WAYS[way]) == trained(False, stage, **WAYS[way])


def in_autocast(model: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        return squares(model, x)


def test_autocast_within_and_around() -> None:
    want = trained(False, loss=in_autocast)
    assert trained(True, loss=in_autocast) == want != trained(True)
    assert trained(True, around=True) == want


@pytest.mark.device
def test_inputs_of_blocks_may_wait_on_the_host() -> None:
    assert kept_on("host") == kept_on("device")


def kept_on(where: str) -> list[float]:
    torch.manual_seed(0)
    model = GPT()
    optimizer = zk.ZeroOptimizer(model, torch.optim.AdamW(model.parameters(), lr=1e-2), stage=3, dtype="bf16")
    losses = []
    for step in range(3):
        losses += [x.item() for x in optimizer.accumulate([batch(step), batch(step + 9)], loss_of, keep_activations=where)]
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.device
def test_it_adds_to_what_is_there_and_clips_as_torch_does() -> None:
    def run(accumulates: bool) -> Any:
        torch.manual_seed(0)
        model = GPT()
        optimizer = zk.ZeroOptimizer(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=3, dtype="bf16")
        for step in range(3):
            ids = [batch(10 * step + number) for number in range(3)]
            loss_of(model, ids[0]).backward()
            if accumulates:
                optimizer.accumulate(ids[1:], loss_of)
            else:
                for one in ids[1:]:
                    loss_of(model, one).backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        return norm.item(), masters(optimizer)

    assert run(True) == run(False)


def test_no_sync_keeps_gradients_on_this_rank() -> None:
    torch.manual_seed(0)
    model = GPT()
    optimizer = zk.ZeroOptimizer(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=2)
    with optimizer.no_sync():
        optimizer.accumulate([batch(0), batch(1)], loss_of)
        assert not any(store.grad.is_taken for store in optimizer._trained)
    optimizer.accumulate([batch(2)], loss_of)
    assert all(store.grad.is_taken and store.grad.local is None for store in optimizer._trained)
    optimizer.step()


def test_an_overflow_skips_the_step() -> None:
    model = GPT()
    optimizer = zk.ZeroOptimizer(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=3, dtype="fp16", loss_scale=1024.0)
    before = masters(optimizer)
    optimizer.accumulate([batch(0), batch(1)], lambda model, ids: loss_of(model, ids) * 1e30)
    optimizer.step()
    assert optimizer.skipped_steps == 1 and masters(optimizer) == before


def test_a_step_moves_each_unit_as_often_however_many_micro_batches() -> None:
    class Counted(zk.Addon):
        def reduced(self, store: Any) -> None:
            moved["reduced"] = moved.get("reduced", 0) + 1

    found = []
    for count in (1, 5):
        moved: dict[str, int] = {}
        model = GPT(layers=4)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = zk.ZeroOptimizer(model, inner, stage=3, param_tier="host", addons=[Counted()])
        for _ in range(2):
            moved["reduced"] = optimizer._runtime.counts["gathers"] = 0
            optimizer.accumulate([batch(number) for number in range(count)], loss_of)
            optimizer.step()
            optimizer.zero_grad()
        found.append((moved["reduced"], optimizer._runtime.counts["gathers"]))
    assert found == [(5, 9)] * 2  # 4 blocks twice, and the rest of the model once


# ---- refusals ------------------------------------------------------------------------------------


class Wide(Dropped):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(lambda x: self.blocks[1](self.blocks[0](x)), self.first(x), use_reentrant=False)


class Sets(Dropped):
    def forward(self, x: Tensor) -> Tensor:
        self.blocks[1].mask = x > 0
        return super().forward(x)


class Cache:
    def __init__(self) -> None:
        self.keys: list[Tensor] = []


class Writes(nn.Linear):
    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        cache.keys.append(x)
        return super().forward(x)


class InAnObject(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        out = Cache()
        out.keys.append(super().forward(x))
        return out


class Of(nn.Module):
    def __init__(self, kind: Any, call: Any = lambda block, x: block(x)) -> None:
        super().__init__()
        self.blocks, self.call = nn.ModuleList([kind(8, 8), nn.Linear(8, 8)]), call

    def forward(self, x: Tensor) -> Tensor:
        out = self.call(self.blocks[0], x)
        return self.blocks[1](out if isinstance(out, Tensor) else out.keys[0])


def differing(model: Any, x: Tensor) -> Tensor:
    return model.blocks[int(x[0, 0] > 0)](x).sum()


def own_backward(model: Any, x: Tensor) -> Tensor:
    loss = squares(model, x)
    loss.backward()
    return loss.detach()


@pytest.mark.parametrize("stage", [1, 3])
def test_a_tensor_in_an_object_has_its_gradient(stage: int) -> None:
    make = lambda: Of(InAnObject).to(DEVICE)  # noqa: E731
    assert trained(True, stage, make=make) == trained(False, stage, make=make)


REFUSED: list[tuple[str, Any, Any]] = [
    ("a checkpoint is around 'blocks.1' and more", Wide, squares),
    (r"sets \['mask'\]", Sets, squares),
    ("writes into its arguments", lambda: Of(Writes, lambda block, x: block(x, Cache())), squares),
    ("writes into its arguments", lambda: Of(lambda *_: nn.BatchNorm1d(8)), squares),
    ("take different ways", Dropped, differing),
    ("calls backward", Dropped, own_backward),
    ("calls backward", Dropped, lambda model, x: torch.autograd.grad(squares(model, x.requires_grad_()), [x])[0].sum()),
    ("scalar tensor", Dropped, lambda model, x: model(x)),
]


@pytest.mark.parametrize(("words", "make", "loss"), REFUSED, ids=[f"{i}-{words}" for i, (words, *_) in enumerate(REFUSED)])
def test_what_it_cannot_follow_is_refused_and_training_goes_on(words: str, make: Any, loss: Any) -> None:
    model = make().to(DEVICE)
    optimizer = zk.ZeroOptimizer(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=3, units=["blocks.0", "blocks.1"])
    batches = [torch.ones(4, 8, device=DEVICE), -torch.ones(4, 8, device=DEVICE)]
    with pytest.raises(RuntimeError, match=words):
        optimizer.accumulate(batches, loss)
    assert all(param.grad is None for param in model.parameters())
    assert not any("_compiled_call_impl" in vars(block) and block._compiled_call_impl for block in model.modules())
    optimizer.backward(model.blocks[1](batches[0]).sum())
    optimizer.step()


def test_arguments_are_refused_by_name() -> None:
    model = GPT()
    optimizer = zk.ZeroOptimizer(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="no batches"):
        optimizer.accumulate([], loss_of)
    with pytest.raises(ValueError, match="'device' or 'host'; got '8GiB'"):
        optimizer.accumulate([batch(0)], loss_of, keep_activations="8GiB")


@pytest.mark.device
def raise_key_error() -> None:
    raise KeyError("of the user")


ENDS = {"error": (raise_key_error, KeyError), "Ctrl-C": (lambda: signal.raise_signal(signal.SIGINT), KeyboardInterrupt)}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("number", [0, 1])
def test_an_error_of_the_model_leaves_nothing_half_done(number: int, end: str) -> None:
    fail, error = ENDS[end]

    def failing(model: nn.Module, ids: Tensor) -> Tensor:
        loss = loss_of(model, ids)
        if ids is batches[number]:
            fail()
        return loss

    batches, before = [batch(0), batch(1)], threading.active_count()
    torch.manual_seed(0)
    model = GPT()
    optimizer = zk.ZeroOptimizer(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=3)
    with pytest.raises(error):
        optimizer.accumulate(batches, failing)
    deadline = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() <= before and optimizer._layout.reducer.num_local == 0
    again = [loss.item() for loss in optimizer.accumulate(batches, loss_of)]
    optimizer.step()
    torch.manual_seed(0)
    other = zk.ZeroOptimizer(model_of_other := GPT(), torch.optim.SGD(model_of_other.parameters(), lr=0.1), stage=3)
    assert again == [loss.item() for loss in other.accumulate(batches, loss_of)]
    other.step()
    assert masters(optimizer) == masters(other)
