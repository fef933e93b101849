"""Updates by way of the device: whatever passes through it, the bits are those of the CPU update."""

from __future__ import annotations

import contextlib
import gc
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import zk
from tests import softgpu
from tests.core.test_tiers import walk
from tests.models import DEVICE, GPT, batch, loss_of, train
from tests.parity import Stepwise, halved, place, unlike
from tests.world import run_world
from zk import memory, store
from zk.addons import update_on as module
from zk.addons.update_on import UpdateOn
from zk.kernels import reference
from zk.store import UnitStore

STEPS, COUNT = 4, {"sent": 0}
device_only = pytest.mark.device_only


def told(value: Any) -> str:
    """An id that is the same in every process."""
    return value if isinstance(value, str) else "-".join(f"{name}={getattr(one, '__name__', one)}" for name, one in value.items())


@contextlib.contextmanager
def small() -> Iterator[None]:
    """Units have several chunks, and those that are sent are counted. Interpreted, the kernel rounds otherwise: both sides use torch's ops."""
    send = UpdateOn.send

    def counted(self: UpdateOn, *given: Any) -> None:
        COUNT["sent"] += 1
        send(self, *given)

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(store, "CHUNK_NUMEL", 2048))
        stack.enter_context(mock.patch.object(UpdateOn, "send", counted))
        if softgpu.installed():
            stack.enter_context(mock.patch("zk.kernels.adam_kernel.launch", reference.adam))
            stack.enter_context(mock.patch("zk.offload.cpu_adam.default_engine", lambda: "torch"))
            stack.enter_context(mock.patch.object(module, "default_engine", lambda: "numba"))
        yield


@pytest.fixture(autouse=True)
def in_small() -> Iterator[None]:
    with small():
        yield


def made(**options: Any) -> tuple[GPT, zk.ZeroOptimizer]:
    return halved(**{"clip_grad_norm": 0.5, **options})


def differing(program: Stepwise, update_on: Any, overlap_step: bool = False, **options: Any) -> list[int]:
    """What differs from the CPU update, by number."""
    COUNT["sent"] = 0
    return unlike(program, STEPS, {"update_on": update_on, "overlap_step": overlap_step}, **{"clip_grad_norm": 0.5, **options})


def plain(model: GPT, optimizer: zk.ZeroOptimizer, step: int) -> None:
    optimizer.backward(loss_of(model, batch(step)))


def add(model: GPT, optimizer: zk.ZeroOptimizer, step: int) -> None:
    for micro in range(3):
        plain(model, optimizer, 10 * step + micro)


PLACES = ("0 host", "1 host", "2 host", "3 host", "3 host device", "2 nvme", "3 nvme", "3 nvme device")


@device_only
@pytest.mark.parametrize(("name", "dtype"), [*itertools.product(PLACES, ["bf16"]), ("2 host", "fp32"), ("3 nvme", "fp32")])
def test_bits_are_those_of_the_cpu_update(name: str, dtype: str, tmp_path: Path) -> None:
    """All, and in turns half, or as many as are faster there."""
    assert differing(plain, "device", dtype=dtype, **place(name, tmp_path)) == []
    every = COUNT["sent"]
    assert every > 3 * STEPS
    if PLACES.index(name) % 2:
        assert differing(add, 0.5, dtype=dtype, **place(name, tmp_path)) == [] and COUNT["sent"] == every // 2
    else:
        assert differing(plain, "auto", dtype=dtype, **place(name, tmp_path)) == [] and 3 <= COUNT["sent"] < every


@device_only
@pytest.mark.parametrize("value", ["device", 0.5])
@pytest.mark.parametrize(("name", "dtype"), [("3 host", "fp32"), ("3 host device", "bf16"), ("3 nvme", "bf16")])
def test_beside_the_next_forward(name: str, dtype: str, value: Any, tmp_path: Path) -> None:
    assert differing(add, value, overlap_step=True, dtype=dtype, **place(name, tmp_path)) == [] and COUNT["sent"]


def infinite(model: GPT, optimizer: zk.ZeroOptimizer, step: int) -> None:
    plain(model, optimizer, step)
    if step == 2:
        model.norm.bias.grad = torch.full_like(model.norm.bias, float("inf"))


