"""Ranks that do not do the same train what plain torch trains on the batches of all; or say so, on all."""

import copy
import functools
import os
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zk
from tests.models import DEVICE, descend, wrap
from tests.plain import mean_of_ranks
from tests.programs import Program, rank_of
from tests.world import call, free_port, run_world
from zk.parallel.comm import Comm, host_group
from zk.parallel.gradient import in_backward

WIDTH, VOCAB = 12, 19
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
Pass = tuple[str, frozenset[str]]  # "sync", "local" or "forward only"; branches that are not used


class Block(nn.Module):
    """Two branches, of which a rank may use one: all of the block is gathered for either."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, skipped: str) -> Tensor:
        x = x if "a" in skipped else x + self.a(x).tanh()
        return x if "b" in skipped else x + self.b(x).tanh()


class Branches(nn.Module):
    """Blocks of which some, or parts, are left out; a block that all leave out is not called below stage 3."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, ids: Tensor, skipped: frozenset[str]) -> Tensor:
        x = self.embed(ids[:, :-1])
        for number, block in enumerate(self.blocks):
            left_out = "".join(branch for branch in "ab" if f"{number}{branch}" in skipped)
            x = x if left_out == "ab" and "calls all" not in skipped else block(x, left_out)
        return nn.functional.cross_entropy(self.head(x).float().flatten(0, 1), ids[:, 1:].flatten())


