"""Models cut by torch's parallelize_module beside one process that has the whole model and all data."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import zk
from tests.models import DEVICE
from tests.tensor_parallel import INNER, Model, batch, cut, loss_of, whole, whole_model
from tests.world import call, mesh_of, run_world
from zk.checkpoint.export import export

STEPS = 3


@dataclasses.dataclass(frozen=True)
class Case:
    """One training on a mesh of data x tensor ranks. ``kind``: as ``cut`` has it."""

    kind: str = "tensor"
    stage: int = 2
    clip: float | None = None
    tier: str = "device"
    overlap_step: bool = False
    saves: bool = False
    overflow: bool = False
    shape: tuple[int, int] = (2, 2)
    inner: int = INNER
    dtype: str | None = None

    def options(self, folder: str) -> dict[str, Any]:
        tiers: dict[str, Any] = {"optimizer_tier": self.tier}
        if self.stage == 3 and self.tier != "device":
            tiers["param_tier"] = self.tier
        if self.tier == "nvme":
            tiers["nvme_path"] = folder
        return {"stage": self.stage, "clip_grad_norm": self.clip, "overlap_step": self.overlap_step, "dtype": self.dtype, **tiers}


@functools.cache
def plain(data: int, clip: float | None, overflow: bool, inner: int) -> tuple[list[float], dict[str, Tensor], list[float], dict[str, Tensor]]:
    """Losses of all data, parameters after training, norms, and the gradients of the first step, in one process of plain torch."""
    model = whole_model(inner)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, norms, grads = [], [], dict[str, Tensor]()
    for step in range(STEPS):
        loss = torch.stack([loss_of(model, batch(step, rank)) for rank in range(data)]).mean()
        losses.append(loss.item())
        loss.backward()
        grads = grads or {name: param.grad.clone() for name, param in model.named_parameters()}  # type: ignore[union-attr]
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip or float("inf"))
        norms.append(norm.item())
        if not (overflow and step == 1):
            optimizer.step()
        optimizer.zero_grad()
    return losses, {name: param.detach().clone() for name, param in model.named_parameters()}, norms, grads


def train(case: Case, model: nn.Module, optimizer: zk.ZeroOptimizer, mesh: Any, steps: range) -> tuple[list[float], list[float]]:
    """Mean losses over data parallel ranks, and norms."""
    losses, norms, data = [], [], mesh.get_group("data")
    for step in steps:
        loss = loss_of(model, batch(step, mesh.get_local_rank("data")).to(DEVICE))
        mean = loss.detach().float()
        dist.all_reduce(mean, group=data)
        losses.append(mean.item() / case.shape[0])
        if case.overflow and step == 1 and dist.get_rank() == 0:  # one part of the model alone sees it
            handle = model.get_parameter("blocks.1.up.weight").register_hook(lambda grad: grad * float("inf"))
            loss.backward()
            handle.remove()
        else:
            loss.backward()
        if step == 0:
            _, _, _, grads = plain(case.shape[0], case.clip, case.overflow, case.inner)
            for name, param in model.named_parameters():
                if case.dtype is None and name != "blocks.0.norm.bias":  # of one unit, the rest stays where it is
                    assert isinstance(param.grad, DTensor) == isinstance(param, DTensor)
                    torch.testing.assert_close(whole(param.grad).cpu(), grads[name], rtol=1e-4, atol=1e-6)
        if case.clip is not None:
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), case.clip).item())
            optimizer.step()
        else:
            optimizer.step()
            norms.append(optimizer.metrics()["grad_norm"])
        optimizer.zero_grad()
    return losses, norms


def run(case: Case) -> str:
    """On every rank; says what is not right."""
    mesh = mesh_of(DEVICE.type, case.shape, "data", "tensor")
    with tempfile.TemporaryDirectory() as folder:

        def made() -> tuple[Model, zk.ZeroOptimizer]:
            model = cut(whole_model(case.inner).to(DEVICE), mesh["tensor"], case.kind)
            inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
            return model, zk.ZeroOptimizer(model, inner, process_group=mesh["data"], **case.options(folder))

        model, optimizer = made()
        if case.saves:
            root = shared_folder()
            first = train(case, model, optimizer, mesh, range(2))
            optimizer.save_checkpoint(root, async_save=True)
            train(case, model, optimizer, mesh, range(2, 3))
            optimizer.close()
            model, optimizer = made()
            optimizer.load_checkpoint(root)
            second = train(case, model, optimizer, mesh, range(2, STEPS))
            losses, norms = (a + b for a, b in zip(first, second, strict=True))
        else:
            losses, norms = train(case, model, optimizer, mesh, range(STEPS))
        params = optimizer.consolidated_state_dict("fp32")
        skipped = optimizer.metrics()["skipped_steps"]
        optimizer.close(gather=True)
        after = {name: whole(param.detach()).cpu() for name, param in model.named_parameters()}
    want_losses, want, want_norms, _ = plain(case.shape[0], case.clip, case.overflow, case.inner)
    rough = case.dtype is not None
    problems = [f"{skipped} steps skipped"] if skipped != case.overflow else []
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(want_losses), rtol=2e-2 if rough else 1e-5, atol=1e-6)
    for step, (norm, wanted) in enumerate(zip(norms, want_norms, strict=True)):
        if not (case.overflow and step == 1):
            torch.testing.assert_close(norm, wanted, rtol=3e-2 if rough else 1e-4, atol=0)
    for name, param in want.items():
        allowed = {"rtol": 5e-2, "atol": 2e-2} if rough else {"rtol": 1e-4, "atol": 2e-5}
        torch.testing.assert_close(params[name], param, **allowed, msg=lambda said, name=name: f"{name}: {said}")
        assert torch.equal(params[name].to(after[name].dtype), after[name]), name
    return "; ".join(problems)


CASES = [
    Case("sequence", 0),
    Case("tensor", 3, 0.3, overflow=True),
    Case("sequence", 3, 0.3, "host", overlap_step=True, saves=True),
    Case("tensor", 3, dtype="bf16"),
]
ALONE = [Case("tensor", 3, 0.3, "nvme", saves=True, shape=(1, 2)), Case("tensor", 2, 0.3, "host", overlap_step=True, overflow=True, shape=(1, 2))]
# 40 are 14, 14 and 12 for three ranks, and 4 are 2, 2 and none
UNEVEN = [Case(kind, 3, 0.3, saves=inner == 4, shape=(1, 3), inner=inner) for kind, inner in (("sequence", 40), ("tensor", 4))]


# ---- what user code does with parameters, gradients and state ---------------------------------------------------------------------


def begin(stage: int, kind: str = "sequence", shape: tuple[int, int] = (2, 2), model: Model | None = None, inner: Any = None) -> Any:
    """A mesh, a model cut over it, and its optimizer, to which ``inner`` is given."""
    mesh = mesh_of("cpu", shape, "data", "tensor")
    model = model or cut(whole_model(), mesh["tensor"], kind)
    inner = inner or torch.optim.AdamW(model.parameters(), lr=1e-2)
    return mesh, model, zk.ZeroOptimizer(model, inner, stage=stage, process_group=mesh["data"])


def go_on(mesh: Any, model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Train some steps; data parallel ranks share the same two batches, however many they are."""
    size = mesh["data"].size()
    for step in steps:
        torch.stack([loss_of(model, batch(step, rank)) for rank in range(2) if rank % size == mesh.get_local_rank("data")]).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def values_of(model: nn.Module) -> dict[str, Tensor]:
    with zk.gather(model.parameters()):
        return {name: whole(param.detach().clone()) for name, param in model.named_parameters()}


