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
from tests.models import DEVICE, GPT
from tests.world import run_world

pytestmark = pytest.mark.usefixtures("one_thread")
HOST = {"param_tier": "host", "optimizer_tier": "host"}


def over(model: nn.Module, stage: int = 3, **options: Any) -> zk.ZeroOptimizer:
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return zk.ZeroOptimizer(model, inner, stage=stage, **(HOST if stage == 3 else {}), **options)


def generates(options: dict[str, Any]) -> tuple[list[list[int]], list[list[int]]]:
    """Texts of the plain model and of a partitioned one, which end on each rank at another length."""
    rank, model = torch.distributed.get_rank(), make("llama")
    prompt = torch.randint(3, 61, (2, 4), generator=torch.Generator().manual_seed(rank))
    ends = list(range(3, 61, 2 if rank else 9))
    options = {"max_new_tokens": 12, "eos_token_id": ends, "pad_token_id": 0, **options}

    def texts() -> list[list[int]]:
        torch.manual_seed(rank)
        found = model.eval().generate(prompt.to(DEVICE), **options)
        return [list(text[: max(n for n, word in enumerate(text) if word) + 1]) for text in found.tolist()]

    want = texts()
    with over(model) as optimizer:
        found = texts()
        model.train()(input_ids=prompt, labels=prompt).loss.backward()  # ranks are still at one place
        optimizer.step()
    return found, want


def drops_layers(_: Any) -> list[float]:
    """Losses where each rank draws for itself which layers to drop."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 24}
    convs = {"conv_dim": [8, 8], "conv_stride": [4, 4], "conv_kernel": [8, 8], "num_feat_extract_layers": 2}
    position = {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
    config = tf.Wav2Vec2Config(vocab_size=20, layerdrop=0.5, apply_spec_augment=False, **sizes, **convs, **position)
    torch.manual_seed(0)
    model, losses = tf.Wav2Vec2ForCTC(config).train(), []
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
        copied = copy.deepcopy(model)
    found["a copy"] = ask(copied)
    optimizer.close(gather=True)
    found["closed"] = ask(model)
    return found


def compiles(_: Any) -> tuple[list[float], list[float], int]:
    """Losses with compiled blocks and without, and how many graphs each block became at most."""
    losses, counter = [], torch._dynamo.testing.CompileCounter()
    for backend in (None, counter):
        torch.manual_seed(0)
        model, found = GPT(), list[float]()
        with over(model) as optimizer:
            for block in model.blocks if backend is not None else ():
                block.compile(backend=backend)
            for seed in range(2):
                ids = torch.randint(0, 16, (2, 8), generator=torch.Generator().manual_seed(seed))
                loss = model(ids).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                found.append(loss.item())
        losses.append(found)
    return losses[0], losses[1], counter.frame_count


WORK = {"greedy": (generates, {"do_sample": False}), "sampled": (generates, {"do_sample": True})}
WORK |= {"beams": (generates, {"num_beams": 3, "do_sample": False})}
WORK |= {"layers": (drops_layers, None), "answers": (answers, None), "compiles": (compiles, None)}


def on_rank(name: str) -> Any:
    call, case = WORK[name]
    return call(case)


@pytest.fixture(scope="module")
def on_two_ranks() -> dict[str, list[Any]]:
    results = dict(zip(WORK, run_world(2, on_rank, list(WORK)), strict=True))
    for name, result in results.items():
        for rank in result:
            assert not isinstance(rank, Exception), f"{name}: {rank}"
    return results


@pytest.mark.parametrize("how", ("greedy", "sampled", "beams"))
def test_generate_waits_for_ranks_whose_texts_are_longer(how: str, on_two_ranks: dict[str, list[Any]]) -> None:
    results = on_two_ranks[how]
    assert all(found == want for found, want in results)
    assert len({max(map(len, found)) for found, _ in results}) == 2, "the texts are of one length, so nothing waited"


def test_ranks_that_would_drop_other_layers_run_them_all(on_two_ranks: dict[str, list[Any]]) -> None:
    losses = torch.tensor(on_two_ranks["layers"])
    assert losses.isfinite().all() and not torch.equal(losses[0], losses[1])


def test_modules_say_so_while_their_parameters_are_partitioned(on_two_ranks: dict[str, list[Any]]) -> None:
    yes = {"model", "its body"}
    for found in on_two_ranks["answers"]:
        assert {name for name, answer in found.items() if answer} == yes


def test_compiled_blocks_stay_whole(on_two_ranks: dict[str, list[Any]]) -> None:
    for eager, compiled, graphs in on_two_ranks["compiles"]:
        assert compiled == pytest.approx(eager, rel=1e-5)
        assert graphs == 1


def test_one_process_drops_layers_as_ever() -> None:
    model = make("llama")
    with over(model):
        assert not is_fsdp_managed_module(model)
