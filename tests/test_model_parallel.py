"""Tensor parallel and replicated ranks beside one process that has the whole model and all data."""

from __future__ import annotations

import dataclasses
import functools
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import zk
from tests.megatron import batch, cut_model, loss_of, part_of, whole_model
from tests.world import call, mesh_of, run_world
from zk.checkpoint.export import export
from zk.parallel.comm import Group, connect

STEPS = 3  # the third one uses every buffer again, and every order is known by then


@dataclasses.dataclass(frozen=True)
class Case:
    """One training. ``kind``: tensor (data x tensor) or hybrid (replicas x shards)."""

    kind: str = "tensor"
    stage: int = 2
    tier: str = "device"
    clip: float | None = None
    overlap_step: bool = False
    saves: bool = False
    overflow: bool = False
    shape: tuple[int, int] = (2, 2)

    def options(self, folder: str) -> dict[str, Any]:
        tiers: dict[str, Any] = {"optimizer_tier": self.tier}
        if self.stage == 3 and self.tier != "device":
            tiers["param_tier"] = self.tier
        if self.tier == "nvme":
            tiers["nvme_path"] = folder
        return {"stage": self.stage, "clip_grad_norm": self.clip, "overlap_step": self.overlap_step, **tiers}


@functools.cache
def plain(data: int, clip: float | None, overflow: bool) -> tuple[list[float], dict[str, Tensor], list[float]]:
    """Losses of all data, parameters after training, and norms, in one process of plain torch."""
    model = whole_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, norms = [], []
    for step in range(STEPS):
        loss = torch.stack([loss_of(model, batch(step, rank)) for rank in range(data)]).mean()
        losses.append(loss.item())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip or float("inf"))
        norms.append(norm.item())
        if not (overflow and step == 1):
            optimizer.step()
        optimizer.zero_grad()
    return losses, {name: param.detach().clone() for name, param in model.named_parameters()}, norms


def train(case: Case, model: torch.nn.Module, optimizer: zk.ZeroOptimizer, rank: int, data: Any, steps: range) -> tuple[list[float], list[float]]:
    """Mean losses over ``data`` ranks, of which this is number ``rank``, and norms."""
    losses, norms = [], []
    for step in steps:
        loss = loss_of(model, batch(step, rank).to(optimizer.device))
        mean = loss.detach().clone()
        dist.all_reduce(mean, group=data)
        losses.append(mean.item() / dist.get_world_size(data))
        if case.overflow and step == 1 and dist.get_rank() == 0:  # one part of the model alone sees it
            handle = model.get_parameter("blocks.1.up.weight").register_hook(lambda grad: grad * float("inf"))
            loss.backward()
            handle.remove()
        else:
            loss.backward()
        optimizer.step()
        norms.append(optimizer.metrics()["grad_norm"])
        optimizer.zero_grad()
    return losses, norms


@functools.cache
def lines_of(device: str, shape: tuple[int, int]) -> tuple[Any, Any, DeviceMesh]:
    """The groups of a rank's column and row, made once as those of ``mesh_of`` are, and a mesh of them."""
    ranks = torch.arange(math.prod(shape)).view(shape)
    outer, inner = (dist.new_subgroups_by_enumeration(table.tolist())[0] for table in (ranks.T, ranks))
    return outer, inner, DeviceMesh.from_group([outer, inner], device, mesh=ranks, mesh_dim_names=("outer", "inner"))


