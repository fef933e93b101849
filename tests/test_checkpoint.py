"""A checkpoint goes on bit for bit wherever it is loaded, and one that is not whole changes nothing."""

from __future__ import annotations

import contextlib
import copy
import errno
import json
import os
import random
import shutil
import tempfile
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.optim.lr_scheduler import LinearLR, MultiStepLR, SequentialLR

import zk
from tests.models import DEVICE, GPT, batch, loss_of
from tests.programs import run
from tests.soak import soak
from tests.world import run_world
from zk.checkpoint import files, save
from zk.checkpoint.export import export
from zk.checkpoint.files import CheckpointError, Entry, Reader, Writer, check_file
from zk.checkpoint.interrupted import stopped
from zk.offload import nvme, spill
from zk.offload.snapshot import Snapshot, Unread

ROOT = Path(__file__).parent.parent
SETTINGS: dict[str, dict[str, Any]] = {
    "0-host": {"stage": 0, "optimizer_tier": "host"},
    "1-device": {"stage": 1, "optimizer_tier": "device"},
    "2-host-overlapped": {"stage": 2, "optimizer_tier": "host", "overlap_step": True},
    "3-host": {"stage": 3, "param_tier": "host", "optimizer_tier": "host"},
    "3-nvme": {"stage": 3, "param_tier": "nvme", "optimizer_tier": "nvme"},
    "3-auto": {"stage": 3, "param_tier": "host", "optimizer_tier": "auto", "device_budget": 40_000},
}
EXACT: dict[str, Any] = {"dtype": "fp32", "clip_grad_norm": None}  # so that one rank and several round alike


Made = tuple[GPT, zk.ZeroOptimizer, Any]


def make(setting: str, folder: Path, variant: str = "frozen", **options: Any) -> Made:
    torch.manual_seed(0)
    model = GPT(variant)
    model.register_buffer("seen", torch.zeros(3, device=DEVICE))
    matrices, vectors = [p for p in model.parameters() if p.ndim > 1], [p for p in model.parameters() if p.ndim < 2]
    inner = torch.optim.AdamW([{"params": matrices}, {"params": vectors}], lr=1e-2)
    path = {"nvme_path": folder} if "nvme" in setting else {}
    optimizer = zk.ZeroOptimizer(model, inner, **{"dtype": "bf16", "clip_grad_norm": 0.5, **SETTINGS[setting], **path, **options})
    return model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def train(model: GPT, optimizer: zk.ZeroOptimizer, scheduler: Any, start: int, stop: int, ranks: int = 2) -> list[float]:
    """The batches of ``ranks`` ranks, whatever the world size, so that every world makes the same steps."""
    rank, world = optimizer.comm.rank, optimizer.comm.world
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


def snapshot(model: GPT, optimizer: zk.ZeroOptimizer) -> dict[str, torch.Tensor]:
    """Parameters, masters and moments, of all ranks."""
    found = {"seen": model.seen.clone()}
    optimizer.synchronize()
    with zk.gather(model.parameters()):
        found |= {name: param.detach().clone() for name, param in model.named_parameters()}
    for held in optimizer.held:
        if held.shard is None:
            continue
        for kind in ("master", *held.shard.names):
            full = held.whole_of(lambda part, kind=kind, held=held: held.shard.get_state(kind, part))
            for index, name in enumerate(held.unit.names):
                found[f"{kind} {name}"] = full[held.layout.whole(index)].clone()
    return {name: value.cpu() for name, value in found.items()}


def there(folder: Path) -> list[str]:
    """What is in a folder of checkpoints, but for the lock of the run that saves into it."""
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


