"""Batches of bytes from text files, by default from Python's own documentation and standard library."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

_DEFAULT_NBYTES = 6_000_000


def default_text() -> bytes:
    """Real text that comes with every Python: the language reference as the help system has it, then standard library sources."""
    topics: dict[str, str] = {}
    with contextlib.suppress(ImportError):
        topics = importlib.import_module("pydoc_data.topics").topics
    chunks = [f"{name}\n\n{text}\n\n".encode() for name, text in sorted(topics.items())]
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        if sum(map(len, chunks)) < _DEFAULT_NBYTES:
            chunks.append(path.read_bytes())
    text = b"".join(chunks)
    if len(text) < 100_000:
        raise OSError(f"only {len(text)} bytes of text were found with this Python; name a file with --data")
    return text


def read_text(paths: Sequence[Path]) -> bytes:
    """The files' bytes one after the other; the default text without any. OSError names a file that cannot be read."""
    return b"".join(path.read_bytes() for path in paths) if paths else default_text()


@dataclasses.dataclass(slots=True)
class Text:
    """Bytes split into training text and, the last tenth of every 64 KiB, validation text."""

    train: Tensor  # (n,) uint8
    valid: Tensor  # (n,) uint8

    @classmethod
    def of(cls, raw: bytes, context: int) -> Text:
        pieces = torch.frombuffer(bytearray(raw or b" "), dtype=torch.uint8).split(1 << 16)  # which takes no empty buffer
        text = cls(torch.cat([p[: len(p) * 9 // 10] for p in pieces]), torch.cat([p[len(p) * 9 // 10 :] for p in pieces]))
        if len(text.valid) <= context + 1:
            raise ValueError(
                f"the text has {len(raw)} bytes, too few to hold out a validation part of more than {context} bytes: give more, "
                "or a shorter --context"
            )
        return text

    @staticmethod
    def draw(part: Tensor, batch: int, context: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Inputs and targets, each (batch, context) int64, from random places."""
        starts = torch.randint(0, len(part) - context - 1, (batch,), generator=generator)
        rows = torch.stack([part[s : s + context + 1] for s in starts.tolist()]).long()
        return rows[:, :-1], rows[:, 1:]
