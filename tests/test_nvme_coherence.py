"""Values that change from outside, passes that leave the known path, and steps that end half-way: the drive's copies never go stale."""

from __future__ import annotations

import contextlib
import copy
import random

import pytest
import torch
from torch import Tensor, nn

import zk
from zk.offload import rules


def held(model: nn.Module, tier: str, folder: object, **options: object) -> zk.ZeroOptimizer:
    place = {"param_tier": tier, "optimizer_tier": tier, **({"nvme_path": folder} if tier == "nvme" else {})}
    return zk.ZeroOptimizer(model, torch.optim.AdamW(model.parameters(), lr=0.1), **{"stage": 3, "dtype": "bf16", **place, **options})


def halve(model: nn.Module) -> None:
    with zk.gather(model.parameters(), write=True), torch.no_grad():
        for param in model.parameters():
            param.mul_(0.5)


@pytest.mark.parametrize("when", ("before the step", "after the step"))
def test_parameters_written_inside_gather_count_at_once_on_every_tier(when, tmp_path):
    found = {}
    for tier in ("host", "nvme"):
        torch.manual_seed(0)
        model = nn.Linear(64, 64)
        with held(model, tier, tmp_path) as optimizer:
            losses = []
            for _ in range(4):
                loss = model(torch.ones(4, 64)).float().square().mean()
                loss.backward()
                if when == "before the step":
                    halve(model)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
                if when == "after the step":
                    halve(model)
            found[tier] = losses
    assert found["host"] == found["nvme"]


class Blocks(nn.Module):
    def __init__(self, count: int = 6, width: int = 16) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(count))
        self.head = nn.Linear(width, 3)
        self.skip: set[int] = set()

    def forward(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            if index not in self.skip:
                x = x + torch.tanh(block(x))
        return self.head(x)


def one_step(model: nn.Module, optimizer: zk.ZeroOptimizer, seed: int) -> float:
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(seed))
    loss = model(x).float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


@pytest.mark.parametrize("seed", range(4))
def test_any_order_of_what_a_user_may_do_gives_the_same_bits_on_the_drive(seed, tmp_path):
    """Steps, reads, writes, loads, validation passes without no_grad, single blocks, skipped blocks: a random walk."""

    def walk(tier: str) -> list[float]:
        choices = random.Random(seed)
        torch.manual_seed(0)
        model = Blocks()
        out = []
        with held(model, tier, tmp_path, prefetch=choices.choice((0, 1, 2))) as optimizer:
            saved, plain = None, copy.deepcopy(Blocks().state_dict())
            for number in range(25):
                what = choices.choice(("step", "step", "step", "halve", "save", "load", "look", "validate", "block", "model", "skip"))
                if what == "step":
                    out.append(one_step(model, optimizer, number))
                elif what == "halve":
                    halve(model)
                elif what == "save":
                    saved = copy.deepcopy(optimizer.state_dict())
                elif what == "load" and saved is not None:
                    optimizer.load_state_dict(saved)
                elif what == "look":
                    out.append(sum(value.double().sum().item() for value in model.state_dict().values()))
                elif what == "validate":
                    out.append(model(torch.ones(2, 16)).float().sum().item())
                elif what == "block":
                    with torch.no_grad():
                        out.append(model.blocks[choices.randrange(6)](torch.ones(2, 16).bfloat16()).float().sum().item())
                elif what == "model":
                    model.load_state_dict(plain)
                elif what == "skip":
                    model.skip = set(choices.sample(range(6), choices.randrange(5)))
        return out

    assert walk("host") == walk("nvme")


@pytest.mark.parametrize("prefetch", (1, 5))
def test_a_pass_that_leaves_out_what_was_asked_for_ahead_costs_time_only(prefetch, tmp_path):
    found = {}
    for tier in ("host", "nvme"):
        torch.manual_seed(0)
        model = Blocks(24)
        with held(model, tier, tmp_path, prefetch=prefetch) as optimizer:
            losses = []
            for number, skip in enumerate((set(), set(range(1, 24, 2)), set(range(0, 24, 3)), set(), set(range(20)))):
                model.skip = skip
                losses.append(one_step(model, optimizer, number))
            found[tier] = losses
    assert found["host"] == found["nvme"]


@pytest.mark.parametrize("tier", ("host", "nvme"))
def test_a_step_that_ends_half_way_says_so_until_a_state_is_loaded(tier, tmp_path, monkeypatch, caplog):
    torch.manual_seed(0)
    model = Blocks()
    with held(model, tier, tmp_path) as optimizer:
        one_step(model, optimizer, 0)
        saved = copy.deepcopy(optimizer.state_dict())
        want = one_step(model, optimizer, 1)
        count = 0
        update = rules.AdamRule.update

        def interrupted(*args: object) -> None:
            nonlocal count
            count += 1
            if count == 3:
                raise KeyboardInterrupt
            update(*args)

        monkeypatch.setattr(rules.AdamRule, "update", interrupted)
        with pytest.raises(KeyboardInterrupt):
            one_step(model, optimizer, 2)
        monkeypatch.undo()
        with pytest.raises(RuntimeError, match="ended half-way"):
            optimizer.step()
        optimizer.zero_grad()
        optimizer.state_dict()  # is not lost
        assert "half-way" in caplog.text
        optimizer.load_state_dict(saved)
        assert one_step(model, optimizer, 1) == want


