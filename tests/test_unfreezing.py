"""Parameters that are frozen, or not there, when the optimizer is made, and trained later: adapters, and layers one after the other.

That this changes no bit of training, for all stages, tiers and precisions, is in test_parity.py (the model "unfreezing").
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from typer.testing import CliRunner

import zk
from tests.world import run_world
from zk.checkpoint import base
from zk.checkpoint.files import CheckpointError
from zk.offload.tiers import NVMeTier
from zk.tools.cli import app

pytestmark = pytest.mark.usefixtures("torch_engine")

SETTINGS: dict[str, dict[str, Any]] = {
    "2-device": {"stage": 2, "optimizer_tier": "device"},
    "2-beside": {"stage": 2, "overlap_step": True},
    "3-host": {"stage": 3, "param_tier": "host"},
    "3-nvme": {"stage": 3, "param_tier": "nvme", "optimizer_tier": "nvme"},
}
WIDTH = 8


class Adapted(nn.Module):
    """A frozen layer, and adapters of which one is in use."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH)
        self.adapters = nn.ModuleDict()
        self.active: list[str] = []

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x)) + sum(self.adapters[name](x) for name in self.active)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Adapted() for _ in range(3))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]

    def add_adapter(self, name: str, seed: int) -> list[nn.Parameter]:
        torch.manual_seed(seed)
        new: list[nn.Parameter] = []
        for block in self.blocks:
            assert isinstance(block, Adapted)
            block.adapters[name] = nn.Sequential(nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False))
            new += block.adapters[name].parameters()
        return new

    def set_adapter(self, name: str) -> None:
        for block in self.blocks:
            assert isinstance(block, Adapted)
            block.active = [name]
            for other, adapter in block.adapters.items():
                adapter.requires_grad_(other == name)


Schedule = Callable[[Net, torch.optim.Optimizer], list[float]]  # trains, and gives the losses


def make() -> Net:
    torch.manual_seed(0)
    net = Net()
    for block in net.blocks:
        block.base.requires_grad_(False)
    net.add_adapter("first", 1)
    net.add_adapter("second", 2)
    net.set_adapter("first")
    return net


def adamw(net: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(net.parameters(), lr=1e-2)


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: int, start: int = 0) -> list[float]:
    losses = []
    for step in range(start, start + steps):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def adapters_in_turn(net: Net, optimizer: torch.optim.Optimizer) -> list[float]:
    """A second adapter, then a new one, then the first one again, and at last a layer below."""
    losses = train(net, optimizer, 2)
    net.set_adapter("second")
    losses += train(net, optimizer, 2, 2)
    new = net.add_adapter("third", 3)
    net.set_adapter("third")
    optimizer.add_param_group({"params": new, "lr": 3e-3})
    losses += train(net, optimizer, 2, 4)
    net.set_adapter("first")
    losses += train(net, optimizer, 2, 6)
    net.blocks[1].base.requires_grad_(True)
    return losses + train(net, optimizer, 2, 8)


def in_plain_torch(schedule: Schedule) -> tuple[list[float], dict[str, Tensor], dict[str, Any]]:
    net = make()
    optimizer = adamw(net)
    return schedule(net, optimizer), net.state_dict(), optimizer.state_dict()


def wrapped(net: Net, setting: str, folder: Path) -> zk.ZeroOptimizer:
    options = {**SETTINGS[setting], "nvme_path": folder} if "nvme" in setting else SETTINGS[setting]
    return zk.ZeroOptimizer(net, adamw(net), **options)


def values(net: Net) -> dict[str, Tensor]:
    with zk.gather(net.parameters()):
        return {name: param.detach().clone() for name, param in net.named_parameters()}


