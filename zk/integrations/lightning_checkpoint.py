"""One folder with Lightning's own dict and the state of a ZeroOptimizer, from which any number of ranks, stage and tier goes on.

    name.ckpt/lightning.ckpt     loops, callbacks, schedulers, hparams: all but weights and optimizer, and which step belongs to it
    name.ckpt/step-00000012/     what ZeroOptimizer.save_checkpoint writes
    name.ckpt/latest

``lightning.ckpt`` is written last, and at once: a crash leaves the folder as it was before, or without it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors.torch import load_file

from zk.checkpoint import load
from zk.checkpoint.export import export
from zk.checkpoint.files import CheckpointError
from zk.checkpoint.manifest import Manifest
from zk.checkpoint.save import buffers_of
from zk.core.options import parse_dtype
from zk.nn.tiles import pieces_of
from zk.optimizer import ZeroOptimizer

REST = "lightning.ckpt"
_STEP = "zk_step"  # in the rest: the name of the folder with the tensors


class Elsewhere(MutableMapping[str, Any]):
    """Stands for ``checkpoint["state_dict"]`` of a folder: empty, and CheckpointError when it is read or changed, which would do nothing."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def refuse(self, *_: Any) -> NoReturn:
        raise CheckpointError(
            f"{self.folder} is a folder: every rank reads its part of the weights after on_load_checkpoint, which can neither read nor change "
            "them in checkpoint['state_dict']. Do it only if checkpoint['state_dict'] is not empty, or make the folder one file with "
            "zk.integrations.lightning.consolidate and change that"
        )

    __getitem__ = __setitem__ = __delitem__ = copy = refuse

    def __iter__(self) -> Iterator[str]:
        self.refuse()

    def __len__(self) -> int:
        return 0


def check_names(optimizer: ZeroOptimizer, folder: Path) -> None:
    """CheckpointError if a model has other parameters or buffers than a folder: these are never loaded in part."""
    manifest = Manifest.read(load.find(folder))
    saved, tiles = {*manifest.weights(), *manifest.buffers()}, pieces_of(optimizer.model)
    mine = {tiles[name].whole if name in tiles else name for held in optimizer.held for name in held.unit.names}
    mine.update(name for name, _ in buffers_of(optimizer))
    if saved != mine:
        names = ", ".join(map(repr, sorted(saved ^ mine)[:3]))
        raise CheckpointError(
            f"{folder} and this model differ in {len(saved ^ mine)} names ({names}), and strict_loading=False is not for zk's folders. Make it "
            "one file with zk.integrations.lightning.consolidate: validate, test and predict take that as ckpt_path; before fit, load its "
            "'state_dict' with strict=False yourself"
        )


def local(path: str | os.PathLike[str]) -> Path:
    """A path on a file system. ValueError for an address elsewhere."""
    if "://" in os.fspath(path):
        raise ValueError(f"a checkpoint of partitioned state is a folder on a file system that all ranks see; got {os.fspath(path)!r}")
    return Path(path)


def save(optimizer: ZeroOptimizer, path: Any, rest: Mapping[str, Any], write: Callable[[Mapping[str, Any], Path], None]) -> None:
    """Write both, on all ranks. ``write(dict, path)`` is called on the first rank."""
    path, first = local(path), optimizer.comm.rank == 0
    if first and path.is_file():
        path.unlink()
    step = optimizer.save_checkpoint(path)
    assert step is not None
    if first:
        write({**rest, _STEP: step.name}, path / REST)
        for old in path.glob("step-*"):
            if old != step:
                shutil.rmtree(old)


def read(path: Any, load_rest: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[dict[str, Any], Path]:
    """The rest, by ``load_rest(file, ...)``, and the folder with the tensors that belong to it. CheckpointError for a folder without."""
    path = Path(path)
    if not (path / REST).is_file():
        raise CheckpointError(
            f"{path} is a folder without {REST}: not a whole checkpoint of zk's strategies for Lightning. One of "
            "ZeroOptimizer.save_checkpoint alone has no state of a Trainer; other strategies' folders are read by those"
        )
    rest = load_rest(path / REST, *args, **kwargs)
    step = rest.pop(_STEP, None)
    if step is None:
        raise CheckpointError(f"{path / REST} was not written by zk: it names no step")
    return rest, load.find(path / step)


def consolidate(
    checkpoint: str | os.PathLike[str], out: str | os.PathLike[str], dtype: str | torch.dtype | None = "fp32", *, weights_only: bool = True
) -> None:
    """Make a folder that a Trainer with one of zk's strategies has saved one plain file, with the weights under ``state_dict``.

    ``LightningModule.load_from_checkpoint(out)`` and ``trainer.test(ckpt_path=out)`` of any strategy read it. Optimizer state is left
    out. The weights are in host memory meanwhile; ``python -m zk export CHECKPOINT OUT`` writes safetensors without that.

    Args:
        dtype: of the weights: "fp32" gives the masters; None what each was trained in.
        weights_only: as for torch.load; False where hparams or callbacks hold objects of classes of their own, and the source is trusted.

    Raises ValueError if ``checkpoint`` is not such a folder, is not whole, or ``out`` exists.
    """
    source, target = local(checkpoint), local(out)
    if target.exists():
        raise ValueError(f"{target} exists; name a new file")
    rest, step = read(source, torch.load, map_location="cpu", weights_only=weights_only)
    beside = target.with_name(f".{target.name}.partial")
    shutil.rmtree(beside, ignore_errors=True)
    try:
        written = export(step, beside / "model", parse_dtype(dtype, "dtype") if dtype is not None else None)
        weights = {name: tensor for file in written.files for name, tensor in load_file(file).items()}
        for name, kept in written.tied.items():
            weights[name] = weights[kept]
        rest.pop("optimizer_states", None)
        torch.save({**rest, "state_dict": weights}, beside / "file")
        (beside / "file").rename(target)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
