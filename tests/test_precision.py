"""What ``dtype=`` casts and what keeps its own dtype, beside plain torch with a model that was converted by hand."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zk
from tests.models import DEVICE
from tests.world import run_world
from zk import kernels
from zk.kernels import reference

pytestmark = pytest.mark.usefixtures("torch_engine", "one_thread")


@pytest.fixture(autouse=True)
def torch_updates_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel multiplies and adds in one."""
    monkeypatch.setattr(kernels, "adam", reference.adam)


TIERS: tuple[dict[str, Any], ...] = (
    *({"stage": stage} for stage in (0, 1, 2, 3)),
    {"stage": 2, "optimizer_tier": "host", "overlap_step": True},
    {"stage": 3, "param_tier": "nvme", "optimizer_tier": "nvme"},
)


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2)


def wrap(model: nn.Module, path: Path | None = None, **options: Any) -> zk.ZeroOptimizer:
    drive = {"nvme_path": path} if "nvme" in options.values() else {}
    return zk.ZeroOptimizer(model, adamw(model), num_threads=1, **options, **drive)


def convolutional() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv1d(4, 8, 3), nn.BatchNorm1d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 6, 3)).to(DEVICE)


def drawn(step: int) -> Tensor:
    """(16, 4, 8), far from zero: a running mean in 16 bits stops on its way there."""
    return (torch.randn(16, 4, 8, generator=torch.Generator().manual_seed(step)) - 50.0).to(DEVICE)


class Master(nn.Module):
    """``model`` with fp32 masters, as the plain loop of mixed precision has them."""

    def __init__(self, model: nn.Module, lower: torch.dtype) -> None:
        super().__init__()
        self.model, self.lower = model, lower
        for module in self.model.modules():
            if not isinstance(module, nn.BatchNorm1d):
                for name, param in module._parameters.items():
                    if param is not None:
                        module._parameters[name] = nn.Parameter(param.detach().to(lower))
        self.masters = [param.detach().float().clone().requires_grad_() for param in self.model.parameters()]
        self.adamw = torch.optim.AdamW(self.masters, lr=1e-2)

    def train_step(self, values: Tensor) -> float:
        loss = self.model(values.to(self.lower)).float().square().mean()
        loss.backward()
        for master, param in zip(self.masters, self.model.parameters(), strict=True):
            assert param.grad is not None
            master.grad, param.grad = param.grad.float(), None
        self.adamw.step()
        with torch.no_grad():
            for master, param in zip(self.masters, self.model.parameters(), strict=True):
                param.copy_(master)
        return loss.item()


