"""Frozen weights that are read in place, from the files that they were saved in: the same training as over copies, and nothing is written."""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import zk
from tests.adversary import adversarial_drive
from tests.alive import drive_without_delay
from tests.models import GPT, batch, loss_of, train
from tests.plain import train_plain
from tests.world import run_world
from zk.checkpoint.files import DTYPE_OF
from zk.offload import nvme, spill
from zk.offload.tiers import NVMeTier
from zk.tools.plan import check

pytestmark = pytest.mark.usefixtures("torch_engine")
STEPS = 3


def built(variant: str = "plain", trained: tuple[str, ...] = ("norm.weight", "proj.bias")) -> GPT:
    """A model of which a few vectors are trained."""
    model = GPT(variant)
    for name, param in model.named_parameters():
        param.requires_grad_(name.endswith(trained))
    return model


def saved(path: Path, tensors: dict[str, Tensor], odd: bool = False) -> Path:
    """A safetensors file of ``tensors`` in their order; ``odd``: in which they begin at odd places."""
    path.parent.mkdir(parents=True, exist_ok=True)
    names = {dtype: name for name, dtype in DTYPE_OF.items()}
    table, data = {}, b""
    for name, tensor in tensors.items():
        value = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        table[name] = {"dtype": names[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [len(data), len(data) + len(value)]}
        data += value
    header = json.dumps(table).encode()
    header += b" " * ((-len(header)) % 8 + 5 * odd)
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)
    return path


def in_shards(folder: Path, tensors: dict[str, Tensor]) -> Path:
    """The same as three files and their index."""
    names = list(tensors)
    shards = {f"part-{number}.safetensors": names[number::3] for number in range(3)}
    for number, (file, mine) in enumerate(shards.items()):
        saved(folder / file, {name: tensors[name] for name in mine}, odd=number == 1)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {name: file for file, mine in shards.items() for name in mine}}))
    return folder


FORMS: dict[str, Callable[[Path, dict[str, Tensor]], Path]] = {
    "one file": lambda folder, tensors: saved(folder / "model.safetensors", tensors),
    "another order, odd places": lambda folder, tensors: saved(folder / "model.safetensors", dict(reversed(tensors.items())), odd=True),
    "shards": in_shards,
}


def weights_of(variant: str, dtype: torch.dtype, seed: int = 0) -> dict[str, Tensor]:
    """Initial values, as they are published."""
    torch.manual_seed(seed)
    model = built(variant)
    return {name: param.detach().cpu().to(dtype) for name, param in model.named_parameters()}


def holding(variant: str, weights: dict[str, Tensor]) -> GPT:
    """A plain model with these values."""
    model = built(variant)
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(weights[name])
    return model


def adamw(params: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW([param for param in params if param.requires_grad], lr=1e-2)


def over(files: Path, scratch: Path, in_place: bool = True, make: Callable[[], nn.Module] = built, **options: Any) -> tuple[Any, zk.ZeroOptimizer]:
    """A model over weights in ``files``, with all of it on a drive."""
    scratch.mkdir(exist_ok=True)
    with zk.deferred_init():
        model = make()
    zk.load_pretrained(model, files, in_place=in_place)
    options = {"stage": 3, "param_tier": "nvme", "optimizer_tier": "nvme", "nvme_path": scratch, **options}
    return model, zk.ZeroOptimizer(model, adamw(model.parameters()), **options)


def digest(path: Path) -> str:
    files = sorted(path.rglob("*.safetensors")) if path.is_dir() else [path]
    return hashlib.sha256(b"".join(file.read_bytes() + str(file.stat().st_mtime_ns).encode() for file in files)).hexdigest()


def scratch_nbytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("state*.bin"))


def values_of(model: nn.Module) -> dict[str, Tensor]:
    with zk.gather(model.parameters()):
        return {name: param.detach().cpu().clone() for name, param in model.named_parameters()}


