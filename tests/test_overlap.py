"""Updates beside training: nobody sees a parameter before its update has ended, errors come back, and it ends when the run does."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import itertools
import os
import signal
import subprocess
import sys
import textwrap
import threading
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import zk
from tests.models import GPT, batch, loss_of
from tests.parity import DTYPES
from zk.config import DynamicLossScale
from zk.held import Held
from zk.offload import rules, spill, transfer
from zk.offload.twins import AdversarialLink, ThrottledLink, pretend
from zk.offload.worker import Worker
from zk.parallel.released import Updating

ROOT = Path(__file__).parent.parent


def make(width: int = 24, layers: int = 3, **options: Any) -> tuple[GPT, zk.ZeroOptimizer]:
    torch.manual_seed(0)
    model = GPT(width=width, layers=layers)
    settings = {"stage": 2, "dtype": "bf16", "optimizer_tier": "host", "overlap_step": True, **options}
    return model, zk.ZeroOptimizer(model, torch.optim.AdamW(model.parameters(), lr=1e-2), **settings)


def train(model: nn.Module, optimizer: zk.ZeroOptimizer, steps: int = 1, start: int = 0) -> list[float]:
    losses = []
    for step in range(start, start + steps):
        loss = loss_of(model, batch(step))
        optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


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
        yield gate
        gate.through.release(10_000)


# ---- the same bits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("stage", "dtype"), ((2, "fp16"), (3, "fp16")))
def test_no_overlap_setting_changes_a_bit_in_20_steps_with_clipping_and_an_overflow(stage: int, dtype: str) -> None:
    found = {}
    for overlap, overlap_step, separate in itertools.product((False, True), (False, True), (False, True)):
        with pretend(AdversarialLink()) if separate else contextlib.nullcontext(), mock.patch.object(transfer, "PIECE_NUMEL", 1024):
            model, optimizer = make(
                layers=2,
                stage=stage,
                dtype=dtype,
                param_tier="host" if stage == 3 else "device",
                overlap=overlap,
                overlap_step=overlap_step,
                clip_grad_norm=0.5,
                loss_scale=DynamicLossScale(init=2.0**24, hysteresis=1, window=8) if dtype == "fp16" else None,
            )
            losses = train(model, optimizer, steps=20)
            counts = {name: optimizer.metrics()[name] for name in ("steps", "skipped_steps", "loss_scale")}
            found[overlap, overlap_step, separate] = losses, values(model), counts
            optimizer.close()
    reference = found[False, False, False]
    assert (reference[2]["skipped_steps"] >= 1) == (dtype == "fp16") and len(set(reference[0])) > 10
    for setting, (losses, params, counts) in found.items():
        assert losses == reference[0] and counts == reference[2], setting
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(params, reference[1], strict=True)), setting
        assert params[0].dtype == DTYPES[dtype]


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


def test_forward_waits_for_the_units_it_has_reached_and_for_no_other() -> None:
    model, optimizer = make()
    reached: list[int] = []
    for number, block in enumerate(model.blocks):
        block.register_forward_pre_hook(lambda module, args, number=number: reached.append(number))
    train(model, optimizer, steps=2)
    optimizer.synchronize()
    with gated() as gate:
        loss = loss_of(model, batch(7))
        loss.backward()
        optimizer.step()  # returns, though nothing can be updated
        reached.clear()
        gate.through.release(2)  # what is left over, used first, and the first block
        thread = threading.Thread(target=lambda: loss_of(model, batch(8)))
        thread.start()
        for _ in range(200):
            if gate.calls == 2 and reached == [0]:
                break
            thread.join(0.02)
        assert (gate.calls, reached) == (2, [0]), "updates in the order of forward: it is in the first block, and waits before the second"
        gate.through.release(10_000)
        thread.join()
        assert reached == [0, 1, 2]
    optimizer.close()


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


def test_threads_that_read_parameters_do_not_disturb_training() -> None:
    model, optimizer = make(overlap_step=False)
    want = train(model, optimizer, 12), values(model)
    model, optimizer = make()
    stop, failed = threading.Event(), []
    switch, params = sys.getswitchinterval(), list(model.parameters())

    def read() -> None:
        while not stop.is_set():
            try:
                for param in params:
                    param.detach().float().norm()
            except BaseException as error:
                failed.append(error)

    readers = [threading.Thread(target=read) for _ in range(2)]
    sys.setswitchinterval(1e-5)
    try:
        for reader in readers:
            reader.start()
        losses = train(model, optimizer, 12)
    finally:
        stop.set()
        sys.setswitchinterval(switch)
        for reader in readers:
            reader.join()
    assert failed == [] and losses == want[0]
    assert all(map(torch.equal, values(model), want[1]))


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


def test_what_a_dropped_optimizer_has_on_its_way_arrives_before_it_is_read() -> None:
    model, optimizer = make(overlap_step=False)
    train(model, optimizer, 2)
    want = values(model)
    with pretend(AdversarialLink()) as link:
        model, optimizer = make()
        train(model, optimizer, 2)
        dropped = Dropped(optimizer)
        del optimizer
        assert dropped.is_gone()
        found = [param.detach().clone() for param in model.parameters()]
        link.finish()
    assert link.races == [] and all(map(torch.equal, found, want))


@pytest.mark.parametrize("overlap_step", (False, True))
def test_a_step_that_is_refused_changes_nothing_and_one_that_is_interrupted_says_so(overlap_step: bool) -> None:
    model, optimizer = make(overlap_step=False)
    want = train(model, optimizer, 3)
    model, optimizer = make(overlap_step=overlap_step)
    losses = train(model, optimizer)
    loss = loss_of(model, batch(1))
    loss.backward()
    param = list(model.parameters())[-1]
    kept, param.data = param.data, param.data.clone()
    with pytest.raises(RuntimeError, match="was moved or converted"):
        optimizer.step()
    param.data = kept
    optimizer.step()
    optimizer.zero_grad()
    assert [*losses, loss.item(), *train(model, optimizer, start=2)] == want

    counted = itertools.count()
    count_step = Held.count_step

    def interrupted(self: Held) -> None:
        count_step(self)
        if next(counted) == 1:
            raise KeyboardInterrupt

    loss_of(model, batch(3)).backward()
    with mock.patch.object(Held, "count_step", interrupted), pytest.raises(KeyboardInterrupt):
        optimizer.step()
    with pytest.raises(RuntimeError, match="half-way"):
        optimizer.step()


def test_a_forked_process_is_told_that_it_has_no_thread_to_wait_for() -> None:
    gate = Gate()
    with mock.patch.object(rules, "adam_", gate):
        model, optimizer = make()
        train(model, optimizer)
        reads, writes = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # a fork with threads
            child = os.fork()
        if child == 0:
            try:
                next(model.parameters()).sum()
            except BaseException as error:
                os.write(writes, str(error).encode())
            os._exit(0)
        os.close(writes)
        with os.fdopen(reads) as pipe:
            said = pipe.read()
        os.waitpid(child, 0)
        gate.through.release(100)
        optimizer.synchronize()
    assert "forked" in said and "synchronize()" in said


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


def test_a_core_is_left_for_the_thread_that_launches() -> None:
    seen = []
    adam_ = rules.adam_

    def spy(*args: Any, num_threads: int, **kwargs: Any) -> None:
        seen.append(num_threads)
        adam_(*args, num_threads=num_threads, **kwargs)

    with mock.patch.object(rules, "adam_", spy), mock.patch("zk.optimizer.default_threads", lambda: 4):
        for options, want in (({}, 3), ({"num_threads": 2}, 2), ({"overlap_step": False}, 4)):
            seen.clear()
            model, optimizer = make(**options)
            train(model, optimizer)
            optimizer.close()
            assert set(seen) == {want}


def test_a_piece_is_updated_while_the_one_before_is_still_on_its_way_up() -> None:
    class Slow(ThrottledLink):
        """Uploads wait until they are let go."""

        def __init__(self) -> None:
            super().__init__(1e12)
            self.go = threading.Event()

        def upload(self, target: Tensor, host: Tensor, after: Any) -> Any:
            return super().upload(target, host, [*after, self.go])  # type: ignore[list-item]

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64))
    with pretend(Slow()) as link, mock.patch.object(transfer, "PIECE_NUMEL", 1024):
        link.go.set()
        optimizer = zk.ZeroOptimizer(model, torch.optim.AdamW(model.parameters()), dtype="bf16", optimizer_tier="host", overlap_step=True)
        link.go.clear()
        with gated() as gate:
            gate.through.release(10_000)
            model(torch.randn(2, 64)).sum().backward()
            optimizer.step()
            for _ in range(500):
                if gate.calls >= 5:
                    break
                threading.Event().wait(0.01)
            assert gate.calls == 5, "all five pieces, though none has come up"
            link.go.set()
        optimizer.close()


# ---- errors and ends ---------------------------------------------------------------------------------------------------------


def test_what_fails_beside_training_raises_in_it_with_its_traceback_and_can_be_mended() -> None:
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
            optimizer.synchronize()
        assert "failing" in [entry.name for entry in caught.traceback]
        with pytest.raises(ArithmeticError):
            loss_of(model, batch(3))  # nothing goes on with half an update
        with pytest.raises((RuntimeError, ArithmeticError), match=r"half-way|third slice"):
            optimizer.step()
    optimizer.load_state_dict(saved)
    assert all(torch.equal(model.state_dict()[key], value) for key, value in weights.items())
    want, theirs = make(overlap_step=False)
    assert train(want, theirs, steps=4)[2:] == train(model, optimizer, steps=2, start=2)
    optimizer.close()


def test_close_after_an_error_does_not_wait_for_the_rest() -> None:
    model, optimizer = make()
    calls = []

    def slow(*args: Any, **kwargs: Any) -> None:
        calls.append(threading.Event().wait(0.05))

    with mock.patch.object(rules, "adam_", slow), pytest.raises(KeyError), optimizer:
        train(model, optimizer)
        raise KeyError("the user's")
    assert len(calls) < 4 and optimizer.closed
    assert optimizer.worker.thread is None


def test_a_worker_ends_with_its_owner_and_does_its_jobs_in_order() -> None:
    worker, done = Worker("zk test"), []
    tickets = [worker.submit(lambda number=number: done.append(number)) for number in range(20)]
    tickets[-1].wait()
    assert done == list(range(20))
    failed = worker.submit(lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        failed.wait()
    worker.submit(lambda: done.append(-1)).wait()  # one failed job does not end it
    thread = worker.thread
    del worker, tickets, failed
    assert thread is not None
    thread.join(5)
    assert not thread.is_alive() and done[-1] == -1


@pytest.mark.parametrize("tier", ("host", "nvme"))
def test_ctrl_c_ends_a_run_at_once_and_leaves_nothing(tier: str, tmp_path: Path) -> None:
    program = textwrap.dedent(
        f"""
        import signal, torch, zk
        from torch import nn
        signal.signal(signal.SIGINT, signal.default_int_handler)  # what starts the tests may have it ignored
        model = nn.Sequential(*[nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(8)])
        path = {{"nvme_path": {str(tmp_path)!r}}} if {tier!r} == "nvme" else {{}}
        inner = torch.optim.AdamW(model.parameters())
        optimizer = zk.ZeroOptimizer(model, inner, stage=3, param_tier={tier!r}, optimizer_tier={tier!r}, overlap_step=True, **path)
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
        assert process.stdout is not None and process.stdout.readline() == "training\n"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=20)
    finally:
        process.kill()
    assert "KeyboardInterrupt" in errors and process.returncode in (-signal.SIGINT, 130), errors
    assert "Fatal" not in errors and os.listdir(tmp_path) == []