@pytest.mark.device
@pytest.mark.parametrize("options", TIERS, ids=lambda options: "-".join(map(str, options.values())))
def test_batch_norm_trains_as_beside_parameters_in_bf16_that_were_cast_by_hand(options: dict[str, Any], tmp_path: Path) -> None:
    initial = convolutional()
    plain = Master(copy.deepcopy(initial), torch.bfloat16)
    for master, param in zip(plain.masters, initial.parameters(), strict=True):
        master.data.copy_(param)  # fp32 values that a model holds become the masters
    optimizer = wrap(initial, tmp_path, dtype="bf16", **options)
    for step in range(6):
        loss = initial(drawn(step)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert loss.item() == plain.train_step(drawn(step))
    optimizer.synchronize()
    with zk.gather(initial.parameters()):
        for mine, theirs in zip(initial.parameters(), plain.model.parameters(), strict=True):
            assert mine.dtype == theirs.dtype and torch.equal(mine, theirs)
    for mine, theirs in zip(initial.buffers(), plain.model.buffers(), strict=True):
        assert mine.dtype == theirs.dtype and torch.equal(mine, theirs)
    optimizer.close()


def test_running_statistics_are_those_of_autocast_after_300_batches() -> None:
    """In bf16 a running mean stops on its way: its steps become smaller than what the format can add."""
    mine, theirs = nn.Sequential(nn.BatchNorm1d(4)), nn.Sequential(nn.BatchNorm1d(4))
    optimizer = wrap(mine, dtype="bf16")
    for step in range(300):
        mine(drawn(step))
        with torch.autocast("cpu", torch.bfloat16):
            theirs(drawn(step).bfloat16())
    assert torch.equal(mine[0].running_mean, theirs[0].running_mean) and torch.equal(mine[0].running_var, theirs[0].running_var)
    optimizer.close()


class Zoo(nn.Module):
    """Tensors of all kinds."""

    _keep_in_fp32_modules = ("wo",)  # any of list, tuple and set
    _keep_in_fp32_modules_strict = ["router.bias"]  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"wi": nn.Linear(4, 4), "wo": nn.Linear(4, 4), "norm": nn.LayerNorm(4)}) for _ in range(2))
        self.router, self.worker = nn.Linear(4, 2), nn.Linear(4, 2)
        self.batch_norm, self.forgetful = nn.BatchNorm1d(4), nn.BatchNorm1d(4, track_running_stats=False)
        self.wide = nn.Parameter(torch.randn(3, dtype=torch.float64))
        codes = torch.arange(16, dtype=torch.uint8)
        self.fp8 = nn.Parameter((codes.float() / 3).to(torch.float8_e4m3fn), requires_grad=False)
        self.scales = nn.Parameter((codes + 120).view(torch.float8_e8m0fnu), requires_grad=False)
        self.fp4 = nn.Parameter(codes.view(torch.float4_e2m1fn_x2), requires_grad=False)
        self.packed = nn.Parameter(codes.clone(), requires_grad=False)
        self.register_buffer("table", torch.randn(5))
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("eighths", (codes.float() / 3).to(torch.float8_e5m2))
        self.to(DEVICE)


def dtypes(model: nn.Module) -> dict[str, torch.dtype]:
    return {name: tensor.dtype for name, tensor in (*model.named_parameters(), *model.named_buffers())}


def test_what_is_cast_and_what_is_not() -> None:
    model = Zoo()
    before = dtypes(model)
    codes = {name: as_bytes(getattr(model, name)).clone() for name in ("fp8", "scales", "fp4", "packed", "eighths")}
    optimizer = wrap(model, dtype="bf16")
    cast = {name for name, dtype in dtypes(model).items() if dtype != before[name]}
    blocks = {f"layers.{index}.{part}.{kind}" for index in range(2) for part in ("wi", "norm") for kind in ("weight", "bias")}
    others = {f"{module}.{kind}" for module in ("worker", "forgetful") for kind in ("weight", "bias")}
    assert cast == {*blocks, *others, "router.weight", "wide"}
    assert {dtypes(model)[name] for name in cast} == {torch.bfloat16}
    for name, wanted in codes.items():
        assert torch.equal(as_bytes(getattr(model, name)), wanted), name
    optimizer.close()


@pytest.mark.device
@pytest.mark.parametrize("options", TIERS[2:], ids=lambda options: "-".join(map(str, options.values())))
def test_codes_and_scales_that_are_frozen_stay_as_they_are_on_every_tier(options: dict[str, Any], tmp_path: Path) -> None:
    model = Zoo()
    codes = {name: as_bytes(getattr(model, name)).clone() for name in ("fp8", "scales", "fp4", "packed")}
    optimizer = wrap(model, tmp_path, dtype="bf16", **options)
    with zk.gather(model.parameters()):
        for name, wanted in codes.items():
            assert torch.equal(as_bytes(getattr(model, name)), wanted), name
    optimizer.close()


