"""A Trainer with one of zk's strategies ends where the stock Trainer ends, and resumes there.

The CPU update is the engine whose bits are torch's. Losses then differ by nothing in fp32, by 3e-6
with clipping (torch sums the norm in fp32) or another order of sums over ranks, and by 5e-3 under
bf16-mixed, where zk rounds norms and biases to bf16 and the stock Trainer does not.
"""

import functools
import logging
import os
import subprocess
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import zk
from tests.models import DEVICE, GPT, adamw, batch, gpt, loss_of
from tests.plain import train_plain
from tests.programs import Program, run

L = pytest.importorskip("lightning")
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint  # noqa: E402

import zk.integrations.lightning as zl  # noqa: E402

pytestmark = [pytest.mark.usefixtures("torch_engine"), pytest.mark.filterwarnings("ignore")]
for name in ("lightning.pytorch", "lightning.fabric"):
    logging.getLogger(name).setLevel(logging.ERROR)

ROOT = Path(__file__).parents[2]
STEPS, EPOCH = 6, 4
OURS = ("zk_stage_1", "zk_stage_3_offload")
NVME = "zk_stage_3_offload_nvme"


def rows() -> Any:
    return DataLoader(TensorDataset(torch.cat([batch(1000 * step) for step in range(EPOCH)])), 2)


class Language(L.LightningModule):
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

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 8)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class NoSchedule(Language):
    configure_optimizers = adamw


def trainer(strategy: Any = "auto", steps: int = STEPS, **kwargs: Any) -> Any:
    saves = any(isinstance(callback, ModelCheckpoint) for callback in kwargs.get("callbacks", ()))
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    where = {"accelerator": DEVICE.type, "devices": 1, "num_sanity_val_steps": 1, "strategy": strategy}
    return L.Trainer(**{**quiet, **where, "enable_checkpointing": saves, "max_steps": steps, **kwargs})


def fit(strategy: Any = "auto", steps: int = STEPS, module: type[Language] = Language, ckpt: Any = None, seed: int = 0, **kwargs: Any) -> Any:
    """A fitted module; its Trainer is ``module.trainer``."""
    torch.manual_seed(seed)
    made = module()
    trainer(strategy, steps, **kwargs).fit(made, rows(), rows(), ckpt_path=ckpt)
    return made


@functools.cache
def stock() -> Any:
    return fit()


def same_weights(one: Any, other: Any) -> bool:
    ours, theirs = one.state_dict(), other.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)


