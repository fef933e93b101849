"""What cannot fit is refused before anything is moved, on all ranks, with a change that does fit; what can run never is."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import zk
from benchmarks.throttled import ThrottledLink, pretend
from tests.programs import run
from tests.world import run_world
from zk.core import memory
from zk.core.precision import stored_dtypes
from zk.offload.rules import rule_for
from zk.tools.cli import app
from zk.tools.plan import check
from zk.tools.plan.choose import footprint
from zk.tools.plan.footprint import footprint_of
from zk.tools.plan.shape import Shape, Units
from zk.tools.plan.speed import Machine

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
WIDTH, LAYERS = 64, 6
NUMEL = LAYERS * (WIDTH * WIDTH + WIDTH)


def model(layers: int = LAYERS) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))


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
    """As if there were so much memory."""

    def found(_device: torch.device, joined: bool, paths: Any) -> dict[str, int]:
        assert joined != apart
        there = {"device": GIB, "host": GIB, "nvme": GIB, **nbytes}
        return {name: there[name] for name in ("device", "host", "nvme") if (name != "device" or apart) and (name != "nvme" or paths)}

    with mock.patch.object(check, "free_memory", found), pretend(ThrottledLink(1e9)) if apart else contextlib.nullcontext():
        yield


def refused(net: nn.Module, **config: Any) -> str:
    with pytest.raises(MemoryError) as caught:
        zk.ZeroOptimizer(net, torch.optim.AdamW(net.parameters()), **config)
    return str(caught.value)


def suggested(message: str, label: str = r"The smallest change that (?:may )?fits?[^:]*") -> dict[str, Any]:
    found = re.search(rf"^{label}: (.*)$", message, re.MULTILINE)
    assert found is not None, message
    return dict(eval(f"dict({found[1]})"))


HOST = {"stage": 3, "param_tier": "host", "optimizer_tier": "host"}
# the device apart from the host; what is free; what is asked for; what is too little; what is proposed
LACKING = [
    (False, {"host": 128 * KIB}, {"stage": 2}, "host", {"optimizer_tier", "nvme_path"}),
    (True, {"device": 200 * KIB}, {"stage": 2}, "device", {"optimizer_tier"}),
    (True, {"device": 20 * KIB}, {"stage": 2}, "device", {"stage", "param_tier", "optimizer_tier"}),
    (True, {"device": 20 * KIB}, {"stage": 3, "optimizer_tier": "host"}, "device", {"param_tier"}),
    (True, {"host": 128 * KIB}, {"stage": 2, "optimizer_tier": "host"}, "host", {"optimizer_tier"}),
    (True, {"host": 128 * KIB, "device": 20 * KIB}, HOST, "host", {"optimizer_tier", "nvme_path"}),
    (False, {"nvme": 64 * KIB}, {"stage": 2, "optimizer_tier": "nvme"}, "drive", {"host_budget"}),
]


@pytest.mark.parametrize(("apart", "there", "config", "too_little", "changes"), LACKING)
def test_each_memory_that_lacks_is_named_and_what_is_proposed_fits(
    apart: bool, there: dict[str, int], config: dict[str, Any], too_little: str, changes: set[str], tmp_path: Path
) -> None:
    if "nvme" in config.values():
        config = {**config, "nvme_path": tmp_path}
    with free(apart, **there), contextlib.chdir(tmp_path):
        net = model()
        message = refused(net, dtype="bf16", **config)
        rows = [line for line in message.splitlines() if "too few" in line]
        assert [row.split()[0] for row in rows] == [too_little], message
        assert "Nothing has been changed" in message and "activations are not known" in message
        change = suggested(message)
        assert change
        if changes:
            assert set(change) == changes, message
        with zk.ZeroOptimizer(net, torch.optim.AdamW(net.parameters()), **{"dtype": "bf16", **config, **change}) as optimizer:
            train(net, optimizer)


def test_a_budget_that_is_more_than_there_is_is_made_smaller(tmp_path: Path) -> None:
    drive = {"stage": 3, "param_tier": "nvme", "optimizer_tier": "nvme", "nvme_path": tmp_path, "dtype": "bf16", "units": [nn.Linear]}  # of few bytes
    with free(host=800 * KIB):
        net = model(40)
        change = suggested(refused(net, **drive, host_budget="2MiB"))
        assert change.keys() == {"host_budget"}
        with zk.ZeroOptimizer(net, torch.optim.AdamW(net.parameters()), **{**drive, **change}) as optimizer:
            train(net, optimizer)
            assert optimizer.metrics()["host_moments_nbytes"] > 0  # it is used


def test_after_a_refusal_model_and_optimizer_are_as_they_were() -> None:
    net, twin = model(), model()
    adam, other = torch.optim.AdamW(net.parameters()), torch.optim.AdamW(twin.parameters())
    train(net, adam), train(twin, other)
    with free(host=KIB), pytest.raises(MemoryError):
        zk.ZeroOptimizer(net, adam, stage=3, optimizer_tier="host", dtype="bf16")
    assert train(net, adam) == train(twin, other)
    for mine, theirs in zip(net.parameters(), twin.parameters(), strict=True):
        assert mine.dtype == torch.float32 and torch.equal(mine, theirs)
        assert torch.equal(adam.state[mine]["exp_avg"], other.state[theirs]["exp_avg"])
    with zk.ZeroOptimizer(net, adam) as optimizer:  # and may be given away still
        train(net, optimizer)


def needed(net: nn.Module, **config: Any) -> dict[str, int]:
    """What the check finds for one process."""
    found: list[tuple[dict[str, int], dict[str, int]]] = []

    def look(need: dict[str, int], there: dict[str, int]) -> dict[str, int]:
        found.append((need, there))
        return {}

    with mock.patch.object(check, "lacking", look):
        zk.ZeroOptimizer(net, torch.optim.AdamW(net.parameters()), **config).close()
    return found[0][0]


def test_what_just_fits_is_not_refused_and_a_byte_less_is() -> None:
    for apart, name in ((False, "host"), (True, "device")):
        with free(apart):
            nbytes = needed(model(), dtype="bf16")[name]
        with free(apart, **{name: nbytes}):
            net = model()
            with zk.ZeroOptimizer(net, torch.optim.AdamW(net.parameters()), dtype="bf16") as optimizer:
                train(net, optimizer)
        with free(apart, **{name: nbytes - 1}):
            refused(model(), dtype="bf16")


def test_memory_of_the_model_counts_as_free_and_a_deferred_one_has_none() -> None:
    with free():
        plain = needed(model(), dtype="bf16")["host"]
        with zk.deferred_init():
            deferred = model()
        assert needed(deferred, dtype="bf16")["host"] == plain + 4 * NUMEL  # masters are split: the fp32 values are given back
        one = nn.Linear(1024, 1024, bias=False)
        # the only unit: its values in fp32 are there until its state is, and that is more than the gradient of a step
        assert needed(one, dtype="bf16")["host"] == (12 + 4 - 4) * one.weight.numel()
        # or they are, in fp32 and bf16, before the model's own are given back
        frozen = nn.Linear(1024, 1024)
        frozen.weight.requires_grad_(False)
        assert needed(frozen, dtype="bf16")["host"] == pytest.approx(6 * 1024 * 1024, rel=0.01)


def test_optimizer_state_that_is_taken_over_counts_as_free() -> None:
    net = model()
    adam = torch.optim.AdamW(net.parameters())
    with free():
        before = needed(net, stage=2)["host"]
    net = model()
    adam = torch.optim.AdamW(net.parameters())
    train(net, adam)
    seen = []
    original = check.Case.needed

    def look(self: check.Case, *args: Any, **kwargs: Any) -> dict[str, int]:
        seen.append(original(self, *args, **kwargs))
        return seen[-1]

    with free(), mock.patch.object(check.Case, "needed", look):
        zk.ZeroOptimizer(net, adam, stage=2).close()
    assert 0 < seen[0]["host"] < before


def test_gradients_are_given_back_with_their_unit_unless_they_have_its_precision() -> None:
    with free():
        plain = needed(model(), dtype="bf16")["host"]
        graded = model()
        graded(torch.ones(1, WIDTH)).sum().backward()
        assert needed(graded, dtype="bf16")["host"] == plain - 4 * NUMEL
        plain, graded = needed(model())["host"], model()
        graded(torch.ones(1, WIDTH)).sum().backward()
        assert needed(graded)["host"] == plain - 4 * NUMEL  # at the end of a step
        # the only unit: its state is made when its gradient, in fp32, has gone
        one = nn.Linear(1024, 1024, bias=False)
        one.weight.grad = torch.ones_like(one.weight)
        assert needed(one, dtype="bf16")["host"] == (12 + 4 - 4 - 4) * one.weight.numel()


@pytest.mark.parametrize(("cast_buffers", "nbytes_of_one"), ((False, 4), (True, 2)))
def test_buffers_that_are_deferred_are_yet_to_be_made(cast_buffers: bool, nbytes_of_one: int) -> None:
    class Buffered(nn.Module):
        def __init__(self, numel: int) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.register_buffer("table", torch.ones(numel))
            self.register_buffer("whole", torch.ones(numel, dtype=torch.int64))

    for apart, name in ((False, "host"), (True, "device")):
        nbytes = {}
        for numel in (0, 1 << 20):
            with free(apart), zk.deferred_init():
                net = Buffered(numel)
            with free(apart):
                nbytes[numel] = needed(net, dtype="bf16", cast_buffers=cast_buffers)[name]
        assert nbytes[1 << 20] - nbytes[0] == (nbytes_of_one + 8) << 20, name


def test_units_that_are_alike_are_counted_as_each_of_them_is(tmp_path: Path) -> None:
    """Also where some of them stay in memory and others do not."""
    shape = Shape("x", (Units((WIDTH * WIDTH, WIDTH), 8), Units((2 * WIDTH * WIDTH, 2 * WIDTH), 4)), WIDTH, 2 * WIDTH, 0)
    apart = [nn.Linear(WIDTH, WIDTH) for _ in range(8)] + [nn.Linear(WIDTH, 2 * WIDTH) for _ in range(4)]
    net = nn.Sequential(*apart)
    adam = torch.optim.AdamW(net.parameters())
    units = zk.core.units.find_units(net, dict.fromkeys(net.parameters(), 0), stored_dtypes(net, torch.bfloat16), [nn.Linear])
    drive = {"param_tier": "nvme", "optimizer_tier": "nvme", "nvme_path": tmp_path, "prefetch": 0}
    where = Machine(gpu_nbytes=None, ram_nbytes=GIB, nvme_nbytes=GIB, world=2, per_machine=2)
    for config in (
        zk.ZeroConfig(stage=3, dtype="bf16", param_tier="host", optimizer_tier="host"),
        zk.ZeroConfig(stage=3, dtype="bf16", **drive, host_budget="420KiB"),  # type: ignore[arg-type]
    ):
        found, each = footprint(shape, config, where), footprint_of(net, units, config, 2, True, [rule_for(adam)], adam.param_groups)
        assert found == each and len(units) == 12
        if config.nvme_path:
            assert len({str(rests) for rests in found.units}) > 2


def test_units_of_several_sizes_in_turn_are_placed_in_their_order(tmp_path: Path) -> None:
    net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH * (1 + index % 2)) for index in range(12)))
    adam, stored = torch.optim.AdamW(net.parameters()), stored_dtypes(net, torch.bfloat16)
    units = zk.core.units.find_units(net, dict.fromkeys(net.parameters(), 0), stored, [nn.Linear])
    case = check.Case(net, stored, units, adam.param_groups, [rule_for(adam)], [adam.state], torch.device("cpu"), True, 2, 1, 2)
    assert len({id(unit) for unit in case.kinds}) == 2
    drive = {"param_tier": "nvme", "optimizer_tier": "nvme", "nvme_path": tmp_path, "prefetch": 0}
    for budget in ("400KiB", "480KiB"):
        config = zk.ZeroConfig(stage=3, dtype="bf16", host_budget=budget, **drive)  # type: ignore[arg-type]
        alike, each = (footprint_of(net, listed, config, 2, True, [rule_for(adam)], adam.param_groups) for listed in (case.kinds, units))
        assert alike == each
        assert [found.numel for found in each.units[:4]] == [each.units[0].numel, each.units[1].numel] * 2
        assert len({str(found.nbytes) for found in each.units[::2]}) > 1  # some of one size here, some there


def test_what_nothing_helps_is_said_so() -> None:
    with free(host=2 * KIB, nvme=KIB):
        message = refused(model(), dtype="bf16")
    assert re.search(r"Nothing that zk can do on this machine fits: the nearest, .*needs at least .* where .* are free", message)
    assert "The smallest change" not in message


def test_more_ranks_and_smaller_moments_are_named_where_they_fit() -> None:
    with free(True, device=120 * KIB, host=KIB, nvme=KIB):
        assert suggested(refused(model(), dtype="bf16", stage=2), "What changes results, and fits") == {"state_dtype": "8bit"}
        assert 'with stage=1, dtype="bf16", state_dtype="8bit". Nothing' in refused(model(40), dtype="bf16", stage=1, state_dtype="8bit")
    with free(True, device=240 * KIB, host=KIB, nvme=KIB):
        message = refused(model(), dtype="bf16", stage=2)
    assert suggested(message, "What changes results, and fits") == {"state_dtype": "bf16"}
    ranks = re.search(r"More ranks: this fits from (\d+) ranks on, 1 to a machine", message)
    assert ranks is not None and int(ranks[1]) == 2
    with free(True, device=20 * KIB, host=KIB, nvme=KIB):
        message = refused(model(), dtype="bf16", stage=0)
    assert re.search(r"More ranks: stage=3.* fits from \d+ ranks on", message), message


def test_the_check_can_be_switched_off_for_what_it_cannot_know() -> None:
    """Here, parameters that never get a gradient."""

    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

        def forward(self, x: Tensor) -> Tensor:
            return self.blocks[0](x)

    with free(host=11 * NUMEL):
        assert "check_memory=False" in refused(Half(), stage=2)
        net = Half()
        with zk.ZeroOptimizer(net, torch.optim.AdamW(net.parameters()), stage=2, check_memory=False) as optimizer:
            train(net, optimizer)
            metrics = optimizer.metrics()
            held = sum(nbytes for name, nbytes in metrics.items() if name.endswith("_nbytes"))
            assert held - 4 * NUMEL < 11 * NUMEL  # and it did fit
    with pytest.raises(TypeError, match="check_memory must be True or False; got 'yes'"):
        zk.ZeroConfig(check_memory="yes")  # type: ignore[arg-type]


def test_a_container_s_limit_is_what_is_free(tmp_path: Path) -> None:
    (tmp_path / "own").write_text("0::/job\n")
    job = tmp_path / "cgroup" / "job"
    job.mkdir(parents=True)
    (job / "memory.max").write_text(str(GIB))
    (job / "memory.stat").write_text(f"inactive_file {10 * KIB}\nactive_file {20 * KIB}\n")
    (job / "memory.swap.max").write_text("0")
    (job / "memory.swap.current").write_text("0")
    with mock.patch.object(memory, "_CGROUPS", tmp_path / "cgroup"), mock.patch.object(memory, "_OWN_CGROUPS", tmp_path / "own"):
        (job / "memory.current").write_text(str(GIB - 100 * KIB))
        message = refused(model(), stage=2)
        assert re.search(r"^host +\d.* 133120 bytes +", message, re.MULTILINE), message  # 100 + 10 + 20 KiB
        (job / "memory.current").write_text(str(GIB // 2))
        net = model()
        with zk.ZeroOptimizer(net, torch.optim.AdamW(net.parameters()), stage=2) as optimizer:
            train(net, optimizer)


def test_zk_train_says_it_without_a_traceback(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("some words to learn " * 500)
    tiny = ["--steps", "1", "--layers", "1", "--width", "8", "--heads", "2", "--context", "8", "--batch", "1", "--sample", "0"]
    with free(host=KIB):
        done = CliRunner().invoke(app, ["train", "--data", str(text), "--out", str(tmp_path / "out"), *tiny])
    assert done.exit_code == 2 and "zk train: there is not enough memory for this model with stage=3" in done.output, done.output


def test_room_on_drives_is_counted_once_for_each_file_system(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
    both = [str(tmp_path / name) for name in "ab"]
    room = {"f_bavail": 10, "f_bfree": 10, "f_frsize": MIB}
    with mock.patch.object(os, "statvfs", lambda _: mock.Mock(**room)):
        assert check.free_memory(torch.device("cpu"), True, both[:1])["nvme"] == 10 * MIB
        assert check.free_memory(torch.device("cpu"), True, both)["nvme"] == 10 * MIB  # two stripes on one drive
    assert check.free_memory(torch.device("cpu"), True, [str(tmp_path / "not there")]).keys() == {"host"}
    with mock.patch.object(psutil, "swap_memory", lambda: mock.Mock(free=GIB)), mock.patch.object(check, "host_memory", lambda: (0, 5)):
        assert check.free_memory(torch.device("cpu"), True, []) == {"host": GIB + 5}


def test_what_is_needed_at_least_is_never_more_than_all_that_is_taken(tmp_path: Path) -> None:
    tiers = [("device", "device"), ("device", "host"), ("device", "nvme"), ("host", "host"), ("host", "nvme"), ("nvme", "host"), ("nvme", "nvme")]
    seen = 0
    for joined in (True, False):
        for world in (1, 2, 3):
            net = model()
            units = zk.core.units.find_units(net, dict.fromkeys(net.parameters(), 0), stored_dtypes(net, torch.bfloat16))
            adam = torch.optim.AdamW(net.parameters())
            for stage in range(4):
                for param_tier, optimizer_tier in tiers if stage == 3 else tiers[:3]:
                    drive = {"nvme_path": tmp_path} if "nvme" in (param_tier, optimizer_tier) else {}
                    config = zk.ZeroConfig(stage=stage, param_tier=param_tier, optimizer_tier=optimizer_tier, dtype="bf16", **drive)  # type: ignore[arg-type]
                    rules = [rule_for(adam)]
                    most = footprint_of(net, units, config, world, joined, rules, adam.param_groups)
                    least = footprint_of(net, units, config, world, joined, rules, adam.param_groups, at_least=True)
                    for name in ("device", "host", "nvme"):
                        assert least.on(name) <= most.on(name), (joined, world, config)
                    assert least.on("nvme") == most.on("nvme")
                    seen += 1
    assert seen == 6 * 16


# ---- several ranks ---------------------------------------------------------------------------------------------------------------------


def on_ranks(what: str) -> str:
    """What each rank hears; the second has less memory than the first, or both share too little."""
    rank = torch.distributed.get_rank()
    alone = 14 * NUMEL
    host = {"one lacks": GIB if rank == 0 else KIB, "shared": alone, "enough": 2 * alone, "after": GIB}[what]
    net = model()
    try:
        with free(host=host), zk.ZeroOptimizer(net, torch.optim.AdamW(net.parameters()), dtype="bf16", stage=0) as optimizer:
            train(net, optimizer)
    except MemoryError as error:
        assert all(param.dtype == torch.float32 for param in net.parameters())
        return str(error)
    return "trained"


def test_ranks_refuse_together_and_share_the_memory_of_a_machine() -> None:
    cases = ["one lacks", "shared", "enough", "after"]
    one, shared, enough, after = run_world(2, on_ranks, cases)
    assert one[0] == one[1] and "not enough memory on rank 1 of 2 for this model" in one[0] and "for the 2 ranks of a machine" in one[0]
    assert shared[0] == shared[1] and "not enough memory on ranks 0, 1 of 2" in shared[0]
    assert enough == after == ["trained", "trained"]


# ---- against a real run ----------------------------------------------------------------------------------------------------------------

REAL = """
import gc, sys, torch, zk
from torch import nn
from unittest import mock
from zk.core import memory
from zk.tools.cli import app
from zk.tools.plan import check