def test_a_checkpoint_has_them_all_but_scales_that_safetensors_does_not_know(tmp_path: Path) -> None:
    def made(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        model = Zoo()
        del model.scales, model.fp4
        model.register_buffer("turns", torch.polar(torch.ones(3), torch.randn(3)))
        model.register_buffer("repeated", torch.randn(3, 1).expand(3, 4))
        model.register_buffer("words", torch.randint(0, 9, (3,)).to(torch.uint16))
        model.fp8.data = torch.randn(16).to(torch.float8_e4m3fn)
        return model

    model, other = made(0), made(1)
    optimizer = wrap(model, dtype="bf16", stage=3)
    optimizer.save_checkpoint(tmp_path)
    optimizer.close(gather=True)
    with wrap(other, dtype="bf16", stage=2) as optimizer:
        optimizer.load_checkpoint(tmp_path)
        for (name, mine), theirs in zip((*other.named_parameters(), *other.named_buffers()), (*model.parameters(), *model.buffers()), strict=True):
            assert mine.dtype == theirs.dtype and torch.equal(as_bytes(mine), as_bytes(theirs)), name


@pytest.mark.parametrize(
    ("keep", "kept"),
    (
        ((nn.LayerNorm,), {f"layers.{index}.norm.{kind}" for index in range(2) for kind in ("weight", "bias")}),
        ("layers.0", {f"layers.0.{part}.{kind}" for part in ("wi", "norm") for kind in ("weight", "bias")}),
        (("worker.weight", "wide"), {"worker.weight", "wide"}),
        (("wi.bias",), {"layers.0.wi.bias", "layers.1.wi.bias"}),
    ),
)
def test_keep_dtype_names_classes_modules_parameters_and_parts_of_names(keep: Any, kept: set[str]) -> None:
    model = Zoo()
    if "wide" in kept:
        model.wide.requires_grad_(False)
    before = dtypes(model)
    with zk.ZeroOptimizer(model, adamw(model), dtype="bf16"):
        usual = {name for name, dtype in dtypes(model).items() if dtype != before[name]}
    model = Zoo()
    model.wide.requires_grad_("wide" not in kept)
    optimizer = wrap(model, dtype="bf16", keep_dtype=keep)
    assert {name for name, dtype in dtypes(model).items() if dtype != before[name]} == usual - kept
    optimizer.close()


def test_cast_buffers_is_what_model_to_does_but_for_what_is_named() -> None:
    model = Zoo()
    optimizer = wrap(model, dtype="bf16", cast_buffers=True, keep_dtype="table")
    found = dtypes(model)
    assert found["batch_norm.running_mean"] == found["batch_norm.weight"] == torch.bfloat16
    assert found["table"] == torch.float32 and found["count"] == torch.int64 and found["eighths"] == torch.float8_e5m2
    optimizer.close()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    (
        ({"dtype": "bf16", "keep_dtype": "tabel"}, ValueError, "has no module, parameter or buffer 'tabel'"),
        ({"dtype": "bf16", "keep_dtype": (nn.GRU, nn.Linear)}, ValueError, "'GRU'"),
        ({"dtype": "bf16", "keep_dtype": 3}, TypeError, "keep_dtype must be a sequence of module names"),
        ({"dtype": "bf16", "keep_dtype": (int,)}, TypeError, "keep_dtype must hold module names or nn.Module classes"),
        ({"keep_dtype": "table"}, ValueError, "keep_dtype has no effect without dtype="),
        ({"cast_buffers": True}, ValueError, "cast_buffers has no effect without dtype="),
        ({"dtype": "bf16", "cast_buffers": "yes"}, TypeError, "cast_buffers must be True or False"),
        ({"dtype": "bf16", "keep_dtype": "wide"}, ValueError, "'wide' is torch.float64; zk trains fp32, bf16 and fp16"),
    ),
)
def test_options_that_mean_nothing_are_refused_and_nothing_is_cast(options: dict[str, Any], error: type[Exception], message: str) -> None:
    model = Zoo()
    before = dtypes(model)
    with pytest.raises(error, match=message):
        zk.ZeroOptimizer(model, adamw(model), **options)
    assert dtypes(model) == before


