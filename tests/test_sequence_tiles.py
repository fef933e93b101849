"""Tiles of a sequence train what the whole sequence does, rest away between blocks, leave nothing behind; what cannot be right is refused by name."""

from __future__ import annotations

import contextlib
import copy
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import zk
from tests.alive import Alive, drive_without_delay
from tests.models import DEVICE
from tests.world import run_world
from zk.accumulation import attention
from zk.accumulation.attention import Kind, attend, attend_backward, merge
from zk.accumulation.resting import Resting, rest
from zk.accumulation.sequence import Sequences, SequenceTile
from zk.core.events import COMPLETED
from zk.nn.activations import ActivationOffload

pytestmark = [pytest.mark.usefixtures("torch_engine", "one_thread")]

VOCAB, WIDTH, LENGTH = 37, 32, 35


class Block(nn.Module):
    """Attention with heads that share keys and values, and an MLP."""

    def __init__(self, shared: int = 2) -> None:
        super().__init__()
        self.heads = 4, 4 // shared, 4 // shared
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 8 * sum(self.heads))
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 48), nn.GELU(), nn.Linear(48, WIDTH))
        self.options: dict[str, Any] = {"is_causal": True}
        self.has_wide_queries = self.is_interleaved = False

    def attend(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm(x)).view(*x.shape[:2], -1, 8).transpose(1, 2)
        query, key, value = heads.split(self.heads, 1)
        if self.is_interleaved:
            query, key, value = (part.mT.contiguous().mT for part in (query, key, value))
        query = query.float() if self.has_wide_queries else query  # of which autocast makes what keys are
        return F.scaled_dot_product_attention(query, key, value, enable_gqa=True, **self.options).transpose(1, 2).flatten(2)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.proj(self.attend(x))
        return x + self.mlp(x)


class Model(nn.Module):
    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(64, WIDTH)
        self.drop = nn.Dropout(0.0)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB)
        self.to(DEVICE)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        x = self.drop(self.tokens(input_ids) + self.positions(position_ids))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_of(model: nn.Module, tile: dict[str, Any]) -> Tensor:
    logits = model(tile["input_ids"], tile["position_ids"])
    return F.cross_entropy(logits.float().flatten(0, 1), tile["shift_labels"].flatten(), reduction="sum") / tile["num_items_in_batch"]


def batch_of(seed: int = 0, length: int = LENGTH) -> dict[str, Tensor]:
    """Ids in host memory; of the first sequence some are no targets."""
    ids = torch.randint(0, VOCAB, (2, length), generator=torch.Generator().manual_seed(seed))
    labels = ids.clone()
    labels[0, :9] = -100
    return {"input_ids": ids, "labels": labels}


