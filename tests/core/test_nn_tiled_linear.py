"""TiledLinear against nn.Linear: values, gradients, state; one tile at a time at stage 3."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zk
from tests.world import run_world
from zk import kernels
from zk.nn import deferred
from zk.nn.tiled_linear import LinearTile, TiledLinear

BF16 = torch.bfloat16


def pair(shape: tuple[int, int], in_splits: int, out_splits: int, dtype: torch.dtype = torch.float32) -> tuple[nn.Linear, Any]:
    torch.manual_seed(shape[0] * shape[1])
    linear = nn.Linear(*shape, dtype=dtype)
    tiled = TiledLinear.from_linear(linear, in_splits, out_splits)
    tiled.bias = nn.Parameter(linear.bias.detach().clone())  # from_linear shares it
    return linear, tiled


def weight_grad(tiled: Any) -> Tensor:
    grads: Tensor = tiled.joined([tile.weight.grad for tile in tiled.tiles])
    return grads


@pytest.mark.parametrize("splits", list(itertools.product((1, 2, 3), repeat=2)))
def test_outputs_and_all_gradients_are_those_of_the_whole_layer(splits: tuple[int, int]) -> None:
    linear, tiled = pair((23, 29), *splits)
    x = torch.randn(2, 3, 23)
    a, b, upstream = x.clone().requires_grad_(), x.clone().requires_grad_(), torch.randn(2, 3, 29)
    want, got = linear(a), tiled(b)
    want.backward(upstream)
    got.backward(upstream, retain_graph=True)
    close = {"rtol": 1e-5, "atol": 1e-6}
    pairs = [(got, want), (b.grad, a.grad), (weight_grad(tiled), linear.weight.grad), (tiled.bias.grad, linear.bias.grad)]
    for one, other in pairs:
        torch.testing.assert_close(one, other, **close)
    got.backward(upstream)  # once more
    torch.testing.assert_close(b.grad, 2 * a.grad, **close)
    again = copy.deepcopy(tiled).requires_grad_(False)
    assert not again(x).requires_grad
    again(b).sum().backward()
    checkpoint(tiled, x, use_reentrant=False).sum().backward()


def test_16_bit_layers_sum_over_tiles_in_fp32() -> None:
    linear, tiled = pair((192, 160), 3, 2, dtype=BF16)
    x, upstream = torch.randn(7, 192).bfloat16(), torch.randn(7, 160).bfloat16()
    a, b = x.clone().requires_grad_(), x.double().requires_grad_()
    got, exact = tiled(a), copy.deepcopy(linear).double()
    want = exact(b)
    got.backward(upstream)
    want.backward(upstream.double())
    pairs = [(got, want), (a.grad, b.grad), (weight_grad(tiled), exact.weight.grad), (tiled.bias.grad, exact.bias.grad)]
    for one, other in pairs:  # one rounding to bf16, and no more
        assert float((one.detach().double() - other.detach()).norm() / other.detach().norm()) < 2**-9
    with torch.autocast("cpu", BF16):
        assert TiledLinear(48, 40, in_splits=2)(torch.randn(3, 48)).dtype == BF16


def test_empty_batches_and_layers_work() -> None:
    empty = torch.randn(3, 0, 130, requires_grad=True)
    TiledLinear(130, 70, in_splits=2, out_splits=2)(empty).sum().backward()
    assert empty.grad is not None
    assert torch.equal(TiledLinear(5, 0)(torch.ones(2, 5)), torch.empty(2, 0))


def test_state_is_that_of_linear_both_ways() -> None:
    model = nn.Sequential(TiledLinear(4, 6, out_splits=2), nn.ReLU(), TiledLinear(6, 3, bias=False, in_splits=2))
    plain = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3, bias=False))
    assert list(model.state_dict()) == list(plain.state_dict())
    plain.load_state_dict(model.state_dict())
    model.load_state_dict(nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3, bias=False)).state_dict())
    model.load_state_dict(plain.state_dict(), assign=True)
    assert all(torch.equal(value, plain.state_dict()[name]) for name, value in model.state_dict().items())
    with pytest.raises(RuntimeError, match=r"size mismatch for 0\.weight"):
        model.load_state_dict({**plain.state_dict(), "0.weight": torch.zeros(7, 5)})
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "0\.weight"'):
        model.load_state_dict({name: value for name, value in plain.state_dict().items() if name != "0.weight"})


def test_what_is_written_to_the_weight_is_written_to_the_tiles() -> None:
    linear, tiled = pair((130, 200), 2, 3)
    want = linear.weight
    with torch.no_grad():
        for write in (
            nn.init.eye_,
            lambda weight: nn.init.constant_(tensor=weight, val=3.0),
            lambda weight: weight.data[:9].fill_(2),
            lambda weight: weight.data.view(-1)[300:].mul_(2),
            lambda weight: nn.init.zeros_(weight[70]),
            lambda weight: torch.mul(torch.ones(200, 130), 4, out=weight.data),
            lambda weight: weight.data[torch.tensor([1, 2])].zero_(),  # a copy
        ):
            write(want), write(tiled.weight)
            assert torch.equal(tiled.weight, want)
        tiled.weight *= 2
        tiled.weight[3] = 1
    assert float(tiled.tiles[0].weight[0, 0]) == 8 and tiled.tiles[0].weight[3].eq(1).all()
    versions = [tile.weight._version for tile in tiled.tiles]
    assert type(torch.zeros(200, 130).add_(tiled.weight)) is Tensor
    assert versions == [tile.weight._version for tile in tiled.tiles]
    with pytest.raises(AttributeError, match="cannot be replaced"):
        tiled.weight = nn.Parameter(want)
    with pytest.raises(AttributeError, match="cannot be replaced"):
        tiled.weight = tiled.weight[:9]
    with pytest.raises(RuntimeError, match="are set by tile"):
        tiled.weight.data = want
    nn.functional.linear(torch.ones(5, 130), tiled.weight).sum().backward()
    assert weight_grad(tiled).eq(5).all()


def test_what_cannot_be_tiled_is_refused_with_the_rule() -> None:
    tied = nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 50, bias=False))
    tied[1].weight = tied[0].weight
    held = nn.Sequential(nn.Linear(32, 32))
    optimizer = zk.ZeroOptimizer(held, torch.optim.SGD(held.parameters(), lr=0.1))
    makes: list[tuple[Any, type[Exception], str]] = [
        (lambda: TiledLinear(4, 4, in_splits=5), ValueError, "in_splits must be between 1 and"),
        (lambda: TiledLinear(4, 4)(torch.ones(2, 5)), ValueError, "must have 4 features"),
        (lambda: TiledLinear(4, 4)(torch.ones(2, 4, dtype=BF16)), ValueError, "weight's precision"),
        (lambda: TiledLinear(4, 4).double()(torch.ones(2, 4).double()), ValueError, "fp32, bf16 or fp16"),
        (lambda: TiledLinear.from_linear(nn.Bilinear(2, 2, 2)), TypeError, "torch.nn.Linear"),  # type: ignore[arg-type]
        (lambda: TiledLinear.from_linear(nn.Linear(2, 2), out_splits=3), ValueError, "out_splits must be"),
        (lambda: zk.tile_linears(nn.Linear(8, 8), 16), ValueError, "the model itself"),
        (lambda: zk.tile_linears(nn.Sequential(nn.Linear(8, 8)), 0), ValueError, "max_tile_nbytes"),
        (lambda: zk.tile_linears(nn.Sequential(nn.Linear(8, 8).double()), 16), ValueError, r"'0' is torch\.float64"),
        (lambda: zk.tile_linears(tied, 100), ValueError, r"'1' is tied \(0.weight, 1.weight\)"),
        (lambda: zk.tile_linears(held, 100), ValueError, "held by a ZeroOptimizer"),
    ]
    for make, error, says in makes:
        with pytest.raises(error, match=says):
            make()
    assert type(tied[1]) is type(held[0]) is nn.Linear
    optimizer.close()


def test_tile_linears_replaces_what_is_too_large_and_changes_no_result(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.ModuleDict({"a": nn.Linear(256, 64)})["a"], nn.Linear(64, 8))
    model[0].register_forward_hook(lambda _module, _args, output: output * 2)
    x = torch.randn(3, 64)
    want = model(x)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    assert zk.tile_linears(model, 128 * 64 * 4) == ["0", "2"]
    assert all(tile.weight.nbytes <= 128 * 64 * 4 for tile in model.modules() if isinstance(tile, LinearTile))
    torch.testing.assert_close(model(x), want)
    zk.load_pretrained(model, tmp_path)
    torch.testing.assert_close(model(x), want)
    shared = nn.Linear(16, 16)
    both = nn.ModuleList([nn.Sequential(shared), nn.Sequential(shared)])
    assert zk.tile_linears(both, 256) == ["0.0"] and both[0][0] is both[1][0]


def test_tiles_of_a_deferred_model_have_the_values_of_plain_construction(monkeypatch: pytest.MonkeyPatch) -> None:
    def build() -> nn.Module:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(16, 48), nn.ReLU(), nn.Linear(48, 4))
        zk.tile_linears(model, 16 * 16 * 4)
        return model

    monkeypatch.setattr(deferred, "SMALL", 16)
    plain = build()
    with zk.deferred_init("cpu"):
        model = build()
        late = nn.Sequential(nn.Linear(16, 48))
    optimizer = zk.ZeroOptimizer(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=1)
    assert all(map(torch.equal, model.parameters(), plain.parameters()))
    optimizer.close()
    with pytest.raises(ValueError, match=r"inside zk\.deferred_init"):
        zk.tile_linears(late, 64)


# ---- with a ZeroOptimizer --------------------------------------------------------------------------------


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList()
        for _ in range(2):
            wide, deep = TiledLinear(24, 40, in_splits=2, out_splits=3), TiledLinear(40, 24, in_splits=3)
            self.blocks.append(nn.Sequential(nn.LayerNorm(24), wide, nn.GELU(), deep))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False) if block is self.blocks[1] else x + block(x)
        return x


def train(model: nn.Module, optimizer: torch.optim.Optimizer, part: slice) -> None:
    draws = torch.Generator().manual_seed(5)
    for _ in range(2):
        model(torch.randn(4, 24, generator=draws)[part]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def tiers(case: tuple[int, str, str]) -> str:
    """Train on this rank's part of the batch: "" if all have what the plain model has on the whole."""
    prefetch, tier, folder = case
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    torch.manual_seed(0)
    model = Mlp()
    plain = copy.deepcopy(model)
    place = {"param_tier": tier, "optimizer_tier": tier, "nvme_path": folder}
    optimizer = zk.ZeroOptimizer(model, torch.optim.AdamW(model.parameters(), lr=1e-2), stage=3, prefetch=prefetch, **place)
    units = [store.unit for store in optimizer._runtime.stores]
    train(model, optimizer, slice(rank, None, size))
    train(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2), slice(None))
    with zk.gather(model.parameters()):
        worst = max((a - b).abs().max().item() for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    optimizer.close()
    tiles = sum(isinstance(unit.module, LinearTile) for unit in units)
    return "" if worst < 1e-5 and tiles == 18 else f"parameters differ by {worst}, {tiles} tiles are units"


def test_quick_tiles_train_at_stage_3_as_the_plain_model_does(tmp_path: Path) -> None:
    assert tiers((0, "host", str(tmp_path))) == ""


def test_tiles_train_over_two_ranks_as_the_plain_model_does(tmp_path: Path) -> None:
    assert run_world(2, tiers, [(1, "nvme", str(tmp_path))]) == [["", ""]]


def test_one_tile_at_a_time_is_gathered_in_forward_and_in_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(TiledLinear(64, 64, bias=False, in_splits=2, out_splits=4), TiledLinear(64, 64, bias=False, in_splits=4, out_splits=2))
    optimizer = zk.ZeroOptimizer(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=3, param_tier="host", prefetch=0)
    product, most = kernels.tiled_matmul, {"forward": 0, "backward": 0}
    phase = "forward"

    def watched(*args: Any, **kwargs: Any) -> None:
        product(*args, **kwargs)
        most[phase] = max(most[phase], sum(store.full is not None for store in optimizer._runtime.stores))

    monkeypatch.setattr(kernels, "tiled_matmul", watched)
    for _ in range(2):
        phase = "forward"
        loss = model(torch.randn(3, 64)).sum()
        phase = "backward"
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert most == {"forward": 1, "backward": 1}
    optimizer.close()