def test_parameters_in_8_bits_are_not_trained() -> None:
    model = nn.Linear(4, 4, bias=False)
    model.weight = nn.Parameter(model.weight.detach().to(torch.float8_e4m3fn))
    for options in ({}, {"dtype": "bf16"}):
        with pytest.raises(ValueError, match=r"'weight' is torch.float8_e4m3fn; zk trains fp32, bf16 and fp16: freeze it"):
            zk.ZeroOptimizer(model, torch.optim.AdamW(model.parameters()), **options)


@pytest.mark.parametrize("dtype", (None, "bf16"))
def test_a_group_that_is_added_changes_no_dtype(dtype: str | None) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)).to(torch.bfloat16)
    model[1].float()
    optimizer = zk.ZeroOptimizer(model, torch.optim.AdamW(model[0].parameters()), dtype=dtype)
    before = dtypes(model)
    optimizer.add_param_group({"params": list(model[1:].parameters())})
    assert dtypes(model) == before
    optimizer.close()


class Positions(nn.Module):
    """The sinusoids of many a tutorial: a buffer that is added to activations."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("sines", torch.linspace(0, 1, 4))
        self.linear = nn.Linear(4, 4)

    def forward(self, values: Tensor) -> Tensor:
        return self.linear(values + self.sines)  # type: ignore[no-any-return]


@pytest.mark.parametrize("stage", (2, 3))
def test_an_error_of_torch_about_two_dtypes_names_the_buffers(stage: int) -> None:
    model = Positions()
    with wrap(model, dtype="bf16", stage=stage), pytest.raises(RuntimeError, match="dtype") as caught:
        model(torch.ones(2, 4))
    assert len(caught.value.__notes__) == 1 and "buffers keep their dtype (sines)" in caught.value.__notes__[0]
    with wrap(Positions(), dtype="bf16", stage=stage, cast_buffers=True) as optimizer:
        optimizer.model(torch.ones(2, 4)).sum().backward()
        optimizer.step()


@pytest.mark.parametrize("stage", (2, 3))
def test_a_model_with_buffers_can_be_compiled(stage: int) -> None:
    model, other = convolutional(), convolutional()
    losses = []
    for net, compiled in ((model, torch.compile(model, backend="eager")), (other, other)):
        with wrap(net, dtype="bf16", stage=stage) as optimizer:
            for step in range(2):
                loss = compiled(drawn(step)).float().square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
    assert losses[:2] == pytest.approx(losses[2:], rel=1e-2)


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu()


def buffers_of_the_first_rank(_: None) -> list[str]:
    torch.manual_seed(dist.get_rank())
    model = Zoo()
    model.register_buffer("repeated", torch.full((3, 1), float(dist.get_rank()), device=DEVICE).expand(3, 4))
    model.register_buffer("yes", torch.tensor(dist.get_rank() == 0, device=DEVICE))
    model.register_buffer("slanted", torch.randn(3, 4).to(DEVICE).T)
    torch.manual_seed(0)
    first = Zoo()
    first.register_buffer("repeated", torch.zeros(3, 4, device=DEVICE))
    first.register_buffer("yes", torch.tensor(True, device=DEVICE))
    first.register_buffer("slanted", torch.randn(3, 4).to(DEVICE).T)
    optimizer = wrap(model, dtype="bf16", stage=3)
    found = [
        name
        for (name, mine), theirs in zip(model.named_buffers(), first.buffers(), strict=True)
        if mine.dtype != theirs.dtype or not torch.equal(as_bytes(mine), as_bytes(theirs))
    ]
    if model.slanted.stride() != first.slanted.stride():
        found.append("strides")
    optimizer.close()
    return found


@pytest.mark.device
def test_ranks_have_the_first_ranks_buffers_in_their_dtype() -> None:
    assert run_world(2, buffers_of_the_first_rank, [None]) == [[[], []]]
