"""Updates in the background: nobody sees a parameter before its update has ended, errors come back, and it ends when the run does."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import itertools
import math
import os
import signal
import subprocess
import sys
import textwrap
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zk
from tests.adversary import late_worker
from tests.models import GPT, batch, loss_of, train
from tests.world import run_world
from zk.core.precision import DynamicLossScale
from zk.core.store import UnitStore
from zk.offload import rules, transfer
from zk.parallel.released import Updating

ROOT = Path(__file__).parent.parent


def make(width: int = 24, layers: int = 3, **options: Any) -> tuple[GPT, zk.ZeroOptimizer]:
    torch.manual_seed(0)
    model = GPT(width=width, layers=layers)
    settings = {"stage": 2, "dtype": "bf16", "optimizer_tier": "host", "overlap_step": True, **options}
    return model, zk.ZeroOptimizer(model, torch.optim.AdamW(model.parameters(), lr=1e-2), **settings)


def beside_plain(**options: Any) -> tuple[GPT, torch.optim.AdamW, GPT, zk.ZeroOptimizer]:
    """The model and its optimizer in plain torch, in fp32, and the same with zk."""
    model, optimizer = make(layers=2, dtype=None, **options)
    plain = copy.deepcopy(model)
    return plain, torch.optim.AdamW(plain.parameters(), lr=1e-2), model, optimizer


def values(model: nn.Module) -> list[Tensor]:
    with zk.gather(model.parameters()):
        return [param.detach().clone() for param in model.parameters()]


class Gate:
    """Stops the update of the optimizer's flat slices, one by one, until they are let through."""

    def __init__(self) -> None:
        self.through, self.calls = threading.Semaphore(0), 0
        self.adam_ = rules.adam_

    def __call__(self, param: Tensor, *args: Any, **kwargs: Any) -> None:
        assert self.through.acquire(timeout=20), "nobody opened the gate"
        self.calls += 1
        self.adam_(param, *args, **kwargs)


@contextlib.contextmanager
def gated() -> Iterator[Gate]:
    gate = Gate()
    with mock.patch.object(rules, "adam_", gate):
        try:
            yield gate
        finally:
            gate.through.release(10_000)


# ---- the same bits -----------------------------------------------------------------------------------------------------------


def check_overlap_settings(stage: int, steps: int = 20) -> None:
    """Train with every setting of overlap, in fp16 with clipping and an overflow, and compare all bits."""
    found = {}
    for overlap, overlap_step in itertools.product((False, True), (False, True)):
        with mock.patch.object(transfer, "PIECE_NUMEL", 1024):
            model, optimizer = make(
                layers=2,
                stage=stage,
                dtype="fp16",
                param_tier="host" if stage == 3 else "device",
                overlap=overlap,
                overlap_step=overlap_step,
                clip_grad_norm=0.5,
                loss_scale=DynamicLossScale(init=2.0**24, hysteresis=1, window=8),
            )
            losses = train(model, optimizer, steps)
            counts = {name: optimizer.metrics()[name] for name in ("steps", "skipped_steps", "loss_scale")}
            found[overlap, overlap_step] = losses, values(model), counts
            optimizer.close()
    reference = found[False, False]
    assert reference[2]["skipped_steps"] >= 1 and len(set(reference[0])) > steps / 2
    for setting, (losses, params, counts) in found.items():
        assert losses == reference[0] and counts == reference[2], setting
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(params, reference[1], strict=True)), setting
        assert params[0].dtype == torch.float16


@pytest.mark.parametrize("stage", (2, 3))
def test_no_overlap_setting_changes_a_bit_in_20_steps_with_clipping_and_an_overflow(stage: int) -> None:
    check_overlap_settings(stage)


def test_what_a_scheduler_writes_after_step_belongs_to_the_next_one() -> None:
    found = []
    for overlap_step in (False, True):
        with gated() if overlap_step else contextlib.nullcontext() as gate:
            model, optimizer = make(overlap_step=overlap_step)
            train(model, optimizer)
            for group in optimizer.param_groups:
                group["lr"] = 123.0
            if gate is not None:
                assert gate.calls == 0
                gate.through.release(10_000)
            optimizer.synchronize()
            found.append(values(model))
            optimizer.close()
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


# ---- who waits for what ------------------------------------------------------------------------------------------------------


def test_a_learning_rate_that_is_a_tensor_is_the_value_that_it_had_at_step() -> None:
    found = []
    for overlap_step in (False, True):
        model, optimizer = make(overlap_step=overlap_step)
        rate = torch.tensor(1e-2)
        optimizer.param_groups[0]["lr"] = rate
        with gated() if overlap_step else contextlib.nullcontext() as gate:
            optimizer.backward(loss_of(model, batch(0)))
            optimizer.step()
            rate.fill_(1.0)
            if gate is not None:
                gate.through.release(10_000)
            optimizer.synchronize()
        found.append(values(model))
        optimizer.close()
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(*found, strict=True))


