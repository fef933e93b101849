"""TiledLinear against nn.Linear: values, gradients, state, and what is in memory at once."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zk
from tests.models import DEVICE
from tests.world import run_world
from zk import kernels
from zk.checkpoint.export import export
from zk.nn.tiled_linear import TiledLinear, cuts
from zk.nn.tiles import Tile

BF16 = torch.bfloat16


def pair(
    in_features: int, out_features: int, in_splits: int, out_splits: int, bias: bool = True, dtype: torch.dtype = torch.float32
) -> tuple[nn.Linear, TiledLinear]:
    torch.manual_seed(in_features * out_features)
    linear = nn.Linear(in_features, out_features, bias=bias, dtype=dtype).to(DEVICE)
    tiled = TiledLinear.from_linear(linear, in_splits, out_splits)
    if bias:
        tiled.bias = nn.Parameter(linear.bias.detach().clone())  # from_linear shares it
    return linear, tiled


def weight_grad(tiled: TiledLinear) -> Tensor:
    whole = tiled.tiles[0].weight.new_full((tiled.out_features, tiled.in_features), float("nan"))
    for tile in tiled.tiles:
        whole[tile.rows, tile.columns] = tile.weight.grad
    return whole


# each number of tiles; features that they divide, and that they do not
SHAPES = [
    *((shape, (2, 4)) for shape in ((32, 32), (29, 23))),
    *(((23, 29), splits) for splits in itertools.product((1, 2, 3, 4), repeat=2)),
]


@pytest.mark.parametrize(("shape", "splits"), SHAPES)
def test_outputs_and_all_gradients_are_those_of_the_whole_layer(shape, splits):
    compare(shape, splits, bias=sum(splits) % 2 == 0, leading=(2, 3) if splits[0] % 2 else (5,))


@pytest.mark.device_only
@pytest.mark.parametrize("splits", [(1, 1), (3, 2), (2, 4)])
@pytest.mark.parametrize("bias", (True, False))
def test_on_a_gpu_outputs_and_all_gradients_are_those_of_the_whole_layer(splits, bias):
    compare((23, 29), splits, bias, (2, 3))


def compare(shape, splits, bias, leading):
    linear, tiled = pair(*shape, *splits, bias=bias)
    x = torch.randn(*leading, shape[0], device=DEVICE)
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    upstream = torch.randn(*leading, shape[1], device=DEVICE)
    want, got = linear(a), tiled(b)
    want.backward(upstream)
    got.backward(upstream)
    assert len(tiled.tiles) == splits[0] * splits[1]
    close = {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(got, want, **close)
    torch.testing.assert_close(b.grad, a.grad, **close)
    torch.testing.assert_close(weight_grad(tiled), linear.weight.grad, **close)
    if bias:
        torch.testing.assert_close(tiled.bias.grad, linear.bias.grad, **close)


@pytest.mark.device
@pytest.mark.parametrize("splits", [(1, 3), (3, 1), (3, 2)])
def test_16_bit_layers_sum_over_tiles_in_fp32(splits):
    linear, tiled = pair(192, 160, *splits, dtype=BF16)
    x = torch.randn(7, 192, device=DEVICE).bfloat16()
    upstream = torch.randn(7, 160, device=DEVICE).bfloat16()
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    got = tiled(b)
    got.backward(upstream)
    exact_x, exact = x.double().requires_grad_(), copy.deepcopy(linear).double()
    want = exact(exact_x)
    want.backward(upstream.double())
    linear(a).backward(upstream)

    def error(value: Tensor, reference: Tensor) -> float:
        return float((value.detach().double() - reference.detach()).norm() / reference.detach().norm())

    # one rounding to bf16, and no more: 2^-9 of each value at most, about half of that as a norm
    assert error(got, want) < 2**-9
    assert error(b.grad, exact_x.grad) < 2**-9
    assert error(weight_grad(tiled), exact.weight.grad) < 2**-9
    assert error(tiled.bias.grad, exact.bias.grad) < 2**-9


@pytest.mark.device
def test_autocast_computes_in_16_bits_and_leaves_fp32_gradients():
    linear, tiled = pair(48, 40, 2, 3)
    x = torch.randn(6, 48, device=DEVICE)
    with torch.autocast(DEVICE.type, BF16):
        want, got = linear(x), tiled(x)
    assert got.dtype == BF16
    want.float().square().sum().backward()
    got.float().square().sum().backward()
    assert all(tile.weight.grad.dtype == torch.float32 for tile in tiled.tiles)
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(weight_grad(tiled), linear.weight.grad, rtol=3e-2, atol=3e-1)


@pytest.mark.device
@pytest.mark.parametrize("reentrant", (True, False))
def test_what_a_checkpoint_computes_again_has_the_precision_of_forward(reentrant):
    """The sums of a layer in tiles are fp32 where the model computes in bf16; so is what other modules are given in fp32."""

    class Scaled(nn.Linear):
        def forward(self, x, scale):
            return super().forward((x * scale).to(x.dtype))

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.tiled, self.scaled = zk.TiledLinear(8, 8, in_splits=2, out_splits=2), Scaled(8, 8)

        def forward(self, x):
            return x + self.scaled(torch.tanh(self.tiled(x)), x.float().mean() * 1.00001)

    class Model(nn.Module):
        def __init__(self, checkpoints):
            super().__init__()
            self.checkpoints, self.blocks = checkpoints, nn.ModuleList(Block() for _ in range(2))

        def forward(self, x):
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=reentrant) if self.checkpoints else block(x)
            return x

    x, found = torch.randn(4, 8, generator=torch.Generator().manual_seed(0)).to(DEVICE), []
    for checkpoints in (False, True):
        torch.manual_seed(0)
        model = Model(checkpoints).to(DEVICE)
        with zk.ZeroOptimizer(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=2, dtype="bf16"):
            model(x.clone().requires_grad_()).float().square().mean().backward()
            found.append([param.grad.clone() for param in model.parameters()])
    assert all(torch.equal(first, second) for first, second in zip(*found, strict=True))


@pytest.mark.device
@pytest.mark.parametrize("reentrant", (True, False))
def test_checkpointed_layers_give_the_same_gradients(reentrant):
    _, tiled = pair(24, 20, 2, 2)
    x = torch.randn(4, 24, device=DEVICE, requires_grad=True)
    tiled(x).square().sum().backward()
    want = [x.grad.clone(), *(param.grad.clone() for param in tiled.parameters())]
    x.grad = None
    tiled.zero_grad()
    checkpoint(tiled, x, use_reentrant=reentrant).square().sum().backward()
    assert all(map(torch.equal, [x.grad, *(param.grad for param in tiled.parameters())], want))


def test_split_inputs_and_outputs_are_lists():
    linear, _ = pair(23, 29, 1, 1)
    tiled = TiledLinear.from_linear(linear, 3, 2, input_is_already_split=True, combine_out_splits=False)
    x = torch.randn(2, 5, 23, requires_grad=True)
    pieces = [x[..., cut] for cut in cuts(23, 3)]
    outputs = tiled(pieces)
    assert [out.shape for out in outputs] == [(2, 5, cut.stop - cut.start) for cut in cuts(29, 2)]
    torch.testing.assert_close(torch.cat(outputs, -1), linear(x))
    outputs[1].sum().backward()  # the other output has no gradient
    expected = torch.zeros(29)
    expected[cuts(29, 2)[1]] = 10
    assert torch.equal(tiled.bias.grad, expected)
    assert not tiled.tiles[0].weight.grad.any() and tiled.tiles[3].weight.grad.any()


def test_frozen_weights_and_inputs_without_gradient_get_none():
    _, tiled = pair(8, 8, 2, 2)
    x = torch.randn(3, 8)
    assert tiled(x).requires_grad
    tiled(x).sum().backward()
    assert tiled.tiles[0].weight.grad is not None
    tiled.zero_grad()
    tiled.requires_grad_(False)
    assert not tiled(x).requires_grad
    x.requires_grad_()
    tiled(x).sum().backward()
    assert x.grad is not None and tiled.tiles[0].weight.grad is None
    with torch.no_grad():
        assert not tiled(x).requires_grad


def test_backward_twice_and_two_calls_before_it():
    linear, tiled = pair(12, 10, 2, 2)
    a, b = torch.randn(3, 12, requires_grad=True), torch.randn(4, 12, requires_grad=True)
    loss = tiled(a).square().sum() + tiled(b).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    want = linear(a).square().sum() + linear(b).sum()
    torch.testing.assert_close(weight_grad(tiled), 2 * torch.autograd.grad(want, linear.weight)[0], rtol=1e-5, atol=1e-5)


def test_state_is_that_of_linear_both_ways():
    linear, tiled = pair(23, 29, 3, 2)
    state = tiled.state_dict()
    assert list(state) == ["weight", "bias"] and torch.equal(state["weight"], linear.weight)
    other = nn.Linear(23, 29)
    fresh = TiledLinear(23, 29, in_splits=4, out_splits=3)
    fresh.load_state_dict(other.state_dict())
    assert torch.equal(fresh.weight, other.weight) and torch.equal(fresh.bias, other.bias)
    model = nn.Sequential(TiledLinear(4, 6, out_splits=2), nn.ReLU(), TiledLinear(6, 3, bias=False, in_splits=2))
    plain = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3, bias=False))
    assert plain.load_state_dict(model.state_dict()) is not None
    model.load_state_dict(plain.state_dict())
    with pytest.raises(RuntimeError, match=r"size mismatch for 0\.weight"):
        model.load_state_dict({**plain.state_dict(), "0.weight": torch.zeros(6, 5)})


def test_a_new_layer_has_the_distribution_of_linear():
    tiled = TiledLinear(400, 300, in_splits=3, out_splits=2)
    bound = 1 / 20
    assert tiled.weight.abs().max() <= bound and abs(tiled.weight.std().item() - bound / 3**0.5) < 1e-3
    assert tiled.bias.abs().max() <= bound
    assert [cut.start for cut in cuts(400, 3)] == [0, 128, 256]  # whole grains where there is room


def test_the_weight_as_an_attribute_is_differentiable():
    linear, tiled = pair(9, 7, 2, 2)
    x = torch.randn(5, 9)
    nn.functional.linear(x, tiled.weight, tiled.bias).square().sum().backward()
    linear(x).square().sum().backward()
    torch.testing.assert_close(weight_grad(tiled), linear.weight.grad)


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: TiledLinear(4, 4, in_splits=5), ValueError, "in_splits must be between 1 and"),
        (lambda: TiledLinear(4, 4, out_splits=0), ValueError, "out_splits must be between 1 and"),
        (lambda: TiledLinear(4, 4)(torch.ones(2, 5)), ValueError, "must have 4 features"),
        (lambda: TiledLinear(4, 4)([torch.ones(2, 4)]), TypeError, "one tensor"),
        (lambda: TiledLinear(4, 4, in_splits=2, input_is_already_split=True)(torch.ones(2, 4)), ValueError, "a sequence of tensors"),
        (lambda: TiledLinear(4, 4)(torch.ones(2, 4, dtype=BF16)), ValueError, "weight's precision"),
        (lambda: TiledLinear.from_linear(nn.Bilinear(2, 2, 2)), TypeError, "torch.nn.Linear"),
        (lambda: TiledLinear.from_linear(nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))), TypeError, "Parametrized"),
        (lambda: zk.tile_linears(nn.Linear(8, 8), 16), ValueError, "the model itself"),
        (lambda: zk.tile_linears(nn.Sequential(nn.Linear(8, 8)), 0), ValueError, "max_tile_nbytes"),
    ],
)
def test_what_cannot_be_tiled_is_refused_with_the_rule(make, error, says):
    with pytest.raises(error, match=says):
        make()


# ---- tile_linears ------------------------------------------------------------------------------------------------------------


def test_tile_linears_replaces_what_is_too_large_and_changes_no_result():
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.ModuleDict({"a": nn.Linear(256, 64)})["a"], nn.Linear(64, 8))
    x = torch.randn(3, 64)
    want = model(x)
    names = zk.tile_linears(model, 128 * 64 * 4)
    assert names == ["0", "2"]
    assert [type(module).__name__ for module in model] == ["TiledLinear", "GELU", "TiledLinear", "Linear"]
    assert all(tile.weight.nbytes <= 128 * 64 * 4 for tile in model.modules() if isinstance(tile, Tile))
    torch.testing.assert_close(model(x), want)
    small = nn.Sequential(nn.Linear(100, 3))
    assert zk.tile_linears(small, 40) == ["0"]
    assert max(tile.weight.nbytes for tile in small[0].tiles) <= 40


def test_hooks_of_a_layer_stay_with_its_tiles():
    model, seen = nn.Sequential(nn.Linear(16, 64), nn.Linear(64, 16)), []
    handles = [
        model[0].register_forward_hook(lambda _module, _args, kwargs, output: output * 2, with_kwargs=True),
        model[0].register_full_backward_hook(lambda _module, _before, after: seen.append(tuple(after[0].shape))),
    ]
    x = torch.randn(3, 16)
    want = model(x)
    assert zk.tile_linears(model, 1024) == ["0", "1"]
    got = model(x)
    torch.testing.assert_close(got, want)
    got.sum().backward()
    assert seen == [(3, 64)]
    for handle in handles:
        handle.remove()
    assert not model[0]._forward_hooks and not model[0]._backward_hooks


def test_tile_linears_refuses_tied_weights_and_names_them():
    model = nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 50, bias=False))
    model[1].weight = model[0].weight
    with pytest.raises(ValueError, match=r"'1' is tied \(0.weight, 1.weight\)"):
        zk.tile_linears(model, 100)
    assert type(model[1]) is nn.Linear


def test_a_layer_used_in_two_places_stays_one():
    shared = nn.Linear(16, 16)
    model = nn.ModuleList([nn.Sequential(shared), nn.Sequential(shared)])
    assert zk.tile_linears(model, 256) == ["0.0"]
    assert model[0][0] is model[1][0] and isinstance(model[0][0], TiledLinear)


@pytest.mark.device
def test_tiles_of_a_deferred_model_have_the_values_of_plain_construction():
    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(16, 48), nn.ReLU(), nn.Linear(48, 4))
        zk.tile_linears(model, 16 * 16 * 4)
        return model

    torch.manual_seed(3)
    plain = build()
    torch.manual_seed(3)
    with zk.deferred_init():
        model = build()
    optimizer = zk.ZeroOptimizer(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=1)
    assert all(torch.equal(param.cpu(), other) for param, other in zip(model.parameters(), plain.parameters(), strict=True))
    optimizer.close()
    with zk.deferred_init():
        late = nn.Sequential(nn.Linear(16, 48))
    with pytest.raises(ValueError, match=r"inside zk\.deferred_init"):
        zk.tile_linears(late, 64)


@pytest.mark.device
def test_safetensors_of_the_whole_layer_are_read_and_written(tmp_path):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 5, bias=False))
    save_file(plain.state_dict(), tmp_path / "model.safetensors")
    for deferred in (False, True):
        if deferred:
            with zk.deferred_init():
                model = nn.Sequential(TiledLinear(20, 32, in_splits=2, out_splits=3), nn.ReLU(), TiledLinear(32, 5, bias=False, out_splits=2))
        else:
            model = nn.Sequential(TiledLinear(20, 32, in_splits=2, out_splits=3), nn.ReLU(), TiledLinear(32, 5, bias=False, out_splits=2))
        zk.load_pretrained(model, tmp_path)
        nvme = tmp_path / f"nvme{deferred}"
        nvme.mkdir()
        with zk.ZeroOptimizer(
            model, torch.optim.SGD(model.parameters(), lr=0.1), stage=3, param_tier="nvme", optimizer_tier="nvme", nvme_path=nvme
        ) as optimizer:
            x = torch.randn(2, 20)
            torch.testing.assert_close(model(x.to(next(model.parameters()).device)).cpu(), plain(x))
            saved = optimizer.consolidated_state_dict()
            assert len(saved) == 3 and all(torch.equal(saved[name], value) for name, value in plain.state_dict().items())
            assert all(torch.equal(value.cpu(), other) for value, other in zip(model.state_dict().values(), plain.state_dict().values(), strict=True))
    with pytest.raises(ValueError, match=r"0.weight is \(32, 20\)"):
        zk.load_pretrained(nn.Sequential(TiledLinear(21, 32, out_splits=2)), tmp_path)


# ---- stage 3 -----------------------------------------------------------------------------------------------------------------


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(24), TiledLinear(24, 40, in_splits=2, out_splits=3), nn.GELU(), TiledLinear(40, 24, in_splits=3, out_splits=2))
            for _ in range(2)
        )
        self.to(DEVICE)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def train(steps: int, model: nn.Module, optimizer: torch.optim.Optimizer, part: slice = slice(None)) -> list[float]:
    draws = torch.Generator().manual_seed(5)
    losses = []
    for _ in range(steps):
        x = torch.randn(4, 24, generator=draws)[part].to(DEVICE)
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def tiers(case: tuple[int, str, str]) -> str:
    """Train on this rank's part of the batch; "" if every rank has what the plain model has on the whole batch."""
    prefetch, tier, folder = case
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    torch.manual_seed(0)
    model = Mlp()
    plain = copy.deepcopy(model)
    adam = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    place = {"param_tier": tier, "optimizer_tier": tier, **({"nvme_path": folder} if tier == "nvme" else {})}
    with zk.ZeroOptimizer(model, torch.optim.AdamW(model.parameters(), lr=1e-2), stage=3, prefetch=prefetch, **place) as optimizer:
        train(2, model, optimizer, slice(rank, None, size))
        train(2, plain, adam)
        with zk.gather(model.parameters()):
            worst = max((a - b).abs().max().item() for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    return "" if worst < 1e-5 else f"parameters differ by {worst}"


CASES = ((0, "host"), (2, "nvme"))


@pytest.mark.parametrize("case", (CASES[0], pytest.param(CASES[1], marks=pytest.mark.device)))
def test_tiles_train_at_stage_3_as_the_plain_model_does(case, tmp_path):
    assert tiers((*case, str(tmp_path))) == ""


def test_tiles_train_over_two_ranks_as_the_plain_model_does(tmp_path):
    cases = [(*case, str(tmp_path)) for case in CASES]
    for case, results in zip(cases, run_world(2, tiers, cases), strict=True):
        assert results == ["", ""], case


def test_one_tile_at_a_time_is_gathered_in_forward_and_in_backward(tmp_path, monkeypatch):
    model = nn.Sequential(TiledLinear(64, 64, bias=False, in_splits=2, out_splits=4), TiledLinear(64, 64, bias=False, in_splits=4, out_splits=2))
    model.to(DEVICE)
    optimizer = zk.ZeroOptimizer(
        model, torch.optim.SGD(model.parameters(), lr=0.1), stage=3, param_tier="nvme", optimizer_tier="nvme", nvme_path=tmp_path, prefetch=0
    )
    most = {"forward": 0.0, "backward": 0.0}
    phase = "forward"
    product = kernels.tiled_matmul

    def watched(*args: object, **kwargs: object) -> None:
        product(*args, **kwargs)
        most[phase] = max(most[phase], optimizer.metrics()["device_gathered_nbytes"])

    monkeypatch.setattr(kernels, "tiled_matmul", watched)
    for _ in range(2):
        phase = "forward"
        loss = model(torch.randn(3, 64, device=DEVICE)).sum()
        phase = "backward"
        loss.backward()
        optimizer.step()
    tile = 64 * 64 * 4 // 8
    assert most == {"forward": tile, "backward": tile}
    optimizer.close()


def test_a_compiled_model_has_the_same_gradients():
    _, tiled = pair(12, 10, 2, 2)
    model = nn.Sequential(tiled, nn.ReLU())
    x = torch.randn(3, 12)
    model(x).sum().backward()
    want = [param.grad.clone() for param in model.parameters()]
    model.zero_grad()
    torch.compile(model, backend="aot_eager")(x).sum().backward()
    assert all(torch.equal(param.grad, grad) for param, grad in zip(model.parameters(), want, strict=True))


@pytest.mark.parametrize("dtype", (torch.float32, BF16))
@pytest.mark.parametrize("shape", [(0, 130), (3, 0, 130)])
def test_an_empty_batch_gives_an_empty_output_and_zero_gradients(dtype, shape):
    tiled = TiledLinear(130, 70, in_splits=2, out_splits=2, dtype=dtype)
    x = torch.randn(*shape, dtype=dtype, requires_grad=True)
    out = tiled(x)
    assert out.shape == (*shape[:-1], 70)
    out.sum().backward()
    assert x.grad.shape == shape and not any(param.grad.any() for param in tiled.parameters())


def test_layers_without_features_are_those_of_linear():
    assert torch.equal(TiledLinear(5, 0)(torch.ones(2, 5)), torch.empty(2, 0))
    layer = TiledLinear(0, 5)
    assert torch.equal(layer(torch.ones(2, 0)), layer.bias.expand(2, 5))
    assert TiledLinear(4, 6, device="meta")(torch.empty(2, 4, device="meta")).shape == (2, 6)


def test_what_is_missing_in_a_state_is_reported_as_linear_would():
    model = nn.Sequential(TiledLinear(4, 6, out_splits=2))
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "0\.weight"'):
        model.load_state_dict({"0.bias": torch.zeros(6)})
    assert model.load_state_dict({"0.bias": torch.zeros(6)}, strict=False).missing_keys == ["0.weight"]
    model.load_state_dict(nn.Sequential(nn.Linear(4, 6)).state_dict(), assign=True)
    assert all(tile.weight.is_contiguous() and tile.weight.untyped_storage().nbytes() == tile.weight.nbytes for tile in model[0].tiles)


def test_models_that_are_held_and_precisions_that_no_kernel_has_are_refused():
    model = nn.Sequential(nn.Linear(32, 32))
    with zk.ZeroOptimizer(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=1), pytest.raises(ValueError, match="held by a ZeroOptimizer"):
        zk.tile_linears(model, 1024)
    with pytest.raises(ValueError, match=r"'0' is torch\.float64"):
        zk.tile_linears(nn.Sequential(nn.Linear(32, 32, dtype=torch.float64)), 1024)
    with pytest.raises(TypeError, match="computes in fp32, bf16 or fp16"):
        TiledLinear(4, 4).double()(torch.ones(2, 4, dtype=torch.float64))


# ---- a linear layer like others ------------------------------------------------------------------------------------------------------


def two_layers() -> tuple[nn.Sequential, nn.Sequential]:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(130, 200), nn.Tanh(), nn.Linear(200, 70))
    tiled = copy.deepcopy(plain)
    zk.tile_linears(tiled, 8000)
    return plain, tiled


