"""A checkpoint resumes bit for bit wherever it is loaded, and one that is not whole changes nothing."""

import contextlib
import copy
import errno
import functools
import itertools
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import zk
from tests.core.test_checks import error_of
from tests.models import DEVICE, GPT, batch, descend, loss_of, small_chunks
from tests.soak import soak
from tests.world import run_world
from zk import CheckpointError
from zk.checkpoint import files, save
from zk.checkpoint.export import export
from zk.offload.rules import AdamRule

pytestmark = pytest.mark.usefixtures("torch_engine")

SETTINGS: dict[str, dict[str, Any]] = {
    "0-host": {"stage": 0, "optimizer_tier": "host"},
    "1-device": {"stage": 1, "optimizer_tier": "device"},
    "2-host": {"stage": 2, "optimizer_tier": "host"},
    "3-host": {"stage": 3, "param_tier": "host", "optimizer_tier": "host", "overlap_step": True},
    "3-nvme": {"stage": 3, "param_tier": "nvme", "optimizer_tier": "nvme"},
}
EXACT: dict[str, Any] = {"dtype": "fp32", "clip_grad_norm": None}  # one rank and several round alike
Made = tuple[GPT, Any, Any]


def make(setting: str, drive: Path, variant: str = "frozen", **options: Any) -> Made:
    torch.manual_seed(0)
    model = GPT(variant, layers=options.pop("layers", 2))
    model.register_buffer("seen", torch.zeros(options.pop("buffer", 3), device=DEVICE))
    kind = options.pop("kind", torch.optim.AdamW)
    matrices, vectors = [p for p in model.parameters() if p.ndim > 1], [p for p in model.parameters() if p.ndim < 2]
    halves = [matrices + vectors] if options.pop("groups", 2) == 1 else [matrices, vectors]
    inner = kind([{"params": half} for half in halves], **{"lr": 1e-2, **copy.deepcopy(options.pop("inner", {}))})
    for group in inner.param_groups:
        group["lr"] = copy.deepcopy(group["lr"])  # one tensor in two groups would decay twice
    path = {"nvme_path": drive} if "nvme" in setting else {}
    options = {"dtype": "bf16", "clip_grad_norm": 0.5, **SETTINGS[setting], **path, **options}
    optimizer = zk.ZeroOptimizer(model, inner, **options)
    warmup, drops = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=2), torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 2], gamma=0.5)
    return model, optimizer, torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, drops], [3])


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
    states = optimizer.state_dict()
    found["loss_scale"] = states["loss_scale"]
    for number, state in states["state"].items():
        found |= {f"{number} {kind}": value.cpu() for kind, value in state.items()}
    return found


