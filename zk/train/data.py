"""In: text that is on this machine. Out: batches of bytes. Default: Python's own documentation and standard library."""

from __future__ import annotations

import dataclasses
import importlib.util
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

_DEFAULT_NBYTES = 6_000_000


def default_text() -> bytes:
    """Real text that comes with every Python: the language reference as the help system has it, then standard library sources."""
    chunks: list[bytes] = []
    topics = importlib.util.find_spec("pydoc_data.topics")
    if topics is not None and topics.origin:
        scope: dict[str, dict[str, str]] = {}
        exec(compile(Path(topics.origin).read_bytes(), topics.origin, "exec"), scope)  # the module only assigns a dict of strings
        chunks += [f"{name}\n\n{text}\n\n".encode() for name, text in sorted(scope["topics"].items())]
    total = sum(map(len, chunks))
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        if total >= _DEFAULT_NBYTES:
            break
        chunks.append(path.read_bytes())
        total += len(chunks[-1])
    if total < 100_000:
        raise OSError(f"only {total} bytes of text were found with this Python; name a file with --data")
    return b"".join(chunks)


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
        everything = torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
        pieces = everything.split(1 << 16)
        text = cls(torch.cat([p[: len(p) * 9 // 10] for p in pieces]), torch.cat([p[len(p) * 9 // 10 :] for p in pieces]))
        if len(text.valid) <= context + 1:
            raise ValueError(
                f"the text has {len(everything)} bytes, too few to hold out a validation part of more than {context} bytes: give more, "
                "or a shorter --context"
            )
        return text

    @staticmethod
    def draw(part: Tensor, batch: int, context: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Inputs and targets, each (batch, context) int64, from random places."""
        starts = torch.randint(0, len(part) - context - 1, (batch,), generator=generator)
        rows = torch.stack([part[s : s + context + 1] for s in starts.tolist()]).long()
        return rows[:, :-1], rows[:, 1:]
