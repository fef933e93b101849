"""Models that never exist whole: the same initial bits as plain construction, and weights from files, unit by unit."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import zk
from tests.models import GPT, batch, loss_of, train
from tests.programs import run
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


def both(make: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    """The module built plainly and deferred, under one seed; random numbers afterwards must agree too."""
    torch.manual_seed(3)
    plain = make()
    after = torch.rand(4)
    torch.manual_seed(3)
    with zk.deferred_init():
        deferred = make()
    assert torch.equal(torch.rand(4), after)
    return plain, deferred


@pytest.mark.parametrize("stage", (0, 1, 2, 3))
def test_zero_optimizer_makes_the_same_bits_in_place(stage: int, tmp_path: Path) -> None:
    plain, deferred = both(Everything)
    assert deferred.rates == plain.rates
    assert sum(tensor.nbytes for tensor in tensors(deferred).values() if not tensor.is_meta) < 100
    objects = {name: id(tensor) for name, tensor in deferred.named_parameters()}
    state = torch.get_rng_state()
    options = {"param_tier": "nvme"} if stage == 3 else {}
    optimizer = torch.optim.AdamW(deferred.parameters())
    with zk.ZeroOptimizer(deferred, optimizer, stage=stage, optimizer_tier="nvme", nvme_path=tmp_path, **options):
        assert torch.equal(torch.get_rng_state(), state)
        assert {name: id(tensor) for name, tensor in deferred.named_parameters()} == objects
        assert deferred.head.weight is deferred.table.weight
        with zk.gather(deferred.parameters()):
            made, want = tensors(deferred), tensors(plain)
            assert set(made) == set(want)
            for name, tensor in want.items():
                assert made[name].dtype == tensor.dtype and torch.equal(made[name], tensor), name
                assert made[name].requires_grad == tensor.requires_grad


def trained(model: nn.Module, **options: object) -> list[float]:
    with zk.ZeroOptimizer(model, torch.optim.AdamW(model.parameters(), lr=1e-2), stage=3, dtype="bf16", **options) as optimizer:
        return train(model, optimizer, 4)


def test_a_deferred_model_trains_as_the_plain_one_does(tmp_path: Path) -> None:
    plain, deferred = both(GPT)
    want = trained(plain, param_tier="host", optimizer_tier="host")
    assert trained(deferred, param_tier="nvme", optimizer_tier="nvme", nvme_path=tmp_path) == want


def deferred_on_two_ranks(case: object) -> str:
    want, got = (trained(model, param_tier="host", optimizer_tier="host") for model in both(GPT))
    return "" if want == got else f"{got} instead of {want}"


def test_on_two_ranks_the_first_one_makes_the_values() -> None:
    assert run_world(2, deferred_on_two_ranks, [None]) == [["", ""]]


def test_what_cannot_be_followed_is_refused(tmp_path: Path) -> None:
    with torch.device("meta"):
        stranger = nn.Linear(4, 4)
    with pytest.raises(ValueError, match=r"'weight' is on the meta device .* zk\.deferred_init\(\)"):
        zk.ZeroOptimizer(stranger, torch.optim.AdamW(stranger.parameters()))
    with zk.deferred_init():
        model = nn.Linear(4, 4)
    nn.init.zeros_(model.bias)  # torch skips tensors without memory, so this is caught only where something was written
    with torch.no_grad():
        model.weight.mul_(2)
    with pytest.raises(RuntimeError, match=r"'weight' was written or converted after deferred_init"):
        zk.ZeroOptimizer(model, torch.optim.AdamW(model.parameters()))
    with pytest.raises(RuntimeError, match="without memory that was not made in it"), zk.deferred_init():
        stranger.weight * 2
    with pytest.raises(RuntimeError, match="generator of its own"), zk.deferred_init():
        torch.randn(3, generator=torch.Generator())
    with pytest.raises(RuntimeError, match="within deferred_init"), zk.deferred_init(), zk.deferred_init():
        pass
    assert not torch.ones(1).is_meta and stranger.weight.is_meta  # and torch is as it was


# ---- weights from files ----------------------------------------------------------------------------------------------------------------


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors(model).items()}


@pytest.fixture
def saved(tmp_path: Path) -> tuple[dict[str, Tensor], dict[str, Path]]:
    """Weights of a GPT with tied embeddings, as one file, as several with an index, and as a folder."""
    torch.manual_seed(5)
    want = weights(GPT("tied"))
    one, index = tmp_path / "one.safetensors", tmp_path / "many" / "model.safetensors.index.json"
    index.parent.mkdir()
    save_file(want, one)
    for name, tensor in want.items():
        save_file({name: tensor}, index.parent / f"{name}.safetensors")
    index.write_text(json.dumps({"weight_map": {name: f"{name}.safetensors" for name in want}}))
    return want, {"file": one, "index": index, "folder": index.parent}


@pytest.mark.parametrize("form", ("file", "index", "folder"))
@pytest.mark.parametrize("kind", ("plain", "deferred", "stage 2", "stage 3", "nvme", "frozen"))
def test_pretrained_weights_reach_every_kind_of_model(form: str, kind: str, saved: tuple[dict[str, Tensor], dict[str, Path]], tmp_path: Path) -> None:
    want, paths = saved
    if kind == "deferred":
        with zk.deferred_init():
            model = GPT("tied")
        zk.load_pretrained(model, paths[form])
        assert all(param.is_meta for param in model.parameters())
    else:
        model = GPT("tied")
    if kind == "frozen":
        model.requires_grad_(False)
        model.norm.requires_grad_(True)
    options: dict[str, object] = {"stage": 2}
    if kind in ("stage 3", "frozen"):
        options = {"stage": 3, "param_tier": "host", "optimizer_tier": "host"}
    elif kind == "nvme":
        options = {"stage": 3, "param_tier": "nvme", "optimizer_tier": "nvme", "nvme_path": tmp_path}
    if kind == "plain":
        zk.load_pretrained(model, paths[form])
    optimizer = zk.ZeroOptimizer(model, torch.optim.AdamW(model.parameters(), lr=1e-2), **options)
    if kind not in ("plain", "deferred"):
        loss_of(model, batch(0)).backward()
        optimizer.step()
        zk.load_pretrained(model, paths[form])
    with zk.gather(model.parameters()):
        for name, tensor in want.items():
            assert torch.equal(tensors(model)[name], tensor), name
    optimizer.close()


def test_masters_take_the_full_precision_of_the_file(tmp_path: Path) -> None:
    model = GPT()
    want = {name: torch.randn_like(param) for name, param in model.named_parameters()}
    save_file(want, tmp_path / "x.safetensors")
    optimizer = zk.ZeroOptimizer(model, torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0), dtype="bf16")
    loss_of(model, batch(0)).backward()
    optimizer.step()
    zk.load_pretrained(model, tmp_path / "x.safetensors")
    state = optimizer.state_dict()["state"]
    for index, (name, param) in enumerate(model.named_parameters()):
        assert torch.equal(state[index]["master"], want[name]) and torch.equal(param, want[name].bfloat16())


def test_files_that_do_not_fit_are_refused_before_anything_changes(tmp_path: Path) -> None:
    model = GPT()
    before = weights(model)
    good = weights(GPT())
    save_file({name: tensor for name, tensor in good.items() if name != "norm.weight"} | {"extra": torch.zeros(1)}, tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match=r"missing: norm\.weight; unexpected: extra \(strict=False ignores these"):
        zk.load_pretrained(model, tmp_path / "a.safetensors")
    save_file(good | {"norm.weight": torch.zeros(3)}, tmp_path / "b.safetensors")
    with pytest.raises(ValueError, match=r"other shapes: norm\.weight is \(3,\), the model's \(24,\)"):
        zk.load_pretrained(model, tmp_path / "b.safetensors", strict=False)
    for path in ("none.safetensors", "."):
        with pytest.raises(FileNotFoundError):
            zk.load_pretrained(model, tmp_path / path)
    (tmp_path / "i.json").write_text(json.dumps({"weight_map": {"norm.weight": "gone.safetensors"}}))
    with pytest.raises(FileNotFoundError, match=r"names gone\.safetensors, which is not there"):
        zk.load_pretrained(model, tmp_path / "i.json")
    assert all(torch.equal(tensor, before[name]) for name, tensor in tensors(model).items())
    zk.load_pretrained(model, tmp_path / "a.safetensors", strict=False)
    assert torch.equal(model.norm.weight, before["norm.weight"]) and torch.equal(model.head.weight, good["head.weight"])


BIG = """
import sys, torch, zk
from torch import nn
from zk.core.memory import peak_nbytes
class Big(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1448, 1448) for _ in range(int(sys.argv[2])))  # 2.1M parameters each, 8.4 MB in fp32
    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu()
        return x
