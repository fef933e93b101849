"""Models by the names that people type: `llama:8b`, `qwen3:32b`, `gpt-oss:20b` from a table, and `org/name` from the local cache of Hugging Face.

The sizes are those of the models' own configurations.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_HEADS = ("num_attention_heads", "num_key_value_heads", "head_dim")
_NAMES = ("hidden_size", "num_hidden_layers", *_HEADS, "intermediate_size", "vocab_size", "tie_word_embeddings")
_EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8}
# family -> size -> model_type, the values of _NAMES, and what else its configuration says
_TABLE: dict[str, dict[str, tuple[Any, ...]]] = {
    "llama": {
        "1b": ("llama", 2048, 16, 32, 8, 64, 8192, 128256, True),
        "3b": ("llama", 3072, 28, 24, 8, 128, 8192, 128256, True),
        "8b": ("llama", 4096, 32, 32, 8, 128, 14336, 128256, False),
        "70b": ("llama", 8192, 80, 64, 8, 128, 28672, 128256, False),
        "405b": ("llama", 16384, 126, 128, 8, 128, 53248, 128256, False),
    },
    "qwen3": {
        "0.6b": ("qwen3", 1024, 28, 16, 8, 128, 3072, 151936, True),
        "1.7b": ("qwen3", 2048, 28, 16, 8, 128, 6144, 151936, True),
        "4b": ("qwen3", 2560, 36, 32, 8, 128, 9728, 151936, True),
        "8b": ("qwen3", 4096, 36, 32, 8, 128, 12288, 151936, False),
        "14b": ("qwen3", 5120, 40, 40, 8, 128, 17408, 151936, False),
        "32b": ("qwen3", 5120, 64, 64, 8, 128, 25600, 151936, False),
        "30b-a3b": ("qwen3_moe", 2048, 48, 32, 4, 128, 768, 151936, False, _EXPERTS),
        "235b-a22b": ("qwen3_moe", 4096, 94, 64, 4, 128, 1536, 151936, False, _EXPERTS),
    },
    "gpt-oss": {
        "20b": ("gpt_oss", 2880, 24, 64, 8, 64, 2880, 201088, False, {"num_local_experts": 32, "num_experts_per_tok": 4}),
        "120b": ("gpt_oss", 2880, 36, 64, 8, 64, 2880, 201088, False, {"num_local_experts": 128, "num_experts_per_tok": 4}),
    },
    "mistral": {"7b": ("mistral", 4096, 32, 32, 8, 128, 14336, 32768, False)},
    "mixtral": {"8x7b": ("mixtral", 4096, 32, 32, 8, 128, 14336, 32000, False, {"num_local_experts": 8, "num_experts_per_tok": 2})},
}
KNOWN = ", ".join(f"{family}:{size}" for family, sizes in _TABLE.items() for size in sizes)


def named(spec: str) -> Mapping[str, Any] | None:
    """The configuration of ``family:size``; None if the family is not in the table. ValueError, with the sizes there are, for another size."""
    family, _, size = spec.lower().partition(":")
    sizes = _TABLE.get(family)
    if sizes is None:
        return None
    if size not in sizes:
        raise ValueError(f"there is {', '.join(f'{family}:{one}' for one in sizes)}; got {spec!r}. Of another size give its config.json")
    kind, *values = sizes[size]
    more = values.pop() if isinstance(values[-1], dict) else {}
    config = dict(zip(_NAMES, values, strict=True))
    return {"model_type": kind, **config, **more, "moe_intermediate_size": config["intermediate_size"]}


def closest(spec: str) -> str:
    """Words that name the model of the table whose name is most like this one; empty if none is."""

    def plain(name: str) -> str:
        return re.sub(r"[^a-z0-9]", "", name.lower())

    names = KNOWN.split(", ")
    size = re.search(r"\d+(\.\d+)?[mbt]$", spec.lower())
    if size:
        names += [f"gpt:{size[0]}", f"moe:{size[0]}"]
    name_of = {plain(name): name for name in names}
    matches = difflib.get_close_matches(plain(spec.rpartition("/")[2]), name_of, 1, 0.7)
    return f"; the closest one is {name_of[matches[0]]!r}" if matches else ""


def cached(spec: str) -> Path | None:
    """The config.json of ``org/name`` that Hugging Face keeps on this machine; None if there is none. Nothing is asked of a network."""
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", spec):
        return None
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "huggingface")
    folder = Path(os.environ.get("HF_HUB_CACHE") or Path(home, "hub"), f"models--{spec.replace('/', '--')}")
    main = folder / "refs" / "main"
    if main.is_file() and (found := folder / "snapshots" / main.read_text().strip() / "config.json").is_file():
        return found
    return max(folder.glob("snapshots/*/config.json"), key=lambda path: path.stat().st_mtime, default=None)