def plain(model: nn.Module, *batches: dict[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of the whole sequences: the mean over all targets."""
    count = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
    total = 0.0
    for batch in batches:
        ids, labels = (batch[name].to(DEVICE) for name in ("input_ids", "labels"))
        logits = model(ids[:, :-1], torch.arange(ids.shape[1] - 1, device=DEVICE)[None])
        loss = F.cross_entropy(logits.float().flatten(0, 1), labels[:, 1:].flatten(), reduction="sum") / count
        loss.backward()
        total += loss.item()
    return total, {name: param.grad for name, param in model.named_parameters() if param.grad is not None}


def made(dtype: torch.dtype = torch.float32, layers: int = 3, trained: Callable[[str], bool] = lambda name: True) -> tuple[Model, Model]:
    """Two equal models."""
    torch.manual_seed(0)
    model = Model(layers).to(dtype)
    for name, param in model.named_parameters():
        param.requires_grad_(trained(name))
    return model, copy.deepcopy(model)


def optimizer_of(model: nn.Module, **options: Any) -> zk.ZeroOptimizer:
    return zk.ZeroOptimizer(model, torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=0.1), **options)


def distance(model: nn.Module, want: dict[str, Tensor]) -> float:
    """The largest difference of gradients, as a share of the largest element of all."""
    got = {name: param.grad for name, param in model.named_parameters() if param.requires_grad}
    assert got.keys() == want.keys()
    most = max(float(grad.abs().max()) for grad in want.values())
    return max(float((got[name].float() - grad.float()).abs().max()) for name, grad in want.items()) / most  # type: ignore[union-attr]


# each number of tiles, each precision where units are gathered and where they stay
CASES = [
    (3, 64, torch.float32),
    (3, 18, torch.float32),
    pytest.param(3, 5, torch.float32, marks=pytest.mark.device),
    (0, 12, torch.float32),
    pytest.param(2, 12, torch.bfloat16, marks=pytest.mark.device),
    (3, 12, torch.bfloat16),
]


@pytest.mark.parametrize(("stage", "tokens", "dtype"), CASES)
def test_loss_and_gradients_are_those_of_whole_sequences(stage: int, tokens: int, dtype: torch.dtype) -> None:
    """1, 2, 3 and 7 tiles, the last one of other length."""
    model, twin = made(dtype)
    loss, grads = plain(twin, batch_of())
    with optimizer_of(model, stage=stage) as optimizer:
        losses = optimizer.accumulate(zk.sequence_tiles(batch_of(), tokens), loss_of)
        assert len(losses) == -(-LENGTH // tokens)
        exact = dtype == torch.float32
        assert float(sum(losses)) == pytest.approx(loss, rel=1e-6 if exact else 1e-3)
        assert distance(model, grads) < (2e-6 if exact else 2e-2)


def test_one_tile_has_the_bits_of_the_usual_loop() -> None:
    model, _ = made()
    model.blocks = nn.ModuleList(Block(shared=1).to(DEVICE) for _ in range(2))  # (gradients of shared heads are added up in another order)
    twin = copy.deepcopy(model)
    with optimizer_of(model, stage=3) as optimizer, optimizer_of(twin, stage=3) as other:
        tile = zk.sequence_tiles(batch_of(), LENGTH)
        losses = optimizer.accumulate(tile, loss_of)
        want = loss_of(twin, tile[0].to(DEVICE))
        other.backward(want)
        assert torch.equal(losses[0], want)
        for param, same in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(param.grad, same.grad)  # type: ignore[arg-type]


def test_each_sequence_of_a_step_has_keys_and_values_of_its_own() -> None:
    """Batches of other lengths; the same tiles twice; micro-batches that are no tiles beside them."""
    model, twin = made()
    first, second, third = batch_of(1), batch_of(2, 23), batch_of(3, 11)
    loss, _ = plain(twin, first, second)
    again, _ = plain(twin, first, second)
    other, grads = plain(twin, third)
    with optimizer_of(model, stage=3) as optimizer:
        tiles = zk.sequence_tiles([first, second], 9)
        assert [tile.tokens for tile in tiles] == [9, 9, 9, 8, 9, 9, 5]
        whole = {name: value.to(DEVICE) if isinstance(value, Tensor) else value for name, value in zk.sequence_tiles(third, 11)[0].items()}
        losses = optimizer.accumulate([*tiles, whole, *tiles], loss_of)
        assert float(sum(losses)) == pytest.approx(loss + again + other, rel=1e-6)
        assert distance(model, grads) < 2e-6


def test_heads_may_lie_next_to_each_other_in_memory() -> None:
    """Queries, keys and values whose features have a stride, as of (batch, tokens, features, heads)."""
    model, twin = made()
    for block in (*model.blocks, *twin.blocks):
        block.is_interleaved = True
    loss, grads = plain(twin, batch_of())
    with optimizer_of(model, stage=2) as optimizer:
        losses = optimizer.accumulate(zk.sequence_tiles(batch_of(), 9), loss_of)
        assert float(sum(losses)) == pytest.approx(loss, rel=1e-6)
        assert distance(model, grads) < 2e-6


TRAINED: dict[str, Callable[[str], bool]] = {
    "blocks after the first": lambda name: not name.startswith(("tokens", "positions", "blocks.0", "blocks.1")),
    "MLPs": lambda name: ".mlp." in name,
    "attention of the last": lambda name: name.startswith("blocks.2.qkv"),
    "head": lambda name: name.startswith("head"),
}


@pytest.mark.parametrize("trained", TRAINED)
def test_frozen_parts_get_no_gradient_and_pass_on_that_of_others(trained: str) -> None:
    model, twin = made(trained=TRAINED[trained])
    loss, grads = plain(twin, batch_of())
    with optimizer_of(model, stage=3) as optimizer:
        losses = optimizer.accumulate(zk.sequence_tiles(batch_of(), 9), loss_of)
        assert float(sum(losses)) == pytest.approx(loss, rel=1e-6)
        assert distance(model, grads) < 2e-6


@pytest.mark.parametrize("without_graph", [False, True])
def test_tiles_without_targets_get_the_gradients_of_later_ones(without_graph: bool) -> None:
    model, twin = made()
    batch = batch_of()
    batch["labels"][:, :22] = -100

    def of(model: nn.Module, tile: SequenceTile) -> Tensor:
        loss = loss_of(model, tile)
        has_targets = bool((tile["shift_labels"] != -100).any())
        return loss if has_targets or not without_graph else model.head.bias.sum() * 0  # type: ignore[operator, union-attr, return-value]

    loss, grads = plain(twin, batch)
    with optimizer_of(model, stage=2) as optimizer:
        losses = optimizer.accumulate(zk.sequence_tiles(batch, 9), of)
        assert float(sum(losses)) == pytest.approx(loss, rel=1e-6)
        assert distance(model, grads) < 2e-6


def test_compiled_blocks_leave_attention_out() -> None:
    model, twin = made(layers=1)
    loss, grads = plain(twin, batch_of())
    for block in model.blocks:
        block.compile(backend="eager")
    with optimizer_of(model, stage=2) as optimizer:
        losses = optimizer.accumulate(zk.sequence_tiles(batch_of(), 18), loss_of)
        assert float(sum(losses)) == pytest.approx(loss, rel=1e-6)
        assert distance(model, grads) < 2e-6


def test_steps_train_what_whole_sequences_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """What rests of a tile is gone with its backward, and not only with the step."""
    left = []
    monkeypatch.setattr(Sequences, "check", lambda self: left.append(len(self.layers)))
    model, twin = made()
    sgd = torch.optim.SGD(twin.parameters(), lr=0.1)
    with optimizer_of(model, stage=3, param_tier="host", optimizer_tier="host") as optimizer:
        for step in range(3):
            losses = optimizer.accumulate(zk.sequence_tiles(batch_of(step), 9), loss_of)
            loss, _ = plain(twin, batch_of(step))
            assert float(sum(losses)) == pytest.approx(loss, rel=1e-5)
            for each in (optimizer, sgd):
                each.step()
                each.zero_grad()
        with zk.gather(list(model.parameters())):
            for param, same in zip(model.parameters(), twin.parameters(), strict=True):
                torch.testing.assert_close(param, same, atol=1e-5, rtol=1e-4)
    assert left == [0, 0, 0]


def test_autocast_and_activations_that_are_kept() -> None:
    model, twin = made()
    model.blocks[1].has_wide_queries = twin.blocks[1].has_wide_queries = True  # type: ignore[assignment, union-attr]
    with torch.autocast(DEVICE.type, torch.bfloat16):
        loss, grads = plain(twin, batch_of())
    found = []
    with optimizer_of(model, stage=3) as optimizer:
        for keep in (0, "1GiB", "1GiB"):
            with torch.autocast(DEVICE.type, torch.bfloat16):
                losses = optimizer.accumulate(zk.sequence_tiles(batch_of(), 9), loss_of, keep_activations=keep)
            assert float(sum(losses)) == pytest.approx(loss, rel=1e-3)
            assert distance(model, grads) < 3e-2
            found.append([param.grad.clone() for param in model.parameters()])  # type: ignore[union-attr]
            optimizer.zero_grad()
    for others in found[1:]:
        assert all(map(torch.equal, found[0], others))


@contextlib.contextmanager
def away(model: nn.Module, folder: Path | None) -> Iterator[Any]:
    """Everything rests in files, or in host memory, as soon as it may; after it nothing is left."""
    with zk.offload_activations(model, nvme_path=folder, min_nbytes=0, keep_last=0) as offload:
        yield offload
    gc.collect()
    assert not offload.blocks and not offload.file_nbytes and not offload.host_nbytes and not offload.kept_nbytes


@pytest.mark.device
@pytest.mark.parametrize("where", ["drive", pytest.param("host", marks=pytest.mark.device_only)])
def test_what_rests_comes_back_and_is_gone_after_the_step(where: str, tmp_path: Path) -> None:
    model, twin = made(layers=2)
    with optimizer_of(model, stage=3) as optimizer, optimizer_of(twin, stage=3) as other:
        losses = other.accumulate(zk.sequence_tiles(batch_of(), 7), loss_of)
        with away(model, tmp_path if where == "drive" else None) as offload:
            assert optimizer.accumulate(zk.sequence_tiles(batch_of(), 7), loss_of) == losses
            # of 5 tiles in 2 blocks: keys and values (none of the last tile), outputs and logsumexp, what lies between blocks and its gradient;
            # sums of gradients of keys and values, once for each pair of tiles; and what embeddings give
            pairs = 2 * 5 * 4 // 2
            assert offload.num_offloaded >= 2 * (4 * 2 + 5 * 2) + 2 * 5 * 2 + 2 * pairs
            assert offload.num_uploaded >= 2 * 2 * pairs
            keys, wide, lse = 2 * 2 * 7 * 8 * 4, 2 * 7 * WIDTH * 4, 2 * 4 * 7 * 4
            between = 5 * (1 + 2) * wide + 5 * (2 * wide + wide // 2)  # of one block, gradients of both; of embeddings, and after dropout
            of_loss = 5 * (2 * wide + 2 * 7 * VOCAB * 4 + 400)  # what autograd saves there
            assert offload.offloaded_nbytes <= 2 * (4 * 2 * keys + 5 * (wide + lse)) + between + 2 * pairs * keys + of_loss
        for param, same in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(param.grad, same.grad)  # type: ignore[arg-type]


def test_memory_is_that_of_a_tile_whatever_the_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four tiles and 8 of them: floats in memory at once, everything else on the drive; and of what has been read from there."""
    most, read = [], list[int]()
    fetch = ActivationOffload.fetch
    monkeypatch.setattr(ActivationOffload, "fetch", lambda self, saved: [fetch(self, saved), read.append(self.here.nbytes)][0])
    for tiles in (4, 8):
        model, _ = made()
        model.positions = nn.Embedding(16 * 8, WIDTH)
        with optimizer_of(model, stage=0) as optimizer:
            alive = Alive(Tensor.is_floating_point)

            def of(model: nn.Module, tile: SequenceTile, alive: Alive = alive) -> Tensor:
                with alive:
                    return loss_of(model, tile)

            for length in (16 * 4, 16 * tiles):  # (the first time there are no gradients)
                alive.most = 0
                with away(model, tmp_path), drive_without_delay(), alive:
                    optimizer.accumulate(zk.sequence_tiles(batch_of(length=length), 16), of)
        most.append(alive.most)
    assert most[1] < 1.02 * most[0]
    assert max(read) <= 2 * (2 + 2 + 2) * (2 * 16 * WIDTH * 4)  # two tiles of keys and values, sums of gradients, a block's input and gradient


@pytest.mark.device
def test_an_error_in_the_middle_leaves_nothing_and_training_goes_on(tmp_path: Path) -> None:
    model, twin = made(layers=2)
    fails = True

    def of(model: nn.Module, tile: SequenceTile) -> Tensor:
        if fails and tile.number == 2:
            raise ArithmeticError("on purpose")
        return loss_of(model, tile)

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
            raise ArithmeticError("on purpose")

    _, grads = plain(twin, batch_of())
    with optimizer_of(model, stage=3) as optimizer, away(model, tmp_path):
        with pytest.raises(ArithmeticError):
            optimizer.accumulate(zk.sequence_tiles(batch_of(), 12), of)
        assert all(param.grad is None for param in model.parameters())
        fails = False
        handle = model.blocks[0].register_forward_hook(lambda module, args, output: Fails.apply(output))  # type: ignore[union-attr]
        with pytest.raises(ArithmeticError):
            optimizer.accumulate(zk.sequence_tiles(batch_of(), 12), of)
        assert all(param.grad is None for param in model.parameters())
        handle.remove()  # type: ignore[union-attr, operator]
        optimizer.accumulate(zk.sequence_tiles(batch_of(), 12), of)
        assert distance(model, grads) < 2e-6


class Convolves(Block):
    def __init__(self) -> None:
        super().__init__()
        self.short = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)


class Eager(Block):
    def attend(self, x: Tensor) -> Tensor:
        return x.cumsum(1)


class Prefixed(Block):
    def attend(self, x: Tensor) -> Tensor:
        return super().attend(torch.cat([x[:, :1], x], 1))[:, 1:]


class Drops(Block):
    """Uses no attention in the first tile; its keys and values are used by others."""

    drops = False

    def attend(self, x: Tensor) -> Tensor:
        out = super().attend(x)
        return x if self.drops else out


class DropsFirst(Model):
    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        self.blocks[1].drops = bool(position_ids[0, 0] == 0)  # type: ignore[assignment, union-attr]
        return super().forward(input_ids, position_ids)


class Checkpointed(Block):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=isinstance(self, Reentrant))


