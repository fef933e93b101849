"""What users may do between and beside steps, on a device whose copies run as late as they may: each is where one particular wait is needed.

The loop forward, backward, step hides many a wait behind another one. Here are the orders of events in which they stand alone; that every
wait has its test is what ``make mutate`` shows. Results are compared bit for bit with the same calls where nothing is copied. Runs on the
software GPU, whose plugin fails a test in which something raced.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import itertools
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import zk
from tests import models, softgpu
from tests.models import DEVICE, GPT, VOCAB, batch, loss_of
from tests.softgpu import memory
from tests.world import run_world
from zk import kernels
from zk.core.events import Awaited, Ticket
from zk.kernels import reference
from zk.offload import rules, spill, transfer
from zk.offload.cpu_adam import default_engine
from zk.offload.worker import Worker
from zk.parallel.comm import Group

if not softgpu.installed():
    pytest.skip("for the software GPU (pytest -p tests.softgpu.plugin)", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("torch_engine", "one_thread")


def torch_updates() -> Any:
    """Context: parts of an update on the device are torch's own ops, too. Interpreted, the kernel would take most of the time."""
    return mock.patch.object(kernels, "adam", reference.adam)


@pytest.fixture(autouse=True)
def torch_updates_everywhere() -> Iterator[None]:
    with torch_updates():
        yield


