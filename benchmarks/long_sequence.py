"""Memory and time of a training step at long sequences, with zk.long_context and without: a Llama of two layers and 32,768 words, fp32.

usage: python benchmarks/long_sequence.py [--tokens 4096 8192 ...] [--modes plain zk attention "tiles 2048"] [--width 128] [--folder DIR] [--rounds N]

Each measurement is a process of its own: bytes are the most that it has resident in forward and backward, minus those before; seconds are those of
its processor, so that other work on the machine counts little (with OMP_NUM_THREADS=1; more threads also count what they wait). "plain" is the model
with activation checkpointing; "zk" the same after zk.long_context; "tiles 2048" that in tiles of 2,048 tokens, by optimizer.accumulate over
zk.sequence_tiles, with all that rests in files in --folder; "attention" what no tile can save, the model without MLPs, norms and head:
attention, residual stream and checkpoints. "head" is the loss alone, of plain torch, of F.linear_cross_entropy and of zk.linear_cross_entropy.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

VOCAB, LAYERS = 32_768, 2
# large blocks go back to the system when they are freed, so that resident memory is memory in use
ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "262144", "MALLOC_TRIM_THRESHOLD_": "262144", "MALLOC_ARENA_MAX": "2"}


class Watch:
    """Context: the most bytes resident in this process, seen every millisecond, beyond those at its start."""

    def __enter__(self) -> Watch:
        import psutil

        process = psutil.Process()
        self.before = self.most = process.memory_info().rss
        self.ended = threading.Event()

        def look() -> None:
            while not self.ended.wait(0.001):
                self.most = max(self.most, process.memory_info().rss)

        self.thread = threading.Thread(target=look, daemon=True)
        self.thread.start()
        self.start = time.process_time()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = time.process_time() - self.start
        self.ended.set()
        self.thread.join()
        self.nbytes = self.most - self.before


def ids_of(tokens: int) -> Any:
    """A sequence of so many tokens."""
    import torch

    return torch.randint(0, VOCAB, (1, tokens), generator=torch.Generator().manual_seed(1))


def model_of(mode: str, width: int, folder: str | None) -> Callable[[Any], float]:
    """Forward and backward of the model, for ids of tokens; done once for a few."""
    import torch
    import transformers
    from torch import nn

    import zk

    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    sizes = {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": LAYERS, "num_attention_heads": max(2, width // 128)}
    config = transformers.LlamaConfig(vocab_size=VOCAB, max_position_embeddings=1 << 20, **sizes)
    model = transformers.LlamaForCausalLM(config).train()
    tile = int(mode.removeprefix("tiles ")) if mode.startswith("tiles ") else 0
    if mode == "zk" or tile:
        zk.long_context(model, checkpoint=not tile, nvme_path=None if tile else folder)
    else:
        model.activation_checkpointing_enable({"use_reentrant": False})
    if mode == "attention":
        for layer in model.model.layers:
            layer.mlp, layer.input_layernorm, layer.post_attention_layernorm = nn.Identity(), nn.Identity(), nn.Identity()
        model.model.norm = nn.Identity()

    if tile:
        model.config.use_cache = False
        optimizer = zk.ZeroOptimizer(model, torch.optim.SGD(model.parameters(), lr=1e-3), stage=2)
        offload = zk.offload_activations(model, nvme_path=folder, min_nbytes=4096, keep_last="1MiB")

    def step(ids: Any) -> float:
        if tile:
            with offload:
                losses = optimizer.accumulate(zk.sequence_tiles({"input_ids": ids, "labels": ids}, tile), lambda model, tile: model(**tile).loss)
            return float(sum(losses))
        loss = model.model(ids, use_cache=False).last_hidden_state.mean() if mode == "attention" else model(ids, labels=ids, use_cache=False).loss
        loss.backward()
        return float(loss.detach())

    step(ids_of(4 * tile or 600))  # gradients of parameters are there, and what libraries keep; and buffers of the threads that write and read
    return step


def model_step(mode: str, tokens: int, width: int, folder: str | None) -> dict[str, Any]:
    """One forward and backward of the model."""
    step, ids = model_of(mode, width, folder), ids_of(tokens)
    with Watch() as watch:
        loss = step(ids)
    return {"nbytes": watch.nbytes, "seconds": watch.seconds, "loss": loss}


def head_step(mode: str, tokens: int, width: int, folder: str | None) -> dict[str, Any]:
    """The loss of a head alone, forward and backward."""
    import torch
    from torch.nn import functional as F

    import zk

    torch.manual_seed(0)
    weight = (torch.randn(VOCAB, width) / width**0.5).requires_grad_()
    losses = {
        "head plain": lambda x, y: F.cross_entropy(F.linear(x, weight), y),
        "head torch": lambda x, y: F.linear_cross_entropy(x, weight, y),
        "head zk": lambda x, y: zk.linear_cross_entropy(x, weight, y),
    }

    def step(length: int) -> float:
        hidden = torch.randn(length, width, generator=torch.Generator().manual_seed(1)).requires_grad_()
        loss = losses[mode](hidden, torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(2)))
        loss.backward()
        return float(loss.detach())

    step(300)
    with Watch() as watch:
        loss = step(tokens)
    return {"nbytes": watch.nbytes, "seconds": watch.seconds, "loss": loss}


def alternate(tokens: int, width: int, rounds: int) -> None:
    """Print the least seconds of both models' steps, which take turns in this process."""
    steps = {mode: model_of(mode, width, None) for mode in ("plain", "zk")}
    least = dict.fromkeys(steps, float("inf"))
    for _ in range(rounds + 1):  # memory is fresh in the first one
        for mode, step in steps.items():
            start = time.process_time()
            step(ids_of(tokens))
            least[mode] = min(least[mode], time.process_time() - start)
    print(f"| {width:,} | {tokens:,} | {least['plain']:.2f} | {least['zk']:.2f} | {least['zk'] / least['plain']:.2f} |", flush=True)