def differences(net: Net, optimizer: zk.ZeroOptimizer, want: dict[str, Tensor], state: dict[str, Any]) -> list[str]:
    found = [f"parameter {name}" for name, value in values(net).items() if not torch.equal(value, want[name])]
    if optimizer.config.stage < 3 or optimizer.comm.world == 1:
        got = optimizer.state_dict()["state"]
        found += [f"state of {key}" for key in {*got, *state["state"]} if key not in got or key not in state["state"]]
        for key in got.keys() & state["state"].keys():
            found += [f"{name} of {key}" for name, value in state["state"][key].items() if not torch.equal(got[key][name], value)]
    return found


def run_schedule(case: tuple[Schedule, str, Path]) -> list[str]:
    """What differs from plain torch."""
    schedule, setting, folder = case
    losses, want, state = in_plain_torch(schedule)
    net = make()
    optimizer = wrapped(net, setting, folder)
    got = schedule(net, optimizer)
    optimizer.synchronize()
    found = [] if got == losses else [f"losses {got} instead of {losses}"]
    found += differences(net, optimizer, want, state)
    optimizer.close()
    return found


@pytest.mark.parametrize("setting", SETTINGS)
def test_adapters_that_come_and_go_train_as_in_plain_torch(setting: str, tmp_path: Path) -> None:
    assert run_schedule((adapters_in_turn, setting, tmp_path)) == []


def test_adapters_that_come_and_go_over_ranks(tmp_path: Path) -> None:
    # (the mean of two equal gradients is that gradient)
    cases = [(adapters_in_turn, "3-nvme", tmp_path), (unfrozen_in_parts, "2-beside", tmp_path)]
    assert run_world(2, run_schedule, cases) == [[[], []]] * len(cases)


