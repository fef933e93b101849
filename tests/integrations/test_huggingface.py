"""ZeroTrainer against the Trainer of transformers: same seed, same data, same losses."""

import contextlib
import json
import re
import runpy
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import transformers as tf
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer, TrainerCallback

import zk
from tests.integrations.families import as_rank, data, history, make, weights
from tests.models import DEVICE
from tests.world import run_world
from zk.checkpoint.export import export
from zk.integrations.huggingface import ZeroSeq2SeqTrainer, ZeroTrainer, ZeroTrainingArguments

STEPS, MIDDLE = 4, 2
# (relative, absolute) distance from losses, norms and parameters of the plain Trainer, whose norm is not summed in float64
EXACT = 1e-5, 1e-6
ROUNDED = 2e-2, 2e-2  # bf16 parameters against autocast over fp32 ones, which rounds activations in other places
ON_CPU = DEVICE.type == "cpu"
ON_RANKS = "mixtral" if ON_CPU else "gpt2"  # for ranks the others are as gpt2 is
HOST = {"stage": 3, "param_tier": "host", "optimizer_tier": "host"}
ALONE = {"save_strategy": "no", "eval_strategy": "no"}
SHORT = {**ALONE, "max_steps": 2}


def on_drive(folder: Path) -> dict[str, Any]:
    """Stage 3 whose parameters are truly gone between uses, in one process and without a GPU."""
    return {"stage": 3, "param_tier": "nvme", "optimizer_tier": "nvme", "nvme_path": str(folder)}


class StopAt(TrainerCallback):
    """Ends a run after a step, with the schedule of the whole run, as a machine that goes away would."""

    def __init__(self, step: int | None) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = control.should_training_stop or state.global_step == self.step


