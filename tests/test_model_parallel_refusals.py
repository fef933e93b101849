"""Meshes and models that cannot be trained over model parallel ranks, and ranks that leave each other: all of them hear why, and soon."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zk
from tests.megatron import batch, cut_model, loss_of, whole_model
from tests.world import call, run_world

SOON_S = 45  # a fraction of the timeout, on a machine that is busy with others
TIMEOUT_S = 240


def refused(model: nn.Module, **options: Any) -> str:
    """The error of making an optimizer."""
    try:
        zk.ZeroOptimizer(model, torch.optim.AdamW(model.parameters(), lr=1e-2), **options)
    except (ValueError, TypeError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


def marked(param: torch.Tensor, dim: int | None) -> None:
    """Say that a parameter is cut, as Megatron does."""
    param.tensor_model_parallel = True  # type: ignore[attr-defined]
    if dim is not None:
        param.partition_dim = dim  # type: ignore[attr-defined]


def grids(_: None) -> dict[str, str]:
    """What is refused before anything is trained, on every rank."""
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    data, tensor = mesh["data"], mesh["tensor"]
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    plain = functools.partial(whole_model, depth=1)

    def differing() -> nn.Module:
        model = cut_model(tensor.get_group(), depth=1)
        if mesh.get_local_rank("tensor"):
            model.blocks[0].norm = nn.LayerNorm(8)  # type: ignore[union-attr]
        return model

    def cut_otherwise() -> nn.Module:
        model = cut_model(tensor.get_group(), depth=1)
        if mesh.get_local_rank("tensor"):
            marked(model.get_parameter("blocks.0.up.weight"), 1)
        return model

    found = {
        "three dimensions": refused(plain(), process_group=init_device_mesh("cpu", (2, 2, 1))),
        "one rank to a replica": refused(plain(), process_group=init_device_mesh("cpu", (4, 1))),
        "another's group": refused(plain(), process_group=pairs[1 - rank // 2]),
        "another's parts": refused(plain(), process_group=data, model_parallel_group=pairs[1 - rank // 2]),
        "a mesh of parts": refused(plain(), process_group=data, model_parallel_group=mesh, replicated_params=[]),
        "a name": refused(plain(), process_group="gloo"),
        "numbers": refused(plain(), process_group=data, model_parallel_group=[0, 1], replicated_params=[]),
        "no grid": refused(plain(), process_group=tensor, model_parallel_group=tensor, replicated_params=[]),
        "all ranks twice": refused(plain(), model_parallel_group=tensor, replicated_params=[]),
        "not known": refused(plain(), process_group=data, model_parallel_group=tensor),
        "no group": refused(plain(), process_group=data, replicated_params=["norm"]),
        "one name": refused(plain(), process_group=data, model_parallel_group=tensor, replicated_params="norm"),
        "shapes": refused(differing(), process_group=data, model_parallel_group=tensor),
        "cuts": refused(cut_otherwise(), process_group=data, model_parallel_group=tensor),
    }
    model = plain()
    optimizer = zk.ZeroOptimizer(
        model, torch.optim.AdamW(model.parameters()), process_group=data, model_parallel_group=tensor, replicated_params=["norm"]
    )
    with tempfile.TemporaryDirectory() as folder:
        try:
            optimizer.save_checkpoint(folder)
        except ValueError as error:
            found["place"] = str(error)
    optimizer.close()
    return found


REFUSED = {
    "three dimensions": r"process_group is a mesh of 3 dimensions; give one .* or two .* such as mesh\['replicate', 'shard'\]",
    "one rank to a replica": r"mesh of 4 replicas of one rank each, and no state would be partitioned; give its first dimension alone",
    "another's group": r"this rank, \d, is not in process_group, which has ranks \[[\d, ]*\]; give each rank the group that it is in",
    "another's parts": r"this rank, \d, is not in model_parallel_group, which has ranks \[[\d, ]*\]",
    "a mesh of parts": r"model_parallel_group is a mesh of 2 dimensions; give one of them, such as mesh\['tensor'\]",
    "a name": r"TypeError: process_group must be a group, .* a DeviceMesh or None; got 'gloo'",
    "numbers": r"TypeError: model_parallel_group must be a group, .* got \[0, 1\]",
    "no grid": r"process_group has to be the ranks with the same part of the model, .* with numbers \[0, 1\]",
    "all ranks twice": r"process_group has to be the ranks with the same part of the model, .* with numbers \[0, 1, 0, 1\]",
    "not known": r"model_parallel_group= needs to know which parameters its ranks have in common.* replicated_params=.*param.tensor_model_parallel",
    "no group": r"replicated_params=\['norm'\] has no effect without model_parallel_group=; remove it",
    "one name": r"TypeError: replicated_params must be a sequence of names",
    "shapes": r"parameter 'blocks.0.norm.weight' in other shapes, or .* place: \[\[\[16\], \[\[0, 16\]\]\], \[\[8\], \[\[0, 8\]\]\]\]\)",
    "cuts": r"parameter 'blocks.0.up.weight' in other shapes, or .*\[\[32, 16\], \[\[0, 16\], \[0, 16\]\]\], \[\[16, 32\], \[\[0, 16\], \[16",
    "place": r"parameter 'embed.weight' cannot be saved, as its place in the whole model is not known: model parallel ranks \[0, 1\] have one each",
}


# ---- ranks that leave each other -----------------------------------------------------------------------------------------------


class Oops(Exception):
    """An error of the user's."""


