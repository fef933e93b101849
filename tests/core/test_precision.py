"""What ``dtype=`` casts and what keeps its own, beside plain torch with a model converted by hand; the loss scale."""

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zk
from tests.models import descend, wrap
from zk.addons import checked

pytestmark = pytest.mark.usefixtures("torch_engine")

TIERS: tuple[dict[str, Any], ...] = (
    {"stage": 2},
    {"stage": 3, "optimizer_tier": "host", "overlap_step": True},
    {"stage": 3, "param_tier": "nvme", "optimizer_tier": "nvme"},
)
each_tier = pytest.mark.parametrize("options", TIERS, ids=lambda options: "-".join(map(str, options.values())))


def drawn(step: int) -> Tensor:
    """(16, 4, 8), far from zero: a running mean in 16 bits stops on its way there."""
    return torch.randn(16, 4, 8, generator=torch.Generator().manual_seed(step)) - 50.0


def by_hand(model: Any) -> list[float]:
    """Losses of the plain loop of mixed precision: parameters in bf16, but for those of batch norm, with fp32 masters."""
    masters, losses = [param.detach().clone().requires_grad_() for param in model.parameters()], []
    inner = torch.optim.AdamW(masters, lr=1e-2)
    for module in model:
        module.to(None if isinstance(module, nn.BatchNorm1d) else torch.bfloat16)
    for step in range(4):
        loss = model(drawn(step).to(torch.bfloat16)).float().square().mean()
        loss.backward()
        for master, param in zip(masters, model.parameters(), strict=True):
            master.grad, param.grad = param.grad.float(), None
        inner.step()
        with torch.no_grad():
            for master, param in zip(masters, model.parameters(), strict=True):
                param.copy_(master)
        losses.append(loss.item())
    return losses


@each_tier
def test_batch_norm_trains_as_beside_parameters_in_bf16_that_were_cast_by_hand(options: dict[str, Any], tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(4, 8, 3), nn.BatchNorm1d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 6, 3))
    plain = copy.deepcopy(model)
    with wrap(model, tmp_path, dtype="bf16", **options) as optimizer:
        assert [descend(optimizer, model(drawn(step)).float().square().mean()) for step in range(4)] == by_hand(plain)
        with zk.gather(model.parameters()):
            pairs = zip((*model.parameters(), *model.buffers()), (*plain.parameters(), *plain.buffers()), strict=True)
            assert all(mine.dtype == theirs.dtype and torch.equal(mine, theirs) for mine, theirs in pairs)


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
        self.packed = nn.Parameter(codes.clone(), requires_grad=False)
        self.long = nn.Parameter(torch.tensor([1 << 40, 3]), requires_grad=False)
        self.register_buffer("table", torch.randn(5))
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("eighths", (codes.float() / 3).to(torch.float8_e5m2))


CODES = "fp8", "scales", "packed", "long", "eighths"


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).clone()


def cast_by(**options: Any) -> set[str]:
    """The names of what is cast, of a Zoo."""

    def dtypes() -> dict[str, torch.dtype]:
        return {name: tensor.dtype for name, tensor in (*model.named_parameters(), *model.named_buffers())}

    model = Zoo()
    model.wide.requires_grad_("wide" not in options.get("keep_dtype", ()))
    before = dtypes()
    wrap(model, dtype="bf16", **options)
    return {name for name, dtype in dtypes().items() if dtype != before[name]}


NORMS, FIRST = {f"layers.{n}.norm.{kind}" for n in "01" for kind in ("weight", "bias")}, {f"layers.0.wi.{kind}" for kind in ("weight", "bias")}
CAST = {*NORMS, *FIRST, "layers.1.wi.weight", "layers.1.wi.bias", "worker.weight", "worker.bias", "forgetful.weight", "forgetful.bias"}
CAST |= {"router.weight", "wide"}
KEPT = [
    ((), set[str]()),
    ((nn.LayerNorm,), NORMS),
    ("layers.0", {*FIRST, "layers.0.norm.weight", "layers.0.norm.bias"}),
    (("worker.weight", "wide"), {"worker.weight", "wide"}),
    (("wi.bias",), {"layers.0.wi.bias", "layers.1.wi.bias"}),
]


@pytest.mark.parametrize(("keep", "kept"), KEPT)
def test_quick_what_is_cast_and_keep_dtype_names_classes_modules_parameters_and_parts_of_names(keep: Any, kept: set[str]) -> None:
    assert cast_by(**{"keep_dtype": keep} if keep else {}) == CAST - kept