@contextlib.contextmanager
def only_read(path: Path) -> Iterator[None]:
    """Check that nobody opens a file there, or makes one beside it, to write it."""
    real, written = os.open, []

    def opened(name: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if os.fspath(name).startswith(str(path)) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            written.append(name)
        return real(name, flags, *args, **kwargs)

    before, names = digest(path), sorted(path.iterdir())
    with mock.patch.object(os, "open", opened):
        yield
    assert not written and digest(path) == before and sorted(path.iterdir()) == names


# ---- the same training ---------------------------------------------------------------------------------------------------------------


def both_ways(case: tuple[str, str, Path]) -> tuple[list[float], list[str]]:
    """Losses over a base in place, and what is not as it is over a copy, on this rank. Reads are counted for the plain model."""
    variant, dtype, folder = case
    world, rank = (torch.distributed.get_world_size(), torch.distributed.get_rank()) if torch.distributed.is_initialized() else (1, 0)
    files, found, results = folder / "base", list[str](), {}
    for in_place in (False, True):
        model, optimizer = over(files, folder / f"scratch-{in_place}", in_place, lambda: built(variant), dtype=dtype)
        (mine,) = (folder / f"scratch-{in_place}").glob(f"*-rank{rank}")
        written = [optimizer.metrics()["evicted_nbytes"]]
        losses = []
        for step in range(STEPS):
            loss = loss_of(model, batch(1000 * step + rank))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        metrics = optimizer.metrics()
        written.append(metrics["evicted_nbytes"] - written[0])
        values = values_of(model)
        results[in_place] = losses, values, metrics, written, scratch_nbytes(mine)
        optimizer.close()
    copied, in_place = results[False], results[True]
    base = in_place[2]["nvme_in_place_nbytes"]
    frozen = sum(param.numel() for param in built(variant).parameters() if not param.requires_grad) * (2 if dtype == "bf16" else 4)
    found += ["other losses"] * (copied[0] != in_place[0])
    found += [name for name, value in copied[1].items() if not torch.equal(value, in_place[1][name])]
    found += [f"{base} bytes are in place of {frozen}"] * (not frozen / world <= base <= 1.2 * frozen / world + 8192)
    if copied[2]["nvme_param_nbytes"] != base + in_place[2]["nvme_param_nbytes"]:
        found.append("bytes of parameters")
    found += ["the base was written"] * (copied[3][0] - in_place[3][0] < base or copied[3][1] != in_place[3][1])
    found += ["the base has room in scratch files"] * (copied[4] - in_place[4] < base)
    # (a piece that is copied is read in whole pages)
    found += ["more is read"] * (variant == "plain" and in_place[2]["fetched_nbytes"] > copied[2]["fetched_nbytes"])
    return in_place[0], found


@pytest.mark.device
@pytest.mark.parametrize("dtype", ("fp32", "bf16"))
@pytest.mark.parametrize("variant", ("plain", "tied"))
@pytest.mark.parametrize("form", FORMS)
def test_a_base_in_place_trains_as_plain_torch_and_as_a_copy(form: str, variant: str, dtype: str, tmp_path: Path) -> None:
    kind = torch.bfloat16 if dtype == "bf16" else torch.float32
    weights = weights_of(variant, kind)
    files = FORMS[form](tmp_path / "base", weights)
    with only_read(tmp_path / "base"), drive_without_delay() if variant == "plain" else contextlib.nullcontext():
        losses, found = both_ways((variant, dtype, tmp_path))
    assert found == [] and files.exists()
    plain = train_plain(holding(variant, weights), adamw, dtype=kind, steps=STEPS)[0]
    assert losses == plain


def test_over_ranks_each_one_reads_its_own_slice(tmp_path: Path) -> None:
    weights = weights_of("tied", torch.bfloat16)
    in_shards(tmp_path / "base", dict(reversed(weights.items())))
    before = digest(tmp_path / "base")
    for rank in range(2):
        saved(tmp_path / str(rank) / "model.safetensors", weights_of("plain", torch.float32, seed=rank))
    cases = [("tied", "bf16", tmp_path), *((kind, "", tmp_path) for kind in ("the same", "another", "none"))]
    ((first, same), (_, same_too)), *found = run_world(2, on_a_rank, cases)
    assert (same, same_too) == ([], [])
    assert first == train_plain(holding("tied", weights), adamw, dtype=torch.bfloat16, world=2, steps=STEPS)[0]
    assert digest(tmp_path / "base") == before
    # ranks with other files, or none, have the first one's values
    assert [are_first for ranks in found for _, are_first in ranks] == [True] * 6
    assert [nbytes > 0 for ranks in found for nbytes, _ in ranks] == [True] * 2 + [False] * 4


def on_a_rank(case: tuple[str, str, Path]) -> tuple[Any, Any]:
    """Train over files that all ranks have (``both_ways``), or not: bytes in place, and whether the first rank's values are here."""
    kind, dtype, folder = case
    if dtype:
        return both_ways(case)
    rank = torch.distributed.get_rank()
    with zk.deferred_init():
        model = built()
    if rank == 0 or kind != "none":
        zk.load_pretrained(model, folder / ("0" if kind == "the same" else str(rank)) / "model.safetensors")
    (folder / "scratch").mkdir(exist_ok=True)
    options = {"stage": 3, "param_tier": "nvme", "optimizer_tier": "nvme", "nvme_path": folder / "scratch"}
    with zk.ZeroOptimizer(model, adamw(model.parameters()), **options) as optimizer:
        want = load_file(folder / "0" / "model.safetensors")
        same = all(torch.equal(value, want[name]) for name, value in values_of(model).items())
        return optimizer.metrics().get("nvme_in_place_nbytes", 0), same


# ---- what cannot be read in place ----------------------------------------------------------------------------------------------------


def fails_over(why: str) -> tuple[Callable[[], nn.Module], torch.dtype, dict[str, Any]]:
    """A model of one frozen unit that is copied, the dtype of its file, and options."""

    def make() -> nn.Module:
        layer: nn.Module = nn.Conv2d(3, 4, 3) if why == "memory format" else nn.Linear(8, 8)
        if why == "memory format":
            layer.weight = nn.Parameter(layer.weight.detach().contiguous(memory_format=torch.channels_last))
        if why == "rounded on its way":
            layer.half()
        layer.requires_grad_(why == "trained")
        model = nn.ModuleDict({"frozen": nn.ModuleList([layer]), "head": nn.Linear(8, 8)})
        return model

    dtypes = {"trained": torch.float32, "memory format": torch.float32, "kept in another dtype": torch.bfloat16}
    dtype = "bf16" if why in ("cast", "rounded on its way") else None
    return make, dtypes.get(why, torch.float32 if why == "cast" else torch.bfloat16), {"dtype": dtype, "units": ["frozen.0"]}


@pytest.mark.parametrize("why", ("cast", "kept in another dtype", "rounded on its way", "memory format", "trained", "asked for", "on the host"))
def test_what_does_not_lie_in_the_file_as_it_is_kept_is_copied(why: str, tmp_path: Path) -> None:
    make, dtype, options = fails_over(why)
    if why in ("asked for", "on the host"):
        dtype, options = torch.float32, options | ({"param_tier": "host"} if why == "on the host" else {})
    torch.manual_seed(0)
    weights = {name: value.detach().to(dtype) for name, value in make().state_dict().items()}
    path = saved(tmp_path / "base" / "model.safetensors", weights)
    model, optimizer = over(path, tmp_path / "scratch", why != "asked for", make, **options)
    found = values_of(model)
    with optimizer:
        assert optimizer.metrics().get("nvme_in_place_nbytes", 0) == 0
        for name, param in make().named_parameters():
            value = weights[name].to(param.dtype).to(found[name].dtype)
            assert torch.equal(found[name], value), name


def test_codes_of_one_byte_and_halves_of_tiles_are_read_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spill, "CHUNK_NUMEL", 2048)  # whose chunks of codes end within a page

    class Quantized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.codes = nn.Parameter(torch.zeros(4 * 2048 + 5, dtype=torch.uint8), requires_grad=False)
            self.wide = zk.TiledLinear(16, 64, bias=False, out_splits=4).requires_grad_(False)
            self.deep = zk.TiledLinear(16, 4, bias=False, in_splits=2).requires_grad_(False)  # columns: they do not lie together
            self.scale = nn.Parameter(torch.ones(4))

    torch.manual_seed(0)
    weights = {"codes": torch.randint(0, 255, (4 * 2048 + 5,), dtype=torch.uint8), "wide.weight": torch.randn(64, 16)}
    weights |= {"deep.weight": torch.randn(4, 16), "scale": torch.randn(4)}
    path = saved(tmp_path / "base" / "model.safetensors", weights, odd=True)
    with only_read(tmp_path / "base"):
        model, optimizer = over(path, tmp_path / "scratch", make=Quantized)
        assert optimizer.metrics()["nvme_in_place_nbytes"] == nvme.round_up(4 * 2048 + 5, 32) + 64 * 16 * 4
        folder = optimizer.save_checkpoint(tmp_path / "saved")
        optimizer.load_checkpoint(folder)  # which has what is there
        assert optimizer.metrics()["nvme_in_place_nbytes"] > 0
        with zk.gather(model.parameters()):
            assert torch.equal(model.codes.cpu(), weights["codes"])
            assert torch.equal(torch.cat([tile.weight for tile in model.wide.tiles]).cpu(), weights["wide.weight"])
            assert torch.equal(torch.cat([tile.weight for tile in model.deep.tiles], dim=1).cpu(), weights["deep.weight"])
        optimizer.close()