def differ(mine: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    def equal(one: Any, other: Any) -> bool:
        return torch.equal(one, other) if isinstance(one, Tensor) else one == other

    names = mine.keys() | theirs.keys()
    return [n for n in names if n not in mine or n not in theirs or not equal(mine[n], theirs[n])]


def there(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


LOADS: tuple[tuple[str, str, int | None, dict[str, Any]], ...] = (  # saved as, loaded as, room for a save beside training, options
    ("3-nvme", "0-host", None, {}),
    ("0-host", "3-nvme", None, {"dtype": "fp32", "variant": "tied"}),
    # of two clean steps before the save one counts
    ("1-device", "2-host", None, {"dtype": "fp16", "variant": "unused", "loss_scale": zk.DynamicLossScale(init=512.0, window=2)}),
    ("3-host", "2-host", None, {"kind": torch.optim.SGD}),
    ("3-host", "2-host", None, {"kind": torch.optim.NAdam}),
    ("2-host", "3-host", None, {"inner": {"amsgrad": True, "lr": torch.tensor(1e-2)}}),
    *((setting, "3-host", room, {}) for setting, room in (("0-host", 0), ("3-host", 60_000), ("3-nvme", 1 << 30))),
)


@pytest.mark.parametrize(("saved_as", "loaded_as", "room", "options"), LOADS, ids=str)
@small_chunks()
def test_quick_every_kind_of_state_goes_on_bit_for_bit_at_another_stage_and_tier_from_when_a_save_was_asked_for(
    saved_as: str, loaded_as: str, room: int | None, options: dict[str, Any], tmp_path: Path
) -> None:
    run = make(saved_as, tmp_path, **options)
    train(*run, 0, 3)
    at_save, root, extra = snapshot(*run[:2]), tmp_path / "saved", {"epoch": 3, 7: (1, 2)}
    with contextlib.nullcontext() if room is None else overtaken(room):
        folder = run[1].save_checkpoint(root, scheduler=run[2], extra=extra, async_save=room is not None)
        drawn, losses = torch.rand(3), train(*run, 3, 6)
        want = snapshot(*run[:2])
    assert folder == root / "step-00000003" and there(root) == ["latest", "step-00000003"]
    again = make(loaded_as, tmp_path, **options)
    train(*again, 0, 1)
    assert again[1].load_checkpoint(root, scheduler=again[2]) == {"epoch": 3, 7: [1, 2]}
    assert torch.equal(torch.rand(3), drawn) and again[1].num_steps == 3
    assert differ(snapshot(*again[:2]), at_save) == []
    assert train(*again, 3, 6) == losses and differ(snapshot(*again[:2]), want) == []


def test_a_loss_scale_starts_anew_where_there_was_none(tmp_path: Path) -> None:
    make("3-host", tmp_path)[1].save_checkpoint(tmp_path)
    half = make("2-host", tmp_path, dtype="fp16", loss_scale=zk.DynamicLossScale(init=512.0))
    half[1].load_checkpoint(tmp_path)
    assert half[1].metrics()["loss_scale"] == 512


# ---- ranks -------------------------------------------------------------------------------------------
def run_chain(case: tuple[str, str, int, int]) -> tuple[list[str], list[float]]:
    """Load (unless it is the first link), compare with what was saved, train, save: on every rank."""
    setting, folder, start, stop = case
    root = Path(folder)
    with tempfile.TemporaryDirectory() as drive, small_chunks():
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
        found += [name for name in state if name in dict(run[0].named_parameters()) and not torch.equal(weights[name], state[name])]
        some, is_first = run[1].consolidated_state_dict(names=["norm.bias"], rank0_only=True), not dist.is_initialized() or dist.get_rank() == 0
        found += [] if sorted(some) == ["norm.bias", "seen"] * is_first else [f"the first rank has {sorted(some)} alone"]
        if is_first:
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


def failing(owner: Any, name: str, at: int, error: BaseException) -> Any:
    """On the second rank, call number ``at`` fails."""
    calls, real = itertools.count(1), getattr(owner, name)

    def call(*args: Any, **options: Any) -> Any:
        if next(calls) == at and dist.get_rank() == 1:
            raise error
        return real(*args, **options)

    return mock.patch.object(owner, name, call)


def run_failures(folder: str) -> None:
    """What each rank says of faults of one of them, after each of which all go on together."""
    root, rank, broken = Path(folder), dist.get_rank(), OSError(5, "the drive of the second rank")
    heard = "failed elsewhere: on rank 1, " * (rank == 0) + re.escape("OSError: [Errno 5] the drive of the second rank")
    with small_chunks():
        run = make("3-nvme", root, **EXACT)
        train(*run, 0, 1)
        run[1].save_checkpoint(root / "good", scheduler=run[2])
        losses, want = train(*run, 1, 2), snapshot(*run[:2])
        run[1].save_checkpoint(root / "other", scheduler=run[2], extra=1)
        shutil.copytree(root / "other" / "step-00000002", root / "other" / "step-00000001", dirs_exist_ok=True) if rank == 0 else None
        dist.barrier()
        saves, loads = functools.partial(run[1].save_checkpoint, root / "full"), functools.partial(run[1].load_checkpoint, scheduler=run[2])
        faults: tuple[tuple[str, Callable[[], object], Any], ...] = (
            ("step-00000002 " * (rank == 0) + heard, saves, failing(files, "reserve", 1, broken)),
            (heard, saves, failing(save, "write_durably", 1, broken)),
            (heard, lambda: (saves(async_save=True), run[1].synchronize()), failing(files, "reserve", 1, broken)),
            ("TypeError", lambda: saves(extra=object() if rank else 0), contextlib.nullcontext()),
            ("CheckpointError: .*manifest.json is missing", lambda: loads(root / ("full" if rank else "good")), contextlib.nullcontext()),
            ("^CheckpointError: .*its checksum is", lambda: loads(root / ("other" if rank else "good")), contextlib.nullcontext()),
        )
        for words, call, fault in faults:
            with fault:
                said = error_of(call)
            assert re.search(words, said) and differ(snapshot(*run[:2]), want) == there(root / "full") == [], said
        with failing(files.Tensors, "elements", 5, broken):
            assert re.search(heard, error_of(lambda: loads(root / "good")))
        for use in (lambda: loss_of(run[0], batch(0)), run[1].step, run[1].consolidated_state_dict, saves):
            assert re.search(r"load_checkpoint\(.*was interrupted \(.*makes all of it whole again", error_of(use))
        loads(root / "good")
        assert train(*run, 1, 2) == losses and differ(snapshot(*run[:2]), want) == []


def test_what_fails_on_one_rank_is_heard_by_name_on_all(tmp_path: Path) -> None:
    assert run_world(2, run_failures, [str(tmp_path)], timeout=60) == [[None, None]]


# ---- in the background -------------------------------------------------------------------------------
@contextlib.contextmanager
def held_back(go_on: threading.Event) -> Iterator[None]:
    """A save writes nothing before the event."""
    write = save.write_file

    def slow(values: Any) -> Iterator[Any]:
        assert go_on.wait(60), "no update came"
        yield from values

    with mock.patch.object(save, "write_file", lambda path, entries, values, metadata: write(path, entries, slow(values), metadata)):
        yield


@contextlib.contextmanager
def overtaken(room: int) -> Iterator[None]:
    """A save writes nothing before an update has come to a chunk that is still to be read."""
    go_on, before_change = threading.Event(), save.Beside.before_change

    def change(self: save.Beside, *about: Any) -> None:
        if self.unread:
            threading.Timer(0.02, go_on.set).start()
        before_change(self, *about)

    memory = mock.patch.object(save, "host_memory", lambda: (0, 4 * room))
    with held_back(go_on), mock.patch.object(save.Beside, "before_change", change), memory:
        yield


@pytest.mark.parametrize(("setting", "name"), (("2-host", "head.weight"), ("3-host", "tokens.weight")), ids=("trained", "frozen"))
def test_what_users_write_while_a_save_goes_on_is_an_error_and_not_saved(setting: str, name: str, tmp_path: Path) -> None:
    run = make(setting, tmp_path)
    train(*run, 0, 1)
    param, go_on = run[0].get_parameter(name), threading.Event()
    with held_back(go_on):
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


def test_a_full_drive_is_an_error_and_training_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = make("3-host", tmp_path)
    losses = train(*run, 0, 2)
    old = run[1].save_checkpoint(tmp_path / "saved")
    with mock.patch.object(files, "reserve", side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "drive")):
        run[1].save_checkpoint(tmp_path / "saved", async_save=True)
        with pytest.raises(OSError, match="No space"):
            run[1].synchronize()
        losses += train(*run, 2, 3)
        assert [record for record in caplog.records if "was not saved" in record.message]
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


# ---- what is not whole -------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("saved")
    run = make("3-host", root)
    train(*run, 0, 2)
    folder: Path = run[1].save_checkpoint(root)
    kinds = {name.split("/")[0] for name in load_file(folder / FILES[2])}  # plain safetensors
    assert {"master", "exp_avg", "exp_avg_sq"} <= kinds, kinds
    return folder


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


OTHERS: list[tuple[dict[str, Any], str]] = [
    ({"kind": torch.optim.SGD}, "has .'master', 'exp_avg', 'exp_avg_sq'. of .* and this optimizer keeps .'master'.: make the same kind"),
    ({"inner": {"amsgrad": True}}, "and this optimizer keeps .'master', 'exp_avg', 'exp_avg_sq', 'max_exp_avg_sq'.: make the same kind"),
    ({"variant": "tied"}, "head.weight|not in this model|parameter groups"),
    ({"layers": 3}, r"blocks\.2.* as nothing"),
    ({"groups": 1}, "other parameter groups"),
    ({"scheduler": 1}, "was saved with scheduler=None, and scheduler=SequentialLR was given"),
    ({"buffer": 4}, r"other buffers than this model, or of other shapes: .'seen'"),
]


@pytest.mark.parametrize(("options", "match"), OTHERS, ids=str)
def test_another_model_or_optimizer_is_refused(options: dict[str, Any], match: str, saved: Path, tmp_path: Path) -> None:
    model, optimizer, scheduler = make("2-host", tmp_path, **{name: value for name, value in options.items() if name != "scheduler"})
    before = snapshot(model, optimizer)
    with pytest.raises(CheckpointError, match=match):
        optimizer.load_checkpoint(saved, scheduler=scheduler if "scheduler" in options else None)
    assert differ(snapshot(model, optimizer), before) == []


def test_wrong_arguments_are_refused_before_anything_is_made_and_each_loader_names_the_other_one(saved: Path, victim: Made, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="keep must be"):
        victim[1].save_checkpoint(tmp_path / "new", keep=0)
    with pytest.raises(TypeError, match=r"extra\['loader'\] is a object"):
        victim[1].save_checkpoint(tmp_path / "new", extra={"loader": object()})
    assert not (tmp_path / "new").exists()
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"has no checkpoint.*neither manifest.json nor .*zk.load_pretrained reads weights"):
        victim[1].load_checkpoint(tmp_path)
    for path in (saved, saved.parent):
        with pytest.raises(FileNotFoundError, match=r"no folder with model.safetensors"):
            zk.load_pretrained(victim[0], path)
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        victim[1].save_checkpoint(tmp_path / "file" / "saved")