class Lookup(nn.Module):
    """Tables, whose backward needs no parameter: it may come after a step that changed them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Embedding(VOCAB, 150) for _ in range(3))
        self.to(DEVICE)

    def forward(self, ids: Tensor) -> Tensor:
        return sum(block(ids).float().square().mean() for block in self.blocks)  # type: ignore[return-value]


@contextlib.contextmanager
def late_worker() -> Iterator[None]:
    """Jobs in the background do not begin at once."""
    submit = Worker.submit

    def late(self: Worker, job: Callable[[], None]) -> Ticket:
        submit(self, functools.partial(time.sleep, 0.004))
        return submit(self, job)

    with mock.patch.object(Worker, "submit", late):
        yield


@contextlib.contextmanager
def latest() -> Iterator[None]:
    """Everything on the way to the device and back is as late as it may be, in small pieces."""
    before = memory.pinned_nbytes()  # what another test has left for the collector
    with mock.patch.object(transfer, "PIECE_NUMEL", 1024), mock.patch.object(spill, "CHUNK_NUMEL", 2048), late_worker():
        yield
        softgpu.check()
        assert memory.pinned_nbytes() <= before


def make(kind: str = "plain", **options: Any) -> tuple[nn.Module, zk.ZeroOptimizer]:
    torch.manual_seed(0)
    model = Lookup() if kind == "lookup" else GPT(kind)
    return model, zk.ZeroOptimizer(model, torch.optim.AdamW(model.parameters(), lr=1e-2), num_threads=1, **options)


def values(model: nn.Module) -> list[Tensor]:
    with zk.gather(model.parameters()):
        return [param.detach().clone() for param in model.parameters()]


def evaluate(model: nn.Module, seed: int) -> Tensor:
    with torch.no_grad():
        return loss_of(model, batch(seed))


def train(model: nn.Module, optimizer: zk.ZeroOptimizer, seed: int) -> None:
    loss_of(model, batch(seed)).backward()
    optimizer.step()
    optimizer.zero_grad()


# ---- what users do ------------------------------------------------------------------------------------------------------------


def an_evaluation_between_backward_and_step(model: nn.Module, optimizer: zk.ZeroOptimizer) -> list[Tensor]:
    found = []
    for seed in range(3):
        loss_of(model, batch(seed)).backward()
        found.append(evaluate(model, seed))
        optimizer.step()
        optimizer.zero_grad()
    return found


def several_evaluations_after_a_step(model: nn.Module, optimizer: zk.ZeroOptimizer) -> list[Tensor]:
    train(model, optimizer, 0)
    found = [evaluate(model, seed) for seed in range(2)]
    train(model, optimizer, 1)
    return [*found, evaluate(model, 3)]


def steps_without_a_forward(model: nn.Module, optimizer: zk.ZeroOptimizer) -> list[Tensor]:
    for number in range(3):
        for index, param in enumerate(model.parameters()):
            param.grad = torch.full(param.shape, 1e-2 * (index - number), dtype=param.dtype, device=param.device)
        optimizer.step()
        optimizer.zero_grad()
    return []


def a_backward_after_the_step(model: nn.Module, optimizer: zk.ZeroOptimizer) -> list[Tensor]:
    losses = [model(batch(seed)) for seed in range(2)]
    for loss in losses:
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [loss.detach() for loss in losses]


def gradients_that_are_dropped_on_their_way(model: nn.Module, optimizer: zk.ZeroOptimizer) -> list[Tensor]:
    for seed in range(2):
        for micro in range(seed + 1):
            loss_of(model, batch(10 * seed + micro)).backward()
        optimizer.zero_grad()
        train(model, optimizer, seed)
    return []


def a_backward_that_fails(model: nn.Module, optimizer: zk.ZeroOptimizer) -> list[Tensor]:
    def fail(_: Tensor) -> None:
        raise ZeroDivisionError

    for seed in range(2):
        handle = model.blocks[0].register_full_backward_hook(lambda *_: fail(_[0]))  # type: ignore[index, union-attr]
        with pytest.raises(ZeroDivisionError):
            loss_of(model, batch(seed)).backward()
        handle.remove()
        optimizer.zero_grad()
        train(model, optimizer, seed)
    return []


def a_state_loaded_right_after_a_step(model: nn.Module, optimizer: zk.ZeroOptimizer) -> list[Tensor]:
    train(model, optimizer, 0)
    state = copy.deepcopy(optimizer.state_dict())
    train(model, optimizer, 1)
    optimizer.load_state_dict(state)
    found = [evaluate(model, 0)]
    train(model, optimizer, 2)
    return found


def the_state_right_after_a_step(model: nn.Module, optimizer: zk.ZeroOptimizer) -> list[Tensor]:
    found = []
    for seed in range(2):
        train(model, optimizer, seed)
        state = optimizer.state_dict()["state"]
        found += [value.clone() for key in sorted(state) for _, value in sorted(state[key].items())]
    return found


def parameters_written_after_a_step(model: nn.Module, optimizer: zk.ZeroOptimizer) -> list[Tensor]:
    found = []
    for seed in range(2):
        train(model, optimizer, seed)
        with zk.gather(model.parameters(), write=True), torch.no_grad():
            for param in model.parameters():
                param.mul_(0.5)
        found.append(evaluate(model, seed))
        train(model, optimizer, seed + 5)
    return found


def a_gather_for_writing_in_which_nothing_is_touched(model: nn.Module, optimizer: zk.ZeroOptimizer) -> list[Tensor]:
    for seed in range(2):
        train(model, optimizer, seed)
        with zk.gather(model.parameters(), write=True):
            pass
    return [evaluate(model, 3)]


def one_parameter_gathered_for_writing_after_a_step(model: nn.Module, optimizer: zk.ZeroOptimizer) -> list[Tensor]:
    for seed in range(2):
        train(model, optimizer, seed)
        with zk.gather(next(model.parameters()), write=True):
            pass
    return [evaluate(model, 3)]


def a_model_loaded_after_a_step(model: nn.Module, optimizer: zk.ZeroOptimizer) -> list[Tensor]:
    saved = copy.deepcopy(model.state_dict())
    train(model, optimizer, 0)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    model.load_state_dict(saved)
    found = [evaluate(model, 0), *before.values()]
    train(model, optimizer, 1)
    return found


def _load_file(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        save_file({key: value.contiguous() for key, value in values.items()}, f"{folder}/model.safetensors")
        zk.load_pretrained(model, f"{folder}/model.safetensors")


def a_file_loaded_after_a_step(model: nn.Module, optimizer: zk.ZeroOptimizer) -> list[Tensor]:
    saved = copy.deepcopy(model.state_dict())
    train(model, optimizer, 0)
    _load_file(model, saved)
    found = [*values(model), evaluate(model, 0)]
    train(model, optimizer, 1)
    return found


def a_file_and_a_state_loaded_after_a_forward(model: nn.Module, optimizer: zk.ZeroOptimizer) -> list[Tensor]:
    """What backward would need next is being gathered by then."""
    saved = copy.deepcopy(model.state_dict())
    found = []
    for what in ("file", "state"):
        for seed in range(2):
            train(model, optimizer, seed)
        state = copy.deepcopy(optimizer.state_dict())
        found.append(loss_of(model, batch(3)).detach())
        if what == "file":
            _load_file(model, saved)
        else:
            optimizer.load_state_dict(state)
        found.append(evaluate(model, 4))
    return found


def checkpoints_right_after_steps(model: nn.Module, optimizer: zk.ZeroOptimizer) -> list[Tensor]:
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(2):
            train(model, optimizer, seed)
        optimizer.save_checkpoint(folder)
        for what in ("step", "forward"):
            train(model, optimizer, 2)
            if what == "forward":
                found.append(loss_of(model, batch(3)).detach())
            optimizer.load_checkpoint(folder)
            found.append(evaluate(model, 4))
    return found


def a_checkpoint_loaded_after_a_forward_with_other_values(model: nn.Module, optimizer: zk.ZeroOptimizer) -> list[Tensor]:
    with tempfile.TemporaryDirectory() as folder:
        optimizer.save_checkpoint(folder)
        with zk.gather(model.parameters(), write=True), torch.no_grad():
            for param in model.parameters():
                param.mul_(0.5)
        found = [evaluate(model, 0)]
        optimizer.load_checkpoint(folder)
    return [*found, evaluate(model, 0)]


def a_model_saved_after_a_step(model: nn.Module, optimizer: zk.ZeroOptimizer) -> list[Tensor]:
    train(model, optimizer, 0)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    return list(torch.load(file).values())


def parameters_seen_after_a_step(model: nn.Module, optimizer: zk.ZeroOptimizer) -> list[Tensor]:
    found = []
    for seed, look in enumerate(
        (
            lambda param: param.sum(),
            lambda param: copy.deepcopy(param),
            lambda param: torch.tensor(list(repr(param).encode())),
            lambda param: next(iter(copy.deepcopy(model).parameters())),
        )
    ):
        train(model, optimizer, seed)
        with zk.gather(model.parameters()) if optimizer.config.stage == 3 else contextlib.nullcontext():
            found += [look(param).detach().clone() for param in [model.head.weight, model.blocks[1].up.bias]]  # type: ignore[union-attr, index]
    return found


def a_gather_that_is_held_over_a_step(model: nn.Module, optimizer: zk.ZeroOptimizer) -> list[Tensor]:
    train(model, optimizer, 0)
    loss_of(model, batch(1)).backward()
    with zk.gather(model.parameters()):
        optimizer.step()
        found = [param.detach().clone() for param in model.parameters()]
    optimizer.zero_grad()
    return found


def closed_right_after_a_step(model: nn.Module, optimizer: zk.ZeroOptimizer) -> list[Tensor]:
    train(model, optimizer, 0)
    train(model, optimizer, 1)
    optimizer.close(gather=True)
    return [param.detach().clone() for param in model.parameters()]


Scenario = Callable[[nn.Module, zk.ZeroOptimizer], list[Tensor]]
GPTS: tuple[Scenario, ...] = (
    an_evaluation_between_backward_and_step,
    several_evaluations_after_a_step,
    steps_without_a_forward,
    gradients_that_are_dropped_on_their_way,
    a_backward_that_fails,
    a_state_loaded_right_after_a_step,
    the_state_right_after_a_step,
    parameters_written_after_a_step,
    a_gather_for_writing_in_which_nothing_is_touched,
    one_parameter_gathered_for_writing_after_a_step,
    a_model_loaded_after_a_step,
    a_file_loaded_after_a_step,
    a_file_and_a_state_loaded_after_a_forward,
    checkpoints_right_after_steps,
    a_model_saved_after_a_step,
    parameters_seen_after_a_step,
    a_gather_that_is_held_over_a_step,
    closed_right_after_a_step,
)
TIERS: dict[str, dict[str, Any]] = {
    "host": {"stage": 2, "optimizer_tier": "host"},
    "partitioned": {"stage": 3, "param_tier": "host", "optimizer_tier": "host"},
    "nvme": {"stage": 3, "param_tier": "nvme", "optimizer_tier": "nvme"},
    "divided": {"stage": 3, "param_tier": "host", "optimizer_tier": "auto", "device_budget": 60_000},
}


def outcome(scenario: Scenario, kind: str, **options: Any) -> list[Tensor]:
    """What the scenario sees, and the parameters in the end."""
    model, optimizer = make(kind, **options)
    found = scenario(model, optimizer)
    if not optimizer.closed:
        found += values(model)
        optimizer.close()
    return found


@functools.cache
def wanted(scenario: Scenario, kind: str, dtype: str | None) -> list[Tensor]:
    """The same where everything is on the device, and step() ends with the update."""
    return outcome(scenario, kind, stage=2, optimizer_tier="device", dtype=dtype)


def check(scenario: Scenario, kind: str, tier: str, dtype: str | None, path: Any, **options: Any) -> None:
    want = wanted(scenario, kind, dtype)
    more = {"nvme_path": path} if tier == "nvme" else {}
    with latest():
        found = outcome(scenario, kind, dtype=dtype, **TIERS[tier], **more, **options)
    assert len(found) == len(want)
    for index, (mine, theirs) in enumerate(zip(found, want, strict=True)):
        assert torch.equal(mine.cpu(), theirs.cpu()), f"value {index} of {len(want)} differs"


# of what stands alone in the other one of step and background, too (what removing each wait has shown)
BOTH = (GPTS[0], a_state_loaded_right_after_a_step, checkpoints_right_after_steps, a_gather_that_is_held_over_a_step)


def cases(scenarios: Sequence[Scenario]) -> Iterator[Any]:
    """Each scenario in step or in the background, in turns; on the drive in the background, where more is on its way."""
    for number, scenario in enumerate(scenarios):
        for tier, overlap_step in itertools.product(TIERS, (False, True)):
            if tier == "nvme" and not overlap_step:
                continue
            if tier == "divided" and scenario not in (*GPTS[:2], *scenarios[:1]):
                continue
            in_turn = (tier == "partitioned") ^ overlap_step ^ (number % 2 == 1)
            if tier in ("host", "partitioned") and scenario not in (*BOTH, *scenarios[:1]) and not in_turn:
                continue
            yield pytest.param(scenario, tier, overlap_step, id=f"{scenario.__name__}-{tier}-{'beside' if overlap_step else 'in step'}")


@pytest.mark.parametrize(("scenario", "tier", "overlap_step"), list(cases(GPTS)))
def test_whatever_comes_between_steps_changes_no_bit(scenario: Scenario, tier: str, overlap_step: bool, tmp_path: Any) -> None:
    # (a bf16 value written from outside keeps the lower half of its master where the update works in place, and not where it has a copy)
    written = scenario in (parameters_written_after_a_step, a_model_loaded_after_a_step)
    check(scenario, "plain", tier, None if overlap_step or written else "bf16", tmp_path, overlap_step=overlap_step)


@pytest.mark.parametrize(("scenario", "tier", "overlap_step"), list(cases([a_backward_after_the_step])))
def test_a_gradient_may_arrive_while_the_parameters_of_the_last_step_are_on_their_way(
    scenario: Scenario, tier: str, overlap_step: bool, tmp_path: Any
) -> None:
    """Backward of a table asks for no parameter, so nothing waits for their upload but what is about to write what it reads."""
    check(scenario, "lookup", tier, "bf16", tmp_path, overlap_step=overlap_step)


@pytest.mark.parametrize("prefetch", (0, 3))
def test_host_buffers_of_the_drive_are_not_used_again_while_uploads_read_them(prefetch: int, tmp_path: Any) -> None:
    check(an_evaluation_between_backward_and_step, "plain", "nvme", "bf16", tmp_path, prefetch=prefetch)
    check(several_evaluations_after_a_step, "frozen", "nvme", "bf16", tmp_path, prefetch=prefetch)


@pytest.mark.parametrize("scenario", (parameters_written_after_a_step, a_checkpoint_loaded_after_a_forward_with_other_values))
def test_frozen_parameters_written_while_their_upload_may_still_read(scenario: Scenario) -> None:
    check(scenario, "frozen", "partitioned", "bf16", None)


def test_a_step_begins_when_the_one_before_has_ended_though_no_forward_came_between(tmp_path: Any) -> None:
    """Where device and host memory are one, a gradient is written to the file at once: not while the last one is still read there."""
    want = wanted(steps_without_a_forward, "plain", None)
    with late_worker(), mock.patch.object(spill, "CHUNK_NUMEL", 2048), mock.patch.object(models, "DEVICE", torch.device("cpu")):
        found = outcome(steps_without_a_forward, "plain", nvme_path=tmp_path, overlap_step=True, **TIERS["nvme"])
    assert all(torch.equal(mine.cpu(), theirs.cpu()) for mine, theirs in zip(found, want, strict=True))


def test_a_state_of_nothing_but_step_counts_is_loaded_after_the_update_beside_training() -> None:
    def run(**options: Any) -> Tensor:
        torch.manual_seed(0)
        model = GPT()
        optimizer = zk.ZeroOptimizer(model, torch.optim.SGD(model.parameters(), lr=0.1), optimizer_tier="host", num_threads=1, **options)
        state = optimizer.state_dict()
        train(model, optimizer, 0)
        optimizer.load_state_dict(state)
        found = evaluate(model, 0)
        optimizer.close()
        return found

    want = run()
    with latest():
        assert torch.equal(run(overlap_step=True), want)


def test_synchronize_leaves_nothing_under_way() -> None:
    with latest():
        model, optimizer = make(stage=2, optimizer_tier="host", overlap_step=True)
        train(model, optimizer, 0)
        optimizer.synchronize()
        assert all(held.underway is None for held in optimizer.held)
        optimizer.close()


@pytest.mark.parametrize("pieces", (0, 1, 4))
def test_an_update_that_failed_is_told_in_close_and_parameters_stay_usable(pieces: int) -> None:
    """Also those of which some pieces were updated before, and are on their way up."""
    calls, adam_ = itertools.count(), rules.adam_

    def fail(*args: Any, **options: Any) -> None:
        if next(calls) == pieces:
            raise ZeroDivisionError
        adam_(*args, **options)

    with latest():
        model, optimizer = make(stage=2, optimizer_tier="host", overlap_step=True)
        with mock.patch.object(rules, "adam_", fail):
            train(model, optimizer, 0)
            with pytest.raises(ZeroDivisionError):
                optimizer.close()
        for param in model.parameters():
            assert type(param) is nn.Parameter and param.sum().isfinite()


def test_pieces_updated_before_an_error_are_there_once_a_state_of_nothing_has_been_loaded_over_it() -> None:
    calls, update_chunks = itertools.count(), rules.update_chunks

    def fail(*args: Any, **options: Any) -> None:
        if next(calls) == 3:
            raise ZeroDivisionError
        update_chunks(*args, **options)

    with latest():
        torch.manual_seed(0)
        model = GPT()
        optimizer = zk.ZeroOptimizer(model, torch.optim.SGD(model.parameters(), lr=0.1), optimizer_tier="host", overlap_step=True)
        state = optimizer.state_dict()
        with mock.patch.object(rules, "update_chunks", fail):
            train(model, optimizer, 0)
            with pytest.raises(ZeroDivisionError):
                optimizer.synchronize()
        optimizer.load_state_dict(state)
        assert all(param.sum().isfinite() for param in model.parameters())
        optimizer.close()


def test_a_state_is_loaded_over_an_update_that_is_about_to_fail() -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError

    with latest():
        model, optimizer = make(stage=2, optimizer_tier="host", overlap_step=True)
        state = optimizer.state_dict()
        with mock.patch.object(rules, "adam_", fail):
            train(model, optimizer, 0)
            optimizer.load_state_dict(state)
        train(model, optimizer, 0)
        optimizer.close()


def test_an_update_that_has_ended_when_the_run_is_given_up_leaves_usable_parameters() -> None:
    with latest():
        model, optimizer = make(stage=2, optimizer_tier="host", overlap_step=True)
        with pytest.raises(KeyError), optimizer:
            train(model, optimizer, 0)
            optimizer.worker.submit(lambda: None).wait()
            raise KeyError
        for param in model.parameters():
            assert type(param) is nn.Parameter and param.sum().isfinite()


# ---- the pieces by themselves ---------------------------------------------------------------------------------------------------


# ---- two ranks ----------------------------------------------------------------------------------------------------------------


class Lazy:
    """A collective that happens when it is waited for, and not at all if it is not."""

    def __init__(self, start: Callable[[], Awaited]) -> None:
        self.start: Callable[[], Awaited] | None = start

    def wait(self) -> None:
        start, self.start = self.start, None
        if start is not None:
            start().wait()


def late_collectives() -> Any:
    launch = Group._launch
    return mock.patch.object(Group, "_launch", lambda *args, **options: Lazy(functools.partial(launch, *args, **options)))


def own_data() -> Any:
    """Context: other gradients than the other rank's."""
    rank, drawn = torch.distributed.get_rank(), batch
    return mock.patch.dict(globals(), batch=lambda seed: drawn(seed + 1000 * rank))


