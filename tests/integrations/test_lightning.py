"""A Trainer with one of zk's strategies ends where the stock Trainer ends. The same for Fabric, for two ranks, and for what is between: checkpoints.

How close, to what (the CPU update is the engine whose bits are torch's):

| case | compared with | difference of losses |
|---|---|---|
| fp32, any stage and tier, accumulation, resumed | stock Trainer, AdamW | none |
| clipping | stock Trainer | 1e-6: torch sums the norm in fp32, zk in fp64 |
| two ranks | stock DDP on two ranks | none; with accumulation at stages 2 and 3, and with clipping, 1e-6: another order of sums |
| bf16-mixed, bf16-true | plain PyTorch: bf16 parameters, fp32 masters, autocast or not | none |
| bf16-mixed | stock Trainer: fp32 parameters, autocast | 5e-3: norms and biases of the forward are rounded to bf16 |
"""

from __future__ import annotations

import contextlib
import copy
import csv
import functools
import logging
import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import zk
from tests.models import DEVICE, GPT, VOCAB, batch, loss_of
from tests.plain import train_plain
from tests.programs import rank_of, run
from tests.world import run_world

lightning = pytest.importorskip("lightning")

import lightning as L  # noqa: E402
from lightning.pytorch.callbacks import (  # noqa: E402
    BaseFinetuning,
    Callback,
    EMAWeightAveraging,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelPruning,
    ModelSummary,
    StochasticWeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger  # noqa: E402
from lightning.pytorch.tuner import Tuner  # noqa: E402

import zk.integrations.lightning as zl  # noqa: E402

pytestmark = [pytest.mark.usefixtures("one_thread", "torch_engine"), pytest.mark.filterwarnings("ignore")]
for name in ("lightning.pytorch", "lightning.fabric", "pytorch_lightning", "lightning_fabric"):
    logging.getLogger(name).setLevel(logging.ERROR)

ROOT = Path(__file__).parents[2]
STEPS, EPOCH = 6, 4
ROWS = TensorDataset(torch.cat([batch(1000 * step) for step in range(EPOCH)]))


class Language(L.LightningModule):
    """Keeps its losses."""

    def __init__(self, lr: float = 1e-2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model: Any = GPT()
        self.losses: list[float] = []

    def forward(self, ids: Any) -> Any:
        return self.model(ids)

    def training_step(self, rows: Any, index: int) -> Any:
        loss = loss_of(self, rows[0])
        self.losses.append(loss.item())
        self.log("loss", loss)
        return loss

    def validation_step(self, rows: Any, index: int) -> None:
        self.log("val", loss_of(self.model, rows[0]), sync_dist=True)

    test_step = validation_step

    def predict_step(self, rows: Any, index: int) -> Any:
        return self.model(rows[0])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 8)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Constant(Language):
    """Without a schedule, which would hide a lost step, and would set rates anew after a resume."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]  # by epoch


def rows(size: int = 2) -> Any:
    return DataLoader(ROWS, size)


def trainer(strategy: Any = "auto", steps: int = STEPS, **kwargs: Any) -> Any:
    saves = any(isinstance(callback, ModelCheckpoint) for callback in kwargs.get("callbacks", ()))
    quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": saves, "enable_model_summary": False}
    common = {"accelerator": DEVICE.type, "devices": 1, "max_steps": steps, "strategy": strategy, "num_sanity_val_steps": 1}
    return L.Trainer(**{**common, **quiet, **kwargs})


def fit(strategy: Any = "auto", steps: int = STEPS, module: type[Language] = Language, seed: int = 0, ckpt: Any = None, **kwargs: Any) -> Any:
    """A fitted module; its Trainer is ``module.trainer``."""
    torch.manual_seed(seed)
    made = module()
    trainer(strategy, steps, **kwargs).fit(made, rows(), rows(), ckpt_path=ckpt)
    return made


@functools.cache
def stock(**kwargs: Any) -> Any:
    return fit(**kwargs)


def same_weights(one: Any, other: Any) -> bool:
    ours, theirs = one.state_dict(), other.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)


def host(stage: int, **kwargs: Any) -> Any:
    return zl.ZeroStrategy(stage=stage, optimizer_tier="host", **({"param_tier": "host"} if stage == 3 else {}), **kwargs)


@pytest.fixture(autouse=True)
def drive(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the nvme tier: the one in which one rank on a CPU has its parameters elsewhere, too."""
    folder = tmp_path_factory.mktemp("drive")
    monkeypatch.setenv("ZK_NVME_PATH", str(folder))
    return folder


# ---- training --------------------------------------------------------------------------------------------------------------------


ON_DEVICE = ("zk_stage_2_offload", "zk_stage_3_offload", "zk_stage_3_offload_nvme")


@pytest.mark.parametrize("strategy", [pytest.param(name, marks=[pytest.mark.device] * (name in ON_DEVICE)) for name in zl.NAMES])
def test_every_name_trains_the_bits_of_the_stock_trainer_and_leaves_a_plain_model(strategy: str) -> None:
    reference = stock()
    module = fit(strategy)
    assert module.losses == reference.losses and len(set(module.losses)) == STEPS
    assert module.trainer.callback_metrics["val"] == reference.trainer.callback_metrics["val"]
    assert same_weights(module, reference)
    ids = batch(3).to(next(reference.parameters()).device)  # Lightning leaves models of a GPU in host memory
    assert torch.equal(module(ids), reference(ids))
    assert module.trainer.strategy.model is module and module.trainer.optimizers[0].closed


@pytest.mark.parametrize(
    ("kwargs", "tolerance"),
    [
        ({"accumulate_grad_batches": 2, "steps": 3}, 0.0),
        ({"gradient_clip_val": 0.3, "accumulate_grad_batches": 3, "steps": 3}, 1e-6),
        ({"module": Constant, "steps": 9}, 0.0),
    ],
)
def test_accumulation_clipping_and_schedules_by_epoch_are_those_of_the_stock_trainer(kwargs: Any, tolerance: float) -> None:
    reference = fit(**kwargs)
    assert reference.losses[: len(stock().losses)] != stock().losses[: len(reference.losses)]
    for stage in (2, 3):
        module = fit(host(stage), **kwargs)
        assert module.losses == pytest.approx(reference.losses, abs=tolerance, rel=0), stage


@pytest.mark.device
def test_with_the_update_beside_training_the_bits_are_the_same() -> None:
    for stage in (2, 3):
        assert fit(host(stage, overlap_step=True)).losses == stock().losses


def test_a_drive_needs_a_path_and_is_empty_at_the_end(drive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = zl.ZeroStrategy(stage=3, param_tier="nvme", optimizer_tier="nvme", nvme_path=tmp_path)
    assert fit(strategy).losses == stock().losses
    assert not list(tmp_path.iterdir()) and not list(drive.iterdir())
    monkeypatch.delenv("ZK_NVME_PATH")
    with pytest.raises(ValueError, match="ZK_NVME_PATH"):
        trainer("zk_stage_3_offload_nvme")


def test_where_the_whole_model_has_no_room_it_stays_partitioned_and_says_so(
    drive: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("zk.integrations.lightning_strategy.host_memory", lambda: (1 << 30, 4 * 9386 * 2 - 1))  # half of it must do
    module = fit("zk_stage_3_offload_nvme")
    assert "can be read no more" in caplog.text and "gather_at_end=True" in caplog.text
    with pytest.raises(RuntimeError, match="partitioned when the optimizer was closed"):
        module(batch(3))
    assert same_weights(fit("zk_stage_2"), stock())
    asked_for = zl.ZeroStrategy(stage=3, param_tier="nvme", optimizer_tier="nvme", nvme_path=drive, gather_at_end=True)
    assert same_weights(fit(asked_for), stock())


@pytest.mark.device
@pytest.mark.parametrize(("precision", "autocast"), [("bf16-mixed", True), ("bf16-true", False)])
def test_bf16_has_fp32_masters_and_the_bits_of_plain_pytorch_that_has_them(precision: str, autocast: bool) -> None:
    torch.manual_seed(0)
    model = GPT()

    def forward(plain: Any, ids: Any, step: int) -> Any:
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=autocast):
            return loss_of(plain, ids)

    losses, _, masters, _ = train_plain(model, lambda params: torch.optim.AdamW(params, 1e-2), dtype=torch.bfloat16, steps=EPOCH, forward=forward)
    for stage in (2, 3):
        module = fit(host(stage), EPOCH, NoSchedule, precision=precision)
        assert module.losses == losses
        for param, master in zip(module.parameters(), masters, strict=True):
            master = master.to(param.device)
            assert torch.equal(param, master if autocast else master.bfloat16())  # a mixed model is an fp32 one, as Lightning's is
    if autocast:
        assert losses == pytest.approx(fit(steps=EPOCH, module=NoSchedule, precision=precision).losses, abs=5e-3)


class NoSchedule(Language):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Normalized(NoSchedule):
    """Also: statistics that run."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(VOCAB)
        self.norm.running_mean.fill_(64.0)  # whose steps bf16 cannot take from here

    def forward(self, ids: Any) -> Any:
        logits = self.model(ids)
        return self.norm(logits.flatten(0, 1)).view(logits.shape)


def test_running_statistics_are_fp32_under_bf16_mixed_as_without_a_strategy() -> None:
    plain = fit(module=Normalized, precision="bf16-mixed").norm
    for strategy in ("zk_stage_2_offload", "zk_stage_3"):
        norm = fit(strategy, module=Normalized, precision="bf16-mixed").norm
        for name, buffer in plain.named_buffers():
            assert getattr(norm, name).dtype == buffer.dtype
            assert getattr(norm, name).tolist() == pytest.approx(buffer.tolist(), abs=5e-2, rel=5e-3), name


@pytest.mark.device
def test_fp16_has_one_loss_scale_which_zk_moves() -> None:
    module = fit(zl.ZeroStrategy(stage=3, loss_scale=zk.DynamicLossScale(init=2.0**24, hysteresis=1)), 8, NoSchedule, precision="16-true")
    metrics = module.trainer.optimizers[0].counters
    assert 1 <= metrics["skipped_steps"] <= 7 and metrics["steps"] == 8 - metrics["skipped_steps"]
    reference = fit(steps=EPOCH, module=NoSchedule).losses
    assert fit(host(2, loss_scale=1024.0), EPOCH, NoSchedule, precision="16-true").losses == pytest.approx(reference, abs=0.02)
    with pytest.raises(ValueError, match="leave one out"):
        trainer(zl.ZeroStrategy(dtype="fp16"), precision="bf16-true")
    with pytest.raises(ValueError, match=r"computes in 16 bits.*leave one out"):
        trainer(zl.ZeroStrategy(stage=3, dtype="bf16", compute_dtype="fp32"), precision="bf16-mixed")


def test_dtype_given_to_the_strategy_alone_is_taken() -> None:
    assert fit(host(2, dtype="bf16"), EPOCH, NoSchedule).losses == fit(host(3), EPOCH, NoSchedule, precision="bf16-true").losses


class Manual(Language):
    """Also: what is called on Lightning's wrapper of an optimizer must reach it."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, rows: Any, index: int) -> None:
        optimizer: Any = self.optimizers()
        loss = super().training_step(rows, index)
        optimizer.zero_grad()
        self.manual_backward(loss)
        if isinstance(optimizer, zk.ZeroOptimizer):
            optimizer.clip_grad_norm_(0.5)
        else:
            self.clip_gradients(optimizer, 0.5, "norm")
        optimizer.step()
        self.lr_schedulers().step()


def test_manual_optimization_clips_and_steps_as_the_stock_trainer_does() -> None:
    reference = fit(module=Manual)
    assert fit("zk_stage_3_offload", module=Manual).losses == pytest.approx(reference.losses, abs=1e-6, rel=0)
    assert reference.losses[-1] != pytest.approx(stock().losses[-1], abs=1e-4)
    assert fit(host(3), module=Manual, precision="16-true").losses[-1] == pytest.approx(reference.losses[-1], abs=0.1)


def test_clipping_by_value_is_that_of_the_stock_trainer() -> None:
    clip = {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"}
    reference = fit(**clip).losses
    assert fit("zk_stage_2", **clip).losses == pytest.approx(reference, abs=1e-6, rel=0)
    assert reference[-1] != pytest.approx(stock().losses[-1], abs=1e-4)


class Skips(Language):
    def training_step(self, rows: Any, index: int) -> Any:
        return None if index % 3 == 1 else super().training_step(rows, index)


def test_a_training_step_that_returns_nothing_changes_nothing() -> None:
    assert fit("zk_stage_3_offload_nvme", module=Skips).losses == fit(module=Skips).losses


class Direct(Language):
    """Uses weights in its steps themselves, outside the forward of any module."""

    def training_step(self, rows: Any, index: int) -> Any:
        (ids,) = rows
        hidden = torch.nn.functional.embedding(ids[:, :-1], self.model.tokens.weight)
        loss = torch.nn.functional.cross_entropy((hidden @ self.model.head.weight.T).flatten(0, 1), ids[:, 1:].flatten())
        self.log("val", loss)
        self.losses.append(loss.item())
        return loss

    validation_step = training_step


def test_a_step_may_use_weights_outside_of_any_forward() -> None:
    assert fit("zk_stage_3_offload_nvme", module=Direct).losses == fit(module=Direct).losses


class Configured(Language):
    def __init__(self) -> None:
        super().__init__()
        self.model = None

    def configure_model(self) -> None:
        if self.model is None:
            torch.manual_seed(7)
            self.model = GPT()
            self.was_deferred = self.model.norm.weight.device.type == "meta"


@pytest.mark.device
def test_configure_model_builds_without_memory_and_trains_the_same(tmp_path: Path) -> None:
    reference = fit(module=Configured)
    for strategy in ("zk_stage_2_offload", "zk_stage_3_offload_nvme"):
        module = fit(strategy, module=Configured)
        assert module.was_deferred and module.losses == reference.losses
    reference.trainer.save_checkpoint(tmp_path / "stock.ckpt")
    fresh = Configured()
    result = trainer("zk_stage_3").validate(fresh, rows(), ckpt_path=tmp_path / "stock.ckpt", verbose=False)
    assert result == trainer().validate(reference, rows(), verbose=False) and same_weights(fresh, reference)


# ---- outside of training ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["zk_stage_2", "zk_stage_3_offload_nvme"])
def test_validate_test_and_predict_work_before_and_after_fit_and_leave_the_weights_alone(strategy: str) -> None:
    torch.manual_seed(0)
    module, plain = Language(), Language()
    plain.load_state_dict(module.state_dict())
    ours, stocks = trainer(strategy, precision="bf16-mixed"), trainer()
    assert ours.validate(module, rows(), verbose=False)[0]["val"] == pytest.approx(stocks.validate(plain, rows(), verbose=False)[0]["val"], abs=0.02)
    assert same_weights(module, plain)  # to the bit, though it was computed in bf16
    ours, stocks = trainer(strategy), trainer()
    for one, other in ((ours, module), (stocks, plain)):
        one.fit(other, rows())
    assert ours.test(module, rows(), verbose=False) == stocks.test(plain, rows(), verbose=False)
    for one, other in zip(ours.predict(module, rows()), stocks.predict(plain, rows()), strict=True):
        assert torch.equal(one, other)


def test_the_summary_counts_partitioned_parameters() -> None:
    seen = []

    class Summary(ModelSummary):
        @staticmethod
        def summarize(summary_data: Any, total_parameters: int, trainable_parameters: int, model_size: float, *args: Any, **kwargs: Any) -> None:
            seen.append((total_parameters, trainable_parameters, model_size))

    for strategy in ("auto", "zk_stage_3_offload_nvme"):
        fit(strategy, 1, callbacks=[Summary()])
    assert seen[0] == seen[1] and seen[0][0] > 9000


def test_metrics_reach_the_loggers_at_every_so_many_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fit("zk_stage_3_offload", callbacks=[zl.ZeroMetrics()], logger=CSVLogger(tmp_path / "rates"), log_every_n_steps=2)
    with open(tmp_path / "rates" / "lightning_logs" / "version_0" / "metrics.csv") as file:
        lines = [line for line in csv.DictReader(file) if line["zk/step_s"]]
    assert len(lines) == STEPS // 2 and "zk/steps" not in lines[0] and all(float(line["zk/step_s"]) > 0 for line in lines)
    monkeypatch.setenv("ZK_METRICS", "all")
    loggers = [CSVLogger(tmp_path), TensorBoardLogger(tmp_path / "board")]
    fit("zk_stage_3_offload", callbacks=[zl.ZeroMetrics(), LearningRateMonitor()], logger=loggers, log_every_n_steps=2)
    with open(tmp_path / "lightning_logs" / "version_0" / "metrics.csv") as file:
        lines = [line for line in csv.DictReader(file) if line["zk/steps"]]
    assert [(line["step"], line["zk/steps"]) for line in lines] == [(str(2 * i + 1), f"{2 * i + 2}") for i in range(STEPS // 2)]
    assert all(float(line["zk/grad_norm"]) > 0 and float(line["zk/host_moments_nbytes"]) > 0 for line in lines)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(next((tmp_path / "board").rglob("events*")).parent)).Reload()
    assert [event.value for event in events.Scalars("zk/grad_norm")] == pytest.approx([float(line["zk/grad_norm"]) for line in lines])
    with pytest.raises(RuntimeError, match="ZeroMetrics"):
        fit(callbacks=[zl.ZeroMetrics()])


def test_zk_adds_no_warning_to_lightnings_own() -> None:
    heard = []
    for strategy in ("auto", "zk_stage_3_offload_nvme"):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fit(strategy, precision="bf16-mixed")
        heard.append({str(warning.message) for warning in caught})
    assert heard[1] <= heard[0]


# ---- checkpoints -----------------------------------------------------------------------------------------------------------------


def saved(folder: Path, strategy: Any, at: int, **kwargs: Any) -> Path:
    fit(strategy, at + 1, callbacks=[ModelCheckpoint(folder, "at", every_n_train_steps=at, save_top_k=-1)], **kwargs)
    return folder / "at.ckpt"


@pytest.mark.parametrize("at", [3, EPOCH])
def test_a_run_resumed_at_any_stage_or_by_or_from_the_stock_trainer_is_the_same_to_the_bit(tmp_path: Path, at: int) -> None:
    folder, file = saved(tmp_path / "zk", "zk_stage_3_offload", at), saved(tmp_path / "stock", "auto", at)
    assert folder.is_dir() and file.is_file()
    reference = fit(ckpt=file, seed=5)
    assert len(reference.losses) == STEPS - at
    for strategy, source in (("zk_stage_3_offload_nvme", folder), ("zk_stage_1", folder), ("zk_stage_3", file)):
        module = fit(strategy, ckpt=source, seed=5)
        assert module.losses == reference.losses and same_weights(module, reference), (strategy, source)
    bf16 = saved(tmp_path / "bf16", "zk_stage_2", at, precision="bf16-mixed")
    going_on = [fit(strategy, ckpt=bf16, seed=5, precision="bf16-mixed").losses for strategy in ("zk_stage_2", "zk_stage_3_offload")]
    assert going_on[0] == going_on[1] and len(going_on[0]) == STEPS - at


def test_old_checkpoints_are_removed_and_the_last_is_a_link(tmp_path: Path) -> None:
    callback = ModelCheckpoint(tmp_path, "{step}", monitor="loss", mode="max", save_top_k=2, every_n_train_steps=2, save_last="link")
    module = fit("zk_stage_3_offload", callbacks=[callback])
    found = sorted(path.name for path in tmp_path.iterdir())
    assert len(found) == 3 and found[0] == "last.ckpt" and (tmp_path / "last.ckpt").is_symlink()
    assert sorted(Path(path).name for path in callback.best_k_models) == found[1:]
    assert sorted(path.name for path in Path(callback.best_model_path).iterdir())[:2] == ["latest", "lightning.ckpt"]
    result = trainer("zk_stage_2").validate(Language(), rows(), ckpt_path=callback.last_model_path, verbose=False)
    assert result[0]["val"] == pytest.approx(trainer().validate(module, rows(), verbose=False)[0]["val"], abs=1.0)
    strategy = trainer("zk").strategy
    strategy.remove_checkpoint(callback.last_model_path)
    assert not (tmp_path / "last.ckpt").exists() and Path(callback.best_model_path).exists()


def test_saving_to_the_same_path_again_replaces_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "here.ckpt"
    path.write_bytes(b"a file")

    class Saves(L.Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            trainer.save_checkpoint(path)

    fit("zk_stage_2", callbacks=[Saves()])
    assert sorted(file.name for file in path.iterdir()) == ["latest", "lightning.ckpt", f"step-{STEPS:08d}"]
    assert same_weights(fit("zk_stage_3", ckpt=path, seed=4), stock())


def test_weights_come_out_as_a_file_that_plain_lightning_loads(tmp_path: Path) -> None:
    callbacks = [
        ModelCheckpoint(tmp_path, "folder", every_n_train_steps=STEPS),
        ModelCheckpoint(tmp_path, "only", every_n_train_steps=STEPS, save_weights_only=True, monitor="loss"),
    ]
    module = fit("zk_stage_3_offload_nvme", callbacks=callbacks, precision="bf16-mixed")
    module.trainer.save_checkpoint(tmp_path / "after.ckpt")
    zl.consolidate(tmp_path / "folder.ckpt", tmp_path / "plain.ckpt")
    for name in ("only", "after", "plain"):
        loaded = Language.load_from_checkpoint(tmp_path / f"{name}.ckpt")
        assert same_weights(loaded, module) and next(loaded.parameters()).dtype == torch.float32, name
        with pytest.raises((KeyError, ValueError), match=r"only the model|no optimizer"):
            fit("zk_stage_3", ckpt=tmp_path / f"{name}.ckpt")
    with pytest.raises(ValueError, match="exists"):
        zl.consolidate(tmp_path / "folder.ckpt", tmp_path / "plain.ckpt")
    (tmp_path / "folder.ckpt" / "lightning.ckpt").unlink()
    with pytest.raises(zk.checkpoint.files.CheckpointError, match="not a whole checkpoint"):
        fit("zk_stage_3", ckpt=tmp_path / "folder.ckpt")


class Averages(NoSchedule):
    """Adds an average of the model to itself when the strategy has it already."""

    def on_train_start(self) -> None:
        with zk.gather(list(self.model.parameters())):
            self.ema = copy.deepcopy(self.model).requires_grad_(False)

    def on_train_batch_end(self, *args: Any) -> None:
        with zk.gather(list(self.model.parameters())), torch.no_grad():
            for mean, param in zip(self.ema.parameters(), self.model.parameters(), strict=True):
                mean.lerp_(param, 0.5)


@pytest.mark.parametrize("strategy", ["zk_stage_2", "zk_stage_3_offload_nvme"])
def test_parameters_added_while_training_stay_as_they_are_and_are_among_saved_weights(strategy: str, tmp_path: Path) -> None:
    def only(name: str) -> ModelCheckpoint:
        return ModelCheckpoint(tmp_path, name, every_n_train_steps=3, save_weights_only=True)

    reference, module = (fit(each, 3, Averages, callbacks=[only(each)]) for each in ("auto", strategy))
    assert same_weights(module, reference) and any(name.startswith("ema.") for name in module.state_dict())
    ours, theirs = (torch.load(tmp_path / f"{each}.ckpt")["state_dict"] for each in (strategy, "auto"))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


class Edits(Language):
    """Changes what is saved, and what is loaded as told."""

    on_load: Any = None

    def on_save_checkpoint(self, checkpoint: Any) -> None:
        for name in [name for name in checkpoint["state_dict"] if "blocks" in name]:
            del checkpoint["state_dict"][name]
        checkpoint["kept"] = sorted(checkpoint["state_dict"])

    def on_load_checkpoint(self, checkpoint: Any) -> None:
        if self.on_load is not None:
            self.on_load(checkpoint)


class Adds(Language):
    def on_save_checkpoint(self, checkpoint: Any) -> None:
        checkpoint["state_dict"]["more"] = torch.zeros(1)


def test_hooks_change_the_weights_of_a_file_and_are_told_where_they_cannot(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    callbacks = [
        ModelCheckpoint(tmp_path, "folder", every_n_train_steps=2),
        ModelCheckpoint(tmp_path, "only", every_n_train_steps=2, save_weights_only=True, monitor="loss"),
    ]
    trained = fit("zk_stage_3_offload_nvme", 2, Edits, callbacks=callbacks)
    only = torch.load(tmp_path / "only.ckpt")
    left = {name: value for name, value in trained.state_dict().items() if "blocks" not in name}
    assert only["kept"] == sorted(left) == sorted(only["state_dict"]) and all(torch.equal(only["state_dict"][name], left[name]) for name in left)
    assert vars(trained.trainer._checkpoint_connector).get("dump_checkpoint") is None  # nothing of ours stays in the Trainer
    assert "does not keep" not in caplog.text
    saved(tmp_path / "adds", "zk_stage_2", 2, module=Adds)
    assert "adds/at.ckpt does not keep" in caplog.text

    def put(checkpoint: Any) -> None:
        checkpoint["state_dict"] = {"lost": torch.zeros(1)}

    def loads(run: str, on_load: Any) -> Any:
        module = Edits()
        module.on_load = on_load
        getattr(trainer("zk_stage_3", 3), run)(module, rows(), ckpt_path=tmp_path / "folder.ckpt")
        return module

    changes: tuple[Any, ...] = (
        put,
        lambda checkpoint: checkpoint.pop("state_dict"),
        lambda checkpoint: checkpoint["state_dict"].pop("model.norm.weight", None),
        lambda checkpoint: checkpoint["state_dict"].update(lost=0),
        lambda checkpoint: checkpoint["state_dict"].get("model.norm.weight"),
        lambda checkpoint: list(checkpoint["state_dict"].items()),
    )
    for change in changes:
        with pytest.raises(zk.checkpoint.files.CheckpointError, match="after on_load_checkpoint"):
            loads("fit", change)
    with pytest.raises(zk.checkpoint.files.CheckpointError, match="after on_load_checkpoint"):
        loads("validate", put)
    seen: list[Any] = []
    assert len(loads("fit", lambda checkpoint: seen.append(bool(checkpoint["state_dict"]))).losses) == 1 and seen == [False]


def test_strict_loading_off_loads_a_folder_whole_or_says_that_it_is_not_for_it(tmp_path: Path) -> None:
    folder = saved(tmp_path, "zk_stage_2", 2, module=Constant)

    def loads(run: str, extra: bool, path: Path = folder) -> Any:
        module = Constant()
        module.strict_loading = False
        if extra:
            module.extra = torch.nn.Linear(2, 2)
        getattr(trainer("zk_stage_3", 3), run)(module, rows(), ckpt_path=path)
        return module

    assert len(loads("fit", False).losses) == 1
    for method in ("fit", "validate"):
        with pytest.raises(zk.checkpoint.files.CheckpointError, match=r"'extra\.bias', 'extra\.weight'.*strict_loading=False is not for"):
            loads(method, True)
    zl.consolidate(folder, tmp_path / "plain.ckpt")
    assert torch.equal(
        loads("validate", True, tmp_path / "plain.ckpt").model.norm.weight, torch.load(tmp_path / "plain.ckpt")["state_dict"]["model.norm.weight"]
    )


def test_the_learning_rate_finder_goes_back_to_where_it_began(tmp_path: Path) -> None:
    found = []
    for strategy in ("auto", "zk_stage_3_offload_nvme"):
        torch.manual_seed(0)
        module = Language()
        before = {key: value.clone() for key, value in module.state_dict().items()}
        finder = Tuner(trainer(strategy, default_root_dir=tmp_path)).lr_find(module, rows(), num_training=6, min_lr=1e-4, update_attr=False)
        found.append(finder.results)
        assert all(torch.equal(value, before[key]) for key, value in module.state_dict().items())
    assert found[0] == found[1] and not list(tmp_path.glob(".lr_find*"))


# ---- what is refused -------------------------------------------------------------------------------------------------------------


class Two(Manual):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.model.blocks.parameters(), lr=1.0), torch.optim.SGD(self.model.norm.parameters(), lr=1.0)]


class Idle(Manual):
    def configure_optimizers(self) -> None:
        return None


def test_what_cannot_be_right_is_refused_with_a_remedy() -> None:
    for wrong, error, words in (
        (lambda: fit("zk", module=Two), ValueError, "one optimizer"),
        (lambda: fit("zk", module=Idle), ValueError, "returned None"),
        (lambda: fit(zl.ZeroStrategy(clip_grad_norm=1.0), gradient_clip_val=1.0), ValueError, "leave one out"),
        (lambda: trainer("zk", precision="64-true"), ValueError, "'bf16-mixed'"),
        (lambda: zl.ZeroStrategy(stag=1), TypeError, "stag"),
        (lambda: zl.ZeroStrategy(stage=4), ValueError, "stage must be"),
        (lambda: fit("zk_stage_3", callbacks=[StochasticWeightAveraging(1e-2)]), ValueError, "stages 0, 1 and 2"),
        (lambda: fit("zk_stage_2", callbacks=[EMAWeightAveraging()]), ValueError, "EMAWeightAveraging"),
        (lambda: fit("zk_stage_2", callbacks=[ModelPruning("l1_unstructured", amount=0.5)]), ValueError, "ModelPruning.*after fit"),
        (lambda: zl.of("torch"), ValueError, "package must be"),
    ):
        with pytest.raises(error, match=words):
            wrong()
    assert fit("zk_stage_3_offload").losses == stock().losses  # nothing of the failures is left


def test_stochastic_weight_averaging_works_where_parameters_are_whole() -> None:
    averaged = [
        fit(strategy, -1, NoSchedule, max_epochs=3, callbacks=[StochasticWeightAveraging(1e-2, swa_epoch_start=1)])
        for strategy in ("auto", "zk_stage_2_offload")
    ]
    assert same_weights(*averaged) and averaged[0].losses == averaged[1].losses


class Head(Language):
    """Trains what is not frozen, or all of it, in two groups."""

    in_groups = False

    def configure_optimizers(self) -> Any:
        if not self.in_groups:
            return torch.optim.AdamW([param for param in self.parameters() if param.requires_grad], lr=1e-2)
        below = [*self.model.blocks.parameters()]
        rest = [param for param in self.parameters() if all(param is not other for other in below)]
        return torch.optim.AdamW([{"params": rest}, {"params": below, "lr": 1e-3}], lr=1e-2)


class Groups(Head):
    in_groups = True


class Unfreezes(BaseFinetuning):  # type: ignore[misc]
    def freeze_before_training(self, module: Any) -> None:
        self.freeze(module.model.blocks)

    def finetune_function(self, module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(module.model.blocks, optimizer, lr=1e-3)


class Trains(Callback):  # type: ignore[misc]
    """The same, over groups that are there from the start."""

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        module.model.blocks.requires_grad_(False)

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        module.model.blocks.requires_grad_(trainer.current_epoch > 0)


def test_what_is_unfrozen_later_trains_as_in_the_stock_trainer(tmp_path: Path) -> None:
    reference = fit("auto", -1, Head, max_epochs=3, callbacks=[Unfreezes()])
    for strategy in ("zk_stage_1", "zk_stage_2_offload"):
        saves = ModelCheckpoint(tmp_path / strategy, "{epoch}", save_top_k=-1)
        assert fit(strategy, -1, Head, max_epochs=3, callbacks=[Unfreezes(), saves]).losses == reference.losses
        resumed = fit(strategy, -1, Head, 1, tmp_path / strategy / "epoch=0.ckpt", max_epochs=3, callbacks=[Unfreezes()])
        assert resumed.losses == reference.losses[-len(resumed.losses) :] and len(resumed.losses) == 2 * len(reference.losses) // 3
        assert same_weights(resumed, reference)
    for strategy in ("zk_stage_3", "zk_stage_3_offload_nvme"):
        with pytest.raises(ValueError, match=r"Unfreezes .* at stage 3 give the optimizer all parameters"):
            fit(strategy, -1, Head, max_epochs=3, callbacks=[Unfreezes()])
        assert fit(strategy, -1, Groups, max_epochs=3, callbacks=[Trains()]).losses == reference.losses


class Breaks(Language):
    def training_step(self, rows: Any, index: int) -> Any:
        if index == 3:
            raise KeyError("a mistake of the user's")
        return super().training_step(rows, index)


def test_a_run_that_fails_raises_its_own_error_and_leaves_a_model_that_can_be_used() -> None:
    torch.manual_seed(0)
    module = Breaks()
    with pytest.raises(KeyError, match="a mistake of the user's"):
        trainer("zk_stage_3_offload_nvme").fit(module, rows())
    assert same_weights(module, fit(steps=3))
    trainer("zk_stage_3_offload_nvme", 2).fit(module, rows())


# ---- Fabric ----------------------------------------------------------------------------------------------------------------------


def loop(strategy: Any, *, deferred: bool = False, save: Path | None = None, load: Path | None = None, **kwargs: Any) -> list[float]:
    """Two epochs of accumulation over two batches, clipped; ``load`` begins with the second."""
    fabric = L.Fabric(**{"accelerator": DEVICE.type, "devices": 1, "strategy": strategy, **kwargs})
    fabric.launch()
    torch.manual_seed(0)
    with fabric.init_module() if deferred else contextlib.nullcontext():
        model = GPT()
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "epoch": 0}
    if load is not None:
        assert fabric.load(load, state) == {} and state["epoch"] == 1
    losses = []
    for epoch in range(state["epoch"], 2):
        for index, (ids,) in enumerate(fabric.setup_dataloaders(rows())):
            with fabric.no_backward_sync(model, enabled=index % 2 == 0):
                loss = loss_of(model, ids)
                fabric.backward(loss / 2)
            losses.append(loss.item())
            if index % 2 == 1:
                assert fabric.clip_gradients(model, optimizer, max_norm=0.5) > 0
                optimizer.step()
                optimizer.zero_grad()
        if save is not None and epoch == 0:
            fabric.save(save, {**state, "epoch": 1})
            fabric.save(save.with_name("weights"), {"model": model})
    return losses


@pytest.mark.device
def test_fabric_trains_what_it_trains_without_zk_and_resumes_at_another_stage(tmp_path: Path) -> None:
    reference = loop("auto")
    path = tmp_path / "state"
    assert loop("zk_stage_3_offload_nvme", save=path) == pytest.approx(reference, abs=1e-6, rel=0)
    assert loop(zl.ZeroFabricStrategy(stage=2, optimizer_tier="host"), deferred=True) == pytest.approx(reference, abs=1e-6, rel=0)
    assert loop("zk_stage_3", load=path) == pytest.approx(reference[EPOCH:], abs=1e-6, rel=0)
    plain = GPT()
    plain.load_state_dict(torch.load(tmp_path / "weights")["model"])
    assert loss_of(plain, batch(0)).item() == pytest.approx(reference[EPOCH], abs=1e-6)
    assert loop("zk_stage_3", precision="16-true")[-1] == pytest.approx(reference[-1], abs=0.05)
    assert loop("zk_stage_3", precision="bf16-mixed")[-1] == pytest.approx(reference[-1], abs=0.05)


def test_fabric_goes_on_from_what_a_trainer_has_saved(tmp_path: Path) -> None:
    module = fit("zk_stage_2", 3, callbacks=[ModelCheckpoint(tmp_path, "saved", every_n_train_steps=3)])
    fabric = L.Fabric(accelerator=DEVICE.type, devices=1, strategy="zk_stage_3_offload_nvme")
    fabric.launch()
    other = Language()
    model, optimizer = fabric.setup(other, torch.optim.AdamW(other.parameters(), lr=1e-2))
    rest = fabric.load(tmp_path / "saved.ckpt", {"model": model, "optimizer": optimizer})
    assert rest["global_step"] == 3 and optimizer.metrics()["steps"] == 3
    with zk.gather(list(other.parameters())):
        assert same_weights(other, module)


def set_up(strategy: str) -> tuple[Any, Any, Any]:
    """Fabric, and a model and its optimizer that were set up with it."""
    fabric, model = L.Fabric(accelerator=DEVICE.type, devices=1, strategy=strategy), GPT()
    fabric.launch()
    return fabric, *fabric.setup(model, torch.optim.AdamW(model.parameters()))


def test_fabric_clips_as_torch_does_and_refuses_what_cannot_be_right(tmp_path: Path) -> None:
    fabric, wrapped, optimizer = set_up("zk_stage_3")
    fabric.backward(loss_of(wrapped, batch(0)))
    fabric.clip_gradients(wrapped, optimizer, clip_val=1e-3)
    assert max(param.grad.abs().max() for param in wrapped.parameters()) == pytest.approx(1e-3)
    fabric.clip_gradients(wrapped, optimizer, max_norm=0.1, norm_type=1.0)
    assert sum(param.grad.abs().sum() for param in wrapped.parameters()) == pytest.approx(0.1, rel=1e-4)
    with pytest.raises(ValueError, match="one optimizer"):
        fabric.save(tmp_path / "two", {"one": optimizer, "other": optimizer})
    with pytest.raises(ValueError, match="must belong to one model"):
        fabric.setup_optimizers(torch.optim.AdamW(GPT().parameters()))
    optimizer.close()
    with pytest.raises(RuntimeError, match="closed"):
        optimizer.step()


def test_fabric_changes_nothing_where_it_cannot_load_all(tmp_path: Path) -> None:
    fabric, wrapped, optimizer = set_up("zk_stage_2")
    fabric.backward(loss_of(wrapped, batch(0)))
    optimizer.step()
    counter = torch.nn.Linear(1, 1)  # something with a state of its own
    state = {"model": wrapped, "optimizer": optimizer, "counter": counter, "epoch": 1}
    fabric.save(tmp_path / "state", state)
    (tensors,) = (tmp_path / "state").glob("step-*/*.safetensors")
    tensors.write_bytes(tensors.read_bytes()[:-64])
    with torch.no_grad():
        counter.weight.fill_(7.0)
    state["epoch"] = 2
    with pytest.raises(ValueError, match="safetensors"):
        fabric.load(tmp_path / "state", state)
    with pytest.raises(KeyError, match="missing"):
        fabric.load(tmp_path / "state", {**state, "missing": 0})
    assert counter.weight.item() == 7.0 and state["epoch"] == 2


def test_fabric_trains_two_models_each_with_its_own_optimizer_and_loss_scale() -> None:
    fabric = L.Fabric(accelerator=DEVICE.type, devices=1, strategy="zk_stage_2", precision="16-true")
    fabric.launch()
    pairs = []
    for seed in range(2):
        torch.manual_seed(seed)
        model = GPT()
        pairs.append(fabric.setup(model, torch.optim.AdamW(model.parameters())))
    (first, one), (second, other) = pairs
    with pytest.raises(ValueError, match="model=model"):
        fabric.backward(loss_of(first, batch(0)))
    for model, optimizer in pairs:
        fabric.backward(loss_of(model, batch(0)), model=model)
        optimizer.step()
    assert [optimizer.metrics()["steps"] for optimizer in (one, other)] == [1, 1]
    with pytest.raises(ValueError, match="param_groups"):
        fabric.setup_optimizers(torch.optim.AdamW(second.parameters()))
    model = GPT()
    with pytest.raises(ValueError, match=r"GPT was set up with one already.*param_groups"):
        fabric.setup(model, *(torch.optim.AdamW(part.parameters()) for part in (model.blocks, model.norm)))


# ---- several ranks, the other package, the example ---------------------------------------------------------------------------------


CASES: dict[str, tuple[dict[str, Any], float]] = {  # options of the Trainer, difference to DDP
    "plain": ({}, 0.0),
    "clipped and accumulated": ({"gradient_clip_val": 0.5, "accumulate_grad_batches": 2}, 1e-6),
}
OURS = {"plain": ("zk_stage_2_offload", "zk_stage_3_offload"), "clipped and accumulated": ("zk_stage_1", "zk_stage_3_offload")}


def test_two_ranks_train_what_stock_ddp_trains_and_one_rank_goes_on_from_their_checkpoint(tmp_path: Path) -> None:
    run("-m", "tests.integrations.lightning_ranks", str(tmp_path), env={**os.environ, "ZK_CPU_ADAM": "torch"}, timeout=600, check=True)
    first, second = (torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2))
    assert first["plain", "ddp"][0] != second["plain", "ddp"][0]  # each its own data
    for found in (first, second):
        for name, (_, tolerance) in CASES.items():
            losses, validation, params = found[name, "ddp"]
            for strategy in OURS[name]:
                ours = found[name, strategy]
                assert ours[0] == pytest.approx(losses, abs=tolerance, rel=0), (name, strategy)
                assert ours[1] == pytest.approx(validation, abs=1e-6)
                assert all(torch.allclose(one, other, atol=10 * tolerance, rtol=0) for one, other in zip(ours[2], params, strict=True))
        assert found["resumed alike"] and found["resumed"][0] == found["resumed"][1]
        assert found["tested"][0] == pytest.approx(found["tested"][1], abs=1e-6)
        for losses in found["fabric"][1:]:
            assert losses == pytest.approx(found["fabric"][0], abs=1e-6, rel=0)
    plain = Language.load_from_checkpoint(tmp_path / "two.ckpt")  # saved after fit: a plain file
    assert loss_of(plain, batch(0)).item() == pytest.approx(first["alone"], abs=1e-6)
    zl.consolidate(tmp_path / "at.ckpt", tmp_path / "at-plain.ckpt")
    alone = fit("zk_stage_2", 3, ckpt=tmp_path / "at.ckpt", seed=4)  # it has had its three steps
    assert alone.losses == [] and same_weights(alone, Language.load_from_checkpoint(tmp_path / "at-plain.ckpt"))


def on_gpu_of_rank(strategy: str) -> tuple[list[float], str]:
    rank = torch.distributed.get_rank()
    os.environ.update(rank_of(2, rank, 1), TORCHELASTIC_RUN_ID="1", GROUP_RANK="0", ZK_CPU_ADAM="torch")
    module = fit(strategy, 4, devices=2, gradient_clip_val=0.5, limit_val_batches=0)
    return module.losses, str(module.trainer.strategy.root_device)


@pytest.mark.device_only
def test_two_ranks_train_on_their_gpus_on_the_mean_of_their_gradients() -> None:
    """Compared with a plain loop: Lightning makes DDP on a stream that its training does not wait for."""
    torch.manual_seed(0)
    plain = Language()
    configured = plain.configure_optimizers()
    optimizer, schedule = configured["optimizer"], configured["lr_scheduler"]["scheduler"]
    samplers = [DistributedSampler(ROWS, 2, rank) for rank in range(2)]  # as Lightning divides training data
    numbers: list[list[int]] = [[], []]
    for epoch in range(2):
        for rank, sampler in enumerate(samplers):
            sampler.set_epoch(epoch)
            numbers[rank] += list(sampler)
    expected: list[list[float]] = [[], []]
    for step in range(4):
        for rank in range(2):
            loss = loss_of(plain, ROWS.tensors[0][numbers[rank][2 * step : 2 * step + 2]])
            (loss / 2).backward()
            expected[rank].append(loss.item())
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        optimizer.step(), optimizer.zero_grad(), schedule.step()
    for found in run_world(2, on_gpu_of_rank, ["zk_stage_3_offload"]):
        for rank, result in enumerate(found):
            assert not isinstance(result, Exception), result
            assert result == (pytest.approx(expected[rank], abs=1e-6, rel=0), f"cuda:{rank}")


def test_pytorch_lightning_has_the_same_names_and_classes_of_its_own() -> None:
    pytest.importorskip("pytorch_lightning")
    other = zl.of("pytorch_lightning")
    import pytorch_lightning as pl

    assert other.ZeroStrategy is not zl.ZeroStrategy and zl.of("pytorch_lightning") is other
    assert set(zl.NAMES) <= set(pl.strategies.StrategyRegistry.available_strategies())

    class Tiny(pl.LightningModule):
        training_step, forward = Language.training_step, Language.forward

        def __init__(self) -> None:
            super().__init__()
            self.model, self.losses = GPT(), []

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    torch.manual_seed(0)
    module = Tiny()
    quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "enable_model_summary": False}
    common = {"strategy": "zk_stage_3_offload", "accelerator": DEVICE.type, "devices": 1, "max_steps": 4}
    pl.Trainer(callbacks=[other.ZeroMetrics()], **common, **quiet).fit(module, rows())
    assert module.losses == fit(module=NoSchedule, steps=4).losses
    with pytest.raises(ValueError, match="invalid strategy"):
        pl.Trainer(strategy=zl.ZeroStrategy())  # the other package's


def test_the_example_learns(tmp_path: Path) -> None:
    """In a process of its own, which has what it imports and nothing else."""
    command = [sys.executable, str(ROOT / "examples" / "lightning_gpt.py"), "--steps", "30"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    first, last = (float(line.split()[-1]) for line in done.stdout.splitlines() if "loss" in line)
    assert last < first - 0.5


def test_ctrl_c_says_where_to_resume(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Interrupts(lightning.pytorch.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, number: int) -> None:
            if number == 1:
                trainer.save_checkpoint(tmp_path / "saved.ckpt")
            if number == 2:
                raise KeyboardInterrupt

    handler = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(SystemExit):
            fit("zk_stage_3_offload", callbacks=[Interrupts()])
    finally:
        signal.signal(signal.SIGINT, handler)  # Lightning has it ignored
    assert f"zk: stopped after step 3; resume from {tmp_path / 'saved.ckpt'}, which is of step 2" in capsys.readouterr().err
