"""Models of transformers on long sequences, unmodified: the loss, gradients and trained values of the plain model, without its logits."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytest.importorskip("peft")

import peft
import transformers as tf
from transformers import Trainer

import zk
from tests.alive import Alive
from tests.integrations.families import data, make
from tests.integrations.test_huggingface import arguments, assert_alike, history, on_drive, without_dropout
from tests.test_linear_cross_entropy import error, pieces
from tests.world import run_world
from zk import deferred_logits, token_tiles
from zk.deferred_logits import DeferredLogits
from zk.integrations.huggingface import ZeroTrainer
from zk.linear_loss import LinearLoss

pytestmark = pytest.mark.usefixtures("one_thread")

SIZES: dict[str, Any] = {
    **{"hidden_size": 16, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1},
    **{"vocab_size": 71, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2},
}
MODELS = {
    "llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**SIZES)),
    "tied": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**SIZES, tie_word_embeddings=True)),
    "gemma2": lambda: tf.Gemma2ForCausalLM(tf.Gemma2Config(**SIZES, head_dim=8, final_logit_softcapping=5.0)),  # a softcap, and heads that are tied
    "granite": lambda: tf.GraniteForCausalLM(tf.GraniteConfig(**SIZES, logits_scaling=8.0)),  # a factor
    "mixtral": lambda: tf.MixtralForCausalLM(tf.MixtralConfig(**SIZES, num_local_experts=4)),
    "gpt2": lambda: tf.GPT2LMHeadModel(tf.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=71, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)),
}


@pytest.fixture(autouse=True)
def small_tiles() -> Iterator[None]:
    with pieces(), mock.patch.object(token_tiles, "TOKENS", 5), mock.patch.object(token_tiles, "TOKENS_ON_DEVICE", 5):
        yield


@pytest.fixture
def computed() -> Iterator[list[tuple[int, ...]]]:
    """Shapes of the logits that were computed after all."""
    found: list[tuple[int, ...]] = []
    compute = deferred_logits.DeferredLogits.compute

    def noted(logits: DeferredLogits) -> Tensor:
        if logits.computed is None:
            found.append(tuple(logits.shape))
        return compute(logits)

    with mock.patch.object(deferred_logits.DeferredLogits, "compute", noted):
        yield found


def ids_of(seed: int = 0) -> dict[str, Tensor]:
    ids = torch.randint(3, 71, (2, 13), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids.masked_fill(torch.arange(13) % 4 == seed % 4, -100)}


def pair(name: str) -> tuple[Any, Any]:
    torch.manual_seed(0)
    plain = MODELS[name]()
    return plain, copy.deepcopy(plain)


@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_are_those_of_the_model_and_no_logits_are_computed(name: str, computed: list[Any]) -> None:
    plain, model = pair(name)
    names = zk.long_context(model)
    assert any("mlp" in name for name in names) and any("norm" in name or "ln_" in name for name in names)
    for number in (None, torch.tensor(40)):  # the Trainer's number of targets in all micro-batches
        losses = [it(**ids_of(), num_items_in_batch=number).loss for it in (plain, model)]
        for it, loss in zip((plain, model), losses, strict=True):
            it.zero_grad()
            (2 * loss).backward()
        assert error(losses[1], losses[0]) < 1e-6
        for (what, want), got in zip(plain.named_parameters(), model.parameters(), strict=True):
            if want.grad is None or float(want.grad.norm()) < 1e-6:  # biases of keys: nothing but rounding
                continue
            assert error(got.grad, want.grad) < 1e-5, what
    assert computed == []


def test_max_nbytes_limits_tiles_and_logits_and_changes_no_bit() -> None:
    sizes, found = [], []
    logits = LinearLoss._logits
    for max_nbytes in (None, "16KiB", 4 * 8 * 64):
        _, model = pair("llama")
        zk.long_context(model, max_nbytes=max_nbytes)
        with mock.patch.object(LinearLoss, "_logits", lambda *args: sizes.append(len(args[2])) or logits(*args)):
            if max_nbytes == 4 * 8 * 64:
                with pytest.raises(ValueError, match=r"at least \d+: .* a tile of 5 tokens of 'model\.layers\.0\.mlp'"):
                    model(**ids_of())
                zk.untile_sequence(model)
            loss = model(**ids_of()).loss
            loss.backward()
        found.append([loss, *(param.grad for param in model.parameters())])
    assert set(sizes) == {71, 64, 71 - 64}
    assert all(torch.equal(*two) for two in zip(*found[:2], strict=True))
    assert all(error(*two) < 1e-5 for two in zip(found[2], found[0], strict=True))


def test_memory_grows_by_ten_tensors_as_wide_as_the_model_and_by_checkpoints() -> None:
    """Attention's four and their gradients, the input of its layers and the gradient around the block; two inputs of blocks; sines and cosines."""
    torch.manual_seed(0)
    model = tf.LlamaForCausalLM(tf.LlamaConfig(**SIZES | {"hidden_size": 64, "intermediate_size": 128, "num_key_value_heads": 2}))
    zk.long_context(model)
    found = []
    with mock.patch.object(token_tiles, "TOKENS", 32):
        for tokens in (100, 1536, 2048):  # (the first one: modules are tried)
            ids = torch.randint(3, 71, (1, tokens))
            with Alive(lambda tensor: tensor.device.type != "meta") as alive:
                model(ids, labels=ids).loss.backward()
            found.append(alive.most)
    assert (found[2] - found[1]) / (512 * 64 * 4) == pytest.approx(10 + 2 + 1, rel=0.01)


