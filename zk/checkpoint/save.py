"""In: an optimizer between two steps. Out: a folder from which any world size, stage and tier goes on, whole or not there.

Every rank writes the elements it updates into one safetensors file, chunk by chunk, so that memory does not grow with the model. All goes into
a folder beside the final one, whose name it gets when every rank's bytes are on the drive; ``latest`` names it after that.
"""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from zk.checkpoint import manifest
from zk.checkpoint.files import Entry, Writer, Written, sync_folder, write_durably
from zk.parallel.partitioned import PartitionedParams

if TYPE_CHECKING:
    from zk.held import Held
    from zk.optimizer import ZeroOptimizer

log = logging.getLogger("zk")
LATEST = "latest"
PIECE_NUMEL = 1 << 21  # elements that are widened at once


def name_of(step: int) -> str:
    """The folder of a step."""
    return f"step-{step:08d}"


def own_part(held: Held, rank: int) -> slice:
    """The elements of the unit's flat buffer that this rank writes: its shard, also where others hold them too."""
    return held.layout.shard(rank)


def pieces_of(held: Held, rank: int) -> Iterator[tuple[str, slice, torch.dtype]]:
    """Kind, elements of the flat buffer and dtype of what this rank writes of a unit, in the order of ``tensors_of``."""
    part = own_part(held, rank)
    if held.shard is None:
        for start in range(part.start, part.stop, PIECE_NUMEL):
            yield "param", slice(start, min(start + PIECE_NUMEL, part.stop)), held.unit.dtype
        return
    for elements, _, _ in _cuts(held, part):
        for kind in manifest.kinds_of(held):
            yield kind, elements, held.shard.dtype_of(kind)


def _cuts(held: Held, part: slice) -> Iterator[tuple[slice, int, slice]]:
    """Elements of the flat buffer, number of the chunk, elements of the chunk."""
    assert held.shard is not None
    base = held.params.held.start
    for number, chunk in enumerate(held.shard.chunks):
        start, stop = max(part.start, base + chunk.start), min(part.stop, base + chunk.stop)
        for begin in range(start, stop, PIECE_NUMEL):
            end = min(begin + PIECE_NUMEL, stop)
            yield slice(begin, end), number, slice(begin - base - chunk.start, end - base - chunk.start)


def tensors_of(held: Held, rank: int) -> Iterator[Tensor]:
    """What ``pieces_of`` announces."""
    part = own_part(held, rank)
    if held.shard is None:
        with _resting(held) as values:
            for kind, elements, _ in pieces_of(held, rank):
                assert kind == "param"
                yield values[elements.start - part.start : elements.stop - part.start]
        return
    number: int | None = None
    with contextlib.ExitStack() as opened:
        fields: Any = None
        for _, wanted, here in _cuts(held, part):
            if wanted != number:
                opened.close()
                number, fields = wanted, opened.enter_context(held.shard.opened(wanted))
            for kind in manifest.kinds_of(held):
                yield held.shard.exact(kind, fields, here)


@contextlib.contextmanager
def _resting(held: Held) -> Iterator[Tensor]:
    """This rank's slice of parameters that are not trained."""
    if isinstance(held.params, PartitionedParams):
        yield held.params.home.open()
        held.params.home.close()
    else:
        yield held.params.full[held.layout.shard(held.comm.rank)]


def write_rank(optimizer: ZeroOptimizer, folder: Path) -> Written:
    """Write this rank's tensors and its part of the manifest; returns what is known of the latter."""
    rank, world = optimizer.comm.rank, optimizer.comm.world
    name = manifest.rank_file(rank, world)
    entries, pieces = [], []
    for number, held in enumerate(optimizer.held):
        for kind, elements, dtype in pieces_of(held, rank):
            key = f"{kind}/{number}/{elements.start}"
            entries.append(Entry(key, dtype, (elements.stop - elements.start,)))
            pieces.append([number, kind, elements.start, elements.stop, key])
    buffers = dict(_buffers(optimizer)) if rank == 0 else {}
    entries += [Entry(f"buffer/{key}", value.dtype, tuple(value.shape)) for key, value in buffers.items()]
    writer = Writer(folder / name, entries, {"format": "pt"})
    try:
        for held in optimizer.held:
            for tensor in tensors_of(held, rank):
                writer.add(tensor)
        for value in buffers.values():
            writer.add(value)
        written = writer.finish()
    except BaseException:
        writer.abort()
        raise
    return write_part(folder, rank, written, pieces, buffers, manifest.random_state())


