"""Tiers by budgets, and the refusal of what cannot fit before anything moves, on all ranks, with changes that fit."""

import contextlib
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zk
from tests.models import descend
from tests.world import call, run_world
from zk import placement
from zk.placement import Place, Placement, Size
from zk.store import UnitStore

KIB, GIB = 1 << 10, 1 << 30
WIDTH, LAYERS = 64, 40
NUMEL = LAYERS * (WIDTH * WIDTH + WIDTH)
UNIT = Size(1000, param=2, master=2, moments=8, is_trained=True, is_block=True)


def planned(joined: bool = False, sizes: list[Size] | None = None, ranks: int = 1, **options: Any) -> Placement:
    return Placement(zk.ZeroConfig(**options), sizes or [UNIT] * 4, ranks, joined)


AUTO: dict[str, Any] = {"stage": 3, "param_tier": "auto", "optimizer_tier": "auto", "nvme_path": "/tmp"}
HOST = {"stage": 3, "param_tier": "host", "optimizer_tier": "host"}
DRIVE = {"stage": 3, "param_tier": "nvme", "optimizer_tier": "nvme"}
ROOM = {"device": 1 << 40, "host": 1 << 40}


BUFFERS = 4 * (4096 + 4096 + 12_288)  # of the drive, in host memory: of units that are gathered whole and of chunks
ONE = {"joined": True, "nvme_path": None}  # the memory of device and host
HALF = {"host_budget": BUFFERS - 4 * 4096 + 12 * 2000 + 13_000}
FILLED: tuple[tuple[int, int, int, dict[str, Any], str], ...] = (
    (1 << 20, 1 << 20, 4, {}, "4dd"),
    # parameters (2 bytes an element) come first, then states (12), with copies of parameters on the host
    (4 * 2000 + 12_000, 1 << 20, 4, {}, "1dd 3mh"),
    (0, 1 << 20, 4, {}, "4hh"),
    (0, BUFFERS + 12 * 2000 + 13_000, 12, {}, "1hh 11hn"),
    (0, BUFFERS + 2 * 2000, 12, {}, "2hn 10nn"),
    (12 * 2000, BUFFERS + 12 * 2000 + 13_000, 12, {}, "1mh 11mn"),
    (12 * 2000, 1 << 20, 12, {"optimizer_tier": "nvme"}, "12mn"),
    (2000, 2000, 12, {"optimizer_tier": "device"}, "1dd 11hd"),
    (5 * 2000 + 100, 5 * 2000 + 100, 4, ONE, "4mh"),
    (4 * 2000 + 12_000, 1 << 20, 4, {**ONE, "device_budget": 4 * 2000 + 12_000}, "1dd 3mh"),
    # of the drive, what a budget of the host holds is not there
    (1 << 40, 1 << 40, 12, DRIVE, "12nn"),
    (1 << 40, 0, 12, {**DRIVE, "host_budget": BUFFERS + 3 * 2000 + 100}, "3hn 9nn"),
    (1 << 40, 0, 12, {**DRIVE, "host_budget": BUFFERS + 12 * 2000 + 13_000}, "1hh 11hn"),
    # parameters pass through no buffers; below stage 3 they are on the device, with copies on the host
    (1 << 40, 0, 12, {**DRIVE, "param_tier": "host", **HALF}, "1hh 11hn"),
    (1 << 40, 0, 12, {**DRIVE, "stage": 2, "param_tier": "device", **HALF}, "1mh 11mn"),
)


@pytest.mark.parametrize(("device", "host", "count", "options", "tiers"), FILLED)
def test_quick_whole_units_fill_the_device_then_the_host_also_what_a_budget_holds_of_it_then_the_drive(
    device: int, host: int, count: int, options: dict[str, Any], tiers: str
) -> None:
    """The first letters of each unit's tiers, and how many units have them."""
    room = {"device": device, "host": options.get("host_budget", host)}
    places = planned(sizes=[UNIT] * count, **{**AUTO, **options}).places(room)
    runs = itertools.groupby(param[0] + state[0] for param, state in places)
    assert " ".join(f"{len(list(run))}{name}" for name, run in runs) == tiers


