"""User programs: each right, or refused with the sentence that docs/guides/programs.md shows."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zk
from tests.user_programs import PROGRAMS, Case, Run, Writing
from tests.world import run_world

STEPS = 3
CASES = (
    Case(0),
    Case(1),
    Case(2),
    Case(2, tier="host"),
    Case(2, tier="nvme"),
    Case(2, sgd=True),
    Case(2, tier="host", loss_scale=128.0, sgd=True),
)
STAGE_3 = Case(3, tier="host"), Case(3, tier="nvme", sgd=True), Case(3, tier="host", overlap_step=True)
TABLE = (Path(__file__).parents[2] / "docs" / "guides" / "programs.md").read_text()


@functools.cache
def plain_run(name: str, sgd: bool) -> tuple[dict[str, Tensor], list[float]]:
    """What a program gives in plain torch."""
    return run_program(name, None, sgd=sgd)


def groups_of(name: str, model: nn.Module) -> list[dict[str, object]]:
    """What is trained; the weight of the head with a rate of its own where the program is about that."""
    trained = {key: param for key, param in model.named_parameters() if param.requires_grad}
    alone = [trained.pop(key) for key in ("head.weight",) if "groups" in name and key in trained]
    return [{"params": list(trained.values())}, {"params": alone, "lr": 0.0}]


def run_program(name: str, case: Case | None, rank: int = 0, drive: str = "", sgd: bool = False) -> tuple[dict[str, Tensor], list[float]]:
    """Parameters after a few steps, and what the program has seen; ``case``: None is plain torch."""
    program = PROGRAMS[name]
    torch.manual_seed(0)
    model = program.model()
    if case and "tiled" in name:
        zk.tile_linears(model, 64)
    groups, kept = groups_of(name, model), [param.detach() for param in model.parameters()]
    optimizer = inner = torch.optim.SGD(groups, lr=0.02, momentum=0.9) if sgd else torch.optim.AdamW(groups, lr=1e-2)
    if case:
        options = {"param_tier": case.tier} if case.stage == 3 else {}
        if isinstance(model, Writing):
            options["units"] = [nn.Embedding, nn.Linear]
        if case.overlap_step:
            options["overlap_step"] = True
        options |= {"loss_scale": case.loss_scale, "nvme_path": drive if case.tier == "nvme" else None}
        optimizer = zk.ZeroOptimizer(model, inner, stage=case.stage, optimizer_tier=case.tier, **options)
        optimizer.inner = inner
    run = Run(model, optimizer, rank, case.world if case else 1, program.whole, kept)
    try:
        for run.step in range(STEPS):
            run.draws = 0
            program.run(run)
        with zk.gather(list(model.parameters())):
            return {key: value.detach().clone() for key, value in model.state_dict().items()}, run.seen
    finally:
        if case:
            optimizer.close()


def outcome(name: str, case: Case, rank: int = 0, drive: str = "") -> str:
    """"right", what it was refused with, or "WRONG" with what is off."""
    try:
        got, got_seen = run_program(name, case, rank, drive, case.sgd)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    want, want_seen = plain_run(name, case.sgd)
    for key, value in got.items():
        error = (value - want[key]).abs().max().item()
        if not error <= 2e-5:
            return f"WRONG: {key} is off by {error:.1e}"
    try:
        torch.testing.assert_close(torch.tensor(got_seen), torch.tensor(want_seen), rtol=1e-3, atol=1e-5)
    except AssertionError:
        return f"WRONG: saw {got_seen[:6]} instead of {want_seen[:6]}"
    return "right"


def faults(name: str, cases: list[Case], drive: str, rank: int = 0) -> list[str]:
    """What is other than the table has it."""
    found = []
    for case in cases:
        said = PROGRAMS[name].verdicts[case.stage == 3]
        if case.loss_scale and "create_graph" in name:
            said = "create_graph=True"
        if not (case.sgd and "state" in name) and not re.search(said, what := outcome(name, case, rank, drive)):
            found.append(f"{name}, {case}: {what} (and not {said})")
    return found


@pytest.mark.parametrize("name", PROGRAMS)
def test_alone(name: str, tmp_path: Path) -> None:
    """At stage 3, and in a part of the other cases; the next program in the next part."""
    number = list(PROGRAMS).index(name)
    assert faults(name, [STAGE_3[number % 3], *CASES[number % 3 :: 3]], str(tmp_path)) == []


def test_the_guides_table_has_every_program_with_its_verdict() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", TABLE, re.M))
    assert sorted(rows) == sorted(PROGRAMS)
    for name, cell in rows.items():
        kinds = [PROGRAMS[name].kind(stage) for stage in (2, 3)]
        said = [("listed" if "**" in part else "refused" if "refused" in part else "right") for part in re.split("; stage 3", cell)]
        assert (said * 2)[:2] == kinds, f"{name}: {cell}, and not {kinds}"


def on_rank(job: tuple[str, Case, str]) -> list[str]:
    name, case, drive = job
    return faults(name, [case], drive, dist.get_rank())


def test_two_ranks_see_what_one_process_sees(tmp_path: Path) -> None:
    """Each program that is not refused everywhere at one stage; at stage 3 all ranks use the same blocks."""
    cases = Case(1, world=2), Case(3, world=2, tier="host"), Case(2, world=2, tier="nvme")
    names = [name for name, program in PROGRAMS.items() if program.kind(2) == "right"]
    partly = "look_at_what_is_partly_used"  # at stage 3 ranks would go different ways
    jobs = [(name, cases[number % 3], str(tmp_path)) for number, name in enumerate(names) if name != partly]
    jobs += [(name, cases[1], str(tmp_path)) for name in ("clip_by_hand_over_ranks", "renormalize_rows_in_forward")]
    jobs += [(partly, case, str(tmp_path)) for case in (Case(0, world=2, sgd=True), Case(1, world=2, sgd=True), cases[2])]
    assert [rank for ranks in run_world(2, on_rank, jobs) for rank in ranks if rank] == []
