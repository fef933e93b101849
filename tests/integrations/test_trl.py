"""TRL's trainers with ZeroTrainerMixin, against the same trainers without."""

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl")
pytest.importorskip("peft")

from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from tests.integrations.families import as_rank, history, make, tokenizer
from tests.world import run_world
from zk.integrations.huggingface import ZeroTrainerMixin

HOST = {"stage": 3, "param_tier": "host", "optimizer_tier": "host"}
COMMON = {"max_steps": 4, "logging_steps": 1, "save_steps": 2, "learning_rate": 1e-2, "adam_epsilon": 1e-6}
COMMON |= {"report_to": [], "use_cpu": True, "disable_tqdm": True, "bf16": False}


ZSFT = type("ZSFT", (ZeroTrainerMixin, SFTTrainer), {})
ZGRPO = type("ZGRPO", (ZeroTrainerMixin, GRPOTrainer), {})


def sft(cls: type, folder: Path, lora: bool = False, **options: Any) -> Any:
    texts = [f"w{i % 5} w{i * 7 % 5} w{i * 3 % 5} w4 w1" for i in range(32)]
    args = SFTConfig(str(folder), per_device_train_batch_size=4, max_length=16, **COMMON)
    if lora:
        options["peft_config"] = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    torch.manual_seed(0)
    data = Dataset.from_dict({"text": texts})
    trainer: Any = cls(model=make("llama"), args=args, train_dataset=data, processing_class=tokenizer(), **options)
    trainer.train()
    return trainer


def test_sft_trains_and_saves(tmp_path: Path) -> None:
    plain, ours = sft(SFTTrainer, tmp_path / "plain"), sft(ZSFT, tmp_path / "zk", zero=HOST)
    assert history(ours) == pytest.approx(history(plain), rel=1e-5)
    ours.save_model(str(tmp_path / "last"))
    ours.zero.close()
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "last").state_dict()
    assert all(torch.equal(found[name], value) for name, value in ours.model.state_dict().items())


def test_an_adapter_is_merged_after_training(tmp_path: Path) -> None:
    plain, ours = sft(SFTTrainer, tmp_path, lora=True), sft(ZSFT, tmp_path, lora=True, zero=HOST)
    with pytest.raises(RuntimeError, match="more than one element of the written-to tensor"):
        ours.model.merge_and_unload()
    ours.zero.close()
    want, found = (trainer.model.merge_and_unload().state_dict() for trainer in (plain, ours))
    assert found.keys() == want.keys()
    for name, value in want.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


def grpo(case: tuple[type, str, dict[str, Any]]) -> Any:
    """Losses and rewards, and how long the longest text of this rank was in each step."""
    cls, folder, options = case
    as_rank()
    lengths: list[int] = []

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        lengths.append(max(map(len, completion_ids)))
        return [float(len(ids)) for ids in completion_ids]

    sizes = {"per_device_train_batch_size": 2, "num_generations": 2, "max_completion_length": 24, "max_steps": 2}
    args = GRPOConfig(folder, **{**COMMON, "save_strategy": "no", **sizes}, ddp_backend="gloo")
    data = Dataset.from_dict({"prompt": [f"w{i % 5} w{i * 7 % 5}" for i in range(16)]})
    model = make("llama", vocab_size=len(tokenizer()), max_position_embeddings=64)
    given = {"reward_funcs": reward, "train_dataset": data, "processing_class": tokenizer()}
    trainer = cls(model=model, args=args, **given, **options)
    trainer.train()
    return history(trainer), lengths


def test_grpo_generates_on_ranks_whose_texts_end_at_other_lengths(tmp_path: Path) -> None:
    plain, ours = run_world(2, grpo, [(GRPOTrainer, str(tmp_path / "plain"), {}), (ZGRPO, str(tmp_path / "zk"), {"zero": HOST})])
    assert not (failed := [rank for rank in (*plain, *ours) if isinstance(rank, Exception)]), failed
    assert [lengths for _, lengths in plain] == [lengths for _, lengths in ours]
    assert ours[0][1] != ours[1][1], "the texts of both ranks were of one length"
    assert ours[0][0] == pytest.approx(plain[0][0], rel=1e-4, abs=1e-6)
