"""Models of transformers on sequences in tiles, unmodified: loss and gradients of the plain model; what attention they may have."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytest.importorskip("peft")

import peft
import transformers as tf

import zk
from tests.integrations.families import data, make
from tests.integrations.test_huggingface import arguments, assert_alike, history, on_drive, without_dropout
from zk.accumulation.resting import Resting
from zk.integrations.huggingface import ZeroTrainer

long_context = sys.modules["zk.long_context"]  # (the function has its name)

pytestmark = pytest.mark.usefixtures("one_thread")

SIZES: dict[str, Any] = {
    **{"hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"vocab_size": 71, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2, "head_dim": 8},
}
GPT2 = {
    **{"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 71, "eos_token_id": 1, "bos_token_id": 2},
    **{"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0},
}
MODELS = {
    "llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**SIZES)),
    "tied": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**SIZES, tie_word_embeddings=True)),
    "qwen2": lambda: tf.Qwen2ForCausalLM(tf.Qwen2Config(**SIZES)),  # biases
    "qwen3": lambda: tf.Qwen3ForCausalLM(tf.Qwen3Config(**SIZES)),  # norms of queries and keys
    "mixtral": lambda: tf.MixtralForCausalLM(tf.MixtralConfig(**SIZES, num_local_experts=4)),
    "mistral": lambda: tf.MistralForCausalLM(tf.MistralConfig(**SIZES, sliding_window=None)),
    "gpt2": lambda: tf.GPT2LMHeadModel(tf.GPT2Config(**GPT2)),
}
TOKENS = 35


def batch_of() -> dict[str, Tensor]:
    ids = torch.randint(3, 71, (2, TOKENS), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids.masked_fill(torch.arange(TOKENS) < torch.tensor([[9], [0]]), -100)}


def pair(name: str) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = MODELS[name]().train()
    return model, copy.deepcopy(model)


def step(model: Any, tokens: int, use_cache: bool = False, **options: Any) -> float:
    """Gradients of a step in tiles, and its loss."""
    model.config.use_cache = use_cache
    inner = torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=0.1)
    model.optimizer_of_zk = optimizer = zk.ZeroOptimizer(model, inner, **options)
    losses = optimizer.accumulate(zk.sequence_tiles(batch_of(), tokens), lambda model, tile: model(**tile).loss)
    assert len(losses) == -(-TOKENS // tokens)
    return float(sum(losses))


def assert_gradients(plain: Any, model: Any, bound: float) -> None:
    want = {name: param.grad for name, param in plain.named_parameters() if param.grad is not None}
    most = max(float(grad.abs().max()) for grad in want.values())
    for name, param in model.named_parameters():
        if name in want:
            assert float((param.grad.float() - want[name].float()).abs().max()) < bound * most, name


@pytest.mark.parametrize("tokens", [64, 12, 5])
@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_are_those_of_the_model(name: str, tokens: int) -> None:
    plain, model = pair(name)
    loss = plain(**batch_of()).loss
    loss.backward()
    zk.long_context(model, checkpoint=tokens == 5)
    assert step(model, tokens, use_cache=tokens == 5, stage=3) == pytest.approx(loss.item(), rel=1e-6)  # (a checkpoint leaves caches out)
    assert_gradients(plain, model, 3e-6)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_in_bf16(name: str) -> None:
    plain, model = pair(name)
    loss = plain.bfloat16()(**batch_of()).loss
    loss.backward()
    assert step(model.bfloat16(), 12, stage=2) == pytest.approx(loss.item(), rel=2e-3)
    assert_gradients(plain, model, 2e-2)


def test_adapters_over_a_frozen_model() -> None:
    options = peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    plain, model = (peft.get_peft_model(each, options) for each in pair("llama"))
    model.load_state_dict(plain.state_dict())
    loss = plain(**batch_of()).loss
    loss.backward()
    assert step(model, 5, stage=3) == pytest.approx(loss.item(), rel=1e-6)
    assert_gradients(plain, model, 3e-6)


def test_with_long_context_all_rests_where_its_checkpoints_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks and embeddings get and give tensors without memory; checkpoints around blocks change nothing."""
    plain, model = pair("llama")
    loss = plain(**batch_of()).loss
    loss.backward()
    made: list[Any] = []

    def eager(*args: Any, **kwargs: Any) -> Any:
        made.append(zk.offload_activations(*args, min_nbytes=0, keep_last=0, **kwargs))
        return made[-1]

    monkeypatch.setattr(long_context, "offload_activations", eager)
    zk.long_context(model, nvme_path=tmp_path)
    seen = []

    def look(module: Any, args: Any, kwargs: Any) -> None:
        tables = kwargs["position_embeddings"]
        seen.append([type(tensor) is Resting for tensor in (*args, kwargs.get("hidden_states"), *tables) if isinstance(tensor, Tensor)])

    kind = type(model.model.layers[0])  # in front of the block's call, which gives it the tensors themselves
    call = kind.__call__
    monkeypatch.setattr(kind, "__call__", lambda block, *args, **kwargs: look(block, args, kwargs) or call(block, *args, **kwargs))
    assert step(model, 5, stage=3) == pytest.approx(loss.item(), rel=1e-6)
    assert_gradients(plain, model, 3e-6)
    assert len(seen) == 3 * 7 and all(all(each) and len(each) == 3 for each in seen)
    (offload,) = made
    assert not offload.blocks and not offload.file_nbytes and offload.num_offloaded > 100
    with torch.no_grad(), zk.gather(list(model.parameters())), zk.gather(list(model.parameters())):
        ids = batch_of()["input_ids"][:, :8]
        assert torch.equal(model.eval()(ids).logits, plain.eval()(ids).logits)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attn_implementation": "eager"}, "does not call it, and would not see other tiles .*attn_implementation=.sdpa"),
        ({"attention_dropout": 0.1}, "block 'model.layers.0' calls it with dropout"),
    ],
)
def test_other_attention_is_refused(change: dict[str, Any], message: str) -> None:
    model = tf.LlamaForCausalLM(tf.LlamaConfig(**SIZES, **change)).train()
    with pytest.raises(RuntimeError, match=message):
        step(model, 12)
    assert all(param.grad is None for param in model.parameters())