@pytest.mark.parametrize("setting", ("3-host", "3-nvme", "2-host"))
def test_a_step_that_failed_half_way_is_not_trained_on_or_saved_and_a_load_mends_it(setting: str, tmp_path: Path) -> None:
    made = make(setting, tmp_path)
    train(*made, 0, 2)
    made[1].save_checkpoint(tmp_path / "saved", scheduler=made[2])
    states, weights = copy.deepcopy(made[1].state_dict()), copy.deepcopy(made[0].state_dict())
    want = train(*made, 2, 4)
    fails = mock.Mock(side_effect=[None, ArithmeticError("broken")])
    with mock.patch.object(AdamRule, "update", fails), pytest.raises((ArithmeticError, RuntimeError), match="broken"):
        train(*made, 4, 5)  # overlapped, whoever waits for the update hears of it
        made[1].synchronize()
    for beside in (False, True):
        with pytest.raises((RuntimeError, ArithmeticError), match=r"half-way|broken"):
            made[1].save_checkpoint(tmp_path / "saved", async_save=beside)
    assert there(tmp_path / "saved") == ["latest", "step-00000002"]
    for use in (lambda: loss_of(made[0], batch(0)), made[1].step, made[1].state_dict):
        with pytest.raises(RuntimeError, match="a step failed half-way"):
            use()
    made[1].load_state_dict(states)  # the user's states mend it too
    made[0].load_state_dict(weights)
    train(*made, 2, 3)
    made[1].load_checkpoint(tmp_path / "saved", scheduler=made[2])
    assert train(*made, 2, 4) == want
    made[1].save_checkpoint(tmp_path / "saved", async_save=True)
    made[1].close()
    assert there(tmp_path / "saved") == ["latest", "step-00000002", "step-00000004"]


