"""State in 8 bits: its codes, how they are rounded, and the same bits wherever the update runs."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import zk
from tests.cpu_adam import MOMENTS, CPUAdam
from tests.models import GPT, batch, loss_of
from tests.parity import place, trained
from tests.world import run_world
from zk.kernels import codec, eight_bit

SAVED = "3 host"  # what saves, and trains


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


def ends(case: tuple[str | None, str, Path, int]) -> list[Tensor]:
    """Of four steps, with a checkpoint between them; or of the last two, from that. Ranks have the same batch: gradients do not depend on them."""
    dtype, where, path, steps = case

    def program(model: GPT, optimizer: zk.ZeroOptimizer, step: int) -> None:
        if steps == 2 and step == 0:
            optimizer.load_checkpoint(path / f"saved-{dtype}")
        if where == SAVED and step == 2:
            optimizer.save_checkpoint(path / f"saved-{dtype}")
        optimizer.backward(loss_of(model, batch(optimizer.num_steps)))

    kept = {"keep_dtype": [nn.LayerNorm]} if dtype else {}
    return trained(program, steps, dtype=dtype, state_dtype="8bit", overlap_step=where == "3 host device", **kept, **place(where, path))


def test_bits_are_the_same_on_every_tier_stage_and_number_of_ranks_and_after_a_checkpoint(tmp_path: Path) -> None:
    alone = [("bf16", "1 nvme", 4), (None, SAVED, 4), ("bf16", SAVED, 4), ("bf16", "1 host", 2)]
    over_ranks = [(dtype, where, 4) for dtype in ("bf16", None) for where in ("3 nvme", "3 host device")]
    over_ranks += [("bf16", "3 host", 2), (None, "1 host", 2)]
    cases = [(dtype, where, tmp_path, steps) for dtype, where, steps in alone + over_ranks]
    want = {dtype: ends((dtype, "0 device", tmp_path, 4)) for dtype in ("bf16", None)}
    rows = [[ends(case)] for case in cases[: len(alone)]]
    for case, found in zip(cases, rows + run_world(2, ends, cases[len(alone) :]), strict=True):
        assert all(len(each) == len(want[case[0]]) and all(map(torch.equal, each, want[case[0]])) for each in found), case


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
    model = GPT()
    with pytest.raises(ValueError, match=match):
        zk.ZeroOptimizer(model, make(model.parameters()), state_dtype="8bit", **options)  # type: ignore[operator, arg-type]
