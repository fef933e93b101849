"""What zk says: errors name what was probably meant; warnings begin with ``zk:`` and the rank, and come once."""

from __future__ import annotations

import copy
import dataclasses
import logging
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn

import zk
from tests.world import run_world
from zk.checkpoint.files import CheckpointError
from zk.logs import log, rank_log


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(2, 2)
    return model, torch.optim.AdamW(model.parameters())


@pytest.mark.parametrize(
    ("name", "said"),
    (("optimiser_tier", "closest one is 'optimizer_tier'"), ("Stage", "closest one is 'stage'"), ("xyzzy", "there are stage, dtype, ")),
)
def test_an_option_that_is_misspelt_is_told_the_closest_one(name: str, said: str) -> None:
    for call in (
        lambda: zk.ZeroOptimizer(*make(), **{name: "host"}),
        lambda: zk.ZeroConfig(**{name: "host"}),
        lambda: dataclasses.replace(zk.ZeroConfig(), **{name: "host"}),
        lambda: zk.ZeroOptimizer(*make(), zk.ZeroConfig(), **{name: "host"}),
    ):
        with pytest.raises(TypeError, match=f"no option {name!r}; .*{said}"):
            call()


def test_a_config_can_be_copied_pickled_and_replaced() -> None:
    config = zk.ZeroConfig(stage=3, dtype="bf16", keep_dtype="norm")
    assert copy.deepcopy(config) == copy.copy(config) == pickle.loads(pickle.dumps(config)) == dataclasses.replace(config) == config


def test_a_tier_is_named_by_a_word() -> None:
    with pytest.raises(ValueError, match=r"param_tier must be .*; got \['host'\]$"):
        zk.ZeroConfig(stage=3, param_tier=["host"])  # type: ignore[arg-type]


def test_arguments_that_are_swapped_are_recognised() -> None:
    model, optimizer = make()
    with pytest.raises(TypeError, match=r"model must be an nn.Module; got AdamW; the arguments are swapped: ZeroOptimizer\(model, optimizer\)"):
        zk.ZeroOptimizer(optimizer, model)  # type: ignore[arg-type]


def test_each_loader_names_the_other_one_for_its_folder(tmp_path: Path) -> None:
    model, inner = make()
    save_file({name: value.contiguous() for name, value in model.state_dict().items()}, tmp_path / "model.safetensors")
    with zk.ZeroOptimizer(model, inner) as optimizer:
        with pytest.raises(CheckpointError, match=r"neither manifest.json nor .*zk.load_pretrained reads weights"):
            optimizer.load_checkpoint(tmp_path)
        optimizer.save_checkpoint(tmp_path / "saved")
        for folder in (tmp_path / "saved", next((tmp_path / "saved").glob("step-*"))):
            with pytest.raises(FileNotFoundError, match=r"no folder with model.safetensors"):
                zk.load_pretrained(model, folder)


def test_what_zk_logs_begins_with_its_name(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    log.warning("the %s", "one")
    rank_log.error("the %s", "other")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")  # torchrun's, before ranks are joined
    log.warning("not said again")
    rank_log.warning("mine")
    assert caplog.messages == ["zk: the one", "zk: the other", "zk: rank 1: mine"]


def said_by(_: None) -> list[str]:
    """What a rank says for all of them, and of something of its own."""
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("zk").addHandler(handler)
    log.warning("for all")
    rank_log.warning("my drive")
    assert dist.get_world_size() == 2
    return heard


def test_the_first_rank_speaks_for_all_and_each_for_itself() -> None:
    ours = "zk: rank 0: for all"
    assert run_world(2, said_by, [None]) == [[[ours, "zk: rank 0: my drive"], ["zk: rank 1: my drive"]]]
