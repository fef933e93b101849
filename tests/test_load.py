"""Loading a checkpoint is all or nothing: what is wrong is found before a byte changes, and what was interrupted is refused until it is whole."""

from __future__ import annotations

import contextlib
import copy
import json
import math
import os
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zk
from tests.models import GPT, batch, loss_of, train
from tests.world import call, run_world
from zk.checkpoint import files, folders
from zk.checkpoint.files import CheckpointError, Written
from zk.core.store import UnitStore
from zk.offload import nvme, spill

STEP = "step-00000002"


class Net(GPT):
    """With a buffer that every forward changes."""

    def __init__(self, length: int = 3) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(length))

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        self.seen += 1
        return super().forward(*args, **kwargs)


def made(length: int = 3, seed: int = 0, optimizer: dict[str, Any] | None = None, **options: Any) -> tuple[nn.Module, zk.ZeroOptimizer]:
    torch.manual_seed(seed)
    model = Net(length)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2, **(optimizer or {}))
    return model, zk.ZeroOptimizer(model, inner, **{"stage": 2, "dtype": "bf16", "optimizer_tier": "host", **options})


def scheduler_of(optimizer: zk.ZeroOptimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, 10)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint of two steps, with a scheduler."""
    root = tmp_path_factory.mktemp("saved")
    model, optimizer = made()
    train(model, optimizer, steps=2)
    optimizer.save_checkpoint(root, scheduler=scheduler_of(optimizer), extra={"position": 7})
    optimizer.close()
    return root


@pytest.fixture
def copied(saved: Path, tmp_path: Path) -> Path:
    """A copy to spoil: its folder of the step."""
    for name in ("latest", *(f"{STEP}/{path.name}" for path in (saved / STEP).iterdir())):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes((saved / name).read_bytes())
    return tmp_path / STEP


def everything(model: nn.Module, optimizer: zk.ZeroOptimizer) -> list[Any]:
    """What a load may change, in copies."""
    state = optimizer.state_dict()
    tensors = [value.clone() for values in state["state"].values() for value in values.values() if isinstance(value, Tensor)]
    options = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    weights = [value.clone() for value in model.state_dict().values()]
    return [weights, tensors, options, copy.deepcopy(state["zk"]), torch.get_rng_state(), random.getstate()]


def same(before: Any, after: Any) -> bool:
    if isinstance(before, Tensor):
        return torch.equal(before, after)
    if isinstance(before, (list, tuple)):
        return len(before) == len(after) and all(map(same, before, after))
    return bool(before == after)


def refused(model: nn.Module, optimizer: zk.ZeroOptimizer, folder: Path, pattern: str = "", **options: Any) -> None:
    """Loading raises a CheckpointError, within seconds, and nothing has changed."""
    before = everything(model, optimizer)
    signal.alarm(30)  # what waits for good ends the tests
    try:
        with pytest.raises(CheckpointError, match=pattern):
            optimizer.load_checkpoint(folder, **options)
    finally:
        signal.alarm(0)
    assert same(before, everything(model, optimizer))


def reseal(folder: Path, change: Callable[[dict[str, Any], list[dict[str, Any]]], None]) -> None:
    """Change the manifest and what ranks say, and have all checksums be those of what is there then."""
    head = json.loads((folder / "manifest.json").read_text())
    head.pop("crc32")
    names = [part["name"] for part in head["parts"]]
    said = [json.loads((folder / name).read_text()) for name in names]
    change(head, said)
    for part, name, words in zip(head.get("parts") or [], names, said, strict=False):
        (folder / name).write_text(json.dumps(words))
        part.update(Written.of_bytes(name, (folder / name).read_bytes()).as_json() | {"name": part.get("name")})
    (folder / "manifest.json").write_bytes(folders.sealed(head))


# ---- found before a byte changes -----------------------------------------------------------------------------------------------------

SPOILED: dict[str, tuple[Callable[[dict[str, Any], list[dict[str, Any]]], Any], str]] = {
    "lr_is_text": (lambda head, said: head["groups"][0].update(lr="0.1"), r"'lr' of param_groups\[0\] is '0\.1'"),
    "betas_are_a_number": (lambda head, said: head["groups"][0].update(betas=0.9), "damaged|of another type"),
    "scale_is_text": (lambda head, said: head["loss_scale"].update(scale="big"), "'scale' is 'big'"),
    "steps_are_text": (lambda head, said: head["counters"].update(steps="two"), "'steps' is 'two'"),
    "amsgrad": (lambda head, said: head["groups"][0].update(amsgrad=True), "same amsgrad"),
    "a_piece_is_longer": (lambda head, said: said[0]["pieces"][0].__setitem__(3, said[0]["pieces"][0][3] + 8), "elements 0 to"),
    "a_piece_has_no_tensor": (lambda head, said: said[0]["pieces"][0].__setitem__(4, "master/9/9"), "has nothing of that name"),
    "a_piece_of_no_unit": (lambda head, said: said[0]["pieces"][0].__setitem__(0, 99), "is not there|of unit 99"),
    "a_file_elsewhere": (lambda head, said: head["files"][0].update(name="../../outside"), "'../../outside', which is not in its folder"),
    "a_rank_elsewhere": (lambda head, said: said[0].update(file="../../outside"), "'../../outside', which is not in its folder"),
    "a_part_elsewhere": (lambda head, said: head["parts"][0].update(name="/etc/hostname"), "'/etc/hostname', which is not in its folder"),
    "a_buffer_is_missing": (lambda head, said: said[0].update(buffers=[]), "has the buffers"),
}


@pytest.mark.parametrize("name", SPOILED)
def test_what_a_manifest_says_wrongly_is_found_before_anything_changes(name: str, copied: Path) -> None:
    change, pattern = SPOILED[name]
    reseal(copied, change)
    model, optimizer = made(seed=1)
    train(model, optimizer, steps=1)
    refused(model, optimizer, copied.parent, pattern, scheduler=scheduler_of(optimizer))
    optimizer.close()


def paths_in(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Places in nested dicts and lists, the first two of each list."""
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value[:2]) if isinstance(value, list) else ()
    for key, item in items:
        yield from paths_in(item, (*path, key))