def compare(found: dict[str, Tensor], wanted: dict[str, Tensor], rtol: float = 0, atol: float = 0) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=rtol, atol=atol, msg=lambda said, name=name: f"{name}: {said}")  # type: ignore[misc]


def shared_folder() -> Path:
    name = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(name)
    return Path(name[0])


def states(stage: int) -> None:
    """state_dict() of both, and optimizer.state."""
    mesh, model, optimizer = begin(stage, "tensor")
    go_on(mesh, model, optimizer, range(1))
    param = model.blocks[0].up.weight
    shown = optimizer.state[param]["exp_avg"]
    assert isinstance(shown, DTensor) and shown.placements == param.placements and shown.shape == param.shape
    weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    number = [name for name, _ in model.named_parameters()].index("blocks.0.up.weight")
    assert torch.equal(whole(state["state"][number]["exp_avg"]), whole(shown))
    go_on(mesh, model, optimizer, range(1, 2))
    want = values_of(model)
    optimizer.close()
    mesh, model, optimizer = begin(stage, "tensor")
    go_on(mesh, model, optimizer, range(1))
    model.load_state_dict(weights)
    optimizer.load_state_dict(state)
    go_on(mesh, model, optimizer, range(1, 2))
    compare(values_of(model), want)
    optimizer.close()


