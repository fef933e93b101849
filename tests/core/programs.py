"""Runs the programs of tests/user_programs.py on the new core: each gives what plain torch gives, or says what VERDICTS has."""

from __future__ import annotations

import functools
import re
from unittest import mock

import torch
import torch._dynamo
from torch import Tensor, nn

import tests.user_programs
import zk
from tests.user_programs import PROGRAMS, Case, Run, Writing

STEPS = 3
HALF = Case(2, tier="host", dtype="bf16")


class Zk:
    """Stands for the package in tests/user_programs.py."""

    ZeroOptimizer, gather = zk.ZeroOptimizer, staticmethod(zk.gather)


@functools.cache
def plain_run(name: str, sgd: bool) -> tuple[dict[str, Tensor], list[float]]:
    """What a program gives in plain torch."""
    return run_program(name, None, sgd=sgd)


def run_program(name: str, case: Case | None, rank: int = 0, drive: str = "", sgd: bool = False) -> tuple[dict[str, Tensor], list[float]]:
    """Parameters after a few steps, and what the program has seen; ``case``: None is plain torch."""
    program = PROGRAMS[name]
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = program.model()
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer: torch.optim.Optimizer = torch.optim.SGD(trained, lr=0.02, momentum=0.9) if sgd else torch.optim.AdamW(trained, lr=1e-2)
    if case is None:
        run = Run(model, optimizer, whole=program.whole)
        with mock.patch.object(tests.user_programs, "zk", Zk):
            _run(name, run)
        return {key: value.clone() for key, value in model.state_dict().items()}, run.seen
    options = {"param_tier": case.tier} if case.stage == 3 else {}
    if case.dtype != "fp32":
        options["dtype"] = case.dtype
    if isinstance(model, Writing):
        options["units"] = [nn.Embedding, nn.Linear]
    if case.overlap_step:
        options["overlap_step"] = True
    options |= {"loss_scale": case.loss_scale, "nvme_path": drive if case.tier == "nvme" else None}
    with mock.patch.object(tests.user_programs, "zk", Zk):
        wrapped = zk.ZeroOptimizer(model, optimizer, stage=case.stage, optimizer_tier=case.tier, **options)
        wrapped.inner = optimizer
        run = Run(model, wrapped, rank, case.world, whole=program.whole)
        try:
            _run(name, run)
            wrapped.synchronize()
            with zk.gather(list(model.parameters())):
                return {key: value.detach().clone().float() for key, value in model.named_parameters()}, run.seen
        finally:
            wrapped.close()


def _run(name: str, run: Run) -> None:
    for run.step in range(STEPS):
        run.draws = 0
        PROGRAMS[name].run(run)


def outcome(name: str, case: Case, rank: int = 0, drive: str = "") -> str:
    """"right", what it was refused with, or "WRONG" with what is off."""
    try:
        got, got_seen = run_program(name, case, rank, drive, case.sgd)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    want, want_seen = plain_run(name, case.sgd)
    off = {key: (got[key] - want[key]).abs().max().item() for key in got}
    rough = case.dtype != "fp32"
    for key, error in off.items():
        allowed = 0.05 * max(1.0, want[key].abs().max().item()) if rough else PROGRAMS[name].tolerance
        if not error <= allowed:
            return f"WRONG: {key} is off by {error:.1e}"
    near = functools.partial(torch.testing.assert_close, rtol=0.1 if rough else 1e-3, atol=0.01 if rough else 1e-5)
    try:
        near(torch.tensor(got_seen), torch.tensor(want_seen))
    except AssertionError:
        return f"WRONG: saw {got_seen[:6]} instead of {want_seen[:6]}"
    return "right"


def fault(name: str, case: Case, verdicts: dict[str, str], rank: int = 0, drive: str = "") -> str:
    """What is wrong with a program's outcome; "" if it is as the verdict says."""
    found, verdict = outcome(name, case, rank, drive), verdicts.get(name, "right")
    return "" if re.search(verdict, found) else f"{name}, {case}: {found} (and not {verdict})"
