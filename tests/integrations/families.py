"""Tiny, randomly initialized models of several families of transformers, data for them, and what trainers did. No network."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from torch import Tensor, nn

transformers_is_quiet = tf.logging.set_verbosity_error()

_SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
_TEXT = {"vocab_size": 61, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}


def gpt2() -> nn.Module:
    return tf.GPT2LMHeadModel(tf.GPT2Config(n_positions=16, n_embd=16, n_layer=2, n_head=2, **_TEXT))


def llama(**options: Any) -> nn.Module:
    return tf.LlamaForCausalLM(tf.LlamaConfig(**{"max_position_embeddings": 16, "num_key_value_heads": 1, **_SIZES, **_TEXT, **options}))


def t5() -> nn.Module:
    """Embedding, decoder's embedding and head are one parameter."""
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
    return tf.T5ForConditionalGeneration(tf.T5Config(decoder_start_token_id=0, tie_word_embeddings=True, **sizes, **_TEXT))


def mixtral() -> nn.Module:
    """Eight experts of which each token uses one: some get no token of a batch."""
    sizes = {**_SIZES, "num_key_value_heads": 1, "max_position_embeddings": 16}
    return tf.MixtralForCausalLM(tf.MixtralConfig(num_local_experts=8, num_experts_per_tok=1, **sizes, **_TEXT))


def vit() -> nn.Module:
    return tf.ViTForImageClassification(tf.ViTConfig(image_size=8, patch_size=4, num_channels=1, num_labels=5, **_SIZES))


def moe() -> nn.Module:
    """Twelve experts to a layer: numbers of two digits, which are sorted as numbers."""
    sizes = {**_SIZES, "moe_intermediate_size": 8, "num_key_value_heads": 1}
    return tf.Qwen3MoeForCausalLM(tf.Qwen3MoeConfig(num_experts=12, num_experts_per_tok=2, head_dim=8, **sizes, **_TEXT))


def llava() -> nn.Module:
    vision = tf.CLIPVisionConfig(image_size=8, patch_size=4, **_SIZES)
    return tf.LlavaForConditionalGeneration(tf.LlavaConfig(vision_config=vision, text_config=tf.LlamaConfig(**_SIZES, **_TEXT), image_token_index=60))


def qwen2vl() -> nn.Module:
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
    text = {**_SIZES, **_TEXT, "num_key_value_heads": 1, "rope_parameters": rope}
    vision = {"depth": 2, "embed_dim": 16, "hidden_size": 16, "num_heads": 2, "patch_size": 4}
    return tf.Qwen2VLForConditionalGeneration(tf.Qwen2VLConfig(text_config=text, vision_config=vision))


def gpt2_base() -> nn.Module:
    return tf.GPT2Model(gpt2().config)


# a model that is saved, and one that is read from its folder
FOLDERS: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module]]] = {
    "mixtral": (mixtral, mixtral),
    "qwen3-moe": (moe, moe),
    "llava": (llava, llava),
    "qwen2-vl": (qwen2vl, qwen2vl),
    "a base into a tied head": (gpt2_base, gpt2),
    "a head into a base": (llama, lambda: tf.LlamaModel(llama().config)),
    "tied": (t5, t5),
}

FAMILIES: dict[str, Callable[..., nn.Module]] = {"gpt2": gpt2, "llama": llama, "t5": t5, "mixtral": mixtral, "vit": vit}


def make(family: str, seed: int = 0, **options: Any) -> Any:
    torch.manual_seed(seed)
    return FAMILIES[family](**options)


def tokenizer() -> Any:
    """Of words: w0 to w4."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"w{index}" for index in range(5))]
    words_of = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    words_of.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "bos_token": "<bos>", "unk_token": "<unk>"}
    return tf.PreTrainedTokenizerFast(tokenizer_object=words_of, **special)


def data(family: str, num: int = 64, seed: int = 1) -> list[dict[str, Any]]:
    """Examples; of texts the last few labels do not count, and not the same number of each."""
    draw = torch.Generator().manual_seed(seed)
    if family == "vit":
        return [{"pixel_values": torch.randn(1, 8, 8, generator=draw), "labels": index % 5} for index in range(num)]
    texts = [torch.randint(3, 61, (12,), generator=draw) for _ in range(num)]
    return [{"input_ids": ids, "labels": ids.masked_fill(torch.arange(12) >= 12 - index % 4, -100)} for index, ids in enumerate(texts)]


def history(trainer: Any) -> dict[tuple[int, str], float]:
    """What a Trainer has logged, by step and name, without times."""
    kept = ("loss", "grad_norm", "learning_rate", "eval_loss", "reward")
    return {(line["step"], name): line[name] for line in trainer.state.log_history for name in kept if name in line}


def weights(folder: Path | str) -> dict[str, Tensor]:
    """As from_pretrained would read them."""
    from safetensors.torch import load_file

    return {name: tensor for file in sorted(Path(folder).glob("*.safetensors")) for name, tensor in load_file(file).items()}


def as_rank() -> None:
    """Set what torchrun would have set."""
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT="1", OMP_NUM_THREADS="1")
