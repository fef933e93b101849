"""``optimizer.accumulate``: the bits of the usual loop, and what it cannot follow."""

import contextlib
import signal
import threading
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import zk
from tests.addons.common import faults_of_ranks, same
from tests.addons.test_experts import mixture
from tests.models import DEVICE, GPT, batch, loss_of, small_chunks
from tests.parity import Case, drive, states_of
from tests.world import call


class Dropped(nn.Module):
    """Blocks with dropout, and dropout between them. They are called twice, there is a checkpoint around two, ..., as ``what`` says."""

    def __init__(self, what: str = "") -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.4), nn.GELU(), nn.Linear(8, 8)) for _ in range(3))
        self.what, self.is_checkpointed = what, False
        if what == "twice":
            self.blocks[2].register_full_backward_hook(lambda *_: None)
            self.blocks[1].register_forward_hook(lambda module, args, out: out * 1.5)
        self.to(DEVICE)

    def forward(self, x: Tensor) -> Tensor:
        match self.what:
            case "flagged":  # once, as libraries note that they have installed hooks
                self.is_installed = True
            case "sets":
                self.blocks[1].mask = x > 0
            case "wide":
                return checkpoint(lambda x: self.blocks[1](self.blocks[0](x)), self.first(x), use_reentrant=False)
            case "twice":
                return self.passed(self.passed(x)) + x
        return self.passed(x)

    def passed(self, x: Tensor) -> Tensor:
        x = F.dropout(self.first(x), 0.2)
        for block in self.blocks:
            out = checkpoint(block, x, use_reentrant=False) if self.is_checkpointed else block(x)
            x = F.dropout(out, 0.1) + 0.5 * x if self.what == "residual" else F.dropout(out, 0.1)
        return x


