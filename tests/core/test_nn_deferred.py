"""Deferred construction: the same bits as plain construction, without memory until a unit is placed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import zk
from tests import models
from tests.models import DEVICE, GPT, train
from tests.world import run_world


class Everything(nn.Module):
    """torch's modules and initializers, and what else constructors do."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(13, 8, padding_idx=2)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)  # deep copies
        self.lstm = nn.LSTM(8, 8)
        self.conv, self.norm, self.groups = nn.Conv2d(3, 4, 3), nn.BatchNorm1d(4), nn.GroupNorm(2, 4)
        self.attention, self.bilinear = nn.MultiheadAttention(8, 2), nn.Bilinear(3, 4, 5)
        self.scaled = nn.Parameter(torch.randn(7, 5) * 0.02)
        self.transposed, self.sliced = nn.Parameter(torch.randn(5, 4).t()), nn.Parameter(torch.eye(4)[1:3])
        self.scalar = nn.Parameter(torch.tensor(0.3))
        for name in ("orthogonal_", "trunc_normal_", "kaiming_normal_", "xavier_uniform_", "dirac_", "eye_"):
            weight = torch.zeros(6, 6, 3) if name == "dirac_" else torch.zeros(6, 6)
            self.register_parameter(name, nn.Parameter(getattr(nn.init, name)(weight)))
        self.sparse = nn.Parameter(nn.init.sparse_(torch.empty(8, 8), 0.3))
        self.register_buffer("angles", torch.arange(10).float() / 3)
        self.register_buffer("mask", torch.ones(4, 4).tril().bool())
        self.rates = [rate.item() for rate in torch.linspace(0, 0.3, 4)]  # a value that construction looks at
        self.half = nn.Linear(8, 8).half()
        self.weighted = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
        self.head = nn.Linear(8, 13, bias=False)
        self.head.weight = self.table.weight
        self.apply(self.initialize)
        with torch.no_grad():
            self.layers[1].weight[0, 1] = 7.0
            self.layers[2].weight *= 0.5

    def initialize(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)


def tensors(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_parameters()) | dict(model.named_buffers())


