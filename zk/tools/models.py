"""Models and machines by the names that people type, for `zk plan`.

Models have no memory: `gpt:10b`, `llama:8b`, a hub name, a config.json, `module:factory`.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib
import re
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zk.core.memory import host_memory
from zk.core.options import parse_nbytes
from zk.nn.deferred import deferred_init
from zk.tools.gpt import GPT, config_of

GIB = 1 << 30
# the share that training may take; the rest is for the system and fragmentation
USABLE = {"device": 0.92, "host": 0.9, "nvme": 1.0}
# published: GiB, dense bf16 TFLOP/s, and GB/s of the link each way, as copies reach it
CARDS = {"3090": (24, 71, 25), "4090": (24, 165, 25), "5090": (32, 210, 50)}
CARDS |= {"a100": (80, 312, 25), "h100": (80, 989, 50), "h200": (141, 989, 50)}
# width, blocks, heads, heads of keys and values, width of a head and of the MLP, vocabulary; then
# tied: head and embedding; biases: of queries, keys, values; normed: queries and keys; four norms
_TABLE = """
llama:1b 2048 16 32 8 64 8192 128256 tied; llama:3b 3072 28 24 8 128 8192 128256 tied
llama:8b 4096 32 32 8 128 14336 128256; llama:70b 8192 80 64 8 128 28672 128256
llama2:7b 4096 32 32 32 128 11008 32000; llama2:13b 5120 40 40 40 128 13824 32000
llama2:70b 8192 80 64 8 128 28672 32000; mistral:7b 4096 32 32 8 128 14336 32768
qwen2.5:0.5b 896 24 14 2 64 4864 151936 tied biases
qwen2.5:1.5b 1536 28 12 2 128 8960 151936 tied biases
qwen2.5:3b 2048 36 16 2 128 11008 151936 tied biases
qwen2.5:7b 3584 28 28 4 128 18944 152064 biases; qwen2.5:14b 5120 48 40 8 128 13824 152064 biases
qwen2.5:32b 5120 64 40 8 128 27648 152064 biases; qwen2.5:72b 8192 80 64 8 128 29568 152064 biases
qwen3:0.6b 1024 28 16 8 128 3072 151936 tied normed
qwen3:1.7b 2048 28 16 8 128 6144 151936 tied normed
qwen3:4b 2560 36 32 8 128 9728 151936 tied normed; qwen3:8b 4096 36 32 8 128 12288 151936 normed
qwen3:14b 5120 40 40 8 128 17408 151936 normed; qwen3:32b 5120 64 64 8 128 25600 151936 normed
gemma:2b 2048 18 8 1 256 16384 256000 tied; gemma:7b 3072 28 16 16 256 24576 256000 tied
gemma2:2b 2304 26 8 4 256 9216 256000 tied four; gemma2:9b 3584 42 16 8 256 14336 256000 tied four
phi3:mini 3072 32 32 32 96 8192 32064; phi4:14b 5120 40 40 10 128 17920 100352
"""
_ROWS = {name: row for name, *row in map(str.split, _TABLE.strip().replace(";", "\n").splitlines())}
# family, version and size of Llama-2-7b-hf, qwen2.5:7b, gemma-7b-it, phi-4
_NAME = r"(?:meta-)?([a-z]+)-?(\d(?:\.\d)?)?(?:[-:]?(\d+(?:\.\d+)?b|mini)\b.*)?"


def model_of(spec: str) -> nn.Module:
    """The model, without memory, of a name, a hub name, a config.json, or ``module:factory``."""
    if spec.lower().startswith("gpt:"):
        with torch.device("meta"):
            return GPT(config_of(spec, 1024))
    if (known := _known(spec)) is not None:
        return _decoder(*_ROWS[known])
    if Path(spec).exists() or re.fullmatch(r"[\w.-]+/[\w.-]+", spec):
        return _from_config(spec)
    module, _, path = spec.partition(":")
    sys.path.insert(0, "")  # the folder that the command runs in
    try:
        factory: Any = functools.reduce(getattr, path.split("."), importlib.import_module(module))
    except (ImportError, AttributeError, ValueError, TypeError):
        raise ValueError(_unknown(spec)) from None
    with deferred_init("cpu"):
        model = factory()
    if not isinstance(model, nn.Module):
        raise ValueError(f"{spec} must return an nn.Module; it returned a {type(model).__name__}")
    return model


def _known(spec: str) -> str | None:
    """The name in the table that ``spec`` means."""
    found = re.fullmatch(_NAME, spec.rpartition("/")[2].lower())
    family, version, size = found.groups("") if found else ("", "", "")
    if family == "llama" and not version and size in ("7b", "13b"):
        version = "2"
    if family == "mistral" or (family == "llama" and version.startswith("3")):  # all are alike
        version = ""
    names = [name for name in _ROWS if name.startswith(f"{family}{version}:{size}")]
    return names[0] if len(names) == 1 else None


def _unknown(spec: str) -> str:
    """The error for a name: the closest one first, all of them last."""
    family = re.sub(r"[\d.:-].*", "", spec.rpartition("/")[2].lower().removeprefix("meta-"))
    number = re.search(r"(\d+(?:\.\d+)?)b", spec.lower())

    def distance(name: str) -> tuple[float, float]:
        alike = difflib.SequenceMatcher(None, family, re.sub(r"[\d.]*:.*", "", name)).ratio()
        size = float(re.sub(".*:|b|mini", "", name) or 4)
        return -alike, abs(size - float(number[1] if number else 7))

    closest, sizes = min(_ROWS, key=distance), dict[str, list[str]]()
    for name in _ROWS:
        sizes.setdefault(name.partition(":")[0], []).append(name.partition(":")[2])
    hint = f"did you mean {closest}? " * (distance(closest)[0] < -0.6)
    return (
        f"{hint}There is no model {spec!r} here, nor in the local cache of the hub. A model is "
        "gpt:SIZE (gpt:10b), a config.json, module:factory, or one of "
        + ", ".join(f"{family}:{'|'.join(its)}" for family, its in sizes.items())
    )


def _decoder(*row: str) -> nn.Module:
    """A decoder with the sizes of a row of the table."""
    width, blocks, heads, kv_heads, head, inner, vocab = map(int, row[:7])
    ends = {"query": (width, heads * head), "key": (width, kv_heads * head)}
    ends |= {"value": ends["key"], "out": ends["query"][::-1]}
    ends |= {"gate": (width, inner), "up": (width, inner), "down": (inner, width)}
    biased = ("query", "key", "value") if "biases" in row else ()
    norms = [width] * (4 if "four" in row else 2) + [head] * 2 * ("normed" in row)
    with torch.device("meta"):
        model = nn.Module()
        model.blocks = nn.ModuleList(nn.Module() for _ in range(blocks))
        for block in model.blocks:
            for name, size in ends.items():
                block.add_module(name, nn.Linear(*size, bias=name in biased))
            for number, numel in enumerate(norms):
                block.add_module(f"norm{number}", nn.RMSNorm(numel))
        model.words, model.norm = nn.Embedding(vocab, width), nn.RMSNorm(width)
        model.head = nn.Identity() if "tied" in row else nn.Linear(width, vocab, bias=False)
    return model


def _from_config(spec: str) -> nn.Module:
    """A model of transformers: a config.json, its folder, or a name in the hub's local cache."""
    try:
        import transformers

        config = transformers.AutoConfig.from_pretrained(spec, local_files_only=True)
    except ImportError:
        raise ValueError(f"{spec} needs transformers: pip install transformers") from None
    except (OSError, ValueError) as error:
        is_here = Path(spec).exists()
        said = f"transformers cannot read {spec}: {error}" if is_here else _unknown(spec)
        raise ValueError(said) from None
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)  # type: ignore[no-any-return]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """Memory, and rates in 1e9 bytes/s. Up to 8 ranks share a machine's RAM, CPU and drive."""

    gpu_nbytes: int | None  # of each rank; None: no GPU, so that the device's memory is the host's
    ram_nbytes: int
    nvme_nbytes: int = 0
    world: int = 1
    tflops: float = 2.4  # 1e12 operations/s of a rank
    source: str = "16 cores"  # of tflops
    link_gbps: float = 25.0  # between host and GPU each way, and between ranks
    dram_gbps: float = 120.0
    read_gbps: float = 13.0  # of a Gen5 drive
    written_gbps: float = 9.0

    @classmethod
    def of(cls, gpu: str | None, ram: str | None, nvme: str, world: int) -> Machine:
        """The machine that options describe. What they leave out is this machine's."""
        has_one = not gpu and torch.cuda.is_available()
        here = torch.cuda.get_device_properties(0) if has_one else None
        sizes: dict[str, Any] = {"world": world, "gpu_nbytes": None}
        sizes["ram_nbytes"] = parse_nbytes(ram, "--ram") if ram else host_memory()[0]
        sizes["nvme_nbytes"] = 0 if nvme == "none" else parse_nbytes(nvme, "--nvme")
        name = here.name if here else gpu or "none"
        if name == "none":
            return cls(**sizes)
        card = next((card for card in CARDS if re.search(rf"\b(rtx)?{card}\b", name.lower())), "")
        gib, tflops, link = CARDS.get(card, (0, 250, 25))
        source = f"40% of the {tflops} published for a {card}"  # as models of transformers reach it
        source = source if card else f"a guess; name a card: --gpu {'|'.join(CARDS)}"
        nbytes = here.total_memory if here else gib * GIB or parse_nbytes(name, "--gpu")
        sizes |= {"gpu_nbytes": nbytes, "tflops": 0.4 * tflops}
        return cls(**sizes, source=source, link_gbps=link)

    def capacity(self, memory: str) -> int:
        """Bytes of a rank that training may take."""
        shared = {"host": self.ram_nbytes, "nvme": self.nvme_nbytes}
        nbytes = shared[memory] // min(self.world, 8) if memory in shared else self.gpu_nbytes or 0
        return int(USABLE[memory] * nbytes)