def batch(seed: int) -> Tensor:
    return torch.randint(VOCAB, (3, 7), generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def sync(*skipped: str) -> Pass:
    return "sync", frozenset(skipped)


def local(*skipped: str) -> Pass:
    return "local", frozenset(skipped)


# what each rank does in a step; the last one that is given is that of all further ranks too
STEPS: dict[str, Sequence[Sequence[Pass]]] = {
    "alike": ([sync()],),
    "other blocks": ([sync("0a", "0b", "2a")], [sync("1a", "1b", "3a", "3b")]),
    "no block": ([sync(*(f"{n}{b}" for n in range(4) for b in "ab"))], [sync()]),
    "more micro-batches": ([sync(), sync("1a", "1b")], [sync("2a", "2b")]),
    "alike again": ([sync("3a")],),
    "no backward": ([sync()], [("forward only", frozenset())]),
    "nothing at all": ([sync("0a")], []),
    "nothing on the first": ([], [sync(), sync()]),
    "all are whole": ([sync()],),
    "local passes on one": ([local(), sync("1b")], [sync()]),
    "local passes on all": ([local(), local("0a", "0b")], [local("1a"), local()]),
    "local passes that no other has": ([local(), local()], [sync("2a", "2b")]),
    "one local pass each": ([local("1a", "1b")], [local()]),
    "alike in the end": ([sync()],),
}
# at stage 3 all call all blocks, as often, and backward reads all
WHOLE = {"calls all"}
AT_STAGE_3: dict[str, Sequence[Sequence[Pass]]] = {
    "alike": ([sync(*WHOLE)],),
    "alike, and the first one alone uses a block that is held": ([sync(*WHOLE)],),
    "parts": ([sync("0a", "2b", *WHOLE)], [sync("1b", "2a", *WHOLE)]),
    "parts, again": ([sync("0a", *WHOLE)], [sync("1b", *WHOLE)]),
    "all, and the first one alone uses a block": ([sync(*WHOLE)],),
    "other parts": ([sync("1a", *WHOLE)], [sync("3a", "0b", *WHOLE)]),
    "some of a sum": ([local("0a", *WHOLE), sync(*WHOLE)], [local(*WHOLE), sync("0a", "1b", *WHOLE)]),
    "all again": ([sync(*WHOLE)],),
}


def of_rank(step: Sequence[Sequence[Pass]], rank: int) -> Sequence[Pass]:
    return step[min(rank, len(step) - 1)]


def reductions(step: Sequence[Sequence[Pass]], world: int, at_step: bool) -> Iterator[list[list[int]]]:
    """The passes of each rank that are reduced together, by number: up to its next "sync", or what is left."""
    left = [[number for number, (kind, _) in enumerate(of_rank(step, rank)) if kind != "forward only"] for rank in range(world)]
    while any(left):
        taken: list[list[int]] = [[] for _ in left]
        for rank, numbers in enumerate(left):
            while numbers:
                taken[rank].append(numbers.pop(0))
                if not at_step and of_rank(step, rank)[taken[rank][-1]][0] == "sync":
                    break
        yield taken


def totals(grads: dict[tuple[int, int], list[Tensor | None]], step: Any, world: int, at_step: bool, dtype: torch.dtype) -> list[Tensor | None]:
    """Each parameter's gradient: sums of passes in fp32 on each rank, their mean over ranks, and the sum of these means."""
    found: list[Tensor | None] = []
    for index in range(len(next(iter(grads.values())))):
        total: Tensor | None = None
        for together in reductions(step, world, at_step):
            rows = [[grads[rank, number][index] for number in numbers] for rank, numbers in enumerate(together)]
            if all(grad is None for row in rows for grad in row):
                continue
            shape = next(grad.shape for row in rows for grad in row if grad is not None)
            wide = max(map(len, rows)) > 1
            sums = [torch.zeros(shape, device=DEVICE) for _ in rows]
            for rank, row in enumerate(rows):
                for grad in row:
                    sums[rank] = sums[rank] + (0 if grad is None else grad.float())
            mean = mean_of_ranks(sums, FP32 if wide else dtype).float()
            total = mean if total is None else total + mean
        found.append(total)
    return found


@functools.cache
def plain_masters(stage: int, dtype: torch.dtype, scale: float) -> list[list[Tensor]]:
    """What each step of plain training on the batches of all ranks makes of the masters. The first rank trains for all; stage 0 is as 2."""
    found, world = [list[list[Tensor]]()], dist.get_world_size()
    if dist.get_rank() == 0:
        torch.manual_seed(0)
        plain = Branches().to(DEVICE)
        masters = [nn.Parameter(param.detach().clone()) for param in plain.parameters()]
        inner, own = torch.optim.AdamW(masters, lr=1e-2), list(plain.to(dtype).parameters())
        for number, step in enumerate((STEPS if stage < 3 else AT_STAGE_3).values()):
            grads: dict[tuple[int, int], list[Tensor | None]] = {}
            for peer in range(world):
                for at, (kind, skipped) in enumerate(of_rank(step, peer)):
                    if kind != "forward only":
                        (plain(batch(100 * number + 10 * at + peer), skipped) * scale).backward()
                        grads[peer, at] = [param.grad for param in own]
                        plain.zero_grad()
            for master, total in zip(masters, totals(grads, step, world, stage == 1, dtype), strict=True):
                master.grad = None if total is None else total / scale
            inner.step()
            with torch.no_grad():
                for param, master in zip(own, masters, strict=True):
                    param.copy_(master)
            found[0].append([master.detach().cpu().clone() for master in masters])
    dist.broadcast_object_list(found, 0)
    return found[0]


def train(case: tuple[int, torch.dtype, dict[str, Any]]) -> str:
    """Train on every rank by the plan of the stage; return what is not as in plain torch."""
    stage, dtype, options = case
    os.environ["ZK_CPU_ADAM"] = "torch"
    zk.offload.cpu_adam.default_engine.cache_clear()
    every = plain_masters(stage if stage else 2, dtype, options.get("loss_scale", 1.0))
    torch.manual_seed(0)
    model, rank = Branches().to(DEVICE), dist.get_rank()
    optimizer = wrap(model, stage=stage, dtype=dtype, **options)
    wrong = []
    for number, ((name, step), masters) in enumerate(zip((STEPS if stage < 3 else AT_STAGE_3).items(), every, strict=True)):
        for at, (kind, skipped) in enumerate(of_rank(step, rank)):
            loss = model(batch(100 * number + 10 * at + rank), skipped)
            if kind == "local":
                with optimizer.no_sync():
                    optimizer.no_sync()(bool)()  # one that ends within
                    optimizer.backward(loss)
            elif kind == "sync":
                optimizer.backward(loss)
        if "alone" in name:  # all ask for the same unit next
            with zk.gather(model.parameters()), torch.no_grad():
                if rank == 0:
                    model.blocks[1](torch.ones(2, 3, WIDTH, dtype=dtype, device=DEVICE), "")
        optimizer.step()
        optimizer.zero_grad()
        with zk.gather(model.parameters(), kind="master") as got:
            keys = [key for key, _ in model.named_parameters()]
            wrong += [f"{name}: {key}" for key, one, other in zip(keys, got, masters, strict=True) if not torch.equal(one.cpu(), other)]
        if wrong:
            break
    optimizer.close()
    return ", ".join(wrong)


def dropping(stage: int) -> str:
    """Gradients that are removed before a pass in which one rank has none: what is not that of the other rank's pass alone."""
    torch.manual_seed(0)
    model, removed = Branches(), ("blocks.0.a.weight", "blocks.0.b.bias", "blocks.3.b.weight")
    plain = copy.deepcopy(model)
    optimizer = wrap(model, stage=stage)
    model(batch(dist.get_rank()), frozenset()).backward()
    for name in removed:
        model.get_parameter(name).grad = None
    skipped = frozenset({"0a", "0b", "3a", "3b"} if dist.get_rank() else ())
    model(batch(2), skipped).backward()
    optimizer.clip_grad_norm_(1e9)  # ranks meet, and nothing is clipped
    plain(batch(2), frozenset()).backward()
    with zk.gather([model.get_parameter(name) for name in removed], kind="grad") as got:
        pairs = zip(removed, got, strict=True)
        return ", ".join(name for name, grad in pairs if not torch.equal(grad, plain.get_parameter(name).grad / 2))


TWO = [
    *((0, BF16, {}), (1, BF16, {}), (2, FP16, {"loss_scale": 1024.0, "announce": True})),
    *((3, FP16, {"loss_scale": 1024.0, "prefetch": 0, "announce": True}), (3, BF16, {"overlap_step": True})),
]
THREE: Any = [(2, FP32, {}), (3, FP32, {})]  # slices of other lengths
JOBS = {2: [*((train, case) for case in TWO), *((dropping, stage) for stage in (0, 1, 2))], 3: [(train, case) for case in THREE]}


@pytest.mark.parametrize("world", JOBS)
def test_ranks_that_differ_train_as_plain_torch(world: int) -> None:
    table = run_world(world, call, JOBS[world], timeout=40)
    assert [(job, said) for job, said in zip(JOBS[world], table, strict=True) if any(said)] == []


def noting(stage: int) -> list[list[tuple[str, str, bool]]]:
    """What ranks exchange in each of four steps, and the first gradient of each block; and if that is in backward."""
    model, steps, named = Branches(), [list[tuple[str, str, bool]]()], Comm.named

    def note(*about: str) -> None:
        steps[-1].append((*about, in_backward()))

    def noted(comm: Comm, *about: str) -> Any:
        note(*about)
        return named(comm, *about)

    for number, block in enumerate(model.blocks):
        block.b.bias.register_hook(functools.partial(lambda number, _: note("gradient", f"blocks.{number}"), number))
    with mock.patch.object(Comm, "named", noted):
        optimizer = wrap(model, stage=stage)
        for _ in range(4):
            steps.append([])
            descend(optimizer, model(batch(dist.get_rank()), frozenset()))
    return steps[1:]


def test_units_are_reduced_while_backward_goes_on_from_the_first_step_and_ranks_meet_four_times_a_step() -> None:
    for stage, table in zip((2, 3), run_world(2, noting, (2, 3), timeout=60), strict=True):
        for number, words in (step for rank in table for step in enumerate(rank)):
            events = [(operation, about) for operation, about, is_in_backward in words if is_in_backward]
            reduced = [about for operation, about in events if operation == "reduce_scatter"]
            every = ["blocks.3", "blocks.2", "blocks.1", "blocks.0", "model"]
            assert reduced == every or (number < 2 and sorted(reduced) == sorted(every)), (stage, number, words)
            # a block is reduced before those that are far ahead have a gradient: no more are on the device at once
            assert (stage, number) == (2, 0) or events.index(("reduce_scatter", "blocks.3")) < events.index(("gradient", "blocks.1")), events
            met = [about for operation, about, _ in words if operation == "exchange of numbers"]
            assert number < 2 or met == ["reductions", "gradients", "reductions", "norm"], (number, met)


# ---- ranks that are gone, or go another way ---------------------------------------------------------------------------------------------
def losing(case: tuple[str, int]) -> str:
    """Train two steps; in the next one the second rank does not take part, or takes another way. What the first one says."""
    how, stage = case
    model, rank = Branches(), dist.get_rank()
    if how == "never comes" and rank == 1:
        time.sleep(4)
        return "nothing"
    try:
        optimizer = wrap(model, stage=stage)
        for step in range(3):
            if step == 2 and rank == 1 and how in ("ends", "sleeps"):
                os._exit(7) if how == "ends" else time.sleep(4)
            left_out = {f"{rank}a", f"{rank}b"} if how == "other blocks" else ()  # before one is prefetched
            for _ in range(1 + (rank == 1 and how == "more passes")):
                model(batch(step), frozenset(left_out)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    except RuntimeError as error:
        return str(error)
    return "nothing"


WAYS = [(how, stage, "their collectives before this one differ") for how, stage in (("other blocks", 1), ("other blocks", 3), ("more passes", 0))]
LOST = ("ends", 2, "'reductions'"), ("sleeps", 3, "all_gather of"), ("never comes", 2, ""), *WAYS


@pytest.mark.parametrize("how, stage, about", LOST)
def test_a_rank_that_is_gone_or_goes_another_way_ends_the_others_in_a_collective_that_they_name(how: str, stage: int, about: str) -> None:
    said = str(run_world(2, losing, [(how, stage)], timeout=2)[0][0])
    assert said.startswith("rank 0 of 2: ") and about in said and "another rank is gone" in said, said


def in_part(folder: str) -> str:
    """Two of three ranks train, with connections of every kind; the third one has no part in that."""
    group, said = dist.new_group([0, 2], timeout=(limit := timedelta(seconds=29))), ""
    if dist.get_rank() != 1:
        model = Branches()
        with wrap(model, process_group=group, stage=3, overlap_step=True) as optimizer:
            for seed in range(3):
                descend(optimizer, model(batch(seed), frozenset()))
                optimizer.save_checkpoint(folder, async_save=True)
            optimizer.synchronize()
        assert host_group(group, of_its_own=True)._get_backend(torch.device("cpu")).options._timeout == limit
        said = (Path(folder) / "latest").read_text()
    dist.barrier()
    return said


def test_a_part_of_the_ranks_trains_and_saves_beside_training(tmp_path: Path) -> None:
    assert run_world(3, in_part, [str(tmp_path)], timeout=30)[0] == ["step-00000003\n", "", "step-00000003\n"]


def gathering(stage: int) -> list[float]:
    """Norms of gradients that one rank alone has; then if all see what the first rank has written, where the second one writes some too."""
    model, rank, found = Branches(), dist.get_rank(), list[Any]()
    with wrap(model, stage=stage) as optimizer:
        model(batch(0), frozenset(() if rank or stage == 3 else {"0a", "0b"})).backward()
        weights = [model.blocks[0].a.weight, model.head.weight]
        optimizer._layout.comm.way = rank  # as an error on one of them may leave it
        optimizer._layout.comm.words("all are here", None)
        with zk.gather(weights, kind="grad") as grads:
            found += map(torch.norm, grads)
        optimizer.step()
        every = [*model.parameters()][:: 1 - 2 * rank]  # as sets of them have any order
        for number, kind in enumerate(("exp_avg", "master", "param")):
            with torch.no_grad(), zk.gather(every, kind=kind, write=True) as values:
                for value in values[rank :: 1 + rank]:  # the second rank writes some
                    value.fill_(number + rank)
            is_new = kind == "exp_avg" or stage == 3 or all(param.eq(number).all() for param in every)  # at once
            with zk.gather(every, kind=kind) as values:
                found.append(is_new and all(value.eq(number).all() for value in values))
    return [*map(float, found)]


def test_ranks_gather_gradients_that_one_has_and_get_what_the_first_one_writes() -> None:
    for one, other in run_world(2, gathering, [1, 3], timeout=30):
        assert one == other and one[2:] == [1.0] * 3 and min(one) > 0


def test_ranks_that_torchrun_has_started_find_each_other_and_end_well_without_any_farewell() -> None:
    """No close(), no destroy_process_group(); with the store of an agent, which outlives them. The end is the interpreter's own."""
    program = (
        "import ctypes, gc, torch, zk\n"
        "model = torch.nn.Linear(4, 4)\n"
        "optimizer = zk.ZeroOptimizer(model, torch.optim.AdamW(model.parameters(), lr=0.1), dtype='bf16')\n"
        "model(torch.ones(1, 4) * (torch.distributed.get_rank() + 1)).sum().backward()\n"
        "print(model.weight.grad[0, 0].item(), torch.distributed.get_world_size(), flush=True)\n"
        "optimizer.step()\n"
        "gc.freeze()\n"
        "ctypes.pythonapi.Py_Exit(0)\n"
    )
    port = free_port()
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    agent = {"TORCHELASTIC_USE_AGENT_STORE": str(store is not None), "TORCHELASTIC_RESTART_COUNT": "1"}
    ranks = [Program("-c", program, env={**rank_of(2, rank, port), **agent}) for rank in range(2)]
    said = [rank.communicate() for rank in ranks]
    assert [(text.split(), rank.returncode) for (text, _), rank in zip(said, ranks, strict=True)] == [(["1.5", "2"], 0)] * 2, said
