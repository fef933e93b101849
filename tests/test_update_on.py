"""Updates on the device of state that rests in host memory or on a drive: the bits of updates by host threads, and the bytes that this moves."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import zk
from tests import softgpu
from tests.models import GPT, batch, loss_of
from tests.world import run_world
from zk.core import probe
from zk.core.assemble import Assembly
from zk.core.nbytes import placed_of
from zk.core.precision import DynamicLossScale
from zk.offload import spill, streamed, transfer
from zk.offload.streamed import best_share
from zk.tools.summary import sizes_of

STEPS = 4
ROOT = Path(__file__).resolve().parent.parent
Program = Callable[[GPT, zk.ZeroOptimizer, int], None]
Result = tuple[dict[str, Tensor], dict[str, float]]


@contextlib.contextmanager
def small_blocks() -> Iterator[None]:
    """Units of several chunks, and chunks of several blocks."""
    pieces = mock.patch.object(transfer, "PIECE_NUMEL", 4096), mock.patch.object(spill, "CHUNK_NUMEL", 4096)
    with pieces[0], pieces[1], mock.patch.object(streamed, "BLOCK_NUMEL", 1024):
        yield


def optimizer_of(model: GPT, **options: Any) -> zk.ZeroOptimizer:
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    return zk.ZeroOptimizer(model, inner, **{"stage": 2, "dtype": "bf16", "optimizer_tier": "host", "clip_grad_norm": 1.0, **options})


def backward(model: GPT, optimizer: zk.ZeroOptimizer, seed: int, factor: float = 1.0) -> None:
    """A backward of the loss, and of a multiple of the parameters whose gradients come last: then they are clipped."""
    late = dict(model.named_parameters())["tokens.weight"]
    with zk.gather(late) if optimizer.config.stage == 3 else contextlib.nullcontext():
        optimizer.backward(loss_of(model, batch(seed)) * 0.01 + (factor - 1) * late.float().sum())
    for held in optimizer.held:  # what has begun early is to count
        if held.shard is not None and held.shard.attempt is not None:
            held.shard.attempt.done.join()


def result_of(optimizer: zk.ZeroOptimizer) -> Result:
    optimizer.synchronize()
    metrics = optimizer.metrics()
    found = {name: value.clone() for name, value in optimizer.consolidated_state_dict("fp32").items()}
    if optimizer.config.stage < 3 or optimizer.comm.world == 1:
        state = optimizer.state_dict()["state"]
        found |= {f"{key} {name}": value.clone() for key, values in state.items() for name, value in values.items()}
    return found, metrics


def trained(program: Program, **options: Any) -> Result:
    """Masters, state and metrics after a few steps. ``shadows=False``: no memory is left for them."""
    full = mock.patch.object(Assembly, "_left", lambda *_: {"host": 0, "device": 0})
    with small_blocks(), contextlib.nullcontext() if options.pop("shadows", True) else full:
        torch.manual_seed(0)
        model = GPT(options.pop("model", "plain"))
        with optimizer_of(model, **options) as optimizer:
            for step in range(STEPS):
                program(model, optimizer, step)
                optimizer.step()
                optimizer.zero_grad()
            return result_of(optimizer)


def differing(found: Result, want: Result) -> list[str]:
    assert found[0].keys() == want[0].keys()
    return [name for name, value in want[0].items() if not torch.equal(value, found[0][name].to(value.device))]


# ---- bits ----------------------------------------------------------------------------------------------------------------------


def late_clipping(model: GPT, optimizer: zk.ZeroOptimizer, step: int) -> None:
    """Of four steps the third is clipped, once everything has been updated that comes before its last gradient."""
    backward(model, optimizer, step, 11.0 if step == 2 else 1.0)


def overflow(model: GPT, optimizer: zk.ZeroOptimizer, step: int) -> None:
    backward(model, optimizer, step, float("inf") if step == 1 else 1.0)


def several(model: GPT, optimizer: zk.ZeroOptimizer, step: int) -> None:
    """Micro-batches, one of which is added after a step that keeps its gradient."""
    for micro in range(2):
        backward(model, optimizer, 10 * step + micro)
    if step == 1:
        optimizer.step()
        backward(model, optimizer, 100)


def interference(model: GPT, optimizer: zk.ZeroOptimizer, step: int) -> None:
    """Users look at all there is, and write it."""
    backward(model, optimizer, step)
    head = model.head.weight
    if step == 1:
        optimizer.state[head]["exp_avg"].zero_()
        head.grad.mul_(0.5)  # type: ignore[union-attr]
    if step == 2:
        optimizer.load_state_dict(optimizer.state_dict())
        with torch.no_grad(), zk.gather(model.parameters(), write=True):
            model.blocks[0].up.weight.clamp_(-0.05, 0.05)
    if step == 3:
        optimizer.zero_grad()
        with optimizer.parked():
            pass
        backward(model, optimizer, step)


def at_once(model: GPT, optimizer: zk.ZeroOptimizer, step: int) -> None:
    """A state is loaded right after its update, and a gradient is dropped for another one right after its update has begun."""
    backward(model, optimizer, step)
    if step == 1:
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
    if step >= 1:
        optimizer.zero_grad()
        backward(model, optimizer, 10 + step)


def late_readers(model: GPT, optimizer: zk.ZeroOptimizer, step: int) -> None:
    """Compute reads parameters, and a delayed update is asked for before anything has told the host how far compute is."""
    for param in model.parameters():
        param.detach().clone()
    optimizer.synchronize()
    backward(model, optimizer, step)


def readers_before_step(model: GPT, optimizer: zk.ZeroOptimizer, step: int) -> None:
    """Compute reads parameters once more, after the last gradient."""
    backward(model, optimizer, step)
    for param in model.parameters():
        param.detach().clone()


FP16 = {"dtype": "fp16", "loss_scale": DynamicLossScale(init=2.0**10, hysteresis=1, window=3)}
# a program, what both sides have in common, and how the device updates; of units, how many updates that began early counted
CASES: list[tuple[Program, dict[str, Any], dict[str, Any], int]] = [
    (late_clipping, {}, {}, 0),
    (late_clipping, {}, {"overlap_step": "backward"}, 3),
    (late_clipping, {}, {"stage": 3, "param_tier": "nvme", "optimizer_tier": "nvme", "overlap_step": "backward"}, 3),
    (late_clipping, {}, {"optimizer_tier": "auto", "device_budget": 60_000, "overlap_step": True}, 0),
    (late_clipping, {}, {"update_on": 0.5, "overlap": False}, 0),
    (overflow, FP16, {"optimizer_tier": "nvme"}, 0),
    (several, {"dtype": "fp32", "clip_grad_norm": None}, {"stage": 0, "overlap_step": True}, 0),
    (several, {"model": "tied"}, {"stage": 3, "param_tier": "host"}, 0),
    (several, {"delay_update": 1, "model": "frozen"}, {"update_on": 0.5}, 0),
    (interference, {"dtype": "fp16", "loss_scale": None}, {"overlap_step": "backward"}, 3),
    (at_once, {}, {"overlap_step": "backward"}, 6),
    (late_readers, {"delay_update": 1}, {}, 0),
    (late_readers, {"delay_update": 1}, {"device_budget": "1GiB"}, 0),
    (late_readers, {"delay_update": 1}, {"shadows": False}, 0),
    (late_readers, {"delay_update": 1}, {"update_on": "host", "device_budget": "1GiB"}, 0),
    (readers_before_step, {}, {"overlap_step": "backward"}, 3),
    (readers_before_step, {}, {"update_on": "host", "overlap_step": "backward", "device_budget": "1GiB"}, 3),
    # (a parameter that is written is a master's upper half, or a copy of it: that is up to the tier)
    (interference, {"stage": 3, "param_tier": "host"}, {"overlap_step": True}, 0),
]


@functools.cache
def wanted(number: int) -> Result:
    """The same by host threads, in step()."""
    program, common, _, _ = CASES[number]
    return trained(program, **common)


@pytest.mark.device_only
@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda number: "-".join(map(str, (CASES[number][0].__name__, *CASES[number][2].values()))))
def test_bits_are_those_of_host_threads(number: int, tmp_path: Path) -> None:
    program, common, options, early = CASES[number]
    alike = next(other for other in range(len(CASES)) if CASES[other][:2] == (program, common))
    drive = {"nvme_path": str(tmp_path)} if "nvme" in options.values() else {}
    found = trained(program, **{"update_on": "device", **common, **options, **drive})
    assert differing(found, wanted(alike)) == []
    assert found[1].get("updates_in_backward_taken", 0) >= early
    assert found[1]["skipped_steps"] == (program is overflow)


@pytest.mark.device_only
def test_nothing_streams_any_more_once_synchronize_has_returned() -> None:
    with small_blocks(), optimizer_of(model := GPT(), update_on="device") as optimizer:
        backward(model, optimizer, 0)
        optimizer.step()
        stream = optimizer.assembly.stream
        assert stream is not None
        if softgpu.installed():  # a real device may be done
            assert not all(buffer.left.done for buffer in stream.buffers)
        optimizer.synchronize()
        assert all(buffer.left.done for buffer in stream.buffers)


@pytest.mark.device_only
@pytest.mark.parametrize("place", ("host", "nvme"))
def test_checkpoints_of_either_side_are_the_other_s(place: str, tmp_path: Path) -> None:
    """Also of a save that goes on while the next update changes what it has not read."""

    def continued(before: str, after: str) -> Result:
        options: dict[str, Any] = {"optimizer_tier": place, "overlap_step": True}
        options |= {"nvme_path": str(tmp_path)} if place == "nvme" else {}
        folder = tmp_path / f"{before} {after}"
        with small_blocks():
            torch.manual_seed(0)
            model = GPT()
            with optimizer_of(model, update_on=before, **options) as optimizer:
                for step in range(3):
                    backward(model, optimizer, step)
                    optimizer.step()
                    optimizer.zero_grad()
                    if step == 1:
                        optimizer.save_checkpoint(folder, async_save=True)
            model = GPT()
            with optimizer_of(model, update_on=after, **options) as optimizer:
                optimizer.load_checkpoint(folder)
                backward(model, optimizer, 2)
                optimizer.step()
                return result_of(optimizer)

    want = continued("host", "host")
    assert differing(continued("host", "device"), want) == [] and differing(continued("device", "host"), want) == []


def rank_differs(case: tuple[int, Any, float]) -> list[str]:
    """One rank of two: what differs from host threads."""
    stage, overlap_step, share = case

    def of_rank(model: GPT, optimizer: zk.ZeroOptimizer, step: int) -> None:
        backward(model, optimizer, 10 * step + dist.get_rank())

    found = differing(trained(of_rank, stage=stage, overlap_step=overlap_step, update_on=share), trained(of_rank, stage=stage))
    return found + softgpu.found()


@pytest.mark.device_only
def test_ranks_publish_what_the_device_has_updated() -> None:
    cases = [(2, "backward", 0.5), (3, True, 1.0)]
    assert run_world(2, rank_differs, cases) == [[[], []] for _ in cases]


# ---- bytes, and who says what ---------------------------------------------------------------------------------------------------


@pytest.mark.device_only
@pytest.mark.parametrize("options", ({}, {"stage": 3, "param_tier": "host", "units": ["blocks.0", "blocks.1", "head"]}), ids=("near", "far"))
def test_bytes_are_those_of_the_summary_and_the_plan(options: dict[str, Any]) -> None:
    with small_blocks():
        model = GPT()
        with optimizer_of(model, update_on="device", **options) as optimizer:
            placed = placed_of(optimizer)
            sizes = sizes_of(optimizer, placed)
            moved = []
            for step in range(2):
                before = optimizer.transfer.uploaded_nbytes, optimizer.transfer.offloaded_nbytes
                optimizer.backward(loss_of(model, batch(step)))
                optimizer.step()
                metrics = optimizer.metrics()
                optimizer.zero_grad()
                moved.append((optimizer.transfer.uploaded_nbytes - before[0], optimizer.transfer.offloaded_nbytes - before[1]))
            numel = sum(held.held_numel for held in optimizer.held)
            if not options:
                assert moved[1] == (12 * numel, 12 * numel), "split master, moments and gradient, and no parameter"
                assert metrics["host_param_copy_nbytes"] == 0
            else:  # (of the two gathers of each unit, one may find the last one of forward still there)
                assert 14 * numel <= moved[1][0] <= 18 * numel and moved[1][1] == 14 * numel
            assert metrics["device_buffer_nbytes"] == sizes["device", "buffer"] == optimizer.assembly.stream.nbytes  # type: ignore[union-attr]
            assert metrics["host_moments_nbytes"] == sizes["host", "moments"] and metrics["host_master_nbytes"] == sizes["host", "master"]
            assert "the GPU updates 100% of the optimizer state" in str(optimizer.summary())


def chosen(rates: tuple[float, ...]) -> float | str:
    """The side of the update on ranks whose threads update so many elements a second."""
    cpu = rates[dist.get_rank() if dist.is_initialized() else 0]
    known = mock.patch.object(probe, "_known", return_value={"up": 5e10, "down": 5e10, "memory": 3e11, "cpu": cpu})
    with known, optimizer_of(GPT(), update_on="auto") as optimizer:
        return optimizer.config.update_on


@pytest.mark.device_only
def test_auto_is_a_share_by_measured_rates() -> None:
    assert [chosen((cpu,)) for cpu in (1e12, 1e6)] == ["host", 1.0]
    assert run_world(2, chosen, [(1e6, 1e6), (1e6, 1e12)]) == [[1.0, 1.0], ["host", "host"]], "the smallest share of all ranks"
    model = GPT()
    with zk.ZeroOptimizer(model, torch.optim.SGD(model.parameters(), lr=0.1), optimizer_tier="host", update_on="auto") as optimizer:
        assert optimizer.config.update_on == "host"
    with optimizer_of(GPT(), update_on=0.4) as optimizer:
        assert [place.streams for place in placed_of(optimizer)] == [False, True, False]
        assert "of the optimizer state outside its memory" in str(optimizer.summary())


def test_the_share_takes_the_time_of_the_slowest_resource_into_account() -> None:
    fast = {"up": 5e10, "down": 5e10, "memory": 4e11, "cpu": 1e9}
    near, far = best_share(fast, 10, 2, True), best_share(fast, 10, 2, False)
    # one side takes (1 - s) / 1e9, the other (12 s + 2 (1 - s)) / 5e10
    assert near == pytest.approx(48 / 60, abs=1 / 32) and far == pytest.approx(50 / 64, abs=1 / 32)
    assert best_share({**fast, "cpu": 1e11}, 10, 2, True) == 0.0, "what host threads do faster"
    assert best_share({**fast, "up": 1e12, "down": 1e12, "cpu": 1e8}, 10, 2, True) > 0.9


def test_a_side_that_cannot_update_is_refused() -> None:
    for value in ("gpu", True, 1.5, None):
        with pytest.raises(ValueError, match="update_on must be 'host', 'device', 'auto' or a number from 0 to 1"):
            zk.ZeroConfig(optimizer_tier="host", update_on=value)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="update_on='device' has no effect: all optimizer state is in the device's memory"):
        zk.ZeroConfig(update_on="device")
    net = torch.nn.Linear(4, 4)
    with pytest.raises(ValueError, match=r"update_on=0.5 needs a CUDA device, and the model is on cpu"):
        zk.ZeroOptimizer(net, torch.optim.AdamW(net.parameters()), optimizer_tier="host", update_on=0.5)
    with zk.ZeroOptimizer(net, torch.optim.AdamW(net.parameters()), optimizer_tier="host", update_on="auto") as optimizer:
        assert optimizer.config.update_on == "host"
    for kind, options in ((torch.optim.SGD, {"momentum": 0.9}), (torch.optim.Adam, {"amsgrad": True})):
        with pytest.raises(ValueError, match="needs Adam or AdamW without amsgrad"):
            zk.ZeroOptimizer(net, kind(net.parameters(), lr=0.1, **options), optimizer_tier="host", update_on="device")