def in_flight(gate: Gate | None, options: dict[str, Any]) -> tuple[GPT, zk.ZeroOptimizer]:
    """A model after a step that comes to its updates 0.2 s later, where there is a gate."""
    model, optimizer = make(overlap_step=gate is not None, **options)
    optimizer.backward(loss_of(model, batch(0)))
    optimizer.step()
    if gate is not None:
        assert gate.calls == 0
        threading.Timer(0.2, gate.through.release, (10_000,)).start()
    return model, optimizer


def test_gradients_after_a_step_are_those_it_used_though_its_update_is_in_flight() -> None:
    norms = []
    for overlap_step in (False, True):
        with gated() if overlap_step else contextlib.nullcontext() as gate:
            _, optimizer = in_flight(gate, {"clip_grad_norm": 1e-2})
            norms.append(optimizer.clip_grad_norm_(math.inf).item())
            optimizer.close()
    assert norms[0] == norms[1] == pytest.approx(1e-2, rel=1e-2)


@pytest.mark.parametrize("tier", ("host", "nvme"))
def test_zeros_in_place_of_gradients_do_not_reach_an_update_in_flight(tier: str, tmp_path: Path) -> None:
    found = []
    for overlap_step in (False, True):
        with gated() if overlap_step else contextlib.nullcontext() as gate:
            options = {"optimizer_tier": "nvme", "nvme_path": tmp_path} if tier == "nvme" else {}
            model, optimizer = in_flight(gate, options)
            optimizer.zero_grad(set_to_none=False)
            optimizer.step()  # with zeros: moments decay
            optimizer.synchronize()
            found.append(values(model))
            optimizer.close()
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(*found, strict=True))


USES = {
    "arithmetic": lambda model, optimizer: model.blocks[1].up.weight.sum(),
    "data": lambda model, optimizer: model.blocks[1].up.weight.data.sum(),
    "printing": lambda model, optimizer: repr(model.blocks[1].up.weight),
    "deepcopy": lambda model, optimizer: copy.deepcopy(model),
    "state_dict": lambda model, optimizer: model.state_dict(),
    "saving": lambda model, optimizer: torch.save(model, io.BytesIO()),
    "numpy": lambda model, optimizer: model.blocks[1].up.bias.detach().float().numpy(),
    "a part of the model": lambda model, optimizer: model.blocks[2](torch.zeros(1, 4, 24, dtype=torch.bfloat16)),
    "evaluation": lambda model, optimizer: loss_of(model.eval(), batch(3)),
    "gather": lambda model, optimizer: zk.gather(model.parameters()).__enter__(),
    "writing": lambda model, optimizer: torch.nn.init.zeros_(model.blocks[1].up.weight),
    "optimizer.state_dict": lambda model, optimizer: optimizer.state_dict(),
    "synchronize": lambda model, optimizer: optimizer.synchronize(),
    "close": lambda model, optimizer: optimizer.close(),
    "the next step": lambda model, optimizer: optimizer.step(lambda: loss_of(model, batch(4)).backward()),
}


@pytest.mark.parametrize("use", USES)
def test_whoever_uses_a_parameter_sees_it_updated(use: str) -> None:
    model, optimizer = make()
    train(model, optimizer)
    optimizer.synchronize()
    want, theirs = make(overlap_step=False)
    train(want, theirs, steps=2)
    with gated() as gate:
        train(model, optimizer, start=1)
        timer = threading.Timer(0.05, gate.through.release, (10_000,))
        timer.start()
        result = USES[use](model, optimizer)
        assert gate.calls > 0
        timer.join()
    expected = USES[use](want, theirs)
    if isinstance(result, Tensor):
        assert torch.equal(result, expected)
    elif isinstance(result, (dict, nn.Module)):
        pairs = [m.state_dict() if isinstance(m, nn.Module) else m for m in (result, expected)]
        keys = pairs[0].keys() - {"state", "param_groups", "zk"}
        assert all(torch.equal(pairs[0][key], pairs[1][key]) for key in keys)
        assert type(next(model.parameters())) is nn.Parameter
    elif isinstance(result, str):
        assert result == expected and result.startswith("Parameter containing")


def test_a_state_dict_that_somebody_holds_neither_changes_nor_is_written_through() -> None:
    model, optimizer = make()
    train(model, optimizer)
    state = optimizer.state_dict()
    moments = [kept["exp_avg"] for kept in state["state"].values()]
    before = [moment.clone() for moment in moments]
    train(model, optimizer, start=1)
    optimizer.synchronize()
    assert all(map(torch.equal, moments, before))
    for moment in moments:
        moment.fill_(math.nan)
    train(model, optimizer, start=2)
    assert not any(value.isnan().any() for value in values(model))
    optimizer.close()