def write_part(folder: Path, rank: int, written: Written, pieces: list[list[Any]], buffers: Iterable[str], random: dict[str, Any] | None) -> Written:
    """Write what a rank says of the file it has ``written``; returns what is known of that."""
    said = {"rank": rank, "file": written.name, "written": written.as_json(), "pieces": pieces, "buffers": sorted(buffers), "random": random}
    data = json.dumps(said, separators=(",", ":")).encode()
    part = Path(written.name).with_suffix(".json").name
    write_durably(folder / part, data)
    return _small(part, data)


def _small(name: str, data: bytes) -> Written:
    from zk.checkpoint.files import BLOCK_NBYTES

    return Written(name, len(data), tuple(zlib.crc32(data[at : at + BLOCK_NBYTES]) for at in range(0, len(data), BLOCK_NBYTES)))


def _buffers(optimizer: ZeroOptimizer) -> Iterator[tuple[str, Tensor]]:
    """Buffers that state_dict() has, by name, once each."""
    for prefix, module in optimizer.model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer


def save(optimizer: ZeroOptimizer, root: Path, scheduler: Any, extra: Any, keep: int | None) -> Path:
    """Write a checkpoint; returns its folder. All ranks call it; all raise if one of them fails, and nothing of it is left then."""
    comm = optimizer.comm
    step = int(optimizer.counters["steps"])
    final, beside = places_of(root, step)
    head = manifest.of_optimizer(optimizer)
    head["scheduler"] = manifest.plain(scheduler.state_dict(), "scheduler.state_dict()") if scheduler is not None else None
    head["extra"] = manifest.plain(extra, "extra")
    with _together(optimizer, f"saving {final}"):
        if comm.rank == 0:
            begin(beside)
    try:
        with _together(optimizer, f"saving {final}"):
            write_rank(optimizer, beside)
        with _together(optimizer, f"saving {final}"):
            if comm.rank == 0:
                publish(root, beside, final, head, comm.world, keep)
    except BaseException:
        if comm.rank == 0:
            shutil.rmtree(beside, ignore_errors=True)
        raise
    return final


def places_of(root: Path, step: int) -> tuple[Path, Path]:
    """The folder of a step, and the one beside it that it is until it is whole."""
    return root / name_of(step), root / f".{name_of(step)}.partial"


def begin(beside: Path) -> None:
    """Make the folder that is written into; what a crash left there goes."""
    beside.parent.mkdir(parents=True, exist_ok=True)
    if beside.exists():
        shutil.rmtree(beside)
    beside.mkdir()


def publish(root: Path, beside: Path, final: Path, head: dict[str, Any], world: int, keep: int | None) -> None:
    """The manifest, the final name, ``latest``, and only then what is too old."""
    parts = []
    for rank in range(world):
        name = Path(manifest.rank_file(rank, world)).with_suffix(".json").name
        data = (beside / name).read_bytes()
        parts.append((_small(name, data), json.loads(data)["written"]))
    head["parts"], head["files"] = [part.as_json() for part, _ in parts], [written for _, written in parts]
    write_durably(beside / manifest.MANIFEST, json.dumps(head, indent=1).encode())
    sync_folder(beside)
    replaced = root / f".{final.name}.replaced"
    if final.exists():  # the same step again
        shutil.rmtree(replaced, ignore_errors=True)
        final.rename(replaced)
    beside.rename(final)
    sync_folder(root)
    write_durably(root / LATEST, final.name.encode() + b"\n")
    shutil.rmtree(replaced, ignore_errors=True)
    if keep is not None:
        for old in sorted(folder for folder in root.glob("step-*") if (folder / manifest.MANIFEST).exists())[:-keep]:
            if old != final:
                shutil.rmtree(old, ignore_errors=True)


@contextlib.contextmanager
def _together(optimizer: ZeroOptimizer, what: str) -> Iterator[None]:
    """What fails on one rank fails on all."""
    failure: BaseException | None = None
    try:
        yield
    except Exception as error:
        failure = error
    failed = torch.tensor([float(failure is not None)], dtype=torch.float64)
    optimizer.comm.all_reduce(failed)
    if failure is not None:
        raise failure
    if failed.item():
        raise RuntimeError(f"{what} failed on {int(failed.item())} other rank{'s' * (failed.item() > 1)}; see the error there")


def latest(root: Path) -> Path | None:
    """The newest whole checkpoint in ``root``, or None. What a crash left unfinished is passed over."""
    with contextlib.suppress(OSError):
        named = root / (root / LATEST).read_text().strip()
        if (named / manifest.MANIFEST).exists():
            return named
    whole = sorted(folder for folder in root.glob("step-*") if (folder / manifest.MANIFEST).exists())
    return whole[-1] if whole else None


