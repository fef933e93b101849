"""Weights that lie in memory in another order (channels_last, transposed) or in tiles: kept so, and saved and loaded as any other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn

import zk
from tests.world import call, run_world
from zk.checkpoint.contents import cuts_of
from zk.checkpoint.export import export

pytestmark = pytest.mark.usefixtures("one_thread", "torch_engine")
LAST, ROWS = torch.channels_last, torch.contiguous_format


class Net(nn.Module):
    """Convolutions of several sizes, a frozen one, and a weight that is a transpose."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Conv2d(3, 7, 3), nn.BatchNorm2d(7), nn.Conv2d(7, 5, 1), nn.Conv2d(5, 6, 3, stride=2, groups=1))
        self.fixed = nn.Conv2d(6, 4, 2).requires_grad_(False)
        self.turned = nn.Parameter(torch.randn(9, 36).t())

    def forward(self, x: Tensor) -> Tensor:
        return self.fixed(self.blocks(x)).flatten(1).sum(1, keepdim=True) + self.blocks(x).flatten(1)[:, :36] @ self.turned


def build(memory_format: torch.memory_format = LAST, seed: int = 0) -> Net:
    torch.manual_seed(seed)
    model = Net().to(memory_format=memory_format)
    if memory_format is ROWS:
        model.turned = nn.Parameter(model.turned.detach().contiguous())
    return model


def batch(step: int, memory_format: torch.memory_format = LAST) -> Tensor:
    return torch.randn(4, 3, 13, 13, generator=torch.Generator().manual_seed(step)).to(memory_format=memory_format)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, start: int, count: int) -> list[float]:
    losses = []
    for step in range(start, start + count):
        optimizer.zero_grad()
        loss = model(batch(step)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2)


def wrap(model: nn.Module, stage: int, tier: str = "host", drive: str = "", dtype: str | None = None) -> zk.ZeroOptimizer:
    where: dict[str, Any] = {"optimizer_tier": tier, "param_tier": tier if stage == 3 else "device", "nvme_path": drive or None}
    return zk.ZeroOptimizer(model, adamw(model), stage=stage, dtype=dtype, **where)


def strides(model: nn.Module) -> list[tuple[int, ...]]:
    return [param.stride() for param in model.parameters()]


def exact(optimizer: zk.ZeroOptimizer) -> dict[str, Tensor]:
    """Parameters in full precision and the optimizer's state, by name. On all ranks."""
    named = {name: param for name, param in optimizer.model.named_parameters() if param.requires_grad}
    found = {name: param.detach().float() for name, param in optimizer.model.named_buffers()}
    with zk.gather(optimizer.model.parameters()):
        found |= {name: param.detach().clone().float() for name, param in optimizer.model.named_parameters()}
    for kind in ("master", "exp_avg", "exp_avg_sq"):
        with zk.gather(list(named.values()), kind=kind) as values:
            found |= {f"{name}.{kind}": value.clone() for name, value in zip(named, values, strict=True)}
    return found