class Dropped:
    """What is left of an optimizer that nobody holds any more, while its last update goes on."""

    def __init__(self, optimizer: zk.ZeroOptimizer) -> None:
        self.done = [held.underway.done for held in optimizer.held if held.underway is not None]
        self.held = weakref.ref(optimizer.held[0])

    def join(self) -> None:
        """Return when the update has ended."""
        assert self.done
        for ticket in self.done:
            ticket.join()

    def is_gone(self) -> bool:
        """Whether nothing holds it, once the update has ended."""
        self.join()
        for _ in range(100):  # the thread lets go of its job a little later
            gc.collect()
            if self.held() is None:
                return True
            threading.Event().wait(0.02)
        return False


@pytest.mark.parametrize("fails", (False, True))
@pytest.mark.parametrize("stage", (0, 2))
def test_a_model_outlives_an_optimizer_that_was_dropped_under_its_update(stage: int, fails: bool) -> None:
    model, optimizer = make(stage=stage, overlap_step=False)
    train(model, optimizer, 2)
    want = values(model)
    model, optimizer = make(stage=stage)
    train(model, optimizer)
    optimizer.synchronize()
    gate = Gate()
    with mock.patch.object(rules, "adam_", mock.Mock(side_effect=ArithmeticError("broken")) if fails else gate):
        train(model, optimizer, start=1)
        dropped = Dropped(optimizer)
        del optimizer
        gate.through.release(100)
        dropped.join()
    assert fails or dropped.is_gone()  # an error keeps what it went through
    with pytest.raises(ArithmeticError) if fails else contextlib.nullcontext():
        assert all(map(torch.equal, [param.detach().clone() for param in model.parameters()], want))
        assert not any(isinstance(param, Updating) for param in model.parameters())


@pytest.mark.parametrize("overlap_step", (False, True))
def test_a_step_that_is_refused_changes_nothing_and_one_that_is_interrupted_says_so(overlap_step: bool) -> None:
    model, optimizer = make(overlap_step=False)
    want = train(model, optimizer, 3)
    model, optimizer = make(overlap_step=overlap_step)
    losses = train(model, optimizer)
    loss = loss_of(model, batch(1))
    loss.backward()
    param = list(model.parameters())[-1]
    kept, param.data = param.data, param.data.double()
    with pytest.raises(RuntimeError, match="was moved or converted"):
        optimizer.step()
    param.data = kept
    optimizer.step()
    optimizer.zero_grad()
    assert [*losses, loss.item(), *train(model, optimizer, start=2)] == want

    counted = itertools.count()
    count_step = UnitStore.count_step

    def interrupted(self: UnitStore, *args: object) -> None:
        count_step(self, *args)
        if next(counted) == 1:
            raise KeyboardInterrupt

    loss_of(model, batch(3)).backward()
    with mock.patch.object(UnitStore, "count_step", interrupted), pytest.raises(KeyboardInterrupt):
        optimizer.step()
    with pytest.raises(RuntimeError, match="half-way"):
        optimizer.step()


def test_gradients_dropped_after_step_are_those_of_the_next_one() -> None:
    found = []
    for early in (False, True):
        model, optimizer = make()
        with gated() as gate:
            if not early:
                gate.through.release(10_000)
            loss_of(model, batch(0)).backward()
            optimizer.step()
            optimizer.zero_grad()
            model.zero_grad()
            gate.through.release(10_000)
            found.append(values(model))
        optimizer.close()
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("looks", (True, False))
def test_gradients_that_stay_after_a_step_are_used_again_when_the_step_is_over(looks: bool) -> None:
    """Looked at, or added to. What clipping has made of them is known then."""
    plain, inner, model, optimizer = beside_plain(clip_grad_norm=0.05)
    with late_worker():
        for step in range(3):
            loss_of(plain, batch(step)).backward()
            nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
            inner.step()
            loss_of(model, batch(step)).backward()
            optimizer.step()
            if looks:
                for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                    torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-7)
    for mine, theirs in zip(values(model), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-4)
    optimizer.close()