def test_any_entry_that_is_missing_or_of_another_kind_is_a_checkpoint_error_or_does_no_harm(copied: Path) -> None:
    """Each place of the manifest, and of what a rank says, taken away or replaced: nothing but a CheckpointError, or a whole load."""
    originals = {path: path.read_bytes() for path in copied.iterdir()}
    head = json.loads(originals[copied / "manifest.json"])
    said = json.loads(originals[copied / head["parts"][0]["name"]])
    model, optimizer = made(seed=1)
    scheduler = scheduler_of(optimizer)
    train(model, optimizer, steps=1)
    before = everything(model, optimizer)
    draw, tried = random.Random(0), 0
    places = [(0, path) for path in paths_in(head)] + [(1, path) for path in paths_in(said) if path[0] != "random" or len(path) < 3]
    for which, path in draw.sample(places, 120):
        spoil = draw.choice((None, "text", -3, [], {}, [None], "take away"))

        def change(
            head: dict[str, Any], said: list[dict[str, Any]], which: int = which, path: tuple[Any, ...] = path, spoil: Any = spoil
        ) -> None:
            place: Any = (head, said[0])[which]
            for key in path[:-1]:
                place = place[key]
            if spoil == "take away":
                del place[path[-1]]
            else:
                place[path[-1]] = spoil

        if path[0] in ("extra", "parts", "crc32", "scheduler") and which == 0:
            continue
        for file, data in originals.items():
            file.write_bytes(data)
        reseal(copied, change)
        tried += 1
        try:
            optimizer.load_checkpoint(copied, scheduler=scheduler)
        except CheckpointError:
            assert same(before, everything(model, optimizer)), (path, spoil)
        else:  # an entry that decides nothing: its loss is no harm
            assert not optimizer.integrity.interrupted
            for file, data in originals.items():
                file.write_bytes(data)
            optimizer.load_checkpoint(copied, scheduler=scheduler)
            before = everything(model, optimizer)
    assert tried > 80
    optimizer.close()


@pytest.mark.parametrize("name", ("manifest.json", "rank-00000-of-00001.json", "rank-00000-of-00001.safetensors"))
def test_a_pipe_in_place_of_a_file_is_refused_and_not_waited_for(name: str, copied: Path) -> None:
    (copied / name).unlink()
    os.mkfifo(copied / name)
    model, optimizer = made(seed=1)
    refused(model, optimizer, copied, "no regular file", scheduler=scheduler_of(optimizer))
    optimizer.close()