def taken_over(stage: int) -> None:
    """A plain torch optimizer over the same DTensors, and its state."""
    mesh = mesh_of("cpu", (1, 2), "data", "tensor")
    model, twin = (cut(whole_model(), mesh["tensor"], "sequence") for _ in range(2))
    plainly = torch.optim.AdamW(model.parameters(), lr=1e-2)
    go_on(mesh, model, plainly, range(2))
    twin.load_state_dict(model.state_dict())
    inner = torch.optim.AdamW(twin.parameters(), lr=1e-2)
    inner.load_state_dict(copy.deepcopy(plainly.state_dict()))
    _, _, optimizer = begin(stage, shape=(1, 2), model=twin, inner=inner)
    for each in ((model, plainly), (twin, optimizer)):
        go_on(mesh, *each, range(2, STEPS))
    compare(values_of(twin), {name: whole(param.detach()) for name, param in model.named_parameters()}, rtol=1e-5, atol=1e-6)
    optimizer.close()


def half_of_the_world() -> tuple[int, int]:
    """Two ranks have the parts of a tensor, and where there are more, others have them too."""
    return dist.get_world_size() // 2, 2


def gradients(stage: int) -> None:
    """What is done to gradients between backward and step, beside plain torch."""
    mesh, model, optimizer = begin(stage, shape=half_of_the_world())
    alone = whole_model()
    plainly = torch.optim.AdamW(alone.parameters(), lr=1e-2)
    mine = mesh.get_local_rank("data")
    for step in range(4):
        for micro in range(1 + (step in (0, 3))):
            with optimizer.no_sync() if step == 3 and micro == 0 else contextlib.nullcontext():
                loss_of(model, batch(10 * step + micro, mine)).backward()
            torch.stack([loss_of(alone, batch(10 * step + micro, rank)) for rank in range(mesh["data"].size())]).mean().backward()
        norms = []
        for each in (model, alone):
            if step == 0:
                for param in each.blocks[0].parameters():
                    param.grad.mul_(0.5)
            if step == 1:
                each.blocks[1].up.weight.grad = each.blocks[1].up.weight.grad * 3
                each.norm.weight.grad = None
            if step == 2:
                norms.append(whole(torch.nn.utils.clip_grad_norm_(each.blocks[1].up.parameters(), 0.01)))
        torch.testing.assert_close(*(norms or [torch.ones(())] * 2), rtol=1e-4, atol=0)
        optimizer.step()
        plainly.step()
        for name, param in model.named_parameters():
            wanted = alone.get_parameter(name).grad
            found = whole(param.grad) if param.grad is not None else None
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)
        for each in (optimizer, plainly):
            each.zero_grad(set_to_none=step % 2 == 0)
    compare(values_of(model), {name: param.detach() for name, param in alone.named_parameters()}, rtol=1e-4, atol=2e-5)
    with pytest.raises(RuntimeError, match="must be a DTensor"):
        model.blocks[0].up.weight.grad = torch.zeros(INNER, 16)
    optimizer.close()


