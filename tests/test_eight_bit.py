"""State in 8 bits: its codes, how they are rounded, and the same bits wherever the update runs."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zk
from tests.cpu_adam import MOMENTS, CPUAdam
from tests.world import run_world
from zk.kernels import codec, eight_bit
from zk.kernels.reference import AdamStep
from zk.offload.cpu_adam import adam_
from zk.offload.cpu_adam_numba import BLOCK

PLACES = (("device", "device"), ("device", "nvme"), ("host", "host"), ("nvme", "nvme"))


def test_codes_give_themselves_again_and_values_the_nearest_code() -> None:
    second = torch.arange(256, dtype=torch.uint8).repeat_interleave(256)
    first = torch.arange(256, dtype=torch.uint8).repeat(256)
    m, v = eight_bit.first_moment(first, second), eight_bit.second_moment(second)
    for precision in (torch.float32, torch.bfloat16):  # checkpoints hold them in bf16
        got = torch.empty_like(first), torch.empty_like(second)
        eight_bit.encode_(m.to(precision).float(), v.to(precision).float(), *got)
        assert torch.equal(got[0], first) and torch.equal(got[1], second)
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


def state(numel: int, dtype: torch.dtype) -> list[Tensor | None]:
    start = torch.randn(numel, generator=torch.Generator().manual_seed(1)).to(dtype)
    zeros = [torch.zeros(numel, dtype=torch.uint8) for _ in range(3)]
    return [start, zeros[0] if dtype == torch.bfloat16 else None, *zeros[1:]]


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_bits_depend_on_neither_threads_nor_slices_and_engines_agree(dtype: torch.dtype) -> None:
    numel = 3 * BLOCK + 11
    cuts = {"threads": [slice(0, numel)], "slices": [slice(0, 1), slice(1, 777), slice(777, BLOCK + 3), slice(BLOCK + 3, numel)]}
    want = state(numel, dtype)
    others = {**{how: state(numel, dtype) for how in cuts}, "torch": state(numel, dtype)}
    draws = torch.Generator().manual_seed(3)
    for number in range(1, 4):
        grad = (torch.randn(numel, generator=draws) * 10 ** torch.empty(numel).uniform_(-8, 1, generator=draws)).to(dtype)
        step = AdamStep(1e-2, 0.9, 0.999, 1e-8, 0.1, True, number, 0.3)
        adam_(want[0], grad, *want[1:], step, engine="numba", num_threads=1)  # type: ignore[arg-type]
        for how, parts in cuts.items():
            for part in parts:
                fields = [None if one is None else one[part] for one in (others[how][0], grad, *others[how][1:])]
                adam_(*fields, step, engine="numba", num_threads=2)  # type: ignore[arg-type]
        adam_(others["torch"][0], grad, *others["torch"][1:], step, engine="torch")  # type: ignore[arg-type]
    for how, got in others.items():
        for one, other in zip(got, want, strict=True):
            if one is not None and other is not None:  # torch's square root is not rounded correctly
                far = one != other if how != "torch" or not one.is_floating_point() else (one - other).abs() > other.abs() * 1e-6 + 1e-6
                assert far.float().mean() <= (0.01 if how == "torch" else 0), how


@pytest.mark.parametrize(("size", "bias", "spread"), ((1.0, 0.05, 0.2), (1e-7, 0.15, 0.3), (1e-8, 0.5, 0.6)))  # eps: 1e-8
def test_nothing_stands_still_under_small_gradients_and_rates(size: float, bias: float, spread: float) -> None:
    """Steps of lr that are less than half of the last bit of 24: elements move as those in fp32, on average and each of them."""
    moved = {}
    draws = torch.Generator().manual_seed(0)
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


def test_bits_are_the_same_on_every_tier_stage_and_number_of_ranks(tmp_path: Path) -> None:
    threads, folder = torch.get_num_threads(), str(tmp_path)
    torch.set_num_threads(1)  # as ranks have: torch's own sums depend on it
    try:
        want = {dtype: trained((dtype, 0, PLACES[0], "", {})) for dtype in ("bf16", None)}
        assert all(any("exp_avg_sq" in name for name in found) for found in want.values())
        cases: list[Any] = [("bf16", 1, PLACES[1], folder, {}), (None, 3, PLACES[2], folder, {})]
        over_ranks: list[Any] = [(dtype, 3, PLACES[3], folder, {}) for dtype in want]
        over_ranks += [("bf16", 3, PLACES[2], folder, {}), *((dtype, 3, ("device", "host"), "", {"overlap_step": True}) for dtype in want)]
        for case in cases + over_ranks:
            assert same(trained(case), want[case[0]]), case
    finally:
        torch.set_num_threads(threads)
    for case, found in zip(over_ranks, run_world(2, trained, over_ranks), strict=True):
        assert all(same(each, want[case[0]]) for each in found), case


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


def test_a_checkpoint_goes_on_bitwise_on_any_number_of_ranks_and_in_fp32(tmp_path: Path) -> None:
    assert saved((str(tmp_path / "a"), ""))
    assert run_world(2, saved, [("", str(tmp_path / "a"))]) == [[True, True]]
    with made("bf16", 1, PLACES[0], "", state_dtype="fp32") as wide, made("bf16", 1, PLACES[0], "") as coded:
        steps(coded, range(2))
        before = bits(coded)
        wide.load_state_dict(copy.deepcopy(coded.state_dict()))
        assert all(torch.equal(value, before[name]) for name, value in bits(wide).items() if "param" not in name)
        coded.load_state_dict(wide.state_dict())
        assert same(bits(coded), before)


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


def test_state_takes_three_bytes_beside_a_bf16_parameter() -> None:
    fields = codec.state_fields(torch.bfloat16, MOMENTS, torch.uint8, True)
    assert sum(dtype.itemsize for dtype in fields.values()) == 3