def test_a_pipe_in_place_of_latest_is_passed_over(copied: Path) -> None:
    (copied.parent / "latest").unlink()
    os.mkfifo(copied.parent / "latest")
    _, optimizer = made(seed=1)
    assert optimizer.load_checkpoint(copied.parent, scheduler=scheduler_of(optimizer)) == {"position": 7}
    optimizer.close()


def test_buffers_and_schedulers_of_another_kind_are_refused(saved: Path) -> None:
    model, optimizer = made(length=4, seed=1)
    refused(model, optimizer, saved, r"buffer 'seen' is torch.float32 \(3,\), and torch.float32 \(4,\)", scheduler=scheduler_of(optimizer))
    optimizer.close()
    model, optimizer = made(seed=1)
    model.seen = model.seen.long()
    refused(model, optimizer, saved, "buffer 'seen' is torch.float32", scheduler=scheduler_of(optimizer))
    other = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    model.seen = model.seen.float()
    refused(model, optimizer, saved, "the state of a StepLR, another kind of scheduler than CosineAnnealingLR", scheduler=other)
    optimizer.close()


def ask(optimizer: zk.ZeroOptimizer, folder: Path, asks: bool) -> None:
    """Load what is not there, if that is asked for."""
    if asks:
        with pytest.raises(CheckpointError, match="has no checkpoint"):
            optimizer.load_checkpoint(folder)


@pytest.mark.parametrize("options", ({}, {"delay_update": 0}), ids=("at once", "delayed"))
def test_what_is_refused_leaves_gradients_states_and_delayed_updates(options: dict[str, Any], tmp_path: Path) -> None:
    found = []
    for asks in (False, True):
        model, optimizer = made(**options)
        train(model, optimizer, steps=2)
        ask(optimizer, tmp_path, asks)  # the second update may not have counted yet
        optimizer.synchronize()
        next(iter(optimizer.state.values()))["exp_avg"].zero_()
        ask(optimizer, tmp_path, asks)
        optimizer.backward(loss_of(model, batch(2)))
        ask(optimizer, tmp_path, asks)
        optimizer.step()
        found.append(everything(model, optimizer)[:2])
        optimizer.close()
    assert same(*found)


def test_a_state_of_amsgrad_is_refused_by_an_optimizer_without(saved: Path, tmp_path: Path) -> None:
    model, optimizer = made(optimizer={"amsgrad": True})
    train(model, optimizer, steps=2)
    optimizer.save_checkpoint(tmp_path)
    refused(*made(seed=1), tmp_path, "max_exp_avg_sq.* those of this optimizer exp_avg, exp_avg_sq; make it with the same amsgrad")
    refused(model, optimizer, saved, "'max_exp_avg_sq' of parameter .* is not there", scheduler=scheduler_of(optimizer))
    optimizer.close()


# ---- interrupted ---------------------------------------------------------------------------------------------------------------------


def is_refused(model: nn.Module, optimizer: zk.ZeroOptimizer, folder: Path, why: str) -> None:
    """Nothing uses a mixture: it says what happened, and what mends it."""
    uses: tuple[Callable[[], object], ...] = (
        lambda: loss_of(model, batch(0)),
        optimizer.step,
        lambda: optimizer.save_checkpoint(folder / "mixed", keep=1),
        optimizer.consolidated_state_dict,
    )
    for use in uses:
        with pytest.raises(RuntimeError, match=rf"(?s)load_checkpoint\(.*was interrupted \(.*{why}.*load_checkpoint\(\) makes all of it whole again"):
            use()
    assert not (folder / "mixed").exists()


class Failing:
    """Raises ``error`` in the call number ``at``, once."""

    def __init__(self, function: Callable[..., Any], at: int, error: BaseException) -> None:
        self.function, self.left, self.error = function, at, error

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.left -= 1
        if self.left == 0:
            raise self.error
        return self.function(*args, **kwargs)

    def __get__(self, instance: Any, owner: Any) -> Any:
        return (lambda *args, **kwargs: self(instance, *args, **kwargs)) if instance is not None else self


ENDINGS = (OSError(5, "Input/output error"), KeyboardInterrupt("now"), MemoryError("no room"))


