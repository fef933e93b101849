"""A checkpoint resumes bit for bit wherever it is loaded, and one that is not whole changes nothing."""

from __future__ import annotations

import contextlib
import copy
import errno
import os
import random
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn

import zk
import zk as first_zk
from tests.models import DEVICE, GPT, batch, loss_of
from tests.programs import Program, run
from tests.world import run_world
from zk import CheckpointError, store
from zk.checkpoint import files, save
from zk.checkpoint.export import export
from zk.offload.rules import AdamRule

pytestmark = pytest.mark.usefixtures("one_thread")

SETTINGS: dict[str, dict[str, Any]] = {
    "0-host": {"stage": 0, "optimizer_tier": "host"},
    "1-device": {"stage": 1, "optimizer_tier": "device"},
    "2-host": {"stage": 2, "optimizer_tier": "host"},
    "3-host": {"stage": 3, "param_tier": "host", "optimizer_tier": "host", "overlap_step": True},
    "3-nvme": {"stage": 3, "param_tier": "nvme", "optimizer_tier": "nvme"},
}
EXACT: dict[str, Any] = {"dtype": "fp32", "clip_grad_norm": None}  # one rank and several round alike
Made = tuple[GPT, Any, Any]


def make(setting: str, drive: Path, variant: str = "frozen", core: Any = zk, **options: Any) -> Made:
    torch.manual_seed(0)
    model = GPT(variant)
    model.register_buffer("seen", torch.zeros(3, device=DEVICE))
    kind = options.pop("kind", torch.optim.AdamW)
    matrices, vectors = [p for p in model.parameters() if p.ndim > 1], [p for p in model.parameters() if p.ndim < 2]
    inner = kind([{"params": matrices}, {"params": vectors}], **{"lr": 1e-2, **copy.deepcopy(options.pop("inner", {}))})
    for group in inner.param_groups:
        group["lr"] = copy.deepcopy(group["lr"])  # one tensor in two groups would decay twice
    path = {"nvme_path": drive} if "nvme" in setting else {}
    options = {"dtype": "bf16", "clip_grad_norm": 0.5, **SETTINGS[setting], **path, **options}
    optimizer = core.ZeroOptimizer(model, inner, **options)
    return model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def train(model: GPT, optimizer: Any, scheduler: Any, start: int, stop: int, ranks: int = 2) -> list[float]:
    """The batches of ``ranks`` ranks, whatever the number of them, so that every world makes the same steps."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    losses = []
    for step in range(start, stop):
        mine = [r for r in range(ranks) if r % world == rank] if world <= ranks else [rank % ranks]
        with torch.no_grad():
            model.seen += step
        loss = sum(loss_of(model, batch(10 * step + r)) for r in mine) / len(mine)
        optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(float(loss.detach()))
    return losses


def snapshot(model: GPT, optimizer: Any) -> dict[str, Any]:
    """All that the next step depends on."""
    optimizer.synchronize()
    found: dict[str, Any] = {"seen": model.seen.clone().cpu(), "groups": copy.deepcopy([{**g, "params": ()} for g in optimizer.param_groups])}
    with zk.gather(model.parameters()):
        found |= {name: param.detach().clone().cpu() for name, param in model.named_parameters()}
    for number, state in optimizer.state_dict()["state"].items():
        found |= {f"{number} {kind}": value.cpu() for kind, value in state.items()}
    return found


def differ(mine: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    names = mine.keys() | theirs.keys()
    return [n for n in names if n not in mine or n not in theirs or not equal(mine[n], theirs[n])]


def equal(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, Tensor) else one == other


def there(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


# ---- any setting loads it --------------------------------------------------------------------------


PAIRS = ("3-nvme", "0-host"), ("0-host", "3-nvme"), ("2-host", "1-device"), ("1-device", "3-host")


@pytest.mark.parametrize(("saved_as", "loaded_as"), PAIRS)
def test_quick_another_stage_and_tier_goes_on_bit_for_bit(
    saved_as: str, loaded_as: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "CHUNK_NUMEL", 2048)
    run = make(saved_as, tmp_path)
    train(*run, 0, 3)
    folder = run[1].save_checkpoint(tmp_path / "saved", scheduler=run[2], extra={"epoch": 3, 7: (1, 2)})
    assert folder == tmp_path / "saved" / "step-00000003" and there(tmp_path / "saved") == ["latest", "step-00000003"]
    drawn = torch.rand(3)
    at_save = snapshot(*run[:2])
    losses = train(*run, 3, 6)
    want = snapshot(*run[:2])
    again = make(loaded_as, tmp_path)
    train(*again, 0, 1)
    assert again[1].load_checkpoint(tmp_path / "saved", scheduler=again[2]) == {"epoch": 3, 7: [1, 2]}
    assert torch.equal(torch.rand(3), drawn) and again[1].num_steps == 3
    assert differ(snapshot(*again[:2]), at_save) == []
    assert train(*again, 3, 6) == losses and differ(snapshot(*again[:2]), want) == []


STATES: dict[str, dict[str, Any]] = {
    "fp32": {"dtype": "fp32", "variant": "tied"},
    "fp16": {"dtype": "fp16", "variant": "unused"},
    "8bit": {"state_dtype": "8bit"},
    "bf16 states": {"state_dtype": "bf16"},
    "SGD": {"kind": torch.optim.SGD, "inner": {"momentum": 0.9}},
    "SGD without momentum": {"kind": torch.optim.SGD},
    "NAdam": {"kind": torch.optim.NAdam},
    "amsgrad": {"inner": {"amsgrad": True}},
    "tensor lr": {"inner": {"lr": torch.tensor(1e-2)}},
}


@pytest.mark.parametrize("case", STATES)
def test_every_kind_of_state_comes_back_bit_for_bit(case: str, tmp_path: Path) -> None:
    run = make("3-host", tmp_path, **STATES[case])
    train(*run, 0, 3)
    run[1].save_checkpoint(tmp_path, scheduler=run[2])
    at_save, losses = snapshot(*run[:2]), train(*run, 3, 5)
    again = make("2-host", tmp_path, **STATES[case])
    again[1].load_checkpoint(tmp_path, scheduler=again[2])
    assert differ(snapshot(*again[:2]), at_save) == []
    assert train(*again, 3, 5) == losses


@pytest.mark.parametrize("case", STATES)
@pytest.mark.parametrize("is_new_first", (False, True), ids=("the first zk's", "the first zk"))
def test_the_first_zk_and_this_one_read_what_the_other_has_written(is_new_first: bool, case: str, tmp_path: Path) -> None:
    first, second = (zk, first_zk) if is_new_first else (first_zk, zk)
    if case == "amsgrad" and is_new_first:
        pytest.skip("the first zk does not expect a count beside these states")
    run = make("3-host", tmp_path, core=first, **STATES[case])
    train(*run, 0, 3)
    run[1].save_checkpoint(tmp_path, scheduler=run[2], extra={"epoch": 3})
    again = make("1-device", tmp_path, core=second, **STATES[case])
    assert again[1].load_checkpoint(tmp_path, scheduler=again[2]) == {"epoch": 3}
    assert train(*again, 3, 5) == train(*run, 3, 5)


# ---- ranks -------------------------------------------------------------------------------------------


def run_chain(case: tuple[str, str, int, int]) -> tuple[list[str], list[float]]:
    """Load (unless it is the first link), compare with what was saved, train, save: on every rank."""
    setting, folder, start, stop = case
    root = Path(folder)
    with tempfile.TemporaryDirectory() as drive, mock.patch.object(store, "CHUNK_NUMEL", 2048):
        run = make(setting, Path(drive), **EXACT)
        found: list[str] = []
        if start:
            run[1].load_checkpoint(root, scheduler=run[2])
            found = differ(snapshot(*run[:2]), torch.load(root / "state.pt", weights_only=False))
        losses = train(*run, start, stop)
        run[1].save_checkpoint(root, scheduler=run[2], keep=2, async_save=True)
        losses += train(*run, stop, stop + 1)
        run[1].synchronize()
        run[1].load_checkpoint(root, scheduler=run[2])
        state = snapshot(*run[:2])
        weights = run[1].consolidated_state_dict(dtype="fp32")
        found += [name for name, value in weights.items() if name in state and not torch.equal(value, state[name])]
        if not dist.is_initialized() or dist.get_rank() == 0:
            torch.save(state, root / "state.pt")
        run[1].close()
    return found, losses


def test_ranks_stages_and_tiers_change_in_one_chain(tmp_path: Path) -> None:
    """1 -> 2 -> 3 -> 1 ranks: the state at each hand-over is bit for bit the one saved."""
    chain = (("0-host", 1), ("1-device", 2), ("3-nvme", 3), ("2-host", 1))
    for number, (setting, world) in enumerate(chain):
        case = (setting, str(tmp_path), 2 * number, 2 * number + 2)
        for found, losses in [run_chain(case)] if world == 1 else run_world(world, run_chain, [case])[0]:
            assert found == [] and len(losses) == 3
    assert there(tmp_path) == ["latest", "state.pt", "step-00000006", "step-00000008"]
    assert (tmp_path / "latest").read_text() == "step-00000008\n"


def run_failures(folder: str) -> list[str]:
    """What each rank says of faults of one of them."""
    root, said = Path(folder), []
    rank = dist.get_rank()
    run = make("0-host", root)
    run[1].save_checkpoint(root / "good")
    for beside in (False, True):
        with pytest.raises(OSError) as refused, mock.patch.object(files, "reserve", full if rank == 1 else files.reserve):
            run[1].save_checkpoint(root / "full", async_save=beside)
            run[1].synchronize()
        said.append(str(refused.value))
    with pytest.raises(CheckpointError) as other:
        run[1].load_checkpoint(root / ("good" if rank == 0 else "full"))
    train(*run, 0, 1)
    return [*said, str(other.value), str(there(root / "full"))]


def test_what_fails_on_one_rank_is_heard_by_name_on_all(tmp_path: Path) -> None:
    first, second = run_world(2, run_failures, [str(tmp_path)])[0]
    for number in (0, 1):
        assert "failed elsewhere: on rank 1, OSError: [Errno 28]" in first[number] and "No space left" in second[number]
    assert "step-00000000" in first[2] and first[3] == second[3] == "[]"


# ---- in the background -------------------------------------------------------------------------------


def slow(values: Any, go_on: threading.Event) -> Any:
    """Tensors to write, once an update has come to something that is still to be read."""
    assert go_on.wait(60), "no update came"
    yield from values


@contextlib.contextmanager
def overtaken(room: int) -> Iterator[None]:
    """A save writes nothing before an update has come to a chunk."""
    go_on, write, before_change = threading.Event(), save.write_file, save.Beside.before_change

    def change(self: save.Beside, *about: Any) -> None:
        if self.unread:
            threading.Timer(0.02, go_on.set).start()
        before_change(self, *about)

    def patient(path: Path, entries: Any, values: Any, metadata: Any) -> Any:
        return write(path, entries, slow(values, go_on), metadata)

    with (
        mock.patch.object(save, "write_file", patient),
        mock.patch.object(save.Beside, "before_change", change),
        mock.patch.object(save.Saver, "room", lambda _: room),
    ):
        yield


@pytest.mark.parametrize("room", (0, 60_000, 1 << 30), ids=("no room", "some room", "plenty"))
@pytest.mark.parametrize("setting", ("0-host", "3-host", "3-nvme"))
def test_a_save_beside_training_is_the_state_when_it_was_asked_for(setting: str, room: int, tmp_path: Path) -> None:
    with mock.patch.object(store, "CHUNK_NUMEL", 2048):
        run = make(setting, tmp_path)
        train(*run, 0, 3)
        run[1].save_checkpoint(tmp_path / "before", scheduler=run[2])
        with overtaken(room):
            run[1].save_checkpoint(tmp_path / "saved", scheduler=run[2], async_save=True)
            losses = train(*run, 3, 6)
            run[1].synchronize()
        again = make("3-host", tmp_path)
        again[1].load_checkpoint(tmp_path / "before", scheduler=again[2])
        before = snapshot(*again[:2])
        again[1].load_checkpoint(tmp_path / "saved", scheduler=again[2])
        assert differ(snapshot(*again[:2]), before) == []
        assert train(*again, 3, 6) == losses


@pytest.mark.parametrize("name", ("head.weight", "tokens.weight"), ids=("trained", "frozen"))
@pytest.mark.parametrize("setting", ("2-host", "3-host"))
def test_what_users_write_while_a_save_goes_on_is_an_error_and_not_saved(setting: str, name: str, tmp_path: Path) -> None:
    run = make(setting, tmp_path)
    train(*run, 0, 1)
    param, go_on, write = run[0].get_parameter(name), threading.Event(), save.write_file

    def patient(path: Path, entries: Any, values: Any, metadata: Any) -> Any:
        return write(path, entries, slow(values, go_on), metadata)

    with mock.patch.object(save, "write_file", patient):
        run[1].save_checkpoint(tmp_path / "saved", async_save=True)
        with zk.gather(param, write=True), torch.no_grad():
            param.fill_(0.5)
        go_on.set()
        with pytest.raises(RuntimeError, match=r"were written from outside .* call synchronize\(\) before"):
            run[1].synchronize()
    assert there(tmp_path / "saved") == []
    run[1].save_checkpoint(tmp_path / "saved")
    again = make("0-host", tmp_path)
    again[1].load_checkpoint(tmp_path / "saved")
    assert (again[0].get_parameter(name) == 0.5).all()


def full(*_: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "drive")


def test_a_full_drive_is_an_error_at_a_step_or_a_warning_and_training_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = make("3-host", tmp_path)
    losses = train(*run, 0, 2)
    old = run[1].save_checkpoint(tmp_path / "saved")
    with mock.patch.object(files, "reserve", full):
        with pytest.raises(OSError, match="No space"):
            run[1].save_checkpoint(tmp_path / "saved")
        assert run[1].save_checkpoint(tmp_path / "saved", on_save_error="warn") is None
        run[1].save_checkpoint(tmp_path / "saved", async_save=True, on_save_error="warn")
        losses += train(*run, 2, 3)
        run[1].synchronize()
        assert len([record for record in caplog.records if "was not saved" in record.message]) == 2
        run[1].save_checkpoint(tmp_path / "saved", async_save=True)
        save.saver_of(run[1]).future.exception(30)
    with pytest.raises(OSError, match="No space"):
        train(*run, 3, 4)
    run[1].step()  # the gradient is still there
    run[2].step()
    run[1].zero_grad()
    losses += train(*run, 4, 5)
    assert there(tmp_path / "saved") == ["latest", old.name]
    want = train(*make("3-host", tmp_path), 0, 5)
    assert losses == [*want[:3], want[4]]


def test_a_program_that_ends_ends_the_save_first(tmp_path: Path) -> None:
    program = f"""