def test_a_rank_that_is_gone_is_no_damage(saved: Path, victim: Made) -> None:
    with mock.patch.object(victim[1]._layout.comm, "words", side_effect=dist.DistError("gone")), pytest.raises(dist.DistError, match="gone"):
        victim[1].load_checkpoint(saved)


def test_a_rank_that_loses_the_others_leaves_what_the_first_one_may_be_publishing(tmp_path: Path) -> None:
    made, partial = make("2-host", tmp_path), tmp_path / ".partial"
    partial.mkdir()
    is_lost = [contextlib.nullcontext(), contextlib.nullcontext(), ConnectionError]
    comm: Any = mock.Mock(rank=1, size=2, words=lambda *_: [partial.name], together=mock.Mock(side_effect=is_lost))
    with pytest.raises(ConnectionError):
        save.Save(made[1], tmp_path / "step-1", {}, None).run(mock.Mock(), comm)
    assert "rank-00000-of-00002.json" in os.listdir(partial)  # by its number in the group, which is one process here


def test_killed_at_any_moment_the_newest_whole_checkpoint_resumes_bit_for_bit(tmp_path: Path) -> None:
    for ranks, name in ((1, "alone"), (2, "ranks")):  # `make soak` kills 50 times, and one of two ranks as often
        (tmp_path / name).mkdir()
        assert soak(4 - ranks, 0, list(SETTINGS)[-3:], tmp_path / name, ranks=ranks) >= 3