@pytest.mark.parametrize("error", ENDINGS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("options", ({}, {"stage": 3, "param_tier": "nvme", "optimizer_tier": "nvme"}), ids=("host", "nvme"))
def test_what_was_interrupted_is_refused_until_it_is_loaded_whole(
    options: dict[str, Any], error: BaseException, saved: Path, tmp_path: Path
) -> None:
    if "param_tier" in options:
        options = {**options, "nvme_path": tmp_path / "drive"}
        (tmp_path / "drive").mkdir()
    with mock.patch.object(spill, "CHUNK_NUMEL", 2048):
        model, optimizer = made(**options)
        scheduler = scheduler_of(optimizer)
        train(model, optimizer, steps=2)
        want = train(model, optimizer, start=2, steps=2)
        for at in (1, 7):
            with mock.patch.object(files.Reader, "read", Failing(files.Reader.read, at, error)), pytest.raises(type(error)):
                optimizer.load_checkpoint(saved, scheduler=scheduler)
            is_refused(model, optimizer, tmp_path, type(error).__name__)
        assert optimizer.load_checkpoint(saved, scheduler=scheduler) == {"position": 7}
        assert train(model, optimizer, start=2, steps=2) == want
        optimizer.close()


@pytest.mark.parametrize("at", (1, 2, 5))
def test_a_drive_that_fails_once_while_a_checkpoint_is_loaded_takes_the_next_try(at: int, saved: Path, tmp_path: Path) -> None:
    with mock.patch.object(spill, "CHUNK_NUMEL", 2048):
        model, optimizer = made(stage=3, param_tier="nvme", optimizer_tier="nvme", nvme_path=tmp_path, seed=1)
        scheduler = scheduler_of(optimizer)
        fails = Failing(nvme.SYSTEM.pwritev, at, OSError(5, "Input/output error"))
        with mock.patch.object(nvme.SYSTEM, "pwritev", fails), pytest.raises(OSError, match="Input/output error"):
            optimizer.load_checkpoint(saved, scheduler=scheduler)
            optimizer.synchronize()
            train(model, optimizer, steps=2)  # what the drive refused last is heard of when somebody needs it
        optimizer.load_checkpoint(saved, scheduler=scheduler)
        plain, theirs = made()
        train(plain, theirs, steps=2)
        assert train(model, optimizer, start=2, steps=3) == train(plain, theirs, start=2, steps=3)
        optimizer.close()


# ---- over ranks ----------------------------------------------------------------------------------------------------------------------


def said_by(call: Callable[[], object]) -> str:
    try:
        call()
    except (Exception, KeyboardInterrupt) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def on_ranks(folder: str) -> dict[str, Any]:
    """One rank fails, or is given something else: all hear of it."""
    root, rank, found = Path(folder), dist.get_rank(), {}
    model, optimizer = made(stage=2)
    losses = train(model, optimizer, steps=2)
    for step in range(2):
        optimizer.save_checkpoint(root / "saved")
        train(model, optimizer, start=2 + step, steps=1)
    before = everything(model, optimizer)
    first = root / "saved" / STEP
    found["other folders"] = said_by(lambda: optimizer.load_checkpoint(first if rank else root / "saved"))
    found["a folder that is not there"] = said_by(lambda: optimizer.load_checkpoint(root / "nothing" if rank else root / "saved"))
    assert same(before, everything(model, optimizer)), "nothing has changed"
    error = OSError(5, "the drive of the second rank")
    with mock.patch.object(files.Reader, "read", Failing(files.Reader.read, 5 if rank else 10**9, error)):
        found["reading"] = said_by(lambda: optimizer.load_checkpoint(root / "saved"))
    found["step"] = said_by(optimizer.step)
    optimizer.load_checkpoint(first)
    found["again"] = [math.isfinite(loss) for loss in train(model, optimizer, start=2, steps=1)]
    assert losses
    broken = optimizer.state_dict()
    if rank:
        broken["param_groups"] = broken["param_groups"] * 2
    found["state"] = said_by(lambda: optimizer.load_state_dict(broken))
    optimizer.close()
    return found


def deep(folder: str) -> dict[str, str]:
    """One rank fails where others are in a collective, or before it comes to one: all hear of it, and can go on together."""
    root, rank, found = Path(folder), dist.get_rank(), {}
    model, optimizer = made(stage=2)
    train(model, optimizer, steps=2)
    optimizer.save_checkpoint(root / "saved")
    want = [value.clone() for value in model.state_dict().values()]

    def tried(what: str, call: Callable[[], object], *patches: Any) -> None:
        with contextlib.ExitStack() as stack:
            for patch in patches if rank else ():
                stack.enter_context(patch)
            found[what] = said_by(call)
        optimizer.load_checkpoint(root / "saved")
        assert same(want, list(model.state_dict().values())), what

    def load() -> None:
        optimizer.load_checkpoint(root / "saved")

    for number, error in enumerate((OSError(5, "the drive of the second rank"), KeyboardInterrupt("of the second rank"))):
        tried(f"publishing {number}", load, mock.patch.object(UnitStore, "republish", Failing(UnitStore.republish, 2, error)))
    tried("extra", lambda: optimizer.save_checkpoint(root / "other", extra=object() if rank else None))
    tried("extra beside", lambda: optimizer.save_checkpoint(root / "other", extra=object() if rank else None, async_save=True))
    if rank:
        optimizer.integrity.tear(ArithmeticError("of the second rank"))
    tried("a torn step", optimizer.step if rank else lambda: train(model, optimizer, steps=2))
    state = optimizer.state_dict()
    if rank:
        state["state"][0]["step"] = "two"
    tried("state", lambda: optimizer.load_state_dict(state))
    weights = root / f"weights-{rank}.safetensors"
    safetensors.torch.save_file({name: value.clone() for name, value in optimizer.consolidated_state_dict().items()}, weights)
    if rank:
        weights.write_bytes(weights.read_bytes()[:-100])
    tried("pretrained", lambda: zk.load_pretrained(model, weights))
    optimizer.close()
    return found


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, list[Any]]:
    """What each of two ranks says of what fails on one of them, one after the other in one world."""
    jobs = [(job, str(tmp_path_factory.mktemp("ranks"))) for job in (deep, drive_of_a_rank, on_ranks)]
    return dict(zip((deep, drive_of_a_rank, on_ranks), run_world(2, call, jobs, timeout=60), strict=True))