import time
from pathlib import Path
from tests.core.test_checkpoint import make, mock, save, train
write = save.write_file
def slow(path, entries, values, metadata):
    return write(path, entries, (time.sleep(0.001) or value for value in values), metadata)
mock.patch.object(save, "write_file", slow).start()
def main(folder):
    run = make("2-host", folder)
    train(*run, 0, 1)
    run[1].save_checkpoint(folder, async_save=True)
main(Path({str(tmp_path)!r}))
"""
    run("-c", program, check=True)
    assert (tmp_path / "latest").read_text() == "step-00000001\n"


# ---- what is not whole -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("saved")
    run = make("3-host", root)
    train(*run, 0, 2)
    return run[1].save_checkpoint(root)  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def victim(tmp_path_factory: pytest.TempPathFactory) -> Made:
    run = make("2-host", tmp_path_factory.mktemp("victim"))
    train(*run, 0, 1)
    return run


SPOILS = {
    "flipped": lambda data, other: data[:70] + bytes([data[70] ^ 16]) + data[71:],
    "cut": lambda data, other: data[:-9],
    "longer": lambda data, other: data + b"\0",
    "swapped": lambda data, other: other,
    "empty": lambda data, other: b"",
    "missing": None,
    "a pipe": None,
}
FILES = "manifest.json", "rank-00000-of-00001.json", "rank-00000-of-00001.safetensors"


@pytest.mark.parametrize("how", SPOILS)
@pytest.mark.parametrize("name", FILES)
def test_whatever_is_altered_cut_short_or_missing_is_found_and_changes_nothing(
    name: str, how: str, saved: Path, victim: Made, tmp_path: Path
) -> None:
    before, folder, spoil = snapshot(*victim[:2]), tmp_path / "step-00000002", SPOILS[how]
    shutil.copytree(saved, folder)
    if spoil is None:
        (folder / name).unlink()
        os.mkfifo(folder / name) if how == "a pipe" else None
    else:
        other = FILES[FILES.index(name) - 1]
        (folder / name).write_bytes(spoil((saved / name).read_bytes(), (saved / other).read_bytes()))
    with pytest.raises(CheckpointError, match=f"{name}|has no checkpoint"):
        victim[1].load_checkpoint(folder)
    assert differ(snapshot(*victim[:2]), before) == []


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"kind": torch.optim.SGD}, "has .'exp_avg', 'exp_avg_sq'. of .* and this SGD keeps no state: make the same kind"),
        ({"inner": {"amsgrad": True}}, "and this AdamW keeps .'exp_avg', 'exp_avg_sq', 'max_exp_avg_sq'.: make the same kind with the same options"),
        ({"variant": "tied"}, "head.weight|not there in this model|parameter groups"),
        ({"layers": 3}, r"blocks\.2.*is not there"),
        ({"groups": 1}, "other parameter groups"),
        ({"scheduler": 1}, "was saved with scheduler=None, and scheduler=ExponentialLR was given"),
        ({"buffer": 4}, r"buffer 'seen' is \(torch.float32, \(3,\)\), and \(torch.float32, \(4,\)\) in this"),
    ],
    ids=str,
)
def test_another_model_or_optimizer_is_refused(options: dict[str, Any], match: str, saved: Path, tmp_path: Path) -> None:
    model = GPT(options.get("variant", "frozen"), layers=options.get("layers", 2))
    model.register_buffer("seen", torch.zeros(options.get("buffer", 3), device=DEVICE))
    matrices, vectors = [p for p in model.parameters() if p.ndim > 1], [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices}, {"params": vectors}] if "groups" not in options else [{"params": matrices + vectors}]
    inner = options.get("kind", torch.optim.AdamW)(groups, **{"lr": 1e-2, **options.get("inner", {})})
    optimizer = zk.ZeroOptimizer(model, inner, stage=2, dtype="bf16")
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9) if "scheduler" in options else None
    before = snapshot(model, optimizer)
    with pytest.raises(CheckpointError, match=match):
        optimizer.load_checkpoint(saved, scheduler=scheduler)
    assert differ(snapshot(model, optimizer), before) == []


def test_wrong_arguments_are_refused_before_anything_is_made(victim: Made, tmp_path: Path) -> None:
    wrong: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"keep": 0}, ValueError, "keep must be"),
        ({"on_save_error": "ignore"}, ValueError, "on_save_error must be 'raise' or 'warn'"),
        ({"extra": {"loader": object()}}, TypeError, r"extra\['loader'\] is a object"),
    ]
    for options, kind, match in wrong:
        with pytest.raises(kind, match=match):
            victim[1].save_checkpoint(tmp_path / "new", **options)
    assert not (tmp_path / "new").exists()
    with pytest.raises(CheckpointError, match="has no checkpoint"):
        victim[1].load_checkpoint(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        victim[1].save_checkpoint(tmp_path / "file" / "saved")


@pytest.mark.parametrize("error", (OSError(5, "Input/output error"), KeyboardInterrupt("now")), ids=("drive", "Ctrl-C"))
def test_what_was_interrupted_is_refused_until_it_is_loaded_whole(error: BaseException, tmp_path: Path) -> None:
    run = make("3-nvme", tmp_path)
    train(*run, 0, 2)
    run[1].save_checkpoint(tmp_path / "saved", scheduler=run[2])
    want = train(*run, 2, 4)
    with mock.patch.object(files.Tensors, "elements", mock.Mock(side_effect=[torch.zeros(3), torch.ones(1), error])), pytest.raises(type(error)):
        run[1].load_checkpoint(tmp_path / "saved", scheduler=run[2])
    uses = (lambda: loss_of(run[0], batch(0)), run[1].step, run[1].consolidated_state_dict, lambda: run[1].save_checkpoint(tmp_path))
    for use in uses:
        with pytest.raises(RuntimeError, match=r"load_checkpoint\(.*was interrupted \(.*makes all of it whole again"):
            use()
    run[1].load_checkpoint(tmp_path / "saved", scheduler=run[2])
    assert train(*run, 2, 4) == want


@pytest.mark.parametrize("setting", ("3-host", "3-nvme", "2-host"))
def test_a_step_that_failed_half_way_is_not_saved_and_a_load_mends_it(setting: str, tmp_path: Path) -> None:
    made = make(setting, tmp_path)
    train(*made, 0, 2)
    made[1].save_checkpoint(tmp_path / "saved", scheduler=made[2])
    want = train(*made, 2, 4)
    fails = mock.Mock(side_effect=[None, ArithmeticError("broken")])
    with mock.patch.object(AdamRule, "update", fails), pytest.raises((ArithmeticError, RuntimeError), match="broken"):
        train(*made, 4, 5)  # overlapped, whoever waits for the update hears of it
        made[1].synchronize()
    for beside in (False, True):
        with pytest.raises((RuntimeError, ArithmeticError), match=r"half-way|broken"):
            made[1].save_checkpoint(tmp_path / "saved", async_save=beside)
    assert there(tmp_path / "saved") == ["latest", "step-00000002"]
    made[1].load_checkpoint(tmp_path / "saved", scheduler=made[2])
    assert train(*made, 2, 4) == want
    made[1].save_checkpoint(tmp_path / "saved", async_save=True)
    made[1].close()
    assert there(tmp_path / "saved") == ["latest", "step-00000002", "step-00000004"]


def test_a_crash_between_two_renames_loses_nothing(tmp_path: Path) -> None:
    run = make("3-host", tmp_path)
    train(*run, 0, 1)
    folder = run[1].save_checkpoint(tmp_path)
    want = snapshot(*run[:2])
    folder.rename(tmp_path / ".step-00000001.replaced")
    shutil.copytree(tmp_path / ".step-00000001.replaced", tmp_path / ".step-00000001.partial")
    again = make("2-host", tmp_path)
    again[1].load_checkpoint(tmp_path)
    assert differ(snapshot(*again[:2]), want) == []
    run[1].save_checkpoint(tmp_path)
    assert there(tmp_path) == ["latest", "step-00000001"]
    (folder / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="has lost its manifest"):
        run[1].load_checkpoint(tmp_path)


def test_a_second_run_is_kept_out_of_the_folder(victim: Made, tmp_path: Path) -> None:
    program = f"""