def test_windows_shorter_than_the_sequence_are_refused() -> None:
    for model, window in (
        (tf.MistralForCausalLM(tf.MistralConfig(**SIZES, sliding_window=34)), "sliding_window is 34"),
        (tf.Gemma2ForCausalLM(tf.Gemma2Config(**SIZES, sliding_window=4)), "sliding_window is 4"),
        (tf.Qwen2ForCausalLM(tf.Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=8, max_window_layers=1)), "sliding_window is 8"),
    ):
        with pytest.raises(ValueError, match=window):
            step(model.train(), 12)


def test_positions_that_depend_on_the_length_of_the_sequence_are_refused_beyond_theirs() -> None:
    for limit in (TOKENS, TOKENS - 1):
        rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
        model = tf.LlamaForCausalLM(tf.LlamaConfig(**SIZES, max_position_embeddings=limit, rope_parameters=rope)).train()
        if limit == TOKENS:
            assert step(model, 12) > 0
            continue
        with pytest.raises(ValueError, match="rope_type 'dynamic'\\) depend on the length of a sequence beyond 34 tokens"):
            step(model, 12)


@pytest.mark.parametrize("reentrant", [False, True])
def test_the_models_own_checkpoints_compute_nothing_more_in_accumulate(reentrant: bool) -> None:
    """They are inside of blocks, which are computed again in any case; they are there again after it."""
    counts, grads = [], []
    for with_checkpoints in (False, True):
        model = pair("llama")[0]
        if with_checkpoints:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        before = [vars(layer).get("_gradient_checkpointing_func") for layer in model.model.layers]
        calls: list[Any] = []
        for layer in model.model.layers:
            layer.mlp.register_forward_hook(lambda *_, calls=calls: calls.append(None))
        step(model, 12, stage=3)
        counts.append(len(calls))
        grads.append([param.grad for param in model.parameters()])
        assert [vars(layer).get("_gradient_checkpointing_func") for layer in model.model.layers] == before
    assert counts == [2 * 3 * 3] * 2
    assert all(map(torch.equal, *grads))


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_the_trainer_has_the_losses_of_the_plain_one(name: str, tmp_path: Path) -> None:
    """Sequences of 12 tokens in three tiles, four of them in each of two micro-batches; evaluation is of whole ones."""
    found = []
    options = {"zero": on_drive(tmp_path), "long_context": True, "sequence_tiles": 5}
    for cls, more in ((tf.Trainer, {}), (ZeroTrainer, options)):
        args = arguments(tmp_path / cls.__name__, max_steps=3, save_strategy="no", eval_steps=3, gradient_accumulation_steps=2)
        trainer = cls(model=without_dropout(make(name)), args=args, train_dataset=data(name), eval_dataset=data(name, 6, seed=2), **more)
        trainer.train()
        found.append(history(trainer))
    assert_alike(found[1], found[0])
    trainer.zero.close()


class Stop(tf.TrainerCallback):
    """Ends a training of four steps in its middle, so that the schedule of the learning rate is that of all."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop |= state.global_step == 2


def test_the_trainer_resumes_with_the_same_bits(tmp_path: Path) -> None:
    found = []
    for save, resume in (("no", False), ("steps", False), ("no", True)):
        args = arguments(tmp_path / "run", max_steps=4, save_strategy=save, save_steps=2, eval_strategy="no")
        options = {"zero": on_drive(tmp_path), "long_context": True, "sequence_tiles": 5}
        trainer = ZeroTrainer(model=make("llama"), args=args, train_dataset=data("llama"), callbacks=[Stop()] * (save == "steps"), **options)
        trainer.train(resume_from_checkpoint=resume)
        found.append((history(trainer), trainer.zero.consolidated_state_dict()))
        trainer.zero.close()
    (whole, params), _, (resumed, others) = found
    assert whole.keys() == resumed.keys() and {step for step, _ in whole} >= {1, 2, 3, 4}
    assert whole == resumed and params.keys() == others.keys()
    assert all(torch.equal(params[name], others[name]) for name in params)


def test_tiles_of_the_trainer_are_numbers_of_tokens(tmp_path: Path) -> None:
    args, name = arguments(tmp_path), "llama"
    with pytest.raises(ValueError, match="sequence_tiles must be a number of tokens, 2 or more; got True"):
        ZeroTrainer(model=make(name), args=args, train_dataset=data(name), sequence_tiles=True)