def run(case: Case) -> str:
    """On every rank; says what is not right."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    outer, inner, mesh = lines_of(device, case.shape)
    with tempfile.TemporaryDirectory() as folder:
        options = case.options(folder)
        if case.kind == "tensor":
            make, count, rank, data = functools.partial(cut_model, inner), case.shape[0], dist.get_rank(outer), outer
            groups: dict[str, Any] = {"process_group": outer, "model_parallel_group": mesh["inner"]}
        else:
            make, count, rank, data = whole_model, case.shape[0] * case.shape[1], dist.get_rank(), None
            groups = {"process_group": mesh}

        def begin() -> tuple[torch.nn.Module, zk.ZeroOptimizer]:
            model = make().to(device)
            return model, zk.ZeroOptimizer(model, torch.optim.AdamW(model.parameters(), lr=1e-2), **groups, **options)

        model, optimizer = begin()
        if case.saves:
            name = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
            dist.broadcast_object_list(name)
            root = Path(name[0])
            first = train(case, model, optimizer, rank, data, range(2))
            optimizer.save_checkpoint(root, async_save=True)
            train(case, model, optimizer, rank, data, range(2, 3))
            optimizer.close()
            model, optimizer = begin()
            optimizer.load_checkpoint(root)
            second = train(case, model, optimizer, rank, data, range(2, STEPS))
            losses, norms = (a + b for a, b in zip(first, second, strict=True))
        else:
            losses, norms = train(case, model, optimizer, rank, data, range(STEPS))
        with zk.gather(model.parameters()):
            params = {name: param.detach().cpu().clone() for name, param in model.named_parameters()}
        skipped = optimizer.metrics()["skipped_steps"]
        optimizer.close()
    want_losses, want, want_norms = plain(count, case.clip, case.overflow)
    problems = []
    if skipped != case.overflow:
        problems.append(f"{skipped} steps skipped")
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(want_losses), rtol=1e-5, atol=1e-6)
    for step, (norm, wanted) in enumerate(zip(norms, want_norms, strict=True)):
        if not (case.overflow and step == 1):
            torch.testing.assert_close(norm, wanted, rtol=1e-4, atol=0)
    for name, param in model.named_parameters():
        whole = want[name] if case.kind == "hybrid" else part_of(name, param, want[name], inner)
        torch.testing.assert_close(params[name], whole, rtol=1e-4, atol=2e-5, msg=lambda said, name=name: f"{name}: {said}")
    return "; ".join(problems)


CASES = [
    *(Case(stage=stage, clip=clip) for stage, clip in ((0, 0.3), (1, None))),
    Case(stage=3, clip=0.3, overflow=True),
    *(Case(stage=stage, clip=0.3, tier="host", overlap_step=True, saves=stage == 3) for stage in (2, 3)),
    Case("hybrid", stage=0),
    Case("hybrid", stage=3, clip=0.3, tier="host", overlap_step=True, saves=True),
    Case("hybrid", stage=2, clip=0.3, tier="nvme"),
]


@pytest.mark.device_only
def test_ranks_train_as_one_process_where_the_link_is_late() -> None:
    cases = [Case(kind, stage=stage, clip=0.3, tier="host", overlap_step=stage == 3) for kind, stage in (("tensor", 2), ("hybrid", 3))]
    assert run_world(4, run, cases, timeout=60) == [[""] * 4] * len(cases)


def train_engine(_: int) -> list[float]:
    """Losses of DeepSpeed's engine, with the groups of a mesh."""
    mesh = mesh_of("cpu", (2, 2), "data", "tensor")
    model = cut_model(mesh.get_group("tensor"))
    config = {"train_micro_batch_size_per_gpu": 3, "gradient_clipping": 0.3, "zero_optimization": {"stage": 2}}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    groups = {"process_group": mesh.get_group("data"), "model_parallel_group": mesh.get_group("tensor")}
    engine, *_ = zk.initialize(model=model, optimizer=optimizer, config=config, **groups)
    losses = []
    for step in range(STEPS):
        loss = loss_of(engine, batch(step, mesh.get_local_rank("data")))
        engine.backward(loss)
        engine.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / 4)
    return losses


def fail_in_part(_: int) -> str:
    """A rank fails while its part publishes what was loaded; says what each hears."""
    mesh = mesh_of("cpu", (2, 2), "data", "tensor")
    model = cut_model(mesh.get_group("tensor"))
    optimizer = zk.ZeroOptimizer(
        model, torch.optim.AdamW(model.parameters()), process_group=mesh["data"], model_parallel_group=mesh["tensor"], check_memory=False
    )
    loss_of(model, batch(0, mesh.get_local_rank("data"))).backward()
    optimizer.step()
    state = optimizer.state_dict()

    def refuse(*_: Any) -> None:
        raise RuntimeError("no memory")

    if dist.get_rank() == 1:
        optimizer.held[0].republish = refuse  # type: ignore[method-assign]
    try:
        optimizer.load_state_dict(state)
    except RuntimeError as error:
        return str(error)
    finally:
        optimizer.close()
    return "nothing"