def written(stage: int) -> None:
    """Parameters that user code writes and reads, and the whole model."""
    mesh, model, optimizer = begin(stage, shape=half_of_the_world())
    go_on(mesh, model, optimizer, range(1))
    before = values_of(model)
    with zk.gather(model.parameters(), write=True), torch.no_grad():
        for param in model.parameters():
            param.mul_(2)
    doubled = {name: 2 * value for name, value in before.items()}
    compare(values_of(model), doubled)
    found = optimizer.consolidated_state_dict()
    compare({name: found[name] for name in doubled}, doubled)
    assert found["head.weight"].data_ptr() == found["embed.weight"].data_ptr()
    named = optimizer.consolidated_state_dict(rank0_only=True, names=["norm.weight"])
    assert list(named) == ["norm.weight"] * (dist.get_rank() == 0)
    go_on(mesh, model, optimizer, range(1, 2))
    compare(values_of(model), doubled, atol=0.05)  # masters have followed
    if stage == 3:
        with pytest.raises(RuntimeError, match="read while released"):
            whole(model.norm.weight.detach())
        with pytest.raises(RuntimeError, match="write=True"), zk.gather(model.parameters()), torch.no_grad():
            model.norm.weight.add_(1)
    else:
        for write in (lambda param: param.add_(1), lambda param: param.to_local().add_(1), lambda param: param.data.add_(1)):
            before = values_of(model)
            with torch.no_grad():
                for param in model.parameters():
                    write(param)
            go_on(mesh, model, optimizer, range(2, 3))
            compare(values_of(model), {name: value + 1 for name, value in before.items()}, atol=0.05)
    optimizer.close(gather=True)
    loss_of(copy.deepcopy(model), batch(0, 0)).backward()


def from_files(stage: int) -> None:
    """Whole safetensors, read by a model of nobody's, one that is held, and one without memory."""
    source, root = whole_model(), shared_folder()
    want = {name: torch.randn_like(param) for name, param in source.named_parameters()}
    if dist.get_rank() == 0:
        save_file(want, root / "model.safetensors")
    dist.barrier()
    mesh = mesh_of("cpu", (2, 2), "data", "tensor")
    model = cut(whole_model(), mesh["tensor"], "sequence")
    zk.load_pretrained(model, root)
    compare({name: whole(param.detach()) for name, param in model.named_parameters()}, want)
    mesh, model, optimizer = begin(stage)
    zk.load_pretrained(model, root)
    compare(values_of(model), want)
    go_on(mesh, model, optimizer, range(1))
    trained = values_of(model)
    optimizer.close()
    with torch.device("meta"):
        model = Model()
    model = cut(model, mesh["tensor"], "sequence")
    with pytest.raises(ValueError, match="distribute a model that has memory"):
        begin(stage, model=model)
    zk.load_pretrained(model, root)
    _, _, optimizer = begin(stage, model=model)
    go_on(mesh, model, optimizer, range(1))
    compare(values_of(model), trained)
    optimizer.close()


def partly(stage: int) -> None:
    """Frozen DTensors, which a checkpoint leaves out, and which are trained later."""
    alone, root = whole_model(), shared_folder()
    mesh = mesh_of("cpu", half_of_the_world(), "data", "tensor")
    plainly = torch.optim.AdamW(alone.parameters(), lr=1e-2)
    found = []
    for loads in (False, True):
        model = cut(whole_model(), mesh["tensor"], "sequence")
        for each in (model, alone):
            for name, param in each.named_parameters():
                param.requires_grad_("blocks.0" in name or name == "norm.weight")
        _, _, optimizer = begin(stage, shape=half_of_the_world(), model=model)
        if loads:
            optimizer.load_checkpoint(root)
        else:
            go_on(mesh, model, optimizer, range(2))
            optimizer.save_checkpoint(root, frozen=False)
        for name, param in model.named_parameters():
            param.requires_grad_(param.requires_grad or "blocks.1" in name)
        go_on(mesh, model, optimizer, range(2, STEPS))
        found.append(values_of(model))
        optimizer.close()
    for step in range(STEPS):
        if step == 2:
            for param in alone.blocks[1].parameters():
                param.requires_grad_(True)
        torch.stack([loss_of(alone, batch(step, rank)) for rank in range(2)]).mean().backward()
        plainly.step()
        plainly.zero_grad()
    compare(found[0], found[1])
    compare(found[0], {name: param.detach() for name, param in alone.named_parameters()}, rtol=1e-4, atol=2e-5)


