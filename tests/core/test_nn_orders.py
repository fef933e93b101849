"""Weights that lie in memory in another order (channels_last, transposed): kept so, and saved and loaded as any other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn

import zk
from tests.models import adamw, descend
from tests.world import call, run_world
from zk.checkpoint.export import export

pytestmark = pytest.mark.usefixtures("torch_engine")
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


def batch(step: int) -> Tensor:
    return torch.randn(4, 3, 13, 13, generator=torch.Generator().manual_seed(step)).to(memory_format=LAST)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, start: int, count: int) -> list[float]:
    return [descend(optimizer, model(batch(step)).square().mean()) for step in range(start, start + count)]


def wrap(model: nn.Module, stage: int) -> zk.ZeroOptimizer:
    return zk.ZeroOptimizer(model, adamw(model), stage=stage, optimizer_tier="host", param_tier="host" if stage == 3 else "device")


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


def handed_over(case: tuple[int, str]) -> None:
    """Train, alone or over ranks, and hand over by both kinds of checkpoint to the other format and back."""
    stage, folder = case
    world = dist.get_world_size() if dist.is_initialized() else 1
    model, plain = build(), build()
    want = train(plain, inner := adamw(plain), 0, 3)
    optimizer = wrap(model, stage)
    assert train(model, optimizer, 0, 3) == pytest.approx(want, rel=1e-3)  # ranks take the mean of equal gradients, and a third is rounded
    have = exact(optimizer)
    for name, param in plain.named_parameters() if world == 1 else ():
        assert torch.equal(have[name], param) and (not param.requires_grad or torch.equal(have[f"{name}.exp_avg"], inner.state[param]["exp_avg"]))
    optimizer.save_checkpoint(folder)
    rows, last = wrap(build(ROWS, 1), 3), wrap(build(LAST, 2), 3)
    rows.load_checkpoint(folder)
    assert_equal(exact(rows), have)
    with zk.gather(rows.model.parameters()):
        assert all(param.is_contiguous() for param in rows.model.parameters())
    rows.save_checkpoint(f"{folder}-rows")
    last.load_checkpoint(f"{folder}-rows")
    assert_equal(exact(last), have)
    weights = optimizer.consolidated_state_dict(dtype="fp32", rank0_only=False)
    if stage == 3 or world == 1:  # this rank's elements, in the same order
        other = wrap(build(LAST if world > 1 else ROWS, 1), 3)
        other.load_state_dict(optimizer.state_dict())
        with zk.gather(other.model.parameters(), write=True):
            other.model.load_state_dict(weights)
        assert_equal(exact(other), have)
    for path in (folder, f"{folder}-rows") if world == 1 else ():
        (file,) = export(Path(path), Path(f"{path}-exported"), torch.float32).files
        assert_equal(load_file(file), weights)


@pytest.mark.parametrize("stage", (1, 3))
def test_training_is_torchs_and_the_format_may_change_between_saving_and_loading(stage: int, tmp_path: Path) -> None:
    handed_over((stage, str(tmp_path / "saved")))


def other_formats(_: object) -> str:
    try:
        wrap(build(LAST if dist.get_rank() else ROWS), 2)
    except ValueError as error:
        return str(error)
    return "nothing"


def test_ranks_hand_over_from_one_format_to_the_other(tmp_path: Path) -> None:
    """Three, which divide units unevenly."""
    *handed, messages = run_world(3, call, [*((handed_over, (stage, str(tmp_path / str(stage)))) for stage in (1, 3)), (other_formats, None)])
    assert handed == [[None] * 3] * 2, handed
    for message in messages:
        assert "parameter 'turned' is (36, 9) of torch.float32 on rank 0 and (36, 9) of torch.float32, strides (1, 36) on rank 1" in message
