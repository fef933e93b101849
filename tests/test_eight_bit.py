"""State in 8 bits: its codes, how they are rounded, and the same bits wherever the update runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zk
from tests.cpu_adam import MOMENTS, CPUAdam
from tests.world import call, run_world
from zk.kernels import codec, eight_bit

PLACES = (("device", "device"), ("device", "nvme"), ("host", "host"), ("nvme", "nvme"))


def test_codes_give_themselves_again_and_values_the_nearest_code() -> None:
    second = torch.arange(256, dtype=torch.uint8).repeat_interleave(256)
    first = torch.arange(256, dtype=torch.uint8).repeat(256)
    m, v = eight_bit.first_moment(first, second), eight_bit.second_moment(second)
    for precision in (torch.float32, torch.bfloat16):  # checkpoints hold them in bf16
        got = torch.empty_like(first), torch.empty_like(second)
        eight_bit.encode_(m.to(precision).float(), v.to(precision).float(), *got)
        assert torch.equal(got[0], first) and torch.equal(got[1], second)
    assert sum(dtype.itemsize for dtype in codec.state_fields(torch.bfloat16, MOMENTS, torch.uint8, True).values()) == 3
    assert bool((v[::256].diff() > 0).all()) and v[0] == 0 and m[0] == 0

    draws = torch.Generator().manual_seed(0)
    v = 10 ** torch.empty(50_000).uniform_(-13, 0, generator=draws)
    m = torch.randn(50_000, generator=draws).clamp(-3, 3) * v.sqrt()
    first, second = torch.empty(50_000, dtype=torch.uint8), torch.empty(50_000, dtype=torch.uint8)
    eight_bit.encode_(m, v, first, second)
    assert ((eight_bit.second_moment(second) - v).abs() / v).max() < 0.126
    assert ((eight_bit.first_moment(first, second) - m).abs() <= m.abs() / 30 + v.sqrt() / 200).all()


def test_a_master_of_24_bits_is_its_parameter_and_8_bits() -> None:
    bits = torch.randint(-(2**31), 2**31, (100_000,), generator=torch.Generator().manual_seed(0)) & ~0xFF
    master = torch.cat((bits.to(torch.int32).view(torch.float32), torch.tensor([0.0, -0.0, 1e-38, 3.4e38, torch.inf, 1.00390625, 1.01171875])))
    master = master[master == master]
    param, low = torch.empty_like(master, dtype=torch.bfloat16), torch.empty_like(master, dtype=torch.uint8)
    eight_bit.split24_(master, param, low)
    kept = eight_bit.join24(param, low)
    near = (kept - master).abs() <= master.abs() * 2.0**-16
    assert bool((near | (kept == master)).all())
    whole = (master.view(torch.int32) & 0xFF) == 0
    assert torch.equal(kept[whole].view(torch.int32), master[whole].view(torch.int32))
    differs = param != master.bfloat16()  # ties alone, which torch rounds to even
    assert bool(((master.view(torch.int32)[differs] & 0xFFFF) == 0x8000).all())


def test_nothing_stands_still_under_small_gradients_and_rates() -> None:
    """Steps of lr that are less than half of the last bit of 24: elements move as those in fp32, on average and each of them."""
    for size, bias, spread in ((1.0, 0.05, 0.2), (1e-8, 0.5, 0.6)):  # eps: 1e-8
        moved, draws = {}, torch.Generator().manual_seed(0)
        grads = [(size * (0.5 + 0.3 * torch.randn(2000, generator=draws))).bfloat16() for _ in range(400)]
        for state_dtype in (torch.float32, torch.uint8):
            param = nn.Parameter(torch.ones(2000).bfloat16())
            optimizer = CPUAdam([param], lr=2e-6, weight_decay=0, state_dtype=state_dtype)
            for grad in grads:
                param.grad = grad
                optimizer.step()
            moved[state_dtype] = optimizer.state_dict()["state"][0]["master"] - 1
        want, got = moved[torch.float32], moved[torch.uint8]
        assert abs(got.mean() / want.mean() - 1) < bias
        assert (got / want - 1).abs().mean() < spread and bool((got < 0).all())


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(37, 37) for _ in range(2))
        self.norm = nn.LayerNorm(37)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.norm(x)


def made(dtype: str | None, stage: int, place: tuple[str, str], folder: str, **options: object) -> zk.ZeroOptimizer:
    torch.manual_seed(0)
    model = Net()
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    where: dict[str, object] = {"param_tier": place[0] if stage == 3 else "device", "optimizer_tier": place[1]}
    where |= {"nvme_path": folder} if "nvme" in where.values() else {}
    options = {"keep_dtype": [nn.LayerNorm], "dtype": dtype, "state_dtype": "8bit"} | options if dtype else {"state_dtype": "8bit"} | options
    return zk.ZeroOptimizer(model, inner, stage=stage, **where, **options)  # type: ignore[arg-type]


def steps(optimizer: zk.ZeroOptimizer, numbers: range) -> None:
    """The same batch on all ranks, so that gradients do not depend on their number."""
    for number in numbers:
        x = torch.randn(8, 37, generator=torch.Generator().manual_seed(number))
        optimizer.model(x.to(optimizer.model.layers[0].weight.dtype)).float().sub(x.roll(1, 0)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def bits(optimizer: zk.ZeroOptimizer) -> dict[str, Tensor]:
    """Parameters and states, by public names; on each rank."""
    found = {f"param {name}": value.clone() for name, value in optimizer.consolidated_state_dict(rank0_only=False).items()}
    for index, entry in optimizer.state_dict()["state"].items():
        found |= {f"{index} {name}": torch.as_tensor(value).clone() for name, value in entry.items()}
    return found


def trained(case: tuple[str | None, int, tuple[str, str], str, dict[str, object]]) -> dict[str, Tensor]:
    dtype, stage, place, folder, options = case
    with made(dtype, stage, place, folder, **options) as optimizer:
        steps(optimizer, range(4))
        return bits(optimizer)


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def saved(case: tuple[str, str]) -> bool:
    """Save after two steps, and go on; then load, as another optimizer, and go on."""
    folder, source = case
    with made("bf16", 3, ("host", "host"), "") as optimizer:
        if not source:
            steps(optimizer, range(2))
            optimizer.save_checkpoint(folder)
        else:
            optimizer.load_checkpoint(source)
        steps(optimizer, range(2, 4))
        want = bits(optimizer)
    with made("bf16", 1, ("device", "host"), "") as again:
        again.load_checkpoint(source or folder)
        steps(again, range(2, 4))
        return same(bits(again), want) and (dist.is_initialized() or same(want, trained(("bf16", 0, PLACES[0], "", {}))))


def test_bits_are_the_same_on_every_tier_stage_and_number_of_ranks_and_after_a_checkpoint(tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    want = {dtype: trained((dtype, 0, PLACES[0], "", {})) for dtype in ("bf16", None)}
    assert all(any("exp_avg_sq" in name for name in found) for found in want.values())
    cases: list[Any] = [("bf16", 1, PLACES[1], str(tmp_path), {}), (None, 3, PLACES[2], "", {})]
    over_ranks: list[Any] = [(dtype, 3, PLACES[3], str(tmp_path), {}) for dtype in want]
    over_ranks += [("bf16", 3, PLACES[2], "", {}), *((dtype, 3, ("device", "host"), "", {"overlap_step": True}) for dtype in want)]
    for case in cases + over_ranks:
        assert same(trained(case), want[case[0]]), case
    assert saved((folder, ""))
    *table, resumed = run_world(2, call, [*((trained, case) for case in over_ranks), (saved, ("", folder))])
    for case, found in zip(over_ranks, table, strict=True):
        assert all(same(each, want[case[0]]) for each in found), case
    assert resumed == [True, True]


@pytest.mark.parametrize(
    ("make", "options", "match"),
    (
        (lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9), {}, "is for Adam and AdamW"),
        (lambda params: torch.optim.RMSprop(params), {}, "RMSprop keeps"),
        (lambda params: torch.optim.AdamW(params, amsgrad=True), {}, "without amsgrad"),
        (lambda params: torch.optim.AdamW(params, eps=1e-12), {}, "eps of at least 1e-8"),
        (lambda params: torch.optim.AdamW(params, betas=(0.9, 0.99999)), {}, "hold up to 15 times"),
        (lambda params: torch.optim.AdamW(params), {"dtype": "fp16"}, "fp16 has no 24-bit master"),
    ),
)
def test_what_cannot_be_held_is_refused_by_name(make: object, options: dict[str, object], match: str) -> None:
    model = Net()
    with pytest.raises(ValueError, match=match):
        zk.ZeroOptimizer(model, make(model.parameters()), state_dtype="8bit", **options)  # type: ignore[operator, arg-type]
