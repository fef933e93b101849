"""User programs: each right, or refused with the sentence that docs/guides/programs.md shows."""

import functools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zk
from tests.user_programs import PROGRAMS, Run, Writing
from tests.world import run_world

CASES: tuple[dict[str, Any], ...] = (
    *({"stage": 0}, {"stage": 1, "sgd": True}, {"stage": 2, "tier": "nvme"}, {"stage": 2}),
    {"stage": 2, "tier": "host", "loss_scale": 128.0, "sgd": True},  # with momentum; AdamW hides what is off by a factor
)
STAGE_3: tuple[dict[str, Any], ...] = (
    *({"stage": 3, "tier": "host"}, {"stage": 3, "tier": "nvme", "sgd": True}, {"stage": 3, "tier": "host", "overlap_step": True}),
)
TABLE = (Path(__file__).parents[2] / "docs" / "guides" / "programs.md").read_text()


@functools.cache
def plain_run(name: str, sgd: bool) -> tuple[dict[str, Tensor], list[float]]:
    """What a program gives in plain torch."""
    return run_program(name, {"sgd": sgd})


def run_program(name: str, case: dict[str, Any], rank: int = 0, world: int = 1, drive: str = "") -> tuple[dict[str, Tensor], list[float]]:
    """Parameters after three steps, and what the program has seen; a case without a stage is plain torch."""
    program, is_zk, tier = PROGRAMS[name], "stage" in case, case.get("tier", "device")
    torch.manual_seed(0)
    model = program.model()
    if is_zk and "tiled" in name:
        zk.tile_linears(model, 64)
    trained, kept = {key: param for key, param in model.named_parameters() if param.requires_grad}, [param.detach() for param in model.parameters()]
    alone = [trained.pop(key) for key in ("head.weight",) if "groups" in name and key in trained]  # with a rate of its own
    groups: Any = [{"params": list(trained.values())}, {"params": alone, "lr": 0.0}]
    optimizer: Any = torch.optim.SGD(groups, lr=0.02, momentum=0.9) if case.get("sgd") else torch.optim.AdamW(groups, lr=1e-2)
    if is_zk:
        options = {key: value for key, value in case.items() if key not in ("tier", "sgd")} | {"nvme_path": drive if tier == "nvme" else None}
        options |= {"param_tier": tier} if case["stage"] == 3 else {}
        options |= {"units": [nn.Embedding, nn.Linear]} if isinstance(model, Writing) else {}
        optimizer = zk.ZeroOptimizer(model, inner := optimizer, optimizer_tier=tier, **options)
        optimizer.inner = inner
    run = Run(model, optimizer, rank, world, program.whole, kept)
    try:
        for run.step in range(3):
            run.draws = 0
            program.run(run)
        with zk.gather(list(model.parameters())):
            return {key: value.detach().clone() for key, value in model.state_dict().items()}, run.seen
    finally:
        optimizer.close() if is_zk else None


def outcome(name: str, case: dict[str, Any], drive: str) -> str:
    """"right", what it was refused with, or "WRONG" with what is off."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    try:
        got, got_seen = run_program(name, case, rank, world, drive)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    want, want_seen = plain_run(name, case.get("sgd", False))
    for key, value in got.items():
        error = (value - want[key]).abs().max().item()
        if not error <= 2e-5:
            return f"WRONG: {key} is off by {error:.1e}"
    is_same = torch.allclose(torch.tensor(got_seen), torch.tensor(want_seen), rtol=1e-3, atol=1e-5)
    return "right" if is_same else f"WRONG: saw {got_seen[:6]} instead of {want_seen[:6]}"


def fault(job: tuple[str, dict[str, Any], str]) -> str:
    """What is other than the table has it."""
    name, case, drive = job
    said = "create_graph=True" if "loss_scale" in case and "create_graph" in name else PROGRAMS[name].verdicts[case["stage"] == 3]
    return "" if re.search(said, what := outcome(name, case, drive)) else f"{name}, {case}: {what} (and not {said})"


@pytest.mark.parametrize("name", PROGRAMS)
def test_alone(name: str, tmp_path: Path) -> None:
    """At stage 3 and at another one; the next program in the next case."""
    number, cases = list(PROGRAMS).index(name), list[dict[str, Any]]()
    for table in (STAGE_3, CASES):
        fitting = [case for case in table if not ("sgd" in case and "state" in name)]
        cases.append(fitting[number % len(fitting)])
    cases += CASES[-1:] * (name in ("backward_with_create_graph", "replace", "clip_and_assign", "descend_while_frozen"))  # with a loss scale
    assert [found for case in cases if (found := fault((name, case, str(tmp_path))))] == []


def test_the_guides_table_has_every_program_with_its_verdict() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", TABLE, re.M))
    assert sorted(rows) == sorted(PROGRAMS)
    for name, cell in rows.items():
        kinds = [PROGRAMS[name].kind(stage) for stage in (2, 3)]
        said = [("listed" if "**" in part else "refused" if "refused" in part else "right") for part in re.split("; stage 3", cell)]
        assert (said * 2)[:2] == kinds, f"{name}: {cell}, and not {kinds}"


def test_two_ranks_see_what_one_process_sees(tmp_path: Path) -> None:
    """Each program that is not refused everywhere at one stage; at stage 3 all ranks use the same blocks."""
    cases: list[dict[str, Any]] = [{"stage": 1}, {"stage": 3, "tier": "host"}, {"stage": 2, "tier": "nvme"}]
    names = [name for name, program in PROGRAMS.items() if program.kind(2) == "right"]
    partly = "look_at_what_is_partly_used"  # at stage 3 ranks would go different ways
    jobs = [(name, cases[number % 3]) for number, name in enumerate(names) if name != partly]
    jobs += [(name, cases[1]) for name in ("clip_by_hand_over_ranks", "renormalize_rows_in_forward")]
    jobs += [(partly, case) for case in ({"stage": 0, "sgd": True}, {"stage": 1, "sgd": True}, cases[2])]
    assert [said for ranks in run_world(2, fault, [(*job, str(tmp_path)) for job in jobs]) for said in ranks if said] == []
