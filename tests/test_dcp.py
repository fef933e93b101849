"""torch.distributed.checkpoint and plain torch optimizers: what one stage and number of ranks saved, any other goes on from, bit for bit."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as torch_state
from torch.distributed.checkpoint.state_dict import StateDictOptions

import zk
from tests.models import GPT, batch, loss_of
from tests.world import run_world
from zk.checkpoint.dcp import boxes

pytestmark = pytest.mark.usefixtures("one_thread")

BEFORE, AFTER = 2, 1  # steps
FULL = StateDictOptions(full_state_dict=True)
FULL_ON_CPU = StateDictOptions(full_state_dict=True, cpu_offload=True)


@dataclasses.dataclass(frozen=True)
class Job:
    """What is trained, and how."""

    stage: int
    variant: str = "plain"
    dtype: str | None = "bf16"
    tier: str = "host"
    folder: str = ""

    def build(self, seed: int) -> tuple[GPT, zk.ZeroOptimizer]:
        torch.manual_seed(seed)
        model = GPT(self.variant)
        decayed = [param for param in model.parameters() if param.ndim > 1]
        others = [param for param in model.parameters() if param.ndim <= 1]
        inner = torch.optim.AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0}], lr=1e-2)
        options: dict[str, Any] = {"optimizer_tier": self.tier, "dtype": self.dtype}
        if self.stage == 3:
            options["param_tier"] = self.tier
        if self.tier == "nvme":
            options["nvme_path"] = self.folder
        return model, zk.ZeroOptimizer(model, inner, stage=self.stage, **options)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, start: int, count: int) -> list[float]:
    """The same batch on all ranks, so that any number of them computes the same."""
    losses = []
    for seed in range(start, start + count):
        loss = loss_of(model, batch(seed))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def exact(optimizer: zk.ZeroOptimizer) -> dict[str, Any]:
    """Masters, moments and step counts, whole, by name, in host memory. On all ranks."""
    found: dict[str, Any] = {}
    for held in optimizer.held:
        names = dict(zip(held.unit.params, held.unit.names, strict=True))
        found |= {f"{names[param]}.param": value.cpu() for param, value in held.masters().items()}
        for param, state in held.export_state(own_part=False).items():
            found |= {f"{names[param]}.{kind}": value.clone().cpu() for kind, value in state.items()}
    return found


def assert_equal(got: dict[str, Any], want: dict[str, Any]) -> None:
    assert got.keys() == want.keys()
    for key, value in got.items():
        assert torch.equal(value, want[key]), key


def finished(job: Job) -> tuple[dict[str, Any], list[float], dict[str, Any]]:
    """What the run that nobody interrupts has after BEFORE steps; its later losses; what it has in the end."""
    model, optimizer = dataclasses.replace(job, stage=0, tier="host").build(0)
    train(model, optimizer, 0, BEFORE)
    then = exact(optimizer)
    losses = train(model, optimizer, BEFORE, AFTER)
    return then, losses, exact(optimizer)


def goes_on(model: nn.Module, optimizer: zk.ZeroOptimizer, want: tuple[dict[str, Any], list[float], dict[str, Any]]) -> None:
    assert_equal(exact(optimizer), want[0])
    assert train(model, optimizer, BEFORE, AFTER) == want[1]
    assert_equal(exact(optimizer), want[2])


def save(job: Job, path: Path | str) -> None:
    model, optimizer = job.build(0)
    train(model, optimizer, 0, BEFORE)
    weights, state = torch_state.get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=path)
    optimizer.close()


def load(job: Job, path: Path | str, want: tuple[dict[str, Any], list[float], dict[str, Any]]) -> None:
    model, optimizer = job.build(1)
    for group in optimizer.param_groups:
        group["lr"] = 5.0
    weights, state = torch_state.get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=path)
    torch_state.set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    assert optimizer.param_groups[0]["lr"] == 1e-2
    goes_on(model, optimizer, want)
    optimizer.close()


# ---- one process -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stage", "tier"),
    (
        *((0, "device"), (1, "host"), (3, "nvme")),
        *(pytest.param(stage, tier, marks=pytest.mark.device) for stage, tier in ((2, "nvme"), (3, "host"))),
    ),
)
def test_a_stage_loads_what_another_saved(stage: int, tier: str, tmp_path: Path) -> None:
    job = Job(stage, "frozen" if stage % 2 else "tied", "fp32" if tier == "device" else "bf16", tier, str(tmp_path))
    want = finished(job)
    save(job, tmp_path / "saved")
    for other in {stage, 3 - stage}:
        load(dataclasses.replace(job, stage=other), tmp_path / "saved", want)


# ---- two ranks ---------------------------------------------------------------------------------------------------------------


def call(case: Callable[[], None]) -> str:
    case()
    return ""


def in_world(cases: list[Callable[[], None]], backend: str = "") -> None:
    outcomes = run_world(2, call, cases, backend=backend)
    for case, outcome in zip(cases, outcomes, strict=True):
        for rank, said in enumerate(outcome):
            assert said == "", f"{case.args[:-1]}, rank {rank}:\n{said}"  # type: ignore[attr-defined]


ON_DRIVE = Job(3, "plain", "fp32", "nvme")


@pytest.mark.parametrize(
    "jobs", ((Job(2), Job(3, "tied"), Job(0, "frozen")), pytest.param((ON_DRIVE,), marks=pytest.mark.device)), ids=("host", "nvme")
)
def test_the_number_of_ranks_may_change(jobs: tuple[Job, ...], tmp_path: Path) -> None:
    cases: list[Callable[[], None]] = []
    after: list[Callable[[], None]] = []
    for number, job in enumerate(dataclasses.replace(job, folder=str(tmp_path)) for job in jobs):
        other = dataclasses.replace(job, stage=1, tier="host")
        want, one, two = finished(job), tmp_path / f"{number} of one", tmp_path / f"{number} of two"
        save(other, one)
        cases += [partial(load, job, one, want), partial(save, job, two), partial(load, other, two, want)]
        after += [partial(load, other, two, want)]
    in_world(cases)
    for case in after:
        case()


def hand_over(job: Job, other: Job, options: StateDictOptions, back: StateDictOptions, want: Any) -> None:
    """Without files: what get_state_dict returns goes into another optimizer's set_state_dict."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    model, optimizer = job.build(0)
    train(model, optimizer, 0, BEFORE)
    weights, state = torch_state.get_state_dict(model, optimizer, options=options)
    assert_equal(exact(optimizer), want[0])
    if options.full_state_dict and (rank == 0 or not options.cpu_offload):
        assert all(type(value) is Tensor for entry in state["state"].values() for value in entry.values())
        assert all(entry["exp_avg"].shape == weights[name].shape for name, entry in state["state"].items())
    if options.full_state_dict and options.cpu_offload and not back.broadcast_from_rank0:
        gathered = [weights, state]
        if dist.is_initialized():
            dist.broadcast_object_list(gathered, 0)
        weights, state = gathered  # as if all ranks had read one file
    weights, state = copy.deepcopy((weights, state))
    other_model, other_optimizer = other.build(1)
    if back.broadcast_from_rank0:  # with an empty model_state_dict set_state_dict leaves the model out
        torch_state.set_model_state_dict(other_model, weights, options=back)
        torch_state.set_optimizer_state_dict(other_model, other_optimizer, state, options=back)
    else:
        torch_state.set_state_dict(other_model, other_optimizer, model_state_dict=weights, optim_state_dict=state, options=back)
    goes_on(other_model, other_optimizer, want)
    optimizer.close()
    other_optimizer.close()