def meshes(root: str) -> None:
    """A checkpoint of one mesh in others, and in one of two dimensions."""
    folder = Path(root, "(2, 2)")
    mesh, model, optimizer = begin(3)
    go_on(mesh, model, optimizer, range(1))
    optimizer.save_checkpoint(folder)
    optimizer.close()
    mesh, model, optimizer = begin(2, shape=(1, 4))
    optimizer.load_checkpoint(folder)
    go_on(mesh, model, optimizer, range(1, 2))
    want = values_of(model)
    optimizer.close()
    mesh, model, optimizer = begin(1, shape=(4, 1), model=whole_model())
    optimizer.load_checkpoint(folder)
    for step in range(1, 2):  # two of these ranks have one batch each, and two the same once more
        loss_of(model, batch(step, mesh.get_local_rank("data") % 2)).backward()
        optimizer.step()
        optimizer.zero_grad()
    compare(values_of(model), want, rtol=1e-4, atol=2e-5)
    optimizer.close()
    mesh, model = mesh_of("cpu", (1, 2, 2), "data", "a", "b"), whole_model()
    up = model.blocks[0].up
    up.weight = nn.Parameter(distribute_tensor(up.weight.detach(), mesh["a", "b"], [Shard(0), Shard(1)]))
    up.bias = nn.Parameter(distribute_tensor(up.bias.detach(), mesh["a", "b"], [Replicate(), Shard(0)]))
    optimizer = zk.ZeroOptimizer(model, torch.optim.AdamW(model.parameters(), lr=1e-2), stage=2, process_group=mesh["data"])
    optimizer.load_checkpoint(folder)
    optimizer.save_checkpoint(Path(root, "of two dimensions"))
    found = optimizer.consolidated_state_dict()
    optimizer.close()
    _, model, optimizer = begin(3)
    optimizer.load_checkpoint(Path(root, "of two dimensions"))
    compare(values_of(model), {name: found[name] for name, _ in model.named_parameters()})
    optimizer.close()


def refusals(_: int) -> None:
    """What cannot be right is refused by name, on all ranks."""
    mesh = mesh_of("cpu", (2, 2), "data", "tensor")
    ab = mesh_of("cpu", (1, 2, 2), "data", "a", "b")["a", "b"]

    def refused(words: str, model: nn.Module, **groups: Any) -> None:
        with pytest.raises(ValueError, match=words):
            zk.ZeroOptimizer(model, torch.optim.AdamW(model.parameters()), **groups)

    def with_up(make: Any) -> Model:
        model = whole_model()
        model.blocks[0].up.weight = nn.Parameter(make(model.blocks[0].up.weight.detach()))
        return model

    data = {"process_group": mesh["data"]}
    refused(r"over ranks .* process_group=mesh\['data'\]", cut(whole_model(), mesh["tensor"], "tensor"))
    refused("Leave fully_shard out", fully_shard(whole_model(), mesh=mesh["data"]), **data)
    refused("_StridedShard is what fully_shard makes", fully_shard(cut(whole_model(), mesh["tensor"], "tensor"), mesh=mesh["data"]), **data)
    refused("Partial", with_up(lambda values: DTensor.from_local(values, mesh["tensor"], [Partial()])), **data)
    refused("cut the same dimension", with_up(lambda values: distribute_tensor(values, ab, [Shard(0), Shard(0)])), **data)
    refused("distribute parameters over the others", with_up(lambda values: distribute_tensor(values, mesh, [Replicate(), Shard(0)])), **data)
    wrong = with_up(lambda values: DTensor.from_local(values, mesh["tensor"], [Shard(0)], shape=values.shape, stride=values.stride()))
    refused(r"has \(40, 16\) instead of \(20, 16\)", wrong, **data)
    two = cut(whole_model(), mesh["tensor"], "tensor")
    two.blocks[0].down.bias = nn.Parameter(distribute_tensor(two.blocks[0].down.bias.detach().full_tensor(), ab, [Replicate(), Replicate()]))
    refused("give all of them as model_parallel_group=|over ranks", two, **data)
    buffered = cut(whole_model(), mesh["tensor"], "tensor")
    buffered.register_buffer("steps", distribute_tensor(torch.zeros(4), mesh["tensor"], [Shard(0)]))
    refused("buffer 'steps' is a DTensor", buffered, **data)
    with pytest.raises(ValueError, match="no tiles are made of parts"):
        zk.tile_linears(cut(whole_model(), mesh["tensor"], "tensor"), 256)