with zk.deferred_init():
    model = Big()
optimizer = zk.ZeroOptimizer(model, torch.optim.AdamW(model.parameters()), stage=3, param_tier="nvme", optimizer_tier="nvme", nvme_path=sys.argv[1])
for _ in range(2):
    model(torch.ones(2, 1448)).sum().backward()
    optimizer.step()
print(peak_nbytes())
"""


def test_a_model_larger_than_its_memory_is_trained(tmp_path: Path) -> None:
    """16 more layers, 134 MB of parameters in fp32 and 0.5 GB of training state, take no more memory."""
    peaks = []
    for layers in (8, 24):
        peaks.append(int(run("-c", BIG, str(tmp_path), str(layers), check=True).stdout))  # each has the pages of what it is forked from, and no more
    assert peaks[1] - peaks[0] < 80e6, peaks  # two processes of the same depth differ by up to 25 MB


# ---- found by trying to break it ---------------------------------------------------------------------------------------------


def same_as_plain(build: Callable[[], nn.Module]) -> nn.Module:
    """Build plainly and deferred, under one seed: the same values, and the same draws afterwards. Returns the deferred model, held."""
    torch.manual_seed(11)
    plain = build()
    after = torch.get_rng_state()
    torch.manual_seed(11)
    with zk.deferred_init():
        model = build()
    assert torch.equal(torch.get_rng_state(), after)
    state = {name: value.clone() for name, value in plain.state_dict().items()}
    zk.ZeroOptimizer(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=1)
    made = model.state_dict()
    assert set(made) == set(state)
    for name, value in state.items():
        assert made[name].dtype == value.dtype and torch.equal(made[name], value), name
    return model


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


@pytest.mark.parametrize(
    "build",
    [
        ScaledByAChangingNumber,
        OnTheDeviceOfAnother,
        DrawsWithoutAMetaKernel,
        ForwardInTheConstructor,
        copied_layers,
        copied_with_buffers,
        in_16_bits,
        lambda: nn.utils.parametrizations.orthogonal(nn.Linear(5, 5)),
        lambda: nn.utils.parametrizations.orthogonal(nn.Linear(5, 3)),
    ],
)
def test_construction_that_looks_back_copies_or_computes_gives_the_same_values(build: Callable[[], nn.Module]) -> None:
    same_as_plain(build)


def test_what_changes_a_deferred_model_in_a_way_nobody_counts_is_refused(tmp_path: Path) -> None:
    with zk.deferred_init():
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    with pytest.raises(RuntimeError, match=r"do not exist yet.*inside zk\.deferred_init"):
        model[0].weight.data.normal_(0, 0.02)
    for convert in (model.half, lambda: model.to(torch.bfloat16), lambda: copy.deepcopy(model)):
        with pytest.raises(RuntimeError, match="do not exist yet"):
            convert()
    zk.ZeroOptimizer(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=1, dtype="bf16")
    assert isinstance(model[0].weight, nn.Parameter) and model[0].weight.dtype == torch.bfloat16
    save_file(nn.Linear(4, 4).state_dict(), tmp_path / "m.safetensors")
    with zk.deferred_init():
        loaded = nn.Linear(4, 4)
    zk.load_pretrained(loaded, tmp_path / "m.safetensors")
    with torch.no_grad():
        loaded.bias.mul_(2)
    with pytest.raises(RuntimeError, match="'bias' was written or converted after"):
        zk.ZeroOptimizer(loaded, torch.optim.SGD(loaded.parameters(), lr=0.1))


def test_files_of_another_precision_leave_buffers_in_theirs(tmp_path: Path) -> None:
    plain = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    save_file({name: value.half() if value.is_floating_point() else value for name, value in plain.state_dict().items()}, tmp_path / "m.safetensors")
    with zk.deferred_init():
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    zk.load_pretrained(model, tmp_path / "m.safetensors")
    zk.ZeroOptimizer(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=1)
    assert model[1].running_mean.dtype == torch.float32 and model[1].num_batches_tracked.dtype == torch.int64
    model(torch.randn(3, 4)).sum().backward()


def test_buffers_that_are_not_saved_are_not_asked_for(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    model.register_buffer("mask", torch.ones(4), persistent=False)
    with zk.ZeroOptimizer(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=3, param_tier="host", optimizer_tier="host"):
        save_file(model.state_dict(), tmp_path / "m.safetensors")
        zk.load_pretrained(model, tmp_path / "m.safetensors")


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.safetensors", b"", "a.safetensors is not a whole safetensors file"),
        ("b.safetensors", b"\x10\0\0\0\0\0\0\0{}", "b.safetensors is not a whole safetensors file"),
        ("c.safetensors.index.json", b"{", "c.safetensors.index.json is no index"),
        ("d.safetensors.index.json", b'{"weights": 1}', "d.safetensors.index.json is no index"),
    ],
)
def test_files_that_are_broken_are_named(tmp_path: Path, name: str, content: bytes, says: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=says):
        zk.load_pretrained(nn.Linear(2, 2), tmp_path / name)


def test_looks_at_values_during_construction_see_them(tmp_path: Path) -> None:
    seen: list[Any] = []

    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)
            seen.append((self.layer.bias.tolist(), repr(self.layer.weight), self.layer.weight.detach().numpy().copy(), f"{self.layer.bias[0]:.3f}"))

    same_as_plain(Looks)
    assert seen[0][0] == seen[1][0] and seen[0][1] == seen[1][1] and (seen[0][2] == seen[1][2]).all() and seen[0][3] == seen[1][3]