def same(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> list[str]:
    return [name for name in mine.keys() | theirs.keys() if name not in mine or name not in theirs or not torch.equal(mine[name], theirs[name])]


# ---- in the background ---------------------------------------------------------------------------------------------------------


class SlowWriter(Writer):
    """The drive takes its time, so that updates catch up."""

    def add(self, tensor: torch.Tensor) -> None:
        threading.Event().wait(0.001)
        super().add(tensor)


@contextlib.contextmanager
def save_that_is_overtaken() -> Iterator[None]:
    """A save writes nothing before an update has come to something that it still has to read."""
    overtaken, claim = threading.Event(), Unread._claim

    class PatientWriter(SlowWriter):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            assert overtaken.wait(60), "no update came"

    def claim_and_tell(self: Unread, number: int) -> bool:
        threading.Timer(0.02, overtaken.set).start()
        return claim(self, number)

    with mock.patch.object(save, "Writer", PatientWriter), mock.patch.object(Unread, "_claim", claim_and_tell):
        yield


def check_save_beside_training(setting: str, room: str, folder: Path, made: Callable[[str, Path], Made] = make) -> None:
    """Save while training goes on, with room for copies or without, and resume from it."""
    room_is = mock.patch.object(save, "room_for_copies", lambda _: {"none": 0, "some": 60_000, "plenty": 1 << 30}[room])
    with mock.patch.object(spill, "CHUNK_NUMEL", 2048), save_that_is_overtaken(), room_is:
        model, optimizer, scheduler = made(setting, folder)
        losses = train(model, optimizer, scheduler, 0, 3)
        before = snapshot(model, optimizer)
        losses += train(model, optimizer, scheduler, 3, 4)
        optimizer.save_checkpoint(folder / "saved", scheduler=scheduler, async_save=True)
        under_way = optimizer.saver.snapshot
        losses += train(model, optimizer, scheduler, 4, 8)
        assert optimizer.metrics()["save_stall_ms"] > 0
        optimizer.synchronize()
        assert under_way.over and (under_way.copied_nbytes > 0 or room != "plenty") and (under_way.copied_nbytes == 0 or room != "none")
        unbroken = snapshot(model, optimizer)
        optimizer.close()

        model, optimizer, scheduler = made("2-host-overlapped", folder)
        assert train(model, optimizer, scheduler, 0, 4) == losses[:4]
        halfway = snapshot(model, optimizer)
        optimizer.close()
        model, optimizer, scheduler = made("3-host", folder)
        optimizer.load_checkpoint(folder / "saved", scheduler=scheduler)
        assert same(snapshot(model, optimizer), halfway) == [] and same(halfway, before) != []
        assert train(model, optimizer, scheduler, 4, 8) == losses[4:]
        assert same(snapshot(model, optimizer), unbroken) == []
        optimizer.close()


@pytest.mark.parametrize("room", ("none", "some", "plenty"))
@pytest.mark.parametrize("setting", ("0-host", "2-host-overlapped", "3-nvme"))
def test_a_save_beside_training_is_the_state_when_it_was_asked_for(setting: str, room: str, tmp_path: Path) -> None:
    check_save_beside_training(setting, room, tmp_path)


def run_async(case: tuple[str, str]) -> list[float]:
    setting, folder = case
    with tempfile.TemporaryDirectory() as drive, mock.patch.object(save, "Writer", SlowWriter):
        model, optimizer, scheduler = make(setting, Path(drive), **EXACT)
        losses = train(model, optimizer, scheduler, 0, 2)
        for step in range(2, 6):
            optimizer.save_checkpoint(folder, scheduler=scheduler, keep=2, async_save=True)
            losses += train(model, optimizer, scheduler, step, step + 1)
        optimizer.close()
    return losses


def test_a_save_that_is_interrupted_as_it_begins_is_waited_for_by_no_update(tmp_path: Path) -> None:
    model, optimizer, scheduler = make("0-host", tmp_path)
    interrupted = mock.patch.object(save, "Unread", mock.Mock(side_effect=[mock.DEFAULT, KeyboardInterrupt], wraps=Unread))
    with interrupted, mock.patch.object(save, "room_for_copies", lambda _: 0), pytest.raises(KeyboardInterrupt):
        optimizer.save_checkpoint(tmp_path / "saved", async_save=True)
    assert all(held.shard is None or held.shard.unread is None for held in optimizer.held)
    train(model, optimizer, scheduler, 0, 1)
    optimizer.close()


@pytest.mark.parametrize("setting", ("1-device", "2-host-overlapped", "3-nvme"))
def test_two_ranks_save_beside_training(setting: str, tmp_path: Path) -> None:
    losses = train(*make("0-host", tmp_path, **EXACT), 0, 6)
    for rank in run_world(2, run_async, [(setting, str(tmp_path))])[0]:
        assert not isinstance(rank, Exception), rank
        assert len(rank) == 6
    assert sorted(path.name for path in tmp_path.iterdir() if "step" in path.name) == ["step-00000004", "step-00000005"]
    model, optimizer, scheduler = make("3-host", tmp_path, **EXACT)
    optimizer.load_checkpoint(tmp_path, scheduler=scheduler)
    assert train(model, optimizer, scheduler, 5, 6) == losses[5:]


def check_what_the_user_wrote(folder: Path) -> None:
    """Write to a parameter between steps, and save it."""
    for setting in ("0-host", "2-host-overlapped"):
        for beside in (False, True):
            model, optimizer, _ = make(setting, folder)
            train(model, optimizer, _, 0, 1)
            with torch.no_grad():
                model.head.weight.fill_(0.25)
            optimizer.save_checkpoint(folder / "saved", async_save=beside)
            optimizer.close()
            model, optimizer, _ = make("3-host", folder)
            optimizer.load_checkpoint(folder / "saved")
            assert (snapshot(model, optimizer)["head.weight"] == 0.25).all()


def test_what_the_user_wrote_since_the_last_step_is_saved(tmp_path: Path) -> None:
    check_what_the_user_wrote(tmp_path)


def test_a_save_beside_training_waits_for_a_copy_that_is_being_made() -> None:
    unread = Unread(Snapshot(100), {0: 60, 1: 60}, lambda number, fields: [fields["x"] + number])
    reached, copied = threading.Event(), []

    def read() -> None:
        reached.set()
        with unread.taken(1) as values:
            copied.append(values)

    saver = threading.Thread(target=read)
    with unread.before_change(1) as hand:
        saver.start()
        assert reached.wait(20)
        saver.join(0.05)
        assert saver.is_alive() and copied == [] and unread.snapshot.room == 40
        hand({"x": torch.ones(1)})
        saver.join(20)
        assert copied == [[torch.tensor([2.0])]]
    assert unread.snapshot.room == 100
    with pytest.raises(OSError, match="broken"), unread.before_change(0):
        raise OSError("broken")  # the chunk could not be opened
    with pytest.raises(RuntimeError, match="an update failed"), unread.taken(0):
        pass


@pytest.mark.parametrize(("setting", "waits"), (("2-host-overlapped", True), ("2-host-overlapped", False), ("0-host", False), ("3-host", True)))
@pytest.mark.parametrize("name", ("head.weight", "tokens.weight"))  # trained, and frozen
def test_what_is_written_under_a_save_is_not_in_it(setting: str, waits: bool, name: str, tmp_path: Path) -> None:
    model, optimizer, scheduler = make(setting, tmp_path)
    train(model, optimizer, scheduler, 0, 1)
    want, go_on = snapshot(model, optimizer), threading.Event()

    class PatientWriter(Writer):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            assert go_on.wait(60)

    with mock.patch.object(save, "Writer", PatientWriter):
        optimizer.save_checkpoint(tmp_path / "saved", async_save=True)
        if waits:
            threading.Timer(0.1, go_on.set).start()
        with zk.gather(model.parameters(), write=True) if waits else contextlib.nullcontext(), torch.no_grad():
            model.get_parameter(name).fill_(0.5)
        go_on.set()
        if waits:
            optimizer.synchronize()
            model, optimizer, _ = make(setting, tmp_path)
            optimizer.load_checkpoint(tmp_path / "saved")
            assert same(snapshot(model, optimizer), want) == []
        else:  # nobody could wait
            with pytest.raises(RuntimeError, match="were written from outside"):
                optimizer.synchronize()
            assert there(tmp_path / "saved") == []


def test_a_drive_that_refuses_is_an_error_at_the_next_step_or_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    model, optimizer, scheduler = make("3-host", tmp_path)
    losses = train(model, optimizer, scheduler, 0, 2)
    old = optimizer.save_checkpoint(tmp_path / "saved")
    with mock.patch.object(nvme.SYSTEM, "posix_fallocate", full):
        assert optimizer.save_checkpoint(tmp_path / "saved", on_save_error="warn") is None
        optimizer.save_checkpoint(tmp_path / "saved", async_save=True, on_save_error="warn")
        losses += train(model, optimizer, scheduler, 2, 3)
        optimizer.synchronize()
        assert len([record for record in caplog.records if "training goes on" in record.message]) == 2
        optimizer.save_checkpoint(tmp_path / "saved", async_save=True)
        assert optimizer.saver.ticket is not None
        optimizer.saver.ticket.event.wait(30)
    with pytest.raises(OSError, match=r"space|free"):
        train(model, optimizer, scheduler, 3, 4)
    optimizer.step()  # the gradient is still there
    scheduler.step()
    optimizer.zero_grad()
    assert there(tmp_path / "saved") == ["latest", old.name]
    losses += train(model, optimizer, scheduler, 4, 5)
    model, optimizer, scheduler = make("3-host", tmp_path)
    want = train(model, optimizer, scheduler, 0, 5)
    assert losses == [*want[:3], want[4]]


def test_an_update_that_fails_is_not_saved(tmp_path: Path) -> None:
    model, optimizer, scheduler = make("2-host-overlapped", tmp_path)
    train(model, optimizer, scheduler, 0, 2)
    optimizer.synchronize()

    def broken(*_: Any, **__: Any) -> None:
        raise ArithmeticError("broken")

    with mock.patch.object(optimizer.rules[0], "update", broken):
        train(model, optimizer, scheduler, 2, 3)
        optimizer.save_checkpoint(tmp_path / "saved", async_save=True)
        assert optimizer.saver.ticket is not None
        optimizer.saver.ticket.event.wait(30)
    assert isinstance(optimizer.saver.ticket.error, ArithmeticError) and there(tmp_path / "saved") == []
    with pytest.raises(ArithmeticError):
        train(model, optimizer, scheduler, 3, 4)
    with pytest.raises(ArithmeticError):
        optimizer.synchronize()
    with pytest.raises(RuntimeError, match="half-way"):
        optimizer.save_checkpoint(tmp_path / "saved", async_save=True)
    with pytest.raises(ArithmeticError):
        optimizer.saver.finish()


def test_a_program_that_ends_ends_the_save_first(tmp_path: Path) -> None:
    program = textwrap.dedent(
        f"""
        from pathlib import Path
        from tests.test_checkpoint import SlowWriter, make, mock, save, train
        mock.patch.object(save, "Writer", SlowWriter).start()
        folder = Path({str(tmp_path)!r})
        model, optimizer, scheduler = make("3-host", folder)
        train(model, optimizer, scheduler, 0, 1)
        optimizer.save_checkpoint(folder, async_save=True)
        """
    )
    run("-c", program, check=True)
    assert (tmp_path / "latest").read_text() == "step-00000001\n"


@pytest.mark.parametrize("setting", ("2-host-overlapped", "3-nvme"))
def test_a_save_outlives_its_optimizer_and_a_forked_process_does_not_wait_for_it(setting: str, tmp_path: Path) -> None:
    program = textwrap.dedent(
        f"""
        import gc, os, sys, warnings
        from pathlib import Path
        from tests.test_checkpoint import SlowWriter, make, mock, save, train
        mock.patch.object(save, "Writer", SlowWriter).start()
        warnings.simplefilter("ignore")
        folder = Path({str(tmp_path)!r})

        def main():
            model, optimizer, scheduler = make({setting!r}, folder)
            train(model, optimizer, scheduler, 0, 1)
            optimizer.save_checkpoint(folder / "saved", async_save=True)

        main()
        gc.collect()
        if os.fork() == 0:
            sys.exit(3)
        assert os.waitstatus_to_exitcode(os.wait()[1]) == 3
        """
    )
    run("-c", program, check=True)
    assert (tmp_path / "saved" / "latest").read_text() == "step-00000001\n"


def run_waiting_on_one_rank(folder: str) -> list[float]:
    with mock.patch.object(save, "Writer", SlowWriter):
        model, optimizer, scheduler = make("2-host-overlapped", Path(folder))
        train(model, optimizer, scheduler, 0, 1)
        optimizer.save_checkpoint(folder, async_save=True)
        if dist.get_rank() == 0:
            optimizer.synchronize()
        losses = train(model, optimizer, scheduler, 1, 4)
        optimizer.close()
    return losses


def test_one_rank_may_wait_for_the_save_and_the_others_not(tmp_path: Path) -> None:
    found = run_world(2, run_waiting_on_one_rank, [str(tmp_path)])[0]
    assert all(isinstance(losses, list) and len(losses) == 3 for losses in found), found


def test_an_error_of_the_run_is_the_one_that_is_raised(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    model, optimizer, scheduler = make("3-host", tmp_path)
    with pytest.raises(KeyError, match="the run's"), optimizer:
        train(model, optimizer, scheduler, 0, 1)
        optimizer.save_checkpoint(tmp_path / "file" / "saved", async_save=True)
        raise KeyError("the run's")
    with pytest.raises(OSError, match="file"):
        make("3-host", tmp_path)[1].save_checkpoint(tmp_path / "file" / "saved")
    assert make("3-host", tmp_path)[1].save_checkpoint(tmp_path / "file" / "saved", on_save_error="warn") is None


def test_a_crash_between_two_renames_loses_nothing(tmp_path: Path) -> None:
    model, optimizer, _ = make("3-host", tmp_path)
    train(model, optimizer, _, 0, 1)
    optimizer.save_checkpoint(tmp_path)
    want = snapshot(model, optimizer)
    (tmp_path / "step-00000001").rename(tmp_path / ".step-00000001.replaced")
    shutil.copytree(tmp_path / ".step-00000001.replaced", tmp_path / ".step-00000001.partial")
    model, other, _ = make("2-host-overlapped", tmp_path)
    other.load_checkpoint(tmp_path)
    assert same(snapshot(model, other), want) == []
    optimizer.save_checkpoint(tmp_path)
    assert there(tmp_path) == ["latest", "step-00000001"]


# ---- precisions and worlds ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ("tied", "unused"))
@pytest.mark.parametrize("dtype", ("fp32", "fp16"))
def test_tied_and_unused_parameters_in_every_precision(variant: str, dtype: str, tmp_path: Path) -> None:
    model, optimizer, scheduler = make("2-host-overlapped", tmp_path, variant, dtype=dtype)
    losses = train(model, optimizer, scheduler, 0, 4)
    want = snapshot(model, optimizer)
    model, optimizer, scheduler = make("3-host", tmp_path, variant, dtype=dtype)
    train(model, optimizer, scheduler, 0, 2)
    optimizer.save_checkpoint(tmp_path)
    model, optimizer, _ = make("0-host", tmp_path, variant, dtype=dtype)
    optimizer.load_checkpoint(tmp_path)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9, last_epoch=2)
    for group in optimizer.param_groups:
        group["lr"] = 1e-2 * 0.9**2
    assert train(model, optimizer, scheduler, 2, 4) == losses[2:]
    assert same(snapshot(model, optimizer), want) == []


def test_the_loss_scale_goes_on_if_there_was_one(tmp_path: Path) -> None:
    _, optimizer, _ = make("3-host", tmp_path, dtype="bf16")
    optimizer.save_checkpoint(tmp_path)
    _, optimizer, _ = make("2-host-overlapped", tmp_path, dtype="fp16")
    optimizer.load_checkpoint(tmp_path)
    assert optimizer.metrics()["loss_scale"] == 2**16
    optimizer.scaler.scale, optimizer.scaler.clean_steps = 512.0, 90
    optimizer.save_checkpoint(tmp_path)
    model, optimizer, scheduler = make("3-host", tmp_path, dtype="fp16", loss_scale=zk.DynamicLossScale(window=10))
    optimizer.load_checkpoint(tmp_path)
    assert optimizer.metrics()["loss_scale"] == 512
    train(model, optimizer, scheduler, 0, 1)
    assert optimizer.metrics()["loss_scale"] == 1024


def run_chain(case: tuple[str, str, int, int, bool]) -> tuple[list[str], list[float]]:
    """Load (unless it is the first link), compare with what was saved, train, save: on every rank."""
    setting, folder, start, stop, first = case
    root = Path(folder)
    with tempfile.TemporaryDirectory() as drive, mock.patch.object(spill, "CHUNK_NUMEL", 2048):
        model, optimizer, scheduler = make(setting, Path(drive), **EXACT)
        found: list[str] = []
        if not first:
            optimizer.load_checkpoint(root, scheduler=scheduler)
            found = same(snapshot(model, optimizer), torch.load(root / "state.pt", weights_only=True))
        losses = train(model, optimizer, scheduler, start, stop)
        optimizer.save_checkpoint(root, scheduler=scheduler, keep=2)
        state = snapshot(model, optimizer)
        if not dist.is_initialized() or dist.get_rank() == 0:
            torch.save(state, root / "state.pt")
        optimizer.close()
    return found, losses


def test_world_sizes_stages_and_tiers_change_in_one_chain(tmp_path: Path) -> None:
    """1 -> 2 -> 3 -> 1 ranks, stages 1 -> 3 -> 2, host -> nvme -> device: the state at each hand-over is bitwise the one saved."""
    chain = (("0-host", 1), ("1-device", 2), ("3-nvme", 3), ("2-host-overlapped", 1))
    for number, (setting, world) in enumerate(chain):
        case = (setting, str(tmp_path), 2 * number, 2 * number + 2, number == 0)
        for found, losses in [run_chain(case)] if world == 1 else run_world(world, run_chain, [case])[0]:
            assert found == [] and len(losses) == 2
    assert sorted(folder.name for folder in tmp_path.glob("step-*")) == ["step-00000006", "step-00000008"]
    assert (tmp_path / "latest").read_text() == "step-00000008\n"


def test_what_is_saved_is_plain_safetensors_with_the_masters_in_full_precision(tmp_path: Path) -> None:
    model, optimizer, scheduler = make("3-host", tmp_path, "plain")
    train(model, optimizer, scheduler, 0, 2)
    folder = optimizer.save_checkpoint(tmp_path)
    tensors = load_file(folder / "rank-00000-of-00001.safetensors")
    manifest = json.loads((folder / "manifest.json").read_text())
    state = snapshot(model, optimizer)
    unit = next(number for number, unit in enumerate(manifest["units"]) if unit["name"] == "blocks.1")
    for param in manifest["units"][unit]["params"]:
        flat = state[f"master {param['name']}"]
        assert torch.equal(tensors[f"master/{unit}/0"][param["offset"] : param["offset"] + flat.numel()], flat)
        assert param["dtype"] == "bfloat16" and param["steps"] == 2


# ---- refusals ----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("saved")
    model, optimizer, scheduler = make("3-host", root)
    train(model, optimizer, scheduler, 0, 2)
    folder = optimizer.save_checkpoint(root)
    optimizer.close()
    return folder


@pytest.fixture(scope="module")
def victim(tmp_path_factory: pytest.TempPathFactory) -> tuple[GPT, zk.ZeroOptimizer]:
    model, optimizer, scheduler = make("2-host-overlapped", tmp_path_factory.mktemp("victim"))
    train(model, optimizer, scheduler, 0, 1)
    return model, optimizer


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_whatever_is_altered_cut_short_or_missing_is_found_and_changes_nothing(
    data: st.DataObject, saved: Path, victim: tuple[GPT, zk.ZeroOptimizer], tmp_path: Path
) -> None:
    model, optimizer = victim
    before, names = snapshot(model, optimizer), sorted(path.name for path in saved.iterdir())
    groups = [dict(group) for group in optimizer.param_groups]
    damaged = tmp_path / "damaged"
    shutil.rmtree(damaged, ignore_errors=True)
    shutil.copytree(saved, damaged)
    name = data.draw(st.sampled_from([name for name in names if name != "manifest.json"]))
    content = bytearray((damaged / name).read_bytes())
    how = data.draw(st.sampled_from(("flip", "cut", "remove", "longer", "swap")))
    if how == "flip":
        content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    elif how == "cut":
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    elif how == "longer":
        content += b"\0"
    elif how == "swap":
        content = bytearray((damaged / next(other for other in names if other not in (name, "manifest.json"))).read_bytes())
    if how == "remove":
        (damaged / name).unlink()
    else:
        (damaged / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=name):
        optimizer.load_checkpoint(damaged)
    assert same(snapshot(model, optimizer), before) == []
    assert [dict(group) for group in optimizer.param_groups] == groups and optimizer.counters["steps"] == 1


@pytest.mark.parametrize(
    ("spoil", "match"),
    (
        (lambda path: path.unlink(), "no checkpoint"),
        (lambda path: path.write_text("{}"), "not a manifest"),
        (lambda path: path.write_text("nonsense"), "cannot be read"),
        (lambda path: path.write_text(path.read_text().replace('"version": 4', '"version": 9')), "version 9"),
        (lambda path: path.write_text(path.read_text().replace("blocks.0.up", "blocks.0.low")), "manifest.json is not what was written"),
        (lambda path: path.write_text(path.read_text().replace('"lr": 0.0', '"lr": 0.1')), "manifest.json is not what was written"),
        (lambda path: path.write_text(path.read_text().replace('"steps": 2', '"steps": 3')), "manifest.json is not what was written"),
    ),
)
def test_a_manifest_that_is_not_one_is_refused(spoil: Any, match: str, saved: Path, victim: tuple[GPT, zk.ZeroOptimizer], tmp_path: Path) -> None:
    folder = tmp_path / "step-00000002"
    shutil.copytree(saved, folder)
    spoil(folder / "manifest.json")
    with pytest.raises(CheckpointError, match=match):
        victim[1].load_checkpoint(tmp_path)


def test_a_newest_checkpoint_without_its_manifest_is_named_and_no_older_one_taken_for_it(tmp_path: Path) -> None:
    model, optimizer, scheduler = make("2-host-overlapped", tmp_path)
    train(model, optimizer, scheduler, 0, 1)
    optimizer.save_checkpoint(tmp_path / "saved")
    train(model, optimizer, scheduler, 1, 2)
    newest = optimizer.save_checkpoint(tmp_path / "saved")
    (newest / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="step-00000002 has lost its manifest"):
        optimizer.load_checkpoint(tmp_path / "saved")
    with pytest.raises(CheckpointError, match=r"manifest\.json is gone"):
        optimizer.load_checkpoint(newest)
    assert "there is no checkpoint to resume from" in stopped(optimizer)  # which Ctrl-C prints
    shutil.rmtree(newest)
    optimizer.load_checkpoint(tmp_path / "saved")
    assert optimizer.counters["steps"] == 1


def test_a_scheduler_of_schedulers_goes_on_as_it_would_have(tmp_path: Path) -> None:
    def scheduled() -> Made:
        model, optimizer, _ = make("2-host-overlapped", tmp_path)
        warmup, drops = LinearLR(optimizer, total_iters=2), MultiStepLR(optimizer, [1, 2], gamma=0.5)
        return model, optimizer, SequentialLR(optimizer, [warmup, drops], [3])

    model, optimizer, scheduler = scheduled()
    train(model, optimizer, scheduler, 0, 2)
    optimizer.save_checkpoint(tmp_path / "saved", scheduler=scheduler)
    train(model, optimizer, scheduler, 2, 6)
    rates = [group["lr"] for group in optimizer.param_groups]
    model, optimizer, scheduler = scheduled()
    optimizer.load_checkpoint(tmp_path / "saved", scheduler=scheduler)
    train(model, optimizer, scheduler, 2, 6)
    assert [group["lr"] for group in optimizer.param_groups] == rates


def test_another_model_other_groups_or_another_optimizer_are_refused(saved: Path, tmp_path: Path) -> None:
    model = GPT("frozen", layers=3)
    model.register_buffer("seen", torch.zeros(3))
    optimizer = zk.ZeroOptimizer(model, torch.optim.AdamW(model.parameters()), dtype="bf16")
    with pytest.raises(CheckpointError, match=r"blocks\.2.*not there"):
        optimizer.load_checkpoint(saved)
    model = GPT("frozen")
    model.register_buffer("seen", torch.zeros(3))
    optimizer = zk.ZeroOptimizer(model, torch.optim.AdamW(model.parameters()), dtype="bf16")
    with pytest.raises(CheckpointError, match="other parameter groups"):
        optimizer.load_checkpoint(saved)
    with pytest.raises(CheckpointError, match="has no scheduler, and one was"):
        _, optimizer, scheduler = make("2-host-overlapped", tmp_path)
        optimizer.load_checkpoint(saved, scheduler=scheduler)
    with pytest.raises(CheckpointError, match="has no checkpoint"):
        optimizer.load_checkpoint(tmp_path)
    for options, error, match in (
        ({"keep": 0}, ValueError, "keep must be"),
        ({"extra": {"loader": object()}}, TypeError, r"extra\['loader'\] is a object"),
    ):
        with pytest.raises(error, match=match):
            optimizer.save_checkpoint(tmp_path / "new", **options)
    assert not (tmp_path / "new").exists()


# ---- drives that refuse, processes that die ----------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ("reserving", "writing"))
def test_a_full_drive_leaves_the_old_checkpoint_whole_and_training_goes_on(moment: str, tmp_path: Path) -> None:
    model, optimizer, scheduler = make("3-host", tmp_path)
    losses = train(model, optimizer, scheduler, 0, 2)
    old = optimizer.save_checkpoint(tmp_path / "saved")
    train(model, optimizer, scheduler, 2, 3)

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with mock.patch.object(nvme.SYSTEM, "posix_fallocate" if moment == "reserving" else "pwritev", full), pytest.raises(OSError, match=r"space|free"):
        optimizer.save_checkpoint(tmp_path / "saved")
    assert there(tmp_path / "saved") == ["latest", old.name]
    train(model, optimizer, scheduler, 3, 4)
    assert optimizer.save_checkpoint(tmp_path / "saved", keep=1).name == "step-00000004" and not old.exists()
    assert len(losses) == 2


@pytest.mark.skipif(os.getuid() == 0, reason="root writes everywhere")
def test_a_read_only_folder_is_an_error_that_names_it(tmp_path: Path) -> None:
    _, optimizer, _ = make("3-host", tmp_path)
    (tmp_path / "locked").mkdir(mode=0o500)
    with pytest.raises(OSError, match="locked"):
        optimizer.save_checkpoint(tmp_path / "locked")


@pytest.mark.usefixtures("one_thread")
def test_killed_at_any_moment_the_newest_whole_checkpoint_loads_and_goes_on(tmp_path: Path) -> None:
    assert soak(4, 0, list(SETTINGS), tmp_path) >= 4  # `make soak` kills 50 times, and one of two ranks as often


# ---- files -------------------------------------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(sizes=st.lists(st.integers(0, 9000), min_size=1, max_size=6), seed=st.integers(0, 99))
def test_files_written_piece_by_piece_are_what_safetensors_reads(sizes: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    dtypes = (torch.float32, torch.bfloat16, torch.int64, torch.uint8)
    tensors = {f"t{i}": torch.randint(0, 100, (size,), generator=generator).to(dtypes[i % 4]) for i, size in enumerate(sizes)}
    with mock.patch.object(files, "BLOCK_NBYTES", 8192), tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.safetensors"
        writer = Writer(path, [Entry(key, value.dtype, (value.numel(),)) for key, value in tensors.items()], {"format": "pt"})
        for value in tensors.values():
            cut = random.Random(seed).randint(0, value.numel())
            writer.add(value[:cut])
            writer.add(value[cut:])
        written = writer.finish()
        read = load_file(path)
        assert all(torch.equal(read[key], value) for key, value in tensors.items())
        check_file(Path(folder), written)
        with Reader(path) as reader:
            for key, value in tensors.items():
                start = random.Random(seed).randint(0, value.numel())
                assert torch.equal(reader.read(key, start), value[start:])


def test_parameters_that_came_later_are_saved_as_they_are(tmp_path: Path) -> None:
    def made(seed: int) -> tuple[GPT, zk.ZeroOptimizer]:
        torch.manual_seed(seed)
        model = GPT()
        optimizer = zk.ZeroOptimizer(model, torch.optim.AdamW(model.parameters(), lr=1e-2), stage=2)
        model.average = copy.deepcopy(model.head).requires_grad_(False)
        return model, optimizer

    model, optimizer = made(0)
    loss_of(model, batch(0)).backward()
    optimizer.step()
    model.average.weight.mul_(0.9).add_(model.head.weight, alpha=0.1)
    folder = optimizer.save_checkpoint(tmp_path)
    assert torch.equal(optimizer.consolidated_state_dict()["average.weight"], model.average.weight)
    other, again = made(1)
    again.load_checkpoint(tmp_path)
    for (name, got), want in zip(other.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(got, want), name
    assert folder is not None
    (file,) = export(folder, tmp_path / "out").files
    assert torch.equal(load_file(file)["average.weight"], model.average.weight)


def test_the_state_of_another_kind_of_optimizer_is_refused(tmp_path: Path) -> None:
    model = GPT()
    optimizer = zk.ZeroOptimizer(model, torch.optim.AdamW(model.parameters()), stage=2)
    loss_of(model, batch(0)).backward()
    optimizer.step()
    optimizer.save_checkpoint(tmp_path)
    other = GPT()
    before = copy.deepcopy(other.state_dict())
    again = zk.ZeroOptimizer(other, torch.optim.SGD(other.parameters(), lr=0.1), stage=2)
    with pytest.raises(CheckpointError, match="exp_avg, exp_avg_sq, the state of another kind of optimizer than SGD"):
        again.load_checkpoint(tmp_path)
    assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())