class Reentrant(Checkpointed):
    pass


class CheckpointedAround(Model):
    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        x = checkpoint(lambda x: self.blocks[0](x).sin(), self.tokens(input_ids) + self.positions(position_ids), use_reentrant=False)
        return self.head(self.blocks[1](x))


class WithoutPositions(Model):
    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        return super().forward(input_ids, torch.arange(position_ids.shape[1], device=input_ids.device))


class PositionsInBlocks(Model):
    """Gives its blocks positions, and computes nothing with them itself."""

    class Block(Block):
        def forward(self, x: Tensor, position_ids: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x + position_ids.unsqueeze(-1).cos())

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        x = self.tokens(input_ids)
        for block in self.blocks:
            x = block(x, position_ids)
        return self.head(self.norm(x))


class OwnPositions(nn.Embedding):
    """Makes positions as embeddings of RoBERTa do."""

    @staticmethod
    def create_position_ids_from_input_ids(input_ids: Tensor, padding_idx: int) -> Tensor:
        return (input_ids != padding_idx).cumsum(1) + padding_idx


class InPlace(Model):
    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        x = self.drop(self.tokens(input_ids))
        x = self.blocks[0](x)
        x += 1
        return self.head(self.blocks[1](x))


class AttendsOutside(Model):
    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        x = self.tokens(input_ids)[:, None]
        return self.head(self.blocks[0](F.scaled_dot_product_attention(x, x, x, is_causal=True)[:, 0]))