@pytest.fixture(autouse=True)
def drive(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the nvme tier, where parameters of one rank on a CPU rest elsewhere, too."""
    folder = tmp_path_factory.mktemp("drive")
    monkeypatch.setenv("ZK_NVME_PATH", str(folder))
    return folder


@pytest.mark.parametrize("strategy", [pytest.param(name, marks=[pytest.mark.device] * ("offload" in name)) for name in zl.NAMES])
def test_every_name_trains_as_the_stock_trainer_and_leaves_a_plain_model(strategy: str, drive: Path) -> None:
    reference, module = stock(), fit(strategy)
    assert module.losses == reference.losses and len(set(module.losses)) == STEPS
    values = [each.trainer.callback_metrics["val"] for each in (module, reference)]
    assert values[0] == values[1] and same_weights(module, reference)
    ids = batch(3).to(next(reference.parameters()).device)
    assert torch.equal(module(ids), reference(ids)) and not list(drive.iterdir())
    assert module.trainer.strategy.model is module and not module.trainer.optimizers[0]._runtime.stores


@pytest.mark.device
@pytest.mark.parametrize(("precision", "autocast"), [("bf16-mixed", True), ("bf16-true", False)])
def test_bf16_has_fp32_masters(precision: str, autocast: bool) -> None:
    forward = torch.autocast(DEVICE.type, torch.bfloat16, enabled=autocast)(lambda plain, ids, step: loss_of(plain, ids))
    losses, _, masters, _ = train_plain(gpt(), lambda params: torch.optim.AdamW(params, 1e-2), dtype=torch.bfloat16, steps=EPOCH, forward=forward)
    for options in ({"stage": 2}, {"stage": 3, "param_tier": "host"}):
        module = fit(zl.ZeroStrategy(optimizer_tier="host", **options), EPOCH, NoSchedule, precision=precision)
        assert module.losses == losses
        for param, master in zip(module.parameters(), masters, strict=True):
            master = master.to(param.device)  # a mixed model is an fp32 one, as Lightning's is
            assert torch.equal(param, master if autocast else master.bfloat16())
    if autocast:
        assert losses == pytest.approx(fit(steps=EPOCH, module=NoSchedule, precision=precision).losses, abs=5e-3)


@pytest.mark.device
def test_fp16_has_one_loss_scale_which_zk_moves() -> None:
    scale = zk.DynamicLossScale(init=2.0**24, hysteresis=1)
    optimizer = fit(zl.ZeroStrategy(stage=3, loss_scale=scale), 8, NoSchedule, precision="16-true").trainer.optimizers[0]
    assert 1 <= optimizer.skipped_steps <= 7 and optimizer.num_steps == 8 - optimizer.skipped_steps


class Configured(Language):
    def __init__(self) -> None:
        super().__init__()
        self.model = None

    def configure_model(self) -> None:
        if self.model is None:
            torch.manual_seed(7)
            self.model = GPT()
            self.was_deferred = hasattr(self.model.norm.weight.untyped_storage(), "_zk_promise")


def test_configure_model_builds_without_memory_and_trains_the_same(tmp_path: Path) -> None:
    reference = fit(module=Configured)
    module = fit(OURS[1], module=Configured)
    assert module.was_deferred and module.losses == reference.losses
    reference.trainer.save_checkpoint(tmp_path / "stock.ckpt")
    fresh = Configured()
    found = trainer("zk_stage_3").validate(fresh, rows(), tmp_path / "stock.ckpt", verbose=False)
    assert found == trainer().validate(reference, rows(), verbose=False) and same_weights(fresh, reference)


def test_where_the_whole_model_has_no_room_it_stays_sharded_and_says_so(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("zk.integrations.lightning.host_memory", lambda: (1 << 30, 4 * 9386 * 2 - 1))  # half of it must do
    module = fit(NVME)
    assert "the model does not fit in half of host memory; it stays sharded" in caplog.text
    assert all(param.isnan().all() for param in module.parameters())


class Manual(Language):
    automatic_optimization = property(lambda self: False, lambda self, value: None)


def test_what_cannot_be_right_is_refused_with_a_remedy() -> None:
    refused: list[tuple[Any, str, Any]] = [
        (ValueError, "automatic_optimization must be True", lambda: fit("zk", module=Manual)),
        (ValueError, "WeightAveraging writes param", lambda: fit("zk", callbacks=[EMAWeightAveraging()])),
        (ValueError, "'bf16-mixed'", lambda: fit("zk", precision="64-true")),
        (TypeError, "Trainer.gradient_clip_val", lambda: zl.ZeroStrategy(clip_grad_norm=1.0)),
        (TypeError, "Trainer.precision=", lambda: zl.ZeroStrategy(dtype="fp16")),
        (TypeError, "'stag'; the closest one is 'stage'", lambda: zl.ZeroStrategy(stag=1)),
    ]
    for error, words, wrong in refused:
        with pytest.raises(error, match=words):
            wrong()


def saved(folder: Path, strategy: Any, at: int, **kwargs: Any) -> Path:
    keep = ModelCheckpoint(folder, "at", every_n_train_steps=at, save_top_k=-1)
    fit(strategy, at + 1, callbacks=[keep], **kwargs)
    return folder / "at.ckpt"


@pytest.mark.parametrize("at", [3, EPOCH])
def test_a_resumed_run_is_the_same_to_the_bit(tmp_path: Path, at: int) -> None:
    folder, file = saved(tmp_path / "zk", OURS[1], at), saved(tmp_path / "stock", "auto", at)
    assert folder.is_dir() and file.is_file()
    reference = fit(ckpt=file, seed=5)
    assert len(reference.losses) == STEPS - at
    for strategy, source in ((NVME, folder), ("zk_stage_1", folder), ("zk_stage_3", file))[: None if at == 3 else 1]:
        module = fit(strategy, ckpt=source, seed=5)
        assert module.losses == reference.losses and same_weights(module, reference), strategy
    if at == 3:
        bf16 = saved(tmp_path / "bf16", "zk_stage_2", at, precision="bf16-mixed")
        more = [fit(name, ckpt=bf16, seed=5, precision="bf16-mixed").losses for name in OURS]
        assert more[0] == more[1] and len(more[0]) == STEPS - at
        want = trainer().validate(fit(steps=3), rows(), verbose=False)
        for module in (Language(), Configured()):
            assert trainer(OURS[1]).validate(module, rows(), folder, verbose=False) == want


def test_checkpoints_are_folders_of_which_old_ones_go_and_weights_are_a_file_that_plain_lightning_loads(tmp_path: Path) -> None:
    keep = ModelCheckpoint(tmp_path, "{step}", monitor="loss", save_top_k=2, every_n_train_steps=2, save_last="link")
    only = ModelCheckpoint(tmp_path / "more", "only", save_weights_only=True, monitor="loss", every_n_train_steps=STEPS)
    module = fit(NVME, callbacks=[keep, only], precision="bf16-mixed")
    found = sorted(path.name for path in tmp_path.glob("*.ckpt"))
    assert len(found) == 3 and found[0] == "last.ckpt" and (tmp_path / "last.ckpt").is_symlink()
    folder = Path(keep.best_model_path)
    assert [path.name[:5] for path in sorted(folder.glob("[!.]*"))] == ["lates", "light", "step-"]
    module.trainer.save_checkpoint(tmp_path / "more" / "after.ckpt")
    for name in ("only", "after"):
        loaded = Language.load_from_checkpoint(tmp_path / "more" / f"{name}.ckpt")
        assert same_weights(loaded, module) and next(loaded.parameters()).dtype == torch.float32
        with pytest.raises((KeyError, ValueError), match="only the model"):
            fit("zk_stage_3", ckpt=tmp_path / "more" / f"{name}.ckpt")
    (folder / "lightning.ckpt").unlink()
    with pytest.raises(FileNotFoundError, match=r"lightning\.ckpt"):
        fit("zk_stage_3", ckpt=folder)


def on_rank(folder: Path) -> None:
    """What one of two ranks that Lightning starts trains; it writes down what it found."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found: dict[Any, Any] = {}
    subprocess.Popen = lambda command, env, cwd: Program(*command[1:], env=env)  # type: ignore[assignment, misc]
    for strategy in ("ddp", *OURS, NVME):
        module = fit(strategy, 4, devices=2, gradient_clip_val=0.3, accumulate_grad_batches=2)
        weights = torch.cat([param.detach().flatten() for param in module.parameters()])
        found[strategy] = [module.losses, module.trainer.callback_metrics["val"].item(), weights.tolist()]
    saved(folder, OURS[1], 3, devices=2)
    resumed = [fit(name, 5, ckpt=folder / "at.ckpt", seed=9, devices=2) for name in OURS]
    found["resumed"] = [module.losses for module in resumed]
    resumed[0].trainer.save_checkpoint(folder / "two.ckpt")
    found["alone"] = loss_of(resumed[0], batch(0)).item()
    torch.save(found, folder / f"rank{torch.distributed.get_rank()}.pt")


def test_two_ranks_train_what_stock_ddp_trains_and_one_resumes_from_them(tmp_path: Path) -> None:
    program = f"from tests.integrations import test_lightning as t\nif __name__ == '__main__': t.on_rank(t.Path({str(tmp_path)!r}))"
    (tmp_path / "ranks.py").write_text(program)
    run(str(tmp_path / "ranks.py"), env={**os.environ, "ZK_CPU_ADAM": "torch"}, check=True)  # Lightning starts the second one as a script
    first, second = (torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2))
    assert first["ddp"][0] != second["ddp"][0]  # each its own data
    for found in (first, second):
        for strategy in (*OURS, NVME):
            for ours, ddp in zip(found[strategy], found["ddp"], strict=True):
                assert ours == pytest.approx(ddp, abs=3e-6, rel=0), strategy
        assert found["resumed"][0] == found["resumed"][1]
    assert len(fit("zk_stage_2", 5, ckpt=tmp_path / "at.ckpt", seed=4).losses) == 2
    plain = Language.load_from_checkpoint(tmp_path / "two.ckpt")  # saved after fit: a plain file
    assert loss_of(plain, batch(0)).item() == pytest.approx(first["alone"], abs=1e-6)


def test_the_example_learns_with_the_other_package_too(tmp_path: Path) -> None:
    pytest.importorskip("pytorch_lightning")
    text = (ROOT / "examples" / "lightning_gpt.py").read_text()
    (tmp_path / "example.py").write_text(text.replace("import lightning as L", "import pytorch_lightning as L"))
    done = run(str(tmp_path / "example.py"), "--steps", "30", check=True).stdout
    first, last = (float(line.split()[-1]) for line in done.splitlines() if "loss" in line)
    assert last < first - 0.5 and "import lightning as L" in text