def arguments(folder: Path | str, **options: Any) -> Any:
    common: Any = {"output_dir": str(folder), "report_to": [], "disable_tqdm": True, "dataloader_pin_memory": False, "use_cpu": ON_CPU}
    common |= {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": STEPS, "logging_steps": 1}
    common |= {"learning_rate": 1e-2, "weight_decay": 0.1, "lr_scheduler_type": "cosine", "warmup_steps": 1, "max_grad_norm": 1.0}
    common |= {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 4, "save_strategy": "steps", "save_steps": MIDDLE}
    common["adam_epsilon"] = 1e-6  # the bias of keys has no gradient but rounding, which Adam would blow up to full steps
    common |= {} if ON_CPU else {"ddp_find_unused_parameters": False}  # torch does that in C++, with memory of a real GPU
    return Seq2SeqTrainingArguments(**{**common, **options})


def made(cls: type, family: str, folder: Any, seed: int = 0, stop: int | None = None, more: Any = None, model: Any = None, **options: Any) -> Any:
    given = options if "model_init" in options else {"model": model or make(family, seed), **options}
    sets = {"train_dataset": data(family), "eval_dataset": data(family, 6, seed=2)}
    return cls(args=arguments(folder, **(more or {})), callbacks=[StopAt(stop)], **sets, **given)


def trained(cls: type, family: str, folder: Path | str, resume: bool = False, **options: Any) -> Any:
    """A Trainer that has trained."""
    trainer = made(cls, family, folder, **options)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def assert_alike(got: Any, want: Any, tolerance: tuple[float, float] = EXACT) -> None:
    """Logs of two Trainers, or weights."""
    assert got.keys() == want.keys()
    for key, value in want.items():
        torch.testing.assert_close(*(torch.as_tensor(v).float() for v in (got[key], value)), rtol=tolerance[0], atol=tolerance[1], msg=str(key))


@pytest.fixture(autouse=True)
def _one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process sees no more than one GPU: with several the plain Trainer would use torch.nn.DataParallel."""
    if torch.cuda.is_available():
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)


@pytest.mark.parametrize("family", (pytest.param("gpt2", marks=pytest.mark.device), "vit"))
def test_zk_ends_with_the_losses_of_the_plain_trainer(family: str, tmp_path: Path) -> None:
    plain = trained(Trainer, family, tmp_path / "plain")
    drive = on_drive(tmp_path)
    ways = (({"stage": 2, "optimizer_tier": "host"}, drive), (drive, {"stage": 2}))
    for first, second in ways if family == "gpt2" else ways[:1]:
        folder = tmp_path / f"from stage {first['stage']}"
        trained(ZeroTrainer, family, folder, stop=MIDDLE, zero=first).zero.close()
        resumed = trained(ZeroTrainer, family, folder, resume=True, seed=5, zero=second)  # other initial values, which must not count
        assert resumed.zero.config.stage == second["stage"]
        assert_alike(history(resumed), history(plain))
        assert_alike(weights(folder / f"checkpoint-{STEPS}"), weights(tmp_path / "plain" / f"checkpoint-{STEPS}"))
        resumed.zero.close()
    middle = folder / f"checkpoint-{MIDDLE}"
    assert {"config.json", "model.safetensors", "scheduler.pt", "training_args.bin", "zk"} <= {file.name for file in middle.iterdir()}


def train_on_ranks(folder: str, first: Any, second: Any) -> Any:
    more = {"ddp_backend": "gloo" if ON_CPU else "nccl", "eval_strategy": "no"}
    if first:
        trained(ZeroTrainer, ON_RANKS, folder, stop=MIDDLE, more=more, zero=first).zero.close()
        trainer = trained(ZeroTrainer, ON_RANKS, folder, resume=True, seed=5, more=more, zero=second)
    else:
        trainer = trained(Trainer, ON_RANKS, folder, more=more)
    trainer.save_model(f"{folder}/last")
    return history(trainer)


def generate_on_ranks(folder: str, cls: Any, options: Any) -> Any:
    more = {"max_steps": 2, "predict_with_generate": True, "generation_max_length": 9, "ddp_backend": "gloo" if ON_CPU else "nccl"}
    trainer = made(cls, "t5", folder, more=more, **options)
    trainer.model.generation_config.eos_token_id = list(range(3, 61, 2))  # so that texts end at different lengths
    trainer.train()
    texts = trainer.predict(data("t5", 5, seed=3)).predictions.tolist()
    trainer.save_model(f"{folder}/last")
    return texts, history(trainer)


def on_rank(case: Any) -> Any:
    as_rank()
    return case[0](*case[1:])


def test_two_ranks_train_and_generate_what_the_plain_trainer_does_on_two(tmp_path: Path) -> None:
    """Texts have other lengths on each rank, which wait; of a model whose three largest layers share a parameter."""
    folders = [str(tmp_path / name) for name in ("plain", "zk", "plain texts", "texts")]
    cases: list[Any] = [(train_on_ranks, folders[0], {}, {}), (train_on_ranks, folders[1], HOST, {"stage": 2, "optimizer_tier": "host"})]
    cases += [(generate_on_ranks, folders[2], Seq2SeqTrainer, {}), (generate_on_ranks, folders[3], ZeroSeq2SeqTrainer, {"zero": HOST})]
    plain, ours, plain_texts, our_texts = results = run_world(2, on_rank, cases)
    assert not (failed := [rank for result in results for rank in result if isinstance(rank, Exception)]), failed
    assert_alike(ours[0], plain[0])
    for (texts, losses), (mine, found) in zip(plain_texts, our_texts, strict=True):
        assert mine == texts
        assert_alike(found, losses)
    for want, got in (folders[:2], folders[2:]):
        assert_alike(weights(f"{got}/last"), weights(f"{want}/last"))


@pytest.mark.parametrize(("dtype", "tolerance"), (pytest.param(None, ROUNDED, marks=pytest.mark.device), ("fp32", EXACT)))
def test_bf16_is_parameters_of_it_or_autocast_over_fp32_and_rates_are_logged(dtype: str | None, tolerance: Any, tmp_path: Path) -> None:
    more = {**SHORT, "bf16": True, "eval_strategy": "steps"}
    plain = trained(Trainer, "llama", tmp_path / "plain", more=more)
    ours = trained(ZeroTrainer, "llama", tmp_path / "zk", more=more, zero=zk.ZeroConfig(stage=2, dtype=dtype))
    assert next(ours.model.parameters()).dtype == (torch.float32 if dtype else torch.bfloat16)
    assert_alike(history(ours), history(plain), tolerance)
    lines = [line for line in ours.state.log_history if "loss" in line]
    assert len(lines) == 2 and all(line["zk/step_s"] > 0 for line in lines)
    assert ours.zero.metrics()["grad_norm"] == pytest.approx(min(lines[-1]["grad_norm"], 1.0), rel=1e-6)  # clipped


def test_fp16_has_one_loss_scale_and_a_skipped_step_does_not_move_the_schedule(tmp_path: Path) -> None:
    # accelerate refuses fp16 on a CPU, so parameters are asked for in fp16 directly
    zero = {"dtype": "fp16", "loss_scale": zk.DynamicLossScale(init=2.0**24)}
    trainer = trained(ZeroTrainer, "gpt2", tmp_path, more=ALONE, zero=zero)
    metrics = trainer.zero.metrics()
    assert trainer.accelerator.scaler is None and metrics["skipped_steps"] > 0
    assert metrics["steps"] + metrics["skipped_steps"] == STEPS and trainer.lr_scheduler.last_epoch == metrics["steps"]


def test_the_best_model_is_loaded_at_the_end(tmp_path: Path) -> None:
    more = {"load_best_model_at_end": True, "learning_rate": 0.5, "save_total_limit": 1}  # at this rate the last is worse
    trainer = trained(ZeroTrainer, "gpt2", tmp_path, more=more, zero=on_drive(tmp_path))
    losses = [line["eval_loss"] for line in trainer.state.log_history if "eval_loss" in line]
    assert trainer.state.best_metric == min(losses) < losses[-1]
    assert trainer.evaluate()["eval_loss"] == pytest.approx(min(losses), rel=1e-6)


def test_a_model_that_memory_has_no_room_for_twice_is_saved_for_zk_export(tmp_path: Path, monkeypatch: Any, caplog: Any) -> None:
    more = {"max_steps": 2, "eval_strategy": "no"}
    monkeypatch.setattr("zk.integrations.huggingface.host_memory", lambda: (1000, 1000))
    monkeypatch.setattr(zk.ZeroOptimizer, "consolidated_state_dict", None, raising=False)
    trainer = trained(ZeroTrainer, "t5", tmp_path, more=more, zero=on_drive(tmp_path))
    trainer.save_model(str(tmp_path / "last"))
    with zk.gather(list(trainer.model.parameters())):
        want = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    for folder in (tmp_path / "checkpoint-2", tmp_path / "last"):
        assert f"no room for all weights: 'zk export {folder / 'zk'} OUT'" in caplog.text
        export(folder / "zk", folder / "weights")
        found = type(trainer.model).from_pretrained(folder / "weights").state_dict()
        assert found.keys() == want.keys() and all(torch.equal(found[name], value) for name, value in want.items())
    trained(ZeroTrainer, "t5", tmp_path, resume=True, seed=5, more=more, zero={"stage": 2})


def with_adapters() -> nn.Module:
    """One of an embedding that is trained, and one that is not."""
    peft = pytest.importorskip("peft")
    base = make("llama")
    base.resize_token_embeddings(70)
    torch.manual_seed(0)
    model = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj", "embed_tokens"], task_type="CAUSAL_LM"))
    model.add_adapter("reference", peft.LoraConfig(r=2, target_modules=["v_proj"], init_lora_weights=False, task_type="CAUSAL_LM"))
    return model  # type: ignore[no-any-return]


def test_lora_trains_resumes_and_saves_all_adapters_alone(tmp_path: Path) -> None:
    zero = {"stage": 3, "param_tier": "nvme", "optimizer_tier": "host", "nvme_path": str(tmp_path)}
    plain = trained(Trainer, "llama", tmp_path / "plain", model=with_adapters())
    trained(ZeroTrainer, "llama", tmp_path / "zk", model=with_adapters(), stop=MIDDLE, zero=zero).zero.close()
    resumed = trained(ZeroTrainer, "llama", tmp_path / "zk", resume=True, model=with_adapters(), zero={"stage": 2})
    assert_alike(history(resumed), history(plain))
    for step in (MIDDLE, STEPS):
        for part, word in ((".", "embed_tokens"), ("reference", "v_proj")):
            got, want = (weights(tmp_path / name / f"checkpoint-{step}" / part) for name in ("zk", "plain"))
            assert any(word in name for name in want) and not any("o_proj" in name for name in want)
            assert_alike(got, want)


def test_a_checkpoint_of_the_plain_trainer_is_resumed_by_a_model_without_memory_too(tmp_path: Path) -> None:
    more = {"gradient_checkpointing": True}
    plain = trained(Trainer, "llama", tmp_path, more=more)
    shutil.rmtree(tmp_path / f"checkpoint-{STEPS}")
    for deferred in (False, True):
        with zk.deferred_init() if deferred else contextlib.nullcontext():
            model = make("llama", seed=5)
        assert all(param.is_meta == deferred for param in model.parameters())
        ours = trained(ZeroTrainer, "llama", tmp_path, resume=True, model=model, more=more | {"save_strategy": "no"}, zero=on_drive(tmp_path))
        assert_alike(history(ours), history(plain))


def test_a_folder_that_is_written_again_is_resumed_as_it_is_now(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options: dict[str, Any] = {"stop": MIDDLE, "zero": {"stage": 2}}
    trained(ZeroTrainer, "gpt2", tmp_path, **options)
    more = {"save_only_model": True, "eval_strategy": "no"}
    weights_only = trained(ZeroTrainer, "gpt2", tmp_path, seed=7, more=more, **options)
    resumed = made(ZeroTrainer, "gpt2", tmp_path, seed=5, more=more, zero={"stage": 2})
    resumed._load_from_checkpoint(str(tmp_path / f"checkpoint-{MIDDLE}"))
    assert_alike(dict(resumed.model.named_parameters()), dict(weights_only.model.named_parameters()))
    resumed.train(resume_from_checkpoint=True)
    assert "has weights only" in caplog.text and resumed.zero.metrics()["steps"] == STEPS - MIDDLE
    shutil.rmtree(tmp_path / f"checkpoint-{STEPS}")
    trained(ZeroTrainer, "gpt2", tmp_path, **options)
    trained(Trainer, "gpt2", tmp_path, seed=8, stop=MIDDLE)  # over the same folder: both have a state there now
    with pytest.raises(ValueError, match=r"has zk/, of a ZeroTrainer, and optimizer\.pt"):
        trained(ZeroTrainer, "gpt2", tmp_path, resume=True, zero={"stage": 2})


def test_a_second_train_begins_anew(tmp_path: Path) -> None:
    """Without the gradients of one that was interrupted; with a new model where there is a model_init."""

    class Interrupts(TrainerCallback):
        def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 1 and not done:
                done.append(1)
                raise KeyboardInterrupt

    runs = []
    for cls, options in ((Trainer, {}), (ZeroTrainer, {"zero": {"stage": 2}})):
        done: list[int] = []
        trainer = made(cls, "gpt2", tmp_path, more=SHORT, **options)
        trainer.add_callback(Interrupts())
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
        trainer.train()
        runs.append(history(trainer))
    assert_alike(runs[1], runs[0])
    trainer = made(ZeroTrainer, "gpt2", tmp_path, more=SHORT, model_init=lambda: make("gpt2"), zero=HOST)
    found = [(trainer.train(), trainer.zero, history(trainer))[1:] for _ in range(2)]
    assert found[0][1] == found[1][1] and found[0][0] is not found[1][0]
    with pytest.raises(RuntimeError, match="is closed"):
        found[0][0].step()


DEEPSPEED: dict[str, Any] = {
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": "auto", "warmup_num_steps": "auto"}},
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
    "steps_per_print": 2000,
} | dict.fromkeys(("gradient_accumulation_steps", "gradient_clipping", "train_batch_size", "train_micro_batch_size_per_gpu"), "auto")


def test_deepspeeds_json_is_taken_as_it_is_also_from_the_command_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Where it says "auto", the arguments count."""
    (tmp_path / "ds.json").write_text(json.dumps(DEEPSPEED))
    config = trained(ZeroTrainer, "gpt2", tmp_path, more={**SHORT, "max_steps": 1}, zero=str(tmp_path / "ds.json")).zero.config
    assert (config.stage, config.param_tier, config.optimizer_tier, config.dtype, config.clip_grad_norm) == (3, "host", "host", None, None)
    assert "these settings of the JSON are not used: optimizer, scheduler, steps_per_print" in caplog.text
    rounded = made(ZeroTrainer, "gpt2", tmp_path, more={**SHORT, "bf16": True}, zero=DEEPSPEED)
    assert rounded.accelerator.zero.dtype is torch.bfloat16
    command = ["--output_dir", str(tmp_path), "--deepspeed", str(tmp_path / "ds.json"), "--report_to", "none", "--max_steps", "1"]
    (args,) = tf.HfArgumentParser(ZeroTrainingArguments).parse_args_into_dataclasses([*command, "--lr_scheduler_type", "cosine"])
    assert args.deepspeed is None and args.zero == str(tmp_path / "ds.json") and "zero" not in args.to_dict()
    trainer = ZeroTrainer(model=make("gpt2"), args=args, train_dataset=data("gpt2", 8))
    assert (trainer.accelerator.zero.stage, trainer.accelerator.zero.param_tier) == (3, "host")
    with pytest.raises(ValueError, match=r"ZeroTrainingArguments\(deepspeed=.* and zero= are both given; keep one"):
        ZeroTrainer(model=make("gpt2"), args=args, zero={"stage": 2})
    for name, remedy in (("bf16_full_eval", "remove it"), ("torch_compile", "compile the blocks")):
        with pytest.raises(ValueError, match=rf"{name}=True.*{remedy}"):
            made(ZeroTrainer, "gpt2", tmp_path, more={"bf16": True, name: True})


def test_the_example_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    example = Path(__file__).parents[2] / "examples" / "huggingface.py"
    small = ["--steps", "3", "--layers", "1", "--width", "16", "--stage", "3", "--offload", "--bf16"]
    monkeypatch.setattr("sys.argv", [str(example), "--data", str(example), "--out", str(tmp_path / "out"), *small])
    runpy.run_path(str(example), run_name="__main__")
    assert re.search(r"validation loss [0-9.]+ nats per byte", capsys.readouterr().out)
    assert tf.GPT2LMHeadModel.from_pretrained(tmp_path / "out").config.n_embd == 16