def mean_over_replicas(numel: int) -> bool:
    """Reduce buckets of bf16 over replicas of two ranks: summed in fp32 in rows, then in columns, and rounded once."""
    world = dist.get_world_size()
    comm = connect(mesh_of("cpu", (world // 2, 2)), True, torch.device("cpu"))
    assert isinstance(comm, Group)
    buckets = [torch.randn(2 * numel, generator=torch.Generator().manual_seed(rank)).bfloat16() for rank in range(world)]
    shard, stats = torch.empty(numel, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.float64)
    comm.reduce_scatter(0, buckets[comm.rank].clone(), shard, stats).wait()
    rows = [(buckets[row].float() + buckets[row + 1]) / 2 for row in range(0, world, 2)]
    want = (torch.stack(rows).sum(0) / len(rows)).bfloat16()[comm.shard_rank * numel :][:numel]
    comm.close()
    return torch.equal(shard, want) and torch.equal(stats[0], want.double().square().sum()) and stats[1].item() == 0


# ---- checkpoints of one mesh in another -------------------------------------------------------------------------------------------

SHAPES = [(2, 2), (1, 4), (4, 1)]  # data x tensor


def grown(shape: tuple[int, int], steps: range, root: Path, loads: bool, saves: bool) -> list[float]:
    """Losses of some steps on a mesh; ``loads`` from the folder first, ``saves`` into it then."""
    mesh = mesh_of("cpu", shape, "data", "tensor")
    tensor = mesh.get_group("tensor") if shape[1] > 1 else None
    model = cut_model(tensor) if tensor is not None else whole_model()
    groups: dict[str, Any] = {"process_group": mesh["data"], "model_parallel_group": mesh["tensor"] if tensor is not None else None}
    optimizer = zk.ZeroOptimizer(model, torch.optim.AdamW(model.parameters(), lr=1e-2), stage=3, clip_grad_norm=0.3, **groups)
    if loads:
        optimizer.load_checkpoint(root)
    losses = []
    for step in steps:  # data parallel ranks share the same four batches, however many they are
        mine = [loss_of(model, batch(step, rank)) for rank in range(4) if rank % shape[0] == mesh.get_local_rank("data")]
        loss = torch.stack(mine).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / 4)
    if saves:
        optimizer.save_checkpoint(root)
    optimizer.close()
    return losses


def change_meshes(root: str) -> list[str]:
    """Train on each mesh from the checkpoint of another, on every rank; says what differs."""
    problems = []
    want = None
    for shape in SHAPES:
        grown(shape, range(1), Path(root, str(shape)), loads=False, saves=True)
    for before, after in zip(SHAPES, SHAPES[1:] + SHAPES[:1], strict=True):
        losses = torch.tensor(grown(after, range(1, 2), Path(root, str(before)), loads=True, saves=False))
        want = losses if want is None else want
        if not torch.allclose(losses, want, rtol=1e-5, atol=1e-6):
            problems.append(f"{before} in {after}: {losses.tolist()} instead of {want.tolist()}")
    return problems


# ---- all of it in one world ---------------------------------------------------------------------------------------------------------

JOBS: list[tuple[Callable[[Any], Any], Any]] = [
    *((run, case) for case in CASES),
    (train_engine, 0),
    *((mean_over_replicas, numel) for numel in (64, 33, 1)),
    (fail_in_part, 0),
]


@functools.cache
def outcomes(folder: str) -> list[list[Any]]:
    """What came of each job, and of changing meshes, on each of four ranks."""
    return run_world(4, call, [(change_meshes, folder), *JOBS], timeout=60)


def outcomes_of(function: Callable[[Any], Any], folder: str) -> list[list[Any]]:
    return [rows for (each, _), rows in zip(JOBS, outcomes(folder)[1:], strict=True) if each is function]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("meshes"))


@pytest.mark.parametrize("number", range(len(CASES)), ids=map(str, CASES))
def test_ranks_train_as_one_process(number: int, folder: str) -> None:
    assert outcomes_of(run, folder)[number] == [""] * 4


def test_the_engine_takes_megatrons_groups(folder: str) -> None:
    for losses in outcomes_of(train_engine, folder)[0]:
        assert losses == pytest.approx(plain(2, 0.3, False)[0], rel=1e-5)


def test_a_rank_that_fails_while_its_part_publishes_is_heard_of_by_all(folder: str) -> None:
    assert all("no memory" in said for said in outcomes_of(fail_in_part, folder)[0])


def test_a_gradient_is_rounded_once_over_rows_and_columns(folder: str) -> None:
    assert outcomes_of(mean_over_replicas, folder) == [[True] * 4] * 3
    assert run_world(6, mean_over_replicas, [64, 1], timeout=60) == [[True] * 6] * 2


def test_a_checkpoint_of_one_mesh_goes_on_in_another_and_in_one_process(folder: str, tmp_path: Path) -> None:
    assert outcomes(folder)[0] == [[]] * 4
    want, params, _ = plain(4, 0.3, False)
    for shape in SHAPES:
        model = whole_model()
        optimizer = zk.ZeroOptimizer(model, torch.optim.AdamW(model.parameters(), lr=1e-2), stage=2, clip_grad_norm=0.3)
        optimizer.load_checkpoint(Path(folder, str(shape)))
        for step in range(1, STEPS):
            loss = torch.stack([loss_of(model, batch(step, rank)) for rank in range(4)]).mean()
            assert loss.item() == pytest.approx(want[step], rel=1e-5), shape
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        for name, param in model.named_parameters():
            torch.testing.assert_close(param.detach(), params[name], rtol=1e-4, atol=2e-5)
        optimizer.close()
        exported = export(Path(folder, str(shape)), tmp_path / f"weights {shape}")
        written = load_file(exported.files[0])
        assert {name: tuple(value.shape) for name, value in written.items()} == {
            name: tuple(param.shape) for name, param in whole_model().named_parameters()
        }
        torch.testing.assert_close(
            written["blocks.1.down.weight"], load_file(tmp_path / f"weights {SHAPES[0]}" / "model.safetensors")["blocks.1.down.weight"]
        )