@functools.cache
def wanted_of_ranks(scenario: Scenario, stage: int) -> list[Tensor]:
    """The same where everything is on the device, and ranks wait for all that they start."""
    with own_data():
        return outcome(scenario, "plain", dtype="bf16", stage=stage, optimizer_tier="device", overlap=False)


def in_world(case: tuple[str, str, bool]) -> str:
    name, tier, overlap_step = case
    scenario, options = next(one for one in GPTS if one.__name__ == name), {**TIERS, "full": {"stage": 0, "optimizer_tier": "host"}}[tier]
    default_engine.cache_clear()
    with torch_updates():
        want = wanted_of_ranks(scenario, options["stage"])
    # as late as they may be; and as soon as they are asked for, where others run beside them
    for collectives in (late_collectives(), contextlib.nullcontext())[: 1 + overlap_step]:
        with latest(), collectives, own_data(), torch_updates():
            found = outcome(scenario, "plain", dtype="bf16", **options, overlap_step=overlap_step)
        if len(found) != len(want) or not all(torch.equal(mine.cpu(), theirs.cpu()) for mine, theirs in zip(found, want, strict=True)):
            return "differs"
    return ""


def test_two_ranks_wait_for_the_link_and_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    table = [(several_evaluations_after_a_step.__name__, tier, beside) for tier in ("host", "partitioned", "full") for beside in (False, True)] + [
        (one_parameter_gathered_for_writing_after_a_step.__name__, "host", True),
        (a_file_loaded_after_a_step.__name__, "host", False),
        (a_state_loaded_right_after_a_step.__name__, "host", False),
        (a_state_loaded_right_after_a_step.__name__, "host", True),
        (the_state_right_after_a_step.__name__, "host", False),
    ]
    found = run_world(2, in_world, table)
    assert [f"{case}, rank {rank}: {said}" for case, row in zip(table, found, strict=True) for rank, said in enumerate(row) if said] == []