def test_logits_that_are_used_are_those_of_the_model(computed: list[Any]) -> None:
    for name in ("llama", "gemma2", "granite"):
        plain, model = pair(name)
        zk.long_context(model)
        given = ids_of()
        for it in (plain, model):
            it.train()
        outputs = [it(**given) for it in (plain, model)]
        torch.testing.assert_close(outputs[1].logits + 0, outputs[0].logits)
        assert torch.equal(outputs[1].logits.argmax(-1), outputs[0].logits.argmax(-1))
        for out in outputs:
            (out.loss + F.log_softmax(out.logits, -1)[..., 3].mean()).backward()  # a loss of one's own beside the model's
        for want, got in zip(plain.parameters(), model.parameters(), strict=True):
            assert error(got.grad, want.grad) < 1e-5
        with torch.no_grad():
            torch.testing.assert_close(model.eval()(**given).logits.float() * 1, plain.eval()(**given).logits.float())
            alone = model(given["input_ids"]).logits
            assert type(alone) is Tensor
            generated = [it.generate(given["input_ids"], max_new_tokens=4, do_sample=False) for it in (plain, model)]
            assert torch.equal(*generated)
    assert computed


@pytest.mark.parametrize(
    "loss_of",
    [
        lambda logits, ids: F.cross_entropy(logits[:, :-1].reshape(-1, 71), ids[:, 1:].reshape(-1), label_smoothing=0.1),
        lambda logits, ids: F.cross_entropy(logits[..., :-1, :].contiguous().view(-1, 71).float(), ids[..., 1:].reshape(-1), reduction="none").mean(),
        lambda logits, ids: F.cross_entropy(input=logits.flatten(0, 1), target=ids.flatten()),
        lambda logits, ids: F.cross_entropy(logits[ids > 9], ids[ids > 9]),
        lambda logits, ids: F.cross_entropy(logits[0].to(torch.float32), ids[0]),
    ],
)
def test_losses_of_other_code_are_followed(loss_of: Any, computed: list[Any]) -> None:
    plain, model = pair("llama")
    zk.long_context(model, checkpoint=False)
    ids = ids_of()["input_ids"]
    for it in (plain, model):
        loss_of(it(ids).logits, ids).backward()
    assert computed == []
    for want, got in zip(plain.parameters(), model.parameters(), strict=True):
        assert error(got.grad, want.grad) < 1e-5


@pytest.mark.parametrize(
    "use",
    [
        lambda logits: F.cross_entropy(logits.transpose(1, 2), torch.zeros(2, 13, dtype=torch.long)),
        lambda logits: F.cross_entropy(logits.view(-1, 71), torch.zeros(26, dtype=torch.long), weight=torch.arange(71.0) + 1),
        lambda logits: F.cross_entropy(logits.view(-1, 71), torch.softmax(torch.ones(26, 71), -1)),
        lambda logits: logits[..., 3].mean(),
        lambda logits: logits[:, -1:, :5].sum(),
        lambda logits: (torch.tanh(logits / 3) * 2).square().mean(),
        lambda logits: (logits * -2.0 + 1).square().mean(),
        lambda logits: logits.view(-1, 142).logsumexp(-1).sum(),
        lambda logits: torch.stack([logits, logits]).double().std(),
        lambda logits: logits[None, ..., None, :].pow(2).mean(),
    ],
)
def test_what_cannot_be_followed_gets_the_logits(use: Any, computed: list[Any]) -> None:
    plain, model = pair("llama")
    zk.long_context(model, checkpoint=False)
    ids = ids_of()["input_ids"]
    found = [use(it(ids).logits) for it in (plain, model)]
    torch.testing.assert_close(*found)
    for loss in found:
        loss.backward()
    assert computed
    for want, got in zip(plain.parameters(), model.parameters(), strict=True):
        assert error(got.grad, want.grad) < 1e-4


