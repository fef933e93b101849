"""What DeepSpeed saved goes on in zk, bit for bit; what is not whole, or not data, is refused. Fixtures: tests/data/deepspeed/make.py."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import struct
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor, nn
from typer.testing import CliRunner

import zk
from tests.data.deepspeed.make import CASES, HERE, Tiny, adamw_of, batch, loss_of
from tests.test_checkpoint import snapshot
from tests.world import run_world
from zk.checkpoint import deepspeed
from zk.checkpoint.deepspeed import import_deepspeed
from zk.checkpoint.files import CheckpointError, Writer
from zk.core.precision import LossScaler
from zk.offload import nvme
from zk.tools.cli import app

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def dtype_of(name: str) -> str:
    return name.split("-")[1]


def make(name: str, stage: int) -> tuple[Tiny, zk.ZeroOptimizer]:
    """The same model from other values."""
    torch.manual_seed(7)
    model = Tiny()
    return model, zk.ZeroOptimizer(model, adamw_of(model), stage=stage, dtype=dtype_of(name), **({"param_tier": "host"} if stage == 3 else {}))


def expected(name: str) -> tuple[dict[str, Tensor], dict[str, float]]:
    return load_file(HERE / name / "expected.safetensors"), json.loads((HERE / name / "expected.json").read_text())


def differing(name: str, model: Tiny, optimizer: zk.ZeroOptimizer) -> list[str]:
    """What is not as DeepSpeed had it, to the bit."""
    tensors, numbers = expected(name)
    found, wrong = snapshot(model, optimizer), []
    for key, want in tensors.items():
        kind, _, param = key.rpartition("/")
        mine = found["seen" if key == "seen" else f"{kind or 'master'} {param}" if key != "scale" else "scale"]
        if not torch.equal(mine.float().reshape(-1), want.reshape(-1)):
            wrong.append(key)
    for key, param in model.named_parameters():  # what the model computes with is the master, rounded
        with zk.gather([param]):
            if not torch.equal(param.detach().reshape(-1), tensors[key].reshape(-1).to(param.dtype)):
                wrong.append(f"param {key}")
    for held in optimizer.held:
        if held.shard is not None and set(held.steps.values()) != {numbers["steps"]}:
            wrong.append(f"steps of {held.unit.name}")
    if optimizer.counters != {"steps": numbers["steps"], "skipped_steps": numbers["skipped_steps"]}:
        wrong.append(f"counters {optimizer.counters}")
    options = [(group["lr"], group["betas"], group["eps"], group["weight_decay"]) for group in optimizer.param_groups]
    if options != [(1e-2, (0.8, 0.95), 1e-8, 0.1), (3e-3, (0.8, 0.95), 1e-8, 0.0)]:
        wrong.append(f"groups {options}")
    if optimizer.scaler.scale != numbers["scale"]:
        wrong.append(f"loss scale {optimizer.scaler.scale}")
    return wrong


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("imported")
    for name in CASES:
        assert import_deepspeed(HERE / name, root / name) == root / name / "step-00000003"
    return root


# ---- going on ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "stage"), [(name, 3 * (number % 2)) for number, name in enumerate(CASES)])
def test_all_that_deepspeed_had_is_there_to_the_bit(name: str, stage: int, imported: Path) -> None:
    model, optimizer = make(name, stage)
    options = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"], group["betas"], group["weight_decay"] = 0.5, (0.1, 0.2), 0.7
    drawn = torch.get_rng_state()
    extra = optimizer.load_checkpoint(imported / name)
    assert differing(name, model, optimizer) == []
    assert extra["deepspeed"]["stage"] == int(name[4]) and extra["deepspeed"]["world"] == 2 and extra["deepspeed"]["lr_scheduler"] is None
    assert [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups] == options
    assert torch.equal(torch.get_rng_state(), drawn), "DeepSpeed saves no random numbers, so none are set"
    assert "deepspeed" not in sys.modules
    optimizer.close()


def load_on_rank(case: tuple[str, str, int]) -> list[str]:
    name, root, stage = case
    model, optimizer = make(name, stage)
    optimizer.load_checkpoint(root)
    wrong = differing(name, model, optimizer)
    optimizer.close()
    return wrong


def test_two_ranks_load_what_one_process_imported(imported: Path) -> None:
    cases = [(name, str(imported / name), stage) for name, stage in (("zero3-bf16", 3), ("zero1-fp16", 2), ("zero2-fp32-round-robin", 1))]
    assert run_world(2, load_on_rank, cases) == [[[], []]] * len(cases)


@pytest.mark.parametrize(
    ("name", "stage"),
    (("zero1-fp32", 0), ("zero2-fp32-round-robin", 3), ("zero3-fp32", 0), ("zero2-bf16", 3), ("zero3-bf16", 0), ("zero3-fp16", 3)),
)
def test_the_next_step_is_that_of_plain_adamw(name: str, stage: int, imported: Path, torch_engine: None) -> None:
    tensors, numbers = expected(name)
    dtype = DTYPES[dtype_of(name)]
    plain = Tiny()
    names = dict(plain.named_parameters())
    with torch.no_grad():
        for key, param in names.items():
            param.copy_(tensors[key].view(param.shape))
    adamw = adamw_of(plain)
    for key, param in names.items():
        if param.requires_grad:
            moments = {kind: tensors[f"{kind}/{key}"].view(param.shape).clone() for kind in ("exp_avg", "exp_avg_sq")}
            adamw.state[param] = {"step": torch.tensor(float(numbers["steps"])), **moments}
    worker = Tiny()
    worker.load_state_dict(plain.state_dict())
    worker = worker.to(dtype)
    want_loss = loss_of(worker, batch(99))
    (want_loss.float() * numbers["scale"]).backward()
    for key, param in worker.named_parameters():
        names[key].grad = None if param.grad is None else param.grad.float() / numbers["scale"]
    adamw.step()

    model, optimizer = make(name, stage)
    optimizer.load_checkpoint(imported / name)
    loss = loss_of(model, batch(99))
    optimizer.backward(loss)
    optimizer.step()
    found = snapshot(model, optimizer)
    assert torch.equal(loss, want_loss)
    for key, param in names.items():
        if param.requires_grad:
            assert torch.equal(found[f"master {key}"], param.detach().reshape(-1)), key
            for kind in ("exp_avg", "exp_avg_sq"):
                assert torch.equal(found[f"{kind} {key}"], adamw.state[param][kind].reshape(-1)), key
    optimizer.close()


def test_groups_may_have_their_members_in_another_order_but_not_other_members(imported: Path) -> None:
    model = Tiny()
    matrices, vectors = (list(group["params"]) for group in adamw_of(model).param_groups)
    for groups in ([vectors, matrices], [[*matrices, vectors[0]], vectors[1:]], [[*matrices, *vectors]]):
        optimizer = zk.ZeroOptimizer(model, torch.optim.AdamW([{"params": group} for group in groups]))
        with pytest.raises(CheckpointError, match="other parameter groups"):
            optimizer.load_checkpoint(imported / "zero1-fp32")
        optimizer.close()
    reordered = [{"params": [param for param in group[::-1] if param.requires_grad]} for group in (matrices, vectors)]
    optimizer = zk.ZeroOptimizer(model, torch.optim.AdamW(reordered), dtype="fp32")
    optimizer.load_checkpoint(imported / "zero1-fp32")
    assert differing("zero1-fp32", model, optimizer) == []
    optimizer.close()


@given(before=st.lists(st.booleans(), max_size=40), window=st.integers(1, 6), hysteresis=st.integers(1, 3))
def test_the_loss_scale_grows_when_it_would_have_in_deepspeed(before: list[bool], window: int, hysteresis: int) -> None:
    theirs = deepspeed._StandIn()
    vars(theirs).update(cur_scale=2.0**20, dynamic=True, cur_iter=0, last_overflow_iter=-1, scale_window=window, cur_hysteresis=hysteresis)

    def update_scale(overflow: bool) -> None:  # as DynamicLossScaler of DeepSpeed 0.19 does
        if overflow:
            if theirs.cur_hysteresis == 1:
                theirs.cur_scale = max(theirs.cur_scale / 2, 1.0)
            else:
                theirs.cur_hysteresis -= 1
            theirs.last_overflow_iter = theirs.cur_iter
        else:
            stable = theirs.cur_iter - theirs.last_overflow_iter - 1
            if stable > 0 and stable % window == 0:
                theirs.cur_hysteresis = hysteresis
                theirs.cur_scale *= 2
        theirs.cur_iter += 1

    for overflow in before:
        update_scale(overflow)
    mine = LossScaler(zk.DynamicLossScale(window=window, hysteresis=hysteresis))
    mine.load_state_dict(deepspeed._scale_of(theirs))
    for _ in range(3 * window):
        assert mine.scale == theirs.cur_scale and mine.patience == theirs.cur_hysteresis
        mine.update(overflow=False)
        update_scale(overflow=False)


def test_options_of_deepspeeds_own_adam_become_torchs() -> None:
    group = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1, "bias_correction": True, "amsgrad": False, "step": 3, "params": [0]}
    plain = {"lr": 0.1, "betas": [0.9, 0.99], "eps": 1e-8, "weight_decay": 0.1, "amsgrad": False}
    for asked, decoupled in (
        ({"type": "AdamW"}, True),
        ({"type": "Adam", "params": {}}, True),
        ({"type": "Adam", "params": {"adam_w_mode": False}}, False),
    ):
        assert deepspeed._options(group, {"optimizer": asked}, Path("x")) == {**plain, "decoupled_weight_decay": decoupled}
    assert deepspeed._options(group, {}, Path("x")) == plain
    with pytest.raises(CheckpointError, match="bias_correction"):
        deepspeed._options({**group, "bias_correction": False}, {}, Path("x"))


def test_what_deepspeed_kept_of_a_scheduler_comes_back(tmp_path: Path) -> None:
    folder = copied("zero1-fp32", tmp_path)
    rewrite(folder / "mp_rank_00_model_states.pt", lambda saved: saved.update(lr_scheduler={"last_epoch": 3, "base_lrs": [0.1, 0.2]}))
    import_deepspeed(folder, tmp_path / "out")
    _, optimizer = make("zero1-fp32", 0)
    assert optimizer.load_checkpoint(tmp_path / "out")["deepspeed"]["lr_scheduler"] == {"last_epoch": 3, "base_lrs": [0.1, 0.2]}
    optimizer.close()


def test_what_the_user_had_deepspeed_keep_comes_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = copied("zero2-bf16", tmp_path)
    rewrite(folder / "mp_rank_00_model_states.pt", lambda saved: saved.update(epoch=3, best={"loss": 0.5}, draws=torch.arange(3)))
    import_deepspeed(folder, tmp_path / "out")
    assert "client_state['draws'] is a Tensor" in caplog.text
    _, optimizer = make("zero2-bf16", 0)
    assert optimizer.load_checkpoint(tmp_path / "out")["client_state"] == {"epoch": 3, "best": {"loss": 0.5}}
    optimizer.close()


# ---- any world size ----------------------------------------------------------------------------------------------------------


def write_as_deepspeed(folder: Path, stage: int, world: int, flats: list[list[Tensor]], alignment: int = 1) -> dict[str, Tensor]:
    """Files of a run whose flat buffers have these parameters. Returns weights and moments by name."""
    folder.mkdir(parents=True)
    named = [{f"p{number}.{index}": value for index, value in enumerate(flat)} for number, flat in enumerate(flats)]
    kinds = {"": 1.0, "exp_avg/": 0.5, "exp_avg_sq/": 2.0}
    want = {f"{kind}{name}": value * factor for kind, factor in kinds.items() for flat in named for name, value in flat.items()}
    parts: dict[str, list[list[Tensor]]] = {kind: [[] for _ in range(world)] for kind in kinds}  # [rank][flat buffer], padded
    lean: list[list[int]] = [[] for _ in range(world)]
    paddings: list[list[int]] = []
    for flat in named:
        cuts: list[list[Tensor]] = [[] for _ in range(world)]
        joined: list[Tensor] = []
        paddings.append([])
        for index, value in enumerate(flat.values()):
            each = -(-value.numel() // world)
            padded = torch.cat([value.reshape(-1), torch.full((each * world - value.numel(),), 77.0)])
            for rank in range(world):
                cuts[rank].append(padded[rank * each : (rank + 1) * each])
            behind = -value.numel() % alignment if index < len(flat) - 1 else 0
            joined += [value.reshape(-1), torch.full((behind,), 77.0)]
            paddings[-1].append(behind)
        whole = torch.cat(joined)
        whole = torch.cat([whole, torch.full((-whole.numel() % (2 * world),), 77.0)])
        size = whole.numel() // world
        for rank in range(world):
            mine = torch.cat(cuts[rank]) if stage == 3 else whole[rank * size : (rank + 1) * size]
            lean[rank].append(mine.numel() if stage == 3 else min(max(sum(part.numel() for part in joined) - rank * size, 0), size))
            for kind, factor in kinds.items():
                parts[kind][rank].append(mine * factor)
    for rank in range(world):
        masters = [part[:count] for part, count in zip(parts[""][rank], lean[rank], strict=True)]
        state = {
            number: {"step": 5, "exp_avg": parts["exp_avg/"][rank][number], "exp_avg_sq": parts["exp_avg_sq/"][rank][number]}
            for number in range(len(flats))
        }
        members = [list(range(len(flats)))] if stage == 3 else [[number] for number in range(len(flats))]
        base = {"state": state, "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "params": numbers} for numbers in members]}
        keys = ("optimizer_state_dict", "fp32_flat_groups") if stage == 3 else ("base_optimizer_state", "single_partition_of_fp32_groups")
        zero = {"zero_stage": stage, "partition_count": world, keys[0]: base, keys[1]: masters}
        if stage < 3:
            zero["param_alignment_paddings"] = paddings
        torch.save({"optimizer_state_dict": zero}, folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    shapes = [{name: value.shape for name, value in flat.items()} for flat in named]
    model = {"module": {}, "param_shapes": shapes, "global_steps": 5, "skipped_steps": 0}
    for name in [f"zero_pp_rank_{rank}_mp_rank_00" for rank in range(world)] if stage == 3 else ["mp_rank_00"]:
        torch.save(model, folder / f"{name}_model_states.pt")
    return want


@settings(max_examples=25, deadline=None)
@given(data=st.data(), stage=st.sampled_from((1, 3)), world=st.integers(1, 5), alignment=st.sampled_from((1, 4)))
def test_every_world_size_and_shape_comes_together(data: st.DataObject, stage: int, world: int, alignment: int) -> None:
    numels = data.draw(st.lists(st.lists(st.integers(1, 23), min_size=1, max_size=4), min_size=1, max_size=3))
    values = iter(torch.arange(1.0, 1 + sum(map(sum, numels))).split([numel for flat in numels for numel in flat]))
    with tempfile.TemporaryDirectory() as scratch:
        want = write_as_deepspeed(Path(scratch) / "ds", stage, world, [[next(values) for _ in flat] for flat in numels], alignment)
        folder = import_deepspeed(Path(scratch) / "ds", Path(scratch) / "out")
        tensors = load_file(folder / "rank-00000-of-00001.safetensors")
        units = json.loads((folder / "manifest.json").read_text())["units"]
    assert len(units) * 3 == len(want)
    for number, unit in enumerate(units):
        for kind in unit["kinds"]:
            assert torch.equal(tensors[f"{kind}/{number}/0"], want[("" if kind == "master" else f"{kind}/") + unit["name"]])


def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    """Peak of memory that is not a mapped file, over what it was before: a few blocks of the writer, not 96 MiB of state."""
    write_as_deepspeed(tmp_path / "ds", 3, 2, [[torch.ones(1 << 20) for _ in range(8)]])
    import_deepspeed(HERE / "zero3-fp32", tmp_path / "first")
    peak, real = 0, Writer.add

    def anonymous() -> int:
        return next(int(line.split()[1]) << 10 for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))

    def watched(self: Any, tensor: Tensor) -> None:
        nonlocal peak
        real(self, tensor)
        peak = max(peak, anonymous())

    before = anonymous()
    with mock.patch.object(Writer, "add", watched):
        import_deepspeed(tmp_path / "ds", tmp_path / "out")
    assert peak - before < 48 << 20


# ---- refusals ----------------------------------------------------------------------------------------------------------------


def copied(name: str, tmp_path: Path) -> Path:
    shutil.copytree(HERE / name, tmp_path / name)
    return next((tmp_path / name).glob("global_step*"))


def refused(folder: Path, match: str, tmp_path: Path, error: type[Exception] = CheckpointError) -> None:
    with pytest.raises(error, match=match):
        import_deepspeed(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def rewrite(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change what a file says, and save it as DeepSpeed would, but for objects of its classes."""
    saved = deepspeed._load(path)
    zero = saved.get("optimizer_state_dict", {})
    zero.pop("loss_scaler", None), zero.pop("param_slice_mappings", None)
    change(saved)
    torch.save(saved, path.with_suffix(".new"))
    path.with_suffix(".new").rename(path)