def test_what_is_written_to_the_weight_is_written_to_the_tiles() -> None:
    plain, tiled = two_layers()
    layer, want = tiled[0], plain[0].weight.detach().clone()
    assert isinstance(layer, nn.Linear) and len(layer.tiles) > 4
    writes = (
        nn.init.zeros_,
        lambda weight: nn.init.constant_(tensor=weight, val=3.0),
        lambda weight: weight.data.fill_(2),
        lambda weight: weight.data.copy_(want),
        lambda weight: weight.data.mul_(2),
    )
    for write in writes:
        write(plain[0].weight), write(layer.weight)
        assert torch.equal(layer.weight, plain[0].weight)
    layer.weight.data = want
    with torch.no_grad():
        layer.weight[3] = 1
        layer.weight *= 2
        layer.weight[3] = want[3] * 2
        layer.weight.div_(2)
    assert torch.equal(layer.weight, want) and type(layer.weight * 1) is Tensor
    layer.weight.requires_grad_(False)
    assert not any(tile.weight.requires_grad for tile in layer.tiles) and layer.bias.requires_grad
    layer.weight.requires_grad = True
    assert all(tile.weight.requires_grad for tile in layer.tiles)
    with pytest.raises(RuntimeError, match=r"within torch\.no_grad"):
        layer.weight.add_(1)
    with pytest.raises(AttributeError, match="cannot be replaced"):
        layer.weight = nn.Parameter(want)


