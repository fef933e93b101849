"""Updates that begin in backward: whatever happens until step(), the bits are those of updates that begin there."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn

import zk
from benchmarks.throttled import ThrottledLink, pretend
from tests import softgpu
from tests.models import DEVICE, GPT, batch, loss_of
from tests.parity import Case, run_case
from tests.world import run_world
from zk.core.precision import DynamicLossScale
from zk.offload import spill, transfer

STEPS = 5
Program = Callable[[GPT, zk.ZeroOptimizer, int], None]


@contextlib.contextmanager
def small_pieces() -> Iterator[None]:
    """A link where the machine has none, and units of several chunks."""
    link = contextlib.nullcontext() if DEVICE.type == "cuda" else pretend(ThrottledLink(1e9))
    with link, mock.patch.object(transfer, "PIECE_NUMEL", 1024), mock.patch.object(spill, "CHUNK_NUMEL", 2048):
        yield


def all_begun_are_done(optimizer: zk.ZeroOptimizer) -> None:
    """Wait for all that has begun, so that what counts does not depend on time."""
    for held in optimizer.held:
        if held.shard is not None and held.shard.attempt is not None:
            held.shard.attempt.done.join()


def backward(model: GPT, optimizer: zk.ZeroOptimizer, step: int, factor: float = 1.0, of: str = "", by: float = 0.0) -> None:
    """A backward of ``factor`` times the loss, plus ``by`` times the parameters named ``of``."""
    loss = loss_of(model, batch(step)) * factor
    if of:
        with zk.gather(dict(model.named_parameters())[of]) if optimizer.config.stage == 3 else contextlib.nullcontext():
            loss = loss + by * dict(model.named_parameters())[of].float().sum()
    optimizer.backward(loss)
    all_begun_are_done(optimizer)


def trained(
    program: Program, overlap_step: bool | str, dtype: str = "bf16", kind: type[torch.optim.Optimizer] = torch.optim.AdamW, **options: Any
) -> tuple[dict[str, Tensor], dict[str, Any], dict[str, float]]:
    """Masters, state and metrics after a few steps of a program."""
    with small_pieces():
        torch.manual_seed(0)
        model = GPT(options.pop("model", "plain"))
        inner = kind(model.parameters(), lr=1e-2, **({"momentum": 0.9} if kind is torch.optim.SGD else {"weight_decay": 0.1}))
        settings = {"stage": 2, "dtype": dtype, "optimizer_tier": "host", "clip_grad_norm": 1.0, **options}
        with zk.ZeroOptimizer(model, inner, overlap_step=overlap_step, **settings) as optimizer:
            for step in range(STEPS):
                program(model, optimizer, step)
                optimizer.step()
                optimizer.zero_grad()
            optimizer.synchronize()
            metrics = optimizer.metrics()
            masters = {name: value.clone() for name, value in optimizer.consolidated_state_dict("fp32").items()}
            state = optimizer.state_dict()["state"] if optimizer.config.stage < 3 or optimizer.comm.world == 1 else {}
            return masters, {f"{key} {name}": value.clone() for key, values in state.items() for name, value in values.items()}, metrics


@functools.cache
def trained_in_memory(program: Program) -> tuple[dict[str, Tensor], dict[str, Any], dict[str, float]]:
    return trained(program, False)


def differing(
    program: Program, place: dict[str, Any] | None = None, keep_gradients: bool = True, **options: Any
) -> tuple[list[str], dict[str, float]]:
    """Names of what differs from updates in step(), wherever the states are, and the metrics."""
    want, want_state, _ = trained(program, False, **options) if place is None else trained_in_memory(program)
    got, got_state, metrics = trained(program, "backward", keep_gradients=keep_gradients, **options, **(place or {}))
    assert want.keys() == got.keys() and want_state.keys() == got_state.keys()
    pairs = [(name, want[name], got[name]) for name in want] + [(name, want_state[name], got_state[name]) for name in want_state]
    return [name for name, one, other in pairs if not torch.equal(one, other)], metrics


# ---- what gradients may be ---------------------------------------------------------------------------------------------------


def never(model: GPT, optimizer: zk.ZeroOptimizer, step: int) -> None:
    """Gradients that are not clipped."""
    backward(model, optimizer, step, 0.01)


def always(model: GPT, optimizer: zk.ZeroOptimizer, step: int) -> None:
    """Gradients that are clipped in each step."""
    backward(model, optimizer, step, 100.0)


def early(model: GPT, optimizer: zk.ZeroOptimizer, step: int) -> None:
    """In every third step the first gradient of backward is too large."""
    backward(model, optimizer, step, 0.01, "head.weight", 10.0 * (step % 3 == 2))


def late(model: GPT, optimizer: zk.ZeroOptimizer, step: int) -> None:
    """In every third step the last gradient of backward is too large: all that came before has been updated."""
    backward(model, optimizer, step, 0.01, "tokens.weight", 10.0 * (step % 3 == 2))


def infinite(model: GPT, optimizer: zk.ZeroOptimizer, step: int) -> None:
    """In one step the last gradient is not finite."""
    backward(model, optimizer, step, 0.01, "tokens.weight", math.inf if step == 3 else 0.0)


# of five steps: in how many of them updates that began in backward count
NORMS: dict[Program, int] = {never: 4, always: 0, early: 2, late: 2, infinite: 2}
PLACES: dict[str, dict[str, Any]] = {
    "2 host": {},
    "2 host, sent early": {"device_budget": "1GiB"},
    "3 host": {"stage": 3, "param_tier": "host"},
    "2 nvme": {"optimizer_tier": "nvme"},
    "3 nvme": {"stage": 3, "param_tier": "nvme", "optimizer_tier": "nvme"},
    "3 nvme, host": {"stage": 3, "param_tier": "nvme", "optimizer_tier": "host"},
}


def place(name: str, path: Path) -> dict[str, Any]:
    """Options of a place, with a folder where it needs one."""
    options = PLACES[name]
    return {**options, "nvme_path": str(path)} if "nvme" in options.values() else options


# What is given up and what counts, everywhere; what decides it does not know where states are
WHERE: dict[Program, tuple[str, ...]] = {
    never: ("2 host",),
    always: ("2 host",),
    early: ("3 nvme",),
    late: tuple(PLACES),
    infinite: ("2 host, sent early", "3 nvme"),
}


@pytest.mark.device
@pytest.mark.parametrize(
    ("program", "name"),
    [(program, name) for program, names in WHERE.items() for name in names],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_clipped_or_not_bits_are_those_of_updates_in_step(name: str, program: Program, tmp_path: Path) -> None:
    found, metrics = differing(program, place(name, tmp_path))
    assert found == []
    units = 3
    assert metrics["updates_in_backward_taken"] == NORMS[program] * units
    assert metrics["updates_in_backward"] >= metrics["updates_in_backward_taken"]
    assert metrics["skipped_steps"] == (program is infinite)


@pytest.mark.parametrize(
    "options",
    (
        {"dtype": "fp32"},
        {"dtype": "fp16", "loss_scale": DynamicLossScale(init=2.0**17, hysteresis=1, window=3)},
        {"kind": torch.optim.SGD},
        {"state_dtype": "bf16"},
        {"clip_grad_norm": None, "model": "frozen"},
        {"model": "tied", "stage": 0},
        {"model": "unused", "stage": 1},
        {"model": "checkpointed"},
    ),
    ids=str,
)
def test_with_every_kind_of_state(options: dict[str, Any]) -> None:
    found, metrics = differing(never, **options)
    assert found == []
    assert metrics["updates_in_backward_taken"] > 0


# ---- what users may do between backward and step() ---------------------------------------------------------------------------


def change_rate(model: GPT, optimizer: zk.ZeroOptimizer, step: int) -> None:
    backward(model, optimizer, step, 0.01)
    optimizer.param_groups[0]["lr"] = 1e-2 / (1 + step)


def read_gradients(model: GPT, optimizer: zk.ZeroOptimizer, step: int) -> None:
    backward(model, optimizer, step, 0.01)
    for param in model.parameters():
        assert param.grad is not None


def change_gradients(model: GPT, optimizer: zk.ZeroOptimizer, step: int) -> None:
    backward(model, optimizer, step, 0.01)
    model.head.weight.grad.mul_(0.5)  # type: ignore[union-attr]


def add_gradients(model: GPT, optimizer: zk.ZeroOptimizer, step: int) -> None:
    for micro in range(1 + step // 2):
        backward(model, optimizer, 10 * step + micro, 0.01)


def begin_anew(model: GPT, optimizer: zk.ZeroOptimizer, step: int) -> None:
    backward(model, optimizer, step, 0.01)
    optimizer.zero_grad()
    backward(model, optimizer, step + 100, 0.01)


def write_parameters(model: GPT, optimizer: zk.ZeroOptimizer, step: int) -> None:
    backward(model, optimizer, step, 0.01)
    with torch.no_grad(), zk.gather(model.parameters(), write=True):
        model.head.weight.clamp_(-0.05, 0.05)


def look_at_parameters(model: GPT, optimizer: zk.ZeroOptimizer, step: int) -> None:
    """Between backward and step() parameters are what they were."""
    with zk.gather(model.parameters()):
        before = [param.detach().clone() for param in model.parameters()]
    backward(model, optimizer, step, 0.01)
    with torch.no_grad():
        loss_of(model, batch(step))
    with zk.gather(model.parameters()):
        assert all(map(torch.equal, before, model.parameters()))


def change_state(model: GPT, optimizer: zk.ZeroOptimizer, step: int) -> None:
    backward(model, optimizer, step, 0.01)
    if step == 3:
        optimizer.state[model.head.weight]["exp_avg"].zero_()


def load_state(model: GPT, optimizer: zk.ZeroOptimizer, step: int) -> None:
    backward(model, optimizer, step, 0.01)
    if step == 3:
        optimizer.load_state_dict(optimizer.state_dict())


def clip_by_torch(model: GPT, optimizer: zk.ZeroOptimizer, step: int) -> None:
    backward(model, optimizer, step, 0.01)
    nn.utils.clip_grad_norm_(model.parameters(), 0.001 if step == 3 else 10.0)


def twice_through_one_graph(model: GPT, optimizer: zk.ZeroOptimizer, step: int) -> None:
    loss = loss_of(model, batch(step)) * 0.01
    for retain_graph in (step % 2 == 1,) + (False,) * (step % 2):
        optimizer.backward(loss, retain_graph=retain_graph)
        all_begun_are_done(optimizer)


PROGRAMS: tuple[Program, ...] = (
    change_rate,
    read_gradients,
    change_gradients,
    add_gradients,
    begin_anew,
    write_parameters,
    look_at_parameters,
    change_state,
    load_state,
    clip_by_torch,
    twice_through_one_graph,  # (at stage 3 a graph of parameters that have been released is gone)
)


@pytest.mark.parametrize(
    ("program", "name"),
    [
        (program, name)
        for program in PROGRAMS
        for name in ("2 host, sent early", "3 host", "2 nvme", "3 nvme")
        if program in (write_parameters, change_gradients)  # what is written comes from where parameters and gradients rest
        or (name == "2 nvme" if program is twice_through_one_graph else name in ("2 host, sent early", "3 nvme"))
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_what_happens_between_backward_and_step_counts(name: str, program: Program, tmp_path: Path) -> None:
    options = place(name, tmp_path)  # (where the upper half of a master is the parameter, the lower one stays as it was when that is written)
    found, _ = differing(program, **options) if program is write_parameters else differing(program, options)
    assert found == []


@pytest.mark.parametrize("name", ("2 host", "3 nvme"))
def test_what_is_saved_in_between_is_the_state_before(name: str, tmp_path: Path) -> None:
    """Also while a save in the background still reads it, at the next step."""

    def saving(model: GPT, optimizer: zk.ZeroOptimizer, step: int) -> None:
        backward(model, optimizer, step, 0.01)
        if step >= 2:
            optimizer.save_checkpoint(tmp_path / str(optimizer.config.overlap_step), async_save=step == 3)

    options = {**PLACES[name], **({"nvme_path": str(tmp_path)} if "nvme" in name else {})}
    assert differing(saving, **options)[0] == []
    files = [file.relative_to(tmp_path / "False") for file in sorted((tmp_path / "False").rglob("*.safetensors"))]
    assert len(files) == 3
    for file in files:
        want, got = (load_file(tmp_path / kind / file) for kind in ("False", "backward"))
        assert want.keys() == got.keys() and all(torch.equal(want[name], got[name]) for name in want), file


# ---- memory ------------------------------------------------------------------------------------------------------------------


def test_units_whose_gradients_come_first_have_shadows_as_far_as_memory_is_left() -> None:
    taken = {}
    for budget in (140_000, 190_000, 230_000):
        with small_pieces():
            model = GPT()
            options = {"stage": 2, "dtype": "bf16", "optimizer_tier": "host", "host_budget": budget, "overlap_step": "backward"}
            with zk.ZeroOptimizer(model, torch.optim.AdamW(model.parameters()), **options) as optimizer:
                sections = [(held.unit.name, held.shard.sections[0]) for held in optimizer.held if held.shard is not None]
                taken[budget] = [name for name, section in sections if section.shadow is not None]
                metrics = optimizer.metrics()
                grads = sum(held.held_numel * 2 for held in optimizer.held)
                on_host = sum(nbytes for name, nbytes in metrics.items() if name.startswith("host_") and name != "host_grad_nbytes")
                assert on_host + grads <= budget, "the budget is kept"
    assert taken[140_000] == [] and 0 < len(taken[190_000]) < len(taken[230_000])
    assert taken[230_000][-len(taken[190_000]) :] == taken[190_000], "the last units first"


# ---- ranks -------------------------------------------------------------------------------------------------------------------


def ranks_differ(stage: int, program: str, expected: int) -> list[str]:
    """One rank of several: what differs, and how many updates counted."""

    def of_rank(model: GPT, optimizer: zk.ZeroOptimizer, step: int) -> None:
        {"never": never, "late": late}[program](model, optimizer, 10 * step + dist.get_rank() if program == "never" else step)

    options = {"stage": stage, "param_tier": "host"} if stage == 3 else {"stage": stage}
    found, metrics = differing(of_rank, **options)
    found += softgpu.found() if softgpu.installed() else []
    return found + [f"{metrics['updates_in_backward_taken']} updates counted"] * (metrics["updates_in_backward_taken"] != expected)


@pytest.mark.device
def test_two_ranks() -> None:
    cases = [(stage, program, 3 * NORMS[{"never": never, "late": late}[program]]) for stage, program in ((2, "late"), (3, "never"))]
    assert run_world(2, ranks_differ_of, cases) == [[[], []] for _ in cases]


def ranks_differ_of(case: tuple[int, str, int]) -> list[str]:
    return ranks_differ(*case)


# ---- gradients that are handed over --------------------------------------------------------------------------------------------

KINDS: dict[str, dict[str, Any]] = {
    "sometimes": {"stage": 3, "model": "sometimes", "adversary": True},
    "vertical": {"stage": 3, "accumulation": 2, "vertical": True},
    "no_sync": {"stage": 3, "accumulation": 2, "no_sync": True, "adversary": True},
    "fp16": {"stage": 3, "dtype": "fp16", "overlap": False},
    "vertical, sometimes": {"stage": 2, "accumulation": 2, "vertical": True, "model": "sometimes"},
    "tied": {"stage": 0, "model": "tied"},
    "on the device": {"stage": 3, "update_on": "device"},
}
ON_RANKS = ("sometimes", "vertical, sometimes", "on the device" if softgpu.installed() else "tied")
ALONE = ("no_sync", "fp16", "tied", "on the device") if softgpu.installed() else tuple(KINDS)[:-1]


@pytest.mark.device
@pytest.mark.usefixtures("torch_engine")
@pytest.mark.parametrize(("world", "kinds"), ((1, ALONE), (2, ON_RANKS)), ids=("1", "2"))
def test_gradients_that_are_handed_over_train_what_plain_torch_trains(world: int, kinds: tuple[str, ...]) -> None:
    common = {"tier": "nvme", "overlap_step": "backward", "keep_gradients": False, "clip": None, "dtype": "bf16", "steps": 3}
    cases = [Case(**{**common, **KINDS[kind]}) for kind in kinds]
    table = run_world(world, run_case, cases)
    assert {str(case): rows for case, rows in zip(cases, table, strict=True) if rows != [""] * world} == {}


# ---- options -----------------------------------------------------------------------------------------------------------------


def test_auto_is_on_where_updates_have_memory_of_their_own(tmp_path: Path) -> None:
    found = {}
    for where in ("host", "nvme", "device"):
        path = {"nvme_path": str(tmp_path)} if where == "nvme" else {}
        for link in (False, True) if DEVICE.type == "cpu" else (True,):
            with small_pieces() if link else contextlib.nullcontext():
                model = GPT()
                options = {"stage": 2, "optimizer_tier": where, "overlap_step": "auto", **path}
                with zk.ZeroOptimizer(model, torch.optim.AdamW(model.parameters()), **options) as one:
                    found[where, link] = one.config.overlap_step
    want = {("host", True): "backward", ("nvme", True): "backward", ("device", True): False}
    want |= {("host", False): False, ("nvme", False): "backward", ("device", False): False} if DEVICE.type == "cpu" else {}
    assert found == want


def test_other_values_are_refused() -> None:
    for value in ("yes", 1.5, 2, None):
        with pytest.raises(ValueError, match="overlap_step must be True, False, 'backward' or 'auto'"):
            zk.ZeroConfig(overlap_step=value)  # type: ignore[arg-type]
    on_drive = {"optimizer_tier": "nvme", "nvme_path": ".", "keep_gradients": False}
    for options, words in (
        ({"optimizer_tier": "host"}, "no effect with optimizer_tier='host'"),
        ({"overlap_step": True}, "needs overlap_step='backward'"),
        ({"overlap_step": "auto", "clip_grad_norm": 1.0}, "the norm is known when backward has ended"),
    ):
        with pytest.raises(ValueError, match=words):
            zk.ZeroConfig(**{**on_drive, **options, **({"nvme_path": None} if "optimizer_tier" in options else {})})  # type: ignore[arg-type]