def changed(**options: Any) -> Callable[[Model], None]:
    return lambda model: [block.options.update(options) for block in model.blocks] and None  # type: ignore[union-attr, operator]


def with_block(kind: type[Block]) -> Callable[[Model], None]:
    return lambda model: model.blocks.__setitem__(1, kind().to(DEVICE))


def with_config(**values: Any) -> Callable[[Model], None]:
    return lambda model: setattr(model, "config", SimpleNamespace(**values))


def into(kind: type[Model]) -> Callable[[Model], None]:
    return lambda model: setattr(model, "__class__", kind)


def into_dropping(model: Model) -> None:
    with_block(Drops)(model)
    into(DropsFirst)(model)


REFUSED: dict[str, tuple[Callable[[Model], None], str]] = {
    "mask": (changed(is_causal=False, attn_mask=torch.ones(9, 9, dtype=torch.bool, device=DEVICE).tril()), "block 'blocks.0' calls it with a mask"),
    "dropout": (changed(dropout_p=0.1), "calls it with dropout"),
    "not causal": (changed(is_causal=False), "calls it with is_causal=False"),
    "prefix": (with_block(Prefixed), r"block 'blocks.1' calls it with queries and keys of \(2, 4, 10, 8\) and \(2, 2, 10, 8\) for 9 tokens"),
    "no attention": (with_block(Eager), "block 'blocks.1' does not call it"),
    "no positions": (into(WithoutPositions), "nothing was computed with position_ids of a tile of a sequence"),
    "positions of its own": (lambda model: setattr(model, "positions", OwnPositions(64, WIDTH)), r"'positions' \(OwnPositions\) makes positions"),
    "convolution": (with_block(Convolves), "'blocks.1.short' is a Conv1d"),
    "outside": (into(AttendsOutside), "called outside of the model's blocks"),
    "checkpoint inside": (with_block(Checkpointed), "called by a checkpoint inside of block 'blocks.1'"),
    "reentrant checkpoint inside": (with_block(Reentrant), "called without a graph in block 'blocks.1'"),
    "checkpoint around": (into(CheckpointedAround), "by a checkpoint around block 'blocks.0' and more"),
    "no backward": (into_dropping, "backward has not come to all of its calls"),
    "in place": (into(InPlace), r"modified by an inplace operation \(aten::add_\)"),
    "window": (with_config(sliding_window=34), "sliding_window is 34, less than the sequence's 35 tokens"),
    "chunks": (with_config(attention_chunk_size=8, layer_types=["chunked_attention"]), "attention_chunk_size is 8"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_be_wrong_is_refused_by_name(case: str, tmp_path: Path) -> None:
    model, _ = made()
    change, message = REFUSED[case]
    change(model)
    with optimizer_of(model, stage=3) as optimizer, away(model, tmp_path):
        with pytest.raises((RuntimeError, ValueError), match=message):
            optimizer.accumulate(zk.sequence_tiles(batch_of(), 9), loss_of)
        assert all(param.grad is None for param in model.parameters())


def test_a_window_that_no_token_comes_to_is_none() -> None:
    of_others = ({"sliding_window": 4, "layer_types": ["full_attention"]}, {"sliding_window": 4, "use_sliding_window": False})
    for values in ({"sliding_window": LENGTH}, *of_others):
        model, _ = made()
        with_config(**values)(model)
        with optimizer_of(model) as optimizer:
            optimizer.accumulate(zk.sequence_tiles(batch_of(), 9), loss_of)


def test_positions_may_be_for_blocks_or_for_nobody() -> None:
    model, twin = made()
    for each in (model, twin):
        into(PositionsInBlocks)(each)
        del each.positions
        for block in each.blocks:
            block.__class__ = PositionsInBlocks.Block
    loss, grads = plain(twin, batch_of())
    with optimizer_of(model, stage=2) as optimizer:
        losses = optimizer.accumulate(zk.sequence_tiles(batch_of(), 9), loss_of)
        assert float(sum(losses)) == pytest.approx(loss, rel=1e-6)
        assert distance(model, grads) < 2e-6

    def without(model: nn.Module, tile: SequenceTile) -> Tensor:
        given = dict(tile, position_ids=torch.zeros(1, tile.tokens, dtype=torch.int64, device=DEVICE))
        del tile["position_ids"]
        return loss_of(model, given)

    model, _ = made()
    with optimizer_of(model, stage=2) as optimizer:
        assert len(optimizer.accumulate(zk.sequence_tiles(batch_of(), 9), without)) == 4


@pytest.mark.parametrize("how", ["pad", "slice"])
def test_labels_that_a_model_shifts_once_more_are_refused(how: str) -> None:
    def of(model: nn.Module, tile: SequenceTile) -> Tensor:
        logits, labels = model(tile["input_ids"], tile["position_ids"]), tile["labels"]
        logits, labels = (logits, F.pad(labels, (0, 1), value=-100)[:, 1:]) if how == "pad" else (logits[..., :-1, :], labels[..., 1:])
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / tile["num_items_in_batch"]

    model, _ = made()
    with optimizer_of(model) as optimizer, pytest.raises(RuntimeError, match="the model shifts them once more"):
        optimizer.accumulate(zk.sequence_tiles(batch_of(), 9), of)


def test_tiles_that_are_missing_or_in_another_order_are_refused() -> None:
    model, _ = made()
    tiles = zk.sequence_tiles(batch_of(), 9)
    others = zk.sequence_tiles(batch_of(), 9)
    with optimizer_of(model) as optimizer:
        mixed = [*tiles[:2], *others[2:]], [*tiles[:2], dict(tiles[2]), *tiles[2:]]
        for wrong in (tiles[::-1], tiles[1:], tiles[:-1], [*tiles[:2], *tiles[3:]], *mixed):
            with pytest.raises(ValueError, match="all tiles of a batch that sequence_tiles has cut, one after the other, in order"):
                optimizer.accumulate(wrong, loss_of)


def test_what_cannot_be_cut_is_refused_by_name() -> None:
    batch = batch_of()
    ids = batch["input_ids"]
    for tokens in (1, 0, 2.5, True):
        with pytest.raises(ValueError, match="tokens must be a number of tokens, 2 or more"):
            zk.sequence_tiles(batch, tokens)  # type: ignore[arg-type]
    for wrong, message in (
        ({"input_ids": ids}, "must have input_ids and labels"),
        ({**batch, "labels": ids[:, 1:]}, "must have input_ids and labels"),
        ({**batch, "attention_mask": torch.ones_like(ids).tril()}, "attention_mask must be 1 for all tokens"),
        ({**batch, "position_ids": ids}, "position_ids must count from 0"),
        ({**batch, "inputs": ids[:, :3]}, "inputs cannot be cut into tiles of tokens"),
        ({**batch, "use_cache": True}, "use_cache cannot be cut into tiles of tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            zk.sequence_tiles(wrong, 9)


def test_padding_on_the_right_needs_no_mask_where_it_is_no_target() -> None:
    batch = batch_of()
    mask = torch.ones_like(batch["input_ids"])
    mask[1, 20:] = 0
    with pytest.raises(ValueError, match="attention_mask must be 1"):
        zk.sequence_tiles({**batch, "attention_mask": mask}, 9)  # labels there are targets
    batch["labels"][1, 20:] = -100
    for good in (mask, mask.bool(), mask.float()):
        assert len(zk.sequence_tiles({**batch, "attention_mask": good}, 9)) == 4
    for wrong in (mask.flip(1), mask[:, None], mask * 2, mask.bool().tolist()):
        with pytest.raises(ValueError, match="attention_mask must be 1"):
            zk.sequence_tiles({**batch, "attention_mask": wrong}, 9)


def test_tiles_have_positions_and_targets_of_the_whole_sequence() -> None:
    batch = batch_of(length=19)
    extra = {"attention_mask": torch.ones(2, 19), "position_ids": torch.arange(19)[None], "token_type_ids": torch.arange(38).view(2, 19)}
    tiles = zk.sequence_tiles({**batch, **extra}, 6)
    assert [tile.tokens for tile in tiles] == [6, 6, 7]  # a tile of one token goes to the one before
    assert torch.equal(torch.cat([tile["input_ids"] for tile in tiles], 1), batch["input_ids"])
    assert torch.equal(torch.cat([tile["position_ids"] for tile in tiles], 1), torch.arange(19)[None])
    assert torch.equal(torch.cat([tile["token_type_ids"] for tile in tiles], 1), extra["token_type_ids"])
    targets = torch.cat([tile["shift_labels"] for tile in tiles], 1)
    assert torch.equal(targets[:, :-1], batch["labels"][:, 1:]) and bool((targets[:, -1] == -100).all())
    assert {tile["num_items_in_batch"] for tile in tiles} == {int((targets != -100).sum())}
    assert "attention_mask" not in tiles[0]
    assert {tile["num_items_in_batch"] for tile in zk.sequence_tiles([{**batch, "num_items_in_batch": 7}, batch], 6)} == {7}


@pytest.mark.device
@pytest.mark.parametrize("has_kernel", [True, False])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 2e-6), (torch.bfloat16, 3e-2)])
def test_parts_of_attention_put_together_are_attention(
    dtype: torch.dtype, bound: float, has_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys in three parts, the last of them causal; heads that share keys; without the kernel also values of another width."""
    if not has_kernel:
        monkeypatch.setattr(attention, "_on_host", lambda *_: False)
        monkeypatch.setattr(attention, "_ROWS", 4)
    torch.manual_seed(0)
    query = torch.randn(2, 4, 7, 16, dtype=dtype, device=DEVICE)
    key, value = torch.randn(2, 2, 25, 16, dtype=dtype, device=DEVICE), torch.randn(2, 2, 25, 16 if has_kernel else 12, dtype=dtype, device=DEVICE)
    grad = torch.randn(2, 4, 7, value.shape[-1], dtype=dtype, device=DEVICE)
    cuts = [(slice(18, 25), Kind(0.3, True)), (slice(9, 18), Kind(0.3, False)), (slice(0, 9), Kind(0.3, False))]
    (out, lse), *others = [attend(query, key[:, :, part], value[:, :, part], kind) for part, kind in cuts]
    for other in others:
        out, lse = merge(out, lse, *other)
    out = out.to(dtype)
    found = [attend_backward(grad, query, key[:, :, part], value[:, :, part], out, lse, kind) for part, kind in cuts]
    got = [sum(part[0].double() for part in found), *(torch.cat([part[place].double() for part in found[::-1]], 2) for place in (1, 2))]

    leaves = [tensor.double().requires_grad_() for tensor in (query, key, value)]
    mask = torch.ones(7, 25, dtype=torch.bool, device=DEVICE).tril(18)
    heads = [leaves[0], *(leaf.repeat_interleave(2, 1) for leaf in leaves[1:])]
    weights = (heads[0] @ heads[1].mT * 0.3).masked_fill(~mask, -torch.inf)
    want = weights.softmax(-1) @ heads[2]
    want.backward(grad.double())
    for mine, theirs in ((out.double(), want), *zip(got, (leaf.grad for leaf in leaves), strict=True)):
        assert float((mine - theirs).abs().max() / theirs.abs().max()) < bound  # type: ignore[operator, union-attr]


@pytest.mark.device
def test_a_tensor_that_rests_is_itself_in_everything_but_memory(tmp_path: Path) -> None:
    x = torch.randn(3, 8, 5, device=DEVICE, requires_grad=True)
    with away(nn.Linear(1, 1).to(DEVICE), tmp_path) as offload:
        y = (2 * x).transpose(1, 2)
        resting = rest(y, offload)
        assert type(resting) is Resting and resting.shape == y.shape and resting.stride() == y.stride() and resting.requires_grad
        assert repr(resting) == "Resting(shape=(3, 5, 8), dtype=torch.float32)"
        values = y.detach().clone()
        del y
        assert torch.equal(resting, values) and torch.equal(resting[:, 1], values[:, 1])
        (resting * values).sum().backward()
        assert torch.equal(x.grad, 2 * values.transpose(1, 2))  # type: ignore[arg-type]
        total = torch.zeros_like(values)
        total.add_(resting.detach())
        assert torch.equal(total, values)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            resting.add_(1)
        del resting
    assert rest(values, None) is values


@pytest.mark.skipif(DEVICE.type != "cpu", reason="what leaves a device is copied, and then written")
def test_of_what_has_been_written_no_request_stays(tmp_path: Path) -> None:
    with away(nn.Linear(1, 1), tmp_path) as offload:
        resting = [rest(torch.full((64, 64), float(number)), offload) for number in range(9)]
        blocks = list(offload.blocks.values())
        assert sum(block.device is None for block in blocks) >= 8
        assert all(block.event is COMPLETED and block.slot.request is COMPLETED for block in blocks if block.device is None)
        assert all(bool((tensor == number).all()) for number, tensor in enumerate(resting))
        del resting, blocks


def over_ranks(stage: int) -> float:
    """Each rank has a sequence of its own, of another number of tiles."""
    rank = torch.distributed.get_rank()
    model, twin = made()
    batches = [batch_of(1), batch_of(2, 23)]
    for batch in batches:  # the mean over ranks, each with its own mean
        plain(twin, batch)
    grads = {name: param.grad / 2 for name, param in twin.named_parameters()}  # type: ignore[operator]
    with optimizer_of(model, stage=stage) as optimizer:
        optimizer.accumulate(zk.sequence_tiles(batches[rank], 9), loss_of)
        first = distance(model, grads)
        optimizer.zero_grad()
        if rank:
            model.blocks[1].options["dropout_p"] = 0.5  # type: ignore[union-attr, index]
        with pytest.raises(RuntimeError, match="calls it with dropout" if rank else "rank 1"):
            optimizer.accumulate(zk.sequence_tiles(batches[rank], 9), loss_of)
    return first


def test_ranks_have_sequences_of_their_own() -> None:
    for case in run_world(2, over_ranks, [2, 3]):
        assert all(first < 2e-6 for first in case)