def measured(mode: str, tokens: int, width: int, folder: str | None) -> dict[str, Any]:
    """What a process of its own finds; the error where it ends with one."""
    command = [sys.executable, __file__, "--one", mode, str(tokens), "--width", str(width), *(["--folder", folder] if folder else [])]
    done = subprocess.run(command, env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True)
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or ["killed"])[-1]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", nargs="+", type=int, default=[4096, 8192, 16384, 32768, 65536])
    parser.add_argument("--modes", nargs="+", default=["plain", "zk", "attention", "head plain", "head torch", "head zk"])
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--folder", help="checkpoints go to files there")
    parser.add_argument("--most", type=float, default=12, help="GiB that plain logits may take")
    parser.add_argument("--rounds", type=int, help="compare seconds alone, of as many steps of each model in turn")
    parser.add_argument("--one", nargs=2)
    options = parser.parse_args()
    if not options.folder and any(mode.startswith("tiles ") for mode in options.modes):
        parser.error("tiles rest in files: name a folder on a drive, --folder DIR")
    if options.one:
        mode, tokens = options.one
        print(json.dumps((head_step if mode.startswith("head") else model_step)(mode, int(tokens), options.width, options.folder)))
        return
    if options.rounds:
        print("| width | tokens | plain, s | zk, s | ratio |\n|---|---|---|---|---|")
        for tokens in options.tokens:
            alternate(tokens, options.width, options.rounds)
        return
    print(f"| tokens | {' | '.join(f'{mode}, MiB | s' for mode in options.modes)} |")
    print(f"|---|{'---|---|' * len(options.modes)}")
    for tokens in options.tokens:
        cells = []
        for mode in options.modes:
            too_large = mode in ("plain", "head plain", "head torch") and 3 * 4 * tokens * VOCAB > options.most * 2**30
            found = {"error": "not run"} if too_large else measured(mode, tokens, options.width, options.folder)
            cells += [found["error"], ""] if "error" in found else [f"{found['nbytes'] / 2**20:,.0f}", f"{found['seconds']:.1f}"]
        print(f"| {tokens:,} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