def test_bytes_at_rest_and_in_use() -> None:
    where = planned(optimizer_tier="host")
    assert where.at_rest(where.places(ROOM)) == {
        ("device", "param"): 8000, ("host", "param_copy"): 8000, ("host", "grad"): 8000, ("host", "master"): 8000, ("host", "moments"): 32_000,
    }  # fmt: skip
    joined = planned(joined=True, optimizer_tier="host")
    assert joined.by_memory(joined.at_rest(joined.places(ROOM))) == {"host": 56_000}
    values = torch.zeros(10)
    assert placement.held_nbytes([values, values[:5]], joined=False) == {"host": 40}  # of a model that moves to a device
    full = planned(ranks=2, stage=3, prefetch=0, sizes=[UNIT] * 9).footprint([Place("device", "device")] * 9)
    assert full["device", "gathered"] == 4 * 2000 and full["device", "bucket"] == 3 * 2000 and full["device", "fresh"] == 2000
    drive = planned(stage=3, param_tier="nvme", optimizer_tier="nvme", nvme_path="/tmp")
    assert drive.footprint(drive.places(ROOM))["host", "buffer"] == drive.buffers == 4 * (4096 + 4096 + 12_288)
    frozen = UNIT._replace(is_trained=False, master=0, moments=0)
    assert planned(sizes=[frozen, UNIT], optimizer_tier="host").places(ROOM) == [Place("device", ""), Place("mirrored", "host")]
    one, two = (planned(ranks=ranks, stage=3, param_tier="host", optimizer_tier="host") for ranks in (1, 2))
    assert {where: n // 2 for where, n in one.at_rest(one.places(ROOM)).items()} == two.at_rest(two.places(ROOM))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device_budget": 55_999}, "needs 56000 bytes on the device tier, and device_budget is 55999 bytes; raise it, .*optimizer_tier='host'"),
        ({"optimizer_tier": "host", "host_budget": 55_999}, "needs 56000 bytes on the host tier, .* is 55999 bytes.*optimizer_tier='nvme'"),
        ({"optimizer_tier": "nvme", "nvme_path": "/tmp", "host_budget": 10_000}, "needs 73536 bytes on the host tier.*smaller units="),
        ({"optimizer_tier": "auto", "device_budget": 9000, "host_budget": 9000}, "on the host tier, and host_budget is 9000 bytes"),
    ],
)
def test_budgets_that_do_not_hold_the_state_are_refused(options: dict[str, Any], message: str) -> None:
    config = zk.ZeroConfig(**options)
    with pytest.raises(ValueError, match=message):
        planned(**options).places(placement.rooms(config, ROOM, joined=False))
    raised = {name: nbytes * 10 for name, nbytes in options.items() if "budget" in name}
    enough = {**options, **raised}
    planned(**enough).places(placement.rooms(zk.ZeroConfig(**enough), ROOM, joined=False))


# ---- the memory that is here ---------------------------------------------------------------------
def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def train(net: nn.Module, optimizer: Any, steps: int = 2) -> list[float]:
    draws = (torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed)) for seed in range(steps))
    return [descend(optimizer, net(x).float().square().mean()) for x in draws]


@contextlib.contextmanager
def free(**nbytes: int) -> Iterator[None]:
    """As if there were so much memory."""
    with mock.patch.object(placement, "free_memory", lambda device, paths: {"host": GIB, "nvme": GIB, **nbytes}):
        yield


def wrap(net: nn.Module, **options: Any) -> zk.ZeroOptimizer:
    return zk.ZeroOptimizer(net, torch.optim.AdamW(net.parameters()), units=[nn.Linear], **options)


def refused(net: nn.Module, adam: Any = None, **options: Any) -> str:
    with pytest.raises(MemoryError) as caught:
        zk.ZeroOptimizer(net, adam or torch.optim.AdamW(net.parameters()), units=[nn.Linear], **options)
    return str(caught.value)


SAID = r"this rank needs ([\d.]+) (bytes|MiB) on the host tier and has ([\d.]+) (bytes|MiB), "


def test_quick_a_refusal_says_what_is_needed_what_is_there_and_what_to_do(tmp_path: Path) -> None:
    with free(host=0):
        message = refused(model(), dtype="bf16", **HOST)
        assert re.search(SAID, message) and "nvme tier" not in message and "Nothing has been changed" in message
        assert "use optimizer_tier='nvme', stage=3 with param_tier='nvme'" in message
        optimizer = wrap(net := model(), dtype="bf16", nvme_path=tmp_path, **DRIVE)  # which fits
        train(net, optimizer)
        optimizer.close()
    with free(nvme=KIB):
        assert re.search("needs .* on the nvme tier and has 1024 bytes.* use a larger drive", refused(model(), nvme_path=tmp_path, **DRIVE))