def test_ranks_go_on_together_after_one_of_them_has_failed_anywhere(two_ranks: dict[Any, list[Any]]) -> None:
    ours, theirs = two_ranks[deep]
    assert "rank 1 failed: OSError: [Errno 5] the drive of the second rank" in ours["publishing 0"] and "OSError" in theirs["publishing 0"]
    assert "rank 1 failed: KeyboardInterrupt" in ours["publishing 1"]
    assert "rank 1 failed: RuntimeError: an earlier step() ended half-way (ArithmeticError: of the second rank)" in ours["a torn step"]
    for what, kind in (("extra", "TypeError"), ("extra beside", "TypeError"), ("state", "ValueError"), ("pretrained", "")):
        assert "on rank 1" in ours[what] and kind in ours[what] and theirs[what].startswith(kind or "ValueError"), (what, ours[what], theirs[what])


def drive_of_a_rank(folder: str) -> list[str]:
    """The drive of the second rank refuses all that is written to it while a checkpoint is loaded; then it is well again."""
    root, rank = Path(folder), dist.get_rank()
    with mock.patch.object(spill, "CHUNK_NUMEL", 2048):
        model, optimizer = made(stage=3, param_tier="nvme", optimizer_tier="nvme", nvme_path=root)
        train(model, optimizer, steps=2)
        optimizer.save_checkpoint(root / "saved")
        want = train(model, optimizer, start=2, steps=2)

        def refuses(*_: Any) -> int:
            raise OSError(5, "Input/output error")

        with mock.patch.object(nvme.SYSTEM, "pwritev", refuses) if rank else contextlib.nullcontext():
            found = [said_by(lambda: optimizer.load_checkpoint(root / "saved"))]
        found.append(said_by(lambda: loss_of(model, batch(0))))
        for _ in range(3):  # what could not be written is heard of once more, at most
            said = said_by(lambda: optimizer.load_checkpoint(root / "saved"))
            if not said:
                break
        assert not said and train(model, optimizer, start=2, steps=2) == want
        optimizer.close()
    return found


def test_a_load_has_not_come_to_its_end_before_the_drive_has_taken_it(two_ranks: dict[Any, list[Any]]) -> None:
    for found in two_ranks[drive_of_a_rank]:
        assert "Input/output error" in found[0] and "the model's forward is refused" in found[1], found