@pytest.mark.parametrize(
    ("name", "how"),
    (
        *(("zero2-bf16", how) for how in ("missing", "one bit", "no dict")),
        *(("zero3-fp16", how) for how in ("missing", "cut short", "empty", "other bytes")),
    ),
)
def test_a_damaged_file_is_named_and_nothing_is_written(name: str, how: str, tmp_path: Path) -> None:
    files = sorted(path.name for path in (HERE / name).glob("global_step*/*.pt"))
    assert len(files) == (3 if "zero2" in name else 4)
    for number, file in enumerate(files):
        path = copied(name, tmp_path / str(number)) / file
        content = bytearray(path.read_bytes())
        if how == "missing":
            path.unlink()
        elif how == "cut short":
            path.write_bytes(content[: len(content) * 2 // 3])
        elif how == "empty":
            path.write_bytes(b"")
        elif how == "one bit":
            with zipfile.ZipFile(path) as archive:
                local = next(record.header_offset for record in archive.infolist() if "/data/" in record.filename and record.file_size > 8)
            name_nbytes, extra_nbytes = struct.unpack_from("<HH", content, local + 26)
            content[local + 30 + name_nbytes + extra_nbytes + 5] ^= 1  # in a tensor
            path.write_bytes(content)
        elif how == "other bytes":
            path.write_bytes(b"PK" + random.Random(0).randbytes(5000))
        else:
            torch.save([1, 2], path)
        refused(path.parent, file.replace(".", r"\."), tmp_path)


OPTIM, MODEL, ZERO = "zero_pp_rank_1_mp_rank_00_optim_states.pt", "zero_pp_rank_1_mp_rank_00_model_states.pt", "optimizer_state_dict"


@pytest.mark.parametrize(
    ("name", "file", "change", "match"),
    (
        ("zero2-fp32", OPTIM, lambda saved: saved[ZERO].update(partition_count=[3, 3]), "different checkpoints: world"),
        ("zero2-fp32", OPTIM, lambda saved: saved[ZERO].update(partition_count=[2, 1]), "expert parallel"),
        ("zero2-fp32", OPTIM, lambda saved: saved[ZERO].update(zero_stage=1), "different checkpoints: stage"),
        ("zero2-fp32", OPTIM, lambda saved: saved[ZERO].update(zero_stage=7), "stage 7"),
        ("zero2-fp32", OPTIM, lambda saved: saved[ZERO]["base_optimizer_state"]["state"][0].update(step=9), "different checkpoints: steps"),
        ("zero2-fp32", OPTIM, lambda saved: saved[ZERO]["base_optimizer_state"]["param_groups"][0].update(lr=9), "different checkpoints: groups"),
        ("zero2-fp32", OPTIM, lambda saved: saved[ZERO]["base_optimizer_state"]["state"][0].pop("exp_avg"), "only Adam and AdamW"),
        ("zero2-fp32", OPTIM, lambda saved: saved[ZERO]["base_optimizer_state"].update(state={}), "only Adam and AdamW"),
        ("zero2-fp32", OPTIM, lambda saved: saved[ZERO].update(base_optimizer_state=[{}]), "elastic_checkpoint"),
        ("zero2-fp32", OPTIM, lambda saved: saved[ZERO].pop("base_optimizer_state"), "not as DeepSpeed saves it"),
        ("zero2-fp32", OPTIM, lambda saved: saved[ZERO]["single_partition_of_fp32_groups"].__setitem__(0, torch.zeros(5)), "has 5 elements"),
        ("zero2-fp32", OPTIM, lambda saved: saved.pop(ZERO), "not as DeepSpeed saves it"),
        ("zero3-fp32", OPTIM, lambda saved: saved[ZERO]["fp32_flat_groups"].__setitem__(1, torch.zeros(0)), "has 0 elements.*NVMe"),
        ("zero3-fp32", OPTIM, lambda saved: saved[ZERO].update(fp32_flat_groups=[1, 2, 3]), "not as DeepSpeed saves it"),
        ("zero3-fp32", OPTIM, lambda saved: saved.update(ds_version="0.3"), "different checkpoints: version"),
        ("zero3-fp32", MODEL, lambda saved: saved.update(global_steps=9), "different checkpoints: global_steps"),
        ("zero3-fp32", MODEL, lambda saved: saved["frozen_param_fragments"].clear(), "'scale'"),
        ("zero3-fp32", MODEL, lambda saved: saved.update(param_shapes=None), "different checkpoints"),
        ("zero2-fp32", "mp_rank_00_model_states.pt", lambda saved: saved["param_shapes"].pop(), "1 flat buffers"),
        ("zero2-fp32", "mp_rank_00_model_states.pt", lambda saved: saved["param_shapes"][0].update({"up.weight": [13, 9]}), "elements of"),
        ("zero2-fp32", "mp_rank_00_model_states.pt", lambda saved: saved.update(param_shapes=None), "not as DeepSpeed saves it"),
        ("zero2-fp32", "mp_rank_00_model_states.pt", lambda saved: saved["module"].pop("seen"), "'seen'"),
        ("zero2-fp32", "mp_rank_00_model_states.pt", lambda saved: saved.pop("global_steps"), "'global_steps'"),
    ),
)
def test_files_that_do_not_fit_together_are_refused(name: str, file: str, change: Any, match: str, tmp_path: Path) -> None:
    folder = copied(name, tmp_path)
    rewrite(folder / file, change)
    refused(folder, rf"_states\.pt.*{match}", tmp_path)


def test_files_of_other_kinds_of_parallelism_and_of_other_runs_are_refused(tmp_path: Path) -> None:
    for number, (stray, match) in enumerate(
        (
            ("mp_rank_01_model_states.pt", "only data parallel"),
            ("layer_0_expert_0_mp_rank_00_model_states.pt", "only data parallel"),
            ("zero_pp_rank_2_mp_rank_00_optim_states.pt", "2 ranks saved"),
            ("bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", "is missing"),
            ("zero_pp_rank_0_mp_rank_00_model_states.pt", "does not belong"),
        )
    ):
        folder = copied("zero2-fp32", tmp_path / str(number))
        shutil.copy(folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt", folder / stray)
        refused(folder, match, tmp_path)
    refused(tmp_path, "optim_states", tmp_path)
    (tmp_path / "latest").write_text("global_step9\n")
    refused(tmp_path, "latest.*'global_step9'", tmp_path)


class Call:
    """A pickle that calls."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("file", (OPTIM, "mp_rank_00_model_states.pt"))
def test_a_pickle_that_would_run_something_is_refused_and_does_not_run(file: str, tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    for number, (call, named) in enumerate(
        (
            (Call(os.system, f"touch {marker}"), r"posix\.system"),
            (Call(eval, f"open({str(marker)!r}, 'w')"), r"eval"),
            (nn.Linear(1, 1), r"torch\.nn\.modules\.linear\.Linear"),
            (Path("x"), "pathlib"),
        )
    ):
        path = copied("zero2-fp32", tmp_path / str(number)) / file
        rewrite(path, lambda saved, call=call: saved.update(client=[call]))
        refused(path.parent, rf"{file}.*{named}", tmp_path)
    assert not marker.exists()


def test_a_drive_that_fills_up_leaves_nothing_and_what_is_not_ours_stays(tmp_path: Path) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with mock.patch.object(nvme.SYSTEM, "pwritev", full), pytest.raises(OSError, match="space"):
        import_deepspeed(HERE / "zero3-bf16", tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []
    folder = copied("zero3-bf16", tmp_path)
    with pytest.raises(ValueError, match="'global_step3', which zk did not save"):
        import_deepspeed(folder, folder.parent)
    assert (folder.parent / "latest").read_text() == "global_step3"
    assert import_deepspeed(folder, tmp_path / "out") == import_deepspeed(folder.parent, tmp_path / "out")
    assert (tmp_path / "out" / "latest").read_text() == "step-00000003\n"


def test_the_command_says_where_the_checkpoint_is_or_what_is_wrong_in_one_line(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["import-deepspeed", str(HERE / "zero1-bf16"), str(tmp_path / "out")])
    assert result.exit_code == 0 and result.output == f"{tmp_path / 'out' / 'step-00000003'}\n"
    folder = copied("zero1-bf16", tmp_path)
    (folder / "mp_rank_00_model_states.pt").unlink()
    result = CliRunner().invoke(app, ["import-deepspeed", str(folder), str(tmp_path / "other")])
    assert result.exit_code == 2 and result.output.count("\n") == 1 and "mp_rank_00_model_states.pt is missing" in result.output
    assert not (tmp_path / "other").exists()