def test_what_takes_the_weight_and_writes_elsewhere_leaves_it_alone() -> None:
    plain, tiled = two_layers()
    layer, want = tiled[0], plain[0].weight
    versions = [tile.weight._version for tile in layer.tiles]
    found = torch.zeros_like(want)
    found.copy_(layer.weight)
    with torch.no_grad():
        found += layer.weight
        added = found.add_(layer.weight)
        found[0] = layer.weight[1]
    assert added is found and torch.equal(found[1:], 3 * want.detach()[1:]) and torch.equal(found[0], want[1])
    assert torch.equal(layer.weight, want) and versions == [tile.weight._version for tile in layer.tiles]
    for made in (nn.init.eye_, lambda weight: torch.mul(found.detach(), 2, out=weight.data)):
        made(want), made(layer.weight)
        assert torch.equal(layer.weight, want)


def test_what_is_written_to_rows_of_the_weight_is_written_to_the_tiles() -> None:
    plain, tiled = two_layers()
    weight = plain[0].weight
    for write in (
        lambda weight: weight.data[:9].fill_(2),
        lambda weight: weight.data[3][5:7].copy_(torch.ones(2)),
        lambda weight: nn.init.zeros_(weight[70]),
        lambda weight: weight[80:90].data.mul_(3),
        lambda weight: weight.data.view(-1)[300:].mul_(2),
        lambda weight: weight.data.narrow(1, 64, 3).neg_(),
        lambda weight: weight.data[torch.tensor([1, 2])].zero_(),  # a copy
    ):
        with torch.no_grad():
            write(weight), write(tiled[0].weight)
        assert torch.equal(tiled[0].weight, weight)
    with pytest.raises(AttributeError, match="cannot be replaced"):
        tiled[0].weight = tiled[0].weight[:9]
    row = tiled[0].weight[3].detach().requires_grad_()
    assert row.requires_grad and row.is_leaf and row.grad is None
    (tiled[0].weight[:2] * 2).sum().backward()
    assert tiled[0].tiles[0].weight.grad.sum() == 2 * 2 * tiled[0].tiles[0].weight.shape[1]


