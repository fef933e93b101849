"""TiledLinear against nn.Linear: values, gradients, state; one tile at a time at stage 3."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import zk
from tests.models import DEVICE, descend, gpt, step
from zk import kernels
from zk.nn.tiled_linear import LinearTile, TiledLinear

BF16 = torch.bfloat16


def pair(shape: tuple[int, int], splits: int, bias: bool = True, dtype: torch.dtype = torch.float32) -> tuple[nn.Linear, Any]:
    torch.manual_seed(shape[0] * shape[1])
    linear = nn.Linear(*shape, bias=bias, dtype=dtype).to(DEVICE)
    tiled = TiledLinear.from_linear(linear, splits)
    if bias:
        tiled.bias = nn.Parameter(linear.bias.detach().clone())  # from_linear shares it
    return linear, tiled


def weight_grad(tiled: Any) -> Tensor:
    return torch.cat([tile.weight.grad for tile in tiled.tiles])


@pytest.mark.device
@pytest.mark.parametrize(("shape", "splits", "bias"), [((23, 29), 3, True), ((7, 9), 9, False)])
def test_outputs_and_all_gradients_are_those_of_the_whole_layer(shape: tuple[int, int], splits: int, bias: bool) -> None:
    linear, tiled = pair(shape, splits, bias)
    x, upstream = torch.randn(2, 3, shape[0], device=DEVICE), torch.randn(2, 3, shape[1], device=DEVICE)
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    want, got = linear(a), tiled(b)
    want.backward(upstream)
    got.backward(upstream, retain_graph=True)
    pairs = [(got, want), (b.grad, a.grad), (weight_grad(tiled), linear.weight.grad), *([(tiled.bias.grad, linear.bias.grad)] if bias else [])]
    assert len(tiled.tiles) == splits
    for one, other in pairs:
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    got.backward(upstream)  # once more
    torch.testing.assert_close(b.grad, 2 * a.grad, rtol=1e-5, atol=1e-6)
    again = copy.deepcopy(tiled).requires_grad_(False)
    assert not again(x).requires_grad
    again(b).sum().backward()
    assert again.tiles[0].weight.grad is None
    with torch.no_grad():
        assert not tiled(b).requires_grad


@pytest.mark.device
def test_16_bit_layers_sum_over_tiles_in_fp32_and_autocast_leaves_fp32_gradients() -> None:
    linear, tiled = pair((192, 160), 3, dtype=BF16)
    x, upstream = (torch.randn(7, size, device=DEVICE).bfloat16() for size in (192, 160))
    a, b = x.clone().requires_grad_(), x.double().requires_grad_()
    got, exact = tiled(a), copy.deepcopy(linear).double()
    want = exact(b)
    got.backward(upstream)
    want.backward(upstream.double())
    pairs = [(got, want), (a.grad, b.grad), (weight_grad(tiled), exact.weight.grad), (tiled.bias.grad, exact.bias.grad)]
    for one, other in pairs:  # one rounding to bf16, and no more: 2^-9 of each value at most
        assert float((one.detach().double() - other.detach()).norm() / other.detach().norm()) < 2**-9
    linear, tiled = pair((48, 40), 3)
    x = torch.randn(6, 48, device=DEVICE)
    with torch.autocast(DEVICE.type, BF16):
        want, got = linear(x), tiled(x)
    for loss in (want, got):
        loss.float().square().sum().backward()
    assert got.dtype == BF16 and all(param.grad.dtype == torch.float32 for param in tiled.parameters())
    for one, other in ((got, want), (weight_grad(tiled), linear.weight.grad), (tiled.bias.grad, linear.bias.grad)):
        torch.testing.assert_close(one, other, rtol=3e-2, atol=3e-1 if other.dtype == torch.float32 else 2e-2)


def test_state_is_that_of_linear_both_ways() -> None:
    model = nn.Sequential(TiledLinear(4, 6, out_splits=2), nn.ReLU(), TiledLinear(6, 3, bias=False, out_splits=3))
    plain = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3, bias=False))
    assert sorted(model.state_dict()) == sorted(plain.state_dict())
    plain.load_state_dict(model.state_dict())
    model.load_state_dict(nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3, bias=False)).state_dict())
    model.load_state_dict(plain.state_dict(), assign=True)
    assert all(torch.equal(value, plain.state_dict()[name]) for name, value in model.state_dict().items())
    assert all(tile.weight.untyped_storage().nbytes() == tile.weight.nbytes for tile in model[0].tiles)
    lacking = {name: value for name, value in plain.state_dict().items() if name != "0.weight"}
    mismatch = r"size mismatch for 0\.tiles\.1\.weight"
    for shape, says in ((None, r'Missing key\(s\) in state_dict: "0\.tiles\.0\.weight"'), ((5, 4), mismatch), ((7, 4), mismatch), ((6, 5), "tiles")):
        with pytest.raises(RuntimeError, match=says):
            model.load_state_dict(lacking if shape is None else {**lacking, "0.weight": torch.zeros(shape)})
    _, tiled = pair((130, 200), 3)
    with pytest.raises(AttributeError, match=r"for tile in layer\.tiles: tile\.weight"):
        tiled.weight = nn.Parameter(torch.zeros(200, 130))
    with pytest.raises(AttributeError, match="no attribute 'weight'"):
        nn.init.zeros_(tiled.weight)
    assert isinstance(tiled, nn.Linear) and repr(tiled).startswith("TiledLinear(\n  in_features=130")


def test_what_cannot_be_tiled_is_refused_with_the_rule() -> None:
    tied = nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 50, bias=False))
    tied[1].weight = tied[0].weight
    held = nn.Sequential(nn.Linear(32, 32))
    optimizer = zk.ZeroOptimizer(held, torch.optim.SGD(held.parameters(), lr=0.1))
    makes: list[tuple[Any, type[Exception], str]] = [
        (lambda: TiledLinear(4, 4, out_splits=5), ValueError, "out_splits must be between 1 and"),
        (lambda: TiledLinear(4, 4, out_splits=0), ValueError, "out_splits must be between 1 and"),
        (lambda: TiledLinear(4, 4)(torch.ones(2, 5)), ValueError, "must have 4 features"),
        (lambda: TiledLinear(4, 4)(torch.ones(2, 4, dtype=BF16)), ValueError, "weight's precision"),
        (lambda: TiledLinear(4, 4).double()(torch.ones(2, 4).double()), TypeError, "fp32, bf16 or fp16"),
        (lambda: TiledLinear.from_linear(nn.Bilinear(2, 2, 2)), TypeError, "torch.nn.Linear"),  # type: ignore[arg-type]
        (lambda: TiledLinear.from_linear(nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))), TypeError, "Parametrized"),
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


def test_tile_linears_replaces_what_is_too_large_and_changes_no_result() -> None:
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.Linear(64, 8))
    handle = model[0].register_forward_hook(lambda _module, _args, kwargs, output: output * 2, with_kwargs=True)
    x = torch.randn(3, 64)
    want = model(x)
    assert zk.tile_linears(model, 128 * 64 * 4) == ["0", "2"]
    assert all(tile.weight.nbytes <= 128 * 64 * 4 for tile in model.modules() if isinstance(tile, LinearTile))
    torch.testing.assert_close(model(x), want)
    handle.remove()
    assert not model[0]._forward_hooks
    shared, small = nn.Linear(16, 16), nn.Sequential(nn.Linear(100, 3))
    both = nn.ModuleList([nn.Sequential(shared), nn.Sequential(shared)])
    assert zk.tile_linears(both, 256) == ["0.0"] and both[0][0] is both[1][0]
    assert zk.tile_linears(small, 40) == ["0"] and len(small[0].tiles) == 3, "a tile has one row at least"


@pytest.mark.device
def test_quick_tiles_are_units_and_train_at_stage_3_as_the_plain_model_does(tmp_path: Path) -> None:
    model, plain = gpt("checkpointed"), gpt("checkpointed")
    assert len(zk.tile_linears(model, 2000)) == 8
    inner, theirs = (torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9) for one in (model, plain))
    with zk.ZeroOptimizer(model, inner, stage=3, prefetch=2, param_tier="nvme", optimizer_tier="nvme", nvme_path=tmp_path) as optimizer:
        assert sum(isinstance(store.unit.module, LinearTile) for store in optimizer._runtime.stores) == 20
        for seed in range(2):
            assert step(model, optimizer, seed) == pytest.approx(step(plain, theirs, seed), abs=1e-5)
    torch.testing.assert_close(model.state_dict(), dict(plain.state_dict()), rtol=0, atol=1e-5)


def test_one_tile_at_a_time_is_gathered_in_forward_and_in_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(TiledLinear(64, 64, bias=False, out_splits=8), TiledLinear(64, 64, bias=False, out_splits=4))
    optimizer = zk.ZeroOptimizer(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=3, param_tier="host", prefetch=0)
    product, seen = kernels.tiled_matmul, list[int]()

    def watched(*args: Any, **kwargs: Any) -> None:
        product(*args, **kwargs)
        seen.append(sum(store.full is not None for store in optimizer._runtime.stores))

    monkeypatch.setattr(kernels, "tiled_matmul", watched)
    for _ in range(2):
        descend(optimizer, model(torch.randn(3, 64)).sum())
    assert len(seen) > 40 and {*seen} == {1}
    optimizer.close()


def test_a_tiled_model_takes_whole_weights(tmp_path: Path) -> None:
    plain = nn.Sequential(nn.Linear(130, 200), nn.Tanh(), nn.Linear(200, 70))
    save_file(plain.state_dict(), tmp_path / "model.safetensors")
    with zk.deferred_init("cpu"):
        tiled = nn.Sequential(nn.Linear(130, 200), nn.Tanh(), nn.Linear(200, 70))
        zk.tile_linears(tiled, 8000)
    zk.load_pretrained(tiled, tmp_path)
    with pytest.raises(ValueError, match=r"0.weight is \(200, 130\)"):
        zk.load_pretrained(nn.Sequential(TiledLinear(131, 200, out_splits=2), nn.Tanh(), nn.Linear(200, 70)), tmp_path)
    with zk.ZeroOptimizer(tiled, torch.optim.AdamW(tiled.parameters()), stage=3) as optimizer:
        for _ in range(2):  # as it was made, and read again
            assert all(torch.equal(value, plain.state_dict()[name]) for name, value in tiled.state_dict().items())
            descend(optimizer, tiled(torch.randn(4, 130)).square().mean())
            zk.load_pretrained(tiled, tmp_path)