def change(model: GPT, optimizer: zk.ZeroOptimizer, step: int) -> None:
    """What is read and written between steps has been copied down, and goes up again."""
    optimizer.param_groups[step % 2]["lr"] = 1e-2 / (1 + step)
    plain(model, optimizer, step)
    nn.utils.clip_grad_norm_(model.parameters(), 0.2)
    if step == 1:
        model.blocks[0].down.bias.grad = None  # type: ignore[union-attr]
    if step == 2:
        with torch.no_grad(), zk.gather(model.head.weight, write=True):
            model.head.weight.clamp_(-0.05, 0.05)
        with zk.gather(model.head.weight, kind="exp_avg", write=True) as averages:
            averages[0].zero_()
    if step == 3:
        optimizer.load_state_dict(optimizer.state_dict())
        plain(model, optimizer, step)


FOLDER: list[Path] = []


def save(model: GPT, optimizer: zk.ZeroOptimizer, step: int) -> None:
    folder = FOLDER[0] / str(optimizer.config.options.get("update_on"))
    if step in (1, 2):
        optimizer.save_checkpoint(folder, async_save=step == 2)
    if step == 3:
        optimizer.load_checkpoint(folder)
    plain(model, optimizer, step)
    if step == 3:
        with optimizer.parked():
            pass


@device_only
@pytest.mark.parametrize(("program", "name"), [*itertools.product((infinite, change, save), ("2 host", "3 host", "3 nvme"))])
def test_whatever_happens_between_steps(program: Stepwise, name: str, tmp_path: Path) -> None:
    FOLDER[:] = [tmp_path / "saved"]
    (tmp_path / "drive").mkdir()
    assert differing(program, 0.7, **place(name, tmp_path / "drive")) == [] and COUNT["sent"]


def several(halves: list[Any], **options: Any) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW(halves[:1], **options), torch.optim.Adam(halves[1:], **options)]


@device_only
@pytest.mark.parametrize(
    "options",
    (
        {"kind": torch.optim.Adam, "clip_grad_norm": None},
        {"state_dtype": "bf16"},
        {"state_dtype": "8bit"},
        {"state_dtype": "8bit", "dtype": "fp32"},
        {"dtype": "fp16", "loss_scale": 1024.0},
        {"model": "frozen", "stage": 3},
        {"model": "tied"},
        {"model": "unused", "stage": 3},
        {"model": "checkpointed", "stage": 3},
        {"kind": several, "stage": 1},
    ),
    ids=told,
)
def test_with_every_kind_of_state(options: dict[str, Any]) -> None:
    assert differing(plain, "device", **options) == [] and COUNT["sent"]


@device_only
@pytest.mark.parametrize("seed", range(2))
def test_any_order_of_what_a_user_does(seed: int, tmp_path: Path) -> None:
    want = walk(seed, "host", tmp_path, overlap_step=False)
    for tier in ("host", "nvme"):
        assert walk(seed, tier, tmp_path, update_on=0.6, **({"param_tier": "device"} if seed else {})) == want


def ranks_differ(job: tuple[str, str, Any]) -> list[int]:
    name, folder, value = job
    with small():
        return differing(plain, value, **place(name, Path(folder)))


@device_only
def test_on_two_ranks(tmp_path: Path) -> None:
    jobs = [(name, str(tmp_path), value) for name, value in (("1 host", "auto"), ("2 nvme", "device"), ("3 host", 0.5), ("3 nvme", 0.5))]
    assert run_world(2, ranks_differ, jobs, timeout=120) == [[[], []]] * len(jobs)


# ---- memory, the share, errors, refusals -------------------------------------------------------------------------------------------------


