"""Parameters that rest in 16 bits and are computed with in fp32: the bits of a plain loop, the bytes of training in 16 bits."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zk
from tests import softgpu
from tests.models import DEVICE, GPT, batch, loss_of, train
from tests.parity import Case, run_case
from tests.world import run_world
from zk.core.memory import widen_

pytestmark = pytest.mark.usefixtures("torch_engine", "one_thread")

FIRST = Case(stage=3, dtype="bf16", computes="fp32", steps=3)
TIERS = [dataclasses.replace(FIRST, tier=tier) for tier in ("device", "host", "nvme")]
FP16 = dataclasses.replace(FIRST, dtype="fp16")
LATE = dataclasses.replace(FIRST, tier="nvme", accumulation=2, adversary=True)
VERTICAL = dataclasses.replace(FIRST, tier="device", params="host", accumulation=2, vertical=True)
OVERLAPPED = dataclasses.replace(FIRST, params="device", overlap_step=True, steps=4)
IN_BACKWARD = dataclasses.replace(FIRST, tier="nvme", overlap_step="backward", keep_gradients=False, clip=None, steps=4)
ON_THE_DEVICE = dataclasses.replace(FIRST, update_on="device")  # (on a CPU there is one side)
DELAYED = dataclasses.replace(FIRST, optimizer="SGD", delay=2, prefetch=0, steps=4)
TIED, FROZEN, ELSEWHERE, EXPERTS = (dataclasses.replace(FIRST, model=model) for model in ("tied", "frozen", "elsewhere", "experts_checkpointed"))
UNFREEZING = dataclasses.replace(FIRST, model="unfreezing", tier="nvme", steps=5)  # (whose reference has no gradient on some ranks)
# each with one process or with two, but for what ranks send; of three each has another part
HOST = {
    1: [*TIERS, FP16, VERTICAL, DELAYED, TIED, FROZEN, ELSEWHERE, UNFREEZING],
    2: [LATE, VERTICAL, OVERLAPPED, IN_BACKWARD, ELSEWHERE, EXPERTS],
    3: [LATE],
}
# what lies between a tier and the device's memory
SOFTWARE_GPU = {
    1: [FP16, VERTICAL, IN_BACKWARD, ON_THE_DEVICE, UNFREEZING, DELAYED],
    2: [LATE, OVERLAPPED, EXPERTS],
}


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.device), pytest.param(2, marks=pytest.mark.device), 3])
def test_bits_are_those_of_fp32_computed_with_rounded_parameters(world: int) -> None:
    cases = (SOFTWARE_GPU if softgpu.installed() else HOST)[world]
    if world == 1 and not softgpu.installed():
        table = [[run_case(case)] for case in cases]
    else:
        table = run_world(world, run_case, cases, timeout=120)
    wrong = {str(case): found for case, found in zip(cases, table, strict=True) if any(found)}
    assert not wrong, wrong


@pytest.mark.parametrize("narrow", (torch.bfloat16, torch.float16))
def test_a_cast_in_place_reads_nothing_that_it_has_written(narrow: torch.dtype) -> None:
    for numel in (0, 32, 1 << 12, (1 << 12) + 32, 99_999, 100_000):
        values = torch.randn(numel, generator=torch.Generator().manual_seed(0)).to(narrow)
        full = torch.full((numel,), float("nan"))
        full.view(narrow)[:numel] = values
        widen_(full, narrow)
        assert torch.equal(full, values.float())


def wrap(model: nn.Module, computes: str | None = "fp32", **options: Any) -> zk.ZeroOptimizer:
    options = {"stage": 3, "param_tier": "host", "optimizer_tier": "host", "dtype": "bf16", "compute_dtype": computes, **options}
    trained = [param for param in model.parameters() if param.requires_grad]
    return zk.ZeroOptimizer(model, torch.optim.AdamW(trained, lr=1e-2), **options)


def made(variant: str = "plain") -> GPT:
    torch.manual_seed(0)
    return GPT(variant)


def bytes_of(optimizer: zk.ZeroOptimizer) -> dict[str, float]:
    """Of training state, by tier and kind."""
    kinds = ("param", "grad", "master", "moments", "param_copy")
    return {name: value for name, value in optimizer.metrics().items() if name.partition("_")[2] in [f"{kind}_nbytes" for kind in kinds]}


@pytest.mark.parametrize("tier", ("device", "host", "nvme"))
def test_tiers_hold_the_bytes_of_training_in_16_bits(tier: str, tmp_path: Path) -> None:
    found = []
    for computes in (None, "fp32"):
        with wrap(model := made(), computes, param_tier=tier, optimizer_tier=tier, nvme_path=tmp_path if tier == "nvme" else None) as optimizer:
            train(model, optimizer, 2)
            loss_of(model, batch(2)).backward()
            assert {param.dtype for param in model.parameters()} == {torch.float32 if computes else torch.bfloat16}
            assert optimizer.metrics()["device_gathered_nbytes"] == 0
            with zk.gather(model.blocks[0].parameters()):
                layout = optimizer.units[model.blocks[0].up.weight][0].layout
                if computes:
                    assert optimizer.metrics()["device_gathered_nbytes"] == 4 * layout.numel
            assert ("bf16 computed in fp32" in str(optimizer.summary())) == (computes is not None)
            found.append(bytes_of(optimizer))
    assert found[0] == found[1] and sum(found[0].values()) > 0


def test_full_parameters_are_what_rests_also_after_a_write() -> None:
    with wrap(model := made()) as optimizer:
        weight = model.blocks[1].up.weight
        values = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
        rounded = values.bfloat16().float()
        assert not torch.equal(values, rounded)
        with zk.gather(model.blocks[1].parameters(), write=True), torch.no_grad():
            weight.copy_(values)
        with zk.gather(weight):
            assert torch.equal(weight, rounded)
        assert torch.equal(optimizer.consolidated_state_dict()["blocks.1.up.weight"], rounded.bfloat16())
        master = optimizer.consolidated_state_dict("fp32")["blocks.1.up.weight"]
        assert torch.equal(master.bfloat16(), rounded.bfloat16())  # whose other bits are those of training in bf16
        model.load_state_dict({name: value + 1e-4 for name, value in model.state_dict().items()})
        for name, value in model.state_dict().items():
            assert value.dtype == torch.float32 and torch.equal(value, value.bfloat16().float()), name
        with pytest.raises(RuntimeError, match="write=True"), zk.gather(weight), torch.no_grad():
            weight.add_(1e-9)


def test_a_gradient_is_rounded_once_and_read_in_fp32() -> None:
    with wrap(model := made()) as optimizer:
        plain = made().bfloat16().float()
        loss_of(model, batch(0)).backward()
        loss_of(plain, batch(0)).backward()
        for (name, param), other in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert param.grad is not None and other.grad is not None
            assert param.grad.dtype == torch.float32 and torch.equal(param.grad, other.grad.bfloat16().float()), name
        model.head.weight.grad = torch.full_like(model.head.weight.grad, 0.1)  # type: ignore[arg-type]
        assert torch.equal(model.head.weight.grad, torch.full(model.head.weight.shape, 0.1))
        optimizer.step()


def test_state_in_8_bits_has_the_same_bits_on_every_tier(tmp_path: Path) -> None:
    ends = []
    for tier in ("device", "host", "nvme"):
        drive = {"nvme_path": tmp_path} if tier == "nvme" else {}
        with wrap(model := made(), param_tier=tier, optimizer_tier=tier, state_dtype="8bit", **drive) as optimizer:
            assert "24-bit master" in str(optimizer.summary())
            ends.append((train(model, optimizer, 3), optimizer.consolidated_state_dict("fp32")))
    for losses, weights in ends[1:]:
        assert losses == ends[0][0] and all(torch.equal(value, weights[name]) for name, value in ends[0][1].items())


@pytest.mark.parametrize(("before", "after"), (("fp32", None), (None, "fp32")))
def test_a_checkpoint_is_one_of_training_in_16_bits(before: str | None, after: str | None, tmp_path: Path) -> None:
    """Its files are the same but for numbers of training; what goes on from it computes in another precision from there, on the same bits."""
    with wrap(model := made("frozen"), before) as optimizer:
        train(model, optimizer, 2)
        optimizer.save_checkpoint(tmp_path)
        weights, state = optimizer.consolidated_state_dict(), optimizer.state_dict()["state"]
    ends = []
    for computes in (before, after):
        with wrap(other := made("frozen"), computes, stage=3 if computes else 2, param_tier="host" if computes else "device") as optimizer:
            optimizer.load_checkpoint(tmp_path)
            loaded, states = optimizer.consolidated_state_dict(), optimizer.state_dict()["state"]
            assert all(value.dtype == weights[name].dtype == torch.bfloat16 and torch.equal(value, weights[name]) for name, value in loaded.items())
            for key, entry in state.items():
                assert all(torch.equal(torch.as_tensor(value), torch.as_tensor(states[key][name])) for name, value in entry.items())
            assert all(map(torch.isfinite, map(torch.tensor, train(other, optimizer, 1, start=2))))
            optimizer.save_checkpoint(tmp_path / str(computes), frozen=False)
            ends.append(optimizer.consolidated_state_dict())
            with wrap(made("frozen"), "fp32") as again:  # whose base has the same digests
                again.load_checkpoint(tmp_path / str(computes))
    assert any(not torch.equal(value, ends[1][name]) for name, value in ends[0].items())


def test_tiles_adapters_and_buffers_compute_in_fp32() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
            self.register_buffer("scale", torch.full((32,), 1.1))
            self.seen: set[torch.dtype] = set()

        def forward(self, x: Tensor) -> Tensor:
            out = self.down(torch.tanh(self.up(x * self.scale)))
            self.seen |= {x.dtype, out.dtype, self.scale.dtype}  # type: ignore[arg-type]
            return out

    def trained(tiled: bool) -> tuple[set[torch.dtype], Tensor, dict[str, Tensor]]:
        torch.manual_seed(0)
        model = Net().to(DEVICE)
        model.up.weight.requires_grad_(False)
        if tiled:
            zk.tile_linears(model, 2048)
        x = torch.randn(4, 32, generator=torch.Generator().manual_seed(3)).to(DEVICE)
        with wrap(model, cast_buffers=tiled) as optimizer:
            for _ in range(3):
                model(x.bfloat16()).square().mean().backward()  # (the model's inputs are cast)
                optimizer.step()
                optimizer.zero_grad()
            return model.seen, model.scale.clone(), optimizer.consolidated_state_dict()  # type: ignore[operator]

    for is_tiled in (False, True):
        seen, scale, _ = trained(is_tiled)
        assert seen == {torch.float32} and torch.equal(scale.cpu(), torch.full((32,), 1.1))
    tiled, whole = trained(True)[2], trained(False)[2]
    for name, value in whole.items():
        torch.testing.assert_close(tiled[name], value, rtol=2**-7, atol=1e-4)  # sums over tiles, and a rounding to bf16 or two


@pytest.mark.parametrize(
    ("options", "match"),
    (
        ({"compute_dtype": "fp32", "stage": 3}, "needs dtype='bf16' or 'fp16'"),
        ({"compute_dtype": "fp32", "stage": 3, "dtype": "fp32"}, "needs dtype='bf16' or 'fp16'"),
        ({"compute_dtype": "bf16", "stage": 3, "dtype": "bf16"}, "must be 'fp32' or None"),
        ({"compute_dtype": "fp64", "stage": 3, "dtype": "bf16"}, "compute_dtype must be one of"),
        *(({"compute_dtype": "fp32", "stage": stage, "dtype": "bf16"}, f"needs stage=3.*got stage={stage}") for stage in (0, 1, 2)),
    ),
)
def test_what_has_no_meaning_is_refused_by_name(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        zk.ZeroConfig(**options)


def differs(_: object) -> str:
    try:
        wrap(made(), "fp32" if dist.get_rank() else None).close()
    except RuntimeError as error:
        return str(error)
    return ""


def test_ranks_that_compute_in_other_precisions_are_refused_together() -> None:
    (said,) = run_world(2, differs, [None])
    assert all("as fp32" in text or "compute_dtype" in text for text in said), said