def assert_equal(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert torch.equal(got[name], value), name


@pytest.mark.parametrize(("stage", "tier"), ((0, "device"), (1, "host"), (2, "nvme"), (3, "nvme")))
def test_formats_of_parameters_gradients_and_state_are_those_of_torch(stage: int, tier: str, tmp_path: Path) -> None:
    plain, model = build(), build()
    want = train(plain, inner := adamw(plain), 0, 3)
    optimizer = wrap(model, stage, tier, str(tmp_path) if tier == "nvme" else "")
    assert train(model, optimizer, 0, 3) == want
    plain.zero_grad(), optimizer.zero_grad()
    plain(batch(3)).sum().backward()
    model(batch(3)).sum().backward()
    for param, other in zip(model.parameters(), plain.parameters(), strict=True):
        if other.requires_grad:
            assert torch.equal(param.grad, other.grad) and param.grad.stride() == other.grad.stride()
            with zk.gather(param, kind="exp_avg") as (moment,):
                assert torch.equal(moment, inner.state[other]["exp_avg"])
    with zk.gather(model.parameters()):
        assert strides(model) == strides(plain)
        assert all(torch.equal(one, other) for one, other in zip(model.parameters(), plain.parameters(), strict=True))
    optimizer.close()


def test_the_format_may_change_between_saving_and_loading(tmp_path: Path) -> None:
    model = build()
    optimizer = wrap(model, 1, dtype="bf16")
    train(model, optimizer, 0, 2)
    optimizer.save_checkpoint(tmp_path / "last")
    want = exact(optimizer)
    rows = build(ROWS, seed=1)
    second = wrap(rows, 3, dtype="bf16")
    second.load_checkpoint(tmp_path / "last")
    assert_equal(exact(second), want)
    with zk.gather(rows.parameters()):
        assert all(param.is_contiguous() for param in rows.parameters())
    second.save_checkpoint(tmp_path / "rows")
    third = wrap(build(seed=2), 1, dtype="bf16")
    third.load_checkpoint(tmp_path / "rows")
    assert_equal(exact(third), want)
    for folder in ("last", "rows"):
        export(tmp_path / folder, tmp_path / f"{folder}-exported", torch.float32)
        assert_equal(load_file(tmp_path / f"{folder}-exported" / "model.safetensors"), optimizer.consolidated_state_dict(dtype="fp32"))
    second.load_state_dict(optimizer.state_dict())
    assert_equal(exact(second), want)


def between_ranks(case: tuple[int, str]) -> str:
    """Train over ranks, and hand over by both kinds of checkpoint to the other format."""
    stage, folder = case
    model, plain = build(), build()
    want = train(plain, adamw(plain), 0, 3)
    optimizer = wrap(model, stage)
    assert train(model, optimizer, 0, 3) == pytest.approx(want, rel=1e-3)  # ranks take the mean of equal gradients, and a third is rounded
    have = exact(optimizer)
    optimizer.save_checkpoint(folder)
    for memory_format in (ROWS, LAST) if stage == 3 else (ROWS,):
        other = wrap(build(memory_format, 1), 3)
        other.load_checkpoint(folder)
        assert_equal(exact(other), have)
        if stage == 3 and memory_format is LAST:  # this rank's elements, in the same order
            third = wrap(build(memory_format, 1), 3)
            third.load_state_dict(optimizer.state_dict())
            with zk.gather(third.model.parameters(), write=True):
                third.model.load_state_dict(optimizer.consolidated_state_dict(dtype="fp32"))
            assert_equal(exact(third), have)
    return ""


def other_formats(_: object) -> str:
    try:
        wrap(build(LAST if dist.get_rank() else ROWS), 2)
    except ValueError as error:
        return str(error)
    return "nothing"


def test_ranks_hand_over_from_one_format_to_the_other(tmp_path: Path) -> None:
    """Three, which divide units unevenly."""
    *handed, messages = run_world(3, call, [*((between_ranks, (stage, str(tmp_path / str(stage)))) for stage in (1, 3)), (other_formats, None)])
    assert handed == [[""] * 3] * 2, handed
    for message in messages:
        assert "parameter 'turned' is (36, 9) of torch.float32 on rank 0 and (36, 9) of torch.float32, strides (1, 36) on rank 1" in message


# ---- the same weights, cut in other ways -----------------------------------------------------------------------------------------


def cut(how: str) -> nn.Sequential:
    """A model whose weights are whole, transposed in memory, or in tiles of some size."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(200, 160), nn.GELU(), nn.Linear(160, 130, bias=False), nn.GELU(), nn.Linear(130, 7))
    if how == "turned":
        model[2].weight = nn.Parameter(model[2].weight.detach().t().contiguous().t())
    elif how == "fine":
        zk.tile_linears(model, 20_000)
    elif how == "coarse":
        zk.tile_linears(model, 60_000)
    elif how == "odd":
        model[0], model[2] = zk.TiledLinear.from_linear(model[0], 6), zk.TiledLinear.from_linear(model[2], 5)
    return model


def hold(model: nn.Module, stage: int) -> zk.ZeroOptimizer:
    matrices, vectors = [p for p in model.parameters() if p.ndim > 1], [p for p in model.parameters() if p.ndim < 2]
    inner = torch.optim.AdamW([{"params": matrices}, {"params": vectors, "weight_decay": 0.0}], lr=1e-2)
    return zk.ZeroOptimizer(model, inner, stage=stage, dtype="bf16")


def without_tiles(optimizer: zk.ZeroOptimizer) -> dict[str, Tensor]:
    """As ``exact``, with the state of tiles put together."""
    cuts, found = cuts_of(optimizer.model), dict[str, Tensor]()
    for name, value in exact(optimizer).items():
        param, kind = (name, "param") if name in cuts else name.rsplit(".", 1)
        cut = cuts[param]
        found.setdefault(f"{cut.whole}.{kind}", torch.full(cut.shape, float("nan")))[cut.place] = value
    return found


WAYS = (("whole", ("odd", "turned")), ("turned", ("fine",)), ("fine", ("coarse", "odd")), ("odd", ("coarse", "whole")))


@pytest.mark.parametrize(("how", "others"), WAYS)
def test_a_checkpoint_loads_into_the_same_weights_cut_in_another_way(how: str, others: tuple[str, ...], tmp_path: Path) -> None:
    optimizer = hold(model := cut(how), 2)
    for step in range(2):
        optimizer.zero_grad()
        model(torch.randn(8, 200, generator=torch.Generator().manual_seed(step)).bfloat16()).square().mean().backward()
        optimizer.step()
    optimizer.save_checkpoint(tmp_path / "saved")
    want = without_tiles(optimizer)
    for other in others:
        second = hold(cut(other), 3)
        second.load_checkpoint(tmp_path / "saved")
        assert_equal(without_tiles(second), want)
        second.close()
    export(tmp_path / "saved", tmp_path / "exported", torch.float32)
    assert_equal(load_file(tmp_path / "exported" / "model.safetensors"), optimizer.consolidated_state_dict(dtype="fp32"))