@each_tier
def test_codes_and_scales_that_are_frozen_stay_as_they_are_on_every_tier(options: dict[str, Any], tmp_path: Path) -> None:
    model = Zoo()
    codes = {name: as_bytes(getattr(model, name)) for name in CODES}
    optimizer = wrap(model, tmp_path, dtype="bf16", **options)
    with zk.gather(model.parameters()):
        assert all(torch.equal(as_bytes(getattr(model, name)), wanted) for name, wanted in codes.items())
    optimizer.close()
    assert all(torch.equal(as_bytes(getattr(model, name)), wanted) for name, wanted in codes.items())


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.seen = nn.Linear(4, 4), list[Any]()

    def forward(self, values: dict[str, Any], *, ids: Tensor, more: tuple[Any, ...]) -> Tensor:
        self.seen.extend([values["x"].dtype, ids.dtype, more[0].dtype, more[1]])
        return self.inner(values["x"])  # type: ignore[no-any-return]


@pytest.mark.parametrize("stage", (2, 3))
def test_inputs_of_the_models_own_call_are_cast_and_no_others(stage: int) -> None:
    optimizer = wrap(model := Nested(), dtype="bf16", stage=stage)
    copied, x = copy.deepcopy(model) if stage == 2 else model, torch.ones(2, 4, requires_grad=True)
    copied({"x": x}, ids=torch.arange(3), more=(torch.ones(1, dtype=torch.float64), None)).sum().backward()
    assert copied.seen == [torch.bfloat16, torch.int64, torch.bfloat16, None] and x.grad.dtype == torch.float32  # type: ignore[union-attr]
    with pytest.raises(RuntimeError, match="dtype"):
        model.inner(torch.ones(2, 4))
    optimizer.close()


SCALES = [("half", None, 2.0**16), ("float", "fp16", 2.0**16), ("half", "bf16", 1.0), ("float", None, 1.0)]


@pytest.mark.parametrize(("own", "dtype", "scale"), SCALES)
def test_the_loss_is_scaled_where_parameters_are_fp16(own: str, dtype: str | None, scale: float) -> None:
    model = getattr(nn.Linear(4, 4), own)()
    optimizer = wrap(model, dtype=dtype)
    assert optimizer.state_dict()["loss_scale"]["scale"] == scale
    if scale != 1.0:
        with pytest.raises(RuntimeError, match=r"optimizer.backward\(loss\)"):
            model(torch.ones(1, 4, dtype=torch.float16)).sum().backward()


def scales_of(overflows: list[bool], **rule: Any) -> list[float]:
    """The loss scale after each step, from which another optimizer resumes."""
    model = nn.Linear(2, 2)
    optimizer, scales = wrap(model, loss_scale=zk.DynamicLossScale(**rule)), []
    for overflow in overflows:
        optimizer.backward(model(torch.ones(1, 2)).sum() * (torch.nan if overflow else 1.0))
        optimizer.step()
        states = optimizer.state_dict()
        optimizer.close()
        optimizer = wrap(model, loss_scale=zk.DynamicLossScale(**rule))
        optimizer.load_state_dict(states)
        scales.append(states["loss_scale"]["scale"])
    return scales


def test_quick_the_scale_falls_on_overflow_and_grows_after_a_window_and_its_settings_are_checked() -> None:
    bad, good = True, False
    assert scales_of([bad] * 9, init=256, window=2, hysteresis=1) == [128, 64, 32, 16, 8, 4, 2, 1, 1]
    assert scales_of([good] * 5, init=4, window=2) == [4, 8, 8, 16, 16]
    assert scales_of([bad, bad, good, good, bad, bad], init=8, window=2, hysteresis=2) == [8, 4, 4, 8, 8, 4]
    assert scales_of([good, bad, good, good], init=8, window=2, hysteresis=1, factor=4.0) == [8, 2, 2, 8]
    for setting in ({"factor": 1.0}, {"minimum": 0}, {"minimum": 3, "init": 2.0}, {"window": 0}, {"window": 2.5}, {"hysteresis": 0}):
        with pytest.raises(ValueError, match=f"DynamicLossScale needs .*{next(iter(setting))}.*; got DynamicLossScale"):
            zk.DynamicLossScale(**setting)  # type: ignore[arg-type]


def test_a_cpu_that_is_slow_in_16_bits_is_warned_of_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    checked.warn.cache_clear()
    for name in ("bf16", "fp16"):
        monkeypatch.setattr(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported", lambda: False)
    with caplog.at_level(logging.WARNING, "zk"):
        for dtype in ("bf16", "fp32", "bf16", "fp16"):
            wrap(nn.Linear(2, 2), dtype=dtype).close()
    checked.warn.cache_clear()
    assert [record.getMessage().count(f"computes in {name},") for record, name in zip(caplog.records, ("bf16", "fp16"), strict=True)] == [1, 1]
