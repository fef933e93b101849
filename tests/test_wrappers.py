"""Frozen parameters that are wrappers around other tensors: quantized weights, streamed as the bytes that they are."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

import zk
from tests.world import run_world
from zk.core.owners import inner_tensors, is_wrapper

pytestmark = pytest.mark.usefixtures("torch_engine")

WIDTH = 32


class Coded(Tensor):
    """int8 codes and one scale per row, as quantization libraries keep them; products are of the values that these stand for."""

    codes: Tensor
    scales: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Coded:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=dtype, device=codes.device)  # type: ignore[attr-defined, no-any-return]

    def __init__(self, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> None:
        self.codes, self.scales = codes, scales

    @classmethod
    def of(cls, values: Tensor) -> Coded:
        scales = values.abs().amax(1, keepdim=True).float() / 127
        return cls((values / scales).round().to(torch.int8), scales, values.dtype)

    def values(self) -> Tensor:
        return (self.codes * self.scales).to(self.dtype)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scales"], self.dtype

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], dtype: Any, size: Any, stride: Any) -> Coded:
        return Coded(inner["codes"], inner["scales"], dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if name in ("detach", "clone", "alias"):
            return cls(func(args[0].codes), func(args[0].scales), args[0].dtype)
        if name == "t":
            return args[0].values().t()
        if name == "copy_" and isinstance(args[1], Coded):
            args[0].codes.copy_(args[1].codes)
            args[0].scales.copy_(args[1].scales)
            return args[0]
        raise NotImplementedError(f"{func} of a Coded")


class Product(torch.autograd.Function):
    """A linear layer that keeps the codes for backward, and no values."""

    @staticmethod
    def forward(context: Any, x: Tensor, weight: Coded) -> Tensor:
        context.save_for_backward(weight)
        return x @ weight.values().t().to(x.dtype)

    @staticmethod
    def backward(context: Any, grad: Tensor) -> Any:  # type: ignore[override]
        (weight,) = context.saved_tensors
        return grad @ weight.values().to(grad.dtype), None


class CodedLinear(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(Coded.of(torch.randn(width, width) / 6), requires_grad=False)
        self.adapter = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(Product.apply(x, self.weight) + self.adapter(x))  # type: ignore[no-untyped-call]


def coded() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(CodedLinear(WIDTH) for _ in range(3)))


def of_one_table() -> nn.Module:
    """Weights whose scales are one tensor, which each nn.Parameter has another view of."""
    model = coded()
    scales = model[0].weight.scales
    for layer in model:
        layer.weight = nn.Parameter(Coded(layer.weight.codes, scales, torch.float32), requires_grad=False)
    assert model[1].weight.scales is not model[0].weight.scales
    return model


class Adapted(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.adapter = base, nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x) + self.adapter(x))


def by_torchao(config: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    quantization = pytest.importorskip("torchao.quantization")
    torch.manual_seed(0)
    bases = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3))).to(dtype)
    quantization.quantize_(bases, getattr(quantization, config)())
    bases.requires_grad_(False)
    model = nn.Sequential(*(Adapted(base) for base in bases)).to(dtype)
    assert all(is_wrapper(base.weight) for base in bases)
    return model


def int8() -> nn.Module:
    return by_torchao("Int8WeightOnlyConfig")


def float8() -> nn.Module:
    return by_torchao("Float8WeightOnlyConfig")


MODELS: dict[str, Callable[[], nn.Module]] = {"coded": coded, "of_one_table": of_one_table, "int8": int8, "float8": float8}
SETTINGS: dict[str, dict[str, Any]] = {
    "0": {"stage": 0},
    "1-device": {"stage": 1, "optimizer_tier": "device"},
    "2-beside": {"stage": 2, "overlap_step": True},
    "3-host": {"stage": 3, "param_tier": "host"},
    "3-nvme": {"stage": 3, "param_tier": "nvme", "optimizer_tier": "nvme"},
}


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 4) -> list[float]:
    losses = []
    for seed in range(steps):
        loss = model(torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed))).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def wrapped(model: nn.Module, setting: str, folder: Path) -> zk.ZeroOptimizer:
    options = {**SETTINGS[setting], "nvme_path": folder} if "nvme" in setting else SETTINGS[setting]
    return zk.ZeroOptimizer(model, adamw(model), **options)


def differences(got: dict[str, Tensor], want: dict[str, Tensor]) -> list[str]:
    found = [f"{name} is missing" for name in want.keys() ^ got.keys()]
    for name in want.keys() & got.keys():
        if type(got[name]) is not type(want[name]):
            found.append(f"{name} is a {type(got[name]).__name__}")
        pairs = zip(inner_tensors(got[name], name), inner_tensors(want[name], name), strict=True)
        found += [label for (label, one), (_, other) in pairs if not torch.equal(one, other)]
    return found


def run_case(case: tuple[str, str, Path]) -> list[str]:
    kind, setting, folder = case
    plain = MODELS[kind]()
    want = train(plain, adamw(plain))
    model = MODELS[kind]()
    wrappers = {name: param for name, param in model.named_parameters() if is_wrapper(param)}
    optimizer = wrapped(model, setting, folder)
    got = train(model, optimizer)
    found = [] if got == want else [f"losses {got} instead of {want}"]
    optimizer.synchronize()
    found += differences(dict(model.state_dict()), dict(plain.state_dict()))
    found += differences(optimizer.consolidated_state_dict(), dict(plain.state_dict()))
    if any(dict(model.named_parameters())[name] is not param for name, param in wrappers.items()):
        found.append("a wrapper was replaced")
    optimizer.close()
    return found


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("kind", MODELS)
def test_adapters_over_wrapped_weights_train_as_in_plain_torch(kind: str, setting: str, tmp_path: Path) -> None:
    assert run_case((kind, setting, tmp_path)) == []


def test_adapters_over_wrapped_weights_train_over_ranks(tmp_path: Path) -> None:
    cases = [("coded", setting, tmp_path) for setting in SETTINGS] + [("of_one_table", "2-beside", tmp_path)]
    cases += [(kind, "3-nvme", tmp_path) for kind in MODELS if kind != "coded"]
    assert run_world(2, run_case, cases) == [[[], []]] * len(cases)


@pytest.mark.parametrize("setting", ("1-device", "3-host", "3-nvme"))
def test_a_wrapped_weight_costs_its_own_bytes(setting: str, tmp_path: Path) -> None:
    model = coded()
    with wrapped(model, setting, tmp_path) as optimizer:
        train(model, optimizer)
        held = {store.unit.name: store for store in optimizer.held if store.shard is None}
        inner = [(label, tensor) for name, param in model.named_parameters() if is_wrapper(param) for label, tensor in inner_tensors(param, name)]
        assert sorted(name for store in held.values() for name in store.unit.names) == sorted(label for label, _ in inner)
        nbytes = sum(store.nbytes["param"] for store in held.values())
        assert nbytes == 3 * (WIDTH * WIDTH + 4 * WIDTH)  # codes in 8 bits, scales in 32


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_checkpoint_and_load_state_dict_give_wrapped_weights_back(setting: str, tmp_path: Path) -> None:
    model = coded()
    with wrapped(model, setting, tmp_path) as optimizer:
        train(model, optimizer, 2)
        optimizer.save_checkpoint(tmp_path / "whole")
        optimizer.save_checkpoint(tmp_path / "small", frozen=False)
        want = copy.deepcopy(dict(model.state_dict()))
        losses = train(model, optimizer, 2)
    again = coded()
    with torch.no_grad():
        for module in again:
            module.weight.copy_(Coded.of(torch.ones(WIDTH, WIDTH)))
    with wrapped(again, setting, tmp_path) as optimizer:
        with pytest.raises(ValueError, match="over another base"):
            optimizer.load_checkpoint(tmp_path / "small")
        optimizer.load_checkpoint(tmp_path / "whole")
        assert differences(dict(again.state_dict()), want) == []
        optimizer.load_checkpoint(tmp_path / "small")
        assert train(again, optimizer, 2) == losses
    other = coded()
    with torch.no_grad():
        for module in other:
            module.weight.copy_(Coded.of(torch.ones(WIDTH, WIDTH)))
    with wrapped(other, setting, tmp_path) as optimizer:
        train(other, optimizer, 1)
        other.load_state_dict(want)
        assert differences(dict(other.state_dict()), want) == []
        plain = coded()
        plain.load_state_dict(want)
        x = torch.ones(1, WIDTH)
        assert torch.equal(other(x), plain(x))


def test_what_cannot_be_trained_or_moved_is_refused_by_name() -> None:
    model = nn.Linear(4, 4, bias=False)
    model.weight = nn.Parameter(TwoTensor(torch.randn(4, 4), torch.randn(4, 4)))
    with pytest.raises(ValueError, match=r"'weight' is a TwoTensor, and zk trains plain tensors only"):
        zk.ZeroOptimizer(model, torch.optim.SGD(model.parameters(), lr=0.1))
    two = nn.Sequential(model.requires_grad_(False), nn.Linear(4, 4))
    with zk.ZeroOptimizer(two, torch.optim.SGD(two.parameters(), lr=0.1)):
        model.weight.requires_grad_(True)
        with pytest.raises(ValueError, match=r"'0.weight' is a TwoTensor"):
            two(torch.ones(1, 4))
    shared = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    codes, others = torch.zeros(5, 4), torch.zeros(5, 4)
    for first, module in enumerate(shared):  # three rows are of both
        module.weight = nn.Parameter(TwoTensor(codes[first : first + 4], others[first : first + 4]), requires_grad=False)
    with pytest.raises(ValueError, match=r"'[01].weight.([ab])' and '[01].weight.\1' share memory"):
        zk.ZeroOptimizer(shared, torch.optim.SGD(shared.parameters(), lr=0.1))