@pytest.mark.parametrize("stage", (2, 3))
def test_a_tiled_model_leaves_zk_with_whole_weights(stage: int, tmp_path: Path) -> None:
    plain, tiled = two_layers()
    adam = torch.optim.AdamW(plain.parameters())
    with zk.ZeroOptimizer(tiled, torch.optim.AdamW(tiled.parameters()), stage=stage) as optimizer:
        for seed in range(3):
            x = torch.randn(4, 130, generator=torch.Generator().manual_seed(seed))
            for model, by in ((tiled, optimizer), (plain, adam)):
                model(x).square().mean().backward()
                if by is optimizer:
                    grad = tiled[0].weight.grad if stage < 3 else None
                else:
                    torch.testing.assert_close(plain[0].weight.grad if grad is None else grad, plain[0].weight.grad)
                by.step()
                by.zero_grad()
        whole = optimizer.consolidated_state_dict()
        assert sorted(optimizer.consolidated_state_dict(names=["0.weight"])) == ["0.weight"]
        optimizer.save_checkpoint(tmp_path / "run")
    export(tmp_path / "run", tmp_path / "out")
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert exported.keys() == whole.keys() == plain.state_dict().keys()
    for name, want in plain.state_dict().items():
        torch.testing.assert_close(whole[name], want, rtol=1e-4, atol=1e-5)
        assert torch.equal(exported[name], whole[name])


def test_state_is_by_tile_and_asking_for_that_of_the_whole_weight_says_so() -> None:
    model = nn.Sequential(TiledLinear(16, 16, out_splits=2), nn.Linear(16, 2))
    optimizer = zk.ZeroOptimizer(model, torch.optim.AdamW(model.parameters()), stage=2)
    model(torch.ones(2, 16)).sum().backward()
    optimizer.step()
    assert optimizer.state[model[0].tiles[0].weight]["exp_avg"].shape == (8, 16)
    with pytest.raises(KeyError, match=r"by tile: optimizer.state\[layer.tiles\[0\].weight\]"):
        optimizer.state[model[0].weight]