from pathlib import Path
from tests.core.test_checkpoint import make
try:
    make("3-host", Path({str(tmp_path)!r}))[1].save_checkpoint({str(tmp_path / "saved")!r})
except OSError as error:
    print(error)
"""
    victim[1].save_checkpoint(tmp_path / "saved")
    said = run("-c", program, check=True).stdout
    assert f"another run saves into this folder (host {socket.gethostname()}, pid {os.getpid()}, since 2" in said


LIFE = """
import sys
from pathlib import Path
from tests.core.test_checkpoint import make, train
folder, setting, beside = Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "beside"
made = make(setting, folder)
if (folder / "saved" / "latest").exists():
    made[1].load_checkpoint(folder / "saved", scheduler=made[2])
print("from", made[1].num_steps, flush=True)
for step in range(made[1].num_steps, 400):
    print(step, *train(*made, step, step + 1), flush=True)
    made[1].save_checkpoint(folder / "saved", scheduler=made[2], keep=2, async_save=beside)
    print("saved", step, flush=True)
"""


def test_killed_at_any_moment_the_newest_whole_checkpoint_resumes_bit_for_bit(tmp_path: Path) -> None:
    draw, known, saved = random.Random(0), dict[str, str](), 0
    lives = (("3-nvme", "beside"), ("0-host", "between"), ("3-host", "beside"), ("1-device", "between"))
    for setting, when in lives:
        program = Program("-c", LIFE, str(tmp_path), setting, when)
        start = int(next(program.stdout).split()[1])
        assert start >= saved - (when == "beside") - 1
        for line in program.stdout:
            step, loss = line.split()
            if step != "saved":
                assert known.setdefault(step, loss) == loss
            elif int(loss) > start + 3:
                saved = int(loss)
                time.sleep(draw.uniform(0, 0.03))
                program.kill()
                break
        assert program.wait() == -9
    assert len(known) > 12


# ---- the first zk, tiles, orders ---------------------------------------------------------------------

FIXTURE = Path(__file__).parent / "checkpoint_of_0_1_0"


def tiled(core: Any, is_tiled: bool = True) -> tuple[nn.Module, Any]:
    """A layer that may be in tiles, one in channels_last, a frozen one in bf16."""
    torch.manual_seed(0)
    layers = (nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(16, 12), nn.Linear(12, 3))
    model = nn.Sequential(*layers).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    model[3].requires_grad_(False)
    if is_tiled:
        core.tile_linears(model, 200)
    inner = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    return model, core.ZeroOptimizer(model, inner, stage=3, dtype="bf16")


def step_of(model: nn.Module, optimizer: Any) -> float:
    loss = model(torch.ones(2, 2, 4, 4)).float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def write_fixture() -> None:
    """Run with the first zk: python -c "from tests.core.test_checkpoint import *; write_fixture()"."""
    model, optimizer = tiled(first_zk)
    losses = [step_of(model, optimizer) for _ in range(2)]
    optimizer.save_checkpoint(FIXTURE, extra={"losses": losses})
    torch.save([step_of(model, optimizer) for _ in range(2)], FIXTURE / "losses.pt")


@pytest.mark.parametrize("is_tiled", (False, True), ids=("whole", "tiled"))
def test_a_checkpoint_of_0_1_0_loads_from_its_files(is_tiled: bool, tmp_path: Path) -> None:
    model, optimizer = tiled(zk, is_tiled)
    extra = optimizer.load_checkpoint(FIXTURE)
    assert len(extra["losses"]) == 2 and optimizer.num_steps == 2
    weights = optimizer.consolidated_state_dict("fp32")
    (file,) = export(FIXTURE, tmp_path / "out", torch.float32).files
    assert differ(load_file(file), weights) == []
    folder = optimizer.save_checkpoint(tmp_path)
    assert [step_of(model, optimizer) for _ in range(2)] == torch.load(FIXTURE / "losses.pt")
    model, optimizer = tiled(zk, not is_tiled)
    assert optimizer.load_checkpoint(folder) is None
    assert differ(optimizer.consolidated_state_dict("fp32"), weights) == []


# ---- a plain model -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", (None, torch.bfloat16, torch.float32))
def test_an_exported_model_is_the_consolidated_one_and_loads_into_the_plain_one(dtype: torch.dtype | None, tmp_path: Path) -> None:
    run = make("3-host", tmp_path, "tied")
    train(*run, 0, 2)
    run[1].save_checkpoint(tmp_path / "saved")
    done = export(tmp_path / "saved", tmp_path / "out", dtype, shard_nbytes=5_000)
    want = run[1].consolidated_state_dict(dtype)
    plain = GPT("tied")
    plain.register_buffer("seen", torch.zeros(3))
    plain.load_state_dict(want)
    found: dict[str, Tensor] = {}
    for file in done.files:
        found |= load_file(file)
    found |= {other: found[kept] for other, kept in done.tied.items()}
    assert len(done.files) > 2 and differ(found, want) == []
    with pytest.raises(ValueError, match="not an empty folder"):
        export(tmp_path / "saved", tmp_path / "out")
    weights = run[1].consolidated_state_dict(names=["head.weight"])
    assert [name for name in weights if name not in ("seen",)] == ["head.weight"]