# ---- 0.1.0, tiles, orders ---------------------------------------------------------------------

FIXTURE = Path(__file__).parent / "checkpoint_of_0_1_0"


def tiled(nbytes: int, memory_format: torch.memory_format = torch.channels_last) -> tuple[nn.Module, Any]:
    """A layer that may be in tiles, one in channels_last, a frozen one in bf16."""
    torch.manual_seed(0)
    layers = (nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(16, 12), nn.Linear(12, 3))
    model = nn.Sequential(*layers).to(memory_format=memory_format)  # type: ignore[call-overload]
    model[3].requires_grad_(False)
    zk.tile_linears(model, nbytes)
    inner = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    return model, zk.ZeroOptimizer(model, inner, stage=3, dtype="bf16")


@pytest.mark.parametrize(("nbytes", "others"), ((9999, (200,)), (200, (9999, 300))), ids=("whole", "tiles"))
def test_a_checkpoint_of_0_1_0_loads_from_its_files_and_into_other_tiles_and_orders(nbytes: int, others: tuple[int, ...], tmp_path: Path) -> None:
    model, optimizer = tiled(nbytes)
    extra = optimizer.load_checkpoint(FIXTURE)
    assert len(extra["losses"]) == 2 and optimizer.num_steps == 2
    weights = optimizer.consolidated_state_dict("fp32")
    (file,) = export(FIXTURE, tmp_path / "out", torch.float32).files
    assert differ(load_file(file), weights) == []
    states, folder = optimizer.state_dict(), optimizer.save_checkpoint(tmp_path)
    assert [descend(optimizer, model(torch.ones(2, 2, 4, 4)).float().square().mean()) for _ in range(2)] == torch.load(FIXTURE / "losses.pt")
    for other, memory_format in ((nbytes, torch.contiguous_format), *((other, torch.channels_last) for other in others)):
        model, optimizer = tiled(other, memory_format)
        assert optimizer.load_checkpoint(folder) is None
        folder = optimizer.save_checkpoint(tmp_path / f"{other} {memory_format}")
        assert differ(optimizer.consolidated_state_dict("fp32"), weights) == []
        with zk.gather(model[0].weight):
            assert model[0].weight.is_contiguous(memory_format=memory_format)
        if other == nbytes:
            assert differ(optimizer.state_dict()["state"][0], states["state"][0]) == []  # that of channels_last
            optimizer.load_state_dict(states)
            assert differ(optimizer.consolidated_state_dict("fp32"), weights) == []