# ---- budgets -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", (1, 2, 3))
def test_auto_fills_the_device_to_the_element_and_trains_the_same(stage: int, tmp_path: Path) -> None:
    want, theirs = make(overlap_step=False, stage=stage, width=72)
    losses = train(want, theirs, steps=3)
    per_element = 2 + 2 + 8  # gradient, lower half of the master, moments
    params = sum(theirs.metrics()[name] for name in theirs.metrics() if name.endswith("_param_nbytes"))
    budget = int(params) + 30_000 * per_element
    for host_budget, overlap_step in ((None, True), (800_000, False)):
        with (
            pretend(AdversarialLink()) as link,
            mock.patch.object(transfer, "PIECE_NUMEL", 1024),
            mock.patch.object(spill, "CHUNK_NUMEL", 2048),
        ):
            model, optimizer = make(
                width=72,
                stage=stage,
                optimizer_tier="auto",
                param_tier="auto" if stage == 3 else "device",
                device_budget=budget,
                host_budget=host_budget,
                overlap_step=overlap_step,
                nvme_path=tmp_path if host_budget else None,
            )
            metrics = optimizer.metrics()
            on_device = metrics["device_moments_nbytes"] / 8
            assert 30_000 - 2048 < on_device <= 30_000, "less than one section is left free"
            assert sum(metrics.get(f"device_{kind}_nbytes", 0) for kind in ("param", "moments", "master")) <= budget
            tiers = {"device", "host"} | ({"nvme"} if host_budget else set())
            assert set(optimizer.resting("optimizer").split("+")) == tiers
            assert train(model, optimizer, steps=3) == losses
            assert all(torch.equal(a, b) for a, b in zip(values(model), values(want), strict=True))
            mine, plain = optimizer.state_dict()["state"], theirs.state_dict()["state"]
            assert all(torch.equal(mine[key][name], plain[key][name]) for key in plain for name in plain[key])
            optimizer.load_state_dict(theirs.state_dict())
            optimizer.close()
            link.finish()
        assert link.races == []


