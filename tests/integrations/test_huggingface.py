"""ZeroTrainer against the Trainer of transformers: same seed, same data, same losses."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import re
import runpy
import shutil
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import transformers as tf
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer, TrainerCallback, TrainingArguments

import zk
from tests.integrations.families import FAMILIES, as_rank, data, history, make, weights
from tests.models import DEVICE
from tests.world import run_world
from zk.checkpoint.export import export
from zk.integrations.huggingface import ZeroSeq2SeqTrainer, ZeroTrainer, ZeroTrainerMixin, ZeroTrainingArguments

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS, MIDDLE = 4, 2
# (relative, absolute) distance between losses, gradient norms and parameters and those of the plain Trainer, and why
TOLERANCES = {
    # the same arithmetic; zk sums the norm in float64 (so the clipping factor may differ in the last bit) and updates with fused multiply-adds
    "fp32": (1e-5, 1e-6),
    # autocast is the Trainer's own, over fp32 parameters
    "fp32, autocast": (1e-5, 1e-6),
    # bf16 parameters with fp32 masters against autocast over fp32 parameters: activations have 8 bits in both, rounded in other places
    "bf16": (2e-2, 2e-2),
}
ON_RANKS = "mixtral" if DEVICE.type == "cpu" else "gpt2"  # for ranks the others are as gpt2 is
BACKEND = "gloo" if DEVICE.type == "cpu" else "nccl"
HOST = {"param_tier": "host", "optimizer_tier": "host"}
ALONE = {"save_strategy": "no", "eval_strategy": "no"}
SHORT = {**ALONE, "max_steps": 2}


def on_drive(folder: Path) -> dict[str, Any]:
    """Stage 3 whose parameters are truly gone between uses, in one process and without a GPU."""
    return {"stage": 3, "param_tier": "nvme", "optimizer_tier": "nvme", "nvme_path": str(folder)}


class StopAt(TrainerCallback):
    """Ends a run after a step, with the schedule of the whole run, as a machine that goes away would."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step == self.step


def arguments(folder: Path | str, kind: type = TrainingArguments, **options: Any) -> Any:
    common = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_grad_norm": 1.0,
        "max_steps": STEPS,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "per_device_eval_batch_size": 4,
        "learning_rate": 1e-2,
        "adam_epsilon": 1e-6,  # the bias of keys has no gradient but rounding, which Adam would blow up to full steps
        "weight_decay": 0.1,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 1,
        "save_strategy": "steps",
        "save_steps": MIDDLE,
        "use_cpu": DEVICE.type == "cpu",
        "ddp_find_unused_parameters": None if DEVICE.type == "cpu" else False,  # torch does that in C++, with memory of a real GPU
        "report_to": [],
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    return kind(**{**common, **options})


def made(
    cls: type, family: str, folder: Path | str, *, seed: int = 0, stop: int | None = None, more: dict[str, Any] | None = None, **options: Any
) -> Any:
    return cls(
        model=make(family, seed),
        args=arguments(folder, **(more or {})),
        train_dataset=data(family),
        eval_dataset=data(family, 6, seed=2),
        callbacks=[StopAt(stop)] if stop else None,
        **options,
    )


def trained(cls: type, family: str, folder: Path | str, **options: Any) -> Any:
    """A Trainer that has trained."""
    trainer = made(cls, family, folder, **options)
    trainer.train()
    return trainer


def assert_alike(got: dict[Any, float], want: dict[Any, float], rule: str = "fp32") -> None:
    relative, absolute = TOLERANCES[rule]
    assert got.keys() == want.keys()
    for key, value in want.items():
        assert got[key] == pytest.approx(value, rel=relative, abs=absolute), key


def assert_same_weights(got: dict[str, Tensor], want: dict[str, Tensor], rule: str = "fp32") -> None:
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        torch.testing.assert_close(got[name].float(), tensor.float(), rtol=TOLERANCES[rule][0], atol=TOLERANCES[rule][1], msg=name)


