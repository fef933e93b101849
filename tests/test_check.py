"""What cannot fit is refused before anything moves, on all ranks, with changes that fit."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import zk
from benchmarks.throttled import ThrottledLink, pretend
from tests.programs import run
from tests.world import run_world
from zk.core import fit

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
WIDTH, LAYERS = 64, 40
NUMEL = LAYERS * (WIDTH * WIDTH + WIDTH)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def train(net: nn.Module, optimizer: Any, steps: int = 2) -> list[float]:
    losses = []
    for seed in range(steps):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed))
        loss = net(x.to(next(net.parameters()).dtype)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@contextlib.contextmanager
def free(apart: bool = False, **nbytes: int) -> Iterator[None]:
    """As if there were so much memory; ``apart``: the device has its own."""

    def found(_device: torch.device, joined: bool, paths: Any) -> dict[str, int]:
        there = {"device": GIB, "host": GIB, "nvme": GIB, **nbytes}
        is_there = {"device": not joined, "host": True, "nvme": bool(paths)}
        return {name: n for name, n in there.items() if is_there[name]}

    link = pretend(ThrottledLink(1e9)) if apart else contextlib.nullcontext()
    with mock.patch.object(fit, "free_memory", found), link:
        yield


def refused(net: nn.Module, **config: Any) -> str:
    with pytest.raises(MemoryError) as caught:
        zk.ZeroOptimizer(net, torch.optim.AdamW(net.parameters()), **config)
    return str(caught.value)


def offered(message: str) -> list[dict[str, Any]]:
    """The changes that a refusal names."""
    lines = re.findall(r"^    ([a-z].*?)(?: \(changes results\))?$", message, re.MULTILINE)
    return [dict(eval(f"dict({line})")) for line in lines]


HOST = {"stage": 3, "param_tier": "host", "optimizer_tier": "host"}
DRIVE = {"stage": 3, "param_tier": "nvme", "optimizer_tier": "nvme"}
ON_HOST = {"optimizer_tier": "host"}
ON_DRIVE = {"optimizer_tier": "nvme"}
BUDGET = {**DRIVE, "host_budget": "2MiB"}
# the device apart; KiB of a memory that are free; what is asked for; fields of what is offered
LACKING = [
    (True, {"device": 1500}, {}, "optimizer_tier|stage param_tier optimizer_tier|state_dtype"),
    (True, {"device": 100}, {}, "stage param_tier optimizer_tier"),
    (True, {"device": 1500, "host": 1}, {}, "state_dtype"),
    (True, {"host": 1400}, ON_HOST, "optimizer_tier nvme_path"),
    (False, {"host": 1300}, {}, "optimizer_tier nvme_path"),
    (False, {"host": 800}, BUDGET, "host_budget"),
    (False, {"nvme": 1000}, ON_DRIVE, "optimizer_tier nvme_path|host_budget"),
]


@pytest.mark.parametrize(("apart", "there", "config", "fields"), LACKING)
def test_a_refusal_names_what_lacks_and_offers_what_fits(
    apart: bool, there: dict[str, int], config: dict[str, Any], fields: str, tmp_path: Path
) -> None:
    config = {"dtype": "bf16", "units": [nn.Linear], **config}
    if "nvme" in config.values():
        config["nvme_path"] = tmp_path
    sizes = {name: KIB * nbytes for name, nbytes in there.items()}
    with free(apart, **sizes), contextlib.chdir(tmp_path):
        message = refused(model(), **config)
        rows = [line.split()[0] for line in message.splitlines() if "too few" in line]
        assert rows == [{"nvme": "drive"}.get(name, name) for name in there][:1], message
        assert "Nothing has been changed" in message and "activations come on top" in message
        changes = offered(message)
        found = iter(map(set, changes))
        assert all(set(one.split()) in found for one in fields.split("|")), message  # in order
        for change in changes:
            net = model()
            adam = torch.optim.AdamW(net.parameters())
            with zk.ZeroOptimizer(net, adam, **{**config, **change}) as optimizer:
                train(net, optimizer)


def test_after_a_refusal_model_and_optimizer_are_as_they_were() -> None:
    net, twin = model(), model()
    adam, other = torch.optim.AdamW(net.parameters()), torch.optim.AdamW(twin.parameters())
    train(net, adam), train(twin, other)
    with free(host=KIB, nvme=KIB), pytest.raises(MemoryError, match="No other tier, state or budget fits"):
        zk.ZeroOptimizer(net, adam, stage=3, optimizer_tier="host", dtype="bf16")
    assert train(net, adam) == train(twin, other)
    for mine, theirs in zip(net.parameters(), twin.parameters(), strict=True):
        assert mine.dtype == torch.float32 and torch.equal(mine, theirs)
        assert torch.equal(adam.state[mine]["exp_avg"], other.state[theirs]["exp_avg"])
    with zk.ZeroOptimizer(net, adam) as optimizer:  # and may be given away still
        train(net, optimizer)


def still_needed(net: nn.Module, adam: Any = None, **config: Any) -> int:
    """Bytes of host memory that a refusal names for one process."""
    adam = adam or torch.optim.AdamW(net.parameters())
    with free(host=0, nvme=0), pytest.raises(MemoryError) as caught:
        zk.ZeroOptimizer(net, adam, dtype="bf16", units=[nn.Linear], **config)
    found = re.search(r"^host +([\d.]+) (bytes|MiB)", str(caught.value), re.MULTILINE)
    assert found is not None
    return round(float(found[1]) * (MIB if found[2] == "MiB" else 1))


def test_what_just_fits_is_not_refused_and_less_is() -> None:
    nbytes = still_needed(model())
    assert nbytes == pytest.approx(
        (2 + 2 + 2 + 8 - 4) * NUMEL, rel=0.01
    )  # the fp32 weights are given back
    with free(host=nbytes + 10 * KIB):
        net = model()
        with zk.ZeroOptimizer(net, torch.optim.AdamW(net.parameters()), dtype="bf16") as optimizer:
            train(net, optimizer)
    with free(host=nbytes - 10 * KIB):
        refused(model(), dtype="bf16")


def test_what_the_model_holds_counts_as_free() -> None:
    plain = still_needed(model())
    with zk.deferred_init():
        deferred = model()
    near = {"rel": 0.02}
    assert still_needed(deferred) == pytest.approx(plain + 4 * NUMEL, **near)
    graded = model()
    graded(torch.ones(1, WIDTH)).sum().backward()
    assert still_needed(graded) == pytest.approx(plain - 4 * NUMEL, **near)
    net = model()
    train(net, adam := torch.optim.AdamW(net.parameters()))
    assert still_needed(net, adam) == pytest.approx(plain - 8 * NUMEL, **near)


def test_buffers_that_are_deferred_are_yet_to_be_made() -> None:
    nbytes = []
    for numel in (MIB, 3 * MIB):
        with zk.deferred_init():
            net = model()
            net.register_buffer("buffer", torch.ones(numel))
        nbytes += [still_needed(net, cast_buffers=cast) for cast in (False, True)]
    assert nbytes[2] - nbytes[0] == pytest.approx(2 * 4 * MIB, rel=0.01)
    assert nbytes[3] - nbytes[1] == pytest.approx(2 * 2 * MIB, rel=0.01)


def test_the_check_can_be_switched_off_for_what_it_cannot_know() -> None:
    """Here, parameters that never get a gradient."""
    net = nn.ModuleList([nn.Linear(WIDTH, WIDTH), model()])
    with free(host=8 * NUMEL):
        assert "check_memory=False" in refused(net, stage=2)
        adam = torch.optim.AdamW(net.parameters())
        with zk.ZeroOptimizer(net, adam, stage=2, check_memory=False):
            pass
    with pytest.raises(TypeError, match="check_memory must be True or False; got 'yes'"):
        zk.ZeroConfig(check_memory="yes")  # type: ignore[arg-type]


def on_ranks(what: str) -> str:
    """What each rank hears; the second has less memory than the first, or both share too little."""
    alone, rank = 14 * NUMEL, torch.distributed.get_rank()
    host = {"one lacks": KIB if rank else GIB, "shared": alone, "enough": 2 * alone}[what]
    net = model()
    adam = torch.optim.AdamW(net.parameters())
    try:
        with free(host=host), zk.ZeroOptimizer(net, adam, dtype="bf16", stage=0) as optimizer:
            train(net, optimizer)
    except MemoryError as error:
        assert all(param.dtype == torch.float32 for param in net.parameters())
        return str(error)
    return "trained"


def test_ranks_refuse_together_and_share_the_memory_of_a_machine() -> None:
    one, shared, enough = run_world(2, on_ranks, ["one lacks", "shared", "enough"])
    assert one[0] == one[1] and "not enough memory on rank 1 of 2 for this model" in one[0]
    assert "for the 2 ranks of a machine" in one[0]
    assert shared[0] == shared[1] and "not enough memory on ranks 0, 1 of 2" in shared[0]
    assert enough == ["trained", "trained"]


CASES: list[dict[str, Any]] = [{}, HOST, DRIVE, {**DRIVE, "param_tier": "host"}, BUDGET]
CASES += [{"state_dtype": "bf16"}, {"state_dtype": "8bit"}, {**HOST, "overlap_step": "backward"}]


@pytest.mark.parametrize("config", CASES, ids=str)
def test_predicted_bytes_are_those_of_a_real_optimizer(
    config: dict[str, Any], tmp_path: Path
) -> None:
    config = {"dtype": "bf16", "units": [nn.Linear], **config}
    if "nvme" in config.values():
        config["nvme_path"] = tmp_path
    for apart in (False, True):
        net = model()
        adam = torch.optim.AdamW(net.parameters())
        with free(apart), zk.ZeroOptimizer(net, adam, **config) as optimizer:
            train(net, optimizer)
            units, comm = [held.unit for held in optimizer.held], optimizer.comm
            where = (
                optimizer.config,
                comm.shards,
                not apart,
                optimizer.rules,
                optimizer.param_groups,
            )
            most = fit.footprint_of(net, units, *where)
            least = fit.footprint_of(net, units, *where, at_least=True)
            metrics = optimizer.metrics()
        for kind in ("param", "master", "moments", "param_copy"):
            for tier in ("device", "host", "nvme"):
                assert most.sizes[tier, kind] == metrics.get(f"{tier}_{kind}_nbytes", 0), (
                    tier,
                    kind,
                )
        assert metrics.get("host_buffer_nbytes", 0) <= most.sizes["host", "buffer"] * 1.2 + 64 * KIB
        for name in ("device", "host", "nvme"):
            assert 0 <= least.on(name) <= most.on(name), name


REAL = """
import gc, sys, torch, zk
from unittest import mock
from zk.core import fit, memory

def run(width, layers, **config):
    net = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(layers)))
    found = []
    with mock.patch.object(fit, "lacking", lambda need, free: found.append(need["host"]) or {}):
        gc.collect(), memory.trim()  # what the run before has left is not this one's
        open("/proc/self/clear_refs", "w").write("5")  # the peak is that from here on
        before = memory.peak_nbytes()
        optimizer = zk.ZeroOptimizer(net, torch.optim.AdamW(net.parameters()), dtype="bf16", **config)
    for _ in range(2):
        net(torch.randn(1, width).bfloat16()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    print(found[0], memory.peak_nbytes() - before)
    optimizer.close()

torch.set_num_threads(1)
run(64, 2)  # what is loaded with the first step
run(1024, 24, stage=2)
run(1024, 24, stage=3, param_tier="nvme", optimizer_tier="nvme", nvme_path=sys.argv[1])
"""


def test_what_is_needed_is_no_more_than_a_real_run_takes(tmp_path: Path) -> None:
    words = run("-c", REAL, str(tmp_path), check=True).stdout.split()
    _, _, least, took, on_drive, took_drive = map(int, words)
    assert 0.8 * took < least <= took + 4 * MIB and on_drive <= took_drive + 4 * MIB