@pytest.mark.parametrize("writes", (False, True))
def test_state_that_is_looked_at_after_a_step_is_that_of_its_end(writes: bool) -> None:
    plain, inner, model, optimizer = beside_plain()
    with late_worker():
        for step in range(3):
            for net, its in ((plain, inner), (model, optimizer)):
                loss_of(net, batch(step)).backward()
                its.step()
                its.zero_grad()
            for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                if writes:
                    optimizer.state[mine] = {"step": torch.tensor(7.0), "exp_avg": torch.zeros_like(theirs), "exp_avg_sq": torch.ones_like(theirs)}
                    inner.state[theirs] |= {"step": torch.tensor(7.0), "exp_avg": torch.zeros_like(theirs), "exp_avg_sq": torch.ones_like(theirs)}
                else:
                    got = optimizer.state[mine]
                    assert got["step"] == inner.state[theirs]["step"]
                    torch.testing.assert_close(got["exp_avg"], inner.state[theirs]["exp_avg"])
    for mine, theirs in zip(values(model), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-4)
    optimizer.close()


def adding_where_another_rank_has_a_gradient(_: None) -> str:
    """After a step that clipped, rank 1 uses one of two layers only; it still takes its part of the other's gradient."""
    torch.manual_seed(0)
    model = nn.ModuleList((nn.Linear(8, 8), nn.Linear(8, 8)))
    plain, rank = copy.deepcopy(model), dist.get_rank()
    x = torch.randn(2, 6, 8)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = zk.ZeroOptimizer(model, inner, stage=2, optimizer_tier="host", overlap_step=True, clip_grad_norm=0.05)
    with late_worker():
        (model[0](x[0]) + model[1](x[0])).square().mean().backward()
        (plain[0](x[0]) + plain[1](x[0])).square().mean().backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
        optimizer.step()
        (model[0](x[1]).sum() + (model[1](x[1]).sum() if rank == 0 else 0)).backward()
        grads = [param.grad for param in model.parameters()]
    optimizer.close()
    with torch.no_grad():
        for param, share in zip(plain.parameters(), (1, 1, 0.5, 0.5), strict=True):
            param.grad += share * (torch.full((8,), 6.0) if param.ndim == 1 else x[1].sum(0).expand(8, 8))
    for mine, theirs in zip(grads, plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs.grad, rtol=1e-4, atol=1e-5)
    return ""


def test_a_rank_adds_to_gradients_that_a_step_still_uses_when_it_is_over() -> None:
    assert run_world(2, adding_where_another_rank_has_a_gradient, [None])[0] == ["", ""]


# ---- errors and ends ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hears", ("synchronize", "step"))
def test_what_fails_beside_training_raises_in_it_with_its_traceback_and_can_be_mended(hears: str) -> None:
    model, optimizer = make()
    train(model, optimizer, steps=2)
    saved, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
    calls = itertools.count()
    adam_ = rules.adam_

    def failing(*args: Any, **kwargs: Any) -> None:
        if next(calls) == 3:
            raise ArithmeticError("the third slice")
        adam_(*args, **kwargs)

    with mock.patch.object(rules, "adam_", failing):
        loss_of(model, batch(2)).backward()
        optimizer.step()
        with pytest.raises(ArithmeticError, match="the third slice") as caught:
            getattr(optimizer, hears)()
        assert "failing" in [entry.name for entry in caught.traceback]
        with pytest.raises(RuntimeError, match=r"half-way .*the third slice.* the model's forward is refused"):
            loss_of(model, batch(3))  # nothing goes on with half an update
        with pytest.raises((RuntimeError, ArithmeticError), match=r"half-way|third slice"):
            optimizer.step()
    optimizer.load_state_dict(saved)
    assert all(torch.equal(model.state_dict()[key], value) for key, value in weights.items())
    want, theirs = make(overlap_step=False)
    assert train(want, theirs, steps=4)[2:] == train(model, optimizer, steps=2, start=2)
    optimizer.close()


def test_an_import_starts_nothing_and_ctrl_c_ends_a_run_at_once_and_leaves_nothing(tmp_path: Path) -> None:
    program = textwrap.dedent(
        f"""
        import signal, sys, torch, zk
        print([name for name in ("numba", "triton", "cupy", "matplotlib") if name in sys.modules], torch.cuda.is_initialized())
        from torch import nn
        signal.signal(signal.SIGINT, signal.default_int_handler)  # what starts the tests may have it ignored
        model = nn.Sequential(*[nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(8)])
        tiers = {{"param_tier": "nvme", "optimizer_tier": "nvme", "nvme_path": {str(tmp_path)!r}}}
        inner = torch.optim.AdamW(model.parameters())
        optimizer = zk.ZeroOptimizer(model, inner, stage=3, overlap_step=True, **tiers)
        for step in range(10 ** 9):
            model(torch.randn(4, 512)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 3:
                print("training", flush=True)
        """
    )
    process = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "[] False\n"
        assert process.stdout.readline() == "training\n"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=20)
    finally:
        process.kill()
    assert "KeyboardInterrupt" in errors and process.returncode in (-signal.SIGINT, 130), errors
    assert "Fatal" not in errors and os.listdir(tmp_path) == []
