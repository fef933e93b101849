"""Model parallel ranks: what the whole model trains on one rank; one norm, one decision to skip, a folder for each part."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

import zk
from tests.addons.common import faults_of_ranks, same
from tests.models import DEVICE, adamw, descend
from tests.world import call, mesh_of

pytestmark = pytest.mark.usefixtures("torch_engine")
STEPS, WIDTH = 3, 16
REPLICATED = ["down.bias", "norm.weight", "norm.bias"]


def summed(value: Tensor, group: Any) -> Tensor:
    value = value.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(value, group=group)
    return value


class Sum(torch.autograd.Function):
    """Of all parts; its gradient is that of each."""

    forward = staticmethod(lambda ctx, value, group: summed(value, group))
    backward = staticmethod(lambda ctx, grad: (grad, None))


class Block(nn.Module):
    """A column parallel layer and a row parallel one, where ``group`` is set."""

    group: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if self.group is None:
            return x + self.down(F.gelu(self.up(self.norm(x))))
        normed = self.norm(x)
        normed.register_hook(lambda grad: summed(grad, self.group))  # parts compute with the same input
        return x + Sum.apply(F.linear(F.gelu(self.up(normed)), self.down.weight), self.group) + self.down.bias


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(3))).to(DEVICE)


def part_of(name: str, value: Tensor, rank: int) -> Tensor:
    return value if name.endswith(tuple(REPLICATED)) else value.chunk(2, int(name.endswith("down.weight")))[rank].contiguous()


def loss_at(model: nn.Module, step: int, rank: int) -> Tensor:
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank)).to(DEVICE)
    return (model(x.to(next(model.parameters()).dtype)).float() - 1).square().mean()


def plain(clip: float | None, ranks: int, accumulation: int = 1) -> tuple[dict[str, Tensor], list[float]]:
    """The whole model on one rank, on the batches of all: parameters, and norms."""
    model, norms = net(), list[float]()
    inner = adamw(model)
    inner.register_step_pre_hook(lambda *_: norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip or float("inf")))))
    for step in range(STEPS):
        losses = [loss_at(model, step + 100 * micro, rank) / ranks for rank in range(ranks) for micro in range(accumulation)]
        descend(inner, torch.stack(losses).sum())
    return dict(model.named_parameters()), norms


def mesh() -> Any:
    """Parts on ranks 0 and 1, and on 2 and 3; data on 0 and 2, and on 1 and 3."""
    return mesh_of(torch.device(DEVICE).type, (dist.get_world_size() // 2, 2), "dp", "tp")


def parts_of(kind: str) -> Any:
    """A model that is cut by hand or as DTensors."""
    model, group = net(), mesh()["tp"].get_group()
    for block in model if kind == "DTensor" else ():
        parallelize_module(block, mesh()["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    for name, param in model.named_parameters() if kind == "manual" else ():
        param.data = part_of(name, param.data, dist.get_rank(group))
        model[int(name[0])].group = group
    return model


def made(kind: str, **options: Any) -> tuple[Any, zk.ZeroOptimizer]:
    model = parts_of(kind)
    given = {"model_parallel_group": mesh()["tp"].get_group(), "replicated_params": REPLICATED} if kind == "manual" else {}
    given |= {"process_group": mesh()["dp"].get_group(), "units": [Block]}
    return model, zk.ZeroOptimizer(model, adamw(model), **given | options)


def train(model: nn.Module, optimizer: Any, steps: Any = range(STEPS), accumulation: int = 1) -> list[float]:
    """Returns the norms."""
    norms = []
    for step in steps:
        for micro in range(accumulation):
            optimizer.backward(loss_at(model, step + 100 * micro, mesh().get_local_rank("dp")))
        optimizer.step()
        optimizer.zero_grad()
        norms.append(optimizer.metrics()["grad_norm"])
    return norms


def whole(model: nn.Module) -> list[Tensor]:
    return [(param.full_tensor() if isinstance(param, DTensor) else param).clone() for param in model.parameters()]


def alike(value: Any) -> bool:
    """All parts have it."""
    said: list[Any] = [None, None]
    dist.all_gather_object(said, value, group=mesh()["tp"].get_group())
    return said[0] == said[1]


def parity(case: tuple[str, dict[str, Any]]) -> None:
    """As the whole model on one rank, but for the order of sums in products; replicated parameters are alike to the bit."""
    kind, options = case
    accumulation, clip = options.pop("accumulation", 1), options.get("clip_grad_norm")
    want, norms = plain(clip, dist.get_world_size() // 2, accumulation)
    model, optimizer = made(kind, **options)
    torch.testing.assert_close(train(model, optimizer, accumulation=accumulation), norms, rtol=1e-4, atol=0.0)
    optimizer.close()
    assert clip is None or max(norms) > clip
    for (name, param), value in zip(model.named_parameters(), whole(model), strict=True):
        part = want[name] if kind == "DTensor" else part_of(name, want[name], mesh().get_local_rank("tp"))
        torch.testing.assert_close(value, part, rtol=1e-3, atol=1e-5)
        local = param.to_local() if isinstance(param, DTensor) else param
        assert not name.endswith(tuple(REPLICATED)) or alike(local.tolist()), name
        assert isinstance(param, DTensor) == (kind == "DTensor" and "norm" not in name)
    if clip is None:  # the same parts in plain torch, and the same torch.optim: the same bits
        parts = parts_of(kind)
        inner = adamw(parts)
        for step in range(STEPS):
            descend(inner, loss_at(parts, step, 0))
        assert same(whole(model), whole(parts))
    loss_at(model, 0, 0).backward()  # it is plain torch's again


def one_decision(kind: str) -> None:
    """What is not finite on one part, in its own parameters or replicated ones, skips the step on all; nothing changes."""
    model, optimizer = made("manual", dtype="fp16", loss_scale=zk.DynamicLossScale(init=1024.0, hysteresis=1))
    before = whole(model)
    handle = dict(model.named_parameters())[kind].register_hook(lambda grad: grad + (0.0, float("inf"))[mesh().get_local_rank("tp")])
    norms = train(model, optimizer, range(1))
    handle.remove()
    assert not torch.tensor(norms).isfinite() and optimizer.metrics()["loss_scale"] == 512.0 and optimizer.skipped_steps == 1
    assert same(whole(model), before)
    assert alike(train(model, optimizer, range(3))) and optimizer.num_steps == 3
    optimizer.close()


def replicated_gradients_that_differ(_: None) -> None:
    model, optimizer = made("manual")
    model[0].norm.bias.register_hook(lambda grad: grad * (1 + mesh().get_local_rank("tp")))
    with pytest.raises(RuntimeError, match=r"parts have other gradients of replicated_params.*optimizer\.clip_grad_norm_"):
        train(model, optimizer)
    model, optimizer = made("manual")
    optimizer.backward(loss_at(model, 0, 0))
    torch.testing.assert_close(float(optimizer.clip_grad_norm_(0.05)), plain(None, 1)[1][0], rtol=1e-4, atol=0.0)


def checkpoints(case: tuple[str, str]) -> None:
    """Each part has its folder; a run that loads all of them goes on to the same bits; parts of two steps are refused."""
    (kind, folder), tp = case, mesh().get_local_rank("tp")
    model, optimizer = made(kind, clip_grad_norm=0.05)
    own = Path(folder, f"part-{tp}-of-2")

    def remove(rank: int, name: str) -> None:
        dist.barrier()
        if dist.get_rank() == rank:
            shutil.rmtree(own / name)
        dist.barrier()

    for steps in (range(2), range(2, STEPS)):
        train(model, optimizer, steps)
        optimizer.save_checkpoint(folder)
    optimizer.close()
    want = whole(model)
    assert {path.name for path in Path(folder).iterdir()} == {"part-0-of-2", "part-1-of-2"}
    assert {path.name for path in own.glob("step-*")} == {"step-00000002", "step-00000003"}
    remove(1, "step-00000003")
    model, optimizer = made(kind, clip_grad_norm=0.05, stage=3)
    for act in (lambda: optimizer.load_checkpoint(folder), lambda: train(model, optimizer)):
        with pytest.raises(RuntimeError, match=r"have made \[3, 2\] steps: load a checkpoint that all have \(remove newer ones\)"):
            act()
    remove(0, "step-00000003")
    optimizer.load_checkpoint(folder)
    train(model, optimizer, range(2, STEPS))
    optimizer.close()
    assert same(whole(model), want)
    if dist.get_rank() == 0:
        (own / "step-00000002" / "manifest.json").write_text("{}")
    dist.barrier()
    model, optimizer = made(kind)
    with pytest.raises(ValueError, match="step-00000002"):  # on all
        optimizer.load_checkpoint(folder)
    optimizer.close()


def refusals(_: None) -> None:
    tp = mesh()["tp"].get_group()
    for options, words in (
        ({"model_parallel_group": None}, r"need each other \(\[\] for none\)"),
        ({"replicated_params": None}, r"need each other"),
        ({"model_parallel_group": mesh()["tp"]}, r"must be a ProcessGroup.*mesh\.get_group\(\).*got DeviceMesh"),
        ({"replicated_params": ["bias", "nrm.weight"]}, "is, or ends with, 'nrm.weight'"),
        ({"process_group": None}, r"process_group must have the ranks with the same part.* \[\(0, 0, 1\), \(1, 0, 1\), \(0, 2, 3\), \(1, 2, 3\)\]"),
        ({"clip_grad_norm": 1.0 + mesh().get_local_rank("tp")}, r"same data and options.*\(1.0, 'auto'\)\), \(\d, 2, \(2.0, 'auto'\)\)"),
    ):
        with pytest.raises((ValueError, TypeError), match=words):
            made("manual", **options)
    with pytest.raises(ValueError, match="DTensors say which"):
        made("DTensor", model_parallel_group=tp, replicated_params=[])
    model = parts_of("DTensor")
    inner, dp = adamw(model), {"process_group": mesh()["dp"].get_group()}
    with pytest.raises(ValueError, match="with the same part"):
        zk.ZeroOptimizer(model, inner)
    loss_at(model, 0, 0)  # what was refused computes, and may be tried again
    optimizer = zk.ZeroOptimizer(model, inner, **dp)
    train(model, optimizer, range(1))
    optimizer.close()
    loss_at(model, 0, 0).backward()
    with pytest.raises(ValueError, match=r"before they have a gradient"):
        zk.ZeroOptimizer(model, inner, **dp)
    up: Any = net()[0].up
    up.weight = nn.Parameter(distribute_tensor(up.weight.detach(), mesh(), [Shard(0), Replicate()]))
    with pytest.raises(ValueError, match=r"'weight' is a DTensor with .*over one dimension.*leave fully_shard out"):
        zk.ZeroOptimizer(up, adamw(up), **dp)


CLIPPED = {"clip_grad_norm": 0.05}


def test_two_parts_train_what_the_whole_model_trains(tmp_path: Path) -> None:
    nvme = {"stage": 3, "param_tier": "nvme", "optimizer_tier": "nvme", "nvme_path": str(tmp_path)}
    cases: list[Any] = [("manual", {"stage": 2}), ("DTensor", {"stage": 3}), ("DTensor", nvme | CLIPPED)]
    assert faults_of_ranks(2, parity, cases) == {}


def test_parts_over_data_parallel_ranks_train_decide_together_and_keep_a_folder_each(tmp_path: Path) -> None:
    ways: list[tuple[str, dict[str, Any]]] = [
        ("manual", {"stage": 0, "accumulation": 2}),
        ("manual", {"stage": 3}),
        ("DTensor", {"stage": 1, "overlap_step": "backward", "optimizer_tier": "host"}),
    ]
    cases: list[Any] = [(parity, (kind, CLIPPED | options)) for kind, options in ways]
    cases += [(one_decision, name) for name in ("1.up.weight", "2.norm.bias")]
    cases += [(checkpoints, (kind, str(tmp_path / kind))) for kind in ("manual", "DTensor")]
    assert faults_of_ranks(4, call, [*cases, (replicated_gradients_that_differ, None), (refusals, None)]) == {}