def test_weights_reach_all_optimizers_that_hold_parts_of_a_model(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    wanted = {name: torch.randn_like(value) for name, value in model.state_dict().items()}
    safetensors.torch.save_file(wanted, tmp_path / "model.safetensors")
    optimizers = [zk.ZeroOptimizer(part, torch.optim.AdamW(part.parameters()), stage=2, dtype="bf16", optimizer_tier="host") for part in model]
    zk.load_pretrained(model, tmp_path)
    for number, optimizer in enumerate(optimizers):
        for name, value in optimizer.consolidated_state_dict("fp32").items():
            assert torch.equal(value, wanted[f"{number}.{name}"]), "the master has it, in full precision"
        optimizer.close()


class OfOnesOwn(torch.optim.lr_scheduler.LRScheduler):
    """A scheduler with a state that is there only after a while."""

    def get_lr(self) -> list[float]:
        return [group["lr"] for group in self.optimizer.param_groups]

    def step(self, loss: float | None = None) -> None:  # type: ignore[override]
        if loss is not None:
            self.best = loss
        super().step()


def test_a_scheduler_of_the_same_kind_goes_on_whatever_its_state_has(tmp_path: Path) -> None:
    _, optimizer = made()
    scheduler = OfOnesOwn(optimizer)
    optimizer.inners[0]._opt_called = True  # type: ignore[attr-defined]
    scheduler.step(0.25)
    optimizer.save_checkpoint(tmp_path, scheduler=scheduler)
    fresh = OfOnesOwn(optimizer)
    optimizer.load_checkpoint(tmp_path, scheduler=fresh)
    assert fresh.best == 0.25
    optimizer.close()


WRONG_STATES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no_loss_scale": lambda state: state["zk"].pop("loss_scale"),
    "no_counters": lambda state: state["zk"].pop("counters"),
    "zk_is_none": lambda state: state.update(zk=None),
    "counters_are_text": lambda state: state["zk"]["counters"].update(steps="two"),
    "scale_is_text": lambda state: state["zk"]["loss_scale"].update(scale="big"),
    "lr_is_none": lambda state: state["param_groups"][0].update(lr=None),
    "lr_is_text": lambda state: state["param_groups"][0].update(lr="0.1"),
    "betas_are_a_number": lambda state: state["param_groups"][0].update(betas=0.9),
    "step_is_text": lambda state: state["state"][0].update(step="two"),
    "step_is_negative": lambda state: state["state"][0].update(step=-3),
    "step_is_not_a_number": lambda state: state["state"][0].update(step=math.nan),
    "moments_are_nowhere": lambda state: state["state"][1].update(exp_avg=torch.empty_like(state["state"][1]["exp_avg"], device="meta")),
    "moments_are_complex": lambda state: state["state"][1].update(exp_avg=state["state"][1]["exp_avg"].to(torch.complex64)),
}


@pytest.mark.parametrize("name", WRONG_STATES)
def test_a_state_that_is_wrong_is_found_before_anything_changes(name: str) -> None:
    model, optimizer = made()
    train(model, optimizer, steps=2)
    state = copy.deepcopy(optimizer.state_dict())
    WRONG_STATES[name](state)
    before = everything(model, optimizer)
    with pytest.raises(ValueError, match=r"\S"):
        optimizer.load_state_dict(state)
    assert same(before, everything(model, optimizer)) and not optimizer.integrity.interrupted
    train(model, optimizer, steps=2)
    optimizer.close()


def test_what_fails_on_one_rank_is_heard_by_name_on_all(two_ranks: dict[Any, list[Any]]) -> None:
    ours, theirs = two_ranks[on_ranks]
    for found in (ours, theirs):
        assert "is another checkpoint on rank 1 than on rank 0" in found["other folders"]
        assert found["a folder that is not there"].startswith("CheckpointError") and "nothing" in found["a folder that is not there"]
        assert found["reading"].startswith("OSError") and "the drive of the second rank" in found["reading"]
        assert "was interrupted" in found["step"] and "the drive of the second rank" in found["step"]
        assert found["again"] == [True]
        assert "groups" in found["state"]
    assert "on rank 1" in ours["reading"] and "on rank 1" in ours["state"]


def test_a_state_that_was_loaded_stays_as_it_was() -> None:
    """A scheduler writes to a learning rate that is a tensor."""
    model = nn.Linear(2, 2)
    with zk.ZeroOptimizer(model, torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.5))) as optimizer:
        state = copy.deepcopy(optimizer.state_dict())
        for _ in range(2):
            optimizer.load_state_dict(state)
            assert optimizer.param_groups[0]["lr"] == 0.5
            optimizer.param_groups[0]["lr"].mul_(0.1)