def still_needed(net: nn.Module, adam: Any = None) -> float:
    """Bytes of host memory that a refusal says are too few where none is free."""
    with free(host=0, nvme=0):
        found: Any = re.search(SAID, refused(net, adam, dtype="bf16"))
    needed, there = (float(found[at]) * ((1 << 20) if found[at + 1] == "MiB" else 1) for at in (1, 3))
    return needed - there


def test_what_the_model_holds_counts_as_free() -> None:
    plain = still_needed(model())
    assert plain == pytest.approx((2 + 2 + 2 + 8 - 4) * NUMEL, rel=0.01)  # the fp32 weights are given back
    graded = model()
    graded(torch.ones(1, WIDTH)).sum().backward()
    assert still_needed(graded) == pytest.approx(plain - 4 * NUMEL, rel=0.01)
    train(net := model(), adam := torch.optim.AdamW(net.parameters()))
    assert still_needed(net, adam) == pytest.approx(plain - 8 * NUMEL, rel=0.03)


def on_ranks(what: str) -> str:
    """What each rank hears; the second has less memory than the first, or both have too little."""
    rank = dist.get_rank()
    host = {"one lacks": (GIB, KIB)[rank], "both": 2 * 9 * NUMEL, "enough": 2 * 11 * NUMEL}[what]
    net = model()
    try:
        with free(host=host):
            optimizer = wrap(net, dtype="bf16", stage=0)
    except MemoryError as error:
        assert all(param.dtype == torch.float32 for param in net.parameters())
        return str(error)
    train(net, optimizer)
    optimizer.close()
    return "trained"


def full_drive(stage: int) -> None:
    """An error of the last rank at its third unit; then all train as before, and with another optimizer."""
    net, twin, place, calls = model(), model(), UnitStore.place, itertools.count()
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)

    def failing(store: Any, values: Tensor) -> Tensor:
        if next(calls) == 3 and rank == world - 1:
            raise OSError("the drive is full")
        return place(store, values)

    adam = torch.optim.AdamW(net.parameters())
    with mock.patch.object(UnitStore, "place", failing), pytest.raises(OSError, match="the drive is full"):
        zk.ZeroOptimizer(net, adam, stage=stage, units=[nn.Linear])
    assert train(net, adam) == train(twin, torch.optim.AdamW(twin.parameters()))
    wrap(net).close()


@pytest.mark.parametrize("stage", (2, 3))
def test_an_error_half_way_gives_the_model_back(stage: int) -> None:
    full_drive(stage)


def test_ranks_refuse_together_and_have_the_first_ranks_buffers_in_their_dtype() -> None:
    jobs: list[Any] = [(on_ranks, what) for what in ("one lacks", "both", "enough")] + [(full_drive, 3), (buffers_of_the_first_rank, 2)]
    one, both, enough, full, buffers = run_world(2, call, jobs)
    assert "failed elsewhere: on rank 1, MemoryError: there is not enough memory for this model" in one[0]
    assert all(said.startswith("there is not enough memory for this model") for said in (one[1], *both))
    assert enough == ["trained", "trained"] and full == [None, None] and buffers == [[], []]


def buffers_of_the_first_rank(stage: int) -> list[str]:
    """Names of buffers that are not the first rank's, in its order and precision."""

    def made(number: int) -> nn.Module:
        torch.manual_seed(number)
        net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        repeated, turns = torch.full((3, 1), float(number)).expand(3, 4), torch.polar(torch.ones(3), torch.randn(3))
        net.slanted, net.repeated, net.turns = nn.Buffer(torch.randn(3, 4).T), nn.Buffer(repeated), nn.Buffer(turns)
        net.yes, net.empty = nn.Buffer(torch.tensor(number == 0)), nn.Buffer(torch.zeros(0))
        net.eighths = nn.Buffer(torch.randn(8).to(torch.float8_e5m2))
        return net

    def of(tensor: Tensor) -> Any:
        return tensor.dtype, tensor.stride() == (1, 4), tensor.contiguous().reshape(-1).view(torch.uint8).tolist()

    net, first = made(dist.get_rank()), made(0)
    with zk.ZeroOptimizer(net, torch.optim.AdamW(net.parameters()), stage=stage, dtype="bf16"):
        return [name for (name, mine), theirs in zip(net.named_buffers(), first.buffers(), strict=True) if of(mine) != of(theirs)]