@pytest.fixture(autouse=True)
def _one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process sees no more than one GPU: with several the plain Trainer would use torch.nn.DataParallel."""
    if torch.cuda.is_available():
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)


@pytest.mark.parametrize("family", (pytest.param("gpt2", marks=pytest.mark.device), "t5", "mixtral", "vit"))
def test_zk_ends_with_the_losses_of_the_plain_trainer(family: str, tmp_path: Path) -> None:
    plain = trained(Trainer, family, tmp_path / "plain")
    drive = on_drive(tmp_path)
    ways = (({"stage": 2, "optimizer_tier": "host"}, drive), (drive, {"stage": 2}))
    for first, second in ways if family == "gpt2" else ways[:1]:
        folder = tmp_path / f"from stage {first['stage']}"
        trained(ZeroTrainer, family, folder, stop=MIDDLE, zero=first).zero.close()
        resumed = made(ZeroTrainer, family, folder, seed=5, zero=second)  # other initial values, which must not count
        resumed.train(resume_from_checkpoint=True)
        assert resumed.zero.config.stage == second["stage"]
        assert_alike(history(resumed), history(plain))
        assert_same_weights(weights(folder / f"checkpoint-{STEPS}"), weights(tmp_path / "plain" / f"checkpoint-{STEPS}"))
        resumed.zero.close()
    middle = folder / f"checkpoint-{MIDDLE}"
    assert json.loads((middle / "trainer_state.json").read_text())["global_step"] == MIDDLE
    assert {"config.json", "model.safetensors", "scheduler.pt", "training_args.bin", "zk"} <= {file.name for file in middle.iterdir()}


def train_on_ranks(case: tuple[str, str, dict[str, Any], dict[str, Any]]) -> Any:
    family, folder, first, second = case
    more = {"ddp_backend": BACKEND, "eval_strategy": "no"}
    if not first:
        trainer = trained(Trainer, family, folder, more=more)
    else:
        trained(ZeroTrainer, family, folder, stop=MIDDLE, more=more, zero=first).zero.close()
        trainer = made(ZeroTrainer, family, folder, seed=5, more=more, zero=second)
        trainer.train(resume_from_checkpoint=True)
    trainer.save_model(f"{folder}/last")
    if first:
        trainer.zero.close()
    return history(trainer)


def generate_on_ranks(folder: str) -> Any:
    args = arguments(folder, Seq2SeqTrainingArguments, max_steps=2, predict_with_generate=True, generation_max_length=9, ddp_backend=BACKEND)
    found: list[Any] = []
    for cls, options in ((Seq2SeqTrainer, {}), (ZeroSeq2SeqTrainer, {"zero": {"stage": 3, **HOST}})):
        trainer = cls(model=make("t5"), args=args, train_dataset=data("t5"), eval_dataset=data("t5", 5, seed=2), **options)
        trainer.model.generation_config.eos_token_id = list(range(3, 61, 2))  # so that texts end at different lengths
        trainer.train()
        texts = trainer.predict(data("t5", 5, seed=3)).predictions.tolist()
        trainer.save_model(f"{folder}/{cls.__name__}")
        found.append((texts, history(trainer)))
    trainer.zero.close()
    return found


def on_rank(case: Any) -> Any:
    as_rank()
    return generate_on_ranks(case) if isinstance(case, str) else train_on_ranks(case)


def test_two_ranks_train_and_generate_what_the_plain_trainer_does_on_two(tmp_path: Path) -> None:
    """Texts have other lengths on each rank, which wait; of a model whose three largest layers share a parameter."""
    two, three = {"stage": 2, "optimizer_tier": "host"}, {"stage": 3, **HOST}
    cases = [(ON_RANKS, str(tmp_path / "plain"), {}, {}), (ON_RANKS, str(tmp_path / "zk"), three, two), str(tmp_path)]
    results = run_world(2, on_rank, cases)
    assert not (failed := [rank for result in results for rank in result if isinstance(rank, Exception)]), failed
    plain, ours, generated = results
    assert_alike(ours[0], plain[0])
    assert_same_weights(weights(tmp_path / "zk" / "last"), weights(tmp_path / "plain" / "last"))
    for (texts, losses), (our_texts, our_losses) in generated:
        assert our_texts == texts
        assert_alike(our_losses, losses)
    assert_same_weights(weights(tmp_path / "ZeroSeq2SeqTrainer"), weights(tmp_path / "Seq2SeqTrainer"))


# ---- precision -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "rule"), (pytest.param(None, "bf16", marks=pytest.mark.device), ("fp32", "fp32, autocast")))
def test_bf16_is_parameters_of_it_or_autocast_over_fp32(dtype: str | None, rule: str, tmp_path: Path) -> None:
    more = {**SHORT, "bf16": True, "eval_strategy": "steps"}
    plain = trained(Trainer, "llama", tmp_path / "plain", more=more)
    ours = trained(ZeroTrainer, "llama", tmp_path / "zk", more=more, zero={"stage": 2, "dtype": dtype})
    assert next(ours.model.parameters()).dtype == (torch.float32 if dtype else torch.bfloat16)
    assert_alike(history(ours), history(plain), rule)


def test_fp16_has_one_loss_scale_and_a_skipped_step_does_not_move_the_schedule(tmp_path: Path) -> None:
    # accelerate refuses fp16 on a CPU, so parameters are asked for in fp16 directly
    zero = {"dtype": "fp16", "loss_scale": zk.DynamicLossScale(init=2.0**24)}
    trainer = trained(ZeroTrainer, "gpt2", tmp_path, more=ALONE, zero=zero)
    assert trainer.accelerator.scaler is None
    metrics = trainer.zero.metrics()
    assert metrics["steps"] + metrics["skipped_steps"] == STEPS
    assert metrics["skipped_steps"] > 0
    rates = [line["learning_rate"] for line in trainer.state.log_history if "learning_rate" in line]
    assert rates[0] == 0.0  # warm-up begins with the first step that is taken
    assert trainer.lr_scheduler.last_epoch == metrics["steps"]


# ---- evaluation, generation, weights -------------------------------------------------------------------------------------------------


class Generates(TrainerCallback):
    """Between two steps."""

    def __init__(self) -> None:
        self.texts: list[list[int]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        training = model.training
        model.eval()
        self.texts.append(model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=4, do_sample=False)[0].tolist())
        model.train(training)


def test_generation_between_steps_and_from_pretrained_see_the_trained_parameters(tmp_path: Path) -> None:
    texts = []
    for cls, options in ((Trainer, {}), (ZeroTrainer, {"zero": on_drive(tmp_path)})):
        trainer = made(cls, "llama", tmp_path / cls.__name__, more=SHORT, **options)
        trainer.add_callback(generates := Generates())
        trainer.train()
        trainer.save_model(str(tmp_path / cls.__name__ / "last"))
        after = type(trainer.model).from_pretrained(tmp_path / cls.__name__ / "last")
        texts.append((generates.texts, after.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=4, do_sample=False)[0].tolist()))
        predictions = trainer.predict(data("llama", 3)).predictions
    assert texts[0] == texts[1]
    with torch.no_grad():
        ids = torch.stack([one["input_ids"] for one in data("llama", 3)])
        assert after.eval()(ids).logits.numpy() == pytest.approx(predictions, abs=1e-5)


def test_the_best_model_is_loaded_at_the_end(tmp_path: Path) -> None:
    more = {"max_steps": 6, "load_best_model_at_end": True, "save_steps": 2, "learning_rate": 0.5, "save_total_limit": 2}
    more |= {"metric_for_best_model": "loss", "greater_is_better": True}  # so that the best is not the last
    trainer = made(ZeroTrainer, "gpt2", tmp_path, more=more, zero=on_drive(tmp_path))
    trainer.train()
    losses = [line["eval_loss"] for line in trainer.state.log_history if "eval_loss" in line]
    assert trainer.state.best_metric == max(losses) > losses[-1]
    assert trainer.evaluate()["eval_loss"] == pytest.approx(max(losses), rel=1e-6)
    assert len(list(tmp_path.glob("checkpoint-*"))) == 2


# ---- adapters ------------------------------------------------------------------------------------------------------------------------


def with_lora(seed: int = 0) -> nn.Module:
    peft = pytest.importorskip("peft")
    model = make("llama", seed)
    torch.manual_seed(seed)
    return peft.get_peft_model(model, peft.LoraConfig(r=2, lora_dropout=0.0, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))


def test_lora_trains_and_saves_the_adapter_alone(tmp_path: Path) -> None:
    options = {"train_dataset": data("llama"), "eval_dataset": data("llama", 6, seed=2)}
    plain = Trainer(model=with_lora(), args=arguments(tmp_path / "plain"), **options)
    plain.train()
    zero = {"stage": 3, "param_tier": "nvme", "optimizer_tier": "host", "nvme_path": str(tmp_path)}
    begun = ZeroTrainer(model=with_lora(), args=arguments(tmp_path / "zk"), callbacks=[StopAt(MIDDLE)], zero=zero, **options)
    begun.train()
    begun.zero.close()
    resumed = ZeroTrainer(model=with_lora(), args=arguments(tmp_path / "zk"), zero={"stage": 2}, **options)
    resumed.train(resume_from_checkpoint=True)
    assert_alike(history(resumed), history(plain))
    for step in (MIDDLE, STEPS):
        got, want = (weights(tmp_path / name / f"checkpoint-{step}") for name in ("zk", "plain"))
        assert want and all("lora" in name for name in want)
        assert_same_weights(got, want)


def test_a_checkpoint_of_the_plain_trainer_is_gone_on_from_by_a_model_without_memory_too(tmp_path: Path) -> None:
    plain = trained(Trainer, "llama", tmp_path)
    shutil.rmtree(tmp_path / f"checkpoint-{STEPS}")
    for deferred in (False, True):
        with zk.deferred_init() if deferred else contextlib.nullcontext():
            model = make("llama", seed=5)
        more = {"save_strategy": "no", "eval_strategy": "steps"}
        args = arguments(tmp_path, **more)
        given = {"train_dataset": data("llama"), "eval_dataset": data("llama", 6, seed=2), "zero": {"stage": 3, **HOST}}
        ours = ZeroTrainer(model=model, args=args, **given)
        ours.train(resume_from_checkpoint=True)
        assert_alike(history(ours), history(plain))


# ---- logs, and what is refused -------------------------------------------------------------------------------------------------------


# as transformers documents it
DEEPSPEED = {
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto", "loss_scale": 0},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": "auto", "warmup_num_steps": "auto"}},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu"},
        "offload_param": {"device": "cpu"},
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "steps_per_print": 2000,
}


def test_rates_go_to_loggers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "events"))
    trainer = trained(ZeroTrainer, "vit", tmp_path, more={**SHORT, "report_to": ["tensorboard"]}, zero={"stage": 2})
    lines = [line for line in trainer.state.log_history if "loss" in line]
    assert len(lines) == 2
    assert trainer.zero.metrics()["grad_norm"] == pytest.approx(min(lines[-1]["grad_norm"], 1.0), rel=1e-6)  # clipped
    events = accumulator.EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    assert len(events.Scalars("train/zk/step_s")) == 2
    assert {f"train/{name}" for name in lines[-1] if name.startswith("zk/")} <= set(events.Tags()["scalars"])
    assert all(line["zk/step_s"] > 0 for line in lines)


@pytest.mark.parametrize(
    ("more", "zero", "message"),
    (
        ({"bf16": True}, {"dtype": "fp16"}, "mixed precision is 'bf16'"),
        ({"bf16": True, "bf16_full_eval": True}, {}, "bf16_full_eval=True.*remove it"),
        ({"torch_compile": True}, {}, "compile"),
        ({}, {"stage": 4}, "stage"),
        ({}, {**DEEPSPEED, "zero_optimisation": {"stage": 3}}, r"write 'zero_optimization\.stage', or remove it"),
    ),
)
def test_arguments_that_contradict_zk_are_refused(more: dict[str, Any], zero: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        made(ZeroTrainer, "gpt2", tmp_path, more=more, zero=zero)


def test_deepspeeds_json_is_taken_as_it_is_with_auto_from_the_arguments(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(DEEPSPEED))
    config = trained(ZeroTrainer, "gpt2", tmp_path, more={**SHORT, "max_steps": 1}, zero=str(tmp_path / "ds.json")).zero.config
    assert (config.stage, config.param_tier, config.optimizer_tier, config.dtype, config.clip_grad_norm) == (3, "host", "host", None, None)
    assert "zk does not use these settings of the JSON: optimizer, scheduler, steps_per_print" in caplog.text
    rounded = made(ZeroTrainer, "gpt2", tmp_path, more={**SHORT, "bf16": True}, zero=DEEPSPEED)
    assert rounded.accelerator.zero.dtype is torch.bfloat16


def test_a_script_that_takes_deepspeeds_json_keeps_its_command_line(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(DEEPSPEED))
    command = ["--output_dir", str(tmp_path), "--deepspeed", str(tmp_path / "ds.json"), "--report_to", "none", "--max_steps", "1"]
    is_there = importlib.util.find_spec("deepspeed") is not None
    with contextlib.nullcontext() if is_there else pytest.raises(PackageNotFoundError, match="deepspeed"):  # what a script meets first
        tf.HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(command)
    (args,) = tf.HfArgumentParser(ZeroTrainingArguments).parse_args_into_dataclasses([*command, "--lr_scheduler_type", "cosine"])
    assert args.deepspeed is None and args.zero == str(tmp_path / "ds.json") and "zero" not in args.to_dict()
    trainer = ZeroTrainer(model=make("gpt2"), args=args, train_dataset=data("gpt2", 8))
    assert (trainer.accelerator.zero.stage, trainer.accelerator.zero.param_tier) == (3, "host")
    with pytest.raises(ValueError, match=r"ZeroTrainingArguments\(deepspeed=.* and zero= are both given; keep one"):
        ZeroTrainer(model=make("gpt2"), args=args, zero={"stage": 2})


def test_a_trainer_of_ones_own_takes_the_mixin_and_an_optimizer_of_ones_own(tmp_path: Path) -> None:
    class Mine(ZeroTrainerMixin, Trainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            return 2 * super().compute_loss(model, inputs, *args, **kwargs)

    found = []
    for cls, options in ((Mine, {"zero": zk.ZeroConfig(stage=3)}), (Trainer, {})):
        model = make("gpt2")
        optimizers = (torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), None)
        trainer = cls(model=model, args=arguments(tmp_path, **SHORT), train_dataset=data("gpt2"), optimizers=optimizers, **options)
        trainer.train()
        found.append(trainer)
    mine, plain = found
    assert history(mine)[1, "loss"] == pytest.approx(2 * history(plain)[1, "loss"], rel=1e-6)
    assert type(mine.zero._inners[0]) is torch.optim.SGD


def test_a_model_that_was_deferred_gets_its_memory_from_zk_and_checkpointed_blocks_train_the_same(tmp_path: Path) -> None:
    torch.manual_seed(0)
    with zk.deferred_init():
        model = FAMILIES["llama"]()
    assert all(param.is_meta for param in model.parameters())
    known = {field.name for field in dataclasses.fields(TrainingArguments)}
    more = {**ALONE, "activation_checkpointing" if "activation_checkpointing" in known else "gradient_checkpointing": True}
    ours = ZeroTrainer(model=model, args=arguments(tmp_path, **more), train_dataset=data("llama"), zero=on_drive(tmp_path))
    ours.train()
    assert_alike(history(ours), history(trained(Trainer, "llama", tmp_path, more=more)))


def test_the_example_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    example = Path(__file__).parents[2] / "examples" / "huggingface.py"
    small = ["--steps", "3", "--layers", "1", "--width", "16", "--stage", "3", "--offload", "--bf16"]
    monkeypatch.setattr("sys.argv", [str(example), "--data", str(example), "--out", str(tmp_path / "out"), *small])
    runpy.run_path(str(example), run_name="__main__")
    assert re.search(r"validation loss [0-9.]+ nats per byte", capsys.readouterr().out)
    assert tf.GPT2LMHeadModel.from_pretrained(tmp_path / "out").config.n_embd == 16


def test_a_second_run_begins_with_a_new_model_where_there_is_a_model_init(tmp_path: Path) -> None:
    options = {"model_init": lambda: make("gpt2"), "train_dataset": data("gpt2"), "zero": {"stage": 3, **HOST}}
    trainer = ZeroTrainer(args=arguments(tmp_path, **SHORT), **options)
    runs = []
    for _ in range(2):
        trainer.train()
        runs.append((trainer.zero, history(trainer)))
    assert runs[0][1] == runs[1][1]
    assert not runs[0][0]._runtime.stores
    assert runs[1][0]._runtime.stores


def test_a_model_that_memory_has_no_room_for_twice_is_saved_for_zk_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    more = {"max_steps": 2, "save_steps": 2, "eval_strategy": "no"}
    trainer = made(ZeroTrainer, "t5", tmp_path, more=more, zero=on_drive(tmp_path))
    monkeypatch.setattr("zk.integrations.huggingface.host_memory", lambda: (1000, 1000))
    monkeypatch.setattr(zk.ZeroOptimizer, "consolidated_state_dict", None, raising=False)
    trainer.train()
    trainer.save_model(str(tmp_path / "last"))
    with zk.gather(list(trainer.model.parameters())):
        want = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    for folder in (tmp_path / "checkpoint-2", tmp_path / "last"):
        assert f"no room for all weights: 'zk export {folder / 'zk'} OUT'" in caplog.text
        export(folder / "zk", folder / "weights")
        found = type(trainer.model).from_pretrained(folder / "weights").state_dict()
        assert found.keys() == want.keys()
        assert all(torch.equal(found[name], value) for name, value in want.items())
    made(ZeroTrainer, "t5", tmp_path, seed=5, more=more, zero={"stage": 2}).train(resume_from_checkpoint=True)


# ---- folders and adapters that are used again --------------------------------------------------------------------------------------


def test_a_folder_that_is_written_again_is_gone_on_from_as_it_is_now(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options = {"stop": MIDDLE, "zero": {"stage": 2}}
    trained(ZeroTrainer, "gpt2", tmp_path, **options)
    more = {"save_only_model": True, "eval_strategy": "no"}
    weights_only = trained(ZeroTrainer, "gpt2", tmp_path, seed=7, more=more, **options)
    resumed = made(ZeroTrainer, "gpt2", tmp_path, seed=5, more=more, zero={"stage": 2})
    resumed._load_from_checkpoint(str(tmp_path / f"checkpoint-{MIDDLE}"))
    assert_same_weights(dict(resumed.model.named_parameters()), dict(weights_only.model.named_parameters()))
    resumed.train(resume_from_checkpoint=True)
    assert "has weights only" in caplog.text and resumed.zero.metrics()["steps"] == STEPS - MIDDLE
    shutil.rmtree(tmp_path / f"checkpoint-{STEPS}")
    trained(ZeroTrainer, "gpt2", tmp_path, **options)
    trained(Trainer, "gpt2", tmp_path, seed=8, stop=MIDDLE)  # over the same folder: both have a state there now
    with pytest.raises(ValueError, match=r"has zk/, of a ZeroTrainer, and optimizer\.pt"):
        made(ZeroTrainer, "gpt2", tmp_path, zero={"stage": 2}).train(resume_from_checkpoint=True)


def test_adapters_that_are_not_trained_and_embeddings_are_saved_too(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    found = []
    for cls, options in ((Trainer, {}), (ZeroTrainer, {"zero": on_drive(tmp_path)})):
        torch.manual_seed(0)
        base = make("llama")
        base.resize_token_embeddings(70)
        model = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj", "embed_tokens"], task_type="CAUSAL_LM"))
        model.add_adapter("reference", peft.LoraConfig(r=2, target_modules=["v_proj"], init_lora_weights=False, task_type="CAUSAL_LM"))
        args = arguments(tmp_path / cls.__name__, **SHORT)
        trainer = cls(model=model, args=args, train_dataset=data("llama"), **options)
        trainer.train()
        trainer.save_model(str(tmp_path / cls.__name__ / "last"))
        found.append({folder: weights(tmp_path / cls.__name__ / "last" / folder) for folder in (".", "reference")})
    plain, ours = found
    assert any("embed_tokens" in name for name in plain["."]) and plain["reference"]
    for folder in plain:
        assert_same_weights(ours[folder], plain[folder])


def test_a_second_train_begins_without_the_gradients_of_one_that_was_interrupted(tmp_path: Path) -> None:
    class Interrupts(TrainerCallback):
        def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 1 and not done:
                done.append(1)
                raise KeyboardInterrupt

    runs = []
    for cls, options in ((Trainer, {}), (ZeroTrainer, {"zero": {"stage": 2}})):
        done: list[int] = []
        trainer = made(cls, "gpt2", tmp_path / cls.__name__, more=SHORT, **options)
        trainer.add_callback(Interrupts())
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
        trainer.train()
        runs.append(history(trainer))
    assert_alike(runs[1], runs[0])


def test_bf16_has_the_logits_of_from_pretrained_in_bf16_at_positions_far_apart(tmp_path: Path) -> None:
    """Rotary frequencies are a buffer that transformers leaves in fp32: rounded to bf16, they are off by whole turns at such a distance."""
    make("llama", max_position_embeddings=16384).save_pretrained(tmp_path)
    ids = torch.randint(0, 61, (1, 16), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    positions = torch.cat([torch.arange(8), torch.arange(8000, 8008)])[None].to(DEVICE)
    stock = tf.LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).to(DEVICE).eval()
    with torch.no_grad():
        want = stock(input_ids=ids, position_ids=positions).logits
    for stage in (2, 3):
        model = tf.LlamaForCausalLM.from_pretrained(tmp_path).to(DEVICE).eval()
        optimizer = zk.ZeroOptimizer(model, torch.optim.AdamW(model.parameters()), stage=stage, dtype="bf16", **(HOST if stage == 3 else {}))
        with optimizer, torch.no_grad():
            assert torch.equal(model(input_ids=ids, position_ids=positions).logits, want)


def test_what_a_model_of_transformers_keeps_in_fp32_is_kept() -> None:
    model = make("t5")
    with zk.ZeroOptimizer(model, torch.optim.AdamW(model.parameters()), dtype="fp16", loss_scale=None):
        in_fp32 = {name for name, param in model.named_parameters() if param.dtype == torch.float32}
        assert in_fp32 == {name for name, _ in model.named_parameters() if ".wo." in name} and len(in_fp32) == 4