def forget_a_block(model: nn.Module, optimizer: zk.ZeroOptimizer) -> None:
    """Leave the second block of this tensor parallel rank, and of the others with its part, without gradients."""
    for param in model.get_submodule("blocks.1").parameters():
        param.requires_grad_(False)


def clip_otherwise(model: nn.Module, optimizer: zk.ZeroOptimizer) -> None:
    """Clip this part by another norm."""
    optimizer.clip_grad_norm_(0.25)


def raise_inside(model: nn.Module, optimizer: zk.ZeroOptimizer) -> None:
    """Fail in the middle of step()."""

    def fail() -> float:
        raise Oops("of the first part")

    optimizer._global_norm = fail  # type: ignore[method-assign]


def end_at_once(model: nn.Module, optimizer: zk.ZeroOptimizer) -> None:
    """Be killed."""
    os.kill(os.getpid(), signal.SIGKILL)


# what goes wrong; on which ranks of a 2 x 2 mesh, where 1 and 3 have the second part; before backward or before the step
LEAVES: Mapping[str, tuple[Callable[[nn.Module, zk.ZeroOptimizer], None], tuple[int, ...], str]] = {
    "no gradient": (forget_a_block, (1, 3), "backward"),
    "another clip": (clip_otherwise, (1, 3), "step"),
    "an error": (raise_inside, (1,), "step"),
    "killed": (end_at_once, (3,), "step"),
}


def leave(case: tuple[str, int]) -> tuple[str, float]:
    """The error of this rank, and how long it took."""
    name, stage = case
    act, ranks, when = LEAVES[name]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = cut_model(mesh.get_group("tensor"))
    optimizer = zk.ZeroOptimizer(
        model, torch.optim.AdamW(model.parameters(), lr=1e-2), stage=stage, clip_grad_norm=1.0, process_group=mesh["data"],
        model_parallel_group=mesh["tensor"],
    )  # fmt: skip

    def train(step: int, leaves: bool) -> None:
        if leaves and when == "backward":
            act(model, optimizer)
        loss_of(model, batch(step, mesh.get_local_rank("data"))).backward()
        if leaves and when == "step":
            act(model, optimizer)
        elif name == "another clip" and leaves is False and step:
            optimizer.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()

    train(0, False)
    begun = time.monotonic()
    try:
        train(1, dist.get_rank() in ranks)
        said = "nothing was noticed"
    except (RuntimeError, Oops) as error:
        said = f"{type(error).__name__}: {error}"
    took = time.monotonic() - begun
    with contextlib.suppress(RuntimeError):
        optimizer.close()
    return said, took


SAID = {
    "no gradient": dict.fromkeys(range(4), r"have parts of the model that differ: parameter 'blocks\.1\.[a-z.]+' is \S.* on rank 0 and .* on rank 1"),
    "another clip": dict.fromkeys(range(4), r"have parts of the model that differ: the factor of clip_grad_norm_ is .* on rank 0 and .* on rank 1"),
    "an error": {1: "Oops: of the first part", **dict.fromkeys((0, 2, 3), r"rank 1 (gave up|failed): Oops: of the first part")},
    # each names it by its number in the group that it waits in, or hears it from one that has
    "killed": {1: r"rank 0 of 2 failed .*: rank 1 ended|gave up: .* ended", **dict.fromkeys((0, 2), r"ranks? ([0-2], )*3 ended|gave up: .* ended")},
}


# what all hear of leaves a world of ranks, so the last case only may end one
CASES = (("no gradient", 3), ("another clip", 2), ("an error", 2), ("killed", 2))


@pytest.fixture(scope="module")
def found() -> list[list[Any]]:
    """Of one world: what is refused, and what ranks hear in each of the cases."""
    return run_world(4, call, [(grids, None), *((leave, case) for case in CASES)], timeout=TIMEOUT_S)


def test_what_is_no_grid_of_parts_is_refused_on_every_rank(found: list[list[Any]]) -> None:
    for errors in found[0]:
        assert isinstance(errors, dict), errors
        for name, said in REFUSED.items():
            with pytest.raises(ValueError, match=said):
                raise ValueError(errors[name])


@pytest.mark.parametrize("name", LEAVES)
def test_ranks_whose_steps_differ_hear_of_it_soon(name: str, found: list[list[Any]]) -> None:
    results = [(case, rank, result) for case, ranks in zip(CASES, found[1:], strict=True) for rank, result in enumerate(ranks) if case[0] == name]
    assert results
    for case, rank, result in results:
        if name == "killed" and rank == 3:
            assert isinstance(result, RuntimeError)
            continue
        assert isinstance(result, tuple), (case, rank, result)
        said, took = result
        with pytest.raises(ValueError, match=SAID[name][rank]):
            raise ValueError(said)
        assert took < SOON_S, (case, rank, said)