BROADCAST = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
ALIKE = (StateDictOptions(), StateDictOptions(cpu_offload=True), FULL, FULL_ON_CPU, FLAT)
WAYS = (*((options, options) for options in ALIKE), (FULL_ON_CPU, BROADCAST))


ON_DEVICE = (WAYS[1], WAYS[2], WAYS[-1])  # what comes to the host, what does not, and what comes back from one rank


@pytest.mark.device
def test_options_of_get_and_set() -> None:
    """Each where state is in shards and parameters too, some where parameters are full on every rank, and some in one process."""
    parted, full = Job(3, "tied"), Job(1, "tied")
    want = finished(parted)
    on_host = not torch.cuda.is_available()
    cases = [partial(hand_over, parted, parted, options, back, want) for options, back in (WAYS if on_host else ON_DEVICE)]
    in_world(cases + [partial(hand_over, full, full, *WAYS[-1], want)] * on_host)
    if on_host:
        hand_over(full, parted, *WAYS[4], want)


def test_what_torch_asks_for_changes_nothing() -> None:
    """Without state, torch would make a step with zero gradients."""
    for stage in (1, 3):
        model, optimizer = Job(stage).build(0)
        other_model, other = Job(stage).build(0)
        assert optimizer.state_dict()["state"] == {}
        loss_of(model, batch(0)).backward()  # and gradients that are there stay
        state = torch_state.get_optimizer_state_dict(model, optimizer)
        assert all(entry["step"] == 0 and not entry["exp_avg"].any() for entry in state["state"].values())
        assert state["param_groups"][0]["lr"] == 1e-2
        torch_state.set_optimizer_state_dict(model, optimizer, state)
        optimizer.step()
        assert optimizer.metrics()["steps"] == 1
        train(other_model, other, 0, 1)
        assert_equal(exact(optimizer), exact(other))


