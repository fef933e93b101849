"""At stage 3 over several ranks, modules tell transformers, TRL and PEFT that they are partitioned."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

import transformers as tf
from transformers.integrations import is_fsdp_managed_module

import zk
from tests.integrations.families import make
from tests.models import adamw, descend
from tests.world import call, run_world


def over(model: nn.Module, stage: int = 3) -> zk.ZeroOptimizer:
    tiers = {"param_tier": "host", "optimizer_tier": "host"} if stage == 3 else {}
    return zk.ZeroOptimizer(model, adamw(model), stage=stage, **tiers)


def drops_layers(_: Any) -> list[float]:
    """Losses where each rank draws for itself which layers to drop."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 24, "vocab_size": 20}
    convs = {"conv_dim": [8, 8], "conv_stride": [4, 4], "conv_kernel": [8, 8], "num_feat_extract_layers": 2}
    position = {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
    torch.manual_seed(0)
    model = tf.Wav2Vec2ForCTC(tf.Wav2Vec2Config(layerdrop=0.5, apply_spec_augment=False, **sizes, **convs, **position)).train()
    with over(model) as optimizer:
        torch.manual_seed(torch.distributed.get_rank())
        return [descend(optimizer, model(torch.randn(2, 400), labels=torch.randint(1, 19, (2, 4))).loss) for _ in range(4)]


def answers(_: Any) -> dict[str, bool]:
    """What transformers is told, and when."""
    model, ask = make("llama"), is_fsdp_managed_module
    found = {"before": ask(model)}
    with over(model, stage=2):
        found["stage 2"] = ask(model)
    optimizer = over(model)
    found |= {"model": ask(model), "its body": ask(model.model), "a block, as torch.compile asks": ask(model.model.layers[0])}
    with zk.gather(list(model.parameters())):
        found["a copy"] = ask(copy.deepcopy(model))
    optimizer.close()
    found["closed"] = ask(model)
    return found


def test_two_ranks_stay_at_one_place_and_one_process_is_as_ever() -> None:
    dropped, told = results = run_world(2, call, [(drops_layers, None), (answers, None)])
    assert not (failed := [rank for result in results for rank in result if isinstance(rank, Exception)]), failed
    losses = torch.tensor(dropped)  # ranks that would drop other layers run them all
    assert losses.isfinite().all() and not torch.equal(losses[0], losses[1])
    for found in told:  # modules say so while their parameters are partitioned
        assert {name for name, answer in found.items() if answer} == {"model", "its body"}
    model = make("llama")
    with over(model):
        assert not is_fsdp_managed_module(model)
