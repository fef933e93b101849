"""in_place=True: a frozen base is read from the user's files; what is trained has the bits of a copied one; nothing is written."""

import os
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

import zk
from tests.addons.common import same
from tests.models import DEVICE, GPT, batch, descend, loss_of, train
from tests.world import call, run_world
from zk import placement
from zk.addons.in_place import InPlace
from zk.offload import file


def saved(folder: Path, dtype: torch.dtype, seed: int = 0) -> Path:
    """A model's weights, in a file that has another order."""
    torch.manual_seed(seed)
    weights = {name: value.to(dtype) for name, value in reversed(GPT("frozen").cpu().state_dict().items())}
    folder.mkdir(exist_ok=True)
    save_file(weights, folder / "model.safetensors")
    return folder / "model.safetensors"


def made(path: Path, **options: Any) -> tuple[Any, zk.ZeroOptimizer]:
    with zk.deferred_init(DEVICE), mock.patch("tests.models.DEVICE", torch.device("cpu")):
        model = GPT("frozen")
    zk.load_pretrained(model, path)
    tiers = {"stage": 3, "param_tier": "nvme", "optimizer_tier": "nvme", "nvme_path": path.parent}
    return model, zk.ZeroOptimizer(model, torch.optim.AdamW(model.parameters(), lr=1e-2), **(tiers | options))


@mock.patch.object(file, "BLOCK_NBYTES", 4096)
def trained(case: tuple[Path, torch.dtype, bool]) -> tuple[list[Any], int, int]:
    """Losses, parameters and masters; bytes written to the drive; bytes that its files have."""
    path, dtype, in_place = case
    rank = dist.get_rank() if dist.is_initialized() else 0
    model, optimizer = made(path, dtype=dtype, in_place=in_place)
    drive: Any = optimizer._layout.tiers["nvme"]
    written = drive.file.written_nbytes
    found = [torch.tensor([descend(optimizer, loss_of(model, batch(10 * step + rank))) for step in range(3)])]
    for kind in ("param", "master"):
        with zk.gather([p for p in model.parameters() if p.requires_grad or kind == "param"], kind=kind) as values:
            found += [value.detach().cpu().clone() for value in values]
    optimizer.close()
    return found, written, drive.file.nbytes


REFUSED = {"other": "not as in its file", "none": "weights in place must be the same on all ranks"}


def elsewhere(case: tuple[str, Path]) -> str:
    """A rank whose file has other values, or without one."""
    kind, folder = case
    path = saved(folder / f"{kind}-{dist.get_rank()}", torch.float32, seed=dist.get_rank())
    dist.barrier()
    without = mock.patch.object(zk, "load_pretrained") if (kind, dist.get_rank()) == ("none", 1) else nullcontext()
    with without, pytest.raises((OSError, ValueError)) as caught:
        made(path, in_place=True)
    return str(caught.value)


@pytest.mark.device
@pytest.mark.parametrize(("world", "dtype"), [(1, torch.bfloat16), (2, torch.float32)])
def test_training_is_that_over_a_copied_base_and_other_files_are_refused_on_all(world: int, dtype: torch.dtype, tmp_path: Path) -> None:
    path = saved(tmp_path / "base", dtype)
    before, stat = path.read_bytes(), os.stat(path)
    cases: list[Any] = [(trained, (path, dtype, in_place)) for in_place in (False, True)]
    refusals = [(elsewhere, (kind, tmp_path)) for kind in REFUSED if DEVICE.type == "cpu"]
    copied, own, *said = run_world(2, call, [*cases, *refusals], timeout=60) if world > 1 else [[trained(case)] for _, case in cases]
    assert all(words in one for words, each in zip(REFUSED.values(), said, strict=False) for one in each)
    frozen = sum(param.nbytes for param in GPT("frozen").to(dtype).parameters() if not param.requires_grad)
    for (want, written, room), (found, fewer, less) in zip(copied, own, strict=True):
        assert same(found, want) and min(written - fewer, room - less) >= frozen // world
    assert path.read_bytes() == before and os.stat(path).st_mtime_ns == stat.st_mtime_ns


def grown(in_place: bool, path: Path) -> list[Tensor]:
    """What part of a unit that is in place becomes when it is unfrozen, and the rest of it, from a checkpoint."""
    model, optimizer = made(path, growing=True, in_place=in_place)
    model.blocks[1].up.requires_grad_(True)
    train(model, optimizer, 2)
    optimizer.save_checkpoint(path.parent / str(in_place))
    train(model, optimizer, 1)
    optimizer.load_checkpoint(path.parent / str(in_place))
    optimizer.close()
    return [param.detach().clone() for param in model.parameters()]


def test_what_is_unfrozen_or_not_as_in_the_file_is_copied(tmp_path: Path) -> None:
    path = saved(tmp_path, torch.float32)
    assert same(*(grown(in_place, path) for in_place in (False, True)))
    (found, written, room), (own, fewer, less) = (trained((path, torch.bfloat16, in_place)) for in_place in (False, True))
    assert same(found, own) and (written, room) == (fewer, less)


def test_a_drive_without_room_for_the_base_will_do_and_what_is_written_to_it_is_refused(tmp_path: Path) -> None:
    path, free = saved(tmp_path / "base", torch.float32), placement.free_memory
    need = sum(param.nbytes for param in GPT("frozen").parameters() if param.requires_grad)
    with mock.patch.object(placement, "free_memory", lambda *given: free(*given) | {"nvme": 5 * need}):
        made(path, in_place=True)[1].close()
        with pytest.raises(MemoryError):
            made(path)
    model, optimizer = made(path, in_place=True)
    weight, before = model.blocks[1].up.weight, model.state_dict()["blocks.1.up.weight"]
    with pytest.raises(OSError, match=r"blocks\.1 is not as in its file"), zk.gather(weight, write=True), torch.no_grad():
        weight.add_(1)
    assert torch.equal(model.state_dict()["blocks.1.up.weight"], before)
    for given in ({"param_tier": "host"}, {"host_budget": "1GiB"}, {"in_place": 1}):
        with pytest.raises(ValueError, match="in_place"):
            made(path, **({"in_place": True} | given))
    config = SimpleNamespace(param_tier="nvme", host_budget=None, options={"shard_group": object()})
    with pytest.raises(ValueError, match=r"excludes host_budget= and shard_group="):
        InPlace(True).check(model, [], config)
    optimizer.close()
