"""One call of a linear layer's loss, piece by piece: its logits exist for one block of tokens at a time, and never all.

Everything is computed in pieces of one size: a block of tokens times a block of the vocabulary. A weight's gradient is the sum over blocks of
tokens in their order, that of the hidden states over blocks of the vocabulary. So bits do not depend on how many pieces are in memory at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from zk import kernels

# tokens and columns of the vocabulary in a piece: in host memory, and on a device, which has more to do at once
PIECE, PIECE_ON_DEVICE = (256, 4096), (1024, 8192)


def cut(stop: int, size: int) -> Iterator[slice]:
    """Slices of ``size`` from 0 to ``stop``, the last one of what is left."""
    return (slice(start, min(start + size, stop)) for start in range(0, stop, size))


@dataclasses.dataclass(slots=True)
class LinearLoss:
    """One call of the loss: what it was given, and what is known of each token's logits."""

    hidden: Tensor  # (tokens, features), in the precision of products
    targets: Tensor  # (tokens,) int64
    bias: Tensor | None  # (vocab,) fp32
    vocab: int
    options: dict[str, Any]  # of kernels.cross_entropy
    max_nbytes: int | None
    state: Tensor  # (4, tokens) fp32, of kernels.cross_entropy
    trains: bool
    scale: Tensor | None = None  # (tokens,) fp32, gradient of each token's loss
    # in backward, where gradients are made there
    grad_hidden: Tensor | None = None  # (tokens, features) fp32
    grad_bias: Tensor | None = None  # (vocab,) fp32
    rooms: dict[torch.dtype, Tensor] = dataclasses.field(default_factory=dict)  # for logits, used again: fresh memory costs page faults

    @property
    def piece(self) -> tuple[int, int]:
        return PIECE if self.hidden.device.type == "cpu" else PIECE_ON_DEVICE

    def tokens(self) -> Iterator[slice]:
        """Blocks of tokens."""
        return cut(len(self.hidden), self.piece[0])

    def tiles(self, columns: int) -> list[slice]:
        """Columns whose logits are in memory at once, for one block of tokens."""
        rows, width = self.piece
        fit = columns if self.max_nbytes is None else self.max_nbytes // (4 * rows) // width * width
        return list(cut(columns, max(fit, width)))

    def losses(self) -> Tensor:
        """(tokens,) fp32: 0 for those that do not count, NaN for targets that are not in the vocabulary."""
        largest, total, picked, summed = self.state
        smoothing, z_loss = self.options["label_smoothing"], self.options["z_loss"]
        lse = largest + total.log()
        loss = lse - (1 - smoothing) * picked
        if smoothing:
            loss -= smoothing / self.vocab * summed
        if z_loss:
            loss += z_loss * lse * lse
        loss.masked_fill_((self.targets < 0) | (self.targets >= self.vocab), float("nan"))
        return loss.masked_fill_(self.targets == self.options["ignore_index"], 0)  # type: ignore[no-any-return]

    def free(self) -> None:
        """Keep nothing that is as large as the tokens are many."""
        self.hidden = self.targets = self.state = torch.empty(0)
        self.rooms.clear()

    def measure(self, rows: slice, weight: Tensor, first: int) -> None:
        """Measure the logits of tokens ``rows`` over ``weight`` (columns, features), whose first row is number ``first`` of the whole one."""
        for tile in self.tiles(len(weight)):
            self._kernel(rows, self._logits(rows, weight[tile]), None, first + tile.start, True)

    def add_gradients(self, rows: slice, weight: Tensor, first: int, into: tuple[Tensor | None, ...], measure: bool) -> None:
        """Add what comes from tokens ``rows``; ``measure`` their logits as well, over all of the vocabulary.

        ``into``: gradients of these tokens, of ``weight``, and of its part of the bias, or None; fp32.
        """
        for_hidden, for_weight, for_bias = into
        tiles = self.tiles(len(weight))
        if measure and len(tiles) > 1:
            self.measure(rows, weight, first)
            measure = False
        hidden = self.hidden[rows]
        for tile in tiles:
            grad = logits = self._logits(rows, weight[tile])
            if hidden.dtype != torch.float32:
                grad = self._room(len(hidden), logits.shape[1], hidden.dtype)
            self._kernel(rows, logits, grad, first + tile.start, measure)
            for part in cut(tile.stop - tile.start, self.piece[1]):
                columns, dz = slice(tile.start + part.start, tile.start + part.stop), grad[:, part]
                if for_hidden is not None:
                    kernels.tiled_matmul(dz, weight[columns], for_hidden, plus=for_hidden)
                if for_weight is not None:
                    rest = for_weight[columns]
                    kernels.tiled_matmul(dz.t(), hidden, rest, plus=rest)
                if for_bias is not None:
                    for_bias[columns] += dz.sum(0, dtype=torch.float32)

    def _logits(self, rows: slice, weight: Tensor) -> Tensor:
        hidden = self.hidden[rows]
        logits = self._room(len(hidden), len(weight), torch.float32)
        for columns in cut(len(weight), self.piece[1]):
            kernels.tiled_matmul(hidden, weight[columns].t(), logits[:, columns])
        return logits

    def _kernel(self, rows: slice, logits: Tensor, grad: Tensor | None, first: int, measure: bool) -> None:
        kernels.cross_entropy(
            logits,
            self.targets[rows],
            self.state[:, rows],
            grad=None if grad is logits else grad,
            bias=None if self.bias is None else self.bias[first : first + logits.shape[1]],
            scale=None if self.scale is None else self.scale[rows],
            first=first,
            vocab=self.vocab,
            measure=measure,
            gradient=grad is not None,
            **self.options,
        )

    def _room(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        """A matrix with anything in it, each row of which begins on a multiple of 64 bytes; until the next one of its dtype."""
        stride = -(-columns // 32) * 32
        if dtype not in self.rooms or self.rooms[dtype].numel() < rows * stride:
            self.rooms[dtype] = torch.empty(rows * stride, dtype=dtype, device=self.hidden.device)
        return self.rooms[dtype][: rows * stride].view(rows, stride)[:, :columns]