class InAnObject(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        return SimpleNamespace(keys=[super().forward(x)])


class Writes(nn.Linear):
    def forward(self, x: Tensor, cache: Any) -> Tensor:
        cache.keys.append(x)
        return super().forward(x)


class Of(nn.Module):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.blocks, self.is_checkpointed = nn.ModuleList([kind(8, 8), nn.Linear(8, 8)]).to(DEVICE), False

    def forward(self, x: Tensor) -> Tensor:
        out = self.blocks[0](x, *[SimpleNamespace(keys=[])] * isinstance(self.blocks[0], Writes))
        return self.blocks[1](out if isinstance(out, Tensor) else out.keys[0])


def squares(model: nn.Module, x: Tensor) -> Tensor:
    return model(x.to(DEVICE)).float().square().mean()


def two_calls(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        target = model(x.to(DEVICE))
    return squares(model, x) + squares(model, x + 1) * target.mean()


def in_autocast(model: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        return squares(model, x)


def of_its_own(model: Any, x: Tensor) -> Tensor:
    return squares(model.blocks[dist.get_rank()], x)


def of_fewer(model: Any, x: Tensor) -> Tensor:
    return squares(nn.Sequential(model.first, *model.blocks[: 1 - dist.get_rank()]), x)


def trained(
    accumulates: bool, stage: int = 3, count: int = 3, make: Any = Dropped, loss: Any = squares,
    around: bool = False, before: bool = False, parts: bool = False, tier: str = "host", keep: str = "device", **options: Any,
) -> list[Tensor]:  # fmt: skip
    """What ``accumulate``, or the usual loop, leaves. before: after a usual backward, clipped; parts: in two calls; around: in autocast."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    torch.manual_seed(0)
    model, found = make(), list[Any]()
    model.is_checkpointed = not accumulates
    is_text = isinstance(model, GPT)
    with small_chunks(), drive(Case(tier=tier)) as place:
        options |= {"optimizer_tier": tier, "param_tier": tier if stage == 3 else "device", "clip_grad_norm": None if before else 0.3, **place}
        optimizer = zk.ZeroOptimizer(model, torch.optim.AdamW(model.parameters(), lr=1e-2), stage=stage, **options)
        for step in range(3):
            seeds = [1000 * step + 10 * number + rank for number in range(count)]
            batches = [batch(seed) if is_text else torch.randn(4, 8, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
            if before:
                optimizer.backward(loss(model, batches.pop(0)))
            losses = list[Tensor]()
            if accumulates:
                if parts:
                    with optimizer.no_sync():
                        losses += optimizer.accumulate([batches.pop(0)], loss)
                with torch.autocast(DEVICE.type, torch.bfloat16, enabled=around):
                    losses += optimizer.accumulate(batches, loss, keep_activations=keep)
            else:
                seeds = [int(torch.randint(2**62, ())) for _ in batches]
                after = torch.get_rng_state()
                for x, seed in zip(batches, seeds, strict=True):
                    torch.manual_seed(seed)
                    with contextlib.nullcontext() if x is batches[-1] else optimizer.no_sync():
                        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=around):
                            losses.append(loss(model, x))
                        optimizer.backward(losses[-1])
                torch.set_rng_state(after)
            found += [float(nn.utils.clip_grad_norm_(model.parameters(), 0.1))] if before else []
            optimizer.step()
            optimizer.zero_grad()
            found += [*losses, optimizer.norm]
        return [value.nan_to_num(nan=7.0) for value in (torch.tensor(found), *states_of(optimizer))]  # norms where it overflows


def gpt(variant: str = "plain") -> Any:
    sometimes = lambda model, ids: loss_of(model, ids, branch=bool(ids[0, 0] % 2))  # noqa: E731
    return {"make": partial(GPT, variant), "loss": sometimes if variant == "sometimes" else loss_of}


BF16, FP16 = {"dtype": "bf16"}, {"dtype": "fp16", "loss_scale": 1024.0}
WAYS: dict[str, dict[str, Any]] = {
    **{f"stage {stage}": gpt() | {"stage": stage} | dtype for stage, dtype in enumerate((BF16, {}, FP16, FP16))},
    **{name: gpt(name) for name in ("checkpointed", "checkpointed_reentrant", "unused", "sometimes", "tied", "elsewhere")},
    "sometimes, stage 2": gpt("sometimes") | {"stage": 2},
    "nvme": gpt() | BF16 | {"tier": "nvme"},
    "nvme, no prefetch": gpt("frozen") | BF16 | {"tier": "nvme", "prefetch": 0},
    "overlap": gpt() | BF16 | {"overlap_step": True},
    "one": gpt() | BF16 | {"count": 1},
    "after a backward": gpt() | BF16 | {"before": True},
    "in two parts": gpt() | BF16 | {"parts": True},
    "inputs on the host": gpt() | BF16 | {"keep": "host"},
    "overflow": gpt() | FP16 | {"loss": lambda model, ids: loss_of(model, ids) * 1e30},
    "dropout": {"announce": True},
    **{what: {"make": partial(Dropped, what)} for what in ("residual", "twice", "flagged")},
    "two calls": {"loss": two_calls},
    "backward": {"overlap_step": "backward", "stage": 1},
    "in autocast": {"around": True},
    "with autocast in it": {"loss": in_autocast},
    "a tensor in an object": {"make": lambda: Of(InAnObject)},
    "experts": {"make": mixture, "loss": lambda model, x: squares(model, x.repeat(1, 2)), "units": ["0", "1"], "experts": True},
}
ON_DEVICE = {"in autocast", "nvme", "overlap", "inputs on the host", "after a backward", "residual", "backward"}


@pytest.mark.parametrize("way", [pytest.param(way, marks=[pytest.mark.device] * (way in ON_DEVICE)) for way in WAYS])
def test_it_trains_what_the_usual_loop_trains(way: str) -> None:
    got, want = trained(True, **WAYS[way]), trained(False, **WAYS[way])
    assert same(got, want) and got[-1] == (3 if way == "overflow" else 0)
    assert "dropout" not in way or len({*got[0][:3].tolist()}) == 3


def of_rank(case: tuple[str, int]) -> str:
    """A rank with another number of micro-batches, which a usual loop within no_sync() takes too."""
    way, stage = case
    options = WAYS[way] | {"count": WAYS[way].get("count", 2) + dist.get_rank(), "stage": stage}
    got, want = trained(True, **options), trained(False, **options | {"stage": min(stage, 2)})  # at stage 3 ranks would gather other units
    return "" if same(got, want) else f"{got[0]} instead of {want[0]}"


def other_blocks(loss: Any) -> None:
    model = Dropped()
    optimizer = zk.ZeroOptimizer(model, torch.optim.SGD(model.parameters()), stage=2)
    with pytest.raises(ValueError, match=r"through blocks must be the same.*blocks\.\d on rank 0 and (no block|blocks\.\d) on rank 1"):
        optimizer.accumulate([torch.ones(2, 8, device=DEVICE)] * 2, loss)
    optimizer.close()


def test_ranks_train_what_the_usual_loop_trains_and_refuse_to_call_other_blocks() -> None:
    cases = [*((f"stage {stage}", stage) for stage in range(3)), ("in two parts", 2)]
    cases += [(way, 3) for way in ("dropout", "in two parts", "checkpointed", "sometimes", "nvme", "one", "experts")]
    jobs: list[Any] = [(of_rank, case) for case in cases]
    jobs += [(other_blocks, loss) for loss in (of_its_own, of_fewer)]
    assert faults_of_ranks(2, call, jobs) == {}


def test_a_step_moves_each_unit_as_often_however_many_micro_batches() -> None:
    class Counted(zk.Addon):
        def reduced(self, store: Any) -> None:
            moved.append(store)

    for count in (1, 5):
        moved: list[Any] = []
        model = GPT(layers=4)
        optimizer = zk.ZeroOptimizer(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=3, param_tier="host", addons=[Counted()])
        optimizer.accumulate([batch(number) for number in range(count)], loss_of)
        assert (len(moved), optimizer._runtime.counts["gathers"]) == (5, 9)  # 4 blocks twice, and the rest of the model once


REFUSED: list[tuple[str, Any, Any]] = [
    ("a checkpoint is around 'blocks.1' and more", partial(Dropped, "wide"), squares),
    (r"sets \['mask'\]", partial(Dropped, "sets"), squares),
    ("writes into its arguments", lambda: Of(Writes), squares),
    ("writes into its arguments", lambda: Of(lambda *_: nn.BatchNorm1d(8)), squares),
    ("take different ways", Dropped, lambda model, x: model.blocks[int(x[0, 0] > 0)](x).sum()),
    ("calls backward", Dropped, lambda model, x: squares(model, x).backward()),
    ("calls backward", Dropped, lambda model, x: torch.autograd.grad(squares(model, x.requires_grad_()), [x])[0].sum()),
    ("scalar tensor", Dropped, lambda model, x: model(x)),
]


@pytest.mark.parametrize(("words", "make", "loss"), REFUSED, ids=[f"{i}-{words}" for i, (words, *_) in enumerate(REFUSED)])
def test_what_it_cannot_follow_is_refused_and_training_goes_on(words: str, make: Any, loss: Any) -> None:
    model = make()
    optimizer = zk.ZeroOptimizer(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=3, units=["blocks.0", "blocks.1"])
    batches = [torch.ones(4, 8, device=DEVICE), -torch.ones(4, 8, device=DEVICE)]
    with pytest.raises(RuntimeError, match=words):
        optimizer.accumulate(batches, loss)
    with pytest.raises(ValueError, match="no batches"):
        optimizer.accumulate([], loss)
    with pytest.raises(ValueError, match="'device' or 'host'; got '8GiB'"):
        optimizer.accumulate(batches, loss, keep_activations="8GiB")
    assert all(param.grad is None for param in model.parameters())
    assert not any("_compiled_call_impl" in vars(block) and block._compiled_call_impl for block in model.modules())
    optimizer.backward(model.blocks[1](batches[0]).sum())
    optimizer.step()


def test_an_error_of_the_model_leaves_nothing_half_done() -> None:
    batches, before, found = [batch(0), batch(1)], {*threading.enumerate()}, []

    def failing(model: nn.Module, ids: Tensor) -> Tensor:
        loss = loss_of(model, ids)
        if ids is batches[0] and error is KeyboardInterrupt:
            signal.raise_signal(signal.SIGINT)
        elif ids is batches[1]:
            raise error
        return loss

    for error in (KeyboardInterrupt, KeyError, None):
        torch.manual_seed(0)
        model = GPT()
        optimizer = zk.ZeroOptimizer(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=3)
        if error:
            with pytest.raises(error):
                optimizer.accumulate(batches, failing)
            for lane in {*threading.enumerate()} - before:
                lane.join(10)
                assert not lane.is_alive()
        losses = optimizer.accumulate(batches, loss_of)
        optimizer.step()
        found.append([*losses, *states_of(optimizer)])
    assert same(*found[:2]) and same(*found[1:])