@pytest.mark.parametrize("dtype", ("bf16", "fp32"))
def test_states_may_be_assigned_once_torch_has_asked_for_them(dtype: str) -> None:
    (model, optimizer), (other_model, other) = Job(2, dtype=dtype).build(0), Job(2, dtype=dtype).build(0)
    for one, its in ((model, optimizer), (other_model, other)):
        train(one, its, 0, BEFORE)
    assert optimizer.state
    for state in optimizer.state.values():
        assert ("master" in state) == (dtype == "bf16")
        for name, value in state.items():
            state[name] = value.clone()
    with pytest.raises(KeyError, match="keep what is your own"):
        state["master" if dtype == "fp32" else "mine"] = torch.zeros(1)
    assert train(model, optimizer, BEFORE, AFTER) == train(other_model, other, BEFORE, AFTER)
    assert_equal(exact(optimizer), exact(other))


def test_a_parameter_that_was_never_used_is_loaded_as_such(tmp_path: Path) -> None:
    want = finished(Job(1, "unused"))
    save(Job(1, "unused"), tmp_path)
    model, optimizer = Job(3, "unused").build(1)
    weights, state = torch_state.get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=tmp_path)
    torch_state.set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    assert exact(optimizer)["branch.weight.step"] == 0
    assert train(model, optimizer, BEFORE, AFTER) == want[1]
    got = exact(optimizer)
    assert_equal({key: got[key] for key in want[2]}, want[2])


@pytest.mark.device
def test_the_loss_scale_is_saved_beside_the_state(tmp_path: Path) -> None:
    job = Job(2, dtype="fp16")
    optimizer = job.build(0)[1]
    optimizer.scaler.scale = 2.0**9
    dcp.save({"loss_scale": optimizer.scaler}, checkpoint_id=tmp_path)
    other = job.build(1)[1]
    dcp.load({"loss_scale": other.scaler}, checkpoint_id=tmp_path)
    assert other.scaler.scale == 2.0**9


def test_an_optimizer_given_to_dcp_itself_is_refused_where_nothing_would_be_loaded(tmp_path: Path) -> None:
    model, optimizer = Job(2).build(0)
    train(model, optimizer, 0, 1)
    dcp.save({"optimizer": optimizer}, checkpoint_id=tmp_path)
    fresh = Job(2).build(1)[1]
    with pytest.raises(ValueError, match="after 1 steps, and has no parameter's"):
        dcp.load({"optimizer": fresh}, checkpoint_id=tmp_path)


# ---- plain torch -------------------------------------------------------------------------------------------------------------