@device_only
def test_two_blocks_are_on_the_device_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many there are, and with no wait of the host."""
    torch.manual_seed(0)
    model = nn.Linear(1024, 256, bias=False, device=DEVICE)  # 128 chunks
    optimizer = zk.ZeroOptimizer(model, torch.optim.AdamW(model.parameters()), dtype="bf16", optimizer_tier="host", update_on="device")
    model(torch.ones(2, 1024, device=DEVICE, dtype=torch.bfloat16)).float().sum().backward()
    seen: list[int] = []
    monkeypatch.setattr("zk.kernels.adam_kernel.launch", lambda *_: None)  # torch's ops would take some
    send, before = UpdateOn.send, torch.cuda.memory_allocated()

    def watched(*given: Any) -> None:
        torch.cuda.reset_peak_memory_stats()
        send(*given)
        seen.append(torch.cuda.max_memory_allocated() - before)

    monkeypatch.setattr(UpdateOn, "send", watched)
    optimizer.step()
    block = 2048 * (2 + 2 + 2 + 8)  # parameter, gradient, the rest of the master, moments
    assert len(seen) == 128 and max(seen) <= 2 * block
    optimizer.close()


@device_only
def test_auto_takes_the_share_with_which_both_ways_end_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = made(update_on="auto")
    (addon,) = [one for one in optimizer._seams.addons if isinstance(one, UpdateOn)]
    clock = [0.0]

    def slow(run: Callable[..., None], seconds: float) -> Callable[..., None]:
        def slowly(*given: Any) -> None:
            run(*given)
            clock[0] += seconds * len(given[-2]["param"])

        return slowly

    monkeypatch.setattr(module, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(UpdateOn, "send", slow(UpdateOn.send, 1.0))  # four seconds with what follows
    monkeypatch.setattr(UnitStore, "apply", slow(UnitStore.apply, 3.0))
    train(model, optimizer, 3)
    assert addon.times == () and addon.share == 3 / (3 + 4 / 2)
    optimizer.close()


@device_only
@pytest.mark.parametrize("name", ["2 host", "3 nvme"])
def test_an_error_is_a_step_that_failed_half_way(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = made(update_on="device", **place(name, tmp_path))
    train(model, optimizer, 1)
    saved = optimizer.state_dict()
    apply, calls = UnitStore.apply, itertools.count()

    def fails(*given: Any) -> None:
        if next(calls) == 2:
            raise RuntimeError("CUDA error")
        apply(*given)

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="CUDA error"):
        patch.setattr(UnitStore, "apply", fails)
        train(model, optimizer, 1, start=1)
    with pytest.raises(RuntimeError, match="failed half-way"):
        optimizer.state_dict()
    optimizer.load_state_dict(saved)
    for key, state in optimizer.state_dict()["state"].items():
        assert all(torch.equal(value, saved["state"][key][kind]) for kind, value in state.items())
    train(model, optimizer, 1, start=1)
    optimizer.close()


@device_only
def test_what_is_page_locked_is_given_back() -> None:
    gc.collect()
    memory.trim()
    before = softgpu.pinned_nbytes()
    model, optimizer = made(update_on=0.5)
    states = [field for one in optimizer._trained for chunk in one.states for field in chunk.fields.values()]
    assert all(field.is_pinned() for field in states)
    train(model, optimizer, 2)
    states.clear()
    optimizer.close()
    gc.collect()
    memory.trim()
    assert softgpu.pinned_nbytes() == before


@device_only
@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"optimizer_tier": "device"}, "no effect with optimizer_tier='device'"),
        ({"kind": torch.optim.NAdam}, r"needs Adam or AdamW .* got \['NAdam'\]"),
        ({"kind": lambda halves, **o: torch.optim.AdamW(halves, amsgrad=True, **o)}, "without amsgrad"),
        ({"overlap_step": "backward"}, "use overlap_step=True"),
    ],
    ids=told,
)
def test_what_cannot_be_right_is_refused_by_name(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=f"update_on='auto' .*{match}"):
        made(update_on="auto", **options)


@device_only
def test_without_numba_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "default_engine", lambda: "torch")
    with pytest.raises(ValueError, match=r"update_on=0\.5 needs numba"):
        made(update_on=0.5)


@pytest.mark.parametrize("value", ["host", True, 1, 1.0, 0.0, 2.0, [0.5]])
def test_other_values_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="update_on must be 'device', 'auto' or a share between 0 and 1; got"):
        UpdateOn(value)


@pytest.mark.parametrize("value", ["device", "auto", 0.5])
def test_where_the_device_is_the_host_it_is_refused(value: Any) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=f"update_on={value!r} needs a GPU"):
        zk.ZeroOptimizer(model, torch.optim.AdamW(model.parameters()), optimizer_tier="host", update_on=value)