@pytest.mark.parametrize("mode", (torch.no_grad, torch.inference_mode))
def test_training_goes_on_after_an_evaluation_that_ctrl_c_has_ended(mode, tmp_path, monkeypatch):
    losses = []
    for stops in (False, True):
        torch.manual_seed(0)
        model, count = Blocks(), 0
        with held(model, "nvme", tmp_path) as optimizer:
            gather = type(optimizer.comm).all_gather

            def interrupted(*args: object, gather: object = gather) -> object:
                nonlocal count
                count += 1
                if count == 3:
                    raise KeyboardInterrupt
                return gather(*args)

            with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt), mode():
                if stops:
                    patch.setattr(type(optimizer.comm), "all_gather", interrupted)
                model(torch.ones(2, 16))
            losses.append([one_step(model, optimizer, number) for number in range(3)])
    assert losses[0] == losses[1] and count == 3


def test_a_group_added_to_partitioned_parameters_is_taken_in(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    plain = copy.deepcopy(model)
    adam = torch.optim.AdamW(plain[0].parameters(), lr=0.1)
    adam.add_param_group({"params": list(plain[1].parameters()), "lr": 0.01})
    place = {"param_tier": "nvme", "optimizer_tier": "nvme", "nvme_path": tmp_path}
    with zk.ZeroOptimizer(model, torch.optim.AdamW(model[0].parameters(), lr=0.1), stage=3, **place) as optimizer:
        optimizer.add_param_group({"params": list(model[1].parameters()), "lr": 0.01})
        for _ in range(3):
            x = torch.randn(4, 8)
            for net, each in ((model, optimizer), (plain, adam)):
                net(x).square().mean().backward()
                each.step()
                each.zero_grad()
        with zk.gather(model.parameters()):
            for a, b in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_gradients_that_follow_an_early_clip_are_added_in_their_order_on_every_tier(tmp_path):
    norms = {}
    for tier in ("host", "nvme"):
        torch.manual_seed(0)
        model = Blocks()
        with held(model, tier, tmp_path, dtype="fp32") as optimizer:
            draws = torch.Generator().manual_seed(1)
            for number in range(4):
                model(torch.randn(8, 16, generator=draws) * 10**number).square().mean().backward()
                if number == 0:
                    optimizer.clip_grad_norm_(1.0)
            norms[tier] = float(optimizer.clip_grad_norm_(1.0))
    assert norms["host"] == norms["nvme"]


def test_the_files_are_removed_wherever_the_program_has_gone(tmp_path, monkeypatch):
    (tmp_path / "drive").mkdir()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with held(Blocks(), "nvme", "drive"):
        assert list((tmp_path / "drive").iterdir())
        monkeypatch.chdir(tmp_path / "elsewhere")
    assert not list((tmp_path / "drive").iterdir())


@pytest.mark.parametrize(
    ("path", "error", "says"),
    [
        (5, TypeError, "a path, or a sequence of paths"),
        (b"/tmp", TypeError, "a path, or a sequence of paths"),
        (["a", "a/"], ValueError, "each of them once"),
    ],
)
def test_paths_that_are_none_are_refused(path, error, says):
    with pytest.raises(error, match=says):
        zk.ZeroConfig(stage=3, param_tier="nvme", optimizer_tier="nvme", nvme_path=path)


@pytest.mark.parametrize("prefetch", (0, 1, 5))
def test_every_byte_is_read_as_often_as_it_is_needed_and_no_more(prefetch, tmp_path):
    torch.manual_seed(0)
    model = Blocks(12, 16)
    with held(model, "nvme", tmp_path, prefetch=prefetch) as optimizer:
        for number in range(3):
            one_step(model, optimizer, number)
        before = optimizer.metrics()
        for number in range(4):
            one_step(model, optimizer, number)
        after = optimizer.metrics()
        pages = 13 * 4096  # a unit takes one page of each kind
        # parameters in forward, backward (but for the last unit, which is still there) and update; state and gradient in the update
        assert (after["fetched_nbytes"] - before["fetched_nbytes"]) / 4 <= 5 * pages
        assert (after["evicted_nbytes"] - before["evicted_nbytes"]) / 4 <= 3 * pages


@pytest.mark.parametrize("tier", ("host", "nvme"))
def test_a_loaded_state_reaches_units_that_a_forward_has_left_gathered(tier, tmp_path):
    torch.manual_seed(0)
    model = Blocks()
    x = torch.ones(2, 16)
    with held(model, tier, tmp_path) as optimizer:
        one_step(model, optimizer, 0)
        saved = copy.deepcopy(optimizer.state_dict())
        with torch.no_grad():
            want = model(x).clone()
        one_step(model, optimizer, 1)
        model(x)  # a forward that no backward follows
        optimizer.load_state_dict(saved)
        with torch.no_grad():
            assert torch.equal(model(x), want)