def test_a_base_on_another_file_system_is_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = saved(tmp_path / "base" / "model.safetensors", weights_of("plain", torch.float32))
    with caplog.at_level(logging.INFO, logger="zk"):
        over(path, tmp_path / "scratch")[1].close()
    assert "of frozen parameters are read in place" in caplog.text and "0 bytes of them are written; they lie in" in caplog.text
    assert "another file system" not in caplog.text

    def elsewhere(status: os.stat_result, real: Callable[..., nvme.Identity] = nvme.identity_of) -> nvme.Identity:
        return -1, *real(status)[1:]

    with mock.patch("zk.nn.pretrained.identity_of", elsewhere), mock.patch.object(nvme, "identity_of", elsewhere):
        over(path, tmp_path / "scratch")[1].close()
    assert "another file system than nvme_path" in caplog.text and "in_place=False" in caplog.text


# ---- files that do not stay as they are ----------------------------------------------------------------------------------------------


def rewritten(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def in_silence(path: Path) -> None:
    """Rewrite a file so that only its bytes tell. A read in flight would see another time of change before that is put back."""
    times = path.stat()
    rewritten(path)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def cut_short(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def replaced(path: Path) -> None:
    other = path.with_suffix(".other")
    shutil.copy(path, other)
    rewritten(other)
    other.replace(path)


CHANGES = {"rewritten": rewritten, "cut short": cut_short, "removed": Path.unlink, "replaced": replaced}


@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_changes_before_training_is_named(change: str, tmp_path: Path) -> None:
    path = saved(tmp_path / "base" / "model.safetensors", weights_of("plain", torch.float32))
    with zk.deferred_init():
        model = built()
    zk.load_pretrained(model, path)
    CHANGES[change](path)
    says = r"is not there any more" if change == "removed" else r"has been changed since its names were read"
    with pytest.raises(OSError, match=rf"{says}.*put back what was there.*model\.safetensors"):
        zk.ZeroOptimizer(model, adamw(model.parameters()), stage=3, param_tier="nvme", optimizer_tier="nvme", nvme_path=tmp_path)


@pytest.mark.parametrize("change", (*CHANGES, "in silence"))
def test_a_file_that_changes_in_training_is_noticed_or_read_on_as_it_was(change: str, tmp_path: Path) -> None:
    path = saved(tmp_path / "base" / "model.safetensors", dict(reversed(weights_of("plain", torch.float32).items())))
    model, optimizer = over(path, tmp_path / "scratch")
    want = [train(model, optimizer, 1, step)[0] for step in (0, 1)]
    optimizer.close()
    model, optimizer = over(path, tmp_path / "scratch", **({"prefetch": 0} if change == "in silence" else {}))
    got = train(model, optimizer, 1)
    optimizer.save_checkpoint(tmp_path / "saved")
    {**CHANGES, "in silence": in_silence}[change](path)
    if change in ("removed", "replaced"):  # the old file is open
        assert got + train(model, optimizer, 1, 1) == want
        optimizer.close()
        return
    says = "not what was read there" if change == "in silence" else "has been changed since"
    with pytest.raises(OSError, match=rf"{says}.*in_place=False.*model\.safetensors"):
        train(model, optimizer, 2, 1)  # a unit may have been read ahead
    with pytest.raises(OSError, match=says):  # every time
        train(model, optimizer, 2, 1)
    optimizer.load_checkpoint(tmp_path / "saved")  # whose base gets room of its own
    assert got + train(model, optimizer, 1, 1) == want
    optimizer.close()


def test_a_drive_without_o_direct_and_short_reads_give_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(tmp_path / "base" / "model.safetensors", weights_of("plain", torch.float32), odd=True)
    model, optimizer = over(path, tmp_path / "scratch")
    want = train(model, optimizer, 2)
    optimizer.close()
    monkeypatch.setattr(nvme, "_past_cache", lambda path: -1)
    monkeypatch.setattr(nvme.SYSTEM, "preadv", lambda descriptor, buffers, offset: os.preadv(descriptor, [buffers[0][:1000]], offset), raising=False)
    monkeypatch.setattr(nvme, "can_bypass_cache", lambda directory: False)
    model, optimizer = over(path, tmp_path / "scratch")
    assert train(model, optimizer, 2) == want
    optimizer.close()


@pytest.mark.parametrize("seed", range(2))
def test_a_drive_that_answers_late_and_out_of_order_gives_the_same(seed: int, tmp_path: Path) -> None:
    """Memory holds NaN until it is filled, and gaps between parameters are zero."""
    files = in_shards(tmp_path / "base", weights_of("tied", torch.float32))
    make = functools.partial(built, "tied")
    model, optimizer = over(files, tmp_path / "scratch", make=make)
    want = train(model, optimizer, 2)
    optimizer.close()
    with adversarial_drive(seed):
        model, optimizer = over(files, tmp_path / "scratch", make=make)
        assert train(model, optimizer, 2) == want
        for store in optimizer.held:
            if not store.unit.trained:
                whole = store.home.whole().clone()
                for index in range(len(store.unit.params)):
                    whole[store.layout.whole(index)] = 0
                assert not whole.any()
                store.home.release()
        optimizer.close()


# ---- writes --------------------------------------------------------------------------------------------------------------------------


def by_gather(model: nn.Module) -> None:
    with zk.gather(model.blocks[0].qkv.weight, write=True), torch.no_grad():
        model.blocks[0].qkv.weight.mul_(2)


def by_load_state_dict(model: nn.Module) -> None:
    with zk.gather(model.parameters(), write=True):
        model.load_state_dict({name: value * 2 if name.endswith("qkv.weight") else value for name, value in model.state_dict().items()})


def in_forward(model: nn.Module) -> None:
    def double(layer: nn.Module, _: Any) -> None:
        with torch.no_grad():
            layer.weight.mul_(2)

    hook = model.blocks[0].qkv.register_forward_pre_hook(double)
    with torch.no_grad():
        loss_of(model, batch(9))
    hook.remove()


@pytest.mark.device
@pytest.mark.parametrize("write", (by_gather, by_load_state_dict, in_forward))
def test_what_is_written_gets_room_of_its_own_and_the_file_stays(write: Callable[[nn.Module], None], tmp_path: Path) -> None:
    weights = weights_of("plain", torch.float32)
    path, results = saved(tmp_path / "base" / "model.safetensors", weights), []
    for in_place in (False, True):
        with only_read(tmp_path / "base"):
            model, optimizer = over(path, tmp_path / "scratch", in_place)
            before = optimizer.metrics()
            losses = train(model, optimizer, 1)
            write(model)
            losses += train(model, optimizer, 2, 1)
            after, values = optimizer.metrics(), values_of(model)
            optimizer.close()
        results.append((losses, values))
        assert not torch.equal(values["blocks.0.qkv.weight"], weights["blocks.0.qkv.weight"])
        if in_place:
            moved = before["nvme_in_place_nbytes"] - after["nvme_in_place_nbytes"]
            assert moved == after["nvme_param_nbytes"] - before["nvme_param_nbytes"] > 0  # frozen parts of blocks
            assert after["nvme_in_place_nbytes"] > 0  # what else is frozen stays
    assert results[0][0] == results[1][0] and all(torch.equal(value, results[1][1][name]) for name, value in results[0][1].items())


def test_values_that_are_the_same_are_not_written(tmp_path: Path) -> None:
    path = saved(tmp_path / "base" / "model.safetensors", weights_of("plain", torch.float32))
    model, optimizer = over(path, tmp_path / "scratch")
    before = optimizer.metrics()["nvme_in_place_nbytes"]
    zk.load_pretrained(model, path)
    with zk.gather(model.parameters(), write=True):
        model.blocks[0].qkv.weight.data.mul_(1)
    assert optimizer.metrics()["nvme_in_place_nbytes"] == before
    optimizer.close()


def test_a_drive_without_room_for_what_is_written_says_so_and_goes_on(tmp_path: Path) -> None:
    weights = weights_of("plain", torch.float32)
    path = saved(tmp_path / "base" / "model.safetensors", weights)
    model, optimizer = over(path, tmp_path / "scratch")
    spilled = optimizer.tiers["nvme"].spill
    full = mock.patch.object(spilled, "open_file", side_effect=OSError(errno.ENOSPC, "4096 bytes are needed and 0 bytes are free", "state"))

    def fill() -> None:
        with zk.gather(model.blocks[0].qkv.weight, write=True), torch.no_grad():
            model.blocks[0].qkv.weight.fill_(2)

    with full, pytest.raises(OSError, match="are needed and 0 bytes are free"):
        fill()
    fill()
    want = weights | {"blocks.0.qkv.weight": torch.full((72, 24), 2.0)}
    assert all(torch.equal(value, want[name]) for name, value in values_of(model).items())
    optimizer.close()


# ---- the rest of a base's life -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("frozen", (True, False), ids=("whole", "without the base"))
def test_checkpoints_are_those_of_a_copy(frozen: bool, tmp_path: Path) -> None:
    path = saved(tmp_path / "base" / "model.safetensors", weights_of("tied", torch.float32), odd=True)
    make, ends = functools.partial(built, "tied"), []
    with only_read(tmp_path / "base"):
        for here, there in ((True, True), (True, False), (False, True), (False, False)):
            folder = tmp_path / f"{here}-{there}"
            model, optimizer = over(path, tmp_path / "scratch", here, make)
            train(model, optimizer, 2)
            optimizer.save_checkpoint(folder, frozen=frozen, async_save=True)
            optimizer.close()
            model, optimizer = over(path, tmp_path / "scratch", there, make)
            optimizer.load_checkpoint(folder)
            assert (optimizer.metrics().get("nvme_in_place_nbytes", 0) > 0) == there  # the base in it is the one that is there
            losses = train(model, optimizer, 1, 2)
            state = optimizer.consolidated_state_dict()
            optimizer.close(gather=True)
            with torch.no_grad():
                assert loss_of(model, batch(5)).isfinite()  # and usable still
            ends.append((losses, state, {name: param.detach().clone() for name, param in model.named_parameters()}))
    for losses, *values in ends[1:]:
        assert losses == ends[0][0]
        for found, want in zip(values, ends[0][1:], strict=True):
            assert all(torch.equal(value, want[name]) for name, value in found.items())


@pytest.mark.parametrize("by", ("requires_grad", "add_param_group"))
def test_a_unit_in_place_that_is_unfrozen_trains_on_the_drive(by: str, tmp_path: Path) -> None:
    weights = weights_of("plain", torch.float32)
    path, results = saved(tmp_path / "base" / "model.safetensors", weights), []

    def unfreeze(model: nn.Module, optimizer: Any) -> None:
        model.blocks[1].up.requires_grad_(True)
        if by == "add_param_group":
            optimizer.add_param_group({"params": list(model.blocks[1].up.parameters())})

    def make(model: nn.Module) -> torch.optim.AdamW:
        return adamw(model.parameters()) if by == "add_param_group" else torch.optim.AdamW(model.parameters(), lr=1e-2)

    plain = holding("plain", weights)
    inner = make(plain)
    for step in range(4):
        if step == 2:
            unfreeze(plain, inner)
        loss = loss_of(plain, batch(step))
        loss.backward()
        inner.step()
        inner.zero_grad()
        results.append(loss.item())
    with only_read(tmp_path / "base"):
        with zk.deferred_init():
            model = built()
        zk.load_pretrained(model, path)
        options = {"stage": 3, "param_tier": "nvme", "optimizer_tier": "nvme", "nvme_path": tmp_path}
        optimizer = zk.ZeroOptimizer(model, make(model), **options)
        before, losses = optimizer.metrics()["nvme_in_place_nbytes"], train(model, optimizer, 2)
        unfreeze(model, optimizer)
        losses += train(model, optimizer, 2, 2)
        assert 0 < optimizer.metrics()["nvme_in_place_nbytes"] < before
        optimizer.close()
    assert losses == results


def test_a_base_in_place_needs_no_room_on_the_drive(tmp_path: Path) -> None:
    path = saved(tmp_path / "base" / "model.safetensors", weights_of("plain", torch.float32))
    _, optimizer = over(path, tmp_path / "scratch")
    room = scratch_nbytes(tmp_path / "scratch")
    optimizer.close()
    with mock.patch.object(check, "free_memory", lambda *_: {"host": 1 << 40, "nvme": room}):
        over(path, tmp_path / "scratch")[1].close()
        with pytest.raises(MemoryError, match=r"drive .* too few"):
            over(path, tmp_path / "scratch", in_place=False)
    with mock.patch.object(check, "free_memory", lambda *_: {"host": 1 << 40, "nvme": room - 1}), pytest.raises(MemoryError):
        over(path, tmp_path / "scratch")


def test_checksums_can_be_left_out(tmp_path: Path) -> None:
    path = saved(tmp_path / "base" / "model.safetensors", weights_of("plain", torch.float32))
    model, optimizer = over(path, tmp_path / "scratch", nvme_checksum=False, prefetch=0)
    train(model, optimizer, 1)
    in_silence(path)
    train(model, optimizer, 1)  # only they would tell
    tier = optimizer.tiers["nvme"]
    assert isinstance(tier, NVMeTier) and all(file.checksums is None for _, file in tier.spill.files)
    optimizer.close()