def own() -> tuple[nn.Module, nn.Module]:
    """A model of one's own, whose head has a bias, without and with deferred logits."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Embedding(71, 16), nn.LayerNorm(16), nn.Linear(16, 71))
    model = copy.deepcopy(plain)
    zk.long_context(model, head="2", checkpoint=False)
    return plain, model


def assert_same_gradients(plain: nn.Module, model: nn.Module, most: float = 1e-5) -> None:
    for (name, want), got in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert got.grad is not None and error(got.grad, want.grad) < most, name


@pytest.mark.parametrize("change", [lambda logits: logits * 0.25, lambda logits: logits / 4, lambda logits: torch.tanh(logits / 3) * 3])
def test_a_factor_is_that_of_the_bias_too(change: Any) -> None:
    models, ids = own(), ids_of()["input_ids"]
    losses = [F.cross_entropy(change(model(ids)).flatten(0, 1), ids.flatten()) for model in models]
    assert error(losses[1], losses[0]) < 1e-6
    for loss in losses:
        loss.backward()
    assert_same_gradients(*models)


@pytest.mark.parametrize("look", (torch.no_grad, torch.inference_mode))
def test_a_look_at_logits_leaves_them_their_graph(look: Any) -> None:
    models, ids = own(), ids_of()["input_ids"]
    found = []
    for model in models:
        logits = model(ids)
        with look():
            found.append(logits.argmax(-1).clone())
        F.cross_entropy(logits.flatten(0, 1), ids.flatten()).backward()
    assert torch.equal(*found)
    assert_same_gradients(*models)


@pytest.mark.parametrize("use", (lambda logits: F.cross_entropy(logits[0], torch.arange(13)), lambda logits: logits.float().logsumexp(-1).mean()))
def test_logits_have_the_autocast_of_their_forward(use: Any) -> None:
    """A loss outside of the context: the head computes in its precision all the same."""
    models, ids = own(), ids_of()["input_ids"]
    for model in models:
        model[1].register_forward_hook(lambda _module, _args, output: output.bfloat16())
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(ids)
        loss = use(logits)
        loss.backward()
        assert (logits + 0).dtype == torch.bfloat16
    assert_same_gradients(*models, most=2e-2)


@pytest.mark.parametrize("stage", (0, 2))
def test_logits_of_an_earlier_step_are_refused(stage: int) -> None:
    _, model = own()
    ids = ids_of()["input_ids"]
    with zk.ZeroOptimizer(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage) as optimizer:
        logits, kept = model(ids), model(ids)
        want = kept + 0
        F.cross_entropy(logits.flatten(0, 1), ids.flatten()).backward()
        optimizer.step()
        assert torch.equal(kept, want)
        for use in (lambda: logits.argmax(-1), lambda: F.cross_entropy(logits.flatten(0, 1), ids.flatten())):
            with pytest.raises(RuntimeError, match="the head were written after the forward"):
                use()


def test_what_a_model_may_not_be_is_refused() -> None:
    _, model = pair("llama")
    zk.long_context(model)
    with pytest.raises(ValueError, match="call long_context once"):
        zk.long_context(model)
    _, model = pair("llama")
    model.lm_head = nn.Sequential(model.lm_head)
    with pytest.raises(TypeError, match="is a Sequential"):
        zk.long_context(model)
    with pytest.raises(ValueError, match="head='lm_head'"):
        zk.long_context(nn.Sequential(nn.Linear(3, 3)))
    _, model = pair("mixtral")
    zk.long_context(model)
    with pytest.raises(RuntimeError, match="set output_router_logits"):
        model(**ids_of(), output_router_logits=True)


def test_a_head_that_takes_the_place_of_the_first_is_deferred_too(computed: list[Any]) -> None:
    plain, model = pair("llama")
    zk.long_context(model)
    first, given = model.lm_head, ids_of()
    model(**given).loss.backward()
    for it in (plain, model):
        it.resize_token_embeddings(80)  # which makes another head
        with torch.no_grad():
            for param in (it.lm_head.weight, it.model.embed_tokens.weight):
                param.copy_(torch.randn(param.shape, generator=torch.Generator().manual_seed(1)) / 8)
    assert model.lm_head is not first
    losses = [it(**given).loss for it in (plain, model)]
    assert error(losses[1], losses[0]) < 1e-6 and computed == []
    assert "forward" not in vars(first) and type(first(torch.ones(2, 16))) is Tensor
    model.lm_head = zk.TiledLinear.from_linear(model.lm_head, 1, 3)
    assert error(model(**given).loss, losses[0]) < 1e-6 and computed == []
    model.lm_head = nn.Sequential(plain.lm_head)
    with pytest.raises(TypeError, match=r"the head of LlamaForCausalLM is a Sequential, .* needs an nn\.Linear"):
        model(**given)


# ---- stages, drives, ranks, adapters -----------------------------------------------------------------------------------------


def trained(case: tuple[str, dict[str, Any], str]) -> str:
    """Train on this rank's part of the batch, with the mean over all ranks' targets; "" if it is the plain model on all of it."""
    name, options, how = case
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    with pieces(), mock.patch.object(token_tiles, "TOKENS", 5):
        plain, model = pair(name)
        if how == "adapters":
            torch.manual_seed(1)
            config = peft.LoraConfig(r=2, target_modules=["gate_proj", "down_proj", "q_proj"], init_lora_weights=False)
            model = peft.get_peft_model(model, config)
            plain = copy.deepcopy(model)
        if how == "tiled head":
            model.lm_head = zk.TiledLinear.from_linear(model.lm_head, 1, 3)
        zk.long_context(model)
        trains = [param for param in plain.parameters() if param.requires_grad]
        adam = torch.optim.AdamW(trains, lr=1e-2, eps=1e-4)
        inner = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2, eps=1e-4)
        with zk.ZeroOptimizer(model, inner, **options) as optimizer:
            for step in range(2):
                parts = [ids_of(2 * step + number) for number in (0, 1)]
                count = sum(int((part["labels"][:, 1:] != -100).sum()) for part in parts)
                sum(plain(**part, num_items_in_batch=count).loss for part in parts).backward()
                adam.step()
                adam.zero_grad()
                mine = parts if world == 1 else parts[rank : rank + 1]

                def loss_fn(model: nn.Module, part: dict[str, Tensor], count: int = count) -> Tensor:
                    return model(**part, num_items_in_batch=count, use_cache=False).loss * world  # zk averages over ranks

                if how == "accumulate":
                    optimizer.accumulate(mine, loss_fn)
                else:
                    for part in mine:
                        optimizer.backward(loss_fn(model, part))
                optimizer.step()
                optimizer.zero_grad()
            state = optimizer.consolidated_state_dict()
    worst = max(float((state[key] - value).abs().max()) for key, value in plain.state_dict().items())
    return "" if worst < 3e-4 else f"{name}, {options}, {how}: parameters differ by {worst}"


def cases(folder: Path) -> list[tuple[str, dict[str, Any], str]]:
    def drive(name: str) -> dict[str, Any]:
        (folder / name).mkdir()
        return on_drive(folder / name)

    return [
        ("tied", {"stage": 2}, ""),
        ("tied", drive("tied"), ""),
        ("llama", drive("head") | {"overlap_step": True}, "tiled head"),
        ("mixtral", {"stage": 3}, ""),
        ("gemma2", drive("gemma2"), "accumulate"),
        ("llama", drive("adapters"), "adapters"),
    ]


def test_it_trains_at_every_stage_as_the_plain_model_does(tmp_path: Path) -> None:
    for case in cases(tmp_path):
        assert trained(case) == ""


def test_it_trains_over_ranks_with_other_numbers_of_targets_as_the_plain_model_does(tmp_path: Path) -> None:
    found = run_world(2, trained, cases(tmp_path)[1:3])
    assert found == [["", ""]] * len(found)


# ---- the Trainer -------------------------------------------------------------------------------------------------------------


def test_the_trainer_has_the_losses_of_the_plain_one(tmp_path: Path, computed: list[Any]) -> None:
    found = []
    for cls, options in ((Trainer, {}), (ZeroTrainer, {"zero": on_drive(tmp_path), "long_context": True})):
        more = {"max_steps": 3, "save_strategy": "no", "eval_steps": 3, "prediction_loss_only": True, "gradient_accumulation_steps": 2}
        args = arguments(tmp_path / cls.__name__, **more)
        trainer = cls(model=without_dropout(make("llama")), args=args, train_dataset=data("llama"), eval_dataset=data("llama", 6, seed=2), **options)
        trainer.train()
        found.append(history(trainer))
    assert_alike(found[1], found[0])
    assert computed == []
    trainer.args.prediction_loss_only = False
    predicted = trainer.predict(data("llama", 6, seed=2)).predictions
    assert predicted.shape == (6, 12, 61) and computed
    trainer.zero.close()
    with pytest.raises(ValueError, match="of all logits"):
        args = arguments(tmp_path, label_smoothing_factor=0.1, eval_strategy="no")
        ZeroTrainer(model=make("llama"), args=args, train_dataset=data("llama"), long_context=True)