class ScaledByAChangingNumber(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        scale = torch.tensor(1.0)
        array = np.ones((4, 4), np.float32)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        for layer in self.layers:
            with torch.no_grad():
                layer.weight.mul_(scale)
                layer.weight.add_(torch.from_numpy(array))
            scale *= 0.5
            array *= 3


class OnTheDeviceOfAnother(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4, device=self.a.weight.device, dtype=self.a.weight.dtype)
        self.c = nn.Parameter(torch.zeros(3, device=self.a.bias.device) + 2)
        numbers = torch.tensor([1.0, 2.0, 3.0, 4.0], device=self.a.weight.device)
        self.d, self.e = nn.Parameter(self.a.bias * numbers), nn.Parameter(numbers.clone())
        self.f = nn.Parameter(self.a.bias.new_tensor([3, 4, 5, 6]) + self.a.bias)
        self.register_buffer("g", torch.from_numpy(np.arange(4.0)).to(self.a.weight.device) * self.a.bias)


class DrawsWithoutAMetaKernel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mixture = nn.Parameter(torch.distributions.Dirichlet(torch.ones(4)).sample())
        self.beta = nn.Parameter(torch.distributions.Beta(torch.ones(3), 2 * torch.ones(3)).sample())
        self.after = nn.Linear(3, 3)


class WritesOverItself(nn.Module):
    """Fills all of a tensor from itself, or a part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.same, self.part = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4, 4))
        with torch.no_grad():
            self.same.copy_(self.same)
            self.part[1:].zero_()


class ForwardInTheConstructor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.norm(torch.arange(32.0).view(8, 4))


def copied_layers() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 3)


def in_16_bits() -> nn.Module:
    """What transformers does with dtype=torch.bfloat16."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.scale = nn.Linear(4, 4), nn.Parameter(torch.ones(4))
            self.register_buffer("shares", torch.arange(4) / 3)

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        return nn.ModuleList(Layer() for _ in range(2))
    finally:
        torch.set_default_dtype(before)


def copied_with_buffers() -> nn.Module:
    norm = nn.BatchNorm1d(4)
    return nn.ModuleList([copy.deepcopy(norm), copy.deepcopy(nn.Sequential(nn.Linear(4, 4), norm))])


def both(make: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    """The module built plainly and deferred, under one seed; later draws must agree too."""
    torch.manual_seed(3)
    plain = make()
    after = torch.rand(4)
    torch.manual_seed(3)
    with zk.deferred_init(device="cpu"):
        model = make()
    assert torch.equal(torch.rand(4), after)
    return plain, model


def large() -> nn.Module:
    model = nn.Sequential(nn.Linear(200, 300), nn.LayerNorm(300), nn.Linear(300, 200))
    model.register_buffer("mask", torch.ones(200, 200).tril().bool())
    nn.init.trunc_normal_(model[0].weight)
    nn.init.orthogonal_(model[2].weight)
    return model


@pytest.mark.parametrize(
    "make",
    [
        Everything,
        ScaledByAChangingNumber,
        OnTheDeviceOfAnother,
        DrawsWithoutAMetaKernel,
        WritesOverItself,
        ForwardInTheConstructor,
        copied_layers,
        copied_with_buffers,
        in_16_bits,
        large,
        lambda: nn.utils.parametrizations.orthogonal(nn.Linear(5, 3)),
    ],
)
def test_the_same_bits_as_plain_construction(make: Callable[[], nn.Module], tmp_path: Path) -> None:
    plain, model = both(make)
    assert sum(tensor.nbytes for tensor in tensors(model).values() if not tensor.is_meta) < 200
    objects = {name: id(param) for name, param in model.named_parameters()}
    state = torch.get_rng_state()
    tiers = {"param_tier": "nvme", "optimizer_tier": "nvme", "nvme_path": tmp_path}
    optimizer = zk.ZeroOptimizer(model, torch.optim.AdamW(model.parameters()), stage=3, **tiers)
    assert torch.equal(torch.get_rng_state(), state)
    assert {name: id(param) for name, param in model.named_parameters()} == objects
    with zk.gather(model.parameters()):
        made, want = tensors(model), tensors(plain)
        assert set(made) == set(want)
        for name, tensor in want.items():
            assert made[name].dtype == tensor.dtype and torch.equal(made[name], tensor), name
            assert made[name].requires_grad == tensor.requires_grad
    optimizer.close()


def train_both(_case: object) -> str:
    """Train the model built plainly and deferred: "" if losses are the same."""
    losses = []
    models.DEVICE = torch.device("cpu")
    for model in both(GPT):
        optimizer = zk.ZeroOptimizer(model, torch.optim.AdamW(model.parameters(), lr=1e-2), stage=3, dtype="bf16", param_tier="host")
        losses.append(train(model, optimizer, 3))
    return "" if losses[0] == losses[1] else f"{losses}"


def test_quick_on_two_ranks_a_deferred_model_trains_as_the_plain_one() -> None:
    assert run_world(2, train_both, [None]) == [["", ""]]


@pytest.mark.device
@pytest.mark.parametrize("stage", (2, 3))
def test_values_are_drawn_on_the_cpu_and_placed_on_the_device(stage: int) -> None:
    plain, _ = both(large)
    torch.manual_seed(3)
    with zk.deferred_init(DEVICE):
        model = large()
    assert all(tensor.is_meta for tensor in tensors(model).values())
    optimizer = zk.ZeroOptimizer(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage)
    with zk.gather(model.parameters()):
        for name, tensor in tensors(model).items():
            assert tensor.device.type == DEVICE.type and torch.equal(tensor.cpu(), tensors(plain)[name])
    optimizer.close()


def test_what_cannot_be_followed_is_refused() -> None:
    with torch.device("meta"):
        stranger = nn.Linear(4, 4)
    with zk.deferred_init():
        model = nn.Linear(4, 4)
    nn.init.zeros_(model.bias)
    with pytest.raises(RuntimeError, match=r"'bias' was written or converted after deferred_init"):
        zk.ZeroOptimizer(model, torch.optim.AdamW(model.parameters()))
    with zk.deferred_init():
        model = nn.Linear(4, 4)
    model.half()
    with pytest.raises(ValueError, match=r"'weight' is on the meta device .* by dtype= and device= alone"):
        zk.ZeroOptimizer(model, torch.optim.AdamW(model.parameters()))
    with pytest.raises(RuntimeError, match="without memory that was not made in it"), zk.deferred_init():
        stranger.weight * 2
    with pytest.raises(RuntimeError, match="generator of its own"), zk.deferred_init():
        torch.randn(3, generator=torch.Generator())
    with pytest.raises(RuntimeError, match=r"deferred_init\(device='mps'\)"), zk.deferred_init():
        nn.Linear(4, 4, device="mps")
    with pytest.raises(RuntimeError, match="within deferred_init"), zk.deferred_init(), zk.deferred_init():
        pass
    assert not torch.ones(1).is_meta and stranger.weight.is_meta  # and torch is as it was


def test_the_record_goes_with_the_model() -> None:
    import gc
    import weakref

    with zk.deferred_init():
        model = large()
    memory = weakref.ref(model[0].weight.untyped_storage()._zk_promise)  # type: ignore[attr-defined]
    optimizer = zk.ZeroOptimizer(model, torch.optim.SGD(model.parameters(), lr=0.1))
    gc.collect()
    assert memory() is None
    optimizer.close()
