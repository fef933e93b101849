"""At stage 3 over several ranks, modules tell transformers, TRL and PEFT that they are partitioned."""

from __future__ import annotations

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
from tests.models import DEVICE, GPT, train
from tests.world import call, run_world


def over(model: nn.Module, stage: int = 3) -> zk.ZeroOptimizer:
    tiers = {"param_tier": "host", "optimizer_tier": "host"} if stage == 3 else {}
    return zk.ZeroOptimizer(model, torch.optim.AdamW(model.parameters(), lr=1e-2), stage=stage, **tiers)


def generates(options: dict[str, Any]) -> tuple[list[list[int]], list[list[int]]]:
    """Texts of the plain model and of a partitioned one, which end on each rank at another length."""
    rank, model = torch.distributed.get_rank(), make("llama")
    prompt = torch.randint(3, 61, (2, 4), generator=torch.Generator().manual_seed(rank))
    ends = list(range(3, 61, 2 if rank else 9))

    def texts() -> list[list[int]]:
        torch.manual_seed(rank)
        found = model.eval().generate(prompt.to(DEVICE), max_new_tokens=12, eos_token_id=ends, pad_token_id=0, **options)
        return [list(text[: max(n for n, word in enumerate(text) if word) + 1]) for text in found.tolist()]

    want = texts()
    with over(model) as optimizer:
        found = texts()
        model.train()(input_ids=prompt, labels=prompt).loss.backward()  # ranks are still at one place
        optimizer.step()
    return found, want


def drops_layers(_: Any) -> list[float]:
    """Losses where each rank draws for itself which layers to drop."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 24, "vocab_size": 20}
    convs = {"conv_dim": [8, 8], "conv_stride": [4, 4], "conv_kernel": [8, 8], "num_feat_extract_layers": 2}
    position = {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
    torch.manual_seed(0)
    model = tf.Wav2Vec2ForCTC(tf.Wav2Vec2Config(layerdrop=0.5, apply_spec_augment=False, **sizes, **convs, **position)).train()
    losses = []
    with over(model) as optimizer:
        torch.manual_seed(torch.distributed.get_rank())
        for _step in range(4):
            loss = model(input_values=torch.randn(2, 400), labels=torch.randint(1, 19, (2, 4))).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


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


def compiles(_: Any) -> tuple[list[float], list[float], int]:
    """Losses with compiled blocks and without, and how many graphs each block became at most."""
    losses, counter = [], torch._dynamo.testing.CompileCounter()
    for compiled in (False, True):
        torch.manual_seed(0)
        model = GPT()
        with over(model) as optimizer:
            for block in model.blocks if compiled else ():
                block.compile(backend=counter)
            losses.append(train(model, optimizer, steps=2))
    return losses[0], losses[1], counter.frame_count


def test_two_ranks_stay_at_one_place_and_one_process_is_as_ever() -> None:
    ways: list[Any] = [{"do_sample": False}, {"do_sample": True}, {"num_beams": 3, "do_sample": False}]
    results = run_world(2, call, [*((generates, way) for way in ways), (drops_layers, None), (answers, None), (compiles, None)])
    assert not (failed := [rank for result in results for rank in result if isinstance(rank, Exception)]), failed
    *texts, dropped, told, compiled = results
    for ranks in texts:  # generate waits for ranks whose texts are longer
        assert all(found == want for found, want in ranks)
        assert len({max(map(len, found)) for found, _ in ranks}) == 2, "the texts are of one length, so nothing waited"
    losses = torch.tensor(dropped)  # ranks that would drop other layers run them all
    assert losses.isfinite().all() and not torch.equal(losses[0], losses[1])
    for found in told:  # modules say so while their parameters are partitioned
        assert {name for name, answer in found.items() if answer} == {"model", "its body"}
    for eager, losses, graphs in compiled:  # blocks stay whole
        assert losses == pytest.approx(eager, rel=1e-5) and graphs == 1
    model = make("llama")
    with over(model):
        assert not is_fsdp_managed_module(model)
