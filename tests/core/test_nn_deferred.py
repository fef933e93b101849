"""Deferred construction: the same bits as plain construction, without memory until a unit is placed."""

import copy
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import zk
from tests.models import DEVICE


class Everything(nn.Module):
    """torch's modules and initializers, and what else constructors do."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(13, 8, padding_idx=2), nn.Linear(8, 13, bias=False)
        self.head.weight = self.table.weight
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)  # deep copies
        self.others = nn.ModuleList([nn.LSTM(8, 8), nn.Conv2d(3, 4, 3), nn.BatchNorm1d(4), nn.Bilinear(3, 4, 5), nn.Linear(8, 8).half()])
        self.scaled, self.scalar = nn.Parameter(torch.randn(7, 5) * 0.02), nn.Parameter(torch.tensor(0.3))
        self.transposed, self.sliced = nn.Parameter(torch.randn(5, 4).t()), nn.Parameter(torch.eye(4)[1:3])
        for name in ("orthogonal_", "trunc_normal_", "kaiming_normal_", "dirac_", "eye_"):
            weight = torch.zeros(6, 6, 3) if name == "dirac_" else torch.zeros(6, 6)
            self.register_parameter(name, nn.Parameter(getattr(nn.init, name)(weight)))
        self.sparse = nn.Parameter(nn.init.sparse_(torch.empty(8, 8), 0.3))
        self.register_buffer("mask", torch.ones(4, 4).tril().bool())
        self.rates = [rate.item() for rate in torch.linspace(0, 0.3, 4)]  # a value that construction looks at
        self.weighted = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
        self.apply(lambda module: nn.init.normal_(module.weight, std=0.02) if isinstance(module, nn.Linear) else None)
        with torch.no_grad():
            self.layers[1].weight[0, 1] = 7.0
            self.layers[2].weight *= 0.5


def tensors(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_parameters()) | dict(model.named_buffers())


def scaled_by_a_changing_number() -> nn.Module:
    scale, array, layers = torch.tensor(1.0), np.ones((4, 4), np.float32), nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
    for layer in layers:
        with torch.no_grad():
            layer.weight.mul_(scale).add_(torch.from_numpy(array))  # type: ignore[operator, union-attr]
        scale *= 0.5
        array *= 3
    return layers


def forward_in_the_constructor() -> nn.Module:
    norm = nn.BatchNorm1d(4)
    norm(torch.arange(32.0).view(8, 4))
    return norm


def in_16_bits() -> nn.Module:
    """What transformers does with dtype=torch.bfloat16."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = nn.Linear(4, 4)
        model.scale = nn.Parameter(torch.ones(4))
        model.register_buffer("shares", torch.arange(4) / 3)
        return model
    finally:
        torch.set_default_dtype(before)


def copied_with_buffers() -> nn.Module:
    norm = nn.BatchNorm1d(4)
    return nn.ModuleList([copy.deepcopy(norm), copy.deepcopy(nn.Sequential(nn.Linear(4, 4), norm))])


def both(make: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    """The module built plainly and deferred, under one seed; later draws must agree too."""
    torch.manual_seed(3)
    plain, after = make(), torch.rand(4)
    torch.manual_seed(3)
    with zk.deferred_init(DEVICE):
        model = make()
    assert torch.equal(torch.rand(4), after)
    return plain, model


CONSTRUCTORS = [Everything, scaled_by_a_changing_number, forward_in_the_constructor, copied_with_buffers, in_16_bits]


@pytest.mark.device
@pytest.mark.parametrize("make", CONSTRUCTORS)
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
            assert made[name].dtype == tensor.dtype and torch.equal(made[name].cpu(), tensor) and made[name].device.type == DEVICE.type, name
            assert made[name].requires_grad == tensor.requires_grad
    optimizer.close()


def test_what_cannot_be_followed_is_refused() -> None:
    stranger = nn.Linear(4, 4, device="meta")
    for change, error, says in (
        (lambda model: nn.init.zeros_(model.bias), RuntimeError, r"'bias' was written or converted after deferred_init"),
        (nn.Module.half, ValueError, r"'weight' is on the meta device .* by dtype= and device= alone"),
    ):
        with zk.deferred_init():
            model = nn.Linear(4, 4)
        change(model)
        with pytest.raises(error, match=says):
            zk.ZeroOptimizer(model, torch.optim.AdamW(model.parameters()))
    for make, says in (
        (lambda: stranger.weight * 2, "without memory that was not made in it"),
        (lambda: torch.randn(3, generator=torch.Generator()), "generator of its own"),
        (lambda: nn.Linear(4, 4, device="mps"), r"deferred_init\(device='mps'\)"),
        (lambda: both(Everything), "within deferred_init"),
    ):
        with pytest.raises(RuntimeError, match=says), zk.deferred_init():
            make()
    assert not torch.ones(1).is_meta and stranger.weight.is_meta  # and torch is as it was