def test_page_locked_memory_is_what_crosses_the_link_and_no_more() -> None:
    with pretend(AdversarialLink()) as link:
        model, optimizer = make()
        train(model, optimizer, steps=2)
        numel = sum(held.layout.numel for held in optimizer.held)
        exact = sum(2 * -(-2 * held.layout.numel // 4096) * 4096 for held in optimizer.held)  # gradient and parameter, whole pages
        assert optimizer.metrics()["pinned_nbytes"] == exact == sum(link.pinned.values()) < 4 * numel + 2 * 4096 * len(optimizer.held)
        optimizer.close()
    assert link.pinned == {}


def test_a_system_that_refuses_to_lock_pages_costs_speed_only(caplog: pytest.LogCaptureFixture) -> None:
    want, theirs = make(overlap_step=False)
    losses = train(want, theirs, steps=3)
    with pretend(AdversarialLink(refuses_to_pin="cannot allocate memory")) as link:
        model, optimizer = make()
        assert train(model, optimizer, steps=3) == losses
        optimizer.close()
        link.finish()
    warnings = [record.getMessage() for record in caplog.records if "cannot allocate memory" in record.getMessage()]
    assert len(warnings) == 1 and "memlock" in warnings[0] and link.races == []


def test_an_overlap_that_could_not_overlap_is_refused() -> None:
    with pretend(AdversarialLink()), pytest.raises(ValueError, match="overlap_step=True has no effect"):
        make(optimizer_tier="device")
    with pytest.raises(TypeError, match="overlap_step must be True or False"):
        zk.ZeroConfig(overlap_step="yes")  # type: ignore[arg-type]