def there_and_back(stage: int, options: StateDictOptions | None) -> None:
    """AdamW -> zk -> AdamW, fp32: through state_dict() where that is whole, through torch's functions everywhere."""
    def plain(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = GPT("tied")
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    model, inner = plain(0)
    train(model, inner, 0, BEFORE)
    mine, to_wrap = plain(1)
    optimizer = zk.ZeroOptimizer(mine, to_wrap, stage=stage, optimizer_tier="host")
    mine.load_state_dict(model.state_dict())
    if options is None:
        optimizer.load_state_dict(copy.deepcopy(inner.state_dict()))
    else:
        saved = copy.deepcopy(torch_state.get_optimizer_state_dict(model, inner, options=StateDictOptions(full_state_dict=True)))
        torch_state.set_optimizer_state_dict(mine, optimizer, saved, options=options)
    assert train(mine, optimizer, BEFORE, AFTER) == train(model, inner, BEFORE, AFTER)
    last, last_inner = plain(2)
    last.load_state_dict(mine.state_dict())
    if options is None:
        last_inner.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    else:
        state = copy.deepcopy(torch_state.get_optimizer_state_dict(mine, optimizer, options=options))
        torch_state.set_optimizer_state_dict(last, last_inner, state, options=options)
    start = BEFORE + AFTER
    assert train(last, last_inner, start, AFTER) == train(model, inner, start, AFTER) == train(mine, optimizer, start, AFTER)
    for got, want in zip(last.parameters(), model.parameters(), strict=True):
        assert torch.equal(got, want)
    optimizer.close()


@pytest.mark.usefixtures("torch_engine")
def test_state_goes_from_adamw_to_zk_and_back() -> None:
    for stage, options in ((0, None), (1, FULL), (3, None), (3, FULL)):
        there_and_back(stage, options)
    in_world([partial(there_and_back, stage, options) for stage, options in ((1, None), (2, FULL), (3, FULL))])


# ---- a rank's part of a tensor -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", ((), (0, 3), (1,), (7,), (3, 5), (4, 1), (1, 4), (3, 2, 4), (2, 3, 1, 2)), ids=str)
def test_boxes_make_up_any_run_of_elements(shape: tuple[int, ...]) -> None:
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    for start in range(whole.numel() + 1):
        for stop in range(start, whole.numel() + 1):
            position = 0
            found = list(boxes(shape, slice(start, stop)))
            assert len(found) <= max(1, 2 * len(shape) - 1)
            for box in found:
                here = whole[tuple(slice(offset, offset + size) for offset, size in zip(box.offsets, box.sizes, strict=True))]
                assert box.start == position
                assert here.flatten().tolist() == list(range(start + position, start + position + here.numel()))
                position += here.numel()
            assert position == stop - start


def parts(folder: str) -> None:
    model, optimizer = Job(3, "tied").build(0)
    train(model, optimizer, 0, BEFORE)
    want = exact(optimizer)
    states = torch_state.get_optimizer_state_dict(model, optimizer)["state"]
    held = sum(entry["exp_avg"].to_local().numel() for entry in states.values())
    assert 0.4 * sum(p.numel() for p in model.parameters()) < held < 0.6 * sum(p.numel() for p in model.parameters())
    part = states["blocks.0.up.weight"]["exp_avg"]
    assert torch.equal(part.full_tensor(), want["blocks.0.up.weight.exp_avg"])
    with pytest.raises(ValueError, match=r"take full_tensor\(\), on all ranks"):
        part + 1
    copied = GPT("tied")
    plain = torch.optim.AdamW([{"params": [p for p in copied.parameters() if (p.ndim > 1) == matrices]} for matrices in (True, False)])
    plain.load_state_dict(optimizer.state_dict())
    loss_of(copied, batch(0)).backward()
    with pytest.raises(ValueError, match=r"take full_tensor\(\), on all ranks"):
        plain.step()
    with pytest.raises(ValueError, match="pickled to be sent elsewhere"):
        pickle.dumps(part)
    path = Path(folder) / f"{dist.get_rank()}.pt"
    torch.save({"part": part}, path)
    read = torch.load(path, weights_only=True)["part"]
    assert type(read) is Tensor and torch.equal(read, part.to_local())
    # as frameworks do with whatever has state_dict(), and in the background
    dcp.async_save({"optimizer": optimizer}, checkpoint_id=f"{folder}/async").result()
    train(model, optimizer, BEFORE, AFTER)
    dcp.load({"optimizer": optimizer}, checkpoint_id=f"{folder}/async")
    assert_equal(exact(optimizer), want)
    optimizer.close()


@pytest.mark.device
def test_a_rank_has_its_part_only(tmp_path: Path) -> None:
    in_world([partial(parts, str(tmp_path))], "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")  # async_save needs one for the host
