"""Weights from files: read as ``from_pretrained`` reads them; frozen ones in place, with the same training as over copies."""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import json
import logging
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import zk
from tests.alive import drive_without_delay
from tests.models import GPT, batch, loss_of, train
from tests.plain import train_plain
from tests.world import run_world
from zk.checkpoint.files import DTYPE_OF
from zk.offload import nvme

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
    """Losses over a base in place, and what is not as it is over a copy, on this rank."""
    variant, dtype, folder = case
    world, rank = (torch.distributed.get_world_size(), torch.distributed.get_rank()) if torch.distributed.is_initialized() else (1, 0)
    found, results = list[str](), {}
    for in_place in (False, True):
        model, optimizer = over(folder / "base", folder / f"scratch-{in_place}", in_place, lambda: built(variant), dtype=dtype)
        losses = []
        for step in range(STEPS):
            loss = loss_of(model, batch(1000 * step + rank))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        results[in_place] = losses, values_of(model), optimizer.metrics()
        optimizer.close()
    copied, in_place = results[False], results[True]
    base = in_place[2]["nvme_in_place_nbytes"]
    frozen = sum(param.numel() for param in built(variant).parameters() if not param.requires_grad) * (2 if dtype == "bf16" else 4)
    found += ["other losses"] * (copied[0] != in_place[0])
    found += [name for name, value in copied[1].items() if not torch.equal(value, in_place[1][name])]
    found += [f"{base} bytes are in place of {frozen}"] * (not frozen / world <= base <= 1.2 * frozen / world + 8192)
    found += ["bytes of parameters"] * (copied[2]["nvme_param_nbytes"] != base + in_place[2]["nvme_param_nbytes"])
    found += ["the base was written"] * (copied[2]["evicted_nbytes"] - in_place[2]["evicted_nbytes"] < base)
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


def test_codes_of_one_byte_and_halves_of_tiles_are_read_in_place(tmp_path: Path) -> None:
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

    with mock.patch("zk.nn.conversion.identity_of", elsewhere), mock.patch.object(nvme, "identity_of", elsewhere):
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


# ---- as from_pretrained reads them -------------------------------------------------------------------------------------------


def read_as_transformers_does(case: tuple[str, str, Path]) -> list[str]:
    """The names of what has other values than from_pretrained gives, made at stage 3 and read again into what is held."""
    families = pytest.importorskip("tests.integrations.families")
    kind, tier, folder = case
    with zk.deferred_init():
        model = families.FOLDERS[kind][1]()
    want = type(model).from_pretrained(folder / "published", config=model.config).state_dict()
    options = {"param_tier": tier, "optimizer_tier": tier, "nvme_path": folder if tier == "nvme" else None}
    zk.load_pretrained(model, folder / "published")
    optimizer = zk.ZeroOptimizer(model, adamw(model.parameters()), stage=3, **options)
    values = [dict(optimizer.consolidated_state_dict())]
    with zk.gather(model.parameters(), write=True), torch.no_grad():
        for param in model.parameters():
            param.zero_()
    zk.load_pretrained(model, folder / "published")
    values.append(dict(optimizer.consolidated_state_dict()))
    optimizer.close(gather=True)
    if not torch.distributed.is_initialized():
        model.save_pretrained(folder / "saved")
        values.append(type(model).from_pretrained(folder / "saved", config=model.config).state_dict())
    return [name for found in values if found for name in want if not torch.equal(found[name], want[name])]


FOLDERS = ("mixtral", "qwen3-moe", "llava", "qwen2-vl", "a base into a tied head", "a head into a base", "tied")


def published(kind: str, folder: Path) -> Path:
    families = pytest.importorskip("tests.integrations.families")
    torch.manual_seed(0)
    families.FOLDERS[kind][0]().save_pretrained(folder / "published")
    return folder / "published"


@pytest.mark.parametrize("tier", ("host", "nvme"))
@pytest.mark.parametrize("kind", FOLDERS)
def test_a_folder_of_transformers_is_read_as_from_pretrained_reads_it(kind: str, tier: str, tmp_path: Path) -> None:
    published(kind, tmp_path)
    assert read_as_transformers_does((kind, tier, tmp_path)) == []


def test_over_ranks_folders_are_read_as_from_pretrained_reads_them(tmp_path: Path) -> None:
    cases = [(kind, tier, tmp_path / kind) for kind in FOLDERS for tier in ("host", "nvme")]
    for kind, _, folder in cases[::2]:
        published(kind, folder)
    assert run_world(2, read_as_transformers_does, cases) == [[[], []] for _ in cases]


@pytest.mark.parametrize("kind", ("llava", "mixtral"))
def test_a_renamed_base_is_read_in_place_and_a_converted_one_copied(kind: str, tmp_path: Path) -> None:
    families = pytest.importorskip("tests.integrations.families")
    files = published(kind, tmp_path)

    def make() -> nn.Module:
        model = families.FOLDERS[kind][1]().requires_grad_(False)
        model.lm_head.requires_grad_(True)
        return model

    with only_read(files):
        model, optimizer = over(files, tmp_path / "scratch", make=make)
        want = type(model).from_pretrained(files).state_dict()
        assert all(torch.equal(value, want[name]) for name, value in values_of(model).items())
        frozen = sum(param.nbytes for param in model.parameters() if not param.requires_grad)
        in_place = optimizer.metrics()["nvme_in_place_nbytes"]
        assert in_place >= frozen if kind == "llava" else 0 < in_place < frozen / 10
        optimizer.close()


def test_what_does_not_fit_a_model_of_transformers_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    families = pytest.importorskip("tests.integrations.families")
    weights = load_file(published("mixtral", tmp_path) / "model.safetensors")
    layer = "model.layers.1.block_sparse_moe.experts."

    def refused(says: str, tensors: dict[str, Tensor], make: Callable[[], nn.Module] = families.mixtral) -> None:
        files = saved(tmp_path / "changed.safetensors", tensors)
        with pytest.raises(ValueError, match=says):
            zk.load_pretrained(make(), files)

    refused(r"experts\.0\.w1\.weight cannot be converted", {name: value for name, value in weights.items() if name != f"{layer}3.w1.weight"})
    renamed = {name.replace("model.norm", "model.norms"): value for name, value in weights.items()}
    refused(r"missing: model\.norm\.weight \(closest: model\.norms\.weight\)", renamed)
    lacking = {name: value for name, value in weights.items() if not name.startswith(layer)}
    refused(r"missing: model\.layers\.1\.mlp\.experts\.gate_up_proj, .* \(strict=False ignores", lacking)
    zk.load_pretrained(families.mixtral(), saved(tmp_path / "lacking.safetensors", lacking), strict=False)
    assert "trained parameters keep the values" in caplog.text and "model.layers.1.mlp.experts.down_proj" in caplog.text
    tied = load_file(published("tied", tmp_path) / "model.safetensors")
    refused("one tensor where .* differ: shared.weight and lm_head.weight", tied | {"lm_head.weight": tied["shared.weight"] + 1}, families.t5)
    pickled = (tmp_path / "published" / "model.safetensors").rename(tmp_path / "published" / "pytorch_model.bin")
    for path in (pickled, pickled.parent):
        with pytest.raises(ValueError, match=r"pytorch_model\.bin is a pickle; convert it once"):
            zk.load_pretrained(families.t5(), path)
    monkeypatch.setitem(sys.modules, "transformers.conversion_mapping", None)  # as before 5.0
    zk.load_pretrained(families.t5(), saved(tmp_path / "same.safetensors", tied))
    refused(r"transformers >= 5\.0 converts them", weights)