def run(width, layers, graded=False, **config):
    net = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    torch.set_num_threads(1)
    if graded:
        net(torch.randn(1, width)).sum().backward()
    adam = torch.optim.AdamW(net.parameters())
    found = []
    with mock.patch.object(check, "lacking", lambda need, free: found.append(need) or {}):
        gc.collect(), memory.trim()  # what the run before has left is not this one's
        open("/proc/self/clear_refs", "w").write("5")  # the peak is that from here on
        before = memory.peak_nbytes()
        optimizer = zk.ZeroOptimizer(net, adam, dtype="bf16", **config)
    for _ in range(2):
        net(torch.randn(1, width).bfloat16()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    grown = memory.peak_nbytes() - before
    optimizer.close()
    return found[0]["host"], grown

run(64, 2)  # what is loaded with the first step
for config in ({"stage": 2}, {"stage": 2, "graded": True}, {"stage": 3, "param_tier": "nvme", "optimizer_tier": "nvme", "nvme_path": sys.argv[1]}):
    print(*run(1024, 24, **config))
"""


def test_what_is_needed_at_least_is_no_more_than_a_real_run_takes(tmp_path: Path) -> None:
    def counted() -> list[tuple[int, ...]]:
        return [tuple(map(int, line.split())) for line in run("-c", REAL, str(tmp_path), check=True).stdout.splitlines()]

    def is_right(found: list[tuple[int, ...]]) -> bool:
        (least, took), (least_graded, took_graded), (least_drive, took_drive) = found
        return (
            0.85 * took < least <= took + 2 * MIB  # near, and not above; without kernels for bf16, torch's products take some more
            and 0.8 * took_graded < least_graded <= took_graded + 8 * MIB < took  # gradients of the old precision go unit by unit
            and least_drive <= took_drive + 2 * MIB
        )

    found = counted()
    if not is_right(found):
        found = list(map(min, found, counted()))  # one run of many had a higher peak: the lower of two counts
    assert is_right(found), found