def in_parts(net: Net, optimizer: torch.optim.Optimizer, steps: int, start: int) -> list[float]:
    """Training that never calls the model itself."""
    losses = []
    for step in range(start, start + steps):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
        for block in net.blocks:
            x = block(x)
        loss = net.head(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def unfrozen_in_parts(net: Net, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = in_parts(net, optimizer, 2, 0)
    net.blocks[0].base.requires_grad_(True)
    losses += in_parts(net, optimizer, 2, 2)
    net.set_adapter("second")
    return losses + in_parts(net, optimizer, 3, 4)


def test_what_is_unfrozen_is_found_at_the_step_where_the_model_is_called_in_parts(tmp_path: Path) -> None:
    assert [run_schedule((unfrozen_in_parts, setting, tmp_path)) for setting in ("2-beside", "3-nvme")] == [[], []]


def test_an_evaluation_unfreezes_nothing_and_training_after_it_does(tmp_path: Path) -> None:
    for setting in ("2-device", "3-nvme"):
        net = make()
        with wrapped(net, setting, tmp_path) as optimizer:
            train(net, optimizer, 1)
            net.blocks[0].base.requires_grad_(True)
            units = len(optimizer.held)
            with torch.inference_mode():
                net(torch.ones(1, WIDTH))
            assert len(optimizer.held) == units
            losses = train(net, optimizer, 3, 1)
        plain, other = plain_pair()
        train(plain, other, 1)
        plain.blocks[0].base.requires_grad_(True)
        assert train(plain, other, 3, 1) == losses


def test_what_is_frozen_has_no_state_until_it_is_trained(tmp_path: Path) -> None:
    net = make()
    with wrapped(net, "2-device", tmp_path) as optimizer:
        train(net, optimizer, 1)
        trained = sum(param.numel() for param in net.parameters() if param.requires_grad)
        kept = sum(store.layout.numel for store in optimizer.held if store.shard is not None)
        assert trained <= kept < trained + 40 * 32  # each parameter begins on 32 elements
        before = optimizer.metrics()["device_moments_nbytes"]
        assert before == 8 * kept  # two moments in fp32
        net.blocks[0].base.requires_grad_(True)
        train(net, optimizer, 1)
        assert optimizer.metrics()["device_moments_nbytes"] == before + 8 * (64 + 32)
        net.blocks[0].base.requires_grad_(False)  # its state stays for when it is trained again, as in torch
        train(net, optimizer, 1)
        assert optimizer.metrics()["device_moments_nbytes"] == before + 8 * (64 + 32)


@pytest.mark.parametrize("setting", ("2-device", "3-nvme"))
@pytest.mark.parametrize("by", ("load_checkpoint", "load_state_dict"))
def test_training_goes_on_where_the_new_process_has_not_unfrozen_yet(setting: str, by: str, tmp_path: Path) -> None:
    """A loop that unfreezes a layer at some step, and is resumed after that: the layer's state is there, whether it is unfrozen before or after."""

    def schedule(net: Net, optimizer: torch.optim.Optimizer) -> list[float]:
        train(net, optimizer, 2)
        net.blocks[0].base.requires_grad_(True)
        return train(net, optimizer, 4, 2)

    losses, want, state = in_plain_torch(schedule)
    net = make()
    optimizer = wrapped(net, setting, tmp_path)
    train(net, optimizer, 2)
    net.blocks[0].base.requires_grad_(True)
    train(net, optimizer, 2, 2)
    if by == "load_checkpoint":
        optimizer.save_checkpoint(tmp_path / "saved")
    weights, kept = values(net), copy.deepcopy(optimizer.state_dict())
    optimizer.close()

    again = make()
    optimizer = wrapped(again, setting, tmp_path)
    if by == "load_checkpoint":
        optimizer.load_checkpoint(tmp_path / "saved")
    else:
        again.load_state_dict(weights)
        optimizer.load_state_dict(kept)
    again.blocks[0].base.requires_grad_(True)
    assert train(again, optimizer, 2, 4) == losses[2:]
    assert differences(again, optimizer, want, state) == []
    optimizer.close()


def trains_as_plain_torch(schedule: Schedule, folder: Path) -> None:
    """In every setting: losses, parameters and state are those of plain torch."""
    losses, want, state = in_plain_torch(schedule)
    for setting in SETTINGS:
        net = make()
        optimizer = wrapped(net, setting, folder)
        assert schedule(net, optimizer) == losses
        optimizer.synchronize()
        assert differences(net, optimizer, want, state) == []
        optimizer.close()


def test_a_group_that_comes_between_backward_and_step_changes_no_gradient(tmp_path: Path) -> None:
    def schedule(net: Net, optimizer: torch.optim.Optimizer) -> list[float]:
        train(net, optimizer, 1)
        net(torch.ones(1, WIDTH)).sum().backward()
        new = net.add_adapter("third", 3)
        optimizer.add_param_group({"params": new})
        optimizer.step()
        optimizer.zero_grad()
        net.set_adapter("third")
        return train(net, optimizer, 2, 1)

    trains_as_plain_torch(schedule, tmp_path)


def test_a_group_is_added_to_groups_that_were_assigned(tmp_path: Path) -> None:
    """As Lightning does for a run that is resumed."""

    def schedule(net: Net, optimizer: torch.optim.Optimizer) -> list[float]:
        losses = train(net, optimizer, 1)
        optimizer.param_groups = [{**group, "lr": 3e-3} for group in optimizer.param_groups]
        losses += train(net, optimizer, 1, 1)
        optimizer.add_param_group({"params": net.add_adapter("third", 3)})
        net.set_adapter("third")
        return losses + train(net, optimizer, 2, 2)

    trains_as_plain_torch(schedule, tmp_path)


def test_a_drive_without_room_for_what_is_unfrozen_leaves_all_as_it_was(tmp_path: Path) -> None:
    losses, *_ = in_plain_torch(lambda net, optimizer: train(net, optimizer, 4))
    net = make()
    optimizer = wrapped(net, "3-nvme", tmp_path)
    got = train(net, optimizer, 2)
    nvme = optimizer.tiers["nvme"]
    assert isinstance(nvme, NVMeTier)
    with mock.patch.object(nvme.spill, "open_file", side_effect=OSError(28, "no space left on device")):
        net.blocks[0].base.requires_grad_(True)
        with pytest.raises(OSError, match="no space left"):
            train(net, optimizer, 1, 2)
    net.blocks[0].base.requires_grad_(False)
    got += train(net, optimizer, 1, 2)
    assert got == losses[:3]
    used = nvme.spill.nbytes
    net.blocks[0].base.requires_grad_(True)  # there is room again
    train(net, optimizer, 1, 3)
    assert used < nvme.spill.nbytes <= used + 20 * 4096
    optimizer.close()


def test_an_adapter_of_another_precision_is_cast_like_the_model() -> None:
    net = make()
    with zk.ZeroOptimizer(net, adamw(net), dtype="bf16") as optimizer:
        train(net, optimizer, 1)
        new = net.add_adapter("third", 3)
        net.set_adapter("third")
        optimizer.add_param_group({"params": new})
        assert {param.dtype for param in new} == {torch.bfloat16}
        train(net, optimizer, 2)
        state = optimizer.state_dict()["state"]
        assert all(state[key]["master"].dtype == torch.float32 for key in list(state)[-1:])


def test_what_is_not_the_models_is_refused_by_name(tmp_path: Path) -> None:
    net = make()
    with wrapped(net, "3-host", tmp_path) as optimizer:
        train(net, optimizer, 1)
        with pytest.raises(ValueError, match=r"is not one of model.parameters\(\)"):
            optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
        assert len(optimizer.param_groups) == 1
        assert train(net, optimizer, 1, 1) == train(*plain_pair(), 2)[1:]


def plain_pair() -> tuple[Net, torch.optim.Optimizer]:
    net = make()
    return net, adamw(net)


# ---- checkpoints -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("was_unfrozen", (False, True))
def test_a_checkpoint_from_before_a_layer_was_unfrozen_or_after_it_was_frozen_again_is_loaded(was_unfrozen: bool, tmp_path: Path) -> None:
    """Values come along in any case; state where both have it."""
    net = make()
    net.blocks[0].base.requires_grad_(was_unfrozen)
    with wrapped(net, "2-device", tmp_path) as optimizer:
        train(net, optimizer, 2)
        optimizer.save_checkpoint(tmp_path / "saved")
        saved = values(net)
    again = make()
    again.blocks[0].base.requires_grad_(not was_unfrozen)
    groups = [param for name, param in again.named_parameters() if not name.startswith("blocks.0.base") or not was_unfrozen]
    if was_unfrozen:  # frozen for good: the group has it no more
        with zk.ZeroOptimizer(again, torch.optim.AdamW(groups, lr=1e-2), stage=3, param_tier="host") as optimizer:
            optimizer.load_checkpoint(tmp_path / "saved")
            assert {name for name, value in values(again).items() if not torch.equal(value, saved[name])} == set()
        return
    plain = make()
    plain.load_state_dict(saved)
    with wrapped(again, "3-host", tmp_path) as optimizer:
        optimizer.load_checkpoint(tmp_path / "saved")
        assert {name for name, value in values(again).items() if not torch.equal(value, saved[name])} == set()
        state = optimizer.state_dict()["state"]
        names = [name for name, _ in again.named_parameters()]
        assert not any(names[key].startswith("blocks.0.base") for key in state)
        assert {entry["step"].item() for entry in state.values()} == {2.0}


class Wide(nn.Module):
    """A base that is much larger than what is trained over it."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.blocks = nn.ModuleList(nn.Linear(256, 256) for _ in range(3))
        self.adapters = nn.ModuleList(nn.Linear(256, 32) for _ in range(3))
        self.blocks.requires_grad_(False)
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        for block, adapter in zip(self.blocks, self.adapters, strict=True):
            x = torch.tanh(block(x)) + adapter(x).repeat(1, 8)
        return x * self.scale  # type: ignore[no-any-return]


def step_of_wide(net: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> float:
    loss = net(torch.randn(2, 256, generator=torch.Generator().manual_seed(seed))).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def wide(setting: str, folder: Path, seed: int = 0) -> tuple[Wide, zk.ZeroOptimizer]:
    net = Wide(seed)
    options = {**SETTINGS[setting], "nvme_path": folder} if "nvme" in setting else SETTINGS[setting]
    return net, zk.ZeroOptimizer(net, torch.optim.AdamW(net.adapters.parameters(), lr=1e-2), **options)


def save_wide(case: tuple[str, Path]) -> list[float]:
    """Two steps, a checkpoint without what is frozen, and the losses after it."""
    setting, folder = case
    net, optimizer = wide(setting, folder)
    for seed in range(2):
        step_of_wide(net, optimizer, seed)
    optimizer.save_checkpoint(folder / setting, frozen=False, async_save="beside" in setting)
    losses = [step_of_wide(net, optimizer, seed) for seed in range(2, 4)]
    optimizer.close()
    return losses


def load_wide(case: tuple[str, str, Path]) -> list[float]:
    saved, setting, folder = case
    net, optimizer = wide(setting, folder)
    optimizer.load_checkpoint(folder / saved)
    losses = [step_of_wide(net, optimizer, seed) for seed in range(2, 4)]
    optimizer.close()
    return losses


@pytest.mark.parametrize("world", (1, 2))
def test_a_checkpoint_without_what_is_frozen_is_small_and_goes_on_over_the_same_base(world: int, tmp_path: Path) -> None:
    settings = ("2-beside", "3-host", "3-nvme")
    losses = run_world(world, save_wide, [(setting, tmp_path) for setting in settings])
    assert losses == [losses[0]] * len(settings)
    trained = sum(param.numel() for param in Wide().adapters.parameters())
    for setting in settings:
        nbytes = sum(file.stat().st_size for file in (tmp_path / setting).rglob("*") if file.is_file())
        assert 12 * trained <= nbytes <= 1.2 * 12 * trained  # master and two moments in fp32; the base has eight times as many elements
    cases = list(zip(settings, reversed(settings), [tmp_path] * len(settings), strict=True))
    assert run_world(3 - world, load_wide, cases) == [[losses[0][0]] * (3 - world)] * len(cases)


def test_another_base_is_refused_by_name_and_nothing_is_changed(tmp_path: Path) -> None:
    save_wide(("3-host", tmp_path))
    for setting in ("2-device", "3-host"):
        net, optimizer = wide(setting, tmp_path)
        weight = net.blocks[1].weight
        with zk.gather([weight], write=True), torch.no_grad():
            weight[3, 5] += 1
        step_of_wide(net, optimizer, 9)
        before = optimizer.consolidated_state_dict()
        with pytest.raises(CheckpointError, match=r"over another base: 1 of 6 parameters, 'blocks.1.weight' first, had other values"):
            optimizer.load_checkpoint(tmp_path / "3-host")
        assert all(torch.equal(value, before[name]) for name, value in optimizer.consolidated_state_dict().items())
        assert optimizer.counters["steps"] == 1
        optimizer.close()
    half = Wide().bfloat16()
    optimizer = zk.ZeroOptimizer(half, torch.optim.AdamW(half.adapters.parameters()))
    with optimizer, pytest.raises(CheckpointError, match="or another precision"):
        optimizer.load_checkpoint(tmp_path / "3-host")


def test_what_is_trained_now_cannot_come_from_a_checkpoint_without_it(tmp_path: Path) -> None:
    save_wide(("2-device", tmp_path))
    net = Wide()
    net.blocks[0].requires_grad_(True)
    optimizer = zk.ZeroOptimizer(net, torch.optim.AdamW(net.parameters()))
    with optimizer, pytest.raises(CheckpointError, match=r"'blocks.0.weight' was frozen and is left out .* here it is trained: freeze it"):
        optimizer.load_checkpoint(tmp_path / "2-device")


@pytest.mark.parametrize("setting", ("2-device", "3-host"))
def test_digests_follow_what_is_written(setting: str, tmp_path: Path) -> None:
    net, optimizer = wide(setting, tmp_path)
    first = base.digests(optimizer)
    with mock.patch.object(base, "digest_of") as computed:
        assert base.digests(optimizer) == first and not computed.called  # nothing was written since
    weight = net.blocks[1].weight
    with zk.gather([weight], write=True), torch.no_grad():
        weight.mul_(2)
    second = base.digests(optimizer)
    assert {name for name in first if first[name] != second[name]} == {"blocks.1.weight"}
    net.load_state_dict(Wide(seed=1).state_dict())
    assert {name for name, value in base.digests(optimizer).items() if value in (first[name], second[name])} == set()
    net.load_state_dict(Wide().state_dict())
    assert base.digests(optimizer) == first
    optimizer.close()


@pytest.mark.parametrize("setting", ("2-device", "3-host", "3-nvme"))
def test_a_base_that_was_compared_is_not_read_again(setting: str, tmp_path: Path) -> None:
    save_wide((setting, tmp_path))
    _, optimizer = wide(setting, tmp_path)
    optimizer.load_checkpoint(tmp_path / setting)
    with mock.patch.object(base, "digest_of") as computed:
        optimizer.save_checkpoint(tmp_path / setting, frozen=False)
        assert not computed.called
    optimizer.close()


def test_an_export_says_what_was_left_out(tmp_path: Path) -> None:
    save_wide(("3-host", tmp_path))
    done = CliRunner().invoke(app, ["export", str(tmp_path / "3-host"), str(tmp_path / "out")])
    assert done.exit_code == 0 and "6 frozen parameters are not in the checkpoint" in done.output
    there = load_file(tmp_path / "out" / "model.safetensors")
    assert sorted(there) == sorted([f"adapters.{i}.{name}" for i in range(3) for name in ("weight", "bias")] + ["scale"])


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("by", ("ZeroOptimizer", "the user's optimizer"))
def test_a_group_comes_to_a_model_with_a_transposed_parameter(by: str, setting: str, tmp_path: Path) -> None:
    def turned() -> Net:
        net = make()
        net.head.weight = nn.Parameter(net.head.weight.detach().t().contiguous().t())
        return net

    def schedule(net: Net, optimizer: torch.optim.Optimizer, users: torch.optim.Optimizer) -> list[float]:
        losses = train(net, optimizer, 2)
        new = net.add_adapter("third", 3)
        net.set_adapter("third")
        (optimizer if by == "ZeroOptimizer" else users).add_param_group({"params": new, "lr": 3e-3})
        return losses + train(net, optimizer, 3, 2)

    plain = turned()
    beside = adamw(plain)
    want = schedule(plain, beside, beside)
    net = turned()
    optimizer = wrapped(net, setting, tmp_path)
    assert schedule(net, optimizer, optimizer.inners[0]) == want
    optimizer.close()


def test_a_frozen_layer_that_the_users_optimizer_gets_is_trained() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).requires_grad_(False)
    inner = torch.optim.SGD(model[1].requires_grad_(True).parameters(), lr=0.1)
    optimizer = zk.ZeroOptimizer(model, inner, stage=2)
    before = model[0].weight.detach().clone()
    inner.add_param_group({"params": model[0].requires_grad_(True).parameters()})
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    assert len(optimizer.param_groups) == 2 and not torch.equal(model[0].weight, before)


def test_one_of_several_optimizers_gets_no_group() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    inners = [torch.optim.SGD(model[index].parameters(), lr=0.1) for index in range(2)]
    optimizer = zk.ZeroOptimizer(model, inners, stage=2)
    with pytest.raises(ValueError, match="no group can be added to a list of optimizers"):
        inners[1].add_param_group({"params": model[2].parameters()})
    assert len(inners[1].param_groups) == 1
    optimizer.close()