JOBS = [(gradients, 3), (written, 3), (states, 3), (from_files, 3), (refusals, 2)]
ALONE_JOBS: list[tuple[Any, Any]] = [(gradients, 1), (written, 1), (partly, 1), (taken_over, 1)]


@functools.cache
def outcomes(world: int, folder: str) -> dict[str, list[Any]]:
    """By name of a job: what came of it on each rank."""
    jobs: list[tuple[Any, Any]] = [(run, case) for case in {4: CASES, 3: UNEVEN, 2: ALONE}[world]]
    jobs += {4: [*JOBS, (meshes, folder)], 3: [], 2: ALONE_JOBS}[world]
    return dict(zip((f"{one.__name__} {what}" for one, what in jobs), run_world(world, call, jobs, timeout=60), strict=True))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("meshes"))


@pytest.mark.parametrize("case", [*CASES, *ALONE, *UNEVEN], ids=str)
def test_ranks_train_as_one_process(case: Case, folder: str) -> None:
    world = case.shape[0] * case.shape[1]
    assert outcomes(world, folder)[f"run {case}"] == [""] * world


@pytest.mark.device_only
def test_ranks_train_as_one_process_where_the_link_is_late() -> None:
    cases = [Case("tensor", 2, 0.3, "host", shape=(1, 2)), Case("sequence", 3, 0.3, "nvme", overlap_step=True, saves=True, shape=(1, 2))]
    assert run_world(2, run, cases, timeout=60) == [[""] * 2] * len(cases)


@pytest.mark.parametrize(("name", "world"), [(f"{one.__name__} {stage}", 4 if (one, stage) in JOBS else 2) for one, stage in JOBS + ALONE_JOBS])
def test_dtensors_are_parameters_like_any_other(name: str, world: int, folder: str) -> None:
    assert outcomes(world, folder)[name] == [None] * world


def test_a_checkpoint_of_one_mesh_goes_on_in_another_and_in_one_process(folder: str) -> None:
    assert outcomes(4, folder)[f"meshes {folder}"] == [None] * 4
    model = whole_model()
    optimizer = zk.ZeroOptimizer(model, torch.optim.AdamW(model.parameters(), lr=1e-2), stage=2)
    optimizer.load_checkpoint(Path(folder, "(2, 2)"))
    before = values_of(model)
    for step in range(1, STEPS):
        torch.stack([loss_of(model, batch(step, rank)) for rank in range(2)]).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    _, want, _, _ = plain(2, None, False, INNER)
    compare(dict(model.named_parameters()), want, rtol=1e-4, atol=2e-5)
    optimizer.close()
    for name in ("(2, 2)", "of two dimensions"):
        exported = export(Path(folder, name), Path(folder, f"weights of {name}"))
        compare(load_file(exported.files[0]), before)


def buffers_of_ranks_backwards(folder: str) -> float:
    """The mesh has the ranks in another order than the world."""
    rank, alone = dist.get_rank(), [dist.new_group([other]) for other in range(2)]
    mesh, model = DeviceMesh(DEVICE.type, [1, 0]), nn.Module()
    model.weight = nn.Parameter(distribute_tensor(torch.ones(4, 4, device=DEVICE), mesh, [Shard(0)]))
    model.register_buffer("seen", torch.tensor(float(rank), device=DEVICE))
    with zk.ZeroOptimizer(model, torch.optim.AdamW(model.parameters()), stage=1, process_group=alone[rank]) as optimizer:
        optimizer.save_checkpoint(folder)
        model.seen.fill_(9)
        optimizer.load_checkpoint(folder)
    return model.seen.item()


def test_buffers_come_back_to_the_part_that_had_them(tmp_path: Path) -> None:
    assert run_world(2, buffers_of_ranks_backwards, [str(tmp_path)]) == [[0.0, 1.0]]
